"""One SGLang, stock or with kpolicy, that a parent drives through its standard input and output.

The parent sends a JSON object a line, ``{"do": NAME, ...}``; each is answered by one line that begins with ``RES``.
Steps go through SGLang's `ModelRunner` over batches of its own `ScheduleBatch`; traces through its real `Scheduler` and
its event loop, in this process, with arrivals handed over where its socket would be read.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import gc
import itertools
import json
import logging
import os
import random
import statistics
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any

ARGS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "random_seed": 0,
    "attention_backend": "triton", "sampling_backend": "pytorch", "context_length": 8192,
    "chunked_prefill_size": 8192, "disable_radix_cache": True, "log_level": "warning",
}  # fmt: skip


_SLOWEST = 12
"""Steps of a trace that are told one by one."""


def say(**answer: Any) -> None:
    """Answer the parent."""
    print("\nRES " + json.dumps(answer), flush=True)


class Steps:
    """Steps of SGLang's model runner, timed one by one with the device idle before and after."""

    def __init__(self, given: dict[str, Any]) -> None:
        import torch
        from sglang.benchmark import one_batch
        from sglang.srt.entrypoints.engine import _set_envs_and_config
        from sglang.srt.server_args import PortArgs, ServerArgs
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.torch, self.one_batch, self.algorithm = torch, one_batch, SpeculativeAlgorithm.NONE
        self.device = torch.get_device_module(given.get("device", "cuda"))
        self.capture: dict[str, float] = {}
        time_captures(self.capture, self.device)
        started = time.perf_counter()
        self.args = ServerArgs(**{**ARGS, "enable_mixed_chunk": True, **given})
        _set_envs_and_config(self.args)
        for name in ("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"):
            getattr(one_batch, name, lambda _: None)(self.args)
        one_batch.get_tokenizer = lambda *_, **__: None
        loaded = one_batch.load_model(self.args, PortArgs.init_new(self.args), 0, 0)[0]
        self.runner: Any = getattr(loaded, "torch_runner", loaded)
        self.device.synchronize()
        self.init_s = time.perf_counter() - started
        self.tree = one_batch.TreeCacheNamespace(
            page_size=self.args.page_size, device=self.runner.device,
            token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
        )  # fmt: skip
        self.rng, self.served = random.Random(1234), ""
        self.step: Any = None
        self._watch()

    def _watch(self) -> None:
        """Note which runner serves each step."""
        for name in ("decode_cuda_graph_runner", "prefill_cuda_graph_runner", "eager_runner"):
            runner = getattr(self.runner, name, None)
            if runner is None or (name != "eager_runner" and runner is self.runner.eager_runner):
                continue
            run, short = runner.execute, {"d": "D", "p": "P", "e": "-"}[name[0]]

            def execute(*args: Any, run: Any = run, short: str = short, **kwargs: Any) -> Any:
                self.served += short
                return run(*args, **kwargs)

            runner.execute = execute

    def start(self) -> dict[str, Any]:
        runner = self.runner
        decode, prefill = runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner
        return {
            "init_s": round(self.init_s, 2), **self.capture, "kv_tokens": runner.max_total_num_tokens,
            "decode_sizes": list(getattr(decode, "capture_bs", ())),
            "prefill_sizes": list(getattr(prefill, "capture_num_tokens", ()) or ()), "kpolicy": about(runner),
        }  # fmt: skip

    def request(self, ids: list[int]) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(temperature=0, max_new_tokens=1 << 20)
        params.normalize(None)
        made = Req(
            rid=str(self.rng.random()), origin_input_text="", origin_input_ids=array.array("q", ids),
            sampling_params=params,
        )  # fmt: skip
        made.full_untruncated_fill_ids = made.origin_input_ids
        made.logprob_start_len = -1
        made.set_extend_range(0, len(ids))
        return made

    def prompt(self, tokens: int) -> Any:
        vocab = self.runner.model_config.vocab_size
        return self.request([self.rng.randrange(10, vocab - 10) for _ in range(tokens)])

    def extend_batch(self, requests: list[Any]) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        batch = ScheduleBatch.init_new(
            reqs=requests, req_to_token_pool=self.runner.req_to_token_pool, enable_overlap=False,
            token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator, tree_cache=self.tree,
            model_config=self.runner.model_config, spec_algorithm=self.algorithm,
        )  # fmt: skip
        batch.prepare_for_extend()
        return batch

    def load(self, batch: Any, tail: Any = None) -> Any:
        ids = batch.prefill_input_ids_cpu.to(batch.device, non_blocking=True)
        batch.input_ids = ids if tail is None else self.torch.cat([ids, tail])
        batch.prefill_input_ids_cpu = batch.mix_running_indices = None
        return batch

    def logits(self, batch: Any) -> tuple[Any, Any]:
        """(logits, forward batch) of one prepared batch."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        forward_batch = ForwardBatch.init_new(batch, self.runner, return_hidden_states_before_norm=False)
        return self.runner.forward(forward_batch).logits_output, forward_batch

    def forward(self, batch: Any) -> Any:
        logits, forward_batch = self.logits(batch)
        return self.runner.sample(logits, forward_batch)

    @staticmethod
    def grow(batch: Any) -> None:
        for request in batch.reqs:
            request.output_ids.append(1)  # only its length counts: the tokens themselves stay on the device

    def decodes(self, count: int, prompt: int = 32) -> list[Any]:
        """[batch, tokens] of so many requests whose prompts are done."""
        running: Any = None
        tokens: Any = None
        while count:
            batch = self.extend_batch([self.prompt(prompt) for _ in range(min(64, count))])
            count -= len(batch.reqs)
            new = self.forward(self.load(batch))
            self.grow(batch)
            batch.input_ids = None
            if running is None:
                running, tokens = batch, new
            else:
                running.merge_batch(batch)
                tokens = self.torch.cat([tokens, new])
        return [running, tokens]

    def decode(self, state: list[Any]) -> None:
        batch, tokens = state
        batch.input_ids = tokens.to(self.torch.int64)
        batch.prepare_for_decode()
        state[1] = self.forward(batch)
        self.grow(batch)

    def clear(self) -> None:
        self.device.synchronize()
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()

    def take(self, count: int, warm: int = 1) -> dict[str, Any]:
        """Milliseconds of so many steps of the kind that was prepared, after some that aren't timed."""
        times = []
        for i in range(warm + count):
            self.served = ""
            self.device.synchronize()
            started = time.perf_counter()
            self.step()
            self.device.synchronize()
            if i >= warm:
                times.append((time.perf_counter() - started) * 1e3)
        return {"ms": round(statistics.median(times), 4), "served": self.served}

    def prepare(self, kind: str, size: int, core: int | None = None, decodes: int = 32) -> dict[str, Any]:
        """Make ready for a kind of step, ``decode``, ``extend`` or ``mixed``, and run it twice.

        Args:
            kind: the kind.
            size: decode rows, or prompt tokens.
            core: the CPU core that this process's main thread is put on.
            decodes: decode rows beside a prompt.
        """
        if core is not None:
            os.sched_setaffinity(0, {core})
        self.clear()
        found: dict[str, Any] = {}
        if kind == "decode":
            state = self.decodes(size)
            self.step = lambda: self.decode(state)
        elif kind == "extend":
            prompts = [self.prompt(size)]

            def extend() -> None:
                self.clear()
                batch = self.extend_batch([prompts.pop()])
                prompts.append(self.prompt(size))
                self.forward(self.load(batch))

            self.step = extend
        else:
            found["order"] = self.order(decodes, size)
            self.step = self.mixed(decodes, size, found["order"])
        return {**self.take(1), **found}

    def mixed(self, decodes: int, size: int, order: str) -> Any:
        """A step of decodes beside a prompt, in that order."""
        state, prompts = self.decodes(decodes), [self.prompt(size)]

        def step() -> None:
            batch = self.extend_batch([prompts.pop()])
            prompts.append(self.prompt(size))
            running, tokens = state
            if order == "decode first":
                self.decode(state)
            if order != "mixed":
                self.forward(self.load(batch))
            if order == "extend first":
                self.decode(state)
            if order == "mixed":
                running.prepare_for_decode()
                batch.mix_with_running(running)
                state[1] = self.forward(self.load(batch, tokens))[1:].to(self.torch.int64)
                self.grow(running)

        return step

    def order(self, decodes: int, tokens: int) -> str:
        """How kpolicy's scheduler hook would run this cycle; as one mixed batch without kpolicy."""
        try:
            from kpolicy_sglang.split import Split
            from kpolicy_sglang.state import state_of
        except ImportError:
            return "mixed"
        state = state_of(self.runner)
        if state is None or state.mixed is None or state.decode is None or state.decode.costs is None:
            return "mixed"
        return Split(None, state).order(decodes, tokens, 1)


