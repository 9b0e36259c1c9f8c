"""Captures with one warm-up, and one walk through Python's objects."""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kpolicy.registry import GraphRegistry
from kpolicy_sglang import captures, hooks
from kpolicy_sglang.captures import OneWarmUp, collected_once, freeze_gc, needs_one_warm_up
from kpolicy_sglang.config import Config
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.mirror import mirror
from kpolicy_sglang.phase import DECODE
from kpolicy_sglang.state import State, attach, state_of
from tests.integrations.sglang.test_mirror import Frozen


class FullCudaGraphBackend:
    """Captures as both releases do: two warm-ups, each with a barrier and the hook after it, then the step itself."""

    def __init__(self, warm_ups=2):
        self.warm_ups, self.barriers, self.graphs, self.warm = warm_ups, 0, {}, {}
        self.capturing = self.fails = False

    def is_current_stream_capturing(self):
        return self.capturing

    def capture_one(self, shape, forward, *, post_warmup_hook=None, **_rest):
        for _ in range(self.warm_ups):
            self.barriers += 1
            self.warm[shape] = forward()
            if post_warmup_hook is not None:
                post_warmup_hook()
        self.capturing = True
        try:
            if self.fails:
                raise RuntimeError(self.fails)
            self.graphs[shape] = forward()
        finally:
            self.capturing = False

    def replay(self, shape, batch, **_rest):
        return self.graphs[shape], batch

    def cleanup(self):
        self.graphs.clear()


class Steps:
    """A step that gives how often it ran, for each size."""

    def __init__(self):
        self.ran = {}

    def of(self, size):
        def forward():
            self.ran[size] = self.ran.get(size, 0) + 1
            return (size, self.ran[size])

        return forward


def captured(backend, sizes, failures=None, **how):
    quick, steps = OneWarmUp(backend.capture_one, backend, failures or Failures()), Steps()
    for size in sizes:
        quick(Frozen(size), steps.of(size), **how)
    return steps.ran


def after_the_first() -> tuple[FullCudaGraphBackend, Steps, Failures, OneWarmUp]:
    """Captures with one warm-up, of which the first, of size 8, is done."""
    backend, steps, failures = FullCudaGraphBackend(), Steps(), Failures()
    quick = OneWarmUp(backend.capture_one, backend, failures)
    quick(Frozen(8), steps.of(8))
    return backend, steps, failures, quick


def test_the_second_warm_up_of_a_further_size_is_left_out():
    """The first graph has both; later ones have the first's output for the second, and the step itself captured."""
    backend, hooked = FullCudaGraphBackend(), []
    ran = captured(backend, (8, 4, 2), post_warmup_hook=lambda: hooked.append(1))
    assert ran == {8: 3, 4: 2, 2: 2}
    assert backend.warm[Frozen(4)] == (4, 1)
    assert backend.graphs == {Frozen(8): (8, 3), Frozen(4): (4, 2), Frozen(2): (2, 2)}
    assert (backend.barriers, len(hooked)) == (6, 6)


@pytest.mark.parametrize("field", ["variant_label", "stream_idx", "attention_variant"])
def test_each_kind_of_graph_has_a_first(field):
    """Graphs of LoRA, of another stream or attention are other kernels: their first has both warm-ups too."""
    backend, steps = FullCudaGraphBackend(), Steps()
    quick = OneWarmUp(backend.capture_one, backend, Failures())
    for name, label in (("a", None), ("b", "other"), ("c", "other"), ("d", None)):
        shape = Frozen(name)
        setattr(shape, field, label)
        quick(shape, steps.of(name))
    assert steps.ran == {"a": 3, "b": 3, "c": 2, "d": 2}


def test_a_first_graph_that_failed_was_none():
    """Where SGLang tries it again it has both warm-ups."""
    backend, steps = FullCudaGraphBackend(), Steps()
    quick = OneWarmUp(backend.capture_one, backend, Failures())
    backend.fails = "not yet"
    with pytest.raises(RuntimeError, match="not yet"):
        quick(Frozen(8), steps.of(8))
    backend.fails = False
    quick(Frozen(4), steps.of(4))
    assert steps.ran[4] == 3


