"""KV blocks as a count, and which prompt blocks stay behind for the next request that begins alike."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Blocks"]


class Blocks:
    """The KV pool of one rank.

    A prompt block that was computed stays in the pool under its hash id when nobody uses it any more, and gives way,
    least recently used first, when blocks run out. So what is *available* is what is free and what would give way.

    Args:
        num_blocks: blocks in all.
        per_hash: blocks that one hash id stands for.
    """

    __slots__ = ("_idle", "_refs", "free", "num_blocks", "per_hash")

    def __init__(self, num_blocks: int, per_hash: int) -> None:
        self.num_blocks = num_blocks
        self.per_hash = per_hash
        self.free = num_blocks
        self._refs: dict[int, int] = {}
        """Requests that hold each cached hash id."""
        self._idle: dict[int, None] = {}
        """Cached hash ids that nobody holds, least recently used first."""

    @property
    def available(self) -> int:
        return self.free + len(self._idle) * self.per_hash

    @property
    def cached(self) -> int:
        """Blocks that the cache holds, in use or not."""
        return len(self._refs) * self.per_hash

    def take(self, count: int) -> bool:
        """Take blocks, from the cache where none is free; False, with nothing taken, where there aren't so many."""
        if count > self.free:
            if count > self.available:
                return False
            while count > self.free:
                oldest = next(iter(self._idle))
                del self._idle[oldest], self._refs[oldest]
                self.free += self.per_hash
        self.free -= count
        return True

    def match(self, hash_ids: Sequence[int], most: int) -> list[int]:
        """Hold the cached blocks that a prompt begins with, `most` of them at most."""
        held: list[int] = []
        for hash_id in hash_ids[:most]:
            count = self._refs.get(hash_id)
            if count is None:
                break
            if not count:
                del self._idle[hash_id]
            self._refs[hash_id] = count + 1
            held.append(hash_id)
        return held

    def publish(self, hash_id: int) -> bool:
        """Cache a block that was just computed, held by who computed it; False where an equal one is cached."""
        if hash_id in self._refs:
            return False
        self._refs[hash_id] = 1
        return True

    def release(self, count: int, held: Sequence[int]) -> None:
        """Give blocks back: `count` of a request's own, and its hold on cached ones, the last of a prompt first."""
        self.free += count
        for hash_id in reversed(held):
            self._refs[hash_id] -= 1
            if not self._refs[hash_id]:
                self._idle[hash_id] = None
