"""`Decision`: how one batch runs, and why."""

from __future__ import annotations

from typing import Any

import attrs

from kpolicy.errors import ConfigError
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.reasons import Basis, Reason
from kpolicy.shapes import BatchNumbers

__all__ = ["Decision", "Launch"]


@attrs.frozen(cache_hash=True)
class Launch:
    """One part of a step: some rows, and the graph that replays them.

    Args:
        rows: which rows it runs.
        key: the graph that replays; None runs eagerly.
        stream: 0 is the main stream; another number runs beside it.
        repeat: decode steps that follow each other in this launch.
        wait_share: how its repeats lie beside the step's other launch, which is on another stream. That one's attention
            calls are divided into `repeat` slots, and each repeat begins when this share of its slot is over, so that
            tokens come evenly and the last when the step ends. None: all at once, one after the other. An executor
            whose host runs the device's work itself doesn't wait.
        padded_tokens: for an eager launch that is padded all the same (vLLM v1 under data parallelism).
        reason: why an eager launch inside a SPLIT doesn't replay.
    """

    rows: Rows
    key: GraphKey | None
    stream: int = 0
    repeat: int = 1
    padded_tokens: int | None = None
    reason: Reason | None = None
    wait_share: float | None = attrs.field(default=None)

    @wait_share.validator
    def _check_wait(self, _: Any, value: float | None) -> None:
        if value is not None and not (type(value) in (int, float) and 0 <= value < 1):
            raise ConfigError(
                f"wait_share is {value!r}; it is a share of a slot from 0 up and below 1, or None to begin at once."
            )

    @property
    def part(self) -> Part | None:
        """What of the graph's coverage replays; None when eager."""
        return None if self.key is None else self.key.part

    def num_tokens(self, numbers: BatchNumbers) -> int:
        """Tokens of this launch's rows, without padding, for one repeat."""
        if self.rows is Rows.ALL:
            return numbers.total_tokens
        return numbers.decode_tokens if self.rows is Rows.DECODE else numbers.num_prefill_tokens

    def size(self, numbers: BatchNumbers) -> int:
        """Tokens that this launch runs for one repeat: its rows' with their padding."""
        return (self.padded_tokens if self.key is None else self.key.num_tokens) or self.num_tokens(numbers)

    def padding(self, numbers: BatchNumbers) -> int:
        """Padding tokens over all repeats."""
        padded = self.padded_tokens if self.key is None else self.key.num_tokens
        return 0 if padded is None else (padded - self.num_tokens(numbers)) * self.repeat

    def __str__(self) -> str:
        text = f"{self.rows}: {self.key or 'eager'}"
        if self.repeat > 1:
            text += f" x{self.repeat}"
        if self.wait_share is not None:
            text += f" after {self.wait_share:.0%} of a slot"
        if self.stream:
            text += f" on stream {self.stream}"
        return text


@attrs.frozen(cache_hash=True)
class Decision:
    """How one batch runs. Decisions are prepared: many batches share one, so the counts stay in the shape.

    Args:
        mode: how the batch runs.
        launches: what is launched, in launch order.
        reason: why.
        form: how the halves of a SPLIT share the device; None otherwise.
        basis: what the decision takes for granted.
        costs_version: the cost table it was made from; empty where no costs were read.
    """

    mode: Mode
    launches: tuple[Launch, ...]
    reason: Reason
    form: SplitForm | None = None
    basis: Basis = Basis.NOTHING
    costs_version: str = ""

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The graphs that replay."""
        return tuple(launch.key for launch in self.launches if launch.key is not None)

    @property
    def decode_steps(self) -> int:
        """Decode steps that this step runs for each decode row."""
        return max((launch.repeat for launch in self.launches if launch.rows is not Rows.PREFILL), default=1)

    def padding(self, numbers: BatchNumbers) -> int:
        """Padding tokens of the whole step."""
        return sum(launch.padding(numbers) for launch in self.launches)

    @property
    def label(self) -> str:
        """The mode, with the form of a split: what counters are kept by."""
        return self.mode.value if self.form is None else f"{self.mode.value}/{self.form.value}"

    @property
    def why(self) -> str:
        """One sentence: the reason, that of an eager half, and what was assumed."""
        text = self.reason.text
        for launch in self.launches:
            if launch.reason is not None:
                text += f"; {launch.rows} rows run eagerly: {launch.reason.text}"
        return f"{text} ({self.basis.text})" if self.basis else text

    def as_dict(self, numbers: BatchNumbers | None = None) -> dict[str, Any]:
        """The decision as plain JSON values; with `numbers`, padding too."""
        launches = []
        for launch in self.launches:
            row: dict[str, Any] = {"rows": launch.rows.value, "graph": str(launch.key) if launch.key else None}
            if numbers is not None:
                row |= {"tokens": launch.num_tokens(numbers), "padding": launch.padding(numbers)}
            row |= {"stream": launch.stream, "repeat": launch.repeat}
            if launch.wait_share is not None:
                row["wait_share"] = launch.wait_share
            if launch.reason is not None:
                row["reason"] = launch.reason.value
            launches.append(row)
        return {
            "mode": self.mode.value,
            "form": self.form.value if self.form else None,
            "launches": launches,
            "reason": self.reason.value,
            "why": self.why,
            "assumes": list(self.basis.names),
            "costs": self.costs_version or None,
        }

    def __str__(self) -> str:
        launches = "; ".join(str(launch) for launch in self.launches)
        return f"{self.label} [{launches}] because {self.why}"
