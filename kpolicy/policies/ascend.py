"""`ascend`: what vLLM-Ascend does, from reading (August 2026); vLLM's rule with sizes and modes of its own.

Flaws kept:

- The largest size isn't added to the list: with 100 requests the sizes end at 96, and decodes of 97 to 100 have no
  graph (issue 16049 reports such steps 7.5 times slower, without a word in the log). The maximum is
  requests x (1 + k), where vLLM doubles it.
- One padded size is tried. Where its FULL graph is missing the batch drops to PIECEWISE or eager, though a larger FULL
  graph would hold it.
- A uniform decode batch is told by lengths: without speculation, prompt chunks of one token pass for decodes. With
  speculation each request must have computed tokens, but a chunk of 1 + k tokens still passes.
- With speculation a batch without drafts, or with one row short of them, leaves the FULL graphs.
- In mode FULL no batch counts as uniform decode.
- The modes FULL and FULL_DECODE_ONLY aren't compiled in pieces: where attention refuses, there is only eager.

Not modelled: full graphs refused under context parallelism, the four-size limit of Ascend 950, Xlite. Where vLLM
aborts (FULL, and attention that captures nothing), the replica downgrades.

Sources (vllm-ascend 182b75ea): vllm_ascend/platform.py, vllm_ascend/compilation/acl_graph.py; the rule is vLLM's
v1/cudagraph_dispatcher.py and config/compilation.py.
"""

from __future__ import annotations

from math import lcm

import attrs

from kpolicy.attention.support import Claims
from kpolicy.decision import Decision
from kpolicy.errors import ConfigError, LadderError, UnknownNameError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.policies.base import Downgrade, PolicyContext, admits
from kpolicy.policies.graphs import MIXED, PIECES, Graphs, Kind, decode_kind, refusal
from kpolicy.policies.min_ranks import MinRanks
from kpolicy.policies.rule import Choose, CompiledRule, by_lora_case, decide_by_rule, downgrade
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape

__all__ = ["AscendPolicy", "ascend", "default_ladder", "stepped_sizes"]

MOST_TOKENS = 512
"""The largest default capture size."""
_NONE, _PIECEWISE, _FULL, _DECODE_ONLY, _BOTH = (
    "none",
    "piecewise",
    "full",
    "full_decode_only",
    "full_and_piecewise",
)
MODES = (_NONE, _PIECEWISE, _FULL, _DECODE_ONLY, _BOTH)


def stepped_sizes(largest: int) -> tuple[int, ...]:
    """The sizes of vLLM up to `largest`, which isn't added itself: 1, 2, 4, by 8 below 256, then by 16."""
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16))
    return tuple(size for size in steps if size <= largest)


