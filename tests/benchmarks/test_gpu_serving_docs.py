"""docs/measured_gpu.md's tables of serving and of start-up are those of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.common import interval_of_mean
from benchmarks.gpu.end_to_end import BETTER_UP, summarise, table, whole_rounds

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
DOC = (ROOT / "docs" / "measured_gpu.md").read_text(encoding="utf-8").splitlines()
WORDS = " ".join(" ".join(DOC).split())
MODELS = {
    "qwen05b": "Qwen2.5-0.5B", "dsv2lite": "DeepSeek-V2-Lite", "llama8b": "Llama-3.1-8B", "llama1b": "Llama-3.2-1B",
}  # fmt: skip
RUNS = {"qwen05b": ["qwen05b"], "dsv2lite": ["dsv2lite_code", "dsv2lite"],
        "llama8b": ["llama8b", "llama8b_conversation"], "llama1b": ["llama1b"]}  # fmt: skip
"""The raw files of each model's newest rows, in the tables' order"""
DAY = "2026-11-29"
"""Of most rows, whose titles don't say it"""
LATER = "2026-11-30"
SERVED_LATER = [("dsv2lite", "code"), ("llama8b", "code"), ("llama8b", "conversation")]
LOADS = [(model, trace) for model in MODELS for trace in ("code", "conversation")]
NEWEST = {load: LATER if load in SERVED_LATER else DAY for load in LOADS}
"""A load's rows of other days count in no figure of all loads"""
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
    """A row a load: `auto` in all six figures, in bold what is below 0.99."""
    lines = []
    for title, at in by_load("auto").items():
        told = [f"**{interval(at[figure])}**" if at[figure]["ratio_to_vllm_replica"] < LEAST else interval(at[figure])
                for figure in BETTER_UP]  # fmt: skip
        lines.append(f"| {title} | {at['tokens_per_s']['repeats']} | {' | '.join(told)} |")
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


def rounds(model: str, trace: str, policy: str) -> list[dict[str, Any]]:
    """A policy's whole rounds of a load, in order."""
    (found,) = [of for data in newest_files(model, trace) if (of := of_trace(data, trace))]
    return [cell for name, cell in sorted(found.items()) if name.endswith(f"/{policy}")]


def newest_files(model: str, trace: str) -> list[dict[str, Any]]:
    """A model's raw files of the day of a trace's newest rows."""
    return [data for run in RUNS[model] if (data := read(f"raw/end_to_end_{run}"))["date"] == NEWEST[model, trace]]


def of_trace(data: dict[str, Any], trace: str) -> dict[str, dict[str, Any]]:
    """A file's whole rounds of a trace."""
    return {name: cell for name, cell in whole_rounds(data).items() if name.startswith(f"{trace} saturated/")}


