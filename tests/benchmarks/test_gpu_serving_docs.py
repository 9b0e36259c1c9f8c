"""docs/measured_gpu.md's tables of serving and of start-up are those of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.end_to_end import summarise

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
DOC = (ROOT / "docs" / "measured_gpu.md").read_text(encoding="utf-8").splitlines()


def read(name: str) -> Any:
    """A result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def end_to_end(model: str) -> list[dict[str, Any]]:
    """Of one model."""
    return [row for row in read("end_to_end") if row["model"] == model]


def test_rows_are_those_of_the_raw_runs() -> None:
    """The 0.5B's two traces are of two runs."""
    code, conversation, larger = (
        summarise(read(f"raw/end_to_end_{name}")) for name in ("qwen05b", "qwen05b_conversation", "dsv2lite")
    )
    assert {row["load"] for row in code} == {"code saturated"}
    assert {row["load"] for row in conversation} == {"conversation saturated"}
    assert read("end_to_end") == [*code, *conversation, *larger]


def test_the_conversation_trace_is_told_as_it_came_out() -> None:
    """Over the replica, with tokens until the last request came, and beside `full_and_piecewise`."""
    words = " ".join(" ".join(DOC).split())
    at = {(row["policy"], row["figure"]): row for row in end_to_end("qwen05b")
          if row["load"] == "conversation saturated"}  # fmt: skip

    def over(figure: str, *, brackets: str = "[]") -> str:
        row = at["auto", figure]
        low, high = (f"{row[name]:.2f}" for name in ("ratio_low", "ratio_high"))
        between = f"{low}, {high}" if brackets == "[]" else f"{low} to {high}"
        return f"{row['ratio_to_vllm_replica']:.2f} {brackets[0]}{between}{brackets[1]}"

    assert (
        f"**On the conversation trace `auto` has {over('tokens_per_s')} times the tokens a second, and gaps at p99 "
        f"{over('gap_p99_us')} times as short.**"
    ) in words
    arriving = [at[policy, "tokens_per_s_arriving"] for policy in ("auto", "full_and_piecewise", "vllm")]
    mine, fixed, replica = (f"{row['value']:,.0f}" for row in arriving)
    assert (
        f"{arriving[0]['ratio_to_vllm_replica']:.1f} times as many tokens a second (`tokens_per_s_arriving`: {mine}, "
        f"`full_and_piecewise` {fixed}, the replica {replica})"
    ) in words
    (tokens, other), (gap, longer), *waits = (
        [at[policy, figure]["value"] for policy in ("auto", "full_and_piecewise")]
        for figure in ("tokens_per_s", "gap_p99_us", "ttft_p50_us", "ttft_p99_us")
    )
    (first, sooner), (last, before) = ([us / 1e3 for us in each] for each in waits)
    cells = read("raw/end_to_end_qwen05b_conversation")["cells"]
    steps = [cell["steps"] for name, cell in cells.items() if name.endswith("/auto")]
    beside = sum(each["split/decodes_beside"] for each in steps) / sum(sum(each.values()) for each in steps)
    assert (
        f"but in gaps at p99**, {1 - gap / longer:.1%} shorter: {tokens:,.0f} tokens a second for {other:,.0f}, median "
        f"gaps as long, and its prompts wait {first:.0f} ms for {sooner:.0f} at p50 and {last:.0f} for {before:.0f} at "
        f"p99, as decodes run beside them within `first_token_limit`, in {beside:.0%} of its steps."
    ) in words
    assert all(cell["served"] == 150 for cell in cells.values())
    replicas, mine_ = ([cells[f"conversation saturated/{i}/{policy}"] for i in range(3)] for policy in ("vllm", "auto"))
    slow = [f"{cell['host_us']:.0f}" for cell in replicas]
    rates = [f"{cell['tokens_per_s']:,.0f}" for cell in replicas]
    ratios = (
        mine_[2]["tokens_per_s"] / replicas[2]["tokens_per_s"],
        replicas[2]["gap_p99_us"] / mine_[2]["gap_p99_us"],
    )
    assert (
        f"(`host_us` {slow[0]} and {slow[1]}, {slow[2]} in the third): its EAGER steps take the longer so, {rates[0]} "
        f"and {rates[1]} tokens a second and {rates[2]}. **In the third round, with a quick host for both, it is "
        f"{ratios[0]:.2f} times the tokens a second**, and gaps at p99 {ratios[1]:.2f} times as short."
    ) in words
    assert mine_[2]["host_us"] < 400
    pieces = [cells[f"conversation saturated/{i}/piecewise"] for i in (0, 2)]
    at_once, quick = (f"{cell['tokens_per_s']:,.0f}" for cell in pieces)
    assert f"({at_once} tokens a second at {pieces[0]['host_us']:.0f}, {quick} at {pieces[1]['host_us']:.0f})" in words
    hosts = [cell["host_us"] for cell in cells.values()]
    assert f"At 8cb4544 it took {min(hosts):.0f} to {max(hosts):.0f}, which" in words
    told = (
        f"{over('tokens_per_s', brackets='()')}, gaps at p99 {over('gap_p99_us', brackets='()')}; {ratios[0]:.2f} and "
        f"{ratios[1]:.2f} in the one round in which the host was quick for both"
    )
    assert in_short("throughput, 150 requests of the conversation") == told
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{over('tokens_per_s', brackets='()')} of the conversation trace on a host" in readme
    before_ = summarise(read("raw/end_to_end_qwen05b_second"))
    older = {(row["load"], row["figure"]): row for row in before_ if row["policy"] == "auto"}
    code, talk = (older[f"{trace} saturated", "tokens_per_s"] for trace in ("code", "conversation"))
    gaps = [older[f"{trace} saturated", "gap_p99_us"]["ratio_to_vllm_replica"] for trace in ("code", "conversation")]
    assert (
        f"{code['ratio_to_vllm_replica']:.2f} [{code['ratio_low']:.2f}, {code['ratio_high']:.2f}] times the replica's "
        f"tokens a second on the code trace, five rounds, and {talk['ratio_to_vllm_replica']:.2f} "
        f"[{talk['ratio_low']:.2f}, {talk['ratio_high']:.2f}] on the conversation trace, two rounds; gaps at p99 were "
        f"{gaps[0]:.1f} and {gaps[1]:.1f} times as short"
    ) in words


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


