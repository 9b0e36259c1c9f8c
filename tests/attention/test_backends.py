"""The backend tables against what was read in the projects, row by row."""

from __future__ import annotations

import pytest

from kpolicy.attention import AttentionSupport, HostParams, LayerKind, SupportLevel
from kpolicy.attention.backends import Backend, DeclaredLevel, backend_support, backends, variants
from kpolicy.errors import SupportError, UnknownNameError

# What the two vLLM releases declare: name, 0.23, 0.33; "-" where the release hasn't the backend or condition.
DECLARED = """
FLASH_ATTN[fa2]                         uniform  uniform
FLASH_ATTN[fa3]                         always   always
FLASH_ATTN[fa4]                         -        always
FLASH_ATTN[xpu]                         always   always
TRITON_ATTN                             always   always
TRITON_ATTN_DIFFKV                      -        always
FLEX_ATTENTION                          always   always
FLASHINFER[trtllm]                      uniform  -
FLASHINFER[trtllm-gen]                  -        uniform
FLASHINFER[xqa]                         -        uniform
FLASHINFER[fa2]                         -        uniform
FLASHINFER[fa2-noncausal]               -        single
FLASHINFER[native]                      single   single
FLASHINFER[dcp]                         -        single
ROCM_ATTN                               always   always
ROCM_AITER_UNIFIED_ATTN                 always   always
ROCM_SEGMENTED_ATTN                     -        always
ROCM_AITER_FA                           uniform  uniform
ROCM_OCTAVE                             -        uniform
B12X                                    -        uniform
HPC_ATTN[single]                        -        single
HPC_ATTN[spec]                          -        uniform
TURBOQUANT                              uniform  uniform
COMPOSITE[clamped]                      -        single
COMPOSITE[unclamped-window]             -        never
CPU_ATTN                                never    never
CHUNKED_LOCAL                           never    never
CACHE_ONLY_ATTN                         never    never
WHISPER_CAUSAL                          -        single
FLASHMLA                                uniform  uniform
FLASH_ATTN_MLA[cuda]                    uniform  uniform
FLASH_ATTN_MLA[xpu]                     -        single
FLASHINFER_MLA                          uniform  always
CUTLASS_MLA                             single   single
TRITON_MLA                              uniform  uniform
TOKENSPEED_MLA                          uniform  uniform
ROCM_AITER_MLA[uniform]                 uniform  uniform
ROCM_AITER_MLA[adaptive]                -        uniform
AMX_MLA                                 -        never
FLASHMLA_SPARSE                         uniform  uniform
FLASHINFER_MLA_SPARSE[base]             uniform  uniform
FLASHINFER_MLA_SPARSE[trtllm]           -        uniform
FLASHINFER_MLA_SPARSE[sm90]             -        uniform
FLASH_ATTN_MLA_SPARSE[fa3]              -        uniform
FLASH_ATTN_MLA_SPARSE[fa4]              -        uniform
ROCM_AITER_MLA_SPARSE                   single   uniform
XPU_MLA_SPARSE                          never    never
DEEPSEEK_V32_INDEXER[uniform]           uniform  uniform
DEEPSEEK_V32_INDEXER[varlen]            -        always
ROCM_MXFP4_INDEXER                      -        always
KPOOL_TAIL                              -        always
DEEPSEEK_SPARSE_SWA[base]               uniform  uniform
DEEPSEEK_SPARSE_SWA[flashmla]           -        always
DEEPSEEK_SPARSE_SWA[flashinfer]         -        always
DEEPSEEK_SPARSE_SWA[rocm-adaptive]      -        always
DEEPSEEK_V4_SPARSE_MLA[base]            uniform  uniform
DEEPSEEK_V4_SPARSE_MLA[flashmla]        -        always
DEEPSEEK_V4_SPARSE_MLA[flashinfer]      -        always
DEEPSEEK_V4_SPARSE_MLA[rocm]            uniform  uniform
DEEPSEEK_V4_SPARSE_MLA[rocm-adaptive]   -        always
DEEPSEEK_V4_COMPRESSOR                  always   always
DEEPSEEK_V41_SPARSE_MLA[base]           -        uniform
DEEPSEEK_V41_SPARSE_MLA[flashmla]       -        always
DEEPSEEK_V41_SPARSE_MLA[flashinfer]     -        always
DEEPSEEK_V41_SPARSE_MLA[rocm-adaptive]  -        always
MINIMAX_M3_SPARSE                       -        uniform
MINIMAX_M3_INDEXER                      -        uniform
QWEN4_QSA                               -        uniform
STEP5_DSA[single]                       -        single
STEP5_DSA[spec]                         -        uniform
STEP5_CSA_SUMMARY                       -        always
STEP5_CSA_TAIL_RING                     -        always
DOTS3_NOTE_MLA                          -        uniform
MAMBA1_ATTN                             uniform  uniform
MAMBA2_ATTN                             uniform  uniform
SHORT_CONV_ATTN                         uniform  uniform
PLE_SHORT_CONV_ATTN                     -        uniform
INKLING_SCONV_SWA                       -        uniform
GDN_ATTN                                uniform  uniform
LINEAR_ATTN                             single   single
BAILING_LINEAR_ATTN                     -        uniform
KIMI_K3_KDA[nvidia]                     -        always
KIMI_K3_KDA[rocm]                       -        uniform
KIMI_K3_KDA[rocm-adaptive]              -        uniform
"""

