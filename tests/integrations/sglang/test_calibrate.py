"""How long start-up measures, and what: on a clock that only steps move."""

import itertools
from types import SimpleNamespace

import attrs
import pytest

from kpolicy.costs import analytic_costs
from kpolicy.errors import ProfileError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason
from kpolicy.schemas import Profile, write_profile
from kpolicy_sglang import bench, calibrate
from kpolicy_sglang.arguments import note_own_sizes
from kpolicy_sglang.bench import LEAST_RUNS, MOST_RUNS
from kpolicy_sglang.captures import Savings
from kpolicy_sglang.config import Config
from kpolicy_sglang.mirror import pool_of
from kpolicy_sglang.phase import DECODE, PREFILL, Phase, table_of
from kpolicy_sglang.ranks import Ranks
from kpolicy_sglang.state import State

pytest.importorskip("torch")
DECODES, PROMPTS = tuple(range(1, 41)), tuple(range(64, 8193, 64))
LOADED = [(DECODE, size) for size in (*calibrate.EAGER_DECODES, 40)] + [(PREFILL, s) for s in calibrate.EAGER_TOKENS]
"""What captures have run of what is timed once."""


class Clock:
    """A model runner whose steps take a time by their size, the first of a size a second more; no other time passes."""

    def __init__(self, ms, loaded=()):
        self.ms, self.now_s, self.ran, self.device = ms, 0.0, [], "cpu"
        self.loaded = set(loaded)
        self.req_to_token_pool = SimpleNamespace(size=64)
        self.server_args = SimpleNamespace(tp_size=1)
        self.decode_cuda_graph_runner = Runner(DECODE)
        self.prefill_cuda_graph_runner = Runner(PREFILL)

    def forward(self, batch):
        first = batch not in self.loaded
        self.loaded.add(batch)
        self.ran.append(batch)
        self.now_s += self.ms(*batch) / 1e3 + first


class Runner:
    """A graph runner whose dummies say what they are."""

    prefill_backend_name = "full"  # so that prompts stay one row

    def __init__(self, name):
        self.name = name

    def capture_prepare(self, size):
        return ((self.name, size),)


def started(**settings):
    """A state with both phases."""
    state = State(Config(split=False, **settings), "0.5.16")
    state.phases = {DECODE: Phase(DECODE, DECODES, 40, full=True), PREFILL: Phase(PREFILL, PROMPTS, 8192, full=False)}
    return state


def measured(monkeypatch, ms, **settings):
    """The tables, the clock, and seconds without first calls."""
    clock = Clock(ms, LOADED)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now_s)
    tables = calibrate.measure(clock, started(**settings), Ranks(clock))
    return tables, clock, sum(ms(*step) / 1e3 for step in clock.ran)


def test_a_quick_model_is_timed_at_all_sizes(monkeypatch):
    """Where there is time every case is, as often as it makes a difference."""
    tables, clock, spent = measured(monkeypatch, lambda *_: 0.5, calibrate_seconds=1)
    assert tables[DECODE].full.sizes == tuple(calibrate._apart(DECODES))
    assert tables[PREFILL].full.sizes == tuple(calibrate._apart(PROMPTS))
    assert spent < 1
    assert tables[DECODE].full.us == pytest.approx([500.0] * len(tables[DECODE].full.us))
    assert clock.ran.count((DECODE, 2)) == MOST_RUNS


@pytest.mark.parametrize("seconds", [0.5, 1.0, 5.0])
def test_a_slow_model_is_timed_in_its_allowance(monkeypatch, seconds):
    """Fewer sizes where steps are long, the ends and the middle among them; first calls aren't in it."""
    slowest_s = 0.02
    tables, clock, spent = measured(monkeypatch, lambda *_: 1e3 * slowest_s, calibrate_seconds=seconds)
    assert spent <= max(seconds + LEAST_RUNS * slowest_s, 0.4) + 1e-9
    for name, sizes in ((DECODE, DECODES), (PREFILL, PROMPTS)):
        found = tables[name].full.sizes
        assert (found[0], found[-1]) == (sizes[0], sizes[-1])
        assert len(found) >= 3
        assert len(found) < len(calibrate._apart(sizes)) or seconds > 2
        assert tables[name].full.us == pytest.approx([1e6 * slowest_s] * len(found))
    assert clock.now_s >= spent + 2


