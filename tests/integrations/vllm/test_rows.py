"""Running requests in numbers: as if all had been looked at, without looking at them, on vLLM's own schedulers."""

from __future__ import annotations

import importlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy_vllm.rows import Rows
from tests.integrations.vllm.real_scheduler import make_request, schedulers, serve, vllm_config
from tests.integrations.vllm.test_pace import LIMIT, paced_scheduler, state_of, step_of
from tests.integrations.vllm.test_real_scheduler import BOTH, KINDS, requests
from tests.oracle.wheels import VLLM_WHEELS

pytest.importorskip("torch")
pytestmark = VLLM_WHEELS


def unfinished(scheduler: Any) -> list[str]:
    """Running requests with more than a token to compute, all looked at: their prompts or lost tokens aren't done."""
    return [
        request.request_id
        for request in scheduler.running
        if request.num_tokens + request.num_output_placeholders - request.num_computed_tokens > 1
    ]


def worker(requests: dict[str, Any]) -> Any:
    """A worker that takes what it is told for right, as one whose requests are aborted meanwhile."""

    def run(output: Any, _known: Any) -> Any:
        names = list(output.num_scheduled_tokens)
        return importlib.import_module("vllm.v1.outputs").ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[] if requests[name].is_prefill_chunk else [1] for name in names],
        )  # fmt: skip

    return lambda _: run


@BOTH
@KINDS
@pytest.mark.parametrize(
    ("blocks", "second_runner", "order"), [(2000, False, "fcfs"), (30, False, "fcfs"), (30, True, "priority")]
)
def test_rows_are_known_in_every_step(
    version: str, asynchronous: bool, blocks: int, second_runner: bool, order: str
) -> None:
    """With requests that end, are aborted, and with few blocks are preempted and come again."""
    with schedulers(version):
        config = vllm_config(
            version, asynchronous=asynchronous, max_tokens=LIMIT, blocks=blocks, second_runner=second_runner
        )
        config.scheduler_config.policy = order
        chance, steps, preempted = random.Random(blocks), 0, 0  # noqa: S311
        ended = importlib.import_module("vllm.v1.request").RequestStatus.FINISHED_ABORTED
        for seed in range(4):
            scheduler = paced_scheduler(config, state_of(config, version))
            rows, bound = scheduler.kpolicy_pacer._rows, scheduler.kpolicy_pacer._bound
            aborted: list[Any] = []

            def looked(
                scheduler: Any = scheduler, rows: Rows = rows, bound: Any = bound, aborted: Any = aborted
            ) -> Any:
                nonlocal steps
                found = bound()
                rows.refresh()
                assert rows.decodes + len(rows.prompts) == len(scheduler.running)
                # With one token left a prompt is still one, which its counts don't tell from a decode.
                left = {request.request_id: until - request.num_computed_tokens for request, until in rows.prompts}
                assert [name for name, tokens in left.items() if tokens != 1] == unfinished(scheduler)
                assert rows.waiting == len(scheduler.waiting)
                steps += bool(rows.decodes)
                if chance.random() < 0.03 and scheduler.running:
                    scheduler.finish_requests(chance.choice(scheduler.running).request_id, ended)
                return found

            scheduler.kpolicy_pacer._bound = looked
            load = requests(seed, count=12, longest=400)
            for _, request in load:
                request.priority = chance.randrange(3)
            serve(
                scheduler,
                load,
                depth=2 if asynchronous else 1,
                runs=worker({each.request_id: each for _, each in load}),
            )
            preempted += sum(request.num_preemptions for _, request in load)
            assert not scheduler.kpolicy_pacer._off
        assert steps > 100
        assert bool(preempted) == (blocks == 30)


@BOTH
def test_requests_that_came_in_another_way_are_counted(version: str) -> None:
    """Rows that no step told of are looked at, each of them, once."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, max_tokens=LIMIT)
        scheduler = paced_scheduler(config, state_of(config, version))
        rows = scheduler.kpolicy_pacer._rows
        status = importlib.import_module("vllm.v1.request").RequestStatus.RUNNING
        for name, computed in (("a", 10), ("b", 10), ("c", 4)):
            request = make_request(name, 10, 5)
            request.num_computed_tokens, request.status = computed, status
            scheduler.running.append(request)
        rows.refresh()
        assert ([request.request_id for request, _ in rows.prompts], rows.decodes, rows.kv) == (["c"], 2, 20)
        assert not rows.behind_a_prompt
        scheduler.running.append(scheduler.running.pop(0))
        assert rows.behind_a_prompt


def test_kv_of_a_row_that_joins() -> None:
    """A request counts as one that decodes, with its KV, once a step has computed its prompt."""
    request = SimpleNamespace(num_tokens=70, num_prompt_tokens=70, num_computed_tokens=40, status="running")
    scheduler = SimpleNamespace(running=[request], waiting=[])
    rows = Rows(scheduler)
    came = step_of({"r": 40})
    came.scheduled_new_reqs = ["r"]
    rows.ran(came)
    assert (rows.prompts, rows.decodes, rows.kv) == ([(request, 70)], 0, 0)
    request.num_computed_tokens = 70
    rows.ran(step_of({"r": 30}))
    assert (rows.prompts, rows.decodes, rows.kv) == ([], 1, 70)
    rows.ran(step_of({"r": 1}))
    assert rows.kv == 71


class Counting:
    """A request that counts how often it is looked at."""

    looks = 0
    num_output_placeholders, num_tokens, num_prompt_tokens, status = 0, 1001, 1000, "running"

    def __init__(self, computed: int) -> None:
        self._computed = computed

    @property
    def num_computed_tokens(self) -> int:
        Counting.looks += 1
        return self._computed


@pytest.mark.parametrize("count", [8, 100, 1000])
def test_kv_follows_the_rows_though_few_are_looked_at(count: int) -> None:
    """Steps look at nobody, `look` at 32 rows at most; once all were seen KV is that of the rows, whatever it was."""
    scheduler = SimpleNamespace(running=[Counting(1000 + i) for i in range(count)], waiting=[])
    rows = Rows(scheduler)
    rows.refresh()
    true = sum(1000 + i for i in range(count))
    assert (rows.decodes, rows.kv) == (count, true)
    rows.kv = 0.0
    Counting.looks, looks = 0, 0
    while rows.kv < true / 2:
        rows.look()
        looks += 1
        assert Counting.looks <= 32 * looks
        if rows.kv < true / 2:
            rows.ran(step_of({"r": 1}))
            for request in scheduler.running:
                request._computed += 1
        rows.refresh()
    assert Counting.looks == count
    assert looks == -(-count // 32)
    # Each row had a token in each step, those too that were seen before it.
    assert rows.kv == pytest.approx(true + count * (looks - 1))
    # A quarter leave, and take the mean.
    del scheduler.running[: count // 4]
    before, Counting.looks = rows.kv, 0
    rows.refresh()
    assert rows.kv == pytest.approx(before * 3 / 4)
    assert not Counting.looks
    scheduler.running.clear()
    rows.refresh()
    rows.look()
    assert (rows.decodes, rows.kv) == (0, 0.0)
