"""The real vLLM behind one interface: start it for a deployment, list its graphs, dispatch a batch.

An outcome is ``(mode, tokens, requests, uniform length, longest query, LoRA case)``; parts a runner doesn't know are
None. `ASSERTED` stands for an assertion or a ValueError of vLLM.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from kpolicy.settings import Settings
from tests.oracle.configs import VLLM_LEVEL, Batch, Deployment
from tests.oracle.loader import Loaded

ASSERTED = "asserted"
Outcome = tuple[str, int, "int | None", "int | None", "int | None", "int | None"]


class RealVllm:
    """Real dispatch of one release.

    Args:
        loaded: the release's modules.
        version: the release.
        runner: v1 or v2.
    """

    def __init__(self, loaded: Loaded, version: str, runner: str) -> None:
        self._loaded = loaded
        self._version = version
        self._runner = runner
        self.compilation: ModuleType = loaded.module("config.compilation")
        self._levels = loaded.module("v1.attention.backend").AttentionCGSupport

    def resolve(self, mode: str, level: str, query_len: int, split: bool, sizes: tuple[int, ...]) -> Any:
        """A real CompilationConfig after `resolve_cudagraph_mode_and_sizes`.

        Raises:
            ValueError: vLLM refuses to start.
        """
        config = object.__new__(self.compilation.CompilationConfig)
        modes = self.compilation.CompilationMode
        config.cudagraph_mode = self.compilation.CUDAGraphMode[mode]
        config.cudagraph_capture_sizes = list(sizes)
        config.max_cudagraph_capture_size = sizes[-1]
        config.mode = modes.VLLM_COMPILE if split else modes.NONE
        config.splitting_ops = list(config._attention_ops) if split else []
        config.use_inductor_graph_partition = False
        config.compile_sizes = []
        config.pass_config = SimpleNamespace(enable_sp=False)
        extra = {"use_v2_model_runner": self._runner == "v2"} if self._version == "0.33" else {}
        config.resolve_cudagraph_mode_and_sizes(self._levels[level], "a backend", query_len, **extra)
        return config

    def start(self, deployment: Deployment) -> None:
        """Start vLLM so.

        Raises:
            ValueError: vLLM refuses to.
        """
        policy, settings = deployment.policy, deployment.settings
        mode = policy.mode.value
        split = policy.piecewise_split
        if policy.varlen:
            adaptive = self._loaded.module("v1.worker.gpu.spec_decode.adaptive_verification")
            asked = self.compilation.CUDAGraphMode[mode]
            mode = adaptive.resolve_adaptive_cudagraph_mode(asked, piecewise_capture_available=True).name
        config = self.resolve(mode, VLLM_LEVEL[deployment.level], settings.query_len, split, deployment.sizes)
        config.cudagraph_specialize_lora = policy.specialize_lora
        self._settings = settings
        vllm_config = self._vllm_config(config, deployment)
        if self._runner == "v1":
            module = self._loaded.module("v1.cudagraph_dispatcher")
            self._dispatcher = module.CudagraphDispatcher(vllm_config)
            self._dispatcher.initialize_cudagraph_keys(config.cudagraph_mode, settings.query_len)
        else:
            self.manager = self._make_manager(vllm_config, config, deployment)
            self.manager._graphs_captured = True

    def _vllm_config(self, config: Any, deployment: Deployment) -> SimpleNamespace:
        settings, policy = deployment.settings, deployment.policy
        k = settings.num_speculative_tokens
        schedule = [list(part) for part in policy.drafts]
        speculative = SimpleNamespace(
            num_speculative_tokens=k,
            uses_dynamic_speculative_decoding=lambda: bool(schedule),
            num_speculative_tokens_per_batch_size=schedule,
        )
        lora = SimpleNamespace(max_loras=settings.max_loras, specialize_active_lora=policy.specialize_active_lora)
        return SimpleNamespace(
            compilation_config=config,
            num_speculative_tokens=k,
            speculative_config=speculative if k else None,
            lora_config=lora if settings.max_loras else None,
            scheduler_config=SimpleNamespace(max_num_seqs=settings.max_num_reqs),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        )

    def _make_manager(self, vllm_config: SimpleNamespace, config: Any, deployment: Deployment) -> Any:
        module = self._loaded.module("v1.worker.gpu.cudagraph_utils")
        q = deployment.settings.query_len
        if self._version == "0.23":
            return module.CudaGraphManager(vllm_config, None, config.cudagraph_mode, q)
        cases = self._loaded.module("v1.worker.gpu.lora_utils").get_lora_capture_cases(vllm_config.lora_config, config)
        return module.CudaGraphManager(
            vllm_config, None, config.cudagraph_mode, q, cases, varlen_decode=deployment.policy.varlen
        )

    def graphs(self) -> list[Outcome]:
        """Every graph that it would capture, in its order."""
        if self._runner == "v1":
            listed = self._dispatcher.get_capture_descs()
            return [self.outcome_v1(mode, desc) for mode, descs in listed for desc in descs]
        modes = self.compilation.CUDAGraphMode
        listed = self.manager._capture_descs
        return [self.outcome_v2(desc) for mode in (modes.PIECEWISE, modes.FULL) for desc in listed.get(mode, [])]

    def dispatch(self, batch: Batch) -> Outcome | str:
        """What vLLM does with the batch."""
        return self._dispatch_v1(batch) if self._runner == "v1" else self._dispatch_v2(batch)

    def dispatch_v1(self, batch: Batch, tokens: int, valid: Any, invalid: Any) -> tuple[Any, Any]:
        """The dispatcher's own answer for the batch padded to `tokens`, with modes allowed and excluded by name."""
        q, modes = self._settings.query_len, self.compilation.CUDAGraphMode
        # The runner's test, `_is_uniform_decode` in vllm/v1/worker/gpu_model_runner.py: shape alone.
        uniform = batch.longest == q and batch.num_tokens == q * len(batch.rows)
        allowed, excluded = (names and {modes[name] for name in names} for names in (valid, invalid))
        answer: tuple[Any, Any] = self._dispatcher.dispatch(
            num_tokens=tokens,
            uniform_decode=uniform,
            has_lora=batch.loras > 0,
            num_active_loras=batch.loras,
            valid_modes=allowed,
            invalid_modes=excluded,
        )
        return answer

    def _dispatch_v1(self, batch: Batch) -> Outcome | str:
        try:
            return self.outcome_v1(*self.dispatch_v1(batch, batch.num_tokens, batch.valid, batch.invalid))
        except AssertionError:
            return ASSERTED

    def uniform_v2(self, batch: Batch) -> int | None:
        """What the v2 runner takes the batch's uniform query length for."""
        reqs, tokens, longest = len(batch.rows), batch.num_tokens, batch.longest
        if self._version == "0.23":
            module = self._loaded.module("v1.worker.gpu.cudagraph_utils")
            return module.get_uniform_token_count(reqs, tokens, longest)  # type: ignore[no-any-return]
        # The runner's `gather_batch_req_state`: a prompt row runs as a decode if it has one new token over context.
        eligible = all(not row.prefilling or (row.new == 1 and row.context > 0) for row in batch.rows)
        module = self._loaded.module("v1.worker.utils")
        return module.get_uniform_decode_token_count(reqs, tokens, longest, eligible)  # type: ignore[no-any-return]

    def bound_v2(self, batch: Batch) -> int | None:
        """The longest query that the v2 runner of 0.33 passes on: None for a batch with a prefill."""
        return None if any(row.prefilling for row in batch.rows) else batch.longest

    def _dispatch_v2(self, batch: Batch) -> Outcome:
        if batch.valid is not None:  # need_eager of dispatch_cg_and_sync_dp
            return ("NONE", batch.num_tokens, None, None, None, None)
        facts = (len(batch.rows), batch.num_tokens, self.uniform_v2(batch))
        if self._version == "0.23":
            return self.outcome_v2(self.manager.dispatch(*facts))
        return self.outcome_v2(self.manager.dispatch(*facts, batch.loras, max_query_len=self.bound_v2(batch)))

    def outcome_v1(self, mode: Any, desc: Any) -> Outcome:
        """The dispatcher's answer as an outcome."""
        if mode.name == "NONE":
            return ("NONE", desc.num_tokens, None, None, None, None)
        uniform = self._settings.query_len if desc.uniform else None
        return (mode.name, desc.num_tokens, desc.num_reqs, uniform, None, desc.num_active_loras)

    def outcome_v2(self, desc: Any) -> Outcome:
        """The manager's answer as an outcome."""
        if desc.cg_mode.name == "NONE":
            return ("NONE", desc.num_tokens, None, None, None, None)
        longest, case = getattr(desc, "max_query_len", None), getattr(desc, "num_active_loras", None)
        return (desc.cg_mode.name, desc.num_tokens, desc.num_reqs, desc.uniform_token_count, longest, case)


