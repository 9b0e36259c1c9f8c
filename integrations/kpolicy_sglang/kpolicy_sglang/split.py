"""SPLIT at the scheduler: decodes and prompts in steps of their own where a mixed batch would cost more.

With mixed chunks on, SGLang adds the running decodes to every prefill batch, and the decodes lose their graph. Here
both batches of a cycle run one after the other, the decodes in their graph. Which goes first is the order that keeps
requests waiting least: the one that serves most of them for its time.

Without mixed chunks decodes have their turns while prompts wait, see `kpolicy_sglang.turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

from kpolicy_sglang.phase import PROMPT_TOKENS
from kpolicy_sglang.prompt_times import mean_length
from kpolicy_sglang.state import State, state_of
from kpolicy_sglang.turns import Turns, aligned

__all__ = ["Split", "split_of"]

_ATTRIBUTE = "_kpolicy_split"
_MOST_LOOKED, _LOOKED = 64, 8
_MISSED = 64
"""Looks at the queue without ending a batch, after one that ended within a prompt: SGLang finds cached tokens as it
makes a batch in `fcfs`, and makes other orders then."""
_IDS = attrgetter("origin_input_ids")


def split_of(scheduler: Any) -> Split | None:
    """The split of a scheduler; None where every step is SGLang's own."""
    try:
        found: Split | None = getattr(scheduler, _ATTRIBUTE)
    except AttributeError:
        state = state_of(scheduler.tp_worker.model_runner)
        found = Split(scheduler, state) if state is not None and _wanted(scheduler, state) else None
        setattr(scheduler, _ATTRIBUTE, found)
    return found


def _wanted(scheduler: Any, state: State) -> bool:
    if state.coupled:
        return False
    turns = _turns(scheduler, state)
    # Mixed batches have decodes in them, and need no turns.
    return _divides(scheduler, state) or turns.limit < turns.chunk or (turns.on and not scheduler.is_mixed_chunk)


def _turns(scheduler: Any, state: State) -> Turns:
    """When decodes have turns. 0.5.23 has `--prefill-decode-interval`, which goes before them."""
    chunk = max(int(getattr(scheduler, "chunked_prefill_size", None) or 0), 0)
    own = bool(getattr(scheduler, "prefill_decode_interval", 0))
    return Turns(state, chunk, align=aligned(scheduler), own=own)


def _divides(scheduler: Any, state: State) -> bool:
    """Whether mixed batches are compared with their halves."""
    both = state.decode is not None and state.decode.costs is not None and state.mixed is not None
    return bool(state.config.split and scheduler.is_mixed_chunk and both)


