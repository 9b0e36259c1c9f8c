"""The Triton kernels against the plain ones, over random rows and pages, with NaN wherever nothing may be read."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kpolicy.executors.step_model import RowLayout, StepContext, StepTensors
from kpolicy.serving import attention, mla
from kpolicy.serving.crossover import ABSORBED_LENS, Crossover
from kpolicy.serving.kernels import PlainKernels, TritonKernels, choose_kernels, kernels_here
from kpolicy.serving.kv_cache import LatentLayer, LayerSpec
from kpolicy.serving.rows import RowTensors

GPU = torch.device("cuda")
PAGE = 16
DTYPES = [torch.float32, torch.bfloat16]
ALLOWED = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
BATCHES: dict[str, tuple[list[int], list[int], int]] = {
    # KV tokens and query tokens of each row, and padding rows.
    "decodes": ([5, 64, 700, 1], [1, 1, 1, 1], 0),
    "padded decodes": ([5, 64, 700], [1, 1, 1], 5),
    "drafts": ([5, 64, 700], [3, 3, 3], 1),
    "prompts": ([200, 33, 129], [200, 33, 129], 0),
    "chunks": ([900, 333], [128, 77], 0),
    "mixed": ([5, 64, 700, 300, 40], [1, 1, 1, 90, 40], 3),
    "short chunks": ([700, 300, 90], [3, 7, 16], 0),
    "mixed with short chunks": ([5, 64, 700, 300, 40], [1, 1, 5, 64, 2], 3),
}


def rows_of(name: str, device: str, *, pad_tokens: int = 0) -> tuple[RowTensors, RowLayout, int, int, int | None]:
    """(rows, layout, pages, padded tokens, uniform query length) of a batch."""
    kv_lens, query_lens, padding = BATCHES[name]
    uniform = query_lens[0] if len(set(query_lens)) == 1 and query_lens[0] <= 3 else None
    needed = [-(-length // PAGE) for length in kv_lens]
    pages = list(range(sum(needed) + 3))
    random.Random(0).shuffle(pages)  # noqa: S311
    table = torch.zeros(len(kv_lens) + padding, max(needed) + 2, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
    starts = [0]
    for length in query_lens + [uniform or 0] * padding:
        starts.append(starts[-1] + length)
    rows = RowTensors(
        table.to(device), torch.tensor(kv_lens + [0] * padding, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device), PAGE,
    )  # fmt: skip
    layout = RowLayout(sum(query_lens), query_lens.count(1), query_lens, kv_lens)
    return rows, layout, sum(needed) + 3, starts[-1] + pad_tokens, uniform


def step_of(rows: RowTensors, layout: RowLayout | None, uniform: int | None) -> StepContext:
    none: Any = None
    return StepContext(
        StepTensors(none, none, none, rows.block_table, rows.kv_lens, rows.query_starts), layout, uniform
    )


def on_cpu(plain: Any, *args: Any) -> torch.Tensor:
    """The plain kernels on the CPU, in single precision."""

    def moved(each: Any) -> Any:
        if isinstance(each, RowTensors):
            return RowTensors(*(part.cpu() for part in each[:3]), each.block_size)
        return each.cpu().float() if isinstance(each, torch.Tensor) else each

    out: torch.Tensor = plain(*map(moved, args))
    return out.cuda()


def close(mine: torch.Tensor, right: torch.Tensor, num_tokens: int) -> None:
    errors = (mine[:num_tokens].float() - right[:num_tokens].float()).abs().amax((1, 2)) / right.float().abs().max()
    wrong = (errors > ALLOWED[mine.dtype]).nonzero().flatten().tolist()
    assert errors.isfinite().all()
    assert not wrong, f"relative error {errors.max()} at tokens {wrong[:8]}"
    assert not mine[num_tokens:].any(), "padding isn't zero"


@pytest.mark.parametrize("pad_tokens", [0, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap"),
    [(14, 2, 64, 0, 0.0), (8, 8, 80, 0, 0.0), (32, 8, 128, 0, 0.0), (4, 2, 256, 100, 3.0)],
)
def test_paged(
    name: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int, softcap: float, pad_tokens: int
) -> None:  # fmt: skip
    rows, layout, pages, num_tokens, uniform = rows_of(name, "cuda", pad_tokens=pad_tokens)
    generator = torch.Generator("cuda").manual_seed(0)
    caches = [torch.randn(pages * PAGE + 1, kv_heads, dim, generator=generator, device="cuda").to(dtype) for _ in "kv"]
    for cache in caches:
        cache[-1] = float("nan")
    query = torch.randn(num_tokens, heads, dim, generator=generator, device="cuda").to(dtype)
    spec = LayerSpec(heads, kv_heads, dim, dim, dim**-0.5, window, softcap)
    right = on_cpu(attention.paged_attention, query, *caches, rows, spec.scale, window, softcap)
    real = layout.num_tokens
    chosen = [TritonKernels(GPU), TritonKernels(GPU, flash=True), PlainKernels(GPU)]
    if not kernels_here(GPU)["flashinfer"]:
        chosen.append(choose_kernels(GPU, "flashinfer"))
    for kernels in chosen:
        for known in ((None, uniform), (layout, uniform), (layout, None), (None, None)):
            # What memory held before must not be what padding holds after.
            left = torch.full((num_tokens, heads, dim), float("nan"), device="cuda", dtype=dtype)
            del left
            close(kernels.attend(step_of(rows, *known), spec, query, rows, *caches), right, real)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("heads", "rank", "rope", "nope", "value"), [(16, 512, 64, 128, 128), (4, 24, 8, 16, 12)])
def test_latent(name: str, dtype: torch.dtype, heads: int, rank: int, rope: int, nope: int, value: int) -> None:
    rows, layout, pages, num_tokens, uniform = rows_of(name, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    cache = torch.randn(pages * PAGE + 1, rank + rope, generator=generator, device="cuda").to(dtype)
    cache[-1] = float("nan")
    query = torch.randn(num_tokens, heads, nope + rope, generator=generator, device="cuda").to(dtype)
    kv_b = (torch.randn(heads * (nope + value), rank, generator=generator, device="cuda") * rank**-0.5).to(dtype)
    spec = LayerSpec(heads, heads, nope + rope, value, (nope + rope) ** -0.5)
    right = on_cpu(attention.mla_attention, query, cache, kv_b, rows, spec.scale, uniform or 1)
    for kernels in (TritonKernels(GPU), PlainKernels(GPU)):
        for known in ((None, uniform), (layout, uniform), (layout, None)):
            mine = kernels.attend_latents(step_of(rows, *known), spec, query, rows, cache, kv_b)
            close(mine, right, layout.num_tokens)
    for query_lens in ((64, 64), (16, 16), (1, 4)):
        kernels = TritonKernels(GPU)
        kernels.crossover = Crossover((512, 4096), query_lens)
        mine = kernels.attend_latents(step_of(rows, layout, None), spec, query, rows, cache, kv_b)
        close(mine, right, layout.num_tokens)


def test_the_crossover_is_measured() -> None:
    """Over a layer's own KV: whatever is faster here, lengths are those that kernels were compiled for."""
    kernels = TritonKernels(GPU)
    kv_b = torch.randn(16 * 256, 512, device="cuda", dtype=torch.bfloat16)
    layer = LatentLayer(LayerSpec(16, 16, 192, 128, 192**-0.5), kernels, kv_b, 8192, PAGE)
    kernels.measure_crossover(layer, 8192)
    assert kernels.crossover is not None
    assert kernels.crossover.kv_lens == (512, 4096)
    assert set(kernels.crossover.query_lens) <= {1, *ABSORBED_LENS}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes(dtype: torch.dtype) -> None:
    kernels = TritonKernels(GPU)
    slots = torch.tensor([3, 77, 12, 200], device="cuda")
    key = torch.randn(2, 4, 80, device="cuda").to(dtype).transpose(0, 1)
    value = torch.randn(4, 2, 64, device="cuda").to(dtype)
    caches = torch.zeros(201, 2, 80, device="cuda", dtype=dtype), torch.zeros(201, 2, 64, device="cuda", dtype=dtype)
    kernels.write(slots, key, value, *caches)
    for cache, values in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[slots], values)
        assert cache.count_nonzero() == values.count_nonzero()
    latent, rope = torch.randn(4, 24, device="cuda").to(dtype), torch.randn(4, 3, 8, device="cuda").to(dtype)[:, 1]
    cache = torch.zeros(201, 32, device="cuda", dtype=dtype)
    kernels.write_latents(slots, latent, rope, cache)
    assert torch.equal(cache[slots], torch.cat((latent, rope), 1))
    assert cache.count_nonzero() == latent.count_nonzero() + rope.count_nonzero()


def test_a_broken_kernel_would_show() -> None:
    """The reference tells attention that reads one token too many from the right one."""
    rows, layout, pages, num_tokens, _ = rows_of("decodes", "cuda")
    caches = [torch.randn(pages * PAGE + 1, 2, 64, device="cuda") for _ in "kv"]
    query = torch.randn(num_tokens, 4, 64, device="cuda")
    right = attention.paged_attention(query, *caches, rows, 0.125, 0, 0.0)
    more = rows._replace(kv_lens=rows.kv_lens + 1)
    wrong = TritonKernels(GPU).attend(step_of(more, None, 1), LayerSpec(4, 2, 64, 64, 0.125), query, more, *caches)
    with pytest.raises(AssertionError, match="relative error"):
        close(wrong, right, layout.num_tokens)


assert mla is not None  # registers the operator that `attention` calls