def test_no_output_is_kept_while_a_graph_is_captured():
    """Memory of a warm-up is the capture's: nothing of it is alive by then."""

    class Output:
        alive = 0

        def __init__(self):
            type(self).alive += 1

        def __del__(self):
            type(self).alive -= 1

    alive = []

    class Backend(FullCudaGraphBackend):
        def capture_one(self, shape, forward, **_rest):
            for _ in range(2):
                forward()
            alive.append(Output.alive)
            self.graphs[shape] = forward()

    captured_by = OneWarmUp(Backend().capture_one, Backend(), Failures())
    for size in (8, 4):
        captured_by(Frozen(size), Output)
        alive.append(Output.alive)
    assert alive[0] == 0
    assert alive[2] == 1  # the first graph's own output


@pytest.mark.parametrize("warm_ups", [1, 3])
def test_another_procedure_is_left_to_sglang(warm_ups, caplog):
    """Where the step is called otherwise than is known, the graph is captured by SGLang alone, and so are all after."""
    backend, failures = FullCudaGraphBackend(warm_ups), Failures()
    ran = captured(backend, (8, 4, 2), failures)
    assert ran[8] == ran[2] == warm_ups + 1
    assert backend.graphs[Frozen(2)] == (2, warm_ups + 1)
    assert backend.graphs[Frozen(4)][1] == ran[4]
    assert failures.total == (0 if warm_ups == 1 else 1)
    assert ("SGLang called the step 4 times for a graph, 3 are known" in caplog.text) == (warm_ups == 3)


def test_a_failed_capture_is_tried_once_by_sglangs_own_procedure(caplog):
    """One warning, both warm-ups from then on; a second failure is SGLang's to handle."""
    backend, steps, failures, quick = after_the_first()

    def once():
        steps.ran[4] = steps.ran.get(4, 0) + 1
        if backend.capturing and steps.ran[4] == 2:
            raise RuntimeError("not loaded")
        return steps.ran[4]

    quick(Frozen(4), once)
    quick(Frozen(2), steps.of(2))
    assert (backend.graphs[Frozen(4)], steps.ran[2]) == (5, 3)
    assert "a capture with one warm-up raised, and graphs are captured by SGLang's own procedure" in caplog.text
    assert failures.total == 1
    backend.fails = "broken"
    with pytest.raises(RuntimeError, match="broken"):
        quick(Frozen(1), steps.of(1))


def test_no_memory_is_sglangs_to_handle_at_once():
    """A second try would have no more of it."""
    backend, steps, failures, quick = after_the_first()
    backend.fails = "CUDA out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        quick(Frozen(4), steps.of(4))
    assert (steps.ran[4], failures.total) == (1, 0)


def test_a_capture_that_fails_either_way_is_not_noted():
    """Its failure isn't of the one warm-up, which later graphs still have."""
    backend, steps, failures, quick = after_the_first()
    backend.fails = "broken"
    with pytest.raises(RuntimeError, match="broken"):
        quick(Frozen(4), steps.of(4))
    backend.fails = ""
    quick(Frozen(2), steps.of(2))
    assert (steps.ran[2], failures.total) == (2, 0)


def test_no_memory_is_seen_in_what_led_to_an_error():
    """Errors that came after one another in a circle have an end too."""
    error = AssertionError()
    error.__context__ = MemoryError("CUDA out of memory")
    error.__context__.__context__ = error
    assert captures.no_memory(error)
    error.__context__ = ValueError()
    error.__context__.__context__ = error
    assert not captures.no_memory(error)


def test_a_failed_capture_keeps_no_tensors():
    """The next attempt needs their memory."""

    class Tensor:
        pass

    def capture(kept):
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        raise RuntimeError

    kept = []
    try:
        capture(kept)
    except RuntimeError as error:
        failed = captures.without_frames(error)
    assert failed.__traceback__ is not None
    assert kept[0]() is None


