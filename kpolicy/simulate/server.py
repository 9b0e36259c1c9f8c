"""What is simulated besides the policy: the limits and memory of a server, and what its users expect."""

from __future__ import annotations

from numbers import Real

import attrs

from kpolicy.costs import CostTable
from kpolicy.errors import ConfigError, check_kind
from kpolicy.host_speed import launching_takes
from kpolicy.scheduling.batching import MOST_STEPS_AHEAD
from kpolicy.schemas import MOST_KV_BYTES
from kpolicy.served_host import ServedHost
from kpolicy.settings import Settings
from kpolicy.shapes import LARGEST_COUNT, plain_int
from kpolicy.simulate.drafts import Drafts

__all__ = ["LEAST_SLOWER", "MOST_SLOWER", "Server", "ServiceLevel"]

LLAMA_8B_KV_BYTES = 131_072
PREFIX_BLOCK = 512
"""Prompt tokens behind one hash id in Mooncake's traces, as its publishers say."""
MOST_RANKS = 256
LEAST_SLOWER, MOST_SLOWER = 0.1, 10.0
"""Of `Server.slower_host`"""


def whole_number(name: str, value: object, least: int, most: int) -> int:
    """The value, of any library, as an int.

    Raises:
        ConfigError: it isn't a whole number, or out of range.
    """
    number = plain_int(value)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ConfigError(f"{name} is {value!r:.80}; it must be a whole number from {least} to {most}.")
    return number


_COUNTS = {
    "kv_tokens": LARGEST_COUNT, "block_size": LARGEST_COUNT, "steps_ahead": 64, "ranks": MOST_RANKS,
    "prefix_block": LARGEST_COUNT, "concurrency": LARGEST_COUNT, "kv_bytes_per_token": MOST_KV_BYTES,
}  # fmt: skip
"""Fields of `Server` that are whole numbers from 1, and the most of each"""
_OPTIONAL = ("concurrency", "kv_bytes_per_token")
"""Those of them that may be None"""


@attrs.frozen(kw_only=True)
class ServiceLevel:
    """What a request must get to count as good. None is no limit.

    Args:
        ttft_ms: most milliseconds to its first token.
        gap_ms: most milliseconds between its tokens, on its own average.

    Raises:
        ConfigError: a limit isn't above 0 and finite.
    """

    ttft_ms: float | None = None
    gap_ms: float | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("ttft_ms", "gap_ms"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and 0 < float(value) < 1e12):
                raise ConfigError(f"{name} is {value!r:.80}; a service level is milliseconds above 0.")


