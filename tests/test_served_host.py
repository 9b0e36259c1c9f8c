"""`ServedHost`: what a server's host took besides launching, in files and in the middle of several profiles too."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy.costs import CostTable, analytic_costs
from kpolicy.errors import ConfigError, ProfileError, SchemaError
from kpolicy.middle_profile import middle
from kpolicy.schemas import Profile, dumps, loads
from kpolicy.served_host import EVERY_US, ServedHost, noted_work

NOTED = ServedHost(scheduler_us=150.0, scheduler_prompt_us=70.0, every_us=100.0, host_work_us=(20.0, 30.0, 25.0))


# One host


def test_a_moment_has_the_note_of_its_stretch_and_behind_the_last_all_come_again() -> None:
    """A stretch has its begin and not its end; 1,000,000 us are ten notes behind 3,333 rounds of three."""
    moments = (0.0, 99.9, 100.0, 199.9, 200.0, 299.9, 300.0, 450.0, 599.9, 600.0, 1_000_000.0)
    assert [NOTED.at(us) for us in moments] == [20, 20, 30, 30, 25, 25, 20, 30, 25, 20, 30]
    one = attrs.evolve(NOTED, host_work_us=(20.0,))
    assert [one.at(us) for us in moments] == [20] * len(moments)


def test_the_mean_of_notes() -> None:
    """Each counts alike; without any it is 0."""
    assert NOTED.mean_work_us == 25.0
    assert ServedHost(scheduler_us=150.0).mean_work_us == 0.0


def test_how_slow_the_host_was_is_told_by_its_usual_speed() -> None:
    """Work of 20, 30 and 25 us where 25 are usual; nothing where it wasn't noted."""
    assert NOTED.slower(25.0) == {"least": 0.8, "mean": 1.0, "most": 1.2}
    assert ServedHost(scheduler_us=150.0).slower(25.0) == {}


def test_nothing_but_the_schedulers_time_need_be_known() -> None:
    assert attrs.astuple(ServedHost(scheduler_us=0.0)) == (0.0, 0.0, EVERY_US, ())


def test_a_seed_picks_which_note_is_the_first() -> None:
    """In the same turn; 0 the first one, the same one each time, and of many seeds each note once."""
    host = ServedHost(scheduler_us=1.0, host_work_us=(2.0, 3.0, 4.0))
    assert host.begun_at(0) is host
    begun = {host.begun_at(seed).host_work_us for seed in range(1, 40)}
    assert begun == {(2.0, 3.0, 4.0), (3.0, 4.0, 2.0), (4.0, 2.0, 3.0)}
    assert host.begun_at(7) == host.begun_at(7)
    bare = ServedHost(scheduler_us=1.0)
    assert bare.begun_at(7) is bare


def test_notes_may_be_any_series() -> None:
    """They are kept as a tuple, so that values are equal and have a hash."""
    found = ServedHost(scheduler_us=1.0, host_work_us=[2.0, 3.0])
    assert found == ServedHost(scheduler_us=1.0, host_work_us=(2.0, 3.0))
    assert hash(found) == hash(ServedHost(scheduler_us=1.0, host_work_us=iter((2.0, 3.0))))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        *(
            (field, value, f"{field} is {value}; it is microseconds from 0 up.")
            for field in ("scheduler_us", "scheduler_prompt_us")
            for value in (-0.5, 1e9, math.inf, math.nan)
        ),
        *(
            ("every_us", value, f"every_us is {value}; it is microseconds above 0, such as 50000.")
            for value in (0.0, -1.0, 1e12, math.inf, math.nan)
        ),
        *(
            ("host_work_us", (20.0, value), f"host_work_us[1] is {value}; it is microseconds above 0. Calibrate again.")
            for value in (0.0, -20.0, 1e9, math.inf, math.nan)
        ),
    ],
)
def test_a_time_that_none_takes_is_named(field: str, value: Any, said: str) -> None:
    """With its value and what it may be."""
    with pytest.raises(ProfileError) as caught:
        attrs.evolve(NOTED, **{field: value})
    assert str(caught.value) == said


# Of several servings


def test_the_middle_of_servings_is_each_time_and_all_notes() -> None:
    """Each time is another's median; notes are those of all, one serving behind the other."""
    found = ServedHost.middle(
        [
            NOTED,
            ServedHost(scheduler_us=110.0, scheduler_prompt_us=90.0, every_us=100.0, host_work_us=(40.0,)),
            ServedHost(scheduler_us=400.0, scheduler_prompt_us=0.0, every_us=100.0, host_work_us=(21.0, 20.0)),
        ]
    )
    assert found == ServedHost(
        scheduler_us=150.0, scheduler_prompt_us=70.0, every_us=100.0,
        host_work_us=(20.0, 30.0, 25.0, 40.0, 21.0, 20.0),
    )  # fmt: skip
    assert ServedHost.middle([NOTED]) == NOTED
    two = ServedHost.middle([NOTED, attrs.evolve(NOTED, scheduler_us=250.0)])
    assert (two.scheduler_us, two.scheduler_prompt_us) == (200.0, 70.0)


