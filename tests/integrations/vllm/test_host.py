"""Costs that follow the host's speed while vLLM serves."""

from __future__ import annotations

import json
import statistics
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

import kpolicy.costs
from benchmarks.vllm.simulated import LIMITS
from kpolicy.attention.support import Claims
from kpolicy.costs import CostTable, HostCost, analytic_costs
from kpolicy.decision import Launch
from kpolicy.host_speed import launching_takes
from kpolicy.keys import GraphKey
from kpolicy.kv_span import KvSpan
from kpolicy.modes import Part, Rows
from kpolicy_vllm import host
from kpolicy_vllm.config import Config
from kpolicy_vllm.dispatch import Chooser
from kpolicy_vllm.doubt import SLOWER_HOST
from kpolicy_vllm.host import CHANGED, LOOKS, HostSpeed, attach, why_not
from kpolicy_vllm.ladder import default_sizes
from kpolicy_vllm.state import State, going_on_alike
from kpolicy_vllm.steps import Step, numbers_of
from kpolicy_vllm.watch import SOON_S, TICK_S, Watch

WORK_US = 20.0
REPOSITORY = Path(__file__).parents[3]


def decider(costs: CostTable, *, wide: bool = False, level: str = "mixed") -> Chooser:
    """A chooser over the default sizes, everything captured, by these costs."""
    state = State(Config(), LIMITS)
    state.claims, state.sizes = Claims.at_level(level, piecewise=True), default_sizes(LIMITS, wide=wide)
    made = Chooser(state, lambda _tokens, _reqs: None, lambda _part, desc: desc)
    state.dispatcher = made
    sizes = state.wanted(pieces=True)
    keys = [GraphKey(Part.FULL, n, n, query_len=1) for n in sizes.decode]
    keys += [GraphKey(Part.FULL, n, min(n, LIMITS.max_num_reqs)) for n in sizes.mixed]
    keys += [GraphKey(Part.PIECEWISE, n) for n in sizes.piecewise]
    made.set_keys({key: key for key in keys})
    for key in keys:
        state.registry.capture(key, bytes=1, seconds=0.0)
    state.graphs_captured()
    state.install_costs(costs)
    return made


def measured(**changed: Any) -> CostTable:
    return attrs.evolve(
        analytic_costs(), measured=True, step_us=100.0, host_eager=HostCost(10_000.0), host_work_us=WORK_US, **changed
    )


def served(costs: CostTable | None = None, *, ranks: int = 1) -> State:
    """A state that serves, and its runner, whose `ran` counts steps."""
    made = decider(measured() if costs is None else costs)
    parallel = SimpleNamespace(data_parallel_size=1, world_size_across_dp=ranks)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel), ran=0)

    def execute_model(output: Any, more: Any = None) -> tuple[Any, Any]:
        runner.ran += 1
        return output, more

    runner.execute_model = execute_model
    made.state.runner, made.state.rejoin_us = runner, 7.0
    made.state.dispatcher.chooser = made
    return made.state


def looked(state: State, *works: float) -> HostSpeed:
    """Looks that find these times of the fixed work."""
    told = iter(works)
    speed = HostSpeed(state, lambda: next(told))
    for _ in works:
        speed.look()
    return speed


def test_costs_are_brought_to_the_speed_that_the_host_has() -> None:
    """From what was measured each time; the device's times stay."""
    state, before = served(), measured()
    looked(state, *[1.7 * WORK_US] * LOOKS)
    times = launching_takes(1.7)
    assert state.costs is not None
    assert state.costs.host_eager.base_us == pytest.approx(times * 10_000)
    assert state.costs.step_us == pytest.approx(times * 100)
    assert state.costs.eager == before.eager
    assert state.costs.version != before.version
    assert state.rejoin_us == pytest.approx(times * 7)
    assert state.counters.counts == {"host_speed_changes": 1}
    state = served()
    looked(state, *[1.7 * WORK_US] * LOOKS, *[WORK_US] * LOOKS)
    assert state.costs is not None
    assert state.costs.host_eager.base_us == pytest.approx(10_000)
    assert state.rejoin_us == pytest.approx(7)
    assert state.counters.counts == {"host_speed_changes": 2}


@pytest.mark.parametrize(
    "works", [[WORK_US] * 9, [1.2 * WORK_US] * 9, [3 * WORK_US, WORK_US, WORK_US] * 3, [3 * WORK_US] * (LOOKS - 1)]
)
def test_costs_stay_where_the_speed_is_about_that_or_few_looks_say_otherwise(works: list[float]) -> None:
    assert launching_takes(1.2) < CHANGED
    state = served()
    before = state.costs
    looked(state, *works)
    assert state.costs is before
    assert not state.counters.counts


