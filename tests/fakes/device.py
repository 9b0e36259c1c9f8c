"""Streams, events and graphs of a pretended device, as commands in queues, and every order in which they can run.

What is enforced is what the vendor's documents say (torch_npu 2.13, `torch_npu/npu/streams.py` and `graphs.py`):
commands of a stream run in order, those of different streams in any; an external event is a flag that a wait blocks on,
a record raises and a reset lowers; a graph's task reads the arguments that it has when it runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple


class Hang(AssertionError):
    """A stream waits for what never comes."""


class Command(NamedTuple):
    """One entry of a stream's queue."""

    kind: str
    """record, wait (an event's serial number), raise, block, lower (a flag), update, task, work"""
    on: Any
    """The event, flag, task or function"""
    value: Any = None
    """The serial, the arguments, or the replay's number"""


class Entry(NamedTuple):
    """One thing that the host did: put a command into a stream's queue, or waited for a stream (no command)."""

    stream: int
    command: Command | None


class State:
    """What commands change.

    Args:
        patient: whether a wait for a flag that is down blocks; where not, it passes, as in soft-sliced devices.
    """

    def __init__(self, *, patient: bool = True) -> None:
        self.patient = patient
        self.serials: dict[Any, int] = {}
        self.flags: set[Any] = set()
        self.arguments: dict[Any, Any] = {}
        self.reads: list[tuple[Any, Any, Any]] = []
        """(task, the replay's number, the arguments it read)"""

    def copy(self) -> State:
        other = State(patient=self.patient)
        other.serials, other.flags = dict(self.serials), set(self.flags)
        other.arguments = dict(self.arguments)
        return other

    def ready(self, command: Command) -> bool:
        if command.kind == "wait":
            return self.serials.get(command.on, 0) >= command.value
        return command.kind != "block" or command.on in self.flags or not self.patient

    def run(self, command: Command) -> None:
        kind, on, value = command
        if kind == "record":
            self.serials[on] = max(value, self.serials.get(on, 0))
        elif kind == "raise":
            self.flags.add(on)
        elif kind == "lower":
            self.flags.discard(on)
        elif kind == "update":
            self.arguments[on] = value
        elif kind == "task":
            self.reads.append((on, value, self.arguments[on]))
            run = getattr(on, "run", None)
            if run is not None:
                run(self.arguments[on])
        elif kind == "work":
            on()

    @property
    def key(self) -> tuple[Any, ...]:
        return (
            tuple(sorted(self.serials.items(), key=lambda each: id(each[0]))), frozenset(map(id, self.flags)),
            tuple(sorted((id(on), repr(value)) for on, value in self.arguments.items())),
        )  # fmt: skip


Check = Callable[[Any, Any, Any], bool]
"""Whether a task of a replay may read those arguments: (task, replay's number, arguments)"""


class Outcome(NamedTuple):
    """What all orders together came to."""

    states: int
    hangs: int
    stale: int
    ends: int

    @property
    def sound(self) -> bool:
        return bool(self.ends) and not self.hangs and not self.stale


def every_order(programme: Sequence[Entry], start: State, check: Check) -> Outcome:
    """Run a host's programme in every order that the device may take, each reachable state once.

    A state is how far the host and each stream are, and what events, flags and arguments are.
    """
    streams = sorted({entry.stream for entry in programme})
    places = {
        stream: [i for i, entry in enumerate(programme) if entry.stream == stream and entry.command is not None]
        for stream in streams
    }
    seen: set[Any] = set()
    hangs = stale = ends = 0
    stack: list[tuple[int, tuple[int, ...], State]] = [(0, (0,) * len(streams), start.copy())]
    while stack:
        host, done, state = stack.pop()
        key = host, done, state.key
        if key in seen:
            continue
        seen.add(key)
        moved = False
        if host < len(programme):
            entry = programme[host]
            at = streams.index(entry.stream)
            put = sum(place < host for place in places[entry.stream])
            if entry.command is not None or done[at] == put:
                stack.append((host + 1, done, state))
                moved = True
        for at, stream in enumerate(streams):
            own = places[stream]
            if done[at] == len(own) or own[done[at]] >= host:
                continue
            command = programme[own[done[at]]].command
            assert command is not None
            if not state.ready(command):
                continue
            moved = True
            after = state.copy()
            after.run(command)
            stale += any(not check(*read) for read in after.reads)
            stack.append((host, (*done[:at], done[at] + 1, *done[at + 1 :]), after))
        if not moved:
            if host == len(programme) and all(done[at] == len(places[stream]) for at, stream in enumerate(streams)):
                ends += 1
            else:
                hangs += 1
    return Outcome(len(seen), hangs, stale, ends)


