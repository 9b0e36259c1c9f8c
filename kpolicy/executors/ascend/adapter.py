"""`AscendAdapter`: an Ascend NPU through torch_npu. Graphs are `torch.npu.NPUGraph`s.

What differs from other devices: operators of a graph whose host arguments each replay rewrites (`tasks`, `updates`),
and graphs that take streams of the device for good, of which there are few (`executor`).

Unverified on hardware: held to fakes made from torch_npu 2.13's own signatures (docs/ascend.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch

from kpolicy.errors import CaptureError, ConfigError, UnknownNameError, UpdateStallError
from kpolicy.executors.ascend.failures import advice, classify
from kpolicy.executors.ascend.lengths import NO_ROWS, HostRows
from kpolicy.executors.ascend.tasks import GraphTasks, TaskStore, UpdateWay, recording_tasks
from kpolicy.executors.ascend.updates import TIMEOUT_S, UpdateOrder, Updater
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.cuda.stream_adapter import CudaGraph, Statics, StreamAdapter
from kpolicy.executors.faults import Fault, Faults
from kpolicy.executors.importing import first_line, not_there, why_broken
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason

__all__ = ["AscendAdapter", "AscendGraph", "load_library", "update_stream"]

_NEXT = "Install CANN and source its set_env.sh; `kpolicy doctor` says more."
_update_streams: dict[tuple[int, int], Any] = {}
_making = threading.Lock()


def load_library() -> Any:
    """torch_npu.

    Raises:
        ConfigError: it isn't there or doesn't import, said with the next step.
    """
    broken = why_broken("torch_npu")
    if broken:
        raise ConfigError(f"torch_npu doesn't import: {broken}. {_NEXT}")
    try:
        return import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            raise ConfigError(f"torch_npu doesn't import: {error}. Reinstall it for this torch.") from error
        raise ConfigError(
            "torch_npu isn't installed; on an Ascend NPU, install the one made for this torch."
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        line = first_line(error)
        raise ConfigError(f"torch_npu doesn't import: {line}. {_NEXT}") from error


def update_stream(library: Any, device: torch.device) -> Any:
    """The one stream of a device on which host arguments of graphs are rewritten: main model and draft share it."""
    with _making:
        key = id(library), device.index or 0
        if key not in _update_streams:
            _update_streams[key] = library.npu.Stream(device)
        return _update_streams[key]


class AscendGraph(CudaGraph):
    """A captured graph, and its tasks where it has any."""

    def __init__(self, graph: Any, num_bytes: int, addresses: Mapping[str, Any], tasks: GraphTasks | None) -> None:
        super().__init__(graph, num_bytes, addresses)
        self.tasks = tasks


class AscendAdapter(StreamAdapter):
    """The primitives of one Ascend NPU.

    Args:
        device: the device; the current one where it has no index.
        library: torch_npu, or what stands in for it; with one, tensors may be on any device.
        update_order: which comes first at a replay, and what keeps steps apart; see `UpdateOrder`.
        update_way: how host arguments are rewritten; the first that this torch_npu has where None.
        update_timeout_s: seconds after which a stream that isn't done counts as stalled; see `Updater.finish`.
        check, statics, faults: as `StreamAdapter` has them.

    Attributes:
        store: the tasks of every graph, by full key.
        rows: the rows of the launch that comes, for its replay.

    Raises:
        ConfigError: there is no such device, or torch_npu can't be used.
        UnknownNameError: update_way names none.
    """

    def __init__(
        self, device: Any = "npu", *, library: Any = None, update_order: str | UpdateOrder = UpdateOrder.REPLAY_FENCED,
        update_way: str | UpdateWay | None = None, update_timeout_s: float = TIMEOUT_S, check: bool = False,
        statics: Statics | None = None, faults: Iterable[Fault | str] = (),
    ) -> None:  # fmt: skip
        order = UpdateOrder.of(update_order)
        given = library is not None
        self.torch_npu = library if given else load_library()
        at = _device(device, self.torch_npu.npu, any_type=given)
        super().__init__(
            "ascend", self.torch_npu.npu, at, classify=classify, check=check, statics=statics, faults=faults
        )
        self.way = _way(self.device_module, update_way)
        self.store = TaskStore()
        self.rows = NO_ROWS
        self._updater = Updater(self.device_module, update_stream(self.torch_npu, at), order, update_timeout_s)
        self._key: GraphKey | None = None
        self._tasks: GraphTasks | None = None
        self._noting: AbstractContextManager[None] | None = None

    @property
    def order(self) -> UpdateOrder:
        return self._updater.order

    def probe(self) -> ProbeReport:
        name = str(self.device_module.get_device_name(self.device))
        facts = {
            "torch": str(torch.__version__), "torch_npu": str(getattr(self.torch_npu, "__version__", "unknown")),
            "update_way": str(self.way), "update_order": str(self.order),
        }  # fmt: skip
        return ProbeReport("ascend", ProbeStatus.USABLE, f"{name}; unverified on hardware", facts=facts)

    # Graphs

    @contextmanager
    def capturing(self, key: GraphKey) -> Iterator[None]:
        """What is recorded within is that key's graph."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def _begun(self, pool: Any) -> Any:
        if os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
            # vllm-ascend refuses to start so; here it costs the graphs.
            raise CaptureError(
                Reason.CAPTURE_FAILED, "ASCEND_LAUNCH_BLOCKING=1 rules graphs out; unset it and start a new process."
            )
        graph = self.device_module.NPUGraph()
        key = self._key
        # Attention of a PIECEWISE graph runs between its segments, where nothing is recorded.
        whole = key is not None and key.part is Part.FULL
        if whole and self.way is UpdateWay.WHOLE_GRAPH:
            # As `torch.npu.graph` does with auto_dispatch_capture, which leaves its dispatcher behind after an error.
            graph.auto_dispatch_capture = True
            graph.graph_dispatch_mode.__enter__()
        try:
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        except BaseException:
            if graph.auto_dispatch_capture:
                graph.graph_dispatch_mode.__exit__(None, None, None)
            raise
        if whole and key is not None:
            self._tasks = GraphTasks(key, self.way)
            self._noting = recording_tasks(self._tasks, self.device_module, pool.stream)
            self._noting.__enter__()
        return graph

    def _ended(self, recorded: Any) -> None:
        noting, self._noting = self._noting, None
        if noting is not None:
            noting.__exit__(None, None, None)
        try:
            recorded.capture_end()
        finally:
            if recorded.auto_dispatch_capture:
                recorded.graph_dispatch_mode.__exit__(None, None, None)

    def _graph(self, recorded: Any, num_bytes: int) -> AscendGraph:
        tasks, self._tasks = self._tasks, None
        if tasks is not None and tasks.tasks:
            _check_records(recorded, tasks)
            self.store.add(tasks)
        else:
            tasks = None
        graph = AscendGraph(recorded, num_bytes, self._addresses() if self._check else {}, tasks)
        if tasks is not None:
            graph.replay = partial(self._updated, recorded, tasks)
        return graph

    def _give_up(self, pool: Any, recorded: Any) -> None:
        self._tasks = None
        super()._give_up(pool, recorded)

    def weak(self, pool: Any, tensor: Any) -> Any:
        """See `DeviceAdapter.weak`; torch_npu has its own way."""
        del pool
        make = getattr(getattr(self.torch_npu, "_C", None), "_weak_ref_tensor", None)
        if make is None or not isinstance(tensor, torch.Tensor) or tensor.device != self.device:
            return tensor
        return make(tensor)

    def _updated(self, recorded: Any, tasks: GraphTasks) -> None:
        """Replay with the launch's own host arguments."""
        self._updater.replay(recorded, tasks, self.rows, self.current())

    def finish(self, point: Any) -> None:
        """Block the host until an event of the library is done.

        Raises:
            UpdateStallError: it isn't, and graphs that wait for their updates may be why; also in every later call.
        """
        self._finisher()(point)

    def _finisher(self) -> Callable[[Any], None]:
        return partial(_finish, self._updater, self._faults)

    def _synchronise(self) -> None:
        """Wait until nothing runs; a graph that waits for ever is found after the time limit, and let go."""
        for stream in self._updater.streams():
            with suppress(UpdateStallError):
                self.finish(stream)
        super()._synchronise()

    def _check_lost(self) -> None:
        self._updater.check_stall()
        super()._check_lost()

    def discard(self, pool: Any, graphs: Sequence[Any]) -> None:
        owned = self._forget(graphs)
        super().discard(pool, graphs)
        self._updater.forget(owned)

    def release(self, pool: Any) -> None:
        owned = self._forget(pool.graphs)
        super().release(pool)
        self._updater.forget(owned)

    def _forget(self, graphs: Sequence[Any]) -> list[GraphTasks]:
        owned: list[GraphTasks] = [graph.tasks for graph in graphs if graph.tasks is not None]
        self.store.forget([tasks.key for tasks in owned if self.store.get(tasks.key) is tasks])
        return owned

    # Errors

    def capture_error(self, error: CaptureError) -> CaptureError:
        """The error with what to do about it."""
        hint = advice(error) if error.__cause__ is None else advice(error.__cause__)
        return CaptureError(error.reason, f"{error} {hint}") if hint else error

    def with_rows(self, rows: HostRows) -> None:
        """The rows whose host arguments the next replay gets.

        Raises:
            UpdateStallError: an earlier step stalled. A replay after it would wait for ever too, with nobody to signal
                it.
        """
        self._updater.check_stall()
        self.rows = rows


