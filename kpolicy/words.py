"""`some`: a count with its noun, as commands and errors say it."""

from __future__ import annotations

__all__ = ["some"]


def some(count: int, noun: str, plural: str = "") -> str:
    """``1 request``, ``2 requests``, ``1,000 requests``.

    Args:
        count: how many.
        noun: what one of them is called, with what stands before it: ``prefill step``.
        plural: what several are called; by default the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
