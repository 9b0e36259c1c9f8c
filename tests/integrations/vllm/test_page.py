"""docs/measured_vllm.md: its tables are those of the published results."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm.loads import BURST_OUTPUTS, RATES
from benchmarks.vllm.stock_vs_kpolicy import KV_BYTES
from benchmarks.vllm.summary import ratio_interval
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
CODE = ("llama8b", "code-2048")
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


def followed(costs: str) -> bool:
    """Whether a table isn't as it was measured, but brought to the speed that the host had since."""
    return ", the host at " in costs


def test_the_page_s_calls_and_launching_costs_are_published() -> None:
    """Each call's command and commit, and what launching an eager step took by its calibration; starts have none."""
    raw = json.loads((RESULTS / "h200" / "raw" / "vllm_stock_vs_kpolicy.json").read_text())
    rows = {row["call"] for row in raw["rows"] if row.get("core_looks")}
    of_starts = [call for call in raw["calls"] if call["command"].startswith("python -m benchmarks.vllm.starts ")]
    assert rows == {call["call"] for call in raw["calls"] if call not in of_starts}
    launching = {}
    for call in raw["calls"]:
        assert (" --one-core " in call["command"]) is (call not in of_starts)
        assert f"kpolicy at {call['commit']} " in PAGE
        for name, costs in call["costs"].items():
            base_us = float(costs.partition("host_eager=HostCost(base_us=")[2].partition(",")[0])
            if not followed(costs):
                launching[name] = base_us / 1e3
    told = "launching an eager step took {qwen05b_kpolicy:.0f} ms on the 0.5B, {dsv2lite_kpolicy:.0f} on DeepSeek and "
    assert (told + "{llama8b_kpolicy:.0f} on Llama").format(**launching) in " ".join(PAGE.split())


def test_the_page_tells_what_the_loads_are() -> None:
    """KV of both sides, tokens of a burst, and requests of the conversation trace beside the short table."""
    gib = {model: f"{KV_BYTES[model] / 2**30:g}" for model in MODELS}
    words = " ".join(PAGE.split())
    assert "the same KV on both sides: {qwen05b}, {dsv2lite} and {llama8b} GiB".format(**gib) in words
    assert f"burst of 768 requests of {BURST_OUTPUTS} tokens" in words
    guide = " ".join((ROOT / "docs" / "vllm.md").read_text().split())
    chat = {rates.chat_requests for rates in RATES.values()}
    assert f"The conversation trace is {min(chat)} requests a turn ({max(chat)} for Qwen2.5-0.5B)" in guide


def test_the_page_has_how_large_chat_s_pieces_are() -> None:
    """DeepSeek's tokens with their padding, by step; and in how many looks a core was slow."""
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
    for side, between in (("stock", " of some 72 looks the core was slow, and the figure "), ("kpolicy", " looks, ")):
        slow, *_ = zip(*sorted((row["core_slow"], row["gap_p99_ms"]) for row in of("dsv2lite", side)), strict=True)
        _, gaps = zip(*sorted((row["core_slow"], row["gap_p99_ms"]) for row in of("dsv2lite", side)), strict=True)
        told_slow, told_gaps = (
            f"{one}, {two} and {three}" for one, two, three in (slow, [f"{gap:.1f}" for gap in gaps])
        )
        assert f"{told_slow}{between}{told_gaps} ms in {side}".replace(" ms in stock", " ms, in stock") in words


def raw_of(name: str) -> Any:
    return json.loads((RESULTS / "h200" / "raw" / f"{name}.json").read_text())


def paragraph(begins: str) -> str:
    """What the page says from there to its next bullet, in one line."""
    return re.split(r" - (?=\*\*|Captures)", " ".join(PAGE.split()).partition(begins)[2])[0]


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


def code_turns(clocks: list[Any], busy_w: int = 600, idle_s: int = 30) -> list[list[Any]]:
    """The seconds of each round's turns of the code trace, which are its first and last as long as their rows say.

    A round begins with the first busy second after so many that aren't; so does the start, before the rounds.
    """
    turns = [row for row in raw_of("vllm_stock_vs_kpolicy")["rows"] if (row["model"], row["load"]) == CODE]
    lasted = [sum(row["wall_s"] for row in turns if row["repeat"] == n) for n in sorted({t["repeat"] for t in turns})]
    seconds = [(datetime.fromisoformat(f"2026-11-23T{row[0]}").timestamp(), row) for row in clocks]
    busy = [at for at, row in seconds if row[1] > busy_w]
    begins = [at for before, at in itertools.pairwise(busy) if at - before > idle_s]
    assert len(begins) == len(lasted)
    return [
        [row for at, row in seconds if begin <= at <= begin + took]
        for begin, took in zip(begins, lasted, strict=True)
    ]  # fmt: skip