def test_a_change_is_told_by_looks_after_the_last_one() -> None:
    state = served()
    slow = [1.7 * WORK_US] * LOOKS
    speed = looked(state, *slow, WORK_US, WORK_US)
    assert state.counters.counts == {"host_speed_changes": 1}
    assert len(speed._looks) == 2


def test_a_policy_that_failed_is_left_alone() -> None:
    state = served()
    state.fail("prepared", RuntimeError("broken"))
    looked(state, *[1.7 * WORK_US] * LOOKS)
    assert state.select is None
    assert "host_speed_changes" not in state.counters.counts


def test_looks_are_between_steps_and_steps_go_on_whatever_they_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    state = served()
    found = iter([1.7 * WORK_US] * LOOKS)
    monkeypatch.setattr(host, "host_work_us", lambda: next(found))
    attach(state.runner, state)
    watch = Watch(state)
    for _ in range(LOOKS - 1):
        watch._tick(5.0)
        state.runner.execute_model("step")
    watch._tick(5.0)
    assert not state.counters.counts
    assert state.runner.execute_model("step", more=3) == ("step", 3)
    assert state.counters.counts == {"host_speed_changes": 1}
    watch._tick(5.0)
    state.runner.execute_model("step")
    assert state.counters.counts == {"host_speed_changes": 1, "host_speed_failed": 1}
    assert state.runner.ran == LOOKS + 1


def test_steps_between_two_looks_pass_through_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nothing ran, the next step looks once."""
    state, looks = served(), []
    monkeypatch.setattr(host, "host_work_us", lambda: looks.append(state.runner.ran) or WORK_US)
    execute = state.runner.execute_model
    attach(state.runner, state)
    watch = Watch(state)
    for _ in range(3):
        assert state.runner.execute_model is execute
        watch._tick(5.0)
        watch._tick(5.0)
        for _ in range(100):
            state.runner.execute_model("step")
    assert looks == [0, 100, 200]


def test_what_another_wraps_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks go on where he calls ours, once when due; where he calls what was there it is said."""
    state, looks = served(), []
    monkeypatch.setattr(host, "host_work_us", lambda: looks.append(state.runner.ran) or WORK_US)
    attach(state.runner, state)
    assert state.look_due is not None
    state.look_due()
    theirs = state.runner.execute_model

    def wrapped(*args: Any) -> Any:
        return theirs(*args)

    state.runner.execute_model = wrapped
    for _ in range(2):
        state.runner.execute_model("step")
        state.runner.execute_model("step")
        state.look_due()
    assert state.runner.execute_model is wrapped
    assert looks == [0, 2]
    assert state.counters.counts["host_speed_unseen"] == 2


def test_the_thread_keeps_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without summary and metrics too; it has nothing to do where costs don't follow."""
    monkeypatch.setattr("kpolicy_vllm.watch.TICK_S", 0.01)
    state, looked_at = served(), threading.Event()
    state.config = attrs.evolve(state.config, summary_seconds=0)
    idle = Watch(state)
    idle.start()
    assert not idle._thread.is_alive()
    monkeypatch.setattr(host, "host_work_us", lambda: looked_at.set() or WORK_US)
    attach(state.runner, state)
    watch = Watch(state)
    watch.start()
    for _ in range(1000):
        state.runner.execute_model("step")
        if looked_at.wait(0.01):
            break
    watch.stop()
    assert looked_at.is_set()


def test_the_first_looks_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second as long as none of them could tell, however long nothing ran; then as often as counts are told."""
    state, waited, looks = served(), [], []
    monkeypatch.setattr(host, "host_work_us", lambda: looks.append(len(waited)) or 1.7 * WORK_US)
    attach(state.runner, state)
    told: list[int] = []
    watch = Watch(state, lambda: told.append(len(waited)))

    def wait(seconds: float) -> bool:
        if len(waited) > 3:
            state.runner.execute_model("step")  # nothing ran in the first three
        waited.append(seconds)
        return len(waited) > 14

    monkeypatch.setattr(watch._ended, "wait", wait)
    watch._run()
    assert waited == [SOON_S] * 10 + [TICK_S] * 5
    assert looks[:LOOKS] == [4, 5, 6, 7, 8]
    assert state.counters.counts["host_speed_changes"] == 1
    assert told == [5, *range(10, 15)], "counts are told as often as before"


@pytest.mark.parametrize(
    ("summary_seconds", "waited", "said"),
    [
        (2.5, [1.0, 1.0, 0.5] * 2, [2.5, 2.5]),
        (0.25, [0.25] * 4, [0.25] * 4),
        (7.0, [1.0] * 14, [7.0, 7.0]),
        (6.5, [1.0] * 6 + [0.5], [6.5]),
    ],
)
def test_the_first_looks_keep_the_interval(
    monkeypatch: pytest.MonkeyPatch, summary_seconds: float, waited: list[float], said: list[float]
) -> None:
    """Also one between whole seconds, or between two times that counts are told."""
    state = served()
    state.config = attrs.evolve(state.config, summary_seconds=summary_seconds)
    attach(state.runner, state)
    watch, waits, lines = Watch(state, lambda: None), list[float](), list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > len(waited)

    monkeypatch.setattr(watch._ended, "wait", wait)
    monkeypatch.setattr(watch, "say", lines.append)
    watch._run()
    assert (waits[:-1], lines) == (waited, said)


def test_later_looks_keep_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer interval than that of telling counts ends between two such times."""
    state = served()
    state.config = attrs.evolve(state.config, summary_seconds=12.0)
    waits: list[float] = []
    lines: list[float] = []
    watch = Watch(state, lambda: None)
    monkeypatch.setattr(watch._ended, "wait", lambda seconds: bool(waits.append(seconds)) or len(waits) > 6)
    monkeypatch.setattr(watch, "say", lines.append)
    watch._run()
    assert (waits[:6], lines) == ([TICK_S, TICK_S, 2.0] * 2, [12.0, 12.0])