def test_what_no_decision_can_do_without_is_timed_whatever_it_takes(monkeypatch):
    """Graphs at both ends and in the middle; eager prompts at both, and the largest decode, which SGLang replays."""
    tables, clock, _ = measured(monkeypatch, lambda *_: 900.0, calibrate_seconds=0.01)
    assert (tables[DECODE].full.sizes, tables[DECODE].eager.sizes) == ((1, 10, 40), (40,))
    assert tables[PREFILL].full.sizes[::2] == (64, 8192)
    assert len(tables[PREFILL].full.sizes) == 3
    assert tables[PREFILL].eager.sizes == (64, 8192)
    # Graph and eager step take as long here, and are run twice both.
    assert (clock.ran.count((DECODE, 1)), clock.ran.count((DECODE, 40))) == (2, 4)


@pytest.mark.parametrize(("eager", "ran"), [(14.0, 4), (16.0, 3)])
def test_an_eager_step_that_captures_have_run_is_run_once_where_it_is_clear(monkeypatch, eager, ran):
    """Its kernels are loaded; what else a first call may pay doesn't make up for half as much again."""
    clock, state = Clock(None, LOADED), started(calibrate_seconds=0.01)
    forced = list(state.phases.values())
    clock.ms = lambda *_: eager if any(phase.force is False for phase in forced) else 10.0
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now_s)
    calibrate.measure(clock, state, Ranks(clock))
    assert [clock.ran.count(step) for step in ((DECODE, 40), (PREFILL, 64), (DECODE, 1))] == [ran, ran, 2]


def test_prompts_of_a_later_release_have_their_first_call_left_out(monkeypatch):
    """Its eager MLA prompts run other kernels than its graphs."""
    clock, state = Clock(None), started(calibrate_seconds=0.01)
    prefill = state.phases[PREFILL]
    clock.ms = lambda *_: 30.0 if prefill.force is False else 10.0
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now_s)
    state.version = "0.5.23"
    tables = calibrate.measure(clock, state, Ranks(clock))
    assert clock.ran.count((PREFILL, 64)) == 4
    assert tables[PREFILL].eager.us == pytest.approx([30_000.0] * 2)


def test_a_kind_whose_first_cases_fail_has_the_next(monkeypatch):
    """Without an eager step nothing could be decided."""

    class Broken(Clock):
        def forward(self, batch):
            if batch == (DECODE, 40):
                raise RuntimeError("no memory")
            super().forward(batch)

    clock = Broken(lambda *_: 900.0)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now_s)
    tables = calibrate.measure(clock, started(calibrate_seconds=0.01), Ranks(clock))
    assert (tables[DECODE].full.sizes, tables[DECODE].eager.sizes) == ((1, 10), (1,))


def test_a_case_that_fails_later_is_left_alone(monkeypatch):
    """What was timed before counts, and it isn't tried again."""

    class Broken(Clock):
        tried = 0

        def forward(self, batch):
            if batch == (DECODE, 2):
                self.tried += 1
                if self.tried > 3:
                    raise RuntimeError("illegal access")
            super().forward(batch)

    clock = Broken(lambda *_: 0.5, LOADED)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now_s)
    tables = calibrate.measure(clock, started(calibrate_seconds=1), Ranks(clock))
    assert clock.tried == 4
    assert tables[DECODE].full.at(2) == pytest.approx(500.0)


