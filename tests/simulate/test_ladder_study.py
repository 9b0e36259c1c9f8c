"""The published shape of TensorRT-LLM's study of capture sizes; benchmarks/trtllm_ladders.py has all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.trtllm_ladders import AROUND, CLIENTS, GRAPHS, LADDERS, RESULT, SEEDS, tokens_per_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "simulate.md").read_text(encoding="utf-8").split())


def gain(model: str, ladder: str, over: str, clients: int, laps: int = 2) -> float:
    """Tokens a second with a ladder, over another; one rank stands for all four."""
    rates = [tokens_per_s(model, LADDERS[each], clients, ranks=1, laps=laps) for each in (ladder, over)]
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


WRITTEN = json.loads(RESULT.read_text(encoding="utf-8"))
ROWS = {row["clients"]: row for row in WRITTEN["rows"]}
DRAWS = {0: [ROWS[clients] for clients in AROUND]} | {int(k): v for k, v in WRITTEN["rows_of_other_seeds"].items()}
"""By seed of the requests"""
PUBLISHED_GAIN, PUBLISHED_LOSS = 0.30, 0.05
"""Up to so much of 64 apart over powers of two at 500 to 600 clients; of 8 apart on V3.2"""


def gains(
    model: str, ratio: str = "+64 over x2", rows: Sequence[dict[str, Any]] = tuple(ROWS.values())
) -> dict[int, float]:
    """What the committed result has, worked out again from its rates."""
    over, under = ratio.split(" over ")
    found = {}
    for row in rows:
        rates = row[model]["tokens_per_s"]
        found[row["clients"]] = rates[over] / rates[under]
        assert found[row["clients"]] == pytest.approx(row[model][ratio], abs=1e-4)
    return found


def test_the_result_is_of_the_whole_study() -> None:
    """Every number of clients, those around the most of seven draws of requests, all graphs and ladders, one commit."""
    assert tuple(ROWS) == CLIENTS
    assert tuple(DRAWS) == (0, *SEEDS)
    rows = [row for draw in DRAWS.values() for row in draw]
    assert [row["clients"] for row in rows] == [*AROUND] * len(DRAWS)
    assert all({*row[model]["tokens_per_s"]} == {*LADDERS} for row in (*ROWS.values(), *rows) for model in GRAPHS)
    assert re.fullmatch(r"[0-9a-f]{7}", WRITTEN["commit"])


@pytest.mark.parametrize("model", GRAPHS)
@pytest.mark.parametrize("ratio", ["+64 over x2", "+8 over +64"])
def test_the_result_has_no_gain_up_to_128_clients(model: str, ratio: str) -> None:
    """As published: the same tokens a second, to the last digit. Here that lasts to 500, where the study has gains."""
    found = gains(model, ratio)
    assert {clients for clients in found if clients <= 128} == {16, 64, 128}
    assert {found[clients] for clients in found if clients <= 500} == {1.0}


@pytest.mark.parametrize("model", GRAPHS)
def test_the_result_gains_most_at_500_to_600_clients(model: str) -> None:
    """As published, and by how little: 608 has 0.05 points less, 768 0.27; and the most is 26.8 points short of 30."""
    found = gains(model)
    most = max(found, key=lambda clients: found[clients])
    assert most == WRITTEN["largest_gain_of_+64_at"]["0"] == 576
    outside = max(gain for clients, gain in found.items() if not 500 <= clients <= 600)
    assert found[most] - outside == pytest.approx(0.0005, abs=0.00005)
    assert found[most] - found[768] == pytest.approx(0.0027, abs=0.00005)
    assert max(gain for clients, gain in found.items() if clients > 768) < 1.0135
    assert PUBLISHED_GAIN - (found[most] - 1) == pytest.approx(0.268, abs=0.0005)


def test_the_result_has_the_densest_ladder_lose_by_memory() -> None:
    """With V3.2's graphs, of twice the memory, never more than with R1's: at 704 clients those lose and these gain.

    The losses are larger than published: 28% there and 43% at most, for 5% on V3.2; and R1's graphs lose too, from 768.
    """
    dear, cheap = gains("V3.2", "+8 over +64"), gains("R1", "+8 over +64")
    assert all(dear[clients] <= cheap[clients] for clients in CLIENTS)
    assert all(dear[clients] < cheap[clients] for clients in CLIENTS if clients > 608)
    assert dear[704] < 1 < cheap[704]
    assert max(dear[clients] for clients in CLIENTS if clients >= 704) < 1 - PUBLISHED_LOSS
    assert (1 - dear[704], 1 - min(dear.values())) == pytest.approx((0.279, 0.432), abs=0.001)
    assert {clients for clients in CLIENTS if cheap[clients] < 1} == {768, 896, 1024, 1536, 2048}


@pytest.mark.parametrize("seed", DRAWS)
def test_other_requests_say_the_same_of_what_is_claimed(seed: int) -> None:
    """No gain to 500, the most at 500 to 600 on a plateau to 704, and the densest ladder turned by memory."""
    found = gains("R1", rows=DRAWS[seed])
    assert {found.pop(clients) for clients in (128, 500)} == {1.0}
    most = max(found, key=lambda clients: found[clients])
    assert most == WRITTEN["largest_gain_of_+64_at"][str(seed)]
    assert most in (520, 544, 576)
    plateau = [gain for clients, gain in found.items() if clients <= 704]
    assert max(plateau) - min(plateau) < 0.003
    assert found[896] < 1
    dear, cheap = (gains(model, "+8 over +64", DRAWS[seed]) for model in ("V3.2", "R1"))
    assert dear[704] < 1 - PUBLISHED_LOSS
    assert cheap[704] > 1
    assert dear[768] < cheap[768] < 1
    assert max(dear[896], cheap[896]) < 1 - PUBLISHED_LOSS


def test_the_spread_is_that_of_the_draws() -> None:
    """The least and the most gain of each number of clients."""
    found = [gains("R1", rows=rows) for rows in DRAWS.values()]
    for clients in AROUND:
        each = [gain[clients] for gain in found]
        assert WRITTEN["least_and_most_gain_of_+64"][str(clients)] == pytest.approx([min(each), max(each)], abs=1e-4)


def test_other_requests_are_what_the_simulator_says() -> None:
    """A cell of another draw again."""
    (row,) = [row for row in DRAWS[2] if row["clients"] == 544]
    assert round(tokens_per_s("R1", LADDERS["x2"], 544, seed=2), 1) == row["R1"]["tokens_per_s"]["x2"]


@pytest.mark.parametrize(
    ("model", "ladder", "clients"), [("V3.2", "+8", 128), ("R1", "x2", 576), ("R1", "+64", 576), ("V3.2", "+8", 704)]
)
def test_the_result_is_what_the_simulator_says(model: str, ladder: str, clients: int) -> None:
    """A cell of each claim again, by four ranks and as long as the result's: the same tokens a second."""
    assert round(tokens_per_s(model, LADDERS[ladder], clients), 1) == ROWS[clients][model]["tokens_per_s"][ladder]


