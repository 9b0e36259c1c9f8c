# ruff: noqa: ARG002 - what a broken updater leaves out, it leaves out
"""Every order in which the device can take a step's commands: no hang, no stale length; without a rule, both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from kpolicy.executors.ascend.lengths import HostRows, TokenLengths
from kpolicy.executors.ascend.tasks import GraphTasks, UpdateWay, host_call, recording_tasks
from kpolicy.executors.ascend.updates import UpdateOrder, Updater
from kpolicy.executors.buffers import PaddedShape
from kpolicy.executors.step_model import StepContext
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from tests.fakes.device import Device, Entry, every_order, random_order
from tests.fakes.torch_npu import fake_torch_npu

RULE = TokenLengths("actual_seq_lengths", "actual_seq_lengths_kv", 1 << 20)
LAYERS = 2
ORDERS = list(UpdateOrder)
WAYS = [UpdateWay.TASK_GROUPS, UpdateWay.WHOLE_GRAPH]


class Programme:
    """What the host does in steps of graphs of `LAYERS` host tasks, noted as commands of the pretended device.

    Args:
        order, way: as the executor has them.
        stages: one graph each, of as many tokens.
        updater: the class that replays, for leaving a rule out.
    """

    def __init__(
        self, order: UpdateOrder, way: UpdateWay, stages: Sequence[str] = ("main",), updater: type[Updater] = Updater
    ) -> None:
        self.chip = Device(runs=False)
        self.device_module = fake_torch_npu(self.chip, records=False)
        npu = self.device_module.npu
        self.stream = npu.current_stream()
        self.others = [npu.Stream()]
        self.updater = updater(npu, npu.Stream(), order)
        self.graphs: dict[str, tuple[Any, GraphTasks]] = {}
        self.expected: dict[int, int] = {}
        for stage in stages:
            self.graphs[stage] = self._captured(GraphKey(Part.FULL, 1, 1, query_len=1, stage=stage), way)
        self.chip.programme.clear()

    def _captured(self, key: GraphKey, way: UpdateWay) -> tuple[Any, GraphTasks]:
        npu, graph, tasks = self.device_module.npu, self.device_module.npu.NPUGraph(), GraphTasks(key, way)
        if way is UpdateWay.WHOLE_GRAPH:
            graph.auto_dispatch_capture = True
            graph.graph_dispatch_mode.__enter__()
        graph.capture_begin()
        with recording_tasks(tasks, npu, self.stream):
            step: Any = StepContext(None, None)  # type: ignore[arg-type]
            for _ in range(LAYERS):
                host_call(
                    step, RULE, PaddedShape(1, 1, 1),
                    lambda values: self.device_module.launch("npu_fused_infer_attention_score.out", None, dict(values)),
                )  # fmt: skip
        graph.capture_end()
        return graph, tasks

    def step(self, stage: str, length: int, *, beside: bool = False, joined: bool = True) -> None:
        """A step whose row has that KV length, on the main stream or beside it.

        Args:
            stage: which graph.
            length: the row's.
            beside: on another stream, which waits for the main one before, and it for that after, unless not joined.
            joined: see beside.
        """
        npu, (graph, tasks) = self.device_module.npu, self.graphs[stage]
        stream = self.others[0] if beside else self.stream
        if beside and joined:
            stream.wait_stream(self.stream)
        with npu.stream(stream):
            self.updater.replay(graph, tasks, HostRows([1], [length]), stream)
        if beside and joined:
            self.stream.wait_stream(stream)
        self.expected[self.chip.replays] = length

    def right(self, task: Any, replay: int, arguments: Any) -> bool:
        del task
        return bool(arguments["actual_seq_lengths_kv"] == [self.expected[replay]])

    @property
    def entries(self) -> list[Entry]:
        return self.chip.programme


def three_steps(order: UpdateOrder, way: UpdateWay, updater: type[Updater] = Updater) -> Programme:
    """Main, draft, main and main again: the last two are where signals could be eaten."""
    programme = Programme(order, way, ("main", "draft"), updater)
    for stage, length in (("main", 5), ("draft", 6), ("main", 7), ("main", 8)):
        programme.step(stage, length)
    return programme


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_no_order_of_the_device_hangs_or_reads_stale_lengths(order: UpdateOrder, way: UpdateWay) -> None:
    """All interleavings of host, launching stream and update stream, each reachable state once."""
    programme = three_steps(order, way)
    found = every_order(programme.entries, programme.chip.state, programme.right)
    assert found.sound, found
    assert found.states > 50


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_graph_that_moves_between_streams_is_waited_for_where_it_ran(order: UpdateOrder) -> None:
    """A decode graph runs beside a prompt in one step and on the main stream in the next."""
    programme = Programme(order, UpdateWay.TASK_GROUPS)
    for length, beside in ((5, True), (6, False), (7, True)):
        programme.step("main", length, beside=beside)
    found = every_order(programme.entries, programme.chip.state, programme.right)
    assert found.sound, found


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_streams_that_do_not_wait_for_each_other_are_no_matter(order: UpdateOrder) -> None:
    """The graph's own last stream is waited for, whatever the launcher does between its streams."""
    programme = Programme(order, UpdateWay.TASK_GROUPS)
    for length, beside in ((5, True), (6, False), (7, True)):
        programme.step("main", length, beside=beside, joined=False)
    assert _found(programme).sound


