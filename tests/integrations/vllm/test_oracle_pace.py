"""Bounded steps as vLLM is configured and started: the scheduler's class, the sizes, and what is said without it."""

from __future__ import annotations

import logging
from collections import Counter
from enum import Enum
from typing import Any

import pytest

from kpolicy_vllm import plugin
from kpolicy_vllm.config import Config
from kpolicy_vllm.state import PROCESS, settings_of, state_of
from tests.integrations.vllm import test_oracle_runner
from tests.integrations.vllm.real_runner import sized, vllm_config, vllm_of
from tests.integrations.vllm.test_oracle_runner import VERSIONS, pytestmark

__all__ = ["pytestmark"]

BOTH = pytest.mark.parametrize("version", VERSIONS)
served: Any = test_oracle_runner.served
CLASS = "kpolicy_vllm.scheduler.SplitAsyncScheduler"


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are given once in a process, and each test is one."""
    monkeypatch.setattr(PROCESS, "counts", Counter())
    monkeypatch.setattr(PROCESS, "_warned", set())


def configured(modules: Any, given: Any, scheduler: Any = None) -> Any:
    config = vllm_config(modules, kpolicy=given, max_num_seqs=1024, max_num_batched_tokens=8192)
    config.scheduler_config.async_scheduling = True
    config.scheduler_config.scheduler_cls = scheduler
    sized(modules, config)
    return config


def largest_mixed(config: Any) -> int:
    """Tokens of the largest whole graph of mixed batches that is captured for that vLLM."""
    loaded = Config.load(config.additional_config)
    assert loaded is not None
    sizes = plugin._sizes_for(config, loaded, settings_of(config), None)
    assert sizes is not None
    return sizes.mixed[-1]


@BOTH
@pytest.mark.parametrize(
    ("given", "cls", "largest"),
    [
        ({}, None, 512),
        ({"objective": "latency"}, CLASS, 1024),
        ({"objective": "1:1", "pace": False}, None, 512),
        ({"pace": True}, CLASS, 1024),
        ({"split": True}, CLASS, 512),
        ({"objective": "1:1", "piecewise_sizes": [64, 512]}, CLASS, 1024),
    ],
)
def test_the_scheduler_and_the_sizes_follow_the_objective(version: str, given: Any, cls: Any, largest: int) -> None:
    """Where the gap is weighed vLLM gets our scheduler, and whole graphs for the sizes that steps are bounded to."""
    with vllm_of(version) as modules:
        plugin.register()
        config = configured(modules, given)
        assert config.scheduler_config.scheduler_cls == cls
        assert largest_mixed(config) == largest
        assert not PROCESS.counts


@BOTH
def test_where_steps_can_never_be_bounded_no_graphs_are_captured_for_it(version: str) -> None:
    """Larger graphs cost memory and start-up time, which is for nothing then."""
    with vllm_of(version) as modules:
        plugin.register()

        def largest(given: Any, part: str = "", scheduler: Any = None, **changed: Any) -> int:
            config = vllm_config(modules, kpolicy={"pace": True} | given, max_num_seqs=1024,
                                 max_num_batched_tokens=8192)  # fmt: skip
            config.scheduler_config.async_scheduling = True
            config.scheduler_config.scheduler_cls = scheduler
            for name, value in changed.items():
                setattr(getattr(config, part), name, value)
            sized(modules, config)
            return largest_mixed(config)

        assert largest({}) == 1024
        assert largest({}, scheduler=CLASS) == 1024
        assert largest({}, scheduler="mine.Scheduler") == 512
        assert largest({}, "parallel_config", distributed_executor_backend="mp") == 512
        assert largest({}, "scheduler_config", enable_chunked_prefill=False) == 512
        assert largest({}, "scheduler_config", long_prefill_token_threshold=512) == 512
        assert largest({"policy": "full_and_piecewise"}) == 512
        assert largest({"split": True}, "parallel_config", pipeline_parallel_size=1) == 512
        # SPLIT isn't to be had with pipeline stages, so that steps are bounded.
        assert largest({"split": True}, "parallel_config", pipeline_parallel_size=2) == 1024


@BOTH
def test_a_scheduler_that_was_given_stays(version: str, caplog: pytest.LogCaptureFixture) -> None:
    """The user's own class schedules, which is said and counted once; a copied configuration keeps ours in silence."""
    with vllm_of(version) as modules, caplog.at_level(logging.WARNING):
        plugin.register()
        for given, event in (({"pace": True}, "not_paced"), ({"split": True}, "not_split")):
            config = configured(modules, given, scheduler="mine.Scheduler")
            assert config.scheduler_config.scheduler_cls == "mine.Scheduler"
            assert PROCESS.counts[event] == 1
            assert "mine.Scheduler" in caplog.records[-1].message
        PROCESS.counts.clear()
        assert configured(modules, {"pace": True}, scheduler=CLASS).scheduler_config.scheduler_cls == CLASS
        assert not PROCESS.counts


