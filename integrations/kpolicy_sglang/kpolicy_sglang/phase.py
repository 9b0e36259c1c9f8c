"""One of SGLang's two phases: what it captured, what steps cost, and the decision for each size.

SGLang has one kind of graph a phase, and asks yes or no of each batch. Whatever else refuses a graph (embeddings,
LoRA, hidden states) stays SGLang's question; ours is the size: tokens of a prefill batch, requests of a decode batch.
So a decision is made once a size, by the policy itself, and a step reads it from a list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import attrs

from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable, Curve, HostCost, analytic_costs
from kpolicy.decision import Decision, Launch
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Mode, Part, Rows
from kpolicy.policies import get_policy
from kpolicy.policies.base import PolicyContext
from kpolicy.reasons import Reason
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchNumbers
from kpolicy_sglang.failures import Failures

__all__ = ["DECODE", "PREFILL", "MixedCost", "Phase", "steady", "table_of"]

DECODE, PREFILL = "decode", "prefill"
RULE = "sglang"
"""The policy that decides until costs are known: the replica of SGLang's own rule."""
NOISE = 0.02
"""Of an eager step's measured time: a graph that is longer by no more is taken all the same."""
PADDING = 0.125
"""Of a graph's size: a batch that leaves no more of it empty is taken for one of its size where the graph is as fast as
an eager step of that size."""
PROMPT_TOKENS = 1024
"""Most tokens of a prompt where steps are timed, but for long prompts themselves: a server's steps have several."""
EAGER, REPLAYS, BEYOND = 0, 1, 2
"""Verdicts on a size: no graph, one, and one that pads it further than SGLang's own limit."""
_HOST = HostCost(0.0)


class _Verdicts(dict[int, int]):
    """Verdicts by size, made as they are asked for."""

    def __init__(self, decide: Callable[[int], int]) -> None:
        super().__init__()
        self._decide = decide

    def __missing__(self, size: int) -> int:
        return self._decide(size)


