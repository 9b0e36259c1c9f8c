"""`vllm`: a replica of how vLLM 0.23.0 and 0.33.0 choose a batch's graph, in both of their model runners.

What it keeps, flaws included (docs/replicas.md has the list with sources; tests/oracle runs the real classes):

- FULL before PIECEWISE before nothing, one padded size each, with no cost in sight. Above the largest size all is
  eager: 512 tokens by default, so larger decode batches too.
- v1 knows a decode batch by its shape alone: every row of exactly 1 + k tokens. A prompt chunk of that length passes
  as a decode and replays a decode graph. v2 of 0.23 does the same; v2 of 0.33 asks whether rows are decodes.
- Rows of 1 + k tokens are the only decodes with graphs: a step with partial or no drafts leaves FULL.
- v1 and v2 of 0.23 round sizes to multiples of 1 + k, v1 only where decodes are FULL. Largest sizes off that grid, or
  `max_num_seqs` off the list, leave the largest decode batches without a graph.
- With `specialize_lora=False`, v1 captures no graph without adapters, so batches without adapters run eagerly.
- FULL with attention that can't be captured doesn't start; every other impossible mode is weakened.

Two things differ from the original on purpose. Where a caller forbids eager and the batch is above the largest size,
vLLM runs eagerly all the same and the replica raises `NoLegalModeError`. Batches with more active adapters than
``max_loras + 1``, which vLLM's scheduler never makes, have no graph here.
"""

from __future__ import annotations

from kpolicy.errors import ConfigError
from kpolicy.modes import Mode
from kpolicy.policies.vllm_policy import VllmPolicy
from kpolicy.policies.vllm_resolve import VllmMode, parse_vllm_mode
from kpolicy.policies.vllm_sizes import DraftSchedule, parse_drafts

__all__ = ["VllmPolicy", "vllm"]

VERSIONS = ("0.23", "0.33")
RUNNERS = ("v1", "v2")


def vllm(
    *,
    version: str = "0.33",
    runner: str | None = None,
    mode: str | VllmMode = VllmMode.FULL_AND_PIECEWISE,
    specialize_lora: bool = True,
    specialize_active_lora: bool = False,
    piecewise_split: bool = True,
    breakable: bool = False,
    varlen: bool = False,
    drafts: str | DraftSchedule = (),
) -> VllmPolicy:
    """The replica of one vLLM, as it is configured.

    Args:
        version: "0.23" or "0.33".
        runner: "v1" or "v2"; by default the one most models get: v1 in 0.23, v2 in 0.33.
        mode: vLLM's ``cudagraph_mode``.
        specialize_lora: vLLM's ``cudagraph_specialize_lora``.
        specialize_active_lora: vLLM's option of that name: graphs for powers of two of active adapters.
        piecewise_split: whether torch.compile splits attention out of the graph.
        breakable: breakable graphs, which make pieces without a split.
        varlen: variable-length decode graphs, which v2 of 0.33 captures under adaptive verification.
        drafts: draft tokens by batch size (dynamic speculative decoding in v2 of 0.33), as ``1-8:6/9-32:4``.

    Raises:
        ConfigError: an argument isn't one of those, or not of that runner.
    """
    runner = runner or ("v2" if str(version) == "0.33" else "v1")
    for name, value, allowed in (("version", str(version), VERSIONS), ("runner", runner, RUNNERS)):
        if value not in allowed:
            raise ConfigError(f"the vllm replica has no {name} {value!r}. Known: {', '.join(allowed)}.")
    strategy, schedule = parse_vllm_mode(mode), parse_drafts(drafts)
    if (varlen or schedule) and (runner, str(version)) != ("v2", "0.33"):
        raise ConfigError(
            f"runner {runner} of vLLM {version} has neither varlen nor drafts; both are of v2 in 0.33. Leave them out."
        )
    if varlen and strategy.decode is not Mode.FULL:
        raise ConfigError(f"varlen needs a mode with FULL graphs, not {strategy}. Configure FULL_AND_PIECEWISE.")
    return VllmPolicy(
        version=str(version),
        runner=runner,
        mode=strategy,
        specialize_lora=specialize_lora,
        specialize_active_lora=specialize_active_lora,
        piecewise_split=piecewise_split,
        breakable=breakable,
        varlen=varlen,
        drafts=schedule,
    )
