"""`SimulatedExecutor`: a device made of integers, for tests, planning and laptops. Seeded, and needs no torch.

Each token's KV entry is the entry before it XOR a product of two numbers, one from the token's id and one from its
position, so a sequence's last entry stands for the whole of it and no two tokens can be swapped unseen. A wanted
row's output hashes that entry with one earlier entry, which the entry itself picks, so a wrong block anywhere in a
block table shows sooner or later. `reference_outputs` computes the same from a sequence alone: a leaked pad, a lost
or repeated row, a stale buffer or a wrong slot shows as a different output.

Graphs have a device graph's semantics: a replay reads and writes static buffers only, at addresses fixed when it was
captured, computes padding rows too, and overwrites the outputs of the replay before it. Padding rows write to one
reserved KV slot. A uniform decode graph divides its tokens into rows by its own query length, a variable-length one
computes no more tokens of a row than its longest, and adapters beyond a graph's LoRA case aren't applied: rows that
`GraphKey.holds` shouldn't have let in get wrong outputs. PIECEWISE runs attention eagerly from the live step, between
two replayed pieces. Times come from a `CostTable`; faults are injected by name.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kpolicy.costs import CostTable, HostCost, analytic_costs
from kpolicy.decision import Decision, Launch
from kpolicy.errors import CaptureError, ConfigError, RegistryError
from kpolicy.executors.base import CaptureReport, ProbeReport, ProbeStatus, StepInputs
from kpolicy.executors.faults import FAULTS, Fault, Faults
from kpolicy.executors.launch_rows import check_extra, check_fit, check_sampling, decode_places
from kpolicy.executors.runner import ModeRunner, PartOutputs
from kpolicy.keys import GraphKey
from kpolicy.modes import Mode, Part, Rows
from kpolicy.reasons import Reason
from kpolicy.shapes import BatchNumbers

if TYPE_CHECKING:
    import numpy as np

    Vector = np.ndarray[Any, Any]

__all__ = [
    "FAULTS",
    "Fault",
    "SimulatedDevice",
    "SimulatedExecutor",
    "reference_outputs",
    "reference_tokens",
    "sampled_token",
]

_MASK = (1 << 31) - 1
_TOKEN = 0x11B54A33
_POSITION = 0x0545F491
_LOOK = 0x1F58476D
_HEAD = 0x14D049BB
# Odd constants below 2^29: any do. Terms have 29 bits, so a product and every XOR of products fits into 58 bits: a
# Python integer of two digits and a 64-bit array element alike.
_TERM = (1 << 29) - 1
_TERM_BITS = 29
_PREFILL = Rows.PREFILL

_POISON = 0x5EAD_BEEF
"""What the reserved KV slot and unwritten slots hold: reading it shows in the output."""


class _Buffers:
    """The static buffers of one pool, and what its graphs took: graphs of every size use the front of them."""

    def __init__(self, num_tokens: int, num_reqs: int) -> None:
        import numpy as np

        self.token_ids = np.zeros(num_tokens, np.int64)
        self.positions = np.zeros(num_tokens, np.int64)
        self.slots = np.zeros(num_tokens, np.int64)
        self.values = np.zeros(num_tokens, np.int64)
        self.outputs = [0] * num_tokens
        self.query_lens = [0] * num_reqs
        self.tables: list[Sequence[int]] = [()] * num_reqs
        self.wanted = [0] * num_tokens
        # Graphs of single-token rows are computed row by row, where lists are faster than arrays.
        self.row_token_ids = [0] * num_tokens
        self.row_positions = [0] * num_tokens
        self.row_slots = [0] * num_tokens
        self.used_bytes = self.used_streams = 0

    def stage(self, rows: StepInputs, size: int, pad_slot: int) -> None:
        """Copy a batch's tokens to the front, and padding up to `size`."""
        num_tokens = len(rows.token_ids)
        for buffer, values, fill in (
            (self.token_ids, rows.token_ids, 0), (self.positions, rows.positions, 0),
            (self.slots, rows.slot_mapping, pad_slot),
        ):  # fmt: skip
            buffer[:num_tokens] = values
            buffer[num_tokens:size] = fill


