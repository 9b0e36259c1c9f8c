"""A measured `CostTable` of one device and model: every captured graph, EAGER at a few sizes, attention, overlap.

Synthetic rows run through the executor, staging and hand-over included, in rounds over all cases: this machine's other
work comes and goes, and should slow every case alike. What attention costs is the slope of time over KV; it is taken
off the curves, which stand for padded dense work alone (docs/design.md, costs).

Where the host itself runs what it launches (a CPU), a launch's time is the host's, and the table's host costs are 0.
Elsewhere each case is timed twice. Behind work that keeps the device busy while the host launches, device events tell
the device's time alone; run at once, the clock tells the host's time to launch, and what neither covers: staging,
hand-over, waiting.

Rows read whatever KV there is and write to the reserved slot alone, so a running server may be measured.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple, Protocol

from kpolicy.costs import AttentionCost, CostTable, Curve, HostCost
from kpolicy.decision import Decision, Launch
from kpolicy.executors.base import StepInputs
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows, SplitForm
from kpolicy.reasons import Reason
from kpolicy.registry import GraphRegistry
from kpolicy.settings import Settings
from kpolicy.shapes import BatchShape

__all__ = ["Measurable", "calibrate", "can_measure", "measure"]

SHORT_KV, LONG_KV = 64, 512
"""Tokens that decode rows attend to, and that a prompt chunk has before it, for the two ends of the slopes."""
EAGER_SIZES = (1, 4, 16, 64, 256, 1024)
TURNS = 5
FEW_DECODES = 8
_SHORT_PROMPT = 24
"""Tokens of the prompt that the host's time is taken with: the host's time hardly grows with them"""
_TELLING = 64
"""Tokens from which a step's time tells what more of them take"""
MOST_ROUNDS = 15
NOISE, HOST_NOISE = 0.02, 0.06
"""Of a time: what is within it of another is as good. Where the host runs the launches its other work is in them."""
_LEAST_US = 0.1
_MOST_BASE = 0.2
"""Of a step, that attention's base can be: more is noise."""
_AHEAD = 1.5
"""Times the host's launching that the device is kept busy, to see its time alone."""


