"""Which graphs vLLM captures: sizes apart for decodes, small mixed batches and pieces, past vLLM's limit of 512.

vLLM keeps one list of sizes. Ours is the union of three, put in its place before anything reads it; the keys that
each kind of graph really gets are chosen later, when attention has said what it can do (`kpolicy_vllm.dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kpolicy.attention.support import Claims
from kpolicy.errors import ConfigError
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.policies.auto import AutoPolicy
from kpolicy.policies.fixed import FixedPolicy
from kpolicy.policies.vllm_policy import VllmPolicy
from kpolicy.settings import Settings
from kpolicy_vllm.config import Config

__all__ = ["default_sizes", "describe", "geometric", "one_list", "plan_differs", "sizes_of", "wide_layers"]

LARGEST_PIECEWISE = 4096
"""For steps that hold a long prompt: a 0.5B model's 4,350 tokens took an H200 8.7 ms, launching them eagerly 10.3, and
launching a model of experts 51."""
WIDE_LAYER = 100_000_000
"""Weights of a layer that a token is multiplied with, as `wide_layers` estimates them, from which a step of a few
hundred tokens is taken to be bound by the device also in pieces: launching a layer's pieces takes some 0.2 ms, in which
an H200 multiplies 512 tokens with as many. There what a step is padded by may take time: pieces have vLLM's own sizes
from `DENSE_FROM` to its limit, and above that, where vLLM pads nothing as it is eager, sizes `DENSE_STEP` apart."""
DENSE_FROM = 128
DENSE_STEP, DENSE_TO = 64, 1024
"""Of a Llama-8B's steps those to 1,024 tokens took an H200 up to 22 ms. Launching one eagerly took 19 ms by one
calibration and 27 by another, on a core that was slow then."""
DECODE_TO = 64
"""Rows of decodes to which such a model has sizes eight apart, vLLM's own where a row has one token: in between, a
Llama-8B's chat had its median gap 0.2% longer than vLLM's by sizes 16 and more apart (docs/measured_vllm.md)."""
LARGEST_MIXED = 512
"""Above this, attention of a whole graph's fixed shape is work that its rows may not need; pieces have none of it."""

PACED_MIXED = 1024
"""The same where steps are bounded: a whole graph's host time lets a bounded step be bound by the device. Whole graphs
of no more tokens than the largest of decodes take no further buffers for attention's splits."""


def geometric(largest: int) -> tuple[int, ...]:
    """Sizes to `largest`: doubling to 32, then two to a doubling to 128, then four.

    Twenty-two of them reach 1,024, where vLLM's spacing would make 99.
    """
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]
    while sizes[-1] < largest:
        step = 1 << (sizes[-1].bit_length() - 3)
        sizes.append(sizes[-1] + step)
    return (*(size for size in sizes if size < largest), largest)


def wide_layers(config: Any, ranks: int = 1) -> bool:
    """Whether a model has at least `WIDE_LAYER` weights in a layer for each token, by 4 h^2 + 3 h i.

    That counts keys and values as wide as queries: with fewer heads of those a layer has less.

    Args:
        config: the model's, as Hugging Face has it; what it doesn't say is taken for a thin layer, and of what it says
            by layer the greatest counts.
        ranks: tensor-parallel ranks that share a layer.
    """
    hidden, inner = _greatest(config, "hidden_size"), _greatest(config, "intermediate_size")
    experts = _greatest(config, "num_experts_per_tok") or _greatest(config, "moe_topk")
    if experts:
        expert = _greatest(config, "moe_intermediate_size") or inner
        inner = expert * (experts + _greatest(config, "n_shared_experts"))
        inner += _greatest(config, "shared_expert_intermediate_size")
    return (4 * hidden + 3 * inner) * hidden >= WIDE_LAYER * ranks


def _greatest(config: Any, name: str) -> int:
    """That number of a config, the greatest where it has one for each layer; 0 where it doesn't say."""
    found: Any = None
    with suppress(Exception):  # configs by layer raise where one number for all is asked
        found = getattr(config, name, None)
    return max((n for n in (found if isinstance(found, (list, tuple)) else (found,)) if isinstance(n, int)), default=0)