def _finish(updater: Updater, faults: Faults, point: Any) -> None:
    updater.check_stall()
    faults.check_lost()
    updater.finish(point)


def _check_records(recorded: Any, tasks: GraphTasks) -> None:
    """Look whether torch_npu noted as many operators as we did: an update must name each, in order."""
    if tasks.way is not UpdateWay.WHOLE_GRAPH:
        return
    records = getattr(getattr(recorded, "graph_dispatch_mode", None), "graph_dispatch_records", None)
    if records is not None and len(records) != len(tasks.tasks):
        raise CaptureError(
            Reason.HOST_LENGTHS_FROZEN,
            f"{tasks.key}: {len(tasks.tasks)} operators read lengths on the host and torch_npu would rewrite "
            f"{len(records)}; it knows no way for the others. Use update_way='task_groups'.",
        )


def _way(library: Any, way: str | UpdateWay | None) -> UpdateWay:
    """How host arguments are rewritten.

    Raises:
        UnknownNameError: there is no such way.
        ConfigError: this torch_npu doesn't have it.
    """
    here = []
    if all(hasattr(library, name) for name in ("ExternalEvent", "graph_task_group_begin", "graph_task_update_begin")):
        here.append(UpdateWay.TASK_GROUPS)
    if hasattr(library.NPUGraph, "update"):
        here.append(UpdateWay.WHOLE_GRAPH)
    if way is None:
        return here[0] if here else UpdateWay.NONE
    try:
        asked = UpdateWay(way)
    except ValueError:
        raise UnknownNameError("update way", way, map(str, UpdateWay)) from None
    if asked is not UpdateWay.NONE and asked not in here:
        raise ConfigError(
            f"update_way is {str(asked)!r}, and this torch_npu has {', '.join(map(str, here)) or 'none'}; leave it out."
        )
    return asked


def _device(device: Any, library: Any, *, any_type: bool) -> torch.device:
    """The device with its index.

    Raises:
        ConfigError: it isn't there.
    """
    try:
        at = torch.device(device)
        if at.type == "npu" or any_type:
            if not library.is_available():
                raise RuntimeError("torch_npu imports and finds no NPU")
            torch.empty(1, device=at)
            return at if at.type != "npu" or at.index is not None else torch.device("npu", library.current_device())
    # The library has errors of its own.
    except Exception as error:
        raise not_there(device, error) from error
    raise ConfigError(
        f"device is {str(device)!r}; the Ascend adapter takes 'npu' or 'npu:N'. Load a model that is elsewhere "
        "there: kpolicy.load(..., device='npu')."
    )
