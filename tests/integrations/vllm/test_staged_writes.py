"""Two forwards a step over vLLM's own host buffers, with kernels that run as late as the engine lets them."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kpolicy_vllm import plugin, two_forwards
from kpolicy_vllm.versions import Adapter
from kpolicy_vllm.versions.signatures import TWO_FORWARDS
from tests.integrations.vllm.test_real_scheduler import BOTH, pytestmark
from tests.integrations.vllm.test_two_forwards import state_of
from tests.oracle.loader import loaded, oracle_folder

__all__ = ["pytestmark"]

BUFFERS, RUNNER = "vllm.v1.worker.gpu.buffer_utils", "vllm.v1.worker.gpu.model_runner"
REAL = (BUFFERS, "vllm.v1.outputs", "vllm.v1.core.sched.output")
SLOTS, BLOCKS, STEPS = 12, 8, 60
UNDER_WAY = 2
"""Steps, under asynchronous scheduling"""


@contextmanager
def buffers(version: str, monkeypatch: pytest.MonkeyPatch, queue: list[Callable[[], None]]) -> Iterator[ModuleType]:
    """vLLM's module of host buffers, whose kernel is queued and reads its arguments when it runs."""
    import torch

    zeros = torch.zeros
    with loaded(oracle_folder(), version, real=REAL, installed=("torch",)):
        module: Any = importlib.import_module(BUFFERS)

        def copied(values: list[int], *_: Any, **__: Any) -> Any:
            return torch.tensor(values)

        def launched(
            gpu: Any, _: int, rows: Any, starts: Any, contents: Any, ends: Any, *_more: Any, **_by: Any
        ) -> None:
            def run() -> None:
                begin = 0
                for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
                    part = contents[begin:end]
                    place = gpu[row, start : start + len(part)]
                    place[:] = part[: len(place)]
                    begin = end

            queue.append(run)

        class Kernel:
            def __getitem__(self, _grid: Any) -> Any:
                return launched

        for name, value in (
            ("is_uva_available", lambda: True), ("get_accelerator_view_from_cpu_tensor", lambda tensor: tensor),
            ("async_tensor_h2d", copied), ("_apply_write_kernel", Kernel()),
            ("triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b))),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **named: zeros(*size, **named))  # noqa: ARG005
        yield module
        monkeypatch.undo()


class Tables:
    """The part of vLLM's second runner that a step's new blocks go through, and forwards that read what it left."""

    def __init__(self, module: Any, depth_of: Any, queue: list[Callable[[], None]]) -> None:
        import torch

        self.vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
            model_config=SimpleNamespace(is_encoder_decoder=False), speculative_config=None, lora_config=None,
            scheduler_config=SimpleNamespace(async_scheduling=True), kv_transfer_config=None,
            max_concurrent_batches=UNDER_WAY,
        )  # fmt: skip
        # As the runner does before it makes the first of them.
        depth_of.set_default_max_concurrency(self.vllm_config.max_concurrent_batches)
        self.req_states = SimpleNamespace(prompt_len=module.UvaBackedTensor(SLOTS, torch.int32))
        self.table = module.StagedWriteTensor((SLOTS, BLOCKS), torch.int32, torch.device("cpu"))
        self.right = torch.zeros((SLOTS, BLOCKS), dtype=torch.int32)
        self.block_tables = SimpleNamespace(num_blocks=module.UvaBackedTensor(SLOTS, torch.int32))
        base = importlib.import_module("vllm.v1.outputs").AsyncModelRunnerOutput
        self.sampled = type("Later", (base,), {"get_output": None, "get_kv_connector_output": None})()
        self.queue = queue
        self.blocks: dict[str, int] = {}
        self.wrong: list[tuple[str, Any]] = []
        self.forwards = 0

    def execute_model(self, output: Any, intermediate_tensors: Any = None) -> None:
        assert intermediate_tensors is None
        cached = output.scheduled_cached_reqs
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self.append(name, new[0] if new else [])
        for request in output.scheduled_new_reqs:
            self.blocks[request.req_id] = 0
            self.append(request.req_id, request.block_ids)
        self.table.apply_write()
        self.forwards += 1
        wanted = {name: self.right[int(name), : self.blocks[name]].tolist() for name in output.num_scheduled_tokens}

        def forward() -> None:
            for name, row in wanted.items():
                if self.table.gpu[int(name), : len(row)].tolist() != row:
                    self.wrong.append((name, row))

        self.queue.append(forward)

    def append(self, name: str, blocks: list[int]) -> None:
        start = self.blocks[name]
        self.table.stage_write(int(name), start, blocks)
        for place, block in enumerate(blocks):
            self.right[int(name), start + place] = block
        self.blocks[name] += len(blocks)

    def sample_tokens(self, _grammar: Any) -> Any:
        return self.sampled


def steps(rng: random.Random) -> Iterator[Any]:
    """Steps of decodes of which some need a block, and of prompts in slots that others had."""
    module = importlib.import_module("vllm.v1.core.sched.output")
    block, running = 100, dict[str, int]()
    for _ in range(STEPS):
        for name in [name for name, count in running.items() if count >= BLOCKS - 1]:
            del running[name]
        new_blocks: list[Any] = []
        for name in running:
            wants = rng.random() < 0.6
            new_blocks.append(([block],) if wants else None)
            running[name] += wants
            block += wants
        free = [name for name in map(str, range(SLOTS)) if name not in running]
        prompts = {name: rng.randint(1, 3) for name in rng.sample(free, min(len(free), rng.randint(0, 2)))}
        output = module.SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = module.CachedRequestData(
            req_ids=list(running), resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
            new_block_ids=new_blocks, num_computed_tokens=[9] * len(running), num_output_tokens=[1] * len(running),
        )  # fmt: skip
        output.scheduled_new_reqs = []
        for name, count in prompts.items():
            request = SimpleNamespace(req_id=name, block_ids=list(range(block, block + count)))
            output.scheduled_new_reqs.append(request)
            block += count
        output.num_scheduled_tokens = {**dict.fromkeys(running, 1), **dict.fromkeys(prompts, 16)}
        output.total_num_scheduled_tokens = len(running) + 16 * len(prompts)
        running |= prompts
        if output.num_scheduled_tokens:
            yield output


def served(runner: Tables, seed: int) -> tuple[int, int]:
    """Run steps, of which the device begins one when the engine must have its output: steps, and rows found wrong."""
    marks: list[int] = []
    count = 0
    for output in steps(random.Random(seed)):  # noqa: S311
        if len(marks) == UNDER_WAY:
            for _ in range(marks.pop(0)):
                runner.queue.pop(0)()
        before = len(runner.queue)
        runner.execute_model(output)
        runner.sample_tokens(None)
        marks.append(len(runner.queue) - before)
        count += 1
    while runner.queue:
        runner.queue.pop(0)()
    return count, len(runner.wrong)


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_forwards, "SplitRule", lambda _: SimpleNamespace(two_forwards=lambda *_: True))


