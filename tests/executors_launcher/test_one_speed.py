"""Samples of a host of changing speed: brought to one speed, what is left unsure, and what that leaves undecided."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.costs import Curve
from kpolicy.executors.calibrate.bench import Bench, _Times
from kpolicy.executors.calibrate.one_speed import (
    Sample,
    at_one_speed,
    chance,
    error_of_one,
    of_one_state,
    typical,
)
from kpolicy.executors.calibrate.table import _curves
from kpolicy.executors.calibrate.ties import Point, between, settled

TRUE_US = (1000.0, 1400.0, 5000.0, 20_000.0)


def sampled(rounds: int, slower: Callable[[int], float]) -> list[list[Sample]]:
    """Rounds over all cases in any order, each sample as many times as long as the host is slow at its place."""
    cases: list[list[Sample]] = [[] for _ in TRUE_US]
    place, drawn = 0, random.Random(3)  # noqa: S311
    for _ in range(rounds):
        for case in drawn.sample(range(len(TRUE_US)), len(TRUE_US)):
            cases[case].append((place, TRUE_US[case] * slower(place)))
            place += 1
    return cases


def test_a_speed_that_lasts_goes() -> None:
    """Two fifths of the time everything takes 2.5 times as long: the samples of that time say the same as the others.

    Of one case more than half were taken then, so that its median is a slow one at first.
    """
    cases = sampled(9, lambda place: 2.5 if 10 <= place < 25 else 1.0)
    assert any(statistics.median(us for _, us in each) > 2 * true for each, true in zip(cases, TRUE_US, strict=True))
    for us, brought in zip(TRUE_US, at_one_speed(cases), strict=True):
        assert brought == pytest.approx([us] * 9)
        assert typical(brought) == pytest.approx(us)


RAW = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "raw"
STATES_US = [1000.0 + 40.0 * case for case in range(80)]


def replayed(rounds: int, quick: Callable[[int], bool]) -> list[list[Sample]]:
    """Rounds over cases whose replays take a tenth less in the other state, and up to half a percent more or less."""
    cases: list[list[Sample]] = [[] for _ in STATES_US]
    place, drawn = 0, random.Random(5)  # noqa: S311
    for _ in range(rounds):
        for case in drawn.sample(range(len(STATES_US)), len(STATES_US)):
            noise = 1 + 0.005 * drawn.uniform(-1, 1)
            cases[case].append((place, STATES_US[case] * noise * (0.9 if quick(place) else 1.0)))
            place += 1
    return cases


@pytest.mark.parametrize("rounds", [2, 3])
def test_replays_of_the_other_state_are_left_out(rounds: int) -> None:
    """Two seconds in another state make no case's median, however few samples it has."""
    cases = replayed(rounds, lambda place: 12 <= place < 22 or 110 <= place < 121)
    assert any(
        statistics.median(us for _, us in each) < 0.97 * true for each, true in zip(cases, STATES_US, strict=True)
    )
    kept = of_one_state(cases)
    off = [
        [abs(statistics.median(samples) / true - 1) for samples, true in zip(each, STATES_US, strict=True)]
        for each in ([[us for _, us in samples] for samples in cases], kept)
    ]
    assert all(clean <= raw + 0.006 for raw, clean in zip(*off, strict=True))
    # One whose two samples are both of that state, at an end of it, can't be told.
    assert sum(clean > 0.01 for clean in off[1]) <= (rounds == 2) < sum(raw > 0.03 for raw in off[0])
    assert sum(map(len, kept)) < sum(map(len, cases))


def test_a_replay_that_has_no_other_sample_is_brought_to_that_state() -> None:
    """And one of the usual state stays what it was."""
    cases = replayed(2, lambda place: 24 <= place < 36)
    inside, outside = (next(place for samples in cases for place, _ in samples if wanted(place))
                       for wanted in ((lambda place: place == 30), (lambda place: place == 50)))  # fmt: skip
    alone: list[list[Sample]] = [[(inside, 900.0)], [(outside, 900.0)], []]
    assert of_one_state([*cases, *alone])[-3:] == [[pytest.approx(1000.0, rel=0.01)], [900.0], []]


def test_without_another_state_every_sample_counts() -> None:
    """Noise, one interruption and a state that most samples are of are nothing to leave out."""
    steady = replayed(3, lambda _: False)
    slow = [[(place, us * (1.5 if place == 31 else 1.0)) for place, us in samples] for samples in steady]
    for cases in (steady, slow, [], [[]], [[(0, 0.0), (1, 0.0)]]):
        assert of_one_state(cases) == [[us for _, us in samples] for samples in cases]


def test_a_round_of_dearer_tokens_is_no_state() -> None:
    """Each round has other tokens, which choose other experts: all of it may be some percent dearer."""
    dearer = [
        [(place, us * (1.03 if i == 1 else 1.0)) for i, (place, us) in enumerate(samples)]
        for samples in replayed(3, lambda _: False)
    ]
    assert of_one_state(dearer) == [[us for _, us in samples] for samples in dearer]


