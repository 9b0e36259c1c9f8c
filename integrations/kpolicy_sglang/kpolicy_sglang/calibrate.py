"""What steps take, measured at start-up on SGLang's own graphs and eager steps.

Batches are the dummies that SGLang captures with: their rows write to the slot that SGLang keeps for padding, so that
nothing of a request is touched. A step is timed whole, from the call until the device is done, in rounds over all
cases: what else runs on the machine should slow every case alike.

A server waits for this at every start, so that each phase has an allowance. Sizes come in the order in which they
decide most: of each kind of step the ends, which are always timed, then the middle of what lies between, as long as the
allowance has room for two timings. Times of sizes that aren't timed lie between those of their neighbours. What is
left goes to more timings of each.

Prompt tokens are prompts of at most `PROMPT_TOKENS`, since a server's batch of a chunk has several, whose attention
takes a fraction of that of one as long as the chunk. What one long prompt takes is timed too, alone and with usual ones
beside it.
"""

from __future__ import annotations

import itertools
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from kpolicy.costs import CostTable, Curve
from kpolicy_sglang.phase import DECODE, PREFILL, PROMPT_TOKENS, MixedCost, Phase, table_of
from kpolicy_sglang.prompt_times import beside_of
from kpolicy_sglang.ranks import Ranks
from kpolicy_sglang.state import State

__all__ = ["EAGER_DECODES", "EAGER_TOKENS", "MIXED_TOKENS", "cost_tables", "measure"]

logger = logging.getLogger(__name__)
EAGER_TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192)
EAGER_DECODES = (1, 32, 256)
MIXED_TOKENS = (64, 512, 2048)
LONG_TOKENS = (2048, 4096, 8192)
FEW_DECODES, MANY_DECODES, MIXED_KV = 2, 32, 64
WARM, LEAST_ROUNDS, ROUNDS = 1, 2, 5
_APART = 1.2
"""Graphs are timed at sizes that are so many times the last one that was: between them times hardly change."""


def cost_tables(model_runner: Any, state: State, ranks: Ranks | None = None) -> Mapping[str, CostTable]:
    """Cost tables by phase, and the state's mixed curves and long prompts: of a profile, measured, or none.

    The same on every rank: rank 0's. Ranks that take each step together measure nothing, since a step of one would
    wait for the others.

    Raises:
        RankError: another rank can't read the profile, or failed to measure.
        SchemaError: the profile can't be read.
    """
    config, ranks = state.config, ranks or Ranks(model_runner)
    if config.profile is not None:
        return _of_profile(config.profile, state, ranks)
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


def _of_profile(path: str, state: State, ranks: Ranks) -> dict[str, CostTable]:
    """Every phase's costs from a profile, which a rank on another machine may not have."""
    from kpolicy.schemas import read_profile

    # Where ranks take each step together costs may differ between them: see `kpolicy_sglang.dispatch`.
    costs = ranks.first(ranks.together(lambda: read_profile(path).costs, f"reading {path}"))
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
    bench.run(state.config.calibrate_seconds)
    tables, state.mixed = ranks.together(lambda: _tables(model_runner, state, bench, cases), "reading its times")
    return tables


def _cases(model_runner: Any, state: State, ranks: Ranks) -> tuple[_Bench, dict[tuple[str, str], dict[int, int]]]:
    """What is measured: the bench, and its cases by phase, kind and size."""
    bench = _Bench(model_runner, ranks)
    cases: dict[tuple[str, str], dict[int, int]] = {}

    def add(phase: Phase, kind: str, sizes: Iterable[int], make: Callable[[int], Any], force: bool | None) -> None:
        listed = list(sizes)
        cases[phase.name, kind] = {
            size: bench.add(phase, partial(make, size), force, level)
            for size, level in zip(listed, _levels(len(listed)), strict=True)
        }

    for phase in state.phases.values():
        make = bench.decode if phase.name == DECODE else bench.prefill
        add(phase, "graph", _apart(phase.sizes), make, True)
        most = len(phase.steps) - 2
        usual = EAGER_DECODES if phase.name == DECODE else EAGER_TOKENS
        # SGLang's dummies are made in the buffers of its graphs: none may be larger.
        add(phase, "eager", sorted({*(s for s in usual if s < phase.largest), phase.largest}), make, False)
        if phase.name == PREFILL:
            long = {min(size, phase.largest) for size in LONG_TOKENS}
            add(phase, "long", sorted(size for size in long if size > PROMPT_TOKENS), bench.prompt, None)
            # One row of a FULL prefill graph can't be two.
            both = [size for size in cases[phase.name, "long"] if len(bench.unlike(size)) > 1][-1:]
            add(phase, "beside", both, bench.beside, None)
        if phase.name == PREFILL and state.config.split and most > MANY_DECODES:
            rows = _many_rows(model_runner)
            for name, decodes in (("few", min(FEW_DECODES, rows)), ("many", rows)):
                sizes = sorted({min(size + decodes, phase.largest) for size in MIXED_TOKENS})
                make_mixed = partial(bench.mixed, decodes=decodes)
                add(phase, name, [size for size in sizes if size > decodes], make_mixed, None)
    return bench, cases


