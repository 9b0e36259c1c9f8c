"""Graphs that vLLM's own managers of drafters and encoders hold: counted apart, and freed as vLLM frees them."""

import gc
import importlib
import weakref
from types import SimpleNamespace

import pytest

from kpolicy_vllm.mirror import enter_others, others
from kpolicy_vllm.started import before_capture
from tests.integrations.vllm.test_dispatch import chooser
from tests.integrations.vllm.test_mirror import Graph
from tests.oracle.loader import loaded, oracle_folder
from tests.oracle.wheels import VLLM_WHEELS

pytestmark = VLLM_WHEELS

SPECULATOR = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils"
ENCODER = "vllm.v1.worker.encoder_cudagraph"
FILES = {"0.23": (ENCODER,), "0.33": (ENCODER, SPECULATOR, "vllm.v1.worker.gpu.cudagraph_utils")}
BOTH = pytest.mark.parametrize("version", list(FILES))


def speculator_of_vllm(drafts):
    """0.33's own manager of a speculator, with a graph of 8 requests for each of those numbers of drafts."""
    module = importlib.import_module(SPECULATOR)
    full = module.CUDAGraphMode.FULL
    descs = [module.SpeculatorBatchDescriptor(full, 8, 8, 1, num_speculative_tokens=count) for count in drafts]
    manager = object.__new__(module.SpeculatorCudaGraphManager)
    manager._capture_descs, manager.graphs = {full: descs}, {desc: Graph() for desc in descs}
    manager.breakable_cg_runner = None
    importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils").get_offloader = lambda: SimpleNamespace(
        sync_prev_onload=lambda: None
    )
    return manager


def test_drafters_graphs_of_each_number_of_drafts_are_counted_apart():
    """vLLM 0.33 with a number of drafts that goes with the batch."""
    with loaded(oracle_folder(), "0.33", real=FILES["0.33"]):
        manager = speculator_of_vllm((4, 3, 2))
        runner = SimpleNamespace(speculator=SimpleNamespace(decode=manager))
        state = chooser().state
        enter_others(state, runner, bytes=0, seconds=0.0)
        for times, desc in enumerate(manager.graphs, 1):
            for _ in range(times):
                manager.run_fullgraph(desc)
        hits = {key.variant: state.registry.record(key).hits for key, _ in others(runner)}
        assert hits == {"decode k4": 1, "decode k3": 2, "decode k2": 3}
        assert not state.counters.counts


def encoder_of_vllm(version):
    """vLLM's own manager of the vision encoder's graphs, with one for 64 tokens."""
    manager = object.__new__(importlib.import_module(ENCODER).EncoderCudaGraphManager)
    graphs = {64: SimpleNamespace(graph=Graph())}
    manager.budget_graphs = graphs if version == "0.23" else {"image": graphs}
    return manager


@BOTH
def test_graphs_that_vllm_drops_are_freed(version):
    """At once, without a collection: vLLM freezes its heap after the start, which no collection looks at."""
    with loaded(oracle_folder(), version, real=FILES[version]):
        encoder = encoder_of_vllm(version)
        parts = {"encoder_cudagraph_manager": encoder}
        if version == "0.33":
            parts["speculator"] = SimpleNamespace(decode=speculator_of_vllm((2,)))
        runner = SimpleNamespace(**parts)
        enter_others(chooser().state, runner, bytes=0, seconds=0.0)
        dropped = [weakref.ref(graph) for _, graph in others(runner)]
        assert len(dropped) == len(parts)
        gc.freeze()
        try:
            encoder.clear()
            if version == "0.33":
                runner.speculator.decode.release_graphs()
            assert [graph() for graph in dropped] == [None] * len(parts)
        finally:
            gc.unfreeze()


def test_graphs_captured_anew_are_counted_and_those_kept_once():
    """Elastic parallelism drops a drafter's graphs and captures them again; the encoder's stay."""
    with loaded(oracle_folder(), "0.33", real=FILES["0.33"]):
        encoder, drafter = encoder_of_vllm("0.33"), speculator_of_vllm((2,))
        runner = SimpleNamespace(encoder_cudagraph_manager=encoder, speculator=SimpleNamespace(decode=drafter))
        state = chooser().state
        state.graphs_captured()
        enter_others(state, runner, bytes=0, seconds=0.0)
        (desc,) = drafter.graphs
        drafter.release_graphs()
        before_capture(state)
        drafter.graphs[desc] = Graph()
        enter_others(state, runner, bytes=0, seconds=0.0)
        drafter.run_fullgraph(desc)
        encoder.budget_graphs["image"][64].graph.replay()
        assert [state.registry.record(key).hits for key, _ in others(runner)] == [1, 1]
        assert not state.counters.counts
