"""docs/fidelity.md tells the latest run of each model as its results have it, and other pages tell no more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.fidelity_served import NOTHING
from benchmarks.forecast_spread import STARTS
from kpolicy.middle_profile import middle
from kpolicy.schemas import read_profile
from tests.benchmarks import test_fidelity_docs as earlier
from tests.benchmarks.test_fidelity_docs import ALONE, DOCS, FIGURES, MODELS, MOST_LATENCY, README, SIMULATE, line_of

RUNS = ("dsv2lite-nineteenth", "rate-1.3-seventeenth")
PAGE = (DOCS / "fidelity.md").read_text(encoding="utf-8").splitlines()
TOLD = " ".join(" ".join(PAGE).split())
RULE = " ".join((DOCS / "measured_fidelity.md").read_text(encoding="utf-8").split())
NAMES = {"ttft_p50_ms": 1, "gap_p50_ms": 2}
"""Medians of latencies, and digits of their milliseconds"""
COUNTS = {8: "eight", 9: "nine", 10: "ten"}
MOST_APART = 0.1
"""By so much a policy's own turns may be apart in a figure that a forecast is held to"""
LITE, QWEN = RUNS


def model(name: str) -> str:
    return MODELS[name.split("-")[0]]


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


def spread_of(name: str) -> dict[str, Any]:
    """What `benchmarks.forecast_spread` found of a run."""
    path = earlier.path_of(name).with_stem(f"forecast_spread-h200-{name}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert (found["run"], found["starts"]) == (earlier.path_of(name + ALONE).name, STARTS)
    return found


def spread(name: str) -> dict[str, Any]:
    """Its forecasts by parts of the profile, by single calibrations and from other starts."""
    return dict(spread_of(name)["policies"])


def signed(error: float) -> str:
    return f"**{error:+.1%}**" if abs(error) > MOST_LATENCY else f"{error:+.1%}"


def starts(found: dict[str, float]) -> str:
    return f"{signed(found['least'])} to {signed(found['most'])}"


def measured(name: str, policy: str, key: str, digits: int) -> str:
    """Both turns of a policy, in milliseconds."""
    turns = earlier.written(name + ALONE)["served"]["policies"][policy]["turns"]
    return " and ".join(f"{turn[key]['measured']:.{digits}f}" for turn in turns)


@pytest.mark.parametrize("key", NAMES)
def test_forecasts_are_told_as_the_results_have_them(key: str) -> None:
    """A row of each policy of each run: both turns, the forecast, what it is from other starts, by less and by more."""
    expected = []
    for name in RUNS:
        told, found = earlier.written(name + ALONE)["served"]["policies"], spread(name)
        for i, (policy, figures) in enumerate(forecasts(name).items()):
            each, figure = found[policy], figures[key]
            assert each["by_part"]["all"][key] == pytest.approx(figure["error"], abs=5e-4)
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


def within(name: str, key: str) -> float:
    """The largest error of a median from any start, of policies whose own turns are near each other."""
    found = forecasts(name)
    return max(
        abs(error) for policy, both in over_starts(name, key).items() if shown(found[policy][key]) for error in both
    )


def test_what_the_page_says_first_is_so() -> None:
    """Errors of forecasts and of cells, which pairs are ranked wrongly, and whether a run holds."""
    ttft, gap = ([within(name, key) for name in RUNS] for key in NAMES)
    told = (
        f"within {ttft[0]:.1%} on DeepSeek-V2-Lite's shape and {ttft[1]:.1%} on Qwen2.5-0.5B's, those of gaps within "
    )
    told += f"{gap[0] * 100:.1f} and {gap[1]:.1%}, from any of {STARTS} starts among its notes"
    assert told in TOLD
    [late] = [policy for policy, each in forecasts(QWEN).items() if not shown(each["ttft_p50_ms"])]
    assert late == "vllm"
    least, most = over_starts(QWEN, "ttft_p50_ms")[late]
    apart = forecasts(QWEN)[late]["ttft_p50_ms"]["apart"]
    both = measured(QWEN, late, "ttft_p50_ms", 1)
    told = (
        f"`vllm`'s first token on the latter came out {least * 100:.1f} to {most:.1%} late: it took {both} ms in two "
    )
    assert f"{told}turns, {apart:.1%} apart" in TOLD
    assert all(shown(each[key]) for each in forecasts(LITE).values() for key in NAMES)
    alone = [
        (each[key], policy, name, i)
        for name in RUNS
        for policy, found in spread(name).items()
        for i, each in enumerate(found["by_calibration"])
        for key in NAMES
        if shown(forecasts(name)[policy][key])
    ]
    over = [each for each in alone if abs(each[0]) > MOST_LATENCY]
    [(short, policy, name, _)] = over
    assert (policy, name) == ("vllm", LITE)
    assert len({each[2:] for each in alone}) == 6
    assert f"By one of six single calibrations one such median is over 10% off, {-short:.1%} short" in TOLD
    parts = {
        part: [
            abs(found["by_part"][part][key])
            for name in RUNS
            for policy, found in spread(name).items()
            for key in NAMES
            if shown(forecasts(name)[policy][key])
        ]
        for part in ("launches", "scheduler", "all")
    }
    assert f"by the profiles' launches alone they are up to {max(parts['launches']):.1%} off" in TOLD
    late = max(abs(spread(QWEN)["vllm"]["by_part"]["scheduler"][key]) for key in NAMES)
    every = max(late, *parts["scheduler"])
    assert f"With the scheduler's time and a steady host every median of both runs is within {every:.1%}" in TOLD
    assert f"by the default within {max(parts['all']):.1%} but for that one" in TOLD
    assert every <= MOST_LATENCY
    whole = max(row["error"] for row in rows(LITE).values()), max(all_turns(LITE).values())
    assert max(whole) <= earlier.MOST
    assert {judged(LITE, key)[0] for key in rows(LITE)} == {"yes"}
    assert (
        f"DeepSeek-V2-Lite's are within {whole[0]:.1%} in every mode and regime, in both turns {whole[1]:.1%}" in TOLD
    )
    [(key, odd)] = [(key, row) for key, row in rows(QWEN).items() if judged(QWEN, key)[0] != "yes"]
    assert (key, judged(QWEN, key)[0]) == (("piecewise", "host-bound"), "no")
    rest = max(row["error"] for each, row in rows(QWEN).items() if each != key)
    steps = sum(row["steps"] for row in rows(QWEN).values())
    both = max(error for each, error in all_turns(QWEN).items() if each != key)
    told = f"the 0.5B's within {rest:.1%}, in both turns {both:.1%}, but for {odd['steps']} of {steps:,} steps, "
    told += f"PIECEWISE that the host bounds, {odd['error']:.1%} off and "
    told += f"{judged(QWEN, key)[1]:.1%} by the middle of repeats"
    assert told in TOLD
    assert "**DeepSeek-V2-Lite's run holds by the rule, the 0.5B's doesn't**" in TOLD
    told_speed = [
        max(abs(each[key]["error"]) for each in earlier.written(name + ALONE)["served"]["policies"].values())
        for name in RUNS
        for key in NAMES
    ]
    assert max(told_speed) <= MOST_LATENCY
    assert f"and what its scheduler took: every median of both is within {max(told_speed):.1%}" in TOLD


def wrongly(name: str) -> dict[str, list[list[str]]]:
    """By what pairs of policies are ranked wrongly, told the host's speed and, after "forecast", told nothing."""
    result = earlier.written(name)
    found = {"time a token": result["ranked_wrong"]}
    found |= {FIGURES[key]: pairs for key, pairs in result["served"]["ranked_wrong"].items()}
    blind = earlier.written(name + ALONE)["forecasts"][NOTHING]["ranked_wrong"]
    found |= {f"forecast {FIGURES[key]}": pairs for key, pairs in blind.items()}
    return {key: pairs for key, pairs in found.items() if pairs}


def test_which_pairs_rank_wrongly() -> None:
    """From every start: none on DeepSeek-V2-Lite; of the 0.5B's one, by how much it and replays are apart."""
    pair = [["split:form=decodes_beside", "auto"]]
    assert wrongly(LITE) == spread_of(LITE)["ranked_wrong_from_starts"] == {}
    assert spread_of(QWEN)["ranked_wrong_from_starts"] == {f"gap_p50_ms of {' before '.join(pair[0])}": STARTS}
    assert wrongly(QWEN) == {"time a token": pair, "forecast gap p50": pair}
    result = earlier.written(QWEN)
    split, auto = (result["us_per_token"][policy]["measured"] for policy in pair[0])
    gaps = [forecasts(QWEN)[policy]["gap_p50_ms"]["measured"] for policy in pair[0]]
    told = f"by time a token, in which they are {auto / split - 1:.1%} apart, and a forecast by the gap, "
    assert f"{told}{gaps[1] / gaps[0] - 1:.1%} apart" in TOLD
    apart = sorted(abs(each) for each in result["replays_apart"].values())
    told = f"differed by {apart[0] * 100:.1f} to {apart[-1]:.1%} between policies of the 0.5B's run and by "
    [lite] = earlier.written(LITE)["replays_apart"].values()
    assert f"{told}{abs(lite):.1%} between two of DeepSeek-V2-Lite's" in TOLD


def test_what_the_host_took() -> None:
    """In the runs and in the servings that forecasts go by, over what the profile's launches are of."""
    told = []
    for name in RUNS:
        result, costs = earlier.written(name + ALONE), read_profile(earlier.path_of(name + ALONE, "-profile")).costs
        assert costs.served is not None
        turns = [turn["host_work_us"] for each in result["served"]["policies"].values() for turn in each["turns"]]
        usual_us, noted = costs.host_work_us, costs.served.host_work_us
        times = (min(turns) / usual_us, max(turns) / usual_us, costs.served.mean_work_us / usual_us)
        slowest = max(noted) / usual_us
        told.append(f"{times[0]:.2f} to {times[1]:.2f} times as long in the mean of a turn, {times[2]:.2f} in the mean")
        assert f"{told[-1]} while its calibrations served" in TOLD
        assert f"{slowest:.1f} times at most" in TOLD
        own = [us for turns in result["scheduler_us"].values() for us in turns]
        steps, prompts = ([us[i] for us in own] for i in (0, 1))
        served = costs.served
        said = f"{min(steps):.0f} to {max(steps):.0f} us a step in the run and {served.scheduler_us:.0f} in them, "
        said += f"{min(prompts):.0f} to {max(prompts):.0f} and {served.scheduler_prompt_us:.0f} more with prompts"
        assert said in TOLD


@pytest.mark.parametrize("name", RUNS)
def test_profiles_are_the_middle_of_their_calibrations(name: str) -> None:
    """Of the three before the run, by which it is forecast, and of all five; no verdict is another by the three."""
    made = [read_profile(earlier.path_of(name, f"-profile-{number}")) for number in range(1, 6)]
    assert middle(made).costs == read_profile(earlier.path_of(name, "-profile")).costs
    assert middle(made[:3]).costs == read_profile(earlier.path_of(name + ALONE, "-profile")).costs
    assert all(each.costs.served is not None and each.costs.served.host_work_us for each in made)
    verdicts = [{key: judged(each, key)[0] for key in rows(each)} for each in (name, name + ALONE)]
    assert verdicts[0] == verdicts[1]
    named = f"`fidelity-h200-{name}.json`"
    assert named in TOLD


def test_the_clause_was_written_before_the_runs_that_it_judges() -> None:
    """By its time and the first calibration's."""
    assert "**Forecasts**, on 2026-11-29 at 18:44 UTC (committed at 18:45, c3d2e5a8)" in RULE
    made = [read_profile(earlier.path_of(name, "-profile-1")).measured_at for name in RUNS]
    assert min(made) > "2026-11-29T18:45"


def held_now() -> int:
    """How many of the latest runs hold: every cell that is judged, and every pair."""
    return sum(not wrongly(name) and all(judged(name, key)[0] != "no" for key in rows(name)) for name in RUNS)


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
        f"Of {made + len(RUNS)} runs on H200s so far {COUNTS[held + held_now()]} hold, each by the rule of its time"
        in TOLD
    )
    off = earlier_forecasts()
    assert max(off)[1].startswith("small24")
    assert f"a small model's first token was up to {max(off)[0]:.1%} off" in TOLD
    assert (
        f"and was {max(each for each in off if each[1:] == ('small24-twelfth', NOTHING))[0]:.1%} off as a fore" in TOLD
    )
    busy = [
        max(each["busy_ms"]["measured"] / each["span_ms"]["measured"] for each in found["policies"].values())
        for found in (earlier.written(name)["served"] for name in reversed(RUNS))
    ]
    assert f"the slowest policy is busy for {busy[0] * 100:.0f} and {busy[1]:.0%} of the time" in TOLD
    own = earlier.written(QWEN)["by_own_speed"]["first_turns"]
    [halves] = [row for row in own if (row["mode"], row["regime"]) == ("split/decodes_beside", "all")]
    assert f"They came out {halves['bias']:.1%} too slow in the mean" in TOLD


