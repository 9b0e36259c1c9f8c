"""Settings that hold for all tests."""

import gc
import os
import signal
from collections.abc import Iterator
from subprocess import TimeoutExpired
from typing import Any

import hypothesis
import pytest

# Workers of pytest-xdist share the cores: with more threads than cores, torch's wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Modules load on first use here, so the first example of a property is slow; no test asserts a time.
hypothesis.settings.register_profile("kpolicy", deadline=None)
hypothesis.settings.load_profile("kpolicy")


def pytest_collection_finish() -> None:
    """Leave libraries and tests out of garbage collection: going through them took 0.3 s a time, some thousand times.

    What tests make is collected as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After each module: what it imported stays out too, also where a test has unfrozen all."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def thawed() -> None:
    """Nothing is out of garbage collection, for tests that look at what is."""
    gc.unfreeze()


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
