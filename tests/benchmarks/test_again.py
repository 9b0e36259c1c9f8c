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
    leave_out,
    main,
    most_in_time,
    sizes_of,
    thinned,
    wanted,
    with_those_before,
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


def test_where_three_passes_would_not_end_fewer_steps_have_them(tmp_path: Path) -> None:
    """Of the mode that has most, evenly over the run; one of few steps keeps them all, and passes stay far apart."""
    made = again(tmp_path, "vllm")
    eager = [i for i, each in enumerate(made.log.entries) if each.mode == "eager"]
    full = [i for i, each in enumerate(made.log.entries) if each.mode == "full"][20:24]
    made = attrs.evolve(made, steps={*eager, *full}, runs=with_those_before({*eager, *full}))
    pass_s = float(len(made.runs))
    assert most_in_time({"vllm": made}, {"vllm": pass_s}, 2 * pass_s, 2) is None
    longest = {("vllm", True): pass_s, ("other", True): 9.0}
    leave_out({"vllm": made}, longest, SPARE * 2 * pass_s, 2)
    assert len(made.runs) == pass_s, "all run on"
    leave_out({"vllm": made}, longest, SPARE * pass_s, 2)
    kept = [i for i in eager if i in made.steps]
    assert made.steps == {*kept, *full}
    assert kept == thinned(eager, len(kept))
    assert len(kept) > len(full)
    assert made.runs == with_those_before(made.steps)
    # Two passes of what is left end in time, and one step more of the mode wouldn't.
    assert longest == {("vllm", True): pytest.approx(len(made.runs)), ("other", True): 9.0}
    assert 2 * len(made.runs) <= pass_s < 2 * len(with_those_before({*thinned(eager, len(kept) + 1), *full}))
    leave_out({"vllm": made}, longest, 0.0, 2)
    assert len(made.steps) == 2, "one of each mode, of which no pass begins that wouldn't end"


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
