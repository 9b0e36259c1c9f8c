r"""Host time of kpolicy's hooks over a whole served trace, beside SGLang's own rule over the same steps.

    KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_sglang python -m benchmarks.sglang.host_trace \
        --traces FOLDER --date YYYY-MM-DD

The scheduler, its requests and batches are those of `benchmarks.sglang.host_cycles`, and its queue, chunk and most
running requests as SGLang has them, in its order. Steps last as long as measured tables say. Conversation keeps 600
requests in the server, a next one coming for each that ends, and comes as it was recorded too; so does code. A step is
the scheduler's cycle and its question of the graph runner: kpolicy's part of the cycle is what it takes but for
SGLang's own function, and an empty hook; the question is asked of SGLang's rule out of its wheel under the hooks and
alone, in turns.

Before a trace comes the request that SGLang sends itself as it starts, which isn't timed: the first step of all is
none of the trace's. Each trace is served several times alike; of a step's times the least counts, less what a look at
the clock takes. That is the clock of the wall: the processor's takes as long to read as a step. What else runs on the
machine only adds. Between two steps this simulation runs, which touches less memory than an engine does, and more than
a loop of one call.
"""

from __future__ import annotations

import gc
import heapq
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.command import commit_of, traces_and_date
from benchmarks.sglang.host_cost import (
    RESULT,
    decode_batch,
    decode_runners,
    older_prompt_runners,
    prompt_batch,
    prompt_runners,
    wheels,
)
from benchmarks.sglang.host_cycles import CHUNK, Plan, Request, Scheduler, wrapped
from kpolicy.costs import Curve
from kpolicy.policies.sglang import decode_sizes, prefill_sizes
from kpolicy.scheduling.traces import TraceRequest, read_trace
from kpolicy.schemas import read_profile
from kpolicy.settings import Objective
from kpolicy_sglang import hooks
from kpolicy_sglang.config import Config
from kpolicy_sglang.ladder import default_decode_sizes
from kpolicy_sglang.phase import DECODE, PREFILL, Phase
from kpolicy_sglang.split import split_of
from kpolicy_sglang.state import State, attach
from tests.integrations.sglang.test_oracle import Older
from tests.oracle.sglang_real import Release

RUNNING, REQUESTS, PASSES = 600, 1_000, 15
LOOKED = 8
"""Prompts in front of the queue that kpolicy looks at."""
SGLANG_DECODES = 256
"""SGLang's largest decode graph on an H200."""
LOADS = {
    "conversation, 600 at a time": ("azure_llm_2023_conv.csv", True),
    "conversation, as recorded": ("azure_llm_2023_conv.csv", False),
    "code, as recorded": ("azure_llm_2023_code.csv", False),
}
WARM_UP = TraceRequest(0, 0.0, 6, 8)
"""What SGLang sends itself before it serves: a sentence, and eight tokens more."""
LONG = Curve((2048, 8192), (9_000.0, 60_000.0))
PROFILE = RESULT.parent / "h200" / "profile_sglang_qwen05b.json"
_clock = time.perf_counter_ns


