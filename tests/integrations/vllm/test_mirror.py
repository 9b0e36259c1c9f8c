"""Graphs of drafters and encoders in the registry."""

from types import SimpleNamespace

from kpolicy_vllm.mirror import enter_others, others
from kpolicy_vllm.steps import Step
from tests.integrations.vllm.test_dispatch import chooser

FULL, PIECEWISE = SimpleNamespace(name="FULL"), SimpleNamespace(name="PIECEWISE")


class Mode:
    """A mode that can be a key."""

    def __init__(self, name):
        self.name = name


def desc(tokens, reqs=None, uniform=False):
    return SimpleNamespace(
        num_tokens=tokens,
        num_reqs=reqs,
        uniform=uniform,
        num_active_loras=0,
        uniform_token_count=1 if uniform else None,
    )


def test_every_store():
    """Drafters of both runners and encoders of both releases are found, each graph under a key of its own."""
    first = SimpleNamespace(
        drafter=SimpleNamespace(
            cudagraph_dispatcher=SimpleNamespace(
                cudagraph_keys={Mode("PIECEWISE"): [desc(4), desc(8)], Mode("FULL"): [desc(8, 8, True), desc(8, 8)]}
            )
        ),
        encoder_cudagraph_manager=SimpleNamespace(budget_graphs={256: object(), 512: object()}),
    )
    second = SimpleNamespace(
        speculator=SimpleNamespace(
            prefill=SimpleNamespace(_capture_descs={Mode("PIECEWISE"): [desc(8)]}),
            decode=SimpleNamespace(_capture_descs={Mode("FULL"): [desc(8, 8, True)]}),
            other=3,
        ),
        model_state=SimpleNamespace(
            encoder_runner=SimpleNamespace(
                cudagraph_manager=SimpleNamespace(budget_graphs={"image": {(256, 1): 0}, "video": {(256, 1): 0}})
            )
        ),
    )
    for runner, stages in ((first, ["draft"] * 4 + ["encoder"] * 2), (second, ["draft"] * 2 + ["encoder"] * 2)):
        keys = list(others(runner))
        assert [key.stage for key in keys] == stages
        assert len(set(keys)) == len(keys)


def test_none():
    """A runner with neither has none."""
    assert list(others(SimpleNamespace(drafter=None, speculator=None))) == []


def test_entered_beside_the_models_own():
    """What they took beyond the model's graphs is theirs; no step is decided for one of them."""
    made = chooser()
    state = made.state
    before = state.registry.totals()
    ladder = state.ladder.keys
    runner = SimpleNamespace(encoder_cudagraph_manager=SimpleNamespace(budget_graphs={16: 0, 64: 0}))
    enter_others(state, runner, bytes=before.bytes_live + 100, seconds=4.0)
    after = state.registry.totals()
    assert after.bytes_live == before.bytes_live + 100
    assert after.held.seconds == 4.0
    assert state.ladder.keys == ladder
    state.recompile()
    assert made.entry(Step(16, 1, 0)).key.stage == "main"
    assert not state.counters.counts
