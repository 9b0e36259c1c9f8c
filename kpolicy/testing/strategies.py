"""Hypothesis strategies for batches, ladders, support, costs and contexts. Needs the `testing` extra (hypothesis)."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from kpolicy.attention import Claims, HostParams, SupportLevel
from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.ladders import CaptureLadder, CaptureSizes, plan_keys
from kpolicy.modes import Mode
from kpolicy.policies.base import Policy, PolicyContext
from kpolicy.reasons import Basis
from kpolicy.served_host import ServedHost
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import GAP_TAIL_US, NO_FACTS, WAITING_REQS, BatchShape
from kpolicy.step_effects import StepEffects

__all__ = ["claims", "contexts", "cost_tables", "ladders", "settings", "shapes", "sizes"]


# Strategies are made once: making them anew in every draw is most of hypothesis's time.
_MOST_TOKENS = 256
_SETTINGS = st.builds(
    Settings,
    max_num_reqs=st.sampled_from([*range(2, 25), 40]),
    max_num_tokens=st.integers(64, _MOST_TOKENS),
    num_speculative_tokens=st.sampled_from([0, 0, 1, 3]),
    max_loras=st.sampled_from([0, 0, 0, 2, 4]),
)
# Mostly small, so that most batches fit some graph; a few over every limit.
_COUNTS = st.sampled_from([1, 1, 2, 2, 3, 4, 5, 7, 9, 14, 23, 40])
_RUNS = st.lists(st.tuples(st.sampled_from([1, 1, 1, 1, 2, 4]), _COUNTS), min_size=1, max_size=2)
_CHUNKS = st.lists(
    st.tuples(st.one_of(_COUNTS, st.integers(1, 120)), st.sampled_from([0, 0, 5, 4000])), min_size=1, max_size=2
)
_FORBIDDEN = st.sampled_from(
    [(), (), (), (), (), (), (), (), (Mode.FULL,), (Mode.PIECEWISE,), (Mode.SPLIT,), (Mode.FULL, Mode.PIECEWISE)]
)
_FORBIDDEN_WITH_EAGER = st.builds(
    lambda modes, eager: (*modes, *eager), _FORBIDDEN, st.sampled_from([(), (Mode.EAGER,)])
)
_NONE_FORBIDDEN = st.just(())
_LORAS = st.sampled_from([0] * 10 + [1, 3])
_KINDS = st.sampled_from(["mixed", "decode", "mixed", "prefill", "decode", "empty"])
_STEPS = st.sampled_from([1, 1, 4, 9])
_KV = st.sampled_from([0, 100, 5_000, 200_000])
_LIMITS = st.sampled_from([0, 1, 2, 4, 16])
_CLAIMS = st.builds(
    Claims, _LIMITS, _LIMITS, st.booleans(), st.booleans(), st.sampled_from(list(HostParams)), st.booleans()
)
_USUAL_CLAIMS = st.one_of(
    st.sampled_from([Claims.at_level(SupportLevel.MIXED), Claims.at_level("uniform"), Claims(16, 4)]),
    st.sampled_from([Claims.at_level(SupportLevel.MIXED), Claims.at_level("uniform"), Claims.at_level("single")]),
    _CLAIMS,
)
_US = st.sampled_from([1.0, 3.7, 100 / 3, 40.0, 41.0, 200.0, 333.3, 1000.0, 5000.0])
_COEFFICIENT = st.sampled_from([0.0, 0.001, 0.1, 0.7, 2.0, 1 / 3])
_CURVE = st.dictionaries(st.integers(1, 300), _US, min_size=1, max_size=5).map(
    lambda points: Curve(tuple(sorted(points)), tuple(points[size] for size in sorted(points)))
)
_ATTENTION = st.builds(AttentionCost, _US, _COEFFICIENT, _COEFFICIENT)
# Usually as on a device, FULL launched fastest and eager slowest; sometimes not.
_BY_KIND = st.sampled_from([0.0, 0.0, 3.3, 50.0, 1 / 3, 700.0])
_HOST_FULL = st.builds(HostCost, st.sampled_from([1.0, 10.0, 100 / 3, 900.0]), _COEFFICIENT, _BY_KIND, _BY_KIND)
_HOST_PIECEWISE = st.builds(HostCost, st.sampled_from([100.0, 40.0, 333.3, 5.0]), _COEFFICIENT, _BY_KIND, _BY_KIND)
_HOST_EAGER = st.builds(HostCost, st.sampled_from([5000.0, 1000.0, 20_000.0, 2.0]), _COEFFICIENT, _BY_KIND, _BY_KIND)


def _table(source: tuple[bool, bool], **fields: Any) -> CostTable:
    """A table that was measured, or is of kernel tables, or neither."""
    measured, kernel_tables = source
    return CostTable(measured=measured, kernel_tables=kernel_tables, **fields)


_COSTS = st.builds(
    _table,
    version=st.just("drawn"),
    source=st.sampled_from([(False, False), (True, False), (False, True)]),
    full=_CURVE,
    piecewise=_CURVE,
    eager=_CURVE,
    decode_attention=_ATTENTION,
    prefill_attention=st.builds(AttentionCost, _US, _COEFFICIENT, _COEFFICIENT, _COEFFICIENT),
    host_full=_HOST_FULL,
    host_piecewise=_HOST_PIECEWISE,
    host_eager=_HOST_EAGER,
    step_us=_US,
    overlap_cost=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    decode_slowdown=st.sampled_from([None, 1.0, 1.4, 2.5]),
    effects=st.builds(
        StepEffects,
        one_row_overlap=st.sampled_from([None, None, 0.1, 1.0, 1.9]),
        one_row_slowdown=st.sampled_from([None, 1.2, 2.9]),
        many_rows_overlap=st.sampled_from([None, None, 0.2, 0.9, 1.3]),
        many_rows_slowdown=st.sampled_from([None, 1.1, 2.2]),
        outlasted_share=st.sampled_from([None, None, ((4, 0.0), (64, 0.6), (512, 1.0)), ((20, 0.4),)]),
    ),
    mixed=st.none() | _CURVE,
    both_us=st.sampled_from([(0.0, 0.0), (0.0, 33.3), (1 / 3, 50.0)]),
    padding_us=st.sampled_from([(0.0, 0.0), (0.0, 33.3), (1 / 3, 50.0), (700.0, 0.0)]),
    host_work_us=st.just(20.0),
    served=st.sampled_from(
        [
            None, ServedHost(scheduler_us=1 / 3),
            ServedHost(scheduler_us=150.0, scheduler_prompt_us=70.0, every_us=7.0, host_work_us=(20.0, 33.3)),
        ]
    ),
)  # fmt: skip
_FACTS = st.sampled_from(
    [NO_FACTS, NO_FACTS, {WAITING_REQS: 1}, {WAITING_REQS: 40}, {GAP_TAIL_US: 0}, {GAP_TAIL_US: 300, WAITING_REQS: 3}]
)
_OBJECTIVE = st.builds(
    lambda weights, limit: Objective(weights[0], weights[1], limit),
    st.sampled_from([(1.0, 0.0), (0.0, 1.0), (0.7, 0.3), (0.1, 0.9)]),
    st.sampled_from([1.0, 1.25, 2.0, 4.0]),
)
_BASIS = st.sampled_from([Basis.NOTHING, Basis.LADDER_ASSUMED | Basis.COSTS_ANALYTIC, Basis.COSTS_KERNEL_TABLES])
_SEEDS = st.integers(0, 2**32)


def settings() -> st.SearchStrategy[Settings]:
    """Small deployments, with and without speculation and LoRA."""
    return _SETTINGS


@st.composite
def shapes(draw: st.DrawFn, *, forbid: bool = True, forbid_eager: bool = False) -> BatchShape:
    """Any batch: uniform, partial drafts, prefill, mixed, empty.

    Args:
        draw: hypothesis gives it.
        forbid: some batches forbid modes, never eager.
        forbid_eager: half of the batches forbid eager too, so that some can't be run at all.
    """
    forbidden = _FORBIDDEN_WITH_EAGER if forbid_eager else _FORBIDDEN if forbid else _NONE_FORBIDDEN
    kind = draw(_KINDS)
    runs = draw(_RUNS) if kind in ("decode", "mixed") else []
    tokens = sum(length * count for length, count in runs)
    return BatchShape(
        decodes=runs,
        prefills=draw(_CHUNKS) if kind in ("prefill", "mixed") else [],
        decode_kv_tokens=tokens + draw(_KV) if runs else None,
        num_active_loras=draw(_LORAS),
        forbidden=draw(forbidden),
        max_decode_steps=draw(_STEPS),
        facts=draw(_FACTS),
    )


def sizes(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Rising capture sizes up to `most`."""
    return st.sets(st.integers(1, most), min_size=1, max_size=8).map(lambda found: tuple(sorted(found)))


