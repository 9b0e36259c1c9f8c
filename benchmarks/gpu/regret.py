"""How far each policy's choice is from the best one, batch by batch, measured on a GPU.

Shapes come from replaying real traces (`benchmarks.gpu.shapes`). Each is run in every legal mode at the two smallest
fitting sizes of one fixed ladder (vLLM's default list and 640 to 2,048), and in what each compared policy picks. SPLIT
in two graphs has the smallest of both and the second size of either (`ways_of`; in files of 2026-11-28 and before, the
second size of the prompts' alone). Cells of a shape are interleaved in rounds; after one round those that take over 1.8
times the best are left, after three those over 1.2 times and those too late for the bound on time to first token: a
pick among them is scored by that one sample or those three. There are 14 rounds, or 6 where the noise floor is below
0.5% by then, or 8 to 12 where it is below 1%. The oracle takes the best cell by every other sample and is scored on the
rest, and so is every policy; how far the oracle is from the best of its scoring half is the noise floor, and of both
objectives' the larger one tells when a shape is done (in files of 2026-11-28 and before, that of whole cycles and of
these over the decode steps, late ways too). A shape whose own is above 2% is measured for more rounds, up to 40;
`unsure_shapes` is how many of the load's are above it still, by the row's objective.

- `step_us`: from the host's call until all outputs are there, less the decode-only time of decode steps beyond the
  first; `gap_us`: that time over the decode steps.
- Regret of a policy over a load: the sum of its times over the oracle's, less 1. A shape's kind is drawn the likelier
  the more steps it had, so a shape stands for its steps over how likely it was to be among those measured
  (`weights`). p99 is over shapes, each once; `p99_regret_by_time` is over the load's time, as the mean is: what 1% of
  it, by the oracle's, is beyond.
- The oracle chooses, like `auto`, among ways that end within `first_token_limit` times the shortest, for `step_us` too:
  the issue's "under a bound on time to first token". Which do is told by the choosing half; all samples of cells that
  were given up. `late` is the share of steps whose pick breaks the bound by all samples: a policy without it may.
- The bound is what a file says under ``first_token_limit``, by objective: by default 1 for `step_us` and 1.25 for
  `gap_us` since 2026-11-29, and 1.25 for both in files that don't say. With 1 just the shortest way of a step with
  prompts is in time, so the noise floor has the shortest one of the scoring half for it too, and `late` is the share of
  steps whose pick isn't the shortest.
- `mean_regret_unbounded`, `p99_regret_unbounded`: over an oracle that may take any cell, however late. Cells that are
  well beyond the bound are given up after three samples, by which it chooses and is scored there. Several decode steps
  beside an eager prompt are most of them: `step_us` of these, less all decode steps but one, may be a third of others'.
- `over_auto`: a policy's mean regret less that of `auto` (with the row's objective), and `over_auto_low` to
  `over_auto_high` its 95% interval by resampling the load's shapes, the same ones for both. `better_than_auto` is
  whether the whole interval is below 0. `over_auto_throughput` of `gap_us`: the same over plain `auto`.

Graphs of all policies are captured in one executor, and each policy picks among its own alone: `auto` and fixed
policies among those of kpolicy's default ladder, replicas among those of their engines' lists. In files up to commit
a93eb61, which don't say ``"own": "default"``, `auto` and fixed policies have the fixed ladder's. Every way that is a
policy's pick is run once before it is timed, however far off it should be.

`auto` is calibrated on the model (`kpolicy.executors.calibrate`), not on these shapes; the tables are in the file, and
what they were made of in FILE.calibration.json beside it. ``--rescore PROFILE --shapes FILE --summary FILES`` makes the
table that another cost table's picks would have given on the same cells, as far as they were measured, and ``--repick``
in its place the one that today's picks would have, each shape's by the table that it was measured with. Both keep the
file's bound; with ``--first-token-limit own`` they pick and score by today's defaults, with a number by that. vLLM's
replica is that of 0.33: 0.23 and either runner pick the same for all of these shapes, so they have no rows. The
replicas of vllm-ascend and Kunlun are of other devices.

Run: ``python -m benchmarks.gpu.regret --model NAME --config FILE --shapes FILE --out FILE --date D [--seconds 400]``; a
run goes on where the file ends. ``--loads`` takes some of the shapes' loads; ``--save-profile`` keeps the table that
`auto` decides by. ``--summary FILES... --json regret.json`` makes the table, of
files of 2026-11-23 and before with ``--own-graphs --shapes FILE``. Of a model's load that several of these files have,
the one with the most shapes is in the table, and what is left out is told.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import command_line, input_file, input_path, output_file, profile
from benchmarks.gpu.shapes import BLOCK_SIZE, KV_TOKENS, LONGEST, MAX_NUM_REQS, MAX_NUM_TOKENS
from benchmarks.objectives import UNSTATED_LIMIT

VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
LADDER = (*VLLM_SIZES, 640, 768, 1024, 1280, 1536, 1792, 2048)
TINY = (1, 16, 256, 2048)
OWN_SIZES = ("vllm", "sglang", "tensorrt_llm", "nano_vllm")
FIXED = ("eager", "full", "piecewise", "full_and_piecewise", "split")
FIRST_ROUNDS, ROUNDS = 3, 11
MOST_ROUNDS, UNSURE = 40, 0.02
"""Rounds of a shape whose noise floor is above the limit, and that limit"""
UNSETTLED = 0.04
"""Between two halves of a cell that isn't given up, beyond which its shape gets `FIRST_ROUNDS` + `ROUNDS` rounds"""
SURE_ROUNDS, SURER_ROUNDS = 8, 6
"""Rounds of a shape whose noise floor is within half of the limit, and of one where it is within a quarter"""
FAR = 2.5
"""Ways that should take so many times the cheapest, and that no policy picks, aren't run once before they are timed"""
HOPELESS, QUITE_HOPELESS = 1.2, 1.8
TOO_LATE = 1.15
"""Of the bound on time to first token: what takes longer can't be in time, whatever noise there is"""
CALIBRATION_S = 24.0
"""12 until a93eb61: DeepSeek-V2-Lite had one sample of 135 of 171 cases then, and none of one row beside a prompt"""
PLAIN = "auto"
AUTO = {"step_us": PLAIN, "gap_us": "auto latency"}
"""The policy that the others are held to, by objective: what a user sets who wants short gaps"""
OBJECTIVES = {"step_us": "throughput", "gap_us": "latency"}
"""What that `auto` minimises"""
RESAMPLES, SEED = 10_000, 0
WRITE_S = 15.0
"""Seconds between writes of what there is: a run that is killed loses no more"""


