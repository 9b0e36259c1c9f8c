"""README and the engines' guides: every row that quotes a result has its numbers; and what they name is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kpolicy import executors, policies
from kpolicy.cli import app

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = " ".join(README.split())
SHORT = 0.99
"""A ratio below it is bold."""


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def told(ratio: float, low: float | None = None, high: float | None = None) -> str:
    """A ratio with its interval; near 1 with three digits."""
    near = 0.975 <= ratio <= 1.025
    digits = 3 if near else 2 if ratio < 10 else 1
    each = f"{ratio:.{digits}f}"
    bounds = "" if low is None else f" ({low:.{digits}f} to {high:.{digits}f})"
    return (f"**{each}**" if ratio < SHORT else each) + bounds


def cell(row: dict[str, Any] | None) -> str:
    return "" if row is None else told(row["ratio"], row["low"], row["high"])


def line(*cells: str) -> str:
    return "".join(f"| {each} " if each else "| " for each in cells) + "|"


VLLM = {"qwen05b": "Qwen2.5-0.5B", "dsv2lite": "DeepSeek-V2-Lite", "llama8b": "Llama-3.1-8B"}
VLLM_LOADS = {
    "code-2048": "Azure code trace, saturated, steps of 2,048",
    "code-8192": "Azure code trace, saturated, steps of 8,192",
    "chat": "Azure conversation trace", "decode-768-64": "768 requests of 64 tokens at once",
    "decode-1000-64": "1,000 requests of 64 tokens at once", "burst-768": "burst of 768 requests of 4 tokens",
}  # fmt: skip
VLLM_FIGURES = ("requests_per_s", "gap_p50_ms", "gap_p99_ms", "ttft_p50_ms", "ttft_p99_ms")
NAMES = ("requests/s", "gap p50", "gap p99", "first token p50", "first token p99")


def vllm() -> list[str]:
    """Stock against kpolicy by default."""
    rows = {(row["model"], row["load"], row["figure"]): row for row in read("h200/vllm_stock_vs_kpolicy.json")}
    lines = []
    for model, name in VLLM.items():
        loads = [load for load in VLLM_LOADS if (model, load, "requests_per_s") in rows]
        for place, load in enumerate(loads):
            cells = [cell(rows[model, load, figure]) for figure in VLLM_FIGURES]
            lines.append(line("" if place else name, VLLM_LOADS[load], *cells))
    return lines


def of_paced() -> dict[tuple[str, str], dict[str, Any]]:
    """By load and figure, the 0.5B's."""
    rows = read("h200/vllm_sides.json")["pairs"]["stock paced"]
    return {(row["load"], row["figure"]): row for row in rows if row["model"] == "qwen05b"}


def weighed() -> list[str]:
    """With the objective `1:1`; steps of 2,048 of an earlier call."""
    rows = of_paced()
    return [
        line(VLLM_LOADS[load], *(cell(rows[load, figure]) for figure in VLLM_FIGURES))
        for load in ("code-2048", "code-8192")
    ]


def of_one(name: str, count: int, cells: list[tuple[dict[str, Any], str]], *more: str) -> str:
    """A model's row of the README: its loads or steps, and the most and the least of all figures, with their names."""
    most, least = (pick(cells, key=lambda each: each[0]["ratio"]) for pick in (max, min))
    return line(name, str(count), *more, *(f"{cell(row)}: {what}" for row, what in (most, least)))


def vllm_short() -> list[str]:
    """A row a model."""
    rows, lines = read("h200/vllm_stock_vs_kpolicy.json"), []
    for model, name in VLLM.items():
        found = [row for row in rows if row["model"] == model and row["load"] in VLLM_LOADS]
        named = dict(zip(VLLM_FIGURES, NAMES, strict=True))
        cells = [(row, f"{named[row['figure']]}, {VLLM_LOADS[row['load']]}") for row in found if row["figure"] in named]
        per_s = [row["ratio"] for row in found if row["figure"] == "requests_per_s"]
        lines.append(of_one(name, len(per_s), cells, f"{told(min(per_s))} to {told(max(per_s))}"))
    return lines


