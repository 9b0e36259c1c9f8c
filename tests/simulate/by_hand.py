"""A server as simply as it can be told: every KV block is a number, every token has its time, every step is a loop.

Nothing of `kpolicy.simulate` is in it but the draws of drafts. Steps take what their mode takes, whatever their size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.traces import TraceRequest
from kpolicy.simulate import Server
from kpolicy.simulate.drafts import drawn

FULL, PIECEWISE, EAGER, HOST_FULL, HOST_EAGER, REST, OVERLAP = 40.0, 200.0, 70.0, 20.0, 230.0, 30.0, 0.5
CAPTURE_US, GRAPH_BYTES = (1000.0, 3000.0), (1000, 2000)
ALIKE = CostTable(
    version="alike",
    measured=True,
    full=Curve((1, 64), (FULL, FULL)),
    piecewise=Curve((1, 64), (PIECEWISE, PIECEWISE)),
    eager=Curve((1, 64), (EAGER, EAGER)),
    host_full=HostCost(HOST_FULL),
    host_piecewise=HostCost(130.0),
    host_eager=HostCost(HOST_EAGER),
    step_us=REST,
    overlap_cost=OVERLAP,
    capture_us=CAPTURE_US,
    graph_bytes=GRAPH_BYTES,
)
"""Every step of a mode takes as long as another: FULL and PIECEWISE are the device's, EAGER is the host's."""
ROWS, PIECES = (1, 2, 4), (4, 8, 16)
"""Capture sizes: decode rows, and tokens of pieces"""


def sizes(query_len: int) -> CaptureSizes:
    return CaptureSizes(tuple(rows * query_len for rows in ROWS), (), PIECES)


@attrs.define(eq=False)
class One:
    """A request, and when each of its tokens was there."""

    index: int
    arrival_us: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: Sequence[int]
    until: int
    computed: int = 0
    preempted: int = 0
    admitted: int = 0
    own: list[int] = attrs.field(factory=list)
    """Blocks, by number"""
    held: list[int] = attrs.field(factory=list)
    """Hash ids whose blocks are shared"""
    times: list[float] = attrs.field(factory=list)
    draws: list[int] = attrs.field(factory=list)

    @property
    def generated(self) -> int:
        return len(self.times)


class Rank:
    """One rank's requests and blocks."""

    def __init__(self, server: Server, num_blocks: int, seed: int) -> None:
        self.server, self.seed = server, seed
        self.most_tokens, self.q = server.settings.max_num_tokens, server.settings.query_len
        self.most_reqs = min(server.settings.max_num_reqs, self.most_tokens // self.q)
        self.free, self.num_blocks = list(range(num_blocks)), num_blocks
        self.shared: dict[int, list[int]] = {}
        """Blocks of each cached hash id"""
        self.users: Counter[int] = Counter()
        self.unused: list[int] = []
        """Cached hash ids that nobody uses, least recently used first"""
        self.waiting: list[One] = []
        self.prompts: list[One] = []
        self.decodes: list[One] = []
        self.admissions = self.preemptions = self.prompt_tokens = self.reused = 0

    @property
    def running(self) -> list[One]:
        return self.decodes + self.prompts

    def room(self) -> int:
        return len(self.free) + sum(len(self.shared[hash_id]) for hash_id in self.unused)

    def has(self, request: One) -> int:
        return len(request.own) + sum(len(self.shared[hash_id]) for hash_id in request.held)

    def grow(self, request: One, tokens: int) -> bool:
        """Give it blocks for so many tokens, or nothing."""
        need = -(-tokens // self.server.block_size) - self.has(request)
        if need > self.room():
            return False
        for _ in range(need):
            while not self.free:
                self.free += self.shared.pop(self.unused.pop(0))
            request.own.append(self.free.pop())
        return True

    def forget(self, request: One) -> None:
        self.free += request.own
        for hash_id in reversed(request.held):
            self.users[hash_id] -= 1
            if not self.users[hash_id]:
                self.unused.append(hash_id)
        request.own, request.held, request.computed = [], [], 0

    def give_way(self, request: One) -> None:
        self.decodes = [each for each in self.decodes if each is not request]
        self.prompts = [each for each in self.prompts if each is not request]
        self.forget(request)
        request.until = request.prompt_tokens + request.generated
        request.preempted += 1
        self.preemptions += 1
        self.waiting.insert(0, request)

    def plan(self) -> tuple[list[One], list[tuple[One, int]], int]:
        """Decode rows, prompt chunks and the decode steps that may run at once."""
        before = self.preemptions
        for request in list(self.decodes):
            while request in self.decodes and not self.grow(request, self.kv_of(request)):
                self.give_way(max(self.running, key=lambda each: each.admitted))
        budget = self.most_tokens - self.q * len(self.decodes)
        chunks = self.chunks(budget, admit=self.preemptions == before)
        while not self.decodes and not chunks and len(self.prompts) > 1:
            self.give_way(self.prompts[-1])
            chunks = self.chunks(budget, admit=False)
        steps = 1
        if self.decodes and chunks and self.q == 1:
            most = min(self.server.steps_ahead, *(each.output_tokens - each.generated for each in self.decodes), 64)
            while steps < most:
                short = [each for each in self.decodes if self.short(each, self.kv_of(each) + steps)]
                if 2 * len(short) > self.room():
                    break
                for each in short:
                    assert self.grow(each, self.kv_of(each) + steps)
                steps += 1
        return list(self.decodes), chunks, steps

    def kv_of(self, request: One) -> int:
        """What its next step attends to: all of its tokens but the last, that one, and its drafts."""
        return request.prompt_tokens + request.generated - 1 + self.q

    def short(self, request: One, tokens: int) -> bool:
        return tokens > self.has(request) * self.server.block_size

    def chunks(self, budget: int, *, admit: bool) -> list[tuple[One, int]]:
        found = []
        for request in self.prompts:
            new = self.allot(request, budget)
            if new:
                found.append((request, new))
                budget -= new
        while admit and self.waiting and budget > 0 and len(self.running) < self.most_reqs:
            request = self.waiting[0]
            self.match(request)
            new = self.allot(request, budget)
            if not new:
                self.forget(request)
                break
            self.admissions += 1
            request.admitted = self.admissions
            if not request.preempted:
                self.prompt_tokens += request.prompt_tokens
                self.reused += request.computed
            self.prompts.append(self.waiting.pop(0))
            found.append((request, new))
            budget -= new
        return found

    def match(self, request: One) -> None:
        if self.server.reuse_prefixes:
            most = min(request.prompt_tokens, request.until - 1) // self.server.prefix_block
            for hash_id in request.hash_ids[:most]:
                if hash_id not in self.shared:
                    break
                self.users[hash_id] += 1
                if hash_id in self.unused:
                    self.unused.remove(hash_id)
                request.held.append(hash_id)
                request.computed += self.server.prefix_block

    def allot(self, request: One, budget: int) -> int:
        new = min(budget, request.until - request.computed)
        while new > 0 and not self.grow(request, request.computed + new):
            new -= 1
        return max(new, 0)

    def publish(self, request: One, before: int) -> None:
        """Whole blocks of the prompt that were just computed are there for others, where no equal ones are."""
        size, per = self.server.prefix_block, self.server.prefix_block // self.server.block_size
        for i, hash_id in enumerate(request.hash_ids):
            whole = before < (i + 1) * size <= min(request.computed, request.prompt_tokens)
            if self.server.reuse_prefixes and whole and hash_id not in self.shared:
                self.shared[hash_id], request.own = request.own[:per], request.own[per:]
                self.users[hash_id] = 1
                request.held.append(hash_id)

    def take_in(
        self, plan: tuple[list[One], list[tuple[One, int]], int], tokens: Sequence[float], end_us: float
    ) -> list[One]:  # fmt: skip
        """Tokens come out; the requests that are done. `tokens`: when each decode step's were there."""
        decodes, chunks, _ = plan
        if self.q > 1:
            for request in decodes:
                # What a step brings a row at once is spread over its time.
                last_us, count = request.times[-1], request.draws.pop(0)
                request.times += [last_us + (tokens[0] - last_us) * (i + 1) / count for i in range(count)]
        else:
            for at_us in tokens:
                for request in decodes:
                    request.times.append(at_us)
        done = [each for each in decodes if each.generated == each.output_tokens]
        first = []
        for request, new in chunks:
            before, request.computed = request.computed, request.computed + new
            self.publish(request, before)
            if request.computed == request.until:
                request.times.append(end_us)
                first.append(request)
        for request in first:
            self.prompts.remove(request)
            self.decodes.append(request)
            if request.generated == request.output_tokens:
                done.append(request)
            elif self.q > 1:
                drafts = self.server.drafts
                request.draws = drawn(self.seed, request, self.q - 1, drafts.acceptance).tolist()
        for request in done:
            self.decodes.remove(request)
            self.forget(request)
        return done


@attrs.define
class Served:
    """What came of it."""

    requests: list[One] = attrs.field(factory=list)
    refused: int = 0
    span_us: float = 0.0
    modes: dict[str, list[float]] = attrs.field(factory=dict)
    """steps, tokens, padding, microseconds"""
    decode_steps: Counter[int] = attrs.field(factory=Counter)
    """Steps of decode rows alone of a rank, by their number"""
    drafted: int = 0
    delays: list[float] = attrs.field(factory=list)
    preemptions: int = 0
    prompt_tokens: int = 0
    reused: int = 0

    @property
    def ttft(self) -> list[float]:
        return [each.times[0] - each.arrival_us for each in self.requests]

    @property
    def gaps(self) -> list[float]:
        return [b - a for each in self.requests for a, b in zip(each.times, each.times[1:], strict=False)]

    def good(self, ttft_us: float, gap_us: float) -> int:
        """Requests whose first token and mean gap are in time."""
        return sum(
            each.times[0] - each.arrival_us <= ttft_us
            and (each.times[-1] - each.times[0]) <= gap_us * (each.generated - 1)
            for each in self.requests
        )

    @property
    def e2e(self) -> list[float]:
        return [each.times[-1] - each.arrival_us for each in self.requests]


def holding(sizes: Sequence[int], rows: int) -> int:
    return next(size for size in sizes if size >= rows)


def halves_us(form: str, steps: int) -> tuple[float, float]:
    """(until the decode rows have all of their tokens, until the step is over) of a step in halves."""
    if form == "in_turn":
        return FULL + REST, FULL + PIECEWISE + REST
    # The prompt begins when the host has launched the first decode step, which then has that much less to do.
    shorter, longer = sorted((steps * FULL - HOST_FULL, PIECEWISE))
    whole = HOST_FULL + longer + OVERLAP * shorter + REST
    return min(HOST_FULL + (1 + OVERLAP) * (steps * FULL - HOST_FULL) + REST, whole), whole


def serve(trace: Sequence[TraceRequest], policy: str, server: Server, seed: int) -> Served:
    """Serve a trace by `eager`, `piecewise`, or `split` of a form; the latter on one rank."""
    form = policy.partition("form=")[2] or "in_turn"
    # Of so many rows one graph holds a token each, with drafts one all of them, and one any number of them.
    full = len(ROWS) * (3 if server.settings.num_speculative_tokens else 1)
    graphs = {"eager": (0, 0), "piecewise": (0, len(PIECES))}.get(policy, (full, len(PIECES)))
    taken = sum(count * each for count, each in zip(graphs, GRAPH_BYTES, strict=True))
    kv_tokens = server.kv_tokens
    if server.kv_bytes_per_token is not None:
        kv_tokens -= -(-taken // server.kv_bytes_per_token)
    num_blocks = kv_tokens // server.block_size
    ranks = [Rank(server, num_blocks, seed) for _ in range(server.ranks)]
    free_us = [0.0] * (server.concurrency or 10**6)
    """When each client has nothing to wait for"""
    found, coming = Served(), list(trace)
    start_us = now_us = coming[0].arrival_s * 1e6 if coming else 0.0
    if not server.warm:
        now_us += sum(count * each for count, each in zip(graphs, CAPTURE_US, strict=True))
    while coming or any(rank.running or rank.waiting for rank in ranks):
        if coming and not any(rank.running or rank.waiting for rank in ranks):
            now_us = max(now_us, coming[0].arrival_s * 1e6)
        while coming and coming[0].arrival_s * 1e6 <= now_us and min(free_us) <= now_us:
            one = coming.pop(0)
            most = one.prompt_tokens + one.output_tokens - 1
            most += server.settings.query_len - 1 if one.output_tokens > 1 else 0
            if most > num_blocks * server.block_size:
                found.refused += 1
                continue
            client = free_us.index(min(free_us))
            came_us = max(one.arrival_s * 1e6, free_us[client])
            free_us[client] = float("inf")
            if came_us > one.arrival_s * 1e6:
                found.delays.append(came_us - one.arrival_s * 1e6)
            request = One(one.index, came_us, one.prompt_tokens, one.output_tokens, one.hash_ids, one.prompt_tokens)
            min(ranks, key=lambda rank: len(rank.running) + len(rank.waiting)).waiting.append(request)
        plans = [rank.plan() for rank in ranks]
        if not any(decodes or chunks for decodes, chunks, _ in plans):
            continue
        rows = [(server.settings.query_len * len(plan[0]), sum(new for _, new in plan[1])) for plan in plans]
        mode, steps, ready_us, us = decided(policy, form, plans)
        ready_us += server.scheduler_us or 0.0
        us += server.scheduler_us or 0.0
        if any(prompts for _, prompts in rows):
            ready_us += server.scheduler_prompt_us or 0.0
            us += server.scheduler_prompt_us or 0.0
        if server.settings.query_len > 1 and any(decodes for decodes, _ in rows):
            ready_us += server.drafts.draft_us
            us += server.drafts.draft_us
        sums = found.modes.setdefault(mode, [0, 0, 0, 0.0])
        largest = max(decodes + prompts for decodes, prompts in rows)
        for decodes, prompts in rows:
            whole = decodes + prompts
            if mode.startswith("split"):
                padded = steps * server.settings.query_len * holding(ROWS, decodes // server.settings.query_len)
                padded += holding(PIECES, prompts)
                whole += (steps - 1) * decodes
            elif mode == "full":
                padded = server.settings.query_len * holding(ROWS, decodes // server.settings.query_len)
            else:
                padded = whole if mode == "eager" else holding(PIECES, largest)
            sums[1] += whole
            sums[2] += padded - whole
        sums[0] += 1
        sums[3] += us
        for rank, plan in zip(ranks, plans, strict=True):
            found.drafted += server.settings.num_speculative_tokens * len(plan[0])
            if plan[0] and not plan[1]:
                found.decode_steps[len(plan[0])] += 1
            at_us = [now_us + ready_us * (i + 1) / steps for i in range(steps)]
            for request in rank.take_in(plan, at_us, now_us + us):
                free_us[free_us.index(float("inf"))] = request.times[-1]
                found.requests.append(request)
        now_us += us
    found.span_us = now_us - start_us if found.modes else 0.0
    found.preemptions = sum(rank.preemptions for rank in ranks)
    found.prompt_tokens = sum(rank.prompt_tokens for rank in ranks)
    found.reused = sum(rank.reused for rank in ranks)
    for rank in ranks:
        assert rank.room() == num_blocks, "no block is lost"
    return found


def decided(policy: str, form: str, plans: Sequence[Any]) -> tuple[str, int, float, float]:
    """(mode, decode steps, until its decode rows have their tokens, until it is over)."""
    if policy == "eager":
        return "eager", 1, HOST_EAGER + REST, HOST_EAGER + REST
    decodes, chunks, most = plans[0]
    if policy != "piecewise" and not chunks:
        return "full", 1, FULL + REST, FULL + REST
    steps = 2 if form == "decodes_beside" else 1
    if policy == "piecewise" or not decodes or most < steps:
        return "piecewise", 1, PIECEWISE + REST, PIECEWISE + REST
    return f"split/{form}", steps, *halves_us(form, steps)
