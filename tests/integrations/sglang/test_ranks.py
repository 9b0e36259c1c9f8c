"""Tensor-parallel ranks: what one can't do, none does, and none is left waiting."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kpolicy.errors import KPolicyError, RankError
from kpolicy_sglang import bench, calibrate, hooks
from kpolicy_sglang.config import Config
from kpolicy_sglang.phase import DECODE, PREFILL, Phase
from kpolicy_sglang.ranks import Ranks
from kpolicy_sglang.state import State, state_of

pytest.importorskip("torch")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "h200"


class Two(Ranks):
    """One of two ranks, in threads: a collective that the other doesn't join fails the test, and doesn't hang it."""

    barrier: threading.Barrier
    said: list
    several = True

    def __init__(self, rank):
        self.rank = rank

    def all(self, ok):
        return all(self._exchanged(ok))

    def first(self, value):
        return self._exchanged(value)[0]

    def _exchanged(self, value):
        self.said[self.rank] = value
        self.barrier.wait(20)
        both = list(self.said)
        self.barrier.wait(20)
        return both


class Runner:
    """A model runner whose dummies or steps of some sizes fail."""

    def __init__(self, *, broken_dummies=(), broken_steps=()):
        self.device, self.steps = "cpu", []
        self.req_to_token_pool = SimpleNamespace(size=64)
        self.server_args = SimpleNamespace(tp_size=2)
        self.broken_dummies, self.broken_steps = broken_dummies, broken_steps
        self.decode_cuda_graph_runner = self.prefill_cuda_graph_runner = self

    def capture_prepare(self, size):
        if size in self.broken_dummies:
            raise RuntimeError("no memory")
        return (size,)

    def forward(self, size):
        self.steps.append(size)
        if size in self.broken_steps:
            raise RuntimeError("illegal access")


def both(work):
    """What each of two ranks makes or raises."""
    Two.barrier, Two.said = threading.Barrier(2), [None, None]

    def tried(rank):
        try:
            return work(rank, Two(rank))
        except Exception as error:  # noqa: BLE001  the test looks at it
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(tried, range(2)))


def state(**settings):
    made = State(Config(split=False, **settings), "0.5.16")
    made.phases = {
        DECODE: Phase(DECODE, (1, 8), 8, full=True),
        PREFILL: Phase(PREFILL, (64, 128), 128, full=False),
    }
    return made


@pytest.mark.parametrize("how", ["broken_dummies", "broken_steps"])
def test_case_that_fails_on_one_rank_is_measured_on_none(how):
    """Both ranks run the same steps, and the costs that rank 0 gives to all lack the case."""
    runners = [Runner(), Runner(**{how: (8,)})]
    found = both(lambda rank, ranks: calibrate.cost_tables(runners[rank], state(), ranks))
    assert [table.full.sizes for table in found[0].values()] == [(1,), (64, 128)]
    assert found[0] == found[1]
    assert runners[0].steps == runners[1].steps


def measured_by_two(monkeypatch, seconds, allowed_s):
    """The costs of two ranks whose steps take so many seconds each, and which may measure so long by themselves."""
    local = threading.local()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: getattr(local, "now_s", 0.0))
    runners = [Runner(), Runner()]

    def work(rank, ranks):
        def forward(size):
            runners[rank].steps.append(size)
            local.now_s = getattr(local, "now_s", 0.0) + seconds[rank]

        runners[rank].forward = forward
        made = state(calibrate_seconds=allowed_s[rank])
        made.phases = {DECODE: Phase(DECODE, tuple(range(1, 65)), 64, full=True)}
        return calibrate.cost_tables(runners[rank], made, ranks)

    found = both(work)
    assert found[0] == found[1]
    assert runners[0].steps == runners[1].steps
    return found[0][DECODE].full.sizes


def test_ranks_of_other_speeds_time_the_same_cases(monkeypatch):
    """What the allowance has room for is by rank 0's times: a step that one runs and the other doesn't would hang."""
    sizes = measured_by_two(monkeypatch, seconds=(0.03, 0.0001), allowed_s=(1, 1))
    assert 2 < len(sizes) < len(calibrate._apart(range(1, 65)))


def test_what_measuring_may_take_is_rank_zeros(monkeypatch):
    """Each counts by its own captures what that was."""
    assert len(measured_by_two(monkeypatch, seconds=(0.03, 0.03), allowed_s=(1, 0.01))) > 3


def test_long_prompts_are_rank_zeros(monkeypatch):
    """Where a batch ends goes by it: ranks that had shares of their own would part."""

    def measure(_, state, ranks):
        state.beside, state.long, state.mixed = ((0.9, "its long"), (0.2, "another"))[ranks.rank] + ("mixed",)
        return {}

    monkeypatch.setattr(calibrate, "measure", measure)
    states = [state(), state()]
    both(lambda rank, ranks: calibrate.cost_tables(Runner(), states[rank], ranks))
    assert [(each.beside, each.long) for each in states] == [(0.9, "its long")] * 2


def test_failing_on_one_rank_fails_on_all():
    """A rank that can't set the measuring up, or read a profile, takes the other with it."""
    runners = [Runner(), Runner()]
    del runners[1].req_to_token_pool
    states = [State(Config(), "0.5.16"), State(Config(), "0.5.16")]
    for each in states:
        each.phases = {PREFILL: Phase(PREFILL, (64, 128), 128, full=False)}
    found = both(lambda rank, ranks: calibrate.cost_tables(runners[rank], states[rank], ranks))
    assert isinstance(found[0], RankError)
    assert isinstance(found[1], AttributeError)
    assert not runners[0].steps


