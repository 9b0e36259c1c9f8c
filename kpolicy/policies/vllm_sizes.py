"""vLLM's capture sizes, LoRA cases and draft schedules, for 0.23.0 and 0.33.0.

Sources: `_set_cudagraph_sizes` in ``vllm/config/vllm.py``, `adjust_cudagraph_sizes_for_spec_decode` in
``vllm/config/compilation.py``, `get_captured_lora_counts` in ``vllm/lora/utils.py`` and
`build_dynamic_sd_schedule_lookup` in ``vllm/v1/spec_decode/dynamic/utils.py``. vLLM has one list of sizes for every
kind of graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kpolicy.errors import ConfigError, LadderError
from kpolicy.ladders import CaptureSizes, check_sizes
from kpolicy.settings import Settings

__all__ = ["DraftSchedule", "aligned", "default_list", "lora_cases", "one_list", "parse_drafts", "tiers"]

LARGEST_DEFAULT = 512
"""The default list ends here at the latest; 0.33 goes to 1,024 on data-centre Blackwell, which isn't modelled."""

DraftSchedule = tuple[tuple[int, int, int], ...]
"""Draft tokens by batch size, as (first size, last size, drafts)."""


def _grid(most: int) -> list[int]:
    """1, 2, 4, then every 8th below 256, then every 16th, up to `most`."""
    small = [size for size in (1, 2, 4) if size <= most]
    return small + list(range(8, min(most + 1, 256), 8)) + list(range(256, most + 1, 16))


def default_list(settings: Settings, version: str, drafts: DraftSchedule = ()) -> tuple[int, ...]:
    """The sizes that vLLM captures when the user gives none, in tokens."""
    q, reqs, tokens = settings.query_len, settings.max_num_reqs, settings.max_num_tokens
    cap = min(2 * reqs * q, LARGEST_DEFAULT)
    sizes = set(_grid(min(cap, tokens)))
    if tokens <= cap:
        sizes.add(tokens)
    if version == "0.33":
        sizes.update(size for size in _decode_sizes(settings, cap, drafts) if size <= min(cap, tokens))
    return tuple(sorted(sizes))


def _decode_sizes(settings: Settings, cap: int, drafts: DraftSchedule) -> Iterable[int]:
    """What 0.33 adds: the most requests, or with speculation a grid of request counts for each query length."""
    if settings.query_len == 1:
        return [settings.max_num_reqs]
    widest = {settings.query_len: settings.max_num_reqs}
    if drafts:
        # A later batch size overwrites an earlier one: the widest batch that runs at each query length.
        widest = {1 + k: reqs for reqs, k in enumerate(tiers(drafts, settings), start=1)}
    return [
        count * q
        for q, reqs in widest.items()
        for count in {*_grid(min(reqs, LARGEST_DEFAULT)), min(reqs, LARGEST_DEFAULT)}
        if count * q <= cap
    ]


def one_list(sizes: CaptureSizes, settings: Settings) -> tuple[int, ...]:
    """The one list that vLLM would be configured with: the sizes of every kind together.

    Raises:
        LadderError: there are none, or one is over the most tokens of a step.
    """
    every = sorted({*sizes.decode, *sizes.mixed, *sizes.piecewise})
    return check_sizes("the capture sizes", every, largest=settings.max_num_tokens)


def aligned(sizes: tuple[int, ...], query_len: int) -> tuple[int, ...]:
    """The sizes rounded up to whole decode rows; those that pass the largest size are dropped.

    Where none is left, one decode row is the only size.

    Raises:
        LadderError: not even one decode row fits.
    """
    if query_len <= 1:
        return sizes
    largest = sizes[-1]
    rounded = {-(-size // query_len) * query_len for size in sizes}
    kept = tuple(sorted(size for size in rounded if size <= largest))
    if not kept and query_len <= largest:
        kept = (query_len,)
    if not kept:
        raise LadderError(
            f"the capture sizes end at {largest}, less than one decode row of {query_len} tokens (1 + speculative "
            "tokens), and vLLM doesn't start so. Add larger sizes or draft fewer tokens."
        )
    return kept


def lora_cases(settings: Settings, active_counts: bool) -> tuple[int, ...]:
    """The numbers of active adapters that get graphs of their own, the case without adapters left out.

    Args:
        settings: the deployment.
        active_counts: whether powers of two get graphs (`specialize_active_lora`), or only the most.
    """
    most = settings.max_loras + 1
    return tuple(n for n in range(1, most + 1) if n == most or (active_counts and n & (n - 1) == 0))


def parse_drafts(text: str | DraftSchedule) -> DraftSchedule:
    """A draft schedule from ``FIRST-LAST:DRAFTS`` ranges joined with ``/``, for example ``1-8:6/9-32:4``.

    Raises:
        ConfigError: the text isn't such a schedule, a range is empty or overlaps, or the first doesn't start at 1.
    """
    if not isinstance(text, str):
        ranges = [(int(first), int(last), int(drafts)) for first, last, drafts in text]
    else:
        ranges = []
        for part in filter(None, text.split("/")):
            found = re.fullmatch(r"(\d+)-(\d+):(\d+)", part)
            if found is None:
                raise ConfigError(f"drafts has {part!r}; ranges are FIRST-LAST:DRAFTS, for example 1-8:6/9-32:4.")
            ranges.append((int(found[1]), int(found[2]), int(found[3])))
    before = 0
    for first, last, _ in sorted(ranges):
        if first <= before or last < first or (not before and first != 1):
            raise ConfigError(
                f"drafts has the range {first}-{last} after {before}; ranges start at 1 request and don't overlap."
            )
        before = last
    return tuple(sorted(ranges))


def tiers(drafts: DraftSchedule, settings: Settings) -> list[int]:
    """Draft tokens for each batch size from 1 request to the most; gaps and the tail keep the last range's."""
    most = settings.num_speculative_tokens
    found = []
    for reqs in range(1, settings.max_num_reqs + 1):
        last = [k for first, _, k in drafts if first <= reqs][-1]
        found.append(min(most, last))
    return found
