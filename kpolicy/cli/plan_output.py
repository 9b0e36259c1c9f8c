"""What `kpolicy plan` prints and writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kpolicy import __version__
from kpolicy.budgets import Budget, Usage, amount
from kpolicy.cli.options import COMMAND, step_limits
from kpolicy.cli.render import console, counted, grid, say, show
from kpolicy.engine_flags import Emitted, emit
from kpolicy.planning.plan import least_worth
from kpolicy.planning.workload import DECODE
from kpolicy.trace_plan import Score, TracePlan
from kpolicy.words import some

__all__ = ["as_dict", "emitted_for", "plan_file", "render", "write"]


def emitted_for(engine: str | None, found: TracePlan) -> Emitted | None:
    """What that engine takes; None where no engine is asked for."""
    if engine in (None, "json"):
        return None
    assert engine is not None  # noqa: S101 - said above
    return emit(engine, found.plan.sizes, found.settings, policy=found.policy, multiple_of=found.layout.multiple_of)


def plan_file(found: TracePlan, budget: Budget | None = None) -> Any:
    """The plan as a `LadderPlan`, whose file ``--ladder`` takes and whose sizes an Engine takes."""
    return found.file(budget, kpolicy=__version__, command=" ".join(("kpolicy", *COMMAND.get())))


def write(path: Path, emitted: Emitted | None, found: TracePlan, budget: Budget | None, *, whole_plan: bool) -> None:
    """Write the plan file, or what the engine takes: all of it or nothing."""
    from kpolicy.schemas import write_plan
    from kpolicy.writing import write_text

    if whole_plan:
        write_plan(path, plan_file(found, budget))
    elif emitted is not None:
        write_text(path, emitted.text + "\n")


def as_dict(found: TracePlan, emitted: Emitted | None, budget: Budget | None, most_sizes: int | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    planned, held = found.plan, found.held_out
    curve = planned.curve_us[: max(planned.num_sizes + 17, 33)]
    return {
        "kpolicy": __version__,
        "policy": found.policy,
        "trace": {"source": found.source, "requests": found.requests, "dropped": dict(found.dropped)},
        "refused": found.replayed.histogram.refused,
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


def render(
    found: TracePlan, emitted: Emitted | None, asked: str | None, out: Path | None, budget: Budget | None,
    most_sizes: int | None, worth: float | None,
) -> None:  # fmt: skip
    """Print the plan: the lists, what one more size would save, all scores, and what to give the engine."""
    made, planned, settings = console(), found.plan, found.settings
    lines = [
        f"trace    {found.source}",
        f"         {some(found.requests, 'request')}; rows dropped: {_dropped(found)}",
        f"         {some(round(planned.steps), 'step')} replayed, {some(len(found.replayed.rounds), 'time')}"
        + (" until the plan settled" if found.replayed.settled else ", and the plan didn't settle"),
        f"setting  {found.policy}, {step_limits(settings)}"
        + (f", {some(settings.num_speculative_tokens, 'draft')}" if settings.num_speculative_tokens else ""),
        f"costs    {found.costs.title}" + ("" if found.costs.measured else f" ({found.costs.source})"),
        f"budget   {_budget(budget, most_sizes, worth)}",
        "",
    ]
    lines += [f"{name:8s} {_list(name, sizes)}" for name, sizes in planned.lists.items()]
    gap = f", at most {planned.gap:.2%} from the best" if planned.gap > 1e-9 else ""
    lines.append(f"         {some(planned.num_sizes, 'size')}, {_usage(found.own.usage)}{gap}")
    for line in lines:
        say(made, line)
    made.print()
    show(_prices(found), made)
    made.print()
    show(_scores(found), made)
    made.print()
    for line in _closing(found, emitted, asked, out, budget):
        say(made, line)


def _budget(budget: Budget | None, most_sizes: int | None, worth: float | None) -> str:
    """What may be captured, and where sizes end before that."""
    limits = _limits(budget, most_sizes)
    said = [some(value, "size") if name == "sizes" else amount(name, value) for name, value in limits.items()]
    least = least_worth(budget, most_sizes) if worth is None else worth
    ends = f"sizes while one more takes {100 * least:g}% off the mean step" if least else ""
    return ", ".join([*said, *filter(None, [ends])]) if said else f"none: {ends or 'sizes while one more helps'}"


def _dropped(found: TracePlan) -> str:
    return counted(found.dropped) or "none"


def _list(name: str, sizes: Sequence[int]) -> str:
    unit = "requests" if name == DECODE else "tokens"
    return f"{','.join(map(str, sizes))} ({unit})" if sizes else "nothing: eager costs least within the budget"


def _usage(usage: Usage) -> str:
    return f"{some(usage.graphs, 'device graph')}, {usage.seconds:.1f} capture seconds, {usage.bytes / 2**20:,.0f} MiB"


def _prices(found: TracePlan) -> Any:
    """What one more size takes off a step, around the number that was chosen."""
    planned = found.plan
    numbers = ("mean step ms,\nsmoothed steps", "one more takes off, us", "of the step")
    table = grid("sizes", *numbers, numbers=("sizes", *numbers))
    chosen, last = planned.num_sizes, len(planned.curve_us) - 1
    wanted = {0, 1, 2, 4, 8, 16, 32, 64, 128, chosen - 1, chosen, chosen + 1, chosen + 8}
    for count in sorted(count for count in wanted if 0 <= count <= last and math.isfinite(planned.curve_us[count])):
        us, gain = planned.curve_us[count], planned.gain_us(count)
        mark = "* " if count == chosen else ""
        # What comes after the last one that was computed isn't known, and isn't nothing.
        told = ("-", "-") if count == last != chosen else (f"{gain:,.1f}", f"{gain / us:.3%}")
        table.add_row(f"{mark}{count}", f"{us / 1e3:,.3f}", *told)
    return table


def _scores(found: TracePlan) -> Any:
    numbers = ("sizes", "keys", "mean step ms", "against the plan", "capture s", "MiB")
    table = grid("list, by its own rule", *numbers, numbers=numbers)
    for each in (found.own, found.default, *found.others):
        # The policy's arguments stand above, in the setting.
        table.add_row(
            each.name.partition(":")[0], f"{each.num_sizes:,}", f"{each.num_keys:,}", f"{each.step_us / 1e3:,.3f}",
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
            f"out of sample: planned on the first half ({some(held.plan.num_sizes, 'size')}), a step of the second "
            f"takes {held.step_us / 1e3:,.3f} ms, {held.against_default:+.2%} against the default sizes and "
            f"{held.step_us / held.best_us - 1:+.2%} against the best that half could have had"
        )
    elif found.requests == 1:
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
