"""FlashAttention's bound on splits: for FULL graphs and their captures, and for no other step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kpolicy.attention.support import Claims
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Part
from kpolicy.settings import Settings
from kpolicy_vllm import attach_v1, attach_v2
from kpolicy_vllm.config import Config
from kpolicy_vllm.ladder import sizes_of
from kpolicy_vllm.splits import Splits
from kpolicy_vllm.state import State
from tests.integrations.vllm.test_runners import (
    SETTINGS,
    Descriptor,
    Dispatcher,
    Execution,
    Manager,
    Mode,
    capture,
    compilation,
)


def made(*, own_sizes: bool = True, drafts: int = 0) -> tuple[Splits, Any]:
    """With a builder that vLLM let bound splits to 128 tokens, where 64 is the largest FULL graph, and one without."""
    builder = SimpleNamespace(max_cudagraph_size=128)
    runner = SimpleNamespace(
        attn_groups=[[SimpleNamespace(metadata_builders=[builder, SimpleNamespace(max_cudagraph_size=None)])]]
    )
    keys = dict.fromkeys([GraphKey(Part.FULL, 64, 64, query_len=1), GraphKey(Part.PIECEWISE, 128)])
    sizes = CaptureSizes((64,), (), (128,)) if own_sizes else None
    state = SimpleNamespace(
        sizes=sizes, dispatcher=SimpleNamespace(desc_of=keys), settings=Settings(num_speculative_tokens=drafts)
    )
    splits = Splits(runner, state)  # type: ignore[arg-type]
    splits.found()
    return splits, builder


def test_only_whole_graphs_bound_splits() -> None:
    splits, builder = made()
    assert builder.max_cudagraph_size == 64
    for whole in (False, False, True, False):
        splits.bound(whole)
        assert builder.max_cudagraph_size == (64 if whole else 0)


def test_what_is_captured_has_the_bound_whatever_ran_before() -> None:
    """Lazy captures come between steps, and builders are looked for again before each."""
    splits, builder = made()
    splits.bound(False)
    with splits.capturing():
        assert builder.max_cudagraph_size == 64
        splits.bound(False)  # a step that warms up
        assert builder.max_cudagraph_size == 64
    splits.bound(False)
    splits.found()
    assert builder.max_cudagraph_size == 64
    splits.bound(False)
    assert builder.max_cudagraph_size == 0


@pytest.mark.parametrize(("given", "left"), [({"own_sizes": False}, 128), ({"drafts": 2}, 64)])
def test_vllm_s_own_sizes_and_drafters_keep_the_bound(given: Any, left: int) -> None:
    """The replica's last bits are stock's; a drafter's graph may ask the same builder after a step in pieces."""
    splits, builder = made(**given)
    splits.bound(False)
    assert builder.max_cudagraph_size == left


class Attached:
    """A runner that kpolicy is attached to, over stand-ins of vLLM's classes, with a builder that bounds splits."""

    def __init__(self) -> None:
        self.state = State(Config(policy="full_and_piecewise"), SETTINGS)
        self.state.claims = Claims.at_level("mixed")
        self.state.sizes = sizes_of(self.state.config, SETTINGS)
        self.largest = max(self.state.sizes.mixed)
        self.builder = SimpleNamespace(max_cudagraph_size=1024)
        group = SimpleNamespace(backend=None, kv_cache_spec=None, metadata_builders=[self.builder])
        self.runner: Any = SimpleNamespace(attn_groups=[[group]], vllm_config=compilation(self.state))
        self.during: list[int] = []
        """The bound of each step of captures"""

    def note(self) -> None:
        self.during.append(self.builder.max_cudagraph_size)


