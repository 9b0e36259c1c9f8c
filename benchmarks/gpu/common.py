"""What the GPU benchmarks share: options, models, Engines over one executor, and result files that a run goes on from.

``--tiny`` shrinks any config to a toy of the same architecture, and ``--device cpu`` runs it without a GPU: a dry run
of a whole benchmark in seconds, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command_line
from benchmarks.student import student

__all__ = [
    "LADDER", "VLLM_SIZES", "Results", "add_options", "config_of", "first_false", "free", "header",
    "host_noise", "interval_of_mean", "load_model",
    "logits_of", "open_engines", "opened", "ran", "random_shape", "sampled_of", "steady", "synchronise", "versions",
    "with_tokens",
]  # fmt: skip

VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""vLLM's default list for 256 requests"""
LADDER = (*VLLM_SIZES, 640, 768, 1024, 1280, 1536, 1792, 2048)


def add_options(parser: argparse.ArgumentParser, *, seconds: float) -> None:
    """Options that every benchmark takes."""
    parser.add_argument("--config", type=Path, required=True, help="a model's config.json, or its folder")
    parser.add_argument("--model", help="what results call it; the config's folder by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same architecture: a dry run")
    parser.add_argument("--layers", type=int, default=0, help="keep only so many layers, at their true width; 0 is all")
    parser.add_argument("--seconds", type=float, default=seconds, help="begin nothing new after so many")
    parser.add_argument("--date", default="unstated")
    parser.add_argument("--out", type=Path, required=True, help="the result file; a run goes on where it ends")


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The config asked for, shrunk where that was asked too; notes its name in the options."""
    path: Path = options.config
    file = path / "config.json" if path.is_dir() else path
    config: dict[str, Any] = json.loads(file.read_text())
    options.model = options.model or (file.parent.name if file.name == "config.json" else file.stem)
    if options.tiny:
        config |= _toy(config)
    if options.layers:
        config["num_hidden_layers"] = min(options.layers, config["num_hidden_layers"])
    return config


def _toy(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of a toy, for the fields that the config has."""
    heads = {"num_key_value_heads": 4 if "kv_lora_rank" in config else 2, "num_attention_heads": 4}
    small: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 256,
        "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_embd": 48, "n_layer": 2, "n_head": 4,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **heads,
    }  # fmt: skip
    if "kv_lora_rank" in config:
        small["head_dim"] = 8
    return {name: value for name, value in small.items() if name in config}


def load_model(
    config: dict[str, Any], options: argparse.Namespace, *, kv_tokens: int, block_size: int = 32, max_model_len: int,
    max_num_reqs: int, dtype: str = "bfloat16",
) -> Any:  # fmt: skip
    """The model with random weights; float32 in dry runs on a CPU, which has no fast bfloat16."""
    from kpolicy.serving.load import load

    cpu = options.device == "cpu"
    longest = min(max_model_len, config.get("max_position_embeddings", config.get("n_positions", max_model_len)))
    return load(
        config, device=options.device, dtype="float32" if cpu else dtype, num_blocks=kv_tokens // block_size,
        block_size=block_size, max_model_len=longest, max_num_reqs=max_num_reqs, kernels=options.kernels,
    )  # fmt: skip


def opened(model: Any, **arguments: Any) -> tuple[Any, Any]:
    """(an executor over the model on its device, its registry)."""
    from kpolicy.executors import get_executor
    from kpolicy.registry import GraphRegistry

    registry = GraphRegistry()
    executor = get_executor(model.device.type, model=model, max_num_reqs=model.max_num_reqs, **arguments)
    executor.open(registry)
    return executor, registry


