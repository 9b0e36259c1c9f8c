"""Text from prompts: a local checkpoint with its tokenizer through the same Batcher, Engine and loop as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.scheduling.batching import Generation
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.serving.hf_model import LoadedModel
from kpolicy.serving.real_run import Serving, serve_model
from kpolicy.trace_run import RunResult

__all__ = ["Completed", "encode", "generate", "stop_tokens_of"]


@attrs.frozen
class Completed:
    """What was generated for one prompt.

    Args:
        prompt: its text.
        prompt_tokens: its length.
        token_ids: generated ids; an end of text is the last of them.
        text: these decoded as they go on from the prompt, special tokens left out.
        ended: whether an end of text came before the token limit.
    """

    prompt: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    ended: bool


class _Given:
    """Prompts as they were given (`kpolicy.trace_run.PromptSource`)."""

    def __init__(self, prompts: Sequence[Sequence[int]], vocab: int) -> None:
        self._prompts = prompts
        self.vocab = vocab

    def of(self, index: int, num_tokens: int, hash_ids: Sequence[int] = ()) -> Sequence[int]:  # noqa: ARG002
        return self._prompts[index]


def encode(model: LoadedModel, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts, as the tokenizer makes them; no chat template is applied.

    Raises:
        CheckpointError: the model has no tokenizer.
        ConfigError: a prompt is empty, or too long for the model or its KV.
    """
    if not prompts:
        raise ConfigError("there is no prompt; give at least one, such as --prompt 'Once upon a time'.")
    tokenizer = model.tokenizer
    encoded: list[list[int]] = []
    for number, prompt in enumerate(prompts, 1):
        ids = list(tokenizer(prompt)["input_ids"]) if prompt.strip() else []
        if not ids:
            raise ConfigError(f"prompt {number} is {prompt!r}, which is empty; give some text.")
        longest = max(ids)
        if longest >= model.vocab:
            raise ConfigError(
                f"prompt {number} has the token id {longest}, and the model's vocabulary ends at {model.vocab - 1}: "
                "the tokenizer is another model's. Put the files of one model together."
            )
        if len(ids) + max_tokens > model.max_model_len:
            raise ConfigError(
                f"prompt {number} has {len(ids)} tokens, with {max_tokens} to generate {len(ids) + max_tokens}; a "
                f"request may have {model.max_model_len}, for the model's positions and the KV. Shorten the prompt, "
                "lower --max-tokens, or raise --kv-tokens."
            )
        encoded.append(ids)
    return encoded


def stop_tokens_of(model: LoadedModel) -> frozenset[int]:
    """Ids that end a text, by the model's generation config, its config and its tokenizer."""
    sources = (getattr(model.hf, "generation_config", None), model.config, model.tokenizer)
    found: set[int] = set()
    for source in sources:
        value: Any = getattr(source, "eos_token_id", None)
        found |= {int(each) for each in (value if isinstance(value, (list, tuple)) else [value]) if each is not None}
    return frozenset(found)


def generate(
    engine: Engine,
    serving: Serving,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[list[Completed], RunResult]:
    """Generate for all prompts together, batched as they fit.

    Args:
        engine: from `Serving.engine`, captured.
        serving: a model with a tokenizer.
        prompts: their texts.
        max_tokens: most tokens to generate for each.
        temperature: 0 is greedy.
        seed: of sampling.

    Raises:
        CheckpointError: the model has no tokenizer.
        ConfigError: a prompt is empty or too long.
    """
    model = serving.model
    encoded = encode(model, prompts, max_tokens)
    stops = stop_tokens_of(model)
    requests = [TraceRequest(i, 0.0, len(ids), max_tokens) for i, ids in enumerate(encoded)]
    trace = Trace("prompts", "prompts", tuple(requests))
    ended: dict[int, list[int]] = {}

    def keep(request: Generation) -> bool:
        ended[request.index] = request.generated
        return True

    result, _ = serve_model(
        trace, engine, serving, _Given(encoded, model.vocab), temperature=temperature, seed=seed,
        stop_tokens=stops, check=keep,
    )  # fmt: skip
    done = [_completed(model, prompts[i], encoded[i], ended[i], stops) for i in sorted(ended)]
    return done, result


def _completed(
    model: LoadedModel, prompt: str, ids: Sequence[int], tokens: list[int], stops: frozenset[int]
) -> Completed:
    """The tokens up to the first end of text: steps that follow each other on the device run past it."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
    kept = tokens if end is None else tokens[:end]
    text = _behind(model.tokenizer, ids, kept)
    return Completed(prompt, len(ids), tuple(kept), text, end is not None)


def _behind(tokenizer: Any, ids: Sequence[int], more: Sequence[int]) -> str:
    """The text of more tokens behind others. Many tokenizers leave the first space of a text out."""
    before = tokenizer.decode(list(ids), skip_special_tokens=True)
    whole: str = tokenizer.decode([*ids, *more], skip_special_tokens=True)
    # Where the prompt ends within a character, that is told as a replacement, which the next token completes.
    for behind in (before, before.rstrip("\ufffd")):
        if whole.startswith(behind):
            return whole[len(behind) :]
    # The tokenizer's clean-up changed the prompt's last characters too.
    alone: str = tokenizer.decode(list(more), skip_special_tokens=True)
    return alone
