"""docs/measured_vllm.md: its tables are those of the published results."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm.correct import VOCAB
from benchmarks.vllm.loads import BURST_OUTPUTS, CHAT, CODE, MAX_TOKENS, RATES, make_load
from benchmarks.vllm.stock_vs_kpolicy import KV_BYTES, WARM_SCALE
from benchmarks.vllm.summary import compared, ratio_interval, states_compared
from kpolicy.costs import CostTable
from kpolicy.decision import Launch
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, Rows
from kpolicy.scheduling.traces import read_trace
from kpolicy_vllm.steps import Step, numbers_of
from tests.benchmarks.test_readme import VLLM_LOADS, told
from tests.integrations.vllm.test_host import decider, raw_tables
from tests.scheduling import real_file

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "measured_vllm.md").read_text()
MODELS = ("qwen05b", "dsv2lite", "llama8b")
MEASURED = VLLM_LOADS
FIGURES = {
    "requests_per_s": "requests/s", "gap_p50_ms": "gap p50 ms", "gap_p99_ms": "gap p99 ms",
    "ttft_p50_ms": "first token p50 ms", "ttft_p99_ms": "first token p99 ms",
}  # fmt: skip
WORDS = " ".join(PAGE.split())
PROFILED = ("llama8b", "code-2048", "2026-11-23")
"""The load and the call that were profiled"""
LATEST = {"qwen05b": "5cbff37e", "dsv2lite": "b653e7c0", "llama8b": "5cbff37e"}
"""The commit of each model's last call, whose figures count where it served that load"""
BETWEEN = "b653e7c0"
"""The commit of the 0.5B's call before, whose figures of decodes count"""
BEFORE = "54c1189"
"""The commit of the calls before those"""
SHORT = 0.99
"""A ratio below it is bold"""
SIMULATED = VLLM_LOADS | {
    "code-8192": f"{VLLM_LOADS['code-8192']}, vLLM's default here", "chat": f"{VLLM_LOADS['chat']}, 40 requests/s",
}  # fmt: skip
SERVED = ("stock", "kpolicy", "again", "paced")
"""Sides whose turns' lengths are told"""
SIDES = {"kpolicy": "as it is", "paced 1:1": "`1:1`", "paced latency": "`latency`"}
SHOWN = ("requests/s", "gap p50 ms", "gap p99 ms", "ttft p50 ms", "ttft p99 ms")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def cell(row: dict[str, Any]) -> str:
    """Medians of both sides, and the ratio with its interval, which one pair hasn't."""
    return f"{number(row['stock'])}, {number(row['kpolicy'])}: {told(row['ratio'], row['low'], row['high'])}"


def measured() -> Iterator[str]:
    rows = json.loads((RESULTS / "h200" / "vllm_stock_vs_kpolicy.json").read_text())
    by = {(row["model"], row["load"], row["figure"]): row for row in rows}
    for load, title in MEASURED.items():
        for place, (figure, name) in enumerate(FIGURES.items()):
            cells = [cell(by[model, load, figure]) if (model, load, figure) in by else "" for model in MODELS]
            yield f"| {'' if place else title} | {name} | {' | '.join(cells)} |"


def loads() -> Iterator[str]:
    """Requests of a turn and their rate, and seconds that turns took, on both sides."""
    for load, title in MEASURED.items():
        cells = []
        for model in MODELS:
            turns = [turn for side in SERVED for turn in turns_of(model, load, side)]
            if not turns:
                cells.append("")
                continue
            (requests,) = {row["requests"] for row in turns}
            seconds = sorted({f"{row['wall_s']:.1f}" for row in turns}, key=float)
            told_s = f"{seconds[0]} s" if len(seconds) == 1 else f"{seconds[0]} to {seconds[-1]} s"
            if load.startswith("code"):
                assert requests == RATES[model].code_requests
                cells.append(f"{requests} at {RATES[model].code_rate:.0f} a second; {told_s}")
            elif load == "chat":
                assert requests == RATES[model].chat_requests
                cells.append(f"{requests} at {RATES[model].chat_rate:.0f} a second; {told_s}")
            else:
                cells.append(told_s)
        yield f"| {title} | {' | '.join(cells)} |"


def raw_of(name: str) -> Any:
    return json.loads((RESULTS / "h200" / "raw" / f"{name}.json").read_text())


RAW = raw_of("vllm_stock_vs_kpolicy")


def call_of(model: str, commit: str = "") -> dict[str, Any]:
    """How a model's last call of loads, or another commit's, was made."""
    (found,) = [
        call for call in RAW["calls"]
        if call["commit"] == (commit or LATEST[model]) and f" --only {model} " in call["command"]
    ]  # fmt: skip
    return found


def turns_of(model: str, load: str, side: str) -> list[dict[str, Any]]:
    """A side's turns in the last call that served that load, in order."""
    found = [row for row in RAW["rows"] if (row["model"], row["load"]) == (model, load)]
    last = max((row.get("call", "") for row in found), default="")
    of_side = [row for row in found if row.get("call") == last and row["side"] == side]
    return sorted(of_side, key=lambda row: row["repeat"])


def span(values: Iterable[float], form: str = ".0f") -> str:
    """The least and the most."""
    low, *_, high = sorted(values)
    return f"{low:{form}} to {high:{form}}"


def ratio(row: dict[str, Any], short: float = SHORT) -> str:
    """A ratio with its interval, bold below what is short."""
    told = f"{row['ratio']:.2f}"
    return f"{f'**{told}**' if row['ratio'] < short else told} ({row['low']:.2f} to {row['high']:.2f})"


def of_sides(pair: str, model: str = "qwen05b") -> dict[tuple[str, str], dict[str, Any]]:
    """A model's rows of two sides, by load and figure."""
    pairs = json.loads((RESULTS / "h200" / "vllm_sides.json").read_text())["pairs"]
    return {(row["load"], row["figure"]): row for row in pairs[pair] if row["model"] == model}


def ladder_alone() -> Iterator[str]:
    """Stock with the shim's sizes, and the shim against that."""
    wide, policy = of_sides("stock wide"), of_sides("wide kpolicy")
    for load in ("decode-768-64", "decode-1000-64", "code-2048"):
        figures = ("requests_per_s", "gap_p99_ms", "ttft_p50_ms") if load == "code-2048" else ("requests_per_s",)
        for place, figure in enumerate(figures):
            name = FIGURES[figure].removesuffix(" ms")
            cells = f"{ratio(wide[load, figure])} | {ratio(policy[load, figure], 0)}"
            yield f"| {'' if place else MEASURED[load]} | {name} | {cells} |"


POOLED = {"ttft_all_p50_ms": "first tokens, p50 of all turns", "ttft_all_p99_ms": "first tokens, p99 of all turns"}
OTHERWISE: dict[str, dict[str, str]] = {
    "code-2048": {"gap_slow_ms": "slowest 2% of gaps", **POOLED},
    "chat": {"gap_slow_ms": "slowest 2% of gaps", **POOLED},
    "decode-1000-64": {"ttft_p50_ms": "first token p50", "ttft_p99_ms": "first token p99"},
}
"""Loads that SPLIT and lazy capture served, and figures that are told beside requests/s and gaps"""


Figures = dict[tuple[str, str], dict[str, Any]]


def otherwise_of(commit: str) -> dict[str, Figures]:
    """The 0.5B's figures of one call by pair of sides; chat and cold starts of before are in a file of their own."""
    call = call_of("qwen05b", commit)["call"]
    rows = [row for row in (*RAW["rows"], *raw_of("vllm_qwen05b_fifth")["rows"]) if row.get("call") == call]
    return {pair: {(row["load"], row["figure"]): row for row in found} for pair, found in compared(rows).items()}


def otherwise_there(commit: str) -> Iterator[str]:
    """SPLIT and lazy capture beside stock and the shim as it is."""
    pairs = otherwise_of(commit)
    found = [pairs[f"{base} {side}"] for side in ("split", "lazy") for base in ("stock", "kpolicy")]
    shown = {"requests_per_s": "requests/s", "gap_p50_ms": "gap p50", "gap_p99_ms": "gap p99"}
    for load, more in OTHERWISE.items():
        if all((load, "requests_per_s") not in rows for rows in found):
            continue
        for place, (figure, name) in enumerate((shown | more).items()):
            cells = [ratio(rows[load, figure]) if (load, figure) in rows else "" for rows in found]
            yield f"| {'' if place else MEASURED[load]} | {name} | {' | '.join(cells)} |"


def otherwise() -> Iterator[str]:
    """In the last call, where SPLIT served code and chat, and lazy capture chat."""
    yield from otherwise_there(LATEST["qwen05b"])


def otherwise_before() -> Iterator[str]:
    """In the call before, where SPLIT served no decodes."""
    yield from otherwise_there(BETWEEN)


def bounded() -> Iterator[str]:
    """Bounded steps beside what the simulator had said of them."""
    stock, shim = of_sides("stock paced"), of_sides("kpolicy paced")
    said: dict[tuple[str, str], list[float]] = {}
    for row in json.loads((RESULTS / "vllm_simulated.json").read_text())["rows"]:
        if row["side"] == "paced 1:1":
            said.setdefault((row["load"], row["figure"]), []).append(row["ratio"])
    for load in ("code-2048", "code-8192"):
        for place, (figure, shown) in enumerate(zip(FIGURES, SHOWN, strict=True)):
            row, of_shim, ratios = stock[load, figure], shim[load, figure], said[load, shown]
            digits = 1 if figure.startswith("gap") else 0
            cells = [f"{row[side]:,.{digits}f}" for side in ("stock", "paced")]
            cells += [ratio(row), f"{min(ratios):.2f} to {max(ratios):.2f}", ratio(of_shim)]
            yield f"| {'' if place else MEASURED[load]} | {FIGURES[figure]} | {' | '.join(cells)} |"


def starts() -> Iterator[str]:
    """Seconds, memory and KV of four sides, and two ratios."""
    whole = json.loads((RESULTS / "h200" / "vllm_stock_vs_kpolicy.json").read_text())
    kpolicy = {row["figure"]: row for row in whole if (row["model"], row["load"]) == ("qwen05b", "start")}
    planned, wide = (
        {figure: row for (load, figure), row in of_sides(f"stock {side}").items() if load == "start"}
        for side in ("planned", "wide")
    )
    names = {"capture_s": "capture s", "graph_mib": "graph memory MiB", "kv_tokens": "KV tokens", "start_s": "start s"}
    for figure, name in names.items():
        digits = {"capture_s": 2, "start_s": 1}.get(figure, 0)
        values = [
            kpolicy[figure]["stock"],
            kpolicy[figure]["kpolicy"],
            planned[figure]["planned"],
            wide[figure]["wide"],
        ]
        ratios = [kpolicy[figure], planned[figure]]
        told = [
            f"{row['ratio']:.3f}" if figure == "kv_tokens" else f"{row['ratio']:.2f}" if figure == "graph_mib"
            else ratio(row, 0) for row in ratios
        ]  # fmt: skip
        yield f"| {name} | {' | '.join(f'{value:,.{digits}f}' for value in values)} | {' | '.join(told)} |"


def starts_of(model: str, call: str) -> dict[str, list[dict[str, Any]]]:
    """Each side's starts in a call, in order; `call` is how its command goes on behind the model."""
    (of_call,) = [each["call"] for each in RAW["calls"] if f"starts --model models/{model} {call}" in each["command"]]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in RAW["rows"]:
        if row["load"] == "start" and row.get("call") == of_call:
            found.setdefault(row["side"], []).append(row)
    return {side: sorted(rows, key=lambda row: row["repeat"]) for side, rows in found.items()}


STARTED = {"capture_s": 1, "graph_mib": 0, "kv_tokens": 0, "start_s": 1}
STARTED_NAMES = ("capture s", "graph memory MiB", "KV tokens", "start s")


