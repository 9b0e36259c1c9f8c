"""The main job: a request trace through continuous batching and an Engine, step by step, with every output checked.

The clock starts at the first arrival, each step advances it by the step's time, and where nothing runs it jumps to
the next arrival. On a simulated device a step's time is the executor's (`ExecutorClock`), on a real one all that passed
since the step before, host work included (`WallClock`). Requests come when the trace says, whatever the policy, so
policies are compared on the same arrivals.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import Any, Protocol

import attrs

from kpolicy.engine import Engine
from kpolicy.errors import KPolicyError, StickyDeviceError
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.executors.simulated import reference_tokens, sampled_token
from kpolicy.heap import frozen_heap
from kpolicy.observe import ModeStats
from kpolicy.reasons import Basis
from kpolicy.scheduling.batching import Batch, Batcher, Generation
from kpolicy.scheduling.token_gaps import TokenGaps
from kpolicy.scheduling.traces import Trace

__all__ = [
    "Checks",
    "Clock",
    "ExecutorClock",
    "OnStep",
    "Prompts",
    "RunResult",
    "WallClock",
    "serve_trace",
    "weighted_percentile",
]

MOST_CHECKED = 2000
"""Requests compared with the reference, at most, evenly spread over those served."""

Progress = Callable[[int, int], None]
"""Called with (requests finished, requests in all), now and then."""
OnStep = Callable[[int, StepInputs, StepOutputs, Batcher, float], object]
"""Called after each step with its index, inputs, outputs, the batcher and the step's start in microseconds from the
run's. What it takes isn't the run's time. A generation that it cancels counts as such."""


class Clock(Protocol):
    """What time a run goes by."""

    def step_us(self, outputs: StepOutputs) -> float:
        """Microseconds that have passed since the step before; waits for the step's outputs."""
        ...

    def pause(self) -> None:
        """What follows isn't the run's time."""
        ...

    def resume(self) -> None: ...


class ExecutorClock:
    """Steps take what the executor says, and nothing else takes time."""

    def step_us(self, outputs: StepOutputs) -> float:
        return outputs.cycle_us

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass


class WallClock:
    """The time of this process, without that between `pause` and `resume`.

    A step's time goes from the end of the step before to its own end, so scheduling and deciding are in it.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._paused = self._since

    def step_us(self, outputs: StepOutputs) -> float:
        for event in outputs.ready:
            event.wait()
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        return passed * 1e6

    def pause(self) -> None:
        self._paused = time.perf_counter()

    def resume(self) -> None:
        self._since += time.perf_counter() - self._paused


class PromptSource(Protocol):
    """Where prompts come from."""

    @property
    def vocab(self) -> int: ...

    def of(self, index: int, num_tokens: int, hash_ids: Sequence[int] = ()) -> Sequence[int]:
        """The prompt of the trace's index-th request: `num_tokens` token ids."""
        ...


