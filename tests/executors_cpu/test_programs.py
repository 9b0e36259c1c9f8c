"""Random little programs of views, in-place writes, reshapes and gathers: every replay is the eager run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kpolicy.executors.cpu import Recorder  # noqa: E402
from kpolicy.executors.cpu.arena import Arena  # noqa: E402

from .helpers import record, same  # noqa: E402

INDEX = torch.tensor([2, 0])
OTHER_INDEX = torch.tensor([1, 3])

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "view": lambda a, _: a.reshape(-1).view(4, 4),
    "transpose": lambda a, _: a.t(),
    "reshape": lambda a, _: a.reshape(2, 8).reshape(4, 4),
    "transposed reshape": lambda a, _: a.t().reshape(8, 2).reshape(4, 4),
    "slice write": lambda a, b: _then(a, a[:2].copy_(b[2:])),
    "column write": lambda a, b: _then(a, a[:, 1].add_(b[0])),
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, _: a.mul_(0.5),
    "t_": lambda a, _: a.detach().t_(),
    "fill_": lambda a, _: _then(a, a[3].fill_(1.5)),
    "index_copy_": lambda a, b: a.index_copy_(0, INDEX, b[:2]),
    "index_add_": lambda a, b: a.index_add_(1, INDEX, b[:, :2]),
    "scatter_": lambda a, b: a.scatter_(0, INDEX[None].expand(2, 2), b[:2, :2]),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 0, -1.0),
    "out": lambda a, b: torch.add(a.clone(), b, out=b),
    "add": lambda a, b: a + b,
    "mul": lambda a, _: a * 0.7,
    "matmul": lambda a, b: (a @ b).clamp(-9, 9),
    "cat": lambda a, b: torch.cat([a[:1], b[:2], a[3:]]),
    "stack": lambda a, b: torch.stack([a[0], b[1], a[2], b[3]], 1),
    "chunk": lambda a, b: torch.cat([a.chunk(2)[1], b.chunk(2)[0]]),
    "index_select": lambda a, b: torch.cat([a.index_select(0, INDEX), b[OTHER_INDEX]]),
    "gather": lambda a, b: a.gather(1, b.argsort(1)),
    "sort": lambda a, b: a.sort(0).values + b.sort(1).indices,
    "softmax": lambda a, _: a.softmax(-1),
    "norm": lambda a, _: torch.nn.functional.layer_norm(a, (4,)),
    "expand": lambda a, b: a[:1].expand(4, 4) - b,
    "where": lambda a, b: torch.where(a > b, a, b),
    "contiguous": lambda a, _: a.contiguous(),
    "to": lambda a, _: a.to(torch.float64).to(torch.float32),
    "empty": lambda a, _: torch.empty_like(a).copy_(a),
    "zeros": lambda a, b: torch.zeros(4, 4).add_(a).sub_(b),
    "constant": lambda a, _: torch.tensor([1.0, 2.0, 3.0, 4.0]).mul_(a[0]) + a,
}
STEP = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 5), st.integers(0, 5))


def _then(value: Any, _: Any) -> Any:
    """The first of two values: for a write into part of it."""
    return value


def _run(program: Sequence[tuple[str, int, int]], inputs: Sequence[Any]) -> list[Any]:
    """Run a program over its latest six tensors; all results are its outputs."""
    tensors = list(inputs)
    for name, first, second in program:
        a, b = tensors[-1 - first % len(tensors)], tensors[-1 - second % len(tensors)]
        # A write whose source overlaps its target is undefined in torch, so the source is a copy.
        tensors = [*tensors[-5:], OPERATIONS[name](a, b if name == "out" else b.clone())]
    return tensors


@settings(max_examples=120)
@given(
    programs=st.lists(st.lists(STEP, min_size=1, max_size=8), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 16),
    order=st.randoms(use_true_random=False),
)
def test_random_programs_replay_as_eager(programs: list, seed: int, order: Any) -> None:
    """Graphs of one pool, replayed in any order on fresh inputs, give what eager runs give, inputs included."""
    torch.manual_seed(seed)
    arena = Arena()
    with torch.inference_mode():
        recorded = []
        for program in programs:
            inputs = [torch.randn(4, 4), torch.randn(4, 4)]
            outputs, graph = record(lambda p=program, i=inputs: _run(p, i), Recorder(arena))
            recorded.append((program, inputs, outputs, graph))
        for program, inputs, outputs, graph in order.sample(recorded * 2, 2 * len(recorded)):
            fresh = [torch.randn(4, 4), torch.randn(4, 4)]
            for each, value in zip(inputs, fresh, strict=True):
                each.copy_(value)
            expected = _run(program, fresh)
            graph.replay()
            assert same(outputs, expected)
            assert same(inputs, fresh)
