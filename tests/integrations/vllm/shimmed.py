"""The real dispatchers of vLLM with kpolicy's shim on them, in the place of the stock ones, without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs

from kpolicy.costs import CostTable
from kpolicy.modes import Part
from kpolicy_vllm.config import Config
from kpolicy_vllm.ladder import one_list, sizes_of
from kpolicy_vllm.runner_v1 import dispatcher_class
from kpolicy_vllm.runner_v2 import manager_class, take_over
from kpolicy_vllm.state import State
from tests.oracle.configs import Deployment
from tests.oracle.vllm_real import RealVllm


class ShimmedVllm(RealVllm):
    """A real vLLM whose dispatcher or manager is kpolicy's.

    Args:
        loaded, version, runner: as of `RealVllm`.
        policy: what decides; the deployment's own replica by default.
        costs: what launches take.
        config: the settings of the shim.
        ranks: data-parallel ranks.
    """

    def __init__(
        self,
        *real: Any,
        policy: Any = None,
        costs: CostTable | None = None,
        config: Config | None = None,
        ranks: int = 1,
    ) -> None:
        super().__init__(*real)
        self.given = policy
        self.costs = costs
        self.ranks = ranks
        self.config = config or Config(policy="vllm")

    def start(self, deployment: Deployment) -> None:
        """Start vLLM so, with the shim. Its own sizes stay unless the config has some.

        Raises:
            ValueError: vLLM refuses to start.
        """
        settings = deployment.settings
        self.state = State(self.config, settings, num_dp_ranks=self.ranks)
        self.state.policy = self.given or deployment.policy
        self.state.claims = deployment.claims
        self.state.sizes = sizes_of(self.config, settings, ranks=self.ranks)
        if self.state.sizes is not None:
            deployment = attrs.evolve(deployment, sizes=tuple(one_list(self.state.sizes)))
        super().start(deployment)
        if self._runner == "v1":
            module = self._loaded.module("v1.cudagraph_dispatcher")
            made = dispatcher_class(module.CudagraphDispatcher, self.compilation.CUDAGraphMode, module.BatchDescriptor)
            config = self._dispatcher.vllm_config
            self._dispatcher = self.state.dispatcher = made(config, self.state)
            self._dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, settings.query_len)

    def _make_manager(self, vllm_config: SimpleNamespace, config: Any, deployment: Deployment) -> Any:
        manager = super()._make_manager(vllm_config, config, deployment)
        module = self._loaded.module("v1.worker.gpu.cudagraph_utils")
        base, newest = module.CudaGraphManager, self._version == "0.33"
        self.state.loras_apart = newest
        made = manager_class(base, base, self.compilation.CUDAGraphMode, module.BatchExecutionDescriptor, newest=newest)
        take_over(manager, self.state, made)
        return manager

    def captured(self) -> None:
        """Take every graph that the shim wants as captured."""
        self.state.timed = self.state.costs = self.costs
        if self._runner == "v2":
            self.manager._graphs_captured = True
        for key in self.state.dispatcher.chooser.desc_of:
            pieces = 25 if key.part is Part.PIECEWISE else 1
            self.state.registry.capture(key, bytes=1 << 20, seconds=0.01, graphs=pieces)
        self.state.graphs_captured()
