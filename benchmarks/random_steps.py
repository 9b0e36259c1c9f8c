"""Random steps of every model family in every mode and by every policy, each held bit for bit to eager.

A step is a random batch (of the real batcher, or with drafts of 1 to 3 tokens). Every other step runs as a policy
decides it, each built-in policy in turn, replicas included, from the graphs that it plans itself; the others run in the
way that was taken least so far among all legal ones: every mode, form of SPLIT, kind and size of graph. Logits, sampled
tokens and written KV must equal, to the bit, those of the same launches run eagerly, alone, at the padded shapes that
the graphs have; KV of no row of the step may change; the reserved slot holds NaN whenever attention reads.

Steps come in slices, family by family in turn. A result file holds the slices that are done, and a run goes on from
there. Shards share the slices out, one process each, and are merged afterwards.

Run from the repository root::

    OMP_NUM_THREADS=1 python -m benchmarks.random_steps --date 2026-01-01 [--steps 100000] [--seconds 600]
    OMP_NUM_THREADS=1 python -m benchmarks.random_steps --date 2026-01-01 --shard 1/16 --result shard-1.json
    python -m benchmarks.random_steps --merge shard-*.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import input_file, output_file

RESULT = Path(__file__).parent / "results" / "random_steps.json"
SLICE = 250
SAME = ("asked_steps", "slice_steps", "versions", "device", "date")
"""What shards of one result have in common."""


def slices_of(steps: int, slice_steps: int, shard: int, shards: int) -> range:
    """The slices that a shard runs, numbered from 0 over all; `shard` counts from 1."""
    return range(shard - 1, -(-steps // slice_steps), shards)


def place_of(number: int, families: Sequence[str]) -> tuple[str, int]:
    """(the family of a slice, which of the family's slices it is)."""
    return families[number % len(families)], number // len(families)


def run_slice(number: int, families: Sequence[str], slice_steps: int) -> Any:
    """One slice, as the `Checker` that held it to eager. Its seed is its number, so it can be run again."""
    from tests.executors_launcher.checker import Checker, batcher_steps, drafting_steps, load_family, opened

    family, place = place_of(number, families)
    model = load_family(family)
    executor, registry = opened(model)
    checker = Checker(executor, model)
    source = drafting_steps if place % 2 else batcher_steps
    model.clear_kv()
    try:
        for _ in source(checker, registry.captured(), slice_steps, seed=number):
            pass
    except Exception as error:  # noqa: BLE001 - whatever a step raised is this benchmark's result
        checker.failure = f"step {sum(checker.steps.values())}: {type(error).__name__}: {error}"
    executor.release()
    return checker


def empty(options: argparse.Namespace, shard: str) -> dict[str, Any]:
    """A result without steps."""
    import torch
    import transformers

    import kpolicy

    return {
        "asked_steps": options.steps,
        "slice_steps": options.slice_steps,
        "date": options.date,
        "versions": {
            "kpolicy": kpolicy.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": {"machine": platform.machine(), "cores": os.cpu_count(), "threads": 1},
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.random_steps "
        f"--date {options.date} --steps {options.steps}" + (f" --shard {shard}" if shard != "1/1" else ""),
        "shard": shard,
        "slices": [],
        "steps": {},
        "rows_compared": 0,
        "ways": {},
        "policies": {},
        "differences": [],
        "seconds": 0.0,
    }  # fmt: skip


def add(result: dict[str, Any], part: dict[str, Any]) -> None:
    """Add the counts of one to another.

    Raises:
        ValueError: both have a slice.
    """
    twice = set(result["slices"]) & set(part["slices"])
    if twice:
        raise ValueError(f"slice {min(twice)} is there twice; merge each shard once.")
    for name in ("slices", "differences", "rows_compared", "seconds"):
        result[name] += part[name]
    for name in ("steps", "ways"):
        result[name] = dict(Counter(result[name]) + Counter(part[name]))
    for policy, ways in part["policies"].items():
        result["policies"][policy] = dict(Counter(result["policies"].get(policy, {})) + Counter(ways))


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of shards.

    Raises:
        ValueError: they aren't of one run, or a slice is there twice.
    """
    first, *rest = parts
    result = {**first, "shard": f"merged from {len(parts)}", "slices": list(first["slices"])}
    result["policies"] = {policy: dict(ways) for policy, ways in first["policies"].items()}
    result["differences"] = list(first["differences"])
    for part in rest:
        for name in SAME:
            if part[name] != first[name]:
                raise ValueError(f"shards differ in {name}: {part[name]} and {first[name]}; run them alike.")
        add(result, part)
    return result


def finished(result: dict[str, Any]) -> dict[str, Any]:
    """The result as it is published: totals, and how many slices are missing in place of those that are there."""
    wanted = slices_of(result["asked_steps"], result["slice_steps"], 1, 1)
    total = {name: value for name, value in result.items() if name != "slices"}
    total["command"] = total["command"].partition(" --shard")[0] + (
        " --shard I/N, merged" if total["shard"].startswith("merged") else ""
    )
    return total | {
        "missing_slices": len(set(wanted) - set(result["slices"])),
        "total_steps": sum(result["steps"].values()),
        "policy_steps": {policy: sum(ways.values()) for policy, ways in sorted(result["policies"].items())},
        "seconds": round(result["seconds"], 1),
    }


def run_shard(options: argparse.Namespace, shard: int, shards: int) -> Iterator[dict[str, Any]]:
    """Run the shard's slices that aren't in its result file yet; the result so far, after each."""
    from tests.serving_models.families import FAMILIES

    result = empty(options, f"{shard}/{shards}")
    if options.result.exists():
        before = json.loads(options.result.read_text())
        if before.get("shard") != result["shard"] or any(before.get(name) != result[name] for name in SAME):
            raise ValueError(f"{options.result} is another run's; give another --result, or remove it.")
        result = before
    families, begun = sorted(FAMILIES), time.monotonic()
    for number in slices_of(options.steps, options.slice_steps, shard, shards):
        if number in result["slices"]:
            continue
        if time.monotonic() - begun > options.seconds:
            break
        at, family = time.monotonic(), place_of(number, families)[0]
        checker = run_slice(number, families, options.slice_steps)
        found = [] if not checker.failure else [{"slice": number, "family": family, "what": checker.failure}]
        part = {
            "slices": [number], "steps": {family: sum(checker.steps.values())}, "rows_compared": checker.rows,
            "ways": checker.steps, "policies": checker.policies, "differences": found,
            "seconds": time.monotonic() - at,
        }  # fmt: skip
        add(result, part)
        yield result
    yield result


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result, or leave the file that is there."""
    half = path.with_name(path.name + ".part")
    half.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    half.replace(path)


def told(result: dict[str, Any]) -> int:
    """Print how it ended; the exit code."""
    total = finished(result)
    for each in total["differences"]:
        print(f"slice {each['slice']}, {each['family']}: {each['what']}")
    print(
        f"{total['total_steps']} of {total['asked_steps']} steps, {total['rows_compared']} rows, "
        f"{sum(total['policy_steps'].values())} by policy, {len(total['differences'])} differences"
    )
    return 1 if total["differences"] else 0


def main(argv: list[str] | None = None) -> int:
    """Run a shard, or merge shards; 1 where something differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="unstated", help="written into the result")
    parser.add_argument("--steps", type=int, default=100_000, help="steps in all")
    parser.add_argument("--slice-steps", type=int, default=SLICE, help="steps of one slice")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no slice after so many")
    parser.add_argument("--shard", default="1/1", help="I/N: of N processes this is number I, from 1")
    parser.add_argument("--result", type=output_file, default=RESULT, help="the file that is begun, or gone on with")
    parser.add_argument("--merge", type=input_file, nargs="+", metavar="FILE", help="merge shards' files into --result")
    options = parser.parse_args(argv)
    try:
        if options.merge:
            result = merged([json.loads(path.read_text()) for path in options.merge])
            write(options.result, finished(result))
            return told(result)
        shard, _, shards = options.shard.partition("/")
        if not (shard.isdecimal() and shards.isdecimal() and 1 <= int(shard) <= int(shards)):
            raise ValueError(f"--shard is {options.shard!r}; it takes I/N, such as 3/16.")
        import torch

        torch.set_num_threads(1)
        for result in run_shard(options, int(shard), int(shards)):
            write(options.result, result)
            print(f"{sum(result['steps'].values()):>7} steps, {result['rows_compared']} rows", flush=True)
    except ValueError as error:
        sys.stderr.write(f"random_steps: {error}\n")
        return 2
    return told(result)


if __name__ == "__main__":
    sys.exit(main())
