"""The parts of the page that are tables and bars: the comparison, time by mode, reasons, padding, plans, the map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kpolicy.kv_span import NOT_RECORDED
from kpolicy.modes import Mode
from kpolicy.observe import padding_per_token, padding_text
from kpolicy.reasons import Reason
from kpolicy.report.advice import Advice, has_level
from kpolicy.report.html import HINT, bar, cell, count, ms, percent, seconds, table, text
from kpolicy.report.modemap import CHEAPEST, MUCH_WORSE, ModeMap
from kpolicy.report.padding import by_range, remainder
from kpolicy.report.runs import Planned, Run, in_words
from kpolicy.report.smallest import none_below
from kpolicy.report.steps import MODES
from kpolicy.words import some

__all__ = ["LETTERS", "advice", "comparison", "maps", "modes", "padding", "plan", "reasons"]

LETTERS: Mapping[Mode, str] = {Mode.FULL: "F", Mode.PIECEWISE: "P", Mode.SPLIT: "S", Mode.EAGER: "E"}


def advice(made: Advice) -> str:
    """What to do first."""
    parts = [f'<p class="first">{text(made.sentence)}</p>\n']
    for each in made.paste:
        name = f' data-file="{text(each.file_name)}"' if each.file_name else ""
        block = (
            f'<div class="paste"{name}><p><strong>{text(each.title)}</strong>: {text(each.how)}</p>'
            f"<pre tabindex=0>{text(each.text)}</pre>"
            + "".join(f'<p class="warning">{text(warning)}</p>' for warning in each.warnings)
            + "</div>\n"
        )
        if len(each.text) > 2000:
            block = f"<details><summary>{text(each.title)} ({text(each.how)})</summary>{block}</details>\n"
        parts.append(block)
    parts.append(f"<ul>{''.join(f'<li>{text(line)}</li>' for line in made.details)}</ul>\n")
    return "".join(parts)


def comparison(runs: Sequence[Run], best: Run | None) -> str:
    """All runs in a table that can be sorted."""
    level = has_level(runs[0])
    names = [
        "policy", "TTFT p50 ms", "TTFT p99 ms", "gap p50 ms", "gap p99 ms", "last token p50 s", "last token mean s",
        *(["good requests"] if level else []), "served", "steps", "busy s", "host-bound", "padding", "graphs", "used",
        "graph MiB", "capture s",
    ]  # fmt: skip
    rows = []
    for i, run in enumerate(runs):
        made = run.result
        host = made.bound["host"].us / made.step_us if made.step_us else 0.0
        pads = padding_per_token(made.padding, made.tokens_computed)
        mark = ' <span class="best">advised</span>' if run is best else ""
        row = [cell(text(run.name) + mark, i, head=True)]
        row += [cell(ms(value), value) for value in (made.ttft.p50, made.ttft.p99, made.gap.p50, made.gap.p99)]
        row += [cell(seconds(value), value) for value in (made.e2e.p50, made.e2e.mean)]
        if (good := made.goodput.share) is not None:
            row.append(cell(percent(good), good))
        row += [
            cell(count(made.served), made.served), cell(count(made.steps), made.steps),
            cell(seconds(made.step_us), made.step_us), cell(percent(host), host),
            cell(padding_text(made.padding, made.tokens_computed), pads),
            cell(count(made.graphs), made.graphs), cell(count(made.graphs_used), made.graphs_used),
            cell(count(made.graph_bytes / 2**20), made.graph_bytes), cell(f"{made.capture_s:,.1f}", made.capture_s),
        ]  # fmt: skip
        rows.append(row)
    lines = [*(line for run in runs for line in _said(run)), *_outside(runs)]
    said = "".join(f"<p>{text(line)}</p>\n" for line in lines)
    return table("Policies on the same arrivals; a column's head sorts by it", names, rows) + said


def _said(run: Run) -> list[str]:
    """What a column doesn't show."""
    made, said = run.result, []
    if made.refused:
        said.append("not served: " + ", ".join(f"{many:,} {name}" for name, many in made.refused.items()))
    if made.started_after_s:
        said.append(f"the first request waited {made.started_after_s:,.1f} s for captures")
    if made.delays:
        said.append(made.delays)
    if made.preemptions:
        said.append(some(made.preemptions, "preemption"))
    if made.not_captured:
        said.append("not captured: " + ", ".join(f"{many:,} {name}" for name, many in made.not_captured.items()))
    said += [f"downgraded at start-up: {each}" for each in made.downgrades]
    if made.gap.relative_error:
        said.append(f"percentiles of gaps are within {made.gap.relative_error:.1%}")
    return [f"{run.name}: {'; '.join(said)}."] if said else []