def _found(programme: Programme) -> Any:
    return every_order(programme.entries, programme.chip.state, programme.right)


def impatient(order: UpdateOrder, updater: type[Updater] = Updater) -> Programme:
    """Three steps on a device whose events must be signalled before they are waited for."""
    programme = three_steps(order, UpdateWay.TASK_GROUPS, updater)
    programme.chip.state.patient = False
    return programme


def test_where_events_must_be_signalled_first_only_update_first_is_sound() -> None:
    """There a wait that comes early doesn't block: replaying first reads stale lengths, updating first doesn't."""
    assert _found(impatient(UpdateOrder.UPDATE_FIRST)).sound
    for order in (UpdateOrder.REPLAY_FENCED, UpdateOrder.REPLAY_BARRIER):
        assert _found(impatient(order)).stale


def test_update_first_needs_the_wait_for_the_update_there() -> None:
    """Without the launching stream's wait for the update stream the graph reads stale lengths on such a device."""
    assert _found(impatient(UpdateOrder.UPDATE_FIRST, _NoReturnFence)).stale


class _ForgetsLastStream(Updater):
    """The stream on which the graph ran last isn't waited for."""

    def replay(self, graph: Any, tasks: GraphTasks, rows: HostRows, stream: Any) -> None:
        tasks.last_stream = None
        super().replay(graph, tasks, rows, stream)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_last_stream_must_be_waited_for(order: UpdateOrder) -> None:
    """Without that, a graph that moves between streams that don't wait for each other hangs or reads stale lengths."""
    programme = Programme(order, UpdateWay.TASK_GROUPS, updater=_ForgetsLastStream)
    for length, beside in ((5, True), (6, False), (7, True)):
        programme.step("main", length, beside=beside, joined=False)
    found = _found(programme)
    assert found.hangs or found.stale


class _NoFence(Updater):
    """Without the fence behind the previous replay."""

    def _fence(self, first: Any, then: Any) -> None:
        if self.order is UpdateOrder.UPDATE_FIRST and then is not self.stream:
            super()._fence(first, then)


class _NoReturnFence(Updater):
    """Without the launching stream's wait for the update."""

    def _fence(self, first: Any, then: Any) -> None:
        if then is self.stream:
            super()._fence(first, then)


class _NoBarrier(Updater):
    """The host doesn't wait."""

    def replay(self, graph: Any, tasks: GraphTasks, rows: HostRows, stream: Any) -> None:
        values = tasks.values(rows)
        graph.replay()
        self._update(graph, tasks, values)


