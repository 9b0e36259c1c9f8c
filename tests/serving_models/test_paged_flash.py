"""torch's attention over pages, held to a stand-in for what its documentation says; no CPU has the real one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kpolicy.serving import attention, paged_flash, triton_kernels  # noqa: E402
from kpolicy.serving.kv_cache import LayerSpec  # noqa: E402
from kpolicy.serving.paged_flash import kind_of, missing  # noqa: E402
from kpolicy.serving.triton_kernels import TritonKernels  # noqa: E402
from tests.serving_models.test_flashinfer import CPU, PAGE, prompts  # noqa: E402

SPEC = LayerSpec(8, 2, 64, 64, 0.2)
KIND = kind_of(SPEC, torch.bfloat16, PAGE)


def flash(spec: Any, query: Any, key: Any, value: Any, query_starts: Any, kv_starts: Any, longest: Any) -> Any:
    """torch's FlashAttention over contiguous keys, in torch: causal from the end of each row."""
    starts, kvs, outs = query_starts.tolist(), kv_starts.tolist(), []
    assert longest == tuple(max(b - a for a, b in pairwise(each)) for each in (starts, kvs))
    for row in range(len(starts) - 1):
        k, v = (each[kvs[row] : kvs[row + 1]].float() for each in (key, value))
        k, v = (each.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for each in (k, v))
        q = query[starts[row] : starts[row + 1]].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v))
    return torch.cat(outs).to(query.dtype)


