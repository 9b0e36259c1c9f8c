"""`benchmarks.gpu.again`: a run's batches come back, and of their steps those run that are asked for."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

pytest.importorskip("torch")

from benchmarks.gpu.again import Again, sizes_of
from kpolicy.cli.step_log import StepLog
from kpolicy.costs import analytic_costs
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.scheduling.batching import Batcher
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.schemas import Log, StepEntry, read_step_log
from kpolicy.settings import Settings
from kpolicy.trace_run import Prompts, serve_trace

SETTINGS = Settings(max_num_reqs=16, max_num_tokens=512)
# In three lots, so that it is idle between them.
TRACE = Trace(
    "drawn", "drawn",
    [TraceRequest(i, 3.0 + 0.011 * i + i // 15, 40 + 131 * i % 900, 3 + 5 * i % 17, ()) for i in range(45)],
)  # fmt: skip


def engine(policy: str) -> Engine:
    executor = SimulatedExecutor(analytic_costs(), num_blocks=512, block_size=16, max_num_reqs=16)
    made = Engine(policy, settings=SETTINGS, costs=analytic_costs(), executor=executor)
    made.capture()
    return made


def batcher() -> Batcher:
    return Batcher(SETTINGS, num_blocks=512, block_size=16)


def again(tmp_path: Path, policy: str, runs: set[int] | None = None, trace: Trace = TRACE) -> Again:
    """A run's steps, to be run again; all of them by default."""
    path, ran = tmp_path / "s.jsonl", engine(policy)
    with StepLog(path, policy, ran) as note:
        serve_trace(TRACE, ran, batcher(), Prompts(), on_step=note)
    log = read_step_log(path)
    runs = set(range(len(log.entries))) if runs is None else runs
    return Again(engine(policy), log, runs, True, batcher, trace, Prompts())


@pytest.mark.parametrize("policy", ["auto", "vllm", "split:form=decodes_beside"])
def test_every_step_comes_back(tmp_path: Path, policy: str) -> None:
    """The same batches, launches and times, twice over, though the simulated device has its state."""
    made = again(tmp_path, policy)
    for _ in range(2):
        found, others = made.once()
        assert others == 0
        assert len(found) == len(made.log.entries) > 90
        for ours, theirs in zip(found, made.log.entries, strict=True):
            assert (ours.step, ours.shape, ours.launches) == (theirs.step, theirs.shape, theirs.launches)
            assert ours.cycle_us == pytest.approx(theirs.cycle_us)
            assert 0 < (ours.host_work_us or 0.0) < 1e6


def test_what_is_not_asked_for_is_scheduled_and_not_run(tmp_path: Path) -> None:
    """The batches after it are the run's all the same."""
    made = again(tmp_path, "auto", {3, 4, 80})
    found, _ = made.once()
    assert [each.step for each in found] == [3, 4, 80]
    assert made.engine.stats.total.steps == 3
    assert found[2].shape == made.log.entries[80].shape


def test_steps_decided_otherwise_are_told(tmp_path: Path) -> None:
    made = attrs.evolve(again(tmp_path, "auto"), engine=engine("eager"))
    eager = sum(each.mode == "eager" for each in made.log.entries)
    assert made.once()[1] == len(made.log.entries) - eager > 0


def test_another_trace_is_refused(tmp_path: Path) -> None:
    later = attrs.evolve(TRACE, requests=TRACE.requests[1:])
    with pytest.raises(ConfigError, match="another batch than in the run"):
        again(tmp_path, "auto", trace=later).once()


def test_the_graphs_that_are_captured_are_those_that_replay(tmp_path: Path) -> None:
    log: Log[StepEntry] = again(tmp_path, "auto").log
    replays = [i for i, each in enumerate(log.entries) if each.mode == "full"]
    sizes = sizes_of(log.entries, set(replays[:5]))
    assert sizes is not None
    keys = {launch.key for i in replays[:5] for launch in log.entries[i].launches if launch.key is not None}
    assert {*sizes.decode, *sizes.mixed} == {key.num_tokens for key in keys}
    assert set(sizes.decode) == {key.num_tokens for key in keys if key.decode_only}
    assert sizes.piecewise == ()
    eager = {i for i, each in enumerate(log.entries) if each.mode == "eager"}
    assert sizes_of(log.entries, eager) is None