class _SignalFirst(Updater):
    """Tasks are signalled before they are rewritten."""

    def _update(self, graph: Any, tasks: GraphTasks, values: Any) -> None:
        with self._library.stream(self.stream):
            for task in tasks.tasks:
                task.event.record(self.stream)
            for task, arguments in zip(tasks.tasks, values, strict=True):
                self._library.graph_task_update_begin(self.stream, task.handle)
                task.launch(arguments)
                self._library.graph_task_update_end(self.stream)


class _HalfUpdated(Updater):
    """The last layer isn't rewritten."""

    def _update(self, graph: Any, tasks: GraphTasks, values: Any) -> None:
        with self._library.stream(self.stream):
            for task, arguments in zip(tasks.tasks, values, strict=True):
                if task is not tasks.tasks[-1]:
                    self._library.graph_task_update_begin(self.stream, task.handle)
                    task.launch(arguments)
                    self._library.graph_task_update_end(self.stream)
                task.event.record(self.stream)


class _NoSignal(Updater):
    """The last layer isn't signalled."""

    def _update(self, graph: Any, tasks: GraphTasks, values: Any) -> None:
        with self._library.stream(self.stream):
            for task, arguments in zip(tasks.tasks, values, strict=True):
                self._library.graph_task_update_begin(self.stream, task.handle)
                task.launch(arguments)
                self._library.graph_task_update_end(self.stream)
                if task is not tasks.tasks[-1]:
                    task.event.record(self.stream)


class _WrongStream(Updater):
    """Tasks are rewritten on the stream that the graph runs on, behind the graph."""

    def _update(self, graph: Any, tasks: GraphTasks, values: Any) -> None:
        stream = tasks.last_stream
        for task, arguments in zip(tasks.tasks, values, strict=True):
            self._library.graph_task_update_begin(stream, task.handle)
            task.launch(arguments)
            self._library.graph_task_update_end(stream)
            task.event.record(stream)


class _WrongCurrentStream(Updater):
    """Operators are launched without making the update stream the current one."""

    def _update(self, graph: Any, tasks: GraphTasks, values: Any) -> None:
        for task, arguments in zip(tasks.tasks, values, strict=True):
            self._library.graph_task_update_begin(self.stream, task.handle)
            task.launch(arguments)
            self._library.graph_task_update_end(self.stream)
            task.event.record(self.stream)


BROKEN: list[tuple[UpdateOrder, type[Updater], str]] = [
    (UpdateOrder.REPLAY_FENCED, _NoFence, "hangs"),
    (UpdateOrder.REPLAY_FENCED, _NoFence, "stale"),
    (UpdateOrder.UPDATE_FIRST, _NoFence, "stale"),
    (UpdateOrder.REPLAY_BARRIER, _NoBarrier, "hangs"),
    (UpdateOrder.REPLAY_FENCED, _SignalFirst, "stale"),
    (UpdateOrder.REPLAY_BARRIER, _SignalFirst, "stale"),
    (UpdateOrder.REPLAY_FENCED, _HalfUpdated, "stale"),
    (UpdateOrder.REPLAY_FENCED, _NoSignal, "hangs"),
    (UpdateOrder.UPDATE_FIRST, _NoSignal, "hangs"),
    (UpdateOrder.REPLAY_FENCED, _WrongStream, "hangs"),
    (UpdateOrder.REPLAY_BARRIER, _WrongStream, "hangs"),
    (UpdateOrder.REPLAY_FENCED, _WrongCurrentStream, "stale"),
]


@pytest.mark.parametrize(("order", "updater", "what"), BROKEN)
def test_without_a_rule_some_order_fails(order: UpdateOrder, updater: type[Updater], what: str) -> None:
    """Each rule carries weight: left out, the enumeration finds an order that hangs or computes with wrong lengths."""
    programme = three_steps(order, UpdateWay.TASK_GROUPS, updater)
    found = every_order(programme.entries, programme.chip.state, programme.right)
    assert getattr(found, what) > 0, found


