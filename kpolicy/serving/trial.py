"""What a model does with the mark, found out by running it at load: `probe_layers` before there is KV, `verify` after.

A class says nowhere reliably whether its attention goes through transformers' interface, which windows its layers
have, or whether it reads the host. Running a few tokens shows it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from kpolicy.errors import KPolicyError, SupportError
from kpolicy.executors.step_model import RowLayout, StepContext, StepTensors
from kpolicy.serving.host_reads import HostReads
from kpolicy.serving.kv_cache import LayerSpec
from kpolicy.serving.marks import answering

if TYPE_CHECKING:
    from kpolicy.serving.hf_model import LoadedModel

__all__ = ["probe_layers", "verify"]

PROBE_TOKENS = 2
TRIAL_STEPS = (6, 2, 1)
"""A first chunk, a chunk with context, a decode."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Median relative L2 error of a row's logits against the class's own forward; half precision gets the other."""
HALF_TOLERANCE = 0.1


class _Probe:
    """Answers marked calls with zeros and notes what they took."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.specs: dict[int, LayerSpec] = {}

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int,
        softcap: float,
    ) -> torch.Tensor:  # fmt: skip
        index = getattr(module, "layer_idx", None)
        if index is None:
            raise SupportError(
                f"{type(module).__name__} calls the marked attention and has no layer_idx, so its KV can't be found; "
                "give its modules one."
            )
        self.calls[index] += 1
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        self.specs[index] = LayerSpec(
            num_heads, num_kv_heads, query.shape[2], value.shape[2], scale, window, softcap
        )  # fmt: skip
        return value.new_zeros(query.shape[0], num_heads, value.shape[2])


def probe_layers(model: Any, num_layers: int) -> list[LayerSpec]:
    """What each layer's marked call takes, first to last.

    Args:
        model: a causal LM of transformers whose attention implementation is the mark.
        num_layers: layers with attention, from the config.

    Raises:
        SupportError: a layer didn't call the marked function exactly once.
    """
    probe = _Probe()
    name = type(model).__name__
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(PROBE_TOKENS, device=device)[None]
    try:
        with torch.no_grad(), answering(probe):
            model.base_model(inputs_embeds=model.get_input_embeddings()(ids), position_ids=ids, use_cache=False)
    except KPolicyError:
        raise
    # A class that can't take the mark fails in its own way.
    except Exception as error:
        raise SupportError(f"{name} can't run with marked attention: {type(error).__name__}: {error}") from error
    wrong = {index: probe.calls[index] for index in range(num_layers) if probe.calls[index] != 1}
    if wrong or len(probe.calls) != num_layers:
        index, times = next(iter(wrong.items()), (max(probe.calls, default=0), 1))
        raise SupportError(
            f"attention of {name} can't be marked: each of its {num_layers} layers must call transformers' attention "
            f"interface once in a forward, and layer {index} did {times} times. Use a class whose attention goes "
            "through the interface."
        )
    return [probe.specs[index] for index in range(num_layers)]


def verify(model: LoadedModel) -> list[str]:
    """Hold the model over paged KV to its class's own forward, and give the host reads that it does in a step.

    The KV is zeros afterwards.

    Raises:
        SupportError: the logits differ.
    """
    num_tokens = min(sum(TRIAL_STEPS), model.max_model_len)
    ids = [(7 * i + 3) % model.vocab for i in range(num_tokens)]
    rows, start = [], 0
    reads: list[str] = []
    for length in TRIAL_STEPS:
        end = min(start + length, num_tokens)
        if end > start:
            with HostReads() as watched:
                rows.append(model.head(model.forward(_step(model, ids, start, end))))
            reads += watched.found
        start = end
    model.clear_kv()
    reference = model.reference_logits(ids).float()
    ours = torch.cat(rows).float()
    errors = (ours - reference).norm(dim=-1) / reference.norm(dim=-1).clamp(min=1e-6)
    error, allowed = float(errors.median()), TOLERANCE.get(model.dtype, HALF_TOLERANCE)
    if not error <= allowed:
        raise SupportError(
            f"{type(model.hf).__name__} over paged KV gives other logits than its own forward: relative error "
            f"{error:.2g}, allowed {allowed:g} for {model.dtype}. Its attention does something that kpolicy's kernels "
            "don't; it can't be served by this runner."
        )
    return sorted(set(reads))


def _step(model: LoadedModel, ids: list[int], start: int, end: int) -> StepContext:
    """One request's tokens from start to end, in the first blocks."""
    device = model.device

    def numbers(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    blocks = list(range(-(-end // model.block_size)))
    return StepContext(
        StepTensors(
            token_ids=numbers(ids[start:end]),
            positions=numbers(range(start, end)),
            slot_mapping=numbers(range(start, end)),
            block_table=numbers([blocks + [0] * (model.max_blocks - len(blocks))], torch.int32),
            kv_lens=numbers([end], torch.int32),
            query_starts=numbers([0, end - start], torch.int32),
        ),
        RowLayout(end - start, 0, (end - start,), (end,)),
    )
