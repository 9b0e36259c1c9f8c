"""`kpolicy decide`, `explain`, `policies` and `doctor`, help, and docs/cli.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy import BatchShape, Engine, Mode, Settings, __version__
from kpolicy.cli import app, lists
from kpolicy.costs import analytic_costs
from kpolicy.errors import PluginError
from kpolicy.executors.base import ProbeReport, ProbeStatus
from kpolicy.executors.simulated import FAULTS
from kpolicy.policies import OWN, get_policy
from kpolicy.schemas import Profile, write_profile
from tests.cli.conftest import Command

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "cli.md").read_text()
COMMANDS = (
    "run", "generate", "calibrate", "decide", "explain", "policies", "doctor", "plan", "simulate", "sweep", "report",
    "explain-log",
)  # fmt: skip


def in_a_process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kpolicy", *arguments], cwd=ROOT, env={**os.environ, **environ}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


# decide


@pytest.mark.parametrize(
    ("options", "shape", "engine"),
    [
        ("--decodes 9", BatchShape.decode(9, 9 * 1025), Engine()),
        (
            "--decodes 30x4,2x2 --speculative 3",
            BatchShape(decodes=[(4, 30), (2, 2)], decode_kv_tokens=32 * 1024 + 124),
            Engine(settings=Settings(num_speculative_tokens=3)),
        ),
        (
            "--decodes 8 --speculative 3 --policy vllm:runner=v2",
            BatchShape.decode(8, 8 * 1028, query_len=4),
            Engine("vllm:runner=v2", settings=Settings(num_speculative_tokens=3)),
        ),
        (
            "--prefill 512,64@1000 --policy sglang",
            BatchShape(prefills=[(512, 0), (64, 1000)]),
            Engine("sglang"),
        ),
        (
            "--decodes 32 --prefill 512 --attention mla --policy split:form=beside",
            BatchShape(decodes=[(1, 32)], prefills=[(512, 0)], decode_kv_tokens=32 * 1025),
            Engine("split:form=beside", attention="mla"),
        ),
        (
            "--decodes 5 --loras 2 --max-loras 4 --policy full",
            BatchShape.decode(5, 5 * 1025, num_active_loras=2),
            Engine("full", settings=Settings(max_loras=4)),
        ),
        (
            "--decodes 5 --forbid full,split --kv-tokens 700",
            BatchShape.decode(5, 700, forbidden=[Mode.FULL, Mode.SPLIT]),
            Engine(),
        ),
        (
            "--decodes 5 --prefill 3000 --steps-ahead 4 --objective latency",
            BatchShape(decodes=[(1, 5)], prefills=[(3000, 0)], decode_kv_tokens=5 * 1025, max_decode_steps=4),
            Engine(objective="latency"),
        ),
        (
            "--decodes 5 --ladder 2,8,16 --budget-streams 9 --max-num-reqs 16 --max-num-tokens 64",
            BatchShape.decode(5, 5 * 1025),
            Engine(ladder=[2, 8, 16], settings=Settings(max_num_reqs=16, max_num_tokens=64)),
        ),
    ],
)
def test_decide_is_the_engines_decision(kpolicy: Command, options: str, shape: BatchShape, engine: Engine) -> None:
    """The answer is what an Engine with the same arguments decides, in JSON and in text."""
    decision = engine.decide(shape)
    ended = kpolicy("decide", *options.split(), "--json")
    assert (ended.code, ended.err) == (0, "")
    policy = ended.json["policy"]
    assert policy.partition(":")[0] == engine.policy.name
    assert ended.json == {
        "shape": str(shape),
        "policy": policy,
        **decision.as_dict(shape.numbers),
        "downgrades": [str(downgrade) for downgrade in engine.downgrades],
    }
    text = kpolicy("decide", *options.split()).out
    assert text.startswith(f"{decision.label} for {shape}, by {policy}\n")
    assert f"because {decision.why}\n" in text
    assert all(f"  {launch}" in text for launch in decision.launches)


def test_decide_shows_padding_and_downgrades(kpolicy: Command) -> None:
    """Text has each launch's padding, and what start-up took back."""
    text = kpolicy("decide", "--decodes", 5, "--ladder", "8,16", "--policy", "full_and_piecewise").out
    assert "3 padding tokens" in text
    text = kpolicy("decide", "--prefill", 5, "--policy", "full", "--attention", "mla").out
    assert "downgraded at start-up: batches with prefill: full -> eager" in text


