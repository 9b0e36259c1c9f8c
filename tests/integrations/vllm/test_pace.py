"""The bound on steps of decodes and prompts, on vLLM's own schedulers out of unpacked wheels."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy_vllm import scheduler as ours
from kpolicy_vllm.config import Config
from kpolicy_vllm.pace import Pacer, vllm_s_own, why_not
from kpolicy_vllm.state import LISTED, State, settings_of
from tests.integrations.vllm.real_scheduler import make_request, make_scheduler, schedulers, serve, vllm_config
from tests.integrations.vllm.test_real_scheduler import BOTH, KINDS, Always, requests, stock_scheduler
from tests.oracle.wheels import VLLM_WHEELS

pytest.importorskip("torch")
pytestmark = VLLM_WHEELS

LIMIT, LARGEST = 256, 64
LINEAR = Curve((1, 256), (101.0, 356.0))
SLOW_EAGER = CostTable(
    version="made up", measured=True, full=LINEAR, piecewise=LINEAR, eager=LINEAR,
    host_full=HostCost(10.0), host_piecewise=HostCost(10.0), host_eager=HostCost(900.0),
)  # fmt: skip
"""100 us a step, 1 us a token, and 900 for what has no graph: by vLLM's own rule all of over 16 tokens here."""

SLOW_HOST = CostTable(
    version="made up too", measured=True, full=LINEAR, piecewise=LINEAR, eager=LINEAR,
    host_full=HostCost(900.0), host_piecewise=HostCost(900.0), host_eager=HostCost(900.0),
)  # fmt: skip
"""As long a step whatever its tokens"""


def state_of(config: Any, version: str, costs: CostTable = SLOW_EAGER, **settings: Any) -> State:
    """A state that has its graphs and costs."""
    return started(State(Config(**{"objective": "latency"} | settings), settings_of(config)), version, costs)


def started(state: State, version: str, costs: CostTable = SLOW_EAGER) -> State:
    """The state as it is when vLLM has captured its graphs and costs are there."""
    state.claims, state.vllm_version = Claims(1), f"{version}.0"
    state.runner = SimpleNamespace()
    for key in (
        GraphKey(Part.FULL, 8, 8, query_len=1),
        *(GraphKey(Part.PIECEWISE, size) for size in (32, 64, 128, 256)),
    ):
        state.registry.plan([key])
        state.registry.capture(key, bytes=1, seconds=0.1, graphs=1, pool="vllm")
    state.graphs_captured()
    state.install_costs(costs)
    return state


def paced_scheduler(config: Any, state: State) -> Any:
    name = ours.qualname(config).rpartition(".")[2]
    made = make_scheduler(ours._made(name), config)
    assert made.kpolicy_pacer is None, "kpolicy is off in this configuration"
    made.kpolicy_pacer = Pacer(made, state)
    return made


def mixed(worker: Any) -> list[int]:
    """Tokens of the steps of decodes and prompts."""
    return [decodes + prompts for decodes, prompts in worker.steps if decodes and prompts]


@BOTH
@KINDS
@pytest.mark.parametrize("second_runner", [False, True])
def test_tokens_are_stock_s_and_steps_are_bounded(version: str, asynchronous: bool, second_runner: bool) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, max_tokens=LIMIT, second_runner=second_runner)
        depth = 2 if asynchronous else 1
        for seed in range(4):
            wanted, stock = serve(stock_scheduler(config), requests(seed, longest=400), depth=depth)
            state = state_of(config, version)
            found, worker = serve(paced_scheduler(config, state), requests(seed, longest=400), depth=depth)
            assert found == wanted
            assert max(mixed(stock)) > 2 * LARGEST, "the load has long mixed steps"
            assert max(mixed(worker)) <= LARGEST
            assert state.counters.counts["paced_steps"] > 5
            assert not state.counters.counts["not_compared"]
            # With nobody who waits for it a step is as long as vLLM makes it.
            assert max(prompts for decodes, prompts in worker.steps if not decodes) > LARGEST


