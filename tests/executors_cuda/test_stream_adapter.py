"""What adapters of all devices with `torch.cuda`'s names do alike, over a pretended device."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kpolicy.executors.cuda.stream_adapter import StreamAdapter  # noqa: E402
from tests.fakes.torch_npu import fake_torch_npu  # noqa: E402


class Library(SimpleNamespace):
    """The pretended device under CUDA's names, noting how captures begin and end, and what gives memory back."""

    def __init__(self) -> None:
        npu, noted = fake_torch_npu().npu, []

        class CUDAGraph(npu.NPUGraph):  # type: ignore[misc]
            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
                noted.append(("begin", capture_error_mode))
                super().capture_begin(pool, capture_error_mode)

            def capture_end(self) -> None:
                noted.append(("end", npu.current_stream().number))
                super().capture_end()

        super().__init__(**vars(npu) | {"empty_cache": lambda: noted.append(("empty", None))}, CUDAGraph=CUDAGraph)
        self.noted: list[Any] = noted


def made(**options: Any) -> tuple[StreamAdapter, Library]:
    library = Library()
    return StreamAdapter("pretended", library, torch.device("cpu"), **options), library


def captured(adapter: StreamAdapter, pool: Any) -> Any:
    weight = torch.ones(4)
    with adapter.session(), adapter.recording(pool):
        adapter.begin(pool)
        weight + 1
        return adapter.end()


def test_a_graph_records_what_its_own_thread_launches() -> None:
    """Unless the device says how a graph begins."""
    adapter, library = made()
    captured(adapter, adapter.new_pool())
    assert library.noted[0] == ("begin", "thread_local")


def test_pieces_of_a_capture_that_failed_give_their_memory_back() -> None:
    """At once, as a graph does that failed itself: what comes next may need it."""
    adapter, library = made()
    pool = adapter.new_pool()
    first, second = captured(adapter, pool), captured(adapter, pool)
    library.noted.clear()
    adapter.discard(pool, [second])
    assert library.noted == [("empty", None)]
    assert pool.graphs == [first]


def test_a_capture_that_an_error_left_open_ends_on_its_own_stream() -> None:
    """Before anything waits for that stream: a capture can't be ended on another, and would take the main stream in."""
    adapter, library = made()
    pool = adapter.new_pool()
    with suppress(ValueError), adapter.session(), adapter.recording(pool):
        adapter.begin(pool)
        raise ValueError("an operator that fails")
    assert ("end", pool.stream.number) in library.noted
    assert captured(adapter, pool) in pool.graphs


@pytest.mark.parametrize(("options", "looks"), [({}, False), ({"check": True}, True), ({"faults": ["sticky@9"]}, True)])
def test_replays_without_anything_to_look_at_are_the_librarys_own(options: Any, looks: bool) -> None:
    """No function of Python's lies between; with checks or faults each replay looks first."""
    adapter, _ = made(**options)
    graph = captured(adapter, adapter.new_pool())
    assert (adapter.replayer(graph) != graph.graph.replay) is looks
    adapter.replayer(graph)()
