"""What a device is thought to allow: budgets with what one graph costs under them, and where both come from.

No budget model here was checked on the hardware that it speaks of: a model is advice before a capture; what a capture
measured is what the registry counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real

import attrs

from kpolicy.budgets import Budget, Usage, check_amount, sample_sizes
from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part

__all__ = [
    "DEFAULT_SIZES",
    "AscendParallel",
    "AscendStack",
    "BudgetModel",
    "ModelShape",
    "ascend_budget",
    "ascend_stream_budget",
    "cuda_budget",
]


@attrs.frozen
class BudgetModel:
    """A budget, what one graph costs under it, and where that comes from.

    Args:
        name: what to call it.
        budget: the limits.
        full: what one FULL key costs.
        piecewise: what one PIECEWISE key costs.
        num_sizes: most capture sizes that PIECEWISE graphs may have; None for as many as the budget admits.
        source: where the limits are written, and what wasn't verified.
    """

    name: str
    budget: Budget
    full: Usage
    piecewise: Usage
    source: str
    num_sizes: int | None = None

    def cost_of(self, key: GraphKey) -> Usage:
        """What capturing that key is expected to cost."""
        return self.full if key.part is Part.FULL else self.piecewise

    def keep(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The PIECEWISE capture sizes that the model leaves of a list; all of them where it names no number."""
        return tuple(sizes) if self.num_sizes is None else sample_sizes(sizes, self.num_sizes)


def cuda_budget(
    free_bytes: int,
    share: float = 0.1,
    *,
    graph_bytes: tuple[int, int] = (0, 0),
    capture_us: tuple[float, float] = (0.0, 0.0),
) -> BudgetModel:
    """CUDA bounds graphs by memory only: a share of what is free before the KV cache is sized.

    Args:
        free_bytes: free device memory.
        share: what part of it graphs may take. The default is kpolicy's own choice, not a figure of the device.
        graph_bytes: bytes a graph by part, (FULL, PIECEWISE), as `CostTable.graph_bytes` has them.
        capture_us: microseconds a capture by part, as `CostTable.capture_us` has them.

    Raises:
        ConfigError: free_bytes is negative, or the share isn't above 0 and at most 1.
    """
    check_amount("free_bytes", free_bytes, whole=True)
    if not isinstance(share, Real) or isinstance(share, bool) or not 0 < share <= 1:
        raise ConfigError(f"share is {share!r}; it is the part of free memory that graphs may take, over 0 to 1.")
    full, piecewise = (
        Usage(1, 1, size, us / 1e6) for size, us in zip(graph_bytes, capture_us, strict=True)
    )  # fmt: skip
    return BudgetModel(
        "cuda",
        Budget(bytes=int(free_bytes * share)),
        full,
        piecewise,
        f"{share:g} of the free device memory given; graph costs as given, to be replaced by what captures measure",
    )


@attrs.frozen(kw_only=True)
class ModelShape:
    """What of a model the Ascend stream formula reads.

    Args:
        num_layers: decoder layers, L.
        moe: whether it has expert layers.
        draft_layers: all layers of a draft model, multi-token-prediction layers included; 0 without one (drafting by
            n-grams or suffixes has none).

    Raises:
        ConfigError: a count is out of range.
    """

    num_layers: int
    moe: bool = False
    draft_layers: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("num_layers", "draft_layers"):
            check_amount(name, getattr(self, name), whole=True)
        if self.num_layers < 1:
            raise ConfigError(
                f"num_layers is {self.num_layers} and draft_layers {self.draft_layers}; they start at 1 and 0."
            )

    @property
    def pieces(self) -> int:
        """Graphs that one PIECEWISE capture size takes, R: L + 1, and as much again for the draft model's layers."""
        return self.num_layers + 1 + (self.draft_layers + 1 if self.draft_layers else 0)


