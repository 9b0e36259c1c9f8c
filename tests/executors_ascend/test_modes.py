"""Steps on the pretended Ascend device: every mode gives the bits of EAGER, with live lengths, in every order."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.decision import Decision, Launch  # noqa: E402
from kpolicy.executors.ascend import AscendExecutor  # noqa: E402
from kpolicy.executors.ascend.tasks import GraphTasks  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Mode, Part, Rows  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.testing import EXECUTOR_CHECKS, Sequences  # noqa: E402
from tests.executors_ascend.helpers import on_ascend, opened  # noqa: E402
from tests.executors_launcher.checker import (  # noqa: E402
    BLOCK_SIZE,
    NUM_BLOCKS,
    Checker,
    batcher_steps,
    drafting_steps,
    load_family,
    plan,
)
from tests.executors_launcher.conftest import SMALL  # noqa: E402
from tests.fakes.torch_npu import fake_torch_npu  # noqa: E402

EAGER = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.POLICY_IS_EAGER)


@pytest.mark.parametrize("order", ["replay_fenced", "replay_barrier", "update_first"])
@pytest.mark.parametrize(
    ("family", "way"),
    [("llama", "task_groups"), ("llama", "whole_graph"), ("mistral", "task_groups"), ("deepseek_v2", "task_groups")],
)
def test_modes_are_eager_bit_for_bit(family: str, way: str, order: str) -> None:
    """FULL, PIECEWISE and SPLIT steps, repeats and drafts included, equal their rows run eagerly at the same shape."""
    model, library = on_ascend(load_family(family))
    executor, registry = opened(model, library, plan(model), update_way=way, update_order=order, check=True)
    assert set(registry.captured()) == set(plan(model))
    checker = Checker(executor, model)  # type: ignore[arg-type]
    for steps in (batcher_steps, drafting_steps):
        for _ in steps(checker, registry.captured(), 30, seed=5):
            pass
    modes = {label.split()[0] for label in checker.steps}
    assert {"full", "piecewise", "eager", "split/in_turn", "split/beside"} <= modes


def test_eager_is_the_plain_kernels_attention() -> None:
    """The operators' lengths, tables and masks are right: logits are those of kpolicy's plain kernels."""
    plain, (model, library) = load_family("llama"), on_ascend(load_family("llama"))
    executor = AscendExecutor(model, library=library)
    from kpolicy.executors.cpu import CpuExecutor

    reference = CpuExecutor(plain)
    sequences = Sequences(7, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    for _ in range(30):
        rows = sequences.random_rows(6, 40, 3)
        inputs = sequences.inputs(rows)
        mine, other = (each.run(EAGER, inputs).outputs for each in (executor, reference))
        for a, b in zip(mine, other, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        sequences.advance(rows, accepted=1)


@pytest.mark.parametrize("check", EXECUTOR_CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[..., None]) -> None:
    """The Ascend executor keeps the contract that all executors keep."""
    from kpolicy.serving.load import load

    def make() -> AscendExecutor:
        model, library = on_ascend(load(SMALL, num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=8))
        return AscendExecutor(model, library=library)

    fewer = {"seeds": range(1)} if "seeds" in signature(check).parameters else {}
    check(make, close=lambda a, b: bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4)), **fewer)


def test_lengths_that_are_not_rewritten_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bitwise check fails where a replay goes on with the lengths of the one before."""
    model, library = on_ascend(load_family("llama"))
    executor, registry = opened(model, library, plan(model))
    values: Any = GraphTasks.values
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(GraphTasks, "values", lambda self, rows: kept.setdefault(self.key, values(self, rows)))
    with pytest.raises(AssertionError):
        for _ in batcher_steps(Checker(executor, model), registry.captured(), 60, seed=3):  # type: ignore[arg-type]
            pass


def test_operators_that_the_library_cannot_update_stay_out_of_graphs() -> None:
    """NPUGraph.update knows no handler for the latent operator: its FULL graphs are refused with the reason."""
    model, library = on_ascend(load_family("deepseek_v2"))
    executor, registry = opened(model, library, plan(model), update_way="whole_graph")
    for key in plan(model):
        record = registry.record(key)
        assert record.reason is (Reason.HOST_LENGTHS_FROZEN if key.part is Part.FULL else None)
    assert any("task_groups" in words for words in executor.capture_errors.values())
    # Refused once they were recorded: they give their streams back.
    assert library.chip.taken == registry.totals().held.graphs


def test_no_update_at_all_keeps_host_lengths_out_of_graphs() -> None:
    """An old torch_npu without either way captures PIECEWISE only."""
    model, library = on_ascend(load_family("llama"))
    for name in ("graph_task_group_begin", "graph_task_update_begin"):
        delattr(library.npu, name)
    del library.npu.NPUGraph.update
    executor, registry = opened(model, library, plan(model))
    assert executor.adapter.probe().facts["update_way"] == "none"
    parts = {key.part for key in registry.captured()}
    assert parts == {Part.PIECEWISE}
    reasons = {registry.record(key).reason for key in plan(model) if key.part is Part.FULL}
    assert reasons == {Reason.HOST_LENGTHS_FROZEN}


