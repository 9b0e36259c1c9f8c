"""`warm_up`: what a server did before the requests that are measured: graphs replayed once, eager kernels loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kpolicy.decision import Decision, Launch
from kpolicy.errors import GraphReplayError
from kpolicy.executors.base import StepInputs
from kpolicy.executors.calibrate.bench import Bench
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry
from kpolicy.serving.products import products_of
from kpolicy.settings import Settings

__all__ = ["product_sizes", "warm_up"]

EAGER_SIZES = 32
"""Numbers of tokens that run eagerly, evenly spread: libraries choose kernels by size and load each at its first use"""
PRODUCT_SIZES = 512
"""Numbers of tokens, and the longest, at which the matrix products of an eager step run by themselves, odd ones too"""


def warm_up(executor: Any, registry: GraphRegistry, model: Any, settings: Settings) -> int:
    """Run every captured graph once, and eager steps and their matrix products of sizes throughout, on rows of nobody.

    The first replay of a graph takes an H200 up to a millisecond more, and a kernel's first use several. Nothing is run
    where the host itself runs what it launches: there it isn't so.

    Args:
        executor: has the graphs, and no step under way.
        registry: what was captured; it counts no hits for this.
        model: what the executor runs; rows read its KV as it is and write to the reserved slot.
        settings: no larger batch is run.

    Returns:
        How many steps were run, products not counted.
    """
    bench, count = Bench(executor, model), 0
    if bench.host_runs:
        return count
    longest = min(settings.max_num_tokens, model.max_model_len)
    keys = [key for key in registry.captured() if key in executor.captured]
    for key, rows in _steps(bench, keys, settings, longest):
        mode = Mode.EAGER
        if key is not None:
            mode = Mode.FULL if key.part is Part.FULL else Mode.PIECEWISE
        try:
            _run(executor, mode, key, rows)
        except GraphReplayError:
            # The step that replays it runs another way, and says why.
            continue
        count += 1
    if longest > 1:
        _run_products(lambda size: _run(executor, Mode.EAGER, None, bench.rows(0, 0, size)), longest)
        count += 2
    return count


def _run(executor: Any, mode: Mode, key: GraphKey | None, rows: StepInputs) -> None:
    outputs = executor.run(Decision(mode, (Launch(Rows.ALL, key),), Reason.ONLY_LEGAL), rows)
    for event in outputs.ready:
        event.wait()


def _run_products(step: Callable[[int], object], longest: int) -> None:
    """Run an eager step's matrix products at many sizes, the largest first."""
    products = products_of(step, (longest, longest - 1))
    with torch.inference_mode():
        for size in sorted(product_sizes(longest), reverse=True):
            for product in products:
                product.run(size)


def product_sizes(longest: int) -> set[int]:
    """Every number of tokens to the longest; over `PRODUCT_SIZES`, so many of all remainders by 4, and the longest."""
    if longest <= PRODUCT_SIZES:
        return set(range(1, longest + 1))
    spread = (longest * i // PRODUCT_SIZES // 4 * 4 - i % 4 for i in range(1, PRODUCT_SIZES + 1))
    return {size for size in spread if size > 0} | {longest}


def _steps(
    bench: Bench, keys: list[GraphKey], settings: Settings, longest: int
) -> Iterator[tuple[GraphKey | None, StepInputs]]:
    """Graphs, or None, and rows for them. Graphs of several query tokens a decode row are left out."""
    most_reqs = min(settings.max_num_reqs, settings.max_num_tokens)
    for key in keys:
        if not key.decode_only:
            yield key, bench.rows(0, 0, min(key.num_tokens, longest))
        elif key.query_len == 1:
            yield key, bench.rows(min(key.num_tokens, most_reqs), bench.short_kv)
    for size in sorted({max(1, longest * i // EAGER_SIZES) for i in range(1, EAGER_SIZES + 1)}):
        yield None, bench.rows(0, 0, size)
