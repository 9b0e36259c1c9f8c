"""Every mode's outputs held to EAGER's while a run serves: logits and written KV, bitwise, pad slots poisoned.

`Verifier.check` is called after a step. For each launch it notes the logits and the KV that the launch left, fills what
it wrote with NaN, runs the rows eagerly at the launch's padded shape, and compares. The launch's own KV is put back, so
the run goes on with its own results, right or wrong.

KV of everybody else must stay as it is. A copy of all KV follows what each step may write, checked or not; at a check
the two are compared to the bit, which also finds what steps between checks did. The copy takes as much memory as the
KV; following a step costs a copy of its slots, comparing a read of all KV.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from kpolicy.decision import Launch
from kpolicy.executors.base import StepInputs, StepOutputs
from kpolicy.executors.runner import PartOutputs, part_of
from kpolicy.keys import GraphKey
from kpolicy.modes import Part, Rows
from kpolicy.trace_run import Checks

if TYPE_CHECKING:
    from kpolicy.scheduling.batching import Batcher
    from kpolicy.serving.hf_model import LoadedModel

__all__ = ["Difference", "Verifier"]

LEAST_CHECKS = 50
"""Steps of each mode that are checked; all where it has fewer."""
EVERY = 64
"""After these, one step in so many of each mode."""


@attrs.frozen
class Difference:
    """One check that failed.

    Args:
        step: the step's index.
        mode: its mode.
        launch: the launch, in words.
        what: ``logits``, ``kv`` or ``tokens``, which differ from EAGER's; or ``other kv``, which changed and belongs to
            no row of this step or of one since the last check.
        largest: the largest difference; NaN where one side is NaN.
    """

    step: int
    mode: str
    launch: str
    what: str
    largest: float

    def __str__(self) -> str:
        at = f"step {self.step} ({self.mode}), {self.launch}: "
        if self.what == "other kv":
            return f"{at}KV of no row of its own changed by up to {self.largest:g}"
        return f"{at}{self.what} differ from EAGER by up to {self.largest:g}"


class Verifier:
    """Checks one Engine's steps.

    Args:
        model: what the executor runs, its KV as the first step finds it.
        launcher: the executor's `GraphLauncher`.
        least, every: how many of each mode's steps are checked: the first `least`, then one in `every`.
    """

    def __init__(self, model: LoadedModel, launcher: Any, *, least: int = LEAST_CHECKS, every: int = EVERY) -> None:
        self.model = model
        self.launcher = launcher
        self.least = least
        self.every = every
        self.differences: list[Difference] = []
        self._steps: dict[str, int] = {}
        self._checks: dict[str, list[int]] = {}
        self._last: tuple[int, str, StepOutputs] | None = None
        with torch.inference_mode(False):
            self._expected = [cache.clone() for cache in model.kv_caches()]

    @property
    def checks(self) -> dict[str, Checks]:
        """What was compared, by mode: steps checked, and those of which anything differed."""
        return {mode: Checks(*counts) for mode, counts in self._checks.items()}

    def poison(self) -> None:
        """Fill the pad slot with NaN: what reads it in the next step shows."""
        with torch.inference_mode(False):
            self.model.poison_pad_slot()

    def check(self, step: int, inputs: StepInputs, outputs: StepOutputs, _batcher: Batcher, _start_us: float) -> None:
        """Compare a step with EAGER where it is its mode's turn."""
        for event in outputs.ready:
            event.wait()  # a half without wanted rows is waited for by nobody else
        self._follow(inputs, outputs)
        mode = outputs.decision.label
        self._last = step, mode, outputs
        seen = self._steps[mode] = self._steps.get(mode, 0) + 1
        if seen > self.least and seen % self.every:
            return
        counts = self._checks.setdefault(mode, [0, 0])
        counts[0] += 1
        before = len(self.differences)
        self._check_others(step, mode, outputs)
        self._check_step(step, mode, inputs, outputs)
        counts[1] += len(self.differences) > before

    def finish(self) -> None:
        """Look for KV that changed since the last check; it counts as a failure of the last step's mode."""
        if self._last is not None:
            step, mode, outputs = self._last
            before = len(self.differences)
            self._check_others(step, mode, outputs)
            if len(self.differences) > before:
                self._checks.setdefault(mode, [0, 0])[1] += 1

    def _follow(self, inputs: StepInputs, outputs: StepOutputs) -> None:
        """Take what a step wrote to its own slots as expected."""
        own = {slot for launch, rows in _launches(inputs, outputs) for slot in _slots(rows, launch.repeat)}
        slots = torch.as_tensor(sorted(own), dtype=torch.int64, device=self.model.device)
        with torch.inference_mode(False):
            for (cache, at), expected in zip(self.model.kv_at(slots), self._expected, strict=True):
                expected.view_as(cache)[at] = cache[at]

    def _check_others(self, step: int, mode: str, outputs: StepOutputs) -> None:
        """Compare all KV but the pad slot with what steps may have written; what differs is expected from now on."""
        pad = self.model.pad_slot
        for cache, expected in zip(self.model.kv_caches(), self._expected, strict=True):
            if torch.equal(_bits(cache[:pad]), _bits(expected[:pad])):
                continue
            launches = "; ".join(map(str, outputs.decision.launches))
            largest = float((cache[:pad].double() - expected[:pad].double()).abs().max())
            self.differences.append(Difference(step, mode, launches, "other kv", largest))
            with torch.inference_mode(False):
                expected.copy_(cache)

    def _check_step(self, step: int, mode: str, inputs: StepInputs, outputs: StepOutputs) -> None:
        at, failed = 0, getattr(outputs, "failed_keys", {})
        for place, (launch, rows) in enumerate(_launches(inputs, outputs)):
            num_wanted = len(rows.wanted)
            logits = list(outputs.outputs[at : at + num_wanted])
            at += num_wanted
            for what, largest in self._compare(launch, rows, logits, outputs.tokens, failed.get(place)):
                self.differences.append(Difference(step, mode, str(launch), what, largest))

    def _compare(
        self, launch: Launch, rows: StepInputs, logits: list[Any], tokens: Sequence[Sequence[int]],
        failed: GraphKey | None,
    ) -> list[tuple[str, float]]:  # fmt: skip
        """(what differs, by how much); `failed` is the graph that the rows ran in place of, behind the host."""
        slots = torch.as_tensor(_slots(rows, launch.repeat), dtype=torch.int64, device=self.model.device)
        places = self.model.kv_at(slots)
        sampled = [list(each) for each in tokens] if launch.rows is not Rows.PREFILL else []
        with torch.inference_mode(False), torch.no_grad():
            written = [cache[at] for cache, at in places]
            for cache, at in places:
                cache[at] = float("nan")
            self.poison()
            # Any other eager launch is padded, and told its rows, as a PIECEWISE replay is.
            key = launch.key or failed or GraphKey(Part.PIECEWISE, launch.padded_tokens or len(rows.token_ids))
            expected: PartOutputs = self.launcher.eager_as(key, rows, launch.rows, repeat=launch.repeat)
            found: dict[str, float] = {}
            if logits:
                found["logits"] = _largest(torch.stack(logits), torch.stack(list(expected.outputs)))
            if sampled and sampled != [list(each) for each in expected.tokens]:
                found["tokens"] = 1.0
            found["kv"] = largest_of((kv, cache[at]) for kv, (cache, at) in zip(written, places, strict=True))
            for (cache, at), kv in zip(places, written, strict=True):
                cache[at] = kv
            self.poison()
        return [(what, largest) for what, largest in found.items() if largest != 0]


def _launches(inputs: StepInputs, outputs: StepOutputs) -> list[tuple[Launch, StepInputs]]:
    """A step's launches, each with its rows."""
    return [
        (launch, inputs if launch.rows is Rows.ALL else part_of(inputs, launch.rows))
        for launch in outputs.decision.launches
    ]


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers: NaN equals itself, and zeros of either sign differ."""
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _slots(rows: StepInputs, repeat: int) -> list[int]:
    """Every KV slot that a launch writes."""
    return [*rows.slot_mapping, *(slot for step in rows.slots_ahead[: repeat - 1] for slot in step)]


def largest_of(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference within any pair; NaN where a value of any isn't finite."""
    differ = [_largest(one, other) for one, other in pairs]
    # NaN compares false with everything: `max` alone would drop it behind the first.
    return next(filter(math.isnan, differ), max(differ, default=0.0))


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, 0 where every bit agrees; NaN where a value isn't finite."""
    if not (torch.isfinite(one).all() and torch.isfinite(other).all()):
        return float("nan")
    if torch.equal(one, other):
        return 0.0
    # Zeros of either sign are equal values.
    return float((one.double() - other.double()).abs().max())