def surprised(*_: Any, surprise: Any = None) -> Any:
    """Takes something that nothing of vLLM's takes."""
    return surprise


CHANGED = [
    ("v1.core.sched.scheduler", "Scheduler", "schedule"),
    ("v1.core.sched.scheduler", "Scheduler", "pause_state"),
    ("v1.core.sched.interface", "PauseState", ""),
    ("v1.engine.core", "DPEngineCoreProc", "run_busy_loop"),
]


@BOTH
@pytest.mark.parametrize("changed", CHANGED, ids=lambda changed: changed[-1] or changed[1])
@pytest.mark.parametrize("given", [{"split": True}, {"pace": True}, {"split": True, "pace": True}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_scheduler_than_was_recorded_is_left_alone(
    version: str, changed: Any, given: Any, ranks: int, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What would change it is off before vLLM is given our class, which is said; else kpolicy is on."""
    place, owner, name = changed
    touched = given if owner != "DPEngineCoreProc" else {"split": True} if given.get("split") and ranks > 1 else {}
    with vllm_of(version) as modules, caplog.at_level(logging.WARNING):
        module = modules.module(place)
        if name:
            monkeypatch.setattr(getattr(module, owner), name, surprised)
        else:
            monkeypatch.setattr(module, owner, Enum(owner, {"UNPAUSED": 0, "PAUSED_ALL": 1}))
        plugin.register()
        config = vllm_config(modules, kpolicy=given, max_num_seqs=1024, max_num_batched_tokens=8192, ranks=ranks)
        config.scheduler_config.async_scheduling = True
        for _ in range(2):  # a copied configuration is as the first
            sized(modules, config)
        left = {setting for setting in given if setting not in touched}
        assert config.scheduler_config.scheduler_cls == (CLASS if left else None)
        loaded = Config.load(config.additional_config)
        assert loaded is not None
        assert {"split": loaded.split, "pace": loaded.paces} == {each: each in left for each in ("split", "pace")}
        assert PROCESS.counts == {{"split": "not_split", "pace": "not_paced"}[each]: 1 for each in touched}
        assert [f"{owner}.{name}".rstrip(".") in each.message for each in caplog.records] == [True] * len(touched)
        assert config.compilation_config.cudagraph_capture_sizes[-1] > 512


@BOTH
@pytest.mark.parametrize(
    ("given", "why"),
    [({"pace": True, "calibrate": False}, "calibrate is off"), ({"pace": True, "policy": "full"}, "reads none")],
)
def test_without_costs_it_is_said(version: str, given: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Costs bound steps: where there are none they are filled, with one warning that says why."""
    with vllm_of(version) as modules, caplog.at_level(logging.WARNING):
        plugin.register()
        runner = served(modules, kpolicy={"pace": True, "calibrate": False} | given)
        state = state_of(runner.vllm_config)
        assert state is not None
        assert state.counters.counts["not_paced"] == 1
        assert any(why in record.message for record in caplog.records)


@BOTH
def test_whole_graphs_of_mixed_batches_reach_the_bound(version: str) -> None:
    """Whole graphs of up to 1,024 tokens are captured where decodes have graphs of as many."""
    with vllm_of(version) as modules:
        plugin.register()
        for reqs, largest in ((1024, 1024), (256, 512)):
            given = {"pace": True, "calibrate": False, "decode_sizes": [1, reqs], "piecewise_sizes": [512]}
            runner = served(modules, max_num_seqs=reqs, max_num_batched_tokens=4096, kpolicy=given)
            state = state_of(runner.vllm_config)
            assert state is not None
            assert state.ladder.mixed[-1].num_tokens == largest
