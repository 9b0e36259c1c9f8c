"""The fidelity benchmark's replay: a log's own step times give the run's batches and latencies, or say what doesn't."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks import fidelity, fidelity_served
from benchmarks.fidelity_again import cells_again, check_probe, measured_again
from benchmarks.fidelity_served import (
    NOTHING,
    SCHEDULER,
    forecast_steps,
    forecasts,
    host_speeds,
    latencies,
    latencies_of,
    outside,
    replayed,
)
from benchmarks.objectives import objective_of
from kpolicy.costs import CostTable, HostCost, analytic_costs
from kpolicy.errors import ConfigError, ProfileError
from kpolicy.host_speed import INSIDE, ONCE
from kpolicy.profiles import load_profile
from kpolicy.scheduling.generator import generate_trace
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.schemas import (
    LogHeader,
    Profile,
    QueueState,
    StepEntry,
    StepLogWriter,
    read_profile,
    read_step_log,
    write_profile,
)
from kpolicy.served_host import ServedHost
from kpolicy.settings import Objective, Settings
from kpolicy.simulate import Server, SimStep, simulate
from kpolicy.simulate.fidelity import REGIMES
from kpolicy.simulate.host_state import HostSpeeds

SETTING = {"max_num_reqs": 16, "max_num_tokens": 512, "kv_tokens": 8192, "block_size": 16}
TRACE = Trace(
    "drawn", "drawn", [TraceRequest(i, 0.011 * i, 40 + 131 * i % 900, 3 + 5 * i % 17, ()) for i in range(60)]
)  # fmt: skip
STEP_US, PROMPT_US = 150.0, 420.0
WORK_US, SLOW = 20.0, 20


def run(
    costs: CostTable | None = None, speeds: HostSpeeds | None = None, policy: str = "auto"
) -> tuple[list[StepEntry], dict[str, Any]]:  # fmt: skip
    """A log with the executor's times, and what was measured; the host's speed noted at the end of each step."""
    entries: list[StepEntry] = []

    def keep(step: SimStep) -> None:
        queue, shape = step.queue, step.step.shape()
        state = QueueState(
            waiting=len(queue.waiting), running=queue.num_running, kv_tokens_used=0, kv_tokens_capacity=8192
        )
        own_us = step.cycle_us - STEP_US - (PROMPT_US if step.step.chunks else 0.0)
        work_us = None if speeds is None else speeds.at(step.start_us + step.cycle_us)
        entries.append(
            StepEntry.of(step.number, shape, step.decision, cycle_us=own_us, queue=state, host_work_us=work_us)
        )

    server = Server(
        settings=Settings(max_num_reqs=16, max_num_tokens=512), kv_tokens=8192, block_size=16, warm=True,
        kv_bytes_per_token=None, reuse_prefixes=False, scheduler_us=STEP_US, scheduler_prompt_us=PROMPT_US,
    )  # fmt: skip
    result = simulate(TRACE, policy, server=server, costs=costs, on_step=keep, host_speed=speeds)
    prompts = sum(bool(entry.shape.prefills) for entry in entries)
    served = {
        "steps": len(entries), "prompt_steps": prompts, "outside_prompts_us": (STEP_US + PROMPT_US) * prompts,
        "outside_us": STEP_US * len(entries) + PROMPT_US * prompts, "ttft": result.ttft.p50, "gap": result.gap.p50,
        "span": result.span_s,
    }  # fmt: skip
    return entries, served


def test_the_logs_own_times_give_the_runs_latencies() -> None:
    """Batches are the run's, each one, and so are the medians."""
    entries, served = run()
    found, _ = replayed(entries, SETTING, served, TRACE)
    assert found["same_batches"] == found["steps"] == len(entries)
    assert found["ttft_p50_ms"] == pytest.approx(served["ttft"] / 1e3, abs=1e-3)
    assert found["gap_p50_ms"] == pytest.approx(served["gap"] / 1e3, abs=1e-3)


def test_a_batch_of_another_scheduler_is_told() -> None:
    """A log whose step had another prompt chunk isn't the simulated scheduler's."""
    entries, served = run()
    at = next(i for i, entry in enumerate(entries) if entry.shape.prefills)
    other = attrs.evolve(entries[at].shape, prefills=[(7, 0)], max_kv_len=None)
    entries[at] = attrs.evolve(entries[at], shape=other)
    assert replayed(entries, SETTING, served, TRACE)[0]["same_batches"] == len(entries) - 1


