"""The fixed work by which a CUDA device's host is timed, without one: torch's streams and pinned memory are made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kpolicy.executors.cuda import host_probe  # noqa: E402
from kpolicy.executors.cuda.host_probe import copy_probe  # noqa: E402
from kpolicy.executors.xpu.adapter import StreamAdapter  # noqa: E402


class Stream:
    """Notes what it waited for, and the copies made while it was current."""

    def __init__(self) -> None:
        self.waited: list[Any] = []
        self.copies = 0

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[], float], Stream]:
    stream, current = Stream(), []
    copy = torch.Tensor.copy_

    @contextmanager
    def using(chosen: Stream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def copied(target: Any, source: Any, non_blocking: bool = False) -> Any:
        assert non_blocking, "a copy that the host waits for isn't a launch"
        assert current, "on the stream of the steps it would stand in their way"
        current[-1].copies += 1
        return copy(target, source)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.cuda, "stream", using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: "the steps'")
    return copy_probe(torch.device("cpu"), stream), stream


def test_it_is_the_lesser_of_two_runs(
    probe: tuple[Callable[[], float], Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 70 and 40 us: what the first waits for, or an interruption, isn't the host's speed."""
    copied_us, stream = probe
    times = itertools.chain.from_iterable((start, start + us / 1e6) for start, us in ((1, 70), (2, 40)))
    monkeypatch.setattr(host_probe.time, "perf_counter", lambda: next(times))
    assert copied_us() == pytest.approx(40)
    assert stream.copies == 4
    assert stream.waited == ["the steps'"]


def test_it_runs_in_inference_mode_and_outside(probe: tuple[Callable[[], float], Stream]) -> None:
    """Calibration and a run's step log time it in either."""
    copied_us, stream = probe
    with torch.inference_mode():
        assert copied_us() > 0
    assert copied_us() > 0
    assert stream.copies == 8


def test_other_devices_keep_the_interpreters() -> None:
    """CUDA's was chosen by measurement; nobody measured theirs."""
    assert StreamAdapter("other", None, torch.device("cpu")).host_probe() is None
