"""What ``python -m benchmarks.NAME --help`` prints: every option is explained, and commands can be copied."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMANDS = sorted(path.stem for path in FOLDER.glob("*.py") if "ArgumentParser(description=__doc__" in path.read_text())


def calls(name: str, function: str) -> list[set[str | None]]:
    """The keywords of each call of a benchmark to that function or method."""
    nodes = ast.walk(ast.parse((FOLDER / f"{name}.py").read_text()))
    return [
        {keyword.arg for keyword in node.keywords}
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == function
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    """And the page's lines stay as they were written: a command that is broken over two can't be copied."""
    assert all("help" in keywords for keywords in calls(name, "add_argument"))
    assert all("formatter_class" in keywords for keywords in calls(name, "ArgumentParser"))
    assert f"python -m benchmarks.{name}" in (FOLDER / f"{name}.py").read_text()


def test_a_name_that_no_trace_has(tmp_path: Path) -> None:
    """It is said with those that there are; before, nothing was done."""
    command = [sys.executable, "-m", "benchmarks.plan_worth", "--traces", str(tmp_path), "--only", "zzz"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    assert ended.returncode == 2
    assert "--only zzz is in no name of conversation" in ended.stderr