class Split:
    """See the module's docstring.

    Args:
        scheduler: SGLang's.
        state: what kpolicy knows of its model runner.
    """

    def __init__(self, scheduler: Any, state: State) -> None:
        self._scheduler = scheduler
        self._state = state
        self._owed = ""
        """The batch of the cycle that has not run yet: ``decode`` or ``extend``."""
        self._most = 0
        """Most prompt tokens of the next batch."""
        self._known: tuple[int, Any, Sequence[Any], list[int]] = (-1, None, (), [])
        """The queue when it was last looked at: how many could run, which first, the first of them, and their tokens if
        one is long. While that is so it needs no look to tell."""
        self._as_sglang = 0
        """Looks at the queue after which batches may end before a long prompt again."""
        self._plan: Any = None
        self._counted: Callable[[Sequence[Any]], int] | None = None
        self._divides = scheduler is not None and _divides(scheduler, state)
        self.turns = _turns(scheduler, state)
        self._in_turns = self.turns.on and scheduler is not None and not scheduler.is_mixed_chunk
        self.cycles = {"mixed": 0, "decode first": 0, "extend first": 0, "in turns": 0}

    def step(self, original: Any, running_batch: Any) -> Any:
        """AROUND one `get_new_batch_prefill`: SGLang's own, once and as it is, where kpolicy's part raises."""
        scheduler = self._scheduler
        if not (scheduler.waiting_queue or scheduler.chunked_req is not None):
            self._owed = ""
            self.turns.decoded()
            return original(scheduler, running_batch)
        try:
            turn = self._turn(running_batch)
            if turn == "decode":
                self.turns.decoded()
                return self._nothing(running_batch)
        # SGLang wasn't asked yet: its own batch runs.
        except Exception as error:  # noqa: BLE001
            self._owed = ""
            self._state.failures.note("SPLIT", error, then="SGLang's own batch runs")
            turn = "own"
        if turn == "own":
            return original(scheduler, running_batch)
        if turn == "in turns" and self._most == self.turns.chunk:
            plan = original(scheduler, running_batch)
        else:
            plan = self._prefill(original, running_batch, mixed=turn == "mixed")
        if plan.batch_to_run is None:
            self.turns.decoded()
        elif turn == "extend first":
            self._owed = "decode"
        elif turn == "in turns":
            self._ran(plan.batch_to_run)
        return plan

    def _ran(self, batch: Any) -> None:
        """A batch of prompts runs: what it keeps decodes waiting for."""
        turns, times = self.turns, self.turns.times
        tokens = int(getattr(batch, "extend_num_tokens", None) or turns.limit)
        if times is None or turns.busy:
            turns.prefilled_in_burst(tokens)
            return
        lengths, before = getattr(batch, "extend_lens", None) or (), getattr(batch, "prefix_lens", None)
        turns.prefilled(tokens, times.length(lengths, before))

    def _turn(self, running_batch: Any) -> str:
        """What this step is: SGLang's ``own`` batch, the ``decode`` one, or a prefill batch and what comes before."""
        decodes, owed = len(running_batch.reqs), self._owed
        self._owed = ""
        if not decodes:
            self.turns.decoded()
            return "own"
        if self._in_turns:
            return self._in_turn(decodes)
        if owed:
            return owed
        order = self.order(decodes, *self.prompts(self.turns.limit)) if self._divides else "mixed"
        self.cycles[order] += 1
        if order == "decode first":
            self._owed = "extend"
            return "decode"
        return order

    def _in_turn(self, decodes: int) -> str:
        """Whether the decode step comes first; the most that the next batch of prompts may have, where it doesn't."""
        turns, scheduler = self.turns, self._scheduler
        self._most = turns.limit
        if turns.busy:
            return "in turns"
        queue, chunked = scheduler.waiting_queue, scheduler.chunked_req
        waiting, room = len(queue), scheduler.max_running_requests - decodes
        could = waiting if waiting < room else max(room, 0)
        # Decodes that have just run don't go first; what waits is counted for what it says of a burst.
        just = turns.fresh and waiting < decodes
        number, first, looked, lengths = self._known
        if just and chunked is None and could == number and queue[0] is first:
            if not lengths:
                return "in turns"
            long = True
        else:
            looked, lengths, longest = self._look(could)
            long = longest > turns.long or (chunked is not None and len(chunked.origin_input_ids) > turns.long)
            self._known = (
                (-1, None, (), []) if chunked is not None else (could, queue[0], looked, lengths if long else [])
            )
            if (long or not just) and turns.decode_goes_first(decodes, *self._waiting(could, looked, lengths, longest)):
                self.cycles["in turns"] += 1
                return "decode"
        if self._as_sglang:
            self._as_sglang -= 1
        elif long and not turns.in_burst:
            before = 0
            if looked and self._cached(looked):
                lengths = [length - self._cached((each,)) for each, length in zip(looked, lengths, strict=True)]
            if chunked is not None:
                before, could = _done(chunked), could + 1
                lengths = [len(chunked.origin_input_ids) - before, *lengths]
            self._most = turns.most(decodes, could, lengths, before)
        return "in turns"

    def _look(self, could: int) -> tuple[Sequence[Any], list[int], int]:
        """The first of the queue that could run, their prompts' tokens, and the most of these."""
        looked = self._scheduler.waiting_queue[: could if could < _LOOKED else _LOOKED]
        lengths = list(map(len, map(_IDS, looked)))
        return looked, lengths, max(lengths) if lengths else 0

    def _waiting(self, could: int, looked: Sequence[Any], lengths: list[int], longest: int) -> tuple[int, int, float]:
        """(prompts, their tokens near enough, their `mean_length`) that wait and could run.

        Of a prompt that has more than a chunk left one chunk is seen, with what comes before it, and nothing behind it.
        Cached tokens are taken off where SGLang has looked for them already. Of many prompts the first are looked at,
        and the others taken to be like them.

        Args:
            could: how many of the queue could run.
            looked: the first of them.
            lengths: their prompts' tokens.
            longest: the most of these.
        """
        chunk, chunked = self.turns.chunk, self._scheduler.chunked_req
        if chunked is None and looked and longest <= PROMPT_TOKENS <= chunk:
            found = sum(lengths) - (self._counted or self._cached)(looked)
            return could, found if could == len(looked) else found * could // len(looked), 0.0
        before = tokens = 0
        if chunked is not None:
            before, tokens = 1, len(chunked.origin_input_ids) - _done(chunked)
            if tokens > chunk:
                return 1, chunk, chunk
        if not looked:
            return before, tokens, 0.0
        if longest <= chunk:
            found = sum(lengths) - (self._counted or self._cached)(looked)
        else:
            found = 0
            for each, (request, length) in enumerate(zip(looked, lengths, strict=True)):
                left = length - self._cached((request,))
                if left > chunk:
                    return max(before + each, 1), max(tokens + found, chunk), chunk
                found += left
        tokens += found if could == len(looked) else found * could // len(looked)
        # Before the first batch since a decode step nobody asks how long they are.
        usual = longest <= PROMPT_TOKENS or self.turns.fresh
        return before + could, tokens, 0.0 if usual else mean_length(lengths)

    def _cached(self, requests: Sequence[Any]) -> int:
        """Tokens of requests in the queue that SGLang has found in its cache."""
        if self._counted is None:
            self._counted = _counter(requests[0])
        return self._counted(requests)

    def _prefill(self, original: Any, running_batch: Any, *, mixed: bool) -> Any:
        """SGLang's own prefill batch, with the decodes in it or without, of no more prompt tokens than may be."""
        scheduler = self._scheduler
        before = scheduler.is_mixed_chunk, scheduler.chunked_prefill_size
        scheduler.is_mixed_chunk = mixed
        if self._in_turns and self._most < self.turns.chunk:
            scheduler.chunked_prefill_size = self._most
        elif self.turns.limit < self.turns.chunk:
            scheduler.chunked_prefill_size = self.turns.cut(len(running_batch.reqs) if mixed else 0)
        try:
            plan = original(scheduler, running_batch)
        finally:
            scheduler.is_mixed_chunk, scheduler.chunked_prefill_size = before
        if self._in_turns and self._most < self.turns.limit and scheduler.chunked_req is not None:
            # It was to end between two prompts: what runs isn't what was seen to wait.
            self._as_sglang = _MISSED
        return plan

    def _nothing(self, running_batch: Any) -> Any:
        """The plan without a prefill batch: SGLang runs the decodes."""
        if self._plan is None:
            from sglang.srt.managers.schedule_batch import NextBatchPlan

            self._plan = NextBatchPlan
        return self._plan(batch_to_run=None, running_batch=running_batch)

    def prompts(self, most: int) -> tuple[int, int, bool]:
        """(tokens, prompts, whether cached tokens come before them) of the next prefill batch, near enough.

        Args:
            most: the most tokens that are counted.
        """
        scheduler = self._scheduler
        tokens = prompts = 0
        prefix = False
        chunked = scheduler.chunked_req
        if chunked is not None:
            done = _done(chunked)
            tokens, prompts, prefix = len(chunked.origin_input_ids) - done, 1, done > 0
        for request in scheduler.waiting_queue[:_MOST_LOOKED]:
            if tokens >= most:
                break
            tokens += len(request.origin_input_ids)
            prompts += 1
        return max(1, min(tokens, most)), max(1, prompts), prefix

    def order(self, decodes: int, tokens: int, prompts: int, prefix: bool = False) -> str:
        """``mixed``, or which half goes first, by what is measured.

        Args:
            decodes: decode rows.
            tokens: prompt tokens of the prefill batch.
            prompts: its prompts.
            prefix: whether a prompt has cached tokens before it.
        """
        state = self._state
        assert state.mixed is not None  # noqa: S101
        assert state.decode is not None  # noqa: S101
        prefill = state.prefill
        mixed_us = state.mixed.us(tokens + decodes, decodes)
        eager = prefill is None or (prefix and state.prefix_is_eager)
        extend_us = state.mixed.few.at(tokens) if eager or prefill is None else prefill.us(tokens)
        decode_us = state.decode.us(decodes)
        if mixed_us <= extend_us + decode_us:
            return "mixed"
        return "decode first" if decode_us * prompts <= extend_us * decodes else "extend first"


def _done(request: Any) -> int:
    """Prompt tokens of a request that are in KV: 0.5.16 has their slots, 0.5.23 their number."""
    number = getattr(request, "prefix_len", None)
    return len(request.prefix_indices) if number is None else int(number)


def _counter(request: Any) -> Callable[[Sequence[Any]], int]:
    """What adds up the tokens in KV of requests such as this one, in a few calls: many requests may wait."""
    if hasattr(request, "prefix_len"):
        number = attrgetter("prefix_len")
        return lambda requests: sum(map(number, requests))
    indices = attrgetter("prefix_indices")
    # Tensors on 0.5.16, whose `len` takes five times as long.
    size = methodcaller("numel") if hasattr(indices(request), "numel") else len
    return lambda requests: sum(map(size, map(indices, requests)))
