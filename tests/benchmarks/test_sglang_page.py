"""Tables and sentences of docs/measured_sglang.md: the numbers are the result file's."""

import json
import re
from pathlib import Path
from statistics import geometric_mean

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "measured_sglang.md").read_text(encoding="utf-8")
FOUND = json.loads((ROOT / "benchmarks" / "results" / "h200" / "sglang_stock_vs_kpolicy.json").read_text())
ROWS = {(row["model"], row["load"], row["figure"]): row for row in FOUND["rows"]}
QWEN, DEEPSEEK, STEP = "Qwen2.5-0.5B", "DeepSeek-V2-Lite", "step ms"
TRACE, OWN = "conversation trace, 600 requests at once", "SGLang's sizes against kpolicy's"
PLANNED = "SGLang's sizes against planned ones that end at the same"
LOADS = {
    "1 decode": "decode 1", "32": "decode 32", "256": "decode 256", "512": "decode 512", "768": "decode 768",
    "prompt of 64": "extend 64", "1,024": "extend 1024", "2,048": "extend 2048",
    "32 decodes + 64": "32 decodes + extend 64", "+ 512": "32 decodes + extend 512",
    "+ 2,048": "32 decodes + extend 2048",
}  # fmt: skip
SERVED = {
    "requests/s": "requests/s", "p99 gap ms": "gap p99 ms", "median gap ms": "gap p50 ms",
    "first token ms, median": "first token p50 ms", "first token ms, p99": "first token p99 ms",
}  # fmt: skip
STARTS = {
    "0.5B planned, to SGLang's largest sizes: captures of 94 sizes, of 60": (QWEN, PLANNED, "capture s"),
    "whole start with 60": (QWEN, PLANNED, "start-up s"),
    "graph memory with 60": (QWEN, PLANNED, "graph MiB"),
    "DeepSeek-V2-Lite by default: captures of 36 sizes, of 45": (DEEPSEEK, OWN, "capture s"),
    "whole start of it": (DEEPSEEK, OWN, "start-up s"),
    "graph memory of it": (DEEPSEEK, OWN, "graph MiB"),
}


def between(begin, end):
    """What stands between two lines of the page."""
    return PAGE.partition(begin)[2].partition(end)[0]


def cells(text, begins):
    """The cells of the first line of a table that begins so, but for its first cell."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {begins} |"))
    return [cell.strip() for cell in line.strip().removesuffix("|").removeprefix("|").split("|")[1:]]


def holds(text, *values):
    """Whether the numbers of a text are these, rounded as they are told."""
    told = re.findall(r"\d[\d,]*(?:\.\d+)?", text)
    assert len(told) == len(values), text
    for number, value in zip(told, values, strict=True):
        digits = len(number.partition(".")[2])
        # A measured half is told either way.
        assert float(number.replace(",", "")) == pytest.approx(value, abs=0.5001 * 10**-digits), text


def ratio(row):
    """What is told of a ratio."""
    return row["ratio"], row["low"], row["high"]


@pytest.mark.parametrize(
    ("model", "begin", "labels"),
    [
        (QWEN, "\n### Qwen2.5-0.5B\n", list(LOADS)),
        (DEEPSEEK, "\n### DeepSeek-V2-Lite (MLA, mixture of experts)\n", [each for each in LOADS if each != "768"]),
    ],
)
def test_steps(model, begin, labels):
    """Medians, ratio and, where stock was started twice, both ratios of its second process."""
    table = between(begin, "\n\nRatios are of pairs" if model == QWEN else "\n\n- Prompts, mixed")
    for label in labels:
        row, (stock, kpolicy, whole, again) = ROWS[model, LOADS[label], STEP], cells(table, label)
        holds(stock, row["stock"])
        holds(kpolicy, row["kpolicy"])
        holds(whole, *ratio(row))
        holds(again, *(value for name in ("again", "against_again") if name in row for value in ratio(row[name])))


@pytest.mark.parametrize("label", ["1 decode", "32", "prompt of 64", "32 decodes + 64"])
def test_each_preparation_of_run_35(label):
    """Six a row, whose mean is the row's ratio."""
    row = ROWS[QWEN, LOADS[label], STEP]
    of_stock, of_second = row["preparations"], row["against_again"]["preparations"]
    holds(cells(PAGE, f"{label}, run 35")[0], *of_stock, *of_second)
    for told, each in ((row, of_stock), (row["against_again"], of_second)):
        assert told["ratio"] == pytest.approx(geometric_mean(each), abs=1e-4)


