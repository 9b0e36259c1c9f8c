"""Two forwards in one step of the second runner, with vLLM's own schedulers and outputs of both releases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kpolicy_vllm import two_forwards
from kpolicy_vllm.state import Counters
from tests.integrations.vllm.real_scheduler import Worker, schedulers, serve, vllm_config
from tests.integrations.vllm.test_real_scheduler import BOTH, KINDS, pytestmark, requests, stock_scheduler

__all__ = ["pytestmark"]


def state_of(worth: Callable[[int, int, int], bool] | None = None) -> Any:
    """A state that has costs, and whose rule is given."""
    state: Any = SimpleNamespace(costs=object(), counters=Counters(), two_forwards=False, worth=worth)

    class Guard:
        def __enter__(self) -> None:
            return None

        def __exit__(self, _kind: Any, error: Any, _trace: Any) -> bool:
            if error is not None:
                state.counters.warn_once("split_failed", str(error))
            return True

    state.guard = lambda *_: Guard()
    return state


def buffers(depth: int) -> None:
    """vLLM's module of host buffers, stubbed or not, makes them so deep."""
    importlib.import_module("vllm.v1.worker.gpu.buffer_utils")._DEFAULT_MAX_CONCURRENCY = depth  # type: ignore[attr-defined]


class SecondRunner:
    """A worker of `real_scheduler` behind the two methods that vLLM's second runner has."""

    def __init__(self, config: Any, worker: Worker, *, asynchronous: bool) -> None:
        self.vllm_config = config
        buffers(2 * config.max_concurrent_batches)
        self.req_states = SimpleNamespace(
            prompt_len=SimpleNamespace(pool=SimpleNamespace(max_concurrency=2 * config.max_concurrent_batches))
        )
        self.worker = worker
        self.known: dict[str, int] = {}
        self.under_way: Any = None
        self.forwards: list[Any] = []
        base = importlib.import_module("vllm.v1.outputs").AsyncModelRunnerOutput

        class Later(base):  # type: ignore[misc,valid-type]
            def __init__(self, output: Any) -> None:
                self.output = output

            def get_output(self) -> Any:
                return self.output

            def get_kv_connector_output(self) -> None: ...

        self.later = Later if asynchronous else lambda output: output

    def execute_model(self, output: Any, intermediate_tensors: Any = None) -> Any:
        assert self.under_way is None, "the last forward wasn't sampled"
        assert intermediate_tensors is None
        result = self.worker.run(output, self.known)
        if not output.total_num_scheduled_tokens:
            return result
        self.under_way = result
        self.forwards.append(output)
        return None

    def sample_tokens(self, _grammar: Any) -> Any:
        output, self.under_way = self.under_way, None
        return self.later(output)

    def run(self, output: Any, known: dict[str, int]) -> Any:
        """As the executor does it."""
        self.known = known
        result = self.execute_model(output, None)
        result = self.sample_tokens(None) if result is None else result
        return result.get_output() if hasattr(result, "get_output") else result


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule says what the state is told."""
    monkeypatch.setattr(
        two_forwards, "SplitRule", lambda state: SimpleNamespace(two_forwards=state.worth or (lambda *_: True))
    )


@BOTH
@KINDS
@pytest.mark.parametrize("blocks", [200, 30])
@pytest.mark.usefixtures("always")
def test_tokens_and_steps_are_stock_s_and_no_forward_is_mixed(version: str, asynchronous: bool, blocks: int) -> None:
    """The engine's steps are stock's, to the last; 30 blocks make it preempt, too."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=asynchronous, second_runner=True, blocks=blocks)
        depth, longest = (2 if asynchronous else 1), (150 if blocks > 100 else 60)
        for seed in range(3):
            runners: list[SecondRunner] = []
            state = state_of()

            def divided(worker: Worker, state: Any = state, runners: Any = runners) -> Any:
                runners.append(SecondRunner(config, worker, asynchronous=asynchronous))
                two_forwards.attach(runners[-1], state)
                return runners[-1].run

            wanted, stock = serve(stock_scheduler(config), requests(seed, longest=longest), depth=depth)
            found, worker = serve(stock_scheduler(config), requests(seed, longest=longest), depth=depth, runs=divided)
            assert found == wanted
            twice = state.counters.counts["split_two_forwards"]
            assert twice >= sum(bool(decodes and prompts) for decodes, prompts in stock.steps) > 5
            assert len(worker.steps) == len(stock.steps) + twice
            assert not any(decodes and prompts for decodes, prompts in worker.steps)
            assert state.two_forwards
            assert set(state.counters.counts) <= {"split_two_forwards"}


