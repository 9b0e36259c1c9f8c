from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.settings import Settings
from kpolicy_vllm.config import Config
from kpolicy_vllm.scheduler import qualname, why_not
from kpolicy_vllm.split_rule import Apart, SplitRule
from kpolicy_vllm.state import State


def rule(**config: Any) -> SplitRule:
    return SplitRule(State(Config(**config), Settings(max_num_reqs=64, max_num_tokens=2048)))


DEAR = Apart(whole=60_000.0, decode=6_000.0, prompt=12_000.0, more=0.0)
CHEAP = Apart(whole=13_000.0, decode=6_000.0, prompt=12_000.0, more=0.0)


@pytest.mark.parametrize(
    ("apart", "config", "steps"),
    [
        (DEAR, {}, 1),
        (CHEAP, {}, 0),
        (DEAR._replace(more=50_000.0), {}, 0),
        # More decode-only steps don't raise throughput, and shorten the gap as far as prompts may wait.
        (DEAR, {"split_decodes": 8}, 1),
        (CHEAP, {"split_decodes": 8, "objective": "latency"}, 0),
        (CHEAP, {"split_decodes": 8, "objective": "latency", "first_token_ms": 100.0}, 8),
        (CHEAP, {"split_decodes": 8, "objective": "latency", "first_token_ms": 31.0}, 3),
        (CHEAP, {"split_decodes": 8, "objective": "latency", "first_token_ms": 10.0}, 0),
    ],
)
def test_the_least_score_within_the_bound(apart: Apart, config: dict[str, Any], steps: int) -> None:
    assert rule(**config).best(apart) == steps


def test_a_prompt_that_has_waited_long_waits_no_longer() -> None:
    patient = rule(split_decodes=8, objective="latency", first_token_ms=100.0)
    assert patient.best(CHEAP, waited_us=0.0) == 8
    assert patient.best(CHEAP, waited_us=60_000.0) == 4
    assert patient.best(CHEAP, waited_us=95_000.0) == 0


def test_without_costs_nothing_is_split() -> None:
    assert rule().steps(8, [512]) == 0
    assert not rule().alternates()


def ready(eager_us: float) -> State:
    """A state whose largest graph holds either half of a step and not the whole."""
    state = State(Config(), Settings(max_num_reqs=64, max_num_tokens=2048))
    state.claims = Claims(1)
    for key in (GraphKey(Part.FULL, 64, 64, query_len=1), GraphKey(Part.PIECEWISE, 512)):
        state.registry.plan([key])
        state.registry.capture(key, bytes=1, seconds=0.1, graphs=1, pool="vllm")
    state.graphs_captured()
    flat = Curve((1, 2048), (1000.0, 1000.0))
    state.install_costs(
        CostTable(
            version="made up", measured=True, full=flat, piecewise=flat, eager=Curve((1, 2048), (eager_us, eager_us)),
            host_full=HostCost(100.0), host_piecewise=HostCost(100.0), host_eager=HostCost(100.0),
        )
    )  # fmt: skip
    return state


@pytest.mark.parametrize(("eager_us", "steps"), [(50_000.0, 1), (1500.0, 0)])
def test_costs_of_the_policy_s_own_ways_decide(eager_us: float, steps: int) -> None:
    found = SplitRule(ready(eager_us))
    assert found.steps(32, [512]) == steps
    assert found.steps(32, [400]) == 0, "a mixed step that fits the graph costs one step, not two"


def test_rows_that_join_again_are_counted() -> None:
    state = ready(3000.0)
    assert SplitRule(state).steps(32, [512]) == 1
    state.rejoin_us = 100.0  # type: ignore[attr-defined]
    assert SplitRule(state).steps(32, [512]) == 0


def config_of(**changed: Any) -> Any:
    """A vLLM in which decodes and prompts can be scheduled apart, but for the changes."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=changed.pop("stages", 1)),
        model_config=SimpleNamespace(is_encoder_decoder=changed.pop("encoder", False)),
        scheduler_config=SimpleNamespace(async_scheduling=changed.pop("asynchronous", True)),
        **{"speculative_config": None, "lora_config": None, "kv_transfer_config": None} | changed,
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"stages": 2}, "stages"),
        ({"encoder": True}, "encoder"),
        ({"lora_config": object()}, "adapters"),
        ({"kv_transfer_config": object()}, "connector"),
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=3)}, "drafts"),
    ],
)
def test_where_it_cannot_split_it_says_why(changed: dict[str, Any], reason: str) -> None:
    assert why_not(config_of()) is None
    assert reason in str(why_not(config_of(**changed)))


def test_the_class_follows_vllm_s_own_choice() -> None:
    assert qualname(config_of()) == "kpolicy_vllm.scheduler.SplitAsyncScheduler"
    assert qualname(config_of(asynchronous=False)) == "kpolicy_vllm.scheduler.SplitScheduler"
