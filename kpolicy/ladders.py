"""Capture sizes, the graph keys they stand for, and the view of captured keys that a policy reads."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import attrs

from kpolicy.attention.support import Claims
from kpolicy.errors import LadderError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.settings import Settings
from kpolicy.shapes import plain_int

__all__ = ["CaptureLadder", "CaptureSizes", "check_sizes", "decode_sizes", "default_sizes", "plan_keys"]


def check_sizes(
    name: str, sizes: Iterable[int], *, largest: int | None = None, multiple_of: int = 1,
    over: str = "tokens one step may have",
) -> tuple[int, ...]:  # fmt: skip
    """The sizes as a tuple, checked.

    Args:
        name: what to call the list in an error.
        sizes: capture sizes in tokens.
        largest: no size may be over this.
        multiple_of: each size must be a multiple of this.
        over: what `largest` is, in words.

    Raises:
        LadderError: the list is empty, unsorted, repeats a size, or a size is out of range or misaligned.
    """
    checked = _sizes(sizes)
    if not checked:
        raise LadderError(f"{name} is empty; give at least one capture size, or use the policy 'eager'.")
    before = 0
    for size in checked:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise LadderError(f"{name} has the size {size!r}; sizes are whole numbers of tokens from 1 up.")
        if size <= before:
            fixed = ",".join(str(each) for each in sorted({each for each in checked if isinstance(each, int)}))
            raise LadderError(f"{name} has {size} after {before}; sizes rise without repeats. Sorted: {fixed}.")
        if size % multiple_of:
            near = sorted({max(1, -(-each // multiple_of)) * multiple_of for each in checked if isinstance(each, int)})
            raise LadderError(
                f"{name} has the size {size}, not a multiple of {multiple_of} (1 + speculative tokens); a uniform "
                f"decode graph of that size would have a broken row. Rounded up: {','.join(map(str, near))}."
            )
        before = size
    if largest is not None and before > largest:
        raise LadderError(f"{name} ends at {before}, over the {largest} {over}; drop larger sizes.")
    return checked


def default_sizes(largest: int) -> tuple[int, ...]:
    """Kpolicy's default capture sizes up to and with `largest`: neighbours at most an eighth apart from 64 up.

    Below 64 the spacing is 1, 2, 4, 8, 16, 24, ...: few steps with prompts are as small. Decodes have `decode_sizes`.
    """
    sizes = [size for size in (1, 2, 4) if size < largest]
    size = 8
    while size < largest:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 4))
    return (*sizes, largest)


def decode_sizes(most_reqs: int) -> tuple[int, ...]:
    """Kpolicy's default capture sizes of decode graphs in requests, up to and with `most_reqs`.

    As `default_sizes` from 64 up. Below, every size to 8 and neighbours at most a quarter apart: most decode steps of
    most servers are there. With a mixture of experts, where each row may choose other experts, nine rows took some 5%
    less in a graph of nine than in one of 16 (docs/measured_gpu.md).
    """
    sizes, size = list[int](), 1
    while size < min(most_reqs, 64):
        sizes.append(size)
        size += max(1, 1 << (size.bit_length() - 3)) if size >= 4 else 1
    return (*sizes, *(size for size in default_sizes(most_reqs) if size >= 64 or size == most_reqs))


def _sizes(values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(plain_int, values))
    except TypeError:
        raise LadderError(f"capture sizes are {values!r:.80}; give a list of whole numbers of tokens.") from None


@attrs.frozen
class CaptureSizes:
    """Which sizes to capture, in padded tokens, for each kind of graph.

    Args:
        decode: FULL graphs of decode rows of 1 + k tokens; multiples of 1 + k. Steps without drafts get graphs for
            the same numbers of requests.
        mixed: FULL graphs that take prefill rows too.
        piecewise: PIECEWISE graphs.
    """

    decode: tuple[int, ...] = attrs.field(converter=_sizes)
    mixed: tuple[int, ...] = attrs.field(default=(), converter=_sizes)
    piecewise: tuple[int, ...] = attrs.field(default=(), converter=_sizes)

    @classmethod
    def default(cls, settings: Settings) -> CaptureSizes:
        """The default ladder: decodes up to the most requests, mixed batches to 512 tokens, pieces to 2,048."""
        q = settings.query_len
        tokens = settings.max_num_tokens
        return cls(
            tuple(size * q for size in decode_sizes(min(settings.max_num_reqs, tokens // q))),
            default_sizes(min(512, tokens)),
            default_sizes(min(2048, tokens)),
        )

    @classmethod
    def of(cls, sizes: Sequence[int], settings: Settings) -> CaptureSizes:
        """One list for every kind of graph, as serving engines have it.

        Raises:
            LadderError: see `check_sizes`; with speculation every size must be a multiple of 1 + k.
        """
        checked = check_sizes("the ladder", sizes, largest=settings.max_num_tokens, multiple_of=settings.query_len)
        most = settings.max_num_reqs * settings.query_len
        return cls(tuple(size for size in checked if size <= most), checked, checked)

    def check(self, settings: Settings) -> None:
        """Raise LadderError where a list can't be used with these settings."""
        q = settings.query_len
        if not (self.decode or self.mixed or self.piecewise):
            check_sizes("the ladder", ())
        if self.decode:
            check_sizes(
                "decode sizes", self.decode, largest=settings.max_num_reqs * q, multiple_of=q,
                over=f"decode tokens that max_num_reqs {settings.max_num_reqs} allows ({q} each)",
            )  # fmt: skip
        for name, sizes in (("mixed sizes", self.mixed), ("piecewise sizes", self.piecewise)):
            if sizes:
                check_sizes(name, sizes, largest=settings.max_num_tokens)


