"""Calibration over the real dispatchers and managers, with scheduler outputs of vLLM's own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from kpolicy.modes import Part
from kpolicy_vllm.calibrate import calibrate
from kpolicy_vllm.config import Config
from tests.integrations.vllm.fake_runner import FakeRunner, SimulatedClock
from tests.integrations.vllm.shimmed import ShimmedVllm
from tests.integrations.vllm.test_calibrate import cost
from tests.integrations.vllm.test_oracle_dispatch import RUNNERS, deployment
from tests.oracle.loader import loaded, oracle_folder
from tests.oracle.wheels import VLLM_WHEELS

pytestmark = VLLM_WHEELS
SIZES = Config(policy="auto", decode_sizes=(1, 4, 16, 64), mixed_sizes=(), piecewise_sizes=(16, 64, 256, 1024))


class AskingRunner(FakeRunner):
    """Asks the real dispatcher for each step's graph, as vLLM's runner does."""

    def __init__(self, clock: SimulatedClock, shim: ShimmedVllm, runner: str) -> None:
        super().__init__(clock, cost)
        self._shim = shim
        self._kind = runner

    def execute_model(self, output: Any) -> None:
        scheduled = output.num_scheduled_tokens
        if scheduled:
            dispatcher = self._shim.state.dispatcher
            reqs, tokens, longest = len(scheduled), sum(scheduled.values()), max(scheduled.values())
            uniform = longest == 1
            if self._kind == "v1":
                mode, desc = dispatcher.dispatch(num_tokens=tokens, uniform_decode=uniform)
            else:
                desc = dispatcher.dispatch(reqs, tokens, 1 if uniform else None)
                mode = desc.cg_mode
            assert desc.num_tokens >= tokens
            assert getattr(desc, "num_reqs", None) is None or desc.num_reqs >= reqs
            none = mode.name == "NONE"
            self.forced = (mode, ("eager", desc.num_tokens) if none else dispatcher.key_of[mode, desc])
        super().execute_model(output)


@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_every_graph_is_timed_through_the_real_dispatch(version: str, runner: str) -> None:
    real = ("vllm.v1.core.sched.output",)
    with loaded(oracle_folder(), version, real=real) as modules:
        shim = ShimmedVllm(modules, version, runner, config=SIZES)
        shim.start(deployment(version, runner, [1, 4, 16, 64, 256, 1024], reqs=64, level="uniform"))
        shim.captured()
        clock = SimulatedClock()
        asking = AskingRunner(clock, shim, runner)
        table = calibrate(asking, shim.state, clock)
        assert table is not None
        ran = {key for key, _, _ in asking.ran if not isinstance(key, tuple)}
        assert ran == set(shim.state.ladder.keys)
        assert any(isinstance(key, tuple) for key, _, _ in asking.ran)
        for key in ran:
            curve = table.full if key.part is Part.FULL else table.piecewise
            base = 400 if key.part is Part.FULL else 450
            assert curve.at(key.num_tokens) == pytest.approx(base + 3 * key.num_tokens, rel=0.05)
        shim.state.install_costs(table)
        assert shim.state.select is not None
        assert not shim.state.counters.counts
        assert importlib.import_module("vllm.v1.core.sched.output").SchedulerOutput.make_empty() is not None
