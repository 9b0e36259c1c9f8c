"""docs/fidelity.md tells the latest run of each model as its result has it, by the rule written before both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import pytest

from benchmarks.fidelity_served import NOTHING, STARTS
from benchmarks.fidelity_turns import MOST_APART as MOST_TIE
from benchmarks.fidelity_turns import Figure, pairs_of
from benchmarks.fidelity_verdict import (
    IN_THE_MEAN,
    LATENCY,
    MEDIANS,
    NO,
    SINGLY,
    SMALL,
    STEP,
    CellVerdict,
    Verdict,
    main,
    verdict,
)
from kpolicy.middle_profile import middle
from kpolicy.schemas import read_profile
from tests.benchmarks import test_fidelity_docs as earlier
from tests.benchmarks import test_fidelity_page as six
from tests.benchmarks.test_fidelity_docs import ALONE, DOCS, README, SIMULATE, line_of, written

RUNS = {"rate-0.7-twenty-second": "Qwen2.5-0.5B", "dsv2lite-twentieth": "DeepSeek-V2-Lite"}
PAGE = (DOCS / "fidelity.md").read_text(encoding="utf-8").splitlines()
TOLD = " ".join(" ".join(PAGE).split())
RULE = " ".join((DOCS / "measured_fidelity.md").read_text(encoding="utf-8").split())
WRITTEN_AT = "2026-11-30T08:16"
"""The rule"""
LATENCIES = (*MEDIANS, "busy_ms", "span_ms")
DIGITS = dict(zip(MEDIANS, (1, 2), strict=True))


def found(name: str) -> Verdict:
    return verdict(written(name))


def judged(name: str) -> list[CellVerdict]:
    return [cell for cell in found(name).cells if cell.judged]


def spread(name: str) -> dict[str, Any]:
    """What `benchmarks.forecast_spread` found of a run."""
    return six.spread_of(name, "")


def percent(error: float) -> str:
    return f"{error:+.1%}"


def mode_of(cell: CellVerdict) -> str:
    return cell.mode.partition("/")[0]


def test_the_rule_was_written_before_the_runs() -> None:
    """By the profiles' own times; and each is of the three calibrations before its run alone."""
    assert "on 2026-11-30 at 08:16 UTC, after the 0.5B's twenty-first and because of it, for runs to come" in RULE
    for name in RUNS:
        result = written(name)
        made = [read_profile(earlier.path_of(name, f"-profile-{number}")) for number in (1, 2, 3)]
        assert WRITTEN_AT < made[0].measured_at < made[1].measured_at < made[2].measured_at
        assert result["table"]["made"] == "the middle of each figure of 3 calibrations before the run"
        profile = read_profile(earlier.path_of(name, "-profile"))
        assert profile.costs == middle(made).costs
        turns = {len(each["turns"]) for each in result["served"]["policies"].values()}
        assert turns == {3}


def test_both_hold_told_and_as_forecasts() -> None:
    """Every judged cell in the mean, not all of them singly; medians, and every pair that is shown, of every figure."""
    for name in RUNS:
        each = found(name)
        assert (each.holds, each.forecast_holds, each.steps) == (True, True, IN_THE_MEAN)
        assert not spread(name)["ranked_wrong_from_starts"]
    assert "**In short: yes, as far as was looked: the latest run of each of two models on an H200.**" in TOLD


def test_cells_are_told_as_the_results_have_them() -> None:
    """Steps, their share of the time, errors of their mean, forecast and told, of kinds' means and of single ones."""
    expected = []
    for name, model in RUNS.items():
        forecast = forecast_steps(name)
        for i, (cell, row) in enumerate(zip(found(name).cells, own_rows(name), strict=True)):
            where = f"{mode_of(cell)}, {cell.regime}" + ("" if cell.judged else " (not judged)")
            share = f"{cell.time_share:.1%}" if cell.judged else f"{cell.time_share:.2%}"
            begin = ["" if i else model, where, f"{cell.steps:,}", share]
            means = [percent(each) for each in (forecast[cell.mode, cell.regime], cell.mean_error)]
            others = [f"{each:.1%}" for each in (row["kind_error"], cell.single_error, cell.noise)]
            expected.append(line_of([*begin, *means, *others]))
    assert earlier.table_of(expected[0], PAGE) == (9, expected)