def _apart(sizes: Sequence[int]) -> list[int]:
    """The least and the largest of rising sizes, and those between that are `_APART` times the one before."""
    found = [sizes[0]]
    for size in sizes[1:]:
        if size >= _APART * found[-1] or size == sizes[-1]:
            found.append(size)
    return found


def _levels(count: int) -> list[int]:
    """How late each of so many rising sizes comes: 0 for both ends, 1 for the middle, 2 for the middles beside it."""
    levels = [0] * count
    gaps = [(0, count - 1, 1)]
    for first, last, level in gaps:
        if last - first > 1:
            middle = (first + last) // 2
            levels[middle] = level
            gaps += [(first, middle, level + 1), (middle, last, level + 1)]
    return levels


def _many_rows(model_runner: Any) -> int:
    return min(MANY_DECODES, int(model_runner.req_to_token_pool.size) - 1)


def _tables(
    model_runner: Any, state: State, bench: _Bench, cases: Mapping[tuple[str, str], Mapping[int, int]]
) -> tuple[dict[str, CostTable], MixedCost | None]:
    """The tables by phase and the mixed curves that the times come to."""
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    tables, mixed = {}, state.mixed
    for phase in state.phases.values():
        graph, eager = (bench.us(cases[phase.name, kind]) for kind in ("graph", "eager"))
        if graph and eager:
            version = f"measured {at} in SGLang {state.version}, {phase.name}"
            tables[phase.name] = table_of(version, graph, eager)
    few, many, state.long = (_curve(bench.us(cases.get((PREFILL, name), {}))) for name in ("few", "many", "long"))
    state.beside = _beside(bench, cases, state.long)
    rows = _many_rows(model_runner)
    if few and many and rows > FEW_DECODES:
        mixed = MixedCost(few, many, FEW_DECODES, rows)
    return tables, mixed


def _beside(bench: _Bench, cases: Mapping[tuple[str, str], Mapping[int, int]], long: Curve | None) -> float:
    """How far a long prompt makes those beside it take as long; 0.0 where that wasn't timed."""
    times = bench.us(cases.get((PREFILL, "beside"), {}))
    usual = bench.us({**cases.get((PREFILL, "eager"), {}), **cases.get((PREFILL, "graph"), {})})
    for size, us in times.items():
        if long is not None and size in long.sizes and size in usual:
            return beside_of(bench.unlike(size), us, usual[size], long.at(size))
    return 0.0


def _curve(us: Mapping[int, float]) -> Curve | None:
    return Curve(tuple(sorted(us)), tuple(us[size] for size in sorted(us))) if us else None


