"""`try_kind`: whether a model's attention may be captured, found out by replaying a graph of it.

Kunlun's operators take host copies of lengths beside those on the device, and nothing rewrites them in a graph. An
operator may still read the device's. Documents don't say, so a small graph is captured over real rows and replayed over
others: shorter and longer ones, other block tables, fewer rows. Each replay's logits and written KV must have the bits
of the same rows run eagerly. A replay over the capture's own lengths proves nothing, so it isn't among them.

The KV that the trial uses is put back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch

from kpolicy.errors import StickyDeviceError
from kpolicy.executors.ascend.lengths import HostRows, running_rows
from kpolicy.executors.base import StepInputs
from kpolicy.executors.buffers import PaddedShape, StepBuffers
from kpolicy.executors.device import DeviceAdapter
from kpolicy.executors.importing import first_line
from kpolicy.executors.launch_rows import LaunchRows
from kpolicy.executors.segments import FullGraph, ModelRun, capture_full, head_rows
from kpolicy.executors.step_model import RowLayout
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.shapes import BatchShape

__all__ = ["Trial", "try_kind"]

ROWS = 3


@attrs.frozen
class Trial:
    """What a trial found.

    Args:
        kind: what was captured, in words.
        replays: how many replays were compared.
        problem: why the attention may not be captured; "" where it may.
    """

    kind: str
    replays: int
    problem: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem


@attrs.frozen
class _Case:
    """One set of rows."""

    name: str
    kv_lens: tuple[int, ...]
    first_block: int


def _cases(query_lens: Sequence[int], size: int, most: int) -> list[_Case]:
    """The capture's rows, then those of the replays: lengths shorter, longer, longer by blocks, and fewer rows."""
    base = max(query_lens) + size
    if most < 2 * base:
        return []
    rows = range(len(query_lens))
    return [
        _Case("the capture", tuple(base + row for row in rows), 0),
        _Case("shorter rows", tuple(max(query_lens[row], base - 2 - row) for row in rows), 0),
        _Case("longer rows in other blocks", tuple(min(most, base + size + row) for row in rows), 3),
        _Case("fewer rows, longer, in other blocks", tuple(min(most, base + 2 + row) for row in rows[:-1]), 6),
        _Case("shortest rows in other blocks", tuple(query_lens), 1),
    ]


