"""Sweeps: every combination once, the same wherever it runs, and nothing lost when it is killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpolicy import __version__
from kpolicy.attention import Claims
from kpolicy.attention.support import parse_attention
from kpolicy.budgets import Budget
from kpolicy.errors import ConfigError, SchemaError
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.generator import generate_trace
from kpolicy.scheduling.traces import FailedTrace, Trace
from kpolicy.simulate import simulate
from kpolicy.simulate.pareto import METRICS, MOST_PANELS, _panel, draw, points_of
from kpolicy.simulate.sweep import Axes, Case, Common, LocalBackend, SweepFile, run_case, sweep
from tests.writing import device, room_for

from .helpers import COSTS, SIZES, server, trace_of

AXES = Axes(policies=("auto", "eager"), rates=(1.0, 2.0))


def common(**other: Any) -> Common:
    trace = trace_of(*[(0.3 * i, 3 + 7 * i % 40, 1 + 5 * i % 17) for i in range(12)])
    given = {
        "traces": {"short": trace, "twice": trace.scaled(0.5)}, "costs": {"drawn": (COSTS, server())},
        "ladders": {"own": SIZES, "two": CaptureSizes((2, 4))}, "attention": parse_attention("gqa"),
    }  # fmt: skip
    return Common(**(given | other))


def test_every_combination_runs_once_in_order() -> None:
    """Traces by rates by ladders by policies; each line is what `simulate` says."""
    lines = sweep(AXES, common(), backend=LocalBackend(1))
    assert len(lines) == 2 * 2 * 2 * 2
    assert [line["case"] for line in lines] == [attrs.asdict(case) for case in AXES.cases(common())]
    assert {line["result"]["served"] for line in lines} == {12}
    assert json.dumps(lines) == json.dumps(json.loads(json.dumps(lines)))


def test_a_rate_speeds_the_arrivals_up() -> None:
    """The line of a case at a rate is the simulation of the trace at that rate, and not the one at another."""
    shared = common(ladders={"own": SIZES})
    lines = sweep(Axes(policies=("eager",), rates=(1.0, 3.0)), shared, backend=LocalBackend(1))
    by_rate = {line["case"]["rate"]: line["result"] for line in lines if line["case"]["trace"] == "short"}
    trace = shared.traces["short"]
    for rate in (1.0, 3.0):
        wanted = simulate(
            trace if rate == 1 else trace.scaled(rate), "eager", server=server(), costs=COSTS, ladder=SIZES,
            attention=parse_attention("gqa"),
        )  # fmt: skip
        assert by_rate[rate] == json.loads(json.dumps(wanted.as_dict()))
    assert by_rate[1.0]["span_s"] > by_rate[3.0]["span_s"]


def test_processes_give_what_one_gives() -> None:
    """Two local processes return the same lines."""
    assert sweep(AXES, common(), backend=LocalBackend(2)) == sweep(AXES, common(), backend=LocalBackend(1))


def test_what_cases_share_travels_to_another_process() -> None:
    """Traces, costs, support and servers pickle, and mean the same afterwards."""
    shared = common()
    again = pickle.loads(pickle.dumps(shared))  # noqa: S301 - our own
    assert again.fingerprint() == shared.fingerprint()
    assert again.traces["short"] == shared.traces["short"]


def test_what_a_sweep_shares_is_told_alike_in_every_process() -> None:
    """A file is gone on with by another process, where sets have another order."""
    code = (
        "import json; from tests.simulate.test_sweep import common; from kpolicy.attention.support import "
        "parse_attention as p; print(json.dumps(common(attention=p('mla+gdn+gqa:vllm-0.33/FLASH_ATTN')).fingerprint()))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": seed}
        ).stdout
        for seed in "123"
    }
    assert len(told) == 1


def test_a_sweep_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    """Half a last line is run again, whole ones aren't, and the file ends as if nothing had happened."""
    path = tmp_path / "s.jsonl"
    lines = sweep(AXES, common(), path=path, backend=LocalBackend(1))
    whole = path.read_bytes()
    kept = whole.split(b"\n")[:6]
    path.write_bytes(b"\n".join(kept) + b"\n" + whole.split(b"\n")[6][:50])
    seen: list[int] = []
    assert sweep(AXES, common(), path=path, backend=LocalBackend(1), progress=lambda n, _: seen.append(n)) == lines
    assert seen[0] == 5
    assert path.read_bytes() == whole
    assert sweep(AXES, common(), path=path, backend=Refuses()) == lines


