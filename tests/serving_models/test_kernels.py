"""The attention operators by themselves."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from kpolicy.serving.attention import attend, mla_attention, paged_attention  # noqa: E402
from kpolicy.serving.mla import absorbed_rows, expanded_row  # noqa: E402
from kpolicy.serving.rows import HostRows, RowTensors, divide, padded_blocks  # noqa: E402

BLOCK = 4


def _rows(query_lens: list[int], kv_lens: list[int], seed: int = 0) -> RowTensors:
    """Rows over shuffled blocks, with a padding row at the end."""
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-each // BLOCK) for each in kv_lens)
    blocks = torch.randperm(width * len(kv_lens), generator=generator).view(len(kv_lens), width)
    table = torch.cat([blocks, torch.zeros(1, width, dtype=torch.int64)]).int()
    starts = torch.tensor([0, *query_lens, 0]).cumsum(0).int()
    return RowTensors(table, torch.tensor([*kv_lens, 0]).int(), starts, BLOCK)


def _slots(at: RowTensors, row: int) -> Any:
    position = torch.arange(int(at.kv_lens[row]))
    return at.block_table[row].long()[position // BLOCK] * BLOCK + position % BLOCK


def _naive(query: Any, k: Any, v: Any, scale: float, window: int, softcap: float) -> Any:
    """[queries, heads, dim] of one row in float64, a score at a time from the definition."""
    share = query.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(share, dim=1).double() for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(k) - len(query), len(k))[:, None]
    key = torch.arange(len(k))[None]
    hidden = (key > at) | ((key <= at - window) if window else torch.zeros_like(key > at))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 4, 8), (6, 2, 8), (4, 1, 5)])
def test_paged_attention_is_attention(window: int, softcap: float, heads: int, kv_heads: int, value_dim: int) -> None:
    """Decode, verification and prefill rows of one batch each give what the definition gives, and padding zeros."""
    generator = torch.Generator().manual_seed(3)
    query_lens, kv_lens = [1, 1, 3, 12, 20], [1, 70, 9, 12, 33]
    at = _rows(query_lens, kv_lens)
    num_slots = at.block_table.numel() * BLOCK
    k = torch.randn(num_slots + 1, kv_heads, 8, generator=generator)
    v = torch.randn(num_slots + 1, kv_heads, value_dim, generator=generator)
    k[-1] = v[-1] = math.nan
    query = torch.randn(sum(query_lens) + 3, heads, 8, generator=generator)
    out = paged_attention(query, k, v, at, 0.7, window, softcap)
    for row, (start, end) in enumerate(zip(at.query_starts[:-2], at.query_starts[1:-1], strict=True)):
        slots = _slots(at, row)
        wanted = _naive(query[start:end], k[slots], v[slots], 0.7, window, softcap)
        torch.testing.assert_close(out[start:end].double(), wanted, atol=2e-6, rtol=1e-5)
    assert not out[sum(query_lens) :].any()


def test_no_slot_but_a_rows_own_is_read() -> None:
    """With NaN in every slot that no row owns, real rows are finite: slots past a row's end aren't read."""
    at = _rows([1, 1, 10], [5, 39, 14])
    own = torch.cat([_slots(at, row) for row in range(3)])
    k = torch.full((at.block_table.numel() * BLOCK + 1, 2, 8), math.nan)
    k[own] = torch.randn(len(own), 2, 8)
    for window in (0, 3):
        assert torch.isfinite(paged_attention(torch.randn(12, 4, 8), k, k.clone(), at, 1.0, window)).all()
    latents = k.flatten(1)
    assert torch.isfinite(mla_attention(torch.randn(12, 2, 12), latents, torch.randn(20, 12), at, 0.3)).all()


def test_absorbed_and_expanded_agree_to_rounding() -> None:
    """Both computations of MLA give the same to float32 rounding, against float64 too."""
    generator = torch.Generator().manual_seed(1)
    heads, nope, rope, value, rank = 4, 16, 8, 12, 24
    at = _rows([1, 1, 1], [3, 18, 40])
    cache = torch.randn(at.block_table.numel() * BLOCK + 1, rank + rope, generator=generator)
    up = torch.randn(heads, nope + value, rank, generator=generator) / rank**0.5
    query = torch.randn(3, heads, nope + rope, generator=generator)
    host = HostRows.read(at)
    groups, _ = divide(host, 1, 0)
    absorbed = torch.zeros(3, heads, value)
    for group in groups:
        absorbed[group.starts] = absorbed_rows(query, cache, up, group, host, 0.2)
    _, alone = divide(host, 0, 0)
    expanded = torch.cat([expanded_row(query, cache, up, row, host, 0.2) for row in alone])
    exact = torch.cat([expanded_row(query.double(), cache.double(), up.double(), row, host, 0.2) for row in alone])
    torch.testing.assert_close(absorbed, expanded, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(absorbed.double(), exact, atol=2e-6, rtol=1e-5)
    assert not torch.equal(absorbed, expanded)  # two computations, as the support says


def test_which_rows_are_absorbed_is_the_callers() -> None:
    """Rows of up to `absorbed_len` tokens are absorbed, bit for bit, and longer ones expanded."""
    at = _rows([2, 2], [9, 30])
    cache, kv_b, query = (
        torch.randn(at.block_table.numel() * BLOCK + 1, 32),
        torch.randn(112, 24),
        torch.randn(4, 4, 24),
    )
    both = [mla_attention(query, cache, kv_b, at, 0.2, length) for length in (1, 2)]
    torch.testing.assert_close(*both, atol=1e-3, rtol=1e-4)
    up = kv_b.view(4, 28, 24)
    host = HostRows.read(at)
    groups, _ = divide(host, 2, 0)
    for group in groups:
        assert torch.equal(absorbed_rows(query, cache, up, group, host, 0.2), both[1][group.tokens(query.device)])
    assert not torch.equal(*both)


def _prompt_of(layer: str, query_len: int, kv_len: int) -> Callable[[], Any]:
    """Attention of one chunk of a prompt, by an operator that is called `layer`."""
    at = _rows([query_len], [kv_len])
    num_slots = at.block_table.numel() * BLOCK + 1
    if layer == "paged":
        query, k = torch.randn(query_len, 8, 32), torch.randn(num_slots, 2, 32)
        return lambda: paged_attention(query, k, k, at, 0.2)
    query, cache, kv_b = torch.randn(query_len, 8, 24), torch.randn(num_slots, 32), torch.randn(8 * 28, 24)
    return lambda: mla_attention(query, cache, kv_b, at, 0.2)


@pytest.mark.parametrize("layer", ["paged", "latent"])
def test_a_prompt_takes_the_fused_kernel(layer: str) -> None:
    """A chunk of a prompt, behind a context or not, is one call of torch's fused kernel, and no scores are made."""
    for kv_len in (12, 40):
        run = _prompt_of(layer, 12, kv_len)
        with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            run()
        names = [event.name for event in seen.events()]
        assert names.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 1
        assert not [name for name in names if "softmax" in name]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the pages that Linux gives a process")
