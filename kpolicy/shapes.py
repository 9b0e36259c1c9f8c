"""What a batch looks like, in counts. No tensors, no tokens, no request ids.

`BatchShape` is for people and slow paths; `BatchNumbers` is the same batch as the plain numbers that a compiled
policy's `select` takes. A policy sees nothing else of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from kpolicy.errors import ShapeError
from kpolicy.modes import Mode, forbidden_mask

__all__ = ["GAP_TAIL_US", "LARGEST_COUNT", "NO_FACTS", "WAITING_REQS", "BatchNumbers", "BatchShape", "plain_int"]

LARGEST_COUNT = 2**31 - 1
"""No count of a batch may be larger: device kernels index rows and slots with 32 bits."""

NO_FACTS: Mapping[str, Any] = MappingProxyType({})
_NEVER = float("inf")
WAITING_REQS = "waiting_reqs"
"""A fact that `auto` reads: requests that wait though KV and a row are free for them, as the step's tokens are taken.
They decode soon, so that a decode step that runs early spares less of a later one; see `CostTable.spared_us`."""
GAP_TAIL_US = "gap_tail_us"
"""A fact that `auto` reads: whole microseconds that one gap in a hundred exceeded so far. Several decode steps beside a
prompt are left out where each would take longer; see `kpolicy.scheduling.gap_tail`."""
_COUNTED = (WAITING_REQS, GAP_TAIL_US)


class BatchNumbers(NamedTuple):
    """One batch as plain numbers, in the order that `select` takes them.

    A uniform decode batch needs only the first three. `query_len` is the query length that all decode rows share,
    0 where they differ or where there is none.
    """

    num_decodes: int
    query_len: int = 1
    decode_kv_tokens: int = 0
    num_decode_tokens: int = -1
    """-1 stands for "a uniform decode batch, and all that follows is left at its default"."""
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    """KV tokens the prefill rows attend to, their own included."""
    prefill_pairs: int = 0
    """Query-key pairs under the causal mask: the sum of new x context + new x (new + 1) / 2."""
    max_query_len: int = 1
    """The longest query of any row."""
    max_kv_len: int = 0
    num_first_chunks: int = 0
    """Prefill rows with no context yet."""
    num_active_loras: int = 0
    forbidden: int = 0
    """Bits of the modes that this step may not use; see `Mode.bit`."""
    max_decode_steps: int = 1
    num_tokens: int = -1
    """Tokens of the whole batch; -1 stands for decode plus prefill tokens. Ranks that agreed on the largest of each
    part pass the largest whole here, which can be less than the parts together."""
    num_reqs: int = -1
    max_decode_len: int = 0
    """The longest query of a decode row; read only where decode rows differ."""
    facts: Mapping[str, Any] = NO_FACTS

    @property
    def decode_tokens(self) -> int:
        return self.num_decodes * self.query_len if self.num_decode_tokens < 0 else self.num_decode_tokens

    @property
    def total_tokens(self) -> int:
        return self.decode_tokens + self.num_prefill_tokens if self.num_tokens < 0 else self.num_tokens

    @property
    def total_reqs(self) -> int:
        return self.num_decodes + self.num_prefills if self.num_reqs < 0 else self.num_reqs

    @property
    def waiting_reqs(self) -> int:
        """Requests that wait for a place among a step's tokens only."""
        return self.facts.get(WAITING_REQS, 0)  # type: ignore[no-any-return]  # `BatchShape` takes counts only

    @property
    def gap_tail_us(self) -> float:
        """What one gap in a hundred exceeded so far; infinite where nobody knows."""
        return self.facts.get(GAP_TAIL_US, _NEVER)  # type: ignore[no-any-return]  # as above

    @property
    def longest_query(self) -> int:
        """The largest query length of any row."""
        return self.query_len if self.num_decode_tokens < 0 else self.max_query_len

    @property
    def longest_decode(self) -> int:
        """The largest query length of a decode row."""
        return self.query_len or self.max_decode_len

    @property
    def longest_decode_kv(self) -> int:
        """KV tokens of the longest decode row: where prompts may have the longest context, the least that it can be."""
        if not self.num_decodes:
            return 0
        mean = -(-self.decode_kv_tokens // self.num_decodes)
        # No prompt has more than what the others' least leaves of all prompts' KV.
        prompt = self.prefill_kv_tokens - max(self.num_prefills - 1, 0)
        return max(mean, self.max_kv_len) if self.max_kv_len > prompt else mean


def _modes(value: Iterable[Mode]) -> frozenset[Mode]:
    # A Mode is text too, which would be gone through letter by letter.
    modes: tuple[Any, ...] = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for mode in modes:
        if not isinstance(mode, Mode):
            raise ShapeError(
                f"forbidden has {mode!r:.80}; it takes a list of Mode members. Mode('full') makes one of a name."
            )
    return frozenset(modes)


def _decode_runs(value: Any) -> tuple[tuple[int, int], ...]:
    return _pairs("decodes", "(query length, count)", value)


def _prefill_chunks(value: Any) -> tuple[tuple[int, int], ...]:
    return _pairs("prefills", "(new tokens, context)", value)


def _pairs(name: str, parts: str, value: Any) -> tuple[tuple[int, int], ...]:
    try:
        # A list first: on the way to a decision this is half the time of a generator.
        pairs = [(first, second) for first, second in value]
    except (TypeError, ValueError):
        raise ShapeError(f"{name} is {value!r:.80}; it must be pairs of {parts}.") from None
    for first, second in pairs:
        if type(first) is not int or type(second) is not int:
            what = f"a number of a pair {parts} in {name}"
            return tuple([(_count(what, first), _count(what, second)) for first, second in pairs])
    return tuple(pairs)


def plain_int(value: Any) -> Any:
    """A whole number of any library as an int. Anything else as it is, for whoever refuses it: floats, text, bools."""
    if type(value) is int or isinstance(value, bool):
        return value
    try:
        return int(index(value))
    except TypeError:
        return value


def _count(name: str, value: Any) -> int:
    """The count as an int. Integers of other libraries are counts; floats, text and bools aren't."""
    count = plain_int(value)
    if type(count) is not int:
        raise ShapeError(f"{name} is {value!r:.80}; counts are whole numbers, at most {LARGEST_COUNT}. Give an int.")
    return count


_OPTIONAL_COUNTS = ("decode_kv_tokens", "max_kv_len")
_PLAIN_COUNTS = ("num_active_loras", "max_decode_steps")


@attrs.frozen(kw_only=True)
class BatchShape:
    """One batch: decode rows first, then prefill chunks.

    A prompt chunk of length q is not a decode of length q: which rows are which is said here, never guessed from
    lengths.

    Args:
        decodes: decode rows as (query length, count) runs: 1, or 1 + k when verifying k draft tokens.
        prefills: prompt chunks as (new tokens, context tokens already in KV).
        decode_kv_tokens: KV tokens all decode rows attend to together, this step's included; by default as few as
            the rows can have.
        max_kv_len: the longest KV any row attends to; by default as short as the totals allow.
        num_active_loras: distinct LoRA adapters in the batch.
        forbidden: modes that this step may not use.
        max_decode_steps: decode steps that may follow each other before the host is needed (KV slots reserved,
            sampling on the device); 1 where the host samples.
        facts: what a replica or a serving engine needs besides, by name. `auto` reads `WAITING_REQS` and
            `GAP_TAIL_US`.

    Raises:
        ShapeError: a count isn't a whole number, is negative, zero where a row needs tokens, over `LARGEST_COUNT`,
            or contradicts another.
    """

    decodes: tuple[tuple[int, int], ...] = attrs.field(default=(), converter=_decode_runs)
    prefills: tuple[tuple[int, int], ...] = attrs.field(default=(), converter=_prefill_chunks)
    decode_kv_tokens: int | None = None
    max_kv_len: int | None = None
    num_active_loras: int = 0
    forbidden: frozenset[Mode] = attrs.field(default=frozenset(), converter=_modes)
    max_decode_steps: int = 1
    facts: Mapping[str, Any] = attrs.field(default=NO_FACTS, hash=False)
    numbers: BatchNumbers = attrs.field(init=False, eq=False, repr=False)
    """The same batch as plain numbers."""

    def __attrs_post_init__(self) -> None:
        kv_tokens, kv_len = self.decode_kv_tokens, self.max_kv_len
        if (
            type(self.num_active_loras) is not int
            or type(self.max_decode_steps) is not int
            or (kv_tokens is not None and type(kv_tokens) is not int)
            or (kv_len is not None and type(kv_len) is not int)
        ):
            self._convert_counts()
        if self.facts:
            if not isinstance(self.facts, Mapping):
                raise ShapeError(f"facts is {self.facts!r:.80}; it is a mapping of values by name.")
            for name in _COUNTED:
                if _count(f"the fact {name}", self.facts.get(name, 0)) < 0:
                    raise ShapeError(f"the fact {name} is {self.facts[name]}; it starts at 0.")
        object.__setattr__(self, "numbers", _numbers(self))

    def _convert_counts(self) -> None:
        for name in (*_OPTIONAL_COUNTS, *_PLAIN_COUNTS):
            value = getattr(self, name)
            if value is not None or name in _PLAIN_COUNTS:
                object.__setattr__(self, name, _count(name, value))

    @classmethod
    def decode(cls, num_reqs: int, kv_tokens: int | None = None, *, query_len: int = 1, **rest: Any) -> BatchShape:
        """A uniform decode batch of `num_reqs` rows of `query_len` tokens."""
        return cls(decodes=((query_len, num_reqs),), decode_kv_tokens=kv_tokens, **rest)

    @property
    def num_tokens(self) -> int:
        return self.numbers.total_tokens

    @property
    def num_reqs(self) -> int:
        return self.numbers.total_reqs

    def __str__(self) -> str:
        parts = [f"{count} x {length}" for length, count in self.decodes]
        text = f"decodes {' + '.join(parts)}" if parts else ""
        if self.prefills:
            chunks = ", ".join(f"{new}@{context}" if context else f"{new}" for new, context in self.prefills)
            text += f"{', ' if text else ''}prefill {chunks}"
        return text or "empty"


def _over_largest(shape: BatchShape, kv_tokens: int) -> ShapeError:
    counts = {
        "the KV of all rows": kv_tokens,
        "num_active_loras": shape.num_active_loras,
        "max_decode_steps": shape.max_decode_steps,
    }
    name = max(counts, key=lambda name: counts[name])
    return ShapeError(f"{name} counts to {counts[name]}; no count may be over {LARGEST_COUNT}.")


def _numbers(shape: BatchShape) -> BatchNumbers:
    num_decodes = decode_tokens = longest_decode = query_len = 0
    for length, count in shape.decodes:
        if length < 1 or count < 1:
            raise ShapeError(
                f"decodes has the run (query length {length}, count {count}); both must be at least 1. "
                "Leave rows without tokens out of the shape."
            )
        query_len = length if not num_decodes or length == query_len else 0
        num_decodes += count
        decode_tokens += length * count
        longest_decode = max(longest_decode, length)
    prefill_tokens = prefill_kv = pairs = first_chunks = longest_kv = 0
    longest = longest_decode
    for new, context in shape.prefills:
        if new < 1 or context < 0:
            raise ShapeError(
                f"prefills has the chunk (new tokens {new}, context {context}); new must be at least 1 and context "
                "at least 0. Leave chunks without tokens out of the shape."
            )
        prefill_tokens += new
        prefill_kv += new + context
        pairs += new * context + new * (new + 1) // 2
        first_chunks += not context
        longest = max(longest, new)
        longest_kv = max(longest_kv, new + context)
    decode_kv = decode_tokens if shape.decode_kv_tokens is None else shape.decode_kv_tokens
    if decode_kv < decode_tokens or (decode_kv and not num_decodes):
        raise ShapeError(
            f"decode_kv_tokens is {decode_kv} for {decode_tokens} decode tokens; every decode token attends to itself "
            "at least, and KV of decodes needs decodes. Count this step's tokens in."
        )
    if num_decodes:
        longest_kv = max(longest_kv, -(-decode_kv // num_decodes))
    max_kv_len = longest_kv if shape.max_kv_len is None else shape.max_kv_len
    if max_kv_len < longest_kv or max_kv_len > decode_kv + prefill_kv:
        raise ShapeError(
            f"max_kv_len is {max_kv_len}, but the rows given need one between {longest_kv} and "
            f"{decode_kv + prefill_kv}. Leave it out to take the smallest."
        )
    if shape.num_active_loras < 0 or shape.max_decode_steps < 1:
        raise ShapeError(
            f"num_active_loras is {shape.num_active_loras} and max_decode_steps {shape.max_decode_steps}; they start "
            "at 0 and 1."
        )
    # Tokens attend to themselves at least, so no sum over rows is larger than all KV.
    if max(decode_kv + prefill_kv, shape.num_active_loras, shape.max_decode_steps) > LARGEST_COUNT:
        raise _over_largest(shape, decode_kv + prefill_kv)
    return BatchNumbers(
        num_decodes, query_len, decode_kv, decode_tokens, len(shape.prefills), prefill_tokens, prefill_kv, pairs,
        longest, max_kv_len, first_chunks, shape.num_active_loras,
        forbidden_mask(shape.forbidden) if shape.forbidden else 0,
        shape.max_decode_steps, decode_tokens + prefill_tokens, num_decodes + len(shape.prefills),
        longest_decode, shape.facts,
    )  # fmt: skip
