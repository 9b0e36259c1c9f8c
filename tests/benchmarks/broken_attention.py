"""A model whose attention breaks once it is loaded, in the kernels that serve: what `benchmarks.gpu.correct` must see.

Loading holds a model to its class's own forward, so what is broken before that is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from benchmarks.gpu import correct

if TYPE_CHECKING:
    import pytest

BREAKS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "intact": lambda spec, query: (spec, query),
    "queries are zero": lambda spec, query: (spec, query.new_zeros(query.shape)),
    "scores are 1.3 times too large": lambda spec, query: (attrs.evolve(spec, scale=1.3 * spec.scale), query),
}
"""What kernels take instead of a layer's description and its queries"""


def break_after_loading(patch: pytest.MonkeyPatch, how: str) -> list[str]:
    """Let `correct` load models whose kernels are broken then; the kernels' names, as models are loaded."""
    load, broken = correct.load_model, []

    def loaded(*given: Any, **named: Any) -> Any:
        model = load(*given, **named)
        kind = type(model.layers[0].kernels)
        for name in ("attend", "attend_latents"):
            patch.setattr(kind, name, _broken(getattr(kind, name), BREAKS[how]))
        broken.append(model.layers[0].kernels.name)
        return model

    patch.setattr(correct, "load_model", loaded)
    return broken


def _broken(intact: Callable[..., Any], breaks: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    def attend(self: Any, step: Any, spec: Any, query: Any, *rest: Any) -> Any:
        return intact(self, step, *breaks(spec, query), *rest)

    return attend
