"""docs/observe.md: its Python runs, from the first block to the last, and prints what is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kpolicy.observe.metrics import serve_metrics
from kpolicy.schemas import LogHeader, StepLogWriter

PAGE = (Path(__file__).parents[2] / "docs" / "observe.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a step log; the server takes a port that is free here."""
    pytest.importorskip("prometheus_client")
    pytest.importorskip("perfetto")
    monkeypatch.chdir(tmp_path)
    with StepLogWriter("steps.jsonl", LogHeader(policy="auto")):
        pass
    monkeypatch.setattr("kpolicy.observe.metrics.serve_metrics", lambda engine, _: serve_metrics(engine, 0))
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/observe.md", "exec"), names)  # noqa: S102 - our own page
    names["stop"]()
    assert (tmp_path / "run.pftrace").is_file()
    assert (tmp_path / "live.pftrace").stat().st_size > 100
    (shown,) = re.findall(r"```python\n(?:(?!```).)*?```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out == shown
