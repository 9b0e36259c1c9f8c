"""`tensorrt_llm`: what TensorRT-LLM's PyTorch backend does, from reading copies of several versions; nothing was run.

A batch without context requests replays a FULL graph of exactly its size, or of the next one where padding is on. A
context request whose last chunk is one token counts as a decode where that gives the whole batch a graph. Any other
batch with context requests replays a prefill graph where those are on.

Flaws kept:

- Padding is off by default, and then only 1 to 32, 64, 128 and powers of two above replay: 33 rows run eagerly.
- Prefill padding is mandatory and has no limit.
- A mixed batch never keeps its decode rows in a FULL graph.

Not modelled: sampling tiers in the key, padding given up because no dummy request could be allocated, and prefill sizes
that no batch can reach being clamped (that takes the longest sequence, which `Settings` doesn't have).

Sources (NVIDIA/TensorRT-LLM, 2026): tensorrt_llm/_torch/pyexecutor/cuda_graph_runner.py,
tensorrt_llm/_torch/pyexecutor/engine/runners/common.py, tensorrt_llm/llmapi/llm_args.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kpolicy.attention.support import Claims
from kpolicy.decision import Decision
from kpolicy.errors import UnknownNameError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.policies.base import Downgrade, PolicyContext, admits
from kpolicy.policies.graphs import PIECES, Graphs, decode_kind, refusal
from kpolicy.policies.rule import (
    Choose,
    CompiledRule,
    agreed_decision,
    by_lora_case,
    decide_by_rule,
    downgrade,
    smaller,
)
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import LARGEST_COUNT, BatchNumbers, BatchShape

__all__ = ["TensorRtLlmPolicy", "decode_sizes", "prefill_sizes"]

DEFAULT_MOST_REQS = 128
"""Largest decode graph where none is given (llm_args.py)."""
_EAGER = Mode.EAGER.bit


def decode_sizes(max_reqs: int, *, padding: bool) -> tuple[int, ...]:
    """TensorRT-LLM's default decode sizes in requests, up to and with `max_reqs` (llm_args.py)."""
    if padding:
        steps = [1, 2, 4, *range(8, 129, 8), *range(192, max_reqs + 1, 64)]
    else:
        steps = [*range(1, 33), 64, 128, *(1 << i for i in range(8, max_reqs.bit_length()))]
    sizes = smaller(steps, max_reqs)
    return sizes if sizes[-1] == max_reqs else (*sizes, max_reqs)


def prefill_sizes(max_tokens: int) -> tuple[int, ...]:
    """The prefill sizes its documentation gives: powers of two to 128, then each 256 up to 3,072."""
    return smaller([*(1 << i for i in range(8)), *range(256, 3073, 256)], max_tokens)


