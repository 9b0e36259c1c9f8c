"""Dispatch, ladder and the trial at warm-up under vLLM-Kunlun, in the real first runners of the vLLMs it is made for.

The runners, their dispatchers and their configuration code are those of vLLM 0.15.1, 0.23.0 and 0.25.1, out of the
wheels; the platform, the model and the cards are pretended.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kpolicy.costs import analytic_costs  # noqa: E402
from kpolicy.modes import Part  # noqa: E402
from kpolicy.reasons import Reason  # noqa: E402
from kpolicy.registry import GraphState  # noqa: E402
from kpolicy_vllm import kunlun, kunlun_attach, versions  # noqa: E402
from kpolicy_vllm.versions import signatures  # noqa: E402
from tests.fakes.signatures import arguments_of  # noqa: E402
from tests.integrations.vllm.kunlun_runner import brought_up, vllm_on_kunlun  # noqa: E402
from tests.integrations.vllm.real_runner import OTHER_FILES, RUNNER_FILES  # noqa: E402
from tests.oracle.loader import VARIABLE, Loaded, Release, loaded, oracle_folder  # noqa: E402

WHEEL = "KPOLICY_VLLM_KUNLUN_WHEEL"
RECORDED = {"0.15.1": signatures.V1_0_15, "0.23.0": signatures.V1_0_23, "0.25.1": signatures.V1_0_23}


def _there(version: str) -> bool:
    folder = oracle_folder()
    try:
        return folder is not None and Release(folder, version) is not None
    except FileNotFoundError:
        return False


VERSIONS = [
    pytest.param(version, marks=pytest.mark.skipif(not _there(version), reason=f"no vLLM {version} in {VARIABLE}"))
    for version in RECORDED
]
pytestmark = pytest.mark.oracle


@pytest.fixture(params=VERSIONS)
def vllm(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loaded]:
    """A vLLM on vLLM-Kunlun's platform, with the plugin loaded."""
    with vllm_on_kunlun(request.param, monkeypatch) as modules:
        yield modules


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_signatures_are_live(version: str) -> None:
    """What was recorded of each vLLM is what its wheel has."""
    folder = oracle_folder()
    assert folder is not None
    with loaded(folder, version, real=RUNNER_FILES + OTHER_FILES, installed=("torch",)):
        made = importlib.import_module((versions.KNOWN | versions.KUNLUN)[version]).make()
        assert made.signatures["v1"] is RECORDED[version]
        for names in made.signatures.values():
            assert list(signatures.differing(names)) == []


def test_ladder_and_dispatch_are_ours(vllm: Loaded) -> None:
    """Decodes to the most requests, pieces past 512; each is captured once, and the policy decides among them."""
    made = brought_up(vllm, max_num_seqs=600, max_num_batched_tokens=4096)
    ladder = made.state.ladder
    assert ladder.uniform[1][-1].num_tokens == 600
    assert ladder.piecewise[-1].num_tokens == 4096
    assert not ladder.mixed
    captured = {(mode.name, desc) for mode, desc in made.runner.ran if mode.name != "NONE"}
    assert len(captured) == len(ladder) == len(made.state.registry.captured())
    assert made.state.ready
    assert not made.state.costs.measured
    assert "figures" in made.state.costs_from
    assert not made.state.counters.counts
    # Both wrappers are ours: that of the whole model once it is loaded, and that of pieces by the platform's word.
    assert "load_model" in vars(made.runner)
    platform = sys.modules["vllm_kunlun.platforms.kunlun"].KunlunPlatform
    assert platform.get_static_graph_wrapper_cls() == "kpolicy_vllm.kunlun.KunlunGraphWrapper"
    for new in ([1] * 5, [1] * 600, [1] * 9 + [100], [700], [3000]):
        mode, desc = made.forward(new, [20] * len(new), [3] * len(new))
        key = made.state.dispatcher.key_of.get((mode, desc))
        assert (key is None) == (mode is made.modes.NONE)
        assert key is None or key in ladder.keys
        assert desc.num_tokens >= sum(new)
    reasons = {reason for _, reason in made.state.dispatcher.chooser.tallies()}
    assert reasons
    assert "vllm_rule" not in reasons


def test_drafts_have_sizes_of_their_own(vllm: Loaded) -> None:
    """With three drafts decode graphs are of four tokens a row."""
    made = brought_up(vllm, drafts=3, max_num_seqs=16)
    assert {key.query_len for key in made.state.ladder.keys if key.part is Part.FULL} == {4}
    mode, desc = made.forward([4] * 5, [30] * 5, [2] * 5)
    assert mode is made.modes.FULL
    assert desc.num_tokens % 4 == 0