def over_another(model: str, trace: str, mine: str, other: str, figure: str) -> tuple[float, float, float]:
    """How many times better a policy is than another: the mean of the rounds' own ratios, and its interval."""
    pairs = zip(rounds(model, trace, mine), rounds(model, trace, other), strict=True)
    up = 1 if BETTER_UP[figure] else -1
    return interval_of_mean([(a[figure] / b[figure]) ** up for a, b in pairs])


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
    assert read("end_to_end") == [
        row for row in every if (row["model"], row["trace"], row["date"]) != ("dsv2lite", "code", DAY)
    ]
    assert len(every) - len(read("end_to_end")) == 4 * len(BETTER_UP)
    assert {row["date"] for row in by_load("auto")[newest("dsv2lite", "code")].values()} == {LATER}
    assert {name: (data["model"], data["date"]) for name, data in raw.items() if name in runs} == {
        name: (model, LATER if name in ("dsv2lite_code", *RUNS["llama8b"]) else DAY) for name, model in runs.items()
    }
    assert (raw["qwen05b_conversation"]["model"], raw["qwen05b_conversation"]["date"]) == ("qwen05b", "2026-11-28")
    assert [(row["model"], row["trace"]) for row in in_all()[:: len(BETTER_UP)]] == LOADS
    counted = {(row["model"], row["trace"]): (row["repeats"], row["served"]) for row in in_all()}
    assert counted == {
        ("qwen05b", "code"): (4, 150), ("qwen05b", "conversation"): (1, 150), ("dsv2lite", "code"): (4, 100),
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


def test_whose_rows_are_of_other_runs_is_told() -> None:
    """The 8B's and DeepSeek-V2-Lite's code trace: another day, commits and hosts; the titles have the day."""
    assert [load for load, day in NEWEST.items() if day != DAY] == SERVED_LATER

    def began(run: str) -> str:
        day, _, time = read(f"raw/end_to_end_{run}")["costs"]["auto"].split()[1].partition("T")
        assert day == LATER
        return str(time[:5])

    assert all("01:03" < began(run) < "01:12" for run in RUNS["llama8b"])
    assert "04:07" < began("dsv2lite_code") < "04:10"
    files = " and ".join(f"`raw/end_to_end_{run}.json`" for run in RUNS["llama8b"])
    assert (
        f"{DAY}, 08:45 to 09:03 UTC, commit 43ebfb8, one H200 alone on its host, driver 580.159.04, 16 cores, under "
        "`benchmarks.quiet --cores 4 --follow`; `raw/end_to_end_qwen05b.json`, `_dsv2lite` (of which the tables have "
        "the conversation trace alone) and `_llama1b`."
    ) in WORDS
    assert (
        "**Llama-3.1-8B's rows and those of DeepSeek-V2-Lite's code trace are of other runs**, with their day in their "
        f"titles, {LATER}: one H200 alone on its host, the same driver and torch, 16 cores, **not under "
        "`benchmarks.quiet`**, a process for each trace. Llama-3.1-8B's: 01:03 to 01:12 UTC, commit 95234a3; "
        f"{files}. DeepSeek-V2-Lite's: about 04:07 to 04:10 UTC, commit d32f9e4; `raw/end_to_end_dsv2lite_code.json`. "
        "After 43ebfb8 decode attention changed, at 95234a3 and again at d32f9e4 ([decode "
        "attention](#decode-attention)), and calibration too; the other loads weren't served since. So their times and "
        "tokens a second aren't of one run with the other rows', nor with [their runs before](#runs-before); a ratio "
        "is always within one run."
    ) in WORDS
    assert (
        f"[end to end](#end-to-end) of 43ebfb8 ({DAY}), Llama-3.1-8B's of 95234a3 and DeepSeek-V2-Lite's code trace's "
        f"of d32f9e4 (both {LATER}),"
    ) in WORDS
    others = [load for load in LOADS if load not in SERVED_LATER]
    assert others == [
        ("qwen05b", "code"), ("qwen05b", "conversation"), ("dsv2lite", "conversation"), ("llama1b", "code"),
        ("llama1b", "conversation"),
    ]  # fmt: skip
    assert (
        "**Not measured**: Qwen2.5-0.5B, Llama-3.2-1B and DeepSeek-V2-Lite's conversation trace with the decode "
        "attention of 95234a3 or d32f9e4, and Llama-3.1-8B with that of d32f9e4;"
    ) in WORDS
    assert (
        "of Qwen2.5-0.5B, Llama-3.2-1B and DeepSeek-V2-Lite's conversation trace with the decode attention of 95234a3 "
        "or d32f9e4, of Llama-3.1-8B with that of d32f9e4,"
    ) in WORDS


def test_what_was_wanted_of_the_code_trace_is_told() -> None:
    """1.3 in tokens or in gaps, reached on the 0.5B alone; each with its rounds, and DeepSeek-V2-Lite's run before."""
    small, larger = (by_load("auto")[newest(model, "code")] for model in ("qwen05b", "dsv2lite"))
    (tokens, gaps), (fewer, longer) = ((at["tokens_per_s"], at["gap_p99_us"]) for at in (small, larger))
    assert tokens["ratio_low"] < 1.3 < tokens["ratio_to_vllm_replica"]
    assert gaps["ratio_low"] > 1.3
    was = of_larger("auto", "gap_p99_us", "")
    assert longer["ratio_low"] < LEAST < longer["ratio_to_vllm_replica"] < 1.3 < was["ratio_to_vllm_replica"]
    assert was["ratio_low"] < LEAST
    assert fewer["ratio_high"] < 1.3
    assert (
        "**Wanted: 1.3 in tokens a second or in gaps at p99, on the code trace at saturation. Reached on Qwen2.5-0.5B "
        f"alone. On DeepSeek-V2-Lite it isn't: in the mean gaps at p99 are {two(longer)} times as short, and were "
        f"{two(was)} [in the run before](#runs-before); neither run's interval lies above 1.3.**"
    ) in WORDS
    mine, theirs = (rounds("qwen05b", "code", policy) for policy in ("auto", "vllm"))
    each = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(mine, theirs, strict=True)]
    hosts = [cell["host_us"] for cell in theirs]
    slow = hosts.pop(1)
    assert (
        f"**Qwen2.5-0.5B**: {interval(tokens)} times the tokens a second, where the interval of four rounds begins "
        f"below 1.3, and gaps at p99 {interval(gaps)} times as short, where it doesn't. Tokens by round: "
        f"{told_by_round([f'{ratio:.2f}' for ratio in each])}; before the replica's second round the host was slow "
        f"(`host_us` {slow:.0f}, {min(hosts):.0f} to {max(hosts):.0f} before its others)."
    ) in WORDS
    mine, theirs = (rounds("dsv2lite", "code", policy) for policy in ("auto", "vllm"))
    own, others = ([cell["gap_p99_us"] / 1e3 for cell in cells] for cells in (mine, theirs))
    ratios = [them / us for us, them in zip(own, others, strict=True)]
    hosts, eager = [cell["host_us"] for cell in theirs], {cell["steps"]["eager"] for cell in theirs}
    assert sum(ratio < 1.3 for ratio in ratios) == 2
    assert (
        f"**DeepSeek-V2-Lite**: gaps at p99 {interval(longer)} times as short, tokens a second {interval(fewer)} "
        f"times. The replica's gaps at p99 are {told_by_round([f'{ms:.1f}' for ms in others])} ms by round, `auto`'s "
        f"{min(own):.1f} to {max(own):.1f}: {told_by_round([f'{ratio:.2f}' for ratio in ratios])} times. So two rounds "
        f"of the replica's make the mean, as in the run before. Why they are so uneven isn't known: fixed work before "
        "them took "
        f"{min(hosts):.0f} to {max(hosts):.0f} us, and {min(eager)} or {max(eager)} steps ran eagerly in each."
    ) in WORDS


