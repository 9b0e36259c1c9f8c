"""Steps of every family recorded on the CPU and replayed with other inputs, against the same step run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.serving_models.families import FAMILIES

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.executors.cpu import Recorder  # noqa: E402
from kpolicy.executors.step_model import StepContext  # noqa: E402
from tests.serving_models.driver import Driver, Row  # noqa: E402


def _started(model: Any, lengths: list[int]) -> tuple[Driver, list[Any]]:
    """A driver whose requests have KV for all but their last five tokens."""
    driver = Driver(model)
    requests = [driver.request([(31 * i + 7 * j) % model.vocab for j in range(size)]) for i, size in enumerate(lengths)]
    for request in requests:
        if len(request.ids) > 5:
            driver.step([Row(request, len(request.ids) - 5, False)])
    return driver, requests


@pytest.mark.parametrize("uniform", [1, 2, None])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_replay_is_bitwise_the_eager_step(name: str, uniform: int | None, loaded: Callable[[str], Any]) -> None:
    """Hidden states, logits and KV of a replay equal eager's at the same padded shape, whatever it was recorded with.

    Recorded in a batch of other lengths; replayed as decodes, as verifications of two tokens, and as a mixed batch.
    """
    model = loaded(name)
    driver, requests = _started(model, [7, 40, 12, 25, 66])
    first, second = requests[:2], requests[2:]
    sizes = [uniform] * 3 if uniform else [1, 5, 3]
    rows = [Row(each, size, True) for each, size in zip(second, sizes, strict=True)]
    before = [Row(each, uniform or 1, True) for each in first]
    padded = (4 * uniform if uniform else 12, 4, uniform)
    static = driver.tensors(before, *padded)
    recorder = Recorder()
    recorder.begin()
    try:
        hidden = model.forward(StepContext(static, None, uniform))
        logits = model.head(hidden)
        graph = recorder.end()
    finally:
        recorder.abort()
    live = driver.tensors(rows, *padded)
    kv = [cache.clone() for cache in model.kv_caches()]
    eager = model.forward(StepContext(live, driver.layout(rows), uniform))
    expected = [eager, model.head(eager), *(cache[:-1].clone() for cache in model.kv_caches())]
    for cache, old in zip(model.kv_caches(), kv, strict=True):
        cache.copy_(old)
    for buffer, values in zip(static[:6], live[:6], strict=True):
        buffer.copy_(values)
    graph.replay()
    found = [hidden, logits, *(cache[:-1] for cache in model.kv_caches())]
    count = sum(sizes)
    for each, wanted in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(each[:count], wanted[:count])
    for each, wanted in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(each, wanted)


def test_a_recorded_sampler_draws_anew_from_its_inputs(loaded: Callable[[str], Any]) -> None:
    """A replay of temperature sampling gives the tokens of its own seeds and positions."""
    model = loaded("llama")
    logits = torch.zeros(4, 128)
    step = {"temperature": torch.ones(4), "seed": torch.arange(4), "position": torch.full((4,), 3)}
    recorder = Recorder()
    recorder.begin()
    try:
        tokens = model.sample(logits, step)
        graph = recorder.end()
    finally:
        recorder.abort()
    recorded = tokens.clone()
    step["position"] += 1
    graph.replay()
    assert torch.equal(tokens, model.sample(logits, step))
    assert not torch.equal(tokens, recorded)
