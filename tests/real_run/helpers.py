"""A tiny model's config, what it serves, and how its tokens are held to transformers'."""

from __future__ import annotations

import copy
from typing import Any

from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.settings import Settings

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SETTINGS = Settings(max_num_reqs=4, max_num_tokens=16)
LADDER = CaptureSizes((1, 2, 4), (8, 16), (4, 8, 16))


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    """A trace of (arrival in s, prompt tokens, tokens to generate)."""
    return Trace("drawn", "drawn", tuple(TraceRequest(i, *each) for i, each in enumerate(requests)))


def some(num_reqs: int = 8) -> Trace:
    """Requests of 1 to 23 prompt tokens and 1 to 9 to generate, that come while others run."""
    return trace_of(*((0.001 * i, 1 + 7 * i % 23, 1 + 5 * i % 9) for i in range(num_reqs)))


def eager_error(model: Any, prompt: list[int], generated: list[int]) -> float:
    """EAGER's largest logit error over a sequence, the prompt as one chunk and then decodes, against float64.

    The model's KV is overwritten.
    """
    import torch

    from kpolicy.serving.marks import own_forward
    from tests.serving_models.driver import Driver, Row

    double = copy.deepcopy(model.hf).double()
    with torch.no_grad(), own_forward(double):
        reference = double(input_ids=torch.tensor([[*prompt, *generated]]), use_cache=False).logits[0]
    driver = Driver(model)
    request = driver.request([*prompt, *generated])
    found = driver.step([Row(request, len(prompt), False)], captured=False)
    for _ in generated:
        found += driver.step([Row(request, 1, True)], captured=False, uniform=1)
    return float((torch.cat(found).double() - reference).abs().max())


def right(model: Any, prompt: list[int], generated: list[int]) -> bool:
    """Whether the tokens are those of transformers' generate; one may differ where the reference itself is undecided.

    Teacher-forced: after a token that differs the reference goes on from ours. Undecided is a margin of at most twice
    EAGER's largest logit error, as it is measured on this very sequence.
    """
    if generated == model.generate_reference(prompt, len(generated)):
        return True
    import torch

    logits = model.reference_logits([*prompt, *generated])[len(prompt) - 1 : -1]
    taken = logits[torch.arange(len(generated)), torch.tensor(generated)]
    allowed = 2 * eager_error(model, prompt, generated)
    return bool((logits.max(-1).values - taken <= allowed).all())