@BOTH
@pytest.mark.parametrize(
    ("settings", "costs", "largest"),
    [
        # Prompts may take as long as by vLLM's own rule; with no gain over it, 1.25 times the best.
        ({}, SLOW_EAGER, 64),
        ({}, CostTable(version="", measured=True, full=LINEAR, piecewise=LINEAR, eager=LINEAR,
                       host_full=HostCost(1.0), host_piecewise=HostCost(1.0), host_eager=HostCost(1.0)), 256),
        ({"objective": "0:1:1.3"}, CostTable(version="", measured=True, full=LINEAR, piecewise=LINEAR, eager=LINEAR,
         host_full=HostCost(1.0), host_piecewise=HostCost(1.0), host_eager=HostCost(1.0)), 128),
        ({"objective": "throughput", "pace": True}, SLOW_EAGER, 256),
        ({"objective": "3:1"}, SLOW_EAGER, 256),
    ],
)  # fmt: skip
def test_costs_and_objective_decide(version: str, settings: Any, costs: CostTable, largest: int) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=True, max_tokens=LIMIT)
        state = state_of(config, version, costs, **settings)
        load = [(0, make_request("a", 10, 80)), *((5, make_request(f"b{i}", 2000, 3)) for i in range(6))]
        _, worker = serve(paced_scheduler(config, state), load, depth=2)
        assert Counter(mixed(worker)).most_common(1)[0][0] == largest


@BOTH
@KINDS
def test_few_blocks_leave_preemption_to_vllm(version: str, asynchronous: bool) -> None:
    """Prompts that find no blocks under the bound don't hold up the next step, which is vLLM's own."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, max_tokens=LIMIT, blocks=30)
        depth, unmet = (2 if asynchronous else 1), 0
        for seed in range(4):
            state = state_of(config, version)
            found, _ = serve(paced_scheduler(config, state), requests(seed, count=12, longest=400), depth=depth)
            wanted, _ = serve(stock_scheduler(config), requests(seed, count=12, longest=400), depth=depth)
            assert found == wanted
            unmet += state.counters.counts["pace_no_prompt_came_in"]
        assert unmet > 0


@BOTH
def test_after_a_step_without_prompts_the_next_is_vllm_s_own(version: str) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT)
        scheduler = paced_scheduler(config, state_of(config, version))
        pacer = scheduler.kpolicy_pacer
        scheduler.add_request(make_request("a", 10, 80))
        serve_one(scheduler)
        scheduler.add_request(make_request("b", 2000, 3))
        limits: list[int] = []

        def nothing() -> Any:
            limits.append(scheduler.max_num_scheduled_tokens)
            return step_of({"a": 1})

        for _ in range(4):
            pacer.schedule(nothing)
        assert limits == [LARGEST, LIMIT, LARGEST, LIMIT]


@BOTH
def test_a_prompt_s_few_tokens_beside_few_drafts_came_in(version: str) -> None:
    """A decode may have no drafts this time: its step with the tail of a prompt is shorter than decodes can be."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT)
        state = state_of(config, version)
        state.settings = attrs.evolve(state.settings, num_speculative_tokens=3)
        scheduler = paced_scheduler(config, state)
        scheduler.kpolicy_pacer._bound = lambda: LARGEST
        scheduler.kpolicy_pacer._rows.decodes = 1
        for rows, unmet in (({"a": 1, "b": 2}, 0), ({"a": 1}, 1), ({"a": 4}, 2), ({"a": 4, "b": 1}, 2)):
            scheduler.kpolicy_pacer.schedule(lambda rows=rows: step_of(rows))
            assert state.counters.counts["pace_no_prompt_came_in"] == unmet


def step_of(rows: dict[str, int]) -> Any:
    """What a step says of itself in which nobody came in."""
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(rows.values()), num_scheduled_tokens=rows, scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )  # fmt: skip


def serve_one(scheduler: Any) -> None:
    """One step, whose one row's token comes out."""
    outputs = importlib.import_module("vllm.v1.outputs")
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    scheduler.update_from_output(
        output,
        outputs.ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[1] for _ in names],
        ),
    )  # fmt: skip


