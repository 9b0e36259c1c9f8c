"""`kpolicy simulate`: what it prints and writes, and what it says of bad input."""

from __future__ import annotations

import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy.costs import analytic_costs
from kpolicy.schemas import Profile, read_decision_log, read_step_log, write_profile
from kpolicy.simulate import Server, simulate
from kpolicy.simulate.aiconfigurator import aiconfigurator_costs
from tests.cli.conftest import Command, write
from tests.cli.test_bad_input import refused
from tests.fakes.aiconfigurator import install
from tests.observe.processor import find_processor, query

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path / "config.json", json.dumps(LLAMA_8B))


def profile_of(path: Path, model: str, kv_bytes_per_token: int | None = None) -> Path:
    costs = attrs.evolve(analytic_costs(), version="measured somewhere", measured=True)
    write_profile(path, Profile(costs=costs, device="A device", model=model, kv_bytes_per_token=kv_bytes_per_token))
    return path


def test_it_compares_policies_on_the_same_arrivals(kpolicy: Command, trace: Path) -> None:
    """A table with latencies, bounds, modes and reasons; every request is served by each policy."""
    ended = kpolicy("simulate", trace, "--policy", "auto", "--policy", "eager", "--slo-ttft-ms", 1000, "--warm")
    assert ended.code == 0, ended.err
    for part in (
        "TTFT ms",
        "whole s",
        "good /s",
        "device-bound",
        "host-bound",
        "policy_is_eager",
        "nothing was measured",
    ):
        assert part in ended.out
    assert ended.out.count("    40  ") >= 2


def test_json_is_the_library_result(kpolicy: Command, trace: Path) -> None:
    """``--json`` holds what `simulate` returns, and twice the same."""
    ended = kpolicy("simulate", trace, "--policy", "vllm", "--json", "--rate", 3)
    assert ended.code == 0, ended.err
    assert kpolicy("simulate", trace, "--policy", "vllm", "--json", "--rate", 3).out == ended.out
    (one,) = ended.json["traces"]
    from kpolicy.scheduling.traces import read_trace

    expected = simulate(read_trace(trace).scaled(3), "vllm", server=Server(), attention="gqa")
    assert one["policies"] == [json.loads(json.dumps(expected.as_dict()))]
    assert (one["requests"], one["dropped"]) == (40, {})
    setting = ended.json["setting"]
    assert (setting["measured"], setting["objective"], setting["first_token_limit"]) == (False, "throughput", 1.0)
    other = kpolicy("simulate", trace, "--policy", "vllm", "--json", "--objective", "1:0:1.25").json["setting"]
    assert (other["objective"], other["first_token_limit"]) == ("1:0:1.25", 1.25)


