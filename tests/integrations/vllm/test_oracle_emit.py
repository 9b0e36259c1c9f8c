"""What `kpolicy plan --emit vllm` prints is what both releases' own argument and configuration code takes."""

import functools
import itertools
import json

import pytest

from kpolicy.engine_flags import emit
from kpolicy.ladders import CaptureSizes
from kpolicy.settings import Settings
from tests.integrations.vllm.real_runner import sized, vllm_config, vllm_of
from tests.oracle.loader import Release, oracle_folder
from tests.oracle.vllm_parser import parsed
from tests.oracle.wheels import VLLM_WHEELS

for needed in ("torch", "pydantic", "transformers"):
    pytest.importorskip(needed)
pytestmark = VLLM_WHEELS

SETTINGS = Settings(max_num_reqs=1000, max_num_tokens=4096)
MODES = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "FULL")
LADDERS = {
    "to 2048": CaptureSizes((1, 2, 4, 8, 64, 512, 1000), (), (16, 256, 2048)),
    "to the budget": CaptureSizes((1, 6), (), (4096,)),
    "one size": CaptureSizes((), (), (7,)),
}
WRONG = {
    "a flag": ["--cudagraph-sizes", "8"],
    "a field": ["--compilation-config", '{"cudagraph_sizes": [8]}'],
    "a mode": ["--compilation-config", '{"cudagraph_mode": "SOME"}'],
    "a size": ["--compilation-config", '{"cudagraph_capture_sizes": ["eight"]}'],
}
BOTH = pytest.mark.parametrize("version", ["0.23", "0.33"])


def emitted(version, mode, ladder):
    return list(emit("vllm", LADDERS[ladder], SETTINGS, policy=f"vllm:version={version},mode={mode}").arguments)


@functools.cache
def read(version):
    """What vLLM makes of all that is emitted, and of what is wrong: one process imports it for all tests."""
    commands = {each: emitted(version, *each) for each in itertools.product(MODES, LADDERS)} | WRONG
    return dict(zip(commands, parsed(Release(oracle_folder(), version), list(commands.values())), strict=True))


@BOTH
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ladder", LADDERS)
def test_parsed_as_it_was_meant(version, mode, ladder):
    """vLLM's own parser takes every flag, and its `CompilationConfig` has the mode and the sizes."""
    arguments = emitted(version, mode, ladder)
    given = json.loads(arguments[arguments.index("--compilation-config") + 1])
    sizes = sorted({size for kind in ("decode", "mixed", "piecewise") for size in getattr(LADDERS[ladder], kind)})
    assert given["cudagraph_capture_sizes"] == sizes
    assert read(version)[mode, ladder] == given | {
        "class": "vllm.config.compilation.CompilationConfig", "max_num_seqs": 1000, "max_num_batched_tokens": 4096,
    }  # fmt: skip


@BOTH
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused(version, wrong):
    """The check is one that can fail: vLLM says no to what it doesn't know, and names it."""
    found = read(version)[wrong]
    assert found.keys() == {"refused"}
    assert any(word in found["refused"] for word in ("cudagraph-sizes", "cudagraph_sizes", "SOME", "eight"))


@BOTH
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ladder", LADDERS)
def test_the_list_comes_out_as_it_went_in(version, mode, ladder):
    """What was parsed stays as vLLM starts: the list and its largest size are its own to change, and it doesn't."""
    given = read(version)[mode, ladder]
    with vllm_of(version) as modules:
        config = vllm_config(
            modules,
            mode=given["cudagraph_mode"],
            kpolicy=None,
            sizes=given["cudagraph_capture_sizes"],
            max_num_seqs=given["max_num_seqs"],
            max_num_batched_tokens=given["max_num_batched_tokens"],
        )
        config.compilation_config.max_cudagraph_capture_size = given["max_cudagraph_capture_size"]
        sized(modules, config)
        assert config.compilation_config.cudagraph_capture_sizes == given["cudagraph_capture_sizes"]
        assert config.compilation_config.max_cudagraph_capture_size == given["max_cudagraph_capture_size"]
