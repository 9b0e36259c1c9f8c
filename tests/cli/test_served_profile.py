"""Commands that simulate by a profile whose calibration served: they go by it, and say so."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy.cli import simulate as simulate_module
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.scheduling.traces import read_trace
from kpolicy.schemas import Profile, write_profile
from kpolicy.served_host import ServedHost
from kpolicy.simulate import Server, simulate
from kpolicy.simulate.starts import Starts
from tests.cli.conftest import Command, write
from tests.cli.test_bad_input import refused

SERVED = ServedHost(scheduler_us=1500.4, scheduler_prompt_us=70.2, host_work_us=(20.0, 30.0, 22.0))
COSTS = attrs.evolve(analytic_costs(), version="measured somewhere", measured=True, host_work_us=20.0, served=SERVED)
SCHEDULER = "the scheduler takes 1,500 us a step, 70 more with prompts"
HOST = (
    "the host takes 1.00 to 1.50 times as long as in the profile's launches, 1.20 in the mean, as was noted while its "
    "calibration served"
)


def profile_of(path: Path, costs: CostTable = COSTS) -> Path:
    write_profile(path, Profile(costs=costs, device="A device", model="a model", kv_bytes_per_token=131_072))
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return profile_of(tmp_path / "own.json")


def expected(trace: Path, costs: CostTable = COSTS, policy: str = "eager", **of: Any) -> Any:
    """What the library says of it, in JSON's values."""
    result = simulate(read_trace(trace), policy, server=Server(**of), costs=costs, attention="gqa")
    return json.loads(json.dumps(result.as_dict()))


@pytest.mark.parametrize(
    ("options", "of", "times", "lines"),
    [
        ((), {}, (1500.4, 70.2), (SCHEDULER, HOST)),
        (("--steady-host",), {"steady_host": True}, (1500.4, 70.2), (SCHEDULER,)),
        (("--scheduler-us", 0), {"scheduler_us": 0.0}, (0.0, 0.0), (HOST,)),
        (
            ("--slower-host", 1.5), {"slower_host": 1.5}, (1500.4 * 1.425, 70.2 * 1.425),
            (
                "the scheduler takes 2,138 us a step, 100 more with prompts",
                "the host takes 1.50 to 2.25 times as long as in the profile's launches, 1.80 in the mean, 1.5 times "
                "what was noted while its calibration served",
            ),
        ),
        (
            ("--slower-host", 0.8, "--steady-host", "--scheduler-us", 3),
            {"slower_host": 0.8, "steady_host": True, "scheduler_us": 3.0}, (3.0, 0.0),
            (
                "the scheduler takes 3 us a step, 0 more with prompts",
                "the host takes 0.80 times as long as in the profile's launches, as given",
            ),
        ),
        (("--scheduler-us", 0, "--steady-host"), {"scheduler_us": 0.0, "steady_host": True}, (0.0, 0.0), ()),
        (
            ("--scheduler-us", 12), {"scheduler_us": 12.0}, (12.0, 0.0),
            ("the scheduler takes 12 us a step, 0 more with prompts", HOST),
        ),
        (
            ("--scheduler-prompt-us", 9), {"scheduler_prompt_us": 9.0}, (1500.4, 9.0),
            ("the scheduler takes 1,500 us a step, 9 more with prompts", HOST),
        ),
        (
            ("--scheduler-us", 0, "--scheduler-prompt-us", 9), {"scheduler_us": 0.0, "scheduler_prompt_us": 9.0},
            (0.0, 9.0), ("the scheduler takes 0 us a step, 9 more with prompts", HOST),
        ),
    ],
)  # fmt: skip
def test_a_simulation_goes_by_it_and_says_so(
    options: tuple[Any, ...], of: dict[str, Any], times: tuple[float, float], lines: tuple[str, ...],
    kpolicy: Command, trace: Path, own: Path,
) -> None:  # fmt: skip
    """In words and in JSON, whose server has the times that it came to; the result is the library's own."""
    given = ("simulate", trace, "--policy", "eager", "--window", 0, "--profile", own, *options)
    said = " ".join(kpolicy(*given).out.split())
    assert [line for line in (SCHEDULER, HOST) if line in said] == [line for line in (SCHEDULER, HOST) if line in lines]
    assert all(line in said for line in lines)
    assert said.count("the scheduler takes") + said.count("the host takes") == len(lines)
    told = kpolicy(*given, "--json").json
    server = told["setting"]["server"]
    assert (server["scheduler_us"], server["scheduler_prompt_us"]) == times
    assert server["steady_host"] is ("--steady-host" in options)
    times = server["slower_host"]
    assert times == of.get("slower_host", 1.0)
    slower = {"least": 1.0, "mean": 1.2, "most": 1.5}
    if "--steady-host" in options:
        slower = {} if times == 1 else dict.fromkeys(slower, 1.0)
    wanted = {name: pytest.approx(value * times) for name, value in slower.items()}
    assert told["setting"]["host_slower"] == (wanted or None)
    assert told["traces"][0]["policies"] == [expected(trace, **of)]


