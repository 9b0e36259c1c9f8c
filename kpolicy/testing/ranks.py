"""Ranks as threads of one process: every combination of votes can be tried without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kpolicy.errors import ConfigError, RankError

__all__ = ["ThreadCommunicator", "ThreadWorld", "run_ranks"]

T = TypeVar("T")

TIMEOUT_S = 30.0
"""How long a rank waits for the others before it says that they didn't come."""


class ThreadWorld:
    """What the threads of one world share.

    Args:
        world_size: ranks, one thread each.
        timeout_s: seconds a rank waits for the others.
    """

    def __init__(self, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        if world_size < 1:
            raise ConfigError(f"world_size is {world_size}; a world has at least one rank.")
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._calls: dict[int, dict[int, tuple[str, Any]]] = {}
        """By turn and rank: what each rank called, and its value."""
        self._stopped = False

    def communicators(self) -> list[ThreadCommunicator]:
        """One communicator a rank, for one thread each."""
        return [ThreadCommunicator(self, rank) for rank in range(self.world_size)]

    def exchange(self, rank: int, turn: int, what: str, value: Any) -> list[Any]:
        """Every rank's value, once all have come to that turn.

        Raises:
            RankError: another rank called another method, or didn't come.
        """
        with self._condition:
            calls = self._calls.setdefault(turn, {})
            calls[rank] = (what, value)
            # All have come to the turn before, so nobody reads the one before that.
            self._calls.pop(turn - 2, None)
            self._condition.notify_all()
            self._condition.wait_for(lambda: len(calls) == self.world_size or self._stopped, self._timeout_s)
            if len(calls) < self.world_size:
                self._stopped = True
                self._condition.notify_all()
                raise RankError(f"rank {rank} waited at {what} for ranks that stopped or never came.")
        names = {name for name, _ in calls.values()}
        if len(names) > 1:
            raise RankError(f"ranks call different things at the same time: {', '.join(sorted(names))}.")
        return [calls[each][1] for each in range(self.world_size)]

    def stop(self) -> None:
        """Wake every rank that waits for one that won't come, with a RankError."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()


class ThreadCommunicator:
    """One rank of a `ThreadWorld`; the `Communicator` of an Engine in its thread.

    Args:
        world: what the ranks share.
        rank: this one's number.
    """

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world.world_size
        self.num_calls = 0
        """Collective calls so far; equal on all ranks that are in step."""

    def broadcast(self, text: str) -> str:
        """What rank 0 gave."""
        told: str = self._exchange("broadcast", text)[0]
        return told

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over ranks."""
        votes = self._exchange(f"all_reduce_max of {len(values)}", tuple(values))
        return [max(column) for column in zip(*votes, strict=True)]

    def _exchange(self, what: str, value: Any) -> list[Any]:
        self.num_calls += 1
        return self.world.exchange(self.rank, self.num_calls, what, value)


def run_ranks(
    world_size: int, work: Callable[[ThreadCommunicator], T], timeout_s: float = TIMEOUT_S
) -> list[T | BaseException]:
    """Run `work` once a rank, in a thread each; what each returned or raised, by rank.

    A rank that raises wakes the others if they wait for it: they get a RankError instead of hanging.

    Args:
        world_size: ranks.
        work: what a rank does with its communicator.
        timeout_s: seconds a rank waits for the others.
    """
    world = ThreadWorld(world_size, timeout_s)
    results: list[Any] = [None] * world_size

    def run(communicator: ThreadCommunicator) -> None:
        try:
            results[communicator.rank] = work(communicator)
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            results[communicator.rank] = error
            world.stop()

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in world.communicators()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
