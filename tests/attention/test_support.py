"""The laws of the meet, and what claims and flags say."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.attention import (
    ANY_QUERY_LEN,
    AttentionSupport,
    Claims,
    HostParams,
    LayerKind,
    SupportLevel,
    parse_attention,
)
from kpolicy.attention.support import reference_support
from kpolicy.errors import SupportError, UnknownNameError
from tests.strategies import claims

supports = st.builds(
    lambda claimed, kind, backend: AttentionSupport.of(claimed, kind=kind, backend=backend, source="a test"),
    claims(),
    st.sampled_from([None, *LayerKind]),
    st.sampled_from(["one", "two", "three"]),
)


@given(claims(), claims())
def test_meet_of_claims_is_commutative(a: Claims, b: Claims) -> None:
    """The order of two layers doesn't matter."""
    assert a.meet(b) == b.meet(a)


@given(claims(), claims(), claims())
def test_meet_of_claims_is_associative(a: Claims, b: Claims, c: Claims) -> None:
    """The grouping of layers doesn't matter."""
    assert a.meet(b).meet(c) == a.meet(b.meet(c))


@given(claims())
def test_meet_of_claims_is_idempotent(a: Claims) -> None:
    """A second layer of the same claims changes nothing."""
    assert a.meet(a) == a


@given(claims(), claims())
def test_meet_of_claims_is_a_lower_bound(a: Claims, b: Claims) -> None:
    """The meet claims no more than either layer."""
    met = a.meet(b)
    assert met <= a
    assert met <= b


@given(claims(), claims(), claims())
def test_meet_of_claims_is_the_greatest_lower_bound(a: Claims, b: Claims, c: Claims) -> None:
    """Whatever both layers claim, the meet claims too, built here so that such claims do occur."""
    below = c.meet(a).meet(b)
    assert below <= a.meet(b)
    if c <= a and c <= b:
        assert c <= a.meet(b)


@given(claims(), claims())
def test_le_of_claims_compares_claim_by_claim(a: Claims, b: Claims) -> None:
    """One support is at most another exactly when each of its claims is."""
    order = [HostParams.FROZEN, HostParams.UPDATABLE, HostParams.NONE]
    by_claim = (
        a.uniform_query_len <= b.uniform_query_len
        and a.varlen_query_len <= b.varlen_query_len
        and a.mixed <= b.mixed
        and a.piecewise <= b.piecewise
        and order.index(a.host_params) <= order.index(b.host_params)
        and a.one_computation <= b.one_computation
    )
    assert (a <= b) == by_claim


@given(claims(), claims(), claims())
def test_le_of_claims_is_a_partial_order(a: Claims, b: Claims, c: Claims) -> None:
    """Comparison is reflexive, antisymmetric and transitive."""
    assert a <= a
    if a <= b and b <= a:
        assert a == b
    lower, middle = a.meet(b).meet(c), a.meet(b)
    assert lower <= middle <= a
    assert lower <= a


@given(claims())
def test_top_and_bottom(a: Claims) -> None:
    """Unlimited claims are the unit of the meet, and no claims its zero."""
    top = Claims(mixed=True)
    bottom = Claims(piecewise=False, host_params=HostParams.FROZEN, one_computation=False)
    assert a.meet(top) == a
    assert a.meet(bottom) == bottom


@given(claims(), claims())
def test_meet_keeps_claims_consistent(a: Claims, b: Claims) -> None:
    """In a meet too, mixed brings varlen and varlen brings uniform."""
    met = a.meet(b)
    assert met.varlen_query_len <= met.uniform_query_len
    assert not met.mixed or met.varlen_query_len == ANY_QUERY_LEN


@given(supports, supports, supports)
def test_meet_of_supports_keeps_its_laws(a: AttentionSupport, b: AttentionSupport, c: AttentionSupport) -> None:
    """With origins too the meet is commutative, associative, idempotent, and a lower bound."""
    assert a.meet(b) == b.meet(a)
    assert a.meet(b).meet(c) == a.meet(b.meet(c))
    assert a.meet(a) == a
    assert a.meet(b) <= a
    assert a.meet(b) <= b
    assert a.meet(b).origins == a.origins | b.origins
    assert AttentionSupport.meet_all([c, b, a]) == a.meet(b).meet(c)


@given(claims(), claims())
def test_full_claims_are_monotone(a: Claims, b: Claims) -> None:
    """What holds for a FULL graph of the meet, holds for a FULL graph of each layer."""
    assert a.meet(b).full <= a.full
    assert a.full <= a


