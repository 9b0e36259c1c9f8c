"""What delaying prompts is worth: the page and the setting say what the result does, and that is what runs now."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_token_limit as made
from kpolicy import settings

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "traces"
PAGE = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
PART = PAGE.partition("\n## Decode steps beside prompts\n")[2].partition("\n## ")[0]
TEXT = " ".join(PART.split())
FOUND = json.loads(made.RESULT.read_text(encoding="utf-8"))
LLAMA, QWEN, *OTHERS = made.PROFILES
NO, QUARTER = map(str, made.LIMITS)


def rows(profile: str, *, recorded: bool | None = None) -> list[dict[str, Any]]:
    return [
        row for row in FOUND["rows"]
        if row["profile"] == profile and recorded in (None, row["trace"] != made.GENERATED)
    ]  # fmt: skip


def row_of(profile: str, trace: str, load: float) -> dict[str, Any]:
    (found,) = (row for row in rows(profile) if (row["trace"], row["load"]) == (trace, load))
    return found


def ratio(row: dict[str, Any], limit: str, figure: str) -> float:
    return made.ratio(figure, row["auto"][limit], row["vllm"])


def over(row: dict[str, Any], figure: str) -> float:
    """1.25 over 1, above 1 where it is better."""
    return made.ratio(figure, row["auto"][QUARTER], row["auto"][NO])


def test_the_table_is_the_result_s() -> None:
    """Of the first two profiles, every cell; and how many requests each had."""
    assert f"\n\n{made.table(FOUND['rows'], made.PROFILES[:2])}\n\n" in PART
    counts = {row["requests"] for row in FOUND["rows"] if row["trace"] != made.GENERATED}
    assert f"Recorded are {min(counts)} to {max(counts)} requests from the middle of each of the four traces" in TEXT
    assert {row["requests"] for row in FOUND["rows"] if row["trace"] == made.GENERATED} == {made.MANY}
    assert f"generated are {made.MANY:,}" in TEXT


def test_the_result_is_whole_and_says_how_it_was_made() -> None:
    """Every profile, trace and load; the day, the commit and the versions; ratios are those of its figures."""
    cells = [(row["profile"], row["trace"], row["load"]) for row in FOUND["rows"]]
    traces = (*made.FILES, made.GENERATED)
    assert cells == [(each, trace, load) for each in made.PROFILES for trace in traces for load in made.LOADS]
    assert re.fullmatch(r"[0-9a-f]{7}\+?", FOUND["commit"])
    assert FOUND["date"] in FOUND["command"]
    assert {"kpolicy", "python"} <= FOUND.keys()
    for row in FOUND["rows"]:
        for limit, ours in row["auto"].items():
            assert ours["ratios"] == {name: round(ratio(row, limit, name), 3) for name in made.FIGURES}


def test_what_prompts_lose() -> None:
    """The latest median, and what it is for, as the page and the setting have it."""
    recorded = rows(LLAMA, recorded=True)
    late = 1 / min(ratio(row, QUARTER, "ttft_p50_us") for row in recorded)
    gained = [over(row, "tokens_per_s") - 1 for row in recorded]
    told = f"up to {late:.1f} times as late as by"
    more = f"{-min(gained):.1%} less to {max(gained):.1%} more tokens a second"
    comment = " ".join((ROOT / "kpolicy" / "settings.py").read_text(encoding="utf-8").split())
    for text in (TEXT, comment):
        assert told in text
        assert f"for {more}" in text
    most = over(row_of(LLAMA, made.GENERATED, 1.3), "tokens_per_s") - 1
    assert f"1.25 is better, by {most:.1%} of throughput in one such load" in comment
    assert made.LIMITS[1] == settings.GAP_FIRST_TOKEN_LIMIT == 1.25
    for row in rows(QWEN):
        sooner = (row["trace"], row["load"]) == (made.GENERATED, 1.3)
        assert (over(row, "ttft_p50_us") > 1) is (over(row, "ttft_p99_us") > 1) is sooner
        assert ratio(row, QUARTER, "ttft_p50_us") > 1


def test_what_is_below_with_1() -> None:
    """Nothing on the page, and two figures of the other profiles, which are below 0.99 with 1.25 too."""
    below = {
        (row["profile"], row["trace"], row["load"], figure): round(ratio(row, NO, figure), 3)
        for row in FOUND["rows"] for figure in made.FIGURES if ratio(row, NO, figure) < 0.99
    }  # fmt: skip
    first, gap = (OTHERS[1], "Mooncake", 0.7, "ttft_p99_us"), (OTHERS[0], made.GENERATED, 1.3, "gap_p99_us")
    assert below.keys() == {first, gap}
    assert f"first tokens' p99 of DeepSeek-V2-Lite's Mooncake at 0.7 ({below[first]})" in TEXT
    assert f"gaps' p99 of Llama-3.2-1B's generated requests at 1.3 ({below[gap]})" in TEXT
    assert all(ratio(row_of(*cell), QUARTER, figure) < 0.99 for *cell, figure in (first, gap))


def test_where_more_is_asked_for_long_than_can_be_served() -> None:
    """The loads in which a limit of 1.25 is better in throughput and in first tokens."""
    generated, mooncake = (row_of(LLAMA, trace, 1.3) for trace in (made.GENERATED, "Mooncake"))
    more, sooner = (over(generated, figure) for figure in ("tokens_per_s", "ttft_p50_us"))
    assert f"it has {more - 1:.1%} more tokens a second, and median first tokens {sooner:.1f} times as soon" in TEXT
    more, sooner = (over(mooncake, figure) for figure in ("tokens_per_s", "ttft_p50_us"))
    assert f"of its Mooncake at 1.3, {more - 1:.1%} and {sooner:.1f} times" in TEXT


def test_how_much_shorter_gaps_are() -> None:
    """The most of both profiles."""
    most = max((*rows(LLAMA), *rows(QWEN)), key=lambda row: over(row, "gap_p99_us"))
    assert (most["profile"], most["trace"], most["load"]) == (QWEN, "Mooncake", 0.7)
    assert f"up to {over(most, 'gap_p99_us'):.1f} times as short as with 1 (Qwen2.5-0.5B's Mooncake at 0.7)" in TEXT


def test_generated_requests_are_what_is_simulated_now(tmp_path: Path) -> None:
    """A cell that needs no trace."""
    assert made.cell(LLAMA, made.GENERATED, tmp_path, 1.3) == row_of(LLAMA, made.GENERATED, 1.3)


@pytest.mark.skipif(not TRACES.exists(), reason="the traces lie beside the repository and aren't here")
@pytest.mark.parametrize(("profile", "trace", "load"), [(LLAMA, "conversation", 0.7), (QWEN, "BurstGPT", 1.3)])
def test_the_result_on_record_is_what_is_simulated_now(profile: str, trace: str, load: float) -> None:
    """Two cells again: the same figures and steps."""
    assert made.cell(profile, trace, TRACES, load) == row_of(profile, trace, load)
