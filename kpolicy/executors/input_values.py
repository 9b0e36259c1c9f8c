"""Whether a launch's inputs name what there is: a look at every value, for the debug mode (``check=True``).

Without it a token, slot or block that isn't there is an IndexError where the host computes, and loses a GPU; two rows
that write one slot, or a row that attends to what isn't its own, compute something else in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import index
from typing import Any, SupportsIndex

from kpolicy.errors import ConfigError
from kpolicy.executors.base import StepInputs
from kpolicy.executors.step_model import StepModel
from kpolicy.modes import Rows

__all__ = ["check_values"]


def check_values(rows: StepInputs, which: Rows, model: StepModel) -> None:
    """Refuse a launch whose inputs name what isn't there, or contradict each other.

    Args:
        rows: the launch's.
        which: which rows of the batch they are.
        model: says how many there are of each; limits that it doesn't say aren't looked at.

    Raises:
        ConfigError: with the first that is wrong.
    """
    wrong = next(_wrong(rows, which, model), "")
    if wrong:
        raise _refused(wrong)


def _wrong(rows: StepInputs, which: Rows, model: Any) -> Iterator[str]:
    names = ("query_lens", "kv_lens", "wanted", "slot_mapping", "token_ids", "positions")
    query_lens, kv_lens, wanted, slots, token_ids, positions = (_whole(name, getattr(rows, name)) for name in names)
    yield from _outside("query_lens", query_lens, 1, None)
    yield from _outside("token_ids", token_ids, 0, model.vocab)
    yield from _outside("positions", positions, 0, getattr(model, "max_model_len", None))
    yield from _outside("slot_mapping", [slot for slot in slots if slot != model.pad_slot], 0, model.num_slots)
    ahead = [slot for step in rows.slots_ahead for slot in _whole("slots_ahead", step)]
    yield from _twice([*slots, *ahead], model.pad_slot)
    yield from _outside("wanted", wanted, 0, len(rows.token_ids))
    if any(later <= earlier for earlier, later in pairwise(wanted)):
        yield f"wanted is {wanted}, which doesn't rise"
    yield from _uncounted(rows, which, query_lens, frozenset(wanted))
    size, num_blocks = getattr(model, "block_size", None), getattr(model, "num_blocks", None)
    for row, (query_len, kv_len, blocks) in enumerate(zip(query_lens, kv_lens, rows.block_table, strict=True)):
        # Entries behind the last token's block are padding, which nobody reads.
        table = _whole(f"block_table of row {row}", blocks if not size else blocks[: max(-(-kv_len // size), 0)])
        if kv_len < query_len:
            yield f"row {row} runs {query_len} tokens and attends to {kv_len}, these included"
        if size and kv_len > size * len(table):
            yield f"row {row} attends to {kv_len} tokens in {len(table)} blocks of {size}"
        yield from _outside(f"block_table of row {row}", table, 0, num_blocks)


def _whole(name: str, values: Any) -> Sequence[int]:
    """The values as Python's own, wherever they are.

    Raises:
        ConfigError: one isn't a whole number.
    """
    tolist = getattr(values, "tolist", None)
    found = values if tolist is None else tolist()
    wrong = [value for value in found if not isinstance(value, SupportsIndex)]
    if wrong:
        raise _refused(f"{name} has {wrong[0]!r}, which isn't a whole number")
    return [index(value) for value in found]


def _refused(wrong: str) -> ConfigError:
    return ConfigError(f"a launch's inputs can't be right: {wrong}.")


def _outside(name: str, values: Sequence[Any], least: int, below: int | None) -> Iterator[str]:
    for value in (min(values), max(values)) if values else ():
        if value < least or (below is not None and value >= below):
            yield f"{name} has {value}, which isn't from {least} " + ("up" if below is None else f"to {below - 1}")


def _twice(slots: Sequence[int], pad_slot: int) -> Iterator[str]:
    seen: set[int] = set()
    for slot in slots:
        if slot in seen and slot != pad_slot:
            yield f"slot {slot} is written twice"
        seen.add(slot)


def _uncounted(rows: StepInputs, which: Rows, query_lens: Sequence[int], wanted: frozenset[int]) -> Iterator[str]:
    """What of the rows isn't as the batch's numbers say."""
    numbers = rows.numbers
    decodes = 0 if which is Rows.PREFILL else numbers.num_decodes
    counted = decodes + (0 if which is Rows.DECODE else numbers.num_prefills)
    if len(query_lens) != counted:
        yield f"there are {len(query_lens)} rows, and the batch's numbers count {counted}"
    if numbers.query_len and any(each != numbers.query_len for each in query_lens[:decodes]):
        yield f"the numbers say {numbers.query_len} tokens of each decode row, and query_lens {query_lens[:decodes]}"
    for row, end in enumerate(accumulate(query_lens[:decodes])):
        if end - 1 not in wanted:
            yield f"the last token of decode row {row} isn't wanted"
