"""docs/measured_gpu.md's tables of serving and of start-up are those of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
DOC = (ROOT / "docs" / "measured_gpu.md").read_text(encoding="utf-8").splitlines()


def read(name: str) -> Any:
    """A result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def served() -> list[str]:
    """A row a load and policy: tokens a second, times to first token and gaps, and ratios to the replica's."""
    rows, lines = read("end_to_end"), []
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


@pytest.mark.parametrize("made", [served, captured])
def test_tables_are_told_as_their_results_have_them(made: Any) -> None:
    """Every row, one after the other, bad ones too."""
    rows = made()
    start = DOC.index(rows[0])
    assert DOC[start : start + len(rows)] == rows
    assert not DOC[start + len(rows)].startswith("|")


def test_start_up_is_told_as_its_results_have_it() -> None:
    """A lazy Engine's first step and its steady speed, with intervals."""
    cells = read("startup_qwen05b")["cells"]
    words = " ".join(" ".join(DOC).split())
    for part in ("first_step", "steady"):
        low, high = cells[part]["interval"]
        assert f"{cells[part]['ratio']:.3f} [{low:.3f}, {high:.3f}]" in words


def in_short(begins: str) -> str:
    """What the guide's short table found."""
    guide = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    (line,) = [line for line in guide.splitlines() if line.startswith(f"| {begins}")]
    return line.split("|")[3].strip().replace("*", "")


def test_the_guide_has_the_same() -> None:
    """Start-up's two ratios, and throughput over the replica's and over the best fixed policy's."""
    cells, rows = read("startup_qwen05b")["cells"], read("end_to_end")
    for part, begins in (("first_step", "a lazy Engine's first step"), ("steady", "a lazy Engine's steps once")):
        low, high = cells[part]["interval"]
        assert in_short(begins) == f"{cells[part]['ratio']:.3f} ({low:.3f} to {high:.3f})"
    tokens = {row["policy"]: row for row in rows if (row["load"], row["figure"]) == ("code saturated", "tokens_per_s")}
    auto = tokens["auto"]
    ratio, low, high = (auto[name] for name in ("ratio_to_vllm_replica", "ratio_low", "ratio_high"))
    assert in_short("throughput against the replica") == f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    assert low >= 1.3
    other = tokens["full_and_piecewise"]["value"]
    assert in_short("throughput against `full_and_piecewise`") == f"{auto['value'] / other:.3f}"


def test_auto_is_never_below_the_replica() -> None:
    """By any figure of any load; the least is told."""
    ratios = [row["ratio_to_vllm_replica"] for row in read("end_to_end") if row["policy"] == "auto"]
    assert f"the least is {min(ratios):.2f}," in " ".join(" ".join(DOC).split())
    assert min(ratios) >= 0.99