def about(runner: Any) -> dict[str, Any] | None:
    """What kpolicy measured and captured; None without it."""
    try:
        from kpolicy_sglang.state import state_of
    except ImportError:
        return None
    state = state_of(runner)
    if state is None:
        return None
    curves = {
        name: {
            kind: dict(zip(curve.sizes, (round(us) for us in curve.us), strict=True))
            for kind, curve in (("graph", phase.costs.full), ("eager", phase.costs.eager))
        }
        for name, phase in state.phases.items()
        if phase.costs is not None
    }
    mixed = state.mixed
    totals = state.registry.totals().live
    return {
        "policy": {name: phase.policy for name, phase in state.phases.items()}, "us": curves,
        "mixed_us": None if mixed is None else {
            str(rows): dict(zip(curve.sizes, (round(us) for us in curve.us), strict=True))
            for rows, curve in ((mixed.few_rows, mixed.few), (mixed.many_rows, mixed.many))
        },
        "registry": {"graphs": totals.graphs, "mib": round(totals.bytes / 2**20, 1), "s": round(totals.seconds, 3)},
        "beside": round(getattr(state, "beside", 0.0), 3),  # which trees of before don't have
        "long_us": None if state.long is None else dict(zip(state.long.sizes, map(round, state.long.us), strict=True)),
        "measuring_s": round(state.measuring_s, 2), "said": state.messages,
    }  # fmt: skip