def test_the_replica_is_vllms_own_rule(vllm: Loaded) -> None:
    """With vLLM's sizes and its rule as the policy every count is answered as stock answers it."""
    made = brought_up(vllm, kpolicy={"policy": "vllm:version=0.23,runner=v1"}, max_num_seqs=64)
    stock = vllm.module("v1.cudagraph_dispatcher").CudagraphDispatcher(made.runner.vllm_config)
    stock.initialize_cudagraph_keys(made.runner.compilation_config.cudagraph_mode, 1)
    modes = set()
    for tokens in range(1, 200):
        for uniform in (True, False):
            wanted = stock.dispatch(num_tokens=tokens, uniform_decode=uniform)
            assert made.state.dispatcher.dispatch(num_tokens=tokens, uniform_decode=uniform) == wanted
            modes.add(wanted[0].name)
    assert modes == {"FULL", "PIECEWISE", "NONE"}


def test_full_is_left_out_where_it_is_forbidden(vllm: Loaded) -> None:
    """A step that may have no FULL graph (cascade attention, encoder output) gets none."""
    made = brought_up(vllm)
    dispatcher = made.state.dispatcher
    named = "disable_full" in inspect.signature(dispatcher.dispatch).parameters
    without = {"disable_full": True} if named else {"invalid_modes": {made.modes.FULL}}
    for tokens in range(1, 65):
        dispatcher.facts = (tokens, np.ones(tokens, dtype=np.int32))
        mode, desc = dispatcher.dispatch(num_tokens=tokens, uniform_decode=True, **without)
        assert mode is not made.modes.FULL
        assert desc.num_tokens >= tokens


def test_data_parallel_ranks_get_the_size_they_agreed_on(vllm: Loaded) -> None:
    """The second question of a step has the padded size; the answer has that size again."""
    made = brought_up(vllm, ranks=2)
    dispatcher = made.state.dispatcher
    made.state.install_costs(analytic_costs())
    named = "disable_full" in inspect.signature(dispatcher.dispatch).parameters
    for tokens in range(1, 65):
        for uniform in (True, False):
            dispatcher.facts = (tokens, np.ones(tokens, dtype=np.int32))
            mode, desc = dispatcher.dispatch(num_tokens=tokens, uniform_decode=uniform)
            again = {"disable_full": mode is not made.modes.FULL} if named else {"valid_modes": {mode}}
            told, agreed = dispatcher.dispatch(num_tokens=desc.num_tokens, uniform_decode=uniform, **again)
            assert agreed.num_tokens == desc.num_tokens
            assert told is mode or named


def test_graphs_that_read_live_lengths_prove_themselves_at_warm_up(vllm: Loaded) -> None:
    """Each FULL graph is replayed three times or more, over rows of its own, before anything is served."""
    made = brought_up(vllm, frozen=False)
    wrapper = made.runner.model
    full = [key for key in made.state.ladder.keys if key.part is Part.FULL]
    assert full
    assert not wrapper.probation
    assert not wrapper.refused
    assert made.known == {}
    tried = Counter(tokens for mode, _, tokens in made.runner.served if mode == "FULL")
    assert all(tried[key.num_tokens] >= 1 + 3 for key in full)
    rows = {(rows, tokens) for mode, rows, tokens in made.runner.served if mode == "FULL"}
    assert all((key.num_tokens - 1, key.num_tokens) in rows for key in full if key.num_tokens > 1)
    before = made.model.calls
    made.forward([1] * 3, [40, 50, 60], [9, 10, 11])
    assert made.model.calls == before + 1


