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
    "prompt of 64": "extend 64", "1,024": "extend 1024", "2,048": "extend 2048", "4,096": "extend 4096",
    "32 decodes + 64": "32 decodes + extend 64", "+ 512": "32 decodes + extend 512",
    "+ 2,048": "32 decodes + extend 2048",
}  # fmt: skip
SERVED = {
    "requests/s": "requests/s", "p99 gap ms": "gap p99 ms", "median gap ms": "gap p50 ms",
    "first token ms, median": "first token p50 ms", "first token ms, p99": "first token p99 ms",
    "a request's tokens, ms each: median": "pace p50 ms", "... p99": "pace p99 ms",
    "decode step at equal rows ms": "decode step at equal rows ms",
}  # fmt: skip
STARTS = {
    "0.5B planned, to SGLang's largest sizes: captures of 94 sizes, of 60": (QWEN, PLANNED, "capture s"),
    "whole start with 60": (QWEN, PLANNED, "start-up s"),
    "graph memory with 60": (QWEN, PLANNED, "graph MiB"),
    "0.5B by default: captures of 94 sizes, of 98 to 1,024 requests": (QWEN, OWN, "capture s"),
    "whole start by default": (QWEN, OWN, "start-up s"),
    "graph memory by default": (QWEN, OWN, "graph MiB"),
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
        (QWEN, "\n### Qwen2.5-0.5B\n", [each for each in LOADS if each != "4,096"]),
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
    """Six a row, whose mean is the ratio of a row that run 37 replaced."""
    (row,) = [
        row for row in FOUND["earlier"]
        if (row["run"], row["model"], row["load"], row["figure"]) == (35, QWEN, LOADS[label], STEP)
    ]  # fmt: skip
    of_stock, of_second = row["preparations"], row["against_again"]["preparations"]
    holds(cells(PAGE, f"{label}, run 35")[0], *of_stock, *of_second)
    for told, each in ((row, of_stock), (row["against_again"], of_second)):
        assert told["ratio"] == pytest.approx(geometric_mean(each), abs=1e-4)


def test_the_trace():
    """Run 43's, and of two earlier ones what they had."""
    table = between("every token streamed: run 43", "\n\n- Long prompts apart")
    earlier = {(row["run"], row["figure"]): row for row in FOUND["earlier"] if row["load"] == TRACE}
    for label, figure in SERVED.items():
        row, (medians, now, *others) = ROWS[QWEN, TRACE, figure], cells(table, label)
        assert row["run"] == 43
        left, right = medians.split(", ")
        holds(left, row["stock"])
        holds(right, row["kpolicy"])
        holds(now, *ratio(row))
        if (29, figure) not in earlier:  # figures that came later
            assert others == ["", "", ""]
            continue
        befores = (earlier[29, figure], earlier[15, figure], ROWS[QWEN, f"{TRACE}, before", figure])
        for text, each in zip(others, befores, strict=True):
            holds(text, *ratio(each))
    of_29 = earlier[29, "requests/s"]
    row = ROWS[QWEN, TRACE, "requests/s"]
    (told,) = re.findall(r"it served (.*?)\.\n", table)
    holds(told, row["stock"], of_29["stock"], row["kpolicy"], of_29["kpolicy"])


def test_starts():
    """Seconds and memory, and each pair."""
    table = between("\nCaptures, and whole starts", "\n\n- Measuring took")
    for label, key in STARTS.items():
        row, (stock, kpolicy, whole) = ROWS[key], cells(table, label)
        holds(stock, row["stock"])
        holds(kpolicy, row["kpolicy"])
        holds(whole, *((row["ratio"],) if "MiB" in key[2] else (*ratio(row), *row["pairs"])))


@pytest.mark.parametrize(("run", "column"), [(46, 3), (38, 4)])
@pytest.mark.parametrize(
    ("label", "load"),
    [("decodes of the trace (6 sizes)", "decode steps of distinct"), ("decodes alike (8)", "decode steps of 1 to 256"),
     ("prompts of the trace (8)", "extend steps of distinct")],
)  # fmt: skip
def test_drawn_sizes(label, load, run, column):
    """By kpolicy's own list and with the plan of 60."""
    (row,) = [row for row in FOUND["rows"] if row["run"] == run and row["load"].startswith(load)]
    holds(cells(PAGE, label)[column], *ratio(row))


NEAR = {
    "1 decode": "decode 1", "32 decodes": "decode 32", "256 decodes": "decode 256", "a prompt of 64": "extend 64",
    "a prompt of 256": "extend 256", "a prompt of 512": "extend 512", "a prompt of 1,024": "extend 1024",
    "a prompt of 2,048": "extend 2048", "32 decodes with 64 tokens": "32 decodes + extend 64",
}  # fmt: skip


def of_both(row):
    """Against the mean of both stock processes, over preparations that both have."""
    second = row["against_again"]["preparations"]
    return geometric_mean(geometric_mean(each) for each in zip(row["preparations"], second, strict=True))


def test_the_steps_near_the_line_are_told():
    """Those of run 37, and what earlier runs had of them; no step of today's code is below 0.99."""
    table = between("\n### Steps near 0.99\n", "\n### ")
    below = [key for key, row in ROWS.items() if row["run"] >= 37 and key[2] == STEP and row["ratio"] < 0.99]
    assert below == []
    earlier = {
        (row["run"], row["load"]): row["ratio"]
        for row in FOUND["earlier"]
        if (row["model"], row["figure"]) == (QWEN, STEP)
    }
    both, seconds = [], []
    for label, load in NEAR.items():
        row, told = ROWS[QWEN, load, STEP], cells(table, label)
        assert row["run"] == 37
        both.append(of_both(row))
        seconds.append(row["again"]["ratio"])
        for cell, value in zip(told[:3], (row["ratio"], row["against_again"]["ratio"], both[-1]), strict=True):
            holds(cell, value)
        before = [(earlier[run, load], run) for run in (35, 33, 32, 23) if (run, load) in earlier]
        holds(told[3], *(value for pair in before for value in pair))
    holds(re.findall(r"Stock's second process is (.*?) of its", table)[0], min(seconds), max(seconds))
    holds(re.findall(r"By the mean of both stock processes they are (.*?)\.\n", PAGE)[0], min(both), max(both))
    fewer = {row["load"]: row for row in FOUND["fewer"] if row["figure"] == STEP}
    assert set(fewer) == set(NEAR.values())
    (told_there,) = re.findall(r"nine again: (.*?) for 1 decode, the rest (.*?) \(`fewer`", table)
    holds(told_there[0], *ratio(fewer["decode 1"]))
    others = [row["ratio"] for load, row in fewer.items() if load != "decode 1"]
    holds(told_there[1], min(others), max(others))
    drawn = [row["ratio"] for row in FOUND["rows"]
             if row["run"] == 38 and " of " in row["load"] and " steps " not in row["load"]]  # fmt: skip
    holds(re.findall(r"sizes with 60 planned: (.*?) \(run 38\)", table)[0], min(drawn), max(drawn))
    alike = [ROWS[DEEPSEEK, f"decode {size}", STEP]["ratio"] for size in (1, 32, 256)]
    holds(re.findall(r"DeepSeek-V2-Lite's decodes: (.*?)\.\n", table)[0], min(alike), max(alike))


def test_nothing_measured_of_the_code_as_it_is_lies_below_the_line():
    """Memory by default alone, which ends at other sizes; the median gap that was short is told with its pairs."""
    below = [key for key, row in ROWS.items() if row["ratio"] < 0.99]
    assert sorted(below) == [(model, OWN, "graph MiB") for model in (DEEPSEEK, QWEN)]
    stock, ours = ([start["decode_mib"] for start in FOUND["starts"] if (start["run"], start["side"]) == (42, side)]
                   for side in ("stock", "kpolicy"))  # fmt: skip
    assert f"of DeepSeek-V2-Lite {ours[0]:.0f} MiB for {stock[0]:.0f} by the same ten decode graphs (run 42)" in PAGE
    key = (DEEPSEEK, "conversation trace, 48 requests at once, mixed chunks", "gap p50 ms")
    (before,) = [
        row for row in FOUND["earlier"] if (row["run"], row["model"], row["load"], row["figure"]) == (39, *key)
    ]
    (told,) = re.findall(
        r"median gap\*\* is (.*?) in run 42; its pairs are (.*?)\. It was (.*?) in run 39 \(pairs (.*?)\)", PAGE
    )
    for text, values in zip(told, (ratio(ROWS[key]), ROWS[key]["pairs"], ratio(before), before["pairs"]), strict=True):
        holds(text, *values)
    alike = ROWS[key[0], key[1], "decode step at equal rows ms"]
    (told_alike,) = re.findall(r"at equal rows a decode step takes (.*?)\. It is", PAGE)
    holds(told_alike, *ratio(alike))


def test_the_checks():
    """Run 40's, of each kind of step, and what is said of all of them."""
    table = between("\n## Correctness\n", "\n- **No token differs**")
    lines = [line for line in table.splitlines() if line.startswith(("| dense", "| MLA"))]
    checks = [check for check in FOUND["checks"] if check["run"] == 40]
    assert [check["model"] for check in checks] == ["qwen", "dsv2"]
    parts = [part for check in checks for part in (check, check["wide"], check["split"])]
    for line, part in zip(lines, parts, strict=True):
        assert part["passed"]
        errors = part["relative_l2_p999"]
        holds(
            line.split("|", 3)[3], part["rows"], part["rows_with_a_sure_token"], errors["eager"], errors["graph"],
            errors["broken"],
        )  # fmt: skip
        missed = part["token_mismatches"].values()
        assert not any(each["where the margin is above the limit"] for each in missed)
    assert all(each["bitwise"] for check in checks for each in check["same_shape"].values())
    assert {"decode 16", "decode 512", "extend 64", "extend 1024"} <= checks[1]["same_shape"].keys()
    assert [part["rows_unlike_eager"]["graph"] for part in parts] == [9, 0, 24, 0, 0, 25]


@pytest.mark.parametrize(
    ("begins", "model", "load"),
    [("0.5B, 64 in flight: requests/s", QWEN, "conversation trace, 64 requests at once, mixed chunks"),
     ("DeepSeek-V2-Lite, 48 in flight: requests/s", DEEPSEEK, "conversation trace, 48 requests at once, mixed chunks")],
)  # fmt: skip
def test_the_traces_with_mixed_chunks(begins, model, load):
    """Both sides and the ratio of each figure."""
    table = PAGE[PAGE.index(f"| {begins}") :]
    for label, figures in (
        (begins, ["requests/s"]), ("p99 gap ms", ["gap p99 ms"]), ("median gap ms", ["gap p50 ms"]),
        ("first token ms, median and p99", ["first token p50 ms", "first token p99 ms"]),
    ):  # fmt: skip
        sides, ratios = cells(table, label)
        each = [ROWS[model, load, figure] for figure in figures]
        for text, row in zip(sides.split("; "), each, strict=True):
            left, right = re.split(r", (?=\d+[.,]?\d*)", text, maxsplit=1) if text.count(", ") else (text, text)
            holds(left, row["stock"])
            holds(right, row["kpolicy"])
        holds(ratios, *(value for row in each for value in ratio(row)))
