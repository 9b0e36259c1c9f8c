"""A real model under the main job: what it serves with, how fast requests come, and the run itself.

The Batcher, the Engine and the loop are those of the simulated runs (`kpolicy.trace_run`). Here are the model, a
measured cost table, arrivals scaled to a stated utilisation of this machine, the wall clock, and checks against EAGER.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import torch

from kpolicy.budgets import Budget
from kpolicy.core_wait import waited_s
from kpolicy.costs import CostTable
from kpolicy.engine import Engine
from kpolicy.errors import CheckpointError, ConfigError
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.scheduling.batching import Batch, Batcher, Generation
from kpolicy.scheduling.pace import EnginePace
from kpolicy.scheduling.traces import Trace
from kpolicy.serving import checkpoint
from kpolicy.serving.default_model import load_default
from kpolicy.serving.hf_model import LoadedModel
from kpolicy.serving.load import device_there, load
from kpolicy.serving.verify import Verifier
from kpolicy.settings import Settings
from kpolicy.trace_run import OnStep, Progress, Prompts, PromptSource, RunResult, WallClock, serve_trace

__all__ = [
    "SMALL_LADDER",
    "fitting",
    "open_model",
    "quiet_transformers",
    "sampling_of",
    "saturated_s",
    "serve_model",
    "share_cores",
    "small_ladder",
]

MAX_GPU_LEN = 16_384
"""Longest request on a GPU, in tokens."""

MAX_MODEL_LEN = 4096
"""Longest request by default, in tokens: a block table is as wide as this, for every row of every step."""

SMALL_LADDER = CaptureSizes(
    decode=(1, 2, 4, 8, 16, 24, 32, 48, 64),
    mixed=(16, 32, 64, 128, 192, 256, 384, 512),
    piecewise=(16, 32, 64, 128, 192, 256, 384, 512),
)
"""Capture sizes for a device that captures slowly and has no launch latency to hide: a CPU."""


def small_ladder(settings: Settings) -> CaptureSizes:
    """`SMALL_LADDER` up to the deployment's limits, with the limits themselves."""

    def upto(sizes: Sequence[int], most: int) -> tuple[int, ...]:
        return tuple(sorted({size for size in sizes if size < most} | {most}))

    tokens = min(settings.max_num_tokens, 512)
    rows = min(settings.max_num_reqs, settings.max_num_tokens, 64)
    return CaptureSizes(
        upto(SMALL_LADDER.decode, rows), upto(SMALL_LADDER.mixed, tokens), upto(SMALL_LADDER.piecewise, tokens)
    )


def share_cores() -> int:
    """Let each of two streams have half of the cores, and say how many threads that is.

    The halves of a split run beside each other, and torch's threads wait for each other by spinning: with more threads
    than cores a step takes many times as long. ``$OMP_NUM_THREADS`` is left as it is.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // 2))
    return int(torch.get_num_threads())


def quiet_transformers() -> None:
    """Leave warnings and progress of transformers out: they would stand between a command's own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def open_model(
    source: Path | None, settings: Settings, *, kv_tokens: int, block_size: int, seed: int, device: str = "cpu"
) -> LoadedModel:  # fmt: skip
    """The model of a folder, of a config.json with random weights, or the default one.

    Args:
        source: the folder or the config.json; None is the default model.
        settings: the deployment's limits.
        kv_tokens: KV capacity.
        block_size: tokens in a block.
        seed: of random weights.
        device: where it runs. Off the CPU, weights that the config gives no other type are bfloat16.

    Raises:
        CheckpointError: there is no such folder or file, or it isn't a model's.
        ConfigError: see `kpolicy.serving.load.load`; subclasses say which. Of a device that isn't there, whatever is
            wrong with the model.
    """
    device_there(device)
    num_blocks = kv_tokens // block_size
    options: dict[str, Any] = {
        "num_blocks": num_blocks, "block_size": block_size, "max_num_reqs": settings.max_num_reqs, "seed": seed,
        "device": device,
    }  # fmt: skip
    if source is None:
        dtype = None if device == "cpu" else "bfloat16"
        return load_default(max_model_len=min(MAX_MODEL_LEN, num_blocks * block_size), dtype=dtype, **options)
    config = _config(source) if source.is_file() else source
    if device != "cpu":
        # Every row of every step brings a block table as wide as the longest request.
        options["max_model_len"] = longest_request(config, num_blocks * block_size)
    return load(config, **options)


