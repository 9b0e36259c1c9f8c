"""Decodes beside a long prompt: when the prompt's first token comes, and how far apart the decodes' tokens are.

One prompt arrives while some requests decode. Three ways serve both until the prompt's first token:

- ``piecewise`` and ``full``: chunked prefill. Each step has the decode rows and a chunk, in one mixed PIECEWISE or FULL
  graph of a size. Sizes are two to a power of two, up to one that holds the whole prompt and all decode rows.
- ``beside``: each step replays the decode graph several times on one stream while a chunk runs in pieces on another.
  Chunk sizes are tried, each with the decode steps that about fill its time, fewer and more. Fewer lie evenly over the
  chunk's time, as `auto` lets them (`Launch.wait_share`, by the times of the halves here); in files of before
  2026-11-28 all began at once.

Each way is a point: time to first token, and p99 of the gaps between the decodes' tokens; `rounds` has both of each
round. In a step of several decode steps tokens come evenly until the decode half is ready (device events); the wait for
the other half is in the next gap.

`frontier` has each chunk size that no other one beats in both figures, with the most that a way beside wins over it in
either at no loss in the other: its gap, or its first token, is at most as long. `wins` has the best of these for either
figure, with the ratio of each round; 1.5 in one is wanted. `least` is what is won over the chunk size that is hardest
to beat, in the figure where it is more; 0 where no way beside comes without a loss.

`alone` says what the halves take alone and beside each other: what an overlap can win, and what prevents more.
`paid_share` is how much of the shorter half's time the step takes beyond the longer half; `host_us` is how long the
host takes to launch each.

Cells at the ends of both ranges come first. Run: ``python -m benchmarks.gpu.beside --config FILE --out FILE``
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.common import Results, add_options, config_of, header, host_noise, load_model, opened, ran, steady
from benchmarks.gpu.overlap import decision_of
from kpolicy.heap import frozen_heap

SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Chunks beside decodes"""
BETWEEN = (384, 768, 1536, 3072, 6144)
"""Mixed steps have graphs of these too"""
DECODE_KV = 512
ROUNDS = 4
HOPELESS = 1.5
WANTED = 1.5
FIGURES = ("first_token", "gap_p99")


class Way(NamedTuple):
    """One way to serve, step by step."""

    name: str
    size: int
    """Tokens of a graph: of mixed steps, or of the prompt half"""
    repeat: int
    steps: list[tuple[Any, Any]]
    """(decision, inputs)"""

    @property
    def label(self) -> str:
        return f"{self.name} {self.size}" + (f" x{self.repeat}" if self.name == "beside" else "")