def random_order(programme: Sequence[Entry], state: State, check: Check, rng: random.Random) -> str:
    """Run a programme in one random order: "ok", "hang", or "stale" where a task read wrong arguments and it ended."""
    queues: dict[int, list[Command]] = {entry.stream: [] for entry in programme}
    heads = dict.fromkeys(queues, 0)
    host = stale = 0
    while True:
        ready = [
            stream for stream, queue in queues.items()
            if heads[stream] < len(queue) and state.ready(queue[heads[stream]])
        ]  # fmt: skip
        may_go_on = host < len(programme) and (
            programme[host].command is not None or heads[programme[host].stream] == len(queues[programme[host].stream])
        )
        if not ready and not may_go_on:
            left = host < len(programme) or any(heads[stream] < len(queue) for stream, queue in queues.items())
            return "hang" if left else "stale" if stale else "ok"
        # The host runs ahead at times, and at times lags behind.
        if may_go_on and (not ready or rng.random() < 0.6):
            entry = programme[host]
            host += 1
            if entry.command is not None:
                queues[entry.stream].append(entry.command)
            continue
        stream = rng.choice(ready)
        state.run(queues[stream][heads[stream]])
        heads[stream] += 1
        stale += bool(state.reads) and not check(*state.reads.pop())


class Device:
    """The device: queues that run as far as they can whenever something is put into one.

    Args:
        streams: streams that graphs can have, all together; None is as many as they like.
        runs: whether commands run at all; otherwise only the programme is noted.
    """

    def __init__(self, streams: int | None = None, *, runs: bool = True) -> None:
        self.streams = streams
        self.taken = 0
        self.runs = runs
        self.state = State()
        self.programme: list[Entry] = []
        self.replays = 0
        self._queues: dict[int, list[Command]] = {}
        self._serial = 0
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        """What commands run in, whoever's call let them go on"""

    def put(self, stream: int, command: Command) -> None:
        if not self.runs:
            self.programme.append(Entry(stream, command))
            return
        self._queues.setdefault(stream, []).append(command)
        self.progress()

    def serial(self) -> int:
        self._serial += 1
        return self._serial

    def progress(self) -> None:
        with self.around():
            self._progress()

    def _progress(self) -> None:
        moved = True
        while moved:
            moved = False
            for queue in self._queues.values():
                while queue and self.state.ready(queue[0]):
                    self.state.run(queue.pop(0))
                    self.state.reads.clear()
                    moved = True

    def waiting(self, stream: int | None = None) -> Iterator[Command]:
        for number, queue in self._queues.items():
            if stream is None or number == stream:
                yield from queue[:1]

    def drain(self, stream: int | None = None) -> None:
        """The host waits for a stream, or all.

        Raises:
            Hang: it would wait for ever.
        """
        if not self.runs:
            for number in sorted({entry.stream for entry in self.programme}) if stream is None else [stream]:
                self.programme.append(Entry(number, None))
            return
        stuck = list(self.waiting(stream))
        if stuck:
            raise Hang(f"the device waits for ever at {[(each.kind, each.value) for each in stuck]}")
