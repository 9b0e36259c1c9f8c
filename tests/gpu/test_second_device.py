"""A model on a GPU that isn't the current one: loading, capture, calibration and steps."""

from __future__ import annotations

import pytest
import torch

from kpolicy.engine import Engine
from kpolicy.serving.load import load
from kpolicy.settings import Settings
from tests.executors_launcher.conftest import SMALL
from tests.gpu.test_bad_input import LADDER, steps_are_right

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")


def test_a_model_on_the_second_gpu() -> None:
    """Triton's kernels and timing go to its device, while the first one is current; the first one's memory stays."""
    assert torch.cuda.current_device() == 0
    before = torch.cuda.memory_allocated(0)
    model = load(
        SMALL, device="cuda:1", dtype="bfloat16", num_blocks=64, block_size=16, max_model_len=512, max_num_reqs=8
    )
    engine = Engine("auto", model=model, settings=Settings(max_num_reqs=8, max_num_tokens=64), ladder=LADDER)
    engine.capture()
    assert engine.calibration_error == ""
    assert engine.costs.measured
    assert engine.registry.captured()
    assert steps_are_right(engine, 9)
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.current_device() == 0
    engine.release()