def of_larger(policy: str, figure: str, name: str = "") -> dict[str, Any]:
    """A row of a run of DeepSeek-V2-Lite: the newest, or an older one."""
    rows = summarise(read(f"raw/end_to_end_dsv2lite{name}"))
    (row,) = [row for row in rows if (row["policy"], row["figure"]) == (policy, figure)]
    return row


def times(row: dict[str, Any], brackets: str = "[, ]") -> str:
    """How many times the replica's, with the interval."""
    opens, between, closes = brackets[0], brackets[1:-1], brackets[-1]
    interval = f"{opens}{row['ratio_low']:.2f}{between}{row['ratio_high']:.2f}{closes}"
    return f"{row['ratio_to_vllm_replica']:.2f} {interval}"


def test_the_larger_model_is_told_as_it_came_out() -> None:
    """1.3 is reached in gaps at p99 and not in tokens, round by round, and beside `full_and_piecewise`."""
    words = " ".join(" ".join(DOC).split())
    figures = ("tokens_per_s", "gap_p99_us", "gap_p50_us", "ttft_p50_us")
    tokens, gaps, median, waits = (of_larger("auto", figure) for figure in figures)
    assert gaps["ratio_low"] < 1.3 < gaps["ratio_to_vllm_replica"]
    assert tokens["ratio_high"] < 1.3
    cells = read("raw/end_to_end_dsv2lite")["cells"]
    auto, replica, fixed = ([cells[f"code saturated/{i}/{policy}"] for i in range(4)]
                            for policy in ("auto", "vllm", "full_and_piecewise"))  # fmt: skip
    assert len(cells) == 12
    assert all(cell["served"] == 100 for cell in cells.values())
    own, theirs = ([cell["gap_p99_us"] for cell in cells_] for cells_ in (auto, replica))
    assert (
        f"`auto`'s are {times(gaps)} times as short as the replica's. The interval of four rounds begins below 1.3, "
        f"and the first round has {theirs[0] / own[0]:.2f}. "
        f"**In tokens a second it isn't**: {times(tokens)} times. Median gaps are {times(median)} times as short, "
        f"times to first token at p50 {times(waits)} times."
    ) in words
    ratios = [f"{them / us:.2f}" for us, them in zip(own, theirs, strict=True)]
    each = [ms(us) for us in theirs]
    rates, mine = ([f"{cell['tokens_per_s']:.0f}" for cell in cells_] for cells_ in (replica, auto))
    host, own_host = ([cell["host_us"] for cell in cells_] for cells_ in (replica, auto))
    assert (
        f"`auto`'s gaps at p99 are {ms(min(own))} to {ms(max(own))} ms in every round, the replica's "
        f"{', '.join(each[:3])} and {each[3]}: {', '.join(ratios[:3])} and {ratios[3]} times. The replica's tokens a "
        f"second are {', '.join(rates[:3])} and {rates[3]}, `auto`'s {min(mine)} to {max(mine)}. Why isn't known: "
        f"fixed work before the replica's rounds took {min(host):.0f} to {max(host):.0f} us each time (`host_us`), "
        f"before `auto`'s {min(own_host):.0f} to {max(own_host):.0f}."
    ) in words
    assert rates == sorted(rates, reverse=True)
    other, other_gaps = (of_larger("full_and_piecewise", figure) for figure in figures[:2])
    sooner = 1 - of_larger("full_and_piecewise", "ttft_p50_us")["value"] / waits["value"]
    longer = of_larger("full_and_piecewise", "gap_p50_us")["value"] / median["value"] - 1
    assert (
        f"{other['value']:.0f} tokens a second for `auto`'s {tokens['value']:.0f}, gaps at p99 {times(other_gaps)} "
        f"times as short as the replica's. Its first tokens at p50 come {sooner:.0%} earlier, its median gap is "
        f"{longer:.0%} longer."
    ) in words
    (steps,) = {sum(cell["steps"].values()) for cell in auto}
    assert {cell["steps"]["split/decodes_beside"] for cell in auto} == {1}
    (eagerly,) = {cell["steps"]["eager"] for cell in replica}
    ran = [sum(cell["steps"].values()) for cell in replica]
    assert f"decode steps beside a prompt in one step of {steps} in each round." in words
    runs = [kernels(name)["prompt of 2048/eager"] for name in ("_second", "")]
    launched, device = ([each[figure] for each in runs] for figure in ("wall_us", "device_us"))
    assert (
        f"the replica ran {eagerly} of {min(ran)} to {max(ran)} steps eagerly, which rests on the host: a prompt of "
        f"2,048 tokens took {ms(launched[0])} and {ms(launched[1])} ms so in two runs, of which the device has "
        f"{ms(max(device))} and {ms(min(device))}"
    ) in words
    assert not any(name not in ("full", "piecewise") for cell in fixed for name in cell["steps"])
    spans = []
    for name in ("", "_third", "_second", "_first"):
        (span,) = {
            f"{cell['span_s'] - cell['after_arrivals_s']:.2f}"
            for cell in read(f"raw/end_to_end_dsv2lite{name}")["cells"].values()
        }
        spans.append(float(span))
    assert f"100 requests of the code trace within {spans[0]} s, 2026-11-28, commit 7c76117" in words
    assert {round(span, 1) for span in spans[2:]} <= {5.3, 5.4}
    assert f"within {spans[0]} s here, {spans[1]} s at fc67869 and 5.3 s in the two runs before." in words