@attrs.frozen(kw_only=True)
class TensorRtLlmPolicy:
    """TensorRT-LLM's rule.

    Args:
        enable_padding: its option of that name: pad decode batches to the next captured size.
        prefill: ``disabled``, ``piecewise`` or ``breakable``; both of the latter are PIECEWISE here.
        max_reqs: largest decode graph, in requests.

    Raises:
        UnknownNameError: `prefill` is none of these.
    """

    enable_padding: bool = False
    prefill: str = "disabled"
    max_reqs: int = DEFAULT_MOST_REQS

    name = "tensorrt_llm"
    summary = "replica of TensorRT-LLM's PyTorch backend, from reading: FULL for generation only, exact size or padded"
    reads_costs = False
    treats_chunks_as_decodes = True

    def __attrs_post_init__(self) -> None:
        allowed = ("disabled", "piecewise", "breakable")
        if self.prefill not in allowed:
            raise UnknownNameError("tensorrt_llm prefill graph", self.prefill, allowed)

    def sizes(self, settings: Settings) -> CaptureSizes:
        q = settings.query_len
        # Sizes over what a step can hold are dropped; with padding the last is clamped to it instead.
        held = min(settings.max_num_reqs, settings.max_num_tokens // q)
        asked = decode_sizes(self.max_reqs, padding=self.enable_padding)
        rows = smaller(asked, held)
        if self.enable_padding and rows != asked and (not rows or rows[-1] != held):
            rows = (*rows, held)
        prefill = prefill_sizes(settings.max_num_tokens)
        return CaptureSizes(tuple(size * q for size in rows), (), prefill)

    def plan(self, sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
        sizes.check(settings)
        rows = [size // settings.query_len for size in sizes.decode]
        keys = [GraphKey(Part.FULL, n * q, n, query_len=q) for q in settings.decode_query_lens for n in rows]
        if self.prefill != "disabled":
            keys += [GraphKey(Part.PIECEWISE, size) for size in sizes.piecewise]
        return tuple(key for key in by_lora_case(keys, settings) if admits(claims, key))

    def resolve(self, claims: Claims, settings: Settings) -> tuple[Downgrade, ...]:
        found = [
            downgrade(f"decodes of {q} tokens", Mode.FULL.value, Mode.EAGER.value, decode_kind(q), claims)
            for q in settings.decode_query_lens
            if refusal(decode_kind(q), claims)
        ]
        if self.prefill != "disabled" and refusal(PIECES, claims):
            found.append(downgrade("batches with prefill", self.prefill, Mode.EAGER.value, PIECES, claims))
        return tuple(found)

    def bind(self, graphs: Graphs) -> Choose:
        """The rule over these graphs."""
        return _Rule(graphs, self)

    def decide(self, shape: BatchShape, context: PolicyContext) -> Decision:
        return decide_by_rule(self, shape, context)

    def compile(self, context: PolicyContext) -> CompiledRule:
        return CompiledRule(self, context, lambda graphs, _: _Ranks(_Rule(graphs, self)))


@attrs.frozen
class _Rule:
    """The rule over one context's graphs.

    Facts it reads, all false when absent: `expert_statistics` (they are on for this step), `not_last_chunk` (a chunk
    of one token isn't its prompt's last), `beam_search`, `disaggregated` and `input_embeds` (each keeps a context
    request from counting as a decode), `context_logits` (prompt logits are wanted).
    """

    graphs: Graphs
    policy: TensorRtLlmPolicy

    def __call__(self, numbers: BatchNumbers) -> Decision:
        if not numbers.total_tokens:
            return self.graphs.eager(Reason.EMPTY_BATCH, numbers)
        found = self.generation(numbers)
        if isinstance(found, Reason) and numbers.num_prefills:
            found = self.context(numbers.total_tokens, numbers)
        return self.graphs.eager(found, numbers) if isinstance(found, Reason) else found

    def generation(self, numbers: BatchNumbers) -> Decision | Reason:
        """The FULL graph of a batch in which every row decodes, or may count as decoding."""
        q = numbers.query_len
        if numbers.num_prefills:
            if not self.promotes(numbers):
                return Reason.MIXED_NOT_CAPTURED
            q = 1
        if numbers.facts.get("expert_statistics"):
            return Reason.EXPERT_STATISTICS
        if not q:
            return Reason.DECODES_NOT_UNIFORM
        return self.take_decode(numbers.total_reqs, q, numbers)

    def take_decode(self, num_reqs: int, query_len: int, numbers: BatchNumbers) -> Decision | Reason:
        """The graph for that many decode rows."""
        exact = not self.policy.enable_padding
        return self.graphs.take(decode_kind(query_len), num_reqs * query_len, numbers, exact=exact)

    def promotes(self, numbers: BatchNumbers) -> bool:
        """Whether every context request is a last chunk of one token behind a cached prompt."""
        if numbers.num_prefill_tokens != numbers.num_prefills or numbers.num_first_chunks:
            return False
        if self.graphs.settings.num_speculative_tokens or numbers.decode_tokens != numbers.num_decodes:
            return False
        facts = numbers.facts
        return not any(facts.get(name) for name in ("not_last_chunk", "beam_search", "disaggregated", "input_embeds"))

    def context(self, tokens: int, numbers: BatchNumbers) -> Decision | Reason:
        """The prefill graph for the whole batch: the next size, however much is padded."""
        if self.policy.prefill == "disabled":
            return Reason.PHASE_DISABLED if not numbers.num_decodes else Reason.MIXED_NOT_CAPTURED
        if self.policy.prefill == "breakable" and numbers.facts.get("context_logits"):
            return Reason.LOGPROBS_WANTED
        return self.graphs.take(PIECES, tokens, numbers)


@attrs.frozen
class _Ranks:
    """Ranks under attention data parallelism: a FULL graph needs every rank to be eligible.

    Without padding their sizes must be equal as well. Otherwise one context request on any rank sends all to the
    prefill graph that holds the largest batch. Idle ranks, which the original gives a dummy request, have no size.
    """

    rule: _Rule

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]:
        rule, idle = self.rule, not numbers.total_tokens
        q = 1 if numbers.num_prefills else numbers.query_len
        eligible = idle or not isinstance(rule.generation(numbers), Reason)
        fits_prefill = idle or not isinstance(rule.context(numbers.total_tokens, numbers), Reason)
        return (
            int(not eligible),
            0 if idle else numbers.total_reqs,
            -LARGEST_COUNT if idle else -numbers.total_reqs,
            0 if idle else q,
            -LARGEST_COUNT if idle else -q,
            numbers.total_tokens,
            int(numbers.num_prefills > 0),
            int(not fits_prefill),
            numbers.num_active_loras,
            int(bool(numbers.forbidden & _EAGER)),
        )

    def agree(self, reduced: Sequence[int], numbers: BatchNumbers) -> Decision:
        ineligible, reqs, fewest, widest, narrowest, tokens, contexts, no_prefill, loras, no_eager = reduced
        agreed = BatchNumbers(0, num_active_loras=loras, forbidden=_EAGER * no_eager)
        rule = self.rule
        if not tokens:
            return rule.graphs.eager(Reason.EMPTY_BATCH, agreed)
        found: Decision | Reason = Reason.RANK_NEEDS_EAGER
        equal = rule.policy.enable_padding or reqs == -fewest
        if not ineligible and equal and widest == -narrowest:
            found = rule.take_decode(reqs, widest, agreed)
        if isinstance(found, Reason) and contexts and not no_prefill:
            found = rule.context(tokens, agreed)
        allowed = numbers._replace(forbidden=numbers.forbidden & ~_EAGER)
        return agreed_decision(rule.graphs, found, agreed, rule(allowed) if numbers.total_tokens else None)
