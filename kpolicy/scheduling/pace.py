"""How many tokens a step of decodes and prompts holds, by cost: what the objective says of the gap decides.

A scheduler fills a step up to its limit, and the decode rows of that step wait for all of it. The same prompts in
several smaller steps take longer in all, as each step has its fixed time, and the gap between tokens is shorter.
`Pace` weighs the two as the objective does: ``step_weight`` times what the prompts in line take, less what decodes of
the further steps are spared later, plus ``gap_weight`` times the gap.

How long prompts may take is bounded: the prompts in line take, by costs, no longer than another policy would need for
them in full steps over its own graphs, less 5%, or `Objective.first_token_limit` times the best for them, whichever is
longer. With a serving engine's own rule as the other, what graphs gain over it goes into the gap; where they gain
little the limit holds. It is a bound on when all prompts in line are computed: the first of them may have their tokens
later than in one long step.

Sizes tried are those of the captured graphs that hold prompts, where nothing is padded, and the limit itself and its
halves, where the step may run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import attrs

from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable
from kpolicy.decision import Decision
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Part
from kpolicy.policies.base import CompiledPolicy, Policy, PolicyContext
from kpolicy.scheduling.line import Line
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers

__all__ = ["Deciding", "EnginePace", "OtherSelect", "Pace", "mixed_numbers", "other_keys", "other_select"]

_HALVES = 5
"""How often the limit is halved for sizes beside those of graphs"""
_MOST_KEPT = 4096
_HELD_STEPS = 16
"""Steps that an answer stands for, while the counts stay alike"""
_SURE = 0.95
"""Share of the other policy's time that is taken for sure: costs are known to some 5%"""
_TOKENS_GRAIN = 4
"""Tokens in line are rounded up to a quarter of a power of two, other counts to a power: a step that is new takes half
a millisecond to weigh, and its cost hardly changes by less"""


def mixed_numbers(num_decodes: int, num_prompts: int, prompt_tokens: int, query_len: int = 1) -> BatchNumbers:
    """A step of decode rows and prompt chunks by counts, with as little KV as its rows can have; either may be none."""
    decode_tokens = num_decodes * query_len
    if not prompt_tokens:
        return BatchNumbers(num_decodes, query_len, decode_tokens, decode_tokens, 0, 0, 0, 0, query_len, query_len, 0,
                            0, 0, 1, decode_tokens, num_decodes, query_len)  # fmt: skip
    even, more = divmod(prompt_tokens, num_prompts)
    pairs = (num_prompts - more) * even * (even + 1) // 2 + more * (even + 1) * (even + 2) // 2
    longest = even + bool(more)
    return BatchNumbers(
        num_decodes, query_len if num_decodes else 0, decode_tokens, decode_tokens, num_prompts, prompt_tokens,
        prompt_tokens, pairs, max(longest, query_len), max(longest, query_len), num_prompts, 0, 0, 1,
        decode_tokens + prompt_tokens, num_decodes + num_prompts, query_len if num_decodes else 0,
    )  # fmt: skip


