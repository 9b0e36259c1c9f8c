"""docs/report.md: its Python runs, and the parts that it tells of are the page's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kpolicy.report import page
from kpolicy.report.advice import NEAR
from kpolicy.report.steps import MOST_BINS, STRETCH
from tests.report.helpers import Page, small_report

if TYPE_CHECKING:
    import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, beside a trace.csv."""
    rows = "".join(f"{100 * i},{8 + 73 * i % 293},{1 + 5 * i % 12}\n" for i in range(40))
    (tmp_path / "trace.csv").write_text("timestamp,input_length,output_length\n" + rows)
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(example, "docs/report.md", "exec"), {})  # noqa: S102 - our own document
    assert capsys.readouterr().out.startswith("Run ")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_parts_are_the_pages() -> None:
    """The table has a row for each, in the page's order; figures in the text are the code's."""
    told = re.findall(r"^\| ([A-Z][^|]*) \|", TEXT, re.MULTILINE)
    assert told == Page(page(small_report())).texts["h3"]
    for said in (f"{NEAR:.1%}", f"{MOST_BINS:,} bins", f"{STRETCH:,}"):
        assert said in TEXT
