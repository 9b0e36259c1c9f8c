"""What `Engine.capture` measures, and what happens where it can't; a device that is lost outside a replay."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.decision import Launch  # noqa: E402
from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError, GraphReplayError, StickyDeviceError  # noqa: E402
from kpolicy.executors.calibrate import Calibration  # noqa: E402
from kpolicy.executors.calibrate.bench import Bench  # noqa: E402
from kpolicy.executors.cpu import CpuExecutor  # noqa: E402
from kpolicy.executors.device import Failure  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Part, Rows  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphRegistry, GraphState  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.shapes import BatchShape  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_launcher.checker import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, load_family  # noqa: E402

SETTINGS = Settings(max_num_reqs=4, max_num_tokens=16)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_family("llama")


def test_capture_measures_where_no_costs_were_given(model: Any) -> None:
    engine = Engine("auto", executor=CpuExecutor(model), ladder=[4], settings=SETTINGS)
    assert not engine.costs.measured
    engine.capture()
    assert engine.costs.measured
    assert engine.compiled.select(2).reason is Reason.CHEAPEST_MEASURED
    analytic = Engine("auto", executor=CpuExecutor(model), ladder=[4], settings=SETTINGS, calibrate=0)
    analytic.capture()
    assert not analytic.costs.measured
    with pytest.raises(ConfigError, match="calibrate is -1"):
        Engine("auto", calibrate=-1)


@pytest.mark.parametrize("fault", ["replay_fails@1", "before_launch@1"])
def test_a_graph_that_fails_while_it_is_measured_costs_its_graph(model: Any, fault: str) -> None:
    """The others and EAGER are measured all the same."""
    engine = Engine("auto", executor=CpuExecutor(model, faults=[fault]), ladder=[4], settings=SETTINGS)
    engine.capture()
    assert engine.costs.measured
    assert not engine.calibration_error
    states = [record.state for record in engine.registry.records()]
    assert states.count(GraphState.WITHDRAWN) == 1
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    assert len(engine.step(sequences.inputs([sequences.chunk(sequences.start(), 3)])).outputs) == 1


def test_a_graph_that_fails_over_and_over_ends_the_measuring(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is withdrawn already can't be what another try would be without; nor one that isn't named."""
    for key in (GraphKey(Part.FULL, 4, 4, query_len=1), None):
        engine = Engine("auto", executor=CpuExecutor(model), ladder=[4], settings=SETTINGS)

        def failing(*_: Any, key: Any = key) -> Any:
            raise GraphReplayError(key, "failed on purpose")

        monkeypatch.setattr(Calibration, "measure", failing)
        engine.capture()
        assert not engine.costs.measured
        assert engine.calibration_error == "GraphReplayError: failed on purpose"
        lost = [record.key for record in engine.registry.records() if record.state is GraphState.WITHDRAWN]
        assert lost == [key] * (key is not None)


