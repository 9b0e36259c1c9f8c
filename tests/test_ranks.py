"""Ranks agree: every combination of votes for small worlds, lost graphs, and ranks that were started differently."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from kpolicy.costs import analytic_costs
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError, NoLegalModeError, RankError
from kpolicy.executors.simulated import SimulatedExecutor, reference_outputs
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode, Part
from kpolicy.reasons import Reason
from kpolicy.registry import GraphState
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape
from kpolicy.testing import Sequences, ThreadCommunicator, run_ranks

LIMITS = Settings(max_num_reqs=16, max_num_tokens=64, max_loras=2)
SIZES = CaptureSizes((1, 2, 4, 8, 16), (8, 32), (8, 32))
POLICIES = ("auto", "full_and_piecewise", "split", "split:form=decodes_beside", "vllm")
# Name -> (decode rows, prompt tokens, numbers that differ from the rows').
SHAPES: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "idle": (0, (), {}),
    "1 decode": (1, (), {}),
    "9 decodes": (9, (), {}),
    "prefill 20": (0, (20,), {}),
    "prefill over the largest": (0, (40,), {}),
    "mixed": (3, (5, 9), {}),
    "mixed, several steps": (3, (5,), {"max_decode_steps": 4}),
    "no FULL": (2, (), {"forbidden": Mode.FULL.bit}),
    "lora": (2, (4,), {"num_active_loras": 1}),
}


def make_engine(communicator: ThreadCommunicator, policy: str = "auto", **arguments: Any) -> Engine:
    """One rank's Engine, its graphs captured."""
    arguments = {"ladder": SIZES, "settings": LIMITS, "attention": "gqa", **arguments}
    executor = SimulatedExecutor(num_blocks=64, faults=arguments.pop("faults", ()))
    engine = Engine(policy, executor=executor, communicator=communicator, **arguments)
    engine.capture()
    return engine


class Rank:
    """One rank: an Engine, and sequences to make batches of."""

    def __init__(self, communicator: ThreadCommunicator, policy: str = "auto", **arguments: Any) -> None:
        self.communicator = communicator
        self.sequences = Sequences(communicator.rank)
        self.started = [self.sequences.start() for _ in range(9)]
        # Prompts are prefilled beside the Engine: ranks needn't be in step for that.
        prefilled = [self.sequences.chunk(sequence, 3 + i) for i, sequence in enumerate(self.started)]
        self.engine = make_engine(communicator, policy, **arguments)
        for row in prefilled:
            run_eagerly(self.engine, self.sequences.inputs([row]))
        self.sequences.advance(prefilled)

    def step(self, name: str) -> Any:
        """Run that batch; the decision, once the outputs were found right."""
        num_decodes, prompts, numbers = SHAPES[name]
        rows = [self.sequences.decode(sequence) for sequence in self.started[:num_decodes]]
        rows += [self.sequences.chunk(self.sequences.start(), length) for length in prompts]
        inputs = self.sequences.inputs(rows, steps=numbers.get("max_decode_steps", 1))
        inputs = inputs._replace(numbers=inputs.numbers._replace(**numbers))
        outputs = self.engine.step(inputs)
        assert holds(outputs.decision, inputs.numbers), f"{name}: {outputs.decision}"
        self.check(rows, outputs, len(prompts))
        for row in rows[num_decodes:]:
            self.sequences.end(row.sequence)
        return outputs.decision

    def check(self, rows: list[Any], outputs: Any, num_prompts: int) -> None:
        """Each row's output is its sequence's own; of several decode steps the last one's, with the tokens before."""
        decodes, steps = rows[: len(rows) - num_prompts], len(outputs.tokens)
        for i, row in enumerate(rows):
            known = row.sequence.tokens[: row.sequence.num_computed + row.num_tokens]
            if row in decodes:
                known = [*known, *(outputs.tokens[step][i] for step in range(steps - 1))]
            assert outputs.outputs[i] == reference_outputs(known)[-1]


def run_eagerly(engine: Engine, inputs: Any) -> None:
    from kpolicy.decision import Decision, Launch
    from kpolicy.modes import Rows

    assert engine.executor is not None
    engine.executor.run(Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.POLICY_IS_EAGER), inputs)


