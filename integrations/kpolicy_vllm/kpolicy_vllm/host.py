"""Costs at the speed that the host has while it serves, not at the one that it had for the seconds of calibration.

Cores of virtual machines turn slow, and quick again. A table that was measured on a slow core has eager launching too
dear for as long as the server runs, one of a quick core too cheap. So every few seconds the fixed work is timed whose
time the table notes (`kpolicy.host_speed`), and where the last looks say that launching takes clearly more or less than
the costs have it, these are brought to that speed. What the device takes stays as it was measured.

`kpolicy_vllm.watch` keeps the time; the look is the next step's, in its thread. Steps between two looks do nothing. The
first looks come soon after each other, so that a calibration on a slow core costs a server its first seconds only.
"""

from __future__ import annotations

import functools
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from kpolicy.costs import CostTable
from kpolicy.host_speed import INTERPRETER, host_work_us, launching_takes
from kpolicy_vllm.state import LOGGER, State

__all__ = ["CHANGED", "LOOKS", "HostSpeed", "attach", "why_not"]

LOOKS = 5
"""Looks, of some 0.1 ms each, of which the middle one counts"""
CHANGED = 1.2
"""Times that launching takes longer or shorter than the costs have it, from which they are brought to the speed: the
policy is prepared anew for that, for 4 to 18 ms"""


def why_not(state: State) -> str | None:
    """Why costs stay at the speed that they were measured at; None where they follow the host's."""
    costs = state.costs
    if costs is None:
        return "there are none"
    parallel = state.runner.vllm_config.parallel_config
    if getattr(parallel, "world_size_across_dp", parallel.data_parallel_size) > 1:
        return "all ranks decide by the same, and each has a core of its own"
    if not costs.host_work_us or costs.host_probe != INTERPRETER:
        return "they don't say how fast the host was"
    return None


class HostSpeed:
    """Looks at the host's speed, and brings a state's costs to it.

    Args:
        state: the integration's, with costs that say how fast the host was.
        now_us: microseconds that the fixed work takes now.
    """

    def __init__(self, state: State, now_us: Callable[[], float]) -> None:
        assert state.timed is not None  # noqa: S101 - see `why_not`
        self._state = state
        self._measured: CostTable = state.timed
        self._now_us = now_us
        self._rejoin_us = state.rejoin_us
        self._looks: deque[float] = deque(maxlen=LOOKS)
        self.early = True
        """Whether there weren't yet as many looks as tell anything: the next is due soon"""

    def look(self) -> None:
        """Note how fast the host is, and bring the costs to it where that is clearly another speed."""
        state, costs = self._state, self._state.costs
        if costs is None or state.broken:
            return
        self._looks.append(self._now_us())
        if len(self._looks) < LOOKS:
            return
        self.early = False
        work_us = statistics.median(self._looks)
        times = launching_takes(work_us / costs.host_work_us)
        if 1 / CHANGED < times < CHANGED:
            return
        self._looks.clear()
        found = self._measured.at_host_speed(work_us)
        version = f"{self._measured.version}, the host at {work_us:.0f} us"
        state.rejoin_us = self._rejoin_us * launching_takes(work_us / self._measured.host_work_us)
        state.install_costs(attrs.evolve(found, version=version), state.costs_from)
        state.counters.add("host_speed_changes")
        LOGGER.info("kpolicy: launching takes %.2f times what costs had; they are brought to the host's speed", times)


def attach(runner: Any, state: State) -> None:
    """Follow the host's speed from now on, before steps of this runner, where that can be.

    A step whose look is due is the only one that passes through here.
    """
    if why_not(state) is not None:
        return
    speed, execute, due = HostSpeed(state, host_work_us), runner.execute_model, False

    @functools.wraps(execute)
    def looking(*args: Any, **named: Any) -> Any:
        nonlocal due
        if runner.execute_model is looking:
            runner.execute_model = execute
        if due:
            due = False
            with state.guard("host_speed_failed", "following the host's speed", "costs stay as they are"):
                speed.look()
        return execute(*args, **named)

    def look_due() -> bool:
        nonlocal due
        due = True
        now = runner.execute_model  # once, as a step that begins meanwhile puts the other there
        if now is execute:
            runner.execute_model = looking
        elif now is not looking:
            state.counters.warn_once(
                "host_speed_unseen", "another has wrapped execute_model since the start: costs may stay as they are."
            )
        return speed.early

    runner.execute_model, state.look_due = execute, look_due
