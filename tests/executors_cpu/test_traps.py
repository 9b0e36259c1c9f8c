"""What a recording must not freeze, lose or alias: each trap is refused by name and line, or handled."""

# ruff: noqa: ARG005 - every trap takes the same two tensors

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import library  # noqa: E402
from torch.nn import functional  # noqa: E402

from kpolicy.errors import CaptureError  # noqa: E402
from kpolicy.executors.cpu import Recorder  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402

from .helpers import holds, record  # noqa: E402

SCALE = 3

REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "item": ("Tensor.item", lambda x: x[0].item()),
    "tolist": ("Tensor.tolist", lambda x: x.tolist()),
    "numpy": ("Tensor.numpy", lambda x: x.numpy()),
    "array": ("Tensor.__array__", lambda x: x.__array__()),
    "dlpack": ("Tensor.__dlpack__", lambda x: x.__dlpack__()),
    "data_ptr": ("Tensor.data_ptr", lambda x: x.data_ptr()),
    "bool": ("Tensor.__bool__", lambda x: bool(x[0])),
    "if": ("Tensor.__bool__", lambda x: 1 if (x > 0).all() else 0),
    "int": ("Tensor.__int__", lambda x: int(x[0])),
    "float": ("Tensor.__float__", lambda x: float(x[0])),
    "index": ("Tensor.__index__", lambda x: [1, 2, 3][x.long().argmax() % 3]),
    "contains": ("Tensor.__contains__", lambda x: 1.0 in x),
    "print": ("Tensor.__repr__", lambda x: repr(x)),
    "format": ("Tensor.__format__", lambda x: f"{x[0]}"),
    "equal": ("aten.equal.default", lambda x: torch.equal(x, x)),
    "allclose": ("aten.allclose.default", lambda x: torch.allclose(x, x)),
    "nonzero": ("aten.nonzero.default", lambda x: x.nonzero()),
    "where": (
        "aten.where.default (aten.nonzero.default)",
        lambda x: torch.where(x > 0),
    ),
    "masked_select": ("aten.masked_select.default", lambda x: x.masked_select(x > 0)),
    "boolean index": ("aten.index.Tensor", lambda x: x[x > 0]),
    "unique": ("aten._unique2.default", lambda x: x.unique()),
    "unique_consecutive": ("aten.unique_consecutive.default", lambda x: x.unique_consecutive()),
    "repeat_interleave": ("aten.repeat_interleave", lambda x: x.repeat_interleave(x.long().clamp(0, 2))),
    "bincount": ("aten.bincount.default", lambda x: torch.bincount(x.long().abs())),
    "one_hot": ("aten.one_hot.default", lambda x: functional.one_hot(x.long().abs())),
    "tensor_split": ("aten.tensor_split", lambda x: torch.tensor_split(x, torch.tensor([1, 2]))),
    "dropout": (
        "aten.dropout.default (aten",
        lambda x: functional.dropout(x, 0.5, training=True),
    ),
    "rand": ("aten.rand.default", lambda x: x + torch.rand(4)),
    "randn_like": ("aten.randn_like.default", lambda x: x + torch.randn_like(x)),
    "normal_": ("aten.normal_.default", lambda x: x.normal_()),
    "bernoulli": ("aten.bernoulli.default", lambda x: x.sigmoid().bernoulli()),
    "multinomial": ("aten.multinomial.default", lambda x: x.softmax(0).multinomial(2)),
    "attention with dropout": (
        "aten.scaled_dot_product_attention.default (aten",
        lambda x: functional.scaled_dot_product_attention(
            x.view(1, 1, 4, 1), x.view(1, 1, 4, 1), x.view(1, 1, 4, 1), dropout_p=0.5
        ),
    ),
    "resize_": ("aten.resize_.default", lambda x: x.clone().resize_(64)),
    "set_": ("aten.set_", lambda x: x.clone().set_(torch.zeros(2))),
    "data": ("Tensor.__set__", lambda x: setattr(x, "data", torch.zeros(4))),
    "out resizes": ("aten.add.out", lambda x: torch.add(x, 1, out=torch.zeros(0))),
    "sparse": ("aten", lambda x: x.to_sparse() * 2),
    "conjugate": ("aten", lambda x: torch.complex(x, x).conj() * 2),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("trap", REFUSED)
