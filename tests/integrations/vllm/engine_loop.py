"""An engine core on a simulated host and device: vLLM's own loop and scheduler out of the wheel, or a stand-in.

Time passes where the host works, sleeps or waits for the device. Requests arrive at their times, whatever the host
does, as vLLM's input thread puts them into the queue.
"""

from __future__ import annotations

import importlib
import itertools
import queue
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any

from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy_vllm.config import Config
from kpolicy_vllm.defer import Deferral
from kpolicy_vllm.state import State, settings_of
from kpolicy_vllm.steps import Entry, Step

GRAPH = GraphKey(Part.FULL, 64, 64, query_len=1)
DECODES_US, TOKEN_US, EAGER_US = 8000.0, 15.0, 8000.0
ANSWER_S, PREPARE_S, LAUNCH_S = 0.8e-3, 0.7e-3, {"full": 0.4e-3, "piecewise": 3.5e-3, "eager": 12e-3}
"""To schedule a step until its mode is asked for, to prepare it, and to launch it"""
HOST_S = ANSWER_S + PREPARE_S
SAMPLE_S, UPDATE_S = 0.5e-3, 0.3e-3
"""To launch what samples a step's tokens, and to take those of the one before in"""
ANY = 1 << 20
"""Tokens that no step has"""
COSTS = CostTable(
    version="made up",
    measured=True,
    full=Curve((1, 64), (DECODES_US, DECODES_US)),
    piecewise=Curve((1, 4096), (EAGER_US, EAGER_US + 4095 * TOKEN_US)),
    eager=Curve((1, 4096), (EAGER_US, EAGER_US + 4095 * TOKEN_US)),
    host_full=HostCost(1e6 * (HOST_S + LAUNCH_S["full"])),
    host_piecewise=HostCost(1e6 * (HOST_S + LAUNCH_S["piecewise"])),
    host_eager=HostCost(1e6 * (HOST_S + LAUNCH_S["eager"])),
)


def vllm_config(**changed: Any) -> Any:
    """What the rule reads of vLLM's configuration."""
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "world_size": 1,
                "distributed_executor_backend": "uni"}  # fmt: skip
    scheduler = {"async_scheduling": True, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    rest = {"speculative_config": None, "lora_config": None, "kv_transfer_config": None, "ec_transfer_config": None,
            "max_concurrent_batches": 2}  # fmt: skip
    for each in (parallel, scheduler, rest):
        each.update({name: value for name, value in changed.items() if name in each})
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), scheduler_config=SimpleNamespace(**scheduler), **rest
    )


class Kind(Enum):
    """What vLLM's input queue holds."""

    ADD = 0
    ABORT = 1
    UTILITY = 3


class Machine:
    """The time, the device, and what arrives.

    Args:
        slower: times that steps take on the device of what costs have.
        noise: most that a step differs by, as a share.
        prompts: times that steps with prompts take besides.
        launch_s: what launching takes the host, by kind.
        sample_s: what sampling does.
        update_s: and taking tokens in.
    """

    def __init__(
        self, *, slower: float = 1.0, noise: float = 0.0, prompts: float = 1.0, launch_s: dict[str, float] = LAUNCH_S,
        sample_s: float = SAMPLE_S, update_s: float = UPDATE_S,
    ) -> None:  # fmt: skip
        self.time_s = 0.0
        self.device_s = 0.0
        self.idle_s = self.bound_s = 0.0
        """Seconds that the device had nothing to do, and that launching took longer than the work"""
        self.slower = slower
        self.noise = noise
        self.prompts = prompts
        self.launch_s = launch_s
        self.sample_s = sample_s
        self.update_s = update_s
        self.random = random.Random(1)  # noqa: S311
        self.arrivals: deque[tuple[float, Any]] = deque()
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.work(seconds)

    def work(self, seconds: float) -> None:
        self.time_s += seconds
        while self.arrivals and self.arrivals[0][0] <= self.time_s:
            self.input_queue.put_nowait(self.arrivals.popleft()[1])

    def until(self, time_s: float) -> None:
        if time_s > self.time_s:
            self.work(time_s - self.time_s)

    def launch(self, host_s: float, device_us: float) -> float:
        """Launch bit by bit, from now on; when the device is through with it."""
        start_s = max(self.device_s, self.time_s)
        self.idle_s += start_s - self.device_s
        self.work(host_s)
        took_s = 1e-6 * device_us * self.slower * (1 + self.random.uniform(-self.noise, self.noise))
        self.bound_s += max(0.0, self.time_s - start_s - took_s)
        self.device_s = max(start_s + took_s, self.time_s)
        return self.device_s

    def sample(self) -> float:
        """Launch what samples a step's tokens; when the device is through with those."""
        self.work(self.sample_s)
        self.bound_s += max(0.0, self.time_s - self.device_s)
        self.device_s = max(self.device_s, self.time_s)
        return self.device_s