def open_engines(
    model: Any, settings: Any, specs: Iterable[str], *, ladder: Sequence[int], own: Sequence[str] = ("vllm", "sglang"),
    calibrate_s: float = 8.0, costs: Any = None, correct: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """An Engine for each policy over the graphs of one executor, which nothing is captured twice for.

    Args:
        model: runs.
        settings: the deployment's limits.
        specs: the policies.
        ladder: capture sizes of all but `own`.
        own: policies with the sizes of the serving engine that they are replicas of.
        calibrate_s: seconds to measure costs, where none are given.
        costs: a table to decide by.
        correct: hold costs to the steps that run.

    Returns:
        (Engines by policy, what capture and calibration took).
    """
    from kpolicy.engine import Engine
    from kpolicy.serving.calibrate import calibrate

    executor, registry = opened(model)
    shared: dict[str, Any] = {
        "attention": model.support, "settings": settings, "executor": executor, "registry": registry, "calibrate": 0,
        "correct": correct,
    }  # fmt: skip

    def made(spec: str, costs: Any = None) -> Any:
        return Engine(spec, ladder=None if spec in own else list(ladder), costs=costs, **shared)

    begun = time.perf_counter()
    for spec in dict.fromkeys(("auto", *specs)):
        made(spec).capture()
    capture_s = time.perf_counter() - begun
    if costs is None:
        costs = calibrate(executor, registry, model, settings, allowance_s=calibrate_s)
    engines = {spec: made(spec, costs) for spec in specs}
    failed = {str(key): why[:200] for key, why in executor.capture_errors.items()}
    return engines, {"graphs": len(registry.captured()), "capture_s": round(capture_s, 2), "failed": failed}


def host_noise(seconds: float = 2.0) -> dict[str, float]:
    """How fast the host runs Python, and how evenly; printed too.

    The same loop again and again: microseconds of its fastest run and at p50 and p95, and the share of runs that took
    over 1.25 of the fastest. Virtual machines' cores change between two speeds, which the launches of a step feel.

    Args:
        seconds: to look for.
    """
    times, began = [], time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        sum(i & 7 for i in range(10_000))
        times.append((time.perf_counter() - now) * 1e6)
    times.sort()
    found = {"least_us": times[0], "p50_us": times[len(times) // 2], "p95_us": times[int(0.95 * len(times))]}
    found = {name: round(us, 1) for name, us in found.items()}
    found["slow"] = round(sum(us > 1.25 * times[0] for us in times) / len(times), 3)
    if seconds >= 1:
        print(f"host noise over {seconds:g} s: {found}", flush=True)
    return found


def synchronise(device: str) -> None:
    """Wait for the device, where there is one."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def free() -> None:
    """Give back what can go, before memory is looked at."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def ran(executor: Any, decision: Any, inputs: Any) -> tuple[float, Any]:
    """(microseconds from the call until all outputs are there, the outputs)."""
    start = time.perf_counter()
    outputs = executor.run(decision, inputs)
    for event in outputs.ready:
        event.wait()
    return (time.perf_counter() - start) * 1e6, outputs


def logits_of(outputs: Any) -> list[Any]:
    """The step's logits as device tensors, one a part that has rows; waits for them."""
    parts = getattr(outputs.outputs, "_parts", [outputs.outputs])
    return [part.tensor for part in parts if len(part)]


def sampled_of(outputs: Any) -> list[Any]:
    """The step's sampled tokens as device tensors, one a decode step and part; waits for nothing."""
    # One that has neither is an error: nothing would be compared.
    runs = dict.fromkeys(
        each.part if hasattr(each, "part") else each._part
        for each in (outputs.tokens, outputs.first_tokens)
        if len(each)
    )
    return [tokens for run in runs for tokens in run.tokens if len(tokens)]


def first_false(checks: Sequence[tuple[str, Any]]) -> str:
    """The name of the first check, a device's truth value each, that is false; empty where none is. It waits once."""
    import torch

    if not checks:
        return ""
    held = torch.stack([value.reshape(()) for _, value in checks]).tolist()
    return next((name for (name, _), true in zip(checks, held, strict=True) if not true), "")


def random_shape(
    rng: Any, *, max_decodes: int, max_kv: int, max_new: int, most_chunks: int = 3, steps: int = 1, mixed: bool = True
) -> dict[str, Any]:  # fmt: skip
    """A batch as `benchmarks.gpu.regret.inputs_of` takes it: decode rows' KV, prompt chunks, decode steps ahead.

    Args:
        rng: draws it; sizes are even in their logarithm, so small ones are as common as large ones.
        max_decodes: decode rows.
        max_kv: tokens a row attends to.
        max_new: prompt tokens, all chunks together.
        most_chunks: prompt chunks.
        steps: decode steps that may follow each other.
        mixed: both kinds of rows, always; otherwise one kind in half of the batches.
    """

    def upto(most: int) -> int:
        return min(most, int(math.exp(rng.random() * math.log(most + 1))))

    kinds = 3 if mixed else rng.choice((1, 2, 3, 3))
    decodes = [upto(max_kv) for _ in range(upto(max_decodes))] if kinds & 1 else []
    chunks, left = [], max_new
    for _ in range(rng.randint(1, most_chunks) if kinds & 2 else 0):
        if left > 0:
            new = upto(left)
            chunks.append((new, rng.choice((0, min(upto(max_kv), max_kv - 1)))))
            left -= new
    return {"decodes": decodes, "chunks": chunks, "steps": steps if decodes and chunks else 1}


def with_tokens(inputs: Any, rng: Any, vocab: int) -> Any:
    """The step with tokens drawn at random."""
    return inputs._replace(token_ids=[rng.randrange(vocab) for _ in inputs.token_ids])


def steady(times: Sequence[float]) -> float:
    """The median, to a tenth of a microsecond."""
    return round(statistics.median(times), 1)


def interval_of_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of a 95% interval by Student's t; NaN for one value's bounds."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def versions() -> dict[str, str]:
    """Of what ran."""
    import torch
    import transformers

    import kpolicy

    found = {
        "kpolicy": kpolicy.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    if torch.version.cuda:
        import triton

        found |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
    return found


def header(options: argparse.Namespace, module: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """Where figures come from; argv is what the benchmark was given, None for the process's own arguments."""
    import torch

    from kpolicy.serving.calibrate import device_name

    return {
        "model": options.model + (" (toy)" if options.tiny else f", {options.layers} layers" if options.layers else ""),
        "date": options.date, "device": device_name(torch.device(options.device)), "versions": versions(),
        "command": command_line(f"benchmarks.gpu.{module}", argv),
    }  # fmt: skip


class Results:
    """A result file of named cells. It is written whole after each cell, so a run that is cut off loses one at most.

    Args:
        path: the file; where it is there its cells count as done.
        head: what the file begins with; cells of another model or device aren't mixed in.

    Raises:
        SystemExit: the file is another model's or device's.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {**head, "cells": {}}
        self._begun = time.monotonic()
        if path.exists():
            before = json.loads(path.read_text())
            for name in ("model", "device"):
                if before.get(name) != head[name]:
                    sys.exit(f"{path} has {before.get(name)!r} and this run is of {head[name]!r}; give another --out.")
            self.data = {**before, **head, "cells": before["cells"]}
            # A run that goes on may have been given other options.
            commands = [*before.get("commands", [before.get("command")]), head.get("command")]
            if len(set(commands)) > 1:
                self.data["commands"] = list(dict.fromkeys(commands))

    @property
    def cells(self) -> dict[str, Any]:
        cells: dict[str, Any] = self.data["cells"]
        return cells

    def elapsed(self) -> float:
        """Seconds since the file was opened."""
        return time.monotonic() - self._begun

    def put(self, name: str, cell: Any) -> None:
        """Add a cell, and write."""
        self.cells[name] = cell
        self.write()

    def write(self) -> None:
        """Write the file, whole."""
        from kpolicy.schemas import write_text

        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.data, indent=1) + "\n")