def test_a_profile_replaces_the_analytic_costs(kpolicy: Command, tmp_path: Path) -> None:
    """Decisions by a measured profile carry its version and don't say that costs are analytic."""
    costs = attrs.evolve(analytic_costs(), measured=True, version="made-up-1")
    write_profile(tmp_path / "p.json", Profile(costs=costs, device="made up", model="made up"))
    answer = kpolicy("decide", "--decodes", 5, "--profile", tmp_path / "p.json", "--json").json
    assert answer["costs"] == "made-up-1"
    assert "costs_analytic" not in answer["assumes"]


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "hidden_size": 896, "use_sliding_window": False, "sliding_window": 32768,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_size": 2048,
}  # fmt: skip


@pytest.mark.parametrize(("config", "attention"), [(LLAMA, "gqa"), (QWEN, "gqa"), (DEEPSEEK, "mla")])
def test_a_model_config_says_what_attention_supports(
    kpolicy: Command, tmp_path: Path, config: dict[str, Any], attention: str
) -> None:
    """A config, or the folder that holds it, stands for its layer kind, in decide, explain and run."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    batch = ("--decodes", 8, "--prefill", 100, "--policy", "full", "--json")
    stated = kpolicy("decide", *batch, "--attention", attention).json
    assert kpolicy("decide", *batch, "--config", tmp_path / "config.json").json == stated
    assert kpolicy("decide", *batch, "--config", tmp_path).json == stated
    assert kpolicy("explain", *batch, "--config", tmp_path).json["decision"]["mode"] == stated["mode"]
    assert bool(stated["downgrades"]) == (attention == "mla")


# explain


def test_explain_lists_every_way(kpolicy: Command) -> None:
    """JSON has every way with its times, the chosen one first; piped text is the Explanation as Python prints it."""
    options = ("--decodes", 32, "--prefill", "512,64@1000", "--attention", "mla")
    ended = kpolicy("explain", *options, "--json")
    assert (ended.code, ended.err) == (0, "")
    first, *others = ended.json["considered"]
    assert first["verdict"] == "chosen"
    assert first["way"].startswith(ended.json["decision"]["mode"])
    assert {each["way"].partition("/")[0] for each in ended.json["considered"]} == {
        "full", "piecewise", "split", "eager"
    }  # fmt: skip
    impossible = [each for each in others if each["step_us"] is None]
    assert [(each["way"], each["launches"], each["bound_by"]) for each in impossible] == [("full", None, None)]
    shape = BatchShape(decodes=[(1, 32)], prefills=[(512, 0), (64, 1000)], decode_kv_tokens=32 * 1025)
    assert kpolicy("explain", *options).out.startswith(f"{Engine(attention='mla').explain(shape)}\n")


@pytest.mark.parametrize("width", [80, 120])
def test_explain_folds_to_the_width(kpolicy: Command, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """With a width given the table folds to it, and times and ways stay whole."""
    options = ("--decodes", 32, "--prefill", "512,64@1000", "--attention", "mla")
    considered = kpolicy("explain", *options, "--json").json["considered"]
    monkeypatch.setenv("COLUMNS", str(width))
    head, table = kpolicy("explain", *options).out.split("\n\n")
    assert head.count("\n") == 2
    assert "…" not in table
    rows = [line for line in table.splitlines() if not line.startswith("downgraded")]
    assert max(map(len, rows)) <= width
    for each in considered:
        if each["step_us"] is not None:
            times = f"{each['step_us'] / 1e3:.2f} +{each['gap_us'] / 1e3:.2f} +{each['bound_by']}"
            assert any(re.match(rf"{each['way']}  .* {times} ", row) for row in rows)


# policies


def test_policies_lists_each_with_its_arguments(kpolicy: Command) -> None:
    """Every policy of ours is there with its summary and arguments, in JSON and text; the arguments make it."""
    ended = kpolicy("policies", "--json")
    rows = {row["policy"]: row for row in ended.json}
    assert [row["policy"] for row in ended.json] == sorted(rows)
    assert set(OWN) <= set(rows)
    text = kpolicy("policies").out
    folded = re.sub(r"\s+", " ", text)
    for name in OWN:
        row = rows[name]
        assert (row["status"], row["from"], row["error"]) == ("usable", "kpolicy", None)
        assert row["summary"] == get_policy(name).summary
        assert f"{name} {row['summary']}" in folded
        assert all(f"{argument}" in text for argument in row["arguments"])
        given = {key: value for key, value in row["arguments"].items() if value not in (None, "")}
        spec = ",".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()
        )
        assert get_policy(f"{name}:{spec}") == get_policy(name)


def test_policies_of_plugins(kpolicy: Command, tmp_path: Path) -> None:
    """A plugin that raises is listed as broken with the error; one that works says where it is from; ours stay."""
    info = tmp_path / "fake_cli-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-cli\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kpolicy.policies]\nrotten = fake_cli_rotten:X\nhungry = fake_cli_good:hungry\nmine = fake_cli_good:mine\n"
        "angry = fake_cli_good:angry\nnumber = fake_cli_good:NUMBER\n"
    )
    (tmp_path / "fake_cli_rotten.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "fake_cli_good.py").write_text(
        "from kpolicy.policies import get_policy\n"
        "NUMBER = 7\n"
        "def mine(size=3): return get_policy('eager')\n"
        "def hungry(size): return get_policy('eager')\n"
        "def angry(): raise KeyError('no card')\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ran = in_a_process("policies", "--json", PYTHONPATH=path)
    assert (ran.returncode, ran.stderr) == (0, "")
    rows = {row["policy"]: row for row in json.loads(ran.stdout)}
    assert set(OWN) | {"rotten", "hungry", "mine", "angry", "number"} <= set(rows)
    assert all(rows[name]["status"] == "usable" for name in OWN)
    assert (rows["rotten"]["status"], rows["rotten"]["from"]) == ("broken", "fake-cli")
    assert "RuntimeError: no licence" in rows["rotten"]["error"]
    assert "KeyError: 'no card'" in rows["angry"]["error"]
    assert rows["number"]["status"] == "broken"
    assert rows["mine"]["arguments"] == {"size": 3}
    assert rows["mine"]["summary"] == get_policy("eager").summary
    assert (rows["hungry"]["arguments"], rows["hungry"]["status"]) == ({"size": "required"}, "usable")
    text = in_a_process("policies", PYTHONPATH=path)
    assert text.returncode == 0
    assert re.search(r"^rotten +broken: kpolicy.policies 'rotten' of fake-cli", text.stdout, re.M)
    assert re.search(r"^mine +.*\(from fake-cli\)", text.stdout, re.M)
    assert re.search(r"^split ", text.stdout, re.M)


def test_policies_survive_broken_metadata(kpolicy: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where entry points can't be read our own policies are listed all the same, with a warning."""

    def broken() -> dict[str, str]:
        raise PluginError("an installed package has entry points that can't be read.")

    monkeypatch.setattr(lists, "policy_names", broken)
    ended = kpolicy("policies", "--json")
    assert ended.code == 0
    assert [row["policy"] for row in ended.json] == sorted(OWN)
    assert "entry points that can't be read" in ended.err


