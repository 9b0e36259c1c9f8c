"""A table that says what its host took while it served: simulations by it go by the scheduler's time and its speed."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from kpolicy.costs import CostTable, Curve, HostCost
from kpolicy.errors import ConfigError
from kpolicy.host_speed import launching_takes
from kpolicy.scheduling.traces import Trace
from kpolicy.served_host import ServedHost
from kpolicy.settings import Settings
from kpolicy.simulate import Server, SimStep, simulate
from kpolicy.simulate.host_state import HostSpeeds, HostState
from kpolicy.simulate.run import DecodeRun
from kpolicy.simulate.step_costs import StepCosts
from kpolicy.step_effects import StepEffects

from .helpers import COSTS, SIZES, hash_lists, server, trace_of, traces, with_ids

# Every step takes the host 100 us and 20 that nothing overlaps, on which the fixed work takes 20 us. It takes 40 in
# every other 250 us of serving, and so a step's launching 1.85 times as long.
FLAT = Curve((1,), (10.0,))
TABLE = CostTable(
    version="flat", measured=True, full=FLAT, piecewise=FLAT, eager=FLAT, host_full=HostCost(100.0),
    host_piecewise=HostCost(100.0), host_eager=HostCost(100.0), step_us=20.0, host_work_us=20.0,
    served=ServedHost(scheduler_us=10.0, scheduler_prompt_us=5.0, every_us=250.0, host_work_us=(20.0, 40.0)),
)  # fmt: skip
ONE = trace_of((0, 4, 5))
"""One prompt and four decode steps"""


def cycles(of: Server, costs: CostTable = TABLE, trace: Trace = ONE, policy: str = "eager", **more: Any) -> list[float]:
    """What each step takes, as it is told: the result by steps and by stretches has their sum."""
    steps: list[SimStep] = []
    told = simulate(trace, policy, server=of, costs=costs, on_step=steps.append, **more)
    found = [each.cycle_us for each in steps]
    for result in (told, simulate(trace, policy, server=of, costs=costs, **more)):
        assert result.step_us == pytest.approx(sum(found))
    return found


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # They begin at 0, 135, 265, 497 and 729 us: the third and the fourth in the slow 250 us.
        ({}, [135.0, 130.0, 232.0, 232.0, 130.0]),
        ({"steady_host": True}, [135.0, 130.0, 130.0, 130.0, 130.0]),
        # At 0, 121, 242, 363 and 586 us: the fourth alone.
        ({"scheduler_us": 1.0}, [121.0, 121.0, 121.0, 223.0, 121.0]),
        ({"scheduler_us": 0.0}, [120.0, 120.0, 120.0, 222.0, 120.0]),
        ({"scheduler_prompt_us": 0.0}, [130.0, 130.0, 232.0, 232.0, 130.0]),
        ({"scheduler_prompt_us": 7.0, "steady_host": True}, [137.0, 130.0, 130.0, 130.0, 130.0]),
        ({"scheduler_us": 1.0, "scheduler_prompt_us": 7.0, "steady_host": True}, [128.0, 121.0, 121.0, 121.0, 121.0]),
    ],
)
def test_steps_by_hand(given: dict[str, Any], wanted: list[float]) -> None:
    """The scheduler's time is the table's where none is given, and the host as slow as when the step begins.

    A step's own time for the scheduler leaves none for prompts, unless that is given too.
    """
    assert cycles(server(**given)) == pytest.approx(wanted)


# A table of a host twice as slow in everything, but for what launching takes of the fixed work
TWICE = launching_takes(2.0)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # Without notes, or steadily: all steps alike. The scheduler takes as much longer, unless its time is given.
        ({"steady_host": True}, [135.0 * TWICE, *[130.0 * TWICE] * 4]),
        ({"steady_host": True, "scheduler_us": 10.0}, [120.0 * TWICE + 10, *[120.0 * TWICE + 10] * 4]),
        # Twice 20 or 40 us of the work, launching 1.85 or 3.55 times as long: they begin at 0, 249.75, 490.25, 934.75
        # and 1,379.25 us, the first two in 250 us of the quicker host.
        ({}, [249.75, 240.5, 444.5, 444.5, 444.5]),
    ],
)
def test_a_slower_host_by_hand(given: dict[str, Any], wanted: list[float]) -> None:
    """Launching, what nothing overlaps, and the scheduler's own time."""
    found = cycles(server(slower_host=2.0, **given))
    assert found == pytest.approx(wanted)
    assert cycles(server(slower_host=1.0, **given)) == cycles(server(**given))
    if "steady_host" in given:
        bare = attrs.evolve(TABLE, served=None)
        by_hand = [us - (15.0 if not i else 10.0) * TWICE for i, us in enumerate(wanted)]
        if "scheduler_us" not in given:
            assert cycles(server(slower_host=2.0), bare) == pytest.approx(by_hand)


