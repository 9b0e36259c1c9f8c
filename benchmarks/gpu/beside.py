"""Decodes beside a long prompt: when the prompt's first token comes, and how far apart the decodes' tokens are.

One prompt arrives while some requests decode. Three ways serve both until the prompt's first token:

- ``piecewise`` and ``full``: chunked prefill. Each step has the decode rows and a chunk, in one mixed PIECEWISE or FULL
  graph of a size; every size is tried, so the best one is among them.
- ``beside``: each step replays the decode graph several times on one stream while a chunk runs in pieces on another.
  Chunk sizes are tried, each with the decode steps that about fill its time, fewer and more.

Each way is a point: time to first token, and p99 of the gaps between the decodes' tokens; `rounds` has both of each
round. In a step of several decode steps tokens come evenly until the decode half is ready (device events); the wait for
the other half is in the next gap. A way beside is compared with every chunk size: `first_token` is the shortest first
token of those with a gap as short (within 2%), over its own; `gap` likewise. 1.5 in one at no loss in the other is
wanted.

`alone` says what the halves take alone and beside each other: what an overlap can win, and what prevents more.

Run: ``python -m benchmarks.gpu.beside --config FILE --out FILE [--prompts 2048 8192] [--decodes 8 64]``
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.common import Results, add_options, config_of, header, host_noise, load_model, opened, ran, steady
from benchmarks.gpu.overlap import decision_of
from kpolicy.heap import frozen_heap

SIZES = (256, 512, 1024, 2048, 4096, 8192)
DECODE_KV = 512
ROUNDS = 4
HOPELESS = 1.5
EQUAL = 1.02


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
    """A model with decode, mixed and PIECEWISE graphs."""

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
        """Several decode steps beside each chunk."""
        decode, steps, done = self.key("decode", decodes), [], 0
        while done < prompt:
            new = min(size, prompt - done)
            pieces = self.key("piecewise", new)
            if pieces is None or decode is None:
                return None
            # A last, smaller chunk has room for fewer steps.
            count = max(1, round(repeat * new / size))
            steps.append(
                (decision_of(decode, pieces, count, beside=True), self.inputs(decodes, new, done, count))
            )  # fmt: skip
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

    def alone(self, decodes: int, size: int, repeat: int) -> dict[str, float]:
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
        found = {f"{name}_us": steady(each[1:]) for name, each in times.items()}
        return found | {
            "size": size, "repeat": repeat,
            "decode_slower": round(found["decode_half_us"] / repeat / found["decode_us"], 3),
            "prompt_slower": round(found["beside_us"] / found["prompt_us"], 3),
        }  # fmt: skip


def measure(bench: Bench, prompt: int, decodes: int, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """One cell: every way's point, and how the ways compare."""
    ways = [bench.mixed(kind, size, decodes, prompt) for kind in ("piecewise", "full") for size in sizes]
    profile: list[dict[str, float]] = []
    # Sizes whose graph memory didn't hold are in the file's `failed`.
    fitting = [each for each in sizes if each <= prompt] if bench.has("decode", decodes) else []
    halves = [each for each in fitting if bench.has("piecewise", each)]
    for size in halves:
        told = bench.alone(decodes, size, 1)
        fill = max(1, round(told["prompt_us"] / told["decode_us"]))
        profile.append(bench.alone(decodes, size, fill))
        ways += [
            bench.beside(size, repeat, decodes, prompt)
            for repeat in sorted({max(1, round(fill * share)) for share in (0.4, 0.7, 1.0, 1.4)})
        ]
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
    """The most that a point beside wins in either over every mixed point that is as good in the other.

    None where every way beside was given up, as another is far better in both, or where there is nothing to compare.
    """
    mixed = [point for point in points if point["way"] != "beside"]
    if not mixed:
        return {"wins": None}
    best: dict[str, Any] = {}
    for mine, other in (("first_token_us", "gap_p99_us"), ("gap_p99_us", "first_token_us")):
        found = []
        for point in points:
            if point["way"] == "beside":
                rivals = [each[mine] for each in mixed if each[other] <= EQUAL * point[other]]
                # Where no chunk size is as good in the other, the comparison is with the best there is in this one.
                ratio = min(rivals or [each[mine] for each in mixed]) / point[mine]
                found.append((ratio, f"{point['size']} x{point['repeat']}", bool(rivals)))
        if not found:
            return {"wins": None}
        ratio, label, rivalled = max(found)
        best[mine.removesuffix("_us")] = {"ratio": round(ratio, 3), "beside": label, "as_good_in_the_other": rivalled}
    return {"wins": best}


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
    sizes = (16, 32, 64) if options.tiny else tuple(size for size in SIZES if size <= max(options.prompts))
    model = load_model(
        config, options, kv_tokens=4096 if options.tiny else 1 << 16, max_model_len=600 if options.tiny else 12_288,
        max_num_reqs=max(options.decodes) + 1,
    )  # fmt: skip
    results = Results(options.out, header(options, "beside", argv))
    results.data["host_noise"] = host_noise()
    with torch.no_grad():
        bench = Bench(model, sizes, sorted(options.decodes))
        results.data["failed"] = bench.failed
        print(f"{model!r}: {len(bench.keys)} graphs, {results.elapsed():.0f} s, {bench.failed}", flush=True)
        for prompt in options.prompts:
            for decodes in options.decodes:
                name = f"{prompt}/{decodes}"
                if name in results.cells or results.elapsed() > options.seconds:
                    continue
                with frozen_heap():
                    results.put(name, measure(bench, prompt, decodes, sizes, options.rounds))
                print(name, json.dumps(results.cells[name]["wins"]), f"{results.elapsed():.0f} s", flush=True)
    wins = [cell["wins"] for cell in results.cells.values() if cell["wins"]]
    results.data["summary"] = {
        name: round(statistics.median(win[name]["ratio"] for win in wins), 3) for name in ("first_token", "gap_p99")
    } if wins else {}  # fmt: skip
    results.write()
    bench.executor.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