@BOTH
@pytest.mark.usefixtures("always")
def test_the_rule_is_asked_by_counts_and_may_say_no(version: str) -> None:
    asked: list[tuple[int, int, int]] = []
    state = state_of(lambda *counts: bool(asked.append(counts)))  # type: ignore[func-returns-value]
    with schedulers(version):
        config = vllm_config(version, asynchronous=False, second_runner=True)

        def divided(worker: Worker) -> Any:
            runner = SecondRunner(config, worker, asynchronous=False)
            two_forwards.attach(runner, state)
            return runner.run

        _, stock = serve(stock_scheduler(config), requests(1), depth=1)
        _, worker = serve(stock_scheduler(config), requests(1), depth=1, runs=divided)
        assert worker.steps == stock.steps
        assert state.counters.counts == {"split_not_worth_it": len(asked)}
        assert asked
        assert all(decodes and prompts <= tokens for decodes, prompts, tokens in asked)


def scheduled(version: str) -> Any:
    """A step of two decodes, a chunk that goes on and a new request, with something of all that is told once."""
    module = importlib.import_module("vllm.v1.core.sched.output")
    output = module.SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = module.CachedRequestData(
        req_ids=["a", "b", "c"], resumed_req_ids={"c"}, new_token_ids=[], all_token_ids={"c": [1, 2], "a": [3]},
        new_block_ids=[None, ([4],), ([5],)], num_computed_tokens=[9, 8, 7], num_output_tokens=[2, 1, 0],
    )  # fmt: skip
    output.scheduled_new_reqs = [SimpleNamespace(req_id="d")]
    output.num_scheduled_tokens = {"a": 1, "b": 1, "c": 30, "d": 1}
    output.total_num_scheduled_tokens = 33
    output.finished_req_ids = {"z"}
    output.preempted_req_ids = {"y"}
    output.free_encoder_mm_hashes = ["x"]
    output.new_block_ids_to_zero = [5]
    if version == "0.33":
        output.kv_cache_block_copies = [(1, 2)]
    return output


@BOTH
def test_halves_share_the_rows_and_the_first_has_what_is_told_once(version: str) -> None:
    with schedulers(version):
        output = scheduled(version)
        decode, prompt = two_forwards.halves(output, lambda *_: True)  # type: ignore[misc]
        assert (decode.num_scheduled_tokens, decode.total_num_scheduled_tokens) == ({"a": 1, "b": 1}, 2)
        assert (prompt.num_scheduled_tokens, prompt.total_num_scheduled_tokens) == ({"c": 30, "d": 1}, 31)
        assert decode.scheduled_new_reqs == []
        assert prompt.scheduled_new_reqs == output.scheduled_new_reqs
        rows = decode.scheduled_cached_reqs
        assert (rows.req_ids, rows.new_block_ids, rows.num_computed_tokens) == (["a", "b"], [None, ([4],)], [9, 8])
        assert (rows.resumed_req_ids, rows.all_token_ids, rows.new_token_ids) == (set(), {"a": [3]}, [])
        rows = prompt.scheduled_cached_reqs
        assert (rows.req_ids, rows.new_block_ids, rows.num_computed_tokens) == (["c"], [([5],)], [7])
        assert (rows.resumed_req_ids, rows.all_token_ids, rows.num_output_tokens) == ({"c"}, {"c": [1, 2]}, [0])
        once = {"finished_req_ids", "preempted_req_ids", "free_encoder_mm_hashes", "new_block_ids_to_zero"}
        for name in once | ({"kv_cache_block_copies"} if version == "0.33" else set()):
            assert getattr(decode, name) == getattr(output, name)
            assert not getattr(prompt, name)


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("has_structured_output_requests", True),
        ("pending_structured_output_tokens", True),
        ("scheduled_encoder_inputs", {"c": [0]}),
        ("scheduled_spec_decode_tokens", {"a": [1]}),
        ("num_scheduled_tokens", {"a": 2, "b": 2, "c": 30, "d": 1}),
    ],
)
def test_some_steps_stay_whole(version: str, name: str, value: Any) -> None:
    with schedulers(version):
        output = scheduled(version)
        setattr(output, name, value)
        assert two_forwards.halves(output, lambda *_: True) is None


