"""`Claims`: what a graph may capture of attention, with a meet; `AttentionSupport`: claims and who made them.

Support isn't a ladder of levels. A backend may capture a mix of 1 to L decode tokens a row and no prefill, another
uniform batches of any one length and no mix. So support is a set of claims, each a number or a flag, and the support
of a model is the meet (the greatest support that every layer gives) over its layers. The meet is taken claim by
claim, which makes it commutative, associative and idempotent; tests hold it to these laws.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import attrs

from kpolicy.errors import SupportError, UnknownNameError
from kpolicy.shapes import LARGEST_COUNT, plain_int

__all__ = [
    "ANY_QUERY_LEN",
    "AttentionSupport",
    "Claims",
    "HostParams",
    "LayerKind",
    "Origin",
    "SupportLevel",
    "parse_attention",
]

ANY_QUERY_LEN = LARGEST_COUNT
"""A query length limit that no batch reaches."""


class LayerKind(str, Enum):
    """What a layer's attention computes."""

    MHA = "mha"
    GQA = "gqa"
    MQA = "mqa"
    MLA = "mla"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    SPARSE = "sparse"
    MAMBA = "mamba"
    GDN = "gdn"
    LINEAR = "linear"
    SHORT_CONV = "short_conv"

    def __str__(self) -> str:
        return self.value


class SupportLevel(str, Enum):
    """The best that claims come to, for tables and messages; decisions read the claims themselves."""

    NONE = "none"
    SINGLE = "single"
    UNIFORM = "uniform"
    VARLEN_DECODE = "varlen_decode"
    MIXED = "mixed"

    def __str__(self) -> str:
        return self.value


class HostParams(str, Enum):
    """Whether attention reads lengths on the host when it is launched."""

    NONE = "none"
    """Lengths are device tensors: a graph reads the live ones."""
    UPDATABLE = "updatable"
    """Lengths are host arguments, and the device can update them at replay (Ascend task groups)."""
    FROZEN = "frozen"
    """Lengths are host arguments, and a graph keeps those of its capture."""

    def __str__(self) -> str:
        return self.value


_HOST_ORDER = (HostParams.NONE, HostParams.UPDATABLE, HostParams.FROZEN)


def _host_params(value: HostParams | str) -> HostParams:
    # Claims are compared by identity: a mere string would be told and not heeded.
    try:
        return HostParams(value)
    except ValueError:
        raise UnknownNameError("host_params", value, (known.value for known in HostParams)) from None


