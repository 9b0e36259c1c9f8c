from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.decision import Launch
from kpolicy.host_speed import launching_takes
from kpolicy.keys import GraphKey
from kpolicy.kv_span import KvSpan
from kpolicy.modes import Part
from kpolicy.modes import Rows as RowsOf
from kpolicy.settings import Settings
from kpolicy_vllm.calibrate import MOST_FULL, MOST_MIXED, MOST_PIECES, calibrate, why_not
from kpolicy_vllm.ladder import default_sizes
from kpolicy_vllm.steps import Step, numbers_of
from kpolicy_vllm.synthetic import Rows
from kpolicy_vllm.timing import Bench, Case, Times
from tests.integrations.vllm.fake_runner import HOST_WORK_US, JOIN_US, FakeRunner, FakeState, SimulatedClock, stand_ins

SIZES = (1, 4, 16, 64)
KEYS = [GraphKey(Part.FULL, n, n, query_len=1) for n in SIZES] + [
    GraphKey(Part.PIECEWISE, n) for n in (*SIZES, 256, 1024)
]
KV_US, PAIR_US, ROW_US = 0.05, 0.002, 1.5


def cost(key: GraphKey | None, tokens: int, kv: int, chunk: int, context: int, decodes: int) -> tuple[float, float]:
    """Linear in padded tokens, with launches that bound EAGER."""
    attention = KV_US * kv + PAIR_US * (chunk * context + chunk * (chunk + 1) / 2) + ROW_US * decodes
    if key is None:
        return 9000.0 + 2 * decodes, 500 + 3.0 * tokens + attention
    if key.part is Part.FULL:
        return 300.0 + 2 * decodes, 400 + 3.0 * key.num_tokens + attention
    return 1500.0 + 2 * decodes, 450 + 3.0 * key.num_tokens + attention


def calibrated(monkeypatch: Any, seconds: float = 20.0, **limits: Any) -> tuple[Any, FakeRunner, FakeState]:
    clock = SimulatedClock()
    keys, drafts = limits.pop("keys", KEYS), limits.pop("drafts", 0)
    runner = FakeRunner(clock, cost, **limits)
    settings = Settings(max_num_reqs=64, max_num_tokens=2048, num_speculative_tokens=drafts)
    state = FakeState(runner, keys, settings, seconds)
    with stand_ins(monkeypatch):
        table = calibrate(runner, state, clock)
    return table, runner, state


def test_the_table_is_what_steps_take(monkeypatch: Any) -> None:
    table, runner, _ = calibrated(monkeypatch)
    assert table.measured
    for size in SIZES:
        assert table.full.at(size) == pytest.approx(400 + 3 * size, rel=0.03)
        assert table.piecewise.at(size) == pytest.approx(450 + 3 * size, rel=0.03)
    assert table.eager.at(2048) == pytest.approx(500 + 3 * 2048, rel=0.03)
    assert table.decode_attention.unit_us == pytest.approx(KV_US, rel=0.05)
    assert table.prefill_attention.unit_us == pytest.approx(PAIR_US, rel=0.05)
    assert table.decode_attention.row_us == pytest.approx(ROW_US, rel=0.05)
    assert table.host_full.base_us == pytest.approx(320, rel=0.05)
    assert table.host_full.req_us == pytest.approx(2, rel=0.05)
    assert table.host_piecewise.base_us == pytest.approx(1520, rel=0.05)
    assert table.host_eager.base_us == pytest.approx(9020, rel=0.05)
    assert table.graph_pieces == (1, 25)
    assert table.capture_us == pytest.approx((10_000, 10_000))
    assert table.graph_bytes == (1000, 1000)
    assert table.kv_span == KvSpan(decode_row=1024, decode_step=64 * 1024, prefill=1024 + 2048)
    assert {key for key, _, _ in runner.ran if isinstance(key, GraphKey)} == set(KEYS)


