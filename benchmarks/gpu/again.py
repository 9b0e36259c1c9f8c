"""Steps of a run, run again: the same batches by the same code, several times, for what one measurement can't tell.

A step that the host bounds takes 5 to 10% more or less each time that it is run. Here the steps of a `kpolicy run` that
its profile says the host bounds run again, in passes over all policies: the scheduler makes the run's batches anew,
from its trace and from when its steps began and ended (`StepEntry.start_us`), so rows, lengths, blocks and prompts are
the run's; each such step goes through `Engine.step`, after the one that came before it in the run; what lies between is
scheduled and not run. The KV isn't what it was, and decode rows' tokens aren't: times don't depend on them, but for a
mixture of experts. Seconds pass between the repeats of a step, so that a core which is slow for seconds slows other
steps in each pass; one after the other they would all see the same moment. So a pass goes over all steps.

Where three passes wouldn't end within ``--seconds``, by what each step took in the first, later ones run fewer steps,
which then have three repeats each. Repeats decide where four fifths of a cell's steps have three; a cell is a mode in a
regime, of all policies. So steps of cells that have fewer anyway go first, then a fifth of the others; where that isn't
enough, whole cells are given up, those of a ``--mode`` that was asked for last. What stays of each is printed.

With ``--turns`` every other pass runs on the core that is slowest just then, with those beside it kept busy
(`benchmarks.quiet.Turns`), and the others on the quickest: the same step is then seen bounded by the host and not::

    python -m benchmarks.gpu.again --config config.json --profile P.json --run R.json --trace T --start 600
        --log S-auto.jsonl --log S-vllm.jsonl --out A.jsonl

writes A-POLICY.jsonl, step logs of what ran, in its order; ``benchmarks.fidelity --again`` reads them beside the run's.
Every size has run before in all passes but the first, so the first use of a size (`StepEffects.eager_new_us`) isn't
measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from statistics import median
from typing import Any

import attrs
import torch

from benchmarks.command import command_line, input_file, input_path, output_file
from benchmarks.fidelity_again import check_probe
from benchmarks.fidelity_served import requests_of
from benchmarks.objectives import objective_of
from benchmarks.quiet import Turns, go_first
from kpolicy.cli.step_log import files_of
from kpolicy.costs import CostTable
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.executors.base import StepOutputs
from kpolicy.heap import frozen_heap
from kpolicy.host_speed import INTERPRETER, SpeedTimer, host_work_us, work_inside_us
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.scheduling.batching import Batcher, Generation
from kpolicy.scheduling.traces import Trace
from kpolicy.schemas import Log, StepEntry, StepLogWriter, read_profile, read_step_log
from kpolicy.serving.calibrate import check_profile
from kpolicy.serving.real_run import Serving, fitting, open_model, quiet_transformers, share_cores
from kpolicy.serving.warm_up import warm_up
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers
from kpolicy.simulate.fidelity import expected_steps
from kpolicy.simulate.repeats import LEAST_REPEATS, host_bound, ran_alike
from kpolicy.trace_run import Prompts

SPARE = 1.1
"""Times what passes took, that those to come are given"""
STRETCH = 50
"""Steps of a run: of each stretch the first ones stay, of all cells alike, for a step runs with the one before it"""
At = tuple[str, int]
"""A policy, and a place in its log"""
_COUNTS = BatchNumbers._fields.index("max_query_len")


def sizes_of(entries: Sequence[StepEntry], indices: set[int]) -> CaptureSizes | None:
    """The graphs that these steps replayed; None where they replayed none, and the policy's own list is as good."""
    keys = {launch.key for i in indices for launch in entries[i].launches if launch.key is not None}
    if not keys:
        return None

    def tokens(kind: int) -> tuple[int, ...]:
        return tuple(sorted({key.num_tokens for key in keys if _kind(key) == kind}))

    return CaptureSizes(tokens(0), tokens(1), tokens(2))


def _kind(key: GraphKey) -> int:
    """Of the sizes of a ladder: decode, mixed, piecewise."""
    if key.part is not Part.FULL:
        return 2
    return 0 if key.decode_only else 1


