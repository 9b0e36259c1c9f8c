"""A model runner without vLLM: it keeps rows as vLLM's does, on a device and a clock that are simulated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.registry import GraphRegistry
from kpolicy.settings import Settings

JOIN_US = 7.0
"""Host time of a row that wasn't in the last step"""
HOST_WORK_US = 20.0
"""Of the host's fixed work"""


class SimulatedClock:
    """Time that passes where the host works or waits; the device works behind it."""

    def __init__(self) -> None:
        self.time_us = 0.0
        self.device_us = 0.0

    def now(self) -> float:
        return self.time_us / 1e6

    def host_work_us(self) -> float:
        return HOST_WORK_US

    def wait(self) -> None:
        self.time_us = max(self.time_us, self.device_us)

    def occupy(self, us: float) -> None:
        self.launch(0.0, us)

    def launch(self, host_us: float, device_us: float) -> None:
        """The host works, then the device has more to do."""
        start = self.time_us
        self.time_us += host_us
        self.device_us = max(self.device_us, start) + device_us
        if device_us:
            self.device_us = max(self.device_us, self.time_us)

    def event(self) -> float:
        return max(self.device_us, self.time_us)

    def reach(self, mark: float) -> None:
        self.time_us = max(self.time_us, mark)

    def between_us(self, first: float, second: float) -> float:
        self.wait()
        return second - first


class _Output(SimpleNamespace):
    """vLLM's `SchedulerOutput`, as far as runners read it."""

    @classmethod
    def make_empty(cls) -> _Output:
        cached = SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_token_ids=[], all_token_ids={}, new_block_ids=[],
            num_computed_tokens=[], num_output_tokens=[],
        )  # fmt: skip
        return cls(
            scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={}, total_num_scheduled_tokens=0,
            finished_req_ids=set(), num_common_prefix_blocks=[],
        )  # fmt: skip


@contextmanager
def stand_ins(monkeypatch: Any) -> Iterator[None]:
    """The few modules of vLLM that made-up rows need."""
    modules = {
        "vllm": {"SamplingParams": SimpleNamespace},
        "vllm.v1.core.sched.output": {"SchedulerOutput": _Output, "NewRequestData": SimpleNamespace},
        "vllm.config": {"CUDAGraphMode": SimpleNamespace(NONE="NONE")},
        "vllm.v1.worker.gpu.cudagraph_utils": {"CudaGraphManager": type("CudaGraphManager", (), {})},
        "vllm.forward_context": {"BatchDescriptor": lambda tokens: ("eager", tokens)},
    }
    with monkeypatch.context() as patched:
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            patched.setitem(sys.modules, name, module)
        yield


class FakeRunner:
    """Checks every step it is given as vLLM's runner would trip over it, and takes the time that `cost` says.

    Args:
        clock: passes by what steps take.
        cost: ``cost(key, tokens, kv tokens, chunk, context, decodes)`` in (host, device) microseconds.
        max_num_seqs, max_model_len, num_blocks: limits.
    """

    under_way = 2
    """Steps that it has host buffers for"""

    def __init__(
        self, clock: SimulatedClock, cost: Callable[..., tuple[float, float]], *, max_num_seqs: int = 64,
        max_model_len: int = 4096, num_blocks: int = 1000,
    ) -> None:  # fmt: skip
        self.clock = clock
        self.cost = cost
        self.known: dict[str, int] = {}
        self.limit = max_num_seqs
        self.num_blocks = num_blocks
        self.execute_model_state: Any = None
        self.batch: set[str] = set()
        self.forced: Any = None
        self.ran: list[tuple[Any, int, int]] = []
        self.lengths: dict[str, int] = {}
        self.kv_cache_config = SimpleNamespace(
            num_blocks=num_blocks, kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))]
        )
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            model_config=SimpleNamespace(max_model_len=max_model_len, is_encoder_decoder=False),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            kv_transfer_config=None, max_concurrent_batches=self.under_way,
        )  # fmt: skip
        self.ends: list[float] = []
        self.is_pooling_model = False

    def execute_model(self, output: Any) -> None:
        assert self.execute_model_state is None
        for name in output.finished_req_ids:
            self.known.pop(name)
            self.lengths.pop(name)
        decodes = kv = chunk = context = 0
        for row in output.scheduled_new_reqs:
            assert row.req_id not in self.known
            assert len(row.prompt_token_ids) <= self.vllm_config.model_config.max_model_len
            assert len(row.block_ids[0]) * 16 >= len(row.prompt_token_ids)
            assert all(1 <= block < self.num_blocks for block in row.block_ids[0])
            self.known[row.req_id] = row.num_computed_tokens
            self.lengths[row.req_id] = len(row.prompt_token_ids)
        assert len(self.known) <= self.limit
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            assert self.known[name] == computed
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens
        rows = {row.req_id for row in output.scheduled_new_reqs} | set(cached.req_ids)
        assert rows == set(output.num_scheduled_tokens)
        if not rows:
            return
        for name, new in output.num_scheduled_tokens.items():
            if "chunk" in name:
                chunk, context = new, self.known[name]
            else:
                decodes += 1
                kv += self.known[name] + new
            self.known[name] += new
            assert self.known[name] < self.lengths[name], "the prompt would be done, and its token sampled"
        key = self.forced[1]
        tokens = output.total_num_scheduled_tokens
        assert tokens <= (key.num_tokens if isinstance(key, GraphKey) else key[1])
        self.ran.append((key, tokens, decodes))
        joined = len(rows - self.batch)
        self.batch = rows
        host, device = self.cost(key if isinstance(key, GraphKey) else None, tokens, kv, chunk, context, decodes)
        under_way = [end for end in self.ends if end > self.clock.time_us]
        assert len(under_way) < self.under_way, "the device has yet to read what this step overwrites"
        self.clock.launch(host + JOIN_US * joined, device)
        self.ends = [*under_way, self.clock.device_us]
        self.execute_model_state = output

    def sample_tokens(self, grammar: Any) -> None:
        assert grammar is None
        assert self.execute_model_state is not None
        self.execute_model_state = None
        self.clock.launch(20.0, 5.0)


class FakeState:
    """The integration's state, as far as calibration and the scheduler read it."""

    def __init__(self, runner: Any, keys: list[GraphKey], settings: Settings, seconds: float = 2.0) -> None:
        self.settings = settings
        self.config = SimpleNamespace(calibrate_seconds=seconds, split=True)
        self.rejoin_us = 0.0
        self.registry = GraphRegistry()
        for key in keys:
            graphs = 1 if key.part is Part.FULL else 25
            self.registry.plan([key])
            self.registry.capture(key, bytes=1000, seconds=0.01, graphs=graphs, pool="vllm")
        self.warned: dict[str, str] = {}
        self.counters = SimpleNamespace(warn_once=self.warned.__setitem__)
        self.broadcasts: list[Any] = []
        self.runner = runner
        self.dispatcher = self
        self.agree = bool
        self.desc_of = {key: (key.part, key) for key in keys}

    def broadcast(self, value: Any) -> Any:
        """What rank 0 says."""
        self.broadcasts.append(value)
        return value

    @contextmanager
    def forcing(self, mode: Any, desc: Any) -> Iterator[None]:
        """The runner takes that graph."""
        self.runner.forced = (mode, desc)
        yield
        self.runner.forced = None
