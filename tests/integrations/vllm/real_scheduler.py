"""vLLM's own schedulers out of the wheels, with an engine loop and a worker that checks what it is told.

The worker is a model: the token at a position is a function of the request and the position, so every run must end with
the same tokens. It keeps rows as vLLM's first runner does and asserts what that runner takes for granted.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.oracle.loader import loaded, oracle_folder

REAL = tuple(
    f"vllm.{name}"
    for name in (
        "v1.core.sched.scheduler", "v1.core.sched.async_scheduler", "v1.core.sched.output",
        "v1.core.sched.request_queue", "v1.core.sched.utils", "v1.core.sched.interface", "v1.core.kv_cache_manager",
        "v1.core.kv_cache_coordinator", "v1.core.block_pool", "v1.core.kv_cache_utils",
        "v1.core.single_type_kv_cache_manager", "v1.core.kv_cache_metrics", "v1.core.encoder_cache_manager",
        "v1.request", "v1.kv_cache_interface", "v1.kv_cache_spec_registry", "v1.metrics.stats", "v1.outputs",
        "utils.collection_utils",
    )
)  # fmt: skip
INSTALLED = ("torch", "tqdm", "regex", "huggingface_hub", "transformers", "pydantic", "msgspec", "triton")
BLOCK = 16


class _Nothing(SimpleNamespace):
    """A configuration that has nothing switched on beyond what it is given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def schedulers(version: str, further: tuple[str, ...] = ()) -> Iterator[None]:
    """Import vLLM's schedulers while the context lasts.

    Args:
        version: the release.
        further: names of other modules that are real.
    """
    folder = oracle_folder()
    assert folder is not None
    with loaded(folder, version, real=(*REAL, *(f"vllm.{name}" for name in further)), installed=INSTALLED):
        environment = importlib.import_module("vllm.envs")
        environment.VLLM_PREFIX_CACHE_RETENTION_INTERVAL = None  # type: ignore[attr-defined]
        yield


def vllm_config(
    version: str,
    *,
    asynchronous: bool,
    max_num_seqs: int = 8,
    max_tokens: int = 64,
    blocks: int = 200,
    ranks: int = 1,
    second_runner: bool = False,
) -> Any:
    """A configuration as far as schedulers read it."""
    encoder = importlib.import_module("vllm.v1.core.encoder_cache_manager")
    scheduler = _Nothing(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens, policy="fcfs", async_scheduling=asynchronous,
        long_prefill_token_threshold=0, enable_chunked_prefill=True, scheduler_reserve_full_isl=False,
        prefill_schedule_interval=1, watermark=0.0, long_prefill_token_threshold_adaptive=False,
    )  # fmt: skip
    return _Nothing(
        instance_id=f"test-{version}-{asynchronous}-{ranks}",
        scheduler_config=scheduler,
        cache_config=_Nothing(num_gpu_blocks=blocks, enable_prefix_caching=False, block_size=BLOCK),
        parallel_config=_Nothing(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
            data_parallel_size=ranks, data_parallel_index=0, tensor_parallel_size=1,
        ),
        model_config=_Nothing(max_model_len=4096, is_encoder_decoder=False, runner_type="generate"),
        observability_config=_Nothing(), aux_output_config=_Nothing(enabled=False),
        ec_manager_config=_Nothing(get_encoder_cache_manager_obj=lambda: encoder.EncoderCacheManager),
        num_speculative_tokens=0, num_lookahead_tokens=0, num_prefill_lookahead_tokens=0, num_hash_lookahead_tokens=0,
        max_in_flight_tokens=2 * max_tokens, max_concurrent_batches=2 if asynchronous else 1,
        use_v2_model_runner=second_runner, additional_config={},
    )  # fmt: skip


def make_scheduler(cls: type[Any], config: Any) -> Any:
    """A scheduler over one group of full attention."""
    import torch

    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    spec = interface.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16)
    group = interface.KVCacheGroupSpec(["layer"], spec)
    kv = interface.KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=[group]
    )
    outputs = _Nothing(should_advance=lambda _: False, accept_tokens=lambda *_: True)
    registry = SimpleNamespace(supports_multimodal_inputs=lambda _: False)
    return cls(
        vllm_config=config, kv_cache_config=kv, structured_output_manager=outputs, block_size=BLOCK,
        mm_registry=registry, log_stats=False,
    )  # fmt: skip


def make_request(name: str, prompt: int, output: int, arrival: float = 0.0) -> Any:
    """A request of so many tokens."""
    module = importlib.import_module("vllm.v1.request")
    params = _Nothing(max_tokens=output, min_tokens=0, eos_token_id=-5, stop_token_ids=(), ignore_eos=True)
    params.structured_outputs = None
    ids = [token_of(name, i) for i in range(prompt)]
    module.StructuredOutputRequest = SimpleNamespace(from_sampling_params=lambda _: None)  # type: ignore[attr-defined]
    module.ConstantList = lambda values: values  # type: ignore[attr-defined]
    module.length_from_prompt_token_ids_or_embeds = lambda ids, _: len(ids)  # type: ignore[attr-defined]
    return module.Request(name, ids, params, None, arrival_time=arrival)