def test_the_larger_models_code_trace_is_held_to_its_run_before() -> None:
    """What got less and what more over the replica, and that no interval of a ratio shows either."""
    was = {figure: of_larger("auto", figure, "") for figure in BETTER_UP}
    now = by_load("auto")[newest("dsv2lite", "code")]
    names = {
        "gap_p99_us": "gaps at p99", "tokens_per_s": "tokens a second", "tokens_per_s_arriving": "arriving",
        "ttft_p50_us": "times to first token at p50", "ttft_p99_us": "at p99",
    }  # fmt: skip
    less = [
        figure for figure in BETTER_UP if now[figure]["ratio_to_vllm_replica"] < was[figure]["ratio_to_vllm_replica"]
    ]
    assert {*less} == {*names} == {*BETTER_UP} - {"gap_p50_us"}
    assert all(row["ratio_low"] < was[figure]["ratio_high"] for figure, row in now.items())
    assert all(was[figure]["ratio_low"] < row["ratio_high"] for figure, row in now.items())
    told = ", ".join(f"{name} {two(now[figure])} for {two(was[figure])}" for figure, name in names.items())
    runs = [of_trace(read(f"raw/end_to_end_dsv2lite{name}"), "code") for name in ("_code", "")]
    assert runs[0].keys() == runs[1].keys()
    assert len({round(cell["tokens_per_s"] * cell["span_s"]) for run in runs for cell in run.values()}) == 1

    def values(policy: str) -> str:
        """Median gaps, gaps at p99 and tokens a second, now and in the run before."""
        later = by_load(policy)[newest("dsv2lite", "code")]
        each = [(later[figure]["value"], of_larger(policy, figure, "")["value"])
                for figure in ("gap_p50_us", "gap_p99_us", "tokens_per_s")]  # fmt: skip
        (median, half), (late, lag), (tokens, rate) = each
        return f"{ms(median)} ms for {ms(half)}, {ms(late)} for {ms(lag)} and {tokens:.0f} for {rate:.0f}"

    assert (
        f"**Against that run**, of the same requests and policies, `auto` is over the replica by less in five of six "
        f"figures: {told}; by more in one, median gaps {two(now['gap_p50_us'])} for {two(was['gap_p50_us'])}. The two "
        "runs' intervals overlap in all six, so that no difference between the runs is shown. Median gaps, gaps at "
        f"p99 and tokens a second themselves: `auto` {values('auto')}, the replica {values('vllm')}, "
        f"`full_and_piecewise` {values('full_and_piecewise')}. Calibration, day and host are others too, and "
        "`benchmarks.quiet` is lacking, so that nothing of it is put down to decode attention."
    ) in WORDS


def two(row: dict[str, Any]) -> str:
    """How many times the replica's, to two digits, without the interval."""
    return f"{row['ratio_to_vllm_replica']:.2f}"


def three(row: dict[str, Any]) -> str:
    """How many times the replica's, to three digits, without the interval."""
    return f"{row['ratio_to_vllm_replica']:.3f}"


