"""The schedulers that split, on vLLM's own, out of unpacked wheels."""

from __future__ import annotations

import importlib
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy_vllm import scheduler as ours
from kpolicy_vllm.config import Config
from kpolicy_vllm.state import State, settings_of
from tests.integrations.vllm.real_scheduler import make_request, make_scheduler, schedulers, serve, vllm_config
from tests.oracle.wheels import VLLM_WHEELS

pytest.importorskip("torch")
pytestmark = VLLM_WHEELS

BOTH = pytest.mark.parametrize("version", ["0.23", "0.33"])
KINDS = pytest.mark.parametrize("asynchronous", [False, True])


class Always:
    """A rule that splits every mixed step, after so many decode-only ones."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def steps(self, *_: Any) -> int:
        return self._steps

    def alternates(self) -> bool:
        return self._steps > 0


def split_scheduler(config: Any, steps: int) -> Any:
    """Our scheduler on vLLM's, which splits as it is told."""
    name = ours.qualname(config).rpartition(".")[2]
    made = make_scheduler(ours._made(name), config)
    assert made.kpolicy_turns is None, "kpolicy is off in this configuration"
    counts: dict[str, int] = {}
    state = SimpleNamespace(
        counters=SimpleNamespace(add=lambda key: counts.__setitem__(key, counts.get(key, 0) + 1), counts=counts),
        others_decode=lambda: True,
    )
    made.kpolicy_turns = ours.Turns(made, state)
    made.kpolicy_turns._rule = Always(steps)
    return made


def stock_scheduler(config: Any) -> Any:
    module, name = ours._BASES[ours.qualname(config).rpartition(".")[2]]
    return make_scheduler(getattr(importlib.import_module(module), name), config)


def requests(seed: int, count: int = 20, longest: int = 150) -> list[tuple[int, Any]]:
    chance = random.Random(seed)  # noqa: S311
    return [
        (chance.randrange(60), make_request(f"r{i}", chance.randrange(1, longest), chance.randrange(1, 40)))
        for i in range(count)
    ]


@BOTH
@KINDS
@pytest.mark.parametrize("steps", [1, 3])
def test_tokens_are_stock_s_and_no_step_is_mixed(version: str, asynchronous: bool, steps: int) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous)
        for seed in range(5):
            depth = 2 if asynchronous else 1
            wanted, stock = serve(stock_scheduler(config), requests(seed), depth=depth)
            scheduler = split_scheduler(config, steps)
            found, worker = serve(scheduler, requests(seed), depth=depth)
            assert found == wanted
            assert any(decodes and prompts for decodes, prompts in stock.steps), "the load has mixed steps"
            assert not any(decodes and prompts for decodes, prompts in worker.steps)
            assert scheduler.kpolicy_turns._state.counters.counts["split_decode_steps"] > 10


@BOTH
@KINDS
def test_off_is_stock_step_by_step(version: str, asynchronous: bool) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous)
        depth = 2 if asynchronous else 1
        name = ours.qualname(config).rpartition(".")[2]
        for seed in range(3):
            wanted, stock = serve(stock_scheduler(config), requests(seed), depth=depth)
            for scheduler in (make_scheduler(ours._made(name), config), split_scheduler(config, 0)):
                found, worker = serve(scheduler, requests(seed), depth=depth)
                assert found == wanted
                assert worker.steps == stock.steps


@BOTH
@KINDS
def test_prompts_wait_for_as_many_decode_steps_as_said(version: str, asynchronous: bool) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous)
        load = [(0, make_request("a", 4, 60)), (10, make_request("b", 300, 4))]
        _, worker = serve(split_scheduler(config, 3), load, depth=2 if asynchronous else 1)
        kinds = "".join("P" if prompts else "D" for _, prompts in worker.steps)
        # 300 prompt tokens at 64 a step: five chunks, each behind three decode-only steps.
        assert "PDDDPDDDPDDDP" in kinds


@BOTH
@KINDS
def test_few_blocks_leave_preemption_to_vllm(version: str, asynchronous: bool) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, blocks=30)
        for seed in range(4):
            scheduler = split_scheduler(config, 2)
            found, _ = serve(scheduler, requests(seed, count=12, longest=60), depth=2 if asynchronous else 1)
            wanted, _ = serve(stock_scheduler(config), requests(seed, count=12, longest=60),
                              depth=2 if asynchronous else 1)  # fmt: skip
            assert found == wanted