class Tokens:
    """A step's tokens on their way to the host, as vLLM's `AsyncModelRunnerOutput`."""

    def __init__(self, machine: Machine, ends_s: float, output: Any) -> None:
        self._machine = machine
        self.ends_s = ends_s
        self._output = output
        self.copy_event = SimpleNamespace(query=self.query)
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self._machine.time_s >= self.ends_s

    def get_output(self) -> Any:
        self._machine.until(self.ends_s)
        return self._output


class Executor:
    """vLLM's in-process executor: a step without prompts replays a graph, others run in pieces or eagerly.

    Args:
        machine: the time and the device.
        state: the integration's.
        run: what a step computes.
        future: vLLM's future of a step.
        pieces: most tokens of a step with prompts that runs in pieces.
    """

    def __init__(
        self, machine: Machine, state: State, run: Callable[[Any], Any], future: Callable[..., Any], *,
        pieces: int = 0,
    ) -> None:  # fmt: skip
        self.pieces = pieces
        self._machine = machine
        self._state = state
        self._run = run
        self._future = future
        self._tokens: Any = None
        self._entries: dict[Step, Entry] = {}
        self._costs: CostTable = state.costs or COSTS
        state.dispatcher.chooser = self
        self.answers = True
        """Whether a policy decides"""
        self.steps: list[tuple[float, Any]] = []
        """When each step was launched, and what it was"""

    def entry(self, step: Step) -> Entry:
        """The answer for a step."""
        pieces = step.num_tokens <= self.pieces
        key = GRAPH if step.query_len else GraphKey(Part.PIECEWISE, step.num_tokens) if pieces else None
        return self._entries.setdefault(step, Entry(step, None, key, None, "cheapest_measured"))

    def cell(self, num_tokens: int, num_decodes: int) -> Entry:
        """The same, as `Chooser` is asked."""
        return self.entry(Step(num_tokens, num_decodes + 1, num_decodes))

    def _curve(self, entry: Entry) -> Curve:
        return self._costs.eager if entry.key is None else self._costs.piecewise

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002 - as vLLM's
        machine, total = self._machine, scheduler_output.total_num_scheduled_tokens
        ends_s = machine.device_s
        if total:
            machine.work(ANSWER_S)
            reqs = len(scheduler_output.num_scheduled_tokens)
            decodes = sum(new == 1 for new in scheduler_output.num_scheduled_tokens.values())
            entry = self.entry(Step(total, reqs, decodes, int(decodes == reqs), int(decodes == reqs)))
            if self.answers and self._state.dispatcher.told is not None:
                self._state.dispatcher.told(entry)
            machine.work(PREPARE_S)
            device_us = self._costs.full.at(64) if entry.whole else self._curve(entry).at(total) * machine.prompts
            ends_s = machine.launch(machine.launch_s[entry.label[0]], device_us)
            self.steps.append((machine.time_s, scheduler_output))
        self._tokens = Tokens(machine, ends_s, self._run(scheduler_output))
        return self._future(self._tokens, True) if not total else SimpleNamespace(done=lambda: False, result=None)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:  # noqa: ARG002 - as vLLM's
        self._tokens.ends_s = self._machine.sample()
        return self._future(self._tokens, True)


def state_of_machine(config: Any, **given: Any) -> State:
    """A state that decides by `COSTS`."""
    state = State(Config(**{"defer": True} | given), settings_of(config))
    state.dispatcher = SimpleNamespace(told=None, refresh=lambda: None)
    state.costs, state.captured = COSTS, True
    return state


def deferring(engine: Any, state: State, machine: Machine) -> Deferral:
    """Have the engine wait, on the machine's time."""
    made = Deferral(engine, state, machine.now, machine.sleep)
    made.watch()
    engine._kpolicy_deferral = made
    return made


def real_engine(config: Any, scheduler: Any, executor: Any, machine: Machine) -> Any:
    """vLLM's `EngineCoreProc`, as far as its loop goes. `real_scheduler.schedulers` must have loaded the release."""
    core = importlib.import_module("vllm.v1.engine.core")
    engine = object.__new__(core.EngineCoreProc)
    vars(engine).update(
        vllm_config=config, scheduler=scheduler, model_executor=executor, batch_queue=deque(maxlen=2),
        batch_queue_size=2, input_queue=machine.input_queue, output_queue=queue.Queue(), aborts_queue=queue.Queue(),
        is_ec_consumer=True, is_pooling_model=False, is_mm_encoder_only=False, use_spec_decode=False,
        check_for_draft_tokens=False, async_scheduling=True, engines_running=False, log_stats=False,
        shutdown_state=core.EngineShutdownState.RUNNING, process_input_queue_block=False, _idle_state_callbacks=[],
        step_fn=engine.step_with_batch_queue, publish_dp_lb_stats=False, _weight_version="default",
        reject_new_requests=False,
    )  # fmt: skip
    return engine


class Output(SimpleNamespace):
    """vLLM's `SchedulerOutput`, as far as it is used."""