SGLANG = ("Qwen2.5-0.5B", "DeepSeek-V2-Lite")
FOUND = read("h200/sglang_stock_vs_kpolicy.json")
SGLANG_ROWS = {(row["model"], row["load"], row["figure"]): row for row in FOUND["rows"]}
STEPS = {
    "1 decode": "decode 1", "32 decodes": "decode 32", "256 decodes": "decode 256", "512 decodes": "decode 512",
    "768 decodes": "decode 768", "a prompt of 64": "extend 64", "a prompt of 256": "extend 256",
    "a prompt of 512": "extend 512",
    "a prompt of 1,024": "extend 1024", "a prompt of 2,048": "extend 2048", "a prompt of 4,096": "extend 4096",
    "32 decodes and a prompt of 64": "32 decodes + extend 64",
    "32 decodes and a prompt of 512": "32 decodes + extend 512",
    "32 decodes and a prompt of 2,048": "32 decodes + extend 2048",
    "other decodes, drawn from a trace": "decode steps of distinct sizes drawn from the trace, kpolicy's sizes",
    "other prompts, drawn from a trace": "extend steps of distinct sizes drawn from the trace, kpolicy's sizes",
}  # fmt: skip
SERVED = {
    (SGLANG[0], "conversation trace, 600 requests at once"): "600 requests at once",
    (SGLANG[0], "conversation trace, 64 requests at once, mixed chunks"): "with mixed chunks, 64 at once",
    (SGLANG[1], "conversation trace, 48 requests at once, mixed chunks"): "with mixed chunks, 48 at once",
}
SGLANG_FIGURES = ("requests/s", "gap p50 ms", "gap p99 ms", "first token p50 ms", "first token p99 ms")
STARTS = ("capture s", "start-up s", "graph MiB")
PLANNED, DEFAULT = "SGLang's sizes against planned ones that end at the same", "SGLang's sizes against kpolicy's"


def sglang_steps() -> list[str]:
    return [
        line(label, *(cell(SGLANG_ROWS.get((model, load, "step ms"))) for model in SGLANG))
        for label, load in STEPS.items()
    ]


def sglang_short() -> list[str]:
    """A row a model."""
    found = [
        [(SGLANG_ROWS[model, load, "step ms"], label) for label, load in STEPS.items()
         if (model, load, "step ms") in SGLANG_ROWS]
        for model in SGLANG
    ]  # fmt: skip
    return [of_one(model, len(cells), cells) for model, cells in zip(SGLANG, found, strict=True)]


def sglang_served() -> list[str]:
    return [
        line(model, label, *(cell(SGLANG_ROWS[model, load, figure]) for figure in SGLANG_FIGURES))
        for (model, load), label in SERVED.items()
    ]


def of_sglang(model: str, load: str) -> list[str]:
    *seconds, memory = (SGLANG_ROWS[model, load, figure] for figure in STARTS)
    return [*map(cell, seconds), told(memory["ratio"])]


def starts() -> list[str]:
    """vLLM's and SGLang's; memory has no interval."""

    def of_vllm(rows: list[dict[str, Any]], model: str = "qwen05b") -> list[str]:
        found = {row["figure"]: row for row in rows if (row["model"], row["load"]) == (model, "start")}
        return [*(cell(found[figure]) for figure in ("capture_s", "start_s")), told(found["graph_mib"]["ratio"])]

    return [
        line("vLLM, Qwen2.5-0.5B: 44 graphs for 102", *of_vllm(read("h200/vllm_stock_vs_kpolicy.json"))),
        line("the same, a plan of 19", *of_vllm(read("h200/vllm_sides.json")["pairs"]["stock planned"])),
        *(
            row
            for model, name in (("dsv2lite", "DeepSeek-V2-Lite: 40"), ("llama8b", "Llama-3.1-8B: 75"))
            for row in (
                line(f"vLLM, {name} graphs for 102", *of_vllm(read("h200/vllm_stock_vs_kpolicy.json"), model)),
                line("the same, a plan of 19", *of_vllm(read("h200/vllm_sides.json")["pairs"]["stock planned"], model)),
            )
        ),
        line("SGLang, Qwen2.5-0.5B: 98 graphs for 94", *of_sglang(SGLANG[0], DEFAULT)),
        line("the same, 60 planned sizes", *of_sglang(SGLANG[0], PLANNED)),
        line("SGLang, DeepSeek-V2-Lite: 45 graphs for 36", *of_sglang(SGLANG[1], DEFAULT)),
    ]


DECIDED = {
    "vLLM 0.33 v1 dispatcher": "vllm 0.33 v1 dispatcher", "vLLM 0.33 v2 manager": "vllm 0.33 v2 manager",
    "`select`, `auto`": "select auto", "`select`, `full_and_piecewise`": "select full_and_piecewise",
    "`select`, `vllm` replica (v2)": "select vllm",
    "`decide`, `auto`, the shape made on the way": "decide auto, shape made",
}  # fmt: skip