def test_the_peak_again_of_one_rank() -> None:
    """Nothing at 500, most at 520, and ever less to 768; over a run so long that all clients are there most of it.

    In one of two laps they aren't, and its gain rises to 768 clients.
    """
    found = {clients: gain("R1", "+64", "x2", clients, laps=8) for clients in (500, 520, 544, 576, 640, 704, 768)}
    assert found.pop(500) == 1.0
    assert list(found) == sorted(found, key=lambda clients: -found[clients])
    assert (found[520], found[768]) == pytest.approx((1.0470, 1.0451), abs=0.0005)


@pytest.mark.parametrize("clients", [704, 768, 896])
def test_memory_alone_turns_the_densest_ladder(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ladders and clients: with graphs of no memory it gains, and the more they take the less, to a loss."""
    found = []
    for share in (0.0, GRAPHS["R1"], 0.129, GRAPHS["V3.2"]):
        monkeypatch.setitem(GRAPHS, "any", share)
        found.append(gain("any", "+8", "+64", clients))
    assert found[0] > 1.002
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1 - PUBLISHED_LOSS


def test_the_page_is_the_result() -> None:
    """docs/simulate.md has the gains and losses of the committed result, and how far they are from the study's."""

    def span(model: str, clients: Iterable[int], ratio: str = "+64 over x2") -> tuple[float, float]:
        values = [100 * (gains(model, ratio)[each] - 1) for each in clients]
        return min(values), max(values)

    least, most = span("R1", (520, 544, 576, 608))
    later, _ = span("R1", (608, 640, 704, 768))
    assert (
        f"+{least:.1f} to {most:.1f}% from 520 to 608 with the most at 576, +{later:.1f} to {least:.1f}% to 768" in PAGE
    )
    beyond = max(span(model, [each for each in CLIENTS if each >= 896])[1] for model in GRAPHS)
    assert f"no more than {beyond:.1f}%, or a loss, from 896 on" in PAGE
    dense = {model: span(model, (704,), "+8 over +64")[0] for model in GRAPHS}
    (first, _) = span("R1", (520,), "+8 over +64")
    assert (
        f"+{first:.1f}% at 520; at 704 clients +{dense['R1']:.1f}% with R1's graphs and {dense['V3.2']:.0f}% with"
        in PAGE
    )
    short = {
        model: [-each for each in span(model, [each for each in CLIENTS if each >= at], "+8 over +64")]
        for model, at in (("R1", 768), ("V3.2", 704))
    }
    (r1_most, r1_least), (v3_most, v3_least) = short.values()
    assert f"loss of {r1_least:.0f} to {r1_most:.0f}% on R1 and {v3_least:.0f} to {v3_most:.0f}% on V3.2" in PAGE
    assert f"{100 * PUBLISHED_GAIN - most:.0f} points short of the study's 30%" in PAGE
    at = [*WRITTEN["largest_gain_of_+64_at"].values()]
    by_draws = ", ".join(f"at {clients} in {at.count(clients)}" for clients in sorted({*at}))
    spread = [each for key, each in WRITTEN["least_and_most_gain_of_+64"].items() if 520 <= int(key) <= 704]
    least, most = (100 * (choose(each) - 1) for choose, each in zip((min, max), zip(*spread, strict=True), strict=True))
    assert f"of {len(at)} draws of requests the most is {by_draws}" in PAGE
    assert f"+{least:.1f} to {most:.1f}% from 520 to 704" in PAGE