@pytest.mark.parametrize("host_runs", [False, True])
def test_a_bench_tells_replays_of_the_usual_state_and_eager_steps_as_they_were(host_runs: bool) -> None:
    """Where the device runs behind the host; where the host runs all itself its own speed is told."""
    cases = replayed(3, lambda place: 30 <= place < 50)
    bench: Any = Bench.__new__(Bench)
    bench._adapter, bench._brought_of, bench._error = SimpleNamespace(host_runs=host_runs), -1, 0.0
    eager = 7  # the case that launches one by one
    graphs = [SimpleNamespace(key=None if case == eager else "graph") for case in range(len(cases))]
    bench._cases = [(SimpleNamespace(launches=[graph]), None) for graph in graphs]
    bench._times = [[_Times(us, 0.0, us, place=place) for place, us in samples] for samples in cases]
    if host_runs:
        assert bench.us(3) == typical(at_one_speed(cases)[3])
        assert bench.error(3) > 0
        return
    kept = of_one_state([[] if case == eager else samples for case, samples in enumerate(cases)])
    found = [bench.us(case) for case in range(len(cases))]
    assert found == [
        statistics.median([us for _, us in samples] if case == eager else kept[case])
        for case, samples in enumerate(cases)
    ]
    raw = [statistics.median(us for _, us in samples) for samples in cases]
    assert found != raw
    assert found[eager] == raw[eager]


@pytest.mark.parametrize(("model", "windows"), [("qwen05b_third", [(207, 220), (487, 505)]), ("qwen05b_second", [])])
def test_a_calibration_beside_which_processes_began_has_one_state(model: str, windows: list[tuple[int, int]]) -> None:
    """On an H200: where others' processes began, all replays took 7 to 12% less for a second or two."""
    (recorded,) = json.loads((RAW / f"regret_{model}.calibration.json").read_text())
    replays = [each for each in recorded if all(launch[1] != "eager" for launch in each["launches"])]
    cases = [[(sample[5], sample[2]) for sample in each["us"]] for each in replays]
    kept = of_one_state(cases)
    left = [place for samples, some in zip(cases, kept, strict=True) for place, us in samples if us not in some]
    assert all(any(first <= place <= last for first, last in windows) for place in left)
    assert {first for first, _ in windows} | {last for _, last in windows} <= set(left)
    sizes = {}
    for each, samples, some in zip(replays, cases, kept, strict=True):
        ((rows, graph, _, _), *more) = each["launches"]
        alike = rows == "all" and graph.endswith("q=1") and each["decode_kv_tokens"] == 1024 * each["decodes"]
        if alike and not more and each["decodes"] <= 32:
            sizes[each["decodes"]] = (statistics.median(us for _, us in samples), statistics.median(some))
    falls = [max(0.0, 1 - sizes[rows + 1][at] / sizes[rows][at]) for at in (0, 1) for rows in range(1, 32)]
    raw, clean = max(falls[:31]), max(falls[31:])
    assert clean < 0.01
    assert raw > 0.05 if windows else raw == clean


def test_what_one_sample_has_beyond_its_neighbours_stays() -> None:
    """An interruption is the step's own, and the others show that it is one."""
    cases = sampled(9, lambda place: 4.0 if place == 13 else 1.0)
    brought = at_one_speed(cases)
    assert max(max(each) / us for us, each in zip(TRUE_US, brought, strict=True)) == pytest.approx(4.0)
    assert [typical(each) for each in brought] == pytest.approx(list(TRUE_US))


def test_nothing_is_taken_from_nothing() -> None:
    """Cases without samples have none afterwards, and one sample is what it is."""
    assert at_one_speed([[], [(0, 700.0)]]) == [[], [700.0]]
    assert at_one_speed([[(0, 0.0)]]) == [[0.0]]


@pytest.mark.parametrize(
    ("samples", "us"),
    [([5.0], 5.0), ([9.0, 5.0], 5.0), ([9.0, 5.0, 7.0, 8.0], 5.0), ([9.0, 5.0, 7.0, 8.0, 6.0], 6.0)],
)
def test_a_quarter_of_samples_are_not_above_what_is_typical(samples: list[float], us: float) -> None:
    """Of few that is the least."""
    assert typical(samples) == us


def test_the_error_is_what_calibrations_differ_by() -> None:
    """Of many that were drawn alike: between half and twice the scatter of what they say a case takes."""
    drawn = random.Random(1)  # noqa: S311
    said, errors = [], []
    for _ in range(40):
        brought = [[us * drawn.lognormvariate(0, 0.1) for _ in range(12)] for us in TRUE_US * 5]
        said += [math.log(typical(each) / us) for each, us in zip(brought, TRUE_US * 5, strict=True)]
        errors.append(error_of_one(brought) / math.sqrt(12))
    assert 0.5 < statistics.fmean(errors) / statistics.stdev(said) < 2


def test_fewer_samples_agree_by_chance_too() -> None:
    """Of two that differ by a tenth each is off by more than that says; of eight, half of which do, by hardly more."""
    two, eight = [100.0, 110.0], [100.0] * 4 + [110.0] * 4
    by_halves = 1.4826 * math.log(1.1) / 2
    assert error_of_one([two] * 5) / math.sqrt(2) == pytest.approx(by_halves * math.sqrt(2))
    assert error_of_one([eight] * 5) / math.sqrt(8) == pytest.approx(by_halves * math.sqrt(8 / 7))


