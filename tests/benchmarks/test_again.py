"""`benchmarks.gpu.again`: a run's batches come back, and of their steps those run that are asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.gpu.again import (
    SPARE,
    Again,
    Took,
    leave_out,
    main,
    shortened,
    sizes_of,
    thinned,
    wanted,
)
from kpolicy.cli.step_log import StepLog
from kpolicy.costs import HostCost, analytic_costs
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.scheduling.batching import Batcher
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.schemas import Log, StepEntry, read_profile, read_step_log, write_profile
from kpolicy.settings import Settings
from kpolicy.shapes import GAP_TAIL_US
from kpolicy.simulate.repeats import host_bound
from kpolicy.trace_run import Prompts, serve_trace

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "max_position_embeddings": 256,
}  # fmt: skip
SETTINGS = Settings(max_num_reqs=16, max_num_tokens=512)
# In three lots, so that it is idle between them.
TRACE = Trace(
    "drawn", "drawn",
    [TraceRequest(i, 3.0 + 0.011 * i + i // 15, 40 + 131 * i % 900, 3 + 5 * i % 17, ()) for i in range(45)],
)  # fmt: skip


def engine(policy: str) -> Engine:
    executor = SimulatedExecutor(analytic_costs(), num_blocks=512, block_size=16, max_num_reqs=16)
    made = Engine(policy, settings=SETTINGS, costs=analytic_costs(), executor=executor)
    made.capture()
    return made


def batcher() -> Batcher:
    return Batcher(SETTINGS, num_blocks=512, block_size=16)


def again(tmp_path: Path, policy: str, runs: set[int] | None = None, trace: Trace = TRACE) -> Again:
    """A run's steps, to be run again; all of them by default."""
    path, ran = tmp_path / "s.jsonl", engine(policy)
    with StepLog(path, policy, ran) as note:
        serve_trace(TRACE, ran, batcher(), Prompts(), on_step=note)
    log = read_step_log(path)
    runs = set(range(len(log.entries))) if runs is None else runs
    return Again(engine(policy), log, runs, runs, True, batcher, trace, Prompts())


@pytest.mark.parametrize("policy", ["auto", "vllm", "split:form=decodes_beside"])
def test_every_step_comes_back(tmp_path: Path, policy: str) -> None:
    """The same batches, launches and times, twice over, though the simulated device has its state."""
    made = again(tmp_path, policy)
    for _ in range(2):
        found, others = made.once()
        assert others == 0
        assert len(found) == len(made.log.entries) > 90
        for ours, theirs in zip(found, made.log.entries, strict=True):
            assert (ours.step, ours.shape, ours.launches) == (theirs.step, theirs.shape, theirs.launches)
            assert ours.cycle_us == pytest.approx(theirs.cycle_us)
            assert 0 < (ours.host_work_us or 0.0) < 1e6


def test_what_is_not_asked_for_is_scheduled_and_not_run(tmp_path: Path) -> None:
    """The batches after it are the run's all the same."""
    made = again(tmp_path, "auto", {3, 4, 80})
    found, _ = made.once()
    assert [each.step for each in found] == [3, 4, 80]
    assert made.engine.stats.total.steps == 3
    assert found[2].shape == made.log.entries[80].shape


def test_decisions_are_told_what_the_runs_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest gaps so far are the run's; a pass has none of its own."""
    made, told = again(tmp_path, "auto"), []
    at = len(made.log.entries) // 2
    shape = attrs.evolve(made.log.entries[at].shape, facts={GAP_TAIL_US: 4321})
    entries = tuple(attrs.evolve(each, shape=shape) if each.step == at else each for each in made.log.entries)
    step = made.engine.step

    def noted(inputs: StepInputs) -> StepOutputs:
        told.append(inputs.numbers.facts.get(GAP_TAIL_US))
        return step(inputs)

    monkeypatch.setattr(made.engine, "step", noted)
    attrs.evolve(made, log=attrs.evolve(made.log, entries=entries), runs={at - 1, at}).once()
    assert told == [None, 4321]


def test_steps_decided_otherwise_are_told(tmp_path: Path) -> None:
    made = attrs.evolve(again(tmp_path, "auto"), engine=engine("eager"))
    eager = sum(each.mode == "eager" for each in made.log.entries)
    assert made.once()[1] == len(made.log.entries) - eager > 0


