"""SGLang's per-batch rule, and how its data-parallel ranks agree. `kpolicy.policies.sglang` says what it is for."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kpolicy.decision import Decision
from kpolicy.modes import Mode, Part
from kpolicy.policies.graphs import Graphs, Kind, decode_kind
from kpolicy.policies.rule import agreed_decision
from kpolicy.reasons import Reason
from kpolicy.shapes import BatchNumbers

__all__ = ["PREFIX_VARIANTS", "SglangRanks", "SglangRule", "prefix_variant"]

MOST_PADDING = 2
"""A prefill bucket may be at most this many times the batch's tokens (prefill_cuda_graph_runner.py)."""
PREFIX_VARIANTS = (1, 2, 4, 8, 16)
"""Cached-prefix chunks that FULL prefill graphs are captured for (prefill_cuda_graph_runner.py)."""
_EAGER = Mode.EAGER.bit


def prefix_variant(chunks: int) -> str:
    """The key variant of a FULL prefill graph that reads a cached prefix of so many chunks."""
    return f"prefix{chunks}"


@attrs.frozen(kw_only=True)
class SglangRule:
    """The rule over one context's graphs; the arguments are those of `SglangPolicy`, resolved.

    Facts it reads, all absent by default (false, or 0):

    ==================== ===============================================================================
    `replace_embeds`     some rows' token embeddings are replaced (decode and prefill)
    `encoder_lens_zero`  a row of an encoder-decoder has no encoder tokens (decode)
    `cannot_overlap`     the batch has no two-batch split (decode, with `two_batch_overlap`)
    `cp_refused`         context parallelism isn't active or has another shape than captured (prefill)
    `multimodal`         the batch has multimodal inputs (prefill, with `multimodal_eager`)
    `lora_ineligible`    the LoRA backend refuses prefill graphs for this batch (prefill)
    `input_embeds`       rows bring embeddings in place of token ids (prefill)
    `longest_prefix`     the longest cached prefix of a row, in tokens; else the most the counts allow
    `target_verify`      the rows verify drafts (prefill)
    `hidden_states`      hidden states wanted: 0 none, 1 the last, 2 all (prefill)
    `logprobs`           prompt log-probabilities are wanted (prefill; `captured_tail`, and DP conversion)
    `backend_refused`    the attention backend refuses the batch (prefill)
    `keep_decode`        the decode batch can't become an extend batch: grammar or beam search (DP)
    ==================== ===============================================================================
    """

    graphs: Graphs = attrs.field(kw_only=False)
    width: int
    exact: bool
    decode_off: bool
    overlap: bool
    prefill: Kind | None
    slots: int
    prefix_chunk: int
    metadata_reqs: int
    max_seq_len: int
    hidden_states: int
    captured_tail: bool
    multimodal_eager: bool
    eager_mixed: bool
    no_prefix: bool
    lora: bool
    lora_eager: bool
    plain: bool = attrs.field(init=False)
    """Whether only facts and drafts can refuse a prefill graph before its size is looked at."""

    def __attrs_post_init__(self) -> None:
        limits = (self.slots, self.metadata_reqs, self.max_seq_len, self.prefix_chunk)
        flags = (self.lora_eager, self.eager_mixed, self.no_prefix)
        object.__setattr__(self, "plain", self.prefill is not None and not any(limits) and not any(flags))

    def __call__(self, numbers: BatchNumbers) -> Decision:
        """How the batch runs."""
        if not numbers.total_tokens:
            return self.graphs.eager(Reason.EMPTY_BATCH, numbers)
        found = self.extend(numbers) if numbers.num_prefills else self.decode(numbers)
        return self.graphs.eager(found, numbers) if isinstance(found, Reason) else found

    def decode(self, numbers: BatchNumbers) -> Decision | Reason:
        """The decode graph, or why not: every row has the captured width, and the row count fits."""
        fact = numbers.facts.get
        if self.decode_off:
            return Reason.PHASE_DISABLED
        if fact("replace_embeds"):
            return Reason.REPLACED_EMBEDDINGS
        if numbers.query_len != self.width:
            return Reason.WIDTH_DIFFERS if numbers.query_len else Reason.DECODES_NOT_UNIFORM
        found = self.take_decode(numbers.total_reqs, numbers)
        if isinstance(found, Reason):
            return found
        if fact("encoder_lens_zero"):
            return Reason.ENCODER_LENGTHS_ZERO
        return Reason.MICROBATCHES_DIFFER if self.overlap and fact("cannot_overlap") else found

    def take_decode(self, num_reqs: int, numbers: BatchNumbers) -> Decision | Reason:
        """The decode graph for that many rows of the captured width."""
        return self.graphs.take(decode_kind(self.width), num_reqs * self.width, numbers, exact=self.exact)

    def extend(self, numbers: BatchNumbers) -> Decision | Reason:
        """The prefill graph, or why not, in the order SGLang asks."""
        if self.plain and not numbers.facts and numbers.decode_tokens == numbers.num_decodes:
            return self.take_prefill(numbers.total_tokens, 0, numbers)
        reason = self.refuses(numbers) or self.refuses_content(numbers)
        if reason is not None:
            return reason
        prefix = self.longest_prefix(numbers) if self.prefix_chunk else 0
        found = self.take_prefill(numbers.total_tokens, prefix, numbers)
        if not isinstance(found, Reason) and numbers.facts.get("backend_refused"):
            return Reason.BACKEND_REFUSED
        return found

    def refuses(self, numbers: BatchNumbers) -> Reason | None:
        """What the batch's form refuses of a prefill graph."""
        fact = numbers.facts.get
        reqs = numbers.total_reqs
        if self.prefill is None:
            return Reason.PHASE_DISABLED
        if fact("cp_refused"):
            return Reason.CONTEXT_PARALLEL_SHAPE
        if self.multimodal_eager and fact("multimodal"):
            return Reason.MULTIMODAL_INPUTS
        if (self.slots and reqs > self.slots) or (self.metadata_reqs and reqs > self.metadata_reqs):
            return Reason.TOO_MANY_REQS
        if self.lora_eager or fact("lora_ineligible"):
            return Reason.LORA_NOT_CAPTURED
        if self.eager_mixed and numbers.num_decodes and numbers.num_prefills:
            return Reason.EAGER_MIXED_PREFERRED
        return None

    def refuses_content(self, numbers: BatchNumbers) -> Reason | None:
        """What the batch's content refuses of a prefill graph, sizes aside."""
        fact = numbers.facts.get
        if fact("input_embeds"):
            return Reason.INPUT_EMBEDDINGS
        if fact("replace_embeds"):
            return Reason.REPLACED_EMBEDDINGS
        prefix = self.longest_prefix(numbers) if self.no_prefix or self.prefix_chunk else 0
        if self.no_prefix and prefix:
            return Reason.PREFIX_NOT_CAPTURED
        if self.prefix_chunk and prefix > self.prefix_chunk * PREFIX_VARIANTS[-1]:
            return Reason.PREFIX_TOO_LONG
        if fact("target_verify") or numbers.decode_tokens != numbers.num_decodes:
            return Reason.TARGET_VERIFY
        if fact("hidden_states", 0) > self.hidden_states:
            return Reason.HIDDEN_STATES_WANTED
        if self.captured_tail and fact("logprobs"):
            return Reason.LOGPROBS_WANTED
        return Reason.CONTEXT_TOO_LONG if self.max_seq_len and numbers.max_kv_len > self.max_seq_len else None

    def take_prefill(self, tokens: int, prefix: int, numbers: BatchNumbers) -> Decision | Reason:
        """The smallest prefill graph for that many tokens, unless it pads too much."""
        kind = self.prefill
        if kind is None:
            return Reason.PHASE_DISABLED
        if self.prefix_chunk and prefix:
            chunks = -(-prefix // self.prefix_chunk)
            kind = Kind(Part.FULL, None, prefix_variant(next(n for n in PREFIX_VARIANTS if n >= chunks)))
        found = self.graphs.take(kind, tokens, numbers)
        if not isinstance(found, Reason) and found.keys[0].num_tokens > MOST_PADDING * tokens:
            return Reason.PADDING_OVER_LIMIT
        return found

    def longest_prefix(self, numbers: BatchNumbers) -> int:
        """KV tokens before this step of the row that has most; an upper bound where only totals are known.

        A decode row of a mixed batch is an extend of one token, all but one of its KV being prefix.
        """
        said: int | None = numbers.facts.get("longest_prefix")
        if said is not None:
            return said
        cached = numbers.prefill_kv_tokens - numbers.num_prefill_tokens
        if not numbers.num_decodes and (numbers.num_prefills == 1 or not cached):
            return cached
        return max(0, numbers.max_kv_len - 1)


@attrs.frozen
class SglangRanks:
    """Ranks agree as SGLang's scheduler does: each votes, and one "no" is everyone's.

    A step with a prefill row on any rank is an extend step on all: decode batches are turned into extends of one
    token a row where they can be. Every rank replays the bucket of the rank with most tokens (or rows, in decode).
    """

    rule: SglangRule

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]:
        tokens = numbers.total_tokens
        return (
            tokens,
            numbers.total_reqs,
            self._prefix(numbers),
            numbers.num_active_loras,
            int(numbers.num_prefills > 0),
            int(not tokens),
            int(tokens > 0 and self._decode_reason(numbers) is not None),
            int(tokens > 0 and self._prefill_reason(numbers) is not None),
            int(bool(numbers.forbidden & _EAGER)),
        )

    def agree(self, reduced: Sequence[int], numbers: BatchNumbers) -> Decision:
        tokens, reqs, prefix, loras, extend, idle, no_decode, no_prefill, no_eager = reduced
        rule = self.rule
        # What stays on the rank (its facts, its forbidden modes) was voted on; only agreed counts are read below.
        agreed = BatchNumbers(0, num_active_loras=loras, forbidden=_EAGER * no_eager)
        if not tokens:
            return rule.graphs.eager(Reason.EMPTY_BATCH, agreed)
        found: Decision | Reason = Reason.RANK_NEEDS_EAGER
        if extend and not (no_prefill or idle):
            found = rule.take_prefill(tokens, prefix, agreed)
        elif not extend and not no_decode:
            found = rule.take_decode(reqs, agreed)
        if not numbers.total_tokens:
            return agreed_decision(rule.graphs, found, agreed, None)
        own = self._prefill_reason(numbers) if extend else self._decode_reason(numbers)
        if isinstance(found, Reason) and own is not None:
            return rule.graphs.eager(own, agreed)
        allowed = numbers._replace(forbidden=numbers.forbidden & ~_EAGER)
        return agreed_decision(rule.graphs, found, agreed, rule(allowed))

    def _decode_reason(self, numbers: BatchNumbers) -> Reason | None:
        """Why this rank can't replay a decode graph; None when it can."""
        if numbers.num_prefills:
            return Reason.MIXED_NOT_CAPTURED
        found = self.rule.decode(numbers)
        return found if isinstance(found, Reason) else None

    def _prefill_reason(self, numbers: BatchNumbers) -> Reason | None:
        """Why this rank can't replay a prefill graph, its decode rows taken as extends of one token."""
        rule = self.rule
        fact = numbers.facts.get
        if rule.lora:
            return Reason.LORA_NOT_CAPTURED
        if not numbers.num_prefills:
            kept = rule.width > 1 or rule.overlap or fact("logprobs") or fact("keep_decode")
            # Only breakable graphs take converted rows: the request slots of FULL ones don't cover them.
            if kept or rule.prefill is None or rule.prefill.part is Part.FULL:
                return Reason.PHASE_DISABLED if rule.prefill is None else Reason.MIXED_NOT_CAPTURED
        found = rule.extend(numbers)
        return found if isinstance(found, Reason) else None

    def _prefix(self, numbers: BatchNumbers) -> int:
        return self.rule.longest_prefix(numbers) if numbers.num_prefills and self.rule.prefix_chunk else 0
