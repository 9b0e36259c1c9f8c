"""A limit of memory holds for static and eager buffers too: clear errors, lesser modes, and nothing stays behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.budgets import Budget  # noqa: E402
from kpolicy.decision import Decision, Launch  # noqa: E402
from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import BudgetRefused, OutOfMemoryError  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Mode, Part, Rows  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphRegistry, GraphState  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_launcher.checker import EAGER  # noqa: E402

PIECES = GraphKey(Part.PIECEWISE, 64)
DECODE = GraphKey(Part.FULL, 4, 4, query_len=1)


def _opened(model: Any, keys: list[GraphKey], **options: Any) -> tuple[CpuExecutor, GraphRegistry]:
    executor, registry = CpuExecutor(model, **options), GraphRegistry()
    registry.plan(keys)
    executor.open(registry)
    executor.capture(keys)
    return executor, registry


def _step(executor: CpuExecutor, num_tokens: int) -> Any:
    sequences = Sequences(1)
    return executor.run(EAGER, sequences.inputs([sequences.chunk(sequences.start(), num_tokens)]))


def test_an_eager_step_beyond_memory_is_a_clear_error(small: Callable[..., Any]) -> None:
    """It says what it needs and what there is; nothing is held after it, and a smaller step runs."""
    executor = CpuExecutor(small(), memory_bytes=12_000)
    with pytest.raises(OutOfMemoryError, match="memory_bytes is 12000") as caught:
        _step(executor, 300)
    assert executor.adapter.classify(caught.value) == (Reason.CAPTURE_OUT_OF_MEMORY, False)
    del caught
    gc.collect()
    assert executor.adapter.memory().used == 0
    assert torch.isfinite(_step(executor, 5).outputs[0]).all()
    assert 0 < executor.adapter.memory().used <= 12_000
    executor.release()
    assert executor.adapter.memory().used == 0


def test_larger_eager_buffers_take_the_place_of_smaller_ones(small: Callable[..., Any]) -> None:
    """Both at once would be above the limit."""
    free = CpuExecutor(small(), memory_bytes=1 << 30)
    used = []
    for num_tokens in (5, 60):
        _step(free, num_tokens)
        used.append(free.adapter.memory().used)
    tight = CpuExecutor(small(), memory_bytes=used[1])
    for num_tokens in (5, 60):
        _step(tight, num_tokens)
    assert tight.adapter.memory().used == used[1]


@pytest.mark.parametrize("memory_bytes", [1_000, 9_000, 14_000])
def test_a_pool_whose_buffers_do_not_fit_fails_its_key(memory_bytes: int, small: Callable[..., Any]) -> None:
    """The key is out of memory, in words that say how much; no pool, buffer or graph of it stays."""
    executor, registry = _opened(small(), [PIECES], memory_bytes=memory_bytes)
    record = registry.record(PIECES)
    assert (record.state, record.reason) == (GraphState.FAILED, Reason.CAPTURE_OUT_OF_MEMORY)
    assert f"memory_bytes is {memory_bytes}" in executor.capture_errors[PIECES]
    assert executor.adapter.memory().used <= memory_bytes
    assert executor.adapter._pools == []
    executor.release()
    gc.collect()
    assert executor.adapter.memory().used == 0


def test_eager_steps_go_on_when_graphs_took_the_rest(small: Callable[..., Any]) -> None:
    """Buffers for eager steps of every captured size are there before graphs take what is left."""
    keys = [GraphKey(Part.FULL, size, size, query_len=1) for size in (8, 4, 2, 1)]
    free, _ = _opened(small(), keys, memory_bytes=1 << 30)
    executor, registry = _opened(small(), keys, memory_bytes=free.adapter.memory().used - 64)
    assert any(record.state is GraphState.FAILED for record in registry.records())
    assert torch.isfinite(_step(executor, 8).outputs[0]).all()


@pytest.mark.parametrize("fault", ["mid_segment@2", "mid_segment@3", "capture_out_of_memory@2", "capture_fails@3"])
def test_a_failed_piecewise_capture_gives_its_buffers_back(fault: str, small: Callable[..., Any]) -> None:
    """Outputs of attention calls that only the failed capture had are freed; those of other graphs stay."""
    executor, registry = _opened(small(), [PIECES], memory_bytes=1 << 30, faults=[fault])
    assert registry.record(PIECES).state is GraphState.FAILED
    gc.collect()
    pool = executor._pools[0].memory
    assert pool.breaks.num_bytes == 0
    assert pool.breaks.held == frozenset()
    inputs = [pool.buffers, *executor.launcher._eager.values()]
    static = sum(
        each.numel() * each.element_size()
        for buffers in inputs
        for each in vars(buffers).values()
        if isinstance(each, torch.Tensor)
    )
    assert executor.adapter.memory().used == static
    executor.capture([PIECES])
    graph = executor._handles[PIECES]
    assert executor.adapter.memory().used == static + graph.num_bytes + pool.breaks.num_bytes
    assert registry.record(PIECES).bytes == graph.num_bytes + pool.num_bytes


def test_a_failed_capture_leaves_other_graphs_their_buffers(small: Callable[..., Any]) -> None:
    """A smaller graph whose capture fails shares the larger one's outputs, which go on working."""
    small_key = GraphKey(Part.PIECEWISE, 8)
    executor, registry = _opened(small(), [PIECES, small_key], memory_bytes=1 << 30, faults=["mid_segment@5"])
    assert registry.record(PIECES).state is GraphState.CAPTURED
    assert registry.record(small_key).state is GraphState.FAILED
    assert len(executor._pools[0].memory.breaks.held) == 2
    sequences = Sequences(1)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 20)])
    decision = Decision(Mode.PIECEWISE, (Launch(Rows.ALL, PIECES),), Reason.GRAPH_FITS)
    expected = executor.launcher.eager_as(PIECES, inputs).outputs[0]
    assert torch.equal(executor.run(decision, inputs).outputs[0], expected)


