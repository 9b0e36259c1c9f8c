"""What `kpolicy plan` refuses: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import attrs
import pytest

from kpolicy.costs import analytic_costs
from kpolicy.planning import Histogram
from kpolicy.schemas import Profile, write_profile
from tests.cli.conftest import Command, write
from tests.cli.test_bad_input import refused
from tests.cli.test_plan import ARCHITECTURE

HEADER = "timestamp,input_length,output_length"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--budget ten", ["--budget has 'ten'", "capture sizes (40), seconds (30s)"]),
        ("--budget 10secs", ["--budget has '10secs'"]),
        ("--budget 10gibs", ["Did you mean gib?"]),
        ("--budget 1.5", ["sizes are whole numbers"]),
        ("--budget -3", ["--budget", "'-3'"]),
        ("--budget 3,4", ["limits sizes twice"]),
        ("--budget 1GiB --budget-bytes 5", ["--budget and --budget-bytes both limit bytes"]),
        ("--budget 1B --largest decode=8", ["(decode 8) don't fit the budget of 1 byte", "Raise the budget"]),
        ("--budget 1 --largest decode=8,prefill=64", ["(decode 8, prefill 64) don't fit the budget of 1 size. Raise"]),
        ("--budget 0", ["no capture size fits the budget of 0 sizes", "run eagerly"]),
        ("--budget 1B", ["no capture size fits the budget of 1 byte: the least that one takes is 1 graph"]),
        ("--budget 0.0001s", ["no capture size fits the budget of"]),
        ("--budget 30graphs --policy piecewise", ["no capture size fits the budget of 30 graphs"]),
        ("--emit vlm", ["unknown format of --emit 'vlm'", "did you mean 'vllm'?", "json, sglang"]),
        ("--policy vlm", ["unknown policy 'vlm'", "did you mean 'vllm'?"]),
        ("--policy eager", ["captures nothing here"]),
        ("--largest decode", ["--largest has 'decode'", "LIST=SIZE"]),
        ("--largest prefil=8", ["largest names the list 'prefil'", "decode, prefill"]),
        ("--largest decode=999", ["largest size 999 isn't a candidate", "from 1 to 256"]),
        ("--multiple-of 0", ["--multiple-of is 0"]),
        ("--multiple-of 4096 --policy sglang", ["multiple of 4096"]),
        ("--smoothing 1", ["--smoothing is 1"]),
        ("--worth 2", ["--worth is 2"]),
        ("--most-loss -1", ["--most-loss has '-1'", "decode=0.01,prefill=0.05"]),
        ("--most-loss decode=x", ["--most-loss has 'decode=x'"]),
        ("--most-loss 0.1,decode=0.1", ["--most-loss has 'decode=0.1'"]),
        ("--most-loss decoed=0.1", ["most_loss names the list 'decoed'", "decode, prefill"]),
        ("--against sglang", ["--against says what --most-loss compares with", "--most-loss 0"]),
        ("--most-loss 0 --against sglnag", ["'sglnag'", "sglang"]),
        ("--most-loss 0 --profile qwen2.5-0.5b-h200", ["no plan of up to 420 sizes", "Allow more loss"]),
        ("--most-loss 0 --against eager", ["'eager' captures nothing to compare with", "sglang"]),
        ("--most-loss 0.01 --budget 1", ["1 size can't keep every step as near", "it takes"]),
        ("--ladder 1,2,4", ["--ladder is what plan looks for"]),
        ("--window -1", ["--window is -1"]),
        ("--rate 0", ["--rate is 0"]),
        ("--max-num-tokens 0", ["--max-num-tokens is 0"]),
        ("--kv-tokens 0", ["--kv-tokens is 0"]),
        ("--ranks 2", ["2 ranks were asked for", "the steps of one rank"]),
        ("--warm", ["--warm says nothing here"]),
        ("--slo-ttft-ms 500", ["--slo-ttft-ms has no say", "`kpolicy report`"]),
        ("--slo-gap-ms 5", ["--slo-gap-ms has no say"]),
        ("--device H2000", ["'H2000'", "H200"]),
        ("--tables aiconfigurator", ["--tables needs --config"]),
        ("--speculative 3000", ["--speculative is 3000"]),
        ("--speculative 2 --acceptance 1.5", ["--acceptance is 1.5"]),
        ("--attention mlaa", ["did you mean 'mla'?"]),
    ],
)
def test_options(kpolicy: Command, trace: Path, arguments: str, parts: list[str]) -> None:
    """An option that can't be used is named, with its value and what it takes."""
    refused(kpolicy("plan", trace, *arguments.split(" ")), *parts)


def test_traces(kpolicy: Command, tmp_path: Path) -> None:
    """Unknown columns, times that go back, a file that is cut short and one with nothing to serve."""
    unknown = write(tmp_path / "unknown.csv", "when,tokens", "1,2")
    refused(kpolicy("plan", unknown), "unknown columns", "found: when, tokens")
    unsorted = write(tmp_path / "unsorted.csv", HEADER, "5,8,8", "4,8,8")
    refused(kpolicy("plan", unsorted), "line 3", "goes back from 5 to 4")
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress("\n".join([HEADER, *(f"{i},8,8" for i in range(500))]).encode())[:-40])
    refused(kpolicy("plan", cut), "gzip data is cut short")
    failed = write(tmp_path / "failed.csv", HEADER, "1,0,0")
    refused(kpolicy("plan", failed), "has no request to serve", "zero", "Choose another trace.")
    one = write(tmp_path / "one.csv", HEADER, "1,8,8")
    for window, asked in ((300, "in the 300 s from second 5"), (0, "from second 5 on")):
        ended = kpolicy("plan", one, "--start", 5, "--window", window)
        refused(ended, f"no request arrives {asked} of {one}; its last one arrives at second 0.0")
    refused(kpolicy("plan", tmp_path / "none.csv"), "no such file")


