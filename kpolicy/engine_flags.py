"""Capture sizes as the flags or files that serving engines take, and where an engine will change them.

Sources: vLLM 0.23.0 and 0.33.0 (``config/vllm.py``, ``engine/arg_utils.py``) and SGLang 0.5.23
(``srt/arg_groups/cuda_graph_hook.py``), whose own parsers read what is written here in tests/oracle, as vLLM 0.23's
does what is for vllm-ascend 0.23.0, whose ``platform.py`` and ``utils.py`` are asked too; TensorRT-LLM's
``llmapi/llm_args.py`` from reading.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kpolicy.errors import ConfigError, LadderError, UnknownNameError
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode
from kpolicy.policies import get_policy
from kpolicy.policies.vllm_sizes import LARGEST_DEFAULT, aligned
from kpolicy.settings import Settings

__all__ = ["ENGINES", "Emitted", "emit", "engine_of"]


@attrs.frozen(kw_only=True)
class Emitted:
    """What to give an engine.

    Args:
        engine: the engine.
        arguments: command-line arguments, one an item; empty where the engine takes a file.
        file: the text of that file; empty where arguments do.
        how: what to do with it.
        warnings: where the engine will change the sizes, or not use them as one might think.
    """

    engine: str
    arguments: tuple[str, ...] = ()
    file: str = ""
    how: str
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What to paste or to save."""
        return self.file or shlex.join(self.arguments)


def emit(engine: str, sizes: CaptureSizes, settings: Settings, *, policy: str | None = None) -> Emitted:
    """The sizes as an engine takes them.

    Args:
        engine: a name of `ENGINES`.
        sizes: the capture sizes, in tokens.
        settings: the deployment's limits.
        policy: the engine's replica with the arguments it was planned for, such as ``vllm:version=0.23``; its defaults
            without.

    Raises:
        UnknownNameError: no such engine.
        ConfigError: there is nothing to capture, or the engine can't take the sizes.
    """
    if engine not in _WRITERS:
        raise UnknownNameError("engine to emit for", engine, ENGINES)
    replica, write = _WRITERS[engine]
    if not (sizes.decode or sizes.mixed or sizes.piecewise):
        raise ConfigError(
            f"the plan captures nothing, as no size pays by the costs given, and {engine} takes an empty list for none "
            "given. Measure a profile if those costs were analytic, raise a budget that was given, or turn graphs off "
            "in the engine."
        )
    name = policy.partition(":")[0] if policy else replica
    made: Any = get_policy(policy if policy and name == replica else replica)
    emitted = write(sizes, settings, made)
    if name != replica:
        warning = (
            f"planned for {name}; {engine} decides by a rule of its own, so plan with --policy {replica} to plan for it"
        )
        emitted = attrs.evolve(emitted, warnings=(warning, *emitted.warnings))
    return emitted


def engine_of(policy: str) -> str | None:
    """The engine whose replica a policy is, with arguments or not; None for any other policy."""
    name = policy.partition(":")[0]
    return next((engine for engine, (replica, _) in _WRITERS.items() if replica == name), None)


def _one_list(sizes: CaptureSizes) -> tuple[int, ...]:
    return tuple(sorted({*sizes.decode, *sizes.mixed, *sizes.piecewise}))


# vLLM


def _within(listed: tuple[int, ...], settings: Settings, engine: str) -> tuple[tuple[int, ...], list[str]]:
    """The sizes that a step may have, and a warning where there are others.

    vLLM drops sizes over the token budget, and doesn't start where the largest that is stated is among them.
    """
    most = settings.max_num_tokens
    kept = tuple(size for size in listed if size <= most)
    if not kept:
        raise ConfigError(
            f"every size is over max_num_batched_tokens {most}: {_named(listed)}. Give sizes up to {most}, or raise it."
        )
    over = set(listed) - set(kept)
    said = f"sizes over max_num_batched_tokens {most} are left out, because {engine} drops them: {_named(over)}"
    return kept, [said] if over else []


