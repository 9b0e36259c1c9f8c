"""Measured costs held to the steps that run: `kpolicy.corrections`, and what an Engine makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kpolicy import corrections
from kpolicy.corrections import BLOCK, EVERY, LEAST_BLOCKS, MOST_BLOCKS, OVERLAP, UNSEEN, Correction
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.decision import Decision, Launch
from kpolicy.engine import Engine
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.step_effects import StepEffects
from kpolicy.testing.sequences import Sequences

SIZES = (8, 32, 128, 512)
TABLE = CostTable(
    version="measured somewhere", measured=True,
    full=Curve(SIZES, [100.0, 120.0, 200.0, 500.0]),
    piecewise=Curve(SIZES, [110.0, 130.0, 210.0, 510.0]),
    eager=Curve(SIZES, [100.0, 120.0, 200.0, 500.0]),
    host_full=HostCost(10.0), host_piecewise=HostCost(60.0), host_eager=HostCost(1000.0),
)  # fmt: skip
ENOUGH = EVERY * BLOCK * (LEAST_BLOCKS + 1)


def way(part: Part | None, size: int) -> Decision:
    key = None if part is None else GraphKey(part, size)
    mode = Mode.EAGER if part is None else Mode(part.value)
    return Decision(mode, (Launch(Rows.ALL, key),), Reason.GRAPH_FITS)


WAYS = [
    (way(part, size), BatchShape(prefills=[(size, 0)])) for part in (Part.FULL, Part.PIECEWISE, None) for size in SIZES
]
Time = Callable[[Decision, float, random.Random], float]


def served(correction: Correction, steps: int, time: Time, seed: int = 0, ways: Any = WAYS) -> list[CostTable]:
    """Steps of random ways, each taking what `time` makes of the table's time; the tables that came out."""
    rng, tables = random.Random(seed), []  # noqa: S311
    for _ in range(steps):
        decision, shape = rng.choice(ways)
        expected = TABLE.cost(decision.launches, shape.numbers).cycle_us
        table = correction.add(decision, shape.numbers, time(decision, expected, rng))
        tables += [table] if table is not None else []
    return tables


def test_graphs_that_hold_prompts_are_corrected_by_themselves() -> None:
    """Where they have a curve of their own and are off, decode graphs of the same sizes stay as they are."""
    table = attrs.evolve(TABLE, mixed=TABLE.full)
    decodes = [
        (Decision(Mode.FULL, (Launch(Rows.ALL, GraphKey(Part.FULL, size, size, query_len=1)),), Reason.GRAPH_FITS),
         BatchShape.decode(size))
        for size in SIZES
    ]  # fmt: skip
    correction = Correction(table)

    def time(decision: Decision, expected: float, _rng: random.Random) -> float:
        key = decision.launches[0].key
        return expected * (1.3 if key is not None and key.part is Part.FULL and not key.decode_only else 1.0)

    tables = served(correction, 4 * ENOUGH, time, ways=[*WAYS, *decodes])
    assert tables
    assert tables[-1].mixed is not None
    assert tables[-1].mixed.us == pytest.approx([us * 1.3 for us in TABLE.full.us], rel=0.01)
    assert tables[-1].full == TABLE.full


def test_what_decisions_take_for_tied_sizes_is_corrected_with_them() -> None:
    """FULL of 512 tokens counts as PIECEWISE's 490; both numbers are FULL's, and a third more."""
    decided = {"full": Curve(SIZES, [100.0, 120.0, 200.0, 490.0])}
    correction = Correction(TABLE.decided_by(decided))
    tables = served(correction, 4 * ENOUGH, lambda way, us, _rng: us * (1.3 if way.mode is Mode.FULL else 1.0))
    assert tables[-1].full.us == pytest.approx([us * 1.3 for us in TABLE.full.us], rel=0.01)
    assert tables[-1].deciding.full.at(512) == pytest.approx(490 * 1.3, rel=0.01)


def noisy(_decision: Decision, expected: float, rng: random.Random) -> float:
    """The table's time, give or take some percent, and one step in fifty takes ten times as long."""
    return expected * rng.uniform(0.96, 1.06) * (10 if rng.random() < 0.02 else 1)


def test_noise_and_outliers_change_nothing() -> None:
    """However many steps are a little off, or far off now and then, the table stays."""
    assert served(Correction(TABLE), 40_000, noisy) == []


