"""A second context for a moment, over a stand-in for the driver; `tests/gpu` has the real one."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kpolicy.executors.cuda import second_context as module  # noqa: E402
from kpolicy.executors.cuda.second_context import second_context  # noqa: E402

OUT_OF_MEMORY = 2
OURS, MADE = 0x1000, 0x2000


class Driver:
    """What is called of libcuda, with the context that is current."""

    def __init__(self, fails: str = "", lacks: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.current: int | None = OURS
        self._fails, self._lacks = fails, lacks

    def __getattr__(self, name: str) -> Any:
        if name == self._lacks:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == self._fails:
                return OUT_OF_MEMORY
            self._work(name, *arguments)
            return 0

        return call

    def _work(self, name: str, first: Any, *more: Any) -> None:
        if name == "cuCtxGetCurrent":
            first._obj.value = self.current
        elif name == "cuDeviceGet":
            first._obj.value = 70 + more[0]
        elif name == "cuCtxCreate_v2":
            assert (more[0], more[1].value) == (0, 73)
            first._obj.value = self.current = MADE
        elif name == "cuCtxDestroy_v2":
            assert first.value == MADE
            self.current = None
        elif name == "cuCtxSetCurrent":
            self.current = first.value


def use(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver if name == module._LIBRARY else None)
    return driver


def test_it_is_made_on_the_device_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's context is current again."""
    driver = use(monkeypatch, Driver())
    assert second_context(3) == ""
    names = [name for name, _ in driver.calls]
    assert names == ["cuCtxGetCurrent", "cuDeviceGet", "cuCtxCreate_v2", "cuCtxDestroy_v2", "cuCtxSetCurrent"]
    assert driver.current == OURS


def test_a_driver_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for it, say: the graphs are as they were, and the caller's context is current."""
    driver = use(monkeypatch, Driver(fails="cuCtxCreate_v2"))
    assert second_context(3) == "cuCtxCreate_v2 gave CUDA error 2"
    assert driver.current == OURS
    driver = use(monkeypatch, Driver(fails="cuCtxDestroy_v2"))
    assert second_context(3) == "cuCtxDestroy_v2 gave CUDA error 2"
    assert driver.current == OURS
    use(monkeypatch, Driver(lacks="cuCtxCreate_v2"))
    assert second_context(3) == "this driver has no cuCtxCreate_v2"


def test_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch without it isn't asked further; a driver that isn't there is named."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "isn't built with CUDA" in second_context(0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(module, "_LIBRARY", "libno-such-driver.so.1")
    assert "libno-such-driver.so.1 can't be loaded" in second_context(0)
