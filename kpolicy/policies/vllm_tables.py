"""The vLLM replica prepared for one context: its per-batch path, and what data-parallel ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kpolicy.decision import Decision, Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.policies.base import PolicyContext, Way, no_legal_mode
from kpolicy.policies.tables import MOST_DECISIONS
from kpolicy.policies.vllm_keys import VARLEN, PreparedKeys, matches
from kpolicy.reasons import Reason
from kpolicy.shapes import LARGEST_COUNT, BatchNumbers

if TYPE_CHECKING:
    from kpolicy.policies.vllm_policy import VllmPolicy

__all__ = ["VllmTables", "decided"]

_MODE_OF = {Part.FULL: Mode.FULL, Part.PIECEWISE: Mode.PIECEWISE}
_RANK = {Mode.EAGER: 0, Mode.PIECEWISE: 1, Mode.FULL: 2}
"""vLLM's numbers for the modes of a batch; ranks take the least."""
_NO_LIMIT = 1 << 62
_FULL, _PIECES, _EAGER = Mode.FULL.bit, Mode.PIECEWISE.bit, Mode.EAGER.bit

Entry = tuple[Decision, int]
"""A decision and the most requests it may be taken for."""
Column = list["Entry | None"]


def decided(
    key: GraphKey | None, reason: Reason, tokens: int, context: PolicyContext, padded_tokens: int | None = None
) -> Decision:
    """The decision that replays a graph, or runs eagerly, at `padded_tokens` where ranks agreed on padding."""
    if key is not None:
        return Way(_MODE_OF[key.part], (Launch(Rows.ALL, key),)).decided(reason, context)
    launches = (Launch(Rows.ALL, None, padded_tokens=padded_tokens),) if tokens else ()
    return Way(Mode.EAGER, launches).decided(reason, context)