def of_graphs(rows: list[dict[str, Any]]) -> str:
    """How many of either kind a side captured, alike in each of its starts."""
    (told_there,) = {"{FULL} + {PIECEWISE}".format(**row["graphs"]) for row in rows}
    return told_there


def each_start(rows: list[dict[str, Any]], figure: str) -> str:
    """What each start took, once where all are alike."""
    return ", ".join(dict.fromkeys(f"{row[figure]:,.{STARTED[figure]}f}" for row in rows))


def first_over(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], figure: str) -> str:
    """The ratio of both first starts, above 1 better for ours."""
    of = ours[0][figure], theirs[0][figure]
    return told(of[0] / of[1] if figure == "kv_tokens" else of[1] / of[0])


def llama8b_starts() -> Iterator[str]:
    """Of one or two starts each."""
    found = starts_of("llama8b", "--plan ")
    stock, ours, planned, wide = (found[side] for side in ("stock", "kpolicy", "planned", "wide"))
    assert [len(rows) for rows in (stock, ours, planned, wide)] == [1, 2, 2, 1]
    yield f"| graphs, FULL + PIECEWISE | {' | '.join(map(of_graphs, (stock, ours, planned, wide)))} | | | | |"
    for figure, name in zip(STARTED, STARTED_NAMES, strict=True):
        cells = [each_start(rows, figure) for rows in (stock, ours, planned, wide)]
        cells += [first_over(*pair, figure) for pair in ((ours, stock), (planned, stock), (wide, stock), (ours, wide))]
        yield f"| {name} | {' | '.join(cells)} |"


def dsv2lite_starts() -> Iterator[str]:
    """Of one or two starts each, and of one each with more of the GPU's memory."""
    found, roomy = starts_of("dsv2lite", "--plan "), starts_of("dsv2lite", "--sides wide kpolicy ")
    stock, ours, planned = (found[side] for side in ("stock", "kpolicy", "planned"))
    wide, beside = roomy["wide"], roomy["kpolicy"]
    assert [len(rows) for rows in (stock, ours, planned, wide, beside)] == [1, 2, 2, 1, 1]
    names = (*map(of_graphs, (stock, ours, planned)), "", "", *map(of_graphs, (wide, beside)), "")
    yield f"| graphs, FULL + PIECEWISE | {' | '.join(names)} |"
    for figure, name in zip(STARTED, STARTED_NAMES, strict=True):
        cells = [each_start(rows, figure) for rows in (stock, ours, planned)]
        cells += [first_over(ours, stock, figure), first_over(planned, stock, figure)]
        cells += [each_start(rows, figure) for rows in (wide, beside)]
        yield f"| {name} | {' | '.join([*cells, first_over(beside, wide, figure)])} |"


ENGINES = {
    "auto": "`auto`", "split": "SPLIT ({} and {} decode-only steps)", "twice": "two forwards in a step ({} steps)",
    "paced": "bounded steps ({} and {})", "lazy": "lazy ({} and {} graphs captured between steps)",
}  # fmt: skip
COUNTED = {
    "split": "split_decode_steps", "twice": "split_two_forwards", "paced": "paced_steps", "lazy": "lazy_captures",
}  # fmt: skip


def logits() -> Iterator[str]:
    """What differs from NONE's tokens, how much of it counts, and errors; both runners."""
    found = {row["model"]: row for row in json.loads((RESULTS / "h200" / "vllm_correct.json").read_text())["results"]}
    both = [found[model] for model in ("qwen2", "llama")]
    assert all(row["passes"] and not row.get("failed") for row in both)
    for row in both:
        for control in (row["again"], row["control"], row["replica"]):
            assert all(control[f"{what}_equal"] for what in ("steps", "metrics", "tokens", "logits"))
    yield "| stock again; stock with another configuration hash | same steps, tokens and logits | same |"
    first, second = (row["replica"] for row in both)
    assert second["metrics_rows"] == 0
    told_first = f"same {first['steps']} steps, {first['metrics_rows']} metrics rows, tokens and logits as stock"
    told_second = f"same {second['steps']} steps, tokens and log-probabilities; this runner has no metrics rows"
    yield f"| replica of vLLM's rule through the shim | {told_first} | {told_second} |"
    for engine, name in ENGINES.items():
        each = [row.get(engine) for row in both]
        assert all(one is None or (one["passes"] and one["tokens"] == one["compared"] == 1116) for one in each)
        counts = [one["counters"][COUNTED[engine]] for one in each if one and engine in COUNTED]
        cells = [
            f"{one['differ']}, {one['counted']}, {one['error_ratio']:.2f}" if one else "not had on this runner"
            for one in each
        ]
        yield f"| {name.format(*counts)} | {' | '.join(cells)} |"
    broken = [row["broken"] for row in both]
    assert not any(one["passes"] for one in broken)
    noticed = [f"{one['counted']} count: noticed" for one in broken]
    yield f"| attention's scale broken | {' | '.join(noticed)} |"


def simulated() -> Iterator[str]:
    rows = json.loads((RESULTS / "vllm_simulated.json").read_text())["rows"]
    for load, title in SIMULATED.items():
        for side, name in SIDES.items():
            cells = []
            for figure in SHOWN:
                ratios = [
                    row["ratio"] for row in rows if (row["load"], row["side"], row["figure"]) == (load, side, figure)
                ]
                low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
                cells.append(low if low == high else f"{low} to {high}")
            yield f"| {title if side == 'kpolicy' else ''} | {name} | {' | '.join(cells)} |"


def test_the_page_tells_of_how_many_logits() -> None:
    assert f"of a vocabulary of {VOCAB:,} tokens" in WORDS


@pytest.mark.parametrize(
    "rows",
    [
        loads, measured, ladder_alone, otherwise, otherwise_before, bounded, simulated, starts, llama8b_starts,
        dsv2lite_starts, logits,
    ],
)  # fmt: skip
def test_the_page_s_rows_are_those_of_the_results(rows: Any) -> None:
    """Every one, in order."""
    table = "\n".join(" ".join(row.split()) for row in rows())
    assert table in "\n".join(" ".join(line.split()) for line in PAGE.splitlines())


def test_the_page_s_calls_and_launching_costs_are_published() -> None:
    """Each call's command and commit, and what launching an eager step took by its costs; starts have none."""
    rows = {row["call"] for row in RAW["rows"] if row.get("core_looks")}
    of_starts = [call for call in RAW["calls"] if call["command"].startswith("python -m benchmarks.vllm.starts ")]
    assert rows == {call["call"] for call in RAW["calls"] if call not in of_starts}
    for call in RAW["calls"]:
        assert (" --one-core " in call["command"]) is (call not in of_starts)
        assert f"kpolicy at {call['commit']} " in PAGE
    launching = {f"{model}_ms": costs_of(model).host_eager.base_us / 1e3 for model in MODELS}
    told = "launching an eager step took {qwen05b_ms:.0f} ms on the 0.5B, {dsv2lite_ms:.0f} on DeepSeek and "
    assert (told + "{llama8b_ms:.0f} on Llama").format(**launching) in WORDS


def costs_of(model: str, side: str = "kpolicy", commit: str = "") -> CostTable:
    """Those that decided at the end of the last call, or of another commit's."""
    name = f"{model}_{side} at {commit or LATEST[model]}"
    return (raw_tables() | raw_tables(brought=True))[name]


def test_the_page_tells_how_the_calls_were_made() -> None:
    """Warm-up, pairs, one call a model cut by its budget; and that the host was slower than before."""
    warm = {}
    for model in MODELS:
        call = call_of(model)
        assert call["cut_by_the_budget"] == [model]
        assert " --shift-ms 12 " in call["command"]
        found = re.search(r"--warm-scale ([\d.]+)", call["command"])
        warm[model] = float(found[1]) if found else WARM_SCALE
    assert "Half of each load of Llama and {dsv2lite} of the others'".format(**warm) in WORDS
    assert f"({WARM_SCALE} for the 0.5B at {BEFORE})" in WORDS
    assert (warm["llama8b"], warm["qwen05b"]) == (0.5, warm["dsv2lite"])
    assert "--warm-scale" not in raw_of("vllm_qwen05b_third")["calls"][0]["command"]
    rows = json.loads((RESULTS / "h200" / "vllm_stock_vs_kpolicy.json").read_text())
    pairs_of = {(row["model"], row["load"]): row["repeats"] for row in rows if row["load"] in MEASURED}
    six = {("dsv2lite", load) for load in ("chat", "code-2048", "decode-768-64")}
    six |= {("llama8b", load) for load in ("chat", "code-2048", *DECODES)} | {("qwen05b", "code-2048")}
    told_there = "seven of each load, but six of all of Llama's, of DeepSeek's chat, code and 768 decodes and of the "
    assert f"{told_there}0.5B's code at 2,048, 15 of the 0.5B's 1,000 decodes" in WORDS
    assert {which for which, pairs in pairs_of.items() if pairs == 6} == six
    assert {pairs for which, pairs in pairs_of.items() if which not in six} == {7, 15, 18}
    assert (pairs_of["qwen05b", "burst-768"], pairs_of["qwen05b", "decode-1000-64"]) == (18, 15)
    assert " --turns decode-1000-64=2 " in call_of("qwen05b", BETWEEN)["command"]
    now = figure_of("qwen05b", "decode-768-64", "gap_p50_ms")["stock"]
    before = before_of("qwen05b")["decode-768-64", "gap_p50_ms"]["stock"]
    took = f"a step of 768 decodes took the 0.5B's stock {now:.1f} ms, for {before:.1f} in the call at {BEFORE}"
    assert f"{took} and 21.4 in the one at d11ce8d" in WORDS


def rows_before(model: str) -> list[dict[str, Any]]:
    """Of the call at `BEFORE`; Llama's chat, beside a second process of stock's, is with what counts."""
    files = {"qwen05b": "vllm_qwen05b_third", "dsv2lite": "vllm_dsv2lite_first", "llama8b": "vllm_llama8b_third"}
    found = raw_of(files[model])
    (call,) = found["calls"]
    assert call["commit"] == BEFORE
    of_model = [row for row in RAW["rows"] if row["model"] == model and row["load"] in VLLM_LOADS]
    return [*found["rows"], *(row for row in of_model if row.get("call") == call["call"])]


def turns_before(model: str, load: str, side: str) -> list[dict[str, Any]]:
    """A side's turns there, in order."""
    found = [row for row in rows_before(model) if (row["load"], row["side"]) == (load, side)]
    return sorted(found, key=lambda row: row["repeat"])


def before_of(model: str) -> Figures:
    """What the call at `BEFORE` came to, by load and figure."""
    return {(row["load"], row["figure"]): row for row in compared(rows_before(model))["stock kpolicy"]}


def was(model: str, load: str, figure: str) -> str:
    """A ratio of the call before as the page tells it."""
    row = before_of(model)[load, figure]
    return told(row["ratio"], row["low"], row["high"])


def figure_of(model: str, load: str, figure: str, pair: str = "stock kpolicy") -> dict[str, Any]:
    """A published row."""
    if pair != "stock kpolicy":
        return of_sides(pair, model)[load, figure]
    rows = json.loads((RESULTS / "h200" / "vllm_stock_vs_kpolicy.json").read_text())
    (row,) = [row for row in rows if (row["model"], row["load"], row["figure"]) == (model, load, figure)]
    return row


def said(model: str, load: str, figure: str, pair: str = "stock kpolicy") -> str:
    """A ratio as the page tells it."""
    row = figure_of(model, load, figure, pair)
    return told(row["ratio"], row["low"], row["high"])


