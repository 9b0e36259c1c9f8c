"""`KunlunKernels`: attention of a loaded model on a Kunlun card, through the vendor's kunlun_ops.

Decode rows run `speculative_attention` (1 token a row, or 1 + k), prompts `prefill_attention` over the paged KV, and
latents (MLA) of uniform launches, absorbed, `paged_attention`; other launches over latents run in plain torch. All take
lengths twice, on the host and on the device. Which one an operator reads in a graph isn't documented, so the claims say
that host lengths are frozen, and FULL graphs need a trial: see `kpolicy.executors.kunlun.proven`.

Names and arguments are those with which vLLM-Kunlun calls the operators. Unverified on hardware.
"""

from __future__ import annotations

import math
from importlib import import_module
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kpolicy.attention import AttentionSupport, Claims, HostParams, SupportLevel
from kpolicy.errors import ConfigError, SupportError
from kpolicy.executors.ascend.lengths import TokenLengths, host_rows
from kpolicy.executors.buffers import PaddedShape
from kpolicy.executors.importing import first_line
from kpolicy.executors.step_model import StepContext
from kpolicy.serving.attention import mla_attention
from kpolicy.serving.latents import absorbed, unabsorbed
from kpolicy.serving.plain_kernels import IndexCopied
from kpolicy.serving.rows import RowTensors

if TYPE_CHECKING:
    from kpolicy.serving.kv_cache import LayerSpec

__all__ = ["KunlunKernels", "load_operators"]


def load_operators() -> Any:
    """kunlun_ops.

    Raises:
        ConfigError: it isn't there or doesn't import.
    """
    try:
        return import_module("kunlun_ops")
    except (ImportError, OSError, RuntimeError) as error:
        line = first_line(error)
        raise ConfigError(
            f"kunlun_ops doesn't import: {line}. Install the vendor's wheels for this torch, or use kernels='plain'."
        ) from error