def test_what_captures_nothing_runs_once_for_all_ladders(tmp_path: Path) -> None:
    """Each ladder has its line, as if it had run; a sweep cut between two of them runs no more than was left."""
    path, shared = tmp_path / "s.jsonl", common()
    shared = attrs.evolve(shared, ladders={**shared.ladders, "one": CaptureSizes((1,))})
    backend, seen = Counts(), []
    lines = sweep(AXES, shared, path=path, backend=backend, progress=lambda *each: seen.append(each))
    ran = [(case.policy, case.ladder) for case in backend.cases]
    assert ran == 4 * [("auto", "own"), ("eager", "own"), ("auto", "two"), ("auto", "one")]
    assert seen == [(done, 24) for done in range(25)]
    assert lines == [run_case(case, shared) for case in AXES.cases(shared)]
    whole = path.read_bytes()
    kept = whole.splitlines(keepends=True)
    of_eager = [json.loads(line)["case"]["ladder"] for line in kept[2:5]]
    assert of_eager == ["own", "two", "one"]
    for first in range(2, 6):
        path.write_bytes(b"".join(kept[:first]))
        backend = Counts()
        assert sweep(AXES, shared, path=path, backend=backend) == lines
        assert path.read_bytes() == whole
        assert len(backend.cases) == {2: 15, 3: 14, 4: 14, 5: 14}[first]


def test_a_policy_that_attention_takes_all_graphs_of_runs_once_too() -> None:
    """One that plans graphs by one ladder and none by another runs for each; so does one that can't run."""
    shared, backend = common(attention=Claims.at_level("none")), Counts()
    sweep(Axes(policies=("full", "piecewise")), shared, backend=backend)
    assert [(case.trace, case.policy, case.ladder) for case in backend.cases] == [
        (trace, policy, ladder)
        for trace in ("short", "twice")
        for ladder, policies in (("own", ("full", "piecewise")), ("two", ("piecewise",)))
        for policy in policies
    ]
    backend = Counts()
    lines = sweep(Axes(policies=("eager",)), common(attention="no such kind"), backend=backend)
    assert len(backend.cases) == 4
    assert all("no such kind" in line["error"] for line in lines)


class Counts:
    """A backend that notes what it is asked to run."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def run(self, cases: Sequence[Case], shared: Common) -> Iterator[dict[str, Any]]:
        self.cases += cases
        return LocalBackend(1).run(cases, shared)


class Refuses:
    """A backend that must not be asked."""

    def run(self, cases: Any, _shared: Any) -> Any:
        raise AssertionError(cases)


KILLED = """
import sys
from pathlib import Path
from kpolicy.scheduling.generator import generate_trace
from kpolicy.scheduling.traces import FailedTrace, Trace
from kpolicy.simulate import Server
from kpolicy.costs import analytic_costs
from kpolicy.simulate.sweep import Axes, Common, LocalBackend, sweep
common = Common(traces={"t": generate_trace(num_requests=1500, seed=1)}, costs={"c": (analytic_costs(), Server())},
                ladders={"own": None})
sweep(Axes(policies=("eager", "vllm", "sglang"), rates=(1.0, 2.0, 3.0)), common, path=Path(sys.argv[1]),
      backend=LocalBackend(int(sys.argv[2])))
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_sweep_keeps_what_was_done(tmp_path: Path, jobs: int) -> None:
    """A process killed in the middle leaves a file that a second one finishes, with no case twice."""
    path = tmp_path / "s.jsonl"
    command = [sys.executable, "-c", KILLED, str(path), str(jobs)]
    first = subprocess.Popen(command, start_new_session=True)
    for _ in range(3000):
        if path.exists() and path.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done = path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1]
    assert done.count(b"\n") >= 3
    subprocess.run(command, check=True)
    lines = path.read_bytes().splitlines()
    assert path.read_bytes().startswith(done)
    assert len(lines) == len(set(lines)) == 1 + 9


