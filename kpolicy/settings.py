"""Limits of a deployment that every part reads: rows, tokens, speculation, LoRA; and settings in the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import attrs

from kpolicy.errors import ConfigError
from kpolicy.shapes import plain_int

__all__ = ["GAP_FIRST_TOKEN_LIMIT", "LIMITS", "SWITCH", "Objective", "Settings", "read_variable", "read_variables"]

LIMITS: Mapping[str, tuple[int, int]] = {
    "max_num_reqs": (1, 1 << 16),
    "max_num_tokens": (1, 1 << 20),
    "num_speculative_tokens": (0, 255),
    "max_loras": (0, 1024),
}
"""The least and the most of each of `Settings`. Prepared tables are as long as these, so at the most of all of them
compiling takes seconds and some 100 MB; a mistyped limit would take all memory."""


GAP_FIRST_TOKEN_LIMIT = 1.25
"""`Objective.first_token_limit` where the gap is weighed

Without such a weight it is 1: what prompts lose by decode steps beside them adds up along a queue. With 1.25 and costs
of Llama-3.1-8B on an H200, recorded traces simulated at 0.7 and 1.3 times what the device can serve, median first
tokens came up to 1.3 times as late as by vLLM's rule, for 0.9% less to 2.9% more tokens a second. Where more is asked
for long than can be served 1.25 is better, by 4.8% of throughput in one such load (docs/simulate.md).
"""


@attrs.frozen(kw_only=True)
class Settings:
    """What the serving engine around kpolicy was started with.

    Args:
        max_num_reqs: most requests in one step.
        max_num_tokens: most tokens in one step (the chunked prefill budget).
        num_speculative_tokens: draft tokens verified a decode row, k; decode rows then have 1 + k tokens.
        max_loras: most LoRA adapters active in one step; 0 without LoRA.

    Raises:
        ConfigError: a limit is out of range.
    """

    max_num_reqs: int = attrs.field(default=256, converter=plain_int)
    max_num_tokens: int = attrs.field(default=8192, converter=plain_int)
    num_speculative_tokens: int = attrs.field(default=0, converter=plain_int)
    max_loras: int = attrs.field(default=0, converter=plain_int)

    def __attrs_post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number of at least {least} and at most {most}."
                )
        if self.max_num_tokens < self.query_len:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}, less than one decode row of {self.query_len} tokens "
                f"(1 + num_speculative_tokens). Raise it or draft fewer tokens."
            )

    @property
    def query_len(self) -> int:
        """Tokens of a decode row that verifies all its drafts: 1 + k."""
        return 1 + self.num_speculative_tokens

    @property
    def decode_query_lens(self) -> tuple[int, ...]:
        """Query lengths that uniform decode batches come in: 1 + k, and 1 for steps without drafts."""
        return (1, self.query_len) if self.num_speculative_tokens else (1,)


@attrs.frozen
class Objective:
    """What `auto` minimises: ``step_weight * step_us + gap_weight * gap_us``.

    Args:
        step_weight: weight of the time of a whole cycle of work; 1 and 0 is throughput.
        gap_weight: weight of the time until the same decode rows' next token; 0 and 1 is latency.
        first_token_limit: the prefill rows of a step may take at most this many times what the way that is best
            for them takes. Keeps several decodes beside one prefill from starving the prompt. By default
            `GAP_FIRST_TOKEN_LIMIT` where the gap is weighed; else 1, so that no prompt is later for decodes that go on.
            It is set when the objective is made: `attrs.evolve` to other weights keeps it.

    Its text is one that `parse` reads.

    Raises:
        ConfigError: a weight is negative or not finite, both are zero, or the limit is under 1 or not finite.
    """

    step_weight: float = 1.0
    gap_weight: float = 0.0
    first_token_limit: float = attrs.field(
        default=attrs.Factory(lambda self: _own_limit(self.gap_weight), takes_self=True)
    )

    def __attrs_post_init__(self) -> None:
        weights = (self.step_weight, self.gap_weight)
        for name in ("step_weight", "gap_weight", "first_token_limit"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise ConfigError(f"{name} is {value!r:.80}; it is a number.")
        # NaN fails both comparisons.
        if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
            raise ConfigError(
                f"objective weights are {self.step_weight:g} and {self.gap_weight:g}; both must be finite and at least "
                "0, one above it, for example 0.7:0.3."
            )
        if not 1 <= self.first_token_limit < float("inf"):
            raise ConfigError(
                f"first_token_limit is {self.first_token_limit}; it is a finite factor of at least 1, for example 1.25."
            )

    @classmethod
    def parse(cls, value: Objective | str) -> Objective:
        """``"throughput"``, ``"latency"``, ``"STEP:GAP"`` weights such as ``"0.7:0.3"``, or ``"STEP:GAP:LIMIT"``.

        The third is `first_token_limit`, where it isn't to be the objective's own: ``"1:0:1.25"``.

        Raises:
            ConfigError: the text is none of these.
        """
        if isinstance(value, Objective):
            return value
        if not isinstance(value, str):
            raise ConfigError(
                f"objective is {value!r:.80}; give an Objective, or text such as 'throughput' or '0.7:0.3'."
            )
        if value == "throughput":
            return cls()
        if value == "latency":
            return cls(0.0, 1.0)
        try:
            step, gap, *limit = (float(part) for part in value.split(":"))
            if len(limit) > 1:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"objective is {value!r}; it is throughput, latency, or weights as STEP:GAP, for example 0.7:0.3, with "
                "first_token_limit behind them where that isn't to be the objective's own, for example 1:0:1.25."
            ) from None
        return cls(step, gap, *limit)

    def __str__(self) -> str:
        if self.first_token_limit != _own_limit(self.gap_weight):
            return ":".join(map(_shortest, (self.step_weight, self.gap_weight, self.first_token_limit)))
        if not self.gap_weight:
            return "throughput"
        return f"{_shortest(self.step_weight)}:{_shortest(self.gap_weight)}" if self.step_weight else "latency"


def _own_limit(gap_weight: float) -> float:
    """`Objective.first_token_limit` where none is given."""
    return 1.0 if isinstance(gap_weight, Real) and not gap_weight else GAP_FIRST_TOKEN_LIMIT


def _shortest(value: float) -> str:
    """The shortest text that reads back as the number."""
    return text if float(text := f"{value:g}") == value else repr(float(value))


SWITCH: Mapping[str, bool] = {
    "1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip
"""What a variable of the environment says that is on or off, in small letters."""

_ALLOWED = (
    ("tuple", "whole numbers with commas between, for example 1,2,4"),
    ("bool", "1 or 0"),
    ("int", "a whole number"),
    ("float", "a number"),
)
"""What a variable may be, by how the type of its setting begins."""


def read_variable(name: str, text: str, kind: str) -> Any:
    """A variable of the environment as the type of the setting that it gives.

    Args:
        name: the variable, for the error.
        text: its value.
        kind: the setting's type as it is annotated: ``bool``, ``int``, ``float``, ``tuple[int, ...]`` or ``str``, also
            followed by ``| None``.

    Raises:
        ConfigError: it can't be read as one.
    """
    begins, allowed = next((each for each in _ALLOWED if kind.startswith(each[0])), ("str", ""))
    try:
        if begins == "tuple":
            return tuple(int(part) for part in text.split(",") if part.strip())
        if begins == "bool":
            return SWITCH[text.strip().lower()]
        if begins == "int":
            return int(text)
        if begins == "float" and not math.isfinite(float(text)):
            raise ValueError
        return float(text) if begins == "float" else text
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {text!r}; it is {allowed}.") from None


def read_variables(environ: Mapping[str, str], prefix: str, kinds: Mapping[str, str]) -> dict[str, Any]:
    """The settings that an environment gives, by name; an empty variable gives none.

    Args:
        environ: the environment.
        prefix: what variables begin with, before the setting's name in capitals.
        kinds: the settings' types, as `read_variable` takes them.

    Raises:
        ConfigError: a variable can't be read.
    """
    variables = {name: prefix + name.upper() for name in kinds}
    return {
        name: read_variable(variable, text, kinds[name])
        for name, variable in variables.items()
        if (text := environ.get(variable))
    }