class ReadyAt(NamedTuple):
    """A `ReadyEvent` of simulated time: it has always come."""

    us: float

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _Graph:
    """A captured graph: `run` replays it over staged rows."""

    __slots__ = ("buffers", "key", "num_reqs", "run")

    def __init__(self, key: GraphKey, buffers: _Buffers, num_reqs: int) -> None:
        self.key = key
        self.buffers = buffers
        self.num_reqs = num_reqs
        self.run: Callable[[StepInputs], list[int]]


class SimulatedDevice:
    """The adapter. See the module's docstring; arguments are `SimulatedExecutor`'s."""

    def __init__(
        self,
        costs: CostTable,
        *,
        seed: int = 0,
        num_blocks: int = 4096,
        block_size: int = 16,
        vocab: int = 4096,
        max_num_reqs: int = 4096,
        memory_bytes: int | None = None,
        streams: int | None = None,
        faults: Iterable[Fault | str] = (),
    ) -> None:
        if min(num_blocks, vocab, max_num_reqs) < 1 or block_size < 1 or block_size & (block_size - 1):
            raise ConfigError(
                f"num_blocks {num_blocks}, vocab {vocab} and max_num_reqs {max_num_reqs} start at 1, and block_size "
                f"{block_size} is a power of two."
            )
        if not isinstance(costs, CostTable):
            raise ConfigError(f"costs is {costs!r:.80}; give a CostTable, such as kpolicy.costs.analytic_costs().")
        self.costs = costs
        self.start = _start(seed)
        self.vocab = vocab
        # The same numbers twice: rows of one token read the arrays item by item, prompts as numpy vectors.
        self.token_terms = array("q", _terms(vocab, _TOKEN).tobytes())
        self.position_terms = array("q", _terms(num_blocks * block_size, _POSITION).tobytes())
        self._token_vector = _vector(self.token_terms)
        self._position_vector = _vector(self.position_terms)
        self.block_size = block_size
        self.shift = block_size.bit_length() - 1
        self.num_blocks = num_blocks
        self.max_num_reqs = max_num_reqs
        self.memory_bytes = memory_bytes
        self.streams = streams
        self.pad_slot = num_blocks * block_size
        self.kv = array("q", [_POISON]) * (self.pad_slot + 1)
        self._kv_vector = _vector(self.kv)
        self._faults = Faults(faults, "simulated", FAULTS)
        self._used_bytes = self._used_streams = 0
        self._dense_us: dict[Launch, tuple[float, HostCost]] = {}

    @property
    def name(self) -> str:
        return "simulated"

    def probe(self) -> ProbeReport:
        return ProbeReport("simulated", ProbeStatus.USABLE, "always there: integers instead of a device")

    # Capture

    def estimate(self, key: GraphKey) -> CaptureReport:
        usage = self.costs.usage_of(key)
        return CaptureReport(usage.bytes, usage.seconds, usage.streams, usage.graphs)

    def new_pool(self, part: Part, largest: GraphKey) -> _Buffers:  # noqa: ARG002 - integers need no part
        return _Buffers(largest.num_tokens, max(largest.num_tokens, largest.num_reqs or 0))

    def capture(self, key: GraphKey, pool: _Buffers) -> tuple[_Graph, CaptureReport]:
        self._faults.check_lost()
        self._faults.check_capture(key)
        report = self.estimate(key)
        if self.memory_bytes is not None and self._used_bytes + report.bytes > self.memory_bytes:
            raise CaptureError(Reason.CAPTURE_OUT_OF_MEMORY, f"capturing {key}: {self.memory_bytes} bytes are used up")
        if self.streams is not None and self._used_streams + report.streams > self.streams:
            raise CaptureError(Reason.CAPTURE_OUT_OF_STREAMS, f"capturing {key}: {self.streams} streams are used up")
        num_reqs = key.num_tokens if key.num_reqs is None else key.num_reqs
        if key.num_tokens > len(pool.token_ids) or num_reqs > len(pool.query_lens):
            raise RegistryError(
                f"capturing {key}: its pool has buffers for {len(pool.token_ids)} tokens in {len(pool.query_lens)} "
                "rows; make a pool for the largest key."
            )
        self._used_bytes += report.bytes
        self._used_streams += report.streams
        pool.used_bytes += report.bytes
        pool.used_streams += report.streams
        graph = _Graph(key, pool, num_reqs)
        run = self._replay_pieces if key.part is Part.PIECEWISE else self._replay_full
        graph.run = partial(self._replay_decode if key.query_len == 1 else run, graph)
        return graph, report

    def release(self, pool: _Buffers) -> None:
        self._used_bytes -= pool.used_bytes
        self._used_streams -= pool.used_streams
        pool.__init__(0, 0)  # type: ignore[misc]

    # Running

    def replay(self, handle: _Graph, rows: StepInputs, launch: Launch) -> PartOutputs:
        if self._faults.planned:
            self._faults.check_replay(handle.key)
        if rows.numbers.num_active_loras > handle.key.lora_case:
            return self._steps(partial(_without_adapters, handle), rows, launch)
        return self._steps(handle.run, rows, launch)

    def eager(self, rows: StepInputs, launch: Launch) -> PartOutputs:
        if self._faults.planned:
            self._faults.check_launch()
        if launch.padded_tokens is not None:
            return self._steps(partial(self._run_padded, launch.padded_tokens), rows, launch)
        return self._steps(self._run_eagerly, rows, launch)

    def _steps(self, run: Callable[[StepInputs], list[int]], rows: StepInputs, launch: Launch) -> PartOutputs:
        """Run the rows as often as the launch says, each time with the tokens sampled the time before."""
        check_fit(rows)
        if rows.sampling:
            check_sampling(rows)
        if rows.extra:
            check_extra(rows, ())
        outputs = run(rows)
        if launch.rows is _PREFILL:
            return PartOutputs(outputs, [])
        sampled = [self._sample(outputs, rows)]
        if launch.repeat > 1:
            # Ranks that have no decode rows replay as often as those that have: a graph may hold a collective.
            ahead = rows.slots_ahead if rows.token_ids else [()] * (launch.repeat - 1)
            if len(ahead) < launch.repeat - 1:
                raise ConfigError(
                    f"{launch} needs KV slots for {launch.repeat - 1} steps ahead, and slots_ahead has {len(ahead)}; "
                    "reserve as many as max_decode_steps says, less 1."
                )
            for slots in ahead[: launch.repeat - 1]:
                rows = _next_step(rows, sampled[-1], slots)
                outputs = run(rows)
                sampled.append(self._sample(outputs, rows))
        return PartOutputs(outputs, sampled)

    def _run_padded(self, size: int, rows: StepInputs) -> list[int]:
        """Run eagerly with padding tokens up to `size`, which write to the reserved slot."""
        padding = size - len(rows.token_ids)
        if padding < 0:
            raise RegistryError(f"an eager launch of {len(rows.token_ids)} tokens can't be padded to {size}.")
        return self._run_eagerly(
            rows._replace(
                token_ids=[*rows.token_ids, *([0] * padding)],
                positions=[*rows.positions, *([0] * padding)],
                slot_mapping=[*rows.slot_mapping, *([self.pad_slot] * padding)],
            )
        )

    def _run_eagerly(self, rows: StepInputs) -> list[int]:
        values = self._attend(rows.token_ids, rows.positions, rows.slot_mapping, rows.query_lens, rows.block_table)
        outputs: dict[int, int] = {}
        self._head(values, rows.positions, rows.query_lens, rows.block_table, rows.wanted, outputs)
        return list(outputs.values())

    def _replay_decode(self, graph: _Graph, rows: StepInputs) -> list[int]:
        """`_replay_full` for graphs of one token a row, where row and token are one index."""
        buffers, size = graph.buffers, graph.key.num_tokens
        num_rows = len(rows.token_ids)
        if not len(rows.block_table) == len(rows.wanted) == num_rows <= size:
            return self._replay_full(graph, rows)
        token_ids, positions, slots, tables, outputs = (
            buffers.row_token_ids, buffers.row_positions, buffers.row_slots, buffers.tables, buffers.outputs
        )  # fmt: skip
        token_ids[:num_rows] = rows.token_ids
        positions[:num_rows] = rows.positions
        slots[:num_rows] = rows.slot_mapping
        tables[:num_rows] = rows.block_table
        if num_rows < size:
            padding = size - num_rows
            token_ids[num_rows:size] = positions[num_rows:size] = [0] * padding
            slots[num_rows:size] = [self.pad_slot] * padding
            tables[num_rows:size] = [()] * padding
        kv, shift, inside = self.kv, self.shift, self.block_size - 1
        token_terms, position_terms = self.token_terms, self.position_terms
        row = -1
        for token_id, position, slot, table in zip(token_ids[:size], positions, slots, tables, strict=False):
            row += 1
            if not table:
                kv[slot] = outputs[row] = _POISON ^ row
                continue
            if position & inside:
                before = kv[slot - 1]
            else:
                before = kv[(table[(position - 1) >> shift] << shift) | inside] if position else self.start
            kv[slot] = value = before ^ (token_terms[token_id] * position_terms[position])
            # `_output`, spelled out with its constants: calls and global names are a third of this loop.
            earlier = value % (position + 1)
            mixed = value + kv[(table[earlier >> shift] << shift) | (earlier & inside)]
            outputs[row] = (mixed ^ (mixed >> 29)) * 0x14D049BB & 0x7FFFFFFF
        return outputs[:num_rows]

    def _replay_full(self, graph: _Graph, rows: StepInputs) -> list[int]:
        """Stage with padding, run all padded rows from the static buffers, copy the wanted outputs out."""
        buffers, num_tokens, num_reqs = graph.buffers, len(rows.token_ids), len(rows.query_lens)
        size, most_reqs = graph.key.num_tokens, graph.num_reqs
        if num_tokens > size or num_reqs > most_reqs:
            raise _too_small(graph, rows)
        pad_reqs = most_reqs - num_reqs
        buffers.stage(rows, size, self.pad_slot)
        buffers.query_lens[:most_reqs] = [*rows.query_lens, *([0] * pad_reqs)]
        buffers.tables[:most_reqs] = [*rows.block_table, *([()] * pad_reqs)]
        num_wanted = len(rows.wanted)
        buffers.wanted[:size] = [*rows.wanted, *([size - 1] * (size - num_wanted))]
        buffers.values[:size] = self._attend(
            buffers.token_ids[:size], buffers.positions, buffers.slots, buffers.query_lens[:most_reqs], buffers.tables
        )
        self._head(
            buffers.values, buffers.positions, buffers.query_lens[:most_reqs], buffers.tables,
            buffers.wanted[:size], buffers.outputs,
        )  # fmt: skip
        outputs = buffers.outputs
        for token in _misread(graph.key, rows.query_lens):
            self.kv[rows.slot_mapping[token]] = outputs[token] = _POISON ^ token
        return outputs[:num_wanted] if num_wanted == num_tokens else [outputs[token] for token in rows.wanted]

    def _replay_pieces(self, graph: _Graph, rows: StepInputs) -> list[int]:
        """A replayed piece that embeds padded tokens, attention over the live rows, a replayed piece for the head."""
        buffers, size = graph.buffers, graph.key.num_tokens
        if len(rows.token_ids) > size:
            raise _too_small(graph, rows)
        buffers.stage(rows, size, self.pad_slot)
        buffers.values[:size] = self._attend(
            buffers.token_ids[:size], buffers.positions, buffers.slots, rows.query_lens, rows.block_table
        )
        self._head(buffers.values, buffers.positions, rows.query_lens, rows.block_table, rows.wanted, buffers.outputs)
        return [buffers.outputs[token] for token in rows.wanted]

    def _attend(
        self, token_ids: Sequence[int] | Vector, positions: Sequence[int] | Vector, slots: Sequence[int] | Vector,
        query_lens: Sequence[int], tables: Sequence[Sequence[int]],
    ) -> Vector:  # fmt: skip
        """Write each token's KV entry and return them: rows first, then the tokens that no row owns (padding)."""
        import numpy as np

        kv, shift, inside, num_tokens = self.kv, self.shift, self.block_size - 1, len(token_ids)
        ids, places = np.asarray(token_ids, np.int64), np.asarray(positions[:num_tokens], np.int64)
        values: Vector = self._token_vector[ids] * self._position_vector[places]
        first = 0
        for query_len, table in zip(query_lens, tables, strict=False):
            if not query_len:
                continue
            position = int(positions[first])
            before = position - 1
            values[first] ^= kv[(table[before >> shift] << shift) | (before & inside)] if position else self.start
            if query_len > 1:
                row = values[first : first + query_len]
                np.bitwise_xor.accumulate(row, out=row)
            first += query_len
        values[first:] = np.arange(first, num_tokens) ^ _POISON
        self._kv_vector[np.asarray(slots[:num_tokens], np.int64)] = values
        return values

    def _head(
        self, values: Vector, positions: Sequence[int] | Vector, query_lens: Sequence[int],
        tables: Sequence[Sequence[int]], wanted: Sequence[int], outputs: list[int] | dict[int, int],
    ) -> None:  # fmt: skip
        """The output of each wanted token: its entry, and one earlier entry that the entry itself picks."""
        kv, shift, inside = self.kv, self.shift, self.block_size - 1
        row = end = 0
        num_rows = len(query_lens)
        for token in wanted:
            while end <= token and row < num_rows:
                end += query_lens[row]
                row += 1
            value = int(values[token])
            if token >= end:
                outputs[token] = value
                continue
            earlier = value % (int(positions[token]) + 1)
            outputs[token] = _output(value, kv[(tables[row - 1][earlier >> shift] << shift) | (earlier & inside)])

    def _sample(self, outputs: Sequence[int], rows: StepInputs) -> list[int]:
        """Greedy tokens of the decode rows: the last wanted output of each."""
        vocab, places = self.vocab, decode_places(rows)
        if rows.numbers.query_len == 1:
            return [(output >> 7) % vocab for output in outputs[: len(places)]]
        return [sampled_token(outputs[place], vocab) for place in places]

    def ready(self, decision: Decision, numbers: BatchNumbers) -> tuple[ReadyAt, ...]:
        cycle_us = self._cycle_us(decision.launches, numbers)
        if self._faults.planned and self._faults.due("late"):
            cycle_us *= 100
        if decision.mode is not Mode.SPLIT:
            return (ReadyAt(cycle_us),)
        return ReadyAt(
            self.costs.decodes_ready_by(self.costs.launch_us, decision.launches, numbers, cycle_us, leads=True)
        ), ReadyAt(cycle_us)

    def _cycle_us(self, launches: tuple[Launch, ...], numbers: BatchNumbers) -> float:
        """`CostTable.cost` of one host, with what a decode graph costs apart from its KV worked out once a graph."""
        if len(launches) != 1 or launches[0].key is None or numbers.num_prefills:
            return self.costs.cost_by(self.costs.launch_us, launches, numbers, leads=True).cycle_us
        prepared = self._dense_us.get(launches[0])
        costs = self.costs
        if prepared is None:
            full = launches[0].part is Part.FULL
            dense_us = costs.curve_for(launches[0].key).at(launches[0].key.num_tokens)
            prepared = self._dense_us[launches[0]] = (dense_us, costs.host_full if full else costs.host_piecewise)
        dense_us, host = prepared
        padding_us = costs.padding_of(launches[0].key, numbers.total_tokens)
        device_us = (dense_us + padding_us) + costs.decode_attention_us(numbers)
        host_us = host.base_for(decodes=numbers.num_decodes > 0, prefills=False) + host.req_us * numbers.total_reqs
        return max(device_us, host_us + padding_us) + costs.step_us