@attrs.frozen(kw_only=True)
class AscendParallel:
    """How a model is spread, as far as the Ascend stream formula reads it. Pipeline parallelism doesn't count.

    Args:
        dp: data-parallel ranks.
        tp: tensor-parallel ranks.
        ep: whether experts are spread over ranks.
        pcp: prefill-context-parallel ranks.
        dcp: decode-context-parallel ranks.
        aiv: whether collectives are expanded on vector cores (``HCCL_OP_EXPANSION_MODE=AIV``).
        shared_expert_stream: whether shared experts run on a stream of their own.

    Raises:
        ConfigError: a number of ranks is under 1.
    """

    dp: int = 1
    tp: int = 1
    ep: bool = False
    pcp: int = 1
    dcp: int = 1
    aiv: bool = False
    shared_expert_stream: bool = False

    def __attrs_post_init__(self) -> None:
        for name in ("dp", "tp", "pcp", "dcp"):
            check_amount(name, getattr(self, name), whole=True)
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a number of ranks starts at 1.")

    @property
    def groups(self) -> int:
        """Communication groups that the formula counts, g."""
        return (self.dp > 1) + (self.tp > 1)


DEFAULT_SIZES = 51
"""Sizes of the default list up to 512 that the formula's worked values are for: 1, 2, 4, by 8 to 256, by 16 to 512."""
_STREAMS = 1800  # 2048 streams less 248 that the stack keeps for itself
_GROUP_RESERVE = 40
_CONTEXT_PARALLEL_RESERVE = 100
_BOTH = frozenset(Part)


def ascend_stream_budget(
    model: ModelShape,
    parallel: AscendParallel,
    *,
    num_sizes: int = DEFAULT_SIZES,
    parts: Iterable[Part] = (Part.PIECEWISE,),
) -> BudgetModel:
    """The stream formula of older Ascend stacks, in its last form before vllm-ascend removed it (#9962).

    Where PIECEWISE graphs are captured, `BudgetModel.num_sizes` is the largest number N of sizes that it admits; at N
    of 1 or less the rule still kept the largest size. It never ran for FULL graphs alone, which it leaves unbounded.

    Args:
        model: the model.
        parallel: how it is spread.
        num_sizes: capture sizes wanted; each takes one stream more where FULL graphs are captured beside pieces.
        parts: what is captured.

    Raises:
        ConfigError: num_sizes is negative, or `parts` isn't parts.
    """
    check_amount("num_sizes", num_sizes, whole=True)
    captured = _parts(parts)
    pieces, groups = model.pieces, parallel.groups
    if Part.PIECEWISE not in captured:
        return BudgetModel("ascend streams", Budget(), Usage(1, 1), Usage(pieces, pieces), _LEGACY_SOURCE)
    full_streams = min(num_sizes, _STREAMS) if captured == _BOTH else 0
    streams = _STREAMS - full_streams
    if parallel.aiv:
        per_piece = 1 + groups + parallel.ep + parallel.shared_expert_stream
        if model.moe:
            per_piece += parallel.dp > 1
        else:
            streams -= per_piece * pieces  # kept back for all-reduce
    else:
        streams -= _CONTEXT_PARALLEL_RESERVE * ((parallel.pcp > 1) + (parallel.dcp > 1)) + _GROUP_RESERVE * groups
        per_piece = 1 + 2 * groups
    size_streams = pieces * per_piece
    return BudgetModel(
        "ascend streams",
        Budget(streams=max(0, streams) + full_streams),
        Usage(1, 1),
        Usage(pieces, size_streams),
        _LEGACY_SOURCE,
        streams // size_streams,
    )


def _parts(parts: Iterable[Part]) -> frozenset[Part]:
    # Letters of one part's name would be no part, and leave what is captured unbounded.
    found = [] if isinstance(parts, str) else list(parts)
    if not found or not all(isinstance(part, Part) for part in found):
        raise ConfigError(f"parts is {parts!r}; give what is captured, such as (Part.PIECEWISE,).")
    return frozenset(found)


