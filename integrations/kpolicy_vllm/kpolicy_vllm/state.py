"""`State`: what kpolicy knows inside one process of one vLLM, shared by dispatch, calibration and the scheduler."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import attrs

from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.decision import Decision
from kpolicy.errors import KPolicyError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.policies import get_policy
from kpolicy.policies.auto import AutoPolicy
from kpolicy.policies.base import CompiledPolicy, Policy, PolicyContext
from kpolicy.registry import GraphRegistry
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy_vllm.config import Config

__all__ = [
    "LISTED", "LOGGER", "PROCESS", "Counters", "State", "engine_number", "going_on_alike", "held_by", "settings_of",
    "state_of", "workers_apart",
]  # fmt: skip

LOGGER = logging.getLogger("vllm.kpolicy")
"""Below vLLM's own logger, so that its handlers and levels hold."""

LISTED = "kpolicy_listed_sizes"
"""Where the additional config keeps the sizes that the user gave to vLLM: copies of the configuration see ours."""

Select = Callable[..., Decision]


class Counters:
    """Things that happened, by name; safe under threads as far as a count may be off by a few."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._warned: set[str] = set()

    def add(self, name: str, times: int = 1) -> None:
        """Count something."""
        self.counts[name] += times

    def warn_once(self, name: str, message: str) -> None:
        """Count it, and say so the first time."""
        self.counts[name] += 1
        self._say_once(name, message)

    def warn_of_each(self, name: str, message: str) -> None:
        """Count it, and say so the first time that it is this message: of several engines each has its own."""
        self.counts[name] += 1
        self._say_once(f"{name}: {message}", message)

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            LOGGER.warning("kpolicy: %s", message)


PROCESS = Counters()
"""What happened in this process before, or without, a state."""


def settings_of(vllm_config: Any) -> Settings:
    """The deployment's limits, as that vLLM was configured."""
    scheduler, speculative, lora = (
        vllm_config.scheduler_config,
        vllm_config.speculative_config,
        vllm_config.lora_config,
    )
    return Settings(
        max_num_reqs=scheduler.max_num_seqs,
        max_num_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
        num_speculative_tokens=(speculative.num_speculative_tokens or 0) if speculative is not None else 0,
        max_loras=lora.max_loras if lora is not None else 0,
    )


