"""`SpreadRepeats`: decode steps that lie evenly beside a prompt instead of all at its beginning.

Both are launched by one host thread on streams of their own. As the prompt's launch comes to an attention call, the
host records a point on its stream, lets the main stream wait for that point and launches the decode step behind it.
Waits go one way, from the prompt's stream to the main one, so that nothing waits in a circle. Tests hold it to eager
launches on a pretended device; on an H200 74,000 such steps had the bits of the same in turn (docs/measured_gpu.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kpolicy.decision import Launch
from kpolicy.errors import StickyDeviceError
from kpolicy.executors.device import DeviceAdapter
from kpolicy.executors.parts import EarlyTokens, PartReady, SpreadRows
from kpolicy.keys import GraphKey

__all__ = ["SpreadRepeats"]


class SpreadRepeats:
    """Repeats of a launch on the main stream, each begun when the launch beside it is so far.

    Each repeat's tokens are copied to the host behind it, so that they can be read while the next ones wait. What one
    raises is kept for whoever waits for them, and the launch beside goes on.

    Args:
        adapter: the device; its current stream is the main one.
        repeats: runs one repeat each time the next is asked for.
        outputs: of the launch.
        ready: of the launch; its event is set by `end`.
        launch: what is repeated, and how (`Launch.wait_share`).
    """

    def __init__(
        self, adapter: DeviceAdapter, repeats: Iterator[None], outputs: SpreadRows, ready: PartReady, launch: Launch
    ) -> None:
        self._adapter = adapter
        # Optional, too: tokens of a repeat can be read while the next ones run.
        self._copy_out: Callable[[Any], EarlyTokens] | None = getattr(adapter, "copy_out", None)
        self._main = adapter.current()  # type: ignore[attr-defined]  # optional for an adapter; see `spreads`
        self._repeats = repeats
        self._outputs = outputs
        self._ready = ready
        wait, count = launch.wait_share or 0.0, launch.repeat
        self._shares = [(place + wait) / count for place in range(count)]
        """Of the other launch, after which each begins, the last one first"""
        self._shares.reverse()
        self._calls = 0

    def before_call(self, num_calls: int) -> None:
        """The other launch, on the current stream, comes to its next attention call of so many."""
        shares = self._shares
        self._calls += 1
        # Those that fall between this call and the next: rather early than late, as the last ends with the step.
        share = self._calls / num_calls
        if not shares or shares[-1] >= share:
            return
        point = self._adapter.event()
        with self._adapter.on(self._main):
            self._adapter.wait(point)
            while shares and shares[-1] < share:
                shares.pop()
                self._run_one()

    def begin_all(self) -> None:
        """Run all that are left, waiting for nothing."""
        with self._adapter.on(self._main):
            while self._shares:
                self._shares.pop()
                self._run_one()

    def end(self, late: Callable[[GraphKey], None]) -> int:
        """The other launch is launched: run what is left, and note where the last ends.

        Args:
            late: hears of the graph, where it failed before a replay.

        Returns:
            How many attention calls the other launch came to.

        Raises:
            StickyDeviceError: the device is lost.
        """
        self.begin_all()
        self._ready.event = self._adapter.event(self._main)
        if self._outputs.failed_key is not None:
            late(self._outputs.failed_key)
        if isinstance(self._ready.error, StickyDeviceError):
            raise self._ready.error
        return self._calls

    def _run_one(self) -> None:
        if self._ready.error is not None:
            return
        try:
            next(self._repeats)
            if self._copy_out is not None and self._outputs.tokens:
                self._outputs.early.append(self._copy_out(self._outputs.tokens[-1]))
        # It surfaces where the host waits for these rows, and the launch beside goes on.
        except Exception as error:  # noqa: BLE001
            self._ready.error = error
