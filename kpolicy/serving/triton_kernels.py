"""`TritonKernels`: kernels of ours that read lengths on the device, and torch's FlashAttention for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kpolicy.attention import AttentionSupport, Claims, SupportLevel
from kpolicy.executors.step_model import StepContext
from kpolicy.serving import attention
from kpolicy.serving.crossover import ABSORBED_LENS, Crossover, measured
from kpolicy.serving.latents import absorbed, unabsorbed
from kpolicy.serving.paged_flash import Kind, attend_pages, kind_of, refusal
from kpolicy.serving.rows import RowTensors

if TYPE_CHECKING:
    from kpolicy.serving.gpu.splits import Shares
    from kpolicy.serving.kv_cache import LayerSpec

__all__ = ["Prompts", "TritonKernels"]


class Prompts(NamedTuple):
    """The rows of a step behind its one-token decodes, where the host knows their lengths."""

    num_decodes: int
    """Rows of one token at the front, one token each"""
    num_tokens: int
    """Of the real rows, decodes included"""
    slots: torch.Tensor
    """[kv tokens of the prompt rows] int64, row by row"""
    query_starts: torch.Tensor
    """[num_prompts + 1] int32, from 0"""
    kv_starts: torch.Tensor
    """[num_prompts + 1] int32, from 0"""
    lengths: tuple[tuple[int, int], ...]
    """(query tokens, KV tokens) of each prompt row"""


class TritonKernels:
    """Triton for what a graph may hold and for prompts of MLA; prompts of keys and values where `flash` through torch.

    Args:
        device: a CUDA device.
        flash: torch's FlashAttention for prompt rows of keys and values where the host knows lengths.

    Attributes:
        latent_prompts: what computes expanded prompts of MLA, by name.
        experts: what answers for a mixture of experts.
        crossover: which chunks of MLA prompts are absorbed where the host knows lengths; None is none.
        no_pages: why torch's FlashAttention gathers keys for a kind of layers, "" where it reads pages; of kinds that
            `try_pages` tried.
    """

    latent_prompts = "triton"

    def __init__(self, device: torch.device, *, flash: bool = False) -> None:
        # Imported here: Triton isn't there for every device, and starts a compiler.
        from kpolicy.serving.gpu import expanded, experts, latent, paged, splits

        self.device = device
        self.name = "flash" if flash else "triton"
        self.experts = experts.gated_experts
        self.crossover: Crossover | None = None
        self.no_pages: dict[Kind, str] = {}
        self._flash = flash
        self._paged = paged
        self._latent = latent
        self._expanded = expanded
        self._splits = splits

    def support(self, *, latent: bool) -> AttentionSupport:
        # Prompts of MLA are expanded over as much memory as their KV needs, which only the host can provide.
        level = SupportLevel.UNIFORM if latent else SupportLevel.MIXED
        return AttentionSupport.of(
            Claims.at_level(level, one_computation=not latent),
            backend=f"kpolicy-{self.name}-{self.device.type}",
            source="kpolicy/serving/triton_kernels.py",
            note="prompts of MLA are expanded between pieces" if latent else "",
        )

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *caches: torch.Tensor) -> None:
        self._paged.write_kv(slots, key, value, *caches)

    def attend(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, *caches: torch.Tensor
    ) -> torch.Tensor:
        uniform, layout = step.uniform_query_len, step.layout
        options: dict[str, Any] = {"window": spec.window, "softcap": spec.softcap}
        if uniform:
            options |= {"decode_len": uniform, "prefills": False}
        elif layout is not None:
            decodes, prompts = _kinds(step, layout.query_lens)
            if prompts and self._takes_prompts(query, spec):
                return self._mixed(step, spec, query, rows, *caches)
            options |= {"decodes": decodes, "prefills": prompts}
        return self._paged.paged_attention(
            query, caches[0], caches[1], rows, spec.scale, self._shares(step), **options
        )  # fmt: skip

    def _takes_prompts(self, query: torch.Tensor, spec: LayerSpec) -> bool:
        """Whether prompt rows of a layer have kernels of their own where the host knows lengths."""
        return self._flash and _flash_takes(query.dtype, spec)

    def _prompt_rows(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, at: Prompts,
        *caches: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """[num_tokens, num_heads, value_dim] of the prompt rows alone, by those kernels."""
        del step
        longest = _longest(at)
        if self.no_pages.get(kind_of(spec, query.dtype, rows.block_size)) == "":
            first, count = at.num_decodes, len(at.lengths)
            back = RowTensors(
                rows.block_table[first : first + count], rows.kv_lens[first : first + count], at.query_starts,
                rows.block_size,
            )  # fmt: skip
            return attend_pages(query, caches, back, at.kv_starts, longest, spec.scale)
        key, value = (cache.index_select(0, at.slots) for cache in caches)
        return _flash(spec, query, key, value, at.query_starts, at.kv_starts, longest)

    def try_pages(self, spec: LayerSpec, dtype: torch.dtype, block_size: int) -> None:
        """Try whether torch's FlashAttention reads a layer's pages as they are; prompt rows go by it from now on."""
        kind = kind_of(spec, dtype, block_size)
        if not self._flash or kind in self.no_pages or spec.head_dim != spec.value_dim or not _flash_takes(dtype, spec):
            return
        self.no_pages[kind] = refusal(kind, self.device, spec.scale, partial(_flash, spec))

    def _mixed(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, *caches: torch.Tensor
    ) -> torch.Tensor:
        at = _prompts(step, rows)
        out = query.new_zeros(query.shape[0], spec.num_heads, spec.value_dim)
        decodes, end = at.num_decodes, at.num_tokens
        if decodes:
            front = RowTensors(
                rows.block_table[:decodes], rows.kv_lens[:decodes], rows.query_starts[: decodes + 1], rows.block_size
            )
            out[:decodes] = self._paged.paged_attention(
                query[:decodes], caches[0], caches[1], front, spec.scale, self._shares(step), window=spec.window,
                softcap=spec.softcap, prefills=False,
            )  # fmt: skip
        out[decodes:end] = self._prompt_rows(step, spec, query[decodes:end], rows, at, *caches)
        return out

    def write_latents(
        self, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor
    ) -> None:  # fmt: skip
        self._latent.write_latents(slots, latent, rope, cache)

    def attend_latents(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, cache: torch.Tensor,
        kv_b: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        up = kv_b.view(spec.num_heads, -1, kv_b.shape[1])
        if step.uniform_query_len:
            return self._absorbed(query, up, rows, cache, spec, step.uniform_query_len, self._shares(step))
        if step.layout is None:
            # Nothing says how much KV there is: the plain kernels ask the device.
            return attention.mla_attention(query, cache, kv_b, rows, spec.scale, 1)
        at = _prompts(step, rows)
        out = query.new_zeros(query.shape[0], spec.num_heads, spec.value_dim)
        decodes, end = at.num_decodes, at.num_tokens
        if decodes:
            front = RowTensors(
                rows.block_table[:decodes], rows.kv_lens[:decodes], rows.query_starts[: decodes + 1], rows.block_size
            )
            out[:decodes] = self._absorbed(query[:decodes], up, front, cache, spec, 1, self._shares(step))
        if end > decodes:
            crossover = self.crossover
            if crossover is not None and all(crossover.absorbs(*lengths) for lengths in at.lengths):
                out[decodes:end] = self._absorbed_chunks(
                    query[decodes:end], up, rows, cache, at, spec, self._shares(step)
                )
            else:
                out[decodes:end] = self._expanded_rows(query[decodes:end], up, cache, at, spec)
        return out

    def measure_crossover(self, layer: Any, most_kv: int) -> None:
        """Time chunks of a prompt absorbed and expanded, over a layer's own KV, and take what is faster from now on.

        Args:
            layer: a latent layer.
            most_kv: KV tokens that a row may have.
        """
        (cache,), spec = layer.caches, layer.spec
        up = layer.kv_b.view(spec.num_heads, -1, layer.kv_b.shape[1])
        whole: dict[str, Any] = {"dtype": torch.int32, "device": self.device}

        def one_row(query_len: int, kv_len: int) -> tuple[torch.Tensor, RowTensors, Prompts]:
            blocks = torch.arange(-(-kv_len // layer.block_size), **whole)[None]
            starts = torch.tensor([0, query_len], **whole)
            rows = RowTensors(blocks, torch.tensor([kv_len], **whole), starts, layer.block_size)
            at = Prompts(
                0, query_len, torch.arange(kv_len, device=self.device), starts, torch.tensor([0, kv_len], **whole),
                ((query_len, kv_len),),
            )  # fmt: skip
            return cache.new_zeros(query_len, spec.num_heads, spec.head_dim), rows, at

        def absorbed(query_len: int, kv_len: int) -> Callable[[], torch.Tensor]:
            query, rows, at = one_row(query_len, kv_len)
            # As a step's layers but the first find it.
            shares = self._splits.Shares()
            return lambda: self._absorbed_chunks(query, up, rows, cache, at, spec, shares)

        def expanded(query_len: int, kv_len: int) -> Callable[[], torch.Tensor]:
            query, _, at = one_row(query_len, kv_len)
            return lambda: self._expanded_rows(query, up, cache, at, spec)

        self.crossover = measured(absorbed, expanded, self.device, most_kv)

    def _shares(self, step: StepContext) -> Shares:
        """The step's own: steps run beside each other, its layers don't. A captured step shares out anew."""
        found: Shares | None = step.memo.get("shares")
        if found is None:
            found = step.memo["shares"] = self._splits.Shares()
        return found

    def _absorbed_chunks(
        self, query: torch.Tensor, up: torch.Tensor, rows: RowTensors, cache: torch.Tensor, at: Prompts,
        spec: LayerSpec, shares: Shares,
    ) -> torch.Tensor:  # fmt: skip
        """[num_tokens, num_heads, value_dim] of prompt rows of at most `ABSORBED_LENS` tokens each."""
        first, count = at.num_decodes, len(at.lengths)
        back = RowTensors(
            rows.block_table[first : first + count], rows.kv_lens[first : first + count], at.query_starts,
            rows.block_size,
        )  # fmt: skip
        longest = max(query_len for query_len, _ in at.lengths)
        decode_len = next(length for length in ABSORBED_LENS if length >= longest)
        return self._absorbed(query, up, back, cache, spec, decode_len, shares)

    def _expanded_rows(
        self, query: torch.Tensor, up: torch.Tensor, cache: torch.Tensor, at: Prompts, spec: LayerSpec
    ) -> torch.Tensor:  # fmt: skip
        """[num_tokens, num_heads, value_dim] of prompt rows, over keys and values made of their latents."""
        rank = up.shape[2]
        latents = cache.index_select(0, at.slots)
        expanded = F.linear(latents[:, :rank], up.reshape(-1, rank)).view(len(latents), spec.num_heads, -1)
        return self._expanded.expanded_attention(
            query, expanded, latents[:, rank:], at.query_starts, at.kv_starts, spec.value_dim, spec.scale
        )

    def _absorbed(
        self, query: torch.Tensor, up: torch.Tensor, rows: RowTensors, cache: torch.Tensor, spec: LayerSpec,
        decode_len: int, shares: Shares,
    ) -> torch.Tensor:  # fmt: skip
        """[num_tokens, num_heads, value_dim] of rows of at most `decode_len` tokens."""
        latent_query, rope_query = absorbed(query, up, spec.value_dim)
        mixed = self._latent.latent_attention(latent_query, rope_query, cache, rows, spec.scale, decode_len, shares)
        return unabsorbed(mixed, up, spec.value_dim)


def _kinds(step: StepContext, query_lens: Sequence[int]) -> tuple[bool, bool]:
    """Whether a step has rows of one token, and longer ones; worked out once a step."""
    kinds: tuple[bool, bool] | None = step.memo.get("kinds")
    if kinds is None:
        kinds = step.memo["kinds"] = 1 in query_lens, any(length > 1 for length in query_lens)
    return kinds


def _prompts(step: StepContext, rows: RowTensors) -> Prompts:
    """Where the prompt rows' KV is; worked out once a step, for all layers, without waiting for the device."""
    found: Prompts | None = step.memo.get("prompts")
    if found is not None:
        return found
    layout = step.layout
    assert layout is not None  # noqa: S101 - callers looked
    query_lens, kv_lens = layout.query_lens, layout.kv_lens
    decodes = next((i for i, length in enumerate(query_lens) if length != 1), len(query_lens))
    count, total = len(query_lens) - decodes, sum(kv_lens[decodes:])
    if not count:
        none = rows.kv_lens[:0]
        found = step.memo["prompts"] = Prompts(decodes, layout.num_tokens, none, none, none, ())
        return found
    device = rows.kv_lens.device
    kv_starts = F.pad(rows.kv_lens[decodes : decodes + count].cumsum(0, dtype=torch.int32), (1, 0))
    query_starts = rows.query_starts[decodes : decodes + count + 1] - decodes
    token = torch.arange(total, device=device, dtype=torch.int32)
    row = torch.searchsorted(kv_starts[1:], token, right=True)
    position = token - kv_starts[row]
    pages = rows.block_table[decodes:].flatten()
    page = pages[row * rows.block_table.shape[1] + position // rows.block_size]
    slots = page.to(torch.int64) * rows.block_size + position % rows.block_size
    found = step.memo["prompts"] = Prompts(
        decodes, layout.num_tokens, slots, query_starts, kv_starts,
        tuple(zip(query_lens[decodes:], kv_lens[decodes:], strict=True)),
    )  # fmt: skip
    return found


def _flash_takes(dtype: torch.dtype, spec: LayerSpec) -> bool:
    """Whether torch's FlashAttention computes a layer: half precision, one head size of at most 256, no soft cap."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and not spec.softcap and not spec.window and spec.head_dim <= 256 and spec.head_dim % 8 == 0


def _longest(at: Prompts) -> tuple[int, int]:
    """(query tokens, KV tokens) of the longest rows."""
    queries, kvs = zip(*at.lengths, strict=True)
    return max(queries), max(kvs)


def _flash(
    spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_starts: torch.Tensor,
    kv_starts: torch.Tensor, longest: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """[num_tokens, num_heads, value_dim] of prompt rows over contiguous keys and values, causal from the end."""
    missing = spec.head_dim - spec.value_dim
    if missing:
        value = F.pad(value, (0, missing))
    forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = forward(
        query, key, value, query_starts, kv_starts, *longest, 0.0, True, False, scale=spec.scale
    )[0]
    return out[..., : spec.value_dim]
