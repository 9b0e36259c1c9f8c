"""`HostState`: what a step costs the host besides its own launches: which mode ran before it, which eager sizes did."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kpolicy.costs import CostTable
from kpolicy.decision import Launch
from kpolicy.modes import Part
from kpolicy.shapes import BatchNumbers

__all__ = ["HostState"]


class HostState:
    """The tables of one host's steps, in their order.

    Args:
        costs: a table. Where it tells nothing of steps in a row and new sizes (`CostTable.warm_host_share`,
            `eager_new_us`), every step has this one.
    """

    def __init__(self, costs: CostTable) -> None:
        again = costs.in_a_row()
        self._tables = (costs, costs.new_sizes()), (again, again.new_sizes())
        self._plain = costs if again is costs and not costs.eager_new_us else None
        self._mode: Hashable = None
        self._sizes: set[int] = set()

    def table(self, mode: Hashable, launches: Sequence[Launch], numbers: BatchNumbers) -> CostTable:
        """The table of the next step, which then has run.

        Args:
            mode: what `CostTable.warm_host_share` counts as one mode; a split is one in whatever form.
            launches: the step's.
            numbers: its rows.
        """
        if self._plain is not None:
            return self._plain
        again, self._mode = mode == self._mode, mode
        new = False
        for launch in launches:
            if launch.key is None:
                size = launch.padded_tokens or launch.num_tokens(numbers)
                new = new or size not in self._sizes
                self._sizes.add(size)
        return self._tables[again][new]

    def decodes(self, mode: Hashable, launch: Launch, num_rows: int) -> tuple[float, float]:
        """Host time of a launch of so many decode rows, and that of the next one like it; then it has run."""
        if self._plain is not None:
            us = _host_us(self._plain, launch, num_rows)
            return us, us
        size = launch.padded_tokens or num_rows
        new = launch.key is None and size not in self._sizes
        table = self._tables[mode == self._mode][new]
        self._mode = mode
        if launch.key is None:
            self._sizes.add(size)
        return _host_us(table, launch, num_rows), _host_us(self._tables[True][False], launch, num_rows)


def _host_us(table: CostTable, launch: Launch, num_rows: int) -> float:
    host = table.host_eager
    if launch.key is not None:
        host = table.host_full if launch.key.part is Part.FULL else table.host_piecewise
    return host.base_for(decodes=True, prefills=False) + host.req_us * num_rows
