"""Wrong input as a new user would give it: one clear line, exit code 2, nothing on standard output."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kpolicy.budgets import Budget
from kpolicy.costs import analytic_costs
from kpolicy.engine import Engine
from kpolicy.errors import BudgetRefused, ConfigError, UnknownNameError
from kpolicy.scheduling.traces import DEFAULT_FILE, TRACES_VARIABLE
from kpolicy.schemas import Profile, write_profile
from kpolicy.settings import LIMITS, Settings
from tests.cli.conftest import Command, Ended, write

ROOT = Path(__file__).parents[2]
CONFIG = (
    '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "vocab_size": 100}'
)
HEADER = "timestamp,input_length,output_length"


def refused(ended: Ended, *parts: str) -> None:
    """The command ended with one line of error that has all these parts, and printed nothing else."""
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.startswith("kpolicy: ")
    assert ended.err.count("\n") == 1
    assert re.search(r"(\.\)?|\?|> SORTED)$", ended.err), ended.err
    for part in parts:
        assert part in ended.err


# Names

TAKE_NO_TRACE = ("decide --decodes 4", "explain --decodes 4", "doctor", "policies", "explain-log")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            "simulate --trace x.csv",
            ["kpolicy simulate takes its traces without an option", "kpolicy simulate conv.csv"],
        ),
        ("sweep --trace x.csv", ["kpolicy sweep takes its traces without an option"]),
        ("plan --trace x.csv", ["kpolicy plan takes its traces without an option"]),
        ("report --trace x.csv", ["kpolicy report takes its traces without an option"]),
        *((f"{command} --trace x.csv", ["Unknown option: --trace.", " See kpolicy"]) for command in TAKE_NO_TRACE),
        (
            "run --device H100",
            [
                "Known: accelerator, ascend, auto, cpu, cuda, kunlun, simulated, xpu.",
                "figures, such as H200, are those of `kpolicy sim",
            ],
        ),
        (
            "calibrate --model x --out y --device H100",
            ["Known: accelerator, ascend, auto, cpu, cuda, kunlun, xpu.", "published figures"],
        ),
        ("simulate --device cuda", ["Known: A100,", "published figures", "this machine's too", "`kpolicy calibrate`"]),
        ("run --policy autoo", ["unknown policy 'autoo'", "did you mean 'auto'?", "Known: ascend, auto, eager"]),
        ("run --policy auto,vllm", ["--policy auto,vllm has a comma", "give --policy auto --policy vllm."]),
        ("sweep --policy auto,vllm:runner=v2", ["for several give --policy auto --policy vllm:runner=v2."]),
        ("run --policy auto --policy vlm", ["unknown policy 'vlm'", "did you mean 'vllm'?"]),
        ("decide --decodes 4 --policy peicewise", ["did you mean 'piecewise'?"]),
        ("decide --decodes 4 --policy zzz", ["unknown policy 'zzz'.", "Known:"]),
        ("decide --decodes 4 --policy=", ["unknown policy ''."]),
        (
            "decide --decodes 4 --policy vllm:runer=v2",
            ["doesn't take runer", "did you mean runner?", "It takes"],
        ),
        ("decide --decodes 4 --policy eager:x=1", ["doesn't take x", "It takes no arguments", "kpolicy policies"]),
        ("decide --decodes 4 --policy vllm:runner=v3", ["runner 'v3'", "Known: v1, v2"]),
        ("decide --decodes 4 --policy vllm:version=0.9", ["0.9", "Known: 0.23, 0.33"]),
        ("decide --decodes 4 --policy vllm:runner", ["'runner' isn't NAME=VALUE", "for example"]),
        ("decide --decodes 4 --policy vllm:runner=v1,runner=v2", ["gives runner twice"]),
        ("decide --decodes 4 --policy vllm:varlen=yes", ["varlen='yes'", "true or false"]),
        ("decide --decodes 4 --policy split:form=besides", ["unknown form of split 'besides'", "'beside'"]),
        ("decide --decodes 4 --policy auto:forms=none+in_turn", ["'none+in_turn'", "none in small letters and alone"]),
        ("decide --decodes 4 --policy auto:forms=NONE", ["'NONE'", "none in small letters and alone"]),
        ("decide --decodes 4 --forbid ful", ["--forbid", "unknown mode 'ful'", "did you mean 'full'?", "eager, full"]),
        ("decide --decodes 4 --forbid full,", ["--forbid", "unknown mode ''"]),
        ("decide --decodes 4 --forbid=", ["--forbid", "unknown mode ''"]),
        ("decide --decodes 4 --attention mlaa", ["unknown attention kind 'mlaa'", "did you mean 'mla'?", "gdn+gqa"]),
        ("decide --decodes 4 --attention gqa+", ["unknown attention kind ''"]),
        ("decide --decodes 4 --attention=", ["unknown attention kind ''"]),
        ("run --attention gpa", ["unknown attention kind 'gpa'", "did you mean 'gqa'?"]),
        ("decide --decodes 4 --attention gqa:vllm-0.33/FLASHATTN", ["'vllm-0.33/FLASHATTN'", "FLASH_ATTN"]),
        ("decide --decodes 4 --attention gqa:FLASH_ATTN", ["Say which engine's: vllm-0.23/FLASH_ATTN"]),
        ("decide --decodes 4 --attention gqa:vllm-0.33/FLASHMLA", ["doesn't run gqa layers", "it runs mla"]),
        ("run --fault replay_fail", ["unknown fault 'replay_fail'", "did you mean 'replay_fails'?"]),
        ("run --fault replay_fails@0", ["at=0", "both count from 1"]),
        ("run --fault replay_fails@ten", ["'replay_fails@ten'", "NAME@NxTIMES", "for example"]),
        ("rum", ["rum", "run"]),
        ("run --polcy auto", ["--polcy", "--policy", "kpolicy run --help"]),
        ("run --executor cuda", ["--executor", "kpolicy run --help"]),
    ],
)
def test_unknown_names(kpolicy: Command, arguments: str, parts: list[str]) -> None:
    """A name that isn't known is shown, with the near miss and the known names."""
    refused(kpolicy(*arguments.split(" ")), *parts)