class First(Attached):
    """The first runner's: each step asks for what it runs in, those that warm up for no graph."""

    def __init__(self, _monkeypatch: Any) -> None:
        super().__init__()
        runner = self.runner

        def determine(tokens: int, _reqs: int, _rows: Any, **asked: Any) -> Any:
            return runner.cudagraph_dispatcher.dispatch(tokens, **asked)

        def warmup_and_capture(desc: Any, cudagraph_runtime_mode: Any) -> None:
            for mode in (Mode.NONE, cudagraph_runtime_mode):
                rows = np.ones(1, dtype=np.int32)
                runner._determine_batch_execution_and_padding(desc.num_tokens, 1, rows, valid_modes={mode})
                self.note()

        runner._determine_batch_execution_and_padding = determine
        runner._warmup_and_capture = warmup_and_capture
        runner._check_and_update_cudagraph_mode = runner.capture_model = runner.profile_cudagraph_memory = None
        modules = SimpleNamespace(
            CudagraphDispatcher=Dispatcher, CUDAGraphMode=Mode, BatchDescriptor=Descriptor, broadcast=None,
            free_bytes=lambda: 0,
        )  # fmt: skip
        attach_v1.attach(runner, self.state, modules)
        runner.cudagraph_dispatcher.initialize_cudagraph_keys(Mode.FULL_AND_PIECEWISE)

    def capture_all(self) -> None:
        for mode, descs in self.runner.cudagraph_dispatcher.get_capture_descs():
            for desc in descs:
                self.runner._warmup_and_capture(desc, cudagraph_runtime_mode=mode)
        capture(self.state, self.state.dispatcher.desc_of)

    def step(self, *rows: int) -> Any:
        found = self.runner._determine_batch_execution_and_padding(sum(rows), len(rows), np.array(rows))
        return found[0]


class Second(Attached):
    """The second runner's: its manager is made with the KV cache, and captures are asked for through it."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__()
        runner = self.runner
        monkeypatch.setattr(attach_v2, "levels_of", lambda *_: None)
        monkeypatch.setattr(attach_v2, "claims_of", lambda *_, **__: self.state.claims)
        monkeypatch.setattr(Mode, "has_mode", lambda *_: True, raising=False)

        def initialize_kv_cache() -> None:
            runner.cudagraph_manager = Manager(runner.vllm_config)

        runner.initialize_kv_cache, runner.capture_model = initialize_kv_cache, None
        modules = SimpleNamespace(
            ModelCudaGraphManager=Manager, CudaGraphManager=Manager, CUDAGraphMode=Mode,
            BatchExecutionDescriptor=Execution, broadcast=None,
        )  # fmt: skip
        attach_v2.attach(runner, self.state, modules, newest=False)
        runner.initialize_kv_cache()

    def capture_all(self) -> None:
        def forward(desc: Any, warmup: bool) -> None:
            self.runner.cudagraph_manager.dispatch(1, desc.num_tokens, None)  # stock's answer: no graph yet
            self.note()

        self.runner.cudagraph_manager.capture(forward)
        capture(self.state, self.state.dispatcher.chooser.desc_of)

    def step(self, *rows: int) -> Any:
        alike = rows[0] if len(set(rows)) == 1 else None
        return self.runner.cudagraph_manager.dispatch(len(rows), sum(rows), alike).cg_mode


@pytest.mark.parametrize("make", [First, Second])
def test_runners_bound_splits_while_they_capture_and_where_a_step_runs_in_a_full_graph(
    make: Any, monkeypatch: Any
) -> None:
    attached = make(monkeypatch)
    builder, largest = attached.builder, attached.largest
    attached.capture_all()
    assert builder.max_cudagraph_size == largest < 1024
    assert set(attached.during) == {largest}
    whole, pieces, eager = (1,) * 5, (1, 1, 600), (1, 1, 1100)
    for rows, mode in ((whole, Mode.FULL), (pieces, Mode.PIECEWISE), (whole, Mode.FULL), (eager, Mode.NONE),
                       (pieces, Mode.PIECEWISE), (eager, Mode.NONE), (whole, Mode.FULL)):  # fmt: skip
        assert attached.step(*rows) is mode
        assert builder.max_cudagraph_size == (largest if mode is Mode.FULL else 0)


def test_a_graph_that_the_second_runner_is_told_to_take_has_its_own_bound(monkeypatch: Any) -> None:
    """As calibration tells it."""
    attached = Second(monkeypatch)
    attached.capture_all()
    manager = attached.runner.cudagraph_manager
    for mode, desc in manager.desc_of.values():
        with manager.forcing(mode, desc):
            manager.dispatch(1, desc.num_tokens, None)
        assert attached.builder.max_cudagraph_size == (attached.largest if mode is Mode.FULL else 0)
