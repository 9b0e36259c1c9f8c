"""A server's life, speeded up: graphs come and go, memory runs out, replays fail, requests are cancelled.

Requests of random lengths are served by a policy that changes from cycle to cycle. Between steps, at random: all graphs
are given back and some captured anew; more are captured; the process may take hardly more of the device's memory while
some are captured; a replay fails; a request is cancelled. A thirtieth of the steps is held, to the bit, to the same
launches run eagerly at their padded shapes.

At a cycle's end every request was served whole or cancelled, every KV block is free, the registry holds nothing, and
memory is noted, the process's, what torch's allocator holds, and the device's, which counts where no other process uses
it: flat means that the last cycle ends with no more than the first one after every policy had a turn, but for
`SLACK_BYTES`.

Run: ``python -m benchmarks.gpu.soak --config FILE --out FILE [--seconds 400]``; a run goes on where its file ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import Results, add_options, config_of, free, header, load_model, logits_of, opened

STEPS = 400
"""Of a cycle, before its requests run out"""
SLACK_BYTES = 32 << 20
POLICIES = ("auto", "full_and_piecewise", "split", "split:form=decodes_beside", "full", "piecewise", "vllm")
WARM = len(POLICIES)
"""Cycles of a process that memory may grow in: kernels are compiled, and each policy's streams get their workspaces."""
EVENTS = {"replay_fails": 0.02, "cancel": 0.03, "capture": 0.02, "release": 0.01, "no_memory": 0.01}


class Cycle:
    """One policy's turn.

    Args:
        model, executor, registry: what serves; they outlive the cycle.
        seed: draws everything.
        tiny: small steps.
    """

    def __init__(self, model: Any, executor: Any, registry: Any, seed: int, *, tiny: bool) -> None:
        from kpolicy.engine import Engine
        from kpolicy.scheduling.batching import Batcher
        from kpolicy.settings import Settings

        self.rng = random.Random(seed)
        self.model, self.executor, self.registry = model, executor, registry
        self.spec = POLICIES[seed % len(POLICIES)]
        self.longest = (20, 10) if tiny else (400, 60)
        settings = Settings(max_num_reqs=model.max_num_reqs, max_num_tokens=24 if tiny else 512)
        ladder = [2, 4, 8, 16, 24] if tiny else [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        self.engine = Engine(
            self.spec, attention=model.support, ladder=ladder, settings=settings, executor=executor, registry=registry,
            calibrate=0,
        )  # fmt: skip
        self.batcher = Batcher(settings, num_blocks=model.num_blocks, block_size=model.block_size)
        self.counts: Counter[str] = Counter()
        self.modes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.live: dict[int, Any] = {}
        self.added = 0

    def run(self, steps: int) -> dict[str, Any]:
        """Serve; what happened."""
        begun = time.monotonic()
        self._capture()
        done = 0
        while done < steps or not self.batcher.idle:
            if done < steps:
                self._events()
                self._requests()
            if self._step():
                done += 1
        if self.live:
            self.problems.append(f"{len(self.live)} requests were lost: {sorted(self.live)[:5]}")
        if self.batcher.free_blocks != self.model.num_blocks:
            self.problems.append(f"{self.model.num_blocks - self.batcher.free_blocks} KV blocks aren't free")
        stats = self.engine.stats
        self.engine.release()
        held = self.registry.totals().held
        if held.bytes or held.graphs or self.registry.captured():
            self.problems.append(f"the registry holds {held}")
        return {
            "policy": self.spec, "steps": done, "events": dict(self.counts), "modes": dict(self.modes),
            "replay_failures": stats.replay_failures, "problems": self.problems,
            "seconds": round(time.monotonic() - begun, 1),
        }  # fmt: skip

    def _requests(self) -> None:
        from kpolicy.scheduling.batching import Generation

        rng = self.rng
        while len(self.batcher.waiting) < 2:
            prompt = [rng.randrange(self.model.vocab) for _ in range(rng.randint(1, self.longest[0]))]
            request = Generation(self.added, prompt, rng.randint(1, self.longest[1]))
            self.batcher.add(request)
            self.live[self.added] = request
            self.added += 1

    def _step(self) -> bool:
        import torch

        from tests.executors_launcher.checker import eager_part

        batch = self.batcher.next_batch()
        if batch is None:
            return False
        outputs = self.engine.step(batch.inputs)
        for event in outputs.ready:
            event.wait()
        self.modes[str(outputs.decision.label)] += 1
        logits = [each.clone() for each in logits_of(outputs)]
        if not all(bool(torch.isfinite(each).all()) for each in logits):
            self.problems.append(f"{outputs.decision.label}: an output isn't finite")
        if self.rng.random() < 1 / 30:
            self.counts["held to eager"] += 1
            parts = [eager_part(self.executor, launch, batch.inputs) for launch in outputs.decision.launches]
            if not all(map(torch.equal, logits, [part.outputs.tensor for part in parts if len(part.outputs)])):
                self.problems.append(f"{outputs.decision.label} differs from eager")
        if batch.decodes and self.rng.random() < EVENTS["cancel"]:
            # While its step runs, as far as the scheduler knows.
            self._cancel(self.rng.choice(batch.decodes).index)
        for request in self.batcher.complete(batch, outputs, lambda row: int(row.argmax())).finished:
            self.counts["served"] += 1
            if len(request.generated) != request.output_tokens:
                self.problems.append(f"request {request.index} has {len(request.generated)} of {request.output_tokens}")
            del self.live[request.index]
        return True

    def _events(self) -> None:
        from kpolicy.testing.executors import fail_next_replay

        rng = self.rng
        for event, chance in EVENTS.items():
            if rng.random() >= chance:
                continue
            if event == "cancel":
                if self.live:
                    self._cancel(rng.choice(sorted(self.live)))
                continue
            self.counts[event] += 1
            if event == "replay_fails":
                fail_next_replay(self.executor, after=rng.choice((0, 0, 1)))
            elif event == "release":
                _ = self.engine.stats  # counts what still runs
                self.executor.release()
                self._capture()
            elif event == "capture":
                self._capture()
            else:
                self._without_memory()

    def _cancel(self, index: int) -> None:
        if index in self.live and self.batcher.cancel(index):
            del self.live[index]
            self.counts["cancelled"] += 1

    def _capture(self) -> None:
        """Some of the graphs that aren't there."""
        captured = set(self.registry.captured())
        missing = [key for key in self.engine.keys if key not in captured]
        chosen = self.rng.sample(missing, min(len(missing), self.rng.randint(1, 6)))
        self.executor.capture(chosen)
        self.counts["captured"] += len(set(self.registry.captured()) - captured)
        failed = {str(self.registry.record(key).reason) for key in chosen} - {"None"}
        self.counts.update(failed)

    def _without_memory(self) -> None:
        """Capture while there is hardly any memory left to take."""
        import torch

        if self.rng.random() < 0.7:
            # Otherwise pools that are there may have room.
            _ = self.engine.stats
            self.executor.release()
        free()
        left = self.rng.choice((1, 8, 64, 256)) << 20
        if self.model.device.type == "cpu":
            adapter = self.executor.adapter
            adapter._memory_bytes = adapter._held_bytes() + (left >> 18)
            try:
                self._capture()
            finally:
                adapter._memory_bytes = None
        else:
            # torch's allocator refuses what is over its share, as it does where the device has no more; other processes
            # keep theirs.
            _, total = torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + left) / total))
            try:
                self._capture()
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
                free()