@BOTH
def test_costs_of_now_and_the_first_prompt_decide(version: str) -> None:
    """Other costs bound the next step; a paused scheduler has no bound."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT)
        state = state_of(config, version)
        scheduler = paced_scheduler(config, state)
        pacer = scheduler.kpolicy_pacer
        scheduler.add_request(make_request("a", 10, 80))
        serve_one(scheduler)
        scheduler.add_request(make_request("b", 2000, 3))
        assert pacer._bound() == LARGEST
        paused = scheduler._pause_state
        scheduler._pause_state = type(paused)(1)
        assert pacer._bound() is None
        scheduler._pause_state = paused
        state.install_costs(SLOW_HOST)
        assert pacer._bound() is None


@BOTH
def test_whoever_is_first_keeps_its_step_until_it_gives_way(version: str) -> None:
    """Other costs don't divide a prompt anew; another limit does, and so does a preemption, behind which it is new."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT)
        state = state_of(config, version, SLOW_HOST)
        scheduler = paced_scheduler(config, state)
        pacer = scheduler.kpolicy_pacer
        scheduler.add_request(make_request("a", 10, 80))
        serve_one(scheduler)
        scheduler.add_request(make_request("b", 2000, 3))
        assert pacer._bound() is None
        state.install_costs(SLOW_EAGER)
        assert pacer._bound() is None
        pacer._rows.first.num_preemptions += 1
        assert pacer._bound() == LARGEST
        state.install_costs(SLOW_HOST)
        assert pacer._bound() is None
        state.install_costs(SLOW_EAGER)
        scheduler.max_num_scheduled_tokens = LIMIT // 2
        assert pacer._bound() == LARGEST // 2


@BOTH
def test_the_line_tells_how_much_kv_there_is(version: str) -> None:
    """Each further step reads the decodes' KV again, and a prompt that has begun attends to what is computed of it."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT, blocks=2000)
        scheduler = paced_scheduler(config, state_of(config, version))
        scheduler.add_request(make_request("a", 200, 80))
        serve_one(scheduler)
        scheduler.add_request(make_request("b", 2000, 3))
        lines: list[tuple[int, Any]] = []

        def next_step(first: str, num_decodes: int, line: Any) -> int:
            del first
            lines.append((num_decodes, line))
            return LARGEST

        scheduler.kpolicy_pacer._pace = lambda _: SimpleNamespace(next_step=next_step, held=lambda *_: None)
        for _ in range(2):
            # Whatever was counted, the rows are looked at.
            scheduler.kpolicy_pacer._rows.kv = 0.0
            scheduler.schedule()
        room, done = LIMIT - 1, LARGEST - 1
        own = room * (room + 1) // 2
        assert lines == [(1, (1, room, 0, own, 201)), (1, (1, room, 0, own + room * done, 202))]


@BOTH
def test_whatever_goes_wrong_vllm_s_limit_is_back(version: str) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT)
        scheduler = paced_scheduler(config, state_of(config, version))
        scheduler.add_request(make_request("a", 10, 80))
        serve_one(scheduler)
        scheduler.add_request(make_request("b", 2000, 3))

        def fails() -> Any:
            assert scheduler.max_num_scheduled_tokens == LARGEST
            raise RuntimeError("out of blocks")

        with pytest.raises(RuntimeError, match="out of blocks"):
            scheduler.kpolicy_pacer.schedule(fails)
        assert scheduler.max_num_scheduled_tokens == LIMIT


@BOTH
def test_a_policy_that_raises_leaves_steps_to_vllm(version: str) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT)
        _, stock = serve(stock_scheduler(config), requests(2, longest=400), depth=1)
        state = state_of(config, version)
        state.select = lambda *_: 1 / 0  # type: ignore[assignment]
        _, worker = serve(paced_scheduler(config, state), requests(2, longest=400), depth=1)
        assert worker.steps == stock.steps
        assert state.counters.counts == {"pace_failed": 1}


@BOTH
def test_a_release_without_a_replica_is_bounded_by_the_objective_alone(version: str) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT)
        state = state_of(config, version)
        state.vllm_version = "0.25.1"
        _, worker = serve(paced_scheduler(config, state), requests(2, longest=400), depth=1)
        assert state.counters.counts["not_compared"] == 1
        assert max(mixed(worker)) > LARGEST


@BOTH
@pytest.mark.parametrize(
    ("ranks", "agreed", "bounded"),
    [
        (1, GraphKey(Part.FULL, 8, 8, query_len=1), 0),
        # Nobody decodes: a rank without rows votes for one decode, the smallest graph, or nothing was agreed on yet.
        (2, GraphKey(Part.FULL, 1, 1, query_len=1), 0),
        (2, None, 0),
        (2, GraphKey(Part.FULL, 8, 8, query_len=1), 8),
    ],
)
def test_a_rank_of_prompts_alone_is_bounded_where_others_decode(
    version: str, ranks: int, agreed: GraphKey | None, bounded: int
) -> None:
    """Others' decodes wait for it too; where nobody decodes, on any rank, prompts don't pay for them."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT, ranks=ranks, blocks=2000)
        state = state_of(config, version)
        small = GraphKey(Part.FULL, 1, 1, query_len=1)
        state.registry.plan([small])
        state.registry.capture(small, bytes=1, seconds=0.1, graphs=1, pool="vllm")
        scheduler = paced_scheduler(config, state)
        state.dispatcher = SimpleNamespace(agreed=agreed)
        for i in range(4):
            scheduler.add_request(make_request(f"a{i}", 3500, 2))
        tokens = []
        for _ in range(12):
            tokens.append(scheduler.schedule().total_num_scheduled_tokens)
            # With its prompts in them, ranks' steps are in pieces, which says nothing of others' decodes.
            state.dispatcher.agreed = GraphKey(Part.PIECEWISE, 64)
        assert tokens == [LARGEST] * bounded + [LIMIT] * (12 - bounded)


