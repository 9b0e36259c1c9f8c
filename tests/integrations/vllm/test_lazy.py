from __future__ import annotations

import functools
import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy.registry import GraphState
from kpolicy.settings import Settings
from kpolicy_vllm import lazy
from kpolicy_vllm.config import Config
from kpolicy_vllm.dispatch import Chooser
from kpolicy_vllm.lazy import LOOK, Lazy, attach, first, thin, uncollected, why_not
from kpolicy_vllm.state import State
from kpolicy_vllm.steps import Step

DECODE = [GraphKey(Part.FULL, n, n, query_len=1) for n in (1, 2, 4, 8, 16, 32, 64)]
PIECES = [GraphKey(Part.PIECEWISE, n) for n in (16, 64, 128, 256)]


def test_the_largest_of_each_kind_come_first_then_halves() -> None:
    assert set(first([*DECODE, *PIECES], 2)) == {DECODE[-1], PIECES[-1]}
    assert set(first([*DECODE, *PIECES], 1)) == {DECODE[-1], PIECES[-1]}
    assert set(first([*DECODE, *PIECES], 6)) == {*DECODE[-3:], *PIECES[1:]}
    assert set(first([*DECODE, *PIECES], 99)) == {*DECODE, *PIECES}


class FakeDispatcher:
    """vLLM's first dispatcher, as far as lazy capture knows it."""

    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        speculative_config=None, lora_config=None,
    )  # fmt: skip

    def __init__(self, state: State) -> None:
        self.deciding = True
        self.chooser = Chooser(state, lambda tokens, _: ("NONE", tokens), lambda _, desc: desc)
        self.desc_of = {key: (key.part.name, f"{key}") for key in (*DECODE, *PIECES)}
        state.dispatcher = self
        self.chooser.set_keys(self.desc_of)
        self.refresh = self.chooser.refresh

    def get_capture_descs(self) -> list[tuple[Any, list[Any]]]:
        parts = ("PIECEWISE", "FULL")
        return [(name, [desc for mode, desc in self.desc_of.values() if mode == name]) for name in parts]


class Server:
    """A runner that captures what the dispatcher lists."""

    def __init__(self, *, hot: int = 5, fails: bool = False) -> None:
        self.state = State(
            Config(lazy=True, lazy_hot=hot, lazy_graphs=2), Settings(max_num_reqs=64, max_num_tokens=512)
        )
        self.state.claims = Claims(1)
        self.dispatcher = FakeDispatcher(self.state)
        self.fails = fails
        self.waited = 0
        self.captures: list[list[str]] = []
        self.passed_over = ""
        thin(self.dispatcher, self.state)
        self.capture()
        for key in (DECODE[-1], PIECES[-1]):
            self.state.registry.capture(key, bytes=10, seconds=0.1, graphs=1, pool="vllm")
        self.state.graphs_captured()
        flat = Curve((1, 512), (100.0, 612.0))
        self.state.install_costs(
            CostTable(
                version="made up", measured=True, full=flat, piecewise=flat, eager=flat,
                host_full=HostCost(10.0), host_piecewise=HostCost(50.0), host_eager=HostCost(5000.0),
            )
        )  # fmt: skip
        self.lazy = Lazy(None, self.state, self.capture, self.wait, self.wrapped)

    def wait(self) -> None:
        self.waited += 1

    def wrapped(self, desc: str, part: Part) -> list[bool]:
        """As vLLM's wrappers have them: one of pieces, and one of whole graphs."""
        own = {listed for each in self.captures for listed in each if listed.startswith(part.name)}
        return [desc in own - {self.passed_over}] if own else []

    def capture(self) -> int:
        if self.fails and self.captures:
            raise RuntimeError("out of memory")
        assert self.waited == len(self.captures)
        self.captures.append([desc for _, each in self.dispatcher.get_capture_descs() for desc in each])
        return 7

    def run(self, step: Step, times: int) -> Any:
        for _ in range(times):
            self.lazy.step()
            entry = self.dispatcher.chooser.entry(step)
            entry.count += 1
        return entry.key


NINE = Step(9, 9, 9, 1, 1)


