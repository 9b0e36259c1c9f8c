"""SPLIT inside one step of vLLM's second runner: the decodes' forward, then the prompts', and one output of both.

That runner keeps what it knows of a request by slot, and a slot's last token on the device, whether or not a step has
the row. So it runs the two halves of a step as it would run two steps that follow each other, which is what they are
to it: each half is a `SchedulerOutput` of its own, executed and sampled. Finished requests, freed and zeroed blocks go
with the first. The engine sees one step: no second round of scheduling, and nothing it must know of.

What a forward writes to its tables passes through host buffers that vLLM takes in turns, one for each step that may be
under way; two forwards a step need twice as many (`deeper`), or the second of one step overwrites what the device has
yet to read of the second before.

Costs decide, by `SplitRule`. `why_not` lists the vLLMs in which steps stay whole, `halves` the steps.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kpolicy_vllm.scheduler import why_not as why_not_apart
from kpolicy_vllm.split_rule import SplitRule
from kpolicy_vllm.state import State

__all__ = ["attach", "deeper", "halves", "joined", "shallow", "why_not"]

_BUFFERS, _RUNNER = "vllm.v1.worker.gpu.buffer_utils", "vllm.v1.worker.gpu.model_runner"
_DEPTH = "set_default_max_concurrency"

_OF_ROWS = ("new_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens")
"""Lists of `CachedRequestData` with an entry a request, or none at all"""


def why_not(runner: Any) -> str | None:
    """Why that runner's steps stay whole; None where they may have two forwards."""
    config = runner.vllm_config
    parallel, model = config.parallel_config, config.model_config
    if parallel.data_parallel_size > 1:
        return "data-parallel ranks run one forward a step together"
    if getattr(parallel, "enable_eplb", False):
        return "expert statistics count forwards"
    for name, what in (("aux_output_connector", "a connector of outputs"), ("pcp_manager", "context parallelism")):
        if getattr(runner, name, None) is not None:
            return f"{what} sees every step"
    if getattr(config, "ec_transfer_config", None) is not None:
        return "a connector of encoder outputs sees every step"
    if getattr(model, "return_sampling_mask", False) or getattr(runner, "is_pooling_model", False):
        return "outputs of two forwards can't be joined here"
    return why_not_apart(config, in_scheduler=False) or shallow(runner)


@contextmanager
def deeper() -> Iterator[None]:
    """While a second runner is made: its host buffers, and those of the KV cache later, are for two forwards a step.

    The runner says how many steps may be under way, before it makes its first buffer; here that counts twice.
    """
    buffers = importlib.import_module(_BUFFERS)
    stock = getattr(buffers, _DEPTH)

    def twice(n: int) -> None:
        stock(2 * n)

    def put(function: Callable[[int], None]) -> None:
        # The runner's module has the name too, once it is imported.
        for name in (_BUFFERS, _RUNNER):
            if hasattr(sys.modules.get(name), _DEPTH):
                setattr(sys.modules[name], _DEPTH, function)

    put(twice)
    try:
        yield
    finally:
        put(stock)


def shallow(runner: Any) -> str | None:
    """Why that runner's host buffers don't do for two forwards a step; None where they do.

    Raises:
        AttributeError: they aren't where they are in the releases that are known.
    """
    wanted = 2 * runner.vllm_config.max_concurrent_batches
    depths = [
        importlib.import_module(_BUFFERS)._DEFAULT_MAX_CONCURRENCY,
        runner.req_states.prompt_len.pool.max_concurrency,
    ]
    tables = getattr(runner, "block_tables", None)
    if tables is not None:
        depths.append(tables.num_blocks.pool.max_concurrency)
    if min(depths) >= wanted:
        return None
    return f"host buffers are for {min(depths)} forwards under way, and with two a step there may be {wanted}"


def halves(output: Any, worth: Callable[[int, int, int], bool]) -> tuple[Any, Any] | None:
    """What the scheduler sent as two steps, of decodes and of the rest; None where it isn't both, or must stay whole.

    A decode is a row of one token of a request that has put out some before.

    Args:
        output: vLLM's `SchedulerOutput`.
        worth: ``worth(decodes, prompts, prompt tokens)``: whether two forwards are wanted.
    """
    cached, tokens = output.scheduled_cached_reqs, output.num_scheduled_tokens
    if output.total_num_scheduled_tokens == len(tokens) or not cached.req_ids:
        return None
    decoding = [
        tokens[name] == 1 and before > 0 for name, before in zip(cached.req_ids, cached.num_output_tokens, strict=True)
    ]
    decodes = sum(decoding)
    if not decodes or decodes == len(tokens):
        return None
    if (
        output.has_structured_output_requests
        or output.pending_structured_output_tokens
        or output.scheduled_encoder_inputs
        or output.scheduled_spec_decode_tokens
    ):
        # A grammar's mask comes with the question for samples, after both forwards.
        return None
    if not worth(decodes, len(tokens) - decodes, output.total_num_scheduled_tokens - decodes):
        return None
    first = {name: 1 for name, its in zip(cached.req_ids, decoding, strict=True) if its}
    second = {name: count for name, count in tokens.items() if name not in first}
    decode = dataclasses.replace(
        output, scheduled_new_reqs=[], scheduled_cached_reqs=_rows(cached, decoding, True),
        num_scheduled_tokens=first, total_num_scheduled_tokens=decodes,
    )  # fmt: skip
    empty = type(output).make_empty()
    told_once = {
        name: getattr(empty, name)
        for name in ("finished_req_ids", "free_encoder_mm_hashes", "preempted_req_ids", "encoder_input_updates",
                     "new_block_ids_to_zero", "kv_cache_block_copies")
        if hasattr(empty, name)
    }  # fmt: skip
    prompt = dataclasses.replace(
        output, scheduled_cached_reqs=_rows(cached, decoding, False), num_scheduled_tokens=second,
        total_num_scheduled_tokens=output.total_num_scheduled_tokens - decodes, **told_once,
    )  # fmt: skip
    return decode, prompt