def test_the_page_tells_why_llama_s_chat_was_late() -> None:
    """What pieces of each size take for 394 tokens; the one step that differs; and stock's second process."""
    took = {
        row["key"]: statistics.median(row["device"]) / 1e3
        for row in raw_of("vllm_ways_llama8b")["ways"]
        if (row["decodes"], row["chunk"], row["bounded"]) == (3, 391, False)
    }
    one, *others = (f"{took[f'PIECEWISE {size}t']:.1f}" for size in (448, 400, 432, 464, 512))
    assert f"the device {one} ms, those of 400 {{}}, of 432 {{}}, of 464 {{}} and of 512 {{}}".format(
        *others
    ) in paragraph("**Chat had its median")
    turns = raw_of("vllm_llama8b_chat_second")["rows"]
    padded = {row["side"]: [] for row in turns}
    for row in turns:
        padded[row["side"]].append([step[1] for step in row["prompt_steps"] if step[2] in (879, 880)])
    assert padded["kpolicy"] == [[1024]] * 9
    assert all(sizes in ([879], [880]) for sizes in padded["stock"])
    now = paragraph("**The call before**")
    for figure in ("ttft_p50_ms", "gap_p99_ms"):
        assert told(*pairs(turns, "stock", "kpolicy", figure)) in now
    (call,) = raw_of("vllm_llama8b_chat_second")["calls"]
    launching = {
        side: float(call["costs"][f"llama8b_{side}"].partition("host_eager=HostCost(base_us=")[2].partition(",")[0])
        for side in ("kpolicy", "paced")
    }
    assert f"its calibration had launching an eager step at {launching['kpolicy'] / 1e3:.0f} ms" in now
    assert f"`paced`, calibrated three seconds later, has {launching['paced'] / 1e3:.0f} ms" in now
    first = raw_of("vllm_llama8b_chat_first")["rows"]
    ours, stock = (
        [f"{row['ttft_p50_ms']:.1f}" for row in sorted(first, key=lambda row: row["repeat"]) if row["side"] == side]
        for side in ("kpolicy", "stock")
    )
    earlier = paragraph("**Chat had its median")
    assert f"medians were {' and '.join(ours)} ms for {' and '.join(stock)} in stock" in earlier
    ratios = [float(theirs) / float(own) for theirs, own in zip(stock, ours, strict=True)]
    assert earlier.startswith(f" first token at {statistics.geometric_mean(ratios):.2f} in the call before (d11ce8d)")
    assert f"{float(one) - float(others[0]):.1f} ms more" in earlier
    second = of_sides("stock again", "llama8b")
    words = " ".join(PAGE.split())
    for figure, before in (
        ("requests_per_s", "requests/s at "), ("gap_p50_ms", "gaps at "), ("gap_p99_ms", "and "),
        ("ttft_p50_ms", "first tokens at "),
    ):  # fmt: skip
        row = second["chat", figure]
        assert f"{before}{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})" in words
    for figure in ("requests_per_s", "gap_p99_ms"):
        assert told(
            *(of_sides("stock paced", "llama8b")["code-2048", figure][key] for key in ("ratio", "low", "high"))
        ) in paragraph("**Shorter steps")


def pairs(turns: list[dict[str, Any]], ours: str, theirs: str, figure: str) -> tuple[float, float, float]:
    """Mean ratio of the turns' pairs, and its interval."""
    sides = [{row["repeat"]: row[figure] for row in turns if row["side"] == side} for side in (ours, theirs)]
    mean, low, high = ratio_interval([sides[0][turn] / sides[1][turn] for turn in sides[0]])
    assert low is not None
    assert high is not None
    return mean, low, high


