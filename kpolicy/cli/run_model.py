"""`kpolicy run` with a model: loads it, captures, measures this machine, then serves the trace with each policy."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kpolicy.cli.options import COMMAND, check_pace, ladder_of, settings_of, step_limits
from kpolicy.cli.render import console, print_json, render_run
from kpolicy.cli.run import MODEL_CPU_TOKENS, MOST_KV_TOKENS
from kpolicy.cli.step_log import RunsOn
from kpolicy.cli.turns import Turn, capture, progress_bar, serve_in_turn
from kpolicy.costs import CostTable
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.policies import get_policy
from kpolicy.scheduling.traces import Trace
from kpolicy.settings import Objective
from kpolicy.trace_run import Prompts, RunResult
from kpolicy.words import some

if TYPE_CHECKING:
    from kpolicy.cli.run import Asked
    from kpolicy.serving.hf_model import LoadedModel
    from kpolicy.serving.real_run import Serving

__all__ = ["run_model", "size_on"]

DEFAULT_WINDOW_S = 30.0
UTILISATION = 0.7


@attrs.frozen
class _Size:
    """What a device serves with where the command doesn't say."""

    block_size: int
    max_num_reqs: int
    max_num_tokens: int
    kv_tokens: int
    most_tokens: int | None
    """Tokens of all requests."""
    calibration_s: float
    """Seconds for measuring costs, beyond a few times of each launch: a GPU has some 150 graphs to time."""


CPU_SIZE = _Size(16, 32, 256, 32_768, MODEL_CPU_TOKENS, 10.0)
GPU_SIZE = _Size(32, 256, 2048, 262_144, None, 30.0)


def size_on(kind: str) -> _Size:
    """What a kind of device, as torch calls it, serves with."""
    return CPU_SIZE if kind == "cpu" else GPU_SIZE


@attrs.define
class _Job:
    """A run with a model, ready to be served."""

    serving: Serving
    trace: Trace
    engines: dict[str, Engine]
    rate: float
    utilisation: float | None
    differences: list[str] = attrs.field(factory=list)
    not_captured: list[str] = attrs.field(factory=list)
    """By turns whose graphs gave way to the next one's"""


def run_model(asked: Asked) -> int:
    """Serve a model on this machine; the command's exit code."""
    from kpolicy.cli.run import exit_code, report

    job = _prepare(asked)
    results = _serve(job, asked)
    if asked.json:
        print_json(report(job.trace, _as_dict(job, asked), results, job.engines))
    else:
        render_run(console(), job.trace, results, _setting(job), job.engines)
    for line in dict.fromkeys([*job.not_captured, *_not_captured(job.engines)]):
        sys.stderr.write(f"kpolicy: {line}\n")
    for difference in job.differences[:5]:
        sys.stderr.write(f"kpolicy: {difference}\n")
    return exit_code(results, complete=len(results) == len(asked.turns))


def _prepare(asked: Asked) -> _Job:
    """Load, capture for one policy, measure, and scale the arrivals."""
    from kpolicy.serving.real_run import (
        Serving,
        fitting,
        open_model,
        quiet_transformers,
        share_cores,
        small_ladder,
    )

    specs = [turn.spec for turn in asked.turns]
    policies = {spec: get_policy(spec) for spec in specs}
    settings, kv_tokens, utilisation = _limits(asked)
    trace = asked.requests.read(DEFAULT_WINDOW_S)
    costs = asked.deployment.costs()
    ladder = ladder_of(asked.deployment.ladder, settings, config=asked.model)
    size, at = size_on(asked.device.kind), asked.device
    if at.kind == "cpu":
        ladder = ladder or small_ladder(settings)
        share_cores()
    quiet_transformers()
    model = open_model(
        asked.model, settings, kv_tokens=kv_tokens, block_size=size.block_size, seed=asked.seed, device=at.given
    )  # fmt: skip
    _check_profile(asked, model)
    check_pace(asked.pace, model.support.claims, settings)
    serving = Serving(
        model=model, settings=settings, ladder=ladder, costs=costs, objective=asked.deployment.objective,
        budget=asked.deployment.budget(), faults=asked.faults, verify=asked.verify,
        check=asked.check_addresses, device=at.executor, pace=asked.pace,
    )  # fmt: skip
    # Whoever names a window gets all of it.
    most_tokens = size.most_tokens if asked.requests.window is None else None
    trace = fitting(trace, model, most_tokens=most_tokens)
    # One that reads costs has graphs of every kind, where there is one.
    first = next((spec for spec in specs if policies[spec].reads_costs), specs[0])
    engines = {spec: serving.engine(spec) for spec in specs}
    try:
        if costs is None:
            serving = attrs.evolve(serving, costs=_measured(first, engines, serving, quiet=asked.json))
            _save(asked.files.save_profile, serving)
            engines = {spec: serving.engine(spec, like=engine) for spec, engine in engines.items()}
        rate = asked.requests.rate
        if rate is None:
            rate = _rate(trace, engines[first], model, utilisation)
    except BaseException:
        release(engines)
        raise
    scaled = trace if rate == 1 else trace.scaled(rate)
    return _Job(serving, scaled, engines, rate, None if asked.requests.rate is not None else utilisation)


