"""The hooks on what SGLang captures: which sizes, and the largest that it sets memory aside for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kpolicy.errors import KPolicyError
from kpolicy_sglang import ladder
from kpolicy_sglang.arguments import model_config, note_own_sizes, resolved, running_per_rank
from kpolicy_sglang.config import Config
from kpolicy_sglang.hooks import configured, deployment, fail, note_deployment, own_largest, refusal
from kpolicy_sglang.phase import DECODE, PREFILL

__all__ = ["decode_limit", "decode_sizes", "decode_sizes_0_5_16", "prefill_sizes", "prefill_sizes_0_5_16"]

_DECODE_LIMIT = ("decode", "max_bs")


def decode_limit(original: Any, server_args: Any, decode_config: Any, gpu_mem: Any) -> None:
    """AROUND `expand_multimodal_decode_graph_to_running_limit` of 0.5.23, the last that sets the largest decode size.

    What it is then is what SGLang sets memory aside by, and what its other parts take for the largest graph.
    """
    original(server_args, decode_config, gpu_mem)
    note_deployment(server_args, decode_config.max_bs)
    on_cpu = getattr(resolved(server_args), "device", None) == "cpu"
    if on_cpu or decode_config.bs is not None or decode_config.max_bs is None:
        return
    sizes = decode_sizes(lambda *_: [], server_args, decode_config.max_bs)
    if sizes:
        decode_config.max_bs = sizes[-1]


def decode_sizes(original: Any, server_args: Any, max_bs: int) -> list[int]:
    """AROUND `generate_decode_cuda_graph_batch_sizes`, which 0.5.23 asks with the largest size that `decode_limit` set.

    Sizes up to SGLang's own largest are those of its list for that one: its list for ours has 28 more.
    """
    max_bs = own_largest(server_args) or max_bs
    stock: list[int] = original(server_args, max_bs)
    config = configured()
    if config is None or refusal(server_args) or resolved(server_args).disable_cuda_graph_padding:
        return stock
    most = running_per_rank(server_args)
    if _DECODE_LIMIT in getattr(server_args, "_cuda_graph_config_locked", ()):
        most = max_bs if most is None else min(most, max_bs)
    # Of its list SGLang leaves out what can't be needed once it knows how many requests may run.
    note_own_sizes(server_args, DECODE, sum(most is None or size <= most for size in stock))
    return _sizes(stock, lambda: ladder.decode_sizes(config, stock, most, max_bs, model=_model(config, server_args)))


def decode_sizes_0_5_16(original: Any, server_args: Any, max_bs: int) -> list[int]:
    """AROUND `ServerArgs._generate_decode_cuda_graph_batch_sizes`."""
    sizes = decode_sizes(original, server_args, max_bs)
    if configured() is not None and sizes:
        # What SGLang sets memory aside by.
        server_args.cuda_graph_config.decode.max_bs = sizes[-1]
    return sizes


def prefill_sizes(original: Any, max_bs: int) -> list[int]:
    """AROUND `generate_prefill_cuda_graph_batch_sizes`."""
    return _prefill_sizes(original, max_bs, deployment())


def prefill_sizes_0_5_16(original: Any, server_args: Any, max_bs: int) -> list[int]:
    """AROUND `ServerArgs._generate_prefill_cuda_graph_batch_sizes`."""
    # The hook on its rule for MLA models is why they have such graphs at all.
    graphs = getattr(server_args, "cuda_graph_config", None)
    breakable = getattr(getattr(graphs, "prefill", None), "backend", None) == "breakable"
    few = breakable and bool(server_args.use_mla_backend())
    return _prefill_sizes(lambda most: original(server_args, most), max_bs, server_args, few=few)


def _prefill_sizes(
    original: Callable[[int], list[int]], max_bs: int, server_args: Any, *, few: bool = False
) -> list[int]:
    config = configured()
    stock: list[int] = original(max_bs)
    if config is None or (server_args is not None and refusal(server_args)):
        return stock
    note_own_sizes(server_args, PREFILL, 0 if few else len(stock))
    return _sizes(
        stock, lambda: ladder.prefill_sizes(config, stock, max_bs, few=few, model=_model(config, server_args))
    )


def _model(config: Config, server_args: Any) -> Any:
    """What a plan is held to. 0.5.23 asks for prompts' sizes before there are arguments where it rounds for DeepEP."""
    return None if config.plan is None else model_config(server_args)


def _sizes(stock: list[int], wanted: Callable[[], tuple[int, ...]]) -> list[int]:
    try:
        return list(wanted())
    except (KPolicyError, OSError) as error:
        fail(f"sizes can't be had: {error} SGLang's own sizes are captured.", once=True)
        return stock
