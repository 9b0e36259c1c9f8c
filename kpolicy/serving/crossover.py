"""`Crossover`: up to how many query tokens a chunk of an MLA prompt is absorbed, decided by what both ways take here.

Absorbed attention reads latents as they are and multiplies more; expanded attention first makes keys and values of
every latent that a row attends to. A short chunk behind a long context is better absorbed, a long one expanded; where
they cross depends on the device, the heads and the context.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["ABSORBED_LENS", "Crossover", "measured"]

ABSORBED_LENS = (4, 16, 64)
"""Query tokens that chunks are absorbed as, padded: a kernel is compiled for each."""
KV_LENS = (512, 4096)
_CALLS, _TRIES = 5, 3


class Crossover(NamedTuple):
    """What was faster when it was measured."""

    kv_lens: tuple[int, ...]
    """Rising"""
    query_lens: tuple[int, ...]
    """The longest chunk to absorb, for each of them; 1 where a chunk is better expanded however short it is"""

    def absorbs(self, query_len: int, kv_len: int) -> bool:
        """Whether a row is absorbed: by the measured KV lengths on both sides of its own."""
        last = len(self.kv_lens) - 1
        above = next((i for i, length in enumerate(self.kv_lens) if length >= kv_len), last)
        return query_len <= min(self.query_lens[max(0, above - 1)], self.query_lens[above])


Way = Callable[[int, int], Callable[[], Any]]
"""(query tokens, KV tokens) -> a call of attention over a row of them"""


def measured(absorbed: Way, expanded: Way, device: torch.device, most_kv: int) -> Crossover:
    """Time both ways.

    Args:
        absorbed: makes the calls of one way.
        expanded: makes those of the other.
        device: whose time it is.
        most_kv: KV tokens that a row may have.
    """
    kv_lens = tuple(length for length in KV_LENS if length <= most_kv) or (most_kv,)
    return Crossover(kv_lens, tuple(_longest(absorbed, expanded, device, kv_len) for kv_len in kv_lens))


def _longest(absorbed: Way, expanded: Way, device: torch.device, kv_len: int) -> int:
    """The longest chunk that is absorbed at least as fast as it is expanded."""
    longest = 1
    for query_len in ABSORBED_LENS:
        if query_len > kv_len or _time(absorbed(query_len, kv_len), device) > _time(
            expanded(query_len, kv_len), device
        ):  # fmt: skip
            break
        longest = query_len
    return longest


def _time(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a few calls in a row, launched and done: the least of some tries, after one that compiles."""
    tries = []
    for _ in range(1 + _TRIES):
        _wait(device)
        begun = time.perf_counter()
        for _ in range(_CALLS):
            call()
        _wait(device)
        tries.append(time.perf_counter() - begun)
    return min(tries[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