# doctor


REPORTS = (
    ProbeReport("device cuda", ProbeStatus.USABLE, "a card that counts", {"devices": 2, "version": "1.0"}),
    ProbeReport("device ascend", ProbeStatus.MASKED, "hidden by a variable"),
    ProbeReport("extra torch", ProbeStatus.BROKEN, "raises ImportError", {"location": "/some/where"}),
    ProbeReport("extra numpy", ProbeStatus.ABSENT, "not installed"),
)


def test_doctor_prints_every_report(kpolicy: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text has name, status and reason of each; JSON the facts too; finding something broken is no failure."""
    monkeypatch.setattr("kpolicy.probes.probe_all", lambda **_: REPORTS)
    ended = kpolicy("doctor", "--json")
    assert (ended.code, ended.err) == (0, "")
    assert ended.json[0] == {
        "name": "device cuda", "status": "usable", "reason": "a card that counts",
        "facts": {"devices": "2", "version": "1.0"},
    }  # fmt: skip
    text = kpolicy("doctor").out
    for report in REPORTS:
        assert re.search(rf"^{report.name} +{report.status} +{report.reason}", text, re.M)
    assert "a card that counts [devices 2]" in text
    assert "/some/where" not in text


def test_doctor_names_attention_kernels() -> None:
    """Where torch is usable it says which kernels a model gets on each device, and in JSON why not others."""
    pytest.importorskip("torch")
    found = json.loads(in_a_process("doctor", "--json").stdout)
    names = [report["name"] for report in found]
    (told,) = [report for report in found if report["name"] == "attention kernels"]
    assert names[names.index("attention kernels") - 1] == "extra torch"
    assert told["status"] == "usable"
    assert "cpu: plain" in told["reason"]
    kernels = json.loads(told["facts"]["kernels"])
    assert kernels["cpu"] == "plain"
    assert kernels["cpu_others"]["triton"] == "it runs on CUDA devices, and this is cpu"
    assert re.match("gathers keys: torch|reads pages", kernels["flash_pages"])
    assert "CUDA devices" not in told["reason"]


def test_doctor_as_it_is() -> None:
    """In a real process the doctor lists the simulated device and every policy of ours as usable, and no spinner."""
    ran = in_a_process("doctor", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    status = {report["name"]: report["status"] for report in json.loads(ran.stdout)}
    assert status["device simulated"] == status["executor simulated"] == "usable"
    assert all(status[f"policy {name}"] == "usable" for name in OWN)


def test_colours_are_for_terminals_that_want_them(kpolicy: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piped output has no colour; $NO_COLOR takes it from output that would have it."""
    monkeypatch.setattr("kpolicy.probes.probe_all", lambda **_: REPORTS)
    assert "\x1b[" not in kpolicy("doctor").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32musable" in kpolicy("doctor").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in kpolicy("doctor").out


# The command line itself


def test_no_arguments_print_help(kpolicy: Command) -> None:
    """`kpolicy` alone prints what `--help` does: every command with its line."""
    ended = kpolicy()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == kpolicy("--help").out
    assert all(re.search(rf"^. {command} ", ended.out, re.M) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(kpolicy: Command, command: str) -> None:
    """Every option has a line of help, and switches show no negative that doesn't work."""
    ended = kpolicy(command, "--help")
    assert (ended.code, ended.err) == (0, "")
    for option in options_of(command):
        assert re.search(rf"{option} (?:[A-Z]+(?:\.\.\.)?|--[a-z-]+)?\s+[A-Za-z]", ended.out), option
    assert "--no-json" not in ended.out
    assert "--no-strict" not in ended.out


def test_the_version(kpolicy: Command) -> None:
    """--version prints the version alone."""
    assert kpolicy("--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("command", ["policies --json", "simulate TRACE", "plan TRACE", "run --trace TRACE"])
def test_a_reader_that_leaves_is_no_error(command: str, trace: Path) -> None:
    """A closed pipe ends the command silently, with code 0, tables that are drawn too."""
    given = [str(trace) if part == "TRACE" else part for part in command.split()]
    if command.startswith("run"):
        given += ["--device", "simulated"]
    read, written = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "kpolicy", *given], cwd=ROOT, stdout=written, stderr=subprocess.PIPE, text=True,
        check=False,
    )  # fmt: skip
    os.close(written)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("command", ["simulate", "sweep", "report"])
def test_what_failed_is_told_to_a_reader_that_leaves(command: str, trace: Path, tmp_path: Path) -> None:
    """It is on standard error and in the exit code, as `kpolicy simulate ... | head` in a script needs it."""
    given = [command, trace, tmp_path / "none.csv", "--policy", "eager"]
    given += ["--out", tmp_path / "r.html"] if command == "report" else []
    read, written = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "kpolicy", *map(str, given)], cwd=ROOT, stdout=written, stderr=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    os.close(written)
    assert ran.returncode == 1
    assert ran.stderr == f"kpolicy: {tmp_path / 'none.csv'}: no such file. Check the name, or leave it out for the " + (
        "default trace.\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["policies", "decide --decodes 4", "decide --decodes 4 --json"])
def test_a_full_disk_is_one_line(command: str) -> None:
    """Output that can't be written is an error with its cause and exit code 1."""
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "kpolicy", *command.split()], cwd=ROOT, stdout=full, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == 1
    assert "No space left" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.skipif(not Path("/bin/sh").exists(), reason="needs /bin/sh")