def test_figures_below_the_replicas_are_told() -> None:
    """Means below 0.99, of which there are none, the least ones, and how many intervals begin there."""
    figures, replica, before = in_all(), by_load("vllm"), first_of_the_8b("auto", "gap_p50_us")
    assert not any(row["ratio_to_vllm_replica"] < LEAST for row in figures)
    assert not any("**" in line for line in over_the_replica())
    assert "and its 95% interval, in bold below 0.99, of which there is none." in WORDS
    titles = [newest("llama8b", trace) for trace in ("code", "conversation")]
    medians = [by_load("auto")[title]["gap_p50_us"] for title in titles]
    theirs = [replica[title]["gap_p50_us"] for title in titles]
    code, talk = medians
    least, second = sorted(figures, key=lambda row: row["ratio_to_vllm_replica"])[:2]
    assert least == code
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
        f"for {ms(theirs[0]['value'])}); then come its tokens a second there, {three(second)}. On the conversation "
        f"trace its median gaps are {interval(talk, 3)} times as short ({ms(talk['value'])} ms for "
        f"{ms(theirs[1]['value'])}). By round they are {each[0]}, and {each[1]}; the replica of SGLang has {sglang} in "
        f"the mean, `full_and_piecewise` {fixed}."
    ) in WORDS
    older = [row for row in figures if row["date"] == DAY]
    assert all(row["ratio_to_vllm_replica"] < LEAST for row in before)
    assert all(was["ratio_high"] > now["ratio_low"] for was, now in zip(before, medians, strict=True))
    assert {was["served"] for was in before} == {100}
    assert talk["served"] == 120
    assert (
        f"**In [the run before](#runs-before) these two were below it, {' and '.join(map(three, before))}**; since "
        "then only their model and DeepSeek-V2-Lite's code trace were served again, and "
        f"{len(older)} of {len(figures)} figures are still those of 43ebfb8. "
        "Why they aren't below it now isn't known. Decode attention, calibration, day and the host's speed are "
        "others, `benchmarks.quiet` is lacking, and the conversation trace has 120 requests for 100; the two runs' "
        "intervals overlap, too."
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
        "conversation trace, all but times to first token at p99. The others: gaps at p99 of DeepSeek-V2-Lite's code "
        "trace, median gaps of Llama-3.1-8B's, times to first token at p50 and gaps at p99 of Llama-3.2-1B's "
        "conversation trace."
    ) in WORDS
    assert [(row["model"], row["trace"], row["figure"]) for row in wide if row not in both and row not in talks] == [
        ("dsv2lite", "code", "gap_p99_us"), ("llama8b", "code", "gap_p50_us"),
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
    assert (
        f"The replica of SGLang and `full_and_piecewise` have on the code trace {told('tokens_per_s', 'qwen05b')} "
        f"times the tokens a second of the replica of vLLM's rule with the 0.5B and {told('tokens_per_s', 'dsv2lite')} "
        f"with DeepSeek-V2-Lite, gaps at p99 {told('gap_p99_us', 'qwen05b')} and {told('gap_p99_us', 'dsv2lite')} "
        f"times as short. Over the eight loads `auto`'s tokens a second are {between['sglang']} of the replica of "
        f"SGLang's and {between['full_and_piecewise']} of `full_and_piecewise`'s. vLLM's rule runs what has more than "
        f"512 tokens eagerly, {min(eager)} to {max(eager)} steps a round, and eager code of transformers launches "
        "slowly."
    ) in WORDS
    steps = [cell["steps"] for load in LOADS for cell in rounds(*load, "auto")]
    assert {mode for each in steps for mode in each} == {"full", "piecewise", "eager"}
    assert (
        "`auto` ran no decode steps beside a prompt in any of these rounds, and at most "
        f"{max(each.get('eager', 0) for each in steps)} of a round's steps eagerly"
    ) in WORDS
    better = [
        (*load, other, figure, found)
        for load in LOADS
        for other in ("sglang", "full_and_piecewise", "piecewise", "full", "split", "eager")
        if rounds(*load, other)
        for figure in BETTER_UP
        if (found := over_another(*load, other, "auto", figure))[1] > 1
    ]
    assert [each[:4] for each in better] == [
        ("dsv2lite", "conversation", "full_and_piecewise", "tokens_per_s"),
        ("llama8b", "conversation", "sglang", "gap_p50_us"),
    ]
    (tokens, _, _), (gaps, _, _) = (each[4] for each in better)
    assert [len(rounds(model, "conversation", "auto")) for model in ("dsv2lite", "llama8b")] == [2, 3]
    one = {
        other: [over_another("qwen05b", "conversation", other, "auto", figure)[0] for figure in BETTER_UP]
        for other in ("full", "full_and_piecewise")
    }
    assert [sum(each > 1 for each in ratios) for ratios in one.values()] == [6, 5]
    means = {
        (*load, other, figure): over_another(*load, other, "auto", figure)[0]
        for load in LOADS
        for other in ("vllm", "sglang", "full_and_piecewise", "piecewise", "full", "split", "eager")
        if len(rounds(*load, other)) > 1
        for figure in BETTER_UP
    }
    most = sorted(means, key=lambda each: -means[each])
    assert most[:3] == [
        ("dsv2lite", "conversation", "full_and_piecewise", "ttft_p99_us"),
        ("llama1b", "code", "sglang", "ttft_p50_us"),
        ("qwen05b", "code", "full_and_piecewise", "ttft_p50_us"),
    ]
    (waits,) = {f"{means[each]:.2f}" for each in most[:3]}
    assert f"{means[most[3]]:.2f}" < waits
    median = means["dsv2lite", "code", "full_and_piecewise", "gap_p50_us"]
    ours, fixed, theirs = (
        " and ".join(
            least_and_most([cell["gap_p50_us"] for cell in cells])
            for cells in (rounds("dsv2lite", "code", policy), larger_before(policy))
        )
        for policy in ("auto", "full_and_piecewise", "sglang")
    )
    before = [(a["gap_p50_us"] / b["gap_p50_us"]) for a, b in
              zip(larger_before("auto"), larger_before("full_and_piecewise"), strict=True)]  # fmt: skip
    shorter, low, _ = interval_of_mean(before)
    assert low < 1 < shorter
    assert median < 1
    assert (
        f"With their whole interval two are, in one figure each: `full_and_piecewise` by {tokens - 1:.1%}, tokens a "
        f"second of DeepSeek-V2-Lite's conversation trace, two rounds, and the replica of SGLang by {gaps - 1:.1%}, "
        "median gaps of Llama-3.1-8B's conversation trace, three rounds. In the mean, of loads with more than one "
        f"round, the most are first tokens {waits} times as early: `full_and_piecewise`'s at p99 on DeepSeek-V2-Lite's "
        "conversation trace and at p50 on the 0.5B's code trace, and the replica of SGLang's at p50 on Llama-3.2-1B's "
        "code trace. On DeepSeek-V2-Lite's code trace `full_and_piecewise`'s median gaps are "
        f"{median:.2f} times as short as `auto`'s, and were {shorter:.2f} times in the run before. By round, now and "
        f"then, in ms: `auto` {ours}, `full_and_piecewise` {fixed}, the replica of SGLang {theirs}; why they change so "
        "isn't known. **In the one round of the 0.5B's conversation trace `full` is better "
        f"than `auto` in all six figures**, by {min(one['full']) - 1:.1%} (tokens a second) to "
        f"{max(one['full']) - 1:.1%} (time to first token at p50), `full_and_piecewise` in five."
    ) in WORDS
    assert one["full"].index(min(one["full"])) == list(BETTER_UP).index("tokens_per_s")
    assert one["full"].index(max(one["full"])) == list(BETTER_UP).index("ttft_p50_us")


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
    assert not any(395 < us < 440 for us in hosts)
    mixture, code, talk = (slow[load] for load in SERVED_LATER)
    of_mixture, of_code, of_talk = (len(before[load]) for load in SERVED_LATER)
    assert (
        f"Fixed work before each round took {min(hosts):.0f} to {max(hosts):.0f} us (`host_us`), over 400 before "
        f"{sum(map(len, slow.values()))} of {len(hosts)} rounds, {len(code)} of them of the {of_code} "
        "of Llama-3.1-8B's code trace (all three of the replica of SGLang, first and third of the replica of vLLM's "
        f"rule, the first of `auto` and of `full_and_piecewise`), {len(talk)} of the {of_talk} of its "
        f"conversation trace and {len(mixture)} of the {of_mixture} of DeepSeek-V2-Lite's code trace (the fourth of "
        "`full_and_piecewise`)."
    ) in WORDS
    assert {name.removeprefix("code saturated/") for name in code} == {
        "0/sglang", "1/sglang", "2/sglang", "0/vllm", "2/vllm", "0/auto", "0/full_and_piecewise",
    }  # fmt: skip
    assert mixture == ["code saturated/3/full_and_piecewise"]
    noise = [read(f"raw/end_to_end_{run}")["host_noise"]["slow"] for run in (*RUNS["llama8b"], "dsv2lite_code")]
    assert (
        f"The processes of {LATER} ran without it; of fixed work over 2 s before their rounds "
        f"{noise[0]:.0%} and {noise[1]:.0%} was slow on Llama-3.1-8B (code and conversation trace) and {noise[2]:.0%} "
        "on DeepSeek-V2-Lite (`host_noise`)."
    ) in WORDS
    for slow_, looks in ((1224, 5214), (841, 4336), (469, 2838), (394, 3104)):
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
        by_load("auto")["Qwen2.5-0.5B, conversation"][figure]["ratio_to_vllm_replica"]
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
    assert data["date"] == DAY
    policies = {name.split("/")[2] for name in whole_rounds(data)}
    assert len(policies) == 4
    medians = {policy: first_of_the_8b(policy, "gap_p50_us") for policy in policies}
    assert [row["repeats"] for row in medians["auto"]] == [3, 2]
    assert {row["served"] for row in medians["auto"]} == {100}
    then = [row for row in in_all() if (row["model"], row["trace"]) not in SERVED_LATER]
    then += [row for figure in BETTER_UP for row in first_of_the_8b("auto", figure)]
    then += [of_larger("auto", figure, "") for figure in BETTER_UP]
    below = [row for row in then if row["ratio_to_vllm_replica"] < LEAST]
    assert below == medians["auto"]
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
        f"Llama-3.1-8B, {data['date']}, 43ebfb8, in the run of the tables' other models, with a limit of 1.0, "
        "100 requests of each trace, three rounds of the code trace and two of the conversation trace "
        f"(`raw/end_to_end_llama8b_first.json`): {tokens} times the tokens a second, **median gaps {gaps} times as "
        f"short** ({ms(code['value'])} ms for {ms(theirs[0]['value'])}, and {ms(talk['value'])} for "
        f"{ms(theirs[1]['value'])}), then the only two of {len(then)} figures below 0.99; why isn't known. The replica "
        f"of SGLang had {sglang} there, `full_and_piecewise` {fixed}. Median gaps of all four policies were "
        f"{ms(min(was))} to {ms(max(was))} ms, and are {ms(min(now))} to {ms(max(now))} in the tables, of another run. "
        f"Fixed work before its rounds took {min(hosts):.0f} to {max(hosts):.0f} us."
    ) in WORDS
    assert f"`auto` had a limit of 1.25 in all but those of {DAY}." in WORDS