def _with_kv(numbers: BatchNumbers, decode_kv: int) -> BatchNumbers:
    """The step with that much KV behind its decode rows, which are as long as each other."""
    if decode_kv <= numbers.decode_kv_tokens or not numbers.num_decodes:
        return numbers
    longest = max(numbers.max_kv_len, -(-decode_kv // numbers.num_decodes))
    return numbers._replace(decode_kv_tokens=decode_kv, max_kv_len=longest)


class _Paced(NamedTuple):
    """What the prompts in line take in steps of one size, in microseconds."""

    score: float
    size: int
    prompts_us: float
    """Until all of them are computed"""


class Pace:
    """Most tokens of a step. What it answers is kept, by rounded counts.

    Args:
        context: what the policy reads: captured sizes, costs, limits, objective.
        select: the policy's per-batch path over these.
        other: that of another policy, whose whole steps prompts may take as long as; None for no such bound.
        limit: tokens that a step may have at most, if other than the settings say.
    """

    def __init__(
        self,
        context: PolicyContext,
        select: Callable[..., Decision],
        other: Callable[..., Decision] | None = None,
        *,
        limit: int | None = None,
    ) -> None:
        self._costs, self._objective = context.costs.deciding, context.objective
        self._select, self._other = select, other
        self._q, self._places = context.settings.query_len, context.settings.max_num_reqs
        self._limit = limit = limit or context.settings.max_num_tokens
        self._first: object = None
        self._least = 0
        self._asked = (0, 0, 0)
        """(decodes, those that were weighed, prompts) of the last answer"""
        self._full = False
        """Whether the line was as long as one step, and the answer isn't more for the sake of whoever is first"""
        self._held = 0
        """Steps for which the last answer still stands"""
        held = {key.num_tokens for key in context.ladder.keys if key.part is not Part.FULL or not key.decode_only}
        self._sizes = sorted({size for size in held if size < limit} | {limit >> i for i in range(_HALVES + 1)})
        self._kept: dict[tuple[int, ...], int] = {}

    def prompt_tokens(self, first: object, num_decodes: int, num_prompts: int, line: Callable[[], Line]) -> int:
        """Most prompt tokens of the next step: by the last answer where it stands, else by the line as it is now.

        Args:
            first: what tells whoever is first in line from everybody else, and from itself before a preemption.
            num_decodes: decode rows of the step, at least one.
            num_prompts: prompts in line and behind it.
            line: makes the line, which takes longer than the rest.
        """
        size = self.held(first, num_decodes, num_prompts)
        if size is None:
            size = self.next_step(first, num_decodes, line())
        return size - num_decodes * self._q

    def held(self, first: object, num_decodes: int, num_prompts: int) -> int | None:
        """The last answer of `next_step` where it stands for this step too; None where that is to be asked.

        An answer is for all prompts in line, so it stands for some steps: while the same prompt is first, or whoever is
        first where there were more prompts than one step holds; with no more decodes than it was weighed for, and until
        either number has halved or doubled.

        Args:
            first: whoever is first in line.
            num_decodes: decode rows of the step.
            num_prompts: prompts in line and behind it.
        """
        if self._held and (self._full or first == self._first):
            decodes, most, prompts = self._asked
            if decodes < 2 * num_decodes and num_decodes <= most and prompts < 2 * num_prompts < 4 * prompts:
                self._held -= 1
                self._first = first
                return self._least
        return None

    def next_step(self, first: object, num_decodes: int, line: Line) -> int:
        """Most tokens of the next step: as `most_tokens`, and no less than before while the same prompt is first.

        Else what is left of a prompt would be divided again in each step, and its bound would mean nothing.

        Args:
            first: whoever is first in line.
            num_decodes: as `most_tokens` takes it.
            line: likewise.
        """
        self._held = 0
        if not num_decodes or not line.tokens:
            return self._limit
        size, rows = self._weighed(num_decodes, line)
        self._least = max(size, self._least) if first == self._first else size
        self._first = first
        self._full = num_decodes * self._q + line.tokens >= self._limit and self._least == size
        if self._full or self._least < self._limit:
            self._held = _HELD_STEPS - 1
            self._asked = (num_decodes, rows, line.num_prompts + line.waiting)
        return self._least

    def go_on_from(self, before: Pace) -> None:
        """Take over who is first in line and the least that it gets from the rule by earlier graphs or costs."""
        self._first, self._least = before._first, before._least

    def most_tokens(self, num_decodes: int, line: Line) -> int:
        """Most tokens that the step may have, its decodes included; the limit where that is best.

        Args:
            num_decodes: decode rows of the step, at least one for there to be a gap.
            line: the prompts that could run beside them.
        """
        return self._weighed(num_decodes, line)[0] if num_decodes and line.tokens else self._limit

    def _weighed(self, num_decodes: int, line: Line) -> tuple[int, int]:
        """(most tokens of the step, the most decodes that holds for)."""
        if num_decodes * self._q >= self._limit:
            return self._limit, num_decodes
        key = self._rounded(num_decodes, line)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = self._best(*key)
        return found, key[0]

    def _rounded(self, num_decodes: int, line: Line) -> tuple[int, int, int, int, int, int]:
        """(decodes, prompts, their tokens, requests that wait, KV), rounded up as far as one step holds them.

        KV is the prompts' pairs and the decodes' KV tokens.
        """
        places = self._places
        rows = max(num_decodes, min(_rounded(num_decodes), places - line.num_prompts, (self._limit - 1) // self._q))
        prompts = max(line.num_prompts, min(_rounded(line.num_prompts), places - rows))
        tokens = min(_rounded(line.tokens, _TOKENS_GRAIN), self._limit - rows * self._q)
        pairs, decode_kv = _rounded(line.pairs, _TOKENS_GRAIN), _rounded(line.decode_kv, _TOKENS_GRAIN)
        return rows, min(prompts, tokens), tokens, _rounded(line.waiting), pairs, decode_kv

    def _best(self, rows: int, num_prompts: int, tokens: int, waiting: int, pairs: int, decode_kv: int) -> int:
        """The size of least score within the bound on the first token; the limit where it takes the prompts whole."""
        decode_tokens, costs = rows * self._q, self._costs
        alone = _with_kv(mixed_numbers(rows, 0, 0, self._q), decode_kv)
        whole = _with_kv(mixed_numbers(rows, num_prompts, tokens, self._q), decode_kv)
        if pairs > whole.prefill_pairs:
            # Pairs are new tokens times those before them, so that many more were before them on average.
            before = (pairs - whole.prefill_pairs) // tokens
            whole = whole._replace(
                prefill_pairs=pairs, prefill_kv_tokens=whole.prefill_kv_tokens + num_prompts * before,
                max_kv_len=whole.max_kv_len + before,
            )  # fmt: skip
        decodes = costs.cost(self._select(*alone).launches, alone)
        share = rows / (rows + waiting)
        spared_us = costs.spared_us(decodes.device_us, decodes.host_us, costs.own_attention_us(alone), share)
        longest = 0.0
        if self._other is not None:
            longest = _SURE * costs.cost(self._other(*whole).launches, whole).cycle_us
        limit = self._objective.first_token_limit
        tried = [self._paced(decode_tokens + tokens, whole, waiting, spared_us)]
        # A step with prompts takes no less than its decodes alone: of so many steps none is within the bound.
        most_steps = max(limit * tried[0].prompts_us, longest) / decodes.cycle_us
        for size in self._sizes:
            chunk = size - decode_tokens
            if 0 < chunk < tokens <= chunk * most_steps:
                tried.append(self._paced(size, whole, waiting, spared_us))
        bound = max(limit * min(each.prompts_us for each in tried), longest)
        best = min((each for each in tried if each.prompts_us <= bound), key=lambda each: (each.score, -each.size))
        return self._limit if best is tried[0] else best.size

    def _paced(self, size: int, whole: BatchNumbers, waiting: int, spared_us: float) -> _Paced:
        tokens = whole.num_prefill_tokens
        chunk = size - whole.decode_tokens
        cycle_us, gap_us = self._step(whole, chunk)
        if waiting:
            # The next in line fill the last step too.
            steps = tokens / chunk
            prompts_us = steps * cycle_us
        else:
            steps = -(-tokens // chunk)
            rest = tokens - (steps - 1) * chunk
            last_us = cycle_us if rest == chunk else self._step(whole, rest)[0]
            prompts_us = (steps - 1) * cycle_us + last_us
        weights = self._objective
        work_us = prompts_us - (steps - 1) * spared_us
        return _Paced(weights.step_weight * work_us + weights.gap_weight * gap_us, size, prompts_us)

    def _step(self, whole: BatchNumbers, chunk: int) -> tuple[float, float]:
        """(cycle, gap) of a step with so many of the prompts' tokens, and its share of all their attention."""
        numbers, tokens = whole, whole.num_prefill_tokens
        if chunk < tokens:
            count = max(1, min(chunk, round(whole.num_prefills * chunk / tokens)))
            numbers = _with_kv(mixed_numbers(whole.num_decodes, count, chunk, self._q), whole.decode_kv_tokens)
            # As many before each as in the whole, and half of the prompt itself where the chunk is of its middle.
            before = (whole.prefill_kv_tokens - tokens) // whole.num_prefills
            before += max(0, tokens // whole.num_prefills - chunk // count) // 2
            numbers = numbers._replace(
                prefill_pairs=max(numbers.prefill_pairs, whole.prefill_pairs * chunk // tokens),
                prefill_kv_tokens=chunk + count * before,
                max_kv_len=numbers.max_kv_len + before,
            )
        cost = self._costs.cost(self._select(*numbers).launches, numbers)
        return cost.cycle_us, cost.gap_us


class Deciding(Protocol):
    """What of an Engine `EnginePace` reads."""

    @property
    def compiled(self) -> CompiledPolicy: ...
    @property
    def context(self) -> PolicyContext: ...


class OtherSelect:
    """`other_select` of a policy, prepared once for each table of costs.

    Graphs that come and go are another Engine's: this policy's are those that it would have captured.

    Args:
        policy: the policy.
        sizes: its capture sizes; its own by default.
    """

    def __init__(self, policy: Policy, sizes: CaptureSizes | None = None) -> None:
        self._policy, self._sizes = policy, sizes
        self._costs: CostTable | None = None
        self._select: Callable[..., Decision] | None = None

    def by(self, context: PolicyContext) -> Callable[..., Decision]:
        """The path by a context's costs.

        Raises:
            ConfigError: the policy can't have the graphs that it asks for.
        """
        select = self._select
        if select is None or context.costs is not self._costs:
            select = self._select = other_select(self._policy, context, self._sizes)
            self._costs = context.costs
        return select


class EnginePace:
    """`Pace` by the graphs and costs that an Engine has now: made anew when either changes.

    Args:
        engine: decides the steps.
        other: the policy whose whole steps prompts may take as long as, over its own default sizes; queues of one
            Engine may share what is prepared of it.

    Raises:
        ConfigError: the other policy can't have the graphs that it asks for.
    """

    def __init__(self, engine: Deciding, other: Policy | OtherSelect) -> None:
        self._engine = engine
        self._other = other if isinstance(other, OtherSelect) else OtherSelect(other)
        self._compiled = compiled = engine.compiled
        context = engine.context
        self._pace = Pace(context, compiled.select, self._other.by(context))

    def prompt_tokens(self, first: object, num_decodes: int, num_prompts: int, line: Callable[[], Line]) -> int:
        """As `Pace.prompt_tokens`."""
        compiled = self._engine.compiled
        if compiled is not self._compiled:
            context, before = self._engine.context, self._pace
            self._compiled, self._pace = compiled, Pace(context, compiled.select, self._other.by(context))
            self._pace.go_on_from(before)
        return self._pace.prompt_tokens(first, num_decodes, num_prompts, line)


def _rounded(count: int, grain: int = 1) -> int:
    """A count rounded up to a power of two, or to so many parts of one."""
    if count <= grain:
        return count
    part = max(1, (1 << (count - 1).bit_length()) // (2 * grain))
    return -(-count // part) * part


def other_keys(
    policy: Policy, claims: Claims, settings: Settings, sizes: CaptureSizes | None = None
) -> Sequence[GraphKey]:  # fmt: skip
    """The graphs that another policy would have captured.

    Args:
        policy: the other policy.
        claims: what attention supports.
        settings: the deployment's limits.
        sizes: its capture sizes; its own by default.

    Raises:
        ConfigError: it can't have what it asks for.
    """
    return policy.plan(policy.sizes(settings) if sizes is None else sizes, claims, settings)


def other_select(policy: Policy, context: PolicyContext, sizes: CaptureSizes | None = None) -> Callable[..., Decision]:
    """The per-batch path of another policy over the graphs that it would have captured, priced by the same costs.

    Args:
        policy: the other policy.
        context: what the first one reads.
        sizes: the other's capture sizes; its own by default.

    Raises:
        ConfigError: it can't have what it asks for.
    """
    keys = other_keys(policy, context.claims, context.settings, sizes)
    return policy.compile(attrs.evolve(context, ladder=CaptureLadder(keys, assumed=True))).select