def test_workers_end_with_their_sweep(tmp_path: Path) -> None:
    """A sweep that is killed alone leaves no process behind."""
    path = tmp_path / "s.jsonl"
    first = subprocess.Popen([sys.executable, "-c", KILLED, str(path), "2"], start_new_session=True)
    try:
        for _ in range(3000):
            if path.exists() and path.read_bytes().count(b"\n") >= 2:
                break
            time.sleep(0.02)
        os.killpg(first.pid, 0)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        for _ in range(500):
            if not _is_there(first.pid):
                return
            time.sleep(0.02)
        raise AssertionError("a worker is still there ten seconds after its sweep was killed")
    finally:
        if _is_there(first.pid):
            os.killpg(first.pid, signal.SIGKILL)


def _is_there(group: int) -> bool:
    """Whether a group of processes has any left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Fatal:
    """A trace that kills the process it is served in."""

    requests = ()

    def scaled(self, _rate: float) -> Trace:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_killed_worker_costs_its_own_case(tmp_path: Path) -> None:
    """The others have their results, the file is without it, and the same sweep tries it again."""
    shared = common()
    shared = attrs.evolve(shared, traces={"fatal": Fatal(), **shared.traces})
    axes, path = Axes(policies=("auto", "eager"), rates=(2.0,)), tmp_path / "s.jsonl"
    for left in (12, 4):
        seen: list[tuple[int, int]] = []
        lines = sweep(
            axes, shared, path=path, backend=LocalBackend(2), progress=lambda *each, seen=seen: seen.append(each)
        )
        assert [line["case"]["trace"] for line in lines if "error" in line] == ["fatal"] * 4
        assert all("its process was killed" in line["error"] for line in lines if "error" in line)
        assert len(seen) == 1 + left
        assert path.read_bytes().count(b"\n") == 1 + 8
        assert b"fatal" not in path.read_bytes().split(b"\n", 1)[1]


def test_a_file_of_another_sweep_is_refused(tmp_path: Path) -> None:
    """Other traces, costs or options, and other kinds of file, are named rather than mixed."""
    path = tmp_path / "s.jsonl"
    sweep(AXES, common(), path=path, backend=LocalBackend(1))
    for other, named in (
        (common(objective="latency"), "objective"),
        (common(seed=4), "seed"),
        (common(budget=Budget(graphs=99)), "budget"),
        (common(attention=parse_attention("mla")), "attention"),
        (common(ladders={"own": SIZES, "two": CaptureSizes((2, 8))}), "ladders"),
        (common(costs={"drawn": (COSTS, server(ranks=2))}), "servers"),
        (common(costs={"drawn": (attrs.evolve(COSTS, step_us=1.0), server())}), "costs"),
        (common(traces={"short": trace_of((0, 3, 3)), "twice": trace_of((0, 3, 3))}, seed=4), "traces and other seed"),
    ):
        with pytest.raises(ConfigError, match=f"was begun with other {named}. Give what it was begun with"):
            sweep(AXES, other, path=path)
    header, rest = path.read_text().split("\n", 1)
    for old, new, named in (
        (f'"kpolicy":"{__version__}"', '"kpolicy":"0.0.9"', "code, kpolicy 0.0.9 where this is"),
        ('"version":[', '"version":[9,', "lines, of version"),
    ):
        assert old in header
        path.write_text(f"{header.replace(old, new)}\n{rest}")
        with pytest.raises(ConfigError, match=f"was begun with other {named}"):
            sweep(AXES, common(), path=path)
    path.write_text('{"schema": "kpolicy/step_log"}\n')
    with pytest.raises(SchemaError, match="line 1, isn't of a results file"):
        SweepFile(path, common())
    path.write_text("something else")
    with pytest.raises(SchemaError, match="isn't a results file"):
        SweepFile(path, common())
    with pytest.raises(ConfigError, match="can't write"):
        SweepFile(tmp_path / "no" / "s.jsonl", common())


@pytest.mark.parametrize("kind", ["full", "zero", "null"])
def test_a_device_is_no_results_file(tmp_path: Path, kind: str) -> None:
    """One is full before the first case, another needn't ever end, and none keeps anything; by a link too."""
    link = tmp_path / "s.jsonl"
    link.symlink_to(device(tmp_path / kind, kind))
    for path in (link, tmp_path / kind):
        with pytest.raises(ConfigError, match=rf"{path} is a device or a pipe.*Give a file, or a path where there is"):
            sweep(AXES, common(), path=path, backend=Refuses())
    assert (tmp_path / kind).is_char_device()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is a device or a pipe"):
        sweep(AXES, common(), path=tmp_path / "pipe", backend=Refuses())