def test_one_mode_that_is_off_is_mended() -> None:
    """PIECEWISE takes a third more at large sizes: only those numbers change, and back when it is over."""
    correction = Correction(TABLE)

    def off(decision: Decision, expected: float, rng: random.Random) -> float:
        large = decision.mode is Mode.PIECEWISE and decision.keys[0].num_tokens == 512
        return noisy(decision, expected, rng) * (1.33 if large else 1.0)

    (table,) = served(correction, ENOUGH, off)
    assert table.version == "measured somewhere, corrected 1"
    assert table.piecewise.us[:3] == TABLE.piecewise.us[:3]
    assert table.piecewise.us[3] == pytest.approx(510 * 1.33, rel=0.04)
    assert (table.full, table.eager, table.host_piecewise) == (TABLE.full, TABLE.eager, TABLE.host_piecewise)
    last = served(correction, 20 * EVERY * BLOCK, noisy, seed=1)[-1]
    assert last is TABLE


def test_host_time_is_mended_apart_from_the_device() -> None:
    """EAGER is bound by the host at small sizes: its host time is what is off."""
    correction = Correction(TABLE)

    def off(decision: Decision, expected: float, rng: random.Random) -> float:
        return noisy(decision, expected, rng) * (1.4 if decision.mode is Mode.EAGER else 1.0)

    (table,) = served(correction, ENOUGH, off)
    assert table.host_eager.base_us == pytest.approx(1400, rel=0.05)
    assert table.eager == TABLE.eager


def test_corrections_are_bounded() -> None:
    """A mode that seems a hundred times off is corrected by half as much again."""

    def absurd(decision: Decision, expected: float, _rng: random.Random) -> float:
        return expected * (100 if decision.mode is Mode.PIECEWISE else 1)

    table = served(Correction(TABLE), ENOUGH, absurd)[-1]
    assert table.piecewise.us[0] == pytest.approx(110 * 1.4918, rel=1e-3)


def test_what_is_not_used_any_more_is_forgotten() -> None:
    """A correction of a mode that no step takes goes, so the mode gets another chance."""
    correction = Correction(TABLE)

    def off(decision: Decision, expected: float, _rng: random.Random) -> float:
        return expected * (1.3 if decision.mode is Mode.PIECEWISE else 1)

    assert served(correction, ENOUGH, off)
    others = [each for each in WAYS if each[0].mode is not Mode.PIECEWISE]
    assert served(correction, (UNSEEN + MOST_BLOCKS) * EVERY * BLOCK, noisy, ways=others)[-1] is TABLE


def test_one_mode_alone_cannot_be_compared() -> None:
    """Where all steps are of one kind nothing says whether it or the device is slow."""
    one = [WAYS[0]]
    assert served(Correction(TABLE), 20_000, lambda _d, us, _r: 1.4 * us, ways=one) == []


USUAL = (way(Part.FULL, 8), BatchShape(prefills=[(8, 0)]))
RIGHT = [each for each in WAYS if each[0] != USUAL[0]]


@pytest.mark.parametrize("others", [RIGHT[5:6], [RIGHT[2], RIGHT[5], RIGHT[-1]], RIGHT], ids=len)
@pytest.mark.parametrize("share", [80, 90])
def test_what_most_steps_are_off_by_is_not_put_on_the_others(share: int, others: Any) -> None:
    """Most steps are of one kind, which takes 30% more than was measured: numbers that are right stay as they are."""
    ways = [USUAL] * (share * len(others)) + others * (100 - share)
    correction = Correction(TABLE)

    def off(decision: Decision, expected: float, rng: random.Random) -> float:
        return noisy(decision, expected, rng) * (1.3 if decision == USUAL[0] else 1.0)

    tables = served(correction, 30 * EVERY * BLOCK, off, ways=ways)
    for table in tables:
        assert table.full.us[1:] == TABLE.full.us[1:]
        assert (table.piecewise, table.eager) == (TABLE.piecewise, TABLE.eager)
        assert (table.host_full, table.host_piecewise, table.host_eager) == (
            TABLE.host_full, TABLE.host_piecewise, TABLE.host_eager,
        )  # fmt: skip
        assert table.full.us[0] == pytest.approx(130, rel=0.04)
    if share == 80 and len(others) == 3:
        assert tables, "three units that agree show that the fourth is off"


def test_units_that_do_not_agree_say_nothing() -> None:
    """Half are off by a third and half aren't: which half is right can't be told, so nothing is touched."""
    ways = [each for each in WAYS if each[0].mode is not Mode.EAGER]

    def off(decision: Decision, expected: float, rng: random.Random) -> float:
        return noisy(decision, expected, rng) * (1.33 if decision.mode is Mode.PIECEWISE else 1.0)

    assert served(Correction(TABLE), 2 * ENOUGH, off, ways=ways) == []


