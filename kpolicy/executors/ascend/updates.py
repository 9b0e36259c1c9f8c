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

A graph that ran on another stream last is waited for there too. One update stream serves all graphs of a device, main
model and draft alike, so their signals come in the order of their launches. `tests/executors_ascend/test_orders.py`
enumerates every order in which the device can take the commands, and shows that without either rule it hangs.

Unverified on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from kpolicy.errors import ConfigError, RegistryError
from kpolicy.executors.ascend.lengths import HostRows
from kpolicy.executors.ascend.tasks import GraphTasks, UpdateWay

__all__ = ["UpdateOrder", "Updater"]


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
    """

    def __init__(self, library: Any, stream: Any, order: UpdateOrder = UpdateOrder.REPLAY_FENCED) -> None:
        self._library = library
        self.stream = stream
        self.order = order

    def replay(self, graph: Any, tasks: GraphTasks, rows: HostRows, stream: Any) -> None:
        """Replay a graph on the current stream with those rows' host arguments.

        Args:
            graph: an `NPUGraph`.
            tasks: its tasks.
            rows: the launch's rows.
            stream: the current stream.

        Raises:
            GraphReplayError: the rows can't be padded to the graph's shape; nothing was launched.
        """
        values = tasks.values(rows)
        before = tasks.last_stream
        streams = [stream] if before is None or before == stream else [stream, before]
        updating = self._update_stream(graph, tasks)
        if self.order is UpdateOrder.REPLAY_BARRIER:
            for each in streams:
                each.synchronize()
        else:
            for each in streams:
                self._fence(each, updating)
        tasks.last_stream = stream
        if self.order is UpdateOrder.UPDATE_FIRST:
            self._update(graph, tasks, values)
            self._fence(updating, stream)
            graph.replay()
        else:
            graph.replay()
            self._update(graph, tasks, values)

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
            graph.update(cpu_update_input=[dict(each) for each in values])
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
