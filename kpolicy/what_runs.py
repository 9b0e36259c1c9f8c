"""What a cost table was measured of, and what it is to decide for: a model on a device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["WhatRuns"]


class WhatRuns(NamedTuple):
    """A model on devices, as far as anyone says."""

    device: str = ""
    """The device's full name; empty where nobody said"""
    model: str = ""
    """Likewise the model, as it calls itself"""
    tensor_parallel_size: int | None = None
    """Devices that each layer is split over. A layer's share takes about as many times less, and ranks wait for each
    other, so that costs of one size are no other's"""
    model_shape: Mapping[str, int | str] = MappingProxyType({})
    """What tells models of one name apart, by its own name: layers, widths, attention kernels, ...; what nobody said is
    left out. A name has no more than a rounded count of parameters"""

    def measured(self) -> tuple[str, str, str]:
        """That this was measured, in words: on which device, with which model, split over how many."""
        return (
            f"measured on {self.device}", f"measured with {self.model}",
            f"measured with a tensor_parallel_size of {self.tensor_parallel_size}",
        )  # fmt: skip

    def unlike(self, here: WhatRuns) -> tuple[str, str, str]:
        """How each of these that was measured differs from what runs here, in words; empty where either doesn't say."""
        device, model, split = (
            f"{measured}, and this is {other}" if theirs and other and theirs != other else ""
            for measured, theirs, other in zip(self.measured(), self[:_NAMES], here[:_NAMES], strict=True)
        )
        if self.model and self.model == here.model:
            model = self._unlike_shape(here)
        return device, model, split

    def _unlike_shape(self, here: WhatRuns) -> str:
        """How a model of the same name has another shape, by all that both say."""
        theirs, ours = (_said(each.model_shape) for each in (self, here))
        unlike = [name for name in theirs if name in ours and theirs[name] != ours[name]]
        if not unlike:
            return ""
        first, other = (", ".join(f"{name} {of[name]}" for name in unlike) for of in (theirs, ours))
        return f"measured with {self.model} of {first}, and this has {other}"


def _said(shape: Mapping[str, int | str]) -> dict[str, int | str]:
    """A shape with what went without saying when it was written."""
    return {name: value for of, name, value in _BEFORE if of in shape} | dict(shape)


_BEFORE = (("experts", "expert_kernels", "transformers"), ("latent_rank", "latent_prompts", "flash"))
"""Kernels that models with such a field had while shapes didn't name them, until 2026-11-28"""
_NAMES = 3
"""Fields of `WhatRuns` that `measured` has words for"""
