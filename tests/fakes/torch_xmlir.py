"""torch_xmlir, what it makes of `torch.cuda`, and kunlun_ops, over the pretended device.

torch_xmlir isn't published as a wheel, so names are those that public code calls (docs/kunlun.md). Its graph class
goes by CUDA's name and rewrites nothing. Operators take lengths on the host and on the device: `fake_kunlun_ops` reads
either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.fakes.torch_npu import fake_torch_npu

__all__ = ["SOUND", "fake_cuda", "fake_kunlun_ops", "fake_xmlir"]

SOUND = {"XMLIR_FORCE_USE_XPU_GRAPH": "1", "XMLIR_ENABLE_MOCK_TORCH_COMPILE": "false"}
"""Variables under which graphs work."""


def fake_xmlir(count: int = 1) -> Any:
    return SimpleNamespace(__version__="2.5.1", _XMLIRC=SimpleNamespace(_xpu_get_devices_number=lambda: count))


def fake_cuda(library: Any = None) -> Any:
    """`torch.cuda` as torch_xmlir answers for it."""
    npu = vars((fake_torch_npu() if library is None else library).npu)
    names = (
        "Stream", "Event", "stream", "current_stream", "graph_pool_handle", "synchronize", "mem_get_info",
        "empty_cache",
    )  # fmt: skip
    return SimpleNamespace(
        **{name: npu[name] for name in names}, CUDAGraph=npu["NPUGraph"], get_device_name=lambda _: "GPU",
        get_device_capability=lambda _: (8, 6),
    )  # fmt: skip


def fake_kunlun_ops(library: Any, *, reads: str = "host", keeps_tables: bool = False) -> Any:
    """kunlun_ops on a device.

    Args:
        library: the pretended torch_npu whose streams and graphs the device has.
        reads: which copy of lengths a launched operator reads, ``"host"`` or ``"device"``. A graph keeps the host's.
        keeps_tables: block tables of decodes are read on the host too.
    """
    state = library.state

    def on_host(*tensors: torch.Tensor) -> list[list[int]]:
        """Values of host tensors; none of a recorder's business, as on the device."""
        if state.capture is not None:
            state.capture.cut()
        assert all(each.device.type == "cpu" for each in tensors)
        values = [each.tolist() for each in tensors]
        if state.capture is not None:
            state.capture.resume()
        return values

    def launch(
        name: str, hosts: tuple[torch.Tensor, ...], devices: tuple[torch.Tensor, ...], run: Callable[..., None]
    ) -> None:
        given = on_host(*hosts)

        def running(arguments: Any) -> None:
            run(*(arguments["lengths"] if reads == "host" else [each.tolist() for each in devices]))

        library.launch(name, running, {"lengths": given})

    def speculative_attention(
        *, out: Any, q: Any, k_cache: Any, v_cache: Any, context_lens_cpu: Any, context_lens_xpu: Any, batch_num: int,
        qlen: int, max_context_len: int, head_num: int, head_dim: int, scale: float, kv_head_num: int,
        block_size: int, max_num_blocks_per_seq: int, block_tables: Any, max_window_size: int = -1, sink: Any = None,
    ) -> None:  # fmt: skip
        assert tuple(q.shape) == tuple(out.shape) == (batch_num, qlen, head_num, head_dim)
        assert tuple(k_cache.shape[1:]) == (kv_head_num, block_size, head_dim)
        assert k_cache.is_contiguous()
        assert tuple(block_tables.shape) == (batch_num, max_num_blocks_per_seq)
        kept = on_host(block_tables)[0] if keeps_tables else None

        def run(lens: list[int]) -> None:
            assert max(lens) <= max_context_len
            for row, length in enumerate(lens):
                table = block_tables[row] if kept is None else torch.tensor(kept[row])
                key, value = (_gathered(each, table, length) for each in (k_cache, v_cache))
                out[row] = _attend(q[row], key, value, scale, max_window_size)

        launch("speculative_attention", (context_lens_cpu,), (context_lens_xpu,), run)

    def prefill_attention(
        *, q: Any, k: Any, v: Any, out: Any, is_causal: bool, is_prefix_cache: bool, alpha: float, block_table: Any,
        context_qlen_lod_cpu: Any, context_qlen_lod_xpu: Any, context_kvlen_lod_cpu: Any, context_kvlen_lod_xpu: Any,
        swa_left: int = -1, swa_right: int = -1,
    ) -> None:  # fmt: skip
        assert is_causal
        assert is_prefix_cache
        scale = alpha / math.sqrt(q.shape[-1])

        def run(ends: list[int], kv_ends: list[int]) -> None:
            assert ends[-1] == len(q)
            assert len(ends) == len(kv_ends) == len(block_table) + 1
            for row in range(len(block_table)):
                begin, end = ends[row], ends[row + 1]
                length = kv_ends[row + 1] - kv_ends[row]
                if begin == end:
                    continue
                room = block_table.shape[1] * k.shape[2]
                if length < end - begin or length > room:
                    out[begin:end] = 0  # padding
                    continue
                key, value = (_gathered(each, block_table[row], length) for each in (k, v))
                window = swa_left + 1 if swa_left >= 0 else -1
                out[begin:end] = _attend(q[begin:end], key, value, scale, window)

        launch(
            "prefill_attention", (context_qlen_lod_cpu, context_kvlen_lod_cpu),
            (context_qlen_lod_xpu, context_kvlen_lod_xpu), run,
        )  # fmt: skip

    def paged_attention(
        out: Any, x: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens_cpu: Any, context_lens_xpu: Any,
        is_context: bool, is_causal: bool, alignment: int, vo_head_dim: int, rope_dim: int, scale: float, *,
        q_r: Any = None,
    ) -> None:  # fmt: skip
        assert v_cache is None
        assert not is_context
        assert k_cache.shape[1] == 1
        assert x.shape[-1] == vo_head_dim + rope_dim == k_cache.shape[-1]

        def run(lens: list[int]) -> None:
            for row, length in enumerate(lens):
                latents = _gathered(k_cache, block_tables[row], length)
                out[row] = _attend(x[row], latents, latents[..., :vo_head_dim], scale, -1)

        launch("paged_attention", (context_lens_cpu,), (context_lens_xpu,), run)

    return SimpleNamespace(
        speculative_attention=speculative_attention, prefill_attention=prefill_attention,
        paged_attention=paged_attention,
    )  # fmt: skip


def _gathered(cache: Any, table: Any, length: int) -> Any:
    """[length, num_kv_heads, dim] of a row's pages."""
    pages = table[: math.ceil(length / cache.shape[2])].long()
    return cache[pages].transpose(1, 2).flatten(0, 1)[:length]


def _attend(query: Any, key: Any, value: Any, scale: float, window: int) -> Any:
    """[tokens, heads, dim] of queries that end where the keys end."""
    count, length, share = len(query), len(key), query.shape[1] // key.shape[1]
    q = query.view(count, key.shape[1], share, -1).permute(1, 2, 0, 3)
    at = torch.arange(length - count, length)[:, None] - torch.arange(length)[None]
    seen = at >= 0 if window < 0 else (at >= 0) & (at < window)
    scores = (q @ key.permute(1, 2, 0)[:, None] * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value.transpose(0, 1)[:, None]).permute(2, 0, 1, 3).reshape(count, query.shape[1], -1)