class Bench:
    """A model with decode, mixed and PIECEWISE graphs.

    Args:
        model: runs.
        sizes: tokens of graphs for mixed steps and for chunks, ascending.
        decodes: rows of decode graphs.
    """

    def __init__(self, model: Any, sizes: Sequence[int], decodes: Sequence[int]) -> None:
        from kpolicy.ladders import CaptureSizes, plan_keys
        from kpolicy.settings import Settings

        self.model = model
        settings = Settings(max_num_reqs=model.max_num_reqs, max_num_tokens=max(sizes))
        self.executor, registry = opened(model)
        keys = plan_keys(CaptureSizes(tuple(decodes), tuple(sizes), tuple(sizes)), model.support.claims, settings)
        registry.plan(keys)
        self.executor.capture(keys)
        self.keys = registry.captured()
        self.failed = {str(key): why[:200] for key, why in self.executor.capture_errors.items()}
        self._alone: dict[tuple[int, int], dict[str, Any]] = {}

    def key(self, kind: str, tokens: int) -> Any:
        """The smallest graph of a kind, ``decode``, ``full`` or ``piecewise``, that holds the tokens; None without."""
        fitting = [
            key
            for key in self.keys
            if key.num_tokens >= tokens
            and (key.decode_only if kind == "decode" else key.part.value == kind and not key.decode_only)
        ]
        return min(fitting, key=lambda key: key.num_tokens, default=None)

    def has(self, kind: str, tokens: int) -> bool:
        """Whether there is a graph of just that size."""
        key = self.key(kind, tokens)
        return key is not None and key.num_tokens == tokens

    def inputs(self, decodes: int, new: int, context: int, steps: int = 1) -> Any:
        from benchmarks.gpu.regret import inputs_of

        chunks = [(new, context)] if new else []
        return inputs_of({"decodes": [DECODE_KV] * decodes, "chunks": chunks, "steps": steps}, self.model)

    def mixed(self, kind: str, size: int, decodes: int, prompt: int) -> Way | None:
        """Chunked prefill in graphs of that size."""
        from kpolicy.decision import Decision, Launch
        from kpolicy.modes import Mode, Rows
        from kpolicy.reasons import Reason

        steps, done = [], 0
        while done < prompt:
            new = min(size - decodes, prompt - done)
            key = self.key(kind, new + decodes) if new > 0 else None
            if key is None:
                return None
            inputs = self.inputs(decodes, new, done)
            steps.append((Decision(Mode(kind), (Launch(Rows.ALL, key),), Reason.GRAPH_FITS), inputs))
            done += new
        return Way(kind, size, 1, steps)

    def beside(self, size: int, repeat: int, decodes: int, prompt: int) -> Way | None:
        """Several decode steps beside each chunk, which lie evenly where they don't fill its time."""
        told = self.halves(decodes, size)
        decode_us = told["decode_half_us"] / told["repeat"]
        chunk_us = told["prompt_us"] + told["paid_share"] * repeat * told["decode_us"]
        wait = int((1 - repeat * decode_us / chunk_us) * 16) / 16
        decode, steps, done = self.key("decode", decodes), [], 0
        while done < prompt:
            new = min(size, prompt - done)
            pieces = self.key("piecewise", new)
            if pieces is None or decode is None:
                return None
            # A last, smaller chunk has room for fewer steps.
            count = max(1, round(repeat * new / size))
            decision = decision_of(decode, pieces, count, beside=True, wait_share=wait if wait > 0 else None)
            steps.append((decision, self.inputs(decodes, new, done, count)))
            done += new
        return Way("beside", size, repeat, steps)

    def serve(self, way: Way) -> tuple[float, list[float]]:
        """(microseconds to the first token, gaps between the decodes' tokens)."""
        from kpolicy.modes import Rows

        first, gaps, waited = 0.0, [], 0.0
        for decision, inputs in way.steps:
            us, outputs = ran(self.executor, decision, inputs)
            first += us
            if len(decision.launches) == 1:
                gaps.append(us)
                continue
            repeat = decision.launches[0].repeat
            decode_us = min(outputs.ready_us[Rows.DECODE], us)
            gaps += [waited + decode_us / repeat, *[decode_us / repeat] * (repeat - 1)]
            waited = us - decode_us
        if waited:
            # The next token comes a decode step later.
            gaps.append(waited + gaps[-1])
        return first, gaps

    def halves(self, decodes: int, size: int) -> dict[str, Any]:
        """`alone` with as many decode steps as about fill the chunk's time, which each prompt has the same."""
        if (decodes, size) not in self._alone:
            told = self.alone(decodes, size, 1)
            fill = max(1, round(told["prompt_us"] / told["decode_us"]))
            self._alone[decodes, size] = self.alone(decodes, size, fill)
        return self._alone[decodes, size]

    def alone(self, decodes: int, size: int, repeat: int) -> dict[str, Any]:
        """What the halves take alone, and beside each other."""
        from kpolicy.decision import Decision, Launch
        from kpolicy.modes import Mode, Rows
        from kpolicy.reasons import Reason

        decode, pieces = self.key("decode", decodes), self.key("piecewise", size)
        steps = {
            "decode": (Decision(Mode.FULL, (Launch(Rows.ALL, decode),), Reason.GRAPH_FITS), self.inputs(decodes, 0, 0)),
            "prompt": (
                Decision(Mode.PIECEWISE, (Launch(Rows.ALL, pieces),), Reason.GRAPH_FITS), self.inputs(0, size, 0)
            ),
            "beside": (
                decision_of(decode, pieces, repeat, beside=True), self.inputs(decodes, size, 0, repeat)
            ),
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in (*steps, "decode_half")}
        for _ in range(6):
            for name, step in steps.items():
                us, outputs = ran(self.executor, *step)
                times[name].append(us)
                if name == "beside":
                    times["decode_half"].append(outputs.ready[0].us)
        found: dict[str, Any] = {f"{name}_us": steady(each[1:]) for name, each in times.items()}
        short, long = sorted((found["prompt_us"], repeat * found["decode_us"]))
        return found | {
            "size": size, "repeat": repeat, "paid_share": round((found["beside_us"] - long) / short, 3),
            "host_us": {name: steady([self.launching_us(*step) for _ in range(4)][1:]) for name, step in steps.items()},
            "decode_slower": round(found["decode_half_us"] / repeat / found["decode_us"], 3),
            "prompt_slower": round(found["beside_us"] / found["prompt_us"], 3),
        }  # fmt: skip

    def launching_us(self, decision: Any, inputs: Any) -> float:
        """Microseconds that the host takes to launch a step."""
        start = time.perf_counter()
        outputs = self.executor.run(decision, inputs)
        taken = (time.perf_counter() - start) * 1e6
        for event in outputs.ready:
            event.wait()
        return taken