def of_larger(policy: str, figure: str, name: str) -> dict[str, Any]:
    """A row of an older run of DeepSeek-V2-Lite's code trace."""
    rows = summarise(read(f"raw/end_to_end_dsv2lite{name}"))
    (row,) = [row for row in rows if (row["trace"], row["policy"], row["figure"]) == ("code", policy, figure)]
    return row


def larger_before(policy: str) -> list[dict[str, Any]]:
    """A policy's rounds of that trace in the run before the tables'."""
    found = of_trace(read("raw/end_to_end_dsv2lite"), "code")
    return [cell for name, cell in sorted(found.items()) if name.endswith(f"/{policy}")]


def test_the_larger_models_run_before_is_told() -> None:
    """The code trace beside the conversation trace that the tables have: each round's gaps at p99, and medians."""
    data = read("raw/end_to_end_dsv2lite")
    assert data["date"] == DAY
    rows = {figure: of_larger("auto", figure, "") for figure in BETTER_UP}
    assert {(row["repeats"], row["served"]) for row in rows.values()} == {(4, 100)}
    others = [
        " and ".join(two(of_larger(policy, figure, "")) for figure in ("tokens_per_s", "gap_p99_us"))
        for policy in ("sglang", "full_and_piecewise")
    ]
    own, theirs = ([cell["gap_p99_us"] for cell in larger_before(policy)] for policy in ("auto", "vllm"))
    ratios = [them / us for us, them in zip(own, theirs, strict=True)]
    assert sum(ratio < 1.3 for ratio in ratios) == 2
    hosts = [cell["host_us"] for cell in larger_before("vllm")]
    eager = {cell["steps"]["eager"] for cell in larger_before("vllm")}
    assert (
        f"DeepSeek-V2-Lite, code trace, {data['date']}, 43ebfb8, in the run of the tables' other models, with a limit "
        "of 1.0, 100 requests, four rounds (`raw/end_to_end_dsv2lite.json`, whose conversation trace is in the "
        f"tables): {interval(rows['tokens_per_s'])} times the tokens a second, "
        f"{interval(rows['tokens_per_s_arriving'])} arriving, first tokens {interval(rows['ttft_p50_us'])} times as "
        f"early at p50 and {interval(rows['ttft_p99_us'])} at p99, median gaps {interval(rows['gap_p50_us'])} times as "
        f"short, **gaps at p99 {interval(rows['gap_p99_us'])}**. The replica's gaps at p99 were "
        f"{told_by_round([ms(us) for us in theirs])} ms by round, `auto`'s {least_and_most(own)}: "
        f"{told_by_round([f'{ratio:.2f}' for ratio in ratios])} times. Why they are so uneven isn't known: fixed work "
        f"before them took {min(hosts):.0f} to {max(hosts):.0f} us, and {min(eager)} or {max(eager)} steps ran eagerly "
        f"in each. The replica of SGLang had {others[0]} in tokens a second and gaps at p99, `full_and_piecewise` "
        f"{others[1]}."
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
        for policy in ("piecewise", "full", "split", "eager")
    }
    told = ", ".join(f"`{policy}` {each}" for policy, each in others.items())
    assert f"in tokens a second and gaps at p99: {told}." in WORDS
    spans = []
    for name in ("_code", "", "_fourth", "_third", "_second", "_first"):
        (span,) = {
            f"{cell['span_s'] - cell['after_arrivals_s']:.2f}"
            for each, cell in read(f"raw/end_to_end_dsv2lite{name}")["cells"].items() if each.startswith("code ")
        }  # fmt: skip
        spans.append(float(span))
    assert {round(span, 1) for span in spans[4:]} <= {5.3, 5.4}
    here, *older, last = (f"{span} s" for span in spans[:4])
    assert (
        f"within {here} here, {older[0]} at 43ebfb8, {older[1]} at 7c76117, {last} at fc67869 and 5.3 s before."
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


def captured() -> list[str]:
    """A row a list of graphs: how many, seconds in a warm process and in its first captures, bytes."""
    lines = []
    for row in read("startup_qwen05b")["cells"]["lists"]:
        first = f"{row['first_seconds']:.1f}" if "first_seconds" in row else ""
        mib = [f"{row[name] / (1 << 20):,.0f}" for name in ("registry_bytes", "device_bytes")]
        lines.append(f"| {row['list']} | {row['graphs']} | {row['seconds']:.1f} | {first} | {mib[0]} | {mib[1]} |")
        assert not row["failed"]
    return lines


@pytest.mark.parametrize("made", [over_the_replica, served, of_mla, of_experts, of_kernels, captured])
def test_tables_are_told_as_their_results_have_them(made: Any) -> None:
    """Every row, one after the other, bad ones too."""
    rows = made()
    start = DOC.index(rows[0])
    assert DOC[start : start + len(rows)] == rows
    assert not DOC[start + len(rows)].startswith("|")


def test_start_up_is_told_as_its_results_have_it() -> None:
    """A lazy Engine's first step and its steady speed, with intervals."""
    words = " ".join(" ".join(DOC).split())
    for name in ("startup_qwen05b", "raw/startup_qwen05b_second"):
        cells = read(name)["cells"]
        for part in ("first_step", "steady"):
            low, high = cells[part]["interval"]
            assert f"{cells[part]['ratio']:.3f} [{low:.3f}, {high:.3f}]" in words
    cells = read("startup_qwen05b")["cells"]
    first, steady = cells["first_step"], cells["steady"]
    assert f"{first['lazy_ms']:.2f} ms, and {first['eager_ms']:.2f} with `eager`" in words
    assert f"{steady['step_ms']['lazy']:.3f} ms a step, and {steady['step_ms']['full']:.3f}:" in words
    assert "Both limits hold with their whole intervals" in words
    assert all(each["interval"][1] <= each["limit"] for each in (first, steady))


def test_memory_beyond_captures_is_told_as_its_results_have_it() -> None:
    """MiB that the device lacks beyond what captures noted, before and now; what torch caches, and what is kept."""
    words = " ".join(" ".join(DOC).split())
    (*now, lazy), (*before, lazy_before) = (
        read(name)["cells"]["lists"] for name in ("startup_qwen05b", "raw/startup_qwen05b_second")
    )
    beyond = [round(over(row, "device")) for row in now]
    assert f"is what captures noted, and {min(beyond)} to {max(beyond)} MiB**" in words
    assert f"in the same run, where the H200 has {beyond[1]} with all {now[1]['graphs']} graphs" in words
    assert f"it was {over(before[1], 'device'):.0f} more with `auto`'s default" in words
    assert (
        f"process has {over(lazy, 'device'):.0f} MiB more than captures noted** after these two graphs, "
        f"{over(lazy_before, 'device'):.0f} before, of which {over(lazy, 'torch_reserved'):.0f} are torch's"
    ) in words
    assert f"torch had {lazy['torch_cached_bytes'] / (1 << 20):.0f} MiB more cached" in words
    assert all(row["torch_reserved_bytes"] == row["device_bytes"] for row in now)
    assert not any(row["kept_bytes"] or row["torch_cached_bytes"] for row in now)
    guide = " ".join((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split())
    assert (
        f"and {min(beyond)} to {max(beyond)} MiB more; {over(lazy, 'device'):.0f} with a lazy Engine that has more to "
        f"capture, beside {lazy['torch_cached_bytes'] / (1 << 20):.0f} that torch keeps for later"
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
    was = " and ".join(two(of_larger("auto", figure, "")) for figure in figures)
    assert all(code["dsv2lite"][figure]["ratio_to_vllm_replica"] < 1.3 for figure in figures)
    both = " and ".join(f"{fixed[figure]['ratio_to_vllm_replica']:.2f}" for figure in figures)
    own, theirs = ([cell["gap_p99_us"] for cell in rounds("dsv2lite", "code", policy)] for policy in ("auto", "vllm"))
    each = told_by_round([f"{them / us:.2f}" for us, them in zip(own, theirs, strict=True)])
    assert in_short("throughput against the replica") == tokens
    assert in_short("the same, gaps at p99") == gaps
    assert in_short("throughput, DeepSeek-V2-Lite, 100 requests") == (
        f"{fewer}, gaps at p99 {longer}, by round {each}: not reached; `full_and_piecewise` {both}; {was} in the run "
        "before"
    )
    llamas = [times(code[model]["tokens_per_s"], "( to )") for model in ("llama8b", "llama1b")]
    assert in_short("throughput, Llama-3.1-8B and Llama-3.2-1B, code") == " and ".join(llamas)
    latest = in_all()
    assert not any(row["ratio_to_vllm_replica"] < LEAST for row in latest)
    with_one = [row for row in latest if row["ratio_low"] is not None]
    wide = f"{sum(row['ratio_low'] < LEAST for row in with_one)} of {len(with_one)}"
    medians = [by_load("auto")[newest("llama8b", trace)]["gap_p50_us"] for trace in ("code", "conversation")]
    now = " and ".join(times(row, "( to )") for row in medians)
    then = " and ".join(f"{row['ratio_to_vllm_replica']:.2f}" for row in first_of_the_8b("auto", "gap_p50_us"))
    least = min(latest, key=lambda row: row["ratio_to_vllm_replica"])
    assert least == medians[0]
    assert in_short("figures of `auto` below 0.99") == (
        f"none of {len(latest)} in the mean, the least {three(least)}; {wide} intervals begin below 0.99. "
        f"Llama-3.1-8B's median gaps are {now} times as short, {then} in the run before, after which "
        "that model and DeepSeek-V2-Lite's code trace alone were served again"
    )
    guide = " ".join((ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").split())
    assert (
        "throughput of 43ebfb8 (Llama-3.1-8B's of 95234a3 and DeepSeek-V2-Lite's code trace's of d32f9e4, with newer "
        "decode kernels)"
    ) in guide
    assert "its rows of 7c76117, dedba98, 43ebfb8, d32f9e4 and 9f1a315 have" in guide
    assert (
        "of these rows Llama-3.1-8B's of throughput have it, and DeepSeek-V2-Lite's of the code trace and of choices "
        "with what d32f9e4 changed."
    ) in guide
    shares = [over_another(*load, "auto", "full_and_piecewise", "tokens_per_s")[0] for load in LOADS]
    assert in_short("throughput against `full_and_piecewise`") == f"{min(shares):.3f} to {max(shares):.3f}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (
        f"| {tokens} times the tokens a second and gaps at p99 {gaps} times as short on 150 requests of the Azure code "
        "trace within 1.8 s, Qwen2.5-0.5B on an H200"
    ) in readme
    assert (
        f"**DeepSeek-V2-Lite**: {fewer}, gaps at p99 {longer} times as short, by round {each}, {was} in the run before"
    ) in readme
    assert f"**Llama-3.1-8B**: {llamas[0]}, median gaps {now} times as short, {then} in the run before |" in readme
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (
        f"`auto` has {tokens} times the tokens a second of the replica of vLLM's rule on the code trace with "
        f"Qwen2.5-0.5B, and gaps at p99 {gaps} times as short; DeepSeek-V2-Lite's are in the next "
        "entry. "
        f"Of {len(latest)} figures none is below 0.99 in the mean, but {wide} intervals begin there; Llama-3.1-8B's "
        f"median gaps, {then} times as short at 43ebfb8, are {now} in a later run, of that model alone."
    ) in changes
    assert (
        "End to end of four models at 43ebfb8, Llama-3.1-8B at 95234a3, DeepSeek-V2-Lite's code trace at d32f9e4,"
    ) in changes
    assert (
        "DeepSeek-V2-Lite's code trace end to end with the decode attention of d32f9e4, of a run of its own: 1.3 in "
        f"tokens a second or in gaps at p99 isn't reached, {fewer} times and {longer}, which were {was}, so that "
        "Qwen2.5-0.5B alone reaches it. Of two runs of a load `end_to_end --summary` has the older one too where the "
        "newer one has fewer rounds, requests or policies ([docs](docs/measured_gpu.md#end-to-end))."
    ) in changes
