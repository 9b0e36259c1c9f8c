"""Settings that hold for all tests."""

import os
import signal
from subprocess import TimeoutExpired
from typing import Any

import hypothesis
import pytest

# Workers of pytest-xdist share the cores: with more threads than cores, torch's wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Modules load on first use here, so the first example of a property is slow; no test asserts a time.
hypothesis.settings.register_profile("kpolicy", deadline=None)
hypothesis.settings.load_profile("kpolicy")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say how a worker ended that pytest-xdist lost, which only says at which test: a signal leaves no other word."""
    if error is None:
        return
    try:
        code = node.gateway._io.popen.wait(10)
    except (AttributeError, TimeoutExpired):
        return  # another kind of worker, or one that only stopped talking
    ended = signal.Signals(-code).name if -code in set(signal.Signals) else f"code {code}"
    node.config.get_terminal_writer().line(f"\n[{node.gateway.id}] ended with {ended}")
