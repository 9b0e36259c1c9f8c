"""`benchmarks.vllm.child`, whose statistics also time steps of made-up rows in every graph that holds them.

``shim_MODEL_SIDE.json`` then has ``ways``, for each: rows, the graph (none for EAGER), whether attention's splits were
bounded, and microseconds of each visit on the device, in all, and on the host.

Run: ``python -m benchmarks.vllm.stock_vs_kpolicy ... --module benchmarks.vllm.ways``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from benchmarks.vllm import child
from kpolicy.keys import GraphKey
from kpolicy.modes import Part

ROWS = ((3, 391), (3, 260), (768, 0), (1000, 0), (16, 2008))
"""Decodes, each with `KV` tokens, and the tokens of a prompt beside them"""
KV = 96
ALL_TO = 512
"""Tokens of pieces up to which each size is timed; of larger ones the smallest that holds the rows"""
ROUNDS, SECONDS = 4, 14.0


def keys_of(keys: list[GraphKey], tokens: int, *, prompts: bool) -> list[GraphKey | None]:
    """The graphs that are timed with a step, and None for EAGER.

    Args:
        keys: those that are captured.
        tokens: the step's.
        prompts: whether it has any.
    """
    holds = sorted((key for key in keys if key.num_tokens >= tokens), key=lambda key: key.num_tokens)
    full = [key for key in holds if key.part is Part.FULL and not (prompts and key.decode_only)]
    pieces = [key for key in holds if key.part is Part.PIECEWISE]
    more = [key for key in pieces[1:] if prompts and key.num_tokens <= ALL_TO]
    return [*full[:1], *pieces[:1], *more, None]


def ways(engine: Any) -> list[dict[str, Any]]:
    """Time them, in rounds, for as long as `SECONDS`."""
    from kpolicy_vllm.calibrate import _forced
    from kpolicy_vllm.state import state_of
    from kpolicy_vllm.synthetic import Rows
    from kpolicy_vllm.timing import Bench, Case, CudaClock

    state = state_of(engine.engine.vllm_config)
    assert state is not None  # only the shim's sides are asked
    splits = getattr(state.dispatcher, "splits", None)
    bench = Bench(engine.runner, lambda key, rows: _forced(state, key, rows), lambda value: value, CudaClock())

    def cases() -> Iterator[tuple[Case, bool]]:
        keys = list(state.ladder.keys)
        for decodes, chunk in ROWS:
            rows = Rows(decodes, KV, chunk)
            for key in keys_of(keys, rows.num_tokens, prompts=bool(chunk)):
                for bounded in (False, True)[: 1 if splits is None or (key and key.part is Part.FULL) else 2]:
                    yield Case(key, rows), bounded

    timed, ends = list(cases()), time.perf_counter() + SECONDS
    for _ in range(ROUNDS):
        for case, bounded in timed:
            if time.perf_counter() < ends:
                with splits.capturing() if bounded else nullcontext():
                    bench._visit(case)
    bench.close()
    return [
        {
            "decodes": case.rows.decodes, "chunk": case.rows.chunk, "key": str(case.key), "bounded": bounded,
            **{name: [round(getattr(each, name), 1) for each in case.times] for name in ("device", "wall", "host")},
        }
        for case, bounded in timed
    ]  # fmt: skip


def _statistics(engine: Any) -> dict[str, Any]:
    return {**_OF_SHIM(engine), "ways": ways(engine)}


_OF_SHIM = child.shim_statistics

if __name__ == "__main__":
    child.shim_statistics = _statistics
    child.main()
