"""Graphs of drafters and encoders in the registry."""

from types import SimpleNamespace

import attrs

from kpolicy.registry import GraphRegistry
from kpolicy_vllm.mirror import enter_others, others
from kpolicy_vllm.steps import Step
from tests.integrations.vllm.test_dispatch import chooser

FULL, PIECEWISE = SimpleNamespace(name="FULL"), SimpleNamespace(name="PIECEWISE")


class Mode:
    """A mode that can be a key."""

    def __init__(self, name):
        self.name = name


@attrs.frozen
class Desc:
    """What both runners' descriptors have."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    num_active_loras: int = 0
    max_query_len: int | None = None

    @property
    def uniform_token_count(self):
        return 1 if self.uniform else None


def test_every_store():
    """Drafters of both runners and encoders of both releases are found, each graph under a key of its own."""
    first = SimpleNamespace(
        drafter=SimpleNamespace(
            cudagraph_dispatcher=SimpleNamespace(
                cudagraph_keys={Mode("PIECEWISE"): [Desc(4), Desc(8)], Mode("FULL"): [Desc(8, 8, True), Desc(8, 8)]}
            )
        ),
        encoder_cudagraph_manager=SimpleNamespace(budget_graphs={256: object(), 512: object()}),
    )
    second = SimpleNamespace(
        speculator=SimpleNamespace(
            prefill=SimpleNamespace(_capture_descs={Mode("PIECEWISE"): [Desc(8)]}),
            decode=SimpleNamespace(_capture_descs={Mode("FULL"): [Desc(8, 8, True), Desc(8, 8, max_query_len=3)]}),
            other=3,
        ),
        model_state=SimpleNamespace(
            encoder_runner=SimpleNamespace(
                cudagraph_manager=SimpleNamespace(budget_graphs={"image": {(256, 1): 0}, "video": {(256, 1): 0}})
            )
        ),
    )
    for runner, stages in ((first, ["draft"] * 4 + ["encoder"] * 2), (second, ["draft"] * 3 + ["encoder"] * 2)):
        keys = [key for key, _ in others(runner)]
        assert [key.stage for key in keys] == stages
        assert len(set(keys)) == len(keys)
        assert [key.max_query_len for key in keys if key.max_query_len] == [3] * (runner is second)


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


class Graph:
    """A captured graph: how often it replayed."""

    replays = 0

    def replay(self):
        self.replays += 1


def test_replays_of_graphs_that_stand_alone_are_counted():
    """Encoders of both releases and whole graphs of a speculator; a piece has no object of its own."""
    whole, piece = Desc(8, 8, True), Desc(4)
    graphs = [Graph() for _ in range(3)]
    runner = SimpleNamespace(
        encoder_cudagraph_manager=SimpleNamespace(
            budget_graphs={256: SimpleNamespace(graph=graphs[0]), "video": {64: SimpleNamespace(graph=graphs[1])}}
        ),
        speculator=SimpleNamespace(
            decode=SimpleNamespace(
                _capture_descs={Mode("FULL"): [whole], Mode("PIECEWISE"): [piece]}, graphs={whole: graphs[2]}
            )
        ),
    )
    state = chooser().state
    enter_others(state, runner, bytes=0, seconds=0.0)
    for times, graph in enumerate(graphs, 1):
        for _ in range(times):
            graph.replay()
    hits = {(key.stage, key.part.value, key.num_tokens): state.registry.record(key).hits for key, _ in others(runner)}
    assert hits == {("encoder", "full", 256): 1, ("encoder", "full", 64): 2, ("draft", "full", 8): 3,
                    ("draft", "piecewise", 4): 0}  # fmt: skip
    assert [graph.replays for graph in graphs] == [1, 2, 3]
    assert not state.counters.counts


def test_a_replay_that_cannot_be_counted_goes_on(monkeypatch):
    """The graph replays, and the event says that it wasn't counted."""
    state, graph = chooser().state, Graph()
    runner = SimpleNamespace(encoder_cudagraph_manager=SimpleNamespace(budget_graphs={8: SimpleNamespace(graph=graph)}))
    enter_others(state, runner, bytes=0, seconds=0.0)

    def refuses(*_):
        raise KeyError("no such graph")

    monkeypatch.setattr(GraphRegistry, "hit", refuses)
    graph.replay()
    assert graph.replays == 1
    assert state.counters.counts == {"not_recorded": 1}


def test_graphs_under_one_key_are_told():
    """Where two graphs can't be told apart one is entered, and the event says so."""
    state = chooser().state
    desc = Desc(8, 8, True)
    manager = SimpleNamespace(_capture_descs={Mode("FULL"): [desc, desc]}, graphs={desc: Graph()})
    enter_others(state, SimpleNamespace(speculator=SimpleNamespace(decode=manager)), bytes=0, seconds=0.0)
    assert state.counters.counts == {"not_recorded": 1}