def longest_request(source: Path | Mapping[str, Any], kv_tokens: int) -> int:
    """Tokens of the longest request that a GPU is asked to serve: as the model and the KV have room, within bounds."""
    config, _ = checkpoint.read_config(source)
    longest, _ = checkpoint.longest_request(config)
    return min(longest or MAX_GPU_LEN, kv_tokens, MAX_GPU_LEN)


def _config(file: Path) -> dict[str, Any]:
    """A config.json as a mapping, for random weights."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} can't be read as JSON: {error}. Give a config.json or a model's folder."
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds {type(values).__name__}, not the fields of a config.")
    return values


def fitting(trace: Trace, model: LoadedModel, *, most_tokens: int | None = None) -> Trace:
    """The requests that the model has positions for; the others count as ``over_max_tokens``.

    Args:
        trace: the requests.
        model: what serves them.
        most_tokens: of those that fit the first ones are taken, whose prompts and outputs together are no longer than
            this, and one at least; by default all.

    Raises:
        ConfigError: none is left.
    """
    kept = trace.limited(model.max_model_len)
    if not len(kept):
        raise ConfigError(
            f"no request of {trace.source} fits the model's {model.max_model_len} tokens. Choose another window or "
            "trace, or a model with more positions."
        )
    if most_tokens is None:
        return kept
    tokens = accumulate(request.prompt_tokens + request.output_tokens for request in kept.requests)
    taken = max(1, sum(so_far <= most_tokens for so_far in tokens))
    return kept if taken == len(kept) else kept.first(taken)


def saturated_s(
    trace: Trace, engine: Engine, costs: CostTable, *, num_blocks: int, block_size: int
) -> float:  # fmt: skip
    """Seconds that the machine needs for these requests when they all wait from the start, by measured costs.

    The same scheduler and policy serve them on the simulated executor, whose steps take what the table says.
    """
    settings = engine.settings
    executor = SimulatedExecutor(
        costs, num_blocks=num_blocks, block_size=block_size, max_num_reqs=settings.max_num_reqs
    )  # fmt: skip
    simulated = Engine(
        engine.policy, attention=engine.support, ladder=engine.sizes, settings=settings, costs=costs,
        objective=engine.objective, executor=executor,
    )  # fmt: skip
    simulated.capture()
    batcher = Batcher(settings, num_blocks=num_blocks, block_size=block_size)
    at_once = attrs.evolve(trace, requests=tuple(attrs.evolve(each, arrival_s=0.0) for each in trace.requests))
    return serve_trace(at_once, simulated, batcher, Prompts()).span_s


def sampling_of(temperature: float, seed: int) -> Callable[[Batch], Mapping[str, Sequence[float]]] | None:
    """What fills in each batch's sampling inputs; None for greedy.

    A request's seed is its index and the run's, so it gets the same tokens whatever it is batched with.
    """
    if temperature == 0:
        return None

    def inputs(batch: Batch) -> Mapping[str, Sequence[float]]:
        wanted = [request.index for request in batch.decodes]
        wanted += [
            request.index for request, new in batch.chunks if request.num_computed + new == request.until
        ]  # fmt: skip
        return {
            "temperature": [temperature] * len(wanted),
            "seed": [(seed << 20) + index for index in wanted],
        }

    return inputs


@attrs.frozen(kw_only=True)
class Serving:
    """What is equal for every policy of a run with a model.

    Args:
        model: what is served.
        settings: the deployment's limits.
        ladder: capture sizes of every policy; None is each policy's own.
        costs: measured costs; None until they are.
        objective: what auto minimises.
        budget: what graphs may take.
        faults: faults to inject.
        calibrate: seconds that capturing may take to measure costs, where none are given.
        verify: hold steps to EAGER, with NaN in the pad slot whenever attention reads.
        check: look before each replay whether what its graph reads is where it was captured: the debug mode.
        device: the executor, as an Engine takes it; the first that can run the model by default.
        pace: a policy: steps that have decodes take as many prompt tokens as the objective says of the gap, within
            what that policy's whole steps would take (`kpolicy.scheduling.pace`); None fills steps to the limit.
    """

    model: LoadedModel
    settings: Settings
    ladder: CaptureSizes | None = None
    costs: CostTable | None = None
    objective: str = "throughput"
    budget: Budget | None = None
    faults: tuple[str, ...] = ()
    verify: bool = True
    calibrate: float = 0.0
    check: bool = False
    device: str = "auto"
    pace: str | None = None

    def engine(self, spec: str, *, like: Engine | None = None) -> Engine:
        """An Engine over the model, with an executor of its own or with another's graphs.

        Args:
            spec: the policy.
            like: an Engine of the same policy whose executor and graphs it takes over.
        """
        from kpolicy.executors.of_device import executor_on

        if like is None:
            self.model.poison_padding(self.verify)
        # A vendor's own executor needn't know faults, nor what to check.
        debugging = {"faults": self.faults, "check": self.check}
        asked = {name: value for name, value in debugging.items() if value}
        executor = like.executor if like is not None else executor_on(
            self.model, self.device, self.settings, max_num_reqs=self.settings.max_num_reqs, **asked
        )[0]  # fmt: skip
        return Engine(
            spec, attention=self.model.support, ladder=self.ladder, settings=self.settings, costs=self.costs,
            objective=self.objective, executor=executor, registry=None if like is None else like.registry,
            budget=self.budget if like is None else None, calibrate=self.calibrate,
        )  # fmt: skip

    def batcher(self, engine: Engine | None = None, *, steps_ahead: int = 8) -> Batcher:
        """A scheduler over the model's KV.

        Args:
            engine: what serves its steps, captured; `pace` goes by its graphs and costs.
            steps_ahead: most decode steps offered beside a prefill.

        Raises:
            ConfigError: there is a `pace` and no engine.
        """
        model, pace = self.model, None
        if self.pace is not None:
            if engine is None:
                raise ConfigError(
                    f"pace is {self.pace!r}, which goes by an Engine's graphs and costs; give batcher() the engine."
                )
            pace = EnginePace(engine, get_policy(self.pace))
        return Batcher(
            self.settings, num_blocks=model.num_blocks, block_size=model.block_size, steps_ahead=steps_ahead, pace=pace
        )  # fmt: skip


def serve_model(
    trace: Trace,
    engine: Engine,
    serving: Serving,
    prompts: PromptSource,
    *,
    label: str = "",
    on_step: OnStep | None = None,
    progress: Progress | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: AbstractSet[int] = frozenset(),
    check: Callable[[Generation], bool] | None = None,
) -> tuple[RunResult, tuple[str, ...]]:
    """Serve a trace with a model and say what happened, and what differed from EAGER in words.

    Args:
        trace: the requests, arriving by the wall clock.
        engine: from `Serving.engine`, captured.
        serving: the model and its limits.
        prompts: token ids for the trace's lengths.
        label: what to call the policy.
        on_step: told each step, after its check.
        progress: told now and then how far it is.
        temperature: 0 is greedy.
        seed: of sampling.
        stop_tokens: token ids that end a request before it has all its tokens.
        check: told each finished request; whether its tokens are right.
    """
    serving.model.clear_kv()
    verifier = Verifier(serving.model, getattr(engine.executor, "launcher", None)) if serving.verify else None
    told = [each for each in (verifier and verifier.check, on_step) if each]

    def tell(*step: Any) -> None:
        for each in told:
            each(*step)

    waited_before_s = waited_s()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        result = serve_trace(
            trace, engine, serving.batcher(engine), prompts, label=label, check=check, progress=progress,
            on_step=tell if told else None, clock=WallClock(), sampling=sampling_of(temperature, seed),
            stop_tokens=stop_tokens, before_step=verifier.poison if verifier else None, most_checked=None,
        )  # fmt: skip
    waited_after_s = waited_s()
    if waited_before_s is not None and waited_after_s is not None:
        # A thread that ended meanwhile takes what it waited along.
        result = attrs.evolve(result, core_wait_s=max(waited_after_s - waited_before_s, 0.0))
    if verifier is None:
        return result, ()
    if not result.interrupted:
        verifier.finish()
    return attrs.evolve(result, verified=verifier.checks), tuple(map(str, verifier.differences))
