"""The decision log, of either runner's batches, and what it has of a failing disk."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kpolicy.modes import Mode
from kpolicy.reasons import Reason
from kpolicy.schemas import read_decision_log
from kpolicy.simulate.recorded import header_sizes, replay
from kpolicy_vllm.decision_log import DecisionLog, decision_of, shape_of
from kpolicy_vllm.steps import Step
from tests.integrations.vllm.test_dispatch import chooser


def logged(path):
    """A chooser with a log, as of a runner on a second data-parallel rank."""
    found = chooser()
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="a-model"), parallel_config=SimpleNamespace(data_parallel_rank=1)
    )
    found.state.runner = SimpleNamespace(vllm_config=config, input_batch=SimpleNamespace())
    found.state.vllm_version = "0.33.0"
    found.state.log = DecisionLog(str(path), found.state, "a-device")
    return found


@pytest.fixture
def made(tmp_path):
    """`logged`, in a folder of the test's."""
    return logged(tmp_path / "log.jsonl")


def test_rows_of_a_step():
    """Requests whose prompt is done are decodes; others are chunks with their context."""
    shape = shape_of([1, 1, 4, 20], [50, 29, 30, 0], [50, 30, 9, 90], num_active_loras=2)
    assert shape.decodes == ((1, 1), (4, 1))
    assert shape.prefills == ((1, 29), (20, 0))
    assert (shape.decode_kv_tokens, shape.max_kv_len, shape.num_active_loras) == (85, 51, 2)


def test_second_runner(made, tmp_path):
    """The second runner's prepared inputs say which rows are decodes."""
    batch = SimpleNamespace(
        num_scheduled_tokens=np.array([1, 20]),
        num_computed_tokens_np=np.array([55, 7]),
        num_computed_prefill_tokens_np=np.array([50, 7]),
        prefill_len_np=np.array([50, 90]),
    )
    made.state.log.of_runner_2(made.entry(Step(21, 2, 1)), batch)
    made.state.log.close()
    log = read_decision_log(tmp_path / "log.jsonl.dp1")
    (entry,) = log.entries
    assert (entry.shape.decodes, entry.shape.prefills, entry.shape.decode_kv_tokens) == (((1, 1),), ((20, 7),), 56)
    assert (log.header.device, log.header.model) == ("a-device", "a-model")


def test_log_feeds_the_simulator(made, tmp_path):
    """What was logged can be decided again over the sizes that were captured."""
    for step in (Step(5, 5, 5, 1, 1), Step(300, 2, 1), Step(1000, 1, 0)):
        shape = shape_of([1] * 5, [9] * 5, [9] * 5) if step.query_len else shape_of([step.num_tokens], [0], [5000])
        made.state.log.write(made.entry(step), shape)
    made.state.log.close()
    log = read_decision_log(tmp_path / "log.jsonl.dp1")
    assert header_sizes(log).decode[-1] == 64
    recorded, again = replay(log, ["full_and_piecewise"])
    assert again.same == recorded.steps == 3
    assert again.cycle_us == recorded.cycle_us


def test_own_rule_has_reasons(made):
    """Where vLLM's own rule decided, the log has the rule's reasons."""
    made.state.select = None
    made.refresh()
    graph, eager = (decision_of(made.entry(step)) for step in (Step(5, 5, 5, 1, 1), Step(5000, 1, 0)))
    assert (graph.mode, graph.reason) == (Mode.FULL, Reason.GRAPH_FITS)
    assert (eager.mode, eager.reason) == (Mode.EAGER, Reason.ABOVE_LARGEST_SIZE)


def test_log_that_fails(made, caplog):
    """A log that can't be written any more ends with a warning; steps go on."""
    made.state.log._writer._file.close()
    for _ in range(3):
        made.state.log.write(made.entry(Step(5, 5, 5, 1, 1)), shape_of([1], [5], [5]))
    assert made.state.counters.counts["log_failed"] == 1
    assert len(caplog.records) == 1


FORKS = """
import os, sys
from kpolicy_vllm.steps import Step
from tests.integrations.vllm.test_decision_log import logged, shape_of
made = logged(sys.argv[1])
entry, shape = made.entry(Step(5, 5, 5, 1, 1)), shape_of([1], [5], [5])
made.state.log.write(entry, shape)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    made.state.log.write(entry, shape)
    if "closed" in sys.argv:
        made.state.log.close()
    sys.exit(0)
made.state.log.write(entry, shape)
"""


@pytest.mark.parametrize("how", ["closed", "ended"])
def test_a_forked_process_leaves_the_log_to_the_other(tmp_path, how):
    """Whatever it does, and though its interpreter ends as any: lines that were waiting are written once."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", FORKS, str(tmp_path / "log.jsonl"), how]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    log = read_decision_log(tmp_path / "log.jsonl.dp1")
    assert (len(log.entries), log.cut_short) == (2, False)
