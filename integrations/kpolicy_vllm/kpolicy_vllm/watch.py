"""A thread that sums up at an interval: one line in vLLM's log, and the counters for Prometheus.

Steps only count; the clock is read here, also for looks at the host's speed.
"""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from threading import Event, Thread, current_thread

from kpolicy.observe import padding_text
from kpolicy_vllm.state import LOGGER, State

__all__ = ["SOON_S", "TICK_S", "Watch", "summary"]

TICK_S = 5.0
"""Seconds between two times that counts are told and a look at the host's speed is due; a shorter interval's instead"""
SOON_S = 1.0
"""Seconds between the first looks at the host's speed"""
_JOIN_S = 1.0

Tallies = Mapping[tuple[str, str], tuple[int, int, int]]


def summary(before: Tallies, now: Tallies, counts: Mapping[str, int], seconds: float) -> str:
    """One line on the steps between two tallies; empty where there were none.

    Args:
        before: steps, tokens and padding by mode and reason, then.
        now: the same, now.
        counts: what else happened, since the start.
        seconds: the time between the two.
    """
    steps: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    tokens = padding = 0
    for label, (count, real, padded) in now.items():
        old = before.get(label, (0, 0, 0))
        mode, reason = label
        steps[mode] += count - old[0]
        reasons[reason] += count - old[0]
        tokens += real - old[1]
        padding += padded - old[2]
    total = steps.total()
    if not total:
        return ""
    modes = ", ".join(f"{mode} {count / total:.1%}" for mode, count in steps.most_common() if count)
    whys = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common(5) if count)
    text = f"{total} steps in {seconds:.0f} s: {modes}; padding {padding_text(padding, tokens)}; {whys}"
    return text + "".join(f"; {name} {count}" for name, count in sorted(counts.items()))


class Watch:
    """Says `summary` at the interval, and when the process ends. It goes with the state, which it doesn't hold.

    A process forked off this one has no such thread, and says nothing when it ends.

    Args:
        state: what kpolicy knows of this vLLM.
        publish: called every `TICK_S` with the registry's hits up to date.
    """

    def __init__(self, state: State, publish: Callable[[], None] | None = None) -> None:
        self._state = weakref.ref(state)
        self._publish = publish
        self._before: Tallies = {}
        self._interval_s = state.config.summary_seconds
        self._often = publish is not None or state.look_due is not None
        self._soon = state.look_due is not None
        self._pid = os.getpid()
        self._ended = Event()
        self._thread = Thread(target=self._run, name="kpolicy-watch", daemon=True)
        # Whoever ends the last engine of a process without ending the process has no thread left over.
        weakref.finalize(state, self._ended.set).atexit = False

    def start(self) -> None:
        """Begin, until the state is gone, the process ends or `stop`."""
        if self._interval_s or self._often:
            self._thread.start()
            atexit.register(self.stop)

    def stop(self) -> None:
        """Say what is left to say, and end."""
        if os.getpid() != self._pid:
            return
        if not self._ended.is_set():
            self._ended.set()
            if self._thread.is_alive() and self._thread is not current_thread():
                # What it writes now would be left behind.
                self._thread.join(_JOIN_S)
            self.say(0.0)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        interval_s = self._interval_s or math.inf
        tick_s = min(interval_s, TICK_S) if self._often else interval_s
        passed = since = 0.0
        while not self._ended.wait(
            wait_s := min(SOON_S if self._soon else tick_s, tick_s - since, interval_s - passed)
        ):
            passed, since = passed + wait_s, since + wait_s
            if since < tick_s and passed < interval_s:
                self._look()
                continue
            since = 0.0
            if self._tick(passed):
                passed = 0.0
        atexit.unregister(self.stop)

    def _look(self) -> None:
        """Have the host looked at by the next step."""
        state = self._state()
        if state is not None and state.look_due is not None:
            self._soon = state.look_due()

    def _tick(self, passed: float) -> bool:
        """Have the host looked at, and tell the counts; whether the summary was due."""
        self._look()
        state, due = self._state(), bool(self._interval_s) and passed >= self._interval_s
        if state is not None:
            with state.guard("summary_failed", "summing up", "it is tried again at the next interval"):
                if self._publish is not None:
                    state.dispatcher.chooser.count_hits()
                    self._publish()
                if due:
                    self.say(passed)
        return due

    def say(self, seconds: float) -> str:
        """Log the summary of the steps since the last; what was logged."""
        state = self._state()
        if state is None:
            return ""
        now = state.dispatcher.chooser.tallies()
        line = summary(self._before, now, state.counters.counts, seconds)
        self._before = now
        if line and self._interval_s:
            LOGGER.info("kpolicy: %s", line)
        return line
