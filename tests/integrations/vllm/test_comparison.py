"""The arithmetic of the comparison with stock vLLM, and its loads."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.student import student
from benchmarks.vllm import child
from benchmarks.vllm import profiled as module_of_profiles
from benchmarks.vllm.correct import LOGPROBS, MODULES, RUNNERS, beside, passes, replica_passes
from benchmarks.vllm.loads import CHAT, CODE, RATES, make_load
from benchmarks.vllm.profiled import Span, spans_by_step
from benchmarks.vllm.step_rows import Ended, step_rows
from benchmarks.vllm.summary import ratio_interval, summarise
from benchmarks.vllm.ways import keys_of
from kpolicy.errors import ConfigError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.scheduling.traces import TRACES_VARIABLE


def row(side: str, repeat: int, **figures: Any) -> dict[str, Any]:
    return {"model": "m", "load": "l", "side": side, "repeat": repeat, **figures}


def test_more_is_better_for_rates_and_less_for_times() -> None:
    rows = [row("stock", i, requests_per_s=10.0, gap_p99_ms=20.0) for i in range(3)]
    rows += [row("kpolicy", i, requests_per_s=15.0, gap_p99_ms=10.0) for i in range(3)]
    found = {each["figure"]: each for each in summarise(rows)}
    assert found["requests_per_s"]["ratio"] == 1.5
    assert found["gap_p99_ms"]["ratio"] == 2.0
    assert (found["gap_p99_ms"]["stock"], found["gap_p99_ms"]["kpolicy"]) == (20.0, 10.0)
    assert found["gap_p99_ms"]["repeats"] == 3


def test_steadier_figures_are_of_all_requests_and_slow_gaps() -> None:
    """The ratio of two geometric means is the mean ratio of requests, and slow gaps count by how long they are."""
    stock, ours = [0.010, 0.040, 0.020], [0.005, 0.040, 0.020]
    gaps = [0.001] * 97 + [0.010, 0.020, 0.030]
    a, b = child.steadier(stock, gaps), child.steadier(ours, [])
    assert a["ttft_geo_ms"] / b["ttft_geo_ms"] == pytest.approx(2 ** (1 / 3), rel=1e-4)
    assert a["gap_slow_ms"] == 25.0
    assert "gap_slow_ms" not in b
    assert child.steadier(stock, [0.5, 0.25])["gap_slow_ms"] == 500.0
    rows = [row("stock", 0, ttft_geo_ms=2.0, gap_slow_ms=6.0), row("kpolicy", 0, ttft_geo_ms=1.0, gap_slow_ms=2.0)]
    assert {each["figure"]: each["ratio"] for each in summarise(rows)} == {"ttft_geo_ms": 2.0, "gap_slow_ms": 3.0}


def test_first_tokens_of_all_turns_together_have_their_quantiles() -> None:
    """One slow turn of three moves a median of turns' ratios, and hardly the median of all requests."""
    stock = [[10.0, 20.0, 30.0], [10.0, 20.0, 30.0], [10.0, 90.0, 95.0]]
    rows = [row("stock", i, ttft_ms=each) for i, each in enumerate(stock)]
    rows += [row("kpolicy", i, ttft_ms=[value / 2 for value in each]) for i, each in enumerate(stock)]
    found = {each["figure"]: each for each in summarise(rows)}
    middle, last = found["ttft_all_p50_ms"], found["ttft_all_p99_ms"]
    assert (middle["stock"], middle["kpolicy"], middle["ratio"], middle["repeats"]) == (20.0, 10.0, 2.0, 3)
    assert (last["stock"], last["kpolicy"], last["ratio"]) == (95.0, 47.5, 2.0)
    # Both sides' turns are drawn together, so what differs from turn to turn alike is in no interval.
    assert (middle["low"], middle["high"]) == (2.0, 2.0)
    del rows[0]["ttft_ms"]
    assert not summarise(rows)