def test_a_serving_without_notes_counts_by_its_scheduler_alone() -> None:
    """Whatever its notes would have been of; where none has any, there are none."""
    bare = ServedHost(scheduler_us=250.0, scheduler_prompt_us=30.0, every_us=7.0)
    for order in ([bare, NOTED], [NOTED, bare]):
        assert ServedHost.middle(order) == attrs.evolve(NOTED, scheduler_us=200.0, scheduler_prompt_us=50.0)
    assert ServedHost.middle([bare, bare]) == bare


def test_notes_of_unlike_times_have_no_middle() -> None:
    """Laid one behind the other they would go by too fast or too slowly."""
    with pytest.raises(ProfileError, match=r"^every_us is 50\.0, 100\.0; give profiles that noted it alike\.$"):
        ServedHost.middle([NOTED, attrs.evolve(NOTED, every_us=50.0), NOTED])


# What was noted of steps


def test_a_stretch_has_the_mean_of_its_steps_by_their_time_in_it() -> None:
    """Of stretches of 100 us: 60 us at 20 and 40 at 30 are 24 in the mean, and a step of two is in both."""
    steps = [(0.0, 60.0, 20.0), (60.0, 150.0, 30.0), (150.0, 170.0, 44.0)]
    assert noted_work(steps, 100.0) == pytest.approx((24.0, (50 * 30 + 20 * 44) / 70))


def test_a_step_of_many_stretches_is_the_note_of_each() -> None:
    """To the end of one and not beyond: at 300 us it is over, and so is no part of the stretch that begins there."""
    assert noted_work([(50.0, 300.0, 20.0)], 100.0) == (20.0, 20.0, 20.0)
    assert noted_work([(50.0, 300.1, 20.0)], 100.0) == (20.0, 20.0, 20.0, 20.0)
    assert noted_work([(100.0, 200.0, 20.0), (200.0, 300.0, 30.0)], 100.0) == (20.0, 30.0)


def test_stretches_in_which_nothing_ran_are_left_out() -> None:
    """The next one that ran stands in their place, and idle time inside a stretch doesn't count."""
    assert noted_work([(10.0, 30.0, 20.0), (530.0, 540.0, 40.0), (541.0, 571.0, 20.0)], 100.0) == (20.0, 25.0)
    assert noted_work([], 100.0) == ()
    assert noted_work([(10.0, 10.0, 20.0)], 100.0) == ()


