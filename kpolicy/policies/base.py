"""What a policy is, what it reads, and which ways to run a batch are legal.

A policy is a pure function of (shape, attention support, captured keys, costs). `decide` is the readable form;
`compile` prepares the same function as table look-ups, and `CompiledPolicy.select` equals `decide` on every input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

import attrs

from kpolicy.attention.support import Claims, HostParams
from kpolicy.costs import CostTable
from kpolicy.decision import Decision, Launch
from kpolicy.errors import NoLegalModeError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.reasons import Basis, Reason
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchNumbers, BatchShape

__all__ = [
    "CompiledPolicy",
    "Downgrade",
    "Policy",
    "PolicyContext",
    "Way",
    "admits",
    "eager_decision",
    "full_keys",
    "legal_ways",
    "miss_full",
    "miss_piecewise",
    "no_legal_mode",
    "piecewise_keys",
    "repeats",
    "split_tails",
    "split_way",
    "steps_ahead",
]

_OF_COSTS = Basis.COSTS_ANALYTIC | Basis.COSTS_KERNEL_TABLES
"""What only decisions that go by costs take for granted"""

Select = Callable[..., Decision]
"""``select(*BatchNumbers) -> Decision``: the per-batch path. Uniform decode batches may pass the first three only."""


@attrs.frozen
class Downgrade:
    """A lesser mode at start-up: for which batches, what was asked, what they get, and why."""

    batches: str
    asked: str
    resolved: str
    reason: Reason

    def __str__(self) -> str:
        return f"{self.batches}: {self.asked} -> {self.resolved}, because {self.reason.text}"


def admits(claims: Claims, key: GraphKey) -> bool:
    """Whether attention with these claims can be captured, and replayed rightly, under this key."""
    if key.part is Part.PIECEWISE:
        return claims.piecewise
    full = claims.full
    if key.query_len is not None:
        return key.query_len <= full.uniform_query_len
    if key.max_query_len is not None:
        return key.max_query_len <= full.varlen_query_len
    return full.mixed


@attrs.frozen(kw_only=True)
class PolicyContext:
    """All that a policy may read besides the batch.

    Args:
        claims: what attention supports.
        ladder: keys that may be replayed. Keys that attention doesn't admit are left out of the view.
        costs: what launches take.
        settings: the deployment's limits.
        objective: what `auto` minimises.
        basis: what is taken for granted; every decision carries it.
        spreads: whether the executor lets decode steps wait for their place beside a prompt (`Launch.wait_share`).
    """

    claims: Claims
    ladder: CaptureLadder
    costs: CostTable
    settings: Settings = attrs.field(factory=Settings)
    objective: Objective = attrs.field(factory=Objective)
    basis: Basis = Basis.NOTHING
    spreads: bool = True

    def __attrs_post_init__(self) -> None:
        ladder = self.ladder
        if not all(admits(self.claims, key) for key in ladder.keys):
            kept = [key for key in ladder.keys if admits(self.claims, key)]
            view = CaptureLadder(kept, version=ladder.version, assumed=ladder.assumed, withdrawn=ladder.withdrawn)
            object.__setattr__(self, "ladder", view)


class CompiledPolicy(Protocol):
    """A policy prepared for one context.

    `vote` gives this rank's batch as scalars; ranks take the maximum of each, and `agree` decides from what was
    reduced. `agree` may use the rank's own numbers for what stays on the rank (its own row counts), never for the
    mode or the graph.
    """

    @property
    def select(self) -> Select: ...

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]: ...

    def agree(self, reduced: Sequence[int], numbers: BatchNumbers) -> Decision: ...


@runtime_checkable
class Policy(Protocol):
    """A rule that chooses how a batch runs. Outside packages register theirs as `kpolicy.policies` entry points."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One line for `kpolicy policies`."""
        ...

    @property
    def reads_costs(self) -> bool:
        """Whether costs change the choice."""
        ...

    def sizes(self, settings: Settings) -> CaptureSizes:
        """The sizes it captures when the user gives none."""
        ...

    def plan(self, sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
        """The keys it wants captured: those it can ever choose, no others."""
        ...

    def resolve(self, claims: Claims, settings: Settings) -> tuple[Downgrade, ...]:
        """What start-up takes back of what the policy's name promises."""
        ...

    def decide(self, shape: BatchShape, context: PolicyContext) -> Decision:
        """How the batch runs: the readable form.

        Raises:
            NoLegalModeError: every mode that could run the batch is forbidden.
        """
        ...

    def compile(self, context: PolicyContext) -> CompiledPolicy:
        """The same function, prepared."""
        ...


@attrs.frozen(cache_hash=True)
class Way:
    """One legal way to run a batch: a decision without its reason."""

    mode: Mode
    launches: tuple[Launch, ...]
    form: SplitForm | None = None

    def decided(self, reason: Reason, context: PolicyContext, *, costs: bool = False) -> Decision:
        """The way as a decision, for that reason."""
        return Decision(
            self.mode,
            self.launches,
            reason,
            self.form,
            context.basis if costs else context.basis & ~_OF_COSTS,
            context.costs.version if costs else "",
        )


def _of_case(keys: Iterable[GraphKey], loras: int, holds: Callable[[GraphKey], bool]) -> tuple[GraphKey, ...]:
    """The keys that hold the rows, of the smallest LoRA case that has any: a larger case computes more adapters."""
    fitting = [key for key in keys if key.lora_case >= loras and holds(key)]
    case = min((key.lora_case for key in fitting), default=0)
    return tuple(key for key in fitting if key.lora_case == case)


def full_keys(numbers: BatchNumbers, ladder: CaptureLadder, rows: Rows = Rows.ALL) -> tuple[GraphKey, ...]:
    """FULL graphs that hold those rows, best kind first: uniform decode, variable-length decode, mixed."""
    if rows is Rows.PREFILL:
        return ()
    if rows is Rows.DECODE or not numbers.num_prefills:
        tokens = numbers.decode_tokens if rows is Rows.DECODE else numbers.total_tokens
        reqs = numbers.num_decodes if rows is Rows.DECODE else numbers.total_reqs
        longest = numbers.longest_decode
        loras = numbers.num_active_loras
        for keys in (ladder.uniform.get(numbers.query_len, ()), ladder.varlen, ladder.mixed):
            held = _of_case(keys, loras, lambda key: key.holds(tokens, reqs, numbers.query_len, longest, True, loras))
            if held:
                return held
        return ()
    return _of_case(ladder.mixed, numbers.num_active_loras, lambda key: key.holds_batch(numbers))


def piecewise_keys(numbers: BatchNumbers, ladder: CaptureLadder, rows: Rows = Rows.ALL) -> tuple[GraphKey, ...]:
    """PIECEWISE graphs that hold those rows, smallest first."""
    tokens = numbers.num_prefill_tokens if rows is Rows.PREFILL else numbers.total_tokens
    return _of_case(ladder.piecewise, numbers.num_active_loras, lambda key: key.num_tokens >= tokens)


Pick = Callable[[Sequence[GraphKey], int], Sequence[GraphKey]]
"""Which of the fitting keys may be the one to replay for so many tokens: one, or more where the whole batch tells."""


def legal_ways(
    numbers: BatchNumbers, context: PolicyContext, pick: Pick, *, forms: Iterable[SplitForm] = tuple(SplitForm)
) -> list[Way]:
    """Every legal way to run the batch, with captured sizes as `pick` takes them.

    Whole batches come before divided ones, and graphs before eager: on ties the earlier wins. A forbidden FULL,
    PIECEWISE or EAGER forbids every launch of that kind, halves of a SPLIT included.
    """
    ladder, forbidden = context.ladder, numbers.forbidden
    may_full, may_pieces, may_eager = (not forbidden & mode.bit for mode in (Mode.FULL, Mode.PIECEWISE, Mode.EAGER))
    ways: list[Way] = []
    if not numbers.total_tokens:
        return [Way(Mode.EAGER, ())] if may_eager else []
    whole = full_keys(numbers, ladder) if may_full else ()
    if whole:
        ways += [Way(Mode.FULL, (Launch(Rows.ALL, key),)) for key in pick(whole, numbers.total_tokens)]
    pieces = piecewise_keys(numbers, ladder) if may_pieces else ()
    if pieces:
        ways += [Way(Mode.PIECEWISE, (Launch(Rows.ALL, key),)) for key in pick(pieces, numbers.total_tokens)]
    if may_eager:
        ways.append(Way(Mode.EAGER, (Launch(Rows.ALL, None),)))
    if numbers.num_decodes and numbers.num_prefills and may_full and not forbidden & Mode.SPLIT.bit:
        ways += _split_ways(numbers, context, pick, tuple(forms), may_pieces)
    return ways


def _split_ways(
    numbers: BatchNumbers, context: PolicyContext, pick: Pick, forms: Sequence[SplitForm], pieces: bool
) -> list[Way]:
    decode_keys = full_keys(numbers, context.ladder, Rows.DECODE)
    if not decode_keys:
        return []
    prefill_keys = piecewise_keys(numbers, context.ladder, Rows.PREFILL) if pieces else ()
    *first, piece = pick(prefill_keys, numbers.num_prefill_tokens) if prefill_keys else (None,)
    tails = (*((key, None) for key in first), *split_tails(piece, numbers, context))
    return [
        way
        for form in forms
        for decode in pick(decode_keys, numbers.decode_tokens)
        for way in split_way(decode, tails, form, numbers.max_decode_steps)
    ]


Tails = tuple[tuple["GraphKey | None", "Reason | None"], ...]


def split_tails(piece: GraphKey | None, numbers: BatchNumbers, context: PolicyContext) -> Tails:
    """How the prefill half of a SPLIT can run: its PIECEWISE graph, and eagerly with the reason for that."""
    tails: Tails = ((piece, None),) if piece is not None else ()
    if numbers.forbidden & Mode.EAGER.bit:
        return tails
    why = eager_reason(context) if piece is not None else miss_piecewise(numbers, context, Rows.PREFILL)
    return (*tails, (None, why))


def split_way(decode: GraphKey, tails: Tails, form: SplitForm, most_steps: int) -> list[Way]:
    """The ways to run one form of SPLIT."""
    side = int(form is not SplitForm.IN_TURN)
    return [
        Way(
            Mode.SPLIT,
            (Launch(Rows.DECODE, decode, repeat=repeat), Launch(Rows.PREFILL, key, stream=side, reason=why)),
            form,
        )
        for repeat in repeats(form, most_steps)
        for key, why in tails
    ]


def repeats(form: SplitForm, most: int) -> tuple[int, ...]:
    """Decode steps that a form may run."""
    return steps_ahead(most) if form is SplitForm.DECODES_BESIDE else (1,)


@lru_cache(maxsize=64)
def steps_ahead(most: int) -> tuple[int, ...]:
    """Several decode steps at once, up to `most`: 2, 3, 4, 6, 8, 12, and so on.

    Few, so that prepared decisions stay few, and near enough to each other that where one is just too late for the
    bound on time to first token, the next takes most of what it would have given.
    """
    powers = [1 << i for i in range(1, most.bit_length())]
    return tuple(sorted(steps for power in powers for steps in (power, power + power // 2) if steps <= most))


def eager_reason(context: PolicyContext) -> Reason:
    """The reason for eager where a graph would have held the rows."""
    if context.costs.kernel_tables:
        return Reason.EAGER_IS_CHEAPER_KERNEL_TABLES
    return Reason.EAGER_IS_CHEAPER if context.costs.measured else Reason.EAGER_IS_CHEAPER_ANALYTIC


def graph_reason(context: PolicyContext) -> Reason:
    """The reason for a graph that costs least."""
    if context.costs.kernel_tables:
        return Reason.CHEAPEST_KERNEL_TABLES
    return Reason.CHEAPEST_MEASURED if context.costs.measured else Reason.CHEAPEST_ANALYTIC


def eager_decision(reason: Reason, context: PolicyContext) -> Decision:
    """The whole batch eagerly, for that reason."""
    return Way(Mode.EAGER, (Launch(Rows.ALL, None),)).decided(reason, context)


def miss_full(numbers: BatchNumbers, context: PolicyContext, rows: Rows = Rows.ALL) -> Reason:
    """Why no FULL graph holds those rows."""
    ladder, full, q = context.ladder, context.claims.full, numbers.query_len
    mixed = rows is Rows.ALL and numbers.num_prefills > 0
    if not _tokens(numbers, rows):
        return Reason.EMPTY_BATCH
    if numbers.forbidden & Mode.FULL.bit:
        return Reason.MODE_FORBIDDEN
    if context.claims.host_params is HostParams.FROZEN:
        return Reason.HOST_LENGTHS_FROZEN
    if not (full.mixed if mixed else full.uniform_query_len and q <= full.uniform_query_len):
        return Reason.ATTENTION_NOT_CAPTURABLE
    if _withdrawn(numbers, context, Part.FULL, rows):
        return Reason.GRAPH_WITHDRAWN
    if not ladder.keys:
        return Reason.NO_GRAPHS
    if mixed:
        return _too_small(numbers, (ladder.mixed,), rows) if ladder.mixed else Reason.MIXED_NOT_CAPTURED
    varlen = ladder.varlen
    if q and not any((key.max_query_len or 0) >= q for key in varlen):
        varlen = ()
    lists = (ladder.uniform.get(q, ()), varlen, ladder.mixed)
    if not any(lists):
        return Reason.QUERY_LEN_NOT_CAPTURED if q else Reason.DECODES_NOT_UNIFORM
    return _too_small(numbers, lists, rows)


def miss_piecewise(numbers: BatchNumbers, context: PolicyContext, rows: Rows = Rows.ALL) -> Reason:
    """Why no PIECEWISE graph holds those rows."""
    if not _tokens(numbers, rows):
        return Reason.EMPTY_BATCH
    if numbers.forbidden & Mode.PIECEWISE.bit:
        return Reason.MODE_FORBIDDEN
    if not context.claims.piecewise:
        return Reason.NO_PIECEWISE
    if _withdrawn(numbers, context, Part.PIECEWISE, rows):
        return Reason.GRAPH_WITHDRAWN
    pieces = context.ladder.piecewise
    return _too_small(numbers, (pieces,), rows) if pieces else Reason.NO_GRAPHS


def _tokens(numbers: BatchNumbers, rows: Rows) -> int:
    if rows is Rows.ALL:
        return numbers.total_tokens
    return numbers.decode_tokens if rows is Rows.DECODE else numbers.num_prefill_tokens


def _reqs(numbers: BatchNumbers, rows: Rows) -> int:
    if rows is Rows.ALL:
        return numbers.total_reqs
    return numbers.num_decodes if rows is Rows.DECODE else numbers.num_prefills


def _withdrawn(numbers: BatchNumbers, context: PolicyContext, part: Part, rows: Rows) -> bool:
    """Whether a withdrawn graph would hold the rows."""
    withdrawn, tokens = context.ladder.withdrawn, _tokens(numbers, rows)
    # They rise by size, so that most batches above every graph cost one comparison.
    if not withdrawn or withdrawn[-1].num_tokens < tokens:
        return False
    reqs, decode = _reqs(numbers, rows), rows is Rows.DECODE or (rows is Rows.ALL and not numbers.num_prefills)
    q, longest, loras = numbers.query_len, numbers.longest_decode, numbers.num_active_loras
    return any(
        key.part is part and key.holds(tokens, reqs, q, longest, decode, loras) and admits(context.claims, key)
        for key in reversed(withdrawn)
    )


def _too_small(numbers: BatchNumbers, lists: Sequence[Sequence[GraphKey]], rows: Rows) -> Reason:
    """Why no key of those lists, each rising by size, holds the rows."""
    tokens, reqs, loras = _tokens(numbers, rows), _reqs(numbers, rows), numbers.num_active_loras
    if loras and not any(key.lora_case >= loras for keys in lists for key in reversed(keys)):
        return Reason.LORA_NOT_CAPTURED
    large = []
    for keys in lists:
        for key in reversed(keys):
            if key.num_tokens < tokens:
                break
            if key.lora_case >= loras:
                large.append(key)
    if not large:
        return Reason.ABOVE_LARGEST_SIZE
    longest = numbers.longest_decode
    large = [key for key in large if key.max_query_len is None or key.max_query_len >= longest]
    if large and all(key.num_reqs is not None and key.num_reqs < reqs for key in large):
        return Reason.TOO_MANY_REQS
    return Reason.QUERY_LEN_NOT_CAPTURED if numbers.query_len else Reason.DECODES_NOT_UNIFORM


def no_legal_mode(numbers: BatchNumbers) -> NoLegalModeError:
    """The error for a batch that nothing may run."""
    forbidden = ", ".join(mode.value for mode in Mode if numbers.forbidden & mode.bit)
    return NoLegalModeError(
        f"no mode is left for a step of {numbers.total_tokens} tokens in {numbers.total_reqs} requests: forbidden are "
        f"{forbidden}, and nothing captured holds it in the rest. Allow eager for this step, or capture a graph for it."
    )
