"""vLLM's own argument parser and `CompilationConfig`, whole, out of a wheel, in a process of their own.

All of vLLM's Python that they import is its own; its native libraries aren't needed for that, and the platform is its
CPU one. `ABSENT` are packages that vLLM requires and this project doesn't: stand-ins where they aren't installed.

Run as a module it reads lists of arguments, as JSON, and prints what became of each, in its last line: the parsed
values, or ``{"refused": why}``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.oracle.loader import Release, StubModule

__all__ = ["parsed"]

ABSENT = (
    "aiohttp", "cachetools", "cbor2", "cloudpickle", "cpuinfo", "fastapi", "gguf", "llguidance", "openai",
    "openai_harmony", "partial_json_parser", "psutil", "pybase64", "requests", "urllib3", "uvloop", "xgrammar", "zmq",
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def parsed(release: Release, commands: list[list[str]]) -> list[dict[str, Any]]:
    """What vLLM makes of each list of arguments to `vllm serve`."""
    # No plugins, ours neither; and offline it would look for the default model's folder.
    ended = subprocess.run(
        [sys.executable, "-m", "tests.oracle.vllm_parser", str(release.path.resolve())],
        input=json.dumps(commands), capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


class _Stub(StubModule):
    """Whatever it has is taken for any type by pydantic, which vLLM's models of requests are made of."""

    def __getattr__(self, name: str) -> Any:
        found: Any = super().__getattr__(name)
        found.__get_pydantic_core_schema__ = classmethod(lambda *_: {"type": "any"})
        return found


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so that a package that is installed is itself."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:  # noqa: ARG002
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def _read(arguments: Any, parser: Any, command: list[str]) -> dict[str, Any]:
    told = StringIO()
    try:
        with redirect_stderr(told):
            made = arguments.from_cli_args(parser.parse_args(command))
    except (SystemExit, KeyError, ValueError) as error:
        return {"refused": f"{told.getvalue()}{error}"}
    config = made.compilation_config
    return {
        "class": f"{type(config).__module__}.{type(config).__name__}",
        "cudagraph_mode": config.cudagraph_mode.name,
        "cudagraph_capture_sizes": config.cudagraph_capture_sizes,
        "max_cudagraph_capture_size": config.max_cudagraph_capture_size,
        "max_num_seqs": made.max_num_seqs,
        "max_num_batched_tokens": made.max_num_batched_tokens,
    }


def _main(wheel: str) -> None:
    sys.path.insert(0, wheel)
    sys.meta_path.append(_Absent())
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    arguments.add_cli_args(parser)
    sys.stdout.write(json.dumps([_read(arguments, parser, command) for command in json.load(sys.stdin)]) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1])
