"""What every executor must keep: modes don't change results, padding doesn't leak, failures cost speed only.

Each check takes a function that makes an executor and raises AssertionError with what broke. The executor under test
has at least `NUM_BLOCKS` KV blocks of `BLOCK_SIZE` tokens, takes token ids below `VOCAB` and batches up to `LIMITS`;
made twice, it must compute the same function. Outputs are compared with `close`, `==` by default; an executor over a
real model gives one that allows for the rounding of other shapes, and perhaps fewer `seeds`, where a check takes them.

Graphs that an executor refuses to capture are left out, so a device with fewer modes keeps the same contract.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from kpolicy.attention.support import Claims
from kpolicy.budgets import Budget
from kpolicy.decision import Decision, Launch
from kpolicy.errors import GraphReplayError, KPolicyError, StickyDeviceError
from kpolicy.executors.base import CaptureReport, Executor, StepInputs, StepOutputs
from kpolicy.executors.runner import ModeRunner
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes, plan_keys
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.policies.auto import spread
from kpolicy.policies.base import split_way
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry, GraphState
from kpolicy.settings import Settings
from kpolicy.shapes import BatchNumbers
from kpolicy.testing.sequences import Row, Sequences

__all__ = ["EXECUTOR_CHECKS", "KEYS", "LIMITS", "all_decisions", "fail_next_replay"]

MakeExecutor = Callable[[], Executor]
Close = Callable[[Any, Any], bool]

LIMITS = Settings(max_num_reqs=8, max_num_tokens=32, num_speculative_tokens=2)
"""The largest batches that the checks run."""
KEYS = plan_keys(CaptureSizes((3, 6, 12, 24), (8, 16, 32), (8, 16, 32)), Claims.at_level("mixed"), LIMITS)
"""The graphs that the checks ask for: each kind, in several sizes."""
SEEDS = range(6)
"""Random worlds a check."""
STEPS = 25
"""Steps a world."""
MOST_STEPS_AHEAD = 4
WAIT_SHARE = 0.5
"""Of decode steps that lie evenly beside a prompt"""


def all_decisions(numbers: BatchNumbers, keys: Iterable[GraphKey]) -> list[Decision]:
    """Every way to run the batch with those graphs: each mode, each form of SPLIT, each size that holds the rows.

    Decode steps beside a prompt both at once and with `Launch.wait_share`.
    """
    keys = list(keys)
    pieces = [key for key in keys if key.part is Part.PIECEWISE]
    full = [key for key in keys if key.part is Part.FULL]
    whole = [key for key in full if key.holds_batch(numbers)]
    whole += [key for key in pieces if key.holds_batch(numbers)]
    modes = {Part.FULL: Mode.FULL, Part.PIECEWISE: Mode.PIECEWISE}
    found = [Decision(modes[key.part], (Launch(Rows.ALL, key),), Reason.GRAPH_FITS) for key in whole]
    found.append(_eager())
    if not (numbers.num_decodes and numbers.num_prefills):
        return found
    q, longest, loras = numbers.query_len, numbers.longest_decode, numbers.num_active_loras
    decode = [key for key in full if key.holds(numbers.decode_tokens, numbers.num_decodes, q, longest, True, loras)]
    tails: list[tuple[GraphKey | None, Reason | None]] = [(None, Reason.NO_GRAPHS)]
    rest, chunks, longest = numbers.num_prefill_tokens, numbers.num_prefills, numbers.longest_query
    tails += [(key, None) for key in pieces if key.holds(rest, chunks, 0, longest, False, loras)]
    for form in SplitForm:
        for key in decode:
            ways = split_way(key, tuple(tails), form, numbers.max_decode_steps)
            if form is not SplitForm.IN_TURN:
                ways += [spread(way, WAIT_SHARE) for way in ways]
            found += [Decision(way.mode, way.launches, Reason.DECODES_KEEP_GRAPH, form) for way in ways]
    return found


def _eager() -> Decision:
    return Decision(Mode.EAGER, (Launch(Rows.ALL, None),), Reason.POLICY_IS_EAGER)


class _Bench:
    """An executor with everything captured that it can, beside one that only ever runs eagerly."""

    def __init__(self, make: MakeExecutor, close: Close, seed: int = 0) -> None:
        self.close = close
        self.executor, self.registry = _opened(make)
        self.executor.capture(KEYS)
        self.captured = self.registry.captured()
        self.reference, _ = _opened(make)
        self.sequences = Sequences(seed)

    def eagerly(self, rows: Sequence[Row]) -> StepOutputs:
        """The step on the reference."""
        return self.reference.run(_eager(), self.sequences.inputs(rows))

    def run(self, decision: Decision, rows: Sequence[Row], ahead: int = 1) -> StepOutputs:
        """The step as decided, with KV slots reserved for that many decode steps."""
        return self.executor.run(decision, self.sequences.inputs(rows, steps=_steps(rows, ahead)))

    def prefill(self, *lengths: int) -> list[Any]:
        """New sequences of those lengths, in KV of both executors."""
        started = []
        for length in lengths:
            row = self.sequences.chunk(self.sequences.start(), length)
            self.same(self.run(_eager(), [row]).outputs, self.eagerly([row]).outputs, "a prompt run eagerly")
            self.sequences.advance([row])
            started.append(row.sequence)
        return started

    def same(self, got: Sequence[Any], wanted: Sequence[Any], what: object) -> None:
        assert len(got) == len(wanted), f"{what}: {len(got)} outputs for {len(wanted)} wanted rows"
        for i, (mine, other) in enumerate(zip(got, wanted, strict=True)):
            assert self.close(mine, other), f"{what}: output {i} of {len(got)} is {mine!r}, not {other!r}"

    def random_steps(self, ahead: int = 1) -> Iterable[tuple[list[Row], Decision]]:
        """Random batches, each with a decision; the label that was used least comes first.

        Args:
            ahead: decode steps that a batch of single-token decode rows may run beside its prefill rows.
        """
        used: Counter[str] = Counter()
        for _ in range(STEPS):
            rows = self.sequences.random_rows(LIMITS.max_num_reqs, LIMITS.max_num_tokens, LIMITS.query_len)
            numbers = self.sequences.inputs(rows, steps=_steps(rows, ahead)).numbers
            decisions = all_decisions(numbers, self.captured)
            label = min({decision.label for decision in decisions}, key=lambda label: (used[label], label))
            used[label] += 1
            yield rows, self.sequences.random.choice([each for each in decisions if each.label == label])


def _steps(rows: Iterable[Row], ahead: int) -> int:
    """Decode steps that may follow each other: one where rows verify drafts."""
    return 1 if any(row.decode and row.num_tokens > 1 for row in rows) else ahead


def _opened(make: MakeExecutor, budget: Budget | None = None) -> tuple[Executor, GraphRegistry]:
    executor, registry = make(), GraphRegistry(budget)
    registry.plan(KEYS)
    executor.open(registry)
    return executor, registry


def captures_or_says_why(make: MakeExecutor, close: Close = operator.eq) -> None:  # noqa: ARG001 - all take the same
    """Each key ends up captured, or failed or withdrawn with a reason; progress is told once a key, largest first."""
    executor, registry = _opened(make)
    told: list[tuple[GraphKey, CaptureReport | None]] = []
    executor.capture(KEYS, lambda key, report: told.append((key, report)))
    for key in KEYS:
        record = registry.record(key)
        assert record.state is not GraphState.PLANNED, f"{key} was asked for and is still planned"
        assert (record.state is GraphState.CAPTURED) == (record.reason is None), f"{record}: the reason doesn't fit"
    assert Counter(key for key, _ in told) == Counter(KEYS), "progress must be told once for each key"
    for key, report in told:
        captured = registry.record(key).state is GraphState.CAPTURED
        assert (report is not None) == captured, f"{key}: progress says {report}, the registry {registry.record(key)}"
    for part in Part:
        sizes = [key.num_tokens for key, _ in told if key.part is part]
        assert sizes == sorted(sizes, reverse=True), f"{part} graphs were captured in the order {sizes}"


def modes_agree_with_eager(make: MakeExecutor, close: Close = operator.eq, seeds: Iterable[int] = SEEDS) -> None:
    """Whatever mode, form and size each step takes, its outputs are those of eager steps."""
    for seed in seeds:
        bench = _Bench(make, close, seed)
        for rows, decision in bench.random_steps():
            outputs = bench.run(decision, rows)
            assert outputs.decision == decision, f"asked for {decision}, ran {outputs.decision}"
            bench.same(outputs.outputs, bench.eagerly(rows).outputs, decision)
            bench.sequences.advance(rows, accepted=bench.sequences.random.choice([None, 1, 2]))


def rows_stand_alone(make: MakeExecutor, close: Close = operator.eq, seeds: Iterable[int] = SEEDS) -> None:
    """A row's outputs don't depend on the rows beside it: none is lost, repeated, or computed from another's KV."""
    for seed in seeds:
        bench = _Bench(make, close, seed)
        for rows, decision in bench.random_steps():
            alone = [output for row in rows for output in bench.eagerly([row]).outputs]
            bench.same(bench.run(decision, rows).outputs, alone, decision)
            bench.sequences.advance(rows, accepted=bench.sequences.random.choice([None, 1, 2]))