def test_only_a_service_level_has_good_requests(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Without one the column is a dash and its figures are null in JSON, as nothing was asked of a request."""
    page = tmp_path / "r.html"
    figures = ("good", "share", "per_s")
    for given in (("simulate", trace), ("sweep", trace, "--jobs", 1), ("report", trace, "--out", page)):
        for level, more in ((None, ()), (9000.0, ("--slo-ttft-ms", 9000))):
            told = kpolicy(*given, "--policy", "vllm", "--window", 0, *more, "--json").json
            (of_trace,) = told["cases"] if "cases" in told else told["traces"]
            result = of_trace["result"] if "result" in of_trace else (of_trace.get("policies") or of_trace["runs"])[0]
            goodput = result["goodput"]
            assert (goodput["ttft_ms"], goodput["gap_ms"]) == (level, None), given
            assert [goodput[name] is None for name in figures] == [level is None] * 3, given
            if given[0] == "report":
                assert ("good requests" in page.read_text()) is (level is not None)
                continue
            shown = kpolicy(*given, "--policy", "vllm", *more).out.splitlines()
            head = next(i for i, line in enumerate(shown) if "good /s" in line)
            cells = re.split(" {2,}", shown[head + 1])
            good = cells[-1] if given[0] == "simulate" else cells[-4]
            assert (good == "-") is (level is None), shown


def test_waiting_for_captures_is_told(kpolicy: Command, trace: Path) -> None:
    """Times to first tokens are otherwise taken for the policy's; of a warm server nothing is said."""
    for command in ("simulate", "sweep"):
        found = []
        for more in ((), ("--warm",)):
            ended = kpolicy(command, trace, "--policy", "vllm", *more)
            assert ended.code == 0, ended.err
            found.append("the first request waited" in ended.out and "(--warm: graphs are there" in ended.out)
        assert found == [True, False], command


def test_clients_that_are_too_few_for_the_rate_are_told(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """By whatever command simulates; for those who come with an answer another rate says nothing."""
    page = tmp_path / "r.html"
    told = "of the requests came up to"
    for given in (
        ("simulate", trace, "--policy", "eager", "--warm"),
        ("plan", trace, "--max-num-reqs", 16, "--budget", 2),
        ("report", trace, "--policy", "eager", "--out", page),
    ):
        found = []
        for clients in (1, 1000):
            ended = kpolicy(*given, "--rate", 9, "--concurrency", clients)
            assert ended.code == 0, ended.err
            found.append(told in (page.read_text() if given[0] == "report" else " ".join(ended.out.split())))
        assert found == [True, False], given


def test_files_are_written_for_each_policy_and_trace(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Result, step logs, decision logs and Perfetto traces, with names that tell them apart; logs read back."""
    pytest.importorskip("perfetto")
    other = tmp_path / "other.csv"
    other.write_text(trace.read_text())
    ended = kpolicy(
        "simulate", trace, other, "--policy", "auto", "--policy", "eager", "--out", tmp_path / "r.json",
        "--step-log", tmp_path / "s.jsonl", "--decision-log", tmp_path / "d.jsonl", "--perfetto", tmp_path / "p.pf",
        "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "r.json").read_text()) == ended.json
    for i, name in enumerate(("trace", "other")):
        for j, policy in enumerate(("auto", "eager")):
            steps = read_step_log(tmp_path / f"s-{name}-{policy}.jsonl")
            assert not steps.cut_short
            result = ended.json["traces"][i]["policies"][j]
            assert len(steps.entries) == result["steps"]
            assert sum(entry.cycle_us or 0 for entry in steps.entries) == pytest.approx(result["step_us"])
            decisions = read_decision_log(tmp_path / f"d-{name}-{policy}.jsonl")
            assert [each.reason for each in decisions.entries] == [each.reason for each in steps.entries]
            assert (tmp_path / f"p-{name}-{policy}.pf").stat().st_size > 1000


def test_perfettos_own_processor_finds_every_step(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """A slice a step on the host, with its mode, and starts that are the simulated clock's."""
    pytest.importorskip("perfetto")
    processor = find_processor()
    if processor is None:
        pytest.skip("no Perfetto trace processor here")
    path = tmp_path / "p.pftrace"
    ended = kpolicy(
        "simulate", trace, "--policy", "auto", "--warm", "--perfetto", path, "--step-log", tmp_path / "s", "--json"
    )
    assert ended.code == 0, ended.err
    (result,) = ended.json["traces"][0]["policies"]
    by_mode, (whole,) = query(
        processor,
        path,
        [
            "SELECT name, COUNT(*) AS steps FROM slice WHERE category = 'step' GROUP BY name",
            "SELECT MAX(ts + dur) - MIN(ts) AS ns FROM slice WHERE category = 'step'",
        ],
    )
    assert {row["name"]: int(row["steps"]) for row in by_mode} == {
        mode: each["steps"] for mode, each in result["modes"].items()
    }
    assert int(whole["ns"]) == pytest.approx(result["span_s"] * 1e9, rel=1e-3)


def test_a_config_on_a_device_has_its_own_costs_and_room(kpolicy: Command, trace: Path, config: Path) -> None:
    """KV is what the device has beside the weights, and another device has other costs."""
    by_device = {}
    for device in ("H200", "a100", "ascend-910b", "Kunlun P800"):
        ended = kpolicy("simulate", trace, "--policy", "vllm", "--config", config, "--device", device, "--json")
        assert ended.code == 0, ended.err
        by_device[device] = ended.json
    room = {device: each["setting"]["server"]["kv_tokens"] for device, each in by_device.items()}
    assert room["H200"] > room["Kunlun P800"] > room["a100"] > room["ascend-910b"] > 100_000
    gaps = {device: each["traces"][0]["policies"][0]["gap"]["p50"] for device, each in by_device.items()}
    assert gaps["H200"] < gaps["a100"] < gaps["ascend-910b"]
    for found in by_device.values():
        assert "these figures are unverified: " in found["setting"]["notes"][0]
    assert "isn't published" in by_device["Kunlun P800"]["setting"]["notes"][0]


def test_a_profile_is_taken_and_one_of_another_model_isnt(
    kpolicy: Command, trace: Path, config: Path, tmp_path: Path
) -> None:
    """Measured costs are said to be measured; a profile that names another model than the config is an error."""
    own = profile_of(tmp_path / "own.json", "LlamaForCausalLM of 8030.3 M parameters, bfloat16")
    ended = kpolicy("simulate", trace, "--policy", "auto", "--profile", own, "--config", config, "--json")
    assert ended.code == 0, ended.err
    assert ended.json["setting"]["measured"] is True
    assert set(ended.json["traces"][0]["policies"][0]["reasons"]) <= {"cheapest_measured", "eager_is_cheaper"}
    for model in ("Qwen3ForCausalLM of 8030.3 M parameters, bfloat16", "LlamaForCausalLM of 70553.7 M parameters, x"):
        other = profile_of(tmp_path / "other.json", model)
        refused(kpolicy("simulate", trace, "--profile", other, "--config", config), str(other), model.split()[0])


def test_whether_a_profile_is_of_a_model_whose_weights_arent_known_is_said(kpolicy: Command, tmp_path: Path) -> None:
    mla = {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    config = write(tmp_path / "config.json", json.dumps({**LLAMA_8B, "model_type": "minicpm3", **mla}))
    model = "MiniCPM3ForCausalLM of 4000.0 M parameters, bfloat16"
    told = f"the profile is of {model} by its own word; whether that is {config}'s model can't be told"
    given = ("decide", "--decodes", 3, "--config", config, "--profile")
    ended = kpolicy(*given, profile_of(tmp_path / "own.json", model))
    assert (ended.code, told in ended.err) == (0, True)


@pytest.mark.parametrize("command", ["decide --decodes 3", "explain --decodes 3", "run --window 1"])
def test_every_command_holds_a_profile_to_the_config(
    kpolicy: Command, config: Path, tmp_path: Path, command: str
) -> None:
    """A profile of another model is refused wherever both can be given, and the right one is taken."""
    own = profile_of(tmp_path / "own.json", "LlamaForCausalLM of 8030.3 M parameters, bfloat16")
    other = profile_of(tmp_path / "other.json", "Qwen2ForCausalLM of 494.0 M parameters, bfloat16")
    refused(kpolicy(*command.split(" "), "--config", config, "--profile", other), "other.json", "494.0 M", "7504.9 M")
    assert kpolicy(*command.split(" "), "--config", config, "--profile", own).code == 0


def test_a_config_alone_prices_a_batch(kpolicy: Command, config: Path) -> None:
    """Without a profile `explain` and `decide` cost the config's own model, as `run` and `simulate` do."""
    told = [kpolicy(name, "--decodes", 3, "--config", config, "--json").json for name in ("decide", "explain")]
    assert told[0]["costs"] == told[1]["decision"]["costs"] == "analytic-1:llama:H200 (published figures)"


def test_what_served_nothing_has_no_figures(kpolicy: Command, tmp_path: Path) -> None:
    """Where no request fits, latencies are dashes and tables without rows are left out."""
    path = write(tmp_path / "t.csv", "timestamp,input_length,output_length", "0,1000000,5")
    for code, command in ((1, ("simulate", path)), (0, ("run", "--trace", path))):
        ended = kpolicy(*command, "--policy", "eager")
        assert ended.code == code, ended.err
        assert "         1 request over 0 s; rows dropped: none\n" in ended.out
        assert "requests handed back: 1 over_kv_capacity" in ended.out
        assert re.search(r"^eager .*  -( |$)", ended.out, re.MULTILINE)
        assert "0.0 / 0.0" not in ended.out
        assert "what it means" not in ended.out


def test_serving_nothing_isnt_done(kpolicy: Command, tmp_path: Path) -> None:
    """Each policy that served no request of a trace is a line on standard error and code 1, and results are there."""
    head = "timestamp,input_length,output_length"
    long = write(tmp_path / "long.csv", head, "0,1000000,5")
    short = write(tmp_path / "t.csv", head, "0,10,5", "1,9999,5")
    out = tmp_path / "r.json"
    given = ("--policy", "eager", "--policy", "full", "--kv-tokens", 9000, "--json")
    ended = kpolicy("simulate", short, long, *given, "--out", out)
    assert ended.code == 1
    served = [[each["served"] for each in trace["policies"]] for trace in ended.json["traces"]]
    assert served == [[1, 1], [0, 0]]
    assert json.loads(out.read_text()) == ended.json
    left = [each["kv_tokens"] for each in ended.json["traces"][1]["policies"]]
    assert left[1] < left[0] == 8992
    assert ended.err.splitlines() == [
        f"kpolicy: {policy} on {long}: no request was served (1 over_kv_capacity); each takes more than the {kv:,} KV "
        "tokens that graphs leave. Raise --kv-tokens, or give another trace or window."
        for policy, kv in zip(("eager", "full"), left, strict=True)
    ]
    ended = kpolicy("simulate", short, *given)
    assert (ended.code, ended.err) == (0, "")


def test_a_profile_alone_leaves_kv_whole(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Bytes of KV a token aren't known without a config, so graphs take none, as the note says."""
    own = profile_of(tmp_path / "own.json", "LlamaForCausalLM of 8030.3 M parameters, bfloat16")
    told = kpolicy("simulate", trace, "--policy", "vllm", "--profile", own, "--json").json
    assert told["traces"][0]["policies"][0]["graph_bytes"] > 0
    assert told["traces"][0]["policies"][0]["kv_tokens"] == 400_000
    assert "so graphs take no KV" in " ".join(told["setting"]["notes"])


def test_steps_without_a_graph_for_a_budget_say_so(kpolicy: Command, trace: Path) -> None:
    """Graphs that the budget has no room for never were there: the sentence has it, and the last line which budget."""
    out = " ".join(kpolicy("simulate", trace, "--policy", "vllm", "--budget-graphs", 2).out.split())
    sentence = "the graphs that would hold the batch are over a budget, failed or were withdrawn"
    assert re.search(rf" graph_withdrawn \d+ {sentence} ", out)
    assert re.search(r"; not captured: \d+ budget_graphs$", out)


OWN_BYTES = 100_000
"""Bytes of KV a token that a profile says"""


def test_graphs_take_kv_by_the_profile(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Without a config: as many tokens less as the graphs' bytes are, in whole blocks of 16; no note says otherwise."""
    own = profile_of(tmp_path / "own.json", "LlamaForCausalLM of 8030.3 M parameters, bfloat16", OWN_BYTES)
    told = kpolicy("simulate", trace, "--policy", "vllm", "--profile", own, "--json").json
    (result,) = told["traces"][0]["policies"]
    assert told["setting"]["server"]["kv_bytes_per_token"] == OWN_BYTES
    assert result["kv_tokens"] == (400_000 - -(-result["graph_bytes"] // OWN_BYTES)) // 16 * 16 < 400_000
    assert "bytes of KV" not in " ".join(told["setting"]["notes"])


def test_a_sweep_takes_kv_by_each_profile(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Each of its own."""
    own, more = (
        profile_of(tmp_path / f"{name}.json", "m", size) for name, size in (("own", OWN_BYTES), ("more", 9_999))
    )
    given = ("sweep", trace, "--policy", "vllm", "--json", "--jobs", 1, "--profiles", own, "--profiles", more)
    results = [line["result"] for line in kpolicy(*given).json["cases"]]
    assert len(results) == 2
    for result, size in zip(results, (OWN_BYTES, 9_999), strict=True):
        assert result["kv_tokens"] == (400_000 - -(-result["graph_bytes"] // size)) // 16 * 16


@pytest.mark.parametrize("command", ["plan", "report"])
def test_plans_and_reports_take_kv_by_the_profile(kpolicy: Command, trace: Path, tmp_path: Path, command: str) -> None:
    """Graphs that leave no block are refused by name there, where the profile says the bytes, and else not."""
    more = ("--budget", 2) if command == "plan" else ("--policy", "vllm", "--out", tmp_path / "r.html")
    given = (command, trace, *more, "--kv-tokens", 2_000, "--profile")
    whole = kpolicy(*given, profile_of(tmp_path / "old.json", "m"))
    assert whole.code == 0, whole.err
    own = profile_of(tmp_path / "own.json", "m", 1_000)
    refused(kpolicy(*given, own), "captured graphs take the room of", "there are 2000")


def test_a_plan_and_a_sweep_say_that_graphs_take_no_kv(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """By a profile from before it had the bytes: a plan among its notes, a sweep on standard error."""
    old, own = profile_of(tmp_path / "old.json", "m"), profile_of(tmp_path / "own.json", "m", OWN_BYTES)
    told = f"{old} doesn't say bytes of KV a token, so graphs take no KV; --config tells, and so"
    given = ("plan", trace, "--policy", "vllm", "--budget", 2, "--json", "--profile")
    said = [" ".join(kpolicy(*given, each).json["notes"]) for each in (old, own)]
    assert [told in each for each in said] == ["take no KV" in each for each in said] == [True, False]
    swept = kpolicy("sweep", trace, "--policy", "eager", "--json", "--jobs", 1, "--profiles", old, "--profiles", own)
    assert swept.err.startswith(f"kpolicy: {told}")
    assert swept.err.count("take no KV") == 1


def test_a_config_of_other_bytes_of_kv_counts(kpolicy: Command, trace: Path, config: Path, tmp_path: Path) -> None:
    """Beside a profile of the same model the config's bytes are taken, as before, and a note says both."""
    model = "LlamaForCausalLM of 8030.3 M parameters, bfloat16"
    given = ("simulate", trace, "--policy", "vllm", "--config", config, "--json", "--profile")
    for said, notes in ((131_072, 0), (OWN_BYTES, 1)):
        told = kpolicy(*given, profile_of(tmp_path / "own.json", model, said)).json["setting"]
        assert told["server"]["kv_bytes_per_token"] == 131_072
        assert sum("100,000 bytes of KV by the profile and 131,072 by" in note for note in told["notes"]) == notes
    other = profile_of(tmp_path / "other.json", "Qwen2ForCausalLM of 494.0 M parameters, bfloat16", 131_072)
    refused(kpolicy(*given, other), "other.json", "494.0 M")


def test_a_profile_tells_what_a_config_cannot(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """A model whose weights aren't laid out here: the profile's bytes are taken; where it has none a note says so."""
    config = write(tmp_path / "config.json", json.dumps({**LLAMA_8B, "model_type": "dbrx"}))
    given = ("simulate", trace, "--policy", "vllm", "--config", config, "--json", "--profile")
    told = kpolicy(*given, profile_of(tmp_path / "own.json", "m", OWN_BYTES)).json
    assert told["setting"]["server"]["kv_bytes_per_token"] == OWN_BYTES
    told = kpolicy(*given, profile_of(tmp_path / "own.json", "m")).json
    assert told["traces"][0]["policies"][0]["kv_tokens"] == 400_000
    assert "so graphs take no KV; of this --config they can't be counted" in " ".join(told["setting"]["notes"])


def test_a_profile_that_goes_by_a_name(kpolicy: Command, trace: Path, config: Path, tmp_path: Path) -> None:
    """Engines' plugins write a model's name: one of another size is refused, any other is said not to be known."""
    given = ("simulate", trace, "--policy", "eager", "--config", config, "--json", "--profile")
    for model in ("Qwen/Qwen2.5-0.5B-Instruct", "/models/llama-70b"):
        refused(kpolicy(*given, profile_of(tmp_path / "other.json", model)), f"was measured with {model}, and")
    for model in ("meta-llama/Llama-3.1-8B", "some/name-v0.2"):
        told, _ = kpolicy(*given, profile_of(tmp_path / "own.json", model)).json["setting"]["notes"]
        assert told.startswith(f"the profile is of {model} by its own word")
    here = profile_of(tmp_path / "own.json", f"/elsewhere/{config.resolve().parent.name}")
    (told,) = kpolicy(*given, here).json["setting"]["notes"]
    assert told.startswith("contexts: not recorded")


@pytest.mark.parametrize("command", ["decide --decodes 3", "explain --decodes 3", "run --window 1 --policy eager"])
def test_what_isnt_known_of_a_profile_is_said_once(
    kpolicy: Command, config: Path, tmp_path: Path, command: str
) -> None:
    """On standard error, beside JSON too, by the commands whose output has no place for it."""
    given = (*command.split(" "), "--config", config, "--json", "--profile")
    unsure = kpolicy(*given, profile_of(tmp_path / "own.json", "some/name-v0.2"))
    assert unsure.code == 0
    assert unsure.err == (
        f"kpolicy: the profile is of some/name-v0.2 by its own word; whether that is {config}'s model can't be told\n"
    )
    assert unsure.json
    assert kpolicy(*given, profile_of(tmp_path / "own.json", f"/elsewhere/{config.resolve().parent.name}")).err == ""


def test_a_plan_and_a_sweep_say_what_isnt_known_of_a_profile(
    kpolicy: Command, trace: Path, config: Path, tmp_path: Path
) -> None:
    """The plan among its notes, in JSON too; the sweep once a profile on standard error, beside JSON as it is."""
    doubted, same = profile_of(tmp_path / "a.json", "some/name"), tmp_path / "b.json"
    profile_of(same, f"/elsewhere/{config.resolve().parent.name}")
    told = f"the profile is of some/name by its own word; whether that is {config}'s model can't be told"
    given = ("plan", trace, "--policy", "vllm", "--config", config, "--profile")
    assert f"note: {told}." in " ".join(kpolicy(*given, doubted).out.split())
    assert kpolicy(*given, doubted, "--json").json["notes"][-1] == f"{told}."
    assert not any("by its own word" in note for note in kpolicy(*given, same, "--json").json["notes"])
    given = ("sweep", trace, "--policy", "eager", "--config", config, "--json", "--profiles")
    both = kpolicy(*given, doubted, "--profiles", same)
    assert (both.err, len(both.json["cases"])) == (f"kpolicy: {told}\n", 2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--policy autoo", ["unknown policy 'autoo'", "did you mean 'auto'?"]),
        ("--policy vllm --policy vllm", ["--policy vllm is given twice"]),
        ("--device h20", ["unknown device 'h20'", "did you mean 'H200'?"]),
        ("--tables lookup", ["--tables is 'lookup'"]),
        ("--tables aiconfigurator", ["--tables needs --config"]),
        ("--rate 0", ["--rate is 0"]),
        ("--window nan", ["--window is nan"]),
        ("--start 99999", ["no request arrives from second 99999 on", "Choose an earlier --start."]),
        ("--kv-tokens 0", ["--kv-tokens is 0"]),
        ("--kv-tokens 100", ["nothing is left for requests"]),
        ("--block-size 100", ["isn't a whole number of KV blocks of 100"]),
        ("--acceptance 1.5", ["--acceptance is 1.5"]),
        ("--ranks 0", ["--ranks is 0"]),
        ("--ranks 1000", ["ranks is 1000", "256"]),
        ("--slo-gap-ms 0", ["--slo-gap-ms is 0"]),
        ("--draft-us -1", ["--draft-us is -1"]),
        ("--acceptance 0.5", ["--acceptance is 0.5, and nothing is drafted", "--speculative"]),
        ("--draft-us 0", ["--draft-us is 0, and nothing is drafted", "--speculative"]),
        ("--scheduler-us nan", ["--scheduler-us is nan"]),
        ("--scheduler-prompt-us -1", ["--scheduler-prompt-us is -1"]),
        ("{trace}", ["the trace", "is given twice; both would do the same, so give it once."]),
        ("--out .", ["--out . is a folder"]),
        ("--out no/where.json", ["there is no folder no"]),
        ("--step-log /proc/nothing/x", ["--step-log"]),
        ("--speculative 300", ["--speculative is 300"]),
        ("--ladder 8,4", ["sizes rise without repeats"]),
        ("--profile nothing.json", ["can't read nothing.json"]),
        ("--profile x.json --device h100", ["--device and --tables can't be given with it"]),
    ],
)
def test_what_cant_be_done_is_one_line(kpolicy: Command, trace: Path, arguments: str, parts: list[str]) -> None:
    """Every wrong option names itself and its value; nothing has run."""
    refused(kpolicy("simulate", trace, *arguments.replace("{trace}", str(trace)).split()), *parts)


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["when,in,out", "0,1,1"], ["when"]),
        (["timestamp,input_length,output_length", "100,5,5", "50,5,5"], ["timestamp goes back from 100 to 50"]),
        (["timestamp,input_length,output_length", "0,0,5"], ["no request to serve", "1 zero_prompt_tokens"]),
        (["timestamp,input_length,output_length", "0,5"], ["2 fields"]),
    ],
)
def test_bad_traces_name_the_line(kpolicy: Command, tmp_path: Path, lines: list[str], parts: list[str]) -> None:
    """Unknown columns, times that go back, rows without tokens, and rows cut short."""
    refused(kpolicy("simulate", write(tmp_path / "bad.csv", *lines)), str(tmp_path / "bad.csv"), *parts)


def test_duplicate_times_zero_token_rows_and_huge_prompts_are_served_or_counted(
    kpolicy: Command, tmp_path: Path
) -> None:
    """Equal times are fine, rows without tokens are dropped by name, and what can't fit KV is handed back."""
    rows = ["0,10,3", "0,10,3", "0,10,0", "5,1000000,3", "5,10,3"]
    path = write(tmp_path / "t.csv", "timestamp,input_length,output_length", *rows)
    ended = kpolicy("simulate", path, "--policy", "vllm", "--json")
    assert ended.code == 0, ended.err
    (one,) = ended.json["traces"]
    assert one["dropped"] == {"zero_output_tokens": 1}
    assert (one["policies"][0]["served"], one["policies"][0]["refused"]) == (3, {"over_kv_capacity": 1})


def test_steps_beyond_the_cost_table_are_told(kpolicy: Command, tmp_path: Path) -> None:
    """A budget over the largest size of the table makes such steps; their count and share are printed."""
    path = write(tmp_path / "t.csv", "timestamp,input_length,output_length", "0,30000,3", "9000,30000,3")
    ended = kpolicy("simulate", path, "--policy", "eager", "--max-num-tokens", 32768)
    assert ended.code == 0, ended.err
    assert "2 steps (33.3%) of a size outside the cost table" in ended.out
    assert "contexts" not in ended.out


def test_contexts_beyond_a_profile_are_told(kpolicy: Command, tmp_path: Path) -> None:
    """One prompt of 300,000 tokens: the chunks behind the longest context that was timed are counted and printed."""
    path = write(tmp_path / "t.csv", "timestamp,input_length,output_length", "0,300000,3", "90000,400,3")
    given = ("simulate", path, "--policy", "vllm", "--warm", "--profile", "qwen2.5-0.5b-h200")
    ended = kpolicy(*given)
    assert ended.code == 0, ended.err
    assert "contexts of up to 1,024 tokens a decode row, 262,144 in a step, and 6,144 of prompts" in ended.out
    # 147 chunks of 2,048 at most, of which the first three end at 6,144; two decodes; and the second request's three.
    assert "146 steps (96.1%) of a context outside the cost table" in ended.out
    (one,) = kpolicy(*given, "--json").json["traces"]
    found = one["policies"][0]
    assert (found["steps"], found["outside"], found["outside_sizes"], found["outside_contexts"]) == (152, 146, 0, 146)
    assert found["kv_span"] == {"decode_row": 1024, "decode_step": 262_144, "prefill": 6144}


def test_two_traces_of_one_name_have_no_files_of_their_own(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Files are named by trace and policy, so a second run of both would write over the first."""
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / trace.name
    other.write_bytes(trace.read_bytes())
    ended = kpolicy("simulate", trace, other, "--policy", "eager", "--step-log", tmp_path / "s")
    refused(ended, "would share a file", "one by one")


def test_a_gzip_cut_short_is_an_error_unless_the_window_ends_before(
    kpolicy: Command, trace: Path, tmp_path: Path
) -> None:
    """Half a gzip file is said to be cut short, and how much there is; a window that ends before has its requests."""
    lines = trace.read_text().splitlines(keepends=True)
    packer = zlib.compressobj(wbits=31)
    cut = tmp_path / "cut.csv.gz"
    # A header, and the rows of the first two seconds with that of second 2.0.
    cut.write_bytes(packer.compress("".join(lines[:22]).encode()) + packer.flush(zlib.Z_SYNC_FLUSH))
    refused(kpolicy("simulate", cut), f"{cut}, line 23: the gzip data is cut short here, 2.0 s into the trace")
    refused(kpolicy("simulate", cut, "--window", 2.1), "cut short here", "take a window that ends before that")
    ended = kpolicy("simulate", cut, "--window", 2, "--policy", "eager", "--json")
    assert ended.code == 0, ended.err
    (found,) = ended.json["traces"]
    assert found["source"] == f"{cut} (gzip data cut short at line 23), from 0 s for 2 s"
    (whole,) = kpolicy("simulate", trace, "--window", 2, "--policy", "eager", "--json").json["traces"]
    assert found["requests"] == 20
    assert [each | {"source": ""} for each in found["policies"]] == [
        each | {"source": ""} for each in whole["policies"]
    ]
    for command in ("run", "plan", "sweep"):
        given = [command, *(["--trace"] if command == "run" else []), cut, "--policy", "vllm", "--window", 2]
        assert kpolicy(*given).code == 0, command


def test_a_model_without_room_is_an_error_unless_kv_is_given(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Weights over the device's memory leave no KV; a capacity of one's own is taken."""
    big = write(
        tmp_path / "config.json",
        json.dumps(LLAMA_8B | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}),
    )
    refused(kpolicy("simulate", trace, "--config", big, "--device", "a100"), "leave no room for KV on one a100")
    assert kpolicy("simulate", trace, "--config", big, "--kv-tokens", 100_000, "--policy", "eager").code == 0


def test_an_interrupt_prints_what_was_done(
    kpolicy: Command, trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C in the second policy leaves the first one's table and result, and exit code 130."""
    real = simulate

    def interrupted(trace: Any, policy: str, **rest: Any) -> Any:
        if policy == "vllm":
            raise KeyboardInterrupt
        return real(trace, policy, **rest)

    monkeypatch.setattr("kpolicy.cli.simulate.simulate", interrupted)
    ended = kpolicy("simulate", trace, "--policy", "eager", "--policy", "vllm", "--out", tmp_path / "r.json")
    assert ended.code == 130
    assert "interrupted" in ended.err
    assert "policy_is_eager" in ended.out
    (one,) = json.loads((tmp_path / "r.json").read_text())["traces"]
    assert [each["policy"] for each in one["policies"]] == ["eager"]


def test_a_policy_that_cant_run_costs_its_own_result(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Graphs that leave no KV: the others' results are printed and written, and exit code 1; alone it is an error."""
    options = ("--kv-tokens", 6700, "--out", tmp_path / "r.json", "--step-log", tmp_path / "s.jsonl")
    ended = kpolicy("simulate", trace, "--policy", "vllm", "--policy", "auto", "--policy", "eager", *options)
    assert ended.code == 1
    assert ended.err.startswith("kpolicy: auto on ")
    assert "nothing is left for requests" in ended.err
    assert ended.err.count("\n") == 1
    assert "policy_is_eager" in ended.out
    (one,) = json.loads((tmp_path / "r.json").read_text())["traces"]
    assert [each["policy"] for each in one["policies"]] == ["vllm", "eager"]
    assert [each["policy"] for each in one["failed"]] == ["auto"]
    assert sorted(each.name for each in tmp_path.glob("s-*")) == ["s-eager.jsonl", "s-vllm.jsonl"]
    refused(kpolicy("simulate", trace, "--policy", "auto", "--kv-tokens", 6700), "nothing is left for requests")


def test_tables_without_the_package_say_what_to_install(
    kpolicy: Command, trace: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is named."""
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk.engine"):
        monkeypatch.setitem(sys.modules, name, None)
    ended = kpolicy("simulate", trace, "--config", config, "--tables", "aiconfigurator")
    refused(ended, "--tables aiconfigurator needs aiconfigurator-core")


def test_kernel_tables_arent_called_nothing_measured(
    kpolicy: Command, trace: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons, what decisions assume and what the commands say of costs name them; a profile of them too."""
    install(monkeypatch)
    given = (trace, "--config", config, "--tables", "aiconfigurator")
    ended = kpolicy("simulate", *given, "--policy", "auto")
    assert ended.code == 0, ended.err
    told = " ".join(ended.out.split())
    assert "this is the cheapest legal way by kernel tables that their publisher measured, not on your device" in told
    assert "assuming costs of published kernel tables" in told
    found = kpolicy("simulate", *given, "--policy", "auto", "--json").json["traces"][0]["policies"][0]
    swept = kpolicy("sweep", *given, "--policy", "auto", "--jobs", 1, "--json").json["cases"][0]["result"]
    for result in (found, swept):
        assert {*result["reasons"]} <= {"cheapest_kernel_tables", "eager_is_cheaper_kernel_tables"}
        assert result["assumes"] == ["costs_kernel_tables"]
        assert result["measured"] is False
    said = kpolicy("plan", *given, "--budget", 4).out
    assert re.search(r"^costs    aiconfigurator-core .* \(kernels measured by their publisher, not on your", said, re.M)
    assert "kernels that their publisher measured, not on your device, and analytic host and capture costs" in said
    costs, _ = aiconfigurator_costs(config)
    write_profile(tmp_path / "k.json", Profile(costs=costs, device="A device", model=""))
    profiled = kpolicy("simulate", trace, "--profile", tmp_path / "k.json", "--policy", "auto").out
    assert "of kernel tables: kernels measured by their publisher, not on your device" in " ".join(profiled.split())
    for out in (ended.out, said, profiled):
        assert "nothing was measured" not in " ".join(out.split())
        assert "analytic times are flat" not in " ".join(out.split())


def test_the_document_has_every_field_of_a_result(kpolicy: Command, trace: Path) -> None:
    """docs/cli.md names each field that ``--json`` prints, of the command, its traces and their results."""
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    told = kpolicy("simulate", trace, "--policy", "vllm", "--json").json
    (one,) = told["traces"]
    for value in (told, one, one["policies"][0], one["policies"][0]["ttft"]):
        assert {name for name in value if f"`{name}`" not in text} == set()


def test_a_run_takes_the_configs_analytic_costs(kpolicy: Command, trace: Path, config: Path, tmp_path: Path) -> None:
    """`kpolicy run --device simulated --config` and `simulate --config` cost steps alike; unknown weights take 8B's."""
    ran = kpolicy("run", "--trace", trace, "--policy", "vllm", "--config", config, "--json").json
    simulated = kpolicy(
        "simulate", trace, "--policy", "vllm", "--config", config, "--window", 300, "--warm", "--json"
    ).json
    assert ran["setting"]["costs"] == simulated["setting"]["costs_version"]
    assert "llama" in ran["setting"]["costs"]
    result = simulated["traces"][0]["policies"][0]
    assert ran["policies"][0]["steps"] == result["steps"]
    assert ran["policies"][0]["step_us"] == pytest.approx(result["step_us"])
    (tmp_path / "other").mkdir()
    unknown = write(
        tmp_path / "other" / "config.json",
        json.dumps({"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}),
    )
    ran = kpolicy("run", "--trace", trace, "--policy", "eager", "--config", unknown, "--json")
    assert ran.code == 0, ran.err
    assert "8B GQA decoder" in ran.json["setting"]["costs"]
