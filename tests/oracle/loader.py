"""Loads single source files out of an unpacked vLLM wheel, or the wheel itself, with everything else replaced by stubs.

Nothing of vLLM is installed and no device library is needed: the files listed in `REAL` are executed as they are, and
any other module of the roots in `STUBBED` is a stand-in that answers every attribute and call. `sys.modules` is as
before when the context ends.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Protocol

VARIABLE = "KPOLICY_ORACLE"

STUBBED = ("vllm", "torch", "tqdm", "pydantic", "transformers", "huggingface_hub", "msgspec", "triton", "regex", "zmq")

REAL = (
    "vllm.config.compilation",
    "vllm.config.vllm",
    "vllm.forward_context",
    "vllm.lora.utils",
    "vllm.utils.math_utils",
    "vllm.v1.attention.backend",
    "vllm.v1.cudagraph_dispatcher",
    "vllm.v1.spec_decode.dynamic.utils",
    "vllm.v1.worker.dp_utils",
    "vllm.v1.worker.gpu.cudagraph_utils",
    "vllm.v1.worker.gpu.dp_utils",
    "vllm.v1.worker.gpu.lora_utils",
    "vllm.v1.worker.gpu.spec_decode.adaptive_verification",
    "vllm.v1.worker.utils",
)

# Names that a package hands on from one of the real files.
HANDED_ON = {
    ("vllm.config", "CUDAGraphMode"): "vllm.config.compilation",
    ("vllm.config", "CompilationMode"): "vllm.config.compilation",
}


class _Anything(type):
    """A class that stands in for any object; what is decorated with it passes through."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __call__(cls, *args: object, **kwargs: object) -> object:
        if not getattr(cls, "_is_stand_in", False) or "_is_stand_in" not in vars(cls):
            return super().__call__(*args, **kwargs)
        decorated = (type, types.FunctionType, classmethod, staticmethod, property)
        if len(args) == 1 and not kwargs and isinstance(args[0], decorated):
            return args[0]
        return _stand_in(cls.__name__)

    def __getitem__(cls, item: object) -> object:
        return cls

    def __or__(cls, other: object) -> object:
        return cls

    def __ror__(cls, other: object) -> object:
        return cls

    def __lt__(cls, other: object) -> bool:
        return False

    def __ge__(cls, other: object) -> bool:
        return False

    def __add__(cls, other: object) -> object:
        return other

    def __radd__(cls, other: object) -> object:
        return other

    def __iter__(cls) -> Iterator[object]:
        return iter(())

    def __enter__(cls) -> object:
        return cls

    def __exit__(cls, *args: object) -> None:
        return None


def _stand_in(name: str) -> type:
    return _Anything(name, (), {"_is_stand_in": True})


class StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        source = HANDED_ON.get((self.__name__, name))
        return getattr(importlib.import_module(source), name) if source else _stand_in(name)


class Files(Protocol):
    """The files of one release, by their path in the wheel."""

    name: str

    def read(self, member: str) -> str: ...


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the stubbed roots: the real file where it is listed, else a stub."""

    def __init__(self, release: Files, real: frozenset[str], stubbed: frozenset[str]) -> None:
        self._release = release
        self._real = real
        self._stubbed = stubbed

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:  # noqa: ARG002
        if fullname.partition(".")[0] not in self._stubbed:
            return None
        package = fullname not in self._real or any(name.startswith(f"{fullname}.") for name in self._real)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None if spec.name in self._real else StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ not in self._real:
            return
        package = hasattr(module, "__path__")
        member = module.__name__.replace(".", "/") + ("/__init__.py" if package else ".py")
        code = compile(self._release.read(member), f"{self._release.name}/{member}", "exec")
        exec(code, vars(module))  # noqa: S102  the file under test


class Release:
    """One unpacked wheel, or the wheel: ``vllm-VERSION*`` in the oracle's folder.

    Raises:
        FileNotFoundError: the folder has none.
    """

    def __init__(self, folder: Path, version: str) -> None:
        self.name = f"vllm-{version}" if version.count(".") > 1 else f"vllm-{version}.0"
        found = sorted(folder.glob(f"{self.name}*"))
        if not found:
            raise FileNotFoundError(f"{VARIABLE} has no {self.name} folder and no {self.name}*.whl")
        self.path = found[0]

    def read(self, member: str) -> str:
        """The text of a file of the wheel."""
        if self.path.is_dir():
            return (self.path / member).read_text(encoding="utf-8")
        return self._wheel.read(member).decode("utf-8")

    @cached_property
    def _wheel(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)


class Loaded:
    """Modules of one release; attribute access imports."""

    def module(self, name: str) -> types.ModuleType:
        return importlib.import_module(f"vllm.{name}")


def oracle_folder() -> Path | None:
    """The folder that the environment names, if it does."""
    value = os.environ.get(VARIABLE)
    return Path(value) if value else None


@contextmanager
def executing(release: Files, real: Iterable[str], stubbed: Iterable[str]) -> Iterator[None]:
    """Import the real files of a release, and stubs for all else under the stubbed roots, while the context lasts."""
    roots = frozenset(stubbed)
    finder = _Finder(release, frozenset(real), roots)

    def ours() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in roots]

    before = {name: sys.modules.pop(name) for name in ours()}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def loaded(folder: Path, version: str, *, real: Iterable[str] = (), installed: Iterable[str] = ()) -> Iterator[Loaded]:
    """Real modules of a release for as long as the context lasts.

    Args:
        folder: the oracle's folder.
        version: the release.
        real: further files to execute.
        installed: roots that aren't stubbed, because the real package is at hand.
    """
    with executing(Release(folder, version), {*REAL, *real}, set(STUBBED) - set(installed)):
        yield Loaded()
