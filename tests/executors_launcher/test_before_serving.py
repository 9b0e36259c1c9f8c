"""What a server runs before requests that are measured."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from kpolicy.errors import GraphReplayError
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part
from kpolicy.registry import GraphRegistry
from kpolicy.serving.products import products_of
from kpolicy.serving.warm_up import product_sizes, warm_up
from kpolicy.settings import Settings
from tests.executors_launcher.test_whole_table import Machine, keys

SETTINGS = Settings(max_num_reqs=64, max_num_tokens=512)
MODEL: Any = SimpleNamespace(vocab=100, pad_slot=65_536, num_blocks=4096, block_size=16, max_model_len=400)


class Told(Machine):
    """Notes what runs; graphs of one size fail before they launch."""

    weight = torch.zeros(3, 2)

    def __init__(self, graphs: list[GraphKey], fails: int = 0) -> None:
        super().__init__(graphs)
        self.ran: list[tuple[Mode, GraphKey | None, int, int]] = []
        self._fails = fails
        self.waited = 0

    def _wait(self) -> None:
        super()._wait()
        self.waited += 1

    def run(self, decision: Any, inputs: Any) -> Any:
        launch, numbers = decision.launches[0], inputs.numbers
        if launch.key is not None and launch.key.num_tokens == self._fails:
            raise GraphReplayError(launch.key, "it moved")
        self.ran.append((decision.mode, launch.key, numbers.num_decodes, numbers.num_prefill_tokens))
        assert set(inputs.slot_mapping) == {MODEL.pad_slot}
        with torch.inference_mode():
            linear(torch.zeros(numbers.total_tokens, 2), self.weight)
        return super().run(decision, inputs)


def captured(graphs: list[GraphKey]) -> GraphRegistry:
    registry = GraphRegistry()
    registry.plan(graphs)
    for key in graphs:
        registry.capture(key, bytes=1, seconds=0.1, streams=0, graphs=1, pool="machine/full", handle=None)
    return registry


def test_every_graph_runs_once_and_eager_sizes_throughout() -> None:
    """Decode graphs on decode rows, the others on a prompt that the model has room for; no graph counts a hit."""
    machine, registry = Told(keys()), captured(keys())
    count = warm_up(machine, registry, MODEL, SETTINGS)
    graphs = {key: (mode, decodes, new) for mode, key, decodes, new in machine.ran if key is not None}
    assert count == len(machine.ran)
    assert graphs == {
        key: (Mode.PIECEWISE, 0, min(key.num_tokens, 400))
        if key.part is Part.PIECEWISE
        else (Mode.FULL, key.num_tokens, 0)
        if key.decode_only
        else (Mode.FULL, 0, min(key.num_tokens, 400))
        for key in keys()
    }
    eager = [new for mode, key, _, new in machine.ran if key is None]
    assert len(machine.ran) == len(keys()) + len(eager)
    # And two steps whose products are noted.
    assert (eager[0], eager[31:]) == (12, [400, 400, 399])
    assert set(registry.unused()) == set(keys())


def test_a_graph_that_fails_is_left_to_the_step_that_needs_it() -> None:
    machine = Told(keys(), fails=64)
    failing = sum(key.num_tokens == 64 for key in keys())
    assert failing == 3
    assert warm_up(machine, captured(keys()), MODEL, SETTINGS) == len(keys()) - failing + 34


def test_graphs_of_others_and_of_drafts_are_left_alone() -> None:
    """A registry that Engines share has other executors' graphs too."""
    drafts = GraphKey(Part.FULL, 24, 8, query_len=3)
    machine = Told([drafts])
    warm_up(machine, captured([*keys(), drafts]), MODEL, SETTINGS)
    assert {key for _, key, _, _ in machine.ran} == {None}


def test_nothing_runs_where_the_host_runs_the_launches() -> None:
    machine = Told(keys())
    machine.host_runs = True
    assert warm_up(machine, captured(keys()), MODEL, SETTINGS) == 0
    assert not machine.ran