def default_ladder(largest: int, multiple_of: int) -> tuple[int, ...]:
    """`stepped_sizes`, each rounded up to a multiple; those that pass `largest` by it are dropped."""
    rounded = sorted({-(-size // multiple_of) * multiple_of for size in stepped_sizes(largest)})
    return tuple(size for size in rounded if size <= largest)


def ascend(mode: str = _BOTH, align: int = 1) -> AscendPolicy:
    """The replica of vLLM-Ascend.

    Args:
        mode: what is configured: ``none``, ``piecewise``, ``full``, ``full_decode_only`` or ``full_and_piecewise``.
        align: sizes must be its multiples: the tensor-parallel size under sequence parallelism, shared-expert data
            parallelism or context parallelism of sparse attention, else 1.

    Raises:
        ConfigError: a value isn't allowed.
    """
    return AscendPolicy(mode=mode.lower() if isinstance(mode, str) else mode, align=align)


@attrs.frozen(kw_only=True)
class AscendPolicy:
    """vLLM-Ascend's rule; see `ascend`."""

    mode: str = attrs.field(default=_BOTH)
    align: int = attrs.field(default=1)

    name = "ascend"
    summary = "replica of vLLM-Ascend, from reading: FULL for uniform decode, PIECEWISE for the rest, sizes to 512"
    reads_costs = False
    treats_chunks_as_decodes = True

    def __attrs_post_init__(self) -> None:
        if self.mode not in MODES:
            raise UnknownNameError("ascend mode", self.mode, MODES)
        if not isinstance(self.align, int) or self.align < 1:
            raise ConfigError(f"ascend: align is {self.align!r}; it is a whole number of at least 1.")

    def sizes(self, settings: Settings) -> CaptureSizes:
        q = settings.query_len
        largest = min(settings.max_num_reqs * q, MOST_TOKENS, settings.max_num_tokens)
        widths = q if self.mode in (_FULL, _DECODE_ONLY, _BOTH) else 1
        ladder = tuple(size for size in default_ladder(largest, widths) if size % lcm(widths, self.align) == 0)
        if not ladder:
            raise LadderError(
                f"ascend: no capture size up to {largest} is a multiple of {lcm(widths, self.align)} "
                f"(1 + k = {widths}, align = {self.align}); raise max_num_reqs or lower align."
            )
        return CaptureSizes(tuple(size for size in ladder if size % q == 0), ladder, ladder)

    def plan(self, sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
        sizes.check(settings)
        mode, q, most = self.resolved(claims, settings), settings.query_len, settings.max_num_reqs
        keys: list[GraphKey] = []
        if mode in (_DECODE_ONLY, _BOTH):
            keys += [GraphKey(Part.FULL, size, size // q, query_len=q) for size in sizes.decode]
        if mode == _FULL:
            keys += [GraphKey(Part.FULL, size, min(size, most)) for size in sizes.mixed]
        if mode in (_PIECEWISE, _BOTH):
            keys += [GraphKey(Part.PIECEWISE, size) for size in sizes.piecewise]
        return tuple(key for key in by_lora_case(keys, settings) if admits(claims, key))

    def resolved(self, claims: Claims, settings: Settings) -> str:
        """The mode that start-up comes to: vLLM's downgrades, with and without pieces."""
        mode = self.mode
        pieces = claims.piecewise and mode in (_PIECEWISE, _BOTH)
        decodes = claims.full.uniform_query_len >= settings.query_len
        if mode == _FULL and not claims.full.mixed:
            mode = _DECODE_ONLY
        if mode == _BOTH and not pieces:
            mode = _DECODE_ONLY
        if mode in (_DECODE_ONLY, _BOTH) and not decodes:
            mode = _PIECEWISE
        return _NONE if mode == _PIECEWISE and not pieces else mode

    def resolve(self, claims: Claims, settings: Settings) -> tuple[Downgrade, ...]:
        got = self.resolved(claims, settings)
        if got == self.mode:
            return ()
        kind = MIXED if self.mode == _FULL else decode_kind(settings.query_len)
        if not refusal(kind, claims):
            kind = PIECES
        return (downgrade("all batches", self.mode, got, kind, claims),)

    def bind(self, graphs: Graphs) -> Choose:
        """The rule over these graphs."""
        return _rule(graphs, *self._kinds(graphs), asked=self.mode)

    def _kinds(self, graphs: Graphs) -> tuple[Kind | None, Kind | None]:
        """The lists for uniform decodes and for all batches, after start-up."""
        mode = self.resolved(graphs.context.claims, graphs.settings)
        decodes = decode_kind(graphs.settings.query_len) if mode in (_DECODE_ONLY, _BOTH) else None
        return decodes, {_FULL: MIXED, _PIECEWISE: PIECES, _BOTH: PIECES}.get(mode)

    def decide(self, shape: BatchShape, context: PolicyContext) -> Decision:
        return decide_by_rule(self, shape, context)

    def compile(self, context: PolicyContext) -> CompiledRule:
        return CompiledRule(self, context, self._ranks)

    def _ranks(self, graphs: Graphs, choose: Choose) -> MinRanks:
        decodes, others = self._kinds(graphs)

        def take(mode: Mode, tokens: int, agreed: BatchNumbers) -> Decision | Reason:
            kind = decodes or others if mode is Mode.FULL else others
            padded = graphs.next_size(tokens)
            if kind is None or padded is None:
                return Reason.RANK_NEEDS_EAGER
            return graphs.take(kind, padded, agreed, exact=True)

        return MinRanks(graphs, choose, take)


def _rule(graphs: Graphs, decodes: Kind | None, others: Kind | None, *, asked: str) -> Choose:
    """The dispatch: one padded size, its FULL decode graph for uniform batches, then the list for all batches."""
    settings = graphs.settings
    promised = MIXED if asked == _FULL else PIECES if asked == _PIECEWISE else decode_kind(settings.query_len)
    nothing = refusal(promised, graphs.context.claims) or Reason.NO_GRAPHS
    if asked == _NONE:
        nothing = Reason.POLICY_IS_EAGER

    def find(numbers: BatchNumbers) -> Decision | Reason:
        if decodes is None and others is None:
            return nothing
        uniform = decodes is not None and uniform_decode(numbers, settings)
        if others is None and not uniform:
            return not_uniform(numbers)
        padded = graphs.next_size(numbers.total_tokens)
        if padded is None:
            return Reason.ABOVE_LARGEST_SIZE if graphs.sizes else Reason.NO_GRAPHS
        if uniform and decodes is not None:
            found = graphs.take(decodes, padded, numbers, exact=True)
            if others is None or not isinstance(found, Reason):
                return found
        # PIECEWISE is a step down for a batch of decode rows alone, and what the mode means for any other.
        first = decodes is None or numbers.num_prefills > 0
        return graphs.take(others or PIECES, padded, numbers, exact=True, first=first)

    def choose(numbers: BatchNumbers) -> Decision:
        if not numbers.total_tokens:
            return graphs.eager(Reason.EMPTY_BATCH, numbers)
        found = find(numbers)
        if found is Reason.EXACT_SIZE_NOT_CAPTURED:
            # Here the exact size is the one that the rule pads to.
            found = Reason.SIZE_NOT_CAPTURED
        return graphs.eager(found, numbers) if isinstance(found, Reason) else found

    return choose


def not_uniform(numbers: BatchNumbers) -> Reason:
    """Why a batch isn't a uniform decode."""
    if numbers.num_prefills:
        return Reason.MIXED_NOT_CAPTURED
    return Reason.WIDTH_DIFFERS if numbers.query_len else Reason.DECODES_NOT_UNIFORM


def uniform_decode(numbers: BatchNumbers, settings: Settings) -> bool:
    """Whether vLLM-Ascend takes the batch for a uniform decode: by its lengths, not by which rows are which."""
    q = settings.query_len
    if numbers.longest_query != q or numbers.total_tokens != q * numbers.total_reqs:
        return False
    return q == 1 or not numbers.num_first_chunks
