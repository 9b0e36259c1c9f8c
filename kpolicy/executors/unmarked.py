"""Attention that isn't marked, found while a PIECEWISE graph is captured.

Recorded into a segment it would run at each replay with what it read at capture: an error, never a wrong result. What
only attention needs of a step (slots, block table, lengths) is therefore given to marked calls alone.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

from kpolicy.errors import CaptureError
from kpolicy.executors.step_model import StepTensors
from kpolicy.reasons import Reason

__all__ = ["GuardedTensors", "unmarked", "where"]

_NOT_MODELS = ("torch.", "kpolicy.executors.", "kpolicy.serving.", "contextlib")
"""Modules that run model code and are none."""


def unmarked(what: str) -> CaptureError:
    """The error for attention without its mark: the layer, the line, and the next step."""
    return CaptureError(
        Reason.CAPTURE_FAILED,
        f"{where()} {what} without the break mark, inside a PIECEWISE capture: a replay would go on with the lengths "
        "of the capture. Call attention through the step (`current_step().attention(call, ...)`; models of "
        "transformers: through its attention interface), or capture FULL graphs only.",
    )


def where() -> str:
    """The layer and the line of model code that run on this thread, in words.

    The line is that of the innermost module with a ``layer_idx``, as attention modules of transformers have; without
    one, the innermost line that is neither torch's nor ours.
    """
    frame: FrameType | None = sys._getframe(1)
    innermost = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not (name == "torch" or name.startswith(_NOT_MODELS)):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            owner: Any = frame.f_locals.get("self")
            layer = getattr(owner, "layer_idx", None)
            if isinstance(layer, int):
                return f"layer {layer} ({type(owner).__name__}) at {line}"
            innermost = innermost or f"{frame.f_code.co_name} at {line}"
        frame = frame.f_back
    return innermost or "unknown code"


class GuardedTensors(StepTensors):
    """A step's inputs while a segment is recorded: what only attention needs is an error to read."""

    __slots__ = ()

    @property
    def slot_mapping(self) -> NoReturn:
        raise unmarked("reads the step's slot_mapping")

    @property
    def block_table(self) -> NoReturn:
        raise unmarked("reads the step's block_table")

    @property
    def kv_lens(self) -> NoReturn:
        raise unmarked("reads the step's kv_lens")

    @property
    def query_starts(self) -> NoReturn:
        raise unmarked("reads the step's query_starts")
