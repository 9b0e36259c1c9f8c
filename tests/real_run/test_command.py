"""`kpolicy run` with a model and `kpolicy generate`, end to end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kpolicy.attention import Claims  # noqa: E402
from kpolicy.cli import main  # noqa: E402
from kpolicy.costs import analytic_costs  # noqa: E402
from kpolicy.executors.cpu.graph import Graph  # noqa: E402
from kpolicy.ladders import CaptureSizes  # noqa: E402
from kpolicy.schemas import (  # noqa: E402
    LadderPlan,
    Profile,
    read_profile,
    read_step_log,
    write_plan,
    write_profile,
)
from kpolicy.settings import Settings  # noqa: E402
from tests.cli.conftest import Command, Ended, write  # noqa: E402
from tests.real_run.helpers import TINY  # noqa: E402

SMALL = ("--max-num-reqs", 4, "--max-num-tokens", 16, "--kv-tokens", 512, "--ladder", "1,2,4,8,16")
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


@pytest.fixture
def kpolicy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Command:
    """The command, with little time for measuring and no other number of threads."""
    for variable in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "KPOLICY_LOG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_model = import_module("kpolicy.cli.run_model")
    monkeypatch.setattr(run_model, "CPU_SIZE", attrs.evolve(run_model.CPU_SIZE, calibration_s=0.3))

    def run(*arguments: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Twelve requests, one of them over the model's positions."""
    rows = [f"{100 * i},{1 + 7 * i % 23},{1 + 5 * i % 9}" for i in range(11)]
    return write(tmp_path / "trace.csv", "timestamp,input_length,output_length", *rows, "1200,400,9")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model with a tokenizer of eight words."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{name: value for name, value in TINY.items() if name != "model_type"})
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {word: i for i, word in enumerate((*WORDS, "[UNK]", *(f"w{i}" for i in range(88))))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)  # noqa: S106
    return folder


@pytest.mark.parametrize(("told", "waited"), [((1.0, 101.0), 100.0), ((1.0, 1.0), 0.0), ((None, None), None)])
def test_waiting_for_cores_is_told(
    kpolicy: Command, config: Path, requests: Path, monkeypatch: pytest.MonkeyPatch, told: Any, waited: float | None
) -> None:
    """Times of a policy whose threads waited for a core are marked; where nobody knows, nothing is said."""
    for as_json in (True, False):
        answers = iter(told)
        monkeypatch.setattr(import_module("kpolicy.serving.real_run"), "waited_s", lambda each=answers: next(each))
        given = ("--model", config, "--trace", requests, "--policy", "eager", "--no-verify", *SMALL)
        ended = kpolicy("run", *given, *(("--json",) if as_json else ()))
        assert ended.code == 0, ended
        if as_json:
            assert ended.json["policies"][0]["core_wait_s"] == waited
        else:
            assert ("its threads waited 100.0 s for a core" in ended.out) == bool(waited)


def test_a_run_in_json(kpolicy: Command, config: Path, requests: Path) -> None:
    """Both default policies serve all that fits; modes, checks and the setting are in the JSON."""
    ended = kpolicy("run", "--model", config, "--trace", requests, "--json", *SMALL)
    assert (ended.code, ended.err) == (0, "")
    report = ended.json
    setting = report["setting"]
    assert report["trace"]["dropped"] == {"over_max_tokens": 1}
    assert (setting["executor"], setting["utilisation"]) == ("cpu", 0.7)
    assert setting["rate"] > 0
    assert setting["costs"].startswith("measured ")
    assert [result["policy"] for result in report["policies"]] == ["auto", "vllm"]
    for result in report["policies"]:
        assert (result["served"], result["refused"], result["interrupted"]) == (11, {}, "")
        assert result["graphs"] > 0
        assert result["graph_bytes"] > 0
        assert result["outside_us"] > 0
        assert result["verified"].keys() == result["modes"].keys()
        for mode, checks in result["verified"].items():
            assert checks == {"checks": min(50, result["modes"][mode]["steps"]), "failures": 0}


