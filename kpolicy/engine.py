"""`Engine`: the front door. It decides, explains, and with an executor captures and steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Real
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import attrs

from kpolicy.attention.support import AttentionSupport, Claims, parse_attention
from kpolicy.budgets import Budget
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.decision import Decision
from kpolicy.errors import (
    ConfigError,
    GraphReplayError,
    ProfileError,
    ShapeError,
    StickyDeviceError,
    SupportError,
    check_kind,
)
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode
from kpolicy.observe import Stats
from kpolicy.policies import CompiledPolicy, Downgrade, Policy, PolicyContext, get_policy
from kpolicy.reasons import Basis
from kpolicy.registry import GraphRegistry
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchNumbers, BatchShape, plain_int

if TYPE_CHECKING:
    from kpolicy.corrections import Correction
    from kpolicy.executors.base import CaptureReport, Executor, ReadyEvent, StepInputs, StepOutputs
    from kpolicy.executors.lazy import LazyCapture
    from kpolicy.executors.step_model import StepModel
    from kpolicy.explain import Explanation
    from kpolicy.observe.events import Events

__all__ = ["Communicator", "Engine"]

T = TypeVar("T")
_Running: TypeAlias = "tuple[Sequence[ReadyEvent], StepOutputs | Decision, Decision, Decision, BatchNumbers]"
"""A step under way, as `Engine._count` takes it: when it is over, what ran, what ran last was decided, and first"""

_Path: TypeAlias = "tuple[int, GraphRegistry, Callable[..., Decision], Executor | None, bool]"

MOST_RUNNING = 64
"""Steps that may be under way and uncounted at once"""
LOOK_EVERY = 512
"""Steps between looks at where weights and KV lie, at least: one takes about half a millisecond"""
COUNT_EVERY = 16
"""Steps that are counted together, while the device is at work on the last one: one after the other the processor
fetches what counting takes from memory each time, and that takes longer than counting"""


class Communicator(Protocol):
    """What ranks need of each other. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, text: str) -> str:
        """What rank 0 gave."""
        ...

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over ranks. Values fit 64 bits."""
        ...


class Engine:
    """Decides how each batch runs, and runs it.

    Without an executor it can always decide and explain: it takes the planned ladder as captured and the attention
    support as stated, and its decisions say so.

    Args:
        policy: a policy or its name; see `kpolicy.policies.get_policy`.
        attention: what attention supports: support, claims, or text such as ``"mla"`` or ``"gdn+gqa"``; by default the
            model's own support, or ``"gqa"`` without a model. Beside a model it can only take support away.
        ladder: capture sizes; one list for all graphs, or `CaptureSizes`. The policy's own by default.
        settings: the deployment's limits.
        costs: what launches take; the analytic table by default. A measured one that says where and with which model
            must be of the device and the model that the executor says it runs, and of one that isn't split over several
            devices.
        objective: ``"throughput"``, ``"latency"``, weights, or an `Objective`.
        executor: an executor or its name; None decides only.
        model: a step model to run, for example of `kpolicy.load`.
        device: what runs the model, as `kpolicy.load` takes it: the executor's name, or torch's, also of one of several
            (``"cuda:1"``), which the model has to be on; ``"auto"``, the default, is the first executor that can where
            the model's tensors are, vendors before CUDA.
        registry: the record of captured graphs, to share with other Engines, so that nothing is captured twice. Each
            decides among the graphs of its own policy and ladder, whatever others captured.
        budget: what captured graphs may take, where no registry is given.
        communicator: the other ranks; None is one rank.
        strict: a downgrade that attention forces on the policy is an error.
        lazy: capture graphs when a step first needs them, instead of all at `capture`. With a number, that many seconds
            a step may go to it, saved up over steps until the next capture fits; True leaves it to `capture_pending`.
        correct: hold measured costs to the steps that run, and mend them where one mode is off; see
            `kpolicy.corrections`. Off with several ranks, whose tables must be equal.
        calibrate: seconds that the first `capture` may take to measure what launches of the model take on the device,
            where the policy reads costs and none were given; 0 leaves the analytic table. A lazy Engine measures in
            slices of the time that it has for capture.

    Attributes:
        passed_over: with ``device="auto"``, the executors that couldn't be had, by name, and why.
        calibration_error: why there are no costs that `capture` measured, or why several ranks don't decide by them;
            empty where it did or wasn't to.

    Raises:
        ConfigError: an argument can't be used; subclasses say which.
        BudgetRefused: the ladder has more graphs than the budget admits.
        ProfileError: the costs were measured on another device, with another model, or with one that was split.
        RankError: of several ranks, one was started otherwise, or runs on another device or another model than rank
            0's costs are of.
    """

    def __init__(
        self,
        policy: str | Policy = "auto",
        *,
        attention: str | AttentionSupport | Claims | None = None,
        ladder: CaptureSizes | Sequence[int] | None = None,
        settings: Settings | None = None,
        costs: CostTable | None = None,
        objective: str | Objective = "throughput",
        executor: str | Executor | None = None,
        model: StepModel | None = None,
        device: str | None = None,
        registry: GraphRegistry | None = None,
        budget: Budget | None = None,
        communicator: Communicator | None = None,
        strict: bool = False,
        lazy: bool | float = False,
        calibrate: float = 1.0,
        correct: bool = True,
    ) -> None:
        _check_kinds(settings=settings, costs=costs, registry=registry, budget=budget)
        _check_kinds(optional=False, strict=strict, correct=correct)
        self.policy = get_policy(policy)
        self.settings = settings or _settings_of(model)
        self._objective = Objective.parse(objective)
        self._costs = costs or analytic_costs()
        self.calibration_error = ""
        self._correct = correct and self.policy.reads_costs
        self._correction: Correction | None = None
        self._corrected: CostTable | None = None
        self._measured: CostTable | None = None
        """What `capture` measured"""
        calibrate_s = _seconds("calibrate", calibrate)
        self._calibrate_s = calibrate_s if costs is None and self.policy.reads_costs else 0.0
        self.sizes = self._sizes(ladder)
        self._stats = Stats()
        if budget is not None and registry is not None:
            raise ConfigError(
                "a registry was given, and it has its own budget; give the budget to the registry instead."
            )
        self.registry = GraphRegistry(budget) if registry is None else registry
        self.passed_over: dict[str, str] = {}
        self.executor = self._opened(executor, model, device)
        self._communicator = _of_several(communicator)
        if costs is not None and self._communicator is None:
            # Several ranks hear of it together, in `sync`: none waits for one that has raised.
            _check_measured(costs, self.executor)
        self._runs_behind = bool(getattr(self.executor, "runs_behind", False))
        # An executor may have found out more about the model's attention than the model claims.
        self.support = _support_of(attention, None if model is None else getattr(self.executor, "model", model))
        self.downgrades = self._resolve(strict)
        self.keys = self.policy.plan(self.sizes, self.support.claims, self.settings)
        self._planned = frozenset(self.keys)
        if budget is not None:
            # Without an executor nothing is captured as far as it goes: all that is planned is taken as captured.
            self._check_budget(budget, whole=ladder is not None or (executor is None and model is None))
        self.registry.plan(self.keys)
        self._lost: StickyDeviceError | None = None
        self._events: Events | None = None
        self._synced_version = -1
        # What a step goes by where it has nobody to ask: the registry's version that it holds for, the registry, how to
        # decide, the executor, whether that runs behind the host. One look instead of one at each of them.
        self._no_path: _Path = (-1, self.registry, _undecided, None, False)
        self._path: _Path = self._no_path
        self._compiled: CompiledPolicy | None = None
        self._compiled_version = -1
        self._running: deque[_Running] = deque()
        self._several = False
        """Whether the last step had a launch beside another"""
        self._since_look = 0
        """Steps that were counted since addresses were looked at"""
        self._counting = RLock()
        """Held while steps are counted: whoever reads `stats` may do so on another thread"""
        self._lazy = self._lazy_capture(lazy)
        if self._communicator is not None:
            self.sync()

    def _lazy_capture(self, lazy: bool | float) -> LazyCapture | None:
        if lazy is False:
            return None
        from kpolicy.executors.lazy import LazyCapture

        ranks = 1 if self._communicator is None else self._communicator.world_size
        measures = bool(self._calibrate_s) and self.executor is not None and self._can_measure()
        if self._calibrate_s and not measures:
            self.calibration_error = _UNMEASURED
        allowance_s = 0.0 if lazy is True else _seconds("lazy", lazy)
        return LazyCapture(self, allowance_s, num_ranks=ranks, measures=measures)

    def _can_measure(self) -> bool:
        from kpolicy.executors.calibrate import can_measure

        return can_measure(self.executor)

    @property
    def objective(self) -> Objective:
        """What `auto` minimises."""
        return self._objective

    @property
    def costs(self) -> CostTable:
        """The table that is decided by; `take_costs` takes another one."""
        return self._costs

    def take_costs(self, costs: CostTable) -> None:
        """Decide by that table from now on. Of several ranks all go on by rank 0's, and agree anew before they decide.

        Raises:
            ProfileError: it was measured on another device, with another model, or with one that was split.
        """
        _check_kinds(optional=False, costs=costs)
        _check_measured(costs, self.executor)
        # In this order: see `_prepared`.
        self._costs = costs
        self._compiled, self._path = None, self._no_path
        self._synced_version = -1

    def _check_budget(self, budget: Budget, *, whole: bool) -> None:
        """A ladder that is wanted whole and is above the budget is an error; others are captured as far as they go."""
        if whole:
            from kpolicy.budgets import check_ladder

            check_ladder(self.keys, budget, self.costs.usage_of)

    def _opened(self, executor: str | Executor | None, model: StepModel | None, device: str | None) -> Executor | None:
        """The executor, open with the registry; None for an Engine that only decides.

        Raises:
            ConfigError: an executor was given beside a model or a device, or a device without a model.
        """
        if executor is None and model is None and device is None:
            return None
        # Imported here: an Engine that only decides needs none of it.
        from kpolicy.executors import get_executor
        from kpolicy.executors.of_device import executor_on

        if model is not None and executor is None:
            most = self.settings.max_num_reqs
            opened, self.passed_over = executor_on(model, device, self.settings, max_num_reqs=most)
        elif executor is not None and model is None and device is None:
            opened = get_executor(executor)
        else:
            raise ConfigError(
                "give model= with device=, which make an executor, or executor= alone: "
                f"model is {'missing' if model is None else 'given'}, device is {device!r}, executor {executor!r}."
            )
        opened.open(self.registry)
        return opened

    def _sizes(self, ladder: CaptureSizes | Sequence[int] | None) -> CaptureSizes:
        if ladder is None:
            return self.policy.sizes(self.settings)
        return ladder if isinstance(ladder, CaptureSizes) else CaptureSizes.of(ladder, self.settings)

    def _resolve(self, strict: bool) -> tuple[Downgrade, ...]:
        downgrades = self.policy.resolve(self.support.claims, self.settings)
        if downgrades and strict:
            listed = "; ".join(str(downgrade) for downgrade in downgrades)
            limits = "; ".join(self.support.limits)
            raise SupportError(
                f"strict: policy {self.policy.name!r} can't have what it asks for: {listed}. "
                f"Limited by: {limits or self.support}. "
                "Choose a policy that attention allows, another attention backend, or leave strict off."
            )
        return downgrades

    @property
    def events(self) -> Events:
        """What happens to graphs and to the device, for those who subscribe; see `kpolicy.observe.events`."""
        if self._events is None:
            # Imported here: an Engine that nobody watches needs none of it.
            from kpolicy.observe.events import Events

            self._events = Events(self.registry, self.policy.name, self.downgrades)
        return self._events

    # Deciding

    @property
    def context(self) -> PolicyContext:
        """What the policy reads now: support, captured keys, costs."""
        basis = self.costs.basis
        if self.executor is None:
            basis |= Basis.LADDER_ASSUMED | Basis.SUPPORT_ASSUMED
        return PolicyContext(
            claims=self.support.claims,
            ladder=self._ladder(),
            costs=self.costs,
            settings=self.settings,
            objective=self.objective,
            basis=basis,
            # Optional for an executor: one that doesn't say does as it is told, as the simulated one.
            spreads=getattr(self.executor, "spreads", True),
        )

    def _ladder(self) -> CaptureLadder:
        """Keys that may be replayed: this Engine's own, captured, by its executor where others share the registry."""
        view = self.registry.view(assumed=self.executor is None).only(self._planned)
        held = getattr(self.executor, "captured", None)
        if held is None or all(key in held for key in view.keys):
            return view
        keys = [key for key in view.keys if key in held]
        return CaptureLadder(keys, version=view.version, withdrawn=view.withdrawn)

    @property
    def compiled(self) -> CompiledPolicy:
        """The policy prepared for the graphs captured now; prepared anew when the registry changes."""
        compiled = self._compiled
        return self._prepared() if compiled is None or self.registry.version != self._compiled_version else compiled

    def _prepared(self) -> CompiledPolicy:
        """The policy, prepared; once more where the thread that reads `stats` took other costs meanwhile."""
        while True:
            version, costs = self.registry.version, self._costs
            compiled = self._compiled = self.policy.compile(self.context)
            self._compiled_version = version
            self._stats.recompiles += 1
            if costs is self._costs:
                return compiled

    @property
    def select(self) -> Callable[..., Decision]:
        """The per-batch path: plain numbers (see `BatchNumbers`) to a prepared decision. One rank, nothing counted."""
        return self.compiled.select

    def decide(self, shape: BatchShape) -> Decision:
        """How the batch runs. With several ranks every rank must call it, and they agree first.

        Raises:
            NoLegalModeError: every mode that could run the batch is forbidden.
            ShapeError: it isn't a `BatchShape`.
            StickyDeviceError: the device was lost earlier.
        """
        numbers = _shape(shape).numbers
        decision = self._decide(numbers)
        self._stats.add(decision, numbers)
        return decision

    def _decide(self, numbers: BatchNumbers) -> Decision:
        if self._lost is not None:
            raise self._lost
        if self._communicator is None:
            return self.compiled.select(*numbers)
        compiled = self.compiled
        changed = int(self.registry.version != self._synced_version)
        unsynced, *reduced = self._communicator.all_reduce_max((changed, *compiled.vote(numbers)))
        if unsynced:
            # A rank lost or gained a graph since ranks were equal: all agree on what is there before anyone decides.
            self.sync()
            compiled = self.compiled
            reduced = self._communicator.all_reduce_max(compiled.vote(numbers))
        return compiled.agree(reduced, numbers)

    def explain(self, shape: BatchShape) -> Explanation:
        """All ways to run the batch, what each would cost, and why each lost. This rank alone; nothing is counted."""
        from kpolicy.explain import explain

        return explain(self.policy, _shape(shape), self.context)

    # Ranks

    def sync(self) -> None:
        """Make ranks equal: rank 0's costs for all, and only graphs that every rank has. Called by every rank.

        Raises:
            RankError: ranks have other policies, settings or planned graphs, or another device or model than the costs
                that rank 0 was given are of.
        """
        if self._communicator is not None:
            from kpolicy.agreement import synchronise

            own = self._measured is not None and self.costs == self._measured
            self._costs, why = synchronise(self, self._communicator, own=own)
            self.calibration_error = why or self.calibration_error
            self._compiled, self._path = None, self._no_path
            self._synced_version = self.registry.version

    # Running

    def capture(self, progress: Callable[[GraphKey, CaptureReport | None], None] | None = None) -> None:
        """Capture every graph of the policy that isn't captured, largest first, those that failed before included.

        A graph that can't be had is in the registry with its reason.

        Raises:
            ConfigError: the Engine has no executor.
            StickyDeviceError: the device is lost.
        """
        executor = self._need_executor("capture")
        try:
            captured = set(self.registry.captured())
            executor.capture([key for key in self.keys if key not in captured], progress)
        except StickyDeviceError as error:
            self._lose(error)
            raise
        if self._calibrate_s:
            self._measure()
        self.sync()
        if self._events is not None:
            self._events.capture_finished()

    def _measure(self) -> None:
        """Replace the analytic costs by measured ones, once, where the executor and its model can be measured."""
        from kpolicy.executors.calibrate import measure

        if not self._can_measure():
            self.calibration_error = _UNMEASURED
            return
        allowance_s, self._calibrate_s = self._calibrate_s, 0.0
        try:
            self._measured = measure(self.executor, self.registry, self.settings, allowance_s=allowance_s)
            self.take_costs(self._measured)
            if self._lazy is not None:
                self._lazy.all_measured()
        except StickyDeviceError as error:
            self._lose(error)
            raise
        # Without times of its own the Engine decides by the analytic table, as it would without a model.
        except Exception as error:  # noqa: BLE001 - whatever a launch of the model raised
            self.calibration_error = f"{type(error).__name__}: {error}"

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Decide and run one step.

        A graph that fails before it is launched is withdrawn, and the step is decided again without it: a failure
        costs speed, never a request. Where launches run behind the host, the step returns when they are launched, and
        what it took is counted when it is over: at one of the next `COUNT_EVERY` steps, or when `stats` is read. Until
        then the registry's `hits` lack it too. Steps that weren't counted when the device is lost may never be.

        Raises:
            ConfigError: the Engine has no executor, or the inputs don't fit each other.
            IndexError: the inputs name a token, slot or row that isn't there, and the host computes; it costs no graph.
            StickyDeviceError: the device is lost; the step's requests are the caller's again.
        """
        if self._several:
            # It may have lost a graph beside, which this step mustn't be given.
            self._several = False
            self._settle(every=False)
        version, registry, select, executor, behind = self._path
        # The inputs' numbers; by place, which takes less than by name, as with `ready` below.
        numbers = inputs[0]
        if version == registry.version and executor is not None:
            decision = wanted = select(*numbers)
        else:
            executor, behind = self._need_executor("step"), self._runs_behind
            decision = wanted = self._decided(executor, numbers)
        try:
            outputs = executor.run(decision, inputs)
        except GraphReplayError as failure:
            decision, outputs = self._run_without(failure, decision, executor, inputs)
        except StickyDeviceError as error:
            self._lose(error)
            raise
        ready = outputs[3]
        # Of several launches one may fail behind the host, so what ran is known when they are over. Nothing else of a
        # step is kept here: its outputs are memory.
        found: StepOutputs | Decision
        if len(ready) > 1:
            self._several, found = True, outputs
        else:
            found = outputs.decision
        # Asking a device that runs behind the host takes longer than to note the step, and it isn't over.
        if not behind and self._all_done(ready):
            with self._counting:
                self._count(ready, found, decision, wanted, numbers)
        else:
            running = self._running
            running.append((ready, found, decision, wanted, numbers))
            if not len(running) % COUNT_EVERY:
                # Earlier ones are counted here, while the device is at work; not where another thread is at it.
                self._settle(every=False, but=1, waits=False)
        if self._since_look >= LOOK_EVERY:
            self._look(executor)
        return outputs

    def _run_without(
        self, failure: GraphReplayError, wanted: Decision, executor: Executor, inputs: StepInputs
    ) -> tuple[Decision, StepOutputs]:
        """Run a step whose graph failed before its launch: what was decided instead, and its outputs."""
        decision = wanted
        while True:
            if failure.key not in decision.keys:
                # Withdrawing it would change nothing, and the step would fail like this for ever.
                raise failure
            maybe_inputs = failure.maybe_inputs
            if maybe_inputs:
                # Without the graph alone, before it goes: such inputs fail in every graph, and would cost them all.
                decision = _same_work(failure, decision)
            else:
                decision = self._without(failure, decision, inputs.numbers)
            try:
                outputs = executor.run(decision, inputs)
                if maybe_inputs:
                    self._withdraw(failure)
                break
            except GraphReplayError as again:
                failure = again
            except StickyDeviceError as error:
                self._lose(error)
                raise
        if self._events is not None:
            self._events.replay_failed(wanted, decision)
        return decision, outputs

    def _look(self, executor: Executor) -> None:
        """Look whether what graphs read by address is still there; where steps run behind the host, meanwhile."""
        self._since_look = 0
        # Optional for an executor; whether it withdrew graphs.
        look: Callable[[], bool] | None = getattr(executor, "look", None)
        if look is not None and look() and self._events is not None:
            self._events.graphs_withdrawn()

    def _decided(self, executor: Executor, numbers: BatchNumbers) -> Decision:
        """`_decide` for a step; later steps take the path that this one found, until something changes."""
        lazy = self._lazy
        if lazy is not None:
            self._with_device(lambda lazy: lazy.before_step(numbers))
        decision = self._decide(numbers)
        if lazy is None and self._communicator is None:
            compiled = self.compiled
            self._path = self._compiled_version, self.registry, compiled.select, executor, self._runs_behind
            if self._compiled is not compiled:
                # Other costs were taken meanwhile, on the thread of whoever reads `stats`.
                self._path = self._no_path
        return decision

    def _count(
        self, ready: Sequence[ReadyEvent], found: StepOutputs | Decision, decision: Decision, wanted: Decision,
        numbers: BatchNumbers,
    ) -> None:  # fmt: skip
        """Count a step that is over."""
        ran = found if isinstance(found, Decision) else found.decision
        if ran is not decision:
            self._stats.replay_failures += 1
            if self._events is not None:
                self._events.replay_failed(wanted, ran)
        cycle_us = ready[0].us if len(ready) == 1 else max((event.us for event in ready), default=0.0)
        self._stats.add(ran, numbers, cycle_us)
        self._since_look += 1
        if self._correct and self._communicator is None:
            self._hold_costs(ran, numbers, cycle_us)
        for launch in ran.launches:
            if launch.key is not None:
                self.registry.hit(launch.key, launch.repeat)

    def _hold_costs(self, ran: Decision, numbers: BatchNumbers, cycle_us: float) -> None:
        """Hold measured costs to a step that is over."""
        costs = self._costs
        if costs is not self._corrected:
            # Costs that are new here: those that were given, or measured anew.
            from kpolicy.corrections import Correction

            self._correction = Correction(costs) if costs.measured else None
            self._corrected = costs
        if self._correction is not None:
            corrected = self._correction.add(ran, numbers, cycle_us)
            if corrected is not None:
                self._corrected = corrected
                self.take_costs(corrected)

    def _settle(self, *, every: bool = True, but: int = 0, waits: bool = True) -> None:
        """Wait for steps that run behind the host, and count them.

        Args:
            every: all of them. Otherwise those that are done, those with a launch beside another, which may have lost a
                graph, and the oldest where there are many.
            but: so many of the last ones are left.
            waits: for another thread that counts; otherwise they are left to it.

        Raises:
            StickyDeviceError: the device was lost in one of them.
        """
        if not self._counting.acquire(blocking=waits):
            return
        try:
            self._count_running(every=every, but=but)
        finally:
            self._counting.release()

    def _count_running(self, *, every: bool, but: int) -> None:
        """`_settle`, on the one thread that counts."""
        running = self._running
        try:
            # Steps follow each other on the device, so one that is over says it of all before.
            over = not every and len(running) > but and self._runs_behind and self._all_done(running[-1 - but][0])
            while len(running) > but:
                ready, found, _, wanted, _ = running[0]
                if over and found is wanted:
                    self._count_alike(wanted, but)
                    continue
                asks = not (every or over) and len(ready) == 1 and len(running) < MOST_RUNNING
                if asks and not self._all_done(ready):
                    return
                step = running.popleft()
                try:
                    for event in ready:
                        event.wait()
                except StickyDeviceError:
                    raise
                except Exception:  # noqa: BLE001, S112 - the model's own error: who reads that step's outputs gets it
                    continue
                self._count(*step)
        except StickyDeviceError as error:
            running.clear()
            self._lose(error)
            raise

    def _count_alike(self, decision: Decision, but: int) -> None:
        """Count the steps in front that ran that decision as it was wanted, all of which are over.

        Args:
            decision: what they ran.
            but: so many of the last steps are left.
        """
        running, steps = self._running, list[tuple[BatchNumbers, float]]()
        try:
            while len(running) > but and running[0][1] is decision and running[0][3] is decision:
                ready, _, _, _, numbers = running.popleft()
                steps.append((numbers, ready[0].us if ready else 0.0))
        finally:
            # Those that are known to be over count, whatever the next one says.
            self._stats.add_all(decision, steps)
            self._since_look += len(steps)
            for launch in decision.launches:
                if launch.key is not None:
                    self.registry.hit(launch.key, launch.repeat * len(steps))
        if (
            self._correct
            and self._communicator is None
            and (self._costs.measured or self._costs is not self._corrected)
        ):
            for numbers, us in steps:
                self._hold_costs(decision, numbers, us)

    def _all_done(self, ready: Sequence[ReadyEvent]) -> bool:
        try:
            return ready[0].done() if len(ready) == 1 else all(map(_done, ready))
        except StickyDeviceError as error:
            self._lose(error)
            raise

    @property
    def stats(self) -> Stats:
        """What was decided and ran so far. Waits for a step that runs behind the host."""
        if self._running:
            with suppress(StickyDeviceError):
                self._settle()
        return self._stats

    def capture_pending(self, seconds: float) -> int:
        """Capture graphs that steps needed and that aren't there yet, most needed first. For between steps.

        Args:
            seconds: the most to spend. A graph whose expected time is over what is left waits for a later call, which
                has its own seconds and what earlier ones left over.

        Returns:
            How many graphs were captured.

        Raises:
            ConfigError: the Engine isn't lazy, or the seconds can't be spent.
            StickyDeviceError: the device is lost.
        """
        self._need_executor("capture")
        if self._lazy is None:
            raise ConfigError(
                "this Engine captures all graphs at once; make it with lazy=True to capture them by need."
            )
        allowance_s = _seconds("seconds", seconds)
        self._settle()
        return self._with_device(lambda lazy: lazy.capture(allowance_s))

    @property
    def lazy_pending(self) -> bool:
        """Whether a lazy Engine still has graphs to capture that were needed often enough, or to measure."""
        return self._lazy is not None and self._lazy.pending

    def _with_device(self, work: Callable[[LazyCapture], T]) -> T:
        """Work that a lost device ends."""
        assert self._lazy is not None  # noqa: S101 - both callers looked
        try:
            return work(self._lazy)
        except StickyDeviceError as error:
            self._lose(error)
            raise

    def _lose(self, error: StickyDeviceError) -> None:
        """The device is lost: every later call raises that error."""
        first = self._lost is None
        self._lost, self._path = error, self._no_path
        if first and self._events is not None:
            self._events.device_lost(error)

    def _without(self, failure: GraphReplayError, decision: Decision, numbers: BatchNumbers) -> Decision:
        """The decision after a graph failed before its launch."""
        self._withdraw(failure)
        # The other ranks replay now, so this one runs the same padded work.
        return self.compiled.select(*numbers) if self._communicator is None else _same_work(failure, decision)

    def _withdraw(self, failure: GraphReplayError) -> None:
        self.registry.withdraw(failure.key, failure.reason)
        self._stats.replay_failures += 1

    def _need_executor(self, what: str) -> Executor:
        if self._lost is not None:
            raise self._lost
        if self.executor is None:
            raise ConfigError(
                f"this Engine only decides; give it an executor to {what}, for example executor='simulated'."
            )
        return self.executor

    def release(self) -> None:
        """Give back every graph and buffer, also where the device was lost in the step that still ran."""
        try:
            if self._lost is None:
                self._settle()
        except StickyDeviceError:
            pass  # `_settle` has noted it, and every later step says so.
        finally:
            if self._lazy is not None:
                self._lazy.end()
            if self.executor is not None:
                self.executor.release()


_UNMEASURED = (
    "nothing to measure: it takes an executor over a device's primitives, and a model that says vocab, pad_slot, "
    "num_blocks, block_size and max_model_len"
)


def _same_work(failure: GraphReplayError, decision: Decision) -> Decision:
    """The decision's padded work, launch by launch, without the graph that failed."""
    key, reason = failure.key, failure.reason
    launches = tuple(
        attrs.evolve(launch, key=None, padded_tokens=key.num_tokens, reason=reason) if launch.key == key else launch
        for launch in decision.launches
    )
    mode = decision.mode if len(launches) > 1 else Mode.EAGER
    return attrs.evolve(decision, mode=mode, launches=launches, reason=reason)