def test_long_prompts_come_after_what_decides(monkeypatch):
    """The longest first of them, once there is time for more than that."""
    monkeypatch.setattr(bench.Bench, "prompt", lambda _, size: ("long", size))
    clock = Clock(lambda *_: 1.0, LOADED)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now_s)
    monkeypatch.setattr(bench.Bench, "prefill", lambda _, size: (PREFILL, size))
    calibrate.measure(clock, started(calibrate_seconds=0.04), Ranks(clock))
    sizes = [size for name, size in clock.ran if name == "long"]
    assert sizes[:2] == [8192, 8192]
    clock.ran.clear()
    state = started(calibrate_seconds=0.001)
    calibrate.measure(clock, state, Ranks(clock))
    assert not [size for name, size in clock.ran if name == "long"]
    assert state.long is None


def test_sizes_between_are_interpolated(monkeypatch):
    """What wasn't timed lies between its neighbours, so that decisions are had for every size."""
    tables, _, _ = measured(monkeypatch, lambda _, size: 20 + size / 100, calibrate_seconds=1)
    full = tables[PREFILL].full
    assert 2 < len(full.sizes) < 10
    for size in PROMPTS:
        assert full.at(size) == pytest.approx(1e3 * (20 + size / 100))


def test_decisions_with_little_measured_are_those_with_all(monkeypatch):
    """MLA prompts of 0.5.16 and decodes on an H200, as they were timed there: the same graphs at every size."""
    graph = {64: 11.6, 256: 17.0, 512: 18.7, 1024: 24.5, 1536: 33.5, 2048: 42.5}
    both = []
    for seconds in (0.01, 60):
        clock = Clock(lambda *_: 0.0, loaded=[(PREFILL, size) for size in graph])
        state = State(Config(split=False, calibrate_seconds=seconds), "0.5.16")
        prefill = state.phases[PREFILL] = Phase(PREFILL, tuple(graph), 8192, full=False)
        clock.ms = lambda _, size, phase=prefill: (
            graph[size] if phase.force else 46.0 if size < 1100 else 46.0 + (size - 1100) / 300
        )
        monkeypatch.setattr(bench.time, "perf_counter", lambda clock=clock: clock.now_s)
        state.install(calibrate.measure(clock, state, Ranks(clock)))
        both.append([prefill.replays(size) for size in range(1, 2049)])
        assert prefill.policy == "auto"
    assert both[0] == both[1]
    assert all(both[0])


@pytest.mark.parametrize("mixes", [True, False])
def test_mixed_batches_are_timed_where_sglang_mixes(monkeypatch, mixes):
    """The smallest twice; and few decode rows, where there is no time for them, as prompts alone."""
    clock, mixed = Clock(lambda *_: 10.0, LOADED), []
    clock.server_args.enable_mixed_chunk = mixes
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now_s)
    monkeypatch.setattr(bench.Bench, "mixed", lambda _, size, *, decodes: mixed.append((size, decodes)) or ("m", size))
    state = started(calibrate_seconds=0.01)
    state.config = Config(split=True, calibrate_seconds=0.01)
    calibrate.measure(clock, state, Ranks(clock))
    assert mixed == ([(96, 32), (2080, 32), (96, 32)] if mixes else [])
    assert (state.mixed is not None) == mixes
    if mixes:
        assert state.mixed.few.sizes == (96, 2080)
        assert state.mixed.few.us == pytest.approx([10_000.0] * 2)


@pytest.mark.parametrize(("eager", "us"), [(True, 30_000.0), (False, 10_000.0)])
def test_few_decode_rows_are_timed_once_there_is_time(monkeypatch, eager, us):
    """Until then they are prompts alone, and eager ones where rows with a prefix have no graph."""
    found = []
    monkeypatch.setattr(bench.Bench, "mixed", lambda _, size, *, decodes: (decodes, size))
    for seconds in (0.01, 60):
        state = started()
        state.config, state.prefix_is_eager = Config(split=True, calibrate_seconds=seconds), eager
        prefill = state.phases[PREFILL]
        clock = Clock(
            lambda name, _, phase=prefill: {2: 12, 32: 50}.get(name, 30 if phase.force is False else 10), LOADED
        )
        monkeypatch.setattr(bench.time, "perf_counter", lambda clock=clock: clock.now_s)
        calibrate.measure(clock, state, Ranks(clock))
        found.append(state.mixed.few)
    assert found[0].us == pytest.approx([us] * 2)
    assert found[1].sizes == (66, 514, 2050)
    assert found[1].us == pytest.approx([12_000.0] * 3)
    assert state.mixed.many.at(96) == pytest.approx(50_000.0)


