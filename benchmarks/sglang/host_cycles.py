"""Cycles of SGLang's scheduler for `benchmarks.sglang.host_cost`: what waits, what ran before, and kpolicy's hook.

The scheduler, its requests and batches are objects of plain classes with SGLang's attributes, a prompt's tokens an
array, and 300 decodes run. An empty function is the rule, and the hook is around it as SGLang's registry puts it.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kpolicy.costs import Curve
from kpolicy.settings import Objective

try:
    from kpolicy_sglang import hooks
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: what is timed here is SGLang's plugin. Install it (pip install ./integrations/kpolicy_sglang), or "
        "put PYTHONPATH=integrations/kpolicy_sglang before the command.",
        name=error.name,
    ) from None
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, PREFILL, MixedCost, Phase, table_of
from kpolicy_sglang.split import Split, split_of
from kpolicy_sglang.state import State, attach

__all__ = ["CYCLES", "Cycle", "cycle", "wrapped"]

Call = Callable[[], Any]
DECODES, CHUNK, USUAL, LONG = 300, 8192, 500, 4000
FULL = (512,) * 16
"""A whole chunk of prompts: after it decodes have their turn."""


class Cycle(NamedTuple):
    """A queue, and what was before it.

    Args:
        waiting: tokens of the prompts in the queue.
        runs: tokens of those that SGLang runs of it; none where it is the decodes' turn.
        ran: tokens of those that ran since the last decode step.
        known: whether the same requests waited at that step; else others wait each time.
        came: tokens of those that came behind them since, every other time.
        cut: tokens of the prompt under way, and how many of them ran before.
        ends: whether kpolicy ends the batch with what runs.
        cached: tokens of each prompt that SGLang found in its cache.
        settings: of kpolicy.
        mixed: whether SGLang mixes decodes into batches of prompts.
    """

    waiting: tuple[int, ...]
    runs: tuple[int, ...] = ()
    ran: tuple[int, ...] = ()
    known: bool = False
    came: tuple[int, ...] = ()
    cut: tuple[int, int] | None = None
    ends: bool = False
    cached: int = 0
    settings: dict[str, Any] = {}  # noqa: RUF012  nobody writes to it
    mixed: bool = False


MIDDLE = (USUAL,) * 4 + (LONG,) + (USUAL,) * 3
FIRST = (LONG,) + (USUAL,) * 7
AMONG_USUAL = (USUAL,) * 8 + (900,) + (USUAL,) * 7
AMONG_SHORT = (64,) * 20 + (900,) + (64,) * 107
LIMIT = {"gap_ms": 12.0}
CYCLES = {
    "decode, nothing waits": Cycle(()),
    "decode, 1 waits": Cycle((1000,), ran=FULL),
    "decode, 4 wait": Cycle((USUAL,) * 4, ran=FULL),
    "decode, 16 wait": Cycle((USUAL,) * 16, ran=FULL),
    "decode, 16 wait, partly cached": Cycle((USUAL,) * 16, ran=FULL, cached=100),
    "decode, 4 wait, one of 900 ran": Cycle((USUAL,) * 4, ran=(USUAL,) * 8 + (900,) + (USUAL,) * 6),
    "decode, 8 wait, one long": Cycle(MIDDLE, ran=(USUAL,) * 4),
    "decode, 8 wait, one long, a long one ran": Cycle(FIRST, ran=(LONG, USUAL, USUAL)),
    "decode, 8 wait, one long, one under way": Cycle(MIDDLE, ran=(2000,), cut=(LONG, 2000)),
    "decode, 3 wait, one of more than a chunk": Cycle((USUAL, 20_000, USUAL), ran=FULL),
    "decode, 8 wait, a limit on gaps": Cycle((USUAL,) * 8, ran=(USUAL,) * 4, settings=LIMIT),
    "prompts, 1 waits": Cycle((1000,), (1000,), known=True),
    "prompts, 4 wait": Cycle((USUAL,) * 4, (USUAL,) * 4, known=True),
    "prompts, 16 wait": Cycle((USUAL,) * 16, (USUAL,) * 16, known=True),
    "prompts, 16 wait, others than before": Cycle((USUAL,) * 16, (USUAL,) * 16),
    "prompts, 16 wait, one of 900": Cycle(AMONG_USUAL, AMONG_USUAL[:-1], known=True),
    "prompts, 128 wait, one of 900": Cycle(AMONG_SHORT, AMONG_SHORT[:-17], known=True),
    "prompts, 8 wait, all of 1,000": Cycle((1000,) * 8, (1000,) * 8, known=True),
    "prompts, 8 wait, all of 1,500": Cycle((1500,) * 8, (1500,) * 5 + (692,), known=True),
    "prompts, 8 wait, one long in the middle": Cycle(MIDDLE, (USUAL,) * 4, known=True, ends=True),
    "prompts, 8 wait, one long first": Cycle(FIRST, (LONG, USUAL, USUAL), known=True, ends=True),
    "prompts, 8 wait, one long behind one": Cycle((USUAL, *FIRST[:-1]), (USUAL, LONG, USUAL), known=True, ends=True),
    "prompts, 8 wait, one long, partly cached": Cycle(MIDDLE, (USUAL - 100,) * 4, cached=100, known=True, ends=True),
    "prompts, 8 wait, one long, one under way": Cycle(
        MIDDLE, (2000, *MIDDLE[:4]), cut=(LONG, 2000), known=True, ends=True
    ),
    "prompts, 8 wait, one long, 2 came since": Cycle(MIDDLE, (USUAL,) * 4, known=True, came=(USUAL, USUAL), ends=True),
    "prompts, 8 wait, one long, others than before": Cycle(MIDDLE, (USUAL,) * 4, ends=True),
    "prompts, 3 wait, one of more than a chunk": Cycle((USUAL, 20_000, USUAL), (USUAL,), known=True, ends=True),
    "prompts, 4 wait, some ran before": Cycle((USUAL,) * 4, (USUAL,) * 4, ran=(USUAL,)),
    "prompts, 4 wait, some ran before, one of 900": Cycle((USUAL,) * 4, (USUAL,) * 4, ran=(USUAL, 900)),
    "prompts, 5 wait, one of 1,400, some ran before": Cycle((1400, *(1000,) * 4), (1400, *(1000,) * 4), ran=(64,)),
    "prompts, 8 wait, a limit on gaps": Cycle((USUAL,) * 8, (*(USUAL,) * 4, 48), known=True, settings=LIMIT, ends=True),
    "prompts, 80 wait, a burst is looked at": Cycle((USUAL,) * 80, (USUAL,) * 16, ran=(USUAL,)),
    "prompts, 300 wait, a burst is looked at": Cycle((USUAL,) * 300, (USUAL,) * 16, ran=(USUAL,)),
    "both, 1 waits, mixed chunks are split": Cycle((USUAL,), (USUAL,), mixed=True),
    "both, 16 wait, mixed chunks are split": Cycle((USUAL,) * 16, (USUAL,) * 16, mixed=True),
}
"""By name, which begins with what runs: where mixed chunks are split each is a cycle of both, in the mean."""


def wrapped(original: Any, hook: Any) -> Any:
    """An AROUND hook as SGLang's registry puts it."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return wrapper


