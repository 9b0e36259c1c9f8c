"""Which sizes SGLang captures under kpolicy: its own, and on large GPUs decode up to the requests that may run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kpolicy.errors import ConfigError
from kpolicy_sglang.config import Config

__all__ = ["USUAL_MOST_REQS", "decode_sizes", "default_decode_sizes", "default_prefill_sizes", "prefill_sizes"]

USUAL_MOST_REQS = 1024
"""Largest decode size where SGLang has graphs to `_LARGE_GPU` itself, however many requests may run.

SGLang sets memory aside by the largest size: at 4,096 requests it would be 8 GiB.
"""
_LARGE_GPU = 256
"""SGLang's own largest decode size from 60 GiB of memory on. Smaller GPUs keep theirs: nothing was measured there."""
_FEW = (64, 256)
"""Prefill sizes in tokens where SGLang has no such graphs, and each twice the last from there on."""
_ABOVE = (384, 512, 768)
"""Decode sizes above SGLang's own, and every 256 requests from here on: SGLang has no graph there at all. They are far
apart, since each takes memory by its rows; a row of padding takes about 2 us where an eager step takes 10 ms more."""


_LACKS = "{plan} has no sizes of {phase}. Plan with another --policy, or give some in {setting}."


def default_decode_sizes(stock: Sequence[int], most_reqs: int) -> tuple[int, ...]:
    """Decode sizes in requests, up to and with `most_reqs`: SGLang's own, so that no batch pads further, and above.

    Args:
        stock: SGLang's own sizes, rising; may be empty.
        most_reqs: the most requests that may run.
    """
    largest = stock[-1] if stock else 0
    above = [size for size in (*_ABOVE, *range(_ABOVE[-1] + 256, most_reqs, 256)) if size > largest]
    return (*(size for size in (*stock, *above) if size < most_reqs), most_reqs)


def default_prefill_sizes(stock: Sequence[int], most_tokens: int, *, few: bool = False) -> tuple[int, ...]:
    """Prefill sizes in tokens, up to and with `most_tokens`: SGLang's own.

    Prompts pad by what it costs, and where costs can't be had SGLang's rule of twice the tokens is over its own sizes.

    Args:
        stock: SGLang's own sizes, rising; may be empty.
        most_tokens: the most that a step may have.
        few: where SGLang itself would run every prompt eagerly no prompt loses by padding, and each graph makes the
            start longer: of its sizes `_FEW`, and from there on powers of two.
    """
    if few:
        stock = [size for size in stock if size in _FEW or (size > _FEW[-1] and size.bit_count() == 1)]
    return (*(size for size in stock if size < most_tokens), most_tokens)


def decode_sizes(
    config: Config, stock: Sequence[int], most_reqs: int | None, sglang_most: int, *, model: Any = None
) -> tuple[int, ...]:  # fmt: skip
    """Decode sizes that the settings ask for.

    Args:
        config: the settings; sizes in them go before a plan's, and those before the default ones.
        stock: SGLang's own sizes, rising.
        most_reqs: the most requests that may run, where SGLang was told.
        sglang_most: the largest size that SGLang itself would capture.
        model: the model's config, which a plan is held to; None where it isn't known.

    Raises:
        ConfigError: the plan can't be read, is another model's, or has no decode sizes.
    """
    given = config.decode_sizes
    if given is None and config.plan is not None:
        plan = _plan(config.plan, model)
        given = tuple(size // plan.settings.query_len for size in plan.sizes.decode)
        if not given:
            raise ConfigError(_LACKS.format(plan=config.plan, phase="decodes", setting="KPOLICY_DECODE_SIZES"))
    if given is None:
        usual = max(sglang_most, USUAL_MOST_REQS) if sglang_most >= _LARGE_GPU else sglang_most
        return default_decode_sizes(stock, min(most_reqs or usual, usual))
    return tuple(size for size in given if most_reqs is None or size <= most_reqs) or given[:1]


def prefill_sizes(
    config: Config, stock: Sequence[int], most_tokens: int, *, few: bool = False, model: Any = None
) -> tuple[int, ...]:  # fmt: skip
    """Prefill sizes that the settings ask for, none over `most_tokens`.

    Args:
        config: the settings.
        stock: SGLang's own sizes, rising.
        most_tokens: the most that a step may have.
        few: whether SGLang itself has no prefill graphs for this model.
        model: as of `decode_sizes`.

    Raises:
        ConfigError: as there, or all of them are over that.
    """
    given = config.piecewise_sizes
    if given is None and config.plan is not None:
        sizes = _plan(config.plan, model).sizes
        given = sizes.piecewise or sizes.mixed
        if not given:
            raise ConfigError(_LACKS.format(plan=config.plan, phase="prompts", setting="KPOLICY_PIECEWISE_SIZES"))
    if given is None:
        return default_prefill_sizes(stock, most_tokens, few=few)
    fitting = tuple(size for size in given if size <= most_tokens)
    if not fitting:
        raise ConfigError(
            f"the smallest size of prompts is {given[0]:,} tokens, and a step has {most_tokens:,} at most. Give a "
            "smaller one, or SGLang a larger --chunked-prefill-size."
        )
    return fitting


def _plan(path: str, model: Any):  # type: ignore[no-untyped-def]  # read on first use
    """The plan, held to the model.

    Raises:
        ConfigError: it can't be read, or is another model's.
    """
    from kpolicy.schemas import read_plan

    return read_plan(path, model)
