"""`kpolicy run`: a request trace through the scheduler, the Engine and an executor, policy by policy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from kpolicy import __version__
from kpolicy._probe_devices import origin
from kpolicy.attention.support import AttentionSupport
from kpolicy.budgets import Budget
from kpolicy.cli.options import (
    PACE_HELP,
    SIMULATED,
    Deployment,
    Json,
    at_least,
    check_pace,
    check_rate,
    device_here,
    ladder_of,
    settings_of,
    specs_of,
    step_limits,
    whole,
)
from kpolicy.cli.outside import Outside
from kpolicy.cli.render import console, print_json, render_run
from kpolicy.cli.requests import read_requests
from kpolicy.cli.turns import Files, Turn, capture, serve_in_turn
from kpolicy.costs import CostTable
from kpolicy.device_names import DeviceName
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.ladders import CaptureSizes
from kpolicy.policies import get_policy
from kpolicy.scheduling.batching import Batcher
from kpolicy.scheduling.pace import EnginePace
from kpolicy.scheduling.traces import Trace
from kpolicy.settings import Objective, Settings
from kpolicy.trace_run import Prompts, RunResult, reference_check, serve_trace

__all__ = ["run"]

BLOCK_SIZE = 16
DEFAULT_WINDOW_S = 300.0
MAX_NUM_TOKENS, KV_TOKENS = 2048, 400_000
MOST_REPEATS = 100
MODEL_CPU_TOKENS = 35_000
"""Where a CPU serves a model and no window is given: half a minute may hold minutes of its work, by how busy the trace
is there."""
MOST_KV_TOKENS = 1 << 24
"""The simulated executor keeps two numbers a KV token in memory: some 600 MB at this many."""


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Requests:
    """Options that say which requests come, and when."""

    trace: Annotated[
        Path | None,
        Parameter(
            group="Requests",
            help="An Azure, Mooncake or BurstGPT trace, gzip or not. By default $KPOLICY_TRACES or ../shared/traces, "
            "else requests generated from a seed.",
        ),
    ] = None
    window: Annotated[
        float | None,
        Parameter(
            group="Requests",
            help=f"Seconds of the trace to serve; 0 is the whole trace. By default {DEFAULT_WINDOW_S:g}; where a model "
            f"is served 30, and on a CPU no more than its first {MODEL_CPU_TOKENS:,} tokens.",
        ),
    ] = None
    start: Annotated[float, Parameter(group="Requests", help="Second of the trace to start at.")] = 0.0
    rate: Annotated[
        float | None, Parameter(group="Requests", help="Speed the arrivals up by this factor, after --window.")
    ] = None
    utilisation: Annotated[
        float | None,
        Parameter(
            group="Requests",
            help="Where a model is served: space the arrivals so that this share of what the machine can do is asked "
            "of it. By default 0.7; --rate gives the factor itself.",
        ),
    ] = None

    def read(self, default_window_s: float = DEFAULT_WINDOW_S) -> Trace:
        """The requests to serve, arriving as the trace says.

        Raises:
            ConfigError: an option is out of range, or no request is left; TraceError says what is wrong with the file.
        """
        window = default_window_s if self.window is None else self.window
        if self.rate is not None:
            check_rate(self.rate)
        return read_requests(self.trace, start=self.start, window=window)


def run(
    *,
    requests: Requests = Requests(),
    policy: Annotated[
        list[str] | None,
        Parameter(negative="", help="A policy; repeat the option to compare several. By default auto and vllm."),
    ] = None,
    device: Annotated[
        str | None,
        Parameter(
            help="What serves a model on this machine: cpu, cuda (cuda:1 is the second one), ascend, kunlun, xpu, "
            "accelerator (what torch finds), or auto for the first that is there; or simulated, which takes times from "
            "a cost table. By default cpu where torch and transformers are installed."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        Parameter(help="A model's folder, or a config.json for random weights. By default a small one of its own."),
    ] = None,
    deployment: Deployment = Deployment(),  # noqa: B008
    max_num_tokens: Annotated[
        int | None,
        Parameter(
            group="Deployment",
            converter=whole,
            help="Token budget of a step (chunked prefill). By default 2048, and 256 where a CPU serves a model.",
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        Parameter(
            group="Deployment",
            converter=whole,
            help="KV capacity in tokens, all requests together. By default 400000; where a model is served 32768 on a "
            "CPU and 262144 on a GPU.",
        ),
    ] = None,
    pace: Annotated[str | None, Parameter(group="Deployment", help=PACE_HELP)] = None,
    seed: Annotated[int, Parameter(converter=whole, help="Picks prompt tokens and random weights.")] = 0,
    repeats: Annotated[
        int,
        Parameter(
            converter=whole,
            help="With a model: serve every policy so many times on the same arrivals, in the order given, then "
            "backwards, and so on. What a policy's turns differ by is what differences between policies have to "
            "exceed.",
        ),
    ] = 1,
    recapture: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="With --repeats: capture each policy's graphs anew for each of its turns, so that what turns differ "
            "by has what replays differ by from capture to capture. By default a policy's turns share one set.",
        ),
    ] = False,
    verify: Annotated[
        bool, Parameter(help="Hold outputs to the reference: tokens when simulated, logits and KV with a model.")
    ] = True,
    fault: Annotated[
        list[str] | None,
        Parameter(negative="", help="Inject a fault, such as replay_fails@10x3; repeat the option for several."),
    ] = None,
    check_addresses: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="With a model: look before each replay whether weights, KV and inputs are where the graph was "
            "captured with them, for debugging.",
        ),
    ] = False,
    json: Json = False,
    files: Files = Files(),  # noqa: B008
) -> int:
    """Serve a request trace with each policy, and compare them on the same arrivals."""
    specs, at = specs_of(policy), _device(device, model)
    check_pace(pace)
    if not 1 <= repeats <= MOST_REPEATS:
        raise ConfigError(f"--repeats is {repeats}; it must be a whole number from 1 to {MOST_REPEATS}.")
    if repeats > 1 and at.kind == SIMULATED:
        raise ConfigError(
            f"--repeats {repeats} and --device simulated: its times are a cost table's, so it would do the same again. "
            "Leave --repeats out, or give --device cpu."
        )
    if recapture and repeats == 1:
        raise ConfigError(
            "--recapture captures graphs anew for a policy's further turns, and there is one turn. Give --repeats 2 or "
            "more too, or leave it out."
        )
    asked = Asked(
        requests=requests, turns=files.turns(specs, deployment.reads([requests.trace], model), repeats=repeats),
        device=at, model=model, deployment=deployment,
        max_num_tokens=max_num_tokens, kv_tokens=kv_tokens, pace=pace, seed=at_least("--seed", seed, 0),
        verify=verify, faults=tuple(fault or ()), check_addresses=check_addresses, recapture=recapture, json=json,
        files=files,
    )  # fmt: skip
    if asked.device.kind != SIMULATED:
        from kpolicy.cli.run_model import run_model

        return run_model(asked)
    return _run_simulated(asked)


@attrs.frozen(kw_only=True)
class Asked:
    """The command's options."""

    requests: Requests
    turns: Sequence[Turn]
    device: DeviceName
    model: Path | None
    deployment: Deployment
    max_num_tokens: int | None
    kv_tokens: int | None
    pace: str | None
    seed: int
    verify: bool
    faults: tuple[str, ...]
    check_addresses: bool
    recapture: bool
    json: bool
    files: Files


