"""One vLLM engine in a process of its own: says how it started, then serves loads that its parent sends.

Lines of JSON come in on standard input; answers go out on standard output behind ``RES``, among vLLM's own lines.
The shim comes in by vLLM's plugin or not at all; ``--hold`` only has it wait before it times graphs.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from benchmarks.vllm.profiled import profiled
from benchmarks.vllm.replay_state import bring_about
from benchmarks.vllm.step_rows import Ended, step_rows
from kpolicy.host_speed import host_work_us

PHASES = (
    ("load_model", "load_model_s"),
    ("profile_run", "profile_run_s"),
    ("profile_cudagraph_memory", "profile_graphs_s"),
    ("capture_model", "capture_s"),
)
LOOKS = 20
"""Times that the host's speed is taken at a turn's start, and at its end"""
SLOWEST = 0.02
"""Share of a turn's gaps that ``gap_slow_ms`` is the mean of"""
MOST_FIRSTS = 256
"""Requests of a load up to which each one's first token is told"""


def emit(**row: Any) -> None:
    """One answer."""
    print("RES " + json.dumps(row), flush=True)


def host_now() -> tuple[int, float]:
    """The core that this thread is on, and microseconds of the host's fixed work there."""
    return ctypes.CDLL(None).sched_getcpu(), statistics.median(host_work_us() for _ in range(LOOKS))


def time_phases(phases: dict[str, Any]) -> None:
    """Have both runners' start-up phases timed into `phases`, and the bytes that captures return."""
    import vllm.v1.worker.gpu.model_runner as runner_v2
    import vllm.v1.worker.gpu_model_runner as runner_v1

    def timed(cls: type, name: str, key: str) -> None:
        inner = cls.__dict__.get(name)
        if inner is None:
            return

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                result = inner(*args, **kwargs)
            finally:
                phases[key] = round(phases.get(key, 0.0) + time.perf_counter() - start, 3)
            if key == "capture_s" and isinstance(result, int):
                phases["graph_mib"] = round(result / 2**20, 1)
            return result

        setattr(cls, name, outer)

    for cls in (runner_v1.GPUModelRunner, runner_v2.GPUModelRunner):
        for name, key in PHASES:
            timed(cls, name, key)


def break_attention(factor: float) -> None:
    """Have models loaded from now on with a wrong scale in attention: what a check must notice."""
    import vllm.v1.worker.gpu.model_runner as runner_v2
    import vllm.v1.worker.gpu_model_runner as runner_v1

    def broken(inner: Any) -> Any:
        @functools.wraps(inner)
        def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(self, *args, **kwargs)
            for layer in self.vllm_config.compilation_config.static_forward_context.values():
                layer.impl.scale *= factor
            return result

        return load_model

    for cls in (runner_v1.GPUModelRunner, runner_v2.GPUModelRunner):
        cls.load_model = broken(cls.load_model)


def hold_calibration() -> None:
    """Have the shim say so and wait for a line before it times graphs: nothing else may be at work then."""
    from kpolicy_vllm import calibrate as module

    inner = module.calibrate

    def calibrate(*args: Any, **kwargs: Any) -> Any:
        emit(kind="waits")
        sys.stdin.readline()
        return inner(*args, **kwargs)

    module.calibrate = calibrate


def steadier(first: Sequence[float], gaps: Sequence[float]) -> dict[str, float]:
    """Two figures of a turn that every request, or every slow gap, has a part in, where a percentile is one of them.

    ``ttft_geo_ms`` is the geometric mean of first tokens, so that the ratio of two turns is the mean of their requests'
    own ratios; ``gap_slow_ms`` the mean of the slowest `SLOWEST` of all gaps, which a 99th percentile lies within.

    Args:
        first: seconds to each request's first token.
        gaps: seconds between tokens.
    """
    found = {"ttft_geo_ms": round(1e3 * statistics.geometric_mean(first), 4)}
    if gaps:
        slow = sorted(gaps)[-max(1, round(SLOWEST * len(gaps))) :]
        found["gap_slow_ms"] = round(1e3 * statistics.fmean(slow), 4)
    return found


def shifted(requests: list[list[float]], seed: str, most_s: float) -> list[list[float]]:
    """The requests, each up to so much later by the turn's seed: alike on all sides, and otherwise in each turn.

    Arrivals of a trace are the same in every turn, so that one that lies where a step ends falls on the same side of
    it again and again. What comes at once stays as it is, and so does the first request.
    """
    if not most_s or not requests[-1][0]:
        return requests
    chance = random.Random(f"shift {seed}")
    first, *others = requests
    return [first, *sorted([at + chance.random() * most_s, prompt, output] for at, prompt, output in others)]


