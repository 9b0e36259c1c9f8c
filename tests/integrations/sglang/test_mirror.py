"""SGLang's captures and replays in kpolicy's registry."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry, GraphState
from kpolicy_sglang import dispatch, hooks, padding
from kpolicy_sglang.config import Config
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.mirror import key_of, mirror
from kpolicy_sglang.phase import DECODE, PREFILL, Phase
from kpolicy_sglang.state import State, attach
from tests.integrations.sglang.test_bound import around, hooked
from tests.integrations.sglang.test_dispatch import always, batch_of, runner_of
from tests.integrations.sglang.test_padding import Buffers


class FullCudaGraphBackend:
    """A backend as SGLang's are: it keeps what it captured."""

    def __init__(self):
        self.graphs = {}
        self.cleaned = 0

    def capture_one(self, shape, forward, **_rest):
        self.graphs[shape] = forward()

    def replay(self, shape, batch, **rest):
        return self.graphs[shape], batch, rest

    def cleanup(self):
        self.cleaned += 1
        self.graphs.clear()


class BreakableCudaGraphBackend(FullCudaGraphBackend):
    """The backend of prefill."""


class Device:
    """Free memory that falls by a MiB each time it is looked at."""

    def __init__(self):
        self.free = 1 << 30

    def mem_get_info(self):
        self.free -= 1 << 20
        return self.free, 1 << 31


def shape(size, stream=None, label=None):
    return SimpleNamespace(size=size, stream_idx=stream, variant_label=label)


class Frozen:
    """A key that hashes by value, as SGLang's does."""

    def __init__(self, size, label=None):
        self.size, self.stream_idx, self.variant_label = size, None, label

    def __hash__(self):
        return hash((self.size, self.variant_label))

    def __eq__(self, other):
        return (self.size, self.variant_label) == (other.size, other.variant_label)


def test_captures_and_replays_are_entered():
    """Bytes, seconds and hits of every key are SGLang's own; what it returns is untouched."""
    registry = GraphRegistry()
    backend = mirror(BreakableCudaGraphBackend(), registry, PREFILL, device=Device())
    for size in (128, 64):
        backend.capture_one(Frozen(size), lambda size=size: f"graph {size}")
    assert backend.replay(Frozen(64), "batch", more=1) == ("graph 64", "batch", {"more": 1})
    backend.replay(Frozen(64), "batch")
    record = registry.record(GraphKey(Part.PIECEWISE, 64))
    assert (record.state, record.hits, record.bytes) == (GraphState.CAPTURED, 2, 1 << 20)
    assert record.seconds > 0
    assert registry.unused() == (GraphKey(Part.PIECEWISE, 128),)


def serving(*, width=1):
    """A state whose decode graphs of 1 and 8 are captured while SGLang serves, their backend, and the runner."""
    state = State(Config(quick_capture=False, quick_padding=False), "0.5.16")
    model_runner = SimpleNamespace(server_args=SimpleNamespace(tp_size=1), attn_backend=None)
    attach(model_runner, state)
    runner = runner_of(model_runner=model_runner, capture_bs=[1, 8], captured_req_width=width)
    backend = hooks.decode_backend(lambda _: FullCudaGraphBackend(), runner)
    hooks._take(state, runner, Phase(DECODE, (1, 8), 8, full=True))
    state.serving.append(True)
    return state, backend, runner


def hits(state):
    return {(record.key.num_reqs, record.key.lora_case): record.hits for record in state.registry.records()}


def test_steps_tell_the_hits():
    """So that nothing of kpolicy's is called at a replay; a graph that isn't in the registry is noted."""
    state, backend, runner = serving()
    backend.capture_one(Frozen(8), lambda: 1)
    assert "replay" not in vars(backend)
    for size, found in ((3, 1), (8, 2), (3, 3)):
        assert dispatch.decode_can_run(always(True), runner, batch_of(size)) is True
        assert hits(state) == {(8, 0): found}
    dispatch.decode_can_run(always(False), runner, batch_of(3))
    dispatch.decode_can_run(always(True), runner, batch_of(1))
    assert hits(state) == {(8, 0): 3}
    assert state.failures.counts == {"counting replays": 1}


