"""What engines are given, and the warnings beside it; tests/oracle holds the flags to the engines' own parsers."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from kpolicy.attention.support import Claims
from kpolicy.costs import analytic_costs
from kpolicy.engine_flags import ENGINES, Emitted, emit
from kpolicy.errors import ConfigError, UnknownNameError
from kpolicy.ladders import CaptureLadder, CaptureSizes
from kpolicy.modes import Mode
from kpolicy.policies import PolicyContext, get_policy
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape

SETTINGS = Settings(max_num_reqs=100, max_num_tokens=2048)
CLAIMS = Claims.at_level("mixed")


def one_list(*sizes: int) -> CaptureSizes:
    return CaptureSizes([size for size in sizes if size <= 100], sizes, sizes)


def warned(emitted: Emitted, *parts: str) -> bool:
    return any(all(part in warning for part in parts) for warning in emitted.warnings)


def modes(policy: str, sizes: CaptureSizes, settings: Settings, shapes: list[BatchShape]) -> list[Mode]:
    """What an engine's replica does with each batch once it captured the sizes."""
    made = get_policy(policy)
    ladder = CaptureLadder(made.plan(sizes, CLAIMS, settings))
    context = PolicyContext(claims=CLAIMS, ladder=ladder, costs=analytic_costs(), settings=settings)
    return [made.decide(shape, context).mode for shape in shapes]


def test_vllm() -> None:
    """The list, its largest size and the mode are one JSON value, and the limits they were planned for go along."""
    emitted = emit("vllm", one_list(1, 8, 100, 512), SETTINGS)
    assert shlex.split(emitted.text) == list(emitted.arguments)
    assert emitted.arguments[:4] == ("--max-num-seqs", "100", "--max-num-batched-tokens", "2048")
    assert json.loads(emitted.arguments[-1]) == {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [1, 8, 100, 512],
        "max_cudagraph_capture_size": 512,
    }
    assert emitted.warnings == ()
    assert '"FULL_DECODE_ONLY"' in emit("vllm", one_list(100), SETTINGS, policy="vllm:mode=FULL_DECODE_ONLY").text


@pytest.mark.parametrize("policy", ["vllm:version=0.23", "vllm:version=0.33"])
def test_vllm_off_the_grid(policy: str) -> None:
    """Decode batches that the warning says lose their FULL graph are those that the replica gives another mode."""
    sizes = one_list(1, 48, 96, 160)
    emitted = emit("vllm", sizes, SETTINGS, policy=policy)
    assert warned(emitted, "max_num_seqs 100 is off the list", "97 to 100", "160 tokens", "--max-num-seqs to 96")
    shapes = [BatchShape.decode(reqs) for reqs in (96, 97, 100)]
    assert modes(policy, sizes, SETTINGS, shapes) == [Mode.FULL, Mode.PIECEWISE, Mode.PIECEWISE]
    without = emit("vllm", one_list(1, 48, 96), SETTINGS, policy=policy)
    assert warned(without, "97 to 100 requests run eagerly")
    assert modes(policy, one_list(1, 48, 96), SETTINGS, shapes[1:]) == [Mode.EAGER] * 2
    assert not warned(emit("vllm", one_list(48, 100), SETTINGS, policy=policy), "off the list")


def test_vllm_cap_and_limits() -> None:
    """Sizes over 512 are said to be captured all the same; those over the token budget, which vLLM drops, are left out.

    vLLM doesn't start where the largest size that is stated is one that it drops.
    """
    assert warned(emit("vllm", one_list(100, 768), SETTINGS), "ends at 512", "768")
    small = Settings(max_num_reqs=100, max_num_tokens=256)
    for engine in ("vllm", "vllm-ascend"):
        over = emit(engine, one_list(100, 300), small)
        assert warned(over, "over max_num_batched_tokens 256 are left out", ": 300")
        config = json.loads(over.arguments[-1])
        assert config["cudagraph_capture_sizes"] == [100]
        assert config.get("max_cudagraph_capture_size", 100) == 100
        with pytest.raises(ConfigError, match="every size is over max_num_batched_tokens 256: 300"):
            emit(engine, one_list(300), small)


def test_vllm_drafts() -> None:
    """Rounding to 1 + k is said for the runner that does it, and a list that needs none has no such warning."""
    drafts = Settings(max_num_reqs=16, max_num_tokens=512, num_speculative_tokens=3)
    sizes = CaptureSizes((), (), (2, 6, 30, 64))
    assert warned(emit("vllm", sizes, drafts, policy="vllm:version=0.23"), "it becomes 4,8,32,64")
    assert warned(emit("vllm", sizes, drafts, policy="vllm:version=0.33"), "each by itself", "4,8,32,64 tokens")
    assert not emit("vllm", CaptureSizes((), (), (4, 32, 64)), drafts).warnings
    with pytest.raises(ConfigError, match="less than one decode row of 4"):
        emit("vllm", CaptureSizes((), (), (2, 3)), drafts)