# Where what holds isn't what is declared: engine/name, declared, what a graph may hold.
TRUTH = """
vllm-0.23/TRITON_MLA                              uniform  single
vllm-0.23/TURBOQUANT                              uniform  single
vllm-0.33/TURBOQUANT                              uniform  single
vllm-0.33/FLASHINFER[trtllm-gen]                  uniform  varlen_decode
vllm-0.33/FLASHINFER_MLA                          always   varlen_decode
vllm-0.33/ROCM_AITER_MLA[adaptive]                uniform  varlen_decode
vllm-0.33/FLASHINFER_MLA_SPARSE[trtllm]           uniform  varlen_decode
vllm-0.33/FLASH_ATTN_MLA_SPARSE[fa4]              uniform  varlen_decode
vllm-0.33/DEEPSEEK_V32_INDEXER[varlen]            always   varlen_decode
vllm-0.33/ROCM_MXFP4_INDEXER                      always   varlen_decode
vllm-0.33/DEEPSEEK_SPARSE_SWA[flashmla]           always   varlen_decode
vllm-0.33/DEEPSEEK_SPARSE_SWA[flashinfer]         always   varlen_decode
vllm-0.33/DEEPSEEK_SPARSE_SWA[rocm-adaptive]      always   varlen_decode
vllm-0.33/DEEPSEEK_V4_SPARSE_MLA[flashmla]        always   varlen_decode
vllm-0.33/DEEPSEEK_V4_SPARSE_MLA[flashinfer]      always   varlen_decode
vllm-0.33/DEEPSEEK_V4_SPARSE_MLA[rocm-adaptive]   always   varlen_decode
vllm-0.33/DEEPSEEK_V4_COMPRESSOR                  always   varlen_decode
vllm-0.33/DEEPSEEK_V41_SPARSE_MLA[flashmla]       always   varlen_decode
vllm-0.33/DEEPSEEK_V41_SPARSE_MLA[flashinfer]     always   varlen_decode
vllm-0.33/DEEPSEEK_V41_SPARSE_MLA[rocm-adaptive]  always   varlen_decode
vllm-0.33/MAMBA2_ATTN                             uniform  varlen_decode
vllm-0.33/KIMI_K3_KDA[nvidia]                     always   varlen_decode
vllm-0.33/KIMI_K3_KDA[rocm-adaptive]              uniform  varlen_decode
vllm-ascend/attention_cp                          always   uniform
vllm-ascend/fa3_v1                                always   none
"""

