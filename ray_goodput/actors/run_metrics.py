"""Rank 0's training metrics in the coordinator: curves beside the ledger, the newest ones for the driver."""

from __future__ import annotations

import threading

from ray_goodput.actors.data_totals import DataTotals
from ray_goodput.actors.metrics_store import MetricsStore
from ray_goodput.actors.metrics_tail import MetricsNews, MetricsPage, MetricsTail
from ray_goodput.clock import Clock
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.storage.protocol import ObjectStore

_MAX_HISTORY = 100_000


class RunMetrics:
    """Thread-safe."""

    def __init__(self, *, store: ObjectStore, clock: Clock) -> None:
        self._clock = clock
        self._curves = MetricsStore(store=store, clock=clock)
        self._tail = MetricsTail(life=clock.at_s())
        self._lock = threading.Lock()
        self._history: dict[int, dict[str, float]] = {}
        self._newest = -1  # attempt that has reported

    @property
    def data(self) -> DataTotals:
        """The ranks' data counts, written with the curves."""
        return self._curves.data

    def add(self, attempt: int, metrics: MetricsPage, world_rank: int, data: DataCounts | None) -> None:
        """Values by step; those of a later attempt count. data: what that rank has counted so far."""
        self.data.take(attempt, world_rank, data)
        with self._lock:
            late = {} if attempt >= self._newest else dict(self._history)  # from a process that was stopped
            self._newest = max(self._newest, attempt)
            self._history.update((step, late.get(step, values)) for step, values in metrics)
            while len(self._history) > _MAX_HISTORY:
                self._history.pop(next(iter(self._history)))
        self._curves.add(attempt, metrics)
        self._tail.add(attempt, self._clock.at_s(), metrics)

    def since(self, life: float, upto: int) -> MetricsNews:
        """Those that arrived after what the caller has; see `MetricsTail.since`."""
        return self._tail.since(life, upto)

    def history(self) -> tuple[tuple[int, dict[str, float]], ...]:
        """(step, values) in step order; the oldest fall out of a very long run."""
        with self._lock:
            return tuple(sorted(self._history.items()))

    def flush(self, *, now: bool = False) -> None:
        """Write the curves that are due; all of them with `now`."""
        self._curves.flush(now=now)
