"""benchmarks.gpu.correct notices attention that is broken in the kernels of the GPU, for EAGER and the modes alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import correct
from tests.benchmarks.broken_attention import BREAKS, LATENT, break_after_loading
from tests.benchmarks.test_gpu_scripts import QWEN

# As on a command line: what libraries warn of has no part in the exit code.
pytestmark = pytest.mark.filterwarnings("default")
CONFIGS = {
    "keys and values": QWEN,
    # Without experts: among a toy's few rows one that goes to others is the whole p99.9.
    "latents": {**LATENT, "first_k_dense_replace": LATENT["num_hidden_layers"]},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("how", BREAKS)
def test_broken_attention_is_seen(config: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intact attention passes; broken, the exit code is 1 for EAGER's distance to transformers' own forward."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[config]))
    out = tmp_path / "out.json"
    broken = break_after_loading(monkeypatch, how)
    given = ["--config", str(tmp_path), "--device", "cuda", "--tiny", "--out", str(out), "--part", "reference"]
    code = correct.main(given)
    torch.cuda.synchronize()
    result = json.loads(out.read_text())
    found = result["cells"]["reference"]
    assert not result["failed"]
    assert broken == ["triton"]
    assert found["theirs"] == "the same forward in bfloat16"
    over = correct.over_limits(found)
    if how == "intact":
        assert (code, over) == (0, []), found
    else:
        assert code == 1
        assert {"eager_over_theirs", "eager_median_over_theirs"} <= set(over), found