def test_time_outside_is_told_apart_where_the_run_does() -> None:
    """Steps with prompts have their own; a run that doesn't tell has one time for all."""
    _, served = run()
    assert outside(served) == (pytest.approx(STEP_US), pytest.approx(PROMPT_US))
    old = {"steps": 10, "outside_us": 50.0}
    assert outside(old) == (5.0, 0.0)
    assert outside(old | {"prompt_steps": 10, "outside_prompts_us": 50.0}) == (5.0, 0.0)


def test_a_host_that_was_slow_for_a_while_is_simulated_so() -> None:
    """What is noted beside a log's steps gives their times and the run's latencies back, where its mean doesn't."""
    costs = attrs.evolve(analytic_costs(), host_work_us=20.0)
    slow = HostSpeeds([(0.0, 20.0), (2e5, 20.0), (2e5 + 1, 300.0), (5e5, 300.0), (5e5 + 1, 20.0)])
    entries, served = run(costs, slow)
    figures = served | {
        "policy": "auto", "ttft_us": [served["ttft"]], "gap_us": [served["gap"]], "span_s": served["span"],
        "step_us": sum(each.cycle_us or 0.0 for each in entries),
    }  # fmt: skip
    setting = SETTING | {"attention": "mixed", "max_model_len": 2000, "rate": 1.0}
    printed: dict[str, Any] = {"setting": setting, "policies": [figures]}

    def errors(log: list[StepEntry]) -> list[float]:
        found = latencies(printed, TRACE, costs, {"auto": [log]})["auto"]
        return [abs(found[name]["error"]) for name in ("ttft_p50_ms", "gap_p50_ms", "busy_ms")]

    assert max(errors(entries)) < 0.01
    mean = sum(each.host_work_us or 0.0 for each in entries) / len(entries)
    assert max(errors([attrs.evolve(each, host_work_us=mean) for each in entries])) > 0.05
    unnoted = [attrs.evolve(each, host_work_us=None) for each in entries]
    assert max(errors(unnoted)) > 0.05
    # A forecast knows nothing of it, and where nothing at all is told steps are shorter by the scheduler's time too.
    made = forecasts(printed, TRACE, costs, {"auto": [entries]})
    told, untold = (made[knows]["policies"]["auto"] for knows in (SCHEDULER, NOTHING))
    blind = latencies(printed, TRACE, costs, {"auto": [unnoted]})["auto"]
    assert told == {name: blind[name] for name in told}
    assert untold["busy_ms"]["simulated"] < told["busy_ms"]["simulated"] - 0.8 * STEP_US * served["steps"] / 1e3
    assert "replayed" not in told