def test_a_slower_host_that_cannot_be_had_is_refused(kpolicy: Command, trace: Path, own: Path) -> None:
    """A factor that is none, costs of no host, and starts that would all be alike."""

    def refused(*options: object) -> str:
        code, _, told = kpolicy("simulate", trace, *options)
        assert code == 2
        return " ".join(told.split())

    for value in ("0", "-1", "10.5", "nan"):
        told = refused("--profile", own, f"--slower-host={value}")
        assert (
            f"--slower-host is {value}; it is from 0.1 to 10 times as long as the profile noted, 1 for just as" in told
        )
    told = refused("--slower-host", 1.1)
    assert "--slower-host 1.1 needs costs that say how fast their host was, and these are analytic costs of" in told
    assert "Give a --profile that kpolicy calibrate wrote, or leave it out." in told
    told = refused("--profile", own, "--slower-host", 1.1, "--steady-host", "--starts", 3)
    assert "--starts 3 begins at some of a profile's notes of the host's speed, and --steady-host" in told


def test_other_commands_take_a_slower_host(kpolicy: Command, trace: Path, own: Path) -> None:
    """A sweep's cases take longer. What a plan replays does; sizes are priced by the profile as it is."""
    slower = ("--slower-host", 2)
    sweep = ("sweep", trace, "--policy", "eager", "--window", 0, "--jobs", 1, "--profile", own, "--json")
    took = [kpolicy(*sweep, *more).json["cases"][0]["result"]["step_us"] for more in ((), slower)]
    assert took == [expected(trace)["step_us"], expected(trace, slower_host=2.0)["step_us"]]
    plan = ("plan", trace, "--budget", 4, "--profile", own, "--json")
    found = [kpolicy(*plan, *more).json for more in ((), slower)]
    as_noted, slower_notes = ([note for note in each["notes"] if note.startswith("host")] for each in found)
    assert as_noted == []
    [note] = slower_notes
    assert note.startswith(
        "host: steps were replayed on one that is 2 times as slow; their times here are by the profile"
    )
    code, _, told = kpolicy("plan", trace, "--budget", 4, "--slower-host", 2)
    assert code == 2
    assert "--slower-host 2 needs costs that say how fast their host was" in " ".join(told.split())


def test_a_profile_that_was_not_served_is_as_before(kpolicy: Command, trace: Path, tmp_path: Path) -> None:
    """Without a time of the scheduler's, which a measured one says; the analytic table is no other."""
    bare = profile_of(tmp_path / "bare.json", attrs.evolve(COSTS, served=None))
    for more in (("--profile", bare), ()):
        given = ("simulate", trace, "--policy", "eager", *more)
        out = kpolicy(*given).out
        assert "the scheduler takes" not in out
        assert "the host takes" not in out
        said = "the profile says nothing of the scheduler's time, taken as 0 us: --scheduler-us gives it"
        assert (said in " ".join(out.split())) is bool(more)
        server = kpolicy(*given, "--json").json["setting"]["server"]
        assert (server["scheduler_us"], server["scheduler_prompt_us"]) == (0.0, 0.0)


