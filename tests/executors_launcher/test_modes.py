"""Every mode and form of SPLIT on random steps, bit for bit against eager at the same padded shape."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.policies import OWN  # noqa: E402
from tests.executors_launcher.checker import Checker, batcher_steps, drafting_steps, load_family, opened  # noqa: E402

STEPS = {
    "llama": (420, 300),
    "mistral": (200, 160),
    "gemma2": (100, 80),
    "deepseek_v3": (200, 180),
    "qwen3_moe": (200, 200),
}


@pytest.mark.parametrize("family", sorted(STEPS))
def test_every_mode_is_bitwise_eager(family: str) -> None:
    """Logits, tokens and written KV of random steps in every mode equal eager's at the same padded shape.

    Half of the steps run as a policy decides, every built-in one in turn.
    """
    model = load_family(family)
    executor, registry = opened(model)
    keys = registry.captured()
    assert keys == tuple(record.key for record in registry.records()), "something wasn't captured"
    checker = Checker(executor, model)
    model.clear_kv()
    for _ in batcher_steps(checker, keys, STEPS[family][0], seed=1):
        pass
    model.clear_kv()
    for _ in drafting_steps(checker, keys, STEPS[family][1], seed=2):
        pass
    forms = {name.split(" ")[0] for name in checker.steps}
    assert forms == {"eager", "full", "piecewise", "split/in_turn", "split/beside", "split/decodes_beside"}
    kinds = {part for name in checker.steps for part in name.split(" ")[1:]}
    assert checker.policies.keys() >= OWN.keys()
    assert all(decided.total() >= 4 for decided in checker.policies.values()), "a policy decided hardly any step"
    assert sum(decided.total() for decided in checker.policies.values()) == sum(STEPS[family]) // 2
    wanted = {"q=1", "q=3", "piecewise", "eager"} | ({"mixed", "varlen"} if family != "deepseek_v3" else set())
    assert wanted <= kinds
    executor.release()
    assert sum(checker.steps.values()) == sum(STEPS[family])


def test_steps_are_at_least_two_thousand() -> None:
    """The suite's random steps count to what the project promises."""
    assert sum(map(sum, STEPS.values())) >= 2000