class Opened(NamedTuple):
    """What shapes are measured with."""

    model: Any
    engines: dict[str, Any]
    """One for each policy, over one executor's graphs"""
    ladder: frozenset[Any]
    """The fixed ladder's graphs"""
    capture_s: float
    samples: list[dict[str, Any]]
    """Of the costs"""


def limits_given(text: str) -> dict[str, float]:
    """An option's bound on time to first token by objective: "own" for the defaults of each, or one number for both."""
    from kpolicy.settings import Objective

    if text == "own":
        return {name: Objective.parse(objective).first_token_limit for name, objective in OBJECTIVES.items()}
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 1 <= limit < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is neither own nor a number of at least 1")
    return dict.fromkeys(OBJECTIVES, limit)


def limits_of(at: Mapping[str, Any]) -> dict[str, float]:
    """The bound that results were made with, by objective."""
    limits: dict[str, float] = at.get("first_token_limit", dict.fromkeys(OBJECTIVES, UNSTATED_LIMIT))
    return limits


def _told(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{limit:g} for {objective}" for objective, limit in limits.items())


def open_engines(options: argparse.Namespace) -> Opened:
    """The model, every policy's graphs and costs."""
    import torch

    from benchmarks.gpu.common import config_of, load_model, opened
    from kpolicy.engine import Engine
    from kpolicy.executors.calibrate import Calibration
    from kpolicy.serving.warm_up import warm_up
    from kpolicy.settings import Settings

    model = load_model(
        config_of(options), options, kv_tokens=KV_TOKENS, block_size=BLOCK_SIZE, max_model_len=LONGEST,
        max_num_reqs=MAX_NUM_REQS,
    )  # fmt: skip
    settings = Settings(max_num_reqs=MAX_NUM_REQS, max_num_tokens=MAX_NUM_TOKENS)
    executor, registry = opened(model)
    ladder = TINY if options.tiny else LADDER
    shared: dict[str, Any] = {
        "attention": model.support, "settings": settings, "executor": executor, "registry": registry, "calibrate": 0,
    }  # fmt: skip
    begun = time.perf_counter()
    with torch.no_grad():
        capture_all(shared, ladder, ladder if options.tiny else None)
    capture_s = time.perf_counter() - begun
    warm_up(executor, registry, model, settings)  # as `kpolicy calibrate` does
    calibration = Calibration(executor, registry, model, settings)
    with calibration.undisturbed():
        calibration.measure(1.0 if options.tiny else CALIBRATION_S)
    costs = calibration.table(f"measured {options.date} on {executor.name}, {calibration.rounds} rounds")
    samples = calibration.samples()
    calibration.end()
    shared |= {"costs": costs}
    fixed = frozenset(Engine("auto", ladder=ladder, **shared).keys)
    # A toy's own ladder is its fixed one, so that a dry run has few graphs.
    own = ladder if options.tiny else None
    return Opened(
        model, {**autos(shared, own, options.first_token_limit), **others(shared, own)}, fixed, capture_s, samples
    )


def capture_all(shared: dict[str, Any], ladder: Sequence[int], own: Sequence[int] | None = None) -> None:
    """The fixed ladder's graphs and every policy's, in one executor and registry.

    Args:
        shared: what the Engines share.
        ladder: the fixed one.
        own: that of `auto` and fixed policies; kpolicy's default without.
    """
    from kpolicy.engine import Engine

    Engine("auto", ladder=ladder, **shared).capture()
    Engine("auto", ladder=own, **shared).capture()
    for spec in OWN_SIZES:
        Engine(spec, **shared).capture()


def autos(
    shared: dict[str, Any], ladder: Sequence[int] | None = None, limits: Mapping[str, float] | None = None
) -> dict[str, Any]:  # fmt: skip
    """`auto` for either objective, over kpolicy's default ladder or that one.

    Args:
        shared: what the Engines share.
        ladder: that one.
        limits: bound on time to first token by objective; each one's default without.
    """
    import attrs

    from kpolicy.engine import Engine
    from kpolicy.settings import Objective

    found = {}
    for name, policy in AUTO.items():
        objective = Objective.parse(OBJECTIVES[name])
        if limits is not None:
            objective = attrs.evolve(objective, first_token_limit=limits[name])
        found[policy] = Engine("auto", ladder=ladder, objective=objective, **shared)
    return found


def others(shared: dict[str, Any], ladder: Sequence[int] | None = None) -> dict[str, Any]:
    """Fixed policies over kpolicy's default ladder or that one, replicas over their engines' sizes."""
    from kpolicy.engine import Engine

    return {
        **{spec: Engine(spec, ladder=ladder, **shared) for spec in FIXED},
        **{spec: Engine(spec, **shared) for spec in OWN_SIZES},
    }


def batch_of(shape: dict[str, Any]) -> Any:
    """The step as a `BatchShape`."""
    from kpolicy.shapes import BatchShape

    decodes, chunks = shape["decodes"], [tuple(each) for each in shape["chunks"]]
    return BatchShape(
        decodes=[(1, len(decodes))] if decodes else [], prefills=chunks,
        decode_kv_tokens=sum(decodes) if decodes else None,
        max_kv_len=max([*decodes, *(new + context for new, context in chunks)]),
        max_decode_steps=shape["steps"] if decodes and chunks else 1,
    )  # fmt: skip


def numbers_of(shape: dict[str, Any]) -> Any:
    """The step's counts."""
    return batch_of(shape).numbers


def inputs_of(shape: dict[str, Any], model: Any, *, decodes_only: bool = False) -> Any:
    """The step's inputs, rows in blocks of their own."""
    from kpolicy.executors.base import StepInputs

    size, free = model.block_size, 0
    decodes, chunks = list(shape["decodes"]), [] if decodes_only else [tuple(each) for each in shape["chunks"]]
    ahead = 1 if decodes_only else shape["steps"]
    rows = [(1, kv) for kv in decodes] + [(new, new + context) for new, context in chunks]
    tables, positions, slots, later = [], [], [], []
    for i, (new, kv) in enumerate(rows):
        count = -(-(kv + (ahead - 1 if i < len(decodes) else 0)) // size)
        table = [(free + j) % model.num_blocks for j in range(count)]
        free += count
        tables.append(table)
        for position in range(kv - new, kv):
            positions.append(position)
            slots.append(table[position // size] * size + position % size)
        if i < len(decodes):
            later.append([table[position // size] * size + position % size for position in range(kv, kv + ahead - 1)])
    ends, end = [], 0
    for new, _ in rows:
        end += new
        ends.append(end - 1)
    slots_ahead = list(map(list, zip(*later, strict=True))) if later and ahead > 1 else ()
    return StepInputs(
        numbers_of({**shape, "chunks": chunks, "steps": ahead}), [new for new, _ in rows],
        [(7 * i) % model.vocab for i in range(len(positions))], positions, slots, tables, [kv for _, kv in rows], ends,
        slots_ahead,
    )  # fmt: skip


def ways_of(numbers: Any, keys: Sequence[Any], claims: Any) -> list[Any]:
    """Every legal way at the two smallest fitting sizes of each graph that it needs.

    Where it needs two, the second size of one is beside the smallest of the other: three ways instead of four.
    """
    from kpolicy.policies.base import admits
    from kpolicy.testing.executors import all_decisions

    fitting = [key for key in keys if admits(claims, key)]
    kinds: dict[tuple[Any, ...], list[Any]] = {}
    for decision in sorted(all_decisions(numbers, fitting), key=lambda each: [k.num_tokens for k in each.keys]):
        if len(decision.launches) > 1 and not decision.keys[0].decode_only:
            continue  # a graph for decodes alone, of the same size, does the same with less
        if decision.launches[0].wait_share is not None:
            continue  # the same cycle; a pick that waits is a cell of its own
        kind = (
            decision.mode, decision.form, tuple((key.part, key.decode_only) for key in decision.keys),
            tuple(launch.repeat for launch in decision.launches),
        )  # fmt: skip
        kinds.setdefault(kind, []).append(decision)
    return [way for ways in kinds.values() for way in _smallest(ways)]


def _smallest(ways: Sequence[Any]) -> list[Any]:
    """Of ways of one kind those with the smallest graphs, one of which may be the next larger."""
    places = [
        sorted(set(keys), key=lambda key: (key.num_tokens, str(key)))
        for keys in zip(*(way.keys for way in ways), strict=True)
    ]
    return [way for way in ways if sum(sizes.index(key) for sizes, key in zip(places, way.keys, strict=True)) <= 1]


def name_of(decision: Any) -> str:
    """What tells one cell from another."""
    parts = [
        f"{launch.rows.value}:{launch.key or 'eager'}:{launch.padded_tokens or ''}@{launch.stream}x{launch.repeat}"
        + ("" if launch.wait_share is None else f"~{launch.wait_share}")
        for launch in decision.launches
    ]
    return f"{decision.mode} {'+'.join(parts)}"


def at_once(name: str) -> str:
    """The name of the cell whose decode steps begin at once."""
    return re.sub(r"~[0-9.]+", "", name)


def measure(
    shape: dict[str, Any], model: Any, engines: dict[str, Any], ladder: Collection[Any] | None = None
) -> dict[str, Any]:  # fmt: skip
    """One shape: microseconds of every cell, and each policy's pick.

    Args:
        shape: what the step has.
        model: runs.
        engines: one for each policy.
        ladder: graphs of which the two smallest fitting ones of each kind are measured; `auto`'s by default.
    """
    auto = engines["auto"]
    inputs = inputs_of(shape, model)
    numbers = inputs.numbers
    own = set(auto.keys if ladder is None else ladder)
    captured = [key for key in auto.registry.captured() if key in own]
    cells = {name_of(each): each for each in ways_of(numbers, captured, auto.support.claims)}
    picks = {}
    for name, engine in engines.items():
        decision = engine.select(*numbers)
        cells.setdefault(name_of(decision), decision)
        picks[name] = name_of(decision)
    jobs = {name: (decision, inputs) for name, decision in cells.items()}
    if any(launch.repeat > 1 for decision in cells.values() for launch in decision.launches):
        # Decode steps beyond the first would have been steps of their own.
        alone = inputs_of(shape, model, decodes_only=True)
        jobs["decodes alone"] = (engines["full"].select(*alone.numbers), alone)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    run = auto.executor.run

    def once(name: str) -> float:
        start = time.perf_counter()
        outputs = run(*jobs[name])
        for event in outputs.ready:
            event.wait()
        return (time.perf_counter() - start) * 1e6

    costs = {name: auto.costs.cost(decision.launches, numbers) for name, decision in cells.items()}

    def result() -> dict[str, Any]:
        return {
            "tokens": [
                numbers.num_decodes,
                numbers.num_prefill_tokens,
                numbers.decode_kv_tokens,
                numbers.prefill_pairs,
            ],
            "times": shape["times"],
            "picks": picks,
            "cells": {
                name: {
                    "steps": _steps(decision),
                    "us": [round(each, 1) for each in times[name]],
                    "expected": [round(costs[name].step_us, 1), round(costs[name].gap_us, 1)],
                }
                for name, decision in cells.items()
            },
            "alone_us": [round(each, 1) for each in times.get("decodes alone", [])],
        }

    limits = {objective: engines[policy].objective.first_token_limit for objective, policy in AUTO.items()}
    hoped = FAR * min(cost.gap_us for cost in costs.values())
    # What libraries do once for a shape; ways that are far off are given up after one run, which picks are scored by.
    for name in jobs:
        if name not in cells or name in picks.values() or costs[name].gap_us <= hoped:
            once(name)
    for done in range(MOST_ROUNDS):
        if done >= SURER_ROUNDS and done % 2 == 0:
            run_now = [times[name] for name in cells if len(times[name]) == done]
            unsettled = done < FIRST_ROUNDS + ROUNDS and _unsettled(run_now)
            if not unsettled and not _unsure(result(), limits, _limit(done)):
                break
        best = min((statistics.median(each) for name, each in times.items() if each and name in cells), default=0.0)
        # A cycle beyond this is no way to run a step with prompts, however short its gap.
        cycles = (statistics.median(each) for name, each in times.items() if each and name in cells)
        latest = TOO_LATE * max(limits.values()) * min(cycles, default=0.0)
        if not numbers.num_prefills:
            latest = math.inf
        for name in jobs:
            kept = name == "decodes alone" or name in (picks["auto"], picks["auto latency"])
            if not done or kept or _hopeful(times[name], jobs[name][0], done, best=best, latest=latest):
                times[name].append(once(name))
    return result()


def _hopeful(times: Sequence[float], decision: Any, rounds: int, *, best: float, latest: float) -> bool:
    """Whether a way may yet be the best one, and in time: others aren't run again."""
    if rounds < FIRST_ROUNDS:
        return _score(times, decision) <= QUITE_HOPELESS * best
    return _score(times, decision) <= HOPELESS * best and statistics.median(times) <= latest


def _limit(rounds: int) -> float:
    """The noise floor that so many rounds are enough for."""
    if rounds < SURE_ROUNDS:
        return UNSURE / 4
    return UNSURE if rounds >= FIRST_ROUNDS + ROUNDS else UNSURE / 2


def _unsettled(cells: Sequence[Sequence[float]]) -> bool:
    """Whether a cell's two halves of samples are that far apart."""
    halves = ((statistics.median(each[0::2]), statistics.median(each[1::2])) for each in cells)
    return any(max(half) > (1 + UNSETTLED) * min(half) for half in halves)


def _unsure(shape: dict[str, Any], limits: Mapping[str, float], limit: float = UNSURE) -> bool:
    """Whether a shape's noise floor, as rows have it, is above the limit by either objective.

    After `MOST_ROUNDS` rounds any floor is taken: `summarise` counts shapes above the limit (`unsure_shapes`).
    """
    return any(_scores(shape, objective, limits[objective]).unsure(limit) for objective in AUTO)


def _steps(decision: Any) -> int:
    steps: int = max(launch.repeat for launch in decision.launches)
    return steps


def _score(times: Sequence[float], decision: Any) -> float:
    """The lesser of step and gap, roughly: what a cell could win by."""
    return statistics.median(times) / _steps(decision)


def _done(at: dict[str, Any], order: Sequence[tuple[str, int]]) -> int:
    """How many of these shapes the file has; it may have other loads' too."""
    return sum(f"{load}/{i}" in at["cells"] for load, i in order)


def collect(options: argparse.Namespace, argv: Sequence[str] | None = None) -> int:
    """Measure the shapes of one model that the result file doesn't have."""
    import torch

    from benchmarks.gpu.common import host_noise, versions
    from kpolicy.heap import frozen_heap
    from kpolicy.serving.calibrate import device_name, save_profile

    noise = host_noise()
    of_models = json.loads(options.shapes.read_text())
    if options.model not in of_models:
        sys.exit(f"--model {options.model}: the shapes are of {', '.join(of_models)}")
    shapes = of_models[options.model]
    if unknown := sorted({*(options.loads or ())} - shapes.keys()):
        sys.exit(f"--loads: {', '.join(unknown)}: the shapes are of {', '.join(shapes)}")
    at: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"cells": {}}
    device = device_name(torch.device(options.device))
    for name, mine in (("model", options.model), ("device", device)):
        if at.get(name, mine) != mine:
            sys.exit(f"{options.out} has {at[name]!r} and this run is of {mine!r}; give another --out.")
    options.first_token_limit = options.first_token_limit or limits_given("own")
    if at["cells"] and limits_of(at) != options.first_token_limit:
        sys.exit(
            f"{options.out} has a first_token_limit of {_told(limits_of(at))} and this run is of "
            f"{_told(options.first_token_limit)}; give another --out, or --first-token-limit."
        )
    begun = time.monotonic()
    model, engines, ladder, capture_s, samples = open_engines(options)
    auto = engines["auto"]
    failed = {str(key): why[:200] for key, why in auto.executor.capture_errors.items()}
    taken = f"{capture_s:.1f} s, ready at {time.monotonic() - begun:.0f} s"
    print(f"{model}: {len(auto.registry.captured())} graphs in {taken}, {failed}", flush=True)
    table = {"costs": _plain(auto.costs), "date": options.date, "host_noise": noise}
    at["tables"] = [*at.get("tables", []), table]
    beside = options.out.with_suffix(".calibration.json")
    before = json.loads(beside.read_text()) if beside.exists() else []
    beside.write_text(json.dumps([*before, samples], separators=(",", ":")))
    at |= {
        "model": options.model, "date": options.date, "capture_s": round(capture_s, 1), "failed": failed,
        "own": "tiny" if options.tiny else "default", "device": device, "kernels": options.kernels,
        "support": str(model.support), "first_token_limit": options.first_token_limit,
        "versions": versions(), "host_noise": noise, "command": command_line("benchmarks.gpu.regret", argv),
        "too_long": {load: each["too_long"] for load, each in shapes.items()},
        "steps": {load: each["steps"] for load, each in shapes.items()},
    }  # fmt: skip
    if options.save_profile:
        save_profile(options.save_profile, auto.costs, model, at["command"])
    chosen = options.loads or list(shapes)
    loads = {load: shapes[load]["shapes"][: options.shapes_a_load] for load in chosen}
    # Load by load: one that is whole says more than all in part.
    order = [(load, i) for load, shapes in loads.items() for i in range(len(shapes))]
    said = begun
    try:
        # Once: each freeze goes through all that the libraries hold.
        with torch.no_grad(), frozen_heap():
            for load, i in order:
                if f"{load}/{i}" in at["cells"]:
                    continue
                if time.monotonic() - begun > options.seconds:
                    break
                cell = measure(loads[load][i], model, engines, ladder)
                at["cells"][f"{load}/{i}"] = {"table": len(at["tables"]) - 1, **cell}
                if time.monotonic() - said > WRITE_S:
                    said = time.monotonic()
                    _write(options.out, at)
                    print(f"{_done(at, order)} of {len(order)} shapes, {said - begun:.0f} s", flush=True)
    finally:  # also where it is interrupted
        _write(options.out, at)
    done = _done(at, order)
    print(f"{done} shapes, {len(order) - done} left, {time.monotonic() - begun:.0f} s", flush=True)
    for load in loads:
        rows = summarise(at, load)
        for objective in ("step_us", "gap_us"):
            line = {row["policy"]: round(row["mean_regret"], 3) for row in rows if row["objective"] == objective}
            floor = next((row["noise_floor"] for row in rows if row["objective"] == objective), 0.0)
            print(load, objective, line, f"floor {floor:.3f}", flush=True)
    return 0


def _write(path: Path, at: dict[str, Any]) -> None:
    from kpolicy.schemas import write_text

    write_text(path, json.dumps(at, separators=(",", ":")))


def _plain(costs: Any) -> Any:
    """A cost table as the plain values of a profile."""
    from kpolicy.schemas import Profile, dumps

    return json.loads(dumps(Profile(costs=costs, device="", model="")))["costs"]


def _costs(plain: dict[str, Any]) -> Any:
    """The cost table that `_plain` made that of."""
    from kpolicy.schemas import Profile, loads

    head = {"schema": "kpolicy/profile", "version": [1, 0], "device": "", "model": ""}
    return loads(json.dumps({**head, "costs": plain}), Profile).costs


def repicked(
    at: dict[str, Any], shapes: dict[str, Any], costs: Any = None, limits: dict[str, float] | None = None
) -> tuple[dict[str, Any], int]:
    """(the results with what `auto` would pick, shapes left out for an unmeasured pick).

    Args:
        at: results.
        shapes: the model's shapes that they are of, by load.
        costs: another cost table, for all shapes; by default each is decided by the table that it was measured with.
        limits: bound on time to first token by objective, which the results then say; by default the one they have.
    """
    limits = limits or limits_of(at)
    if costs is None and "tables" not in at:
        raise SystemExit(f"{at['model']}: this file has no cost tables, so --repick can't be had; --rescore takes one")
    tables = [_costs(each["costs"]) for each in at["tables"]] if costs is None else [costs]
    engines = [autos(_simulated(at, each), _own(at), limits) for each in tables]
    cells = {}
    for key, cell in at["cells"].items():
        load, _, i = key.rpartition("/")
        numbers = numbers_of(shapes[load]["shapes"][int(i)])
        using = engines[cell.get("table", 0) if costs is None else 0]
        picks = {name: name_of(engine.select(*numbers)) for name, engine in using.items()}
        # Decode steps that wait for their place take as long as at once, which is what older files have.
        picks = {name: pick if pick in cell["cells"] else at_once(pick) for name, pick in picks.items()}
        if all(cell["cells"].get(pick, {}).get("us") for pick in picks.values()):
            cells[key] = {**cell, "picks": {**cell["picks"], **picks}}
    return {**at, "cells": cells, "first_token_limit": limits}, len(at["cells"]) - len(cells)


def own_graphs(at: dict[str, Any], shapes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """(the results with every other policy than `auto` picking among its own graphs, policies left out of a load).

    In files of 2026-11-23 and before all Engines picked among whatever any of them had captured. A policy with a pick
    that wasn't measured is left out of that load.

    Args:
        at: results.
        shapes: the model's shapes that they are of, by load.
    """
    from kpolicy.costs import analytic_costs

    engines = others(_simulated(at, analytic_costs()), _own(at))
    cells: dict[str, Any] = {}
    without: dict[str, set[str]] = {}
    for key, cell in at["cells"].items():
        load, _, i = key.rpartition("/")
        numbers = numbers_of(shapes[load]["shapes"][int(i)])
        picks = {name: name_of(engine.select(*numbers)) for name, engine in engines.items() if name in cell["picks"]}
        cells[key] = {**cell, "picks": {**cell["picks"], **picks}}
        unmeasured = {name for name, pick in picks.items() if not cell["cells"].get(pick, {}).get("us")}
        without[load] = without.get(load, set()) | unmeasured
    for key, cell in cells.items():
        for name in without[key.rpartition("/")[0]]:
            del cell["picks"][name]
    return {**at, "cells": cells}, {load: names for load, names in without.items() if names}


def _own(at: dict[str, Any]) -> tuple[int, ...] | None:
    """The ladder that `auto` and fixed policies have in a file; None for kpolicy's default."""
    return {"default": None, "tiny": TINY}.get(at.get("own", ""), LADDER)


def _simulated(at: dict[str, Any], costs: Any) -> dict[str, Any]:
    """What Engines that only decide share: every policy's graphs on a simulated device."""
    from kpolicy.executors.simulated import SimulatedExecutor
    from kpolicy.registry import GraphRegistry
    from kpolicy.settings import Settings

    executor = SimulatedExecutor(
        costs, num_blocks=KV_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE, max_num_reqs=MAX_NUM_REQS
    )
    shared: dict[str, Any] = {
        "attention": at["support"], "settings": Settings(max_num_reqs=MAX_NUM_REQS, max_num_tokens=MAX_NUM_TOKENS),
        "costs": costs, "executor": executor, "registry": GraphRegistry(),
    }  # fmt: skip
    executor.open(shared["registry"])
    capture_all(shared, LADDER)
    return shared


def _value(cell: dict[str, Any], samples: Sequence[float], alone_us: float, objective: str) -> float:
    us: float = statistics.median(samples)
    steps: int = cell["steps"]
    return us / steps if objective == "gap_us" else us - (steps - 1) * alone_us


def _in_time(times: Mapping[str, Sequence[float]], limit: float) -> list[str]:
    """Cells whose prompt rows are done within that bound on time to first token, by samples of each cell's cycle."""
    cycles: dict[str, float] = {name: statistics.median(us) for name, us in times.items()}
    latest = limit * min(cycles.values())
    return [name for name, us in cycles.items() if us <= latest]


@dataclass(frozen=True)
class _Scores:
    """One shape's cells by the scoring half of their samples, and what the choosing half takes for the best.

    Args:
        us: each cell's time.
        oracle: the best cell of those within the bound on time to first token.
        least: the least time that a cell within the bound has; with a bound of 1 the one by the scoring half counts
            too, as there is no other by the choosing one.
        unbounded: the best of all cells, in time or not.
        late: cells beyond the bound by all samples.
    """

    us: dict[str, float]
    oracle: str
    least: float
    unbounded: str
    late: frozenset[str]

    def unsure(self, limit: float = UNSURE) -> bool:
        """Whether the noise floor is above the limit."""
        return self.us[self.oracle] > (1 + limit) * self.least


def _scores(shape: dict[str, Any], objective: str, limit: float) -> _Scores:
    """What one shape's cells are worth by that objective, with that bound on time to first token."""
    alone = statistics.median(shape["alone_us"]) if shape["alone_us"] else 0.0
    kind = objective if shape["tokens"][0] else "step_us"
    cells = shape["cells"]
    choosing = {name: _value(cell, cell["us"][0::2], alone, kind) for name, cell in cells.items()}
    scoring = {name: _value(cell, _half(cell["us"], 1), alone, kind) for name, cell in cells.items()}
    allowed, rivals, late = list(cells), list(cells), frozenset[str]()
    if shape["tokens"][1]:
        rivals = allowed = _in_time({name: _half(cell["us"], 0) for name, cell in cells.items()}, limit)
        late = frozenset(cells) - {*_in_time({name: cell["us"] for name, cell in cells.items()}, limit)}
        if limit == 1:
            rivals = allowed + _in_time({name: _half(cell["us"], 1) for name, cell in cells.items()}, limit)

    def best(names: Iterable[str]) -> str:
        return min((choosing[name], name) for name in names)[1]

    return _Scores(scoring, best(allowed), min(scoring[name] for name in rivals), best(cells), late)


def _half(samples: Sequence[float], first: int) -> Sequence[float]:
    """Every other sample; all of a cell that was given up, which no oracle within the bound chooses."""
    return samples[first::2] if len(samples) > FIRST_ROUNDS else samples


def interval_over(excess: Sequence[float], of: Sequence[float]) -> tuple[float, float, float]:
    """(the sum of excesses over the sum of times, its 95% interval by resampling shapes); NaN bounds for one shape.

    Args:
        excess: by how many microseconds a policy is over the one it is held to, shape by shape.
        of: microseconds that they are a share of, in the same order.
    """
    import numpy as np

    over, whole = np.asarray(excess, float), np.asarray(of, float)
    mean = float(over.sum() / whole.sum())
    if len(over) < 2:
        return mean, math.nan, math.nan
    times = np.random.default_rng(SEED).multinomial(len(over), np.full(len(over), 1 / len(over)), RESAMPLES)
    low, high = np.quantile((times @ over) / (times @ whole), (0.025, 0.975))
    return mean, float(low), float(high)


def weights(counts: Sequence[int], steps: int | None) -> list[float]:
    """How many of a load's steps each shape stands for.

    Kinds were drawn one after the other, each in proportion to the steps it had, and none twice. One with `c` steps is
    among the drawn with about 1 - exp(-x c), where x is such that what the shapes stand for adds up to all steps. So a
    common kind, which is always drawn, stands for its own steps, and a rare one for rare kinds that weren't drawn too.

    Args:
        counts: steps of the kinds that were measured.
        steps: steps of the load; None where that isn't known, and each shape stands for its own kind's alone.
    """
    if steps is None or sum(counts) >= steps:
        return [float(count) for count in counts]
    low, high = -50.0, 50.0  # of x, as a logarithm
    for _ in range(100):
        middle = (low + high) / 2
        found = [count / -math.expm1(-math.exp(middle) * count) for count in counts]
        low, high = (middle, high) if sum(found) > steps else (low, middle)
    return found


def summarise(at: dict[str, Any], load: str) -> list[dict[str, Any]]:
    """Rows of one model and load: a policy's regret for each objective, and how it compares with that of `auto`."""
    rows = []
    trace, _, rate = load.rpartition(" x")
    found = [cell for key, cell in at["cells"].items() if key.rpartition("/")[0] == load]
    steps = at.get("steps", {}).get(load)
    times = weights([shape["times"] for shape in found], steps)
    limits = limits_of(at)
    for objective, auto in AUTO.items():
        taken: dict[str, list[float]] = {}
        late: dict[str, float] = {}
        oracle_us: list[float] = []
        unbounded_us: list[float] = []
        floors: list[float] = []
        unsure = 0
        for shape, weight in zip(found, times, strict=True):
            scores = _scores(shape, objective, limits[objective])
            oracle = scores.us[scores.oracle]
            oracle_us.append(oracle * weight)
            unbounded_us.append(scores.us[scores.unbounded] * weight)
            floors.append((oracle - scores.least) * weight)
            unsure += scores.unsure()
            for policy, pick in shape["picks"].items():
                taken.setdefault(policy, []).append(scores.us[pick] * weight)
                late[policy] = late.get(policy, 0.0) + weight * (pick in scores.late)
        for policy, us in taken.items():
            regret, p99 = _regret(us, oracle_us)
            unbounded, unbounded_p99 = _regret(us, unbounded_us)
            over, low, high = _over(us, taken[auto], oracle_us)
            rows.append({
                "model": at["model"], "trace": trace, "rate": float(rate), "objective": objective, "policy": policy,
                "first_token_limit": limits[objective], "shapes": len(found), "steps": steps,
                "too_long": at.get("too_long", {}).get(load),
                "mean_regret": regret, "p99_regret": p99, "p99_regret_by_time": _p99_by_time(us, oracle_us),
                "mean_regret_unbounded": unbounded, "p99_regret_unbounded": unbounded_p99,
                "noise_floor": round(sum(floors) / sum(oracle_us), 5), "unsure_shapes": unsure,
                "over_auto": over, "over_auto_low": low, "over_auto_high": high,
                "better_than_auto": high is not None and high < 0,
                "late": round(late[policy] / sum(times), 5),
            })  # fmt: skip
            if auto != PLAIN:
                names = ("over_auto_throughput", "over_auto_throughput_low", "over_auto_throughput_high")
                rows[-1] |= dict(zip(names, _over(us, taken[PLAIN], oracle_us), strict=True))
    return rows


def _regret(us: Sequence[float], oracle_us: Sequence[float]) -> tuple[float, float]:
    """(mean, p99) of what a policy takes over an oracle, shape by shape."""
    ratios = sorted(mine / best - 1 for mine, best in zip(us, oracle_us, strict=True))
    p99 = ratios[min(len(ratios) - 1, int(0.99 * len(ratios)))]
    return round(sum(us) / sum(oracle_us) - 1, 5), round(p99, 5)


def _p99_by_time(us: Sequence[float], oracle_us: Sequence[float]) -> float:
    """What a policy takes over an oracle, shape by shape, beyond which is 1% of the oracle's time at most."""
    ratios = sorted((mine / best - 1, best) for mine, best in zip(us, oracle_us, strict=True))
    left = 0.01 * sum(oracle_us)
    for ratio, best in reversed(ratios):
        left -= best
        if left < 0:
            return round(ratio, 5)
    raise AssertionError("1% of a load is less than all of it")


def _over(
    us: Sequence[float], auto_us: Sequence[float], of: Sequence[float]
) -> tuple[float, float | None, float | None]:
    """What `interval_over` has of a policy and `auto`, rounded; None for bounds that there aren't."""
    beyond = [mine - theirs for mine, theirs in zip(us, auto_us, strict=True)]
    mean, low, high = interval_over(beyond, of)
    return round(mean, 5), None if math.isnan(low) else round(low, 5), None if math.isnan(high) else round(high, 5)


def largest(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows of the draw with the most shapes of each model's load, a line of each that is left out).

    Raises:
        SystemExit: two files have as many shapes of a load, so that nothing tells which one counts.
    """
    loads = [f"{row['model']}, {row['trace']} x{row['rate']:g}" for row in rows]
    most: dict[str, int] = {}
    seen: set[tuple[Any, ...]] = set()
    for load, row in zip(loads, rows, strict=True):
        most[load] = max(row["shapes"], most.get(load, 0))
        told = load, row["objective"], row["policy"], row["shapes"]
        if told in seen:
            raise SystemExit(f"{load}: two of the files have {row['shapes']} shapes of it; give --summary one of them.")
        seen.add(told)
    drawn = list(zip(loads, rows, strict=True))
    kept = [row for load, row in drawn if row["shapes"] == most[load]]
    fewer = dict.fromkeys((load, row["shapes"]) for load, row in drawn if row["shapes"] < most[load])
    return kept, [f"{load}: left out with {shapes} shapes, as another file has {most[load]}" for load, shapes in fewer]


def better(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a table says against `auto`: a line of each policy that is better beyond the interval."""
    return [
        f"{row['model']}, {row['trace']} x{row['rate']:g}, {row['objective']}: {row['policy']} is better than "
        f"{AUTO[row['objective']]} by {-row['over_auto']:.2%} ({-row['over_auto_high']:.2%} to "
        f"{-row['over_auto_low']:.2%}; {row['shapes']} shapes, {row['late']:.1%} of steps late)"
        for row in rows
        if row["better_than_auto"]
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure, or summarise what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--config", type=input_path)
    parser.add_argument("--shapes", type=input_file)
    parser.add_argument("--shapes-a-load", type=int, default=40)
    parser.add_argument("--loads", nargs="+", help="of the shapes, in this order; all by default")
    parser.add_argument("--save-profile", type=output_file, help="the table that auto decides by, as a profile")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same architecture: a dry run")
    parser.add_argument("--out", type=output_file)
    parser.add_argument("--date", default="unstated")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--summary", type=input_file, nargs="*")
    parser.add_argument("--rescore", type=profile, help="a profile: the table as its picks would have made it")
    parser.add_argument(
        "--repick", action="store_true", help="the table as today's picks by each shape's own cost table would make it"
    )
    parser.add_argument(
        "--first-token-limit", type=limits_given, metavar="LIMIT",
        help="the bound on time to first token: a number of at least 1 for both objectives, or own, the default, for "
        "each one's own; with --repick or --rescore the default is that of the file",
    )  # fmt: skip
    parser.add_argument(
        "--own-graphs", action="store_true", help="fixed policies and replicas pick anew, each among its own graphs"
    )
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args(argv)
    options.layers = 0
    if options.repick and options.rescore:
        parser.error("--repick takes each shape's own cost table and --rescore another for all; give one of the two")
    if (options.repick or options.rescore) and not (options.summary and options.shapes):
        parser.error("--repick and --rescore are for --summary FILES, of the shapes in --shapes FILE")
    if options.first_token_limit and options.summary and not (options.repick or options.rescore):
        parser.error(
            "picks of a file are of its own bound; --first-token-limit is for --repick, --rescore or measuring"
        )
    if not options.summary:
        if not (options.config and options.shapes and options.out):
            parser.error("give --config, --shapes and --out to measure, or --summary with the files that were")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        return collect(options, argv)
    from kpolicy.profiles import load_profile

    rows = []
    for file in options.summary:
        at = json.loads(file.read_text())
        shapes = json.loads(options.shapes.read_text())[at["model"]] if options.shapes else {}
        if options.own_graphs:
            at, without = own_graphs(at, shapes)
            for load, names in without.items():
                sys.stderr.write(f"{at['model']}, {load}: without {', '.join(sorted(names))}, with unmeasured picks\n")
        if options.rescore or options.repick:
            costs = load_profile(options.rescore).costs if options.rescore else None
            at, left_out = repicked(at, shapes, costs, options.first_token_limit)
            sys.stderr.write(f"{at['model']}: {left_out} shapes left out, whose pick wasn't measured\n")
        rows += [
            row for load in dict.fromkeys(key.rpartition("/")[0] for key in at["cells"]) for row in summarise(at, load)
        ]
    rows, fewer = largest(rows)
    for line in fewer:
        sys.stderr.write(f"{line}\n")
    text = json.dumps(rows, indent=1)
    if not options.json:
        print(text)
        return 0
    options.json.write_text(text + "\n")
    against = better(rows)
    print("\n".join(against) or f"of {len(rows)} rows no policy's is better than auto's beyond the 95% interval")
    return 0


if __name__ == "__main__":
    sys.exit(main())
