"""The vote on a decode step of ranks that take each step together, under data-parallel attention.

Each rank says yes or no before it knows how many rows the others have, and all replay where all said yes. SGLang's own
yes goes by the kind of batch alone, so a rank may only take it back: it says no where its policy has the step of its
own rows eager, and then every rank runs eagerly. Where SGLang reduces the votes ranks can't part by that, whatever each
has for costs. Where it skips the gather (one attention rank, or ``SGLANG_SCHEDULER_SKIP_ALL_GATHER``) each keeps its
own vote, and all have rank 0's costs: only a policy that raises on one rank alone could part them there.
"""

from __future__ import annotations

from typing import Any

from kpolicy_sglang.dispatch import phase_of

__all__ = ["decode_vote", "decode_vote_0_5_16", "speak_for"]

_GRAPHS_OFF = "disable_cuda_graph"
_spoken_for: dict[str, Any] = {"model_runner": None}


def speak_for(model_runner: Any) -> None:
    """Vote for this model runner from now on; None for nobody, so that votes are SGLang's own.

    The functions that SGLang votes with aren't told which one they are asked for. A process has one of them besides
    those of drafts.
    """
    _spoken_for["model_runner"] = model_runner


def decode_vote(original: Any, **asked: Any) -> Any:
    """AROUND `_local_decode_cuda_graph_vote` of 0.5.23."""
    vote = original(**asked)
    return vote and not _takes_back(asked.get("local_batch"))


def decode_vote_0_5_16(original: Any, local_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `prepare_mlp_sync_batch_raw` of 0.5.16, which votes yes where graphs aren't off: they are for a no."""
    if kwargs.get(_GRAPHS_OFF) is False and _takes_back(local_batch):
        kwargs[_GRAPHS_OFF] = True
    return original(local_batch, *args, **kwargs)


def _takes_back(batch: Any) -> bool:
    """Whether the policy has this rank's decode step eager, where SGLang would replay a graph."""
    model_runner = _spoken_for["model_runner"]
    if model_runner is None or batch is None:
        return False
    phase = phase_of(model_runner.decode_cuda_graph_runner)
    if phase is None:
        return False
    try:
        return bool(batch.forward_mode.is_decode() and phase.wants_eager(batch.batch_size()))
    # SGLang's own vote goes on; the group takes whatever each of its ranks says.
    except Exception as error:  # noqa: BLE001
        phase.failures.note("the decode vote", error, then="SGLang's own vote is cast")
        return False