_LEGACY_SOURCE = (
    "vllm-ascend's update_aclgraph_sizes before #9962 (2026-06): 2048 streams less 248; empirical by its authors' own "
    "word; unverified on hardware"
)
_RELEASE_SOURCE = (
    "vllm-ascend v0.21.0rc1 release notes: about {graphs} graphs on {soc} with HDK >= 25.5.1 and CANN >= 8.5.0; "
    "unverified on hardware"
)
_SAMPLED_SOURCE = "; PIECEWISE sizes sampled to 4 on Ascend 950 (vllm-ascend #10567, marked temporary)"
# "About 32K" and "about 64K": read as thousands, the smaller of the two readings.
_STACK_GRAPHS = {"A3": 32_000, "950": 64_000}
_SAMPLED_ON_950 = 4
_SOCS = ("950", "A2", "A3")


@attrs.frozen(kw_only=True)
class AscendStack:
    """The device and software versions under an Ascend process. An unknown version is taken as an old one.

    Args:
        soc: ``"A2"``, ``"A3"`` or ``"950"`` (which vllm-ascend calls A5).
        hdk: driver and firmware kit version, for example ``"25.5.1"``; None where it isn't known.
        cann: toolkit version, for example ``"8.5.0"`` or ``"8.2.RC1"``; None where it isn't known.

    Raises:
        UnknownNameError: no device generation has that name.
        ConfigError: a version doesn't start with a number.
    """

    soc: str
    hdk: str | None = None
    cann: str | None = None

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "soc", "950" if self.soc.upper() == "A5" else self.soc.upper())
        if self.soc not in _SOCS:
            raise UnknownNameError("Ascend device generation", self.soc, _SOCS)
        for name in ("hdk", "cann"):
            version = getattr(self, name)
            if version is not None and not version.partition(".")[0].isdecimal():
                raise ConfigError(f"{name} is {version!r}; a version looks like 25.5.1 or 8.2.RC1.")

    @property
    def lifted(self) -> bool:
        """Whether the stack has the ceiling of newer stacks: HDK of at least 25.5.1 and CANN of at least 8.5.0."""
        return _at_least(self.hdk, (25, 5, 1)) and _at_least(self.cann, (8, 5, 0))


def _at_least(version: str | None, least: tuple[int, ...]) -> bool:
    """Whether a version is that or newer. A release candidate is older than its release."""
    if version is None:
        return False
    parts = version.split(".")
    numbers: list[int] = []
    for part in parts:
        if not part.isdecimal():
            break
        numbers.append(int(part))
    prerelease = len(numbers) < len(parts)
    padded = (*numbers, *[0] * (len(least) - len(numbers)))
    return padded > least if prerelease else padded >= least


def ascend_budget(
    stack: AscendStack,
    model: ModelShape,
    parallel: AscendParallel,
    *,
    num_sizes: int = DEFAULT_SIZES,
    parts: Iterable[Part] = (Part.PIECEWISE,),
) -> BudgetModel:
    """The budget of an Ascend stack: the graphs that newer ones allow, or the stream formula of older ones.

    An A2 is always held to the formula: the release notes give newer figures for A3 and 950 only.

    Args:
        stack: device and software versions.
        model: the model.
        parallel: how it is spread; newer stacks don't read it.
        num_sizes: capture sizes wanted; newer stacks don't read it.
        parts: what is captured.
    """
    captured = _parts(parts)
    if stack.lifted and stack.soc in _STACK_GRAPHS:
        graphs = _STACK_GRAPHS[stack.soc]
        found = BudgetModel(
            f"ascend {stack.soc}",
            Budget(graphs=graphs),
            Usage(1, 1),
            Usage(model.pieces, model.pieces),
            _RELEASE_SOURCE.format(graphs=f"{graphs // 1000}K", soc=stack.soc),
        )
    else:
        found = ascend_stream_budget(model, parallel, num_sizes=num_sizes, parts=captured)
    if stack.soc == "950" and Part.PIECEWISE in captured:
        most = _SAMPLED_ON_950 if found.num_sizes is None else min(found.num_sizes, _SAMPLED_ON_950)
        found = attrs.evolve(found, num_sizes=most, source=found.source + _SAMPLED_SOURCE)
    return found
