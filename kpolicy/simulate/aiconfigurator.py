"""A cost table from NVIDIA's measured kernel tables, which the package `aiconfigurator-core` carries.

Its engine names the operators of a step and what each took on the device, alone. Attention operators become the
attention cost, by a fit over batch sizes and lengths; all others are dense work by tokens. Launches are not in these
tables, so host costs, and what capture takes, are those of the analytic table; a table made here says that its kernels
are of published tables (`CostTable.kernel_tables`), and not that it was measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from kpolicy.costs import AttentionCost, CostTable, Curve, analytic_costs
from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.figures import find_device, model_figures
from kpolicy.kv_span import KvSpan
from kpolicy.observe.extras import load

__all__ = ["SYSTEMS", "TableFit", "aiconfigurator_costs"]

SYSTEMS: Mapping[str, str] = MappingProxyType(
    {"H200": "h200_sxm", "H100": "h100_sxm", "A100": "a100_sxm", "B200": "b200_sxm"}
)
"""Devices that there are tables of, and the package's names for them."""

_SIZES = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    320,
    384,
    448,
    512,
    768,
    1024,
    1536,
    2048,
    4096,
    8192,
    16384,
)
_MOST_LOGITS = 512
"""Larger steps are prompts, whose rows mostly want no logits."""
_DECODES = [(rows, length) for rows in (1, 4, 16, 64, 256) for length in (128, 512, 2048, 8192)]
_PREFILLS = [(new, context) for new in (16, 64, 256, 1024, 2048, 8192) for context in (0, 1024, 8192)]

_FITTED = KvSpan(
    decode_row=max(length for _, length in _DECODES),
    decode_step=max(rows * length for rows, length in _DECODES),
    prefill=max(new + context for new, context in _PREFILLS),
)
"""The contexts that attention is fitted over"""


@attrs.frozen(kw_only=True)
class TableFit:
    """How a table was made.

    Args:
        package: the package and its version.
        measured_share: share of the dense time at 64 tokens that comes from measured operators; the package fills in
            the rest by its own formulas.
        decode_error, prefill_error: median relative error of the attention fits.
    """

    package: str
    measured_share: float
    decode_error: float
    prefill_error: float


def aiconfigurator_costs(
    config: str | Path, device: str = "H200", *, backend: str = "vllm", tensor_parallel: int = 1
) -> tuple[CostTable, TableFit]:
    """The cost table of a model on one of `SYSTEMS`.

    Args:
        config: a model's folder, or its ``config.json``.
        device: a name of `SYSTEMS`.
        backend: the serving engine whose kernels were measured: ``vllm``, ``sglang`` or ``trtllm``.
        tensor_parallel: devices that share each layer.

    Raises:
        ConfigError: the package isn't installed, or has no tables for the model or the device.
        SupportError: the model's figures aren't known; see `kpolicy.figures.model_figures`.
    """
    figures, named = model_figures(config), find_device(device)
    name = _system(device)
    engine = _engine(config, name, backend, tensor_parallel)
    dense: list[float] = []
    measured_share = 0.0
    with _quiet():
        for size in _SIZES:
            operators = _dense(engine, size)
            dense.append(1e3 * sum(us for us, _ in operators))
            if size == 64:
                total = sum(us for us, _ in operators)
                measured_share = sum(us for us, source in operators if source == "silicon") / total if total else 0.0
        decode, decode_error = _fitted(_DECODES, lambda rows, length: (rows, rows * length), _decode_us(engine))
        prefill, prefill_error = _fitted(_PREFILLS, _pairs, _prefill_us(engine))
    base = analytic_costs(figures, named.figures)
    package = f"aiconfigurator-core {_version()}"
    curve = Curve(_SIZES, tuple(dense))
    table = attrs.evolve(
        base, version=f"{package}:{figures.name}:{name}:{backend}:tp{tensor_parallel}", kernel_tables=True, full=curve,
        piecewise=curve, eager=curve, decode_attention=decode, prefill_attention=prefill, kv_span=_FITTED,
    )  # fmt: skip
    return table, TableFit(
        package=package, measured_share=measured_share, decode_error=decode_error, prefill_error=prefill_error
    )


