"""The committed speeds of the simulator and the planner are within their limits, and the pages have them.

Nothing is timed here: `benchmarks.simulate`, `benchmarks.planning` and `benchmarks.whole_trace` wrote the results.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning, simulate, whole_trace
from kpolicy.policies import OWN

DOCS = Path(__file__).parents[2] / "docs"
REQUESTS = 19_366
"""Of Azure's conversation trace, the whole of it"""
TRACE_S, TEN_MILLION_S, PLAN_S = 20.0, 60.0, 1.0
FLAT = 1.25
"""Times that a step may take, or a run keep, of what a tenth of the requests take"""


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def words(page: str) -> str:
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


SPEED, PLANNING = read(simulate.RESULT), read(planning.RESULT)


@pytest.mark.parametrize("policy", sorted(OWN))
def test_the_whole_trace_takes_less_than_20_s(policy: str) -> None:
    """Each policy simulates every request of it, on one core."""
    (row,) = [row for row in SPEED["whole_trace"] if row["policy"] == policy]
    assert SPEED["trace"] == "azure_llm_2023_conv.csv"
    assert row["requests"] == REQUESTS
    assert row["steps"] > 250_000
    assert 0 < row["seconds"] < TRACE_S
    assert row["seconds"] / row["steps"] * 1e6 == pytest.approx(row["us_per_step"], abs=0.03)


@pytest.mark.parametrize("run", read(whole_trace.RESULT)["runs"], ids=lambda run: " ".join(run["policies"]))
def test_a_run_of_the_whole_trace_takes_less_than_20_s_a_policy(run: dict[str, Any]) -> None:
    """The command from its start, on the simulated executor with tokens compared."""
    assert set(run["requests"]) == {REQUESTS}
    assert set(run["wrong"]) == {0}
    assert 0 < run["seconds"] < TRACE_S * len(run["policies"])


@pytest.mark.parametrize("policy", ["auto", "vllm"])
def test_ten_million_decisions_take_less_than_a_minute(policy: str) -> None:
    """Each step of a simulation is decided, by the compiled table."""
    (row,) = [row for row in SPEED["ten_million_decisions"] if row["policy"] == policy]
    assert row["decisions"] >= simulate.DECISIONS == 10_000_000
    assert 0 < row["seconds"] < TEN_MILLION_S
    assert row["seconds"] / row["decisions"] * 1e6 == pytest.approx(row["us_per_step"], abs=0.03)


def test_a_step_costs_no_more_in_a_longer_trace() -> None:
    """From 1,000 requests to a million, each ten times as many as before: in none over a quarter more than before."""
    rows = SPEED["by_length"]
    assert [row["requests"] for row in rows] == [1_000, 10_000, 100_000, 1_000_000] == list(simulate.LENGTHS)
    us = [row["us_per_step"] for row in rows]
    assert all(longer <= FLAT * shorter for shorter, longer in pairwise(us))
    assert us[-1] == min(us)
    assert SPEED["us_per_step_longest_over_shortest"] == pytest.approx(us[-1] / us[0], abs=0.01)


def test_memory_does_not_grow_with_a_longer_trace() -> None:
    """Exact percentiles are kept up to a count, which takes up to 25 MiB; ten times as many requests take no more."""
    rows = {row["requests"]: row for row in SPEED["by_length"]}
    mib = {requests: row["mib_over_the_trace"] for requests, row in rows.items()}
    assert mib[1_000_000] <= FLAT * mib[100_000]
    assert max(mib.values()) < 32
    assert mib[1_000] < mib[10_000] < mib[100_000]
    assert rows[10_000]["relative_error"] == 0
    assert max(row["relative_error"] for row in rows.values()) <= 0.002


def test_plans_take_less_than_a_second() -> None:
    """2,048 sizes and every number of them up to 64, and more of them; and under each budget."""
    seconds = {(case["sizes"], case["most"]): case["seconds"] for case in PLANNING["cases"]}
    assert tuple(seconds) == planning.CASES
    assert 0 < seconds[2048, 64] < PLAN_S
    assert max(seconds.values()) < PLAN_S
    assert {*PLANNING["budgets"]} == {*planning.BUDGETS}
    assert max(each["seconds"] for each in PLANNING["budgets"].values()) < PLAN_S


def test_plans_name_their_commit() -> None:
    """Whose code it was."""
    assert re.fullmatch(r"[0-9a-f]{7}", PLANNING["commit"])


def test_a_plan_costs_less_than_the_layers_of_all_ranges() -> None:
    """The more sizes, the more so: about n log n against n squared a layer."""
    ratio = {(case["sizes"], case["most"]): case["ratio"] for case in PLANNING["cases"]}
    assert 1 < ratio[256, 32] < ratio[1024, 64] < ratio[2048, 64] < ratio[2048, 256]
    for case in PLANNING["cases"]:
        assert case["layered_seconds"] / case["seconds"] == pytest.approx(case["ratio"], rel=0.02)


def test_the_page_of_planning_has_its_speed() -> None:
    """docs/planning.md: 2,048 sizes and up to 64 of them, and the budgets."""
    (case,) = [case for case in PLANNING["cases"] if (case["sizes"], case["most"]) == (2048, 64)]
    budgets = [each["seconds"] for each in PLANNING["budgets"].values()]
    page = words("planning.md")
    assert f"up to 64 take {case['seconds']:.2f} s, {case['ratio']:.0f} times less than the layered" in page
    assert f"under seconds, bytes and device graphs takes {min(budgets):.1f} to {max(budgets):.1f} s" in page


def test_the_page_of_simulations_has_its_speed() -> None:
    """docs/simulate.md: each figure of its two tables, with the date and the commit."""
    page, whole = words("simulate.md"), SPEED["whole_trace"]
    made = f"kpolicy {SPEED['kpolicy']}, Python {SPEED['python'].rpartition('.')[0]}, {SPEED['date']}"
    assert f"{made}, at {SPEED['commit']}, two cores" in page
    assert SPEED["cores"] == 2
    steps, seconds = ([row[name] for row in whole] for name in ("steps", "seconds"))
    assert (
        f"{REQUESTS:,} requests, {round(min(steps), -3):,} to {round(max(steps), -3):,} steps by policy | "
        f"{min(seconds):.1f} to {max(seconds):.1f} s |"
    ) in page
    auto, vllm = (row["seconds"] for row in SPEED["ten_million_decisions"])
    assert f"ten million decisions, `vllm` and `auto` | {vllm:.0f} and {auto:.0f} s |" in page
    for server, told in (("3 drafts a row", "with three drafts a row"), ("2 ranks", "on two ranks")):
        seconds = sorted(row["seconds"] for row in SPEED["through_the_scheduler"] if row["server"] == server)
        assert f"the whole trace {told} | {seconds[0]:.1f} to {seconds[-1]:.1f} s |" in page
    first, *others = (f"{row['us_per_step']:.1f}" for row in SPEED["by_length"])
    assert f"| a step, us | {first} (its start is a large part) | {' | '.join(others)} |" in page
    short, _, long, longest = (row["mib_over_the_trace"] for row in SPEED["by_length"])
    assert f"| the run, MiB | {short:.1f} | | {long:.0f} | {longest:.0f} |" in page
