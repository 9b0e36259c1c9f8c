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
from math import lcm
from typing import Any

import attrs

from kpolicy.errors import ConfigError, UnknownNameError
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


def emit(
    engine: str, sizes: CaptureSizes, settings: Settings, *, policy: str | None = None, multiple_of: int = 1
) -> Emitted:
    """The sizes as an engine takes them.

    Args:
        engine: a name of `ENGINES`.
        sizes: the capture sizes, in tokens.
        settings: the deployment's limits.
        policy: the engine's replica with the arguments it was planned for, such as ``vllm:version=0.23``; its defaults
            without.
        multiple_of: what sizes in tokens must be multiples of, so that no warning advises others.

    Raises:
        UnknownNameError: no such engine.
        ConfigError: there is nothing to capture, or the engine can't take the sizes.
    """
    if engine not in _WRITERS:
        raise UnknownNameError("engine to emit for", engine, ENGINES)
    if multiple_of < 1:
        raise ConfigError(f"multiple_of is {multiple_of!r}; sizes are multiples of a whole number from 1 up.")
    replica, write = _WRITERS[engine]
    if not (sizes.decode or sizes.mixed or sizes.piecewise):
        raise ConfigError(
            f"the plan captures nothing, as no size pays by the costs given, and {engine} takes an empty list for none "
            "given. Measure a profile if those costs were analytic, raise a budget that was given, or turn graphs off "
            "in the engine."
        )
    name = policy.partition(":")[0] if policy else replica
    made: Any = get_policy(policy if policy and name == replica else replica)
    emitted = write(sizes, settings, made, multiple_of)
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


# What is said of any engine


def _span(first: int, last: int) -> str:
    return str(last) if first == last else f"{first} to {last}"


def _cure(
    last: int, most: int, limit: str, *, name: str = "", width: int = 1, multiple_of: int = 1, least: int = 1
) -> str:
    """What to do where a list ends before batches do.

    Args:
        last: what the largest size holds, counted as the limit counts.
        most: the largest batch.
        limit: what sets `most`.
        name: the list, for ``--largest``; empty where that doesn't say it.
        width: how many times as large a size of the list is.
        multiple_of: what sizes must be multiples of, counted as `most`.
        least: the least that the limit may be.
    """
    top, ways = most - most % multiple_of, []
    if last < top == most:
        ways.append(f"add {top * width} to the list" + (f" (plan with --largest {name}={top})" if name else ""))
    elif last < top:
        # With --largest alone the limit would still be beyond the list.
        ways.append(f"add {top * width} to the list and lower {limit} to {top}")
    if last >= least:
        ways.append(f"lower {limit} to {last}")
    why = f", as sizes are multiples of {multiple_of * width}" if top < most else ""
    return f". To avoid that, {', or '.join(ways)}{why}" if ways else ""


def _above(what: str, unit: str, last: int, most: int, limit: str, **cure: Any) -> list[str]:
    """A warning where batches may be larger than the largest size; the named arguments are those of `_cure`."""
    if last >= most:
        return []
    said = f"{what} of {_span(last + 1, most)} {unit} run eagerly: the list ends at {last}, and {limit} is {most}"
    return [said + _cure(last, most, limit, **cure)]


def _drafts(settings: Settings, how: str) -> list[str]:
    """That drafts aren't asked for by what is written."""
    k = settings.num_speculative_tokens
    said = f"the sizes are for decode rows of {1 + k} tokens (1 + k), and nothing here asks for drafts: {how}"
    return [said] if k else []


def _clamped(listed: Sequence[int], most: int, what: str, limit: str) -> tuple[tuple[int, ...], list[str]]:
    """The sizes with those over a limit at the limit, and a warning where there are any."""
    over = [size for size in listed if size > most]
    kept = tuple(sorted({min(size, most) for size in listed}))
    said = f"{what} over {limit} {most} become {most}, as no batch is larger: {_named(over)}"
    return kept, [said] if over else []