class _Rows:
    """Rows as a step's inputs: each in blocks of its own."""

    def __init__(self, model: Any, size: int, seed: int = 0) -> None:
        self._model = model
        self._size = size
        self._random = random.Random(seed)  # noqa: S311 - token ids

    def blocks(self, case: _Case) -> list[list[int]]:
        tables, block = [], case.first_block
        for kv_len in case.kv_lens:
            count = -(-kv_len // self._size)
            # Backwards, so that no row's blocks are in order.
            tables.append(list(range(block + count - 1, block - 1, -1)))
            block += count
        return tables

    def inputs(self, query_lens: Sequence[int], case: _Case) -> StepInputs:
        tables, size = self.blocks(case), self._size
        query_lens = query_lens[: len(case.kv_lens)]
        positions, slots, ends = [], [], list(accumulate(query_lens))
        for table, query_len, kv_len in zip(tables, query_lens, case.kv_lens, strict=True):
            for at in range(kv_len - query_len, kv_len):
                positions.append(at)
                slots.append(table[at // size] * size + at % size)
        ids = [self._random.randrange(self._model.vocab) for _ in positions]
        numbers = BatchShape(prefills=[(query_len, 0) for query_len in query_lens]).numbers
        return StepInputs(
            numbers, query_lens, ids, positions, slots, tables, case.kv_lens, [end - 1 for end in ends]
        )  # fmt: skip


def try_kind(adapter: DeviceAdapter, model: Any, query_len: int | None) -> Trial:
    """Capture a small graph and hold its replays to eager runs.

    Args:
        adapter: the device; nothing may be running on it.
        model: the step model; `block_size` says how many tokens are in a block.
        query_len: that of every row; None for rows of different lengths, prompts among them.

    Raises:
        StickyDeviceError: the device was lost meanwhile, and what the trial used of the KV with it.
    """
    kind = f"FULL graphs of {f'decodes of {query_len} tokens' if query_len else 'mixed batches'}"
    query_lens = [query_len] * ROWS if query_len else [1, 4, 2]
    size: int | None = getattr(model, "block_size", None)
    if not size:
        return Trial(kind, 0, "the model doesn't say its block_size, so no rows can be laid out to try")
    cases = _cases(query_lens, size, min(model.max_blocks * size, model.num_slots // (ROWS + 4)))
    if not cases:
        return Trial(kind, 0, f"the KV of {model.num_slots} slots is too small for rows to try")
    tokens = sum(query_lens) if query_len else sum(query_lens) + 2
    key = GraphKey(Part.FULL, tokens, ROWS, query_len=query_len)
    caches = model.kv_caches()
    rows = _Rows(model, size)
    used = size * (1 + max(block for case in cases for table in rows.blocks(case) for block in table))
    kept = [cache[:used].clone() for cache in caches]
    pool = adapter.new_pool()
    replays, lost = 0, False
    try:
        for cache in caches:
            cache[:used].copy_(torch.randn(cache[:used].shape, generator=torch.Generator().manual_seed(1)).to(cache))
        buffers = StepBuffers(adapter, model, tokens, ROWS)
        shape = PaddedShape(tokens, ROWS, query_len)
        with adapter.session():
            graph = _captured(adapter, model, pool, buffers, key, shape, rows.inputs(query_lens, cases[0]))
            for case in cases[1:]:
                problem = _differs(adapter, model, graph, buffers, shape, rows.inputs(query_lens, case), caches, used)
                if problem:
                    return Trial(kind, replays, f"a replay over {case.name} isn't what eager computes: {problem}")
                replays += 1
    # Whatever else a capture raises, the attention isn't proven.
    except Exception as error:
        line = first_line(error)
        lost = adapter.classify(error).sticky
        if lost:
            raise StickyDeviceError(f"trying {kind}: {line}. The device is lost to this process.") from error
        return Trial(kind, replays, f"it can't be captured and replayed: {line}")
    finally:
        adapter.release(pool)
        # Of a lost device it would fail too, and hide that error.
        if not lost:
            for cache, old in zip(caches, kept, strict=True):
                cache[:used].copy_(old)
    return Trial(kind, replays)


def _captured(
    adapter: DeviceAdapter, model: Any, pool: Any, buffers: StepBuffers, key: GraphKey, shape: PaddedShape,
    rows: StepInputs,
) -> FullGraph:  # fmt: skip
    with adapter.recording(pool), running_rows(HostRows(rows.query_lens, rows.kv_lens)):
        buffers.stage(rows, shape, wanted=True)
        return capture_full(key, shape, adapter, model, pool, buffers)


def _differs(
    adapter: DeviceAdapter, model: Any, graph: FullGraph, buffers: StepBuffers, shape: PaddedShape, rows: StepInputs,
    caches: Sequence[Any], used: int,
) -> str:  # fmt: skip
    """How a replay over rows differs from the same rows run eagerly; "" where no bit does."""
    whole = graph.key.query_len is not None
    num_wanted = len(rows.token_ids) if whole else len(rows.wanted)
    before = [cache[:used].clone() for cache in caches]
    buffers.stage(rows, shape, wanted=True)
    replayed = graph.logits(LaunchRows(num_wanted, whole, len(rows.query_lens)), lasting=True)
    adapter.event().wait()
    written = [cache[:used].clone() for cache in caches]
    for cache, old in zip(caches, before, strict=True):
        cache[:used].copy_(old)
    layout = RowLayout(len(rows.token_ids), len(rows.query_lens) if whole else 0, rows.query_lens, rows.kv_lens)
    run = ModelRun(model, buffers, shape, head_rows(graph.key))
    with running_rows(HostRows(rows.query_lens, rows.kv_lens)):
        eager = run.logits(LaunchRows(num_wanted, whole, len(rows.query_lens), layout))
    if not torch.equal(replayed, eager):
        return f"logits are off by up to {float((replayed - eager).abs().max()):.2g}"
    if any(not torch.equal(cache[:used], mine) for cache, mine in zip(caches, written, strict=True)):
        return "it wrote other KV"
    return ""
