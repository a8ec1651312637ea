"""The data counts of all ranks of the newest attempt, as their heartbeats bring them. Thread-safe."""

from __future__ import annotations

import threading

from ray_goodput.core.data_flow import DataCounts


class DataTotals:
    """Each heartbeat says everything a rank has counted so far: a lost one costs nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt = -1
        self._ranks: dict[int, DataCounts] = {}

    def take(self, attempt: int, world_rank: int, counts: DataCounts | None) -> None:
        """What a rank has counted in its attempt; those of an earlier attempt are left out."""
        with self._lock:
            if counts is None or attempt < self._attempt:
                return
            if attempt > self._attempt:
                self._attempt, self._ranks = attempt, {}
            self._ranks[world_rank] = counts

    @property
    def attempt(self) -> int:
        """The newest attempt that has read data; -1 if none has."""
        return self._attempt

    def total(self) -> DataCounts | None:
        """Over all ranks of the newest attempt that has read data; None if none has."""
        with self._lock:
            return sum(self._ranks.values(), DataCounts()) if self._ranks else None