def test_a_hot_size_is_captured_and_taken() -> None:
    server = Server()
    assert server.captures == [[str(PIECES[-1]), str(DECODE[-1])]]
    assert server.run(NINE, LOOK - 1) == DECODE[-1]
    assert server.run(NINE, LOOK) == DECODE[4]
    assert server.captures[1:] == [[str(DECODE[4])]]
    record = server.state.registry.record(DECODE[4])
    assert record.state is GraphState.CAPTURED
    assert record.bytes == 7
    assert server.state.counters.counts["lazy_captures"] == 1
    assert len(server.dispatcher.get_capture_descs()[1][1]) == 1, "the list is as it was"
    server.run(NINE, 5 * LOOK)
    assert len(server.captures) == 2


def test_what_counts_as_missed_is_what_steps_would_take() -> None:
    """By the costs alone decodes run eagerly, by a hundredth: the doubt keeps them in a graph, and asks for it."""
    server = Server()
    near, flat = Curve((1, 512), (99.0, 99.0)), Curve((1, 512), (100.0, 100.0))
    server.state.install_costs(
        attrs.evolve(server.state.timed, full=flat, piecewise=flat, eager=near, host_eager=HostCost(50.0))
    )
    assert server.run(NINE, 2 * LOOK) == DECODE[4]
    assert server.captures[1:] == [[str(DECODE[4])]]


def test_a_cold_size_is_not() -> None:
    server = Server(hot=10 * LOOK)
    assert server.run(NINE, 5 * LOOK) == DECODE[-1]
    assert len(server.captures) == 1


def test_the_hottest_goes_first_and_one_at_a_time() -> None:
    server = Server()
    other = Step(20, 20, 20, 1, 1)
    for _ in range(LOOK // 4):
        server.run(NINE, 3)
        server.run(other, 1)
    server.run(other, 1)
    assert server.captures[1:] == [[str(DECODE[4])]]
    server.run(other, LOOK)
    assert server.captures[2:] == [[str(DECODE[5])]]


def test_a_failed_capture_is_said_once_and_not_repeated() -> None:
    server = Server(fails=True)
    assert server.run(NINE, 5 * LOOK) == DECODE[-1]
    assert server.waited == 1
    assert server.dispatcher.deciding
    assert server.state.counters.counts["lazy_capture_failed"] == 1
    record = server.state.registry.record(DECODE[4])
    assert (record.state, record.reason) == (GraphState.FAILED, Reason.CAPTURE_FAILED)


@pytest.mark.parametrize("key", [DECODE[4], PIECES[1]])
def test_a_size_that_vllm_passed_over_is_not_taken(key: GraphKey) -> None:
    """Its first replay would be a capture, which vLLM's guard forbids: it would end the server."""
    server = Server()
    server.passed_over = str(key)
    assert not server.lazy.add(key)
    assert key not in server.state.ladder.keys
    assert server.state.registry.record(key).state is GraphState.FAILED
    other = DECODE[3] if key.part is Part.FULL else PIECES[0]
    assert server.lazy.add(other)


def test_what_another_rank_could_not_capture_none_takes() -> None:
    server = Server()
    server.state.agree = lambda _ok: False
    assert server.run(NINE, 5 * LOOK) == DECODE[-1]
    assert server.waited == 1
    assert server.state.registry.record(DECODE[4]).state is GraphState.FAILED


def test_a_thread_that_waits_for_outputs_keeps_captures_out() -> None:
    config = SimpleNamespace(**vars(FakeDispatcher.vllm_config))
    config.scheduler_config = SimpleNamespace(async_scheduling=True)
    config.parallel_config = SimpleNamespace(
        data_parallel_size=1, pipeline_parallel_size=1, distributed_executor_backend="mp"
    )
    assert "thread" in str(why_not(config))
    config.parallel_config.distributed_executor_backend = "uni"
    assert why_not(config) is None


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("parallel_config", "data_parallel_size", 2),
        ("parallel_config", "pipeline_parallel_size", 2),
        (None, "speculative_config", SimpleNamespace(num_speculative_tokens=2)),
        (None, "lora_config", SimpleNamespace()),
    ],
)
def test_where_it_cannot_all_is_captured_at_the_start(where: str | None, name: str, value: Any) -> None:
    state = State(Config(lazy=True, lazy_graphs=2), Settings(max_num_reqs=64, max_num_tokens=512))
    dispatcher = FakeDispatcher(state)
    config = SimpleNamespace(**vars(FakeDispatcher.vllm_config))
    config.parallel_config = SimpleNamespace(**vars(config.parallel_config))
    setattr(getattr(config, where) if where else config, name, value)
    dispatcher.vllm_config = config
    assert why_not(config)
    thin(dispatcher, state)
    assert sum(len(each) for _, each in dispatcher.get_capture_descs()) == len(DECODE) + len(PIECES)


