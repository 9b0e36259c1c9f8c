"""How fast either half of a step goes beside the other, from the cells of `benchmarks.gpu.regret`.

Of each shape with decode rows and a prompt there are cells of one decode graph beside one PIECEWISE prompt, with one to
eight decode steps that begin at once, and of the two in turn, which less the decode step alone is the prompt alone.
Where a shape has several graphs of either, the first are taken. Two speeds are fitted to their cells by least squares
of relative errors, over a grid: both halves go on at constant shares of their own while both run (`kpolicy.overlap`). A
decode step that follows another takes a little less than one alone, which is fitted too. Beside it, the error where
both have the same speed, as tables had it until 2026-11-28.

``one_pair``: how far off cells are in the mean, of prompts of so many tokens, where a model has one pair of numbers,
as a table has for a number of decode rows: the median of its shapes with prompts of 1,000 tokens and more. With one
speed, likewise.

``waits``: cells whose decode steps wait for their place beside the prompt, over the same at once.

Run: ``python -m benchmarks.gpu.halves RAW... --json benchmarks/results/h200/halves.json``
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.command import command_line, input_file, output_file
from benchmarks.gpu.regret import at_once
from kpolicy.overlap import Overlap

SPEEDS = np.linspace(0.3, 1.0, 141)
IN_A_ROW = np.linspace(0.85, 1.0, 16)
"""A decode step behind another, over one alone"""
LONG = 1000
"""Tokens of a long prompt"""
FEWEST = 4
"""Numbers of decode steps that tell two speeds"""
_CELL = re.compile(r"split decode:(FULL \S+ q=1):@0x(\d+)\+prefill:(PIECEWISE \d+t):@([01])x1")


def families(shape: Mapping[str, Any]) -> list[tuple[str, str, float, dict[int, float]]]:
    """What a shape has: decode graph, prompt graph, us of the prompt alone, and of whole steps by decode steps."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for name, cell in shape["cells"].items():
        match = _CELL.fullmatch(name)
        if match:
            steps = int(match[2]) if match[4] == "1" else 0
            found.setdefault((match[1], match[3]), {})[steps] = median(cell["us"])
    return [
        (*graphs, cycles[0] - median(shape["alone_us"]), {steps: us for steps, us in sorted(cycles.items()) if steps})
        for graphs, cycles in found.items()
        if 0 in cycles and len(cycles) > FEWEST
    ]


def fit(decode_us: float, prompt_us: float, cycles: Mapping[int, float]) -> dict[str, float]:
    """The two speeds by which halves take what they took, and how far off the worst number of steps is.

    Args:
        decode_us: a decode step alone.
        prompt_us: the prompt alone.
        cycles: the whole step, by number of decode steps.
    """
    decode, prompt, row = np.meshgrid(SPEEDS, SPEEDS, IN_A_ROW, indexing="ij")
    error = _error(decode, prompt, row * decode_us, prompt_us, cycles)
    best = np.unravel_index(np.argmin(error[0]), decode.shape)
    # Both alike, as a table without a slowdown has them.
    alike = np.where(np.isclose(decode, prompt), error[0], np.inf)
    same = np.unravel_index(np.argmin(alike), decode.shape)
    return {
        "decode_speed": round(float(decode[best]), 3), "prompt_speed": round(float(prompt[best]), 3),
        "in_a_row": round(float(row[best]), 3), "error": round(float(error[1][best]), 4),
        "one_speed": round(float(decode[same]), 3), "one_speed_error": round(float(error[1][same]), 4),
        "overlap_cost": round(float((1 - prompt[best]) / decode[best]), 3),
        "decode_slowdown": round(float(1 / decode[best]), 3),
    }  # fmt: skip


def _error(
    decode: Any, prompt: Any, decode_us: Any, prompt_us: float, cycles: Mapping[int, float]
) -> tuple[Any, Any]:  # fmt: skip
    """(sum of squared relative errors, the largest) at each point of the grid."""
    squares, worst = np.zeros(decode.shape), np.zeros(decode.shape)
    for steps, us in cycles.items():
        decodes_over, prompt_over = steps * decode_us / decode, prompt_us / prompt
        together = np.minimum(decodes_over, prompt_over)
        left = np.maximum(steps * decode_us - decode * together, 0) + np.maximum(prompt_us - prompt * together, 0)
        off = (together + left) / us - 1
        squares, worst = squares + off**2, np.maximum(worst, np.abs(off))
    return squares, worst


