"""What the pages show under a command is what the command prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduling import real_file

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
SHOWN = re.compile(r"^```console\n\$ kpolicy ([^\n]*)\n```\n\n```\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""One command and, right under it, what it prints; a line `...` stands for lines that are left out."""


def shown(page: str) -> list[tuple[str, str]]:
    return SHOWN.findall((ROOT / page).read_text(encoding="utf-8"))


CASES = [pytest.param(*pair, id=f"{page} {number}") for page in PAGES for number, pair in enumerate(shown(page), 1)]


@pytest.mark.parametrize(("command", "output"), CASES)
def test_a_command_prints_what_is_shown(command: str, output: str, tmp_path: Path) -> None:
    """In a folder with the traces that it names, 120 columns wide."""
    for name in re.findall(r"\S+\.csv(?:\.gz)?\b", command):
        (tmp_path / name).symlink_to(real_file(name))
    environment = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR")}
    ran = subprocess.run(
        [sys.executable, "-m", "kpolicy", *shlex.split(command)],
        cwd=tmp_path, env={**environment, "COLUMNS": "120"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    left = ran.stdout
    for part in filter(None, re.split(r"^\.\.\.\n", output, flags=re.MULTILINE)):
        assert part in left
        left = left.partition(part)[2]


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{name}.md" for name in ("cli", "planning", "report", "simulate"))]
)
def test_a_page_shows_what_commands_print(page: str) -> None:
    """The pattern above finds it."""
    assert shown(page)
