"""Host tasks: operators of a graph whose host arguments each replay rewrites, and the one way to launch them.

An operator that reads lengths on the host goes through `host_call`. Eagerly it is launched with the step's lengths.
While a FULL graph is recorded it becomes a *task*: an event that the graph waits for and resets, and a group of device
tasks whose arguments can be rewritten later. `kpolicy.executors.ascend.updates` does that at each replay.

Tasks are kept for each graph key, stage included: two graphs of as many tokens never share a list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

from kpolicy.errors import CaptureError, RegistryError
from kpolicy.executors.ascend.lengths import HostRows, LengthRule, host_rows
from kpolicy.executors.buffers import PaddedShape
from kpolicy.executors.step_model import StepContext
from kpolicy.keys import GraphKey
from kpolicy.reasons import Reason

__all__ = ["GraphTasks", "HostTask", "TaskStore", "UpdateWay", "host_call", "recording_tasks"]

HostLaunch = Callable[[Mapping[str, list[int]]], None]
"""Launches the operator into fixed outputs and workspace, with those host arguments. It runs again at each update, so
it may hold nothing that the pool takes back: see `DeviceAdapter.weak`."""


class UpdateWay(str, Enum):
    """How a graph's host arguments are rewritten."""

    TASK_GROUPS = "task_groups"
    """Task by task, by us: ``graph_task_update_begin`` and ``graph_task_update_end`` around each operator."""
    WHOLE_GRAPH = "whole_graph"
    """By torch_npu, for operators that it has handlers for: ``NPUGraph.update(cpu_update_input=...)``."""
    NONE = "none"
    """Not at all: this torch_npu has neither."""

    def __str__(self) -> str:
        return self.value


class HostTask(NamedTuple):
    """One operator of a graph."""

    rule: LengthRule
    shape: PaddedShape
    launch: HostLaunch
    event: Any
    """What the graph waits for before the operator; None where torch_npu keeps it"""
    handle: Any
    """The group of device tasks; None where torch_npu keeps it"""


class GraphTasks:
    """The tasks of one graph in the order of capture, which is that of its layers.

    Args:
        key: the graph's key.
        way: how they are rewritten.
    """

    def __init__(self, key: GraphKey, way: UpdateWay) -> None:
        self.key = key
        self.way = way
        self.tasks: list[HostTask] = []
        self.workspaces: dict[Any, Any] = {}
        """By the operator's own name for it; one serves all layers, which run one after the other"""
        self.last_stream: Any = None
        """Where the graph was replayed last"""

    def values(self, rows: HostRows) -> list[Mapping[str, list[int]]]:
        """Every task's host arguments for those rows, worked out once for equal rules.

        Raises:
            GraphReplayError: the rows can't be padded to the graph's shape; nothing was launched.
            RegistryError: a rule left one of its fields out, or gave another: the replay would go on with a stale one.
        """
        known: dict[tuple[LengthRule, PaddedShape], Mapping[str, list[int]]] = {}
        found = []
        for task in self.tasks:
            values = known.get((task.rule, task.shape))
            if values is None:
                values = known[task.rule, task.shape] = task.rule.values(rows, task.shape)
                if set(values) != set(task.rule.fields):
                    raise RegistryError(
                        f"{self.key}: {task.rule} gave {sorted(values)} for {sorted(task.rule.fields)}; give every "
                        "field at each replay."
                    )
            found.append(values)
        return found

    def workspace(self, name: Any, make: Callable[[], Any]) -> Any:
        """The workspace of that name, made at first."""
        if name not in self.workspaces:
            self.workspaces[name] = make()
        return self.workspaces[name]


class TaskStore:
    """The tasks of every captured graph, by its full key."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, GraphTasks] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def add(self, tasks: GraphTasks) -> None:
        """Keep a graph's tasks; a key that is captured anew replaces its old ones."""
        self._graphs[tasks.key] = tasks

    def get(self, key: GraphKey) -> GraphTasks | None:
        return self._graphs.get(key)

    def forget(self, keys: Sequence[GraphKey]) -> None:
        for key in keys:
            self._graphs.pop(key, None)


class _Recording(NamedTuple):
    tasks: GraphTasks
    library: Any
    """`torch_npu.npu`"""
    stream: Any


_recording = threading.local()


@contextmanager
def recording_tasks(tasks: GraphTasks, library: Any, stream: Any) -> Iterator[None]:
    """While a FULL graph is recorded on a stream: this thread's host calls become its tasks."""
    _recording.now = _Recording(tasks, library, stream)
    try:
        yield
    finally:
        _recording.now = None


def host_call(
    step: StepContext, rule: LengthRule, shape: PaddedShape, launch: HostLaunch, *, eager: HostLaunch | None = None
) -> GraphTasks | None:
    """Launch an operator that reads lengths on the host.

    Args:
        step: the step that runs.
        rule: makes its host arguments.
        shape: what its rows are padded to.
        launch: launches it.
        eager: launches it where nothing is recorded; `launch` by default.

    Raises:
        CaptureError: a graph is recorded, and this torch_npu can't rewrite arguments.
    """
    now: _Recording | None = getattr(_recording, "now", None)
    values = rule.values(host_rows(step), shape)
    if now is None:
        (eager or launch)(values)
        return None
    tasks, library, stream = now
    if tasks.way is UpdateWay.NONE:
        raise CaptureError(
            Reason.HOST_LENGTHS_FROZEN,
            "an operator reads lengths on the host and this torch_npu has neither graph_task_update_begin nor "
            "NPUGraph.update, so a graph would keep those of its capture; update torch_npu, or capture PIECEWISE.",
        )
    if tasks.way is UpdateWay.WHOLE_GRAPH:
        launch(values)
        tasks.tasks.append(HostTask(rule, shape, launch, None, None))
        return tasks
    event = library.ExternalEvent()
    event.wait(stream)
    # Before the operator, so that the next step's signal can't come to a flag that is still up.
    event.reset(stream)
    library.graph_task_group_begin(stream)
    try:
        launch(values)
    finally:
        handle = library.graph_task_group_end(stream)
    tasks.tasks.append(HostTask(rule, shape, launch, event, handle))
    return tasks


def recorded() -> GraphTasks | None:
    """The tasks of the graph that this thread records; None where it records none."""
    now: _Recording | None = getattr(_recording, "now", None)
    return None if now is None else now.tasks