def _device(device: str | None, model: Path | None) -> DeviceName:
    """The device to serve on.

    Raises:
        ConfigError: it isn't known, or what it needs isn't installed.
    """
    if device is None:
        device = "cpu" if model is not None or not missing_libraries() else SIMULATED
    name = device_here(device, more=(SIMULATED,))
    if name.kind == SIMULATED and model is not None:
        raise ConfigError(
            f"--model {model} and --device simulated: a simulated device runs no model. Leave one out; --config says "
            "what a model's attention supports."
        )
    if name.kind != SIMULATED:
        needs_torch("run with a model")
        name = found(name)
    return name


def found(name: DeviceName) -> DeviceName:
    """The device, where it is left open the first that is there."""
    if name.kind != "auto":
        return name
    from kpolicy.serving.load import first_device

    return attrs.evolve(name, kind=first_device().type)


def missing_libraries() -> list[str]:
    """What serving a model needs and isn't installed; nothing is imported to find out."""
    return [name for name in ("torch", "transformers", "safetensors") if origin(name) is None]


def needs_torch(what: str) -> None:
    """Raise ConfigError where a model can't be served for want of libraries."""
    missing = missing_libraries()
    if missing:
        hint = " Or give --device simulated without --model." if what.startswith("run") else ""
        raise ConfigError(
            f"kpolicy {what} needs {', '.join(missing)}, not installed here. Run: pip install 'kpolicy[models]'.{hint}"
        )


