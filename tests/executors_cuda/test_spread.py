"""Decode steps that lie evenly beside a prompt: what is launched when, on which stream, and what follows of errors.

The pretended device's streams are real queues; kernels run on the CPU as they are launched.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.decision import Decision  # noqa: E402
from kpolicy.engine import Engine  # noqa: E402
from kpolicy.errors import ConfigError, StickyDeviceError  # noqa: E402
from kpolicy.executors import segments  # noqa: E402
from kpolicy.executors.base import StepInputs, StepOutputs  # noqa: E402
from kpolicy.executors.segments import FullGraph  # noqa: E402
from kpolicy.executors.step_model import StepContext  # noqa: E402
from kpolicy.modes import Part, SplitForm  # noqa: E402
from kpolicy.policies.auto import spread  # noqa: E402
from kpolicy.policies.base import Way  # noqa: E402
from kpolicy.testing.executors import all_decisions  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_cuda.test_pretended import library, opened  # noqa: E402, F401
from tests.executors_launcher.checker import BLOCK_SIZE, Checker, batcher_steps  # noqa: E402
from tests.executors_launcher.checker import opened as opened_cpu  # noqa: E402

pytestmark = pytest.mark.usefixtures("library")


def step_of(
    executor: Any, registry: Any, model: Any, steps: int, wait: float | None, *, eager_tail: bool = False
) -> tuple[Decision, StepInputs]:
    """Two decode rows, `steps` times each, beside a prompt: how it runs, and its inputs. The rows have their KV."""
    sequences = Sequences(3, block_size=BLOCK_SIZE)
    rows = [sequences.chunk(sequences.start(), length) for length in (5, 7)]
    started = sequences.inputs(rows)
    executor.run(all_decisions(started.numbers, ())[0], started)
    sequences.advance(rows)
    rows = [sequences.decode(row.sequence) for row in rows]
    inputs = sequences.inputs([*rows, sequences.chunk(sequences.start(), 6)], steps=steps)
    form = SplitForm.BESIDE if steps == 1 else SplitForm.DECODES_BESIDE
    decision = next(
        each
        for each in all_decisions(inputs.numbers, registry.captured())
        if each.form is form and (each.launches[1].key is None) is eager_tail
        and each.launches[0].wait_share is None and each.launches[0].repeat == steps
    )  # fmt: skip
    way = spread(Way(decision.mode, decision.launches, decision.form), wait)
    assert model.vocab
    return attrs.evolve(decision, launches=way.launches), inputs


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is launched in order: ``replay`` of the decodes' graph and ``call`` of the prompt's attention, where."""
    found: list[Any] = []
    logits, attention = FullGraph.logits, StepContext.attention

    def replayed(graph: Any, rows: Any, lasting: bool = False) -> Any:
        found.append(("replay", torch.cuda.current_stream().number))
        return logits(graph, rows, lasting)

    def called(self: Any, call: Any, *tensors: Any) -> Any:
        if self.uniform_query_len is None:
            found.append(("call", torch.cuda.current_stream().number))
        return attention(self, call, *tensors)

    monkeypatch.setattr(FullGraph, "logits", replayed)
    monkeypatch.setattr(StepContext, "attention", called)
    before = segments._ToldStep.attention

    def heard(self: Any, call: Any, *tensors: Any) -> Any:
        def noted(*args: Any) -> Any:
            found.append(("call", torch.cuda.current_stream().number))
            return call(*args)

        return before(self, noted, *tensors)

    monkeypatch.setattr(segments._ToldStep, "attention", heard)
    return found


def run(executor: Any, decision: Decision, inputs: StepInputs) -> StepOutputs:
    outputs: StepOutputs = executor.run(decision, inputs)
    for event in outputs.ready:
        event.wait()
    return outputs