@pytest.mark.parametrize(("fails", "collects"), [(False, False), (True, False), (False, True)])
def test_vllm_s_guard_against_captures_is_up_again_after_each(
    monkeypatch: pytest.MonkeyPatch, fails: bool, collects: bool
) -> None:
    """Also after one that failed; the capture is vLLM's own, not the wrapper that ends in calibration.

    What it does to Python's garbage isn't done meanwhile, unless vLLM is asked to.
    """
    guard: list[bool] = []
    collecting: list[bool] = []
    asked: list[str] = []
    monitor = ModuleType("vllm.compilation.monitor")
    monitor.set_cudagraph_capturing_enabled = guard.append  # type: ignore[attr-defined]
    torch = ModuleType("torch")
    torch.accelerator = SimpleNamespace(synchronize=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, monitor.__name__, monitor)
    envs = ModuleType("vllm.envs")
    envs.VLLM_ENABLE_CUDAGRAPH_GC = collects  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, envs.__name__, envs)
    server = Server(fails=fails)
    monkeypatch.setattr(lazy, "wrapped", server.wrapped)

    class Runner:
        """vLLM's runner, whose capture lets captures be, as vLLM's does."""

        vllm_config = FakeDispatcher.vllm_config

        def capture_model(self) -> int:
            guard.append(True)
            gc.collect()
            gc.freeze()
            gc.unfreeze()
            collecting.append(gc.isenabled())
            server.waited = len(server.captures)
            return server.capture()

        def execute_model(self) -> str:
            entry = server.dispatcher.chooser.entry(NINE)
            entry.count += 1
            return "ran"

    runner: Any = Runner()
    runner.capture_model = lambda: pytest.fail("the wrapper was called")
    attach(runner, server.state)
    recorders = {name: functools.partial(asked.append, name) for name in ("collect", "freeze", "unfreeze")}
    for name, recorder in recorders.items():
        monkeypatch.setattr(gc, name, recorder)
    for _ in range(2 * LOOK):
        assert runner.execute_model() == "ran"
    assert collecting == [collects], "nothing is collected in between either"
    # vLLM's procedure collects all garbage, and thaws what vLLM froze, while no request moves on.
    assert asked == (["collect", "freeze", "unfreeze"] if collects else [])
    assert {name: getattr(gc, name) for name in recorders} == recorders
    assert gc.isenabled()
    assert guard == [True, False]
    assert server.state.counters.counts["lazy_capture_failed" if fails else "lazy_captures"] == 1


def test_what_looks_for_graphs_never_ends_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.compilation.monitor", ModuleType("vllm.compilation.monitor"))
    envs = ModuleType("vllm.envs")
    envs.VLLM_ENABLE_CUDAGRAPH_GC = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, envs.__name__, envs)
    torch = ModuleType("torch")
    torch.accelerator = SimpleNamespace(synchronize=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    server = Server()
    runner = SimpleNamespace(vllm_config=FakeDispatcher.vllm_config, execute_model=lambda: "ran")
    attach(runner, server.state)
    monkeypatch.setattr(Lazy, "look", lambda _self: 1 // 0)
    assert [runner.execute_model() for _ in range(2 * LOOK)] == ["ran"] * 2 * LOOK
    assert server.state.counters.counts["lazy_failed"] == 2


def test_runners_of_one_process_leave_collecting_as_the_first_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures that overlap don't end in the order that they began backwards; gc that was off stays off."""
    asked: list[str] = []
    monkeypatch.setattr(gc, "collect", functools.partial(asked.append, "collect"))
    before, was = gc.collect, gc.isenabled()
    try:
        for enabled in (True, False):
            (gc.enable if enabled else gc.disable)()
            one, two = uncollected(), uncollected()
            one.__enter__()
            two.__enter__()
            one.__exit__(None, None, None)
            gc.collect()
            assert (asked, gc.isenabled()) == ([], False)
            two.__exit__(None, None, None)
            assert gc.isenabled() is enabled
            assert gc.collect is before
    finally:
        (gc.enable if was else gc.disable)()
