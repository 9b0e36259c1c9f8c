"""Steps that are made late on vLLM's own engine loop, scheduler and futures, out of the wheels."""

from __future__ import annotations

import importlib
import itertools
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy_vllm import defer
from kpolicy_vllm.defer import Deferral
from kpolicy_vllm.versions.signatures import ENGINE, differing
from tests.integrations.vllm.engine_loop import (
    ANY,
    DECODES_US,
    LAUNCH_S,
    UPDATE_S,
    Executor,
    Machine,
    deferring,
    real_engine,
    state_of_machine,
    vllm_config,
)
from tests.integrations.vllm.real_scheduler import Worker, make_request, make_scheduler, schedulers
from tests.integrations.vllm.real_scheduler import vllm_config as real_config
from tests.oracle.wheels import VLLM_WHEELS

pytest.importorskip("torch")
pytestmark = VLLM_WHEELS
BOTH = pytest.mark.parametrize("version", ["0.23", "0.33"])


class Served(SimpleNamespace):
    """What an engine made of some requests."""

    steps: int
    time_s: float
    idle_s: float
    waits_s: list[float]
    late: int
    tokens: dict[str, list[int]]
    deferred: int
    left_out: int
    gaps_s: list[float]


def serve(
    version: str, *, late: bool, pieces: int, eager_s: float = LAUNCH_S["eager"], rate: float = 20.0, count: int = 150,
    prompts: tuple[int, ...] = (200,),
) -> Served:  # fmt: skip
    """Sixteen requests that decode on and on, and prompts that come one by one, on vLLM's own loop."""
    config = real_config(version, asynchronous=True, max_num_seqs=64, max_tokens=4096, blocks=4000)
    config.model_config.max_model_len = 8192
    config.parallel_config.world_size = 1
    async_scheduler = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    kinds = importlib.import_module("vllm.v1.engine").EngineCoreRequestType
    future = importlib.import_module("vllm.v1.executor.uniproc_executor").AsyncOutputFuture
    machine = Machine(noise=0.01, launch_s=LAUNCH_S | {"eager": eager_s})
    state = state_of_machine(config)
    scheduler, worker = make_scheduler(async_scheduler, config), Worker()
    drawn, sizes, everyone = random.Random(3), random.Random(4), {}  # noqa: S311

    def run(output: Any) -> Any:
        return worker.run(output, {name: each.num_output_tokens for name, each in everyone.items()})

    engine = real_engine(config, scheduler, Executor(machine, state, run, future, pieces=pieces), machine)
    came_s, due_s = dict[str, float](), 0.5
    for i in range(count):
        due_s += drawn.expovariate(rate)
        request = everyone[f"p{i}"] = make_request(f"p{i}", sizes.choice(prompts), 4)
        came_s[request.request_id] = due_s
        machine.arrivals.append((due_s, (kinds.ADD, (request, 0))))
    for i in range(16):
        request = everyone[f"d{i}"] = make_request(f"d{i}", 16, 3000)
        request.kv_transfer_params = None
        scheduler.add_request(request)
    for request in everyone.values():
        request.kv_transfer_params = request.pooling_params = None
        request.abort_immediately = False
    update = scheduler.update_from_output

    def update_from_output(*given: Any) -> Any:
        machine.work(UPDATE_S)
        return update(*given)

    scheduler.update_from_output = update_from_output
    if late:
        deferring(engine, state, machine)
    first_s: dict[str, float] = {}
    decoding, handed_s, seen = everyone["d0"], list[float](), 0
    process = type(engine)._process_input_queue
    while any(each.num_output_tokens < 4 for each in everyone.values()):
        deferral = engine.__dict__.get("_kpolicy_deferral")
        if deferral is None:
            process(engine)
        else:
            deferral.process(lambda: process(engine))
        engine._process_engine_step()
        if decoding.num_output_tokens > seen:
            seen = decoding.num_output_tokens
            handed_s.append(machine.time_s)
        for name in came_s.keys() - first_s.keys():
            if everyone[name].num_output_tokens:
                first_s[name] = machine.time_s
        assert machine.time_s < 100
    counts = state.counters.counts
    return Served(
        steps=len(engine.model_executor.steps), time_s=machine.time_s, idle_s=machine.idle_s + machine.bound_s,
        waits_s=[first_s[name] - came_s[name] for name in came_s], late=counts["deferred_late"],
        deferred=counts["deferred_steps"], left_out=counts["deferred_left_out"],
        gaps_s=sorted(b - a for a, b in itertools.pairwise(handed_s)),
        tokens={name: list(each.output_token_ids)[:4] for name, each in everyone.items()},
    )  # fmt: skip


