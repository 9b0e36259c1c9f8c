"""What steps take, measured at start-up on SGLang's own graphs and eager steps.

A server waits for this at every start, so that it has an allowance: half of what quicker captures saved of that start
at most. Cases come in the order in which they decide most: what no decision can do without is always timed, then the
middle of what lies between, as long as there is room. Times of sizes that aren't timed lie between those of their
neighbours. What is left goes to more timings of each.

A case is run twice, since the first call has what libraries compile and choose, and the shorter counts; where captures
have run its kernels at that size already, once will do, unless graph and eager step are close. No step is taken to last
longer than a larger one of its kind: what else runs on the host only adds.

Prompt tokens are prompts of at most `PROMPT_TOKENS`, since a server's batch of a chunk has several, whose attention
takes a fraction of that of one as long as the chunk. What one long prompt takes is timed too, alone and with usual ones
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from kpolicy.costs import CostTable, Curve
from kpolicy.errors import ProfileError
from kpolicy.what_runs import WhatRuns
from kpolicy_sglang.arguments import device_name, own_sizes, resolved
from kpolicy_sglang.bench import LEAST_RUNS, Bench
from kpolicy_sglang.mirror import pool_of
from kpolicy_sglang.phase import DECODE, PREFILL, PROMPT_TOKENS, MixedCost, Phase, steady, table_of
from kpolicy_sglang.prompt_times import beside_of
from kpolicy_sglang.ranks import Ranks
from kpolicy_sglang.state import State

__all__ = ["EAGER_DECODES", "EAGER_TOKENS", "MIXED_TOKENS", "cost_tables", "measure"]

EAGER_TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192)
EAGER_DECODES = (1, 32, 256)
MIXED_TOKENS = (64, 512, 2048)
LONG_TOKENS = (2048, 4096, 8192)
FEW_DECODES, MANY_DECODES = 2, 32
MOST_S, SHARE = 1.0, 0.5
"""Seconds that measuring may take, and the share of what quicker captures saved."""
_APART = 1.2
"""Graphs are timed at sizes that are so many times the last one that was: between them times hardly change."""


def cost_tables(model_runner: Any, state: State, ranks: Ranks | None = None) -> Mapping[str, CostTable]:
    """Cost tables by phase, and the state's mixed curves and long prompts: of a profile, measured, or none.

    The same on every rank: rank 0's. Ranks that take each step together measure nothing, since a step of one would
    wait for the others.

    Raises:
        RankError: another rank can't read the profile, or failed to measure.
        SchemaError: the profile can't be read.
        ProfileError: it was measured on another device, or with another tensor_parallel_size.
    """
    config, ranks = state.config, ranks or Ranks(model_runner)
    if config.profile is not None:
        # SGLang knows its model by a path, which no profile has.
        here = WhatRuns(device_name(model_runner), "", int(model_runner.server_args.tp_size))
        return _of_profile(config.profile, state, ranks, here)
    if not config.calibrate or not _reads_costs(config.policy):
        return {}
    if state.coupled:
        state.say(
            "ranks take each step together, so nothing is measured: SGLang's own rule decides. Give a profile in "
            "KPOLICY_PROFILE to decide by cost"
        )
        return {}
    tables = measure(model_runner, state, ranks)
    tables, state.mixed, state.long, state.beside = ranks.first((tables, state.mixed, state.long, state.beside))
    return tables


def _of_profile(path: str, state: State, ranks: Ranks, here: WhatRuns) -> dict[str, CostTable]:
    """Every phase's costs from a profile, which a rank on another machine may not have."""
    from kpolicy.schemas import read_profile

    def read() -> CostTable:
        costs = read_profile(path).costs
        for differs in filter(None, costs.unlike(here)):
            raise ProfileError(f"{path} was {differs}. Give a profile of what runs here, or none to measure at start.")
        return costs

    # Where ranks take each step together costs may differ between them: see `kpolicy_sglang.dispatch`.
    costs = ranks.first(ranks.together(read, f"reading {path}"))
    if not state.coupled:
        state.say(
            f"{path} has costs by size alone, nothing of long prompts or mixed batches: batches don't end before a "
            "long prompt, and mixed ones aren't split. Without KPOLICY_PROFILE that is measured at start-up"
        )
    return dict.fromkeys(state.phases, costs)


