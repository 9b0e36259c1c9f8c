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
    assert emit("vllm", one_list(1, 8, 100, 512), Settings(max_num_reqs=100, max_num_tokens=512)).warnings == ()
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
    for version, runner in (("0.23", "v1"), ("0.23", "v2"), ("0.33", "v1"), ("0.33", "v2")):
        policy = f"vllm:version={version},runner={runner}"
        assert not warned(emit("vllm", CaptureSizes((), (), (4, 32, 64)), drafts, policy=policy), "round")
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


ABOVE = [
    ("vllm", "vllm:version=0.23", "--max-num-batched-tokens", "all"),
    ("vllm", "vllm:version=0.33", "--max-num-batched-tokens", "all"),
    ("vllm", "vllm:mode=PIECEWISE", "--max-num-batched-tokens", "all"),
    ("vllm", "vllm:mode=FULL", "--max-num-batched-tokens", "all"),
    ("vllm-ascend", "ascend", "--max-num-batched-tokens", "all"),
    ("vllm-ascend", "ascend:mode=piecewise", "--max-num-batched-tokens", "all"),
    ("sglang", "sglang", "--chunked-prefill-size", "prefill"),
    ("tensorrt-llm", "tensorrt_llm:prefill=breakable", "max_num_tokens", "prefill"),
]


@pytest.mark.parametrize(("engine", "policy", "limit", "name"), ABOVE)
def test_above_the_largest_size(engine: str, policy: str, limit: str, name: str) -> None:
    """Steps over the largest size are said to run eagerly, as the replica has them, with both ways out."""
    sizes = one_list(1, 100, 256, 512)
    emitted = emit(engine, sizes, SETTINGS, policy=policy)
    assert warned(emitted, "of 513 to 2048 tokens run eagerly: the list ends at 512", f"and {limit} is 2048.")
    assert warned(emitted, "run eagerly", f"add 2048 to the list (plan with --largest {name}=2048)")
    assert warned(emitted, "run eagerly", f"or lower {limit} to 512")
    found = modes(policy, sizes, SETTINGS, [BatchShape(prefills=[(tokens, 0)]) for tokens in (512, 513, 2048)])
    assert [mode is Mode.EAGER for mode in found] == [False, True, True]
    assert not warned(emit(engine, one_list(1, 100, 1024, 2048), SETTINGS, policy=policy), "2048 tokens run eagerly")


def test_above_the_largest_size_of_decodes() -> None:
    """What runs without a graph by the mode that was asked for isn't told of; decode batches above the list are."""
    assert emit("vllm", one_list(1, 100), SETTINGS, policy="vllm:mode=FULL_DECODE_ONLY").warnings == ()
    over = emit("vllm", one_list(1, 96, 160), SETTINGS, policy="vllm:mode=FULL_DECODE_ONLY")
    assert warned(over, "97 to 100 requests run eagerly", "add 100 to the list, or lower --max-num-seqs to 96")
    shapes = [BatchShape.decode(97), BatchShape.decode(100)]
    assert modes("vllm:mode=FULL_DECODE_ONLY", one_list(1, 96, 160), SETTINGS, shapes) == [Mode.EAGER] * 2
    assert not warned(emit("vllm", one_list(1, 96, 160), SETTINGS, policy="vllm:mode=FULL"), "max_num_seqs")
    assert modes("vllm:mode=FULL", one_list(1, 96, 160), SETTINGS, shapes) == [Mode.FULL] * 2
    for engine, limit in (("sglang", "--max-running-requests"), ("tensorrt-llm", "max_batch_size")):
        emitted = emit(engine, CaptureSizes((4,), (), (2048,)), SETTINGS)
        assert warned(
            emitted, "5 to 100 requests run eagerly", f"lower {limit} to 4", "(plan with --largest decode=100)"
        )
    few = emit("vllm", one_list(64), Settings(max_num_reqs=100, max_num_tokens=80))
    assert warned(few, "65 to 80 requests run eagerly", "add 80 to the list")
    assert not warned(few, "lower --max-num-batched-tokens")  # which vLLM refuses under max_num_seqs


def test_advice_keeps_to_multiples() -> None:
    """No size is advised that isn't one of the multiples that sizes are planned in."""
    sizes = CaptureSizes((), (), (7, 252, 483, 2037))
    emitted = emit("vllm", sizes, Settings(max_num_reqs=256, max_num_tokens=2048), multiple_of=7)
    assert warned(
        emitted, "253 to 256 requests", "To avoid that, lower --max-num-seqs to 252, as sizes are multiples of 7"
    )
    assert warned(
        emitted, "steps of 2038 to 2048 tokens", "add 2044 to the list",
        "and lower --max-num-batched-tokens to 2044, or lower --max-num-batched-tokens to 2037",
    )  # fmt: skip
    assert not warned(emitted, "add 256")
    assert warned(emit("vllm", sizes, Settings(max_num_reqs=256, max_num_tokens=2048)), "add 256 to the list")
    for engine in ("sglang", "tensorrt-llm"):
        apart = CaptureSizes((7, 245), (), (7, 2037))
        policy = "tensorrt_llm:prefill=breakable" if engine == "tensorrt-llm" else None
        limits = Settings(max_num_reqs=256, max_num_tokens=2048)
        found = emit(engine, apart, limits, policy=policy, multiple_of=7)
        assert warned(found, "246 to 256 requests", "add 252 to the list and lower")
        assert warned(found, "2038 to 2048 tokens", "add 2044 to the list and lower")
    drafts = Settings(max_num_reqs=16, max_num_tokens=2048, num_speculative_tokens=2)
    assert warned(emit("vllm", CaptureSizes((), (), (48, 512)), drafts), "add 2046 to", "multiples of 3")
    with pytest.raises(ConfigError, match="multiple_of is 0"):
        emit("vllm", sizes, SETTINGS, multiple_of=0)


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        ("vllm", '--speculative-config too, with "num_speculative_tokens": 3'),
        ("vllm-ascend", '--speculative-config too, with "num_speculative_tokens": 3'),
        ("sglang", "--speculative-algorithm too, with --speculative-num-draft-tokens 4"),
        ("tensorrt-llm", "a speculative_config with max_draft_len 3 into the file too"),
    ],
)
def test_drafts_are_asked_for_apart(engine: str, asked: str) -> None:
    """Flags for rows with drafts say that nothing among them makes the engine draft."""
    sizes = CaptureSizes((4, 400), (), (4, 400, 2048))
    drafts = Settings(max_num_reqs=100, max_num_tokens=2048, num_speculative_tokens=3)
    assert warned(emit(engine, sizes, drafts), "rows of 4 tokens (1 + k), and nothing here asks for drafts", asked)
    assert not warned(emit(engine, sizes, SETTINGS), "asks for drafts")