def test_traps_are_refused_with_operator_and_line(trap: str, mode: type) -> None:
    """Whatever would go stale at replay is refused by one error, which names the operator and the model's line."""
    operator, run = REFUSED[trap]
    x = torch.tensor([1.5, -2.0, 3.0, 0.5])
    with mode(), pytest.raises(CaptureError) as caught:
        record(lambda: run(x))
    assert caught.value.reason is Reason.CAPTURE_ILLEGAL
    assert str(caught.value).startswith(operator), str(caught.value)
    line = int(re.search(r"test_traps\.py:(\d+) can't be recorded", str(caught.value)).group(1))
    lines, first = inspect.getsourcelines(run)
    assert first <= line < first + len(lines)
    torch.rand(1).item()


def test_a_refusal_that_the_model_catches_still_fails_the_recording() -> None:
    """A model that catches every exception doesn't hide a refusal."""
    x = torch.randn(4)

    def run() -> torch.Tensor:
        try:
            return x * x.sum().item()
        except Exception:  # noqa: BLE001
            return x * 2

    with pytest.raises(CaptureError, match=r"Tensor\.item at"):
        record(run)


def test_memory_from_before_that_nobody_holds_is_refused() -> None:
    """Reading a tensor that was made before the recording and is let go during it is refused at the end."""
    x = torch.randn(4)
    held = [x * 2]
    recorder = Recorder()
    with torch.inference_mode():
        recorder.begin()
        try:
            _ = x + held.pop()
            with pytest.raises(CaptureError, match=r"aten\.add\.Tensor at .*test_traps\.py:\d+ .*freed or stale"):
                recorder.end()
        finally:
            recorder.abort()


HANDLED: dict[str, Callable[..., Any]] = {
    "reshape that views": lambda x, m: x.reshape(-1) + 1,
    "reshape that copies": lambda x, m: m.t().reshape(-1) + 1,
    "write through a reshape that views": lambda x, m: [m.reshape(-1).mul_(2), m + 0],
    "write to a reshape that copies": lambda x, m: [m.t().reshape(-1).mul_(2), m + 0],
    "to that aliases": lambda x, m: [x.to(torch.float32).mul_(2), x + 0],
    "to that copies": lambda x, m: [x.to(torch.float64).mul_(2), x + 0],
    "contiguous that aliases": lambda x, m: [m.contiguous().add_(1), m + 0],
    "contiguous that copies": lambda x, m: [m.t().contiguous().add_(1), m + 0],
    "input returned": lambda x, m: [x, m],
    "several results": lambda x, m: [*m.sort(-1), *m.max(0), *torch.topk(m, 2)],
    "lists of tensors": lambda x, m: [*torch.split(m, 1), torch.cat([m, m * 2, m]), torch.stack([x, -x])],
    "foreach": lambda x, m: torch._foreach_add([x, m], 1),
    "foreach in place": lambda x, m: [torch._foreach_mul_([x, m], 2), x + 0][1:],
    "none among arguments": lambda x, m: m[:, None, torch.tensor([1, 0])],
    "none among results": lambda x, m: [each for each in pairs(m) if each is not None],
    "out variant": lambda x, m: torch.mul(m, 2, out=torch.empty(2, 4)),
    "out variant into a view": lambda x, m: [torch.mul(x, 2, out=m[0]), m + 0],
    "inplace view": lambda x, m: m.clone().t_().add_(1).squeeze_(0),
    "masked write": lambda x, m: m.masked_fill_(m > 0, 0.0),
    "write by mask": lambda x, m: m.index_put_((m > 0,), torch.tensor(7.0)),
    "scatter": lambda x, m: m.scatter_(1, torch.tensor([[0, 2], [1, 3]]), x[:2].expand(2, 2)),
    "index_copy": lambda x, m: m.index_copy_(0, torch.tensor([1]), x[None]),
    "tensor of python data": lambda x, m: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "as_tensor of a list": lambda x, m: x + torch.as_tensor([SCALE] * 4),
    "from_numpy": lambda x, m: x + torch.from_numpy(numpy().arange(4.0)),
    "constant that is changed": lambda x, m: torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(x),
    "zeros that are accumulated": lambda x, m: torch.zeros(4).add_(x).add_(x),
    "large zeros that are accumulated": lambda x, m: torch.zeros(5000, 4).add_(x),
    "arange": lambda x, m: x * torch.arange(4),
    "empty that is filled": lambda x, m: torch.empty(4).copy_(x).mul_(2),
    "empty results": lambda x, m: [m[:0] * 2, torch.cat([m[:0], m])],
    "expanded result": lambda x, m: x.expand(3, 4) + m[:1],
    "scalars": lambda x, m: [x * 2, 2 - x, x**2, x / 3, x.long() * 2.5, x.long() + 1, x.double() + 0.1, x > 1e-3],
    "half": lambda x, m: [x.bfloat16() * 0.3, x.half() + 0.1, (m.bfloat16() @ m.bfloat16().t())],
    "nan and signed zero": lambda x, m: [x * 0.0, -(x * 0.0), x.log()],
    "complex": lambda x, m: torch.view_as_real(torch.view_as_complex(m.view(2, 2, 2)) * torch.polar(x[:2], x[:2])),
    "dropout in evaluation": lambda x, m: functional.dropout(x, 0.5, training=False) + 1,
    "one_hot of a given size": lambda x, m: functional.one_hot(x.long().clamp(0, 2), 3),
    "repeat_interleave of a given size": lambda x, m: torch.repeat_interleave(
        x, torch.tensor([1, 0, 2, 1]), output_size=4
    ),
    "repeat_interleave by a number": lambda x, m: x.repeat_interleave(2),
    "norms": lambda x, m: [
        functional.layer_norm(m, (4,)), functional.rms_norm(m, (4,), x), functional.group_norm(m[None], 2)
    ],
    "embedding": lambda x, m: functional.embedding(torch.tensor([[1, 0], [0, 0]]), m),
    "attention": lambda x, m: functional.scaled_dot_product_attention(*[m.view(1, 2, 1, 4)] * 3),
    "einsum": lambda x, m: torch.einsum("ij,kj->ik", m, m * x),
    "batch norm in training": lambda x, m: functional.batch_norm(m, x, x.abs(), training=True),
}  # fmt: skip


