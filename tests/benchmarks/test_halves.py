"""How fast halves go beside each other, by cells of the regret benchmark."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from benchmarks.gpu import halves
from kpolicy.costs import EARLY
from kpolicy.overlap import Overlap
from kpolicy.profiles import load_profile

DECODE, PROMPT = "FULL 2t/2r q=1", "PIECEWISE 512t"


def shape(decode_us: float, prompt_us: float, overlap: Overlap, steps: tuple[int, ...]) -> dict[str, object]:
    """Cells of halves that overlap so, three samples each."""
    times = {f"split decode:{DECODE}:@0x1+prefill:{PROMPT}:@0x1": decode_us + prompt_us}
    for count in steps:
        us = overlap.device_us(count * decode_us, prompt_us)
        times[f"split decode:{DECODE}:@0x{count}+prefill:{PROMPT}:@1x1"] = us
        times[f"split decode:{DECODE}:@0x{count}~0.25+prefill:{PROMPT}:@1x1"] = 1.05 * us
        # Of other graphs, or eager, and so of another prompt's time.
        times[f"split decode:FULL 4t/4r q=1:@0x{count}+prefill:{PROMPT}:@1x1"] = 3 * us
        times[f"split decode:{DECODE}:@0x{count}+prefill:eager:@1x1"] = 2 * us
    cells = {name: {"steps": 1, "us": [0.9 * us, us, 1.1 * us]} for name, us in times.items()}
    return {"tokens": [2, 500, 900, 125_000], "alone_us": [decode_us] * 3, "cells": cells, "picks": {}}


@pytest.mark.parametrize(("decode_speed", "prompt_speed"), [(0.55, 0.75), (0.7, 0.65), (0.4, 0.84), (0.6, 0.6)])
def test_the_speeds_come_back(decode_speed: float, prompt_speed: float) -> None:
    overlap = Overlap.of((1 - prompt_speed) / decode_speed, 1 / decode_speed)
    at = {"model": "m", "cells": {"code x1/0": shape(2660.0, 7918.0, overlap, (1, 2, 3, 4, 6, 8))}}
    (found,), waits = halves.rows_of(at)
    assert (found["decode_speed"], found["prompt_speed"]) == (decode_speed, prompt_speed)
    assert (found["in_a_row"], found["error"]) == (1.0, pytest.approx(0.0, abs=1e-3))
    assert found["overlap_cost"] == pytest.approx(overlap.cost, abs=1e-3)
    assert found["decode_slowdown"] == pytest.approx(overlap.slowdown, abs=1e-3)
    assert (found["decode_us"], found["prompt_us"]) == (2660.0, 7918.0)
    assert (found["one_speed_error"] > 0.01) is (abs(decode_speed - prompt_speed) > 0.06)
    assert [each["over_at_once"] for each in waits] == [1.05] * 6


def test_one_pair_is_told_by_long_prompts() -> None:
    """Shapes that go by the same two numbers are told without an error by them, and not by one number."""
    overlap = Overlap.of(0.4, 1.8)
    cells = {}
    for place, (prompt_us, tokens) in enumerate(((7918.0, 2000), (3000.0, 300), (6000.0, 1200))):
        cells[f"code x1/{place}"] = shape(2660.0, prompt_us, overlap, (1, 2, 4, 8)) | {"tokens": [2, tokens, 9, 9]}
    fits, _ = halves.rows_of({"model": "m", "cells": cells})
    (found,) = halves.one_pair(fits)
    assert (found["overlap_cost"], found["decode_slowdown"]) == (
        pytest.approx(0.4, abs=0.02),
        pytest.approx(1.8, abs=0.02),
    )
    assert max(found["long_one_pair_error"], found["short_one_pair_error"]) < 0.01 < found["long_one_speed_error"]
    assert halves.one_pair([each | {"prompt_tokens": 10} for each in fits]) == []


def test_few_numbers_of_steps_tell_nothing() -> None:
    overlap = Overlap.of(0.45, 1.8)
    told, waits = halves.rows_of({"model": "m", "cells": {"code x1/0": shape(2660.0, 7918.0, overlap, (1, 2, 3))}})
    assert told == []
    assert len(waits) == 3


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw, out = tmp_path / "raw.json", tmp_path / "halves.json"
    raw.write_text(
        json.dumps({"model": "m", "cells": {"code x1/0": shape(2660.0, 7918.0, Overlap.of(0.45, 1.8), (1, 2, 4, 8))}})
    )
    assert halves.main([str(raw), "--json", str(out)]) == 0
    assert "4 cells wait: 1.050 to 1.050 times the same at once" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["fits"]) == 1
    raw.write_text(json.dumps({"model": "m", "cells": {}}))
    assert halves.main([str(raw)]) == 1
    assert "no shape has halves beside each other" in capsys.readouterr().err


def test_no_grid_is_coarser_than_what_it_tells() -> None:
    assert max(b - a for a, b in pairwise(halves.SPEEDS)) == pytest.approx(0.005)


ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "h200" / "halves.json").read_text())
NAMES = {
    "qwen05b": "Qwen2.5-0.5B", "dsv2lite": "DeepSeek-V2-Lite", "llama1b": "Llama-3.2-1B", "llama8b": "Llama-3.1-8B"
}  # fmt: skip


def raw(name: str) -> Any:
    """A run's raw file."""
    return json.loads((ROOT / "benchmarks" / "results" / "h200" / "raw" / f"regret_{name}.json").read_text())