def test_how_forecasts_were_made() -> None:
    """When calibrations were over, servings one by one, and how far gaps move from other starts."""
    steps = []
    for name in RUNS:
        made = [read_profile(earlier.path_of(name, f"-profile-{number}")) for number in (1, 2, 3, 4)]
        steps.append([each.costs.served.scheduler_us for each in made[:3] if each.costs.served])
        times = [each.measured_at[11:16] for each in made]
        assert f"{times[0]} to {times[2]} UTC, the next behind the run at {times[3]}" in TOLD
    (lite, qwen) = ((min(each), max(each)) for each in steps)
    told = f"of {qwen[0]:.0f} to {qwen[1]:.0f} us and of {lite[0]:.0f} to {lite[1]:.0f}"
    assert f"That is the middle of three servings, {told}" in TOLD
    moved = [most - least for name in RUNS for least, most in over_starts(name, "gap_p50_ms").values()]
    assert f"Gaps move by at most {max(moved) * 100:.1f} points" in TOLD
    assert f"`--seed 0` to `--seed {STARTS - 1}`" in TOLD


def test_other_pages_say_the_same() -> None:
    """README and simulate.md give the same figures and verdicts and point here."""
    ttft, gap = ([within(name, key) for name in RUNS] for key in NAMES)
    told = f"within {ttft[0]:.1%} (DeepSeek-V2-Lite's shape) and {ttft[1]:.1%} (Qwen2.5-0.5B's), gaps within "
    told += f"{gap[0] * 100:.1f} and {gap[1]:.1%}"
    apart = forecasts(QWEN)["vllm"]["ttft_p50_ms"]["apart"]
    made, held = before()
    for page in (README, " ".join(" ".join(SIMULATE).split())):
        assert told in page
        assert f"but for one first token whose own two turns are {apart:.1%} apart" in page
        assert "DeepSeek-V2-Lite's run holds, the 0.5B's doesn't, by one cell and one pair" in page
        assert f"Of {made + len(RUNS)} runs on H200s {COUNTS[held + held_now()]} hold" in page
    assert held_now() == 1
    [odd] = [row for key, row in rows(QWEN).items() if judged(QWEN, key)[0] == "no"]
    assert f"in every mode and regime by the rule, but for a cell of {odd['steps']} steps" in README
    result, pair = earlier.written(QWEN), ("split:form=decodes_beside", "auto")
    split, auto = (result["us_per_token"][policy]["measured"] for policy in pair)
    gaps = [forecasts(QWEN)[policy]["gap_p50_ms"]["measured"] for policy in pair]
    apart = auto / split - 1, gaps[1] / gaps[0] - 1
    told = f"but for one pair, {apart[0]:.1%} apart by time a token and {apart[1]:.1%} by the forecast"
    assert told in README
    assert (
        "| simulations are near the measured runs | the latest run of DeepSeek-V2-Lite on an H200, and all but one cell"
        in README
    )
    assert not earlier.holds("h100-dsv2lite")