def _rows(cached: Any, decoding: list[bool], wanted: bool) -> Any:
    """The requests of `CachedRequestData` that decode, or that don't."""
    places = [place for place, its in enumerate(decoding) if its is wanted]
    names = [cached.req_ids[place] for place in places]
    lists = {name: getattr(cached, name) for name in _OF_ROWS}
    return type(cached)(
        req_ids=names,
        resumed_req_ids=cached.resumed_req_ids.intersection(names),
        all_token_ids={name: cached.all_token_ids[name] for name in names if name in cached.all_token_ids},
        **{name: [each[place] for place in places] if each else each for name, each in lists.items()},
    )


def joined(first: Any, second: Any) -> Any:
    """One `ModelRunnerOutput` of two; of their graphs' statistics the second's."""
    names = [*first.req_ids, *second.req_ids]
    together = {
        name: {**(getattr(first, name) or {}), **(getattr(second, name) or {})}
        for name in ("prompt_logprobs_dict", "prompt_token_id_logprobs_dict", "num_nans_in_logits")
        if getattr(first, name, None) is not None or getattr(second, name, None) is not None
    }
    return dataclasses.replace(
        second, req_ids=names, req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[*first.sampled_token_ids, *second.sampled_token_ids],
        logprobs=_logprobs(first, second), **together,
    )  # fmt: skip


def _logprobs(first: Any, second: Any) -> Any:
    """The log-probabilities, a row a request: zeros where a half had none or fewer, which nobody asked for."""
    if first.logprobs is None and second.logprobs is None:
        return None
    import numpy as np

    made = type(first.logprobs if first.logprobs is not None else second.logprobs)
    parts = [(len(each.req_ids), each.logprobs) for each in (first, second)]

    def stacked(name: str) -> Any:
        arrays = [None if each is None else getattr(each, name) for _, each in parts]
        like = next(array for array in arrays if array is not None)
        shape = tuple(max(array.shape[1] for array in arrays if array is not None) for _ in like.shape[1:])
        whole = np.zeros((sum(rows for rows, _ in parts), *shape), like.dtype)
        start = 0
        for (rows, _), array in zip(parts, arrays, strict=True):
            if array is not None:
                place = (slice(start, start + rows), *(slice(width) for width in array.shape[1:]))
                whole[place] = array
            start += rows
        return whole

    return made(stacked("logprob_token_ids"), stacked("logprobs"), stacked("sampled_token_ranks"))


def attach(runner: Any, state: State) -> None:
    """Let that runner run two forwards in a step where they cost less than one; with a reason not to, say so once."""
    reason = why_not(runner)
    if reason is not None:
        state.counters.warn_once("not_split", f"a step has one forward: {reason}.")
        return
    base = importlib.import_module("vllm.v1.outputs").AsyncModelRunnerOutput

    class Both(base):  # type: ignore[misc,valid-type]
        """The outputs of both halves, once they are on the host."""

        def __init__(self, first: Any, second: Any) -> None:
            self._halves = (first, second)

        def get_output(self) -> Any:
            first, second = self._halves
            return joined(first.get_output(), second.get_output())

        def get_kv_connector_output(self) -> None:
            """There is none with a connector, see `why_not`."""

    rule, execute, sample = SplitRule(state), runner.execute_model, runner.sample_tokens
    pending: list[Any] = []
    deep: list[bool] = []

    def divided(output: Any) -> tuple[Any, Any] | None:
        found = halves(output, worth)
        if found is not None and not deep:
            # The block tables were made since.
            reason = shallow(runner)
            deep.append(reason is None)
            if reason is not None:
                state.two_forwards = False
                state.counters.warn_once("not_split", f"a step has one forward: {reason}.")
        return found if deep == [True] else None

    def worth(decodes: int, prompts: int, tokens: int) -> bool:
        once = rule.two_forwards(decodes, prompts, tokens)
        if not once:
            state.counters.add("split_not_worth_it")
        return once

    @functools.wraps(execute)
    def execute_model(output: Any, *rest: Any, **named: Any) -> Any:
        pending.clear()
        found = None
        if state.costs is not None and not any(each is not None for each in (*rest, *named.values())):
            with state.guard("split_failed", "dividing a step", "it runs whole"):
                found = divided(output)
        if found is None:
            return execute(output, *rest, **named)
        execute(found[0])
        pending.append(sample(None))
        state.counters.add("split_two_forwards")
        return execute(found[1])

    @functools.wraps(sample)
    def sample_tokens(*args: Any, **named: Any) -> Any:
        second = sample(*args, **named)
        if not pending:
            return second
        first = pending.pop()
        return Both(first, second) if isinstance(second, base) else joined(first, second)

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
    state.two_forwards = True
