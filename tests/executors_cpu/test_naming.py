"""What a processor is called in profiles: one that is taken for another passes its costs on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from kpolicy.executors.cpu import naming

AMD = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9654\n\nprocessor\t: 1\nmodel name\t: other\n"
GRAVITON = "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n"
GRACE = "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\n"
POWER = "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n"


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What /proc/cpuinfo holds; None where there is none."""
    held: list[str | None] = [None]

    def read(path: Path, encoding: str | None = None) -> str:
        assert (str(path), encoding) == ("/proc/cpuinfo", "utf-8")
        if held[0] is None:
            raise FileNotFoundError(path)
        return held[0]

    monkeypatch.setattr(naming.Path, "read_text", read)
    monkeypatch.setattr(naming.torch, "get_num_threads", lambda: 1)
    return held


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (AMD, "AMD EPYC 9654"),
        (GRAVITON, "CPU implementer 0x41, CPU part 0xd0c, CPU variant 0x3"),
        (GRACE, "CPU implementer 0x41, CPU part 0xd4f, CPU variant 0x0"),
        (POWER, "POWER9, altivec supported"),
    ],
)
def test_a_processor_has_a_name_of_its_own(cpuinfo: list[str | None], text: str, name: str) -> None:
    """Linux names no model of ARM's, where all were called CPU and took each other's costs."""
    cpuinfo[0] = text
    assert naming.cpu_name() == f"{name}, 1 thread a stream"


@pytest.mark.parametrize("text", ["", None])
def test_without_a_file_the_platform_says(
    cpuinfo: list[str | None], text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processor, else its machine."""
    cpuinfo[0] = text
    monkeypatch.setattr(naming.platform, "processor", lambda: "")
    monkeypatch.setattr(naming.platform, "machine", lambda: "arm64")
    assert naming.cpu_name() == "arm64, 1 thread a stream"