def test_the_page_has_what_calibration_found() -> None:
    """Its pairs beside the middle of the shapes, and how far off cells are by them."""
    page = (ROOT / "docs" / "measured_gpu.md").read_text(encoding="utf-8")
    longer = {}
    for model in NAMES:
        costs = load_profile(ROOT / f"benchmarks/results/h200/raw/profile_regret_{model}.json").costs
        mine = [each for each in RESULT["fits"] if each["model"] == model]
        (usual,) = [each for each in RESULT["one_pair"] if each["model"] == model]
        off: dict[bool, list[float]] = {True: [], False: []}
        for each in mine:
            overlap = costs.overlap_of(each["decodes"])
            for steps, us in each["cycle_us"].items():
                told = overlap.device_us(int(steps) * each["in_a_row"] * each["decode_us"], each["prompt_us"])
                off[each["prompt_tokens"] >= halves.LONG].append(told / us - 1)
        pairs = [(pair.cost, pair.slowdown) for pair in map(costs.overlap_of, (1, 8, 32))]
        pairs.append((usual["overlap_cost"], usual["decode_slowdown"]))
        cells = [NAMES[model], *(f"{cost:.2f} / {slowdown:.2f}" for cost, slowdown in pairs)]
        cells += [f"{fmean(map(abs, off[kind])):.1%}" for kind in (True, False)]
        assert "| " + " | ".join(cells) + " |" in page
        longer[model] = f"{-fmean(off[True]):.1%}"
    small, mixture, dense, large = longer.values()
    assert (
        f"Cells of long prompts are {small} (0.5B), {mixture} (DeepSeek-V2-Lite), {dense} (1B) and {large} (8B) longer "
        "in the mean than told so."
    ) in page