def test_a_step_that_begins_while_a_look_falls_due_is_not_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner's method changes under the thread that keeps the time: it is one of the two."""
    monkeypatch.setattr(host, "host_work_us", lambda: WORK_US)
    state, begins = served(), []

    class Runner:
        vllm_config, held = state.runner.vllm_config, state.runner.execute_model

        @property
        def execute_model(self) -> Any:
            """As it is read; then a step begins, if one is due to."""
            found = self.held
            if begins:
                begins.pop()
                found("step")
            return found

        @execute_model.setter
        def execute_model(self, method: Any) -> None:
            self.held = method

    state.runner = Runner()
    attach(state.runner, state)
    assert state.look_due is not None
    state.look_due()
    begins.append("a step")
    state.look_due()
    assert not begins
    assert not state.counters.counts


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (served(ranks=2), "ranks"),
        (served(measured(host_probe="another")), "how fast the host was"),
        (served(attrs.evolve(measured(), host_work_us=0.0)), "how fast the host was"),
    ],
)
def test_where_it_can_t_be_costs_stay(state: State, why: str) -> None:
    execute = state.runner.execute_model
    attach(state.runner, state)
    assert state.runner.execute_model is execute
    assert state.look_due is None
    assert why in str(why_not(state))
    assert why_not(served()) is None
    state.costs = None
    assert why_not(state) == "there are none"


# What it is worth, by the tables that were measured in vLLM on an H200.

STEPS = [Step(n, 9, 8) for n in range(16, 4097, 16)] + [Step(n, n, n, 1, 1) for n in range(8, 1025, 8)]


def raw_tables(*, brought: bool = False) -> dict[str, CostTable]:
    """Those of the raw results, by model, side and commit: as measured, or as `brought` to another speed since."""
    names = {**vars(kpolicy.costs), "KvSpan": KvSpan}
    raw = REPOSITORY / "benchmarks/results/h200/raw"
    files = ("vllm_llama8b_chat_first.json", "vllm_dsv2lite_first.json", "vllm_stock_vs_kpolicy.json")
    return {
        f"{name} at {call['commit']}": eval(text, names)  # noqa: S307 - our own results
        for file in files
        for call in json.loads((raw / file).read_text())["calls"]
        for name, text in call["costs"].items()
        if (", the host at " in text) is brought
    }


def tables() -> dict[str, CostTable]:
    """All of them at the speed of the quickest host among them."""
    found = raw_tables() | raw_tables(brought=True)
    quick_us = min(table.host_work_us for table in found.values())
    return {name: going_on_alike(table.at_host_speed(quick_us)) for name, table in found.items()}


def over_the_cheapest(true: CostTable, used: CostTable, *, wide: bool) -> tuple[float, float]:
    """Mean and most of what steps take by those costs, over the cheapest way."""
    made, ratios = decider(used, wide=wide, level="uniform" if wide else "mixed"), []
    for step in STEPS:
        numbers = numbers_of(step, 1)

        def us(key: GraphKey | None, numbers: Any = numbers) -> float:
            return true.cost((Launch(Rows.ALL, key),), numbers).cycle_us

        holds = [key for key in made.state.ladder.keys if key.holds_batch(numbers)]
        ratios.append(us(made.entry(step).key) / min(us(key) for key in (*holds, None)))
    return statistics.fmean(ratios), max(ratios)


def slowed(table: CostTable) -> CostTable:
    """The table of a host on which launching takes `SLOWER_HOST` times as long."""
    slow = 1 + (SLOWER_HOST - 1) / (launching_takes(2.0) - 1)
    return table.at_host_speed(slow * table.host_work_us)