class KunlunKernels(IndexCopied):
    """The vendor's attention operators.

    They want keys and values by head within a block, [num_blocks, num_kv_heads, block_size, dim]; the caches hold that.

    Args:
        device: where they run.
        operators: kunlun_ops, or what stands in for it.

    Attributes:
        block_size: tokens in a block; set before the first step.
    """

    name = "kunlun"

    def __init__(self, device: torch.device, operators: Any = None) -> None:
        self.device = device
        self.block_size = 0
        self._operators = load_operators() if operators is None else operators

    def support(self, *, latent: bool) -> AttentionSupport:
        level = SupportLevel.UNIFORM if latent else SupportLevel.MIXED
        return AttentionSupport.of(
            Claims.at_level(level, host_params=HostParams.FROZEN, one_computation=False),
            backend="kpolicy-kunlun",
            source="kpolicy/serving/kunlun.py",
            note="host copies of lengths beside those on the device; unverified on hardware",
        )

    # Keys and values

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *caches: torch.Tensor) -> None:
        rows = self.kv_rows(slots, caches[0])
        for cache, given in zip(caches, (key, value), strict=True):
            cache.view(-1, cache.shape[2]).index_copy_(0, rows, given.reshape(-1, given.shape[2]))

    def kv_rows(self, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """[len(slots) * num_kv_heads] rows of `cache` seen as [rows, dim] that hold those slots."""
        num_slots, heads = cache.shape[0] - 1, cache.shape[1]
        size, head = self.block_size, torch.arange(heads, device=slots.device)
        at = slots[:, None]
        inside = ((at // size) * heads + head) * size + at % size
        # The reserved slot is behind all blocks.
        return torch.where(at == num_slots, num_slots * heads + head, inside).flatten()

    def attend(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, *caches: torch.Tensor
    ) -> torch.Tensor:
        """See `kpolicy.serving.plain_kernels.Kernels.attend`.

        Raises:
            SupportError: the layer caps its scores, or its keys and values differ in size.
        """
        if spec.softcap or spec.head_dim != spec.value_dim:
            raise SupportError(
                f"a layer with softcap {spec.softcap} and heads of {spec.head_dim} and {spec.value_dim} can't run on "
                "kunlun_ops, which has no soft cap and one head size; use kernels='plain'."
            )
        key, value = (
            cache[:-1].view(-1, spec.num_kv_heads, rows.block_size, cache.shape[2]) for cache in caches
        )  # fmt: skip
        uniform, num_tokens = step.uniform_query_len, query.shape[0]
        if uniform is not None and rows.block_table.shape[0] * uniform == num_tokens:
            return self._decodes(step, spec, query, rows, key, value, uniform)
        return self._prompts(step, spec, query, rows, key, value)

    def _decodes(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, key: torch.Tensor,
        value: torch.Tensor, query_len: int,
    ) -> torch.Tensor:  # fmt: skip
        """[num_tokens, num_heads, head_dim] of rows of `query_len` tokens each."""
        num_reqs = rows.block_table.shape[0]
        out = torch.empty_like(query)
        shape = num_reqs, query_len, spec.num_heads, spec.head_dim
        self._operators.speculative_attention(
            out=out.view(shape), q=query.view(shape), k_cache=key, v_cache=value,
            context_lens_cpu=_on_host(_padded(step, num_reqs, query_len)),
            # A padding row has no KV; a kernel may want some.
            context_lens_xpu=rows.kv_lens.clamp_min(query_len), batch_num=num_reqs, qlen=query_len,
            max_context_len=rows.block_table.shape[1] * rows.block_size, head_num=spec.num_heads,
            head_dim=spec.head_dim, scale=spec.scale, kv_head_num=spec.num_kv_heads, block_size=rows.block_size,
            max_num_blocks_per_seq=rows.block_table.shape[1], max_window_size=spec.window or -1,
            block_tables=rows.block_table,
        )  # fmt: skip
        return _without_padding(out.view(shape), rows).view_as(out)

    def _prompts(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """[num_tokens, num_heads, head_dim] of rows of any lengths, and of padding behind them."""
        num_tokens, (num_reqs, blocks) = query.shape[0], rows.block_table.shape
        # One row more, for tokens of padding.
        table = F.pad(rows.block_table, (0, 0, 0, 1))
        rule = TokenLengths("q", "kv", max(num_tokens, blocks * rows.block_size))
        host = rule.values(host_rows(step), PaddedShape(num_tokens, num_reqs, None))
        ends = F.pad(rows.query_starts[1:], (0, 1), value=num_tokens)
        left = num_tokens - rows.query_starts[-1:]
        kv_lens = torch.cat((rows.kv_lens, left.to(rows.kv_lens.dtype)))
        out = torch.empty_like(query)
        self._operators.prefill_attention(
            q=query, k=key, v=value, out=out, is_causal=True, is_prefix_cache=True,
            # The operator multiplies scores by 1 / sqrt(head_dim) itself.
            alpha=spec.scale * math.sqrt(spec.head_dim), block_table=table,
            context_qlen_lod_cpu=_on_host([0, *host["q"]]), context_qlen_lod_xpu=F.pad(ends, (1, 0)),
            context_kvlen_lod_cpu=_on_host([0, *accumulate(host["kv"])]),
            context_kvlen_lod_xpu=F.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            swa_left=spec.window - 1 if spec.window else -1, swa_right=0 if spec.window else -1,
        )  # fmt: skip
        padding = torch.arange(num_tokens, device=out.device) >= rows.query_starts[-1:]
        return out.masked_fill_(padding.view(-1, 1, 1), 0)

    # Latents

    def attend_latents(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, cache: torch.Tensor,
        kv_b: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        uniform, num_reqs = step.uniform_query_len, rows.block_table.shape[0]
        if uniform is None or num_reqs * uniform != query.shape[0]:
            return mla_attention(query, cache, kv_b, rows, spec.scale, 1)
        rank = kv_b.shape[1]
        up = kv_b.view(spec.num_heads, -1, rank)
        latent_query, rope_query = absorbed(query, up, spec.value_dim)
        asked = torch.cat((latent_query, rope_query), dim=-1).view(num_reqs, uniform, spec.num_heads, -1)
        pages = cache[:-1].view(-1, 1, rows.block_size, cache.shape[1])
        mixed = asked.new_empty(num_reqs, uniform, spec.num_heads, rank)
        self._operators.paged_attention(
            mixed, asked, pages, None, rows.block_table, _on_host(_padded(step, num_reqs, uniform)),
            rows.kv_lens.clamp_min(uniform), False, True, -1, rank, rope_query.shape[2], spec.scale, q_r=asked,
        )  # fmt: skip
        _without_padding(mixed, rows)
        return unabsorbed(mixed.view(query.shape[0], spec.num_heads, rank), up, spec.value_dim)


def _without_padding(out: torch.Tensor, rows: RowTensors) -> torch.Tensor:
    """[num_reqs, ...] with zeros for rows of padding.

    They read the first block, whose rows another launch may write meanwhile: in a mixture of experts what padding
    holds changes how many rows an expert gets, and the last bits of the others.
    """
    return out.masked_fill_((rows.kv_lens == 0).view(-1, *[1] * (out.dim() - 1)), 0)


def _padded(step: StepContext, num_reqs: int, query_len: int) -> list[int]:
    """[num_reqs] KV lengths as the host knows them; padding rows have as many as they have tokens."""
    known = [max(query_len, length) for length in host_rows(step).kv_lens]
    return known + [query_len] * (num_reqs - len(known))


def _on_host(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