def test_a_graph_without_its_reset_goes_on_with_stale_lengths() -> None:
    """The reset behind each wait carries weight: without it the next replay doesn't wait for its own signal."""
    programme = three_steps(UpdateOrder.REPLAY_FENCED, UpdateWay.TASK_GROUPS)
    entries = [each for each in programme.entries if each.command is None or each.command.kind != "lower"]
    assert every_order(entries, programme.chip.state, programme.right).stale


def schedule(
    seed: int, order: UpdateOrder, updater: type[Updater] = Updater, *, way: UpdateWay | None = None,
    patient: bool = True, reset: bool = True,
) -> str:  # fmt: skip
    """A random run of main and draft steps in one random order of the device.

    Lengths are rewritten in either way where none is given. A device that isn't patient needs events to be signalled
    before they are waited for, and without resets graphs leave them up.
    """
    rng = random.Random(seed)  # noqa: S311
    programme = Programme(order, rng.choice(WAYS) if way is None else way, ("main", "draft"), updater)
    programme.chip.state.patient = patient
    for step in range(rng.randint(3, 12)):
        beside, joined = rng.random() < 0.3, rng.random() < 0.5
        programme.step(rng.choice(("main", "draft")), 5 + step, beside=beside, joined=joined)
    entries = [each for each in programme.entries if reset or each.command is None or each.command.kind != "lower"]
    return random_order(entries, programme.chip.state, programme.right, rng)


def test_ten_thousand_random_schedules_of_main_and_draft_steps() -> None:
    """No stale length and no hang, in any order, either way, on either stream."""
    found = {schedule(seed, ORDERS[seed % 3]) for seed in range(10_000)}
    assert found == {"ok"}


@pytest.mark.parametrize(("order", "updater", "what"), BROKEN)
def test_random_schedules_find_a_rule_that_is_left_out(order: UpdateOrder, updater: type[Updater], what: str) -> None:
    """The random schedules aren't too tame: each broken rule shows within a few hundred."""
    found = {schedule(seed, order, updater, way=UpdateWay.TASK_GROUPS) for seed in range(400)}
    assert {"hangs": "hang", "stale": "stale"}[what] in found


@pytest.mark.parametrize(
    ("order", "updater", "what"),
    [
        (UpdateOrder.REPLAY_FENCED, _NoFence, "hang"),
        (UpdateOrder.REPLAY_FENCED, _NoFence, "stale"),
        (UpdateOrder.REPLAY_BARRIER, _NoBarrier, "hang"),
        *((order, _ForgetsLastStream, what) for order in ORDERS for what in ("hang", "stale")),
    ],
)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_random_schedules_find_what_keeps_steps_apart_either_way(
    order: UpdateOrder, updater: type[Updater], what: str, way: UpdateWay
) -> None:
    """The fence, the barrier and the wait for a graph's last stream, with lengths rewritten by us or by torch_npu."""
    assert what in {schedule(seed, order, updater, way=way) for seed in range(400)}


def test_random_schedules_find_a_reset_that_is_left_out() -> None:
    """A signal that stays up lets the next replay through with the lengths of the one before."""
    for order in (UpdateOrder.REPLAY_FENCED, UpdateOrder.REPLAY_BARRIER):
        assert "stale" in {schedule(seed, order, reset=False) for seed in range(400)}


def test_random_schedules_on_a_device_whose_events_come_first() -> None:
    """There updating first is sound, and isn't without the wait for the update; the other orders read stale lengths."""
    task_groups = UpdateWay.TASK_GROUPS
    assert {schedule(seed, UpdateOrder.UPDATE_FIRST, patient=False) for seed in range(1_000)} == {"ok"}
    for order, updater in (
        (UpdateOrder.UPDATE_FIRST, _NoReturnFence), (UpdateOrder.REPLAY_FENCED, Updater),
        (UpdateOrder.REPLAY_BARRIER, Updater),
    ):  # fmt: skip
        found = {schedule(seed, order, updater, way=task_groups, patient=False) for seed in range(400)}
        assert "stale" in found
