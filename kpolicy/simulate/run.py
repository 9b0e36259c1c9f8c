"""`simulate`: one policy serves a trace in simulated time, with the policy, ladder and registry code of production."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from kpolicy.attention.support import AttentionSupport, Claims
from kpolicy.budgets import Budget
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.decision import Decision
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError, RankError, check_kind
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import Policy, get_policy
from kpolicy.scheduling.gap_tail import GapTail
from kpolicy.scheduling.pace import EnginePace, OtherSelect
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.schemas import QueueState, StepEntry
from kpolicy.served_host import ServedHost
from kpolicy.settings import Objective
from kpolicy.shapes import LARGEST_COUNT, NO_FACTS, BatchNumbers, BatchShape
from kpolicy.simulate.account import Account
from kpolicy.simulate.graphs import counting_executor
from kpolicy.simulate.host_state import HostSpeeds, HostState
from kpolicy.simulate.queue import Queue, Step
from kpolicy.simulate.requests import Request, in_order
from kpolicy.simulate.result import SimResult
from kpolicy.simulate.rows import PlainRows
from kpolicy.simulate.server import Server, whole_number
from kpolicy.simulate.step_costs import Sides, StepCosts
from kpolicy.simulate.tally import Tally

__all__ = ["DecodeRun", "OnDecodes", "OnStep", "SimStep", "simulate"]

_NEVER = float("inf")
_IDLE = BatchShape().numbers
_AT_ONCE = 4096
"""Steps of a stretch at most, so that progress and percentiles are looked at now and then."""


class SimStep(NamedTuple):
    """One step of one rank, for step logs."""

    number: int
    rank: int
    start_us: float
    """From the first arrival"""
    cycle_us: float
    device_us: float
    host_us: float
    decision: Decision
    step: Step
    queue: Queue

    def entry(self) -> StepEntry:
        """As a step log has it."""
        queue = self.queue
        return StepEntry.of(
            self.number, self.step.shape(), self.decision, cycle_us=self.cycle_us, device_us=self.device_us,
            host_us=self.host_us,
            queue=QueueState(
                waiting=len(queue.waiting), running=queue.num_running, kv_tokens_used=queue.used_tokens,
                kv_tokens_capacity=queue.capacity, preempted=queue.num_preemptions,
            ),
        )  # fmt: skip


class DecodeRun(NamedTuple):
    """Steps of the same decode rows, one behind the other, with nothing in between: what `SimStep` says of them all."""

    number: int
    """Of the first step"""
    now_us: float
    """The clock when the first began, and what it counts from: a step begins at the difference of the two"""
    origin_us: float
    cycles_us: Sequence[float]
    decisions: Sequence[tuple[Decision, int]]
    """As they were decided in turn, each for so many steps"""
    numbers: BatchNumbers
    """Of the first step; each one after it has as many more KV tokens as there are rows"""
    queue: Queue

    @property
    def kv_tokens(self) -> int:
        """KV tokens that decode rows attended to, over all steps."""
        steps, rows = len(self.cycles_us), self.numbers.num_decodes
        return steps * self.numbers.decode_kv_tokens + rows * (steps * (steps - 1) // 2)


OnStep = Callable[[SimStep], object]
OnDecodes = Callable[[DecodeRun], object]
Progress = Callable[[int], object]
"""Called with the requests that are over, now and then."""


def simulate(
    trace: Trace | Iterable[TraceRequest],
    policy: str | Policy = "auto",
    *,
    server: Server | None = None,
    costs: CostTable | None = None,
    attention: str | AttentionSupport | Claims | None = None,
    ladder: CaptureSizes | Sequence[int] | None = None,
    objective: str | Objective = "throughput",
    budget: Budget | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    on_step: OnStep | None = None,
    on_decodes: OnDecodes | None = None,
    stepwise: bool = False,
    host_speed: HostSpeeds | None = None,
    eager_sizes: Collection[int] = (),
) -> SimResult:
    """Serve a trace in simulated time.

    Args:
        trace: the requests. An iterable is read as it is served, so its length costs no memory.
        policy: a policy or its name.
        server: limits, memory and what its users expect.
        costs: what launches take; the analytic table of an 8B model on an H200 by default.
        attention: as `Engine` takes it; likewise `ladder`, `objective` and `budget`.
        ladder: capture sizes; the policy's own by default.
        objective: what `auto` minimises.
        budget: what captured graphs may take.
        seed: of the accepted drafts, and of which note of the host's speed it begins at (`Server.steady_host`): 0 is
            the first.
        progress: told now and then how many requests are over.
        on_step: told each step of each rank.
        on_decodes: told the steps in which decode rows go on alone, all at once and in place of `on_step`, which
            saves most of the time of being told; some of these are told to `on_step` all the same.
        stepwise: go through the scheduler for each step, also where decode rows go on alone and nothing else can
            happen; the result is the same.
        host_speed: how fast the host was when, where that changed: each step's host times are those of its time
            (`CostTable.at_host_speed`), while decisions rest on `costs`, as in production. Steps then go one by one. By
            default it is what the costs noted while they were calibrated (`Server.steady_host`), if anything. It takes
            the place of `Server.slower_host`, beside which it is refused.
        eager_sizes: tokens of eager launches that the process ran before: they take no `StepEffects.eager_new_us`.

    Raises:
        ConfigError: an argument can't be used, requests are out of order, or graphs leave no KV.
    """
    server = Server() if server is None else server
    costs = analytic_costs() if costs is None else costs
    check_kind("server", server, Server, "kpolicy.simulate.Server(warm=True)")
    if isinstance(trace, str) or not isinstance(trace, Trace | Iterable):
        raise ConfigError(
            f"trace is {trace!r:.80}; it takes a Trace, as kpolicy.scheduling.traces.read_trace(FILE) is, or requests."
        )
    if host_speed is not None:
        check_kind("host_speed", host_speed, HostSpeeds, "HostSpeeds([(us, work_us)])")
        if server.slower_host != 1:
            raise ConfigError(
                f"host_speed says how fast the host was when, and slower_host is {server.slower_host:g} times as slow "
                "as the costs noted; give one of the two."
            )
    seed = whole_number("seed", seed, 0, LARGEST_COUNT)
    noted = server.host_speed(costs)
    speed = host_speed if host_speed is not None or noted is None else noted.begun_at(seed)
    engine = Engine(
        policy, attention=attention, ladder=ladder, settings=server.settings, costs=costs, objective=objective,
        executor=counting_executor(costs), budget=budget,
    )  # fmt: skip
    engine.capture()
    run = _Simulation(
        trace.requests if isinstance(trace, Trace) else trace, engine, server,
        seed=seed, on_step=on_step, on_decodes=on_decodes, host_speed=speed, eager_sizes=eager_sizes,
    )  # fmt: skip
    interrupted = ""
    told_each = on_step is not None and on_decodes is None
    try:
        run.serve(progress, stepwise=stepwise or told_each or host_speed is not None)
    except KeyboardInterrupt:
        interrupted = "interrupted from the keyboard"
    return run.account.result(
        policy=policy if isinstance(policy, str) else policy.name,
        source=trace.source if isinstance(trace, Trace) else "requests as given",
        seed=seed,
        queues=run.queues,
        span_s=(run.now_us - run.start_us) / 1e6 if run.steps else 0.0,
        interrupted=interrupted,
    )


class _Simulation:
    """The state of one run."""

    def __init__(
        self, requests: Iterable[TraceRequest], engine: Engine, server: Server, *, seed: int, on_step: OnStep | None,
        on_decodes: OnDecodes | None, host_speed: HostSpeeds | ServedHost | None, eager_sizes: Collection[int],
    ) -> None:  # fmt: skip
        self.costs = engine.costs
        self.hosts = [HostState(engine.costs, eager_sizes) for _ in range(server.ranks)]
        self.host_speed = host_speed
        self.work_us: float | None = None
        """What the fixed work takes now, where the host's speed was noted"""
        self.at_speed: dict[tuple[int, float], StepCosts] = {}
        """Costs of steps at speeds that come again, by which costs and the fixed work's time"""
        self.account = Account(engine, server)
        num_blocks = server.blocks(self.account.graph_bytes)
        drafts = server.drafts if server.settings.num_speculative_tokens else None
        self.queues = [
            Queue(
                server.settings, num_blocks=num_blocks, block_size=server.block_size, steps_ahead=server.steps_ahead,
                prefix_block=server.prefix_block if server.reuse_prefixes else 0, drafts=drafts, seed=seed,
            )
            for _ in range(server.ranks)
        ]  # fmt: skip
        self.scheduler_us, self.scheduler_prompt_us = server.outside_us(engine.costs)
        self.draft_us = 0.0 if drafts is None else drafts.draft_us
        self.compiled = engine.compiled
        if server.gap_tail and server.ranks == 1:
            # Several ranks agree without it.
            self.queues[0].gap_tail = GapTail()
        if server.pace is not None:
            other = OtherSelect(get_policy(server.pace))
            for queue in self.queues:
                queue.pace = EnginePace(engine, other)
        self.on_step, self.on_decodes = on_step, on_decodes
        self.arrivals = in_order(requests)
        self.upcoming: TraceRequest | None = None
        self.next_us = _NEVER
        self._look_ahead()
        self.start_us = self.now_us = 0.0 if self.upcoming is None else self.next_us
        if not server.warm:
            self.now_us += self.account.capture_s * 1e6
        self.steps = 0
        self.most_inside = _NEVER if server.concurrency is None else server.concurrency
        self.limited = server.concurrency is not None
        """Whether they may all wait, so that it is worth a look"""
        self.free_clients = self.most_inside
        """Clients that had nothing to wait for when the last step began"""

    def serve(self, progress: Progress | None, *, stepwise: bool) -> None:
        """Step until every request is served or refused."""
        queues, account = self.queues, self.account
        alone = queues[0] if len(queues) == 1 and not stepwise else None
        told = 0
        while True:
            if self.next_us <= self.now_us or self._idle:
                self._admit()
            if account.answers is not None:
                self.free_clients = self.most_inside - self._inside
                account.answers.clear()
            if alone is None or not self._stretch(alone):
                steps = [queue.next_step(self.now_us) for queue in queues]
                if any(steps):
                    self._step(steps)
                elif self.upcoming is None and self._idle:
                    break
            if progress is not None and self.steps - told >= _AT_ONCE:
                told = self.steps
                progress(account.served)
        if progress is not None:
            progress(account.served)

    @property
    def _idle(self) -> bool:
        """Whether no request is in the server."""
        # A loop, as a generator takes longer than all else that a step asks of idle queues.
        for queue in self.queues:  # noqa: SIM110
            if not queue.idle:
                return False
        return True

    @property
    def _inside(self) -> int:
        """Requests in the server."""
        return sum(queue.num_running + len(queue.waiting) for queue in self.queues)

    @property
    def _full(self) -> bool:
        """Whether every client waits for an answer."""
        return self._inside >= self.most_inside

    def _look_ahead(self) -> None:
        self.upcoming = next(self.arrivals, None)
        self.next_us = _NEVER if self.upcoming is None else self.upcoming.arrival_s * 1e6

    def _admit(self) -> None:
        """Queue what has arrived by now; with nothing to run, go to the next arrival."""
        if self.upcoming is not None and self._idle:
            self.now_us = max(self.now_us, self.next_us)
        answers = self.account.answers
        if answers:
            answers.sort()
        while self.upcoming is not None and self.next_us <= self.now_us and not (self.limited and self._full):
            came_us = self.next_us
            if self.free_clients <= 0 and answers:
                # Its client had its last answer in the step that just ended, and sends it then.
                came_us = max(came_us, answers[0])
            request = Request(self.upcoming, came_us)
            queue = self.queues[0]
            if len(self.queues) > 1:
                queue = min(self.queues, key=lambda each: each.num_running + len(each.waiting))
            if queue.fits(request):
                queue.add(request)
                if self.free_clients <= 0 and answers:
                    answers.pop(0)
                self.free_clients -= 1
                if came_us > self.next_us:
                    self.account.delay(came_us - self.next_us)
            else:
                self.account.refuse("over_kv_capacity")
            self._look_ahead()

    def _decide(self, numbers: Sequence[BatchNumbers]) -> list[Decision]:
        """A decision a rank; several ranks vote and decide from what was reduced, as in production."""
        compiled = self.compiled
        if len(numbers) == 1:
            return [compiled.select(*numbers[0])]
        reduced = [max(votes) for votes in zip(*map(compiled.vote, numbers), strict=True)]
        decisions = [compiled.agree(reduced, each) for each in numbers]
        first = decisions[0]
        if any(each.keys != first.keys or each.mode is not first.mode for each in decisions):
            raise RankError(f"ranks decided differently from {reduced}: {'; '.join(map(str, decisions))}.")
        return decisions

    def _step(self, steps: Sequence[Step | None]) -> None:
        """Run one step of all ranks: it takes as long as the slowest."""
        numbers = [_IDLE if step is None else step.numbers for step in steps]
        decisions = self._decide(numbers)
        start_us = self.now_us - self.start_us
        if self.host_speed is not None:
            self.work_us = self.host_speed.at(start_us)
        step_costs, costs = [], []
        for host, decision, count in zip(self.hosts, decisions, numbers, strict=True):
            of_step = host.costs(decision.mode, decision.launches, count)
            if self.host_speed is not None:
                of_step = self._at_speed_now(of_step)
            step_costs.append(of_step)
            costs.append(of_step.cost(decision.launches, count))
        slowest = costs[0] if len(costs) == 1 else max(costs, key=lambda each: each.cycle_us)
        us = slowest.cycle_us + self.scheduler_us
        if self.scheduler_prompt_us and any(each.num_prefills for each in numbers):
            us += self.scheduler_prompt_us
        if self.draft_us and any(each.num_decodes for each in numbers):
            us += self.draft_us
        self.now_us += us
        tallies = self.account.tallies
        for rank, (step, decision) in enumerate(zip(steps, decisions, strict=True)):
            tally = tallies.of(decision)
            if not rank:
                tallies.add(tally, us, host_bound=slowest.bound_by == "host")
                self._note_outside(tally, numbers)
            tallies.count(tally, numbers[rank])
            if step is None:
                continue
            queue = self.queues[rank]
            if self.on_step is not None:
                each = costs[rank]
                self.on_step(
                    SimStep(self.steps, rank, start_us, us, each.device_us, each.host_us, decision, step, queue)
                )
            after_us = 0.0
            if len(decision.launches) > 1:
                # Ranks go on together: what the slowest takes longer comes after this one's tokens too.
                after_us = slowest.cycle_us - step_costs[rank].decodes_ready_us(
                    decision.launches, numbers[rank], costs[rank].cycle_us
                )
            self.account.take(queue, step, tally.decode_steps, us, self.now_us, after_us)
        self.steps += 1

    def _at_speed_now(self, of_step: StepCosts) -> StepCosts:
        """Costs of a step on a host on which the fixed work takes as long as now."""
        work_us = self.work_us
        if work_us is None or isinstance(self.host_speed, HostSpeeds):
            # Between two notes it changes from step to step.
            return of_step.at_host_speed(work_us)
        # Those of a `HostState` live as long as it does.
        known = id(of_step), work_us
        found = self.at_speed.get(known)
        if found is None:
            found = self.at_speed[known] = of_step.at_host_speed(work_us)
        return found

    def _note_outside(self, tally: Tally, numbers: Sequence[BatchNumbers]) -> None:
        """Count a step of which any rank's size or contexts are outside what the cost table spans."""
        tallies, span = self.account.tallies, self.costs.kv_span
        sizes = contexts = False
        for each, queue in zip(numbers, self.queues, strict=True):
            sizes = sizes or tallies.size_outside(tally, each)
            if span is not None and not contexts:
                contexts = not span.holds(each, queue.rows.longest if each.num_decodes else 0)
        if sizes or contexts:
            tally.add_outside(1, sizes=sizes, contexts=int(contexts))

    def _stretch(self, queue: Queue) -> bool:
        """Run decode steps until something else can happen: an arrival, a row's end, or blocks running out.

        Every step is decided by itself, with the arithmetic of `CostTable.cost`; what is saved is the scheduler's
        work. False where no step was run.
        """
        rows = queue.rows
        if not isinstance(rows, PlainRows) or queue.prefilling or not rows.rows or queue.token_gaps.waited_us:
            return False
        num_rows = len(rows.rows)
        if queue.waiting and num_rows < queue.most_reqs:
            return False
        costs, account, host = self.costs, self.account, self.hosts[0]
        first = counter = rows.counter
        last = min(rows.next_end, first + _AT_ONCE)
        kv_tokens, needed_at, take = rows.kv_tokens, rows.needed, queue.blocks.take
        longest_less_counter = rows.longest - first
        # Where free blocks last for any steps up to there, they are taken for all of them at once.
        scarce = queue.blocks.free < rows.most_needed(last)
        scheduler_us, unit_us = self.scheduler_us, costs.decode_attention.unit_us
        speed = self.host_speed if isinstance(self.host_speed, ServedHost) else None
        at = None if speed is None else self._at_speed_now
        origin_us, slot = self.start_us, -1.0
        rows_us = costs.decode_attention.base_us + costs.decode_attention.row_us * num_rows
        now, select = self.now_us, self.compiled.select
        # With every client waiting nobody comes before a row's end.
        next_us = _NEVER if self.limited and self._full else self.next_us
        values = account.gap.values
        add_value, had = values.append, len(values)
        decisions: list[tuple[Decision, int]] = []
        begun = first
        numbers = None if self.on_decodes is None else queue.decode_numbers
        chosen: Decision | None = None
        tally: Tally | None = None
        dense_us = host_us = rest_us = total_us = total_host_us = 0.0
        later = Sides(host_us, dense_us, rest_us)
        since = host_bound = 0
        begins = False
        for counter in range(first, last):
            if now >= next_us:
                break
            decision = select(
                num_rows, 1, kv_tokens, num_rows, 0, 0, 0, 0, 1, longest_less_counter + counter, 0, 0, 0, 1,
                num_rows, num_rows, 1, NO_FACTS,
            )  # fmt: skip
            if decision is not chosen:
                if chosen is not None:
                    decisions.append((chosen, counter - begun))
                    begun = counter
                if tally is not None:
                    self._keep(
                        tally, num_rows, counter - since, total_us, host_bound, total_host_us, kv_tokens,
                        longest_less_counter + counter,
                    )  # fmt: skip
                tally = account.tallies.of(decision)
                if not tally.whole:
                    tally = None
                    break
                chosen, since, begins, host_bound = decision, counter, True, 0
                total_us, total_host_us = tally.us, tally.host_us
            if scarce and (needed := needed_at(counter)) and not take(needed):
                break
            if speed is not None and (now - origin_us) // speed.every_us != slot:
                slot, begins = (now - origin_us) // speed.every_us, True
                self.work_us = speed.at(now - origin_us)
            if begins:
                # This step may be the first of its mode or size; those after it aren't.
                (host_us, dense_us, rest_us), later = host.decodes(decision.mode, decision.launches[0], num_rows, at)
            device_us = dense_us + (rows_us + unit_us * kv_tokens)
            if host_us > device_us:
                us = host_us + rest_us + scheduler_us
                host_bound += 1
                total_host_us += us
            else:
                us = device_us + rest_us + scheduler_us
            if begins:
                (host_us, dense_us, rest_us), begins = later, False
            total_us += us
            now += us
            add_value(us)
            kv_tokens += num_rows
        else:
            counter = last
        if tally is not None:
            self._keep(
                tally, num_rows, counter - since, total_us, host_bound, total_host_us, kv_tokens,
                longest_less_counter + counter,
            )  # fmt: skip
        ran = counter - first
        if not ran:
            return False
        if not scarce:
            take(rows.needed_until(counter))
        account.gap.weights.extend(repeat(num_rows, ran))
        if self.on_decodes is not None and numbers is not None:
            if chosen is not None and counter > begun:
                decisions.append((chosen, counter - begun))
            told = [each for each in decisions if each[1]]
            self.on_decodes(DecodeRun(self.steps, self.now_us, self.start_us, values[had:], told, numbers, queue))
        self.now_us = now
        self.steps += ran
        account.tokens += num_rows * ran
        account.decode_steps[num_rows] = account.decode_steps.get(num_rows, 0) + ran
        account.gap.settle()
        if queue.gap_tail is not None:
            queue.gap_tail.without_prompts(num_rows * ran)
        for request in queue.advance(ran):
            account.finish(request, now)
        return True

    def _keep(
        self, tally: Tally, num_rows: int, steps: int, us: float, host_bound: int, host_us: float, kv_tokens: int,
        longest: int,
    ) -> None:  # fmt: skip
        """Put the sums of decode steps that were decided alike into their tally.

        `kv_tokens` and `longest` are those of the step after them.
        """
        tally.us, tally.host_us = us, host_us
        tally.steps += steps
        tally.rank_steps += steps
        tally.host_bound += host_bound
        tally.tokens += num_rows * steps
        if tally.padded:
            tally.padding += (tally.padded - num_rows) * steps
        span = self.costs.kv_span
        beyond = 0 if span is None else span.outside(steps, num_rows, kv_tokens - num_rows * steps, longest - steps)
        sizes = tally.outside_for(num_rows)
        if sizes or beyond:
            tally.add_outside(steps, sizes=sizes, contexts=beyond)
