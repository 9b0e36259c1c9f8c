"""`kpolicy run`: what it serves, prints, logs and counts."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy.costs import analytic_costs
from kpolicy.schemas import Profile, read_step_log, write_profile
from tests.cli.conftest import Command, write

# `kpolicy.cli.run` is the command; this is its module.
run_module: Any = import_module("kpolicy.cli.run")

ROOT = Path(__file__).parents[2]
TRACES = Path(os.environ.get("KPOLICY_TRACES") or ROOT.parent / "shared" / "traces")
SMALL = ("--kv-tokens", 2000, "--max-num-reqs", 8, "--max-num-tokens", 64)


def steps_of(result: dict[str, Any]) -> int:
    return sum(mode["steps"] for mode in result["modes"].values())


def test_json_adds_up(kpolicy: Command, trace: Path) -> None:
    """Every request is served by the two default policies, and sums by mode and reason agree with the totals."""
    ended = kpolicy("run", "--trace", trace, "--json")
    assert (ended.code, ended.err) == (0, "")
    report = ended.json
    assert report["trace"] | {"source": ""} == {
        "source": "", "format": "mooncake", "requests": 40, "span_s": pytest.approx(3.9), "dropped": {}
    }  # fmt: skip
    assert [result["policy"] for result in report["policies"]] == ["auto", "vllm"]
    for result in report["policies"]:
        assert (result["served"], result["checked"], result["wrong"], result["refused"]) == (40, 40, [], {})
        assert result["steps"] == steps_of(result) == sum(result["reasons"].values())
        assert result["tokens"] == sum(1 + 5 * i % 12 for i in range(40))
        assert result["padding"] == sum(mode["padding"] for mode in result["modes"].values())
        assert result["step_us"] == pytest.approx(sum(mode["us"] for mode in result["modes"].values()))
        assert result["graphs"] - result["graphs_used"] == len(result["unused"])
        assert result["interrupted"] == ""


def test_steps_outside_the_profile_are_told(kpolicy: Command, tmp_path: Path) -> None:
    """On a simulated device, as `kpolicy simulate` tells them; a step log beside it has all steps."""
    path = write(tmp_path / "t.csv", "timestamp,input_length,output_length", "0,30000,3", "9000,400,3")
    given = ("run", "--device", "simulated", "--trace", path, "--policy", "vllm", "--no-verify")
    profile = ("--profile", "qwen2.5-0.5b-h200")
    ended = kpolicy(*given, *profile, "--step-log", tmp_path / "steps.jsonl")
    assert ended.code == 0, ended.err
    # Of 15 chunks of 2,048 at most the first three end at 6,144; then two decodes behind 30,000 tokens.
    assert "14 steps (70.0%) of a context outside the cost table" in ended.out
    assert "of a size outside" not in ended.out
    assert len(read_step_log(tmp_path / "steps.jsonl").entries) == 20
    (one,) = kpolicy(*given, *profile, "--json").json["policies"]
    (simulated,) = kpolicy("simulate", path, "--policy", "vllm", "--warm", *profile, "--json").json["traces"]
    names = ("steps", "outside", "outside_sizes", "outside_contexts")
    assert [one[name] for name in names] == [20, 14, 0, 14]
    assert [simulated["policies"][0][name] for name in names] == [20, 14, 0, 14]


def test_steps_outside_analytic_costs_are_of_a_size(kpolicy: Command, tmp_path: Path) -> None:
    """They have no limits of context, and a measured table that doesn't record its own says so."""
    path = write(tmp_path / "t.csv", "timestamp,input_length,output_length", "0,30000,3")
    given = ("run", "--device", "simulated", "--trace", path, "--policy", "eager", "--no-verify")
    ended = kpolicy(*given, "--max-num-tokens", 32768)
    assert "1 step (33.3%) of a size outside the cost table" in ended.out
    assert "contexts" not in ended.out
    (one,) = kpolicy(*given, "--max-num-tokens", 32768, "--json").json["policies"]
    assert (one["outside"], one["outside_sizes"], one["outside_contexts"]) == (1, 1, 0)
    blind = tmp_path / "blind.json"
    write_profile(
        blind, Profile(costs=attrs.evolve(analytic_costs(), measured=True), device="a device", model="a model")
    )
    assert "contexts: not recorded" in kpolicy(*given, "--profile", blind).out
    (one,) = kpolicy(*given, "--profile", blind, "--json").json["policies"]
    assert (one["outside_sizes"], one["outside_contexts"]) == (0, None)