class Incoming:
    """What vLLM's engine core in a process of its own has for an input queue: here, requests whose time has come."""

    mutex: AbstractContextManager[None] = nullcontext()

    def __init__(self) -> None:
        self.due: Callable[[], Sequence[int]] = tuple
        """The prompt tokens of each"""

    def empty(self) -> bool:
        return not self.due()

    @property
    def queue(self) -> list[tuple[Any, tuple[Any, int]]]:
        """They, as they stand in vLLM's."""
        kind = SimpleNamespace(name="ADD")
        return [(kind, (SimpleNamespace(num_tokens=each, num_computed_tokens=0), 0)) for each in self.due()]


def waiting(core: Any, incoming: Incoming) -> Any:
    """What waits in this process's loop as it would in that of vLLM's engine core; None on the stock side."""
    additional = core.vllm_config.additional_config
    if not isinstance(additional, dict) or additional.get("kpolicy", False) is False:
        return None
    from kpolicy_vllm.defer import made_for

    return made_for(
        SimpleNamespace(
            vllm_config=core.vllm_config, scheduler=core.scheduler, model_executor=core.model_executor,
            batch_queue=core.batch_queue, batch_queue_size=core.batch_queue_size, input_queue=incoming,
            is_running=lambda: True,
        )
    )  # fmt: skip


