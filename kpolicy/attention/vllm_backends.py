"""vLLM 0.23.0 and 0.33.0: the level each attention backend declares, and what a captured graph of it may hold.

A row gives the line of the metadata builder class (or of the override) in each release; the level is declared within
it. Where the declared level overstates the truth, `claims` says what holds and the note says why. Three rules:

- ALWAYS of MLA, sparse and recurrent builders in 0.33 says "decodes of 1 to 1 + k tokens": adaptive verification wants
  it of every builder. Prefill rows go another way, planned on the host, so these are claimed as varlen decode.
- UNIFORM declared by a builder that sends rows of more than one token to its prefill path, which reads lengths on the
  host, is claimed as single-token decode.
- Varlen limits of 0.33 (`get_varlen_cudagraph_max_query_len`) are 1 + k, the longest decode row there is, so they
  are claimed without a limit of our own.
"""

from __future__ import annotations

from typing import NamedTuple

from kpolicy.attention.backends import Backend, DeclaredLevel
from kpolicy.attention.support import Claims, LayerKind

__all__ = ["VLLM_BACKENDS"]

_NEVER, _SINGLE, _UNIFORM, _ALWAYS = DeclaredLevel
_DENSE = (LayerKind.MHA, LayerKind.GQA, LayerKind.MQA, LayerKind.SLIDING_WINDOW)
_ANY = tuple(LayerKind)
_MLA = (LayerKind.MLA,)
_SPARSE = (LayerKind.SPARSE,)
_MAMBA = (LayerKind.MAMBA,)
_GDN = (LayerKind.GDN,)
_LINEAR = (LayerKind.LINEAR,)
_CONV = (LayerKind.SHORT_CONV,)

_LEVEL_CLAIMS = {_NEVER: "none", _SINGLE: "single", _UNIFORM: "uniform", _ALWAYS: "mixed"}
_VARLEN = "varlen_decode"


class _In(NamedTuple):
    """A backend in one release: what it declares, on which line; `holds` where the truth is another level."""

    declared: DeclaredLevel
    line: int
    holds: str = ""
    path: str = ""
    query_len: int | None = None
    """The longest uniform query, where the kernel has a limit."""
    note: str = ""


class _Row(NamedTuple):
    name: str
    kinds: tuple[LayerKind, ...]
    path: str
    v23: _In | None
    v33: _In | None
    note: str = ""


_B = "v1/attention/backends/"
_M = "v1/attention/backends/mla/"
_VERIFY_ONLY = "declared for decodes of 1 to 1 + k tokens; prefill rows are planned on the host"
_ONE_PER_ROW = "rows of several tokens take the prefill path, which reads lengths on the host"
_ADAPTIVE = "with adaptive verification"

