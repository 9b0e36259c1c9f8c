"""Steps of made-up rows for a vLLM model runner: what calibration times, before any request is there.

Rows go in as requests do, through `SchedulerOutput`, so a step's host work is a real step's. Each row is a prompt that
is never finished: nothing is sampled for it, and the same step can be run again. Rows read blocks that hold whatever
is there, and share them where the KV cache is too small for all. A server at start-up has no request whose KV that
could harm; `close` leaves none of the rows behind.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any, NamedTuple

__all__ = ["Rows", "Steps"]

_SLACK = 512
"""Steps that a decode row can be run for, at most, before its prompt would end."""
_VISIT = 4
"""Steps of a case between two looks at whether its rows are used up, and one to spare"""


class Rows(NamedTuple):
    """The rows of one step.

    Args:
        decodes: rows of `query_len` tokens.
        kv: tokens that each of them attends to, the step's own included; it grows a little from step to step.
        chunk: tokens of a prompt chunk beside them; 0 for none.
        context: tokens that the chunk has before it.
        query_len: tokens of a decode row.
    """

    decodes: int
    kv: int = 0
    chunk: int = 0
    context: int = 0
    query_len: int = 1

    @property
    def num_tokens(self) -> int:
        return self.decodes * self.query_len + self.chunk


class Steps:
    """Makes scheduler outputs for made-up rows, and remembers which rows the runner knows.

    Args:
        runner: vLLM's model runner, its KV cache allocated.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._output = importlib.import_module("vllm.v1.core.sched.output")
        self._params = importlib.import_module("vllm").SamplingParams(temperature=0.0, max_tokens=2)
        config = runner.vllm_config
        self._most_rows: int = config.scheduler_config.max_num_seqs
        self.longest: int = config.model_config.max_model_len
        groups = runner.kv_cache_config.kv_cache_groups
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self._blocks = itertools.cycle(range(1, max(2, runner.kv_cache_config.num_blocks)))
        self._kv = 0
        self._computed: list[int] = []
        self._chunks = 0
        self._chunk: str | None = None
        self.decode_kv = 0
        """Tokens that the decode rows of the last step attended to, all together"""

    def step(self, rows: Rows) -> Any:
        """The scheduler output that runs these rows.

        Raises:
            ValueError: the model's longest sequence can't hold them.
        """
        output = self._output.SchedulerOutput.make_empty()
        gone = output.finished_req_ids
        if self._chunk is not None:
            gone.add(self._chunk)
            self._chunk = None
        if rows.decodes and rows.kv != self._kv:
            gone.update(map(self._name, range(len(self._computed))))
            self._computed, self._kv = [], rows.kv
        while self._computed and len(self._computed) + bool(rows.chunk) > self._most_rows:
            self._computed.pop()
            gone.add(self._name(len(self._computed)))
        cached = output.scheduled_cached_reqs
        for i in range(min(rows.decodes, len(self._computed))):
            cached.req_ids.append(self._name(i))
            cached.num_computed_tokens.append(self._computed[i])
            cached.num_output_tokens.append(0)
            cached.new_block_ids.append(None)
        new = [
            self._new(self._name(i), rows.kv - rows.query_len, self._length(rows))
            for i in range(len(self._computed), rows.decodes)
        ]
        self._computed += [rows.kv - rows.query_len] * len(new)
        scheduled = {self._name(i): rows.query_len for i in range(rows.decodes)}
        for i in range(rows.decodes):
            self._computed[i] += rows.query_len
        self.decode_kv = sum(self._computed[: rows.decodes])
        if rows.chunk:
            self._chunks += 1
            self._chunk = f"kpolicy-chunk-{self._chunks}"
            new.append(self._new(self._chunk, rows.context, rows.context + rows.chunk + 1))
            scheduled[self._chunk] = rows.chunk
        output.scheduled_new_reqs = new
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = rows.num_tokens
        output.num_common_prefix_blocks = [0] * len(self._block_sizes)
        return output

    def used_up(self, rows: Rows) -> bool:
        """Whether the decode rows would end within the steps of another visit."""
        return rows.kv == self._kv and any(
            each + _VISIT * rows.query_len >= self._length(rows) for each in self._computed[: rows.decodes]
        )

    def fits(self, rows: Rows) -> bool:
        """Whether the model's longest sequence holds a visit's steps of them."""
        decodes = not rows.decodes or rows.kv + _VISIT * rows.query_len < self.longest
        return decodes and (not rows.chunk or rows.context + rows.chunk < self.longest)

    def _length(self, rows: Rows) -> int:
        """Tokens of a decode row's prompt: for as many steps as the model's longest sequence leaves."""
        return min(rows.kv + _SLACK * rows.query_len, self.longest)

    def close(self) -> Any:
        """The scheduler output that has the runner forget all rows; it runs nothing."""
        output = self._output.SchedulerOutput.make_empty()
        output.finished_req_ids = set(map(self._name, range(len(self._computed))))
        if self._chunk is not None:
            output.finished_req_ids.add(self._chunk)
        output.num_common_prefix_blocks = [0] * len(self._block_sizes)
        self._computed, self._chunk, self._kv = [], None, 0
        return output

    def _name(self, i: int) -> str:
        return f"kpolicy-{self._kv}-{i}"

    def _new(self, name: str, computed: int, length: int) -> Any:
        if length > self.longest:
            raise ValueError(f"a row of {length} tokens is longer than the model's {self.longest}")
        prompt = [7 * i % 977 + 1 for i in range(length)]
        blocks = tuple([next(self._blocks) for _ in range(-(-length // size))] for size in self._block_sizes)
        return self._output.NewRequestData(
            req_id=name, prompt_token_ids=prompt, mm_features=[], sampling_params=self._params, pooling_params=None,
            block_ids=blocks, num_computed_tokens=computed, lora_request=None, prefill_token_ids=prompt,
        )  # fmt: skip