def test_the_larger_models_runs_before_are_told() -> None:
    """Older kernels, each run by its own ratios, and the policies that weren't served since."""
    words = " ".join(" ".join(DOC).split())
    figures = ("tokens_per_s", "gap_p99_us")
    tokens, gaps = (of_larger("auto", figure, "_third") for figure in figures)
    fixed = [of_larger("full_and_piecewise", figure, "_third")["ratio_to_vllm_replica"] for figure in figures]
    medians = [ms(of_larger(policy, "gap_p50_us", "_third")["value"]) for policy in ("full_and_piecewise", "auto")]
    assert (
        f"`auto` has {times(tokens)} times the replica's tokens a second, and gaps at p99 {times(gaps)} times as "
        f"short. `full_and_piecewise` has {fixed[0]:.2f} and {fixed[1]:.2f}, and its median gap is {medians[0]} ms "
        f"where `auto`'s is {medians[1]}."
    ) in words
    second = [of_larger("auto", figure, "_second") for figure in figures]
    assert {row["repeats"] for row in second} == {1}
    ratios = " and ".join(f"{row['ratio_to_vllm_replica']:.2f}" for row in second)
    assert f"(`raw/end_to_end_dsv2lite_second.json`): {ratios}." in words
    first = " and ".join(times(of_larger("auto", figure, "_first")) for figure in figures)
    assert f"(`raw/end_to_end_dsv2lite_first.json`): {first}." in words
    others = {
        policy: " and ".join(
            f"{of_larger(policy, figure, '_first')['ratio_to_vllm_replica']:.2f}" for figure in figures
        )
        for policy in ("sglang", "piecewise", "full", "split", "eager")
    }
    sglang = others.pop("sglang")
    told = ", ".join(f"`{policy}` {each}" for policy, each in others.items())
    assert f"in tokens a second and gaps at p99: the replica of SGLang {sglang}, {told}." in words


