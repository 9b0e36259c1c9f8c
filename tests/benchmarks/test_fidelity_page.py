"""docs/six_fidelity_runs.md tells the first runs that were held to forecasts as their results have it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.fidelity_served import NOTHING, STARTS
from benchmarks.fidelity_turns import MOST_APART as MOST_TIE
from benchmarks.fidelity_turns import figure, pairs_of, ranked_wrong, tie_of
from kpolicy.middle_profile import middle
from kpolicy.schemas import read_profile
from tests.benchmarks import test_fidelity_docs as earlier
from tests.benchmarks.test_fidelity_docs import ALONE, DOCS, FIGURES, MODELS, MOST_LATENCY, README, SIMULATE, line_of

RUNS = (
    "dsv2lite-nineteenth", "rate-1.3-seventeenth", "rate-1.3-eighteenth", "rate-1.3-nineteenth", "rate-0.7-twentieth",
    "rate-0.7-twenty-first",
)  # fmt: skip
BEFORE_THE_CLAUSES = RUNS[:4]
"""Those judged with ties by how far turns are apart, and by a forecast from the first start"""
ONE_VERDICT = RUNS[:5]
"""Those in whose verdict forecasts count, and whose noisy cells repeats decide whatever single steps are off by"""
PAGE = (DOCS / "six_fidelity_runs.md").read_text(encoding="utf-8").splitlines()
TOLD = " ".join(" ".join(PAGE).split())
RULE = " ".join((DOCS / "measured_fidelity.md").read_text(encoding="utf-8").split())
NAMES = {"ttft_p50_ms": 1, "gap_p50_ms": 2}
"""Medians of latencies, and digits of their milliseconds"""
COUNTS = {8: "eight", 9: "nine", 10: "ten"}
TTFT = "ttft_p50_ms"
MOST_APART = 0.1
"""By so much a policy's own turns may be apart in a figure that a forecast is held to"""
LITE, *QWENS = RUNS
FIRST, SECOND, THIRD, FOURTH, LATEST = QWENS
CROWDED = (FIRST, SECOND, THIRD)
"""The 0.5B's at 1.3 times the trace's rate"""
PAIR = ["split:form=decodes_beside", "auto"]
LATE = "vllm"
"""The policy whose first token is farthest off"""


def model(name: str) -> str:
    which, _, number = name.partition("-")
    return f"{MODELS[which]}, {number.lstrip('0123456789.-')}"