@attrs.frozen(kw_only=True)
class Server:
    """A continuous-batching server.

    Args:
        settings: most requests and tokens a step, and drafts a row.
        kv_tokens: KV capacity of a rank in tokens, before graphs take their bytes out of it.
        block_size: tokens of a KV block.
        kv_bytes_per_token: bytes of KV a token, over all layers of a rank; None leaves graph bytes out of KV. By
            default those of an 8B model: give a profile's own (`Profile.kv_bytes_per_token`) beside its costs.
        steps_ahead: most decode steps offered beside a prefill.
        reuse_prefixes: whether prompts start behind cached blocks, where the trace has hash ids.
        prefix_block: prompt tokens that one hash id stands for; a whole number of KV blocks.
        drafts: how many drafts are accepted, where `settings` drafts any.
        ranks: data-parallel ranks that step together; a request goes to the rank with the fewest.
        scheduler_us: time of the serving engine's own work for each step, which nothing overlaps: scheduling, handing
            tokens over. `CostTable.step_us` is the executor's alone. None is what the costs say of it
            (`CostTable.served`), 0 where they don't; of another engine than kpolicy's own it isn't.
        scheduler_prompt_us: more for a step with prompts, whose tokens are laid out and first tokens taken in; None
            likewise, but 0 beside a `scheduler_us`.
        steady_host: whether the host keeps the speed that the costs are of. By default it changes as was noted while a
            calibration served (`CostTable.served`), where it was.
        slower_host: how many times as long fixed work takes the host as the costs noted, or with `steady_host` as what
            the costs are of: what a busier host than the calibration's makes of it. Launching and scheduling go with it
            by 85% (`kpolicy.host_speed.launching_takes`): 1.1 makes them 8.5% longer. A `scheduler_us`,
            `scheduler_prompt_us` or `draft_us` that is given stays as it is, and so do captures. Policies aren't told:
            decisions rest on the costs as they are.
        gap_tail: whether `auto` is told the longest gaps so far, as by kpolicy's own batcher (`kpolicy.scheduling.
            gap_tail`); not with several ranks.
        pace: a policy: a step that has decodes takes as many prompt tokens as the objective says of the gap, as long
            as the prompts in line take no longer than by that policy in full steps, or the objective's
            `first_token_limit` times the best for them, whichever is longer (`kpolicy.scheduling.pace`). None fills
            steps to the limit.
        warm: whether graphs are captured before the first request comes; otherwise it waits for the captures.
        concurrency: clients, none of which has more than one request in the server: one that the trace has come while
            all wait arrives with the next answer, and none sooner than the trace says. None is no limit.
        service_level: what a good request gets.

    Raises:
        ConfigError: a value is out of range. Costs that don't say how fast their host was are refused where they are
            simulated with a `slower_host`.
    """

    settings: Settings = attrs.field(factory=lambda: Settings(max_num_tokens=2048))
    kv_tokens: int = 400_000
    block_size: int = 16
    kv_bytes_per_token: int | None = LLAMA_8B_KV_BYTES
    steps_ahead: int = MOST_STEPS_AHEAD
    reuse_prefixes: bool = True
    prefix_block: int = PREFIX_BLOCK
    drafts: Drafts = attrs.field(factory=Drafts)
    ranks: int = 1
    scheduler_us: float | None = None
    scheduler_prompt_us: float | None = None
    steady_host: bool = False
    slower_host: float = 1.0
    gap_tail: bool = True
    pace: str | None = None
    warm: bool = False
    concurrency: int | None = None
    service_level: ServiceLevel = attrs.field(factory=ServiceLevel)

    def __attrs_post_init__(self) -> None:
        check_kind("settings", self.settings, Settings, "kpolicy.Settings(max_num_reqs=256)")
        check_kind("drafts", self.drafts, Drafts, "Drafts(acceptance=0.7)")
        check_kind("service_level", self.service_level, ServiceLevel, "ServiceLevel(ttft_ms=500)")
        for name, most in _COUNTS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, whole_number(name, value, 1, most))
        for name in ("scheduler_us", "scheduler_prompt_us"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and 0 <= float(value) < 1e9):
                raise ConfigError(f"{name} is {value!r:.80}; it is microseconds from 0 up, or None for the costs' own.")
        slower = self.slower_host
        if not (
            isinstance(slower, Real) and not isinstance(slower, bool) and LEAST_SLOWER <= float(slower) <= MOST_SLOWER
        ):
            raise ConfigError(
                f"slower_host is {slower!r:.80}; it is from {LEAST_SLOWER:g} to {MOST_SLOWER:g} times as long as "
                "noted, 1 for just as long."
            )

    def outside_us(self, costs: CostTable) -> tuple[float, float]:
        """What the engine's own work takes a step, and a step with prompts besides: as given, or by the costs."""
        served = costs.served
        if self.scheduler_us is not None:
            return self.scheduler_us, self.scheduler_prompt_us or 0.0
        times = launching_takes(self.slower_host)
        by_costs = (0.0, 0.0) if served is None else (served.scheduler_us * times, served.scheduler_prompt_us * times)
        return by_costs if self.scheduler_prompt_us is None else (by_costs[0], self.scheduler_prompt_us)

    def noted_speed(self, costs: CostTable) -> ServedHost | None:
        """What the costs noted of the host's speed while they were calibrated, where it is to change so."""
        served = costs.served
        return served if served is not None and served.host_work_us and not self.steady_host else None

    def host_speed(self, costs: CostTable) -> ServedHost | None:
        """How fast the host is when: as `noted_speed`, times `slower_host`; None where it keeps the costs' own speed.

        Of a `slower_host` without notes, or with `steady_host`, it is one note: the costs' own speed, so many times as
        long.

        Raises:
            ConfigError: there is a `slower_host`, and the costs don't say how fast theirs was.
        """
        noted, slower = self.noted_speed(costs), self.slower_host
        if slower == 1:
            return noted
        if not costs.host_work_us:
            raise ConfigError(
                f"slower_host is {slower:g}, and the costs {costs.version!r:.80} don't say how fast their host was. "
                "Give those of a profile that kpolicy calibrate wrote, or leave it out."
            )
        works = (costs.host_work_us,) if noted is None else noted.host_work_us
        every = {} if noted is None else {"every_us": noted.every_us}
        return ServedHost(scheduler_us=0.0, host_work_us=[us * slower for us in works], **every)

    def blocks(self, graph_bytes: int) -> int:
        """KV blocks of a rank beside graphs of so many bytes.

        Raises:
            ConfigError: none is left.
        """
        taken = 0 if self.kv_bytes_per_token is None else -(-graph_bytes // self.kv_bytes_per_token)
        blocks = (self.kv_tokens - taken) // self.block_size
        if blocks < 1:
            raise ConfigError(
                f"captured graphs take the room of {taken} KV tokens, and there are {self.kv_tokens} in blocks of "
                f"{self.block_size}: nothing is left for requests. Raise the KV capacity (--kv-tokens), "
                "or capture fewer graphs (--ladder, --policy)."
            )
        return blocks