def test_the_page_tells_what_the_loads_are() -> None:
    """KV of both sides, tokens of a burst, and requests of the conversation trace beside the short table."""
    gib = {model: f"{KV_BYTES[model] / 2**30:g}" for model in MODELS}
    assert "the same KV on both sides: {qwen05b}, {dsv2lite} and {llama8b} GiB".format(**gib) in WORDS
    assert f"burst of 768 requests of {BURST_OUTPUTS} tokens" in WORDS
    guide, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/vllm.md", "README.md"))
    (chat,) = {rates.chat_requests for rates in RATES.values()}
    assert f"The conversation trace is {chat} requests a turn" in guide
    assert f"The conversation trace is {chat} requests at a rate" in readme
    lasted = [row["wall_s"] for row in RAW["rows"] if row.get("core_looks")]
    assert f"Turns last {min(lasted):.1f} to {max(lasted):.0f} seconds" in readme


def test_the_page_tells_what_the_traces_requests_are() -> None:
    """How many prompts of chat are longer than stock's graphs, and how long prompts and outputs are in the mean."""
    path = real_file(CHAT)
    prompts = [one.prompt_tokens for one in read_trace(path).limited(MAX_TOKENS).requests]
    short, now, whole = (
        f"{sum(tokens > 512 for tokens in prompts[:count]) / len(prompts[:count]):.{digits}%}"
        for count, digits in ((30, 0), (RATES["llama8b"].chat_requests, 1), (len(prompts), 0))
    )
    assert f"of the trace's first 30 prompts {short} are longer than 512 tokens" in WORDS
    assert f"of the first 120 {now} and of the whole trace {whole}" in WORDS
    real_file(CODE)
    means = {}
    for load in ("code-2048", "chat"):
        of_load = [make_load(load, model, path.parent).requests for model in MODELS]
        means[load] = [
            sorted({f"{statistics.fmean(one[place] for one in requests):,.0f}" for requests in of_load})
            for place in (1, 2)
        ]
    (prompt, output), ((chat,), (writes,)) = means["code-2048"], means["chat"]
    told_there = f"{prompt[0]} to {prompt[-1]} in the mean, with {output[0]} to {output[-1]} to write, and of the "
    assert f"{told_there}conversation trace's {chat}, with {writes}" in WORDS


DECODES = ("decode-768-64", "decode-1000-64")


def modes(turns: Iterable[dict[str, Any]], mode: str) -> list[int]:
    """Steps of that mode, turn by turn."""
    return [turn["modes"].get(mode, [0])[0] for turn in turns]


def eager_prompts(turn: dict[str, Any]) -> int:
    """Steps with prompts that ran eagerly."""
    return sum(step[0] == "NONE" for step in turn["prompt_steps"])


def test_the_page_tells_what_stock_runs_eagerly() -> None:
    """And that kpolicy has graphs for those steps."""
    for model in MODELS:
        for turn in turns_of(model, "decode-768-64", "stock"):
            assert (turn["modes"]["NONE"][0], turn["steps"]) == (64, 67)
        assert set(modes(turns_of(model, "decode-768-64", "kpolicy"), "NONE")) == {3}
    told_there = "stock ran 64 steps of 67 without a graph, kpolicy 3 (the prompts' 8,192 tokens each)"
    assert told_there in WORDS
    qwen, (deepseek,) = (
        sorted(set(modes(turns_of(model, "code-2048", "stock"), "NONE"))) for model in ("qwen05b", "dsv2lite")
    )
    chat = {model: span(map(eager_prompts, turns_of(model, "chat", "stock"))) for model in ("qwen05b", "dsv2lite")}
    assert (
        f"stock ran {qwen[0]} or {qwen[1]} steps eagerly on the 0.5B and {deepseek} on DeepSeek, of the conversation"
        in WORDS
    )
    assert "of the conversation trace's {qwen05b} and {dsv2lite}; kpolicy ran all of these".format(**chat) in WORDS
    for model in ("qwen05b", "dsv2lite"):
        for load in ("code-2048", "chat"):
            assert set(modes(turns_of(model, load, "kpolicy"), "NONE")) == {0}