def _undecided(*_numbers: Any) -> Decision:
    raise AssertionError("a path of no version was taken")


def _check_measured(costs: CostTable, executor: Executor | None) -> None:
    """Refuse costs of another device or model than the executor's, where both say which, or of one split otherwise."""
    if not costs.measured:
        return
    from kpolicy.agreement import running

    for differs, unsaid in zip(costs.unlike(running(executor)), _UNSAID, strict=True):
        if differs:
            raise ProfileError(
                f"costs {costs.version!r} were {differs}. Leave costs out to measure at capture, or run kpolicy "
                f"calibrate here; with {unsaid} costs are taken as is."
            )


_UNSAID = ("measured_on=''", "measured_with=''", "measured_over=None")
"""Costs that don't say what they were measured of, for each of `WhatRuns`"""


_REMEDIES = {
    "settings": (Settings, "kpolicy.Settings(max_num_reqs=256)"),
    "costs": (CostTable, "kpolicy.profiles.load_profile(FILE or NAME).costs"),
    "registry": (GraphRegistry, "kpolicy.GraphRegistry()"),
    "budget": (Budget, "kpolicy.Budget(graphs=1000)"),
    "strict": (bool, "True"),
    "correct": (bool, "True"),
}
"""Arguments by name: of which class they are, and what makes one"""