def test_a_paced_run_says_so(kpolicy: Command, config: Path, requests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JSON and in words; what serves has it."""
    real_run, paces = import_module("kpolicy.serving.real_run"), []
    serve = real_run.serve_model

    def noted(trace: Any, engine: Any, serving: Any, *rest: Any, **more: Any) -> Any:
        paces.append(serving.pace)
        return serve(trace, engine, serving, *rest, **more)

    monkeypatch.setattr(real_run, "serve_model", noted)
    given = ("run", "--model", config, "--trace", requests, "--policy", "auto", "--objective", "1:1", *SMALL)
    ended = kpolicy(*given, "--pace", "vllm", "--json")
    assert (ended.code, ended.json["setting"]["pace"], ended.json["policies"][0]["served"]) == (0, "vllm", 11)
    told = kpolicy(*given, "--pace", "vllm").out
    assert "16 tokens a step, fewer beside decodes as --pace vllm allows" in told
    assert "when requests never run out and steps are filled" in told
    assert paces == ["vllm", "vllm"]
    ended = kpolicy(*given, "--json")
    assert (ended.json["setting"]["pace"], paces[2:]) == (None, [None])


@pytest.mark.parametrize("faults", [(), ("--fault", "replay_fails@1")], ids=["plain", "faults"])
def test_what_is_measured_comes_after_a_warm_up(
    kpolicy: Command, config: Path, requests: Path, monkeypatch: pytest.MonkeyPatch, faults: tuple[str, ...]
) -> None:
    """Each policy's executor is warmed up once, with its graphs captured and no step counted; not where faults hit."""
    warmed: list[tuple[bool, int, int]] = []

    def noted(executor: Any, registry: Any, model: Any, settings: Any) -> int:
        assert executor.model is model
        steps = sum(record.hits for record in registry.records())
        warmed.append((bool(registry.captured()), steps, settings.max_num_tokens))
        return 0

    # Calibrating warms up by itself: it must have the function from before.
    import_module("kpolicy.serving.calibrate")
    monkeypatch.setattr("kpolicy.serving.warm_up.warm_up", noted)
    given = ("--policy", "full", "--policy", "vllm", *faults)
    ended = kpolicy("run", "--model", config, "--trace", requests, "--json", *given, *SMALL)
    assert ended.code == 0
    assert warmed == ([] if faults else [(True, 0, 16)] * 2)


def test_a_run_in_text(kpolicy: Command, config: Path, requests: Path) -> None:
    """The table says what was checked, what graphs took, what was outside the executor, and how arrivals are spaced."""
    out = kpolicy("run", "--model", config, "--trace", requests, "--policy", "full_and_piecewise", *SMALL).out
    assert "every bit equal" in out
    assert re.search(r"graphs captured in [0-9.]+ s, [0-9.]+ MiB", out)
    assert re.search(r"outside the executor [0-9,]+ us a step, [0-9.]+% of the time", out)
    assert "70% of what this machine serves" in out
    assert "idle stretches are skipped" in out


def test_a_saved_profile_is_what_the_next_run_decides_by(
    kpolicy: Command, config: Path, requests: Path, tmp_path: Path
) -> None:
    """--save-profile writes what was measured, and how; --profile reads it and measures nothing."""
    file = tmp_path / "measured.json"
    asked = ("run", "--model", config, "--trace", requests, "--policy", "auto", "--json", *SMALL)
    first = kpolicy(*asked, "--save-profile", file)
    assert (first.code, first.err) == (0, "")
    profile = read_profile(file)
    assert profile.costs.measured
    assert profile.costs.version == first.json["setting"]["costs"]
    assert "Qwen3ForCausalLM" in profile.model
    assert profile.versions.keys() >= {"kpolicy", "torch", "transformers"}
    assert profile.command.startswith("kpolicy run --model ")
    again = kpolicy(*asked, "--profile", file, "--rate", 10)
    assert (again.code, again.json["setting"]["costs"]) == (0, profile.costs.version)
    decided = kpolicy("explain", "--decodes", 2, "--profile", file)
    assert decided.code == 0
    assert profile.costs.version in decided.out


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"device": "NVIDIA H200"}, "was measured on NVIDIA H200, and this is "),
        ({"tensor_parallel_size": 8}, "was measured with a tensor_parallel_size of 8, and this is 1. Leave it out"),
        (
            {"model": "LlamaForCausalLM of 8030.3 M parameters, bfloat16"},
            "was measured with LlamaForCausalLM of 8030.3",
        ),
    ],
)
def test_a_profile_of_something_else(
    field: dict[str, str], said: str, kpolicy: Command, config: Path, requests: Path, tmp_path: Path
) -> None:
    """Costs that were measured on another device or with another model don't serve this one."""
    mine, others = tmp_path / "mine.json", tmp_path / "others.json"
    assert kpolicy("calibrate", "--model", config, "--out", mine, "--seconds", 0.1, *SMALL[:-2]).code == 0
    write_profile(others, attrs.evolve(read_profile(mine), **field))
    ended = kpolicy("run", "--model", config, "--trace", requests, "--profile", others, *SMALL)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert "kpolicy calibrate" in ended.err