def padding_never_leaks(make: MakeExecutor, close: Close = operator.eq) -> None:
    """A graph that was just full gives a single row its right outputs, and changes no other sequence's KV."""
    bench = _Bench(make, close)
    sequences = bench.sequences
    bystanders, single = bench.prefill(5, 17, 33), bench.prefill(20)[0]
    others = bench.prefill(*range(2, 2 + LIMITS.max_num_reqs))
    for key in bench.captured:
        full = _filling(key, bench, others)
        bench.same(bench.run(_replaying(key), full).outputs, bench.eagerly(full).outputs, f"{key}, filled")
        sequences.advance(full, accepted=1)
        row = sequences.decode(single, key.query_len or 1)
        bench.same(bench.run(_replaying(key), [row]).outputs, bench.eagerly([row]).outputs, f"one row in {key}")
        sequences.advance([row], accepted=1)
        # Rows that the graph staged before, and sequences that it never saw: their next output reads their last entry.
        for sequence in (*bystanders, *(row.sequence for row in full)):
            row = sequences.decode(sequence)
            bench.same(bench.run(_eager(), [row]).outputs, bench.eagerly([row]).outputs, f"another row after {key}")
        for sequence in [row.sequence for row in full if not row.decode]:
            sequences.end(sequence)


def outputs_survive_the_next_replay(make: MakeExecutor, close: Close = operator.eq) -> None:
    """Outputs are the caller's: replaying the same graph for another batch leaves them as they were."""
    bench = _Bench(make, close)
    one, other = bench.prefill(9, 14)
    for key in bench.captured:
        row, next_row = (bench.sequences.decode(sequence, key.query_len or 1) for sequence in (one, other))
        wanted = bench.eagerly([row]).outputs
        kept = bench.run(_replaying(key), [row])
        bench.same(kept.outputs, wanted, key)
        bench.run(_replaying(key), [next_row])
        bench.same(kept.outputs, wanted, f"outputs of {key} after its next replay")