def numpy() -> Any:
    """NumPy, or a skipped test."""
    return pytest.importorskip("numpy")


@pytest.mark.parametrize("trap", HANDLED)
def test_traps_that_are_handled_follow_new_inputs(trap: str) -> None:
    """Aliases, constants, in-place writes and several results replay to the bit on new inputs."""
    holds(HANDLED[trap], torch.tensor([1.5, -2.0, 3.0, 0.5]), torch.randn(2, 4))


@library.custom_op("kpolicy_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    """A custom operator that reads values on the host: its own business."""
    return x * by + x.sum().item()


@library.custom_op("kpolicy_tests::note", mutates_args={"cache"})
def note(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A custom operator that writes its first argument, at places that it reads on the host."""
    for row, slot in enumerate(slots.tolist()):
        cache[slot] = x[row]
    return cache.sum(0)


@library.custom_op("kpolicy_tests::pairs", mutates_args=())
def pairs_op(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A custom operator with two results."""
    return x + 1, x.t().contiguous().t() * 2


def pairs(x: torch.Tensor) -> list[Any]:
    """Two results and a None, as operators with optional results give."""
    return [*pairs_op(x), None]


def test_custom_operators_are_recorded_whole() -> None:
    """A custom operator is one operator of the recording, whatever it does inside."""
    graph = holds(lambda x: scaled(x, 2.0), torch.randn(3, 4))
    assert graph.num_operators == 1
    assert "kpolicy_tests.scaled.default" in graph.describe()


def test_custom_operators_that_write_are_replayed() -> None:
    """A custom operator that changes an argument changes it at each replay, and its result is fresh."""
    cache, slots, x = torch.zeros(6, 4), torch.tensor([4, 1]), torch.randn(2, 4)
    with torch.inference_mode():
        total, graph = record(lambda: note(cache, slots, x))
        x.fill_(2)
        slots.copy_(torch.tensor([0, 5]))
        cache.zero_()
        graph.replay()
        expected = torch.zeros(6, 4)
        expected[[0, 5]] = 2
        assert torch.equal(cache, expected)
        assert torch.equal(total, expected.sum(0))


def test_python_values_are_frozen() -> None:
    """A Python number is the recording's at every replay, as a device graph's is."""
    x, scale = torch.ones(2), [2.0]
    with torch.inference_mode():
        y, graph = record(lambda: x * scale[0])
        scale[0] = 5.0
        graph.replay()
        assert y.tolist() == [2.0, 2.0]


def test_outputs_are_overwritten_by_the_next_replay() -> None:
    """A replay writes where the recording's result lies: a caller that keeps it must copy it."""
    x = torch.ones(2)
    with torch.inference_mode():
        y, graph = record(lambda: x + 1)
        address = y.data_ptr()
        x.fill_(10)
        graph.replay()
        assert y.tolist() == [11.0, 11.0]
        assert y.data_ptr() == address
