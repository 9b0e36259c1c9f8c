"""`nano_vllm`: what nano-vllm does, from reading its model runner; nothing of it was run.

Decode batches replay a FULL graph of the next captured size; a batch with a prefill row is always eager.

Flaws kept:

- Sizes stop at the last multiple of 16: with 100 requests they end at 96, and 97 to 100 find no graph. nano-vllm's own
  search then ends in an exception; the replica says eager, because a policy always decides.
- Nothing above 512 requests is captured, however small the model.
- Padding has no limit: 9 rows run as 16.

Source (GeeeekExplorer/nano-vllm): nanovllm/engine/model_runner.py.
"""

from __future__ import annotations

import attrs

from kpolicy.attention.support import Claims
from kpolicy.decision import Decision
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.policies.base import Downgrade, PolicyContext, admits
from kpolicy.policies.graphs import Graphs, decode_kind, refusal
from kpolicy.policies.rule import Choose, CompiledRule, decide_by_rule, downgrade
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape

__all__ = ["NanoVllmPolicy", "decode_sizes"]

MOST_REQS = 512
"""The largest graph, in requests, and the rule's threshold."""
_DECODE = decode_kind(1)


def decode_sizes(max_reqs: int) -> tuple[int, ...]:
    """nano-vllm's sizes in requests: 1, 2, 4, 8, then multiples of 16 up to `max_reqs`, which isn't added.

    Of the first four, those over `max_reqs` are captured on buffers of `max_reqs` rows, so they are that size.
    """
    most = min(max_reqs, MOST_REQS)
    return tuple(sorted({*(min(size, most) for size in (1, 2, 4, 8)), *range(16, most + 1, 16)}))


@attrs.frozen(kw_only=True)
class NanoVllmPolicy:
    """nano-vllm's rule.

    Args:
        enforce_eager: its option of that name: nothing is captured.
    """

    enforce_eager: bool = False

    name = "nano_vllm"
    summary = "replica of nano-vllm, from reading: FULL decode graphs up to 512 requests, prefill always eager"
    reads_costs = False

    def sizes(self, settings: Settings) -> CaptureSizes:
        rows = decode_sizes(min(settings.max_num_reqs, settings.max_num_tokens))
        return CaptureSizes(tuple(size * settings.query_len for size in rows))

    def plan(self, sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
        sizes.check(settings)
        if self.enforce_eager:
            return ()
        # It drafts nothing, so sizes made for 1 + k tokens a row stand for that many rows.
        rows = [size // settings.query_len for size in sizes.decode]
        keys = [GraphKey(Part.FULL, size, size, query_len=1) for size in rows if size <= MOST_REQS]
        return tuple(key for key in keys if admits(claims, key))

    def resolve(self, claims: Claims, settings: Settings) -> tuple[Downgrade, ...]:
        if self.enforce_eager:
            return ()
        full, eager = Mode.FULL.value, Mode.EAGER.value
        found = []
        if refusal(_DECODE, claims):
            found.append(downgrade("single-token decodes", full, eager, _DECODE, claims))
        if (q := settings.query_len) > 1:
            found.append(Downgrade(f"decodes of {q} tokens", full, eager, Reason.QUERY_LEN_NOT_CAPTURED))
        return tuple(found)

    def bind(self, graphs: Graphs) -> Choose:
        """The rule over these graphs."""
        enforce_eager = self.enforce_eager

        def choose(numbers: BatchNumbers) -> Decision:
            tokens = numbers.total_tokens
            if not tokens:
                return graphs.eager(Reason.EMPTY_BATCH, numbers)
            if enforce_eager:
                return graphs.eager(Reason.POLICY_IS_EAGER, numbers)
            if numbers.num_prefills:
                return graphs.eager(Reason.PHASE_DISABLED, numbers)
            if tokens > MOST_REQS:
                return graphs.eager(Reason.ABOVE_THRESHOLD, numbers)
            if numbers.query_len != 1:
                missed = Reason.QUERY_LEN_NOT_CAPTURED if numbers.query_len else Reason.DECODES_NOT_UNIFORM
                return graphs.eager(missed, numbers)
            found = graphs.take(_DECODE, tokens, numbers)
            return graphs.eager(found, numbers) if isinstance(found, Reason) else found

        return choose

    def decide(self, shape: BatchShape, context: PolicyContext) -> Decision:
        return decide_by_rule(self, shape, context)

    def compile(self, context: PolicyContext) -> CompiledRule:
        return CompiledRule(self, context)
