"""What `kpolicy plan --emit vllm` prints is what both releases' own argument and configuration code takes."""

import json

import pytest

from kpolicy.engine_flags import emit
from kpolicy.ladders import CaptureSizes
from kpolicy.settings import Settings
from tests.integrations.vllm.real_runner import sized, vllm_config, vllm_of
from tests.oracle.loader import Release, oracle_folder
from tests.oracle.wheels import VLLM_WHEELS

pytestmark = VLLM_WHEELS

SETTINGS = Settings(max_num_reqs=1000, max_num_tokens=4096)
LADDERS = [
    CaptureSizes((1, 2, 4, 8, 64, 512, 1000), (), (16, 256, 2048)),
    CaptureSizes((1, 6), (), (4096,)),
    CaptureSizes((), (), (7,)),
]


@pytest.mark.parametrize("version", ["0.23", "0.33"])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("ladder", LADDERS, ids=["to 2048", "to the budget", "one size"])
def test_taken_as_it_is(version, mode, ladder):
    """The flags exist, the configuration has the fields, and the list comes out of vLLM as it went in."""
    emitted = emit("vllm", ladder, SETTINGS, policy=f"vllm:version={version},mode={mode}")
    flags = dict(zip(emitted.arguments[::2], emitted.arguments[1::2], strict=True))
    release = Release(oracle_folder(), version)
    source = release.read("vllm/engine/arg_utils.py")
    assert all(f'"{flag}"' in source for flag in flags)
    given = json.loads(flags["--compilation-config"])
    with vllm_of(version) as modules:
        compilation = modules.module("config.compilation")
        assert set(given) <= set(compilation.CompilationConfig.__annotations__)
        config = vllm_config(
            modules,
            mode=given["cudagraph_mode"],
            kpolicy=None,
            sizes=given["cudagraph_capture_sizes"],
            max_num_seqs=int(flags["--max-num-seqs"]),
            max_num_batched_tokens=int(flags["--max-num-batched-tokens"]),
        )
        config.compilation_config.max_cudagraph_capture_size = given["max_cudagraph_capture_size"]
        sized(modules, config)
        assert config.compilation_config.cudagraph_capture_sizes == given["cudagraph_capture_sizes"]
        assert config.compilation_config.max_cudagraph_capture_size == given["max_cudagraph_capture_size"]
