"""The published shape of TensorRT-LLM's study of capture sizes; benchmarks/trtllm_ladders.py has all of it."""

from __future__ import annotations

import json

import pytest

from benchmarks.trtllm_ladders import GRAPHS, LADDERS, RESULT, tokens_per_s


def gain(model: str, ladder: str, over: str, clients: int) -> float:
    """Tokens a second with a ladder, over another; one rank stands for all four."""
    rates = [tokens_per_s(model, LADDERS[each], clients, ranks=1, laps=2) for each in (ladder, over)]
    return rates[0] / rates[1]


def test_ladders_have_as_many_graphs_as_the_study() -> None:
    """23, 49 and 259."""
    assert [len(ladder) for ladder in LADDERS.values()] == [23, 49, 259]


@pytest.mark.parametrize("clients", [64, 128, 256])
def test_up_to_128_clients_gain_nothing(clients: int) -> None:
    """Below the size where ladders part all are the same."""
    assert gain("R1", "+64", "x2", clients) == pytest.approx(1.0, abs=1e-3)


def test_the_gain_is_between_500_and_700_clients_and_gone_where_kv_runs_out() -> None:
    """Sizes 64 apart win where powers of two pad most, and no more where KV bounds the batch."""
    gains = {clients: gain("R1", "+64", "x2", clients) for clients in (500, 544, 608, 1024)}
    assert gains[500] == pytest.approx(1.0, abs=1e-3)
    assert min(gains[544], gains[608]) > 1.02
    assert gains[1024] < 1.01


def test_the_densest_ladder_loses_where_graphs_cost_memory() -> None:
    """Sizes 8 apart gain a little on R1 while KV is there, and lose more the more KV their graphs take."""
    assert gain("R1", "+8", "+64", 544) > 1.02
    losses = {model: gain(model, "+8", "+64", 896) for model in ("R1", "V3.2")}
    assert losses["V3.2"] < losses["R1"] < 1.0
    assert losses["V3.2"] < 0.95


def test_the_whole_study_has_the_published_shape() -> None:
    """In the committed result: nothing to 128 clients, most at 500 to 600, and memory alone turns the densest one."""
    rows = {row["clients"]: row for row in json.loads(RESULT.read_text(encoding="utf-8"))["rows"]}
    for clients in (16, 64, 128):
        for model in GRAPHS:
            assert rows[clients][model]["+64 over x2"] == rows[clients][model]["+8 over +64"] == 1.0
    assert 500 <= max(rows, key=lambda clients: rows[clients]["R1"]["+64 over x2"]) <= 600
    assert any(row["R1"]["+8 over +64"] > 1.0 > row["V3.2"]["+8 over +64"] for row in rows.values())
    assert not any(row["V3.2"]["+8 over +64"] > row["R1"]["+8 over +64"] for row in rows.values())