def own_rows(name: str) -> list[dict[str, Any]]:
    """The rows that `found` has its cells of."""
    rows = written(name)["by_own_speed"]["all_turns"]
    return [row for row in rows if "all" not in (row["mode"], row["regime"])]


def forecast_steps(name: str) -> dict[tuple[str, str], float]:
    """Errors of mean step times, told nothing of the run."""
    return {(row["mode"], row["regime"]): row["error"] for row in written(name)["forecast_steps"]}


def test_what_is_said_of_forecast_step_times_and_of_kinds() -> None:
    """The worst of each, and how many steps are of kinds with enough of them."""
    worst = max(abs(error) for name in RUNS for error in forecast_steps(name).values())
    assert worst <= STEP
    assert f"**mean step times within {worst:.1%}** in every mode and regime (looked at after the runs" in TOLD
    # Every cell that was measured is there.
    assert all(forecast_steps(name).keys() == {(c.mode, c.regime) for c in found(name).cells} for name in RUNS)
    splits = [cell for name in RUNS for cell in found(name).cells if mode_of(cell) == "split"]
    assert min(cell.mean_error for cell in splits) > 0
    assert "(split) come out too slow, as in the six runs before" in TOLD
    for name in six.QWENS:
        own = written(name)["by_own_speed"]["first_turns"]
        assert all(row["bias"] > 0 for row in own if row["mode"].startswith("split") and row["regime"] == "all")
    rows = [row for name in RUNS for row in own_rows(name)]
    assert max(row["kind_error"] for row in rows) < 0.03
    shares = {key: [r["kind_steps"] / r["steps"] for r in rows if r["mode"].startswith(key)] for key in ("eager", "sp")}
    rest = [r["kind_steps"] / r["steps"] for r in rows if not r["mode"].startswith(("eager", "split"))]
    assert {f"{each:.0%}" for each in shares["eager"]} == {"62%"}
    told = f"62% of both EAGER cells, {shares['sp'][0] * 100:.0f} and {shares['sp'][1]:.0%} of the splits and 85% or"
    assert told in TOLD
    assert min(rest) >= 0.85


@pytest.mark.parametrize("key", MEDIANS)
def test_medians_are_told_as_the_results_have_them(key: str) -> None:
    """Of each policy: its turns, the forecast and its range over starts, by single calibrations, and told the host."""
    expected = []
    for name, model in RUNS.items():
        result = written(name)
        for i, (policy, told) in enumerate(result["served"]["policies"].items()):
            forecast = result["forecasts"][NOTHING]["policies"][policy][key]
            by = spread(name)["policies"][policy]
            starts = by["from_starts"][key]
            assert starts["middle"] == pytest.approx(forecast["error"], abs=5e-4)
            turns = [f"{turn[key]['measured']:.{DIGITS[key]}f}" for turn in told["turns"]]
            expected.append(line_of([
                "" if i else model, f"`{policy}`", ", ".join(turns),
                f"{forecast['simulated']:.{DIGITS[key]}f} ({percent(forecast['error'])})",
                f"{percent(starts['least'])} to {percent(starts['most'])}",
                ", ".join(percent(one[key]) for one in by["by_calibration"]),
                *(percent(by["by_part"][part][key]) for part in ("launches", "scheduler")),
                percent(told[key]["error"]),
            ]))  # fmt: skip
    assert earlier.table_of(expected[0], PAGE) == (9, expected)


def errors(name: str, of: str = "forecast") -> dict[str, float]:
    """By median, the largest error without its sign: of forecasts, or told the host's speed."""
    result = written(name)
    policies = result["served" if of == "told" else "forecasts"]
    policies = policies["policies"] if of == "told" else policies[NOTHING]["policies"]
    return {key: max(abs(each[key]["error"]) for each in policies.values()) for key in MEDIANS}


