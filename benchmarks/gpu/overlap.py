"""SPLIT with its halves beside each other, step by step against the same halves in turn: no hang, and no bit differs.

A step has a random number of decode rows and of prompt chunks, of random lengths, on random sizes of graphs, with one
decode step beside the prompt or several that follow each other, at once or each in its place (`Launch.wait_share`). It
runs beside; its KV slots are wiped; then the same launches run in turn. Logits, sampled tokens and written KV must be
equal to the bit: graphs, padded shapes and kernels are the same ones, so only a race can make a difference.

What differs is found on the device and read some steps later, so that the device always has work and steps follow each
other without a gap; in one of 25 the host waits for each way. A watchdog ends the process where a step hangs, with the
stacks of all threads. Steps are numbered, and a slice of them is a process's: ``--first 0 --count 25000`` and so on. A
run goes on where its file ends, and notes the commit of each block (``--commit``); ``--merge`` adds slices up.

Run: ``python -m benchmarks.gpu.overlap --config FILE --out FILE [--first N --count N] [--layers 4]``
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import input_file, made_file
from benchmarks.gpu.common import (
    Check,
    Checks,
    Results,
    add_options,
    add_slice_options,
    bits_of,
    config_of,
    header,
    launched,
    load_model,
    logits_checks,
    on_device,
    one_kv,
    opened,
    random_shape,
    slices_of,
    steps_by_commit,
    with_tokens,
)
from kpolicy.heap import frozen_heap

BLOCK = 250
"""Steps of one seed, and between writes"""
HANG_S = 60.0
WATCHED = 25
"""Steps that one start of the watchdog is for: each start makes a thread. Of so many one is waited for and timed"""
AHEAD = 2
"""Steps that are launched before one is read: staging has room for five launches, and a step is two of each half"""
STEPS_AHEAD = 8
WAIT_SHARES = (None, 0.0, 0.5, 0.9)
"""Of decode steps beside a prompt; None: all at once"""
WAYS = {("beside", 1): 3, ("decodes beside", 2): 3, ("decodes beside", 4): 1, ("decodes beside", 8): 1}
"""Form and decode steps, with how often: of many decode steps the last have nothing beside them any more"""


def graphs(model: Any, sizes: dict[str, tuple[int, ...]]) -> tuple[Any, dict[str, list[Any]]]:
    """(the executor, captured keys by half: decode-FULL and PIECEWISE)."""
    from kpolicy.keys import GraphKey
    from kpolicy.modes import Part

    executor, registry = opened(model)
    keys = [GraphKey(Part.FULL, size, size, query_len=1) for size in sizes["decode"]]
    keys += [GraphKey(Part.PIECEWISE, size) for size in sizes["pieces"]]
    registry.plan(keys)
    executor.capture(keys)
    missing = [key for key in keys if key not in registry.captured()]
    if missing:
        sys.exit(f"not captured: {[(str(key), executor.capture_errors.get(key)) for key in missing]}")
    return executor, {
        part: [key for key in keys if key.part.value == part] for part in ("full", "piecewise")
    }  # fmt: skip


def decision_of(decode: Any, pieces: Any, repeat: int, *, beside: bool, wait_share: float | None = None) -> Any:
    """SPLIT with those graphs; the prompt half may run without one."""
    from kpolicy.decision import Decision, Launch
    from kpolicy.modes import Mode, Rows, SplitForm
    from kpolicy.reasons import Reason

    form = SplitForm.IN_TURN if not beside else SplitForm.BESIDE if repeat == 1 else SplitForm.DECODES_BESIDE
    first = Launch(Rows.DECODE, decode, repeat=repeat, wait_share=wait_share)
    launches = (first, Launch(Rows.PREFILL, pieces, stream=int(beside)))
    return Decision(Mode.SPLIT, launches, Reason.DECODES_KEEP_GRAPH, form)


class Compared(NamedTuple):
    """A step run beside and in turn, both under way."""

    checks: Checks
    shapes: str
    """How outputs' shapes differ; empty where they don't"""

    def differs(self) -> str:
        """What differs; empty where nothing does."""
        name, amount = self.checks.first()
        return self.shapes or (f"logits by {amount:.3g}" if name == "logits" else name)


class Bench:
    """A model with graphs, whose steps run beside and in turn.

    Args:
        executor, model: run them.
        kv: the model's, as of `one_kv`.
    """

    def __init__(self, executor: Any, model: Any, kv: list[Any]) -> None:
        self.executor, self.model, self._kv = executor, model, kv
        self._bits = [bits_of(cache.flatten(2)) for cache in kv]

    def compare(self, ways: tuple[Any, Any], inputs: Any, *, timed: bool) -> tuple[Compared, list[float]]:
        """Run a step beside and in turn; nothing waits for the device unless the step is timed.

        Args:
            ways: the decisions, beside first.
            inputs: of the step.
            timed: wait for the device before and behind each way.

        Returns:
            (what is under way, microseconds from the call to the last output each way where it is timed).
        """
        written = {*inputs.slot_mapping, *(slot for slots in inputs.slots_ahead for slot in slots)}
        slots = on_device(sorted(written), self.model.device)
        found: list[tuple[list[Any], list[Any], list[Any]]] = []
        ready: list[Any] = []
        us = []
        for decision in ways:
            for bits in self._bits:
                bits.index_fill_(1, slots, 0)
            if timed:
                self.executor.adapter.event().wait()
            start = time.perf_counter()
            logits, sampled, outputs = launched(self.executor, decision, inputs)
            if timed:
                for event in outputs.ready:
                    event.wait()
                us.append((time.perf_counter() - start) * 1e6)
            found.append((logits, sampled, [bits.index_select(1, slots) for bits in self._bits]))
            ready += outputs.ready
        (mine, tokens, kv), (wanted, others, again) = found
        checks, shapes = [], ""
        for name, here, there in (("logits", mine, wanted), ("sampled tokens", tokens, others)):
            if [each.shape for each in here] != [each.shape for each in there]:
                shapes = shapes or f"{name} of {len(here)} and {len(there)} launches"
        if not shapes:
            checks += logits_checks(mine, wanted)
            checks += [Check("sampled tokens", (a != b).any()) for a, b in zip(tokens, others, strict=True)]
        checks += [Check("written KV", (a != b).any()) for a, b in zip(kv, again, strict=True)]
        return Compared(Checks(checks, ready), shapes), us


def run_block(number: int, count: int, bench: Bench, keys: dict[str, list[Any]], limits: Any) -> Any:
    """`count` steps of one seed: counts, what differed, and times."""
    from benchmarks.gpu.regret import inputs_of

    rng, model = random.Random(number), bench.model
    under_way: deque[tuple[str, Compared]] = deque()
    cell: dict[str, Any] = {
        "steps": 0,
        "ways": {},
        "rows": 0,
        "eager_halves": 0,
        "differences": [],
        "timed_us": [0.0, 0.0],
    }
    batches = []
    for _ in range(max(1, count // 5)):
        shape = random_shape(rng, max_decodes=limits["decodes"], max_kv=limits["kv"], max_new=limits["new"],
                             steps=STEPS_AHEAD)  # fmt: skip
        batches.append(with_tokens(inputs_of(shape, model), rng, model.vocab))
    try:
        for step in range(count):
            if step % WATCHED == 0:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
            inputs = rng.choice(batches)
            numbers = inputs.numbers
            ((name, repeat),) = rng.choices(list(WAYS), list(WAYS.values()))
            decode = rng.choice([key for key in keys["full"] if key.num_tokens >= numbers.num_decodes])
            fitting = [key for key in keys["piecewise"] if key.num_tokens >= numbers.num_prefill_tokens]
            pieces = rng.choice(fitting) if rng.random() < 0.95 else None
            wait = rng.choice(WAIT_SHARES)
            ways = (
                decision_of(decode, pieces, repeat, beside=True, wait_share=wait),
                decision_of(decode, pieces, repeat, beside=False),
            )
            compared, us = bench.compare(ways, inputs, timed=step % WATCHED == 1)
            under_way.append((f"block {number}, step {step}, {decode}, {pieces}, x{repeat}", compared))
            cell["steps"] += 1
            cell["rows"] += numbers.num_decodes + numbers.num_prefills
            cell["eager_halves"] += pieces is None
            label = f"{name} x{repeat}" + ("" if wait is None else " spread")
            cell["ways"][label] = cell["ways"].get(label, 0) + 1
            for way, taken in enumerate(us):
                cell["timed_us"][way] += taken
            cell["differences"] += _read(under_way, AHEAD)
        cell["differences"] += _read(under_way, 0)
    finally:
        # Also where a step raised: it would end whatever this process does next.
        faulthandler.cancel_dump_traceback_later()
    return cell


def _read(under_way: deque[tuple[str, Compared]], left: int) -> list[str]:
    """What differs in the steps under way but for the last ones, so many of which are left."""
    found = []
    while len(under_way) > left:
        step, compared = under_way.popleft()
        if differs := compared.differs():
            found.append(f"{step}: {differs}")
    return found


def totals(cells: dict[str, Any]) -> dict[str, Any]:
    """Cells added up."""
    total: dict[str, Any] = {"steps": 0, "rows": 0, "eager_halves": 0, "ways": {}, "differences": []}
    for cell in cells.values():
        for name in ("steps", "rows", "eager_halves"):
            total[name] += cell[name]
        total["differences"] += cell["differences"]
        for way, count in cell["ways"].items():
            total["ways"][way] = total["ways"].get(way, 0) + count
    timed = [cell["timed_us"] for cell in cells.values() if "timed_us" in cell]
    beside, turn = (sum(us[i] for us in timed) for i in (0, 1))
    total["beside_over_in_turn"] = round(beside / turn, 4) if turn else None
    return total | {"steps_by_commit": steps_by_commit(cells.values())}


def merge(files: list[Path], out: Path) -> int:
    """One result of several slices."""
    head, cells = slices_of(files)
    out.write_text(json.dumps({**head, "total": totals(cells)}, indent=1) + "\n")
    print(json.dumps(totals(cells)))
    return 1 if totals(cells)["differences"] else 0


def main(argv: list[str] | None = None) -> int:
    """Run a slice, or merge slices; 1 where something differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if argv is None:
        argv = sys.argv[1:]
    if "--merge" in argv:
        parser.add_argument("--merge", type=input_file, nargs="+", required=True)
        parser.add_argument("--out", type=made_file, required=True)
        options = parser.parse_args(argv)
        return merge(options.merge, options.out)
    add_options(parser, seconds=420.0)
    add_slice_options(parser, block=BLOCK, count=100_000)
    options = parser.parse_args(argv)

    import torch

    config = config_of(options)
    results = Results(options.out, header(options, "overlap", argv) | {"watchdog_s": HANG_S})
    small = options.tiny
    limits = {"decodes": 8, "kv": 40, "new": 48} if small else {"decodes": 64, "kv": 600, "new": 1024}
    sizes: dict[str, tuple[int, ...]] = (
        {"decode": (4, 8), "pieces": (16, 48)}
        if small
        else {"decode": (8, 16, 32, 48, 64), "pieces": (64, 128, 256, 512, 1024)}
    )
    model = load_model(
        config, options, kv_tokens=4096 if small else 1 << 16, block_size=16, max_model_len=128 if small else 2048,
        max_num_reqs=limits["decodes"],
    )  # fmt: skip
    with torch.no_grad():
        kv = one_kv(model)
        executor, keys = graphs(model, sizes)
        print(f"{model!r}: ready after {results.elapsed():.0f} s", flush=True)
        bench = Bench(executor, model, kv)
        with frozen_heap():
            _blocks(results, options, lambda first, count: run_block(first, count, bench, keys, limits))
    results.data["total"] = totals(results.cells)
    results.write()
    print(json.dumps(results.data["total"]), flush=True)
    executor.release()
    return 1 if results.data["total"]["differences"] else 0


def _blocks(results: Results, options: argparse.Namespace, run: Callable[[int, int], Any]) -> None:
    said = time.monotonic()
    for first in range(options.first, options.first + options.count, BLOCK):
        if str(first) in results.cells:
            continue
        if results.elapsed() > options.seconds:
            return
        cell = run(first, min(BLOCK, options.first + options.count - first)) | {"commit": options.commit}
        results.cells[str(first)] = cell
        if time.monotonic() - said > 5 or cell["differences"]:
            said = time.monotonic()
            results.write()
            total = totals(results.cells)
            print(f"{total['steps']} steps, {len(total['differences'])} differ, {results.elapsed():.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