@pytest.mark.parametrize("value", [0, -1, 0.09, 10.1, float("nan"), float("inf"), "2", None, True])
def test_a_slower_host_is_a_factor(value: Any) -> None:
    """Anything else is refused, and costs that don't say how fast their host was."""
    with pytest.raises(ConfigError, match=r"slower_host is .*; it is from 0\.1 to 10 times as long as noted, 1 for"):
        Server(slower_host=value)


def test_a_slower_host_needs_the_speed_that_the_costs_are_of() -> None:
    unnoted = attrs.evolve(TABLE, served=None, host_work_us=0.0)
    assert cycles(server(slower_host=1.0), unnoted) == [120.0] * 5
    with pytest.raises(
        ConfigError, match=r"slower_host is 1\.1, and the costs 'flat' don't say how fast their host was"
    ):
        cycles(server(slower_host=1.1), unnoted)


def test_a_seed_picks_the_note_that_it_begins_at() -> None:
    """Begun in the slow 250 us they begin at 0, 237, 469, 599 and 831 us; each policy has the same start."""
    slow_first = [237.0, 232.0, 130.0, 232.0, 130.0]
    found = {tuple(round(us, 6) for us in cycles(server(), seed=seed)) for seed in range(8)}
    assert found == {tuple(slow_first), (135.0, 130.0, 232.0, 232.0, 130.0)}
    for seed in range(1, 8):
        turned = attrs.evolve(TABLE, served=TABLE.served and TABLE.served.begun_at(seed))
        for policy in ("eager", "piecewise"):
            assert cycles(server(), seed=seed, policy=policy) == cycles(server(), turned, policy=policy)
    assert cycles(server(steady_host=True), seed=3) == cycles(server(steady_host=True))


def test_what_the_table_says_of_the_scheduler_alone_needs_no_notes() -> None:
    """Without notes the host keeps its speed; without the scheduler's time steps are the table's own."""
    assert cycles(server(), attrs.evolve(TABLE, served=ServedHost(scheduler_us=10.0))) == [130.0] * 5
    assert cycles(server(), attrs.evolve(TABLE, served=None)) == [120.0] * 5
    assert cycles(server(scheduler_prompt_us=3.0), attrs.evolve(TABLE, served=None)) == [123.0, *[120.0] * 4]


def test_the_times_that_a_server_goes_by() -> None:
    """As given, or by the costs."""
    bare = attrs.evolve(TABLE, served=None)
    told = {
        (None, None): ((10.0, 5.0), (0.0, 0.0)), (3.0, None): ((3.0, 0.0), (3.0, 0.0)),
        (0.0, None): ((0.0, 0.0), (0.0, 0.0)), (None, 4.0): ((10.0, 4.0), (0.0, 4.0)),
        (None, 0.0): ((10.0, 0.0), (0.0, 0.0)), (3.0, 4.0): ((3.0, 4.0), (3.0, 4.0)),
    }  # fmt: skip
    for (step_us, prompt_us), (noted, unnoted) in told.items():
        of = Server(scheduler_us=step_us, scheduler_prompt_us=prompt_us)
        assert (of.outside_us(TABLE), of.outside_us(bare)) == (noted, unnoted)
    assert Server().host_speed(TABLE) is TABLE.served
    assert Server().host_speed(bare) is None
    assert Server().host_speed(attrs.evolve(bare, served=ServedHost(scheduler_us=10.0))) is None
    assert Server(steady_host=True).host_speed(TABLE) is None


def test_notes_count_from_the_first_arrival() -> None:
    """Whenever that is; what captures take before the first step counts too."""
    assert cycles(server(), trace=trace_of((777, 4, 5))) == pytest.approx(cycles(server()))
    slow = attrs.evolve(TABLE, capture_us=(0.0, 260.0))
    cold = server(warm=False)
    first = cycles(cold, slow, policy="piecewise", ladder=[4])[0]
    assert first == pytest.approx(185 + 37 + 15)