class _Bench:
    """Times whole steps of dummy batches through the model runner, in rounds over all of them."""

    def __init__(self, model_runner: Any, ranks: Ranks) -> None:
        import torch

        self._torch, self._ranks = torch, ranks
        self._runner = model_runner
        self._decode = model_runner.decode_cuda_graph_runner
        self._prefill = model_runner.prefill_cuda_graph_runner
        self._device = torch.get_device_module(model_runner.device)
        self._cases: list[tuple[Phase, Callable[[], Any], bool | None]] = []
        self._levels: list[int] = []
        self._times: list[list[float]] = []

    def add(self, phase: Phase, make: Callable[[], Any], force: bool | None, level: int = 0) -> int:
        """A case to time; those of level 0 are timed whatever they take. Returns its number."""
        self._cases.append((phase, make, force))
        self._levels.append(level)
        self._times.append([])
        return len(self._cases) - 1

    def run(self, allowance_s: float) -> None:
        """Time the cases, each phase's in about so many seconds, without what libraries compile at first."""
        phases: dict[str, list[int]] = {}
        for case, (phase, _, _) in enumerate(self._cases):
            phases.setdefault(phase.name, []).append(case)
        with self._torch.no_grad():
            # How often each case is timed, the first time included.
            rounds: dict[int, int] = {}
            for name, cases in phases.items():
                begun, most = self._begun(cases, allowance_s * 1e6)
                logger.info("kpolicy: %s: %d of %d cases are timed %d times", name, len(begun), len(cases), most)
                rounds |= dict.fromkeys(begun, most)
            for turn in range(1, ROUNDS):
                left = sorted(case for case, most in rounds.items() if turn < most)
                # In another order each round: what ran before leaves caches cold or warm, as in serving.
                for case in random.Random(turn).sample(left, len(left)):  # noqa: S311
                    us = self._tried(*self._cases[case])
                    if us is None:
                        del rounds[case]
                    else:
                        self._times[case].append(us)

    def _begun(self, cases: Sequence[int], allowance_us: float) -> tuple[list[int], int]:
        """Warm and time once as many cases as there is time for; these, and how often there is time for all of them."""
        begun, round_us = [], 0.0
        for case in sorted(cases, key=self._levels.__getitem__):
            if self._levels[case] and round_us * (WARM + LEAST_ROUNDS) >= allowance_us:
                break
            # The first call has what libraries compile and choose.
            if any(self._tried(*self._cases[case]) is None for _ in range(WARM)):
                continue
            us = self._tried(*self._cases[case])
            if us is not None:
                self._times[case].append(us)
                begun.append(case)
                # Rank 0's: all have to come to the same cases.
                round_us += self._ranks.first(us)
        fitting = int(allowance_us / round_us) - WARM if round_us else ROUNDS
        return begun, max(LEAST_ROUNDS, min(ROUNDS, fitting))

    def _tried(self, phase: Phase, make: Callable[[], Any], force: bool | None) -> float | None:
        """Microseconds of a case; None where a rank can't run it as a dummy: then no rank measures it."""
        batch, us = None, None
        try:
            batch = make()
        except Exception as error:  # noqa: BLE001  whatever it is, the case isn't measured
            logger.warning("kpolicy: a case isn't measured: %s: %s", type(error).__name__, error)
        if not self._ranks.all(batch is not None):
            return None
        try:
            us = self._once(batch, phase, force)
        except Exception as error:  # noqa: BLE001  likewise
            logger.warning("kpolicy: a case isn't measured: %s: %s", type(error).__name__, error)
        return us if self._ranks.all(us is not None) else None

    def us(self, cases: Mapping[int, int]) -> dict[int, float]:
        """Median microseconds by size, of the cases that ran; the lower of two, as what else runs only adds."""
        return {size: statistics.median_low(self._times[case]) for size, case in cases.items() if self._times[case]}

    def _once(self, batch: Any, phase: Phase, force: bool | None) -> float:
        self._device.synchronize()
        phase.force = force
        started = time.perf_counter()
        try:
            self._runner.forward(batch)
            self._device.synchronize()
        finally:
            phase.force = None
        return (time.perf_counter() - started) * 1e6

    def decode(self, num_reqs: int) -> Any:
        """SGLang's own dummy of so many decode rows."""
        return self._decode.capture_prepare(num_reqs)[0]

    def prompt(self, num_tokens: int) -> Any:
        """SGLang's own dummy of one prompt."""
        return self._prefill.capture_prepare(num_tokens)[0]

    def prefill(self, num_tokens: int) -> Any:
        """A dummy of prompts of about one length, as few as are short enough."""
        batch = self.prompt(num_tokens)
        lengths = self._lengths(num_tokens)
        return batch if len(lengths) == 1 else self._rows(batch, lengths, [0] * len(lengths))

    def beside(self, num_tokens: int) -> Any:
        """A dummy of one prompt of half the tokens and usual ones beside it."""
        lengths = self.unlike(num_tokens)
        return self._rows(self.prompt(num_tokens), lengths, [0] * len(lengths))

    def unlike(self, num_tokens: int) -> list[int]:
        """Prompts that are so many tokens together, half of them in one; one alone where there can't be more rows."""
        if len(self._lengths(num_tokens)) == 1:
            return [num_tokens]
        half = num_tokens // 2
        return [half, *self._lengths(num_tokens - half, beside=1)]

    def mixed(self, num_tokens: int, *, decodes: int) -> Any:
        """A dummy of prompts and some decode rows, as SGLang mixes them."""
        batch = self.prompt(num_tokens)
        lengths = self._lengths(num_tokens - decodes, beside=decodes)
        batch = self._rows(batch, lengths + [1] * decodes, [0] * len(lengths) + [MIXED_KV] * decodes)
        batch.forward_mode = batch.global_forward_mode = type(batch.forward_mode).MIXED
        return batch

    def _lengths(self, num_tokens: int, *, beside: int = 0) -> list[int]:
        """Prompts of about one length that are so many tokens together."""
        if num_tokens <= PROMPT_TOKENS:
            return [num_tokens]
        room = max(int(self._runner.req_to_token_pool.size) - beside, 1)
        # A FULL prefill graph has a number of rows that it was captured with.
        full = self._prefill.prefill_backend_name == "full"
        count = 1 if full else min(-(-num_tokens // PROMPT_TOKENS), room)
        each, more = divmod(num_tokens, count)
        return [each + 1] * more + [each] * (count - more)

    def _rows(self, batch: Any, new: list[int], prefix: list[int]) -> Any:
        """A dummy of one prompt made into rows of so many new tokens with so many cached ones before them."""
        torch = self._torch
        kv = [a + b for a, b in zip(new, prefix, strict=True)]
        starts = [0, *itertools.accumulate(new)][:-1]

        def tensor(values: list[int]) -> Any:
            return torch.tensor(values, dtype=torch.int64, device=batch.seq_lens.device)

        batch.batch_size = len(new)
        batch.req_pool_indices = torch.arange(len(new), device=batch.seq_lens.device)
        batch.seq_lens, batch.orig_seq_lens = tensor(kv), tensor(kv)
        batch.seq_lens_cpu, batch.seq_lens_sum = torch.tensor(kv, dtype=torch.int64), sum(kv)
        batch.extend_seq_lens, batch.extend_prefix_lens = tensor(new), tensor(prefix)
        batch.extend_start_loc = tensor(starts)
        batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = new, prefix
        batch.extend_logprob_start_lens_cpu = list(new)
        batch.next_token_logits_buffer = None
        return batch
