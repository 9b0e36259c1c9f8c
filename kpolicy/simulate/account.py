"""What a simulation adds up: latencies, tokens, steps by shape, and the result made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kpolicy.engine import Engine
from kpolicy.observe import ModeStats
from kpolicy.reasons import Basis
from kpolicy.registry import GraphState
from kpolicy.simulate.drafts import DraftedRows
from kpolicy.simulate.percentiles import EXACT_REQUESTS, Percentiles
from kpolicy.simulate.queue import Queue, Step
from kpolicy.simulate.requests import Request
from kpolicy.simulate.result import Bound, Goodput, SimResult
from kpolicy.simulate.server import Server
from kpolicy.simulate.tally import Tallies

__all__ = ["Account"]

_NEVER = float("inf")


class Account:
    """The sums of one run."""

    def __init__(self, engine: Engine, server: Server) -> None:
        self._engine, self._server = engine, server
        self.capture_s = sum(record.seconds for record in engine.registry.records())
        self.graph_bytes = engine.registry.totals().bytes_live
        self.tallies = Tallies(engine.costs)
        self.gap = Percentiles()
        # Entries of these are requests, of which a long run has a million too.
        self.ttft, self.e2e = Percentiles(EXACT_REQUESTS), Percentiles(EXACT_REQUESTS)
        self.decode_steps: dict[int, int] = {}
        self.served = self.tokens = self.delayed = 0
        self.most_delayed_us = 0.0
        self.answers: list[float] | None = None if server.concurrency is None else []
        """When requests had their last tokens, for who takes them out; None where nobody asks"""
        self.refused: dict[str, int] = {}
        self._good = self._drafted = self._accepted = 0
        level = server.service_level
        self._most_ttft_us = _NEVER if level.ttft_ms is None else level.ttft_ms * 1e3
        self._most_gap_us = _NEVER if level.gap_ms is None else level.gap_ms * 1e3

    def refuse(self, reason: str) -> None:
        """Count a request that isn't served."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def delay(self, us: float) -> None:
        """Count a request that is served and came so much later than the trace says, for want of a free client."""
        self.delayed += 1
        self.most_delayed_us = max(self.most_delayed_us, us)

    def take(
        self, queue: Queue, step: Step, decode_steps: int, us: float, now_us: float, after_us: float = 0.0
    ) -> None:  # fmt: skip
        """Take one rank's step in: tokens come out, requests end.

        Args:
            queue: the rank's.
            step: its rows.
            decode_steps: decode steps in it.
            us: from the end of the step before to this one's.
            now_us: the end.
            after_us: of `us`, what came after the decode rows' last token.
        """
        numbers = step.numbers
        num_decodes = numbers.num_decodes
        if not numbers.num_prefills:
            self.decode_steps[num_decodes] = self.decode_steps.get(num_decodes, 0) + 1
        gaps = queue.token_gaps
        if num_decodes:
            rows = queue.rows
            alone = not gaps.waited_us and not numbers.num_prefills
            found = gaps.step(us, num_decodes, decode_steps, after_us)
            if isinstance(rows, DraftedRows):
                found = self._drafts(rows, found)
            else:
                for each, count in found:
                    self.gap.add(each, count)
            came = 0
            for _, count in found:
                came += count
            self.tokens += came
            if (tail := queue.gap_tail) is not None:
                if alone:
                    tail.without_prompts(came)
                else:
                    for each, count in found:
                        tail.beside_prompts(each, count)
            self._drafted += num_decodes * (rows.query_len - 1)
            self._accepted += came - num_decodes * decode_steps
        done = queue.complete(step, decode_steps)
        if gaps.waited_us and done.first_tokens:
            gaps.join(each.index for each in done.first_tokens if each.generated < each.output_tokens)
        for request in done.first_tokens:
            self.tokens += 1
            if request.first_us < 0:
                request.first_us = now_us
                self.ttft.add(now_us - request.arrival_us)
            else:
                self.gap.add(now_us - request.last_us)
            request.last_us = -1.0
        with_prompt = {id(request) for request in done.first_tokens} if after_us else ()
        for request in done.finished:
            # A decode row has its last token when the decode half is done.
            self.finish(request, now_us if not after_us or id(request) in with_prompt else now_us - after_us)

    def _drafts(self, rows: DraftedRows, found: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """Take the gaps of rows that verify drafts; [(time that rows waited for theirs, tokens that they got)].

        Args:
            rows: the rows, before the step is taken in.
            found: [(time, rows)] of the step: those that joined behind the step before, then those that were in it, or
                all of them at once.
        """
        emitted = [rows.emitted()]
        if len(found) > 1:
            joined = dict(rows.joined())
            emitted = [tuple(joined.items()), tuple((each, n - joined.get(each, 0)) for each, n in emitted[0])]
        came = []
        for (us, _), by_tokens in zip(found, emitted, strict=True):
            for tokens, num_rows in by_tokens:
                if num_rows:
                    # What a step brings a row at once is spread over its time.
                    self.gap.add(us / tokens, num_rows * tokens)
            came.append((us, sum(tokens * num_rows for tokens, num_rows in by_tokens)))
        return came

    def finish(self, request: Request, now_us: float) -> None:
        """Count a request that has all of its tokens."""
        self.served += 1
        if self.answers is not None:
            self.answers.append(now_us)
        self.e2e.add(now_us - request.arrival_us)
        more = request.output_tokens - 1
        gap = (now_us - request.first_us) / more if more else 0.0
        self._good += request.first_us - request.arrival_us <= self._most_ttft_us and gap <= self._most_gap_us

    # The result

    def result(
        self, *, policy: str, source: str, seed: int, queues: Sequence[Queue], span_s: float, interrupted: str
    ) -> SimResult:
        """All of it as one value."""
        engine, server = self._engine, self._server
        registry, costs = engine.registry, engine.costs
        for tally in self.tallies:
            for launch in tally.decision.launches:
                if launch.key is not None and tally.steps:
                    registry.hit(launch.key, tally.steps * launch.repeat)
        began = any(tally.steps for tally in self.tallies)
        captured, unused = registry.captured(), registry.unused()
        lost = [
            record.reason.value
            for record in registry.records()
            if record.reason is not None and record.state in (GraphState.FAILED, GraphState.WITHDRAWN)
        ]
        return SimResult(
            policy=policy,
            source=source,
            seed=seed,
            costs=costs.version,
            measured=costs.measured,
            kv_span=costs.kv_span,
            served=self.served,
            refused=self.refused,
            delayed=self.delayed,
            most_delayed_s=self.most_delayed_us / 1e6,
            tokens=self.tokens,
            ttft=self.ttft.spread(),
            gap=self.gap.spread(),
            e2e=self.e2e.spread(),
            goodput=self._goodput(span_s),
            span_s=span_s,
            not_captured={name: lost.count(name) for name in sorted(set(lost))},
            graphs=len(captured),
            graphs_used=len(captured) - len(unused),
            unused=tuple(str(key) for key in unused),
            graph_bytes=self.graph_bytes,
            capture_s=self.capture_s,
            started_after_s=self.capture_s if began and not server.warm else 0.0,
            kv_tokens=queues[0].capacity,
            preemptions=sum(queue.num_preemptions for queue in queues),
            prompt_tokens=sum(queue.looked_up_tokens for queue in queues),
            reused_tokens=sum(queue.reused_tokens for queue in queues),
            drafted=self._drafted,
            accepted=self._accepted,
            ranks=len(queues),
            decode_steps=self.decode_steps,
            interrupted=interrupted,
            downgrades=tuple(map(str, engine.downgrades)),
            **self._steps(),
        )

    def _goodput(self, span_s: float) -> Goodput:
        level, good = self._server.service_level, self._good
        if level.ttft_ms is None and level.gap_ms is None:
            return Goodput(ttft_ms=None, gap_ms=None, good=None, share=None, per_s=None)
        return Goodput(
            ttft_ms=level.ttft_ms,
            gap_ms=level.gap_ms,
            good=good,
            share=good / self.served if self.served else 0.0,
            per_s=good / span_s if span_s else 0.0,
        )

    def _steps(self) -> dict[str, Any]:
        """Sums over the steps: by mode, by reason and by the side that bounds them."""
        modes: dict[str, ModeStats] = {}
        reasons: dict[str, int] = {}
        halves: dict[str, int] = {}
        mode_us: dict[str, list[float]] = {}
        steps = host_steps = outside = sizes = contexts = 0
        basis = Basis.NOTHING
        # A decision may have been looked at and not run, and which came first depends on the loop: times are added up
        # so that their order says nothing.
        counted = [tally for tally in self.tallies if tally.rank_steps]
        costs = self.tallies.costs
        # Analytic tables have no limits to tell, and say that nothing of them was measured.
        blind = costs.measured and costs.kv_span is None
        for tally in counted:
            decision = tally.decision
            modes.setdefault(decision.label, ModeStats()).add(ModeStats(tally.steps, tally.tokens, tally.padding))
            mode_us.setdefault(decision.label, []).append(tally.us)
            reasons[decision.reason.value] = reasons.get(decision.reason.value, 0) + tally.rank_steps
            for launch in decision.launches:
                if launch.reason is not None:
                    halves[launch.reason.value] = halves.get(launch.reason.value, 0) + tally.rank_steps
            basis |= decision.basis
            steps, host_steps = steps + tally.steps, host_steps + tally.host_bound
            outside, sizes = outside + tally.outside, sizes + tally.outside_sizes
            contexts += tally.outside_contexts
        for label, times in mode_us.items():
            modes[label].us = math.fsum(times)
        us, host_us = math.fsum(each.us for each in counted), math.fsum(each.host_us for each in counted)
        return {
            "modes": dict(sorted(modes.items(), key=lambda item: (-item[1].steps, item[0]))),
            "reasons": _by_count(reasons),
            "eager_halves": _by_count(halves),
            "bound": {"device": Bound(steps - host_steps, us - host_us), "host": Bound(host_steps, host_us)},
            "outside": outside,
            "outside_sizes": sizes,
            "outside_contexts": None if blind else contexts,
            "basis": basis,
        }


def _by_count(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
