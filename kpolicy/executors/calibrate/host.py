"""The host's time to launch a step, by mode, requests and the kinds of rows that it has."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence

from kpolicy.costs import FEW_DECODES, HostCost
from kpolicy.decision import Launch
from kpolicy.executors.base import StepInputs
from kpolicy.executors.calibrate.attention import PLAIN_PROMPT
from kpolicy.executors.calibrate.bench import Bench
from kpolicy.keys import GraphKey
from kpolicy.modes import Rows

__all__ = ["HostTimes", "host_by_rows"]

_EAGER, _PIECES = 3, 6
"""Samples a round: other work of the host is in them, and few cases tell them. Eager ones take several times longer"""


class HostTimes:
    """The host's time to launch a step outside a whole graph: by requests, and by the kinds of rows that it has.

    Attention of decode rows and of a prompt are launches of their own, so steps of one kind, of the other and of both
    tell what each adds.

    Args:
        bench: times the steps; nothing is timed where the host itself runs what it launches.
        keys: graphs to replay the pieces of, or None alone for eager steps.
        most_reqs: rows of a step, at most.
        longest: tokens of a prompt chunk, at most.
    """

    def __init__(self, bench: Bench, keys: Sequence[GraphKey | None], most_reqs: int, longest: int) -> None:
        self._bench = bench
        self._cases: dict[tuple[int, int], int] = {}
        holds = {longest if key is None else key.num_tokens: key for key in keys}
        if bench.host_runs or not holds:
            return
        few, prompt = min(FEW_DECODES, most_reqs), min(PLAIN_PROMPT, longest)
        beside = min(few, most_reqs - 1)
        # Where graphs are small, so are the prompts that replay their pieces.
        prompt = max(1, min(prompt, max(holds) - beside))
        steps = [(few, 0), (min(most_reqs, max(holds)), 0), (0, prompt), (beside, prompt)]
        if None in keys:
            # Eager operators on many tokens allocate more, and are what eager steps mostly are.
            steps += [(0, longest // 2), (beside, longest // 2), (beside, longest - beside)]
        for decodes, new in steps:
            size = min((size for size in holds if size >= decodes + new), default=None)
            if size is not None and decodes + new and (decodes, new) not in self._cases:
                launch, kv = Launch(Rows.ALL, holds[size]), bench.short_kv if decodes else 0
                others = _sizes_like(bench, decodes, kv, new) if new == longest // 2 and holds[size] is None else None
                rows, often = bench.rows(decodes, kv, new), _PIECES if holds[size] else _EAGER if others is None else 1
                # Pieces follow each other so often that without the device's part many samples would be in a row.
                self._cases[decodes, new] = bench.add(
                    [launch], rows, often=often, others=others, launching=holds[size] is None
                )

    def again(self, step_us: float) -> float:
        """Share of its time that launching takes once more at once: the caches hold what it touches."""
        case = next(iter(self._cases.values()), None)
        return 1.0 if case is None else self._bench.again_share(case, step_us)

    def new_us(self) -> float:
        """What rows of a size that never ran add to launching."""
        return max(self._bench.new_us([case for case in self._cases.values() if self._bench.differs(case)]), 0.0)

    def cost(self, step_us: float, others: Iterable[int] = ()) -> HostCost:
        """The host's times.

        Args:
            step_us: what overlaps nothing, in any mode.
            others: other cases of the mode that were measured. Those that the host bounds count with these of their
                kind; where time didn't come to these, the least of all stands for every kind.

        Returns:
            0 where nothing was timed; without steps of both kinds, whichever was timed for all rows alike.
        """
        bench = self._bench
        us = {rows: bench.launching_us(case, step_us) for rows, case in self._cases.items() if bench.measured(case)}
        of_others = [
            (*bench.rows_of(case), bench.launching_us(case, step_us), bench.host_bounds(case)) for case in others
        ]
        if not us:
            return HostCost(min((statistics.median(times) for *_, times, _ in of_others), default=0.0))
        decoding = {decodes: statistics.median(times) for (decodes, new), times in us.items() if not new}
        if not decoding:
            return HostCost(min(map(statistics.median, us.values())))
        fewest, most = min(decoding), max(decoding)
        req_us = max(decoding[most] - decoding[fewest], 0.0) / (most - fewest) if most > fewest else 0.0
        # All launches of a kind together: one case has few of them, and its median moves with each.
        kinds: dict[tuple[bool, bool], list[float]] = {}
        for decodes, new, times, bounds in [*((*rows, each, True) for rows, each in us.items()), *of_others]:
            if bounds:
                rows_us = req_us * (decodes + (new > 0))
                kinds.setdefault((decodes > 0, new > 0), []).extend(time - rows_us for time in times)
        middle = {kind: max(statistics.median(times), 0.0) for kind, times in kinds.items()}
        decode_us = middle[True, False]
        if not {(False, True), (True, True)} <= middle.keys():
            return HostCost(decode_us, req_us)
        # A step of both kinds takes what they have in common once.
        prefill_us = middle[False, True]
        common = min(max(decode_us + prefill_us - middle[True, True], 0.0), decode_us, prefill_us)
        return HostCost(common, req_us, decode_us - common, prefill_us - common)


def _sizes_like(bench: Bench, decodes: int, kv: int, new: int) -> Callable[[int], StepInputs]:
    """Rows with a prompt of another size each time, from half of `new` to half as much again.

    Eager steps are mostly of a size that was never run before: libraries then choose kernels anew, and memory of that
    size isn't there yet.
    """
    return lambda turn: bench.rows(decodes, kv, max(1, new // 2 + random.Random(turn).randrange(new)))  # noqa: S311


def host_by_rows(bench: Bench, cases: Sequence[tuple[int, int]], step_us: float) -> HostCost:
    """Host time by rows: through the cases with the fewest and the most rows.

    Args:
        bench: has timed them.
        cases: (case, rows) each.
        step_us: what overlaps nothing, in any mode.
    """
    by_rows: dict[int, list[float]] = {}
    for case, rows in cases:
        if bench.measured(case):
            us = max(bench.host_us(case) - (bench.beside_us(case, step_us) or 0.0), 0.0)
            by_rows.setdefault(rows, []).append(us)
    if not by_rows:
        return HostCost(0.0)
    fewest, most = min(by_rows), max(by_rows)
    low, high = statistics.median(by_rows[fewest]), statistics.median(by_rows[most])
    slope = max(high - low, 0.0) / (most - fewest) if most > fewest else 0.0
    return HostCost(max(low - slope * fewest, 0.0), slope)