def test_decode_steps_decided_otherwise_leave_the_runs_batches(tmp_path: Path) -> None:
    """Several decode steps ran beside a prompt, and in the pass one: what comes after is the run's all the same."""
    made = attrs.evolve(again(tmp_path, "split:form=decodes_beside"), engine=engine("eager"))
    assert any(each.decode_steps > 1 for each in made.log.entries)
    found, others = made.once()
    assert others > 0
    assert [each.shape for each in found] == [each.shape for each in made.log.entries]


def test_another_trace_is_refused(tmp_path: Path) -> None:
    later = attrs.evolve(TRACE, requests=TRACE.requests[1:])
    with pytest.raises(ConfigError, match="another batch than in the run"):
        again(tmp_path, "auto", trace=later).once()


def test_the_graphs_that_are_captured_are_those_that_replay(tmp_path: Path) -> None:
    log: Log[StepEntry] = again(tmp_path, "auto").log
    replays = [i for i, each in enumerate(log.entries) if each.mode == "full"]
    sizes = sizes_of(log.entries, set(replays[:5]))
    assert sizes is not None
    keys = {launch.key for i in replays[:5] for launch in log.entries[i].launches if launch.key is not None}
    assert {*sizes.decode, *sizes.mixed} == {key.num_tokens for key in keys}
    assert set(sizes.decode) == {key.num_tokens for key in keys if key.decode_only}
    assert sizes.piecewise == ()
    eager = {i for i, each in enumerate(log.entries) if each.mode == "eager"}
    assert sizes_of(log.entries, eager) is None


def test_steps_are_thinned_evenly_and_those_that_the_host_bounds_come_first(tmp_path: Path) -> None:
    assert thinned(range(10), 4) == [0, 2, 5, 7]
    assert thinned([3, 9], 2) == [3, 9]
    assert thinned(range(10), 0) == []
    log: Log[StepEntry] = again(tmp_path, "vllm").log
    bound = {i for i, each in enumerate(log.entries) if each.mode == "eager"}
    costs = attrs.evolve(analytic_costs(), host_full=HostCost(1.0), host_eager=HostCost(1e8))
    assert wanted(log, costs, most=None, slower=1.0) == bound
    assert wanted(log, costs, most=None, slower=1e9) == set(range(len(log.entries))) > bound
    full = {i for i, each in enumerate(log.entries) if each.mode == "full"}
    assert wanted(log, costs, most=None, slower=1.0, modes=["full"]) == bound | full > bound
    fewer = wanted(log, costs, most=20, slower=1e9)
    assert len(fewer & bound) == len(fewer - bound) == 20
    costs = attrs.evolve(costs, host_eager=analytic_costs().host_eager)
    mixed = wanted(log, costs, most=len(log.entries), slower=1e9)
    assert mixed == set(range(len(log.entries)))
    assert host_bound(log.entries, costs)[0] in wanted(log, costs, most=1, slower=1e9)


def test_what_stays_of_a_stretch_are_its_first_steps() -> None:
    """Alike shares of each, so that few steps run for being before others."""
    places = [("a", i) for i in range(100)] + [("b", i) for i in range(10)]
    assert shortened(places, 55) == [("a", i) for i in range(100) if i % 50 < 25] + [("b", i) for i in range(5)]
    assert shortened(places, 110) == places
    assert shortened(places[::7], 3) == [("a", 0), ("a", 56), ("b", 5)]
    assert shortened([], 0) == shortened(places, 0) == []


def test_every_step_of_a_mode_whatever_its_form(tmp_path: Path) -> None:
    """The host bounds none of these."""
    log: Log[StepEntry] = again(tmp_path, "split:form=decodes_beside").log
    costs = attrs.evolve(
        analytic_costs(), host_full=HostCost(1.0), host_eager=HostCost(1.0), host_piecewise=HostCost(1.0)
    )
    split = {i for i, each in enumerate(log.entries) if each.mode == "split/decodes_beside"}
    assert split
    assert wanted(log, costs, most=None, slower=1.0) == set()
    assert wanted(log, costs, most=None, slower=1.0, modes=["split"]) == split


FULL_S, EAGER_S, SCHEDULED_S = 0.008, 0.07, 3.2
"""Seconds of a step of either mode, and of a pass what isn't steps"""


