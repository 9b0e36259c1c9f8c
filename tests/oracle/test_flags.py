"""What `emit` writes, read by the engines' own parsers."""

from __future__ import annotations

import ast
import json
import zipfile
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy.engine_flags import emit
from kpolicy.ladders import CaptureSizes
from kpolicy.settings import Settings
from tests.oracle.loader import VARIABLE, Release, loaded, oracle_folder
from tests.oracle.sglang_real import Release as SglangRelease
from tests.oracle.sglang_real import argument_parser

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(oracle_folder() is None, reason=f"{VARIABLE} isn't set: see docs/replicas.md"),
]

LISTS = ((1, 2, 4, 8), (192,), (3, 6, 9, 12, 48, 96), (8, 16, 512, 768, 1024, 2048))


def config_of(arguments: tuple[str, ...]) -> dict[str, Any]:
    return json.loads(arguments[arguments.index("--compilation-config") + 1])


def vllm_sizes(modules: Any, config: Any, settings: Settings) -> list[int]:
    """The list that vLLM's own start-up makes of a configuration."""
    config.post_init_cudagraph_sizes = lambda: None
    fake = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=config,
        uniform_decode_query_len=settings.query_len,
        num_speculative_tokens=settings.num_speculative_tokens,
        speculative_config=None,
        scheduler_config=SimpleNamespace(
            max_num_seqs=settings.max_num_reqs, max_num_batched_tokens=settings.max_num_tokens
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        performance_mode="balanced",
    )
    modules.module("config.vllm").VllmConfig._set_cudagraph_sizes(fake)
    return list(config.cudagraph_capture_sizes)


@pytest.mark.parametrize("version", ["0.23", "0.33"])
@pytest.mark.parametrize("sizes", LISTS)
def test_vllm_takes_the_list_as_it_is(version: str, sizes: tuple[int, ...]) -> None:
    """CompilationConfig validates what is written, and start-up leaves the list alone, over 512 tokens too."""
    pytest.importorskip("pydantic")
    settings = Settings(max_num_reqs=2048, max_num_tokens=2048)
    emitted = emit("vllm", CaptureSizes(sizes, sizes, sizes), settings, policy=f"vllm:version={version}")
    written = config_of(emitted.arguments)
    with loaded(oracle_folder(), version, real=("vllm.config.utils",), installed=("pydantic",)) as modules:
        compilation = modules.module("config.compilation")
        config = compilation.CompilationConfig(**written)
        assert config.cudagraph_capture_sizes == list(sizes)
        assert compilation.CUDAGraphMode[written["cudagraph_mode"]] is compilation.CUDAGraphMode.FULL_AND_PIECEWISE
        mode = compilation.CUDAGraphMode
        plain = SimpleNamespace(**written | {"cudagraph_mode": mode.FULL_AND_PIECEWISE})
        plain.pass_config = SimpleNamespace(enable_sp=False)
        platforms = modules.module("platforms")
        platforms.current_platform = SimpleNamespace(is_device_capability_family=lambda _: False)
        assert vllm_sizes(modules, plain, settings) == list(sizes)


@pytest.mark.parametrize("version", ["0.23", "0.33"])
def test_vllm_has_the_flags(version: str) -> None:
    """Every flag is one that vLLM's own parser adds."""
    emitted = emit("vllm", CaptureSizes((1,), (), (1,)), Settings(), policy=f"vllm:version={version}")
    source = Release(oracle_folder(), version).read("vllm/engine/arg_utils.py")
    flags = [argument for argument in emitted.arguments if argument.startswith("--")]
    assert len(flags) == 3
    for flag in flags:
        assert f'"{flag}"' in source, flag


@pytest.mark.parametrize("version", ["0.23", "0.33"])
def test_vllm_has_the_flag_for_drafts(version: str) -> None:
    """What a warning says must be given too is a flag and a field that vLLM has."""
    release = Release(oracle_folder(), version)
    drafts = Settings(max_num_reqs=16, max_num_tokens=64, num_speculative_tokens=3)
    emitted = emit("vllm", CaptureSizes((), (), (4, 64)), drafts, policy=f"vllm:version={version}")
    assert any('--speculative-config too, with "num_speculative_tokens": 3' in said for said in emitted.warnings)
    assert '"--speculative-config"' in release.read("vllm/engine/arg_utils.py")
    assert "num_speculative_tokens:" in release.read("vllm/config/speculative.py")