def _outside(runs: Sequence[Run]) -> list[str]:
    """Steps that the cost table wasn't made for: a line of all runs, not one each."""
    told = []
    for what in ("size", "context"):
        counts = [(run, getattr(run.result, f"outside_{what}s") or 0) for run in runs]
        shares = "; ".join(f"{run.name} {many / run.result.steps:.1%}" for run, many in counts if many)
        if shares:
            told.append(f"Steps of a {what} outside the cost table: {shares}.")
    if any(run.result.outside_contexts is None for run in runs):
        told.append(f"{NOT_RECORDED.capitalize()} by the cost table.")
    return told


def mode_key() -> str:
    """The modes with their patterns."""
    items = "".join(
        f'<li><span class="swatch m-{mode.value}">{LETTERS[mode]}</span> {mode.value.upper()}</li>' for mode in MODES
    )
    return f'<ul class="legend">{items}</ul>\n'


def modes(runs: Sequence[Run]) -> str:
    """Time by mode: a bar a run, and a table."""
    bars, rows = [], []
    for run in runs:
        made = run.result
        pieces = []
        for label, stats in sorted(made.modes.items(), key=lambda item: (_order(item[0]), item[0])):
            share = stats.us / made.step_us if made.step_us else 0.0
            letter = LETTERS[_mode(label)] if share >= 0.03 else ""
            pieces.append(
                f'<span class="m-{_mode(label).value}" style="width:{100 * share:.3f}%" '
                f'title="{text(label)} {percent(share)}">{letter}</span>'
            )
            rows.append(
                [
                    cell(text(run.name), head=True), cell(text(label)), cell(percent(share), share),
                    cell(seconds(stats.us), stats.us), cell(count(stats.steps), stats.steps),
                    cell(count(stats.tokens), stats.tokens), cell(count(stats.padding), stats.padding),
                ]
            )  # fmt: skip
        bars.append(f'<div class="name">{text(run.name)}</div><div class="stack">{"".join(pieces)}</div>\n')
    names = ("policy", "mode", "of time", "time s", "steps", "tokens", "padding")
    return f'{mode_key()}<div class="stacks">{"".join(bars)}</div>\n{table("Time by mode", names, rows)}'


def _mode(label: str) -> Mode:
    return Mode(label.partition("/")[0])


def _order(label: str) -> int:
    return MODES.index(_mode(label))


def reasons(runs: Sequence[Run]) -> str:
    """Why steps ran as they did."""
    meaning = {reason.value: reason.text for reason in Reason}
    rows = []
    for run in runs:
        total = sum(run.result.reasons.values()) or 1
        listed = [(name, many, "") for name, many in run.result.reasons.items()]
        listed += [(name, many, "eager half of a split: ") for name, many in run.result.eager_halves.items()]
        for name, many, what in listed:
            rows.append(
                [
                    cell(text(run.name), head=True), cell(f"<code>{text(name)}</code>"),
                    cell(bar(many / total, "plain", count(many)), many), cell(text(what + meaning.get(name, ""))),
                ]
            )  # fmt: skip
    return table("Steps by reason", ("policy", "reason", "steps", "what it means"), rows)


def padding(plans: Sequence[Planned], runs: Sequence[Run]) -> str:
    """Padding by size: each plan beside the sizes that its policy has without it, or each run without a plan."""
    pairs = [(plan.base, plan.run) for plan in plans if plan.run is not None]
    if not pairs:
        return "".join(_padding(run, None) for run in runs)
    return "".join(_padding(base, run) for base, run in pairs)


def _padding(base: Run, planned: Run | None) -> str:
    both = [(run, by_range(run.steps)) for run in (base, planned) if run is not None]
    ranges = sorted({key for _, found in both for key in found})
    most = max((each.padding for _, found in both for each in found.values()), default=0) or 1
    names = ["tokens"]
    for run, _ in both:
        names += [f"padding, {_whose(run)}", f"of true tokens, {_whose(run)}", f"in graphs, {_whose(run)}"]
    rows = []
    for low, high in ranges:
        row = [cell(f"{low:,}" if low == high else f"{low:,} to {high:,}", low, head=True)]
        for run, found in both:
            each = found.get((low, high))
            kind = "planned" if run.kind == "planned" else "plain"
            if each is None:
                row += [cell("", 0), cell("", 0), cell("", 0)]
                continue
            share = padding_per_token(each.padding, each.tokens)
            graphs = each.graphs / max(each.graphs + each.eager, 1)
            row += [
                cell(bar(each.padding / most, kind, count(each.padding)), each.padding),
                cell(padding_text(each.padding, each.tokens), share),
                cell(percent(graphs), graphs),
            ]  # fmt: skip
        rows.append(row)
    said = [f"{_whose(run)} sizes: {some(run.result.padding, 'padding token')} in all" for run, _ in both]
    left = [(run, remainder(run)) for run, _ in both]
    said += [f"{count(many)} of them on ranks without rows ({_whose(run)} sizes)" for run, many in left if many]
    caption = f"Padding tokens of {base.policy} by the true size of what was launched"
    return table(caption, names, rows) + f"<p>{text('; '.join(said))}.</p>\n"


