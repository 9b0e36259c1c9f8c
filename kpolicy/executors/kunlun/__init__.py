"""Kunlun cards through torch_xmlir: `KunlunExecutor`, and `proven`, which finds out what may be captured.

Unverified on hardware.
"""

from kpolicy.executors.kunlun.adapter import KunlunAdapter
from kpolicy.executors.kunlun.executor import KunlunExecutor, proven
from kpolicy.executors.kunlun.trial import Trial

__all__ = ["KunlunAdapter", "KunlunExecutor", "Trial", "proven"]
