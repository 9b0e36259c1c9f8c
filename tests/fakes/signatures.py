r"""Signatures of torch_npu from its wheel, read without importing it: `recorded`, and the program that wrote them.

::

    pip download torch_npu==2.13.0 --no-deps --python-version 3.11 --platform manylinux_2_28_x86_64 \
        --only-binary=:all: -d DIR
    python -m tests.fakes.signatures DIR/torch_npu-2.13.0-*.whl

Python's are read from the sources, operators' schemas from the strings of the library.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("torch_npu_2_13_0.json")
SOURCES = {
    "torch_npu/npu/graphs.py": (
        "NPUGraph", "graph", "_GraphDispatchMode", "graph_pool_handle", "graph_task_group_begin",
        "graph_task_group_end", "graph_task_update_begin", "graph_task_update_end",
    ),
    "torch_npu/npu/streams.py": ("Stream", "Event", "ExternalEvent"),
    "torch_npu/npu/utils.py": ("synchronize", "stream", "current_stream", "current_device", "get_cann_version"),
    "torch_npu/npu/memory.py": ("mem_get_info", "empty_cache"),
    "torch_npu/npu/__init__.py": ("get_device_name", "is_available", "device_count", "current_device", "mem_get_info"),
}  # fmt: skip
HANDLER = re.compile(r'^\s+"(_?npu_[a-z_0-9]+(?:\.\w+)?)",$', re.MULTILINE)
OPERATORS = (
    "npu_fused_infer_attention_score.out", "npu_fused_infer_attention_score",
    "_npu_fused_infer_attention_score_get_max_workspace",
)  # fmt: skip


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def arguments_of(function: ast.FunctionDef) -> list[str]:
    """Each argument, with its default; "*" before those by keyword alone."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [ast.unparse(each) for each in given.defaults]
    found = [each.arg if value is None else f"{each.arg}={value}" for each, value in zip(plain, defaults, strict=True)]
    if given.vararg:
        found.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        found.append("*")
    for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(each.arg if value is None else f"{each.arg}={ast.unparse(value)}")
    return [*found, f"**{given.kwarg.arg}"] if given.kwarg else found


def of_source(text: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Signatures of functions, and of classes' methods, with the attributes that `__init__` sets."""
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            found[node.name] = arguments_of(node)
        elif isinstance(node, ast.ClassDef) and node.name in names:
            methods = {each.name: arguments_of(each) for each in node.body if isinstance(each, ast.FunctionDef)}
            own = {
                target.attr
                for each in ast.walk(node) if isinstance(each, ast.Assign)
                for target in each.targets if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            }  # fmt: skip
            fields = {
                target.id for each in node.body if isinstance(each, ast.Assign)
                for target in each.targets if isinstance(target, ast.Name)
            }  # fmt: skip
            found[node.name] = {"methods": methods, "attributes": sorted(own | fields)}
    return found


def of_wheel(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as wheel:
        python = {
            source: of_source(wheel.read(source).decode("utf-8"), names) for source, names in SOURCES.items()
        }  # fmt: skip
        library = wheel.read("torch_npu/lib/libtorch_npu.so")
        handlers = sorted({
            name
            for entry in wheel.namelist() if entry.startswith("torch_npu/npu/_npugraph_handlers/")
            for name in HANDLER.findall(wheel.read(entry).decode("utf-8"))
        })  # fmt: skip
    operators = {}
    for name in OPERATORS:
        match = re.search(re.escape(name).encode() + rb"\(Tensor query[^\x00]*\) -> [^\x00]*", library)
        operators[name] = "" if match is None else match[0].decode()
    return {"version": "2.13.0", "python": python, "operators": operators, "handlers": handlers}


if __name__ == "__main__":
    FILE.write_text(json.dumps(of_wheel(Path(sys.argv[1])), indent=1, sort_keys=True) + "\n", encoding="utf-8")
