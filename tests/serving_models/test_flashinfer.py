"""FlashInfer for prompt rows, held to a stand-in for the library that computes what its documentation says."""

from __future__ import annotations

import gc
import random
import sys
import types
import weakref
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kpolicy.errors import SupportError  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.executors.step_model import RowLayout, StepContext, StepTensors  # noqa: E402
from kpolicy.registry import GraphRegistry  # noqa: E402
from kpolicy.serving import attention  # noqa: E402
from kpolicy.serving.kernels import choose_kernels, kernels_here  # noqa: E402
from kpolicy.serving.kv_cache import LayerSpec  # noqa: E402
from kpolicy.serving.rows import RowTensors  # noqa: E402
from tests.executors_launcher.checker import load_family  # noqa: E402

CPU, PAGE = torch.device("cpu"), 16


class Wrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, in torch: causal from the end of each row, NHD pages."""

    made: ClassVar[list[Wrapper]] = []

    def __init__(self, workspace: Any, kv_layout: str = "NHD") -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "NHD")
        self.plans, self.workspace = 0, workspace
        self.made.append(self)

    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype == torch.int32
        assert causal
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert all(1 <= last <= page_size for last in paged_kv_last_page_len.tolist())
        self.at = [each.tolist() for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)]
        self.heads, self.page_size, self.scale = (num_qo_heads, num_kv_heads, head_dim_qk), page_size, sm_scale
        assert q_data_type == kv_data_type == torch.bfloat16
        self.plans += 1

    def run(self, query: Any, paged: tuple[Any, Any]) -> Any:
        starts, page_starts, indices, last = self.at
        assert query.shape == (starts[-1], self.heads[0], self.heads[2])
        outs = []
        for row in range(len(last)):
            pages = indices[page_starts[row] : page_starts[row + 1]]
            kv_len = (len(pages) - 1) * self.page_size + last[row]
            key, value = (cache[pages].flatten(0, 1)[:kv_len].float() for cache in paged)
            key, value = (each.repeat_interleave(self.heads[0] // self.heads[1], 1) for each in (key, value))
            q = query[starts[row] : starts[row + 1]].float()
            scores = torch.einsum("qhd,khd->hqk", q, key) * self.scale
            seen = torch.ones(len(q), kv_len, dtype=torch.bool).tril(kv_len - len(q))
            outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value))
        return torch.cat(outs).to(query.dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashInfer's kernels over the stand-in, on the CPU."""
    library: Any = types.ModuleType("flashinfer")
    library.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(Wrapper, "made", [])
    from kpolicy.serving import flashinfer

    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 256)
    return flashinfer.FlashInferKernels(CPU)


