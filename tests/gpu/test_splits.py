"""A row is computed alike, bit for bit, whatever it is padded to: eagerly, in graphs, and beside another launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kpolicy.executors.step_model import StepContext, StepTensors
from kpolicy.serving.kernels import TritonKernels
from kpolicy.serving.kv_cache import LayerSpec
from kpolicy.serving.rows import RowTensors

GPU = torch.device("cuda")
PAGE, LONGEST = 32, 4096
HEADS = [(14, 2, 64), (32, 8, 64), (32, 8, 128), (16, 16, 128)]
LATENT = LayerSpec(16, 16, 192, 128, 192**-0.5)
RANK, ROPE = 512, 64
Attend = Callable[[StepContext, RowTensors, torch.Tensor], torch.Tensor]


def rows_of(kv_lens: list[int], padded: int, query_len: int) -> RowTensors:
    """Uniform rows over pages in no order, and padding."""
    needed = [-(-length // PAGE) for length in kv_lens]
    pages = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).int()
    table = torch.zeros(padded, LONGEST // PAGE, dtype=torch.int32)
    for row, own in enumerate(pages.split(needed)):
        table[row, : len(own)] = own
    lens = torch.tensor([*kv_lens, *[0] * (padded - len(kv_lens))], dtype=torch.int32)
    starts = torch.arange(0, (padded + 1) * query_len, query_len, dtype=torch.int32)
    return RowTensors(table.cuda(), lens.cuda(), starts.cuda(), PAGE)


def lengths(count: int, query_len: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return [max(query_len, int(each)) for each in torch.randint(1, LONGEST + 1, (count,), generator=generator)]


def step_of(rows: RowTensors, query_len: int | None) -> StepContext:
    none: Any = None
    return StepContext(StepTensors(none, none, none, *rows[:3]), None, query_len)


def paged(heads: int, kv_heads: int, dim: int, kv_tokens: int, window: int = 0) -> tuple[Attend, tuple[int, int]]:
    """(attention of a layer over keys and values, what a token's queries are)."""
    generator = torch.Generator("cuda").manual_seed(0)
    caches = [
        torch.randn(kv_tokens + 1, kv_heads, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in "kv"
    ]  # fmt: skip
    kernels, spec = TritonKernels(GPU), LayerSpec(heads, kv_heads, dim, dim, dim**-0.5, window)
    return lambda step, rows, query: kernels.attend(step, spec, query, rows, *caches), (heads, dim)


def latent(kv_tokens: int) -> tuple[Attend, tuple[int, int]]:
    """The same over latents."""
    generator = torch.Generator("cuda").manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    cache, kv_b = values(kv_tokens + 1, RANK + ROPE), values(16 * 256, RANK) * RANK**-0.5
    kernels = TritonKernels(GPU)
    attend = kernels.attend_latents
    return lambda step, rows, query: attend(step, LATENT, query, rows, cache, kv_b), (16, 192)


def layer(name: Any, kv_tokens: int) -> tuple[Attend, tuple[int, int]]:
    return latent(kv_tokens) if name == "latent" else paged(*name, kv_tokens)


def queries(shape: tuple[int, int], num_tokens: int, padded: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    query = torch.randn(num_tokens, *shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    return torch.cat((query, query.new_full((padded - num_tokens, *shape), 7.0)))


def needed(kv_lens: list[int]) -> int:
    return sum(-(-length // PAGE) for length in kv_lens) * PAGE


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("count", [1, 3, 8, 16, 17, 40])
@pytest.mark.parametrize("name", [*HEADS, "latent"], ids=str)
def test_padding_changes_no_bit(name: Any, count: int, query_len: int) -> None:
    """Of attention alone: of latents before they go through a product, whose rounding may go with its rows."""
    kv_lens = lengths(count, query_len)
    attend, shape = layer(name, needed(kv_lens))
    real = count * query_len
    right = None
    for padded in (count, count + 1, 48, 80, 160, 512):
        rows, query = rows_of(kv_lens, padded, query_len), queries(shape, real, padded * query_len)
        if name == "latent":
            out = latents_alone(rows, query, query_len, needed(kv_lens))
        else:
            out = attend(step_of(rows, query_len), rows, query)
        if right is None:
            right = out
        assert torch.equal(out[:real], right), padded
        assert not out[real:].any(), padded


def latents_alone(rows: RowTensors, query: torch.Tensor, query_len: int, kv_tokens: int) -> torch.Tensor:
    """[num_tokens, num_heads, rank] of absorbed queries."""
    from kpolicy.serving.gpu import latent as kernel
    from kpolicy.serving.gpu import splits

    generator = torch.Generator("cuda").manual_seed(0)
    cache = torch.randn(kv_tokens + 1, RANK + ROPE, generator=generator, device="cuda", dtype=torch.bfloat16)
    wide = query.repeat(1, 1, 3)[..., :RANK].contiguous()
    return kernel.latent_attention(wide, query[..., :ROPE], cache, rows, 0.05, query_len, splits.Shares())


@pytest.mark.parametrize("name", [*HEADS, "latent"], ids=str)
def test_a_graph_serves_any_number_of_rows(name: Any) -> None:
    """Captured over padding and replayed many times over, it gives each time what EAGER gives at its shape."""
    padded = 80
    most = lengths(padded, 1)
    attend, shape = layer(name, needed(most))
    rows, query = rows_of(most, padded, 1), queries(shape, padded, padded)
    rows.kv_lens.zero_()
    attend(step_of(rows, 1), rows, query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step = step_of(rows, 1)
        # Layers have the step's plan and counters.
        outs = [attend(step, rows, query) for _ in range(4)]
    for count in (80, 1, 33, 8, 2, 16, 65):
        rows.kv_lens.copy_(torch.tensor(most[:count] + [0] * (padded - count)))
        right = attend(step_of(rows, 1), rows, query)
        for _ in range(50):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(out, right) for out in outs), count


def test_launches_beside_each_other_keep_apart() -> None:
    """Two streams, thousands of launches each: every result is that of a launch alone."""
    kv_lens = lengths(4, 1)
    attend, shape = paged(32, 8, 64, needed(kv_lens))
    rows, query = rows_of(kv_lens, 16, 1), queries(shape, 4, 16)
    right = attend(step_of(rows, 1), rows, query)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = [torch.zeros((), dtype=torch.bool, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for _ in range(100):
        for stream, seen in zip(streams, wrong, strict=True):
            with torch.cuda.stream(stream):
                step = step_of(rows, 1)
                for _ in range(24):
                    seen |= (attend(step, rows, query) != right).any()
    torch.cuda.synchronize()
    assert not any(bool(seen) for seen in wrong)


def test_a_mixed_batch_shares_out_by_its_decodes() -> None:
    """Decode rows in front of a prompt are computed as by themselves, in whatever number of rows the launch has."""
    kv_lens = lengths(8, 1)
    attend, shape = paged(32, 8, 64, needed([*kv_lens, 300]))
    alone = rows_of(kv_lens, 8, 1)
    right = attend(step_of(alone, 1), alone, queries(shape, 8, 8))
    for padded in (9, 64, 400):
        rows = rows_of([*kv_lens, 300], padded, 1)
        rows.query_starts[9:] = 8 + 300
        table = rows.block_table
        table[:8] = alone.block_table
        query = queries(shape, 8, 320)
        out = attend(step_of(rows, None), rows, query)
        assert torch.equal(out[:8], right), padded
        assert not out[308:].any()