@BOTH
@KINDS
def test_no_decode_step_of_ours_preempts(version: str, asynchronous: bool) -> None:
    """Whom to preempt is vLLM's to choose among all that run; a step that hides some would choose among the rest."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, blocks=30)
        preempted, short = [], 0
        for seed in range(4):
            load = requests(seed, count=12, longest=60)
            scheduler = split_scheduler(config, 2)
            turns = scheduler.kpolicy_turns
            inner = turns._hiding_prompts

            def hiding(stock: Any, load: Any = load, inner: Any = inner) -> Any:
                before = sum(request.num_preemptions for _, request in load)
                output = inner(stock)
                preempted.append(sum(request.num_preemptions for _, request in load) - before)
                return output

            turns._hiding_prompts = hiding
            serve(scheduler, load, depth=2 if asynchronous else 1)
            short += turns._state.counters.counts.get("split_short_of_blocks", 0)
        assert len(preempted) > 10
        assert not any(preempted)
        assert short > 0


@BOTH
@KINDS
@pytest.mark.parametrize("second_runner", [False, True])
def test_a_prompt_that_finds_no_blocks_leaves_no_empty_steps(
    version: str, asynchronous: bool, second_runner: bool
) -> None:
    """Decodes fill the cache while a prompt waits for blocks: every step that stock fills, we fill."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, blocks=40, max_tokens=512, second_runner=second_runner)
        depth = 2 if asynchronous else 1

        def served(scheduler: Any) -> tuple[dict[str, list[int]], list[int]]:
            load = [(0, make_request(f"d{i}", 96, 60)) for i in range(4)] + [(10, make_request("big", 330, 4))]
            inner, tokens = scheduler.schedule, []

            def schedule() -> Any:
                output = inner()
                tokens.append(output.total_num_scheduled_tokens)
                return output

            scheduler.schedule = schedule
            return serve(scheduler, load, depth=depth)[0], tokens

        wanted, stock = served(stock_scheduler(config))
        scheduler = split_scheduler(config, 1)
        found, ours_ = served(scheduler)
        assert found == wanted
        assert scheduler.kpolicy_turns._state.counters.counts["split_no_prompt_came_in"] > 0
        assert ours_.count(0) <= stock.count(0)


@BOTH
def test_whoever_holds_blocks_stays_out_of_a_decode_step_too(version: str) -> None:
    """0.33 lets requests with blocks in under a pause, up to a limit that counts only the rows it sees."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=False)
        scheduler = split_scheduler(config, 1)
        turns = scheduler.kpolicy_turns
        limit = getattr(scheduler, "max_num_active_reqs", None)
        for hide in (turns._hiding_prompts, turns._hiding_all):
            seen = []
            hide(lambda seen=seen: seen.append(getattr(scheduler, "max_num_active_reqs", None)))
            assert seen == [None if version == "0.23" else 0]
            assert getattr(scheduler, "max_num_active_reqs", None) == limit


@BOTH
@KINDS
@pytest.mark.parametrize("blocks", [200, 30])
def test_the_second_runner_s_tokens_are_stock_s_too(version: str, asynchronous: bool, blocks: int) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, blocks=blocks, second_runner=True)
        depth, longest = (2 if asynchronous else 1), (150 if blocks > 100 else 60)
        for seed in range(3):
            wanted, _ = serve(stock_scheduler(config), requests(seed, longest=longest), depth=depth)
            found, worker = serve(split_scheduler(config, 2), requests(seed, longest=longest), depth=depth)
            assert found == wanted
            if blocks > 100:
                assert not any(decodes and prompts for decodes, prompts in worker.steps)


@BOTH
def test_a_rule_that_raises_leaves_scheduling_to_vllm(version: str) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=False)
        _, stock = serve(stock_scheduler(config), requests(2), depth=1)
        scheduler = split_scheduler(config, 1)
        warned: list[str] = []
        scheduler.kpolicy_turns._state.counters.warn_once = lambda name, _: warned.append(name)
        scheduler.kpolicy_turns._rule = SimpleNamespace(steps=lambda *_: 1 / 0)
        _, worker = serve(scheduler, requests(2), depth=1)
        assert worker.steps == stock.steps
        assert warned == ["split_failed"]


@BOTH
def test_where_the_flag_is_set_the_class_splits(version: str) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=True)
        config.additional_config = {"kpolicy": {"split": True}}
        config.instance_id = f"split-{version}"
        name = ours.qualname(config).rpartition(".")[2]
        cls = getattr(ours, name)
        del vars(ours)[name]  # made of this release's class, and kept
        made = make_scheduler(cls, config)
        assert made.kpolicy_turns is not None
        assert type(made).__mro__[1].__name__ == "AsyncScheduler"
        # Until there are costs it schedules as stock.
        _, stock = serve(stock_scheduler(config), requests(2), depth=2)
        _, worker = serve(made, requests(2), depth=2)
        assert worker.steps == stock.steps

        config.instance_id = f"apart-{version}"
        config.parallel_config.distributed_executor_backend = "mp"
        assert make_scheduler(cls, config).kpolicy_turns is None
        config.parallel_config.distributed_executor_backend = "uni"

        config.instance_id = f"lora-{version}"
        config.lora_config = SimpleNamespace(max_loras=2)
        assert make_scheduler(cls, config).kpolicy_turns is None


def test_schedulers_of_ranks_read_the_engine_s_counter(monkeypatch: Any) -> None:
    class Engine:
        step_counter = 5
        scheduler = SimpleNamespace(kpolicy_turns=SimpleNamespace(counter=None))

        def run_busy_loop(self) -> str:
            return "ran"

    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(DPEngineCoreProc=Engine))
    ours._count_steps()
    ours._count_steps()
    engine = Engine()
    assert engine.run_busy_loop() == "ran"
    assert engine.scheduler.kpolicy_turns.counter() == 5
    engine.step_counter = 6
    assert engine.scheduler.kpolicy_turns.counter() == 6


@BOTH
def test_data_parallel_ranks_take_the_same_turns(version: str) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, ranks=2)
        ranks = [split_scheduler(config, 1) for _ in range(2)]
        tick = 0
        for rank in ranks:
            rank.kpolicy_turns.counter = lambda: tick
        ranks[0].add_request(make_request("a", 4, 30))
        ranks[1].add_request(make_request("b", 500, 30))
        late = make_request("c", 200, 5)
        seen: list[list[tuple[int, int]]] = []
        outputs = importlib.import_module("vllm.v1.outputs")
        for tick in range(30):
            if tick == 8:
                ranks[0].add_request(late)
            row = []
            for rank in ranks:
                output = rank.schedule()
                new = output.num_scheduled_tokens
                prompt = {name for name in new if rank.requests[name].num_computed_tokens <=
                          rank.requests[name].num_prompt_tokens}  # fmt: skip
                row.append((len(new) - len(prompt), sum(new[name] for name in prompt)))
                done = {name: [1] if not rank.requests[name].is_prefill_chunk else [] for name in new}
                rank.update_from_output(
                    output,
                    outputs.ModelRunnerOutput(
                        req_ids=list(done), req_id_to_index={name: i for i, name in enumerate(done)},
                        sampled_token_ids=list(done.values()),
                    ),
                )  # fmt: skip
            seen.append(row)
        assert late.num_output_tokens > 0
        for i, row in enumerate(seen):
            if i % 2 == 0:
                assert not any(prompts for _, prompts in row), f"step {i} is for decodes"
        assert any(decodes for decodes, _ in seen[6])
        assert any(prompts for row in seen for _, prompts in row)


@BOTH
@pytest.mark.parametrize("decodes", [True, False])
def test_a_rank_waits_for_decodes_that_others_have(version: str, decodes: bool) -> None:
    """A rank with a long prompt leaves every second step to others' decodes, and few where there are none."""
    with schedulers(version):
        rank = split_scheduler(vllm_config(version, asynchronous=False, ranks=2), 1)
        rank.kpolicy_turns.counter, rank.kpolicy_turns._state.others_decode = lambda: tick, lambda: decodes
        rank.add_request(make_request("a", 1500, 2))
        rank.max_num_scheduled_tokens = 40
        steps = []
        outputs = importlib.import_module("vllm.v1.outputs")
        for tick in range(36):  # noqa: B007 - the counter reads it
            output = rank.schedule()
            steps.append(output.total_num_scheduled_tokens)
            rank.update_from_output(
                output,
                outputs.ModelRunnerOutput(
                    req_ids=list(output.num_scheduled_tokens), req_id_to_index={"a": 0}, sampled_token_ids=[[]]
                ),
            )
        assert all(steps[1::2]), steps
        assert sum(not tokens for tokens in steps[::2]) == (18 if decodes else 2)