def test_rows_cost_the_same_in_every_mode(monkeypatch: Any) -> None:
    """Decodes and chunks of as many tokens differ in what the head is run for, which isn't a mode's doing."""
    table, _, _ = calibrated(monkeypatch)
    for size in (64, 256):
        assert table.eager.at(size) == pytest.approx(450 + 3 * size, rel=0.02)  # its pieces' time
    without, _, _ = calibrated(monkeypatch, keys=KEYS[: len(SIZES)])
    assert without.decode_attention.row_us == pytest.approx(ROW_US, rel=0.1)
    assert without.full.at(64) == pytest.approx(400 + 3 * 64, rel=0.03)


def test_rows_never_cost_more_than_graphs_rise_with_them(monkeypatch: Any) -> None:
    """Else dense work would be free, or fall with its tokens."""
    clock = SimulatedClock()

    def inflated(key: Any, tokens: int, kv: int, chunk: int, context: int, decodes: int) -> tuple[float, float]:
        host, device = cost(key, tokens, kv, chunk, context, decodes)
        return host, device + (50.0 * decodes if isinstance(key, GraphKey) and key.part is Part.PIECEWISE else 0.0)

    state = FakeState(FakeRunner(clock, inflated), KEYS, Settings(max_num_reqs=64, max_num_tokens=2048), 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    assert table.decode_attention.row_us == pytest.approx(3 + ROW_US, rel=0.1)
    assert table.full.at(64) >= table.full.at(1) * 0.98


@pytest.mark.parametrize("host_us", [20_000.0, 5000.0])
def test_an_eager_step_takes_the_device_no_longer_than_its_pieces(monkeypatch: Any, host_us: float) -> None:
    """It runs their kernels, unpadded: where the device bounds it it wins, and where the host does pieces still do."""
    truth = cost

    def idle(key: Any, tokens: int, *rest: Any) -> tuple[float, float]:
        host, device = truth(key, tokens, *rest)
        return (host, device) if key is not None else (host_us + host - 9000.0, device * (1.1 if tokens > 64 else 1.0))

    monkeypatch.setitem(globals(), "cost", idle)
    table, _, _ = calibrated(monkeypatch, keys=[*KEYS, GraphKey(Part.PIECEWISE, 2000)])
    assert table.eager.sizes[-1] == 2048
    for size in (256, 700, 1024, 1500, 2000):
        assert table.eager.at(size) == pytest.approx(table.piecewise.at(size), rel=0.01)
    assert table.eager.at(2048) == pytest.approx(1.1 * 3 * 48 + table.piecewise.at(2000), rel=0.02)
    step = Step(1800, 1, 0)

    def of(key: GraphKey | None) -> float:
        return table.cost((Launch(RowsOf.ALL, key),), numbers_of(step, 1)).step_us

    assert (of(None) < of(GraphKey(Part.PIECEWISE, 2000))) is (host_us == 5000.0)


@pytest.mark.parametrize(("dearer", "told"), [(1.03, False), (1.2, True)])
def test_a_whole_graph_is_dearer_than_its_pieces_only_by_more_than_noise(
    monkeypatch: Any, dearer: float, told: bool
) -> None:
    clock = SimulatedClock()

    def close(key: Any, *rest: Any) -> tuple[float, float]:
        host, device = cost(GraphKey(Part.PIECEWISE, key.num_tokens) if isinstance(key, GraphKey) else key, *rest)
        return host, device * (dearer if isinstance(key, GraphKey) and key.part is Part.FULL else 1.0)

    state = FakeState(FakeRunner(clock, close), KEYS, Settings(max_num_reqs=64, max_num_tokens=2048))
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    for size in SIZES:
        assert (table.full.at(size) > table.piecewise.at(size)) is told


@pytest.mark.parametrize("of_rows", [True, False])
def test_a_larger_graph_is_cheaper_only_with_the_smaller_one_s_rows(monkeypatch: Any, of_rows: bool) -> None:
    """What 16 rows cost more is no reason to pad them; what the graph of 16 does is."""
    clock = SimulatedClock()

    def odd(key: Any, tokens: int, kv: int, chunk: int, context: int, decodes: int) -> tuple[float, float]:
        host, device = cost(key, tokens, kv, chunk, context, decodes)
        dear = decodes == 16 if of_rows else isinstance(key, GraphKey) and key == KEYS[2]
        return host, device + (500.0 if dear else 0.0)

    state = FakeState(FakeRunner(clock, odd), KEYS, Settings(max_num_reqs=64, max_num_tokens=2048), 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    assert KEYS[2].num_tokens == 16
    assert table.full.at(64) == pytest.approx(400 + 3 * 64, rel=0.03)
    assert (table.full.at(16) > table.full.at(64)) is not of_rows
    assert [each for each in state.broadcasts if isinstance(each, list)] == [[(2, 3), (2, -1)]]
    assert (KEYS[3], 16, 16) in state.runner.ran
    assert (KEYS[len(SIZES) + 2], 16, 16) in state.runner.ran


@pytest.mark.parametrize("of_rows", [True, False])
def test_pieces_are_cheaper_than_a_whole_graph_only_with_its_rows(monkeypatch: Any, of_rows: bool) -> None:
    """Pieces are timed with a chunk: what several rows cost in every mode shows in whole graphs alone."""
    clock = SimulatedClock()

    def steep(key: Any, tokens: int, kv: int, chunk: int, context: int, decodes: int) -> tuple[float, float]:
        host, device = cost(key, tokens, kv, chunk, context, decodes)
        dear = 4 <= decodes <= 16 and (of_rows or (isinstance(key, GraphKey) and key.part is Part.FULL))
        return host, device + (500.0 if dear else 0.0)

    state = FakeState(FakeRunner(clock, steep), KEYS, Settings(max_num_reqs=64, max_num_tokens=2048), 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    for size in (4, 16):
        assert (table.full.at(size) > table.piecewise.at(size)) is not of_rows


MIXED = [GraphKey(Part.FULL, n, n) for n in (16, 64, 256)]


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_whole_graphs_of_mixed_batches_are_timed_with_chunks(monkeypatch: Any, slower: float, decodes: bool) -> None:
    """Their attention has a fixed shape, and a graph of decodes of that size tells nothing of it, nor they of that."""
    clock = SimulatedClock()

    def shaped(key: Any, *rest: Any) -> tuple[float, float]:
        host, device = cost(key, *rest)
        mixed = isinstance(key, GraphKey) and key.part is Part.FULL and not key.decode_only
        return host, device + (slower - 1) * (400 + 3 * key.num_tokens) if mixed else device

    keys = [*MIXED, *(key for key in KEYS if decodes or key.part is not Part.FULL)]
    state = FakeState(FakeRunner(clock, shaped), keys, Settings(max_num_reqs=64, max_num_tokens=2048), 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    for size in (16, 64, 256):
        assert table.mixed.at(size) == pytest.approx(slower * (400 + 3 * size), rel=0.06)
    if decodes:
        assert table.full.sizes == SIZES
    for size in (16, 64):
        assert table.full.at(size) == pytest.approx((1.0 if decodes else slower) * (400 + 3 * size), rel=0.06)


def test_without_whole_graphs_of_mixed_batches_there_is_no_curve_of_them(monkeypatch: Any) -> None:
    table, _, _ = calibrated(monkeypatch)
    assert table.mixed is None


def test_times_that_stay_the_same_end_it(monkeypatch: Any) -> None:
    """Two rounds tell all where nothing varies; the rest of the allowance isn't used."""
    _, runner, _ = calibrated(monkeypatch, seconds=1e3)
    assert runner.clock.now() < 2.0


def test_times_that_go_on_falling_end_with_half_the_allowance(monkeypatch: Any) -> None:
    """The rest is for what is slow to be timed once at all."""
    clock, runs = SimulatedClock(), itertools.count()

    def falling(key: Any, *rest: Any) -> tuple[float, float]:
        host, device = cost(key, *rest)
        return host, device + 1e6 * 0.999 ** next(runs)

    state = FakeState(FakeRunner(clock, falling), KEYS, Settings(max_num_reqs=64, max_num_tokens=2048), 400.0)
    state.config.split = False
    with stand_ins(monkeypatch):
        assert calibrate(state.runner, state, clock) is not None
    assert 0.45 * 400 < clock.now() < 0.6 * 400


def test_of_many_sizes_some_are_timed_whole_the_ends_among_them(monkeypatch: Any) -> None:
    """A whole step runs thrice for each time; the others run once, and decodes once more so that rows join."""
    settings = Settings(max_num_reqs=64, max_num_tokens=2048)
    full = [GraphKey(Part.FULL, n, n, query_len=1) for n in range(1, 65, 3)]
    pieces = [GraphKey(Part.PIECEWISE, n) for n in range(64, 2049, 64)]
    mixed = [GraphKey(Part.FULL, n, n) for n in range(8, 513, 8)]
    table, runner, _ = calibrated(monkeypatch, keys=[*full, *mixed, *pieces])
    runs = Counter(key for key, _, _ in runner.ran if isinstance(key, GraphKey))
    assert {*full, *pieces} - runs.keys() == set()
    ran = {key for key, times in runs.items() if times > 2}
    assert len(ran & set(full)) == MOST_FULL < len(full)
    assert len(ran & set(mixed)) == MOST_MIXED < len(mixed)
    assert len(ran & set(pieces)) == MOST_PIECES < len(pieces)
    assert {full[0], mixed[0], mixed[-1], pieces[0]} <= ran
    assert table.mixed.at(300) == pytest.approx(400 + 3 * 300, rel=0.03)
    assert max(key.num_tokens for key in ran) >= settings.max_num_tokens - 64
    for size in (2, 34, 61):
        assert table.full.at(size) == pytest.approx(400 + 3 * size, rel=0.03)
    assert table.piecewise.at(1000) == pytest.approx(450 + 3 * 1000, rel=0.03)


def test_dense_sizes_of_pieces_are_not_timed_at_the_cost_of_others(monkeypatch: Any) -> None:
    """A model with wide layers has most of its pieces between 128 and 512 tokens; the curve goes on above."""
    pieces = default_sizes(Settings(max_num_reqs=1024, max_num_tokens=8192), wide=True).piecewise
    keys = [*KEYS[: len(SIZES)], *(GraphKey(Part.PIECEWISE, n) for n in pieces)]
    _, runner, _ = calibrated(monkeypatch, keys=keys)
    ran = {
        key.num_tokens
        for key, _, decodes in runner.ran
        if isinstance(key, GraphKey) and key.part is Part.PIECEWISE and not decodes
    }
    assert len([size for size in ran if size > 512]) >= 3
    assert len([size for size in ran if 128 <= size <= 512]) >= 2


def test_a_slow_spell_of_the_host_is_not_its_cost(monkeypatch: Any) -> None:
    clock = SimulatedClock()

    def spelled(key: Any, tokens: int, *rest: Any) -> tuple[float, float]:
        host, device = cost(key, tokens, *rest)
        return host + (20_000.0 if tokens == 48 else 0.0), device

    keys = [GraphKey(Part.FULL, n, n, query_len=1) for n in (1, 2, 4, 8, 16, 32, 48, 64)]
    state = FakeState(FakeRunner(clock, spelled), keys, Settings(max_num_reqs=64, max_num_tokens=2048), 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    assert table.host_full.base_us == pytest.approx(320, rel=0.05)
    assert table.host_full.req_us == pytest.approx(2, rel=0.2)


def test_what_a_row_takes_the_host_is_of_no_mode(monkeypatch: Any) -> None:
    """Of pieces a chunk and eight rows are timed: what one of the two was late by isn't what a row costs."""
    clock = SimulatedClock()

    def late(key: Any, tokens: int, kv: int, chunk: int, context: int, decodes: int) -> tuple[float, float]:
        host, device = cost(key, tokens, kv, chunk, context, decodes)
        pieces = isinstance(key, GraphKey) and key.part is Part.PIECEWISE
        return host + (2000.0 if pieces and decodes else 0.0), device

    keys = [*KEYS[: len(SIZES)], GraphKey(Part.PIECEWISE, 16)]
    state = FakeState(FakeRunner(clock, late), keys, Settings(max_num_reqs=64, max_num_tokens=2048), 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    hosts = (table.host_full, table.host_piecewise, table.host_eager)
    assert [each.req_us for each in hosts] == pytest.approx([2.0] * 3, rel=0.05)


def test_a_host_that_changes_speed_is_taken_at_one(monkeypatch: Any) -> None:
    """A third of a second slow, a third quick: what was timed while it was slow isn't taken for costly."""

    class Spells(SimulatedClock):
        def host_work_us(self) -> float:
            return HOST_WORK_US * (1.7 if int(3 * self.now()) % 2 else 1.0)

    clock = Spells()

    def spelled(key: Any, *rest: Any) -> tuple[float, float]:
        host, device = cost(key, *rest)
        return host * launching_takes(clock.host_work_us() / HOST_WORK_US), device

    state = FakeState(FakeRunner(clock, spelled), KEYS, Settings(max_num_reqs=64, max_num_tokens=2048), 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    assert clock.now() > 1.0
    assert table.host_work_us in (HOST_WORK_US, 1.7 * HOST_WORK_US)
    usual = launching_takes(table.host_work_us / HOST_WORK_US)
    took = [each.base_us / usual for each in (table.host_full, table.host_piecewise, table.host_eager)]
    assert took == pytest.approx([320, 1520, 9020], rel=0.05)


def test_the_host_s_speed_is_noted_beside_the_step_that_is_timed(monkeypatch: Any) -> None:
    """Not before the one in which rows join and kernels compile, for seconds maybe."""

    class Noting(SimulatedClock):
        ran = 0

        def host_work_us(self) -> float:
            assert len(runner.ran) > self.ran
            last, self.ran = runner.ran[-1], len(runner.ran)
            noted.append((last, self.ran))
            return HOST_WORK_US

    noted: list[Any] = []
    runner = FakeRunner(Noting(), cost)
    state = FakeState(runner, KEYS, Settings(max_num_reqs=64, max_num_tokens=2048))
    state.config.split = False
    with stand_ins(monkeypatch):
        assert calibrate(runner, state, runner.clock) is not None
    assert len(noted) > len(KEYS)
    for last, place in noted:
        assert runner.ran[place] == last


def test_what_was_timed_is_brought_to_the_usual_speed_once(monkeypatch: Any) -> None:
    """The median of what was noted: the first was slow, and one in the middle was interrupted."""
    clock = SimulatedClock()
    runner, times = FakeRunner(clock, cost), launching_takes(1.5)
    with stand_ins(monkeypatch):
        bench = Bench(runner, lambda *_: nullcontext(), lambda said: said, clock)
    case = Case(None, Rows(0, 0, 8))
    slow, quick = Times(150.0 * times, 100.0 * times, 60.0, 0), Times(150.0, 100.0, 60.0, 0)
    case.times = [slow] * 10 + [quick] * 20
    works = [1.5 * HOST_WORK_US] * 10 + [HOST_WORK_US] * 20
    works[20] *= 9
    bench._visits = [(case, visit, work) for visit, work in enumerate(works)]
    assert bench.at_one_speed() == HOST_WORK_US
    for each in case.times:
        assert each == pytest.approx(quick)
    assert bench.at_one_speed() == 0.0
    assert case.times[0] == pytest.approx(quick)


def test_a_step_that_the_device_bounds_is_not_quicker_with_the_host() -> None:
    """But what comes after both is the host's."""
    case = Case(None, Rows(0, 0, 8))
    case.times = [Times(250.0, 100.0, 200.0, 0), Times(130.0, 100.0, 60.0, 0)]
    case.bring(0, 2.0)
    case.bring(1, 2.0)
    assert case.times == [Times(225.0, 50.0, 200.0, 0), Times(75.0, 50.0, 60.0, 0)]


def test_a_slow_spell_that_no_note_tells_is_not_what_launching_pieces_costs(monkeypatch: Any) -> None:
    """Two steps of decodes in pieces tell what rows take; what launching takes, all that ran in pieces."""
    clock = SimulatedClock()

    def spelled(key: Any, tokens: int, *rest: Any) -> tuple[float, float]:
        host, device = cost(key, tokens, *rest)
        late = isinstance(key, GraphKey) and key.part is Part.PIECEWISE and rest[-1]
        return host + (2_000.0 if late else 0.0), device

    state = FakeState(FakeRunner(clock, spelled), KEYS, Settings(max_num_reqs=64, max_num_tokens=2048), 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    assert table.host_piecewise.base_us == pytest.approx(1520, rel=0.05)


def test_what_rows_cost_that_join_again_is_measured(monkeypatch: Any) -> None:
    _, _, state = calibrated(monkeypatch)
    assert state.rejoin_us == pytest.approx(JOIN_US, rel=0.05)


def test_what_rows_cost_that_join_again_is_of_the_table_s_speed(monkeypatch: Any) -> None:
    """The host is half as slow again from when rows join again on."""
    slow = False

    class Slowing(SimulatedClock):
        def host_work_us(self) -> float:
            return HOST_WORK_US * (1.5 if slow else 1.0)

        def launch(self, host_us: float, device_us: float) -> None:
            super().launch(host_us * (launching_takes(1.5) if slow else 1.0), device_us)

    rejoin = Bench.rejoin

    def slowly(self: Bench, case: Case, chunk: Case) -> Any:
        nonlocal slow
        slow = True
        return rejoin(self, case, chunk)

    monkeypatch.setattr(Bench, "rejoin", slowly)
    clock = Slowing()
    state = FakeState(FakeRunner(clock, cost), KEYS, Settings(max_num_reqs=64, max_num_tokens=2048), 20.0)
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    assert table.host_work_us == HOST_WORK_US
    assert state.rejoin_us == pytest.approx(JOIN_US, rel=0.05)


def test_no_row_is_left_behind(monkeypatch: Any) -> None:
    _, runner, _ = calibrated(monkeypatch)
    assert runner.known == {}
    assert runner.execute_model_state is None


def test_the_allowance_holds_and_small_sizes_go_first(monkeypatch: Any) -> None:
    table, runner, state = calibrated(monkeypatch, seconds=0.3)
    assert runner.clock.now() < 0.5
    assert table.full.sizes[0] == 1
    assert table.eager.sizes[0] == 1
    assert max(tokens for _, tokens, _ in runner.ran) < 2048
    # Other ranks follow rank 0 through exactly as many steps.
    assert state.broadcasts[-1] is table
    assert not any(value is False for value in state.broadcasts[:1])


def test_eager_steps_that_the_host_bounds_dont_end_the_timing_of_graphs(monkeypatch: Any) -> None:
    """Launching thousands of kernels takes as long for more tokens, and graphs don't take that."""
    clock = SimulatedClock()

    def slow_to_launch(key: Any, *rest: Any) -> tuple[float, float]:
        host, device = cost(key, *rest)
        return (70_000.0 if key is None else host), device

    state = FakeState(FakeRunner(clock, slow_to_launch), KEYS, Settings(max_num_reqs=64, max_num_tokens=2048))
    with stand_ins(monkeypatch):
        table = calibrate(state.runner, state, clock)
    assert table is not None
    assert table.piecewise.sizes[-1] == 1024
    assert table.eager.sizes[-1] < 2048
    assert clock.now() < 3.5


def timed_tokens(monkeypatch: Any, allowance_s: float, *steps: tuple[Part | None, int, float, float]) -> list[int]:
    """Tokens of the steps that are timed, of which a visit takes the longer of its host and device seconds.

    Args:
        monkeypatch: pytest's.
        allowance_s: for all.
        steps: the part that is captured, tokens, and seconds of host and device.
    """
    clock, took = SimulatedClock(), {tokens: (host_s, device_s) for _, tokens, host_s, device_s in steps}

    def visit(self: Bench, case: Case) -> None:
        host_us, device_us = (1e6 * each for each in took[case.rows.num_tokens])
        clock.time_us += max(host_us, device_us)
        case.times.append(Times(max(host_us, device_us), host_us, device_us, 0))

    monkeypatch.setattr(Bench, "_visit", visit)
    monkeypatch.setattr("kpolicy_vllm.timing.Steps", lambda _: None)
    cases = [Case(None if part is None else GraphKey(part, tokens), Rows(0, 0, tokens)) for part, tokens, _, _ in steps]
    Bench(None, nullcontext, lambda said: said, clock).measure(cases, allowance_s)
    return [case.rows.num_tokens for case in cases if case.times]


def test_where_a_step_takes_too_long_those_of_another_kind_are_still_timed(monkeypatch: Any) -> None:
    """The second eager one would end after the allowance; a larger graph is quick, and runs after it."""
    steps = (None, 64, 0.5, 0.1), (Part.PIECEWISE, 65, 0.01, 0.01), (None, 128, 0.5, 0.1)
    assert timed_tokens(monkeypatch, 0.8, *steps, (Part.PIECEWISE, 256, 0.01, 0.01)) == [64, 65, 256]


def test_a_step_that_the_host_bounds_is_not_expected_to_grow_with_its_tokens(monkeypatch: Any) -> None:
    """Launching 2,048 tokens takes as long as 64, and that is timed; a step that the device bounds isn't."""
    assert timed_tokens(monkeypatch, 1.0, (None, 64, 0.2, 0.001), (None, 2048, 0.2, 0.03)) == [64, 2048]
    assert timed_tokens(monkeypatch, 1.0, (None, 64, 0.001, 0.2), (None, 2048, 0.001, 6.4)) == [64]


def test_graphs_are_not_expected_to_take_what_an_eager_step_took(monkeypatch: Any) -> None:
    """Nor pieces what a whole graph took: the first of each kind is timed."""
    steps = (None, 64, 0.3, 0.1), (Part.PIECEWISE, 128, 0.3, 0.01), (Part.FULL, 256, 0.3, 0.01)
    assert timed_tokens(monkeypatch, 0.7, *steps) == [64, 128, 256]


def test_rows_share_blocks_where_the_cache_is_small(monkeypatch: Any) -> None:
    table, _, _ = calibrated(monkeypatch, num_blocks=40)
    assert table.full.at(64) == pytest.approx(400 + 3 * 64, rel=0.03)


def test_a_short_model_is_timed_with_what_it_holds(monkeypatch: Any) -> None:
    table, runner, _ = calibrated(monkeypatch, max_model_len=1024)
    assert max(tokens for _, tokens, decodes in runner.ran if not decodes) <= 1022
    assert table.prefill_attention.unit_us == pytest.approx(PAIR_US, rel=0.1)


@pytest.mark.parametrize(("longest", "drafts"), [(64, 0), (512, 0), (1000, 0), (512, 3), (2048, 3)])
def test_rows_of_short_models_are_made_anew(monkeypatch: Any, longest: int, drafts: int) -> None:
    """Decode rows have what the model's longest sequence leaves, and begin again when that is used up."""
    q = 1 + drafts
    keys = [GraphKey(Part.FULL, n * q, n, query_len=q) for n in SIZES] + KEYS[len(SIZES) :]
    table, _, state = calibrated(monkeypatch, max_model_len=longest, drafts=drafts, keys=keys)
    assert not state.warned
    assert table.measured
    for size in SIZES:
        assert table.full.at(size * q) == pytest.approx(400 + 3 * size * q, rel=0.06)


def test_graphs_that_all_have_adapters_are_timed(monkeypatch: Any) -> None:
    """vLLM 0.23's second runner captures no others where LoRA is on."""
    import attrs

    keys = [attrs.evolve(key, lora_case=3) for key in KEYS]
    table, runner, _ = calibrated(monkeypatch, keys=keys)
    assert table.full.at(64) == pytest.approx(400 + 3 * 64, rel=0.03)
    assert table.host_full.base_us == pytest.approx(320, rel=0.05)
    assert {key for key, _, _ in runner.ran if isinstance(key, GraphKey)} == set(keys)


def test_decodes_of_any_drafts_are_timed(monkeypatch: Any) -> None:
    keys = [GraphKey(Part.FULL, n * 4, n, max_query_len=4) for n in SIZES] + KEYS[len(SIZES) :]
    table, _, _ = calibrated(monkeypatch, drafts=3, keys=keys)
    assert table.full.at(64) == pytest.approx(400 + 3 * 64, rel=0.03)


def test_a_kind_that_never_ran_has_no_costs(monkeypatch: Any) -> None:
    """Graphs of which none could be timed leave vLLM's rule, not invented costs."""
    keys = [GraphKey(Part.FULL, 4096, 64), *KEYS[len(SIZES) :]]
    table, _, state = calibrated(monkeypatch, keys=keys)
    assert table is None
    assert "these kinds could be timed: full." in state.warned["not_calibrated"]


@pytest.mark.parametrize("asked", [0, 1, 5, 12])
def test_another_rank_that_fails_ends_it_here_too(monkeypatch: Any, asked: int) -> None:
    """Ranks are asked after each step, so none waits in the next for one that has given up."""
    clock = SimulatedClock()
    runner = FakeRunner(clock, cost)
    state = FakeState(runner, KEYS, Settings(max_num_reqs=64, max_num_tokens=2048))
    answers = iter([True] * asked + [False])
    state.agree = lambda ok: ok and next(answers)
    with stand_ins(monkeypatch), pytest.raises(RuntimeError, match="another rank"):
        calibrate(runner, state, clock)
    assert runner.known == {}


def test_a_failing_step_leaves_no_rows(monkeypatch: Any) -> None:
    clock = SimulatedClock()

    def failing(key: Any, tokens: int, *rest: Any) -> tuple[float, float]:
        if tokens == 64:
            raise RuntimeError("out of memory")
        return cost(key, tokens, *rest)

    runner = FakeRunner(clock, failing)
    state = FakeState(runner, KEYS, Settings(max_num_reqs=64, max_num_tokens=2048))
    with stand_ins(monkeypatch), pytest.raises(RuntimeError, match="out of memory"):
        calibrate(runner, state, clock)
    assert runner.known == {}


@pytest.mark.parametrize("seconds", [2.0, 0.0])
def test_experts_are_not_balanced_by_made_up_rows(monkeypatch: Any, seconds: float) -> None:
    """Nothing of the steps is left in what vLLM balances by, and it goes on as it was."""
    clock, balanced = SimulatedClock(), []

    class Balanced(FakeRunner):
        eep_eplb_suppressed = False

        def sample_tokens(self, grammar: Any) -> None:
            super().sample_tokens(grammar)
            loads[0] += 1
            if not self.eep_eplb_suppressed:
                balanced.append(len(self.ran))

    class Loads(list[int]):
        def zero_(self) -> None:
            self[:] = [0]

    loads = Loads([0])
    runner = Balanced(clock, cost)
    runner.eplb_state = SimpleNamespace(model_states={"model": SimpleNamespace(expert_load_pass=loads)})
    state = FakeState(runner, KEYS, Settings(max_num_reqs=64, max_num_tokens=2048), seconds)
    with stand_ins(monkeypatch):
        calibrate(runner, state, clock)
    assert runner.ran
    assert (balanced, loads, runner.eep_eplb_suppressed) == ([], [0], False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: setattr(r.vllm_config.parallel_config, "pipeline_parallel_size", 2), "stages"),
        (lambda r: setattr(r.vllm_config, "kv_transfer_config", SimpleNamespace()), "connector"),
        (lambda r: setattr(r.vllm_config, "ec_transfer_config", SimpleNamespace()), "encoder outputs"),
        (lambda r: setattr(r.vllm_config.model_config, "is_encoder_decoder", True), "encoder"),
        (lambda r: setattr(r, "is_pooling_model", True), "pooling"),
    ],
)
def test_where_it_cannot_measure_it_says_why(monkeypatch: Any, change: Any, reason: str) -> None:
    clock = SimulatedClock()
    runner = FakeRunner(clock, cost)
    assert why_not(runner) is None
    change(runner)
    state = FakeState(runner, KEYS, Settings(max_num_reqs=64, max_num_tokens=2048))
    with stand_ins(monkeypatch):
        assert calibrate(runner, state, clock) is None
    assert reason in state.warned["not_calibrated"]
    assert runner.ran == []
