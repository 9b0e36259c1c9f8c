"""What a user may set, in ``--additional-config '{"kpolicy": {...}}'`` or as ``KPOLICY_*`` in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kpolicy.errors import ConfigError, UnknownNameError, misspelt
from kpolicy.settings import Objective, read_variable, read_variables

__all__ = ["ON", "SECTION", "Config"]

SECTION = "kpolicy"
"""The key in vLLM's additional config."""
ON = "KPOLICY_VLLM"
"""1 turns kpolicy on without the flag, 0 turns it off whatever the flag says."""
_PREFIX = "KPOLICY_"
GONE = {"first_token_limit": "It is the objective's third number: STEP:GAP:LIMIT, for example 1:0:1.25."}
"""Settings of before, each with what says the same now: one that is given isn't passed over."""


def _sizes(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


@attrs.frozen(kw_only=True)
class Config:
    """The settings of one vLLM. `docs/vllm.md` of kpolicy lists them for users.

    Args:
        policy: a policy as kpolicy names it, with its arguments: ``auto``, ``full_and_piecewise``, ``vllm:runner=v2``.
        objective: what `auto` minimises: ``throughput``, ``latency``, ``STEP:GAP`` or ``STEP:GAP:LIMIT``, as
            `Objective.parse` reads it; LIMIT is how many times the best for them prompts may take.
        plan: a ladder plan to take the sizes from (`kpolicy plan --out`).
        decode_sizes, mixed_sizes, piecewise_sizes: capture sizes by kind of graph, in tokens; by default the
            integration's own, see `kpolicy_vllm.ladder`. An empty list captures none of that kind.
        profile: a profile to take costs from, in place of measuring them at start-up.
        save_profile: a file to keep the measured costs in, which `profile` reads.
        calibrate: measure costs from vLLM's own graphs at start-up, where the policy reads costs.
        calibrate_seconds: seconds that may take.
        follow_host: bring costs to the speed that the host has while it serves.
        pace: bound steps that have decodes by what the gap is worth; None bounds them where the objective weighs it.
        defer: make the next step late, so that requests which arrive meanwhile are in it. First tokens are sooner so
            and the slowest gaps longer (docs/measured_vllm.md).
        split: let the scheduler run decodes and prompt chunks in steps of their own where that costs less.
        split_decodes: most decode-only steps between two steps with prompt chunks.
        first_token_ms: a prompt may wait at most this long for decode-only steps, where more than one is allowed.
        lazy: capture few graphs at start-up and others between steps, once their sizes are hot.
        lazy_hot: steps a size must have missed before it is captured.
        lazy_graphs: graphs to capture at start-up, the largest of each kind included.
        decision_log: a file for a decision log, which `kpolicy simulate` and `kpolicy vllm-explain` read.
        summary_seconds: seconds between summary lines; 0 for none.
        metrics: counters beside vLLM's Prometheus metrics.

    Raises:
        ConfigError: a value can't be used.
    """

    policy: str = "auto"
    objective: str = "throughput"
    plan: str | None = None
    decode_sizes: tuple[int, ...] | None = attrs.field(default=None, converter=_sizes)
    mixed_sizes: tuple[int, ...] | None = attrs.field(default=None, converter=_sizes)
    piecewise_sizes: tuple[int, ...] | None = attrs.field(default=None, converter=_sizes)
    profile: str | None = None
    save_profile: str | None = None
    calibrate: bool = True
    calibrate_seconds: float = 2.0
    follow_host: bool = True
    pace: bool | None = None
    defer: bool = False
    split: bool = False
    split_decodes: int = 1
    first_token_ms: float | None = None
    lazy: bool = False
    lazy_hot: int = 32
    lazy_graphs: int = 8
    decision_log: str | None = None
    summary_seconds: float = 60.0
    metrics: bool = True

    def __attrs_post_init__(self) -> None:
        Objective.parse(self.objective)
        for name in ("calibrate_seconds", "summary_seconds", "first_token_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"kpolicy's {name} is {value!r}; it is a number from 0 up.")
        for name in ("decode_sizes", "mixed_sizes", "piecewise_sizes"):
            if min(getattr(self, name) or (1,)) < 1:
                raise ConfigError(f"kpolicy's {name} is {list(getattr(self, name))}; a size is 1 token or more.")
        for name in ("split_decodes", "lazy_hot", "lazy_graphs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"kpolicy's {name} is {getattr(self, name)!r}; it is a whole number from 1 up.")

    @property
    def objective_parsed(self) -> Objective:
        """What is minimised, with the bound on prompts."""
        return Objective.parse(self.objective)

    @property
    def paces(self) -> bool:
        """Whether steps are bounded."""
        return self.objective_parsed.gap_weight > 0 if self.pace is None else self.pace

    @property
    def sizes_given(self) -> bool:
        """Whether the user gave sizes of any kind."""
        return self.plan is not None or not self.decode_sizes is self.mixed_sizes is self.piecewise_sizes is None

    @classmethod
    def load(cls, additional: Any, environ: Mapping[str, str] = os.environ) -> Config | None:
        """The settings of a vLLM with that additional config; None where kpolicy is off.

        The flag goes before the environment. ``{"kpolicy": true}`` and ``{"kpolicy": "POLICY"}`` are short forms.

        Raises:
            ConfigError: a setting isn't known, or its value can't be used.
        """
        given = additional.get(SECTION) if isinstance(additional, Mapping) else None
        switch = read_variable(ON, text, "bool") if (text := environ.get(ON, "").strip()) else None
        if switch is False or given is False:
            return None
        if given is None and not switch and f"{_PREFIX}POLICY" not in environ:
            return None
        if given is None or given is True:
            given = {}
        if isinstance(given, str):
            given = {"policy": given}
        if not isinstance(given, Mapping):
            raise ConfigError(f'"{SECTION}" in the additional config is {given!r}; it is an object of settings.')
        fields = attrs.fields_dict(cls)
        for name, instead in GONE.items():
            variable = _PREFIX + name.upper()
            if name in given or environ.get(variable):
                said = f"setting {name!r}" if name in given else f"variable {variable}"
                raise ConfigError(f"kpolicy has no {said} any more. {instead}")
        for name in given:
            if name not in fields:
                raise UnknownNameError("setting of kpolicy", name, fields)
        values = read_variables(environ, _PREFIX, _KINDS)
        values.update({name: _checked(name, value) for name, value in given.items()})
        return cls(**values)

    @classmethod
    def misspelt(cls, environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
        """Variables that aren't settings, each with the one that was meant; others may be of another program."""
        return misspelt(environ, _PREFIX, [ON, *(_PREFIX + name.upper() for name in attrs.fields_dict(cls))])

    def as_section(self) -> dict[str, Any]:
        """The settings that differ from the defaults, as plain JSON values that `load` reads."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in attrs.fields(type(self))
            if (value := getattr(self, field.name)) != field.default
        }


_KINDS: Mapping[str, str] = {name: str(field.type) for name, field in attrs.fields_dict(Config).items()}


def _checked(name: str, value: Any) -> Any:
    """A value of JSON as the setting's type.

    Raises:
        ConfigError: it is of another type.
    """
    kind = _KINDS[name]
    if value is None and "None" in kind:
        return None
    if kind.startswith("tuple"):
        if isinstance(value, (list, tuple)) and all(type(size) is int for size in value):
            return tuple(value)
        raise ConfigError(f"kpolicy's {name} is {value!r}; it is a list of whole numbers of tokens.")
    for prefix, allowed, wanted in (
        ("bool", (bool,), "true or false"),
        ("int", (int,), "a whole number"),
        ("float", (int, float), "a number"),
        ("str", (str,), "text"),
    ):
        if kind.startswith(prefix):
            if type(value) in allowed:
                return value
            raise ConfigError(f"kpolicy's {name} is {value!r}; it is {wanted}.")
    raise AssertionError(kind)