# Simulated


@attrs.frozen(kw_only=True)
class _Job:
    """What is equal for every policy of a simulated run."""

    trace: Trace
    settings: Settings
    support: AttentionSupport
    ladder: CaptureSizes | None
    costs: CostTable | None
    budget: Budget | None
    objective: str
    num_blocks: int
    pace: str | None
    seed: int
    verify: bool
    faults: tuple[str, ...]

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE


def _run_simulated(asked: Asked) -> int:
    requests, deployment, turns = asked.requests, asked.deployment, asked.turns
    if asked.files.save_profile is not None:
        raise ConfigError(
            f"--save-profile {asked.files.save_profile} writes costs measured here, and a simulated device has "
            "none. Leave it out, or give --device cpu."
        )
    if asked.check_addresses:
        raise ConfigError(
            "--check-addresses looks where graphs read, and a simulated device has none. Leave it out, or give "
            "--device cpu."
        )
    if requests.utilisation is not None:
        raise ConfigError(
            f"--utilisation is {requests.utilisation:g}: it is a share of what this machine can do, which a simulated "
            "device doesn't have. Use --rate, or give --device cpu."
        )
    trace, kv_tokens = requests.read(), KV_TOKENS if asked.kv_tokens is None else asked.kv_tokens
    if not BLOCK_SIZE <= kv_tokens <= MOST_KV_TOKENS:
        raise ConfigError(
            f"--kv-tokens is {kv_tokens}; KV comes in blocks of {BLOCK_SIZE} tokens, so give {BLOCK_SIZE} to "
            f"{MOST_KV_TOKENS}."
        )
    tokens = MAX_NUM_TOKENS if asked.max_num_tokens is None else asked.max_num_tokens
    settings = settings_of(max_num_reqs=deployment.most_reqs(), max_num_tokens=("--max-num-tokens", tokens))
    job = _Job(
        settings=settings,
        support=deployment.support(),
        ladder=ladder_of(deployment.ladder, settings, config=deployment.config),
        costs=deployment.costs(),
        budget=deployment.budget(),
        objective=deployment.objective,
        num_blocks=kv_tokens // BLOCK_SIZE,
        pace=asked.pace,
        seed=asked.seed,
        verify=asked.verify,
        faults=asked.faults,
        trace=trace if requests.rate in (None, 1) else trace.scaled(requests.rate),
    )
    check_pace(job.pace, job.support.claims, settings)
    engines = {turn.spec: _engine(turn.spec, job) for turn in turns}
    results = _serve(engines, job, turns, asked.files, quiet=asked.json)
    if asked.json:
        print_json(_as_dict(job, results, engines))
    else:
        render_run(console(), job.trace, results, _setting(job), engines)
    return exit_code(results, complete=len(results) == len(turns))


def _engine(spec: str, job: _Job) -> Engine:
    executor = SimulatedExecutor(
        job.costs, seed=job.seed, num_blocks=job.num_blocks, block_size=BLOCK_SIZE,
        max_num_reqs=job.settings.max_num_reqs, faults=job.faults,
    )  # fmt: skip
    return Engine(
        spec, attention=job.support, ladder=job.ladder, settings=job.settings, costs=job.costs,
        objective=job.objective, executor=executor, budget=job.budget,
    )  # fmt: skip