@given(claims())
def test_frozen_host_lengths_leave_no_full_graph(a: Claims) -> None:
    """A graph that would keep the lengths of its capture may hold nothing; updatable ones stay as they are."""
    frozen = a.meet(Claims(mixed=True, host_params=HostParams.FROZEN))
    assert frozen.full.level is SupportLevel.NONE
    assert frozen.full.piecewise == a.piecewise
    if a.host_params is not HostParams.FROZEN:
        assert a.full == a


@pytest.mark.parametrize("level", list(SupportLevel))
def test_levels_name_their_own_claims(level: SupportLevel) -> None:
    """The claims of a level have that level, from the enum and from its name."""
    assert Claims.at_level(level).level is level
    assert Claims.at_level(level.value) == Claims.at_level(level)
    assert str(Claims.at_level(level)) == level.value


def test_levels_rise() -> None:
    """Each level's claims include those of the level below."""
    rising = [Claims.at_level(level) for level in SupportLevel]
    assert all(lower <= higher and lower != higher for lower, higher in itertools.pairwise(rising))


def test_an_unknown_level_suggests_the_near_miss() -> None:
    """A misspelt level names what was meant."""
    with pytest.raises(UnknownNameError, match="did you mean 'uniform'"):
        Claims.at_level("unifrom")


def test_limits_show_in_text() -> None:
    """A limited query length and host lengths are said; unlimited ones aren't."""
    assert str(Claims(4)) == "uniform(4)"
    assert str(Claims(varlen_query_len=4)) == "varlen_decode(4)"
    assert str(Claims(1, piecewise=False, host_params=HostParams.UPDATABLE)) == (
        "single, no piecewise, host lengths updatable"
    )


def test_negative_query_lengths_are_refused() -> None:
    """A limit under zero is an error, not "no support"."""
    with pytest.raises(SupportError, match="from 0 on"):
        Claims(-1)


@pytest.mark.parametrize("value", ["frozen", HostParams.FROZEN])
def test_host_lengths_by_name_are_those_of_the_member(value: Any) -> None:
    """A string isn't told and then not heeded: frozen host lengths allow no FULL graph, however they are given."""
    claims = Claims(mixed=True, host_params=value)
    assert claims.host_params is HostParams.FROZEN
    assert claims.full == Claims(host_params=HostParams.FROZEN)


def test_host_lengths_of_another_name_are_refused() -> None:
    """The error has the names that there are."""
    with pytest.raises(UnknownNameError, match="unknown host_params 'froze'; did you mean 'frozen'"):
        Claims(mixed=True, host_params="froze")


@pytest.mark.parametrize(
    "given",
    [{"mixed": "false"}, {"piecewise": 0}, {"uniform_query_len": 1.5}, {"uniform_query_len": "4"},
     {"varlen_query_len": True}],
)  # fmt: skip
def test_claims_of_another_type_are_refused(given: dict[str, Any]) -> None:
    """A string that says false would be a claim, and so would 1.5 tokens."""
    with pytest.raises(SupportError, match=r"whole numbers from 0 on|true or false"):
        Claims(**given)


@pytest.mark.parametrize("flag", ["gqa:", "uniform:", "gqa:+mla"])
def test_a_colon_without_a_backend_is_refused(flag: str) -> None:
    """A backend that was left out isn't taken for kpolicy's reference."""
    with pytest.raises(UnknownNameError, match="unknown attention kind"):
        parse_attention(flag)


def test_a_model_without_layers_has_no_support() -> None:
    """The meet of nothing is an error, since it would claim everything."""
    with pytest.raises(SupportError, match="at least one layer"):
        AttentionSupport.meet_all([])


@pytest.mark.parametrize("kind", list(LayerKind))
def test_a_kind_parses_to_its_reference_support(kind: LayerKind) -> None:
    """The flag that names a layer kind gives the reference support of that kind."""
    assert parse_attention(kind.value) == reference_support(kind)


def test_kinds_joined_with_plus_are_met() -> None:
    """A hybrid's flag is the meet of its parts, spaces and order aside."""
    assert parse_attention("gdn+gqa") == parse_attention(" gqa + gdn ")
    assert parse_attention("gdn+gqa").claims == reference_support(LayerKind.GDN).claims
    assert parse_attention("swa") == parse_attention("sliding_window")