@pytest.mark.parametrize(("one_warm_up", "ran"), [(True, 2), (False, 3)])
def test_mirror_asks_for_it(one_warm_up, ran):
    """The registry has the graph either way; the setting says how it is captured."""
    registry, steps, backend = GraphRegistry(), Steps(), FullCudaGraphBackend()
    mirror(backend, registry, DECODE, device=backend, one_warm_up=one_warm_up)
    for size in (8, 4):
        backend.capture_one(Frozen(size), steps.of(size))
    assert steps.ran[4] == ran
    assert len(registry.captured()) == 2


class AttentionBackend:
    """As SGLang's: nothing to set back after a warm-up."""

    def on_after_cuda_graph_warmup(self):
        pass


class TritonAttnBackend(AttentionBackend):
    """Has SGLang's own."""


class DeepseekV4AttnBackend(AttentionBackend):
    """Sets back what a warm-up changed."""

    def on_after_cuda_graph_warmup(self):
        pass


def runner(attention=TritonAttnBackend, **args):
    made = SimpleNamespace(tp_size=1, **args)
    return SimpleNamespace(
        model_runner=SimpleNamespace(server_args=made, attn_backend=attention(), tp_group=object()),
    )


class TcPiecewiseCudaGraphBackend(FullCudaGraphBackend):
    """Captures at its second warm-up."""


@pytest.mark.parametrize(
    ("backend", "given", "enough"),
    [
        (FullCudaGraphBackend, runner(), True),
        (TcPiecewiseCudaGraphBackend, runner(), False),
        (FullCudaGraphBackend, runner(DeepseekV4AttnBackend), False),
        (FullCudaGraphBackend, runner(enable_torch_compile=True), False),
        (FullCudaGraphBackend, runner(debug_cuda_graph=True), False),
        (FullCudaGraphBackend, runner(speculative_algorithm="EAGLE"), False),
    ],
)
def test_where_one_warm_up_is_enough(backend, given, enough):
    """Backends whose procedure is known, without anything that needs the second call."""
    assert needs_one_warm_up(backend(), given) == enough


def test_several_ranks_keep_both():
    """Their steps have collectives inside."""
    given = runner()
    given.model_runner.server_args.tp_size = 2
    assert not needs_one_warm_up(FullCudaGraphBackend(), given)


THAWED = pytest.mark.usefixtures("thawed")


@contextmanager
def sglangs_freeze_gc(enable_cudagraph_gc):
    """As both releases have it."""
    gc.collect()
    if not enable_cudagraph_gc:
        gc.freeze()
    try:
        yield
    finally:
        if not enable_cudagraph_gc:
            gc.unfreeze()
            gc.collect()


@THAWED
def test_objects_stay_frozen_from_the_first_capture_to_the_last():
    """SGLang's own walks find nothing in between, and afterwards all is as it was."""
    frozen = []
    with collected_once(SimpleNamespace(server_args=SimpleNamespace()), on=True):
        for _ in range(2):
            with freeze_gc(sglangs_freeze_gc, False):
                frozen.append(gc.get_freeze_count())
            frozen.append(gc.get_freeze_count())
    assert min(frozen) > 1000
    assert gc.get_freeze_count() == 0
    with freeze_gc(sglangs_freeze_gc, False):
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


@THAWED
@pytest.mark.parametrize(("on", "enable"), [(False, False), (True, True)])
def test_nothing_is_frozen_where_it_is_not_wanted(on, enable):
    """The setting is off, or SGLang was asked to look at all objects."""
    given = SimpleNamespace(server_args=SimpleNamespace(enable_cudagraph_gc=enable))
    with collected_once(given, on=on):
        assert gc.get_freeze_count() == 0
        with freeze_gc(sglangs_freeze_gc, enable):
            assert (gc.get_freeze_count() > 0) != enable