def test_a_file_longer_than_any_results_is_not_read(tmp_path: Path) -> None:
    """It would take all memory, and is refused by its length."""
    path = tmp_path / "s.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SchemaError, match=r"s\.jsonl is longer than 4,096 MiB, and no results file is\. Give another"):
        sweep(AXES, common(), path=path, backend=Refuses())
    assert path.stat().st_size == 1 << 40


def test_a_sweep_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    """The error says for how many bytes there is none and how many cases are kept, and no half line is left."""
    path = tmp_path / "s.jsonl"
    lines = sweep(AXES, common(), path=path, backend=LocalBackend(1))
    whole = path.read_bytes()
    path.unlink()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    said = rf"can't write {path} \({ends[4]:,} bytes\): .*Make room there; the same command goes on from the 3 cases"
    with room_for(ends[4] - 5), pytest.raises(ConfigError, match=said):
        sweep(AXES, common(), path=path, backend=LocalBackend(1))
    assert path.read_bytes() == whole[: ends[3]]
    assert sweep(AXES, common(), path=path, backend=LocalBackend(1)) == lines
    assert path.read_bytes() == whole
    path.unlink()
    with room_for(10), pytest.raises(ConfigError, match=rf"can't write {path} \({ends[0]:,} bytes\).*another path"):
        sweep(AXES, common(), path=path, backend=Refuses())
    assert path.read_bytes() == b""


def test_two_sweeps_dont_write_one_file(tmp_path: Path) -> None:
    """The second is refused while the first runs, and goes on once its process is gone, however it ended."""
    pytest.importorskip("fcntl")
    path = tmp_path / "s.jsonl"
    with SweepFile(path, common()):
        pass
    hold = "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX); print(1, flush=True)"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{hold}; sys.stdin.read()", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=r"s\.jsonl is written by another sweep now"):
            SweepFile(path, common())
        assert path.read_bytes() == before
        other.kill()
    assert len(sweep(AXES, common(), path=path, backend=LocalBackend(1))) == 16


def test_a_case_that_cant_run_is_a_line_and_the_others_run() -> None:
    """KV that graphs leave nothing of fails its own cases only."""
    small = server(num_blocks=20, kv_bytes_per_token=70)
    lines = sweep(Axes(policies=("eager", "full")), common(costs={"drawn": (COSTS, small)}), backend=LocalBackend(1))
    by_policy = {line["case"]["policy"]: line for line in lines if line["case"]["ladder"] == "own"}
    assert by_policy["eager"]["result"]["served"] == 12
    assert "nothing is left for requests" in by_policy["full"]["error"]


def test_a_trace_that_failed_costs_its_own_cases(tmp_path: Path) -> None:
    """In other processes too; they are no lines of the file, and are run when the trace is there."""
    path, whole = tmp_path / "s.jsonl", common()
    half = attrs.evolve(whole, traces={**whole.traces, "short": FailedTrace("short.csv", "short.csv: no such file.")})
    lines = sweep(AXES, half, path=path, backend=LocalBackend(2))
    failed = [line for line in lines if "error" in line]
    assert {line["case"]["trace"] for line in failed} == {"short"}
    assert {line["error"] for line in failed} == {"short.csv: no such file."}
    assert len(failed) == len(lines) / 2
    header, *kept = map(json.loads, path.read_text().splitlines())
    assert header["made_with"]["traces"]["short"] is None
    assert {line["case"]["trace"] for line in kept} == {"twice"}
    assert sweep(AXES, whole, path=path, backend=LocalBackend(1)) == sweep(AXES, whole, backend=LocalBackend(1))
    for lacks in ({"short": whole.traces["short"]}, {"twice": whole.traces["short"], "short": whole.traces["short"]}):
        with pytest.raises(ConfigError, match="was begun with other traces"):
            sweep(AXES, attrs.evolve(whole, traces=lacks), path=path, backend=Refuses())