class Engine:
    """A vLLM engine in this process.

    Args:
        options: the command line's.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        phases: dict[str, Any] = {}
        start = time.perf_counter()
        import torch
        from vllm import LLM

        time_phases(phases)
        if options.break_attention:
            break_attention(options.break_attention)
        if options.hold:
            hold_calibration()
        imported = time.perf_counter()
        sys.stdin.readline()  # imports may be done ahead; the engine starts when told
        told = time.perf_counter()
        arguments: dict[str, Any] = {
            "model": options.model, "load_format": options.load_format, "dtype": "bfloat16",
            "skip_tokenizer_init": True, "gpu_memory_utilization": options.util, "max_model_len": options.max_len,
            "max_num_seqs": options.max_seqs, "max_num_batched_tokens": options.max_tokens, "seed": 0,
            **json.loads(options.llm),
        }  # fmt: skip
        self._llm = LLM(**arguments)
        torch.cuda.synchronize()
        ready = time.perf_counter()
        self._torch = torch
        self.engine = self._llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        worker = core.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        self._shift_s = options.shift_ms / 1e3
        self._step_tokens = self.scheduler.max_num_scheduled_tokens
        self.taken: list[tuple[str, int]] = []
        self.stats: list[tuple[Any, ...]] = []
        """Of each step, what vLLM's own ``--cudagraph-metrics`` notes"""
        self.ended: list[Ended] = []
        self._count_modes()
        self._note_ends()
        self._served = 0
        self._incoming = Incoming()
        self._deferral = waiting(core, self._incoming)
        config = self.engine.vllm_config
        compilation = config.compilation_config
        emit(
            kind="startup", import_s=round(imported - start, 2), start_s=round(ready - told, 2),
            compile_s=round(compilation.compilation_time, 2), **phases,
            mode=str(compilation.cudagraph_mode), level=str(compilation.mode),
            sizes=compilation.cudagraph_capture_sizes, graphs=self._graphs(),
            runner=type(self.runner).__module__, scheduler=type(self.scheduler).__name__,
            asynchronous=bool(config.scheduler_config.async_scheduling),
            kv_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            estimate_mib=round((getattr(worker, "cudagraph_memory_estimate", 0) or 0) / 2**20, 1),
            step_tokens=self._step_tokens, gpu=torch.cuda.get_device_name(0), torch=str(torch.__version__),
            vllm=sys.modules["vllm"].__version__,
        )  # fmt: skip

    def _graphs(self) -> dict[str, int]:
        manager = getattr(self.runner, "cudagraph_manager", None)
        if manager is not None:
            return {str(mode): len(found) for mode, found in manager._capture_descs.items()}
        return {str(mode): len(found) for mode, found in self.runner.cudagraph_dispatcher.cudagraph_keys.items()}

    def _count_modes(self) -> None:
        """Note the mode of every step. The same wrapper on both sides."""
        taken, stats = self.taken, self.stats
        manager = getattr(self.runner, "cudagraph_manager", None)
        if manager is not None:
            inner = manager.dispatch

            def dispatch(*args: Any, **kwargs: Any) -> Any:
                desc = inner(*args, **kwargs)
                taken.append((desc.cg_mode.name, desc.num_tokens))
                return desc

            manager.dispatch = dispatch
            return
        determine = self.runner._determine_batch_execution_and_padding

        def determined(*args: Any, **kwargs: Any) -> Any:
            found = determine(*args, **kwargs)
            taken.append((found[0].name, found[1].num_tokens))
            if found[4] is not None:
                noted = found[4]
                stats.append(
                    (
                        noted.num_unpadded_tokens,
                        noted.num_padded_tokens,
                        noted.num_paddings,
                        str(noted.runtime_mode),
                    )
                )
            return found

        self.runner._determine_batch_execution_and_padding = determined

    def _note_ends(self) -> None:
        """Note when each step's outputs came. The same wrapper on both sides."""
        inner, ended, clock = self.scheduler.update_from_output, self.ended, time.perf_counter

        def update_from_output(step: Any, *args: Any, **kwargs: Any) -> Any:
            if step.total_num_scheduled_tokens:
                ended.append(Ended(clock(), step.total_num_scheduled_tokens, len(step.num_scheduled_tokens)))
            return inner(step, *args, **kwargs)

        self.scheduler.update_from_output = update_from_output

    def serve(self, requests: list[list[float]], seed: str, step_tokens: int | None) -> dict[str, Any]:
        """Serve a load to its end; its figures.

        Args:
            requests: (arrival in seconds, prompt tokens, output tokens).
            seed: of the prompts' tokens; a prefix cache must not know them from another run.
            step_tokens: tokens a step may have; None for the engine's own limit.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.scheduler.max_num_scheduled_tokens = step_tokens or self._step_tokens
        requests = shifted(requests, seed, self._shift_s)
        chance, vocab = random.Random(seed), self.engine.vllm_config.model_config.get_vocab_size()
        prompts = [chance.choices(range(10, vocab - 10), k=int(prompt)) for _, prompt, _ in requests]
        params = [
            SamplingParams(
                max_tokens=int(output), ignore_eos=True, detokenize=False, temperature=0.0,
                output_kind=RequestOutputKind.DELTA,
            )
            for _, _, output in requests
        ]  # fmt: skip
        gc.collect()
        gc.freeze()
        self.taken.clear()
        engine, count = self.engine, len(requests)
        first_id, self._served = self._served, self._served + count
        begun = [arrival for arrival, _, _ in requests]
        times: list[list[float]] = [[] for _ in requests]
        steps: list[float] = []
        added = done = 0
        added_s = 0.0
        self._torch.cuda.synchronize()
        before = host_now()
        start = now = time.perf_counter()
        self.ended[:] = [Ended(start)]

        def due() -> list[int]:
            now_s, until = time.perf_counter() - start, added
            while until < count and begun[until] <= now_s:
                until += 1
            return [int(prompt) for _, prompt, _ in requests[added:until]]

        def take_in() -> None:
            nonlocal added, added_s
            now_s = time.perf_counter() - start
            while added < count and begun[added] <= now_s:
                engine.add_request(str(first_id + added), {"prompt_token_ids": prompts[added]}, params[added])
                added += 1
                added_s = time.perf_counter() - start

        self._incoming.due = due
        while done < count:
            if self._deferral is None:
                take_in()
            else:
                self._deferral.process(take_in)
            if added == done:
                time.sleep(max(0.0, begun[added] - (time.perf_counter() - start)))
                now = time.perf_counter()
                self.ended.append(Ended(now))
                continue
            outputs = engine.step()
            now = time.perf_counter()
            if outputs:
                steps.append(now)
            for output in outputs:
                which = int(output.request_id) - first_id
                times[which] += [now - start] * len(output.outputs[0].token_ids)
                done += output.finished
        wall = now - start
        after = host_now()
        figures = self._figures(requests, begun, times, steps, wall)
        figures |= {"host_us": round((before[1] + after[1]) / 2, 2), "cores": [before[0], after[0]]}
        if not begun[-1]:
            # All come at once, and are added before the first step: no policy decides how long that takes.
            figures["added_ms"] = round(1e3 * added_s, 2)
            figures["ttft_after_p50_ms"] = round(figures["ttft_p50_ms"] - 1e3 * added_s, 4)
        if count <= MOST_FIRSTS:
            figures["ttft_ms"] = [round(1e3 * (each[0] - at), 2) for each, at in zip(times, begun, strict=True)]
        figures["first_steps_ms"] = [round(1e3 * (each - start), 2) for each in steps[:8]]
        return figures

    def _figures(
        self, requests: Any, begun: list[float], times: list[list[float]], steps: list[float], wall: float
    ) -> dict[str, Any]:
        first = sorted(each[0] - arrival for each, arrival in zip(times, begun, strict=True))
        gaps = sorted(b - a for each in times for a, b in itertools.pairwise(each))
        cycles = sorted(b - a for a, b in itertools.pairwise(steps))
        wrong = sum(len(each) != int(output) for each, (_, _, output) in zip(times, requests, strict=True))

        def at(values: list[float], share: float) -> float | None:
            return round(1e3 * values[min(len(values) - 1, int(share * len(values)))], 4) if values else None

        modes: dict[str, list[int]] = {}
        for (mode, tokens), times_taken in Counter(self.taken).items():
            each = modes.setdefault(mode, [0, 0])
            each[0] += times_taken
            each[1] += tokens * times_taken
        return {
            "requests_per_s": round(len(requests) / wall, 4),
            "tokens_per_s": round(sum(map(len, times)) / wall, 2),
            "ttft_p50_ms": at(first, 0.5), "ttft_p99_ms": at(first, 0.99),
            "gap_p50_ms": at(gaps, 0.5), "gap_p99_ms": at(gaps, 0.99), **steadier(first, gaps),
            "step_p50_ms": at(cycles, 0.5), "step_p99_ms": at(cycles, 0.99),
            "wall_s": round(wall, 4), "steps": len(steps), "modes": modes, "wrong_lengths": wrong,
            **step_rows(self.ended, self.taken),
        }  # fmt: skip


def generate(
    engine: Engine, prompts: list[list[int]], outputs: list[int], every: int, likeliest: int
) -> dict[str, Any]:
    """Greedy tokens, with the raw logits of the likeliest, and what every step was.

    Args:
        engine: the engine.
        prompts: token ids of each request.
        outputs: tokens to generate for each.
        every: a request comes in each so many calls of the engine's step, so the schedule is the same in every run.
        likeliest: of how many tokens a position's logits are given.

    Returns:
        ``tokens`` and ``logits`` by request (each position a {token: raw logit}), ``steps`` as (mode, padded tokens),
        and ``stats`` as vLLM notes them.
    """
    from vllm import SamplingParams

    core = engine.engine
    engine.taken.clear()
    engine.stats.clear()
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[dict[int, float]]] = [[] for _ in prompts]
    engine_id = f"g{time.monotonic_ns()}-"
    added = calls = 0
    while added < len(prompts) or core.has_unfinished_requests():
        if added < len(prompts) and (calls % every == 0 or not core.has_unfinished_requests()):
            params = SamplingParams(
                max_tokens=outputs[added], ignore_eos=True, detokenize=False, temperature=0.0, logprobs=likeliest
            )
            core.add_request(f"{engine_id}{added}", {"prompt_token_ids": prompts[added]}, params)
            added += 1
        calls += 1
        for output in core.step():
            if output.finished:
                which, whole = int(output.request_id.rpartition("-")[2]), output.outputs[0]
                tokens[which] = list(whole.token_ids)
                logits[which] = [
                    {int(token): round(float(each.logprob), 5) for token, each in place.items()}
                    for place in whole.logprobs
                ]
    return {"tokens": tokens, "logits": logits, "steps": engine.taken, "stats": engine.stats}


def main() -> None:
    """Start, then serve what the parent sends until it sends no more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llm", default="{}", help="JSON with further arguments of vllm.LLM")
    parser.add_argument("--util", type=float, default=0.35)
    parser.add_argument("--max-len", type=int, default=4352)
    parser.add_argument("--max-seqs", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--break-attention", type=float, default=0.0, help="multiplies attention's scale, for a check")
    parser.add_argument(
        "--shift-ms",
        type=float,
        default=0.0,
        help="most milliseconds by which a turn's arrivals come later; see `shifted`",
    )
    parser.add_argument("--hold", action="store_true", help="wait for a line before the shim times graphs")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(1, 9)  # ends with its parent
    engine = Engine(options)
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("statistics"):
            emit(kind="statistics", **shim_statistics(engine))
        elif order.get("profile"):
            emit(kind="profile", **profiled(engine, order))
        elif "state" in order:
            emit(kind="state", **bring_about(order["state"]))
        elif "prompts" in order:
            asked = (order[name] for name in ("prompts", "outputs", "every", "likeliest"))
            emit(kind="generated", **generate(engine, *asked))
        else:
            emit(kind="run", **engine.serve(order["requests"], order["seed"], order.get("step_tokens")))
    sys.stdout.flush()
    os._exit(0)


def shim_statistics(engine: Engine) -> dict[str, Any]:
    """What the shim counted and measured, where it is loaded."""
    found: dict[str, Any] = {"loaded": "kpolicy_vllm" in sys.modules}
    try:
        from kpolicy_vllm.state import state_of

        state = state_of(engine.engine.vllm_config)
        state.dispatcher.chooser.count_hits()
        found["counters"] = dict(state.counters.counts)
        found["steps"] = [[*label, *sums] for label, sums in state.dispatcher.chooser.tallies().items()]
        found["costs"] = repr(state.timed)
        found["graphs"] = [
            (str(record.key), record.bytes, round(record.seconds, 4), record.hits)
            for record in state.registry.records()
        ]
    except Exception as error:  # noqa: BLE001 - an extra beside the figures
        found["error"] = repr(error)
    return found


if __name__ == "__main__":
    main()
