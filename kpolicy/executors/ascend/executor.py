"""`AscendExecutor`: runs a step model on an Ascend NPU in every mode, within the streams that graphs may take.

Each graph takes streams of the device for as long as it lives, and nothing says how many are left. So a budget is
advice before capture (`stack`), and when a capture says that there are none left the executor knows how many there
were: it gives its graphs back, plans anew what fits with the planner, and captures that. Where that fails too it
plans for less. Serving goes on with whatever there is, eagerly at worst.

Unverified on hardware.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from kpolicy.budget_models import AscendParallel, AscendStack, BudgetModel, ModelShape
from kpolicy.budgets import Budget, Usage
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.errors import ConfigError
from kpolicy.executors.ascend.adapter import AscendAdapter
from kpolicy.executors.ascend.launcher import AscendLauncher
from kpolicy.executors.ascend.replan import Demand, fitting
from kpolicy.executors.ascend.stack import detect_parallel, detect_stack, model_shape, stack_budget
from kpolicy.executors.ascend.updates import TIMEOUT_S, UpdateOrder
from kpolicy.executors.base import CaptureReport
from kpolicy.executors.faults import Fault
from kpolicy.executors.runner import ModeRunner
from kpolicy.executors.step_model import StepModel
from kpolicy.keys import GraphKey
from kpolicy.reasons import Reason
from kpolicy.registry import GraphState

__all__ = ["AscendExecutor", "Replan"]


Progress = Callable[[GraphKey, CaptureReport | None], None]


@attrs.frozen
class Replan:
    """One time that streams ran out and graphs were planned anew.

    Args:
        failed: the key whose capture found none.
        limit: streams that all graphs may take from then on, by the executor's own count.
        kept, dropped: keys by what became of them.
        why: what the device said.
    """

    failed: GraphKey
    limit: int
    kept: tuple[GraphKey, ...]
    dropped: tuple[GraphKey, ...]
    why: str


class AscendExecutor(ModeRunner):
    """A step model on an Ascend NPU. Unverified on hardware.

    Args:
        model: the model, for example of `kpolicy.load`; its tensors are on the device.
        device: the device; the model's own, or the current one.
        max_num_reqs: most rows of a launch that replays; the model's own by default.
        update_order: see `UpdateOrder`.
        update_way: see `UpdateWay`; the first that this torch_npu has by default.
        update_timeout_s: seconds after which a step that doesn't end counts as stalled, and the device as lost.
        budget: what graphs may take: ``"auto"`` for what the stack allows, a `BudgetModel`, or None for no advice: then
            only the device itself says when it is full.
        stack: device and software versions; found out by default.
        shape: what the stream formula reads of the model; found out by default.
        parallel: how the model is spread; one rank by default.
        costs: by which sizes are chosen where not all fit; the analytic table by default.
        demand: which steps there will be, for that choice; sizes are equally likely by default.
        library: torch_npu, or what stands in for it.
        faults, check: as `CudaExecutor` has them.

    Attributes:
        units: the budget, and what one graph takes.
        replans: every time that streams ran out.

    Raises:
        ConfigError: the device isn't there, torch_npu doesn't import, or an argument can't be used.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        device: Any = None,
        max_num_reqs: int | None = None,
        update_order: str | UpdateOrder = UpdateOrder.REPLAY_FENCED,
        update_way: str | None = None,
        update_timeout_s: float = TIMEOUT_S,
        budget: BudgetModel | str | None = "auto",
        stack: AscendStack | None = None,
        shape: ModelShape | None = None,
        parallel: AscendParallel | None = None,
        costs: CostTable | None = None,
        demand: Demand | None = None,
        library: Any = None,
        faults: Iterable[Fault | str] = (),
        check: bool = False,
    ) -> None:
        at = getattr(model, "device", "npu") if device is None else device
        self.adapter = AscendAdapter(
            at, library=library, update_order=update_order, update_way=update_way,
            update_timeout_s=update_timeout_s, check=check, statics=getattr(model, "static_tensors", None),
            faults=faults,
        )  # fmt: skip
        self.model = model
        self.replans: list[Replan] = []
        self._costs = costs
        self._demand = demand
        self._limit: int | None = None
        self._auto = budget == "auto"
        if isinstance(budget, str) and not self._auto:
            raise ConfigError(f"budget is {budget!r}; give 'auto', a BudgetModel, or None.")
        self._stack = detect_stack(self.adapter.torch_npu, self.adapter.device) if stack is None else stack
        self._shape = model_shape(model) if shape is None else shape
        self._parallel = detect_parallel(os.environ) if parallel is None else parallel
        if isinstance(budget, BudgetModel):
            self.units = budget
        else:
            self.units = self._advice(0)
        super().__init__(AscendLauncher(self.adapter, model, max_num_reqs=max_num_reqs, units=self.units))

    @property
    def stack(self) -> AscendStack:
        """What is taken to be under the process."""
        return self._stack

    def _advice(self, num_sizes: int) -> BudgetModel:
        """What the stack allows; unbounded, with its prices, where no advice was asked for."""
        found = stack_budget(self._stack, self._shape, self._parallel, num_sizes)
        return found if self._auto else attrs.evolve(found, budget=Budget(), num_sizes=None)

    def capture(self, keys: Iterable[GraphKey], progress: Progress | None = None) -> None:
        """Capture keys, largest first, as far as the device holds them; see `ModeRunner.capture`.

        Keys that the budget has no room for are withdrawn. Where the device has less room than that, graphs are given
        back, and the best that fit are captured; progress is told of those again.

        Raises:
            RegistryError: a key is captured already.
            StickyDeviceError: the device is lost.
        """
        asked = list(keys)
        held = [key for key in self._handles if self._live(key)]
        wanted = list(dict.fromkeys([*held, *asked]))
        if self._auto:
            self.units = self._advice(len({key.num_tokens for key in wanted}))
            self._launcher.units = self.units
        kept = self._fitting(wanted, self._room)
        self._withdraw([key for key in asked if key not in kept and key not in held], progress)
        failed = self._capture_until([key for key in asked if key in kept], progress, self._found_no_streams)
        while failed is not None:
            failed = self._replanned(failed, wanted, progress)
        self._end_capture(len(asked))

    @property
    def _launcher(self) -> AscendLauncher:
        launcher = self.launcher
        assert isinstance(launcher, AscendLauncher)  # noqa: S101 - made here
        return launcher

    @property
    def _room(self) -> Budget:
        """The budget, with what the device was found to have."""
        budget = self.units.budget
        if self._limit is None:
            return budget
        most = self._limit if budget.streams is None else min(self._limit, budget.streams)
        return attrs.evolve(budget, streams=most)

    def _fitting(self, keys: Sequence[GraphKey], room: Budget) -> frozenset[GraphKey]:
        unique = list(dict.fromkeys(keys))
        used = sum((self.units.cost_of(key) for key in unique), Usage())
        unlimited = room.refuses(Usage(), used) is None and self.units.num_sizes is None
        if unlimited:
            return frozenset(unique)
        return frozenset(fitting(unique, room, self.units, self._costs or analytic_costs(), self._demand))

    def _live(self, key: GraphKey) -> bool:
        return self.registry.record(key).state is GraphState.CAPTURED

    def _withdraw(self, keys: Sequence[GraphKey], progress: Progress | None, reason: Reason | None = None) -> None:
        registry = self.registry
        registry.plan(keys)
        for key in keys:
            registry.withdraw(key, Reason.BUDGET_STREAMS if reason is None else reason)
            self.capture_errors[key] = f"{key} isn't among the sizes kept under {self._room} ({self.units.source})"
            if progress is not None:
                progress(key, None)

    def _found_no_streams(self, key: GraphKey) -> bool:
        record = self.registry.record(key)
        return record.state is GraphState.FAILED and record.reason is Reason.CAPTURE_OUT_OF_STREAMS

    def _replanned(self, failed: GraphKey, keys: Sequence[GraphKey], progress: Progress | None) -> GraphKey | None:
        """Give all graphs back, plan what fits, and capture that; the next key that finds no streams."""
        # Withdrawn graphs keep theirs until their pool goes.
        ours = {pool.name for pool in self._pools}
        used = sum(pool.held.streams for pool in self.registry.pools() if pool.name in ours)
        if self._limit is not None:
            # Each round plans for less, so the rounds end.
            used = min(used, self._limit - max(1, self._limit // 8))
        self._limit = max(0, used)
        self._release_pools()
        able = [key for key in dict.fromkeys(keys) if self._may_succeed(key)]
        chosen = self._fitting(able, self._room)
        kept, dropped = [key for key in able if key in chosen], [key for key in able if key not in chosen]
        why = self.capture_errors.get(failed, "")
        self.replans.append(Replan(failed, self._limit, tuple(kept), tuple(dropped), why))
        self._withdraw(dropped, progress, Reason.CAPTURE_OUT_OF_STREAMS)
        return self._capture_until(kept, progress, self._found_no_streams)

    def _may_succeed(self, key: GraphKey) -> bool:
        """Whether a key hasn't failed for a reason of its own."""
        record = self.registry.record(key)
        return record.state is not GraphState.FAILED or record.reason is Reason.CAPTURE_OUT_OF_STREAMS