@attrs.frozen
class Claims:
    """What one graph may capture of attention. A greater support has the greater value in each claim.

    Args:
        uniform_query_len: a FULL graph may hold decode rows that all have the same q tokens, for any one q up to
            this; 0 for none, 1 for single-token decodes.
        varlen_query_len: a FULL graph may hold any mix of decode rows of 1 to this many tokens; 0 for none.
        mixed: a FULL graph may hold prefill rows beside decode rows; then the two lengths above have no limit.
        piecewise: graphs may be cut at attention, which then runs eagerly between them.
        host_params: whether attention reads lengths on the host.
        one_computation: decode and prefill rows go through the same computation. False for MLA, where decode is
            absorbed and prefill expanded, so that a graph of one can't stand in for the other.
    """

    uniform_query_len: int = attrs.field(default=0, converter=plain_int)
    varlen_query_len: int = attrs.field(default=0, converter=plain_int)
    mixed: bool = False
    piecewise: bool = True
    host_params: HostParams = attrs.field(default=HostParams.NONE, converter=_host_params)
    one_computation: bool = True

    def __attrs_post_init__(self) -> None:
        limits = self.uniform_query_len, self.varlen_query_len
        if any(type(limit) is not int or limit < 0 for limit in limits):
            raise SupportError(f"{self!r}: query length limits are whole numbers from 0 on.")
        if any(type(flag) is not bool for flag in (self.mixed, self.piecewise, self.one_computation)):
            raise SupportError(f"{self!r}: mixed, piecewise and one_computation are true or false.")
        # A stronger claim brings the weaker with it, so that the meet, taken claim by claim, stays consistent.
        if self.mixed:
            object.__setattr__(self, "varlen_query_len", ANY_QUERY_LEN)
        if self.varlen_query_len > self.uniform_query_len:
            object.__setattr__(self, "uniform_query_len", self.varlen_query_len)

    def meet(self, other: Claims) -> Claims:
        """The greatest claims that both make."""
        return Claims(
            min(self.uniform_query_len, other.uniform_query_len),
            min(self.varlen_query_len, other.varlen_query_len),
            self.mixed and other.mixed,
            self.piecewise and other.piecewise,
            max(self.host_params, other.host_params, key=_HOST_ORDER.index),
            self.one_computation and other.one_computation,
        )

    def __le__(self, other: Claims) -> bool:
        """Whether `other` claims at least as much."""
        return self.meet(other) == self

    @property
    def full(self) -> Claims:
        """The claims that hold for a FULL graph: none where a graph would freeze host lengths."""
        if self.host_params is HostParams.FROZEN:
            return attrs.evolve(self, uniform_query_len=0, varlen_query_len=0, mixed=False)
        return self

    @property
    def level(self) -> SupportLevel:
        """The name of the best claim."""
        if self.mixed:
            return SupportLevel.MIXED
        if self.varlen_query_len > 1:
            return SupportLevel.VARLEN_DECODE
        if self.uniform_query_len > 1:
            return SupportLevel.UNIFORM
        return SupportLevel.SINGLE if self.uniform_query_len else SupportLevel.NONE

    @classmethod
    def at_level(cls, level: SupportLevel | str, **rest: bool | HostParams | int) -> Claims:
        """The claims that a level stands for, without limits on query lengths."""
        try:
            level = SupportLevel(level)
        except ValueError:
            raise UnknownNameError("support level", level, (known.value for known in SupportLevel)) from None
        limits: dict[SupportLevel, dict[str, int | bool]] = {
            SupportLevel.NONE: {},
            SupportLevel.SINGLE: {"uniform_query_len": 1},
            SupportLevel.UNIFORM: {"uniform_query_len": ANY_QUERY_LEN},
            SupportLevel.VARLEN_DECODE: {"varlen_query_len": ANY_QUERY_LEN},
            SupportLevel.MIXED: {"mixed": True},
        }
        return cls(**{**limits[level], **rest})  # type: ignore[arg-type]

    def __str__(self) -> str:
        text = str(self.level)
        limit = self.varlen_query_len if self.level is SupportLevel.VARLEN_DECODE else self.uniform_query_len
        if self.level in (SupportLevel.UNIFORM, SupportLevel.VARLEN_DECODE) and limit < ANY_QUERY_LEN:
            text += f"({limit})"
        if not self.piecewise:
            text += ", no piecewise"
        if self.host_params is not HostParams.NONE:
            text += f", host lengths {self.host_params}"
        return text


@attrs.frozen
class Origin:
    """One claimant: a layer kind, the backend that runs it, what it claims, and where that is written.

    Args:
        kind: the layer kind, or None where a backend speaks for any.
        backend: the attention backend's name.
        claims: what it claims.
        source: where the claim is written: a file of the project it comes from, or a document.
        note: a condition or a limit in words.
    """

    kind: LayerKind | None
    backend: str
    claims: Claims
    source: str
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.kind or 'any layer'} on {self.backend}: {self.claims}"
        return f"{text} ({self.note})" if self.note else text


def _origins(value: Iterable[Origin]) -> frozenset[Origin]:
    return frozenset(value)


@attrs.frozen
class AttentionSupport:
    """What attention lets be captured, and every claimant it comes from.

    Args:
        claims: what holds for the whole model.
        origins: who claims what. The meet keeps all of them, so that `limits` can say which layer bounds what.
    """

    claims: Claims
    origins: frozenset[Origin] = attrs.field(default=frozenset(), converter=_origins)

    @classmethod
    def of(
        cls, claims: Claims, *, kind: LayerKind | None = None, backend: str, source: str, note: str = ""
    ) -> AttentionSupport:
        """Support of one layer kind on one backend."""
        return cls(claims, frozenset({Origin(kind, backend, claims, source, note)}))

    @classmethod
    def meet_all(cls, supports: Iterable[AttentionSupport]) -> AttentionSupport:
        """The meet over layers.

        Raises:
            SupportError: there are no layers.
        """
        met: AttentionSupport | None = None
        for support in supports:
            met = support if met is None else met.meet(support)
        if met is None:
            raise SupportError("a model without attention layers has no support to state; give at least one layer.")
        return met

    def meet(self, other: AttentionSupport) -> AttentionSupport:
        """What both support, with the origins of both."""
        return AttentionSupport(self.claims.meet(other.claims), self.origins | other.origins)

    def __le__(self, other: AttentionSupport) -> bool:
        return self.claims <= other.claims

    @property
    def limits(self) -> tuple[str, ...]:
        """A sentence for each claimant that bounds the model, weakest first.

        One bounds FULL graphs where some claim of the model is its own and no other claimant claims less of them;
        it bounds the rest where it can't be cut into pieces, or brings the host lengths that the model has.
        """
        held = {origin: _held(origin.claims) for origin in self.origins}
        met = _held(self.claims)
        bounding = [
            origin
            for origin, own in held.items()
            if (_attains(own, met) and not any(_less(other, own) for other in held.values()))
            or not origin.claims.piecewise
            or origin.claims.host_params is self.claims.host_params is not HostParams.NONE
        ]
        return tuple(str(origin) for origin in sorted(bounding, key=lambda origin: (held[origin], str(origin))))

    def __str__(self) -> str:
        return str(self.claims)