def test_long_lists_of_names_are_cut(kpolicy: Command) -> None:
    """Where over a hundred names are known the error shows the nearest ones and not all."""
    ended = kpolicy("decide", "--decodes", 4, "--attention", "gqa:vllm-0.33/FLASH_ATN")
    refused(ended, "did you mean 'vllm-0.33/", " more. Nearest: ", "vllm-0.33/FLASH_ATTN[")
    assert len(ended.err) < 1500


def test_an_unknown_executor() -> None:
    """The Engine names an executor it doesn't know, and the near miss."""
    with pytest.raises(UnknownNameError, match="unknown executor 'simulate'; did you mean 'simulated'"):
        Engine(executor="simulate")


# Traces


@pytest.mark.parametrize(
    ("lines", "where", "parts"),
    [
        (["0,10,5", "100,7"], "line 3", ["2 fields", "header has 3", "cut short"]),
        (["0,ten,5"], "line 2", ["input_length is 'ten'", "whole number"]),
        (["0,10,5", "10,-1,5"], "line 3", ["input_length is '-1'", "from 0 to 2147483647"]),
        (["0,10,5", "10,5,1000000000000"], "line 3", ["output_length is '1000000000000'", "from 0 to 2147483647"]),
        (["0,1.5,5"], "line 2", ["input_length is '1.5'"]),
        (["now,10,5"], "line 2", ["timestamp is 'now'"]),
        (["50,10,5", "0,10,5"], "line 3", ["goes back from 50 to 0", "Sort the (unzipped) file"]),
        ([], "line 1", ["no rows", "cut short"]),
        (["0,0,5", "1,9,0"], "", ["no request to serve", "1 zero_prompt_tokens, 1 zero_output_tokens"]),
    ],
)
def test_malformed_traces(kpolicy: Command, tmp_path: Path, lines: list[str], where: str, parts: list[str]) -> None:
    """A trace that can't be served names the file, the line, what is there and what should be."""
    path = write(tmp_path / "trace.csv", HEADER, *lines)
    refused(kpolicy("run", "--trace", path), f"{path}, {where}" if where else str(path), *parts)


