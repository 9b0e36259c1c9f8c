"""`kpolicy plan`: the capture sizes for a trace under a budget, and the flags to give an engine."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from kpolicy import __version__
from kpolicy.budgets import Budget, Usage, amount
from kpolicy.cli.options import COMMAND, Deployment, Json, at_least, settings_of, whole
from kpolicy.cli.render import console, grid, print_json, show
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.engine_flags import ENGINES, Emitted, emit
from kpolicy.errors import ConfigError, UnknownNameError, near_miss
from kpolicy.planning.plan import SMOOTHING, WORTH
from kpolicy.planning.workload import DECODE
from kpolicy.policies import get_policy
from kpolicy.scheduling.traces import Trace
from kpolicy.simulate import Drafts, Server
from kpolicy.trace_plan import Score, TracePlan, plan_trace

__all__ = ["plan"]

DEFAULT_WINDOW_S = 300.0
MAX_NUM_TOKENS, KV_TOKENS = 2048, 400_000
FORMATS = (*ENGINES, "json")
_POLICY_OF = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt_llm:enable_padding=true,prefill=breakable",
    "vllm-ascend": "ascend",
}
"""The policy that an engine's flags are planned for where none is given."""
_BYTES = {"KIB": 10, "MIB": 20, "GIB": 30, "KB": 10, "MB": 20, "GB": 30, "BYTES": 0, "B": 0}


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
    rate: Annotated[float | None, Parameter(help="Speed the arrivals up by this factor, after --window.")] = None,
    deployment: Deployment = Deployment(),  # noqa: B008
    max_num_tokens: Annotated[
        int, Parameter(group="Deployment", converter=whole, help="Token budget of a step (chunked prefill).")
    ] = MAX_NUM_TOKENS,
    kv_tokens: Annotated[
        int, Parameter(group="Deployment", converter=whole, help="KV capacity in tokens, all requests together.")
    ] = KV_TOKENS,
    speculative: Annotated[
        int, Parameter(group="Deployment", converter=whole, help="Draft tokens verified a decode row.")
    ] = 0,
    acceptance: Annotated[
        float, Parameter(group="Deployment", help="Probability that a draft is accepted, if all before it were.")
    ] = 0.7,
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
    exact: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Solve an integer programme where prices differ in a list."),
    ] = False,
    seed: Annotated[int, Parameter(converter=whole, help="Of accepted drafts.")] = 0,
    json: Json = False,
) -> None:
    """Choose the capture sizes for a trace under a budget, and print what to give an engine."""
    _known(emit)
    name = policy or _POLICY_OF.get(emit or "", "auto")
    limits, most_sizes = _budget(budget, deployment)
    requests = _requests(trace, start, window, rate)
    server = Server(
        settings=settings_of(
            max_num_reqs=deployment.most_reqs(), max_num_tokens=("--max-num-tokens", max_num_tokens),
            num_speculative_tokens=("--speculative", speculative),
        ),
        kv_tokens=at_least("--kv-tokens", kv_tokens, 16), drafts=Drafts(acceptance=acceptance), warm=True,
    )  # fmt: skip
    if deployment.ladder is not None:
        raise ConfigError("--ladder is what plan looks for; leave it out, or give it to `kpolicy run`.")
    get_policy(name)
    shown = console(stderr=True)
    found = plan_trace(
        requests, policy=name, budget=limits, most_sizes=most_sizes, costs=_costs(deployment),
        attention=deployment.support(), server=server, objective=deployment.objective,
        multiple_of=at_least("--multiple-of", multiple_of, 1), largest=_largest(largest),
        smoothing=_share("--smoothing", smoothing),
        worth=None if worth is None else _share("--worth", worth), exact=exact, seed=at_least("--seed", seed, 0),
        hold_out=len(requests) > 1,
        progress=None if json or not sys.stderr.isatty() else lambda what: shown.print(what, style="dim"),
    )  # fmt: skip
    emitted = _emitted(emit, found)
    if out is not None:
        _write(out, emitted, found, limits, whole_plan=emit in (None, "json"))
    if json:
        print_json(_as_dict(found, emitted, limits, most_sizes))
    else:
        _render(found, emitted, emit, out, limits, most_sizes)