class State:
    """See the module's docstring.

    Args:
        config: what the user set.
        settings: the deployment's limits.
        num_dp_ranks: data-parallel ranks that agree on each step.
        listed: capture sizes that the user gave vLLM; none where it takes its own.

    Attributes:
        claims: what attention lets be captured; nothing until the runner has said.
        sizes: the capture sizes; None leaves vLLM's own list.
        timed: the table that was installed, at the host's speed now, without sizes that weren't timed; None until there
            is one.
        costs: the same as decisions have it.
        select: the per-batch path of the policy over the captured graphs, without SPLIT; None while vLLM's own rule
            decides.
        runner, dispatcher: the worker's side; None in a process that only schedules.
        log: the decision log, where one is written.
        loras_apart: whether a graph captured with adapters serves only steps with some.
        broadcast: gives every rank rank 0's value; every rank must call it.
        agree: whether it holds on every rank; every rank must call it.
        captured, started: whether its graphs are captured; whether they were before, and all that follows was done.
        rejoin_us: what a decode row costs more that a step left out, where rows join a runner's batch again.
        look_due: has the next step look at the host's speed, and tells whether the one after is wanted soon; None where
            costs don't follow it.
        two_forwards: whether the runner may run decodes and prompts of one step as two forwards.
    """

    def __init__(
        self, config: Config, settings: Settings, *, num_dp_ranks: int = 1, listed: Sequence[int] = ()
    ) -> None:  # fmt: skip
        self.config = config
        self.listed = listed
        self.settings = settings
        self.num_dp_ranks = num_dp_ranks
        self.objective = config.objective_parsed
        self.policy: Policy = get_policy(config.policy)
        self.claims = Claims()
        self.sizes: CaptureSizes | None = None
        self.timed: CostTable | None = None
        self.costs: CostTable | None = None
        self.costs_from = ""
        self.registry = GraphRegistry()
        self.counters = Counters()
        self.runner: Any = None
        self.dispatcher: Any = None
        self.select: Select | None = None
        self.select_lora: Select | None = None
        self.vllm_version = ""
        self.log: Any = None
        self.loras_apart = True
        self.broadcast: Callable[[Any], Any] = _same
        self.agree: Callable[[bool], bool] = bool
        self.captured = self.started = False
        self.broken = False
        self.compiles = 0
        self.two_forwards = False
        self.rejoin_us = 0.0
        self.look_due: Callable[[], bool] | None = None
        self._with_split: tuple[int, CompiledPolicy] | None = None

    @property
    def ready(self) -> bool:
        """Whether the policy can decide: graphs are captured, and there are costs where it reads them."""
        return self.captured and not self.broken and (self.costs is not None or not self.policy.reads_costs)

    @property
    def weighed(self) -> CostTable | None:
        """The costs that `auto` weighs ways by; None for policies with rules of their own."""
        return self.costs if isinstance(self.policy, AutoPolicy) else None

    @property
    def ladder(self) -> CaptureLadder:
        """The model's own graphs that may be replayed; drafters and encoders choose theirs themselves."""
        return self.registry.view()

    def wanted(self, *, pieces: bool) -> CaptureSizes:
        """The sizes of each kind of graph that the policy can ever choose, now that attention has said what it can.

        Args:
            pieces: whether the model is cut into pieces; otherwise FULL graphs take mixed batches of their sizes too.
        """
        sizes = self.sizes
        assert sizes is not None  # noqa: S101 - whoever leaves vLLM's sizes alone doesn't ask
        if not pieces:
            sizes = attrs.evolve(sizes, mixed=sorted({*sizes.mixed, *sizes.piecewise}))
        elif self.config.plan is not None and self.config.piecewise_sizes is None and not self.claims.mixed:
            # Planned for whole graphs of mixed batches, which can't be had here: without pieces those would be eager.
            sizes = attrs.evolve(sizes, piecewise=sorted({*sizes.mixed, *sizes.piecewise}))
        try:
            keys = self.policy.plan(sizes, self.claims, self.settings)
        except KPolicyError as error:
            self.counters.warn_once("not_planned", f"policy {self.config.policy!r} has no plan for {sizes}: {error}")
            return sizes
        q = self.settings.query_len
        full = [key for key in keys if key.part is Part.FULL]
        return CaptureSizes(
            sorted({key.num_tokens for key in full if key.decode_only and (key.query_len or q) == q}),
            sorted({key.num_tokens for key in full if not key.decode_only}),
            sorted({key.num_tokens for key in keys if key.part is Part.PIECEWISE}),
        )

    def install_costs(self, table: CostTable, source: str = "calibration") -> None:
        """Decide by these costs from now on. Every rank must be given the same table."""
        self.timed, self.costs, self.costs_from = table, going_on_alike(table), source
        self.recompile()

    def graphs_captured(self) -> None:
        """Decide from now on, if costs are there."""
        self.captured = True
        self.recompile()

    def recompile(self) -> None:
        """Prepare the policy for the graphs captured now. A policy that can't be leaves vLLM's own rule in place."""
        self.select = self.select_lora = None
        self._with_split = None
        if self.ready:
            try:
                policy = AutoPolicy(forms=()) if isinstance(self.policy, AutoPolicy) else self.policy
                self.select = self.select_lora = policy.compile(self.context(lora=False)).select
                self.compiles += 1
                if self.settings.max_loras and self.loras_apart:
                    self.select_lora = policy.compile(self.context(lora=True)).select
            except Exception as error:  # noqa: BLE001 - a policy is anyone's code, and serving goes on without it
                self.fail("prepared", error)
        if self.dispatcher is not None:
            self.dispatcher.refresh()

    @contextmanager
    def guard(self, event: str, doing: str, then: str = "vLLM serves on without it") -> Iterator[None]:
        """Whatever goes wrong in here is counted and said once, and never ends vLLM."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - that is what it is for
            self.counters.warn_once(event, f"{doing} failed: {type(error).__name__}: {error}; {then}.")

    def together(self, event: str, doing: str, run: Callable[[], Any]) -> bool:
        """Run it, and whether that went well on every rank; every rank must call it. What failed is said once."""
        ok = False
        with self.guard(event, doing, "vLLM's own rule decides"):
            run()
            ok = True
        if self.agree(ok):
            return True
        if ok:
            self.counters.warn_once(event, f"{doing} failed on another rank; vLLM's own rule decides.")
        return False

    def fail(self, doing: str, error: Exception) -> None:
        """The policy raised where it must not: vLLM's own rule decides from now on."""
        self.broken = True
        self.select = self.select_lora = None
        self.counters.warn_once(
            "policy_failed",
            f"policy {self.config.policy!r} raised when {doing}: {type(error).__name__}: {error}. "
            "vLLM's own rule decides from here on.",
        )

    def context(self, *, lora: bool | None = None) -> PolicyContext:
        """What the policy reads: with `lora` given, only graphs with or only graphs without adapters."""
        view = self.ladder
        if lora is not None and self.settings.max_loras and self.loras_apart:

            def of(keys: tuple[GraphKey, ...]) -> list[GraphKey]:
                return [key for key in keys if bool(key.lora_case) is lora]

            view = CaptureLadder(of(view.keys), version=view.version, withdrawn=of(view.withdrawn))
        costs = self.costs if self.costs is not None else analytic_costs()
        return PolicyContext(
            claims=self.claims,
            ladder=view,
            costs=costs,
            settings=self.settings,
            objective=self.objective,
            basis=costs.basis,
        )

    def others_decode(self) -> bool:
        """Whether the last step of all data-parallel ranks was of decodes, if this one had no rows in it.

        A rank without rows votes for one decode, so a graph of more than that is another's wish. One decode looks like
        none.
        """
        key = None if self.dispatcher is None else self.dispatcher.agreed
        if key is None or key.part is not Part.FULL:
            return False
        least = min(each.num_tokens for each in self.ladder.keys if each.part is Part.FULL)
        return bool(key.num_tokens > least)

    def decide(self, shape: BatchShape, *, split: bool = False) -> Decision | None:
        """How the policy would run a batch; None while it can't decide.

        Args:
            shape: the batch.
            split: whether SPLIT is among the ways.
        """
        if not self.ready:
            return None
        try:
            if not split:
                shape = attrs.evolve(shape, forbidden=shape.forbidden | {Mode.SPLIT})
            version = self.registry.version
            if self._with_split is None or self._with_split[0] != version:
                self._with_split = (version, self.policy.compile(self.context()))
            return self._with_split[1].select(*shape.numbers)
        except KPolicyError as error:
            self.counters.warn_once("undecided", f"no decision for {shape}: {error}")
            return None


