"""What one gap in a hundred exceeds, as the batcher and the simulator keep it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kpolicy.engine import Engine
from kpolicy.executors.simulated import SimulatedExecutor
from kpolicy.ladders import CaptureSizes
from kpolicy.scheduling.batching import Batcher
from kpolicy.scheduling.gap_tail import GapTail
from kpolicy.scheduling.traces import Trace, TraceRequest
from kpolicy.settings import Settings
from kpolicy.shapes import GAP_TAIL_US
from kpolicy.trace_run import Prompts, serve_trace

_GAPS = st.tuples(st.floats(0.1, 1e7), st.integers(1, 400))


def exceeding(gaps: list[tuple[float, int]], us: float) -> int:
    return sum(count for gap, count in gaps if gap > us)


@given(st.lists(_GAPS, min_size=1, max_size=60), st.integers(0, 60_000))
def test_at_most_one_gap_in_a_hundred_is_longer(gaps: list[tuple[float, int]], alone: int) -> None:
    """At every moment no more than that are above it, and more would be were it 3% less."""
    tail, so_far = GapTail(), []
    tail.without_prompts(alone)
    for gap, count in gaps:
        tail.beside_prompts(gap, count)
        so_far.append((gap, count))
        all_of_them = alone + sum(count for _, count in so_far)
        us = tail.told()
        assert (us is None) == (all_of_them < 1000)
        if us is not None:
            assert exceeding(so_far, us) * 100 <= all_of_them
            # Whole microseconds are coarse where gaps are as short as they are.
            assert not us or exceeding(so_far, 0.97 * us - 2) * 100 > all_of_them


def test_few_gaps_beside_prompts_are_all_long() -> None:
    """Where fewer than one in a hundred are of steps with prompts, each of them is one too many: 0."""
    tail = GapTail()
    tail.without_prompts(9_900)
    tail.beside_prompts(5_000.0, 100)
    assert tail.told() == 0
    tail.beside_prompts(5_000.0, 1)
    assert 5_000 <= (tail.told() or 0) <= 5_120


def test_what_was_long_ago_is_forgotten() -> None:
    """Gaps of another load count half as much with each doubling of all."""
    tail = GapTail()
    tail.beside_prompts(90_000.0, 100_000)
    assert tail.told() is not None
    for _ in range(20):
        tail.beside_prompts(3_000.0, 50_000)
        assert tail.told() is not None
    assert 3_000 <= (tail.told() or 0) <= 3_075


def test_a_run_tells_its_policy() -> None:
    """`serve_trace` counts each gap of its steps; once there are a thousand the fact is in steps with prompts."""
    limits = Settings(max_num_reqs=8, max_num_tokens=64)
    executor = SimulatedExecutor(num_blocks=400, block_size=4, vocab=300)
    engine = Engine("auto", ladder=CaptureSizes((1, 2, 4, 8)), settings=limits, executor=executor)
    engine.capture()
    requests = [TraceRequest(i, 0.05 * i, 40, 50, ()) for i in range(60)]
    told: list[int | None] = []
    prompts, gaps = [0], [0]

    def note(_step: int, inputs: object, outputs: object, _batcher: Batcher, _start_us: float) -> None:
        numbers = inputs.numbers  # type: ignore[attr-defined]
        if numbers.num_prefills and numbers.num_decodes:
            told.append(numbers.facts.get(GAP_TAIL_US))
            prompts[0] += 1
        else:
            assert GAP_TAIL_US not in numbers.facts
        gaps[0] += numbers.num_decodes * max(len(outputs.tokens), 1)  # type: ignore[attr-defined]

    batcher = Batcher(limits, num_blocks=400, block_size=4)
    serve_trace(Trace("made", "made", requests), engine, batcher, Prompts(vocab=300), on_step=note)
    assert gaps[0] == 60 * 49
    first = next(i for i, each in enumerate(told) if each is not None)
    assert 0 < first < len(told) - 5
    assert all(each is not None for each in told[first:])
    assert batcher.gap_tail.told()