def test_what_following_is_worth_is_as_the_page_says() -> None:
    """Measured slow and served quick, the other way round, and at the speed that is there."""
    page = " ".join((REPOSITORY / "docs/measured_vllm.md").read_text().split())
    kept_slow, kept_quick, followed, changed = [], [], [], {}
    numbers = {11: "eleven", 15: "fifteen"}
    brought = numbers[len(raw_tables(brought=True))]
    told = f"from the {numbers[len(tables())]} cost tables of the raw results"
    assert told in page
    assert f"{brought} of them as the host's speed had changed them" in page
    for name, quick in tables().items():
        slow, wide = slowed(quick), "llama" in name
        kept_slow.append(over_the_cheapest(quick, slow, wide=wide))
        kept_quick.append(over_the_cheapest(slow, quick, wide=wide))
        followed += [over_the_cheapest(quick, quick, wide=wide), over_the_cheapest(slow, slow, wide=wide)]
        if "qwen05b" in name:
            ratios = {*kept_slow[-1:], *kept_quick[-1:], *followed[-2:]}
            changed[name] = max(mean for mean, _ in ratios), max(most for _, most in ratios)
    some = {name: each for name, each in changed.items() if each != (1.0, 1.0)}
    assert (len(changed), sorted(some)) == (
        8, ["qwen05b_kpolicy at b653e7c0", "qwen05b_lazy at 5cbff37e", "qwen05b_lazy at b653e7c0"],
    )  # fmt: skip
    for name, (mean, most) in some.items():
        assert f"{mean - 1:.2%} on average and {most:.2f} times at most" in page, name
    for found in (kept_slow, kept_quick, followed):
        mean, most = (max(each[place] for each in found) for place in (0, 1))
        told = f"{mean - 1:.1%} on average and {most:.2f} times at most"
        assert told in page, told


def test_how_well_launching_goes_with_the_fixed_work_is_as_the_page_says() -> None:
    """A table of a slow core, brought to the speeds of others of that model: two of that day, one of another host."""
    page = " ".join((REPOSITORY / "docs/measured_vllm.md").read_text().split())
    found = raw_tables()
    slow = found["llama8b_kpolicy at 94620cd"]
    told = f"the {slow.host_eager.base_us / 1e3:.1f} ms of Llama's eager steps at {slow.host_work_us:.1f} µs come to "
    for name, apart, text in (
        ("paced at 94620cd", 0.07, "{:.1f} at {:.1f} µs, where {:.1f} were measured three seconds later, and to "),
        ("kpolicy at d11ce8d", 0.07, "{:.1f} at {:.1f}, where another call measured {:.1f}. "),
        ("kpolicy at 54c1189", 0.2, "On another host they come to {:.1f} at {:.1f}, where {:.1f} were measured"),
    ):
        other = found[f"llama8b_{name}"]
        brought = slow.at_host_speed(other.host_work_us).host_eager.base_us
        told += text.format(brought / 1e3, other.host_work_us, other.host_eager.base_us / 1e3)
        assert brought == pytest.approx(other.host_eager.base_us, rel=apart)
    assert told in page, told
    assert f"were measured: {brought / other.host_eager.base_us - 1:.0%} more" in page


def test_how_many_of_llama_s_long_steps_stay_eager_is_as_the_page_says() -> None:
    """By the costs of the call whose chat failed, of the steps that stock ran eagerly in it."""
    raw = json.loads((REPOSITORY / "benchmarks/results/h200/raw/vllm_stock_vs_kpolicy.json").read_text())
    costs = raw_tables(brought=True)["llama8b_kpolicy at 5cbff37e"]
    call = next(
        each["call"] for each in raw["calls"] if "llama8b_kpolicy" in each["costs"] and each["commit"] == "5cbff37e"
    )
    eager = {
        side: [
            (tokens, reqs)
            for row in raw["rows"]
            if (row.get("call"), row["model"], row["load"], row["side"]) == (call, "llama8b", "chat", side)
            for mode, _, tokens, reqs, *_ in row["prompt_steps"]
            if mode == "NONE"
        ]
        for side in ("stock", "kpolicy")
    }
    made = decider(costs, wide=True, level="uniform")
    stay = sum(made.entry(Step(tokens, reqs, reqs - 1)).key is None for tokens, reqs in eager["stock"])
    told = (
        f"{stay} of the {len(eager['stock'])} steps of chat that stock ran eagerly then run so too (computed), where "
    )
    page = " ".join((REPOSITORY / "docs/measured_vllm.md").read_text().split())
    assert f"{told}{len(eager['kpolicy'])} of kpolicy's did." in page
