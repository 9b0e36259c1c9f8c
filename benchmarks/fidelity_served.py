"""What a run measured of its requests beside what simulating its arrivals gives: `benchmarks.fidelity --run`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.fidelity_turns import figure, figures_of, of_turns, ranking
from benchmarks.objectives import objective_of
from kpolicy.attention import Claims
from kpolicy.costs import CostTable
from kpolicy.errors import ConfigError
from kpolicy.scheduling.traces import Trace, read_trace
from kpolicy.schemas import StepEntry
from kpolicy.settings import Settings
from kpolicy.shapes import GAP_TAIL_US, BatchNumbers
from kpolicy.simulate import Server, SimResult, SimStep, simulate
from kpolicy.simulate.fidelity import REGIMES, eager_sizes, expected_steps
from kpolicy.simulate.host_state import HostSpeeds
from kpolicy.simulate.percentiles import Percentiles
from kpolicy.simulate.queue import Queue
from kpolicy.simulate.requests import Request, in_order

ALL, SCHEDULER, NOTHING = "the host's speed and the scheduler's time", "the scheduler's time", "nothing"
"""What a simulation knows of the run besides its arrivals: the latter two are forecasts"""
STARTS = 24
"""Among a profile's notes of the host's speed, from which it is simulated where it is told nothing of the run"""
Turns = Mapping[str, Sequence[Sequence[StepEntry]]]
"""By policy, the steps of each of its turns"""
Untold = dict[tuple[str, bool], list[SimResult]]
"""What simulations come to that are told nothing of the run, by policy and by whether it is told its longest gaps"""
StepTimes = dict[tuple[str, str], list[float]]
"""Microseconds of steps, by mode and regime"""
_COUNTS = BatchNumbers._fields.index("max_query_len")


def outside(each: dict[str, Any]) -> tuple[float, float]:
    """What the run's scheduler took a step, and what a step with prompts took besides; 0 where the run doesn't tell."""
    prompts = each.get("prompt_steps", 0)
    decodes = each["steps"] - prompts
    if not prompts or not decodes:
        return each["outside_us"] / each["steps"], 0.0
    plain = (each["outside_us"] - each["outside_prompts_us"]) / decodes
    return plain, max(each["outside_prompts_us"] / prompts - plain, 0.0)


def requests_of(run: dict[str, Any], trace: Path, start_s: float, window_s: float) -> Trace:
    """The requests that the run served.

    Raises:
        ConfigError: its steps were bounded by ``--pace``, whose answers go by costs as they were while it served, so
            that its batches can't be made again.
    """
    setting = run["setting"]
    if setting.get("pace"):
        raise ConfigError(
            f"the run had --pace {setting['pace']}: its batches went by costs as they were while it served, and can't "
            "be made again. Give a run without --pace."
        )
    return read_trace(trace).window(start_s, window_s).limited(setting["max_model_len"]).scaled(setting["rate"])


def server_of(setting: dict[str, Any], **more: Any) -> Server:
    """The run's server, with more of it as given."""
    settings = Settings(max_num_reqs=setting["max_num_reqs"], max_num_tokens=setting["max_num_tokens"])
    sizes = {name: setting[name] for name in ("kv_tokens", "block_size")}
    return Server(settings=settings, warm=True, kv_bytes_per_token=None, **sizes, **more)


def served_by(
    setting: dict[str, Any], requests: Trace, policy: str, costs: CostTable, server: Server, **more: Any
) -> SimResult:
    """The run's requests simulated with its attention and objective; `more` is as `simulate` takes it."""
    claims = Claims.at_level(setting["attention"].partition(",")[0])
    return simulate(
        requests, policy, server=server, costs=costs, attention=claims, objective=objective_of(setting), **more
    )