@pytest.mark.parametrize("eager", [True, False])
def test_few_decode_rows_take_what_prompts_do(eager):
    """The cheaper of graph and eager step; the eager one where rows with a prefix have no graph."""
    costs = table_of("test", {64: 10.0, 128: 20.0}, {64: 13.0, 128: 15.0})
    assert calibrate._prompts_us(costs, (64, 128), eager=eager) == {64: 13.0 if eager else 10.0, 128: 15.0}


def test_a_slow_moment_of_the_host_decides_nothing(monkeypatch):
    """A smaller step takes no more than a larger one of its kind was seen to."""
    clock = Clock(lambda *_: 10.0, LOADED)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now_s)
    monkeypatch.setattr(bench.Bench, "mixed", lambda _, size, *, decodes: (f"mixed {decodes}", size))
    # On an H200 the smallest mixed batch was seen at twice its time, both times, and once that of the least prompt.
    clock.loaded.add(("mixed 32", 2080))
    clock.ms = lambda name, size: {("mixed 32", 96): 40.0, (PREFILL, 64): 30.0}.get((name, size), 10.0)
    state = started(calibrate_seconds=0.01)
    state.config = Config(split=True, calibrate_seconds=0.01)
    tables = calibrate.measure(clock, state, Ranks(clock))
    assert state.mixed.many.at(96) == pytest.approx(10_000.0)
    assert tables[PREFILL].eager.at(64) == pytest.approx(10_000.0)


@pytest.mark.parametrize("count", [*range(12), 40])
def test_sizes_come_ends_first_then_middles(count):
    """Both ends are level 0, and what is left at each level lies in gaps that halve."""
    found = calibrate._levels(range(10, 10 + count))
    assert list(found) == list(range(10, 10 + count))
    levels = list(found.values())
    assert [at for at, level in enumerate(levels) if level == 0] == sorted({*range(count)[:1], *range(count)[-1:]})
    for level in range(max(levels, default=0) + 1):
        timed = [at for at, each in enumerate(levels) if each <= level]
        assert all(b - a <= count / 2**level + 1 for a, b in itertools.pairwise(timed))
    late = calibrate._largest_first(list(found), level=3)
    assert [size for size, level in late.items() if level == 3] == list(found)[-1:]
    assert all(level > 3 for size, level in late.items() if size != 9 + count)


def test_graphs_are_timed_a_fifth_apart():
    """The least and the largest, and between them each that is a fifth above the last: times hardly change closer."""
    assert calibrate._apart((7,)) == [7]
    assert calibrate._apart((1, 2)) == [1, 2]
    found = calibrate._apart(range(1, 257))
    assert (found[:6], found[-1]) == ([1, 2, 3, 4, 5, 6], 256)
    assert all(b >= 1.2 * a for a, b in itertools.pairwise(found[:-1]))
    assert all(b <= 1.2 * a + 1 for a, b in itertools.pairwise(found))


def captured(state, phase, seconds):
    """Enter graphs that took so long."""
    for at, each in enumerate(seconds):
        key = GraphKey(Part.FULL, 1 + at, 1 + at, query_len=1) if phase == DECODE else GraphKey(Part.PIECEWISE, 1 + at)
        state.registry.plan([key])
        state.registry.capture(key, bytes=1, seconds=each, pool=pool_of(phase), handle=object())


