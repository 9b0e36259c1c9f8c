"""A host whose speed changes in the course of a run."""

from __future__ import annotations

import attrs
import pytest

from kpolicy.costs import CostTable
from kpolicy.errors import ConfigError
from kpolicy.host_speed import launching_takes
from kpolicy.simulate import SimResult, SimStep, simulate
from kpolicy.simulate.host_state import HostSpeeds

from .helpers import COSTS, SIZES, server, trace_of

NOTED = attrs.evolve(COSTS, host_work_us=20.0, padding_us=(0.0, 0.0))
BUSY = trace_of(*[(0.2 * i, 3 + 7 * i % 40, 1 + 5 * i % 17) for i in range(20)])


def served(
    policy: str, costs: CostTable = NOTED, speeds: HostSpeeds | None = None, *, steps: list[SimStep] | None = None
) -> SimResult:
    return simulate(
        BUSY, policy, server=server(num_blocks=60), costs=costs, ladder=SIZES, host_speed=speeds,
        on_step=None if steps is None else steps.append,
    )  # fmt: skip


def test_between_notes_the_speed_is_between_theirs() -> None:
    speeds = HostSpeeds([(100.0, 20.0), (100.0, 24.0), (300.0, 40.0)])
    assert [speeds.at(us) for us in (0.0, 99.0, 100.0, 150.0, 300.0, 1e9)] == [20.0, 20.0, 24.0, 28.0, 40.0, 40.0]


@pytest.mark.parametrize("noted", [[], [(2.0, 20.0), (1.0, 20.0)], [(0.0, 0.0)], [(0.0, float("nan"))]])
def test_speeds_that_say_nothing_are_refused(noted: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigError, match="host speeds were given"):
        HostSpeeds(noted)


@pytest.mark.parametrize("policy", ["eager", "piecewise", "full", "split"])
def test_a_speed_that_stays_is_the_table_at_that_speed(policy: str) -> None:
    """These policies decide by no cost, so that steps of the slow host's table are the same."""
    slow = served(policy, speeds=HostSpeeds([(0.0, 30.0)]))
    assert slow.as_dict() == served(policy, NOTED.at_host_speed(30.0)).as_dict()
    assert slow.span_s > served(policy).span_s


def test_decisions_rest_on_the_table_as_it_was_measured() -> None:
    """A production server doesn't know that its core became slow."""
    plain: list[SimStep] = []
    slow: list[SimStep] = []
    served("auto", steps=plain)
    served("auto", speeds=HostSpeeds([(0.0, 60.0)]), steps=slow)
    first = [(each.decision, each.step.numbers) for each in (plain[0], slow[0])]
    assert first[0] == first[1]
    assert slow[0].host_us == pytest.approx(launching_takes(3) * plain[0].host_us)
    assert slow[0].device_us == plain[0].device_us


def test_steps_take_the_speed_of_their_time() -> None:
    """Slow from the middle on: steps before that are as ever, and those after it aren't."""
    plain: list[SimStep] = []
    steps: list[SimStep] = []
    served("eager", steps=plain)
    middle = plain[len(plain) // 2].start_us
    served("eager", speeds=HostSpeeds([(0.0, 20.0), (middle - 1, 20.0), (middle - 0.5, 50.0)]), steps=steps)
    before = [each for each in plain if each.start_us < middle - 1]
    assert [each.cycle_us for each in steps[: len(before)]] == [each.cycle_us for each in before]
    after = steps[len(before)]
    assert after.host_us == pytest.approx(launching_takes(2.5) * plain[len(before)].host_us)