class Phase:
    """See the module's docstring.

    Args:
        name: `DECODE` or `PREFILL`.
        sizes: captured sizes, rising: requests, or tokens.
        most: the largest batch of the phase.
        full: whether a graph covers attention too.
        width: tokens of a decode row.
    """

    def __init__(self, name: str, sizes: Sequence[int], most: int, *, full: bool, width: int = 1) -> None:
        self.name = name
        self.sizes = tuple(sizes)
        self.largest = self.sizes[-1]
        self.width = width
        self._force: bool | None = None
        self.coupled = False
        """Whether ranks take each step together, so that they vote."""
        self.agreed = False
        """Whether ranks have voted on the batch in hand, so that nothing of it may be decided again."""
        self.idle_rank = False
        """Whether prompts ran eagerly because a rank had nothing to run beside them, which `State.tick` says once."""
        self.refusal: tuple[Callable[..., Any], Mapping[str, Any]] | Reason | None = None
        """Of the batch in hand what 0.5.23 said no to, its question and what was asked, or else why a no may follow."""
        self.rule = f"{RULE}:prefill=full" if full and name == PREFILL else RULE
        self.policy = self.rule
        self.costs: CostTable | None = None
        self.steps = [0] * (max(most, self.largest) + 2)
        """Steps by size that ran as decided; the last is for larger ones."""
        self.plain = bytearray(len(self.steps))
        """1 for each size of which a step that SGLang says yes to is only counted, see `kpolicy_sglang.dispatch`."""
        self.refused: Counter[tuple[Reason, int]] = Counter()
        """Steps by reason and size that would have replayed, but for what SGLang itself refused."""
        self.voted: Counter[tuple[int, int]] = Counter()
        """Steps by size and captured size that replayed because ranks agreed on it, whatever the policy says."""
        self.names: dict[str, Any] | None = None
        """Names of the runner's module, where 0.5.16 looks up its limit on padding."""
        self._log: Callable[[Phase, Any, int, Reason | None, int | None], None] | None = None
        self.failures = Failures()
        self._most = len(self.steps) - 2
        self.keys = tuple(self._key(size, full) for size in self.sizes)
        tokens = max(self._most * width, self.largest * width)
        self._settings = Settings(
            max_num_reqs=self._most if name == DECODE else 1 << 16,
            max_num_tokens=tokens,
            num_speculative_tokens=width - 1,
        )
        self._claims = Claims.at_level("mixed")
        self._limit = inf if name == DECODE else 0.0
        self._verdicts = _Verdicts(self._decide)
        self.verdict: Callable[[int], int] = self._verdicts.__getitem__
        """`EAGER`, `REPLAYS` or `BEYOND`, of a batch of that size. Decided once; a look-up after that."""
        self._decisions: list[Decision | None] = []
        self.known_us: dict[int, float] = {}
        """`us` by size, of those that were costed: all that steps ask for, since every size is decided at start."""
        self._select: Any = None
        self._compile(self.rule, analytic_costs(), Objective())
        self._by_own_rule: Any = self._select

    @property
    def force(self) -> bool | None:
        """What every question is answered with while costs are measured."""
        return self._force

    @force.setter
    def force(self, answer: bool | None) -> None:
        self._force = answer
        self._list_plain()

    @property
    def log(self) -> Callable[[Phase, Any, int, Reason | None, int | None], None] | None:
        """Called with each step: its size, why SGLang refused it, and the captured size that ranks agreed on."""
        return self._log

    @log.setter
    def log(self, write: Callable[[Phase, Any, int, Reason | None, int | None], None] | None) -> None:
        self._log = write
        self._list_plain()

    def _key(self, size: int, full: bool) -> GraphKey:
        if self.name == DECODE:
            return GraphKey(Part.FULL, size * self.width, size, query_len=self.width)
        return GraphKey(Part.FULL if full else Part.PIECEWISE, size)

    def install(self, policy: str, costs: CostTable | None, objective: Objective) -> None:
        """Decide by a policy from now on; one that reads costs needs them."""
        if costs is None and get_policy(policy).reads_costs:
            return
        self.costs = costs
        policy = self.rule if policy == RULE else policy
        self._compile(policy, costs or analytic_costs(), objective)

    def _compile(self, policy: str, costs: CostTable, objective: Objective) -> None:
        context = PolicyContext(
            claims=self._claims, ladder=CaptureLadder(self.keys), costs=costs, settings=self._settings,
            objective=objective,
        )  # fmt: skip
        self.policy = policy
        self._select = get_policy(policy).compile(context).select
        self._verdicts.clear()
        self._list_plain()
        self._decisions = [None] * len(self.steps)
        self.known_us.clear()

    def decide_all(self) -> None:
        """Decide every size and cost it: the first step of each would wait for it. One that raises ends it."""
        for size in range(1, self._most + 1):
            self.verdict(size)
            self.us(size)
            if self.failures.counts:
                return

    # What a step asks.

    def replays(self, size: int) -> bool:
        """Whether a batch of that size is to replay the next larger graph."""
        return self.verdict(size) != EAGER

    def wants_eager(self, size: int) -> bool:
        """Whether the policy has a batch eager that a captured graph would hold. SGLang's rule has no such decode."""
        return size <= self.largest and not self.replays(size)

    def _decide(self, size: int) -> int:
        bucket = self.bucket(size)
        if bucket is None:
            return EAGER
        found = EAGER if self.decision(size).mode is Mode.EAGER else BEYOND if bucket > self._limit * size else REPLAYS
        self._verdicts[size] = found
        self.plain[size] = found == REPLAYS and self._only_counts()
        return found

    def limited(self, limit: int) -> None:
        """Tell SGLang's limit on padding of prompts, in times the tokens: until then all graphs are beyond it."""
        self._limit = limit
        known = list(self._verdicts)
        self._verdicts.clear()
        self._list_plain()
        for size in known:
            self.verdict(size)

    def _only_counts(self) -> bool:
        """Whether nothing is to be done but to count where a size replays as others do."""
        return self._log is None and self._force is None and not self.coupled

    def _list_plain(self) -> None:
        """Set up `plain` for the sizes that are decided."""
        self.plain[:] = bytes(len(self.plain))
        if self._only_counts():
            for size, verdict in self._verdicts.items():
                self.plain[size] = verdict == REPLAYS

    # What is asked besides.

    def decision(self, size: int) -> Decision:
        """The policy's decision for a batch of that size."""
        at = min(size, self._most + 1)
        found = self._decisions[at] if size <= self._most else None
        if found is None:
            found = self._made(size)
            if size <= self._most:
                self._decisions[at] = found
        return found

    def _made(self, size: int) -> Decision:
        """What the policy decides; SGLang's own rule where it raises, or decides what can't be costed."""
        numbers = self.numbers(size)
        try:
            found = self._select(*numbers)
            if not isinstance(found, Decision):
                raise TypeError(f"it decided {found!r}, which isn't a Decision")
            found = self._kept_in_graph(found, size, numbers)
            if self.costs is not None and size:
                self.known_us[size] = self.costs.cost(found.launches, numbers).cycle_us
            return found
        # A policy is anyone's code, and serving goes on without it.
        except Exception as error:  # noqa: BLE001
            self.failures.note(f"policy {self.policy!r} ({self.name})", error)
            decided: Decision = self._by_own_rule(*numbers)
            return decided

    def _kept_in_graph(self, found: Decision, size: int, numbers: BatchNumbers) -> Decision:
        """The decision, but for an eager step that costs little less: within `NOISE`, or by little padding.

        A graph leaves the host free for the scheduler, which a step timed alone doesn't show: an eager step takes the
        host several times as long.
        """
        bucket = self.bucket(size)
        if found.reason is not Reason.EAGER_IS_CHEAPER or bucket is None or self.costs is None:
            return found
        key = self.keys[self.sizes.index(bucket)]
        launches = (Launch(Rows.ALL, key),)
        most_us = self.costs.cost(found.launches, numbers).cycle_us
        if bucket - size <= PADDING * bucket:
            most_us = self.costs.cost(found.launches, self.numbers(bucket)).cycle_us
        if self.costs.cost(launches, numbers).cycle_us > most_us * (1 + NOISE):
            return found
        return attrs.evolve(found, mode=Mode(key.part.value), launches=launches, reason=Reason.GRAPH_FITS)

    def numbers(self, size: int, num_reqs: int = 1) -> BatchNumbers:
        """The counts of a batch of that size."""
        if self.name == DECODE:
            tokens = size * self.width
            return BatchNumbers(size, self.width, tokens, tokens, max_query_len=self.width, max_kv_len=self.width)
        return BatchNumbers(
            0, 0, 0, 0, num_reqs, size, size, size * (size + 1) // 2, size, size, num_reqs, num_tokens=size,
            num_reqs=num_reqs,
        )  # fmt: skip

    def bucket(self, size: int) -> int | None:
        """The captured size that SGLang pads to; None above the largest."""
        at = bisect_left(self.sizes, size)
        return self.sizes[at] if at < len(self.sizes) else None

    def us(self, size: int) -> float:
        """Microseconds of a batch of that size as it would be run; 0.0 while nothing is known."""
        if self.costs is None or not size:
            return 0.0
        found = self.known_us.get(size)
        if found is None:
            found = self.known_us[size] = self.costs.cost(self.decision(size).launches, self.numbers(size)).cycle_us
        return found

    def forget_steps(self) -> None:
        """Count from nothing: what ran so far was no request's."""
        self.steps[:] = [0] * len(self.steps)
        self.refused.clear()
        self.voted.clear()
        self.idle_rank = False

    def ran(self, size: int, batch: Any) -> None:
        """Count a step that runs as decided."""
        self.steps[size if size <= self._most else self._most + 1] += 1
        if self._log is not None:
            self._log(self, batch, size, None, None)

    def ran_plainly(self, size: int, batch: Any) -> None:
        """The same of one that replays as others of its size do: those have to be counted, and no more."""
        self.ran(size, batch)
        self.plain[size] = self._only_counts()

    def ran_as_voted(self, size: int, captured: int, batch: Any) -> None:
        """Count a step that replays a graph of that size because ranks agreed on it."""
        self.voted[size, captured] += 1
        if self._log is not None:
            self._log(self, batch, size, None, captured)

    def was_refused(self, size: int, batch: Any, reason: Reason) -> None:
        """Count a step that SGLang refused the graph which the policy wanted. Of the next one it is asked once."""
        self.refused[reason, size] += 1
        if size <= self._most:
            self.plain[size] = 0
        if self._log is not None:
            self._log(self, batch, size, reason, None)


