"""Writes each step's batch and decision as a kpolicy decision log, which `kpolicy simulate` reads."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kpolicy import __version__
from kpolicy.decision import Decision, Launch
from kpolicy.errors import KPolicyError
from kpolicy.modes import Mode, Part, Rows
from kpolicy.reasons import Reason
from kpolicy.schemas import DecisionEntry, DecisionLogWriter, LogHeader
from kpolicy.shapes import BatchShape
from kpolicy_vllm.state import State, engine_number
from kpolicy_vllm.steps import Entry

__all__ = ["DecisionLog", "decision_of", "shape_of"]


def shape_of(
    new: Sequence[int], computed: Sequence[int], prompt: Sequence[int], *, num_active_loras: int = 0
) -> BatchShape:
    """The batch of one step.

    Args:
        new: tokens that each request runs this step.
        computed: tokens of each that are in KV before it.
        prompt: tokens of each one's prompt.
        num_active_loras: active LoRA adapters.
    """
    runs: dict[int, int] = {}
    chunks: list[tuple[int, int]] = []
    decode_kv = longest = 0
    for tokens, context, whole in zip(new, computed, prompt, strict=True):
        longest = max(longest, tokens + context)
        if context >= whole:
            runs[tokens] = runs.get(tokens, 0) + 1
            decode_kv += tokens + context
        else:
            chunks.append((tokens, context))
    return BatchShape(
        decodes=sorted(runs.items()),
        prefills=chunks,
        decode_kv_tokens=decode_kv,
        max_kv_len=longest,
        num_active_loras=num_active_loras,
    )


def decision_of(entry: Entry) -> Decision:
    """The decision that an answer stands for; one of vLLM's own rule gives the rule's reasons."""
    if entry.decision is not None:
        return entry.decision
    key = entry.key
    mode = Mode.EAGER if key is None else Mode.FULL if key.part is Part.FULL else Mode.PIECEWISE
    reason = Reason.ABOVE_LARGEST_SIZE if key is None else Reason.GRAPH_FITS
    return Decision(mode, (Launch(Rows.ALL, key),), reason)


def _sizes(state: State) -> dict[str, list[int]]:
    """The captured sizes by kind of graph."""
    ladder = state.ladder
    decode = ladder.uniform.get(state.settings.query_len, ())
    kinds = (("decode", decode), ("mixed", ladder.mixed), ("piecewise", ladder.piecewise))
    return {name: sorted({key.num_tokens for key in keys}) for name, keys in kinds}


class DecisionLog:
    """The log of one worker; the first of its tensor and pipeline ranks writes it. A process forked off has none.

    Args:
        path: the file; further data-parallel engines write beside it, with their number in the name.
        state: what kpolicy knows of this vLLM.
        device: the device's full name.

    Raises:
        ConfigError: the file can't be written.
    """

    def __init__(self, path: str, state: State, device: str) -> None:
        config = state.runner.vllm_config
        header = LogHeader(
            policy=state.config.policy,
            device=device,
            model=str(config.model_config.model),
            versions={"kpolicy": __version__, "vllm": state.vllm_version},
            started_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            costs_version=state.costs.version if state.costs is not None else "",
            settings=state.settings,
            extra={"sizes": _sizes(state), "attention": str(state.claims)},
        )
        number = engine_number(config)
        self._state = state
        writer = DecisionLogWriter(f"{path}.dp{number}" if number else path, header)
        self._writer: DecisionLogWriter | None = writer
        self._at_end = weakref.finalize(state, writer.close)

    def write(self, entry: Entry, shape: BatchShape) -> None:
        """Append a step. A log that can't be written any more is closed, with a warning."""
        if self._writer is None or self._writer.forked:
            return
        try:
            self._writer.write(DecisionEntry.of(shape, decision_of(entry)))
        except KPolicyError as error:
            self._end(str(error))

    def _end(self, why: str) -> None:
        self._state.counters.warn_once("log_failed", f"the decision log ends here: {why}")
        with suppress(Exception):
            self.close()

    def step_of_runner_1(self, entry: Entry, facts: tuple[int, Any]) -> None:
        """`of_runner_1`, where nothing may be raised: the step goes on whatever happens here."""
        if self._writer is not None:
            try:
                self.of_runner_1(entry, facts)
            except Exception as error:  # noqa: BLE001 - a log is an extra
                self._end(f"{type(error).__name__}: {error}")

    def step_of_runner_2(self, entry: Entry, batch: Any) -> None:
        """`of_runner_2`, likewise."""
        if self._writer is not None:
            try:
                self.of_runner_2(entry, batch)
            except Exception as error:  # noqa: BLE001 - a log is an extra
                self._end(f"{type(error).__name__}: {error}")

    def of_runner_1(self, entry: Entry, facts: tuple[int, Any]) -> None:
        """Append a step of the first runner, from its persistent batch."""
        reqs, new = facts
        batch = self._state.runner.input_batch
        if batch.num_reqs != reqs:
            return  # a dummy run: nobody's requests
        computed, prompt = batch.num_computed_tokens_cpu[:reqs], batch.num_prompt_tokens[:reqs]
        self.write(entry, shape_of(new.tolist(), computed.tolist(), prompt.tolist(),
                                   num_active_loras=entry.step.num_active_loras))  # fmt: skip

    def of_runner_2(self, entry: Entry, batch: Any) -> None:
        """Append a step of the second runner, from the inputs that it has prepared."""
        context = batch.num_computed_prefill_tokens_np
        done = context >= batch.prefill_len_np
        computed = batch.num_computed_tokens_np
        self.write(entry, shape_of(batch.num_scheduled_tokens.tolist(), computed.tolist(),
                                   [0 if each else 1 << 30 for each in done.tolist()],
                                   num_active_loras=entry.step.num_active_loras))  # fmt: skip

    def close(self) -> None:
        """End the log."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._at_end.detach()
            writer.close()