class Request:
    """A request that waits: 0.5.23 has the number of its tokens in KV, 0.5.16 their slots."""

    def __init__(self, tokens: int, done: int, version: str) -> None:
        self.origin_input_ids = array("q", range(tokens))
        if version == "0.5.16":
            self.prefix_indices = torch.zeros(done, dtype=torch.int64)
            self.last_node = object() if done else None
        else:
            self.prefix_len = done


class Batch:
    """A batch of prompts, as SGLang has made it."""

    def __init__(self, given: Cycle) -> None:
        self.extend_lens = list(given.runs)
        self.extend_num_tokens = sum(given.runs)
        self.prefix_lens = [given.cached] * len(given.runs)
        if given.cut:
            self.prefix_lens[0] = given.cut[1]


class Plan:
    """What a cycle runs."""

    def __init__(self, batch_to_run: Batch | None, running_batch: Any = None) -> None:
        self.batch_to_run, self.running_batch = batch_to_run, running_batch


class Scheduler:
    """SGLang's, as far as the hook looks."""

    def __init__(self, runner: Any, *, mixed: bool) -> None:
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.chunked_prefill_size, self.max_running_requests, self.is_mixed_chunk = CHUNK, 600, mixed
        self.waiting_queue: list[Request] = []
        self.chunked_req: Request | None = None
        self.asked = 0
        """The chunk of the last batch."""

    def asks(self, question: Callable[[Any, Any], Any]) -> None:
        """Have it look for its next batch by that method of its class."""
        self.__class__ = type("Scheduler", (Scheduler,), {"get_new_batch_prefill": question})