def test_prompts_take_no_new_memory_each_time() -> None:
    """Chunks over a long context run again in memory that is there: scores of 34 MB came from the system each time."""
    import resource

    run = _prompt_of("paged", 256, 4096)
    with torch.inference_mode():
        for _ in range(3):
            run()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(5):
            run()
    # Half of what those scores take. A smaller block may come from the system each time: 4 MiB of a run did in a
    # process in which most other tests had run before, by what its heap looked like.
    scores = 5 * 34_000_000 // resource.getpagesize()
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < scores // 2


@pytest.mark.parametrize("block_size", [1, 4, 16, 40])
def test_blocks_are_padded_by_at_most_half(block_size: int) -> None:
    """Padded blocks hold the row, aren't more than half again as many, and grow with it."""
    for num_blocks in range(1, 2000):
        padded = padded_blocks(num_blocks, block_size)
        assert num_blocks <= padded <= max(-(-32 // block_size), 1.5 * num_blocks)
        assert padded <= padded_blocks(num_blocks + 1, block_size)


def test_operators_state_their_output_without_running() -> None:
    """On meta tensors both operators give the output's shape, as tracing needs."""
    at = RowTensors(*(torch.empty(2, 4, dtype=torch.int32, device="meta") for _ in range(3)), BLOCK)
    query = torch.empty(5, 4, 24, device="meta")
    k, v = torch.empty(9, 2, 24, device="meta"), torch.empty(9, 2, 10, device="meta")
    assert paged_attention(query, k, v, at, 1.0).shape == (5, 4, 10)
    latents, kv_b = torch.empty(9, 32, device="meta"), torch.empty(112, 24, device="meta")
    assert mla_attention(query, latents, kv_b, at, 1.0).shape == (5, 4, 12)


def test_a_recorder_sees_one_operator() -> None:
    """To a dispatch mode the whole of paged attention is one operator, with the tensors it reads."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func._schema.name, func._schema.is_mutable))
            return func(*args, **(kwargs or {}))

    at = _rows([1, 10], [5, 14])
    cache = torch.randn(at.block_table.numel() * BLOCK + 1, 2, 8)
    with Watch():
        paged_attention(torch.randn(11, 4, 8), cache, cache, at, 1.0)
    assert [each for each in seen if each[0] != "aten::randn"] == [("kpolicy::paged_attention", False)]


@pytest.mark.parametrize("dimensions", [2, 3, 4])
def test_the_fused_kernel_is_taken_whatever_the_mask_leaves_out(dimensions: int) -> None:
    """Of a mask of three dimensions torch takes it not, and writes all scores out."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, 8, 16, 32, generator=generator)
    k, v = (torch.randn(1, 8, 64, 32, generator=generator) for _ in range(2))
    seen = torch.ones(16, 64, dtype=torch.bool).tril(48)
    given = seen[(None,) * (dimensions - 2)]
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        found = attend(q, k, v, given, 0.1)
    assert any("flash" in event.name for event in profiled.events())
    scores = (q.double() @ k.double().transpose(-1, -2) * 0.1).masked_fill(~seen, -math.inf)
    assert torch.allclose(found.double(), scores.softmax(-1) @ v.double(), atol=1e-5)
