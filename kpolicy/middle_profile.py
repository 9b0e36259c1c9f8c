"""Of several profiles of one model, the middle of each figure.

A virtual machine's host is slow or quick for as long as a calibration takes, and the fixed work noted beside each
sample (`kpolicy.host_speed`) doesn't tell all of it; a single figure may be off besides, such as how much quicker
pieces in a row are. So ``kpolicy calibrate --repeats 3`` calibrates several times, in processes of their own, and
writes the median of every figure, once all tables are brought to the middle one's host speed. What it is worth,
docs/measured_fidelity.md shows.

Curves are taken at every size that one of them has and all of them span. Of the host's times to launch, the median is
that of steps of decodes, of a prompt and of both, which were measured; their parts, which weren't, are made of it.
Attention's parts are one fit, in which one may stand for another: where their medians together are above or below all
tables, it is one table's whole. What some tables lack is the middle of those that have it. Of what their servings
noted of the host's speed all is kept, one behind the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kpolicy.costs import MIDDLE_OF, AttentionCost, CostTable, Curve, HostCost
from kpolicy.errors import ProfileError
from kpolicy.kv_span import KvSpan
from kpolicy.schemas import Profile
from kpolicy.served_host import ServedHost

__all__ = ["launching_us", "middle"]

_ROWS_AND_KV = ((1, 64), (1, 4096), (8, 1024), (64, 64), (64, 1024), (512, 512), (512, 4096))
"""Decode rows and the KV tokens of each, or tokens of a prompt's chunk and those that it attends to"""
_PAIRS = (
    ("overlap_cost", "decode_slowdown"), ("one_row_overlap", "one_row_slowdown"),
    ("many_rows_overlap", "many_rows_slowdown"),
)  # fmt: skip
"""Figures that are told together"""
_BEYOND = 0.01
"""Share of a time by which it may be outside all tables'"""


def launching_us(costs: CostTable, like: CostTable) -> float:
    """Microseconds of the host for an eager prompt and a decode in pieces, at another table's host speed."""
    costs = _at_speed_of(costs, like.host_work_us, like.host_work_inside_us)
    return costs.host_eager.base_for(decodes=False, prefills=True) + costs.host_piecewise.base_for(
        decodes=True, prefills=False
    )


def middle(profiles: Sequence[Profile], command: str = "") -> Profile:
    """The profile of each figure's middle; `command` is what made it.

    Raises:
        ProfileError: they aren't of one model, device and split, say unlike bytes of KV a token, were measured by other
            versions or another fixed work, note their host's speed in part only, or have curves without a size in
            common.
    """
    if not profiles:
        raise ProfileError("there is no profile to take the middle of; give one or more.")
    first = profiles[0]
    for i, profile in enumerate(profiles):
        for name in ("device", "model", "model_shape", "tensor_parallel_size", "versions"):
            mine, its = getattr(profile, name), getattr(first, name)
            if mine != its:
                raise ProfileError(
                    f"profile {i + 1} has {name} {mine}, the first {its}; give profiles of one model on one device by "
                    "one version."
                )
        for name in ("host_work_us", "host_work_inside_us"):
            mine, its = getattr(profile.costs, name), getattr(first.costs, name)
            if bool(mine) != bool(its):
                raise ProfileError(f"profile {i + 1} has {name} {mine:g}, the first {its:g}; calibrate all alike.")
    kv_bytes = [profile.kv_bytes_per_token for profile in profiles if profile.kv_bytes_per_token is not None]
    if len({*kv_bytes}) > 1:
        raise ProfileError(
            f"kv_bytes_per_token is {', '.join(map(str, kv_bytes))}; give profiles whose models keep their KV alike."
        )
    tables = [profile.costs for profile in profiles]
    work_us = statistics.median(costs.host_work_us for costs in tables)
    inside_us = statistics.median(costs.host_work_inside_us for costs in tables)
    version = f"{MIDDLE_OF}{len(tables)}: " + "; ".join(costs.version for costs in tables)
    alike = [attrs.evolve(_at_speed_of(costs, work_us, inside_us), version=version) for costs in tables]
    costs: CostTable = _middle([attrs.evolve(costs, ties=None) for costs in alike], "costs")
    decided: CostTable = _middle([costs.deciding for costs in alike], "costs")
    costs = costs.decided_by({name: getattr(decided, name) for name in ("full", "piecewise", "eager", "mixed")})
    return attrs.evolve(
        first, costs=costs, command=command, measured_at=max(profile.measured_at for profile in profiles),
        kv_bytes_per_token=kv_bytes[0] if kv_bytes else None,
    )  # fmt: skip


