"""Ranks of one world as threads of a test: what is collective in the code under test meets at a barrier."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_WAIT_S = 20.0


class ThreadRanks:
    """One rank's view; `broadcast`, `gather` and `all_true` as `train.world.World` has them. Values are pickled on the
    way, as between processes."""

    def __init__(self, world_rank: int, world_size: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self.world_rank = world_rank
        self.world_size = world_size
        self._barrier = barrier
        self._box = box

    def gather(self, value: Any) -> list[Any]:
        self._box[self.world_rank] = pickle.dumps(value)
        self._barrier.wait(_WAIT_S)
        values = [pickle.loads(data) for data in self._box]
        self._barrier.wait(_WAIT_S)
        return values

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def all_true(self, flag: bool) -> bool:
        return all(self.gather(flag))


def in_ranks(world_size: int, action: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `action` returned, or raised, on each rank. A rank that stays away breaks the barrier of the others."""
    barrier = threading.Barrier(world_size)
    box: list[Any] = [None] * world_size

    def run(rank: int) -> Any:
        try:
            return action(ThreadRanks(rank, world_size, barrier, box))
        except Exception as error:  # the test looks at it
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
