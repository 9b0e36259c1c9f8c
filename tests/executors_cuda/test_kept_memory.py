"""What a start keeps of a GPU's memory, with torch's caching allocator pretended: no more than captures noted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.engine import Engine  # noqa: E402
from kpolicy.executors.cuda.staging import StagedGroup  # noqa: E402
from kpolicy.executors.cuda.stream_adapter import StreamAdapter  # noqa: E402
from kpolicy.executors.launcher import GraphLauncher  # noqa: E402
from kpolicy.executors.runner import ModeRunner  # noqa: E402
from kpolicy.serving.load import load  # noqa: E402
from kpolicy.settings import Settings  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.fakes.caching_allocator import CachingAllocator  # noqa: E402
from tests.fakes.torch_npu import fake_torch_npu  # noqa: E402

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 30_000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 1024,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TOKENS, REQS = 64, 4
ROWS = [4 * CONFIG["hidden_size"]] * CONFIG["num_hidden_layers"]
"""Bytes a token of each attention call's output: 8 KiB for 64 tokens, whose logits are 7,500, and 469 for four"""
SETTINGS = Settings(max_num_reqs=REQS, max_num_tokens=TOKENS)


class Start:
    """An Engine over a pretended device whose tensors count as 1,024 times as large as they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lazy: bool | float) -> None:
        chip = fake_torch_npu()
        npu = chip.npu
        self.allocator = CachingAllocator(
            lambda: npu.current_stream().number, lambda: chip.state.capture is not None, unit=1024
        )
        pinned = StagedGroup._turn

        def not_on_the_device(group: Any, pin: bool) -> Any:
            with self.allocator.paused():
                return pinned(group, pin)

        monkeypatch.setattr(StagedGroup, "_turn", not_on_the_device)
        library = SimpleNamespace(
            **vars(npu) | {"CUDAGraph": npu.NPUGraph, "empty_cache": self.allocator.empty_cache}
        )  # fmt: skip
        model = load(CONFIG, num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=REQS)
        adapter = StreamAdapter("pretended", library, torch.device("cpu"))
        self.executor = ModeRunner(GraphLauncher(adapter, model))
        self.engine = Engine(
            "piecewise", executor=self.executor, settings=SETTINGS, ladder=[16, TOKENS], calibrate=0, lazy=lazy
        )
        self.sequences = Sequences(1)

    def step(self, num_tokens: int) -> None:
        row = self.sequences.chunk(self.sequences.start(), num_tokens)
        self.engine.step(self.sequences.inputs([row]))

    @property
    def stream(self) -> Any:
        """The one that graphs are captured on."""
        (pool,) = self.executor._pools
        return pool.memory.memory.stream.number

    @property
    def counted_bytes(self) -> int:
        """What the registry has besides what is recorded: static inputs and outputs of attention."""
        graphs = sum(handle.num_bytes for handle in self.executor._handles.values())
        return self.engine.registry.totals().bytes_live - graphs


@pytest.fixture(params=[False, True], ids=["captured at once", "captured between steps"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    start = Start(monkeypatch, lazy=1e3 if request.param else False)
    with start.allocator:
        if request.param:
            for num_tokens in (TOKENS, TOKENS, TOKENS, 9, 9, 9, 9, 9):
                start.step(num_tokens)
            assert not start.engine.lazy_pending
        else:
            start.engine.capture()
        assert len(start.engine.registry.captured()) == len(start.engine.keys) == 2
        yield start


def test_no_logits_of_all_tokens(start: Start) -> None:
    """Warming up computes logits of as many rows as there are requests, however many tokens the graph has."""
    assert max(start.allocator.made) == REQS * 4 * CONFIG["vocab_size"]


def test_nothing_stays_that_was_not_counted(start: Start) -> None:
    """What captures warmed up with goes back: the device has less by what the registry counts, in its segments."""
    outputs, inputs = sum(ROWS), start.executor._pools[0].memory.buffers.num_bytes
    assert start.counted_bytes == TOKENS * outputs + inputs
    # Segments have 20 KiB, of which two outputs take 16.
    assert start.allocator.reserved_on(start.stream) <= 1.5 * TOKENS * outputs


def test_a_release_gives_all_of_it_back(start: Start) -> None:
    """Once no graph, buffer or output is left the device has what it had."""
    start.engine.release()
    gc.collect()
    start.allocator.empty_cache()
    assert start.allocator.reserved == 0
