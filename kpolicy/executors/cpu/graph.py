"""`Graph`: a recording, as a flat list of prepared calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kpolicy.errors import CaptureError, GraphReplayError
from kpolicy.executors.cpu.memory import Outside
from kpolicy.reasons import Reason

__all__ = ["Graph", "Noted", "this_thread"]

this_thread = threading.local()
"""`recorder`: what records on this thread, or None"""


class Noted(NamedTuple):
    """One operator that ran while recording, for reading."""

    operator: str
    arguments: str
    results: str
    line: str
    how: str
    """What a replay does for it: "view" (nothing), "into" (writes its results in place), "copy", "in place", "kept\""""


class Graph:
    """A recording; `replay` runs it.

    Args:
        calls: what a replay calls, in order.
        noted: every operator that was recorded.
        outside: the memory from outside that it holds.
        grown_bytes: bytes by which its pool grew for it.

    Attributes:
        num_bytes: those, and the bytes of constants kept for it alone. Memory that existed before the recording isn't
            counted.
    """

    def __init__(
        self, calls: Sequence[Callable[[], Any]], noted: Sequence[Noted], outside: Sequence[Outside], grown_bytes: int
    ) -> None:
        self._calls = list(calls)
        self._noted = noted
        self._outside = outside
        self.constant_bytes = sum(each.kept_bytes for each in outside)
        self.num_bytes = grown_bytes + self.constant_bytes

    @property
    def num_operators(self) -> int:
        """Calls that a replay makes."""
        return len(self._calls)

    def replay(self) -> None:
        """Run the recorded operators on this thread.

        Raises:
            CaptureError: this thread is recording.
        """
        if getattr(this_thread, "recorder", None) is not None:
            raise CaptureError(Reason.CAPTURE_FAILED, "a graph can't be replayed while its thread records another.")
        if torch.is_inference_mode_enabled():
            for call in self._calls:
                call()
            return
        with torch.inference_mode():
            for call in self._calls:
                call()

    def check(self) -> None:
        """Look whether memory from outside is where it was, and held by somebody who can write to it.

        Raises:
            GraphReplayError: it isn't: nothing that a caller writes would reach the replay.
        """
        for outside in self._outside:
            if outside.moved:
                raise GraphReplayError(
                    None,
                    f"memory that {outside.line} was recorded with has moved; keep static inputs where they are.",
                    Reason.ADDRESS_CHANGED,
                )
            if outside.ours_only:
                raise GraphReplayError(
                    None,
                    f"memory that {outside.line} was recorded with is held by nobody but the graph; keep the tensors "
                    "that a graph reads for as long as it lives.",
                )

    def describe(self) -> str:
        """The recorded operators, one a line: shapes, what a replay does, and the line of model code."""
        head = f"{len(self._noted)} operators in {self.num_operators} calls, {self.num_bytes} bytes"
        lines = [
            f"{place:4d} {noted.how:8s} {noted.operator}({noted.arguments}) -> {noted.results}  # {noted.line}"
            for place, noted in enumerate(self._noted)
        ]
        return "\n".join([head, *lines])

    def release(self) -> None:
        """Let all memory go. A replay afterwards does nothing."""
        self._calls, self._outside, self.constant_bytes = [], (), 0
