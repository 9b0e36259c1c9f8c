"""docs/measured_gpu.md's decodes beside a long prompt are those of their results, shortfalls too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.beside import FIGURES, WANTED, compare, summary

ROOT = Path(__file__).parents[2]
MODELS = {"qwen05b": "Qwen2.5-0.5B", "dsv2lite": "DeepSeek-V2-Lite"}
PAGE = (ROOT / "docs" / "measured_gpu.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Decodes beside a long prompt\n")[1].split("\n## ")[0]
WORDS = " ".join(SECTION.split())


def read(model: str) -> dict[str, Any]:
    """A model's result."""
    path = ROOT / "benchmarks" / "results" / "h200" / f"beside_{model}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def cells(model: str) -> dict[str, Any]:
    """Cells by prompt and decodes, ascending."""
    found = read(model)["cells"]
    return {name: found[name] for name in sorted(found, key=lambda name: [int(part) for part in name.split("/")])}


def won(cell: dict[str, Any]) -> dict[str, float]:
    """The most that is won over each chunk size of the frontier, in either figure."""
    return {
        row["against"]: max(row[figure]["ratio"] if row[figure] else 0.0 for figure in FIGURES)
        for row in cell["frontier"]
    }


def best(cell: dict[str, Any], figure: str, beside: bool) -> float:
    """The least of a figure, in ms, of ways beside or of chunk sizes."""
    found: float = min(
        point[f"{figure}_us"] for point in cell["points"].values() if (point["way"] == "beside") is beside
    )
    return found / 1e3


def shares(model: str) -> tuple[int, int, int]:
    """Chunk sizes over which 1.5 and more, less, and nothing is won, of all cells."""
    ratios = [ratio for cell in cells(model).values() for ratio in won(cell).values()]
    return told(ratios)


def told(ratios: list[float]) -> tuple[int, int, int]:
    """How many are `WANTED` and more, less, and nothing."""
    much, some = sum(ratio >= WANTED for ratio in ratios), sum(1 < ratio < WANTED for ratio in ratios)
    return much, some, len(ratios) - much - some


def test_the_table_is_that_of_its_results() -> None:
    """Every cell that was measured: wins of either figure, over how many chunk sizes, the least, the ends."""
    rows = []
    for model, title in MODELS.items():
        for name, cell in cells(model).items():
            prompt, decodes = name.split("/")
            wins = (cell["wins"][figure] for figure in FIGURES)
            each = won(cell)
            rows.append([
                f"{title}, {int(prompt):,} beside {decodes}",
                *(f"{win['ratio']:.2f} over {win['against']}, by {win['beside']}" for win in wins),
                ", ".join(map(str, told(list(each.values())))),
                f"**{cell['least']:.2f}**, {min(each, key=lambda size: each[size])}",
                *(f"{best(cell, figure, False):.1f} / {best(cell, figure, True):.1f}" for figure in FIGURES),
            ])  # fmt: skip
    table = [line for line in SECTION.splitlines() if line.startswith("|")][2:]
    assert [[part.strip() for part in line.split("|")[1:-1]] for line in table] == rows


@pytest.mark.parametrize("model", MODELS)
def test_comparisons_and_summaries_are_what_the_benchmark_makes_of_the_points(model: str) -> None:
    """All nine cells of each, and the first run of DeepSeek-V2-Lite's."""
    found = read(model)
    assert found["summary"] == summary(found["cells"])
    assert len(found["cells"]) == 9
    for cell in found["cells"].values():
        assert compare(list(cell["points"].values())) == {name: cell[name] for name in ("frontier", "wins", "least")}