# Halves beside each other


PROMPT = Launch(Rows.PREFILL, GraphKey(Part.PIECEWISE, 512), 1)
FEW, MANY = (Launch(Rows.DECODE, GraphKey(Part.FULL, size, size, query_len=1)) for size in (8, 128))
BESIDE = Decision(
    Mode.SPLIT, (attrs.evolve(MANY, repeat=2), PROMPT), Reason.CHEAPEST_MEASURED, SplitForm.DECODES_BESIDE
)
OVERLAPS = attrs.evolve(TABLE, overlap_cost=0.1)
DIVIDED = [*WAYS, (BESIDE, BatchShape(decodes=[(1, 100)], prefills=[(500, 0)], max_decode_steps=2))]


def beside(correction: Correction, steps: int, us: Any, seed: int = 0, overlap: float = 0.1) -> list[CostTable]:
    """Steps of which one in seven runs halves beside each other; `us` makes of the machine's time what it takes."""
    machine = attrs.evolve(TABLE, overlap_cost=overlap)
    rng, tables = random.Random(seed), []  # noqa: S311
    ways = [*DIVIDED, DIVIDED[-1]]
    for _ in range(steps):
        decision, shape = rng.choice(ways)
        took_us = us(decision, machine.cost(decision.launches, shape.numbers).cycle_us, rng)
        table = correction.add(decision, shape.numbers, took_us)
        tables += [] if table is None else [table]
    return tables


@pytest.mark.parametrize(("overlap", "told"), [(0.6, 0.6), (0.9, 0.738), (0.0, 0.0)])
def test_halves_that_cost_more_beside_each_other_are_mended(overlap: float, told: float) -> None:
    """Two decode steps of 200 us beside a prompt of 510: 550 by the table, and by MOST at most 1.5 times that."""
    correction = Correction(OVERLAPS)
    tables = beside(correction, 4 * ENOUGH, noisy, overlap=overlap)
    assert [*correction.applied] == [OVERLAP]
    assert tables[-1].overlap_cost == pytest.approx(told, abs=0.04)
    assert attrs.evolve(tables[-1], version=OVERLAPS.version, overlap_cost=0.1) == OVERLAPS


def test_what_one_row_costs_changes_by_as_much() -> None:
    """It is timed on the same device: whatever else that does now comes to both."""
    table = attrs.evolve(OVERLAPS, effects=StepEffects(one_row_overlap=0.05))
    last = beside(Correction(table), 4 * ENOUGH, noisy, overlap=0.6)[-1]
    assert last.effects.one_row_overlap == pytest.approx(last.overlap_cost - 0.05)
    assert last.overlap_cost > 0.5


def test_slowdowns_and_what_many_rows_cost_change_by_as_much() -> None:
    """Decode steps that cost the prompt more go on slower themselves; what wasn't timed stays so."""
    effects = StepEffects(one_row_overlap=0.05, one_row_slowdown=1.6, many_rows_overlap=0.2)
    table = attrs.evolve(OVERLAPS, decode_slowdown=1.3, effects=effects)
    last = beside(Correction(table), 4 * ENOUGH, noisy, overlap=0.6)[-1]
    more = last.overlap_cost - 0.1
    assert more > 0.3
    assert last.decode_slowdown == pytest.approx(1.3 + more)
    assert last.effects.one_row_slowdown == pytest.approx(1.6 + more)
    assert last.effects.many_rows_overlap == pytest.approx(0.2 + more)
    assert last.effects.many_rows_slowdown is None
    quicker = attrs.evolve(OVERLAPS, overlap_cost=0.7, decode_slowdown=1.1)
    assert beside(Correction(quicker), 4 * ENOUGH, noisy, overlap=0.1)[-1].decode_slowdown == 1.0