def _whose(run: Run) -> str:
    return {"own": "default", "given": "given", "planned": "planned"}[run.kind]


def _left_out(run: Run) -> list[tuple[str, str]]:
    """Graphs that a run's policy plans for and couldn't have."""
    lost = run.result.not_captured
    return [("of these not captured", ", ".join(f"{many:,} {name}" for name, many in lost.items()))] if lost else []


def plan(made: Planned) -> str:
    """A plan: its sizes beside the ones it replaces, and every engine's default list on the same steps."""
    found = made.found
    lists = "".join(
        f"<dt>{text(_whose(run))}: {text(name)}</dt><dd>{text(sizes)}</dd>"
        for run in (made.run, made.base)
        if run is not None
        for name, sizes in (*in_words(run.keys), *_left_out(run))
    )
    rows = [
        [
            cell(text(each.name), head=True), cell(count(each.num_sizes), each.num_sizes),
            cell(count(each.num_keys), each.num_keys), cell(f"{each.step_us / 1e3:,.3f}", each.step_us),
            cell(f"{each.step_us / found.own.step_us - 1:+.2%}", each.step_us),
            cell(f"{each.usage.seconds:,.1f}", each.usage.seconds),
            cell(count(each.usage.bytes / 2**20), each.usage.bytes),
        ]
        for each in (found.own, found.default, *found.others)
    ]  # fmt: skip
    names = ("list, by its own rule", "sizes", "graph keys", "mean step ms", "against the plan", "capture s", "MiB")
    price = f"One more size would take {found.plan.price_us:,.1f} us off a mean step"
    price += f", in the list {found.plan.next_list}." if found.plan.next_list else "."
    settled = "" if found.replayed.settled else " The plan didn't settle: its sizes change the steps it is made from."
    below = "".join(f"<p>{text(line)}</p>\n" for line in none_below(found))
    return f"<h4>{text(found.policy)}</h4>\n<dl>{lists}</dl>\n{below}<p>{text(price + settled)}</p>\n" + table(
        "Lists on the steps that the plan makes", names, rows
    )


def maps(made: Sequence[ModeMap]) -> str:
    """The cheapest mode of each batch, and what each policy takes."""
    first, *others = made
    parts = [mode_key(), _map(first, "The cheapest way by the costs at hand (the policy auto)")]
    for many, what in (
        (sum(each.untimed for each in first.cells.values()), "run at a size outside the cost table"),
        (sum(each.beyond for each in first.cells.values()), "have longer contexts than attention was timed at"),
    ):
        if many:
            parts.append(f'<p class="caption">{many} of {len(first.cells)} batches {what}.</p>\n')
    for each in others:
        worse = sum(cell.marked for cell in each.cells.values())
        said = (
            f"{each.policy}: {worse} of {len(each.cells)} batches take {MUCH_WORSE:.0%} or more over the cheapest way"
        )
        parts.append(f"<details><summary>{text(said)}</summary>{_map(each, each.policy)}</details>\n")
    return "".join(parts)


def _map(made: ModeMap, caption: str) -> str:
    heads = "".join(f'<th scope="col">{_size(new)}</th>' for new in made.tokens)
    lines = []
    for decodes in reversed(made.rows):
        row = [f'<th scope="row">{_size(decodes)}</th>']
        for new in made.tokens:
            found = made.cells.get((decodes, new))
            if found is None:
                row.append("<td></td>")
                continue
            said = f"{some(decodes, 'decode row')}, {some(new, 'prompt token')}: {found.label}, {ms(found.us)} ms"
            if made.policy != CHEAPEST:
                said += f", {found.over:+.1%} against the cheapest"
            over = " over" if found.marked else ""
            row.append(
                f'<td class="m-{found.mode.value}{over}" title="{text(said)}: {text(found.reason)}">'
                f"{LETTERS[found.mode]}{'+' if over else ''}</td>"
            )
        lines.append(f"<tr>{''.join(row)}</tr>\n")
    return (
        f'<p class="caption">{text(caption)}: decode rows (down) of {made.kv_len:,} KV tokens by prompt tokens '
        f'(across){HINT}</p>\n<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f'<table class="map"><thead><tr><td class="corner"></td>{heads}</tr></thead><tbody>\n'
        f"{''.join(lines)}</tbody></table></div>\n"
        '<p class="said" aria-live="polite"></p>\n'
    )


def _size(size: int) -> str:
    return f"{size / 1024:g}k" if size >= 1024 and size % 512 == 0 else str(size)