def decided() -> list[str]:
    us = read("decide.json")["us"]
    return [
        line(label, *(f"{us[batches][name]:.2f}" for batches in ("decode", "mixed", "mix")))
        for label, name in DECIDED.items()
    ]


TABLES = (vllm_short, sglang_short, sglang_served, starts, decided)


def tables(section: str, text: str = README) -> list[list[str]]:
    """The rows of each table under a heading, less its head."""
    text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [block.splitlines()[2:] for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)]


def test_every_table_of_results_is_that_of_the_results() -> None:
    """Row by row and in order, with what is below 0.99 in bold; there is no table that isn't held."""
    told_there = [*tables("Inside a serving engine"), *tables("Figures")]
    assert told_there == [rows() for rows in TABLES]


def test_where_gaps_are_weighed() -> None:
    """The gaps that gain, what that costs, and the median gap that is worse."""
    slow, served, median = (
        cell(of_paced()["code-8192", name]) for name in ("gap_p99_ms", "requests_per_s", "gap_p50_ms")
    )
    told_there = f"at steps of 8,192 has gap p99 at {slow}, requests/s at {served} and the median gap at {median}:"
    assert f"the code trace {told_there}" in WORDS


def test_sglang_s_settings_are_told() -> None:
    """Those of the server that was measured, in the README and the guide."""
    from benchmarks.sglang.server import ARGS

    assert ARGS["disable_radix_cache"]
    for text in (WORDS, " ".join(guide("sglang.md").split())):
        for name in ("attention_backend", "sampling_backend"):
            assert f"`--{name.replace('_', '-')} {ARGS[name]}`" in text
        assert "`--disable-radix-cache`" in text
        assert "no other attention backend was measured" in text


def test_what_other_batches_take_to_decide() -> None:
    """The least and the most of them; a first decision, a large ladder."""
    found = read("decide.json")
    others = found["us_auto_other_batches"].values()
    assert f"takes {min(others):.1f} to {max(others):.1f} µs" in WORDS
    assert f"in a fresh interpreter takes {found['first_decision']['ms']:.0f} ms" in WORDS
    compiled = found["compile"]
    assert f"{compiled['keys']:,} keys compiles in {compiled['compile_ms']:.0f} ms" in WORDS
    assert f"keeps {compiled['memory_kb']:.0f} kB" in WORDS


def test_the_whole_trace() -> None:
    """Requests, steps and seconds of each run."""
    found = read("whole_trace.json")
    seconds = {" ".join(run["policies"]): f"{run['seconds']:.0f} s" for run in found["runs"]}
    first = found["runs"][0]
    assert (
        f"({first['requests'][0]:,} requests, {first['steps'][0]:,} steps) took {seconds['auto']} with `auto`" in WORDS
    )
    assert f"{seconds['vllm']} with the `vllm` replica and {seconds['auto vllm']} with both" in WORDS
    assert all(wrong == 0 for run in found["runs"] for wrong in run["wrong"])


def test_the_replica_agrees() -> None:
    """On as many batches and runners as are told."""
    runners = read("oracle_vllm.json")["runners"]
    assert {each["mismatches"] for each in runners} == {0}
    assert {each["batches"] for each in runners} == {20_000}
    assert "20,000 random batches for each of four runners" in WORDS
    assert len(runners) == 4


