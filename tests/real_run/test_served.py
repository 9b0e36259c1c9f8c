"""What a host takes besides launching while it serves: noted of a real model, and told by `kpolicy calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.costs import CostTable, analytic_costs  # noqa: E402
from kpolicy.errors import KPolicyError, StickyDeviceError  # noqa: E402
from kpolicy.host_speed import INSIDE  # noqa: E402
from kpolicy.schemas import read_profile  # noqa: E402
from kpolicy.served_host import ServedHost  # noqa: E402
from kpolicy.serving import served  # noqa: E402
from kpolicy.serving.load import load  # noqa: E402
from kpolicy.serving.real_run import Serving, saturated_s  # noqa: E402
from kpolicy.serving.served import LOAD, serve_for  # noqa: E402
from kpolicy.simulate import simulate  # noqa: E402
from tests.cli.conftest import Command  # noqa: E402
from tests.real_run.helpers import LADDER, SETTINGS, TINY  # noqa: E402
from tests.real_run.test_command import config, kpolicy  # noqa: E402, F401
from tests.real_run.test_devices import pretended  # noqa: E402, F401

QUICK = attrs.evolve(analytic_costs(), measured=True, host_work_us=20.0)


@pytest.fixture(scope="module")
def roomy(one_thread: None) -> Any:
    """The tiny model with room for a few requests of a conversation's lengths."""
    return load(TINY, num_blocks=256, block_size=4, max_num_reqs=4, seed=3)


@pytest.fixture
def given(roomy: Any) -> tuple[Serving, Any]:
    """It under a table that notes how fast the host was, and an engine with its graphs."""
    serving = Serving(model=roomy, settings=SETTINGS, ladder=LADDER, costs=QUICK, verify=False)
    engine = serving.engine("auto")
    engine.capture()
    return serving, engine


def with_costs(serving: Serving, **fields: Any) -> Serving:
    return attrs.evolve(serving, costs=attrs.evolve(QUICK, **fields))


def test_what_the_host_takes_is_noted_of_a_real_model(given: tuple[Serving, Any]) -> None:
    """Both times and the host's speed; the engine's graphs are as before, and serve on."""
    serving, engine = given
    captured = engine.registry.captured()
    found = serve_for(serving, engine, 0.4)
    assert found is not None
    assert 0 < found.scheduler_us < 1e5
    assert 0 <= found.scheduler_prompt_us < 1e5
    assert len(found.host_work_us) > 1
    assert engine.registry.captured() == captured
    again = serve_for(with_costs(serving, host_work_us=0.0), engine, 0.1)
    assert again is not None
    assert again.host_work_us == ()
    table = attrs.evolve(QUICK, served=found)
    assert simulate([], "auto", costs=table).steps == 0


# By hand: what serving gave is told


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Has `serve_model` give this result and these steps, (start, cycle) in us; the traces that it was to serve."""

    def tell(ran: list[tuple[float, float]] | None = None, **result: Any) -> list[Any]:
        traces: list[Any] = []

        def serve_model(trace: Any, *_: Any, on_step: Any, **__: Any) -> Any:
            traces.append(trace)
            for i, (start_us, cycle_us) in enumerate(ran or ()):
                on_step(i, None, SimpleNamespace(cycle_us=cycle_us), None, start_us)
            values = {"steps": 30, "prompt_steps": 10, "outside_us": 5000.0, "outside_prompts_us": 3000.0}
            return SimpleNamespace(**{**values, "interrupted": "", **result}), ()

        monkeypatch.setattr(served, "serve_model", serve_model)
        return traces

    return tell


def test_the_schedulers_time_is_that_of_steps_without_prompts(
    given: tuple[Serving, Any], told: Callable[..., list[Any]]
) -> None:  # fmt: skip
    """20 steps had 2,000 us outside, 100 each; 10 with prompts had 300 each, which is 200 more."""
    told()
    assert serve_for(*given) == ServedHost(scheduler_us=100.0, scheduler_prompt_us=200.0)
    told(outside_prompts_us=600.0)
    assert serve_for(*given) == ServedHost(scheduler_us=220.0), "steps with prompts took less: no more is told"


@pytest.mark.parametrize("few", [{"steps": 19}, {"steps": 30, "prompt_steps": 30}, {"prompt_steps": 0}, {"steps": 0}])
def test_too_few_steps_tell_nothing(
    few: dict[str, int], given: tuple[Serving, Any], told: Callable[..., list[Any]]
) -> None:  # fmt: skip
    """Nor do those of one kind alone."""
    told(**few)
    assert serve_for(*given) is None
    told(steps=20, prompt_steps=19)
    assert serve_for(*given) is not None


def test_the_hosts_speed_is_noted_behind_each_step(
    given: tuple[Serving, Any], told: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """By a step's own time in its stretch of 50 ms; a stretch in which none ran is left out."""
    works = iter((20.0, 30.0, 40.0))
    monkeypatch.setattr(served, "host_work_us", lambda: next(works))
    told([(0.0, 10_000.0), (10_000.0, 30_000.0), (120_000.0, 1000.0)])
    found = serve_for(*given)
    assert found is not None
    assert found.host_work_us == pytest.approx(((20 * 10 + 30 * 30) / 40, 40.0))


