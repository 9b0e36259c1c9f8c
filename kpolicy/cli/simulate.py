"""`kpolicy simulate`: traces served by each policy in simulated time, from costs alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from kpolicy import __version__
from kpolicy.cli.options import Deployment, Json, at_least, ladder_of, specs_of, step_limits, whole
from kpolicy.cli.recorded import replay_command
from kpolicy.cli.render import console, print_json, told_after
from kpolicy.cli.render_simulation import render_simulation
from kpolicy.cli.requests import errors_of, read_each, unserved
from kpolicy.cli.serving_options import Seed, Served
from kpolicy.cli.sim_files import SimFiles
from kpolicy.cli.turns import progress_bar, unwritten
from kpolicy.errors import ConfigError, KPolicyError
from kpolicy.scheduling.traces import FailedTrace, Trace
from kpolicy.settings import Objective
from kpolicy.simulate import Server, SimResult, simulate
from kpolicy.simulate.cost_models import CostModel
from kpolicy.simulate.starts import Starts
from kpolicy.words import some

__all__ = ["setting_lines", "simulate_command"]

_Simulated = tuple[SimResult, Starts | None]
"""A policy's result from the first start, and what several come to, where they were asked for"""
_Results = tuple[Trace | FailedTrace, list[_Simulated]]
"""A trace's"""


