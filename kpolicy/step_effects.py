"""`StepEffects`: what launches take more or less than their sizes tell, by what ran before and by what their rows are.

`CostTable.effects` holds them, and files have them beside the table's other numbers. `kpolicy.simulate` reads them
(`kpolicy.simulate.step_costs`), and planning what padding takes (`CostTable.replay_us`); decisions and the simulated
executor, which don't know what ran before, read only what one decode row and what many take beside a prompt, and what
decodes take beside a short one (`CostTable.overlap_of`).
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from kpolicy.errors import ProfileError
from kpolicy.overlap import check_slowdown

__all__ = ["StepEffects"]


@attrs.frozen(kw_only=True)
class StepEffects:
    """What launches take more or less by what ran before them and by what their rows are. None by default.

    Args:
        warm_host_share: share of the host's time that a launch takes where the step before was of its mode too, with
            prompts or without like it, so that what it touches is in the host's caches: (PIECEWISE, EAGER).
        eager_new_us: more of the host's time for an eager launch of a number of tokens that never ran before:
            libraries choose kernels for it, and load them.
        padding_share: share of what further decode rows would take the device that rows of padding in their place take,
            by part: (FULL, PIECEWISE). In a mixture of experts all of them choose the same few.
        one_row_overlap: `CostTable.overlap_cost` where the decode half is one row; None where that is the same or
            wasn't timed. In a mixture of experts a row more reads other experts, and leaves less of the memory's
            bandwidth to the other half.
        one_row_slowdown: `CostTable.decode_slowdown` where the decode half is one row, likewise. It counts only where
            `one_row_overlap` is there too.
        many_rows_overlap, many_rows_slowdown: likewise where it is `kpolicy.costs.MANY_DECODES` rows or more.
        outlasted_share: by the tokens of prompts, share of what those speeds say that a prompt which is over first adds
            to the decode steps' time, from 0 to 1; None where it wasn't timed. Kernels of short prompts leave more of
            the device to others (docs/measured_fidelity.md).
    """

    warm_host_share: tuple[float, float] = attrs.field(default=(1.0, 1.0))
    eager_new_us: float = attrs.field(default=0.0)
    padding_share: tuple[float, float] = attrs.field(default=(1.0, 1.0))
    one_row_overlap: float | None = attrs.field(default=None)
    one_row_slowdown: float | None = attrs.field(default=None)
    many_rows_overlap: float | None = attrs.field(default=None)
    many_rows_slowdown: float | None = attrs.field(default=None)
    outlasted_share: tuple[tuple[int, float], ...] | None = attrs.field(default=None)

    @warm_host_share.validator
    def _check_warm(self, _: Any, value: tuple[float, float]) -> None:
        if len(value) != 2 or not all(0 < share <= 1 for share in value):
            raise ProfileError(
                f"warm_host_share is {value}; it is two shares above 0 and up to 1, of PIECEWISE and EAGER."
            )

    @eager_new_us.validator
    def _check_new(self, _: Any, value: float) -> None:
        if not 0 <= value < 1e9:
            raise ProfileError(f"eager_new_us is {value}; it is microseconds from 0 up.")

    @padding_share.validator
    def _check_padding(self, _: Any, value: tuple[float, float]) -> None:
        if len(value) != 2 or not all(0 <= share <= 1 for share in value):
            raise ProfileError(f"padding_share is {value}; it is two shares from 0 to 1, of FULL and PIECEWISE.")

    @one_row_overlap.validator
    @many_rows_overlap.validator
    def _check_overlap(self, attribute: attrs.Attribute[float | None], value: float | None) -> None:
        if value is not None and not 0 <= value <= 2:
            raise ProfileError(f"{attribute.name} is {value}; it is a share from 0 to 2, or none, as overlap_cost is.")

    @one_row_slowdown.validator
    @many_rows_slowdown.validator
    def _check_slowdown(self, attribute: attrs.Attribute[float | None], value: float | None) -> None:
        check_slowdown(attribute.name, value)

    @outlasted_share.validator
    def _check_outlasted(self, _: Any, value: tuple[tuple[int, float], ...] | None) -> None:
        if value is None:
            return
        tokens = [each[0] for each in value]
        if not value or tokens[0] < 1 or tokens != sorted({*tokens}) or not all(0 <= share <= 1 for _, share in value):
            raise ProfileError(
                f"outlasted_share is {value}; it is pairs of a prompt's tokens, from 1 up and rising, and a share from "
                "0 to 1, or none."
            )

    def outlasted_at(self, prompt_tokens: int) -> float:
        """`outlasted_share` of a prompt of so many tokens: even between those timed as tokens double, beyond as there.

        1 where it wasn't timed.
        """
        points = self.outlasted_share
        if points is None:
            return 1.0
        tokens, share = points[0]
        for more, next_share in points[1:]:
            if prompt_tokens <= tokens:
                break
            if prompt_tokens < more:
                return share + (next_share - share) * math.log2(prompt_tokens / tokens) / math.log2(more / tokens)
            tokens, share = more, next_share
        return share

    def at_host_speed(self, times: float) -> StepEffects:
        """Those of a host that takes so many times as long."""
        return attrs.evolve(self, eager_new_us=self.eager_new_us * times) if self.eager_new_us else self
