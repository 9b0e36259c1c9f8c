"""`kpolicy plan`: what it prints and writes."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kpolicy.schemas import read_plan
from tests.cli.conftest import Command, write

ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
}  # fmt: skip


def planned(kpolicy: Command, trace: Path, *arguments: object) -> Any:
    """What ``--json`` says."""
    ended = kpolicy("plan", trace, "--json", *arguments)
    assert ended.code == 0, ended
    return ended.json


def test_it_says_what_a_person_needs(kpolicy: Command, trace: Path) -> None:
    """The lists, the price of one more size, every engine's default list and the second half's score."""
    ended = kpolicy("plan", trace, "--budget", "4", "--max-num-reqs", 16)
    assert (ended.code, ended.err) == (0, "")
    for part in (
        "until the plan settled", "budget   4 sizes", "decode   ", "(requests)", "prefill  ", "(tokens)",
        "one more takes off, us", "* ", "vLLM 0.23", "vLLM 0.33", "SGLang 0.5.23", "TensorRT-LLM", "vLLM-Ascend",
        "nano-vLLM", "default of auto", "out of sample: planned on the first half", "price of one more size",
        "not measured on your device",
    ):  # fmt: skip
        assert part in ended.out, part
    assert not any(line.endswith(" ") for line in ended.out.splitlines())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "none: sizes while one more takes 0.1% off the mean step"),
        (("--worth", 0.05), "none: sizes while one more takes 5% off the mean step"),
        (("--worth", 0), "none: sizes while one more helps"),
        (("--budget", 4, "--worth", 0.0005), "4 sizes, sizes while one more takes 0.05% off the mean step"),
    ],
)
def test_where_sizes_end_is_told_as_it_was_asked(
    kpolicy: Command, trace: Path, options: tuple[object, ...], said: str
) -> None:
    """By the budget, by --worth, or by what that is where neither was given."""
    ended = kpolicy("plan", trace, "--max-num-reqs", 16, *options)
    assert f"budget   {said}\n" in ended.out


def test_the_share_that_is_told_is_the_one_that_sizes_ended_by(
    kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One place has the default: with another there, both the sizes and what is printed are another."""
    asked = kpolicy("plan", trace, "--max-num-reqs", 16, "--worth", 0.05).out
    monkeypatch.setattr(import_module("kpolicy.planning.plan"), "WORTH", 0.05)
    assert kpolicy("plan", trace, "--max-num-reqs", 16).out == asked
    assert "5% off the mean step" in asked


def test_what_more_sizes_than_the_budget_would_save_is_told_as_far_as_it_is_known(
    kpolicy: Command, trace: Path
) -> None:
    """Of one over the budget the step is known, and what a further one would take off isn't said to be nothing."""
    given = ("plan", trace, "--budget", "4", "--emit", "tensorrt-llm", "--max-num-reqs", 16)
    out = kpolicy(*given).out
    assert re.search(r"^ *\* 4 +[\d.,]+ +[\d.,]+ +[\d.]+%\n +5 +[\d.,]+ +- +-$", out, re.M), out
    assert re.search(r"^default of tensorrt_llm +\d", out, re.M)
    out = kpolicy("plan", trace, "--emit", "tensorrt-llm", "--max-num-reqs", 2, "--max-num-tokens", 16).out
    assert re.search(r"^ *\* 2 +[\d.,]+ +0\.0 +0\.000%$", out, re.M), "no third size helps, which is known"


def test_json(kpolicy: Command, trace: Path) -> None:
    """All of it as one value, and the same bytes each time."""
    found = planned(kpolicy, trace, "--budget", "5", "--policy", "vllm", "--max-num-reqs", 16)
    assert found["num_sizes"] == len(found["lists"]["all"]) <= 5
    assert found["budget"] == {"sizes": 5}
    assert found["sizes"]["piecewise"] == found["lists"]["all"]
    assert found["held_out"]["num_sizes"] <= 5
    names = [score["name"] for score in found["scores"]]
    assert names[:2] == ["the plan", "default of vllm"]
    assert found["curve_us"] == sorted(found["curve_us"], reverse=True)
    assert found["emit"] is None
    assert found == planned(kpolicy, trace, "--budget", "5", "--policy", "vllm", "--max-num-reqs", 16)


@pytest.mark.parametrize(
    ("budget", "limits"),
    [
        ("3", {"sizes": 3}),
        ("2.5s", {"seconds": 2.5}),
        ("40MiB", {"bytes": 40 << 20}),
        ("1GiB,7 sizes", {"bytes": 1 << 30, "sizes": 7}),
        ("0.5GB", {"bytes": 500_000_000}),
        ("6streams,200graphs", {"streams": 6, "graphs": 200}),
    ],
)
def test_budgets(kpolicy: Command, trace: Path, budget: str, limits: dict[str, float]) -> None:
    """Sizes, seconds, memory, streams and device graphs, and several at once; the plan keeps all of them."""
    found = planned(kpolicy, trace, "--budget", budget)
    assert found["budget"] == limits
    usage = found["scores"][0]["usage"]
    for name, limit in limits.items():
        assert (found["num_sizes"] if name == "sizes" else usage[name]) <= limit