def repeats_equal_single_steps(make: MakeExecutor, close: Close = operator.eq, seeds: Iterable[int] = SEEDS) -> None:
    """Several decode steps beside one prefill sample what single steps in turn sample, and leave the same KV."""
    for seed in seeds:
        bench = _Bench(make, close, seed)
        ahead = bench.sequences.random.randint(2, MOST_STEPS_AHEAD)
        for rows, decision in bench.random_steps(ahead):
            outputs = bench.run(decision, rows, ahead)
            single = bench.eagerly(rows)
            if not single.tokens:
                return  # No device sampler: steps can't follow each other.
            _compare_repeats(bench, rows, decision, outputs, single)


def _compare_repeats(
    bench: _Bench, rows: list[Row], decision: Decision, outputs: StepOutputs, single: StepOutputs
) -> None:
    decodes, sequences = [row for row in rows if row.decode], bench.sequences
    assert len(outputs.tokens) == decision.decode_steps, f"{decision} sampled {len(outputs.tokens)} times"
    num_wanted = sum(len(row.wanted) for row in decodes)
    prefill = outputs.outputs[num_wanted:]
    bench.same(prefill, single.outputs[num_wanted:], f"prefill rows of {decision}")
    for step, tokens in enumerate(outputs.tokens):
        wanted = list(single.tokens[0])
        assert list(tokens) == wanted, f"{decision}: step {step} sampled {list(tokens)}, single steps {wanted}"
        if any(row.num_tokens > 1 for row in decodes):
            break
        sequences.append(decodes, wanted)
        if step + 1 < len(outputs.tokens):
            single = bench.eagerly(decodes)
    if len(outputs.tokens) > 1:
        bench.same(outputs.outputs[:num_wanted], single.outputs[:num_wanted], f"the last step of {decision}")
    sequences.advance([row for row in rows if not row.decode or row.num_tokens > 1])