def test_how_far_auto_is_from_the_best() -> None:
    """The mean's most over a model's loads, p99's most of all, and who was better."""
    rows = [row for row in read("h200/regret.json") if row["policy"] == "auto" and row["objective"] == "step_us"]

    def most(model: str, figure: str = "mean_regret") -> str:
        return f"{max(row[figure] for row in rows if row['model'] == model):.1%}"

    assert (
        f"at most {most('qwen05b')} with Qwen2.5-0.5B's shape, {most('llama1b')} with Llama-3.2-1B's, "
        f"{most('llama8b')} with Llama-3.1-8B's and {most('dsv2lite')} with DeepSeek-V2-Lite's; no replica "
        "or fixed policy was better on any load of any model."
    ) in WORDS
    every = read("h200/regret.json")
    assert not [row for row in every if row["better_than_auto"] and not row["policy"].startswith("auto")]
    gaps = [row for row in every if row["policy"] == "auto latency" and row["objective"] == "gap_us"]
    assert max(row["p99_regret"] for row in (*rows, *gaps)) <= 0.1
    assert (
        "At p99 of a load's shapes, and of gaps by `auto` for latency, within 10% on all 24 loads; DeepSeek-V2-Lite's "
        "code trace,"
    ) in WORDS
    assert (
        "[one load of DeepSeek-V2-Lite](docs/measured_gpu.md#a-larger-draw-of-one-load) was beyond at p99 until "
        "calibration was mended, and its gaps are within it by one run of one calibration; today's calibration on that "
        "load alone; the bound"
    ) in WORDS
    plain = {
        row["trace"]: [100 * row[figure] for figure in ("mean_regret", "p99_regret")] for row in every
        if (row["policy"], row["objective"], row["model"]) == ("auto", "gap_us", "dsv2lite")
        and row["mean_regret"] > 0.02
    }  # fmt: skip
    (mooncake, mooncake_most), (code, code_most) = plain.values()
    assert list(plain) == ["mooncake", "code"]
    assert (
        f"plain `auto`'s gaps are {code:.1f}% off in the mean there and {code_most:.1f}% at p99, and {mooncake:.1f} "
        f"and {mooncake_most:.1f}% on its Mooncake."
    ) in WORDS
    assert {row["first_token_limit"] for row in rows if row["model"] == "dsv2lite"} == {1.0}
    assert {row["first_token_limit"] for row in rows if row["model"] != "dsv2lite"} == {1.25}
    late = {model: max(row["late"] for row in (*rows, *gaps) if row["model"] == model
                       and row["first_token_limit"] == 1.25)
            for model in ("qwen05b", "llama1b", "dsv2lite")}  # fmt: skip
    first, second, last = late.values()
    plain_late = max(row["late"] for row in rows if row["model"] == "dsv2lite")
    assert plain_late == max(row["late"] for row in (*rows, *gaps)), "the most of all, whatever the bound"
    assert (
        f"in up to {first:.1%} of a load's steps of the first, {last:.1%} of the last by `auto` for latency and "
        f"{plain_late:.1%} by plain `auto`, whose bound is 1 there, and {second:.1%} of the second (its mean"
    ) in WORDS
    assert second == max(row["late"] for row in (*rows, *gaps) if row["first_token_limit"] == 1.25)
    assert (
        f"in up to {second:.1%} of a load's steps where it is 1.25, and {plain_late:.1%} where it is 1 "
        "(DeepSeek-V2-Lite); today's decode kernels but for DeepSeek-V2-Lite's ([GPU]"
    ) in WORDS


def test_steps_that_were_compared_with_eager() -> None:
    """On a CPU all families', on a GPU four models', and what EAGER is held to."""
    steps = read("random_steps.json")
    assert f"{steps['total_steps']:,} random steps of {len(steps['steps'])} model families on a CPU" in WORDS
    models = ("qwen05b", "llama1b", "llama8b", "dsv2lite")
    [count] = {read(f"h200/correct-{name}.json")["total"]["steps"] for name in models}
    assert f"{count:,} each of four models on an H200: no bit differs" in WORDS
    latest = [read(f"h200/correct-{name}.json") for name in models]
    assert {commit for each in latest for commit in each["total"]["steps_by_commit"]} == {"9f1a3154", "b653e7c0"}
    assert (
        "| halves beside each other by the ten thousand with today's decode kernels; float32 over decode rows of more "
        f"than {256 + 32} tokens |"
    ) in WORDS
    held = [each["reference"]["eager_over_theirs"] for each in latest]
    assert (
        f"whose errors against float32 are {min(held):.2f} to {max(held):.2f} of those of transformers' own forward in "
        "bfloat16"
    ) in WORDS


@pytest.mark.parametrize("kind", ["command", "policy", "executor"])
def test_what_there_is_is_all_there(kind: str) -> None:
    """Each command, policy and executor has its place in a table."""
    there = {
        "command": [f"kpolicy {name}" for name in app if not name.startswith("-")],
        "policy": list(policies.OWN), "executor": list(executors.OWN),
    }[kind]  # fmt: skip
    cells = " ".join(row.split("|")[1] for rows in tables("What there is") for row in rows)
    assert there
    assert [name for name in there if f"`{name}`" not in cells] == []