@attrs.frozen
class MixedCost:
    """Microseconds of mixed batches as SGLang itself runs them, by all tokens: with a few decode rows, and with many.

    What a decode row takes in a mixed batch grows with the prompt beside it in some attention kernels, and is nothing
    in others; a line through the two says which.
    """

    few: Curve
    many: Curve
    few_rows: int
    many_rows: int
    _known: dict[int, tuple[float, float]] = attrs.field(factory=dict, init=False, repr=False, eq=False)
    """Both curves by tokens, as far as they were asked."""

    def us(self, tokens: int, decodes: int) -> float:
        """Microseconds of a mixed batch of so many tokens, the decode rows among them."""
        known = self._known.get(tokens)
        if known is None:
            known = self._known[tokens] = self.few.at(tokens), self.many.at(tokens)
        few, many = known
        return max(few + max(many - few, 0.0) * (decodes - self.few_rows) / (self.many_rows - self.few_rows), 0.0)


def table_of(version: str, graph_us: dict[int, float], eager_us: dict[int, float]) -> CostTable:
    """A cost table of whole steps by size, measured from start to end: host and device together.

    What attention takes on long contexts is in neither, and is the same in both.

    Args:
        version: names the table.
        graph_us: microseconds by captured size.
        eager_us: microseconds by size.
    """
    graph, eager = steady(graph_us), steady(eager_us)
    return CostTable(
        version=version, measured=True, full=graph, piecewise=graph, eager=eager,
        host_full=_HOST, host_piecewise=_HOST, host_eager=_HOST,
    )  # fmt: skip


def steady(us: Mapping[int, float]) -> Curve:
    """A curve that doesn't fall: what a larger step took a smaller one does too, and whatever else ran only adds.

    SGLang pads to the next size, so a smaller graph is never passed over for a larger one.
    """
    sizes = sorted(us)
    times = [us[size] for size in sizes]
    for i in range(len(times) - 2, -1, -1):
        times[i] = min(times[i], times[i + 1])
    return Curve(tuple(sizes), tuple(times))