class VllmTables:
    """A `VllmPolicy` prepared for one context.

    For each number of active adapters and each kind of batch there is a column of decisions by slot (a range of token
    counts). Batches that no column answers take the readable path over indexed keys, which finds the reason.
    """

    def __init__(self, policy: VllmPolicy, context: PolicyContext) -> None:
        self._policy = policy
        self._context = context
        self._q = context.settings.query_len
        self._keys = PreparedKeys(policy.keys(context))
        self._entries: dict[GraphKey, Entry] = {}
        self._decisions: dict[tuple[GraphKey | None, Reason, int | None, bool], Decision] = {}
        self._whole = self._captured_for_every_case()
        self.select: Callable[..., Decision] = self._prepare()

    def _prepare(self) -> Callable[..., Decision]:
        policy, q, slots = self._policy, self._q, self._keys.slots
        by_loras, general = self._by_loras(), self._general
        uniform = self._uniform(by_loras[0]) if by_loras and by_loras[0] else {}
        largest, most_loras = len(slots) - 1, len(by_loras) - 1
        varlen, asks_rows = policy.varlen, policy.ladders_apart

        def select(
            num_decodes: int,
            query_len: int = 1,
            decode_kv_tokens: int = 0,
            num_decode_tokens: int = -1,
            num_prefills: int = 0,
            num_prefill_tokens: int = 0,
            prefill_kv_tokens: int = 0,
            prefill_pairs: int = 0,
            max_query_len: int = 1,
            max_kv_len: int = 0,
            num_first_chunks: int = 0,
            num_active_loras: int = 0,
            forbidden: int = 0,
            max_decode_steps: int = 1,
            num_tokens: int = -1,
            num_reqs: int = -1,
            *rest: Any,
        ) -> Decision:
            if (
                num_tokens == num_decode_tokens
                and not (num_prefills or forbidden or num_active_loras)
                and (num_reqs == num_decodes or num_decode_tokens < 0)
            ):
                # Decode rows alone, the usual batch; where they differ in length their query length is 0.
                rows = uniform.get(query_len)
                if rows is not None and num_decodes < len(rows):
                    prepared = rows[num_decodes]
                    if prepared is not None:
                        return prepared
            if num_decode_tokens >= 0 and not forbidden and num_tokens > 0 and num_active_loras <= most_loras:
                # The kind of the batch: what `VllmPolicy.kind` says in words.
                if varlen:
                    kind = 0 if num_prefills or max_query_len > q else VARLEN
                else:
                    uniform_rows = max_query_len * num_reqs == num_tokens
                    decoding = not asks_rows or (num_prefill_tokens == num_prefills and not num_first_chunks)
                    kind = max_query_len if uniform_rows and decoding else 0
                columns = by_loras[num_active_loras]
                if columns is not None:
                    entry = (columns.get(kind) or columns[0])[slots[num_tokens] if num_tokens <= largest else -1]
                    if entry is not None and num_reqs <= entry[1]:
                        return entry[0]
            return general(
                BatchNumbers(
                    num_decodes, query_len, decode_kv_tokens, num_decode_tokens, num_prefills, num_prefill_tokens,
                    prefill_kv_tokens, prefill_pairs, max_query_len, max_kv_len, num_first_chunks, num_active_loras,
                    forbidden, max_decode_steps, num_tokens, num_reqs, *rest,
                )
            )  # fmt: skip

        return select

    def _by_loras(self) -> list[dict[int, Column] | None]:
        """Columns by kind, for each number of active adapters; None where there are no graphs for it."""
        settings = self._context.settings
        columns = {
            case: {kind: self._column(tried, case, kind) for kind in self._keys.kinds}
            for case, tried in self._keys.by_case.items()
        }
        cases = (self._policy.case_of(loras, settings) for loras in range(settings.max_loras + 2))
        return [None if case is None else columns.get(case) for case in cases]

    def _column(self, tried: Sequence[Sequence[GraphKey]], case: int, kind: int) -> Column:
        column = [self._entry(keys, kind) for keys in tried]
        above = len(self._keys.lost) < len(self._keys.planned) and self._keys.reach(case, kind) > 0
        return [*column, (self._decided(None, Reason.ABOVE_LARGEST_SIZE, 1), _NO_LIMIT) if above else None]

    def _entry(self, keys: Sequence[GraphKey], kind: int) -> Entry | None:
        for key in keys:
            if matches(key, kind) and key not in self._keys.lost:
                entry = self._entries.get(key)
                if entry is None:
                    second = key.part is Part.PIECEWISE and self._keys.has_full
                    reason = Reason.NEXT_MODE if second else Reason.GRAPH_FITS
                    limit = key.num_reqs if self._policy.checks_rows else None
                    entry = (decided(key, reason, 1, self._context), _NO_LIMIT if limit is None else limit)
                    self._entries[key] = entry
                return entry
        return None

    def _uniform(self, columns: dict[int, Column]) -> dict[int, list[Decision | None]]:
        """Decisions by query length and number of rows, for uniform decode batches without adapters."""
        slots = self._keys.slots
        found: dict[int, list[Decision | None]] = {}
        for length in {1, self._q, *(kind for kind in self._keys.kinds if kind > 0)}:
            kind = length
            if self._policy.varlen:
                kind = VARLEN if length <= self._q else 0
            column = columns.get(kind) or columns[0]
            entries = [column[slots[rows * length]] for rows in range((len(slots) - 1) // length + 1)]
            found[length] = [entry[0] if entry and rows <= entry[1] else None for rows, entry in enumerate(entries)]
            found[length][0] = None  # no rows: an empty batch
        return found

    def _general(self, numbers: BatchNumbers) -> Decision:
        key, reason = self._policy.choose(numbers, self._keys, self._context)
        return self._decided(key, reason, numbers.total_tokens)

    def _decided(self, key: GraphKey | None, reason: Reason, tokens: int, padded_tokens: int | None = None) -> Decision:
        if key is not None and key in self._entries and self._entries[key][0].reason is reason:
            return self._entries[key][0]
        known = (key, reason, padded_tokens, tokens > 0)
        decision = self._decisions.get(known)
        if decision is None:
            decision = decided(key, reason, tokens, self._context, padded_tokens)
            if len(self._decisions) >= MOST_DECISIONS:
                self._decisions.clear()
            self._decisions[known] = decision
        return decision

    # Data parallelism: vLLM reduces the mode (least), the tokens (most), the uniform query length (where all have the
    # same) and, for variable-length graphs, the longest query (where no rank has a prefill).

    def vote(self, numbers: BatchNumbers) -> tuple[int, ...]:
        """This rank's batch as vLLM reduces it, each scalar made so that ranks take the maximum.

        An idle rank votes for the one decode row that vLLM makes up for it. Whether eager is allowed is agreed, so
        that a step that nothing may run raises on every rank and none waits for another.
        """
        own = self._own(numbers)
        decision = self.select(*own)
        uniform = self._uniform_len(own)
        return (
            int(numbers.total_tokens > 0),
            _RANK[Mode.FULL] - _RANK[decision.mode],
            self._padded(decision, own) if self._policy.runner == "v1" else own.total_tokens,
            own.total_reqs,
            uniform,
            -uniform,
            LARGEST_COUNT if own.num_prefills else own.longest_query,
            int(bool(own.forbidden & _FULL)),
            int(bool(own.forbidden & _PIECES)),
            int(bool(numbers.forbidden & _EAGER)),
        )

    def agree(self, reduced: Sequence[int], numbers: BatchNumbers) -> Decision:
        """What all ranks run.

        Raises:
            NoLegalModeError: eager is all that is left, and a rank forbids it. Then every rank raises.
        """
        *votes, no_eager = reduced
        decision = self._agreed(votes, numbers)
        if no_eager and decision.mode is Mode.EAGER:
            work, _, tokens, reqs, *_, no_full, no_pieces = votes
            forbidden = _EAGER | _FULL * no_full | _PIECES * no_pieces
            raise no_legal_mode(BatchNumbers(0, num_tokens=tokens * work, num_reqs=reqs * work, forbidden=forbidden))
        return decision

    def _agreed(self, votes: Sequence[int], numbers: BatchNumbers) -> Decision:
        work, lack, tokens, reqs, longest_uniform, least_uniform, longest, no_full, no_pieces = votes
        if not work:
            return self._decided(None, Reason.EMPTY_BATCH, 0)
        idle = not numbers.total_tokens
        own = self._own(numbers)
        alone = self.select(*own)
        if lack == _RANK[Mode.FULL]:
            return self._agreed_eager(alone, own, idle)
        kind = self._kind_of_ranks(own, longest_uniform if longest_uniform == -least_uniform else 0, longest)
        key = self._redispatch(own, tokens, reqs, kind, lack, (no_full, no_pieces))
        if key is None:
            # A graph of the agreed size was withdrawn. vLLM has no such case (it asserts that it has the graph).
            return self._decided(None, Reason.GRAPH_WITHDRAWN, tokens, tokens)
        if not idle and alone.keys == (key,):
            return alone
        lesser = _RANK[_MODE_OF[key.part]] < _RANK[alone.mode] and not idle
        return self._decided(key, Reason.RANK_NEEDS_LESS if lesser else Reason.RANKS_AGREED, tokens)

    def _agreed_eager(self, alone: Decision, own: BatchNumbers, idle: bool) -> Decision:
        """Eager on every rank: v1 keeps the size it had padded to alone, v2 goes back to the tokens it has."""
        padded = self._padded(alone, own) if self._policy.runner == "v1" else own.total_tokens
        if idle:
            return self._decided(None, Reason.RANKS_AGREED, padded, padded)
        if alone.mode is Mode.EAGER:
            return alone
        padding = padded if padded > own.total_tokens else None
        return self._decided(None, Reason.RANK_NEEDS_EAGER, padded, padding)

    def _redispatch(
        self, own: BatchNumbers, tokens: int, reqs: int, kind: int, lack: int, forbidden: tuple[int, int]
    ) -> GraphKey | None:
        """The graph at the agreed size: v1 looks for the agreed mode only, v2 takes the first that holds the batch."""
        policy = self._policy
        case = policy.case_of(own.num_active_loras, self._context.settings)
        agreed = Part.FULL if not lack else Part.PIECEWISE
        banned = {part for part, bit in zip((Part.FULL, Part.PIECEWISE), forbidden, strict=True) if bit}
        for key in self._keys.tried(tokens, case) if case is not None else ():
            if policy.runner == "v1" and key.part is not agreed:
                continue
            if matches(key, kind) and policy.has_rows(key, reqs) and key.part not in banned and self._usable(key):
                return key
        return None

    def _usable(self, key: GraphKey) -> bool:
        """Whether every rank has the graph, whatever adapters its own batch needs."""
        return self._whole is None or attrs.evolve(key, lora_case=0) in self._whole

    def _captured_for_every_case(self) -> frozenset[GraphKey] | None:
        """Graphs, less their LoRA case, that are captured for all cases; None where all are."""
        if not self._keys.lost:
            return None
        found: dict[GraphKey, set[int]] = {}
        for key in set(self._keys.planned) - self._keys.lost:
            found.setdefault(attrs.evolve(key, lora_case=0), set()).add(key.lora_case)
        return frozenset(key for key, cases in found.items() if len(cases) == len(self._keys.by_case))

    def _kind_of_ranks(self, own: BatchNumbers, uniform: int, longest: int) -> int:
        policy = self._policy
        if policy.varlen:
            return VARLEN if longest <= self._q else 0
        return policy.kind(own, self._q) if policy.runner == "v1" else uniform

    def _uniform_len(self, numbers: BatchNumbers) -> int:
        return 0 if self._policy.varlen else self._policy.kind(numbers, self._q)

    def _padded(self, decision: Decision, numbers: BatchNumbers) -> int:
        return decision.keys[0].num_tokens if decision.keys else numbers.total_tokens

    def _own(self, numbers: BatchNumbers) -> BatchNumbers:
        """What the rank would run alone, were eager allowed."""
        if not numbers.total_tokens:
            return self._dummy()
        return numbers._replace(forbidden=numbers.forbidden & ~_EAGER) if numbers.forbidden & _EAGER else numbers

    def _dummy(self) -> BatchNumbers:
        """What an idle rank runs beside busy ones: one decode row; in v2 of 0.33 with all adapters active."""
        most = self._context.settings.max_loras
        loras = most + 1 if most and self._policy.ladders_apart else 0
        q = self._q
        return BatchNumbers(1, q, q, q, max_query_len=q, max_kv_len=q, num_active_loras=loras, num_tokens=q, num_reqs=1)
