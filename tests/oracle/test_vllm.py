"""The vLLM replica against vLLM's own code, out of unpacked wheels."""

import sys

import pytest

from tests.oracle.compare import RUNNERS, compare, compare_default_sizes, compare_ranks, compare_resolution
from tests.oracle.loader import oracle_folder
from tests.oracle.wheels import VLLM_WHEELS

BATCHES = 20_000

pytestmark = VLLM_WHEELS


@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_dispatch(version, runner):
    """Mode, size, rows, uniformity and LoRA case of 20,000 random batches are those of the real dispatcher."""
    result = compare(oracle_folder(), version, runner, BATCHES)
    assert not result.mismatches, result.mismatches[0]
    assert result.batches == BATCHES
    assert min(result.outcomes[name] for name in ("FULL", "PIECEWISE", "NONE")) > 1000


@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_ranks(version, runner):
    """What data-parallel ranks agree on is what vLLM's own agreement gives each of them."""
    compared, modes, differing = compare_ranks(oracle_folder(), version, runner, 2000)
    assert not differing, differing[0]
    assert compared >= 2000
    assert min(modes[name] for name in ("FULL", "PIECEWISE", "NONE")) > 50


@pytest.mark.parametrize(("version", "runner"), RUNNERS)
def test_resolution(version, runner):
    """Every cell of the downgrade tables is what the real start-up function gives."""
    cells, differing = compare_resolution(oracle_folder(), version, runner)
    assert cells == 120
    assert not differing


@pytest.mark.parametrize("version", ["0.23", "0.33"])
def test_default_sizes(version):
    """The default capture sizes are those of the real configuration."""
    _, differing = compare_default_sizes(oracle_folder(), version)
    assert not differing


def test_no_trace():
    """The loader leaves no module of vLLM and none of its stubs behind."""
    before = set(sys.modules)
    compare_resolution(oracle_folder(), "0.33", "v2")
    left = {name for name in set(sys.modules) - before if name.partition(".")[0] in ("vllm", "torch", "pydantic")}
    assert not left