def _check_kinds(*, optional: bool = True, **arguments: object) -> None:
    for name, value in arguments.items():
        kind, example = _REMEDIES[name]
        if not (optional and value is None):
            check_kind(name, value, kind, example)


def _seconds(name: str, value: object) -> float:
    if not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
        raise ConfigError(f"{name} is {value!r:.80}; it takes seconds of at least 0, such as 1.0.")
    return float(value)


def _shape(shape: object) -> BatchShape:
    if not isinstance(shape, BatchShape):
        raise ShapeError(
            f"the batch is {shape!r:.80}; give a BatchShape, such as BatchShape.decode(9). `Engine.select` takes plain "
            "numbers."
        )
    return shape


def _of_several(communicator: Communicator | None) -> Communicator | None:
    """The communicator where there are several ranks; with one there is nothing to agree on."""
    if communicator is None:
        return None
    world_size = plain_int(getattr(communicator, "world_size", None))
    if type(world_size) is not int:
        raise ConfigError(
            f"communicator is {communicator!r:.80}; it takes a Communicator, such as "
            "kpolicy.serving.torch_communicator.TorchCommunicator()."
        )
    return communicator if world_size > 1 else None


def _done(event: ReadyEvent) -> bool:
    return event.done()


def _settings_of(model: StepModel | None) -> Settings:
    """Default limits; the model's own most requests where it states one."""
    most: int | None = getattr(model, "max_num_reqs", None)
    return Settings() if most is None else Settings(max_num_reqs=most)


def _support_of(attention: str | AttentionSupport | Claims | None, model: StepModel | None) -> AttentionSupport:
    if model is None:
        return _support("gqa" if attention is None else attention)
    return model.support if attention is None else model.support.meet(_support(attention))


def _support(attention: str | AttentionSupport | Claims) -> AttentionSupport:
    if isinstance(attention, str):
        return parse_attention(attention)
    if isinstance(attention, Claims):
        return AttentionSupport.of(attention, backend="stated", source="stated by the caller")
    if not isinstance(attention, AttentionSupport):
        raise SupportError(
            f"attention is {attention!r}; give AttentionSupport, Claims, or text such as 'mla' or 'gdn+gqa'. "
            "For a Hugging Face config use kpolicy.attention.hf.from_hf_config."
        )
    return attention