def replayed(
    entries: Sequence[StepEntry], setting: dict[str, Any], served: dict[str, Any], trace: Trace
) -> tuple[dict[str, Any], list[float]]:
    """The log's step times in the simulator's queue, with requests let in at the steps at which the run let them in.

    Args:
        entries: a policy's step log.
        setting: the run's.
        served: what the run measured for the policy.
        trace: what it served.

    Returns:
        How many batches are the run's, and the latencies; the end of each step, in microseconds from the first arrival.
    """
    queue = Queue(
        Settings(max_num_reqs=setting["max_num_reqs"], max_num_tokens=setting["max_num_tokens"]),
        num_blocks=setting["kv_tokens"] // setting["block_size"], block_size=setting["block_size"], prefix_block=0,
    )  # fmt: skip
    step_us, prompt_us = outside(served)
    coming = deque(in_order(trace.requests))
    start_us = now_us = coming[0].arrival_s * 1e6
    ends: list[float] = []
    ttft, gap, same = Percentiles(), Percentiles(), 0
    for entry in entries:
        if queue.idle and coming:
            now_us = max(now_us, coming[0].arrival_s * 1e6)
        inside = (entry.queue.waiting + entry.queue.running) if entry.queue else 0
        while coming and queue.num_running + len(queue.waiting) < inside:
            arrived = coming.popleft()
            queue.add(Request(arrived, arrived.arrival_s * 1e6))
            now_us = max(now_us, arrived.arrival_s * 1e6)
        if coming:
            # It hadn't come yet. Time outside the executor varies, and who was let in tells what the clock was.
            now_us = min(now_us, coming[0].arrival_s * 1e6)
        step = queue.next_step(now_us)
        if step is None:
            break
        same += step.numbers[:_COUNTS] == entry.shape.numbers[:_COUNTS]
        us = (entry.cycle_us or 0.0) + step_us + (prompt_us if step.chunks else 0.0)
        now_us += us
        ends.append(now_us - start_us)
        if step.numbers.num_decodes:
            gap.add(us / entry.decode_steps, step.numbers.num_decodes * entry.decode_steps)
        for request in queue.complete(step, entry.decode_steps).first_tokens:
            ttft.add(now_us - request.arrival_us)
    found = {
        "steps": len(entries), "same_batches": same,
        "ttft_p50_ms": round(ttft.spread().p50 / 1e3, 3), "gap_p50_ms": round(gap.spread().p50 / 1e3, 3),
    }  # fmt: skip
    return found, ends


def host_speeds(entries: Sequence[StepEntry], ends: Sequence[float], costs: CostTable) -> HostSpeeds | None:
    """How fast the host was when, as it was noted inside a log's steps or after them; None where it wasn't.

    Every note as it is: a queue feels the slow moments that the middle of several leaves out.
    """
    noted: list[tuple[float, float]] = []
    for each, end in zip(entries, ends, strict=False):
        if inside := costs.host_work_of(each.host_work_inside_us):
            # What was noted inside a step is of all of it, from its start on.
            noted.append((end - (each.cycle_us or 0.0), inside))
        elif each.host_work_us:
            noted.append((end, each.host_work_us))
    if not noted:
        return None
    # A request that came earlier than the time outside the executor says sets the clock back.
    times, works = zip(*noted, strict=True)
    return HostSpeeds(zip(accumulate(times, max), works, strict=True))


def latencies(
    run: dict[str, Any], requests: Trace, costs: CostTable, logs: Turns, knows: str = ALL
) -> dict[str, Any]:  # fmt: skip
    """By policy, what the run measured and what simulating its arrivals gives; see `latencies_of` and `of_turns`.

    Args:
        run: what ``kpolicy run --json`` printed.
        requests: what it served.
        costs: the profile's.
        logs: each policy's steps by turn, beside which the host's speed may be noted.
        knows: what the simulation is told of the run.

    Raises:
        ConfigError: a policy's logs aren't those of its turns.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    untold: Untold = {}
    for each in run["policies"]:
        turns, policy = found.setdefault(each["policy"], []), each["policy"]
        before, entries = [], None
        if given := logs.get(policy):
            of_it = [one["steps"] for one in run["policies"] if one["policy"] == policy]
            if of_it != [len(entries) for entries in given]:
                raise ConfigError(
                    f"{policy}'s logs have {', '.join(f'{len(entries)}' for entries in given)} steps, and its turns in "
                    f"the run {', '.join(map(str, of_it))}. Give the log of each turn, in the order of the turns."
                )
            before, entries = list(given[: len(turns)]), given[len(turns)]
        turns.append(latencies_of(run["setting"], each, requests, costs, entries, before, knows, untold))
    return {policy: of_turns(turns) for policy, turns in found.items()}


def latencies_of(
    setting: dict[str, Any], each: dict[str, Any], requests: Trace, costs: CostTable,
    entries: Sequence[StepEntry] | None, before: Sequence[Sequence[StepEntry]] = (), knows: str = ALL,
    untold: Untold | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a policy's turn measured and what simulating its arrivals gives: milliseconds and their error; steps.

    Args:
        setting: the run's.
        each: what the run measured.
        requests: what it served.
        costs: the profile's.
        entries: the turn's steps; None where there is no log of it.
        before: those of the policy's turns before.
        knows: what the simulation is told of the run.
        untold: what other turns came to, told nothing: the same in each.

    With a log, and told all, also "replayed", and the mean of the fixed work's times that it notes, "host_work_us".
    """
    # Told nothing, it is as the profile says: what was noted while its calibration served, or 0.
    scheduler_us, scheduler_prompt_us = (None, None) if knows == NOTHING else outside(each)
    # Runs before the fact was told were decided without it.
    tail = any(GAP_TAIL_US in entry.shape.facts for entry in entries or ())
    server = server_of(setting, scheduler_us=scheduler_us, scheduler_prompt_us=scheduler_prompt_us, gap_tail=tail)
    speeds = None
    told: dict[str, Any] = {}
    if entries is not None and knows == ALL:
        told["replayed"], ends = replayed(entries, setting, each, requests)
        speeds = host_speeds(entries, ends, costs)
        noted = [entry.host_work_us for entry in entries if entry.host_work_us]
        if noted:
            told["host_work_us"] = round(fmean(noted), 3)
    sizes = eager_sizes(chain(*before)) if knows == ALL else ()
    # Told nothing, it begins at no note of the host's speed rather than at another.
    several = knows == NOTHING and server.host_speed(costs) is not None
    turn, untold = (each["policy"], tail), {} if untold is None else untold
    simulated = untold.get(turn, []) if knows == NOTHING else []
    if not simulated:
        of_run: dict[str, Any] = {"host_speed": speeds, "eager_sizes": sizes}
        simulated = [
            served_by(setting, requests, each["policy"], costs, server, seed=seed, **of_run)
            for seed in range(STARTS if several else 1)
        ]
    if knows == NOTHING:
        untold[turn] = simulated
    # Both sides have the scheduler's own time, a step's and the run's, but where the simulation isn't told it.
    pairs = {
        "ttft_p50_ms": (each["ttft_us"][0], [one.ttft.p50 for one in simulated]),
        "gap_p50_ms": (each["gap_us"][0], [one.gap.p50 for one in simulated]),
        "busy_ms": (each["step_us"] + each["outside_us"], [one.step_us for one in simulated]),
        "span_ms": (each["span_s"] * 1e6, [one.span_s * 1e6 for one in simulated]),
    }
    figures = {
        name: figure([measured / 1e3], [median(expected) / 1e3]) for name, (measured, expected) in pairs.items()
    }  # fmt: skip
    return figures | {"steps": {"measured": each["steps"], "simulated": simulated[0].steps}} | told