def test_a_host_that_was_as_fast_as_ever_changes_nothing() -> None:
    """To the last bit: notes of the very time that the table's launches are of."""
    as_ever = attrs.evolve(TABLE, served=attrs.evolve(TABLE.served, host_work_us=(20.0, 20.0, 20.0)))
    busy = trace_of(*[(0.2 * i, 3 + 7 * i % 40, 1 + 5 * i % 17) for i in range(20)])
    found, wanted = (simulate(busy, server=server(steady_host=steady), costs=as_ever) for steady in (False, True))
    assert found.as_dict() == wanted.as_dict()


# Tables of which every part costs something odd

NOTED = attrs.evolve(COSTS, host_work_us=20.0)
EFFECTS = (
    StepEffects(), StepEffects(warm_host_share=(0.7, 0.9), eager_new_us=55.5), StepEffects(eager_new_us=55.5),
    StepEffects(warm_host_share=(0.6, 1.0), padding_share=(0.5, 0.3)),
)  # fmt: skip
POLICIES = ("auto", "vllm", "split", "eager", "piecewise", "sglang")


def noted(every_us: float, works: tuple[float, ...], effects: StepEffects = EFFECTS[0]) -> CostTable:
    served = ServedHost(scheduler_us=11.3, scheduler_prompt_us=5.7, every_us=every_us, host_work_us=works)
    return attrs.evolve(NOTED, effects=effects, served=served)


tables = st.builds(
    noted, st.sampled_from([37.7, 400.0, 1000.0, 5000.0]),
    st.lists(st.sampled_from([15.0, 20.0, 23.1, 37.7, 90.0]), min_size=1, max_size=5).map(tuple),
    st.sampled_from(EFFECTS),
)  # fmt: skip
"""Many steps in one note, several notes in one step, and anything between"""


@given(
    traces(most_output=80), hash_lists, st.sampled_from(POLICIES), tables, st.booleans(),
    st.sampled_from([(30, 4), (60, 4), (24, 8)]), st.sampled_from([None, 2]),
)  # fmt: skip
@run_settings(max_examples=200)
def test_stretches_change_nothing(trace, hashes, policy, costs, warm, blocks, clients):
    """The host's speed changes in the midst of one as it does where each step goes through the scheduler."""
    trace = with_ids(trace, hashes)
    of = server(*blocks, reuse_prefixes=True, prefix_block=8, warm=warm, concurrency=clients)
    plain = simulate(trace, policy, server=of, costs=costs, ladder=SIZES, stepwise=True)
    assert simulate(trace, policy, server=of, costs=costs, ladder=SIZES).as_dict() == plain.as_dict()


def test_a_stretch_has_several_speeds() -> None:
    """Of one request's 200 decode steps all but the first are told at once; each has the speed of its time."""
    costs, told = noted(400.0, (20.0, 60.0)), []
    simulate(
        trace_of((0, 4, 200)),
        "eager",
        server=server(100),
        costs=costs,
        on_decodes=told.append,
        on_step=list[Any]().append,
    )
    assert max(len(each.cycles_us) for each in told) > 190
    fast, slow = ({us for each in told for us in each.cycles_us if (us > 450) is slower} for slower in (False, True))
    assert fast
    assert slow


@given(traces(most_output=80), st.sampled_from(POLICIES), tables)
@run_settings(max_examples=60)
def test_decodes_told_at_once_are_the_steps(trace, policy, costs):
    """With the same begin, time and decision."""
    steps: list[SimStep] = []
    simulate(trace, policy, server=server(60), costs=costs, ladder=SIZES, on_step=steps.append)
    got: list[Any] = []

    def one(step: SimStep) -> None:
        got.append((step.number, step.start_us, step.cycle_us, step.decision))

    def several(steps: DecodeRun) -> None:
        decisions = [decision for decision, count in steps.decisions for _ in range(count)]
        now_us = steps.now_us
        for i, (us, decision) in enumerate(zip(steps.cycles_us, decisions, strict=True)):
            got.append((steps.number + i, now_us - steps.origin_us, us, decision))
            now_us += us

    simulate(trace, policy, server=server(60), costs=costs, ladder=SIZES, on_step=one, on_decodes=several)
    assert got == [(each.number, each.start_us, each.cycle_us, each.decision) for each in steps]