@pytest.mark.parametrize(
    ("engine", "policy", "flag"),
    [
        ("vllm", "vllm", "--compilation-config"),
        ("sglang", "sglang", "--cuda-graph-bs-decode"),
        ("vllm-ascend", "ascend", "--compilation-config"),
        ("tensorrt-llm", "tensorrt_llm:enable_padding=true,prefill=breakable", '"cuda_graph_config"'),
    ],
)
def test_emit(kpolicy: Command, trace: Path, tmp_path: Path, engine: str, policy: str, flag: str) -> None:
    """An engine's flags are planned for its own rule, printed whole on lines of their own, and written to a file."""
    out = tmp_path / "flags"
    ended = kpolicy("plan", trace, "--emit", engine, "--budget", 6, "--out", out)
    assert ended.code == 0, ended
    assert f"setting  {policy}," in ended.out
    assert flag in ended.out
    assert out.read_text().rstrip("\n") in ended.out
    assert f"written to {out}" in ended.out
    found = planned(kpolicy, trace, "--emit", engine, "--budget", 6)["emit"]
    assert out.read_text().rstrip("\n") == (found["file"] or shlex.join(found["arguments"]))


@pytest.mark.parametrize(
    ("engine", "list_of", "limit"),
    [
        ("vllm", "all", "--max-num-batched-tokens"),
        ("vllm-ascend", "all", "--max-num-batched-tokens"),
        ("sglang", "prefill", "--chunked-prefill-size"),
        ("tensorrt-llm", "prefill", "max_num_tokens"),
    ],
)
def test_what_runs_eagerly_above_the_list_is_told(
    kpolicy: Command, trace: Path, engine: str, list_of: str, limit: str
) -> None:
    """Steps that a list ends before come with a warning; what it advises is what ends the warning."""
    given = ("plan", trace, "--emit", engine, "--budget", 8, "--max-num-tokens", 2048)
    out = kpolicy(*given, "--largest", f"{list_of}=512").out
    assert f"513 to 2048 tokens run eagerly: the list ends at 512, and {limit} is 2048. To avoid that, add 2048" in out
    (advised,) = re.findall(rf"tokens run eagerly.*plan with (--largest) ({list_of}=2048)\)", out)
    ended = kpolicy(*given, *advised)
    assert ended.code == 0, ended
    assert "2048 tokens run eagerly" not in ended.out


def test_advice_keeps_to_the_multiples_that_were_asked_for(kpolicy: Command, trace: Path) -> None:
    """With --multiple-of a warning names no other size, and with what it advises there is none."""
    given = ("plan", trace, "--emit", "vllm", "--multiple-of", 7, "--budget", 6)
    out = kpolicy(*given, "--max-num-tokens", 256, "--max-num-reqs", 256, "--largest", "all=126").out
    assert "127 to 256 requests run eagerly. To avoid that, add 252 to the list and lower --max-num-seqs to 252" in out
    assert "steps of 127 to 256 tokens run eagerly: the list ends at 126" in out
    assert not re.search(r"add (?!252)\d+ to the list", out), out
    ended = kpolicy(*given, "--max-num-tokens", 252, "--max-num-reqs", 252, "--largest", "all=252")
    assert ended.code == 0, ended
    assert "warning" not in ended.out


def test_drafts_must_be_asked_for_in_the_engine_too(kpolicy: Command, trace: Path) -> None:
    """The flags are for rows with drafts, and don't make vLLM draft."""
    out = kpolicy("plan", trace, "--emit", "vllm", "--speculative", 3, "--budget", 5).out
    assert 'give --speculative-config too, with "num_speculative_tokens": 3' in out