def holds(decision: Any, numbers: Any) -> bool:
    """Whether every graph of the decision has room for this rank's rows and adapters."""
    room = all(launch.padding(numbers) >= 0 for launch in decision.launches)
    return room and all(key.lora_case >= numbers.num_active_loras for key in decision.keys)


def shared(decision: Any, policy: str = "") -> Any:
    """What must be equal on all ranks. vLLM's ranks choose the LoRA case of a graph each for itself."""
    keys = [
        attrs.evolve(launch.key, lora_case=0) if launch.key and policy == "vllm" else launch.key
        for launch in decision.launches
    ]
    rows = [(launch.rows, launch.repeat) for launch in decision.launches]
    return decision.mode, decision.form, keys, rows


def good(results: list[Any]) -> list[Any]:
    """The results, once no rank raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, tuple(SHAPES)), (3, ("idle", "1 decode", "9 decodes", "prefill 20", "mixed", "no FULL"))],
    ids=["pairs", "triples"],
)
def test_every_combination_of_votes(policy: str, world_size: int, names: tuple[str, ...]) -> None:
    """Whatever each rank has to run, all take the same mode and graphs, which hold every rank's rows rightly."""
    combinations = list(itertools.product(names, repeat=world_size))

    def work(communicator: ThreadCommunicator) -> Any:
        rank = Rank(communicator, policy)
        return [
            rank.step(combination[communicator.rank]) for combination in combinations
        ], rank.engine.stats.total.steps

    results = good(run_ranks(world_size, work))
    for i, combination in enumerate(combinations):
        decisions = [decisions[i] for decisions, _ in results]
        assert len({str(shared(decision, policy)) for decision in decisions}) == 1, (combination, decisions)
    assert [steps for _, steps in results] == [len(combinations)] * world_size


def test_ranks_use_graphs_at_all() -> None:
    """Agreement isn't everyone running eagerly: equal batches replay what one rank alone would."""

    def work(communicator: ThreadCommunicator) -> Any:
        rank = Rank(communicator, "full_and_piecewise")
        return [rank.step(name).mode for name in ("1 decode", "9 decodes", "prefill 20", "mixed")]

    for modes in good(run_ranks(2, work)):
        assert modes == [Mode.FULL] * 4


def test_reasons_name_the_other_rank() -> None:
    """A rank that would have replayed says that another one can't; an idle one says that ranks agreed."""
    pairs = [("1 decode", "prefill over the largest"), ("idle", "1 decode"), ("1 decode", "no FULL")]

    def work(communicator: ThreadCommunicator) -> Any:
        rank = Rank(communicator, "full_and_piecewise")
        return [rank.step(pair[communicator.rank]) for pair in pairs]

    first, _ = good(run_ranks(2, work))
    assert [decision.reason for decision in first] == [
        Reason.RANK_NEEDS_EAGER,
        Reason.RANKS_AGREED,
        Reason.RANK_NEEDS_LESS,
    ]
    assert [decision.mode for decision in first] == [Mode.EAGER, Mode.FULL, Mode.PIECEWISE]


def test_all_ranks_idle_run_nothing() -> None:
    """A step in which nobody has rows is an empty batch everywhere."""

    def work(communicator: ThreadCommunicator) -> Any:
        return Rank(communicator).step("idle")

    for decision in good(run_ranks(3, work)):
        assert (decision.mode, decision.launches) == (Mode.EAGER, ())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_that_fails_on_one_rank_resyncs_all(policy: str) -> None:
    """The rank whose graph failed runs the step eagerly at the same size; from the next step on nobody uses it."""
    steps = ["9 decodes", "mixed", "mixed, several steps", "9 decodes", "mixed, several steps", "mixed"]

    def work(communicator: ThreadCommunicator) -> Any:
        rank = Rank(communicator, policy, faults=["replay_fails@1x2"] if communicator.rank else ())
        decisions = [rank.step(name) for name in steps]
        lost = {record.key: record.reason for record in rank.engine.registry.records() if record.reason}
        return decisions, lost, rank.engine.stats.replay_failures, communicator.num_calls

    (healthy, lost, _, calls), (failing, lost_too, failures, calls_too) = good(run_ranks(2, work))
    assert failures == 2
    assert calls == calls_too
    assert set(lost_too) <= {key for decision in healthy for key in decision.keys}
    assert set(lost_too.values()) == {Reason.REPLAY_FAILED}
    assert set(lost.values()) == {Reason.RANK_NEEDS_LESS}
    assert set(lost) == set(lost_too)
    assert len({str(shared(decision, policy)) for decision in (healthy[-1], failing[-1])}) == 1
    assert not {key for decision in (*healthy[3:], *failing[3:]) for key in decision.keys} & set(lost)
    reasons = [decision.reason for decision in failing]
    halves = [launch.reason for decision in failing for launch in decision.launches]
    assert Reason.REPLAY_FAILED in {*reasons, *halves}