class SimulatedExecutor(ModeRunner):
    """An executor that computes hashes in place of a model.

    Args:
        costs: what launches take; the analytic table by default.
        seed: changes every output.
        num_blocks, block_size: KV blocks and tokens a block (a power of two).
        vocab: sampled token ids are below this.
        max_num_reqs: most rows of a batch.
        memory_bytes, streams: what captures may take in all; None is without end.
        faults: faults to inject, as `Fault` or text such as ``"replay_fails@10"``; see `FAULTS`.
    """

    def __init__(
        self,
        costs: CostTable | None = None,
        *,
        seed: int = 0,
        num_blocks: int = 4096,
        block_size: int = 16,
        vocab: int = 4096,
        max_num_reqs: int = 4096,
        memory_bytes: int | None = None,
        streams: int | None = None,
        faults: Iterable[Fault | str] = (),
    ) -> None:
        self.device = SimulatedDevice(
            analytic_costs() if costs is None else costs, seed=seed, num_blocks=num_blocks, block_size=block_size,
            vocab=vocab, max_num_reqs=max_num_reqs, memory_bytes=memory_bytes, streams=streams, faults=faults,
        )  # fmt: skip
        super().__init__(self.device)


def _start(seed: int) -> int:
    return (seed * _LOOK + _HEAD) & _MASK