def test_no_made_up_rows_run_where_graphs_are_captured_anew(vllm: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be serving: those that aren't trusted are tried by steps of serving."""
    made = brought_up(vllm, frozen=False)
    made.runner.model.probation = {"a descriptor": None}
    shown: list[Any] = []
    monkeypatch.setattr(kunlun_attach, "show", lambda *given: shown.append(given))
    made.runner.capture_model()
    assert not shown


def test_graphs_with_frozen_lengths_are_taken_back_at_warm_up(vllm: Loaded) -> None:
    """They are withdrawn with the reason, and decodes replay pieces."""
    made = brought_up(vllm, frozen=True)
    state = made.state
    assert not [key for key in state.ladder.keys if key.part is Part.FULL]
    withdrawn = [record for record in state.registry.records() if record.state is GraphState.WITHDRAWN]
    assert withdrawn
    assert {record.reason for record in withdrawn} == {Reason.HOST_LENGTHS_FROZEN}
    assert {record.key.part for record in withdrawn} == {Part.FULL}
    mode, desc = made.forward([1] * 5, [20] * 5, [3] * 5)
    assert mode is made.modes.PIECEWISE
    assert desc.num_tokens >= 5


def test_a_trial_that_can_not_be_run_leaves_it_to_serving(vllm: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of serving try the graphs then; one that turns out frozen is withdrawn in the middle of it."""
    monkeypatch.setattr(kunlun_attach, "why_not", lambda _runner: "a KV connector would see the made-up rows")
    made = brought_up(vllm, frozen=True)
    assert made.runner.model.probation
    before = len(made.state.ladder.keys)
    mode, desc = made.forward([1] * 3, [40, 50, 60], [9, 10, 11])
    assert mode is made.modes.FULL
    assert desc in made.runner.model.refused
    assert len(made.state.ladder.keys) == before - 1
    monkeypatch.setattr(kunlun_attach, "why_not", lambda _runner: None)
    monkeypatch.setattr(kunlun_attach, "Steps", lambda _runner: 1 / 0)
    made = brought_up(vllm, frozen=False)
    assert made.state.counters.counts["not_tried"] == 1
    assert made.runner.model.probation


def test_the_second_runner_is_left_alone(vllm: Loaded) -> None:
    """Nothing would try its FULL graphs, so it isn't attached to, and says what to set."""
    with pytest.raises(versions.UnsupportedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        kunlun_attach.attach(SimpleNamespace(cudagraph_manager=None), None)  # type: ignore[arg-type]


def test_without_vllm_kunlun_these_releases_are_not_known(vllm: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices nothing of 0.15.1 and 0.25.1 was tried."""
    monkeypatch.setattr(versions, "find_spec", lambda _name: None)
    if sys.modules["vllm"].__version__ in versions.KNOWN:
        assert versions.adapter().version in versions.KNOWN
        return
    with pytest.raises(versions.UnsupportedError, match=r"knows 0\.23\.0 and 0\.33\.0\."):
        versions.adapter()


@pytest.mark.parametrize("version", [
    pytest.param(version, marks=pytest.mark.skipif(not _there(version), reason=f"no vLLM {version} in {VARIABLE}"))
    for version in ("0.11.0", *RECORDED)
])  # fmt: skip
def test_what_the_wrapper_needs_is_in_each_vllm(version: str) -> None:
    """vLLM's wrapper takes and keeps what ours reads, its runner names it itself, and a worker is where we look."""
    folder = oracle_folder()
    assert folder is not None
    release = Release(folder, version)
    wrapper = release.read("vllm/compilation/cuda_graph.py")
    init = next(
        each for node in ast.parse(wrapper).body if getattr(node, "name", "") == "CUDAGraphWrapper"
        for each in node.body if getattr(each, "name", "") == "__init__"  # type: ignore[attr-defined]
    )  # fmt: skip
    taken = [each.partition("=")[0] for each in arguments_of(init)]
    assert taken == ["self", "runnable", "vllm_config", "runtime_mode", "cudagraph_options"]
    for name in (*taken[1:], "concrete_cudagraph_entries"):
        assert f"self.{name}" in wrapper, name
    assert "self.model = CUDAGraphWrapper(" in release.read("vllm/v1/worker/gpu_model_runner.py")
    places = kunlun._WORKERS[1:] if version == "0.11.0" else kunlun._WORKERS[:1]
    for place in places:
        assert "class WorkerWrapperBase" in release.read(place.replace(".", "/") + ".py")


@pytest.mark.skipif(WHEEL not in os.environ, reason=f"{WHEEL} names no wheel of vllm-kunlun 0.11.1")
def test_what_is_replaced_is_in_the_published_package() -> None:
    """The platform's method, its name, and the fields of the metadata that a trial reads."""
    with zipfile.ZipFile(Path(os.environ[WHEEL])) as wheel:
        platform = wheel.read("vllm_kunlun/platforms/kunlun.py").decode("utf-8")
        attention = wheel.read("vllm_kunlun/v1/attention/backends/kunlun_attn.py").decode("utf-8")
    assert "    @classmethod\n    def get_static_graph_wrapper_cls(cls) -> str:\n" in platform
    assert '"vllm.compilation.cuda_graph.CUDAGraphWrapper"' in platform
    assert "vllm.v1.worker.gpu_worker.Worker" in platform
    for field in (
        "seq_lens_tensor_cpu:",
        "kv_lod_cpu:",
        "query_start_loc_host:",
        "block_tables:",
        "num_actual_tokens:",
    ):
        assert field in attention, field
