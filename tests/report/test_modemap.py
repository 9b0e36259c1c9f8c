"""The map is what an Engine decides for each batch, and no way is cheaper than the cheapest."""

from __future__ import annotations

import pytest

from kpolicy.engine import Engine
from kpolicy.modes import Mode
from kpolicy.report.modemap import grid, mode_maps
from kpolicy.shapes import BatchShape
from kpolicy.simulate.graphs import counting_executor
from tests.report.helpers import COSTS, SMALL


def test_cells_are_decisions() -> None:
    """Every batch that a step can hold is there, as the policy with its graphs captured decides it."""
    maps = mode_maps(["vllm", "auto", "eager"], server=SMALL, costs=COSTS, kv_len=50)
    assert [each.policy for each in maps] == ["auto", "vllm", "eager"]
    settings = SMALL.settings
    engine = Engine("vllm", settings=settings, costs=COSTS, executor=counting_executor(COSTS))
    engine.capture()
    (vllm,) = (each for each in maps if each.policy == "vllm")
    for decodes in vllm.rows:
        for tokens in vllm.tokens:
            fits = decodes + tokens <= settings.max_num_tokens and decodes + bool(tokens) <= settings.max_num_reqs
            cell = vllm.cells.get((decodes, tokens))
            assert (cell is not None) == (fits and decodes + tokens > 0)
            if cell is None:
                continue
            shape = BatchShape(
                decodes=((1, decodes),) if decodes else (), prefills=((tokens, 0),) if tokens else (),
                decode_kv_tokens=50 * decodes if decodes else None,
            )  # fmt: skip
            decision = engine.decide(shape)
            assert (cell.mode, cell.reason) == (decision.mode, decision.reason.text)
            assert cell.us == pytest.approx(COSTS.cost(decision.launches, shape.numbers).step_us)
    assert maps[2].counts() == {Mode.EAGER: len(maps[2].cells)}


def test_nothing_beats_the_cheapest_with_the_same_graphs() -> None:
    """Each policy's batches take at least what `auto` takes by the same ladder."""
    from kpolicy.ladders import CaptureSizes

    ladder = CaptureSizes.of([1, 2, 4, 8, 16, 32, 64, 128], SMALL.settings)
    cheapest, *others = mode_maps(
        ["vllm", "split", "full_and_piecewise"], server=SMALL, costs=COSTS, kv_len=50, ladder=ladder
    )
    assert all(cell.over == 0 for cell in cheapest.cells.values())
    for each in others:
        assert all(cell.over > -1e-9 for cell in each.cells.values()), each.policy
    assert any(cell.over > 0.01 for each in others for cell in each.cells.values())


@pytest.mark.parametrize(("over", "marked"), [(0.0, False), (0.049, False), (0.05, True), (0.06, True)])
def test_a_batch_that_takes_a_twentieth_more_is_marked(over: float, marked: bool) -> None:
    """As the page and the picture say it."""
    import attrs

    (cheapest,) = mode_maps(["auto"], server=SMALL, costs=COSTS, kv_len=50)
    assert attrs.evolve(cheapest.cells[8, 8], over=over).marked == marked


def test_contexts_beyond_what_was_timed() -> None:
    """Batches whose decode rows are longer than attention was timed at are counted below the map."""
    import attrs

    from kpolicy.kv_span import KvSpan
    from kpolicy.report.sections import maps

    said = "batches have longer contexts than attention was timed at"
    for row, some in ((49, True), (50, False)):
        costs = attrs.evolve(COSTS, kv_span=KvSpan(decode_row=row, decode_step=1 << 20, prefill=1 << 20))
        (made,) = mode_maps(["auto"], server=SMALL, costs=costs, kv_len=50)
        assert {key for key, cell in made.cells.items() if cell.beyond} == {
            key for key in made.cells if key[0] and some
        }
        assert (said in maps([made])) == some


@pytest.mark.parametrize(("largest", "some"), [(2, True), (1 << 20, False)])
def test_sizes_that_werent_timed(largest: int, some: bool) -> None:
    """Batches whose cheapest way launches a size outside the table are counted below the map."""
    import attrs

    from kpolicy.costs import Curve
    from kpolicy.report.sections import maps

    curve = Curve((1, largest), (1000.0, 1001.0))
    (made,) = mode_maps(
        ["auto"], server=SMALL, costs=attrs.evolve(COSTS, full=curve, piecewise=curve, eager=curve), kv_len=50
    )
    untimed = {key for key, cell in made.cells.items() if cell.untimed}
    assert ((1, 0) in untimed, (4, 0) in untimed, bool(untimed)) == (False, some, some)
    said = f"{len(untimed)} of {len(made.cells)} batches run at a size outside the cost table."
    assert (said in maps([made])) == some


def test_drafts_make_rows_wider() -> None:
    """A decode row of 1 + k tokens, so fewer rows fit a step."""
    import attrs

    from kpolicy.settings import Settings

    wide = attrs.evolve(SMALL, settings=Settings(max_num_reqs=16, max_num_tokens=32, num_speculative_tokens=3))
    (cheapest,) = mode_maps(["auto"], server=wide, costs=COSTS, kv_len=50)
    assert (8, 0) in cheapest.cells
    assert (8, 8) not in cheapest.cells


@pytest.mark.parametrize(("most", "first"), [(1, 1), (6, 1), (256, 1), (2048, 8), (1 << 20, 8), (5, 8)])
def test_grids(most: int, first: int) -> None:
    """From 0 to the most, rising, few enough to be read."""
    sizes = grid(most, first=first)
    assert sizes[0] == 0
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 24
