"""The reserved slot holds NaN when attention reads, also in padded launches, whose padding writes there first."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.decision import Decision, Launch  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Mode, Part, Rows  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.serving.rows import RowGroup  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_launcher.checker import (  # noqa: E402
    BLOCK_SIZE,
    EAGER,
    NUM_BLOCKS,
    Checker,
    leaking,
    load_family,
    opened,
)

DECODE = GraphKey(Part.FULL, 3, 3, query_len=1)
PIECES = GraphKey(Part.PIECEWISE, 8)
PADDED = {
    "full": Decision(Mode.FULL, (Launch(Rows.ALL, DECODE),), Reason.GRAPH_FITS),
    "piecewise": Decision(Mode.PIECEWISE, (Launch(Rows.ALL, PIECES),), Reason.GRAPH_FITS),
    "eager": Decision(Mode.EAGER, (Launch(Rows.ALL, None, padded_tokens=8),), Reason.POLICY_IS_EAGER),
}


def decode_of_two(checker: Checker) -> Any:
    """Two decode rows with KV, as a step."""
    sequences = Sequences(3, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, vocab=128)
    for _ in range(2):
        row = sequences.chunk(sequences.start(), 5)
        checker.executor.run(EAGER, sequences.inputs([row]))
        sequences.advance([row])
    return sequences.inputs([sequences.decode(each) for each in sequences.live])


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_leak_is_found_in_padded_launches(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that reads the reserved slot has NaN in each mode; without poison the same leak goes unseen.

    Eager at the same padded shape reads the same padding there, so comparing with it can't find such a leak.
    """
    model = load_family(family)
    for poisoned in (True, False):
        model.poison_padding(poisoned)
        executor, _ = opened(model, (DECODE, PIECES))
        model.clear_kv()
        checker = Checker(executor, model)
        inputs = decode_of_two(checker)
        for decision in PADDED.values():
            checker.step(decision, inputs)
        with monkeypatch.context() as patched:
            patched.setattr(RowGroup, "slots", leaking(RowGroup.slots, model.pad_slot))
            for decision in PADDED.values():
                if poisoned:
                    with pytest.raises(AssertionError, match="isn't finite"):
                        checker.step(decision, inputs)
                else:
                    checker.step(decision, inputs)
        executor.release()


def test_nan_is_there_after_a_padded_step() -> None:
    """The reserved slot of every cache is NaN after a replay whose padding wrote there."""
    model = load_family("llama")
    executor, _ = opened(model, (DECODE, PIECES))
    checker = Checker(executor, model)
    inputs = decode_of_two(checker)
    for decision in PADDED.values():
        for cache in model.kv_caches():
            cache[model.pad_slot] = 0.0
        executor.run(decision, inputs)
        assert all(torch.isnan(cache[model.pad_slot]).all() for cache in model.kv_caches())
    executor.release()


def test_the_random_steps_are_poisoned() -> None:
    """Models that random steps run on put NaN there, and say so."""
    assert load_family("deepseek_v2").poisons_padding
    assert load_family("gpt2").poisons_padding