def test_a_plan_of_something_else_is_told(
    kpolicy: Command, config: Path, requests: Path, tmp_path: Path
) -> None:  # fmt: skip
    """The model that serves or is measured is held to the plan's, whose sizes are taken all the same."""
    path, settings = tmp_path / "plan.json", Settings(max_num_reqs=4, max_num_tokens=16)
    sizes = CaptureSizes((1, 4), (), (8, 16))
    for hidden in (TINY["hidden_size"], 896):
        noted = {"model": {"model_type": TINY["model_type"], "hidden_size": hidden}}
        attention = Claims.at_level("uniform")
        write_plan(path, LadderPlan(sizes=sizes, keys=(), settings=settings, attention=attention, planned_from=noted))
        told = f"hidden_size 896 and not {TINY['hidden_size']}; its sizes are taken" if hidden == 896 else ""
        for command in (
            ("run", "--trace", requests, "--policy", "eager"),
            ("calibrate", "--out", tmp_path / "p.json", "--seconds", 0.1),
        ):
            ended = kpolicy(*command, "--model", config, *SMALL[:-1], path)
            assert ended.code == 0, ended
            assert told in ended.err
            assert ("another model" in ended.err) == bool(told)


def test_a_profile_that_ships_is_for_its_own_device(kpolicy: Command, config: Path, requests: Path) -> None:
    """By its name it is found, and refused here."""
    ended = kpolicy("run", "--model", config, "--trace", requests, "--profile", "qwen2.5-0.5b-h200", *SMALL)
    assert ended.code == 2
    assert "--profile qwen2.5-0.5b-h200 was measured on NVIDIA H200" in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "simulated"), "a simulated device has none"),
        (("--profile", "p.json"), "nothing is measured"),
        (("--save-profile", "no/such/folder/p.json"), "can't be written"),
    ],
)
def test_a_profile_that_cannot_be_saved(
    arguments: tuple[str, ...], said: str, kpolicy: Command, requests: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is an error before anything runs, and leaves no file."""
    monkeypatch.chdir(tmp_path)
    write_profile(tmp_path / "p.json", Profile(costs=analytic_costs(), device="a device", model="a model"))
    saved = () if "--save-profile" in arguments else ("--save-profile", "saved.json")
    ended = kpolicy("run", "--trace", requests, *saved, *arguments)
    assert ended.code == 2
    assert said in ended.err
    assert not (tmp_path / "saved.json").exists()


def test_every_policy_shows_its_captures(
    kpolicy: Command, config: Path, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal there is a bar of captured graphs for each policy, with bytes and seconds."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    ended = kpolicy("run", "--model", config, "--trace", requests, "--policy", "full", "--policy", "vllm", *SMALL)
    assert ended.code == 0
    for policy in ("full", "vllm"):
        assert re.search(rf"capture {policy}: [0-9.]+ MiB, [0-9.]+ s.*?([0-9]+)/\1 graphs", ended.err)


def test_why_there_is_no_graph_is_told(kpolicy: Command, config: Path, requests: Path) -> None:
    """The error of a failed capture stands on standard error, with the key."""
    asked = ("run", "--model", config, "--trace", requests, "--policy", "full", "--no-verify", *SMALL)
    ended = kpolicy(*asked, "--fault", "capture_fails@1")
    assert ended.code == 0
    assert re.search(r"kpolicy: full: FULL .* has no graph: injected fault capture_fails", ended.err)


def test_files_and_metrics(
    kpolicy: Command, config: Path, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step log names device and model, a Perfetto trace is written, metrics and events go to standard error."""
    pytest.importorskip("perfetto")
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("KPOLICY_LOG", "info")
    files = ("--step-log", tmp_path / "s.jsonl", "--perfetto", tmp_path / "r.pftrace", "--metrics-port", 0)
    ended = kpolicy("run", "--model", config, "--trace", requests, "--policy", "auto", "--json", *SMALL, *files)
    assert ended.code == 0
    assert re.search(r"metrics at http://127.0.0.1:\d+/metrics", ended.err)
    log = read_step_log(tmp_path / "s.jsonl")
    assert log.header.device.startswith("cpu: ")
    assert log.header.model.startswith("Qwen3ForCausalLM")
    assert len(log.entries) == ended.json["policies"][0]["steps"]
    assert (tmp_path / "r.pftrace").stat().st_size > 1000
    if "structlog" in sys.modules:
        sys.modules["structlog"].reset_defaults()


def test_repeats_are_served_forwards_and_backwards(
    kpolicy: Command, config: Path, requests: Path, tmp_path: Path
) -> None:
    """Each turn has its own steps, counted from nothing, and its own log; a policy's turns have one set of graphs."""
    options = (*SMALL, "--repeats", 2, "--no-verify", "--step-log", tmp_path / "s.jsonl", "--json")
    report = kpolicy("run", "--model", config, "--trace", requests, *options).json
    served = [(each["policy"], each["repeat"]) for each in report["policies"]]
    assert served == [("auto", 1), ("vllm", 1), ("vllm", 2), ("auto", 2)]
    for each in report["policies"]:
        path = tmp_path / f"s-{each['policy']}{'-2' if each['repeat'] == 2 else ''}.jsonl"
        log = read_step_log(path)
        assert (log.header.policy, len(log.entries)) == (each["policy"], each["steps"])
        assert (each["served"], each["tokens"]) == (11, report["policies"][0]["tokens"])
    first, second = ([each for each in report["policies"] if each["repeat"] == i] for i in (1, 2))
    assert [each["graphs"] for each in first] == [each["graphs"] for each in reversed(second)]
    assert all(each["graphs_captured"] == each["graphs"] and each["capture_s"] > 0 for each in first)
    assert all((each["graphs_captured"], each["capture_s"]) == (0, 0) for each in second)


def test_turns_may_capture_anew(kpolicy: Command, config: Path, requests: Path) -> None:
    """Each has as many graphs as the first and captured them all; with one turn there is nothing to do anew."""
    options = (*SMALL, "--policy", "vllm", "--no-verify", "--recapture", "--json")
    report = kpolicy("run", "--model", config, "--trace", requests, "--repeats", 3, *options).json
    assert report["setting"]["recapture"] is True
    turns = report["policies"]
    assert [each["repeat"] for each in turns] == [1, 2, 3]
    assert len({(each["graphs"], each["graphs_captured"]) for each in turns}) == 1
    assert all(each["graphs_captured"] == each["graphs"] > 0 and each["capture_s"] > 0 for each in turns)
    assert len({each["tokens"] for each in turns}) == 1
    ended = kpolicy("run", "--model", config, "--trace", requests, *options)
    assert ended.code == 2
    assert "--recapture captures graphs anew" in ended.err


def test_graphs_that_a_turn_lost_are_there_for_the_next(kpolicy: Command, config: Path, requests: Path) -> None:
    """Without them it would be another experiment, of which nothing says that it is one."""
    options = (*SMALL, "--repeats", 2, "--no-verify", "--policy", "vllm", "--fault", "replay_fails@4x2", "--json")
    first, second = kpolicy("run", "--model", config, "--trace", requests, *options).json["policies"]
    assert first["not_captured"] == {"replay_failed": first["replay_failures"]}
    assert first["replay_failures"]
    assert second["not_captured"] == {}
    assert second["graphs"] == first["graphs"] + first["replay_failures"]
    assert second["graphs_captured"] == first["replay_failures"]
    assert 0 < second["capture_s"] < first["capture_s"]


def test_repeats_in_text(kpolicy: Command, config: Path, requests: Path) -> None:
    """The second turn has a row of its own, and a line of its own of what has no column."""
    options = ("--policy", "vllm", "--repeats", 2, "--no-verify")
    text = kpolicy("run", "--model", config, "--trace", requests, *SMALL, *options).out
    assert re.search(r"^vllm +11 .*\n^vllm \(2\) +11 ", text, re.MULTILINE)
    assert re.search(r"^vllm: .*\b[0-9]+ graphs captured in [0-9.]+ s, ", text, re.MULTILINE)
    again = r"^vllm \(2\): .*\b[0-9]+ graphs of an earlier turn, none captured now, [0-9.]+ MiB"
    assert re.search(again, text, re.MULTILINE)


def test_a_given_rate_and_a_saved_profile(kpolicy: Command, config: Path, requests: Path) -> None:
    """--rate takes the place of --utilisation, and eager alone captures nothing."""
    options = ("--rate", 1000, "--policy", "eager", "--no-verify", "--json")
    report = kpolicy("run", "--model", config, "--trace", requests, *SMALL[:6], *options).json
    assert (report["setting"]["rate"], report["setting"]["utilisation"]) == (1000, None)
    (result,) = report["policies"]
    assert (result["graphs"], result["verified"], result["served"]) == (0, {}, 11)


def test_an_interrupt_prints_what_there_is(
    kpolicy: Command, config: Path, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the first policy serves prints its numbers so far and exits with 130."""
    verify = import_module("kpolicy.serving.verify")
    check = verify.Verifier.check

    def stop(self: Any, step: int, *rest: Any) -> None:
        if step == 4:
            raise KeyboardInterrupt
        check(self, step, *rest)

    monkeypatch.setattr(verify.Verifier, "check", stop)
    ended = kpolicy("run", "--model", config, "--trace", requests, "--json", *SMALL)
    assert ended.code == 130
    (result,) = ended.json["policies"]
    assert result["interrupted"] == "interrupted from the keyboard"
    assert "interrupted" in ended.err


def test_failed_checks_are_an_error(
    kpolicy: Command, config: Path, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs that differ from EAGER exit with 1; standard error says where."""
    verify = import_module("kpolicy.serving.verify")
    monkeypatch.setattr(verify, "_largest", lambda *_: 0.5)
    ended = kpolicy("run", "--model", config, "--trace", requests, "--policy", "full", *SMALL)
    assert ended.code == 1
    assert "DIFFERENT" in ended.out
    assert "outputs differ from EAGER's" in ended.err
    assert "differ from EAGER by up to 0.5" in ended.err


def test_a_cpu_serves_so_many_tokens_unless_a_window_is_given(
    kpolicy: Command, config: Path, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the work is bounded however busy the trace is; a window that is named is served whole."""
    run_model = import_module("kpolicy.cli.run_model")
    assert run_model.size_on("cpu").most_tokens == 35_000
    assert run_model.size_on("cuda").most_tokens is None
    monkeypatch.setattr(run_model, "CPU_SIZE", attrs.evolve(run_model.CPU_SIZE, most_tokens=33))
    command = ("run", "--model", config, "--trace", requests, "--policy", "eager", "--no-verify", "--json", *SMALL)
    traces = [kpolicy(*command, *more).json["trace"] for more in ((), ("--window", 0))]
    assert [trace["requests"] for trace in traces] == [3, 11]
    assert "first 3 requests" in traces[0]["source"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--device tpu", ["unknown device 'tpu'", "auto, cpu, cuda, kunlun, simulated, xpu", "kpolicy doctor"]),
        pytest.param(
            "--device cuda",
            ["device 'cuda' isn't there", "Devices here: cpu", "kpolicy doctor"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        ("--device cuda:x", ["unknown device 'cuda:x'"]),
        ("--device auto:1", ["unknown device 'auto:1'"]),
        ("--device simulated:0", ["unknown device 'simulated:0'"]),
        ("--device simulated --model {config}", ["--device simulated", "runs no model"]),
        ("--model {tmp}/none", ["{tmp}/none isn't there"]),
        ("--model {tmp}", ["config.json"]),
        ("--model {trace}", ["can't be read as JSON"]),
        ("--model {config} --kv-tokens 16 --max-num-tokens 8 --window 0.01 --start 1.2", ["no request", "16 tokens"]),
        ("--model {config} --kv-tokens 4", ["--kv-tokens is 4", "16 to"]),
        ("--model {config} --attention mla", ["--attention mla", "leave it out", "--device simulated"]),
        ("--model {config} --rate 2 --utilisation 0.5", ["--rate 2", "--utilisation 0.5", "give one"]),
        ("--model {config} --utilisation 0", ["--utilisation is 0", "0.01 to 10"]),
        ("--device simulated --utilisation 0.5", ["--utilisation", "--rate"]),
        ("--device simulated --check-addresses", ["--check-addresses", "--device cpu"]),
        ("--device simulated --repeats 2", ["--repeats 2 and --device simulated", "the same again", "--device cpu"]),
        ("--model {config} --repeats 0", ["--repeats is 0", "from 1 to 100"]),
        ("--model {config} --repeats 101", ["--repeats is 101", "from 1 to 100"]),
        ("--model {config} --policy autoo", ["unknown policy 'autoo'"]),
        ("--model {config} --step-log {tmp}", ["--step-log {tmp} is a folder"]),
        ("--model {config} --perfetto {tmp}/no/r.pftrace", ["there is no folder {tmp}/no"]),
        ("--model {config} --perfetto /proc/r.pftrace", ["--perfetto /proc/r-auto.pftrace can't be written"]),
        ("--model {config} --metrics-port 70000", ["--metrics-port is 70000", "65535"]),
        ("--model {config} --fault nonsense", ["unknown fault 'nonsense'"]),
    ],
)
def test_bad_input(
    kpolicy: Command, config: Path, requests: Path, tmp_path: Path, options: str, parts: list[str]
) -> None:
    """What can't be done is one line that names it, with exit code 2 and nothing on standard output."""
    (tmp_path / "empty").mkdir()

    def filled(text: str) -> str:
        filled = text.replace("{config}", str(config)).replace("{trace}", str(requests))
        return filled.replace("{tmp}", str(tmp_path / "empty"))

    ended = kpolicy("run", "--trace", requests, *filled(options).split())
    assert (ended.code, ended.out) == (2, "")
    for part in map(filled, parts):
        assert part.lower() in ended.err.lower()
    assert ended.err.startswith("kpolicy: ")


def test_a_port_that_is_taken(kpolicy: Command, config: Path, requests: Path) -> None:
    """A taken port is said before anything runs."""
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = kpolicy("run", "--model", config, "--trace", requests, "--metrics-port", port)
    assert ended.code == 2
    assert f"--metrics-port {port} can't be had" in ended.err


def test_generate(kpolicy: Command, checkpoint: Path) -> None:
    """Each prompt gets the text that transformers' own generate gives, whatever is batched with it."""
    prompts = ["one two three", "eight", "five four three two one"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    ended = kpolicy("generate", "--model", checkpoint, *words, "--max-tokens", 7, "--json")
    assert (ended.code, ended.err) == (0, "")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    done = ended.json["completions"]
    assert [each["prompt"] for each in done] == prompts
    for each in done:
        ids = tokenizer(each["prompt"], return_tensors="pt")["input_ids"]
        settings = transformers.GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        expected = tokens[0, ids.shape[1] :].tolist()
        assert each["token_ids"] == expected
        # With the space between words, which the tokens alone are decoded without.
        assert each["prompt"] + each["text"] == tokenizer.decode(tokens[0], skip_special_tokens=True)
        assert not each["ended"]
    text = kpolicy("generate", "--model", checkpoint, *words, "--max-tokens", 7).out
    assert f"{prompts[1]}{done[1]['text']}" in text


def test_a_torch_that_ends_the_process_is_named(tmp_path: Path) -> None:
    """A library that calls sys.exit when imported is an error with a word, not a silent end."""
    (tmp_path / "torch.py").write_text("import sys; sys.exit(3)")
    ran = subprocess.run(
        [sys.executable, "-m", "kpolicy", "run", "--window", "1"], check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "torch doesn't import" in ran.stderr


def test_text_behind_a_prompt() -> None:
    """It is what the prompt's text grows by, with the whole of a character that the prompt ends within."""

    class Bytes:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return bytes(ids).decode("utf-8", "replace").lstrip(" ")

    behind = import_module("kpolicy.serving.generate")._behind
    assert behind(Bytes(), list(b"one"), list(b" two")) == " two"
    first, *rest = "\N{LATIN SMALL LETTER E WITH ACUTE}!".encode()
    assert behind(Bytes(), [*b"a", first], rest) == "\N{LATIN SMALL LETTER E WITH ACUTE}!"


def test_generate_ends_at_an_end_of_text(kpolicy: Command, checkpoint: Path, tmp_path: Path) -> None:
    """An id that the checkpoint names as end of text is the last one of a generation."""
    options = ("--prompt", "two", "--max-tokens", 9, "--json")
    (free,) = kpolicy("generate", "--model", checkpoint, *options).json["completions"]
    end = free["token_ids"][4]
    folder = tmp_path / "ends"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    written = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**written, "eos_token_id": end}))
    (ended,) = kpolicy("generate", "--model", folder, *options).json["completions"]
    assert ended["ended"]
    assert ended["token_ids"] == free["token_ids"][: free["token_ids"].index(end) + 1]


def test_generate_with_a_temperature_is_seeded(kpolicy: Command, checkpoint: Path) -> None:
    """Equal seeds give equal text under different policies, another seed gives another."""

    def tokens(seed: int, policy: str) -> list[int]:
        options = ("--prompt", "six seven", "--max-tokens", 12, "--temperature", 1.5, "--json")
        ended = kpolicy("generate", "--model", checkpoint, *options, "--seed", seed, "--policy", policy)
        (done,) = ended.json["completions"]
        return done["token_ids"]

    assert tokens(1, "eager") == tokens(1, "auto")
    assert tokens(1, "auto") != tokens(2, "auto")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--prompt", ""], ["prompt 1 is ''", "empty"]),
        (["--prompt", "one", "--prompt", "  "], ["prompt 2", "empty"]),
        (["--prompt", "one " * 40, "--kv-tokens", "32"], ["prompt 1 has 40 tokens", "may have 32", "--kv-tokens"]),
        (["--prompt", "one", "--max-tokens", "0"], ["--max-tokens is 0"]),
        (["--prompt", "one", "--temperature", "-1"], ["--temperature is -1"]),
        (["--prompt", "one", "--policy", "vlm"], ["unknown policy 'vlm'"]),
        (["--prompt", "one", "--device", "gpu"], ["unknown device 'gpu'", "auto, cpu, cuda", "kpolicy doctor"]),
        (["--prompt", "one", "--device", "simulated"], ["unknown device 'simulated'"]),
        ([], ["--prompt"]),
    ],
)
def test_generates_bad_input(kpolicy: Command, checkpoint: Path, options: list[str], parts: list[str]) -> None:
    """A prompt or an option that can't be used is named, with exit code 2."""
    ended = kpolicy("generate", "--model", checkpoint, *options)
    assert (ended.code, ended.out) == (2, "")
    for part in parts:
        assert part in ended.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_generate_on_a_device_that_is_not_there(kpolicy: Command, checkpoint: Path) -> None:
    """It is named with what there is; auto is the CPU then."""
    ended = kpolicy("generate", "--model", checkpoint, "--prompt", "one", "--device", "cuda")
    assert (ended.code, ended.out) == (2, "")
    assert "device 'cuda' isn't there" in ended.err
    assert "Devices here: cpu" in ended.err
    if not torch.accelerator.is_available():
        given = ("--prompt", "one", "--max-tokens", 1, "--policy", "eager", "--device", "auto")
        assert kpolicy("generate", "--model", checkpoint, *given).code == 0


