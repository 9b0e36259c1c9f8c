"""How each random step runs: in a way that was taken seldom, or as a policy decides; in turn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from kpolicy.attention import Claims
from kpolicy.costs import analytic_costs
from kpolicy.decision import Decision
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes, plan_keys
from kpolicy.policies import OWN, get_policy
from kpolicy.policies.base import PolicyContext, admits
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchNumbers
from kpolicy.testing.executors import all_decisions

DRAFTING = Settings(max_num_reqs=6, max_num_tokens=24, num_speculative_tokens=2)
PLAIN = Settings(max_num_reqs=6, max_num_tokens=24)
SIZES = {
    DRAFTING: CaptureSizes((3, 9, 18), (8, 24), (8, 24)),
    PLAIN: CaptureSizes((3, 6), (8, 24), (8, 24)),
}

POLICIES: dict[str, str] = {
    **dict.fromkeys(OWN, "throughput"),
    "auto, for latency": "latency",
    "split:form=beside": "throughput",
    "split:form=decodes_beside": "throughput",
    "vllm:runner=v1": "throughput",
    "vllm:version=0.23,runner=v1": "throughput",
    "vllm:version=0.23,runner=v2": "throughput",
    "sglang:prefill=full": "throughput",
    "tensorrt_llm:enable_padding=true": "throughput",
    "kunlun:threshold=8": "throughput",
}
"""What every built-in policy is asked as, the replicas in the forms that choose otherwise; with its objective."""


def _policy(name: str) -> Any:
    return get_policy(name.partition(", ")[0])


def all_keys(claims: Claims) -> tuple[GraphKey, ...]:
    """Graphs of each kind that attention admits, in several sizes, and all that a policy plans of those sizes."""
    keys = dict.fromkeys(plan_keys(SIZES[DRAFTING], claims, DRAFTING))
    for settings, sizes in SIZES.items():
        for name in POLICIES:
            keys |= dict.fromkeys(_policy(name).plan(sizes, claims, settings))
    return tuple(key for key in keys if admits(claims, key))


def label(decision: Decision) -> str:
    """What steps are counted by: the mode and form, and what the graph holds."""
    parts = [str(decision.label)]
    for launch in decision.launches:
        if launch.key is None:
            parts.append("eager")
        else:
            key = launch.key
            parts.append(
                key.part.value if key.part.value == "piecewise"
                else f"q={key.query_len}" if key.query_len else "varlen" if key.max_query_len else "mixed"
            )  # fmt: skip
    return " ".join(parts)


@attrs.define
class Chooser:
    """Chooses ways for the steps of one run of random steps.

    Every other step is a policy's, the one that was asked least; a policy sees the captured graphs that it plans itself
    for this deployment. The others run in one of the legal ways that were taken least.

    Args:
        claims: what attention supports.
        captured: the graphs there are.
        settings: the deployment that policies decide for: `DRAFTING` or `PLAIN`.
        rng: breaks ties.

    Attributes:
        ways: steps by `label`, of all kinds.
        policies: steps by policy and `label`.
    """

    claims: Claims
    captured: Sequence[GraphKey]
    settings: Settings
    rng: random.Random
    ways: Counter[str] = attrs.field(factory=Counter)
    policies: dict[str, Counter[str]] = attrs.field(factory=dict)
    _selects: dict[str, Any] = attrs.field(factory=dict, init=False)
    _turn: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        captured = set(self.captured)
        for name, objective in POLICIES.items():
            policy = _policy(name)
            planned = policy.plan(SIZES[self.settings], self.claims, self.settings)
            context = PolicyContext(
                claims=self.claims, ladder=CaptureLadder([key for key in planned if key in captured]),
                costs=analytic_costs(), settings=self.settings, objective=Objective.parse(objective),
            )  # fmt: skip
            self._selects[name] = policy.compile(context).select
            self.policies.setdefault(name, Counter())

    def choose(self, numbers: BatchNumbers) -> Decision:
        """How the step with these numbers runs."""
        self._turn += 1
        if self._turn % 2 or not self.policies:
            legal = all_decisions(numbers, self.captured)
            least = min(self.ways[label(each)] for each in legal)
            decision = self.rng.choice([each for each in legal if self.ways[label(each)] == least])
        else:
            fewest = min(counts.total() for counts in self.policies.values())
            name = self.rng.choice([name for name, counts in self.policies.items() if counts.total() == fewest])
            decision = self._selects[name](*numbers)
            self.policies[name][label(decision)] += 1
        self.ways[label(decision)] += 1
        return decision
