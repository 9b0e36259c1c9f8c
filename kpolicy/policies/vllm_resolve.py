"""What vLLM makes of a configured graph mode at start-up: its downgrade table as a pure function.

The facts are those of vLLM 0.23.0 and 0.33.0 (`CUDAGraphMode` and `resolve_cudagraph_mode_and_sizes` in
``vllm/config/compilation.py``, the checks before it in ``vllm/config/vllm.py``); tests/oracle runs the originals.
"""

from __future__ import annotations

from enum import Enum

from kpolicy.attention.support import Claims, HostParams, SupportLevel
from kpolicy.errors import ConfigError, SupportError
from kpolicy.modes import Mode
from kpolicy.policies.base import Downgrade
from kpolicy.reasons import Reason

__all__ = ["VllmMode", "mode_downgrade", "parse_vllm_mode", "resolve_mode", "support_of", "without_pieces"]


class VllmMode(str, Enum):
    """A configured strategy of vLLM (its ``cudagraph_mode``). What one batch does is a `Mode`, never this."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    def __str__(self) -> str:
        return self.value

    @property
    def decode(self) -> Mode:
        """What uniform decode batches get."""
        return _PARTS[self][0]

    @property
    def mixed(self) -> Mode:
        """What all other batches get."""
        return _PARTS[self][1]

    @property
    def separate(self) -> bool:
        """Whether uniform decode batches have graphs of their own."""
        return self in (VllmMode.FULL_DECODE_ONLY, VllmMode.FULL_AND_PIECEWISE)


_PARTS = {
    VllmMode.NONE: (Mode.EAGER, Mode.EAGER),
    VllmMode.PIECEWISE: (Mode.PIECEWISE, Mode.PIECEWISE),
    VllmMode.FULL: (Mode.FULL, Mode.FULL),
    VllmMode.FULL_DECODE_ONLY: (Mode.FULL, Mode.EAGER),
    VllmMode.FULL_AND_PIECEWISE: (Mode.FULL, Mode.PIECEWISE),
}


def parse_vllm_mode(name: str) -> VllmMode:
    """The configured mode of that name, in any case.

    Raises:
        ConfigError: vLLM has no such mode.
    """
    try:
        return VllmMode(str(name).upper())
    except ValueError:
        allowed = ", ".join(mode.value for mode in VllmMode)
        raise ConfigError(f"vLLM has no cudagraph mode {str(name)!r}. Known: {allowed}.") from None


def support_of(claims: Claims, query_len: int) -> SupportLevel:
    """The level of vLLM's scale that claims come to, for decode rows of `query_len` tokens.

    vLLM's scale is MIXED (its ALWAYS), UNIFORM, SINGLE, NONE; it has no level for variable-length decodes and no limit
    on query lengths, so claims of uniform batches shorter than `query_len` count as SINGLE.
    """
    full = claims.full
    if full.mixed:
        return SupportLevel.MIXED
    if full.uniform_query_len >= max(query_len, 2):
        return SupportLevel.UNIFORM
    return SupportLevel.SINGLE if full.uniform_query_len else SupportLevel.NONE


def resolve_mode(mode: VllmMode, level: SupportLevel, query_len: int, piecewise_split: bool) -> VllmMode:
    """The mode that vLLM starts with where `mode` was configured.

    Args:
        mode: what was configured.
        level: what attention supports; VARLEN_DECODE counts as UNIFORM, for vLLM's scale has nothing between.
        query_len: tokens of a decode row, 1 + k.
        piecewise_split: whether attention is split out of the compiled graph.

    Raises:
        SupportError: FULL was configured and attention can't be captured at all; vLLM raises ValueError.
    """
    if mode.mixed is Mode.FULL and level is not SupportLevel.MIXED:
        if level is SupportLevel.NONE:
            raise SupportError(
                f"vLLM doesn't start with cudagraph mode {mode} where attention supports no graphs at all, though it "
                "weakens every other mode silently. Configure PIECEWISE."
            )
        mode = VllmMode.FULL_AND_PIECEWISE if piecewise_split else VllmMode.FULL_DECODE_ONLY
    uncapturable = level is SupportLevel.NONE or (level is SupportLevel.SINGLE and query_len > 1)
    if mode.decode is Mode.FULL and uncapturable:
        return VllmMode.PIECEWISE if piecewise_split else VllmMode.NONE
    return mode


def without_pieces(mode: VllmMode, version: str) -> VllmMode:
    """What is left of a mode where no piecewise graphs can be had: 0.23 drops all of it, 0.33 only that half."""
    if Mode.PIECEWISE not in (mode.decode, mode.mixed):
        return mode
    if version == "0.33" and mode is VllmMode.FULL_AND_PIECEWISE:
        return VllmMode.FULL_DECODE_ONLY
    return VllmMode.NONE


def mode_downgrade(asked: VllmMode, resolved: VllmMode, reason: Reason) -> Downgrade:
    """The downgrade as a value: which batches it touches, and both modes by vLLM's names."""
    if asked.decode is resolved.decode:
        batches = "batches that aren't uniform decodes"
    elif asked.mixed is resolved.mixed:
        batches = "uniform decode batches"
    else:
        batches = "all batches"
    return Downgrade(batches, asked.value, resolved.value, reason)


def support_reason(claims: Claims, query_len: int) -> Reason:
    """Why attention takes back what a mode promised."""
    if claims.host_params is HostParams.FROZEN:
        return Reason.HOST_LENGTHS_FROZEN
    level = support_of(claims, query_len)
    if level is SupportLevel.NONE:
        return Reason.SUPPORT_NONE
    if level is SupportLevel.SINGLE:
        return Reason.SPECULATION_TOO_WIDE if query_len > 1 else Reason.SUPPORT_SINGLE_ONLY
    return Reason.SUPPORT_UNIFORM_ONLY
