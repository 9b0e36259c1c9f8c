"""`FullStep`: a step that is one replay of a FULL graph on the main stream, which most decode steps are.

Such a step does what `GraphLauncher.replay` does for any launch. Here it is prepared once a decision, and a step goes
through as few calls and objects as it needs: between steps other work takes the processor's caches, and what a step
then costs the host is how much memory it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kpolicy.decision import Decision
from kpolicy.errors import RegistryError
from kpolicy.executors.base import StepInputs, StepOutputs, new_outputs
from kpolicy.executors.device import DeviceAdapter, DeviceEvent, Span
from kpolicy.executors.joined_rows import NO_SPARE, JoinedRows
from kpolicy.executors.launch_rows import decode_places, launch_rows
from kpolicy.executors.parts import (
    EventSpan,
    OutputRows,
    SampledSteps,
    SampledTokens,
    new_outputs_of,
    raise_lost,
    replay_error,
    sampling_inputs,
)
from kpolicy.executors.segments import FullGraph, HeadRows
from kpolicy.executors.step_model import StepModel
from kpolicy.modes import Rows

__all__ = ["FullStep", "sampled_of"]


def sampled_of(
    outputs: OutputRows, count: int, rows: StepInputs, repeat: int
) -> tuple[SampledSteps, Sequence[int]]:  # fmt: skip
    """Tokens of decode rows and first tokens of prompts, of a launch with decode rows in front."""
    places = decode_places(rows)
    first = 1 + places[-1] if places else 0
    prompts = SampledTokens(outputs, 0, range(first, count)) if count > first else ()
    return SampledSteps.of(outputs, repeat, places), prompts


class FullStep:
    """One decision that replays one FULL graph.

    What its steps need of others is looked up once, here: a step of it reads its own slots and its inputs.

    Args:
        decision: the decision.
        handle: the graph.
        adapter: the device.
        model: samples.
        unfinished: what other streams still do; empty in most steps.
        settle: lets the main stream wait for that.
    """

    __slots__ = (
        "_adapter", "_decision", "_fronts", "_handle", "_heads_tokens", "_joined_fronts", "_launch", "_model",
        "_most_reqs", "_most_tokens", "_samples", "_session", "_settle", "_shape", "_span", "_spare", "_stage",
        "_stage_decodes", "_unfinished",
    )  # fmt: skip

    def __init__(
        self, decision: Decision, handle: FullGraph, adapter: DeviceAdapter, model: StepModel,
        unfinished: list[DeviceEvent], settle: Callable[[], None],
    ) -> None:  # fmt: skip
        self._decision = decision
        self._handle = handle
        self._shape = handle.shape
        self._most_tokens = handle.key.num_tokens
        self._most_reqs = handle.shape.num_reqs
        self._heads_tokens = handle.head is HeadRows.TOKENS
        self._launch = handle.launch
        self._fronts = handle.fronts
        self._samples = handle.samples
        self._joined_fronts = handle.joined_fronts
        self._spare = handle.spare
        self._model = model
        self._adapter = adapter
        self._session = adapter.session
        self._span: Callable[[], Span] = getattr(adapter, "span", None) or (lambda: EventSpan(adapter))
        self._stage = handle.buffers.stage
        self._stage_decodes = handle.stage_decodes
        self._unfinished = unfinished
        self._settle = settle

    def run(self, rows: StepInputs) -> StepOutputs:
        """Stage, replay, copy out and, where the graph hasn't or rows bring sampling inputs, sample.

        Raises:
            RegistryError: the graph has fewer tokens or rows than the step.
            GraphReplayError: nothing was launched.
            StickyDeviceError: the device is lost.
        """
        # By place, which takes less than by name: numbers, query_lens, token_ids, ..., wanted.
        numbers, num_reqs, num_tokens, count = rows[0], len(rows[1]), len(rows[2]), len(rows[7])
        if num_tokens > self._most_tokens or num_reqs > self._most_reqs:
            raise RegistryError(
                f"{self._handle.key} has {self._most_tokens} tokens in {self._most_reqs} rows and was given "
                f"{num_tokens} in {num_reqs}; choose a graph that holds them, as GraphKey.holds says."
            )
        whole, joined, places, span = count == num_tokens and self._heads_tokens, None, None, None
        with self._session():
            try:
                if self._unfinished:
                    self._settle()
                span = self._span()
                try:
                    quick = self._stage_decodes
                    if whole and quick is not None and quick(rows, span):
                        sampled = False
                    else:
                        sampled = self._stage(rows, self._shape, not whole, 1, span)
                    if not whole:
                        logits = self._handle.logits(launch_rows(rows, Rows.ALL, live=False), True)
                    else:
                        self._launch()
                        if self._samples and not sampled:
                            front, layout, places = self._joined_fronts.get(count) or self._handle.joined_front(count)
                            kept, joined = self._spare.pop() if self._spare else NO_SPARE
                            if kept is layout:
                                joined.copy_(front)
                            else:
                                joined = front.clone()
                        else:
                            logits, places = self._fronts.get(count) or self._handle.front(count)
                            logits = logits.clone()
                except Exception as error:
                    raise replay_error(self._adapter, self._handle.key, error) from error
                outputs: OutputRows
                if joined is not None:
                    outputs = own = JoinedRows()
                    own.joined, own.layout, own.spare = joined, layout, self._spare
                else:
                    outputs = new_outputs_of()
                    outputs.logits, outputs.tokens = logits, []
                    if logits is not None:
                        outputs.tokens.append(self._model.sample(logits, self._sampling(rows) if sampled else {}))
                outputs.num_rows, outputs.ready, outputs.failed_key = count, span, None
                span.end()
            except BaseException as error:
                if span is not None:
                    # The memory that inputs were copied out of is taken again only behind it.
                    with suppress(Exception):
                        span.end()
                if isinstance(error, Exception):
                    raise_lost(self._adapter, error)
                raise
        prompts: Sequence[int] = ()
        # As `query_len` and `num_decodes`.
        if numbers[1] == 1 and numbers[0] == count:
            steps = SampledSteps()
            steps.part, steps.places, steps.repeat = outputs, range(count) if places is None else places, 1
        else:
            steps, prompts = sampled_of(outputs, count, rows, 1)
        return new_outputs((outputs if count else (), steps, self._decision, (span,), prompts))

    def _sampling(self, rows: StepInputs) -> Mapping[str, Any]:
        return sampling_inputs(self._handle.buffers, launch_rows(rows, Rows.ALL, live=False))
