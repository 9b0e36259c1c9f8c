"""kpolicy decides, batch by batch, how a captured-graph LLM step runs, and says why.

::

    from kpolicy import BatchShape, Engine

    engine = Engine(policy="auto", attention="gqa")
    print(engine.decide(BatchShape.decode(9)))
    print(engine.explain(BatchShape(decodes=[(1, 32)], prefills=[(512, 0)])))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kpolicy.attention import AttentionSupport, Claims
    from kpolicy.budgets import Budget
    from kpolicy.costs import CostTable
    from kpolicy.decision import Decision, Launch
    from kpolicy.engine import Engine
    from kpolicy.errors import KPolicyError
    from kpolicy.executors.base import StepInputs, StepOutputs
    from kpolicy.explain import Explanation
    from kpolicy.keys import GraphKey
    from kpolicy.ladders import CaptureSizes
    from kpolicy.modes import Mode
    from kpolicy.reasons import Basis, Reason
    from kpolicy.registry import GraphRegistry
    from kpolicy.serving.hf_model import LoadedModel as LoadedModel
    from kpolicy.serving.load import load as load
    from kpolicy.settings import Objective, Settings
    from kpolicy.shapes import BatchNumbers, BatchShape

__version__ = "0.1.0"

__all__ = [
    "AttentionSupport",
    "Basis",
    "BatchNumbers",
    "BatchShape",
    "Budget",
    "CaptureSizes",
    "Claims",
    "CostTable",
    "Decision",
    "Engine",
    "Explanation",
    "GraphKey",
    "GraphRegistry",
    "KPolicyError",
    "Launch",
    "Mode",
    "Objective",
    "Reason",
    "Settings",
    "StepInputs",
    "StepOutputs",
]

_WHERE = {
    "AttentionSupport": "attention.support",
    "Basis": "reasons",
    "BatchNumbers": "shapes",
    "BatchShape": "shapes",
    "Budget": "budgets",
    "CaptureSizes": "ladders",
    "Claims": "attention.support",
    "CostTable": "costs",
    "Decision": "decision",
    "Engine": "engine",
    "Explanation": "explain",
    "GraphKey": "keys",
    "GraphRegistry": "registry",
    "KPolicyError": "errors",
    "Launch": "decision",
    "Mode": "modes",
    "Objective": "settings",
    "Reason": "reasons",
    "Settings": "settings",
    "StepInputs": "executors.base",
    "StepOutputs": "executors.base",
}


_WITH_TORCH = {"LoadedModel": "serving.hf_model", "load": "serving.load"}
"""Names that need the extra `models`. They aren't in `__all__`, so that a star import works without it."""


def __getattr__(name: str) -> Any:
    # Loaded on first use: `import kpolicy` in a process that only wants one of these should cost one of these.
    where = _WHERE.get(name) or _WITH_TORCH.get(name)
    if where is None:
        raise AttributeError(f"module 'kpolicy' has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f"kpolicy.{where}")
    except ModuleNotFoundError as error:
        if name not in _WITH_TORCH:
            raise
        from kpolicy.errors import ConfigError

        raise ConfigError(
            f"kpolicy.{name} needs {error.name}, which isn't installed. Run: pip install 'kpolicy[models]'."
        ) from None
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_WITH_TORCH})