# The plug-ins: name, declared, host lengths.
VENDORS = """
vllm-ascend/attention_v1        always   updatable
vllm-ascend/attention_cp        always   updatable
vllm-ascend/fa3_v1              always   none
vllm-ascend/mla_v1              uniform  updatable
vllm-ascend/mla_cp              uniform  updatable
vllm-ascend/sfa_v1              uniform  none
vllm-ascend/sfa_cp              uniform  none
vllm-ascend/dsa_v1              uniform  none
vllm-ascend/dsa_cp              uniform  none
vllm-ascend/dsa_indexer         uniform  none
vllm-ascend/gdn                 uniform  none
vllm-ascend/minimax_m3_sparse   uniform  none
vllm-kunlun/KUNLUN_ATTN[fa3]    always   frozen
vllm-kunlun/KUNLUN_ATTN[fa2]    uniform  frozen
vllm-kunlun/FLASHMLA            uniform  frozen
vllm-kunlun/FLASHMLA_SPARSE     uniform  frozen
vllm-kunlun/INDEXER             uniform  frozen
vllm-kunlun/GDN_ATTN            uniform  none
"""

LEVELS = {
    DeclaredLevel.NEVER: SupportLevel.NONE,
    DeclaredLevel.SINGLE: SupportLevel.SINGLE,
    DeclaredLevel.UNIFORM: SupportLevel.UNIFORM,
    DeclaredLevel.ALWAYS: SupportLevel.MIXED,
}


def rows(text: str) -> list[tuple[str, str, str]]:
    """The lines of a table as triples."""
    return [(name, second, third) for name, second, third in (line.split() for line in text.strip().splitlines())]


def of_engine(*engines: str) -> list[Backend]:
    """The rows of these engines."""
    return [row for row in backends().values() if row.engine in engines]


@pytest.mark.parametrize(("engine", "column"), [("vllm-0.23", 1), ("vllm-0.33", 2)])
def test_vllm_rows_are_those_that_were_read(engine: str, column: int) -> None:
    """Each release has exactly the reviewed rows, with the levels declared there."""
    expected = {row[0]: row[column] for row in rows(DECLARED) if row[column] != "-"}
    assert {row.name: str(row.declared) for row in of_engine(engine)} == expected


def test_row_counts() -> None:
    """No row is found under another's name."""
    expected = {"vllm-0.23": 35, "vllm-0.33": 83, "vllm-ascend": 12, "vllm-kunlun": 6}
    assert {engine: len(of_engine(engine)) for engine in expected} == expected
    assert len(backends()) == sum(expected.values())


def test_what_holds_differs_from_what_is_declared_only_where_noted() -> None:
    """Claims are those of the declared level, but for the reviewed exceptions, each with a note."""
    differing = {
        name: (str(row.declared), str(row.claims.level))
        for name, row in backends().items()
        if LEVELS[row.declared] is not row.claims.level
    }
    assert differing == {name: (declared, holds) for name, declared, holds in rows(TRUTH)}
    assert all(backends()[name].note for name in differing)


def test_vendor_rows_are_those_that_were_read() -> None:
    """Ascend and Kunlun have the reviewed levels and ways to read lengths."""
    found = [
        (row.full_name, str(row.declared), str(row.claims.host_params))
        for row in of_engine("vllm-ascend", "vllm-kunlun")
    ]
    assert found == rows(VENDORS)


def test_no_latent_or_recurrent_backend_claims_mixed() -> None:
    """No MLA or recurrent backend of any engine captures prefill beside decode."""
    kinds = {LayerKind.MLA, LayerKind.MAMBA, LayerKind.GDN, LayerKind.LINEAR, LayerKind.SHORT_CONV}
    checked = [row for row in backends().values() if row.kinds <= kinds]
    assert len(checked) > 30
    assert not [row.full_name for row in checked if row.claims.mixed]
    assert not [row.full_name for row in checked if row.claims.one_computation]


def test_kunlun_with_frozen_lengths_has_no_full_graph() -> None:
    """Where Kunlun passes host copies of lengths, pieces are all that may be captured."""
    frozen = [row for row in of_engine("vllm-kunlun") if row.claims.host_params is HostParams.FROZEN]
    assert len(frozen) == 5
    assert all(row.claims.full.level is SupportLevel.NONE and row.claims.full.piecewise for row in frozen)