def test_the_page_tells_from_when_llama_s_chat_has_stock_s_steps() -> None:
    """Two turns by costs of a slow core, then, once they followed the host's speed, seven in the same graphs."""
    turns = [
        row for row in raw_of("vllm_stock_vs_kpolicy")["rows"] if (row["model"], row["load"]) == ("llama8b", "chat")
    ]
    now = paragraph("**Now** it is")
    since = [row for row in turns if row["repeat"] >= 2]
    figures = (("ttft_p50_ms", "first tokens"), ("gap_p99_ms", "gap p99"))
    again = [told(*pairs(since, "stock", "again", figure)) for figure, _ in figures]
    assert f"stock's second process has {again[0]} and {again[1]} of the same" in now
    ours, of_again = (pairs(since, side, "kpolicy", "ttft_p50_ms") for side in ("stock", "again"))
    behind = f"{1 - ours[0]:.1%} behind stock's and {1 - of_again[0]:.1%} behind its second process"
    assert behind in now
    assert all(low < 1 < high for _, low, high in (ours, of_again))
    for figure, name in figures:
        assert f"{name} {told(*pairs(since, 'stock', 'kpolicy', figure))}" in now
        assert told(*pairs(turns, "stock", "again", figure)) in now
        assert told(*pairs(turns, "stock", "kpolicy", figure)) in now

    def graphs(row: dict[str, Any]) -> list[list[Any]]:
        return sorted([step[0], step[1]] for step in row["prompt_steps"])

    for row in turns:
        eager = {step[2] for step in row["prompt_steps"] if step[0] == "NONE"}
        apart = row["side"] == "kpolicy" and row["repeat"] < 2
        assert (min(eager) > 2000) is apart
        if apart:
            assert [size for _, size in graphs(row) if 512 < size < 2000] == [896, 1536, 1536, 1536]
    by_request = {
        side: statistics.median(
            statistics.median(each)
            for each in zip(*(row["ttft_ms"] for row in since if row["side"] == side), strict=True)
        )
        for side in ("stock", "kpolicy", "again")
    }
    assert (
        "{stock:.1f} ms in stock, {again:.1f} in its second process and {kpolicy:.1f} in kpolicy".format(**by_request)
        in now
    )


def test_the_page_tells_what_rows_took_the_host() -> None:
    """By each kind of launch, in the tables of the first two calls."""
    calls = raw_of("vllm_stock_vs_kpolicy")["calls"]
    costs = {name: text for call in calls for name, text in call["costs"].items() if not followed(text)}

    def host(model: str, kind: str, side: str = "kpolicy") -> tuple[float, float]:
        found = re.search(rf"host_{kind}=HostCost\(base_us=([\d.]+), req_us=([\d.]+)", costs[f"{model}_{side}"])
        assert found is not None
        return float(found[1]), float(found[2])

    words = " ".join(PAGE.split())
    (base, row), (eager, _), (_, whole) = (host("dsv2lite", kind) for kind in ("piecewise", "eager", "full"))
    assert f"has {row:.0f} µs of the host for each row in pieces" in words
    assert f"where whole graphs have {whole:.1f}: by it a step with {math.ceil((eager - base) / row)} requests" in words
    assert (
        "came to {:.1f}, {:.1f} and {:.1f} µs a row".format(
            *(host("qwen05b", kind)[1] for kind in ("full", "piecewise", "eager"))
        )
        in words
    )
    paced, slow = (
        [host("llama8b", kind, side)[1] for kind in ("full", "piecewise", "eager")] for side in ("paced", "kpolicy")
    )
    assert "`paced`, on a quick core, had {:.1f}, {:.1f} and {:.1f}".format(*paced) in words
    assert "`kpolicy`, on a slow one, {:.1f}, {:.0f} and {:.0f}".format(*slow) in words


def test_what_a_step_costs_is_as_the_pages_say() -> None:
    """The table of both runners, and the least and the most of them."""
    found = json.loads((ROOT / "benchmarks/results/vllm_shim.json").read_text())
    rows: dict[str, list[str]] = {}
    added: dict[str, list[float]] = {}
    for row in found["rows"]:
        cells = rows.setdefault(f"{row['vllm'].removesuffix('.0')}, {row['runner']}", [])
        cells += [f"{row['stock_us']:.2f}", f"{row['kpolicy_us']:.2f}"]
        added.setdefault(row["runner"], []).append(row["added_us"])
    page = (ROOT / "docs/benchmarks.md").read_text()
    for name, cells in rows.items():
        assert f"| {name} | {' | '.join(cells)} |" in page
    assert f"some {found['look_us'] / 1e3:.1f} ms (`look_us`)" in page
    words = " ".join((ROOT / "docs/vllm.md").read_text().split())
    assert f"at least {-max(added['v1']):.2f} µs less than vLLM's own on the first runner" in words
    assert f"at most {max(added['v2']):.2f} µs more on the second" in words
