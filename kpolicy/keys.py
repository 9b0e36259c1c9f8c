"""`GraphKey`: the value that finds a captured graph, and the one rule of which batches a graph holds."""

from __future__ import annotations

import attrs

from kpolicy.errors import ConfigError
from kpolicy.modes import Part
from kpolicy.shapes import BatchNumbers, plain_int

__all__ = ["GraphKey"]

_COUNTS = (
    ("num_tokens", 1, False), ("num_reqs", 1, True), ("query_len", 1, True), ("max_query_len", 1, True),
    ("lora_case", 0, False),
)  # fmt: skip
"""Fields that are counts: the least each may be, and whether None stands for any"""


@attrs.frozen(cache_hash=True, order=False)
class GraphKey:
    """What identifies a padded batch, in as few fields as do. None in a field means "any".

    Args:
        part: what the graph covers.
        num_tokens: tokens the graph computes, padding included.
        num_reqs: request rows the graph has; None where attention is outside it (PIECEWISE).
        query_len: the one query length of every row, for uniform decode graphs.
        max_query_len: the longest query of a decode row, for variable-length decode graphs.
        lora_case: the largest number of active LoRAs the graph serves; 0 is the graph without LoRA.
        stage: which model the graph belongs to: main, draft, encoder, or a pipeline stage.
        variant: what else tells two graphs apart, for example a sparse from a dense attention path.
    """

    part: Part
    num_tokens: int
    num_reqs: int | None = None
    query_len: int | None = None
    max_query_len: int | None = None
    lora_case: int = 0
    stage: str = "main"
    variant: str = ""

    def __attrs_post_init__(self) -> None:
        if type(self.part) is not Part:
            raise ConfigError(f"part is {self.part!r:.80}; it is Part.FULL or Part.PIECEWISE. Part('full') makes one.")
        for name, least, optional in _COUNTS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                value = plain_int(value)
                object.__setattr__(self, name, value)
            if not (optional and value is None) and (type(value) is not int or value < least):
                raise ConfigError(f"{name} of a graph key is {value!r:.80}; it is a whole number from {least} up.")
        if self.query_len is not None and self.max_query_len is not None:
            raise ConfigError(f"{self!r}: a graph is of one query length or of varying ones; give one of the two.")

    @property
    def decode_only(self) -> bool:
        """Whether the graph may hold decode rows only."""
        return self.query_len is not None or self.max_query_len is not None

    def holds(
        self, num_tokens: int, num_reqs: int, query_len: int, max_query_len: int, decode: bool, loras: int
    ) -> bool:
        """Whether rows with these counts may be padded into this graph.

        Args:
            num_tokens: tokens of the rows.
            num_reqs: requests of the rows.
            query_len: the query length they share, 0 where they differ.
            max_query_len: the longest.
            decode: whether all of them are decode rows.
            loras: active LoRAs.
        """
        if num_tokens > self.num_tokens or (self.num_reqs is not None and num_reqs > self.num_reqs):
            return False
        if self.lora_case < loras:
            return False
        if self.query_len is not None:
            return decode and query_len == self.query_len
        if self.max_query_len is not None:
            # A padding row needs a token of its own, so rows and tokens are padded together.
            return decode and max_query_len <= self.max_query_len
        return True

    def holds_batch(self, numbers: BatchNumbers) -> bool:
        """Whether the whole batch may be padded into this graph."""
        return self.holds(
            numbers.total_tokens, numbers.total_reqs, numbers.query_len, numbers.longest_decode,
            numbers.num_prefills == 0, numbers.num_active_loras,
        )  # fmt: skip

    def __str__(self) -> str:
        text = f"{self.part.name} {self.num_tokens}t"
        if self.num_reqs is not None:
            text += f"/{self.num_reqs}r"
        if self.query_len is not None:
            text += f" q={self.query_len}"
        if self.max_query_len is not None:
            text += f" q<={self.max_query_len}"
        if self.lora_case:
            text += f" lora<={self.lora_case}"
        if self.stage != "main":
            text += f" {self.stage}"
        return f"{text} {self.variant}".rstrip()
