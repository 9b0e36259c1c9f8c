"""Why a batch ran as it did. One `Reason` a decision; docs/reasons.md has an entry for each.

A reason says why the mode was chosen or, where a batch leaves graph mode, what kept it from replaying.
`Basis` says what the decision took for granted, so that an answer given without a device never looks measured.
"""

from __future__ import annotations

from enum import Enum, Flag

__all__ = ["Basis", "Reason"]


class Reason(str, Enum):
    """Why: the value is what logs, counters and JSON carry; `text` is the sentence."""

    text: str

    def __new__(cls, value: str, text: str) -> Reason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member

    def __str__(self) -> str:
        return str(self.value)

    # A graph replays.
    GRAPH_FITS = "graph_fits", "a captured graph holds the batch, and the rule takes the first that does"
    CHEAPEST_MEASURED = "cheapest_measured", "this is the cheapest legal way by measured costs"
    CHEAPEST_ANALYTIC = (
        "cheapest_analytic",
        "this is the cheapest legal way by the analytic cost table; nothing was measured",
    )
    CHEAPEST_KERNEL_TABLES = (
        "cheapest_kernel_tables",
        "this is the cheapest legal way by kernel tables that their publisher measured, not on your device",
    )
    ONLY_LEGAL = "only_legal", "no other legal way was left"
    DECODES_KEEP_GRAPH = "decodes_keep_graph", "decode rows replay their FULL graph; prefill rows are split off"
    NEXT_MODE = "next_mode", "no graph of the preferred mode holds the batch; the next mode's does"

    # The batch runs eagerly by choice.
    POLICY_IS_EAGER = "policy_is_eager", "the policy replays nothing"
    EAGER_IS_CHEAPER = "eager_is_cheaper", "eager costs least by measured costs"
    EAGER_IS_CHEAPER_ANALYTIC = (
        "eager_is_cheaper_analytic",
        "eager costs least by the analytic cost table; nothing was measured",
    )
    EAGER_IS_CHEAPER_KERNEL_TABLES = (
        "eager_is_cheaper_kernel_tables",
        "eager costs least by kernel tables that their publisher measured, not on your device",
    )
    ABOVE_THRESHOLD = "above_threshold", "the batch has more tokens than the rule's threshold for graphs"
    EMPTY_BATCH = "empty_batch", "the batch has no rows"

    # Nothing captured holds the batch.
    NO_GRAPHS = "no_graphs", "nothing is captured"
    ABOVE_LARGEST_SIZE = "above_largest_size", "the batch has more tokens than the largest captured size"
    TOO_MANY_REQS = "too_many_reqs", "the batch has more requests than any captured graph of that size has rows"
    QUERY_LEN_NOT_CAPTURED = "query_len_not_captured", "no decode graph of this query length is captured"
    DECODES_NOT_UNIFORM = "decodes_not_uniform", "decode rows have different query lengths"
    MIXED_NOT_CAPTURED = "mixed_not_captured", "the batch has prefill rows and no captured graph takes them"
    LORA_NOT_CAPTURED = "lora_not_captured", "no graph is captured for this number of active LoRAs"
    SIZE_NOT_CAPTURED = "size_not_captured", "the size that the rule pads to isn't captured"
    EXACT_SIZE_NOT_CAPTURED = "exact_size_not_captured", "padding is off and this exact size isn't captured"
    PADDING_OVER_LIMIT = "padding_over_limit", "padding to the next captured size would pass the rule's limit"
    GRAPH_WITHDRAWN = (
        "graph_withdrawn",
        "the graphs that would hold the batch are over a budget, failed or were withdrawn",
    )

    # Attention, or a step's own rules, keep the batch from a graph.
    ATTENTION_NOT_CAPTURABLE = "attention_not_capturable", "attention can't be captured for such a batch"
    HOST_LENGTHS_FROZEN = "host_lengths_frozen", "attention reads lengths on the host, and a graph would freeze them"
    NO_PIECEWISE = "no_piecewise", "this model can't be cut into pieces at attention"
    MODE_FORBIDDEN = "mode_forbidden", "the modes that would fit are forbidden for this step"
    PHASE_DISABLED = "phase_disabled", "graphs are off for this phase"
    WIDTH_DIFFERS = "width_differs", "the speculative width differs from the captured one"
    INPUT_EMBEDDINGS = "input_embeddings", "rows bring embeddings in place of token ids"
    MULTIMODAL_INPUTS = "multimodal_inputs", "multimodal inputs aren't captured"
    LOGPROBS_WANTED = "logprobs_wanted", "prompt log-probabilities were asked for"
    HIDDEN_STATES_WANTED = "hidden_states_wanted", "more hidden states were asked for than were captured"
    PREFIX_TOO_LONG = "prefix_too_long", "the cached prefix is longer than the captured one"
    CONTEXT_TOO_LONG = "context_too_long", "the longest sequence is over the captured limit"
    ENCODER_LENGTHS_ZERO = "encoder_lengths_zero", "a row has no encoder tokens"
    TARGET_VERIFY = "target_verify", "the rows verify drafts, which prefill graphs don't take"
    BACKEND_REFUSED = "backend_refused", "the attention backend refused this batch"
    MICROBATCHES_DIFFER = "microbatches_differ", "only micro-batched steps were captured, and this step isn't one"
    EXPERT_STATISTICS = "expert_statistics", "expert statistics are on for this step"
    REPLACED_EMBEDDINGS = "replaced_embeddings", "some rows' token embeddings are replaced in this step"
    PREFIX_NOT_CAPTURED = "prefix_not_captured", "a row has a cached prefix, and the captured attention takes none"
    EAGER_MIXED_PREFERRED = "eager_mixed_preferred", "the attention backend asks for mixed batches to run eagerly"
    CONTEXT_PARALLEL_SHAPE = "context_parallel_shape", "the batch doesn't fit the context-parallel shape of the capture"

    # What ranks agreed on.
    RANKS_AGREED = "ranks_agreed", "the ranks agreed on this from their reduced votes"
    RANK_NEEDS_EAGER = "rank_needs_eager", "another rank can't replay or would end later, and ranks run the same mode"
    RANK_NEEDS_LESS = (
        "rank_needs_less",
        "another rank can't run the mode this rank would or would end later, and ranks run the same",
    )

    # Start-up.
    SUPPORT_UNIFORM_ONLY = "support_uniform_only", "attention captures uniform decode batches only"
    SUPPORT_SINGLE_ONLY = "support_single_only", "attention captures single-token decodes only"
    SUPPORT_NONE = "support_none", "attention can't be captured at all"
    SPECULATION_TOO_WIDE = "speculation_too_wide", "attention can't capture the speculative query length"

    # Capture, budgets and replay.
    BUDGET_GRAPHS = "budget_graphs", "the budget for graphs is spent"
    BUDGET_STREAMS = "budget_streams", "the budget for streams is spent"
    BUDGET_BYTES = "budget_bytes", "the budget for graph memory is spent"
    BUDGET_SECONDS = "budget_seconds", "the budget for capture time is spent"
    CAPTURE_FAILED = "capture_failed", "the device refused to capture"
    CAPTURE_OUT_OF_MEMORY = "capture_out_of_memory", "the device ran out of memory while capturing"
    CAPTURE_OUT_OF_STREAMS = "capture_out_of_streams", "the device ran out of streams while capturing"
    CAPTURE_ILLEGAL = "capture_illegal", "an operation ran while capturing that no graph can hold"
    CAPTURE_FORBIDDEN = "capture_forbidden", "nothing may be captured at this moment"
    BACKEND_MISSING = "backend_missing", "a library or kernel that the step needs isn't there for this device"
    REPLAY_FAILED = "replay_failed", "the replay failed before anything was launched"
    ADDRESS_CHANGED = "address_changed", "what the graph reads isn't where it was captured"
    DEVICE_LOST = "device_lost", "the device is lost to this process"
    GENERATION_EVICTED = "generation_evicted", "the graph went with its whole generation"


class Basis(Flag):
    """What a decision takes for granted."""

    NOTHING = 0
    LADDER_ASSUMED = 1
    """The planned ladder is taken as captured: no model was captured."""
    SUPPORT_ASSUMED = 2
    """Attention support is what was stated: no model was asked."""
    COSTS_ANALYTIC = 4
    """Costs come from the analytic table: nothing was measured on this device."""
    COSTS_KERNEL_TABLES = 8
    """Costs come from kernel tables that their publisher measured, not on this device; host costs are analytic."""

    @property
    def text(self) -> str:
        said = [text for flag, text in _BASIS_TEXT.items() if flag in self]
        if len(said) > 1:
            said = [f"{', '.join(said[:-1])} and {said[-1]}"]
        return f"assuming {said[0]}" if said else ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(flag.name).lower() for flag in _BASIS_TEXT if flag in self)


_BASIS_TEXT = {
    Basis.LADDER_ASSUMED: "the planned ladder captured",
    Basis.SUPPORT_ASSUMED: "the stated attention support",
    Basis.COSTS_ANALYTIC: "analytic costs",
    Basis.COSTS_KERNEL_TABLES: "costs of published kernel tables",
}