def waits(shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Waiting cells over the same at once, where both were measured."""
    return [
        {"cell": name, "over_at_once": round(median(cell["us"]) / median(shape["cells"][at_once(name)]["us"]), 4)}
        for name, cell in shape["cells"].items()
        if at_once(name) != name and at_once(name) in shape["cells"]
    ]


def one_pair(fits: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean errors of each model's cells by one pair of numbers, and by one number, told by its long prompts."""
    found = []
    for model in dict.fromkeys(each["model"] for each in fits):
        mine = [each for each in fits if each["model"] == model]
        long = [each for each in mine if each["prompt_tokens"] >= LONG]
        if not long:
            continue
        cost, slowdown, speed = (
            median(each[name] for each in long) for name in ("overlap_cost", "decode_slowdown", "one_speed")
        )
        pairs = {"one_pair": Overlap.of(cost, slowdown), "one_speed": Overlap.of((1 - speed) / speed)}
        told = {"model": model, "overlap_cost": round(cost, 3), "decode_slowdown": round(slowdown, 3)}
        for kind, some in (("long", long), ("short", [each for each in mine if each["prompt_tokens"] < LONG])):
            for name, overlap in pairs.items():
                off = [
                    abs(
                        overlap.device_us(int(steps) * each["in_a_row"] * each["decode_us"], each["prompt_us"]) / us - 1
                    )
                    for each in some
                    for steps, us in each["cycle_us"].items()
                ]
                told |= {f"{kind}_{name}_error": round(fmean(off), 4)} if off else {}
        found.append(told)
    return found


def rows_of(at: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(fits, waits) of a model's raw results."""
    fits, waiting = [], []
    for key, shape in at["cells"].items():
        decodes, prompt_tokens, kv_tokens, pairs = shape["tokens"]
        told = {
            "model": at["model"], "shape": key, "decodes": decodes, "prompt_tokens": prompt_tokens,
            "decode_kv_tokens": kv_tokens, "prompt_pairs": pairs,
        }  # fmt: skip
        waiting += [told | each for each in waits(shape)]
        if not (decodes and prompt_tokens and shape["alone_us"]):
            continue
        decode_us = median(shape["alone_us"])
        for graph, prompt, prompt_us, cycles in families(shape)[:1]:
            fits.append(
                told
                | {"graphs": [graph, prompt], "decode_us": round(decode_us, 1), "prompt_us": round(prompt_us, 1)}
                | {"cycle_us": {str(steps): us for steps, us in cycles.items()}}
                | fit(decode_us, prompt_us, cycles)
            )
    return fits, waiting


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=input_file, nargs="+", help="raw results of benchmarks.gpu.regret")
    parser.add_argument("--json", type=output_file, help="where the fits are written; else they are printed")
    options = parser.parse_args(argv)
    fits: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for path in options.raw:
        found = rows_of(json.loads(Path(path).read_text()))
        fits += found[0]
        waiting += found[1]
    if not fits and not waiting:
        sys.stderr.write("benchmarks.gpu.halves: no shape has halves beside each other with four numbers of steps\n")
        return 1
    pairs = one_pair(fits)
    result = {
        "command": command_line("benchmarks.gpu.halves", argv), "one_pair": pairs, "fits": fits, "waits": waiting
    }  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    for each in fits:
        print(
            f"{each['model']:9} {each['shape']:22} {each['decodes']:3} decodes, {each['prompt_tokens']:5} tokens, "
            f"{each['prompt_pairs']:9,} pairs: speeds {each['decode_speed']:.2f}, {each['prompt_speed']:.2f}, off by "
            f"at most {each['error']:.1%}; one speed {each['one_speed']:.2f}, {each['one_speed_error']:.1%}"
        )
    for each in pairs:
        print(", ".join(f"{name} {value}" for name, value in each.items()))
    ratios = [each["over_at_once"] for each in waiting if math.isfinite(each["over_at_once"])]
    if ratios:
        print(f"{len(ratios)} cells wait: {min(ratios):.3f} to {max(ratios):.3f} times the same at once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