def test_vllm_refuses_what_is_wrong() -> None:
    """The check is one that can fail: a misspelt field and a size that is no number are refused."""
    pydantic = pytest.importorskip("pydantic")
    with loaded(oracle_folder(), "0.33", real=("vllm.config.utils",), installed=("pydantic",)) as modules:
        config = modules.module("config.compilation").CompilationConfig
        for wrong in ({"cudagraph_sizes": [1]}, {"cudagraph_capture_sizes": ["one"]}):
            with pytest.raises(pydantic.ValidationError):
                config(**wrong)


@pytest.mark.parametrize(("version", "runner"), [("0.23", "v1"), ("0.23", "v2"), ("0.33", "v1")])
def test_vllm_rounds_as_the_warning_says(version: str, runner: str) -> None:
    """With drafts, vLLM's own start-up makes the very list that the warning names."""
    settings = Settings(max_num_reqs=64, max_num_tokens=2048, num_speculative_tokens=3)
    sizes = (1, 4, 10, 16, 30)
    policy = f"vllm:version={version},runner={runner}"
    emitted = emit("vllm", CaptureSizes((), sizes, sizes), settings, policy=policy)
    assert any("it becomes 4,12,16;" in f"{warning};" for warning in emitted.warnings), emitted.warnings
    with loaded(oracle_folder(), version) as modules:
        compilation = modules.module("config.compilation")
        config = object.__new__(compilation.CompilationConfig)
        config.cudagraph_capture_sizes = list(sizes)
        config.max_cudagraph_capture_size = sizes[-1]
        config.compile_sizes = []
        more = (1,) if version == "0.23" else ()  # the tensor-parallel size
        config.adjust_cudagraph_sizes_for_spec_decode(settings.query_len, *more)
        assert config.cudagraph_capture_sizes == [4, 12, 16]


@pytest.mark.parametrize("sizes", LISTS)
def test_vllm_takes_what_is_for_vllm_ascend(sizes: tuple[int, ...]) -> None:
    """vllm-ascend 0.23 is configured by vLLM 0.23's parser and start-up: they take the list as it is."""
    pytest.importorskip("pydantic")
    settings = Settings(max_num_reqs=2048, max_num_tokens=2048)
    emitted = emit("vllm-ascend", CaptureSizes(sizes, sizes, sizes), settings)
    written = config_of(emitted.arguments)
    source = Release(oracle_folder(), "0.23").read("vllm/engine/arg_utils.py")
    assert all(f'"{argument}"' in source for argument in emitted.arguments if argument.startswith("--"))
    with loaded(oracle_folder(), "0.23", real=("vllm.config.utils",), installed=("pydantic",)) as modules:
        compilation = modules.module("config.compilation")
        config = compilation.CompilationConfig(**written)
        assert config.cudagraph_capture_sizes == list(sizes)
        mode = compilation.CUDAGraphMode[written["cudagraph_mode"]]
        plain = SimpleNamespace(max_cudagraph_capture_size=None, pass_config=SimpleNamespace(enable_sp=False))
        vars(plain).update(written, cudagraph_mode=mode)
        assert vllm_sizes(modules, plain, settings) == list(sizes)
        assert plain.max_cudagraph_capture_size == sizes[-1]


def ascend_functions(*names: str) -> dict[str, Any]:
    """Functions out of vllm-ascend's own platform.py and utils.py; skipped where the folder has no wheel of it."""
    wheels = sorted(oracle_folder().glob("vllm_ascend-0.23*.whl"))
    if not wheels:
        pytest.skip(f"{VARIABLE} has no vllm_ascend-0.23*.whl")
    found: dict[str, Any] = {"logger": SimpleNamespace(warning=lambda *_: None), "VllmConfig": object}
    with zipfile.ZipFile(wheels[0]) as wheel:
        for member in ("vllm_ascend/utils.py", "vllm_ascend/platform.py"):
            for node in ast.walk(ast.parse(wheel.read(member))):
                constant = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MAX_CAPTURE_SIZES_FOR_950"
                if constant or (isinstance(node, ast.FunctionDef) and node.name in names):
                    if isinstance(node, ast.FunctionDef):
                        node.decorator_list = []
                    exec(compile(ast.Module([node], []), member, "exec"), found)  # noqa: S102  the file under test
    assert set(names) <= set(found)
    return found