class Prompts:
    """Prompt token ids for requests of which only lengths are known: seeded, and equal where prefix blocks are.

    Args:
        seed: another seed gives other tokens.
        vocab: ids are below this.
        block: tokens a `hash_ids` block stands for (512 in Mooncake traces).
    """

    def __init__(self, seed: int = 0, vocab: int = 4096, block: int = 512) -> None:
        self._pool = array("q", random.Random(seed).choices(range(vocab), k=1 << 18))  # noqa: S311 - not for secrets
        self._block = block
        self.seed = seed
        self.vocab = vocab

    def of(self, index: int, num_tokens: int, hash_ids: Sequence[int] = ()) -> array[int]:
        """The prompt of one request."""
        tokens = array("q")
        for hash_id in hash_ids[: num_tokens // self._block]:
            tokens += self._slice(hash_id * 40_503 + 1, self._block)
        return tokens + self._slice(index * 7_919, num_tokens - len(tokens))

    def _slice(self, start: int, num_tokens: int) -> array[int]:
        size, tokens = len(self._pool), array("q")
        start %= size
        while num_tokens > 0:
            piece = self._pool[start : start + num_tokens]
            tokens += piece
            num_tokens -= len(piece)
            start = 0
        return tokens


@attrs.frozen
class Checks:
    """Launches of one mode whose logits and written KV were compared with EAGER's, and those that differed."""

    checks: int = 0
    failures: int = 0


@attrs.frozen(kw_only=True)
class RunResult:
    """What one policy made of a trace. Times are the clock's, in microseconds, unless they say seconds.

    Args:
        policy: the policy's name, with its arguments.
        repeat: which of its turns it was, where it has several (``kpolicy run --repeats``).
        served: requests that got all their tokens.
        refused: requests handed back, by reason; those that were cancelled too.
        tokens: tokens generated.
        modes: steps, tokens, padding and time by mode.
        reasons: steps by reason.
        eager_halves: why prefill halves of splits ran eagerly, in steps.
        span_s: from the first arrival to the last token.
        ttft_us, gap_us: p50 and p99 of time to first token, and of the time between a request's tokens, by when each
            was there: see `kpolicy.scheduling.token_gaps`.
        graphs, graphs_used: captured graphs, and those that replayed at least once.
        graphs_captured: of them, those that were captured for this turn; a later one has its first turn's.
        unused: the graphs that never replayed, in words.
        not_captured: planned graphs that couldn't be had, by reason.
        graph_bytes: what they take.
        capture_s: seconds of capture, for this turn.
        preemptions: requests that gave their KV back and were computed again.
        checked, wrong: requests whose tokens were compared with the reference, and those that differed.
        replay_failures: graphs that failed before launch; the steps ran all the same.
        basis: what the decisions took for granted.
        wall_s: this process's time, what isn't the run's included.
        outside_us: the clock's time of all steps that wasn't the executor's: scheduling, deciding, counting. 0 where
            the clock is the executor's.
        prompt_steps, outside_prompts_us: steps with prompts, and what of `outside_us` was theirs: a prompt's tokens are
            laid out and its first token is taken in, so that they take more.
        interrupted: whether it ended before the trace did, and why.
        outside: steps outside what the cost table was made for, by size or by context, where a simulated device takes
            times from one; None where steps are measured.
        outside_sizes: those with a size that its curves don't span.
        outside_contexts: those with a context beyond its `kv_span`; None too where it was measured and doesn't record
            it.
        verified: what was compared with EAGER, by mode; empty where nothing was.
        core_wait_s: where a model is served, seconds that this process's threads together waited for a core meanwhile;
            None where that isn't known.
    """

    policy: str
    served: int
    refused: Mapping[str, int]
    tokens: int
    modes: Mapping[str, ModeStats]
    reasons: Mapping[str, int]
    eager_halves: Mapping[str, int]
    span_s: float
    ttft_us: tuple[float, float]
    gap_us: tuple[float, float]
    graphs: int
    graphs_used: int
    graphs_captured: int
    unused: tuple[str, ...]
    not_captured: Mapping[str, int]
    graph_bytes: int
    capture_s: float
    preemptions: int
    checked: int
    wrong: tuple[int, ...]
    replay_failures: int
    basis: Basis
    wall_s: float
    outside_us: float = 0.0
    prompt_steps: int = 0
    outside_prompts_us: float = 0.0
    interrupted: str = ""
    outside: int | None = None
    outside_sizes: int | None = None
    outside_contexts: int | None = None
    verified: Mapping[str, Checks] = attrs.field(factory=dict)
    core_wait_s: float | None = None
    repeat: int = 1

    @property
    def steps(self) -> int:
        return sum(stats.steps for stats in self.modes.values())

    @property
    def step_us(self) -> float:
        """Time of all steps."""
        return sum(stats.us for stats in self.modes.values())

    @property
    def padding(self) -> int:
        return sum(stats.padding for stats in self.modes.values())

    @property
    def tokens_computed(self) -> int:
        """Tokens of all steps, prompts included, without padding."""
        return sum(stats.tokens for stats in self.modes.values())

    def as_dict(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        values = attrs.asdict(self, filter=lambda attribute, _value: attribute.name not in ("modes", "basis"))
        values["modes"] = {mode: attrs.asdict(stats) for mode, stats in self.modes.items()}
        values["assumes"] = list(self.basis.names)
        return values


class _Run:
    """The state of one run."""

    def __init__(
        self, trace: Trace, engine: Engine, batcher: Batcher, prompts: PromptSource, clock: Clock,
        stop_tokens: AbstractSet[int],
    ) -> None:  # fmt: skip
        self.engine = engine
        self.batcher = batcher
        self.prompts = prompts
        self.clock = clock
        self.stop_tokens = stop_tokens
        self.arrivals = trace.requests
        self.next = 0
        self.next_us = -math.inf
        self.now_us = self.arrivals[0].arrival_s * 1e6 if self.arrivals else 0.0
        self.start_us = self.now_us
        self.refused: dict[str, int] = {}
        self.ttft_us: list[float] = []
        self.gaps: dict[float, int] = {}
        self.token_gaps = TokenGaps()
        self.last_us: dict[int, float] = {}
        self.served: list[Generation] = []
        self.added = 0
        self.tokens = 0
        self.step_us = 0.0
        """The clock's time of the last step"""
        self.outside_us = self.outside_prompts_us = 0.0
        self.prompt_steps = 0

    def advance(self, outputs: StepOutputs, *, prompts: bool) -> float:
        """Advance the clock by a step; its start, in microseconds from the run's.

        Args:
            outputs: what it gave.
            prompts: whether there were prompts in it.
        """
        self.step_us = passed = self.clock.step_us(outputs)
        cycle_us = outputs.cycle_us
        self.now_us += passed
        outside_us = max(passed - cycle_us, 0.0)
        self.outside_us += outside_us
        if prompts:
            self.prompt_steps += 1
            self.outside_prompts_us += outside_us
        # The first step's comes out a rounding below 0 at times.
        return max(self.now_us - self.start_us - min(cycle_us, passed), 0.0)

    def admit(self) -> None:
        """Queue what has arrived by now; with nothing to run, go to the next arrival."""
        arrivals, batcher = self.arrivals, self.batcher
        if self.next < len(arrivals) and batcher.idle:
            self.now_us = max(self.now_us, arrivals[self.next].arrival_s * 1e6)
        while self.next < len(arrivals) and arrivals[self.next].arrival_s * 1e6 <= self.now_us:
            request = arrivals[self.next]
            if batcher.fits(request.prompt_tokens, request.output_tokens):
                prompt = self.prompts.of(self.next, request.prompt_tokens, request.hash_ids)
                batcher.add(Generation(self.next, prompt, request.output_tokens))
                self.added += 1
            else:
                self.refused["over_kv_capacity"] = self.refused.get("over_kv_capacity", 0) + 1
            self.next += 1
        self.next_us = arrivals[self.next].arrival_s * 1e6 if self.next < len(arrivals) else math.inf

    def account(self, batch: Batch, outputs: StepOutputs) -> None:
        """Take the tokens in, note first tokens and gaps."""
        steps = len(outputs.tokens) if outputs.tokens else 1
        ready, num_decodes = outputs.ready, len(batch.decodes)
        after_us = outputs.cycle_us - ready[0].us if len(ready) > 1 else 0.0
        done = self.batcher.complete(batch, outputs, self.sample)
        if num_decodes:
            # Decodes never wait, so a decode row's last token came in the step before.
            alone = not self.token_gaps.waited_us and not batch.chunks
            found = self.token_gaps.step(self.step_us, num_decodes, steps, after_us)
            for gap, count in found:
                self.gaps[gap] = self.gaps.get(gap, 0) + count
            if alone:
                self.batcher.gap_tail.without_prompts(num_decodes)
            else:
                for gap, count in found:
                    self.batcher.gap_tail.beside_prompts(gap, count)
            self.tokens += num_decodes * steps
        for request in done.first_tokens:
            self.tokens += 1
            last_us = self.last_us.pop(request.index, None) if request.num_preempted else None
            if last_us is None:
                self.ttft_us.append(self.now_us - self.arrivals[request.index].arrival_s * 1e6)
            else:
                gap = self.now_us - last_us
                self.gaps[gap] = self.gaps.get(gap, 0) + 1
        if done.first_tokens and self.token_gaps.waited_us:
            self.token_gaps.join(request.index for request in done.first_tokens if request.remaining > 0)
        self.served += done.finished
        if self.stop_tokens:
            self._end_early(batch.decodes, steps)
            self._end_early(done.first_tokens, 1)

    def _end_early(self, requests: Sequence[Generation], num_new: int) -> None:
        """Those whose new tokens have an end of text among them are served."""
        for request in requests:
            if not self.stop_tokens.isdisjoint(request.tokens[-num_new:]) and self.batcher.cancel(request.index):
                self.token_gaps.leave(request.index)
                self.served.append(request)

    def sample(self, output: Any) -> int:
        return sampled_token(output, self.prompts.vocab)

    def note_preempted(self) -> None:
        """Remember when requests that were just preempted had their last token."""
        for request in self.batcher.waiting:
            # One that was preempted before its first token has no last one; it still waits for the first.
            new = request.index not in self.last_us
            if new and request.num_preempted and len(request.tokens) > request.num_prompt:
                self.last_us[request.index] = self.now_us - self.token_gaps.leave(request.index)

    @property
    def left(self) -> int:
        """Requests that aren't finished."""
        return len(self.batcher.running) + len(self.batcher.waiting) + len(self.arrivals) - self.next

    def hand_back(self) -> None:
        """Count the requests that were cancelled."""
        batcher = self.batcher
        cancelled = self.added - len(self.served) - len(batcher.running) - len(batcher.waiting)
        if cancelled:
            self.refused["cancelled"] = cancelled


def serve_trace(
    trace: Trace,
    engine: Engine,
    batcher: Batcher,
    prompts: PromptSource,
    *,
    label: str = "",
    check: Callable[[Generation], bool] | None = None,
    progress: Progress | None = None,
    on_step: OnStep | None = None,
    clock: Clock | None = None,
    sampling: Callable[[Batch], Mapping[str, Sequence[float]]] | None = None,
    stop_tokens: AbstractSet[int] = frozenset(),
    before_step: Callable[[], None] | None = None,
    most_checked: int | None = MOST_CHECKED,
) -> RunResult:
    """Serve every request of a trace and say what happened.

    Args:
        trace: the requests; times are the clock's.
        engine: with an executor, captured.
        batcher: the scheduler, empty.
        prompts: token ids for the trace's lengths.
        label: what to call the policy.
        check: whether a finished request's tokens are right; None checks nothing.
        progress: told now and then how far it is.
        on_step: told each step, for step logs and checks.
        clock: the time to go by; the executor's by default.
        sampling: a batch's sampling inputs (`StepInputs.sampling`); greedy without.
        stop_tokens: token ids that end a request before it has all its tokens.
        before_step: called before each step; what it takes isn't the run's time.
        most_checked: requests that `check` gets at most, evenly spread over those served; None is all.
    """
    started = time.perf_counter()
    run = _Run(trace, engine, batcher, prompts, clock or ExecutorClock(), stop_tokens)
    interrupted, wrong, checked = "", [], 0
    total = len(trace.requests)
    try:
        run.clock.pause()
        with frozen_heap():
            run.clock.resume()
            _serve(run, sampling, before_step, on_step, progress)
    except KeyboardInterrupt:
        interrupted = "interrupted from the keyboard"
    except StickyDeviceError as error:
        interrupted = str(error)
        run.refused["device_lost"] = run.left
    except KPolicyError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's or device's own: it ends this run, and loses no result
        interrupted = f"a step failed: {type(error).__name__}: {error}"
        run.refused["step_failed"] = run.left
    run.hand_back()
    if check is not None:
        try:
            stride = 1 if most_checked is None else -(-len(run.served) // most_checked) or 1
            for request in run.served[::stride]:
                if not check(request):
                    wrong.append(request.index)
                checked += 1
        except KeyboardInterrupt:
            interrupted = "interrupted from the keyboard, while outputs were checked"
    if progress is not None:
        progress(len(run.served), total)
    return _result(label or engine.policy.name, run, checked, wrong, time.perf_counter() - started, interrupted)


def _serve(
    run: _Run,
    sampling: Callable[[Batch], Mapping[str, Sequence[float]]] | None,
    before_step: Callable[[], None] | None,
    on_step: OnStep | None,
    progress: Progress | None,
) -> None:
    """Step until every request is served or handed back."""
    engine, batcher, clock, total, steps = run.engine, run.batcher, run.clock, len(run.arrivals), 0
    while True:
        if run.next_us <= run.now_us or batcher.idle:
            run.admit()
        before = batcher.num_preemptions
        batch = batcher.next_batch()
        if batch is None:
            if run.next >= total and batcher.idle:
                return
            continue
        if batcher.num_preemptions != before:
            run.note_preempted()
        inputs = batch.inputs if sampling is None else batch.inputs._replace(sampling=sampling(batch))
        if before_step is not None:
            clock.pause()
            before_step()
            clock.resume()
        outputs = engine.step(inputs)
        start_us = run.advance(outputs, prompts=bool(batch.chunks))
        if on_step is not None:
            clock.pause()
            on_step(steps, inputs, outputs, batcher, start_us)
            clock.resume()
        run.account(batch, outputs)
        steps += 1
        if progress is not None and not steps & 255:
            progress(len(run.served), total)


def _result(label: str, run: _Run, checked: int, wrong: Sequence[int], wall_s: float, interrupted: str) -> RunResult:
    engine, registry = run.engine, run.engine.registry
    # First, because reading it counts the last steps, whose graphs were used.
    stats = engine.stats
    captured, unused = registry.captured(), registry.unused()
    lost: dict[str, int] = {}
    for record in registry.records():
        if record.reason is not None and record.state.value in ("failed", "withdrawn"):
            lost[record.reason.value] = lost.get(record.reason.value, 0) + 1
    gaps = sorted(run.gaps.items())
    first = sorted((value, 1) for value in run.ttft_us)
    return RunResult(
        policy=label,
        served=len(run.served),
        refused=run.refused,
        tokens=run.tokens,
        modes=stats.by_mode,
        reasons={reason: counted.steps for reason, counted in stats.by_reason.items()},
        eager_halves=stats.half_reasons,
        span_s=(run.now_us - run.start_us) / 1e6,
        ttft_us=(weighted_percentile(first, 50), weighted_percentile(first, 99)),
        gap_us=(weighted_percentile(gaps, 50), weighted_percentile(gaps, 99)),
        graphs=len(captured),
        graphs_used=len(captured) - len(unused),
        graphs_captured=len(captured),
        unused=tuple(str(key) for key in unused),
        not_captured=lost,
        graph_bytes=registry.totals().bytes_live,
        capture_s=sum(record.seconds for record in registry.records()),
        preemptions=run.batcher.num_preemptions,
        checked=checked,
        wrong=tuple(wrong),
        replay_failures=stats.replay_failures,
        basis=stats.basis,
        wall_s=wall_s,
        outside_us=run.outside_us,
        prompt_steps=run.prompt_steps,
        outside_prompts_us=run.outside_prompts_us,
        interrupted=interrupted,
    )


def weighted_percentile(values: Sequence[tuple[float, int]], percent: float) -> float:
    """The smallest value that at least `percent` of the weight doesn't exceed; 0 without values.

    Args:
        values: (value, weight), rising by value.
        percent: 0 to 100.
    """
    seen = list(accumulate(weight for _, weight in values))
    if not seen or not seen[-1]:
        return 0.0
    return values[min(bisect_left(seen, seen[-1] * percent / 100), len(values) - 1)][0]


def reference_check(prompts: Prompts, seed: int) -> Callable[[Generation], bool]:
    """A check of finished requests against the reference sequence, computed once a request for all policies."""
    expected: dict[int, list[int]] = {}

    def check(request: Generation) -> bool:
        wanted = expected.get(request.index)
        if wanted is None:
            wanted = expected[request.index] = reference_tokens(
                request.tokens[: request.num_prompt], request.output_tokens, seed=seed, vocab=prompts.vocab
            )
        return request.generated == wanted

    return check