class Varlen:
    """`varlen_attn` as torch 2.12 documents it, and what an implementation may say to a block table."""

    def __init__(self) -> None:
        self.calls = 0
        self.refuses: Exception | None = None
        self.off = 0.0

    def __call__(
        self, query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
        seqused_k: Any = None, block_table: Any = None,
    ) -> Any:  # fmt: skip
        if self.refuses is not None:
            raise self.refuses
        self.calls += 1
        assert (window_size, enable_gqa, scale) == ((-1, 0), True, SPEC.scale)
        assert key.shape == value.shape == (len(key), PAGE, 2, 64)
        assert block_table.dtype == seqused_k.dtype == torch.int32
        assert (cu_seq_k[1:] - cu_seq_k[:-1]).tolist() == seqused_k.tolist()
        keys, values = (
            torch.cat([
                pages[table[: -(-used // PAGE)]].flatten(0, 1)[:used]
                for table, used in zip(block_table, seqused_k.tolist(), strict=True)
            ])
            for pages in (key, value)
        )  # fmt: skip
        return flash(SPEC, query, keys, values, cu_seq_q, cu_seq_k, (max_q, max_k)) + self.off


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> Varlen:
    made = Varlen()
    monkeypatch.setattr(paged_flash, "_varlen", lambda: made)
    monkeypatch.setattr(triton_kernels, "_flash", flash)
    return made


def attended(kernels: TritonKernels, dtype: Any = torch.bfloat16) -> tuple[Any, Any]:
    """(attention of prompt rows over shuffled pages with NaN in the reserved slot, what is right)."""
    step, rows, pages, num_tokens = prompts([200, 33, 129], [200, 33, 77])
    caches = [torch.randn(pages * PAGE + 1, 2, 64).to(dtype) for _ in "kv"]
    for cache in caches:
        cache[-1] = float("nan")
    query = torch.randn(num_tokens + 5, 8, 64).to(dtype)
    right = attention.paged_attention(query.float(), *(each.float() for each in caches), rows, 0.2, 0, 0.0)
    return kernels.attend(step, SPEC, query, rows, *caches)[:num_tokens].float(), right[:num_tokens]


def test_pages_are_read_where_that_was_tried(varlen: Varlen) -> None:
    """Before it was tried keys are gathered; afterwards pages are read as they are, with the same results."""
    kernels = TritonKernels(CPU, flash=True)
    mine, right = attended(kernels)
    assert torch.allclose(mine, right, atol=3e-2)
    assert varlen.calls == 0
    kernels.try_pages(SPEC, torch.bfloat16, PAGE)
    kernels.try_pages(SPEC, torch.bfloat16, PAGE)
    assert (kernels.no_pages, varlen.calls) == ({KIND: ""}, 1)
    mine, right = attended(kernels)
    assert varlen.calls == 2
    assert torch.allclose(mine, right, atol=3e-2)


@pytest.mark.parametrize(
    ("refuses", "off", "words"),
    [
        (RuntimeError("Paged KV cache block size must be divisible by 256\nmore"), 0.0, "divisible by 256"),
        (TypeError("unexpected keyword"), 0.0, "TypeError"),
        (None, 1.0, "off by"),
        (None, float("nan"), "off by nan"),
    ],
)
def test_keys_are_gathered_where_pages_are_not_read(
    varlen: Varlen, refuses: Exception | None, off: float, words: str
) -> None:
    """An implementation that refuses, or computes something else, costs its speed; why is kept."""
    varlen.refuses, varlen.off = refuses, off
    kernels = TritonKernels(CPU, flash=True)
    kernels.try_pages(SPEC, torch.bfloat16, PAGE)
    assert words in kernels.no_pages[KIND]
    assert "more" not in kernels.no_pages[KIND]
    calls = varlen.calls
    mine, right = attended(kernels)
    assert varlen.calls == calls
    assert torch.allclose(mine, right, atol=3e-2)


def test_a_device_that_is_lost_is_not_a_refusal(varlen: Varlen) -> None:
    """The error is the caller's: nothing runs any more, gathered keys neither."""
    varlen.refuses = RuntimeError("CUDA error: an illegal memory access was encountered")
    kernels = TritonKernels(CPU, flash=True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernels.try_pages(SPEC, torch.bfloat16, PAGE)
    assert kernels.no_pages == {}


@pytest.mark.parametrize(
    ("spec", "dtype", "flash"),
    [
        (SPEC, torch.float32, True),
        (LayerSpec(8, 2, 64, 32, 0.2), torch.bfloat16, True),
        (LayerSpec(8, 2, 64, 64, 0.2, window=9), torch.bfloat16, True),
        (SPEC, torch.bfloat16, False),
    ],
)
def test_layers_that_flash_attention_does_not_take_are_not_tried(
    varlen: Varlen, spec: LayerSpec, dtype: Any, flash: bool
) -> None:
    kernels = TritonKernels(CPU, flash=flash)
    kernels.try_pages(spec, dtype, PAGE)
    assert (kernels.no_pages, varlen.calls) == ({}, 0)


def test_a_torch_without_block_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function's own signature, as torch 2.11's is."""
    module = pytest.importorskip("torch.nn.attention.varlen")

    def without(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> Any:
        return query, key, value, cu_seq_q, cu_seq_k, max_q, max_k

    monkeypatch.setattr(module, "varlen_attn", without)
    paged_flash._varlen.cache_clear()
    try:
        assert "2.12" in missing()
        kernels = TritonKernels(CPU, flash=True)
        kernels.try_pages(SPEC, torch.bfloat16, PAGE)
        assert kernels.no_pages == {KIND: missing()}
    finally:
        paged_flash._varlen.cache_clear()


def test_torch_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step asks in each of its layers, and looking at a signature takes longer than the layer."""
    asked, signature = [], paged_flash.signature
    monkeypatch.setattr(paged_flash, "signature", lambda call: asked.append(call) or signature(call))
    paged_flash._varlen.cache_clear()
    assert missing() == missing() == missing()
    assert len(asked) <= 1


def test_this_torch_is_asked_as_it_is() -> None:
    """torch 2.13 has the parameter; on a CPU its operator has no kernel, which is found out and not raised."""
    if missing():
        pytest.skip(missing())
    kernels = TritonKernels(CPU, flash=True)
    kernels.try_pages(SPEC, torch.bfloat16, PAGE)
    assert kernels.no_pages[KIND]
