"""docs/measured_fidelity.md has every cell and latency as its result has it; docs/earlier_fidelity.md runs in short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity import RESULT
from benchmarks.fidelity_turns import SIDES, figure
from kpolicy.attention import Claims
from kpolicy.middle_profile import middle
from kpolicy.profiles import load_profile
from kpolicy.scheduling.traces import read_trace
from kpolicy.schemas import Profile, read_profile
from kpolicy.settings import Objective, Settings
from kpolicy.simulate import Server, simulate
from kpolicy.simulate.repeats import LEAST_REPEATS

DOCS = Path(__file__).parents[2] / "docs"
TRACE = Path(__file__).parents[3] / "shared" / "traces" / "azure_llm_2023_code.csv"
DOC = (DOCS / "measured_fidelity.md").read_text(encoding="utf-8").splitlines()
SHORT = (DOCS / "earlier_fidelity.md").read_text(encoding="utf-8").splitlines()
SIMULATE = (DOCS / "simulate.md").read_text(encoding="utf-8").splitlines()
README = " ".join((DOCS / "../README.md").read_text(encoding="utf-8").split())
LAST = (
    "rate-2-eleventh", "rate-2-twelfth", "rate-2-thirteenth", "rate-2-fourteenth", "rate-2-fifteenth",
    "rate-2-sixteenth", "dsv2lite-fifth", "dsv2lite-sixth", "dsv2lite-seventh", "dsv2lite-eighth", "dsv2lite-ninth",
    "dsv2lite-tenth",
    "dsv2lite-eleventh", "dsv2lite-twelfth", "dsv2lite-thirteenth", "dsv2lite-fourteenth", "dsv2lite-fifteenth",
    "dsv2lite-sixteenth", "dsv2lite-seventeenth", "dsv2lite-eighteenth", "h100-dsv2lite", "small24-ninth",
    "small24-tenth", "small24-eleventh", "small24-twelfth",
)  # fmt: skip
"""The runs by the middle of three calibrations or more, with a table each"""
AROUND = {
    "rate-2-thirteenth": 5, "rate-2-fourteenth": 5, "rate-2-fifteenth": 5, "rate-2-sixteenth": 5,
    "dsv2lite-seventeenth": 4, "dsv2lite-eighteenth": 5, "small24-eleventh": 4, "small24-twelfth": 5,
}  # fmt: skip
"""Those held to calibrations before the run, three, and behind it, and how many these are"""
CLAUSE = ("rate-2-sixteenth", "small24-eleventh", "small24-twelfth")
"""Those whose cells are of the regimes that the profile has at its own host speed: since 13:18 on 2026-11-29"""
LEAD = "-with-lead"
"""What names end in of the two before, in whose simulation a prompt waited for nothing beside decode steps"""
UNLED = "-without-lead"
"""What the third's does by such a simulation"""
ALONE = "-before"
"""What their names end in by the three before alone"""
ELSEWHERE = {"h100-dsv2lite": "DeepSeek-V2-Lite, H100"}
"""Those on another GPU than an H200, and what their rows begin with"""
AGAIN = "-costed-again"
"""What names end in of the runs before 16:18, by the rule that came then"""
BY_THE_MEAN = (
    "rate-2-twelfth", "rate-2-thirteenth", "rate-2-fourteenth", "rate-2-fifteenth", "rate-2-sixteenth",
    "dsv2lite-twelfth", "dsv2lite-thirteenth", "dsv2lite-fourteenth", "dsv2lite-fifteenth", "dsv2lite-sixteenth",
    "dsv2lite-seventeenth", "dsv2lite-eighteenth", "h100-dsv2lite", "small24-tenth", "small24-eleventh",
    "small24-twelfth",
)  # fmt: skip
"""The runs after it"""
CHANGED = {
    ("rate-2-eleventh", "piecewise", "host-bound"): ("to the letter", "no"),
    ("dsv2lite-fifth", "eager", "middle"): ("no", "not shown"),
    ("dsv2lite-tenth", "eager", "host-bound"): ("to the letter", "no"),
    ("dsv2lite-tenth", "eager", "saturated"): ("no", "not shown"),
    ("dsv2lite-eleventh", "eager", "host-bound"): ("no", "yes"),
    ("dsv2lite-eleventh", "eager", "middle"): ("no", "yes"),
}
"""Verdicts by that rule that are others"""
BEFORE = ("rate-2-ninth", "rate-2-tenth", "dsv2lite-fourth", "small24-seventh", "small24-eighth")
"""The runs before, in one table"""
MODELS = {"rate": "0.5B", "dsv2lite": "DeepSeek-V2-Lite", "small24": "small"}
LATEST = {name.split("-")[0]: name for name in LAST}
"""By model and GPU, the last one named"""
FIGURES = {"ttft_p50_ms": "TTFT p50", "gap_p50_ms": "gap p50", "busy_ms": "all steps", "span_ms": "span"}
"""What policies are ranked by beside the time a token, in the page's words"""
COUNTS = {
    1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 14: "fourteen",
    20: "twenty", 25: "twenty-five",
}  # fmt: skip
VERDICTS = ("yes", "to the letter", "not shown", "no")
TAKEN = {"rate-2-ninth": 2, "rate-2-tenth": 3, "small24-sixth": 1, "small24-seventh": 2, "small24-eighth": 3}
"""Which of three calibrations a run took"""
COLUMNS = {
    "rate": (("full", "middle"), ("piecewise", "middle"), ("piecewise", "saturated"), ("split", "middle"),
             ("split", "saturated"), ("eager", "host-bound"), ("piecewise", "host-bound")),
    "dsv2lite": (("full", "middle"), ("full", "saturated"), ("piecewise", "middle"), ("piecewise", "saturated"),
                 ("split", "saturated"), ("eager", "middle"), ("eager", "host-bound"), ("piecewise", "host-bound")),
    "small24": (("piecewise", "host-bound"), ("piecewise", "middle")),
}  # fmt: skip
"""Of a model's earlier runs, told by one row each: cells by mode and regime"""
EARLIER = {
    "rate-2": "first", "rate-3": "three times", "rate-2-second": "second", "rate-2-third": "third",
    "rate-2-fourth": "fourth", "rate-2-fifth": "fifth", "rate-2-sixth": "sixth", "rate-2-seventh": "seventh",
    "rate-2-eighth": "eighth", "dsv2lite-second": "second", "dsv2lite-third": "third", "small24": "first",
    "small24-second": "second", "small24-third": "third", "small24-fourth": "fourth", "small24-fifth": "fifth",
    "small24-sixth": "sixth",
}  # fmt: skip
"""The runs before, and what their rows begin with"""
SPLIT = "split:form=decodes_beside"
MOST, MOST_LATENCY = 0.05, 0.1
"""What is written in bold beyond it"""
NOISY, AGAIN_SHARE, AGAIN_TIMES = 0.03, 0.8, 3
"""The page's rule: from this noise on repeats decide, where so large a share of the cell's steps has so many."""
FEW = 5
"""A cell of so many steps isn't judged since 13:18 on 2026-11-29."""
SMALL = 0.01
"""A cell of less of the steps' time isn't judged in its place since 19:46 that day, in results that tell it."""
SINGLES_FIRST = "2026-11-30T01:26"
"""Of runs since then repeats decide only where a cell's single steps are over the line."""
MOSTLY = 0.5
"""A host-bound cell of whose repeats fewer were host-bound holds to the rule's letter only."""


def share(x: float) -> str:
    return f"**{x:.1%}**" if x > MOST else f"{x:.1%}"


def repeated(result: dict[str, Any], mode: str, regime: str) -> dict[str, Any] | None:
    """A cell's repeats: of the steps that were in it in the run, where those were told apart."""
    rows = {(row["mode"], row["regime"]): row for row in result["measured_again"].get("all policies", [])}
    found: dict[str, Any] | None = rows.get((mode, f"{regime} in the run"), rows.get((mode, regime)))
    return found


def ran_again(result: dict[str, Any], mode: str, regime: str) -> tuple[float, float]:
    """Of a cell's own steps: (the share that ran again so often that their middle is looked at, its error)."""
    cells = {key_of(each): each for each in result["cells_again"]}
    own = cells.get((mode, regime), {"again": 0, "steps": 1, "error": 0.0})
    return own["again"] / own["steps"], own["error"]


def judged(row: dict[str, Any], result: dict[str, Any]) -> tuple[str, float]:
    """(whether a cell is within the line by the rule that the page gives, the error that says so)."""
    error: float = row["error"]
    if "clause" in result:
        return judged_by_the_clause(row, result)
    if row["noise"] >= NOISY:
        again = repeated(result, *key_of(row))
        share_again, middle_error = ran_again(result, *key_of(row))
        if again is None or share_again < AGAIN_SHARE or again["repeats"] < AGAIN_TIMES:
            return "not shown" if error <= MOST else "no", error
        error = middle_error
        if error <= MOST and row["regime"] == "host-bound" and again["host_bound_share"] < MOSTLY:
            return "to the letter", error
    return "yes" if error <= MOST else "no", error


def judged_by_the_clause(row: dict[str, Any], result: dict[str, Any]) -> tuple[str, float]:
    """`judged` since 13:18 on 2026-11-29: nothing is to the letter, and small cells aren't judged."""
    share_again, middle_error = ran_again(result, *key_of(row))
    enough = share_again >= AGAIN_SHARE
    singly = result["measured_at"] >= SINGLES_FIRST and row["error"] <= MOST
    error: float = middle_error if row["noise"] >= NOISY and enough and not singly else row["error"]
    if row["time_share"] < SMALL if "time_share" in row else row["steps"] <= FEW:
        return "not judged", row["error"]
    if error > MOST:
        return "no", error
    return "yes" if singly or row["noise"] < NOISY or enough else "not shown", error


def key_of(row: dict[str, Any]) -> tuple[str, str]:
    return row["mode"], row["regime"]


def cell(row: dict[str, Any], begin: str, result: dict[str, Any], columns: int) -> str:
    """A row of the page; repeats of five steps or fewer aren't told."""
    again = repeated(result, *key_of(row))
    mode = "split" if row["mode"].startswith("split") else row["mode"]
    kinds = f"{share(row['kind_error'])} of {row['kind_steps']:,}" if row["kind_steps"] else ""
    parts = [begin.format(mode=mode, regime=row["regime"]), judged(row, result)[0], f"{row['steps']:,}"]
    parts += [share(row["error"]), f"{row['bias']:+.1%}", share(row["noise"]), kinds]
    if again is not None and again["steps"] > 5:
        times = f"{again['steps']:,} x {again['repeats']:g}"
        parts += [times, share(again["error"]), f"{again['bias']:+.1%}", share(again["spread"])]
    if "clause" in result and (own := ran_again(result, *key_of(row)))[0] >= AGAIN_SHARE:
        parts += [f"{own[0] * row['steps']:,.0f}", share(own[1])]
    return line_of([*parts, *[""] * (columns - len(parts))])


def line_of(parts: list[str]) -> str:
    return "".join(f"| {part} " if part else "| " for part in parts) + "|"


def cells(result: dict[str, Any], begin: str, columns: int) -> list[str]:
    """All rows of the page that a result has, in its order."""
    rows = [row for row in result["policies"]["all policies"] if row["regime"] != "all"]
    return [cell(row, begin, result, columns) for row in rows]


def table_of(begin: str, page: list[str] = DOC) -> tuple[int, list[str]]:
    """(how many columns the table has in which a line begins so, its rows)."""
    at = next(i for i, line in enumerate(page) if line.startswith(begin))
    first = next(i for i in range(at, 0, -1) if page[i].startswith("|---")) + 1
    last = next(i for i in range(at, len(page)) if not page[i].startswith("|"))
    return page[first - 1].count("---"), page[first:last]


def latency(found: dict[str, float], digits: int) -> str:
    """Both sides and the error, and what a policy's turns differ by where it had several."""
    error = f"**{found['error']:+.1%}**" if abs(found["error"]) > MOST_LATENCY else f"{found['error']:+.0%}"
    apart = f"; {found['apart']:.1%} apart" if "apart" in found else ""
    return f"{found['measured']:.{digits}f} / {found['simulated']:.{digits}f} ({error}{apart})"


def path_of(name: str, end: str = "") -> Path:
    """A run's file: its result, or what else is named after it."""
    return RESULT.with_name(f"fidelity-{name if name in ELSEWHERE else f'h200-{name}'}{end}.json")


def written(name: str) -> dict[str, Any]:
    """A run's result."""
    found: dict[str, Any] = json.loads(path_of(name).read_text(encoding="utf-8"))
    return found


def read(name: str) -> dict[str, Any]:
    """A run's result; of those by the clause with the cells that it judges in place of those by the noted speed."""
    return at_own_speed(name) if name.startswith(CLAUSE) else written(name)


def at_own_speed(name: str) -> dict[str, Any]:
    """A run's result with the cells that the profile gives at its own host speed, to be judged by the clause."""
    found = written(name)
    own = found["by_own_speed"]
    cells = {**found["policies"], "all policies": own["first_turns"]}
    return {**found, "policies": cells, "cells_again": own["cells_again"], "measured_again": {}, "clause": True}


def label(name: str) -> str:
    return ELSEWHERE.get(name) or f"{MODELS[name.split('-')[0]]}, {name.rsplit('-', 1)[1]}"


