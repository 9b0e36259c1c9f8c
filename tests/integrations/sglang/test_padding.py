"""Who clears what a batch leaves empty, over pretended buffers; test_oracle_padding.py has the real ones."""

from types import SimpleNamespace

import pytest

from kpolicy_sglang import hooks, padding
from kpolicy_sglang.config import Config
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.phase import DECODE, PREFILL
from kpolicy_sglang.state import State, attach
from tests.integrations.sglang.test_hooks import graph_runner, model_runner, start

pytest.importorskip("torch")


class Buffers:
    """A registry of buffers without any."""

    device, max_bs, max_num_tokens = "cpu", 8, 8

    def __init__(self, **slots):
        self._slots = slots


class BreakableCudaGraphBackend:
    """As much of one as is wrapped."""

    def __init__(self):
        self.captured = []
        self.replay = self.cleanup = lambda *_, **__: None

    def capture_one(self, shape, *_, **__):
        self.captured.append((shape.size, list(padding._clearing)))


@pytest.fixture(autouse=True)
def _configured():
    yield
    hooks.configure(None)


def taken(runner):
    return hasattr(runner.buffer_registry, padding._ATTRIBUTE)


@pytest.mark.parametrize("on", [True, False])
def test_both_phases_buffers_are_taken_once_graphs_are_there(on):
    """KPOLICY_QUICK_PADDING=0 leaves them to SGLang."""
    hooks.configure(Config(quick_padding=on, calibrate=False), "0.5.16")
    decode, prefill = (graph_runner(buffer_registry=Buffers()) for _ in range(2))
    start(model_runner(), decode, prefill)
    assert taken(decode) == taken(prefill) == on


def test_a_start_that_fails_leaves_them_to_sglang(monkeypatch):
    """As all else that kpolicy decides."""

    def fails(*_):
        raise RuntimeError("no device")

    monkeypatch.setattr("kpolicy_sglang.calibrate.cost_tables", fails)
    hooks.configure(Config(), "0.5.16")
    decode = graph_runner(buffer_registry=Buffers())
    start(model_runner(), decode, None)
    assert not taken(decode)


def test_buffers_that_are_not_as_known_are_left_to_sglang():
    """Looking at them costs nothing but the quicker way."""
    hooks.configure(Config(calibrate=False), "0.5.16")
    decode = graph_runner(buffer_registry=Buffers(odd=object()))
    state = start(model_runner(), decode, None)
    assert set(state.phases) == {DECODE}
    assert not taken(decode)
    assert state.failures.total == 1


def test_a_runner_made_anew_has_its_buffers_taken_too():
    """SGLang captures again after a change of weights."""
    hooks.configure(Config(calibrate=False), "0.5.16")
    state = start(model_runner(), graph_runner(buffer_registry=Buffers()), None)
    again = graph_runner(buffer_registry=Buffers())
    hooks._captured_again(state, again, DECODE)
    assert taken(again)


def test_a_runner_without_buffers_is_left_alone():
    """The eager one of some releases."""
    runner = SimpleNamespace()
    padding.take_tails(runner, Failures())
    padding.leave_tails(runner)
    assert not vars(runner)


@pytest.mark.parametrize(("phase", "on", "cleared"), [
    (PREFILL, True, [129]), (PREFILL, False, []), (DECODE, True, []),
])  # fmt: skip
def test_prompts_graphs_alone_clear_rows(phase, on, cleared):
    """A graph of 256 tokens clears from row 129 on where the next smaller one is of 128."""
    backend, runner = BreakableCudaGraphBackend(), graph_runner(capture_num_tokens=[64, 128, 256])
    runner.model_runner = model_runner(attn_backend=None)
    attach(runner.model_runner, State(Config(quick_padding=on, quick_capture=False), "0.5.16"))
    hooks._mirrored(backend, runner, phase)
    backend.capture_one(SimpleNamespace(size=256, variant_label=None, stream_idx=None))
    assert backend.captured == [(256, cleared)]
    assert not padding._clearing