@BOTH
@pytest.mark.parametrize("imported", ["before", "meanwhile"])
@pytest.mark.parametrize("deep", [False, True])
def test_forwards_find_the_blocks_that_their_step_was_given(
    version: str, imported: str, deep: bool, monkeypatch: Any
) -> None:
    """Divided with buffers for it; whole without."""
    for seed in range(5):
        queue: list[Callable[[], None]] = []
        with buffers(version, monkeypatch, queue) as module, ExitStack() as stack:
            stock = module.set_default_max_concurrency
            always(monkeypatch)
            of_runner: Any = ModuleType(RUNNER)
            if imported == "before":
                of_runner.set_default_max_concurrency = stock
            sys.modules[RUNNER] = of_runner
            if deep:
                stack.enter_context(two_forwards.deeper())
            if imported == "meanwhile":
                of_runner.set_default_max_concurrency = module.set_default_max_concurrency
            runner, state = Tables(module, of_runner, queue), state_of()
            stack.close()
            assert module.set_default_max_concurrency is of_runner.set_default_max_concurrency is stock
            two_forwards.attach(runner, state)
            count, wrong = served(runner, seed)
            assert not wrong
            twice = state.counters.counts["split_two_forwards"]
            assert runner.forwards == count + twice
            assert state.two_forwards is deep
            assert (twice > STEPS / 4) is deep
            assert state.counters.counts["not_split"] == (not deep)


