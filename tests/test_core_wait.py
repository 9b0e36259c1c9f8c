"""What waiting for a core is told of."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from kpolicy import core_wait
from kpolicy.core_wait import waited_s


def test_threads_that_share_a_core_wait_for_it() -> None:
    """Two threads with work on one core wait for each other."""
    before = waited_s()
    if not before:
        pytest.skip("needs a system that says what threads waited")
    core, told = min(os.sched_getaffinity(0)), list[float]()

    def work() -> None:
        os.sched_setaffinity(0, {core})
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            hashlib.sha256(bytes(1 << 20))  # without the interpreter's lock

    def both() -> None:
        other = threading.Thread(target=work)
        other.start()
        work()
        # Before either thread ends.
        told.append(waited_s() or 0.0)
        other.join()

    first = threading.Thread(target=both)
    first.start()
    first.join()
    assert told[0] - before > 0.1


def test_where_the_system_says_nothing_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the file, or with another text in it, there is no figure instead of a zero."""
    monkeypatch.setattr(core_wait, "_TASKS", tmp_path / "none")
    assert waited_s() is None
    (tmp_path / "1").mkdir()
    monkeypatch.setattr(core_wait, "_TASKS", tmp_path)
    assert waited_s() is None
    (tmp_path / "1" / "schedstat").write_text("odd\n")
    assert waited_s() is None
    (tmp_path / "1" / "schedstat").write_text("5 2500000000 7\n")
    assert waited_s() == 2.5