def time_captures(into: dict[str, float], device: Any) -> None:
    """Time SGLang's two captures, and what they take of the device's memory; kpolicy's measuring isn't in it.

    ``graphs_s`` is all of `init_cuda_graphs`, with what kpolicy does around the captures, its measuring too.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup as setup

    whole = ModelRunner.init_cuda_graphs

    def init_cuda_graphs(*args: Any, **kwargs: Any) -> Any:
        device.synchronize()
        started = time.perf_counter()
        try:
            return whole(*args, **kwargs)
        finally:
            device.synchronize()
            into["graphs_s"] = round(time.perf_counter() - started, 3)

    ModelRunner.init_cuda_graphs = init_cuda_graphs

    for name in ("capture_prefill_graph", "capture_decode_graph"):
        original, key = getattr(setup, name), name.split("_")[1]

        def wrapper(*args: Any, original: Any = original, key: str = key, **kwargs: Any) -> Any:
            device.synchronize()
            free, started = free_bytes(device), time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                device.synchronize()
                into[f"{key}_s"] = round(time.perf_counter() - started, 3)
                into[f"{key}_mib"] = round((free - free_bytes(device)) / 2**20, 1)

        setattr(setup, name, wrapper)


def free_bytes(device: Any) -> int:
    return int(device.mem_get_info()[0]) if hasattr(device, "mem_get_info") else 0


class Trace:
    """SGLang's scheduler under the requests of a trace."""

    def __init__(self, given: dict[str, Any]) -> None:
        import torch
        from sglang.srt.entrypoints.engine import _set_envs_and_config
        from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
        from sglang.srt.server_args import PortArgs, ServerArgs

        device = torch.get_device_module(given.get("device", "cuda"))
        self.capture: dict[str, float] = {}
        time_captures(self.capture, device)
        started = time.perf_counter()
        args = ServerArgs(**{**ARGS, **given})
        _set_envs_and_config(args)
        configure_scheduler_process(args, 0, 0, 0, 0, 0, 0, None)
        self.scheduler = Scheduler(args, PortArgs.init_new(args), 0, 0, 0, 0, 0, 0, None)
        self.runner = self.scheduler.tp_worker.model_runner
        self.init_s = time.perf_counter() - started
        self.outputs: list[tuple[float, Any]] = []
        sender = self.scheduler.ipc_channels.send_to_detokenizer
        sender.send_output = lambda output, _=None: self.outputs.append((time.perf_counter(), output))
        self.scheduler.ipc_channels.send_to_tokenizer.send_output = lambda *_: None

    def start(self) -> dict[str, Any]:
        runner = self.runner
        return {
            "init_s": round(self.init_s, 2), **self.capture, "kv_tokens": runner.max_total_num_tokens,
            "decode_sizes": list(getattr(runner.decode_cuda_graph_runner, "capture_bs", ())),
            "prefill_sizes": list(getattr(runner.prefill_cuda_graph_runner, "capture_num_tokens", ()) or ()),
            "kpolicy": about(runner),
        }  # fmt: skip

    def run(
        self, requests: list[list[float]], concurrent: int, limit_s: float = 60.0, *, stream: bool = True
    ) -> dict[str, Any]:
        """Serve the requests.

        Args:
            requests: (arrival in seconds, prompt tokens, output tokens).
            concurrent: most requests in flight; others wait outside.
            limit_s: give up after so many seconds.
            stream: hand out every token as it comes.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        scheduler, outputs = self.scheduler, self.outputs
        outputs.clear()
        rng = random.Random(7)
        vocab = self.runner.model_config.vocab_size
        waiting = []
        for i, (arrival, prompt, output) in enumerate(requests):
            params = SamplingParams(temperature=0, max_new_tokens=int(output), ignore_eos=True)
            params.normalize(None)
            ids = array.array("q", rng.choices(range(10, vocab - 10), k=int(prompt)))
            waiting.append((arrival, TokenizedGenerateReqInput(
                rid=f"r{i}", input_text="", input_ids=ids,
                input_embeds=None, mm_inputs=None, token_type_ids=None, sampling_params=params, return_logprob=False,
                logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=stream,
            )))  # fmt: skip
        waiting.reverse()
        times: dict[str, list[float]] = {}
        sent: dict[str, float] = {}
        launched = self._watch_launches()
        before = self._counted()
        state = {"seen": 0, "sent": 0, "done": 0}
        began = time.perf_counter()

        def feed() -> list[Any]:
            now = time.perf_counter()
            while state["seen"] < len(outputs):
                at, output = outputs[state["seen"]]
                state["seen"] += 1
                for rid, reason in zip(output.rids or (), output.finished_reasons, strict=True):
                    times.setdefault(rid, []).append(at)
                    state["done"] += reason is not None
            outputs[: state["seen"]] = []
            state["seen"] = 0
            due = []
            while waiting and waiting[-1][0] <= now - began and state["sent"] - state["done"] < concurrent:
                due.append(waiting.pop()[1])
                sent[due[-1].rid] = now
                state["sent"] += 1
            if state["done"] >= len(requests) or now - began > limit_s:
                scheduler.gracefully_exit = True
            return due

        scheduler.request_receiver = SimpleNamespace(recv_requests=feed)
        scheduler.gracefully_exit = False
        gc.collect()
        gc.freeze()  # as SGLang's own freeze_gc does: what was loaded isn't walked through while serving
        self._loop()
        took = time.perf_counter() - began
        if state["done"] < len(requests):
            raise RuntimeError(f"{state['done']} of {len(requests)} requests were served in {took:.0f} s")
        tokens = sum(int(output) for _, _, output in requests)
        gaps = sorted((after - before) * 1e3 for each in times.values() for before, after in itertools.pairwise(each))
        found: dict[str, Any] = {"done": state["done"], "of": len(requests), "s": round(took, 3), "outputs": tokens}
        firsts = sorted((each[0] - sent[rid]) * 1e3 for rid, each in times.items())
        if firsts:
            found |= {f"ttft_p{q}_ms": round(_at(firsts, q), 1) for q in (50, 99)}
            found["ttft_ms"] = {str(q): round(_at(firsts, q), 1) for q in (25, 75, 90, 95, 98, 99.5, 100)}
        if gaps:
            found["gaps_ms"] = {str(q): round(_at(gaps, q), 2) for q in (25, 75, 90, 95, 98, 99, 99.5, 99.9)}
            found |= {
                "req_per_s": round(state["done"] / took, 3), "tok_per_s": round(tokens / took, 1),
                "gap_p50_ms": round(gaps[len(gaps) // 2], 3), "gap_p99_ms": round(gaps[int(0.99 * len(gaps))], 3),
                "gap_mean_ms": round(sum(gaps) / len(gaps), 3),
            }  # fmt: skip
            # Of a request by itself: from its first token to its last, over the tokens after the first.
            paces = sorted((each[-1] - each[0]) / (len(each) - 1) * 1e3 for each in times.values() if len(each) > 1)
            found |= {f"pace_p{q}_ms": round(_at(paces, q), 3) for q in (50, 99)}
        found |= launched()
        return found | since(before, self._counted())

    def _counted(self) -> dict[str, Any]:
        """What kpolicy has counted since the start: the scheduler's cycles, and steps by phase."""
        split = getattr(self.scheduler, "_kpolicy_split", None)
        return {"cycles": dict(split.cycles) if split is not None else None, "steps": steps_of(self.runner)}

    def counters(self) -> dict[str, Any]:
        """kpolicy's counters as they are scraped, and the decision log handed to the system, as after five seconds."""
        from prometheus_client import generate_latest

        from kpolicy_sglang.state import state_of

        state = state_of(self.runner)
        if state is not None:
            if state.metrics is not None:
                state.metrics.flush(state.phases, state.failures)
            if state.decision_log is not None:
                state.decision_log.flush()
        scraped = generate_latest().decode().splitlines()
        return {"counters": [line for line in scraped if line.startswith("sglang:kpolicy") and "_created" not in line]}

    def _watch_launches(self) -> Any:
        """Have the scheduler's launches timed on the host; what is returned ends that and sums them up.

        By kind and size: how many, mean milliseconds of the host in `run_batch`, and from one launch to the next; the
        longest from one to the next, with seconds since the first; and of decode steps that another follows, by rows,
        how many and the median milliseconds from one to the next.
        """
        scheduler, original = self.scheduler, self.scheduler.run_batch
        seen: list[tuple[float, float, str]] = []
        rows: list[int] = []  # decode rows of each launch, 0 of others

        def run_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = original(batch, *args, **kwargs)
            mode = batch.forward_mode.name.lower()
            size = batch.batch_size() if batch.forward_mode.is_decode() else batch.extend_num_tokens or 0
            seen.append((began, time.perf_counter(), f"{mode} {_bin(size)}"))
            rows.append(size if batch.forward_mode.is_decode() else 0)
            return found

        def ended() -> dict[str, Any]:
            scheduler.run_batch = original
            sums: dict[str, list[float]] = {}
            for (began, done, kind), (after, _, _) in itertools.pairwise(seen):
                each = sums.setdefault(kind, [0, 0.0, 0.0])
                each[0], each[1], each[2] = each[0] + 1, each[1] + (done - began) * 1e3, each[2] + (after - began) * 1e3
            steps = [
                (after - began, began - seen[0][0], kind)
                for (began, _, kind), (after, _, _) in itertools.pairwise(seen)
            ]
            slowest = [
                (round(ms * 1e3, 1), round(s, 3), kind) for ms, s, kind in sorted(steps, reverse=True)[:_SLOWEST]
            ]
            decodes: dict[int, list[float]] = {}
            for (size, then), ((began, _, _), (after, _, _)) in zip(
                itertools.pairwise(rows), itertools.pairwise(seen), strict=True
            ):
                if size and then:
                    decodes.setdefault(size, []).append((after - began) * 1e3)
            return {
                "launches": {kind: [n, round(a / n, 2), round(b / n, 2)] for kind, (n, a, b) in sorted(sums.items())},
                "slowest": slowest,
                "decodes": {
                    size: [len(each), round(statistics.median(each), 3)] for size, each in sorted(decodes.items())
                },
            }

        scheduler.run_batch = run_batch
        return ended

    def _loop(self) -> None:
        """The scheduler's own loop, on its own stream."""
        self.scheduler.run_event_loop()