def test_the_trace():
    """Run 29's, and run 15's that it replaced."""
    table = between("every token streamed: run 29", "\n\n- Long prompts apart")
    earlier = {row["figure"]: row for row in FOUND["earlier"] if (row["run"], row["load"]) == (15, TRACE)}
    for label, figure in SERVED.items():
        row, (medians, now, then, before) = ROWS[QWEN, TRACE, figure], cells(table, label)
        left, right = re.split(r", (?=\d)", medians)
        holds(left, row["stock"])
        holds(right, row["kpolicy"])
        for text, each in ((now, row), (then, earlier[figure]), (before, ROWS[QWEN, f"{TRACE}, before", figure])):
            holds(text, *ratio(each))


def test_starts():
    """Seconds and memory, and each pair."""
    table = between("\nCaptures, and whole starts", "\n\n- Measuring took")
    for label, key in STARTS.items():
        row, (stock, kpolicy, whole) = ROWS[key], cells(table, label)
        holds(stock, row["stock"])
        holds(kpolicy, row["kpolicy"])
        holds(whole, *((row["ratio"],) if "MiB" in key[2] else (*ratio(row), *row["pairs"])))


@pytest.mark.parametrize(("run", "column"), [(30, 3), (28, 4)])
@pytest.mark.parametrize(
    ("label", "load"),
    [("decodes of the trace (6 sizes)", "decode steps of distinct"), ("decodes alike (8)", "decode steps of 1 to 256"),
     ("prompts of the trace (8)", "extend steps of distinct")],
)  # fmt: skip
def test_drawn_sizes(label, load, run, column):
    """By kpolicy's own list and with the plan of 60."""
    (row,) = [row for row in FOUND["rows"] if row["run"] == run and row["load"].startswith(load)]
    holds(cells(PAGE, label)[column], *ratio(row))


def test_the_worst_is_told():
    """Rows with today's code that are below 0.99 are named first, the least of each, and others near it beside them."""
    table = between("\n### Steps near 0.99\n", "\n### ")
    below = {(row["model"], row["load"].partition(" of ")[0]): row["ratio"] for row in FOUND["rows"]
             if row["run"] >= 26 and row["figure"] == STEP and row["ratio"] < 0.99}  # fmt: skip
    assert set(below) == {(QWEN, "32 decodes + extend 64"), (QWEN, "decode 80")}
    told = {label: cells(table, label) for label in re.findall(r"^\| ([^|]*\d[^|]*) \|", table, flags=re.MULTILINE)}
    bold = {label for label, (now, _) in told.items() if "**" in now}
    assert bold == {"0.5B: 32 decodes with 64 tokens", "80 decodes"}
    earlier = {(row["run"], row["load"]): row["ratio"] for row in FOUND["earlier"] if row["figure"] == STEP}
    small = {
        "1 decode": "decode 1",
        "32 decodes": "decode 32",
        "0.5B: 32 decodes with 64 tokens": "32 decodes + extend 64",
    }
    for label, load in small.items():
        row, (now, before) = ROWS[QWEN, load, STEP], told[label]
        values = (*ratio(row), 35, row["against_again"]["ratio"]) if label in bold else (row["ratio"], 35)
        holds(now, *values)
        holds(before, earlier[33, load], 33, earlier[32, load], 32)
    prompt = ROWS[QWEN, "extend 64", STEP]
    holds(told["a prompt of 64"][0], prompt["ratio"], 35, prompt["again"]["ratio"])
    drawn = [row for row in FOUND["rows"] if row["run"] in (28, 30) and " of " in row["load"]]
    (own,) = [row["ratio"] for row in drawn if row["run"] == 30 and row["load"].startswith("decode 80 of ")]
    holds(told["80 decodes"][0], below[QWEN, "decode 80"], 60, own)
    sizes = {"decode 80", "decode steps", "extend steps"}
    others = [row["ratio"] for row in drawn if row["load"].partition(" of ")[0] not in sizes]
    holds(cells(table, "the other drawn sizes")[0], min(others), max(others))
    alike = [ROWS[DEEPSEEK, f"decode {size}", STEP]["ratio"] for size in (1, 32, 256)]
    holds(cells(table, "DeepSeek-V2-Lite: decodes")[0], min(alike), max(alike))
