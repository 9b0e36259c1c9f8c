"""What a server runs before requests that are measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kpolicy.errors import GraphReplayError
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part
from kpolicy.registry import GraphRegistry
from kpolicy.serving.warm_up import warm_up
from kpolicy.settings import Settings
from tests.executors_launcher.test_whole_table import Machine, keys

SETTINGS = Settings(max_num_reqs=64, max_num_tokens=512)
MODEL: Any = SimpleNamespace(vocab=100, pad_slot=65_536, num_blocks=4096, block_size=16, max_model_len=400)


class Told(Machine):
    """Notes what runs; graphs of one size fail before they launch."""

    def __init__(self, graphs: list[GraphKey], fails: int = 0) -> None:
        super().__init__(graphs)
        self.ran: list[tuple[Mode, GraphKey | None, int, int]] = []
        self._fails = fails

    def run(self, decision: Any, inputs: Any) -> Any:
        launch, numbers = decision.launches[0], inputs.numbers
        if launch.key is not None and launch.key.num_tokens == self._fails:
            raise GraphReplayError(launch.key, "it moved")
        self.ran.append((decision.mode, launch.key, numbers.num_decodes, numbers.num_prefill_tokens))
        assert set(inputs.slot_mapping) == {MODEL.pad_slot}
        return super().run(decision, inputs)


def captured(graphs: list[GraphKey]) -> GraphRegistry:
    registry = GraphRegistry()
    registry.plan(graphs)
    for key in graphs:
        registry.capture(key, bytes=1, seconds=0.1, streams=0, graphs=1, pool="machine/full", handle=None)
    return registry


def test_every_graph_runs_once_and_eager_sizes_throughout() -> None:
    """Decode graphs on decode rows, the others on a prompt that the model has room for; no graph counts a hit."""
    machine, registry = Told(keys()), captured(keys())
    count = warm_up(machine, registry, MODEL, SETTINGS)
    graphs = {key: (mode, decodes, new) for mode, key, decodes, new in machine.ran if key is not None}
    assert count == len(machine.ran)
    assert graphs == {
        key: (Mode.PIECEWISE, 0, min(key.num_tokens, 400))
        if key.part is Part.PIECEWISE
        else (Mode.FULL, key.num_tokens, 0)
        if key.decode_only
        else (Mode.FULL, 0, min(key.num_tokens, 400))
        for key in keys()
    }
    eager = [new for mode, key, _, new in machine.ran if key is None]
    assert len(machine.ran) == len(keys()) + len(eager)
    assert (eager[0], eager[-1], len(eager)) == (12, 400, 32)
    assert set(registry.unused()) == set(keys())


def test_a_graph_that_fails_is_left_to_the_step_that_needs_it() -> None:
    machine = Told(keys(), fails=64)
    failing = sum(key.num_tokens == 64 for key in keys())
    assert failing == 3
    assert warm_up(machine, captured(keys()), MODEL, SETTINGS) == len(keys()) - failing + 32


def test_graphs_of_others_and_of_drafts_are_left_alone() -> None:
    """A registry that Engines share has other executors' graphs too."""
    drafts = GraphKey(Part.FULL, 24, 8, query_len=3)
    machine = Told([drafts])
    warm_up(machine, captured([*keys(), drafts]), MODEL, SETTINGS)
    assert {key for _, key, _, _ in machine.ran} == {None}


def test_nothing_runs_where_the_host_runs_the_launches() -> None:
    machine = Told(keys())
    machine.host_runs = True
    assert warm_up(machine, captured(keys()), MODEL, SETTINGS) == 0
    assert not machine.ran