def _not_captured(engines: Mapping[str, Engine]) -> list[str]:
    """Why graphs couldn't be captured, three a policy; the table has the reasons alone."""
    lines: list[str] = []
    for spec, engine in engines.items():
        errors: Mapping[Any, str] = getattr(engine.executor, "capture_errors", {})
        lines += [f"{spec}: {key} has no graph: {why}" for key, why in list(errors.items())[:3]]
        if len(errors) > 3:
            lines.append(f"{spec}: and {len(errors) - 3} more")
    return lines


def _check_profile(asked: Asked, model: LoadedModel) -> None:
    """Hold the profile's device and model to those that serve."""
    given = asked.deployment.profile
    if given is not None:
        from kpolicy.profiles import load_profile
        from kpolicy.serving.calibrate import check_profile

        check_profile(load_profile(given), model, f"--profile {given}")


def _save(path: Path | None, serving: Serving) -> None:
    """Write what was measured, before anything is served: an interrupt leaves it."""
    if path is not None:
        from kpolicy.serving.calibrate import save_profile

        assert serving.costs is not None  # noqa: S101 - just measured
        save_profile(path, serving.costs, serving.model, shlex.join(["kpolicy", *COMMAND.get()]))


def release(engines: Mapping[str, Engine]) -> None:
    """End their streams' threads too: a thread that still runs when the process ends would abort it."""
    for engine in engines.values():
        engine.release()


def _limits(asked: Asked) -> tuple[Any, int, float]:
    """(settings, KV tokens, utilisation), checked."""
    deployment, requests = asked.deployment, asked.requests
    for option, value in (("--attention", deployment.attention), ("--config", deployment.config)):
        if value is not None:
            raise ConfigError(
                f"{option} {value} says what a simulated model's attention supports; a model that is served says so "
                "itself. Leave it out, or give --device simulated."
            )
    if asked.files.save_profile is not None and deployment.profile is not None:
        raise ConfigError(
            f"--save-profile {asked.files.save_profile} writes costs measured here, and --profile {deployment.profile} "
            "gives costs, so nothing is measured. Leave one out."
        )
    if requests.rate is not None and requests.utilisation is not None:
        raise ConfigError(
            f"--rate {requests.rate:g} and --utilisation {requests.utilisation:g} both space the arrivals; give one."
        )
    utilisation = UTILISATION if requests.utilisation is None else requests.utilisation
    if not 0.01 <= utilisation <= 10:
        raise ConfigError(
            f"--utilisation is {utilisation:g}; it is a share of what the machine can do, 0.01 to 10, such as 0.7."
        )
    size = size_on(asked.device.kind)
    kv_tokens, block = size.kv_tokens if asked.kv_tokens is None else asked.kv_tokens, size.block_size
    if not block <= kv_tokens <= MOST_KV_TOKENS:
        raise ConfigError(
            f"--kv-tokens is {kv_tokens}; KV comes in blocks of {block} tokens, so give {block} to {MOST_KV_TOKENS}."
        )
    tokens = size.max_num_tokens if asked.max_num_tokens is None else asked.max_num_tokens
    settings = settings_of(
        max_num_reqs=deployment.most_reqs(size.max_num_reqs), max_num_tokens=("--max-num-tokens", tokens)
    )
    return settings, kv_tokens, utilisation


def _measured(spec: str, engines: Mapping[str, Engine], serving: Serving, *, quiet: bool) -> CostTable:
    """Costs as one policy's graphs have them; it keeps the graphs."""
    from kpolicy.serving.calibrate import calibrate

    # Faults are for what is served.
    engine = attrs.evolve(serving, faults=()).engine(spec) if serving.faults else engines[spec]
    allowance_s = size_on(serving.model.device.type).calibration_s
    try:
        with progress_bar("", quiet=quiet) as shown:
            capture(engine, spec, shown)
            shown.add_task("measuring what launches take", total=None)
            return calibrate(engine.executor, engine.registry, serving.model, serving.settings, allowance_s=allowance_s)
    finally:
        if engine is not engines[spec]:
            engine.release()


