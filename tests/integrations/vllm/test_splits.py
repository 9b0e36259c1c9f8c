"""FlashAttention's bound on splits: for FULL graphs and their captures, and for no other step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Part
from kpolicy.settings import Settings
from kpolicy_vllm.splits import Splits


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
