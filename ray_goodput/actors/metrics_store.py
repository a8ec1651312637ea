"""A run's training curves behind a lock, one object an attempt. Nothing here raises into the coordinator's callers."""

from __future__ import annotations

import logging
import threading

from ray_goodput.actors.data_totals import DataTotals
from ray_goodput.actors.metrics_tail import MetricsPage
from ray_goodput.clock import Clock
from ray_goodput.errors import GoodputError, ObjectNotFoundError
from ray_goodput.goodput.data_log import KEY as DATA_KEY
from ray_goodput.goodput.data_log import data_to_bytes
from ray_goodput.goodput.metrics_log import MetricsLog, object_name
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)


class MetricsStore:
    """Thread-safe. `add` keeps, `flush` writes the curves that changed, whole, at most each `flush_interval_s`, and
    `data`, what the ranks have counted on the way to their batches.

    A curve is for looking at: a coordinator that dies loses what came since the last write, and nobody sends it again.
    """

    flush_interval_s = 20.0

    def __init__(self, *, store: ObjectStore, clock: Clock) -> None:
        self.data = DataTotals()
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._logs: dict[int, MetricsLog] = {}
        self._changed: set[int] = set()
        self._continued: set[int] = set()  # what an earlier life wrote is in the log
        self._flushed_mono_s = clock.mono_s()

    def add(self, attempt: int, metrics: MetricsPage) -> None:
        """What rank 0 reported: (step, values)."""
        if not metrics:
            return
        at_s = self._clock.at_s()
        with self._lock:
            log = self._logs.setdefault(attempt, MetricsLog(attempt))
            for step, values in metrics:
                log.add(step, values, at_s)
            self._changed.add(attempt)

    def flush(self, *, now: bool = False) -> None:
        """Write what changed if the last write is long enough ago, or `now`; what fails is written again next time."""
        with self._writing:
            self._flush(now)

    def _flush(self, now: bool) -> None:
        with self._lock:
            due = now or self._clock.mono_s() - self._flushed_mono_s >= self.flush_interval_s
            if not due:
                return
            self._flushed_mono_s = self._clock.mono_s()
            unknown = self._changed - self._continued
        for attempt in unknown:
            self._continue(attempt)
        with self._lock:
            newest = max(self._logs, default=0)
            changed = {attempt: self._logs[attempt].to_bytes() for attempt in self._changed & self._continued}
            self._changed -= changed.keys()
            for attempt in [a for a in self._logs if a < newest and a not in changed and a not in self._changed]:
                del self._logs[attempt]  # written, and nobody trains in it any more
                self._continued.discard(attempt)  # but for a process that was stopped: what it brings is added
        self._write_data()
        for attempt, data in changed.items():
            try:
                self._store.put(object_name(attempt), data)
            except GoodputError as error:
                logger.warning("The metrics of attempt %d could not be written; tried again: %s", attempt, error)
                with self._lock:
                    self._changed.add(attempt)

    def _write_data(self) -> None:
        counts = self.data.total()
        if counts is None:
            return
        try:
            self._store.put(DATA_KEY, data_to_bytes(self.data.attempt, counts))
        except GoodputError as error:
            logger.warning("The data counts could not be written; tried again: %s", error)

    def _continue(self, attempt: int) -> None:
        """Begin with what an earlier life of the coordinator wrote of the same attempt, if it did."""
        earlier = None
        try:
            data = self._store.get(object_name(attempt))
        except ObjectNotFoundError:
            data = None
        except GoodputError as error:  # written over, what is there would be lost
            logger.warning("The metrics of attempt %d cannot be continued now; tried again: %s", attempt, error)
            return
        try:
            earlier = MetricsLog.from_bytes(data) if data is not None else None
        except GoodputError as error:
            logger.warning("The earlier metrics of attempt %d cannot be used: %s", attempt, error)
        with self._lock:
            self._continued.add(attempt)
            if earlier is not None:
                for point in self._logs[attempt].points:
                    earlier.append(point)
                self._logs[attempt] = earlier