def test_text_shows_what_json_says(kpolicy: Command, trace: Path) -> None:
    """The tables hold each policy's steps, each mode, each reason with its count, and where the trace is from."""
    text = kpolicy("run", "--trace", trace).out
    report = kpolicy("run", "--trace", trace, "--json").json
    assert str(trace) in text
    assert "40 requests" in text
    for result in report["policies"]:
        assert re.search(rf"^{result['policy']} +{result['served']} +{result['steps']:,} ", text, re.M)
        for mode, stats in result["modes"].items():
            assert re.search(rf" {mode} +{stats['steps']:,} +{stats['tokens']:,} +{stats['padding']:,} ", text)
        for reason, count in result["reasons"].items():
            assert re.search(rf" {reason} +{count:,} ", text)
        graphs = f"{result['graphs']} graphs captured"
        assert re.search(rf"{result['policy']}: .*{graphs}.* {result['graphs_used']} used", text)


def test_equal_commands_print_equal_json(kpolicy: Command, trace: Path) -> None:
    """The same seed gives the same bytes, apart from this process's time; another seed is another run."""

    def once(seed: int) -> str:
        out = kpolicy("run", "--trace", trace, "--seed", seed, "--json").out
        return re.sub(r'"wall_s": [0-9.e-]+', '"wall_s": 0', out)

    assert once(3) == once(3)
    assert once(3) != once(4)


def test_without_a_trace_requests_are_generated(
    kpolicy: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no trace file is found the embedded generator is used, and the output says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KPOLICY_TRACES", raising=False)
    report = kpolicy("run", "--window", 3, "--policy", "auto", "--json").json
    assert report["trace"]["format"] == "generated"
    assert "no trace file found" in report["trace"]["source"]
    assert report["policies"][0]["served"] == report["trace"]["requests"] > 0
    assert "no trace file found" in kpolicy("run", "--window", 3, "--policy", "auto").out


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs ../shared/traces or $KPOLICY_TRACES")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("azure_llm_2023_conv.csv", ("--window", 10)),
        ("azure_llm_2023_code.csv", ("--window", 60, "--start", 200)),
        ("mooncake_conversation.csv.gz", ("--window", 4)),
        ("burstgpt_1_first400.csv", ("--window", 20000, "--rate", 300)),
    ],
)
def test_published_traces_run_as_they_are(kpolicy: Command, name: str, options: tuple[object, ...]) -> None:
    """Each published file is served rightly: what isn't served was handed back, for want of KV."""
    if not (TRACES / name).is_file():
        pytest.skip(f"needs {name}")
    report = kpolicy("run", "--trace", TRACES / name, "--json", "--policy", "auto", *options).json
    (result,) = report["policies"]
    assert report["trace"]["requests"] == result["served"] + result["refused"].get("over_kv_capacity", 0) > 0
    assert result["wrong"] == []