def forecasts(run: dict[str, Any], requests: Trace, costs: CostTable, logs: Turns) -> dict[str, Any]:
    """By what a simulation is told of the run, latencies and rankings where the host is as in the profile.

    Where its calibration served, the host's speed changes as was noted then, else it is that of the launches. The
    arguments are those of `latencies`. Told nothing is what `kpolicy simulate` with a profile alone is, the middle of
    `STARTS` starts among its notes (``--starts``), if it has any.
    Which eager sizes ran in turns before isn't told either.
    """
    found = {}
    for knows in (SCHEDULER, NOTHING):
        policies = latencies(run, requests, costs, logs, knows)
        brief = {policy: {key: each[key] for key in figures_of(each)} for policy, each in policies.items()}
        found[knows] = {"policies": brief, **ranking(policies)}
    return found


def forecast_steps(run: dict[str, Any], requests: Trace, costs: CostTable, logs: Turns) -> list[dict[str, Any]]:
    """By mode and regime, mean step times that a simulation forecasts, told nothing of the run, and those measured.

    Measured are all steps of all turns of all policies, forecast those of each policy from `STARTS` starts. Neither has
    the scheduler's time. The steps needn't be the same, as batches follow from when steps end; where only one side has
    any there is no error. Regimes are the profile's at its own host speed.

    The arguments are those of `latencies`.
    """
    measured: StepTimes = {}
    for turns in logs.values():
        _add(chain.from_iterable(turns), costs, measured)
    forecast: StepTimes = {}
    for policy, turns in logs.items():
        tail = any(GAP_TAIL_US in entry.shape.facts for entries in turns for entry in entries)
        server = server_of(run["setting"], gap_tail=tail)
        several = server.host_speed(costs) is not None
        for seed in range(STARTS if several else 1):
            steps: list[StepEntry] = []

            def note(step: SimStep, steps: list[StepEntry] = steps) -> None:
                us = max(step.device_us, step.host_us) + costs.step_us
                steps.append(step._replace(cycle_us=us).entry())

            served_by(run["setting"], requests, policy, costs, server, seed=seed, on_step=note)
            _add(steps, costs, forecast)
    rows = []
    for key in sorted({*measured, *forecast}, key=lambda key: (key[0], REGIMES.index(key[1]))):
        one, other = measured.get(key, []), forecast.get(key, [])
        us = [round(fmean(each), 2) if each else None for each in (one, other)]
        rows.append({
            "mode": key[0], "regime": key[1], "steps": len(one), "forecast_steps": len(other), "measured_us": us[0],
            "forecast_us": us[1], "error": round(fmean(other) / fmean(one) - 1, 4) if one and other else None,
        })  # fmt: skip
    return rows


def _add(entries: Iterable[StepEntry], costs: CostTable, times: StepTimes) -> None:
    """Each step's microseconds, to those of its mode and regime."""
    listed = list(entries)
    for entry, expected in zip(listed, expected_steps(listed, costs), strict=True):
        if entry.cycle_us:
            key = entry.mode, expected.regime(entry, costs, own_speed=True)
            times.setdefault(key, []).append(entry.cycle_us)