@st.composite
def ladders(draw: st.DrawFn, deployment: Settings) -> CaptureSizes:
    """Capture sizes that fit the deployment."""
    q, rng = deployment.query_len, random.Random(draw(_SEEDS))  # noqa: S311 - drawn, so that failures shrink to a seed

    def some(most: int) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(1, most + 1), min(rng.choice((1, 4, 9, 16)), most))))

    decode = some(min(deployment.max_num_reqs, deployment.max_num_tokens // q))
    tokens = deployment.max_num_tokens
    return CaptureSizes(tuple(size * q for size in decode), some(tokens), some(tokens))


def claims() -> st.SearchStrategy[Claims]:
    """Any attention claims."""
    return _CLAIMS


def cost_tables() -> st.SearchStrategy[CostTable]:
    """Any cost table: times needn't rise with size, and any mode may be the cheapest."""
    return _COSTS


@st.composite
def contexts(draw: st.DrawFn, policy: Policy | None = None) -> PolicyContext:
    """Any context: some planned keys captured, some withdrawn; well-supported more often than not.

    With a policy, the keys are those that it plans.
    """
    deployment, claimed = draw(_SETTINGS), draw(_USUAL_CLAIMS)
    drawn = draw(ladders(deployment))
    planned = plan_keys(drawn, claimed, deployment) if policy is None else policy.plan(drawn, claimed, deployment)
    rng = random.Random(draw(_SEEDS))  # noqa: S311 - as above
    share = draw(st.sampled_from([0.0, 0.0, 0.2, 0.7]))
    lost = {key for key in planned if rng.random() < share}
    return PolicyContext(
        claims=claimed,
        ladder=CaptureLadder([key for key in planned if key not in lost], withdrawn=lost),
        costs=draw(_COSTS),
        settings=deployment,
        objective=draw(_OBJECTIVE),
        basis=draw(_BASIS),
        spreads=draw(st.booleans()),
    )