def _requests(listed: Sequence[int], settings: Settings, limit: str) -> tuple[tuple[int, ...], list[str]]:
    """Decode sizes in requests, and warnings where they aren't what was given."""
    q = settings.query_len
    rows = sorted({-(-size // q) for size in listed})
    kept, said = _clamped(rows, settings.max_num_reqs, "decode sizes", limit)
    if any(size % q for size in listed):
        said.insert(0, f"decode sizes are rounded up to multiples of {q} (1 + k); in requests they are {_named(rows)}")
    return kept, said


def _decodes_above(last: int, settings: Settings, limit: str, multiple_of: int) -> list[str]:
    """What runs eagerly above the largest size of a list in requests."""
    q, most = settings.query_len, settings.max_num_reqs
    name = "decode" if most * q <= settings.max_num_tokens else ""
    return _above("decode batches", "requests", last, most, limit, name=name, multiple_of=lcm(multiple_of, q) // q)


def _no_prompts(listed: Sequence[int], off: bool) -> list[str]:
    """A warning where no step with a prompt has a graph, unless that was asked for and nothing is left out."""
    if off:
        said = "the prefill sizes are left out, as the policy has prefill graphs off: steps with prompts run eagerly"
        return [said] if listed else []
    return [] if listed else ["every step with prompts runs eagerly: the list has no prefill size"]


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


def _vllm(sizes: CaptureSizes, settings: Settings, policy: Any, multiple_of: int) -> Emitted:
    listed, over = _within(_one_list(sizes), settings, "vLLM")
    config = {
        "cudagraph_mode": policy.mode.value,
        "cudagraph_capture_sizes": list(listed),
        "max_cudagraph_capture_size": listed[-1],
    }
    warnings = (*over, *_vllm_warnings(listed, settings, policy, multiple_of), *_vllm_drafts(settings))
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


def _vllm_drafts(settings: Settings) -> list[str]:
    k = settings.num_speculative_tokens
    return _drafts(settings, f'give --speculative-config too, with "num_speculative_tokens": {k}')


def _vllm_warnings(kept: tuple[int, ...], settings: Settings, policy: Any, multiple_of: int) -> list[str]:
    """Where vLLM changes the list, or leaves batches without a graph."""
    q, mode, stated, warnings = settings.query_len, policy.mode, kept[-1], list[str]()
    rounded = policy.configured(kept, mode, settings)
    if rounded != kept:
        warnings.append(
            f"vLLM {policy.version} ({policy.runner}) rounds the list up to multiples of {q} (1 + k) and drops "
            f"what passes {kept[-1]}; it becomes {_named(rounded)}"
        )
        kept = rounded
    if mode.separate:
        warnings += _vllm_decodes(kept, settings, policy, multiple_of)
    if mode.mixed is not Mode.EAGER:
        warnings += _one_list_above(kept[-1], settings, multiple_of, stated=stated)
    if kept[-1] > LARGEST_DEFAULT:
        warnings.append(
            f"vLLM's own list ends at {LARGEST_DEFAULT} tokens; a list that is given isn't capped, so sizes up to "
            f"{kept[-1]} are captured, as long as max_cudagraph_capture_size isn't given another value"
        )
    return warnings


def _vllm_decodes(kept: tuple[int, ...], settings: Settings, policy: Any, multiple_of: int) -> list[str]:
    """What vLLM makes of uniform decode batches, where they have FULL graphs of their own."""
    q, warnings, rounded = settings.query_len, list[str](), kept
    of_decodes = settings.max_num_reqs * q
    if policy.ladders_apart and not policy.varlen:
        rounded = aligned(kept, q)
        if rounded != kept:
            warnings.append(
                f"vLLM {policy.version} rounds decode sizes up to multiples of {q} (1 + k), each by itself; their "
                f"FULL graphs are of {_named(size for size in rounded if size <= of_decodes)} tokens"
            )
    most = _most_decodes(settings)
    largest = max((size // q for size in rounded if size <= of_decodes), default=0)
    if not largest:
        warnings.append(f"no size holds a uniform decode batch of up to {most} requests in a FULL graph")
    elif largest < most:
        next_size = next((size for size in kept if size >= (largest + 1) * q), None)
        eager = next_size is None or policy.mode.mixed is Mode.EAGER
        then = "run eagerly" if eager else f"leave FULL (the next size is {next_size} tokens)"
        warnings.append(
            f"max_num_seqs {settings.max_num_reqs} is off the list: uniform decode batches of "
            f"{_span(largest + 1, most)} requests {then}"
            # With fewer requests a size that isn't whole rows would be over the limit and have no FULL graph.
            + _cure(
                largest, most, "--max-num-seqs", width=q, multiple_of=lcm(multiple_of, q) // q,
                least=1 if largest * q in rounded else largest + 1,
            )
        )  # fmt: skip
    return warnings


def _most_decodes(settings: Settings) -> int:
    """The most decode rows of a step."""
    return min(settings.max_num_reqs, settings.max_num_tokens // settings.query_len)


def _one_list_above(last: int, settings: Settings, multiple_of: int, *, stated: int) -> list[str]:
    """What runs eagerly above the largest size of vLLM's one list, of which `stated` is written as the largest."""
    q = settings.query_len
    # vLLM refuses fewer tokens a step than requests, or than the largest size that is written.
    return _above(
        "steps", "tokens", last, settings.max_num_tokens, "--max-num-batched-tokens", name="all",
        multiple_of=lcm(multiple_of, q), least=settings.max_num_reqs * q if last == stated else last + 1,
    )  # fmt: skip


# vllm-ascend


def _ascend(sizes: CaptureSizes, settings: Settings, policy: Any, multiple_of: int) -> Emitted:
    q, most = settings.query_len, _most_decodes(settings)
    listed, over = _within(_one_list(sizes), settings, "vllm-ascend")
    config = {"cudagraph_mode": policy.mode.upper(), "cudagraph_capture_sizes": list(listed)}
    warnings = ["nothing of it was tried on an Ascend device", *over]
    kept = listed if policy.mode == "piecewise" else aligned(listed, q)
    if kept != listed:
        warnings.append(f"vllm-ascend rounds every size up to a multiple of {q} (1 + k) in modes with FULL")
    if policy.align > 1 and any(size % policy.align for size in kept):
        warnings.append(f"sizes that aren't multiples of {policy.align} are dropped under sequence parallelism")
        kept = tuple(size for size in kept if size % policy.align == 0)
    align = lcm(multiple_of, policy.align)
    separate = policy.mode in ("full_decode_only", "full_and_piecewise")
    largest = max((size // q for size in kept if size <= settings.max_num_reqs * q), default=0)
    if separate and largest < most:
        warnings.append(
            f"max_num_seqs {settings.max_num_reqs} is off the list: decode batches of {_span(largest + 1, most)} "
            "requests lose their FULL graph without a word in the log (issue 16049)"
            + _cure(largest, most, "--max-num-seqs", width=q, multiple_of=lcm(align, q) // q)
        )
    if policy.mode in ("piecewise", "full", "full_and_piecewise"):
        warnings += _one_list_above(max(kept, default=0), settings, align, stated=listed[-1])
    warnings += ["on Ascend 950 in piecewise modes the list is sampled down to 4 sizes", *_vllm_drafts(settings)]
    return Emitted(
        engine="vllm-ascend",
        arguments=_vllm_arguments(config, settings),
        how="append to vllm serve with the vllm-ascend plugin installed",
        warnings=tuple(warnings),
    )


# SGLang


def _sglang(sizes: CaptureSizes, settings: Settings, policy: Any, multiple_of: int) -> Emitted:
    most, tokens = settings.max_num_reqs, settings.max_num_tokens
    decode, warnings = _requests(() if policy.decode == "disabled" else sizes.decode, settings, "max_running_requests")
    given = sizes.piecewise or sizes.mixed
    off = policy.prefill == "disabled"
    prefill, clamped = _clamped(() if off else given, tokens, "prefill sizes", "chunked_prefill_size")
    warnings += clamped
    arguments = ["--max-running-requests", str(most), "--chunked-prefill-size", str(tokens)]
    if decode:
        arguments += ["--cuda-graph-max-bs-decode", str(decode[-1]), "--cuda-graph-bs-decode", *map(str, decode)]
        warnings += _decodes_above(decode[-1], settings, "--max-running-requests", multiple_of)
    else:
        arguments += ["--disable-decode-cuda-graph"]
        why = "the policy has decode graphs off" if policy.decode == "disabled" else "the list has no decode size"
        warnings.append(f"every decode step runs eagerly: {why}")
    if prefill:
        arguments += ["--cuda-graph-max-bs-prefill", str(prefill[-1]), "--cuda-graph-bs-prefill", *map(str, prefill)]
        limit = "--chunked-prefill-size"
        warnings += _above(
            "prefill batches", "tokens", prefill[-1], tokens, limit, name="prefill", multiple_of=multiple_of
        )
    else:
        arguments += ["--disable-prefill-cuda-graph"]
        warnings += _no_prompts(given, off)
    return Emitted(
        engine="sglang",
        arguments=tuple(arguments),
        how="append to python -m sglang.launch_server (0.5.23)",
        warnings=(*warnings, *_sglang_warnings(decode, prefill, settings, policy)),
    )


def _sglang_warnings(decode: Sequence[int], prefill: Sequence[int], settings: Settings, policy: Any) -> list[str]:
    """Where SGLang changes the lists, or runs what a size holds eagerly."""
    q, warnings = settings.query_len, list[str]()
    if policy.align > 1 and any(size * q % policy.align for size in decode):
        warnings.append(f"decode sizes times {q} that aren't multiples of {policy.align} are dropped")
    refused = _over_padding(prefill, policy.most_padding)
    if refused:
        warnings.append(
            f"prefill batches of {refused} tokens run eagerly: SGLang pads to at most {policy.most_padding} times"
        )
    if any(size % 8 for size in prefill):
        warnings.append("with DeepEP, SGLang rounds prefill sizes up to multiples of 8")
    how = f"give --speculative-algorithm too, with --speculative-num-draft-tokens {q}"
    return warnings + _drafts(settings, how)


def _over_padding(sizes: Sequence[int], most: int) -> str:
    """The ranges of tokens whose next size is more than `most` times as large."""
    ranges, before = [], 0
    for size in sizes:
        last = (size - 1) // most
        if last > before:
            ranges.append(f"{before + 1} to {last}" if last > before + 1 else str(last))
        before = size
    return " and ".join(filter(None, (", ".join(ranges[:-1]), *ranges[-1:])))


# TensorRT-LLM


def _tensorrt_llm(sizes: CaptureSizes, settings: Settings, policy: Any, multiple_of: int) -> Emitted:
    q, most, tokens = settings.query_len, settings.max_num_reqs, settings.max_num_tokens
    decode, told = _requests(sizes.decode, settings, "max_batch_size")
    off = policy.prefill == "disabled"
    prefill, clamped = _clamped(() if off else sizes.piecewise, tokens, "prefill sizes", "max_num_tokens")
    config: dict[str, Any] = {"max_batch_size": most, "max_num_tokens": tokens}
    warnings = ["written from reading TensorRT-LLM; no parser of it was run", *told, *clamped]
    config["cuda_graph_config"] = {"enable_padding": True, "batch_sizes": list(decode)} if decode else None
    if prefill:
        config |= {"prefill_cuda_graph_backend": policy.prefill, "prefill_capture_num_tokens": list(prefill)}
        if policy.prefill == "piecewise":
            config["torch_compile_config"] = {}
        warnings.append(
            "prefill padding has no limit, and sizes over max_batch_size x (longest sequence - 1) are clamped"
        )
        warnings += _above(
            "steps with prompts", "tokens", prefill[-1], tokens, "max_num_tokens", name="prefill",
            multiple_of=multiple_of, least=most * q,
        )  # fmt: skip
    else:
        warnings += _no_prompts(sizes.piecewise, off)
    if decode:
        warnings += _decodes_above(decode[-1], settings, "max_batch_size", multiple_of)
    else:
        warnings.append("every decode step runs eagerly: the list has no decode size")
    k = settings.num_speculative_tokens
    warnings += _drafts(settings, f"put a speculative_config with max_draft_len {k} into the file too")
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


_WRITERS: Mapping[str, tuple[str, Callable[[CaptureSizes, Settings, Any, int], Emitted]]] = {
    "vllm": ("vllm", _vllm),
    "sglang": ("sglang", _sglang),
    "tensorrt-llm": ("tensorrt_llm", _tensorrt_llm),
    "vllm-ascend": ("ascend", _ascend),
}
ENGINES = tuple(_WRITERS)