@BOTH
def test_buffers_for_one_forward_a_step_would_mix_up_blocks(version: str, monkeypatch: Any) -> None:
    """What the depth is for: with as many buffers as vLLM makes, forwards read blocks of others."""
    queue: list[Callable[[], None]] = []
    with buffers(version, monkeypatch, queue) as module:
        always(monkeypatch)
        monkeypatch.setattr(two_forwards, "shallow", lambda _: None)
        runner, state = Tables(module, module, queue), state_of()
        two_forwards.attach(runner, state)
        _, wrong = served(runner, 0)
        assert wrong
        assert not state.counters.counts["not_split"]


@BOTH
def test_block_tables_of_fewer_buffers_keep_steps_whole(version: str, monkeypatch: Any) -> None:
    """They are made after the runner: a depth that was lost in between is noticed at the first step."""
    import torch

    queue: list[Callable[[], None]] = []
    with buffers(version, monkeypatch, queue) as module:
        always(monkeypatch)
        sys.modules[RUNNER] = ModuleType(RUNNER)
        with two_forwards.deeper():
            runner, state = Tables(module, module, queue), state_of()
        two_forwards.attach(runner, state)
        assert state.two_forwards
        runner.block_tables = SimpleNamespace(num_blocks=module.UvaBackedTensor(SLOTS, torch.int32, UNDER_WAY))
        count, wrong = served(runner, 0)
        assert (runner.forwards, wrong) == (count, 0)
        assert not state.two_forwards
        assert state.counters.counts == {"not_split": 1}


@BOTH
@pytest.mark.parametrize(("split", "second", "depth"), [(True, True, 4), (True, False, 2), (False, True, 2)])
def test_the_plugin_makes_room_where_steps_may_have_two_forwards(
    version: str, split: bool, second: bool, depth: int, monkeypatch: Any
) -> None:
    with buffers(version, monkeypatch, []) as module:
        monkeypatch.setattr(plugin, "_attach", lambda *_: None)
        config = vllm_of_two_forwards(f"{version} {split} {second}", split=split, second=second)
        wrapper = SimpleNamespace(vllm_config=config, worker=SimpleNamespace(model_runner=SimpleNamespace()))
        found = Adapter("a release", object, object, lambda *_: None, {"two forwards": TWO_FORWARDS})
        plugin._device_ready(found, lambda _: module.set_default_max_concurrency(UNDER_WAY), wrapper)
        assert depth == module._DEFAULT_MAX_CONCURRENCY
        with pytest.raises(ValueError, match="no device"):
            plugin._device_ready(found, fails, wrapper)
        module.set_default_max_concurrency(UNDER_WAY)
        assert module._DEFAULT_MAX_CONCURRENCY == UNDER_WAY


@BOTH
def test_other_buffers_than_were_recorded_are_left_alone(version: str, monkeypatch: Any) -> None:
    """A step has one forward then, which is said; vLLM makes its runner as ever."""
    with buffers(version, monkeypatch, []) as module:
        stock = module.set_default_max_concurrency
        monkeypatch.setattr(module, "set_default_max_concurrency", lambda n, surprise=None: stock(n))  # noqa: ARG005
        monkeypatch.setattr(plugin, "_attach", lambda *_: None)
        config = vllm_of_two_forwards(f"{version} changed", split=True, second=True)
        wrapper = SimpleNamespace(vllm_config=config, worker=SimpleNamespace(model_runner=SimpleNamespace()))
        found = Adapter("a release", object, object, lambda *_: None, {"two forwards": TWO_FORWARDS})
        plugin._device_ready(found, lambda _: module.set_default_max_concurrency(UNDER_WAY), wrapper)
        assert module._DEFAULT_MAX_CONCURRENCY == UNDER_WAY
        state = plugin.state_of(config)
        assert state is not None
        assert state.counters.counts == {"not_split": 1}


def vllm_of_two_forwards(instance: str, *, split: bool, second: bool) -> Any:
    """A configuration as far as the plugin reads it where a worker is made."""
    return SimpleNamespace(
        instance_id=instance, additional_config={"kpolicy": {"split": split}},
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64), speculative_config=None,
        lora_config=None, parallel_config=SimpleNamespace(data_parallel_size=1), use_v2_model_runner=second,
    )  # fmt: skip


def fails(_wrapper: Any) -> None:
    raise ValueError("no device")
