"""What attention lets be captured: claims, their meet over a model's layers, and the data behind them.

The tables of backends and model families load on first use, so the decision core doesn't pay for them.
"""

from typing import TYPE_CHECKING, Any

from kpolicy.attention.support import (
    ANY_QUERY_LEN,
    AttentionSupport,
    Claims,
    HostParams,
    LayerKind,
    Origin,
    SupportLevel,
    parse_attention,
)

if TYPE_CHECKING:
    from kpolicy.attention.backends import backend_support
    from kpolicy.attention.hf import from_hf_config, layer_kinds, register_architecture

__all__ = [
    "ANY_QUERY_LEN",
    "AttentionSupport",
    "Claims",
    "HostParams",
    "LayerKind",
    "Origin",
    "SupportLevel",
    "backend_support",
    "from_hf_config",
    "layer_kinds",
    "parse_attention",
    "register_architecture",
]

_LAZY = {
    "backend_support": "kpolicy.attention.backends",
    "from_hf_config": "kpolicy.attention.hf",
    "layer_kinds": "kpolicy.attention.hf",
    "register_architecture": "kpolicy.attention.hf",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)