def test_sglang() -> None:
    """Decode sizes are requests, prefill sizes tokens; a phase without sizes is switched off."""
    emitted = emit("sglang", CaptureSizes((1, 64, 100), (), (8, 16, 2048)), SETTINGS)
    assert "--cuda-graph-bs-decode 1 64 100 --cuda-graph-max-bs-prefill 2048" in emitted.text
    assert "--cuda-graph-bs-prefill 8 16 2048" in emitted.text
    none = emit("sglang", CaptureSizes((), (), (64,)), SETTINGS).text
    assert "--disable-decode-cuda-graph" in none
    assert warned(emit("sglang", CaptureSizes((), (), (64,)), SETTINGS), "every decode step runs eagerly")
    assert "--disable-prefill-cuda-graph" in emit("sglang", CaptureSizes((4,), (), ()), SETTINGS).text
    drafts = Settings(max_num_reqs=100, max_num_tokens=2048, num_speculative_tokens=1)
    assert "--cuda-graph-bs-decode 1 50" in emit("sglang", CaptureSizes((2, 100), (), ()), drafts).text
    assert warned(emit("sglang", CaptureSizes((4,), (), ()), SETTINGS), "5 to 100 requests run eagerly")


def test_sglang_padding_limit() -> None:
    """The tokens that the warning names are the very ones that the replica runs eagerly for padding."""
    sizes = CaptureSizes((100,), (), (8, 16, 100, 800))
    emitted = emit("sglang", sizes, SETTINGS)
    (warning,) = [each for each in emitted.warnings if "pads to at most 2 times" in each]
    ranges = [
        (int(one), int(last or one)) for one, last in re.findall(r"(\d+)(?: to (\d+))?", warning.split(" tokens")[0])
    ]
    named = {tokens for one, last in ranges for tokens in range(one, last + 1)}
    shapes = [BatchShape(prefills=[(tokens, 0)]) for tokens in range(1, 801)]
    eager = {i + 1 for i, mode in enumerate(modes("sglang", sizes, SETTINGS, shapes)) if mode is Mode.EAGER}
    assert named == eager


def test_tensorrt_llm() -> None:
    """A file of JSON, which YAML readers take; prefill graphs only where the policy has them."""
    sizes = CaptureSizes((1, 100), (), (64, 256))
    config = json.loads(emit("tensorrt-llm", sizes, SETTINGS).file)
    assert config["cuda_graph_config"] == {"enable_padding": True, "batch_sizes": [1, 100]}
    assert "prefill_capture_num_tokens" not in config
    config = json.loads(emit("tensorrt-llm", sizes, SETTINGS, policy="tensorrt_llm:prefill=breakable").file)
    assert config["prefill_cuda_graph_backend"] == "breakable"
    assert config["prefill_capture_num_tokens"] == [64, 256]
    assert warned(emit("tensorrt-llm", sizes, SETTINGS), "no parser of it was run")


def test_vllm_ascend() -> None:
    """vLLM's JSON, with the plugin's own traps."""
    emitted = emit("vllm-ascend", one_list(8, 96), SETTINGS)
    assert json.loads(emitted.arguments[-1])["cudagraph_capture_sizes"] == [8, 96]
    assert warned(emitted, "97 to 100", "issue 16049")
    assert warned(emitted, "Ascend 950")
    drafts = Settings(max_num_reqs=100, num_speculative_tokens=1)
    assert warned(emit("vllm-ascend", one_list(7, 100), drafts), "multiple of 2 (1 + k)")


def test_what_was_planned_for_another() -> None:
    """A plan for one policy and flags for another engine come with a warning that says which to plan for."""
    emitted = emit("vllm", one_list(100), SETTINGS, policy="auto")
    assert warned(emitted, "planned for auto", "--policy vllm")


@pytest.mark.parametrize("engine", ENGINES)
def test_bad_input(engine: str) -> None:
    """Nothing to capture is an error; so is an engine that nobody knows."""
    with pytest.raises(ConfigError, match="the plan captures nothing, as no size pays"):
        emit(engine, CaptureSizes(()), SETTINGS)
    with pytest.raises(UnknownNameError, match=f"did you mean '{engine}'"):
        emit(f"{engine}x", one_list(1), SETTINGS)
