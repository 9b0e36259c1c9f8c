"""`AscendLauncher`: `GraphLauncher` that also hands each launch's lengths to what reads them on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kpolicy.budget_models import BudgetModel
from kpolicy.decision import Launch
from kpolicy.errors import CaptureError
from kpolicy.executors.ascend.adapter import AscendAdapter
from kpolicy.executors.ascend.lengths import HostRows, running_rows
from kpolicy.executors.base import CaptureReport, StepInputs
from kpolicy.executors.buffers import StepBuffers
from kpolicy.executors.launch_rows import LaunchRows
from kpolicy.executors.launcher import GraphLauncher, LauncherPool
from kpolicy.executors.parts import Program
from kpolicy.executors.runner import PartOutputs
from kpolicy.executors.segments import FullGraph, PieceGraph
from kpolicy.executors.step_model import StepModel
from kpolicy.keys import GraphKey

__all__ = ["AscendLauncher"]


class _WithRows:
    """A program whose attention knows the launch's rows, decode step by decode step.

    Args:
        program: what computes the logits.
        adapter: gets the rows before each replay.
        rows: those of the first decode step.
        done: decode steps that were computed: shared with what stands in for a graph that fails.
    """

    def __init__(self, program: Program, adapter: AscendAdapter, rows: HostRows, done: list[int]) -> None:
        self._program = program
        self._adapter = adapter
        self._rows = rows
        self._done = done

    @property
    def buffers(self) -> StepBuffers:
        return self._program.buffers

    def logits(self, rows: LaunchRows, lasting: bool) -> Any:
        now = self._rows.ahead(self._done[0])
        self._adapter.with_rows(now)
        with running_rows(now):
            logits = self._program.logits(rows, lasting)
        self._done[0] += 1
        return logits


class AscendLauncher(GraphLauncher):
    """Captures and launches a step model on an Ascend NPU.

    Args:
        adapter: the device.
        model: the model.
        max_num_reqs: most rows of a launch that replays; the model's own where None.
        units: what graphs take of the device, for estimates and for the registry's books.
    """

    adapter: AscendAdapter

    def __init__(
        self, adapter: AscendAdapter, model: StepModel, *, max_num_reqs: int | None, units: BudgetModel
    ) -> None:  # fmt: skip
        super().__init__(adapter, model, max_num_reqs=max_num_reqs)
        self.units = units
        # A replay's lengths are handed to the adapter before it; another launch's in between would be taken for them.
        self.spreads = False

    def estimate(self, key: GraphKey) -> CaptureReport:
        cost = self.units.cost_of(key)
        return super().estimate(key)._replace(streams=cost.streams, graphs=cost.graphs)

    def capture(self, key: GraphKey, pool: LauncherPool) -> tuple[FullGraph | PieceGraph, CaptureReport]:
        try:
            with self.adapter.capturing(key):
                handle, report = super().capture(key, pool)
        except CaptureError as error:
            raise self.adapter.capture_error(error) from error
        return handle, report._replace(streams=self.units.cost_of(key).streams)

    def _launch(
        self, program: Program, rows: StepInputs, live: LaunchRows, launch: Launch, sampled: bool,
        fallback: Callable[[], Program] | None,
    ) -> PartOutputs:  # fmt: skip
        host, done = HostRows(rows.query_lens, rows.kv_lens), [0]
        stand_in = None
        if fallback is not None:
            made = fallback
            stand_in = lambda: _WithRows(made(), self.adapter, host, done)  # noqa: E731
        return super()._launch(_WithRows(program, self.adapter, host, done), rows, live, launch, sampled, stand_in)