def uneven(tmp_path: Path, *, beside: int = 0) -> Again:
    """400 FULL steps of 8 ms and 100 EAGER ones of 70 ms, all to be measured; FULL ones more that aren't."""
    made = again(tmp_path, "vllm")
    full, eager = (next(each for each in made.log.entries if each.mode == mode) for mode in ("full", "eager"))
    entries = [*100 * [full, full, eager, full, full], *beside * [full]]
    entries = [attrs.evolve(entry, step=i) for i, entry in enumerate(entries)]
    steps = set(range(500))
    return attrs.evolve(made, log=attrs.evolve(made.log, entries=tuple(entries)), steps=steps, runs={*steps})


def first_pass(made: Again) -> Took:
    steps = {i: EAGER_S if made.log.entries[i].mode == "eager" else FULL_S for i in made.runs}
    return Took(SCHEDULED_S + sum(steps.values()), steps)


def measured(made: Again, mode: str) -> list[int]:
    return [i for i in sorted(made.steps) if made.log.entries[i].mode == mode]


def test_nothing_is_left_out_where_three_passes_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor where one pass is all that was asked for, whatever is left then."""
    made = uneven(tmp_path)
    first = {("vllm", True): first_pass(made)}
    assert first["vllm", True].seconds == pytest.approx(13.4)
    leave_out({"vllm": made}, first, SPARE * 2 * 13.4 + 0.1, 2)
    leave_out({"vllm": made}, first, -3.0, 0)
    assert made.steps == made.runs == set(range(500))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("asked", [[], ["eager"]], ids=["none", "eager"])
@pytest.mark.parametrize("left_s", [28.0, 24.0, 18.7, 12.0])
def test_passes_of_the_steps_that_are_kept_end_in_time(tmp_path: Path, left_s: float, asked: list[str]) -> None:
    """Modes differ by ten times, and of the time for scheduling a pass of fewer steps takes all."""
    made = uneven(tmp_path)
    leave_out({"vllm": made}, {("vllm", True): first_pass(made)}, left_s, 2, asked)
    assert made.steps == made.runs, "what runs for being before another counts too"
    assert 0.98 * left_s < SPARE * 2 * first_pass(made).seconds < left_s + 1e-6


def test_time_is_taken_from_what_is_needed_least(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fifth of the mode that wasn't asked for, and what it takes of the other."""
    made = uneven(tmp_path)
    leave_out({"vllm": made}, {("vllm", True): first_pass(made)}, 26.0, 2, ["eager"])
    full, eager = measured(made, "full"), measured(made, "eager")
    kept = {i for n, i in enumerate(each for each in range(500) if each % 5 != 2) if n % 40 < 32}
    assert {i + 1 for i in {*full} - kept} <= {*kept, *eager}, "those before others run anyway"
    assert kept <= {*full}
    assert 80 < len(eager) < 100
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "26 s left, and 2 more of each pass over all steps may take 29 s: fewer steps run on, so that these run 3 times"
    )
    assert [line.partition(": ")[2] for line in lines[1:]] == [
        f"{len(full)} of 400 steps stay, {len(full) / 400:.0%} of the run's 400",
        f"{len(eager)} of 100 steps stay, {len(eager)}% of the run's 100",
    ]


@pytest.mark.parametrize("asked", [["eager"], []], ids=["eager asked for", "none"])
def test_a_cell_that_is_given_up_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str]) -> None:
    """FULL, though EAGER's steps take longer: these run for being before FULL ones, and would free no time."""
    made = uneven(tmp_path)
    leave_out({"vllm": made}, {("vllm", True): first_pass(made)}, 21.0, 2, asked)
    full = len(measured(made, "full"))
    assert 0 < full < 320
    assert len(measured(made, "eager")) == 80
    given_up, other = (line.strip() for line in capsys.readouterr().out.splitlines()[1:])
    assert given_up.startswith("full, ")
    told = f": {full} of 400 steps stay, {full / 400:.0%} of the run's 400"
    assert given_up.endswith(f"{told}, under four fifths: its repeats decide nothing")
    assert other.endswith(": 80 of 100 steps stay, 80% of the run's 100")