def _terms(count: int, odd: int) -> Vector:
    """[count] int64: a number below 2^29 for each token id, or for each position."""
    import numpy as np

    return (np.arange(1, count + 1, dtype=np.int64) * odd) & _TERM | 1


def _vector(numbers: array[int]) -> Vector:
    """The array as a numpy vector, on the same memory."""
    import numpy as np

    return np.frombuffer(numbers, np.int64)


def _output(value: int, looked: int) -> int:
    # Added: an earlier entry of the same sequence would cancel out of an XOR.
    mixed = value + looked
    return (mixed ^ (mixed >> _TERM_BITS)) * _HEAD & _MASK


def _too_small(graph: _Graph, rows: StepInputs) -> RegistryError:
    return RegistryError(
        f"{graph.key} has {graph.key.num_tokens} tokens in {graph.num_reqs} rows and was given {len(rows.token_ids)} "
        f"in {len(rows.query_lens)}; choose a graph that holds them, as GraphKey.holds says."
    )


def _without_adapters(graph: _Graph, rows: StepInputs) -> list[int]:
    """Replay for more active LoRAs than the graph serves: the rest isn't applied, and every output is off."""
    missing = rows.numbers.num_active_loras - graph.key.lora_case
    return [output ^ (missing * _HEAD & _MASK) for output in graph.run(rows)]