def test_mean_step_times_are_forecast_by_mode_and_regime(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the costs that the steps are of they are as measured, and half of it where these took twice as long."""
    monkeypatch.setattr(fidelity_served, "STARTS", 3)
    costs = analytic_costs()
    entries, _ = run(costs)
    setting = SETTING | {"attention": "mixed", "max_model_len": 2000, "rate": 1.0}
    noted = attrs.evolve(
        costs, host_work_us=WORK_US,
        served=ServedHost(scheduler_us=STEP_US, scheduler_prompt_us=PROMPT_US, host_work_us=(WORK_US,) * 4),
    )  # fmt: skip
    logs = {"auto": [entries, entries]}
    found = forecast_steps({"setting": setting}, TRACE, noted, logs)
    assert sum(each["steps"] for each in found) == 2 * len(entries)
    assert {each["mode"] for each in found} == {entry.mode for entry in entries}
    assert [each["error"] for each in found] == pytest.approx([0.0] * len(found), abs=1e-3)
    slow = [attrs.evolve(entry, cycle_us=2 * (entry.cycle_us or 0.0)) for entry in entries]
    halved = forecast_steps({"setting": setting}, TRACE, noted, {"auto": [slow]})
    assert [each["error"] for each in halved] == pytest.approx([-0.5] * len(found), abs=1e-3)
    # A cell that only one side has is told, without an error.
    some = forecast_steps({"setting": setting}, TRACE, noted, {"auto": [entries[:1]]})
    assert [each["error"] is None for each in some] == [not each["steps"] for each in some]
    assert len(some) == len(found) > 1
    # A host that was noted to be slow makes longer what it bounds.
    eager, _ = run(costs, policy="eager")
    notes = ServedHost(scheduler_us=STEP_US, host_work_us=tuple(WORK_US * each for each in (1, 90, 30, 60, 1, 1, 20)))
    busy = attrs.evolve(noted, served=notes)
    [row] = forecast_steps({"setting": setting}, TRACE, noted, {"eager": [eager]})
    [slower] = forecast_steps({"setting": setting}, TRACE, busy, {"eager": [eager]})
    assert (row["regime"], row["error"]) == ("host-bound", pytest.approx(0.0, abs=1e-3))
    assert slower["error"] > 0.1


def test_a_forecast_is_the_middle_of_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the profile's notes, where it is told nothing; it is one simulation where the profile has none."""
    monkeypatch.setattr(fidelity_served, "STARTS", 5)
    notes = ServedHost(scheduler_us=STEP_US, host_work_us=tuple(WORK_US * each for each in (1, 90, 30, 60, 1, 1, 20)))
    costs = attrs.evolve(analytic_costs(), host_work_us=WORK_US, served=notes)
    _, served = run(policy="eager")
    figures = {"policy": "eager", "ttft_us": [served["ttft"]], "gap_us": [served["gap"]], "span_s": served["span"]}
    setting = SETTING | {"attention": "mixed", "max_model_len": 2000, "rate": 1.0}
    printed = {"setting": setting, "policies": [figures | served | {"step_us": 1e6}]}
    found = latencies(printed, TRACE, costs, {}, NOTHING)["eager"]
    server = fidelity_served.server_of(setting, gap_tail=False)
    made = [fidelity_served.served_by(setting, TRACE, "eager", costs, server, seed=seed) for seed in range(5)]
    assert len({one.ttft.p50 for one in made}) > 2
    for name, values in (
        ("ttft_p50_ms", [one.ttft.p50 for one in made]), ("busy_ms", [one.step_us for one in made]),
    ):  # fmt: skip
        assert found[name]["simulated"] == pytest.approx(sorted(values)[2] / 1e3, abs=1e-3)
    # Of further turns it is the same, and isn't simulated again.
    asked, simulated = [], fidelity_served.served_by
    monkeypatch.setattr(
        fidelity_served, "served_by", lambda *given, **more: asked.append(more) or simulated(*given, **more)
    )
    twice = latencies({**printed, "policies": 2 * printed["policies"]}, TRACE, costs, {}, NOTHING)["eager"]
    assert twice["ttft_p50_ms"]["simulated"] == found["ttft_p50_ms"]["simulated"]
    assert len(asked) == 5
    steady = attrs.evolve(costs, served=None)
    alone = latencies(printed, TRACE, steady, {}, NOTHING)["eager"]
    once = fidelity_served.served_by(setting, TRACE, "eager", steady, server)
    assert alone["ttft_p50_ms"]["simulated"] == pytest.approx(once.ttft.p50 / 1e3, abs=1e-3)


@pytest.mark.parametrize(
    ("said", "objective"),
    [
        ({}, Objective(first_token_limit=1.25)),
        ({"objective": "throughput"}, Objective(first_token_limit=1.25)),
        ({"objective": "latency"}, Objective(0.0, 1.0)),
        ({"objective": "throughput", "first_token_limit": 1.0}, Objective()),
        ({"objective": "1:0:1.5", "first_token_limit": 1.5}, Objective(first_token_limit=1.5)),
    ],
)
def test_a_run_is_simulated_by_the_objective_that_it_was_served_by(said: dict[str, Any], objective: Objective) -> None:
    """What `auto` takes depends on it; a run that doesn't tell its bound on first tokens had 1.25."""
    assert objective_of(said) == objective
    # On a host that keeps its speed and has no scheduler: what the profile's was is in no run of this.
    costs = attrs.evolve(load_profile("llama-3.1-8b-h200").costs, served=None)
    trace = generate_trace(seed=0, num_requests=60).scaled(12.0)
    setting = SETTING | {"attention": "mixed", "max_num_reqs": 64, "max_num_tokens": 2048, "kv_tokens": 1 << 17}
    server = Server(
        settings=Settings(max_num_reqs=64, max_num_tokens=2048), kv_tokens=1 << 17, block_size=16, warm=True,
        kv_bytes_per_token=None, gap_tail=False,
    )  # fmt: skip
    served = {}
    for each in (objective, Objective(), Objective(first_token_limit=1.25)):
        found = simulate(trace, "auto", server=server, costs=costs, objective=each, attention="mixed")
        served[each] = {
            "policy": "auto", "steps": found.steps, "outside_us": 0.0, "step_us": found.step_us, "span_s": found.span_s,
            "ttft_us": [found.ttft.p50], "gap_us": [found.gap.p50],
        }  # fmt: skip
    assert served[Objective()]["steps"] != served[Objective(first_token_limit=1.25)]["steps"]
    again = latencies_of(setting | said, served[objective], trace, costs, None)
    assert again["steps"] == {"measured": served[objective]["steps"], "simulated": served[objective]["steps"]}
    assert all(abs(again[name]["error"]) < 1e-3 for name in ("ttft_p50_ms", "gap_p50_ms", "busy_ms", "span_ms"))


def test_speeds_are_in_the_order_of_time() -> None:
    """A clock that is set back, and steps whose speed wasn't noted."""
    entries, _ = run()
    noted = [attrs.evolve(each, host_work_us=work) for each, work in zip(entries, (20.0, None, 40.0), strict=False)]
    costs = attrs.evolve(analytic_costs(), host_work_us=20.0, host_work_inside_us=10.0)
    speeds = host_speeds(noted, [100.0, 90.0, 80.0], costs)
    assert speeds is not None
    assert [speeds.at(us) for us in (0.0, 99.0, 100.0)] == [20.0, 20.0, 40.0]
    assert host_speeds(entries, [1.0] * len(entries), costs) is None
    # What was noted inside is of the whole step, from its start.
    inside = [attrs.evolve(each, host_work_inside_us=15.0, cycle_us=30.0) for each in noted[:1]]
    speeds = host_speeds([*inside, noted[2]], [100.0, 110.0], costs)
    assert speeds is not None
    assert [speeds.at(us) for us in (70.0, 90.0, 110.0)] == [30.0, 35.0, 40.0]


MIDDLE = "the middle of each figure of 3"


@pytest.mark.parametrize(
    ("given", "version", "made"),
    [
        ([], "table 7", fidelity.OWN_TABLE), (["--table", "fitted again"], "table 7", "fitted again"),
        ([], f"{MIDDLE}: table 7; table 8; table 9", f"{MIDDLE} calibrations before the run"),
    ],
)  # fmt: skip
def test_a_result_says_which_table_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], version: str, made: str
) -> None:
    """It names the table, how that came to be, and the commit; the profile lies beside it, with no folder of here."""
    monkeypatch.setattr(fidelity, "RESULT", tmp_path / "results" / "fidelity.json")
    monkeypatch.setenv("KPOLICY_COMMIT", "abc1234")
    (tmp_path / "results").mkdir()
    costs = attrs.evolve(analytic_costs(), version=version)
    command = f"kpolicy run --model {tmp_path}/config.json --trace {tmp_path}/t.csv"
    measured_at = "2026-11-22T23:00:00+00:00"
    profile = Profile(costs=costs, device="D", model="M", command=command, measured_at=measured_at)
    write_profile(tmp_path / "p.json", profile)
    entries, _ = run()
    with StepLogWriter(tmp_path / "s.jsonl") as log:
        for entry in entries:
            log.write(entry)
    read = ["--profile", str(tmp_path / "p.json"), "--log", str(tmp_path / "s.jsonl"), "--name", "x"]
    assert fidelity.main([*read, *given]) == 0
    assert not list((tmp_path / "results").iterdir()), "no date, nothing written"
    with pytest.raises(SystemExit):
        fidelity.main([*read, *given, "--date", "2026-11-21"])
    assert not list((tmp_path / "results").iterdir()), "measured later than that"
    assert fidelity.main([*read, *given, "--date", "2026-11-22"]) == 0
    result = json.loads((tmp_path / "results" / "fidelity-x.json").read_text())
    assert result["table"] == {"made": made, "version": version, "profile": "fidelity-x-profile.json"}
    assert result["commit"] == "abc1234"
    kept = read_profile(tmp_path / "results" / result["table"]["profile"])
    assert kept.costs == costs
    assert kept.command == f"kpolicy run --model {tmp_path.name}/config.json --trace t.csv"
    assert str(tmp_path) not in json.dumps(result)


