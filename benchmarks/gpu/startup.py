"""What start-up takes: graphs of vLLM's default list, of a planned ladder, and lazy capture from cold.

``lists``: seconds and bytes of each, captured into a fresh executor once all of them have been: a process's first
captures load and compile kernels, for the lists behind them too (``first_seconds``). ``lazy`` serves requests with so
much time a step for capture, and has what that captured; its bytes and seconds are of that. `registry_bytes` are what
captures noted, which is what a budget counts; `device_bytes` what the device had less, of which torch had
`torch_reserved_bytes`, and tensors `torch_live_bytes`; `torch_cached_bytes` what torch kept for later and gave back
when it was asked to, before the others were read; `kept_bytes` what it has less once all is released.

``first_step``: a fresh Engine, then its first step, a prompt. A lazy Engine over an eager one, in pairs in one process
whose kernels are compiled: 1.2 is the limit. With ``--cold`` also once each in fresh processes.

``steady``: the same requests served by a lazy Engine that has what it needs and by a fully captured one, step by step
in turn: the ratio of their steps' times, 1.01 being the limit. The lazy one serves the requests until it has nothing
left to capture (`step_ms`: the mean step of each, in the middle pair). Both decide by the table that the captured one
measures in `capture`, so that graphs alone differ. With ``--own-tables`` the lazy Engine measures one itself, between
steps, in slices of the time that it has for capture: by simulation 40 s of them for Qwen2.5-0.5B and 150 for
DeepSeek-V2-Lite, and anew with each graph that comes.

Engines mend their tables as they serve. With ``--profile`` all of them have that table instead.

Run: ``python -m benchmarks.gpu.startup --config FILE --out FILE [--plan plan.json] [--profile NAME] [--cold]``
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.command import input_file, profile
from benchmarks.gpu.common import Results, add_options, config_of, free, header, host_noise, load_model, synchronise
from benchmarks.pairs import interval
from kpolicy.heap import frozen_heap

FIRST_LIMIT, STEADY_LIMIT = 1.2, 1.01
LAZY_S = 0.005
"""Seconds a step for capture"""
POLICY = "auto"
MOST_PASSES = 60


class Bench:
    """A model, and what serves it.

    Args:
        options: the command's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        from kpolicy.settings import Settings

        tiny = options.tiny
        self.options = options
        self.settings = Settings(max_num_reqs=8 if tiny else 256, max_num_tokens=64 if tiny else 2048)
        self.model = load_model(
            config_of(options), options, kv_tokens=4096 if tiny else 1 << 17, max_model_len=128 if tiny else 4096,
            max_num_reqs=self.settings.max_num_reqs,
        )  # fmt: skip
        self.costs: Any = None
        if options.profile:
            from kpolicy.profiles import load_profile

            self.costs = load_profile(options.profile).costs

    def engine(self, spec: str = POLICY, **arguments: Any) -> Any:
        """A fresh Engine with an executor and a registry of its own."""
        from kpolicy.engine import Engine

        device = self.model.device.type
        arguments.setdefault("costs", self.costs)
        return Engine(spec, model=self.model, device=device, settings=self.settings, **arguments)

    def prompt(self, length: int) -> Any:
        from benchmarks.gpu.regret import inputs_of

        return inputs_of({"decodes": [], "chunks": [(length, 0)], "steps": 1}, self.model)

    def requests(self, count: int, seed: int) -> list[tuple[int, int]]:
        """(prompt tokens, tokens to generate) each: lengths as chats have them, even in their logarithm."""
        rng, tiny = random.Random(seed), self.options.tiny
        longest = 40 if tiny else 1500
        return [(max(1, int(longest ** rng.random())), rng.randint(4, 12 if tiny else 120)) for _ in range(count)]

    def serve(self, engine: Any, requests: Sequence[tuple[int, int]], at_once: int) -> tuple[float, int]:
        """(seconds of all steps, steps); so many requests are under way at once."""
        times = list(self.steps(engine, requests, at_once))
        return sum(times), len(times)

    def steps(self, engine: Any, requests: Sequence[tuple[int, int]], at_once: int) -> Iterator[float]:
        """Serve, and give the seconds of each step after it."""
        from kpolicy.scheduling.batching import Batcher, Generation

        batcher = Batcher(self.settings, num_blocks=self.model.num_blocks, block_size=self.model.block_size)
        left = [
            Generation(i, [(7 * i + j) % self.model.vocab for j in range(prompt)], new)
            for i, (prompt, new) in enumerate(requests)
        ]
        left.reverse()
        while left or not batcher.idle:
            while left and len(batcher.running) + len(batcher.waiting) < at_once:
                batcher.add(left.pop())
            batch = batcher.next_batch()
            if batch is None:
                continue
            begun = time.perf_counter()
            outputs = engine.step(batch.inputs)
            for event in outputs.ready:
                event.wait()
            passed = time.perf_counter() - begun
            batcher.complete(batch, outputs, lambda row: int(row.argmax()))
            yield passed

    def used(self) -> dict[str, int]:
        """Bytes in use of the device, of what torch reserves there, of tensors, and what torch had cached.

        0 on a CPU.
        """
        import torch

        if self.model.device.type != "cuda":
            free()
            return dict.fromkeys(("device", "torch_reserved", "torch_live", "torch_cached"), 0)
        gc.collect()
        reserved = torch.cuda.memory_reserved()
        free()
        available, total = torch.cuda.mem_get_info()
        return {
            "device": total - available, "torch_reserved": torch.cuda.memory_reserved(),
            "torch_live": torch.cuda.memory_allocated(), "torch_cached": reserved - torch.cuda.memory_reserved(),
        }  # fmt: skip