def rows_of(scheduler: Any, load: list[tuple[int, Any]], *, depth: int) -> list[dict[str, int]]:
    """Tokens of each request, by step."""
    steps: list[dict[str, int]] = []

    def noted(worker: Any) -> Any:
        def run(output: Any, known: dict[str, int]) -> Any:
            steps.append(dict(output.num_scheduled_tokens))
            return worker.run(output, known)

        return run

    serve(scheduler, load, depth=depth, runs=noted)
    return steps


def longest_wait(steps: list[dict[str, int]], name: str) -> int:
    """Most steps from one with the request in it to the next."""
    having = [i for i, step in enumerate(steps) if name in step]
    return max(after - before for before, after in itertools.pairwise(having))


def behind_a_prompt() -> list[tuple[int, Any]]:
    """A long prompt, a short one beside it that soon decodes, then more long ones."""
    load = [(0, make_request("long", 3000, 5)), (0, make_request("short", 20, 60))]
    return load + [(6, make_request(f"more{i}", 3000, 3)) for i in range(3)]


@BOTH
@KINDS
@pytest.mark.parametrize("threshold", [64, 128])
def test_decodes_behind_a_prompt_are_in_every_step(version: str, asynchronous: bool, threshold: int) -> None:
    """Under vLLM's threshold for long prompts steps are its own: a bounded one would be full before the decode."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, max_tokens=LIMIT, blocks=2000)
        config.scheduler_config.long_prefill_token_threshold = threshold
        depth = 2 if asynchronous else 1
        stock = rows_of(stock_scheduler(config), behind_a_prompt(), depth=depth)
        assert longest_wait(stock, "short") == 1
        state = state_of(config, version)
        # Even where nobody asked `why_not`, as decodes get behind a prompt in other ways too.
        steps = rows_of(paced_scheduler(config, state), behind_a_prompt(), depth=depth)
        assert longest_wait(steps, "short") == 1
        assert state.counters.counts["pace_decodes_behind_a_prompt"] > 5
        assert "long_prefill_token_threshold" in str(why_not(config))


@BOTH
@KINDS
def test_under_the_bound_every_decode_is_in_every_step(version: str, asynchronous: bool) -> None:
    """Prompts get what decodes leave of a bounded step, and not the other way about."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, max_tokens=LIMIT, blocks=2000)
        state = state_of(config, version)
        steps = rows_of(paced_scheduler(config, state), behind_a_prompt(), depth=2 if asynchronous else 1)
        first = next(i for i, step in enumerate(steps) if step.get("long") == 5 or "more0" in step)
        assert state.counters.counts["paced_steps"] > 20
        assert longest_wait(steps[first:], "short") == 1
        assert not state.counters.counts["pace_decodes_behind_a_prompt"]