def test_arrivals_are_shifted_alike_on_all_sides_and_otherwise_each_turn() -> None:
    requests = [[0.0, 5, 1], [1.0, 6, 2], [1.001, 7, 3], [2.0, 8, 4]]
    first, again, other = (child.shifted(requests, seed, 0.012) for seed in ("chat 0", "chat 0", "chat 1"))
    assert first == again != other
    assert first[0] == requests[0]
    assert sorted(each[1:] for each in first) == sorted(each[1:] for each in requests)
    starts = {each[1]: each[0] for each in first}
    assert all(0 <= starts[prompt] - at < 0.012 for at, prompt, _ in requests)
    assert [at for at, _, _ in first] == sorted(at for at, _, _ in first)
    assert child.shifted(requests, "chat 0", 0.0) == requests
    burst = [[0.0, 5, 1]] * 3
    assert child.shifted(burst, "burst 0", 0.012) == burst


def test_pairs_are_of_one_repeat() -> None:
    rows = [
        row("stock", 0, requests_per_s=1.0),
        row("stock", 1, requests_per_s=9.0),
        row("kpolicy", 1, requests_per_s=9.0),
    ]
    (found,) = summarise(rows)
    assert (found["ratio"], found["low"], found["repeats"]) == (1.0, None, 1)


def test_pairs_are_of_one_process() -> None:
    """A later one that goes on with its rows has another host; repeats of the same numbers are turns of their own."""
    first = [row(side, 0, requests_per_s=rate, call="1", began="1") for side, rate in (("stock", 1.0), ("wide", 3.0))]
    later = [row(side, 0, requests_per_s=rate, call="1", began="2") for side, rate in (("kpolicy", 8.0), ("wide", 4.0))]
    assert summarise([*first, *later]) == []
    (found,) = summarise([*first, *later], "wide", "kpolicy")
    assert (found["ratio"], found["repeats"]) == (2.0, 1)
    more = [row(side, 0, requests_per_s=rate, call="1", began="3") for side, rate in (("stock", 1.0), ("wide", 12.0))]
    (found,) = summarise([*first, *later, *more], "stock", "wide")
    assert (found["ratio"], found["repeats"]) == (6.0, 2)
    # A call without a pair leaves the earlier one's.
    apart = [row("stock", 0, requests_per_s=1.0, call="4", began="4")]
    apart += [row("wide", 0, requests_per_s=1.0, call="4", began="5")]
    (found,) = summarise([*first, *apart], "stock", "wide")
    assert found["ratio"] == 3.0


def test_the_interval_is_student_s_over_logarithms() -> None:
    mean, low, high = ratio_interval([1.0, 2.0, 4.0])
    assert mean == pytest.approx(2.0)
    # A standard deviation of ln 2, three values, 4.303 at two degrees of freedom.
    assert high == pytest.approx(2.0 * 2 ** (4.303 / 3**0.5), rel=1e-3)
    assert low == pytest.approx(4.0 / high)


def test_a_turn_s_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core, and the middle of the fixed work's times; one side's over the other's is a figure."""
    times = iter(range(child.LOOKS))
    monkeypatch.setattr(child, "host_work_us", lambda: float(next(times)))
    core, us = child.host_now()
    assert core in os.sched_getaffinity(0)
    assert us == (child.LOOKS - 1) / 2
    (found,) = summarise([row("stock", 0, host_us=60.0), row("kpolicy", 0, host_us=90.0)])
    assert (found["figure"], found["ratio"]) == ("host_us", 0.6667)


def test_each_step_with_prompts_has_a_row_and_the_others_one_a_kind() -> None:
    """Times are since the step before; after a time with nothing under way, since that ended."""
    ended = [
        Ended(10.0), Ended(10.02, 400, 1), Ended(10.025, 1, 1), Ended(10.031, 1, 1),
        Ended(11.0), Ended(11.011, 101, 2), Ended(11.018, 2, 2),
    ]  # fmt: skip
    taken = [("PIECEWISE", 448), ("FULL", 1), ("FULL", 1), ("FULL", 128), ("FULL", 2)]
    assert step_rows(ended, taken) == {
        "prompt_steps": [["PIECEWISE", 448, 400, 1, 20.0, True], ["FULL", 128, 101, 2, 11.0, True]],
        "decode_steps": [["FULL", 1, 2, 5.5, 6.0], ["FULL", 2, 1, 7.0, 7.0]],
    }
    ended.insert(3, Ended(10.03, 201, 2))
    taken.insert(2, ("PIECEWISE", 208))
    assert step_rows(ended, taken)["prompt_steps"][1] == ["PIECEWISE", 208, 201, 2, 5.0, False]
    assert step_rows(ended, taken[1:]) == {}