_Held = tuple[int, int, bool]
_ALL_HELD: _Held = (ANY_QUERY_LEN, ANY_QUERY_LEN, True)


def _held(claims: Claims) -> _Held:
    """What a FULL graph may hold. `one_computation` isn't in it: it bounds no graph by itself."""
    full = claims.full
    return full.uniform_query_len, full.varlen_query_len, full.mixed


def _attains(own: _Held, met: _Held) -> bool:
    """Whether some claim of the meet, below the greatest, is this one's own."""
    return any(mine == least < most for mine, least, most in zip(own, met, _ALL_HELD, strict=True))


def _less(a: _Held, b: _Held) -> bool:
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


_ASSUMED = "kpolicy reference backends (docs/attention.md)"
_REFERENCE: dict[LayerKind, tuple[Claims, str]] = {
    LayerKind.MHA: (Claims.at_level("mixed"), ""),
    LayerKind.GQA: (Claims.at_level("mixed"), ""),
    LayerKind.MQA: (Claims.at_level("mixed"), ""),
    LayerKind.SLIDING_WINDOW: (Claims.at_level("mixed"), ""),
    LayerKind.CHUNKED_LOCAL: (Claims.at_level("none"), "chunk boundaries are computed on the host"),
    LayerKind.MLA: (
        Claims.at_level("uniform", one_computation=False),
        "decode is absorbed, prefill expanded: one graph holds one of the two",
    ),
    LayerKind.SPARSE: (Claims.at_level("uniform", one_computation=False), "the indexer captures uniform decodes"),
    LayerKind.MAMBA: (Claims.at_level("uniform", one_computation=False), "recurrent state: decode and scan differ"),
    LayerKind.GDN: (Claims.at_level("uniform", one_computation=False), "recurrent state: decode and scan differ"),
    LayerKind.LINEAR: (Claims.at_level("single", one_computation=False), "recurrent state, one token at a time"),
    LayerKind.SHORT_CONV: (
        Claims.at_level("uniform", one_computation=False),
        "recurrent state: decode and scan differ",
    ),
}


def reference_support(kind: LayerKind) -> AttentionSupport:
    """What kpolicy assumes of a layer kind when no backend is named."""
    claims, note = _REFERENCE[kind]
    return AttentionSupport.of(claims, kind=kind, backend="reference", source=_ASSUMED, note=note)


def parse_attention(text: str) -> AttentionSupport:
    """Support from a flag: layer kinds or levels joined with ``+``, for example ``mla`` or ``gdn+gqa`` or ``uniform``.

    A kind may carry a backend of the tables, as ``gqa:vllm-0.33/FLASH_ATTN[fa2]``.

    Raises:
        UnknownNameError: a kind, level or backend isn't known.
    """
    return AttentionSupport.meet_all(_parse_one(part.strip()) for part in text.split("+"))


def _parse_one(text: str) -> AttentionSupport:
    name, colon, backend = text.partition(":")
    kinds = {kind.value: kind for kind in LayerKind} | {"swa": LayerKind.SLIDING_WINDOW}
    if name in kinds and (backend or not colon):
        if not backend:
            return reference_support(kinds[name])
        from kpolicy.attention.backends import backend_support

        return backend_support(backend, kind=kinds[name])
    if not colon and name in {level.value for level in SupportLevel}:
        return AttentionSupport.of(Claims.at_level(name), backend="stated", source="stated by the caller")
    raise UnknownNameError(
        "attention kind", text, [*kinds, *(level.value for level in SupportLevel)],
        "Join several layer kinds with +, for example gdn+gqa.",
    )  # fmt: skip