def mixed_sizes(chunks: Sequence[int], prompts: Sequence[int], decodes: Sequence[int]) -> list[int]:
    """Tokens of mixed graphs, ascending: of each chunk size, between them, and of whole prompts with all rows."""
    longest = max(prompts) + max(decodes)
    between = [size for size in BETWEEN if min(chunks) < size < longest]
    return sorted({*chunks, *between, *(prompt + max(decodes) for prompt in prompts)})


def mixed_ways(bench: Bench, decodes: int, prompt: int, sizes: Sequence[int]) -> list[Way]:
    """Chunked prefill in graphs of each size, up to the first that takes the prompt in one step."""
    found = []
    for kind in ("piecewise", "full"):
        for size in sizes:
            way = bench.mixed(kind, size, decodes, prompt)
            if way is not None:
                found.append(way)
                if len(way.steps) == 1:
                    break
    return found


def measure(bench: Bench, prompt: int, decodes: int, sizes: Sequence[int], chunks: Sequence[int], rounds: int) -> Any:
    """One cell: every way's point, and how the ways compare.

    Args:
        bench: serves.
        prompt: its tokens.
        decodes: rows beside it.
        sizes: of mixed steps, ascending.
        chunks: of the prompt beside decodes.
        rounds: how often each way serves both; the first time doesn't count.
    """
    ways: list[Way | None] = [*mixed_ways(bench, decodes, prompt, sizes)]
    profile: list[dict[str, Any]] = []
    # Sizes whose graph memory didn't hold are in the file's `failed`.
    fitting = [each for each in chunks if each <= prompt] if bench.has("decode", decodes) else []
    for size in (each for each in fitting if bench.has("piecewise", each)):
        profile.append(bench.halves(decodes, size))
        repeats = {max(1, round(profile[-1]["repeat"] * share)) for share in (0.4, 0.7, 1.0, 1.4)}
        ways += [bench.beside(size, repeat, decodes, prompt) for repeat in sorted(repeats)]
    kept = [way for way in ways if way is not None]
    firsts: dict[str, list[float]] = {way.label: [] for way in kept}
    gaps: dict[str, list[float]] = {way.label: [] for way in kept}
    singly: dict[str, list[list[float]]] = {way.label: [] for way in kept}
    for round_ in range(rounds):
        for way in kept:
            first, each = bench.serve(way)
            if round_:
                firsts[way.label].append(first)
                gaps[way.label] += each
                singly[way.label].append([round(first, 1), round(_p99(each), 1)])
        if round_ == 1:
            kept = _hopeful(kept, firsts, gaps)
    points = {
        way.label: {
            "way": way.name, "size": way.size, "repeat": way.repeat, "steps": len(way.steps),
            "first_token_us": steady(firsts[way.label]), "gap_p99_us": round(_p99(gaps[way.label]), 1),
            "rounds": singly[way.label],
        }
        for way in kept
    }  # fmt: skip
    return {"points": points, "alone": profile, **compare(list(points.values()))}