@pytest.mark.parametrize(
    ("own", "walk_s", "warm_s", "allowed"),
    [
        # SGLang's own four decode graphs: three second warm-ups and a walk; half of it.
        ({DECODE: 4, PREFILL: 0}, 0.3, {DECODE: 0.1}, 0.5 * (0.3 + 0.3 - 3 * 0.1)),
        # As many prefill graphs too: two more walks, and two more second warm-ups.
        ({DECODE: 4, PREFILL: 3}, 0.3, {DECODE: 0.1, PREFILL: 0.06}, 0.5 * (0.3 + 0.12 + 0.9)),
        # Nothing known of SGLang's: as many as there are.
        ({}, 0.3, {DECODE: 0.1, PREFILL: 0.06}, 0.5 * (0.3 + 0.12 + 0.9)),
        # Many more than are captured here, as with a plan: the most.
        ({DECODE: 80, PREFILL: 3}, 0.3, {DECODE: 0.1}, calibrate.MOST_S),
        # Nothing was quicker, and there are three graphs more.
        ({DECODE: 4, PREFILL: 0}, 0.0, {}, 0.0),
    ],
)
def test_measuring_takes_half_of_what_quicker_captures_saved(own, walk_s, warm_s, allowed):
    """Counted by what they took at this start: graphs that SGLang doesn't have come off it."""
    state, runner = started(), Clock(None)
    captured(state, DECODE, [2.0, 0.2, 0.2, 0.2])
    captured(state, PREFILL, [0.7, 0.1, 0.1])
    state.savings = Savings(walk_s, dict(warm_s))
    failed = GraphKey(Part.PIECEWISE, 99)
    state.registry.plan([failed])
    state.registry.fail(failed, Reason.CAPTURE_FAILED, seconds=9.0)
    for phase, count in own.items():
        note_own_sizes(runner.server_args, phase, count)
    assert calibrate._allowance_s(runner, state) == pytest.approx(allowed)


def test_what_measuring_may_take_can_be_given():
    """Then it is that, and without quicker captures a second."""
    runner = Clock(None)
    assert calibrate._allowance_s(runner, started(calibrate_seconds=7)) == 7
    assert calibrate._allowance_s(runner, started(quick_capture=False)) == calibrate.MOST_S
    assert calibrate._allowance_s(runner, started()) == 0.0


@pytest.mark.parametrize(
    ("device", "size", "named", "differs"),
    [("d", None, "d", ""), ("d", 1, "d", ""), ("d", 1, None, ""), ("", 1, "e", ""),
     ("d", 8, "d", "tensor_parallel_size of 8, and this is 1"), ("d", 1, "e", "measured on d, and this is e")],
)  # fmt: skip
def test_costs_of_another_device_or_tensor_parallel_size_are_not_taken(tmp_path, device, size, named, differs):
    """The error says both, as an Engine's does; what either doesn't say isn't held to it."""
    path = tmp_path / "profile.json"
    costs = attrs.evolve(analytic_costs(), measured=True)
    write_profile(path, Profile(costs=costs, device=device, model="m", tensor_parallel_size=size))
    state = started(profile=str(path))
    runner = Clock(lambda *_: 1.0)
    if named:
        runner.decode_cuda_graph_runner.device_module = SimpleNamespace(get_device_name=lambda: named)
    if differs:
        with pytest.raises(ProfileError, match=differs):
            calibrate.cost_tables(runner, state)
    else:
        assert set(calibrate.cost_tables(runner, state)) == {DECODE, PREFILL}


@pytest.mark.parametrize("coupled", [False, True])
def test_what_a_profile_has_nothing_of_is_said(tmp_path, coupled):
    """Long prompts and mixed batches: what start-up would measure, where ranks don't take each step together."""
    path = tmp_path / "profile.json"
    write_profile(path, Profile(costs=analytic_costs(), device="d", model="m"))
    state = started(profile=str(path))
    state.coupled = coupled
    assert calibrate.cost_tables(Clock(lambda *_: 1.0), state)
    assert (state.long, state.beside, state.mixed) == (None, 0.0, None)
    assert [("long prompts or mixed batches" in each) for each in state.messages] == ([] if coupled else [True])