def rows(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """A run's cells in the regimes that the profile has at its own host speed, by first turns."""
    own = earlier.at_own_speed(name)["policies"]["all policies"]
    return {(row["mode"].split("/")[0], row["regime"]): row for row in own if row["regime"] != "all"}


def judged(name: str, key: tuple[str, str]) -> tuple[str, float]:
    """A cell's verdict by the clause, and the error that says so."""
    return earlier.judged(rows(name)[key], earlier.at_own_speed(name))


def all_turns(name: str) -> dict[tuple[str, str], float]:
    """Errors of single steps of all turns."""
    own = earlier.written(name)["by_own_speed"]["all_turns"]
    return {(row["mode"].split("/")[0], row["regime"]): row["error"] for row in own if row["regime"] != "all"}


def repeated(name: str, key: tuple[str, str]) -> str:
    """The middle of repeats, where four fifths of the cell ran again three times."""
    row = rows(name)[key]
    of, error = earlier.ran_again(earlier.at_own_speed(name), row["mode"], row["regime"])
    return earlier.share(error) if of >= earlier.AGAIN_SHARE else ""


def forecasts(name: str) -> dict[str, dict[str, dict[str, float]]]:
    """Told nothing of the run, by the calibrations before it alone."""
    found: dict[str, dict[str, dict[str, float]]] = earlier.written(name + ALONE)["forecasts"][NOTHING]["policies"]
    return found


def shown(figure: dict[str, float]) -> bool:
    """Whether the machine has one figure that a forecast can be held to."""
    return figure["apart"] <= MOST_APART


def spread_of(name: str, by: str = ALONE) -> dict[str, Any]:
    """What `benchmarks.forecast_spread` found of a run, held to the result whose name ends so."""
    path = earlier.path_of(name).with_stem(f"forecast_spread-h200-{name}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert (found["run"], found["starts"]) == (earlier.path_of(name + by).name, STARTS)
    return found


def spread(name: str) -> dict[str, Any]:
    """Its forecasts by parts of the profile, by single calibrations and from other starts."""
    return dict(spread_of(name)["policies"])


def signed(error: float) -> str:
    return f"**{error:+.1%}**" if abs(error) > MOST_LATENCY else f"{error:+.1%}"


def starts(found: dict[str, float]) -> str:
    return f"{signed(found['least'])} to {signed(found['most'])}"


def measured(name: str, policy: str, key: str, digits: int) -> str:
    """All turns of a policy, in milliseconds."""
    turns = earlier.written(name + ALONE)["served"]["policies"][policy]["turns"]
    *others, last = (f"{turn[key]['measured']:.{digits}f}" for turn in turns)
    return f"{', '.join(others)} and {last}"


@pytest.mark.parametrize("key", NAMES)
def test_forecasts_are_told_as_the_results_have_them(key: str) -> None:
    """A row of each policy of each run: its turns, the forecast, what it is from other starts, by less and by more."""
    expected = []
    for name in RUNS:
        told, found = earlier.written(name + ALONE)["served"]["policies"], spread(name)
        for i, (policy, figures) in enumerate(forecasts(name).items()):
            each, figure = found[policy], figures[key]
            begun = each["by_part"]["all"] if name in BEFORE_THE_CLAUSES else {
                key: each["from_starts"][key]["middle"]
            }  # fmt: skip
            assert begun[key] == pytest.approx(figure["error"], abs=5e-4)
            parts = ["" if i else model(name), f"`{policy}`", measured(name, policy, key, NAMES[key])]
            parts += [
                f"{figure['simulated']:.{NAMES[key]}f} ({signed(figure['error'])})",
                starts(each["from_starts"][key]),
            ]
            if key == "ttft_p50_ms":
                parts.append(", ".join(signed(one[key]) for one in each["by_calibration"]))
            parts += [signed(each["by_part"][part][key]) for part in ("launches", "scheduler")]
            expected.append(line_of([*parts, signed(told[policy][key]["error"])]))
    assert earlier.table_of(expected[0], PAGE) == (9 if key == "ttft_p50_ms" else 8, expected)


def test_cells_are_told_as_the_results_have_them() -> None:
    """Each cell of each run: steps, single ones of first turns and of all, what the machine differs by, repeats."""
    expected = []
    for name in RUNS:
        for i, (key, row) in enumerate(rows(name).items()):
            begin = ["" if i else model(name), ", ".join(key), f"{row['steps']:,}"]
            errors = [earlier.share(each) for each in (row["error"], all_turns(name)[key])]
            middle_error = repeated(name, key) if row["noise"] >= earlier.NOISY else ""
            expected.append(line_of([*begin, *errors, f"{row['noise']:.1%}", middle_error, judged(name, key)[0]]))
    assert earlier.table_of(expected[0], PAGE) == (8, expected)


def over_starts(name: str, key: str) -> dict[str, tuple[float, float]]:
    """By policy, the least and the most error of a median from any start."""
    return {
        policy: (each["from_starts"][key]["least"], each["from_starts"][key]["most"])
        for policy, each in spread(name).items()
    }


def within(names: Sequence[str], key: str) -> float:
    """The largest error of a median of these runs from any start, but for `LATE`'s first token on the 0.5B."""
    return max(
        abs(error)
        for name in names
        for policy, both in over_starts(name, key).items()
        if (policy, key) != (LATE, TTFT) or name == LITE
        for error in both
    )


def of_parts(names: Sequence[str], part: str, *, late: bool) -> float:
    """The largest error of a median by part of a profile; with `LATE`'s first tokens or without."""
    return max(
        abs(found["by_part"][part][key])
        for name in names
        for policy, found in spread(name).items()
        for key in NAMES
        if late or (policy, key) != (LATE, TTFT)
    )


def early_or_late(error: float) -> str:
    return f"{abs(error):.1%} {'late' if error > 0 else 'early'}"


def test_what_the_page_says_of_forecasts_first_is_so() -> None:
    """Errors from any start, those of the policy that is farthest off, and what parts of a profile come to."""
    ttft, gap = ([within(names, key) for names in ((LITE,), QWENS)] for key in NAMES)
    told = f"within {ttft[0]:.1%} on DeepSeek-V2-Lite's and {ttft[1]:.1%} on the 0.5B's, those of gaps within "
    assert f"{told}{gap[0] * 100:.1f} and {gap[1]:.1%}, but for one policy" in TOLD
    assert f"From any of {STARTS} starts among the profile's notes" in TOLD
    assert f"**In short: yes for gaps between tokens, within {max(gap):.1%}, and for which of two policies" in TOLD
    assert max(ttft) < 0.08
    off = [abs(forecasts(name)[LATE][TTFT]["error"]) * 100 for name in QWENS]
    told = f"but for `vllm`'s on the 0.5B, which came out {min(off):.0f} to {max(off):.0f}% off in its five runs"
    told += ", [in four of them mostly as the host was slower or quicker than in its profile](#why-first-tokens-miss)"
    assert f"within 8% for first tokens, {told}.**" in TOLD
    off = [forecasts(name)[LATE][TTFT]["error"] for name in QWENS]
    late, *early = map(early_or_late, off)
    told = f"**`vllm`'s first token on the 0.5B came out {late}, {', '.join(early[:3])} and {early[3]}**"
    assert told in TOLD
    least, most = zip(*(over_starts(name, TTFT)[LATE] for name in QWENS), strict=True)
    assert f"and from other starts {early_or_late(min(least))} to {early_or_late(max(most))}" in TOLD
    apart = [forecasts(name)[LATE][TTFT]["apart"] for name in QWENS]
    assert f"turns of one run were {', '.join(f'{100 * each:.1f}' for each in apart[:4])} and {apart[4]:.1%}" in TOLD
    assert [name for name in QWENS if shown(forecasts(name)[LATE][TTFT])] == [THIRD]
    assert "That token is judged in the nineteenth alone: in the 0.5B's other four its turns are too far apart" in TOLD
    missed = [name for name in RUNS if abs(forecasts(name)[LATE][TTFT]["error"]) > MOST_LATENCY]
    assert [name for name in RUNS if holds_as_forecast(name) and name not in missed] == [LITE]
    assert "Were it judged in all, one of the six would hold, DeepSeek-V2-Lite's." in TOLD
    assert "That is `vllm`'s first token in the 0.5B's runs but the nineteenth" in TOLD
    assert f"is busy for {busy(LITE):.0%}, and its turns are {forecasts(LITE)[LATE][TTFT]['apart']:.1%} apart" in TOLD
    others = [each[key] for name in RUNS for policy, each in forecasts(name).items() for key in NAMES
              if (policy, key) != (LATE, TTFT)]  # fmt: skip
    assert all(map(shown, others))
    assert f"by the profiles' launches alone medians are up to {of_parts(RUNS, 'launches', late=True):.1%} off" in TOLD
    told = (
        f"all but `vllm`'s first tokens are within {of_parts(RUNS, 'scheduler', late=False):.1%}, from the first start "
    )
    assert f"{told}among the notes within {of_parts(RUNS, 'all', late=False):.1%}" in TOLD
    found = [spread(name)[LATE] for name in RUNS]
    steady = [abs(each["by_part"]["scheduler"][TTFT]) for each in found]
    of_start = [abs(each["by_part"]["all"][TTFT]) for each in found]
    of_middle = [abs(each["from_starts"][TTFT]["middle"]) for each in found]
    nearer = [sum(a > b for a, b in zip(steady, each, strict=True)) for each in (of_start, of_middle)]
    assert nearer == [3, 5]
    assert "is nearer in three of the six runs from the first start, and in five by the middle of 24." in TOLD
    singles = [
        (abs(one[key]), (policy, key) == (LATE, TTFT), name, i)
        for name in RUNS
        for policy, found in spread(name).items()
        for i, one in enumerate(found["by_calibration"])
        for key in NAMES
    ]
    assert len({each[2:] for each in singles}) == 18
    [other] = [each[0] for each in singles if each[0] > MOST_LATENCY and not each[1]]
    assert sum(each[0] > MOST_LATENCY and each[1] for each in singles) == 9
    told = f"By one of eighteen single calibrations another median is over 10% off, {other:.1%}, and by nine `vllm`'s"
    assert told in TOLD


def test_why_first_tokens_miss() -> None:
    """The host in a policy's turns over its notes, and what its first token is off by, as noted and told of it."""
    found = {name: spread(name)[LATE] for name in RUNS}
    expected = []
    for name, each in found.items():
        slower = each["slower_host"]
        *others, last = (f"{times - 1:+.1%}" for times in slower["turns"])
        parts = [f"{slower['times'] - 1:+.1%}", f"{', '.join(others)} and {last}"]
        errors = each["from_starts"][TTFT]["middle"], slower["by_it"][TTFT], slower["moved"][TTFT]
        expected.append(line_of([model(name), *parts, *(f"{error:+.1%}" for error in errors)]))
    at = PAGE.index(expected[0])
    assert PAGE[at : at + len(expected) + 1] == [*expected, ""]
    noted, by_it = ([abs(error) for error in each] for each in zip(*(
        (found[name]["from_starts"][TTFT]["middle"], found[name]["slower_host"]["by_it"][TTFT]) for name in QWENS
    ), strict=True))  # fmt: skip
    every = [abs(each["slower_host"]["by_it"][key]) for name in RUNS for each in spread(name).values() for key in NAMES]
    told = f"its first tokens are within {max(by_it):.1%} on the 0.5B, for {min(noted) * 100:.1f} to {max(noted):.1%}, "
    assert f"{told}and every median of all policies within {max(every):.1%}" in TOLD
    later = [each["slower_host"]["moved"][TTFT] for each in found.values()]
    auto = [spread(name)["auto"]["slower_host"]["moved"][TTFT] for name in RUNS]
    assert min(auto) < 0 < max(auto)
    assert {spread_of(name)["slower"] for name in RUNS} == {1.08}
    told = f"comes {min(later) * 100:.1f} to {max(later):.1%} later in all six, and `auto`'s, which replays graphs, "
    assert f"{told}between {-min(auto):.1%} sooner and {max(auto):.1%} later" in TOLD
    most = max(times for name in RUNS for each in spread(name).values() for times in each["slower_host"]["turns"])
    assert f"turns of these runs were up to {most - 1:.0%} slower than their notes" in TOLD
    turns = []
    for name in (SECOND, THIRD):
        first = earlier.written(name + ALONE)["served"]["policies"][LATE]["turns"][0][TTFT]["measured"]
        error = forecasts(name)[LATE][TTFT]["simulated"] / first - 1
        turns.append((found[name]["slower_host"]["turns"][0] - 1, *early_or_late(error).split()))
    (a, late, way), (b, early, other) = turns
    assert (
        f"The eighteenth's first one was on a host {a:.1%} slower, and its first token was forecast {late} {way}; the "
        f"nineteenth's on one {b:.1%} slower, and {early} {other} (from the first start)."
    ) in TOLD
    slower, error = found[LATEST]["slower_host"], found[LATEST]["from_starts"][TTFT]["middle"]
    told = (
        f"on a host {1 - slower['times']:.1%} quicker than its notes {error:.1%} late, and {slower['by_it'][TTFT]:.1%}"
    )
    assert f"In the twenty-first: {told} told so" in TOLD
    told = f"nothing of what DeepSeek-V2-Lite's is off by, {abs(found[LITE]['from_starts'][TTFT]['middle']):.1%}."
    assert f"in the twenty-first less than half, and {told}" in TOLD
    assert abs(found[LITE]["slower_host"]["by_it"][TTFT]) > abs(found[LITE]["from_starts"][TTFT]["middle"])
    assert [name for name in RUNS if abs(found[name]["slower_host"]["by_it"][TTFT])
            > abs(found[name]["from_starts"][TTFT]["middle"]) / 2] == [LITE, LATEST]  # fmt: skip
    step_by_step = [earlier.written(name + ALONE)["served"]["policies"][LATE][TTFT]["error"] for name in RUNS]
    assert f"told the host's speed step by step they are within {max(map(abs, step_by_step)):.1%}" in TOLD


def medians_off(name: str) -> float:
    """The largest error of a median, told the host's speed."""
    policies = earlier.written(name)["served"]["policies"].values()
    most: float = max(abs(each[key]["error"]) for each in policies for key in NAMES)
    return most


def test_what_the_clause_of_two_verdicts_says_of_these_runs() -> None:
    """Which would hold told the host's speed, which as forecasts, and which by all clauses since the seventeenth."""
    assert max(map(medians_off, RUNS)) <= MOST_LATENCY
    assert [name for name in ONE_VERDICT if not told_wrongly(name) and not over_the_line(name)] == [LITE, THIRD]
    assert [name for name in ONE_VERDICT if holds(name)] == [LITE]
    told = f"Looking back the nineteenth would hold, with every median within {medians_off(THIRD):.1%}, and not by"
    assert told in RULE
    assert [name for name in ONE_VERDICT if holds_as_forecast(name)] == [LITE, SECOND, FOURTH]
    assert (bool(forecast_wrongly(FIRST)), forecasts_over(FIRST)) == (True, [])
    assert "As forecasts DeepSeek-V2-Lite's, the eighteenth and the twentieth would hold" in RULE
    # Small cells aren't judged, near ties are none, single steps come first. The seventeenth's result is of before it
    # told the share of its cell's time.
    small = (FIRST, ("piecewise", "host-bound"))
    told = f"The seventeenth's cell over the line, {rows(FIRST)[small[1]]['steps']} steps, has 0.1% of it, by its logs"
    assert told in RULE
    assert "time_share" not in rows(FIRST)[small[1]]
    kept = []
    for name in ONE_VERDICT:
        cells = [
            key for key, row in rows(name).items()
            if judged(name, key)[0] == "no" and row["error"] > earlier.MOST and (name, key) != small
        ]  # fmt: skip
        result = earlier.written(name)
        pairs = ranked_wrong(
            {policy: with_deviation(each) if "deviation" not in each else each
             for policy, each in result["us_per_token"].items()}
        )  # fmt: skip
        kept += [name] * (not cells and not pairs)
    assert kept == [LITE, SECOND, THIRD, FOURTH]
    assert (
        "would make four of the five until then hold where one does: all but the seventeenth, whose pair stays" in RULE
    )


def figures_told(result: dict[str, Any], served: dict[str, Any]) -> list[dict[str, Any]]:
    """What policies are ranked by: the time a token, which is the run's own, and figures of a simulation of it."""
    return [result["us_per_token"], *({policy: each[key] for policy, each in served.items()} for key in FIGURES)]


def test_what_the_clauses_turn_in_the_first_run_by_them() -> None:
    """The twenty-first's cells by repeats, its pairs by how far turns are apart, and what is left of its forecast."""
    assert holds(LATEST)
    for name in (LATEST, LATEST + ALONE):
        result = earlier.at_own_speed(name)
        # By repeats where steps of one kind differ by 3%, and small cells too.
        then = {
            key: earlier.judged(
                {each: row[each] for each in row if each != "time_share"}, {**result, "measured_at": ""}
            )
            for key, row in rows(name).items()
        }
        assert {verdict for verdict, _ in then.values()} == {"yes"}
        assert not any(wrong_then(of) for of in figures_told(result, result["served"]["policies"]))
        blind = result["forecasts"][NOTHING]["policies"]
        wrong = {key: wrong_then({policy: each[key] for policy, each in blind.items()}) for key in FIGURES}
        assert {key: pairs for key, pairs in wrong.items() if pairs} == {"gap_p50_ms": [tuple(PAIR)]}
    pair = [earlier.written(LATEST + ALONE)["forecasts"][NOTHING]["policies"][policy]["gap_p50_ms"] for policy in PAIR]
    apart = pair[1]["measured"] / pair[0]["measured"] - 1
    assert 0 < pair[0]["simulated"] / pair[1]["simulated"] - 1 < 0.001
    ties = [tie_of(*pair), max(each["apart"] for each in pair)]
    assert f"{ties[0]:.1%}" == f"{ties[1]:.1%}"
    told = (
        f"by less than 0.1%, and so from each of the {STARTS} starts and by all five calibrations; it is {apart:.1%} "
    )
    assert f"{told}slower, where a tie is {ties[0]:.1%}, by the interval and by how far turns are apart" in TOLD
    told = (
        "Without the last, by which forecasts have a verdict of their own, the twenty-first wouldn't hold; the other "
    )
    assert f"{told}three turn no verdict of it" in TOLD
    row = rows(LATEST)["split", "middle"]
    told = (
        f"a pair of policies {apart:.1%} apart ranks wrongly by the gap of its forecast, whichever way ties are told. "
    )
    told += (
        "The other three clauses turn nothing of it: its two cells that are over 5% by single steps are within it by "
    )
    told += (
        f"repeats, {share_of(LATEST)}, the one that isn't judged, {row['steps']} steps, is {row['error']:.1%} off, and "
    )
    assert f"{told}told the host's speed no pair ranks wrongly by ties of either kind" in RULE


def share_of(name: str) -> str:
    """The repeats' errors of cells over the line by single steps."""
    one, other = (judged(name, key)[1] for key, row in rows(name).items() if row["error"] > earlier.MOST)
    return f"{one * 100:.1f} and {other:.1%}"


def wrong_then(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs that are ranked wrongly with ties by how far turns are apart."""
    return ranked_wrong({
        policy: {name: each[name] for name in each if name != "deviation"} for policy, each in figures.items()
    })  # fmt: skip


def busy(name: str) -> float:
    """The share of a run's time for which its slowest policy is busy."""
    policies = earlier.written(name)["served"]["policies"]
    share: float = max(each["busy_ms"]["measured"] / each["span_ms"]["measured"] for each in policies.values())
    return share


def test_what_the_page_says_of_steps_and_verdicts_first_is_so() -> None:
    """Errors of cells, those over the line by single steps, and which runs hold."""
    assert f"DeepSeek-V2-Lite's are within {max(row['error'] for row in rows(LITE).values()):.1%} in every" in TOLD
    every = [(name, key) for name in QWENS for key in rows(name)]
    odd = {(name, key): judged(name, key)[0] for name, key in every if judged(name, key)[0] != "yes"}
    few, over = (FOURTH, ("piecewise", "host-bound")), (FOURTH, ("piecewise", "middle"))
    short = (LATEST, ("split", "middle"))
    assert odd == {(FIRST, ("piecewise", "host-bound")): "no", few: "not judged", over: "no", short: "not judged"}
    assert {judged(LITE, key)[0] for key in rows(LITE)} == {"yes"}
    least = min(row["time_share"] for name in (SECOND, THIRD) for row in rows(name).values())
    assert f"Every cell of the eighteenth and the nineteenth has {least:.1%} or more" in TOLD
    for (name, key), number, more in ((few, "twentieth", ""), (short, "twenty-first", ", is {:.1%} off")):
        small, *others = sorted(row["time_share"] for row in rows(name).values())
        row = rows(name)[key]
        assert row["time_share"] == small < earlier.SMALL <= others[0]
        told = f"of the {number}'s one of {row['steps']} steps has {small:.2%}{more.format(row['error'])}, and every "
        assert f"{told}other {'has ' if more else ''}{others[0]:.1%} or more" in TOLD
    assert (len(every), list(odd.values()).count("not judged"), list(odd.values()).count("no")) == (34, 2, 2)
    assert "within 5% in 30 of 32 judged cells by the rule" in TOLD
    alone = [judged(name + ALONE, key)[0] for name in QWENS for key in rows(name + ALONE)]
    assert (len(alone), alone.count("yes"), alone.count("not judged")) == (35, 29, 3)
    assert "and by the three calibrations before a run alone in 29" in TOLD
    middle_row, middle_error = rows(FOURTH)[over[1]], judged(*over)[1]
    told = f"{middle_error:.1%} by the middle of three repeats where its single steps are {middle_row['error']:.1%} off"
    assert f"by one cell, PIECEWISE's in the middle: {told}" in TOLD
    singly = [(key[0], rows(name)[key]) for name, key in every
              if rows(name)[key]["error"] > earlier.MOST and (name, key) != few]  # fmt: skip
    assert len(singly) == 8
    worst = [max((row["error"], row["noise"]) for mode, row in singly if mode == of) for of in ("eager", "piecewise")]
    told = f"by single steps eight cells are over 5%, EAGER's by up to {worst[0][0]:.1%} and PIECEWISE's by up to "
    told += f"{worst[1][0]:.1%}, where steps of one kind differ by {worst[0][1] * 100:.1f} and "
    assert f"{told}{worst[1][1]:.1%}" in TOLD
    eager, pieces = ("eager", "host-bound"), ("piecewise", "middle")
    row, again = rows(LATEST)[eager], earlier.repeated(earlier.written(LATEST), *eager)
    assert again is not None
    assert (again["steps"], again["repeats"]) == (row["steps"], 9)
    told = (
        f"EAGER, {row['error']:.1%} by single steps and {judged(LATEST, eager)[1]:.1%} by the middle of nine repeats "
    )
    told += f"of all {row['steps']}, and PIECEWISE in the middle, {rows(LATEST)[pieces]['error'] * 100:.1f} and "
    assert f"The twenty-first's are {told}{judged(LATEST, pieces)[1]:.1%}" in TOLD
    assert [key for key, row in rows(LATEST).items() if row["error"] > earlier.MOST] == [eager, pieces]
    assert "within 5% by the rule, two of the twenty-first's by repeats alone" in TOLD
    told_speed = [medians_off(name + ALONE) for name in RUNS]
    assert max(told_speed) <= MOST_LATENCY
    assert f"and what its scheduler took: every median of all six is within {max(told_speed):.1%}" in TOLD


def test_what_verdicts_leave_out_is_told() -> None:
    """PIECEWISE that the host bounds at the speed noted at each step; single steps of all turns, of every run."""
    told = []
    for name in (LATEST, LITE):
        result, key = earlier.written(name), ("piecewise", "host-bound")
        (first,), (later,), (again,) = (
            [row for row in rows if (row["mode"], row["regime"]) == key]
            for rows in (result["policies"]["all policies"], result["later_turns"], result["cells_again"])
        )
        assert again["again"] == again["steps"] == first["steps"]
        told.append((first, f"({again['error']:.1%} repeated; {later['error']:.1%} in later turns)"))
    (latest, more), (lite, of_lite) = told
    assert (
        f"They are {latest['steps']:,} of the twenty-first, {latest['time_share']:.1%} of its time, "
        f"{latest['error']:.1%} off by single steps {more}, and {lite['steps']} of DeepSeek-V2-Lite's nineteenth, "
        f"{lite['error']:.1%} off {of_lite}."
    ) in TOLD
    most = {name: max(all_turns(name).values()) for name in RUNS}
    assert [name for name in RUNS if most[name] <= earlier.MOST] == [LITE, LATEST]
    eager = [all_turns(name)["eager", "host-bound"] for name in QWENS[:-1]]
    assert (
        f"each cell's error is at most {most[LITE]:.1%} in DeepSeek-V2-Lite's nineteenth and {most[LATEST]:.1%} in the "
        f"twenty-first. Of the 0.5B's four before EAGER's is {min(eager) * 100:.1f} to {max(eager):.1%} so, and none "
        "is within 5%."
    ) in TOLD
    over = [row["error"] for row in rows(LATEST).values() if row["error"] > earlier.MOST]
    assert f"The two are EAGER and PIECEWISE in the middle, {over[0] * 100:.1f} and {over[1]:.1%} by single" in TOLD


def test_what_the_page_says_of_verdicts_first_is_so() -> None:
    """Which runs hold, told the host's speed and as forecasts, by what the others don't, and by three calibrations."""
    assert [name for name in RUNS if holds(name)] == [LITE, LATEST]
    assert [name for name in RUNS if holds_as_forecast(name)] == [LITE, SECOND, FOURTH]
    told = "**As forecasts three of the six hold**: DeepSeek-V2-Lite's nineteenth, and Qwen2.5-0.5B's eighteenth and "
    assert f"{told}twentieth. The seventeenth **and the latest, the twenty-first, don't**: one pair of policies" in TOLD
    gaps = [gap_apart(name) for name in (FIRST, LATEST)]
    told = f"`auto` and decodes beside prompts, {gaps[0] * 100:.1f} and {gaps[1]:.1%} apart by gaps, ranks wrongly"
    assert told in TOLD
    late = early_or_late(forecasts(LATEST)[LATE][TTFT]["error"])
    assert f"The twenty-first's medians are within {most_forecast(LATEST):.1%}, `vllm`'s first token {late}." in TOLD
    assert [forecast_wrongly(name) for name in RUNS] == [
        {"forecast gap p50": [PAIR]} if name in (FIRST, LATEST) else {} for name in RUNS
    ]
    assert [forecasts_over(name) for name in RUNS] == [[(LATE, TTFT)] if name == THIRD else [] for name in RUNS]
    assert [name for name in RUNS if not over_the_line(name) and not wrongly(name) and not holds(name)] == [THIRD]
    assert "a pair ranks wrongly, or, in one, `vllm`'s forecast misses" in TOLD
    off = early_or_late(forecasts(THIRD)[LATE][TTFT]["error"])
    assert f"The nineteenth of the 0.5B doesn't by `vllm`'s first token, {off}." in TOLD
    assert "**Told the host's speed the latest run of each model holds**, DeepSeek-V2-Lite's nineteenth and the" in TOLD
    held = (LITE, LATEST)
    assert not any(over_the_line(name + end) or told_wrongly(name + end) for name in held for end in ("", ALONE))
    most = [max(medians_off(name + end) for name in held) for end in ("", ALONE)]
    told = (
        f"every pair ranks as measured, medians are within {most[0]:.1%}; by the three calibrations before a run alone "
    )
    assert f"{told}too, medians within {most[1]:.1%}" in TOLD
    assert "**The 0.5B's four before it don't hold**, and were judged while forecasts counted" in TOLD
    assert over_the_line(FIRST) == [("piecewise", "host-bound")]
    assert f"seventeenth doesn't by a cell of {rows(FIRST)[('piecewise', 'host-bound')]['steps']} steps and" in TOLD
    assert over_the_line(SECOND) == []
    assert told_wrongly(SECOND)
    assert "the eighteenth by that pair alone" in TOLD
    assert (over_the_line(THIRD), told_wrongly(THIRD)) == ([], {})
    told = "the nineteenth by `vllm`'s forecast, and by the calibrations before alone by a cell and another pair too"
    assert told in TOLD
    assert over_the_line(THIRD + ALONE) == [("piecewise", "host-bound")]
    assert over_the_line(FOURTH) == over_the_line(FOURTH + ALONE) == [("piecewise", "middle")]
    assert told_wrongly(FOURTH) == {}
    assert "the twentieth by one cell" in TOLD
    assert "[four clauses](measured_fidelity.md#the-rule-clause-by-clause) came since the seventeenth" in TOLD
    assert (
        "since the seventeenth together** (small cells, ties by an interval, single steps first, two verdicts)" in RULE
    )


def most_forecast(name: str) -> float:
    """The largest error of a median as a forecast, of both sides as the result has them."""
    every = [each[key] for each in forecasts(name).values() for key in NAMES]
    return max(abs(each["simulated"] / each["measured"] - 1) for each in every)


def gap_apart(name: str) -> float:
    """By what share the gap of `auto` is longer than that of decodes beside prompts."""
    split, auto = (forecasts(name)[policy]["gap_p50_ms"]["measured"] for policy in PAIR)
    return float(auto / split - 1)


def over_the_line(name: str) -> list[tuple[str, str]]:
    """Cells that aren't within 5% by the rule."""
    return [key for key in rows(name) if judged(name, key)[0] == "no"]


def forecasts_over(name: str) -> list[tuple[str, str]]:
    """Medians that a forecast is held to and misses by over 10%, by the calibrations before the run."""
    return [
        (policy, key)
        for policy, each in forecasts(name).items()
        for key in NAMES
        if shown(each[key]) and abs(each[key]["error"]) > MOST_LATENCY
    ]


def holds(name: str) -> bool:
    """Whether a run holds by the rule of its time: cells, pairs and forecasts or told medians."""
    if name in ONE_VERDICT:
        return not over_the_line(name) and not told_wrongly(name) and holds_as_forecast(name)
    return not over_the_line(name) and not told_wrongly(name) and medians_off(name) <= MOST_LATENCY


def holds_as_forecast(name: str) -> bool:
    """Whether what a run was forecast is within the line: medians and pairs."""
    return not forecast_wrongly(name) and not forecasts_over(name)


def told_wrongly(name: str) -> dict[str, list[list[str]]]:
    """By what pairs of policies are ranked wrongly, told the host's speed."""
    result = earlier.written(name)
    found = {"time a token": result["ranked_wrong"]}
    found |= {FIGURES[key]: pairs for key, pairs in result["served"]["ranked_wrong"].items()}
    return {key: pairs for key, pairs in found.items() if pairs}


def forecast_wrongly(name: str) -> dict[str, list[list[str]]]:
    """By what pairs are ranked wrongly, told nothing, by the calibrations before the run."""
    blind = earlier.written(name + ALONE)["forecasts"][NOTHING]["ranked_wrong"]
    return {f"forecast {FIGURES[key]}": pairs for key, pairs in blind.items() if pairs}


def wrongly(name: str) -> dict[str, list[list[str]]]:
    """By what pairs are ranked wrongly, told the host's speed and, after "forecast", told nothing."""
    return told_wrongly(name) | forecast_wrongly(name)


def test_which_pairs_rank_wrongly() -> None:
    """One of the 0.5B's, in three runs, by how much it and replays are apart; none in the others."""
    for name in (LITE, THIRD, FOURTH):
        assert wrongly(name) == spread_of(name)["ranked_wrong_from_starts"] == {}
    for name in (FIRST, LATEST):
        assert spread_of(name)["ranked_wrong_from_starts"] == {f"gap_p50_ms of {' before '.join(PAIR)}": STARTS}
    assert wrongly(LATEST) == {"forecast gap p50": [PAIR]}
    # By all five calibrations too.
    every = earlier.written(LATEST)["forecasts"][NOTHING]["ranked_wrong"]
    assert {key: pairs for key, pairs in every.items() if pairs} == {"gap_p50_ms": [PAIR]}
    for result in map(earlier.written, (LATEST, LATEST + ALONE)):
        assert not any((result["not_shown"], *result["served"]["not_shown"].values()))
        assert not any(result["forecasts"][NOTHING]["not_shown"].values())
    assert not told_wrongly(LATEST + ALONE)
    assert "every pair is shown, and told the host's speed ranks as measured by all five, by the three" in TOLD
    assert wrongly(FIRST) == {"time a token": [PAIR], "forecast gap p50": [PAIR]}
    assert wrongly(SECOND) == {"time a token": [PAIR]}
    assert spread_of(SECOND)["ranked_wrong_from_starts"] == {}
    results = {name: earlier.written(name) for name in RUNS}
    shown_in = earlier.written(FOURTH)["served"]["not_shown"]
    assert {key: pairs for key, pairs in shown_in.items() if pairs} == {TTFT: [["auto", "piecewise"]]}
    assert "that of `auto` and `piecewise` by first tokens isn't shown" in TOLD
    tokens = [[results[name]["us_per_token"][policy] for policy in PAIR] for name in QWENS]
    apart = [auto["measured"] / split["measured"] - 1 for split, auto in tokens]
    gaps = [gap_apart(name) for name in (FIRST, LATEST)]
    told = "by time a token in the seventeenth and the eighteenth, in which they are "
    told += f"{apart[0] * 100:.1f} and {apart[1]:.1%} apart, and by the gap of a forecast in the seventeenth and the "
    assert f"{told}twenty-first, {gaps[0] * 100:.1f} and {gaps[1]:.1%} apart" in TOLD
    replays = sorted(abs(each) for name in QWENS for each in results[name]["replays_apart"].values())
    told = f"differed by {replays[0] * 100:.1f} to {replays[-1]:.1%} between policies of the 0.5B's runs and by "
    [lite] = results[LITE]["replays_apart"].values()
    assert f"{told}{abs(lite):.1%} between two of DeepSeek-V2-Lite's" in TOLD
    shared, *anew = (results[name]["replays_apart"]["auto and split:form=decodes_beside"] for name in QWENS)
    turns = max(each["apart"] for pair in tokens[1:] for each in pair)
    assert f"{anew[0]:.1%}" == f"{anew[1]:.1%}"
    told = (
        f"`auto`'s replays took {shared:.1%} longer than those of decodes beside prompts while turns shared captures, "
    )
    told += f"{-anew[0] * 100:.1f}, {-anew[1] * 100:.1f} and {-anew[2]:.1%} less in the three runs since, and "
    told += f"{anew[3]:.1%} longer in the twenty-first; turns of "
    assert f"{told}either are at most {turns:.1%} apart by time a token" in TOLD
    alone = earlier.written(THIRD + ALONE)
    assert (alone["ranked_wrong"], not any(alone["served"]["ranked_wrong"].values())) == ([["piecewise", "vllm"]], True)
    quick, slow = (alone["us_per_token"][policy]["measured"] for policy in alone["ranked_wrong"][0])
    apart = slow / quick - 1
    assert f"and `piecewise` and `vllm`, {apart:.1%} apart, rank wrongly by time a token" in TOLD
    told = f"`piecewise` and `vllm` in the nineteenth: {apart:.1%} apart by time a token, of which `piecewise`'s is "
    assert f"{told}{alone['us_per_token']['piecewise']['error']:.1%} too long so" in TOLD
    assert apart < 0.07
    told = f"up to {most_apart_before():.1%} apart in the runs before and {apart:.1%} in the nineteenth"
    assert f"choose none for a difference of less than 7%**: wrong rankings were of pairs {told}" in TOLD
    told = (
        f"Wrong rankings were of policies up to {apart:.1%} apart in the figure: don't choose by a difference of less "
    )
    assert f"{told}than 7%" in " ".join(" ".join(SIMULATE).split())


def most_apart_before() -> float:
    """How far apart the furthest pair was that ranked wrongly in the runs before."""
    return max(apart for name in earlier.LAST for apart in earlier.wrongly_ranked(earlier.written(name)))


def test_what_the_clause_for_ties_says_of_these_runs() -> None:
    """By both rules, from what the results tell of turns: pairs that are ranked, a tie, and not shown."""
    kinds = {"then": [0, 0, 0], "now": [0, 0, 0]}
    wrong: dict[str, list[tuple[str, tuple[str, str]]]] = {}
    for name in BEFORE_THE_CLAUSES:
        result = earlier.written(name)
        figures = {"time a token": result["us_per_token"]}
        figures |= {
            key: {policy: each[key] for policy, each in result["served"]["policies"].items()} for key in FIGURES
        }
        for key, then in figures.items():
            now = {policy: with_deviation(each) for policy, each in then.items()}
            for rule, of in (("then", then), ("now", now)):
                for _, apart, tie in pairs_of(of):
                    kinds[rule][0 if apart > tie else 1 if tie <= MOST_TIE else 2] += 1
            wrong.setdefault(name, []).extend((key, pair) for pair in ranked_wrong(now))
    assert sum(kinds["then"]) == sum(kinds["now"]) == 105
    assert kinds["then"][2] == 0
    told = f"Of 105 pairs and figures of the four runs until then {kinds['then'][0]} are ranked and "
    told += f"{kinds['then'][1]} a tie as they were judged, and "
    told += f"{kinds['now'][0]}, {kinds['now'][1]} and {kinds['now'][2]} not shown by it"
    assert told in RULE
    assert {name: found for name, found in wrong.items() if found} == {FIRST: [("time a token", tuple(PAIR))]}
    pair = [earlier.written(SECOND)["us_per_token"][policy] for policy in reversed(PAIR)]
    told = f"the eighteenth's pair is {pair[0]['measured'] / pair[1]['measured'] - 1:.1%} apart where each one's turns "
    told += "are "
    assert f"{told}{pair[0]['apart'] * 100:.1f} and {pair[1]['apart']:.1%}" in RULE


def with_deviation(told: dict[str, Any]) -> dict[str, Any]:
    """A figure of two turns as results of today have it, by how much these are apart."""
    low = 2 / (2 + told["apart"])
    made = figure([low, low * (1 + told["apart"])], [1.0, 1.0], 6)
    return told | {name: made[name] for name in ("deviation", "of")}


def test_what_the_host_took() -> None:
    """In the runs and in the servings that forecasts go by: the scheduler, and how slow the host was."""
    scheduler, host, single, slowness = [], [], [], []
    works: list[tuple[float, str]] = []
    for name in RUNS:
        result, costs = earlier.written(name + ALONE), read_profile(earlier.path_of(name + ALONE, "-profile")).costs
        served = costs.served
        assert served is not None
        own = [us for turns in result["scheduler_us"].values() for us in turns]
        steps, prompts = ([us[i] for us in own] for i in (0, 1))
        made = [read_profile(earlier.path_of(name, f"-profile-{number}")).costs for number in range(1, 4)]
        alone = [each.served.scheduler_us for each in made if each.served]
        parts = [f"{served.scheduler_us:.0f} ({min(alone):.0f} to {max(alone):.0f})"]
        parts += [f"{served.scheduler_prompt_us:.0f}"]
        parts += [f"{min(each):.0f} to {max(each):.0f}" for each in (steps, prompts)]
        scheduler.append(line_of([model(name), *parts]))
        turns = [turn["host_work_us"] for each in result["served"]["policies"].values() for turn in each["turns"]]
        usual_us = costs.host_work_us
        means = [each.served.mean_work_us / each.host_work_us for each in made if each.served]
        single.append(f"{min(means):.2f} to {max(means):.2f}")
        parts = [f"{served.mean_work_us / usual_us:.2f}", single[-1], f"{max(served.host_work_us) / usual_us:.1f}"]
        slowness.append(f"{min(turns) / usual_us:.2f} to {max(turns) / usual_us:.2f}")
        host.append(line_of([model(name), *parts, slowness[-1]]))
        works.append((usual_us, f"{min(turns):.1f} to {max(turns):.1f}"))
    at = PAGE.index(scheduler[0])
    assert PAGE[at : at + len(RUNS)] == scheduler
    at = PAGE.index(host[0])
    assert PAGE[at : at + len(RUNS)] == host
    (lite, beside), *own = works
    usual = f"{', '.join(f'{each[0]:.1f}' for each in own[:4])} and {own[4][0]:.1f} us in the profiles of the 0.5B's "
    usual += "runs"
    turns_of = f"{', '.join(each[1] for each in own[:4])} and {own[4][1]} us in the mean of their turns; "
    turns_of += f"{lite:.1f} and {beside}"
    assert f"Fixed work took {usual}, by the calibrations before, and {turns_of} in DeepSeek-V2-Lite's" in TOLD
    told = f"single servings of five were {single[3]} and {single[0]} times as slow as the launches of their runs, of "
    told += f"ten {single[4]} and {single[5]}, and the turns after the latter "
    assert f"{told}{slowness[4]} and {slowness[5]} times" in TOLD


@pytest.mark.parametrize("name", RUNS)
def test_profiles_are_the_middle_of_their_calibrations(name: str) -> None:
    """Of the three before the run, by which it is forecast, and of all five; one verdict is another by the three."""
    made = [read_profile(earlier.path_of(name, f"-profile-{number}")) for number in range(1, 6)]
    assert middle(made).costs == read_profile(earlier.path_of(name, "-profile")).costs
    assert middle(made[:3]).costs == read_profile(earlier.path_of(name + ALONE, "-profile")).costs
    assert all(each.costs.served is not None and each.costs.served.host_work_us for each in made)
    verdicts = [{key: judged(each, key)[0] for key in rows(each)} for each in (name, name + ALONE)]
    if name == LATEST:
        key = ("piecewise", "host-bound")
        assert (key in rows(name), rows(name + ALONE)[key]["steps"], verdicts[1][key]) == (False, 6, "not judged")
        assert "In the twenty-first six PIECEWISE steps are host-bound by the three, and aren't judged" in TOLD
    other = {key for key, verdict in verdicts[1].items() if verdict != verdicts[0].get(key, "not judged")}
    assert other == ({("piecewise", "host-bound")} if name == THIRD else set())
    if other:
        error = judged(name + ALONE, ("piecewise", "host-bound"))[1]
        assert f"PIECEWISE that the host bounds is {error:.1%} off in the nineteenth by the middle of repeats" in TOLD
    named = f"`fidelity-h200-{name}.json`"
    assert named in TOLD


def test_the_clause_was_written_before_the_runs_that_it_judges() -> None:
    """By its time and the first calibration's."""
    assert "**Forecasts**, on 2026-11-29 at 18:44 UTC (committed at 18:45, c3d2e5a8)" in RULE
    made = [read_profile(earlier.path_of(name, "-profile-1")).measured_at for name in RUNS]
    assert min(made) > "2026-11-29T18:45"


def test_what_forecasts_from_several_starts_would_have_been() -> None:
    """As the clause for runs to come tells of these."""
    middles = {(name, policy, key): each["from_starts"][key]["middle"] for name in BEFORE_THE_CLAUSES
               for policy, each in spread(name).items() for key in NAMES}  # fmt: skip
    first, *more = (middles[name, LATE, TTFT] for name in CROWDED)
    told = f"Looking back `vllm`'s first token is {first:.1%} late and {-more[0] * 100:.1f} and {-more[1]:.1%} early so"
    assert told in RULE
    others = [
        abs(error) for (name, policy, key), error in middles.items() if name == LITE or (policy, key) != (LATE, TTFT)
    ]
    assert max(others) <= MOST_LATENCY
    assert "no other median is beyond 10% either way" in RULE


def test_what_single_steps_first_would_have_made_of_the_runs() -> None:
    """As the clause for runs to come tells: cells within the line by single steps that have another verdict."""
    turned = [(name, key, *judged(name, key)) for name in ONE_VERDICT for key, row in rows(name).items()
              if row["error"] <= earlier.MOST and judged(name, key)[0] != "yes"]  # fmt: skip
    [(name, key, verdict, error)] = turned
    assert (name, key, verdict) == (FOURTH, ("piecewise", "middle"), "no")
    single = rows(FOURTH)[key]["error"]
    assert f"the twentieth's PIECEWISE in the middle, {single:.1%} by single steps and {error:.1%} by repeats" in RULE
    row = rows(FOURTH)[key]
    assert (
        f"**{single:.1%} by single steps, {error:.1%} by the middle of repeats**, which decides where steps of one "
        f"kind differ by 3% or more ({row['noise']:.1%} here)"
    ) in TOLD
    assert f"PIECEWISE in the middle, {row['steps']:,} steps" in TOLD
    for each in (FOURTH, FOURTH + ALONE):
        since = {**earlier.at_own_speed(each), "measured_at": earlier.SINGLES_FIRST}
        assert earlier.judged(rows(each)[key], since) == ("yes", rows(each)[key]["error"])
        assert {earlier.judged(row, since)[0] for row in rows(each).values()} == {"yes", "not judged"}
        assert not told_wrongly(each)
    assert "By that the twentieth would hold in all of it" in TOLD
    alone = rows(FOURTH + ALONE)[key]["error"]
    assert f"by the three calibrations before it alone too ({alone:.1%} by single steps there)" in TOLD
    before: dict[str, list[tuple[str, str, float, float]]] = {}
    for each in earlier.LAST:
        result = earlier.at_own_speed(each) if each in earlier.CLAUSE else earlier.written(each)
        for cell in result["policies"]["all policies"]:
            if cell["regime"] != "all" and cell["error"] <= earlier.MOST:
                found, worst = earlier.judged(cell, result)
                told = (each, f"{cell['mode']}, {cell['regime']}", cell["error"], worst)
                before.setdefault(found, []).append(told)
    [no] = before["no"]
    assert no[:2] == ("dsv2lite-eleventh", "eager, middle")
    told = f"EAGER in the middle of DeepSeek-V2-Lite's eleventh, {no[2] * 100:.1f} and {no[3]:.1%}"
    assert told in RULE
    assert len(before["not shown"]) == 6
    assert 'six cells that were "not shown"' in RULE


def held_now() -> int:
    """How many of these runs hold."""
    return sum(map(holds, RUNS))


def before() -> tuple[int, int]:
    """How many runs on an H200 there were before, and how many hold."""
    runs = [earlier.runs_of(each) for each in MODELS]
    return sum(len(each) for each, _ in runs), sum(len(held) for _, held in runs)


def earlier_forecasts() -> list[tuple[float, str, str]]:
    """(error, run, what it was told) of each median that those before by the clause were forecast."""
    return [
        (abs(each[key]["error"]), name, knows)
        for name in earlier.CLAUSE
        for knows, found in earlier.written(name + earlier.FORECAST)["forecasts"].items()
        for each in found["policies"].values()
        for key in NAMES
    ]


def test_what_the_page_says_of_other_runs_and_loads() -> None:
    """How many before hold, how far off forecasts were, how busy the slowest policy was, and what halves are off by."""
    made, held = before()
    assert (
        f"Of {made + len(RUNS)} runs on H200s until then {COUNTS[held + held_now()]} hold, each by the rule of its time"
        in TOLD
    )
    off = earlier_forecasts()
    assert max(off)[1].startswith("small24")
    assert f"a small model's first token was up to {max(off)[0]:.1%} off" in TOLD
    assert (
        f"and was {max(each for each in off if each[1:] == ('small24-twelfth', NOTHING))[0]:.1%} off as a fore" in TOLD
    )
    lite, *others, fourth, latest = map(busy, RUNS)
    least, most = min(others) * 100, max(others)
    told = f"at 1.3 times the slowest policy is busy for {least:.0f} to {most:.0%} of the time, at 0.7 times for "
    assert f"{told}{fourth * 100:.0f} and {latest:.0%} (0.5B) and {lite:.0%} (DeepSeek-V2-Lite)" in TOLD
    told = f"Its server is busy for {least:.0f} to {most:.0%} of the time in three of the runs and for "
    assert f"{told}{fourth * 100:.0f} and {latest:.0%} in the latest two" in TOLD
    assert f"`vllm`'s on the 0.5B, busy for {latest * 100:.0f} and {fourth:.0%}, had none either" in TOLD
    halves = [
        row["bias"]
        for name in QWENS
        for row in earlier.written(name)["by_own_speed"]["first_turns"]
        if (row["mode"], row["regime"]) == ("split/decodes_beside", "all")
    ]
    told = f"They came out {', '.join(f'{100 * each:.1f}' for each in halves[:4])} and {halves[4]:.1%} too slow in the "
    assert f"{told}mean" in TOLD


def test_how_forecasts_were_made() -> None:
    """In how many minutes calibrations were over, and how far gaps move from other starts."""
    first: list[str] = []
    for name in RUNS:
        made = [read_profile(earlier.path_of(name, f"-profile-{number}")).measured_at for number in range(1, 6)]
        minutes = [60 * int(each[11:13]) + int(each[14:16]) for each in made]
        assert minutes == sorted(minutes)
        assert minutes[2] - minutes[0] == 2
        # Turns of the run lie between the third and the fourth.
        assert minutes[3] - minutes[2] >= 4
        first.append(made[0][11:16])
    assert f"DeepSeek-V2-Lite's nineteenth was calibrated from {first[0]} UTC on" in TOLD
    assert f"seventeenth, eighteenth and nineteenth from {first[1]}, {first[2]} and {first[3]} on" in TOLD
    assert f"twentieth and twenty-first from {first[4]} and {first[5]} on, the day after" in TOLD
    assert "the last of which was over two minutes after the first; the next was behind the run" in TOLD
    moved = [most - least for name in RUNS for least, most in over_starts(name, "gap_p50_ms").values()]
    assert f"Gaps move by at most {max(moved) * 100:.1f} points" in TOLD
    assert f"`--seed 0` to `--seed {STARTS - 1}`" in TOLD


def test_what_the_page_of_the_latest_runs_says_of_these() -> None:
    """How many hold, by what pairs and first tokens forecasts were wrong, and how far apart policies must be."""
    latest = " ".join((DOCS / "fidelity.md").read_text(encoding="utf-8").split())
    assert (held_now(), sum(map(holds_as_forecast, RUNS))) == (2, 3)
    assert "told the host's speed two hold, as forecasts three, by rules of their times" in latest
    off = [abs(forecasts(name)[LATE][TTFT]["error"]) for name in QWENS]
    assert f"launched eagerly, was {min(off) * 100:.1f} to {max(off):.1%} off in [five runs before]" in latest
    apart = [gap_apart(LATEST)]
    for name in QWENS[:2]:
        split, auto = (earlier.written(name)["us_per_token"][policy]["measured"] for policy in PAIR)
        apart.append(auto / split - 1)
    assert f"one pair of policies up to {max(apart):.1%} apart" in latest
    alone = earlier.written(THIRD + ALONE)
    quick, slow = (alone["us_per_token"][policy]["measured"] for policy in alone["ranked_wrong"][0])
    most = max(slow / quick - 1, most_apart_before())
    for page in (latest, README):
        assert f"pairs up to {most:.1%} apart" in page
    assert f"a first token of prompts that are launched eagerly was up to {max(off):.1%} off" in README
    told = (
        f"Wrong rankings were of policies up to {most:.1%} apart in the figure: don't choose by a difference of less "
    )
    assert f"{told}than 7%" in " ".join(" ".join(SIMULATE).split())
    unjudged = [name for name in RUNS if holds_as_forecast(name) and not shown(forecasts(name)[LATE][TTFT])]
    assert unjudged == [SECOND, FOURTH]
    assert min(abs(forecasts(name)[LATE][TTFT]["error"]) for name in unjudged) > MOST_LATENCY
    made, held = before()
    assert (made + len(RUNS), held + held_now()) == (30, 10)


def test_the_changelog_says_what_the_latest_run_is() -> None:
    """Its medians, told and forecast, and its cells that are over the line by single steps."""
    page = " ".join((DOCS / "../CHANGELOG.md").read_text(encoding="utf-8").split())
    singles = [row["error"] for row in rows(LATEST).values() if row["error"] > earlier.MOST]
    told = f"medians are within {medians_off(LATEST):.1%}, and every cell that is judged is within 5%, two by repeats "
    told += (
        f"({singles[0] * 100:.1f} and {singles[1]:.1%} by single steps, {share_of(LATEST)} repeated). As a forecast it "
    )
    most = most_forecast(LATEST)
    told += (
        f"doesn't: medians are within {most:.1%}, and a pair of policies {gap_apart(LATEST):.1%} apart ranks wrongly"
    )
    assert told in page
