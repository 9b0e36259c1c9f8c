"""What to do first: one sentence, and what to paste."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kpolicy import __version__
from kpolicy.engine_flags import emit, engine_of
from kpolicy.report.runs import Planned, Run
from kpolicy.schemas import dumps
from kpolicy.simulate import Server

__all__ = ["NEAR", "Advice", "Paste", "advise", "best_of"]

NEAR = 0.005
"""Runs whose measure differs by less than this share count as equally good; the one with less graph memory is taken.
A run that serves fewer requests than another by more than it isn't compared: its requests are others, and fewer."""


@attrs.frozen(kw_only=True)
class Paste:
    """Something to paste or to save.

    Args:
        title: what it is for.
        how: what to do with it.
        text: the flags, the file or the code.
        file_name: what to call it where it is a file; empty where it is pasted.
        warnings: where an engine won't do as asked.
    """

    title: str
    how: str
    text: str
    file_name: str = ""
    warnings: tuple[str, ...] = ()


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
    level = run.result.goodput
    return level.ttft_ms is not None or level.gap_ms is not None


def badness(run: Run) -> float:
    """What is compared: with a service level requests that miss it, as a share; else the mean time to the last token.

    A run that served nothing is worst.
    """
    result = run.result
    if not result.served:
        return float("inf")
    return 1 - result.goodput.share if has_level(run) else result.e2e.mean


def best_of(runs: Sequence[Run]) -> Run:
    """The best run; of those that are near it the one with the least graph memory, then the first.

    Only runs that serve as many requests as any are considered.
    """
    most = max(run.result.served for run in runs)
    runs = [run for run in runs if not _fewer(run.result.served, most)]
    least = min(map(badness, runs))
    return min((run for run in runs if _near(badness(run), least, run)), key=lambda run: run.result.graph_bytes)


def _fewer(served: int, most: int) -> bool:
    return served < most * (1 - NEAR)


def _near(value: float, least: float, run: Run) -> bool:
    return value == least or value - least < (NEAR if has_level(run) else NEAR * least)


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
    sentence = _sentence(best, base, runs)
    details = [_measure(best)]
    fewer = [run for run in within if _fewer(run.result.served, best.result.served)]
    if fewer:
        counted = ", ".join(f"{run.name} {run.result.served:,}" for run in fewer)
        details.append(
            f"Not compared, because they serve fewer requests than {best.name} with {best.result.served:,}: {counted}."
        )
    plan = planned.get(id(base))
    if plan is None and not best.result.measured:
        details.append(
            f"By {best.result.costs}: nothing was measured on your device. Measure a profile (kpolicy run "
            "--save-profile) and make this report again before you rely on it."
        )
    if server.ranks > 1:
        details.append(f"Sizes are planned for one rank; {server.ranks} were simulated, so none were planned.")
    if plan is not None:
        details += _held_out(plan)
    paste = _paste(best, server)
    if engine_of(best.policy) is None:
        # What can be done in a serving engine as it is.
        in_engine = [run for run in within if engine_of(run.policy) is not None]
        if in_engine:
            paste += _paste(best_of(in_engine), server)
        paste += _plan_file(best, plans)
    return Advice(sentence=sentence, details=tuple(details), paste=tuple(paste), best=best)


def _sentence(best: Run, base: Run, runs: Sequence[Run]) -> str:
    others = [run for run in runs if run.policy != best.policy]
    text = f"Run {best.policy}"
    if others:
        text += f" ({_against(best, best_of(others))})"
    if best.kind != "planned":
        if not best.result.graphs:
            return f"{text}, without graphs."
        own = "its own" if best.kind == "own" else "the given"
        return f"{text} with {own} capture sizes, {_graphs(best)}."
    now, was = best.result, base.result
    own = "its own" if base.kind == "own" else "the given ones"
    return (
        f"{text} with the capture sizes below in place of {own}: {_graphs(best)} instead of {was.graphs}, "
        f"{_mib(now.graph_bytes)} instead of {_mib(was.graph_bytes)} of graph memory, {now.capture_s:.1f} s instead of "
        f"{was.capture_s:.1f} s of capture, and {_change(best, base)}."
    )


def _against(best: Run, other: Run) -> str:
    if _fewer(other.result.served, best.result.served):
        return f"{best.result.served:,} requests served, {other.result.served:,} with {other.policy}"
    if _near(max(badness(best), badness(other)), min(badness(best), badness(other)), best):
        return f"as good as {other.policy}"
    return f"{_change(best, other)} than with {other.policy}" if not has_level(best) else (
        f"{best.result.goodput.share:.1%} good requests, {other.result.goodput.share:.1%} with {other.policy}"
    )  # fmt: skip


def _change(run: Run, other: Run) -> str:
    """How a run compares with another, by what is compared."""
    if _fewer(other.result.served, run.result.served):
        return f"{run.result.served:,} requests served instead of {other.result.served:,}"
    if has_level(run):
        now, was = f"{run.result.goodput.share:.1%}", f"{other.result.goodput.share:.1%}"
        return f"as many good requests ({now})" if now == was else f"{now} good requests instead of {was}"
    if not other.result.e2e.mean:
        return "no request to compare"
    change = run.result.e2e.mean / other.result.e2e.mean - 1
    if abs(change) < 0.0005:
        return "requests that end as soon"
    return f"requests that end {abs(change):.1%} {'sooner' if change < 0 else 'later'} on average"


def _measure(best: Run) -> str:
    what = "share of good requests" if has_level(best) else "mean time to the last token"
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
    return f"{run.result.graphs} graph{'' if run.result.graphs == 1 else 's'}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB" if count >= 10 << 20 else f"{count / 2**20:,.2g} MiB" if count else "0 MiB"


# What to paste


def _paste(run: Run, server: Server) -> list[Paste]:
    """The flags of the run's engine; nothing where it has none or captures nothing."""
    engine, sizes = engine_of(run.policy), run.sizes
    if engine is None or not (sizes.decode or sizes.mixed or sizes.piecewise):
        return []
    made = emit(engine, sizes, server.settings, policy=run.policy)
    return [
        Paste(
            title=f"For {engine}",
            how=made.how,
            text=made.text,
            file_name="extra.yaml" if made.file else "",
            warnings=made.warnings,
        )
    ]


def _plan_file(run: Run, plans: Sequence[Planned]) -> list[Paste]:
    """For one of kpolicy's own policies: how an Engine is made, and the plan file it reads."""
    plan = next((plan for plan in plans if plan.run is run), None)
    if plan is None:
        given = f", ladder={run.sizes!r}" if run.kind == "given" else ""
        return [Paste(title="For kpolicy", how="make the Engine so", text=f"Engine(policy={run.policy!r}{given})")]
    code = (
        "from kpolicy import Engine\nfrom kpolicy.schemas import read_plan\n\n"
        'plan = read_plan("plan.json")\n'
        f"engine = Engine(policy={run.policy!r}, ladder=plan.sizes, settings=plan.settings, attention=plan.attention)"
    )
    return [
        Paste(
            title="For kpolicy", how="save the plan file, and make the Engine so; or give both to kpolicy run: "
            f"--policy {run.policy} --ladder plan.json", text=code,
        ),
        Paste(
            title="The plan file", how="save as plan.json", file_name="plan.json",
            text=dumps(plan.found.file(plan.budget, kpolicy=__version__)),
        ),
    ]  # fmt: skip