def test_requests_that_never_fit(kpolicy: Command, tmp_path: Path) -> None:
    """A trace of prompts that no KV holds makes no step to plan for; a prompt of a million is no trouble else."""
    long = write(tmp_path / "long.csv", HEADER, "0,1000000,5", "1,1000000,5")
    refused(kpolicy("plan", long), "no request of", "there are no steps to plan for: 2 over_kv_capacity")
    early = write(tmp_path / "early.csv", HEADER, "0,1000000,5", "1,20,5")
    ended = kpolicy("plan", early, "--budget", 2)
    assert ended.code == 0, ended
    assert "isn't scored out of sample: no request of the first half was served" in " ".join(ended.out.split())
    assert "there is one request" not in ended.out
    one = write(tmp_path / "one.csv", HEADER, "1,20,5")
    assert "out of sample: not scored, because there is one request" in kpolicy("plan", one, "--budget", 2).out
    mixed = write(tmp_path / "mixed.csv", HEADER, "0,1000000,5", "1,20,5", "1,30,5", "2,10,6")
    ended = kpolicy("plan", mixed, "--budget", 2)
    assert ended.code == 0, ended
    assert "requests that made no steps: 1 over_kv_capacity" in ended.out


def test_rows_that_are_dropped(kpolicy: Command, tmp_path: Path) -> None:
    """Rows without tokens are left out and counted; equal times are no trouble."""
    rows = write(tmp_path / "rows.csv", HEADER, "0,20,5", "0,20,5", "0,0,4", "1,9,0", "1,30,5")
    ended = kpolicy("plan", rows, "--budget", 2)
    assert ended.code == 0, ended
    assert "3 requests; rows dropped: 1 zero_prompt_tokens, 1 zero_output_tokens" in ended.out


def test_a_profile_of_another_model(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """A profile that was measured with another model than the config's is refused; the right one is taken."""
    config = write(tmp_path / "config.json", json.dumps(ARCHITECTURE))
    costs = attrs.evolve(analytic_costs(), measured=True, version="measured-1")
    other, right = tmp_path / "other.json", tmp_path / "right.json"
    write_profile(
        other, Profile(costs=costs, device="a device", model="Qwen3ForCausalLM of 1498.0 M parameters, bfloat16")
    )
    write_profile(
        right, Profile(costs=costs, device="a device", model="LlamaForCausalLM of 1235.8 M parameters, bfloat16")
    )
    refused(
        kpolicy("plan", trace, "--profile", other, "--config", config),
        "was measured with Qwen3ForCausalLM of 1498.0 M", "LlamaForCausalLM",
    )  # fmt: skip
    ended = kpolicy("plan", trace, "--profile", right, "--config", config, "--budget", 2)
    assert ended.code == 0, ended
    assert "costs    measured-1\n" in ended.out
    refused(kpolicy("plan", trace, "--profile", config), "schema is None")


def test_interrupted(kpolicy: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a trace isn't planned for: an interrupt ends the command, and nothing is written."""
    add, calls = Histogram.add, []

    def interrupting(self: Histogram, *arguments: object, **rest: object) -> None:
        calls.append(self)
        if len(calls) == 50:
            raise KeyboardInterrupt
        add(self, *arguments, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Histogram, "add", interrupting)
    ended = kpolicy("plan", trace, "--out", tmp_path / "plan.json")
    assert (ended.code, ended.out) == (130, "")
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("emitted", [[], ["--emit", "vllm"], ["--emit", "json"]])
def test_output_that_cannot_be_written(kpolicy: Command, trace: Path, tmp_path: Path, emitted: list[str]) -> None:
    """A path in no folder is refused, and no half of a file is left."""
    out = tmp_path / "missing" / "plan.json"
    refused(
        kpolicy("plan", trace, "--budget", 2, "--out", out, *emitted), f"--out {out}: there is no folder {out.parent}"
    )
    assert not out.parent.exists()
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(
        kpolicy("plan", trace, "--budget", 2, "--out", folder, *emitted), f"--out {folder} is a folder", "plan.json"
    )
    assert not list(folder.iterdir())


def test_a_plan_for_other_drafts(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """A plan file is refused where rows draft otherwise than planned, and a file that is none by its kind."""
    out = tmp_path / "plan.json"
    assert kpolicy("plan", trace, "--budget", 2, "--out", out).code == 0
    refused(
        kpolicy("decide", "--decodes", 2, "--speculative", 1, "--ladder", out),
        "planned for 0 draft tokens",
        "here are 1",
    )
    config = write(tmp_path / "config.json", "{}")
    refused(kpolicy("decide", "--decodes", 2, "--ladder", config), "schema is None", "another kind of file")
