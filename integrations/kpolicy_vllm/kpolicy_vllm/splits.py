"""FlashAttention's bound on splits: there for the steps that run in a FULL graph, and for no others.

Its builder fixes the number of splits, with buffers for that many, for every step up to the largest capture size, as
captured attention can't choose. In pieces and eagerly attention isn't captured, and may choose by the step's KV. With
vLLM's own sizes nothing is changed: splits decide the last bits of attention, and there every step's are stock's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kpolicy.modes import Part
from kpolicy_vllm.state import State

__all__ = ["Splits"]


class Splits:
    """The builders of a runner that bound splits.

    Args:
        runner: vLLM's model runner.
        state: the integration's, whose dispatcher says which graphs may be captured.
    """

    def __init__(self, runner: Any, state: State) -> None:
        self._runner = runner
        self._state = state
        self.bounded = True
        """Whether they do; to be looked at before `bound`, which costs more"""
        self._captures = False
        self._builders: list[tuple[Any, int]] = []
        """Each with the tokens of the largest FULL graph"""

    def found(self) -> None:
        """Look for the builders, which vLLM makes anew where it lays out the KV cache, and have them bound splits."""
        self.bound(True)
        self._builders = []
        state = self._state
        if state.sizes is None:
            return
        largest = max((key.num_tokens for key in state.dispatcher.desc_of if key.part is Part.FULL), default=0)
        for groups in self._runner.attn_groups:
            for group in groups:
                for builder in getattr(group, "metadata_builders", ()):
                    if largest and getattr(builder, "max_cudagraph_size", None):
                        builder.max_cudagraph_size = min(builder.max_cudagraph_size, largest)
                        self._builders.append((builder, builder.max_cudagraph_size))
        if state.settings.num_speculative_tokens:
            # A drafter's graphs may have their metadata of the same builders, whatever the model's own step runs in.
            self._builders = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Bound splits of every step while the context lasts, of those too that warm up what is captured."""
        self.bound(True)
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    def bound(self, whole: bool) -> None:
        """Before a step's metadata are made.

        Args:
            whole: whether it runs in a FULL graph.
        """
        if whole is not self.bounded and not self._captures:
            self.bounded = whole
            for builder, largest in self._builders:
                builder.max_cudagraph_size = largest if whole else 0
