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
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import command_line, input_path, made_file
from benchmarks.student import student

__all__ = [
    "LADDER", "VLLM_SIZES", "Check", "Checks", "Results", "add_options", "add_slice_options", "bits_of", "config_of",
    "free", "header", "host_noise", "interval_of_mean", "launched", "load_model", "logits_checks", "logits_of",
    "on_device", "one_kv", "open_engines", "opened", "ran", "random_shape", "sampled_of", "slices_of", "steady",
    "steps_by_commit", "synchronise", "versions", "with_tokens",
]  # fmt: skip

VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""vLLM's default list for 256 requests"""
LADDER = (*VLLM_SIZES, 640, 768, 1024, 1280, 1536, 1792, 2048)


def add_options(parser: argparse.ArgumentParser, *, seconds: float) -> None:
    """Options that every benchmark takes."""
    parser.add_argument("--config", type=input_path, required=True, help="a model's config.json, or its folder")
    parser.add_argument("--model", help="what results call it; the config's folder by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a toy of the same architecture: a dry run")
    parser.add_argument("--layers", type=int, default=0, help="keep only so many layers, at their true width; 0 is all")
    parser.add_argument("--seconds", type=float, default=seconds, help="begin nothing new so many after the start")
    parser.add_argument("--date", default="unstated")
    parser.add_argument("--out", type=made_file, required=True, help="the result file; a run goes on where it ends")


def add_slice_options(parser: argparse.ArgumentParser, *, block: int, count: int) -> None:
    """Options of a benchmark whose steps are shared out to processes, in blocks."""
    parser.add_argument("--first", type=int, default=0, help=f"the first step's number, a multiple of {block}")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--commit", default="unstated", help="of the code that runs, which each block notes")


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
        specs: the policies; behind one an objective may follow, after a space, as in ``auto 1:1``.
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
        policy, *objective = spec.split()[:2]
        own_sizes = policy.partition(":")[0] in own
        return Engine(
            policy, ladder=None if own_sizes else list(ladder), costs=costs,
            objective=objective[0] if objective else "throughput", **shared,
        )  # fmt: skip

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
    return [part.tensor for part in _parts_of(outputs) if len(part)]


def launched(executor: Any, decision: Any, inputs: Any) -> tuple[list[Any], list[Any], Any]:
    """A step whose work is all ahead of what the main stream gets next, and which the host doesn't wait for.

    Returns:
        (copies of its logits, one a part that has rows; what it sampled, one a decode step and part; its outputs).
    """
    from tests.executors_launcher.checker import EAGER

    outputs = executor.run(decision, inputs)
    # As a step begins: the main stream waits for the halves beside it.
    executor.launcher.start(EAGER)
    logits = [logits_in(part).clone() for part in _parts_of(outputs) if len(part)]
    return logits, sampled_of(outputs), outputs


def logits_in(part: Any) -> Any:
    """A part's logits, which nothing waits for; one without any failed, and says how where it is waited for."""
    return part.tensor if part.logits is None else part.logits


def _parts_of(outputs: Any) -> list[Any]:
    return getattr(outputs.outputs, "_parts", [outputs.outputs])


def sampled_of(outputs: Any) -> list[Any]:
    """The step's sampled tokens as device tensors, one a decode step and part; waits for nothing."""
    # One that has neither is an error: nothing would be compared.
    runs = dict.fromkeys(
        each.part if hasattr(each, "part") else each._part
        for each in (outputs.tokens, outputs.first_tokens)
        if len(each)
    )
    return [tokens for run in runs for tokens in run.tokens if len(tokens)]


def one_kv(model: Any) -> list[Any]:
    """All KV as few tensors, [caches, slots + 1, ...] each, which the layers' caches are parts of from here on.

    What looks at all of it then has as many operators as one layer would take. For before captures: graphs keep the
    caches that they were captured with.
    """
    import torch

    shapes = dict.fromkeys((cache.shape, cache.dtype) for cache in model.kv_caches())
    whole = {
        kind: torch.stack([cache for cache in model.kv_caches() if (cache.shape, cache.dtype) == kind])
        for kind in shapes
    }
    parts = {kind: iter(tensor) for kind, tensor in whole.items()}
    for layer in model.layers:
        layer.caches = tuple(next(parts[cache.shape, cache.dtype]) for cache in layer.caches)
    return list(whole.values())