def test_a_sweep_goes_by_each_profile(kpolicy: Command, trace: Path, own: Path, tmp_path: Path) -> None:
    """One that served and one that didn't, beside each other."""
    bare = profile_of(tmp_path / "bare.json", attrs.evolve(COSTS, served=None))
    given = ("sweep", trace, "--policy", "eager", "--window", 0, "--jobs", 1, "--json")
    lines = kpolicy(*given, "--profiles", own, "--profiles", bare).json["cases"]
    found = {line["case"]["costs"]: line["result"]["step_us"] for line in lines}
    plain = attrs.evolve(COSTS, served=None)
    wanted = {str(own): expected(trace)["step_us"], str(bare): expected(trace, plain)["step_us"]}
    assert found == wanted
    assert wanted[str(own)] > wanted[str(bare)]
    (steady,) = kpolicy(*given, "--profile", own, "--steady-host", "--scheduler-us", 0).json["cases"]
    assert steady["result"]["step_us"] == wanted[str(bare)]


def test_a_sweep_is_not_gone_on_with_by_another_host(kpolicy: Command, trace: Path, own: Path, tmp_path: Path) -> None:
    """Its results are of the host that was noted when it was begun; one that is steady is another server's."""
    given = ("sweep", trace, "--policy", "eager", "--jobs", 1, "--profile", own, "--out", tmp_path / "s.jsonl")
    assert kpolicy(*given).code == 0
    refused(kpolicy(*given, "--steady-host"), "s.jsonl", "servers")
    profile_of(own, attrs.evolve(COSTS, served=attrs.evolve(SERVED, host_work_us=(21.0,))))
    refused(kpolicy(*given), "s.jsonl", "costs")


def test_a_report_goes_by_it(kpolicy: Command, trace: Path, own: Path, tmp_path: Path) -> None:
    """Its page says so, and its run is the simulation of a warm server."""
    page = tmp_path / "r.html"
    given = ("report", trace, "--policy", "eager", "--window", 0, "--profile", own, "--out", page, "--json")
    ended = kpolicy(*given)
    assert ended.code == 0, ended.err
    (made,) = ended.json["traces"]
    assert made["runs"][0]["step_us"] == expected(trace, warm=True)["step_us"]
    text = " ".join(unescape(page.read_text()).split())
    assert SCHEDULER in text
    assert HOST in text
    assert kpolicy(*given, "--steady-host").code == 0
    text = " ".join(unescape(page.read_text()).split())
    assert (SCHEDULER in text, HOST in text) == (True, False)


def test_a_plan_goes_by_it(kpolicy: Command, own: Path, tmp_path: Path) -> None:
    """Which steps run is that of such a server; with neither of the two it is that of a profile that wasn't served."""
    rows = (f"{20 * i},{8 + 73 * i % 293},{20 + 5 * i % 12}" for i in range(40))
    trace = write(tmp_path / "busy.csv", "timestamp,input_length,output_length", *rows)
    bare = profile_of(tmp_path / "bare.json", attrs.evolve(COSTS, served=None))
    given = ("plan", trace, "--policy", "vllm", "--budget", 2, "--max-num-reqs", 16, "--json", "--profile")
    found = [
        kpolicy(*given, *more)
        for more in ((own,), (bare,), (own, "--steady-host", "--scheduler-us", 0), (own, "--steady-host"))
    ]
    assert [each.code for each in found] == [0, 0, 0, 0]
    served, plain, neither, steady = (each.json for each in found)
    assert neither == plain
    # Slower steps take more requests along, and there are fewer of them.
    assert served["steps"] < steady["steps"] < plain["steps"]


def test_where_no_server_is_simulated_it_has_no_say(kpolicy: Command, tmp_path: Path) -> None:
    """Batches as they were scheduled are decided again, and no step runs."""
    log = tmp_path / "decisions.jsonl"
    log.write_text("")
    ended = kpolicy("simulate", "--decisions", log, "--policy", "eager", "--steady-host")
    refused(ended, "--steady-host has no say where --decisions")