class Served:
    """A server of plain objects, whose steps are timed.

    Args:
        requests: of the trace.
        at_once: whether so many as may run are kept in the server, whenever they arrived.
        version: SGLang's.
    """

    def __init__(self, requests: Sequence[TraceRequest], *, at_once: bool, version: str) -> None:
        self.state = _state(version)
        runner = SimpleNamespace()
        attach(runner, self.state)
        self.scheduler, self.plain = Scheduler(runner, mixed=False), Scheduler(None, mixed=False)
        self.running = SimpleNamespace(reqs=[])
        self._coming, self._at_once, self._version = deque([WARM_UP]), at_once, version
        self._ends: list[int] = []
        """Decode steps after which a request is done, each once."""
        self._decoded = self._inside = 0
        self._us = 0.0
        self._output: dict[int, int] = {}
        self.entered = self.left = 0
        """When SGLang's own function of the cycle was entered and left."""
        self.scheduler.asks(wrapped(self._own, hooks.new_batch_prefill))
        self.plain.asks(lambda _, running_batch: self._nothing(running_batch))
        nothing = Plan(None)
        split = split_of(self.scheduler)
        assert split is not None
        split._plan = lambda **_: nothing
        self._turns = split.turns
        for _ in self.cycles():
            self.ran(self.scheduler.get_new_batch_prefill(self.running))
        self._coming, self._us = deque(requests), 0.0

    def cycles(self) -> Iterator[None]:
        """Before each cycle: what has come waits."""
        while True:
            self._arrive()
            if not self.scheduler.waiting_queue and self.scheduler.chunked_req is None and not self.running.reqs:
                if not self._coming:
                    return
                self._us = max(self._us, self._coming[0].arrival_s * 1e6)
                continue
            yield

    def waits(self) -> str:
        """What waits before a cycle, in words; nothing where nothing does."""
        queue, turns = self.scheduler.waiting_queue, self._turns
        if not queue and self.scheduler.chunked_req is None:
            return ""
        if not self.running.reqs:
            return "no decode runs"
        if turns.busy:
            return "a burst"
        if len(queue) == 1 and self.scheduler.chunked_req is None:
            return "one"
        long = any(len(each.origin_input_ids) > turns.long for each in queue[:LOOKED])
        return "several, one long" if long else "several"

    def ran(self, plan: Plan) -> tuple[str, int]:
        """The step runs: what it was, and its size."""
        batch = plan.batch_to_run
        if batch is not None:
            assert self.state.prefill is not None
            self._us += self.state.prefill.us(batch.extend_num_tokens)
            return PREFILL, batch.extend_num_tokens
        assert self.state.decode is not None
        rows = len(self.running.reqs)
        self._us += self.state.decode.us(rows)
        self._decoded += 1
        while self._ends and self._ends[0] <= self._decoded:
            heapq.heappop(self._ends)
            self.running.reqs.pop()
            self._inside -= 1
        return DECODE, rows

    def _arrive(self) -> None:
        while self._coming and (
            self._inside < RUNNING if self._at_once else self._coming[0].arrival_s * 1e6 <= self._us
        ):
            each = self._coming.popleft()
            request = Request(each.prompt_tokens, 0, self._version)
            self._output[id(request)] = each.output_tokens
            self._inside += 1
            self.scheduler.waiting_queue.append(request)

    def _nothing(self, running_batch: Any) -> None:  # noqa: ARG002
        self.entered = _clock()
        self.left = _clock()

    def _own(self, scheduler: Any, running_batch: Any) -> Plan:
        """SGLang's own: prompts in their order, a chunk of them, the last one cut."""
        self.entered = _clock()
        left, new, before = scheduler.chunked_prefill_size, [], []
        queue, cut = scheduler.waiting_queue, scheduler.chunked_req
        scheduler.chunked_req = None
        while left > 0 and (cut is not None or (queue and len(running_batch.reqs) < RUNNING)):
            request = cut if cut is not None else queue.pop(0)
            cut, done = None, _done(request)
            take = min(len(request.origin_input_ids) - done, left)
            new.append(take)
            before.append(done)
            left -= take
            _has(request, done + take)
            if done + take < len(request.origin_input_ids):
                scheduler.chunked_req = request
            else:
                self._begins(running_batch, request)
        batch: Any = SimpleNamespace(extend_lens=new, extend_num_tokens=sum(new), prefix_lens=before) if new else None
        plan = Plan(batch)
        self.left = _clock()
        return plan

    def _begins(self, running_batch: Any, request: Request) -> None:
        """Its prompt has its first token: the others come of decodes."""
        more = self._output.pop(id(request)) - 1
        if more:
            running_batch.reqs.append(0)
            heapq.heappush(self._ends, self._decoded + more)
        else:
            self._inside -= 1


def _done(request: Any) -> int:
    return request.prefix_len if hasattr(request, "prefix_len") else request.prefix_indices.numel()


def _has(request: Any, tokens: int) -> None:
    """SGLang has so many tokens of it in KV."""
    if hasattr(request, "prefix_len"):
        request.prefix_len = tokens
    else:
        request.prefix_indices = torch.zeros(tokens, dtype=torch.int64)
        request.last_node = request


def _state(version: str) -> State:
    """kpolicy's, with SGLang's sizes and those above, and costs measured on an H200; long prompts make others long."""
    state, costs = State(Config(), version), read_profile(PROFILE).costs
    sizes = default_decode_sizes(decode_sizes(SGLANG_DECODES), RUNNING)
    for name, captured, full in ((DECODE, sizes, True), (PREFILL, prefill_sizes(CHUNK), False)):
        phase = state.phases[name] = Phase(name, captured, captured[-1], full=full)
        phase.install("auto", costs, Objective())
        phase.decide_all()
    state.long, state.beside = LONG, 1.0
    return state


class Questions:
    """Both phases' runners, with kpolicy and without; batches by size, made once."""

    def __init__(self, version: str, state: State) -> None:
        folder, decode, prefill = wheels(), state.decode, state.prefill
        release = Release(folder) if version == "0.5.23" else Older(folder)  # type: ignore[no-untyped-call]
        prompts = prompt_runners if version == "0.5.23" else older_prompt_runners
        assert decode is not None
        assert prefill is not None
        self._runners = {DECODE: decode_runners(release, decode), PREFILL: prompts(release, prefill)}
        self._batches: dict[tuple[str, int], Any] = {}

    def ask(self, name: str, size: int, *, hooked_first: bool) -> tuple[int, int]:
        """Nanoseconds of SGLang's own rule and of it under the hooks."""
        batch = self._batches.get((name, size))
        if batch is None:
            batch = self._batches[name, size] = (decode_batch if name == DECODE else prompt_batch)(size)
        took = [0, 0]
        for which in (1, 0) if hooked_first else (0, 1):
            runner = self._runners[name][which]
            started = _clock()
            runner.can_run_graph(batch)
            took[which] = _clock() - started
        return took[0], took[1]