def rows_of(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """A run's cells, of all policies together; every split is decodes beside."""
    rows = read(name)["policies"]["all policies"]
    return {(row["mode"].split("/")[0], row["regime"]): row for row in rows if row["regime"] != "all"}


def short_cell(name: str, key: tuple[str, str]) -> str:
    """The error that decides, single steps' beside it where that is another, and the verdict but for a yes."""
    row = rows_of(name).get(key)
    if row is None:
        return ""
    held, error = judged(row, read(name))
    singly = f" ({row['error']:.1%})" if error != row["error"] else ""
    verdict = {"yes": "", "no": "; over the line"}.get(held, f"; {held}")
    return f"{share(error)}{singly}{verdict}"


def most(name: str, key: str) -> str:
    """The largest error of any policy's median."""
    off = max(abs(each[key]["error"]) for each in read(name)["served"]["policies"].values())
    return f"**{off:.1%}**" if off > MOST_LATENCY else f"{off:.1%}"


def unshown_by(words: str, pairs: list[list[str]] | bool | None) -> list[str]:
    """Which policies a figure doesn't rank; until the tenth run it ranked all or none."""
    if isinstance(pairs, list):
        return [f"{words} of `{one}` and `{other}`" for one, other in pairs]
    return [words] if pairs else []


def ranked(name: str) -> str:
    """By what a pair is ranked wrongly, and by what ranking isn't shown."""
    result = read(name)
    served = result["served"]
    if len(served["policies"]) == 1:
        return "one policy"
    wrong = ["time a token"] * bool(result["ranked_wrong"])
    wrong += [words for key, words in FIGURES.items() if served["ranked_wrong"][key]]
    unshown = unshown_by("time a token", result.get("not_shown"))
    by_figure = served.get("not_shown", {})
    for key, words in FIGURES.items():
        unshown += unshown_by(words, by_figure.get(key) if isinstance(by_figure, dict) else key in by_figure)
    told = f"wrongly by {', '.join(wrong)}" if wrong else "as measured"
    return f"{told}; {', '.join(unshown)} not shown" if unshown else told


def latest() -> list[str]:
    """The table of each model's latest run: its cells, latencies and ranking side by side."""
    names = tuple(LATEST.values())
    keys = sorted({key for name in names for key in rows_of(name)})
    lines = [[f"{mode}, {regime}", *(short_cell(name, (mode, regime)) for name in names)] for mode, regime in keys]
    lines += [[FIGURES[key], *(most(name, key) for name in names)] for key in ("ttft_p50_ms", "gap_p50_ms")]
    return [line_of(line) for line in [*lines, ["ranked", *map(ranked, names)]]]


def in_short(name: str) -> str:
    """A run's row in the table of all: cells by verdict, errors of latencies, ranking."""
    counts = [str(verdicts(name).count(verdict) or "") for verdict in VERDICTS]
    run, again, _ = name.partition(AGAIN)
    run, before, _ = run.partition(ALONE)
    return line_of(
        [
            label(run) + (", again" if again else ", before" if before else ""),
            *counts,
            most(name, "ttft_p50_ms"),
            most(name, "gap_p50_ms"),
            ranked(name),
        ]
    )


def test_the_short_page_has_the_latest_runs_and_all_in_a_row_each() -> None:
    """In the order that the runs are named."""
    assert table_of("| eager, host-bound", SHORT) == (1 + len(LATEST), latest())
    assert table_of(f"| {label(LAST[0])}", SHORT) == (8, [in_short(name) for name in LAST])


def test_the_short_page_tells_what_todays_rule_makes_of_the_runs_before_it() -> None:
    """A row each but for those that are by it; verdicts that change, and both errors of the 0.5B's EAGER."""
    names = [name for name in LAST if name not in BY_THE_MEAN]
    expected = [in_short(name + AGAIN) for name in names]
    assert table_of(f"| {label(LAST[0])}, again", SHORT) == (8, expected)
    told = {
        (name, *key): (judged(row, read(name)), judged(rows_of(name + AGAIN)[key], read(name + AGAIN)))
        for name in names
        for key, row in rows_of(name).items()
        if key in rows_of(name + AGAIN)
    }
    assert {key: (old[0], new[0]) for key, (old, new) in told.items() if old[0] != new[0]} == CHANGED
    section = " ".join(" ".join(SHORT).split()).partition("### Costed again")[2]
    errors = {key: (f"{old[1]:.1%}", f"{new[1]:.1%}") for key, (old, new) in told.items()}
    old, new = errors["rate-2-eleventh", "eager", "host-bound"]
    singly = [rows_of(name)["eager", "host-bound"]["error"] for name in ("rate-2-eleventh", "rate-2-eleventh" + AGAIN)]
    assert f"repeats is {new} off for {old} ({singly[1]:.1%} singly for {singly[0]:.1%})" in section
    key = "piecewise", "host-bound"
    before, row = rows_of("rate-2-eleventh")[key], rows_of("rate-2-eleventh" + AGAIN)[key]
    [cell] = [each for each in read("rate-2-eleventh" + AGAIN)["cells_again"] if key_of(each) == key]
    assert f"mean {row['steps']} of its PIECEWISE steps are host-bound, not {before['steps']}." in section
    again = f"They are {row['error']:.1%} off singly, noise {row['noise']:.1%}, and {cell['again']} of them ran again"
    assert again in section
    old, new = errors["small24-ninth", "piecewise", "host-bound"]
    assert f"its host-bound steps are {new} off, for {old}" in section
    (old, new), (old_middle, new_middle) = (errors["dsv2lite-eleventh", "eager", at] for at in ("host-bound", "middle"))
    both = f"{new_middle} in the middle, for {old.removesuffix('%')} and {old_middle}"
    assert f"EAGER is {new} off by the middle of repeats where the host bounds it and {both}" in section
    assert not read("dsv2lite-eleventh" + AGAIN)["ranked_wrong"]
    assert not read("dsv2lite-fifth" + AGAIN)["ranked_wrong"]
    old, new = errors["dsv2lite-tenth", "eager", "saturated"]
    assert f"host-bound EAGER is {errors['dsv2lite-tenth', 'eager', 'host-bound'][1]} off singly" in section
    assert f"saturated EAGER is {new} off and not shown, for {old} and over it" in section
    old, new = errors["dsv2lite-fifth", "eager", "middle"]
    assert f"EAGER in the middle is {new} off and not shown, for {old} and over the line" in section


def test_a_rule_of_later_is_not_said_to_be_of_before() -> None:
    """Clauses of 02:50 to 04:41 are before the first of the runs, and the others after it."""
    made = [read(name)["measured_at"] for name in LAST]
    assert min(made) > "2026-11-23T04:41"
    assert (min(made)[:10], max(made)[:10]) == ("2026-11-23", "2026-11-29")
    told = f"before all runs above ({min(made)[11:16]} to {max(made)[11:16]} six days later)"
    assert told in " ".join(" ".join(SHORT).split())
    assert told.replace("all runs above", "all runs of the next section") in " ".join(" ".join(DOC).split())
    by_mean = [name for name in LAST if read(name)["measured_at"] > "2026-11-23T16:18"]
    assert by_mean == [*BY_THE_MEAN]
    around = [name for name in LAST if path_of(name, ALONE).exists()]
    assert around == [*AROUND]
    firsts = [read_profile(path_of(name, "-profile-1")).measured_at for name in around]
    assert "2026-11-29T00:11" < min(firsts)[:16] == "2026-11-29T00:16"
    page = " ".join(" ".join(DOC).split())
    assert "on 2026-11-29 at 00:11 UTC (c627e2b; " in page
    assert "(the first calibration of the first was over at 00:16)" in page
    assert f"{COUNTS[len(LAST)].capitalize()} runs, all but one on an H200" in page
    lite = [name for name in LAST if name.startswith("dsv2lite")]
    assert f"Of DeepSeek-V2-Lite's {COUNTS[len(lite)]} on an H200" in page


def verdicts(name: str) -> list[str]:
    """Of each cell of a run."""
    return [judged(row, read(name))[0] for row in rows_of(name).values()]


def holds(name: str) -> bool:
    """Whether no cell of a run is over the line or unshown, and no pair of policies is ranked wrongly."""
    return not {"no", "not shown"} & {*verdicts(name)} and not ranked(name).startswith("wrongly")


def runs_of(model: str) -> tuple[list[str], list[str]]:
    """A model's runs on an H200, and those that hold."""
    found = [name for name in LAST if name.split("-")[0] == model]
    return found, [name for name in found if holds(name)]


def test_what_the_short_page_says_first_is_so() -> None:
    """How many runs hold, how far off latencies are, and which pairs are ranked wrongly."""
    page = " ".join(" ".join(SHORT).split())
    (small, small_holds), (lite, lite_holds), (tiny, tiny_holds) = map(runs_of, MODELS)
    assert (small_holds, lite_holds, tiny_holds) == ([small[0], *small[-3:]], lite[-2:], [tiny[0], tiny[-1]])
    counts = [COUNTS[len(each)] for each in (small_holds, small, lite_holds, lite, tiny_holds, tiny)]
    told = "{} of {} of Qwen2.5-0.5B, its first and its latest three, {} of {} of DeepSeek-V2-Lite, its latest two, "
    told += "and {} of {} of the small model, its first and its latest."
    assert told.format(*counts) in page
    letters = [name for name in small_holds + lite_holds if name not in CLAUSE]
    assert all(verdicts(name).count("to the letter") == 1 for name in letters)
    assert [name.split("-")[-1] for name in letters[:3]] == ["eleventh", "fourteenth", "fifteenth"]
    assert all({*verdicts(name)} <= {"yes", "not judged"} for name in (LATEST["rate"], LATEST["small24"]))
    latest = LATEST["rate"], LATEST["dsv2lite"], LATEST["small24"]
    assert all(holds(name) for name in latest)
    assert {*by_the_clause(LATEST["dsv2lite"]).values()} == {"yes"}
    assert (
        f"every median within {max(latencies_off(*latest)):.1%}, told the host's speed. The first and the last are"
        in page
    )
    bound = [name for name in AROUND if any(judged(row, read(name))[0] == "no" and key[1] == "host-bound"
                                            for key, row in rows_of(name).items())]  # fmt: skip
    assert bound == ["small24-eleventh"]
    assert "cells that the host bounds hold by first turns in seven; the small model's eleventh is over" in page
    [whole] = [name for name in small + lite if {*verdicts(name)} == {"yes"} and name not in CLAUSE]
    assert (whole, ranked(whole)) == ("dsv2lite-seventh", "wrongly by gap p50")
    assert "DeepSeek-V2-Lite's seventh holds in every cell and ranks one pair wrongly" in page
    assert f"Medians of latencies of these two models are within 10% in all {COUNTS[len(small + lite)]}" in page
    assert max(latencies_off(*small, *lite)) <= MOST_LATENCY
    after = [name for name in lite if name in BY_THE_MEAN]
    assert [name for name in after if holds(name)] == lite_holds
    told = f"Of the {COUNTS[len(after)]} runs after that rule only the seventeenth and the eighteenth do "
    told += "both, with one "
    assert f"{told}cell to the letter each" in page
    apart = [apart for name in LAST for apart in wrongly_ranked(read(name))]
    assert f"always of near policies**, {min(apart) * 100:.1f} to {max(apart):.1%} apart in the figure" in page
    rows = rows_of("dsv2lite-eleventh")
    bound, middle = rows["eager", "host-bound"], rows["eager", "middle"]
    off = [judged(row, read("dsv2lite-eleventh"))[1] for row in (bound, middle)]
    told = f"its profile was too quick for EAGER steps, by {off[0]:.1%} where the host bounds them and {off[1]:.1%} in"
    assert f"{told} the middle, by the middle of their repeats" in page
    slow = read("dsv2lite-twelfth")
    speeds = [found["host_work_us"] for found in slow["served"]["policies"].values()]
    own = [read_profile(path_of("dsv2lite-twelfth", f"-profile-{i}")) for i in (1, 2, 3)]
    first, second, third = (f"{each.costs.host_work_us:.1f}" for each in own)
    told = (
        f"took {min(speeds):.0f} to {max(speeds):.0f} us in the mean of a policy's steps, {slow['host_work_us']:.1f} in"
    )
    of_three = f"the profile ({first}, {second} and {third} us in the three calibrations)"
    assert f"{told} {of_three}" in " ".join(" ".join(DOC).split())
    over = [row["error"] for key, row in rows_of("dsv2lite-twelfth").items() if row["error"] > MOST]
    assert f"{min(over) * 100:.1f} to {max(over):.1%} off in the cells that are over the line" in page
    before = [(judged(row, read(name)), name) for name in BEFORE for row in rows_of(name).values()]
    most_off, name = max((error, name) for (held, error), name in before if held == "no")
    assert name.startswith("small24")
    assert f"steps by up to {most_off:.1%}, one median of TTFT by {latencies_off(*BEFORE)[0]:.1%}" in page


def known_within(name: str) -> float:
    """How far off cells are but for those to the letter."""
    judgements = [judged(each, read(name)) for each in rows_of(name).values()]
    return max(error for verdict, error in judgements if verdict != "to the letter")


def to_the_letter(name: str) -> dict[tuple[str, str], str]:
    """The verdicts of a run that aren't a yes."""
    held = {key: judged(each, read(name))[0] for key, each in rows_of(name).items()}
    return {key: verdict for key, verdict in held.items() if verdict != "yes"}


def test_the_short_page_tells_the_latest() -> None:
    """That no cell of DeepSeek-V2-Lite's last two runs is over the line, and what their second turns show."""
    page = " ".join(" ".join(SHORT).split())
    name, before = LATEST["dsv2lite"], "dsv2lite-seventeenth"
    pieces = ("piecewise", "host-bound")
    assert to_the_letter(name) == to_the_letter(before) == {pieces: "to the letter"}
    assert (ranked(name), ranked(before)) == ("as measured", "as measured; gap p50 of `piecewise` and `vllm` not shown")
    told = f"latest, the eighteenth**: cells are within {known_within(name):.1%}, but for the one to the "
    told += "letter, medians "
    told += f"within {max(latencies_off(name)):.1%}, and every pair ranks as measured; its second turn is "
    told += "as near as the "
    assert f"{told}first" in page
    second = max(each["error"] for key, each in later_of(name).items() if key != pieces)
    assert second <= max(each["error"] for key, each in rows_of(name).items() if key != pieces)
    slow = later_of(before)["piecewise", "middle"]["error"]
    assert f"In the seventeenth's second turn PIECEWISE in the middle was {slow:.1%} off, in a slow stretch" in page


def host_bound_again(name: str) -> dict[str, Any]:
    """PIECEWISE steps by those of their repeats that the host bounded."""
    rows = written(name)["measured_again"]["all policies"]
    [found] = [each for each in rows if key_of(each) == ("piecewise", "host-bound") and each["host"] == "any"]
    assert found["host_bound_share"] == 1.0
    assert LEAST_REPEATS == 3
    return dict(found)


def host_bound_on(host: str, name: str) -> dict[str, dict[str, Any]]:
    """Host-bound EAGER and PIECEWISE by repeats beside which fixed work took over 1.2 times the profile's, or less."""
    rows = written(name)["measured_again"]["all policies"]
    return {row["mode"]: row for row in rows if (row["regime"], row["host"]) == ("host-bound", host)}


def test_the_short_page_tells_what_a_slow_core_makes_host_bound() -> None:
    """How far off pieces are singly and by repeats that the host bounded, and how many steps these are."""
    page = " ".join(" ".join(SHORT).split())
    names = "rate-2-fifteenth", LATEST["dsv2lite"]
    pieces = ("piecewise", "host-bound")
    rows = [rows_of(name)[pieces] for name in names]
    shares = [
        row["steps"] / sum(each["steps"] for each in rows_of(name).values())
        for name, row in zip(names, rows, strict=True)
    ]
    again = [host_bound_again(name) for name in names]
    own = [
        row["steps"] / sum(each["steps"] for key, each in rows_of(name).items() if key[0] == "piecewise")
        for name, row in zip(names, rows, strict=True)
    ]
    told = f"of PIECEWISE's steps {own[0]:.0%} (0.5B) and {own[1]:.0%} (DeepSeek-V2-Lite) were host-bound "
    told += "by that alone, "
    told += f"{shares[0] * 100:.0f} and {shares[1]:.0%} of all steps. They are {rows[0]['error'] * 100:.1f} and "
    told += f"{rows[1]['error']:.1%} off singly, where steps of one kind differ by {rows[0]['noise'] * 100:.1f} and "
    told += f"{rows[1]['noise']:.1%}; the middle of those repeats that the host bounded is "
    assert f"{told}{again[0]['error'] * 100:.1f} and {again[1]['error']:.1%} off" in page
    slow = [host_bound_on("slow", name)["eager"] for name in names]
    assert (
        f"EAGER by repeats on slow cores alone is {slow[0]['error'] * 100:.1f} and {slow[1]['error']:.1%} off" in page
    )
    doc = " ".join(" ".join(DOC).split())
    for row, count in zip(slow, ("four", "three"), strict=True):
        assert COUNTS[int(row["repeats"])] == count
        told = f"By repeats on slow cores alone, {count} of each of {row['steps']} steps, it is "
        told += f"{row['error']:.1%} off (bias "
        assert f"{told}{row['bias']:+.1%})" in doc
    told = f"steps of one kind differ by {rows[0]['noise'] * 100:.1f} and {rows[1]['noise']:.1%} there, "
    told += "which no profile can "
    told += (
        f"tell. The means of the kinds are {rows[0]['kind_error'] * 100:.1f} and {rows[1]['kind_error']:.1%} off and "
    )
    told += f"those of all steps {rows[0]['bias'] * 100:+.1f} and {rows[1]['bias']:+.1%}, in the second turn "
    first, second = (later_of(name)[pieces] for name in names)
    told += (
        f"{first['kind_error']:.1%} and {first['bias']:+.1%} (0.5B; DeepSeek-V2-Lite has {second['steps']} such steps"
    )
    assert told in page
    told = f"too slow then, by {again[0]['bias'] * 100:.1f} and {again[1]['bias']:.1%}, where in "
    told += "DeepSeek-V2-Lite's run it "
    assert f"{told}was too quick" in page
    assert rows[1]["bias"] < 0


def by_own_speed(name: str, turns: str = "all_turns") -> dict[tuple[str, str], dict[str, Any]]:
    """A run's cells in the regimes that the profile has at its own host speed, of all turns or of first ones."""
    rows = read(name)["by_own_speed"][turns]
    return {(row["mode"].split("/")[0], row["regime"]): row for row in rows if row["regime"] != "all"}


def own_cell(name: str, key: tuple[str, str]) -> str:
    """First turns' single steps, and in brackets all turns'."""
    if (every := by_own_speed(name).get(key)) is None:
        return ""
    first = by_own_speed(name, "first_turns").get(key, {"error": 0.0, "steps": 0})
    told, whole = (f"{share(each['error'])} of {each['steps']:,}" for each in (first, every))
    return f"{told} ({whole})"


def by_the_clause(name: str) -> dict[tuple[str, str], str]:
    """Verdicts on a run's cells by those regimes and the clause, also on one before it; not on those of few steps."""
    result = at_own_speed(name)
    rows = [row for row in result["policies"]["all policies"] if row["regime"] != "all" and row["steps"] > FEW]
    return {(row["mode"].split("/")[0], row["regime"]): judged(row, result)[0] for row in rows}


def test_the_short_page_tells_cells_by_the_regimes_of_a_simulation() -> None:
    """Of first turns' single steps and of all, whatever the host did, and of those at the profile's host speed."""
    page = " ".join(" ".join(SHORT).split())
    names = ["rate-2-fifteenth", "dsv2lite-eighteenth", "small24-tenth"]
    found = [by_own_speed(name) for name in names]
    keys = sorted({key for rows in found for key in rows})
    expected = [line_of([", ".join(key), *(own_cell(name, key) for name in names)]) for key in keys]
    assert table_of(expected[0], SHORT) == (4, expected)
    small, lite, smallest = found
    [few] = [key for key, row in small.items() if row["error"] > MOST]
    assert (few, small[few]["steps"]) == (("piecewise", "host-bound"), 3)
    eager, middle, bound = ("eager", "host-bound"), ("piecewise", "middle"), ("piecewise", "host-bound")
    noises = [by_own_speed(name, "first_turns")[key]["noise"] for name, key in ((names[1], eager), (names[0], middle))]
    assert {*by_the_clause(names[1]).values()} == {"yes"}
    assert {key: held for key, held in by_the_clause(names[0]).items() if held != "yes"} == {middle: "no"}
    assert [key for key, held in by_the_clause(names[2]).items() if held == "no"] == [eager, bound, middle]
    told = f"would hold in every cell, EAGER by repeats, {ran_again(read(names[1]), *eager)[1]:.1%}, as steps "
    told += "of one kind "
    assert f"{told}differ by {noises[0]:.1%} there, and all else by single steps" in page
    [cell] = [each for each in at_own_speed(names[0])["cells_again"] if key_of(each) == middle]
    ran, of, error = cell["again"], cell["steps"], cell["error"]
    told = f"PIECEWISE in the middle is over it, where steps of one kind differ by {noises[1]:.1%}, for {ran:,} of its "
    assert f"{told}{of:,} steps ran again, whose middle is {error:.1%} off, and four fifths are wanted" in page
    speeds = [rows[cell]["at_speed_error"] for cell in (eager, middle) for rows in (small, lite)]
    told = "EAGER is {:.1f} and {:.1%} off and PIECEWISE in the middle {:.1f} and {:.1%}"
    assert told.format(speeds[0] * 100, speeds[1], speeds[2] * 100, speeds[3]) in page
    at_speed = [
        row["at_speed_error"] for cell, rows in ((None, lite), (few, small)) for at, row in rows.items() if at != cell
    ]
    told = f"every cell of these two of more than three steps within {max(at_speed):.1%}, by single steps. The small "
    told += f"model's EAGER is {smallest[eager]['at_speed_error']:.1%} off then, and its host-bound PIECEWISE "
    assert f"{told}{smallest[bound]['at_speed_error']:.1%}" in page


def test_the_short_page_tells_the_latest_of_the_small_qwen_and_of_the_small_model() -> None:
    """How far off they are singly and by repeats, on slow cores alone too, and what runs before were short of."""
    page = " ".join(" ".join(SHORT).split())
    small, tiny = LATEST["rate"], LATEST["small24"]
    modes = ("eager", "host-bound"), ("piecewise", "host-bound"), ("piecewise", "middle")
    rows, smallest = ([rows_of(name)[key] for key in modes] for name in (small, tiny))
    told = "steps of EAGER and PIECEWISE are {:.1f}, {:.1f} and {:.1%} off singly, where steps of one kind differ by "
    told = told.format(rows[0]["error"] * 100, rows[1]["error"] * 100, rows[2]["error"])
    told += "{:.1f}, {:.1f} and {:.1%}, and ".format(*(row["noise"] * 100 for row in rows[:2]), rows[2]["noise"])
    for name in (small, tiny):
        assert all(ran_again(read(name), *key)[0] == 1.0 for key in modes)
    again, of_tiny = ([ran_again(read(name), *key)[1] for key in modes] for name in (small, tiny))
    told += f"{again[0] * 100:.1f}, {again[1] * 100:.1f} and {again[2]:.1%} by the middle of five repeats of each; in "
    told += "the twelfth {:.1f}, {:.1f} and {:.1%} singly and ".format(
        *(row["error"] * 100 for row in smallest[:2]), smallest[2]["error"]
    )
    assert f"{told}{of_tiny[0] * 100:.1f}, {of_tiny[1] * 100:.1f} and {of_tiny[2]:.1%} so." in page
    others = [
        row["error"]
        for name in (small, tiny)
        for key, row in rows_of(name).items()
        if key not in modes and row["steps"] > FEW
    ]
    assert f"All else that is judged is within {max(others):.1%} by single steps" in page
    at_speed = [
        max(row["at_speed_error"] for row in by_own_speed(name).values() if row["at_speed_steps"] > FEW)
        for name in (small, LATEST["dsv2lite"], tiny)
    ]
    told = f"in both turns, single steps of every cell are within {at_speed[0]:.1%} (0.5B), {at_speed[1]:.1%} "
    assert f"{told}(DeepSeek-V2-Lite) and {at_speed[2]:.1%} (small)" in page
    own, other = (host_bound_on("slow", name) for name in (small, tiny))
    eager, pieces, eager_too, pieces_too = own["eager"], own["piecewise"], other["eager"], other["piecewise"]
    told = f"EAGER is {eager['error'] * 100:.1f} and {eager_too['error']:.1%} off in these two, and PIECEWISE that the "
    told += f"host bounds just then {pieces['error'] * 100:.1f} and {pieces_too['error']:.1%}."
    assert told in page
    before = "rate-2-thirteenth"
    over = [key for key, row in rows_of(before).items() if judged(row, read(before))[0] == "no"]
    assert over == [("split", "middle")]
    splits = [rows_of(run)["split", "middle"]["error"] for run in ("rate-2-fourteenth", "rate-2-fifteenth")]
    assert f"and the fourteenth and the fifteenth are {splits[0] * 100:.1f} and {splits[1]:.1%} off there" in page
    levels = [eager_levels(LATEST[run])[0] for run in ("rate", "dsv2lite", "small24")]
    apart = [max(each) / min(each) - 1 for each in levels]
    told = f"calibrations of the 0.5B's sixteenth are {apart[0]:.0%} apart in what an EAGER prompt takes the host, "
    assert f"{told}DeepSeek-V2-Lite's {apart[1]:.0%}, the small model's {apart[2]:.0%}" in page
    slower = [speed / read(run)["host_work_us"] - 1 for run in AROUND for speed in host_speeds(run)]
    told = f"fixed work took from {-min(slower):.0%} less to {max(slower):.0%} longer in the mean of a turn than in "
    assert f"{told}the profile" in page


def test_the_short_page_tells_the_small_models_runs_that_do_not_hold() -> None:
    """What they are over the line in."""
    page = " ".join(" ".join(SHORT).split())
    assert set(verdicts("small24-ninth")) == {"yes"}
    late, eager = (by_own_speed("small24-tenth")[key] for key in (("piecewise", "host-bound"), ("eager", "host-bound")))
    rows = rows_of("small24-tenth")
    first, second = (cells["eager", "host-bound"]["bias"] for cells in (rows, later_of("small24-tenth")))
    assert 0 < eager["bias"] < late["bias"]
    told = f"Its table is some {late['bias']:.0%} too slow for PIECEWISE that the host bounds, though three "
    told += "calibrations "
    told += f"agree within 5%, and for EAGER {first:.1%} in the first turn and {second:.1%} in the second"
    assert told in page
    name = "small24-eleventh"
    rows, lead = rows_of(name), rows_of(name + LEAD)
    pieces, split = ("piecewise", "host-bound"), ("split", "middle")
    assert [key for key, row in rows.items() if judged(row, read(name))[0] != "yes"] == [pieces, split]
    assert [key for key, row in lead.items() if judged(row, read(name + LEAD))[0] != "yes"] == [pieces]
    told = f"PIECEWISE that the host bounds is {ran_again(read(name), *pieces)[1]:.1%} off by repeats, and decode "
    assert f"{told}steps beside a prompt {rows[split]['error']:.1%}, in part because" in page
    few = rows_of(LATEST["small24"])[split]
    assert few["steps"] == 3
    told = (
        f"they are {lead[split]['error']:.1%} off, looking back, and {by_own_speed(name + LEAD)[split]['error']:.1%} "
    )
    told += (
        f"in both turns. In the twelfth, by that, there are three such steps, {few['error']:.1%} off, which are too "
    )
    before = by_own_speed(LATEST["small24"] + UNLED, "first_turns")[split]["error"]
    assert f"{told}few to judge ({before:.1%} without it)" in page
    biases = [row[split]["bias"] for row in (rows, later_of(name))]
    told = f"the table is too slow for its pieces, by {rows[pieces]['bias']:.0%} in the first turn, and decode steps "
    assert f"{told}beside a prompt were simulated {-biases[0] * 100:.0f} and {-biases[1]:.0%} too quick" in page


def test_the_short_page_tells_the_sixteenth_the_thirteenth_and_the_small_qwens_twelfth() -> None:
    """What went wrong in them: stretches, bias and calibrations."""
    page = " ".join(" ".join(SHORT).split())
    rows, bound = rows_of("dsv2lite-sixteenth"), ("eager", "host-bound")
    bias = (rows[bound]["bias"] + later_of("dsv2lite-sixteenth")[bound]["bias"]) / 2
    assert f"43 of the {rows[bound]['steps']} EAGER steps, in a stretch of 5 s" in page
    assert f"the mean of both turns' bias is {bias:+.1%}" in page
    assert f"Saturated FULL is {rows['full', 'saturated']['error']:.1%} off by rows of padding" in page
    *_, mixed = eager_levels("dsv2lite-thirteenth")
    assert f"lie {max(mixed) / min(mixed) - 1:.0%} apart" in page
    assert ranked_as_measured(read("dsv2lite-thirteenth"))
    name = "rate-2-twelfth"
    alone, _ = eager_levels(name)
    again = repeated(read(name), *bound)
    assert again is not None
    told = f"whose three calibrations are {max(alone) / min(alone) - 1:.0%} apart, is right for the first turn's EAGER "
    told += f"steps together ({rows_of(name)[bound]['bias']:+.1%}) and {-later_of(name)[bound]['bias']:.1%} too quick"
    assert f"{told} for the second's and {-again['bias']:.1%} for the repeats" in page


FORECAST = "-forecast"
"""What names end in of runs by the calibrations before them and by the code of today, with forecasts"""


def forecast_rows() -> list[str]:
    """By run and by what a simulation is told of it: the largest errors, whose they are, and rankings."""
    lines = []
    for name in CLAUSE:
        for i, (knows, found) in enumerate(read(name + FORECAST)["forecasts"].items()):
            cells = ["" if i else label(name), knows]
            for key in ("ttft_p50_ms", "gap_p50_ms"):
                policy, worst = max(found["policies"].items(), key=lambda each: abs(each[1][key]["error"]))
                off = worst[key]["error"]
                cells.append(f"{f'**{off:+.1%}**' if abs(off) > MOST_LATENCY else f'{off:+.1%}'} (`{policy}`)")
            wrong = [words for key, words in FIGURES.items() if found["ranked_wrong"][key]]
            told = f"wrongly by {', '.join(wrong)}" if wrong else "as measured"
            unshown = [each for key, words in FIGURES.items() for each in unshown_by(words, found["not_shown"][key])]
            lines.append(line_of([*cells, f"{told}; {', '.join(unshown)} not shown" if unshown else told]))
    return lines


def test_what_a_simulation_forecasts() -> None:
    """Every row, and what the pages say of the largest errors and of the one pair that is ranked wrongly."""
    rows = forecast_rows()
    assert table_of(rows[0], SHORT) == (5, rows)
    by_run = {name: [*read(name + FORECAST)["forecasts"].values()] for name in CLAUSE}
    found = [each for forecasts in by_run.values() for each in forecasts]

    def worst(name: str, key: str) -> float:
        return max(abs(policy[key]["error"]) for each in by_run[name] for policy in each["policies"].values())

    ttft, gap = (max(worst(name, key) for name in CLAUSE) for key in ("ttft_p50_ms", "gap_p50_ms"))
    page = " ".join(" ".join(SHORT).split())
    assert f"**On a busy host that is up to {ttft:.1%} off in TTFT and {gap:.1%} in gaps**" in page
    wrong = [
        (tuple(pair), max(sides) / min(sides) - 1)
        for each in found
        for key, pairs in each["ranked_wrong"].items()
        for pair in pairs
        for sides in [[each["policies"][policy][key]["measured"] for policy in pair]]
    ]
    assert len({pair for pair, _ in wrong}) == 1
    apart = max(each for _, each in wrong)
    assert f"Every pair that is shown ranks as measured, but for one {apart:.1%} apart" in page
    turns = [
        " and ".join(
            f"{each['ttft_p50_ms']['measured']:.0f}" for each in read(name)["served"]["policies"]["vllm"]["turns"]
        )
        for name in CLAUSE
    ]
    assert f"`vllm`'s two turns took {turns[0]}, {turns[1]} and {turns[2]} ms" in page
    busy = [
        policies["vllm"]["busy_ms"]["measured"] / policies["vllm"]["span_ms"]["measured"]
        for policies in (read(name)["served"]["policies"] for name in (*CLAUSE, "rate-2-fifteenth"))
    ]
    assert f"busy for {min(busy) * 100:.0f} to {max(busy):.0%} of the time" in page
    scheduler = [turn for name in CLAUSE for turns in read(name + FORECAST)["scheduler_us"].values() for turn in turns]
    plain, more = ([each[i] for each in scheduler] for i in (0, 1))
    told = f"the scheduler took {min(plain):.0f} to {max(plain):.0f} us a step here, and {min(more):.0f} to "
    assert f"{told}{max(more):.0f} more with prompts" in page
    assert f"medians are up to {ttft:.1%} off on busy hosts" in page


@pytest.mark.skipif(not TRACE.exists(), reason="the traces lie beside the repository and aren't here")
def test_what_a_simulation_forecasts_on_quick_hosts() -> None:
    """By the published profiles of two runs, told nothing: worked out here, with the settings of the others."""
    setting = read(CLAUSE[0] + FORECAST)["setting"]
    errors: dict[str, dict[str, tuple[float, float]]] = {}
    for name, window_s, rate in (("dsv2lite-eighteenth", 20, 0.7), ("rate-2-fifteenth", 30, 2.0)):
        trace = read_trace(TRACE).window(600, window_s).limited(setting["max_model_len"]).scaled(rate)
        costs = read_profile(path_of(name + ALONE, "-profile")).costs
        server = Server(
            settings=Settings(max_num_reqs=setting["max_num_reqs"], max_num_tokens=setting["max_num_tokens"]),
            kv_tokens=setting["kv_tokens"], block_size=setting["block_size"], warm=True, kv_bytes_per_token=None,
        )  # fmt: skip
        for policy, measured in read(name)["served"]["policies"].items():
            result = simulate(
                trace, policy, server=server, costs=costs, attention=Claims.at_level("mixed"), objective=Objective()
            )
            errors.setdefault(name, {})[policy] = (
                result.ttft.p50 / 1e3 / measured["ttft_p50_ms"]["measured"] - 1,
                result.gap.p50 / 1e3 / measured["gap_p50_ms"]["measured"] - 1,
            )
    lite, small = errors.values()
    (late, _), others = small["vllm"], [ttft for policy, (ttft, _) in small.items() if policy != "vllm"]
    told = f"DeepSeek-V2-Lite's eighteenth is within {max(abs(ttft) for ttft, _ in lite.values()):.1%} in TTFT and "
    told += f"{max(abs(gap) for _, gap in lite.values()):.1%} in gaps, the 0.5B's fifteenth within "
    told += f"{max(map(abs, others)) * 100:.1f} and {max(abs(gap) for _, gap in small.values()):.1%} but for `vllm`'s "
    assert f"{told}TTFT, {-late:.1%} short" in " ".join(" ".join(SHORT).split())


ELSEWHERE_MADE = {
    "rate-2-fifteenth-elsewhere": "0.5B, fifteenth, by the fourteenth's profile",
    "rate-2-sixteenth-elsewhere": "0.5B, sixteenth, by the fifteenth's profile",
    "dsv2lite-eighteenth-elsewhere": "DeepSeek-V2-Lite, eighteenth, by the seventeenth's profile",
    "rate-2-fourteenth-shipped": "0.5B, fourteenth, by the profile that shipped then",
    "rate-2-fifteenth-shipped": "0.5B, fifteenth, by the profile that shipped until 2026-11-30",
    "dsv2lite-eighteenth-shipped": "DeepSeek-V2-Lite, eighteenth, by the profile that shipped until 2026-11-30",
}
"""Runs by profiles of other hosts, and what their rows begin with"""


def test_profiles_of_other_hosts_are_held_to_the_latest_runs() -> None:
    """Those made before the runs before, and those that shipped: a row each, and what they are over the line by."""
    page = " ".join(" ".join(SHORT).split())
    rows = {
        name: in_short(name).partition(", elsewhere")[2] or in_short(name).partition(", shipped")[2]
        for name in ELSEWHERE_MADE
    }
    expected = [f"| {begin}{rows[name]}" for name, begin in ELSEWHERE_MADE.items()]
    assert table_of(expected[0], SHORT) == (8, expected)
    for name, made in (("qwen2.5-0.5b-h200", "rate-2-fifteenth"), ("deepseek-v2-lite-h200", "dsv2lite-eighteenth")):
        shipped = read_profile(path_of(f"{made}-shipped", "-profile"))
        assert read(f"{made}-shipped")["measured_at"] == shipped.measured_at
        assert read(f"{made}-shipped")["host_work_us"] == shipped.costs.host_work_us
        assert shipped.measured_at[:10] == "2026-11-28"
        assert load_profile(name).measured_at[:10] == "2026-11-30"
    for made, before in (
        ("rate-2-fifteenth", "rate-2-fourteenth"), ("rate-2-sixteenth", "rate-2-fifteenth"),
        ("dsv2lite-eighteenth", "dsv2lite-seventeenth"),
    ):  # fmt: skip
        costs = read_profile(path_of(f"{made}-elsewhere", "-profile")).costs
        assert costs == read_profile(path_of(before + ALONE, "-profile")).costs
    share = read_profile(path_of("rate-2-fifteenth-shipped", "-profile")).costs.effects.outlasted_share
    assert share == read_profile(path_of("rate-2-fourteenth", "-profile")).costs.effects.outlasted_share
    shipped = [f"rate-2-{run}" for run in ("fourteenth-shipped", "fifteenth-shipped", "fifteenth-shipped-before")]
    had = [read_profile(path_of(name, "-profile")).costs.effects.outlasted_share for name in shipped]
    assert had == [None, share, None]
    over = {
        name: [key for key, row in rows_of(name).items() if judged(row, read(name))[0] == "no"]
        for name in ELSEWHERE_MADE
    }
    assert {name: cells for name, cells in over.items() if cells} == {shipped[0]: [("split", "middle")]}
    splits = [rows_of(name)["split", "middle"]["error"] for name in shipped]
    told = f"**SPLIT in the middle is {splits[0]:.1%} off in the fourteenth**, by the 0.5B's that had no "
    told += "`outlasted_share` "
    assert f"{told}then; in the fifteenth it is {splits[1]:.1%} off with the share, and {splits[2]:.1%} without" in page
    off = {policy: each["ttft_p50_ms"]["error"] for policy, each in read(shipped[0])["served"]["policies"].items()}
    others = max(abs(error) for policy, error in off.items() if policy != "vllm")
    told = f"`vllm`'s TTFT p50 is {-off['vllm']:.1%} short in the fourteenth, the other policies' within "
    told += f"{others:.1%}; in "
    assert f"{told}the fifteenth all are within {latencies_off(shipped[1])[0]:.1%}" in page
    wrong = {name: ranked(name) for name in ELSEWHERE_MADE if not ranked(name).startswith("as measured")}
    assert wrong == {"dsv2lite-eighteenth-shipped": "wrongly by gap p50"}
    [apart] = wrongly_ranked(read("dsv2lite-eighteenth-shipped"))
    assert f"ranks gap p50 of `vllm` and `piecewise` wrongly, which are {apart:.1%} apart" in page
    assert ranked("rate-2-sixteenth-elsewhere") == ranked("rate-2-sixteenth")
    busy, eager_key, middle_key = "rate-2-sixteenth", ("eager", "host-bound"), ("piecewise", "middle")
    other, own = read(busy + "-elsewhere"), read(busy)
    told = f"EAGER that the host bounds is {ran_again(other, *eager_key)[1]:.1%} off by the middle of repeats, "
    told += f"{ran_again(own, *eager_key)[1]:.1%} by its own; no step of PIECEWISE is host-bound by that profile, "
    told += f"where {rows_of(busy)['piecewise', 'host-bound']['steps']:,} are by its own, and those in the middle are "
    told += f"{ran_again(other, *middle_key)[1]:.1%} off so; TTFT p50 of one policy is "
    assert f"{told}{latencies_off(busy + '-elsewhere')[0]:.1%} off" in page
    assert ("piecewise", "host-bound") not in rows_of(busy + "-elsewhere")
    names = ["rate-2-fifteenth-elsewhere", "dsv2lite-eighteenth-elsewhere", "rate-2-fifteenth-shipped",
             "dsv2lite-eighteenth-shipped", "rate-2-fifteenth", LATEST["dsv2lite"]]  # fmt: skip
    singles = [rows_of(name)["eager", "host-bound"]["error"] * 100 for name in names]
    eager = [part for one, name in zip(singles, names, strict=True)
             for part in (one, ran_again(read(name), "eager", "host-bound")[1])]  # fmt: skip
    told = "{:.1f} and {:.1%} off by the fourteenth's profile and {:.1f} and {:.1%} by the seventeenth's; "
    told += "{:.1f} and {:.1%} "
    told += "by the 0.5B's that shipped and {:.1f} and {:.1%} by DeepSeek-V2-Lite's (by the runs' own {:.1f} "
    told += "and {:.1%} and "
    told += "{:.1f} and {:.1%})"
    assert told.format(*eager) in page
    pieces = [rows_of(name)["piecewise", "host-bound"]["error"] for name in names]
    told = "makes host-bound**, singly: {:.1f} and {:.1%} by the fourteenth's and the seventeenth's profile, "
    told += "{:.1f} and "
    told += "{:.1%} by those that shipped (by the runs' own {:.1f} and {:.1%})."
    assert told.format(*(each * 100 if i % 2 == 0 else each for i, each in enumerate(pieces))) in page


@pytest.mark.parametrize("name", AROUND)
def test_no_verdict_is_another_by_the_calibrations_before_alone(name: str) -> None:
    """Nor a ranking; both pages give what is: a row, EAGER's repeats, host-bound cells and medians."""
    alone = name + ALONE
    last, before = read(name), read(alone)
    rows, own = rows_of(name), rows_of(alone)
    expected = [in_short(run + ALONE) for run in AROUND]
    assert table_of(f"| {label('rate-2-thirteenth')}, before", SHORT) == (8, expected)
    assert {key: judged(each, before)[0] for key, each in own.items()} == {
        key: judged(each, last)[0] for key, each in rows.items()
    }
    assert ranked(alone) == ranked(name)
    assert len(calibrated(name)) == AROUND[name]
    assert middle(calibrated(name)[:3]).costs == read_profile(path_of(alone, "-profile")).costs
    eager, pieces = ("eager", "host-bound"), ("piecewise", "host-bound")
    errors = {key: judged(own[key], before)[1] for key in (eager, pieces)}
    short = f"{errors[eager]:.1%} for {judged(rows[eager], last)[1]:.1%} ({label(name)})"
    assert short in " ".join(" ".join(SHORT).split())
    told = f"(`{path_of(alone).name}`) no verdict is another: host-bound EAGER is {own[eager]['error']:.1%} off "
    told += f"singly and {errors[eager]:.1%} repeated, host-bound PIECEWISE {own[pieces]['error'] * 100:.1f} and "
    told += f"{errors[pieces]:.1%}"
    ttft, gap = latencies_off(alone)
    if ("split", "middle") in own:
        told += f", SPLIT in the middle {own['split', 'middle']['error']:.1%}"
    else:
        told += f", all else within {max(own[key]['error'] for key in own if key not in (eager, pieces)):.1%}"
    page = " ".join(" ".join(DOC).split())
    assert f"{told}. TTFT p50 is within {ttft:.1%}, gaps within {gap:.1%}" in page
    if name.startswith("dsv2lite"):
        assert f"The second turn's EAGER is {later_of(alone)[eager]['error']:.1%} off" in page


def later_of(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The cells of a run's second turns."""
    return {(each["mode"].split("/")[0], each["regime"]): each for each in read(name)["later_turns"]}


def host_speeds(name: str) -> list[float]:
    """What fixed work took beside each turn, us in the mean."""
    policies = read(name)["served"]["policies"].values()
    return [turn["host_work_us"] for each in policies for turn in each["turns"]]


def calibrated(name: str) -> list[Profile]:
    """A run's calibrations, three and those behind it; of the tenth's the first was cut off."""
    numbers = range(2 if name == "dsv2lite-tenth" else 1, 1 + AROUND.get(name, 3))
    assert not path_of(name, f"-profile-{numbers.stop}").exists()
    return [read_profile(path_of(name, f"-profile-{number}")) for number in numbers]


def eager_levels(name: str) -> tuple[list[float], list[float]]:
    """The host's ms for EAGER prompts alone and beside decodes, by each calibration at the profile's speed."""
    served = read_profile(path_of(name, "-profile")).costs
    hosts = [each.costs.at_host_speed(served.host_work_us).host_eager for each in calibrated(name)]
    alone, mixed = ([host.base_for(decodes=beside, prefills=True) / 1e3 for host in hosts] for beside in (False, True))
    return alone, mixed


@pytest.mark.parametrize("names", [*((name,) for name in LAST), BEFORE])
def test_runs_are_told_as_their_results_have_them(names: tuple[str, ...]) -> None:
    """A table has every cell and no other, those over the line bold, and whether it holds by the page's rule."""
    last = len(names) == 1
    assert all(any(f"{path_of(name).name}`" in line for line in DOC) for name in names if last)
    begins = {name: "{mode}, {regime}" if last else f"{label(name)}, {{mode}}, {{regime}}" for name in names}
    expected = [line for name in names for line in cells(read(name), begins[name], 11)]
    columns, rows = table_of(expected[0])
    assert (columns, rows) == (11, expected)


@pytest.mark.parametrize("names", [LAST, BEFORE])
def test_latencies_are_told_as_the_results_have_them(names: tuple[str, ...]) -> None:
    """Every run's policies and no others, each run named once."""
    expected = []
    for name in names:
        for i, (policy, found) in enumerate(read(name)["served"]["policies"].items()):
            told = [latency(found["ttft_p50_ms"], 1), latency(found["gap_p50_ms"], 2)]
            expected.append(line_of(["" if i else label(name), f"`{policy}`", *told]))
    assert table_of(expected[0])[1] == expected


def test_which_policies_a_figure_does_not_rank() -> None:
    """By pair, as results have it since the eleventh run, and by figure."""
    assert unshown_by("gap p50", [["auto", "vllm"]]) == ["gap p50 of `auto` and `vllm`"]
    assert unshown_by("gap p50", True) == ["gap p50"]
    assert unshown_by("gap p50", []) == unshown_by("gap p50", False) == unshown_by("gap p50", None) == []


def test_a_row_of_several_turns_says_what_they_differ_by() -> None:
    """Means, and by how much the measured ones are apart."""
    assert latency(figure([13.2, 13.4], [13.5, 13.7]), 2) == "13.30 / 13.60 (+2%; 1.5% apart)"
    assert latency(figure([13.2], [13.5]), 2) == "13.20 / 13.50 (+2%)"


@pytest.mark.parametrize("name", LAST)
def test_a_profile_is_the_middle_of_its_calibrations(name: str) -> None:
    """Of those that are published beside it, each figure's."""
    assert middle(calibrated(name)).costs == read_profile(path_of(name, "-profile")).costs


def calibrations(name: str) -> list[Profile]:
    """A run's three, as they were made."""
    numbers = ["" if number == TAKEN[name] else f"-{number}" for number in (1, 2, 3)]
    return [read_profile(path_of(name, f"-profile{number}")) for number in numbers]


def test_figures_of_the_calibrations_are_those_of_the_profiles() -> None:
    """What pieces in a row take; of each run's three the middle can be made."""
    shares = [f"{each.costs.effects.warm_host_share[0]:.2f}" for each in calibrations("small24-eighth")]
    told = f"took {shares[2]} of what one alone does (`warm_host_share`), {shares[0]} and {shares[1]} by the other two"
    assert told in " ".join(DOC)
    assert all(middle(calibrations(name)).costs.measured for name in TAKEN)


def earlier(result: dict[str, Any], columns: tuple[tuple[str, str], ...]) -> str:
    """An earlier run's cells: the mean error of single steps and in brackets that of repeats, empty where none."""
    rows = {(row["mode"].split("/")[0], row["regime"]): row for row in result["policies"]["all policies"]}
    parts = []
    for key in columns:
        again = repeated(result, *key) or {"steps": 0}
        brackets = f" ({again['error'] * 100:.1f})" if again["steps"] > 5 else ""
        parts.append(f"{rows[key]['error']:.1%}{brackets}" if key in rows else "")
    return line_of(parts)


@pytest.mark.parametrize("name", EARLIER)
def test_an_earlier_run_is_told_as_its_result_has_it(name: str) -> None:
    """Its cells stand side by side in a row."""
    expected = f" {earlier(read(name), COLUMNS[name.split('-')[0]])} "
    assert any(line.startswith(f"| {EARLIER[name]}") and expected in line for line in DOC), expected


def test_figures_in_the_text() -> None:
    """Those that a run is judged by, as its result has them."""
    page = " ".join(" ".join(DOC).split())
    off = []
    for name in ("dsv2lite-sixth", "dsv2lite-eighth"):
        wrong = {figure for figure, pairs in read(name)["served"]["ranked_wrong"].items() if pairs}
        assert wrong == {"gap_p50_ms", *(("busy_ms", "span_ms") if name.endswith("eighth") else ())}
        rows = read(name)["policies"]["vllm"]
        off.append(next(row["error"] for row in rows if (row["mode"], row["regime"]) == ("full", "middle")))
        assert ["vllm", "auto"] in read(name)["served"]["ranked_wrong"]["gap_p50_ms"]
    assert f"the table is {off[0] * 100:.1f} and {off[1]:.1%} off them" in page
    ninth = read("dsv2lite-ninth")["served"]["ranked_wrong"]
    assert {figure: pairs for figure, pairs in ninth.items() if pairs} == {"gap_p50_ms": [["vllm", "auto"]]}
    seventh = read("dsv2lite-seventh")["served"]
    assert [name for name, pairs in seventh["ranked_wrong"].items() if pairs] == ["gap_p50_ms"]
    gaps = [seventh["policies"][policy]["gap_p50_ms"] for policy in ("vllm", "piecewise")]
    apart, other = (
        max(x, y) / min(x, y) - 1
        for x, y in zip(*([g[k] for k in ("measured", "simulated")] for g in gaps), strict=True)
    )
    assert f"`vllm` and `piecewise`, {apart:.1%} apart, are simulated {other:.1%} apart the other way round" in page
    fifth = read("dsv2lite-fifth")["us_per_token"]
    apart = fifth["vllm"]["measured"] / fifth["piecewise"]["measured"] - 1
    assert f"Time a token ranks `vllm` before `piecewise`, {apart:.1%} apart, wrongly" in page
    row = rows_of("dsv2lite-fifth")["eager", "middle"]
    [cell] = [each for each in read("dsv2lite-fifth")["cells_again"] if key_of(each) == key_of(row)]
    told = f"Of {cell['steps']} EAGER steps that the device bounds ({row['error']:.1%}) only {cell['again']} ran again"
    assert f"{told}, {cell['again'] / cell['steps']:.0%} (their middle {cell['error']:.1%} off)" in page
    tenth = read("dsv2lite-tenth")
    assert ranked_as_measured(tenth)
    assert (tenth["not_shown"], tenth["served"]["not_shown"]) == (False, ["ttft_p50_ms"])
    assert f"`vllm`'s two turns are {tenth['served']['tie']['ttft_p50_ms']:.1%} apart" in page
    [cell] = [each for each in tenth["cells_again"] if (each["mode"], each["regime"]) == ("eager", "saturated")]
    told = f"of its {cell['steps']} steps only {cell['again']} ran again, {cell['again'] / cell['steps']:.0%}"
    assert f"{told} for the four fifths" in page
    assert f"Their middle is {cell['error']:.1%} off" in page
    bound = repeated(tenth, "eager", "host-bound")
    assert bound is not None
    assert f"to the letter only, as {bound['host_bound_share']:.0%} of the repeats were host-bound" in page
    ttft, gap = latencies_off("dsv2lite-tenth")
    assert f"TTFT p50 is within {ttft:.1%}, gaps within {gap:.1%}" in page
    ttfts = [tenth["served"]["policies"][name]["ttft_p50_ms"]["measured"] for name in ("vllm", "auto", "piecewise")]
    over = [ttfts[0] / each - 1 for each in ttfts[1:]]
    assert f"`vllm` {over[0] * 100:.0f} and {over[1]:.0%} above the others" in page
    slow = rows_of("dsv2lite-twelfth")
    pieces, eager = ([slow[mode, at]["error"] for at in ("host-bound", "middle")] for mode in ("piecewise", "eager"))
    assert f"{pieces[0]:.1%} off where the host bounds them and {pieces[1]:.1%} in the middle" in page
    assert f"Host-bound EAGER is {eager[0]:.1%} off singly" in page
    assert f"The middle's is {eager[1]:.1%} and isn't shown" in page
    ttft, gap = latencies_off("dsv2lite-twelfth")
    assert f"TTFT p50 is within {ttft:.1%}, gaps within {gap:.1%}" in page
    last = read("dsv2lite-eleventh")
    assert [[*map(len, each)] for each in (last["ranked_wrong"], last["served"]["ranked_wrong"].values())] == [
        [2], [0] * len(FIGURES),
    ]  # fmt: skip
    bound, middle = (repeated(last, "eager", regime) for regime in ("host-bound", "middle"))
    assert bound is not None
    assert middle is not None
    own = ran_again(last, "eager", "middle")
    row = rows_of("dsv2lite-eleventh")["eager", "middle"]
    assert own[0] == 1.0
    told = f"{row['steps']} EAGER steps that the device bounds are {row['error']:.1%} off singly, noise"
    assert f"{told} {row['noise']:.1%}, and {own[1]:.1%} by the middle of four repeats of each" in page
    assert f"it would hold, {middle['error']:.1%} over {middle['steps']}" in page
    told = f"Host-bound EAGER is {rows_of('dsv2lite-eleventh')['eager', 'host-bound']['error']:.1%} off singly and "
    assert f"{told}**{bound['error']:.1%} by the middle of four repeats** of all its {bound['steps']} steps" in page
    ttft, gap = latencies_off("dsv2lite-eleventh")
    assert f"TTFT p50 is within {ttft:.1%} and gaps within {gap:.1%}" in page
    tokens = last["us_per_token"]
    apart = tokens["vllm"]["measured"] / tokens["piecewise"]["measured"] - 1
    other = tokens["piecewise"]["simulated"] / tokens["vllm"]["simulated"] - 1
    told = f"`piecewise` and `vllm` are {apart:.1%} apart and simulated {other:.1%} apart the other way round"
    assert f"{told}, where a tie is {last['tie']['piecewise and vllm']:.1%}" in page
    eleventh = read("rate-2-eleventh")
    again = repeated(eleventh, "piecewise", "host-bound")
    assert again is not None
    share = again["host_bound_share"]
    assert f"(repeated {again['error']:.1%}, but {share:.0%} of the repeats were host-bound)" in page


def test_figures_of_the_thirteenth_in_the_text() -> None:
    """What its cells, turns and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    quick, rows = read("dsv2lite-thirteenth"), rows_of("dsv2lite-thirteenth")
    row, few, pieces = rows["eager", "host-bound"], rows["eager", "middle"], rows["piecewise", "host-bound"]
    errors = [ran_again(quick, *key_of(each))[1] for each in (row, few, pieces)]
    told = f"Host-bound EAGER is {row['error']:.1%} off singly (noise {row['noise']:.1%}) and "
    assert f"{told}**{errors[0]:.1%} by the middle of four repeats** of all its {row['steps']} steps" in page
    told = (
        f"Its {few['steps']} EAGER steps in the middle are {few['error']:.1%} off singly, noise {few['noise']:.1%}, and"
    )
    assert f"{told} {errors[1]:.1%} repeated; the {rows['eager', 'saturated']['steps']} saturated ones" in page
    again = repeated(quick, "piecewise", "host-bound")
    assert again is not None
    assert again["host_bound_share"] == 0.0
    assert f"{pieces['error']:.1%} off singly and {errors[2]:.1%} repeated. No repeat was host-bound" in page
    later = {key_of(each): each for each in quick["later_turns"]}["piecewise", "host-bound"]
    assert f"The second turn's {later['steps']} are {later['error']:.1%} off" in page
    served = quick["served"]
    ttfts = {policy: each["ttft_p50_ms"] for policy, each in served["policies"].items()}
    turns = [each["ttft_p50_ms"] for each in served["policies"]["vllm"]["turns"]]
    sides = [" and ".join(f"{each[side]:.1f}" for each in turns) for side in SIDES]
    told = f"{ttfts['vllm']['apart']:.1%} apart by TTFT p50 ({sides[0]} ms; simulated {sides[1]})"
    assert told in page
    over = [ttfts["vllm"]["measured"] / ttfts[other]["measured"] - 1 for other in ("auto", "piecewise")]
    assert f"It lies {over[0] * 100:.0f} and {over[1]:.0%} above the others" in page
    assert not any(served["not_shown"].values())
    alone, mixed = ("{:.1f}, {:.1f} and {:.1f}".format(*each) for each in eager_levels("dsv2lite-thirteenth"))
    assert f"{mixed} ms for EAGER prompts with decodes, {alone} for prompts alone" in page


def test_figures_of_the_fourteenth_in_the_text() -> None:
    """What its cells, turns, pairs and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    name = "dsv2lite-fourteenth"
    last, rows = read(name), rows_of(name)
    row, pieces = rows["eager", "host-bound"], rows["piecewise", "host-bound"]
    later = {key_of(each): each for each in last["later_turns"]}
    second = later["eager", "host-bound"]
    told = f"Host-bound EAGER is {row['error']:.1%} off singly (noise {row['noise']:.1%}) and "
    told += f"**{ran_again(last, *key_of(row))[1]:.1%} by the middle of three repeats** of all its {row['steps']} steps"
    assert f"{told}: " in page
    assert f"The second turn's {second['steps']} are {second['error']:.1%} off (bias {second['bias']:+.1%})" in page
    alone, mixed = ("{:.1f}, {:.1f} and {:.1f}".format(*each) for each in eager_levels(name))
    assert f"{mixed} ms for EAGER prompts with decodes at the profile's host speed, {alone} for prompts alone" in page
    again = repeated(last, "piecewise", "host-bound")
    assert again is not None
    told = f"Its {pieces['steps']} host-bound PIECEWISE steps are {pieces['error']:.1%} off singly and "
    told += f"{ran_again(last, *key_of(pieces))[1]:.1%} repeated, of which {again['host_bound_share']:.0%} were"
    assert told in page
    assert f"The second turn's {later['piecewise', 'host-bound']['steps']} are" in page
    ttft, gap = latencies_off(name)
    assert f"TTFT p50 is within {ttft:.1%}, gaps within {gap:.1%}. - By the run's span" in page
    served = last["served"]
    span = {policy: served["policies"][policy]["span_ms"]["simulated"] for policy in ("piecewise", "vllm")}
    told = f"are {wrongly_ranked(last)[0]:.2%} apart and simulated {span['piecewise'] / span['vllm'] - 1:.2%} the other"
    assert f"{told} way round, where a tie is {served['tie']['span_ms']['piecewise and vllm']:.2%}" in page
    assert served["not_shown"]["ttft_p50_ms"] == [["auto", "piecewise"]]
    assert f"`auto`'s turns are {served['tie']['ttft_p50_ms']['auto and piecewise']:.1%} apart" in page


def test_figures_of_the_fifteenth_in_the_text() -> None:
    """What its cells, turns, pair and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    name = "dsv2lite-fifteenth"
    last, rows = read(name), rows_of(name)
    row, middle, pieces = (
        rows[key] for key in (("eager", "host-bound"), ("eager", "middle"), ("piecewise", "host-bound"))
    )
    told = f"Host-bound EAGER is {row['error']:.1%} off singly (noise {row['noise']:.1%}, so single steps decide) and "
    told += f"{ran_again(last, *key_of(row))[1]:.1%} by the middle of four repeats of all its {row['steps']} steps"
    assert f"{told}. The middle's {middle['steps']} are {middle['error']:.1%} off" in page
    later = {key_of(each): each for each in last["later_turns"]}
    bound, other = (later["eager", regime] for regime in ("host-bound", "middle"))
    told = f"its {bound['steps']} host-bound EAGER steps are {bound['error']:.1%} off (bias {bound['bias']:+.1%}), its "
    told += f"{other['steps']} in the middle {other['error']:.1%} (bias {other['bias']:+.1%})"
    assert told in page
    alone, mixed = ("{:.1f}, {:.1f} and {:.1f}".format(*each) for each in eager_levels(name))
    assert f"{alone} ms at the profile's host speed, with decodes {mixed}" in page
    again = repeated(last, "piecewise", "host-bound")
    assert again is not None
    told = f"Its {pieces['steps']} host-bound PIECEWISE steps are {pieces['error']:.1%} off singly and "
    told += (
        f"{ran_again(last, *key_of(pieces))[1]:.1%} repeated, of which {again['host_bound_share']:.0%} were host-bound"
    )
    assert told in page
    ttft, gap = latencies_off(name)
    assert f"TTFT p50 is within {ttft:.1%}, gaps within {gap:.1%}. - By time a token" in page
    span, token = wrongly_ranked(last)
    tokens, served = last["us_per_token"], last["served"]
    other_way = tokens["piecewise"]["simulated"] / tokens["vllm"]["simulated"] - 1
    told = (
        f"`piecewise` and `vllm` are {token:.1%} apart and simulated {other_way:.1%} the other way round, where a tie"
    )
    assert f"{told} is {last['tie']['piecewise and vllm']:.1%}; by the run's span {span:.2%} and" in page
    spans = [served["policies"][policy]["span_ms"]["simulated"] for policy in ("piecewise", "vllm")]
    told = f"{spans[0] / spans[1] - 1:.2%}, where a tie is {served['tie']['span_ms']['piecewise and vllm']:.2%}"
    assert told in page
    busy = [served["policies"][policy]["busy_ms"]["error"] for policy in ("piecewise", "vllm")]
    assert f"`piecewise` is simulated {busy[0]:.2%} too slow and `vllm`, whose" in page
    assert f"in the second turn, {-busy[1]:.2%} too quick" in page


def test_figures_of_the_sixteenth_in_the_text() -> None:
    """What its cells, turns, pairs and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    name = "dsv2lite-sixteenth"
    last, rows = read(name), rows_of(name)
    row, pieces, few = (
        rows[key] for key in (("eager", "host-bound"), ("piecewise", "host-bound"), ("eager", "middle"))
    )
    later = {key_of(each): each for each in last["later_turns"]}
    second = later["eager", "host-bound"]
    told = f"**Host-bound EAGER is {row['error']:.1%} off singly** (noise {row['noise']:.1%}, bias {row['bias']:+.1%}; "
    assert f'{told}the median step {row["median_error"]:.1%}): "no"' in page
    told = f"The second turn's {second['steps']} are {second['error']:.1%} off (noise {second['noise']:.1%}, bias "
    assert (
        f"{told}{second['bias']:+.1%}). The mean of both turns' bias is {(row['bias'] + second['bias']) / 2:+.1%}"
        in page
    )
    assert ran_again(last, *key_of(row)) == (0.0, 0.0)
    own, middle_error = ran_again(last, *key_of(pieces))
    again = repeated(last, *key_of(pieces))
    assert again is not None
    assert (own, pieces["steps"], again["repeats"], again["host_bound_share"]) == (1.0, 6, 3, 0.0)
    told = f"The six host-bound PIECEWISE steps are {pieces['error']:.1%} off singly (noise {pieces['noise']:.1%}) and "
    told += f'{middle_error:.1%} by the middle of three repeats: "no". No repeat was host-bound. The second turn\'s '
    other = later["piecewise", "host-bound"]
    assert f"{told}{other['steps']} are {other['error']:.1%} off" in page
    told = f"EAGER in the middle, {few['steps']} steps, is {few['error']:.1%} off, noise {few['noise']:.1%}"
    assert f"{told}, and none ran again three times: not shown" in page
    splits = rows["split", "saturated"], later["split/decodes_beside", "saturated"]
    split = max(each["error"] for each in splits)
    assert f"SPLIT is within {split:.1%}, in the second turn too" in page
    alone, mixed = eager_levels(name)
    told = f"Calibrations lie {max(alone) / min(alone) - 1:.0%} apart in what an EAGER prompt takes the host: "
    told += "{:.1f}, {:.1f} and {:.1f} ms at the profile's host speed, ".format(*alone)
    assert told + "with decodes {:.1f}, {:.1f} and {:.1f}.".format(*mixed) in page
    served = last["served"]
    assert ranked_as_measured(last)
    spans = {policy: each["span_ms"]["measured"] for policy, each in served["policies"].items()}
    told = (
        f"by the run's span `piecewise` and `vllm` are {spans['vllm'] / spans['piecewise'] - 1:.1%} apart where a tie"
    )
    assert f"{told} is {served['tie']['span_ms']['piecewise and vllm']:.1%}" in page
    ttft, gap = latencies_off(name)
    assert f"TTFT p50 is within {ttft:.1%}, gaps within {gap:.1%}. `vllm`'s TTFT p50" in page
    assert mean_alone(last) in page
    speeds = [turn["host_work_us"] for each in served["policies"].values() for turn in each["turns"]]
    told = f"{last['host_work_us']:.1f} us of fixed work in the profile, {min(speeds):.1f} to {max(speeds):.1f} in the"
    assert f"{told} mean of a policy's turn" in page
    before = ("dsv2lite-thirteenth", "dsv2lite-fourteenth", "dsv2lite-fifteenth", "h100-dsv2lite", name)
    *shares, now = (read_profile(path_of(each, "-profile")).costs.effects.padding_share[0] for each in before)
    told = f"that was {min(shares):.2f} to {max(shares):.2f} of FULL's further rows; here it is {now:g}"
    assert f"In the three runs before and the H100's {told}" in page
    steps, saturated = (rows["full", regime]["error"] for regime in ("middle", "saturated"))
    assert f"off for {steps * 100:.1f} and {saturated:.1%} (looking back" in page


def test_figures_of_the_small_qwens_twelfth_in_the_text() -> None:
    """What its cells, turns, host and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    name = "rate-2-twelfth"
    last, rows = read(name), rows_of(name)
    row, pieces = rows["eager", "host-bound"], rows["piecewise", "host-bound"]
    told = f"Host-bound EAGER is {row['error']:.1%} off singly (noise {row['noise']:.1%}, bias {row['bias']:+.1%}) and "
    told += f"**{ran_again(last, *key_of(row))[1]:.1%} by the middle of three repeats** of all its {row['steps']} steps"
    assert f"{told}: " in page
    later = {key_of(each): each for each in last["later_turns"]}["eager", "host-bound"]
    assert f"The second turn's {later['steps']} are {later['error']:.1%} off (bias {later['bias']:+.1%})" in page
    alone, _ = eager_levels(name)
    told = f"calibrations lie {max(alone) / min(alone) - 1:.0%} apart in what an EAGER prompt takes the host: "
    assert told + "{:.1f}, {:.1f} and {:.1f} ms".format(*alone) in page
    own, middle_error = ran_again(last, *key_of(pieces))
    told = f"Host-bound PIECEWISE is {pieces['error']:.1%} off singly, noise {pieces['noise']:.1%}, and only "
    told += f"{round(own * pieces['steps'])} of its {pieces['steps']:,} steps ran again"
    assert f'{told}: "no". The middle of those is {middle_error:.1%} off' in page
    ttft, gap = latencies_off(name)
    assert f"TTFT p50 is within {ttft:.1%}, gaps within {gap:.1%}. Policies rank as measured" in page
    apart = last["served"]["tie"]["ttft_p50_ms"]["auto and piecewise"]
    assert f"as `piecewise`'s turns are {apart:.1%} apart" in page
    speeds = [turn["host_work_us"] for each in last["served"]["policies"].values() for turn in each["turns"]]
    told = f"{last['host_work_us']:.1f} us in the profile and {min(speeds):.1f} to {max(speeds):.1f} in the mean of a"
    assert told in page


def singly(row: dict[str, Any]) -> str:
    return f"{row['error']:.1%} off singly (noise {row['noise']:.1%})"


def eager_again(name: str, times: str = "five") -> str:
    """What is said of host-bound EAGER steps, all of which ran again, and of the second turn's."""
    eager = ("eager", "host-bound")
    last, row, second = read(name), rows_of(name)[eager], later_of(name)[eager]
    share_again, error = ran_again(last, *eager)
    assert share_again == 1.0
    told = (
        f"Host-bound EAGER is {singly(row)} and {error:.1%} by the middle of {times} repeats of all its {row['steps']} "
    )
    told += f"steps. The second turn's {second['steps']} are {second['error']:.1%} off singly (noise "
    return f"{told}{second['noise']:.1%}, bias {second['bias']:+.1%})"


def of_calibrations(name: str) -> tuple[str, str]:
    """What is said of five calibrations' EAGER prompts, and of the host's speed in the profile and in turns."""
    (alone, _), speeds = eager_levels(name), host_speeds(name)
    told = f"Calibrations lie {max(alone) / min(alone) - 1:.0%} apart in what an EAGER prompt takes the host: "
    told += "{:.1f}, {:.1f}, {:.1f}, {:.1f} and {:.1f} ms at the".format(*alone)
    host = f"{read(name)['host_work_us']:.1f} us of fixed work in the profile, {min(speeds):.1f} to {max(speeds):.1f} "
    return told, f"{host}in the mean"


def test_figures_of_the_small_qwens_thirteenth_in_the_text() -> None:
    """What its cells, turns, host, calibrations and prompts are said to be; not what a later table makes of it."""
    page = " ".join(" ".join(DOC).split())
    name = "rate-2-thirteenth"
    last, rows, later = read(name), rows_of(name), later_of(name)
    eager, pieces, split = ("eager", "host-bound"), ("piecewise", "host-bound"), ("split", "middle")
    row, second = rows[split], later[split]
    told = f"**SPLIT in the middle is {row['error']:.1%} off** (bias {row['bias']:+.1%}, noise {row['noise']:.1%})"
    assert told in page
    assert f"The second turn's {second['steps']} steps are {second['error']:.1%} off" in page
    own = {each: row_by(last, each, "split/decodes_beside", "middle")["steps"] for each in ("auto", SPLIT)}
    assert sum(own.values()) == row["steps"]
    assert f"{own[SPLIT]} of the {row['steps']} steps are `split`'s" in page
    assert eager_again(name) in page
    row, second, again = rows[pieces], later[pieces], repeated(last, *pieces)
    assert again is not None
    told = f"Host-bound PIECEWISE, {row['steps']} steps, is {singly(row)} and {ran_again(last, *pieces)[1]:.1%} "
    told += f"repeated, of which {again['host_bound_share']:.0%} were host-bound: to the letter. The second turn's "
    assert f"{told}{second['steps']} are {second['error']:.1%} off, noise {second['noise']:.1%}" in page
    within = max(each["error"] for key, each in rows.items() if key not in (eager, pieces, split))
    ttft, gap = latencies_off(name)
    told = f"All else is within {within:.1%} by single steps. TTFT p50 is within {ttft:.1%}, gaps within "
    assert f"{told}{gap:.1%}. No pair is ranked wrongly, and every one is shown. {mean_alone(last)}" in page
    assert all(told in page for told in of_calibrations(name))
    single = [
        row_by(last, policy, *key)
        for policy, key in (("vllm", pieces), (SPLIT, pieces), ("auto", ("split/decodes_beside", "middle")))
    ]
    assert [each["steps"] for each in single] == [4, 1, 2]
    told = "In the 0.5B's thirteenth `vllm`'s four host-bound PIECEWISE steps are {:.1%} off, `split`'s only "
    told += "one {:.1%}, and `auto`'s two splits in the middle {:.1%}"
    assert told.format(*(each["error"] for each in single)) in page


def test_figures_of_the_small_qwens_fourteenth_in_the_text() -> None:
    """What its cells, turns, host, calibrations and their shares for short prompts are said to be."""
    page = " ".join(" ".join(DOC).split())
    name = "rate-2-fourteenth"
    last, rows, later = read(name), rows_of(name), later_of(name)
    pieces, split = ("piecewise", "host-bound"), ("split", "middle")
    row, second = rows[split], later[split]
    told = (
        f"**SPLIT in the middle is {row['error']:.1%} off** (bias {row['bias']:+.1%}, noise {row['noise']:.1%}), all "
    )
    told += f"{row['steps']} steps `split`'s"
    assert row["steps"] == row_by(last, SPLIT, "split/decodes_beside", "middle")["steps"]
    assert told in page
    assert f"the second turn's {second['steps']} are {second['error']:.1%} off. By the same profile" in page
    shares = [each.costs.effects.outlasted_share for each in calibrated(name)]
    short, middling, long = ([share for _, share in found] for found in zip(*shares, strict=True))
    assert {tuple(tokens for tokens, _ in each) for each in shares} == {(64, 480, 1920)}
    told = f"shares of {min(short):.2f} to {max(short):.2f} for prompts of 64 tokens and {min(middling):.2f} to "
    assert f"{told}{max(middling):.2f} for 480; of 1,920 tokens it is 1." in page
    assert {*long} == {1.0}
    assert eager_again(name) in page
    row, second = rows[pieces], later[pieces]
    told = (
        f"{host_bound_pieces(name)}{row['bias']:.1%}. The second turn's {second['steps']:,} are {second['error']:.1%} "
    )
    assert f"{told}off, noise {second['noise']:.1%}, their kinds' means {second['kind_error']:.1%}." in page
    bound = host_bound_again(name)
    told = f"that were host-bound in three or more repeats, {bound['steps']}, the middle is "
    assert f"{told}{bound['error']:.1%} off, where a step's own repeats scatter by {bound['spread']:.1%}" in page
    told = f"{all_else(name)}. No pair is ranked wrongly, and every one is shown. `vllm`'s turns are "
    late = last["served"]["policies"]["vllm"]
    first, second_ = (-each["ttft_p50_ms"]["error"] for each in late["turns"])
    told += f"{late['ttft_p50_ms']['apart']:.1%} apart by TTFT p50, simulated {first * 100:.1f} and {second_:.1%} early"
    assert told in page
    assert ranked_as_measured(last)
    assert not any(last["served"]["not_shown"].values())
    assert all(told in page for told in of_calibrations(name))
    own = [(row_by(last, policy, *pieces), policy) for policy in ("vllm", "auto")]
    assert [each["steps"] for each, _ in own] == [20, 7]
    errors_again = [
        next(
            each["error"]
            for each in last["measured_again"][policy]
            if key_of(each) == ("piecewise", "host-bound in the run")
        )
        for _, policy in own
    ]
    told = "In its fourteenth `vllm`'s 20 host-bound PIECEWISE steps are {:.1%} off (repeated {:.1%}), `auto`'s seven "
    told += "{:.1%} (repeated {:.1%})"
    errors = [each for (row, _), again in zip(own, errors_again, strict=True) for each in (row["error"], again)]
    assert told.format(*errors) in page
    assert not [row for row in last["policies"]["auto"] if row["mode"].startswith("split")]


def all_else(name: str) -> str:
    """What is said of a run's other cells than those that the host bounds, and of its medians."""
    within = max(row["error"] for (_, regime), row in rows_of(name).items() if regime != "host-bound")
    ttft, gap = latencies_off(name)
    return f"All else is within {within:.1%} by single steps. TTFT p50 is within {ttft:.1%}, gaps within {gap:.1%}"


def host_bound_pieces(name: str) -> str:
    """What is said of a run's host-bound PIECEWISE steps, singly, repeated, by kinds and together."""
    pieces = ("piecewise", "host-bound")
    row, again = rows_of(name)[pieces], repeated(read(name), *pieces)
    assert again is not None
    told = (
        f"Host-bound PIECEWISE, {row['steps']:,} steps, is {singly(row)} and {ran_again(read(name), *pieces)[1]:.1%} "
    )
    told += (
        f"repeated, of which {again['host_bound_share']:.0%} were host-bound: to the letter. The means of its kinds "
    )
    return f"{told}of step are {row['kind_error']:.1%} off, the mean of all steps "


def test_figures_of_the_small_qwens_fifteenth_in_the_text() -> None:
    """What its cells, turns, host, repeats and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    name, pieces = "rate-2-fifteenth", ("piecewise", "host-bound")
    rows, second = rows_of(name), later_of(name)[pieces]
    assert eager_again(name, "ten") in page
    told = f"{host_bound_pieces(name)}{rows[pieces]['bias']:.1%}. The second turn's {second['steps']} are "
    told += f"{second['error']:.1%} off, noise {second['noise']:.1%}, their kinds' means {second['kind_error']:.1%}."
    assert told in page
    bound = host_bound_again(name)
    told = f"host-bound in three or more repeats, {bound['steps']:,}, the middle is {bound['error']:.1%} off (bias "
    assert f"{told}{bound['bias']:+.1%}), where a step's own repeats scatter by {bound['spread']:.1%}" in page
    told = f"{all_else(name)}. No pair is ranked wrongly, and every one is shown. `vllm`'s turns are "
    late = read(name)["served"]["policies"]["vllm"]
    early = [each["ttft_p50_ms"]["error"] for each in late["turns"]]
    told += f"{late['ttft_p50_ms']['apart']:.1%} apart by TTFT "
    assert f"{told}p50, simulated {early[0]:.1%} late and {-early[1]:.1%} early" in page
    assert all(told in page for told in of_calibrations(name))


def test_figures_of_the_eighteenth_in_the_text() -> None:
    """What its cells, turns, repeats and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    name, eager, pieces = "dsv2lite-eighteenth", ("eager", "host-bound"), ("piecewise", "host-bound")
    rows, later = rows_of(name), later_of(name)
    assert eager_again(name, "ten").replace("steps. The second", "steps; the second") in page
    told = (
        f"{host_bound_pieces(name)}{rows[pieces]['bias']:.1%}. The second turn has {later[pieces]['steps']} such steps"
    )
    assert told in page
    bound = host_bound_again(name)
    told = f"of the {bound['steps']} steps that were host-bound in three or more repeats the middle is "
    told += f"{bound['error']:.1%} off "
    assert f"{told}(bias {bound['bias']:+.1%}), where a step's own repeats scatter by {bound['spread']:.1%}" in page
    within = max(each["error"] for key, each in rows.items() if key not in (eager, pieces))
    assert max(each["error"] for key, each in later.items() if key != pieces) <= within
    ttft, gap = latencies_off(name)
    told = f"All else is within {within:.1%} by single steps, and in the second turn too. TTFT p50 is "
    told += f"within {ttft:.1%}, gaps "
    assert f"{told}within {gap:.1%}. No pair is ranked wrongly, and every one is shown" in page
    assert all(told in page for told in of_calibrations(name))
    _, mixed = eager_levels(name)
    assert "with decodes {:.1f}, {:.1f}, {:.1f}, {:.1f} and {:.1f}.".format(*mixed) in page
    single = [
        row_by(read(name), policy, "piecewise", regime)
        for policy, regime in (("auto", "middle"), ("vllm", "middle"), ("vllm", "saturated"))
    ]
    assert [each["steps"] for each in single] == [1, 1, 32]
    told = "eighteenth `auto`'s only PIECEWISE step in the middle is {:.1%} off and `vllm`'s {:.1%}, and "
    told += "`vllm`'s 32 saturated "
    assert f"{told}ones {{:.1%}}".format(*(each["error"] for each in single)) in page


def by_repeats(name: str, key: tuple[str, str]) -> str:
    """A cell's steps, singly and by the middle of five repeats of all of them."""
    row, (share_again, error) = rows_of(name)[key], ran_again(read(name), *key)
    assert share_again == 1.0
    return f"{row['steps']:,} steps, is {singly(row)} and {error:.1%} by the middle of"


def told_of_slow_cores(name: str) -> str:
    """Repeats on slow cores alone, and on quick ones."""
    slow, fast = host_bound_on("slow", name), host_bound_on("quick", name)
    eager, pieces, eager_quick, quick = slow["eager"], slow["piecewise"], fast["eager"], fast["piecewise"]
    assert (eager["repeats"], pieces["repeats"]) == (3, 3)
    told = f"**By repeats on slow cores alone**, three of each, EAGER is {eager['error']:.1%} off ({eager['steps']} "
    told += f"steps, bias {eager['bias']:+.1%}) and PIECEWISE that the host bounds just then {pieces['error']:.1%} "
    told += f"({pieces['steps']} steps, bias {pieces['bias']:+.1%}), on quick ones alone "
    return f"{told}{eager_quick['error'] * 100:.1f} and {quick['error']:.1%}"


def test_figures_of_the_small_qwens_sixteenth_in_the_text() -> None:
    """What its cells, turns, pairs, host, repeats and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    name = "rate-2-sixteenth"
    last, rows = read(name), rows_of(name)
    bound, middle = ("piecewise", "host-bound"), ("piecewise", "middle")
    assert eager_again(name) in page
    row, (_, error) = rows[middle], ran_again(last, *middle)
    told = f"PIECEWISE that the host bounds at the profile's own speed, {by_repeats(name, bound)} five repeats of all "
    told += f"of them; in the middle, {row['steps']:,} steps, {row['error']:.1%} (noise {row['noise']:.1%}) and "
    assert f"{told}{error:.1%}." in page
    within = max(each["error"] for key, each in rows.items() if key not in (("eager", "host-bound"), bound, middle))
    ttft, gap = latencies_off(name)
    apart = last["tie"]["vllm and piecewise"]
    told = f"All else is within {within:.1%} by single steps. TTFT p50 is within {ttft:.1%}, gaps within {gap:.1%}. No "
    told += "pair is ranked wrongly; by time a token and by all steps `vllm` and `piecewise` aren't ranked, as "
    assert f"{told}`piecewise`'s turns are {apart:.1%} apart" in page
    assert ranked(name).startswith("as measured")
    bound_again = host_bound_again(name)
    told = f"{told_of_slow_cores(name)}. The middle of all repeats that the host bounded just then is "
    assert (
        f"{told}{bound_again['error']:.1%} off ({bound_again['steps']:,} steps, bias {bound_again['bias']:+.1%})"
        in page
    )
    every = by_own_speed(name)
    told = f"In both turns PIECEWISE is {every[bound]['error']:.1%} off singly where the host bounds it and "
    assert f"{told}{every[middle]['error']:.1%} in the middle" in page
    before = written(name)
    old = {key_of(each): judged(each, before) for each in before["policies"]["all policies"] if each["regime"] != "all"}
    few = ("split/decodes_beside", "host-bound")
    assert {key: held for key, (held, _) in old.items() if held != "yes"} == {bound: "to the letter", few: "no"}
    [row], [lone] = (
        [each for each in before["policies"]["all policies"] if key_of(each) == key] for key in (bound, few)
    )
    again = repeated(before, *bound)
    assert again is not None
    told = f"By the rule of the runs before host-bound PIECEWISE would be to the letter, {row['steps']:,} steps by the "
    told += (
        f"noted speed, {old[bound][1]:.1%} off by repeats of which {again['host_bound_share']:.0%} were host-bound, "
    )
    assert lone["steps"] == 1
    assert f"{told}and SPLIT that the host bounds over the line: one step, {lone['error']:.1%} off" in page
    assert all(told in page for told in of_calibrations(name))
    split, saturated = ("split", "middle"), ("split", "saturated")
    lead = rows_of(name + LEAD)
    told = f"SPLIT is {lead[split]['error']:.1%} off in the middle for {rows[split]['error']:.1%} and "
    told += f"{lead[saturated]['error']:.1%} saturated for {rows[saturated]['error']:.1%} (bias "
    told += f"{lead[split]['bias'] * 100:+.1f} and {lead[saturated]['bias']:+.1%} for {rows[split]['bias'] * 100:+.1f} "
    both = [ran_again(read(each), "split/decodes_beside", "saturated") for each in (name + LEAD, name)]
    assert {share_again * rows[saturated]["steps"] for share_again, _ in both} == {16.0}
    told += f"and {rows[saturated]['bias']:+.1%}; the 16 saturated ones that ran again {both[0][1]:.1%} for "
    assert f"{told}{both[1][1]:.1%})" in page
    assert verdicts(name + LEAD) == verdicts(name)


def test_figures_of_the_small_models_eleventh_in_the_text() -> None:
    """What it is over the line in, and what waiting for a launch makes of it."""
    page = " ".join(" ".join(DOC).split())
    name = "small24-eleventh"
    rows, lead, eager = rows_of(name), rows_of(name + LEAD), ("eager", "host-bound")
    bound, middle, split = ("piecewise", "host-bound"), ("piecewise", "middle"), ("split", "middle")
    again = {key_of(each): each for each in written(name)["measured_again"]["all policies"]}
    told = f"**PIECEWISE that the host bounds, {by_repeats(name, bound)} three repeats of all of them**"
    told += ': "no". The table is too slow, by '
    told += f"{rows[bound]['bias']:.1%} in the first turn and {again[bound]['bias']:.1%} in repeats"
    assert told in page
    told = f"**SPLIT in the middle, {rows[split]['steps']} steps of halves beside each other, is "
    told += f"{rows[split]['error']:.1%} off** (noise {rows[split]['noise']:.1%}, bias {rows[split]['bias']:+.1%})"
    assert told in page
    every = by_own_speed(name)[split]["error"], by_own_speed(name + LEAD)[split]["error"]
    assert f"By single steps of both turns it is {every[0]:.1%}" in page
    ttft, gap = latencies_off(name)
    told = f"EAGER is {rows[eager]['error']:.1%} off singly and {ran_again(read(name), *eager)[1]:.1%} by repeats, "
    told += f"PIECEWISE in the middle {rows[middle]['error'] * 100:.1f} and {ran_again(read(name), *middle)[1]:.1%}, "
    told += f"FULL {rows['full', 'middle']['error']:.1%}. Medians are within {max(ttft, gap):.1%}, and no pair"
    assert told in page
    assert ranked(name).startswith("as measured")
    of_repeats = [ran_again(read(each), "split/beside", "middle")[1] for each in (name + LEAD, name)]
    told = f"SPLIT is {lead[split]['error']:.1%} off then, in all turns {every[1]:.1%}, and by repeats "
    assert f"{told}{of_repeats[0]:.1%} for {of_repeats[1]:.1%}" in page
    alone, _ = eager_levels(name)
    told = f"Calibrations lie {max(alone) / min(alone) - 1:.0%} apart in what an EAGER prompt takes the host: "
    assert f"{told}{alone[0]:.1f}, {alone[1]:.1f}, {alone[2]:.1f} and {alone[3]:.1f} ms" in page
    speeds = host_speeds(name)
    told = (
        f"{read(name)['host_work_us']:.1f} us of fixed work in the profile, {min(speeds):.1f} to {max(speeds):.1f} in"
    )
    assert told in page


def test_figures_of_the_small_models_twelfth_in_the_text() -> None:
    """What its cells, turns, pairs, host, repeats and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    name = "small24-twelfth"
    rows, bound, middle = rows_of(name), ("piecewise", "host-bound"), ("piecewise", "middle")
    assert eager_again(name) in page
    row, (_, error) = rows[middle], ran_again(read(name), *middle)
    told = f"PIECEWISE that the host bounds at the profile's own speed, {by_repeats(name, bound)} five repeats of all "
    told += f"of them; in the middle, {row['steps']} steps, {row['error']:.1%} (noise {row['noise']:.1%}) and "
    assert f"{told}{error:.1%}." in page
    few, every = rows["split", "middle"], by_own_speed(name)["split", "middle"]
    assert (few["steps"], every["steps"]) == (3, 7)
    told = f"FULL is {rows['full', 'middle']['error']:.1%} off. `auto` ran three steps in halves, {few['error']:.1%} "
    told += f"off, which is too few to judge; of both turns they are seven, {every['error']:.1%} off (bias "
    unled = [by_own_speed(name + UNLED, turns)["split", "middle"]["error"] for turns in ("first_turns", "all_turns")]
    told += f"{every['bias']:+.1%}). Without the wait they were {unled[0] * 100:.1f} and {unled[1]:.1%} off"
    assert told in page
    apart = read(name)["served"]["policies"]["piecewise"]["ttft_p50_ms"]["apart"]
    told = f"Medians are within {max(latencies_off(name)):.1%}. No pair is ranked wrongly; TTFT p50 of `auto` and "
    assert f"{told}`piecewise` isn't ranked, as `piecewise`'s turns are {apart:.1%} apart" in page
    assert told_of_slow_cores(name) in page
    assert all(told in page for told in of_calibrations(name))


def test_figures_of_the_small_models_tenth_in_the_text() -> None:
    """What it is over the line in, what its second turn has, and its medians."""
    page = " ".join(" ".join(DOC).split())
    name, eager, pieces = "small24-tenth", ("eager", "host-bound"), ("piecewise", "host-bound")
    rows, later = rows_of(name), later_of(name)
    row = rows[pieces]
    told = f"Host-bound PIECEWISE, {row['steps']:,} steps, is {row['error']:.1%} off singly (noise "
    told += f"{row['noise']:.1%}, bias "
    told += f"{row['bias']:+.1%}), and {row['at_speed_error']:.1%} of the {row['at_speed_steps']:,} beside "
    told += "which the host was as "
    assert told in page
    row = rows[eager]
    told = (
        f'EAGER {row["error"]:.1%} (noise {row["noise"]:.1%}, bias {row["bias"]:+.1%}): "no". The second turn\'s are '
    )
    told += f"{later[pieces]['error']:.1%} and {later[eager]['error']:.1%} off (bias "
    told += f"{later[pieces]['bias'] * 100:+.1f} and "
    assert f"{told}{later[eager]['bias']:+.1%})" in page
    bases = [each.costs.host_piecewise for each in calibrated(name)]
    levels = [host.base_for(decodes=True, prefills=False) for host in bases]
    assert f"its three calibrations agree within {max(levels) / min(levels) - 1:.0%}" in page
    ninth = rows_of("small24-ninth")[pieces]
    assert f"The ninth's table was right on the same steps ({ninth['bias']:+.1%})" in page
    row = rows["split", "middle"]
    assert row["steps"] == row_by(read(name), "auto", "split/beside", "middle")["steps"] == 2
    told = f"SPLIT in the middle are two steps of `auto`'s, {row['error']:.1%} off. PIECEWISE in the middle, "
    told += (
        f"{rows['piecewise', 'middle']['error']:.1%}, isn't shown. FULL is {rows['full', 'middle']['error']:.1%} off"
    )
    assert told in page
    first, second, third = (
        dict(zip(each.costs.full.sizes, each.costs.full.us, strict=True)) for each in calibrated(name)
    )
    assert [size for size in second if first[size] / second[size] < 0.97] == [2, 6]
    quicker = [1 - third[size] / second[size] for size in second]
    told = f"third calibration's are {min(quicker) * 100:.0f} to {max(quicker):.0%} quicker than the second's at every "
    assert f"{told}size, and the first's at 2 and 6 rows alone" in page
    assert f"Medians are within {max(latencies_off(name)):.1%}" in page
    apart = read(name)["served"]["policies"]["piecewise"]["ttft_p50_ms"]["apart"]
    assert f"as `piecewise`'s turns are {apart:.1%} apart" in page


def test_figures_of_the_seventeenth_in_the_text() -> None:
    """What its cells, turns, pairs and calibrations are said to be."""
    page = " ".join(" ".join(DOC).split())
    name = "dsv2lite-seventeenth"
    last, rows, later = read(name), rows_of(name), later_of(name)
    eager, pieces, slow = ("eager", "host-bound"), ("piecewise", "host-bound"), ("piecewise", "middle")
    row, second = rows[eager], later[eager]
    share_again, error = ran_again(last, *eager)
    assert share_again == 1.0
    told = f"Host-bound EAGER is {singly(row)} and {error:.1%} by the middle of five repeats of all its "
    told += f"{row['steps']} steps; the second turn's {second['steps']} are {second['error']:.1%} off singly (noise "
    assert f"{told}{second['noise']:.1%}, bias {second['bias']:+.1%})" in page
    row, again = rows[pieces], repeated(last, *pieces)
    assert again is not None
    told = f"Host-bound PIECEWISE, {row['steps']} steps, is {singly(row)} and {ran_again(last, *pieces)[1]:.1%} "
    assert f"{told}repeated, of which {again['host_bound_share']:.0%} were host-bound: to the letter." in page
    within = max(each["error"] for key, each in rows.items() if key not in (eager, pieces))
    ttft, gap = latencies_off(name)
    told = f"All else is within {within:.1%} by single steps. TTFT p50 is within {ttft:.1%}, gaps within "
    told += f"{gap:.1%}. Policies "
    told += (
        "rank as measured by every figure; gap p50 of `piecewise` and `vllm` isn't ranked, as `piecewise`'s turns are "
    )
    tie = last["served"]["tie"]["gap_p50_ms"]["piecewise and vllm"]
    assert f"{told}{tie:.1%} apart" in page
    assert ranked_as_measured(last)
    row, bound = later[slow], later[pieces]
    told = f"Its {row['steps']:,} steps in the middle are {row['error']:.1%} off (noise {row['noise']:.1%}, bias "
    told += f"{row['bias']:+.1%}), its {bound['steps']} that the host bounds {bound['error']:.1%} (noise "
    told += f"{bound['noise']:.1%})"
    assert told in page
    first, second = (turn["gap_p50_ms"] for turn in last["served"]["policies"]["piecewise"]["turns"])
    told = f"{second['measured']:.2f} ms there and {first['measured']:.2f} in the first turn, simulated "
    assert f"{told}{second['simulated']:.2f} and {first['simulated']:.2f}" in page
    [one] = [key for key, each in later.items() if key[0] == "eager" and key[1] == "middle" and each["steps"] == 1]
    others = [each["error"] for key, each in later.items() if key[0] not in ("piecewise", "all") and key != one]
    told = f"All other modes' steps are within {max(others):.1%} there, but for one EAGER step in the middle, "
    assert f"{told}{later[one]['error']:.1%}" in page
    alone, mixed = eager_levels(name)
    told = f"Calibrations lie {max(alone) / min(alone) - 1:.0%} apart in what an EAGER prompt takes the host: "
    told += "{:.1f}, {:.1f}, {:.1f} and {:.1f} ms at the profile's host speed, ".format(*alone)
    assert told + "with decodes {:.1f}, {:.1f}, {:.1f} and {:.1f}.".format(*mixed) in page
    speeds = host_speeds(name)
    told = f"{last['host_work_us']:.1f} us of fixed work in the profile, {min(speeds):.1f} to {max(speeds):.1f} "
    told += "in the mean"
    assert told in page
    single = [row_by(last, policy, *slow) for policy in ("auto", "vllm")]
    assert [each["steps"] for each in single] == [1, 1]
    told = "in the seventeenth `auto`'s only PIECEWISE step in the middle is {:.1%} off and `vllm`'s {:.1%}"
    assert told.format(*(each["error"] for each in single)) in page
    assert f"the first run by it, saturated FULL is {rows['full', 'saturated']['error']:.1%} off" in page


def row_by(result: dict[str, Any], policy: str, *key: str) -> dict[str, Any]:
    """One policy's cell."""
    [found] = [each for each in result["policies"][policy] if key_of(each) == key]
    return dict(found)


def mean_alone(result: dict[str, Any]) -> str:
    """What is said of `vllm`'s TTFT p50 where its turns are off either way."""
    late = result["served"]["policies"]["vllm"]
    first, second = (each["ttft_p50_ms"]["error"] for each in late["turns"])
    told = f"`vllm`'s TTFT p50, {abs(late['ttft_p50_ms']['error']):.1%} off, is so in the mean alone: its turns are "
    return f"{told}{late['ttft_p50_ms']['apart']:.1%} apart, and simulated {first:.1%} late and {-second:.1%} early"


def test_figures_of_the_run_on_an_h100_in_the_text() -> None:
    """What its cells, medians, turns and host are said to be; in short too."""
    page, short = (" ".join(" ".join(each).split()) for each in (DOC, SHORT))
    name = "h100-dsv2lite"
    last, rows = read(name), rows_of(name)
    assert last["device"].startswith("NVIDIA H100")
    assert not last["measured_again"]
    row, pieces, few = (
        rows[key] for key in (("eager", "host-bound"), ("piecewise", "host-bound"), ("eager", "middle"))
    )
    assert [key for key, each in rows.items() if judged(each, last)[0] != "yes"] == [
        ("eager", "host-bound"), ("eager", "middle"), ("piecewise", "host-bound"),
    ]  # fmt: skip
    told = f"Host-bound EAGER is {row['error']:.1%} off singly (noise {row['noise']:.1%}) and host-bound PIECEWISE "
    assert f"{told}{pieces['error']:.1%} (noise {pieces['noise']:.1%})" in page
    assert f"too slow (bias {row['bias'] * 100:+.1f} and {pieces['bias']:+.1%})" in page
    later = {key_of(each): each for each in last["later_turns"]}["eager", "middle"]
    told = f'EAGER in the middle, {few["steps"]} steps, is {few["error"]:.1%} off: "no". The second turn\'s '
    assert f"{told}{later['steps']} are {later['error']:.1%} off" in page
    within = max(error for held, error in (judged(each, last) for each in rows.values()) if held == "yes")
    assert f"All else is within {within:.1%} by single steps. - TTFT p50 of `vllm`" in page
    policies = last["served"]["policies"]
    late = policies["vllm"]["ttft_p50_ms"]
    busy = policies["vllm"]["busy_ms"]["measured"] / policies["vllm"]["span_ms"]["measured"]
    told = (
        f"is **{late['error']:.1%}** off, over the 10%: its server was busy for {busy:.0%} of the time and its own two"
    )
    assert f"{told} turns are {late['apart']:.0%} apart" in page
    assert f"and {late['error']:.1%} late on the H100 for {busy:.0%}" in short
    others = [
        abs(policies[each][key]["error"]) for each in ("auto", "piecewise") for key in ("ttft_p50_ms", "gap_p50_ms")
    ]
    told = f"{max(others):.1%}"
    assert f"`auto`'s and `piecewise`'s medians are within {told}, gaps within {latencies_off(name)[1]:.1%}" in page
    assert f"`vllm`'s TTFT p50, by {late['error']:.1%}; the other policies' medians are within {told}" in short
    assert f"EAGER and PIECEWISE {row['error'] * 100:.1f} and {pieces['error']:.1%} off singly" in short
    assert not any((last["ranked_wrong"], *last["served"]["ranked_wrong"].values()))
    assert last["served"]["not_shown"]["gap_p50_ms"] == [["piecewise", "vllm"]]
    assert f"as `vllm`'s turns are {last['served']['tie']['gap_p50_ms']['piecewise and vllm']:.1%} apart" in page
    speeds = [turn["host_work_us"] for each in policies.values() for turn in each["turns"]]
    told = (
        f"took {min(speeds):.1f} to {max(speeds):.1f} us in the mean of a policy's turn, {last['host_work_us']:.1f} in"
    )
    assert told in page
    told = f"{min(speeds):.0f} to {max(speeds):.0f} us of fixed work in the mean of a turn for the profile's"
    assert f"{told} {last['host_work_us']:.0f}" in short
    alone, _ = eager_levels(name)
    told = f"Calibrations lie {max(alone) / min(alone) - 1:.0%} apart in what an EAGER prompt takes the host: "
    assert told + "{:.1f}, {:.1f} and {:.1f} ms".format(*alone) in page


def ranked_as_measured(result: dict[str, Any]) -> bool:
    """By every figure, with no tie at all."""
    policies = result["served"]["policies"]
    figures = [result["us_per_token"]]
    figures += [{policy: each[name] for policy, each in policies.items()} for name in result["served"]["tie"]]
    orders = [[sorted(each, key=lambda x: each[x][side]) for side in SIDES] for each in figures]
    return all(measured == simulated for measured, simulated in orders)


def latencies_off(*names: str) -> tuple[float, float]:
    """By how much the medians of TTFT and gaps are off at most."""
    policies = [found for name in names for found in read(name)["served"]["policies"].values()]
    ttft, gap = (max(abs(each[key]["error"]) for each in policies) for key in ("ttft_p50_ms", "gap_p50_ms"))
    return ttft, gap


def wrongly_ranked(result: dict[str, Any]) -> list[float]:
    """By how much the pairs that are ranked wrongly are apart, measured."""
    served = result["served"]
    found = [(served["policies"], name, pair) for name, pairs in served["ranked_wrong"].items() for pair in pairs]
    measured = [[policies[policy][name]["measured"] for policy in pair] for policies, name, pair in found]
    measured += [[result["us_per_token"][policy]["measured"] for policy in pair] for pair in result["ranked_wrong"]]
    return [max(pair) / min(pair) - 1 for pair in measured]


def test_no_result_is_of_a_table_that_was_made_otherwise() -> None:
    """How a table came to be is said as its version has it."""
    for path in RESULT.parent.glob("fidelity-*.json"):
        table = json.loads(path.read_text(encoding="utf-8")).get("table")
        if table is not None and table["version"].startswith("the middle of each figure"):
            assert table["made"].startswith(f"{table['version'].partition(':')[0]} calibrations")
