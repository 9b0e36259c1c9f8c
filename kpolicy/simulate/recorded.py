"""What policies would have done with the batches of a decision log, and what each would have taken.

The batches are taken as they were scheduled: a policy that answers faster doesn't change what comes next. So this says
how well steps were run, and `simulate` says what a trace would have been like.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs

from kpolicy.attention.support import AttentionSupport, Claims
from kpolicy.costs import CostTable, analytic_costs
from kpolicy.decision import Launch
from kpolicy.engine import Engine
from kpolicy.errors import ConfigError
from kpolicy.keys import GraphKey
from kpolicy.ladders import CaptureSizes
from kpolicy.modes import Part, Rows
from kpolicy.schemas import DecisionEntry, Log, Profile, loads
from kpolicy.settings import Objective, Settings
from kpolicy.shapes import BatchShape

__all__ = ["AS_RECORDED", "Recorded", "header_costs", "header_sizes", "limits", "phase_of", "replay"]

AS_RECORDED = "as recorded"
DECODE, PREFILL = "decode", "prefill"


@attrs.frozen(kw_only=True)
class Recorded:
    """What one policy makes of a log's batches.

    Args:
        policy: the policy, or `AS_RECORDED`.
        steps: batches.
        cycle_us: time of all of them by the cost table.
        padding: padding tokens.
        modes: steps by mode.
        same: steps whose mode is the recorded one.
        outside_sizes: steps of a size outside what the cost table was made for.
        outside_contexts: steps of a context outside it; None where a table was measured and doesn't record which.
    """

    policy: str
    steps: int
    cycle_us: float
    padding: int
    modes: Mapping[str, int] = attrs.field(hash=False)
    same: int
    outside_sizes: int = 0
    outside_contexts: int | None = 0


def header_sizes(log: Log[DecisionEntry]) -> CaptureSizes | None:
    """The capture sizes that the log's header tells; None where it doesn't.

    Raises:
        ConfigError: they aren't lists of sizes by kind of graph.
    """
    found = log.header.extra.get("sizes")
    if found is None:
        return None
    kinds = tuple(attrs.fields_dict(CaptureSizes))
    fine = isinstance(found, Mapping) and {"decode"} <= set(found) <= set(kinds)
    if not fine or not all(isinstance(sizes, list) for sizes in found.values()):
        raise ConfigError(f"the log's sizes are {found!r:.80}; they are lists of tokens by kind: {', '.join(kinds)}.")
    return CaptureSizes(**found)


def header_costs(log: Log[DecisionEntry]) -> dict[str, CostTable]:
    """The cost tables that the log's header has, by phase: ``decode``, and ``prefill`` for batches with prompts.

    Empty where it has none. An engine that has graphs of its own for each phase decides each by its own costs.

    Raises:
        ConfigError: they aren't profiles by phase.
        SchemaError: one can't be read.
    """
    found = log.header.extra.get("profiles") or {}
    if not isinstance(found, Mapping) or not set(found) <= {DECODE, PREFILL}:
        raise ConfigError(f"the log's profiles are {found!r:.80}; they are profiles by phase: {DECODE}, {PREFILL}.")
    return {
        name: loads(json.dumps(each), Profile, name=f"the log's profile of {name}").costs
        for name, each in found.items()
    }


def phase_of(shape: BatchShape) -> str:
    """Which of `header_costs` a batch goes by."""
    return PREFILL if shape.prefills else DECODE


def replay(
    log: Log[DecisionEntry],
    policies: Sequence[str] = ("auto",),
    *,
    costs: CostTable | None = None,
    attention: str | AttentionSupport | Claims | None = None,
    ladder: CaptureSizes | Sequence[int] | None = None,
    objective: str | Objective = "throughput",
) -> list[Recorded]:
    """Decide the log's batches again, by each policy, and price them; what was recorded comes first.

    Args:
        log: a decision log.
        policies: policies by name.
        costs: what launches take; by default the tables of the log's header, each over the graphs of its own phase,
            and the analytic table where it has none.
        attention: as `Engine` takes it.
        ladder: capture sizes; those of the log by default, else each policy's own.
        objective: what `auto` minimises.

    Raises:
        ConfigError: the log has no batches, or an argument can't be used.
    """
    shapes = [entry.shape for entry in log.entries]
    if not shapes:
        raise ConfigError("the log has no decisions; record some first.")
    by_phase = header_costs(log) if costs is None else {}
    rest = costs or next(iter(by_phase.values()), None) or analytic_costs()
    tables = [by_phase.get(phase_of(shape), rest) for shape in shapes]
    taken = [_launches(step, entry) for step, entry in enumerate(log.entries)]
    labels = [_label(entry) for entry in log.entries]
    results = [_priced(AS_RECORDED, zip(shapes, taken, labels, strict=True), labels, tables)]
    sizes = ladder if ladder is not None else header_sizes(log)
    for policy in policies:

        def made(phase: str, policy: str = policy) -> Engine:
            own = _of_phase(sizes, phase) if by_phase and ladder is None else sizes
            return Engine(
                policy, attention=attention, ladder=own, settings=limits(log), costs=by_phase.get(phase, rest),
                objective=objective,
            )  # fmt: skip

        # One for all batches, unless the log tells costs by phase.
        selects = {phase: made(phase).select for phase in ((DECODE, PREFILL) if by_phase else (PREFILL,))}
        whole = selects[PREFILL]
        decisions = [selects.get(phase_of(shape), whole)(*shape.numbers) for shape in shapes]
        rows = ((shape, each.launches, each.label) for shape, each in zip(shapes, decisions, strict=True))
        results.append(_priced(policy, rows, labels, tables))
    return results


def _of_phase(
    sizes: CaptureSizes | Sequence[int] | None, phase: str
) -> CaptureSizes | Sequence[int] | None:  # fmt: skip
    """The sizes of the graphs that an engine has for that phase, where its header tells them."""
    if not isinstance(sizes, CaptureSizes):
        return sizes
    if phase == DECODE:
        return CaptureSizes(decode=sizes.decode)
    return CaptureSizes(decode=(), mixed=sizes.mixed, piecewise=sizes.piecewise)


def _priced(
    policy: str,
    rows: Iterable[tuple[BatchShape, tuple[Launch, ...], str]],
    labels: Sequence[str],
    tables: Sequence[CostTable],
) -> Recorded:
    """A policy's results; `tables` has the cost table of each batch."""
    cycle_us, padding, same, sizes, contexts = 0.0, 0, 0, 0, 0
    modes: Counter[str] = Counter()
    for (shape, launches, label), recorded, costs in zip(rows, labels, tables, strict=True):
        cycle_us += costs.cost(launches, shape.numbers).cycle_us
        padding += sum(launch.padding(shape.numbers) for launch in launches)
        modes[label] += 1
        same += label == recorded
        sizes += not costs.spans(launches, shape.numbers)
        contexts += costs.kv_span is not None and not costs.kv_span.holds(shape.numbers)
    # Analytic tables have no limits to tell, and say that nothing of them was measured.
    blind = any(costs.measured and costs.kv_span is None for costs in tables)
    return Recorded(
        policy=policy, steps=len(labels), cycle_us=cycle_us, padding=padding, modes=dict(modes), same=same,
        outside_sizes=sizes, outside_contexts=None if blind else contexts,
    )  # fmt: skip