def test_the_folder_of_the_environment_is_used(
    kpolicy: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """$KPOLICY_TRACES names a folder with the default file; the output says that it was taken from there."""
    row = "2023-11-16 18:15:{:02}.5000000,{},{}"
    lines = [row.format(i, 20 + i, 3) for i in range(10)]
    write(tmp_path / "azure_llm_2023_conv.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *lines)
    monkeypatch.setenv("KPOLICY_TRACES", str(tmp_path))
    report = kpolicy("run", "--json").json
    assert report["trace"]["requests"] == 10
    assert "by $KPOLICY_TRACES" in report["trace"]["source"]


def test_mooncake_json_lines_gzipped(kpolicy: Command, tmp_path: Path) -> None:
    """The publishers' JSON lines are read, gzipped too."""
    lines = [
        json.dumps({"timestamp": 50 * i, "input_length": 600, "output_length": 2, "hash_ids": [0, i]}) for i in range(6)
    ]
    path = tmp_path / "toy.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    report = kpolicy("run", "--trace", path, "--json").json
    assert report["trace"]["format"] == "mooncake-jsonl"
    assert [result["served"] for result in report["policies"]] == [6, 6]


def test_rows_dropped_are_counted(kpolicy: Command, tmp_path: Path) -> None:
    """Zero-token rows of a trace are dropped and counted by reason, in text and JSON."""
    path = write(tmp_path / "t.csv", "timestamp,input_length,output_length", "0,0,5", "1,9,0", "2,9,5")
    assert kpolicy("run", "--trace", path, "--json").json["trace"]["dropped"] == {
        "zero_prompt_tokens": 1, "zero_output_tokens": 1
    }  # fmt: skip
    assert "rows dropped: 1 zero_prompt_tokens, 1 zero_output_tokens" in kpolicy("run", "--trace", path).out


def test_how_much_a_cpu_serves_is_said_as_it_is(kpolicy: Command) -> None:
    """The help has the number that the command takes, written once."""
    most = import_module("kpolicy.cli.run_model").CPU_SIZE.most_tokens
    assert most is run_module.MODEL_CPU_TOKENS
    assert f"no more than its first {most:,} tokens." in re.sub(r"[\s│]+", " ", kpolicy("run", "--help").out)


def test_windows_and_rates(kpolicy: Command, trace: Path) -> None:
    """--start and --window cut the trace, --window 0 takes all of it, --rate squeezes it."""

    def traced(*options: object) -> dict[str, Any]:
        return kpolicy("run", "--trace", trace, "--policy", "eager", "--json", *options).json["trace"]

    assert traced("--start", 1, "--window", 1)["requests"] == 10
    assert traced("--start", 1, "--window", 0)["requests"] == 30
    assert traced("--window", 0)["requests"] == 40
    assert traced("--window", 0, "--rate", 2)["span_s"] == pytest.approx(1.95)


def test_preemption_and_prompts_over_the_kv_capacity(kpolicy: Command, trace: Path) -> None:
    """With little KV requests are preempted and still served rightly, and those that can't fit are handed back."""
    options = ("--trace", trace, "--rate", 50, "--policy", "auto", "--kv-tokens", 200)
    (result,) = kpolicy("run", *options, "--json").json["policies"]
    assert result["preemptions"] > 0
    assert result["refused"]["over_kv_capacity"] == 40 - result["served"] > 0
    assert result["wrong"] == []
    ended = kpolicy("run", *options)
    assert ended.code == 0
    assert f"{result['preemptions']} preemptions" in ended.out
    assert f"handed back: {result['refused']['over_kv_capacity']} over_kv_capacity" in ended.out


def test_a_budget_is_filled_largest_first(kpolicy: Command, trace: Path) -> None:
    """Graphs over --budget-graphs are counted, not captured; a given ladder that is above it is refused."""
    options = ("run", "--trace", trace, "--policy", "full_and_piecewise", "--budget-graphs", 5)
    report = kpolicy(*options, "--json").json
    (result,) = report["policies"]
    assert report["setting"]["budget"] == {"graphs": 5}
    assert 0 < result["graphs"] <= 5
    assert result["not_captured"].keys() == {"budget_graphs"}
    assert result["wrong"] == []
    ended = kpolicy(*options, "--ladder", "1,2,4,8,16")
    assert ended.code == 2
    assert "over the budget of 5 graphs" in ended.err


# Faults


@pytest.mark.parametrize(
    ("fault", "reason", "count"),
    [
        ("capture_fails@2x3", "capture_failed", 3),
        ("capture_out_of_memory@1", "capture_out_of_memory", 1),
        ("capture_out_of_streams@4x2", "capture_out_of_streams", 2),
        ("replay_fails@5x2", "replay_failed", 2),
    ],
)
def test_faults_that_cost_a_graph(kpolicy: Command, trace: Path, fault: str, reason: str, count: int) -> None:
    """A failed capture or replay costs a graph, which is counted, and no request."""
    ended = kpolicy("run", "--trace", trace, "--fault", fault, "--json")
    assert ended.code == 0
    assert ended.json["setting"]["faults"] == [fault]
    for result in ended.json["policies"]:
        assert result["not_captured"] == {reason: count}
        assert result["replay_failures"] == (count if reason == "replay_failed" else 0)
        assert (result["served"], result["wrong"]) == (40, [])
    text = kpolicy("run", "--trace", trace, "--policy", "auto", "--fault", fault).out
    assert f"not captured: {count} {reason}" in text


def test_a_late_step_takes_longer(kpolicy: Command, trace: Path) -> None:
    """Requests wait for a late step, and nothing else comes of it."""
    plain, late = (
        kpolicy("run", "--trace", trace, "--policy", "eager", "--json", *fault).json["policies"][0]
        for fault in ((), ("--fault", "late@9"))
    )
    assert late["ttft_us"][1] > plain["ttft_us"][1] * 5
    assert (late["served"], late["wrong"]) == (40, [])


def test_a_lost_device_hands_requests_back(kpolicy: Command, trace: Path) -> None:
    """A sticky error ends that policy's run with exit code 1; served and handed back are all requests."""
    ended = kpolicy("run", "--trace", trace, "--fault", "sticky@40", "--json")
    assert ended.code == 1
    assert len(ended.json["policies"]) == 2
    for result in ended.json["policies"]:
        assert result["served"] + result["refused"]["device_lost"] == 40
        assert "lost" in result["interrupted"]
        assert result["wrong"] == []
    text = kpolicy("run", "--trace", trace, "--fault", "sticky@40")
    assert text.code == 1
    assert "device_lost" in text.out
    assert "ended early" in text.out


def test_several_faults(kpolicy: Command, trace: Path) -> None:
    """--fault can be repeated."""
    faults = ("--fault", "capture_fails@1", "--fault", "replay_fails@2")
    (result,) = kpolicy("run", "--trace", trace, "--policy", "auto", "--json", *faults).json["policies"]
    assert result["not_captured"] == {"capture_failed": 1, "replay_failed": 1}


def test_wrong_tokens_are_an_error(kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that differ from the reference exit with 1 and are said in text, JSON and on standard error."""
    check = run_module.reference_check
    monkeypatch.setattr(run_module, "reference_check", lambda prompts, seed: check(prompts, seed + 1))
    ended = kpolicy("run", "--trace", trace, "--json", "--policy", "auto")
    assert ended.code == 1
    assert len(ended.json["policies"][0]["wrong"]) == 40
    assert "outputs differ from the reference" in ended.err
    assert "40 of 40 requests got WRONG tokens" in kpolicy("run", "--trace", trace, "--policy", "auto").out
    assert kpolicy("run", "--trace", trace, "--policy", "auto", "--no-verify").code == 0


# Interrupts


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C while the executor runs its n-th step, over all policies."""

    class Interrupted(run_module.SimulatedExecutor):
        ran = 0

        def run(self, *arguments: Any) -> Any:
            Interrupted.ran += 1
            if Interrupted.ran == step:
                raise KeyboardInterrupt
            return super().run(*arguments)

    monkeypatch.setattr(run_module, "SimulatedExecutor", Interrupted)


def test_an_interrupt_prints_what_there_is(kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a step ends the run with the numbers up to there, no further policy, and exit code 130."""
    interrupt_at(monkeypatch, 30)
    ended = kpolicy("run", "--trace", trace, "--json")
    assert ended.code == 130
    (result,) = ended.json["policies"]
    assert (result["policy"], result["steps"]) == ("auto", 29)
    assert "interrupted from the keyboard" in result["interrupted"]
    assert ended.err == "kpolicy: interrupted; what was done is above.\n"


def test_an_interrupt_in_the_second_policy_keeps_the_first(
    kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was served before the interrupt is printed whole."""
    (whole,) = kpolicy("run", "--trace", trace, "--policy", "eager", "--json").json["policies"]
    interrupt_at(monkeypatch, whole["steps"] + 5)
    ended = kpolicy("run", "--trace", trace, "--policy", "eager", "--policy", "auto", "--json")
    first, second = ended.json["policies"]
    assert ended.code == 130
    assert (first["served"], first["interrupted"]) == (40, "")
    assert second["steps"] == 4


def test_an_interrupt_outside_of_steps(kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the second policy's outputs are compared keeps the first policy's numbers; in reading, none."""
    calls: list[None] = []

    def check(_request: object) -> bool:
        calls.append(None)
        if len(calls) == 45:
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(run_module, "reference_check", lambda *_: check)
    ended = kpolicy("run", "--trace", trace, "--json")
    assert ended.code == 130
    assert [result["policy"] for result in ended.json["policies"]] == ["auto", "vllm"]
    assert [bool(result["interrupted"]) for result in ended.json["policies"]] == [False, True]

    def interrupted(_path: Path, **_rest: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("kpolicy.cli.requests"), "read_trace", interrupted)
    assert kpolicy("run", "--trace", trace) == (130, "", "kpolicy: interrupted.\n")


def test_a_signal_ends_a_real_process(tmp_path: Path) -> None:
    """SIGINT to a running process ends it with 130, and it prints its table."""
    rows = [f"{10 * i},400,400" for i in range(2000)]
    path = write(tmp_path / "long.csv", "timestamp,input_length,output_length", *rows)
    log = tmp_path / "steps.jsonl"
    # The whole trace: its first seconds alone may be over before the signal comes.
    arguments = ["run", "--device", "simulated", "--trace", path, "--window", "0", "--policy", "eager"]
    arguments += ["--step-log", log]
    # Shells ignore it for what they run in the background, and so do its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kpolicy", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        deadline = time.monotonic() + 20
        while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "interrupted from the keyboard" in out
    assert "Traceback" not in err


# Step logs


def test_one_policys_step_log(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """The log has the header's facts and an entry a step, whose modes and reasons count as the report does."""
    path = tmp_path / "steps.jsonl"
    options = ("--trace", trace, "--policy", "auto", "--step-log", path, "--json")
    (result,) = kpolicy("run", *options).json["policies"]
    log = read_step_log(path)
    assert not log.cut_short
    assert log.header.policy == "auto"
    assert log.header.command == f"kpolicy run --device simulated {' '.join(map(str, options))}"
    assert [entry.step for entry in log.entries] == list(range(result["steps"]))
    for mode, stats in result["modes"].items():
        entries = [entry for entry in log.entries if entry.mode == mode]
        assert len(entries) == stats["steps"]
        assert sum(entry.cycle_us or 0 for entry in entries) == pytest.approx(stats["us"])
        assert sum(launch.padding for entry in entries for launch in entry.launches) == stats["padding"]
    for reason, count in result["reasons"].items():
        assert sum(entry.reason == reason for entry in log.entries) == count
    assert all(entry.queue and entry.queue.kv_tokens_used for entry in log.entries[:-1])


def test_several_policies_write_a_log_each(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """With several policies each has its file, named after it, whole and as long as its steps."""
    specs = ["auto", "vllm:runner=v2,version=0.33", "split:form=beside"]
    policies = [word for spec in specs for word in ("--policy", spec)]
    log = tmp_path / "steps.jsonl"
    report = kpolicy("run", "--trace", trace, *policies, "--step-log", log, "--json").json
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "steps-auto.jsonl", "steps-split-form-beside.jsonl", "steps-vllm-runner-v2-version-0.33.jsonl"
    ]  # fmt: skip
    for result in report["policies"]:
        name = re.sub("[:=,]", "-", result["policy"])
        entries = read_step_log(tmp_path / f"steps-{name}.jsonl").entries
        assert len(entries) == result["steps"]


def test_an_interrupted_runs_log_reads(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt the log has the steps that ran."""
    interrupt_at(monkeypatch, 12)
    kpolicy("run", "--trace", trace, "--policy", "auto", "--step-log", tmp_path / "s.jsonl")
    assert len(read_step_log(tmp_path / "s.jsonl").entries) == 11


# What it looks like


@pytest.mark.parametrize("width", [40, 80, 120])
def test_numbers_stay_whole_at_any_width(
    kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Long policy names fold; numbers, modes and reasons never do, and no line of a table is over the width."""
    options = ("--trace", trace, "--policy", "vllm:runner=v2,version=0.33,mode=FULL_AND_PIECEWISE", *SMALL)
    (result,) = kpolicy("run", *options, "--json").json["policies"]
    monkeypatch.setenv("COLUMNS", str(width))
    text = kpolicy("run", *options).out
    assert "…" not in text
    for mode, stats in result["modes"].items():
        assert re.search(rf" {mode} +{stats['steps']:,} +{stats['tokens']:,} +{stats['padding']:,} ", text)
    for reason, count in result["reasons"].items():
        assert re.search(rf" {reason} +{count:,} ", text)
    tables = text.split("\n\n")[1:4]
    assert max(len(line) for table in tables for line in table.splitlines()) <= max(width, 80)
    assert not re.search(" $", text, re.M)


def test_a_mere_folder_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python would take for a package, empty, isn't what serving a model needs."""
    (tmp_path / "safetensors").mkdir()
    monkeypatch.delitem(sys.modules, "safetensors", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "safetensors" in run_module.missing_libraries()
