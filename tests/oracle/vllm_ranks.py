"""vLLM's agreement between data-parallel ranks, run for several ranks in one process.

The real functions reduce one small integer tensor over ranks. Here numpy stands in for torch's tensors, and the
reduction adds up what every rank of the list put in: the ranks are run twice, once to collect their rows and once
with the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.oracle.configs import Batch
from tests.oracle.loader import Loaded
from tests.oracle.vllm_real import Outcome, RealVllm


class _Collected(Exception):
    """Ends a rank's first run at the reduction."""


class _Reduction:
    """The all-reduce: collects, then gives the sum."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.total: Any = None

    def __call__(self, tensor: Any, **_: object) -> None:
        if self.total is None:
            self.rows.append(tensor.copy())
            raise _Collected
        tensor[:] = self.total


def _give_tensors(module: Any) -> None:
    """Replace a module's stub of torch by the few functions that the agreement calls."""
    module.torch = SimpleNamespace(
        zeros=lambda *shape, **_: np.zeros(shape, dtype=np.int64),
        all=np.all,
        full_like=np.full_like,
        tensor=lambda values, **_: np.array(values),
        int32=None,
    )


def agreed(real: RealVllm, loaded: Loaded, version: str, runner: str, batches: list[Batch]) -> list[Outcome]:
    """What each rank runs, for one batch a rank.

    Raises:
        AssertionError: as of the first runner, which ends where it isn't given the size that ranks agreed on.
    """
    reduction = _Reduction()
    run: Callable[[Batch, int], Outcome] = _v1(real, loaded, reduction, len(batches))
    if runner == "v2":
        run = _v2(real, loaded, version, reduction, len(batches))
    for rank, batch in enumerate(batches):
        with suppress(_Collected):
            run(batch, rank)
    reduction.total = sum(reduction.rows)
    return [run(batch, rank) for rank, batch in enumerate(batches)]


def _v2(
    real: RealVllm, loaded: Loaded, version: str, reduction: _Reduction, ranks: int
) -> Callable[[Batch, int], Outcome]:
    module = loaded.module("v1.worker.gpu.dp_utils")
    _give_tensors(module)
    module.should_skip_dp_coordination = lambda: False
    module.get_dp_group = lambda: SimpleNamespace(cpu_group=None, cpu_all_reduce_=reduction)
    module.dist = SimpleNamespace(all_reduce=reduction)

    def run(batch: Batch, rank: int) -> Outcome:
        extra = {"max_query_len": real.bound_v2(batch), "num_active_loras": batch.loras} if version == "0.33" else {}
        desc, _ = module.dispatch_cg_and_sync_dp(
            real.manager,
            len(batch.rows),
            batch.num_tokens,
            real.uniform_v2(batch),
            ranks,
            rank,
            need_eager=batch.valid is not None,
            **extra,
        )
        return real.outcome_v2(desc)

    return run


def _v1(real: RealVllm, loaded: Loaded, reduction: _Reduction, ranks: int) -> Callable[[Batch, int], Outcome]:
    module = loaded.module("v1.worker.dp_utils")
    _give_tensors(module)
    modes = real.compilation.CUDAGraphMode

    def run(batch: Batch, rank: int) -> Outcome:
        # `_determine_batch_execution_and_padding`: dispatch, agree, dispatch again with the agreed mode only.
        mode, desc = real.dispatch_v1(batch, batch.num_tokens, batch.valid, batch.invalid)
        rows = np.zeros((4, ranks), dtype=np.int64).view(_Tensor)
        rows[:, rank] = (batch.num_tokens, desc.num_tokens, 0, mode.value)
        reduction(rows)
        synced = module._post_process_cudagraph_mode(rows)
        tokens = int(module._post_process_dp_padding(rows, synced != 0)[rank])
        mode, desc = real.dispatch_v1(batch, tokens, {modes(synced).name}, None)
        # The runner's own assertion, without which the sizes that ranks were told of each other don't hold.
        assert desc.num_tokens == tokens, (desc, tokens)
        return real.outcome_v1(mode, desc)

    return run


class _Tensor(np.ndarray):  # type: ignore[type-arg]
    """An array that can be asked for its copy on the host."""

    def cpu(self) -> Any:
        return self
