"""The vote on a decode step: a rank may only take SGLang's yes back, and only where its policy knows costs."""

from types import SimpleNamespace

import pytest

from kpolicy.settings import Objective
from kpolicy_sglang import dispatch, hooks, votes
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, Phase, table_of
from kpolicy_sglang.state import State


@pytest.fixture(autouse=True)
def _nobody():
    yield
    votes.speak_for(None)


def phase_of(graph_us, policy="auto"):
    phase = Phase(DECODE, (8, 64), 100, full=True)
    costs = None if graph_us is None else table_of("test", dict.fromkeys((8, 64), graph_us), {1: 1000})
    phase.install(policy, costs, Objective())
    return phase


def batch_of(size, kind="decode"):
    return SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: kind == "decode"), batch_size=lambda: size)


def runner_of(phase):
    decode = SimpleNamespace()
    if phase is not None:
        setattr(decode, dispatch.ATTRIBUTE, phase)
    return SimpleNamespace(decode_cuda_graph_runner=decode)


def voted(batch, *, sglangs=True):
    """The votes of both releases: what 0.5.23 casts, and whether 0.5.16 is told that graphs are off."""
    told = []

    def raw(local_batch, *, dp_size, disable_cuda_graph):
        told.append((local_batch, dp_size, disable_cuda_graph))
        return "synced"

    newer = votes.decode_vote(lambda **_: sglangs, local_batch=batch, disable_cuda_graph=not sglangs)
    assert votes.decode_vote_0_5_16(raw, batch, dp_size=2, disable_cuda_graph=not sglangs) == "synced"
    assert told == [(batch, 2, not newer)]
    return newer


@pytest.mark.parametrize(
    ("graph_us", "policy", "size", "vote"),
    [
        (100, "auto", 5, True),
        (5000, "auto", 5, False),
        # No costs: SGLang's own rule stands in, and stays.
        (None, "auto", 5, True),
        # Above the largest size SGLang says no itself, once it knows what others have.
        (5000, "auto", 65, True),
        (None, "sglang", 5, True),
        (None, "eager", 5, False),
    ],
)
def test_own_rows_decide(graph_us, policy, size, vote):
    """Where the policy has this rank's rows eager its vote is no; never yes where SGLang's is no."""
    votes.speak_for(runner_of(phase_of(graph_us, policy)))
    assert voted(batch_of(size)) is vote
    assert voted(batch_of(size), sglangs=False) is False


@pytest.mark.parametrize("batch", [None, batch_of(5, "extend"), batch_of(0, "idle")])
def test_others_than_decodes_are_sglangs(batch):
    """A rank without a batch, an idle one and prompts: what SGLang says."""
    votes.speak_for(runner_of(phase_of(5000)))
    assert voted(batch) is True


def test_runners_that_are_left_alone():
    """Nothing is attached, or nothing any more."""
    votes.speak_for(runner_of(None))
    assert voted(batch_of(5)) is True
    votes.speak_for(runner_of(phase_of(5000)))
    assert voted(batch_of(5)) is False
    hooks.configure(None)
    assert voted(batch_of(5)) is True


def test_a_vote_that_raises_is_sglangs(caplog):
    """Whatever is wrong with a batch, the vote is cast, and that is said once."""
    phase = phase_of(5000)
    votes.speak_for(runner_of(phase))
    for _ in range(2):
        assert voted(SimpleNamespace(forward_mode=None)) is True
    assert caplog.text.count("the decode vote raised") == 1
    assert phase.failures.total == 4


def test_set_up_speaks_for_the_runner(monkeypatch):
    """After the captures votes are of the runner that was attached to, and no more after kpolicy fell back."""
    made = SimpleNamespace(
        is_draft_worker=False, prefill_cuda_graph_runner=None, req_to_token_pool=SimpleNamespace(size=64),
        server_args=SimpleNamespace(tp_size=1, enable_metrics=False),
        decode_cuda_graph_runner=SimpleNamespace(captured_req_width=1, capture_bs=[8, 64], require_mlp_sync=True),
    )  # fmt: skip
    hooks.configure(Config(policy="eager"), "0.5.23")
    hooks.init_cuda_graphs(lambda _: None, made)
    assert voted(batch_of(5)) is False
    made.is_draft_worker = True
    hooks.init_cuda_graphs(lambda _: None, SimpleNamespace(**vars(made)))
    assert voted(batch_of(5)) is False
    made.is_draft_worker = False

    def fails(self, tables):
        raise ValueError

    monkeypatch.setattr(State, "install", fails)
    hooks.init_cuda_graphs(lambda _: None, made)
    assert voted(batch_of(5)) is True
    hooks.configure(None)