def test_graphs_of_one_size_are_told_apart_as_they_replay():
    """Those with and without LoRA; what steps told of before stays, and isn't counted twice."""
    state, backend, runner = serving()
    backend.capture_one(Frozen(8, "nolora"), lambda: 1)
    dispatch.decode_can_run(always(True), runner, batch_of(3))
    for size in (8, 1):
        backend.capture_one(Frozen(size, "lora"), lambda: 2)
    for label in ("lora", "lora", "nolora"):
        dispatch.decode_can_run(always(True), runner, batch_of(3))
        backend.replay(Frozen(8, label), "batch")
    assert hits(state) == {(8, 0): 2, (8, 1): 2, (1, 1): 0}


def test_drafts_are_counted_as_they_replay():
    """kpolicy decides no step of theirs."""
    _, backend, _ = serving(width=4)
    assert "replay" in vars(backend)


def test_backend_keeps_its_type():
    """SGLang asks for the type of a backend."""
    assert isinstance(mirror(BreakableCudaGraphBackend(), GraphRegistry(), PREFILL, device=None), FullCudaGraphBackend)


def test_failed_capture_is_recorded_and_goes_on():
    """A capture that fails is SGLang's to handle; the registry has it as failed."""
    registry = GraphRegistry()
    backend = mirror(FullCudaGraphBackend(), registry, DECODE, device=None)

    def fails():
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        backend.capture_one(Frozen(8), fails)
    (record,) = registry.records()
    assert (record.state, record.reason) == (GraphState.FAILED, Reason.CAPTURE_OUT_OF_MEMORY)


def test_cleaning_up_gives_the_generation_back():
    """SGLang recaptures after a clean-up: the keys are planned again, and captured anew."""
    registry = GraphRegistry()
    backend = mirror(FullCudaGraphBackend(), registry, DECODE, device=Device())
    backend.capture_one(Frozen(8), lambda: 1)
    backend.cleanup()
    assert backend.cleaned == 1
    assert registry.totals().bytes_held == 0
    backend.capture_one(Frozen(8), lambda: 2)
    assert registry.captured() == (GraphKey(Part.FULL, 8, 8, query_len=1),)


def test_backend_made_anew_takes_the_place_of_the_last():
    """A second start of the graphs has the same keys."""
    registry = GraphRegistry()
    for _ in range(2):
        backend = mirror(FullCudaGraphBackend(), registry, DECODE, device=None)
        backend.capture_one(Frozen(8), lambda: 1)
    assert len(registry.captured()) == 1


@pytest.mark.parametrize(
    ("given", "phase", "full", "width", "key"),
    [
        (shape(8), DECODE, True, 1, GraphKey(Part.FULL, 8, 8, query_len=1)),
        (shape(8), DECODE, True, 4, GraphKey(Part.FULL, 32, 8, query_len=4)),
        (shape(8, label="lora"), DECODE, True, 1, GraphKey(Part.FULL, 8, 8, query_len=1, lora_case=1)),
        (shape(8, label="nolora"), DECODE, True, 1, GraphKey(Part.FULL, 8, 8, query_len=1)),
        (shape(8, stream=1), DECODE, True, 1, GraphKey(Part.FULL, 8, 8, query_len=1, variant="stream1")),
        (shape(96), PREFILL, False, 1, GraphKey(Part.PIECEWISE, 96)),
        (shape(96, label="prefix4"), PREFILL, True, 1, GraphKey(Part.FULL, 96, variant="prefix4")),
    ],
)
def test_keys(given, phase, full, width, key):
    """Every field of SGLang's key tells two graphs apart here too."""
    assert key_of(given, phase, full=full, width=width) == key