@pytest.mark.parametrize(("command", "code"), [("policies", 0), ("decide --decodes 4 --json", 0), ("decide", 2)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_output_is_dropped(command: str, code: int, closed: str) -> None:
    """A command that nobody listens to does its work and ends with its code."""
    ran = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -m kpolicy {command} {closed}', sys.executable], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr
    assert bool(ran.stdout) == (closed == "2>&-" and not code)


def test_commands_need_no_torch(trace: Path) -> None:
    """With torch and structlog barred from import every command but the doctor's probes works."""
    code = (
        "import sys\n"
        "for name in ('torch', 'structlog', 'torch_npu'): sys.modules[name] = None\n"
        "from kpolicy.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    for arguments in (
        ["decide", "--decodes", "4"],
        ["explain", "--prefill", "9"],
        ["policies"],
        ["run", "--trace", trace],
    ):
        ran = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, ""), arguments


# docs/cli.md


def options_of(command: str) -> list[str]:
    """Every option of a command, the first name of each."""
    names = [argument.names[0] for argument in app[command].assemble_argument_collection() if argument.names != ("*",)]
    return [name for name in names if name.startswith("--")]


def test_the_document_lists_every_option_and_no_other() -> None:
    """docs/cli.md has each option of each command, and no option that there isn't."""
    options = {option for command in COMMANDS for option in options_of(command)}
    written = set(re.findall(r"`(--[a-z][a-z-]*)", DOCS)) - {"--help", "--version", "--no-verify", "--no-prefix-reuse"}
    assert written == options
    assert all(f"`{name}`" in DOCS for name in FAULTS)


def test_the_document_has_every_json_field(kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field that a command prints stands in docs/cli.md."""
    monkeypatch.setattr("kpolicy.probes.probe_all", lambda **_: REPORTS)
    printed = [
        kpolicy("run", "--trace", trace, "--json", "--fault", "replay_fails@5").json,
        kpolicy("decide", "--decodes", 5, "--prefill", 60, "--policy", "split", "--json").json,
        kpolicy("explain", "--decodes", 5, "--json").json,
        kpolicy("plan", trace, "--budget", 3, "--emit", "vllm", "--json").json,
        kpolicy("policies", "--json").json,
        kpolicy("doctor", "--json").json,
    ]
    free = {"modes", "reasons", "refused", "not_captured", "eager_halves", "arguments", "facts", "dropped"}
    free |= {"lists", "sizes", "settings", "budget", "usage"}
    fields = set[str]()

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                walk(each)
        elif isinstance(value, dict):
            fields.update(value)
            for name, each in value.items():
                if name not in free:
                    walk(each)
                elif name == "modes":
                    walk(list(each.values()))

    walk(printed)
    assert {name for name in fields if f"`{name}`" not in DOCS} == set()


def test_the_documents_examples_work(kpolicy: Command) -> None:
    """The examples of decide and explain in docs/cli.md run."""
    examples = [line[2:] for line in DOCS.splitlines() if re.match(r"\$ kpolicy (decide|explain) ", line)]
    assert len(examples) == 3
    for example in examples:
        assert kpolicy(*shlex.split(example)[1:]).code == 0


def test_the_module_is_the_command() -> None:
    """`python -m kpolicy` is the command."""
    ran = in_a_process("--version")
    assert (ran.returncode, ran.stdout) == (0, f"{__version__}\n")
