"""What to do first: one sentence, and what to paste."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kpolicy.engine_flags import engine_of
from kpolicy.planning.plan import WORTH
from kpolicy.planning.workload import DECODE, LIST
from kpolicy.report.curves import LATENCIES
from kpolicy.report.html import ms
from kpolicy.report.paste import Paste, paste_for_kpolicy, paste_of
from kpolicy.report.runs import Planned, Run
from kpolicy.report.smallest import none_below
from kpolicy.simulate import Server
from kpolicy.words import some

__all__ = ["NEAR", "Advice", "Paste", "advise", "best_of"]

NEAR = 0.005
"""Runs whose measure differs by less than this share count as equally good; the one with less graph memory is taken.
A run that serves fewer requests than another by more than it isn't compared: its requests are others, and fewer."""
_LONGER = 0.05
"""Latencies that advised sizes make longer by more than this share are told."""


@attrs.frozen(kw_only=True)
class Advice:
    """What to do first.

    Args:
        sentence: the one thing.
        details: why, and what it rests on.
        paste: what to paste, in order.
        best: the run that it advises; None where no graph is within the budget, or no request was served.
    """

    sentence: str
    details: tuple[str, ...]
    paste: tuple[Paste, ...]
    best: Run | None


def has_level(run: Run) -> bool:
    """Whether a service level was given."""
    return run.result.goodput.share is not None


def _by_level(runs: Sequence[Run]) -> bool:
    """Whether runs are compared by good requests: with a service level that is met at all."""
    return any(map(_good, runs))


def _good(run: Run) -> float:
    """Share of good requests; 0 without a service level, by which nothing is compared then."""
    return run.result.goodput.share or 0.0


def badness(run: Run, *, by_level: bool) -> float:
    """What is compared: requests that miss the service level, as a share, or the mean time to the last token.

    A run that served nothing is worst.
    """
    result = run.result
    if not result.served:
        return float("inf")
    return 1 - _good(run) if by_level else result.e2e.mean


def best_of(runs: Sequence[Run]) -> Run:
    """The best run; of those that are near it the one with the least graph memory, then the first.

    Only runs that serve as many requests as any are considered. Of those that are near, planned sizes that take longer
    to capture than the sizes that they would replace are no gain.
    """
    most = max(run.result.served for run in runs)
    runs = [run for run in runs if not _fewer(run.result.served, most)]
    by_level = _by_level(runs)
    least = min(badness(run, by_level=by_level) for run in runs)
    near = [run for run in runs if _near(badness(run, by_level=by_level), least, by_level=by_level)]
    near = [run for run in near if not any(_slower_start(run, other) for other in near)]
    return min(near, key=lambda run: run.result.graph_bytes)


def _slower_start(run: Run, base: Run) -> bool:
    """Whether a run has planned sizes, another has its policy without them, and they take longer to capture."""
    if run.kind != "planned" or base.kind == "planned" or run.policy != base.policy:
        return False
    return run.result.capture_s > base.result.capture_s * (1 + NEAR)


def _fewer(served: int, most: int) -> bool:
    return served < most * (1 - NEAR)


def _near(value: float, least: float, *, by_level: bool) -> bool:
    return value == least or value - least < (NEAR if by_level else NEAR * least)


