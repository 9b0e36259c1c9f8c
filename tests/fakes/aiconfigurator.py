"""The package `aiconfigurator-core` as far as kpolicy asks it: an engine that names operators and their times."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kpolicy.simulate import aiconfigurator

if TYPE_CHECKING:
    import pytest

VERSION = "0.0.fake"


class EngineHandle:
    """Dense work of 4 ms and 3 us a token, half of it by formulas; attention that follows kpolicy's own formula."""

    @classmethod
    def compile(cls, folder: str, system: str, backend: str, **_: Any) -> EngineHandle:
        if backend not in ("vllm", "sglang", "trtllm"):
            raise ValueError(f"no {backend} tables of {system} for {folder}")
        return cls()

    def decode_step_per_op(self, rows: int, length: int, _osl: int) -> list[tuple[str, float, float, str]]:
        half_ms = 2.0 + 0.0015 * rows
        return [
            ("qkv_gemm", half_ms, 0.0, "silicon"), ("logits_gemm", half_ms, 0.0, "empirical"),
            ("generation_attention", 0.1 + 0.001 * rows + 1e-6 * rows * length, 0.0, "silicon"),
        ]  # fmt: skip

    def run_static_per_op(
        self, *, batch_size: int, isl: int, osl: int, prefix: int, mode: str
    ) -> tuple[list[tuple[str, float, float, str]], None]:
        assert (batch_size, osl, mode) == (1, 2, "static_ctx")
        new = isl - prefix
        pairs = new * prefix + new * (new + 1) // 2
        return [("context_attention", 0.1 + 0.001 * new + 1e-8 * pairs, 0.0, "silicon")], None


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the package there until the test ends, whether the real one is or not."""
    package, sdk, engine = (
        ModuleType(name)
        for name in ("aiconfigurator_core", "aiconfigurator_core.sdk", "aiconfigurator_core.sdk.engine")
    )
    engine.EngineHandle = EngineHandle  # type: ignore[attr-defined]
    for each in (package, sdk, engine):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(aiconfigurator, "_version", lambda: VERSION)
