"""Sampling on the device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kpolicy.serving.sampling import gumbel_noise, sample  # noqa: E402


def test_a_requests_token_does_not_depend_on_its_batch() -> None:
    """A row alone, and the same row among others in any place, get the same token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 300, generator=generator)
    step = {
        "temperature": torch.rand(16, generator=generator), "seed": torch.arange(16) * 7919,
        "position": torch.arange(16) + 3,
    }  # fmt: skip
    together = sample(logits, step)
    order = torch.randperm(16, generator=generator)
    assert torch.equal(sample(logits[order], {name: each[order] for name, each in step.items()}), together[order])
    alone = [sample(logits[i : i + 1], {name: each[i : i + 1] for name, each in step.items()}) for i in range(16)]
    assert torch.equal(torch.cat(alone), together)


def test_zero_temperature_is_greedy() -> None:
    """Rows of temperature 0 take the largest logit, beside rows that don't, and so does a step without temperature."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    step = {"temperature": torch.tensor([0.0, 3.0, 0.0, 3.0]), "seed": torch.arange(4), "position": torch.arange(4)}
    found = sample(logits, step)
    assert torch.equal(found[::2], logits.argmax(-1)[::2])
    assert torch.equal(sample(logits, {}), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-39, 1e-45])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    """However cold, the likeliest token is taken; scaled logits would become infinite, and the first of them won."""
    logits = 30 * torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    step = {"temperature": torch.full((8,), temperature), "seed": torch.arange(8), "position": torch.arange(8)}
    assert torch.equal(sample(logits, step), logits.argmax(-1))


def test_samples_follow_the_softmax() -> None:
    """Over many positions, tokens come as often as softmax(logits / temperature) says."""
    logits, count = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0]), 40_000
    step = {
        "temperature": torch.full((count,), 0.8), "seed": torch.full((count,), 12345),
        "position": torch.arange(count),
    }  # fmt: skip
    found = torch.bincount(sample(logits.expand(count, -1), step), minlength=5) / count
    expected = (logits / 0.8).softmax(-1)
    # Five standard errors.
    assert ((found - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_noise_is_gumbel_and_differs_by_seed_position_and_token() -> None:
    """Mean and variance are those of the Gumbel distribution, and neighbours aren't correlated."""
    noise = gumbel_noise(torch.tensor([1, 2, 1, 1 + 2**40]), torch.tensor([5, 5, 6, 5]), 50_000)
    assert torch.isfinite(noise).all()
    assert (noise.mean(-1) - 0.5772).abs().max() < 0.03
    assert (noise.var(-1) - torch.pi**2 / 6).abs().max() < 0.06
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(4)).abs().max() < 0.02
    assert abs(torch.corrcoef(torch.stack([noise[0, 1:], noise[0, :-1]]))[0, 1]) < 0.02


def test_extreme_seeds_and_large_vocabularies_stay_finite_where_it_matters() -> None:
    """Negative and huge seeds sample a token of the vocabulary; the chosen one never has infinite noise."""
    step = {
        "temperature": torch.ones(3), "seed": torch.tensor([-1, 2**62, 0]),
        "position": torch.tensor([0, 2**40, 131071]),
    }  # fmt: skip
    tokens = sample(torch.zeros(3, 200_000), step)
    assert ((tokens >= 0) & (tokens < 200_000)).all()
    assert not torch.isposinf(gumbel_noise(step["seed"], step["position"], 200_000)).any()
