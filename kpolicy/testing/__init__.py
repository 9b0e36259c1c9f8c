"""Contract suites that any policy or executor must pass, ours and other packages' alike.

A plugin's own tests run them like this::

    import pytest
    from kpolicy.testing import EXECUTOR_CHECKS, POLICY_CHECKS

    @pytest.mark.parametrize("check", POLICY_CHECKS, ids=lambda check: check.__name__)
    def test_policy(check):
        check(MyPolicy)

    @pytest.mark.parametrize("check", EXECUTOR_CHECKS, ids=lambda check: check.__name__)
    def test_executor(check):
        check(MyExecutor)

The policy suite needs the `testing` extra (hypothesis); nothing is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kpolicy.testing.executors import EXECUTOR_CHECKS
    from kpolicy.testing.policies import POLICY_CHECKS
    from kpolicy.testing.ranks import ThreadCommunicator, run_ranks
    from kpolicy.testing.sequences import Sequences

__all__ = ["EXECUTOR_CHECKS", "POLICY_CHECKS", "Sequences", "ThreadCommunicator", "run_ranks"]

_MODULES = {
    "EXECUTOR_CHECKS": "executors",
    "POLICY_CHECKS": "policies",
    "Sequences": "sequences",
    "ThreadCommunicator": "ranks",
    "run_ranks": "ranks",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"kpolicy.testing.{_MODULES[name]}"), name)