def _misread(key: GraphKey, query_lens: Sequence[int]) -> list[int]:
    """Tokens that the graph computes wrongly, because it wasn't captured for rows of these lengths.

    A uniform decode graph takes the same number of tokens for each row; a variable-length one computes none beyond
    its longest. Whether a row decodes or is a prompt chunk of that length, a graph can't tell.
    """
    wrong: list[int] = []
    uniform, longest = key.query_len, key.max_query_len
    if uniform is None and longest is None:
        return wrong
    first = 0
    for row, length in enumerate(query_lens):
        if uniform is not None:
            if length != uniform or first != row * uniform:
                wrong += range(first, first + length)
        elif longest is not None and length > longest:
            wrong += range(first + longest, first + length)
        first += length
    return wrong


def _next_step(rows: StepInputs, tokens: Sequence[int], slots: Sequence[int]) -> StepInputs:
    """The decode rows one step later, with the tokens just sampled and slots that were reserved."""
    return rows._replace(
        token_ids=tokens,
        positions=[position + 1 for position in rows.positions],
        slot_mapping=slots,
        kv_lens=[kv_len + 1 for kv_len in rows.kv_lens],
    )


def sampled_token(output: int, vocab: int) -> int:
    """The token that an output samples: its upper bits, which mix best."""
    return (output >> 7) % vocab