def prompts(kv_lens: list[int], query_lens: list[int]) -> tuple[StepContext, RowTensors, int, int]:
    """(a step of prompt rows and padding, its rows, pages, tokens)."""
    needed = [-(-length // PAGE) for length in kv_lens]
    pages = list(range(sum(needed) + 3))
    random.Random(0).shuffle(pages)  # noqa: S311
    table = torch.zeros(len(kv_lens) + 1, max(needed) + 2, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
    starts = torch.tensor([0, *query_lens, 0]).cumsum(0).int()
    rows = RowTensors(table, torch.tensor([*kv_lens, 0], dtype=torch.int32), starts, PAGE)
    layout = RowLayout(sum(query_lens), 0, query_lens, kv_lens)
    none: Any = None
    return StepContext(StepTensors(none, none, none, *rows[:3]), layout, None), rows, sum(needed) + 3, sum(query_lens)


@pytest.mark.parametrize("lens", [([200, 33, 129], [200, 33, 129]), ([900, 333, 16], [128, 77, 2])])
def test_prompts_are_equal(lens: tuple[list[int], list[int]], kernels: Any) -> None:
    """Whole prompts and chunks, over shuffled pages, with NaN in the reserved slot; padding is zero."""
    step, rows, pages, num_tokens = prompts(*lens)
    caches = [torch.randn(pages * PAGE + 1, 2, 64).bfloat16() for _ in "kv"]
    for cache in caches:
        cache[-1] = float("nan")
    query = torch.randn(num_tokens + 5, 8, 64).bfloat16()
    spec = LayerSpec(8, 2, 64, 64, 0.2)
    right = attention.paged_attention(query.float(), *(each.float() for each in caches), rows, 0.2, 0, 0.0)
    for _layer in range(3):
        mine = kernels.attend(step, spec, query, rows, *caches)
        assert torch.allclose(mine[:num_tokens].float(), right[:num_tokens], atol=3e-2)
        assert not mine[num_tokens:].any()
    assert [wrapper.plans for wrapper in Wrapper.made] == [1, 0, 0, 0], "a step is planned once for all layers"
    again, rows, _, _ = prompts(*lens)
    kernels.attend(again, spec, query, rows, *caches)
    assert [wrapper.plans for wrapper in Wrapper.made] == [1, 1, 0, 0], "the next step has the next wrapper"


def test_workspaces_are_there_before_a_step_and_go_with_release(kernels: Any) -> None:
    """The first step makes none; releasing an executor frees them, and a later step makes its own again."""
    made = [weakref.ref(wrapper.workspace) for wrapper in Wrapper.made]
    assert len(made) == 4
    model = load_family("llama")
    for layer in model.layers:
        layer.kernels = kernels
    executor = CpuExecutor(model)
    executor.open(GraphRegistry())
    step, rows, pages, num_tokens = prompts([40], [40])
    caches = [torch.randn(pages * PAGE + 1, 2, 64).bfloat16() for _ in "kv"]
    query = torch.randn(num_tokens, 8, 64).bfloat16()
    spec = LayerSpec(8, 2, 64, 64, 0.2)
    before = kernels.attend(step, spec, query, rows, *caches)
    assert len(Wrapper.made) == 4
    del step
    Wrapper.made.clear()
    executor.release()
    gc.collect()
    assert [each() for each in made] == [None] * 4
    step, rows, _, _ = prompts([40], [40])
    assert torch.equal(kernels.attend(step, spec, query, rows, *caches), before)


def test_layers_that_differ_are_planned_apart(kernels: Any) -> None:
    """Another scale or other heads are another plan."""
    step, rows, pages, num_tokens = prompts([40], [40])
    for heads, scale in ((8, 0.2), (4, 0.2), (4, 0.3), (8, 0.2)):
        caches = [torch.randn(pages * PAGE + 1, 2, 64).bfloat16() for _ in "kv"]
        query = torch.randn(num_tokens, heads, 64).bfloat16()
        right = attention.paged_attention(query.float(), *(each.float() for each in caches), rows, scale, 0, 0.0)
        mine = kernels.attend(step, LayerSpec(heads, 2, 64, 64, scale), query, rows, *caches)
        assert torch.allclose(mine.float(), right, atol=3e-2)
    assert sum(wrapper.plans for wrapper in Wrapper.made) == 3


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (LayerSpec(8, 2, 64, 64, 0.2, window=5), torch.bfloat16),
        (LayerSpec(8, 2, 64, 64, 0.2, softcap=3.0), torch.bfloat16),
        (LayerSpec(8, 2, 80, 80, 0.2), torch.bfloat16),
        (LayerSpec(8, 2, 128, 64, 0.2), torch.bfloat16),
        (LayerSpec(8, 2, 64, 64, 0.2), torch.float32),
    ],
)
def test_what_it_is_not_made_for_is_tritons(spec: LayerSpec, dtype: Any, kernels: Any) -> None:
    """Windows, soft caps, odd head sizes and single precision."""
    assert not kernels._takes_prompts(torch.zeros(1, 8, spec.head_dim, dtype=dtype), spec)
    assert kernels._takes_prompts(torch.zeros(1, 8, 64).bfloat16(), LayerSpec(8, 2, 64, 64, 0.2))


def test_a_wrapper_waits_for_its_last_plan(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    """After four plans the first wrapper is planned again, once the stream has passed its copy."""
    waited = []

    class Event:
        def record(self, stream: Any) -> None:
            self.stream = stream

        def synchronize(self) -> None:
            waited.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    from kpolicy.serving import flashinfer

    turns = flashinfer._Turns(CPU, sys.modules["flashinfer"])
    taken = [turns.next("stream") for _ in range(9)]
    assert taken[:4] == taken[4:8]
    assert len(set(map(id, taken))) == 4
    # Each turn marks the one before; the wrapper's mark is of the turn after its last plan.
    assert len(waited) == 6


def test_without_the_library_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds are listed with why not; asking for it is an error that says so."""
    assert "CUDA" in kernels_here(CPU)["flashinfer"]
    with pytest.raises(SupportError, match="'flashinfer' can't run on cpu"):
        choose_kernels(CPU, "flashinfer")
    monkeypatch.setattr("kpolicy.serving.kernels.find_spec", lambda name: object() if name == "triton" else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    here = kernels_here(torch.device("cuda"))
    assert here["triton"] == ""
    assert "pip install flashinfer-python" in here["flashinfer"]
