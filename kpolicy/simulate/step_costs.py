"""`StepCosts`: what one step takes, by what ran before it and by what its rows are (`kpolicy.step_effects`)."""

from __future__ import annotations

from typing import NamedTuple

import attrs

from kpolicy.costs import Cost, CostTable
from kpolicy.decision import Launch
from kpolicy.host_speed import launching_takes
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, Rows
from kpolicy.shapes import BatchNumbers

__all__ = ["Sides", "StepCosts"]


class Sides(NamedTuple):
    """What a launch of decode rows takes, in microseconds."""

    host_us: float
    dense_us: float
    """Of the device's time, but for attention"""
    rest_us: float
    """Of a step, which nothing overlaps"""


@attrs.frozen
class StepCosts:
    """A table's times in one step. It isn't a `CostTable`: no profile has one, and nothing is decided by one.

    By itself it counts rows by the table's effects, and knows nothing of what ran before.

    Args:
        table: the table, with the host's times of such a step.
        first_pieces_us: more of device time for a launch of pieces, by what ran before: the host launches the first
            ones sooner or later, and the device waits.
        leads: whether halves beside each other wait for the host; not where it launches ahead of the device.
    """

    _table: CostTable
    _first_pieces_us: float = 0.0
    _leads: bool = True
    _graphs_us: dict[tuple[GraphKey, int], float] = attrs.field(factory=dict, init=False, eq=False, repr=False)
    """`CostTable.replay_us` of the graphs and decode tokens that were asked for: the same come at every step"""

    @classmethod
    def in_a_row(cls, costs: CostTable) -> StepCosts:
        """Of a step that comes after one like it: the host's times are `warm_host_share` of the table's.

        The device waits less for the first pieces: see `after_another`.
        """
        piecewise, eager = costs.effects.warm_host_share
        table = attrs.evolve(
            costs, host_piecewise=costs.host_piecewise.times(piecewise), host_eager=costs.host_eager.times(eager)
        )
        return cls(table, -_first_pieces_us(costs))

    @classmethod
    def after_another(cls, costs: CostTable) -> StepCosts:
        """Of a step that comes after one unlike it: the device waits longer for the first pieces.

        What launching them takes more than in a row (`warm_host_share`) is taken to be at their beginning, where the
        first layer brings into the caches what all run and the device has nothing to do yet. The curve has the wait of
        steps in any order, about half of which came after pieces: so half of it is added here, and half is taken off in
        a row.
        """
        return cls(costs, _first_pieces_us(costs))

    def new_sizes(self) -> StepCosts:
        """The same where eager launches are of numbers of tokens that never ran before."""
        host, more_us = self._table.host_eager, self._table.effects.eager_new_us
        if not more_us:
            return self
        table = attrs.evolve(self._table, host_eager=attrs.evolve(host, base_us=host.base_us + more_us))
        return StepCosts(table, self._first_pieces_us, self._leads)

    def at_host_speed(self, work_us: float | None) -> StepCosts:
        """The same on a host on which the fixed work takes so long, as `CostTable.at_host_speed`."""
        table = self._table.at_host_speed(work_us)
        if table is self._table:
            return self
        slower = launching_takes(table.host_work_us / self._table.host_work_us)
        return StepCosts(table, self._first_pieces_us * slower, self._leads)

    def cost(self, launches: tuple[Launch, ...], numbers: BatchNumbers) -> Cost:
        """What running these launches as one step takes.

        Of halves beside each other the second waits until the first is launched: calibration launches ahead of the
        device, so that its shares have nothing of that. Decode steps that wait for their place beside a prompt are
        staged before it and launched later: the device idles for the staging alone. That is taken to add as much as
        launching them before the prompt does, which is less than the launch takes, as they run meanwhile.
        """
        return self._table.cost_by(self.launch_us, launches, numbers, leads=self._leads)

    def decodes_ready_us(self, launches: tuple[Launch, ...], numbers: BatchNumbers, cycle_us: float) -> float:
        """`Costing.decodes_ready_us`."""
        return self._table.decodes_ready_by(self.launch_us, launches, numbers, cycle_us, leads=self._leads)

    def launch_us(self, launch: Launch, numbers: BatchNumbers) -> tuple[float, float]:
        """(device, host) time of one repeat of a launch."""
        if launch.key is None:
            return self._table.launch_us(launch, numbers)
        decodes_alone = launch.rows is Rows.DECODE or not numbers.num_prefills
        dense_us = self._replay_us(launch.key, launch.num_tokens(numbers) if decodes_alone else 0)
        return self._table.launch_us(launch, numbers, dense_us)

    def decodes(self, launch: Launch, num_rows: int) -> Sides:
        """What a launch of so many decode rows takes."""
        table, key = self._table, launch.key
        if key is None:
            host, dense_us = table.host_eager, table.eager.at(launch.padded_tokens or num_rows)
        else:
            host = table.host_full if key.part is Part.FULL else table.host_piecewise
            dense_us = self._replay_us(key, num_rows)
        padding_us = 0.0 if key is None else table.padding_of(key, num_rows)
        host_us = host.base_for(decodes=True, prefills=False) + host.req_us * num_rows
        return Sides(host_us + padding_us, dense_us + padding_us, table.step_us)

    def _replay_us(self, key: GraphKey, decodes: int) -> float:
        """What the dense work of a graph takes the device, with its wait for the first pieces.

        Args:
            key: the graph.
            decodes: tokens in it without padding, where all are decode rows'; 0 of others.
        """
        us = self._graphs_us.get((key, decodes))
        if us is None:
            us = self._graphs_us[key, decodes] = self._table.replay_us(key, decodes)
        return us if key.part is Part.FULL else max(us + self._first_pieces_us, 0.0)


def _first_pieces_us(costs: CostTable) -> float:
    """Half of what launching pieces takes more than in a row."""
    return 0.5 * (1 - costs.effects.warm_host_share[0]) * costs.host_piecewise.base_for(decodes=True, prefills=True)