def over_starts(key: str) -> float:
    """The largest error of a median of both runs, from any start."""
    return max(
        abs(each["from_starts"][key][end])
        for name in RUNS
        for each in spread(name)["policies"].values()
        for end in ("least", "most")
    )


def test_what_the_page_says_first() -> None:
    """Mean step times, single ones, medians and pairs, as forecasts and told."""
    cells = [cell for name in RUNS for cell in judged(name)]
    worst = max(abs(cell.mean_error) for cell in cells)
    assert worst <= STEP
    assert f"mean step times are within {worst:.1%} in every mode and regime that is judged" in TOLD
    every = max(abs(cell.mean_error) for name in RUNS for cell in found(name).cells)
    assert f"({every:.1%} with the one cell that isn't)" in TOLD
    over = [cell for cell in cells if cell.within == IN_THE_MEAN]
    assert NO not in {cell.within for cell in cells}
    singles = sorted(cell.single_error for cell in over)
    noises = [cell.noise for cell in over]
    told = f"in {len(over)} of {len(cells)} cells single steps are {singles[0] * 100:.1f} to {singles[-1]:.1%} off in"
    assert told in TOLD
    assert f"Steps of one kind differ by {min(noises) * 100:.1f} to {max(noises):.1%} there" in TOLD
    least = max(cell.single_error for cell in cells if cell.within == SINGLY)
    assert f"in the others within {least:.1%}" in TOLD
    ttft, gap = (max(errors(name)[key] for name in RUNS) for key in MEDIANS)
    assert f"**medians of first tokens within {ttft:.1%} and of gaps within {gap:.1%}**" in TOLD
    assert max(ttft, gap) <= LATENCY
    first = max(
        abs(each["by_part"]["all"]["ttft_p50_ms"]) for name in RUNS for each in spread(name)["policies"].values()
    )
    assert f"which is what a plain `simulate` has, first tokens are up to {first:.1%} off" in TOLD
    assert f"From any of {STARTS} starts {over_starts('ttft_p50_ms'):.1%} and {over_starts('gap_p50_ms'):.1%}" in TOLD
    ttft, gap = (max(errors(name, "told")[key] for name in RUNS) for key in MEDIANS)
    assert f"Told how fast the host was at each step they are within {ttft:.1%} and {gap:.1%}" in TOLD


def counts(by_figure: Iterable[Mapping[str, Figure]]) -> tuple[int, int, int, int]:
    """(pairs of policies by figure, those that rank, ties by the interval, those that aren't shown)."""
    pairs = [(apart, tie) for figures in by_figure for _, apart, tie in pairs_of(figures)]
    hidden = sum(apart <= tie and tie > MOST_TIE for apart, tie in pairs)
    tied = sum(apart <= tie for apart, tie in pairs) - hidden
    return len(pairs), len(pairs) - tied - hidden, tied, hidden


def test_how_many_pairs_are_ranked() -> None:
    """By five figures, told the host's speed, and by four as a forecast; how many are ties, and not shown."""
    told, forecast = [], []
    for result in map(written, RUNS):
        for policies, figures in (
            (result["served"]["policies"], told), (result["forecasts"][NOTHING]["policies"], forecast),
        ):  # fmt: skip
            figures += [{policy: policies[policy][key] for policy in policies} for key in LATENCIES]
        told.append(result["us_per_token"])
    pairs, ranked, tied, hidden = counts(forecast)
    assert hidden == 1
    words = f"**every one of the {ranked} pairs of policies and figures that differ by more than their turns do ranks "
    assert f"{words}as measured**; of {pairs}, {tied} are a tie and one isn't shown." in TOLD
    pairs, ranked, tied, hidden = counts(told)
    assert hidden == 1
    assert f"all of {ranked} pairs rank as measured; of {pairs}, {tied} are a tie and one isn't shown" in TOLD


