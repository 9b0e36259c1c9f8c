"""What a user may set, as ``KPOLICY_*`` in the environment: SGLang's plugins load before its arguments are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from kpolicy.errors import ConfigError, misspelt
from kpolicy.policies import get_policy
from kpolicy.settings import SWITCH, Objective, read_variable, read_variables

__all__ = ["ON", "Config"]

ON = "KPOLICY_SGLANG"
"""1 turns kpolicy on, 0 turns it off; unset, a policy in ``KPOLICY_POLICY`` turns it on."""
_PREFIX = "KPOLICY_"


@attrs.frozen(kw_only=True)
class Config:
    """The settings of one SGLang. `docs/sglang.md` of kpolicy lists them for users.

    Args:
        policy: a policy as kpolicy names it: ``auto``, ``full_and_piecewise``, ``sglang``.
        objective: what `auto` minimises: ``throughput``, ``latency``, ``STEP:GAP`` or ``STEP:GAP:LIMIT``, as
            `Objective.parse` reads it.
        plan: a ladder plan to take the sizes from (`kpolicy plan --out`).
        decode_sizes: decode sizes in requests; by default the integration's own, see `kpolicy_sglang.ladder`.
        piecewise_sizes: prefill sizes in tokens, likewise.
        profile: a profile to take costs from, in place of measuring them at start-up.
        calibrate: measure costs from SGLang's own graphs and eager steps at start-up.
        calibrate_seconds: seconds that measuring may take, but for what no decision can do without; by default half
            of what quicker captures saved, and one at most.
        quick_capture: warm up once before the capture of most graphs, where SGLang does twice, and collect garbage
            once: see `kpolicy_sglang.captures`.
        quick_padding: clear what a batch leaves of its graph empty without launches for that: see
            `kpolicy_sglang.padding`.
        split: with mixed chunks on, run decodes and prompt chunks in steps of their own where that costs less.
        turns: while prompts wait, a decode step comes between two batches of them where running decodes would wait
            for more than most of a chunk takes; otherwise the order is SGLang's.
        gap_ms: running decodes wait for no more milliseconds of prompts; batches of prompts are cut to that.
        mla_prefill: on 0.5.16, let MLA models have the prefill graphs that its start-up rules turn off: with any
            attention backend, with none, or by default with those whose results were checked.
        decision_log: a file for every decision, which `kpolicy simulate --decisions` decides again.
        metrics: counters beside SGLang's Prometheus metrics, where those are on.
        summary_seconds: seconds between two flushes of counters and summaries.
        strict: end the process with an error where kpolicy can't be what was asked for; otherwise SGLang goes on
            by its own rules.

    Raises:
        ConfigError: a value can't be used.
    """

    policy: str = "auto"
    objective: str = "throughput"
    plan: str | None = None
    decode_sizes: tuple[int, ...] | None = None
    piecewise_sizes: tuple[int, ...] | None = None
    profile: str | None = None
    calibrate: bool = True
    calibrate_seconds: float | None = None
    quick_capture: bool = True
    quick_padding: bool = True
    split: bool = True
    turns: bool = True
    gap_ms: float | None = None
    mla_prefill: bool | None = None
    decision_log: str | None = None
    metrics: bool = True
    summary_seconds: float = 60.0
    strict: bool = False

    def __attrs_post_init__(self) -> None:
        get_policy(self.policy)
        Objective.parse(self.objective)
        if not 0 <= self.summary_seconds < float("inf"):
            raise ConfigError(f"{_PREFIX}SUMMARY_SECONDS is {self.summary_seconds!r}; it is a number from 0 up.")
        if self.gap_ms is not None and not 0 < self.gap_ms < float("inf"):
            raise ConfigError(f"{_PREFIX}GAP_MS is {self.gap_ms!r}; it is a number of milliseconds above 0.")
        if self.calibrate_seconds is not None and not 0 < self.calibrate_seconds < float("inf"):
            raise ConfigError(
                f"{_PREFIX}CALIBRATE_SECONDS is {self.calibrate_seconds!r}; it is a number of seconds above 0. "
                f"{_PREFIX}CALIBRATE=0 measures nothing."
            )
        for name in ("decode_sizes", "piecewise_sizes"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes))):
                raise ConfigError(
                    f"{_PREFIX}{name.upper()} is {','.join(map(str, sizes)) or 'empty'}; it is a list of sizes that "
                    "rise from at least 1, for example 1,2,4,8."
                )

    @property
    def deciding(self) -> dict[str, Any]:
        """What ranks must have alike, as it was set: all that a decision or an order of steps comes from."""
        own = ("plan", "profile", "decision_log", "metrics", "summary_seconds", "strict")
        named = {name: getattr(self, name) for name in attrs.fields_dict(type(self)) if name not in own}
        return {f"{_PREFIX}{name.upper()}": value for name, value in named.items()} | {
            f"{_PREFIX}PROFILE": "set" if self.profile else "not set"
        }

    @staticmethod
    def strict_in(environ: Mapping[str, str]) -> bool:
        """Whether an environment asks to be strict, whatever else in it can't be read."""
        return SWITCH.get(environ.get(f"{_PREFIX}STRICT", "").strip().lower(), False)

    @classmethod
    def misspelt(cls, environ: Mapping[str, str]) -> list[tuple[str, str]]:
        """Variables that aren't settings, each with the one that was meant; others may be of another program."""
        return misspelt(environ, _PREFIX, [ON, *(_PREFIX + name.upper() for name in attrs.fields_dict(cls))])

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config | None:
        """The settings in the environment; None where kpolicy is off.

        Raises:
            ConfigError: a value can't be read or used.
        """
        switch = read_variable(ON, text, "bool") if (text := environ.get(ON, "").strip()) else None
        if switch is False or (not switch and not environ.get(f"{_PREFIX}POLICY")):
            return None
        return cls(**read_variables(environ, _PREFIX, _KINDS))


_KINDS: Mapping[str, str] = {name: str(field.type) for name, field in attrs.fields_dict(Config).items()}