def test_what_a_timer_notes_inside_steps_counts_first(
    given: tuple[Serving, Any], told: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Brought to the other work's time, 20 for 10; of a step that it noted nothing of that work is timed itself."""
    serving, engine = given
    inside, asked = iter((15.0, 0.0)), list[float]()

    def noted(begin_s: float, end_s: float) -> float:
        asked.append(end_s - begin_s)
        return next(inside)

    monkeypatch.setattr(served, "work_inside_us", noted)
    monkeypatch.setattr(served, "host_work_us", lambda: 50.0)
    told([(0.0, 1000.0), (60_000.0, 2000.0)])
    timed = with_costs(serving, host_work_inside_us=10.0, inside_probe=INSIDE)
    found = serve_for(timed, engine)
    assert found is not None
    assert found.host_work_us == (30.0, 50.0)
    assert asked == pytest.approx([1e-3, 2e-3])


def test_a_share_of_what_the_machine_can_do_is_asked(
    given: tuple[Serving, Any], told: Callable[..., list[Any]]
) -> None:  # fmt: skip
    """Also of a model that most of a conversation's requests don't fit: those that do are as many as that takes."""
    serving, engine = given
    traces = told()
    for seconds in (10.0, 20.0):
        serve_for(serving, engine, seconds)
        (trace,) = traces
        model = serving.model
        work_s = saturated_s(trace, engine, QUICK, num_blocks=model.num_blocks, block_size=model.block_size)
        assert work_s == pytest.approx(LOAD * seconds, rel=0.2)
        assert trace.span_s == pytest.approx(seconds)
        assert max(each.prompt_tokens + each.output_tokens for each in trace.requests) <= model.max_model_len
        traces.clear()
    serve_for(serving, engine, seconds=1e-6)
    assert len(traces[0]) == 2


def test_a_serving_that_fails_says_why(given: tuple[Serving, Any], told: Callable[..., list[Any]]) -> None:
    """Its own words; an interrupt is one, and what nothing was measured for isn't served."""
    serving, engine = given
    told(interrupted="a step failed: ValueError: of no use")
    with pytest.raises(KPolicyError, match=r"what the host takes .* failed: a step failed: ValueError: of no use\.$"):
        serve_for(serving, engine)
    told(interrupted="interrupted from the keyboard")
    with pytest.raises(KeyboardInterrupt):
        serve_for(serving, engine)
    with pytest.raises(KPolicyError, match="calibrate first"):
        serve_for(attrs.evolve(serving, costs=None), engine)


def test_a_step_that_fails_in_earnest_is_said(given: tuple[Serving, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the serving, not the process; the graphs serve on."""

    class Failing(served.Prompts):
        def of(self, *_: Any) -> Any:
            raise ValueError("of no use")

    with monkeypatch.context() as patch:
        patch.setattr(served, "Prompts", Failing)
        with pytest.raises(KPolicyError, match="failed: a step failed: ValueError: of no use"):
            serve_for(*given, 0.1)
    assert serve_for(*given, 0.1) is not None


def test_a_model_that_no_request_fits_says_so(told: Callable[..., list[Any]], one_thread: None) -> None:
    """By the model's tokens, before anything is served."""
    traces = told()
    small = load({**TINY, "max_position_embeddings": 8}, num_blocks=8, block_size=4, max_num_reqs=4, seed=3)
    serving = Serving(model=small, settings=SETTINGS, ladder=LADDER, costs=QUICK, verify=False)
    with pytest.raises(KPolicyError, match="no request of a conversation's lengths fits the model's 8 tokens"):
        serve_for(serving, serving.engine("auto"))
    assert not traces


# The command


@pytest.fixture
def calibrated(kpolicy: Command, config: Path, tmp_path: Path) -> Callable[..., Any]:  # noqa: F811
    """How calibrating on a device ended, and the table in its profile."""

    def run(device: str, *more: str, code: int = 0) -> tuple[Any, CostTable]:
        ended = kpolicy(
            "calibrate", "--device", device, "--model", config, "--out", tmp_path / "p.json", "--seconds", 0.3,
            "--max-num-reqs", 4, "--max-num-tokens", 16, "--kv-tokens", 1024, "--ladder", "8,16", *more,
        )  # fmt: skip
        assert ended.code == code, ended.err
        return ended, read_profile(tmp_path / "p.json").costs

    return run


def as_served(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]) -> None:
    monkeypatch.setattr(import_module("kpolicy.serving.served"), "serve_for", serve)


on_xpu = pytest.mark.parametrize("pretended", ["xpu"], indirect=True)


@on_xpu
def test_calibrating_a_device_serves_and_tells(
    pretended: Mapping[str, Any], calibrated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """The profile has what was noted, and JSON says it beside how much slower than while launches were timed."""
    as_served(monkeypatch, partial(serve_for, seconds=0.3))
    ended, costs = calibrated("xpu", "--json")
    found = costs.served
    assert found.scheduler_us > 0
    assert found.host_work_us
    assert "kpolicy: serving" not in ended.err
    times = [us / costs.host_work_us for us in found.host_work_us]
    assert ended.json["served"] == {
        "scheduler_us": found.scheduler_us, "scheduler_prompt_us": found.scheduler_prompt_us,
        "host_slower": {
            "least": min(times), "mean": pytest.approx(sum(times) / len(times)), "most": max(times),
        },
    }  # fmt: skip


@on_xpu
def test_calibrating_says_in_a_line_what_serving_took(
    pretended: Mapping[str, Any], calibrated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """With the host's speed where it was noted: twice as slow in one of two notes, as slow in the other."""
    scheduler = "serving: the scheduler takes 1,234 us a step and 57 more with prompts"

    def noting(serving: Serving, *_: Any) -> ServedHost:
        assert serving.costs is not None
        us = serving.costs.host_work_us
        return ServedHost(scheduler_us=1234.4, scheduler_prompt_us=56.7, host_work_us=(us, 2 * us))

    as_served(monkeypatch, noting)
    ended, _ = calibrated("xpu")
    told = " ".join(ended.out.split())
    assert f"{scheduler}, the host 1.00 to 2.00 times as long, 1.50 in the mean written to" in told
    as_served(monkeypatch, lambda *_: ServedHost(scheduler_us=1234.4, scheduler_prompt_us=56.7))
    ended, costs = calibrated("xpu")
    assert scheduler in ended.out.splitlines()
    assert costs.served == ServedHost(scheduler_us=1234.4, scheduler_prompt_us=56.7)
    assert calibrated("xpu", "--json")[0].json["served"]["host_slower"] is None


NOTHING = "The profile says nothing of the scheduler's time or of slow moments."


@on_xpu
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KPolicyError("serving failed: no use."), "serving failed: no use."),
        (StickyDeviceError("the device is lost."), "the device is lost."),
        (RuntimeError("no such kernel"), "serving failed: RuntimeError: no such kernel."),
    ],
)
def test_a_serving_that_fails_leaves_the_profile_without(
    error: Exception, said: str, pretended: Mapping[str, Any], calibrated: Callable[..., Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What was measured before is written all the same, and a line on standard error says why."""

    def fails(*_: Any) -> ServedHost:
        raise error

    as_served(monkeypatch, fails)
    ended, costs = calibrated("xpu", "--json", code=1)
    assert f"kpolicy: {said} {NOTHING}\n" in ended.err
    assert ended.json["served"] is costs.served is None
    assert costs.measured


@on_xpu
def test_an_interrupt_while_it_serves_leaves_what_was_measured(
    pretended: Mapping[str, Any], calibrated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """As an error does; one while it measures leaves no profile."""

    def interrupted(*_: Any) -> ServedHost:
        raise KeyboardInterrupt

    as_served(monkeypatch, interrupted)
    ended, costs = calibrated("xpu", code=130)
    assert f"kpolicy: serving was interrupted from the keyboard. {NOTHING}\n" in ended.err
    assert costs.measured
    assert costs.served is None


@on_xpu
def test_a_serving_that_is_over_too_soon_is_told(
    pretended: Mapping[str, Any], calibrated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    as_served(monkeypatch, lambda *_: None)
    ended, costs = calibrated("xpu", code=1)
    assert f"kpolicy: serving was over after too few steps to tell what the host takes. {NOTHING}\n" in ended.err
    assert "serving:" not in ended.out
    assert costs.served is None


def test_a_host_that_runs_what_it_launches_isnt_served(
    calibrated: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """On a CPU nothing launches ahead, and no line says that anything is missing."""

    def serves(*_: Any) -> ServedHost:
        raise AssertionError

    as_served(monkeypatch, serves)
    ended, costs = calibrated("cpu", "--json")
    assert ended.json["served"] is costs.served is None
    assert NOTHING not in ended.err