def captured(bench: Bench, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Seconds and bytes of capturing all graphs of an Engine."""
    before = bench.used()
    engine = bench.engine(calibrate=0, **arguments)
    begun = time.perf_counter()
    engine.capture()
    synchronise(bench.options.device)
    seconds = time.perf_counter() - begun
    found = told(bench, name, engine, seconds, before)
    engine.release()
    del engine
    return {**found, "kept_bytes": bench.used()["device"] - before["device"]}


def told(bench: Bench, name: str, engine: Any, seconds: float, before: dict[str, int]) -> dict[str, Any]:
    """What an Engine's graphs took."""
    totals, after = engine.registry.totals(), bench.used()
    return {
        "list": name, "graphs": len(engine.registry.captured()), "seconds": round(seconds, 3),
        "registry_bytes": totals.bytes_live,
        **{f"{of}_bytes": after[of] - (0 if of == "torch_cached" else before[of]) for of in after},
        "failed": {str(key): why[:200] for key, why in getattr(engine.executor, "capture_errors", {}).items()},
    }  # fmt: skip


def lists(bench: Bench, requests: Sequence[tuple[int, int]], at_once: int) -> list[dict[str, Any]]:
    """vLLM's default list under vLLM's rule, auto's own, a plan's, and lazy after serving."""
    wanted: dict[str, dict[str, Any]] = {"vllm's default": {"spec": "vllm"}, f"{POLICY}'s default": {}}
    if bench.options.plan:
        from kpolicy.schemas import read_plan

        wanted["planned"] = {"ladder": read_plan(bench.options.plan).sizes}
    # By the second, all kernels are loaded and compiled.
    first = {name: captured(bench, name, wanted[name])["seconds"] for name in wanted}
    second = {name: captured(bench, name, wanted[name]) for name in reversed(wanted)}
    rows = [{**second[name], "first_seconds": first[name]} for name in wanted]
    before = bench.used()
    engine = bench.engine(lazy=LAZY_S)
    bench.serve(engine, requests, at_once)
    seconds = sum(engine.registry.record(key).seconds for key in engine.registry.captured())
    rows.append(told(bench, f"lazy, {LAZY_S * 1e3:g} ms a step", engine, seconds, before))
    engine.release()
    return rows


def first_step(bench: Bench, pairs: int, length: int) -> dict[str, Any]:
    """A fresh Engine's first step: lazy over eager."""
    inputs = bench.prompt(length)

    def once(lazy: bool) -> float:
        free()
        begun = time.perf_counter()
        engine = bench.engine(POLICY, lazy=LAZY_S) if lazy else bench.engine("eager")
        outputs = engine.step(inputs)
        for event in outputs.ready:
            event.wait()
        passed = time.perf_counter() - begun
        graphs = len(engine.registry.captured())
        engine.release()
        if graphs:
            sys.exit(f"the first step captured {graphs} graphs")
        return passed * 1e3

    once(True), once(False)
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(pairs):
        for lazy in (True, False) if i % 2 else (False, True):
            times[lazy].append(once(lazy))
    ratio, low, high = interval([a / b for a, b in zip(times[True], times[False], strict=True)])
    return {
        "prompt_tokens": length, "pairs": pairs, "lazy_ms": round(statistics.median(times[True]), 2),
        "eager_ms": round(statistics.median(times[False]), 2), "ratio": round(ratio, 4),
        "interval": [round(low, 4), round(high, 4)], "limit": FIRST_LIMIT,
    }  # fmt: skip


def steady(bench: Bench, requests: Sequence[tuple[int, int]], at_once: int, pairs: int) -> dict[str, Any]:
    """Steps' time of a lazy Engine that has captured what it needs, over a fully captured one's."""
    own = bench.options.own_tables
    full = bench.engine(calibrate=0.5 if bench.options.tiny else bench.options.calibrate)
    full.capture()
    lazy = bench.engine(lazy=LAZY_S, **({} if own else {"costs": full.costs}))
    passes, begun, settled = 0, time.monotonic(), False
    # Until a pass over the requests captures nothing, and where the table is its own decides by one with all graphs.
    while not settled and passes < MOST_PASSES and time.monotonic() - begun < bench.options.warm:
        before = len(lazy.registry.captured()), lazy.costs.version if own else ""
        bench.serve(lazy, requests, at_once)
        passes += 1
        settled = (len(lazy.registry.captured()), lazy.costs.version if own else "") == before and not lazy.lazy_pending
    found: dict[str, Any] = {
        "passes_until_steady": passes, "settled": settled, "settled_s": round(time.monotonic() - begun, 1),
        "why_not_measured": full.calibration_error,
    }  # fmt: skip
    if settled:
        bench.serve(full, requests, at_once)
    ratios, means, steps = [], [], 0
    with frozen_heap():
        # Before it is settled its steps hold what it captures and measures.
        for i in range(pairs if settled else 0):
            # Both serve at once, step by step in turn: how long a request is doesn't depend on its tokens, so that
            # KV written by two doesn't matter.
            both = [bench.steps(engine, requests, at_once) for engine in (lazy, full)]
            seconds, steps = [0.0, 0.0], 0
            for order in itertools.cycle(((0, 1), (1, 0)) if i % 2 else ((1, 0), (0, 1))):
                times = [(which, next(both[which], None)) for which in order]
                if any(each is None for _, each in times):
                    break
                steps += 1
                for which, each in times:
                    seconds[which] += each or 0.0
            ratios.append(seconds[0] / seconds[1])
            means.append([1e3 * each / steps for each in seconds])
    found |= {
        "costs": {"lazy": lazy.costs.version, "full": full.costs.version}, "lazy_graphs": len(lazy.registry.captured()),
        "full_graphs": len(full.registry.captured()),
    }  # fmt: skip
    if settled:
        ratio, low, high = interval(ratios)
        found |= {
            "steps": steps, "pairs": pairs,
            "step_ms": {
                which: round(statistics.median(each), 4)
                for which, each in zip(("lazy", "full"), zip(*means, strict=True), strict=True)
            },
            "ratio": round(ratio, 4), "interval": [round(low, 4), round(high, 4)],
            "limit": STEADY_LIMIT,
        }  # fmt: skip
    lazy.release()
    full.release()
    return found


def child(bench: Bench, which: str) -> int:
    """A fresh process: an Engine, and its first step."""
    inputs = bench.prompt(32 if bench.options.tiny else 128)
    synchronise(bench.options.device)
    begun = time.perf_counter()
    engine = {
        "eager": lambda: bench.engine("eager"),
        "lazy": lambda: bench.engine(lazy=LAZY_S),
        "captured": lambda: bench.engine("vllm"),
    }[which]()
    if which == "captured":
        engine.capture()
    outputs = engine.step(inputs)
    for event in outputs.ready:
        event.wait()
    print(json.dumps({"which": which, "first_step_s": round(time.perf_counter() - begun, 3)}))
    engine.release()
    return 0


def cold(options: argparse.Namespace) -> list[dict[str, Any]]:
    """First steps of fresh processes; compiled kernels may be in Triton's cache on the disk."""
    rows = []
    for which in ("eager", "lazy", "lazy", "eager", "captured"):
        command = [sys.executable, "-m", "benchmarks.gpu.startup", "--config", str(options.config), "--device",
                   options.device, "--out", str(options.out), "--child", which]  # fmt: skip
        command += ["--tiny"] if options.tiny else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        rows.append(json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {
            "which": which, "failed": done.stderr[-500:]
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure the parts that the file doesn't have, and the lazy Engine that hadn't settled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=300.0)
    parser.add_argument("--plan", type=input_file, help="a ladder plan of kpolicy plan")
    parser.add_argument("--profile", type=profile, help="costs to decide by; measured by each Engine itself by default")
    parser.add_argument("--calibrate", type=float, default=8.0, help="seconds that the captured Engine measures costs")
    parser.add_argument("--own-tables", action="store_true", help="the lazy Engine measures its costs itself")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds that the lazy Engine may take to settle")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--child", choices=("eager", "lazy", "captured"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)

    import torch

    noise = None if options.child else host_noise()
    with torch.no_grad():
        bench = Bench(options)
        if options.child:
            return child(bench, options.child)
        results = Results(options.out, header(options, "startup", argv))
        results.data["host_noise"] = noise
        print(f"{bench.model!r}: ready after {results.elapsed():.0f} s", flush=True)
        count, at_once = (12, 4) if options.tiny else (96, 32)
        requests = bench.requests(count, 0)
        parts: dict[str, Callable[[], Any]] = {
            "first_step": lambda: first_step(bench, 3 * options.pairs, 32 if options.tiny else 128),
            "lists": lambda: lists(bench, requests, at_once),
            "steady": lambda: steady(bench, requests, at_once, options.pairs),
            **({"cold": lambda: cold(options)} if options.cold else {}),
        }  # fmt: skip
        for name, part in parts.items():
            done = results.cells.get(name)
            unsettled = isinstance(done, dict) and done.get("settled") is False
            if (done is None or unsettled) and results.elapsed() < options.seconds:
                results.put(name, part())
                print(name, json.dumps(results.cells[name]), f"{results.elapsed():.0f} s", flush=True)
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
