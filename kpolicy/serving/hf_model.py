"""`LoadedModel`: a causal LM of transformers, unmodified, as a `StepModel` over a paged KV cache of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import torch

from kpolicy.attention import AttentionSupport
from kpolicy.attention.fields import Fields, identity, read_config
from kpolicy.errors import SupportError
from kpolicy.executors.segments import BreakingStep
from kpolicy.executors.step_model import StepContext, current_step, running
from kpolicy.serving.checkpoint import load_tokenizer
from kpolicy.serving.experts import EXPERTS_NAME, THEIR_NAME, takes_ours
from kpolicy.serving.head import Head
from kpolicy.serving.kv_cache import LatentLayer, PagedLayer
from kpolicy.serving.marks import answering, own_forward, take_latent
from kpolicy.serving.sampling import sample
from kpolicy.serving.unmarked import watching

__all__ = ["KvSize", "LoadedModel"]


@attrs.frozen
class KvSize:
    """How much KV there is, and for how long requests.

    Args:
        num_blocks: blocks in all.
        block_size: tokens in a block.
        max_model_len: tokens of the longest request, prompt and output together.
        max_num_reqs: requests in a step, at most.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_reqs: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)


_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
"""Names that configs have for experts of a layer, and for those that a token goes through"""


class LoadedModel:
    """A model whose steps can be captured (`StepModel`), and what a runner asks of it besides.

    `forward` may run on several threads at once, each with a step of its own; `generate_reference` and
    `reference_logits` may not run beside it. Made by `kpolicy.serving.load.load`.

    Attributes:
        hf: the model of transformers.
        config: its config.
        layers: each layer's cache, which is also its marked call.
    """

    greedy_in_graphs = True
    """Greedy sampling is one operator, which a graph can hold"""

    def __init__(
        self, hf: Any, layers: Sequence[PagedLayer | LatentLayer], support: AttentionSupport, kv: KvSize,
        folder: Path | None,
    ) -> None:  # fmt: skip
        self.hf = hf
        self.config = hf.config
        self.layers = tuple(layers)
        self.kv = kv
        self.folder = folder
        self._support = support
        self._base = hf.base_model
        self._embed = hf.get_input_embeddings()
        self._head = Head(hf)
        self._tokenizer: Any = None
        embedding: torch.Tensor = self._embed.weight
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype

    def __repr__(self) -> str:
        return (
            f"<LoadedModel {type(self.hf).__name__}, {self.num_params:,} parameters, {self.dtype} on {self.device}, "
            f"{self.num_blocks} blocks of {self.block_size}>"
        )

    @property
    def full_name(self) -> str:
        """The architecture and its size."""
        return f"{type(self.hf).__name__} of {self.num_params / 1e6:.1f} M parameters, {str(self.dtype)[6:]}"

    @property
    def model_shape(self) -> dict[str, int | str]:
        """What tells it from models of its `full_name`, of what its config and its first layer say."""
        spec, fields = self.layers[0].spec, Fields(read_config(self.config))
        rank, experts = fields.get("kv_lora_rank"), fields.get(*_EXPERTS)
        found = {
            **identity(self.config), "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim, "latent_rank": rank,
            "intermediate_size": fields.get("intermediate_size"), "experts": experts,
            "experts_per_token": fields.get(*_CHOSEN), "attention_kernels": self.layers[0].kernels.name,
            "expert_kernels": experts and (EXPERTS_NAME if takes_ours(self.hf) else THEIR_NAME),
            "latent_prompts": getattr(self.layers[0].kernels, "latent_prompts", None) if rank else None,
        }  # fmt: skip
        return {name: value for name, value in found.items() if type(value) in (int, str)}

    @property
    def support(self) -> AttentionSupport:
        return self._support

    @property
    def vocab(self) -> int:
        size: int = self.config.vocab_size
        return size

    @property
    def max_blocks(self) -> int:
        return self.kv.max_blocks

    @property
    def num_slots(self) -> int:
        return self.kv.num_slots

    @property
    def pad_slot(self) -> int:
        return self.kv.num_slots

    @property
    def num_blocks(self) -> int:
        return self.kv.num_blocks

    @property
    def block_size(self) -> int:
        return self.kv.block_size

    @property
    def max_model_len(self) -> int:
        return self.kv.max_model_len

    @property
    def max_num_reqs(self) -> int:
        return self.kv.max_num_reqs

    @property
    def num_params(self) -> int:
        """Parameters; tied ones count once."""
        return sum(each.numel() for each in self.hf.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters."""
        return sum(each.numel() * each.element_size() for each in self.hf.parameters())

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV, the reserved slot included."""
        return sum(each.numel() * each.element_size() for each in self.kv_caches())

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that a token takes, over all layers."""
        return self.kv_bytes // (self.num_slots + 1)

    @property
    def tokenizer(self) -> Any:
        """The folder's tokenizer, read at first use.

        Raises:
            CheckpointError: there is none, or it can't be read.
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder, type(self.hf).__name__)
        return self._tokenizer

    def forward(self, step: StepContext) -> torch.Tensor:
        # Embedded here, because some classes look for padding ids in token ids, on the host.
        with torch.no_grad(), running(step), answering(self):
            embedded = self._embed(step.tensors.token_ids[None])
            outputs = self._base(
                inputs_embeds=embedded, position_ids=step.tensors.positions[None], use_cache=False, **step.tensors.extra
            )
        hidden: torch.Tensor = outputs.last_hidden_state
        return hidden[0]

    def watching(self, step: BreakingStep) -> AbstractContextManager[None]:
        """Find attention that runs unmarked while a PIECEWISE graph is captured; see `kpolicy.serving.unmarked`."""
        return watching(self, step)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int,
        softcap: float,
    ) -> torch.Tensor:  # fmt: skip
        """Answer one marked call of the running forward, through the break mark."""
        layer = self.layers[module.layer_idx]
        spec = layer.spec
        if (scale, window, softcap) != (spec.scale, spec.window, spec.softcap):
            raise SupportError(
                f"attention of layer {module.layer_idx} came with scale, window and softcap "
                f"{(scale, window, softcap)} and had {(spec.scale, spec.window, spec.softcap)} when the model was "
                "loaded; only attention whose parameters stay the same can be captured."
            )
        if isinstance(layer, LatentLayer):
            # Every head has the same roped key, at the end of its expanded one.
            return current_step().attention(layer, query, take_latent(), key[:, 0, -layer.rope_dim :])
        return current_step().attention(layer, query, key, value)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._head(hidden)

    def sample(self, logits: torch.Tensor, step: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return sample(logits, step)

    def kv_caches(self) -> Sequence[torch.Tensor]:
        return [cache for layer in self.layers for cache in layer.caches]

    def kv_at(self, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every KV tensor, seen so that an index gives rows of it, and the rows that hold those slots."""
        return [each for layer in self.layers for each in layer.at(slots)]

    def give_back(self) -> None:
        """Free what kernels keep for steps to come, such as workspaces; weights and KV stay."""
        for kernels in {id(layer.kernels): layer.kernels for layer in self.layers}.values():
            getattr(kernels, "give_back", int)()

    def static_tensors(self) -> dict[str, torch.Tensor]:
        """Weights, buffers and KV by name: what a graph reads besides its inputs, and where a check looks for it."""
        named = {**dict(self.hf.named_parameters()), **dict(self.hf.named_buffers())}
        for index, layer in enumerate(self.layers):
            named |= {f"KV {part} of layer {index}": cache for part, cache in enumerate(layer.caches)}
        return named

    @property
    def poisons_padding(self) -> bool:
        """Whether the reserved slot holds NaN whenever attention reads; see `poison_padding`."""
        return all(layer.poisons for layer in self.layers)

    def poison_padding(self, on: bool = True) -> None:
        """Let every attention call put NaN into the reserved slot right after its KV write, or no longer.

        A graph keeps what was chosen when it was captured, so choose before capture. Of halves that run beside each
        other one may write the slot between the other's NaN and its reads: what runs alone is what it finds surely.
        """
        for layer in self.layers:
            layer.poisons = on

    def poison_pad_slot(self) -> None:
        """Fill the reserved slot with NaN, until padding writes to it."""
        for cache in self.kv_caches():
            cache[self.pad_slot] = float("nan")

    def kv_untouched(self, slots: range) -> bool:
        """Whether nothing was written to those slots: all of it is zero, as no KV of a model is."""
        return not any(bool(cache[slots.start : slots.stop].any()) for cache in self.kv_caches())

    def clear_kv(self, slots: range | None = None) -> None:
        """Fill KV with zeros: all of it, or that of those slots."""
        for cache in self.kv_caches():
            (cache if slots is None else cache[slots.start : slots.stop]).zero_()

    def release(self) -> None:
        for layer in self.layers:
            layer.caches = ()

    def generate_reference(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens by transformers' own `generate` and attention, with no code of ours.

        Args:
            prompt_ids: the prompt.
            num_tokens: how many, an end-of-text token or not.
        """
        import transformers

        settings: Any = transformers.GenerationConfig
        ids = torch.tensor([list(prompt_ids)], device=self.device)
        own = self.hf.generation_config
        # Settings left out are filled in from the model's, so an end of text would come back.
        self.hf.generation_config = settings(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, use_cache=True)
        try:
            with torch.no_grad(), own_forward(self.hf):
                tokens = self.hf.generate(ids, attention_mask=torch.ones_like(ids))
        finally:
            self.hf.generation_config = own
        new: list[int] = tokens[0, ids.shape[1] :].tolist()
        return new

    def reference_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[num_tokens, vocab] of transformers' own forward and attention over a whole sequence."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        with torch.no_grad(), own_forward(self.hf):
            logits: torch.Tensor = self.hf(input_ids=ids, use_cache=False).logits
        return logits[0]