# What is asked


def _known(name: str | None) -> None:
    if name is not None and name not in FORMATS:
        raise UnknownNameError("format of --emit", name, FORMATS)


def _requests(path: Path | None, start: float, window: float, rate: float | None) -> Trace:
    from kpolicy.cli.run import Requests

    asked = Requests(trace=path, window=window, start=start, rate=rate).read()
    return asked if rate in (None, 1) else asked.scaled(rate)


def _costs(deployment: Deployment) -> CostTable:
    """The profile's costs, or the analytic ones of the model in --config.

    Raises:
        ConfigError: the profile is of another model than the config.
    """
    if deployment.profile is None:
        if deployment.config is None:
            return analytic_costs()
        from kpolicy.figures import model_figures

        return analytic_costs(model_figures(deployment.config))
    from kpolicy.schemas import read_profile

    profile = read_profile(deployment.profile)
    if deployment.config is not None:
        _same_model(profile.model, deployment.config, deployment.profile)
    return profile.costs


def _same_model(measured: str, config: Path, profile: Path) -> None:
    """Refuse a profile of another model: its times would be of no use."""
    import json

    folder = config if config.is_dir() else config.parent
    data = json.loads((folder / "config.json" if config.is_dir() else config).read_text(encoding="utf-8"))
    names = {str(name) for name in data.get("architectures") or ()} | {str(data.get("model_type", "")), folder.name}
    said = re.sub(r"[^a-z0-9]", "", measured.lower())
    if not any(name and re.sub(r"[^a-z0-9]", "", name.lower()) in said for name in names):
        raise ConfigError(
            f"--profile {profile} was measured with {measured!r}, and --config {config} is of "
            f"{', '.join(sorted(filter(None, names)))}. Measure that model, or give the config that the profile is of."
        )


def _budget(text: str | None, deployment: Deployment) -> tuple[Budget | None, int | None]:
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
    units |= {"graphs": "graphs"} | {name.lower(): "bytes" for name in _BYTES}
    if not found or unit not in units:
        near = near_miss(unit, tuple(filter(None, units))) if found else None
        hint = f" Did you mean {near}?" if near else ""
        raise ConfigError(f"--budget has {part[:40]!r}; it takes {_EXAMPLES}, joined by commas.{hint}")
    name, value = units[unit], float(found[1])
    if name == "bytes":
        value = int(value * (1 << _BYTES[unit.upper()]))
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