def memory(model: Any) -> dict[str, int]:
    """Bytes held now, once all that can go has gone."""
    import torch

    free()
    found = {"process": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    if model.device.type == "cuda":
        available, total = torch.cuda.mem_get_info()
        found |= {"device": total - available, "torch": torch.cuda.memory_reserved()}
    return found


def summary(cells: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """Cycles added up, and how memory went in each process; the device's too where it runs alone.

    Whether memory is flat is None where no process ran two cycles beyond those that warm it up.
    """
    held = ("process", "torch", "device") if alone else ("process", "torch")
    events: Counter[str] = Counter()
    modes: Counter[str] = Counter()
    growth: dict[str, int] = {}
    for cell in cells.values():
        events += Counter(cell["events"])
        modes += Counter(cell["modes"])
    for process in sorted({cell["process"] for cell in cells.values()}):
        ran = [cell["memory"] for cell in cells.values() if cell["process"] == process][WARM:]
        for name in (each for each in held if len(ran) > 1 and each in ran[0]):
            growth[name] = max(growth.get(name, -(1 << 62)), ran[-1][name] - ran[0][name])
    return {
        "cycles": len(cells), "steps": sum(cell["steps"] for cell in cells.values()), "events": dict(events),
        "modes": dict(modes), "seconds": round(sum(cell["seconds"] for cell in cells.values()), 1),
        "cycles_to_warm_up": WARM, "growth_bytes_after_warming_up": growth,
        "memory_flat": all(grown <= SLACK_BYTES for grown in growth.values()) if growth else None,
        "problems": [problem for cell in cells.values() for problem in cell["problems"]],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run cycles until the time is up; 1 where something was lost or grew, or too few cycles ran to tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=400.0)
    parser.add_argument("--cycles", type=int, default=1_000_000, help="in all, with those that the file has")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--alone", action="store_true", help="no other process uses the device: its memory is watched too"
    )
    options = parser.parse_args(argv)

    import torch

    config = config_of(options)
    results = Results(options.out, header(options, "soak", argv))
    model = load_model(
        config, options, kv_tokens=1024 if options.tiny else 1 << 14, block_size=16,
        max_model_len=96 if options.tiny else 1024, max_num_reqs=6 if options.tiny else 64,
    )  # fmt: skip
    model.poison_padding()
    executor, registry = opened(model)
    print(f"{model!r}: ready after {results.elapsed():.0f} s", flush=True)
    process = 1 + max((cell["process"] for cell in results.cells.values()), default=0)
    with torch.no_grad():
        while len(results.cells) < options.cycles and results.elapsed() < options.seconds:
            number = len(results.cells)
            cycle = Cycle(model, executor, registry, number, tiny=options.tiny).run(options.steps)
            results.put(str(number), {**cycle, "process": process, "memory": memory(model)})
            print(number, results.cells[str(number)], flush=True)
    total = results.data["total"] = summary(results.cells, alone=options.alone)
    results.write()
    print(json.dumps(total), flush=True)
    return 1 if total["problems"] or not total["memory_flat"] else 0


if __name__ == "__main__":
    sys.exit(main())