def test_every_row_names_its_source_and_kinds() -> None:
    """A row says which project and file it was read in, with the line for vLLM, and what it runs."""
    for row in backends().values():
        assert row.kinds, row.full_name
        if row.engine.startswith("vllm-0"):
            project, release, place = row.source.split()
            path, _, line = place.partition(":")
            assert (project, release.startswith(row.engine[5:]), path.endswith(".py")) == ("vLLM", True, True)
            assert line.isdigit()
        else:
            assert row.source.startswith(("vllm-ascend 182b75ea ", "vLLM-Kunlun 09869ee "))


def test_limits_on_query_lengths() -> None:
    """Kernels that take only so many tokens a row say so."""
    assert backends()["vllm-0.33/HPC_ATTN[spec]"].claims.uniform_query_len == 4
    assert backends()["vllm-ascend/mla_v1"].claims.uniform_query_len == 16


def test_a_name_without_condition_is_the_meet_of_its_variants() -> None:
    """What holds whichever variant the engine picks, with every variant as an origin."""
    rows_of = variants("vllm-0.33/FLASH_ATTN")
    assert [row.name for row in rows_of] == [f"FLASH_ATTN[{each}]" for each in ("fa2", "fa3", "fa4", "xpu")]
    met = backend_support("vllm-0.33/FLASH_ATTN", LayerKind.GQA)
    assert met == AttentionSupport.meet_all(row.support(LayerKind.GQA) for row in rows_of)
    assert met.claims.level is SupportLevel.UNIFORM
    assert len(met.origins) == 4


def test_no_name_is_both_a_row_and_a_family_of_variants() -> None:
    """A name means one thing: a row without condition has no variants beside it."""
    plain = {row.full_name for row in backends().values() if "[" not in row.name}
    conditional = {row.family for row in backends().values() if "[" in row.name}
    assert not plain & conditional


def test_names_are_found_in_any_case() -> None:
    """Case doesn't tell two backends apart, so it needn't be typed."""
    assert backend_support("VLLM-0.33/flash_attn[FA3]") == backend_support("vllm-0.33/FLASH_ATTN[fa3]")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vllm-0.33/FLASH_ATN[fa3]", r"FLASH_ATTN\[fa3\]"),
        ("vllm-0.33/FLASHMLAA", "Nearest: vllm-0.33/FLASHMLA"),
        ("flash_attn", "Say which engine's: vllm-0.23/FLASH_ATTN or vllm-0.33/FLASH_ATTN"),
        ("vllm-0.34/FLASHMLA", "vllm-0.33/FLASHMLA"),
        ("nonsense", "ENGINE/BACKEND"),
    ],
)
def test_an_unknown_name_says_what_is_near(name: str, said: str) -> None:
    """A misspelt backend, one without its engine, or a release that isn't there names the next step."""
    with pytest.raises(UnknownNameError, match=said):
        backend_support(name)


def test_a_backend_refuses_kinds_it_does_not_run() -> None:
    """Asking an MLA backend for grouped-query layers is an error that says what it runs."""
    with pytest.raises(SupportError, match="doesn't run gqa layers; it runs mla"):
        backend_support("vllm-0.33/FLASHMLA", LayerKind.GQA)


def test_the_only_kind_is_filled_in() -> None:
    """An origin names the kind where the backend has one, and none where it has several."""
    (mla,) = backend_support("vllm-0.33/FLASHMLA").origins
    (dense,) = backend_support("vllm-0.33/TRITON_ATTN").origins
    assert (mla.kind, dense.kind) == (LayerKind.MLA, None)


def test_declared_levels_are_ordered() -> None:
    """An engine's least over layers is the built-in minimum."""
    assert min(DeclaredLevel.ALWAYS, DeclaredLevel.SINGLE) is DeclaredLevel.SINGLE
    assert [str(level) for level in sorted(DeclaredLevel)] == ["never", "single", "uniform", "always"]