@BOTH
def test_outputs_are_joined(version: str) -> None:
    import numpy as np

    with schedulers(version):
        module = importlib.import_module("vllm.v1.outputs")

        def output(names: list[str], width: int, value: int) -> Any:
            made = module.ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[[value]] * len(names), prompt_logprobs_dict={names[0]: None},
            )  # fmt: skip
            if width:
                rows = np.full((len(names), width), value)
                made.logprobs = module.LogprobsLists(rows, rows.astype(np.float32), rows[:, 0])
            return made

        both = two_forwards.joined(output(["a", "b"], 2, 5), output(["c"], 3, 7))
        assert both.req_ids == ["a", "b", "c"]
        assert both.req_id_to_index == {"a": 0, "b": 1, "c": 2}
        assert both.sampled_token_ids == [[5], [5], [7]]
        assert set(both.prompt_logprobs_dict) == {"a", "c"}
        assert both.logprobs.slice_request(1, 1).logprob_token_ids.tolist() == [[5, 5, 0]]
        assert both.logprobs.slice_request(2, 1).logprobs.tolist() == [[7.0, 7.0, 7.0]]
        assert both.logprobs.sampled_token_ranks.tolist() == [5, 5, 7]
        one = two_forwards.joined(output(["a", "b"], 0, 5), output(["c"], 2, 7))
        assert one.logprobs.slice_request(2, 1).logprob_token_ids.tolist() == [[7, 7]]
        assert two_forwards.joined(output(["a"], 0, 5), output(["c"], 0, 7)).logprobs is None
        assert both.num_nans_in_logits is None


@BOTH
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: setattr(r.vllm_config.parallel_config, "data_parallel_size", 2), "data-parallel"),
        (lambda r: setattr(r.vllm_config.parallel_config, "enable_eplb", True), "expert"),
        (lambda r: setattr(r.vllm_config.parallel_config, "pipeline_parallel_size", 2), "stages"),
        (lambda r: setattr(r.vllm_config, "speculative_config", SimpleNamespace(num_speculative_tokens=2)), "drafts"),
        (lambda r: setattr(r.vllm_config, "lora_config", SimpleNamespace()), "adapters"),
        (lambda r: setattr(r.vllm_config, "kv_transfer_config", SimpleNamespace()), "connector"),
        (lambda r: setattr(r.vllm_config, "ec_transfer_config", SimpleNamespace()), "connector"),
        (lambda r: setattr(r.vllm_config.model_config, "return_sampling_mask", True), "joined"),
        (lambda r: setattr(r, "pcp_manager", object()), "context"),
        (lambda r: setattr(r, "aux_output_connector", object()), "connector"),
        (lambda _: buffers(1), "host buffers are for 1 forwards under way, and with two a step there may be 2"),
    ],
)
def test_where_a_step_must_have_one_forward_nothing_is_touched(version: str, change: Any, reason: str) -> None:
    with schedulers(version):
        runner = SecondRunner(vllm_config(version, asynchronous=False), Worker(second=True), asynchronous=False)
        assert two_forwards.why_not(runner) is None
        change(runner)
        assert reason in str(two_forwards.why_not(runner))
        state = state_of()
        two_forwards.attach(runner, state)
        assert "execute_model" not in vars(runner)
        assert not state.two_forwards
        assert state.counters.counts == {"not_split": 1}


@BOTH
def test_workers_in_processes_of_their_own_may_have_two_forwards(version: str) -> None:
    """There the scheduler can't decide, as costs are measured in the workers; each of them knows the same ones."""
    with schedulers(version):
        config = vllm_config(version, asynchronous=False)
        config.parallel_config.distributed_executor_backend = "mp"
        runner = SecondRunner(config, Worker(second=True), asynchronous=False)
        assert two_forwards.why_not(runner) is None
