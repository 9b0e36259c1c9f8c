"""Faults of the CPU adapter: those of the simulated executor, and points that only a real recording has."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kpolicy.errors import CaptureError, UnknownNameError
from kpolicy.executors.simulated import FAULTS, Fault
from kpolicy.reasons import Reason

__all__ = ["CPU_FAULTS", "Faults"]

CPU_FAULTS: Mapping[str, str] = {
    **FAULTS,
    "mid_segment": "the n-th recording, a graph or one piece of it, fails at its second operator",
    "staging_fails": "the n-th copy into a static buffer fails before it writes",
    "before_launch": "the n-th replay fails before anything is launched, with an error of the device's library",
}
"""Captures count recordings: each piece of a PIECEWISE graph is one. Launches count replays: the adapter doesn't see
what runs eagerly."""


_CAPTURE_FAULTS = (
    ("capture_fails", Reason.CAPTURE_FAILED),
    ("capture_out_of_memory", Reason.CAPTURE_OUT_OF_MEMORY),
    ("capture_out_of_streams", Reason.CAPTURE_OUT_OF_STREAMS),
)


class _Planned(NamedTuple):
    name: str
    at: int
    times: int


class Faults:
    """Counts what faults can hit, and says when one is due. Safe to use from several threads.

    Attributes:
        planned: faults to come; nothing is ever due where there is none, and a look at it costs less than a call.

    Raises:
        UnknownNameError: a fault has a name that isn't in `CPU_FAULTS`.
        ConfigError: a text isn't NAME@N or NAME@NxTIMES.
    """

    def __init__(self, faults: Iterable[Fault | str]) -> None:
        self.planned = [_parse(fault) for fault in faults]
        self._counts = dict.fromkeys(CPU_FAULTS, 0)
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self.planned)

    def due(self, name: str) -> bool:
        """Whether this occurrence, counted from 1, is to fail."""
        if not self.planned:
            return False
        with self._lock:
            self._counts[name] += 1
            count = self._counts[name]
        return any(each.name == name and each.at <= count < each.at + each.times for each in self.planned)

    def check_capture(self) -> None:
        """Raise the CaptureError that is due at this recording, if any."""
        for name, reason in _CAPTURE_FAULTS:
            if self.due(name):
                raise CaptureError(reason, f"injected fault {name}")


def _parse(fault: Fault | str) -> _Planned:
    if isinstance(fault, Fault):
        return _Planned(fault.name, fault.at, fault.times)
    name, placed, rest = fault.partition("@")
    if name not in CPU_FAULTS:
        raise UnknownNameError("fault", name, CPU_FAULTS)
    # The numbers are read as the simulated executor reads them; only names differ.
    numbers = Fault.parse("sticky" + placed + rest)
    return _Planned(name, numbers.at, numbers.times)
