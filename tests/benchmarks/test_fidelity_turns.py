"""Policies with several turns on the same arrivals: means, ties by what turns of one policy differ by, whose logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks import fidelity
from benchmarks.fidelity_served import latencies
from benchmarks.fidelity_turns import (
    LEAST_REPLAYS,
    MOST_APART,
    TIE,
    figure,
    not_shown,
    of_turns,
    ranked_wrong,
    ranking,
    replays_apart,
    tie_of,
    ties,
)
from kpolicy.costs import HostCost, analytic_costs
from kpolicy.decision import Decision, Launch
from kpolicy.errors import ConfigError
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.reasons import Reason
from kpolicy.schemas import LogHeader, Profile, StepEntry, StepLogWriter, write_profile
from kpolicy.shapes import BatchShape
from tests.benchmarks.test_fidelity import SETTING, TRACE, run

NEW_US = 50_000.0
SLOWER = 1.1


def test_a_figure_is_the_mean_of_turns() -> None:
    """With what the measured ones differ by; a single turn says nothing of that."""
    assert figure([10.0, 11.0], [12.0, 10.0]) == {
        "measured": 10.5, "simulated": 11.0, "error": 0.0476, "apart": 0.1, "deviation": 0.067344, "of": 2,
    }  # fmt: skip
    assert figure([10.0], [12.0]) == {"measured": 10.0, "simulated": 12.0, "error": 0.2}


def test_policies_whose_difference_may_be_chance_are_a_tie() -> None:
    """By hand: Student's t of both policies' turns, 4.303 for two and two, 2.776 for three and three."""
    figures = {"a": figure([10.0, 10.1], [10.5, 10.5]), "b": figure([10.2, 10.3], [10.3, 10.3])}
    deviations = 0.1 / 2**0.5 / 10.05, 0.1 / 2**0.5 / 10.25
    pooled = ((deviations[0] ** 2 + deviations[1] ** 2) / 2) ** 0.5
    assert tie_of(*figures.values()) == pytest.approx(4.303 * pooled, abs=1e-4)
    assert ranked_wrong(figures) == not_shown(figures) == []
    three = {"a": figure([10.0, 10.05, 10.1], [10.5] * 3), "b": figure([10.2, 10.25, 10.3], [10.3] * 3)}
    assert tie_of(*three.values()) == pytest.approx(2.776 * 0.05 / 10.15 * (2 / 3) ** 0.5, abs=1e-4)
    assert ranked_wrong(three) == [("a", "b")]
    assert ranked_wrong({**three, "b": figure([10.2, 10.25, 10.3], [10.6] * 3)}) == []


def test_a_policy_with_more_turns_tells_more_of_them() -> None:
    """Turns of both are pooled by their number."""
    noisy, steady = figure([10.0, 10.4], [10.0] * 2), figure([10.0, 10.0, 10.0], [10.0] * 3)
    assert tie_of(noisy, steady) == tie_of(steady, noisy)
    pooled = (noisy["deviation"] ** 2 / 3) ** 0.5
    assert tie_of(noisy, steady) == pytest.approx(3.182 * pooled * (1 / 2 + 1 / 3) ** 0.5, abs=1e-4)


def test_results_that_dont_say_what_turns_deviate_by_have_the_tie_of_their_time() -> None:
    """Means no further apart than the turns of either, until 2026-11-29."""
    one, other = figure([10.0, 10.4], [10.5, 10.5]), figure([10.4, 10.5], [10.3, 10.3])
    for each in (one, other):
        del each["deviation"], each["of"]
    assert tie_of(one, other) == pytest.approx(0.04)
    assert ranked_wrong({"a": one, "b": other}) == not_shown({"a": one, "b": other}) == []
    one["apart"] = 0.01
    assert ranked_wrong({"a": one, "b": other}) == [("a", "b")]


def test_a_third_policys_turns_excuse_nothing() -> None:
    """However far apart they are, the other two's ranking counts."""
    steady = {"a": figure([10.0, 10.01], [10.5, 10.5]), "b": figure([10.4, 10.41], [10.3, 10.3])}
    noisy = {**steady, "c": figure([13.0, 14.0], [14.0, 14.0])}
    assert ranked_wrong(noisy) == ranked_wrong(steady) == [("a", "b")]
    assert not_shown(noisy) == []
    assert ties(noisy)["a and b"] == ties(steady)["a and b"] < 0.01


