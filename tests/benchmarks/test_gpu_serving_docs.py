"""docs/measured_gpu.md's tables of serving and of start-up are those of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.common import interval_of_mean
from benchmarks.gpu.end_to_end import BETTER_UP, PACED_BY, summarise, table, whole_rounds
from kpolicy.settings import Objective

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
DOC = (ROOT / "docs" / "measured_gpu.md").read_text(encoding="utf-8").splitlines()
WORDS = " ".join(" ".join(DOC).split())
MODELS = {
    "qwen05b": "Qwen2.5-0.5B", "dsv2lite": "DeepSeek-V2-Lite", "llama8b": "Llama-3.1-8B", "llama1b": "Llama-3.2-1B",
}  # fmt: skip
RUNS = {
    "qwen05b": ["qwen05b_code", "qwen05b"], "dsv2lite": ["dsv2lite_code", "dsv2lite"],
    "llama8b": ["llama8b_code", "llama8b_conversation"], "llama1b": ["llama1b_code", "llama1b"],
}  # fmt: skip
"""The raw files of each model's newest rows, in the tables' order: code trace, conversation trace"""
DAY = "2026-11-30"
"""Of most rows, whose titles don't say it"""
EARLIER = "2026-11-29"
SERVED_EARLIER = [(model, "conversation") for model in ("qwen05b", "dsv2lite", "llama1b")]
LOADS = [(model, trace) for model in MODELS for trace in ("code", "conversation")]
NEWEST = {load: EARLIER if load in SERVED_EARLIER else DAY for load in LOADS}
"""A load's rows of other days count in no figure of all loads"""
CODE = [(model, "code") for model in MODELS]
LATEST = [("qwen05b", "code"), ("llama8b", "code"), ("llama1b", "code")]
"""Of b653e7c0, on one host"""
PACED = "auto 1:1:1 paced"
"""Served on the code trace alone"""
FIXED = ("piecewise", "full", "split", "eager")
"""Of the three larger models' code trace in the first rounds alone"""
LEAST = 0.99
"""Of the replica's, below which a figure is told"""


def read(name: str) -> Any:
    """A result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def interval(row: dict[str, Any], digits: int = 2) -> str:
    """How many times the replica's, with the interval where several rounds give one."""
    at = [row[name] for name in ("ratio_to_vllm_replica", "ratio_low", "ratio_high")]
    if at[1] is None:
        return f"{at[0]:.{digits}f}"
    return f"{at[0]:.{digits}f} [{at[1]:.{digits}f}, {at[2]:.{digits}f}]"


