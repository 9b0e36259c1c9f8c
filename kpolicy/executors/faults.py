"""Faults that an executor can be told to have, so that what follows of them is tested: `Fault`, and who counts them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from kpolicy.errors import CaptureError, ConfigError, GraphReplayError, StickyDeviceError, UnknownNameError
from kpolicy.reasons import Reason

if TYPE_CHECKING:
    from kpolicy.keys import GraphKey

__all__ = ["DEVICE_FAULTS", "FAULTS", "Fault", "Faults"]

FAULTS: Mapping[str, str] = {
    "capture_fails": "the n-th capture is refused",
    "capture_out_of_memory": "the n-th capture runs out of memory",
    "capture_out_of_streams": "the n-th capture runs out of streams",
    "replay_fails": "the n-th replay fails before anything is launched",
    "sticky": "the n-th launch, eager or replayed, loses the device for good",
    "late": "the n-th step takes a hundred times as long",
}
"""Those of every executor"""
DEVICE_FAULTS: Mapping[str, str] = {
    **FAULTS,
    "mid_segment": "the n-th recording, a graph or one piece of it, fails at its second operator",
    "staging_fails": "the n-th copy into a static buffer fails before it writes",
    "before_launch": "the n-th replay fails before anything is launched, with an error of the device's library",
}
"""Those of adapters, with points that only a real recording has. Captures count recordings there: each piece of a
PIECEWISE graph is one. Launches count replays: an adapter doesn't see what runs eagerly."""

_CAPTURE_FAULTS = (
    ("capture_fails", Reason.CAPTURE_FAILED),
    ("capture_out_of_memory", Reason.CAPTURE_OUT_OF_MEMORY),
    ("capture_out_of_streams", Reason.CAPTURE_OUT_OF_STREAMS),
)


@attrs.frozen
class Fault:
    """A fault to inject: its name, at which occurrence of what it hits, and how many times in a row.

    Raises:
        UnknownNameError: no such fault.
        ConfigError: `at` or `times` isn't at least 1.
    """

    name: str
    at: int = 1
    times: int = 1

    def __attrs_post_init__(self) -> None:
        if self.name not in DEVICE_FAULTS:
            raise UnknownNameError("fault", self.name, DEVICE_FAULTS)
        if self.at < 1 or self.times < 1:
            raise ConfigError(f"fault {self.name} has at={self.at}, times={self.times}; both count from 1.")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """``NAME``, ``NAME@N`` or ``NAME@NxTIMES``, for example ``replay_fails@10x3``."""
        name, placed, rest = text.partition("@")
        at, repeated, times = rest.partition("x")
        try:
            return cls(name, int(at) if placed else 1, int(times) if repeated else 1)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"fault {text!r} isn't NAME@N or NAME@NxTIMES, for example replay_fails@10x3.") from None


class Faults:
    """Counts what faults can hit, and says when one is due. Safe to use from several threads.

    Args:
        faults: faults to inject, or texts as `Fault.parse` takes them.
        device: what an error calls the device that was lost.
        known: the faults that the executor can have.

    Attributes:
        planned: faults to come; nothing is ever due where there is none, and a look at it costs less than a call.
        lost: whether the device was lost.

    Raises:
        UnknownNameError: a fault has a name that isn't known.
        ConfigError: a text isn't NAME@N or NAME@NxTIMES.
    """

    def __init__(self, faults: Iterable[Fault | str], device: str, known: Mapping[str, str] = DEVICE_FAULTS) -> None:
        self.planned = [_known(fault, known) for fault in faults]
        self._device = device
        self._counts = dict.fromkeys(known, 0)
        self._lock = threading.Lock()
        self.lost = False

    def due(self, name: str) -> bool:
        """Whether this occurrence, counted from 1, is to fail."""
        if not self.planned:
            return False
        with self._lock:
            self._counts[name] += 1
            count = self._counts[name]
        return any(each.name == name and each.at <= count < each.at + each.times for each in self.planned)

    def check_capture(self, key: GraphKey | None = None) -> None:
        """Raise the CaptureError that is due at this recording, if any."""
        for name, reason in _CAPTURE_FAULTS:
            if self.due(name):
                raise CaptureError(reason, f"{_at('capturing', key)}injected fault {name}")

    def check_staging(self) -> None:
        """Fail where this copy is to fail, or the device was lost."""
        self.check_lost()
        if self.due("staging_fails"):
            raise RuntimeError("injected fault staging_fails")

    def check_replay(self, key: GraphKey | None = None) -> None:
        """Fail where this replay is to fail or to lose the device, or the device was lost."""
        self.check_lost()
        if self.due("replay_fails"):
            raise GraphReplayError(key, f"{_at('replaying', key)}injected fault replay_fails")
        if "before_launch" in self._counts and self.due("before_launch"):
            raise RuntimeError("injected fault before_launch")
        self.check_launch()

    def check_launch(self) -> None:
        """Lose the device where this launch is to; fail where it was lost."""
        if self.due("sticky"):
            self.lost = True
        self.check_lost()

    def check_lost(self) -> None:
        """Fail where the device was lost.

        Raises:
            StickyDeviceError: it was.
        """
        if self.lost:
            raise StickyDeviceError(f"the {self._device} device is lost (injected fault sticky); start a new executor.")


def _at(doing: str, key: GraphKey | None) -> str:
    return "" if key is None else f"{doing} {key}: "


def _known(fault: Fault | str, known: Mapping[str, str]) -> Fault:
    if not isinstance(fault, Fault | str):
        raise ConfigError(f"fault {fault!r:.80} is neither a Fault nor its text, for example replay_fails@10x3.")
    name = fault.name if isinstance(fault, Fault) else fault.partition("@")[0]
    if name not in known:
        raise UnknownNameError("fault", name, known)
    return fault if isinstance(fault, Fault) else Fault.parse(fault)
