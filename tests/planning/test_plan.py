"""Plans of a workload, and replaying them until they settle."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from kpolicy.budgets import Budget
from kpolicy.errors import BudgetRefused, ConfigError
from kpolicy.ladders import CaptureSizes
from kpolicy.planning import Histogram, Layout, Plan, Workload, fixed_point, plan
from kpolicy.planning.workload import DECODE, LIST, OTHERS
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from tests.planning.workloads import costs

SETTINGS = Settings(max_num_reqs=32, max_num_tokens=256)


def steps(decodes: dict[int, int], others: dict[int, int] | None = None) -> Histogram:
    """A histogram of uniform decode batches by requests, and prompt batches by tokens."""
    found = Histogram("a test")
    for reqs, count in decodes.items():
        for _ in range(count):
            found.add(BatchShape.decode(reqs).numbers)
    for tokens, count in (others or {}).items():
        for _ in range(count):
            found.add(BatchShape(prefills=[(tokens, 0)]).numbers)
    return found


def workload(histogram: Histogram, **changed: object) -> Workload:
    return Workload(histogram=histogram, costs=costs(), settings=SETTINGS, layout=Layout(**changed))  # type: ignore[arg-type]


MANY = steps({1: 40, 3: 9, 7: 30, 8: 2, 20: 11, 31: 1}, {5: 8, 64: 20, 100: 3, 200: 9})


def test_a_plan_says_what_it_does() -> None:
    """Sizes, times, use and price of a plan belong together."""
    made = workload(MANY)
    found = plan(made, most_sizes=5, smoothing=0.0)
    assert found.num_sizes == 5
    assert found.sizes == made.sizes_of(found.lists)
    assert found.step_us == pytest.approx(made.time_us(found.sizes) / made.steps)
    assert found.step_us == pytest.approx(found.curve_us[5])
    assert found.eager_us == pytest.approx(found.curve_us[0])
    assert found.price_us == pytest.approx(found.gain_us(5))
    assert found.price_us > 0
    assert found.next_list in (DECODE, OTHERS)
    counts = {name: len(sizes) for name, sizes in found.lists.items()}
    assert found.usage.bytes == counts[DECODE] * (1 << 20) + counts[OTHERS] * (3 << 20)
    assert found.usage.graphs == counts[DECODE] + 5 * counts[OTHERS]
    assert found.gap == 0.0


@pytest.mark.parametrize("budget", [Budget(bytes=9 << 20), Budget(seconds=0.75), Budget(streams=3), Budget(graphs=8)])
def test_a_budget_is_kept_and_used(budget: Budget) -> None:
    """What is planned fits, and with a little more it would do better."""
    found = plan(workload(MANY), budget)
    for name in ("graphs", "streams", "bytes", "seconds"):
        limit = getattr(budget, name)
        if limit is not None:
            assert getattr(found.usage, name) <= limit
            more = plan(workload(MANY), attrs.evolve(budget, **{name: limit * 2}))
            assert more.curve_us[more.num_sizes] < found.curve_us[found.num_sizes]


def test_without_a_budget_sizes_are_worth_it() -> None:
    """Every size takes the share off the step that is asked, and one more would not."""
    made = workload(MANY)
    found = plan(made)
    least = found.curve_us[-1]
    assert found.gain_us(found.num_sizes - 1) >= 0.001 * least > found.gain_us(found.num_sizes)
    few = plan(made, worth=0.05)
    assert 0 < few.num_sizes < found.num_sizes
    capped = plan(made, most_sizes=30, worth=0.05)
    assert capped.sizes == few.sizes


def test_one_list_shares_its_sizes() -> None:
    """One list is planned for both kinds at once: it does no worse than the sizes of two lists in one."""
    apart = plan(workload(MANY), most_sizes=6, smoothing=0.0)
    made = workload(MANY, one_list=True)
    found = plan(made, most_sizes=6, smoothing=0.0)
    both = CaptureSizes(apart.sizes.decode, (), (*apart.sizes.decode, *apart.sizes.piecewise))
    union = made.lists_of(both)[LIST]
    again = plan(made, most_sizes=len(union), smoothing=0.0)
    assert found.lists[LIST] == found.sizes.piecewise
    assert set(found.sizes.decode) <= set(found.sizes.piecewise)
    assert again.step_us <= made.time_us(both) / made.steps * (1 + 1e-12)


def test_unequal_prices_within_one_list() -> None:
    """In one list a size that decode batches reach costs two graphs: the plan says how far from the best it may be."""
    found = plan(workload(MANY, one_list=True), Budget(bytes=20 << 20))
    assert found.usage.bytes <= 20 << 20
    assert 0 <= found.gap < 0.05
    pytest.importorskip("highspy")
    sizes = {LIST: (1, 3, 7, 8, 20, 31, 64, 100, 200)}
    made = workload(MANY, one_list=True)
    (ladder,) = made.ladders(candidates=sizes)
    assert ladder.one_price is None
    exact = plan(made, Budget(bytes=20 << 20), exact=True, smoothing=0.0)
    rough = plan(made, Budget(bytes=20 << 20), smoothing=0.0)
    assert exact.step_us <= rough.step_us * (1 + 1e-9)
    assert exact.step_us >= rough.step_us / (1 + rough.gap) * (1 - 1e-9)
    assert exact.usage.bytes <= 20 << 20


def test_smoothing_puts_graphs_near_sizes_that_were_not_seen() -> None:
    """Without it only sizes that were seen are captured; with it others have one not far above."""
    seen = steps({1: 1000, 16: 1000})
    plain = plan(workload(seen), most_sizes=8, smoothing=0.0)
    smooth = plan(workload(seen), most_sizes=8, smoothing=0.1)
    assert plain.lists[DECODE] == (1, 16)
    assert len(smooth.lists[DECODE]) == 8
    assert smooth.lists[DECODE][-1] > 28
    later = workload(steps({1: 900, 9: 50, 16: 900, 30: 60}))
    assert later.time_us(smooth.sizes) < later.time_us(plain.sizes)


def test_alignment_and_largest() -> None:
    """Sizes are multiples of what was asked, and lists end where they were told to."""
    made = workload(MANY, multiple_of=4, decode_multiple_of=4)
    found = plan(made, most_sizes=9, largest={DECODE: 32, OTHERS: 128})
    assert all(size % 4 == 0 for sizes in found.lists.values() for size in sizes)
    assert (found.lists[DECODE][-1], found.lists[OTHERS][-1]) == (32, 128)
    with pytest.raises(
        BudgetRefused, match=r"\(decode 32, prefill 128\) don't fit the budget of 1048576 bytes|1.0 MiB"
    ):
        plan(made, Budget(bytes=1 << 20), largest={DECODE: 32, OTHERS: 128})


def test_bad_arguments() -> None:
    """No steps, and shares out of range, are errors that say so."""
    with pytest.raises(ConfigError, match="the histogram has no steps"):
        plan(workload(Histogram()))
    with pytest.raises(ConfigError, match="worth is 1"):
        plan(workload(MANY), worth=1.0)
    with pytest.raises(ConfigError, match="most_rounds is 0"):
        fixed_point(lambda _: MANY, lambda _: None, CaptureSizes(()), most_rounds=0)  # type: ignore[arg-type,return-value]


# Fixed point


def settled(replay: Callable[[CaptureSizes], Histogram], most_sizes: int = 2, **rest: int) -> object:
    def planned(histogram: Histogram) -> tuple[Plan, Workload]:
        made = workload(histogram)
        return plan(made, most_sizes=most_sizes, smoothing=0.0), made

    return fixed_point(replay, planned, CaptureSizes((32,), (), (256,)), **rest)


def test_steps_that_do_not_change_settle_at_once() -> None:
    """Where sizes don't change the steps, the second replay confirms the first plan."""
    found = settled(lambda _: MANY)
    assert found.settled
    assert len(found.rounds) == 2
    assert found.plan.sizes == plan(workload(MANY), most_sizes=2, smoothing=0.0).sizes
    assert found.rounds[0].sizes == CaptureSizes((32,), (), (256,))
    assert found.rounds[1].step_us < found.rounds[0].step_us