def test_results_have_their_tables_beside_them() -> None:
    """Each result that names a table has its profile, whose version is that; tables that differ have other versions."""
    named = [
        (path, result["table"])
        for path in sorted(fidelity.RESULT.parent.glob("fidelity-*.json"))
        if "table" in (result := json.loads(path.read_text()))
    ]
    assert named
    costs = [read_profile(path.with_name(table["profile"])).costs for path, table in named]
    assert [each.version for each in costs] == [table["version"] for _, table in named]
    assert len({each.version for each in costs}) == len({repr(each) for each in costs})


def written(path: Path, entries: list[StepEntry], probe: str) -> None:
    with StepLogWriter(path, LogHeader(policy="auto", host_probe=probe)) as writer:
        for entry in entries:
            writer.write(entry)


def test_a_log_by_other_fixed_work_is_refused(tmp_path: Path) -> None:
    """Its times say nothing of the profile's; where either noted none, nothing hangs on it."""
    entries, _ = run(speeds=HostSpeeds([(0.0, 20.0)]))
    costs = attrs.evolve(analytic_costs(), host_work_us=20.0, host_probe="copies")
    profile = Profile(costs=costs, device="d", model="m")
    path = tmp_path / "s.jsonl"
    for probe, work_us, refused in (("interpreter", 20.0, True), ("copies", 20.0, False), ("interpreter", None, False)):
        written(path, [attrs.evolve(each, host_work_us=work_us) for each in entries], probe)
        if refused:
            with pytest.raises(ProfileError, match="'interpreter', and the profile's costs by 'copies'"):
                check_probe(read_step_log(path), profile, path)
        else:
            check_probe(read_step_log(path), profile, path)