def simulate_command(
    *traces: Annotated[
        Path,
        Parameter(
            help="Azure, Mooncake or BurstGPT traces, gzip or not. By default $KPOLICY_TRACES or ../shared/traces, "
            "else requests generated from a seed."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        Parameter(negative="", help="A policy; repeat the option to compare several. By default auto and vllm."),
    ] = None,
    decisions: Annotated[
        Path | None,
        Parameter(
            help="Instead of traces: a decision log, whose batches each policy decides again as they were scheduled, "
            "priced by --profile, else by the costs in its header, else by analytic ones."
        ),
    ] = None,
    window: Annotated[float, Parameter(help="Seconds of the trace to serve; 0 is the whole trace.")] = 0.0,
    start: Annotated[float, Parameter(help="Second of the trace to start at.")] = 0.0,
    rate: Annotated[float, Parameter(help="Speed the arrivals up by this factor, after --window.")] = 1.0,
    served: Served = Served(),  # noqa: B008
    deployment: Deployment = Deployment(),  # noqa: B008
    files: SimFiles = SimFiles(),  # noqa: B008
    seed: Seed = 0,
    starts: Annotated[
        int,
        Parameter(
            converter=whole,
            help="Simulate with so many seeds, from --seed on, each of which picks one of the profile's notes of the "
            "host's speed to begin at. Latencies are told as the least, the middle and the most of them besides.",
        ),
    ] = 1,
    json: Json = False,
) -> int:
    """Serve traces with each policy in simulated time, and compare them: no device, no model, only costs."""
    specs = specs_of(policy)
    at_least("--seed", seed, 0)
    at_least("--starts", starts, 1)
    if decisions is not None:
        if traces:
            raise ConfigError(f"--decisions {decisions} takes the place of traces; give one of the two.")
        _only_decides(
            served, deployment, files, window=window != 0, start=start != 0, rate=rate != 1, seed=seed != 0,
            starts=starts != 1,
        )  # fmt: skip
        replay_command(decisions, specs, deployment, json=json)
        return 0
    model = served.costs(deployment)
    server = served.server(deployment, model)
    if starts > 1 and server.noted_speed(model.costs) is None:
        raise ConfigError(
            f"--starts {starts} begins at some of a profile's notes of the host's speed, and "
            f"{'--steady-host leaves them out' if server.steady_host else f'there are none in {model.what}'}; leave "
            "--starts out, or give a --profile whose calibration served."
        )
    loaded = read_each(traces, start=start, window=window, rate=rate)
    names = [path.stem for path in traces] if len(traces) > 1 else None
    turns = files.turns(specs, names, deployment.reads(traces))
    ladder = ladder_of(deployment.ladder, server.settings, config=deployment.config)
    support = deployment.support()
    results: list[_Results] = []
    failed: list[tuple[Trace, str, KPolicyError]] = []
    interrupted = False
    try:
        with progress_bar("requests", quiet=json) as shown:
            for i, trace in enumerate(loaded):
                results.append((trace, []))
                if isinstance(trace, FailedTrace):
                    continue
                for j, spec in enumerate(specs):
                    task = shown.add_task(spec, total=starts * len(trace))

                    def from_start(
                        number: int, on_step: Any = None, task: Any = task, trace: Trace = trace, spec: str = spec
                    ) -> SimResult:
                        result = simulate(
                            trace, spec, server=server, costs=model.costs, attention=support, ladder=ladder,
                            objective=deployment.objective, budget=deployment.budget(), seed=seed + number,
                            progress=lambda done: shown.update(task, completed=number * len(trace) + done),
                            on_step=on_step,
                        )  # fmt: skip
                        if result.interrupted and number:
                            # What some of the starts come to isn't what all of them would.
                            raise KeyboardInterrupt
                        return result

                    try:
                        with turns[i * len(specs) + j].opened(spec, model.costs, server) as on_step:
                            result = from_start(0, on_step)
                        results[-1][1].append((result, None))
                        if result.interrupted:
                            raise KeyboardInterrupt
                        if starts > 1:
                            every = [result, *(from_start(number) for number in range(1, starts))]
                            results[-1][1][-1] = (result, Starts.of(every))
                    except KPolicyError as error:
                        failed.append((trace, spec, error))
    except KeyboardInterrupt:
        interrupted = True
        results += [(trace, []) for trace in loaded[len(results) :] if isinstance(trace, FailedTrace)]
    if failed and not any(each for _, each in results):
        with told_after(errors_of(loaded)):
            raise failed[0][-1]
    report = _report(model, server, deployment, results, failed, specs)
    wrong = errors_of(loaded) + [f"{spec} on {trace.source}: {why}" for trace, spec, why in failed]
    for trace, each in results:
        for result, _ in each:
            if not result.interrupted:
                named = f"{result.policy} on {trace.source}"
                wrong += unserved(named, result.refused, served=result.served, kv_tokens=result.kv_tokens)
    wrong += unwritten(lambda: files.write(report))
    with told_after([*wrong, "interrupted; what was done is above."] if interrupted else wrong):
        if json:
            print_json(report)
        else:
            for trace, each in results:
                if isinstance(trace, Trace) and each:
                    render_simulation(console(), trace, each, setting_lines(model, server, deployment), model.notes)
    return 130 if interrupted else 1 if wrong else 0


def _only_decides(served: Served, deployment: Deployment, files: SimFiles, **given: bool) -> None:
    """Refuse options that say something of a server, a trace or a file, where batches are only decided again."""
    budgets = {name: value for name, value in attrs.asdict(deployment).items() if name.startswith(("budget", "max_"))}
    for options, unset in ((served, Served()), (files, SimFiles())):
        given |= {name: value != getattr(unset, name) for name, value in attrs.asdict(options, recurse=False).items()}
    given |= {name: value is not None for name, value in budgets.items()}
    named = [f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given]
    if "--prefix-reuse" in named:
        named[named.index("--prefix-reuse")] = "--no-prefix-reuse"
    if named:
        raise ConfigError(
            f"{named[0]} has no say where --decisions gives the batches as they were scheduled; leave out "
            f"{', '.join(named)}, or give a trace. A log's batches are priced by --profile."
        )


def setting_lines(model: CostModel, server: Server, deployment: Deployment) -> list[str]:
    """The costs and the server in words."""
    settings = server.settings
    lines = [
        model.what,
        f"attention {deployment.support()}, objective {deployment.objective}",
        f"{server.kv_tokens:,} KV tokens, {step_limits(settings, server.pace)}",
    ]
    more = []
    if settings.num_speculative_tokens:
        drafts = some(settings.num_speculative_tokens, "draft")
        more.append(f"{drafts} a row, {server.drafts.acceptance:.0%} accepted each")
    if server.ranks > 1:
        more.append(f"{server.ranks} data-parallel ranks")
    lines += [", ".join(more)] if more else []
    step_us, prompt_us = server.outside_us(model.costs)
    if step_us or prompt_us:
        lines.append(f"the scheduler takes {step_us:,.0f} us a step, {prompt_us:,.0f} more with prompts")
    elif model.costs.measured and model.costs.served is None:
        lines.append("the profile says nothing of the scheduler's time, taken as 0 us: --scheduler-us gives it")
    if (slower := _slower(model, server)) is not None:
        given, least, most = server.slower_host, slower["least"], slower["most"]
        if server.noted_speed(model.costs) is not None:
            lines.append(
                f"the host takes {least:.2f} to {most:.2f} times as long as in the profile's launches, "
                f"{slower['mean']:.2f} in the mean, "
                + (f"{given:g} times what" if given != 1 else "as")
                + " was noted while its calibration served"
            )
        else:
            lines.append(f"the host takes {least:.2f} times as long as in the profile's launches, as given")
    return lines


def _slower(model: CostModel, server: Server) -> dict[str, float] | None:
    """How many times as long as in the profile's launches the host takes, where it changes as noted or is slower."""
    speed = server.host_speed(model.costs)
    return None if speed is None else speed.slower(model.costs.host_work_us)


def _report(
    model: CostModel, server: Server, deployment: Deployment,
    results: Sequence[_Results],
    failed: Sequence[tuple[Trace, str, KPolicyError]], specs: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """What ``--json`` prints and ``--out`` writes."""
    return {
        "kpolicy": __version__,
        "setting": {
            "costs": model.what,
            "costs_version": model.costs.version,
            "measured": model.costs.measured,
            "notes": list(model.notes),
            "attention": str(deployment.support()),
            "objective": deployment.objective,
            "first_token_limit": Objective.parse(deployment.objective).first_token_limit,
            "server": attrs.asdict(server),
            "host_slower": _slower(model, server),
        },
        "traces": [_of_trace(trace, each, failed, specs) for trace, each in results],
    }


def _of_trace(
    trace: Trace | FailedTrace, results: Sequence[_Simulated], failed: Sequence[tuple[Trace, str, KPolicyError]],
    specs: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """A trace's part: what isn't known of one that failed is null, and every policy failed on it."""
    if isinstance(trace, FailedTrace):
        unknown = dict.fromkeys(("format", "requests", "span_s", "dropped"))
        why = [{"policy": spec, "error": trace.error} for spec in specs]
        return {"source": trace.source, **unknown, "policies": [], "failed": why}
    return {
        "source": trace.source,
        "format": trace.format,
        "requests": len(trace),
        "span_s": trace.span_s,
        "dropped": dict(trace.dropped),
        "policies": [
            result.as_dict() | ({} if starts is None else {"starts": starts.as_dict()}) for result, starts in results
        ],
        "failed": [{"policy": spec, "error": str(error)} for of, spec, error in failed if of is trace],
    }