def test_steps_are_noted_as_their_outputs_come() -> None:
    """Those without tokens aren't: none of their modes is noted either."""
    engine = object.__new__(child.Engine)
    engine.ended = []
    engine.scheduler = SimpleNamespace(update_from_output=lambda step, output: (step, output))
    engine._note_ends()
    before = time.perf_counter()
    for tokens in (5, 0):
        step = SimpleNamespace(total_num_scheduled_tokens=tokens, num_scheduled_tokens={"a": 4, "b": 1})
        assert engine.scheduler.update_from_output(step, "out") == (step, "out")
    ((at_s, *rest),) = engine.ended
    assert rest == [5, 2]
    assert before <= at_s <= time.perf_counter()


def test_each_figure_has_the_host_s_speed_in_its_turns_beside_it() -> None:
    """And none where a turn doesn't tell it, as those of other turns would say nothing of this one."""
    rows = [row("stock", i, requests_per_s=1.0, host_us=us) for i, us in enumerate((60.0, 80.0))]
    rows += [row("kpolicy", i, requests_per_s=1.0, host_us=us) for i, us in enumerate((120.0, 40.0))]
    assert {each["figure"]: each["host"] for each in summarise(rows)} == {"requests_per_s": 1.0, "host_us": 1.0}
    (rate, _) = summarise(rows[:1] + rows[2:3])
    assert (rate["ratio"], rate["host"]) == (1.0, 0.5)
    del rows[0]["host_us"]
    assert "host" not in summarise(rows)[0]


def test_the_points_of_student_s_t() -> None:
    known = {1: 12.7062, 2: 4.303, 9: 2.262, 10: 2.2281, 14: 2.1448, 29: 2.0452, 1000: 1.9623}
    assert {freedom: student(freedom) for freedom in known} == pytest.approx(known, rel=2e-4)


@pytest.mark.parametrize("model", sorted(RATES))
def test_loads_keep_the_trace_s_order_and_start_at_0(model: str) -> None:
    folder = Path(os.environ.get(TRACES_VARIABLE) or "../shared/traces")
    if not all((folder / name).is_file() for name in (CODE, CHAT)):
        pytest.skip(f"no traces; name their folder in {TRACES_VARIABLE}")
    for name in ("code-2048", "chat"):
        load = make_load(name, model, folder)
        arrivals = [arrival for arrival, _, _ in load.requests]
        assert arrivals[0] == 0.0
        assert arrivals == sorted(arrivals)
        assert all(prompt + output <= 4096 for _, prompt, output in load.requests)
    assert make_load("code-2048", model, folder).step_tokens == 2048


def test_decodes_come_at_once() -> None:
    load = make_load("decode-768", "qwen05b", Path())
    assert load.requests == [(0.0, 32, 160)] * 768
    assert make_load("decode-2-64", "qwen05b", Path()).requests == [(0.0, 32, 64)] * 2
    assert make_load("burst-2", "qwen05b", Path(), scale=0.1).requests == [(0.0, 32, 4)] * 2
    with pytest.raises(ConfigError, match="no load"):
        make_load("chatter", "qwen05b", Path())
    for wrong in ("decode-x", "decode-1-2-3", "burst", "code-", "code-2-3"):
        with pytest.raises(ConfigError, match="no load"):
            make_load(wrong, "qwen05b", Path())


def generated(tokens: list[list[int]], mode: str = "FULL") -> dict[str, Any]:
    return {"tokens": tokens, "logits": [[{}]], "steps": [[mode, 8]], "stats": []}


def test_tokens_of_the_replica_count_where_two_stock_engines_agree() -> None:
    stock = generated([[1, 2, 3], [4, 5, 6]])
    same, other = generated([[1, 2, 3], [4, 5, 6]]), generated([[1, 2, 3], [4, 9, 6]])
    assert beside(stock, same)["first_difference"] is None
    assert beside(stock, other)["first_difference"] == {"request": 1, "position": 1}
    assert replica_passes(beside(stock, same), beside(stock, other))
    assert replica_passes(beside(stock, other), beside(stock, other))
    assert not replica_passes(beside(stock, other), beside(stock, same))
    assert not replica_passes(beside(stock, generated([[1, 2, 3], [4, 5, 6]], "NONE")), beside(stock, same))