def test_the_page_has_the_result() -> None:
    """Each row's ranges, and what the text says of all."""
    page = (ROOT / "docs" / "measured_gpu.md").read_text(encoding="utf-8")
    text = page[page.index("### Halves beside each other") :].partition("\n### ")[0]
    fits = RESULT["fits"]
    for model, name in NAMES.items():
        for kind, many in (("1,000 tokens and more", True), ("fewer", False)):
            mine = [each for each in fits if each["model"] == model and (each["prompt_tokens"] >= 1000) is many]
            ranges = [
                f"{min(each[field] for each in mine):.2f} to {max(each[field] for each in mine):.2f}"
                for field in ("decode_speed", "prompt_speed", "decode_slowdown", "overlap_cost")
            ]
            worst = [f"{max(each[field] for each in mine):.1%}" for field in ("error", "one_speed_error")]
            cells = [f"{name}, {kind}", str(len(mine)), *ranges[:2], *worst, *ranges[2:]]
            assert "| " + " | ".join(cells) + " |" in text
    assert f"within {max(each['error'] for each in fits):.1%} everywhere" in text
    assert f"off by up to {max(each['one_speed_error'] for each in fits):.1%}" in text
    stray = {
        ("llama8b", "code x1/38"): "the 8B's code",
        ("dsv2lite", "conversation x1/39"): "DeepSeek-V2-Lite's conversation",
    }
    told = [
        f"shape {each['shape'].partition('/')[2]} of {stray[each['model'], each['shape']]} trace "
        f"({each['decode_speed']:.2f} and {each['prompt_speed']:.2f})"
        for each in sorted(fits, key=lambda each: -each["decode_speed"]) if (each["model"], each["shape"]) in stray
    ]  # fmt: skip
    assert f"such as {' and '.join(told)}." in text
    pairs = {each["model"]: each for each in RESULT["one_pair"]}
    long, long_one, short, short_one = (
        {model: each[f"{kind}_error"] for model, each in pairs.items()}
        for kind in ("long_one_pair", "long_one_speed", "short_one_pair", "short_one_speed")
    )
    small, dense = short["qwen05b"], short["llama1b"]
    spans = [f"{min(each.values()):.1%} to {max(each.values()):.1%}" for each in (long, long_one, short, short_one)]
    spans = [each.replace("% to", " to") for each in spans]
    assert f"cells of long prompts are off by {spans[0]} in the mean, where one number for both has {spans[1]};" in text
    assert f"**those of shorter ones by {spans[2]}, where that has {spans[3]}**" in text
    assert f"most on Qwen2.5-0.5B and Llama-3.2-1B ({100 * small:.1f} and {dense:.1%})" in text
    assert {*sorted(short, key=short.__getitem__)[2:]} == {"qwen05b", "llama1b"}
    waits = [each["over_at_once"] for each in RESULT["waits"]]
    assert f"took {min(waits):.3f} to {max(waits):.3f} times as long as the same at once in {len(waits)} cells" in text
    before = [
        each["over_at_once"] for name in ("qwen05b_fifth", "dsv2lite_third") for each in halves.rows_of(raw(name))[1]
    ]
    assert f"it was {min(before):.3f} to {max(before):.3f} in {len(before)} cells (b0e1207)" in text
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    slow = [each["decode_slowdown"] for each in RESULT["one_pair"]]
    alike = [
        median(1 / each["one_speed"] for each in fits if each["model"] == model and each["prompt_tokens"] >= 1000)
        for model in NAMES
    ]
    assert f"decode steps took {min(slow):.1f} to {max(slow):.1f} times as long" in " ".join(design.split())
    says = [1 + each["overlap_cost"] for each in RESULT["one_pair"]]
    assert (
        f"where that says {min(says):.1f} to {max(says):.1f} ({min(alike):.1f} to {max(alike):.1f} by the one number "
        "that fits both halves best), so that"
    ) in " ".join(design.split())


def test_the_result_is_what_the_cells_say() -> None:
    """One model's raw file again: the same fits and waits."""
    at = raw("llama8b")
    at["cells"] = {key: cell for key, cell in at["cells"].items() if key.startswith("code x1/")}
    fits, waits = halves.rows_of(at)
    of_code = [
        [each for each in RESULT[name] if each["model"] == "llama8b" and each["shape"].startswith("code x1/")]
        for name in ("fits", "waits")
    ]
    assert [fits, waits] == of_code
    assert fits
    assert waits


def test_how_many_shapes_the_margin_of_waiting_steps_covers() -> None:
    """`kpolicy.costs.EARLY` says so."""
    usual = {each["model"]: each["decode_slowdown"] for each in RESULT["one_pair"]}
    times = [
        each["decode_slowdown"] / usual[each["model"]]
        for each in RESULT["fits"]
        if each["prompt_tokens"] >= halves.LONG
    ]
    said = " ".join((ROOT / "kpolicy" / "costs.py").read_text(encoding="utf-8").split())
    waits = [each["over_at_once"] for each in RESULT["waits"]]
    assert (
        f"Steps that waited by it took {min(waits):.3f} to {max(waits):.3f} times as long as the same at once" in said
    )
    assert f"Of {len(times)} shapes with long prompts, of four models" in said
    late = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"][sum(each > EARLY for each in times)]
    assert f"by more than {EARLY} times their model's median in {late}, by up to {max(times):.2f} times" in said