@pytest.mark.parametrize("option", ["--scheduler-us", "--scheduler-prompt-us"])
@pytest.mark.parametrize("value", ["-1", "nan", "1e9"])
def test_times_that_none_takes_are_refused(option: str, value: str, kpolicy: Command, trace: Path, own: Path) -> None:
    """By the option's name, though the profile has times of its own."""
    ended = kpolicy("simulate", trace, "--profile", own, f"{option}={value}")
    refused(ended, f"{option} is {float(value):g}; it takes microseconds from 0 up")


def test_latencies_are_told_from_several_starts(kpolicy: Command, trace: Path, own: Path) -> None:
    """The library's from each seed; what the first gives is told as without, and so are step logs."""
    given = ("simulate", trace, "--policy", "eager", "--policy", "vllm", "--window", 0, "--profile", own)
    told = kpolicy(*given, "--seed", 2, "--starts", 3, "--json").json
    for found, policy in zip(told["traces"][0]["policies"], ("eager", "vllm"), strict=True):
        results = [
            simulate(read_trace(trace), policy, server=Server(), costs=COSTS, attention="gqa", seed=seed)
            for seed in (2, 3, 4)
        ]
        starts = found.pop("starts")
        assert found == json.loads(json.dumps(results[0].as_dict()))
        assert starts == json.loads(json.dumps(Starts.of(results).as_dict()))
        assert starts["seeds"] == [2, 3, 4]
    assert all("starts" not in each for each in kpolicy(*given, "--json").json["traces"][0]["policies"])
    said = " ".join(kpolicy(*given, "--starts", 3).out.split())
    assert "from 3 starts least / middle / most" in said
    assert "from 3 starts" not in kpolicy(*given).out


def test_starts_of_which_none_serves_have_no_latencies(kpolicy: Command, tmp_path: Path, own: Path) -> None:
    """A dash, as where one was asked for, and not 0 ms."""
    trace = write(tmp_path / "long.csv", "timestamp,input_length,output_length", "0.0,900,9", "0.1,800,9")
    given = ("simulate", trace, "--policy", "eager", "--profile", own, "--starts", 2, "--kv-tokens", 64)
    ended = kpolicy(*given)
    assert ended.code == 1
    rows = [line.split() for line in ended.out.partition("from 2 starts")[2].splitlines()]
    assert next(row for row in rows if row[:1] == ["eager"]) == ["eager", "-", "-", "-", "-"]


def test_starts_without_notes_are_refused(kpolicy: Command, trace: Path, own: Path, tmp_path: Path) -> None:
    """All would be the same; what is given in their place is told."""
    bare = profile_of(tmp_path / "bare.json", attrs.evolve(COSTS, served=None))
    given = ("simulate", trace, "--policy", "eager", "--starts", 3)
    refused(kpolicy(*given, "--profile", bare), "--starts 3", "there are none in", "whose calibration served")
    refused(kpolicy(*given), "--starts 3", "there are none in")
    refused(kpolicy(*given, "--profile", own, "--steady-host"), "--steady-host leaves them out")
    refused(kpolicy(*given[:-1], 0, "--profile", own), "--starts is 0", "from 1 to")
    refused(kpolicy(*given[:-1], 1.5, "--profile", own), "takes a whole number")


def test_starts_that_are_interrupted_leave_the_first(
    kpolicy: Command, trace: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What some of them come to isn't what all would; the policy's own result stays, and the next isn't begun."""
    made = simulate_module.simulate

    def interrupted(*given: Any, seed: int, **more: Any) -> Any:
        found = made(*given, seed=seed, **more)
        return attrs.evolve(found, interrupted="interrupted") if seed == 1 else found

    monkeypatch.setattr(simulate_module, "simulate", interrupted)
    given = ("simulate", trace, "--policy", "eager", "--policy", "vllm", "--profile", own, "--starts", 3, "--json")
    ended = kpolicy(*given)
    assert ended.code == 130
    [found] = ended.json["traces"][0]["policies"]
    assert (found["policy"], "starts" in found, found["interrupted"]) == ("eager", False, "")
    assert "interrupted; what was done is above" in ended.err
