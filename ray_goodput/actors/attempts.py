"""The attempt table of a run: which attempt trains now, its processes and step, where attempts went on. No Ray here."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ray_goodput.actors.ledger_store import LedgerStore
from ray_goodput.actors.progress_watch import ProgressWatch
from ray_goodput.core.run_state import Resume, WorkerInfo, processes_of


@dataclass(frozen=True, slots=True)
class PresentAttempt:
    """`number`: 0 before the first. `step`: the newest that rank 0 has told, -1 for none. `workers`: none between two
    worker groups, or while a coordinator that was restarted has not heard of them."""

    number: int
    step: int
    workers: tuple[WorkerInfo, ...]


class Attempts:
    """Thread-safe. Attempt numbers grow over the whole run.

    What happens to the attempts is noted in the ledger, and the watchdog is told whom to watch.
    """

    def __init__(self, ledger: LedgerStore, watch: ProgressWatch) -> None:
        self._ledger = ledger
        self._watch = watch
        self._lock = threading.Lock()
        self._number = 0
        self._step = -1
        self._workers: tuple[WorkerInfo, ...] = ()
        self._resumes: list[Resume] = []
        self.gave_up: str | None = None  # why no further attempt is made

    def now(self) -> PresentAttempt:
        with self._lock:
            return PresentAttempt(self._number, self._step, self._workers)

    @property
    def resumes(self) -> tuple[Resume, ...]:
        """Where attempts of this life of the coordinator began."""
        with self._lock:
            return tuple(self._resumes)

    def go_on_from(self, number: int) -> None:
        """The newest attempt of earlier lives was `number`."""
        with self._lock:
            self._number = number

    def allocated(self, workers: Sequence[WorkerInfo]) -> int:
        """A worker group got its processes: a new attempt begins. Idempotent for the same processes."""
        workers = tuple(workers)
        with self._lock:
            if workers and processes_of(workers) == processes_of(self._workers):
                return self._number
            self._number += 1
            self._workers = workers
            attempt = self._number
            self._watch.begin(attempt, workers)
        self._ledger.attempt_started(attempt, len(workers))
        return attempt

    def lives(self, workers: Sequence[WorkerInfo]) -> None:
        """Said again and again by the controller: a coordinator that was restarted does not know the processes."""
        with self._lock:
            if self._workers or self._number < 1:
                return
            self._workers = tuple(workers)
            self._watch.begin(self._number, workers)

    def heard_of(self, attempt: int) -> None:
        """No later attempt gets this number, even if an earlier life of the coordinator could not note it down."""
        with self._lock:
            if attempt <= self._number:
                return
            self._number = attempt
            if self._workers:  # the controller told of them before one of them could say which attempt they are
                self._watch.begin(attempt, self._workers)

    def trained(self, attempt: int, steps: Iterable[int]) -> bool:
        """A rank of `attempt` tells of these steps; False if a later attempt has replaced it."""
        with self._lock:
            if attempt == self._number:
                self._step = max(self._step, *steps, -1)
            return attempt >= self._number

    def resumed(self, attempt: int, step: int, tier: str) -> bool:
        """All ranks have loaded their state and go on after `step`; False if that was known."""
        with self._lock:
            if any(r.attempt == attempt for r in self._resumes):
                return False
            self._resumes.append(Resume(attempt=attempt, step=step, tier=tier))
            self._step = step
            return True

    def failed(self, *, kind: str, message: str, ranks: tuple[int, ...], reason: str, retry: bool) -> None:
        """The controller noticed that the current attempt failed."""
        with self._lock:
            attempt = self._number
            self.gave_up = None if retry else reason
        self._watch.explained()
        self._ledger.attempt_ended(attempt, kind, ranks=ranks, reason=message)

    def down(self, *, outcome: str) -> None:
        """The worker group is gone; `outcome` counts if nothing was said about its end before."""
        with self._lock:
            attempt, self._workers = self._number, ()
        self._watch.end()
        self._ledger.attempt_ended(attempt, outcome)
        self._ledger.group_down(attempt)