def test_single_turns_have_the_tie_that_runs_had_before() -> None:
    """2%, as nothing is known of what turns differ by."""
    assert tie_of(figure([10.0], [10.0]), figure([10.1], [10.0])) == TIE == 0.02
    assert ranked_wrong({"a": figure([10.0], [11.0]), "b": figure([10.19], [10.0])}) == []
    assert ranked_wrong({"a": figure([10.0], [11.0]), "b": figure([10.21], [10.0])}) == [("a", "b")]


def test_policies_whose_turns_lie_far_apart_arent_ranked() -> None:
    """Unless they are further apart than that. Else the more turns differ, the fewer pairs could be wrong."""
    noisy = {"a": figure([10.0, 10.5], [13.0, 13.0]), "b": figure([10.6, 10.7], [9.0, 9.0])}
    assert tie_of(*noisy.values()) > MOST_APART
    assert (ranked_wrong(noisy), not_shown(noisy)) == ([], [("a", "b")])
    assert ranking({policy: {"busy_ms": each} for policy, each in noisy.items()})["not_shown"] == {
        "busy_ms": [("a", "b")]
    }
    far = {**noisy, "b": figure([16.0, 16.1], [9.0, 9.0])}
    assert (ranked_wrong(far), not_shown(far)) == ([("a", "b")], [])
    near = figure([10.0, 10.15], [10.0, 10.0])
    assert tie_of(near, near) < MOST_APART
    assert not_shown({"a": near, "b": near}) == []


def test_a_policy_with_one_turn_has_its_own_tie() -> None:
    """Beside one whose turns lie closer."""
    assert tie_of(figure([10.0, 10.1], [10.0, 10.0]), figure([10.0], [10.0])) == TIE


def test_each_figure_has_its_own_tie() -> None:
    """A policy's turns are kept beside its means."""
    turns = [{"ttft_p50_ms": figure([x], [10.0]), "gap_p50_ms": figure([5.0], [5.0]), "steps": {}} for x in (10, 11)]
    found = {"a": of_turns(turns), "b": of_turns(turns)}
    assert ranking(found) == {
        "ranked_wrong": {"ttft_p50_ms": [], "gap_p50_ms": []},
        "tie": {"ttft_p50_ms": {"a and b": 0.2898}, "gap_p50_ms": {"a and b": 0.0}},
        "not_shown": {"ttft_p50_ms": [("a", "b")], "gap_p50_ms": []},
    }
    assert found["a"]["turns"] == turns
    assert of_turns(turns[:1]) is turns[0]


def printed(turns: list[list[StepEntry]], served: dict[str, Any], policy: str = "auto") -> dict[str, Any]:
    """What ``kpolicy run --repeats`` prints of one policy."""
    times = [sum(each.cycle_us or 0.0 for each in entries) for entries in turns]
    each = served | {"policy": policy, "gap_us": [served["gap"]], "span_s": served["span"]}
    policies = [
        each | {"repeat": i + 1, "steps": len(entries), "step_us": us, "ttft_us": [served["ttft"] * us / times[0]]}
        for i, (entries, us) in enumerate(zip(turns, times, strict=True))
    ]
    return {"setting": SETTING | {"attention": "mixed", "max_model_len": 2000, "rate": 1.0}, "policies": policies}


def slower(entries: list[StepEntry]) -> list[StepEntry]:
    return [attrs.evolve(each, cycle_us=SLOWER * (each.cycle_us or 0.0)) for each in entries]


def test_turns_are_simulated_each_by_its_own_log() -> None:
    """Each with its own steps' times; a policy's logs are those of its turns, in their order."""
    entries, served = run()
    told = printed([entries, slower(entries)], served)
    found = latencies(told, TRACE, analytic_costs(), {"auto": [entries, slower(entries)]})["auto"]
    assert found["turns"][0]["replayed"]["same_batches"] == len(entries)
    first, second = (each["ttft_p50_ms"] for each in found["turns"])
    assert second["measured"] == pytest.approx(SLOWER * first["measured"], rel=1e-4)
    assert found["ttft_p50_ms"]["apart"] == pytest.approx(SLOWER - 1, abs=1e-3)
    assert found["ttft_p50_ms"]["measured"] == pytest.approx((first["measured"] + second["measured"]) / 2, abs=1e-3)
    with pytest.raises(ConfigError, match=r"auto's logs have .* Give the log of each turn"):
        latencies(told, TRACE, analytic_costs(), {"auto": [entries]})
    with pytest.raises(ConfigError, match=r"auto's logs have .* Give the log of each turn"):
        latencies(told, TRACE, analytic_costs(), {"auto": [entries, entries[:-1]]})