def test_files_that_are_no_trace(kpolicy: Command, tmp_path: Path) -> None:
    """A missing, empty, unknown or binary file, a folder and a cut gzip are told apart."""
    refused(kpolicy("run", "--trace", tmp_path / "none.csv"), f"{tmp_path / 'none.csv'}: no such file")
    refused(kpolicy("run", "--trace", tmp_path), f"{tmp_path}: this is a folder; name one trace file in it")
    refused(kpolicy("run", "--trace", write(tmp_path / "empty.csv")), "the file is empty", "Known formats")
    refused(kpolicy("run", "--trace", write(tmp_path / "x.csv", "a,b", "1,2")), "line 1", "unknown columns", "azure (")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00junk")
    refused(kpolicy("run", "--trace", tmp_path / "binary"), "isn't UTF-8 text; is this a trace?")
    whole = gzip.compress(b"timestamp,input_length,output_length\n" + b"0,10,5\n" * 2000)
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    refused(kpolicy("run", "--trace", tmp_path / "cut.csv.gz"), "cut short", "line ")
    good = json.dumps({"timestamp": 0, "input_length": 9, "output_length": 2})
    (tmp_path / "cut.jsonl").write_text(f'{good}\n{{"timestamp": 1, "inp')
    refused(kpolicy("run", "--trace", tmp_path / "cut.jsonl"), "cut.jsonl, line 2", "cut short")