def test_a_log_whose_notes_inside_steps_are_of_other_work_is_refused(tmp_path: Path) -> None:
    """An older version's notes take longer on the same host; where either has none inside, nothing hangs on it."""
    entries, _ = run(speeds=HostSpeeds([(0.0, 20.0)]))
    path = tmp_path / "s.jsonl"
    for profiles, logs, noted, refused in (
        (INSIDE, ONCE, 10.0, True), (ONCE, INSIDE, 10.0, True), (INSIDE, INSIDE, 10.0, False),
        (ONCE, ONCE, 10.0, False), (INSIDE, ONCE, None, False),
    ):  # fmt: skip
        costs = attrs.evolve(analytic_costs(), host_work_us=20.0, host_work_inside_us=9.0, inside_probe=profiles)
        with StepLogWriter(path, LogHeader(policy="auto", inside_probe=logs)) as writer:
            for each in entries:
                writer.write(attrs.evolve(each, host_work_us=20.0, host_work_inside_us=noted))
        with pytest.raises(ProfileError, match="calibrate and run anew") if refused else nullcontext():
            check_probe(read_step_log(path), Profile(costs=costs, device="d", model="m"), path)


def test_steps_that_ran_again_stand_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the result, by policy and for all; without the run's log of a policy they are refused."""
    monkeypatch.setattr(fidelity, "RESULT", tmp_path / "fidelity.json")
    entries, _ = run()
    write_profile(tmp_path / "p.json", Profile(costs=analytic_costs(), device="d", model="m"))
    written(tmp_path / "s.jsonl", entries, "interpreter")
    written(tmp_path / "a.jsonl", 3 * entries[:40], "interpreter")
    given = ["--profile", str(tmp_path / "p.json"), "--log", str(tmp_path / "s.jsonl")]
    fidelity.main([*given, "--again", str(tmp_path / "a.jsonl"), "--date", "D"])
    found = json.loads((tmp_path / "fidelity.json").read_text())["measured_again"]
    assert sum(row["steps"] for row in found["auto"]) == 40
    assert found["auto"] == found["all policies"]
    _, _, table = capsys.readouterr().out.partition("side by side\n")
    [beside] = [line for line in table.splitlines() if line.startswith("  full, saturated")]
    # 54 single steps; of the first 40, 32 ran again three times.
    single, _, repeats = (part.split() for part in beside.split("|"))
    assert single == ["full,", "saturated", "54", "0.0%", "+0.0%", "0.0%"]
    assert repeats == ["32", "x", "3", "0.0%", "+0.0%", "0.0%"]
    work = attrs.evolve(analytic_costs(), host_work_us=20.0)
    write_profile(tmp_path / "p.json", Profile(costs=work, device="d", model="m"))
    written(tmp_path / "a.jsonl", [attrs.evolve(each, host_work_us=20.0) for each in entries[:40]], "copies")
    with pytest.raises(ProfileError, match=r"a\.jsonl has the host's speed by the fixed work 'copies'"):
        fidelity.main([*given, "--again", str(tmp_path / "a.jsonl")])
    with StepLogWriter(tmp_path / "a.jsonl", LogHeader(policy="vllm")) as writer:
        writer.write(entries[0])
    with pytest.raises(ConfigError, match="of vllm; give the run's --log"):
        fidelity.main([*given, "--again", str(tmp_path / "a.jsonl")])


