"""`kpolicy simulate --pace`: how long steps are."""

from __future__ import annotations

from pathlib import Path

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