def advise(source: str, runs: Sequence[Run], plans: Sequence[Planned], within: Sequence[Run], server: Server) -> Advice:
    """What to do first.

    Args:
        source: the trace.
        runs: the policies without a plan.
        plans: the plans, that of the best policy first.
        within: the runs, with and without a plan, whose sizes are within the budget of the plans.
        server: the server that was simulated.
    """
    planned = {id(plan.base): plan for plan in plans}
    if not any(run.result.served for run in runs):
        refused = ", ".join(f"{count:,} {reason}" for reason, count in runs[0].result.refused.items())
        return Advice(
            sentence=f"No request of {source} was served ({refused}): give more KV tokens, or another trace or window.",
            details=(), paste=(), best=None,
        )  # fmt: skip
    if not within:
        return Advice(
            sentence=f"Run {best_of(runs).policy} without graphs, or raise the budget: within it nothing is worth "
            "capturing.",
            details=tuple(line for plan in plans for line in _held_out(plan)), paste=(), best=None,
        )  # fmt: skip
    best = best_of(within)
    base = next(run for run in runs if run.policy == best.policy)
    plan = planned.get(id(base))
    needless = plan is not None and best is base and _as_good(plan.run, base)
    sentence = _sentence(best, base, runs, plan if needless else None)
    if has_level(best) and not _by_level(within):
        sentence = f"No request meets the service level; {sentence[0].lower()}{sentence[1:]}"
    details = [_measure(best)]
    fewer = [run for run in within if _fewer(run.result.served, best.result.served)]
    if fewer:
        counted = ", ".join(f"{run.name} {run.result.served:,}" for run in fewer)
        details.append(
            f"Not compared, because they serve fewer requests than {best.name} with {best.result.served:,}: {counted}."
        )
    details += _longer(best, base)
    if plan is None and not best.result.measured:
        details.append(
            f"By {best.result.costs}: nothing was measured on your device. Measure a profile (kpolicy run "
            "--save-profile) and make this report again before you rely on it."
        )
    if server.ranks > 1:
        details.append(f"Sizes are planned for one rank; {server.ranks} were simulated, so none were planned.")
    if plan is not None:
        details[1:1] = _needless(plan) if needless else []
        details += none_below(plan.found, DECODE, LIST)
        details += _held_out(plan)
    paste = paste_of(best, server)
    if engine_of(best.policy) is None:
        paste += paste_for_kpolicy(best, plans)
        # What can be done in a serving engine as it is, and what that is worth: another policy, with its own sizes.
        in_engine = [run for run in within if engine_of(run.policy) is not None]
        if in_engine:
            other = best_of(in_engine)
            worth = f"{_graphs(other)}, {_mib(other.result.graph_bytes)} of graph memory, {_against(other, best)}"
            paste += [
                attrs.evolve(each, how=f"{each.how}. That is not {best.policy} but {other.name}: {worth}")
                for each in paste_of(other, server)
            ]
    return Advice(sentence=sentence, details=tuple(details), paste=tuple(paste), best=best)


def _as_good(run: Run | None, base: Run) -> bool:
    """Whether a planned run is near its policy's without a plan."""
    if run is None or _fewer(run.result.served, base.result.served):
        return False
    by_level = _by_level([run, base])
    better, worse = sorted(badness(each, by_level=by_level) for each in (run, base))
    return _near(worse, better, by_level=by_level)


def _sentence(best: Run, base: Run, runs: Sequence[Run], needless: Planned | None) -> str:
    others = [run for run in runs if run.policy != best.policy]
    text = f"Run {best.policy}"
    if others:
        text += f" ({_against(best, best_of(others))})"
    if best.kind != "planned":
        if not best.result.graphs:
            return f"{text}, without graphs."
        own = "its own" if best.kind == "own" else "the given"
        return f"{text} with {own} capture sizes, {_graphs(best)}{_beside(needless)}."
    now, was = best.result, base.result
    own = "its own" if base.kind == "own" else "the given ones"
    return (
        f"{text} with the capture sizes below in place of {own}: {_graphs(best)} instead of {was.graphs}, "
        f"{_mib(now.graph_bytes)} instead of {_mib(was.graph_bytes)} of graph memory, {now.capture_s:.1f} s instead of "
        f"{was.capture_s:.1f} s of capture, and {_change(best, base)}."
    )


def _beside(needless: Planned | None) -> str:
    """Why a plan that serves as well isn't advised."""
    if needless is None or needless.run is None:
        return ""
    now, was = needless.run.result, needless.base.result
    where = "within the budget they" if needless.limited else "they"
    return (
        f": {where} are as good as planned ones, which take {_mib(now.graph_bytes)} instead of {_mib(was.graph_bytes)} "
        f"of graph memory and {now.capture_s:.1f} s instead of {was.capture_s:.1f} s of capture for "
        f"{_change(needless.run, needless.base)}"
    )


