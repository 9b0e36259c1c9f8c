"""What `make sglang-cpu` installs: everything that is asked for has one version."""

from pathlib import Path

import pytest

from kpolicy_sglang.versions import KNOWN

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent / "cpu"


def lines(path):
    """The lines of a file of requirements, but for comments and other files."""
    found = path.read_text(encoding="utf-8").splitlines()
    return [line.lower().replace("_", "-") for line in found if line and not line.startswith(("#", "-"))]


def pins(path):
    """Versions by name."""
    return dict(line.split("==") for line in lines(path))


@pytest.mark.parametrize("version", KNOWN)
def test_each_has_one_version(version):
    """In the list that both share or in the version's own, and in one of them."""
    shared, own = pins(FOLDER / "pins.txt"), pins(FOLDER / f"{version}.txt")
    assert shared.keys().isdisjoint(own)
    assert set(lines(FOLDER / "imports.txt")) <= shared.keys() | own.keys()


def test_torch_is_the_other_tests():
    """Another one may be made for CUDA alone, with gigabytes of its libraries."""
    assert pins(FOLDER / "pins.txt")["torch"] == pins(ROOT / "constraints.txt")["torch"]


def test_the_makefile_runs_each_version():
    """Those that kpolicy-sglang knows."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\nsglang-cpu: {' '.join(f'sglang-cpu-{version}' for version in sorted(KNOWN))}\n" in makefile