def guide(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_engines_guides_have_the_same_rows() -> None:
    """What was measured in short, and bounded steps."""
    assert tables("What was measured, in short", guide("vllm.md")) == [vllm()]
    assert tables("How long a step is", guide("vllm.md")) == [weighed()]
    assert tables("What was measured, in short", guide("sglang.md")) == [
        sglang_steps(), sglang_served(), [row.replace("SGLang, ", "") for row in starts()[6:]]
    ]  # fmt: skip


def test_the_guide_of_vllm_has_what_eager_decodes_take() -> None:
    """Medians of gaps at 768 requests."""
    rows = read("h200/vllm_stock_vs_kpolicy.json")
    (row,) = [
        row for row in rows
        if (row["model"], row["load"], row["figure"]) == ("qwen05b", "decode-768-64", "gap_p50_ms")
    ]  # fmt: skip
    assert f"gaps of {row['stock']:.1f} ms at 768, {row['kpolicy']:.1f} with a graph" in guide("vllm.md")


@pytest.mark.parametrize(
    ("page", "package", "column"), [("vllm.md", "kpolicy_vllm", 3), ("sglang.md", "kpolicy_sglang", 2)]
)
def test_the_messages_that_a_guide_names_are_said(page: str, package: str, column: int) -> None:
    """Each is in the package's code."""
    code = "".join(code_of(package).values())
    (rows,) = tables("When something goes wrong", guide(page))
    messages = [each for row in rows for each in re.findall(r"`([^`]+)`", row.split("|")[column])]
    assert len(messages) > 10
    assert [each for each in messages if each not in code] == []


def code_of(package: str) -> dict[str, str]:
    """A plugin's modules by name."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in (ROOT / "integrations" / package / package).rglob("*.py")
    }


@pytest.mark.parametrize(
    ("page", "package", "named"),
    [("vllm.md", "kpolicy_vllm", "`{}`"), ("sglang.md", "kpolicy_sglang", "`KPOLICY_{}`")],
)
def test_a_guide_has_every_setting(page: str, package: str, named: str) -> None:
    """In its table, by the names that a user writes."""
    fields = re.findall(r"^    (\w+): .+ = .+$", code_of(package)["config.py"], flags=re.MULTILINE)
    names = [named.format(name.upper() if "KPOLICY" in named else name) for name in fields]
    cells = " ".join(row.split("|")[1] for rows in tables("Settings", guide(page)) for row in rows)
    assert len(names) > 15
    assert [name for name in names if name not in cells] == []


def test_the_guide_of_vllm_has_every_event() -> None:
    """What is said once and counted, but of vLLM-Ascend and vLLM-Kunlun, which have pages of their own."""
    code = [text for name, text in code_of("kpolicy_vllm").items() if not name.startswith(("ascend", "kunlun"))]
    events = {each for text in code for each in re.findall(r'(?:warn_once|guard|together)\(\s*"(\w+)"', text)}
    page = guide("vllm.md")
    assert len(events) > 15
    assert [each for each in sorted(events) if f"`{each}`" not in page] == []


def test_the_guide_of_sglang_has_what_hooks_take() -> None:
    """By how many kinds of steps are within the aim of 4 µs, and how far the others are beyond it."""
    taken: dict[str, list[float]] = {}
    for step in read("sglang_host_cost.json")["steps"]:
        taken.setdefault(step["step"], []).append(step["us"])
    within = [us for us in taken.values() if max(us) <= 4]
    others = [us for us in taken.values() if max(us) > 4]
    some = f"{len(within)} of {len(taken)}" if others else f"each of {len(taken)}"
    words = f"of {some} kinds of steps the hooks take {min(map(min, within)):.1f} to "
    words += f"{max(map(max, within)):.1f} µs"
    if others:
        words += f", of the other {len(others)} up to **{max(map(max, others)):.1f}**"
    assert f"- **Host time**: {words} ([host time]" in guide("sglang.md")


def printed(*command: str) -> str:
    """What a command prints on a wide terminal."""
    ran = subprocess.run(
        [sys.executable, *command], env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def test_the_first_example_prints_what_is_shown() -> None:
    """Run as it stands, in an interpreter of its own."""
    code, shown = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, flags=re.DOTALL)[0]
    assert printed("-c", code) == shown.strip()


def test_explain_prints_what_is_shown() -> None:
    """The table under the command that installs it."""
    command, shown = re.findall(r"\nkpolicy (explain [^\n]*)\n```\n\n```\n(.*?)```", README, flags=re.DOTALL)[0]
    assert printed("-m", "kpolicy", *command.split()) == shown.strip()
