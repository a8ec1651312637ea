"""The run's ledger behind a lock, with its segments in storage. Once it is open, nothing here raises into the
coordinator's callers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ray_goodput.clock import Clock
from ray_goodput.core.commit import CheckpointId
from ray_goodput.errors import GoodputError, StorageError
from ray_goodput.goodput.journal import JournalPage
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.report import GoodputReport
from ray_goodput.goodput.segments import LedgerSegment
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

FOLDER = "ledger"
_NOTE_WAIT_S = 2.0
"""How long the beginning of an attempt waits until its number is written."""


class LedgerStore:
    """Thread-safe. `open()` replays the segments of earlier lives; `flush()` writes what is new as the next segment.

    holds: whether the run is still ours; the segments of a driver that took it over have the same names as ours.

    Times are wall clock: they go on when the coordinator is restarted, or on another machine. A whole segment is
    written once there are `max_segments` after the one before; those it supersedes are deleted `grace_s` later, so that
    a reader, or a copy of the folder, that began before finds all it saw listed.
    """

    flush_interval_s = 10.0
    max_segments = 100
    grace_s = 900.0

    def __init__(
        self, *, store: ObjectStore, clock: Clock, target_world: int, holds: Callable[[], bool] = lambda: True
    ) -> None:
        self._store = store
        self._clock = clock
        self._target_world = target_world
        self._holds = holds
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._ledger = Ledger(target_world)
        self._swept = 0  # the whole segment below which nothing is left

    def open(self, run_started_at: float) -> None:
        """Take up the ledger in storage; a damaged one is set aside with a warning, and a new one begun.

        run_started_at: when the driver took the run up; the same at each restart of the coordinator under one driver.

        Raises:
            StorageError: the storage cannot be read, or a damaged ledger not be moved: opening again tries again.
        """
        # A read that fails is no damage: to begin anew then would give attempt numbers out twice.
        lines: list[bytes] = []
        for info in self._store.list(FOLDER):
            lines += self._store.get(info.key).splitlines()
        try:
            ledger = Ledger.from_lines(lines, self._target_world)
        except StorageError as error:
            logger.warning("The ledger of earlier attempts cannot be used, a new one begins: %s", error)
            self._set_aside()
            ledger = Ledger(self._target_world)
        with self._lock:
            self._ledger = ledger
            self._ledger.run_started(run_started_at)

    @property
    def highest_attempt(self) -> int:
        """The largest attempt number in the books, 0 for none."""
        with self._lock:
            return max((a.attempt for a in self._ledger.report().attempts), default=0)

    def last_start(self) -> tuple[int, CheckpointId | None]:
        """See `Ledger.last_start`."""
        with self._lock:
            return self._ledger.last_start()

    def attempt_started(self, attempt: int, world: int) -> None:
        with self._lock:
            self._ledger.attempt_started(attempt, world, self._clock.at_s())
        # The number must outlive this process: it fences. But a storage that is away must not hold the call: one under
        # way when the coordinator dies is sent again to its next life, which would take it for a new attempt's.
        pool = ThreadPoolExecutor(1, thread_name_prefix="goodput-attempt")
        written = pool.submit(self.flush)
        pool.shutdown(wait=False)
        with contextlib.suppress(TimeoutError):
            written.result(_NOTE_WAIT_S)

    def rank_hello(self, attempt: int, world_rank: int, journal_s: float) -> None:
        with self._lock:
            self._ledger.rank_hello(attempt, world_rank, self._clock.at_s(), journal_s)

    def add_page(self, page: JournalPage) -> int:
        with self._lock:
            return self._ledger.page(page, self._clock.at_s())

    def add_tail(self, page: JournalPage) -> None:
        """A page read from the disk of a dead rank's node: it says nothing about when it arrived."""
        with self._lock:
            self._ledger.page(page)

    def commit(
        self,
        step: int,
        attempt: int,
        *,
        stall_s: float | None = None,
        latency_s: float | None = None,
        upload_s: float | None = None,
    ) -> None:
        with self._lock:
            self._ledger.commit(
                step, attempt, self._clock.at_s(), stall_s=stall_s, latency_s=latency_s, upload_s=upload_s
            )

    def resumed(self, attempt: int, step: int, near: int | None = None) -> None:
        with self._lock:
            self._ledger.resumed(attempt, step, near)

    def hung(self, attempt: int) -> None:
        with self._lock:
            self._ledger.hung(attempt)

    def attempt_ended(self, attempt: int, outcome: str, *, ranks: Sequence[int] = (), reason: str = "") -> None:
        """The first word about an attempt's end counts."""
        if attempt < 1:
            return
        with self._lock:
            self._ledger.attempt_ended(attempt, self._clock.at_s(), outcome, ranks=ranks, reason=reason)

    def group_down(self, attempt: int) -> None:
        """The processes of the attempt are gone."""
        if attempt < 1:
            return
        with self._lock:
            self._ledger.group_down(attempt, self._clock.at_s())

    def failure_history(self) -> tuple[int, float]:
        """Failures so far, and the accelerator-seconds in which they happened."""
        with self._lock:
            report = self._ledger.report(self._clock.at_s())
        return report.failures, report.wall_s * report.target_world

    def report(self) -> GoodputReport:
        """The accounts as of now."""
        with self._lock:
            return self._ledger.report(self._clock.at_s())

    def finish(self) -> GoodputReport:
        """The run is over: the last segment is written, if the storage takes it."""
        with self._lock:
            self._ledger.run_ended(self._clock.at_s())
            report = self._ledger.report()
        self.flush()
        return report

    def flush(self) -> None:
        """Write every segment that is not in storage yet; one that fails is written again next time."""
        with self._writing:
            if not self._holds():
                return
            with self._lock:
                segments = self._ledger.to_segments()
                if self._ledger.segments_since_whole > self.max_segments:
                    self._ledger.seal_whole(self._clock.at_s())
                    segments = self._ledger.to_segments()
            for segment in segments:
                try:
                    self._store.put(f"{FOLDER}/{segment.name}", segment.data)
                except GoodputError as error:
                    logger.warning("The ledger could not be written now; it is tried again: %s", error)
                    return
                with self._lock:
                    self._ledger.saved(segment.number)
            self._sweep()

    def _sweep(self) -> None:
        """Delete the segments that a whole one has superseded for long enough; what fails is deleted another time."""
        with self._lock:
            whole = self._ledger.whole
        if whole is None or whole.number <= self._swept or self._clock.at_s() < whole.at + self.grace_s:
            return
        try:
            first = LedgerSegment(whole.number, b"").name
            old = [info.key for info in self._store.list(FOLDER) if info.key.rpartition("/")[2] < first]
            self._store.delete(old)
        except GoodputError as error:
            logger.info("Superseded segments of the ledger could not be deleted now; it is tried again: %s", error)
            return
        self._swept = whole.number

    def _set_aside(self) -> None:
        for info in list(self._store.list(FOLDER)):
            self._store.put(f"{FOLDER}-damaged/{info.key.removeprefix(FOLDER + '/')}", self._store.get(info.key))
            self._store.delete([info.key])