def by_load(policy: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Each published load's row of every figure."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in read("end_to_end"):
        if row["policy"] == policy:
            found.setdefault(titled(row), {})[row["figure"]] = row
    return found


def titled(row: dict[str, Any]) -> str:
    """A load of a model as the page names it, with the day if it isn't most rows'."""
    assert row["load"].endswith(" saturated")
    return f"{MODELS[row['model']]}, {row['trace']}" + ("" if row["date"] == DAY else f", {row['date']}")


def newest(model: str, trace: str) -> str:
    """The title of a model's newest rows of a trace."""
    return titled({"model": model, "trace": trace, "load": f"{trace} saturated", "date": NEWEST[model, trace]})


def in_all() -> list[dict[str, Any]]:
    """`auto`'s newest figures of all loads."""
    return [row for load in LOADS for row in by_load("auto")[newest(*load)].values()]


def over_the_replica() -> list[str]:
    """A row a load: `auto` in all six figures, in bold what is below 0.99; behind it `auto` with shorter steps."""
    lines = []
    for title in by_load("auto"):
        for policy in ("auto", PACED):
            if (at := by_load(policy).get(title)) is None:
                continue
            told = [
                f"**{interval(at[figure])}**" if at[figure]["ratio_to_vllm_replica"] < LEAST else interval(at[figure])
                for figure in BETTER_UP
            ]
            named = title if policy == "auto" else f"{title}, `{policy}`"
            lines.append(f"| {named} | {at['tokens_per_s']['repeats']} | {' | '.join(told)} |")
    return lines


def served() -> list[str]:
    """A row a load and policy: tokens a second, times to first token and gaps, and ratios to the replica's."""
    lines = []
    for title, policy in dict.fromkeys((titled(row), row["policy"]) for row in read("end_to_end")):
        at = by_load(policy)[title]

        def over(figure: str, at: dict[str, Any] = at) -> str:
            return "1" if at[figure]["policy"] == "vllm" else interval(at[figure])

        def ms(figure: str, digits: int, at: dict[str, Any] = at) -> str:
            return f"{at[figure]['value'] / 1e3:,.{digits}f}"

        cells = [
            title, f"`{policy}`", f"{at['tokens_per_s']['value']:,.0f}", over("tokens_per_s"),
            f"{ms('ttft_p50_us', 0)} / {ms('ttft_p99_us', 0)}", ms("gap_p50_us", 1), over("gap_p50_us"),
            ms("gap_p99_us", 1), over("gap_p99_us"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def by_round(model: str, trace: str, policy: str) -> dict[int, dict[str, Any]]:
    """A policy's whole rounds of a load, by their number."""
    (found,) = [of for data in newest_files(model, trace) if (of := of_trace(data, trace))]
    named = {tuple(name.split("/")[1:]): cell for name, cell in found.items()}
    return {int(at): cell for (at, of), cell in sorted(named.items()) if of == policy}


def rounds(model: str, trace: str, policy: str) -> list[dict[str, Any]]:
    """A policy's whole rounds of a load, in order."""
    return [*by_round(model, trace, policy).values()]


def newest_files(model: str, trace: str) -> list[dict[str, Any]]:
    """A model's raw files of the day of a trace's newest rows."""
    return [data for run in RUNS[model] if (data := read(f"raw/end_to_end_{run}"))["date"] == NEWEST[model, trace]]


def of_trace(data: dict[str, Any], trace: str) -> dict[str, dict[str, Any]]:
    """A file's whole rounds of a trace."""
    return {name: cell for name, cell in whole_rounds(data).items() if name.startswith(f"{trace} saturated/")}


def each_over_another(model: str, trace: str, mine: str, other: str, figure: str) -> list[float]:
    """How many times better a policy is than another in each round that both have."""
    ours, theirs = (by_round(model, trace, policy) for policy in (mine, other))
    assert ours.keys() <= theirs.keys() or theirs.keys() <= ours.keys()
    up = 1 if BETTER_UP[figure] else -1
    return [(ours[at][figure] / theirs[at][figure]) ** up for at in ours if at in theirs]


def over_another(model: str, trace: str, mine: str, other: str, figure: str) -> tuple[float, float, float]:
    """The mean of the rounds' own ratios, and its interval."""
    return interval_of_mean(each_over_another(model, trace, mine, other, figure))


def told_by_round(each: list[str]) -> str:
    """One after the other."""
    return f"{', '.join(each[:-1])} and {each[-1]}"


def test_rows_are_those_of_the_raw_runs() -> None:
    """Each load's newest run with all of its whole rounds, and the 0.5B's other conversation trace behind them.

    Of two runs of a load the tool's `table` has the newer one. It has both where that has less.
    """
    runs = {name: model for model in MODELS for name in RUNS[model]}
    raw = {name: read(f"raw/end_to_end_{name}") for name in (*runs, "qwen05b_conversation")}
    every = [row for data in raw.values() for row in summarise(data)]
    assert read("end_to_end") == table([*raw.values()])
    assert len(raw) == 9
    assert (
        "`end_to_end.json` is made of nine raw files (`--summary`), the eight that the next paragraphs name for the "
        "tables and `raw/end_to_end_qwen05b_conversation.json`; of all of them it would have rows of earlier runs too."
    ) in WORDS
    all_of_them = [json.loads(file.read_text()) for file in sorted((RESULTS / "raw").glob("end_to_end_*.json"))]
    assert len(table(all_of_them)) > len(read("end_to_end"))
    assert read("end_to_end") == [row for row in every if (row["trace"], row["date"]) != ("code", EARLIER)]
    assert {title: at["tokens_per_s"]["repeats"] for title, at in by_load(PACED).items()} == {
        newest("qwen05b", "code"): 4, newest("dsv2lite", "code"): 7, newest("llama8b", "code"): 3,
        newest("llama1b", "code"): 3,
    }  # fmt: skip
    assert {
        model: {policy: len(rounds(model, "code", policy)) for policy in (*FIXED, "vllm", "full_and_piecewise")}
        for model in MODELS
    } == {
        model: {**dict.fromkeys(FIXED, few), "vllm": all_of, "full_and_piecewise": all_of}
        for model, few, all_of in (("qwen05b", 4, 4), ("dsv2lite", 3, 7), ("llama8b", 1, 3), ("llama1b", 1, 3))
    }
    for model, few in (("dsv2lite", 3), ("llama8b", 1), ("llama1b", 1)):
        assert raw[f"{model}_code"]["also"] == {"policies": [*FIXED], "rounds": few}
    assert {name: (data["model"], data["date"]) for name, data in raw.items() if name in runs} == {
        name: (model, EARLIER if name in ("qwen05b", "dsv2lite", "llama1b") else DAY) for name, model in runs.items()
    }
    assert (raw["qwen05b_conversation"]["model"], raw["qwen05b_conversation"]["date"]) == ("qwen05b", "2026-11-28")
    assert [(row["model"], row["trace"]) for row in in_all()[:: len(BETTER_UP)]] == LOADS
    counted = {(row["model"], row["trace"]): (row["repeats"], row["served"]) for row in in_all()}
    assert counted == {
        ("qwen05b", "code"): (4, 150), ("qwen05b", "conversation"): (1, 150), ("dsv2lite", "code"): (7, 100),
        ("dsv2lite", "conversation"): (2, 100), ("llama8b", "code"): (3, 100), ("llama8b", "conversation"): (3, 120),
        ("llama1b", "code"): (3, 150), ("llama1b", "conversation"): (3, 150),
    }  # fmt: skip
    assert (
        "150 of them on the shapes of Qwen2.5-0.5B and Llama-3.2-1B, 100 on those of DeepSeek-V2-Lite and "
        "Llama-3.1-8B, 120 of Llama-3.1-8B's conversation trace."
    ) in WORDS
    for data in raw.values():
        assert all(cell["served"] == data["requests"] and not cell["refused"] for cell in data["cells"].values())
        assert not any(cell["replay_failures"] for cell in data["cells"].values())
    assert "Every request was served in every round." in WORDS
    assert "mooncake saturated" in raw["llama1b"]["rates"]
    assert {name.split("/")[-1] for name in raw["llama1b"]["cells"] if "burst" in name} == {"auto", "vllm"}
    assert not any("mooncake" in name for name in raw["llama1b"]["cells"])
    assert "of BurstGPT there is one round of two of four policies, of Mooncake nothing" in WORDS


def test_of_which_runs_rows_are_is_told() -> None:
    """Three hosts and commits of one day, and the earlier day, which the titles have."""
    assert [load for load, day in NEWEST.items() if day != DAY] == SERVED_EARLIER

    def began(run: str) -> str:
        day, _, time = read(f"raw/end_to_end_{run}")["costs"]["auto"].split()[1].partition("T")
        assert day == DAY
        return str(time[:5])

    assert all("14:39" < began(f"{model}_code") < "14:49" for model, _ in LATEST)
    assert "01:03" < began("llama8b_conversation") < "01:12"
    assert "11:38" < began("dsv2lite_code") < "11:45"
    asked = read("raw/end_to_end_dsv2lite_code")["command"]
    assert "--rounds 8 " in asked
    assert f"--also {' '.join(FIXED)} --also-rounds 3" in asked
    assert (
        f"**Most rows are of {DAY}, of three hosts and commits**, a process for each trace, torch and versions alike. "
        "The code traces of Qwen2.5-0.5B, Llama-3.1-8B and Llama-3.2-1B: 14:39 to 14:48 UTC, commit b653e7c0, on a "
        "host with two H200s and 16 cores for each, with other benchmarks on the other GPU and its cores all the time, "
        "under `benchmarks.quiet --cores 4 --follow`; `raw/end_to_end_qwen05b_code.json`, `_llama8b_code` and "
        "`_llama1b_code`; the driver wasn't noted. The 0.5B's has four rounds of nine policies, the Llamas' three "
        "rounds of five policies, and "
        "one of `piecewise`, `full`, `split` and `eager` (`--also`), whose ratios are to the replica's first round and "
        "have no interval. "
        "DeepSeek-V2-Lite's code trace: 11:38 to 11:45 UTC, commit 9f1a315, one H200 alone on its host, 16 cores, "
        "driver 580.159.04, under `benchmarks.quiet --cores 4 --follow`; `raw/end_to_end_dsv2lite_code.json`. "
        "That run has seven rounds of five policies (eight were asked for, the time was over), and those four policies "
        "in the first three of them, so that their ratios are to the replica's first three rounds. "
        "Llama-3.1-8B's conversation trace: 01:03 to 01:12 UTC, commit 95234a3, one H200 alone on its host, 16 cores, "
        "the same driver, **not under `benchmarks.quiet`**; `raw/end_to_end_llama8b_conversation.json`."
    ) in WORDS
    assert (
        "**The other conversation traces are of a day earlier**, which their titles say: 2026-11-29, 08:45 to 09:03 "
        "UTC, commit 43ebfb8, one H200 alone on its host, driver 580.159.04, 16 cores, under `benchmarks.quiet --cores "
        "4 --follow`; `raw/end_to_end_qwen05b.json`, `_dsv2lite` and `_llama1b`, of which the tables have the "
        "conversation trace alone. DeepSeek-V2-Lite's went on in a second process, on other cores, for its second "
        "round. After 43ebfb8 decode attention changed, at 95234a3 and again at d32f9e4 ([decode "
        "attention](#decode-attention)), and calibration too. So times and tokens a second of different rows aren't of "
        "one run, nor of one with [their runs before](#runs-before); a ratio is always within one run."
    ) in WORDS
    assert (
        f"[end to end](#end-to-end) of b653e7c0 (the code traces, {DAY}; DeepSeek-V2-Lite's of 9f1a315), "
        "Llama-3.1-8B's "
        f"conversation trace of 95234a3 ({DAY}) and the others' of 43ebfb8 ({EARLIER}),"
    ) in WORDS
    assert (
        "**Not measured**: the conversation trace of Qwen2.5-0.5B, Llama-3.2-1B and DeepSeek-V2-Lite with the decode "
        "attention of 95234a3 or d32f9e4, and of Llama-3.1-8B with that of d32f9e4;"
    ) in WORDS
    assert (
        "of the conversation trace of Qwen2.5-0.5B, Llama-3.2-1B and DeepSeek-V2-Lite with the decode attention of "
        "95234a3 or d32f9e4, of Llama-3.1-8B's with that of d32f9e4, of larger models than the 0.5B by fixed policies "
        "but `full_and_piecewise` with today's kernels, other than of the code trace, of shorter steps "
        f"(`{PACED}`) on any load but the code traces, of DeepSeek-V2-Lite's by the rule since 7d92e5a, of shorter "
        "steps by any other policy,"
    ) in WORDS
    for policy in FIXED:
        assert [load for load in LOADS if rounds(*load, policy)] == [*LOADS[:2], *CODE[1:]]
    assert [load for load in LOADS if rounds(*load, PACED)] == CODE
    assert [load for load in LOADS if len(rounds(*load, "auto")) >= 5] == [("dsv2lite", "code")]
    assert (
        "fixed policies but `full_and_piecewise` on the three larger models, other than on the code trace, and there "
        f"in more than one round on the Llamas; `{PACED}` on the conversation trace, or on DeepSeek-V2-Lite by the "
        "rule since 7d92e5a; any other policy with shorter steps; five rounds, as were wanted, of any load but "
        "DeepSeek-V2-Lite's code trace."
    ) in WORDS
    table_of_benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (row,) = [line for line in table_of_benchmarks.splitlines() if line.startswith("| `gpu.end_to_end` |")]
    assert f"what do shorter steps give and cost (`{PACED}`)? |" in row
    shorter = over_another("dsv2lite", "code", PACED, "full_and_piecewise", "gap_p99_us")[0]
    assert (
        "of the nine of `h200/raw/end_to_end_*.json` that the page names for it, not of all: no more than by "
        "`full_and_piecewise`, which wasn't served with shorter steps; by these gaps at p99 of DeepSeek-V2-Lite are "
        f"{shorter:.2f} times as short, see"
    ) in row


def test_what_shorter_steps_are_is_told() -> None:
    """By which objective, within which bound, and that nothing else was served so."""
    assert (
        f"**`{PACED}`** is `auto` by an objective that weighs step time and the gap alike, with a `first_token_limit` "
        "of 1, and with steps that hold fewer prompt tokens where they have decodes and that objective says so. By "
        "costs the prompts in line take so no longer than by vLLM's rule in full steps, less 5%, or by the best way "
        "for them, whichever is longer (`kpolicy run --objective 1:1:1 --pace vllm`, "
        "[how](simulate.md#how-long-a-step-is)). So what graphs gain over vLLM's rule goes into the gaps. It was "
        "served on the code trace of all four models, and no other policy was paced. DeepSeek-V2-Lite's rounds are by "
        "the rule of 9f1a315; the others' by that since 7d92e5a, which keeps what the first prompt has when graphs or "
        "costs change and counts a preempted request as another. In DeepSeek-V2-Lite's run plain `auto` ended with a "
        "table that had been corrected once, the paced one with that of calibration; in the other three both had "
        "tables of the same name."
    ) in WORDS
    for model, _ in LATEST:
        tables = read(f"raw/end_to_end_{model}_code")["costs"]
        assert tables["auto"] == tables[PACED]
    costs = read("raw/end_to_end_dsv2lite_code")["costs"]
    assert costs["auto"] == f"{costs[PACED]}, corrected 1"
    simulate = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")
    assert "The figures of [end to end](measured_gpu.md#end-to-end) have `auto` alone paced." in simulate
    assert PACED_BY == "vllm"
    objective = Objective.parse(PACED.split()[1])
    assert objective.step_weight == objective.gap_weight == objective.first_token_limit == 1
    assert {row["policy"] for row in read("end_to_end") if "paced" in row["policy"]} == {PACED}


def test_what_was_wanted_of_the_code_trace_is_told() -> None:
    """1.3 in tokens or in gaps: by which `auto` it is reached with its interval, and by which in the mean."""
    plain, paced = ({model: by_load(policy)[newest(model, "code")] for model in MODELS} for policy in ("auto", PACED))
    for at, whole, mean in (
        (plain, [("qwen05b", "tokens_per_s")],
         [("qwen05b", "gap_p99_us"), ("dsv2lite", "gap_p99_us"), ("llama1b", "gap_p99_us")]),
        (paced, [("qwen05b", "gap_p99_us"), ("dsv2lite", "gap_p99_us")],
         [("qwen05b", "tokens_per_s"), ("llama1b", "gap_p99_us")]),
    ):  # fmt: skip
        both = [(model, figure) for model in MODELS for figure in ("tokens_per_s", "gap_p99_us")]
        assert [each for each in both if at[each[0]][each[1]]["ratio_low"] >= 1.3] == whole
        assert [
            each for each in both if each not in whole and at[each[0]][each[1]]["ratio_to_vllm_replica"] >= 1.3
        ] == mean
    assert plain["llama8b"]["gap_p99_us"]["ratio_high"] < 1.3
    assert paced["llama8b"]["gap_p99_us"]["ratio_high"] < 1.3
    low = plain["qwen05b"]["gap_p99_us"]["ratio_low"]
    assert 1.29 < low < 1.3
    assert (
        "**Wanted: 1.3 in tokens a second or in gaps at p99, on the code trace at saturation. Reached with the whole "
        "interval on Qwen2.5-0.5B, by plain `auto` in tokens a second, "
        f"{interval(plain['qwen05b']['tokens_per_s'])} times, and by `{PACED}` in gaps at p99; on DeepSeek-V2-Lite by "
        f"`{PACED}`, whose gaps at p99 are {interval(paced['dsv2lite']['gap_p99_us'])} times as short. Plain `auto`'s "
        f"are {interval(plain['dsv2lite']['gap_p99_us'])} times as short there and "
        f"{interval(plain['llama1b']['gap_p99_us'])} times on Llama-3.2-1B: in the mean it is reached on both, and the "
        "intervals begin below 1.3. On Llama-3.1-8B it is reached in neither figure by neither.** In tokens a second "
        "it isn't reached on the three larger models: "
        f"{interval(plain['dsv2lite']['tokens_per_s'])} and {interval(paced['dsv2lite']['tokens_per_s'])} times on "
        f"DeepSeek-V2-Lite, {interval(plain['llama1b']['tokens_per_s'])} and "
        f"{interval(paced['llama1b']['tokens_per_s'])} on Llama-3.2-1B, {interval(plain['llama8b']['tokens_per_s'])} "
        f"and {interval(paced['llama8b']['tokens_per_s'])} on Llama-3.1-8B (plain `auto` and `{PACED}`)."
    ) in WORDS
    load = ("qwen05b", "code")
    tokens, gaps = plain["qwen05b"]["tokens_per_s"], plain["qwen05b"]["gap_p99_us"]
    each = [f"{ratio:.2f}" for ratio in each_over_another(*load, "auto", "vllm", "tokens_per_s")]
    longer = [f"{ratio:.2f}" for ratio in each_over_another(*load, "auto", "vllm", "gap_p99_us")]
    own, theirs = ([cell["gap_p99_us"] for cell in rounds(*load, policy)] for policy in ("auto", "vllm"))
    hosts = [cell["host_us"] for cell in rounds(*load, "vllm")]
    medians = [cell["gap_p50_us"] for cell in rounds(*load, "auto")]
    older = {policy: earlier_code("qwen05b", "", policy) for policy in ("auto", "vllm")}
    assert two(tokens) == "1.46"
    eager = [cell["gap_p99_us"] for cell in rounds(*load, "eager")]
    assert (
        f"**Qwen2.5-0.5B**: {interval(tokens)} times the tokens a second, by round {told_by_round(each)}, and gaps at "
        f"p99 {interval(gaps)} times as short, where the interval of four rounds begins just below 1.3 ({low:.3f}). "
        f"The replica's gaps at p99 are {told_by_round([ms(us) for us in theirs])} ms by round, `auto`'s "
        f"{least_and_most(own)}: {told_by_round(longer)} times. As on DeepSeek-V2-Lite it is the replica's that vary, "
        f"and `eager`'s ({least_and_most(eager)}); fixed work before its rounds took "
        f"{min(hosts):.0f} to {max(hosts):.0f} us and doesn't tell it. **Median gaps are erratic**: `auto`'s "
        f"{told_by_round([ms(us) for us in medians])} ms by round, {interval(plain['qwen05b']['gap_p50_us'])} times as "
        f"short as the replica's. [In the run before](#runs-before), at 43ebfb8, tokens a second were "
        f"{interval(older['auto']['tokens_per_s'])} times the replica's, whose interval begins below 1.3, for 1.46 "
        "now: "
        "`auto` has "
        f"{tokens['value']:,.0f} for {older['auto']['tokens_per_s']['value']:,.0f}, the replica "
        f"{by_load('vllm')[newest(*load)]['tokens_per_s']['value']:,.0f} for "
        f"{older['vllm']['tokens_per_s']['value']:,.0f}, so that a good half of the difference is that the replica is "
        "slower."
    ) in WORDS
    now, was = (
        {policy: {figure: row["value"] for row in rows if (row["trace"], row["policy"]) == ("code", policy)
                  for figure in [row["figure"]]} for policy in ("auto", "vllm")}
        for rows in (summarise(read(f"raw/end_to_end_llama1b{name}")) for name in ("_code", ""))
    )  # fmt: skip
    load = ("llama1b", "code")
    own, theirs = ([cell["gap_p99_us"] for cell in rounds(*load, policy)] for policy in ("auto", "vllm"))
    before = earlier_code("llama1b", "", "auto")
    assert (
        f"**Llama-3.2-1B, plain `auto`**: the replica's gaps at p99 are {told_by_round([ms(us) for us in theirs])} ms "
        f"by round, `auto`'s {least_and_most(own)}. [In the run before](#runs-before), at 43ebfb8, they were "
        f"{interval(before['gap_p99_us'])} times as short, and tokens a second {interval(before['tokens_per_s'])} "
        "times. **`auto` isn't quicker than it was, the replica is slower**: gaps at p99 and tokens a second of `auto` "
        f"are {ms(now['auto']['gap_p99_us'])} ms for {ms(was['auto']['gap_p99_us'])} and "
        f"{now['auto']['tokens_per_s']:,.0f} for {was['auto']['tokens_per_s']:,.0f}, the replica's "
        f"{ms(now['vllm']['gap_p99_us'])} ms for {ms(was['vllm']['gap_p99_us'])} and "
        f"{now['vllm']['tokens_per_s']:,.0f} for {was['vllm']['tokens_per_s']:,.0f}. It ran 153 steps eagerly in each "
        "round, which the host launches, and this host had other benchmarks on its other cores."
    ) in WORDS
    assert {cell["steps"]["eager"] for cell in rounds(*load, "vllm")} == {153}


def earlier_code(model: str, name: str, policy: str) -> dict[str, dict[str, Any]]:
    """A policy's figures of an older run of a model's code trace."""
    rows = summarise(read(f"raw/end_to_end_{model}{name}"))
    return {row["figure"]: row for row in rows if (row["trace"], row["policy"]) == ("code", policy)}


def test_shorter_steps_of_the_other_models_are_told() -> None:
    """Over the replica, plain `auto` and `full_and_piecewise`: on one model they give shorter gaps, on two hardly."""
    for model, _ in LATEST:
        own = by_load(PACED)[newest(model, "code")]
        assert not any(row["ratio_to_vllm_replica"] < LEAST for row in own.values())
    cells = {model: by_load(PACED)[newest(model, "code")] for model in MODELS}
    low = [(model, figure) for model in MODELS for figure in BETTER_UP if cells[model][figure]["ratio_low"] < LEAST]
    assert low == [("llama8b", "gap_p50_us"), ("llama1b", "ttft_p50_us")]

    def over_auto(model: str, figure: str) -> str:
        """How many times better than plain `auto`'s."""
        return with_interval(over_another(model, "code", PACED, "auto", figure))

    def longer(model: str, figure: str) -> str:
        """How many times as long as plain `auto`'s."""
        return with_interval(over_another(model, "code", "auto", PACED, figure))

    shorter = [with_interval(over_another("qwen05b", "code", PACED, other, "gap_p99_us"))
               for other in ("sglang", "full_and_piecewise")]  # fmt: skip
    assert (
        f"**Qwen2.5-0.5B, `{PACED}`**: gaps at p99 {interval(cells['qwen05b']['gap_p99_us'])} times as short as the "
        f"replica's, at {interval(cells['qwen05b']['tokens_per_s'])} times its tokens a second. Over plain `auto` gaps "
        f"at p99 are {over_auto('qwen05b', 'gap_p99_us')} times as short, for {over_auto('qwen05b', 'tokens_per_s')} "
        f"times the tokens a second and first tokens {longer('qwen05b', 'ttft_p50_us')} times as late at p50; over the "
        f"replica of SGLang and `full_and_piecewise` {shorter[0]} and {shorter[1]} times."
    ) in WORDS
    large = over_another("llama8b", "code", PACED, "auto", "gap_p99_us")
    assert large[2] < 1
    assert (
        f"**On the Llamas shorter steps give next to nothing.** Llama-3.2-1B's gaps at p99 are "
        f"{interval(cells['llama1b']['gap_p99_us'])} times as short as the replica's, "
        f"{over_auto('llama1b', 'gap_p99_us')} times as plain `auto`'s, first tokens "
        f"{longer('llama1b', 'ttft_p50_us')} times as late at p50 and median gaps {longer('llama1b', 'gap_p50_us')} "
        f"times as long. Llama-3.1-8B's are {interval(cells['llama8b']['gap_p99_us'])} times as short as the replica's "
        f"and {100 * (1 - large[0]):.1f}% longer than plain `auto`'s, by the whole interval: as it seems, graphs win "
        "so little over "
        "vLLM's rule there that its bound leaves hardly any room."
    ) in WORDS
    assert (
        f"**Over the replica no figure of `{PACED}` is below 0.99 on any of the four models. Of 24 intervals two begin "
        f"there**: times to first token at p50 of Llama-3.2-1B, {interval(cells['llama1b']['ttft_p50_us'])}, and "
        f"median gaps of Llama-3.1-8B, {interval(cells['llama8b']['gap_p50_us'])}."
    ) in WORDS


def test_what_makes_the_larger_models_gaps_is_told() -> None:
    """The replica's by round, which policies' rounds differ, and what an eager step takes on a quick host."""
    mine, theirs = (rounds("dsv2lite", "code", policy) for policy in ("auto", "vllm"))
    own, others = ([cell["gap_p99_us"] for cell in cells] for cells in (mine, theirs))
    ratios = each_over_another("dsv2lite", "code", "auto", "vllm", "gap_p99_us")
    hosts, eager = [cell["host_us"] for cell in theirs], {cell["steps"]["eager"] for cell in theirs}
    assert len(eager) == 2
    (on_device, took), (on_device_later, took_later) = (
        (ms(cell["device_us"]), ms(cell["wall_us"]))
        for cell in (kernels(name)["prompt of 2048/eager"] for name in ("_second", ""))
    )
    noise, later = (read(KERNELS[name])["host_noise"] for name in ("_second", ""))
    assert all(noise[each] < later[each] for each in ("p50_us", "slow"))
    cells = {policy: rounds("dsv2lite", "code", policy) for policy in
             ("auto", "vllm", "sglang", "full_and_piecewise", PACED, *FIXED)}  # fmt: skip
    apart = {policy: max(gaps) / min(gaps) for policy, of in cells.items()
             if (gaps := [cell["gap_p99_us"] for cell in of])}  # fmt: skip
    launched = {policy for policy, of in cells.items() if any("eager" in cell["steps"] for cell in of)}
    assert launched == {"vllm", "full", "eager"}
    uneven, even = ([apart[policy] for policy in apart if (policy in launched) is wanted] for wanted in (True, False))
    assert len(even) == 6
    assert max(even) < min(uneven)
    assert min(others) == others[0]
    assert min(ratios) == ratios[0]
    assert others[0] / max(own) < 1.06
    sooner = each_over_another("dsv2lite", "code", "auto", "vllm", "ttft_p50_us")[0]
    least = [min(others), *(min(cell["gap_p99_us"] for cell in larger_before("vllm", name)) for name in (BEFORE, ""))]
    assert (
        f"**DeepSeek-V2-Lite, plain `auto`**: the replica's gaps at p99 are {told_by_round([ms(us) for us in others])} "
        f"ms by round, `auto`'s {least_and_most(own)}: {told_by_round([f'{ratio:.2f}' for ratio in ratios])} times. "
        "**So the replica makes the figure, and as it seems the host makes the replica's.** It ran "
        f"{min(eager)} or {max(eager)} steps eagerly in each round, and launching bounds them: a prompt of 2,048 "
        f"tokens took {took} ms eagerly in one run and {took_later} in another, whose host was slower, and the device "
        f"needs {on_device} and {on_device_later} of them ([its "
        "kernels](#what-a-step-of-deepseek-v2-lite-is-made-of)). **Where the host is quick, such a step takes hardly "
        "longer than `auto`'s gaps at p99, and little is to be gained in them**, as in the first round, in which first "
        f"tokens come {sooner:.2f} times as early at p50 all the same. The replica's shortest are "
        f"{least_and_most(least)} ms in this run and in the two before. Of policies that ran steps eagerly (the "
        "replica, `full` and `eager`) the longest of the rounds' gaps at p99 is "
        f"{min(uneven):.2f} to {max(uneven):.2f} times the shortest, of the six others {min(even):.2f} to "
        f"{max(even):.2f} times. The host's fixed work before a round doesn't tell it: {min(hosts):.0f} to "
        f"{max(hosts):.0f} us before the replica's, {hosts[0]:.0f} before its first."
    ) in WORDS


def test_what_shorter_steps_give_and_cost_is_told() -> None:
    """Gaps by round, what plain `auto` has more of, and that no figure is below the replica's but in one round."""
    load = ("dsv2lite", "code")
    gaps = [cell["gap_p99_us"] for cell in rounds(*load, PACED)]
    each = each_over_another(*load, PACED, "vllm", "gap_p99_us")
    pieces, plain = ({cell["steps"]["piecewise"] for cell in rounds(*load, policy)} for policy in (PACED, "auto"))
    modes = {mode for policy in (PACED, "auto") for cell in rounds(*load, policy) for mode in cell["steps"]}
    assert modes == {"full", "piecewise"}
    (most,) = plain
    values = {figure: (by_load(PACED)[newest(*load)][figure]["value"], by_load("auto")[newest(*load)][figure]["value"])
              for figure in BETTER_UP}  # fmt: skip

    def longer(figure: str) -> str:
        """How many times as long as plain `auto`'s."""
        return with_interval(over_another(*load, "auto", PACED, figure))

    tokens = over_another(*load, PACED, "auto", "tokens_per_s")
    shorter = with_interval(over_another(*load, PACED, "auto", "gap_p99_us"))
    (first, sooner), (last, before) = (
        [f"{us / 1e3:,.0f}" for us in values[figure]] for figure in ("ttft_p50_us", "ttft_p99_us")
    )
    (median, half), (late, lag) = ([ms(us) for us in values[figure]] for figure in ("gap_p50_us", "gap_p99_us"))
    assert (
        f"**DeepSeek-V2-Lite, `{PACED}`**: gaps at p99 are {least_and_most(gaps)} ms by round, "
        f"{told_by_round([f'{ratio:.2f}' for ratio in each])} times as short as the replica's. It ran {min(pieces)} to "
        f"{max(pieces)} steps a round in PIECEWISE graphs, plain `auto` {most}, and neither ran any eagerly. **What it "
        f"costs over plain `auto`**, by the rounds' own ratios: {tokens[0]:.3f} [{tokens[1]:.3f}, {tokens[2]:.3f}] "
        f"times the tokens a second ({values['tokens_per_s'][0]:.0f} for {values['tokens_per_s'][1]:.0f}), times to "
        f"first token {longer('ttft_p50_us')} times as long at p50 ({first} ms for {sooner}) and "
        f"{longer('ttft_p99_us')} at p99 ({last} for {before}), median gaps {longer('gap_p50_us')} times as long "
        f"({median} ms for {half}); for that its gaps at p99 are {shorter} "
        f"times as short ({late} ms for {lag})."
    ) in WORDS
    own = by_load(PACED)[newest(*load)]
    assert not any(row["ratio_low"] < LEAST for row in own.values())
    assert min(own, key=lambda figure: own[figure]["ratio_to_vllm_replica"]) == "tokens_per_s"
    assert min(own, key=lambda figure: own[figure]["ratio_low"]) == "ttft_p50_us"
    by_figure = {figure: each_over_another(*load, PACED, "vllm", figure) for figure in BETTER_UP}
    below = {(figure, at): ratio for figure, found in by_figure.items() for at, ratio in enumerate(found)
             if ratio < LEAST}  # fmt: skip
    assert [*below] == [("ttft_p50_us", 0), ("ttft_p99_us", 0)]
    assert sum(map(len, by_figure.values())) == 42
    early, later = below.values()
    assert (
        f"On DeepSeek-V2-Lite no figure of `{PACED}` is below 0.99 over the replica, nor does an interval begin "
        "there. The least is "
        f"tokens a second, {two(own['tokens_per_s'])}, and the interval that begins lowest is that of times to first "
        f"token at p50, {interval(own['ttft_p50_us'])}. By round two of 42 are below it: in the first, in which the "
        f"replica was quickest, first tokens came {early:.2f} times as early as its at p50 and {later:.2f} times at "
        "p99. The bound is by costs and on all prompts in line, not on each first token."
    ) in WORDS
    theirs = rounds(*load, "vllm")
    for figure in BETTER_UP:
        best = max if BETTER_UP[figure] else min
        assert figure == "gap_p50_us" or best(cell[figure] for cell in theirs) == theirs[0][figure]


def test_the_larger_models_code_trace_is_held_to_its_run_before() -> None:
    """What got less and what more over the replica, and that no interval of a ratio shows either."""
    was = {figure: of_larger("auto", figure, BEFORE) for figure in BETTER_UP}
    now = by_load("auto")[newest("dsv2lite", "code")]
    names = {
        "gap_p99_us": "gaps at p99", "tokens_per_s": "tokens a second", "tokens_per_s_arriving": "arriving",
        "ttft_p50_us": "times to first token at p50", "ttft_p99_us": "at p99",
    }  # fmt: skip
    more = [
        figure for figure in BETTER_UP if now[figure]["ratio_to_vllm_replica"] > was[figure]["ratio_to_vllm_replica"]
    ]
    assert {*more} == {*names} == {*BETTER_UP} - {"gap_p50_us"}
    assert all(row["ratio_low"] < was[figure]["ratio_high"] for figure, row in now.items())
    assert all(was[figure]["ratio_low"] < row["ratio_high"] for figure, row in now.items())
    told = ", ".join(f"{name} {two(now[figure])} for {two(was[figure])}" for figure, name in names.items())
    runs = [of_trace(read(f"raw/end_to_end_dsv2lite{name}"), "code") for name in ("_code", BEFORE)]
    assert runs[1].keys() < runs[0].keys()
    assert len({round(cell["tokens_per_s"] * cell["span_s"]) for run in runs for cell in run.values()}) == 1
    assert {row["repeats"] for row in was.values()} == {4}

    def values(policy: str) -> tuple[list[float], str]:
        """Median gaps, gaps at p99 and tokens a second, now and in the run before."""
        later = by_load(policy)[newest("dsv2lite", "code")]
        each = [(later[figure]["value"], of_larger(policy, figure, BEFORE)["value"])
                for figure in ("gap_p50_us", "gap_p99_us", "tokens_per_s")]  # fmt: skip
        (median, half), (late, lag), (tokens, rate) = each
        slower = [median / half, late / lag, rate / tokens]
        return slower, f"{ms(median)} ms for {ms(half)}, {ms(late)} for {ms(lag)} and {tokens:.0f} for {rate:.0f}"

    (mine, ours), (them, theirs), (_, fixed) = map(values, ("auto", "vllm", "full_and_piecewise"))
    assert all(slower > 1 for slower in (*mine, *them))
    assert (
        "**Against [the run before](#runs-before)**, of the same requests at d32f9e4, four rounds, plain `auto` is "
        f"over the replica by more in five of six figures: {told}; by less in one, median gaps "
        f"{two(now['gap_p50_us'])} for {two(was['gap_p50_us'])}. The two runs' intervals overlap in all six, so that "
        "no difference between the runs is shown. **`auto` itself isn't quicker than it was, the replica is slower.** "
        f"Median gaps, gaps at p99 and tokens a second: `auto` {ours}, the replica {theirs}, `full_and_piecewise` "
        f"{fixed}. Calibration and the host's state are others too, and that run wasn't under `benchmarks.quiet`."
    ) in WORDS


def two(row: dict[str, Any]) -> str:
    """How many times the replica's, to two digits, without the interval."""
    return f"{row['ratio_to_vllm_replica']:.2f}"


def three(row: dict[str, Any]) -> str:
    """How many times the replica's, to three digits, without the interval."""
    return f"{row['ratio_to_vllm_replica']:.3f}"


def test_figures_below_the_replicas_are_told() -> None:
    """Means below 0.99, of which there are none, the least ones, and how many intervals begin there."""
    figures, replica = in_all(), by_load("vllm")
    assert not any(row["ratio_to_vllm_replica"] < LEAST for row in figures)
    assert not any("**" in line for line in over_the_replica())
    assert "and its 95% interval, in bold below 0.99, of which there is none." in WORDS
    titles = [newest("llama8b", trace) for trace in ("code", "conversation")]
    medians = [by_load("auto")[title]["gap_p50_us"] for title in titles]
    theirs = [replica[title]["gap_p50_us"] for title in titles]
    code, talk = medians
    least, second, third = sorted(figures, key=lambda row: row["ratio_to_vllm_replica"])[:3]
    assert (least, third) == (code, talk)
    assert (second["model"], second["trace"], second["figure"]) == ("llama8b", "code", "tokens_per_s")
    each = [
        told_by_round([
            f"{them['gap_p50_us'] / us['gap_p50_us']:.3f}"
            for us, them in zip(*(rounds("llama8b", trace, policy) for policy in ("auto", "vllm")), strict=True)
        ])
        for trace in ("code", "conversation")
    ]  # fmt: skip
    sglang, fixed = (
        " and ".join(three(by_load(policy)[title]["gap_p50_us"]) for title in titles)
        for policy in ("sglang", "full_and_piecewise")
    )
    assert (
        f"**Wanted: no figure below 0.99. By means that holds now, by intervals it isn't shown.** The least of "
        f"{len(figures)} is {interval(code, 3)}, Llama-3.1-8B's median gaps on the code trace ({ms(code['value'])} ms "
        f"for {ms(theirs[0]['value'])}); then come its tokens a second there, {three(second)}, and its median gaps on "
        f"the conversation trace, {interval(talk, 3)} ({ms(talk['value'])} ms for {ms(theirs[1]['value'])}). By round "
        f"these gaps are {each[0]}, and {each[1]}; the replica of SGLang has {sglang} in the mean, "
        f"`full_and_piecewise` {fixed}."
    ) in WORDS
    before = first_of_the_8b("auto", "gap_p50_us")
    between = earlier_code("llama8b", "_second", "auto")["gap_p50_us"]
    older = [row for row in figures if row["date"] == EARLIER]
    assert all(row["ratio_to_vllm_replica"] < LEAST for row in before)
    assert all(was["ratio_high"] > now["ratio_low"] for was, now in zip(before, medians, strict=True))
    assert (
        f"**At 43ebfb8 these two were below it, {' and '.join(map(three, before))}**; at 95234a3 the code trace's were "
        f"{interval(between, 3)}. {len(older)} of {len(figures)} figures are still those of 43ebfb8. "
        "Why these two aren't below it now isn't known. Decode attention, calibration, day and the host's speed are "
        "others, and the conversation trace has 120 requests for 100; the runs' intervals overlap, too."
    ) in WORDS
    with_one = [row for row in figures if row["ratio_low"] is not None]
    wide = [row for row in with_one if row["ratio_low"] < LEAST]
    both, talks = (
        [row for row in wide if (row["model"], row["trace"]) == (model, "conversation")]
        for model in ("dsv2lite", "llama8b")
    )
    assert {(row["model"], row["trace"]) for row in figures if row["repeats"] == 2} == {("dsv2lite", "conversation")}
    assert len(both) == len(BETTER_UP)
    assert {*BETTER_UP} - {row["figure"] for row in talks} == {"ttft_p99_us"}
    assert (
        f"The interval begins below 0.99 in {len(wide)} of {len(with_one)} figures that have one: all {len(both)} of "
        f"the one load with two rounds, DeepSeek-V2-Lite's conversation trace, and {len(talks)} of Llama-3.1-8B's "
        "conversation trace, all but times to first token at p99. The others: median gaps of Llama-3.1-8B's code "
        "trace, times to first token at p50 of both traces of Llama-3.2-1B, and gaps at p99 of its conversation trace."
    ) in WORDS
    assert [(row["model"], row["trace"], row["figure"]) for row in wide if row not in both and row not in talks] == [
        ("llama8b", "code", "gap_p50_us"), ("llama1b", "code", "ttft_p50_us"),
        ("llama1b", "conversation", "ttft_p50_us"), ("llama1b", "conversation", "gap_p99_us"),
    ]  # fmt: skip


def test_auto_is_held_against_others() -> None:
    """The replica of SGLang and `full_and_piecewise` do as well: what is better by an interval, and by a mean."""

    def told(figure: str, model: str) -> str:
        return " and ".join(
            f"{by_load(policy)[newest(model, 'code')][figure]['ratio_to_vllm_replica']:.2f}"
            for policy in ("sglang", "full_and_piecewise")
        )

    shares = {
        other: [over_another(*load, "auto", other, "tokens_per_s")[0] for load in LOADS]
        for other in ("sglang", "full_and_piecewise")
    }
    between = {other: f"{min(each):.3f} to {max(each):.3f}" for other, each in shares.items()}
    eager = [cell["steps"]["eager"] for load in LOADS for cell in rounds(*load, "vllm")]
    told_of = {
        model: f"{told('tokens_per_s', model)} times the tokens a second and {told('gap_p99_us', model)} times as "
        f"short gaps at p99 with {MODELS[model]}"
        for model in MODELS
    }
    assert (
        "The replica of SGLang and `full_and_piecewise` have on the code trace, over the replica of vLLM's rule, "
        f"{told_of['qwen05b']}, {told_of['dsv2lite']}, {told_of['llama1b']} and {told_of['llama8b']}: about as much as "
        "plain `auto`. Over the eight loads `auto`'s tokens a second are "
        f"{between['sglang']} of the replica of SGLang's and {between['full_and_piecewise']} of "
        f"`full_and_piecewise`'s; the most is on the 0.5B's code trace, both with an interval that begins below 1. "
        f"vLLM's rule runs what has more than 512 tokens eagerly, {min(eager)} to {max(eager)} "
        "steps a round, and eager code of transformers launches slowly."
    ) in WORDS
    for other, each in shares.items():
        assert max(each) == each[0]
        assert over_another("qwen05b", "code", "auto", other, "tokens_per_s")[1] < 1
    steps = [cell["steps"] for load in LOADS for cell in rounds(*load, "auto")]
    assert {mode for each in steps for mode in each} == {"full", "piecewise", "eager"}
    assert (
        "`auto` ran no decode steps beside a prompt in any of these rounds, and at most "
        f"{max(each.get('eager', 0) for each in steps)} of a round's steps eagerly"
    ) in WORDS
    shorter = {other: over_another("dsv2lite", "code", PACED, other, "gap_p99_us") for other in shares}
    beyond = [with_interval(each) for each in shorter.values()]
    assert (
        f"Shorter steps go beyond that on two models, the 0.5B as above: on DeepSeek-V2-Lite gaps at p99 of `{PACED}` "
        f"are {beyond[0]} "
        f"times as short as the replica of SGLang's and {beyond[1]} times as `full_and_piecewise`'s. No other policy "
        "was served with shorter steps, so "
        "this is the steps', not `auto`'s choosing."
    ) in WORDS
    for other in shares:
        for figure in BETTER_UP:
            _, low, high = over_another("dsv2lite", "code", other, "auto", figure)
            assert low < 1 < high or (other, figure) == ("full_and_piecewise", "gap_p50_us")


OTHERS = ("sglang", "full_and_piecewise", *FIXED)
NAMES = {"vllm": "the replica of vLLM's rule", "sglang": "the replica of SGLang", "auto": "`auto`",
         "full_and_piecewise": "`full_and_piecewise`"}  # fmt: skip


def test_what_is_better_than_auto_is_told() -> None:
    """By a whole interval, and in the mean; what median gaps of one load were in three runs."""
    means = {
        (*load, other, figure): over_another(*load, other, "auto", figure)
        for load in LOADS
        for other in OTHERS
        if rounds(*load, other)
        for figure in BETTER_UP
    }
    better = {each: found for each, found in means.items() if found[1] > 1}
    assert [*better] == [
        ("dsv2lite", "code", "full_and_piecewise", "gap_p50_us"),
        ("dsv2lite", "conversation", "full_and_piecewise", "tokens_per_s"),
        ("llama8b", "conversation", "sglang", "gap_p50_us"),
        ("llama1b", "code", "sglang", "tokens_per_s"),
    ]
    median, tokens, gaps, small = better.values()
    assert [len(rounds(*load, "auto")) for load in (LOADS[2], LOADS[3], LOADS[5], LOADS[6])] == [7, 2, 3, 3]
    one = {
        other: [means["qwen05b", "conversation", other, figure][0] for figure in BETTER_UP]
        for other in ("full", "full_and_piecewise")
    }
    assert [sum(each > 1 for each in ratios) for ratios in one.values()] == [6, 5]
    repeated = {each: found for each, found in means.items() if len(rounds(each[0], each[1], each[2])) > 1}
    most = sorted(repeated, key=lambda each: -repeated[each][0])
    assert most[:6] == [
        ("dsv2lite", "code", "split", "gap_p50_us"),
        ("dsv2lite", "code", "full_and_piecewise", "gap_p50_us"),
        ("dsv2lite", "code", "sglang", "gap_p50_us"),
        ("dsv2lite", "conversation", "full_and_piecewise", "ttft_p99_us"),
        ("llama1b", "code", "full_and_piecewise", "ttft_p50_us"),
        ("llama1b", "code", "full_and_piecewise", "gap_p99_us"),
    ]
    (waits,) = {f"{means[each][0]:.2f}" for each in most[3:5]}
    late = means[most[5]]
    assert f"{late[0]:.2f}" < waits
    by_split, by_sglang = (means[most[at]] for at in (0, 2))
    assert (
        "**Where others are better than plain `auto`.** With their whole interval four figures are: median gaps of "
        f"DeepSeek-V2-Lite's code trace by `full_and_piecewise`, **{with_interval(median)} times as short**, seven "
        f"rounds; tokens a second of its conversation trace by `full_and_piecewise`, by {tokens[0] - 1:.1%}, two "
        "rounds; median gaps of Llama-3.1-8B's conversation trace by the replica of SGLang, by "
        f"{gaps[0] - 1:.1%}, and tokens a second of Llama-3.2-1B's code trace by the same, by {small[0] - 1:.1%}, "
        "three "
        "rounds each. In the mean, of loads with more than one round, two more are better by over 3%, both median gaps "
        f"of DeepSeek-V2-Lite's code trace: {with_interval(by_split)} times as short by `split`, three rounds, and "
        f"{with_interval(by_sglang)} times by the replica of SGLang. Then come first tokens {waits} times as early, "
        "both by `full_and_piecewise`: at p99 on DeepSeek-V2-Lite's conversation trace and at p50 on Llama-3.2-1B's "
        f"code trace, whose gaps at p99 are {with_interval(late)} times as short by it."
    ) in WORDS
    spread = {
        model: ", ".join(
            f"{NAMES[policy]} {least_and_most([cell['gap_p50_us'] for cell in rounds(model, 'code', policy)])}"
            for policy in ("auto", "full_and_piecewise", "sglang", "vllm")
        )
        for model in ("qwen05b", "llama1b", "llama8b")
    }
    medians = {
        model: " and ".join(
            with_interval(over_another(model, "code", other, "auto", "gap_p50_us"))
            for other in ("full_and_piecewise", "sglang")
        )
        for model in ("qwen05b", "llama1b", "llama8b")
    }
    by_full = means["llama1b", "code", "full", "gap_p50_us"][0]
    assert (
        "**Median gaps of the small models are erratic**: by round, in ms, on the 0.5B's code trace "
        f"{spread['qwen05b']}, "
        f"on Llama-3.2-1B's {spread['llama1b']}, on Llama-3.1-8B's {spread['llama8b']}. `full_and_piecewise`'s and the "
        f"replica of SGLang's are {medians['qwen05b']}, {medians['llama1b']}, and {medians['llama8b']} times as short "
        "as "
        f"`auto`'s: nothing is shown by them. In the one round of `full` on Llama-3.2-1B they are {by_full:.2f} times "
        "as "
        "short."
    ) in WORDS
    alike = ("auto", "full_and_piecewise", "sglang")
    ours, fixed, theirs = (
        " and ".join(
            least_and_most([cell["gap_p50_us"] for cell in cells])
            for cells in (rounds("dsv2lite", "code", policy), larger_before(policy, BEFORE))
        )
        for policy in alike
    )
    before, earlier = (
        interval_of_mean([
            a["gap_p50_us"] / b["gap_p50_us"]
            for a, b in zip(larger_before("auto", name), larger_before("full_and_piecewise", name), strict=True)
        ])
        for name in (BEFORE, "")
    )  # fmt: skip
    assert before[0] < 1
    assert earlier[1] < 1 < earlier[0]
    steps = [cell["steps"] for policy in alike for cell in rounds("dsv2lite", "code", policy)]
    assert {mode for each in steps for mode in each} == {"full", "piecewise"}
    pieces = [each["piecewise"] for each in steps]
    assert (
        "Median gaps of DeepSeek-V2-Lite's code trace by round, now and in the run before, in ms: `auto` "
        f"{ours}, `full_and_piecewise` {fixed}, the replica of SGLang {theirs}. `full_and_piecewise`'s were "
        f"{before[0]:.2f} times as short as `auto`'s in the run before and {earlier[0]:.2f} times in the one before "
        f"that. Each has {min(pieces)} to {max(pieces)} steps a round in PIECEWISE graphs and the rest in FULL ones; "
        "why median gaps change so isn't known."
    ) in WORDS
    assert (
        "**In the one round of the 0.5B's conversation trace `full` is better "
        f"than `auto` in all six figures**, by {min(one['full']) - 1:.1%} (tokens a second) to "
        f"{max(one['full']) - 1:.1%} (time to first token at p50), `full_and_piecewise` in five."
    ) in WORDS
    assert one["full"].index(min(one["full"])) == list(BETTER_UP).index("tokens_per_s")
    assert one["full"].index(max(one["full"])) == list(BETTER_UP).index("ttft_p50_us")


def with_interval(found: tuple[float, float, float]) -> str:
    """A mean with its interval."""
    middle, low, high = found
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def test_fixed_policies_of_the_larger_model_are_told() -> None:
    """Over the replica in its first three rounds, beside plain `auto` in these, and what is better or worse than it."""
    load = ("dsv2lite", "code")
    figures = ("tokens_per_s", "gap_p99_us")
    auto = [sum(each_over_another(*load, "auto", "vllm", figure)[:3]) / 3 for figure in figures]
    told = {policy: " and ".join(two(by_load(policy)[newest(*load)][figure]) for figure in figures) for policy in FIXED}
    against = {
        (policy, figure): over_another(*load, policy, "auto", figure) for policy in FIXED for figure in BETTER_UP
    }
    assert not any(low > 1 for _, low, _ in against.values())
    better = {each: middle - 1 for each, (middle, _, _) in against.items() if middle > 1}
    assert [*better] == [("piecewise", "ttft_p50_us"), ("piecewise", "ttft_p99_us"), ("piecewise", "gap_p99_us"),
                         ("split", "gap_p50_us")]  # fmt: skip
    by_pieces = [by for (policy, _), by in better.items() if policy == "piecewise"]
    worse = {policy: [figure for figure in BETTER_UP if against[policy, figure][2] < 1] for policy in FIXED}
    assert worse == {
        "piecewise": ["tokens_per_s"], "full": [*BETTER_UP], "eager": [*BETTER_UP],
        "split": [figure for figure in BETTER_UP if figure != "gap_p50_us"],
    }  # fmt: skip
    assert (
        "**Fixed policies on DeepSeek-V2-Lite's code trace**: of four there are its first three rounds, in which plain "
        f"`auto` has {auto[0]:.2f} times the replica's tokens a second and gaps at p99 {auto[1]:.2f} times as short. "
        f"`piecewise` has {told['piecewise']} there, `split` {told['split']}, `full` {told['full']} and `eager` "
        f"{told['eager']}. None of the four is better than `auto` by its whole interval in any figure; in the mean "
        "`split` is in median gaps, and `piecewise` in gaps at p99 and times to first token, by "
        f"{100 * min(by_pieces):.1f} to {max(by_pieces):.1%}. `full` and `eager` are worse than `auto` in all six "
        "figures by the whole interval, `split` in all but median gaps, `piecewise` in tokens a second, by "
        f"{1 - against['piecewise', 'tokens_per_s'][0]:.1%}."
    ) in WORDS


def test_fixed_policies_of_the_other_models_are_told() -> None:
    """The 0.5B's four rounds and the Llamas' one: over the replica, and what is better or worse than plain `auto`."""

    def told(model: str, policy: str) -> str:
        at = by_load(policy)[newest(model, "code")]
        return " and ".join(two(at[figure]) for figure in ("tokens_per_s", "gap_p99_us"))

    against = {
        (model, policy, figure): over_another(model, "code", policy, "auto", figure)
        for model, _ in LATEST for policy in FIXED for figure in BETTER_UP
    }  # fmt: skip
    small = {policy: [figure for figure in BETTER_UP if against["qwen05b", policy, figure][2] < 1] for policy in FIXED}
    assert small == {
        "piecewise": ["tokens_per_s", "gap_p50_us"], "full": [], "split": [*BETTER_UP], "eager": [*BETTER_UP],
    }  # fmt: skip
    better = [each for each, (middle, _, _) in against.items() if middle > 1]
    assert better == [
        ("llama8b", "full", "gap_p50_us"),
        ("llama8b", "split", "gap_p50_us"),
        ("llama1b", "piecewise", "gap_p99_us"),
        ("llama1b", "full", "gap_p50_us"),
    ]
    by = [against[each][0] for each in better]
    behind = [against["qwen05b", "full", figure][0] for figure in BETTER_UP]
    plain = {model: [each_over_another(model, "code", "auto", "vllm", figure)[0]
                     for figure in ("tokens_per_s", "gap_p99_us")] for model in ("llama8b", "llama1b")}  # fmt: skip
    assert (
        f"**Fixed policies on the other code traces.** On the 0.5B's, four rounds, in tokens a second and gaps at p99 "
        f"over the replica: `full` {told('qwen05b', 'full')}, `piecewise` {told('qwen05b', 'piecewise')}, `split` "
        f"{told('qwen05b', 'split')}, `eager` {told('qwen05b', 'eager')}. `split` and `eager` are worse than `auto` in "
        "all six figures by the whole interval, `piecewise` in tokens a second and median gaps, `full` in none, and in "
        f"the mean it is {min(behind):.2f} to {max(behind):.2f} of `auto`. On the Llamas' there is one round: "
        f"Llama-3.2-1B `full` {told('llama1b', 'full')}, `piecewise` {told('llama1b', 'piecewise')}, `split` "
        f"{told('llama1b', 'split')} and `eager` {told('llama1b', 'eager')}, `auto` {plain['llama1b'][0]:.2f} and "
        f"{plain['llama1b'][1]:.2f} in that round; Llama-3.1-8B {told('llama8b', 'full')}, "
        f"{told('llama8b', 'piecewise')}, {told('llama8b', 'split')} and {told('llama8b', 'eager')}, `auto` "
        f"{plain['llama8b'][0]:.2f} and {plain['llama8b'][1]:.2f}. There median gaps are {by[3]:.2f} times as short as "
        f"`auto`'s by `full` on Llama-3.2-1B, {by[0]:.3f} and {by[1]:.3f} times by `full` and `split` on Llama-3.1-8B, "
        f"and `piecewise`'s gaps at p99 {by[2]:.3f} times on Llama-3.2-1B; in every other figure `auto` is as good or "
        "better."
    ) in WORDS


def least_and_most(us: list[float]) -> str:
    """Milliseconds of the least and of the most."""
    return f"{ms(min(us))} to {ms(max(us))}"


def test_what_the_measure_is_is_told() -> None:
    """How long rounds take, what of it is after the last arrival, and what hosts were like."""
    auto, replica, eager = (rounds("qwen05b", "code", policy) for policy in ("auto", "vllm", "eager"))
    (span,) = {f"{cell['span_s'] - cell['after_arrivals_s']:.2f}" for cell in (*auto, *replica)}

    def of(cells: list[dict[str, Any]], figure: str = "span_s") -> str:
        return f"{min(cell[figure] for cell in cells):.2f} to {max(cell[figure] for cell in cells):.2f}"

    assert (
        f"The 0.5B's requests of the code trace arrive within {span} s; `auto`'s rounds took {of(auto)} s, the "
        f"replica's {of(replica)}, EAGER's {of(eager)}, so that {of(auto, 'after_arrivals_s')} s of `auto`'s come "
        "after the last arrival"
    ) in WORDS
    before = {
        load: {name: cell["host_us"] for data in newest_files(*load) for name, cell in of_trace(data, load[1]).items()}
        for load in LOADS
    }
    hosts = [us for each in before.values() for us in each.values()]
    assert len(hosts) == sum(row["repeats"] for row in read("end_to_end")
                             if row["figure"] == "gap_p50_us" and row["date"] != "2026-11-28")  # fmt: skip
    slow = {load: [name for name, us in each.items() if us > 400] for load, each in before.items()}
    counted = {load: f"{len(slow[load])} of the {len(before[load])}" for load in LOADS}
    small, dense, large = (slow[load] for load in LATEST)
    mixture = slow["dsv2lite", "code"]
    assert (
        f"Fixed work before each round took {min(hosts):.0f} to {max(hosts):.0f} us (`host_us`), over 400 before "
        f"{sum(map(len, slow.values()))} of {len(hosts)} rounds, {counted['qwen05b', 'code']} of the 0.5B's code trace "
        f"(first of `full_and_piecewise`, `piecewise` and `{PACED}`, second of `full` and `eager`), "
        f"{counted['llama8b', 'code']} of Llama-3.1-8B's (first of the replica of SGLang, `{PACED}` and `full`, second "
        f"of the replica of vLLM's rule), {counted['llama1b', 'code']} of Llama-3.2-1B's (first of the replica of "
        f"SGLang and `full`, second of `auto`, third of the replica of vLLM's rule, `full_and_piecewise` and "
        f"`{PACED}`) and {counted['dsv2lite', 'code']} of DeepSeek-V2-Lite's (first and second of `piecewise`, second "
        f"and fifth of `{PACED}`, the first of `eager`, the second of the replica of SGLang and the third of `full`)."
    ) in WORDS
    for found, names in (
        (small, {"0/full_and_piecewise", "0/piecewise", f"0/{PACED}", "1/full", "1/eager"}),
        (dense, {"0/sglang", f"0/{PACED}", "0/full", "1/vllm"}),
        (large, {"0/sglang", "0/full", "1/auto", "2/vllm", "2/full_and_piecewise", f"2/{PACED}"}),
        (mixture, {"0/piecewise", "1/piecewise", f"1/{PACED}", f"4/{PACED}", "0/eager", "1/sglang", "2/full"}),
    ):  # fmt: skip
        assert {name.removeprefix("code saturated/") for name in found} == names
    noise = [
        read(f"raw/end_to_end_{run}")["host_noise"]["slow"]
        for run in ("qwen05b_code", "llama8b_code", "llama1b_code", "dsv2lite_code", "llama8b_conversation")
    ]
    assert (
        "They moved to a quicker core 47, 63, 46 and 171 times, as `benchmarks.quiet` printed. Of fixed work over 2 s "
        f"before their rounds {100 * noise[0]:.0f}, {100 * noise[1]:.0f}, {100 * noise[2]:.0f} and {noise[3]:.0%} was "
        f"slow (`host_noise`), and {noise[4]:.0%} before Llama-3.1-8B's conversation trace, which ran without it."
    ) in WORDS
    for slow_, looks in ((604, 3921), (990, 4554), (496, 2405), (1819, 7810), (1224, 5214), (841, 4336), (469, 2838),
                         (394, 3104)):  # fmt: skip
        assert f"{slow_ / looks:.0%} ({slow_:,} of {looks:,})" in WORDS


def test_the_conversation_trace_of_the_day_before_is_told() -> None:
    """With a limit of 1.25: over the replica, round by round, and beside `full_and_piecewise`."""
    (title,) = (each for each in by_load("auto") if each.endswith("2026-11-28"))
    at = {policy: by_load(policy)[title] for policy in ("auto", "vllm", "full_and_piecewise")}
    tokens, gaps = (at["auto"][figure] for figure in ("tokens_per_s", "gap_p99_us"))
    cells = read("raw/end_to_end_qwen05b_conversation")["cells"]
    replicas, mine = ([cells[f"conversation saturated/{i}/{policy}"] for i in range(3)] for policy in ("vllm", "auto"))
    slow = [f"{cell['host_us']:.0f}" for cell in replicas]
    rates = [f"{cell['tokens_per_s']:,.0f}" for cell in replicas]
    ratios = (mine[2]["tokens_per_s"] / replicas[2]["tokens_per_s"], replicas[2]["gap_p99_us"] / mine[2]["gap_p99_us"])
    assert (
        f"`auto` has {interval(tokens)} times the tokens a second, and gaps at p99 {interval(gaps)} times as short. "
        f"Both are flattered by the host, which was slow before the replica's first two rounds (`host_us` {slow[0]} "
        f"and {slow[1]}, {slow[2]} before the third): {rates[0]} and {rates[1]} tokens a second, and {rates[2]}. In "
        f"the third round, with a quick host for both, it is {ratios[0]:.2f} times the tokens a second, and gaps at "
        f"p99 {ratios[1]:.2f} times as short."
    ) in WORDS
    assert mine[2]["host_us"] < 400
    steps = [cell["steps"] for cell in mine]
    beside = sum(each["split/decodes_beside"] for each in steps) / sum(sum(each.values()) for each in steps)
    (first, sooner), (last, before) = (
        [at[policy][figure]["value"] / 1e3 for policy in ("auto", "full_and_piecewise")]
        for figure in ("ttft_p50_us", "ttft_p99_us")
    )
    assert (
        f"It ran decode steps beside prompts in {beside:.0%} of its steps, and its prompts waited {first:.0f} ms for "
        f"`full_and_piecewise`'s {sooner:.0f} at p50 and {last:.0f} for {before:.0f} at p99."
    ) in WORDS
    today, today_gaps = (
        by_load("auto")[newest("qwen05b", "conversation")][figure]["ratio_to_vllm_replica"]
        for figure in ("tokens_per_s", "gap_p99_us")
    )
    (latest,), (quick,) = (rounds("qwen05b", "conversation", policy) for policy in ("vllm", "auto"))
    assert max(latest["host_us"], quick["host_us"]) < 400
    assert today < 1.3
    assert (
        f"In the one round of 2026-11-29, before which the host was quick for both too, the replica had "
        f"{latest['tokens_per_s']:,.0f}: {today:.2f} times, and {today_gaps:.2f}, so that **1.3 isn't reached in "
        "tokens a second there**."
    ) in WORDS
    assert in_short("throughput, 150 requests of the conversation") == (
        f"{today:.2f}, gaps at p99 {today_gaps:.2f}, one round; the day before, with a limit of 1.25, "
        f"{times(tokens, '( to )')} and {times(gaps, '( to )')}, {ratios[0]:.2f} and {ratios[1]:.2f} in the one round "
        "in which the host was quick for both"
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (
        f"the conversation trace: {today:.2f} in one round, the day before {times(tokens, '( to )')} on a host that "
        f"was slow for the replica at times ({ratios[0]:.2f} where it was quick for both)"
    ) in readme


def test_earlier_runs_are_told() -> None:
    """Of older code, each by its own ratios: `auto` had a limit of 1.25."""
    third = {
        (row["policy"], row["figure"]): row for row in summarise(read("raw/end_to_end_qwen05b_third"))
    }  # fmt: skip
    tokens, gaps = (third["auto", figure] for figure in ("tokens_per_s", "gap_p99_us"))
    fixed = third["full_and_piecewise", "tokens_per_s"]["ratio_to_vllm_replica"]
    assert {row["repeats"] for row in third.values()} == {3}
    assert (
        f"(`raw/end_to_end_qwen05b_third.json`): {interval(tokens)} times the tokens a second, gaps at p99 "
        f"{interval(gaps)} times as short; `full_and_piecewise` {fixed:.2f} times the tokens."
    ) in WORDS
    second = {
        (row["load"].partition(" ")[0], row["figure"]): row
        for row in summarise(read("raw/end_to_end_qwen05b_second")) if row["policy"] == "auto"
    }  # fmt: skip
    code, talk = (second[trace, "tokens_per_s"] for trace in ("code", "conversation"))
    assert (code["repeats"], talk["repeats"]) == (5, 2)
    gap, longer = (second[trace, "gap_p99_us"]["ratio_to_vllm_replica"] for trace in ("code", "conversation"))
    assert (
        f"{interval(code)} times the tokens a second on the code trace, five rounds, and {interval(talk)} on the "
        f"conversation trace, two rounds; gaps at p99 {gap:.1f} and {longer:.1f} times as short"
    ) in WORDS
    first = {name: cell["tokens_per_s"] for name, cell in whole_rounds(read("raw/end_to_end_qwen05b_first")).items()}
    auto, fixed, pieces, split, eager = (
        f"{first[f'code saturated/0/{policy}']:,.0f}"
        for policy in ("auto", "full_and_piecewise", "piecewise", "split", "eager")
    )
    assert len(first) == 8
    assert (
        f"`auto` {auto} tokens a second, `full_and_piecewise` {fixed}, `piecewise` {pieces}, `split` {split}, eager "
        f"{eager} (`raw/end_to_end_qwen05b_first.json`)."
    ) in WORDS


def first_of_the_8b(policy: str, figure: str) -> list[dict[str, Any]]:
    """A policy's figure of the 8B's run before, of the code and of the conversation trace."""
    rows = summarise(read("raw/end_to_end_llama8b_first"))
    found = [row for row in rows if (row["policy"], row["figure"]) == (policy, figure)]
    assert [row["trace"] for row in found] == ["code", "conversation"]
    return found


def test_the_8bs_run_before_is_told() -> None:
    """Its two median gaps, the only figures below 0.99 of the tables of then."""
    data = read("raw/end_to_end_llama8b_first")
    assert data["date"] == EARLIER
    policies = {name.split("/")[2] for name in whole_rounds(data)}
    assert len(policies) == 4
    medians = {policy: first_of_the_8b(policy, "gap_p50_us") for policy in policies}
    assert [row["repeats"] for row in medians["auto"]] == [3, 2]
    assert {row["served"] for row in medians["auto"]} == {100}
    then = [row for row in in_all() if (row["model"], row["trace"]) in SERVED_EARLIER]
    then += [row for figure in BETTER_UP for row in first_of_the_8b("auto", figure)]
    then += [row for model in ("qwen05b", "dsv2lite", "llama1b") for row in earlier_code(model, "", "auto").values()]
    below = [row for row in then if row["ratio_to_vllm_replica"] < LEAST]
    assert below == medians["auto"]
    assert len(then) == 48
    tokens = " and ".join(interval(row) for row in first_of_the_8b("auto", "tokens_per_s"))
    gaps = " and ".join(interval(row, 3) for row in medians["auto"])
    (code, talk), theirs = medians["auto"], medians["vllm"]
    sglang, fixed = (" and ".join(map(three, medians[policy])) for policy in ("sglang", "full_and_piecewise"))
    was = [row["value"] for rows in medians.values() for row in rows]
    now = [
        by_load(policy)[newest("llama8b", trace)]["gap_p50_us"]["value"]
        for policy in policies for trace in ("code", "conversation")
    ]  # fmt: skip
    hosts = [cell["host_us"] for cell in whole_rounds(data).values()]
    assert (
        f"Llama-3.1-8B, {data['date']}, 43ebfb8, in the run of the tables' other conversation traces, with a limit of "
        "1.0, "
        "100 requests of each trace, three rounds of the code trace and two of the conversation trace "
        f"(`raw/end_to_end_llama8b_first.json`): {tokens} times the tokens a second, **median gaps {gaps} times as "
        f"short** ({ms(code['value'])} ms for {ms(theirs[0]['value'])}, and {ms(talk['value'])} for "
        f"{ms(theirs[1]['value'])}), then the only two of {len(then)} figures below 0.99; why isn't known. The replica "
        f"of SGLang had {sglang} there, `full_and_piecewise` {fixed}. Median gaps of all four policies were "
        f"{ms(min(was))} to {ms(max(was))} ms, and are {ms(min(now))} to {ms(max(now))} in the tables, of another run. "
        f"Fixed work before its rounds took {min(hosts):.0f} to {max(hosts):.0f} us."
    ) in WORDS
    assert f"`auto` had a limit of 1.25 in all but those of {EARLIER} and {DAY[-2:]}." in WORDS


@pytest.mark.parametrize(
    ("model", "name", "told"),
    [
        ("llama8b", "_second", "Llama-3.1-8B, code trace, 2026-11-30, 95234a3, between 01:03 and 01:12 UTC, one "
         "H200 alone on its host, not under `benchmarks.quiet`, with a limit of 1.0, 100 requests, three rounds"),
        ("qwen05b", "", "Qwen2.5-0.5B, code trace, 2026-11-29, 43ebfb8, in the run of the tables' conversation trace, "
         "with a limit of 1.0, 150 requests, four rounds"),
        ("llama1b", "", "Llama-3.2-1B, code trace, 2026-11-29, 43ebfb8, in the run of the tables' conversation trace, "
         "with a limit of 1.0, 150 requests, three rounds"),
    ],
)  # fmt: skip
def test_code_traces_served_before_are_told(model: str, name: str, told: str) -> None:
    """Over the replica in all six figures, and how long its gaps at p99 and `auto`'s were."""
    rows = earlier_code(model, name, "auto")
    values = {policy: earlier_code(model, name, policy) for policy in ("auto", "vllm")}
    both = [" and ".join(two(earlier_code(model, name, policy)[figure]) for figure in ("tokens_per_s", "gap_p99_us"))
            for policy in ("sglang", "full_and_piecewise")]  # fmt: skip
    own, theirs = (
        f"{ms(of['gap_p99_us']['value'])} ms and {of['tokens_per_s']['value']:,.0f} tokens a second"
        for of in values.values()
    )
    assert (
        f"{told} (`raw/end_to_end_{model}{name}.json`): {interval(rows['tokens_per_s'])} times the tokens a second, "
        f"{interval(rows['tokens_per_s_arriving'])} arriving, first tokens {interval(rows['ttft_p50_us'])} times as "
        f"early at p50 and {interval(rows['ttft_p99_us'])} at p99, median gaps {interval(rows['gap_p50_us'])} times as "
        f"short, gaps at p99 {interval(rows['gap_p99_us'])}; `auto` {own}, the replica {theirs}. The replica of SGLang "
        f"had {both[0]} in tokens a second and gaps at p99, `full_and_piecewise` {both[1]}."
    ) in WORDS


def of_larger(policy: str, figure: str, name: str) -> dict[str, Any]:
    """A row of an older run of DeepSeek-V2-Lite's code trace."""
    rows = summarise(read(f"raw/end_to_end_dsv2lite{name}"))
    (row,) = [row for row in rows if (row["trace"], row["policy"], row["figure"]) == ("code", policy, figure)]
    return row


BEFORE = "_code_first"
"""DeepSeek-V2-Lite's code trace in the run before the tables'; the one before that is beside its conversation trace"""


def larger_before(policy: str, name: str) -> list[dict[str, Any]]:
    """A policy's rounds of that trace in a run before the tables'."""
    found = of_trace(read(f"raw/end_to_end_dsv2lite{name}"), "code")
    return [cell for each, cell in sorted(found.items()) if each.endswith(f"/{policy}")]


@pytest.mark.parametrize(
    ("name", "day", "told", "ends"),
    [
        (BEFORE, DAY, "about 04:07 to 04:10 UTC, d32f9e4, not under `benchmarks.quiet`, with a limit of 1.0, 100 "
         "requests, four rounds (`raw/end_to_end_dsv2lite_code_first.json`)",
         " Of fixed work over 2 s before its rounds {noise:.0%} was slow (`host_noise`)."),
        ("", EARLIER, "43ebfb8, in the run of the tables' other conversation traces, with a limit of 1.0, 100 "
         "requests, four rounds (`raw/end_to_end_dsv2lite.json`, whose conversation trace is in the tables)", ""),
    ],
)  # fmt: skip
def test_the_larger_models_runs_before_with_todays_limit_are_told(name: str, day: str, told: str, ends: str) -> None:
    """The code trace alone, and beside the conversation trace that the tables have: gaps by round, and medians."""
    data = read(f"raw/end_to_end_dsv2lite{name}")
    assert data["date"] == day
    rows = {figure: of_larger("auto", figure, name) for figure in BETTER_UP}
    assert {(row["repeats"], row["served"]) for row in rows.values()} == {(4, 100)}
    others = [
        " and ".join(two(of_larger(policy, figure, name)) for figure in ("tokens_per_s", "gap_p99_us"))
        for policy in ("sglang", "full_and_piecewise")
    ]
    own, theirs = ([cell["gap_p99_us"] for cell in larger_before(policy, name)] for policy in ("auto", "vllm"))
    ratios = [them / us for us, them in zip(own, theirs, strict=True)]
    assert sum(ratio < 1.3 for ratio in ratios) == 2
    hosts = [cell["host_us"] for cell in larger_before("vllm", name)]
    eager = {cell["steps"]["eager"] for cell in larger_before("vllm", name)}
    assert (
        f"DeepSeek-V2-Lite, code trace, {data['date']}, {told}: "
        f"{interval(rows['tokens_per_s'])} times the tokens a second, "
        f"{interval(rows['tokens_per_s_arriving'])} arriving, first tokens {interval(rows['ttft_p50_us'])} times as "
        f"early at p50 and {interval(rows['ttft_p99_us'])} at p99, median gaps {interval(rows['gap_p50_us'])} times as "
        f"short, **gaps at p99 {interval(rows['gap_p99_us'])}**. The replica's gaps at p99 were "
        f"{told_by_round([ms(us) for us in theirs])} ms by round, `auto`'s {least_and_most(own)}: "
        f"{told_by_round([f'{ratio:.2f}' for ratio in ratios])} times. They are uneven as those above: fixed work "
        f"before them took {min(hosts):.0f} to {max(hosts):.0f} us, and {min(eager)} or {max(eager)} steps ran eagerly "
        f"in each. The replica of SGLang had {others[0]} in tokens a second and gaps at p99, `full_and_piecewise` "
        f"{others[1]}.{ends.format(noise=data['host_noise']['slow'])}"
    ) in WORDS
    assert len(eager) == 2


def times(row: dict[str, Any], brackets: str = "[, ]") -> str:
    """How many times the replica's, with the interval."""
    opens, between, closes = brackets[0], brackets[1:-1], brackets[-1]
    interval = f"{opens}{row['ratio_low']:.2f}{between}{row['ratio_high']:.2f}{closes}"
    return f"{row['ratio_to_vllm_replica']:.2f} {interval}"


def test_the_larger_models_runs_before_are_told() -> None:
    """Older kernels or limits, each run by its own ratios, and the policies that weren't served since."""
    figures = ("tokens_per_s", "gap_p99_us")
    tokens, gaps = (of_larger("auto", figure, "_fourth") for figure in figures)
    fixed = [of_larger("full_and_piecewise", figure, "_fourth")["ratio_to_vllm_replica"] for figure in figures]
    cells = read("raw/end_to_end_dsv2lite_fourth")["cells"]
    own, theirs = ([cells[f"code saturated/{i}/{policy}"]["gap_p99_us"] for i in range(4)]
                   for policy in ("auto", "vllm"))  # fmt: skip
    assert (
        f"(`raw/end_to_end_dsv2lite_fourth.json`): `auto` has {times(tokens)} times the replica's tokens a second, and "
        f"gaps at p99 {times(gaps)} times as short, `full_and_piecewise` {fixed[0]:.2f} and {fixed[1]:.2f}. The "
        f"replica's were {told_by_round([ms(us) for us in theirs])} ms by round, `auto`'s {ms(min(own))} to "
        f"{ms(max(own))}."
    ) in WORDS
    tokens, gaps = (of_larger("auto", figure, "_third") for figure in figures)
    fixed = [of_larger("full_and_piecewise", figure, "_third")["ratio_to_vllm_replica"] for figure in figures]
    assert (
        f"(`raw/end_to_end_dsv2lite_third.json`): {times(tokens)} and {times(gaps)}, `full_and_piecewise` "
        f"{fixed[0]:.2f} and {fixed[1]:.2f}."
    ) in WORDS
    second = [of_larger("auto", figure, "_second") for figure in figures]
    assert {row["repeats"] for row in second} == {1}
    ratios = " and ".join(f"{row['ratio_to_vllm_replica']:.2f}" for row in second)
    assert f"(`raw/end_to_end_dsv2lite_second.json`): {ratios}." in WORDS
    first = " and ".join(times(of_larger("auto", figure, "_first")) for figure in figures)
    assert f"(`raw/end_to_end_dsv2lite_first.json`): {first}." in WORDS
    others = {
        policy: " and ".join(
            f"{of_larger(policy, figure, '_first')['ratio_to_vllm_replica']:.2f}" for figure in figures
        )
        for policy in FIXED
    }
    told = ", ".join(f"`{policy}` {each}" for policy, each in others.items())
    assert f"Fixed policies had there, in tokens a second and gaps at p99: {told}." in WORDS
    spans = []
    for name in ("_code", BEFORE, "", "_fourth", "_third", "_second", "_first"):
        (span,) = {
            f"{cell['span_s'] - cell['after_arrivals_s']:.2f}"
            for each, cell in read(f"raw/end_to_end_dsv2lite{name}")["cells"].items() if each.startswith("code ")
        }  # fmt: skip
        spans.append(float(span))
    assert {round(span, 1) for span in spans[5:]} <= {5.3, 5.4}
    here, *older, last = (f"{span} s" for span in spans[:5])
    assert (
        f"within {here} here, {older[0]} at d32f9e4, {older[1]} at 43ebfb8, {older[2]} at 7c76117, {last} at fc67869 "
        "and 5.3 s before."
    ) in WORDS


KERNELS = {
    name: f"raw/kernels_dsv2lite{name}" for name in ("_first", "_second", "_second_theirs", "")
}  # fmt: skip
"""At 8cb4544; at fc67869 on experts of ours and on transformers' own; with MLA's prompt attention of ours too"""
PROMPT = "prompt of 2048/piecewise 2048"
TIMES = ("wall_us", "host_us", "device_us")


def kernels(name: str) -> dict[str, Any]:
    """Ways of steps of a run, by name."""
    found: dict[str, Any] = read(KERNELS[name])["cells"]
    return found


def ms(us: float) -> str:
    """Microseconds as the page has them."""
    return f"{us / 1e3:.1f}"


def begun(name: str) -> str:
    """A row's first two cells: the step and the way."""
    step, _, way = name.rpartition("/")
    mode, _, size = way.partition(" ")
    step = step.replace("2048", "2,048 tokens").replace("2040", "2,040 tokens")
    return f"| {step} | {f'{mode.upper()} {int(size):,}' if size else mode.upper()} |"


def of_experts() -> list[str]:
    """A row a way of a step: wall, host and device ms and how many kernels, on transformers' experts and on ours."""
    ours, theirs = kernels("_second"), kernels("_second_theirs")
    assert ours.keys() == theirs.keys()
    return [
        f"{begun(name)} {' | '.join(f'{ms(theirs[name][each])} | {ms(cell[each])}' for each in TIMES)} | "
        f"{theirs[name]['kernels']:,} | {cell['kernels']:,} |"
        for name, cell in ours.items()
    ]


def of_kernels() -> list[str]:
    """The ways that were measured with MLA's prompt attention of ours."""
    return [
        f"{begun(name)} {' | '.join(ms(cell[each]) for each in TIMES)} | {cell['kernels']:,} |"
        for name, cell in kernels("").items()
    ]


def longest(cell: dict[str, Any], part: str) -> float:
    """Microseconds of the kernels whose names have that in them."""
    found: float = sum(us for name, us, _ in cell["longest"] if part in name)
    return found


def test_kernels_are_told_as_they_came_out() -> None:
    """A prompt's families before and after, what is left, what the host takes beyond, and decodes."""
    words = " ".join(" ".join(DOC).split())
    ours, theirs, now, first = (kernels(name) for name in ("_second", "_second_theirs", "", "_first"))
    ran_with = [read(KERNELS[name])["expert_kernels"] for name in ("_second", "_second_theirs", "")]
    assert ran_with == ["kpolicy", "transformers", "kpolicy"]
    mine, before, latest = (cells[PROMPT] for cells in (ours, theirs, now))
    assert (
        f"takes the device {ms(latest['device_us'])} ms, whatever launches it, where it took "
        f"{ms(before['device_us'])}**: {ms(mine['device_us'])} with experts of ours alone. In PIECEWISE it takes "
        f"{ms(latest['wall_us'])} ms of wall, {ms(mine['wall_us'])} and {ms(before['wall_us'])}."
    ) in words
    both = [(ms(before["families"][name]), ms(mine["families"][name]))
            for name in ("elementwise and reductions", "sorting and gathering", "copies", "experts")]  # fmt: skip
    (norms, fewer), (sorting, less), (copies, few), (experts, more) = both
    grouped = {ms(longest(cell, "GroupProblemShape")) for cell in (before, mine, latest)}
    assert (
        f"took {ms(before['device_us'] - mine['device_us'])} ms** of clearing, sorting and multiplying beside the "
        f"products. Norms, activations and sums go from {norms} to {fewer} ms ({ms(longest(before, 'masked_fill'))} "
        f"were `masked_fill` alone: it clears rows of experts that other devices hold, though there are none), sorting "
        f"and gathering from {sorting} to {less}, copies from {copies} to {few}. What the file counts as experts goes "
        f"from {experts} to {more}, as three kernels of ours are in it; the grouped products take {' '.join(grouped)} "
        "in both."
    ) in words
    own = longest(latest, "_expanded_prefill")
    assert latest["families"]["other"] - own < 50
    fewer_copies = ms(mine["families"]["copies"] - latest["families"]["copies"])
    assert (
        f"its kernel {ms(longest(mine, 'flash_fwd'))} ms, copies for it {fewer_copies}. Ours takes "
        f"{ms(own)} (under `other` in the file)."
    ) in words
    products, sums, copied = (ms(latest["families"][name])
                              for name in ("matrix products", "elementwise and reductions", "copies"))  # fmt: skip
    assert (
        f"What is left of the {ms(latest['device_us'])} ms**: the experts' grouped products {' '.join(grouped)}, other "
        f"products {products}, norms, activations and sums {sums}, copies {copied}, attention {ms(own)}."
    ) in words
    eager = [cells["prompt of 2048/eager"] for cells in (ours, theirs, now)]
    won = [each["wall_us"] / cell["wall_us"] for each, cell in zip(eager, (mine, before, latest), strict=True)]
    slow = [read(KERNELS[name])["host_noise"]["slow"] for name in ("", "_second", "_second_theirs")]
    mixed = [cells["prompt of 2040 and 8 decodes/eager"]["wall_us"] for cells in (ours, theirs)]
    assert (
        f"EAGER takes {won[0]:.2f} times what PIECEWISE does with experts of ours, and took {won[1]:.2f} with theirs. "
        f"At 7c76117 it takes {won[2]:.2f} times, as that run's host was slow too ({slow[0]:.0%} of its fixed work, "
        f"{100 * slow[1]:.0f} and {slow[2]:.0%} in the two others): its EAGER takes {ms(eager[2]['wall_us'])} ms for "
        f"{ms(eager[0]['wall_us'])}, of fewer kernels. EAGER of 2,040 tokens and 8 decodes took no less with experts "
        f"of ours, {ms(mixed[0])} ms for {ms(mixed[1])}"
    ) in words
    assert eager[2]["kernels"] < eager[0]["kernels"]
    one, many, alone, together = (
        f"{ms(ours[way]['wall_us'])}{ms_ and ' ms'} for {ms(theirs[way]['wall_us'])}"
        for way, ms_ in (("1 decode/full 1", "ms"), ("32 decodes/full 32", ""), ("1 decode/eager", ""),
                         ("32 decodes/eager", ""))
    )  # fmt: skip
    fulls = [cell for name, cell in ours.items() if "/full " in name]
    beyond = [(cell["wall_us"] - cell["device_us"]) / 1e3 for cell in fulls]
    each = [1e3 * took / cell["kernels"] for took, cell in zip(beyond, fulls, strict=True)]
    assert (
        f"one takes {one} in a FULL graph, 32 take {many}; eagerly {alone} and {together}. In a FULL graph wall time "
        f"is {min(beyond):.1f} to {max(beyond):.1f} ms beyond its kernels, {min(each):.1f} to {max(each):.1f} us for "
        "each of some 1,800."
    ) in words
    assert (
        f"{ms(first[PROMPT]['device_us'])} ms of that prompt, {ms(first['32 decodes/full 32']['device_us'])} of 32 "
        "decodes"
    ) in words
    assert all(abs(cell["device_us"] / theirs[name]["device_us"] - 1) < 0.02 for name, cell in first.items())
    guide = " ".join((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split())
    assert (
        f"a prompt of 2,048 tokens takes the device {ms(latest['device_us'])} ms, where it took "
        f"{ms(before['device_us'])} with transformers' experts and torch's FlashAttention"
    ) in guide
    told = f"takes an H200 {ms(mine['device_us'])} ms so, and {ms(before['device_us'])} on transformers' own"
    assert f"a prompt of 2,048 tokens {told}" in guide
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"takes an H200 {ms(mine['device_us'])} ms, where it took {ms(before['device_us'])} (" in changes
    assert f"takes the device {ms(mine['device_us'] - latest['device_us'])} ms less at 7c76117 than at fc67869" in words


CASES = {
    "own2048": "2,048 tokens", "ctx4096": "2,048 behind 2,048", "ctx6144": "2,048 behind 4,096", "own512": "512",
    "two": "700, and 1,348 behind 1,652", "eight": "eight of 256", "tail": "300 behind 4,700",
}  # fmt: skip


def of_tiles() -> tuple[dict[str, float], dict[tuple[int, ...], dict[str, float]], dict[str, float]]:
    """Microseconds by case: before, of each tile, and of the one that was taken."""
    found = read("raw/attention_expanded")
    names = ("query_tokens", "keys", "warps", "stages")
    tiles = {tuple(each[name] for name in names): each["us"] for each in found["tiles"]}
    return found["before_us"], tiles, tiles[tuple(found["taken"][name] for name in names)]


def of_mla() -> list[str]:
    """A row a case: us a layer before and now."""
    before, _, now = of_tiles()
    assert before.keys() == CASES.keys()
    return [
        f"| {title} | {before[case]:.1f} | {now[case]:.1f} | {before[case] / now[case]:.2f} |"
        for case, title in CASES.items()
    ]


def test_mlas_prompt_attention_is_told_as_its_log_has_it() -> None:
    """What it takes of what it took, what other tiles take, and cuDNN."""
    words = " ".join(" ".join(DOC).split())
    before, tiles, now = of_tiles()
    shares = [now[case] / before[case] for case in CASES]
    told = f"{min(shares):.2f} to {max(shares):.2f}"
    assert f"So it takes {told} of what it took." in words
    assert f"[{told}](measured_gpu.md#mlas-prompt-attention)" in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert f"[{told} of what it took]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    over = {tile: {case: us[case] / now[case] for case in CASES} for tile, us in tiles.items()}
    assert len(over) == 8
    three = over[128, 64, 8, 3].values()
    assert round(min(three), 2) == 1
    keys, warps = (over[tile].values() for tile in ((128, 128, 8, 2), (128, 64, 4, 3)))
    assert max(min(keys), min(warps)) < 1.025
    rest = {tile: ratios for tile, ratios in over.items()
            if tile in ((64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 4), (64, 32, 4, 3))}  # fmt: skip
    slower = min(ratio for each in rest.values() for case, ratio in each.items() if (case, ratio < 1) != ("tail", True))
    tails = [each["tail"] for tile, each in rest.items() if tile[0] == 64]
    assert (
        f"three stages or up to {max(three) - 1:.0%} quicker. One of 128 keys is {100 * min(keys) - 100:.0f} to "
        f"{max(keys) - 1:.0%} slower, one of four warps within 3% in five cases of seven and "
        f"{sorted(warps)[-2] - 1:.0%} and {max(warps) - 1:.0%} slower in the two of short prompts; the "
        f"rest are {slower - 1:.0%} slower and more, but for **300 tokens behind 4,700: there tiles of 64 query tokens "
        f"take {min(tails):.2f} to {max(tails):.2f} of it**."
    ) in words
    cudnn = read("raw/attention_expanded")["cudnn"]
    own, unmasked = cudnn["us"].values()
    first, *shapes = cudnn["new_shapes_ms"]
    assert (
        f"A prompt of 2,048 tokens took {own} us, and 2,048 tokens over 6,144 keys {unmasked} without a mask (of a "
        f"look whose log wasn't kept). But each new shape takes {min(shapes):.0f} to {max(shapes):.0f} ms, and a "
        f"process's first {first:.0f}."
    ) in words
    code = (ROOT / "kpolicy" / "serving" / "gpu" / "expanded.py").read_text(encoding="utf-8")
    taken = read("raw/attention_expanded")["taken"]
    assert f"False: (({', '.join(str(each) for each in taken.values())})," in code


ORDERED = {
    "2048": "2,048", "2032@3792": "2,032 behind 3,792", "527@6896+1516": "527 behind 6,896, then 1,516",
    "515@1532+1532": "515 behind 1,532, then 1,532", "300@4700+700": "300 behind 4,700, then 700",
    "1516+527@6896": "1,516, then 527 behind 6,896", "512@4096": "512 behind 4,096", "128@4096": "128 behind 4,096",
    "8x256": "eight of 256", "700": "700",
}  # fmt: skip
GROUPED = ("0.5B", "1B", "8B")


def orders() -> dict[str, dict[str, Any]]:
    """Prompt attention by which tile begins first: a cell a model and case."""
    found: dict[str, dict[str, Any]] = read("raw/attention_order")["cells"]
    return found


def of_order() -> list[str]:
    """A row a case: us a layer before and after, and what it takes of before, in bold where that is surely more."""
    cells = orders()
    assert {*cells} == {f"{model} {case}" for model in (*GROUPED, "dsv2lite") for case in ORDERED}

    def told(cell: dict[str, Any]) -> str:
        ratio = f"{cell['ratio']:.2f}"
        bold = "**" * (cell["low"] > 1 and ratio != "1.00")
        return f"{cell['old_us']:.1f} / {cell['new_us']:.1f}, {bold}{ratio}{bold}"

    return [
        f"| {title} | {' | '.join(told(cells[f'{model} {case}']) for model in (*GROUPED, 'dsv2lite'))} |"
        for case, title in ORDERED.items()
    ]


def test_which_tile_begins_first_is_told_as_it_came_out() -> None:
    """What is quicker, what isn't and what is slower, in a script's raw cells."""
    cells, head = orders(), read("raw/attention_order")
    assert (head["commit"], head["date"], head["command"]) == ("b653e7c0", DAY, "by a script that isn't kept")
    assert all(cell["same_bits"] for cell in cells.values())
    grouped = {name: cell["ratio"] for name, cell in cells.items() if name.split()[0] in GROUPED}
    quick = [ratio for ratio in grouped.values() if ratio <= 0.9]
    less = [ratio for ratio in grouped.values() if 0.9 < ratio < 0.99]
    slow = {name: cell["ratio"] for name, cell in cells.items() if cell["ratio"] >= 1.01}
    assert [*slow] == ["0.5B 8x256", "8B 1516+527@6896", "8B 128@4096", "dsv2lite 1516+527@6896"]
    assert (
        f"Of {len(grouped)} cells of grouped-query models {len(quick)} take {min(quick):.2f} to {max(quick):.2f} of "
        f"what they took, {len(less)} take {min(less):.2f} to {max(less):.2f}, six are within 2% of it and two are "
        "slower, both on Llama-3.1-8B. A prompt of 2,048 tokens takes "
        f"{cells['0.5B 2048']['new_us']} us a layer for {cells['0.5B 2048']['old_us']} on Qwen2.5-0.5B, "
        f"{cells['1B 2048']['new_us']} for {cells['1B 2048']['old_us']} on Llama-3.2-1B and "
        f"{cells['8B 2048']['new_us']} for {cells['8B 2048']['old_us']} on Llama-3.1-8B."
    ) in WORDS
    assert sum(0.99 < ratio < 1.02 for ratio in grouped.values()) == 6
    assert sum(ratio >= 1.02 for ratio in grouped.values()) == 2
    assert len(quick) + len(less) + 8 == len(grouped)
    *few, large, latent = [cells[f"{model} 128@4096"]["ratio"] for model in (*GROUPED, "dsv2lite")]
    few.append(latent)
    last = [cells[f"{model} 1516+527@6896"]["ratio"] for model in ("8B", "dsv2lite")]
    assert (
        f"**Not quicker**: 128 tokens behind 4,096, {min(few):.2f} and {max(few):.2f} on the others, and eight prompts "
        f"of 256. **Slower**: those 128 tokens on Llama-3.1-8B, {large:.2f}, and a prompt of 1,516 before 527 tokens "
        f"behind 6,896, {last[0]:.2f} on Llama-3.1-8B and {last[1]:.2f} on DeepSeek-V2-Lite, where the heaviest row "
        "comes last"
    ) in WORDS
    first = sorted(cells[f"dsv2lite {case}"]["ratio"] for case in ("515@1532+1532", "527@6896+1516"))
    rest = [cell["ratio"] for name, cell in cells.items() if name.startswith("dsv2lite ")
            and name.partition(" ")[2] not in ("515@1532+1532", "527@6896+1516", "1516+527@6896")]  # fmt: skip
    guide = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "began with [other tiles](measured_gpu.md#which-tile-begins-first), and of calibration before" in guide
    assert "Every other figure on this page is of the kernels before it, but those of 5cbff37e." in WORDS
    assert "random steps against EAGER (`benchmarks.gpu.correct`) haven't run with it." in WORDS
    assert (
        f"**For DeepSeek-V2-Lite it only turns rows round**: {first[0]:.2f} and {first[1]:.2f} where the heavy row "
        f"comes first, {min(rest):.2f} to {max(rest):.2f} in the seven others."
    ) in WORDS
    assert len(rest) == 7


def captured() -> list[str]:
    """A row a list of graphs: how many, seconds in a warm process and in its first captures, bytes."""
    lines = []
    for row in read("startup_qwen05b")["cells"]["lists"]:
        first = f"{row['first_seconds']:.1f}" if "first_seconds" in row else ""
        mib = [f"{row[name] / (1 << 20):,.0f}" for name in ("registry_bytes", "device_bytes")]
        lines.append(f"| {row['list']} | {row['graphs']} | {row['seconds']:.1f} | {first} | {mib[0]} | {mib[1]} |")
        assert not row["failed"]
    return lines


@pytest.mark.parametrize("made", [over_the_replica, served, of_mla, of_order, of_experts, of_kernels, captured])
def test_tables_are_told_as_their_results_have_them(made: Any) -> None:
    """Every row, one after the other, bad ones too."""
    rows = made()
    start = DOC.index(rows[0])
    assert DOC[start : start + len(rows)] == rows
    assert not DOC[start + len(rows)].startswith("|")


def test_start_up_is_told_as_its_results_have_it() -> None:
    """A lazy Engine's first step and its steady speed, with intervals."""
    words = " ".join(" ".join(DOC).split())
    for name in ("startup_qwen05b", "raw/startup_qwen05b_third", "raw/startup_qwen05b_second"):
        cells = read(name)["cells"]
        for part in ("first_step", "steady"):
            low, high = cells[part]["interval"]
            assert f"{cells[part]['ratio']:.3f} [{low:.3f}, {high:.3f}]" in words
    cells = read("startup_qwen05b")["cells"]
    first, steady = cells["first_step"], cells["steady"]
    assert f"{first['lazy_ms']:.2f} ms, and {first['eager_ms']:.2f} with `eager`" in words
    assert f"{steady['step_ms']['lazy']:.3f} ms a step, and {steady['step_ms']['full']:.3f}:" in words
    assert (
        f"with the {steady['lazy_graphs']} graphs that it captured between steps, against an Engine that has all "
        f"{steady['full_graphs']}, step by step in turn, by the same table, {steady['pairs']} pairs of "
        f"{steady['steps']} steps"
    ) in words
    assert steady["interval"][0] < 1 < steady["interval"][1]
    older = read("raw/startup_qwen05b_third")
    hosts = [each["host_noise"]["p50_us"] for each in (read("startup_qwen05b"), older)]
    assert (
        f"fixed work took {hosts[0]:.0f} us in the median there, and {hosts[1]:.0f} before the run of 4346e27"
    ) in words
    (plan,) = [row for row in older["cells"]["lists"] if row["list"] == "planned"]
    mib = [f"{plan[name] / (1 << 20):,.0f}" for name in ("registry_bytes", "device_bytes")]
    assert (
        f"At 4346e27 one of {plan['graphs']} graphs took {plan['seconds']:.1f} s, {mib[0]} MiB by captures and "
        f"{mib[1]} "
        "of the device's."
    ) in words
    assert not any(row["list"] == "planned" for row in cells["lists"])
    assert "Both limits hold with their whole intervals" in words
    assert all(each["interval"][1] <= each["limit"] for each in (first, steady))


def test_memory_beyond_captures_is_told_as_its_results_have_it() -> None:
    """MiB that the device lacks beyond what captures noted, before and now; what torch caches, and what is kept."""
    words = " ".join(" ".join(DOC).split())
    (*now, lazy), (*_, lazy_then), (*before, lazy_before) = (
        read(name)["cells"]["lists"]
        for name in ("startup_qwen05b", "raw/startup_qwen05b_third", "raw/startup_qwen05b_second")
    )
    beyond = [round(over(row, "device")) for row in now]
    assert f"is what captures noted, and {min(beyond)} to {max(beyond)} MiB**" in words
    assert f"in the same run, where the H200 has {beyond[1]} with all {now[1]['graphs']} graphs" in words
    assert f"it was {over(before[1], 'device'):.0f} more with `auto`'s default" in words
    assert (
        f"process has {over(lazy, 'device'):.0f} MiB more than captures noted** after these two graphs, "
        f"{over(lazy_then, 'device'):.0f} at 4346e27 and {over(lazy_before, 'device'):.0f} before, all of them torch's"
    ) in words
    assert lazy["torch_reserved_bytes"] == lazy["device_bytes"]
    assert round(over(lazy, "device")) == max(beyond)
    assert f"torch had {lazy['torch_cached_bytes'] / (1 << 20):.0f} MiB more cached" in words
    assert all(row["torch_reserved_bytes"] == row["device_bytes"] for row in now)
    assert not any(row["kept_bytes"] or row["torch_cached_bytes"] for row in now)
    guide = " ".join((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split())
    assert (
        f"and {min(beyond)} to {max(beyond)} MiB more, with a lazy Engine that has more to capture too, "
        f"beside {lazy['torch_cached_bytes'] / (1 << 20):.0f} that torch keeps for later"
    ) in guide


def over(row: dict[str, Any], of: str) -> float:
    """MiB more than captures noted."""
    more: int = row[f"{of}_bytes"] - row["registry_bytes"]
    return more / (1 << 20)


def in_short(begins: str) -> str:
    """What the guide's short table found."""
    guide = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    (line,) = [line for line in guide.splitlines() if line.startswith(f"| {begins}")]
    return line.split("|")[3].strip().replace("*", "")


def test_the_guide_has_the_same() -> None:
    """Start-up's two ratios."""
    cells = read("startup_qwen05b")["cells"]
    for part, begins in (("first_step", "a lazy Engine's first step"), ("steady", "a lazy Engine's steps once")):
        low, high = cells[part]["interval"]
        assert in_short(begins) == f"{cells[part]['ratio']:.3f} ({low:.3f} to {high:.3f})"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first, steady = (cells[part]["ratio"] for part in ("first_step", "steady"))
    assert f"first step {first:.3f} of an eager one's, settled steps {steady:.3f} of a fully captured one's" in readme


def test_throughput_is_told_in_short() -> None:
    """In the guide, the README and the changes: both models' 1.3, what is below 0.99, and `full_and_piecewise`."""
    figures = ("tokens_per_s", "gap_p99_us")
    code = {model: by_load("auto")[newest(model, "code")] for model in MODELS}
    (tokens, gaps), (fewer, longer) = (
        [times(code[model][figure], "( to )") for figure in figures] for model in ("qwen05b", "dsv2lite")
    )
    fixed = by_load("full_and_piecewise")[newest("dsv2lite", "code")]
    was = " and ".join(two(of_larger("auto", figure, BEFORE)) for figure in figures)
    gap = code["dsv2lite"]["gap_p99_us"]
    assert gap["ratio_low"] < 1.3 < gap["ratio_to_vllm_replica"]
    load, own = ("dsv2lite", "code"), by_load(PACED)[newest("dsv2lite", "code")]
    shorter = {figure: times(own[figure], "( to )") for figure in BETTER_UP}
    assert own["gap_p99_us"]["ratio_low"] > 1.3
    assert not any(row["ratio_low"] < LEAST for row in own.values())
    late = f"{over_another(*load, 'auto', PACED, 'ttft_p50_us')[0]:.2f}"
    fewer_still = f"{over_another(*load, PACED, 'auto', 'tokens_per_s')[0]:.3f}"
    middle, low, high = over_another(*load, "full_and_piecewise", "auto", "gap_p50_us")
    assert low > 1
    medians_of_fixed = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    both = " and ".join(f"{fixed[figure]['ratio_to_vllm_replica']:.2f}" for figure in figures)
    each = told_by_round([f"{ratio:.2f}" for ratio in each_over_another(*load, "auto", "vllm", "gap_p99_us")])
    before = times(earlier_code("qwen05b", "", "auto")["tokens_per_s"], "( to )")
    assert in_short("throughput against the replica") == (
        f"{tokens}; {before} in the run before, in which the replica was quicker"
    )
    small_gap = code["qwen05b"]["gap_p99_us"]
    assert 1.29 < small_gap["ratio_low"] < 1.3
    assert in_short("the same, gaps at p99") == f"{gaps}: the interval begins just below 1.3"
    assert in_short("throughput, DeepSeek-V2-Lite, 100 requests") == (
        f"{fewer}, gaps at p99 {longer}, by round {each}: reached in the mean, the interval begins below it; "
        f"`full_and_piecewise` {both}, and its median gaps are {medians_of_fixed} times as short as `auto`'s; {was} in "
        "the run before"
    )
    alone = "no other policy was served with shorter steps, so that what `auto` adds to them isn't known"
    assert in_short(f"the same, `{PACED}`") == (
        f"{shorter['tokens_per_s']}, gaps at p99 {shorter['gap_p99_us']}, first tokens {shorter['ttft_p50_us']} and "
        f"{shorter['ttft_p99_us']} times as early at p50 and p99; over plain `auto` {fewer_still} times the tokens a "
        f"second, and first tokens {late} times as late at p50; by the rule of 9f1a315, which was mended since "
        f"(7d92e5a); {alone}"
    )
    llamas = [times(code[model]["tokens_per_s"], "( to )") for model in ("llama8b", "llama1b")]
    (_, dense), (_, large) = (
        [times(code[model][figure], "( to )") for figure in figures] for model in ("llama1b", "llama8b")
    )
    assert in_short("throughput, Llama-3.1-8B and Llama-3.2-1B, code") == (
        f"{' and '.join(llamas)}, gaps at p99 {large} and {dense}: reached in the mean of Llama-3.2-1B's gaps, whose "
        "interval begins below it"
    )
    others = [by_load(PACED)[newest(model, "code")] for model in ("qwen05b", "llama1b", "llama8b")]
    paced_gaps = [times(at["gap_p99_us"], "( to )") for at in others]
    paced_tokens = [times(at["tokens_per_s"], "( to )") for at in others]
    longer_first = f"{over_another('qwen05b', 'code', 'auto', PACED, 'ttft_p50_us')[0]:.2f}"
    assert in_short(f"`{PACED}` on the other code traces") == (
        f"gaps at p99 {paced_gaps[0]}, {paced_gaps[1]} and {paced_gaps[2]}, tokens a second {paced_tokens[0]}, "
        f"{paced_tokens[1]} and {paced_tokens[2]}; on Qwen2.5-0.5B first tokens are {longer_first} times as late as "
        "plain `auto`'s at p50, on Llama-3.2-1B gaps are hardly shorter than plain `auto`'s, and on Llama-3.1-8B "
        f"{100 - over_another('llama8b', 'code', PACED, 'auto', 'gap_p99_us')[0] * 100:.1f}% longer"
    )
    latest = in_all()
    assert not any(row["ratio_to_vllm_replica"] < LEAST for row in latest)
    with_one = [row for row in latest if row["ratio_low"] is not None]
    wide = f"{sum(row['ratio_low'] < LEAST for row in with_one)} of {len(with_one)}"
    medians = [by_load("auto")[newest("llama8b", trace)]["gap_p50_us"] for trace in ("code", "conversation")]
    now = " and ".join(times(row, "( to )") for row in medians)
    then = " and ".join(f"{row['ratio_to_vllm_replica']:.2f}" for row in first_of_the_8b("auto", "gap_p50_us"))
    least = min(latest, key=lambda row: row["ratio_to_vllm_replica"])
    assert least == medians[0]
    every = [row for model in MODELS for row in by_load(PACED)[newest(model, "code")].values()]
    assert not any(row["ratio_to_vllm_replica"] < LEAST for row in every)
    begin = sum(row["ratio_low"] < LEAST for row in every)
    assert in_short("figures of `auto` below 0.99") == (
        f"none of {len(latest)} in the mean, the least {three(least)}; {wide} intervals begin below 0.99; of "
        f"{len(every)} of `{PACED}` none, and {begin} intervals. Llama-3.1-8B's median gaps are {now} times as short, "
        f"{then} at 43ebfb8, of which the other conversation traces still are"
    )
    guide = " ".join((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split())
    assert (
        "throughput on the code trace of b653e7c0 (DeepSeek-V2-Lite's of 9f1a315) and on the conversation trace of "
        "43ebfb8 (Llama-3.1-8B's of 95234a3), start-up of b653e7c0,"
    ) in guide
    assert "its rows of 7c76117, 43ebfb8, 9f1a315 and b653e7c0 have" in guide
    assert (
        "of these rows those of 9f1a315, b653e7c0 and 5cbff37e have it, with what d32f9e4 changed, and Llama-3.1-8B's "
        "of the conversation trace without."
    ) in guide
    shares = [over_another(*load, "auto", "full_and_piecewise", "tokens_per_s")[0] for load in LOADS]
    assert in_short("throughput against `full_and_piecewise`") == f"{min(shares):.3f} to {max(shares):.3f}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (
        f"| {tokens} times the tokens a second and gaps at p99 {gaps} times as short on 150 requests of the Azure code "
        "trace within 1.8 s, Qwen2.5-0.5B on an H200"
    ) in readme
    assert (
        f"**DeepSeek-V2-Lite**, 100 requests of the code trace: gaps at p99 {longer} times as short, and "
        f"{shorter['gap_p99_us']} by an objective that weighs them, with shorter steps (`{PACED}`); **Llama-3.2-1B**: "
        "gaps "
        f"at p99 {dense} times as short ([GPU]"
    ) in readme
    assert (
        f"**Qwen2.5-0.5B**: tokens a second {before} in the run before, in which the replica was quicker; "
        f"**DeepSeek-V2-Lite**: tokens a second {fewer}, gaps at p99 by round {each}, {was} in the run before, in "
        "which the replica was quicker and `auto` no slower; with "
        f"shorter steps {shorter['tokens_per_s']}, and first tokens {late} times as late as plain `auto`'s; {alone}; "
        f"`full_and_piecewise`'s median gaps are {medians_of_fixed} times as short as plain `auto`'s; **Llama-3.2-1B"
    ) in readme
    assert (
        f"`auto`'s; **Llama-3.2-1B**: tokens a second {llamas[1]}, gaps at p99 1.08 in the run before, in which the "
        f"replica was quicker; **Llama-3.1-8B**: {llamas[0]}, median gaps {now} times as short, {then} at 43ebfb8 |"
    ) in readme
    assert two(earlier_code("llama1b", "", "auto")["gap_p99_us"]) == "1.08"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (
        "End to end of four models, the code traces at b653e7c0 and DeepSeek-V2-Lite's at 9f1a315, the conversation "
        "traces at 43ebfb8 and Llama-3.1-8B's at 95234a3,"
    ) in changes
    assert (
        f"`auto` has {tokens} times the tokens a second of the replica of vLLM's rule on the code trace with "
        f"Qwen2.5-0.5B, and gaps at p99 {gaps} times as short, {dense} with Llama-3.2-1B and {large} with "
        "Llama-3.1-8B; DeepSeek-V2-Lite's are in the next entry. By "
        f"shorter steps (`{PACED}`) gaps at p99 are {paced_gaps[0]}, {paced_gaps[1]} and {paced_gaps[2]} times as "
        "short, in that order, which is hardly more than by plain `auto` on Llama-3.2-1B, "
        "and 0.5% less on Llama-3.1-8B. The host was busy, and the "
        "replica slower than in the runs before (1.33 and 1.04 times the tokens a second there with the two small "
        "models). "
        f"Of {len(latest)} figures none is below 0.99 in the mean, but {wide} intervals begin there; Llama-3.1-8B's "
        f"median gaps, {then} times as short at 43ebfb8, are {now} in later runs. "
        "Fixed policies are served on the code traces too."
    ) in changes
    assert (
        f"DeepSeek-V2-Lite's code trace end to end at 9f1a315, of a run of its own, seven rounds: `auto` has {fewer} "
        f"times the tokens a second and gaps at p99 {longer} times as short, which were {was} at d32f9e4, so that the "
        "1.3 that are wanted in one of them are reached by gaps in the mean, and not by their interval; the replica is "
        "slower than it was then, and `auto` no quicker. "
        f"By an objective that weighs the gap and with shorter steps (`{PACED}`, as `kpolicy run "
        f"--objective 1:1:1 --pace vllm`) gaps at p99 are {shorter['gap_p99_us']} times as short, at "
        f"{shorter['tokens_per_s']} times the tokens a second and with first tokens {late} times as late as plain "
        "`auto`'s; no figure is below 0.99 of the replica's. No other policy was served with shorter steps, and their "
        "rule was mended since (7d92e5a). Fixed policies are served there too. `end_to_end` takes "
        "policies of the first rounds alone (`--also`). Of two runs of a load `end_to_end --summary` has the older one "
        "too where the "
        "newer one has fewer rounds, requests or policies ([docs](docs/measured_gpu.md#end-to-end))."
    ) in changes