@pytest.mark.parametrize(
    ("steps", "wait", "order"),
    [
        # The tiny model has three attention calls: before each none, a third and two thirds of the prompt are done.
        # A share between two calls is that of the earlier.
        (1, None, "RCCC"), (1, 0.5, "CRCC"), (1, 0.75, "CCRC"), (2, 0.0, "RCRCC"), (2, 0.5, "RCCRC"),
        (2, 0.9, "CRCRC"), (2, None, "RRCCC"), (4, 0.0, "RRCRCRC"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("eager_tail", [False, True])
def test_repeats_begin_when_the_prompt_is_so_far(
    steps: int, wait: float | None, order: str, eager_tail: bool, told: list[Any]
) -> None:
    """Each behind its share of the prompt's attention calls, on the main stream, the prompt on its own."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, steps, wait, eager_tail=eager_tail)
    main = torch.cuda.current_stream().number
    told.clear()
    run(executor, decision, inputs)
    assert {stream for kind, stream in told if kind == "replay"} == {main}
    if wait is None and not eager_tail:
        assert len(told) == steps, "pieces that nobody hears of are called directly"
        return
    calls = {stream for kind, stream in told if kind == "call"}
    assert len(calls) == 1
    assert main not in calls
    assert "".join("R" if kind == "replay" else "C" for kind, _ in told) == order


def test_the_main_stream_waits_for_the_prompt_before_each(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a point that was recorded on the prompt's stream, and not the other way round."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, 2, 0.5)
    main, adapter = torch.cuda.current_stream().number, executor.adapter
    event, wait, made = adapter.event, adapter.wait, {}

    def recorded(stream: Any = None) -> Any:
        point = event(stream)
        made[id(point)] = (point, (torch.cuda.current_stream() if stream is None else stream).number)
        return point

    def waited(point: Any) -> None:
        told.append(("wait", (made[id(point)][1], torch.cuda.current_stream().number)))
        wait(point)

    monkeypatch.setattr(adapter, "event", recorded)
    monkeypatch.setattr(adapter, "wait", waited)
    told.clear()
    run(executor, decision, inputs)
    side = next(stream for kind, stream in told if kind == "call")
    first = next(i for i, (kind, _) in enumerate(told) if kind == "replay")
    assert told[first - 1] == ("wait", (side, main))
    # What the prompt's stream waits for is the step's beginning.
    assert {pair for kind, pair in told if kind == "wait" and pair[1] == side} == {(main, side)}
    assert not any(kind == "wait" and pair == (main, side) for kind, pair in told[first:])


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_random_steps_are_eager_bit_for_bit(family: str) -> None:
    """Among the random ways of steps are some that wait; logits, tokens and KV are those of eager launches."""
    executor, model, registry, _ = opened(family)
    checker, waited = Checker(executor, model), 0  # type: ignore[arg-type]
    step = checker.step

    def counted(decision: Decision, inputs: StepInputs) -> StepOutputs:
        nonlocal waited
        waited += decision.launches[0].wait_share is not None
        return step(decision, inputs)

    checker.step = counted  # type: ignore[method-assign]
    for _ in batcher_steps(checker, registry.captured(), 60, seed=5):
        pass
    assert waited > 3


def test_a_model_whose_calls_nobody_counted_begins_at_once(told: list[Any]) -> None:
    """Without PIECEWISE graphs the first step counts them, and the next one waits."""
    executor, model, registry, keys = opened("llama")
    executor.release()
    executor.capture([key for key in keys if key.decode_only])
    executor.launcher._num_calls = 0
    orders = []
    for _ in range(2):
        decision, inputs = step_of(executor, registry, model, 1, 0.5, eager_tail=True)
        told.clear()
        run(executor, decision, inputs)
        orders.append("".join("R" if kind == "replay" else "C" for kind, _ in told))
    assert orders == ["RCCC", "CRCC"]


def test_where_the_host_runs_the_device_all_begin_at_once() -> None:
    """On the CPU the halves have threads of their own; the step is the same."""
    from tests.executors_launcher.checker import load_family

    model = load_family("llama")
    executor, registry = opened_cpu(model)
    found = []
    for wait in (None, 0.5):
        decision, inputs = step_of(executor, registry, model, 2, wait)
        outputs = run(executor, decision, inputs)
        found.append([list(each) for each in outputs.tokens])
    assert found[0] == found[1]
    assert not executor.launcher.spreads
    engine = Engine("auto", attention=model.support, executor=executor, registry=registry, calibrate=0)
    assert not engine.context.spreads


@pytest.mark.parametrize("at", [1, 2])
def test_a_graph_that_fails_between_runs_eagerly_and_is_told(at: int) -> None:
    """The rows' tokens are those of the eager launch at the graph's size; the graph is withdrawn."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, 2, 0.5)
    wanted = [list(each) for each in run(executor, decision, inputs).tokens]
    decision, inputs = step_of(executor, registry, model, 2, 0.5)
    replay, left = FullGraph.logits, [at]

    def failing(graph: Any, rows: Any, lasting: bool = False) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("no such graph")
        return replay(graph, rows, lasting)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullGraph, "logits", failing)
        outputs = run(executor, decision, inputs)
    assert [list(each) for each in outputs.tokens] == wanted
    key = decision.launches[0].key
    assert outputs.decision.launches[0].key is None
    assert key not in registry.captured()


def test_rows_whose_repeats_fail_say_so_and_the_prompt_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that no eager launch mends is raised to who reads the rows; the prompt's logits are there."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, 2, 0.5)
    sample, sampled = executor.model.sample if hasattr(executor, "model") else model.sample, []

    def failing(logits: Any, step: Any) -> Any:
        sampled.append(logits.shape[0])
        if logits.shape[0] == 2:
            raise ValueError("a sampler of mine")
        return sample(logits, step)

    monkeypatch.setattr(executor.launcher.model, "sample", failing)
    outputs = executor.run(decision, inputs)
    with pytest.raises(ValueError, match="a sampler of mine"):
        list(outputs.tokens[0])
    assert torch.isfinite(outputs.outputs[-1]).all()
    assert sampled.count(2) == 1, "what failed isn't tried again"


def test_a_prompt_that_fails_leaves_the_rows_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All repeats run, those that waited for the rest of it too."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, 2, 0.9, eager_tail=True)
    wanted = [list(each) for each in run(executor, decision, inputs).tokens]
    decision, inputs = step_of(executor, registry, model, 2, 0.9, eager_tail=True)

    def failing(step: Any) -> Any:
        raise ValueError(f"a layer of mine, for {step.tensors.token_ids.shape[0]} tokens")

    monkeypatch.setattr(executor.launcher.model, "forward", failing)
    outputs = executor.run(decision, inputs)
    assert [list(each) for each in outputs.tokens] == wanted
    with pytest.raises(ValueError, match="a layer of mine"):
        outputs.ready[1].wait()


def test_tokens_of_a_step_are_read_before_the_next_is_over() -> None:
    """Each waits for the point behind its own repeat, and the last's is before the launch's own."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, 2, 0.5)
    outputs = executor.run(decision, inputs)
    steps = outputs.tokens.steps
    early = steps[0]._part.early
    assert len(early) == 2
    part, waited = steps[0]._part, []
    part.ready = SimpleNamespace(wait=lambda: pytest.fail("waits for the whole launch"))
    for at, each in enumerate(early):
        part.early[at] = each._replace(
            event=SimpleNamespace(wait=lambda at=at, event=each.event: (waited.append(at), event.wait()))
        )
    tokens = [list(each) for each in steps]
    assert waited == [0, 1]
    assert tokens == [each.values.tolist() for each in early]


def test_an_interrupt_in_a_repeat_is_not_kept_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the prompt that it came in, as any that comes in a launch beside."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, 1, 0.5)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(FullGraph, "logits", interrupted)
    outputs = executor.run(decision, inputs)
    with pytest.raises(KeyboardInterrupt):
        outputs.ready[1].wait()


def test_a_device_lost_in_a_repeat_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not where somebody reads these rows."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, 2, 0.5)

    def lost(*_: Any, **__: Any) -> Any:
        raise StickyDeviceError("gone")

    monkeypatch.setattr(FullGraph, "logits", lost)
    with pytest.raises(StickyDeviceError, match="gone"):
        executor.run(decision, inputs)


def test_a_prompt_that_fails_midway_counts_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many a forward has is known of whole ones alone."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, 1, 0.5, eager_tail=True)
    before, attention = executor.launcher._num_calls, segments._ToldStep.attention

    def failing(self: Any, call: Any, *tensors: Any) -> Any:
        attention(self, call, *tensors)
        raise ValueError("a layer of mine")

    monkeypatch.setattr(segments._ToldStep, "attention", failing)
    executor.run(decision, inputs)
    assert executor.launcher._num_calls == before == 3


def test_a_step_that_was_given_up_between_its_halves_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt can't be staged, so the step raises; the next one runs as if it hadn't been."""
    executor, model, registry, _ = opened("llama")
    decision, inputs = step_of(executor, registry, model, 2, 0.5)
    wanted = [list(each) for each in run(executor, decision, inputs).tokens]
    decision, inputs = step_of(executor, registry, model, 2, 0.5)

    def refusing(*args: Any) -> Any:
        raise ConfigError("no room for it")

    with monkeypatch.context() as patch:
        patch.setattr(executor.launcher, "_stage_beside", refusing)
        with pytest.raises(ConfigError, match="no room"):
            executor.run(decision, inputs)
    # Not part of a step, and no place to go on with one: the rows' slots may be another request's by now.
    before = [cache.clone() for cache in model.kv_caches()]
    other = Sequences(9, block_size=BLOCK_SIZE)
    row = other.inputs([other.chunk(other.start(), 3)])
    key = next(each for each in registry.captured() if each.part is Part.PIECEWISE and each.num_tokens >= 3)
    executor.launcher.eager_as(key, row).outputs[0].tolist()
    for new, old in zip(model.kv_caches(), before, strict=True):
        written = (torch.nan_to_num(new) != torch.nan_to_num(old)).flatten(1).any(1).nonzero().flatten()
        assert {*written.tolist()} <= {*row.slot_mapping, model.pad_slot}
    outputs = run(executor, decision, inputs)
    assert [list(each) for each in outputs.tokens] == wanted
    assert executor.launcher._spread is None
