"""Tests that run in Triton's interpreter, which must be chosen before Triton is imported: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

__all__ = ["INTERPRETED", "interpreted", "needs_triton", "pass_there"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this is that process"""
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's process")


def needs_triton() -> None:
    """Skip the module that asks where there is no Triton whose interpreter works."""
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip(
            "Triton before 3.6, whose interpreter fails on newer numpy's scalars (3.2)", allow_module_level=True
        )


def pass_there(file: str) -> None:
    """Hold a file's tests to passing in the interpreter."""
    if INTERPRETED:
        pytest.skip("it is this process")
    command = [sys.executable, "-m", "pytest", file, "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