def test_a_failed_replay_runs_as_eager_at_the_agreed_size() -> None:
    """The failing rank's step says eager, keeps the padded size of the graph, and is counted as such."""

    def work(communicator: ThreadCommunicator) -> Any:
        rank = Rank(communicator, "full", faults=["replay_fails@1"] if communicator.rank else ())
        return rank.step("9 decodes"), rank.engine.stats.by_mode

    (replayed, _), (failed, by_mode) = good(run_ranks(2, work))
    assert replayed.mode is Mode.FULL
    assert (failed.mode, failed.reason) == (Mode.EAGER, Reason.REPLAY_FAILED)
    assert failed.launches[0].padded_tokens == replayed.launches[0].key.num_tokens
    assert set(by_mode) == {"eager"}


def test_a_failed_replay_runs_as_many_decode_steps_as_the_others() -> None:
    """Where ranks run several decode steps beside a prefill, the rank that lost its graph runs as many, rightly."""

    def work(communicator: ThreadCommunicator) -> Any:
        faults = ["replay_fails@1"] if communicator.rank else ()
        rank = Rank(communicator, "split:form=decodes_beside", attention="uniform", faults=faults)
        return rank.step("mixed, several steps")

    replayed, failed = good(run_ranks(2, work))
    assert replayed.decode_steps == failed.decode_steps > 1
    assert failed.launches[0].key is None


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("policy", {"policy": "auto"}, {"policy": "split"}),
        ("policy", {"policy": "split"}, {"policy": "split:form=beside"}),
        ("settings", {}, {"settings": attrs.evolve(LIMITS, max_num_tokens=128)}),
        ("objective", {}, {"objective": "latency"}),
        ("ladder", {}, {"ladder": CaptureSizes((1, 2, 4), (8, 32), (8, 32))}),
        ("attention", {}, {"attention": "mla"}),
    ],
    ids=["policy", "its arguments", "settings", "objective", "ladder", "attention"],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_that_were_started_differently_all_stop(what: str, first: Any, second: Any, odd: int) -> None:
    """Every rank raises RankError, none hangs, and the ranks that differ say in what."""

    def work(communicator: ThreadCommunicator) -> Any:
        return make_engine(communicator, **(second if communicator.rank == odd else first))

    results = run_ranks(3, work, timeout_s=20)
    assert all(isinstance(result, RankError) for result in results), results
    differ = (1, 2) if odd == 0 else (odd,)
    for rank, result in enumerate(results):
        assert (f"rank {rank} has {what} " if rank in differ else "another rank doesn't") in str(result)


def test_costs_of_rank_0_are_everyones() -> None:
    """Ranks may bring different cost tables; all decide from rank 0's."""

    def work(communicator: ThreadCommunicator) -> Any:
        costs = attrs.evolve(analytic_costs(), version=f"rank {communicator.rank}", step_us=100.25 + communicator.rank)
        engine = make_engine(communicator, costs=costs)
        return engine.costs, engine.decide(BatchShape.decode(4)).costs_version

    results = good(run_ranks(3, work))
    assert {version for _, version in results} == {"rank 0"}
    assert all(costs == results[0][0] for costs, _ in results)