def test_eager_sizes_of_the_turn_before_arent_new() -> None:
    """A process runs a size for the first time once."""
    costs = analytic_costs()
    costs = attrs.evolve(costs, effects=attrs.evolve(costs.effects, eager_new_us=NEW_US))
    entries, served = run(costs, policy="eager")
    told = printed([entries, entries], served, "eager")
    found = latencies(told, TRACE, costs, {"eager": [entries, entries]})["eager"]
    first, second = found["turns"]
    assert first["busy_ms"]["error"] == pytest.approx(0.0, abs=0.01)
    # Batches are others where steps are quicker, so a few sizes are new still.
    assert second["busy_ms"]["simulated"] < 0.9 * first["busy_ms"]["simulated"]
    rows = fidelity.fidelity(entries, costs, entries)
    assert [row.bias for row in fidelity.fidelity(entries, costs) if row.mode == "all"] == [pytest.approx(0.0)]
    assert [row.bias < -0.3 for row in rows if row.mode == "all"] == [True]


def test_cells_are_of_first_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later turns' are told beside, and time a token is the mean of all."""
    monkeypatch.setattr(fidelity, "RESULT", tmp_path / "fidelity.json")
    entries, _ = run()
    write_profile(tmp_path / "p.json", Profile(costs=analytic_costs(), device="d", model="m"))
    given = ["--profile", str(tmp_path / "p.json")]
    for name, turn in (("s", entries), ("s-2", slower(entries))):
        with StepLogWriter(tmp_path / f"{name}.jsonl", LogHeader(policy="auto")) as writer:
            for entry in turn:
                writer.write(entry)
        given += ["--log", str(tmp_path / f"{name}.jsonl")]
    fidelity.main([*given, "--date", "D"])
    result = json.loads((tmp_path / "fidelity.json").read_text())
    [cells] = [row for row in result["policies"]["auto"] if row["mode"] == "all"]
    assert (cells["steps"], cells["error"]) == (len(entries), 0.0)
    [later] = [row for row in result["later_turns"] if row["mode"] == "all"]
    assert later["error"] == pytest.approx(1 - 1 / SLOWER, abs=1e-3)
    own = {name: rows[-1] for name, rows in result["by_own_speed"].items() if rows}
    assert {name: row["steps"] for name, row in own.items()} == {
        "first_turns": len(entries), "all_turns": 2 * len(entries),
    }  # fmt: skip
    assert (own["first_turns"]["error"], own["all_turns"]["error"]) == (
        0.0,
        pytest.approx(later["error"] / 2, abs=1e-3),
    )
    assert result["us_per_token"]["auto"]["apart"] == pytest.approx(SLOWER - 1, abs=1e-3)
    assert result["tie"] == {}
    assert result["us_per_token"]["auto"]["error"] == pytest.approx(2 / (1 + SLOWER) - 1, abs=1e-3)


def test_replays_of_the_same_decode_graphs_are_held_to_each_other() -> None:
    """By hand: of as many rows in one graph, often enough; longer contexts and other numbers of rows tell nothing."""
    costs = attrs.evolve(analytic_costs(), host_full=HostCost(0.0))
    graph = Launch(Rows.ALL, GraphKey(Part.FULL, 8, num_reqs=8))

    def steps(rows: int, times: float, count: int = LEAST_REPLAYS, kv: int = 64) -> list[StepEntry]:
        shape = BatchShape.decode(rows, rows * kv)
        us = costs.cost((graph,), shape.numbers).cycle_us
        decision = Decision(Mode.FULL, (graph,), Reason.CHEAPEST_MEASURED)
        return [StepEntry.of(i, shape, decision, cycle_us=times * us) for i in range(count)]

    slow, quick = [steps(4, 1.02), steps(4, 1.02, kv=900)], [steps(4, 1.0)]
    assert replays_apart({"a": slow, "b": quick}, costs) == {"a and b": pytest.approx(0.02, abs=1e-4)}
    assert replays_apart({"a": quick, "b": slow}, costs) == {"a and b": pytest.approx(1 / 1.02 - 1, abs=1e-4)}
    assert replays_apart({"a": slow, "b": [steps(5, 1.0)]}, costs) == {}
    assert replays_apart({"a": slow, "b": [steps(4, 1.0, LEAST_REPLAYS - 1)]}, costs) == {}
    # Weighted by steps that both have.
    both = {"a": [steps(4, 1.02), steps(6, 1.05, 3 * LEAST_REPLAYS)], "b": [steps(4, 1.0), steps(6, 1.0)]}
    assert replays_apart(both, costs) == {"a and b": pytest.approx(0.035, abs=1e-4)}
    bound = attrs.evolve(costs, host_full=HostCost(1e8))
    assert replays_apart({"a": slow, "b": quick}, bound) == {}