def cycle(name: str, version: str) -> tuple[Call, Call]:
    """A cycle without the hook and with it, by its name.

    Raises:
        RuntimeError: what runs isn't what the cycle says.
    """
    given = CYCLES[name]
    scheduler, running = Scheduler(_runner(given, version), mixed=given.mixed), SimpleNamespace(reqs=[0] * DECODES)
    plain = Scheduler(None, mixed=given.mixed)
    queues = [_queue(given, version) for _ in range(1 if given.known else 2)]
    if given.came:
        (waiting, cut), behind = queues[0], [Request(tokens, 0, version) for tokens in given.came]
        queues.append(([*waiting, *behind], cut))
    following = itertools.cycle(queues)
    split = split_of(scheduler)
    assert split is not None
    nothing, runs = Plan(None), Plan(Batch(given) if given.runs else None)
    split._plan = lambda **_: nothing
    before = _before(split, given)

    def advance() -> None:
        before()
        scheduler.waiting_queue, scheduler.chunked_req = next(following)

    def own(scheduler: Any, running_batch: Any) -> Any:  # noqa: ARG001
        scheduler.chunked_req = None
        scheduler.asked = scheduler.chunked_prefill_size
        return runs

    plain.asks(own)
    scheduler.asks(wrapped(own, hooks.new_batch_prefill))

    def stock() -> Any:
        advance()
        return plain.get_new_batch_prefill(running)

    def hooked() -> Any:
        advance()
        return scheduler.get_new_batch_prefill(running)

    if given.known:
        # The decode step from which the queue is known.
        advance()
        split.turns.prefilled(CHUNK)
        scheduler.get_new_batch_prefill(running)
    _happens(name, given, [hooked() for _ in range(2)], scheduler.asked)
    return stock, hooked


def _happens(name: str, given: Cycle, plans: list[Plan], asked: int) -> None:
    """Check what two cycles run, and the chunk that SGLang was asked for."""
    ran = ["prompts" if plan.batch_to_run is not None else "decode" for plan in plans]
    first = name.split(",")[0]
    expected = sorted(ran) if first == "both" else [first] * 2
    if given.waiting and sorted(ran) != expected:
        raise RuntimeError(f"{name!r} ran {ran}")
    if given.runs and asked != (sum(given.runs) if given.ends else CHUNK):
        raise RuntimeError(f"{name!r} asked SGLang for a batch of {asked:,} tokens")


def _runner(given: Cycle, version: str) -> Any:
    """A model runner with kpolicy attached: costs of a small model, long prompts that make others as long."""
    state = State(Config(**given.settings), version)
    for name, sizes, full in ((DECODE, (1, 64, 256, 600), True), (PREFILL, (64, 512, 1024, 2048, 4096, 8192), False)):
        phase = state.phases[name] = Phase(name, sizes, sizes[-1], full=full)
        us = {size: 1000.0 + 3.7 * size for size in sizes}
        phase.install("auto", table_of("bench", us, {size: 2 * each for size, each in us.items()}), Objective())
    state.long, state.beside = Curve((2048, 8192), (9_000.0, 60_000.0)), 1.0
    mixed = Curve((512, 8192), (20_000.0, 90_000.0))
    state.mixed = MixedCost(mixed, mixed, 2, 32)
    runner = SimpleNamespace()
    attach(runner, state)
    return runner


def _queue(given: Cycle, version: str) -> tuple[list[Request], Request | None]:
    """What waits, and the prompt under way."""
    waiting = [Request(tokens, given.cached, version) for tokens in given.waiting]
    return waiting, Request(*given.cut, version) if given.cut else None


def _before(split: Split, given: Cycle) -> Call:
    """What brings the turns to where the cycle begins; without the hook it is done too."""
    turns, tokens, new = split.turns, sum(given.ran), list(given.ran)
    in_kv = [0] * len(new)

    def prefilled() -> None:
        turns.decoded()
        turns.prefilled(tokens, new, in_kv)

    if given.mixed or not given.waiting:
        return lambda: None
    return prefilled if given.ran else turns.decoded