# fmt: off
_ROWS = (
    # Attention over whole keys and values.
    _Row("FLASH_ATTN[fa2]", _DENSE, _B + "flash_attn.py", _In(_UNIFORM, 276), _In(_UNIFORM, 600),
         "a graph captured for one-token rows packs heads and can't hold longer rows"),
    _Row("FLASH_ATTN[fa3]", _DENSE, _B + "flash_attn.py", _In(_ALWAYS, 276), _In(_ALWAYS, 600)),
    _Row("FLASH_ATTN[fa4]", _DENSE, _B + "flash_attn.py", None, _In(_ALWAYS, 600)),
    _Row("FLASH_ATTN[xpu]", _DENSE, _B + "flash_attn.py", _In(_ALWAYS, 276), _In(_ALWAYS, 600), "Intel XPU"),
    _Row("TRITON_ATTN", _DENSE, _B + "triton_attn.py", _In(_ALWAYS, 127), _In(_ALWAYS, 96)),
    _Row("TRITON_ATTN_DIFFKV", _DENSE, _B + "triton_attn_diffkv.py", None, _In(_ALWAYS, 36)),
    _Row("FLEX_ATTENTION", _DENSE, _B + "flex_attention.py", _In(_ALWAYS, 755), _In(_ALWAYS, 835)),
    _Row("FLASHINFER[trtllm]", _DENSE, _B + "flashinfer.py", _In(_UNIFORM, 713), None,
         "every KV cache group can use the TensorRT-LLM decode kernels"),
    _Row("FLASHINFER[trtllm-gen]", _DENSE, _B + "flashinfer.py", None, _In(_UNIFORM, 1230, _VARLEN),
         "varlen limit 1 + k; needs decode context parallel size 1 and causal attention"),
    _Row("FLASHINFER[xqa]", _DENSE, _B + "flashinfer.py", None, _In(_UNIFORM, 1176),
         "SM90 and SM120, for supported head sizes and KV types"),
    _Row("FLASHINFER[fa2]", _DENSE, _B + "flashinfer.py", None, _In(_UNIFORM, 1176),
         "native FA2 decode below SM90, causal"),
    _Row("FLASHINFER[fa2-noncausal]", _DENSE, _B + "flashinfer.py", None, _In(_SINGLE, 1176)),
    _Row("FLASHINFER[native]", _DENSE, _B + "flashinfer.py", _In(_SINGLE, 713), _In(_SINGLE, 1176),
         "no TensorRT-LLM decode kernel for some KV cache group"),
    _Row("FLASHINFER[dcp]", _DENSE, _B + "flashinfer.py", None, _In(_SINGLE, 1176),
         "decode context parallel size over 1"),
    _Row("ROCM_ATTN", _DENSE, _B + "rocm_attn.py", _In(_ALWAYS, 76), _In(_ALWAYS, 73)),
    _Row("ROCM_AITER_UNIFIED_ATTN", _DENSE, _B + "rocm_aiter_unified_attn.py",
         _In(_ALWAYS, 76, path=_B + "rocm_attn.py"), _In(_ALWAYS, 50)),
    _Row("ROCM_SEGMENTED_ATTN", _DENSE, _B + "rocm_segmented_attn.py", None, _In(_ALWAYS, 49)),
    _Row("ROCM_AITER_FA", _DENSE, _B + "rocm_aiter_fa.py", _In(_UNIFORM, 398), _In(_UNIFORM, 455)),
    _Row("ROCM_OCTAVE", _DENSE[:3], _B + "rocm_octave_attn.py", None, _In(_UNIFORM, 176), "no sliding window"),
    _Row("B12X", _DENSE, _B + "b12x.py", None, _In(_UNIFORM, 268), "decode and verify only; prefill runs eagerly"),
    _Row("HPC_ATTN[single]", _DENSE, _B + "hpc_attn.py", None, _In(_SINGLE, 170)),
    _Row("HPC_ATTN[spec]", _DENSE, _B + "hpc_attn.py", None, _In(_UNIFORM, 170, query_len=4),
         "with speculative decoding; the kernel takes at most 3 draft tokens"),
    _Row("TURBOQUANT", _DENSE, _B + "turboquant_attn.py", _In(_UNIFORM, 196, "single"), _In(_UNIFORM, 216, "single"),
         _ONE_PER_ROW),
    _Row("COMPOSITE[clamped]", _DENSE, _B + "composite.py", None, _In(_SINGLE, 301),
         "image-mask routing; never more than the lesser of its two children"),
    _Row("COMPOSITE[unclamped-window]", _DENSE, _B + "composite.py", None, _In(_NEVER, 301),
         "the child is chosen anew each step"),
    _Row("CPU_ATTN", _DENSE, _B + "cpu_attn.py", _In(_NEVER, 127), _In(_NEVER, 140)),
    _Row("CHUNKED_LOCAL", (LayerKind.CHUNKED_LOCAL,), "model_executor/layers/attention/chunked_local_attention.py",
         _In(_NEVER, 42), _In(_NEVER, 41), "forced for whatever backend is below it"),
    _Row("CACHE_ONLY_ATTN", _ANY, "model_executor/models/extract_hidden_states.py", _In(_NEVER, 153), _In(_NEVER, 140),
         "only stores hidden states"),
    _Row("WHISPER_CAUSAL", _DENSE, "model_executor/models/whisper_causal.py", None, _In(_SINGLE, 138),
         "block pooling around another backend"),
    # MLA. The common builder refuses to capture anything but decodes (mla_attention.py:1558 in 0.23, :2530 in 0.33).
    _Row("FLASHMLA", _MLA, _M + "flashmla.py", _In(_UNIFORM, 109), _In(_UNIFORM, 109)),
    _Row("FLASH_ATTN_MLA[cuda]", _MLA, _M + "flashattn_mla.py", _In(_UNIFORM, 106), _In(_UNIFORM, 126)),
    _Row("FLASH_ATTN_MLA[xpu]", _MLA, _M + "flashattn_mla.py", None, _In(_SINGLE, 278), "Intel XPU"),
    _Row("FLASHINFER_MLA", _MLA, _M + "flashinfer_mla.py", _In(_UNIFORM, 33),
         _In(_ALWAYS, 136, _VARLEN, note=_VERIFY_ONLY)),
    _Row("CUTLASS_MLA", _MLA, _M + "cutlass_mla.py", _In(_SINGLE, 31), _In(_SINGLE, 31)),
    _Row("TRITON_MLA", _MLA, _M + "triton_mla.py", _In(_UNIFORM, 32, "single", note="its kernel takes one-token rows"),
         _In(_UNIFORM, 74)),
    _Row("TOKENSPEED_MLA", _MLA, _M + "tokenspeed_mla.py", _In(_UNIFORM, 54), _In(_UNIFORM, 76)),
    _Row("ROCM_AITER_MLA[uniform]", _MLA, _M + "rocm_aiter_mla.py", _In(_UNIFORM, 138), _In(_UNIFORM, 695)),
    _Row("ROCM_AITER_MLA[adaptive]", _MLA, _M + "rocm_aiter_mla.py", None, _In(_UNIFORM, 764, _VARLEN), _ADAPTIVE),
    _Row("AMX_MLA", _MLA, _M + "amx_mla.py", None, _In(_NEVER, 155), "CPU"),
    # Sparse attention, and the indexers and caches that go with it.
    _Row("FLASHMLA_SPARSE", _SPARSE, _M + "flashmla_sparse.py", _In(_UNIFORM, 231), _In(_UNIFORM, 347)),
    _Row("FLASHINFER_MLA_SPARSE[base]", _SPARSE, _M + "flashinfer_mla_sparse.py", _In(_UNIFORM, 171),
         _In(_UNIFORM, 248)),
    _Row("FLASHINFER_MLA_SPARSE[trtllm]", _SPARSE, _M + "flashinfer_mla_sparse.py", None, _In(_UNIFORM, 278, _VARLEN),
         "SM100; varlen limit 1 + k"),
    _Row("FLASHINFER_MLA_SPARSE[sm90]", _SPARSE, _M + "flashinfer_mla_sparse_sm90.py", None, _In(_UNIFORM, 426)),
    _Row("FLASH_ATTN_MLA_SPARSE[fa3]", _SPARSE, _M + "flashattn_mla_sparse.py", None, _In(_UNIFORM, 124)),
    _Row("FLASH_ATTN_MLA_SPARSE[fa4]", _SPARSE, _M + "flashattn_mla_sparse.py", None, _In(_UNIFORM, 345, _VARLEN),
         "varlen limit 1 + k, inherited from the FlashInfer builder"),
    _Row("ROCM_AITER_MLA_SPARSE", _SPARSE, _M + "rocm_aiter_mla_sparse.py", _In(_SINGLE, 347), _In(_UNIFORM, 438)),
    _Row("XPU_MLA_SPARSE", _SPARSE, _M + "xpu_mla_sparse.py", _In(_NEVER, 102), _In(_NEVER, 118), "Intel XPU"),
    _Row("DEEPSEEK_V32_INDEXER[uniform]", _SPARSE, _M + "indexer.py", _In(_UNIFORM, 232), _In(_UNIFORM, 992)),
    _Row("DEEPSEEK_V32_INDEXER[varlen]", _SPARSE, _M + "indexer.py", None, _In(_ALWAYS, 992, _VARLEN),
         "varlen paged logits, or rows flattened to one token each; " + _VERIFY_ONLY),
    _Row("ROCM_MXFP4_INDEXER", _SPARSE, _M + "rocm_paged_mxfp4_indexer.py", None, _In(_ALWAYS, 325, _VARLEN),
         _VERIFY_ONLY),
    _Row("KPOOL_TAIL", _SPARSE, _M + "indexer.py", None, _In(_ALWAYS, 843), "a cache: slot mapping only"),
    _Row("DEEPSEEK_SPARSE_SWA[base]", _SPARSE, _M + "sparse_swa.py", _In(_UNIFORM, 192), _In(_UNIFORM, 437)),
    _Row("DEEPSEEK_SPARSE_SWA[flashmla]", _SPARSE, "models/deepseek_v4/nvidia/flashmla.py", None,
         _In(_ALWAYS, 39, _VARLEN), _VERIFY_ONLY),
    _Row("DEEPSEEK_SPARSE_SWA[flashinfer]", _SPARSE, "models/deepseek_v4/nvidia/flashinfer_sparse.py", None,
         _In(_ALWAYS, 189, _VARLEN), _VERIFY_ONLY),
    _Row("DEEPSEEK_SPARSE_SWA[rocm-adaptive]", _SPARSE, "models/deepseek_v4/amd/rocm.py", None,
         _In(_ALWAYS, 714, _VARLEN), _ADAPTIVE),
    _Row("DEEPSEEK_V4_SPARSE_MLA[base]", _SPARSE, "models/deepseek_v4/sparse_mla.py", _In(_UNIFORM, 132),
         _In(_UNIFORM, 122)),
    _Row("DEEPSEEK_V4_SPARSE_MLA[flashmla]", _SPARSE, "models/deepseek_v4/sparse_mla.py", None,
         _In(_ALWAYS, 288, _VARLEN), _VERIFY_ONLY),
    _Row("DEEPSEEK_V4_SPARSE_MLA[flashinfer]", _SPARSE, "models/deepseek_v4/nvidia/flashinfer_sparse.py", None,
         _In(_ALWAYS, 183, _VARLEN), _VERIFY_ONLY),
    _Row("DEEPSEEK_V4_SPARSE_MLA[rocm]", _SPARSE, "models/deepseek_v4/amd/rocm.py", _In(_UNIFORM, 459),
         _In(_UNIFORM, 633)),
    _Row("DEEPSEEK_V4_SPARSE_MLA[rocm-adaptive]", _SPARSE, "models/deepseek_v4/amd/rocm.py", None,
         _In(_ALWAYS, 633, _VARLEN), _ADAPTIVE),
    _Row("DEEPSEEK_V4_COMPRESSOR", _SPARSE, "models/deepseek_v4/compressor.py", _In(_ALWAYS, 86),
         _In(_ALWAYS, 92, _VARLEN, note="splits prefill rows off on the host")),
    _Row("DEEPSEEK_V41_SPARSE_MLA[base]", _SPARSE, "models/deepseek_v41/sparse_mla.py", None, _In(_UNIFORM, 170)),
    _Row("DEEPSEEK_V41_SPARSE_MLA[flashmla]", _SPARSE, "models/deepseek_v41/sparse_mla.py", None,
         _In(_ALWAYS, 256, _VARLEN), _VERIFY_ONLY),
    _Row("DEEPSEEK_V41_SPARSE_MLA[flashinfer]", _SPARSE, "models/deepseek_v41/nvidia/flashinfer_sparse.py", None,
         _In(_ALWAYS, 180, _VARLEN), _VERIFY_ONLY),
    _Row("DEEPSEEK_V41_SPARSE_MLA[rocm-adaptive]", _SPARSE, "models/deepseek_v41/amd/rocm.py", None,
         _In(_ALWAYS, 322, _VARLEN), _ADAPTIVE),
    _Row("MINIMAX_M3_SPARSE", _SPARSE, "models/minimax_m3/common/sparse_attention.py", None, _In(_UNIFORM, 241)),
    _Row("MINIMAX_M3_INDEXER", _SPARSE, "models/minimax_m3/common/indexer.py", None, _In(_UNIFORM, 205)),
    _Row("QWEN4_QSA", _SPARSE, "models/qwen4_exp/nvidia/qsa.py", None, _In(_UNIFORM, 140)),
    _Row("STEP5_DSA[single]", _SPARSE, "models/step5/nvidia/sparse_attention.py", None, _In(_SINGLE, 186)),
    _Row("STEP5_DSA[spec]", _SPARSE, "models/step5/nvidia/sparse_attention.py", None, _In(_UNIFORM, 186),
         "with speculative decoding"),
    _Row("STEP5_CSA_SUMMARY", _SPARSE, "models/step5/nvidia/sparse_summary_cache.py", None, _In(_ALWAYS, 84),
         "a cache"),
    _Row("STEP5_CSA_TAIL_RING", _SPARSE, "models/step5/nvidia/csa_tail_ring.py", None, _In(_ALWAYS, 76), "a cache"),
    _Row("DOTS3_NOTE_MLA", _MLA, "models/dots3_note/nvidia/attention.py", None, _In(_UNIFORM, 319)),
    # Recurrent state.
    _Row("MAMBA1_ATTN", _MAMBA, _B + "mamba_attn.py", _In(_UNIFORM, 79), _In(_UNIFORM, 83)),
    _Row("MAMBA2_ATTN", _MAMBA, _B + "mamba_attn.py", _In(_UNIFORM, 79),
         _In(_UNIFORM, 131, _VARLEN, _B + "mamba2_attn.py", note="varlen limit 1 + k")),
    _Row("SHORT_CONV_ATTN", _CONV, _B + "short_conv_attn.py", _In(_UNIFORM, 31), _In(_UNIFORM, 49)),
    _Row("PLE_SHORT_CONV_ATTN", _CONV, _B + "short_conv_attn.py", None, _In(_UNIFORM, 109)),
    _Row("INKLING_SCONV_SWA", (*_CONV, LayerKind.SLIDING_WINDOW), "models/inkling/nvidia/sconv_swa_attn.py", None,
         _In(_UNIFORM, 51)),
    _Row("GDN_ATTN", _GDN, _B + "gdn_attn.py", _In(_UNIFORM, 81), _In(_UNIFORM, 134)),
    _Row("LINEAR_ATTN", _LINEAR, _B + "linear_attn.py", _In(_SINGLE, 47), _In(_SINGLE, 48)),
    _Row("BAILING_LINEAR_ATTN", _LINEAR, _B + "linear_attn.py", None, _In(_UNIFORM, 115)),
    _Row("KIMI_K3_KDA[nvidia]", _GDN, "models/kimi_k3/nvidia/kda_metadata.py", None, _In(_ALWAYS, 302, _VARLEN),
         _VERIFY_ONLY),
    _Row("KIMI_K3_KDA[rocm]", _GDN, "models/kimi_k3/amd/kda_metadata.py", None, _In(_UNIFORM, 105)),
    _Row("KIMI_K3_KDA[rocm-adaptive]", _GDN, "models/kimi_k3/amd/kda_metadata.py", None, _In(_UNIFORM, 105, _VARLEN),
         _ADAPTIVE),
)
# fmt: on


def _backend(version: str, release: str, row: _Row, cell: _In) -> Backend:
    limit = {} if cell.query_len is None else {"uniform_query_len": cell.query_len}
    # Absorbed and expanded MLA, sparse selection, recurrent step and scan: decode and prefill are two computations.
    one = any(kind in _DENSE for kind in row.kinds)
    claims = Claims.at_level(cell.holds or _LEVEL_CLAIMS[cell.declared], one_computation=one, **limit)
    source = f"vLLM {release} {cell.path or row.path}:{cell.line}"
    return Backend(version, row.name, row.kinds, cell.declared, claims, source, cell.note or row.note)


VLLM_BACKENDS: tuple[Backend, ...] = tuple(
    _backend(version, release, row, cell)
    for version, release, column in (("vllm-0.23", "0.23.0", "v23"), ("vllm-0.33", "0.33.0", "v33"))
    for row in _ROWS
    if (cell := getattr(row, column)) is not None
)
"""Every row of both releases, in the order of the table."""