def loop(version: str) -> Any:
    """vLLM's engine core, its executor and its schedulers, for as long as the context lasts."""
    return schedulers(version, further=("v1.engine.core", "v1.engine", "v1.executor.uniproc_executor"))


@BOTH
@pytest.mark.parametrize(("pieces", "eager_s", "sooner"), [(ANY, 0.0, 0.5), (0, 5e-3, 0.4), (0, 12e-3, -0.1)])
def test_first_tokens_come_earlier(version: str, pieces: int, eager_s: float, sooner: float) -> None:
    """By more than half a step of decodes, unless eager launches leave the host nothing; steps are as many."""
    with loop(version):
        stock, late = (serve(version, late=each, pieces=pieces, eager_s=eager_s) for each in (False, True))
    assert late.tokens == stock.tokens
    gained_s = statistics.fmean(stock.waits_s) - statistics.fmean(late.waits_s)
    assert gained_s > sooner * 1e-6 * DECODES_US
    assert late.steps / late.time_s > 0.998 * stock.steps / stock.time_s
    assert late.idle_s - stock.idle_s < 0.002 * late.time_s
    assert not stock.deferred
    if sooner > 0:
        assert late.late <= 0.02 * late.deferred
        assert late.deferred > 0.5 * late.steps


@BOTH
def test_prompts_whose_launch_is_long_make_no_gap_longer(version: str) -> None:
    """They stay in vLLM's input queue for a turn where they come in a wait, and the short ones come sooner."""
    load: Any = {"pieces": 512, "eager_s": 14e-3, "rate": 11.0, "prompts": (200, 1200)}
    with loop(version):
        stock, late = (serve(version, late=each, **load) for each in (False, True))
    assert late.tokens == stock.tokens
    assert late.left_out > 10
    most = len(stock.gaps_s) // 50
    assert statistics.fmean(late.gaps_s[-most:]) < 1.01 * statistics.fmean(stock.gaps_s[-most:])
    assert statistics.fmean(late.waits_s) < 0.98 * statistics.fmean(stock.waits_s)
    assert late.steps / late.time_s > 0.998 * stock.steps / stock.time_s


@BOTH
def test_the_method_is_wrapped_only_where_it_is_on(version: str) -> None:
    """Off means vLLM's own method; on, an engine of another configuration passes through."""
    with loop(version):
        engine = importlib.import_module("vllm.v1.engine.core").EngineCoreProc
        original = engine._process_input_queue
        found = SimpleNamespace(check=lambda _: None)
        for given, changed in (({"defer": False}, {}), ({}, {"data_parallel_size": 2}), ({"policy": "full"}, {})):
            config = vllm_config(**changed)
            defer.attach(found, config, state_of_machine(config, **given))
            assert engine._process_input_queue is original
        for _ in range(2):
            defer.attach(found, vllm_config(), state_of_machine(vllm_config()))
            assert engine._process_input_queue.__wrapped__ is original
        other = object.__new__(engine)
        vars(other).update(vllm_config=real_config(version, asynchronous=True), input_queue=SimpleNamespace(
            empty=lambda: True), engines_running=True)  # fmt: skip
        other._process_input_queue()
        assert other._kpolicy_deferral is None


@BOTH
def test_an_engine_waits_by_itself_once_it_is_attached(version: str, monkeypatch: Any) -> None:
    """Its first step makes what waits; errors of that leave it alone."""
    with loop(version):
        engine = importlib.import_module("vllm.v1.engine.core").EngineCoreProc
        config = real_config(version, asynchronous=True)
        config.parallel_config.world_size = 1
        config.additional_config = {"kpolicy": {}}
        machine = Machine()
        state = state_of_machine(config)
        monkeypatch.setattr(defer, "state_of", lambda _: state)
        defer.attach(SimpleNamespace(check=lambda _: None), config, state)
        executor = Executor(machine, state, lambda output: output, None)
        made = real_engine(config, SimpleNamespace(has_requests=lambda: True, update_from_output=None), executor,
                           machine)  # fmt: skip
        made.scheduler.update_from_output = lambda *_: None
        assert issubclass(type(made), engine)
        made._process_input_queue()
        assert isinstance(made._kpolicy_deferral, Deferral)
        assert made.model_executor.execute_model.__wrapped__
        assert made.model_executor.sample_tokens.__wrapped__
        assert made.kpolicy_state is state
        broken = real_engine(config, None, None, machine)
        broken.engines_running = True
        broken._process_input_queue()
        assert broken._kpolicy_deferral is None
        assert state.counters.counts["not_deferred"] == 1


@BOTH
def test_recorded_signatures_are_the_wheels(version: str) -> None:
    """What it relies on is as it was recorded."""
    with loop(version):
        assert list(differing(ENGINE)) == []