def line_of(mib: float, ms: float, trace: str = "t", served: int = 1000) -> dict[str, Any]:
    case = {"trace": trace, "rate": 1.0, "costs": "default", "ladder": "own", "policy": f"p{mib}"}
    spread = {"count": 9, "p50": ms * 1e3, "p99": ms * 2e3}
    spreads = {"gap": spread, "ttft": spread, "e2e": spread}
    return {"case": case, "result": {"graph_bytes": mib * 2**20, "served": served, **spreads}}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.sampled_from("ab")), max_size=12))
def test_the_front_is_what_nothing_beats(cases: list[tuple[int, int, str]]) -> None:
    """A point is on its panel's front exactly where no other one is nowhere worse and somewhere better."""
    for point, (mib, ms, trace) in zip(points_of([line_of(*each) for each in cases], "gap-p50"), cases, strict=True):
        beaten = any(
            other[2] == trace and other[0] <= mib and other[1] <= ms and other[:2] != (mib, ms) for other in cases
        )
        assert point.on_front is not beaten


def test_a_case_that_served_nothing_isnt_quick() -> None:
    """It has no latency, so it is on no front and in no picture."""
    idle, served = line_of(1, 0), line_of(4, 5)
    idle["result"]["gap"] = {"count": 0, "p50": 0.0, "p99": 0.0}
    (point,) = points_of([idle, served], "gap-p50")
    assert point.line is served
    assert point.on_front


def test_a_case_that_serves_fewer_isnt_compared() -> None:
    """Requests that were handed back make a case quick; it is on no front and keeps nobody off one."""
    points = points_of([line_of(1, 1, served=990), line_of(2, 9, served=996), line_of(3, 2, "other", 5)], "gap-p50")
    assert [point.on_front for point in points] == [False, True, True]
    points = points_of([line_of(1, 1, served=995), line_of(2, 9)], "gap-p50")
    assert [point.on_front for point in points] == [True, False]


def test_a_fleets_fronts_take_seconds() -> None:
    """Thousands of deployments: work grows with the cases, not with their square (which took minutes)."""
    lines = [line_of(mib, 9 - mib, f"deployment {i}") for i in range(10_000) for mib in (1, 2, 3)]
    start = time.process_time()
    points = points_of(lines, "gap-p50")
    assert all(point.on_front for point in points)
    assert time.process_time() - start < 10


def test_more_panels_than_a_picture_holds_are_refused(tmp_path: Path) -> None:
    """They end in a named error; a PNG of a thousand panels is one of matplotlib's, after minutes."""
    pytest.importorskip("matplotlib")
    points = points_of([line_of(1, 1, f"deployment {i}") for i in range(MOST_PANELS + 1)], "gap-p50")
    with pytest.raises(ConfigError, match=f"would have {MOST_PANELS + 1}, over {MOST_PANELS}"):
        draw(points, "gap-p50", tmp_path / "p.png")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_the_same_each_time(tmp_path: Path, ending: str) -> None:
    """A PNG and an SVG with every policy and both panels; equal bytes from equal results."""
    pytest.importorskip("matplotlib")
    points = points_of([line_of(1, 9), line_of(4, 5), line_of(3, 2, "other"), line_of(9, 9)], "gap-p99")
    for name in ("a", "b"):
        draw(points, "gap-p99", tmp_path / f"{name}.{ending}")
    first = (tmp_path / f"a.{ending}").read_bytes()
    assert first == (tmp_path / f"b.{ending}").read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"a.{ending}", f"b.{ending}"]
    if ending == "svg":
        text = first.decode()
        assert all(part in text for part in ("p1", "p9", "other x1", "graph memory, MiB", METRICS["gap-p99"][0]))