DRAFTING = Settings(max_num_reqs=6, max_num_tokens=40, num_speculative_tokens=2)


@given(traces(), st.sampled_from(POLICIES), tables, st.booleans())
@run_settings(max_examples=100)
def test_each_step_costs_what_its_moments_speed_says(trace, policy, costs, drafts):
    """By what ran before it, whose costs are brought to that speed, with drafts too."""
    of = server(60, **({"settings": DRAFTING} if drafts else {}))
    steps: list[SimStep] = []
    simulate(trace, policy, server=of, costs=costs, ladder=None if drafts else SIZES, on_step=steps.append)
    host = HostState(costs)
    for each in steps:
        launches, numbers = each.decision.launches, each.step.numbers
        now = host.costs(each.decision.mode, launches, numbers).at_host_speed(costs.served.at(each.start_us))
        cost = now.cost(launches, numbers)
        assert (each.host_us, each.device_us) == (cost.host_us, cost.device_us)
        assert each.cycle_us == pytest.approx(cost.cycle_us + 11.3 + (5.7 if numbers.num_prefills else 0.0))


@given(traces(), st.sampled_from(POLICIES), tables, st.sampled_from([2, 3]))
@run_settings(max_examples=60)
def test_ranks_have_one_hosts_speed(trace, policy, costs, ranks):
    """They go on with the slowest one, each at that speed."""
    costs = attrs.evolve(costs, effects=StepEffects())
    steps: list[SimStep] = []
    simulate(trace, policy, server=server(60, ranks=ranks), costs=costs, ladder=SIZES, on_step=steps.append)
    together: dict[int, list[SimStep]] = {}
    for each in steps:
        together.setdefault(each.number, []).append(each)
    for of_step in together.values():
        ready = []
        for each in of_step:
            now = costs.at_host_speed(costs.served.at(each.start_us))
            cost = StepCosts.after_another(now).cost(each.decision.launches, each.step.numbers)
            assert (each.host_us, each.device_us) == (cost.host_us, cost.device_us)
            ready.append(cost.cycle_us)
        wanted = max(ready) + 11.3 + 5.7 * any(each.step.numbers.num_prefills for each in of_step)
        # A rank without rows of its own replays the others' graph too, and may take longer than they do.
        assert min(each.cycle_us for each in of_step) >= wanted * (1 - 1e-9)
        if len(of_step) == ranks:
            assert [each.cycle_us for each in of_step] == pytest.approx([wanted] * ranks)


def test_decisions_rest_on_the_table_as_it_was_measured() -> None:
    """A production server doesn't know that its core is slow; launching takes what it takes then."""
    slow: list[SimStep] = []
    plain: list[SimStep] = []
    for steps, works in ((slow, (60.0,)), (plain, (20.0,))):
        simulate(
            trace_of((0, 9, 3)), "auto", server=server(60), ladder=SIZES, on_step=steps.append,
            costs=attrs.evolve(noted(1000.0, works), padding_us=(0.0, 0.0)),
        )  # fmt: skip
    assert slow[0].decision == plain[0].decision
    assert slow[0].host_us == pytest.approx(launching_takes(3) * plain[0].host_us)
    assert slow[0].device_us == plain[0].device_us


@pytest.mark.parametrize("policy", POLICIES)
def test_a_speed_that_is_given_goes_first(policy: str) -> None:
    """What a run noted of its own host, and not what the profile did of its own."""
    busy = trace_of(*[(0.2 * i, 3 + 7 * i % 40, 1 + 5 * i % 17) for i in range(20)])
    given = HostSpeeds([(0.0, 20.0), (1500.0, 60.0), (3000.0, 20.0)])
    profile, bare = noted(400.0, (90.0, 15.0)), attrs.evolve(NOTED, served=None)
    of = server(60, scheduler_us=7.0)

    def told(costs: CostTable, speeds: HostSpeeds | None = None, **more: Any) -> dict[str, Any]:
        found = simulate(busy, policy, server=of, costs=costs, ladder=SIZES, host_speed=speeds, **more)
        return found.as_dict()

    assert told(profile, given) == told(bare, given) != told(profile)
    # One note is a speed that stays.
    assert told(noted(400.0, (60.0,))) == told(bare, HostSpeeds([(0.0, 60.0)]))
