"""`sglang`: what SGLang 0.5.23 does, kept with its flaws.

Each phase has one kind of graph, set at start-up: `decode` is FULL, and `prefill` (any batch with a prefill row, mixed
chunks included) is breakable, which is PIECEWISE here, or FULL, or none. Per batch the only question is yes or no.

Flaws kept:

- There is no second graph mode: every "no" is EAGER, also where the other phase's graph would have held the batch.
- Decode padding has no limit: 5 rows run as 8, and over a sparse list 33 run as 256.
- The prefill limit is the constant 2x: it refuses 1 token with the default sizes, however small the loss.
- A mixed batch drops its decode rows' FULL graph.
- LoRA prefill is always eager under data parallelism, and one idle rank makes every rank's prefill eager.
- So does one rank with a single decode row: as an extend of 1 token the 2x limit refuses it.
- With LoRA on and a backend without static prefill metadata, prefill is eager for batches without adapters too.

Not kept: in SGLang a rank checks embeddings, widths and encoder lengths after the vote, so ranks could part there;
kpolicy's ranks vote on them too. Not modelled: compact ragged verify, PD-multiplex streams, attention variants of
sparse models, and MegaMoE's exception for idle ranks.

Sources (sglang 0.5.23, under srt/): model_executor/runner/{prefill,decode}_cuda_graph_runner.py,
arg_groups/{cuda_graph,memory}_hook.py, managers/scheduler_components/dp_attn.py.
"""

from __future__ import annotations

import attrs

from kpolicy.attention.support import Claims
from kpolicy.decision import Decision
from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.policies.base import Downgrade, PolicyContext, admits
from kpolicy.policies.graphs import MIXED, PIECES, Graphs, Kind, decode_kind, refusal
from kpolicy.policies.rule import Choose, CompiledRule, by_lora_case, decide_by_rule, downgrade, smaller
from kpolicy.policies.sglang_rule import MOST_PADDING, PREFIX_VARIANTS, SglangRanks, SglangRule, prefix_variant
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape

__all__ = ["SglangPolicy", "decode_sizes", "prefill_sizes", "tier_max_reqs"]

MLA_MOST_TOKENS = 8192
"""Prefill graphs of MLA models end here by default (memory_hook.py)."""
SLOT_TOKENS = 512
"""A FULL prefill graph has a request slot for each so many tokens of the chunk."""
_TIERS = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512))


def tier_max_reqs(gpu_memory_gib: int, tp: int) -> int:
    """Largest decode graph by GPU memory, in requests; more from four-way tensor parallelism on (memory_hook.py)."""
    for below_gib, reqs, reqs_tp4 in _TIERS:
        if gpu_memory_gib < below_gib:
            return reqs_tp4 if tp >= 4 else reqs
    return 512


def decode_sizes(max_reqs: int, *, speculative: bool = False, padding: bool = True) -> tuple[int, ...]:
    """SGLang's default decode sizes in requests, up to and with `max_reqs` (cuda_graph_hook.py)."""
    if not padding:
        return tuple(range(1, max_reqs + 1))
    if speculative:
        steps = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, max_reqs + 1, 16)]
    else:
        steps = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_reqs + 1, 32)]
    sizes = smaller(steps, max_reqs)
    return sizes if sizes and sizes[-1] == max_reqs else (*sizes, max_reqs)


def prefill_sizes(max_tokens: int) -> tuple[int, ...]:
    """SGLang's default prefill sizes in tokens: those of its list up to `max_tokens`, which isn't added itself."""
    steps = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, max_tokens + 1, 512),
    ]
    return smaller(steps, max_tokens)