def test_costs_that_one_rank_takes_later_are_agreed_on() -> None:
    """Whichever rank takes another table between steps, all decide the next one by rank 0's."""

    def work(communicator: ThreadCommunicator) -> Any:
        engine = make_engine(communicator)
        taken = []
        for taker in range(communicator.world_size):
            if communicator.rank == taker:
                engine.take_costs(attrs.evolve(engine.costs, version=f"taken by {taker}"))
            taken.append(engine.decide(BatchShape.decode(4)).costs_version)
        return taken

    assert good(run_ranks(3, work)) == [["taken by 0"] * 3] * 3


def test_ranks_with_different_graphs_keep_the_intersection() -> None:
    """Graphs that any rank couldn't capture are withdrawn on all, and the rest is used."""

    def work(communicator: ThreadCommunicator) -> Any:
        rank = Rank(communicator, "full_and_piecewise", faults=[f"capture_fails@{1 + communicator.rank}x3"])
        decision = rank.step("1 decode")
        return rank.engine, frozenset(rank.engine.registry.captured()), decision

    results = good(run_ranks(3, work))
    captured = {keys for _, keys, _ in results}
    assert len(captured) == 1
    assert len(next(iter(captured))) == len(results[0][0].keys) - 5
    for engine, _, decision in results:
        assert set(decision.keys) <= next(iter(captured))
        states = [record.state for record in engine.registry.records() if record.reason is Reason.RANK_NEEDS_LESS]
        assert states == [GraphState.WITHDRAWN] * 2


def test_a_graph_withdrawn_outside_a_step_resyncs_too() -> None:
    """Whoever changes one rank's registry between steps, ranks agree anew before they decide."""

    def work(communicator: ThreadCommunicator) -> Any:
        rank = Rank(communicator, "full")
        before = rank.step("1 decode")
        if communicator.rank:
            rank.engine.registry.withdraw(before.keys[0], Reason.GENERATION_EVICTED)
        return before, rank.step("1 decode"), rank.step("1 decode")

    first, second = good(run_ranks(2, work))
    assert [shared(decision) for decision in first] == [shared(decision) for decision in second]
    assert first[1].keys[0].num_tokens > first[0].keys[0].num_tokens


def test_ranks_that_may_run_nothing_raise_together() -> None:
    """A step that no mode is left for is the same error on every rank, and the next step runs."""

    def work(communicator: ThreadCommunicator) -> Any:
        engine = make_engine(communicator, "full")
        with pytest.raises(NoLegalModeError):
            engine.decide(BatchShape.decode(1, forbidden={Mode.EAGER, Mode.FULL} if communicator.rank else ()))
        return engine.decide(BatchShape.decode(1)).mode

    assert good(run_ranks(2, work)) == [Mode.FULL] * 2


def test_plans_without_graphs_agree_too() -> None:
    """A policy that captures nothing has nothing to compare, and still decides with the others."""

    def work(communicator: ThreadCommunicator) -> Any:
        return make_engine(communicator, "eager").decide(BatchShape.decode(1 + communicator.rank)).mode

    assert good(run_ranks(2, work)) == [Mode.EAGER] * 2


def test_a_policy_without_text_of_its_own_agrees_with_itself() -> None:
    """Two objects of a plug-in policy whose text is an address count as the same policy."""

    class Plain:
        """Like `full`, without attrs."""

        reads_costs = False
        name = summary = "plain"

        def __getattr__(self, name: str) -> Any:
            from kpolicy.policies import get_policy

            return getattr(get_policy("full"), name)

    def work(communicator: ThreadCommunicator) -> Any:
        return make_engine(communicator, Plain()).decide(BatchShape.decode(2)).mode  # type: ignore[arg-type]

    assert good(run_ranks(2, work)) == [Mode.FULL] * 2


def test_the_parts_of_a_split_may_be_on_different_ranks() -> None:
    """One rank's decodes and another's prompt make a split that both run, each with half of it empty."""

    def work(communicator: ThreadCommunicator) -> Any:
        rank = Rank(communicator, "split", attention="uniform")
        return rank.step("prefill 20" if communicator.rank else "9 decodes")

    for decision in good(run_ranks(2, work)):
        assert decision.mode is Mode.SPLIT
        assert [key.part for key in decision.keys] == [Part.FULL, Part.PIECEWISE]