@pytest.mark.parametrize(
    ("engine", "policy", "sizes", "limits", "fewer"),
    [
        ("vllm", "vllm:version=0.23", CaptureSizes((3, 6), (), (100, 253)), (2, 512), "--max-num-batched-tokens to"),
        ("vllm-ascend", "ascend", CaptureSizes((3, 6), (), (100, 253)), (2, 512), "--max-num-batched-tokens to"),
        ("vllm", "vllm:varlen=true", CaptureSizes((), (), (17, 34, 143)), (64, 512), "--max-num-seqs to"),
    ],
)
def test_no_limit_is_advised_that_the_list_is_beyond(
    engine: str, policy: str, sizes: CaptureSizes, limits: tuple[int, int], fewer: str
) -> None:
    """Where the engine rounds sizes it doesn't start with fewer tokens, or loses a graph with fewer requests."""
    settings = Settings(max_num_reqs=limits[0], max_num_tokens=limits[1], num_speculative_tokens=2)
    warnings = " ".join(emit(engine, sizes, settings, policy=policy).warnings)
    assert "To avoid that, add" in warnings
    assert f"or lower {fewer}" not in warnings


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_decode_sizes_are_whole_rows(engine: str) -> None:
    """Sizes that no whole rows make are rounded up, those over the limits are the limit, and both are said."""
    drafts = Settings(max_num_reqs=100, max_num_tokens=2048, num_speculative_tokens=3)
    emitted = emit(engine, CaptureSizes((1, 2, 6, 13)), drafts)
    assert warned(emitted, "decode sizes are rounded up to multiples of 4 (1 + k); in requests they are 1,2,4")
    over = emit(engine, CaptureSizes((4, 404), (), (64, 4096)), drafts, policy=PREFILLS.get(engine))
    assert warned(over, "decode sizes over max_", "100 become 100, as no batch is larger: 101")
    assert warned(over, "prefill sizes over", "2048 become 2048, as no batch is larger: 4096")
    if engine == "sglang":
        assert "--cuda-graph-max-bs-decode 4 --cuda-graph-bs-decode 1 2 4 " in emitted.text
        assert "--cuda-graph-max-bs-decode 100 --cuda-graph-bs-decode 1 100 " in over.text
        assert "--cuda-graph-max-bs-prefill 2048 --cuda-graph-bs-prefill 64 2048" in over.text
    else:
        assert json.loads(emitted.file)["cuda_graph_config"]["batch_sizes"] == [1, 2, 4]
        config = json.loads(over.file)
        assert config["cuda_graph_config"]["batch_sizes"] == [1, 100]
        assert config["prefill_capture_num_tokens"] == [64, 2048]
    assert not warned(emit(engine, CaptureSizes((4, 400), (), (64, 2048)), drafts), "become")


PREFILLS = {"tensorrt-llm": "tensorrt_llm:prefill=breakable"}


def test_a_phase_without_graphs_is_told() -> None:
    """A phase whose steps all run eagerly is named, unless the policy has it off and nothing is lost by that."""
    for engine in ("sglang", "tensorrt-llm"):
        policy = PREFILLS.get(engine)
        decodes, prompts = CaptureSizes((100,)), CaptureSizes((), (), (2048,))
        assert warned(emit(engine, decodes, SETTINGS, policy=policy), "every step with prompts runs eagerly")
        assert warned(emit(engine, prompts, SETTINGS, policy=policy), "every decode step runs eagerly")
    assert warned(emit("tensorrt-llm", CaptureSizes((100,), (), (64,)), SETTINGS), "left out", "prefill graphs off")
    off = emit("sglang", CaptureSizes((100,), (), (64,)), SETTINGS, policy="sglang:decode=disabled,prefill=disabled")
    assert "--disable-decode-cuda-graph --disable-prefill-cuda-graph" in off.text
    assert warned(off, "every decode step runs eagerly: the policy has decode graphs off")
    assert emit("sglang", CaptureSizes((100,)), SETTINGS, policy="sglang:prefill=disabled").warnings == ()


def test_sglang_padding_limit() -> None:
    """The tokens that the warning names are the very ones that the replica runs eagerly for padding."""
    sizes = CaptureSizes((100,), (), (8, 16, 100, 800))
    emitted = emit("sglang", sizes, SETTINGS)
    (warning,) = [each for each in emitted.warnings if "pads to at most 2 times" in each]
    ranges = [
        (int(one), int(last or one)) for one, last in re.findall(r"(\d+)(?: to (\d+))?", warning.split(" tokens")[0])
    ]
    assert re.search(r"batches of [\d, to]+ and \d+ to \d+ tokens run eagerly", warning)
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