def _reads_costs(policy: str) -> bool:
    from kpolicy.policies import get_policy

    return bool(get_policy(policy).reads_costs)


def measure(model_runner: Any, state: State, ranks: Ranks | None = None) -> dict[str, CostTable]:
    """Time captured sizes, eager steps at a few sizes, long prompts, and mixed batches as SGLang itself runs them.

    Sets the state's mixed curves and what long prompts take.

    Raises:
        RankError: another rank couldn't set this up, or make anything of what was measured.
    """
    ranks = ranks or Ranks(model_runner)
    bench, cases = ranks.together(lambda: _cases(model_runner, state, ranks), "setting up the measuring")
    bench.run(ranks.first(_allowance_s(model_runner, state)))
    tables, state.mixed = ranks.together(lambda: _tables(model_runner, state, bench, cases), "reading its times")
    return tables


def _allowance_s(model_runner: Any, state: State) -> float:
    """Seconds that measuring may take: those of the settings, else a share of what quicker captures saved."""
    config = state.config
    if config.calibrate_seconds is not None or not config.quick_capture:
        return config.calibrate_seconds or MOST_S
    graphs = {
        name: [found.seconds for found in state.registry.records() if found.pool == pool_of(name)]
        for name in state.phases
    }
    return min(max(SHARE * state.savings.seconds(graphs, own_sizes(model_runner.server_args)), 0.0), MOST_S)


def _cases(model_runner: Any, state: State, ranks: Ranks) -> tuple[Bench, dict[tuple[str, str], dict[int, int]]]:
    """What is measured: the bench, and its cases by phase, kind and size."""
    bench = Bench(model_runner, ranks)
    cases: dict[tuple[str, str], dict[int, int]] = {}

    def add(
        phase: Phase, kind: str, make: Callable[[int], Any], force: bool | None, levels: Mapping[int, int],
        once: Container[int] = (),
    ) -> None:  # fmt: skip
        rivals = cases.get((phase.name, "graph"), {}) if kind == "eager" else {}
        cases[phase.name, kind] = {
            size: bench.add(
                phase, partial(make, size), force, level, runs=1 if size in once else LEAST_RUNS, kind=kind,
                rival=rivals.get(size),
            )
            for size, level in levels.items()
        }  # fmt: skip

    for phase in state.phases.values():
        decode = phase.name == DECODE
        make = bench.decode if decode else bench.prefill
        # Padded sizes decide nothing but by their graph, and what they take goes into every estimate: the middle too.
        graphs = {size: max(level - 1, 0) for size, level in _levels(_apart(phase.sizes)).items()}
        add(phase, "graph", make, True, graphs)
        # SGLang's dummies are made in the buffers of its graphs: none may be larger.
        eager = sorted({*(s for s in (EAGER_DECODES if decode else EAGER_TOKENS) if s < phase.largest), phase.largest})
        # A later release runs other attention in the graphs of MLA prompts.
        alike = decode or state.version.startswith("0.5.16")
        once = phase.sizes if alike else ()
        # SGLang replays every decode that fits: what it can't be worse than is the eager step of the largest.
        add(phase, "eager", make, False, _largest_first(eager) if decode else _levels(eager), once)
        if not decode:
            _add_prompts(bench, phase, add)
            # SGLang mixes no batches otherwise.
            mixes = getattr(resolved(model_runner.server_args), "enable_mixed_chunk", True)
            if mixes and state.config.split and len(phase.steps) - 2 > MANY_DECODES:
                _add_mixed(bench, phase, _many_rows(model_runner), add, alike=alike)
    return bench, cases


def _add_prompts(bench: Bench, phase: Phase, add: Callable[..., None]) -> None:
    """Long prompts, alone and beside usual ones."""
    sizes = {min(size, phase.largest) for size in LONG_TOKENS}
    long = sorted(size for size in sizes if size > PROMPT_TOKENS)
    add(phase, "long", bench.prompt, None, _largest_first(long, level=1))
    # One row of a FULL prefill graph can't be two.
    add(phase, "beside", bench.beside, None, dict.fromkeys([s for s in long if len(bench.unlike(s)) > 1][-1:], 1))