@pytest.mark.parametrize("model", sorted(RUNNERS))
def test_a_model_counts_only_on_the_runner_it_is_there_for(model: str) -> None:
    """vLLM takes the first runner, with a warning, where the second lacks what was asked for."""
    good, bad = {"passes": True}, {"passes": False}
    checked = {"model": model, "replica": good, "auto": good, "split": good, "lazy": good, "broken": bad}
    for module, runner in MODULES.items():
        started = {"stock": {"runner": module}, "auto": {"runner": module}}
        assert passes({**checked, "started": started}) is (runner == RUNNERS[model])
    assert not passes({**checked, "started": {"stock": {"runner": next(iter(MODULES))}, "auto": {"runner": None}}})
    assert set(LOGPROBS) == set(MODULES.values())


def test_a_profile_tells_how_long_the_device_was_at_work_in_each_step() -> None:
    ended = [Ended(1.0), Ended(1.010, 200, 1), Ended(1.014, 2, 2), Ended(2.0), Ended(2.003, 2, 2)]
    taken = [("PIECEWISE", 208), ("FULL", 2), ("FULL", 2)]
    spans = [
        Span("early", 0.9, 0.95, True), Span("gemm", 1.001, 1.004, True), Span("side", 1.003, 1.005, True),
        Span("gemm", 1.009, 1.012, True), Span("sample", 1.013, 1.014, True),
        Span("cudaLaunchKernel", 1.000, 1.002, False), Span("cudaGraphLaunch", 1.011, 1.0115, False),
    ]  # fmt: skip
    found = spans_by_step(ended, taken, spans)
    # The third step came after the profiler's end: nothing of it was seen.
    assert found["steps"] == [["PIECEWISE", 208, 200, 1, 10.0, 5.0, 3], ["FULL", 2, 2, 2, 4.0, 3.0, 1]]
    assert found["kernels"] == [[True, "gemm", 2, 6.0], [True, "side", 1, 2.0], [False, "sample", 1, 1.0]]
    assert found["calls"] == [[True, "cudaLaunchKernel", 1, 2.0], [False, "cudaGraphLaunch", 1, 0.5]]


def test_a_profile_is_of_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own profiler, of the host alone; the core's step is its own again afterwards."""
    inner = torch.profiler.profile
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: inner(activities=[torch.profiler.ProfilerActivity.CPU]))
    monkeypatch.setattr(module_of_profiles, "MOST_STEPS", 2)
    calls: list[str] = []

    class Core:
        def step(self) -> None:
            calls.append("step")
            torch.ones(2).add_(1)
            ended.append(Ended(time.perf_counter(), 1, 1))

    ended = [Ended(time.perf_counter())]

    class Engine:
        engine, taken = Core(), [("NONE", 1)] * 4

        def serve(self, requests: Any, seed: str, _: Any) -> dict[str, Any]:
            for _ in requests:
                self.engine.step()
            return {"seed": seed}

    engine: Any = Engine()
    engine.ended = ended
    for requests in ([1], [1, 2, 3]):
        row = module_of_profiles.profiled(engine, {"requests": requests, "seed": "s"})
        assert (row["figures"], row["steps"], "step" in vars(engine.engine)) == ({"seed": "s"}, [], False)
        assert "aten::add_" in {name for _, name, *_ in row["calls"]}
    assert len(calls) == 4


def test_each_size_of_pieces_that_holds_a_prompt_is_timed_and_one_whole_graph() -> None:
    """Of decodes one of each kind; EAGER always."""
    pieces = [GraphKey(Part.PIECEWISE, size) for size in (384, 400, 448, 512, 1024)]
    decodes, mixed = GraphKey(Part.FULL, 512, 512, query_len=1), GraphKey(Part.FULL, 512, 512)
    keys = [*pieces, decodes, mixed]
    assert keys_of(keys, 394, prompts=True) == [mixed, *pieces[1:4], None]
    assert keys_of(keys, 600, prompts=True) == [pieces[4], None]
    assert keys_of([*pieces, decodes], 500, prompts=False) == [decodes, pieces[3], None]
    assert keys_of(keys, 2000, prompts=False) == [None]