def test_a_level_parses_as_stated() -> None:
    """A level in place of a kind is taken as the caller's statement."""
    support = parse_attention("uniform")
    assert support.claims == Claims.at_level("uniform")
    assert {origin.backend for origin in support.origins} == {"stated"}


def test_a_kind_may_carry_a_backend() -> None:
    """A backend after the colon replaces the reference."""
    support = parse_attention("gqa:vllm-0.33/FLASH_ATTN[fa2]+mla:vllm-0.33/CUTLASS_MLA")
    assert support.claims.level is SupportLevel.SINGLE
    assert {origin.backend for origin in support.origins} == {"vllm-0.33/FLASH_ATTN[fa2]", "vllm-0.33/CUTLASS_MLA"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gqaa", "did you mean 'gqa'"),
        ("mamba3", "did you mean 'mamba'"),
        ("", "Join several layer kinds with"),
        ("gqa+", "unknown attention kind"),
        ("gqa:vllm-0.33/FLASH_ATN[fa3]", r"FLASH_ATTN\[fa3\]"),
        ("uniform:vllm-0.33/FLASH_ATTN", "unknown attention kind"),
    ],
)
def test_a_bad_flag_names_the_near_miss(text: str, said: str) -> None:
    """An unknown kind, level or backend says what was meant or what is allowed."""
    with pytest.raises(UnknownNameError, match=said):
        parse_attention(text)


def test_limits_name_the_weakest_layers() -> None:
    """The layers that keep a model below mixed are named, and nothing is where the model is mixed."""
    (limit,) = parse_attention("mla+gqa").limits
    assert limit.startswith("mla on reference: uniform")
    assert parse_attention("gqa").limits == ()


def limiting(*claimed: Claims) -> list[str]:
    """Which of the layers with those claims, named by their place, limit the model."""
    named = [AttentionSupport.of(each, backend=f"b{i}", source="a test") for i, each in enumerate(claimed)]
    return [text.split()[3].rstrip(":") for text in AttentionSupport.meet_all(named).limits]


FROZEN = Claims(mixed=True, host_params=HostParams.FROZEN)
TOP = Claims(mixed=True)


@pytest.mark.parametrize(
    ("claimed", "limits"),
    [
        ([Claims(8, 0), Claims(4, 4)], ["b1", "b0"]),
        ([Claims(16), Claims(4)], ["b1"]),
        ([Claims(4), Claims(4), TOP], ["b0", "b1"]),
        ([Claims(16, 8), Claims(4, 4), Claims(8, 0)], ["b1", "b2"]),
        ([TOP, Claims(mixed=True, piecewise=False)], ["b1"]),
        ([Claims(16, piecewise=False), Claims(4), TOP], ["b1", "b0"]),
        ([FROZEN, TOP, Claims(4)], ["b0"]),
        ([FROZEN, Claims.at_level("none"), TOP], ["b0", "b1"]),
        ([Claims(mixed=True, host_params=HostParams.UPDATABLE), TOP], ["b0"]),
        ([Claims.at_level("uniform", one_computation=False), Claims.at_level("uniform")], ["b0", "b1"]),
        ([TOP, Claims(mixed=True, one_computation=False)], []),
    ],
)
def test_limits_are_found_claim_by_claim(claimed: list[Claims], limits: list[str]) -> None:
    """Each layer that gives a claim of the meet is named, weakest first; one that another undercuts in all isn't."""
    assert limiting(*claimed) == limits


@given(st.lists(claims(), min_size=1, max_size=4))
def test_raising_every_limiter_raises_the_model(claimed: list[Claims]) -> None:
    """Were the named layers' attention without limits, the model would support more; nothing named, it has the most."""
    named = [AttentionSupport.of(each, backend=f"b{i}", source="a test") for i, each in enumerate(claimed)]
    met = AttentionSupport.meet_all(named)
    rest = [each.claims for each in named if not set(met.limits) & {str(origin) for origin in each.origins}]
    without = AttentionSupport.meet_all([AttentionSupport.of(each, backend="b", source="s") for each in [*rest, TOP]])
    kept = attrs.evolve(without.claims.full, one_computation=True)
    if met.limits:
        assert kept != attrs.evolve(met.claims.full, one_computation=True)
    else:
        assert kept == TOP


def test_reference_claims_cite_their_document() -> None:
    """The source of a reference claim is the document that has the table of them."""
    (origin,) = reference_support(LayerKind.MLA).origins
    assert "docs/attention.md" in origin.source