def test_steps_that_decide_nothing_go_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 501 FULL steps 400 run again, under four fifths: EAGER's need all of the time, though not asked for."""
    made = uneven(tmp_path, beside=101)
    leave_out({"vllm": made}, {("vllm", True): first_pass(made)}, 26.0, 2)
    count = len(measured(made, "full"))
    assert 0 < count < 320
    assert len(measured(made, "eager")) == 100
    (line,) = capsys.readouterr().out.splitlines()[1:]
    told = f"{count} of 400 steps stay, {count / 501:.0%} of the run's 501"
    assert line.endswith(f"{told}, under four fifths: its repeats decide nothing")


def test_of_several_policies_a_cell_is_one(tmp_path: Path) -> None:
    """As the rule counts: each gives its share; one whose steps are all left out runs none."""
    runs = {"a": uneven(tmp_path), "b": uneven(tmp_path)}
    first = {(policy, quick): first_pass(made) for policy, made in runs.items() for quick in (True, False)}
    leave_out(runs, first, SPARE * 4 * 2 * 12.0, 2, ["eager"])
    assert runs["a"].runs == runs["b"].runs
    assert 320 <= len(measured(runs["a"], "full")) < 340
    leave_out(runs, first, SPARE * 2 * 2 * (SCHEDULED_S + FULL_S + EAGER_S + 0.001), 2, ["eager"])
    assert (runs["a"].runs, len(measured(runs["b"], "eager"))) == (set(), 1)


@pytest.mark.parametrize("left_s", [-3.0, 0.0, 6.0])
def test_no_promise_is_made_where_none_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left_s: float
) -> None:
    """Scheduling alone takes longer than what is left; passes of all steps begin where they end in time."""
    made = uneven(tmp_path)
    leave_out({"vllm": made}, {("vllm", True): first_pass(made)}, left_s, 2)
    assert made.steps == made.runs == set(range(500))
    assert capsys.readouterr().out == (
        f"{max(left_s, 0):.0f} s left, and 2 more of each pass over all steps may take 29 s: "
        "no steps would run 3 times, however few\n"
    )


@pytest.mark.parametrize("passes", [["--passes", "2"], ["--passes", "1", "--turns"]], ids=["here", "in turns"])
def test_from_a_runs_files_to_its_repeats(tmp_path: Path, passes: list[str]) -> None:
    """A model on this machine's CPU: the steps that the host bounds, in as many passes as are asked for."""
    config, trace = tmp_path / "config.json", tmp_path / "t.csv"
    config.write_text(json.dumps(CONFIG))
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:00:{i // 10:02}.{i % 10}000000,{20 + i},{4 + i % 3}\n" for i in range(12))
    )
    asked = ["--policy", "eager", "--policy", "piecewise", "--no-verify", "--rate", "1", "--trace", str(trace)]
    files = ["--save-profile", str(tmp_path / "p.json"), "--step-log", str(tmp_path / "s.jsonl")]
    limits = ["--max-num-reqs", "4", "--max-num-tokens", "32", "--kv-tokens", "512"]
    command = [sys.executable, "-m", "kpolicy", "run", "--device", "cpu", "--model", str(config), "--json"]
    ran = subprocess.run([*command, *limits, *asked, *files], capture_output=True, text=True, check=True)
    (tmp_path / "r.json").write_text(ran.stdout)
    # By a table whose host bounds eager steps alone.
    profile = read_profile(tmp_path / "p.json")
    costs = attrs.evolve(profile.costs, host_eager=HostCost(1e8), host_work_us=20.0)
    write_profile(tmp_path / "p.json", attrs.evolve(profile, costs=costs))
    given = ["--device", "cpu", "--config", str(config), "--profile", str(tmp_path / "p.json"), "--trace", str(trace)]
    logs = [f"--log={tmp_path}/s-{policy}.jsonl" for policy in ("eager", "piecewise")]
    out = ["--run", str(tmp_path / "r.json"), "--out", str(tmp_path / "a.jsonl"), *passes]
    before = os.sched_getaffinity(0)
    try:
        assert main([*given, *logs, *out]) == 0
    finally:
        os.sched_setaffinity(0, before)
    eager, run = read_step_log(tmp_path / "a.jsonl"), read_step_log(tmp_path / "s-eager.jsonl")
    assert [each.step for each in eager.entries] == 2 * list(range(len(run.entries)))
    assert all(each.host_work_us and each.cycle_us for each in eager.entries)
    assert not eager.cut_short