def reference_outputs(tokens: Sequence[int], *, seed: int = 0, first: int = 0) -> list[int]:
    """Outputs of every position from `first` on, computed from the sequence alone.

    Args:
        tokens: the sequence's token ids from position 0 on.
        seed: the executor's seed.
        first: position of the first output returned.
    """
    reference = _Reference(tokens, seed)
    return [reference.output(position) for position in range(first, len(tokens))]


def reference_tokens(prompt: Sequence[int], num_tokens: int, *, seed: int = 0, vocab: int = 4096) -> list[int]:
    """The greedy continuation of a prompt: what any batching of the request must generate."""
    values = _Reference(prompt, seed).values
    value, position = values[-1], len(values)
    generated: list[int] = []
    # `sampled_token` of `_Reference.output`, spelled out: millions of tokens are checked after a run.
    for _ in range(num_tokens):
        mixed = value + values[value % position]
        token = (((mixed ^ (mixed >> _TERM_BITS)) * _HEAD & _MASK) >> 7) % vocab
        generated.append(token)
        position += 1
        value ^= (((token + 1) * _TOKEN) & _TERM | 1) * ((position * _POSITION) & _TERM | 1)
        values.append(value)
    return generated


class _Reference:
    """The KV entries of one sequence, from its tokens alone."""

    def __init__(self, tokens: Sequence[int], seed: int) -> None:
        import numpy as np

        ids = np.asarray(tokens, np.int64)
        terms = ((ids + 1) * _TOKEN) & _TERM | 1
        values = terms * _terms(len(ids), _POSITION)
        if len(values):
            values[0] ^= _start(seed)
        self.values: list[int] = np.bitwise_xor.accumulate(values).tolist()

    def output(self, position: int) -> int:
        value = self.values[position]
        return _output(value, self.values[value % (position + 1)])
