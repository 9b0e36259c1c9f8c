"""SPLIT at the scheduler: decodes and prompts in steps of their own where a mixed batch would cost more.

With mixed chunks on, SGLang adds the running decodes to every prefill batch, and the decodes lose their graph. Here
both batches of a cycle run one after the other, the decodes in their graph. Which goes first is the order that keeps
requests waiting least: the one that serves most of them for its time.

Without mixed chunks decodes have their turns while prompts wait, see `kpolicy_sglang.turns`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from kpolicy_sglang.state import State, state_of
from kpolicy_sglang.turns import Turns, aligned
from kpolicy_sglang.waiting import Waiting, done

__all__ = ["Split", "split_of"]

_ATTRIBUTE = "_kpolicy_split"
_MOST_LOOKED, _TOGETHER = 64, 16
_MISSED = 64
"""Looks at the queue without ending a batch, after one that ended within a prompt: SGLang finds cached tokens as it
makes a batch in `fcfs`, and makes other orders then."""


def split_of(scheduler: Any) -> Split | None:
    """The split of a scheduler; None where every step is SGLang's own."""
    try:
        found: Split | None = getattr(scheduler, _ATTRIBUTE)
    except AttributeError:
        state = state_of(scheduler.tp_worker.model_runner)
        found = Split(scheduler, state) if state is not None and _wanted(scheduler, state) else None
        setattr(scheduler, _ATTRIBUTE, found)
    return found