def thinned(places: Sequence[int], most: int) -> list[int]:
    """At most so many of them, as far apart as they come."""
    if len(places) <= most:
        return list(places)
    return [places[i * len(places) // most] for i in range(most)]


def shortened(places: Sequence[At], most: int) -> list[At]:
    """At most so many of them: alike shares of each stretch of a run, without its end."""
    found: list[At] = []
    passed = 0
    for _, stretch in groupby(places, lambda at: (at[0], at[1] // STRETCH)):
        these = list(stretch)
        before, passed = passed, passed + len(these)
        found += these[: passed * most // len(places) - before * most // len(places)]
    return found


def wanted(
    log: Log[StepEntry], costs: CostTable, *, most: int | None, slower: float, modes: Collection[str] = ()
) -> set[int]:
    """Places of the steps that are measured again: those that the host bounds; see `host_bound`.

    Args:
        log: a policy's.
        costs: the run's own.
        most: of each mode; those that the host bounds without being slower come first. None for all of them.
        slower: also the steps that a host bounds which takes so many times as long.
        modes: also every step of these, whatever bounds it.
    """
    first = host_bound(log.entries, costs)
    more = {i for i, entry in enumerate(log.entries) if entry.mode.partition("/")[0] in modes}
    if slower > 1:
        more |= {*host_bound(log.entries, costs, slower=slower)}
    others = sorted(more - {*first})
    if most is None:
        return {*first, *others}
    found: set[int] = set()
    for mode in {log.entries[i].mode for i in (*first, *others)}:
        kept = thinned([i for i in first if log.entries[i].mode == mode], most)
        found |= {*kept, *thinned([i for i in others if log.entries[i].mode == mode], most - len(kept))}
    return found


def and_before(steps: Collection[int]) -> set[int]:
    """These steps and the one before each, which leaves in the host's caches what it left there in the run."""
    return {max(i + back, 0) for i in steps for back in (-1, 0)}


@attrs.frozen
class Took:
    """What a pass took.

    Args:
        seconds: all of it.
        steps: the seconds of each step that ran.
    """

    seconds: float
    steps: Mapping[int, float]

    def of(self, runs: Collection[int]) -> float:
        """What one takes in which these steps run alone; what isn't steps, scheduling above all, takes as long."""
        return self.seconds - sum(took for i, took in self.steps.items() if i not in runs)


@attrs.define
class Cell:
    """A run's steps of one mode in one regime of the profile's own host speed, of all policies together.

    Args:
        mode: the mode, with the form of a split.
        regime: the steps' by the profile at its own host speed, not at the noted one.
        steps: how many the run has.
        again: those of them that are measured again.
    """

    mode: str
    regime: str
    steps: int = 0
    again: list[At] = attrs.field(factory=list)

    @property
    def enough(self) -> int:
        """Four fifths of the steps: so many decide (docs/measured_fidelity.md). 0 where fewer are measured again."""
        four_fifths = -(-4 * self.steps // 5)
        return four_fifths if len(self.again) >= four_fifths else 0

    def told(self, count: int) -> str:
        """A line that tells that so many steps stay."""
        few = "" if count >= self.enough > 0 else ", under four fifths: its repeats decide nothing"
        share = f"{count / self.steps:.0%} of the run's {self.steps}"
        return f"{self.mode}, {self.regime}: {count} of {len(self.again)} steps stay, {share}{few}"


def cells_of(runs: Mapping[str, Again]) -> list[Cell]:
    """The cells of which steps run again."""
    cells: dict[tuple[str, str], Cell] = {}
    for policy, again in runs.items():
        entries, costs = again.log.entries, again.engine.costs
        for i, (entry, each) in enumerate(zip(entries, expected_steps(entries, costs), strict=True)):
            key = entry.mode, each.regime(entry, costs, own_speed=True)
            cell = cells.setdefault(key, Cell(*key))
            cell.steps += 1
            if i in again.steps:
                cell.again.append((policy, i))
    return [cell for cell in cells.values() if cell.again]


def kept_in_time(cells: Sequence[Cell], seconds: Callable[[Sequence[int]], float], left_s: float) -> list[int]:
    """How many steps of each cell are kept: one cell after the other gives up to a fifth, and then all.

    Args:
        cells: those that are needed least first.
        seconds: what so many of each take.
        left_s: what they may take. Where none do, 0 of each are kept.
    """
    kept = [len(cell.again) for cell in cells]

    def with_count(at: int) -> Callable[[int], float]:
        return lambda count: seconds([*kept[:at], count, *kept[at + 1 :]])

    for least in ([cell.enough for cell in cells], [0] * len(cells)):
        for at, fewest in enumerate(least):
            fitting = bisect_right(range(fewest, kept[at] + 1), left_s, key=with_count(at))
            kept[at] = fewest + max(fitting - 1, 0)
            if fitting:
                return kept
    return kept


def leave_out(
    runs: Mapping[str, Again], first: Mapping[tuple[str, bool], Took], left_s: float, passes: int,
    asked: Collection[str] = (),
) -> None:  # fmt: skip
    """After a first pass: fewer steps run from now on, where not all would so many more times; it prints which.

    First go steps of cells whose repeats decide nothing, then those of modes that weren't asked for; of alike cells
    those that free most time, so that few are given up.

    Args:
        runs: what runs again, by policy; a policy none of whose steps are kept runs none.
        first: what the first pass took, by policy and core.
        left_s: the time left.
        passes: more that each step should have, on each core.
        asked: modes that are left out last.
    """

    def runs_of(places: Iterable[At]) -> dict[str, set[int]]:
        steps: dict[str, set[int]] = {policy: set() for policy in runs}
        for policy, place in places:
            steps[policy].add(place)
        return {policy: and_before(found) for policy, found in steps.items()}

    def needed_s(places: Iterable[At]) -> float:
        ran = runs_of(places)
        return SPARE * passes * sum(took.of(ran[policy]) for (policy, _), took in first.items() if ran[policy])

    everything = [(policy, i) for policy, again in runs.items() for i in again.steps]
    all_s = needed_s(everything)
    if not passes or all_s <= left_s:
        return

    def need(cell: Cell) -> tuple[bool, bool, float]:
        # Steps that run before others all the same free no time.
        return cell.enough > 0, cell.mode.partition("/")[0] in asked, needed_s({*everything} - {*cell.again})

    cells = sorted(cells_of(runs), key=need)

    def chosen(kept: Sequence[int]) -> list[At]:
        return [at for cell, count in zip(cells, kept, strict=True) for at in shortened(cell.again, count)]

    kept = kept_in_time(cells, lambda counts: needed_s(chosen(counts)), left_s)
    told = f"{max(left_s, 0.0):.0f} s left, and {passes} more of each pass over all steps may take {all_s:.0f} s"
    if not any(kept):
        print(f"{told}: no steps would run {passes + 1} times, however few", flush=True)
        return
    print(f"{told}: fewer steps run on, so that these run {passes + 1} times", flush=True)
    ran = runs_of(chosen(kept))
    for cell in cells:
        count = sum(place in ran[policy] for policy, place in cell.again)
        if count < len(cell.again):
            print(f"  {cell.told(count)}", flush=True)
    for policy, again in runs.items():
        again.runs = ran[policy]
        again.steps &= again.runs


def not_run(entry: StepEntry) -> StepOutputs:
    """What a step gives back that is scheduled and not run."""
    numbers = entry.shape.numbers
    outputs: Any = ([], [[1] * numbers.num_decodes] * entry.decode_steps, None, (), [1] * numbers.num_prefills)
    return StepOutputs(*outputs)


@attrs.define
class Again:
    """A policy's run, to be run again.

    Args:
        engine: captured.
        log: the run's steps.
        steps: the indices of those that are measured again.
        runs: the indices of those that run.
        notes_speed: whether the host's speed is noted after each.
        batcher: makes an empty scheduler.
        trace: what the run served.
        prompts: their tokens.
    """

    engine: Engine
    log: Log[StepEntry]
    steps: set[int]
    runs: set[int]
    notes_speed: bool
    batcher: Any
    trace: Trace
    prompts: Prompts

    def once(self) -> tuple[list[StepEntry], int]:
        """One pass: the steps that ran, with their times, and how many the engine decided otherwise than in the run.

        Raises:
            ConfigError: a batch isn't the run's.
        """
        batcher: Batcher = self.batcher()
        arrivals, entries = self.trace.requests, self.log.entries
        start_us = now_us = arrivals[0].arrival_s * 1e6
        admitted, found, others = 0, [], 0
        for i, entry in enumerate(entries):
            if batcher.idle:
                now_us = max(now_us, arrivals[admitted].arrival_s * 1e6)
            while admitted < len(arrivals) and arrivals[admitted].arrival_s * 1e6 <= now_us:
                request = arrivals[admitted]
                if batcher.fits(request.prompt_tokens, request.output_tokens):
                    prompt = self.prompts.of(admitted, request.prompt_tokens, request.hash_ids)
                    batcher.add(Generation(admitted, prompt, request.output_tokens))
                admitted += 1
            batch = batcher.next_batch()
            if batch is None or batch.inputs.numbers[:_COUNTS] != entry.shape.numbers[:_COUNTS]:
                raise ConfigError(
                    f"step {i} of {self.log.header.policy} has another batch than in the run. Give the trace, its "
                    "window and the rate that the run had; one that was interrupted can't be run again."
                )
            outputs = not_run(entry)
            if i in self.runs:
                # What the run was told besides, its gaps among it, nobody knows here.
                numbers = batch.inputs.numbers._replace(facts=entry.shape.facts)
                outputs = self.engine.step(batch.inputs._replace(numbers=numbers))
                for event in outputs.ready:
                    event.wait()
                now_s = time.perf_counter()
                ran = StepEntry.of(
                    i, entry.shape, outputs.decision, cycle_us=outputs.cycle_us, start_us=entry.start_us,
                    host_work_us=host_work_us() if self.notes_speed else None,
                    host_work_inside_us=work_inside_us(now_s - outputs.cycle_us * 1e-6, now_s) or None,
                )  # fmt: skip
                if not ran_alike(ran, entry):
                    # Other steps of decodes beside would leave other batches after it.
                    outputs = not_run(entry)
                    others += 1
                found.append(ran)
            batcher.complete(batch, outputs, lambda _: 1)
            now_us = start_us + (entry.start_us or 0.0) + (entry.cycle_us or 0.0)
        return found, others


def open_again(arguments: argparse.Namespace, opened: ExitStack) -> dict[str, Again]:
    """Load the model, and capture what the steps of each log need; released with `opened`."""
    profile, run = read_profile(arguments.profile), json.loads(arguments.run.read_text())
    setting = run["setting"]
    settings = Settings(max_num_reqs=setting["max_num_reqs"], max_num_tokens=setting["max_num_tokens"])
    if arguments.device == "cpu":
        share_cores()
    quiet_transformers()
    model = open_model(
        arguments.config, settings, kv_tokens=setting["kv_tokens"], block_size=setting["block_size"],
        seed=setting["seed"], device=arguments.device,
    )  # fmt: skip
    trace = fitting(requests_of(run, arguments.trace, arguments.start, arguments.window), model)
    check_profile(profile, model, f"--profile {arguments.profile}")
    prompts = Prompts(setting["seed"], vocab=model.vocab)
    found: dict[str, Again] = {}
    for path in arguments.log:
        log = read_step_log(path)
        check_probe(log, profile, path)
        if any(entry.start_us is None for entry in log.entries):
            raise ConfigError(f"{path} doesn't say when its steps began; run kpolicy run --step-log again.")
        steps = set(range(len(log.entries)))
        if not arguments.all:
            steps = wanted(log, profile.costs, most=arguments.most, slower=arguments.slower, modes=arguments.mode or ())
        runs = and_before(steps)
        if not runs:
            print(f"{log.header.policy}: the host bounds none of its steps")
            continue
        serving = Serving(
            model=model, settings=settings, ladder=sizes_of(log.entries, runs), costs=profile.costs,
            objective=str(objective_of(setting)), verify=False,
        )  # fmt: skip
        engine = serving.engine(log.header.policy)
        opened.callback(engine.release)
        engine.capture()
        warm_up(engine.executor, engine.registry, model, settings)
        noted = profile.costs.host_work_us > 0 and profile.costs.host_probe == INTERPRETER
        found[log.header.policy] = Again(engine, log, steps, runs, noted, serving.batcher, trace, prompts)
        modes = ", ".join(f"{mode} {n}" for mode, n in Counter(log.entries[i].mode for i in steps).most_common())
        print(
            f"{log.header.policy}: {len(runs)} of {len(log.entries)} steps, {len(steps)} of them to be measured "
            f"({modes}), {len(engine.registry.captured())} graphs",
            flush=True,
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=input_path, help="the model's folder or config.json; the default model's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", type=input_file, required=True, help="the run's own")
    parser.add_argument("--run", type=input_file, required=True, help="what kpolicy run --json printed")
    parser.add_argument("--trace", type=input_file, required=True, help="the trace that it served")
    parser.add_argument("--start", type=float, default=0.0, help="second of the trace that it started at")
    parser.add_argument("--window", type=float, default=30.0, help="seconds of the trace that it served")
    parser.add_argument("--log", type=input_file, action="append", required=True, help="a policy's step log")
    parser.add_argument("--all", action="store_true", help="all steps, not only those that the host bounds")
    parser.add_argument(
        "--mode", action="append", choices=[*map(str, Mode)], help="every step of this mode too, whatever bounds it"
    )
    parser.add_argument("--most", type=int, help="at most so many of each policy and mode, evenly over the run")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="also steps that a host bounds which takes so many times as long (1)"
    )
    parser.add_argument(
        "--turns", action="store_true", help="every other pass on the slowest core, with those beside it busy"
    )
    parser.add_argument("--passes", type=int, default=5, help="over all policies; of each kind with --turns")
    parser.add_argument("--seconds", type=float, default=120.0, help="no pass begins that wouldn't end within these")
    parser.add_argument("--out", type=output_file, required=True, help="step logs NAME-POLICY.jsonl")
    arguments = parser.parse_args(argv)
    began, command = time.perf_counter(), command_line("benchmarks.gpu.again", argv)
    if arguments.turns and not hasattr(os, "sched_setaffinity"):
        parser.error("--turns: this system doesn't let a process choose its cores; Linux does")
    with ExitStack() as opened, torch.no_grad():
        turns = None
        if arguments.turns:
            go_first()
            turns = opened.enter_context(Turns(sorted(os.sched_getaffinity(0))))
        runs = open_again(arguments, opened)
        paths = files_of("--out", arguments.out, list(runs), "again.jsonl")
        logs = {
            policy: opened.enter_context(
                StepLogWriter(
                    path, attrs.evolve(again.log.header, command=command, inside_probe=again.engine.costs.inside_probe)
                )
            )
            for (policy, again), path in zip(runs.items(), paths, strict=True)
            if path is not None
        }
        opened.enter_context(frozen_heap())
        if any(again.notes_speed and again.engine.costs.notes_inside for again in runs.values()):
            opened.enter_context(SpeedTimer())
        kinds = (True, False) if turns else (True,)
        longest = dict.fromkeys(((policy, quick) for policy in runs for quick in kinds), 0.0)
        first: dict[tuple[str, bool], Took] = {}
        for number in range(arguments.passes * len(kinds)):
            quick = number % len(kinds) == 0
            if number == len(kinds) and first and len(first) == len(longest):
                left = arguments.seconds - (time.perf_counter() - began)
                leave_out(runs, first, left, min(arguments.passes, LEAST_REPEATS) - 1, arguments.mode or ())
                longest = {(policy, kind): took.of(runs[policy].runs) for (policy, kind), took in first.items()}
            # Forth and back, so that a policy's repeats don't come at even distances.
            for policy in runs if number // len(kinds) % 2 == 0 else reversed(runs):
                if not runs[policy].runs:
                    continue
                begun = time.perf_counter()
                left = arguments.seconds - (begun - began)
                if left < (longest[policy, quick] or max(longest.values())):
                    print(f"pass {number} {policy}: no time left")
                    continue
                where = turns.move(quick=quick) if turns else "this process's cores"
                entries, others = runs[policy].once()
                for entry in entries:
                    logs[policy].write(entry)
                logs[policy].flush()
                took = time.perf_counter() - begun
                longest[policy, quick] = max(longest[policy, quick], took)
                ran_s = {entry.step: (entry.cycle_us or 0.0) * 1e-6 for entry in entries}
                first.setdefault((policy, quick), Took(took, ran_s))
                noted = [entry.host_work_us for entry in entries if entry.host_work_us]
                speed = f", {median(noted):.1f} us beside the steps" if noted else ""
                told = f"{len(entries)} steps, {others} decided otherwise, {took:.1f} s, {where}{speed}"
                print(f"pass {number} {policy}: {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
