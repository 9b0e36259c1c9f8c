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
    """The 0.5B's conversation trace of the run before, as the newer one didn't reach it."""
    newer, older, larger = (
        summarise(read(f"raw/end_to_end_{name}")) for name in ("qwen05b", "qwen05b_second", "dsv2lite_first")
    )
    kept = [row for row in older if row["load"] == "conversation saturated"]
    assert {row["load"] for row in newer} == {"code saturated"}
    assert read("end_to_end") == [*newer, *kept, *larger]


def test_the_larger_models_newer_run_is_told_beside_its_table() -> None:
    """One round of `auto`, and the others' figures in that round."""
    words = " ".join(" ".join(DOC).split())
    newer = {(row["policy"], row["figure"]): row for row in summarise(read("raw/end_to_end_dsv2lite"))}
    tokens, gaps = (newer["auto", figure] for figure in ("tokens_per_s", "gap_p99_us"))
    assert (tokens["repeats"], tokens["ratio_low"]) == (1, None)
    assert (
        f"`auto` has {tokens['ratio_to_vllm_replica']:.2f} times the tokens a second of the replica in that round, and "
        f"gaps at p99 {gaps['ratio_to_vllm_replica']:.2f} times as short, without an interval"
    ) in words
    cells = read("raw/end_to_end_dsv2lite")["cells"]
    first, second = (cells[f"code saturated/{i}/vllm"]["gap_p99_us"] / 1e3 for i in (0, 1))
    assert f"gaps at p99 are {first:.1f} and {second:.1f} ms in the two rounds" in words
    for figure in ("tokens_per_s", "gap_p99_us"):
        auto, *others = (cells[f"code saturated/0/{name}"][figure] for name in ("auto", "full_and_piecewise", "sglang"))
        assert all(abs(other / auto - 1) < 0.01 for other in others)


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


@pytest.mark.parametrize("made", [served, larger, captured])
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
    other = tokens["full_and_piecewise"]["value"]
    assert in_short("throughput against `full_and_piecewise`") == f"{auto['value'] / other:.3f}"


def test_auto_is_never_below_the_replica() -> None:
    """By any figure of any load; the least is told."""
    ratios = {
        model: [row["ratio_to_vllm_replica"] for row in end_to_end(model) if row["policy"] == "auto"]
        for model in ("qwen05b", "dsv2lite")
    }
    words = " ".join(" ".join(DOC).split())
    assert f"the least is {min(ratios['qwen05b']):.2f}," in words
    assert f"no figure is below 0.99 of the replica's, the least is {min(ratios['dsv2lite']):.2f}." in words
    assert min(map(min, ratios.values())) >= 0.99