# The world of threads itself.


def test_a_rank_that_never_comes_is_an_error_for_the_others() -> None:
    """Ranks that wait for one that left, raised, or called something else get a RankError in time."""

    def leaves(communicator: ThreadCommunicator) -> Any:
        return communicator.all_reduce_max([1]) if communicator.rank else None

    _, waited = run_ranks(2, leaves, timeout_s=0.2)
    assert isinstance(waited, RankError)

    def raises(communicator: ThreadCommunicator) -> Any:
        if communicator.rank:
            raise ZeroDivisionError
        return communicator.broadcast("x")

    woken, raised = run_ranks(2, raises, timeout_s=20)
    assert isinstance(woken, RankError)
    assert isinstance(raised, ZeroDivisionError)

    def differs(communicator: ThreadCommunicator) -> Any:
        return communicator.broadcast("x") if communicator.rank else communicator.all_reduce_max([1])

    assert all(isinstance(result, RankError) for result in run_ranks(2, differs, timeout_s=20))


def test_a_world_reduces_and_broadcasts() -> None:
    """The largest of each value, and rank 0's text, reach every rank, call after call."""

    def work(communicator: ThreadCommunicator) -> Any:
        told = []
        for turn in range(200):
            told.append(communicator.all_reduce_max([communicator.rank * turn, -communicator.rank, -(2**62)]))
            told.append(communicator.broadcast(f"{turn} of {communicator.rank}, ü"))
        return told

    results = good(run_ranks(3, work))
    assert results[0] == results[1] == results[2]
    assert results[0][-2:] == [[2 * 199, 0, -(2**62)], "199 of 0, ü"]


def test_a_world_has_a_rank() -> None:
    """A world of no ranks is refused."""
    with pytest.raises(ConfigError, match="world_size is 0"):
        run_ranks(0, lambda communicator: communicator.rank)


# Two real processes.


def gloo_processes(script: Path, arguments: list[str], init: str, timeout_s: float = 120) -> list[tuple[int, str, str]]:
    """Run the script as two ranks; (exit code, stdout, stderr) of each."""
    root = Path(__file__).parents[1]
    environment = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", init, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.gloo
@pytest.mark.parametrize("policy", ["auto", "split:form=decodes_beside", "vllm"])
def test_two_gloo_processes_decide_alike(tmp_path: Path, policy: str) -> None:
    """Over 200 random steps two processes take the same modes and graphs, one lost midway, with right outputs."""
    pytest.importorskip("torch")
    script = Path(__file__).with_name("gloo_rank.py")
    results = gloo_processes(script, [policy, "200"], f"file://{tmp_path}/rendezvous")
    for code, _, errors in results:
        assert code == 0, errors
    first, second = ([line for line in text.splitlines() if line] for _, text, _ in results)
    assert len(first) == 200
    assert first == second
    assert len({line.split()[0] for line in first}) > 1


@pytest.mark.gloo
def test_two_gloo_processes_that_differ_both_stop(tmp_path: Path) -> None:
    """Processes started with different policies both end with RankError, before the first step."""
    pytest.importorskip("torch")
    script = Path(__file__).with_name("gloo_rank.py")
    results = gloo_processes(script, ["differ", "5"], f"file://{tmp_path}/rendezvous")
    for code, output, errors in results:
        assert code == 3, errors
        assert "RankError" in errors
        assert not output


def test_ranks_that_agree_get_one_object_each_time() -> None:
    """Executors prepare a decision once, by the object."""
    from kpolicy import Engine
    from kpolicy.policies.ranks import agree, vote
    from kpolicy.shapes import BatchShape

    select = Engine(policy="full").select
    idle, busy = BatchShape().numbers, BatchShape(decodes=[(1, 4)]).numbers
    reduced = [max(both) for both in zip(vote(idle), vote(busy), strict=True)]
    first = agree(select, reduced, idle)
    assert first.reason is Reason.RANKS_AGREED
    assert agree(select, reduced, idle) is first