def test_the_environments_folder(kpolicy: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that names no folder with traces is an error, not a silent default."""
    monkeypatch.setenv("KPOLICY_TRACES", str(tmp_path / "none"))
    refused(kpolicy("run"), "$KPOLICY_TRACES", "isn't a folder", "unset it")
    monkeypatch.setenv("KPOLICY_TRACES", str(tmp_path))
    refused(kpolicy("run"), "$KPOLICY_TRACES", "azure_llm_2023_conv.csv")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--rate 0", ["--rate is 0", "from 1e-06 up"]),
        ("--rate -2", ["--rate is -2", "from 1e-06 up"]),
        ("--rate 1e-300", ["--rate is 1e-300", "from 1e-06 up"]),
        ("--rate nan", ["--rate is nan"]),
        ("--rate inf", ["--rate is inf"]),
        ("--rate fast", ["--rate is 'fast'; it takes a number", "kpolicy run --help"]),
        ("--window -1", ["--window is -1", "seconds from 0 up"]),
        ("--window inf", ["--window is inf", "--window 0 serves all"]),
        ("--window nan", ["--window is nan"]),
        ("--start -5", ["--start is -5", "seconds from 0 up"]),
        ("--start 1e9", ["no request arrives", "from second 1e+09", "last one arrives at second 3.9"]),
        ("--start 3.91 --window 0", ["no request arrives", "last one arrives at second 3.9"]),
        ("--kv-tokens 1", ["--kv-tokens is 1", "blocks of 16 tokens", "16 to 16777216"]),
        ("--kv-tokens -400", ["--kv-tokens is -400"]),
        ("--kv-tokens 1000000000000", ["--kv-tokens is 1000000000000", "16 to 16777216"]),
        ("--kv-tokens 1.5", ["--kv-tokens", "is '1.5'; it takes a whole number, such as 8"]),
        ("--kv-tokens 1e6", ["--kv-tokens", "is '1e6'; it takes a whole number, such as 8"]),
        ("--seed -1", ["--seed is -1", "from 0 to"]),
        ("--seed one", ["--seed", "is 'one'; it takes a whole number, such as 8"]),
        ("--max-num-reqs 0", ["--max-num-reqs is 0", "from 1 to 65536"]),
        ("--max-num-tokens 0", ["--max-num-tokens is 0", "from 1 to 1048576"]),
        ("--max-num-tokens 1000000000000", ["--max-num-tokens is 1000000000000", "from 1 to 1048576"]),
        ("--budget-graphs -1", ["--budget-graphs is -1"]),
        ("--ladder 1,2,4,8 --budget-graphs 99", ["over the budget of 99 graphs", "Keep the sizes 1,8,"]),
        ("--ladder 1,2 --budget-bytes 1000000", ["over the budget of 1000000 bytes", "Raise the budget"]),
        ("--budget-streams -1", ["--budget-streams is -1", "from 0 up"]),
        ("--ladder 4,2", ["2 after 4", "Sorted: 2,4"]),
        ("--ladder 2,4096", ["ends at 4096", "2048 tokens one step may have", "drop larger sizes"]),
        ("--objective fast", ["objective is 'fast'", "throughput, latency, or weights"]),
        ("--policy auto --policy auto", ["--policy auto is given twice"]),
        ("--step-log {tmp}", ["--step-log {tmp} is a folder", "name a file in it"]),
        ("--step-log {tmp}/no/steps.jsonl", ["there is no folder {tmp}/no", "make it"]),
        ("--step-log /dev/full/steps.jsonl", ["there is no folder /dev/full"]),
        ("--profile {tmp}/none.json", ["can't read {tmp}/none.json", "No such file"]),
        ("--attention gqa --config {tmp}", ["--attention and --config", "give one of them"]),
        ("--trace {trace}", ["--trace", "multiple times"]),
        ("--verify=perhaps", ["--verify", '"perhaps"']),
        ("--no-json", ["--no-json", "--json"]),
        ("extra", ["doesn't take 'extra'", "kpolicy run --help"]),
    ],
)
def test_options_of_run(kpolicy: Command, trace: Path, tmp_path: Path, options: str, parts: list[str]) -> None:
    """Each option out of range is named, with its value and its range, before anything runs."""

    def filled(text: str) -> str:
        return text.replace("{tmp}", str(tmp_path)).replace("{trace}", str(trace))

    refused(kpolicy("run", "--trace", trace, *filled(options).split(" ")), *map(filled, parts))


@pytest.mark.parametrize(
    "command",
    [
        "simulate {trace} --policy eager --out {trace}",
        "simulate {trace} --policy eager --step-log {link}",
        "simulate {trace} --policy eager --perfetto {trace}",
        "run --device simulated --trace {trace} --policy eager --step-log {trace}",
        "plan {trace} --out {tmp}/../{name}/trace.csv",
        "plan {trace} --config {tmp} --out {tmp}/config.json",
        "plan {trace} --profile {profile} --out {profile}",
        "report {trace} --out {trace}",
        "report {trace} --policy eager --out {tmp}/r.html --perfetto {trace}",
        "sweep {trace} --profiles {profile} --out {profile}",
        "sweep {trace} --ladders own --ladders {profile} --out {profile}",
        "simulate {trace} --policy eager --ladder {profile} --out {profile}",
        "run --device cpu --model {tmp} --trace {trace} --policy eager --step-log {tmp}/model.safetensors",
        "calibrate --model {tmp} --out {tmp}/config.json",
        "calibrate --model {tmp} --out {tmp}/model.safetensors",
        "calibrate --model {tmp} --ladder {profile} --out {profile}",
    ],
)
def test_what_is_read_isnt_written_over(kpolicy: Command, trace: Path, tmp_path: Path, command: str) -> None:
    """However the path is written, and before anything runs; the file is as it was."""
    pytest.importorskip("perfetto")
    config, profile, link = tmp_path / "config.json", tmp_path / "p.json", tmp_path / "link"
    config.write_text(CONFIG)
    weights = write(tmp_path / "model.safetensors", "weights")
    write_profile(profile, Profile(costs=analytic_costs(), device="a device", model=""))
    link.symlink_to(trace)
    before = [path.read_bytes() for path in (trace, config, weights, profile)]
    names = {"trace": trace, "tmp": tmp_path, "name": tmp_path.name, "profile": profile, "link": link}
    refused(kpolicy(*command.format(**names).split(" ")), "is what the command reads, and would be lost")
    assert [path.read_bytes() for path in (trace, config, weights, profile)] == before


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        "simulate --policy eager --out {trace}", "run --device simulated --policy eager --step-log {trace}",
        "plan --out {trace}", "report --out {trace}", "sweep --out {trace}",
    ],
)  # fmt: skip
def test_the_default_trace_isnt_written_over(
    kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, shared: bool
) -> None:
    """By $KPOLICY_TRACES or beside the current folder."""
    found = tmp_path / "shared" / "traces" / DEFAULT_FILE
    found.parent.mkdir(parents=True)
    (tmp_path / "here").mkdir()
    found.write_text(trace.read_text())
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv(TRACES_VARIABLE, raising=False)
    if not shared:
        monkeypatch.setenv(TRACES_VARIABLE, str(found.parent))
    refused(kpolicy(*command.format(trace=found).split()), "is what the command reads, and would be lost")
    assert found.read_text() == trace.read_text()


def test_two_options_dont_write_one_file(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """It is said of files, and what isn't one takes both."""
    given = ("simulate", trace, "--policy", "eager", "--out")
    refused(kpolicy(*given, tmp_path / "o", "--step-log", tmp_path / "o"), "--out and --step-log both write")
    assert kpolicy(*given, "/dev/null", "--step-log", "/dev/null").code == 0
    pytest.importorskip("perfetto")
    given = ("report", trace, "--policy", "eager", "--out", tmp_path / "r", "--perfetto", tmp_path / "r")
    refused(kpolicy(*given), "--out and --perfetto both write")


def test_an_option_without_its_value(kpolicy: Command) -> None:
    """A missing value is said as such, with the command whose help to read."""
    refused(
        kpolicy("run", "--trace"), "--trace has no value: An Azure, Mooncake or BurstGPT trace", "kpolicy run --help"
    )
    refused(kpolicy("decide", "--decodes"), "--decodes has no value: ", "kpolicy decide --help")
    refused(kpolicy("calibrate"), "kpolicy calibrate needs --model: A model's folder", "kpolicy calibrate --help")
    refused(kpolicy("explain-log"), "kpolicy explain-log needs LOG: A decision log", "kpolicy explain-log --help")
    refused(kpolicy("simulate", "--pace", "nope"), "--pace: unknown policy 'nope'")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user who may not write everywhere")
def test_a_step_log_that_may_not_be_written(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """A folder without write permission is an error that names the file."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refused(kpolicy("run", "--trace", trace, "--step-log", locked / "s.jsonl"), "can't write", str(locked / "s.jsonl"))


# One batch


@pytest.mark.parametrize("command", ["decide", "explain"])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("", ["there is no batch", "--decodes 32 --prefill 512,64"]),
        ("--decodes=", ["--decodes has ''", "counts of rows"]),
        ("--decodes 0", ["--decodes has '0'", "0 isn't from 1 to 2147483647", "30x4"]),
        ("--decodes -4", ["--decodes has '-4'", "isn't from 1"]),
        ("--decodes four", ["--decodes has 'four'", "counts of rows, or COUNTxLENGTH such as 30x4"]),
        ("--decodes 1.5", ["--decodes has '1.5'"]),
        ("--decodes 4x0", ["--decodes has '4x0'", "0 isn't from 1"]),
        ("--decodes 4x", ["--decodes has '4x'"]),
        ("--decodes 8,,2", ["--decodes has ''"]),
        ("--decodes 1000000000000", ["--decodes has '1000000000000'", "to 2147483647"]),
        ("--decodes 257", ["257 requests", "allows 256 and 8,192", "Raise --max-num-reqs"]),
        ("--decodes 200x100", ["20,000 tokens", "Raise --max-num-reqs or --max-num-tokens"]),
        ("--prefill=", ["--prefill has ''", "new tokens"]),
        ("--prefill 0", ["--prefill has '0'", "0 isn't from 1"]),
        ("--prefill a", ["--prefill has 'a'", "NEW@CONTEXT such as 64@1000"]),
        ("--prefill 64@-1", ["--prefill has '64@-1'", "-1 isn't from 0"]),
        ("--prefill 64@", ["--prefill has '64@'"]),
        ("--prefill 64@2147483647", ["counts to 2147483711", "over 2147483647"]),
        ("--prefill 1000000000000", ["--prefill has '1000000000000'"]),
        ("--decodes 4 --kv-tokens 3", ["--kv-tokens is 3 for 4 decode tokens", "give 4 or more"]),
        ("--decodes 4 --kv-tokens -1", ["--kv-tokens is -1"]),
        ("--decodes 4 --kv-tokens 1000000000000", ["--kv-tokens is 1000000000000", "to 2147483647"]),
        ("--prefill 4 --kv-tokens 10", ["--kv-tokens is 10", "no decode rows", "@CONTEXT"]),
        ("--decodes 4 --loras 3", ["--loras is 3", "--max-loras 0", "raise --max-loras"]),
        ("--decodes 4 --loras -3", ["--loras is -3"]),
        ("--decodes 4 --max-loras 1000000000000", ["--max-loras is 1000000000000", "0 to 1024"]),
        ("--decodes 4 --steps-ahead 0", ["--steps-ahead is 0", "from 1"]),
        ("--decodes 4 --speculative -1", ["--speculative is -1", "from 0 to 255"]),
        ("--decodes 4 --speculative 1000000000000", ["--speculative is 1000000000000", "from 0 to 255"]),
        ("--decodes 4 --speculative 3 --max-num-tokens 2", ["max_num_tokens is 2", "one decode row of 4 tokens"]),
        ("--decodes 4 --max-num-reqs 0", ["--max-num-reqs is 0", "from 1 to 65536"]),
        ("--decodes 4 --max-num-reqs 1000000000000", ["--max-num-reqs is 1000000000000"]),
        ("--decodes 4 --ladder=", ["the ladder is empty", "the policy 'eager'"]),
        ("--decodes 4 --ladder 4,2,1", ["2 after 4", "Sorted: 1,2,4"]),
        ("--decodes 4 --ladder 2,2", ["2 after 2", "without repeats"]),
        ("--decodes 4 --ladder 0,2", ["the size 0", "from 1 up"]),
        ("--decodes 4 --ladder=-2,2", ["the size -2"]),
        ("--decodes 4 --ladder 1,2,x", ["--ladder is '1,2,x'", "1,2,4,8"]),
        ("--decodes 4 --ladder 1.5", ["--ladder is '1.5'"]),
        ("--decodes 4 --ladder 1,100000", ["ends at 100000", "8192 tokens one step may have"]),
        ("--decodes 4 --ladder 1,1000000000000", ["ends at 1000000000000", "8192"]),
        ("--decodes 4 --ladder 3,5 --speculative 2", ["size 5, not a multiple of 3", "Rounded up: 3,6"]),
        ("--decodes 4 --ladder 1,2,4 --budget-streams 6", ["over the budget of 6 streams", "Keep the sizes 1,4,"]),
        ("--decodes 4 --ladder 1 --budget-graphs 0", ["over the budget of 0 graphs", "or run eagerly"]),
        ("--decodes 4 --budget-graphs 200", ["122 graph keys", "over the budget of 200 graphs", "Keep the sizes"]),
        ("--decodes 4 --budget-graphs 1.5", ["--budget-graphs", "is '1.5'; it takes a whole number, such as 8"]),
        ("--decodes 4 --objective 1:2:3:4", ["objective is '1:2:3:4'", "STEP:GAP", "1:0:1.25"]),
        ("--decodes 4 --objective 1:0:0.5", ["first_token_limit is 0.5", "at least 1"]),
        ("--decodes 4 --objective 0:0", ["objective weights are 0 and 0", "one above it"]),
        ("--decodes 4 --objective -1:2", ["objective weights are -1 and 2"]),
        ("--decodes 4 --objective nan:1", ["objective weights are nan and 1", "finite"]),
        ("--decodes 4 --objective 1:inf", ["objective weights are 1 and inf", "finite"]),
        ("--decodes 4 --forbid full,piecewise,eager,split", ["no mode is left", "Allow eager"]),
        ("--decodes 4 --attention mla --policy full --strict", ["strict", "full -> eager", "Limited by: mla"]),
        ("--decodes 4 --json=maybe", ["--json", '"maybe"', "bool"]),
        ("--decodes 4 --no-strict", ["--no-strict", "--strict"]),
        ("--decodes 4 --decodes 5", ["--decodes", "multiple times"]),
        ("--decodes 4 --wat", ["--wat", "--help"]),
        ("32", ["doesn't take '32'"]),
    ],
)  # fmt: skip
def test_batches_that_can_not_be(kpolicy: Command, command: str, options: str, parts: list[str]) -> None:
    """Each count, ladder, budget or objective that can't be is named with its value and what is allowed."""
    refused(kpolicy(command, *filter(None, options.split(" "))), *parts)


def test_a_budget_without_an_executor_is_for_the_whole_ladder() -> None:
    """What is taken as captured can't be more than the budget admits."""
    with pytest.raises(BudgetRefused, match="over the budget of 5 graphs"):
        Engine("full", budget=Budget(graphs=5))
    assert Engine("eager", budget=Budget(graphs=0)).keys == ()


@pytest.mark.parametrize("name", LIMITS)
def test_limits_that_would_take_all_memory(name: str) -> None:
    """Each of Settings' limits has a most: tables are as long as it, so a mistyped one isn't taken."""
    least, most = LIMITS[name]
    assert getattr(Settings(**{"max_num_tokens": 1 << 20, name: most}), name) == most
    for value in (least - 1, most + 1, 10**12, True):
        with pytest.raises(ConfigError, match=f"{name} is {value}; .* at least {least} and at most {most}"):
            Settings(**{name: value})


# Files


PROFILE = {"schema": "kpolicy/profile", "version": [1, 0]}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (json.dumps({**PROFILE, "version": [2, 0]}), ["a profile of version 2.0", "reads 1.x", "Upgrade kpolicy"]),
        (json.dumps(PROFILE)[:-9], ["is cut short", "Write the file again"]),
        ("", ["p.json"]),
        (json.dumps({**PROFILE, "schema": "kpolicy/ladder_plan"}), ["'kpolicy/ladder_plan'", "'kpolicy/profile'"]),
        (json.dumps({"a": 1}), ["schema"]),
        (json.dumps([1]), ["p.json"]),
        (json.dumps(PROFILE), ["p.json", "costs"]),
        (json.dumps({**PROFILE, "costs": {"full": {"sizes": [1], "us": [-1]}}}), ["p.json", "costs"]),
    ],
)
@pytest.mark.parametrize("command", ["decide --decodes 4", "run"])
def test_profiles_that_can_not_be_used(
    kpolicy: Command, tmp_path: Path, command: str, text: str, parts: list[str]
) -> None:
    """A profile that is newer, cut short, of another kind or incomplete is named, with what is wanted."""
    (tmp_path / "p.json").write_text(text)
    refused(kpolicy(*command.split(" "), "--profile", tmp_path / "p.json"), str(tmp_path / "p.json"), *parts)


