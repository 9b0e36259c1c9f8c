"""Modules that SGLang imports where no GPU is and that no test calls; `make sglang-cpu` puts this folder on the path.

torchvision's wheel is made for a torch with CUDA, and SGLang takes vLLM's rotary embedding for its fallback where it
finds no device of its own. Python loads this file as it starts.
"""

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Absent(ModuleType):
    """A module that has whatever name is asked for, as an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self.__path__, self.__version__ = ModuleSpec(name, None), [], "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


InterpolationMode = Enum("InterpolationMode", "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS")

for _name in (
    "torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional",
    "torchvision.transforms.v2", "torchvision.transforms.v2.functional", "vllm", "vllm._custom_ops",
):  # fmt: skip
    _module = sys.modules[_name] = Absent(_name)
    if "transforms" in _name:
        setattr(_module, "InterpolationMode", InterpolationMode)  # noqa: B010  no attribute that a module declares
    _parent, _, _own = _name.rpartition(".")
    if _parent:
        setattr(sys.modules[_parent], _own, _module)