def token_of(name: str, position: int) -> int:
    """The model: the token of a request at a position."""
    return (sum(map(ord, name)) * 31 + position * 7) % 1000


class Worker:
    """The rows of one runner, and what it would compute.

    Args:
        second: the second runner, which keeps rows that a step leaves out and is sent resumed ones as new.
    """

    def __init__(self, *, second: bool = False) -> None:
        self.second = second
        self.prompts: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.sampled: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.previous: set[str] = set()
        self.steps: list[tuple[int, int]] = []
        """(rows with output before them, tokens of rows longer than one) of each step"""

    def run(self, output: Any, known: dict[str, int]) -> Any:
        """Run a step.

        Args:
            output: what the scheduler said.
            known: tokens that the engine has of each request, those of steps under way left out.
        """
        for name in output.finished_req_ids:
            for kept in (self.prompts, self.computed, self.blocks):
                kept.pop(name, None)
        for row in output.scheduled_new_reqs:
            self.prompts[row.req_id] = len(row.prompt_token_ids)
            self.computed[row.req_id] = row.num_computed_tokens
            self.sampled.setdefault(row.req_id, 0)
            self.blocks[row.req_id] = len(row.block_ids[0])
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            if name in cached.resumed_req_ids:
                self.computed[name], self.blocks[name] = 0, 0
            assert cached.num_computed_tokens[i] == self.computed[name], "a position is skipped or computed twice"
            if cached.new_block_ids[i] is not None:
                self.blocks[name] += len(cached.new_block_ids[i][0])
            if not self.second and name not in self.previous and name not in cached.resumed_req_ids:
                # The first runner takes such a row's tokens from here: none may be missing or still be sampled.
                tokens = list(cached.all_token_ids[name])
                assert len(tokens) == self.prompts[name] + self.sampled[name]
                assert known[name] == self.sampled[name], "the row's last token is still being sampled"
                assert tokens == [token_of(name, place) for place in range(len(tokens))]
        assert not set(output.finished_req_ids) & set(output.num_scheduled_tokens)
        decodes = prompt_tokens = 0
        sampled: dict[str, list[int]] = {}
        for name, new in output.num_scheduled_tokens.items():
            start = self.computed[name]
            self.computed[name] += new
            assert self.computed[name] <= self.blocks[name] * BLOCK, "a position has no block"
            total = self.prompts[name] + self.sampled[name]
            assert self.computed[name] <= total
            decodes += start >= self.prompts[name]
            prompt_tokens += new if new > 1 else 0
            sampled[name] = []
            if self.computed[name] == total:
                sampled[name] = [token_of(name, total)]
                self.sampled[name] += 1
        if sampled:
            self.previous = set(sampled)
            self.steps.append((decodes, prompt_tokens))
        module = importlib.import_module("vllm.v1.outputs")
        names = list(sampled)
        return module.ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()),
        )  # fmt: skip


def serve(
    scheduler: Any,
    requests: list[tuple[int, Any]],
    *,
    depth: int,
    most_steps: int = 5000,
    runs: Callable[[Worker], Callable[[Any, dict[str, int]], Any]] = lambda worker: worker.run,
) -> tuple[dict[str, list[int]], Worker]:
    """vLLM's engine loop, with `depth` steps under way: each request's tokens, and the worker.

    Args:
        scheduler: vLLM's.
        requests: (engine step at which it comes, request).
        depth: steps scheduled before the output of the first is known.
        most_steps: more than the requests could need.
        runs: how a worker runs a step.
    """
    worker, under_way = Worker(second=scheduler.use_v2_model_runner), deque[tuple[Any, Any]]()
    run = runs(worker)
    coming = deque(sorted(requests, key=lambda each: each[0]))
    everyone = {request.request_id: request for _, request in requests}
    for step in range(most_steps):
        while coming and coming[0][0] <= step:
            scheduler.add_request(coming.popleft()[1])
        if scheduler.has_requests():
            output = scheduler.schedule()
            known = {name: request.num_output_tokens for name, request in everyone.items()}
            under_way.append((output, run(output, known)))
            assert len({id(request) for request in scheduler.running}) == len(scheduler.running)
            assert len(scheduler.running) <= scheduler.max_num_running_reqs
        if under_way and (len(under_way) >= depth or not scheduler.has_requests()):
            scheduler.update_from_output(*under_way.popleft())
        if not (coming or under_way or scheduler.has_requests()):
            return {name: list(request.output_token_ids) for name, request in everyone.items()}, worker
    raise AssertionError(f"not done after {most_steps} steps: {scheduler.running}")