def test_generate_needs_a_model_and_a_tokenizer(kpolicy: Command, config: Path, tmp_path: Path) -> None:
    """A folder that isn't there and one without a tokenizer are told apart."""
    ended = kpolicy("generate", "--model", tmp_path / "none", "--prompt", "one")
    assert ended.code == 2
    assert "isn't there" in ended.err
    ended = kpolicy("generate", "--model", config.parent, "--prompt", "one")
    assert ended.code == 2
    assert "no tokenizer" in ended.err


@pytest.mark.parametrize("fault", ["replay_fails@5x2", "capture_fails@2", "mid_segment@4"])
def test_a_fault_costs_no_request(kpolicy: Command, config: Path, requests: Path, fault: str) -> None:
    """An injected failure is counted, measuring before it isn't hit, and every request is served."""
    ended = kpolicy("run", "--model", config, "--trace", requests, "--json", "--fault", fault, *SMALL)
    assert ended.code == 0
    for result in ended.json["policies"]:
        assert result["served"] == 11
        assert sum(result["not_captured"].values()) + result["replay_failures"] > 0
        assert all(each["failures"] == 0 for each in result["verified"].values())


@pytest.mark.parametrize("checks", [False, True])
def test_the_debug_mode_is_an_option(
    kpolicy: Command, config: Path, requests: Path, checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --check-addresses every replay looks first; without it none does."""
    looked, check = list[bool](), Graph.check

    def noted(graph: Graph) -> None:
        looked.append(True)
        check(graph)

    monkeypatch.setattr(Graph, "check", noted)
    options = ("--check-addresses",) if checks else ()
    report = kpolicy("run", "--model", config, "--trace", requests, "--json", "--policy", "full", *options, *SMALL).json
    assert report["setting"]["check_addresses"] is checks
    assert bool(looked) is checks
    assert report["policies"][0]["served"] == 11


def test_a_lost_device_hands_requests_back(kpolicy: Command, config: Path, requests: Path) -> None:
    """A sticky fault ends each policy's run with exit code 1, and what is left is handed back."""
    ended = kpolicy("run", "--model", config, "--trace", requests, "--json", "--fault", "sticky@6", *SMALL)
    assert ended.code == 1
    assert len(ended.json["policies"]) == 2
    for result in ended.json["policies"]:
        assert result["served"] + result["refused"]["device_lost"] == 11


def test_a_profile_is_taken_as_it_is(kpolicy: Command, config: Path, requests: Path, tmp_path: Path) -> None:
    """With --profile nothing is measured; decisions name its table."""
    write_profile(tmp_path / "p.json", Profile(costs=analytic_costs(), device="a device", model="a model"))
    options = ("--profile", tmp_path / "p.json", "--rate", 50, "--policy", "auto", "--json")
    report = kpolicy("run", "--model", config, "--trace", requests, *SMALL, *options).json
    assert report["setting"]["costs"] == analytic_costs().version
    assert report["policies"][0]["served"] == 11
