"""`StepLog`: steps are written several at once, and all of them however the run ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kpolicy.cli.step_log import AT_ONCE, RunsOn, StepLog
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.decision import Decision, Launch
from kpolicy.engine import Engine
from kpolicy.executors.base import StepOutputs
from kpolicy.host_speed import INSIDE, INTERPRETER, ONCE
from kpolicy.modes import Mode, Rows
from kpolicy.reasons import Reason
from kpolicy.scheduling.batching import Batcher
from kpolicy.schemas import StepLogWriter, read_step_log
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape

EAGER = Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.POLICY_IS_EAGER)


@contextmanager
def writing(path: Path, costs: CostTable | None = None) -> Iterator[Any]:
    """A log, as what notes the step of a number."""
    settings = Settings(max_num_reqs=4, max_num_tokens=64)
    batcher = Batcher(settings, num_blocks=8, block_size=16)
    with StepLog(path, "eager", Engine("eager", settings=settings, costs=costs or analytic_costs())) as log:
        assert log is not None
        rows: Any = SimpleNamespace(query_lens=[0], kv_lens=[0])

        def note(step: int) -> None:
            # The same lists are filled anew for each step, as a scheduler may.
            rows.query_lens[0], rows.kv_lens[0] = 3 + step % 5, 5 + step % 5
            rows.numbers = BatchShape(prefills=[(3 + step % 5, 2)]).numbers
            log(step, rows, StepOutputs((), (), EAGER, [SimpleNamespace(part=Rows.ALL, us=10.0 + step)]), batcher, 4.0)

        yield note


def test_steps_are_written_together(tmp_path: Path) -> None:
    """Nothing is turned into lines between two steps of the same lot; what was noted is the step as it was then."""
    path = tmp_path / "s.jsonl"
    with writing(path) as note:
        for step in range(AT_ONCE - 1):
            note(step)
        assert "cycle_us" not in path.read_text()
        for step in range(AT_ONCE - 1, 3 * AT_ONCE + 5):
            note(step)
        assert "cycle_us" in path.read_text()
    log = read_step_log(path)
    assert not log.cut_short
    assert [each.step for each in log.entries] == list(range(3 * AT_ONCE + 5))
    assert [each.cycle_us for each in log.entries] == [10.0 + each.step for each in log.entries]
    assert [each.shape.prefills[0][0] for each in log.entries] == [3 + each.step % 5 for each in log.entries]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_leaves_every_step(tmp_path: Path, error: type[BaseException]) -> None:
    """And a log that is marked cut short."""
    path = tmp_path / "s.jsonl"
    with suppress(error), writing(path) as note:
        for step in range(7):
            note(step)
        raise error
    log = read_step_log(path)
    assert (len(log.entries), log.cut_short) == (7, True)


def test_where_the_last_steps_cant_be_written_the_log_isnt_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes out, and the file doesn't say that it came to its end."""
    path, write = tmp_path / "s.jsonl", StepLogWriter.write

    def fails(self: StepLogWriter, entry: Any) -> None:
        if entry.step == 2:
            raise OSError(28, "No space left on device")
        write(self, entry)

    monkeypatch.setattr(StepLogWriter, "write", fails)

    def log_four() -> None:
        with writing(path) as note:
            for step in range(4):
                note(step)

    with pytest.raises(OSError, match="No space"):
        log_four()
    log = read_step_log(path)
    assert (len(log.entries), log.cut_short) == (2, True)


@pytest.mark.parametrize(("probe", "noted"), [(INTERPRETER, True), ("copies", False)])
def test_the_hosts_speed_is_noted_by_the_work_that_the_costs_rest_on(
    tmp_path: Path, probe: str, noted: bool
) -> None:  # fmt: skip
    """Where this device can do it; times of other work couldn't be held to them."""
    path = tmp_path / "s.jsonl"
    with writing(path, attrs.evolve(analytic_costs(), host_work_us=20.0, host_probe=probe)) as note:
        note(0)
    log = read_step_log(path)
    assert log.header.host_probe == INTERPRETER
    assert (log.entries[0].host_work_us is not None) is noted
    assert log.entries[0].start_us == 4.0


@pytest.mark.parametrize(
    ("inside", "model", "noted"),
    [
        pytest.param((9.0, INSIDE), "a model", True, id="as its table"),
        pytest.param((9.0, ONCE), "a model", False, id="by a table of an older version"),
        pytest.param((0.0, INSIDE), "a model", False, id="by a table without"),
        pytest.param((9.0, INSIDE), "", False, id="simulated"),
    ],
)
def test_the_speed_inside_steps_is_noted_where_the_costs_rest_on_it(
    tmp_path: Path, inside: tuple[float, str], model: str, noted: bool
) -> None:
    """And the log says what was noted."""
    inside_us, probe = inside
    costs = attrs.evolve(analytic_costs(), host_work_us=20.0, host_work_inside_us=inside_us, inside_probe=probe)
    path = tmp_path / "s.jsonl"
    with StepLog(path, "auto", Engine(costs=costs), runs_on=RunsOn(device="d", model=model)):
        assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) is noted
    assert read_step_log(path).header.inside_probe == (INSIDE if noted else ONCE)
