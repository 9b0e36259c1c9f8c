"""In which order a graph is replayed and its host arguments are rewritten: `replay`.

The hard part. A graph waits at each task for that task's event, and resets it right after. The event is signalled on
the update stream, once the task's arguments are rewritten. A signal that comes before the *previous* replay of the
graph has passed its own wait and reset is eaten by that reset, and the graph waits for ever (vllm-ascend #12944,
#13600). Rewritten arguments that come early are read by the previous replay, which then computes with the wrong
lengths.

Promise: by construction neither happens. In every order the update stream takes nothing of a step before the previous
replay of that graph is over on the device:

* `REPLAY_FENCED` (default): the update stream first waits, on the device, for all that the launching stream had so far;
  then the graph is launched, then its tasks are rewritten and signalled, layer by layer, while layers before them run.
* `REPLAY_BARRIER`: the host waits for the launching stream instead. About 85 us a step by vllm-ascend's own figure.
* `UPDATE_FIRST`: as the first, but tasks are rewritten and signalled before the graph is launched, and the launching
  stream waits for that. For devices whose events must be signalled before they are waited for (vllm-ascend #8636).

Should a signal be lost all the same (a driver that orders commands otherwise, another library that updates our
graphs), the graph waits for ever, and with it the host. So whoever waits for a stream here asks it again and again
instead, and gives up after `timeout_s` with an `UpdateStallError`. The waiting graphs are signalled then, so that the
process can end.

A graph that ran on another stream last: the launching stream waits for that first. One update stream serves all graphs
of a device, main model and draft alike, so their signals come in the order of their launches.
`tests/executors_ascend/test_orders.py` enumerates every order in which the device can take the commands, and shows that
without either rule it hangs.

Unverified on hardware.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from math import isfinite
from typing import Any

from kpolicy.errors import ConfigError, RegistryError, UpdateStallError
from kpolicy.executors.ascend.lengths import HostRows
from kpolicy.executors.ascend.tasks import GraphTasks, UpdateWay
from kpolicy.keys import GraphKey

__all__ = ["TIMEOUT_S", "UpdateOrder", "Updater"]

TIMEOUT_S = 120.0
"""Seconds after which a stream that isn't done counts as stalled; vendor libraries give up on collectives later."""
_EAGER_S = 0.05
"""Seconds for which a stream is asked without a pause in between"""
_RECENT = 4
"""Graphs that an error names: those replayed last"""


class UpdateOrder(str, Enum):
    """Which comes first, and what keeps steps apart."""

    REPLAY_FENCED = "replay_fenced"
    REPLAY_BARRIER = "replay_barrier"
    UPDATE_FIRST = "update_first"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, name: str | UpdateOrder) -> UpdateOrder:
        """The order of that name.

        Raises:
            ConfigError: there is none.
        """
        try:
            return cls(name)
        except ValueError:
            raise ConfigError(f"update_order is {name!r}; known: {', '.join(map(str, cls))}.") from None