def _share(option: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ConfigError(f"{option} is {value:g}; it is a share of the steps from 0 to under 1.")
    return value


# What comes out


def _emitted(engine: str | None, found: TracePlan) -> Emitted | None:
    if engine in (None, "json"):
        return None
    assert engine is not None  # noqa: S101 - said above
    return emit(engine, found.plan.sizes, found.settings, policy=found.policy)


def plan_file(found: TracePlan, budget: Budget | None = None) -> Any:
    """The plan as a `LadderPlan`, whose file ``--ladder`` takes and whose sizes an Engine takes."""
    from kpolicy.schemas import LadderPlan

    policy, planned = get_policy(found.policy), found.plan
    keys = policy.plan(planned.sizes, found.claims, found.settings) if _captures(found) else ()
    return LadderPlan(
        sizes=planned.sizes,
        keys=keys,
        settings=found.settings,
        attention=found.claims,
        budget=budget or Budget(),
        policy=found.policy,
        costs_version=found.costs.version,
        planned_from={
            "trace": found.source,
            "histogram": found.replayed.histogram.as_dict(),
            "kpolicy": __version__,
            "command": " ".join(("kpolicy", *COMMAND.get())),
            "settled": found.replayed.settled,
        },
    )


def _captures(found: TracePlan) -> bool:
    sizes = found.plan.sizes
    return bool(sizes.decode or sizes.mixed or sizes.piecewise)


def _write(path: Path, emitted: Emitted | None, found: TracePlan, budget: Budget | None, *, whole_plan: bool) -> None:
    from kpolicy.schemas import write_plan, write_text

    if whole_plan:
        write_plan(path, plan_file(found, budget))
    elif emitted is not None:
        write_text(path, emitted.text + "\n")


def _as_dict(
    found: TracePlan, emitted: Emitted | None, budget: Budget | None, most_sizes: int | None
) -> dict[str, Any]:
    planned, held = found.plan, found.held_out
    curve = planned.curve_us[: max(planned.num_sizes + 17, 33)]
    return {
        "kpolicy": __version__,
        "policy": found.policy,
        "trace": found.source,
        "costs": found.costs.version,
        "measured": found.costs.measured,
        "settings": attrs.asdict(found.settings),
        "budget": _limits(budget, most_sizes),
        "lists": {name: list(sizes) for name, sizes in planned.lists.items()},
        "sizes": {name: list(sizes) for name, sizes in attrs.asdict(planned.sizes).items()},
        "num_sizes": planned.num_sizes,
        "steps": planned.steps,
        "step_us": planned.step_us,
        "eager_us": planned.eager_us,
        "gap": planned.gap,
        "price_us": planned.price_us,
        "next_list": planned.next_list,
        "curve_us": [us if math.isfinite(us) else None for us in curve],
        "settled": found.replayed.settled,
        "rounds": [{"steps": each.steps, "step_us": each.step_us} for each in found.replayed.rounds],
        "scores": [_score(each) for each in (found.own, found.default, *found.others)],
        "held_out": None
        if held is None
        else {
            "steps": held.steps,
            "step_us": held.step_us,
            "default_us": held.default_us,
            "best_us": held.best_us,
            "num_sizes": held.plan.num_sizes,
        },
        "emit": None
        if emitted is None
        else {
            "engine": emitted.engine,
            "arguments": list(emitted.arguments),
            "file": emitted.file,
            "warnings": list(emitted.warnings),
        },
        "notes": list(found.notes),
    }


def _score(score: Score) -> dict[str, Any]:
    return {
        "name": score.name,
        "policy": score.policy,
        "num_sizes": score.num_sizes,
        "num_keys": score.num_keys,
        "usage": attrs.asdict(score.usage),
        "step_us": score.step_us,
    }


def _limits(budget: Budget | None, most_sizes: int | None) -> dict[str, Any]:
    found = {} if budget is None else {name: limit for name, limit in attrs.asdict(budget).items() if limit is not None}
    return found | ({} if most_sizes is None else {"sizes": most_sizes})


def _render(
    found: TracePlan, emitted: Emitted | None, asked: str | None, out: Path | None, budget: Budget | None,
    most_sizes: int | None,
) -> None:  # fmt: skip
    made, planned, settings = console(), found.plan, found.settings
    limits = _limits(budget, most_sizes)
    said = ", ".join(f"{value} sizes" if name == "sizes" else amount(name, value) for name, value in limits.items())
    lines = [
        f"trace    {found.source}",
        f"         {planned.steps:,.0f} steps replayed, {len(found.replayed.rounds)} times"
        + (" until the plan settled" if found.replayed.settled else ", and the plan didn't settle"),
        f"setting  {found.policy}, at most {settings.max_num_reqs:,} requests and {settings.max_num_tokens:,} tokens a "
        "step" + (f", {settings.num_speculative_tokens} drafts" if settings.num_speculative_tokens else ""),
        f"costs    {found.costs.version}" + ("" if found.costs.measured else " (analytic, not measured)"),
        f"budget   {said or f'none: sizes while one more takes {WORTH:.1%} off the mean step'}",
        "",
    ]
    lines += [f"{name:8s} {_list(name, sizes)}" for name, sizes in planned.lists.items()]
    gap = f", at most {planned.gap:.2%} from the best" if planned.gap > 1e-9 else ""
    lines.append(f"         {planned.num_sizes} sizes, {_usage(found.own.usage)}{gap}")
    for line in lines:
        made.print(line, highlight=False, markup=False, soft_wrap=True)
    made.print()
    show(_prices(found), made)
    made.print()
    show(_scores(found), made)
    made.print()
    for line in _closing(found, emitted, asked, out, budget):
        made.print(line, highlight=False, markup=False, soft_wrap=True)


def _list(name: str, sizes: Sequence[int]) -> str:
    unit = "requests" if name == DECODE else "tokens"
    return f"{','.join(map(str, sizes))} ({unit})" if sizes else "nothing: eager costs least within the budget"


def _usage(usage: Usage) -> str:
    return f"{usage.graphs:,} device graphs, {usage.seconds:.1f} capture seconds, {usage.bytes / 2**20:,.0f} MiB"


def _prices(found: TracePlan) -> Any:
    """What one more size takes off a step, around the number that was chosen."""
    planned = found.plan
    numbers = ("mean step ms", "one more takes off, us", "of the step")
    table = grid("sizes", *numbers, numbers=("sizes", *numbers))
    chosen, last = planned.num_sizes, len(planned.curve_us) - 1
    wanted = {0, 1, 2, 4, 8, 16, 32, 64, 128, chosen - 1, chosen, chosen + 1, chosen + 8}
    for count in sorted(count for count in wanted if 0 <= count <= last and math.isfinite(planned.curve_us[count])):
        us, gain = planned.curve_us[count], planned.gain_us(count)
        mark = "* " if count == chosen else ""
        table.add_row(f"{mark}{count}", f"{us / 1e3:,.3f}", f"{gain:,.1f}", f"{gain / us:.3%}")
    return table


def _scores(found: TracePlan) -> Any:
    numbers = ("sizes", "keys", "mean step ms", "against the plan", "capture s", "MiB")
    table = grid("list, by its own rule", *numbers, numbers=numbers)
    for each in (found.own, found.default, *found.others):
        table.add_row(
            each.name, f"{each.num_sizes:,}", f"{each.num_keys:,}", f"{each.step_us / 1e3:,.3f}",
            f"{each.step_us / found.own.step_us - 1:+.2%}", f"{each.usage.seconds:,.1f}",
            f"{each.usage.bytes / 2**20:,.0f}",
        )  # fmt: skip
    return table


def _closing(
    found: TracePlan, emitted: Emitted | None, asked: str | None, out: Path | None, budget: Budget | None
) -> list[str]:
    held, lines = found.held_out, []
    if held is not None:
        lines.append(
            f"out of sample: planned on the first half ({held.plan.num_sizes} sizes), a step of the second takes "
            f"{held.step_us / 1e3:,.3f} ms, {held.against_default:+.2%} against the default sizes and "
            f"{held.step_us / held.best_us - 1:+.2%} against the best that half could have had"
        )
    else:
        lines.append("out of sample: not scored, because there is one request")
    lines.append(
        f"price of one more size: {found.plan.price_us:,.1f} us off a mean step"
        + (f", in the list {found.plan.next_list}" if found.plan.next_list else "")
    )
    lines += [f"note: {note}" for note in found.notes]
    if emitted is not None:
        lines += ["", f"{emitted.engine}: {emitted.how}", "", emitted.text, ""]
        lines += [f"warning: {warning}" for warning in emitted.warnings]
    elif asked == "json" and out is None:
        from kpolicy.schemas import dumps

        lines += ["", dumps(plan_file(found, budget)).rstrip()]
    if out is not None:
        lines.append(f"written to {out}")
    return lines
