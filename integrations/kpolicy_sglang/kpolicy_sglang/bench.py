"""Whole steps of SGLang's model runner over its own dummy batches, timed.

Dummies are those that SGLang captures with: their rows write to the slot that it keeps for padding, so that nothing
of a request is touched. A step is timed from the call until the device is done, in rounds over all cases: what else
runs on the machine should slow every case alike.
"""

from __future__ import annotations

import itertools
import logging
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from kpolicy_sglang.phase import PROMPT_TOKENS, Phase
from kpolicy_sglang.ranks import Ranks

__all__ = ["LEAST_RUNS", "MIXED_KV", "MOST_RUNS", "Bench"]

logger = logging.getLogger(__name__)
LEAST_RUNS, MOST_RUNS, MIXED_KV = 2, 6, 64
_CLEAR = 1.5


class Bench:
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
        self._runs: list[int] = []
        self._kinds: list[str] = []
        self._rivals: list[int | None] = []
        self._times: list[list[float]] = []

    def add(
        self,
        phase: Phase,
        make: Callable[[], Any],
        force: bool | None,
        level: int = 0,
        *,
        runs: int = LEAST_RUNS,
        kind: str = "",
        rival: int | None = None,
    ) -> int:
        """A case to time, so often at least; those of level 0 are timed whatever they take. Returns its number.

        Of a kind whose cases of level 0 all fail the next that runs is timed. One that is to be run once is run again
        where its first call doesn't last `_CLEAR` times its rival's: what only a first call pays could decide then.
        """
        self._cases.append((phase, make, force))
        self._levels.append(level)
        self._runs.append(runs)
        self._kinds.append(f"{phase.name} {kind}")
        self._rivals.append(rival)
        self._times.append([])
        return len(self._cases) - 1

    def run(self, allowance_s: float) -> None:
        """Time the cases in about so many seconds, without what libraries compile at first."""
        with self._torch.no_grad():
            begun, left_us, round_us = self._begun(allowance_s * 1e6)
            more = min(int(left_us / round_us), MOST_RUNS - LEAST_RUNS) if round_us and left_us > 0 else 0
            logger.info(
                "kpolicy: %d of %d cases are timed, %d times more than at first, for %.2f s",
                len(begun), len(self._cases), more, allowance_s,
            )  # fmt: skip
            for turn in range(more):
                # In another order each round: what ran before leaves caches cold or warm, as in serving.
                for case in random.Random(turn).sample(sorted(begun), len(begun)):  # noqa: S311
                    us = self._tried(*self._cases[case])
                    if us is None:
                        begun.remove(case)
                    else:
                        self._times[case].append(us)

    def _begun(self, allowance_us: float) -> tuple[set[int], float, float]:
        """Time as many cases as there is time for; these, the microseconds that are left, and what a round takes."""
        begun, left_us, round_us = set(), allowance_us, 0.0
        needed = {kind for kind, level in zip(self._kinds, self._levels, strict=True) if not level}
        waiting = sorted(range(len(self._cases)), key=self._levels.__getitem__)
        while some := self._some(waiting, left_us, needed):
            # Each once before any of them again: a core that is slow for a while shouldn't have both.
            for case in some:
                if len(self._times[case]) < self._runs[case] or self._ranks.first(self._open(case)):
                    self._run(case)
                if self._times[case]:
                    begun.add(case)
                    needed.discard(self._kinds[case])
                    us = self._ranks.first(min(self._times[case]))
                    left_us, round_us = left_us - us * len(self._times[case]), round_us + us
        return begun, left_us, round_us

    def _some(self, waiting: list[int], left_us: float, needed: set[str]) -> list[int]:
        """Time once those cases of the next level that there is time for, and take them from those that wait."""
        some: list[int] = []
        for case in list(waiting):
            level = self._levels[case]
            if some and level != self._levels[some[0]]:
                break
            if level and left_us <= 0 and self._kinds[case] not in needed:
                continue
            waiting.remove(case)
            if self._run(case):
                some.append(case)
                # Rank 0's: all have to come to the same cases.
                left_us -= self._ranks.first(self._times[case][0]) * self._runs[case]
        return some

    def _open(self, case: int) -> bool:
        """Whether a case that was run once may yet take less than its rival, or about as much."""
        rival = self._rivals[case]
        return (
            rival is not None and bool(self._times[rival]) and self._times[case][0] < _CLEAR * min(self._times[rival])
        )

    def _run(self, case: int) -> bool:
        """Time a case once more; one that can't be run has no times."""
        us = self._tried(*self._cases[case])
        self._times[case] = [] if us is None else [*self._times[case], us]
        return us is not None

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
        return {
            # From three on the first call doesn't count.
            size: statistics.median_low(times[1:] if len(times) > LEAST_RUNS else times)
            for size, case in cases.items()
            if (times := self._times[case])
        }

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
