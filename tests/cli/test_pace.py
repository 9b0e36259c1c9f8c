"""`--pace` of `kpolicy simulate` and `kpolicy run`: how long steps are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command, write
from tests.cli.test_bad_input import refused


def test_steps_are_shorter_where_the_objective_weighs_the_gap(kpolicy: Command, tmp_path: Path) -> None:
    """The option is `Server.pace`: decodes wait for fewer prompt tokens at once."""
    path = write(tmp_path / "trace.csv", "timestamp,input_length,output_length", *["0,16,300"] * 4, *["50,1900,8"] * 12)

    def gap_p99(*options: str) -> float:
        ended = kpolicy("simulate", path, "--policy", "auto", "--warm", "--json", *options)
        assert ended.code == 0, ended.err
        return float(ended.json["traces"][0]["policies"][0]["gap"]["p99"])

    assert gap_p99("--objective", "latency", "--pace", "eager") < 0.9 * gap_p99("--objective", "latency")


def test_a_policy_that_is_not_known_is_refused(kpolicy: Command, trace: Path) -> None:
    refused(kpolicy("simulate", trace, "--pace", "eagr"), "unknown policy 'eagr'", "did you mean 'eager'?")


def test_a_run_has_as_short_steps_as_its_simulation(kpolicy: Command, tmp_path: Path) -> None:
    """`kpolicy run --pace` on a simulated device serves the same steps as `kpolicy simulate --pace`, and says so."""
    path = write(tmp_path / "trace.csv", "timestamp,input_length,output_length", *["0,16,300"] * 4, *["50,1900,8"] * 12)
    given = ("--policy", "auto", "--objective", "latency", "--profile", "deepseek-v2-lite-h200", "--attention", "mla")
    run = ("run", "--device", "simulated", "--trace", path, *given)
    paced = kpolicy(*run, "--pace", "vllm", "--json").json
    assert (paced["setting"]["pace"], paced["setting"]["objective"]) == ("vllm", "latency")
    (served,), (whole,) = paced["policies"], kpolicy(*run, "--json").json["policies"]
    assert served["gap_us"][1] < 0.95 * whole["gap_us"][1]
    simulate = ("simulate", path, *given, "--warm", "--steady-host", "--scheduler-us", "0", "--kv-tokens", "400000")
    (simulated,) = kpolicy(*simulate, "--pace", "vllm", "--json").json["traces"][0]["policies"]
    assert simulated["steps"] == served["steps"]
    assert simulated["gap"]["p99"] == pytest.approx(served["gap_us"][1], rel=0.005)
    words = "2,048 tokens a step, fewer beside decodes as --pace vllm allows"
    assert words in kpolicy(*run, "--pace", "vllm").out
    assert words in kpolicy(*simulate, "--pace", "vllm").out
    assert "--pace" not in kpolicy(*run).out


def test_a_run_refuses_a_policy_that_is_not_known(kpolicy: Command, trace: Path) -> None:
    refused(kpolicy("run", "--trace", trace, "--pace", "vlm"), "--pace: unknown policy 'vlm'", "did you mean 'vllm'?")


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_a_policy_that_can_t_have_its_graphs_is_refused_by_its_option(
    kpolicy: Command, trace: Path, command: str
) -> None:
    """Before anything is served: it isn't one of the policies that are."""
    given = ("run", "--device", "simulated", "--trace", trace) if command == "run" else ("simulate", trace)
    refused(kpolicy(*given, "--attention", "none", "--pace", "vllm:mode=FULL"), "--pace: vLLM doesn't start with")
