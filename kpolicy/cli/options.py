"""What several commands read from their options, with the errors a person at a terminal needs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from kpolicy.attention.support import AttentionSupport, Claims, parse_attention
from kpolicy.budgets import Budget
from kpolicy.costs import CostTable
from kpolicy.device_names import DeviceName, read_device
from kpolicy.errors import ConfigError, SupportError, UnknownNameError
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.scheduling.pace import other_keys
from kpolicy.settings import LIMITS, Settings
from kpolicy.shapes import LARGEST_COUNT
from kpolicy.words import some

__all__ = [
    "COMMAND",
    "SIMULATED",
    "Deployment",
    "Json",
    "at_least",
    "device_here",
    "ladder_of",
    "pairs",
    "settings_of",
    "specs_of",
    "step_limits",
    "whole",
]

COMMAND: ContextVar[tuple[str, ...]] = ContextVar("COMMAND", default=())
"""The arguments of the command that runs, for files that say what made them."""


def whole(_type: Any, tokens: Sequence[Any]) -> int:
    """A whole number as people write it; cyclopts would round 1.5 to 2."""
    text = tokens[0].value
    if not re.fullmatch(r"[+-]?[0-9][0-9_]*", text) or len(text) > 30:
        raise ValueError(f"{text[:40]!r} isn't a whole number.")
    return int(text)


Json = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="Print JSON (docs/cli.md lists the fields).")
]

_OF_DEPLOYMENT = "Deployment"
MAX_NUM_REQS = 256
SIMULATED = "simulated"
"""The executor that runs no model"""


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Deployment:
    """Options about the model and the engine, equal in every command that decides."""

    attention: Annotated[
        str | None,
        Parameter(
            group=_OF_DEPLOYMENT,
            help="What attention supports: layer kinds joined by +, with a backend after a colon, such as mla, "
            "gdn+gqa or gqa:vllm-0.33/FLASH_ATTN. By default gqa.",
        ),
    ] = None
    config: Annotated[
        Path | None, Parameter(group=_OF_DEPLOYMENT, help="A model's config.json, instead of --attention.")
    ] = None
    ladder: Annotated[
        str | None,
        Parameter(
            group=_OF_DEPLOYMENT,
            help="Capture sizes in tokens, such as 1,2,4,8, or a plan file (.json). By default the policy's own.",
        ),
    ] = None
    budget_graphs: Annotated[
        int | None,
        Parameter(
            group=_OF_DEPLOYMENT,
            converter=whole,
            help="The most device graphs there may be: FULL takes one, PIECEWISE one a piece. A ladder above a budget "
            "is an error that says which sizes to keep.",
        ),
    ] = None
    budget_streams: Annotated[
        int | None,
        Parameter(group=_OF_DEPLOYMENT, converter=whole, help="The most device streams that graphs may take."),
    ] = None
    budget_bytes: Annotated[
        int | None,
        Parameter(group=_OF_DEPLOYMENT, converter=whole, help="The most device memory that graphs may take."),
    ] = None
    profile: Annotated[
        Path | None,
        Parameter(
            group=_OF_DEPLOYMENT,
            help="A measured profile: a file, or the name of one that ships with kpolicy, such as qwen2.5-0.5b-h200. "
            "By default analytic costs.",
        ),
    ] = None
    objective: Annotated[
        str,
        Parameter(
            group=_OF_DEPLOYMENT,
            help="What auto minimises: throughput, latency, or weights as STEP:GAP (0.7:0.3). STEP:GAP:LIMIT also says "
            "how many times the best for them prompts may take (1:0:1.25); by default 1.25 where GAP is weighed, else "
            "1.",
        ),
    ] = "throughput"
    max_num_reqs: Annotated[
        int | None,
        Parameter(
            group=_OF_DEPLOYMENT,
            converter=whole,
            help=f"Most requests in one step. By default {MAX_NUM_REQS}, and 32 where a CPU serves a model.",
        ),
    ] = None

    def most_reqs(self, default: int = MAX_NUM_REQS) -> tuple[str, int]:
        """``--max-num-reqs`` and its value, as `settings_of` takes them."""
        return "--max-num-reqs", default if self.max_num_reqs is None else self.max_num_reqs

    def support(self) -> AttentionSupport:
        """Support as stated, or read from a model's config.json.

        Raises:
            ConfigError: both are given, or one can't be used.
        """
        if self.attention is not None and self.config is not None:
            raise ConfigError("--attention and --config both say what attention supports; give one of them.")
        if self.config is not None:
            from kpolicy.attention.hf import from_hf_config

            return from_hf_config(self.config)
        return parse_attention("gqa" if self.attention is None else self.attention)

    def reads(self, traces: Iterable[Path | None], *more: Path | str | None) -> list[Path]:
        """What a command reads: traces, by default the one that is found, `more`, and what these options name.

        A name that isn't a file's is among them too.

        Raises:
            TraceError: see `default_path`.
        """
        from kpolicy.scheduling.traces import default_path

        given = [each for each in traces if each is not None]
        named = (*given, None if given else default_path(), *more, self.config, self.profile, self.ladder)
        return [Path(each) for each in named if each is not None]

    def budget(self) -> Budget | None:
        """What graphs may take; None without a limit."""
        limits = {"graphs": self.budget_graphs, "streams": self.budget_streams, "bytes": self.budget_bytes}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        for name, limit in given.items():
            if limit < 0:
                raise ConfigError(f"--budget-{name} is {limit}; it must be a whole number from 0 up.")
        return Budget(**given) if given else None

    def costs(self) -> CostTable | None:
        """The profile's costs, or analytic ones of the config's model on an H200; None for those of an 8B model.

        Raises:
            ConfigError: see `profiled`.
        """
        given = self.profiled()
        if given is not None or self.config is None:
            return given
        from kpolicy.figures import config_costs

        try:
            return config_costs(self.config)
        except SupportError:
            # Attention of models is known whose weights aren't laid out here; the table's name says which it is.
            return None

    def profiled(self) -> CostTable | None:
        """The profile's costs; None without one. Whether it is of the config's model is said where that can't be told.

        Raises:
            ConfigError: the profile can't be read, or is of another model than the config's.
        """
        if self.profile is None:
            return None
        from kpolicy.profiles import load_profile

        profile = load_profile(self.profile)
        if self.config is not None:
            from kpolicy.simulate.cost_models import check_model

            unsure = check_model(self.profile, profile, self.config)
            if unsure:
                sys.stderr.write(f"kpolicy: {unsure}\n")
        return profile.costs


DEFAULT_POLICIES = ("auto", "vllm")


def specs_of(policies: Sequence[str] | None) -> list[str]:
    """The policies to compare, each once and known.

    Raises:
        ConfigError: one is given twice, isn't a policy, or is several joined by commas.
    """
    specs = list(policies or DEFAULT_POLICIES)
    for i, spec in enumerate(specs):
        if spec in specs[:i]:
            raise ConfigError(f"--policy {spec} is given twice; both would do the same, so give it once.")
        if "," in spec.partition(":")[0]:
            each = " ".join(f"--policy {name}" for name in spec.split(","))
            raise ConfigError(f"--policy {spec} has a comma, which is for arguments; for several give {each}.")
        get_policy(spec)
    return specs


LEAST_RATE = 1e-6
"""Arrivals slower than that lie so far apart that a float has no microseconds left."""


def check_rate(rate: float) -> None:
    """See that arrivals can be sped up by a factor.

    Raises:
        ConfigError: they can't.
    """
    if not LEAST_RATE <= rate < float("inf"):
        raise ConfigError(
            f"--rate is {rate:g}; it takes a factor from {LEAST_RATE:g} up, such as 2 for arrivals twice as fast."
        )


def at_least(option: str, value: int, least: int) -> int:
    """The value, checked.

    Raises:
        ConfigError: it is below `least`, or no count may be so large.
    """
    if not least <= value <= LARGEST_COUNT:
        raise ConfigError(f"{option} is {value}; it must be a whole number from {least} to {LARGEST_COUNT}.")
    return value


def device_here(device: str, *, more: tuple[str, ...] = ()) -> DeviceName:
    """``--device`` of the commands that run on this machine, whether or not there is such a device.

    Args:
        device: the value: ``auto``, an executor's name or torch's, also of one of several (``cuda:1``).
        more: what the command takes besides.

    Raises:
        UnknownNameError: no executor is called so.
    """
    from kpolicy.executors import executor_names

    name = read_device(device)
    known = ("auto", *(each for each in executor_names() if each != SIMULATED), *more)
    if name.executor not in known or (name.index is not None and name.kind == SIMULATED):
        hint = (
            "`kpolicy doctor` says what is on this machine; devices by their published figures, such as H200, are "
            "those of `kpolicy simulate`, plan, report and sweep."
        )
        raise UnknownNameError("device", device, known, hint)
    return name


def settings_of(**limits: tuple[str, int]) -> Settings:
    """Settings from (option, value) pairs; an error names the option rather than the field."""
    for name, (option, value) in limits.items():
        least, most = LIMITS[name]
        if not least <= value <= most:
            raise ConfigError(f"{option} is {value}; it must be a whole number from {least} to {most}.")
    return Settings(**{name: value for name, (_, value) in limits.items()})


PACE_HELP = (
    "A policy: how many prompt tokens a step with decodes holds is decided by costs and --objective, fewer where that "
    "weighs the gap, as long as the prompts in line take no longer than by that policy in full steps, or the "
    "objective's bound on first tokens allows, whichever is longer. First tokens may be later by it. It holds for "
    "every policy that is served. By default steps are filled."
)


def check_pace(pace: str | None, claims: Claims | None = None, settings: Settings | None = None) -> None:
    """Refuse a ``--pace`` that names no policy, or, once these are known, one that can't have its graphs.

    Args:
        pace: the option.
        claims: what attention supports.
        settings: the deployment's limits.

    Raises:
        ConfigError: it is refused.
    """
    if pace is None:
        return
    try:
        policy = get_policy(pace)
        if claims is not None and settings is not None:
            other_keys(policy, claims, settings)
    except ConfigError as error:
        raise ConfigError(f"--pace: {error}") from None


def step_limits(settings: Settings, pace: str | None = None) -> str:
    """What a step may have, in words."""
    reqs, tokens = some(settings.max_num_reqs, "request"), some(settings.max_num_tokens, "token")
    paced = "" if pace is None else f", fewer beside decodes as --pace {pace} allows"
    return f"at most {reqs} and {tokens} a step{paced}"


def pairs(
    option: str, text: str | None, *, mark: str, default: int, least: tuple[int, int], example: str
) -> tuple[tuple[int, int], ...]:
    """``"512,64@1000"`` as pairs: a number, and the one after the mark or the default.

    Args:
        option: whose value it is.
        text: the value; None is no pairs.
        mark: what stands between the two numbers.
        default: the second number where there is no mark.
        least: the least that each of the two may be.
        example: what the option takes, in words.

    Raises:
        ConfigError: a part isn't one number or two, or one is out of range.
    """
    return () if text is None else tuple(_pair(option, part, mark, default, least, example) for part in text.split(","))


def _pair(option: str, part: str, mark: str, default: int, least: tuple[int, int], example: str) -> tuple[int, int]:
    first, marked, second = part.partition(mark)
    try:
        pair = (int(first), int(second) if marked else default)
    except ValueError:
        raise ConfigError(f"{option} has {part[:40]!r}; it takes {example}, joined by commas.") from None
    for value, smallest in zip(pair, least, strict=True):
        if not smallest <= value <= LARGEST_COUNT:
            raise ConfigError(
                f"{option} has {part[:40]!r}, and {value} isn't from {smallest} to {LARGEST_COUNT}. "
                f"It takes {example}, joined by commas."
            )
    return pair


def ladder_of(
    text: str | None, settings: Settings, option: str = "--ladder", *, config: Path | None = None
) -> CaptureSizes | None:  # fmt: skip
    """The ladder given as ``1,2,4,8`` or as a plan file; None for the policy's own.

    Whether a plan file is another model's is said, as far as it notes one.

    Args:
        text: the value; None is no ladder.
        settings: the deployment's limits.
        option: whose value it is.
        config: the model's folder or config.json, where it is known.

    Raises:
        LadderError: see `kpolicy.ladders.check_sizes`.
        ConfigError: a part isn't a whole number, or the plan can't be used.
    """
    if text is None:
        return None
    if text.endswith(".json") or os.path.isfile(text):
        return _planned(text, settings, option, config)
    try:
        sizes = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(
            f"{option} is {text[:60]!r}; it takes capture sizes joined by commas, 1,2,4,8, or a plan file."
        ) from None
    return CaptureSizes.of(sizes, settings)


def _planned(path: str, settings: Settings, option: str, config: Path | None) -> CaptureSizes:
    """The sizes of a plan file, for a deployment like the one it was made for."""
    from kpolicy.schemas import read_plan

    plan = read_plan(path)
    if plan.settings.num_speculative_tokens != settings.num_speculative_tokens:
        raise ConfigError(
            f"{option} {path} was planned for {plan.settings.num_speculative_tokens} draft tokens a row, and here are "
            f"{settings.num_speculative_tokens}. Plan again with the drafts that will run."
        )
    plan.sizes.check(settings)
    differs = "" if config is None else plan.made_for_another(config)
    if differs:
        sys.stderr.write(f"kpolicy: {option} {path} was {differs}; its sizes are taken\n")
    return plan.sizes
