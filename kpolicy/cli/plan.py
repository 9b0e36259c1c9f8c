"""`kpolicy plan`: the capture sizes for a trace under a budget, and the flags to give an engine."""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from kpolicy.attention.fields import identity
from kpolicy.budgets import Budget
from kpolicy.cli.options import Deployment, Json, at_least, whole
from kpolicy.cli.plan_output import as_dict, emitted_for, render, write
from kpolicy.cli.render import console, print_json, told_after
from kpolicy.cli.requests import read_requests
from kpolicy.cli.serving_options import Seed, Served
from kpolicy.cli.step_log import files_of
from kpolicy.cli.turns import check_files, unwritten
from kpolicy.engine_flags import ENGINES
from kpolicy.errors import ConfigError, UnknownNameError, near_miss
from kpolicy.planning.plan import SMOOTHING
from kpolicy.policies import get_policy
from kpolicy.trace_plan import plan_trace

__all__ = ["budget_of", "plan"]

DEFAULT_WINDOW_S = 300.0
FORMATS = (*ENGINES, "json")
_POLICY_OF = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt_llm:enable_padding=true,prefill=breakable",
    "vllm-ascend": "ascend",
}
"""The policy that an engine's flags are planned for where none is given."""
_BYTES = {
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9, "bytes": 1, "b": 1,
}  # fmt: skip