def bits_of(tensor: Any) -> Any:
    """[..., words] of a tensor: its last dimension as whole numbers, so that equal means equal to the bit."""
    import torch

    size = tensor.element_size()
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    width = next(width for width in words if width >= size and tensor.shape[-1] * size % width == 0)
    return tensor.view(words[width])


def on_device(values: Sequence[int], device: Any) -> Any:
    """Whole numbers as a tensor of the device, on their way there: a plain copy would wait for all before it."""
    import torch

    pin = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=pin).to(device, non_blocking=True)


class Check(NamedTuple):
    """One comparison of a step, whose result is still on the device."""

    name: str
    wrong: Any
    """[] bool"""
    amount: Any = None
    """[] a number that tells more, where there is one"""


class Checks:
    """Comparisons on their way to the host: reading them waits for nothing that was launched since.

    Args:
        checks: of one step, those first that explain others.
        ready: the step's events.
    """

    def __init__(self, checks: Sequence[Check], ready: Sequence[Any]) -> None:
        import torch

        self._names = [check.name for check in checks]
        self._ready = ready
        amounts = [check.wrong if check.amount is None else check.amount for check in checks]
        both = [torch.stack([check.wrong.reshape(()) for check in checks]).double()] if checks else []
        both += [torch.stack([amount.reshape(()).double() for amount in amounts])] if checks else []
        self._over: Any = None
        self._values = torch.stack(both) if checks else torch.zeros(2, 0)
        if self._values.device.type == "cuda":
            values, self._over = self._values, torch.cuda.Event(blocking=True)
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._over.record()

    def first(self, but: Sequence[str] = ()) -> tuple[str, float]:
        """(the first that is wrong, its amount); an empty name where none is. What the step raised is raised here.

        Args:
            but: checks that are left out.
        """
        if self._over is not None:
            self._over.synchronize()
        for event in self._ready:
            event.wait()
        wrong, amounts = self._values.tolist()
        found = (i for i, name in enumerate(self._names) if wrong[i] and name not in but)
        place = next(found, None)
        return ("", 0.0) if place is None else (self._names[place], amounts[place])


def logits_checks(mine: Sequence[Any], wanted: Sequence[Any]) -> list[Check]:
    """Whether logits are finite and equal to the bit, and by how much they differ."""
    import torch

    checks = [Check("an output isn't finite", ~torch.isfinite(each).all()) for each in mine]
    for a, b in zip(mine, wanted, strict=True):
        checks.append(Check("logits", (bits_of(a) != bits_of(b)).any(), (a - b).abs().amax()))
    return checks


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


def steps_by_commit(cells: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Steps by the commit whose code ran them: a run may go on at another one."""
    counts: Counter[str] = Counter()
    for cell in cells:
        counts[cell.get("commit", "unstated")] += cell["steps"]
    return dict(counts)


def slices_of(files: list[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(head, cells) of one result of several slices: the head is the first one's, with all commands and the last date.

    Raises:
        SystemExit: they are of different models, devices or versions.
    """
    data = [json.loads(file.read_text()) for file in files]
    for each in data:
        if (each["model"], each["device"]) != (data[0]["model"], data[0]["device"]):
            sys.exit(f"slices differ: {each['model']} on {each['device']}, {data[0]['model']} on {data[0]['device']}")
        if each.get("versions") != data[0].get("versions"):
            sys.exit(f"slices differ: {each.get('versions')}, {data[0].get('versions')}")
    head = {name: value for name, value in data[0].items() if name not in ("cells", "total")}
    given = [each.get("commands", [each.get("command")]) for each in data]
    commands = [command for each in given for command in each if command]
    if len(set(commands)) > 1:
        head["commands"] = list(dict.fromkeys(commands))
    if dates := [each["date"] for each in data if "date" in each]:
        head["date"] = max(dates)
    return {**head, "slices": len(files)}, {name: cell for each in data for name, cell in each["cells"].items()}


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
