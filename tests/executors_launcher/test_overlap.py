"""Halves of a SPLIT step that run beside each other: they overlap, wait for nobody, and stay apart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.decision import Decision  # noqa: E402
from kpolicy.modes import SplitForm  # noqa: E402
from kpolicy.testing.executors import all_decisions  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_launcher.checker import Checker, batcher_steps, load_family, opened  # noqa: E402

WAIT_S = 20


@pytest.fixture
def mixed(small: Callable[..., Any]) -> Any:
    """(executor, model, inputs of two decodes and a prompt with one step ahead, the ways to run them)."""
    model = small()
    executor, registry = opened(model)
    sequences = Sequences(1, block_size=16)
    started = [sequences.chunk(sequences.start(), size) for size in (9, 14)]
    executor.run(all_decisions(sequences.inputs(started).numbers, ())[0], sequences.inputs(started))
    sequences.advance(started)
    rows = [sequences.decode(row.sequence) for row in started] + [sequences.chunk(sequences.start(), 7)]
    inputs = sequences.inputs(rows, steps=4)
    return executor, model, inputs, all_decisions(inputs.numbers, registry.captured())


def _way(decisions: list[Decision], form: SplitForm, *, eager_tail: bool, repeat: int = 1) -> Decision:
    return next(
        each
        for each in decisions
        if each.form is form
        and (each.launches[1].key is None) is eager_tail
        and each.launches[0].repeat == repeat
        and each.launches[0].key.query_len == 1
    )


@pytest.mark.parametrize(("form", "repeat"), [(SplitForm.BESIDE, 1), (SplitForm.DECODES_BESIDE, 4)])
@pytest.mark.parametrize("eager_tail", [True, False])
def test_decode_outputs_are_there_before_the_prefill_half(
    form: SplitForm, repeat: int, eager_tail: bool, mixed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the prefill half held up, the step returns, and decode tokens and logits can be read."""
    executor, model, inputs, decisions = mixed
    decision = _way(decisions, form, eager_tail=eager_tail, repeat=repeat)
    let_go, threads, head = threading.Event(), set(), model.head

    def held_up(hidden: Any) -> Any:
        # Both kinds of tail end with an eager head; the decode half's is in its graph.
        threads.add(threading.get_ident())
        assert let_go.wait(WAIT_S)
        return head(hidden)

    monkeypatch.setattr(model, "head", held_up)
    outputs = executor.run(decision, inputs)
    assert len(outputs.tokens) == repeat
    assert all(len(list(tokens)) == 2 for tokens in outputs.tokens)
    decode_logits = [outputs.outputs[0].clone(), outputs.outputs[1].clone()]
    assert outputs.ready[0].done()
    assert not outputs.ready[1].done()
    let_go.set()
    assert len(list(outputs.first_tokens)) == 1
    assert outputs.ready[1].us > outputs.ready[0].us
    assert threads == threads - {threading.get_ident()}
    monkeypatch.undo()
    expected = executor.launcher.eager_as(decision.launches[0].key, _decodes(inputs), repeat=repeat)
    assert all(map(torch.equal, decode_logits, expected.outputs))


def _decodes(inputs: Any) -> Any:
    from kpolicy.executors.runner import part_of
    from kpolicy.modes import Rows

    return part_of(inputs, Rows.DECODE)


