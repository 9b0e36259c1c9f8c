"""Which sizes SGLang captures under kpolicy: few, and decode up to the most requests that may run."""

from __future__ import annotations

from kpolicy_sglang.config import Config

__all__ = ["USUAL_MOST_REQS", "decode_sizes", "default_decode_sizes", "default_prefill_sizes", "prefill_sizes"]

USUAL_MOST_REQS = 1024
"""Largest decode size where SGLang wasn't told how many requests may run, and has graphs to `_LARGE_GPU` itself."""
_LARGE_GPU = 256
"""SGLang's own largest decode size from 60 GiB of memory on. Smaller GPUs keep theirs: nothing was measured there."""
_DECODE = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768)
"""Up to 256, where SGLang has graphs too, no batch pads by more than half or 31 rows; a row takes about 3 us there."""
_PREFILL = (64, 96, 128, 256, 512, 576, 768)
_SMALL = (*range(4, 33, 4), 48)
"""SGLang's own below 64: where its limit of twice the tokens decides, a prompt of 31 may not pad to 64."""
_FINE, _LARGE, _LARGE_STEP = range(1024, 4097, 256), 4608, 512
"""Launching a small prompt takes the host longer than the device whatever the tokens, so that padding is cheap below
512; 96 and 576 are for chunks of 64 and 512 beside some decode rows. From 1,024 on padding costs what its tokens do,
and sizes are SGLang's own. The largest save the device little; but an eager step takes the host 10 ms, in which the
scheduler does nothing else."""


def default_decode_sizes(most_reqs: int) -> tuple[int, ...]:
    """Decode sizes in requests, up to and with `most_reqs`."""
    step = 256
    beyond = range(_DECODE[-1] + step, most_reqs, step)
    return (*(size for size in (*_DECODE, *beyond) if size < most_reqs), most_reqs)


def default_prefill_sizes(most_tokens: int, *, by_cost: bool = True) -> tuple[int, ...]:
    """Prefill sizes in tokens, up to and with `most_tokens`.

    Args:
        most_tokens: the most that a step may have.
        by_cost: whether costs decide what pads to them; otherwise SGLang's limit on padding does.
    """
    large = range(_LARGE, most_tokens, _LARGE_STEP)
    sizes = (*(() if by_cost else _SMALL), *_PREFILL, *_FINE, *large)
    return (*(size for size in sizes if size < most_tokens), most_tokens)


def decode_sizes(config: Config, most_reqs: int | None, sglang_most: int) -> tuple[int, ...]:
    """Decode sizes that the settings ask for.

    Args:
        config: the settings; sizes in them go before a plan's, and those before the default ones.
        most_reqs: the most requests that may run, where SGLang was told.
        sglang_most: the largest size that SGLang itself would capture.

    Raises:
        SchemaError: the plan can't be read.
    """
    given = config.decode_sizes
    if given is None and config.plan is not None:
        given = tuple(size // _plan(config).settings.query_len for size in _plan(config).sizes.decode)
    if given is None:
        usual = max(sglang_most, USUAL_MOST_REQS) if sglang_most >= _LARGE_GPU else sglang_most
        return default_decode_sizes(most_reqs or usual)
    return tuple(size for size in given if most_reqs is None or size <= most_reqs) or given[:1]


def prefill_sizes(config: Config, most_tokens: int, *, by_cost: bool = True) -> tuple[int, ...]:
    """Prefill sizes that the settings ask for, none over `most_tokens`.

    Args:
        config: the settings.
        most_tokens: the most that a step may have.
        by_cost: see `default_prefill_sizes`.

    Raises:
        SchemaError: the plan can't be read.
    """
    given = config.piecewise_sizes
    if given is None and config.plan is not None:
        sizes = _plan(config).sizes
        given = sizes.piecewise or sizes.mixed
    if not given:
        return default_prefill_sizes(most_tokens, by_cost=by_cost)
    fitting = tuple(size for size in given if size <= most_tokens)
    return fitting or default_prefill_sizes(most_tokens, by_cost=by_cost)


def _plan(config: Config):  # type: ignore[no-untyped-def]  # read on first use
    from kpolicy.schemas import read_plan

    assert config.plan is not None  # noqa: S101
    return read_plan(config.plan)