@pytest.mark.parametrize(("slowdown", "repeat"), [(None, 2), (1.6, 2), (1.6, 6), (2.5, 4)])
@pytest.mark.parametrize("times", [1.1, 0.9])
def test_the_table_then_says_what_halves_take(slowdown: float | None, repeat: int, times: float) -> None:
    """Whichever half is over last, and also where a slowdown was timed; up to what they take in turn."""
    table = attrs.evolve(TABLE, overlap_cost=0.45, decode_slowdown=slowdown)
    way = attrs.evolve(BESIDE, launches=(attrs.evolve(MANY, repeat=repeat), PROMPT))
    shape = BatchShape(decodes=[(1, 100)], prefills=[(500, 0)], max_decode_steps=repeat)
    correction, rng, made = Correction(table), random.Random(0), table  # noqa: S311
    for _ in range(4 * ENOUGH):
        decision, batch = rng.choice([*WAYS, (way, shape), (way, shape)])
        took = table.cost(decision.launches, batch.numbers).cycle_us * (times if decision is way else 1.0)
        made = correction.add(decision, batch.numbers, took) or made
    expected = times * (table.cost(way.launches, shape.numbers).cycle_us - table.step_us)
    assert made.cost(way.launches, shape.numbers).cycle_us - table.step_us == pytest.approx(expected, rel=0.03)


def test_outliers_of_halves_beside_each_other_change_nothing() -> None:
    """Whatever one step took, or the steps of one block."""
    correction = Correction(OVERLAPS)
    far = iter([80.0])
    assert beside(correction, 2000, lambda way, us, _rng: us * (next(far, 1.0) if way is BESIDE else 1.0)) == []
    block = beside(correction, EVERY * BLOCK, lambda way, us, _rng: us * (4.0 if way is BESIDE else 1.0), seed=1)
    assert [*block, *beside(correction, 4 * ENOUGH, noisy, seed=2)] == []