def test_launches_that_block_rule_graphs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ASCEND_LAUNCH_BLOCKING=1 nothing is captured, each key says why, and a step runs eagerly."""
    from kpolicy.engine import Engine

    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    model, library = on_ascend(load_family("llama"))
    engine = Engine("full_and_piecewise", executor=AscendExecutor(model, library=library), ladder=[8], calibrate=0)
    engine.capture()
    assert {record.reason for record in engine.registry.records()} == {Reason.CAPTURE_FAILED}
    executor: Any = engine.executor
    assert all("ASCEND_LAUNCH_BLOCKING=1 rules graphs out" in words for words in executor.capture_errors.values())
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    outputs = engine.step(sequences.inputs([sequences.chunk(sequences.start(), 6)]))
    assert outputs.decision.mode is Mode.EAGER
    assert torch.isfinite(outputs.outputs[0]).all()


def test_graphs_of_as_many_tokens_keep_their_tasks_apart() -> None:
    """Tasks are kept by full key: uniform, variable-length and mixed graphs of one size, main and draft."""
    model, library = on_ascend(load_family("llama"))
    keys = [
        GraphKey(Part.FULL, 6, 6, query_len=1), GraphKey(Part.FULL, 6, 2, query_len=3),
        GraphKey(Part.FULL, 6, 6, max_query_len=3), GraphKey(Part.FULL, 6, 6),
        GraphKey(Part.FULL, 6, 6, query_len=1, stage="draft"),
    ]  # fmt: skip
    executor, registry = opened(model, library, keys)
    store = executor.adapter.store
    assert len(store) == len(registry.captured()) == 5
    found = [store.get(key) for key in keys]
    assert all(each is not None and len(each.tasks) == len(model.layers) for each in found)
    events = {id(task.event) for each in found if each is not None for task in each.tasks}
    assert len(events) == 5 * len(model.layers)
    executor.release()
    assert len(store) == 0


def test_main_and_draft_share_one_update_stream() -> None:
    """Two executors of one device rewrite on one stream; those of another library don't."""
    model, library = on_ascend(load_family("llama"))
    first, second = (AscendExecutor(model, library=library) for _ in range(2))
    assert first.adapter._updater.stream is second.adapter._updater.stream
    other = AscendExecutor(on_ascend(load_family("llama"))[0], library=fake_torch_npu())
    assert other.adapter._updater.stream is not first.adapter._updater.stream


def test_a_failing_update_costs_speed_and_leaves_no_graph_waiting() -> None:
    """A task that can't be rewritten fails the replay; the device isn't left waiting, and the step runs eagerly."""
    from kpolicy.engine import Engine

    model, library = on_ascend(load_family("llama"))
    engine = Engine("full", executor=AscendExecutor(model, library=library), ladder=[8], calibrate=0)
    engine.capture()
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    rows = [sequences.chunk(sequences.start(), 6)]
    engine.step(sequences.inputs(rows))
    sequences.advance(rows, accepted=1)
    begin, failing = library.npu.graph_task_update_begin, [True]

    def broken(stream: Any, handle: Any) -> None:
        if failing:
            failing.clear()
            raise RuntimeError("aclmdlRICaptureTaskUpdateBegin failed, error code is 107040")
        begin(stream, handle)

    library.npu.graph_task_update_begin = broken
    rows = [sequences.decode(rows[0].sequence, 1)]
    inputs = sequences.inputs(rows)
    outputs = engine.step(inputs)
    assert not failing
    lost = [record.key for record in engine.registry.records() if record.reason is Reason.REPLAY_FAILED]
    assert len(lost) == 1
    assert lost[0] not in outputs.decision.keys
    again = engine.executor.run(EAGER, inputs)  # type: ignore[union-attr]
    assert torch.allclose(outputs.outputs[0], again.outputs[0], rtol=1e-4, atol=1e-5)
    library.npu.synchronize()


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_drafts_need_no_sizes_by_hand(family: str) -> None:
    """With three drafts a row the sizes of verifying steps are multiples of four, and replay."""
    from kpolicy.engine import Engine
    from kpolicy.settings import Settings

    model, library = on_ascend(load_family(family))
    settings = Settings(max_num_reqs=4, max_num_tokens=32, num_speculative_tokens=3)
    executor = AscendExecutor(model, library=library)
    engine = Engine(
        "full_and_piecewise", executor=executor, attention=model.support, settings=settings, calibrate=0
    )  # fmt: skip
    engine.capture()
    sizes = [key.num_tokens for key in engine.registry.captured() if key.query_len == 4]
    assert sizes
    assert all(size % 4 == 0 for size in sizes)
    sequences = Sequences(4, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    rows = [sequences.chunk(sequences.start(), 7 + i) for i in range(3)]
    engine.step(sequences.inputs(rows))
    sequences.advance(rows)
    reference = AscendExecutor(on_ascend(model, library)[0], library=library)
    for _ in range(4):
        rows = [sequences.decode(row.sequence, 4) for row in rows]
        inputs = sequences.inputs(rows)
        outputs = engine.step(inputs)
        assert outputs.decision.mode is Mode.FULL
        wanted = reference.run(EAGER, inputs).outputs
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(outputs.outputs, wanted, strict=True))
        sequences.advance(rows, accepted=2)
