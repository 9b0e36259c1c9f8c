"""A simulation tells `auto` the longest gaps so far, as a run by tokens does."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest

from kpolicy.costs import HostCost
from kpolicy.modes import Mode, SplitForm
from kpolicy.policies import auto_tables
from kpolicy.profiles import load_profile
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import GAP_TAIL_US
from kpolicy.simulate import Server, simulate

from .helpers import COSTS, SIZES, reference, run, server, trace_of

DRAWN = random.Random(5)  # noqa: S311
LONG = trace_of(*[(4.0 * i, DRAWN.randint(2, 60), DRAWN.randint(10, 40)) for i in range(150)])
"""Some thousand gaps: enough to tell which one in a hundred exceeds."""
AHEAD = Objective(1.0, 0.0, first_token_limit=1.25)
"""Throughput which may delay prompts for several decode steps beside them."""
# Decode steps beside prompts are nearly free, so that several are worth while, and take what decisions say: those leave
# out how long a prompt waits for their launch.
FREE = attrs.evolve(
    COSTS, overlap_cost=0.0, prefill_attention=attrs.evolve(COSTS.prefill_attention, row_us=9.0),
    host_full=HostCost(0.0),
)  # fmt: skip


def test_a_long_run_is_told_as_by_tokens() -> None:
    """The same fact in the same steps as the batcher's, and the very same decisions."""
    _, steps = reference(LONG, "auto", num_blocks=200)
    _, seen = run(LONG, of=server(200))
    assert [(each.step.numbers, each.decision) for each in seen] == [(numbers, made) for numbers, made, _, _ in steps]
    told = [each.step.numbers.facts.get(GAP_TAIL_US) for each in seen]
    assert sum(each is not None for each in told) > 20


def test_stretches_are_counted_alike() -> None:
    """Decode steps without the scheduler count as those with it."""
    plain = simulate(LONG, server=server(200), costs=FREE, ladder=SIZES, stepwise=True)
    assert simulate(LONG, server=server(200), costs=FREE, ladder=SIZES).as_dict() == plain.as_dict()


@pytest.mark.parametrize(("rest", "says"), [({}, True), ({"gap_tail": False}, False), ({"ranks": 2}, False)])
def test_who_is_told(rest: dict[str, Any], says: bool) -> None:
    """One rank is, unless the server says otherwise; several agree without."""
    _, seen = run(LONG, of=server(200, **rest))
    assert any(GAP_TAIL_US in each.step.numbers.facts for each in seen) == says


def test_several_decode_steps_come_within_it() -> None:
    """Once it is told no step that runs decodes ahead has longer gaps; without it some of the same trace do."""

    def longest(*, told: bool) -> tuple[float, int]:
        _, seen = run(LONG, of=server(200, gap_tail=told), costs=FREE, objective=AHEAD)
        ahead = [each for each in seen if each.decision.form is SplitForm.DECODES_BESIDE]
        assert all(each.decision.mode is Mode.SPLIT for each in ahead)
        beyond = 0
        for each in ahead:
            gap_us = each.cycle_us / each.decision.decode_steps
            beyond += gap_us > each.step.numbers.gap_tail_us
        return max(each.cycle_us / each.decision.decode_steps for each in ahead[len(ahead) // 2 :]), beyond

    with_it, beyond = longest(told=True)
    without, _ = longest(told=False)
    assert not beyond
    assert with_it < without


def test_decode_steps_lie_evenly_beside_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Done at once their rows wait for the rest of the prompt and for a whole step after it: longer gaps at p99.

    Long prompts all at once beside few decodes, by the H200's table of Qwen2.5-0.5B. As much is done in either case.
    """
    costs = load_profile("qwen2.5-0.5b-h200").costs
    rows = random.Random(7)  # noqa: S311
    long = trace_of(*[(0.0, rows.randint(3000, 9000), rows.randint(40, 120)) for _ in range(80)])
    settings = Settings(max_num_reqs=16, max_num_tokens=8192)
    of = Server(settings=settings, kv_tokens=400_000, warm=True)

    def served(policy: str = "auto") -> dict[str, Any]:
        found: dict[str, Any] = simulate(long, policy, server=of, costs=costs, objective=AHEAD).as_dict()
        return found

    even, whole = served(), served("piecewise")
    monkeypatch.setattr(auto_tables, "spread", lambda way, _: way)
    at_once = served()
    assert even["span_s"] == pytest.approx(at_once["span_s"], rel=0.02)
    assert even["gap"]["p99"] * 1.15 < at_once["gap"]["p99"]
    assert even["gap"]["p99"] <= whole["gap"]["p99"]