def _vllm(sizes: CaptureSizes, settings: Settings, policy: Any) -> Emitted:
    listed, over = _within(_one_list(sizes), settings, "vLLM")
    config = {
        "cudagraph_mode": policy.mode.value,
        "cudagraph_capture_sizes": list(listed),
        "max_cudagraph_capture_size": listed[-1],
    }
    warnings = (*over, *_vllm_warnings(listed, settings, policy))
    return Emitted(
        engine="vllm",
        arguments=_vllm_arguments(config, settings),
        how=f"append to vllm serve ({policy.version}), and give no other list of sizes beside it",
        warnings=warnings,
    )


def _vllm_arguments(config: Mapping[str, Any], settings: Settings) -> tuple[str, ...]:
    return (
        "--max-num-seqs",
        str(settings.max_num_reqs),
        "--max-num-batched-tokens",
        str(settings.max_num_tokens),
        "--compilation-config",
        json.dumps(config, separators=(",", ":")),
    )


def _vllm_warnings(kept: tuple[int, ...], settings: Settings, policy: Any) -> tuple[str, ...]:
    """Where vLLM changes the list, or leaves batches without a graph."""
    q, most = settings.query_len, settings.max_num_reqs
    warnings = []
    decodes, rounded = policy.mode.decode is Mode.FULL, kept
    if q > 1 and decodes:
        try:
            rounded = aligned(kept, q)
        except LadderError as error:
            raise ConfigError(str(error)) from None
        if policy.ladders_apart:
            if rounded != kept:
                warnings.append(
                    f"vLLM {policy.version} rounds decode sizes up to multiples of {q} (1 + k), each by itself; their "
                    f"FULL graphs are of {_named(size for size in rounded if size <= most * q)} tokens"
                )
        elif rounded != kept:
            warnings.append(
                f"vLLM {policy.version} ({policy.runner}) rounds the list up to multiples of {q} (1 + k) and drops "
                f"what passes {kept[-1]}; it becomes {_named(rounded)}"
            )
            kept = rounded
    if decodes:
        full = [size // q for size in rounded if size <= most * q]
        largest = max(full, default=0)
        if largest < most:
            next_size = next((size for size in kept if size >= (largest + 1) * q), None)
            then = "run eagerly" if next_size is None else f"leave FULL (the next size is {next_size} tokens)"
            warnings.append(
                f"max_num_seqs {most} is off the list: uniform decode batches of {largest + 1} to {most} requests "
                f"{then}. Add {most * q} to the list, or lower --max-num-seqs to {largest}"
                if largest
                else f"no size holds a uniform decode batch of up to {most} requests in a FULL graph"
            )
    if kept[-1] > LARGEST_DEFAULT:
        warnings.append(
            f"vLLM's own list ends at {LARGEST_DEFAULT} tokens; a list that is given isn't capped, so sizes up to "
            f"{kept[-1]} are captured, as long as max_cudagraph_capture_size isn't given another value"
        )
    return tuple(warnings)


# vllm-ascend


def _ascend(sizes: CaptureSizes, settings: Settings, policy: Any) -> Emitted:
    q, most = settings.query_len, settings.max_num_reqs
    listed, over = _within(_one_list(sizes), settings, "vllm-ascend")
    config = {"cudagraph_mode": policy.mode.upper(), "cudagraph_capture_sizes": list(listed)}
    warnings = ["nothing of it was tried on an Ascend device", *over]
    if q > 1 and any(size % q for size in listed):
        warnings.append(f"vllm-ascend rounds every size up to a multiple of {q} (1 + k) in modes with FULL")
    if policy.align > 1 and any(size % policy.align for size in listed):
        warnings.append(f"sizes that aren't multiples of {policy.align} are dropped under sequence parallelism")
    largest = max((size // q for size in listed if size // q <= most), default=0)
    if largest < most:
        warnings.append(
            f"max_num_seqs {most} is off the list: decode batches of {largest + 1} to {most} requests lose their FULL "
            "graph without a word in the log (issue 16049)"
        )
    warnings.append("on Ascend 950 in piecewise modes the list is sampled down to 4 sizes")
    return Emitted(
        engine="vllm-ascend",
        arguments=_vllm_arguments(config, settings),
        how="append to vllm serve with the vllm-ascend plugin installed",
        warnings=tuple(warnings),
    )


# SGLang


def _sglang(sizes: CaptureSizes, settings: Settings, policy: Any) -> Emitted:
    q = settings.query_len
    decode = tuple(size // q for size in sizes.decode)
    prefill = sizes.piecewise or sizes.mixed
    arguments = ["--max-running-requests", str(settings.max_num_reqs)]
    arguments += ["--chunked-prefill-size", str(settings.max_num_tokens)]
    warnings = []
    if decode:
        arguments += ["--cuda-graph-max-bs-decode", str(decode[-1]), "--cuda-graph-bs-decode", *map(str, decode)]
    else:
        arguments += ["--disable-decode-cuda-graph"]
        warnings.append("every decode step runs eagerly: the list has no decode size")
    if prefill and policy.prefill != "disabled":
        arguments += ["--cuda-graph-max-bs-prefill", str(prefill[-1]), "--cuda-graph-bs-prefill", *map(str, prefill)]
    else:
        arguments += ["--disable-prefill-cuda-graph"]
    if decode and decode[-1] < settings.max_num_reqs:
        warnings.append(
            f"decode batches of {decode[-1] + 1} to {settings.max_num_reqs} requests run eagerly: SGLang has no second "
            "graph mode"
        )
    if policy.align > 1 and any(size * q % policy.align for size in decode):
        warnings.append(f"decode sizes times {q} that aren't multiples of {policy.align} are dropped")
    refused = _over_padding(prefill, policy.most_padding)
    if refused:
        warnings.append(
            f"prefill batches of {refused} tokens run eagerly: SGLang pads to at most {policy.most_padding} times"
        )
    if any(size % 8 for size in prefill):
        warnings.append("with DeepEP, SGLang rounds prefill sizes up to multiples of 8")
    return Emitted(
        engine="sglang",
        arguments=tuple(arguments),
        how="append to python -m sglang.launch_server (0.5.23)",
        warnings=tuple(warnings),
    )


def _over_padding(sizes: Sequence[int], most: int) -> str:
    """The ranges of tokens whose next size is more than `most` times as large."""
    ranges, before = [], 0
    for size in sizes:
        last = (size - 1) // most
        if last > before:
            ranges.append(f"{before + 1} to {last}" if last > before + 1 else str(last))
        before = size
    return ", ".join(ranges)


# TensorRT-LLM


def _tensorrt_llm(sizes: CaptureSizes, settings: Settings, policy: Any) -> Emitted:
    q = settings.query_len
    decode, prefill = [size // q for size in sizes.decode], list(sizes.piecewise)
    config: dict[str, Any] = {"max_batch_size": settings.max_num_reqs, "max_num_tokens": settings.max_num_tokens}
    warnings = ["written from reading TensorRT-LLM; no parser of it was run"]
    config["cuda_graph_config"] = {"enable_padding": True, "batch_sizes": decode} if decode else None
    if prefill and policy.prefill != "disabled":
        config |= {"prefill_cuda_graph_backend": policy.prefill, "prefill_capture_num_tokens": prefill}
        if policy.prefill == "piecewise":
            config["torch_compile_config"] = {}
        warnings.append(
            "prefill padding has no limit, and sizes over max_batch_size x (longest sequence - 1) are clamped"
        )
    if decode and decode[-1] < settings.max_num_reqs:
        warnings.append(f"decode batches of {decode[-1] + 1} to {settings.max_num_reqs} requests run eagerly")
    # JSON is YAML, which the file is read as.
    return Emitted(
        engine="tensorrt-llm",
        file=json.dumps(config, indent=2),
        how="save as a file for trtllm-serve --extra_llm_api_options",
        warnings=tuple(warnings),
    )


def _named(sizes: Any) -> str:
    listed = sorted(sizes)
    text = ",".join(map(str, listed[:24]))
    return f"{text} and {len(listed) - 24} more" if len(listed) > 24 else text or "none"


_WRITERS: Mapping[str, tuple[str, Callable[[CaptureSizes, Settings, Any], Emitted]]] = {
    "vllm": ("vllm", _vllm),
    "sglang": ("sglang", _sglang),
    "tensorrt-llm": ("tensorrt_llm", _tensorrt_llm),
    "vllm-ascend": ("ascend", _ascend),
}
ENGINES = tuple(_WRITERS)
