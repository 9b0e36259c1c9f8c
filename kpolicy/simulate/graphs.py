"""The executor of a simulation: it captures by the cost table and runs nothing."""

from __future__ import annotations

from typing import Any, NoReturn

from kpolicy.costs import CostTable
from kpolicy.decision import Decision, Launch
from kpolicy.errors import ConfigError
from kpolicy.executors.base import CaptureReport, ProbeReport, ProbeStatus, StepInputs
from kpolicy.executors.runner import ModeRunner
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.shapes import BatchNumbers

__all__ = ["counting_executor"]


class _Counts:
    """A device of which only the costs are known."""

    name = "simulation"

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs

    def probe(self) -> ProbeReport:
        return ProbeReport(self.name, ProbeStatus.USABLE, "counts instead of a device")

    def estimate(self, key: GraphKey) -> CaptureReport:
        usage = self._costs.usage_of(key)
        return CaptureReport(usage.bytes, usage.seconds, usage.streams, usage.graphs)

    def new_pool(self, part: Part, largest: GraphKey) -> object:  # noqa: ARG002 - counts need no memory
        return part

    def capture(self, key: GraphKey, pool: object) -> tuple[object, CaptureReport]:  # noqa: ARG002
        return key, self.estimate(key)

    def replay(self, handle: Any, rows: StepInputs, launch: Launch) -> NoReturn:  # noqa: ARG002
        raise _runs_nothing()

    def eager(self, rows: StepInputs, launch: Launch) -> NoReturn:  # noqa: ARG002
        raise _runs_nothing()

    def ready(self, decision: Decision, numbers: BatchNumbers) -> NoReturn:  # noqa: ARG002
        raise _runs_nothing()

    def release(self, pool: object) -> None:
        pass


def _runs_nothing() -> ConfigError:
    return ConfigError("a simulation's executor runs no step; use executor='simulated' to run some.")


def counting_executor(costs: CostTable) -> ModeRunner:
    """An executor whose captures go through the registry and its budget, as any device's."""
    return ModeRunner(_Counts(costs))
