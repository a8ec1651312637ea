"""The coordinator's view of who makes progress, and what was decided about those who do not. Thread-safe, no Ray."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ray_goodput.clock import Clock
from ray_goodput.config import WatchdogConfig
from ray_goodput.core.hang import HangLimits, HangVerdict, RankSight, hang_limits
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.goodput.journal import JournalPage
from ray_goodput.goodput.progress import ProgressBoard

logger = logging.getLogger(__name__)


class ProgressWatch:
    """The progress board of the current attempt, and the attempt's hang if there is one.

    A hang is remembered until a failure was explained by it, or its attempt is replaced: the failure that follows is
    its consequence, one after that (of a start that finds no room) is not.
    """

    def __init__(self, clock: Clock, config: WatchdogConfig) -> None:
        self._clock = clock
        self._config = config
        self._lock = threading.Lock()
        self._board = ProgressBoard()
        self._hang: HangVerdict | None = None
        self._ended = False
        self._hung_at: list[int] = []  # the newest step at each hang in a row

    def begin(self, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """These processes are the attempt; the same once more changes nothing."""
        with self._lock:
            if attempt == self._board.attempt and tuple(workers) == self._board.workers():
                return
            self._board.begin(attempt, workers, self._clock.mono_s())
            self._hang, self._ended = None, False

    def end(self) -> None:
        """The attempt is over: nobody owes a step."""
        with self._lock:
            self._ended = True

    def explained(self) -> None:
        """The attempt has failed, and it is known why."""
        with self._lock:
            self._hang, self._ended = None, True

    def take(self, page: JournalPage) -> None:
        with self._lock:
            self._board.take(page, self._clock.mono_s())

    def leave_out(self, attempt: int, world_rank: int) -> None:
        """Nothing is known of this rank any more, so it is not judged."""
        with self._lock:
            if attempt == self._board.attempt:
                self._board.leave_out(world_rank)

    def observed(self) -> tuple[int, tuple[RankSight, ...], HangLimits] | None:
        """The attempt, its ranks and what is too long for them; None while there is nothing to judge."""
        if self._config.hang_after_s is None:
            return None
        with self._lock:
            if self._hang is not None or self._ended:
                return None
            self._hung_at = [step for step in self._hung_at if step >= self._board.reached]
            limits = hang_limits(
                hang_after_s=self._config.hang_after_s,
                times_p99_step=self._config.times_p99_step,
                first_step_after_s=self._config.first_step_after_s,
                p99_step_s=self._board.p99_step_s(),
                hangs_in_a_row=len(self._hung_at),
            )
            return self._board.attempt, self._board.sights(self._clock.mono_s()), limits

    def workers(self) -> tuple[WorkerInfo, ...]:
        with self._lock:
            return self._board.workers()

    def found(self, attempt: int, verdict: HangVerdict) -> int | None:
        """The attempt hangs. Returns the newest step, None if the attempt has been replaced meanwhile."""
        with self._lock:
            if attempt != self._board.attempt or self._ended:
                return None
            self._hang = verdict
            self._hung_at.append(self._board.reached)
            return self._board.reached

    def hang_now(self) -> HangVerdict | None:
        """Why the current attempt hung, if it did and its failure has yet to be explained."""
        with self._lock:
            return self._hang

    def stuck(self) -> tuple[int, ...]:
        """World ranks of the current attempt that must go and may still be there."""
        with self._lock:
            return self._hang.culprits if self._hang is not None and not self._ended else ()