@attrs.frozen(kw_only=True)
class SglangPolicy:
    """SGLang's rule; the arguments are its start-up options, each with its default.

    Args:
        decode: ``full`` or ``disabled``.
        prefill: ``breakable``, ``full`` or ``disabled``.
        padding: off means every batch size is captured and only exact sizes replay.
        gpu_memory_gib: the memory tier that sets the largest default decode graph.
        tp: tensor-parallel size, for the same.
        mla: an MLA model, whose prefill graphs end at 8,192 tokens.
        align: decode rows times width must be its multiple, and prefill sizes are rounded up to it.
        request_slots: request rows of a FULL prefill graph; 0 stands for the largest chunk / 512.
        prefix_chunks: FULL prefill graphs come with variants for cached prefixes of up to 16 chunks.
        metadata_reqs: most requests that captured prefill metadata has room for; 0 for no bound.
        max_seq_len: prefill graphs serve rows up to this KV length; 0 for no bound.
        hidden_states: hidden states captured by prefill graphs: 0 none, 1 the last, 2 all.
        captured_tail: the LM head is captured with the body (neither backend of 0.5.23 does).
        multimodal_eager: the model is one whose multimodal prefill stays eager.
        eager_mixed: the attention backend asks for eager mixed batches.
        mha_companion: breakable capture off CUDA, with layers whose attention captures no cached prefix.
        prefill_lora: the LoRA backend has static metadata for prefill graphs.
        two_batch_overlap: decode graphs are captured for overlapped halves only.

    Raises:
        ConfigError: an option has a value that SGLang doesn't take.
    """

    decode: str = "full"
    prefill: str = "breakable"
    padding: bool = True
    gpu_memory_gib: int = 192
    tp: int = 1
    mla: bool = False
    align: int = 1
    request_slots: int = 0
    prefix_chunks: bool = False
    metadata_reqs: int = 0
    max_seq_len: int = 0
    hidden_states: int = 0
    captured_tail: bool = False
    multimodal_eager: bool = False
    eager_mixed: bool = False
    mha_companion: bool = False
    prefill_lora: bool = True
    two_batch_overlap: bool = False

    name = "sglang"
    summary = "replica of SGLang 0.5.23: FULL decode graphs, breakable (PIECEWISE) prefill graphs, else eager"
    reads_costs = False
    most_padding = MOST_PADDING
    """What sizes are planned by: a larger prefill graph isn't replayed (`sglang_rule`)."""

    def __attrs_post_init__(self) -> None:
        for phase, value, allowed in (
            ("decode", self.decode, ("full", "disabled")),
            ("prefill", self.prefill, ("breakable", "full", "disabled")),
        ):
            if value not in allowed:
                raise UnknownNameError(f"sglang {phase} graph", value, allowed)
        for name in ("align", "tp", "gpu_memory_gib"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"sglang: {name} is {value!r}; it is a whole number of at least 1.")

    def sizes(self, settings: Settings) -> CaptureSizes:
        q = settings.query_len
        most = min(tier_max_reqs(self.gpu_memory_gib, self.tp), settings.max_num_reqs, settings.max_num_tokens // q)
        decode = decode_sizes(most, speculative=q > 1, padding=self.padding)
        tokens = min(settings.max_num_tokens, MLA_MOST_TOKENS) if self.mla else settings.max_num_tokens
        align = self.align
        prefill = sorted({-(-size // align) * align for size in prefill_sizes(tokens)})
        return CaptureSizes(
            tuple(size * q for size in decode if size * q % align == 0),
            smaller(prefill, settings.max_num_tokens),
            smaller(prefill, settings.max_num_tokens),
        )

    def plan(self, sizes: CaptureSizes, claims: Claims, settings: Settings) -> tuple[GraphKey, ...]:
        sizes.check(settings)
        q = settings.query_len
        keys: list[GraphKey] = []
        if self.decode == "full":
            decodes = [GraphKey(Part.FULL, size, size // q, query_len=q) for size in sizes.decode]
            # Dense LoRA backends record a second graph a size, for batches without adapters.
            keys += by_lora_case(decodes, settings)
        prefills: list[GraphKey] = []
        if self.prefill == "breakable":
            prefills = [GraphKey(Part.PIECEWISE, size) for size in sizes.piecewise]
        elif self.prefill == "full":
            slots = self.slots(settings)
            variants = ("", *map(prefix_variant, PREFIX_VARIANTS)) if self.prefix_chunks else ("",)
            prefills = [GraphKey(Part.FULL, size, slots, variant=name) for size in sizes.mixed for name in variants]
        if not settings.max_loras:
            keys += prefills
        elif self.prefill_lora:
            # One graph a bucket, with the LoRA kernels in it, for batches with and without adapters.
            keys += [attrs.evolve(key, lora_case=settings.max_loras) for key in prefills]
        return tuple(key for key in keys if admits(claims, key))

    def slots(self, settings: Settings) -> int:
        """Request rows of a FULL prefill graph."""
        return self.request_slots or max(1, settings.max_num_tokens // SLOT_TOKENS)

    def prefill_kind(self) -> Kind | None:
        """The list that batches with prefill rows look in; None where prefill graphs are off."""
        return {"breakable": PIECES, "full": MIXED}.get(self.prefill)

    def resolve(self, claims: Claims, settings: Settings) -> tuple[Downgrade, ...]:
        q = settings.query_len
        found = []
        if self.decode == "full" and refusal(decode_kind(q), claims):
            found.append(downgrade(f"decodes of {q} tokens", "full", Mode.EAGER.value, decode_kind(q), claims))
        kind = self.prefill_kind()
        if kind is not None and refusal(kind, claims):
            found.append(downgrade("batches with prefill", self.prefill, Mode.EAGER.value, kind, claims))
        return tuple(found)

    def bind(self, graphs: Graphs) -> Choose:
        """The rule over these graphs."""
        return self.rule(graphs)

    def rule(self, graphs: Graphs) -> SglangRule:
        """The rule over these graphs, with its parts."""
        settings = graphs.settings
        return SglangRule(
            graphs,
            width=settings.query_len,
            exact=not self.padding,
            decode_off=self.decode == "disabled",
            overlap=self.two_batch_overlap,
            prefill=self.prefill_kind(),
            slots=self.slots(settings) if self.prefill == "full" else 0,
            prefix_chunk=max(1, settings.max_num_tokens // self.slots(settings)) if self.prefix_chunks else 0,
            metadata_reqs=self.metadata_reqs,
            max_seq_len=self.max_seq_len,
            hidden_states=self.hidden_states,
            captured_tail=self.captured_tail,
            multimodal_eager=self.multimodal_eager,
            eager_mixed=self.eager_mixed,
            no_prefix=self.mha_companion and self.prefill == "breakable",
            lora=settings.max_loras > 0,
            lora_eager=settings.max_loras > 0 and not self.prefill_lora,
        )

    def decide(self, shape: BatchShape, context: PolicyContext) -> Decision:
        return decide_by_rule(self, shape, context)

    def compile(self, context: PolicyContext) -> CompiledRule:
        return CompiledRule(self, context, lambda graphs, _: SglangRanks(self.rule(graphs)))
