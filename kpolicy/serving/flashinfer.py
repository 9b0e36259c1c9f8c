"""FlashInfer's paged attention for prompt rows where the host knows their lengths; the rest is Triton's.

A wrapper of FlashInfer (`BatchPrefillWithPagedKVCacheWrapper`, docs.flashinfer.ai) plans a step once and runs it for
every layer. A plan lies in pinned memory until it is copied to the device behind the host: each stream has wrappers of
its own, several in turn, and a wrapper is planned again only when its last plan was copied.

A stream's workspace takes 128 MiB. The current stream's is there from the beginning; another's, such as one that is
captured on, is made when prompts first run there. `give_back` frees them all.

On an H200 with FlashInfer 0.6.4 it passed tests/gpu/test_flashinfer.py; elsewhere tests hold it to a stand-in for the
library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from kpolicy.executors.step_model import StepContext
from kpolicy.serving.rows import RowTensors
from kpolicy.serving.triton_kernels import TritonKernels

if TYPE_CHECKING:
    from kpolicy.serving.kv_cache import LayerSpec
    from kpolicy.serving.triton_kernels import Prompts

__all__ = ["FlashInferKernels"]

WORKSPACE_BYTES = 128 << 20
TURNS = 4
HEAD_DIMS = (64, 128, 256)


class _Turns:
    """The wrappers of one stream, and when each one's last plan was copied.

    Args:
        device: where they run.
        library: FlashInfer.
    """

    def __init__(self, device: torch.device, library: Any) -> None:
        # Steps of a stream follow each other, so one workspace for what kernels leave for each other is enough.
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers = [library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD") for _ in range(TURNS)]
        self._copied: list[Any] = [None] * TURNS
        self._at = 0

    def next(self, stream: Any) -> Any:
        """A wrapper to plan; waits where the host is so far ahead that all are under way."""
        at = self._at
        if stream is not None:
            # The copy of the plan before is on the stream by now.
            event = torch.cuda.Event()
            event.record(stream)
            self._copied[at - 1] = event
        if self._copied[at] is not None:
            self._copied[at].synchronize()
        self._at = (at + 1) % TURNS
        return self._wrappers[at]


class FlashInferKernels(TritonKernels):
    """As `TritonKernels`, with FlashInfer for prompt rows of keys and values.

    Args:
        device: a CUDA device.

    Raises:
        ImportError: FlashInfer can't be imported.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.name = "flashinfer"
        self._library: Any = import_module("flashinfer")
        self._turns: dict[int, _Turns] = {}
        # Not in the first step, which would wait for it.
        self._of_stream()

    def _takes_prompts(self, query: torch.Tensor, spec: LayerSpec) -> bool:
        half = query.dtype in (torch.bfloat16, torch.float16)
        plain = not spec.window and not spec.softcap and spec.head_dim == spec.value_dim
        return half and plain and spec.head_dim in HEAD_DIMS

    def _prompt_rows(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, at: Prompts,
        *caches: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        # Layers that differ in their heads or scale are planned apart.
        kind = f"flashinfer {spec.num_heads} {spec.num_kv_heads} {spec.head_dim} {spec.scale}"
        wrapper = step.memo.get(kind)
        if wrapper is None:
            wrapper = step.memo[kind] = self._planned(spec, query, rows, at)
        # Behind the pages is the reserved slot.
        paged = tuple(cache[:-1].view(-1, rows.block_size, *cache.shape[1:]) for cache in caches)
        out: torch.Tensor = wrapper.run(query, paged)
        return out

    def _planned(self, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, at: Prompts) -> Any:
        """A wrapper planned for the step's prompt rows, by what the host knows of them."""
        size, first, count = rows.block_size, at.num_decodes, len(at.lengths)
        pages = [-(-kv_len // size) for _, kv_len in at.lengths]
        host: dict[str, Any] = {"dtype": torch.int32}
        counts = torch.tensor(pages, **host)
        row = torch.repeat_interleave(torch.arange(count), counts)
        place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        index = (row * rows.block_table.shape[1] + place).to(self.device, non_blocking=True)
        indices = rows.block_table[first : first + count].flatten()[index]
        starts = torch.tensor([0, *(query_len for query_len, _ in at.lengths)], **host).cumsum(0, dtype=torch.int32)
        page_starts = torch.tensor([0, *pages], **host).cumsum(0, dtype=torch.int32)
        last = torch.tensor([(kv_len - 1) % size + 1 for _, kv_len in at.lengths], **host)
        wrapper = self._next()
        wrapper.plan(
            starts, page_starts, indices, last, spec.num_heads, spec.num_kv_heads, spec.head_dim, size, causal=True,
            sm_scale=spec.scale, q_data_type=query.dtype, kv_data_type=query.dtype,
        )  # fmt: skip
        return wrapper

    def give_back(self) -> None:
        """Free the workspaces; a step that needs one makes it again. What runs on the device is waited for."""
        if self._turns and self.device.type == "cuda":
            # Plans that are being copied lie in memory of the wrappers.
            torch.cuda.synchronize(self.device)
        self._turns.clear()

    def _next(self) -> Any:
        stream, turns = self._of_stream()
        return turns.next(stream)

    def _of_stream(self) -> tuple[Any, _Turns]:
        """The current stream, and its wrappers."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        handle = 0 if stream is None else stream.cuda_stream
        turns = self._turns.get(handle)
        if turns is None:
            turns = self._turns[handle] = _Turns(self.device, self._library)
        return stream, turns