def test_the_page_tells_why_code_at_8192_has_longer_gaps() -> None:
    """Which steps differ, and which requests stand behind the slow ones."""
    told_there = paragraph("- **Code at steps of 8,192")
    load = ("qwen05b", "code-8192")
    for figure in ("requests_per_s", "gap_p99_ms", "gap_slow_ms"):
        assert said(*load, figure) in told_there
        assert said(*load, figure, "stock paced") in told_there
    idle = {"stock": [], "kpolicy": []}
    four = {"stock": [], "kpolicy": []}
    behind = {"stock": [], "kpolicy": []}
    for side in idle:
        for turn in turns_of(*load, side):
            steps = turn["prompt_steps"]
            assert all(step[0] == "NONE" for step in steps if step[2] > 4096)
            assert {step[0] for step in steps if step[2] <= 4096} == {"NONE" if side == "stock" else "PIECEWISE"}
            # A request more came into one of them in a turn.
            first = [place for place, step in enumerate(steps) if step[5] or step[2] in (2648, 2649)]
            assert [steps[place][2] // 2 for place in first] == [3180 // 2, 1555 // 2, 2648 // 2]
            idle[side] += [steps[place][4] for place in first]
            four[side].append(sum(step[4] for step in steps[first[-1] : first[-1] + 4]))
            behind[side].append(max((step for step in steps if step[3] > 1), key=lambda step: step[4])[3])
    assert f"took stock {span(idle['stock'])} ms eagerly, kpolicy {span(idle['kpolicy'])} in pieces" in told_there
    medians = {side: statistics.median(times) for side, times in four.items()}
    took = "four steps took it {kpolicy:.0f} ms, and stock {stock:.0f} (medians of turns)"
    assert took.format(**medians) in told_there
    assert behind["kpolicy"].count(16) == 5
    assert behind["stock"].count(12) == 6
    assert {len(turns) for turns in behind.values()} == {7}
    assert "had 16 requests in five of kpolicy's seven turns, 12 in six of stock's" in told_there


def test_the_page_tells_what_deepseek_s_chat_gains() -> None:
    """No figure is short; and how many steps stock runs eagerly."""
    told_there, load = paragraph("- **DeepSeek's chat has no figure below 0.99**"), ("dsv2lite", "chat")
    for figure in ("gap_p99_ms", "ttft_p50_ms", "ttft_p99_ms"):
        assert said(*load, figure) in told_there
    assert all(figure_of(*load, figure)["ratio"] >= SHORT for figure in (*FIGURES, "ttft_geo_ms", "gap_slow_ms"))
    stock = turns_of(*load, "stock")
    steps = span(len(turn["prompt_steps"]) for turn in stock)
    assert f"stock runs {span(map(eager_prompts, stock))} of its {steps} steps with prompts eagerly" in told_there


def decodes_took(model: str) -> str:
    """What the steps of both decode loads took either side, all of whose turns ran as many steps in the same modes."""
    took: dict[str, list[str]] = {"stock": [], "kpolicy": []}
    for load, steps, eager in zip(DECODES, (67, 68), (64, 65), strict=True):
        for side, counts in (("stock", (eager, 0, 3)), ("kpolicy", (eager - 61, 1, 63))):
            turns = turns_of(model, load, side)
            for place, mode in enumerate(("NONE", "PIECEWISE", "FULL")):
                assert set(modes(turns, mode)) == {counts[place]}
            assert {turn["steps"] for turn in turns} == {steps}
            kinds = [kind for turn in turns for kind in turn["decode_steps"] if kind[2] > 50]
            assert {kind[0] for kind in kinds} == {"FULL" if side == "kpolicy" else "NONE"}
            took[side].append(span((kind[3] for kind in kinds), ".1f"))
    return f"took kpolicy {' and '.join(took['kpolicy'])} ms, stock {' and '.join(took['stock'])}."


def test_the_page_tells_in_which_graphs_deepseek_s_decodes_run() -> None:
    """How many steps of each mode, and what they took; and that the rule of near ties decided none."""
    told_there = paragraph("- **DeepSeek's decodes run in their FULL graphs now")
    for load in DECODES:
        assert said("dsv2lite", load, "requests_per_s") in told_there
    assert "kpolicy ran 63 of 67 and 63 of 68 steps in FULL, 3 and 4 eagerly and one in pieces" in told_there
    assert "Stock ran 64 and 65 eagerly and 3 in FULL" in told_there
    assert decodes_took("dsv2lite") in told_there
    reasons = {reason for _, reason, *_ in call_of("dsv2lite")["shims"]["dsv2lite_kpolicy"]["steps"]}
    assert reasons == {"cheapest_measured", "above_largest_size"}
    no_doubt = paragraph("- **The rule of [near ties](#near-ties) had nothing to decide**")
    costs, numbers = costs_of("dsv2lite"), numbers_of(Step(768, 768, 768, 1, 1), 1)
    keys = (GraphKey(Part.FULL, 768, 768, query_len=1), GraphKey(Part.PIECEWISE, 768))

    def cycles(table: CostTable) -> list[float]:
        return [table.cost((Launch(Rows.ALL, key),), numbers).cycle_us / 1e3 for key in keys]

    whole, pieces = cycles(costs)
    assert f"of 768 takes {whole:.1f} ms and pieces {pieces:.1f}" in no_doubt
    quick = costs.at_host_speed(0.74 * costs.host_work_us)
    assert f"pieces would seem cheaper, at {cycles(quick)[1]:.1f} ms" in no_doubt
    assert cycles(quick)[1] < cycles(quick)[0]
    assert decider(quick, level="uniform").entry(Step(768, 768, 768, 1, 1)).label == ("full", "within_doubt")
    middle = figure_of("dsv2lite", DECODES[0], "step_p50_ms")["kpolicy"]
    assert f"The {whole:.1f} ms are too few: the steps took {middle:.1f} in the middle" in no_doubt


def test_the_page_tells_in_which_graphs_deepseek_s_decodes_ran_before() -> None:
    """What steps took there, by the graph; and why, by the costs."""
    told_there = paragraph(f"- At {BEFORE} they had ")
    took: dict[tuple[str, str], list[float]] = {}
    rows = raw_of("vllm_dsv2lite_first")["rows"]
    for load, size in zip(DECODES, (768, 1024), strict=True):
        assert was("dsv2lite", load, "requests_per_s") in told_there
        for turn in (row for row in rows if (row["load"], row["side"]) == (load, "kpolicy")):
            (step,) = [step for step in turn["decode_steps"] if step[2] > 50]
            assert step[1] == size
            took.setdefault((load, step[0]), []).append(step[3])
    counts = {which: len(times) for which, times in took.items()}
    few, many = DECODES
    assert counts == {(few, "PIECEWISE"): 4, (few, "FULL"): 2, (many, "PIECEWISE"): 5, (many, "FULL"): 1}
    full = " and ".join(f"{each:.1f}" for each in sorted(took[few, "FULL"]))
    (of_many,) = took[many, "FULL"]
    assert f"They took {span(took[few, 'PIECEWISE'], '.1f')} ms a step, FULL {full}; with 1,000 " in told_there
    assert f"with 1,000 {span(took[many, 'PIECEWISE'], '.1f')}, and {of_many:.1f}" in told_there
    costs, numbers = costs_of("dsv2lite", commit=BEFORE), numbers_of(Step(768, 768, 768, 1, 1), 1)
    whole, pieces = (
        costs.cost((Launch(Rows.ALL, key),), numbers).cycle_us
        for key in (GraphKey(Part.FULL, 768, 768, query_len=1), GraphKey(Part.PIECEWISE, 768))
    )
    assert f"had those of 768 {1 - pieces / whole:.0%} cheaper than the FULL graph" in told_there
    *_, before, last = costs.piecewise.sizes
    assert f"between {before} and {last:,} tokens by a straight line" in told_there


def test_the_page_tells_what_deepseek_s_first_tokens_are_made_of() -> None:
    """Of 1,000 decodes: the same two eager steps on both sides, and turns in which requests were added slowly."""
    told_there, load = paragraph("- **First tokens of 1,000 decodes"), ("dsv2lite", "decode-1000-64")
    for figure in ("added_ms", "ttft_after_p50_ms"):
        assert said(*load, figure).replace("*", "") in told_there
    assert f"are at {said(*load, 'ttft_p50_ms')}**, for {was(*load, 'ttft_p50_ms').replace('*', '')} at" in told_there
    added = {}
    for side in ("stock", "kpolicy"):
        added[side] = [turn["added_ms"] for turn in turns_of(*load, side)]
        for turn in turns_of(*load, side):
            first, second = turn["prompt_steps"][:2]
            assert first[:2] == second[:2] == ["NONE", 8192]
            assert first[3] < 500 < second[3]
    slow = [each for side in added.values() for each in side if each > 150]
    others = [each for side in added.values() for each in side if each <= 150]
    assert [sum(each > 150 for each in added[side]) for side in ("kpolicy", "stock")] == [3, 1]
    assert f"and in one of stock's it took {span(slow)} ms, in the others {span(others)}." in told_there


def test_the_page_tells_what_the_small_model_s_last_call_gains() -> None:
    """1,000 decodes beside what was wanted and earlier calls; code; and that no figure of chat is short."""
    decodes, code = (
        paragraph("- **1,000 decodes on the 0.5B have "),
        paragraph("- **The 0.5B's code at 2,048 and chat**"),
    )
    load = "decode-1000-64"
    row, before = figure_of("qwen05b", load, "requests_per_s"), was("qwen05b", load, "requests_per_s")
    assert decodes.startswith(f"{said('qwen05b', load, 'requests_per_s')} in requests/s**, {row['repeats']} pairs")
    assert row["low"] < 1.3 < row["ratio"]
    found = {
        (each["load"], each["figure"]): each
        for each in compared(raw_of("vllm_qwen05b_fourth")["rows"])["stock kpolicy"]
    }
    fourth = found[load, "requests_per_s"]
    between = told(fourth["ratio"], fourth["low"], fourth["high"])
    assert f"had {between}, four pairs at 735ac70, and {before}, six at {BEFORE}" in decodes
    assert set(modes(turns_of("qwen05b", load, "stock"), "NONE")) == {65}
    ours = turns_of("qwen05b", load, "kpolicy")
    assert (set(modes(ours, "NONE")), set(modes(ours, "FULL"))) == ({4}, {63})
    raw = [row for row in RAW["rows"] if row.get("call") == call_of("qwen05b", BETWEEN)["call"]]
    found = {(each["load"], each["figure"]): each for each in compared(raw)["stock kpolicy"]}

    def between_of(model: str, load: str, figure: str) -> str:
        row = found[load, figure]
        return told(row["ratio"], row["low"], row["high"])

    now, between, then = (
        f"{of('qwen05b', 'code-2048', 'requests_per_s')}{words} and {of('qwen05b', 'code-2048', 'gap_p99_ms')}"
        for of, words in ((said, " in requests/s"), (between_of, ""), (was, ""))
    )
    assert f"{now} in gap p99, where {BETWEEN} had {between}, and {BEFORE} {then}" in code
    assert f"kpolicy's had {said('qwen05b', 'code-2048', 'host_us')} of its speed" in code
    assert said("dsv2lite", "chat", "step_p50_ms") in paragraph("- **DeepSeek's chat has no figure below 0.99**")
    chat = [figure_of("qwen05b", "chat", figure) for figure in (*FIGURES, "ttft_geo_ms", "gap_slow_ms", "step_p50_ms")]
    assert min(each["ratio"] for each in chat) >= SHORT
    assert f"requests/s begin at {chat[0]['low']:.3f}" in code


def lazy_turns(commit: str) -> dict[str, dict[bool, list[dict[str, Any]]]]:
    """Turns with lazy capture, by load and whether a graph was captured in them: their modes count its steps too."""
    found: dict[str, dict[bool, list[dict[str, Any]]]] = {}
    for turn in turns_in(commit, "lazy"):
        found.setdefault(turn["load"], {}).setdefault("prompt_steps" not in turn, []).append(turn)
    return found


def turns_in(commit: str, side: str, *loads: str) -> list[dict[str, Any]]:
    """A side's turns in a call of the 0.5B, load by load, in order."""
    call = call_of("qwen05b", commit)["call"]
    rows = [row for row in (*RAW["rows"], *raw_of("vllm_qwen05b_fifth")["rows"]) if row.get("call") == call]
    wanted = [row for row in rows if row["side"] == side and row["load"] in (loads or OTHERWISE)]
    return sorted(wanted, key=lambda row: (row["load"], row["repeat"]))


def captured_in(turns: Iterable[dict[str, Any]]) -> list[int]:
    """Graphs captured in each: each is two steps more than were served, one to warm up, one that is captured."""
    return [(sum(count for count, _ in turn["modes"].values()) - turn["steps"]) // 2 for turn in turns]


def test_the_page_tells_why_deepseek_s_median_gap_of_code_is_short() -> None:
    """Beside the steps with prompts of either side."""
    told_there, load = paragraph("- **DeepSeek's code at 2,048**"), ("dsv2lite", "code-2048")
    for figure in ("requests_per_s", "gap_p99_ms", "gap_p50_ms"):
        assert said(*load, figure) in told_there
    gap = figure_of(*load, "gap_p50_ms")
    stock, ours = (
        statistics.median(step[4] for turn in turns_of(*load, side) for step in turn["prompt_steps"])
        for side in ("stock", "kpolicy")
    )
    assert (
        f"stock's, {gap['stock']:.1f} ms, is about an eager step with prompts ({stock:.1f} in the middle)" in told_there
    )
    assert f"kpolicy's, {gap['kpolicy']:.1f}, is far shorter than one in pieces ({ours:.1f})" in told_there


def test_the_page_tells_what_split_gave_and_cost_under_load() -> None:
    """How many steps it divided, and every figure beside the shim as it is; how many steps turns had."""
    counters = call_of("qwen05b")["shims"]["qwen05b_split"]["counters"]
    code, chat = paragraph("- **SPLIT divides steps"), paragraph("- **On chat SPLIT gains nothing")
    counted = "{split_decode_steps:,} decode-only steps and {split_prompt_steps:,} of prompts alone were counted"
    assert counted.format(**counters) in code
    assert f"{counters['split_not_worth_it']} times dividing wasn't worth it" in code
    stock, ours = (otherwise_of(LATEST["qwen05b"])[f"{base} split"] for base in ("stock", "kpolicy"))

    def of(rows: Figures, load: str, *figures: str) -> list[str]:
        return [ratio(rows[load, figure]) for figure in figures]

    gaps, per_s = (
        [*of(ours, "code-2048", figure), *of(stock, "code-2048", figure)] for figure in ("gap_p50_ms", "requests_per_s")
    )
    assert f"the median gap is at {gaps[0]} of kpolicy and {gaps[1]} of stock" in code
    assert f"gap p99 at {of(ours, 'code-2048', 'gap_p99_ms')[0]} of kpolicy" in code
    assert f"requests/s are at {per_s[0]} of kpolicy and {per_s[1]} of stock" in code
    late = of(ours, "code-2048", *POOLED)
    assert f"about twice as late as kpolicy's: {late[0]} and {late[1]} of all turns" in code
    assert f"the slower host, {ratio(ours['code-2048', 'host_us'], 0)} of the speed" in code
    steps = [
        span((turn["steps"] for turn in turns_in(LATEST["qwen05b"], side, "code-2048")), "d")
        for side in ("split", "kpolicy", "stock")
    ]
    assert "A turn has {} steps, for {} of kpolicy and {} of stock".format(*steps) in code
    rows = [ours["chat", figure] for figure in ("gap_p50_ms", "gap_p99_ms")]
    near = [f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})" for row in rows]
    assert f"gaps are at {near[0]} and {near[1]}, the slowest 2% at {of(ours, 'chat', 'gap_slow_ms')[0]}" in chat
    late = of(ours, "chat", *POOLED, "ttft_geo_ms")
    assert "first tokens of all turns at {} and {}, in the geometric mean at {}".format(*late) in chat


def test_the_page_tells_what_lazy_capture_did_under_load() -> None:
    """How long captures took, in which turns, and which first tokens came late."""
    shim, told_there = call_of("qwen05b")["shims"]["qwen05b_lazy"], paragraph("- **Lazy capture no longer fails chat")
    stock, ours = (otherwise_of(LATEST["qwen05b"])[f"{base} lazy"] for base in ("stock", "kpolicy"))
    both = [ratio(rows["chat", "requests_per_s"]) for rows in (stock, ours)]
    assert f"Requests/s are at {both[0]} of stock and {both[1]} of kpolicy" in told_there
    late = [rows["chat", "ttft_all_p99_ms"] for rows in (stock, ours)]
    took = f"took {late[0]['lazy']:.0f} ms, for {late[0]['stock']:.0f} in stock and {late[1]['kpolicy']:.0f} in kpolicy"
    assert f"{took}: {ratio(late[0])} and {ratio(late[1])}" in told_there
    slow = [ratio(rows["chat", "gap_slow_ms"]) for rows in (stock, ours)]
    assert f"gaps are at {slow[0]} of stock and {slow[1]} of kpolicy" in told_there
    held = paragraph("- **Each capture between steps took")
    # What a start captures is the largest of each kind, then halves of them.
    first = {(part, size) for part, sizes in FIRST_CAPTURED.items() for size in sizes}
    graphs = [(key.split()[0] + " q=1" * key.endswith("q=1"), int(key.split()[1].partition("t")[0]), took, hits)
              for key, _, took, hits in shim["graphs"] if took]  # fmt: skip
    between = [(took, hits) for part, size, took, hits in graphs if (part, size) not in first]
    assert len(between) == shim["counters"]["lazy_captures"] == 12
    assert len(graphs) == 20
    assert held.startswith(f" {min(between)[0]:.2f} to {max(between)[0]:.2f} s**")
    assert [hits for _, hits in between].count(0) == 1
    turns = turns_in(LATEST["qwen05b"], "lazy")
    assert captured_in(turns) == [5, 2, 0, 1, 1, 0, 1]
    assert sum(captured_in(turns)) == 10
    assert "five in the first, two in the second, one in the fourth, the fifth and the seventh" in held

    def later(turns: Iterable[dict[str, Any]], ms: int) -> int:
        return sum(each > ms for turn in turns for each in turn["ttft_ms"])

    with_some = [turn for turn in turns if "prompt_steps" not in turn]
    assert f"turns' {120 * len(with_some)} first tokens {later(with_some, 50)} came after 50 ms, two of them" in held
    assert later(with_some, 100) == later(turns[1:2], 100) == 2
    assert later([turn for turn in turns if "prompt_steps" in turn], 50) == 0
    others = [turns_in(LATEST["qwen05b"], side, "chat") for side in ("stock", "kpolicy")]
    assert f"Of stock's {120 * len(others[0])} it was {later(others[0], 50)} after 50 ms and none after 100" in held
    assert (later(others[0], 100), later(others[1], 50)) == (0, 0)


FIRST_CAPTURED = {"FULL q=1": (1024, 512, 256), "FULL": (512, 256, 128), "PIECEWISE": (4096, 2048)}
"""By lazy capture at the start of the 0.5B: what kind, with which sizes"""


def test_the_page_tells_what_split_and_lazy_capture_did_before() -> None:
    """That no step was split; how many graphs were captured in turns and how long; and the turns without."""
    shims, none_split = call_of("qwen05b", BETWEEN)["shims"], paragraph("- **SPLIT split no step.**")
    counters = shims["qwen05b_split"]["counters"]
    assert {name for name in counters if "split" in name} == {"split_not_worth_it"}
    assert f"was asked {counters['split_not_worth_it']:,} times" in none_split
    pairs_of = otherwise_of(BETWEEN)
    assert all(row["low"] < 1 < row["high"] for row in pairs_of["kpolicy split"].values())
    lazy = {base: pairs_of[f"{base} lazy"] for base in ("stock", "kpolicy")}
    fails = paragraph("- **Lazy capture failed chat.**")
    both = [ratio(lazy[base]["chat", "requests_per_s"]) for base in ("stock", "kpolicy")]
    assert f"at {both[0]} of stock and {both[1]} of kpolicy" in fails
    late = [lazy[base]["chat", "ttft_all_p99_ms"] for base in ("stock", "kpolicy")]
    assert f"{late[0]['lazy']:.0f} ms, for {late[0]['stock']:.0f} in stock and {late[1]['kpolicy']:.0f}" in fails
    assert f"gaps were at {ratio(lazy['stock']['chat', 'gap_slow_ms'])} of stock" in fails
    held, counted = paragraph("- **Each capture between steps held"), shims["qwen05b_lazy"]
    between = sorted(seconds for _, _, seconds, _ in counted["graphs"] if seconds > 0.1)
    assert len(between) == counted["counters"]["lazy_captures"] == 12
    assert held.startswith(f" all requests up for {between[0]:.2f} to {between[-1]:.2f} s.")
    turns = lazy_turns(BETWEEN)
    captured = {load: [turn["repeat"] for turn in turns[load][True]] for load in turns}
    assert captured == {"code-2048": [0], "chat": [0, 1, 3, 4, 5], "decode-1000-64": [0]}
    assert sum(sum(captured_in(turns[load][True])) for load in turns) == 10
    assert captured_in(turns["chat"][True]) == [2, 1, 1, 1, 2]
    free = paragraph("- **Turns without a capture aren't told apart from kpolicy's**")
    for load in OTHERWISE:
        without = {turn["repeat"]: turn["requests_per_s"] for turn in turns[load][False]}
        cells = []
        for base in ("kpolicy", "stock"):
            rates = {turn["repeat"]: turn["requests_per_s"] for turn in turns_in(BETWEEN, base, load)}
            cells.append(told(*ratio_interval([without[turn] / rates[turn] for turn in without])))
        words = "{} of kpolicy and {} of stock" if len(without) > 6 else "{} and {}"
        assert words.format(*cells) in free, load
    chat = turns["chat"]
    assert not any(ms > 100 for turn in chat[False] for ms in turn["ttft_ms"])
    slow = {which: sorted(turn["gap_slow_ms"] for turn in chat[which]) for which in (True, False)}
    told_slow = (
        f"of {slow[False][0]:.1f} and {slow[False][1]:.1f} ms for {slow[True][1]:.0f} to {slow[True][-1]:.0f} in"
    )
    assert f"{told_slow} four of the five others and {slow[True][0]:.1f} in one" in free
    counts = [sum(ms > 100 for ms in turn["ttft_ms"]) for turn in chat[True]]
    assert [bool(count) for count in counts].count(True) == 3
    assert f"three have {sum(counts)} first tokens of 360 after 100 ms" in free


def test_the_page_tells_what_the_larger_models_starts_took() -> None:
    """Shares of stock's; memory with equal largest sizes; what vLLM estimated; and the starts with cold caches."""
    part = PAGE.partition("\n**Llama-3.1-8B and DeepSeek-V2-Lite**, on 2026-11-30")[2].partition("\n## ")[0]
    page = " ".join(part.split())
    found = {model: starts_of(model, "--plan ") for model in ("llama8b", "dsv2lite")}
    roomy = starts_of("dsv2lite", "--sides wide kpolicy ")
    assert set(found["dsv2lite"]) == {"stock", "kpolicy", "planned"}

    def over_stock(side: str, figure: str) -> list[str]:
        return [f"{found[model][side][0][figure] / found[model]['stock'][0][figure]:.2f}" for model in found]

    planned, ours = (over_stock(side, "capture_s") for side in ("planned", "kpolicy"))
    assert f"ladder take {planned[0]} and {planned[1]} of stock's seconds**, by default {ours[0]} and {ours[1]}" in page
    stock, kpolicy, wide_one = (found["llama8b"][side] for side in ("stock", "kpolicy", "wide"))
    assert f"(`wide`) takes {wide_one[0]['capture_s'] / stock[0]['capture_s']:.2f} times its own on Llama" in page
    assert "one list has {PIECEWISE} pieces and {FULL} graphs of decodes".format(**wide_one[0]["graphs"]) in page
    longer = [first_over(found[model][side], found[model]["stock"], "start_s")
              for model in found for side in ("kpolicy", "planned")]  # fmt: skip
    took = " and ".join(f"{row['start_s']:.1f}" for row in kpolicy)
    assert (
        f"{longer[0]} of stock's pace, {took} s for {stock[0]['start_s']:.1f}. With the plan it is {longer[1]}" in page
    )
    assert f"On DeepSeek it is {longer[2]}, with the plan {longer[3]}" in page
    assert f"than `wide`'s, {first_over(roomy['kpolicy'], roomy['wide'], 'start_s')}." in page
    memory, of_plan = (over_stock(side, "graph_mib") for side in ("kpolicy", "planned"))
    assert f"**Graph memory by default is {memory[0]} and {memory[1]} times stock's**" in page
    shares = [ours[0]["graph_mib"] / theirs[0]["graph_mib"]
              for ours, theirs in ((kpolicy, wide_one), (roomy["kpolicy"], roomy["wide"]))]  # fmt: skip
    assert f"kpolicy takes {shares[0]:.2f} and {shares[1]:.2f} of it" in page
    assert f"it is {of_plan[0]} and {of_plan[1]} of stock's" in page
    sizes = [row["sizes"] for row in (*found["llama8b"]["kpolicy"], *wide_one, *roomy["wide"], *roomy["kpolicy"])]
    assert {max(each) for each in sizes} == {4096}
    (small,) = {tuple(row["sizes"]) for row in found["dsv2lite"]["planned"]}
    assert small[:7] == (1, 2, 3, 4, 5, 6, 7)
    theirs, ours, planned_ds = (found["dsv2lite"][side][0] for side in ("stock", "kpolicy", "planned"))
    assert f"they are at {ours['kv_tokens'] / theirs['kv_tokens']:.3f}, as vLLM" in page
    estimated = f"{ours['estimate_mib']:,.0f} MiB for kpolicy, which used {ours['graph_mib']:,.0f}, and "
    assert f"{estimated}{theirs['estimate_mib']:,.0f} for stock, which used {theirs['graph_mib']:,.0f}" in page
    assert f"with the plan at {planned_ds['kv_tokens'] / theirs['kv_tokens']:.3f}" in page
    big = roomy["wide"][0]
    gib = [big[name] / 1024 for name in ("estimate_mib", "graph_mib")]
    assert f"estimates {gib[0]:.2f} GiB for its graphs, which take {gib[1]:.2f}" in page
    kv = [f"{roomy[side][0]['kv_tokens']:,}" for side in ("wide", "kpolicy")]
    assert f"`wide` has {kv[0]} KV tokens there, and kpolicy {kv[1]}" in page
    cold = starts_of("dsv2lite", "--sides stock kpolicy lazy ")
    captures = [cold[side][0]["capture_s"] for side in ("stock", "kpolicy", "lazy")]
    words = "captures of stock took {:.1f} s, of kpolicy {:.1f}, and of `lazy`, with 8 of its 40 graphs, {:.1f}"
    assert words.format(*captures) in page
    lazy = cold["lazy"][0]
    assert f"used {lazy['graph_mib']:.0f} MiB where vLLM estimates {lazy['estimate_mib']:,.0f}" in page


def test_the_page_tells_that_the_burst_met_a_quick_host() -> None:
    told_there = paragraph("- **The burst's ")
    assert told_there.startswith(said("qwen05b", "burst-768", "requests_per_s"))
    assert f"at {said('qwen05b', 'burst-768', 'host_us')} of its speed" in told_there
    assert f"alone has {said('qwen05b', 'burst-768', 'added_ms')}" in told_there


def paragraph(begins: str) -> str:
    """What the page says from there to its next bullet or heading, in one line."""
    assert begins in WORDS
    return re.split(r" - (?=\*\*|\[Llama|Captures)| #+ ", WORDS.partition(begins)[2])[0]


def test_the_page_tells_what_bounds_llama_s_code() -> None:
    """By the profile: the device at work, matrix products and attention of that, and the power it drew."""
    told_there, shares, at_work, lasted = paragraph("**The code trace is the device's"), [], [], []
    found = raw_of("vllm_profile_llama8b")
    for side in ("stock", "kpolicy"):
        row = found["loads"]["code-2048"][side]
        whole = [step for step in row["steps"] if step[2] == 2048]
        shares.append(f"{sum(step[5] for step in whole) / sum(step[4] for step in whole):.0%}")
        at_work.append(f"{statistics.median(step[5] for step in whole):.1f}")
        lasted.append(f"{statistics.median(step[4] for step in whole):.1f}")
    assert f"for {shares[0]} of the time on both sides" in told_there
    assert shares[0] == shares[1]
    assert f"{at_work[0]} and {at_work[1]} ms of {lasted[0]} and {lasted[1]}" in told_there
    row = found["loads"]["code-2048"]["stock"]
    busy = sum(step[5] for step in row["steps"] if step[2] > step[3])

    def share(name: str) -> str:
        return f"{sum(ms for prompts, kernel, _, ms in row['kernels'] if prompts and name in kernel) / busy:.0%}"

    assert f"products are {share('nvjet')} of that in stock, attention {share('FlashAttn')}" in told_there
    busiest = [max(each, key=lambda row: row[1]) for each in code_turns(found["clocks"]["rows"])]
    assert "it drew {}, {} and {} W".format(*(row[1] for row in busiest)) in told_there
    assert {row[3] for row in busiest} == {1.0}
    low, *_, high = sorted(row[2] / 1e3 for row in busiest)
    assert f"at {low:.2f} to {high:.2f} GHz" in told_there
    turns = [turn for side in ("stock", "kpolicy") for turn in turns_before("llama8b", "code-2048", side)]
    (eager,) = set(modes(turns, "NONE"))
    told_steps = f"the same {eager} eager steps at {BEFORE}, so requests/s is "
    assert f"{told_steps}{was('llama8b', 'code-2048', 'requests_per_s')}" in told_there
    assert f"gap p99 {was('llama8b', 'code-2048', 'gap_p99_ms')}: **short of 1.05**" in told_there


def code_turns(clocks: list[Any], busy_w: int = 600, idle_s: int = 30) -> list[list[Any]]:
    """The seconds of each round's turns of the code trace, which are its first and last as long as their rows say.

    A round begins with the first busy second after so many that aren't; so does the start, before the rounds.
    """
    turns = [row for row in RAW["rows"] if (row["model"], row["load"], row["date"]) == PROFILED]
    lasted = [sum(row["wall_s"] for row in turns if row["repeat"] == n) for n in sorted({t["repeat"] for t in turns})]
    seconds = [(datetime.fromisoformat(f"2026-11-23T{row[0]}").timestamp(), row) for row in clocks]
    busy = [at for at, row in seconds if row[1] > busy_w]
    begins = [at for before, at in itertools.pairwise(busy) if at - before > idle_s]
    assert len(begins) == len(lasted)
    return [
        [row for at, row in seconds if begin <= at <= begin + took]
        for begin, took in zip(begins, lasted, strict=True)
    ]  # fmt: skip


def device_ms(decodes: int, *keys: str) -> list[str]:
    """Medians of what a step of so many decodes took the device in those graphs."""
    took = {
        row["key"]: statistics.median(row["device"]) / 1e3
        for row in raw_of("vllm_ways_llama8b")["ways"]
        if (row["decodes"], row["chunk"], row["bounded"]) == (decodes, 0, False)
    }
    return [f"{took[key]:.1f}" for key in keys]


def test_the_page_tells_that_llama_s_decodes_ran_eagerly_on_both_sides() -> None:
    """Alike step by step; what a graph would take; and why the costs chose so."""
    told_there = paragraph("- **768 and 1,000 decodes ran eagerly")
    for load in DECODES:
        eager = {
            tuple(turn["modes"]["NONE"])
            for side in ("stock", "kpolicy")
            for turn in turns_before("llama8b", load, side)
        }
        assert len(eager) == 1
        assert was("llama8b", load, "requests_per_s") in told_there
    whole, pieces, eagerly = device_ms(768, "FULL 768t/768r q=1", "PIECEWISE 768t", "None")
    assert f"of 768 takes {whole} ms in the FULL graph, {pieces} in pieces and {eagerly} eagerly" in told_there
    whole, pieces, eagerly = device_ms(1000, "FULL 1024t/1024r q=1", "PIECEWISE 1024t", "None")
    assert f"of 1,000 {whole}, {pieces} and {eagerly}." in told_there
    costs, numbers = costs_of("llama8b", commit=BEFORE), numbers_of(Step(768, 768, 768, 1, 1), 1)
    eager_us, full_us = (
        costs.cost((Launch(Rows.ALL, key),), numbers).cycle_us
        for key in (None, GraphKey(Part.FULL, 768, 768, query_len=1))
    )
    took = before_of("llama8b")[DECODES[0], "gap_p50_ms"]["kpolicy"]
    chose = f"at {eager_us / 1e3:.1f} ms eagerly and {full_us / 1e3:.1f} in the FULL graph, where it took {took:.1f}"
    assert f"{chose}, as eager steps are timed to {costs.eager.sizes[-1]} rows" in told_there
    found = f"Llama's of 768 decodes were expected at {eager_us / 1e3:.1f} ms and took {took:.1f}"
    assert found in WORDS


def test_the_page_tells_why_llama_s_chat_fails() -> None:
    """Every figure; which steps ran in padded pieces, how long they took; and why, by the costs."""
    told_there, load = paragraph("- **Chat fails.**"), ("llama8b", "chat")
    for figure in ("gap_p99_ms", "gap_slow_ms", "ttft_p50_ms", "ttft_p99_ms", "ttft_geo_ms", "requests_per_s",
                   "gap_p50_ms"):  # fmt: skip
        assert said(*load, figure) in told_there
    assert f"of all turns together at {said(*load, 'ttft_all_p99_ms')}" in told_there
    assert f"{figure_of(*load, 'ttft_geo_ms')['high']:.4f} at most" in told_there
    sides = {side: turns_of(*load, side) for side in ("stock", "kpolicy")}
    counts = {side: span(len(turn["prompt_steps"]) for turn in turns) for side, turns in sides.items()}
    eager = {side: span(map(eager_prompts, turns)) for side, turns in sides.items()}
    steps = f"{eager['kpolicy']} of a turn's {counts['kpolicy']} steps with prompts ran eagerly, of stock's "
    assert f"{steps}{counts['stock']} it was {eager['stock']}" in WORDS
    took: dict[tuple[str, str], list[tuple[int, int, float]]] = {}
    for side, turns in sides.items():
        for mode, size, tokens, _, ms, _ in (step for turn in turns for step in turn["prompt_steps"]):
            if 2048 < tokens <= 4096:
                took.setdefault((side, mode), []).append((size, tokens, ms))
    pieces, theirs, ours = (
        (statistics.median(ms for *_, ms in took[which]), len(took[which]))
        for which in (("kpolicy", "PIECEWISE"), ("stock", "NONE"), ("kpolicy", "NONE"))
    )
    assert len(took) == 3
    came = f"in pieces came {pieces[0]:.1f} ms after the step before (median of {pieces[1]}), stock's eager ones "
    assert f"{came}{theirs[0]:.1f} (of {theirs[1]}), kpolicy's own eager ones {ours[0]:.1f} (of {ours[1]})" in WORDS
    padded = took["kpolicy", "PIECEWISE"]
    whole = sum(size for size, *_ in padded) / sum(tokens for _, tokens, _ in padded) - 1
    most = max(size / tokens for size, tokens, _ in padded) - 1
    assert f"were padded by {whole:.0%} in all and by {most:.0%} at most" in WORDS
    costs = costs_of("llama8b")
    told_timed = f"pieces were timed to {costs.piecewise.sizes[-1]} tokens and eager steps to {costs.eager.sizes[-1]:,}"
    assert f"In the 2 s {told_timed}." in WORDS
    slopes = [
        (curve.us[-1] - curve.us[-2]) / (curve.sizes[-1] - curve.sizes[-2]) for curve in (costs.piecewise, costs.eager)
    ]
    of_pieces, of_eager = (f"{slope:.1f}" for slope in slopes)
    assert f"pieces by {of_pieces} µs a token (704 to 896), eager steps by {of_eager} (896 to 1,024)" in WORDS
    cheaper = []
    for size, tokens in ((3072, 2600), (4096, 3500)):
        us = [
            curve.us[-1] + slope * (many - curve.sizes[-1])
            for curve, slope, many in zip((costs.piecewise, costs.eager), slopes, (size, tokens), strict=True)
        ]
        cheaper.append(f"{1 - us[0] / us[1]:.0%}")
    assert f"seemed {cheaper[0]} cheaper than the eager step of 2,600 tokens" in WORDS
    assert f"those of 4,096 {cheaper[1]} cheaper than that of 3,500" in WORDS


def test_the_page_tells_that_llama_s_decodes_run_in_full_graphs() -> None:
    """What gains; what steps took; first tokens; which eager step was timed, and what was within doubt."""
    told_there = paragraph("- **768 and 1,000 decodes run in FULL graphs, and gain**")
    for load in DECODES:
        for figure in ("requests_per_s", "gap_p50_ms"):
            assert said("llama8b", load, figure) in told_there
    assert f"A step {decodes_took('llama8b')}" in told_there
    for figure in ("ttft_p50_ms", "ttft_p99_ms", "ttft_geo_ms", "added_ms"):
        assert said("llama8b", DECODES[0], figure) in told_there
    costs = costs_of("llama8b")
    largest = f"the eager step of {costs.eager.sizes[-1]:,} decodes was timed, at {costs.eager.us[-1] / 1e3:.1f} ms"
    assert f"{largest} of the device" in told_there
    kept = [(count, tokens) for mode, why, count, tokens, _ in call_of("llama8b")["shims"]["llama8b_kpolicy"]["steps"]
            if (mode, why) == ("full", "within_doubt")]  # fmt: skip
    ((count, tokens),) = kept
    assert f"{count} steps of the call, of some {tokens / count:.0f} tokens each" in told_there


def test_the_page_tells_what_llama_s_code_ran_in() -> None:
    """Pieces of 2,048 for eager steps that take as long."""
    told_there, load = paragraph("- **Code at 2,048 gains nothing**"), ("llama8b", "code-2048")
    for figure in ("requests_per_s", "gap_p99_ms", "gap_p50_ms"):
        assert said(*load, figure) in told_there
    assert f"{figure_of(*load, 'requests_per_s')['high']:.4f} at most" in told_there
    turns = turns_of(*load, "kpolicy")
    whole = [sum(step[:2] == ["PIECEWISE", 2048] for step in turn["prompt_steps"]) for turn in turns]
    assert {len(turn["prompt_steps"]) for turn in turns} == {43, 44}
    assert f"{span(whole)} of a turn's 43 or 44 steps with prompts ran in pieces of 2,048" in told_there
    took = [
        statistics.median(
            step[4] for turn in turns_of(*load, side) for step in turn["prompt_steps"]
            if step[0] == mode and step[2] > 1024
        ) for side, mode in (("kpolicy", "PIECEWISE"), ("stock", "NONE"))
    ]  # fmt: skip
    assert f"took {took[0]:.1f} ms in pieces, and {took[1]:.1f} on stock (medians)" in told_there


def test_the_page_tells_where_llama_s_chat_was_short() -> None:
    """Each figure beside a second process of stock, and the turns that the p99 is of."""
    told_there = paragraph("- **Chat was short of 0.99 in two figures**")
    short = {name for name in FIGURES if before_of("llama8b")["chat", name]["ratio"] < SHORT}
    assert short == {"ttft_p50_ms", "ttft_p99_ms"}
    for figure in (*FIGURES, "ttft_geo_ms", "gap_slow_ms"):
        assert was("llama8b", "chat", figure) in told_there
    for figure in short:
        row = before_of("llama8b")["chat", figure]
        assert row["low"] < 1 < row["high"]
    second = paragraph("- **A second stock process isn't told apart from it**")
    for figure in ("ttft_p50_ms", "ttft_p99_ms", "ttft_geo_ms"):
        assert said("llama8b", "chat", figure, "stock again") in second
        assert said("llama8b", "chat", figure, "again kpolicy") in second
    assert f"gap p99 at {said('llama8b', 'chat', 'gap_p99_ms', 'again kpolicy')}" in second
    for figure, before in (
        ("requests_per_s", "requests/s at "), ("gap_p50_ms", "gaps at "), ("gap_p99_ms", "and "),
        ("ttft_p50_ms", "first tokens at "), ("ttft_p99_ms", "and "),
    ):  # fmt: skip
        row = figure_of("llama8b", "chat", figure, "stock again")
        bounds = f"({row['low']:.3f} to {row['high']:.3f})"
        assert f"{before}{row['ratio']:.3f} {bounds}" in paragraph("- **What a ratio is worth**")
    sides = {side: turns_before("llama8b", "chat", side) for side in ("stock", "kpolicy")}
    p99 = {side: [f"{turn['ttft_p99_ms']:.0f}" for turn in turns] for side, turns in sides.items()}
    ours, theirs = (" and ".join(p99[side][:2]) for side in ("kpolicy", "stock"))
    others = [span(turn["ttft_p99_ms"] for turn in sides[side][2:]) for side in ("kpolicy", "stock")]
    assert f"kpolicy has {ours} ms, stock {theirs}; in the other five {others[0]}, and {others[1]}" in WORDS
    late = []
    for turn in (*sides["stock"], *sides["kpolicy"]):
        _, second_slowest = sorted(range(len(turn["ttft_ms"])), key=lambda request: -turn["ttft_ms"][request])[:2]
        assert turn["ttft_ms"][second_slowest] == pytest.approx(turn["ttft_p99_ms"], abs=0.01)
        late.append(second_slowest)
    assert f"one of the requests {min(late)} to {max(late)}" in WORDS
    turns = [*sides["stock"], *sides["kpolicy"]]
    steps = f"{span(modes(turns, 'NONE'))} eager steps and {span(modes(turns, 'PIECEWISE'))} in pieces a turn"
    assert f"Both sides ran {steps}" in WORDS
    assert f"llama8b_kpolicy at {BEFORE}" in raw_tables()


def test_the_page_tells_when_llama_s_late_first_tokens_come() -> None:
    """All within a moment."""
    requests = make_load("chat", "llama8b", real_file(CHAT).parent).requests
    assert f"93 to 118, which come within {requests[118][0] - requests[93][0]:.2f} s" in WORDS


def test_the_page_tells_what_llama_s_chat_had_earlier() -> None:
    """What pieces of each size take for 394 tokens; the one step that differs; a slow core's costs."""
    took = {
        row["key"]: statistics.median(row["device"]) / 1e3
        for row in raw_of("vllm_ways_llama8b")["ways"]
        if (row["decodes"], row["chunk"], row["bounded"]) == (3, 391, False)
    }
    earlier = paragraph("**Chat of 30 requests, earlier**")
    one, *others = (f"{took[f'PIECEWISE {size}t']:.1f}" for size in (448, 400, 432, 464, 512))
    told_sizes = "the device {} ms, those of 400 {}, of 432 {}, of 464 {} and of 512 {}".format(one, *others)
    assert told_sizes in earlier
    first = raw_of("vllm_llama8b_chat_first")["rows"]
    ours, stock = (
        [f"{row['ttft_p50_ms']:.1f}" for row in sorted(first, key=lambda row: row["repeat"]) if row["side"] == side]
        for side in ("kpolicy", "stock")
    )
    assert f"medians were {' and '.join(ours)} ms for {' and '.join(stock)} in stock" in earlier
    ratios = [float(theirs) / float(own) for theirs, own in zip(stock, ours, strict=True)]
    assert f"median first token was at {statistics.geometric_mean(ratios):.2f} at d11ce8d" in earlier
    assert f"{float(one) - float(others[0]):.1f} ms more" in earlier
    second = raw_of("vllm_llama8b_chat_second")
    turns = second["rows"]
    padded = {row["side"]: [] for row in turns}
    for row in turns:
        padded[row["side"]].append([step[1] for step in row["prompt_steps"] if step[2] in (879, 880)])
    assert padded["kpolicy"] == [[1024]] * 9
    assert all(sizes in ([879], [880]) for sizes in padded["stock"])
    for figure in ("ttft_p50_ms", "gap_p99_ms"):
        assert told(*pairs(turns, "stock", "kpolicy", figure)).replace("*", "") in earlier.replace("*", "")
    (call,) = second["calls"]
    launching = {
        side: float(call["costs"][f"llama8b_{side}"].partition("host_eager=HostCost(base_us=")[2].partition(",")[0])
        for side in ("kpolicy", "paced")
    }
    assert f"its calibration had launching an eager step at {launching['kpolicy'] / 1e3:.0f} ms" in earlier
    assert f"`paced`, calibrated three seconds later, has {launching['paced'] / 1e3:.0f} ms" in earlier
    for figure in ("requests_per_s", "gap_p99_ms", "ttft_p50_ms", "ttft_p99_ms"):
        assert said("llama8b", "code-2048", figure, "stock paced") in paragraph("**Shorter steps")


def pairs(turns: list[dict[str, Any]], ours: str, theirs: str, figure: str) -> tuple[float, float, float]:
    """Mean ratio of the turns' pairs, and its interval."""
    sides = [{row["repeat"]: row[figure] for row in turns if row["side"] == side} for side in (ours, theirs)]
    mean, low, high = ratio_interval([sides[0][turn] / sides[1][turn] for turn in sides[0]])
    assert low is not None
    assert high is not None
    return mean, low, high


def test_the_page_tells_from_when_llama_s_chat_had_stock_s_steps_in_the_call_before() -> None:
    """Two turns by costs of a slow core, then, once they followed the host's speed, seven in the same graphs."""
    found = raw_of("vllm_llama8b_chat_third")
    turns, now = found["rows"], paragraph("**Chat of 30 requests, earlier**").partition("At 084b1ca")[2]
    assert [call["commit"] for call in found["calls"]] == ["084b1ca"]
    for figure in ("ttft_p50_ms", "gap_p99_ms"):
        assert told(*pairs(turns, "stock", "kpolicy", figure)) in now
    assert told(*pairs(turns, "stock", "again", "ttft_p50_ms")).replace("*", "") in now

    for row in turns:
        eager = {step[2] for step in row["prompt_steps"] if step[0] == "NONE"}
        apart = row["side"] == "kpolicy" and row["repeat"] < 2
        assert (min(eager) > 2000) is apart
        if apart:
            sizes = sorted(step[1] for step in row["prompt_steps"])
            assert [size for size in sizes if 512 < size < 2000] == [896, 1536, 1536, 1536]
        elif row["side"] == "stock":
            assert eager_prompts(row) == 7
    assert "four of stock's seven eager steps ran in pieces, from the third turn on none" in now


def test_llama_s_later_calls_are_told() -> None:
    """Their table, what the steps ran in, and a step that comes later in pieces."""
    page = " ".join(PAGE.split("## Llama again")[1].split("\n## ")[0].split())
    calls = [raw_of(f"vllm_llama8b_{name}") for name in ("fourth", "fifth")]
    assert [call["commit"] for each in calls for call in each["calls"]] == ["735ac70", "dedba98"]
    found = [{(row["load"], row["figure"]): row for row in compared(each["rows"])["stock kpolicy"]} for each in calls]
    shown = {
        "requests/s": "requests_per_s", "gap p50": "gap_p50_ms", "gap p99": "gap_p99_ms",
        "slowest 2% of gaps": "gap_slow_ms", "first tokens, p50 of all turns": "ttft_all_p50_ms",
        "first tokens, p99 of all turns": "ttft_all_p99_ms", "first tokens, geometric mean": "ttft_geo_ms",
    }  # fmt: skip
    names = {"conversation": "chat", "code": "code-2048", "768": "decode-768-64", "1,000": "decode-1000-64"}
    load, seen = "", 0
    for line in PAGE.split("## Llama again")[1].split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 4 or cells[1] not in shown:
            continue
        load = next((own for name, own in names.items() if name in cells[0]), load)
        for cell, rows in zip(cells[2:], found, strict=True):
            row = rows.get((load, shown[cells[1]]))
            if not cell:
                assert row is None
                continue
            short = "**" * (row["ratio"] < 0.99)
            assert cell == f"{short}{row['ratio']:.3f}{short} ({row['low']:.3f} to {row['high']:.3f})", (load, line)
            seen += 1
    assert seen == 20
    for requests, mode, steps, least in ((768, "FULL", 67, 63), (1000, "PIECEWISE", 68, 59)):
        turns = [row for row in calls[0]["rows"] if row["load"] == f"decode-{requests}-64" and row["side"] == "kpolicy"]
        assert {(row["modes"][mode][0], row["steps"]) for row in turns} == {(least, steps)}
        assert f"{least} of {steps} steps" in page
    came: dict[tuple[str, str], list[float]] = {}
    for row in calls[0]["rows"]:
        for mode, _, tokens, requests, ms, _ in row.get("prompt_steps", []) if row["load"] == "chat" else ():
            if (tokens, requests) == (1122, 19):
                came.setdefault((row["side"], mode), []).append(ms)
    eager, pieces = (statistics.median(came[key]) for key in (("stock", "NONE"), ("kpolicy", "PIECEWISE")))
    assert f"come {eager:.1f} ms after the step before on stock and {pieces:.1f} ms in pieces" in page
    slow = {row["of"]: row for row in states_compared(calls[0]["rows"]) if row["figure"] == "gap_p50_ms"}
    both = " ".join(PAGE.split("## Replays' two speeds inside vLLM")[1].split("\n## ")[0].split())
    assert (
        f"were {slow['stock']['ratio']:.4f} times ({slow['stock']['low']:.4f} to {slow['stock']['high']:.4f})" in both
    )
    own = slow["kpolicy"]
    assert f"and {own['ratio']:.3f} times ({own['low']:.3f} to {own['high']:.3f}) with kpolicy" in both


def test_llama_s_chat_with_eager_steps_held_to_their_pieces_is_told() -> None:
    """Its table, without steps made late and with them; which steps ran eagerly; what the log counted."""
    part = PAGE.split("## Llama's chat with eager")[1].split("\n## ")[0]
    page, found = " ".join(part.split()), raw_of("vllm_llama8b_sixth")
    [call] = found["calls"]
    assert call["commit"] == "95448e0"
    assert """--paced '{"defer": false}'""" in call["command"]
    shown = {
        "requests/s": "requests_per_s", "gap p50": "gap_p50_ms", "gap p99": "gap_p99_ms",
        "slowest 2% of gaps": "gap_slow_ms", "first tokens, p50 of all turns": "ttft_all_p50_ms",
        "first tokens, p99 of all turns": "ttft_all_p99_ms", "first tokens, geometric mean": "ttft_geo_ms",
    }  # fmt: skip
    pairs = [{row["figure"]: row for row in compared(found["rows"])[f"stock {side}"]} for side in ("paced", "kpolicy")]
    rows = [cells for cells in (line.split(" | ") for line in part.splitlines()) if cells[0].strip("| ") in shown]
    assert [cells[0].strip("| ") for cells in rows] == list(shown)
    for cells in rows:
        for cell, of in zip(cells[1:], pairs, strict=True):
            row = of[shown[cells[0].strip("| ")]]
            short = "**" * (row["ratio"] < 0.99)
            assert cell.rstrip(" |") == f"{short}{row['ratio']:.3f}{short} ({row['low']:.3f} to {row['high']:.3f})"
            assert row["repeats"] == 6
    assert min(of["ratio"] for figure, of in pairs[0].items() if figure in shown.values()) >= 0.99
    turns = [row for row in found["rows"] if row["load"] == "chat" and row["repeat"] < 6]
    eager = {side: [row["modes"]["NONE"][0] for row in turns if row["side"] == side] for side in ("paced", "stock")}
    (least, most), (low, high) = ((min(each), max(each)) for each in eager.values())
    assert f"{least} to {most} steps a turn ran eagerly, of stock's {low} to {high}" in page
    gained, longer = (pairs[1][figure]["ratio"] for figure in ("ttft_geo_ms", "gap_slow_ms"))
    told = f"first tokens {1 - 1 / gained:.1%} sooner at the same requests/s and"
    words = " ".join((ROOT / "docs" / "vllm.md").read_text(encoding="utf-8").split())
    assert f"{told} [made the slowest gaps {1 / longer - 1:.0%} longer]" in words


def test_the_small_model_s_later_call_is_told() -> None:
    """What its turns came to until the machine was gone."""
    found = raw_of("vllm_qwen05b_fourth")
    rows = {(row["load"], row["figure"]): row for row in compared(found["rows"])["stock kpolicy"]}
    part = paragraph("**Qwen2.5-0.5B again**")

    def of(load: str, figure: str) -> str:
        row = rows[load, figure]
        return f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"

    assert [each["commit"] for each in found["calls"]] == ["735ac70"]
    counts = {load: row["repeats"] for (load, figure), row in rows.items() if figure == "requests_per_s"}
    assert [counts[load] for load in ("chat", "code-2048", "decode-1000-64", "code-8192")] == [5, 5, 4, 4]
    code, chat = (
        f"{of(load, 'requests_per_s')} {told} {of(load, 'gap_p99_ms')}"
        for load, told in (("code-2048", "in requests/s and"), ("chat", "and"))
    )
    assert f"Code at 2,048 has {code} in gap p99, chat {chat}" in part
    assert f"{of('chat', 'ttft_all_p50_ms')} and {of('chat', 'ttft_all_p99_ms')} at p50 and p99" in part
    assert f"1,000 decodes have {of('decode-1000-64', 'requests_per_s')} in requests/s" in part
    large = f"{of('code-8192', 'requests_per_s')} and gap p99 at {of('code-8192', 'gap_p99_ms')}"
    assert f"Code at 8,192 has {large}." in part


def test_the_page_tells_what_captures_took() -> None:
    """Of engines that started one after the other, before they served."""
    told_there, cold = paragraph("- **Captures**"), {}
    for row in RAW["rows"]:
        if row["load"] == "cold start" and row.get("call") == call_of(row["model"])["call"]:
            about = row["cold"]
            cold[row["model"], row["side"]] = (sum(about["graphs"].values()), f"{about['capture_s']:.1f}")
    (ours, took), (_, stock) = (cold["llama8b", side] for side in ("kpolicy", "stock"))
    assert "four engines at once" in told_there
    assert len([model for model, _ in cold if model == "qwen05b"]) == 4
    assert f"on Llama {ours} graphs in {took} s, stock's 102 in {stock}" in told_there
    for model, name in (("dsv2lite", "DeepSeek"), ("qwen05b", "the 0.5B")):
        (ours, took), (graphs, stock) = (cold[model, side] for side in ("kpolicy", "stock"))
        at_once = ", four engines at once," if model == "qwen05b" else ""
        assert f"on {name}{at_once} {ours} in {took} s, stock's in {stock}" in told_there
        assert graphs == 102


def test_the_page_tells_what_starts_save() -> None:
    """Shares of stock's seconds and memory; bytes with equal largest sizes; and bytes that were estimated."""
    of_plan, wide = of_sides("stock planned"), of_sides("wide kpolicy")
    capture, memory = (of_plan["start", figure]["ratio"] for figure in ("capture_s", "graph_mib"))
    assert f"takes {1 / capture:.2f} of stock's seconds**, and of the memory {1 / memory:.2f}" in WORDS
    starts_of = {figure: figure_of("qwen05b", "start", figure) for figure in ("start_s", "capture_s", "graph_mib")}
    row = starts_of["capture_s"]
    assert row["low"] < 1 < row["high"]
    assert f"By default it is {row['ratio']:.2f} times as quick, with 1 in the interval" in WORDS
    assert f"What capture saves ({row['stock'] - row['kpolicy']:.1f} s)" in WORDS
    longer, of_planned = said("qwen05b", "start", "start_s"), of_plan["start", "start_s"]
    told_planned = told(of_planned["ratio"], of_planned["low"], of_planned["high"])
    assert f"{longer} of stock's pace, with 1 in the interval; with the plan {told_planned}" in WORDS
    assert f"by default is {1 / starts_of['graph_mib']['ratio']:.2f} times stock's" in WORDS
    mib = wide["start", "graph_mib"]
    assert f"takes more than kpolicy: {mib['wide']:.0f} MiB for {mib['kpolicy']:.0f}" in WORDS
    rows = [row for row in RAW["rows"] if (row["model"], row["load"]) == ("qwen05b", "start")]
    estimated = {row["side"]: (row["estimate_mib"], row["graph_mib"]) for row in rows}
    assert "({:,.0f} MiB estimated, {:.0f} used)".format(*estimated["wide"]) in WORDS
    assert "smallest: {:.0f} MiB, where {:.0f} were used".format(*estimated["kpolicy"]) in WORDS
    assert "of the plan {:.0f} for {:.0f}".format(*estimated["planned"]) in WORDS
    sizes = {row["side"]: row["sizes"] for row in rows}
    graphs = {row["side"]: row["graphs"] for row in rows}
    assert max(sizes["wide"]) == max(sizes["kpolicy"]) == 4096
    told_graphs = ["{FULL} + {PIECEWISE}".format(**graphs[side]) for side in ("stock", "kpolicy", "planned", "wide")]
    row, *_ = [line for line in PAGE.splitlines() if line.startswith("| graphs, FULL + PIECEWISE |")]
    assert [cell.strip().split(" to ")[0] for cell in row.split("|")[2:6]] == told_graphs


def test_the_guide_s_and_the_readme_s_words_are_those_of_the_results() -> None:
    """What they say below their tables."""
    guide, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/vllm.md", "README.md"))
    chat = [said("llama8b", "chat", figure) for figure in ("gap_slow_ms", "ttft_all_p99_ms")]
    assert f"slowest 2% of gaps are at {chat[0]}, first tokens of all turns at p99 at {chat[1]} ([why]" in guide
    assert f"First tokens of its 768 decodes are at {said('llama8b', DECODES[0], 'ttft_p50_ms')}." in guide
    assert "conversation trace fails: gaps and first tokens at p99 are below 0.9, as" in readme
    assert max(figure_of("llama8b", "chat", figure)["ratio"] for figure in ("gap_p99_ms", "ttft_p99_ms")) < 0.9
    assert f"the slowest 2% of its gaps are at {said('qwen05b', 'code-8192', 'gap_slow_ms')} ([why]" in guide
    late, per_s = (of_sides("stock lazy")["chat", figure] for figure in ("ttft_all_p99_ms", "requests_per_s"))
    beside = of_sides("kpolicy lazy")["chat", "ttft_all_p99_ms"]
    of_chat = (
        f"{late['lazy']:.0f} ms, for {late['stock']:.0f} in stock and {beside['kpolicy']:.0f} without `lazy`, and "
    )
    assert f"first tokens of all turns at p99 of {of_chat}requests/s at {ratio(per_s)} of stock" in guide
    then, per_s = (
        otherwise_of(BETWEEN)["stock lazy"]["chat", figure] for figure in ("ttft_all_p99_ms", "requests_per_s")
    )
    assert f"with garbage collected it was {then['lazy']:.0f} ms and {ratio(per_s)} ([figures]" in guide
    assert f"at p99 are at {ratio(late)} of stock and {ratio(beside)} of kpolicy without it" in guide
    held = [took for _, _, took, _ in call_of("qwen05b", BETWEEN)["shims"]["qwen05b_lazy"]["graphs"] if took > 0.1]
    assert f"with it a graph took {span(held, '.2f')} s" in guide
    split = [ratio(of_sides("kpolicy split")["code-2048", figure]) for figure in ("gap_p50_ms", "requests_per_s")]
    assert f"the median gap is at {split[0]} of kpolicy without it, requests/s at {split[1]} and" in guide
    first = {
        model: {side: rows[0] for side, rows in starts_of(model, "--plan ").items()}
        for model in ("llama8b", "dsv2lite")
    }
    llama, deepseek = first.values()
    captures, whole = (
        [f"{each[side][figure]:.1f}" for each in (llama, deepseek) for side in ("kpolicy", "stock")]
        for figure in ("capture_s", "start_s")
    )
    more = [f"{each['kpolicy']['graph_mib'] / each['stock']['graph_mib']:.2f}" for each in (llama, deepseek)]
    words = "captures took {} s for stock's {} on Llama and {} for {} on DeepSeek, with ".format(*captures)
    words += "{} and {} times the graph memory, and the start ".format(*more)
    assert words + "{} for {} and {} for {}.".format(*whole) in guide
    planned = [f"{each['planned']['capture_s']:.1f}" for each in (llama, deepseek)]
    less = [f"{each['planned']['graph_mib'] / each['stock']['graph_mib']:.2f}" for each in (llama, deepseek)]
    assert "With 19 planned sizes they took {} and {} s, and {} and {} of".format(*planned, *less) in guide
    assert all(
        figure_of("dsv2lite", load, name)["ratio"] >= SHORT
        for load in VLLM_LOADS
        for name in FIGURES
        if load in ("chat", "code-2048", *DECODES)
    )
    start = figure_of("qwen05b", "start", "start_s")
    assert start["low"] < 1 < start["high"]
    assert f"takes longer**, {told(start['ratio'], start['low'], start['high'])} of stock's pace" in guide
    for row, words in (
        (figure_of("qwen05b", "start", "capture_s"), "Captures are {}"),
        (of_sides("stock planned")["start", "capture_s"], "with a planned ladder {}"),
    ):
        each = f"{row['ratio']:.2f} times ({row['low']:.2f} to {row['high']:.2f}) as quick"
        assert words.format(each) in guide
    median = figure_of("qwen05b", "code-8192", "gap_p50_ms", "stock paced")["ratio"]
    assert f"the median gap is {1 / median:.1f} times stock's" in guide


def test_the_page_tells_in_what_bounded_prompts_went() -> None:
    """At 8,192, first turn and later ones."""
    turns = turns_of("qwen05b", "code-8192", "paced")
    most = [
        max((size for mode, size, *_ in turn["prompt_steps"] if mode == "PIECEWISE"), key=pieces_of(turn).count)
        for turn in turns
    ]
    assert most[0] == 3072
    assert set(most[2:]) == {4096}
    assert "pieces of 3,072 in the first turn and of 4,096 from the third on" in WORDS
    longer = 1 / figure_of("qwen05b", "code-8192", "gap_p50_ms", "stock paced")["ratio"]
    assert f"the median gap is {longer:.1f} times as long" in WORDS
    slow = said("qwen05b", "code-8192", "gap_slow_ms", "stock paced")
    assert f"The slowest 2% of gaps are at {slow} there" in WORDS


def pieces_of(turn: dict[str, Any]) -> list[int]:
    return [step[1] for step in turn["prompt_steps"] if step[0] == "PIECEWISE"]


def test_the_page_tells_what_rows_took_the_host() -> None:
    """One number of all kinds in the tables of 54c1189; one a kind in those before."""
    one = {}
    for model in MODELS:
        costs = costs_of(model, commit=BEFORE)
        (us,) = {host.req_us for host in (costs.host_full, costs.host_piecewise, costs.host_eager)}
        one[model] = f"{us:.1f}"
    assert "{qwen05b} µs on the 0.5B, {dsv2lite} on DeepSeek and {llama8b} on Llama at 54c1189".format(**one) in WORDS
    tables = raw_tables()
    paced, slow = (
        [host.req_us for host in (table.host_full, table.host_piecewise, table.host_eager)]
        for table in (tables[f"llama8b_{side} at 94620cd"] for side in ("paced", "kpolicy"))
    )
    assert "`paced`, on a quick core, had {:.1f}, {:.1f} and {:.1f}".format(*paced) in WORDS
    assert "`kpolicy`, on a slow one, {:.1f}, {:.0f} and {:.0f} at 94620cd".format(*slow) in WORDS
    costs = costs_of("dsv2lite", commit=BEFORE)
    assert len(costs.piecewise.sizes) == 6
    assert len(costs.full.sizes) == 14
    assert len(costs.eager.sizes) == 3
    assert f"it timed six sizes of pieces to {costs.piecewise.sizes[-1]:,}, none between" in WORDS
    whole, eager = costs.full.sizes[-1], costs.eager.sizes[-1]
    others = f"14 of whole graphs to {whole} and three of eager steps to {eager} rows"
    assert f"{costs.piecewise.sizes[-2]} and that, {others}" in WORDS


def test_what_a_step_costs_is_as_the_pages_say() -> None:
    """The tables of both runners, on a CPU and on a GPU's host, and the least and the most of them."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    words = " ".join((ROOT / "docs/vllm.md").read_text().split())
    added: dict[str, dict[str, list[float]]] = {}
    for place in ("", "h200/"):
        found = json.loads((RESULTS / f"{place}vllm_shim.json").read_text())
        rows: dict[str, list[str]] = {}
        for row in found["rows"]:
            cells = rows.setdefault(f"{row['vllm'].removesuffix('.0')}, {row['runner']}", [])
            cells += [f"{row['stock_us']:.2f}", f"{row['kpolicy_us']:.2f}"]
            added.setdefault(place, {}).setdefault(row["runner"], []).append(row["added_us"])
        for name, cells in rows.items():
            assert f"| {name} | {' | '.join(cells)} |" in page
        look = {"": "some {:.1f} ms (`look_us`; ", "h200/": "; {:.2f} on the H200's host)"}[place]
        assert look.format(found["look_us"] / 1e3) in page
    first, second = added[""]["v1"], added[""]["v2"]
    there, others = added["h200/"]["v1"], added["h200/"]["v2"]
    assert f"at least {-max(first):.2f} µs less than vLLM's own on the first runner" in words
    assert (
        f"at most {max(second):.2f} µs more on the second, and on an H200's host {-max(there):.2f} less and " in words
    )
    assert f"{max(others):.2f} more ([benchmarks.md]" in words
    told_there = f"first runner's steps take {-max(there):.2f} to {-min(there):.2f} µs less in each kind and release, "
    told_there += f"the second's {-min(others):.2f} less to **{max(others):.2f} more**. By the table above it is "
    told_there += f"{-max(first):.2f} to {-min(first):.2f} less, and {-min(second):.2f} less to {max(second):.2f} more"
    assert told_there in page
    both = [*added.values()]
    low, high = [-pick(pick(each["v1"]) for each in both) for pick in (max, min)]
    less, most = (pick(pick(each["v2"]) for each in both) for pick in (min, max))
    short = f"| first runner: {low:.1f} to {high:.1f} µs less; second: {-less:.1f} µs less to **{most:.1f} more** |"
    assert short in page
