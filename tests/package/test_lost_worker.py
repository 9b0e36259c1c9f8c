"""A test process that is lost ends the run, which says which test it was at and how it ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("ends", "told"), [("os.kill(os.getpid(), 9)", "SIGKILL"), ("os._exit(7)", "code 7")], ids=["killed", "exited"]
)
def test_a_lost_process_says_how_it_ended(ends: str, told: str, tmp_path: Path) -> None:
    """With the options of `make test`: started anew, the process would get one test and wait for ever."""
    pytest.importorskip("xdist")
    command = re.search(r"pytest (-n auto .*) \$\(ARGS\)\n", (ROOT / "Makefile").read_text())
    assert command is not None
    tests = tmp_path / "test_it.py"
    tests.write_text(
        f"import os\nimport pytest\n\ndef test_ends():\n    {ends}\n\n"
        "@pytest.mark.parametrize('i', range(20))\ndef test_other(i):\n    pass\n"
    )
    options = *command[1].split(), "-n", "2", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tests],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert re.search(rf"^\[gw\d\] ended with {told}$", ended.stdout, re.MULTILINE), ended.stdout
    assert re.search(r"crashed while running '[^']*test_it\.py::test_ends'", ended.stdout.replace("\n", "")), (
        ended.stdout
    )
