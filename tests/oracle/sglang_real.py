"""SGLang's own rule, taken out of its source files: the methods that decide, over the few names they use.

Nothing of SGLang is installed or imported: the files need torch and a device. Each method's text is executed as it is,
in a class that has nothing else.
"""

from __future__ import annotations

import ast
import linecache
import os
import zipfile
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from tests.oracle.loader import VARIABLE, executing

RUNNER = "sglang/srt/model_executor/runner"
FOLDER = Path(os.environ.get(VARIABLE) or "no-oracle")
MARKS = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        not list(FOLDER.glob("sglang-0.5.23*")), reason=f"{VARIABLE} names no folder with sglang-0.5.23 in it"
    ),
]
"""Of modules whose tests need the release."""
BACKEND = SimpleNamespace(FULL="full", BREAKABLE="breakable", DISABLED="disabled", TC_PIECEWISE="tc_piecewise")


class Release:
    """The files of ``sglang-0.5.23*`` in the oracle's folder: unpacked, or the wheel.

    Raises:
        FileNotFoundError: the folder has neither.
    """

    def __init__(self, folder: Path) -> None:
        found = sorted(folder.glob("sglang-0.5.23*"), key=Path.is_file)
        if not found:
            raise FileNotFoundError(f"{folder} has no sglang-0.5.23 folder and no sglang-0.5.23*.whl")
        self._path = found[0]

    name = "sglang-0.5.23"

    def tree(self, member: str) -> ast.Module:
        """A file of the release, parsed; its functions know their file, see `_execute`."""
        text, name = self.read(member), f"{self.name}/{member}"
        tree = ast.parse(text)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.from_file = name  # type: ignore[attr-defined]
        return tree

    def read(self, member: str) -> str:
        """The text of a file of the release."""
        if self._path.is_dir():
            return (self._path / member).read_text(encoding="utf-8")
        return self._wheel.read(member).decode("utf-8")

    def modules(self, folder: str) -> list[str]:
        """The modules and packages under a folder of the release."""
        if self._path.is_dir():
            files = [str(path.relative_to(self._path)) for path in (self._path / folder).rglob("*.py")]
        else:
            files = [name for name in self._wheel.namelist() if name.startswith(f"{folder}/") and name.endswith(".py")]
        return [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]

    @cached_property
    def _wheel(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self._path)


def _execute(nodes: list[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    """The names that these nodes make; a function's text is found by its code, as that of an imported one is."""
    future = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module(body=[*future, *nodes], type_ignores=[]))
    exec(compile(module, "sglang", "exec"), names)  # noqa: S102  the code under test
    for node in nodes:
        held = vars(names[node.name]) if isinstance(node, ast.ClassDef) else names
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef) and hasattr(each, "from_file"):
                made = held[each.name]
                made = getattr(made, "__func__", made)
                if isinstance(made, FunctionType):
                    made.__code__ = made.__code__.replace(co_filename=each.from_file)
    return names


def _named(tree: ast.AST, names: set[str]) -> list[Any]:
    """The functions, methods and constants of those names, in the order of the file."""
    found = []
    for node in ast.walk(tree):
        targets = [getattr(target, "id", None) for target in getattr(node, "targets", [])]
        if (isinstance(node, ast.FunctionDef) and node.name in names) or names & set(targets):
            found.append(node)
    assert {getattr(node, "name", None) or node.targets[0].id for node in found} == names, "the release has other names"
    return found


def _class(name: str, methods: list[Any]) -> ast.ClassDef:
    (node,) = ast.parse(f"class {name}: pass").body
    assert isinstance(node, ast.ClassDef)
    node.body = methods
    return node


def prefill_runner(release: Release, *, cuda: bool, whole: bool = False) -> type:
    """SGLang's prefill runner with `can_replay_locally` and what that calls, or with `can_run_graph`, which asks it."""
    tree = release.tree(f"{RUNNER}/prefill_cuda_graph_runner.py")
    base = _named(release.tree(f"{RUNNER}/base_cuda_graph_runner.py"), {"_pad_to_bucket"})
    free = _named(tree, {"_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR", "_CHUNKED_PREFIX_VARIANTS", "_ceil_div"})
    own = {
        "can_replay_locally",
        "_has_uncapturable_chunked_prefix",
        "_select_prefix_capture_chunks",
        "_uses_eager_prefill_tail",
    }
    if whole:
        own |= {"can_run_graph", "_has_inactive_dp_rank"}
    names = {"Backend": BACKEND, "is_cuda": lambda: cuda, "bisect": __import__("bisect")}
    names["ForwardMode"] = SimpleNamespace(MIXED="mixed")
    runner = _execute([*free, _class("Runner", base + _named(tree, own))], names)["Runner"]
    runner.variants = names["_CHUNKED_PREFIX_VARIANTS"]
    return runner


def decode_runner(release: Release) -> type:
    """SGLang's decode runner with `can_run_graph`; keys are batch sizes, with a label where LoRA has its own graphs."""
    own = {"can_run_graph", "_resolve_lora_variant"}
    methods = _named(release.tree(f"{RUNNER}/decode_cuda_graph_runner.py"), own)
    torch = SimpleNamespace(all=lambda values: values)
    names = {
        "torch": torch, "resolve_ragged_verify_layout": None, "get_current_stream_idx": None,
        "CaptureHiddenMode": SimpleNamespace(NULL=0),
    }  # fmt: skip
    runner = _execute([_class("Runner", methods)], names)["Runner"]
    runner._make_graph_key = lambda self, size, variant_label=None, **rest: (  # noqa: ARG005
        size if variant_label is None else (size, variant_label)
    )
    runner.record_nolora_graph = False
    runner._resolve_attention_variant = lambda self, batch, size: None  # noqa: ARG005
    return runner


def size_lists(release: Release) -> tuple[Any, Any]:
    """SGLang's generators of decode and prefill sizes."""
    wanted = {"generate_decode_cuda_graph_batch_sizes", "generate_prefill_cuda_graph_batch_sizes"}
    nodes = _named(release.tree("sglang/srt/arg_groups/cuda_graph_hook.py"), wanted)
    names = _execute(nodes, {"resolving_view": lambda arguments: arguments})
    decode, prefill = sorted(wanted)
    return names[decode], names[prefill]


_STUBBED = (
    "sglang", "torch", "transformers", "huggingface_hub", "triton", "tqdm", "orjson", "zmq", "psutil", "fastapi", "PIL",
    "pybase64", "IPython", "requests", "numpy",
)  # fmt: skip


@contextmanager
def argument_parser(release: Release) -> Iterator[ArgumentParser]:
    """SGLang's own command-line parser, with all that `ServerArgs` declares. It needs msgspec."""
    groups = release.modules("sglang/srt/arg_groups")
    real = (*groups, "sglang.srt.server_args", "sglang.srt.model_executor.cuda_graph_config")
    with executing(release, real, _STUBBED):
        parser = ArgumentParser(exit_on_error=False)
        import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
        yield parser
