"""The batcher: nothing lost, nothing shared, no limit passed, everyone served, whatever comes in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.executors.simulated import SimulatedExecutor, reference_tokens, sampled_token
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.batching import Batch, Batcher, Generation
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape

VOCAB = 500
Step = Callable[[StepInputs], StepOutputs]


def sample(output: Any) -> int:
    return sampled_token(output, VOCAB)


def engine_for(limits: Settings, num_blocks: int, block_size: int, policy: str = "eager") -> Engine:
    executor = SimulatedExecutor(num_blocks=num_blocks, block_size=block_size, vocab=VOCAB)
    sizes = CaptureSizes(
        tuple(size for size in (1, 2, 4) if size <= min(limits.max_num_reqs, limits.max_num_tokens)),
        (),
        tuple(size for size in (4, 16) if size <= limits.max_num_tokens),
    )
    limits = attrs.evolve(limits, num_speculative_tokens=0)
    engine = Engine(policy, ladder=sizes, settings=limits, executor=executor)
    engine.capture()
    return engine


def prompt(index: int, length: int) -> list[int]:
    return [(index * 37 + i * i + 1) % VOCAB for i in range(length)]


def wanted(request: Generation, output_tokens: int | None = None) -> list[int]:
    """What the request must generate, computed from its prompt alone."""
    return reference_tokens(request.tokens[: request.num_prompt], output_tokens or request.output_tokens, vocab=VOCAB)


def check_inputs(batcher: Batcher, batch: Batch) -> None:
    """What holds for every batch: limits, order of rows, slots that are the row's own, and counts that agree."""
    inputs, limits, size = batch.inputs, batcher.settings, batcher.block_size
    rows = [*batch.decodes, *(request for request, _ in batch.chunks)]
    assert len(rows) == len(set(map(id, rows))) <= limits.max_num_reqs
    assert len(inputs.token_ids) <= limits.max_num_tokens
    assert list(inputs.query_lens) == [1] * len(batch.decodes) + [new for _, new in batch.chunks]
    starts = [len(request.tokens) - 1 for request in batch.decodes]
    starts += [request.num_computed for request, _ in batch.chunks]
    token = 0
    for request, start, query_len, kv_len in zip(rows, starts, inputs.query_lens, inputs.kv_lens, strict=True):
        positions = list(range(start, start + query_len))
        assert list(inputs.positions[token : token + query_len]) == positions
        assert list(inputs.token_ids[token : token + query_len]) == request.tokens[start : start + query_len].tolist()
        assert kv_len == start + query_len
        slots = [request.blocks[position // size] * size + position % size for position in positions]
        assert list(inputs.slot_mapping[token : token + query_len]) == slots
        token += query_len
    assert token == len(inputs.token_ids)
    check_ahead(batch, size)
    shape = BatchShape(
        decodes=[(1, len(batch.decodes))] if batch.decodes else (),
        prefills=[(new, request.num_computed) for request, new in batch.chunks],
        decode_kv_tokens=sum(inputs.kv_lens[: len(batch.decodes)]) if batch.decodes else None,
        max_kv_len=max(inputs.kv_lens),
        max_decode_steps=1 + len(inputs.slots_ahead),
        facts=inputs.numbers.facts,
    )
    assert inputs.numbers == shape.numbers


def check_ahead(batch: Batch, size: int) -> None:
    """Slots ahead are the next positions of each decode row, in blocks it owns, and none beyond what it generates."""
    for step, slots in enumerate(batch.inputs.slots_ahead, 1):
        for request, slot in zip(batch.decodes, slots, strict=True):
            position = len(request.tokens) - 1 + step
            assert slot == request.blocks[position // size] * size + position % size
            assert step < request.remaining


def check_blocks(batcher: Batcher) -> None:
    """Every block is free or one request's."""
    owned = [block for request in batcher.running for block in request.blocks]
    assert len(owned) == len(set(owned))
    assert len(owned) + batcher.free_blocks == batcher.num_blocks
    assert not set(owned) & set(batcher._free)
    assert not any(request.blocks for request in batcher.waiting)


def next_batch(batcher: Batcher) -> Batch | None:
    """The next batch, once order was checked: who gave way isn't in it, and nobody is overtaken."""
    before = {request.index: request.num_preempted for request in (*batcher.running, *batcher.waiting)}
    batch = batcher.next_batch()
    waiting = [request.index for request in batcher.waiting]
    running = [request.index for request in batcher.running]
    assert waiting == sorted(waiting)
    assert not running or not waiting or max(running) < waiting[0]
    if batch is not None:
        check_inputs(batcher, batch)
        rows = [*batch.decodes, *(request for request, _ in batch.chunks)]
        assert all(request.num_preempted == before[request.index] for request in rows)
    return batch


def drain(batcher: Batcher, step: Step, most_steps: int) -> list[Generation]:
    """Run until nothing is left; who finished, in order."""
    finished: list[Generation] = []
    for _ in range(most_steps):
        batch = next_batch(batcher)
        if batch is None:
            assert batcher.idle, "nothing to run, and requests are left"
            return finished
        finished += batcher.complete(batch, step(batch.inputs), sample).finished
        check_blocks(batcher)
    raise AssertionError(f"still running after {most_steps} steps")


def bound(requests: list[Generation]) -> int:
    """More steps than any fair schedule takes: every request could be computed anew once for each other one."""
    work = sum(request.num_prompt + request.output_tokens for request in requests)
    return 10 + work * (1 + len(requests))


@st.composite
def deployments(draw: st.DrawFn) -> tuple[Settings, int, int]:
    """Small limits and capacities: (settings, blocks, block size)."""
    limits = Settings(
        max_num_reqs=draw(st.integers(1, 6)),
        max_num_tokens=draw(st.integers(4, 24)),
        num_speculative_tokens=draw(st.sampled_from([0, 0, 2])),
    )
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    return limits, -(-draw(st.integers(8, 60)) // block_size), block_size


def lengths(capacity: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Requests that fit: (prompt tokens, tokens to generate)."""
    pair = st.tuples(st.integers(1, min(capacity, 40)), st.integers(1, 12))
    return st.lists(pair.filter(lambda pair: sum(pair) - 1 <= capacity), min_size=1, max_size=8)


@given(st.data(), deployments(), st.sampled_from(["eager", "auto", "split:form=decodes_beside", "full_and_piecewise"]))
@settings(max_examples=120, deadline=None)
def test_every_request_gets_its_own_tokens(data: st.DataObject, deployment: Any, policy: str) -> None:
    """Under any limits and capacity, every request generates what it would generate alone, and all blocks come back."""
    limits, num_blocks, block_size = deployment
    batcher = Batcher(limits, num_blocks=num_blocks, block_size=block_size)
    requests = [
        Generation(index, prompt(index, length), output)
        for index, (length, output) in enumerate(data.draw(lengths(batcher.capacity)))
    ]
    for request in requests:
        batcher.add(request)
    finished = drain(batcher, engine_for(limits, num_blocks, block_size, policy).step, bound(requests))
    assert sorted(request.index for request in finished) == list(range(len(requests)))
    for request in requests:
        assert request.generated == wanted(request)
    assert batcher.free_blocks == num_blocks


@given(st.data(), deployments())
@settings(max_examples=60, deadline=None)
def test_requests_start_in_the_order_they_came(data: st.DataObject, deployment: Any) -> None:
    """No request's first chunk runs before that of one that came earlier, preemptions or not."""
    limits, num_blocks, block_size = deployment
    batcher = Batcher(limits, num_blocks=num_blocks, block_size=block_size)
    drawn = data.draw(lengths(batcher.capacity))
    for index, (length, output) in enumerate(drawn):
        batcher.add(Generation(index, prompt(index, length), output))
    step, started = engine_for(limits, num_blocks, block_size).step, []
    while (batch := batcher.next_batch()) is not None:
        started += [request.index for request, _ in batch.chunks if request.index not in started]
        batcher.complete(batch, step(batch.inputs), sample)
    assert started == list(range(len(drawn)))


@given(st.integers(1, 6), st.integers(4, 24), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_speculation_changes_nothing(max_num_reqs: int, max_num_tokens: int, drafts: int) -> None:
    """The batcher schedules single-token decodes, whatever the deployment's drafts."""

    def schedule(num_speculative_tokens: int) -> list[StepInputs]:
        limits = Settings(
            max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens, num_speculative_tokens=num_speculative_tokens
        )
        batcher = Batcher(limits, num_blocks=10, block_size=4)
        for index in range(6):
            batcher.add(Generation(index, prompt(index, 3 + 2 * index), 5))
        step, batches = engine_for(limits, 10, 4).step, []
        while (batch := batcher.next_batch()) is not None:
            batches.append(batch.inputs._replace(block_table=[list(table) for table in batch.inputs.block_table]))
            batcher.complete(batch, step(batch.inputs), sample)
        return batches

    assert schedule(drafts) == schedule(0)


class Serving(RuleBasedStateMachine):
    """Requests come, are cancelled, also while their step runs, and steps go on, in any order."""

    @initialize(deployment=deployments(), policy=st.sampled_from(["eager", "split:form=decodes_beside"]))
    def start(self, deployment: Any, policy: str) -> None:
        limits, num_blocks, block_size = deployment
        self.batcher = Batcher(limits, num_blocks=num_blocks, block_size=block_size)
        self.engine = engine_for(limits, num_blocks, block_size, policy)
        self.requests: dict[int, Generation] = {}
        self.finished: list[int] = []
        self.cancelled: set[int] = set()

    @rule(length=st.integers(1, 30), output=st.integers(1, 8))
    def add(self, length: int, output: int) -> None:
        index = len(self.requests) + len(self.cancelled) + len(self.finished)
        request = Generation(index, prompt(index, length), output)
        if not self.batcher.fits(length, output):
            with pytest.raises(ConfigError, match="KV tokens"):
                self.batcher.add(request)
            return
        self.batcher.add(request)
        self.requests[index] = request

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.requests:
            self._cancel(data.draw(st.sampled_from(sorted(self.requests))))
        assert not self.batcher.cancel(10**6)

    def _cancel(self, index: int) -> None:
        assert self.batcher.cancel(index)
        del self.requests[index]
        self.cancelled.add(index)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(data=st.data())
    def cancel_while_it_runs(self, data: st.DataObject) -> None:
        def gone(batch: Batch) -> None:
            rows = [*batch.decodes, *(request for request, _ in batch.chunks)]
            for index in data.draw(st.sets(st.sampled_from([request.index for request in rows]), min_size=1)):
                self._cancel(index)

        self._step(gone)

    def _step(self, meanwhile: Callable[[Batch], None] | None = None) -> None:
        batch = next_batch(self.batcher)
        assert (batch is None) == (not self.requests)
        if batch is None:
            return
        outputs = self.engine.step(batch.inputs)
        if meanwhile is not None:
            meanwhile(batch)
        done = self.batcher.complete(batch, outputs, sample)
        for request in done.finished:
            del self.requests[request.index]
            self.finished.append(request.index)
            assert request.generated == wanted(request)
        assert not {request.index for request in done.first_tokens} & self.cancelled

    @invariant()
    def nothing_is_shared_or_lost(self) -> None:
        if not hasattr(self, "batcher"):
            return
        check_blocks(self.batcher)
        there = [request.index for request in (*self.batcher.running, *self.batcher.waiting)]
        assert sorted(there) == sorted(self.requests)
        for request in self.requests.values():
            assert request.generated == wanted(request)[: len(request.generated)]

    def teardown(self) -> None:
        if hasattr(self, "batcher"):
            left = list(self.requests.values())
            finished = drain(self.batcher, self.engine.step, bound(left))
            assert {request.index for request in finished} == set(self.requests)
            assert self.batcher.free_blocks == self.batcher.num_blocks


Serving.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestServing = Serving.TestCase


def test_decode_rows_come_first_and_prompts_are_chunked_under_the_budget() -> None:
    """With a decode under way, a long prompt takes what the budget leaves, step by step."""
    limits = Settings(max_num_reqs=4, max_num_tokens=8)
    batcher, engine = Batcher(limits, num_blocks=16, block_size=4, steps_ahead=1), engine_for(limits, 16, 4)
    batcher.add(Generation(0, prompt(0, 3), 10))
    batcher.complete(batch := batcher.next_batch(), engine.step(batch.inputs), sample)
    batcher.add(Generation(1, prompt(1, 20), 2))
    seen = []
    for _ in range(3):
        batch = batcher.next_batch()
        seen.append(list(batch.inputs.query_lens))
        batcher.complete(batch, engine.step(batch.inputs), sample)
    assert seen == [[1, 7], [1, 7], [1, 6]]
    assert [request.index for request in batcher.next_batch().decodes] == [0, 1]


def test_who_came_last_gives_way_and_is_computed_again() -> None:
    """When blocks run out the youngest request waits, and then generates what it would have."""
    limits = Settings(max_num_reqs=4, max_num_tokens=16)
    batcher, engine = Batcher(limits, num_blocks=4, block_size=4), engine_for(limits, 4, 4)
    old, young = Generation(0, prompt(0, 6), 8), Generation(1, prompt(1, 6), 8)
    batcher.add(old)
    batcher.add(young)
    finished = drain(batcher, engine.step, 100)
    assert [request.index for request in finished] == [0, 1]
    assert old.num_preempted == 0
    assert young.num_preempted == batcher.num_preemptions >= 1
    assert young.generated == wanted(young)


@pytest.mark.parametrize("block_size", [1, 8])
def test_a_request_that_fills_the_capacity_is_served(block_size: int) -> None:
    """A request of exactly the capacity, its last token needing no entry, runs alone and to its end."""
    limits = Settings(max_num_reqs=4, max_num_tokens=8)
    batcher = Batcher(limits, num_blocks=16 // block_size, block_size=block_size)
    request = Generation(0, prompt(0, 12), 5)
    batcher.add(request)
    batcher.add(Generation(1, prompt(1, 2), 3))
    assert len(drain(batcher, engine_for(limits, batcher.num_blocks, block_size).step, 100)) == 2
    assert request.generated == wanted(request)


def test_a_request_too_long_is_refused_by_name() -> None:
    """A request that can never fit is an error that says what it needs and what there is."""
    batcher = Batcher(Settings(), num_blocks=2, block_size=4)
    assert batcher.fits(8, 1)
    assert not batcher.fits(8, 2)
    with pytest.raises(ConfigError, match="request 7 needs 9 KV tokens and there are 8"):
        batcher.add(Generation(7, prompt(7, 8), 2))
    assert batcher.idle


@pytest.mark.parametrize(("tokens", "output"), [([], 1), ([1], 0), ([1], -1)])
def test_requests_without_tokens_are_refused(tokens: list[int], output: int) -> None:
    """A request needs a prompt and something to generate."""
    with pytest.raises(ConfigError, match="request 3"):
        Generation(3, tokens, output)


def test_a_request_cancelled_while_it_waits_may_come_again() -> None:
    """Nobody has it then; one whose step runs keeps what came of it, and its error says so."""
    batcher, request = Batcher(Settings(), num_blocks=4, block_size=4), Generation(0, [1, 2], 2)
    batcher.add(request)
    assert batcher.cancel(0)
    batcher.add(request)
    assert batcher.next_batch() is not None
    assert batcher.cancel(0)
    with pytest.raises(ConfigError, match="request 0 was added before, and what steps made of it stays"):
        batcher.add(request)


def test_a_request_is_added_once() -> None:
    """Twice in one step it would write its KV twice and take two tokens; one that was refused may come again."""
    batcher, small = Batcher(Settings(), num_blocks=4, block_size=4), Batcher(Settings(), num_blocks=1, block_size=4)
    request = Generation(5, [1, 2, 3], 3)
    with pytest.raises(ConfigError, match="request 5 needs 5 KV tokens"):
        small.add(request)
    batcher.add(request)
    for again in (batcher, Batcher(Settings(), num_blocks=4, block_size=4)):
        with pytest.raises(ConfigError, match="request 5 was added before"):
            again.add(request)
    batch = batcher.next_batch()
    assert batch is not None
    assert len(batch.chunks) == 1


def test_a_prompt_may_be_an_array() -> None:
    """Tokenizers give arrays of NumPy too, which have no truth value."""
    np = pytest.importorskip("numpy")
    assert Generation(3, np.array([5, 6]), 1).tokens.tolist() == [5, 6]
    with pytest.raises(ConfigError, match="request 3 has 0 prompt tokens"):
        Generation(3, np.array([], dtype=np.int64), 1)


@pytest.mark.parametrize(
    "arguments", [{"num_blocks": 0}, {"num_blocks": 1, "block_size": 0}, {"num_blocks": 1, "steps_ahead": 0}]
)
def test_a_capacity_of_nothing_is_refused(arguments: dict[str, int]) -> None:
    """Blocks, block size and steps ahead start at one."""
    with pytest.raises(ConfigError, match="start at 1"):
        Batcher(Settings(), **arguments)


def test_a_thousand_waiting_requests_are_served_in_order() -> None:
    """A long queue is served first come, first served, within a step for every few tokens."""
    limits = Settings(max_num_reqs=32, max_num_tokens=128)
    batcher, engine = Batcher(limits, num_blocks=64, block_size=4), engine_for(limits, 64, 4, "full_and_piecewise")
    requests = [Generation(index, prompt(index, 1 + index % 9), 1 + index % 3) for index in range(1000)]
    for request in requests:
        batcher.add(request)
    finished = drain(batcher, engine.step, 1000)
    assert len(finished) == 1000
    assert all(request.generated == wanted(request) for request in requests)


def test_steps_ahead_run_and_keep_the_pace() -> None:
    """Decode steps beside a prefill give several tokens a row in one step, none beyond what was asked for."""
    limits = Settings(max_num_reqs=4, max_num_tokens=20)
    batcher, engine = (
        Batcher(limits, num_blocks=32, block_size=4),
        engine_for(limits, 32, 4, "split:form=decodes_beside"),
    )
    fast = Generation(0, prompt(0, 4), 12)
    batcher.add(fast)
    batcher.complete(batch := batcher.next_batch(), engine.step(batch.inputs), sample)
    batcher.add(Generation(1, prompt(1, 40), 2))
    before, batch = len(fast.generated), batcher.next_batch()
    check_inputs(batcher, batch)
    outputs = engine.step(batch.inputs)
    batcher.complete(batch, outputs, sample)
    assert len(outputs.tokens) == outputs.decision.decode_steps > 1
    assert len(fast.generated) - before == len(outputs.tokens)
    drain(batcher, engine.step, 100)
    assert fast.generated == wanted(fast)


@pytest.mark.parametrize(
    ("max_num_reqs", "num_blocks", "told"),
    [(9, 32, 3), (4, 32, 2), (9, 11, 1), (2, 32, 0)],
    ids=["all fit", "two rows are free", "KV for one", "no row is free"],
)
def test_requests_that_wait_for_tokens_only_are_told(max_num_reqs: int, num_blocks: int, told: int) -> None:
    """Beside decodes and prompts `auto` is told how many waiting requests have KV and a row, in order of arrival."""
    limits = Settings(max_num_reqs=max_num_reqs, max_num_tokens=20)
    batcher, engine = Batcher(limits, num_blocks=num_blocks, block_size=4), engine_for(limits, num_blocks, 4)
    batcher.add(Generation(0, prompt(0, 4), 12))
    batcher.complete(batch := batcher.next_batch(), engine.step(batch.inputs), sample)
    for index, length in enumerate((19, 12, 8, 4), 1):
        batcher.add(Generation(index, prompt(index, length), 2))
    batch = batcher.next_batch()
    assert [request.index for request, _ in batch.chunks] == [1]
    assert batch.inputs.numbers.waiting_reqs == told


def test_decodes_alone_are_told_of_nobody() -> None:
    """Without prompts in the step nothing is decoded ahead, and no fact is made."""
    limits = Settings(max_num_reqs=1, max_num_tokens=20)
    batcher, engine = Batcher(limits, num_blocks=32, block_size=4), engine_for(limits, 32, 4)
    for index in range(2):
        batcher.add(Generation(index, prompt(index, 4), 12))
    batcher.complete(batch := batcher.next_batch(), engine.step(batch.inputs), sample)
    assert batcher.waiting
    assert (alone := batcher.next_batch()) is not None
    assert not alone.inputs.numbers.facts


def test_the_last_token_is_not_decoded_ahead() -> None:
    """Where a row has one token left, no slots are reserved ahead."""
    limits = Settings(max_num_reqs=4, max_num_tokens=20)
    batcher, engine = Batcher(limits, num_blocks=32, block_size=4), engine_for(limits, 32, 4)
    batcher.add(Generation(0, prompt(0, 4), 2))
    batcher.complete(batch := batcher.next_batch(), engine.step(batch.inputs), sample)
    batcher.add(Generation(1, prompt(1, 10), 2))
    batch = batcher.next_batch()
    assert batch.decodes
    assert batch.chunks
    assert not batch.inputs.slots_ahead
    assert batch.inputs.numbers.max_decode_steps == 1


def test_tokens_that_the_host_samples_are_taken_in() -> None:
    """Without a device sampler decode rows take what `sample` makes of their outputs."""
    limits = Settings(max_num_reqs=4, max_num_tokens=20)
    batcher, engine = Batcher(limits, num_blocks=32, block_size=4, steps_ahead=1), engine_for(limits, 32, 4)
    requests = [Generation(index, prompt(index, 5 + index), 6) for index in range(3)]
    for request in requests:
        batcher.add(request)
    drain(batcher, lambda inputs: engine.step(inputs)._replace(tokens=()), 100)
    assert all(request.generated == wanted(request) for request in requests)
