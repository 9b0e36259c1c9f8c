"""Student's t, for intervals of few repeats."""

from __future__ import annotations

__all__ = ["student"]

_POINTS = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% points for 1 to 9 degrees of freedom"""


def student(freedom: int) -> float:
    """The 97.5% point, of a two-sided 95% interval: of the table, then by the first terms of its expansion.

    Args:
        freedom: degrees of freedom, 1 or more: one less than the values of a mean.
    """
    if freedom <= len(_POINTS):
        return _POINTS[freedom - 1]
    # About the normal one.
    return 1.95996 + 2.3723 / freedom + 2.8225 / freedom**2 + 2.5558 / freedom**3