def larger() -> list[str]:
    """`served` of DeepSeek-V2-Lite."""
    return served("dsv2lite")


def served(model: str = "qwen05b") -> list[str]:
    """A row a load and policy: tokens a second, times to first token and gaps, and ratios to the replica's."""
    rows, lines = end_to_end(model), []
    for load, policy in dict.fromkeys((row["load"], row["policy"]) for row in rows):
        at = {row["figure"]: row for row in rows if (row["load"], row["policy"]) == (load, policy)}

        def over(figure: str, at: dict[str, Any] = at) -> str:
            row = at[figure]
            if row["policy"] == "vllm":
                return "1"
            low, high = row["ratio_low"], row["ratio_high"]
            interval = "" if low is None else f" [{low:.2f}, {high:.2f}]"
            return f"{row['ratio_to_vllm_replica']:.2f}{interval}"

        def ms(figure: str, digits: int, at: dict[str, Any] = at) -> str:
            return f"{at[figure]['value'] / 1e3:,.{digits}f}"

        cells = [
            load, f"`{policy}`", str(at["tokens_per_s"]["repeats"]), f"{at['tokens_per_s']['value']:,.0f}",
            over("tokens_per_s"), f"{ms('ttft_p50_us', 0)} / {ms('ttft_p99_us', 0)}", ms("gap_p50_us", 1),
            over("gap_p50_us"), ms("gap_p99_us", 1), over("gap_p99_us"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def captured() -> list[str]:
    """A row a list of graphs: how many, seconds in a warm process and in its first captures, bytes."""
    lines = []
    for row in read("startup_qwen05b")["cells"]["lists"]:
        first = f"{row['first_seconds']:.1f}" if "first_seconds" in row else ""
        mib = [f"{row[name] / (1 << 20):,.0f}" for name in ("registry_bytes", "device_bytes")]
        lines.append(f"| {row['list']} | {row['graphs']} | {row['seconds']:.1f} | {first} | {mib[0]} | {mib[1]} |")
        assert not row["failed"]
    return lines


@pytest.mark.parametrize("made", [served, larger, of_mla, of_experts, of_kernels, captured])
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
    """Start-up's two ratios, and throughput over the replica's and over the best fixed policy's."""
    cells, rows = read("startup_qwen05b")["cells"], end_to_end("qwen05b")
    for part, begins in (("first_step", "a lazy Engine's first step"), ("steady", "a lazy Engine's steps once")):
        low, high = cells[part]["interval"]
        assert in_short(begins) == f"{cells[part]['ratio']:.3f} ({low:.3f} to {high:.3f})"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first, steady = (cells[part]["ratio"] for part in ("first_step", "steady"))
    assert f"first step {first:.3f} of an eager one's, settled steps {steady:.3f} of a fully captured one's" in readme
    tokens = {row["policy"]: row for row in rows if (row["load"], row["figure"]) == ("code saturated", "tokens_per_s")}
    auto = tokens["auto"]
    ratio, low, high = (auto[name] for name in ("ratio_to_vllm_replica", "ratio_low", "ratio_high"))
    assert in_short("throughput against the replica") == f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    assert f"| {ratio:.2f} ({low:.2f} to {high:.2f}) times the tokens a second on 150 requests" in readme
    page = " ".join(" ".join(DOC).split())
    assert f"`auto` has {ratio:.2f} [{low:.2f}, {high:.2f}] times the tokens a second" in page
    assert low < 1.3 < ratio
    assert "The interval of the first, of three rounds, begins below 1.3." in page
    (gap,) = [
        row for row in rows if (row["load"], row["policy"], row["figure"]) == ("code saturated", "auto", "gap_p99_us")
    ]
    ratio, low, high = (gap[name] for name in ("ratio_to_vllm_replica", "ratio_low", "ratio_high"))
    assert in_short("the same, gaps at p99") == f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    assert f"its gaps at p99 are {ratio:.2f} [{low:.2f}, {high:.2f}] times as short" in page
    shares = []
    for load in ("code saturated", "conversation saturated"):
        mine, other = (row["value"] for row in rows if (row["load"], row["figure"]) == (load, "tokens_per_s")
                       and row["policy"] in ("auto", "full_and_piecewise"))  # fmt: skip
        shares.append(f"{mine / other:.3f}")
    assert in_short("throughput against `full_and_piecewise`") == " and ".join(shares)
    assert f"({shares[0]} and {shares[1]} of its tokens a second)" in page


def test_auto_is_never_below_the_replica() -> None:
    """By any figure of any load; the least is told."""
    ratios = {
        model: [row["ratio_to_vllm_replica"] for row in end_to_end(model) if row["policy"] == "auto"]
        for model in ("qwen05b", "dsv2lite")
    }
    words = " ".join(" ".join(DOC).split())
    assert f"the least is {min(ratios['qwen05b']):.2f}," in words
    assert f"No figure is below 0.99 of the replica's, the least is {min(ratios['dsv2lite']):.2f}." in words
    assert min(map(min, ratios.values())) >= 0.99


def test_the_larger_models_throughput_is_told_in_short() -> None:
    """In the guide, the README and the changes."""
    tokens, gaps = (of_larger("auto", figure) for figure in ("tokens_per_s", "gap_p99_us"))
    fixed = [of_larger("full_and_piecewise", figure) for figure in ("tokens_per_s", "gap_p99_us")]
    both = " and ".join(f"{row['ratio_to_vllm_replica']:.2f}" for row in fixed)
    told = [times(row, "( to )") for row in (tokens, gaps)]
    assert in_short("throughput, DeepSeek-V2-Lite, 100 requests") == (
        f"{told[0]}, gaps at p99 {told[1]}, four rounds; `full_and_piecewise` {both}"
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"**DeepSeek-V2-Lite**: {told[0]}, gaps at p99 {told[1]} times as short, four rounds on the code" in readme
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (
        f"`auto`'s gaps at p99 are {told[1]} times as short as those of the replica of vLLM's rule, its tokens a "
        f"second {told[0]} times; `full_and_piecewise` does as well"
    ) in changes
    assert {row["repeats"] for row in (tokens, gaps, *fixed)} == {4}
