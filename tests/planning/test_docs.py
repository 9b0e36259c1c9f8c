"""docs/planning.md: its Python runs; the benchmark's result stands in docs/benchmarks.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_worth import RESULT, WORKLOADS, h200_costs, rising_costs, shipped_costs, table, worth
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.profiles import profile_names
from kpolicy.scheduling.traces import read_trace
from tests.scheduling import real_file

DOC = Path(__file__).parents[2] / "docs" / "planning.md"
BENCHMARKS = DOC.with_name("benchmarks.md")
BLOCKS = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
ROWS = ["timestamp,input_length,output_length", *(f"{40 * i},{8 + 73 * i % 293},{2 + 31 * i % 40}" for i in range(40))]


@pytest.mark.parametrize("block", BLOCKS, ids=["a trace", "a histogram"])
def test_python_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the page shows runs as it stands, beside a trace.csv, and prints sizes."""
    (tmp_path / "trace.csv").write_text("".join(f"{row}\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(DOC), "exec"), {})  # noqa: S102  what a reader would run
    assert re.search(r"\(\d+,", capsys.readouterr().out)


def test_five_lines() -> None:
    """A plan from Python takes five lines."""
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 5


def test_worth_is_the_results() -> None:
    """The table is made of the committed result."""
    assert table(json.loads(RESULT.read_text(encoding="utf-8"))) in BENCHMARKS.read_text(encoding="utf-8")


def test_worth_names_its_commit() -> None:
    """Whose code it was."""
    assert re.fullmatch(r"[0-9a-f]{7}", json.loads(RESULT.read_text(encoding="utf-8"))["commit"])


def test_worth_in_short() -> None:
    """What both pages say of it without the table."""
    tables = json.loads(RESULT.read_text(encoding="utf-8"))["tables"]
    (kernels,) = [each for each in tables if each["costs"].startswith("aiconfigurator")]
    gains = [-row["fewer"]["against_default"] for row in kernels["workloads"]]
    assert f"list on every trace: by {min(gains) * 100:.2f} to {max(gains):.2%}." in DOC.read_text(encoding="utf-8")
    rows = [row for each in tables for row in each["workloads"]]
    whole = max(row["fewer"][name] for row in rows for name in ("against_default", "decode_steps_against_default"))
    decodes = max(row["decode"]["fewer"]["against_default"] for row in rows)
    told = f"one list at most {whole:.2%} longer, a list of decodes alone at most **{decodes:.2%}**"
    assert told in BENCHMARKS.read_text(encoding="utf-8")
    shipped = [row["fewer"] for each in tables[-len(profile_names()) :] for row in each["workloads"]]
    gains = [-each["against_default"] * 100 for each in shipped]
    decodes = [each["decode_steps_against_default"] * 100 for each in shipped]
    pages = [" ".join(page.read_text(encoding="utf-8").split()) for page in (DOC, BENCHMARKS)]
    again = [row[part]["replayed_against_default"] * 100 for row in rows for part in ("fewer", "as_many")]
    for page in pages:
        assert f"on every trace, by {min(gains):.1f} to {max(gains):.0f}%" in page
        assert f"{-min(decodes):.1f}% better to {max(decodes):.2f}% worse" in page
        assert f"{-min(again):.1f}% below to {max(again):.2f}% above the default" in page
        assert f"all {sum(row[part]['settled'] for row in rows for part in ('fewer', 'as_many'))} plans settled" in page
    worst = max(row["decode"]["as_many"]["against_default"] for row in rows)
    assert f"all {len(rows)} lists, of which the worst is {worst:.2%} worse with as many sizes" in pages[0]
    assert f"the {len(rows)} decode lists too: of these the worst is {worst:.2%} worse" in pages[1]


@pytest.mark.parametrize(("part", "most"), [("fewer", 0.02), ("as_many", 0.0025)])
def test_worth_is_within_its_limits(part: str, most: float) -> None:
    """On every trace: at most 60% of the graphs within 2% of the default list, and as many within 0.25%."""
    written = json.loads(RESULT.read_text(encoding="utf-8"))
    assert [len(each["workloads"]) for each in written["tables"]] == [6] * (4 + len(profile_names()))
    assert [each["costs"].partition(",")[0] for each in written["tables"]][4:] == [*profile_names()]
    for each in written["tables"]:
        for row in each["workloads"]:
            found, decode = row[part], row["decode"][part]
            assert found["share_of_graphs"] <= (0.6 if part == "fewer" else 1.0)
            assert found["against_default"] <= most, (each["costs"], row["trace"])
            assert found["decode_steps_against_default"] <= most, (each["costs"], row["trace"])
            assert decode["against_default"] <= most, (each["costs"], row["trace"])


SHIPPED = ("deepseek-v2-lite-h200", "qwen2.5-0.5b-h200")
"""The profile whose padding takes next to nothing, and one whose padding takes as much as rows"""


@pytest.mark.parametrize(
    "costs",
    [rising_costs(), h200_costs(), analytic_costs(), *map(shipped_costs, SHIPPED)],
    ids=["rising", "GEMM", "analytic", *SHIPPED],
)
def test_worth_is_what_the_planner_makes_of_the_trace(costs: CostTable) -> None:
    """The shortest trace again, replayed and planned: every number, list and share that the result has of it."""
    name, file, rate = WORKLOADS[-1]
    (each,) = [
        each for each in json.loads(RESULT.read_text(encoding="utf-8"))["tables"] if each["costs"] == costs.version
    ]
    (kept,) = [row for row in each["workloads"] if row["trace"] == name]
    found = json.loads(json.dumps(worth(name, read_trace(real_file(file)).scaled(rate), costs)))
    _alike(found, kept, name)


def _alike(found: dict[str, Any], kept: dict[str, Any], where: str) -> None:
    """Lists and counts are equal, and shares to a millionth of a percent."""
    assert {*found} == {*kept}, where
    for name, value in kept.items():
        if isinstance(value, dict):
            _alike(found[name], value, f"{where}.{name}")
        elif isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-8), f"{where}.{name}"
        else:
            assert found[name] == value, f"{where}.{name}"