def _at_speed_of(costs: CostTable, work_us: float, inside_us: float) -> CostTable:
    """The table at a host's speed: by the work inside steps, where it was noted by both, which says more."""
    return costs.at_host_speed(costs.host_work_of(inside_us) or work_us)


def _middle(values: Sequence[Any], name: str) -> Any:
    """The middle of a figure, or of each figure of a part of the table; texts and flags must agree."""
    known = [value for value in values if value is not None]
    if not known:
        return values[0]
    first = known[0]
    if isinstance(first, Curve):
        return _curve(known, name)
    if isinstance(first, HostCost):
        return _host(known)
    if isinstance(first, AttentionCost):
        return _attention(known)
    if isinstance(first, KvSpan):
        # What not all of them were timed at is outside.
        return KvSpan(*map(min, zip(*map(attrs.astuple, known), strict=True)))
    if isinstance(first, ServedHost):
        return ServedHost.middle(known)
    if attrs.has(type(first)):
        fields = [field.name for field in attrs.fields(type(first))]
        found = {each: _middle([getattr(value, each) for value in known], each) for each in fields}
        for cost, slowdown in _PAIRS:
            if cost in found:
                found[cost], found[slowdown] = _pair([(getattr(each, cost), getattr(each, slowdown)) for each in known])
        return attrs.evolve(first, **found)
    if isinstance(first, tuple):
        return tuple(_middle(each, name) for each in zip(*known, strict=True))
    if isinstance(first, (bool, str, Mapping)):
        if any(value != first for value in known):
            raise ProfileError(f"{name} is {', '.join(map(repr, known))}; give profiles that were measured alike.")
        return first
    found = statistics.median(known)
    return round(found) if isinstance(first, int) else found


def _pair(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[float | None, float | None]:
    """The middle of what overlapping costs and of the slowdown, of those with both or of those with the first alone.

    Which of them more are, as a cost by itself means something else.
    """
    both = [pair for pair in pairs if pair[0] is not None and pair[1] is not None]
    alone = [cost for cost, slowdown in pairs if cost is not None and slowdown is None]
    if len(both) >= len(alone) and both:
        costs, slowdowns = zip(*both, strict=True)
        return statistics.median(costs), statistics.median(slowdowns)
    return (statistics.median(alone) if alone else None), None


def _curve(curves: Sequence[Curve], name: str) -> Curve:
    """The middle at each size that one has and all span."""
    sizes = sorted({size for curve in curves for size in curve.sizes if all(each.spans(size) for each in curves)})
    if not sizes:
        spans = "; ".join(f"{curve.sizes[0]} to {curve.sizes[-1]}" for curve in curves)
        raise ProfileError(f"the curves of {name} have no size in common: {spans}. Calibrate each for as long.")
    return Curve(sizes, [statistics.median(curve.at(size) for curve in curves) for size in sizes])


def _attention(costs: Sequence[AttentionCost]) -> AttentionCost:
    """The middle of each part, if at usual rows and KV it lies among the tables; else the table's in the middle."""

    def us(cost: AttentionCost) -> list[float]:
        return [
            cost.base_us + cost.row_us * rows + cost.unit_us * rows * kv + cost.kv_us * kv
            for rows, kv in _ROWS_AND_KV
        ]  # fmt: skip

    parts = zip(*map(attrs.astuple, costs), strict=True)
    found = AttentionCost(*(statistics.median(part) for part in parts))
    among = zip(us(found), *map(us, costs), strict=True)
    if all(min(each) * (1 - _BEYOND) <= at <= max(each) * (1 + _BEYOND) for at, *each in among):
        return found
    return sorted(costs, key=lambda cost: sum(us(cost)))[(len(costs) - 1) // 2]


def _host(costs: Sequence[HostCost]) -> HostCost:
    """The middle for steps of decodes, of a prompt and of both."""
    decodes, prompt, both = (
        statistics.median(cost.base_for(decodes=decodes, prefills=prefills) for cost in costs)
        for decodes, prefills in ((True, False), (False, True), (True, True))
    )
    common = min(max(decodes + prompt - both, 0.0), decodes, prompt)
    return HostCost(common, statistics.median(cost.req_us for cost in costs), decodes - common, prompt - common)
