"""What the host works out of a launch's rows before it is staged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.executors.base import StepInputs
from kpolicy.executors.step_model import RowLayout
from kpolicy.modes import Rows

__all__ = [
    "LaunchRows",
    "check_extra",
    "check_fit",
    "check_sampling",
    "decode_places",
    "launch_rows",
    "slots_ahead",
    "uniform_query_len",
]

SAMPLING = ("temperature", "seed")
"""What a device sampler reads"""


class LaunchRows(NamedTuple):
    """What a launch says of its rows, beside what is staged."""

    num_wanted: int
    all_wanted: bool
    """Every token's logits are wanted"""
    num_reqs: int
    """Without padding"""
    layout: RowLayout | None = None
    """For eager attention; None where it runs as if it were captured"""


new_rows = partial(tuple.__new__, LaunchRows)
"""Makes them of a tuple, as `LaunchRows._make` does without a function of Python's"""


def uniform_query_len(rows: StepInputs, which: Rows) -> int | None:
    """The query length of a launch of nothing but decode rows of one length; None otherwise."""
    numbers = rows.numbers
    if which is Rows.PREFILL or not numbers.num_decodes or (which is Rows.ALL and numbers.num_prefills):
        return None
    return numbers.query_len or None


def launch_rows(rows: StepInputs, which: Rows, *, live: bool) -> LaunchRows:
    """What a launch says of its rows; with their lengths where attention runs eagerly."""
    num_tokens, num_reqs, num_wanted = len(rows.token_ids), len(rows.query_lens), len(rows.wanted)
    layout = None
    if live:
        num_decodes = 0 if which is Rows.PREFILL else min(rows.numbers.num_decodes, num_reqs)
        layout = RowLayout(num_tokens, num_decodes, rows.query_lens, rows.kv_lens)
    return LaunchRows(num_wanted, num_wanted == num_tokens, num_reqs, layout)


def slots_ahead(rows: StepInputs, repeat: int) -> Sequence[Sequence[int]]:
    """The KV slots of a launch's decode steps beyond the first.

    Raises:
        ConfigError: they weren't reserved, or the rows can't follow each other without the host.
    """
    num_reqs = len(rows.query_lens)
    if not num_reqs:
        return [()] * (repeat - 1)
    if len(rows.token_ids) != num_reqs or len(rows.slots_ahead) < repeat - 1:
        raise ConfigError(
            f"{repeat} decode steps that follow each other need rows of one token and KV slots for {repeat - 1} steps "
            f"ahead; there are {len(rows.token_ids)} tokens in {num_reqs} rows and slots_ahead has "
            f"{len(rows.slots_ahead)}. Reserve as many as max_decode_steps says, less 1."
        )
    return rows.slots_ahead[: repeat - 1]


def decode_places(rows: StepInputs) -> Sequence[int]:
    """For each decode row, which of the wanted rows is its last token.

    Raises:
        ConfigError: one isn't wanted, so there is nothing to sample its next token from.
    """
    numbers, wanted = rows.numbers, rows.wanted
    num_decodes = numbers.num_decodes
    if numbers.query_len == 1 or not num_decodes:
        # They rise, so where this one is at its place those before are too.
        if len(wanted) >= num_decodes and (not num_decodes or wanted[num_decodes - 1] == num_decodes - 1):
            return range(num_decodes)
    else:
        place = {token: i for i, token in enumerate(_listed(wanted))}
        ends = [end - 1 for end in accumulate(_listed(rows.query_lens)[:num_decodes])]
        if all(end in place for end in ends):
            return [place[end] for end in ends]
    raise ConfigError(
        f"the outputs of tokens {_listed(wanted)!r:.80} are wanted, and the last token of each of {num_decodes} decode "
        "rows always is: give them all, rising."
    )


def _listed(values: Sequence[int]) -> Sequence[int]:
    """Python's own numbers: entries of a tensor are equal to none by hash."""
    if type(values) is list:
        return values
    tolist: Callable[[], list[int]] | None = getattr(values, "tolist", None)
    return list(values) if tolist is None else tolist()