def test_what_regimes_at_the_noted_speed_say() -> None:
    """One of them is over the line, by its mean and singly."""
    rows = [(name, row) for name in RUNS for row in written(name)["all_turns"] if row["regime"] != "all"]
    [(name, over)] = [(name, row) for name, row in rows if abs(row["bias"]) > STEP]
    assert (RUNS[name], over["mode"], over["regime"]) == ("DeepSeek-V2-Lite", "piecewise", "host-bound")
    told = f"{over['steps']} steps with {over['time_share']:.1%} of the time, is {over['bias']:.1%} too slow in the "
    assert f"{told}mean and {over['error']:.1%} off singly: that is over the line" in TOLD
    others = [row for _, row in rows if row is not over]
    judged_ones = max(abs(row["bias"]) for row in others if row["time_share"] >= SMALL)
    told = (
        f"All else is within {judged_ones:.1%} in the mean that way, or {max(abs(r['bias']) for r in others):.1%} with"
    )
    assert told in TOLD


def test_by_first_turns_and_single_steps_neither_would_hold() -> None:
    """What the rule before asked, told beside it."""
    over = {}
    for name in RUNS:
        rows = written(name)["by_own_speed"]["first_turns"]
        over[name] = {
            (row["mode"], row["regime"]): row["error"] for row in rows if row["regime"] != "all" if row["error"] > STEP
        }
    (bound,), (eager,) = (each.values() for each in over.values())
    assert [*over["rate-0.7-twenty-second"]] == [("piecewise", "host-bound")]
    assert [*over["dsv2lite-twentieth"]] == [("eager", "host-bound")]
    told = f"host-bound PIECEWISE of the 0.5B is {bound:.1%} off so and EAGER of DeepSeek-V2-Lite {eager:.1%}"
    assert told in TOLD
    for name in RUNS:
        rows = written(name)["by_own_speed"]["first_turns"]
        assert max(abs(row["bias"]) for row in rows) <= STEP


def test_how_many_runs_hold() -> None:
    """Those before by the rules of their times, and these."""
    made, held = six.before()
    made, held = made + len(six.RUNS) + len(RUNS), held + six.held_now() + sum(found(name).holds for name in RUNS)
    assert (made, held) == (32, 12)
    told = f"Of {made} runs on H200s that are held to the middle of several calibrations twelve hold, each by the rule "
    assert f"{told}of its time" in TOLD
    assert not earlier.holds("h100-dsv2lite")


def test_what_parts_of_a_profile_are_worth() -> None:
    """Medians by launches alone, with the scheduler's time, and by single calibrations."""
    for part, words in (("launches", "By launches alone medians are up to"), ("scheduler", "by the scheduler's time")):
        off = max(
            abs(each["by_part"][part][key])
            for name in RUNS
            for each in spread(name)["policies"].values()
            for key in MEDIANS
        )
        assert f"{off:.1%}" in TOLD.partition(words)[2][:40]
    singles = max(
        abs(one[key])
        for name in RUNS
        for each in spread(name)["policies"].values()
        for one in each["by_calibration"]
        for key in MEDIANS
    )
    assert f"by one of the six single calibrations up to {singles:.1%}" in TOLD


def test_how_busy_and_how_fast_the_hosts_were() -> None:
    """The slowest policy's share of the time, and fixed work of turns over the profile's."""
    busy = []
    for name in RUNS:
        policies = written(name)["served"]["policies"].values()
        busy.append(max(each["busy_ms"]["measured"] / each["span_ms"]["measured"] for each in policies))
    told = f"The slowest policy is busy for {busy[0]:.0%} of the time on the 0.5B and for {busy[1]:.0%} on DeepSeek-V2"
    assert told in TOLD
    for name, model in RUNS.items():
        result = written(name)
        turns = [t["host_work_us"] for each in result["served"]["policies"].values() for t in each["turns"]]
        times = [each / result["host_work_us"] for each in turns]
        span = f"{min(times):.2f} to {max(times):.2f} times"
        assert f"{span} as long, by turn, on {model}" in TOLD or f"{span} on {model}." in TOLD