def test_steps_that_move_are_followed() -> None:
    """Where faster steps make smaller batches, the plan is for the batches that it itself makes."""

    def replay(sizes: CaptureSizes) -> Histogram:
        return steps({20: 100}) if sizes.decode == (32,) else steps({8: 100}) if 20 in sizes.decode else steps({7: 100})

    found = settled(replay, 1)
    assert found.settled
    assert found.plan.lists[DECODE] == (7,)
    assert found.histogram.largest(1) == 7
    assert [each.sizes.decode for each in found.rounds] == [(32,), (20,), (8,), (7,)]


def test_steps_that_go_round_are_reported() -> None:
    """Two plans that make each other's steps don't settle; the better of the two is given."""

    def replay(sizes: CaptureSizes) -> Histogram:
        return steps({5: 100}) if 25 in sizes.decode else steps({25: 100})

    found = settled(replay, 1)
    assert not found.settled
    assert found.plan.lists[DECODE] in ((5,), (25,))
    times = [each.step_us for each in found.rounds[1:]]
    assert found.plan.step_us == pytest.approx(min(times))


def test_one_replay_is_not_settled() -> None:
    """With one replay allowed there is a plan, and nothing says that it holds."""
    found = settled(lambda _: MANY, most_rounds=1)
    assert not found.settled
    assert found.plan.num_sizes == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"most_sizes": -2}, "most_sizes is -2; it is a whole number"),
        ({"most_sizes": 2.5}, r"most_sizes is 2\.5"),
        ({"most_sizes": True}, "most_sizes is True"),
        ({"budget": 20}, "budget is 20; it takes a Budget"),
        ({"largest": 256}, "largest is 256; it takes a Mapping"),
        ({"smoothing": "a tenth"}, "smoothing is 'a tenth'"),
        ({"worth": "much"}, "worth is 'much'"),
        ({"most_loss": "decode=0.1"}, "most_loss is 'decode=0.1'"),
    ],
)
def test_arguments_of_another_kind_are_named(given: dict[str, object], said: str) -> None:
    """And numbers that are none: -2 sizes were an IndexError."""
    with pytest.raises(ConfigError, match=said):
        plan(workload(MANY), **given)  # type: ignore[arg-type]


def test_a_workload_of_another_kind_is_named() -> None:
    """Steps by size as a dict are what one would try first."""
    with pytest.raises(ConfigError, match=r"histogram is \{1: 40\}; it takes a Histogram"):
        workload({1: 40})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="costs is None; it takes a CostTable"):
        attrs.evolve(workload(MANY), costs=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="multiple_of is '2'"):
        Layout(multiple_of="2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="candidates names the list 'decodes'; there are decode, prefill"):
        workload(MANY).ladders(candidates={"decodes": [1, 2]})