class Plain:
    """A stand-in for vLLM's engine and scheduler at once: everyone who is there has a row in every step.

    Args:
        machine: the time and the device.
        config: vLLM's.
    """

    max_num_scheduled_tokens, max_num_running_reqs = 4096, 64

    def __init__(self, machine: Machine, config: Any) -> None:
        self.vllm_config = config
        self.machine = machine
        self.scheduler = self
        self.batch_queue: deque[Any] = deque(maxlen=2)
        self.batch_queue_size = 2
        self.input_queue = machine.input_queue
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.stopping = False
        self.handled: list[tuple[float, Any]] = []
        self.handed: list[tuple[float, Any]] = []
        """When each step's tokens were handed over, and what it was"""
        self.model_executor: Any = None

    def is_running(self) -> bool:
        return not self.stopping

    def _process_input_queue(self) -> None:
        while not self.input_queue.empty():
            kind, request = self.input_queue.get_nowait()
            self.handled.append((self.machine.time_s, kind))
            if kind is Kind.ADD:
                self.waiting.append(request[0])

    def process(self) -> None:
        """vLLM's method as the plugin wraps it."""
        deferral = self.__dict__.get("_kpolicy_deferral")
        if deferral is None:
            self._process_input_queue()
        else:
            deferral.process(self._process_input_queue)

    def step(self) -> None:
        """Launch a step, and take in the tokens of the one before."""
        new, self.waiting = self.waiting, []
        tokens = {request.request_id: 1 for request in self.running} | {
            each.request_id: each.num_tokens for each in new
        }
        self.running += new
        output = Output(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))
        self.model_executor.execute_model(output, non_block=True)
        self.batch_queue.appendleft((self.model_executor.sample_tokens(None), output, None))
        for request in new:
            request.num_computed_tokens = request.num_tokens
        for request in self.running:
            request.left -= 1
        self.running = [request for request in self.running if request.left]
        if len(self.batch_queue) == 2:
            future, output, _ = self.batch_queue.pop()
            future.result()
            self.scheduler.update_from_output(output, None)
            self.handed.append((self.machine.time_s, output))

    def update_from_output(self, output: Any, tokens: Any) -> None:  # noqa: ARG002 - as vLLM's
        """It takes its time."""
        self.machine.work(self.machine.update_s)


class PlainFuture:
    """vLLM's `AsyncOutputFuture`, as far as it is used."""

    def __init__(self, async_output: Any, single_value: bool) -> None:  # noqa: ARG002 - as vLLM's
        self.async_output = async_output

    def result(self) -> Any:
        return self.async_output.get_output()


def request_of(name: str, tokens: int, left: int = -1) -> Any:
    """A request for `Plain`; `left` is how many tokens it is to have, none of them the last by default."""
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, num_computed_tokens=0, num_output_placeholders=0, left=left
    )


def added(name: str, tokens: int, left: int = -1) -> Any:
    """A request as it stands in vLLM's input queue, once vLLM's input thread has made it."""
    return Kind.ADD, (request_of(name, tokens, left), 0)


def plain_engine(
    config: Any, machine: Machine, *, decodes: int = 8, costs: CostTable = COSTS, **given: Any
) -> tuple[Any, State]:
    """A stand-in engine with so many requests that decode, and its state."""
    engine, state = Plain(machine, config), state_of_machine(config, **given)
    state.timed = state.costs = costs
    engine.model_executor = Executor(machine, state, lambda output: output, PlainFuture)
    engine.running = [request_of(str(i), 1) for i in range(decodes)]
    for request in engine.running:
        request.num_computed_tokens = 1
    return engine, state


def turns(engine: Any, count: int) -> Iterable[int]:
    """So many turns of the stand-in's loop."""
    for turn in range(count):
        engine.process()
        yield turn
        engine.step()


class Gaps(SimpleNamespace):
    """What a served load came to: seconds, but for `steps`."""

    steps: int
    time_s: float
    first_s: list[float]
    gaps_s: list[float]

    @property
    def p99_s(self) -> float:
        return self.gaps_s[int(0.99 * len(self.gaps_s))]

    def slowest_s(self, share: float) -> float:
        """The mean of so many of the slowest gaps."""
        return statistics.fmean(self.gaps_s[int((1 - share) * len(self.gaps_s)) :])


def gaps_of(engine: Plain, came_s: dict[str, float]) -> Gaps:
    """When tokens came, of the requests that are given by when they arrived."""
    times: dict[str, list[float]] = {name: [] for name in came_s}
    for time_s, output in engine.handed:
        for name in output.num_scheduled_tokens:
            if name in times:
                times[name].append(time_s)
    return Gaps(
        steps=len(engine.handed), time_s=engine.machine.time_s,
        first_s=[each[0] - came_s[name] for name, each in times.items() if each],
        gaps_s=sorted(b - a for each in times.values() for a, b in itertools.pairwise(each)),
    )  # fmt: skip