def _needless(plan: Planned) -> list[str]:
    """Why planned sizes aren't taken, and how few would do where a budget has room for more than are worth it."""
    made, told = plan.found.plan, []
    if plan.run is not None and plan.run.result.graph_bytes < plan.base.result.graph_bytes:
        told.append("Planned sizes that have less graph memory and take longer to capture aren't taken.")
    least_us = WORTH * made.curve_us[-1]
    enough = max((k + 1 for k in range(made.num_sizes) if made.gain_us(k) >= least_us), default=0)
    if not plan.limited or enough >= made.num_sizes:
        return told
    longer = made.curve_us[enough] / made.curve_us[made.num_sizes] - 1
    told.append(
        "Within a budget a size is planned for whatever it saves, however little: "
        f"{some(made.num_sizes, 'size')} here. With the best {enough:,} alone steps would take {longer:.2%} longer. "
        f"Without a budget only sizes that take {WORTH:.1%} or more off a mean step are planned: try that, or --budget "
        f"{enough:,}."
    )
    return told


def _against(best: Run, other: Run) -> str:
    now, was = best.result, other.result
    if _fewer(was.served, now.served):
        return f"{some(now.served, 'request')} served, {was.served:,} with {other.policy}"
    by_level = _by_level([best, other])
    worse, better = sorted((badness(run, by_level=by_level) for run in (best, other)), reverse=True)
    if _near(worse, better, by_level=by_level):
        return f"as good as {other.policy}"
    if by_level:
        return f"{_good(best):.1%} good requests, {_good(other):.1%} with {other.policy}"
    return f"{_change(best, other)} than with {other.policy}"


def _change(run: Run, other: Run) -> str:
    """How a run compares with another, by what is compared."""
    if _fewer(other.result.served, run.result.served):
        return f"{some(run.result.served, 'request')} served instead of {other.result.served:,}"
    if _by_level([run, other]):
        now, was = f"{_good(run):.1%}", f"{_good(other):.1%}"
        return f"as many good requests ({now})" if now == was else f"{now} good requests instead of {was}"
    if not other.result.e2e.mean:
        return "no request to compare"
    change = run.result.e2e.mean / other.result.e2e.mean - 1
    if abs(change) < 0.0005:
        return "requests that end as soon"
    return f"requests that end {abs(change):.1%} {'sooner' if change < 0 else 'later'} on average"


def _longer(best: Run, base: Run) -> list[str]:
    """What the mean doesn't show: latencies that planned sizes make longer."""
    told = []
    for name, title in LATENCIES:
        now, was = getattr(best.result, name), getattr(base.result, name)
        for percent in ("p50", "p99"):
            us, before_us = getattr(now, percent), getattr(was, percent)
            if us > before_us * (1 + _LONGER):
                told.append(f"{title[0].lower()}{title[1:]} {percent} {ms(us)} ms instead of {ms(before_us)} ms")
    own = "its own" if base.kind == "own" else "the given"
    return [f"Longer than with {own} sizes: {', '.join(told)}."] if told else []


def _measure(best: Run) -> str:
    what = "mean time to the last token"
    if has_level(best):
        if _by_level([best]):
            what = "share of good requests"
        else:
            what += ", because no request meets the service level"
    return (
        f"Compared by the {what}; runs within {NEAR:.1%} of the best count as equal, and the one with the least graph "
        "memory is taken."
    )


def _held_out(plan: Planned) -> list[str]:
    held, lines = plan.found.held_out, list(plan.found.notes)
    if held is not None:
        lines.insert(
            0,
            f"Out of sample: sizes planned on the first half of the requests take {held.step_us / 1e3:,.3f} ms a step "
            f"on the second, {held.against_default:+.2%} against the default sizes.",
        )
    return lines


def _graphs(run: Run) -> str:
    return some(run.result.graphs, "graph")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB" if count >= 10 << 20 else f"{count / 2**20:,.2g} MiB" if count else "0 MiB"