def test_the_prefill_half_runs_on_while_the_decode_half_is_held_up(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half waits for the other: first tokens can be read with the decode half held up."""
    executor, _model, inputs, decisions = mixed
    decision = _way(decisions, SplitForm.BESIDE, eager_tail=True)
    let_go, handle = threading.Event(), executor._handles[decision.launches[0].key]

    def held_up() -> None:
        assert let_go.wait(WAIT_S)
        launch()

    launch = handle.launch
    monkeypatch.setattr(handle, "launch", held_up)
    outputs = executor.run(decision, inputs)
    assert len(list(outputs.first_tokens)) == 1
    assert not outputs.ready[0].done()
    let_go.set()
    outputs.ready[0].wait()


def test_the_next_step_waits_for_halves_that_still_run(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that follows without anybody reading the one before stages nothing until that is done."""
    executor, model, inputs, decisions = mixed
    decision = _way(decisions, SplitForm.BESIDE, eager_tail=False)
    over: list[str] = []
    head = model.head

    def slow(hidden: Any) -> Any:
        result = head(hidden)
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait(0.05)
            over.append("beside")
        return result

    monkeypatch.setattr(model, "head", slow)
    executor.run(decision, inputs)
    executor.run(all_decisions(inputs.numbers, ())[0], inputs)
    assert over == ["beside"]


def test_five_hundred_overlapped_steps_are_bitwise_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves beside each other share nothing: 500 random steps equal their halves run alone."""
    import tests.executors_launcher.choosing as module

    model = load_family("gpt2")
    executor, registry = opened(model)
    checker = Checker(executor, model)

    def beside(numbers: Any, keys: Any) -> list[Decision]:
        ways = all_decisions(numbers, keys)
        return [each for each in ways if each.form not in (None, SplitForm.IN_TURN)] or ways[-1:]

    monkeypatch.setattr(module, "all_decisions", beside)
    monkeypatch.setattr(module, "POLICIES", {})
    steps = batcher_steps(checker, registry.captured(), 3000, seed=5)
    overlapped = 0
    while overlapped < 500:
        overlapped += next(steps).form is not None
    executor.release()


def test_outputs_outlive_later_steps(mixed: Any) -> None:
    """Outputs and tokens of every mode are copies: 10 more steps of the same graphs leave them as they were."""
    executor, _model, inputs, decisions = mixed
    kept = []
    for decision in decisions:
        outputs = executor.run(decision, inputs)
        kept.append((outputs, [row.clone() for row in outputs.outputs], [list(each) for each in outputs.tokens]))
    other = inputs._replace(token_ids=[(token + 1) % 100 for token in inputs.token_ids])
    for decision in [*decisions[:5], *decisions[-5:]]:
        executor.run(decision, other)
    for outputs, rows, tokens in kept:
        assert all(map(torch.equal, outputs.outputs, rows))
        assert [list(each) for each in outputs.tokens] == tokens


def test_no_memory_is_asked_for_in_a_step(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once eager buffers are there, no way to run a step asks the device for buffers, pools or streams."""
    executor, _model, inputs, decisions = mixed
    for decision in decisions:
        executor.run(decision, inputs)

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("memory was asked for within a step")

    for name in ("alloc_static", "alloc_like", "new_pool", "new_stream"):
        monkeypatch.setattr(executor.adapter, name, asked)
    for decision in decisions:
        for event in executor.run(decision, inputs).ready:
            event.wait()


def test_repeats_equal_single_steps(mixed: Any) -> None:
    """Four decode steps in one launch sample the tokens of four single steps, greedy and warm."""
    executor, model, inputs, decisions = mixed
    decision = _way(decisions, SplitForm.DECODES_BESIDE, eager_tail=False, repeat=4)
    for sampling in ({}, {"temperature": [0.9, 1.4, 0.8], "seed": [3, 1 << 35, 9]}):
        step = inputs._replace(sampling=sampling)
        together = [list(tokens) for tokens in executor.run(decision, step).tokens]
        rows, single = _decodes(step), []
        for ahead in [*step.slots_ahead, None]:
            part = executor.launcher.eager_as(decision.launches[0].key, rows)
            single.append(list(part.tokens[0]))
            if ahead is not None:
                rows = rows._replace(
                    token_ids=single[-1], positions=[each + 1 for each in rows.positions], slot_mapping=ahead,
                    kv_lens=[each + 1 for each in rows.kv_lens],
                )  # fmt: skip
        assert together == single
    assert len({tuple(each) for each in together}) > 1
    assert model.num_slots
