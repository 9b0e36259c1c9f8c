"""How long start-up measures, and what: on a clock that only steps move."""

import itertools
from types import SimpleNamespace

import pytest

from kpolicy_sglang import calibrate
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, PREFILL, Phase
from kpolicy_sglang.ranks import Ranks
from kpolicy_sglang.state import State

pytest.importorskip("torch")
DECODES, PROMPTS = tuple(range(1, 41)), tuple(range(64, 8193, 64))


class Clock:
    """A model runner whose steps take a time by their size, the first of a size a second more; no other time passes."""

    def __init__(self, ms):
        self.ms, self.now_s, self.ran, self.device = ms, 0.0, [], "cpu"
        self.req_to_token_pool = SimpleNamespace(size=64)
        self.server_args = SimpleNamespace(tp_size=1)
        self.decode_cuda_graph_runner = Runner(DECODE)
        self.prefill_cuda_graph_runner = Runner(PREFILL)

    def forward(self, batch):
        name, size = batch
        first = (name, size) not in self.ran
        self.ran.append((name, size))
        self.now_s += self.ms(name, size) / 1e3 + first


class Runner:
    """A graph runner whose dummies say what they are."""

    prefill_backend_name = "full"  # so that prompts stay one row

    def __init__(self, name):
        self.name = name

    def capture_prepare(self, size):
        return ((self.name, size),)


def measured(monkeypatch, ms, **settings):
    """The tables, the clock, and seconds by phase without first calls."""
    clock = Clock(ms)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock.now_s)
    state = State(Config(split=False, **settings), "0.5.16")
    state.phases = {DECODE: Phase(DECODE, DECODES, 40, full=True), PREFILL: Phase(PREFILL, PROMPTS, 8192, full=False)}
    tables = calibrate.measure(clock, state, Ranks(clock))
    spent = {name: sum(ms(*step) / 1e3 for step in clock.ran if step[0] == name) for name in (DECODE, PREFILL)}
    return tables, clock, spent


def test_a_quick_model_is_timed_at_all_sizes(monkeypatch):
    """Where there is time every case is, five times after the first."""
    tables, _, spent = measured(monkeypatch, lambda *_: 0.5)
    assert tables[DECODE].full.sizes == tuple(calibrate._apart(DECODES))
    assert tables[PREFILL].full.sizes == tuple(calibrate._apart(PROMPTS))
    assert max(spent.values()) < 1
    assert tables[DECODE].full.us == pytest.approx([500.0] * len(tables[DECODE].full.us))


@pytest.mark.parametrize("seconds", [0.25, 1.0, 2.5])
def test_a_slow_model_is_timed_in_its_allowance(monkeypatch, seconds):
    """Fewer sizes where steps are long, the ends among them, each twice; first calls aren't in it."""
    slowest_s = 0.02
    tables, clock, spent = measured(monkeypatch, lambda *_: 1e3 * slowest_s, calibrate_seconds=seconds)
    ends = {DECODE: 4, PREFILL: 6}
    for name, sizes in ((DECODE, DECODES), (PREFILL, PROMPTS)):
        runs = calibrate.WARM + calibrate.LEAST_ROUNDS
        assert spent[name] <= max(seconds + runs * slowest_s, runs * ends[name] * slowest_s) + 1e-9
        found = tables[name].full.sizes
        assert (found[0], found[-1]) == (sizes[0], sizes[-1])
        assert len(found) < len(calibrate._apart(sizes)) or seconds > 2
        assert tables[name].full.us == pytest.approx([1e6 * slowest_s] * len(found))
    assert clock.now_s > sum(spent.values()) + 5


def test_the_ends_are_timed_whatever_they_take(monkeypatch):
    """Of each kind of step, twice: without them there is nothing to interpolate."""
    tables, clock, _ = measured(monkeypatch, lambda *_: 900.0, calibrate_seconds=0.01)
    assert (tables[DECODE].full.sizes, tables[DECODE].eager.sizes) == ((1, 40), (1, 40))
    assert (tables[PREFILL].full.sizes, tables[PREFILL].eager.sizes) == ((64, 8192), (64, 8192))
    # Graph and eager step are the same dummy here: three calls each.
    assert clock.ran.count((DECODE, 1)) == 2 * (calibrate.WARM + calibrate.LEAST_ROUNDS)


def test_sizes_between_are_interpolated(monkeypatch):
    """What wasn't timed lies between its neighbours, so that decisions are had for every size."""
    tables, _, _ = measured(monkeypatch, lambda _, size: 20 + size / 100, calibrate_seconds=1.5)
    full = tables[PREFILL].full
    assert 2 < len(full.sizes) < 10
    for size in PROMPTS:
        assert full.at(size) == pytest.approx(1e3 * (20 + size / 100))


@pytest.mark.parametrize("count", [*range(12), 40])
def test_sizes_come_ends_first_then_middles(count):
    """Both ends are level 0, and what is left at each level lies in gaps that halve."""
    levels = calibrate._levels(count)
    assert len(levels) == count
    assert [at for at, level in enumerate(levels) if level == 0] == sorted({*range(count)[:1], *range(count)[-1:]})
    for level in range(max(levels, default=0) + 1):
        timed = [at for at, each in enumerate(levels) if each <= level]
        assert all(b - a <= count / 2**level + 1 for a, b in itertools.pairwise(timed))


def test_graphs_are_timed_a_fifth_apart():
    """The least and the largest, and between them each that is a fifth above the last: times hardly change closer."""
    assert calibrate._apart((7,)) == [7]
    assert calibrate._apart((1, 2)) == [1, 2]
    found = calibrate._apart(range(1, 257))
    assert (found[:6], found[-1]) == ([1, 2, 3, 4, 5, 6], 256)
    assert all(b >= 1.2 * a for a, b in itertools.pairwise(found[:-1]))
    assert all(b <= 1.2 * a + 1 for a, b in itertools.pairwise(found))