def test_a_stretch_is_of_50_ms_by_default() -> None:
    assert noted_work([(0.0, 50_000.0, 20.0), (50_000.0, 50_001.0, 30.0)]) == (20.0, 30.0)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300), st.integers(10, 90)), min_size=1), st.integers(1, 99)
)
def test_notes_are_between_those_of_their_steps(drawn: list[tuple[int, int, int]], every: int) -> None:
    """As many as stretches in which a step ran; with their times they add up to what was spent."""
    steps, now = [], 0.0
    for idle, us, work in drawn:
        now += idle
        steps.append((now, now + us, float(work)))
        now += us
    found = noted_work(steps, float(every))
    ran = {int(us) // every for begin, end, _ in steps for us in range(int(begin), int(end))}
    assert len(found) == len(ran)
    works = [work for *_, work in steps]
    assert all(min(works) * (1 - 1e-9) <= work <= max(works) * (1 + 1e-9) for work in found)
    spent = [sum(min(end, (i + 1) * every) - max(begin, i * every) for begin, end, _ in steps
                 if end > i * every and begin < (i + 1) * every) for i in sorted(ran)]  # fmt: skip
    wanted = sum((end - begin) * work for begin, end, work in steps)
    assert sum(work * us for work, us in zip(found, spent, strict=True)) == pytest.approx(wanted)


# In tables and files


def table(work_us: float = 20.0, **fields: Any) -> CostTable:
    return attrs.evolve(analytic_costs(), measured=True, host_work_us=work_us, **fields)


def profile(costs: CostTable) -> Profile:
    return Profile(costs=costs, device="a device", model="a model")


def test_profiles_carry_it_and_old_ones_have_none() -> None:
    """It is written and read with the costs; a file from before it, and one where none served, read without."""
    for served in (NOTED, ServedHost(scheduler_us=0.0), None):
        one = profile(table(served=served))
        assert loads(dumps(one), Profile) == one
    data = json.loads(dumps(profile(table(served=NOTED))))
    assert data["costs"]["served"] == {
        "scheduler_us": 150.0, "scheduler_prompt_us": 70.0, "every_us": 100.0, "host_work_us": [20.0, 30.0, 25.0],
    }  # fmt: skip
    data["costs"]["served"] = None
    assert loads(json.dumps(data), Profile).costs.served is None
    del data["costs"]["served"]
    assert loads(json.dumps(data), Profile).costs.served is None


def test_a_file_may_leave_out_all_but_the_schedulers_time() -> None:
    """What is left out is as by default; what a newer kpolicy adds is ignored."""
    data = json.loads(dumps(profile(table(served=NOTED))))
    data["costs"]["served"] = {"scheduler_us": 3, "news": [1]}
    assert loads(json.dumps(data), Profile).costs.served == ServedHost(scheduler_us=3.0)


@pytest.mark.parametrize(
    ("name", "to", "said"),
    [
        ("scheduler_us", ..., "costs.served.scheduler_us is missing; wanted a finite number"),
        ("scheduler_us", "150", "costs.served.scheduler_us is '150'; wanted a finite number"),
        ("scheduler_us", None, "costs.served.scheduler_us is None; wanted a finite number"),
        ("scheduler_us", -1, "costs.served can't be used: scheduler_us is -1"),
        ("scheduler_prompt_us", True, "costs.served.scheduler_prompt_us is True; wanted a finite number"),
        ("scheduler_prompt_us", 1e9, "costs.served can't be used: scheduler_prompt_us is 1000000000.0"),
        ("every_us", 0, "costs.served can't be used: every_us is 0"),
        ("every_us", float("nan"), "holds NaN"),
        ("host_work_us", 20.0, "costs.served.host_work_us is 20.0; wanted a list"),
        ("host_work_us", [20.0, "30"], "costs.served.host_work_us[1] is '30'; wanted a finite number"),
        ("host_work_us", [20.0, 0.0], "costs.served can't be used: host_work_us[1] is 0.0"),
    ],
)
def test_a_wrong_field_is_named_by_its_place_in_the_file(name: str, to: Any, said: str) -> None:
    data = json.loads(dumps(profile(table(served=NOTED))))
    if to is ...:
        del data["costs"]["served"][name]
    else:
        data["costs"]["served"][name] = to
    with pytest.raises(SchemaError) as caught:
        loads(json.dumps(data), Profile)
    assert said in str(caught.value)


@pytest.mark.parametrize("wrong", [3.0, "150", [150.0], True])
def test_what_is_no_part_of_a_file_is_named(wrong: Any) -> None:
    data = json.loads(dumps(profile(table(served=NOTED))))
    data["costs"]["served"] = wrong
    with pytest.raises(SchemaError, match=r"costs\.served is .*; wanted an object"):
        loads(json.dumps(data), Profile)


def test_a_table_holds_notes_to_the_work_of_its_launches() -> None:
    """Without that nobody can tell how much slower the host was; the scheduler's time alone needs none."""
    said = "served has 3 times of the fixed work, and host_work_us, which they are held to, is 0."
    with pytest.raises(ProfileError, match=said):
        table(0.0, served=NOTED)
    data = json.loads(dumps(profile(table(served=NOTED))))
    data["costs"]["host_work_us"] = 0.0
    with pytest.raises(SchemaError, match=f"costs can't be used: {said}"):
        loads(json.dumps(data), Profile)
    assert table(0.0, served=ServedHost(scheduler_us=150.0)).served is not None


def test_a_table_of_another_part_is_refused() -> None:
    wrong: Any = {"scheduler_us": 150.0}
    with pytest.raises(ConfigError, match=r"^served is .*it takes a ServedHost, such as ServedHost\(scheduler_us=150"):
        table(served=wrong)


def test_another_host_speed_leaves_it() -> None:
    """Its notes are microseconds, whatever speed the table is brought to."""
    assert table(served=NOTED).at_host_speed(40.0).served == NOTED


# The middle of profiles


def test_of_profiles_the_middle_has_that_of_those_that_served() -> None:
    """Notes are those of each as they were, though its launches are brought to the middle one's speed."""
    slow = ServedHost(scheduler_us=250.0, scheduler_prompt_us=10.0, every_us=100.0, host_work_us=(40.0,))
    tables = [table(20.0, served=NOTED), table(24.0), table(40.0, served=slow)]
    found = middle([profile(each) for each in tables]).costs
    assert found.host_work_us == 24.0
    assert found.served == ServedHost(
        scheduler_us=200.0, scheduler_prompt_us=40.0, every_us=100.0, host_work_us=(20.0, 30.0, 25.0, 40.0)
    )
    assert middle([profile(each) for each in tables[:2]]).costs.served == NOTED
    assert middle([profile(table()), profile(table())]).costs.served is None


def test_profiles_whose_notes_are_of_unlike_times_have_no_middle() -> None:
    other = table(served=attrs.evolve(NOTED, every_us=50.0))
    with pytest.raises(ProfileError, match="give profiles that noted it alike"):
        middle([profile(table(served=NOTED)), profile(other)])
