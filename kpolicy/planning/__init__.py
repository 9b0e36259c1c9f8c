"""Ladders for a histogram of steps under a budget: which sizes to capture, exactly, and what one more would save.

numpy loads on first use.
"""

from kpolicy.planning.choose import Choice, choose, frontiers, joint_curve
from kpolicy.planning.ladder import Ladder, aligned_sizes, tied
from kpolicy.planning.solve import Frontier, frontier

__all__ = [
    "Choice",
    "Frontier",
    "Ladder",
    "aligned_sizes",
    "choose",
    "frontier",
    "frontiers",
    "joint_curve",
    "tied",
]
