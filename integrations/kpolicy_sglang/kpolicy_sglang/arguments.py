"""What SGLang made of its arguments, and which process this is, on either release."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

__all__ = [
    "attention_dp",
    "data_parallel_rank",
    "model_config",
    "note_own_sizes",
    "own_sizes",
    "rank",
    "resolved",
    "running_per_rank",
]

_OWN_SIZES = "_kpolicy_own_sizes"


def resolved(server_args: Any) -> Any:
    """The arguments with all that SGLang has decided so far; a live view.

    0.5.23 keeps what was given as it was, and declares what it resolves beside it.
    """
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


def model_config(server_args: Any) -> Any:
    """The model's config, which SGLang has read before it asks for sizes; None without arguments."""
    if server_args is None:
        return None
    try:
        from sglang.srt.arg_groups.overrides import model_config_of
    except ImportError:
        return server_args.get_model_config().hf_config
    return model_config_of(server_args).hf_config


def note_own_sizes(server_args: Any, phase: str, count: int) -> None:
    """Keep with the arguments, which go to another process, how many sizes SGLang would have captured itself.

    Both releases let others keep things there under a name with an underscore. Where one doesn't, it isn't known.
    """
    if server_args is not None:
        with suppress(AttributeError, TypeError):
            setattr(server_args, _OWN_SIZES, {**own_sizes(server_args), phase: count})


def own_sizes(server_args: Any) -> dict[str, int]:
    """How many sizes SGLang would have captured by phase, as far as it was asked."""
    return dict(getattr(server_args, _OWN_SIZES, None) or {})


def attention_dp(server_args: Any) -> int:
    """Ranks that share the requests of a replica and take each step together: data-parallel attention has several."""
    found = resolved(server_args)
    width = getattr(found, "attn_dp_size", None)
    if width is None:
        width = getattr(found, "dp_size", None) if getattr(found, "enable_dp_attention", False) else 1
    return max(int(width or 1), 1)


def running_per_rank(server_args: Any) -> int | None:
    """Most requests that may run on one rank; None where SGLang wasn't told."""
    most = getattr(resolved(server_args), "max_running_requests", None)
    return None if most is None else -(-int(most) // attention_dp(server_args))


def data_parallel_rank(model_runner: Any) -> int | None:
    """Which of several data-parallel ranks this is, replicas or those of attention; None where there is one."""
    args = resolved(model_runner.server_args)
    if attention_dp(args) > 1:
        return rank(model_runner, "attn_dp_rank")
    return rank(model_runner, "dp_rank") if (getattr(args, "dp_size", None) or 1) > 1 else None


def device_name(model_runner: Any) -> str:
    """What the device of a model runner calls itself; empty where its graph runners can't tell."""
    runners = (model_runner.decode_cuda_graph_runner, model_runner.prefill_cuda_graph_runner)
    ask = next((found for each in runners if (found := getattr(each, "device_module", None))), None)
    name = getattr(ask, "get_device_name", None)
    return str(name()) if name is not None else ""


def rank(model_runner: Any, name: str) -> int:
    """This process's rank of that name.

    ``attn_tp_rank`` is among those that run the same requests, ``dp_rank`` of replicas, ``attn_dp_rank`` of ranks of
    data-parallel attention.

    0.5.16 has them at the model runner, 0.5.23 in its context.
    """
    of = getattr(model_runner, "ps", model_runner)
    if not hasattr(of, name):
        try:
            from sglang.srt.runtime_context import get_parallel
        except ImportError:
            return 0
        of = get_parallel()
    return int(getattr(of, name, None) or 0)
