"""The device's name in the results of `benchmarks.sglang.stock_vs_kpolicy`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sglang.stock_vs_kpolicy import about


@pytest.mark.parametrize(
    ("visible", "answers", "told"),
    [
        ("0", "echo NVIDIA H200, 580", "NVIDIA H200, 580"),
        ("-1", "echo No devices were found; exit 6", "ended with 6: No devices were found"),
        ("0", "echo no driver >&2; exit 9", "ended with 9: no driver"),
        ("0", "exit 0", "ended with 0"),
        ("", None, "nvidia-smi can't be run: No such file or directory"),
    ],
)
def test_a_device_that_cannot_be_named_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], visible: str,
    answers: str | None, told: str,
) -> None:  # fmt: skip
    """In the results, and at once."""
    if answers is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{answers}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = about()["device"]
    warned = capsys.readouterr().err
    assert told in device
    if device == told:
        assert not warned
    else:
        assert device.startswith("unknown: ")
        assert told in warned