def test_too_few_repeats_lose_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a policy whose repeats were cut off it is said; the others' rows, the cells and the ranking are written."""
    monkeypatch.setattr(fidelity, "RESULT", tmp_path / "fidelity.json")
    write_profile(tmp_path / "p.json", Profile(costs=analytic_costs(), device="d", model="m"))
    given = ["--profile", str(tmp_path / "p.json")]
    for policy, passes in (("auto", 3), ("vllm", 2)):
        entries, _ = run(policy=policy)
        for name, steps in (("s", entries), ("a", passes * entries[:40])):
            path = tmp_path / f"{name}-{policy}.jsonl"
            with StepLogWriter(path, LogHeader(policy=policy)) as writer:
                for entry in steps:
                    writer.write(entry)
            given += ["--log" if name == "s" else "--again", str(path)]
    assert fidelity.main([*given, "--date", "D"]) == 0
    said = capsys.readouterr().out
    assert "vllm measured again: too few repeats, no step ran 3 times or more in one regime" in said
    assert "ranking by time a token: as measured" in said
    result = json.loads((tmp_path / "fidelity.json").read_text())
    again = result["measured_again"]
    assert again["vllm"] == []
    assert sum(row["steps"] for row in again["auto"]) == 40
    assert again["all policies"] == again["auto"]
    assert sum(cell["again"] for cell in result["cells_again"]) == 40
    own = result["by_own_speed"]
    assert own["all_turns"] == own["first_turns"]
    assert sum(row["steps"] for row in own["all_turns"] if row["regime"] != "all") == own["all_turns"][-1]["steps"]
    assert sum(cell["again"] for cell in own["cells_again"]) == 40
    # As of a run none of whose steps ran so often.
    assert fidelity.main([*given[:2], *given[6:], "--date", "D"]) == 0
    result = json.loads((tmp_path / "fidelity.json").read_text())
    assert result["measured_again"] == {"vllm": [], "all policies": []}
    assert {cell["again"] for cell in result["cells_again"]} == {0}


def test_a_cells_own_steps_are_counted_whatever_regime_their_repeats_have() -> None:
    """Steps that the host bounded in the run, and the device when they ran again, don't show the latter's cell."""
    quick = [attrs.evolve(each, host_work_us=WORK_US) for each in run()[0]]
    costs = attrs.evolve(
        analytic_costs(), host_work_us=WORK_US, host_full=HostCost(10.0), host_piecewise=HostCost(10.0),
        host_eager=HostCost(10.0),
    )  # fmt: skip
    profile = Profile(costs=costs, device="d", model="m")
    entries = [*(attrs.evolve(each, host_work_us=1e4 * WORK_US) for each in quick[:SLOW]), *quick[SLOW:]]
    ran = 10
    again = {"auto": 3 * quick[:ran]}
    assert all(row.regime != "host-bound" for row in measured_again(again, {"auto": entries}, profile)["auto"]
               if row.regime in REGIMES)  # fmt: skip
    counts = [(cell.regime, cell.steps, cell.again) for cell in cells_again(again, {"auto": entries}, profile)]
    assert sum(steps for _, steps, _ in counts) == len(entries)
    assert sum(found for regime, _, found in counts if regime == "host-bound") == ran
    assert sum(found for regime, _, found in counts if regime != "host-bound") == 0
    own = cells_again(again, {"auto": entries}, profile, own_speed=True)
    assert [cell.regime for cell in own if cell.regime == "host-bound"] == []
    assert (sum(cell.steps for cell in own), sum(cell.again for cell in own)) == (len(entries), ran)


def test_a_paced_run_is_refused(tmp_path: Path) -> None:
    """Its batches went by costs of then; a run without, or from before the setting, is read."""
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,input_length,output_length\n0,16,3\n50,30,2\n")
    setting: dict[str, Any] = SETTING | {"max_model_len": 2000, "rate": 1.0}
    with pytest.raises(ConfigError, match=r"the run had --pace vllm: .* Give a run without --pace"):
        fidelity_served.requests_of({"setting": setting | {"pace": "vllm"}}, path, 0.0, 1.0)
    for more in ({}, {"pace": None}):
        assert len(fidelity_served.requests_of({"setting": setting | more}, path, 0.0, 1.0)) == 2
