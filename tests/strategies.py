"""The strategies that the package ships, under the name tests use."""

from kpolicy.testing.strategies import claims, contexts, cost_tables, ladders, settings, shapes, sizes

__all__ = ["claims", "contexts", "cost_tables", "ladders", "settings", "shapes", "sizes"]