def _rate(trace: Trace, engine: Engine, model: LoadedModel, utilisation: float) -> float:
    """The factor of arrivals that asks this share of the machine: work that comes a second over work it can do."""
    from kpolicy.serving.real_run import saturated_s

    if not trace.span_s:
        return 1.0
    work_s = saturated_s(
        trace, engine, engine.costs, num_blocks=model.num_blocks, block_size=model.block_size
    )  # fmt: skip
    return utilisation * trace.span_s / work_s


def _serve(job: _Job, asked: Asked) -> list[RunResult]:
    from kpolicy.serving.real_run import serve_model
    from kpolicy.serving.warm_up import warm_up

    model = job.serving.model
    prompts = Prompts(asked.seed, vocab=model.vocab)

    def serve(turn: Turn, engine: Engine, on_step: Any, progress: Any, shown: Any) -> RunResult:
        # Graphs that were lost in an earlier turn too: this one would be another experiment without them.
        if not set(engine.registry.captured()).issuperset(engine.keys):
            capture(engine, turn.spec, shown)
        if not asked.faults:
            # Faults are for what is served.
            warm_up(engine.executor, engine.registry, model, job.serving.settings)
        result, differences = serve_model(
            job.trace, engine, job.serving, prompts, label=turn.spec, on_step=on_step, progress=progress
        )
        job.differences += differences
        return result

    def anew(spec: str) -> Engine:
        before = job.engines[spec]
        if not asked.recapture:
            return job.serving.engine(spec, like=before)
        # Its graphs make room for the next ones; the one that serves captures what it lacks.
        job.not_captured += _not_captured({spec: before})
        before.release()
        return job.serving.engine(spec)

    try:
        return serve_in_turn(
            asked.turns, job.engines, len(job.trace), serve, files=asked.files, quiet=asked.json,
            runs_on=_runs_on(model), anew=anew,
        )  # fmt: skip
    finally:
        release(job.engines)


def _runs_on(model: Any) -> RunsOn:
    from kpolicy.serving.calibrate import device_name, versions

    return RunsOn(f"{model.device.type}: {device_name(model.device)}", model.full_name, versions())


def _setting(job: _Job) -> list[str]:
    serving, model = job.serving, job.serving.model
    settings = serving.settings
    from kpolicy.serving.calibrate import device_name

    budget = "" if serving.budget is None else f", budget {serving.budget}"
    spaced = f"arrivals at {job.rate:.3g} times the trace's rate"
    if job.utilisation is not None:
        spaced += f", {job.utilisation:.0%} of what this machine serves when requests never run out"
        spaced += "" if serving.pace is None else " and steps are filled"
    costs = "" if serving.costs is None else serving.costs.version
    measured = "costs measured here" if serving.costs and serving.costs.version.startswith("measured ") else costs
    return [
        f"{model.full_name}, {'random' if model.folder is None else 'its own'} weights",
        f"{model.device.type}: {device_name(model.device)}; {measured}",
        f"attention {model.support}, objective {serving.objective}{budget}",
        f"{model.num_slots:,} KV tokens, {step_limits(settings, serving.pace)}, "
        f"{some(model.max_model_len, 'token')} a request",
        f"{spaced}; time is measured, idle stretches are skipped",
    ]


def _as_dict(job: _Job, asked: Asked) -> dict[str, Any]:
    from kpolicy.cli.run import limits
    from kpolicy.serving.calibrate import device_name

    serving, model = job.serving, job.serving.model
    return {
        "executor": model.device.type,
        "device": device_name(model.device),
        "model": model.full_name,
        "attention": str(model.support),
        "costs": "" if serving.costs is None else serving.costs.version,
        "objective": serving.objective,
        "first_token_limit": Objective.parse(serving.objective).first_token_limit,
        "max_num_reqs": serving.settings.max_num_reqs,
        "max_num_tokens": serving.settings.max_num_tokens,
        "kv_tokens": model.num_slots,
        "pace": serving.pace,
        "block_size": model.block_size,
        "max_model_len": model.max_model_len,
        "budget": limits(serving.budget),
        "seed": asked.seed,
        "faults": list(asked.faults),
        "check_addresses": asked.check_addresses,
        "recapture": asked.recapture,
        "rate": job.rate,
        "utilisation": job.utilisation,
    }