def test_staging_that_finds_no_memory_costs_the_graph_only(small: Callable[..., Any]) -> None:
    """A replay whose staging needs memory that isn't there fails before its launch, and the step is decided again."""
    engine = Engine(
        "full", executor=CpuExecutor(small(), memory_bytes=1 << 30), attention="mixed", ladder=[4],
        settings=Settings(max_num_reqs=4, max_num_tokens=16),
    )  # fmt: skip
    engine.capture()
    sequences = Sequences(1)
    row = sequences.chunk(sequences.start(), 3)
    engine.step(sequences.inputs([row]))
    sequences.advance([row])
    adapter: Any = engine.executor.adapter  # type: ignore[union-attr]
    stage, left = adapter.stage, [1]

    def refuses(*arguments: Any) -> None:
        if left[0]:
            left[0] -= 1
            adapter._memory_bytes = 1
            try:
                adapter.alloc_static((9,), "int64")
            finally:
                adapter._memory_bytes = 1 << 30
        stage(*arguments)

    adapter.stage = refuses
    outputs = engine.step(sequences.inputs([sequences.decode(row.sequence)]))
    assert DECODE not in outputs.decision.keys
    assert engine.registry.record(DECODE).state is GraphState.WITHDRAWN


@pytest.mark.parametrize("part", list(Part))
def test_a_byte_budget_holds_for_a_pools_first_graph(part: Part, small: Callable[..., Any]) -> None:
    """Refused once its bytes are known, it gives its pool back; the next smaller size that fits has one of its own."""
    keys = [GraphKey(part, size, size if part is Part.FULL else None) for size in (64, 32, 16, 8)]
    free, registry = _opened(small(), keys, memory_bytes=1 << 30)
    taken = {key: registry.record(key).bytes for key in keys}
    assert taken[keys[0]] > taken[keys[1]]
    for limit in (taken[keys[0]] - 1, 0):
        model = small()
        executor, registry = CpuExecutor(model, memory_bytes=1 << 30), GraphRegistry(Budget(bytes=limit))
        registry.plan(keys)
        executor.open(registry)
        executor.capture(keys)
        assert registry.totals().held.bytes <= limit
        assert registry.record(keys[0]).reason is Reason.BUDGET_BYTES
        assert executor.captured == frozenset(registry.captured()) == frozenset(keys[1:] if limit else [])
        assert len(executor._pools) == bool(limit)
        for key in registry.captured():
            sequences = Sequences(1)
            inputs = sequences.inputs([sequences.chunk(sequences.start(), 7)])
            decision = Decision(Mode(part.value), (Launch(Rows.ALL, key),), Reason.ONLY_LEGAL)
            logits = executor.run(decision, inputs).outputs[0]
            assert torch.allclose(logits, executor.run(EAGER, inputs).outputs[0], rtol=1e-3, atol=1e-4)
        executor.release()
        assert executor.adapter.memory().used == 0
    free.release()


def test_a_registry_counts_what_its_graphs_give_back(small: Callable[..., Any]) -> None:
    """Static inputs and outputs of attention go with their pool, so they count; eager launches keep their own."""
    keys = [*(GraphKey(part, size) for part in Part for size in (64, 16)), DECODE]
    executor, registry = _opened(small(), keys, memory_bytes=1 << 30)
    assert set(registry.captured()) == set(keys)
    counted, used = registry.totals().bytes_live, executor.adapter.memory().used
    executor._release_pools()
    gc.collect()
    assert used - executor.adapter.memory().used == counted
    eager = sum(buffers.num_bytes for buffers in executor.launcher._eager.values())  # type: ignore[attr-defined]
    assert executor.adapter.memory().used == eager > 0
    executor.release()
    gc.collect()
    assert executor.adapter.memory().used == 0


def test_what_a_pool_takes_later_counts_with_the_next_graph(small: Callable[..., Any]) -> None:
    """Slots for more decode steps than were foreseen are the pool's too."""
    keys = [GraphKey(Part.FULL, size, size, query_len=1) for size in (8, 4)]
    executor, registry = _opened(small(), keys[:1], memory_bytes=1 << 30)
    pool = executor._pools[0].memory
    assert registry.totals().bytes_live == executor._handles[keys[0]].num_bytes + pool.num_bytes
    pool.buffers._stage_ahead([[0] * 8] * 40)
    executor.capture(keys[1:])
    graphs = sum(handle.num_bytes for handle in executor._handles.values())
    assert registry.totals().bytes_live == graphs + pool.num_bytes
    executor.release()


def test_what_a_refused_graph_would_have_paid_counts_with_the_next(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool stays for other graphs, with what it took since."""
    keys = [GraphKey(Part.FULL, size, size, query_len=1) for size in (8, 4, 2)]
    executor, registry = _opened(small(), keys[:1], memory_bytes=1 << 30)
    pool = executor._pools[0].memory
    pool.buffers._stage_ahead([[0] * 8] * 40)

    def refuses(key: GraphKey, **_: Any) -> None:
        registry.withdraw(key, Reason.BUDGET_BYTES)
        raise BudgetRefused(Reason.BUDGET_BYTES, "no bytes left")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "capture", refuses)
        executor.capture(keys[1:2])
    executor.capture(keys[2:])
    assert set(registry.captured()) == {keys[0], keys[2]}
    graphs = sum(handle.num_bytes for handle in executor._handles.values())
    assert registry.totals().bytes_live == graphs + pool.num_bytes
    executor.release()