def test_over_some_chunk_size_and_not_over_every_one() -> None:
    """How many cells hold by either rule and figure; by size, what is won and what isn't."""
    small, large = (read(model)["summary"] for model in MODELS)
    assert (small["hold"], large["hold"]) == (9, 7)
    assert "1.5 holds in all nine cells of Qwen2.5-0.5B and in seven of DeepSeek-V2-Lite's** (`hold`)" in WORDS
    assert small["hold_over_every_chunk_size"] == large["hold_over_every_chunk_size"] == 0
    every = [cell for model in MODELS for cell in cells(model).values()]
    holding = [cell for cell in every if max(cell["wins"][figure]["ratio"] for figure in FIGURES) >= WANTED]
    assert all(cell["wins"]["first_token"]["ratio"] >= WANTED for cell in holding), "by the first token in all of these"
    by_gap = [sum(cell["wins"]["gap_p99"]["ratio"] >= WANTED for cell in cells(model).values()) for model in MODELS]
    assert by_gap == [5, 2], "by the gap in five and two"
    assert "by the first token in all of these, by the gap in five and two." in WORDS
    assert all(cell["least"] < 1 for cell in every), "none beaten at all"
    over: list[float] = []
    not_over: list[float] = []
    for name, cell in cells("qwen05b").items():
        up_to = 2112 if name.startswith("8192/") else 1536
        for against, ratio in won(cell).items():
            (over if int(against.split()[1]) <= up_to else not_over).append(ratio)
    assert f"{min(over):.2f} to {max(over):.2f} is won in every cell" in WORDS
    assert f"over larger ones nothing, {min(not_over):.2f} to {max(not_over):.2f}." in WORDS
    assert min(over) > 1 > max(not_over)
    much, some, nothing = shares("qwen05b")
    more, less, none = shares("dsv2lite")
    assert (
        f"Together {much} of {much + some + nothing} chunk sizes by 1.5 and more, {some} by less, {nothing} not at "
        f"all. DeepSeek-V2-Lite: {more} of {more + less + none}, {less} and {none}."
    ) in WORDS


def test_the_ends_of_both_frontiers() -> None:
    """The earliest first token is a mixed step's, the shortest gap of the small model a way beside's."""
    later = [
        [
            100 * (best(cell, "first_token", True) / best(cell, "first_token", False) - 1)
            for cell in cells(model).values()
        ]
        for model in MODELS
    ]  # fmt: skip
    assert (
        f"comes {min(later[0]):.0f} to {max(later[0]):.0f}% later at best, {min(later[1]):.0f} to {max(later[1]):.0f}%"
    ) in WORDS
    gaps = [[best(cell, "gap_p99", True) / best(cell, "gap_p99", False) for cell in cells(m).values()] for m in MODELS]
    assert f"the shortest is {min(gaps[0]):.2f} to {max(gaps[0]):.2f} of what any chunk size has" in WORDS
    at = dict(zip(cells("dsv2lite"), gaps[1], strict=True))
    few = [at.pop(name) for name in ("2048/32", "2048/64")]
    assert (
        f"on DeepSeek-V2-Lite {min(at.values()):.2f} to {max(at.values()):.2f} but beside prompts of 2,048 and 32 and "
        f"64 decodes, where it is {100 * few[0] - 100:.0f} and {few[1] - 1:.0%} longer."
    ) in WORDS


def test_the_larger_model_gains_beside_few_decodes() -> None:
    """By how many decodes there are, and what it was with older kernels."""
    every = {name: [*won(cell).values()] for name, cell in cells("dsv2lite").items()}
    few, many = (
        [ratio for name, ratios in every.items() if name.endswith("/8") is eight for ratio in ratios]
        for eight in (True, False)
    )
    assert (
        f"beside 8 it wins 1.5 and more over {told(few)[0]} of {len(few)} chunk sizes, beside 32 and 64 over "
        f"{told(many)[0]} of {len(many)}. Prompts of 2,048 beside 32 and 64 decodes win at most "
        f"{max(every['2048/32']):.2f} and nothing, {max(every['2048/64']):.2f}."
    ) in WORDS
    assert all(against.startswith("piecewise") for cell in cells("dsv2lite").values() for against in won(cell))
    path = ROOT / "benchmarks" / "results" / "h200" / "raw" / "beside_dsv2lite_first.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    assert before["summary"] == summary(before["cells"])
    assert [told([*won(before["cells"][name]).values()]) for name in ("2048/8", "2048/64")] == [(5, 0, 1), (1, 2, 3)]
    assert [told(every[name]) for name in ("2048/8", "2048/64")] == [(3, 3, 1), (0, 0, 6)]
    alone, now = (
        [half["prompt_us"] / 1e3 for name in ("2048/8", "2048/64") for half in found["cells"][name]["alone"]
         if half["size"] == 2048]
        for found in (before, read("dsv2lite"))
    )  # fmt: skip
    (takes,) = {f"{each:.1f}" for each in now}
    assert f"took {alone[0]:.1f} and {alone[1]:.1f} ms there and takes {takes} now." in WORDS