def _hopeful(ways: list[Way], firsts: dict[str, list[float]], gaps: dict[str, list[float]]) -> list[Way]:
    """Ways but those that another beats by far in both.

    Only a mixed one takes a mixed one's place: they are what the others are compared with.
    """
    at = {way.label: (firsts[way.label][0], _p99(gaps[way.label])) for way in ways}
    mixed = [at[way.label] for way in ways if way.name != "beside"]
    return [
        way
        for way in ways
        if not any(
            first * HOPELESS < at[way.label][0] and gap * HOPELESS < at[way.label][1]
            for first, gap in (at.values() if way.name == "beside" else mixed)
        )
    ]


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def compare(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The most that a point beside wins over each chunk size in either figure at no loss in the other.

    Args:
        points: each with its figures in microseconds, and the same of each round (`rounds`).

    Returns:
        `frontier`, `wins` and `least`, as the module says; `wins` is None where every way beside was given up, as
        another is far better in both, or where there is nothing to compare.
    """
    mixed = [point for point in points if point["way"] != "beside"]
    besides = [point for point in points if point["way"] == "beside"]
    if not mixed or not besides:
        return {"frontier": [], "wins": None, "least": None}
    frontier = []
    for chunked in mixed:
        if any(_beats(other, chunked) for other in mixed):
            continue
        row: dict[str, Any] = {"against": f"{chunked['way']} {chunked['size']}"}
        for i, figure in enumerate(FIGURES):
            mine, other = f"{figure}_us", f"{FIGURES[1 - i]}_us"
            as_good = [each for each in besides if each[other] <= chunked[other]]
            best = min(as_good, key=lambda each: float(each[mine]), default=None)
            row[figure] = best and {
                "ratio": round(chunked[mine] / best[mine], 3), "beside": f"{best['size']} x{best['repeat']}",
                "each_round": [
                    round(a[i] / b[i], 3) for a, b in zip(chunked["rounds"], best["rounds"], strict=True)
                ],
            }  # fmt: skip
        frontier.append(row)
    won = [[row[figure]["ratio"] if row[figure] else 0.0 for figure in FIGURES] for row in frontier]
    wins = {}
    for i, figure in enumerate(FIGURES):
        row = frontier[max(range(len(frontier)), key=lambda place: won[place][i])]
        wins[figure] = {"against": row["against"], **row[figure]} if row[figure] else None
    return {"frontier": frontier, "wins": wins, "least": min(map(max, won))}


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a point is no worse in both figures, and better in one."""
    pairs = [(one[f"{figure}_us"], other[f"{figure}_us"]) for figure in FIGURES]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def summary(cells: dict[str, Any]) -> dict[str, Any]:
    """Over all cells: in how many either figure is `WANTED` times better at no loss, and the medians of what is won."""
    wins = [(cell["wins"] or {}).get for cell in cells.values()]
    of = {name: [found["ratio"] if (found := win(name)) else 0.0 for win in wins] for name in FIGURES}
    best = [max(each) for each in zip(*of.values(), strict=True)]
    return {
        "cells": len(cells), "wanted": WANTED, "hold": sum(each >= WANTED for each in best),
        "hold_over_every_chunk_size": sum((cell["least"] or 0.0) >= WANTED for cell in cells.values()),
        **{name: round(statistics.median(each), 3) for name, each in of.items() if each},
    }  # fmt: skip


def ends_first(prompts: Sequence[int], decodes: Sequence[int]) -> list[tuple[int, int]]:
    """(prompt, decodes) of every cell: the ends of both ranges before what is between, by the options' order."""
    places = [(i, j) for i in range(len(prompts)) for j in range(len(decodes))]
    return [(prompts[i], decodes[j]) for i, j in sorted(places, key=lambda place: (max(place), place))]


def main(argv: list[str] | None = None) -> int:
    """Measure the cells that the file doesn't have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=400.0)
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 8192, 4096])
    parser.add_argument("--decodes", type=int, nargs="*", default=[8, 64, 32])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(argv)
    if options.tiny:
        options.prompts, options.decodes = [64], [4]

    import torch

    config = config_of(options)
    # The file's clock has the model's loading in it.
    results = Results(options.out, header(options, "beside", argv))
    chunks = (16, 32, 64) if options.tiny else tuple(size for size in SIZES if size <= max(options.prompts))
    sizes = mixed_sizes(chunks, options.prompts, options.decodes)
    model = load_model(
        config, options, kv_tokens=4096 if options.tiny else 1 << 16, max_model_len=600 if options.tiny else 12_288,
        max_num_reqs=max(options.decodes) + 1,
    )  # fmt: skip
    results.data["host_noise"] = host_noise()
    with torch.no_grad():
        bench = Bench(model, sizes, sorted(options.decodes))
        results.data["failed"] = bench.failed
        print(f"{model!r}: {len(bench.keys)} graphs, {results.elapsed():.0f} s, {bench.failed}", flush=True)
        for prompt, decodes in ends_first(options.prompts, options.decodes):
            name = f"{prompt}/{decodes}"
            if name in results.cells or results.elapsed() > options.seconds:
                continue
            with frozen_heap():
                cell = measure(bench, prompt, decodes, sizes, chunks, options.rounds)
            # Before the cell is written: a run that is cut off leaves the summary of all it has.
            results.data["summary"] = summary({**results.cells, name: cell})
            results.put(name, cell)
            print(name, json.dumps(cell["wins"]), f"least {cell['least']}, {results.elapsed():.0f} s", flush=True)
    results.data["summary"] = summary(results.cells)
    results.write()
    print(json.dumps(results.data["summary"]), flush=True)
    bench.executor.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