def test_a_plan_file_runs(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """The plan file says where it is from, and `run` captures its sizes and no other."""
    out = tmp_path / "plan.json"
    ended = kpolicy("plan", trace, "--policy", "full_and_piecewise", "--budget", "3,90s", "--out", out)
    assert ended.code == 0, ended
    plan = read_plan(out)
    assert plan.policy == "full_and_piecewise"
    assert plan.budget.seconds == 90.0
    assert str(trace) in plan.planned_from["trace"]
    assert plan.planned_from["histogram"]["decodes"]["1"]
    assert plan.planned_from["command"].startswith("kpolicy plan")
    ran = kpolicy("run", "--trace", trace, "--policy", "full_and_piecewise", "--ladder", out, "--json")
    assert ran.code == 0, ran
    (policy,) = ran.json["policies"]
    assert policy["graphs"] == len(plan.keys)
    explained = kpolicy(
        "explain", "--decodes", 2, "--ladder", out, "--policy", "full_and_piecewise", "--max-num-tokens", 2048
    )
    assert str(plan.sizes.decode[0]) in explained.out
    out.rename(tmp_path / "plan.of-mine")
    other = kpolicy("explain", "--decodes", 2, "--ladder", tmp_path / "plan.of-mine", "--max-num-tokens", 2048)
    assert other.code == 0, other


def test_emit_json_prints_the_plan_file(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """``--emit json`` prints what ``--out`` writes, apart from the command that is in it."""
    ended = kpolicy("plan", trace, "--budget", 3, "--emit", "json")
    printed = json.loads(ended.out[ended.out.index("\n{") :])
    kpolicy("plan", trace, "--budget", 3, "--out", tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert printed["schema"] == "kpolicy/ladder_plan"
    for each in (printed, written):
        each["planned_from"].pop("command")
    assert printed == written


def test_drafts_and_alignment(kpolicy: Command, trace: Path) -> None:
    """Sizes are whole decode rows with drafts, and multiples of what is asked."""
    found = planned(kpolicy, trace, "--emit", "vllm", "--speculative", 3, "--budget", 5)
    assert all(size % 4 == 0 for size in found["lists"]["all"])
    found = planned(kpolicy, trace, "--policy", "sglang", "--multiple-of", 8, "--budget", 6)
    assert all(size % 8 == 0 for sizes in found["lists"].values() for size in sizes)
    found = planned(kpolicy, trace, "--policy", "sglang", "--largest", "decode=100,prefill=640", "--budget", 6)
    assert (found["lists"]["decode"][-1], found["lists"]["prefill"][-1]) == (100, 640)
    # Fewer sizes than those two can't be.
    assert found["curve_us"][:2] == [None, None]
    ended = kpolicy("plan", trace, "--policy", "sglang", "--largest", "decode=100,prefill=640", "--budget", 2)
    assert "* 2" in ended.out
    assert "inf" not in ended.out


def test_costs_of_a_config(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """With a model's config.json, analytic costs are that model's."""
    config = write(tmp_path / "config.json", json.dumps(ARCHITECTURE))
    assert "llama" in planned(kpolicy, trace, "--config", config, "--budget", 3)["costs"]
    kpolicy("plan", trace, "--config", config, "--budget", 3, "--out", tmp_path / "plan.json")
    model = read_plan(tmp_path / "plan.json").planned_from["model"]
    assert model["model_type"] == "llama"
    assert model == {name: ARCHITECTURE[name] for name in model}


def test_a_ladder_of_another_model_is_told(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Whoever knows the model says it and takes the sizes; nothing is said of the plan's own, or without a config."""
    own = write(tmp_path / "own.json", json.dumps(ARCHITECTURE))
    other = write(tmp_path / "other.json", json.dumps({**ARCHITECTURE, "hidden_size": 4096}))
    plan, log = tmp_path / "plan.json", tmp_path / "decisions.jsonl"
    kpolicy("plan", trace, "--config", own, "--budget", 3, "--max-num-tokens", 2048, "--out", plan)
    commands: list[tuple[object, ...]] = [
        ("simulate", trace, "--policy", "auto", "--decision-log", log),
        ("simulate", "--decisions", log, "--policy", "auto"),
        ("sweep", trace, "--policy", "auto", "--jobs", 1, "--out", tmp_path / "s.jsonl"),
        ("run", "--trace", trace, "--policy", "auto"),
        ("decide", "--decodes", 2, "--max-num-tokens", 2048),
        ("explain", "--decodes", 2, "--max-num-tokens", 2048),
        ("report", trace, "--policy", "auto", "--out", tmp_path / "r.html"),
    ]
    for command in commands:
        ladder: tuple[object, ...] = (*command, "--ladder", plan)
        for config, told in ((None, 0), (own, 0), (other, 1)):
            ended = kpolicy(*ladder, *(() if config is None else ("--config", config)))
            assert ended.code == 0, (command, ended)
            said = "--ladder {} was made for another model: hidden_size 2048 and not 4096; its sizes are taken"
            assert ended.err.count(said.format(plan)) == told, (command, ended)
            (tmp_path / "s.jsonl").unlink(missing_ok=True)


def test_one_request(kpolicy: Command, tmp_path: Path) -> None:
    """A trace of one request is planned, and says that nothing was held out."""
    one = write(tmp_path / "one.csv", "timestamp,input_length,output_length", "0,30,12")
    ended = kpolicy("plan", one, "--budget", 2)
    assert ended.code == 0, ended
    assert "out of sample: not scored" in ended.out


def test_help(kpolicy: Command) -> None:
    """Every option is said in one line or two."""
    ended = kpolicy("plan", "--help")
    assert ended.code == 0
    for option in ("--budget", "--policy", "--emit", "--out", "--largest", "--multiple-of", "--smoothing", "--exact"):
        assert option in ended.out


def test_no_step_slower_than_with_anothers_list(kpolicy: Command, trace: Path) -> None:
    """--against runs to its end, the second half's score included: every step's graph is as near as SGLang's."""
    given = ("--policy", "sglang", "--max-num-reqs", 16, "--max-num-tokens", 256, "--most-loss", 0)
    own, theirs = (planned(kpolicy, trace, *given, *more) for more in ((), ("--against", "sglang")))
    assert theirs["num_sizes"] < own["num_sizes"]
    assert theirs["held_out"]["num_sizes"] <= theirs["num_sizes"]