def _serve(
    engines: dict[str, Engine], job: _Job, turns: Sequence[Turn], files: Files, *, quiet: bool
) -> list[RunResult]:
    """Serve the trace with each policy, until the first one that is interrupted from the keyboard."""
    prompts = Prompts(job.seed)
    check = reference_check(prompts, job.seed) if job.verify else None

    def serve(turn: Turn, engine: Engine, on_step: Any, progress: Any, shown: Any) -> RunResult:
        capture(engine, turn.spec, shown)
        pace = None if job.pace is None else EnginePace(engine, get_policy(job.pace))
        batcher = Batcher(job.settings, num_blocks=job.num_blocks, block_size=BLOCK_SIZE, pace=pace)
        outside = Outside(engine.costs, on_step)
        result = serve_trace(
            job.trace, engine, batcher, prompts, label=turn.spec, check=check, progress=progress, on_step=outside
        )
        return outside.told(result)

    return serve_in_turn(turns, engines, len(job.trace), serve, files=files, quiet=quiet)


def exit_code(results: Sequence[RunResult], *, complete: bool) -> int:
    """The command's exit code, with a line on standard error where it isn't 0."""
    failed = sum(checks.failures for result in results for checks in result.verified.values())
    if failed or any(result.wrong for result in results):
        what = "outputs differ from EAGER's" if failed else "outputs differ from the reference"
        sys.stderr.write(f"kpolicy: {what}; this is a bug in kpolicy, please report it.\n")
        return 1
    if not complete or any(result.interrupted.startswith("interrupted") for result in results):
        sys.stderr.write("kpolicy: interrupted; what was done is above.\n")
        return 130
    return 1 if any(result.interrupted for result in results) else 0


def _setting(job: _Job) -> list[str]:
    costs = job.costs
    table = "analytic costs of an 8B GQA decoder on published H200 figures" if costs is None else costs.title
    settings = job.settings
    budget = "" if job.budget is None else f", budget {job.budget}"
    return [
        f"simulated executor, {table}",
        f"attention {job.support}, objective {job.objective}{budget}",
        f"{job.kv_tokens:,} KV tokens, {step_limits(settings, job.pace)}",
    ]


def _as_dict(job: _Job, results: Sequence[RunResult], engines: dict[str, Engine]) -> dict[str, Any]:
    setting = {
        "executor": "simulated",
        "attention": str(job.support),
        "costs": next(iter(engines.values())).costs.version,
        "objective": job.objective,
        "first_token_limit": Objective.parse(job.objective).first_token_limit,
        "max_num_reqs": job.settings.max_num_reqs,
        "max_num_tokens": job.settings.max_num_tokens,
        "kv_tokens": job.kv_tokens,
        "pace": job.pace,
        "budget": limits(job.budget),
        "seed": job.seed,
        "faults": list(job.faults),
    }
    return report(job.trace, setting, results, engines)


def report(
    trace: Trace, setting: dict[str, Any], results: Sequence[RunResult], engines: dict[str, Engine]
) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "kpolicy": __version__,
        "trace": {
            "source": trace.source,
            "format": trace.format,
            "requests": len(trace),
            "span_s": trace.span_s,
            "dropped": dict(trace.dropped),
        },
        "setting": setting,
        "policies": [_result(result, engines[result.policy]) for result in results],
    }


def limits(budget: Budget | None) -> dict[str, Any] | None:
    """A budget's limits by name."""
    if budget is None:
        return None
    return {name: limit for name, limit in attrs.asdict(budget).items() if limit is not None}


def _result(result: RunResult, engine: Engine) -> dict[str, Any]:
    sums = {
        "steps": result.steps,
        "step_us": result.step_us,
        "tokens_computed": result.tokens_computed,
        "padding": result.padding,
    }
    return {**result.as_dict(), **sums, "downgrades": [str(downgrade) for downgrade in engine.downgrades]}