def a_budget_refuses_the_rest(make: MakeExecutor, close: Close = operator.eq) -> None:
    """Graphs over the budget are withdrawn with the budget's reason; those that were captured run."""
    executor, registry = _opened(make, Budget(graphs=2))
    executor.capture(KEYS)
    captured = registry.captured()
    assert len(captured) <= 2, f"a budget of 2 graphs has {len(captured)}"
    for record in registry.records():
        if record.state is not GraphState.CAPTURED:
            assert record.reason is not None, f"{record.key} was refused without a reason"
    if len(captured) == 2:
        refused = {record.reason for record in registry.records() if record.state is GraphState.WITHDRAWN}
        assert Reason.BUDGET_GRAPHS in refused, f"no key was withdrawn for the budget; reasons are {refused}"
    bench = _Bench(make, close)
    bench.executor, bench.registry, bench.captured = executor, registry, captured
    for rows, decision in bench.random_steps():
        bench.same(bench.run(decision, rows).outputs, bench.eagerly(rows).outputs, decision)
        bench.sequences.advance(rows)


def release_gives_everything_back(make: MakeExecutor, close: Close = operator.eq) -> None:
    """After a release nothing is captured, nothing is held, and no graph can be run."""
    bench = _Bench(make, close)
    row = bench.sequences.decode(bench.prefill(4)[0])
    decisions = all_decisions(bench.sequences.inputs([row]).numbers, bench.captured)
    bench.executor.release()
    assert not bench.registry.captured(), f"captured after a release: {bench.registry.captured()}"
    held = bench.registry.totals().held
    assert (held.graphs, held.bytes, held.streams) == (0, 0, 0), f"held after a release: {held}"
    for decision in decisions:
        if decision.keys:
            _expect_error(bench.executor, decision, bench.sequences.inputs([row]))


def an_uncaptured_graph_is_an_error(make: MakeExecutor, close: Close = operator.eq) -> None:
    """A decision that names a graph nobody captured is a named error, and the executor goes on."""
    bench = _Bench(make, close)
    fresh, registry = _opened(make)
    row = bench.sequences.chunk(bench.sequences.start(), 6)
    inputs = bench.sequences.inputs([row])
    for decision in all_decisions(inputs.numbers, KEYS):
        if decision.keys:
            _expect_error(fresh, decision, inputs)
    bench.same(fresh.run(_eager(), inputs).outputs, bench.eagerly([row]).outputs, "eager after such an error")
    assert not registry.captured()


def inputs_that_do_not_fit_are_an_error(make: MakeExecutor, close: Close = operator.eq) -> None:
    """A token or a row that an input lacks is a named error in every mode, and never padding; the executor goes on."""
    bench = _Bench(make, close)
    (started,) = bench.prefill(5)
    rows = [bench.sequences.decode(started), bench.sequences.chunk(bench.sequences.start(), 7)]
    inputs = bench.sequences.inputs(rows)
    for decision in all_decisions(inputs.numbers, bench.captured):
        for name in ("positions", "slot_mapping", "block_table", "kv_lens"):
            short = inputs._replace(**{name: getattr(inputs, name)[:-1]})
            _expect_error(bench.executor, decision, short, f"{name} is one short")
        for more in (-1, 1):
            lengths = [*inputs.query_lens[:-1], inputs.query_lens[-1] + more]
            wrong = inputs._replace(query_lens=lengths)
            _expect_error(bench.executor, decision, wrong, f"query_lens come to {more:+} tokens")
        bench.same(bench.run(decision, rows).outputs, bench.eagerly(rows).outputs, f"{decision} after such errors")
    assert bench.registry.captured() == bench.captured, "inputs that don't fit must cost no graph"