def test_the_error_sees_halves_that_differ() -> None:
    """Samples that agree with those taken just before, and not with the earlier half, are worth little."""
    steady = [[100.0 + i % 3 for i in range(12)] for _ in range(6)]
    drifting = [[100.0 + i % 3 + (40.0 if i >= 6 else 0.0) for i in range(12)] for _ in range(6)]
    assert error_of_one(drifting) > 10 * error_of_one(steady)


def test_without_repeats_the_error_is_that_of_shared_cores() -> None:
    """One sample a case says nothing of how far it is off."""
    assert error_of_one([[5.0], [7.0], []]) == 0.1
    assert error_of_one([]) == 0.1
    assert chance(0.03, 0.04) == pytest.approx(0.15)
    # However little is known, what is cheaper by more than a quarter is cheaper.
    assert chance(0.1, 0.1) == 0.25


def points(error: float, **us: float) -> dict[int, Point]:
    return {int(size[1:]): Point(each, error) for size, each in us.items()}


@pytest.mark.parametrize(
    ("full", "pieces", "found"),
    [
        # Within chance (8.5% of two times known to 2%) a larger size leaves the smaller one the preference.
        ({"n8": 104.0, "n16": 100.0}, {}, (100.0, 100.0)),
        # As does one that isn't the next.
        ({"n4": 104.0, "n8": 130.0, "n16": 100.0}, {}, (100.0, 130.0, 100.0)),
        # Beyond it the larger size is cheaper.
        ({"n8": 110.0, "n16": 100.0}, {}, (110.0, 100.0)),
        # The same of pieces, of that size or larger.
        ({"n8": 104.0, "n16": 120.0}, {"n16": 100.0}, (100.0, 120.0)),
        ({"n8": 106.0, "n16": 106.0}, {"n16": 100.0}, (100.0, 100.0)),
        # Smaller pieces don't hold the rows.
        ({"n16": 104.0}, {"n8": 100.0}, (104.0,)),
        # What is measured as cheaper stays as it is.
        ({"n8": 100.0, "n16": 104.0}, {"n16": 103.0}, (100.0, 103.0)),
    ],
)
def test_what_chance_may_have_turned_is_a_tie(
    full: dict[str, float], pieces: dict[str, float], found: tuple[float, ...]
) -> None:
    """A tie is decided for fewer tokens and fewer launches."""
    assert settled(points(0.02, **full), [points(0.02, **pieces)]).us == found


def test_the_better_two_times_are_known_the_less_is_a_tie() -> None:
    """4% apart: chance where each is known to 2%, not where to half a percent."""
    rivals = {16: Point(100.0, 0.005)}
    assert settled({16: Point(104.0, 0.005)}, [rivals]).us == (104.0,)
    assert settled({16: Point(104.0, 0.02)}, [rivals]).us == (100.0,)


def test_sizes_between_lie_on_the_curve() -> None:
    """With the error of the next size that was timed, or of the last."""
    eager = {4: Point(100.0, 0.01), 16: Point(160.0, 0.03)}
    found = between(eager, (4, 8, 32))
    assert found == {**eager, 8: Point(120.0, 0.03), 32: Point(240.0, 0.03)}


@pytest.mark.parametrize(("eager_us", "full_us"), [(96.0, 96.0), (90.0, 100.0)])
def test_a_decode_graph_is_held_to_eager_at_the_fewest_rows_that_come_to_it(eager_us: float, full_us: float) -> None:
    """Five rows are the first of a graph of 8: where EAGER seems cheaper for them by chance, FULL is taken."""
    eager = {4: Point(eager_us - 2.0, 0.02), 8: Point(eager_us + 6.0, 0.02)}
    full = {4: Point(70.0, 0.02), 8: Point(100.0, 0.02)}
    _, found, *_ = _curves(eager, full, {}, {}, chance=True)
    assert found == Curve((4, 8), (70.0, full_us))


def test_prompts_in_graphs_and_in_pieces_are_held_to_eager_at_their_size() -> None:
    """Between the sizes that were timed eagerly too; graphs that hold prompts also to pieces."""
    eager = {16: Point(40.0, 0.02), 64: Point(88.0, 0.02)}
    mixed, pieces = {32: Point(58.0, 0.02), 64: Point(80.0, 0.02)}, {32: Point(59.0, 0.02), 64: Point(78.0, 0.02)}
    _, _, whole, parts = _curves(eager, {}, mixed, pieces, chance=True)
    assert (whole, parts) == (Curve((32, 64), (56.0, 78.0)), Curve((32, 64), (56.0, 78.0)))
    # Where samples don't say how far they may be off, 2% is as good, and only of one kind of graph.
    _, _, whole, parts = _curves(eager, {}, mixed, pieces, chance=False)
    assert (whole, parts) == (Curve((32, 64), (58.0, 80.0)), Curve((32, 64), (59.0, 78.0)))