@BOTH
def test_where_the_objective_weighs_the_gap_the_class_bounds(version: str) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=True)
        name = ours.qualname(config).rpartition(".")[2]
        vars(ours).pop(name, None)
        cls = getattr(ours, name)
        del vars(ours)[name]  # made of this release's class

        def made(given: dict[str, Any], **changed: Any) -> tuple[bool, bool]:
            made.count += 1  # type: ignore[attr-defined]
            config.additional_config = {"kpolicy": given}
            config.instance_id = f"paced-{version}-{made.count}"  # type: ignore[attr-defined]
            scheduler = make_scheduler(cls, config)
            return scheduler.kpolicy_pacer is not None, scheduler.kpolicy_turns is not None

        made.count = 0  # type: ignore[attr-defined]
        assert made({"objective": "latency"}) == (True, False)
        # One of the two: the bound is on steps of both kinds of row, and SPLIT leaves hardly any.
        assert made({"objective": "1:1", "split": True}) == (False, True)
        assert made({"objective": "latency", "pace": False, "split": True}) == (False, True)
        assert made({"split": True}) == (False, True)
        assert made({"pace": True}) == (True, False)
        config.scheduler_config.enable_chunked_prefill = False
        assert made({"pace": True}) == (False, False)
        config.scheduler_config.enable_chunked_prefill = True
        config.parallel_config.distributed_executor_backend = "mp"
        assert made({"pace": True}) == (False, False)


@BOTH
@KINDS
def test_beside_split_steps_are_those_of_split_alone(version: str, asynchronous: bool) -> None:
    """One of the two, which is said: decodes and prompts have steps of their own, and none is bounded."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, max_tokens=LIMIT, blocks=2000)
        cls = ours._made(ours.qualname(config).rpartition(".")[2])
        found = {}
        for pace in (False, True):
            config.additional_config = {"kpolicy": {"objective": "1:1", "split": True, "pace": pace}}
            config.instance_id = f"both-{version}-{asynchronous}-{pace}"
            scheduler = make_scheduler(cls, config)
            counts = started(scheduler.kpolicy_state, version).counters.counts
            scheduler.kpolicy_turns._rule = Always(1)
            found[pace] = rows_of(scheduler, behind_a_prompt(), depth=2 if asynchronous else 1)
            assert counts["split_prompt_steps"] > 20
            assert counts["not_paced"] == pace
            assert not counts["paced_steps"] + counts["pace_no_prompt_came_in"]
        assert found[True] == found[False]
        assert max(sum(step.values()) for step in found[True]) > LARGEST


def test_why_not() -> None:
    """Each reason says what is in the way."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
    )
    assert why_not(config, SimpleNamespace(need_mamba_block_aligned_split=False)) is None
    assert "split" in str(why_not(config, SimpleNamespace(need_mamba_block_aligned_split=False), apart=True))
    assert "blocks" in str(why_not(config, SimpleNamespace(need_mamba_block_aligned_split=True)))
    config.scheduler_config.enable_chunked_prefill = False
    assert "chunked" in str(why_not(config))
    config.parallel_config.distributed_executor_backend = "mp"
    assert "in-process" in str(why_not(config))


@BOTH
def test_vllm_s_own_rule_has_the_sizes_that_the_user_gave(version: str) -> None:
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT)
        state = state_of(config, version)
        assert vllm_s_own(config, state)[1] is None
        config.additional_config = {LISTED: [1, 8, 96]}
        policy, sizes = vllm_s_own(config, state)
        assert sizes is not None
        assert (sizes.decode, sizes.piecewise) == ((1, 8), (1, 8, 96))
        assert (policy.version, policy.runner) == (version, "v1")
        # vLLM takes any object there, of which only a mapping can have been told the sizes.
        config.additional_config = object()
        assert vllm_s_own(config, state)[1] is None
        state.runner.cudagraph_manager = object()
        assert vllm_s_own(config, state)[0].runner == "v2"
