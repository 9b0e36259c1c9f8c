"""Who clears what a batch leaves empty, over pretended buffers; test_oracle_padding.py has the real ones."""

import threading
from types import SimpleNamespace

import pytest

from kpolicy_sglang import hooks, padding
from kpolicy_sglang.config import Config
from kpolicy_sglang.failures import Failures
from kpolicy_sglang.phase import DECODE, PREFILL
from kpolicy_sglang.state import State, attach
from kpolicy_sglang.versions import KNOWN
from tests.integrations.sglang.test_hooks import graph_runner, model_runner, start

pytest.importorskip("torch")


class Buffers:
    """A registry of buffers without any."""

    device, max_bs, max_num_tokens = "cpu", 8, 8

    def __init__(self, **slots):
        self._slots = slots

    def fill_from(self, forward_batch, *, raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, pp_proxy_tensors=None):
        """Brings a batch in by the copy of this module."""


def _grouped_foreach_copy_(dsts, srcs):
    """What a fill calls by its name."""


class BreakableCudaGraphBackend:
    """As much of one as is wrapped."""

    def __init__(self):
        self.captured = []
        self.replay = self.cleanup = lambda *_, **__: None

    def capture_one(self, shape, *_, **__):
        self.captured.append((shape.size, list(padding._clearing)))


class FullCudaGraphBackend(BreakableCudaGraphBackend):
    """Its graphs have attention inside."""


@pytest.fixture(autouse=True)
def _configured():
    yield
    hooks.configure(None)


def taken(runner):
    tails = getattr(runner.buffer_registry, padding._ATTRIBUTE, None)
    return tails is not None and not tails.off


@pytest.mark.parametrize(("version", "set_on", "on"), [
    ("0.5.16", True, True), ("0.5.16.post1", True, True), ("0.5.16", False, False), ("0.5.23", True, False),
])  # fmt: skip
def test_both_phases_buffers_are_taken_once_graphs_are_there(version, set_on, on):
    """KPOLICY_QUICK_PADDING=0 leaves them to SGLang, and so does 0.5.23."""
    hooks.configure(Config(quick_padding=set_on, calibrate=False), version)
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


def test_a_fill_that_takes_something_else_is_left_to_sglang(caplog):
    """Its arguments are handed on one by one, so that each has to be known."""

    class More(Buffers):
        def fill_from(self, forward_batch, *, rows):
            """Of another version."""

    hooks.configure(Config(calibrate=False), "0.5.16")
    decode = graph_runner(buffer_registry=More())
    state = start(model_runner(), decode, None)
    assert not taken(decode)
    assert state.failures.total == 1
    assert "takes self, forward_batch, rows" in caplog.text


def test_a_copy_by_another_name_leaves_buffers_to_sglang(monkeypatch):
    """What is cleared goes with the copy, which is called by its name."""
    monkeypatch.delitem(globals(), "_grouped_foreach_copy_")
    hooks.configure(Config(calibrate=False), "0.5.16")
    decode = graph_runner(buffer_registry=Buffers())
    state = start(model_runner(), decode, None)
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


class Filled(Buffers):
    """Buffers of one slot, whose fill copies three rows by SGLang's name for it."""

    def __init__(self, wait=lambda: None):
        import torch

        policy = SimpleNamespace(name="ZERO")
        self.rows = torch.full((8,), 7)
        super().__init__(ids=SimpleNamespace(
            name="ids", axis="tokens", buffer=self.rows, padding_policy=policy, enabled=True, slice_fn=None,
            post_fill=None,
        ))  # fmt: skip
        self.wait, self.failures = wait, Failures()
        padding.take_tails(SimpleNamespace(buffer_registry=self, require_gathered_buffer=False), self.failures)

    def fill_from(
        self, forward_batch, *, raw_bs, padded_bs, raw_num_tokens,  # noqa: ARG002
        padded_num_tokens, pp_proxy_tensors=None,  # noqa: ARG002
    ):  # fmt: skip
        self.wait()
        _grouped_foreach_copy_([self.rows[:raw_num_tokens]], [forward_batch.ids])

    def filled(self):
        """The rows after a batch of three of a graph of four."""
        import torch

        sizes = {"raw_bs": 3, "padded_bs": 4, "raw_num_tokens": 3, "padded_num_tokens": 4}
        padding.fill_from(Filled.fill_from, self, SimpleNamespace(ids=torch.arange(1, 4)), **sizes)
        return self.rows.tolist()


def _copy_each(dsts, srcs):
    for into, source in zip(dsts, srcs, strict=True):
        into.copy_(source)


def test_a_fill_takes_empty_rows_along_and_leaves_sglangs_copy(monkeypatch):
    """One launch for both, and the copy by SGLang's name is SGLang's again."""
    copied = []

    def copy(dsts, srcs):
        copied.append(len(dsts))
        _copy_each(dsts, srcs)

    monkeypatch.setitem(globals(), "_grouped_foreach_copy_", copy)
    buffers = Filled()
    assert buffers.filled() == [1, 2, 3, 0, 7, 7, 7, 7]
    assert copied == [2]
    assert _grouped_foreach_copy_ is copy


