"""A small paged driver: blocks, rows and steps by hand, for tests that step a `LoadedModel` directly."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

from kpolicy.executors.step_model import RowLayout, StepContext, StepTensors


class Request:
    """One stream: its tokens so far, how many have KV, and its blocks."""

    def __init__(self, ids: list[int], blocks: list[int]) -> None:
        self.ids = list(ids)
        self.computed = 0
        self.blocks = blocks


class Row(NamedTuple):
    request: Request
    num_tokens: int
    decode: bool


class Driver:
    """Steps requests on a model. Blocks come in shuffled order, so that slots and positions never agree by chance."""

    def __init__(self, model: Any, seed: int = 0) -> None:
        self.model = model
        model.clear_kv()
        model.poison_pad_slot()
        self.free = list(range(model.num_blocks))
        random.Random(seed).shuffle(self.free)  # noqa: S311

    def request(self, ids: list[int], room: int = 0) -> Request:
        """A request with blocks for its tokens and `room` more."""
        count = -(-(len(ids) + room) // self.model.block_size)
        return Request(ids, [self.free.pop() for _ in range(count)])

    def tensors(
        self, rows: list[Row], padded_tokens: int = 0, padded_reqs: int = 0, uniform: int | None = None
    ) -> StepTensors:
        """The rows' inputs, decodes first, padded as an executor does."""
        size = self.model.block_size
        tokens = [(row.request, row.request.computed + i) for row in rows for i in range(row.num_tokens)]
        num_reqs, num_tokens = max(padded_reqs, len(rows)), max(padded_tokens, len(tokens))
        more, empty = num_tokens - len(tokens), num_reqs - len(rows)
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row.num_tokens)
        starts += [starts[-1] + (uniform or 0) * (i + 1) for i in range(empty)]
        table = [row.request.blocks + [0] * (self.model.max_blocks - len(row.request.blocks)) for row in rows]
        return StepTensors(
            torch.tensor([request.ids[at] for request, at in tokens] + [0] * more),
            torch.tensor([at for _, at in tokens] + [0] * more),
            torch.tensor(
                [request.blocks[at // size] * size + at % size for request, at in tokens] + [self.model.pad_slot] * more
            ),
            torch.tensor(table + [[0] * self.model.max_blocks] * empty, dtype=torch.int32),
            torch.tensor([row.request.computed + row.num_tokens for row in rows] + [0] * empty, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
        )

    def layout(self, rows: list[Row]) -> RowLayout:
        return RowLayout(
            sum(row.num_tokens for row in rows),
            sum(row.decode for row in rows),
            [row.num_tokens for row in rows],
            [row.request.computed + row.num_tokens for row in rows],
        )

    def step(
        self,
        rows: list[Row],
        padded_tokens: int = 0,
        padded_reqs: int = 0,
        *,
        captured: bool = True,
        uniform: int | None = None,
    ) -> list[torch.Tensor]:
        """Run rows and advance them: logits [num_tokens, vocab] of each row. Without `captured` the layout is given."""
        tensors = self.tensors(rows, padded_tokens, padded_reqs, uniform)
        hidden = self.model.forward(StepContext(tensors, None if captured else self.layout(rows), uniform))
        assert hidden.shape[0] == tensors.token_ids.shape[0]
        lengths = [row.num_tokens for row in rows]
        logits = self.model.head(hidden[: sum(lengths)])
        for row in rows:
            row.request.computed += row.num_tokens
        return list(logits.split(lengths))


def run_mixed(driver: Driver, sequences: list[list[int]], seed: int, padding: bool = True) -> list[torch.Tensor]:
    """Logits [len, vocab] of each sequence, run in random chunks, decodes and mixed batches with padding rows.

    A token goes as a decode once half of the sequence has KV, before that in prompt chunks.
    """
    rng = random.Random(seed)  # noqa: S311
    requests = [driver.request(ids) for ids in sequences]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    captured = True
    while any(request.computed < len(request.ids) for request in requests):
        decodes, prefills = [], []
        for index, request in enumerate(requests):
            left = len(request.ids) - request.computed
            if not left or (rng.random() < 0.3):
                continue
            prompt = len(request.ids) // 2
            if request.computed >= prompt:
                decodes.append((index, Row(request, 1, True)))
            else:
                prefills.append((index, Row(request, rng.randint(1, min(left, 13)), False)))
        chosen = decodes + prefills
        if not chosen:
            continue
        rows = [row for _, row in chosen]
        num_tokens = sum(row.num_tokens for row in rows)
        extra = (rng.randint(0, 5), rng.randint(0, 3)) if padding else (0, 0)
        logits = driver.step(rows, num_tokens + extra[0], len(rows) + extra[1], captured=captured)
        captured = not captured
        for (index, _), each in zip(chosen, logits, strict=True):
            parts[index].append(each)
    return [torch.cat(each) for each in parts]
