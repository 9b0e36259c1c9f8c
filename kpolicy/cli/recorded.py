"""Decision logs at the command line: `kpolicy explain-log`, and `kpolicy simulate --decisions`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from kpolicy.cli.options import Deployment, Json, ladder_of, whole
from kpolicy.cli.render import console, grid, print_json, render_explanation, show
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.kv_span import NOT_RECORDED
from kpolicy.modes import Mode
from kpolicy.reasons import Reason
from kpolicy.schemas import DecisionEntry, Log, read_decision_log
from kpolicy.simulate.recorded import Recorded, header_costs, header_sizes, limits, phase_of, replay
from kpolicy.words import some

__all__ = ["explain_log", "replay_command"]


def explain_log(
    log: Annotated[Path, Parameter(help="A decision log, as kpolicy-vllm and kpolicy-sglang write one.")],
    /,
    *,
    step: Annotated[
        int | None, Parameter(converter=whole, help="Explain this step: every way to run it, and why each lost.")
    ] = None,
    deployment: Deployment = Deployment(),  # noqa: B008
    json: Json = False,
) -> None:
    """Say what a served log's steps did and why: modes, reasons, padding, and what kept steps from a graph.

    `kpolicy vllm-explain` is the same command.
    """
    read = _read(log)
    if not read.entries:
        raise ConfigError(f"{log} has no decisions; serve some requests with it first.")
    if step is not None:
        _explain_step(read, step, deployment, json=json)
        return
    rows = _rows(read)
    report = {
        "policy": read.header.policy,
        "device": read.header.device,
        "model": read.header.model,
        "steps": len(read.entries),
        "cut_short": read.cut_short,
        "modes": rows,
        "eager": _eager(read),
    }
    if json:
        print_json(report)
        return
    _print(report)


def _read(path: Path) -> Log[DecisionEntry]:
    """The log; that it ends before its writer did is said."""
    read = read_decision_log(path)
    if read.cut_short:
        sys.stderr.write(
            f"kpolicy: {path} has no last line: who wrote it was cut short or is at it still, so steps after these "
            f"{len(read.entries):,} are missing.\n"
        )
    return read


def _explain_step(read: Log[DecisionEntry], step: int, deployment: Deployment, *, json: bool) -> None:
    if not 0 <= step < len(read.entries):
        raise ConfigError(f"--step is {step}; the log has steps 0 to {len(read.entries) - 1}.")
    entry = read.entries[step]
    settings = limits(read)
    given = ladder_of(deployment.ladder, settings, config=deployment.config)
    engine = Engine(
        "auto", attention=deployment.support(), ladder=given or header_sizes(read), settings=settings,
        costs=deployment.profiled() or header_costs(read).get(phase_of(entry.shape)), objective=deployment.objective,
    )  # fmt: skip
    explanation = attrs.evolve(engine.explain(entry.shape), policy="auto")
    if json:
        print_json({"recorded": dict(entry.decision), **explanation.as_dict()})
        return
    print(f"recorded: {entry.decision['mode']}, because {entry.decision.get('why', entry.reason)}")
    render_explanation(explanation, ())


def _rows(read: Log[DecisionEntry]) -> list[dict[str, Any]]:
    """Steps by mode and reason, most first."""
    steps: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    padding: Counter[tuple[str, str]] = Counter()
    for entry in read.entries:
        label = (str(entry.decision["mode"]), entry.reason)
        steps[label] += 1
        tokens[label] += entry.shape.num_tokens
        padding[label] += sum(row.get("padding", 0) for row in entry.decision.get("launches", ()))
    return [
        {
            "mode": mode,
            "reason": reason,
            "steps": count,
            "tokens": tokens[mode, reason],
            "padding": padding[mode, reason],
            "why": _TEXTS.get(reason, reason),
        }
        for (mode, reason), count in steps.most_common()
    ]


_TEXTS = {reason.value: reason.text for reason in Reason}


def _kind(entry: DecisionEntry) -> str:
    if not entry.shape.prefills:
        return "decode" if entry.shape.decodes else "empty"
    return "mixed" if entry.shape.decodes else "prefill"


def _eager(read: Log[DecisionEntry]) -> list[dict[str, Any]]:
    """The batches that ran eagerly most often: by tokens, in doublings."""
    found: Counter[tuple[int, str]] = Counter()
    first: dict[tuple[int, str], int] = {}
    for i, entry in enumerate(read.entries):
        if entry.decision["mode"] == Mode.EAGER.value:
            label = (entry.shape.num_tokens.bit_length(), _kind(entry))
            found[label] += 1
            first.setdefault(label, i)
    return [
        {
            "tokens": f"{1 << bits - 1} to {(1 << bits) - 1}" if bits > 1 else str(bits),
            "kind": kind,
            "steps": count,
            "first_step": first[bits, kind],
        }
        for (bits, kind), count in found.most_common(8)
    ]


def _print(report: dict[str, Any]) -> None:
    where = ", ".join(part for part in (report["model"], report["device"]) if part)
    by = report["policy"] or "an unnamed policy"
    print(f"{some(report['steps'], 'step')} by {by}{f' ({where})' if where else ''}")
    names = ("steps", "share", "tokens", "padding")
    table = grid("mode", "reason", *names, "why", numbers=names, words=("mode", "reason"))
    for row in report["modes"]:
        table.add_row(
            row["mode"], row["reason"], f"{row['steps']:,}", f"{row['steps'] / report['steps']:.1%}",
            f"{row['tokens']:,}", f"{row['padding']:,}", row["why"],
        )  # fmt: skip
    show(table, console())
    for row in report["eager"]:
        tokens = "1 token" if row["tokens"] == "1" else f"{row['tokens']} tokens"
        print(f"eager: {some(row['steps'], row['kind'] + ' step')} of {tokens}; see --step {row['first_step']}")


def replay_command(path: Path, policies: list[str], deployment: Deployment, *, json: bool) -> None:
    """`kpolicy simulate --decisions`: the log's batches by each policy, priced."""
    read = _read(path)
    ladder = ladder_of(deployment.ladder, limits(read), config=deployment.config) if read.entries else None
    results = replay(
        read, policies, costs=deployment.profiled(), attention=deployment.support(), ladder=ladder,
        objective=deployment.objective,
    )  # fmt: skip
    if json:
        replayed = [attrs.asdict(result) for result in results]
        print_json({"log": str(path), "cut_short": read.cut_short, "policies": replayed})
        return
    _print_replayed(path, results)
    if deployment.profile is not None:
        print(f"priced by {deployment.profile}")
    else:
        priced = [costs.version for costs in header_costs(read).values()]
        print(f"priced by the log's own costs: {', '.join(priced)}" if priced else "priced by analytic costs")


def _print_replayed(path: Path, results: list[Recorded]) -> None:
    base = results[0].cycle_us
    print(f"{some(results[0].steps, 'batch', 'batches')} of {path}, as they were scheduled")
    names = ("time s", "against recorded", "same mode", "padding")
    table = grid("policy", *names, "modes", numbers=names)
    for each in results:
        modes = ", ".join(f"{mode} {count / each.steps:.1%}" for mode, count in Counter(each.modes).most_common())
        table.add_row(
            each.policy, f"{each.cycle_us / 1e6:.3f}", f"{base / each.cycle_us:.3f}x" if each.cycle_us else "",
            f"{each.same / each.steps:.1%}", f"{each.padding:,}", modes,
        )  # fmt: skip
    show(table, console())
    for each in results:
        for count, what in ((each.outside_sizes, "size"), (each.outside_contexts, "context")):
            if count:
                share = f"{some(count, 'step')} ({count / each.steps:.1%})"
                print(f"{each.policy}: {share} of a {what} outside the cost table")
    if results[0].outside_contexts is None:
        print(NOT_RECORDED)
