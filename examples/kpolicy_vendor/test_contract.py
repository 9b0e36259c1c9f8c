"""The executor as kpolicy finds it, by its entry point, held to the contract of all executors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from kpolicy_vendor import meaning, stand_in

from kpolicy import Engine, load
from kpolicy.budgets import Budget
from kpolicy.errors import GraphReplayError, StickyDeviceError
from kpolicy.executors import executor_names, get_executor
from kpolicy.reasons import Reason
from kpolicy.testing import EXECUTOR_CHECKS, Sequences

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip


NAMES = ("vendor", "vendor-cached")

# Threads that outnumber the cores left make operators this small many times as slow.
torch.set_num_threads(1)


def make(name: str) -> Any:
    model = load(CONFIG, num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=8)
    return get_executor(name, model=model)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_found(name: str) -> None:
    assert executor_names()[name] == "kpolicy-vendor"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", EXECUTOR_CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[..., None], name: str) -> None:
    fewer = {"seeds": range(1)} if "seeds" in signature(check).parameters else {}
    # Other padded shapes round otherwise; a replay against the same shape run eagerly differs in no bit.
    check(partial(make, name), close=lambda a, b: bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4)), **fewer)


@pytest.fixture
def full_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the cache hold so many graphs."""

    def limit(most: int) -> None:
        gc.collect()  # those of Engines before
        monkeypatch.setattr(stand_in.CachedGraph, "most", stand_in.CachedGraph.live + most)

    return limit


def served(**options: Any) -> Engine:
    """An Engine of decode graphs, captured, and a step of three decodes that equals an eager one."""
    engine = Engine("full", executor=make("vendor-cached"), calibrate=0, **options)
    engine.capture()
    sequences = Sequences(1, num_blocks=64, block_size=16, vocab=CONFIG["vocab_size"])
    rows = [sequences.chunk(sequences.start(), 3)]
    assert torch.isfinite(engine.step(sequences.inputs(rows)).outputs[0]).all()
    return engine


def test_graphs_beyond_the_cache_cost_speed_only(full_after: Callable[[int], None]) -> None:
    full_after(2)
    engine = served(ladder=[1, 2, 4, 8])
    assert len(engine.registry.captured()) == 2
    engine.release()
    full_after(100)
    engine = served(ladder=[1, 2, 4, 8])
    assert len(engine.registry.captured()) > 2
    engine.release()


def test_a_budget_says_how_many_graphs_there_may_be(full_after: Callable[[int], None]) -> None:
    """With it nothing is asked of the cache that it can't hold: no capture fails."""
    full_after(2)
    engine = served(budget=Budget(graphs=2))
    records = engine.registry.records()
    assert len(engine.registry.captured()) == 2
    assert not [record for record in records if record.reason is Reason.CAPTURE_FAILED]
    engine.release()


def test_what_was_compiled_once_is_not_compiled_again(full_after: Callable[[int], None]) -> None:
    """A second capture of the same structure finds its recipe."""
    full_after(100)
    engine = served(ladder=[1, 2, 4, 8])
    engine.release()
    known = set(stand_in.CachedGraph.compiled)
    engine = served(ladder=[1, 2, 4, 8])
    assert set(stand_in.CachedGraph.compiled) == known
    engine.release()


def test_what_errors_of_all_devices_mean_is_kept() -> None:
    """A graph whose weights moved says so; only what is the vendor's own is read from words."""
    moved = GraphReplayError(None, "weights moved", Reason.ADDRESS_CHANGED)
    assert meaning(moved) == (Reason.ADDRESS_CHANGED, False)
    assert meaning(StickyDeviceError("gone")) == (Reason.DEVICE_LOST, True)
    assert meaning(RuntimeError("vendor: device lost")) == (Reason.DEVICE_LOST, True)
    assert meaning(RuntimeError("vendor: out of memory")) == (Reason.CAPTURE_OUT_OF_MEMORY, False)
    assert meaning(RuntimeError("?")) == (Reason.CAPTURE_FAILED, False)