def test_ladders_of_the_front_are_named(tmp_path: Path) -> None:
    """Where they differ; many sizes by the first, the last and their number."""
    pytest.importorskip("matplotlib")
    lines = [line_of(1, 9), line_of(4, 5), line_of(9, 8)]
    for line, ladder in zip(lines, ("1,2,4,8,16", "8,64", "2,3"), strict=True):
        line["case"]["ladder"] = ladder
    draw(points_of(lines, "gap-p50"), "gap-p50", tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert "1..16 (5)" in text
    assert "8,64" in text
    assert "2,3" not in text


def test_names_with_dollar_signs_are_drawn_as_they_are(tmp_path: Path) -> None:
    """Traces, ladders and policies: what stands between two of them is no formula."""
    pytest.importorskip("matplotlib")
    lines = [line_of(1, 9, r"t$\b$"), line_of(4, 5, r"t$\b$")]
    for line, ladder in zip(lines, (r"l$\b$.json", "own"), strict=True):
        line["case"] |= {"ladder": ladder, "policy": r"p$\b$"}
    draw(points_of(lines, "gap-p50"), "gap-p50", tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert all(f">{name}<" in text for name in (r"t$\b$ x1", r"l$\b$.json", r"p$\b$"))


def test_equal_latencies_are_drawn_near_each_other() -> None:
    """The axis spans a twentieth of the longest latency at least, about their middle; what differs by more fills it."""
    axes_of = pytest.importorskip("matplotlib.figure").Figure().add_subplot
    for highest, span in ((3.001, 0.05 * 3.001), (4.0, 1.0)):
        axes = axes_of()
        _panel(axes, points_of([line_of(1, highest), line_of(2, 3.0)], "gap-p50"), ("eager",), "gap-p50")
        low, high = axes.get_ylim()
        assert low < 3.0 < highest < high
        assert low + high == pytest.approx(3.0 + highest, rel=1e-6)
        assert span <= (high - low) * (1 + 1e-9) < 1.3 * span


def test_an_empty_sweep_cant_be_drawn(tmp_path: Path) -> None:
    """Where every case failed there is nothing to draw."""
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw([], "gap-p50", tmp_path / "x.png")


def test_no_ray_cluster_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray finds no cluster its reason is told, and what to do."""
    from kpolicy.simulate import ray_backend

    def init(**_given: object) -> None:
        raise ConnectionError("Could not find\na running instance.")

    found = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(ray_backend, "load", lambda *_names, **_given: found)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"find a running instance\. Start one with"):
        next(ray_backend.RayBackend().run([], common()))


def test_ray_gives_what_local_processes_give(tmp_path: Path) -> None:
    """The same lines from a Ray cluster of this machine, and from what a sweep on it left behind."""
    pytest.importorskip("ray")
    from kpolicy.simulate.ray_backend import RayBackend

    shared = common(traces={"t": generate_trace(num_requests=60, seed=2)})
    path = tmp_path / "s.jsonl"
    lines = sweep(AXES, shared, path=path, backend=RayBackend("local"))
    assert lines == sweep(AXES, shared, backend=LocalBackend(1))
    assert sweep(AXES, shared, path=path, backend=Refuses()) == lines


def test_ray_tells_what_it_lost() -> None:
    """A case whose worker dies each time has no result, and the others have theirs."""
    pytest.importorskip("ray")
    from kpolicy.simulate.ray_backend import RayBackend

    shared = common()
    shared = attrs.evolve(shared, traces={"fatal": Fatal(), **shared.traces}, ladders={"own": SIZES})
    lines = sweep(Axes(policies=("eager",), rates=(2.0,)), shared, backend=RayBackend("local"))
    assert "Ray lost it: WorkerCrashedError" in lines[0]["error"]
    assert [line["result"]["served"] for line in lines[1:]] == [12, 12]


def test_a_ray_cluster_that_isnt_there_is_one_error() -> None:
    """The error says how to start one."""
    pytest.importorskip("ray")
    from kpolicy.simulate.ray_backend import RayBackend

    with pytest.raises(ConfigError, match="ray start --head"):
        sweep(AXES, common(), backend=RayBackend("127.0.0.1:1"))


def test_a_ray_cluster_that_is_gone_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed cluster left behind, and the variable, are looked at before Ray waits for minutes."""
    pytest.importorskip("ray")
    from kpolicy.simulate.ray_backend import RayBackend

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:2")
    with pytest.raises(ConfigError, match=r"'auto': it leads to 127\.0\.0\.1:2, where none is\. Start one"):
        sweep(AXES, common(), backend=RayBackend("auto"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:3")
    with pytest.raises(ConfigError, match=r"it leads to 127\.0\.0\.1:3"):
        sweep(AXES, common(), backend=RayBackend("auto"))
