"""What a half beside waits for before it is staged: its buffers may be those that the step before still reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kpolicy.decision import Decision  # noqa: E402
from kpolicy.executors.base import StepInputs  # noqa: E402
from kpolicy.keys import GraphKey  # noqa: E402
from kpolicy.modes import Part, SplitForm  # noqa: E402
from kpolicy.registry import GraphRegistry  # noqa: E402
from kpolicy.testing.executors import all_decisions  # noqa: E402
from kpolicy.testing.sequences import Sequences  # noqa: E402
from tests.executors_launcher.checker import opened  # noqa: E402


def beside(executor: Any, registry: GraphRegistry, eager_tail: bool) -> tuple[Decision, StepInputs]:
    """A step of one decode row beside a prompt, whose decode row has its KV: how it runs, and its inputs."""
    sequences = Sequences(1, block_size=16)
    row = sequences.chunk(sequences.start(), 9)
    executor.run(all_decisions(sequences.inputs([row]).numbers, ())[0], sequences.inputs([row]))
    sequences.advance([row])
    inputs = sequences.inputs([sequences.decode(row.sequence), sequences.chunk(sequences.start(), 7)])
    decision = next(
        each
        for each in all_decisions(inputs.numbers, registry.captured())
        if each.form is SplitForm.BESIDE and (each.launches[1].key is None) is eager_tail
    )
    return decision, inputs


@pytest.mark.parametrize("eager_tail", [True, False])
def test_a_half_beside_is_staged_after_the_steps_before(
    eager_tail: bool, small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its own stream it waits first for where the main stream was when the step began, then its inputs are copied.

    Here the host runs the main stream, so a race can't show: the order of the calls does.
    """
    executor, registry = opened(small())
    launcher, adapter = executor.launcher, executor.adapter
    decision, inputs = beside(executor, registry, eager_tail)
    calls: list[Any] = []
    on, wait, commit = adapter.on, adapter.wait, adapter.commit

    @contextmanager
    def noted(stream: Any) -> Iterator[None]:
        with on(stream):
            calls.append("on")
            yield
            calls.append("off")

    monkeypatch.setattr(adapter, "on", noted)
    monkeypatch.setattr(adapter, "wait", lambda event: (calls.append(event), wait(event)))
    monkeypatch.setattr(adapter, "commit", lambda until: (calls.append("commit"), commit(until)))
    executor.run(decision, inputs)
    inside = calls[calls.index("on") : calls.index("off")]
    assert inside == ["on", launcher._started, "commit"]


def test_a_new_pool_waits_for_the_half_beside(small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager buffers that grow for its largest graph give memory back, which the half may still read: after it alone."""
    executor, registry = opened(small(), [GraphKey(Part.FULL, 1, 1, query_len=1)])
    launcher, adapter = executor.launcher, executor.adapter
    executor.run(*beside(executor, registry, True))
    assert launcher._unfinished
    under_way: list[int] = []
    alloc_inputs = adapter.alloc_inputs

    def noted(specs: Any) -> Any:
        under_way.append(len(launcher._unfinished))
        return alloc_inputs(specs)

    monkeypatch.setattr(adapter, "alloc_inputs", noted)
    larger = GraphKey(Part.PIECEWISE, 64)
    registry.plan([larger])
    executor.capture([larger])
    assert len(under_way) == 3  # two streams' eager buffers, and the pool's
    assert not any(under_way)