class Shapes(TorchDispatchMode):  # type: ignore[misc]
    """Notes the shapes that products run over, and how these lie in memory, whoever asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, list[tuple[int, ...]]] = {}
        self.strides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in {"aten::linear", "aten::bmm", *OPERATORS}:
            self.of.setdefault(func._schema.name, []).append(tuple(args[0].shape))
            self.strides.append(args[0].stride())
        return func(*args, **(kwargs or {}))


OPERATORS: dict[str, Callable[[int], Any]] = {
    "aten::linear": lambda size: linear(torch.zeros(size, 2), torch.zeros(8, 2)),
    "aten::matmul": lambda size: torch.matmul(torch.zeros(3, size, 2), torch.zeros(2, 8)),
    "aten::mm": lambda size: torch.mm(torch.zeros(size, 2), torch.zeros(2, 8)),
    "aten::addmm": lambda size: torch.addmm(torch.zeros(8), torch.zeros(size, 2), torch.zeros(2, 8)),
    "aten::bmm": lambda size: torch.bmm(torch.zeros(3, size, 2), torch.zeros(3, 2, 8)),
    "aten::baddbmm": lambda size: torch.baddbmm(torch.zeros(8), torch.zeros(3, size, 2), torch.zeros(3, 2, 8)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_that_is_a_product_is_noted(name: str) -> None:
    with torch.inference_mode():
        [product] = products_of(OPERATORS[name], (16, 15))
        with Shapes() as seen:
            product.run(7)
    assert seen.of[name]


def test_a_product_with_options_is_left_alone() -> None:
    """What it would be without them is another one."""
    with torch.inference_mode():
        assert not products_of(
            lambda size: torch.addmm(torch.zeros(8), torch.zeros(size, 2), torch.zeros(2, 8), beta=2), (16, 15)
        )


def test_a_steps_tensors_are_not_kept() -> None:
    """Those of all layers together can be gigabytes: the first of each kind are."""
    weight, alive = torch.zeros(2, 2), []

    def step(size: int) -> None:
        for _ in range(50):
            hidden = torch.zeros(size, 2)
            alive.append(weakref.ref(hidden))
            linear(hidden, weight)
        most.append(sum(each() is not None for each in alive))

    most: list[int] = []
    with torch.inference_mode():
        products = products_of(step, (16, 15))
    assert len(products) == 1
    # Besides one of each step, the one that a local name still has.
    assert max(most) <= 4


def test_a_model_of_one_token_has_no_other_size() -> None:
    machine = Told([])
    assert warm_up(machine, captured([]), SimpleNamespace(**{**vars(MODEL), "max_model_len": 1}), SETTINGS) == 1


def test_each_step_is_over_before_the_next() -> None:
    machine = Told(keys())
    assert warm_up(machine, captured(keys()), MODEL, SETTINGS) == len(machine.ran) == machine.waited


def test_products_run_by_themselves_at_every_size_where_there_are_few() -> None:
    """cuBLAS loads a kernel at its first use, and chooses by the exact size: 64, 128, 192 don't tell of 727."""
    machine = Told([])
    with Shapes() as seen:
        warm_up(machine, captured([]), MODEL, SETTINGS)
    assert seen.of["aten::linear"][34:] == [(size, 2) for size in range(400, 0, -1)]


@pytest.mark.parametrize("longest", [513, 1536, 2048, 2560, 4096, 8192])
def test_products_run_at_sizes_of_all_remainders(longest: int) -> None:
    sizes = sorted(product_sizes(longest))
    assert sizes[-1] == longest
    assert 1 <= sizes[0] <= longest // 512 + 4
    assert 300 <= len(sizes) <= 513
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= longest // 512 + 7
    for remainder in range(4):
        assert sum(size % 4 == remainder for size in sizes) >= len(sizes) // 8


def test_products_of_a_step() -> None:
    """One of each kind, whichever dimension goes with tokens; weights, and what has a size of its own, stay."""
    up, down, expert = torch.zeros(8, 2), torch.zeros(2, 8), torch.zeros(3, 2, 5)

    def step(size: int) -> None:
        hidden = torch.zeros(size, 2)
        linear(linear(hidden, up), down)
        linear(hidden, up)
        linear(hidden[:1], up)
        torch.bmm(torch.zeros(size, 3, 2).transpose(0, 1), expert)
        # Tokens in two dimensions, as queries by keys.
        torch.bmm(torch.zeros(1, size, 2), torch.zeros(1, 2, size))
        torch.mm(torch.zeros(size, size), torch.zeros(size, 2))
        linear(torch.zeros(6 * size, 2), up)

    with torch.inference_mode():
        products = products_of(step, (16, 15))
        assert [product.tokens for product in products] == [
            {0: (0, 1)}, {0: (0, 1)}, {0: (1, 1)}, {0: (1, 1), 1: (2, 1)}, {0: (0, 6)}
        ]  # fmt: skip
        with Shapes() as seen:
            for product in products:
                product.run(7)
    assert seen.of == {"aten::linear": [(7, 2), (7, 8), (42, 2)], "aten::bmm": [(3, 7, 2), (1, 7, 2)]}
    # The transposed one lies as it did.
    assert seen.strides[2] == (2, 6, 1)


@pytest.mark.parametrize("other", ["another product", "one more", "another width", "a bias", "not by tokens", "flat"])
def test_what_is_not_the_same_products_is_left_alone(other: str) -> None:
    def step(size: int) -> None:
        if size == 16:
            linear(torch.zeros(size, 2), torch.zeros(8, 2))
        elif other == "another product":
            torch.bmm(torch.zeros(1, size, 2), torch.zeros(1, 2, 8))
        elif other == "another width":
            linear(torch.zeros(size, 3), torch.zeros(8, 3))
        elif other == "a bias":
            linear(torch.zeros(size, 2), torch.zeros(8, 2), torch.zeros(8))
        elif other == "not by tokens":
            linear(torch.zeros(size - 1, 2), torch.zeros(8, 2))
        elif other == "flat":
            linear(torch.zeros(2), torch.zeros(8, 2))
        else:
            for _ in range(2):
                linear(torch.zeros(size, 2), torch.zeros(8, 2))

    with torch.inference_mode():
        assert products_of(step, (16, 15)) == []


def test_another_operator_over_the_same_shapes_is_another_product() -> None:
    def step(size: int) -> None:
        (torch.mm if size == 16 else torch.matmul)(torch.zeros(size, 2), torch.zeros(2, 8))

    with torch.inference_mode():
        assert products_of(step, (16, 15)) == []