def test_profile_paths(kpolicy: Command, tmp_path: Path) -> None:
    """A missing file, a folder and bytes that aren't text are told apart."""
    refused(kpolicy("decide", "--decodes", 4, "--profile", tmp_path / "no.json"), "can't read", "No such file")
    refused(kpolicy("decide", "--decodes", 4, "--profile", tmp_path), "can't read", "Is a directory")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    refused(kpolicy("decide", "--decodes", 4, "--profile", tmp_path / "bytes"), str(tmp_path / "bytes"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (json.dumps({"model_type": "fancynet"}), ["model_type 'fancynet'", "gdn+gqa", "register_architecture"]),
        ('{"model_type": "llama"', ["isn't JSON", "download complete?"]),
        ("[]", ["not an object"]),
        ("{}", ["model_type"]),
        (json.dumps({"model_type": "llama"}), ["num_attention_heads"]),
        (json.dumps({"model_type": "llama", "num_attention_heads": -2, "num_hidden_layers": 2}), ["-2"]),
    ],
)
def test_model_configs_that_can_not_be_used(kpolicy: Command, tmp_path: Path, text: str, parts: list[str]) -> None:
    """A config that is cut short, of an unknown architecture or without its fields says what to do."""
    (tmp_path / "config.json").write_text(text)
    refused(kpolicy("decide", "--decodes", 4, "--config", tmp_path / "config.json"), *parts)