def _add_mixed(bench: Bench, phase: Phase, rows: int, add: Callable[..., None], *, alike: bool) -> None:
    """Mixed batches with many decode rows, and with few, which take little more than the prompts alone."""
    for name, decodes in (("many", rows), ("few", min(FEW_DECODES, rows))):
        found = {min(size + decodes, phase.largest) for size in MIXED_TOKENS}
        sizes = sorted(size for size in found if size > decodes)
        levels = _levels(sizes) if name == "many" else _largest_first(sizes, level=1)
        # The smallest has what mixed batches are the first to run.
        add(phase, name, partial(bench.mixed, decodes=decodes), None, levels, sizes[1:] if alike else ())


def _apart(sizes: Sequence[int]) -> list[int]:
    """The least and the largest of rising sizes, and those between that are `_APART` times the one before."""
    found = [sizes[0]]
    for size in sizes[1:]:
        if size >= _APART * found[-1] or size == sizes[-1]:
            found.append(size)
    return found


def _levels(sizes: Sequence[int]) -> dict[int, int]:
    """How late each of rising sizes comes: 0 for both ends, 1 for the middle, 2 for the middles beside it."""
    levels = [0] * len(sizes)
    gaps = [(0, len(sizes) - 1, 1)]
    for first, last, level in gaps:
        if last - first > 1:
            middle = (first + last) // 2
            levels[middle] = level
            gaps += [(first, middle, level + 1), (middle, last, level + 1)]
    return dict(zip(sizes, levels, strict=True))


def _largest_first(sizes: Sequence[int], level: int = 0) -> dict[int, int]:
    """The same where the largest of rising sizes is enough for a beginning: it comes at that level, the rest after."""
    return {size: level if size == sizes[-1] else level + 1 + later for size, later in _levels(sizes).items()}


def _many_rows(model_runner: Any) -> int:
    return min(MANY_DECODES, int(model_runner.req_to_token_pool.size) - 1)


def _tables(
    model_runner: Any, state: State, bench: Bench, cases: Mapping[tuple[str, str], Mapping[int, int]]
) -> tuple[dict[str, CostTable], MixedCost | None]:
    """The tables by phase and the mixed curves that the times come to."""
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    tables, mixed = {}, state.mixed
    for phase in state.phases.values():
        graph, eager = (bench.us(cases[phase.name, kind]) for kind in ("graph", "eager"))
        if graph and eager:
            version = f"measured {at} in SGLang {state.version}, {phase.name}"
            tables[phase.name] = table_of(version, graph, eager)
    few_us, many_us, long_us = (bench.us(cases.get((PREFILL, name), {})) for name in ("few", "many", "long"))
    state.long = _curve(long_us)
    state.beside = _beside(bench, cases, state.long)
    rows, many = _many_rows(model_runner), _curve(many_us)
    if many and PREFILL in tables and rows > FEW_DECODES:
        below = [size for size in many.sizes if not few_us or size < min(few_us)]
        alone = _prompts_us(tables[PREFILL], below, eager=state.prefix_is_eager)
        mixed = MixedCost(steady({**alone, **few_us}), many, FEW_DECODES, rows)
    return tables, mixed


def _prompts_us(costs: CostTable, sizes: Iterable[int], *, eager: bool) -> dict[int, float]:
    """What as many tokens of prompts take by size: a batch with few decode rows takes little more."""
    return {
        size: costs.eager.at(size) if eager else min(costs.eager.at(size), costs.piecewise.at(size)) for size in sizes
    }


def _beside(bench: Bench, cases: Mapping[tuple[str, str], Mapping[int, int]], long: Curve | None) -> float:
    """How far a long prompt makes those beside it take as long; 0.0 where that wasn't timed."""
    times = bench.us(cases.get((PREFILL, "beside"), {}))
    usual = bench.us({**cases.get((PREFILL, "eager"), {}), **cases.get((PREFILL, "graph"), {})})
    for size, us in times.items():
        if long is not None and size in long.sizes and size in usual:
            return beside_of(bench.unlike(size), us, usual[size], long.at(size))
    return 0.0


def _curve(us: Mapping[int, float]) -> Curve | None:
    return steady(us) if us else None
