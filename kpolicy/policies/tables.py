"""Prepared look-ups behind `select`: which captured graph holds a batch, by plain indexing.

For each kind of graph there is a list indexed by token count whose entry is the key to replay, chosen once by the
policy's own rule (smallest, or cheapest). Entries are tuples, because the per-batch path reads them; a row limit that
an entry can't say by token count alone sends the batch to the readable path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kpolicy.decision import Launch
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureLadder
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.policies.base import Pick, PolicyContext, Way, legal_ways, split_tails, split_way
from kpolicy.shapes import BatchNumbers

__all__ = ["EAGER_WAY", "MOST_DECISIONS", "Column", "Entry", "Group", "KeyTables", "PreparedWays", "at", "decode_graph"]


class Entry(NamedTuple):
    """One prepared graph, full or with padding.

    `rate` is what the policy ranks sizes by, `num_reqs` and `max_query_len` what the graph holds at most, `uid` a
    small number that tells graphs apart, `padding_us` what the padding takes more (`CostTable.padding_us`), which
    `rate` has too where it is a time. `exact` is the graph without padding where that may be the cheaper one all the
    same: the whole batch tells (`kpolicy.policies.auto.cheapest`). In tables for unlike ranks it is the graph ranked
    before this one, which may have one before it.
    """

    key: GraphKey
    rate: float
    num_reqs: int
    max_query_len: int
    uid: int
    padding_us: float = 0.0
    exact: Entry | None = None

    @property
    def way(self) -> Way:
        """To replay the graph for the whole batch."""
        return Way(_WHOLE[self.key.part], (Launch(Rows.ALL, self.key),))


_NO_LIMIT = 1 << 62
_WHOLE = {Part.FULL: Mode.FULL, Part.PIECEWISE: Mode.PIECEWISE}
Column = list["Entry | None"]


class Group(NamedTuple):
    """The columns for one number of active LoRAs, each indexed by tokens."""

    uniform: Mapping[int, Column]
    varlen: Column
    mixed: Column
    pieces: Column
    open: frozenset[int] = frozenset()
    """Tokens for which a column has an entry with an `exact` one"""


class KeyTables:
    """Columns of entries for every number of active LoRAs.

    Args:
        ladder: captured keys.
        rate: what a key is ranked by for so many tokens; the lowest wins, the smaller size on ties.
        padding_of: microseconds more for a key with fewer tokens than it has.
        unlike: whether the graph that would be chosen if padding took nothing more comes too, as ranks that have unlike
            many tokens need it (`kpolicy.policies.auto.cheapest_of_unlike`).
    """

    def __init__(
        self, ladder: CaptureLadder, rate: Callable[[GraphKey, int], float],
        padding_of: Callable[[GraphKey, int], float], *, unlike: bool = False,
    ) -> None:  # fmt: skip
        self.entries = [
            Entry(
                key,
                rate(key, key.num_tokens),
                _NO_LIMIT if key.num_reqs is None else key.num_reqs,
                _NO_LIMIT if key.max_query_len is None else key.max_query_len,
                uid,
            )
            for uid, key in enumerate(ladder.keys)
        ]
        """By `uid`; full."""
        self._padded = [
            entry._replace(rate=rate(entry.key, fewer), padding_us=padding_of(entry.key, fewer))
            for entry in self.entries
            for fewer in (entry.key.num_tokens - 1,)
        ]
        self.largest = max((key.num_tokens for key in (*ladder.keys, *ladder.withdrawn)), default=0)
        """No graph, captured or withdrawn, has more tokens."""
        cases = sorted({key.lora_case for key in ladder.keys})
        self.by_loras: list[Group] = []
        """Indexed by active LoRAs; more than that many have no graph."""
        by_key = dict(zip(ladder.keys, zip(self.entries, self._padded, strict=True), strict=True))
        for i, case in enumerate(cases):
            group = _group(ladder, by_key, cases[i:], unlike)
            self.by_loras += [group] * (case + 1 - len(self.by_loras))


_Both = tuple[Entry, Entry]
"""A graph's entries where it is full and where it has padding"""


def _group(ladder: CaptureLadder, by_key: Mapping[GraphKey, _Both], cases: Sequence[int], unlike: bool) -> Group:
    left: set[int] = set()

    def column(keys: Iterable[GraphKey]) -> Column:
        filled: Column = []
        for case in cases:
            # The smallest case that holds the rows wins; a larger one only serves sizes the smaller lacks.
            entries = [by_key[key] for key in keys if key.lora_case == case]
            found = _by_tokens(entries)
            filled += (_with_quickest(found, entries) if unlike else found)[len(filled) :]
        left.update(tokens for tokens, entry in enumerate(filled) if entry is not None and entry.exact is not None)
        return filled

    columns = (
        {q: column(keys) for q, keys in ladder.uniform.items()},
        column(ladder.varlen),
        column(ladder.mixed),
        column(ladder.piecewise),
    )
    return Group(*columns, frozenset(left))


def _by_tokens(entries: Sequence[_Both]) -> Column:
    """The entry of least rate for each token count; `entries` rise by size."""
    if not entries:
        return []
    best: Entry | None = None
    column: Column = [None] * (entries[-1][0].key.num_tokens + 1)
    for i in range(len(entries) - 1, -1, -1):
        full, padded = entries[i]
        low, high = entries[i - 1][0].key.num_tokens if i else 0, full.key.num_tokens
        # For as many tokens as it has, and no others, a graph is full; larger ones have padding.
        rival = column[high] or best
        if rival is None or full.rate <= rival.rate:
            column[high] = full
        else:
            column[high] = rival._replace(exact=full) if rival.padding_us else rival
        if best is None or padded.rate <= best.rate:
            best = padded
        column[low + 1 : high] = [best] * (high - 1 - low)
    return column