def default_sizes(settings: Settings, *, paced: bool = False, wide: bool = False) -> CaptureSizes:
    """The sizes that are captured when the user gives none.

    Decodes go to the most requests there can be. Small batches share sizes further apart: there a step's time is that
    of reading the weights, whatever its tokens, but for some attention of wide models' further rows.

    Args:
        settings: the deployment's limits.
        paced: whether steps are bounded, which has more whole graphs with prompts.
        wide: whether the model has `wide_layers`.
    """
    tokens, q = settings.max_num_tokens, settings.query_len
    most = min(settings.max_num_reqs, tokens // q)
    rows = {*geometric(most), *(range(8, min(most, DECODE_TO), 8) if wide else ())}
    decode = tuple(size * q for size in sorted(rows))
    every = {16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096}
    if wide:
        own = get_policy("vllm").sizes(settings).piecewise
        every |= {96, *(size for size in own if size >= DENSE_FROM)}
        every |= {size for size in range(DENSE_FROM, DENSE_TO, DENSE_STEP) if size > own[-1]}
    largest = min(tokens, LARGEST_PIECEWISE)
    whole = min(tokens, max(LARGEST_MIXED, min(decode[-1], PACED_MIXED)) if paced else LARGEST_MIXED)
    pieces = sorted(size for size in every if size < largest)
    mixed = [size for size in (64, 128, 256, 512, 640, 768, 1024) if size < whole]
    return CaptureSizes(decode, (*mixed, whole), (*pieces, largest))


def sizes_of(config: Config, settings: Settings, *, listed: list[int] | None = None, ranks: int = 1,
             multiple_of: int = 1, paced: bool | None = None,
             wide: Callable[[], bool] = lambda: False) -> CaptureSizes | None:  # fmt: skip
    """The sizes to capture; None where vLLM's own list stays as it is.

    Args:
        config: what the user set.
        settings: the deployment's limits.
        listed: the sizes that the user gave to vLLM itself, which hold for every kind of graph.
        ranks: data-parallel ranks. With more than one a rank may have to run at any size of another's, so that every
            size is there in pieces, and FULL graphs are of decodes only.
        multiple_of: what every size is rounded up to (tensor parallel ranks under sequence parallelism).
        paced: whether steps can be bounded, `kpolicy_vllm.scheduler.may_pace`; None where only the settings say.
        wide: whether the model has `wide_layers`; asked only where the default sizes are taken.

    Raises:
        ConfigError: a size can't be used, or the plan is of another deployment.
    """
    policy = get_policy(config.policy)
    if isinstance(policy, VllmPolicy) and not config.sizes_given:
        return None
    if config.plan is not None:
        sizes = _planned(config.plan, settings)
    elif listed is not None and not config.sizes_given:
        q = settings.query_len
        sizes = CaptureSizes([n for n in listed if n % q == 0 and n <= q * settings.max_num_reqs],
                             [n for n in listed if n <= LARGEST_MIXED], listed)  # fmt: skip
    elif isinstance(policy, (AutoPolicy, FixedPolicy)):
        sizes = default_sizes(settings, paced=config.paces if paced is None else paced, wide=wide())
    else:
        sizes = policy.sizes(settings)
    q, rounded = settings.query_len, []
    for name in ("decode", "mixed", "piecewise"):
        given = getattr(config, f"{name}_sizes")
        most = q * settings.max_num_reqs if name == "decode" else settings.max_num_tokens
        wanted = getattr(sizes, name) if given is None else given
        rounded.append(_rounded(wanted, _least_multiple(q, multiple_of), most))
        if given and not rounded[-1]:
            raise ConfigError(
                f"no step is as large as kpolicy's {name}_sizes {list(given)}: it has at most {most} tokens here. "
                "Give smaller sizes, or [] to capture none of that kind."
            )
    sizes = CaptureSizes(*rounded)
    if ranks > 1:
        every = tuple(sorted({*sizes.decode, *(sizes.mixed if config.plan is not None else ()), *sizes.piecewise}))
        sizes = CaptureSizes([n for n in every if n <= q * settings.max_num_reqs], (), every)
    if not (sizes.decode or sizes.mixed or sizes.piecewise):
        raise ConfigError("kpolicy has no capture sizes left; give at least one, or set the policy eager.")
    return sizes


def one_list(sizes: CaptureSizes) -> list[int]:
    """The union, as vLLM's list of sizes."""
    return sorted({*sizes.decode, *sizes.mixed, *sizes.piecewise})


def _least_multiple(a: int, b: int) -> int:
    from math import lcm

    return lcm(a, b)


def _rounded(sizes: tuple[int, ...], multiple_of: int, largest: int) -> tuple[int, ...]:
    """The sizes rounded up to multiples, without repeats and without those over `largest`."""
    rounded = {-(-size // multiple_of) * multiple_of for size in sizes if size > 0}
    return tuple(sorted(size for size in rounded if size <= largest))


def _planned(path: str, settings: Settings) -> CaptureSizes:
    """The sizes of a plan file; larger mixed batches than `LARGEST_MIXED` get pieces.

    A planner that may choose takes whole graphs for mixed batches of any size, as its costs have no attention of fixed
    shape in them.

    Raises:
        ConfigError: it can't be read, or was planned for other speculation or LoRA, or for fewer requests or tokens.
    """
    from kpolicy.schemas import read_plan

    plan = read_plan(path)
    for name in ("num_speculative_tokens", "max_loras"):
        planned, here = getattr(plan.settings, name), getattr(settings, name)
        if planned != here:
            raise ConfigError(f"the plan {path} is of another deployment: {name} is {planned} there and {here} here. "
                              "Plan again with this deployment's settings.")  # fmt: skip
    sizes = plan.sizes
    pieces = {*sizes.piecewise, *(size for size in sizes.mixed if size > LARGEST_MIXED)}
    return CaptureSizes(sizes.decode, [n for n in sizes.mixed if n <= LARGEST_MIXED], sorted(pieces))


def plan_differs(path: str, claims: Claims) -> str:
    """How the attention that a plan was made for differs from the model's; empty where it doesn't.

    What a plan was made for without a config isn't known (`read_plan`); what attention supports is the nearest to it.
    """
    from kpolicy.schemas import read_plan

    planned = read_plan(path).attention
    return "" if planned.full.level == claims.full.level else f"attention that captures {planned}, and this is {claims}"


def describe(sizes: CaptureSizes | None) -> str:
    """The sizes in a few words, for logs."""
    if sizes is None:
        return "vLLM's own sizes"
    parts: list[tuple[str, Any]] = [("decode", sizes.decode), ("mixed", sizes.mixed), ("piecewise", sizes.piecewise)]
    return ", ".join(f"{len(each)} {name} to {each[-1]}" for name, each in parts if each)
