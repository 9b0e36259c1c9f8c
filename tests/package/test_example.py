"""The example of a vendor's package, installed as one: kpolicy finds it, and it keeps the contract of all executors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("setuptools")

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "examples" / "kpolicy_vendor"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed in it, by pip, from a copy."""
    folder = tmp_path_factory.mktemp("vendor")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "--target", str(folder / "site"), str(folder / "source"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def run(site: Path, *arguments: str) -> str:
    """What a fresh interpreter prints that finds the package beside ours and not its sources."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    environ["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environ, cwd=site
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_it_keeps_the_contract(site: Path) -> None:
    """Its own test of the contract suite passes against the installed package."""
    shutil.copy(SOURCE / "test_contract.py", site)
    options = "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.conftest"
    found = run(site, "-m", "pytest", *options, "test_contract.py")
    assert "passed" in found


def test_the_doctor_lists_it(site: Path) -> None:
    """It is loaded by its entry point, and said to be of its package."""
    code = (
        "from kpolicy.probes import probe_all\n"
        "print([(each.status.value, each.reason) for each in probe_all() if each.name == 'executor vendor'])"
    )
    assert run(site, "-c", code).strip() == "[('usable', 'from kpolicy-vendor; loads; not called here')]"


def test_it_is_what_the_docs_show() -> None:
    """docs/plugin.md names the files and the calls that the example has."""
    text = (ROOT / "docs" / "plugin.md").read_text(encoding="utf-8")
    code = (SOURCE / "kpolicy_vendor" / "__init__.py").read_text(encoding="utf-8")
    for name in ("StreamAdapter", "StreamExecutor", "begin=begin", "classify=meaning", "report=prove(", "known"):
        assert name in text, name
        assert name in code, name
    assert "examples/kpolicy_vendor" in text
