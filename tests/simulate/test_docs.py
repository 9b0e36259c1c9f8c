"""docs/simulate.md: its examples run, and its table of devices is the data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kpolicy.figures import DEVICES
from kpolicy.profiles import load_profile
from kpolicy.scheduling.generator import generate_trace
from kpolicy.simulate import Server, simulate
from tests.cli.test_simulate import LLAMA_8B

TEXT = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both, one after the other, in a folder with a trace and a config; the first has five lines."""
    rows = "".join(f"{100 * i},{8 + 73 * i % 293},{1 + 5 * i % 12}\n" for i in range(40))
    (tmp_path / "trace.csv").write_text("timestamp,input_length,output_length\n" + rows)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in examples[0].splitlines() if line]) == 5
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "docs/simulate.md", "exec"), names)  # noqa: S102 - our own document
    first, second = capsys.readouterr().out.splitlines()
    assert first in ("auto", "vllm", "eager")
    assert re.fullmatch(r"\d+% good, \d+% of drafts accepted", second)


def test_what_ranks_gain_or_lose_is_the_result() -> None:
    """By both limits on first tokens: the mean of Mooncake's stretches, the least and the most."""
    result = json.loads(
        (Path(__file__).parents[2] / "benchmarks" / "results" / "simulated_ranks.json").read_text(encoding="utf-8")
    )
    rows = {kind: [row for row in result["rows"] if row["load"].startswith(kind)] for kind in ("Mooncake", "code")}
    assert (len(rows["Mooncake"]), len(rows["code"])) == (8, 5)
    for limit, ratio in (("1", "ratio"), ("1.25", "ratio_later")):
        cells = []
        for figure in ("busy_s", "ttft_p50_ms", "whole_mean_ms"):
            found = [row[ratio][figure] - 1 for row in rows["Mooncake"]]
            mean = sum(found) / len(found)
            assert result[f"mean_{ratio}"]["Mooncake"][figure] == pytest.approx(1 + mean, abs=1e-4)
            cells.append(f"{mean:+.1%} ({min(found):+.1%} to {max(found):+.1%})")
        assert f"| {limit} | {' | '.join(cells)} |" in TEXT
    assert all(row["auto"] == row["auto_later"] for row in rows["code"])
    assert max(abs(row["ratio"]["busy_s"] - 1) for row in rows["code"]) < 0.001


@pytest.mark.parametrize(
    ("policy", "told"),
    [("auto", "`auto` captures {} and leaves {:,} tokens of KV a rank"), ("vllm", "the replica's {} leave {:,}.")],
)
def test_graphs_leave_a_rank_what_the_page_says(policy: str, told: str) -> None:
    """Of the server of the comparison with ranks; and eager steps leave all of it."""
    server = Server(ranks=3, warm=True)
    found = simulate(generate_trace(seed=0, num_requests=3), policy, server=server)
    assert told.format(found.graphs, found.kv_tokens) in TEXT
    assert f"eager steps alone, with all {server.kv_tokens:,}" in TEXT


def test_the_devices_are_the_data() -> None:
    """Every figure of the table is that of `DEVICES`."""
    rows = dict(re.findall(r"^\| (\w[\w ]+) \| ([\d.]+ \| [\d.]+ \| \d+) \|", TEXT, re.MULTILINE))
    assert set(rows) == set(DEVICES)
    for name, device in DEVICES.items():
        bandwidth, tflops, gigabytes = map(float, rows[name].split(" | "))
        assert (bandwidth * 1e6, tflops * 1e6) == pytest.approx(
            (device.figures.bytes_per_us, device.figures.flops_per_us)
        )
        assert gigabytes * 10**9 == device.memory_bytes


def test_the_graphs_leave_what_the_profile_says() -> None:
    """The KV that the printed graphs leave is 400,000 tokens less their MiB by the profile's bytes a token."""
    told = re.findall(r"captured in [\d.]+ s, ([\d.]+) MiB, which leave ([\d,]+) KV tokens", TEXT)
    size = load_profile("qwen2.5-0.5b-h200").kv_bytes_per_token
    assert len(told) == 2
    assert size is not None
    assert f"a token of this model takes {size:,} bytes" in TEXT
    for mib, left in told:
        assert int(left.replace(",", "")) == pytest.approx(
            400_000 - float(mib) * 2**20 / size, abs=16 + 0.05 * 2**20 / size
        )