@pytest.mark.parametrize("factor", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("halves", [False, True])
def test_a_throttled_device_changes_nothing(factor: float, halves: bool) -> None:
    """What all steps share says nothing of modes nor of overlapping, whether it lasts or comes and goes."""
    serve, correction = (beside, Correction(OVERLAPS)) if halves else (served, Correction(TABLE))
    for turn in range(6):
        slow = factor if turn % 2 else 1.0
        assert serve(correction, 3000, lambda *step, slow=slow: slow * noisy(*step), seed=turn) == []


def test_what_is_off_of_a_half_is_not_put_on_overlapping() -> None:
    """PIECEWISE takes a third more at every size, alone and beside decodes: once that is told, overlapping stays."""
    slow = attrs.evolve(TABLE, overlap_cost=0.1, piecewise=Curve(SIZES, [us * 1.33 for us in TABLE.piecewise.us]))
    correction = Correction(OVERLAPS)

    def us(decision: Decision, _us: float, rng: random.Random) -> float:
        shape = next(shape for way, shape in DIVIDED if way is decision)
        return noisy(decision, slow.cost(decision.launches, shape.numbers).cycle_us, rng)

    tables = beside(correction, 8 * ENOUGH, us)
    assert tables[-1].piecewise.us == pytest.approx(slow.piecewise.us, rel=0.05)
    assert tables[-1].overlap_cost == 0.1
    assert OVERLAP not in correction.applied


@pytest.mark.parametrize(
    "decision",
    [
        attrs.evolve(BESIDE, launches=(MANY, attrs.evolve(PROMPT, stream=0))),
        # 100 of 560 us, which the prompt's own noise hides.
        attrs.evolve(BESIDE, launches=(FEW, PROMPT)),
        # The host takes 1,000 us and more to launch the prompt eagerly.
        attrs.evolve(BESIDE, launches=(MANY, Launch(Rows.PREFILL, None, 1))),
    ],
    ids=["in turn", "too short to tell", "bound by the host"],
)  # fmt: skip
def test_steps_that_do_not_tell_what_overlapping_costs_are_left_out(decision: Decision) -> None:
    rows = decision.launches[0].key
    assert rows is not None
    shape = BatchShape(decodes=[(1, rows.num_tokens)], prefills=[(500, 0)])
    correction, rng = Correction(OVERLAPS), random.Random(0)  # noqa: S311
    for _ in range(4 * ENOUGH):
        way, numbers = (decision, shape.numbers) if rng.random() < 0.3 else (rng.choice(WAYS)[0], WAYS[0][1].numbers)
        if way is not decision:
            numbers = next(shape.numbers for each, shape in WAYS if each is way)
        us = OVERLAPS.cost(way.launches, numbers).cycle_us * (1.4 if way is decision else 1.0)
        assert correction.add(way, numbers, us) is None


def test_an_engine_learns_that_halves_slow_each_other_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table a prompt hides the decodes beside it; on the device halves go on in turn, as nothing does."""
    monkeypatch.setattr(corrections, "EVERY", 1)
    monkeypatch.setattr(corrections, "BLOCK", 64)
    dear = Curve(SIZES, [900.0, 920.0, 940.0, 960.0])
    hides = attrs.evolve(TABLE, overlap_cost=0.05, mixed=dear, both_us=(0.0, 300.0))
    executor = SimulatedExecutor(attrs.evolve(hides, overlap_cost=1.3), num_blocks=512, block_size=16, max_num_reqs=8)
    settings = Settings(max_num_reqs=8, max_num_tokens=512)
    made = Engine("auto", executor=executor, settings=settings, costs=hides, ladder=list(SIZES))
    made.capture()
    sequences = Sequences(1, num_blocks=512)
    decoding = [sequences.start() for _ in range(4)]
    for each in decoding:
        row = sequences.chunk(each, 8)
        made.step(sequences.inputs([row]))
        sequences.advance([row])
    labels = []
    for step in range(1600):
        length = (100, 5, 20, 400)[step % 4]
        prompt = sequences.chunk(sequences.start(), length)
        rows = [prompt] if step % 4 else [*map(sequences.decode, decoding), prompt]
        labels.append((step % 4, made.step(sequences.inputs(rows)).decision.label))
        sequences.end(prompt.sequence)
    divided = [label for kind, label in labels if kind == 0]
    assert divided[0] == "split/beside"
    assert divided[-1] == "split/in_turn"
    assert made.costs.overlap_cost > 1


# An Engine


def engine(table: CostTable, **options: Any) -> tuple[Engine, Sequences]:
    """An Engine that decides by a table, on a device that takes what `TABLE` says."""
    executor = SimulatedExecutor(TABLE, num_blocks=512, block_size=16, max_num_reqs=8)
    settings = Settings(max_num_reqs=8, max_num_tokens=512)
    made = Engine("auto", executor=executor, settings=settings, costs=table, ladder=list(SIZES), **options)
    made.capture()
    return made, Sequences(1, num_blocks=512)


CHEAP = attrs.evolve(TABLE, piecewise=Curve(SIZES, [110.0, 130.0, 210.0, 400.0]))
"""PIECEWISE seems cheap there."""


def serve(made: Engine, sequences: Sequences, steps: int) -> list[str]:
    """Prompts of 400 tokens between short ones: how the long ones ran."""
    modes = []
    for step in range(steps):
        length = 400 if step % 4 == 0 else (5, 20, 100)[step % 4 - 1]
        row = sequences.chunk(sequences.start(), length)
        outputs = made.step(sequences.inputs([row]))
        sequences.end(row.sequence)
        if length == 400:
            modes.append(outputs.decision.mode.value)
    return modes


def test_an_engine_learns_which_mode_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go where the table says until they have shown that it is wrong there."""
    monkeypatch.setattr(corrections, "EVERY", 1)
    monkeypatch.setattr(corrections, "BLOCK", 64)
    made, sequences = engine(CHEAP)
    modes = serve(made, sequences, 800)
    assert modes[0] == "piecewise"
    assert modes[-1] == "full"
    assert "corrected" in made.costs.version
    assert made.decide(BatchShape(prefills=[(400, 0)])).costs_version == made.costs.version


@pytest.mark.parametrize("options", [{"correct": False}, {"communicator": "two"}])
def test_correction_is_off_by_flag_and_with_ranks(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the table is what was given, whatever steps take."""

    class Two:
        rank, world_size = 0, 2

        def broadcast(self, text: str) -> str:
            return text

        def all_reduce_max(self, values: Any) -> list[int]:
            return list(values)

    monkeypatch.setattr(corrections, "EVERY", 1)
    monkeypatch.setattr(corrections, "BLOCK", 64)
    given = {"communicator": Two()} if "communicator" in options else options
    made, sequences = engine(CHEAP, **given)
    assert set(serve(made, sequences, 800)) == {"piecewise"}
    assert made.costs.version == CHEAP.version


def test_analytic_costs_are_not_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that nobody measured is no measure of what a step should take."""
    monkeypatch.setattr(corrections, "EVERY", 1)
    monkeypatch.setattr(corrections, "BLOCK", 64)
    made, sequences = engine(attrs.evolve(CHEAP, measured=False))
    assert set(serve(made, sequences, 400)) == {"piecewise"}


def test_a_right_table_stays() -> None:
    """On a device that takes what the table says nothing is corrected."""
    made, sequences = engine(TABLE)
    serve(made, sequences, EVERY * BLOCK * 6)
    assert made.costs is TABLE