def test_other_pages_say_the_same() -> None:
    """README, simulate.md and the changelog: the figures, how many runs hold, and where to read."""
    cells = [cell for name in RUNS for cell in found(name).cells]
    told = max(abs(cell.mean_error) for cell in cells)
    worst = max(abs(error) for name in RUNS for error in forecast_steps(name).values())
    singles = sorted(cell.single_error for cell in cells if cell.within == IN_THE_MEAN)
    ttft, gap = (max(errors(name)[key] for name in RUNS) for key in MEDIANS)
    simulated = " ".join(" ".join(SIMULATE).split())
    changes = " ".join((DOCS / "../CHANGELOG.md").read_text(encoding="utf-8").split())
    for page in (README, simulated, changes):
        assert f"mean step times are within {told:.1%} in every mode and regime" in page
        assert f"within {worst:.1%}" in page
        assert re.search(rf"medians of first tokens (are )?within {ttft:.1%} and of gaps within {gap:.1%}", page)
        assert len(singles) == 4
        assert f"single steps of four cells are {singles[0] * 100:.1f} to {singles[-1]:.1%} off" in page
    row = f"mean step times within {told:.1%} by mode and regime, told the host's speed, medians within {ttft:.1%} as"
    assert row in README
    cells_told = f"single steps of four cells of {len([cell for cell in cells if cell.judged])} are"
    assert cells_told in README
    for page in (README, simulated):
        assert "ank as measured where they differ by more than their turns" in page
        assert "Of 32 runs on H200s that are held to the middle of several calibrations twelve hold" in page


def test_verdicts_tell_singly_from_in_the_mean_and_leave_small_cells_out() -> None:
    """Of a result with cells of each kind; a median, a pair and a cell over the line each turn it."""
    result = written("rate-0.7-twenty-first" + ALONE)
    each = verdict(result)
    assert (each.steps, each.holds, each.forecast_holds) == (SINGLY, True, False)
    row = next(row for row in result["by_own_speed"]["all_turns"] if row["mode"] == "eager")
    for change, steps in (
        ({"error": 0.051}, IN_THE_MEAN), ({"error": 0.051, "bias": -0.051}, NO), ({"bias": -0.051}, SINGLY),
        ({"error": 0.051, "bias": 0.051, "time_share": 0.009}, SINGLY),
    ):  # fmt: skip
        rows = [{**row, **change} if one is row else one for one in result["by_own_speed"]["all_turns"]]
        changed = verdict({**result, "by_own_speed": {"all_turns": rows}})
        assert (changed.steps, changed.holds) == (steps, steps != NO)
    assert not attrs.evolve(each, medians=(("auto", "gap_p50_ms"),)).holds
    assert not attrs.evolve(each, ranked_wrong={"busy_ms": [["auto", "vllm"]]}).holds
    # By a first token that is 12.9% early, of which turns are too far apart, a forecast isn't judged.
    assert verdict(written("rate-0.7-twentieth" + ALONE)).forecast_holds
    turned = written("rate-1.3-nineteenth" + ALONE)
    assert verdict(turned).forecast_medians == (("vllm", "ttft_p50_ms"),)


def test_the_command_prints_verdicts_and_says_what_a_result_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    """0 where all hold, 1 where one doesn't, and 2 of a result from before there were shares of the time."""
    paths = [str(earlier.path_of(name)) for name in RUNS]
    assert main(paths) == 0
    out = capsys.readouterr().out
    assert out.count("told the host's speed it holds: steps within 5%: in the mean;") == 2
    assert out.count("not judged") == 1
    assert main([*paths, str(earlier.path_of("rate-1.3-nineteenth" + ALONE))]) == 1
    assert "it doesn't hold: steps within 5%: no; medians over 10%: none" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([str(earlier.path_of("rate-1.3-seventeenth"))])
    assert "lacks cells of all turns, their share of the time, or forecasts. Write it again" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(earlier.path_of("rate-0.7-twenty-first"))])
    assert "is held to calibrations made after the run too" in capsys.readouterr().err
