"""Attention backends of the Ascend and Kunlun plug-ins for vLLM: declared levels, and what holds.

Their difference is in `host_params`. Ascend's attention takes lengths as host lists and can rewrite them at replay
(task groups), where the operator was captured so; operators that read lengths from device tensors need no rewriting.
Kunlun hands its operators host copies of lengths and can't rewrite them, so a graph would keep those of its capture.
"""

from __future__ import annotations

from kpolicy.attention.backends import Backend, DeclaredLevel
from kpolicy.attention.support import Claims, HostParams, LayerKind

__all__ = ["VENDOR_BACKENDS"]

_NEVER, _SINGLE, _UNIFORM, _ALWAYS = DeclaredLevel
_DENSE = (LayerKind.MHA, LayerKind.GQA, LayerKind.MQA, LayerKind.SLIDING_WINDOW)
_UPDATED = HostParams.UPDATABLE
_FROZEN = HostParams.FROZEN
_NONE = HostParams.NONE
_ASCEND = "vllm-ascend 182b75ea vllm_ascend/"
_KUNLUN = "vLLM-Kunlun 09869ee vllm_kunlun/"
_OLD_NAME = (
    "declared under the attribute's old name, which newer vLLM doesn't read: there it resolves as never; "
    "host copies of lengths are frozen in a graph"
)


def _claims(level: str, host: HostParams, *, one: bool, query_len: int | None = None) -> Claims:
    limit = {} if query_len is None else {"uniform_query_len": query_len}
    return Claims.at_level(level, host_params=host, one_computation=one, **limit)


def _row(
    engine: str, name: str, kinds: tuple[LayerKind, ...], declared: DeclaredLevel, claims: Claims, path: str, note: str
) -> Backend:
    return Backend(engine, name, kinds, declared, claims, path, note)


def _ascend(
    name: str, kinds: tuple[LayerKind, ...], declared: DeclaredLevel, claims: Claims, path: str, note: str
) -> Backend:
    return _row("vllm-ascend", name, kinds, declared, claims, _ASCEND + path, note)


def _kunlun(
    name: str, kinds: tuple[LayerKind, ...], declared: DeclaredLevel, claims: Claims, path: str, note: str
) -> Backend:
    return _row("vllm-kunlun", name, kinds, declared, claims, _KUNLUN + path, note)


_MLA = (LayerKind.MLA,)
_SPARSE = (LayerKind.SPARSE,)
_GDN = (LayerKind.GDN,)
_KV_LENGTHS = "KV lengths are host lists, rewritten at each replay"
_NO_UPDATE = "lengths are device tensors; nothing is rewritten at replay"
_TND = "KV and query lengths are rewritten at each replay; a decode row has at most 16 tokens (RFC #3003)"
_MLA_CLAIMS = _claims("uniform", _UPDATED, one=False, query_len=16)
_DEVICE_UNIFORM = _claims("uniform", _NONE, one=False)
_FROZEN_UNIFORM = _claims("uniform", _FROZEN, one=False)

# fmt: off
VENDOR_BACKENDS: tuple[Backend, ...] = (
    _ascend("attention_v1", _DENSE, _ALWAYS, _claims("mixed", _UPDATED, one=True), "attention/attention_v1.py",
            _KV_LENGTHS),
    _ascend("attention_cp", _DENSE, _ALWAYS, _claims("uniform", _UPDATED, one=True),
            "attention/context_parallel/attention_cp.py", "no mixed graphs under context parallel; " + _KV_LENGTHS),
    _ascend("fa3_v1", _DENSE, _ALWAYS, _claims("none", _NONE, one=True), "attention/fa3_v1.py",
            "the level is inherited and wrong: the implementation refuses full graphs; its documents say piecewise"),
    _ascend("mla_v1", _MLA, _UNIFORM, _MLA_CLAIMS, "attention/mla_v1.py", _TND),
    _ascend("mla_cp", _MLA, _UNIFORM, _MLA_CLAIMS, "attention/context_parallel/mla_cp.py", _TND),
    _ascend("sfa_v1", _SPARSE, _UNIFORM, _DEVICE_UNIFORM, "attention/sfa_v1.py", _NO_UPDATE),
    _ascend("sfa_cp", _SPARSE, _UNIFORM, _DEVICE_UNIFORM, "attention/context_parallel/sfa_cp.py", _NO_UPDATE),
    _ascend("dsa_v1", _SPARSE, _UNIFORM, _DEVICE_UNIFORM, "attention/dsa_v1.py", _NO_UPDATE),
    _ascend("dsa_cp", _SPARSE, _UNIFORM, _DEVICE_UNIFORM, "attention/context_parallel/dsa_cp.py", _NO_UPDATE),
    _ascend("dsa_indexer", _SPARSE, _UNIFORM, _DEVICE_UNIFORM, "attention/dsa_v1.py", _NO_UPDATE),
    _ascend("gdn", _GDN, _UNIFORM, _DEVICE_UNIFORM, "ops (GDN linear attention)",
            "convolution lengths moved to device tensors (#11161); must not see padded cumulative lengths (#6822)"),
    _ascend("minimax_m3_sparse", _SPARSE, _UNIFORM, _DEVICE_UNIFORM, "attention (MiniMax-M3 block sparse)", _NO_UPDATE),
    _kunlun("KUNLUN_ATTN[fa3]", _DENSE, _ALWAYS, _claims("mixed", _FROZEN, one=True),
            "v1/attention/backends/kunlun_attn.py", "host copies of lengths are frozen in a graph"),
    _kunlun("KUNLUN_ATTN[fa2]", _DENSE, _UNIFORM, _claims("uniform", _FROZEN, one=True),
            "v1/attention/backends/kunlun_attn.py", "host copies of lengths are frozen in a graph"),
    _kunlun("FLASHMLA", _MLA, _UNIFORM, _FROZEN_UNIFORM, "v1/attention/backends/mla/flashmla.py", _OLD_NAME),
    _kunlun("FLASHMLA_SPARSE", _SPARSE, _UNIFORM, _FROZEN_UNIFORM, "v1/attention/backends/mla/flashmla_sparse.py",
            _OLD_NAME),
    _kunlun("INDEXER", _SPARSE, _UNIFORM, _FROZEN_UNIFORM, "v1/attention/backends/mla/indexer.py", _OLD_NAME),
    _kunlun("GDN_ATTN", _GDN, _UNIFORM, _DEVICE_UNIFORM, "v1/attention/backends/gdn_attn.py",
            "decode only, from persistent buffers; not proven by a replay on a device"),
)
# fmt: on
"""Ascend's rows, then Kunlun's. Their snapshots give files, not lines."""