def _at(values: list[float], percent: float) -> float:
    return values[min(int(percent / 100 * len(values)), len(values) - 1)]


def _bin(size: int) -> int:
    """The power of two that it fits into."""
    return 1 << max(size - 1, 0).bit_length()


def since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Counts less what they were before, at any depth; what wasn't there before was zero."""
    return {
        name: since(before.get(name) or {}, value) if isinstance(value, dict)
        else value - (before.get(name) or 0) if value is not None else None
        for name, value in now.items()
    }  # fmt: skip


def steps_of(runner: Any) -> dict[str, Any] | None:
    """Steps by phase that kpolicy counted: as decided, and refused by SGLang."""
    from importlib.util import find_spec

    if find_spec("kpolicy_sglang") is None:
        return None
    from kpolicy_sglang.state import state_of

    state = state_of(runner)
    if state is None:
        return None
    return {name: {"decided": sum(p.steps), "refused": sum(p.refused.values())} for name, p in state.phases.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("steps", "trace", "check"))
    parser.add_argument("--args", default="{}", help="JSON with arguments of SGLang")
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(1, 9)  # die with the parent
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    import sglang.srt.managers.scheduler  # noqa: F401  what a plugin finds in SGLang's own process
    from sglang.srt.plugins import load_plugins

    load_plugins()
    say(ready=True)
    sys.stdin.readline()
    arguments = json.loads(given.args)
    if given.kind == "check":
        from check import Check  # type: ignore[import-not-found]  # beside this script

        server: Any = Check(arguments)
    else:
        server = (Steps if given.kind == "steps" else Trace)(arguments)
    import torch

    say(**server.start())
    with torch.no_grad():
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "quit":
                break
            try:
                say(**getattr(server, asked.pop("do"))(**asked))
            except Exception as error:  # noqa: BLE001  the parent notes it and goes on
                traceback.print_exc()
                say(error=f"{type(error).__name__}: {error}"[:500])
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent waits for an answer
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}"[:500])
        os._exit(1)