def _system(device: str) -> str:
    named = find_device(device)
    for known, system in SYSTEMS.items():
        if find_device(known) is named:
            return system
    raise UnknownNameError("device with measured tables", device, SYSTEMS, "Analytic costs know more devices.")


def _version() -> str:
    from importlib.metadata import version

    return version("aiconfigurator-core")


def _engine(config: str | Path, system: str, backend: str, tensor_parallel: int) -> Any:
    """The package's engine for one model on one system."""
    path = Path(config)
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file() or (path.is_file() and path.name != "config.json"):
        raise ConfigError(
            f"{path}: measured tables take a folder with a config.json in it, or that file itself. Rename the file."
        )
    if tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel is {tensor_parallel}; a model takes at least one device.")
    module = load(
        "aiconfigurator_core.sdk.engine",
        extra="aiconfigurator",
        package="aiconfigurator-core",
        what="--tables aiconfigurator",
    )
    experts = "expert" in (folder / "config.json").read_text(encoding="utf-8")
    given = {"tp_size": tensor_parallel} | ({"moe_tp_size": tensor_parallel} if experts else {})
    try:
        with _quiet():
            return module.EngineHandle.compile(str(folder.resolve()), system, backend, **given)
    except Exception as error:  # noqa: BLE001 - whatever the package raises, its tables can't be used for this
        said = f"{type(error).__name__}: {str(error)[:300].rstrip(' .')}"
        problem = f"it reads {error}, which isn't there" if isinstance(error, KeyError) else said
        raise ConfigError(
            f"aiconfigurator-core has no tables for {path} on {system} with {backend}: {problem}. Leave --tables out "
            "for analytic costs."
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """The package reports each gap in its tables as a log line; what matters of it is in `TableFit`."""
    logger = logging.getLogger("aiconfigurator_core")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _is_attention(name: str) -> bool:
    return "attention" in name or "mla" in name


def _dense(engine: Any, size: int) -> list[tuple[float, str]]:
    """(milliseconds, source) of every operator that works on padded tokens."""
    found = [
        (ms, source)
        for name, ms, _, source in engine.decode_step_per_op(size, 1, 2)
        if not _is_attention(name) and (size <= _MOST_LOGITS or "logits" not in name)
    ]
    if size > _MOST_LOGITS:
        found += [
            (ms, source) for name, ms, _, source in engine.decode_step_per_op(_MOST_LOGITS, 1, 2) if "logits" in name
        ]
    return found


def _decode_us(engine: Any) -> Callable[[int, int], float]:
    def measured(rows: int, length: int) -> float:
        return 1e3 * sum(
            float(ms) for name, ms, *_ in engine.decode_step_per_op(rows, length, 2) if _is_attention(name)
        )

    return measured


def _prefill_us(engine: Any) -> Callable[[int, int], float]:
    def measured(new: int, context: int) -> float:
        context_ops, _ = engine.run_static_per_op(
            batch_size=1, isl=new + context, osl=2, prefix=context, mode="static_ctx"
        )
        return 1e3 * sum(float(ms) for name, ms, *_ in context_ops if _is_attention(name))

    return measured


def _pairs(new: int, context: int) -> tuple[int, int]:
    return new, new * context + new * (new + 1) // 2


def _fitted(
    cases: Sequence[tuple[int, int]], amounts: Callable[[int, int], tuple[int, int]],
    measured: Callable[[int, int], float],
) -> tuple[AttentionCost, float]:  # fmt: skip
    """The attention cost nearest to what was measured, by relative error; and the median of that."""
    import numpy as np

    rows = []
    times = []
    for case in cases:
        us = measured(*case)
        if us > 0:
            rows.append((1.0, *amounts(*case)))
            times.append(us)
    if not times:
        return AttentionCost(), 0.0
    matrix, wanted = np.array(rows), np.array(times)
    scaled = matrix / wanted[:, None]
    keep = [0, 1, 2]
    best = np.zeros(3)
    # Costs aren't negative: what comes out below 0 is left out and the rest fitted again.
    while keep:
        solved = np.linalg.lstsq(scaled[:, keep], np.ones(len(wanted)), rcond=None)[0]
        if (solved >= 0).all():
            best[keep] = solved
            break
        keep.pop(int(np.argmin(solved)))
    error = float(np.median(np.abs(matrix @ best / wanted - 1)))
    return AttentionCost(*map(float, best)), error