def _same(value: Any) -> Any:
    return value


def engine_number(vllm_config: Any) -> int:
    """Which data-parallel engine of one vLLM this is, from 0.

    Engines of models without experts know of no others: vLLM has each of them for rank 0 of one.
    """
    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    return int(parallel.data_parallel_rank if index is None else index)


def workers_apart(vllm_config: Any) -> bool:
    """Whether workers are processes of their own (tensor parallelism in vLLM's way), beside that of the scheduler."""
    backend = getattr(vllm_config.parallel_config, "distributed_executor_backend", None)
    return backend not in (None, "uni", "external_launcher")


_STATES: weakref.WeakValueDictionary[str, State] = weakref.WeakValueDictionary()
_OFF: set[str] = set()
_LOCK = Lock()


def going_on_alike(table: CostTable) -> CostTable:
    """A measured table in which pieces, eager steps and FULL graphs of mixed batches go on alike beyond what was timed.

    They run the same kernels. Past its own last size an eager step or a piece goes on as the other where that was timed
    further, and a mixed graph as pieces do; neither goes on as mixed graphs. Each by its own last slope had a Llama's
    pieces of 4,096 tokens cheaper than its eager step of 3,500, by times to 896 and to 1,024.
    """
    if not table.measured:
        return table
    eager, piecewise = table.eager.going_on_as(table.piecewise), table.piecewise.going_on_as(table.eager)
    mixed = table.mixed and table.mixed.going_on_as(piecewise)
    return attrs.evolve(table, eager=eager, piecewise=piecewise, mixed=mixed)


def state_of(vllm_config: Any) -> State | None:
    """The state of that vLLM in this process; None where kpolicy is off or can't be used.

    It is made at first use, and goes with what holds it: vLLM's runner and scheduler (`held_by`).
    """
    name = getattr(vllm_config, "instance_id", "") or f"{id(vllm_config):x}"
    with _LOCK:
        state = _STATES.get(name)
        if state is None and name not in _OFF:
            state = _made(vllm_config)
            if state is None:
                _OFF.add(name)
            else:
                _STATES[name] = state
        return state


def held_by(owner: Any, state: State) -> None:
    """Have the state live as long as that object of vLLM's, which nothing here holds."""
    owner.kpolicy_state = state


def _made(vllm_config: Any) -> State | None:
    try:
        config = Config.load(vllm_config.additional_config)
        if config is None:
            return None
        ranks = vllm_config.parallel_config.data_parallel_size
        additional = vllm_config.additional_config
        listed = (additional.get(LISTED) if isinstance(additional, Mapping) else None) or ()
        return State(config, settings_of(vllm_config), num_dp_ranks=ranks, listed=listed)
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM serves on
        what = str(error) if isinstance(error, KPolicyError) else f"{type(error).__name__}: {error}"
        PROCESS.warn_of_each("bad_setting", f"it is off, and vLLM's own rule decides: {what}")
        return None