def default_sizes(
    loaded: Loaded, version: str, settings: Settings, drafts: tuple[tuple[int, int, int], ...]
) -> list[int]:
    """The list that the real `_set_cudagraph_sizes` makes."""
    module = loaded.module("config.vllm")
    compilation = loaded.module("config.compilation")
    k = settings.num_speculative_tokens
    config = SimpleNamespace(
        cudagraph_mode=compilation.CUDAGraphMode.FULL_AND_PIECEWISE,
        max_cudagraph_capture_size=None,
        cudagraph_capture_sizes=None,
        pass_config=SimpleNamespace(enable_sp=False),
        post_init_cudagraph_sizes=lambda: None,
    )
    speculative = SimpleNamespace(
        num_speculative_tokens=k,
        uses_dynamic_speculative_decoding=lambda: bool(drafts),
        num_speculative_tokens_per_batch_size=[list(part) for part in drafts],
    )
    platforms = loaded.module("platforms")
    platforms.current_platform = SimpleNamespace(is_device_capability_family=lambda _: False)
    fake = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=config,
        uniform_decode_query_len=settings.query_len,
        num_speculative_tokens=k,
        speculative_config=speculative if k else None,
        scheduler_config=SimpleNamespace(
            max_num_seqs=settings.max_num_reqs, max_num_batched_tokens=settings.max_num_tokens
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        performance_mode="balanced",
    )
    module.VllmConfig._set_cudagraph_sizes(fake)
    return list(config.cudagraph_capture_sizes)
