"""What a cost table was measured of, and what it is to decide for: a model on a device."""

from __future__ import annotations

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
            for measured, theirs, other in zip(self.measured(), self, here, strict=True)
        )
        return device, model, split
