"""Capturing: what it costs, what it leaves alone, by need, and how everything is given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError, RegistryError, UnknownNameError  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Part  # noqa: E402
from kpolicy.registry import GraphRegistry, GraphState  # noqa: E402
from kpolicy.scheduling.batching import Batcher, Generation  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_launcher.checker import EAGER, opened, plan  # noqa: E402

SETTINGS = Settings(max_num_reqs=8, max_num_tokens=32)


def test_capturing_writes_no_live_kv(small: Callable[..., Any]) -> None:
    """Recording runs the operators, over padding alone: only the reserved slot changes."""
    model = small()
    for cache in model.kv_caches():
        cache.fill_(3.0)
    opened(model)
    assert all(bool((cache[:-1] == 3.0).all()) for cache in model.kv_caches())
    assert not all(bool((cache[-1] == 3.0).all()) for cache in model.kv_caches())


def test_captures_are_measured_and_estimated(small: Callable[..., Any]) -> None:
    """Bytes are what the device holds more, smaller graphs of a pool take less, and estimates follow captures."""
    model = small()
    executor, registry = CpuExecutor(model, memory_bytes=1 << 30), GraphRegistry()
    registry.plan(plan(model))
    executor.open(registry)
    key = GraphKey(Part.FULL, 4, 4, query_len=1)
    assert executor.launcher.estimate(key).bytes == 0
    executor.capture(plan(model))
    held = registry.totals().held
    eager = sum(buffers.num_bytes for buffers in executor.launcher._eager.values())  # type: ignore[attr-defined]
    assert held.bytes + eager == executor.adapter.memory().used
    pieces = [record for record in registry.records() if record.key.part is Part.PIECEWISE]
    assert {record.graphs for record in pieces} == {len(model.layers) + 1}
    assert min(record.bytes for record in pieces) < max(record.bytes for record in pieces)
    estimate = executor.launcher.estimate(key)
    assert 0 < estimate.seconds < 10
    assert estimate.bytes < held.bytes


def test_release_gives_all_memory_back(small: Callable[..., Any]) -> None:
    """After a release no graph, pool or buffer lives, and the executor can capture and run again."""
    model = small()
    executor, registry = opened(model, memory_bytes=1 << 30)
    sequences = Sequences(1)
    row = sequences.chunk(sequences.start(), 5)
    before = executor.run(EAGER, sequences.inputs([row])).outputs[0]
    held = [weakref.ref(pool.memory) for pool in executor._pools]
    held += [weakref.ref(handle) for handle in executor._handles.values()]
    assert executor.adapter.memory().used > 0
    executor.release()
    gc.collect()
    assert [each() for each in held] == [None] * len(held)
    assert executor.adapter.memory().used == 0
    assert not registry.captured()
    executor.capture(plan(model)[:2])
    assert len(registry.captured()) == 2
    assert torch.equal(executor.run(EAGER, sequences.inputs([row])).outputs[0], before)


def test_a_launch_larger_than_its_graph_is_named(small: Callable[..., Any]) -> None:
    """More rows than the graph has are an error that names both."""
    from kpolicy.decision import Decision, Launch
    from kpolicy.modes import Mode, Rows
    from kpolicy.reasons import Reason

    key = GraphKey(Part.FULL, 2, 2, query_len=1)
    executor, _ = opened(small(), [key])
    sequences = Sequences(1)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 3)])
    with pytest.raises(RegistryError, match="has 2 tokens in 2 rows and was given 3 in 1"):
        executor.run(Decision(Mode.FULL, (Launch(Rows.ALL, key),), Reason.GRAPH_FITS), inputs)


def _serve(engine: Engine, between: Callable[[], Any] = lambda: None) -> list[list[int]]:
    batcher = Batcher(SETTINGS, num_blocks=64, block_size=16)
    requests = [Generation(i, [(7 * i + 3 * j) % 100 for j in range(1 + 5 * i)], 12) for i in range(6)]
    for request in requests:
        batcher.add(request)
    while (batch := batcher.next_batch()) is not None:
        batcher.complete(batch, engine.step(batch.inputs), lambda row: int(row.argmax()))
        between()
    return [request.generated for request in requests]


@pytest.mark.parametrize("policy", ["full", "split", "auto"])
def test_lazy_capture_follows_need(policy: str, small: Callable[..., Any]) -> None:
    """Nothing is captured before a step needed it; what is needed is, and tokens are those of eager steps."""
    expected = _serve(Engine("eager", model=small(), settings=SETTINGS))
    engine = Engine(policy, model=small(), settings=SETTINGS, ladder=[1, 2, 4, 8, 16, 32], lazy=True)
    counts: list[int] = []
    assert _serve(engine, lambda: counts.append(engine.capture_pending(0.5))) == expected
    captured = engine.registry.captured()
    assert sum(counts) == len(captured) > 0
    assert set(captured) < set(engine.keys)
    assert len(engine.registry.unused()) <= 1, "only what the last step needed can be unused"


def test_lazy_capture_takes_what_was_needed_most_and_keeps_to_its_time(small: Callable[..., Any]) -> None:
    """Without seconds nothing is captured after the first; needs are counted, the most needed key goes first."""
    engine = Engine("full", model=small(), settings=SETTINGS, ladder=[1, 2, 4, 8, 16, 32], lazy=True)
    _serve(engine)
    assert not engine.registry.captured()
    assert engine._lazy is not None
    most, _ = engine._lazy.needs.most_common(1)[0]
    assert engine.capture_pending(0.0) == 1
    assert engine.registry.captured() == (most,)
    assert engine.capture_pending(0.0) == 0, "the first capture's time isn't paid back yet"
    assert engine.capture_pending(60.0) >= 1
    assert engine.capture_pending(60.0) == 0


def test_an_allowance_captures_within_steps(small: Callable[..., Any]) -> None:
    """With seconds a step, graphs come by themselves, in one pool for each part."""
    engine = Engine("split", model=small(), settings=SETTINGS, ladder=[1, 2, 4, 8, 16, 32], lazy=0.05)
    _serve(engine)
    assert {key.part for key in engine.registry.captured()} == set(Part)
    assert len(engine.registry.pools()) == 2
    assert engine.stats.by_mode.keys() & {"full", "split/in_turn"}


def test_lazy_needs_an_executor_and_seconds(small: Callable[..., Any]) -> None:
    """Lazy capture without a device, or with negative seconds, is a named error; so is asking a plain Engine."""
    with pytest.raises(ConfigError, match="only decides"):
        Engine("full", lazy=True)
    with pytest.raises(ConfigError, match="at least 0"):
        Engine("full", executor="simulated", lazy=-1.0)
    with pytest.raises(ConfigError, match="lazy=True"):
        Engine("full", executor="simulated").capture_pending(1.0)


def test_engine_over_a_model(small: Callable[..., Any]) -> None:
    """`Engine(model=...)` takes support and limits of the model, and its device's executor; bad mixes are named."""
    model = small()
    engine = Engine("full", model=model, device="cpu")
    assert engine.support == model.support
    assert engine.settings.max_num_reqs == 8
    assert isinstance(engine.executor, CpuExecutor)
    assert Engine("full", model=model, attention="single").support.claims.uniform_query_len == 1
    with pytest.raises(UnknownNameError, match="cdua"):
        Engine("full", model=model, device="cdua")
    with pytest.raises(ConfigError, match="give model="):
        Engine("full", model=model, executor="simulated")
    with pytest.raises(ConfigError, match="model is missing"):
        Engine("full", device="cpu")
    assert engine.registry.record(engine.keys[0]).state is GraphState.PLANNED