def _with_quickest(column: Column, entries: Sequence[_Both]) -> Column:
    """The column, with the graph of least rate where full behind each entry if another; `entries` rise by size."""
    best: Entry | None = None
    for i in range(len(entries) - 1, -1, -1):
        full, low = entries[i][0], entries[i - 1][0].key.num_tokens if i else 0
        if best is None or full.rate <= best.rate:
            best = full
        for tokens in range(low + 1, full.key.num_tokens + 1):
            found = column[tokens]
            if found is not None and best.uid not in _uids(found):
                column[tokens] = best._replace(exact=found)
    return column


class PreparedWays:
    """`legal_ways` by look-up: equal to it for every batch, without its scans.

    Args:
        context: what the policy reads.
        pick: the policy's rule among the keys that hold the rows.
        rate: the same rule as a number a key; see `KeyTables`.
        forms: the forms of SPLIT that the policy considers.
        unlike: see `KeyTables`.
    """

    def __init__(
        self,
        context: PolicyContext,
        pick: Pick,
        rate: Callable[[GraphKey, int], float],
        forms: Sequence[SplitForm],
        *,
        unlike: bool = False,
    ) -> None:
        self._context = context
        self._pick = pick
        self._forms = tuple(forms)
        self.tables = KeyTables(context.ladder, rate, context.costs.padding_of, unlike=unlike)
        self._wholes: list[Way | None] = [None] * len(self.tables.entries)
        self._splits: dict[tuple[object, ...], list[Way]] = {}

    def whole(self, entry: Entry) -> Way:
        """To replay that graph for the whole batch: made at first use."""
        way = self._wholes[entry.uid]
        if way is None:
            way = self._wholes[entry.uid] = entry.way
        return way

    def __call__(self, numbers: BatchNumbers) -> list[Way]:
        tokens, loras, forbidden = numbers.total_tokens, numbers.num_active_loras, numbers.forbidden
        by_loras = self.tables.by_loras
        if not tokens or loras >= len(by_loras):
            return self.scan(numbers)
        group = by_loras[loras]
        ways: list[Way] = []
        if not forbidden & _FULL:
            mixed = numbers.num_prefills > 0
            entry = at(group.mixed, tokens) if mixed else decode_graph(group, numbers.query_len, tokens)
            if entry is not None:
                if _overflows(entry, numbers.total_reqs, numbers.longest_decode):
                    return self.scan(numbers)
                ways += map(self.whole, _graphs(entry))
        if not forbidden & _PIECES:
            entry = at(group.pieces, tokens)
            if entry is not None:
                ways += map(self.whole, _graphs(entry))
        if not forbidden & _EAGER:
            ways.append(EAGER_WAY)
        if numbers.num_decodes and numbers.num_prefills and not forbidden & (_FULL | _SPLIT):
            entry = decode_graph(group, numbers.query_len, numbers.decode_tokens)
            if entry is not None:
                if _overflows(entry, numbers.num_decodes, numbers.longest_decode):
                    return self.scan(numbers)
                ways += self._split(entry, group, numbers)
        return ways

    def scan(self, numbers: BatchNumbers) -> list[Way]:
        """The readable form: for what the columns can't say by token count."""
        return legal_ways(numbers, self._context, self._pick, forms=self._forms)

    def _split(self, decode: Entry, group: Group, numbers: BatchNumbers) -> list[Way]:
        forbidden = numbers.forbidden
        piece = None if forbidden & _PIECES else at(group.pieces, numbers.num_prefill_tokens)
        tails = split_tails(piece and piece.key, numbers, self._context)
        if piece is not None and piece.exact is not None:
            tails = (*((graph.key, None) for graph in _graphs(piece.exact)), *tails)
        key = (_uids(decode), tails, numbers.max_decode_steps)
        ways = self._splits.get(key)
        if ways is None:
            steps = numbers.max_decode_steps
            ways = [
                way
                for form in self._forms
                for graph in _graphs(decode)
                for way in split_way(graph.key, tails, form, steps)
            ]
            if len(self._splits) >= _MOST_SPLITS:
                self._splits.clear()
            self._splits[key] = ways
        return ways


_MOST_SPLITS = 512
"""Prepared splits kept; above it the memo starts afresh, so that memory stays bounded."""
MOST_DECISIONS = 4096
"""Prepared decisions kept, likewise."""
_FULL, _PIECES, _SPLIT, _EAGER = (mode.bit for mode in (Mode.FULL, Mode.PIECEWISE, Mode.SPLIT, Mode.EAGER))
EAGER_WAY = Way(Mode.EAGER, (Launch(Rows.ALL, None),))


def at(column: Sequence[Entry | None], tokens: int) -> Entry | None:
    """The entry for that many tokens, if the column goes so far."""
    return column[tokens] if tokens < len(column) else None


def decode_graph(group: Group, query_len: int, tokens: int) -> Entry | None:
    """The FULL graph for decode rows of that many tokens: of the first kind that has one."""
    column = group.uniform.get(query_len)
    if column is not None and tokens < len(column) and column[tokens] is not None:
        return column[tokens]
    return at(group.varlen, tokens) or at(group.mixed, tokens)


def _graphs(entry: Entry) -> tuple[Entry, ...]:
    return (entry,) if entry.exact is None else (*_graphs(entry.exact), entry)


def _uids(entry: Entry) -> tuple[int, ...]:
    return (entry.uid,) if entry.exact is None else (*_uids(entry.exact), entry.uid)


def _overflows(entry: Entry, num_reqs: int, longest: int) -> bool:
    if entry.num_reqs < num_reqs or entry.max_query_len < longest:
        return True
    return entry.exact is not None and _overflows(entry.exact, num_reqs, longest)