def limits(log: Log[DecisionEntry]) -> Settings:
    """The deployment's limits: the header's, else the least that hold the log's batches."""
    if log.header.settings is not None:
        return log.header.settings
    return Settings(
        max_num_reqs=max(1, *(entry.shape.num_reqs for entry in log.entries)),
        max_num_tokens=max(1, *(entry.shape.num_tokens for entry in log.entries)),
    )


_GRAPH = re.compile(r"(FULL|PIECEWISE) (\d+)t(?:/(\d+)r)?(?: q=(\d+))?(?: q<=(\d+))?")
"""How `GraphKey` reads: part, tokens, requests, query length, longest query"""


def _launches(step: int, entry: DecisionEntry) -> tuple[Launch, ...]:
    """The recorded launches, as far as their costs depend on them.

    Raises:
        ConfigError: what was launched isn't known, so it has no price.
    """
    launches = []
    rows = entry.decision.get("launches", ())
    if len(rows) > 2 or (not rows and entry.shape.num_tokens):
        raise ConfigError(
            f"step {step} of the log has {len(rows)} launches for {entry.shape}; a step is one, or two halves of a "
            "split. Record it again."
        )
    for row in rows:
        graph = row.get("graph")
        found = None if graph is None else _GRAPH.match(graph)
        key = None
        if graph is not None and found is None:
            raise ConfigError(
                f"step {step} of the log replays {graph!r:.80}, which is no graph that can be priced; one reads as "
                "'FULL 8t/8r q=1' or 'PIECEWISE 64t'. Record it again."
            )
        if found:
            num_reqs, query_len, longest = (int(each) if each else None for each in found.groups()[2:])
            key = GraphKey(Part(found[1].lower()), int(found[2]), num_reqs, query_len, longest)
        launch = Launch(
            Rows(row["rows"]), key, row.get("stream", 0), row.get("repeat", 1), wait_share=row.get("wait_share")
        )  # fmt: skip
        if key is None and row.get("padding"):
            # Ranks may run eagerly what others replay, at the same size.
            padded = launch.num_tokens(entry.shape.numbers) + row["padding"] // launch.repeat
            launch = attrs.evolve(launch, padded_tokens=padded)
        launches.append(launch)
    return tuple(launches)


def _label(entry: DecisionEntry) -> str:
    mode, form = entry.decision["mode"], entry.decision.get("form")
    return f"{mode}/{form}" if form else str(mode)
