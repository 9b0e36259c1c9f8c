"""Random deployments and batches for the vLLM oracle: what both the replica and the real code are given."""

from __future__ import annotations

import random
from typing import Any

import attrs

from kpolicy.attention.support import Claims, SupportLevel
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode
from kpolicy.policies.vllm import VllmPolicy, vllm
from kpolicy.policies.vllm_resolve import VllmMode
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape

LEVELS = (SupportLevel.MIXED, SupportLevel.UNIFORM, SupportLevel.SINGLE, SupportLevel.NONE)
VLLM_LEVEL = {
    SupportLevel.MIXED: "ALWAYS",
    SupportLevel.UNIFORM: "UNIFORM_BATCH",
    SupportLevel.SINGLE: "UNIFORM_SINGLE_TOKEN_DECODE",
    SupportLevel.NONE: "NEVER",
}


@attrs.frozen
class Deployment:
    """One random start of vLLM."""

    policy: VllmPolicy
    level: SupportLevel
    claims: Claims
    settings: Settings
    sizes: tuple[int, ...]

    @property
    def capture_sizes(self) -> CaptureSizes:
        return CaptureSizes((), self.sizes, self.sizes)


@attrs.frozen
class Row:
    """One request of a batch: tokens this step, tokens already in KV, and whether it still runs its prompt."""

    new: int
    context: int
    prefilling: bool


@attrs.frozen
class Batch:
    """One random batch, request by request."""

    rows: tuple[Row, ...]
    loras: int
    valid: frozenset[str] | None
    invalid: frozenset[str] | None

    @property
    def num_tokens(self) -> int:
        return sum(row.new for row in self.rows)

    @property
    def longest(self) -> int:
        return max(row.new for row in self.rows)

    @property
    def shape(self) -> BatchShape:
        """The same batch for kpolicy; vLLM's allowed modes become forbidden ones."""
        allowed = (self.valid or frozenset(_MODES)) - (self.invalid or frozenset())
        return BatchShape(
            decodes=[(row.new, 1) for row in self.rows if not row.prefilling],
            prefills=[(row.new, row.context) for row in self.rows if row.prefilling],
            num_active_loras=self.loras,
            forbidden=[mode for name, mode in _MODES.items() if name not in allowed],
        )


_MODES = {"NONE": Mode.EAGER, "PIECEWISE": Mode.PIECEWISE, "FULL": Mode.FULL}


def draw_deployment(rng: random.Random, version: str, runner: str) -> Deployment:
    """A deployment of that runner."""
    k = rng.choice([0, 0, 0, 1, 2, 3, 6])
    most = rng.choice([8, 33, 100, 300, 300])
    settings = Settings(
        max_num_reqs=rng.choice([1, 2, 6, 8, 16, 17, 40, 128]),
        max_num_tokens=100_000,
        num_speculative_tokens=k,
        max_loras=rng.choice([0, 0, 1, 2, 3, 4, 7]),
    )
    # Modes and levels with graphs come more often than those without.
    mode, newest = rng.choice([*VllmMode, *list(VllmMode)[1:] * 4]), runner == "v2" and version == "0.33"
    extra: dict[str, Any] = {}
    if newest and k and rng.random() < 0.3:
        extra["drafts"] = f"1-{rng.randint(1, 4)}:{k}/{rng.randint(5, 12)}-20:{rng.randint(0, k)}"
    elif newest and mode.decode is Mode.FULL and rng.random() < 0.3:
        extra["varlen"] = True
    policy = vllm(
        version=version,
        runner=runner,
        mode=mode,
        specialize_lora=rng.random() < 0.7,
        specialize_active_lora=rng.random() < 0.5,
        piecewise_split=rng.random() < 0.7,
        # The function under test comes after what start-up takes back where no pieces can be had.
        breakable=True,
        **extra,
    )
    level = rng.choice([*LEVELS, *LEVELS[:2] * 3])
    claims = Claims.at_level(level)
    if "varlen" in extra:
        level = rng.choice([SupportLevel.MIXED, SupportLevel.UNIFORM])
        claims = Claims.at_level("mixed" if level is SupportLevel.MIXED else "varlen_decode")
    sizes = tuple(sorted(rng.sample(range(1, most + 1), rng.randint(1, min(most, 24)))))
    return Deployment(policy, level, claims, settings, sizes)


def draw_batch(rng: random.Random, deployment: Deployment, *, beyond: bool = False) -> Batch:
    """A batch around the deployment's sizes: decodes of every kind, prompt chunks, and mixes of them.

    Args:
        rng: where it comes from.
        deployment: what it is a batch of.
        beyond: whether some batches have more requests than the deployment allows.
    """
    settings, v1 = deployment.settings, deployment.policy.runner == "v1"
    q, most = settings.query_len, settings.max_num_reqs
    if beyond and rng.random() < 0.05:
        most = 2 * most + 1
    kind = rng.choice(["uniform", "uniform", "drafts", "prefill", "mixed", "chunks"])
    # Mostly within the captured sizes, where dispatch has something to choose.
    within = max(1, min(most, deployment.sizes[-1] // rng.choice([1, q])))
    count = rng.randint(1, most if rng.random() < 0.2 else within)
    rows: list[Row] = []
    if kind == "uniform":
        rows = [Row(rng.choice([1, q, q, q, 2]), 50, False)] * count
    elif kind == "drafts":
        rows = [Row(rng.randint(1, q), 50, False) for _ in range(count)]
    elif kind == "chunks":  # prompt chunks shaped like decodes
        rows = [Row(rng.choice([1, q]), rng.choice([0, 9]), True)] * count
        rows += [Row(rows[0].new, 50, False)] * rng.randint(0, most - count)
    if kind in ("prefill", "mixed") or not rows:
        decodes = rng.randint(0, max(0, min(count, most - 1))) if kind == "mixed" else 0
        rows = [Row(rng.choice([1, q]), 50, False)] * decodes
        reach = max(1, int(rng.choice([0.3, 0.6, 1.2]) * deployment.sizes[-1]))
        rows += [Row(rng.randint(1, reach), rng.choice([0, 7]), True) for _ in range(rng.randint(1, 3))][
            : most - decodes
        ]
    valid = invalid = None
    if v1 and rng.random() < 0.3:
        if rng.random() < 0.6:
            valid = frozenset(rng.sample(list(_MODES), rng.randint(1, 3)))
        if rng.random() < 0.6:
            invalid = frozenset(rng.sample(list(_MODES), rng.randint(1, 2)))
    elif not v1 and rng.random() < 0.1:
        valid = frozenset({"NONE"})  # the runner's forced eager
    loras = rng.choice([0, rng.randint(0, settings.max_loras)]) if settings.max_loras else 0
    return Batch(tuple(rows), loras, valid, invalid)