def check_fit(rows: StepInputs, query_len: int | None = None) -> None:
    """Refuse inputs that lack a token or a row: padded like a smaller launch they would compute something else.

    Of their values only what is seen without going through them; `input_values` looks at each.

    Args:
        rows: the launch's.
        query_len: the one query length of its rows; None where they vary.

    Raises:
        ConfigError: with how many there are of each, or which value can't be.
    """
    _, query_lens, token_ids, positions, slots, table, kv_lens, wanted, _, _, _ = rows
    try:
        if (
            len(positions) != (num_tokens := len(token_ids))
            or len(slots) != num_tokens
            or len(kv_lens) != (num_reqs := len(query_lens))
            or len(table) != num_reqs
            or (sum(query_lens) if query_len is None else query_len * num_reqs) != num_tokens
        ):
            raise _unlike(rows)
        if query_len is None:
            # Arrays and tensors have no one truth value.
            if num_reqs and min(query_lens) < 1:
                # Its rows would overlap.
                raise ConfigError(
                    f"query_lens has {int(min(query_lens))}; a row has at least 1 token. Leave out rows without."
                )
        elif type(query_lens) is list and query_lens.count(query_len) != num_reqs:
            raise ConfigError(
                f"query_lens is {query_lens}; by the batch's numbers each decode row has {query_len} tokens."
            )
        # A tensor of the device would have to come to the host.
        if type(wanted) is list and wanted and not 0 <= wanted[0] <= wanted[-1] < num_tokens:
            raise ConfigError(
                f"wanted goes from {wanted[0]} to {wanted[-1]} in a launch of {num_tokens} tokens; give indices of its "
                "tokens, rising."
            )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        # Not the graph's, which the error would cost.
        raise ConfigError(f"a launch's inputs aren't sequences of whole numbers: {error}.") from error


def check_sampling(rows: StepInputs) -> None:
    """Refuse sampling inputs that no sampler reads, and those that aren't one for each wanted row.

    Raises:
        UnknownNameError: nobody reads one.
        ConfigError: there are too few or too many values.
    """
    for name, values in rows.sampling.items():
        if name not in SAMPLING:
            raise UnknownNameError("sampling input", name, SAMPLING)
        _check_count(f"sampling input {name}", len(values), len(rows.wanted), "wanted rows")


def check_extra(rows: StepInputs, taken: Collection[str]) -> None:
    """Refuse other extra inputs than are taken, and those that aren't one for each token.

    Raises:
        ConfigError: which.
    """
    if rows.extra.keys() != set(taken):
        raise ConfigError(
            f"the step brings the extra inputs {sorted(rows.extra)} and the model takes {sorted(taken)}; give "
            "those, and state in the model's `extra_inputs` what it takes."
        )
    for name, values in rows.extra.items():
        _check_count(f"extra input {name}", len(values), len(rows.token_ids), "tokens")


def _check_count(name: str, count: int, wanted: int, of: str) -> None:
    if count != wanted:
        raise ConfigError(f"{name} has {count} values for {wanted} {of}; give one for each.")


def _unlike(rows: StepInputs) -> ConfigError:
    """What is wrong with rows whose inputs are of unlike numbers of tokens or rows."""
    tokens = {name: len(getattr(rows, name)) for name in ("token_ids", "positions", "slot_mapping")}
    reqs = {name: len(getattr(rows, name)) for name in ("query_lens", "kv_lens", "block_table")}

    def said(found: dict[str, int]) -> str:
        return ", ".join(f"{name} {count}" for name, count in found.items())

    return ConfigError(
        f"a launch's inputs don't fit each other: by token {said(tokens)}; by row {said(reqs)}; query_lens come to "
        f"{sum(rows.query_lens)} tokens. Give one of each a token, and one of each a row."
    )
