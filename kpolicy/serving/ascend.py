"""`AscendKernels`: attention of a loaded model on an Ascend NPU, through torch_npu's own operators.

Keys and values: `npu_fused_infer_attention_score` over pages, tokens laid end to end, for decodes and prompts alike.
Latents (MLA): uniform launches are absorbed and run `_npu_paged_attention_mla`, each token a row of its own; all other
launches run in plain torch, between pieces.

Both read lengths on the host, so a graph's are rewritten at each replay: calls go through
`kpolicy.executors.ascend.tasks.host_call`. Unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kpolicy.attention import AttentionSupport, Claims, HostParams, SupportLevel
from kpolicy.errors import SupportError
from kpolicy.executors.ascend.adapter import load_library
from kpolicy.executors.ascend.lengths import NO_ROWS, ContextLengths, TokenLengths
from kpolicy.executors.ascend.tasks import host_call, recorded
from kpolicy.executors.buffers import PaddedShape
from kpolicy.executors.step_model import StepContext
from kpolicy.serving.attention import mla_attention
from kpolicy.serving.latents import absorbed, unabsorbed
from kpolicy.serving.plain_kernels import IndexCopied
from kpolicy.serving.rows import RowTensors

if TYPE_CHECKING:
    from kpolicy.serving.kv_cache import LayerSpec

__all__ = ["AscendKernels"]

MASK_SIZE = 2048
"""Of the triangle that the operator wants for a causal mask, whatever the lengths."""
CAUSAL, BAND = 3, 4


class AscendKernels(IndexCopied):
    """torch_npu's attention operators.

    Args:
        device: where they run.
        library: torch_npu, or what stands in for it.
    """

    name = "ascend"

    def __init__(self, device: torch.device, library: Any = None) -> None:
        self.device = device
        self._library = load_library() if library is None else library
        with torch.inference_mode(False):
            ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=device)
            self._mask = ones.triu_(1)

    def support(self, *, latent: bool) -> AttentionSupport:
        level = SupportLevel.UNIFORM if latent else SupportLevel.MIXED
        return AttentionSupport.of(
            Claims.at_level(level, host_params=HostParams.UPDATABLE, one_computation=not latent),
            backend="kpolicy-ascend",
            source="kpolicy/serving/ascend.py",
            note="host lengths are rewritten at each replay; unverified on hardware",
        )

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
                "npu_fused_infer_attention_score, which has no soft cap and one head size; use kernels='plain'."
            )
        num_tokens, table, size = query.shape[0], rows.block_table, rows.block_size
        uniform = step.uniform_query_len
        if uniform is not None and table.shape[0] * uniform != num_tokens:
            uniform = None  # padded beyond its rows, as an eager launch may be
        shape = PaddedShape(num_tokens, table.shape[0], uniform)
        if uniform is None:
            # One row more, for tokens of padding.
            table = F.pad(table, (0, 0, 0, 1))
        rule = TokenLengths("actual_seq_lengths", "actual_seq_lengths_kv", table.shape[1] * size)
        key, value = (cache[:-1].view(-1, size, spec.num_kv_heads * spec.head_dim) for cache in caches)
        operator = self._library.npu_fused_infer_attention_score
        window: dict[str, int] = {"sparse_mode": CAUSAL}
        if spec.window:
            window = {"sparse_mode": BAND, "pre_tokens": spec.window - 1, "next_tokens": 0}
        options: dict[str, Any] = {
            "atten_mask": self._mask, "block_table": table, "input_layout": "TND", "block_size": size,
            "num_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads, "scale": spec.scale, **window,
        }  # fmt: skip
        out = torch.empty_like(query)
        lse = query.new_empty(1)
        tasks = recorded()
        if tasks is None:

            def eagerly(values: Mapping[str, list[int]]) -> None:
                nonlocal out
                out = operator(query, key, value, **options, **values)[0]

            host_call(step, rule, shape, eagerly)
            return out

        # Asked for before the update: inside one it would be allocated anew, which hangs (vllm-ascend #2128).
        def most(values: Mapping[str, list[int]]) -> torch.Tensor:
            asked: torch.Tensor = self._library._npu_fused_infer_attention_score_get_max_workspace(
                query, key, value, **options, **values
            )
            return asked

        empty = rule.values(NO_ROWS, shape)
        workspace = tasks.workspace(("fused", query.shape, key.shape), lambda: most(empty))

        def launch(values: Mapping[str, list[int]]) -> None:
            operator.out(query, key, value, **options, **values, workspace=workspace, out=[out, lse])

        host_call(step, rule, shape, launch)
        return out

    def attend_latents(
        self, step: StepContext, spec: LayerSpec, query: torch.Tensor, rows: RowTensors, cache: torch.Tensor,
        kv_b: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        uniform = step.uniform_query_len
        if not uniform:
            return mla_attention(query, cache, kv_b, rows, spec.scale, 1)
        rank = kv_b.shape[1]
        up = kv_b.view(spec.num_heads, -1, rank)
        asked = torch.cat(absorbed(query, up, spec.value_dim), dim=-1)
        # Each token is a row that sees what is before it.
        table = rows.block_table.repeat_interleave(uniform, dim=0) if uniform > 1 else rows.block_table
        if len(table) < len(query):
            table = F.pad(table, (0, 0, 0, len(query) - len(table)))
        pages = cache[:-1].view(-1, rows.block_size, 1, cache.shape[1])
        mixed = asked.new_empty(asked.shape[0], spec.num_heads, rank)
        shape = PaddedShape(query.shape[0], rows.block_table.shape[0], uniform)

        def launch(values: Mapping[str, list[int]]) -> None:
            lens = torch.tensor(values["context_lens"], dtype=torch.int32, device="cpu")
            self._library._npu_paged_attention_mla(
                asked, pages, 1, spec.num_heads, spec.scale, table, lens, rank, mixed
            )  # fmt: skip

        host_call(step, ContextLengths("context_lens"), shape, launch)
        return unabsorbed(mixed, up, spec.value_dim)