def test_between_steps_only_hot_sizes_are_captured(small: Callable[..., Any]) -> None:
    """The first step runs at eager speed; a size that two steps needed is captured, one that came once never is."""
    engine = Engine("full", model=small(), settings=SETTINGS, ladder=[1, 2, 4, 8, 16, 32], lazy=10.0)
    sequences = Sequences(3)

    def step(*lengths: int) -> str:
        rows = [sequences.chunk(sequences.start(), length) for length in lengths]
        outputs = engine.step(sequences.inputs(rows))
        return outputs.decision.mode.value

    assert step(3) == "eager"
    assert not engine.registry.captured()
    assert step(7) == "eager"
    assert step(4) == "eager"
    assert not engine.registry.captured(), "4 tokens were needed once before this step, and 8 once"
    assert step(3) == "full"
    assert [key.num_tokens for key in engine.registry.captured()] == [4]
    for _ in range(3):
        step(2, 2)
    assert [key.num_tokens for key in engine.registry.captured()] == [4]


def test_what_a_lazy_engine_saves_up_is_bounded_and_other_costs_start_anew(small: Callable[..., Any]) -> None:
    """A size that came once is never captured, and saves nothing for others; needs are those of the costs there are."""
    engine = Engine("full", model=small(), settings=SETTINGS, ladder=[1, 2, 4, 8, 16, 32], lazy=0.001, calibrate=0)
    sequences = Sequences(3)
    chunk = sequences.inputs([sequences.chunk(sequences.start(), 3)])
    lazy = engine._lazy
    assert lazy is not None
    lazy.before_step(chunk.numbers)
    for _ in range(200):
        lazy.capture(0.001, least=2)
    assert sum(lazy.needs.values()) == 1
    assert lazy._saved_s <= 0.001
    engine.take_costs(attrs.evolve(engine.costs, version="another table"))
    lazy.before_step(chunk.numbers)
    lazy._note()
    assert list(lazy.needs.values()) == [1], "what the other table wanted is forgotten"
