"""Which mode a policy takes for a mixed batch, and what that costs against the cheapest, over a grid of batches."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kpolicy.attention.support import AttentionSupport, Claims
from kpolicy.budgets import Budget
from kpolicy.costs import CostTable
from kpolicy.engine import Engine
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Mode
from kpolicy.settings import Objective
from kpolicy.shapes import BatchShape
from kpolicy.simulate import Server
from kpolicy.simulate.graphs import counting_executor

__all__ = ["CHEAPEST", "MUCH_WORSE", "Cell", "ModeMap", "mode_maps"]

CHEAPEST = "auto"
"""The policy that takes the cheapest way."""
MUCH_WORSE = 0.05
"""A batch that takes this share longer than the cheapest way, or more, is marked."""
_MOST_SIZES = 22


@attrs.frozen(kw_only=True)
class Cell:
    """One batch of the grid.

    Args:
        decodes: decode rows.
        tokens: tokens of one prompt beside them.
        mode: how it runs.
        label: the mode, with the form of a split.
        us: what the step takes.
        score: the same by the objective, which the cheapest way minimises.
        over: how much more that is than the cheapest way's, as a share.
        reason: why, in words.
        beyond: whether its contexts are longer than attention was timed at.
        untimed: whether what it launches has a size outside the cost table.
    """

    decodes: int
    tokens: int
    mode: Mode
    label: str
    us: float
    score: float
    over: float = 0.0
    reason: str
    beyond: bool = False
    untimed: bool = False

    @property
    def marked(self) -> bool:
        """Whether it is much worse than the cheapest way."""
        return self.over >= MUCH_WORSE


@attrs.frozen(kw_only=True)
class ModeMap:
    """A policy's modes over decode rows and prompt tokens.

    Args:
        policy: the policy.
        rows: decode rows of the grid, rising.
        tokens: prompt tokens of the grid, rising.
        cells: by (decode rows, prompt tokens); a batch that a step can't hold isn't there.
        kv_len: KV tokens of each decode row.
    """

    policy: str
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    cells: dict[tuple[int, int], Cell] = attrs.field(hash=False)
    kv_len: int

    def counts(self) -> dict[Mode, int]:
        """Cells by mode."""
        modes = [cell.mode for cell in self.cells.values()]
        return {mode: modes.count(mode) for mode in Mode if mode in modes}


def mode_maps(
    policies: Sequence[str],
    *,
    server: Server,
    costs: CostTable,
    kv_len: int,
    attention: str | AttentionSupport | Claims | None = None,
    ladder: CaptureSizes | None = None,
    objective: str | Objective = "throughput",
    budget: Budget | None = None,
) -> list[ModeMap]:
    """A map of each policy, that of the cheapest way first; all with the graphs that a simulation would capture.

    Args:
        policies: the policies.
        server: limits of a step, and decode steps offered beside a prompt.
        costs: what launches take.
        kv_len: KV tokens of each decode row.
        attention: as `Engine` takes it; likewise `ladder`, `objective` and `budget`.
        ladder: capture sizes; each policy's own by default.
        objective: what the cheapest way minimises.
        budget: what graphs may take.
    """
    settings = server.settings
    rows = grid(settings.max_num_reqs)
    tokens = grid(settings.max_num_tokens, first=8)
    maps: list[ModeMap] = []
    for policy in (CHEAPEST, *(each for each in policies if each != CHEAPEST)):
        engine = Engine(
            policy, attention=attention, ladder=ladder, settings=settings, costs=costs, objective=objective,
            executor=counting_executor(costs), budget=budget,
        )  # fmt: skip
        engine.capture()
        cells = {}
        for decodes in rows:
            for new in tokens:
                cell = _cell(engine, decodes, new, kv_len, 1 if settings.num_speculative_tokens else server.steps_ahead)
                if cell is None:
                    continue
                best = maps[0].cells[decodes, new].score if maps else cell.score
                cells[decodes, new] = attrs.evolve(cell, over=cell.score / best - 1 if best else 0.0)
        maps.append(ModeMap(policy=policy, rows=rows, tokens=tokens, cells=cells, kv_len=kv_len))
    return maps


def grid(most: int, *, first: int = 1) -> tuple[int, ...]:
    """0, powers of two from `first` up with the points halfway where there is room, and the most there may be."""
    powers, size = [], first
    while size < most:
        powers.append(size)
        size *= 2
    halfway = [size + size // 2 for size in powers] if 2 * len(powers) < _MOST_SIZES else []
    return tuple(sorted({0, most, *powers, *(size for size in halfway if size < most)}))


def _cell(engine: Engine, decodes: int, tokens: int, kv_len: int, steps_ahead: int) -> Cell | None:
    """The batch's cell; None where there is no such batch."""
    settings = engine.settings
    q = settings.query_len
    if not decodes + tokens or decodes * q + tokens > settings.max_num_tokens:
        return None
    if decodes + bool(tokens) > settings.max_num_reqs:
        return None
    shape = BatchShape(
        decodes=((q, decodes),) if decodes else (),
        prefills=((tokens, 0),) if tokens else (),
        decode_kv_tokens=decodes * max(kv_len, q) if decodes else None,
        max_decode_steps=steps_ahead if decodes and tokens else 1,
    )
    decision = engine.decide(shape)
    cost, span = engine.costs.cost(decision.launches, shape.numbers), engine.costs.kv_span
    return Cell(
        decodes=decodes, tokens=tokens, mode=decision.mode, label=decision.label, us=cost.step_us,
        score=engine.costs.score(cost, engine.objective), reason=decision.reason.text,
        beyond=span is not None and not span.holds(shape.numbers),
        untimed=not engine.costs.spans(decision.launches, shape.numbers),
    )  # fmt: skip
