"""How a step can run: the four modes, what a graph covers, and the forms of SPLIT.

`Mode` is what one batch does. What a policy was configured to do is a policy, never a `Mode`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from kpolicy.errors import UnknownNameError

__all__ = ["ALL_MODES", "Mode", "Part", "Rows", "SplitForm", "forbidden_mask", "parse_form", "parse_mode"]


class Mode(str, Enum):
    """How one batch runs."""

    FULL = "full"
    """One captured graph replays the whole step."""
    PIECEWISE = "piecewise"
    """One captured graph replays between each two attention calls; attention runs eagerly."""
    SPLIT = "split"
    """Decode rows replay their FULL graph; the prefill rows run on their own."""
    EAGER = "eager"
    """Nothing replays."""

    def __str__(self) -> str:
        return self.value

    @property
    def bit(self) -> int:
        """This mode's bit in a `forbidden` mask."""
        return _BITS[self]


_BITS = {Mode.FULL: 1, Mode.PIECEWISE: 2, Mode.SPLIT: 4, Mode.EAGER: 8}
ALL_MODES: frozenset[Mode] = frozenset(Mode)


class Part(str, Enum):
    """What a captured graph covers."""

    FULL = "full"
    PIECEWISE = "piecewise"

    def __str__(self) -> str:
        return self.value


class Rows(str, Enum):
    """Which rows of the batch a launch runs; decode rows always come first."""

    ALL = "all"
    DECODE = "decode"
    PREFILL = "prefill"

    def __str__(self) -> str:
        return self.value


class SplitForm(str, Enum):
    """How the two halves of a SPLIT step share the device."""

    IN_TURN = "in_turn"
    """Prefill rows run after the decode rows, on one stream."""
    BESIDE = "beside"
    """Both halves run at the same time, on two streams."""
    DECODES_BESIDE = "decodes_beside"
    """Several decode steps follow each other while one prefill half runs beside them."""

    def __str__(self) -> str:
        return self.value


def parse_mode(name: str) -> Mode:
    """The mode of that name.

    Raises:
        UnknownNameError: no mode has that name.
    """
    try:
        return Mode(name.lower())
    except ValueError:
        raise UnknownNameError("mode", name, (mode.value for mode in Mode)) from None


def parse_form(name: SplitForm | str) -> SplitForm:
    """The form of SPLIT of that name.

    Raises:
        UnknownNameError: no form has that name.
    """
    try:
        return SplitForm(name)
    except ValueError:
        raise UnknownNameError("form of split", name, (form.value for form in SplitForm)) from None


def forbidden_mask(modes: Iterable[Mode]) -> int:
    """The modes as one integer, the form the per-batch path takes them in."""
    mask = 0
    for mode in modes:
        mask |= _BITS[mode]
    return mask