def lost_late(model: Any, num_tokens: int, rounds: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An Engine that lost a decode graph after so many rounds, at the end of its allowance."""
    engine = Engine("auto", executor=CpuExecutor(model), ladder=[1, 2, 4], settings=SETTINGS)
    run, measured, calls = Bench._run, Calibration.measure, list[Calibration]()

    def fails(bench: Bench, decision: Any, inputs: Any, *more: Any) -> Any:
        key = decision.launches[0].key
        if bench.rounds == rounds and key == GraphKey(Part.FULL, num_tokens, num_tokens, query_len=1):
            raise GraphReplayError(key, "failed late")
        return run(bench, decision, inputs, *more)

    def measure(calibration: Calibration, _allowance_s: float) -> bool:
        calls.append(calibration)
        return len(calls) == 1 and measured(calibration, 600.0)

    monkeypatch.setattr(Bench, "_run", fails)
    monkeypatch.setattr(Calibration, "measure", measure)
    engine.capture()
    return engine


def test_what_was_measured_before_a_graph_failed_stays(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the allowance too: curves have all sizes but its own, and attention its slope."""
    engine = lost_late(model, 2, 3, monkeypatch)
    assert engine.calibration_error == ""
    assert engine.costs.measured
    assert engine.costs.full.sizes == (1, 4)
    assert engine.costs.piecewise.sizes == (1, 2, 4)
    assert engine.costs.eager.sizes == (1, 4, 16)
    assert engine.costs.kv_span is not None
    assert engine.costs.kv_span.decode_step > 0


@pytest.mark.parametrize(("num_tokens", "rounds", "words"), [
    (4, 3, "attention of decode rows wasn't"),
    (1, 0, "0 of 2 sizes of FULL decodes were measured"),
])  # fmt: skip
def test_a_table_of_too_little_is_none(
    model: Any, num_tokens: int, rounds: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a graph failed and no time is left for what tells of its mode, costs stay analytic, and that is said."""
    engine = lost_late(model, num_tokens, rounds, monkeypatch)
    assert not engine.costs.measured
    assert "failed late; in the rest of 1 s" in engine.calibration_error
    assert words in engine.calibration_error


def test_garbage_is_not_collected_within_the_allowance(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection takes half a second, of one that capture has for measuring."""
    engine = Engine("auto", executor=CpuExecutor(model), ladder=[4], settings=SETTINGS, calibrate=0.05)
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("garbage was collected"))
    engine.capture()
    assert engine.costs.measured


def test_engines_that_share_a_registry_measure_their_own_graphs(model: Any) -> None:
    registry = GraphRegistry()
    first = Engine("full_and_piecewise", executor=CpuExecutor(model), registry=registry, ladder=[4], settings=SETTINGS)
    first.capture()
    second = Engine(
        "auto", executor=CpuExecutor(load_family("gpt2")), registry=registry, ladder=[4, 8], settings=SETTINGS
    )
    second.capture()
    assert second.calibration_error == ""
    assert second.costs.measured


def test_a_device_lost_in_an_eager_launch_stops_the_engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = CpuExecutor(model)
    known = executor.adapter.classify
    lost = Failure(Reason.REPLAY_FAILED, True)
    monkeypatch.setattr(executor.adapter, "classify", lambda error: lost if "illegal" in str(error) else known(error))
    engine = Engine("eager", executor=executor, settings=SETTINGS)
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    inputs = sequences.inputs([sequences.chunk(sequences.start(), 3)])

    def fails(_step: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fails)
        with pytest.raises(StickyDeviceError, match="illegal memory access"):
            engine.step(inputs)
    with pytest.raises(StickyDeviceError):
        engine.step(inputs)


def prompts(engine: Engine, sequences: Sequences, count: int) -> None:
    """Steps of one prompt each, of two lengths in turn."""
    for step in range(count):
        row = sequences.chunk(sequences.start(), 3 + 9 * (step % 2))
        engine.step(sequences.inputs([row]))
        sequences.end(row.sequence)


def a_round(calibration: Calibration, _allowance_s: float) -> bool:
    """One more sample of every case, however long that takes: what a slice comes to depends on the machine."""
    bench = calibration._bench
    bench._stop_s = float("inf")
    if bench._runs is None:
        bench._runs = bench._in_rounds()
    before = bench.rounds
    return all(bench.rounds == before for _ in bench._runs)


def test_a_lazy_engine_measures_what_it_captured(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps, in slices: analytic costs first, then a table of the graphs that there are, then a better one."""
    monkeypatch.setattr(Calibration, "measure", a_round)
    engine = Engine("auto", model=model, settings=SETTINGS, ladder=[4, 8, 16], lazy=True)
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    versions: list[str] = []
    for _ in range(100):
        prompts(engine, sequences, 2)
        # Enough for what is next, however slow the machine.
        engine.capture_pending(1e6)
        if engine.costs.version not in versions:
            versions.append(engine.costs.version)
        if versions[-1].endswith(", 12 samples each"):
            break
    assert not versions[0].startswith("measured")
    assert any(version.endswith(", 3 samples each") for version in versions[1:])
    assert versions[-1].endswith(", 12 samples each")
    assert engine.costs.measured
    captured = engine.registry.captured()
    assert captured
    mixed = engine.costs.mixed.sizes if engine.costs.mixed is not None else ()
    assert {key.num_tokens for key in captured} <= {*mixed, *engine.costs.full.sizes, *engine.costs.piecewise.sizes}
    assert engine._lazy is not None
    assert not engine.lazy_pending, "nothing is measured again while nothing is captured"
    engine.release()


def test_what_is_pending(model: Any) -> None:
    """A size that two steps needed is, until it is captured; what came once isn't."""
    engine = Engine("piecewise", model=model, settings=SETTINGS, ladder=[4, 16], lazy=True)
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    prompts(engine, sequences, 2)
    assert not engine.lazy_pending
    prompts(engine, sequences, 1)
    assert engine.lazy_pending
    engine.capture_pending(1e6)
    assert not engine.lazy_pending
    assert not Engine("piecewise", ladder=[4]).lazy_pending
    engine.release()


def test_costs_are_measured_while_somebody_waits_for_nothing_to_be_pending(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps for as long as something is pending, asked after each, end with graphs and a table."""
    monkeypatch.setattr(Calibration, "measure", a_round)
    engine = Engine("auto", model=model, settings=SETTINGS, ladder=[16], lazy=1e6)
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    for steps in range(100):
        prompts(engine, sequences, 1)
        if not engine.lazy_pending and steps >= 4:
            break
    assert not engine.lazy_pending
    assert engine.registry.captured()
    assert engine.costs.version.endswith(", 12 samples each")
    engine.release()


def test_a_lazy_engine_with_costs_or_without_calibration_keeps_its_table(model: Any) -> None:
    """Costs that were given stay, and calibrate=0 leaves the analytic ones."""
    given = Engine("auto", model=model).costs
    for options in ({"costs": given}, {"calibrate": 0.0}):
        engine = Engine("auto", model=model, settings=SETTINGS, ladder=[4, 16], lazy=0.05, **options)
        prompts(engine, Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), 40)
        assert engine.registry.captured()
        assert engine.costs.version == given.version
        engine.release()


def test_measuring_that_fails_between_steps_costs_its_graph_alone(model: Any) -> None:
    """Steps go on by the analytic table; the graph that failed is withdrawn."""
    engine = Engine(
        "auto", executor=CpuExecutor(model, faults=["before_launch@1x40"]), settings=SETTINGS, ladder=[16], lazy=True,
        attention="mixed",
    )  # fmt: skip
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    row = sequences.chunk(sequences.start(), 12)
    inputs = sequences.inputs([row])
    engine.step(inputs)
    assert engine.capture_pending(5.0) >= 1
    assert engine.capture_pending(5.0) == 0
    withdrawn = [record for record in engine.registry.records() if record.state is GraphState.WITHDRAWN]
    assert {record.reason for record in withdrawn} == {Reason.REPLAY_FAILED}
    assert not engine.costs.measured
    assert len(engine.step(inputs).outputs) == 1
    engine.release()


@pytest.mark.parametrize("name", ["__init__", "table"])
def test_whatever_measuring_raises_the_step_runs(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that can't be made, or that makes no table, leaves the costs as they are, and isn't tried again."""
    calls = 0

    def fails(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        raise ValueError("no table")

    monkeypatch.setattr(Calibration, "measure", a_round)
    monkeypatch.setattr(Calibration, name, fails)
    engine = Engine("auto", model=model, settings=SETTINGS, ladder=[4, 16], lazy=1e6)
    sequences = Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    prompts(engine, sequences, 30)
    assert calls == 1
    assert engine.registry.captured()
    assert not engine.costs.measured
    assert engine.calibration_error == "ValueError: no table"
    engine.release()


def test_a_later_measuring_that_does_well_takes_the_error_back(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why there are no measured costs, and then there are."""
    monkeypatch.setattr(Calibration, "measure", a_round)
    engine = Engine("auto", model=model, settings=SETTINGS, ladder=[4, 16], lazy=1e6)
    engine.calibration_error = "an earlier one"
    prompts(engine, Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), 30)
    assert engine.costs.measured
    assert engine.calibration_error == ""
    engine.release()


def test_what_capture_measured_is_not_measured_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lazy Engine that was told to capture all, and measured it, has nothing left to do between steps."""
    engine = Engine("auto", model=model, settings=SETTINGS, ladder=[4, 16], lazy=1e6, calibrate=0.05)
    engine.capture()
    assert engine.costs.measured
    version = engine.costs.version
    monkeypatch.setattr(Calibration, "measure", lambda *_: pytest.fail("measured again"))
    prompts(engine, Sequences(1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), 10)
    assert engine.costs.version == version
    engine.release()


def test_whatever_the_allowance_one_token_is_measured(model: Any) -> None:
    """One row at most and no time: the table stands on the one case that always runs."""
    engine = Engine(
        "auto", executor=CpuExecutor(model), ladder=[1], settings=Settings(max_num_reqs=1, max_num_tokens=16),
        calibrate=1e-9,
    )  # fmt: skip
    engine.capture()
    assert engine.calibration_error == ""
    assert engine.costs.measured


def own_prompts(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """(slots written, blocks read) of every prompt without decodes that was timed."""
    seen: list[tuple[list[int], list[int]]] = []
    run = Bench._run

    def spied(bench: Bench, decision: Any, inputs: Any, *more: Any) -> Any:
        if len(inputs.query_lens) == 1 and inputs.kv_lens == inputs.query_lens and len(inputs.token_ids) > 1:
            seen.append((list(inputs.slot_mapping), list(inputs.block_table[0])))
        return run(bench, decision, inputs, *more)

    monkeypatch.setattr(Bench, "_run", spied)
    Engine("auto", executor=CpuExecutor(model), ladder=[4, 8], settings=SETTINGS).capture()
    return seen


def test_prompts_are_measured_on_their_own_kv_where_none_is(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.clear_kv()
    own = [each for each in own_prompts(model, monkeypatch) if each[0][0] != model.pad_slot]
    assert own
    for slots, blocks in own:
        assert slots == [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(slots))]
        assert blocks[-1] == NUM_BLOCKS - 1
    assert {len(slots) for slots, _ in own} == {8, 16}  # as many tokens as rows may be decode rows too
    assert model.kv_untouched(range(model.pad_slot))


def test_kv_of_requests_stays_while_it_is_measured(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.clear_kv()
    for cache in model.kv_caches():
        cache[model.pad_slot - 3] = 0.5
    before = [cache[: model.pad_slot].clone() for cache in model.kv_caches()]
    assert not model.kv_untouched(range(model.pad_slot - 8, model.pad_slot))
    assert model.kv_untouched(range(8))
    assert {slot for slots, _ in own_prompts(model, monkeypatch) for slot in slots} == {model.pad_slot}
    for cache, kept in zip(model.kv_caches(), before, strict=True):
        assert torch.equal(cache[: model.pad_slot], kept)
    model.clear_kv()


@pytest.mark.parametrize("held", [False, True])
def test_a_case_had_its_own_kv_only_where_none_is_held(model: Any, held: bool) -> None:
    """What own KV spares a prompt is told by such cases alone."""
    model.clear_kv()
    timed = Bench(CpuExecutor(model), model)
    rows = timed.rows(0, 0, 4)
    own, other = (timed.add([Launch(Rows.ALL, None)], rows, own_kv=each) for each in (True, False))
    if held:
        for cache in model.kv_caches():
            cache[model.pad_slot - 3] = 0.5
    with timed.own_kv():
        pass
    assert (timed.had_own_kv(own), timed.had_own_kv(other)) == (not held, False)
    model.clear_kv()


def test_a_device_lost_while_it_is_measured_is_said_so(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what clearing its memory then says."""
    model.clear_kv()
    engine = Engine("auto", executor=CpuExecutor(model), ladder=[4], settings=SETTINGS)

    def lost(*_: Any) -> Any:
        raise StickyDeviceError("an illegal memory access was encountered")

    def fails(*_: Any) -> None:
        raise RuntimeError("nor can it be cleared")

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "_run", lost)
        patch.setattr(model, "clear_kv", fails)
        with pytest.raises(StickyDeviceError, match="illegal memory access"):
            engine.capture()
    with pytest.raises(StickyDeviceError, match="illegal memory access"):
        engine.decide(BatchShape(decodes=[(1, 2)]))


@pytest.mark.parametrize("kv", [8, MAX_MODEL_LEN])
def test_decode_steps_that_follow_end_within_the_longest(model: Any, kv: int) -> None:
    rows = Bench(CpuExecutor(model), model).rows(2, kv, steps=4)
    assert rows.kv_lens == [min(kv, MAX_MODEL_LEN - 3)] * 2
    assert len(rows.slots_ahead) == 3
