"""`kpolicy run`: a request trace through the scheduler, the Engine and an executor, policy by policy."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kpolicy import __version__
from kpolicy.attention.support import AttentionSupport
from kpolicy.budgets import Budget
from kpolicy.cli.options import Deployment, Json, at_least, ladder_of, settings_of, whole
from kpolicy.cli.render import console, print_json, render_run
from kpolicy.cli.step_log import StepLog, step_log_paths
from kpolicy.costs import CostTable
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.batching import Batcher
from kpolicy.scheduling.traces import Trace, default_trace, read_trace
from kpolicy.settings import Settings
from kpolicy.trace_run import Prompts, RunResult, reference_check, serve_trace

__all__ = ["run"]

BLOCK_SIZE = 16
DEFAULT_POLICIES = ("auto", "vllm")
DEFAULT_WINDOW_S = 300.0
MOST_KV_TOKENS = 1 << 24
"""The simulated executor keeps two numbers a KV token in memory: some 600 MB at this many."""


@attrs.frozen(kw_only=True)
class _Job:
    """What is equal for every policy of a run."""

    trace: Trace
    settings: Settings
    support: AttentionSupport
    ladder: CaptureSizes | None
    costs: CostTable | None
    budget: Budget | None
    objective: str
    num_blocks: int
    seed: int
    verify: bool
    faults: tuple[str, ...]

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE


def run(
    *,
    trace: Annotated[
        Path | None,
        Parameter(
            group="Requests",
            help="An Azure, Mooncake or BurstGPT trace, gzip or not. By default $KPOLICY_TRACES or ../shared/traces, "
            "else requests generated from a seed.",
        ),
    ] = None,
    window: Annotated[
        float, Parameter(group="Requests", help="Seconds of the trace to serve; 0 is the whole trace.")
    ] = DEFAULT_WINDOW_S,
    start: Annotated[float, Parameter(group="Requests", help="Second of the trace to start at.")] = 0.0,
    rate: Annotated[
        float, Parameter(group="Requests", help="Speed the arrivals up by this factor, after --window.")
    ] = 1.0,
    policy: Annotated[
        list[str] | None,
        Parameter(negative="", help="A policy; repeat the option to compare several. By default auto and vllm."),
    ] = None,
    deployment: Deployment = Deployment(),  # noqa: B008
    max_num_tokens: Annotated[
        int, Parameter(group="Deployment", converter=whole, help="Token budget of a step (chunked prefill).")
    ] = 2048,
    kv_tokens: Annotated[
        int, Parameter(group="Deployment", converter=whole, help="KV capacity in tokens, all requests together.")
    ] = 400_000,
    seed: Annotated[int, Parameter(converter=whole, help="Picks prompt tokens and the simulated model.")] = 0,
    verify: Annotated[bool, Parameter(help="Compare requests' tokens with the reference.")] = True,
    fault: Annotated[
        list[str] | None,
        Parameter(negative="", help="Inject a fault, such as replay_fails@10x3; repeat the option for several."),
    ] = None,
    json: Json = False,
    step_log: Annotated[
        Path | None, Parameter(help="Write every step here; with several policies a file each, NAME-POLICY.")
    ] = None,
) -> int:
    """Serve a request trace with each policy on the simulated executor, and compare them on the same arrivals."""
    specs = _specs(policy)
    logs = step_log_paths(step_log, specs)
    _check(window=window, start=start, rate=rate, kv_tokens=kv_tokens)
    settings = settings_of(
        max_num_reqs=("--max-num-reqs", deployment.max_num_reqs), max_num_tokens=("--max-num-tokens", max_num_tokens)
    )
    job = _Job(
        settings=settings,
        support=deployment.support(),
        ladder=ladder_of(deployment.ladder, settings),
        costs=deployment.costs(),
        budget=deployment.budget(),
        objective=deployment.objective,
        num_blocks=kv_tokens // BLOCK_SIZE,
        seed=at_least("--seed", seed, 0),
        verify=verify,
        faults=tuple(fault or ()),
        trace=_window(trace, start, window, rate),
    )
    engines = {spec: _engine(spec, job) for spec in specs}
    results = _serve(engines, job, logs, quiet=json)
    if json:
        print_json(_as_dict(job, results, engines))
    else:
        render_run(console(), job.trace, results, _setting(job), engines)
    return _exit_code(results, complete=len(results) == len(specs))


def _specs(policies: list[str] | None) -> list[str]:
    specs = list(policies or DEFAULT_POLICIES)
    twice = next((spec for i, spec in enumerate(specs) if spec in specs[:i]), None)
    if twice is not None:
        raise ConfigError(f"--policy {twice} is given twice; both would do the same, so give it once.")
    return specs


def _check(*, window: float, start: float, rate: float, kv_tokens: int) -> None:
    for option, value in (("--window", window), ("--start", start)):
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{option} is {value:g}; it takes seconds from 0 up. --window 0 serves all from --start on."
            )
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rate is {rate:g}; it takes a factor above 0, such as 2 for arrivals twice as fast.")
    if not BLOCK_SIZE <= kv_tokens <= MOST_KV_TOKENS:
        raise ConfigError(
            f"--kv-tokens is {kv_tokens}; KV comes in blocks of {BLOCK_SIZE} tokens, so give {BLOCK_SIZE} to "
            f"{MOST_KV_TOKENS}."
        )


def _window(path: Path | None, start: float, window: float, rate: float) -> Trace:
    whole_trace = default_trace() if path is None else read_trace(path)
    trace = whole_trace
    if not len(trace):
        dropped = ", ".join(f"{count} {reason}" for reason, count in trace.dropped.items()) or "none"
        raise ConfigError(f"{trace.source} has no request to serve; rows dropped: {dropped}. Choose another --trace.")
    if start or window:
        trace = trace.window(start, window or math.inf)
    if not len(trace):
        last_s = whole_trace.requests[-1].arrival_s
        raise ConfigError(
            f"no request arrives in the {window or math.inf:g} s from second {start:g} of {whole_trace.source}; its "
            f"last one arrives at second {last_s:.1f}. Choose another --start, or a longer --window."
        )
    return trace if rate == 1 else trace.scaled(rate)


def _engine(spec: str, job: _Job) -> Engine:
    executor = SimulatedExecutor(
        job.costs, seed=job.seed, num_blocks=job.num_blocks, block_size=BLOCK_SIZE,
        max_num_reqs=job.settings.max_num_reqs, faults=job.faults,
    )  # fmt: skip
    return Engine(
        spec, attention=job.support, ladder=job.ladder, settings=job.settings, costs=job.costs,
        objective=job.objective, executor=executor, budget=job.budget,
    )  # fmt: skip


def _serve(engines: dict[str, Engine], job: _Job, logs: Sequence[Path | None], *, quiet: bool) -> list[RunResult]:
    """Serve the trace with each policy, until the first one that is interrupted from the keyboard."""
    prompts = Prompts(job.seed)
    check = reference_check(prompts, job.seed) if job.verify else None
    results: list[RunResult] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} requests"))
    made = console(stderr=True)
    shown = Progress(*columns, TimeRemainingColumn(), console=made, disable=quiet or not made.is_terminal,
                     transient=True)  # fmt: skip
    try:
        with shown:
            for (spec, engine), path in zip(engines.items(), logs, strict=True):
                task = shown.add_task(spec, total=len(job.trace))
                engine.capture()
                batcher = Batcher(job.settings, num_blocks=job.num_blocks, block_size=BLOCK_SIZE)

                def advance(done: int, _total: int, task: Any = task) -> None:
                    shown.update(task, completed=done)

                with StepLog(path, spec, engine) as log:
                    result = serve_trace(
                        job.trace, engine, batcher, prompts, label=spec, check=check, progress=advance, on_step=log
                    )
                results.append(result)
                if _interrupted(results[-1]):
                    break
    except KeyboardInterrupt:
        # Between policies, or while outputs were compared: what is done is still told.
        pass
    return results


def _interrupted(result: RunResult) -> bool:
    return result.interrupted.startswith("interrupted")


def _exit_code(results: Sequence[RunResult], *, complete: bool) -> int:
    if any(result.wrong for result in results):
        sys.stderr.write("kpolicy: outputs differ from the reference; this is a bug in kpolicy, please report it.\n")
        return 1
    if not complete or any(map(_interrupted, results)):
        sys.stderr.write("kpolicy: interrupted; what was done is above.\n")
        return 130
    return 1 if any(result.interrupted for result in results) else 0


def _setting(job: _Job) -> list[str]:
    costs = job.costs
    table = "analytic costs of an 8B GQA decoder on published H200 figures" if costs is None else costs.version
    settings = job.settings
    budget = "" if job.budget is None else f", budget {job.budget}"
    return [
        f"simulated executor, {table}",
        f"attention {job.support}, objective {job.objective}{budget}",
        f"{job.kv_tokens:,} KV tokens, at most {settings.max_num_reqs:,} requests and {settings.max_num_tokens:,} "
        "tokens a step",
    ]


def _as_dict(job: _Job, results: Sequence[RunResult], engines: dict[str, Engine]) -> dict[str, Any]:
    trace, settings = job.trace, job.settings
    return {
        "kpolicy": __version__,
        "trace": {
            "source": trace.source,
            "format": trace.format,
            "requests": len(trace),
            "span_s": trace.span_s,
            "dropped": dict(trace.dropped),
        },
        "setting": {
            "executor": "simulated",
            "attention": str(job.support),
            "costs": next(iter(engines.values())).costs.version,
            "objective": job.objective,
            "max_num_reqs": settings.max_num_reqs,
            "max_num_tokens": settings.max_num_tokens,
            "kv_tokens": job.kv_tokens,
            "budget": None if job.budget is None else _limits(job.budget),
            "seed": job.seed,
            "faults": list(job.faults),
        },
        "policies": [_result(result, engines[result.policy]) for result in results],
    }


def _limits(budget: Budget) -> dict[str, Any]:
    return {name: limit for name, limit in attrs.asdict(budget).items() if limit is not None}


def _result(result: RunResult, engine: Engine) -> dict[str, Any]:
    sums = {
        "steps": result.steps,
        "step_us": result.step_us,
        "tokens_computed": result.tokens_computed,
        "padding": result.padding,
    }
    return {**result.as_dict(), **sums, "downgrades": [str(downgrade) for downgrade in engine.downgrades]}
