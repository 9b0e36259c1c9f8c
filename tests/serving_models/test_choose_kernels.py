"""Which kernels a device gets by itself, and why not others: over stand-ins for what a device says of itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kpolicy.errors import SupportError, UnknownNameError  # noqa: E402
from kpolicy.serving import kernels  # noqa: E402

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
Here = Callable[..., None]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """Makes a CUDA device of that capability, where those packages are installed."""

    def make(capability: tuple[int, int], *installed: str) -> None:
        monkeypatch.setattr(kernels, "find_spec", lambda name: object() if name in installed else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)

    return make


@pytest.mark.parametrize(
    ("capability", "installed", "taken"),
    [
        ((9, 0), ("triton", "flashinfer"), "triton"),
        ((9, 0), ("triton",), "triton"),
        ((8, 0), ("triton",), "triton"),
        ((7, 5), ("triton", "flashinfer"), "plain"),
        ((9, 0), (), "plain"),
    ],
)
def test_auto_takes_the_first_that_can_run(
    here: Here, capability: tuple[int, int], installed: tuple[str, ...], taken: str
) -> None:
    """Triton's where they run, FlashInfer's never by themselves, and torch's operators as the last resort."""
    here(capability, *installed)
    assert kernels.choose_kernels(CUDA).name == taken
    assert kernels.choose_kernels(CPU).name == "plain"


def test_why_others_can_not_run(here: Here) -> None:
    """Each is named with what is missing."""
    here((7, 5), "triton")
    found = kernels.kernels_here(CUDA)
    assert found["plain"] == ""
    assert found["triton"] == found["flash"] == "the device has capability 7.5, and it needs 8.0"
    here((9, 0))
    assert "triton isn't installed" in kernels.kernels_here(CUDA)["flash"]
    here((9, 0), "triton")
    found = kernels.kernels_here(CUDA)
    assert (found["triton"], found["flash"]) == ("", "")
    assert "pip install flashinfer-python" in found["flashinfer"]
    with pytest.raises(SupportError, match="flashinfer isn't installed"):
        kernels.choose_kernels(CUDA, "flashinfer")
    with pytest.raises(UnknownNameError, match="did you mean 'triton'"):
        kernels.choose_kernels(CUDA, "tritn")


def test_flash_is_had_by_name(here: Here) -> None:
    """With torch's own attention for prompts."""
    here((9, 0), "triton")
    assert kernels.choose_kernels(CUDA, "flash").name == "flash"
