"""A second CUDA context after vLLM's captures: once, before anything is timed, and nothing depends on it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.settings import Settings
from kpolicy_vllm import started
from kpolicy_vllm.config import Config
from kpolicy_vllm.state import State
from kpolicy_vllm.versions.names import Names
from tests.oracle.loader import Release, loaded, oracle_folder
from tests.oracle.wheels import VLLM_WHEELS


def told(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[list[str]], str], *, beside: bool = False, **settings: Any
) -> tuple[list[str], State]:
    """What happens after a capture, in order."""
    done: list[str] = []
    state = State(Config(metrics=False, **settings), Settings())
    state.dispatcher = SimpleNamespace(refresh=lambda: None)
    for name in ("_decide", "_say", "enter_others"):
        monkeypatch.setattr(started, name, lambda *_, name=name, **__: done.append(name))
    modules = SimpleNamespace(first_rank=lambda: False, second_context=lambda: make(done), work_beside=lambda: beside)
    started.after_capture(state, modules)
    return done, state


@pytest.mark.parametrize("on", [True, False])
def test_it_is_made_before_costs_are_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on: bool
) -> None:
    """Where the user wants one."""
    assert not Config().second_context
    with caplog.at_level(logging.INFO):
        done, _ = told(monkeypatch, lambda done: done.append("context") or "", second_context=on)
    assert done[: 1 + on] == ["context", "_decide"][1 - on :]
    assert "context" in done[:on] or "context" not in done
    assert "second context" not in caplog.text


def test_eager_steps_that_run_kernels_beside_others_are_timed_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would end what it gives, between one time and another."""
    made = lambda done: done.append("context") or ""  # noqa: E731
    done, _ = told(monkeypatch, made, beside=True, second_context=True)
    assert done[:2] == ["_decide", "context"]
    assert done.count("context") == 1


def test_where_it_cant_be_had_vllm_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the reason in the log; what fails unforeseen is counted."""

    def fails(_done: list[str]) -> str:
        raise OSError("no driver")

    with caplog.at_level(logging.INFO):
        done, state = told(monkeypatch, lambda _: "out of memory", second_context=True)
        assert "no second context after the captures: out of memory" in caplog.text
        assert not state.counters.counts
        assert done[0] == "_decide"
        done, state = told(monkeypatch, fails, second_context=True)
        assert done[0] == "_decide"
        assert state.counters.counts["no_second_context"] == 1


@pytest.mark.parametrize("version", [pytest.param(each, marks=VLLM_WHEELS) for each in ("0.23", "0.33")])
def test_vllm_s_own_stream_for_work_beside_is_looked_at(version: str) -> None:
    """It is there once a layer asked for it, and shared experts do where they are made."""
    folder = oracle_folder()
    assert folder is not None
    experts = Release(folder, version).read("vllm/model_executor/layers/fused_moe/runner/shared_experts.py")
    assert "self._stream = aux_stream()" in experts
    with loaded(folder, version, real=["vllm.utils.torch_utils"]) as modules:
        look = Names(CUDAGraphMode=None).work_beside
        assert look() is False
        modules.module("utils.torch_utils").aux_stream()
        assert look() is True