def test_profile_that_one_rank_lacks(tmp_path):
    """On another machine the file may not be there: neither rank decides by it."""
    paths = [str(RESULTS / "profile_qwen05b.json"), str(tmp_path / "none.json")]
    found = both(lambda rank, ranks: calibrate.cost_tables(Runner(), state(profile=paths[rank]), ranks))
    assert isinstance(found[0], RankError)
    assert isinstance(found[1], KPolicyError | OSError)
    tables = both(lambda _, ranks: calibrate.cost_tables(Runner(), state(profile=paths[0]), ranks))
    assert tables[0] == tables[1]
    assert tables[0].keys() == {DECODE, PREFILL}


def started(rank_settings, rank_sizes, monkeypatch, phase="decode"):
    """What `init_cuda_graphs` does on two ranks with those settings and sizes: captured, and attached or not."""
    local = threading.local()
    monkeypatch.setattr(hooks, "Ranks", lambda _: local.ranks)
    monkeypatch.setattr(hooks, "configured", lambda: local.config)
    monkeypatch.setattr(hooks, "take_up", lambda *_: None)

    def work(rank, ranks):
        local.ranks, local.config = ranks, Config(**rank_settings[rank])
        graphs = SimpleNamespace(decode=SimpleNamespace(bs=None), prefill=SimpleNamespace(bs=None))
        getattr(graphs, phase).bs = rank_sizes[rank]
        runner = SimpleNamespace(
            is_draft_worker=False, server_args=SimpleNamespace(tp_size=2, cuda_graph_config=graphs)
        )
        try:
            captured = hooks.init_cuda_graphs(lambda _: "captured", runner)
        except SystemExit as error:
            return str(error)
        return captured, state_of(runner) is not None

    return both(work)


def test_ranks_that_were_started_alike(monkeypatch):
    """Where files go and what is said may differ between nodes."""
    settings = [{"decision_log": "a", "metrics": False}, {"summary_seconds": 5.0}]
    assert started(settings, [[1, 8], [1, 8]], monkeypatch) == [("captured", True)] * 2


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_ranks_with_other_sizes_end_the_start(monkeypatch, phase):
    """They would wait for each other in the captures: both say which sizes are whose."""
    found = started([{}, {}], [[1, 8], [1, 8, 16]], monkeypatch, phase)
    for said, here in zip(found, ("(1, 8)", "(1, 8, 16)"), strict=True):
        assert f"{phase} sizes: {here} here, (1, 8) on rank 0" in said
        assert "same settings" in said


def test_ranks_with_another_version_are_left_to_sglang(monkeypatch, caplog):
    """Another version may decide otherwise: each rank says which is where."""
    local = threading.local()
    versions = iter(("0.1.0", "0.2.0"))
    lock = threading.Lock()

    class Package:
        @property
        def __version__(self):
            if not hasattr(local, "version"):
                with lock:
                    local.version = next(versions)
            return local.version

    monkeypatch.setattr(hooks, "kpolicy_sglang", Package())
    assert started([{}, {}], [[8], [8]], monkeypatch) == [("captured", False)] * 2
    assert "kpolicy-sglang: 0." in caplog.text


def test_what_ranks_wait_for_is_said_before(monkeypatch, caplog):
    """A rank without kpolicy never answers: the last line of the others' logs says so."""
    with caplog.at_level("INFO"):
        started([{}, {}], [[8], [8]], monkeypatch)
    assert sum("one of them runs without kpolicy" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize("other", [{"policy": "full"}, {"turns": False}, {"profile": "p"}, {"gap_ms": 5.0}])
def test_ranks_with_other_settings_are_left_to_sglang(other, monkeypatch, caplog):
    """They would decide otherwise, or order steps otherwise: SGLang captures, and decides on all of them."""
    assert started([{}, other], [[8], [8]], monkeypatch) == [("captured", False)] * 2
    assert f"KPOLICY_{next(iter(other)).upper()}" in caplog.text
    strict = [{"strict": True}, {"strict": True, **other}]
    assert all("started differently" in said for said in started(strict, [[8], [8]], monkeypatch))


GLOO = """
import sys, torch.distributed as dist
from types import SimpleNamespace
from kpolicy_sglang.ranks import Ranks
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
group = SimpleNamespace(cpu_group=dist.group.WORLD)
ranks = Ranks(SimpleNamespace(server_args=SimpleNamespace(tp_size=2), tp_group=group))
print([ranks.all(True), ranks.all(rank == 0), ranks.all(False)])
"""


def test_over_gloo(tmp_path):
    """The least answer of two real processes."""
    init = f"file://{tmp_path / 'meet'}"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen([sys.executable, "-c", GLOO, str(rank), init], stdout=subprocess.PIPE, text=True, env=environ)
        for rank in range(2)
    ]
    assert [each.communicate(timeout=100)[0].strip() for each in running] == ["[True, False, False]"] * 2


def test_alone():
    """Without tensor parallelism nothing is asked of anyone."""
    ranks = Ranks(SimpleNamespace(server_args=SimpleNamespace(tp_size=1)))
    assert [ranks.all(True), ranks.all(False), ranks.first(5), ranks.together(lambda: 7, "it")] == [True, False, 5, 7]
    with pytest.raises(ZeroDivisionError):
        ranks.together(lambda: 1 // 0, "it")