def served(requests: Sequence[TraceRequest], *, at_once: bool, version: str, turn: int) -> list[tuple[Any, ...]]:
    """Each step of a trace: what it was, its size, and nanoseconds of the cycle, an empty one, the rule, the hooks."""
    server = Served(requests, at_once=at_once, version=version)
    questions = Questions(version, server.state)
    scheduler, plain, running = server.scheduler, server.plain, server.running
    found = []
    for step, _ in enumerate(server.cycles()):
        waited = bool(scheduler.waiting_queue or scheduler.chunked_req is not None)
        server.entered = server.left = 0
        started = _clock()
        plan = scheduler.get_new_batch_prefill(running)
        took = _clock() - started - (server.left - server.entered)
        asked = server.entered > 0
        started = _clock()
        plain.get_new_batch_prefill(running)
        empty = _clock() - started - (server.left - server.entered)
        name, size = server.ran(plan)
        kind = "prompts" if name == PREFILL else "decode, its turn" if waited else "decode, nothing waits"
        rule, hooked = questions.ask(name, size, hooked_first=bool((step + turn) % 2))
        found.append((kind, size, asked, took, empty, rule, hooked))
    return found


def waited(requests: Sequence[TraceRequest], *, at_once: bool, version: str) -> list[str]:
    """What waits before each of these steps. Not of a timed pass, as a look at it brings it into caches."""
    server, found = Served(requests, at_once=at_once, version=version), []
    for _ in server.cycles():
        found.append(server.waits())
        server.ran(server.scheduler.get_new_batch_prefill(server.running))
    return found


def _clock_ns() -> int:
    """What two looks at the clock take, the least of many."""
    return min(-_clock() + _clock() for _ in range(20_000))


def figures(passes: Sequence[Sequence[tuple[Any, ...]]], waits: Sequence[str], clock_ns: int) -> dict[str, Any]:
    """Of the least of each step's times: means, what most steps take, kinds of steps, and these by what waits.

    Raises:
        RuntimeError: the passes aren't of the same steps.
    """
    steps = [[each[:3] for each in one] for one in passes]
    if any(one != steps[0] for one in steps):
        raise RuntimeError("two passes over a trace ran other steps")
    rule, added, kinds, ways = [], [], [], []
    for before, *times in zip(waits, *passes, strict=True):
        kind, _, asked = times[0][:3]
        took, empty, own, hooked = (min(each[at] for each in times) for at in range(3, 7))
        # An empty cycle that asks SGLang looks at the clock twice more, as does one under the hooks.
        rule.append((own - clock_ns) / 1e3)
        cycle, question = took - (empty if asked else clock_ns), hooked - own
        added.append((cycle + question) / 1e3)
        kinds.append(kind)
        ways.append((kind, before, cycle / 1e3, question / 1e3))
    mean = statistics.fmean(added)
    return {
        "steps": len(added), "rule_us": round(statistics.fmean(rule), 3), "added_us": round(mean, 3),
        "of_rule": round(mean / statistics.fmean(rule), 3),
        "p50_us": round(_at(added, 0.5), 3), "p99_us": round(_at(added, 0.99), 3), "most_us": round(max(added), 3),
        "rule_p99_us": round(_at(rule, 0.99), 3), "above_4_us": sum(each > 4 for each in added),
        "kinds": {
            kind: {
                "steps": kinds.count(kind),
                "rule_us": round(statistics.fmean(us for us, each in zip(rule, kinds, strict=True) if each == kind), 3),
                "added_us": round(
                    statistics.fmean(us for us, each in zip(added, kinds, strict=True) if each == kind), 3
                ),
            }
            for kind in sorted(set(kinds))
        },
        "ways": [
            {"kind": kind, "waits": before, "steps": len(of), "cycle_us": round(statistics.fmean(c for c, _ in of), 3),
             "question_us": round(statistics.fmean(q for _, q in of), 3)}
            for kind, before in sorted({way[:2] for way in ways})
            if (of := [way[2:] for way in ways if way[:2] == (kind, before)])
        ],
    }  # fmt: skip


def _at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> int:
    given, commit = traces_and_date(__doc__), commit_of()
    rows = []
    for load, (name, at_once) in LOADS.items():
        requests = read_trace(given.traces / name).requests[:REQUESTS]
        for version in ("0.5.23", "0.5.16"):
            passes = []
            for turn in range(PASSES):
                gc.collect()
                gc.disable()
                try:
                    passes.append(served(requests, at_once=at_once, version=version, turn=turn))
                finally:
                    gc.enable()
            found = figures(passes, waited(requests, at_once=at_once, version=version), _clock_ns())
            rows.append({"sglang": version, "load": load, "requests": len(requests), **found})
            print(json.dumps(rows[-1]), flush=True)
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    result["served"] = {
        "what": "host time a step over a whole served trace: kpolicy's hooks, and SGLang's own rule over the same "
        "steps, the least of each step's times",
        "date": given.date, "commit": commit,
        "command": "KPOLICY_ORACLE=FOLDER PYTHONPATH=integrations/kpolicy_sglang python -m "
        f"benchmarks.sglang.host_trace --traces FOLDER --date {given.date}",
        "passes": PASSES, "rows": rows,
    }  # fmt: skip
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