def test_attention_variants_are_keys_of_their_own():
    """0.5.23 captures several graphs of a size for some attention backends."""
    sparse = SimpleNamespace(size=8, stream_idx=None, variant_label=None, attention_variant="sparse")
    assert key_of(sparse, DECODE, full=True).variant == "sparse"


def test_what_cannot_be_entered_is_captured_all_the_same(caplog):
    """A graph that the registry has already, or a device that tells no memory, costs the entry and not the start."""
    failures, backend = Failures(), FullCudaGraphBackend()
    mirror(backend, GraphRegistry(), DECODE, device=SimpleNamespace(), failures=failures)
    for turn in range(2):
        backend.capture_one(Frozen(8), lambda turn=turn: turn)
    assert backend.replay(Frozen(8), "batch")[0] == 1
    assert failures.total == 1
    assert "the graph is captured and isn't in the registry" in caplog.text


@pytest.mark.parametrize(("sizes", "kept"), [([1, 8], True), ([1, 4], False)])
def test_a_runner_made_anew_while_serving(sizes, kept, caplog):
    """After a change of weights SGLang captures again: the same sizes go on as before, others are SGLang's."""
    state = State(Config(), "0.5.16")
    state.phases[DECODE] = Phase(DECODE, (1, 8), 8, full=True)
    model_runner = SimpleNamespace(server_args=SimpleNamespace(tp_size=1), attn_backend=None)
    attach(model_runner, state)
    runner = SimpleNamespace(model_runner=model_runner, capture_bs=sizes, captured_req_width=1)
    backend = hooks.decode_backend(lambda _: FullCudaGraphBackend(), runner)
    assert (dispatch.phase_of(runner) is state.phases[DECODE]) == kept
    # Steps that no phase counts are counted as they replay.
    assert ("replay" in vars(backend)) != kept
    assert ("of other sizes than before" in caplog.text) != kept


class Runner(SimpleNamespace):
    """A graph runner that can be asked whether it is still there."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("dropped", [True, False])
def test_graphs_that_sglang_drops_are_gone_before_the_next_capture(dropped):
    """It captures anew in their memory, and needs no collector for that; a runner that it keeps stays kpolicy's."""
    state, passed = State(Config(), "0.5.16"), []
    model_runner = SimpleNamespace(server_args=SimpleNamespace(tp_size=1), attn_backend=None)
    attach(model_runner, state)

    def made():
        question = around(always(True), dispatch.decode_can_run, passed)
        runner = hooked("can_run_graph", question, base=Runner)(**vars(runner_of()))
        fill = around(Buffers.fill_from, padding.fill_from, passed)
        buffers = hooked("fill_from", fill, base=Buffers)()
        runner.__dict__.update(
            model_runner=model_runner, capture_bs=[1, 8], buffer_registry=buffers, require_gathered_buffer=False
        )
        runner.backend = hooks.decode_backend(lambda _: FullCudaGraphBackend(), runner)
        return runner

    model_runner.decode_cuda_graph_runner = made()
    hooks._take(state, model_runner.decode_cuda_graph_runner, Phase(DECODE, (1, 8), 8, full=True))
    old = model_runner.decode_cuda_graph_runner
    gone = [weakref.ref(each) for each in (old, old.backend, old.buffer_registry)]
    assert {"can_run_graph"} <= vars(old).keys()
    assert {"fill_from"} <= vars(old.buffer_registry).keys()
    gc.disable()
    try:
        if dropped:
            model_runner.decode_cuda_graph_runner = None
            del old
        new = made()
        assert [each() is None for each in gone] == [dropped] * 3
    finally:
        gc.enable()
    assert dispatch.phase_of(new) is state.phases[DECODE]
    if not dropped:
        assert dispatch.phase_of(old) is state.phases[DECODE]