def counted(state: State, scheduler: Any, original: Any, running_batch: Any) -> Any:
    """AROUND one `get_new_batch_prefill` that is SGLang's own."""
    state.left -= 1
    if state.left <= 0:
        state.tick()
    return original(scheduler, running_batch)


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
        self._as_sglang = 0
        """Looks at the queue after which batches may end before a long prompt again."""
        self._plan: Any = None
        self._divides = scheduler is not None and _divides(scheduler, state)
        self.turns = _turns(scheduler, state)
        self._waits = Waiting(self.turns.chunk, self.turns.burst)
        self._long = False
        """Whether a prompt of those is long."""
        self._idle = False
        """Whether nothing waited at the last look, and all of this knows it."""
        self._in_turns = self.turns.on and scheduler is not None and not scheduler.is_mixed_chunk
        self.cycles = {"mixed": 0, "decode first": 0, "extend first": 0, "in turns": 0}
        self.step: Callable[[Any, Any], Any] = self._in_turns_step if self._in_turns else self._split_step
        """AROUND one `get_new_batch_prefill`: SGLang's own, once and as it is, where kpolicy's part raises."""

    def asked(self, own: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        """A scheduler's own `get_new_batch_prefill`: while nothing waits SGLang's, else a step of this.

        Args:
            own: SGLang's.
        """
        scheduler, state, step = self._scheduler, self._state, self.step

        def get_new_batch_prefill(running_batch: Any) -> Any:
            if self._idle and not scheduler.waiting_queue and scheduler.chunked_req is None:
                left = state.left - 1
                if left > 0:
                    state.left = left
                    return own(scheduler, running_batch)
            return step(own, running_batch)

        return get_new_batch_prefill

    def _nothing_waits(self, original: Any, running_batch: Any) -> Any:
        """SGLang's own cycle without prompts."""
        self._idle, self._owed = True, ""
        self.turns.decoded()
        self._waits.forget()
        return original(self._scheduler, running_batch)

    # Decodes in turns with prompts

    def _in_turns_step(self, original: Any, running_batch: Any) -> Any:
        """A decode step, or SGLang's next batch of prompts, which may end before a long one."""
        state, scheduler, turns = self._state, self._scheduler, self.turns
        left = state.left = state.left - 1
        if left <= 0:
            state.tick()
        queue, cut = scheduler.waiting_queue, scheduler.chunked_req
        if not queue and cut is None:
            return self._nothing_waits(original, running_batch)
        self._idle = False
        decodes = len(running_batch.reqs)
        if not decodes:
            turns.decoded()
            self._waits.asked()
            return original(scheduler, running_batch)
        try:
            most = turns.limit if turns.busy else self._most(decodes, queue, cut)
            if not most:
                self.cycles["in turns"] += 1
                turns.decoded()
                return self._nothing(running_batch)
        # SGLang wasn't asked yet: its own batch runs.
        except Exception as error:  # noqa: BLE001
            self._failed(error)
            return original(scheduler, running_batch)
        if most == turns.chunk:
            plan = original(scheduler, running_batch)
        else:
            chunk, scheduler.chunked_prefill_size = scheduler.chunked_prefill_size, most
            try:
                plan = original(scheduler, running_batch)
            finally:
                scheduler.chunked_prefill_size = chunk
            if scheduler.chunked_req is not None and most < turns.limit:
                # It was to end between two prompts: what runs isn't what was seen to wait.
                self._as_sglang = _MISSED
        batch = plan.batch_to_run
        if batch is None:
            turns.decoded()
            self._waits.asked()
            return plan
        try:
            tokens, new, before = batch.extend_num_tokens, batch.extend_lens, batch.prefix_lens
        except AttributeError:
            tokens, new, before = getattr(batch, "extend_num_tokens", None), None, None
        turns.prefilled(tokens or turns.limit, new or (), before or ())
        return plan

    def _most(self, decodes: int, queue: Sequence[Any], cut: Any) -> int:
        """Most tokens of the next batch of prompts; 0 where the decode step comes first."""
        turns, waits = self.turns, self._waits
        waiting, room = len(queue), self._scheduler.max_running_requests - decodes
        if waiting == 1 and cut is None and room > 0 and not self._as_sglang:
            return self._most_alone(decodes, queue[0])
        could = waiting if waiting < room else max(room, 0)
        # Decodes that have just run don't go first; what waits is counted for what it says of a burst.
        just = turns.fresh and waiting < decodes
        if just and (not could or queue[0] is waits.first) and waits.is_of(could, queue, cut):
            long = self._long
            if not long and cut is None:
                return turns.limit
        else:
            long = waits.look(could, queue, cut) > turns.long
            if cut is not None and not long:
                long = len(cut.origin_input_ids) > turns.long
            self._long = long
            # Before the first prompts only a burst can be seen.
            if not just or (long and waits.at_most > turns.burst):
                prompts, tokens, new = waits.counts()
                if turns.decode_goes_first(decodes, prompts, tokens, new):
                    if long and waits.known is None:
                        # For the batch after the decode step.
                        waits.batch()
                    return 0
                if turns.in_burst:
                    # Nobody asks before it is looked at anew: no request is held meanwhile.
                    waits.forget()
                    long = False
        if self._as_sglang:
            self._as_sglang -= 1
        elif long:
            new, before, tokens, longest = waits.known or waits.batch()
            return turns.most(decodes, could if cut is None else could + 1, new, before, tokens, longest)
        return turns.limit

    def _most_alone(self, decodes: int, request: Any) -> int:
        """The same where one prompt waits: it makes no burst, and nothing behind it could be left to a next batch.

        Not while looks are counted, which one at the same prompt right after a decode step isn't.
        """
        turns, waits = self.turns, self._waits
        if waits.first is not None:
            waits.forget()
        if not turns.fresh:
            tokens, new = waits.alone(request)
            if turns.decode_goes_first(decodes, 1, tokens, new):
                return 0
        return turns.limit

    # Mixed batches and their halves

    def _split_step(self, original: Any, running_batch: Any) -> Any:
        """SGLang's mixed batch, or one of its halves."""
        state = self._state
        state.left -= 1
        if state.left <= 0:
            state.tick()
        scheduler = self._scheduler
        if not scheduler.waiting_queue and scheduler.chunked_req is None:
            return self._nothing_waits(original, running_batch)
        self._idle = False
        try:
            turn = self._turn(running_batch)
            if turn == "decode":
                return self._nothing(running_batch)
        except Exception as error:  # noqa: BLE001  likewise
            self._owed = ""
            self._failed(error)
            turn = "own"
        if turn == "own":
            return original(self._scheduler, running_batch)
        plan = self._prefill(original, running_batch, mixed=turn == "mixed")
        if turn == "extend first" and plan.batch_to_run is not None:
            self._owed = "decode"
        return plan

    def _turn(self, running_batch: Any) -> str:
        """What this step is: SGLang's ``own`` batch, the ``decode`` one, or a prefill batch and what comes before."""
        decodes, owed = len(running_batch.reqs), self._owed
        self._owed = ""
        if not decodes:
            return "own"
        if owed:
            return owed
        order = self.order(decodes, *self.prompts(self.turns.limit)) if self._divides else "mixed"
        self.cycles[order] += 1
        if order == "decode first":
            self._owed = "extend"
            return "decode"
        return order

    def _prefill(self, original: Any, running_batch: Any, *, mixed: bool) -> Any:
        """SGLang's own prefill batch, with the decodes in it or without, of no more prompt tokens than may be."""
        scheduler = self._scheduler
        before = scheduler.is_mixed_chunk, scheduler.chunked_prefill_size
        scheduler.is_mixed_chunk = mixed
        if self.turns.limit < self.turns.chunk:
            scheduler.chunked_prefill_size = self.turns.cut(len(running_batch.reqs) if mixed else 0)
        try:
            return original(scheduler, running_batch)
        finally:
            scheduler.is_mixed_chunk, scheduler.chunked_prefill_size = before

    def _failed(self, error: Exception) -> None:
        self._waits.forget()
        self._state.failures.note("SPLIT", error, then="SGLang's own batch runs")

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
            ran = done(chunked)
            tokens, prompts, prefix = len(chunked.origin_input_ids) - ran, 1, ran > 0
        queue, at = scheduler.waiting_queue, 0
        while tokens < most and at < _MOST_LOOKED and at < len(queue):
            lengths = [len(each.origin_input_ids) for each in queue[at : at + _TOGETHER]]
            sums = list(accumulate(lengths, initial=tokens))
            count = min(bisect_left(sums, most), len(lengths))
            tokens, prompts, at = sums[count], prompts + count, at + _TOGETHER
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
