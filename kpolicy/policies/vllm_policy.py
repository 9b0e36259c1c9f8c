"""`VllmPolicy`: one vLLM as it is configured; `kpolicy.policies.vllm` says what it keeps of the original."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kpolicy.attention.support import Claims, HostParams
from kpolicy.decision import Decision
from kpolicy.errors import SupportError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.policies.base import Downgrade, PolicyContext, no_legal_mode
from kpolicy.policies.vllm_keys import VARLEN, Keys, ScannedKeys, matches
from kpolicy.policies.vllm_resolve import (
    VllmMode,
    mode_downgrade,
    resolve_mode,
    support_of,
    support_reason,
    without_pieces,
)
from kpolicy.policies.vllm_sizes import DraftSchedule, aligned, default_list, lora_cases, one_list, tiers
from kpolicy.policies.vllm_tables import VllmTables, decided
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape

__all__ = ["VllmPolicy"]

_MODE_OF = {Part.FULL: Mode.FULL, Part.PIECEWISE: Mode.PIECEWISE}


@attrs.frozen(kw_only=True)
class VllmPolicy:
    """One vLLM as configured; `vllm` makes it and says what the fields mean."""

    version: str
    runner: str
    mode: VllmMode
    specialize_lora: bool
    specialize_active_lora: bool
    piecewise_split: bool
    breakable: bool
    varlen: bool
    drafts: DraftSchedule

    name = "vllm"
    summary = "what vLLM does: FULL, else PIECEWISE, else eager, at the next captured size (0.23 and 0.33, v1 and v2)"
    reads_costs = False
    treats_chunks_as_decodes = True

    @property
    def ladders_apart(self) -> bool:
        """Whether FULL and PIECEWISE graphs each pad to the next size of their own."""
        return self.runner == "v2" and self.version == "0.33"

    @property
    def checks_rows(self) -> bool:
        """Whether dispatch knows the number of requests. v1 trusts that it is within `max_num_seqs`."""
        return self.runner == "v2"

    def sizes(self, settings: Settings) -> CaptureSizes:
        every = default_list(settings, self.version, self.drafts)
        q, reqs = settings.query_len, settings.max_num_reqs
        return CaptureSizes([size for size in every if size % q == 0 and size <= q * reqs], every, every)

    def started(self, claims: Claims, settings: Settings) -> VllmMode:
        """The mode that is left after start-up.

        Raises:
            SupportError: vLLM doesn't start so.
        """
        mode = self._asked(claims)
        q = settings.query_len
        split = self.piecewise_split and claims.piecewise
        if self.varlen:
            if claims.full.varlen_query_len < q:
                raise SupportError(
                    f"variable-length decode graphs need attention that captures decodes of 1 to {q} tokens, but this "
                    f"captures {claims.full}. Leave varlen out."
                )
            only = mode is VllmMode.FULL_DECODE_ONLY or not self._pieces(claims)
            mode = VllmMode.FULL_DECODE_ONLY if only else VllmMode.FULL_AND_PIECEWISE
        return resolve_mode(mode, support_of(claims, q), q, split)

    def _pieces(self, claims: Claims) -> bool:
        return claims.piecewise and (self.piecewise_split or self.breakable)

    def _asked(self, claims: Claims) -> VllmMode:
        """What is configured, less what needs pieces where none can be had."""
        return self.mode if self._pieces(claims) else without_pieces(self.mode, self.version)

    def resolve(self, claims: Claims, settings: Settings) -> tuple[Downgrade, ...]:
        asked, mode = self._asked(claims), self.started(claims, settings)
        found = [] if asked is self.mode else [mode_downgrade(self.mode, asked, Reason.NO_PIECEWISE)]
        if mode is not asked and not (self.varlen and mode.separate):
            found.append(mode_downgrade(asked, mode, support_reason(claims, settings.query_len)))
        return tuple(found)

    def plan(self, sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
        """The graphs that vLLM captures, in its order: PIECEWISE, then FULL, largest first."""
        mode = self.started(claims, settings)
        every = self.configured(one_list(sizes, settings), mode, settings)
        cases, largest = self.cases(settings), every[-1]
        keys = [key for size in every for case in cases for key in self._keys(size, largest, case, mode, settings)]
        return tuple(
            sorted(dict.fromkeys(keys), key=lambda key: (key.part is Part.FULL, -key.num_tokens, -key.lora_case))
        )

    def configured(self, sizes: tuple[int, ...], mode: VllmMode, settings: Settings) -> tuple[int, ...]:
        """The list as the runner changes it for speculation; v2 of 0.33 rounds decode graphs one by one instead."""
        if self.ladders_apart or (self.runner == "v1" and mode.decode is not Mode.FULL):
            return sizes
        return aligned(sizes, settings.query_len)

    def cases(self, settings: Settings) -> tuple[int, ...]:
        """The numbers of active adapters with graphs of their own; 0 is the graph without."""
        if not settings.max_loras:
            return (0,)
        if self.runner == "v2":
            # 0.23 has one graph for all, captured with adapters; 0.33 always has one without.
            plain, counts = self.version == "0.33", self.specialize_lora and self.specialize_active_lora
            counts = counts and plain
        else:
            plain, counts = self.specialize_lora, self.specialize_lora and self.specialize_active_lora
        return ((0,) if plain else ()) + lora_cases(settings, counts)

    def case_of(self, num_active_loras: int, settings: Settings) -> int | None:
        """The case that a batch needs; None where no graph is of it."""
        cases = self.cases(settings)
        if not num_active_loras and (self.runner, self.version) != ("v2", "0.23"):
            return 0 if 0 in cases else None
        return next((case for case in cases if case >= num_active_loras), None)

    def decode_lens(self, settings: Settings) -> tuple[int, ...]:
        """Query lengths with uniform decode graphs."""
        if not self.drafts or not settings.num_speculative_tokens:
            return (settings.query_len,)
        return tuple(sorted({1 + k for k in tiers(self.drafts, settings)}))

    def _keys(self, size: int, largest: int, case: int, mode: VllmMode, settings: Settings) -> Iterable[GraphKey]:
        """The graphs of one configured size and LoRA case."""
        reqs, q = settings.max_num_reqs, settings.query_len
        if mode.separate and self.varlen:
            if size <= q * reqs:
                yield GraphKey(Part.FULL, size, min(size, reqs), max_query_len=q, lora_case=case)
        elif mode.separate and self.ladders_apart:
            for length in self.decode_lens(settings):
                tokens = -(-size // length) * length
                if tokens <= min(q * reqs, largest, length * reqs):
                    yield GraphKey(Part.FULL, tokens, tokens // length, query_len=length, lora_case=case)
        elif mode.separate and q <= size <= q * reqs:
            yield GraphKey(Part.FULL, size, size // q, query_len=q, lora_case=case)
        if mode.mixed is Mode.FULL:
            yield GraphKey(Part.FULL, size, min(size, reqs), lora_case=case)
        elif mode.mixed is Mode.PIECEWISE:
            yield GraphKey(Part.PIECEWISE, size, lora_case=case)

    def decide(self, shape: BatchShape, context: PolicyContext) -> Decision:
        key, reason = self.choose(shape.numbers, self.keys(context), context)
        return decided(key, reason, shape.numbers.total_tokens, context)

    def compile(self, context: PolicyContext) -> VllmTables:
        return VllmTables(self, context)

    def keys(self, context: PolicyContext) -> ScannedKeys:
        """The graphs of the context that this vLLM could have captured."""
        mode = self.started(context.claims, context.settings)
        lens = self.decode_lens(context.settings)

        def own(key: GraphKey) -> bool:
            if key.part is Part.PIECEWISE:
                return mode.mixed is Mode.PIECEWISE
            if not key.decode_only:
                return mode.mixed is Mode.FULL
            return mode.separate and (key.max_query_len is not None if self.varlen else key.query_len in lens)

        ladder: CaptureLadder = context.ladder
        lost = (key for key in ladder.withdrawn if key.stage == "main" and own(key))
        return ScannedKeys(filter(own, ladder.keys), lost, self.ladders_apart)

    def kind(self, numbers: BatchNumbers, query_len: int) -> int:
        """What the runner takes the batch for: a uniform decode of that many tokens a row, `VARLEN`, or 0.

        v1 asks for rows of 1 + k tokens only; as it has no decode graphs of other lengths, that comes to the same.

        Args:
            numbers: the batch.
            query_len: 1 + k.
        """
        longest, reqs = numbers.longest_query, numbers.total_reqs
        if self.varlen:
            return VARLEN if not numbers.num_prefills and longest <= query_len else 0
        if longest * reqs != numbers.total_tokens:
            return 0
        # v2 of 0.33 alone asks what the rows are; a last prompt token over existing context runs as a decode there.
        one_token_chunks = numbers.num_prefill_tokens == numbers.num_prefills and not numbers.num_first_chunks
        return longest if one_token_chunks or not self.ladders_apart else 0

    def choose(self, numbers: BatchNumbers, keys: Keys, context: PolicyContext) -> tuple[GraphKey | None, Reason]:
        """The graph that replays, or None for eager, and why.

        Raises:
            NoLegalModeError: nothing fits, and eager is forbidden.
        """
        case = self.case_of(numbers.num_active_loras, context.settings)
        kind = self.kind(numbers, context.settings.query_len)
        key, reason = self.dispatch(keys, numbers.total_tokens, numbers.total_reqs, kind, case, numbers.forbidden)
        if key is None and numbers.forbidden & Mode.EAGER.bit:
            raise no_legal_mode(numbers)
        return key, reason or self.miss(numbers, keys, context, case, kind)

    def dispatch(
        self, keys: Keys, num_tokens: int, num_reqs: int, kind: int, case: int | None, forbidden: int
    ) -> tuple[GraphKey | None, Reason | None]:
        """What vLLM's dispatcher does, which sees no more of a batch than this.

        Returns:
            The graph and why it was taken; or None and what kept a graph that would have fitted from replaying, None
            where there is no such graph.
        """
        reason = None
        for key in keys.tried(num_tokens, case) if case is not None and num_tokens else ():
            if not matches(key, kind) or not self.has_rows(key, num_reqs):
                continue
            if forbidden & _MODE_OF[key.part].bit:
                reason = reason or Reason.MODE_FORBIDDEN
            elif key in keys.lost:
                reason = reason or Reason.GRAPH_WITHDRAWN
            else:
                second = key.part is Part.PIECEWISE and keys.has_full
                return key, Reason.NEXT_MODE if second else Reason.GRAPH_FITS
        return None, reason

    def has_rows(self, key: GraphKey, num_reqs: int) -> bool:
        """Whether dispatch finds the graph's rows enough."""
        return not self.checks_rows or key.num_reqs is None or key.num_reqs >= num_reqs

    def miss(self, numbers: BatchNumbers, keys: Keys, context: PolicyContext, case: int | None, kind: int) -> Reason:
        """Which of its causes vLLM's one answer "none" has here."""
        if not numbers.total_tokens:
            return Reason.EMPTY_BATCH
        if not keys.planned:
            return self._no_keys(context)
        if len(keys.lost) == len(keys.planned):
            return Reason.GRAPH_WITHDRAWN
        if case is None or not keys.has_case(case):
            return Reason.LORA_NOT_CAPTURED
        reach = keys.reach(case, kind)
        if not reach:
            if numbers.num_prefills:
                return Reason.MIXED_NOT_CAPTURED
            return Reason.QUERY_LEN_NOT_CAPTURED if numbers.query_len else Reason.DECODES_NOT_UNIFORM
        if numbers.total_tokens > reach:
            return Reason.ABOVE_LARGEST_SIZE
        tried = keys.tried(numbers.total_tokens, case)
        return Reason.TOO_MANY_REQS if any(matches(key, kind) for key in tried) else Reason.SIZE_NOT_CAPTURED

    def _no_keys(self, context: PolicyContext) -> Reason:
        if self.mode is VllmMode.NONE:
            return Reason.POLICY_IS_EAGER
        claims = context.claims
        if self.started(claims, context.settings) is not VllmMode.NONE:
            return Reason.NO_GRAPHS
        if self._asked(claims) is VllmMode.NONE:
            return Reason.NO_PIECEWISE
        frozen = claims.host_params is HostParams.FROZEN
        return Reason.HOST_LENGTHS_FROZEN if frozen else Reason.ATTENTION_NOT_CAPTURABLE
