"""Ladders for a histogram of steps under a budget: which sizes to capture, exactly, and what one more would save.

numpy loads on first use.
"""

from kpolicy.planning.choose import Choice, choose, frontiers, joint_curve
from kpolicy.planning.histogram import Histogram
from kpolicy.planning.ladder import Ladder, aligned_sizes, tied
from kpolicy.planning.plan import Plan, Replayed, Round, fixed_point, plan
from kpolicy.planning.solve import Frontier, frontier
from kpolicy.planning.workload import Layout, Workload

__all__ = [
    "Choice",
    "Frontier",
    "Histogram",
    "Ladder",
    "Layout",
    "Plan",
    "Replayed",
    "Round",
    "Workload",
    "aligned_sizes",
    "choose",
    "fixed_point",
    "frontier",
    "frontiers",
    "joint_curve",
    "plan",
    "tied",
]