def plan(
    trace: Annotated[
        Path | None,
        Parameter(help="An Azure, Mooncake or BurstGPT trace, gzip or not. By default the one that run takes."),
    ] = None,
    /,
    *,
    budget: Annotated[
        str | None,
        Parameter(
            help="What capturing may take: capture sizes (40), seconds (30s), memory (2GiB), device streams "
            "(1800streams) or device graphs (500graphs), joined by commas. By default sizes are added while one more "
            "still takes a thousandth off the mean step.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        Parameter(help="The policy that will run, with its arguments. By default --emit's engine, else auto."),
    ] = None,
    emit: Annotated[
        str | None, Parameter(name="--emit", help=f"Print what an engine takes: {', '.join(FORMATS)}.")
    ] = None,
    out: Annotated[
        Path | None, Parameter(help="Write what --emit prints to a file; a plan file without --emit.")
    ] = None,
    window: Annotated[
        float, Parameter(help="Seconds of the trace to plan for; 0 is the whole trace.")
    ] = DEFAULT_WINDOW_S,
    start: Annotated[float, Parameter(help="Second of the trace to start at.")] = 0.0,
    rate: Annotated[float, Parameter(help="Speed the arrivals up by this factor, after --window.")] = 1.0,
    served: Served = Served(),  # noqa: B008
    deployment: Deployment = Deployment(),  # noqa: B008
    multiple_of: Annotated[
        int, Parameter(converter=whole, help="Sizes are multiples of this, such as the tensor-parallel size.")
    ] = 1,
    largest: Annotated[
        str | None, Parameter(help="Sizes that lists must end with, such as decode=256,prefill=2048 or all=512.")
    ] = None,
    smoothing: Annotated[
        float, Parameter(help="Share of the steps that is spread over sizes that weren't seen.")
    ] = SMOOTHING,
    worth: Annotated[
        float | None,
        Parameter(
            help="Add sizes only while one more takes this share off the mean step. By default 0.001 without "
            "--budget, and 0 with one."
        ),
    ] = None,
    most_loss: Annotated[
        str | None,
        Parameter(
            help="Let no step, whatever its size, take longer than in a graph of its own size by more than this share: "
            "0.02, or by list decode=0.01,prefill=0.05."
        ),
    ] = None,
    against: Annotated[
        str | None,
        Parameter(
            help="With --most-loss, compare a step with the graph that this policy's own sizes have for it (sglang, "
            "vllm), padding and all, and not with one of its own size."
        ),
    ] = None,
    exact: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Solve an integer programme where prices differ in a list."),
    ] = False,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Choose the capture sizes for a trace under a budget, and print what to give an engine."""
    _known(emit)
    name = policy or _POLICY_OF.get(emit or "", "auto")
    limits, most_sizes = budget_of(budget, deployment)
    requests = read_requests(trace, start=start, window=window, rate=rate)
    model = served.costs(deployment)
    # Planning is for a server that runs; what a start costs is what budgets are for.
    server = attrs.evolve(served.server(deployment, model), warm=True)
    if served.warm:
        raise ConfigError(
            "--warm says nothing here: sizes are planned for a server whose graphs are there. Leave it out."
        )
    for option, level in (("--slo-ttft-ms", served.slo_ttft_ms), ("--slo-gap-ms", served.slo_gap_ms)):
        if level is not None:
            raise ConfigError(
                f"{option} has no say: a plan minimises step time. Leave it out, or give it to `kpolicy report`."
            )
    if deployment.ladder is not None:
        raise ConfigError("--ladder is what plan looks for; leave it out, or give it to `kpolicy run`.")
    get_policy(name)
    if against is not None and most_loss is None:
        raise ConfigError("--against says what --most-loss compares with; give that too: --most-loss 0 for no loss.")
    check_files([("--out", files_of("--out", out, ["plan"], "plan.json")[0])], deployment.reads([trace]))
    shown = console(stderr=True)
    found = plan_trace(
        requests, policy=name, budget=limits, most_sizes=most_sizes, costs=model.costs,
        attention=deployment.support(), server=server, objective=deployment.objective,
        multiple_of=at_least("--multiple-of", multiple_of, 1), largest=_largest(largest),
        smoothing=_share("--smoothing", smoothing),
        worth=None if worth is None else _share("--worth", worth), exact=exact,
        most_loss=_loss(most_loss), against=against, seed=at_least("--seed", seed, 0),
        hold_out=len(requests) > 1,
        progress=None if json or not sys.stderr.isatty() else lambda what: shown.print(what, style="dim"),
    )  # fmt: skip
    if deployment.config is not None:
        found = attrs.evolve(found, model=identity(deployment.config))
    doubts = [f"{doubt}." for doubt in model.doubts]
    if served.slower_host != 1:
        doubts.append(
            f"host: steps were replayed on one that is {served.slower_host:g} times as slow; their times here are by "
            "the profile as it is."
        )
    found = attrs.evolve(found, notes=(*found.notes, *doubts))
    emitted = emitted_for(emit, found)
    lost: list[str] = []
    if out is not None:
        lost = unwritten(partial(write, out, emitted, found, limits, whole_plan=emit in (None, "json")))
    with told_after(lost):
        if json:
            print_json(as_dict(found, emitted, limits, most_sizes))
        else:
            render(found, emitted, emit, None if lost else out, limits, most_sizes, worth)
    return 1 if lost else 0


# What is asked


def _known(name: str | None) -> None:
    if name is not None and name not in FORMATS:
        raise UnknownNameError("format of --emit", name, FORMATS)


def budget_of(text: str | None, deployment: Deployment) -> tuple[Budget | None, int | None]:
    """The budget, and the most capture sizes.

    Raises:
        ConfigError: a part isn't an amount, or a resource is limited twice.
    """
    limits: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        name, value = _limit(part)
        if name in limits:
            raise ConfigError(f"--budget limits {name} twice; give each once.")
        limits[name] = value
    given = deployment.budget()
    for name, limit in attrs.asdict(given).items() if given is not None else ():
        if limit is not None:
            if name in limits:
                raise ConfigError(f"--budget and --budget-{name} both limit {name}; give one of them.")
            limits[name] = limit
    sizes = limits.pop("sizes", None)
    return Budget(**limits) if limits else None, None if sizes is None else int(sizes)  # type: ignore[arg-type]


_EXAMPLES = "capture sizes (40), seconds (30s), memory (2GiB), streams (1800streams) or device graphs (500graphs)"


def _limit(part: str) -> tuple[str, float]:
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)", part.strip())
    unit = found[2].lower() if found else ""
    units = {"": "sizes", "sizes": "sizes", "s": "seconds", "seconds": "seconds", "streams": "streams"}
    units |= {"graphs": "graphs"} | dict.fromkeys(_BYTES, "bytes")
    if not found or unit not in units:
        near = near_miss(unit, tuple(filter(None, units))) if found else None
        hint = f" Did you mean {near}?" if near else ""
        raise ConfigError(f"--budget has {part[:40]!r}; it takes {_EXAMPLES}, joined by commas.{hint}")
    name, value = units[unit], float(found[1])
    if name == "bytes":
        value = int(value * _BYTES[unit])
    elif name != "seconds":
        if value != int(value):
            raise ConfigError(f"--budget has {part[:40]!r}; {name} are whole numbers.")
        value = int(value)
    return name, value


def _largest(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    found = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not value.isdecimal():
            raise ConfigError(f"--largest has {part[:40]!r}; it takes LIST=SIZE, such as decode=256,prefill=2048.")
        found[name] = int(value)
    return found


def _loss(text: str | None) -> float | dict[str, float] | None:
    if text is None:
        return None
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if not 0 <= found[name] < math.inf or ("" in found and len(found) > 1):
            raise ConfigError(
                f"--most-loss has {part[:40]!r}; it takes a share of a step's time from 0 up, such as 0.02, or "
                "LIST=SHARE, such as decode=0.01,prefill=0.05."
            )
    return found.get("", found)


def _share(option: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ConfigError(f"{option} is {value:g}; it is a share from 0 to under 1.")
    return value
