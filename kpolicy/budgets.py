"""What captured graphs may cost together: a `Budget` bounds four resources and refuses with a named reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import attrs

from kpolicy.errors import BudgetRefused, ConfigError
from kpolicy.keys import GraphKey
from kpolicy.modes import Part
from kpolicy.reasons import Reason

__all__ = ["Budget", "Usage", "amount", "check_amount", "check_ladder", "graphs_per_key", "sample_sizes"]

T = TypeVar("T")


def check_amount(name: str, value: object, *, whole: bool) -> None:
    wanted = "a whole number" if whole else "a finite number of seconds"
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    # NaN fails both comparisons, infinity the second.
    if not number or not 0 <= value < float("inf"):  # type: ignore[operator]
        raise ConfigError(f"{name} is {value!r}; it must be {wanted} from 0 up.")


@attrs.frozen
class Usage:
    """What graphs cost: one of them, or many together.

    Args:
        graphs: device graphs; a PIECEWISE key takes several, see `graphs_per_key`.
        streams: device streams, or whatever other unit the device runs out of.
        bytes: device memory.
        seconds: time spent capturing; time that is spent is never given back.

    Raises:
        ConfigError: an amount is negative, not finite, or not a whole number where one is wanted.
    """

    graphs: int = 0
    streams: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name in ("graphs", "streams", "bytes"):
            check_amount(name, getattr(self, name), whole=True)
        check_amount("seconds", self.seconds, whole=False)

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.graphs + other.graphs,
            self.streams + other.streams,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
        )


_REASONS = {
    "graphs": Reason.BUDGET_GRAPHS,
    "streams": Reason.BUDGET_STREAMS,
    "bytes": Reason.BUDGET_BYTES,
    "seconds": Reason.BUDGET_SECONDS,
}
_FIELDS = {reason: name for name, reason in _REASONS.items()}


@attrs.frozen
class Budget:
    """The most that all graphs may cost together. None is no limit.

    Args:
        graphs: device graphs.
        streams: device streams or other resource units.
        bytes: device memory.
        seconds: capture time.

    Raises:
        ConfigError: a limit is negative, not finite, or not a whole number where one is wanted.
    """

    graphs: int | None = None
    streams: int | None = None
    bytes: int | None = None
    seconds: float | None = None

    def __attrs_post_init__(self) -> None:
        for name in _REASONS:
            if getattr(self, name) is not None:
                check_amount(f"the budget for {name}", getattr(self, name), whole=name != "seconds")

    def refuses(self, used: Usage, asked: Usage) -> Reason | None:
        """The first budget that `asked` doesn't fit on top of `used`; None where all of them admit it.

        What asks for nothing of a resource isn't refused for it, even where more is used than the limit.
        """
        for name, reason in _REASONS.items():
            limit, more = getattr(self, name), getattr(asked, name)
            if limit is not None and more and getattr(used, name) + more > limit:
                return reason
        return None

    def check(self, what: object, used: Usage, asked: Usage) -> None:
        """Raise BudgetRefused, with what is used, the limit and what was asked for, where `refuses` has a reason."""
        reason = self.refuses(used, asked)
        if reason is None:
            return
        name = _FIELDS[reason]
        limit, spent, more = getattr(self, name), getattr(used, name), getattr(asked, name)
        raise BudgetRefused(
            reason,
            f"{what} asks for {amount(name, more)}, and {amount(name, spent)} of the {amount(name, limit)} budgeted "
            f"are used: {reason.text}. Capture fewer or smaller graphs, evict a generation, or raise the budget.",
        )

    def __str__(self) -> str:
        said = [amount(name, getattr(self, name)) for name in _REASONS if getattr(self, name) is not None]
        return ", ".join(said) or "unbounded"


def amount(name: str, value: float) -> str:
    """A resource's amount in words; bytes in MiB where that is whole enough to read."""
    if name == "bytes" and value >= 1 << 20:
        return f"{value / (1 << 20):.1f} MiB"
    if name == "seconds":
        return f"{value:.2f} capture seconds" if value >= 0.1 or not value else f"{value:.2g} capture seconds"
    return f"{value} {name if value != 1 else name[:-1]}"


def graphs_per_key(key: GraphKey, num_layers: int) -> int:
    """Device graphs that a key captures: 1 for FULL; for PIECEWISE one between each two attention calls, so L + 1.

    Raises:
        ConfigError: there are no layers.
    """
    if num_layers < 1:
        raise ConfigError(f"num_layers is {num_layers}; a model has at least 1 attention layer.")
    return 1 if key.part is Part.FULL else num_layers + 1


def sample_sizes(sizes: Sequence[T], num_sizes: int) -> tuple[T, ...]:
    """At most `num_sizes` of the sizes, evenly spaced by index, the first and the last among them.

    Source: the rule with which vllm-ascend trimmed its list (docs/registry.md): index ``round(i * (n - 1) / (N - 1))``
    with halves rounded to even; with N of 1 or less the largest size alone stays.
    """
    if num_sizes >= len(sizes):
        return tuple(sizes)
    if num_sizes <= 1:
        return tuple(sizes[-1:])
    step = (len(sizes) - 1) / (num_sizes - 1)
    return tuple(sizes[round(i * step)] for i in range(num_sizes))


def check_ladder(keys: Sequence[GraphKey], budget: Budget, cost_of: Callable[[GraphKey], Usage]) -> Usage:
    """What the keys cost together, if the budget admits all of them.

    Args:
        keys: the planned keys.
        budget: the limits.
        cost_of: what one key is expected to cost, for example `BudgetModel.cost_of`.

    Raises:
        BudgetRefused: it doesn't; the message names how many keys fit and which sizes to keep.
    """
    needed, reason = _total(keys, budget, cost_of)
    if reason is None:
        return needed
    name = _FIELDS[reason]
    problem = (
        f"the ladder's {len(keys)} graph keys ask for {amount(name, getattr(needed, name))} or more, over the budget "
        f"of {amount(name, getattr(budget, name))}"
    )
    kept, sizes = _fitting(keys, budget, cost_of)
    if not kept:
        raise BudgetRefused(reason, f"{problem}; not even its largest size fits. Raise the budget or run eagerly.")
    raise BudgetRefused(
        reason,
        f"{problem}; {len(kept)} fit. Keep the sizes {','.join(map(str, sizes))}, or raise the budget.",
    )


def _total(
    keys: Iterable[GraphKey], budget: Budget, cost_of: Callable[[GraphKey], Usage]
) -> tuple[Usage, Reason | None]:
    """What the keys cost, up to the first that is refused, and why it is."""
    used = Usage()
    for key in keys:
        asked = cost_of(key)
        reason = budget.refuses(used, asked)
        used += asked
        if reason is not None:
            return used, reason
    return used, None


def _fitting(
    keys: Sequence[GraphKey], budget: Budget, cost_of: Callable[[GraphKey], Usage]
) -> tuple[tuple[GraphKey, ...], tuple[int, ...]]:
    """As many evenly spaced sizes as fit, and the keys of those sizes."""
    sizes = sorted({key.num_tokens for key in keys})
    for number in range(len(sizes) - 1, 0, -1):
        kept_sizes = sample_sizes(sizes, number)
        chosen = frozenset(kept_sizes)
        kept = tuple(key for key in keys if key.num_tokens in chosen)
        if _total(kept, budget, cost_of)[1] is None:
            return kept, kept_sizes
    return (), ()
