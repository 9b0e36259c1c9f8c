"""`kunlun`: the threshold rule of vLLM-Kunlun's design page, from reading; nothing of it was run.

The page separates prefill and decode: batches of decode rows alone replay a FULL graph where attention allows one,
anything else replays PIECEWISE up to a threshold of tokens, and above the threshold everything is eager.

FULL is refused where attention reads lengths on the host: Kunlun's operators take host copies of the lengths, and a
graph there would replay those of its capture, with no way to update them. vLLM-Kunlun itself doesn't check that; its
public logs show PIECEWISE captures only.

Flaws kept:

- The threshold is a token count: it knows nothing of the context length or of the device's time for the batch.
- The largest size isn't added to the list, as in vLLM: above the last step below the threshold, batches have no graph.
- A batch without drafts, or with a row short of them, leaves the FULL graphs.
- In mode `full_decode_only` a mixed batch has no graph at all; the page's rule splits by batch, never within one.

Source: vLLM-Kunlun 09869ee (May 2026), its graph design page and vllm_kunlun/platforms; sizes are vLLM's.
"""

from __future__ import annotations

import attrs

from kpolicy.attention.support import Claims
from kpolicy.decision import Decision
from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.policies.ascend import default_ladder, not_uniform
from kpolicy.policies.base import Downgrade, PolicyContext, admits
from kpolicy.policies.graphs import PIECES, Graphs, decode_kind, refusal
from kpolicy.policies.min_ranks import MinRanks
from kpolicy.policies.rule import Choose, CompiledRule, by_lora_case, decide_by_rule, downgrade
from kpolicy.reasons import Reason
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers, BatchShape

__all__ = ["KunlunPolicy"]

MOST_TOKENS = 512
"""The largest default capture size, vLLM's."""
_SEPARATE, _PIECEWISE, _DECODE_ONLY = "separate", "piecewise", "full_decode_only"
MODES = (_SEPARATE, _PIECEWISE, _DECODE_ONLY)


@attrs.frozen(kw_only=True)
class KunlunPolicy:
    """The threshold rule.

    Args:
        mode: ``separate`` is the page's rule; ``piecewise`` never uses FULL; ``full_decode_only`` never uses PIECEWISE.
        threshold: most tokens of a batch that may replay; 0 stands for the largest size that was planned.

    Raises:
        ConfigError: the mode isn't one of these, or the threshold is negative.
    """

    mode: str = _SEPARATE
    threshold: int = 0

    name = "kunlun"
    summary = "replica of vLLM-Kunlun's design page, from reading: FULL for decode alone, PIECEWISE up to a threshold"
    reads_costs = False

    def __attrs_post_init__(self) -> None:
        if self.mode not in MODES:
            raise UnknownNameError("kunlun mode", self.mode, MODES)
        if not isinstance(self.threshold, int) or self.threshold < 0:
            raise ConfigError(f"kunlun: threshold is {self.threshold!r}; it is a number of tokens, 0 for the default.")

    def sizes(self, settings: Settings) -> CaptureSizes:
        q, most = settings.query_len, settings.max_num_reqs * settings.query_len
        largest = min(self.threshold or min(2 * most, MOST_TOKENS), settings.max_num_tokens)
        ladder = default_ladder(largest, q if self.mode != _PIECEWISE else 1)
        decode = () if self.mode == _PIECEWISE else tuple(size for size in ladder if size <= most)
        return CaptureSizes(decode, (), ladder)

    def plan(self, sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
        sizes.check(settings)
        q = settings.query_len
        keys: list[GraphKey] = []
        if self.mode != _PIECEWISE:
            keys += [GraphKey(Part.FULL, size, size // q, query_len=q) for size in sizes.decode]
        if self.mode != _DECODE_ONLY:
            keys += [GraphKey(Part.PIECEWISE, size) for size in sizes.piecewise]
        largest = self.threshold or max((key.num_tokens for key in keys), default=0)
        held = [key for key in by_lora_case(keys, settings) if key.num_tokens <= largest]
        return tuple(key for key in held if admits(claims, key))

    def resolve(self, claims: Claims, settings: Settings) -> tuple[Downgrade, ...]:
        decode = decode_kind(settings.query_len)
        pieces = self.mode != _DECODE_ONLY and not refusal(PIECES, claims)
        lesser = (Mode.PIECEWISE if pieces else Mode.EAGER).value
        found = []
        if self.mode != _PIECEWISE and refusal(decode, claims):
            found.append(downgrade(f"decodes of {settings.query_len} tokens", Mode.FULL.value, lesser, decode, claims))
        if self.mode != _DECODE_ONLY and not pieces:
            asked = Mode.PIECEWISE.value
            found.append(downgrade("batches up to the threshold", asked, Mode.EAGER.value, PIECES, claims))
        return tuple(found)

    def bind(self, graphs: Graphs) -> Choose:
        """The rule over these graphs."""
        mode, q = self.mode, graphs.settings.query_len
        decodes = decode_kind(q)
        threshold = self.threshold or max(graphs.sizes, default=0)

        def find(numbers: BatchNumbers) -> Decision | Reason:
            tokens = numbers.total_tokens
            if threshold and tokens > threshold:
                return Reason.ABOVE_THRESHOLD
            missed: Reason | None = None
            if mode != _PIECEWISE and not numbers.num_prefills:
                found = graphs.take(decodes, tokens, numbers) if numbers.query_len == q else not_uniform(numbers)
                if not isinstance(found, Reason):
                    return found
                missed = found
            if mode == _DECODE_ONLY:
                return missed or Reason.MIXED_NOT_CAPTURED
            return graphs.take(PIECES, tokens, numbers, first=missed is None)

        def choose(numbers: BatchNumbers) -> Decision:
            if not numbers.total_tokens:
                return graphs.eager(Reason.EMPTY_BATCH, numbers)
            found = find(numbers)
            return graphs.eager(found, numbers) if isinstance(found, Reason) else found

        return choose

    def decide(self, shape: BatchShape, context: PolicyContext) -> Decision:
        return decide_by_rule(self, shape, context)

    def compile(self, context: PolicyContext) -> CompiledRule:
        return CompiledRule(self, context, self._ranks)

    def _ranks(self, graphs: Graphs, choose: Choose) -> MinRanks:
        decodes = decode_kind(graphs.settings.query_len)

        def take(mode: Mode, tokens: int, agreed: BatchNumbers) -> Decision | Reason:
            return graphs.take(decodes if mode is Mode.FULL else PIECES, tokens, agreed)

        return MinRanks(graphs, choose, take)
