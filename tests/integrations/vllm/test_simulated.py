"""The comparison in simulated time: its result is what it says, and the sides are what they are in vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.vllm import simulated
from benchmarks.vllm.ladders import PACED, arguments_of
from kpolicy.schemas import read_profile
from kpolicy_vllm.config import Config
from kpolicy_vllm.ladder import default_sizes, one_list, sizes_of

TRACES = Path(__file__).parents[4] / "shared" / "traces"
PROFILE = simulated.RESULTS / "h200" / "vllm_costs_qwen05b.json"


@pytest.mark.skipif(not TRACES.exists(), reason="the traces lie beside the repository and aren't here")
def test_the_result_on_record_is_what_is_simulated_now() -> None:
    """One load again, on every table and side: the same ratios."""
    written = json.loads((simulated.RESULTS / "vllm_simulated.json").read_text())["rows"]
    assert simulated.compare("chat", TRACES, read_profile(PROFILE).costs) == [
        row for row in written if row["load"] == "chat"
    ]


def test_the_sides_are_those_of_the_shim() -> None:
    """Sizes and objective of each side are what the shim does with the settings of the comparison."""
    sides = simulated.sides(simulated.LIMITS)
    shim = {"additional_config": {"kpolicy": {"policy": "auto"}}}
    for name, side in (("kpolicy", "kpolicy"), ("paced", "paced 1:1")):
        given = arguments_of(name, shim, max_seqs=1024, max_tokens=8192)["additional_config"]
        config = Config.load(given, {})
        assert config is not None
        assert sizes_of(config, simulated.LIMITS) == sides[side].sizes
        assert config.objective == sides[side].objective
        assert config.paces is (sides[side].pace is not None)
    assert shim == {"additional_config": {"kpolicy": {"policy": "auto"}}}
    assert PACED["objective"] == "1:1"


def test_sides_of_other_schedulers_and_of_few_graphs_are_of_the_shim_s_own_settings() -> None:
    """`split` divides steps for short gaps and paces none; `lazy` starts with few graphs; else they are `kpolicy`."""
    shim = {"additional_config": {"kpolicy": {"policy": "auto"}}}
    found = {}
    for name in ("kpolicy", "split", "lazy"):
        config = Config.load(arguments_of(name, shim, max_seqs=1024, max_tokens=8192)["additional_config"], {})
        assert config is not None
        assert sizes_of(config, simulated.LIMITS) == default_sizes(simulated.LIMITS)
        found[name] = config.split, config.split_decodes, config.lazy, config.paces, config.objective
    assert found["kpolicy"] == (False, 1, False, False, "throughput")
    assert found["split"] == (True, 4, False, False, "0:1:2")
    assert found["lazy"] == (False, 1, True, False, "throughput")
    assert shim == {"additional_config": {"kpolicy": {"policy": "auto"}}}


def test_wide_has_the_shim_s_sizes_of_that_model(tmp_path: Path) -> None:
    """Layers that a device bounds have more sizes, which stock must be given too."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4096, "intermediate_size": 14336}))
    sizes = {
        model: arguments_of("wide", {}, max_seqs=1024, max_tokens=8192, model=model)["compilation_config"][
            "cudagraph_capture_sizes"
        ]
        for model in (None, tmp_path, tmp_path / "none")
    }
    assert sizes[None] == sizes[tmp_path / "none"] == one_list(default_sizes(simulated.LIMITS))
    assert sizes[tmp_path] == one_list(default_sizes(simulated.LIMITS, wide=True))
    assert len(sizes[tmp_path]) > len(sizes[None])