def keys_hold_what_they_say(make: MakeExecutor, close: Close = operator.eq) -> None:
    """What `GraphKey.holds` lets into a graph runs as it does eagerly; more tokens or rows are a named error.

    The batches lie on the borders of each key: one token, one row, one LoRA or one decode step's query more or less.
    """
    bench = _Bench(make, close)
    started = bench.prefill(*range(2, 2 + LIMITS.max_num_reqs))
    for key in bench.captured:
        for rows, loras in _borders(key, bench.sequences, started):
            inputs = bench.sequences.inputs(rows)
            inputs = inputs._replace(numbers=inputs.numbers._replace(num_active_loras=loras))
            numbers, decision = inputs.numbers, _replaying(key)
            if key.holds_batch(numbers):
                wanted = bench.reference.run(_eager(), inputs).outputs
                try:
                    got = bench.executor.run(decision, inputs).outputs
                except KPolicyError as error:
                    raise AssertionError(f"{key} says that it holds {numbers}, and fails: {error}") from error
                bench.same(got, wanted, f"{key} says that it holds {numbers}")
            elif numbers.total_tokens > key.num_tokens or numbers.total_reqs > (key.num_reqs or numbers.total_reqs):
                _expect_error(bench.executor, decision, inputs)
            for row in rows:
                if not row.decode:
                    bench.sequences.end(row.sequence)