def test_what_prevents_more() -> None:
    """Shares paid and the host's share, by chunk size."""

    def span(model: str, what: str, sizes: set[int]) -> str:
        found = [
            100 * (half["paid_share"] if what == "paid" else half["host_us"]["beside"] / half["beside_us"])
            for cell in cells(model).values() for half in cell["alone"] if half["size"] in sizes
        ]  # fmt: skip
        return f"{min(found):.0f} to {max(found):.0f}%"

    paid = [span("qwen05b", "paid", {size}) for size in (256, 8192)]
    assert f"pays {paid[0]} with chunks of 256 and {paid[1]} with 8,192" in WORDS
    large = [span("dsv2lite", "paid", sizes) for sizes in ({256, 512}, {4096, 8192})]
    assert (
        f"DeepSeek-V2-Lite {large[0]} with chunks of 256 and 512 and {large[1]} with 4,096 and 8,192."
    ) in WORDS  # fmt: skip
    added, steps = [], []
    for name, cell in cells("dsv2lite").items():
        (half,) = [half for half in cell["alone"] if half["size"] == int(name.partition("/")[0])]
        added.append(best(cell, "first_token", False) - half["prompt_us"] / 1e3)
        steps += [half["decode_us"] / 1e3 for half in cell["alone"]]
    assert (
        f"take {min(added):.1f} to {max(added):.1f} ms more than the prompt alone, where a decode step of "
        f"DeepSeek-V2-Lite takes {min(steps):.1f} to {max(steps):.1f} by itself."
    ) in WORDS
    host = [span("qwen05b", "host", {size}) for size in (8192, 2048, 256)]
    assert f"{host[0]} of such a step with chunks of 8,192, {host[1]} with 2,048, {host[2]} with 256" in WORDS
    host = [span("dsv2lite", "host", {size}) for size in (8192, 2048, 256)]
    assert f"on DeepSeek-V2-Lite {host[0]}, {host[1]} and {host[2]}." in WORDS


def test_how_sure_it_is() -> None:
    """Rounds of a win are within what the page says of the ratio told."""
    off = [
        abs(ratio / row[figure]["ratio"] - 1)
        for model in MODELS for cell in cells(model).values() for row in cell["frontier"]
        for figure in FIGURES if row[figure] for ratio in row[figure]["each_round"]
    ]  # fmt: skip
    assert f"is within {max(off):.0%} of what is told" in WORDS
    rounds = {
        len(point["rounds"]) for model in MODELS for cell in cells(model).values() for point in cell["points"].values()
    }
    assert rounds == {3}


def test_the_guide_has_the_same_in_short() -> None:
    """Over how many chunk sizes, and that no cell has all of them."""
    guide = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").splitlines()
    for begins, model, cells_ in (("decodes beside a prompt of", "qwen05b", "each of 9 cells"),
                                  ("the same, DeepSeek-V2-Lite |", "dsv2lite", "7 of 9 cells")):  # fmt: skip
        (line,) = [line for line in guide if line.startswith(f"| {begins}")]
        much, some, nothing = shares(model)
        assert line.split("|")[3].strip() == (
            f"over {much} of {much + some + nothing} chunk sizes, some in {cells_}; **over every one in none**"
        )


def test_the_readme_has_the_same() -> None:
    """The claim's row has the same chunk sizes, and says where nothing is won."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in readme if line.startswith("| decode steps beside a long prompt")]
    much, some, nothing = shares("qwen05b")
    assert f"over {much} of {much + some + nothing} chunk sizes, in first token or gap" in line
    assert "**over every chunk size in no cell**" in line
    much, some, nothing = shares("dsv2lite")
    assert f"DeepSeek-V2-Lite over {much} of {much + some + nothing}, hardly beside 32 and 64 decodes" in line
    changes = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    assert (
        "some in all nine cells with Qwen2.5-0.5B and seven of nine with DeepSeek-V2-Lite, over every one in" in changes
    )


def test_decodes_beside_take_nearly_what_the_cost_model_says() -> None:
    """`1 + overlap_cost` times their own time beside chunks that aren't long: docs/design.md says how nearly."""
    halves = [alone for model in MODELS for cell in read(model)["cells"].values() for alone in cell["alone"]]
    found = [
        each["decode_slower"] / (1 + each["paid_share"])
        for each in halves if each["decode_half_us"] < 0.95 * each["beside_us"]
    ]  # fmt: skip
    assert len(found) >= 8
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    said = re.search(r"\((\d\.\d+) to (\d\.\d+) of that on an\s+H200: `decode_slower`", text)
    assert said is not None
    assert (f"{min(found):.2f}", f"{max(found):.2f}") == said.groups()