def test_config_paths(kpolicy: Command, tmp_path: Path) -> None:
    """A config that isn't there is an error that says what to give."""
    refused(kpolicy("decide", "--decodes", 4, "--config", tmp_path / "no.json"), "no model config", "config.json")
    refused(kpolicy("decide", "--decodes", 4, "--config", tmp_path), "no model config", "config.json")


# Plugins


Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with one policy and one module on the import path."""
    monkeypatch.syspath_prepend(tmp_path)

    def _install(name: str, module: str, text: str) -> None:
        info = tmp_path / f"{name}_dist-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kpolicy.policies]\n{name} = {module}:Made\n")
        (tmp_path / f"{module}.py").write_text(text)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return _install


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("raise RuntimeError('no licence')", ["raised when loaded: RuntimeError: no licence"]),
        ("import sys; sys.exit(3)", ["raised when loaded: SystemExit: 3"]),
        ("def Made(): raise OSError('no card')", ["raised when made: OSError: no card", "uninstall"]),
        ("def Made(): return 4", ["made 4", "lacks part of the Policy protocol"]),
        ("def Made(size): return 4", ["can't be made with no arguments", "size"]),
    ],
)
def test_broken_plugins(kpolicy: Command, install: Install, text: str, parts: list[str]) -> None:
    """A plugin that raises when loaded or made, or makes something else, is one named error."""
    install("rotten", "fake_cli_rotten", text)
    refused(kpolicy("decide", "--decodes", 4, "--policy", "rotten"), "rotten", *parts)


def test_a_name_of_two_plugins(kpolicy: Command, install: Install, tmp_path: Path) -> None:
    """A policy that two packages register is refused, naming both."""
    install("twice", "fake_cli_one", "Made = None")
    install("other", "fake_cli_two", "Made = None")
    (tmp_path / "other_dist-1.0.dist-info" / "entry_points.txt").write_text(
        "[kpolicy.policies]\ntwice = fake_cli_two:Made\n"
    )
    ended = kpolicy("decide", "--decodes", 4, "--policy", "twice")
    refused(ended, "twice-dist (fake_cli_one:Made)", "other-dist (fake_cli_two:Made)", "uninstall one of them")


# A real process


@pytest.mark.parametrize(
    "arguments", ["run --policy autoo", "decide --decodes 0", "run --trace /nowhere.csv", "explain", "polices"]
)
def test_in_a_process_of_its_own(arguments: str) -> None:
    """`python -m kpolicy` ends likewise: code 2, one line of error, no traceback, nothing on standard output."""
    ran = subprocess.run(
        [sys.executable, "-m", "kpolicy", *arguments.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    refused(Ended(ran.returncode, ran.stdout, ran.stderr))