@BOTH
@pytest.mark.parametrize(("eager_us", "splits"), [(60_000.0, True), (900.0, False)])
def test_costs_decide(version: str, eager_us: float, splits: bool) -> None:
    """The real state, rule and scheduler: mixed steps are above the largest graph, the two apart are not."""
    graphs = Curve((1, 64), (1000.0, 1000.0))
    costs = CostTable(
        version="made up", measured=True, full=graphs, piecewise=graphs, eager=Curve((1, 64), (800.0, eager_us)),
        host_full=HostCost(100.0), host_piecewise=HostCost(100.0), host_eager=HostCost(100.0),
    )  # fmt: skip
    with schedulers(version):
        config = vllm_config(version, asynchronous=True)
        state = State(Config(split=True), settings_of(config))
        state.claims = Claims(1)
        for key in (GraphKey(Part.FULL, 8, 8, query_len=1), GraphKey(Part.PIECEWISE, 63)):
            state.registry.plan([key])
            state.registry.capture(key, bytes=1, seconds=0.1, graphs=1, pool="vllm")
        state.graphs_captured()
        state.install_costs(costs)
        scheduler = split_scheduler(config, 0)
        scheduler.kpolicy_turns = ours.Turns(scheduler, state)
        wanted, _ = serve(stock_scheduler(config), requests(1), depth=2)
        found, worker = serve(scheduler, requests(1), depth=2)
        assert found == wanted
        mixed = [decodes + prompts for decodes, prompts in worker.steps if decodes and prompts]
        # Small mixed steps fit the graph of pieces, and cost less than two steps.
        assert (max(mixed) <= 63) is splits
        assert bool(state.counters.counts["split_decode_steps"]) is splits
        assert state.counters.counts["split_not_worth_it"] > 0
