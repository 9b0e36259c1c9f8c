"""docs/measured_vllm.md: its tables are those of the published results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm.loads import BURST_OUTPUTS, RATES
from benchmarks.vllm.stock_vs_kpolicy import KV_BYTES
from tests.benchmarks.test_readme import VLLM_LOADS, told

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "measured_vllm.md").read_text()
MODELS = ("qwen05b", "dsv2lite", "llama8b")
MEASURED = VLLM_LOADS
FIGURES = {
    "requests_per_s": "requests/s", "gap_p50_ms": "gap p50 ms", "gap_p99_ms": "gap p99 ms",
    "ttft_p50_ms": "first token p50 ms", "ttft_p99_ms": "first token p99 ms",
}  # fmt: skip
SHORT = 0.99
"""A ratio below it is bold"""
SIMULATED = VLLM_LOADS | {
    "code-8192": f"{VLLM_LOADS['code-8192']}, vLLM's default here", "chat": f"{VLLM_LOADS['chat']}, 40 requests/s",
}  # fmt: skip
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
    raw = json.loads((RESULTS / "h200" / "raw" / "vllm_stock_vs_kpolicy.json").read_text())["rows"]
    for load, title in MEASURED.items():
        cells = []
        for model in MODELS:
            turns = [row for row in raw if row.get("core_looks") and (row["model"], row["load"]) == (model, load)]
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


def ratio(row: dict[str, Any], short: float = SHORT) -> str:
    """A ratio with its interval, bold below what is short."""
    told = f"{row['ratio']:.2f}"
    return f"{f'**{told}**' if row['ratio'] < short else told} ({row['low']:.2f} to {row['high']:.2f})"


def of_sides(pair: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of two of the call's five sides, by load and figure."""
    pairs = json.loads((RESULTS / "h200" / "vllm_sides.json").read_text())["pairs"]
    return {(row["load"], row["figure"]): row for row in pairs[pair]}


def ladder_alone() -> Iterator[str]:
    """Stock with the shim's sizes, and the shim against that."""
    wide, policy = of_sides("stock wide"), of_sides("wide kpolicy")
    for load in ("decode-768-64", "decode-1000-64", "code-2048"):
        figures = ("requests_per_s", "gap_p99_ms", "ttft_p50_ms") if load == "code-2048" else ("requests_per_s",)
        for place, figure in enumerate(figures):
            name = FIGURES[figure].removesuffix(" ms")
            cells = f"{ratio(wide[load, figure])} | {ratio(policy[load, figure], 0)}"
            yield f"| {'' if place else MEASURED[load]} | {name} | {cells} |"


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
    kpolicy = {row["figure"]: row for row in whole if row["load"] == "start"}
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


@pytest.mark.parametrize("rows", [loads, measured, ladder_alone, bounded, simulated, starts])
def test_the_page_s_rows_are_those_of_the_results(rows: Any) -> None:
    """Every one, in order."""
    table = "\n".join(" ".join(row.split()) for row in rows())
    assert table in "\n".join(" ".join(line.split()) for line in PAGE.splitlines())


def test_the_page_s_calls_and_launching_costs_are_published() -> None:
    """Each call's command and commit, and what launching an eager step took by its calibration."""
    raw = json.loads((RESULTS / "h200" / "raw" / "vllm_stock_vs_kpolicy.json").read_text())
    rows = {row["call"] for row in raw["rows"] if row.get("core_looks")}
    assert rows == {call["call"] for call in raw["calls"]}
    launching = {}
    for call in raw["calls"]:
        assert " --one-core " in call["command"]
        assert f"kpolicy at {call['commit']} " in PAGE
        for name, costs in call["costs"].items():
            launching[name] = float(costs.partition("host_eager=HostCost(base_us=")[2].partition(",")[0]) / 1e3
    told = "launching an eager step took {qwen05b_kpolicy:.0f} ms on the 0.5B, {dsv2lite_kpolicy:.0f} on DeepSeek and "
    assert (told + "{llama8b_kpolicy:.0f} on Llama").format(**launching) in " ".join(PAGE.split())


def test_the_page_tells_what_the_loads_are() -> None:
    """KV of both sides, tokens of a burst, and requests of the conversation trace beside the short table."""
    gib = {model: KV_BYTES[model] >> 30 for model in MODELS}
    words = " ".join(PAGE.split())
    assert "the same KV on both sides: {qwen05b}, {dsv2lite} and {llama8b} GiB".format(**gib) in words
    assert f"burst of 768 requests of {BURST_OUTPUTS} tokens" in words
    guide = " ".join((ROOT / "docs" / "vllm.md").read_text().split())
    chat = {rates.chat_requests for rates in RATES.values()}
    assert f"The conversation trace is {min(chat)} requests a turn ({max(chat)} for Qwen2.5-0.5B)" in guide


def test_the_page_has_how_large_chat_s_pieces_are() -> None:
    """Tokens with their padding, by step: DeepSeek's and Llama's; and in how many looks a core was slow."""
    rows = json.loads((RESULTS / "h200" / "raw" / "vllm_stock_vs_kpolicy.json").read_text())["rows"]

    def of(model: str, side: str) -> list[dict[str, Any]]:
        turns = [row for row in rows if row.get("core_looks") and (row["model"], row["load"]) == (model, "chat")]
        return sorted((row for row in turns if row["side"] == side), key=lambda row: row["repeat"])

    def pieces(model: str, side: str) -> list[tuple[int, int]]:
        counts = [row["modes"]["PIECEWISE"] for row in of(model, side)]
        return list(dict.fromkeys((steps, round(tokens / steps)) for steps, tokens in counts))

    words = " ".join(PAGE.split())
    ((stock, of_stock),), ((ours, of_ours),) = pieces("dsv2lite", "stock"), pieces("dsv2lite", "kpolicy")
    assert f"{ours} steps of {of_ours} tokens on average, where stock has {stock} of {of_stock}" in words
    (_, one), (_, two) = pieces("llama8b", "kpolicy")
    ((_, of_stock),) = pieces("llama8b", "stock")
    assert f"{one} and {two} tokens on average in the two pairs, where stock has {of_stock}" in words
    for side, between in (("stock", " of some 72 looks the core was slow, and the figure "), ("kpolicy", " looks, ")):
        slow, *_ = zip(*sorted((row["core_slow"], row["gap_p99_ms"]) for row in of("dsv2lite", side)), strict=True)
        _, gaps = zip(*sorted((row["core_slow"], row["gap_p99_ms"]) for row in of("dsv2lite", side)), strict=True)
        told_slow, told_gaps = (
            f"{one}, {two} and {three}" for one, two, three in (slow, [f"{gap:.1f}" for gap in gaps])
        )
        assert f"{told_slow}{between}{told_gaps} ms in {side}".replace(" ms in stock", " ms, in stock") in words