class Measurable(Protocol):
    """What is read of a model: its KV as a paged cache. A `StepModel` without these can't be measured."""

    @property
    def vocab(self) -> int: ...

    @property
    def pad_slot(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


def can_measure(executor: Any) -> bool:
    """Whether an executor runs a model over a device's primitives, and the model says of its KV what rows need."""
    model = getattr(executor, "model", None)
    wanted = ("vocab", "pad_slot", "num_blocks", "block_size", "max_model_len")
    return hasattr(getattr(executor, "launcher", None), "adapter") and all(hasattr(model, name) for name in wanted)


def measure(executor: Any, registry: GraphRegistry, settings: Settings, *, allowance_s: float) -> CostTable:
    """`calibrate` for the model that the executor runs; see `can_measure`."""
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    version = f"measured {at} on {executor.name}"
    return calibrate(executor, registry, executor.model, settings, version=version, allowance_s=allowance_s)


class _Times(NamedTuple):
    """Microseconds of one run."""

    wall: float
    host: float
    """Until the step was launched"""
    device: float


class _Bench:
    """Times launches of synthetic rows, in rounds over all of them.

    Args:
        executor: with graphs captured.
        model: what it runs.
    """

    def __init__(self, executor: Any, model: Measurable) -> None:
        self._executor = executor
        self._model = model
        self._adapter = executor.launcher.adapter
        self._cases: list[tuple[Decision, list[StepInputs]]] = []
        self._times: list[list[_Times]] = []

    def add(self, launches: Sequence[Launch], inputs: StepInputs, form: SplitForm | None = None) -> int:
        """A step of these launches, to be timed; the number that `us` takes."""
        mode = Mode.SPLIT if len(launches) > 1 else _mode(launches[0])
        # Which experts tokens go to makes up to some percent: each round has other tokens.
        vocab = self._model.vocab
        drawn = [
            inputs._replace(token_ids=[(token + 977 * turn) % vocab for token in inputs.token_ids])
            for turn in range(TURNS)
        ]
        self._cases.append((Decision(mode, tuple(launches), Reason.ONLY_LEGAL, form), drawn))
        self._times.append([])
        return len(self._cases) - 1

    def measure(self, allowance_s: float) -> None:
        """Run the cases, smallest first, then in rounds over those that ran, until the allowance is spent.

        The first case always runs; which others did, `measured` says.
        """
        stop_s = time.perf_counter() + allowance_s
        ran: list[int] = []
        token_s = 0.0
        for i in sorted(range(len(self._cases)), key=lambda i: len(self._cases[i][1][0].token_ids)):
            decision, drawn = self._cases[i]
            begun_s, num_tokens = time.perf_counter(), len(drawn[0].token_ids)
            # Twice the tokens take at most about twice the time.
            if begun_s + token_s * num_tokens > stop_s:
                return
            self._once(decision, drawn[0])  # the first run touches fresh memory and compiles kernels
            self._times[i].append(self._run(decision, drawn[0]))
            ran.append(i)
            if num_tokens >= _TELLING:
                token_s = (time.perf_counter() - begun_s) / num_tokens
        for done in range(1, MOST_ROUNDS):
            # In another order each round: what ran before leaves the host's caches cold or warm, as in serving.
            for i in random.Random(done).sample(ran, len(ran)):  # noqa: S311
                if time.perf_counter() > stop_s:
                    return
                decision, drawn = self._cases[i]
                self._times[i].append(self._run(decision, drawn[done % TURNS]))

    @property
    def host_runs(self) -> bool:
        """Whether the host itself runs what it launches, so that its time is the device's."""
        return bool(self._adapter.host_runs)

    def measured(self, case: int) -> bool:
        """Whether the allowance came to it."""
        return bool(self._times[case])

    def us(self, case: int) -> float:
        """Median microseconds of a case on the device, from its start until all of it is there."""
        return statistics.median(each.device for each in self._times[case])

    def host_us(self, case: int) -> float:
        """Median microseconds until the host had launched it."""
        return statistics.median(each.host for each in self._times[case])

    def rest_us(self, cases: Iterable[int]) -> float:
        """Median microseconds of these cases that neither the device's time nor the launching covers."""
        return statistics.median(
            max(each.wall - max(each.host, each.device), 0.0) for case in cases for each in self._times[case]
        )

    def _run(self, decision: Decision, inputs: StepInputs) -> _Times:
        times = self._once(decision, inputs)
        if self.host_runs:
            return times._replace(host=0.0, device=times.wall)
        self._adapter.occupy(_AHEAD * times.host)
        outputs = self._executor.run(decision, inputs)
        for event in outputs.ready:
            event.wait()
        return times._replace(device=min(outputs.cycle_us, times.wall))

    def _once(self, decision: Decision, inputs: StepInputs) -> _Times:
        start = time.perf_counter()
        outputs = self._executor.run(decision, inputs)
        launched = time.perf_counter()
        for event in outputs.ready:
            event.wait()
        return _Times((time.perf_counter() - start) * 1e6, (launched - start) * 1e6, 0.0)

    def rows(self, num_decodes: int, decode_kv: int, new: int = 0, context: int = 0) -> StepInputs:
        """Decode rows that attend to so many tokens each, then one prompt chunk of `new` tokens after a context."""
        size, model = self._model.block_size, self._model
        free = itertools.cycle(range(model.num_blocks))
        lens = [decode_kv] * num_decodes + ([context + new] if new else [])
        query_lens = [1] * num_decodes + ([new] if new else [])
        tables: list[list[int]] = []
        positions: list[int] = []
        for kv_len, query_len in zip(lens, query_lens, strict=True):
            # Where the KV is too small for all rows they share blocks: the times are the same.
            tables.append([next(free) for _ in range(-(-kv_len // size))])
            positions += range(kv_len - query_len, kv_len)
        tokens = [(7 * i) % model.vocab for i in range(len(positions))]
        wanted = [*range(num_decodes), *([len(tokens) - 1] if new else [])]
        shape = BatchShape(
            decodes=[(1, num_decodes)] if num_decodes else [], prefills=[(new, context)] if new else [],
            decode_kv_tokens=num_decodes * decode_kv if num_decodes else None, max_kv_len=max(lens),
        )  # fmt: skip
        slots = [model.pad_slot] * len(tokens)
        return StepInputs(shape.numbers, query_lens, tokens, positions, slots, tables, lens, wanted)


def _mode(launch: Launch) -> Mode:
    if launch.key is None:
        return Mode.EAGER
    return Mode.FULL if launch.key.part is Part.FULL else Mode.PIECEWISE


def calibrate(
    executor: Any, registry: GraphRegistry, model: Measurable, settings: Settings, *, version: str,
    allowance_s: float = 10.0,
) -> CostTable:  # fmt: skip
    """Measure what launches take.

    Args:
        executor: a `ModeRunner` over a `GraphLauncher`, its graphs captured into `registry`; nothing else may run on it
            meanwhile.
        registry: the graphs to time, and what their captures took.
        model: what the executor runs.
        settings: no larger batch is timed.
        version: names the table.
        allowance_s: seconds to spend, the smallest batches first: sizes that it doesn't come to go on as smaller ones
            rise. The last case that it comes to may end beyond it.
    """
    # A registry that Engines share has other executors' graphs too.
    keys = [key for key in registry.captured() if key in executor.captured]
    decode = [key for key in keys if key.part is Part.FULL and key.query_len == 1]
    # Prompts are timed as one chunk, which no request can have longer; larger sizes go on as the last ones rise.
    longest = min(settings.max_num_tokens, model.max_model_len)
    mixed = [key for key in keys if key.part is Part.FULL and not key.decode_only and key.num_tokens <= longest]
    pieces = [key for key in keys if key.part is Part.PIECEWISE and key.num_tokens <= longest]
    most_reqs = min(settings.max_num_reqs, settings.max_num_tokens)
    sizes = sorted({size for size in EAGER_SIZES if size < longest} | {longest})
    bench = _Bench(executor, model)
    decoding = _DecodeSlope(bench, decode, most_reqs, model.max_model_len)
    prefilling = _PrefillSlope(bench, longest, model.max_model_len)
    overlap = _Overlap(bench, decode, pieces, settings, model)
    bases = _Bases(bench, pieces, most_reqs, model)

    def add(key: GraphKey | None, size: int, *, prompt: bool) -> tuple[int, int, bool]:
        rows = bench.rows(0, 0, size) if prompt else bench.rows(size, _usual(model))
        return bench.add([Launch(Rows.ALL, key)], rows), size, prompt

    eager_cases = [add(None, size, prompt=size > most_reqs) for size in sizes]
    # Where a decode graph and a mixed one have the same size, decodes use the former.
    full_cases = [add(key, key.num_tokens, prompt=True) for key in mixed]
    full_cases += [add(key, key.num_tokens, prompt=False) for key in decode]
    piece_cases = [add(key, key.num_tokens, prompt=True) for key in pieces]
    host_eager = _HostTimes(bench, [None], most_reqs, longest, model)
    host_piecewise = _HostTimes(bench, pieces, most_reqs, longest, model)
    bench.measure(allowance_s)
    decode_attention, prefill_attention = bases.added(decoding.cost(), prefilling.cost())

    noise = HOST_NOISE if executor.launcher.adapter.host_runs else NOISE

    def curve(cases: Sequence[tuple[int, int, bool]]) -> Curve | None:
        us = {}
        for case, size, prompt in cases:
            if not bench.measured(case):
                continue
            units = size * (size + 1) / 2 if prompt else size * _usual(model)
            cost = prefill_attention if prompt else decode_attention
            us[size] = max(bench.us(case) - cost.base_us - cost.unit_us * units, _LEAST_US)
        return _steady(us, noise) if us else None

    eager = curve(eager_cases)
    assert eager is not None  # noqa: S101 - the smallest case of all is one token, eagerly
    return CostTable(
        version=version,
        measured=True,
        # A mode without graphs has no times of its own, and is never chosen.
        full=curve(full_cases) or eager,
        piecewise=curve(piece_cases) or eager,
        eager=eager,
        decode_attention=decode_attention,
        prefill_attention=prefill_attention,
        host_full=_host(bench, [(case, size if prompt is False else 1) for case, size, prompt in full_cases]),
        host_piecewise=host_piecewise.cost(),
        host_eager=host_eager.cost(),
        step_us=bench.rest_us(case for case, _, _ in (*full_cases, *piece_cases, *eager_cases)),
        overlap_cost=overlap.share(),
        **_captures(registry, keys),
    )


def _steady(us: dict[int, float], noise: float) -> Curve:
    """A curve as measured, but for larger sizes that seem cheaper by what repeats of one size differ by.

    There the smaller size gets the larger one's time, and with it the preference: it shares out less padding.
    """
    sizes = sorted(us, reverse=True)
    for larger, size in itertools.pairwise(sizes):
        if us[larger] < us[size] <= us[larger] * (1 + noise):
            us[size] = us[larger]
    sizes.reverse()
    return Curve(sizes, [us[size] for size in sizes])


class _Bases:
    """What attention of either kind costs a PIECEWISE step whatever the KV: kernels of its own, and their launches.

    The base of decode rows is what a few of them add to a long prompt, the usual mixed batch; that of prompt rows what
    a batch of decode rows costs less than a prompt of as many tokens.

    Args:
        bench: times the steps.
        pieces: PIECEWISE graphs.
        most_reqs: rows of a step, at most.
        model: what runs.
    """

    def __init__(self, bench: _Bench, pieces: Sequence[GraphKey], most_reqs: int, model: Measurable) -> None:
        self._bench = bench
        self._steps: dict[str, tuple[int, int, float]] = {}
        kv = _usual(model)

        def add(name: str, key: GraphKey, decodes: int, prompt: int) -> None:
            rows = bench.rows(decodes, kv if decodes else 0, prompt)
            case = bench.add([Launch(Rows.ALL, key)], rows)
            self._steps[name] = case, decodes * kv, prompt * (prompt + 1) / 2

        large = max((key for key in pieces), key=lambda key: key.num_tokens, default=None)
        few = min(FEW_DECODES, most_reqs - 1)
        if large is not None and large.num_tokens > few > 0:
            add("prompt", large, 0, large.num_tokens)
            add("prompt and decodes", large, few, large.num_tokens - few)
        small = sorted((key for key in pieces if 2 <= key.num_tokens <= most_reqs), key=lambda key: key.num_tokens)
        if small:
            key = small[len(small) // 2]
            add("short prompt", key, 0, key.num_tokens)
            add("decodes", key, key.num_tokens, 0)

    def added(self, decode: AttentionCost, prefill: AttentionCost) -> tuple[AttentionCost, AttentionCost]:
        """Both costs with their bases."""
        us = {
            name: self._bench.us(case) - decode.unit_us * kv - prefill.unit_us * pairs
            for name, (case, kv, pairs) in self._steps.items()
            if self._bench.measured(case)
        }
        decode_base = prefill_base = 0.0
        if "prompt" in us and "prompt and decodes" in us:
            decode_base = min(max(us["prompt and decodes"] - us["prompt"], 0.0), _MOST_BASE * us["prompt"])
        if "decodes" in us and "short prompt" in us:
            more = us["short prompt"] - us["decodes"]
            prefill_base = min(max(more + decode_base, 0.0), _MOST_BASE * us["short prompt"])
        return AttentionCost(decode_base, 0.0, decode.unit_us), AttentionCost(prefill_base, 0.0, prefill.unit_us)


class _HostTimes:
    """The host's time to launch a step outside a whole graph: by requests, and by the kinds of rows that it has.

    Attention of decode rows and of a prompt are launches of their own, so steps of one kind, of the other and of both
    tell what each adds.

    Args:
        bench: times the steps; nothing is timed where the host itself runs what it launches.
        keys: graphs to replay the pieces of, or None alone for eager steps.
        most_reqs: rows of a step, at most.
        longest: tokens of a prompt chunk, at most.
        model: what runs.
    """

    def __init__(
        self, bench: _Bench, keys: Sequence[GraphKey | None], most_reqs: int, longest: int, model: Measurable
    ) -> None:
        self._bench = bench
        self._cases: dict[tuple[int, int], int] = {}
        holds = {longest if key is None else key.num_tokens: key for key in keys}
        if bench.host_runs or not holds:
            return
        few, prompt = min(FEW_DECODES, most_reqs), min(_SHORT_PROMPT, longest)
        for decodes, new in ((few, 0), (min(most_reqs, max(holds)), 0), (0, prompt), (min(few, most_reqs - 1), prompt)):
            size = min((size for size in holds if size >= decodes + new), default=None)
            if size is not None and decodes + new and (decodes, bool(new)) not in self._cases:
                launch = Launch(Rows.ALL, holds[size])
                rows = bench.rows(decodes, _short(model) if decodes else 0, new)
                self._cases[decodes, bool(new)] = bench.add([launch], rows)

    def cost(self) -> HostCost:
        """0 where nothing was timed; without steps of both kinds, whichever was timed for all rows alike."""
        us = {
            (decodes, prompt): self._bench.host_us(case)
            for (decodes, prompt), case in self._cases.items()
            if self._bench.measured(case)
        }
        if not us:
            return HostCost(0.0)
        decoding = {decodes: time for (decodes, prompt), time in us.items() if not prompt}
        alone = us.get((0, True))
        if not decoding:
            return HostCost(min(us.values()))
        fewest, most = min(decoding), max(decoding)
        req_us = max(decoding[most] - decoding[fewest], 0.0) / (most - fewest) if most > fewest else 0.0
        decode_us = max(decoding[fewest] - req_us * fewest, 0.0)
        both = next(((decodes, time) for (decodes, prompt), time in us.items() if decodes and prompt), None)
        if alone is None or both is None:
            return HostCost(decode_us, req_us)
        decodes, time = both
        # A step of both kinds takes what they have in common once.
        prefill_us = max(alone - req_us, 0.0)
        common = min(max(decode_us + prefill_us - (time - req_us * (decodes + 1)), 0.0), decode_us, prefill_us)
        return HostCost(common, req_us, decode_us - common, prefill_us - common)


def _host(bench: _Bench, cases: Sequence[tuple[int, int]]) -> HostCost:
    """Host time by rows: through the cases with the fewest and the most rows.

    Args:
        bench: has timed them.
        cases: (case, rows) each.
    """
    by_rows: dict[int, list[float]] = {}
    for case, rows in cases:
        if bench.measured(case):
            by_rows.setdefault(rows, []).append(bench.host_us(case))
    if not by_rows:
        return HostCost(0.0)
    fewest, most = min(by_rows), max(by_rows)
    low, high = statistics.median(by_rows[fewest]), statistics.median(by_rows[most])
    slope = max(high - low, 0.0) / (most - fewest) if most > fewest else 0.0
    return HostCost(max(low - slope * fewest, 0.0), slope)


def _short(model: Measurable) -> int:
    return min(SHORT_KV, model.max_model_len)


def _usual(model: Measurable) -> int:
    """KV tokens of a decode row while dense work is timed: kernels that share out a row's KV have some to share."""
    return min(LONG_KV, model.max_model_len)


class _DecodeSlope:
    """What a KV token costs a decode row, from equal steps over short and long KV."""

    def __init__(self, bench: _Bench, keys: Sequence[GraphKey], most_reqs: int, longest: int) -> None:
        key = max(keys, key=lambda each: each.num_tokens, default=None)
        rows = most_reqs if key is None else key.num_tokens
        short, long = min(SHORT_KV, longest), min(LONG_KV, longest)
        self._bench = bench
        self._units = rows * (long - short)
        self._cases = [bench.add([Launch(Rows.ALL, key)], bench.rows(rows, each)) for each in (short, long)]

    def cost(self) -> AttentionCost:
        return _slope(self._bench, self._cases, self._units)


class _PrefillSlope:
    """What a query-key pair costs a prompt chunk, from equal chunks without context and with one."""

    def __init__(self, bench: _Bench, most_tokens: int, longest: int) -> None:
        new = max(1, min(most_tokens, longest // 2))
        context = max(0, min(LONG_KV, longest - new))
        self._bench = bench
        self._units = new * context
        self._cases = [
            bench.add([Launch(Rows.ALL, None)], bench.rows(0, 0, new, each)) for each in (0, context)
        ]  # fmt: skip

    def cost(self) -> AttentionCost:
        return _slope(self._bench, self._cases, self._units)


def _slope(bench: _Bench, cases: Sequence[int], units: int) -> AttentionCost:
    if not units or not all(map(bench.measured, cases)):
        return AttentionCost()
    return AttentionCost(unit_us=max(bench.us(cases[1]) - bench.us(cases[0]), 0.0) / units)


class _Overlap:
    """The share of the shorter half's time that running it beside the longer still costs; 1 where nothing can."""

    def __init__(
        self, bench: _Bench, decode: Sequence[GraphKey], pieces: Sequence[GraphKey], settings: Settings,
        model: Measurable,
    ) -> None:  # fmt: skip
        self._bench = bench
        self._cases: list[int] = []
        halves = [(a, b) for a in decode for b in pieces if a.num_tokens + b.num_tokens <= settings.max_num_tokens]
        if not halves:
            return
        first, second = max(halves, key=lambda each: (each[1].num_tokens, each[0].num_tokens))
        both = bench.rows(first.num_tokens, _short(model), second.num_tokens)
        launches = [Launch(Rows.DECODE, first), Launch(Rows.PREFILL, second, 1)]
        self._cases = [
            bench.add(launches, both, SplitForm.BESIDE),
            bench.add(launches[:1], bench.rows(first.num_tokens, _short(model))),
            bench.add([Launch(Rows.ALL, second)], bench.rows(0, 0, second.num_tokens)),
        ]

    def share(self) -> float:
        if not self._cases or not all(map(self._bench.measured, self._cases)):
            return 1.0
        beside, *alone = map(self._bench.us, self._cases)
        return min(max((beside - max(alone)) / min(alone), 0.0), 2.0)


def _captures(registry: GraphRegistry, keys: Sequence[GraphKey]) -> dict[str, Any]:
    """What a graph took on average, by part."""
    found: dict[str, Any] = {"capture_us": (0.0, 0.0), "graph_bytes": (0, 0), "graph_pieces": (1, 1)}
    ours = set(keys)
    records = [record for record in registry.records() if record.key in ours]
    by_part = [[record for record in records if record.key.part is part] for part in (Part.FULL, Part.PIECEWISE)]

    def mean(value: Callable[[Any], float]) -> tuple[float, ...]:
        return tuple(statistics.fmean(map(value, each)) if each else 0.0 for each in by_part)

    found["capture_us"] = tuple(1e6 * seconds for seconds in mean(lambda record: record.seconds))
    found["graph_bytes"] = tuple(round(size) for size in mean(lambda record: record.bytes))
    found["graph_pieces"] = tuple(max(1, round(count)) for count in mean(lambda record: record.graphs))
    return found
