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


@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)])
def test_commands_print_what_is_shown(page: str, tmp_path: Path) -> None:
    """A page's commands, one after the other in a folder with the traces that they name, 120 columns wide."""
    environment = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR")}
    for command, output in shown(page):
        for name in re.findall(r"\S+\.csv(?:\.gz)?\b", command):
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(real_file(name))
        ran = subprocess.run(
            [sys.executable, "-m", "kpolicy", *shlex.split(command)],
            cwd=tmp_path, env={**environment, "COLUMNS": "120"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (ran.returncode, ran.stderr) == (0, ""), command
        left = ran.stdout
        for part in filter(None, re.split(r"^\.\.\.\n", output, flags=re.MULTILINE)):
            assert part in left, (command, part)
            left = left.partition(part)[2]


def test_some_pages_show_what_commands_print() -> None:
    """The pattern above finds them."""
    assert [
        page
        for page in ("README.md", "docs/cli.md", "docs/planning.md", "docs/report.md", "docs/simulate.md")
        if not shown(page)
    ] == []