def _borders(key: GraphKey, sequences: Sequences, started: Sequence[Any]) -> Iterable[tuple[list[Row], int]]:
    """Batches at the borders of what the key holds, each with its number of active LoRAs."""
    length = key.query_len or min(key.max_query_len or 1, key.num_tokens)
    for each in {1, length, length + 1}:
        for count in {1, 2, key.num_tokens // each, key.num_tokens // each + 1}:
            if count <= len(started):
                yield [sequences.decode(sequence, each) for sequence in started[:count]], 0
    yield [sequences.decode(started[0], length)], key.lora_case + 1
    for chunk in {length, key.num_tokens, key.num_tokens + 1}:
        yield [sequences.chunk(sequences.start(), chunk)], 0
    if key.num_reqs is not None and key.num_reqs < key.num_tokens:
        yield [sequences.chunk(sequences.start(), 1) for _ in range(key.num_reqs + 1)], 0
    # Prompt chunks behind decode rows of the right length, and decode rows that differ.
    yield [sequences.decode(started[0], length), sequences.chunk(sequences.start(), length + 2)], 0
    yield [sequences.decode(started[0], length), sequences.decode(started[1], length + 1)], 0


def _expect_error(
    executor: Executor, decision: Decision, inputs: StepInputs, although: str = "its graph isn't captured"
) -> None:
    try:
        executor.run(decision, inputs)
    except StickyDeviceError:
        raise AssertionError(f"{decision}: {although}, which the device must survive") from None
    except KPolicyError:
        return
    raise AssertionError(f"{decision} ran, although {although}")


def a_failed_replay_leaves_the_batch_runnable(
    make: MakeExecutor, close: Close = operator.eq, fail: Callable[[Executor], None] | None = None
) -> None:
    """A replay that fails before launch is named and the batch runs otherwise; a failed prefill half runs eagerly.

    Args:
        make: makes the executor.
        close: compares outputs.
        fail: makes the executor's next replay fail; `fail_next_replay` where the executor is a `ModeRunner`. Other
            executors aren't tried without it.
    """
    bench = _Bench(make, close)
    if fail is None:
        if not isinstance(bench.executor, ModeRunner):
            return
        fail = fail_next_replay
    one, other = bench.prefill(7, 12)
    for rows in (
        [bench.sequences.decode(one)],
        [bench.sequences.decode(one), bench.sequences.chunk(other, 3)],
        [bench.sequences.decode(one, 2), bench.sequences.decode(other, 3)],
    ):
        wanted = bench.eagerly(rows).outputs
        for decision in all_decisions(bench.sequences.inputs(rows).numbers, bench.captured):
            if decision.keys:
                _fails_once(bench, decision, rows, fail)
                bench.same(bench.run(_eager(), rows).outputs, wanted, f"eager after {decision} failed")
                bench.same(bench.run(decision, rows).outputs, wanted, f"{decision} after it failed once")


def _fails_once(bench: _Bench, decision: Decision, rows: list[Row], fail: Callable[[Executor], None]) -> None:
    fail(bench.executor)
    try:
        bench.run(decision, rows)
    except GraphReplayError as error:
        named = error.key
    else:
        raise AssertionError(f"{decision}: a failed replay must raise GraphReplayError")
    assert named == decision.launches[0].key, f"{decision}: the error names {named}"


def a_failed_second_half_runs_eagerly(make: MakeExecutor, close: Close = operator.eq) -> None:
    """When the prefill half's graph fails, the half runs eagerly at its size, and the decision and registry say so."""
    bench = _Bench(make, close)
    if not isinstance(bench.executor, ModeRunner):
        return
    one, other = bench.prefill(7, 12)
    rows = [bench.sequences.decode(one), bench.sequences.chunk(other, 3)]
    wanted = bench.eagerly(rows).outputs
    for decision in all_decisions(bench.sequences.inputs(rows).numbers, bench.captured):
        if len(decision.keys) < 2 or decision.keys[1] not in bench.registry.captured():
            continue
        fail_next_replay(bench.executor, after=1)
        outputs = bench.run(decision, rows)
        bench.same(outputs.outputs, wanted, f"{decision} with a failed second half")
        half = outputs.decision.launches[1]
        size = decision.keys[1].num_tokens
        eager = attrs.evolve(decision.launches[1], key=None, padded_tokens=size, reason=Reason.REPLAY_FAILED)
        assert half == eager, f"ran {half}, not {eager}"
        record = bench.registry.record(decision.keys[1])
        assert (record.state, record.reason) == (GraphState.WITHDRAWN, Reason.REPLAY_FAILED), record


def fail_next_replay(executor: Executor, after: int = 0) -> None:
    """Make one replay of a `ModeRunner`'s adapter fail before launch.

    Args:
        executor: the runner.
        after: replays that still succeed before.
    """
    assert isinstance(executor, ModeRunner), f"{executor!r} isn't a ModeRunner; give the check its own `fail`"
    launcher, replay, left = executor.launcher, executor.launcher.replay, after

    def failing(handle: Any, rows: StepInputs, launch: Launch) -> Any:
        nonlocal left
        if left:
            left -= 1
            return replay(handle, rows, launch)
        setattr(launcher, "replay", replay)  # noqa: B010 - a method is replaced on purpose
        assert launch.key is not None
        raise GraphReplayError(launch.key, f"replaying {launch.key}: failed on purpose")

    setattr(launcher, "replay", failing)  # noqa: B010
    # Those that are prepared don't go through `replay`.
    executor.forget_prepared()


def parts_are_timed(make: MakeExecutor, close: Close = operator.eq) -> None:
    """Each part is ready within the step's time; a split says when each half is."""
    bench = _Bench(make, close)
    for rows, decision in bench.random_steps():
        outputs = bench.run(decision, rows)
        bench.eagerly(rows)
        parts = {Rows.DECODE, Rows.PREFILL} if decision.mode is Mode.SPLIT else {Rows.ALL}
        assert len(outputs.ready) == len(outputs.decision.launches), f"{decision}: ready {outputs.ready}"
        assert set(outputs.ready_us) == parts, f"{decision}: parts {set(outputs.ready_us)}"
        times = list(outputs.ready_us.values())
        assert all(0 <= ready <= outputs.cycle_us for ready in times), f"{decision}: {times} in {outputs.cycle_us}"
        bench.sequences.advance(rows)


def _replaying(key: GraphKey) -> Decision:
    mode = Mode.FULL if key.part is Part.FULL else Mode.PIECEWISE
    return Decision(mode, (Launch(Rows.ALL, key),), Reason.GRAPH_FITS)


def _filling(key: GraphKey, bench: _Bench, started: Sequence[Any]) -> list[Row]:
    """Rows that leave no padding token in the graph."""
    if not key.decode_only:
        return [bench.sequences.chunk(bench.sequences.start(), key.num_tokens)]
    length = key.query_len or min(key.max_query_len or 1, key.num_tokens)
    return [bench.sequences.decode(sequence, length) for sequence in started[: key.num_tokens // length]]


EXECUTOR_CHECKS = (
    captures_or_says_why,
    modes_agree_with_eager,
    rows_stand_alone,
    padding_never_leaks,
    outputs_survive_the_next_replay,
    repeats_equal_single_steps,
    a_budget_refuses_the_rest,
    release_gives_everything_back,
    an_uncaptured_graph_is_an_error,
    inputs_that_do_not_fit_are_an_error,
    keys_hold_what_they_say,
    a_failed_replay_leaves_the_batch_runnable,
    a_failed_second_half_runs_eagerly,
    parts_are_timed,
)
"""All of the above."""