class Updater:
    """Replays graphs and rewrites their tasks on one device.

    Args:
        library: `torch_npu.npu`.
        stream: the device's update stream; see `update_stream`.
        order: see the module.
        timeout_s: seconds after which a stream that isn't done counts as stalled.

    Raises:
        ConfigError: timeout_s isn't a positive number of seconds.
    """

    def __init__(
        self, library: Any, stream: Any, order: UpdateOrder = UpdateOrder.REPLAY_FENCED, timeout_s: float = TIMEOUT_S
    ) -> None:
        if not (timeout_s > 0 and isfinite(timeout_s)):
            raise ConfigError(f"update_timeout_s is {timeout_s!r}; give a positive number of seconds, such as 120.")
        self._library = library
        self.stream = stream
        self.order = order
        self.timeout_s = timeout_s
        self._recent: deque[tuple[Any, GraphTasks]] = deque(maxlen=_RECENT)
        self._stall: tuple[tuple[GraphKey, ...], str] | None = None

    def replay(self, graph: Any, tasks: GraphTasks, rows: HostRows, stream: Any) -> None:
        """Replay a graph on the current stream with those rows' host arguments.

        Args:
            graph: an `NPUGraph`.
            tasks: its tasks.
            rows: the launch's rows.
            stream: the current stream.

        Raises:
            GraphReplayError: the rows can't be padded to the graph's shape; nothing was launched.
            UpdateStallError: with the barrier, the step before doesn't end.
        """
        values = tasks.values(rows)
        before = tasks.last_stream
        updating = self._update_stream(graph, tasks)
        if before is not None and before != stream:
            # Two replays of one graph at once would take each other's signals.
            self._fence(before, stream)
        if self.order is UpdateOrder.REPLAY_BARRIER:
            self.finish(stream)
        else:
            self._fence(stream, updating)
        tasks.last_stream = stream
        self._recent.append((graph, tasks))
        if self.order is UpdateOrder.UPDATE_FIRST:
            self._update(graph, tasks, values)
            self._fence(updating, stream)
            graph.replay()
        else:
            graph.replay()
            self._update(graph, tasks, values)

    def streams(self) -> list[Any]:
        """Those that graphs with tasks were replayed on last."""
        return [tasks.last_stream for _, tasks in self._recent]

    def forget(self, tasks: Sequence[GraphTasks]) -> None:
        """Let go of graphs that are gone: what isn't there can't wait."""
        gone = set(map(id, tasks))
        kept = [each for each in self._recent if id(each[1]) not in gone]
        self._recent = deque(kept, maxlen=_RECENT)

    def check_stall(self) -> None:
        """Raise the UpdateStallError that there was, if any."""
        if self._stall is not None:
            raise UpdateStallError(*self._stall)

    def finish(self, point: Any) -> None:
        """Block the host until an event, or a stream, is done.

        Raises:
            UpdateStallError: it isn't after the time limit, and graphs with tasks were replayed; also in every later
                call. They are signalled, so that the device goes on; what they computed is worthless.
        """
        self.check_stall()
        if not self._recent:
            point.synchronize()
            return
        start = time.monotonic()
        while not point.query():
            waited = time.monotonic() - start
            if waited > self.timeout_s:
                raise self._stalled(waited)
            time.sleep(0 if waited < _EAGER_S else 1e-3)
        point.synchronize()  # raises what the work before it raised

    def _stalled(self, waited: float) -> UpdateStallError:
        recent = list(self._recent)
        self._recent.clear()
        self._free(recent)
        keys = list(dict.fromkeys(tasks.key for _, tasks in reversed(recent)))
        ways = ", ".join(dict.fromkeys(str(tasks.way) for _, tasks in recent))
        said = (
            f"a stream isn't done after {waited:.3g} s (update_timeout_s={self.timeout_s:g}), so a graph likely waits "
            f"for host arguments that were never signalled. Replayed last: {', '.join(map(str, keys))}; order "
            f"{self.order}, way {ways}. The step's results are lost. Start a new process with another update_order "
            f"(known: {', '.join(map(str, UpdateOrder))}), or raise update_timeout_s if steps may take so long."
        )
        # In words: an error that is raised again and again holds the frames of every time.
        self._stall = tuple(keys), said
        return UpdateStallError(*self._stall)

    def _free(self, recent: Sequence[tuple[Any, GraphTasks]]) -> None:
        """Signal every task of those replays, on a stream that waits for nothing."""
        stream = self._library.Stream()
        for graph, tasks in recent:
            for event in _events(graph, tasks):
                event.record(stream)

    def _update_stream(self, graph: Any, tasks: GraphTasks) -> Any:
        """The stream that rewrites the graph's tasks: torch_npu has one of its own for all graphs."""
        if tasks.way is not UpdateWay.WHOLE_GRAPH:
            return self.stream
        mode = getattr(graph, "graph_dispatch_mode", None)
        stream = getattr(mode, "update_stream", None)
        if stream is None:
            raise RegistryError(
                f"{tasks.key}: this torch_npu doesn't say on which stream NPUGraph.update works, so it can't be kept "
                "behind the previous replay. Use update_way='task_groups'."
            )
        return stream

    def _fence(self, first: Any, then: Any) -> None:
        """Let a stream wait, on the device, for all that another has."""
        event = self._library.Event()
        event.record(first)
        event.wait(then)

    def _update(self, graph: Any, tasks: GraphTasks, values: Sequence[Mapping[str, list[int]]]) -> None:
        if tasks.way is UpdateWay.WHOLE_GRAPH:
            try:
                graph.update(cpu_update_input=[dict(each) for each in values])
            except Exception:
                # As below. The graph is given up, so that signals too many are no matter.
                updating = self._update_stream(graph, tasks)
                with suppress(Exception):
                    self._library.graph_task_update_end(updating)  # the operator that failed may have left it open
                for event in _events(graph, tasks):
                    event.record(updating)
                raise
            return
        library, stream, failed = self._library, self.stream, None
        with library.stream(stream):
            for task, arguments in zip(tasks.tasks, values, strict=True):
                try:
                    library.graph_task_update_begin(stream, task.handle)
                    try:
                        task.launch(arguments)
                    finally:
                        library.graph_task_update_end(stream)
                except Exception as error:  # noqa: BLE001 - raised below
                    failed = failed or error
                # Whatever fails: a graph that waits for ever would take the device with it.
                task.event.record(stream)
        if failed is not None:
            raise failed


def _events(graph: Any, tasks: GraphTasks) -> list[Any]:
    """What the graph waits for, in the order of its tasks."""
    if tasks.way is not UpdateWay.WHOLE_GRAPH:
        return [task.event for task in tasks.tasks]
    records = getattr(getattr(graph, "graph_dispatch_mode", None), "graph_dispatch_records", ())
    return [record.event for record in records]
