"""Where weights and KV lie that graphs read by their address, and what to say of one that moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kpolicy.errors import GraphReplayError
from kpolicy.keys import GraphKey
from kpolicy.reasons import Reason

__all__ = ["Address", "addresses_of", "check_moved"]

Address = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(address, shape, strides)"""


def addresses_of(named: Mapping[str, Any]) -> dict[str, Address]:
    """Where tensors lie, by name."""
    return {name: (each.data_ptr(), tuple(each.shape), each.stride()) for name, each in named.items()}


def check_moved(key: GraphKey | None, then: Mapping[str, Address], now: Mapping[str, Address]) -> None:
    """Look whether what a graph was captured with is where it was.

    Args:
        key: the graph's; None where that isn't known.
        then: where tensors lay when it was captured.
        now: where they lie.

    Raises:
        GraphReplayError: one moved, changed its shape, or is gone.
    """
    for name, place in then.items():
        if now.get(name) != place:
            found = "is gone" if name not in now else f"is now at {now[name]}"
            raise GraphReplayError(
                key,
                f"{name} {found}; {key or 'the graph'} was captured with it at (address, shape, strides) {place}. Put "
                "it back in place, for example with copy_, or capture again.",
                Reason.ADDRESS_CHANGED,
            )