def test_vllm_ascend_keeps_a_list_that_is_given() -> None:
    """No default of vllm-ascend's comes in beside it; on a 950 four of its sizes are left, as the warning says."""
    prune, default = "prune_capture_sizes_for_950", "_get_default_max_cudagraph_capture_size"
    real = ascend_functions(prune, "update_cudagraph_capture_sizes", default)
    emitted = emit("vllm-ascend", CaptureSizes((), (), tuple(range(8, 81, 8))), Settings())
    config = SimpleNamespace(max_cudagraph_capture_size=None, post_init_cudagraph_sizes=lambda: None)
    vars(config).update(config_of(emitted.arguments))
    whole = SimpleNamespace(compilation_config=config, scheduler_config=SimpleNamespace(max_num_seqs=256))
    assert real[default](None, whole) is None
    real[prune](whole)
    assert config.cudagraph_capture_sizes == [8, 32, 56, 80]
    assert any(f"down to {len(config.cudagraph_capture_sizes)} sizes" in warning for warning in emitted.warnings)
    config.cudagraph_capture_sizes = config.max_cudagraph_capture_size = None
    assert real[default](None, whole) == 256


@pytest.mark.parametrize("policy", ["sglang", "sglang:prefill=disabled"])
def test_sglang_parses_the_flags(policy: str) -> None:
    """SGLang's own parser takes every flag, and reads the lists back as they were."""
    pytest.importorskip("msgspec")
    settings = Settings(max_num_reqs=200, max_num_tokens=4096)
    sizes = CaptureSizes((1, 3, 48, 200), (), (16, 48, 2048))
    emitted = emit("sglang", sizes, settings, policy=policy)
    with argument_parser(SglangRelease(oracle_folder())) as parser:
        found = parser.parse_args(["--model-path", "x", *emitted.arguments])
        assert found.cuda_graph_bs_decode == [1, 3, 48, 200]
        assert (found.cuda_graph_max_bs_decode, found.max_running_requests) == (200, 200)
        assert found.chunked_prefill_size == 4096
        if "disabled" in policy:
            assert found.disable_prefill_cuda_graph
            assert found.cuda_graph_bs_prefill is None
        else:
            assert found.cuda_graph_bs_prefill == [16, 48, 2048]


def test_sglang_parses_rounded_sizes_and_the_flags_for_drafts() -> None:
    """Sizes that no whole rows make come out as requests that its parser takes, beside what drafts take."""
    pytest.importorskip("msgspec")
    settings = Settings(max_num_reqs=200, max_num_tokens=4096, num_speculative_tokens=3)
    emitted = emit("sglang", CaptureSizes((1, 2, 6, 13, 900), (), (16, 8192)), settings)
    asked = "--speculative-algorithm too, with --speculative-num-draft-tokens 4"
    assert any(asked in warning for warning in emitted.warnings)
    drafts = ["--speculative-algorithm", "EAGLE", "--speculative-num-draft-tokens", "4"]
    with argument_parser(SglangRelease(oracle_folder())) as parser:
        found = parser.parse_args(["--model-path", "x", *emitted.arguments, *drafts])
        assert found.cuda_graph_bs_decode == [1, 2, 4, 200]
        assert found.cuda_graph_bs_prefill == [16, 4096]
        assert found.speculative_num_draft_tokens == 4


def test_sglang_without_decode_graphs() -> None:
    """The switch that turns a phase off is a flag that SGLang has."""
    pytest.importorskip("msgspec")
    emitted = emit("sglang", CaptureSizes((), (), (16, 48)), Settings())
    with argument_parser(SglangRelease(oracle_folder())) as parser:
        found = parser.parse_args(["--model-path", "x", *emitted.arguments])
        assert found.disable_decode_cuda_graph
        assert found.cuda_graph_bs_prefill == [16, 48]


def test_sglang_refuses_what_is_wrong() -> None:
    """The check is one that can fail: an unknown flag isn't taken."""
    pytest.importorskip("msgspec")
    with argument_parser(SglangRelease(oracle_folder())) as parser:
        _, left = parser.parse_known_args(["--model-path", "x", "--cuda-graph-decode-sizes", "1"])
        assert left == ["--cuda-graph-decode-sizes", "1"]