class Noted(Buffers):
    """Buffers with a slot that SGLang clears, and what a fill was given."""

    def __init__(self):
        import torch

        self.given, self.reset = [], []
        super().__init__(wide=SimpleNamespace(
            name="wide", axis="tokens", buffer=torch.zeros((8, 2)), padding_policy=SimpleNamespace(name="ZERO"),
            enabled=True, slice_fn=None, post_fill=None, reset_padding=lambda *rows: self.reset.append(rows),
            _raw_n=lambda _, tokens: tokens, _padded_n=lambda _, tokens: tokens,
        ))  # fmt: skip
        padding.take_tails(SimpleNamespace(buffer_registry=self, require_gathered_buffer=False), Failures())

    def fill_from(
        self, forward_batch, *, raw_bs, padded_bs, raw_num_tokens,  # noqa: ARG002
        padded_num_tokens, pp_proxy_tensors=None,
    ):  # fmt: skip
        self.given.append((raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, pp_proxy_tensors))
        _grouped_foreach_copy_([], [])
        return "filled"


def test_sglang_is_given_a_padded_batch_as_one_without_padding():
    """Else it would clear all of it again; what kpolicy doesn't clear is told it, and a stage's tensors get there."""
    buffers, tensors = Noted(), object()
    asked = padding._asked(getattr(buffers, padding._ATTRIBUTE), Noted.fill_from, buffers)
    for tokens, padded in ((3, 4), (4, 4)):
        sizes = {"raw_bs": 2, "padded_bs": 2, "raw_num_tokens": tokens, "padded_num_tokens": padded}
        assert asked(SimpleNamespace(), **sizes, pp_proxy_tensors=tensors) == "filled"
    assert buffers.given == [(2, 2, 3, 3, tensors), (2, 2, 4, 4, tensors)]
    assert buffers.reset == [(3, 4)]
    asked(SimpleNamespace(), raw_bs=3, padded_bs=4, raw_num_tokens=3, padded_num_tokens=4)
    assert buffers.given[-1] == (3, 3, 3, 3, None)


def test_fills_that_overlap_leave_sglangs_copy(monkeypatch):
    """One begins within another and ends after it: both are padded, and nothing of kpolicy's stays."""
    monkeypatch.setitem(globals(), "_grouped_foreach_copy_", _copy_each)
    inside, rows = threading.Event(), {}
    first = Filled(wait=lambda: inside.wait(10))
    thread = threading.Thread(target=lambda: rows.update(first=first.filled()))

    def second_inside():
        inside.set()
        thread.join(10)

    second = Filled(wait=second_inside)
    thread.start()
    while _grouped_foreach_copy_ is _copy_each and thread.is_alive():
        pass
    rows["second"] = second.filled()
    assert rows["first"] == rows["second"] == [1, 2, 3, 0, 7, 7, 7, 7]
    assert _grouped_foreach_copy_ is _copy_each
    assert not first.failures.total + second.failures.total


@pytest.mark.parametrize(("version", "phase", "on", "ranks", "made", "cleared"), [
    ("0.5.16", PREFILL, True, 1, BreakableCudaGraphBackend, [129]),
    ("0.5.16", PREFILL, False, 1, BreakableCudaGraphBackend, []),
    ("0.5.16", PREFILL, True, 2, BreakableCudaGraphBackend, []),
    ("0.5.16", PREFILL, True, 1, FullCudaGraphBackend, []),
    ("0.5.16", DECODE, True, 1, BreakableCudaGraphBackend, []),
    ("0.5.23", PREFILL, True, 1, BreakableCudaGraphBackend, []),
])  # fmt: skip
def test_prompts_graphs_alone_clear_rows(version, phase, on, ranks, made, cleared):
    """A graph of 256 tokens clears from row 129 on where the next smaller one is of 128; of one rank, on 0.5.16."""
    backend, runner = made(), graph_runner(capture_num_tokens=[64, 128, 256])
    runner.model_runner = model_runner(attn_backend=None)
    attach(runner.model_runner, State(Config(quick_padding=on, quick_capture=False), version))
    runner.model_runner.server_args.tp_size, runner.model_runner.tp_group = ranks, object()
    hooks._mirrored(backend, runner, phase)
    backend.capture_one(SimpleNamespace(size=256, variant_label=None, stream_idx=None))
    assert backend.captured == [(256, cleared)]
    assert not padding._clearing


def test_inputs_are_hooked_on_one_version_alone():
    """0.5.23 brings a batch in by another copy, which rows beside it make dearer."""
    wanted = {padding.fill_from, padding.attention_0_5_16}
    hooked = {name: wanted & {hook.around for hook in version.hooks} for name, version in KNOWN.items()}
    assert hooked == {"0.5.16": wanted, "0.5.23": set()}