@THAWED
def test_the_one_walk_comes_before_requests_do():
    """After the captures all objects were walked through, so that Python has no reason for another while it serves."""
    given, walks = SimpleNamespace(server_args=SimpleNamespace()), []

    class Cycle:
        """Garbage that only a walk finds."""

        def __init__(self):
            self.own = self

    kept = [Cycle() for _ in range(50_000)]
    gc.collect()
    gc.callbacks.append(lambda phase, about: walks.append(about["generation"]) if phase == "start" else None)
    try:
        with collected_once(given, on=True):
            assert 2 not in walks
            captured = weakref.ref(Cycle())
        assert (walks.count(2), captured()) == (1, None)
        walks.clear()
        served = [[each] for each in range(20_000)]
        assert 1 in walks
        assert 2 not in walks
    finally:
        gc.callbacks.pop()
    assert len(kept) > len(served)


@THAWED
def test_what_raises_is_unfrozen_too():
    """A capture that ends the start leaves the collector as it was."""
    with pytest.raises(RuntimeError), collected_once(SimpleNamespace(server_args=SimpleNamespace()), on=True):
        raise RuntimeError("capture failed")
    assert gc.get_freeze_count() == 0


def test_a_second_warm_up_is_timed(monkeypatch):
    """That of each kind's first graph: later ones save as much, and a procedure that isn't known tells nothing."""
    backend, told, now_s = FullCudaGraphBackend(), [], 0.0
    monkeypatch.setattr(captures.time, "perf_counter", lambda: now_s)
    takes_s = iter([5.0, 0.25, 0.5, *[1.0] * 9])

    def step():
        nonlocal now_s
        now_s += next(takes_s)

    quick = OneWarmUp(backend.capture_one, backend, Failures(), told.append)
    quick(Frozen(8), step)
    assert told == [0.25]
    quick(Frozen(4), step)
    assert told == [0.25]
    backend.warm_ups = 1
    quick(Frozen(8, "lora"), step)
    assert told == [0.25]


@pytest.mark.parametrize("on", [True, False])
def test_what_captures_saved_is_with_the_state(on):
    """By phase, and the walk: the measuring that comes after goes by it."""
    hooks.configure(Config(quick_capture=on, calibrate=False), "0.5.16")
    given, backend = runner(), FullCudaGraphBackend()
    given.device_module, given.capture_bs = backend, [4, 8]
    model_runner, found = given.model_runner, []
    model_runner.is_draft_worker, model_runner.decode_cuda_graph_runner = False, None
    model_runner.prefill_cuda_graph_runner = None

    def original(_):
        hooks.decode_backend(lambda _: backend, given)
        for size in (8, 4):
            backend.capture_one(Frozen(size), Steps().of(size))
        found.append(state_of(model_runner))

    hooks.init_cuda_graphs(original, model_runner)
    hooks.configure(None)
    savings = found[0].savings
    assert (set(savings.warm_up_s), savings.walk_s > 0) == ({DECODE} if on else set(), on)


@THAWED
@pytest.mark.parametrize("on", [True, False])
def test_the_setting_is_what_the_hooks_go_by(on):
    """KPOLICY_QUICK_CAPTURE=0 keeps SGLang's own procedure: both warm-ups, and its own walks."""
    given = runner()
    state = State(Config(quick_capture=on), "0.5.16")
    attach(given.model_runner, state)
    backend, steps = FullCudaGraphBackend(), Steps()
    given.device_module, given.capture_bs = backend, [4, 8]
    hooks.decode_backend(lambda _: backend, given)
    for size in (8, 4):
        backend.capture_one(Frozen(size), steps.of(size))
    assert steps.ran == {8: 3, 4: 2 if on else 3}
    frozen = []
    hooks.configure(Config(quick_capture=on), "0.5.16")
    started = SimpleNamespace(
        server_args=SimpleNamespace(tp_size=1), is_draft_worker=False, decode_cuda_graph_runner=None,
        prefill_cuda_graph_runner=None,
    )  # fmt: skip
    hooks.init_cuda_graphs(lambda _: frozen.append(gc.get_freeze_count()), started)
    hooks.configure(None)
    assert (frozen[0] > 0) == on