def plan_keys(sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
    """Every key that the sizes stand for and attention support allows.

    With LoRA each key comes twice: without adapters, and for up to `max_loras` of them.

    Raises:
        LadderError: the sizes can't be used with these settings.
    """
    sizes.check(settings)
    full = claims.full
    plain: list[GraphKey] = []
    varlen = settings.num_speculative_tokens > 0 and full.varlen_query_len >= settings.query_len
    for size in sizes.decode:
        reqs = size // settings.query_len
        if varlen:
            # One graph takes every partial draft; it needs a row for each token in the worst case.
            rows = min(size, settings.max_num_reqs)
            plain.append(GraphKey(Part.FULL, size, rows, max_query_len=settings.query_len))
        captured = [q for q in settings.decode_query_lens if q <= full.uniform_query_len]
        plain += [GraphKey(Part.FULL, reqs * q, reqs, query_len=q) for q in captured]
    if full.mixed:
        plain += [GraphKey(Part.FULL, size, min(size, settings.max_num_reqs)) for size in sizes.mixed]
    if claims.piecewise:
        plain += [GraphKey(Part.PIECEWISE, size) for size in sizes.piecewise]
    cases = (0, settings.max_loras) if settings.max_loras else (0,)
    return tuple(attrs.evolve(key, lora_case=case) if case else key for key in plain for case in cases)


class CaptureLadder:
    """A frozen view of the keys that may be replayed, for policies.

    Args:
        keys: captured keys.
        version: the registry's version when the view was taken.
        assumed: whether the keys are only planned and taken as captured (an Engine without a model).
        withdrawn: keys that were planned and can't be had, so that a miss can say so.
    """

    __slots__ = ("assumed", "keys", "mixed", "piecewise", "uniform", "varlen", "version", "withdrawn")

    def __init__(
        self, keys: Iterable[GraphKey], *, version: int = 0, assumed: bool = False, withdrawn: Iterable[GraphKey] = ()
    ) -> None:
        self.keys = tuple(sorted(keys, key=_by_size))
        self.version = version
        self.assumed = assumed
        self.withdrawn = tuple(sorted(withdrawn, key=_by_size))
        self.uniform: dict[int, tuple[GraphKey, ...]] = {}
        """FULL graphs of uniform decode batches, by query length, smallest first; likewise the three below."""
        full = [key for key in self.keys if key.part is Part.FULL]
        for q in sorted({key.query_len for key in full if key.query_len is not None}):
            self.uniform[q] = tuple(key for key in full if key.query_len == q)
        self.varlen = tuple(key for key in full if key.max_query_len is not None)
        self.mixed = tuple(key for key in full if not key.decode_only)
        self.piecewise = tuple(key for key in self.keys if key.part is Part.PIECEWISE)

    def only(self, keys: Container[GraphKey]) -> CaptureLadder:
        """The same view of those keys alone: who shares a registry decides among its own."""
        kept = [key for key in self.keys if key in keys]
        withdrawn = [key for key in self.withdrawn if key in keys]
        if len(kept) == len(self.keys) and len(withdrawn) == len(self.withdrawn):
            return self
        return CaptureLadder(kept, version=self.version, assumed=self.assumed, withdrawn=withdrawn)

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def __repr__(self) -> str:
        return f"CaptureLadder({len(self.keys)} keys, version={self.version}, assumed={self.assumed})"


def _by_size(key: GraphKey) -> tuple[int, int, int, str]:
    return (key.num_tokens, key.lora_case, key.num_reqs or 0, key.variant)
