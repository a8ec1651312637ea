"""The coordinator's watch over how old the newest commit gets; on its own monotonic clock."""

from __future__ import annotations

import logging
import threading

from ray_goodput.clock import Clock
from ray_goodput.core.durable_age import AgeWatch

logger = logging.getLogger(__name__)


class CommitAge:
    """Thread-safe. `stop`: whether the ranks are to stop once the limit is passed; said it is anyway."""

    def __init__(self, clock: Clock, limit_s: float | None, *, stop: bool) -> None:
        self._clock = clock
        self._watch = AgeWatch(limit_s)
        self._stop = stop
        self._stop_reason = ""
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Training has begun; again and again for each attempt, the first time counts."""
        with self._lock:
            self._watch.begin(self._clock.mono_s())

    def committed(self) -> None:
        with self._lock:
            self._watch.committed(self._clock.mono_s())

    def stop_reason(self, *, committed_step: int, step: int) -> str:
        """Why all ranks are to stop, "" while they are not."""
        with self._lock:
            reason = self._watch.passed(self._clock.mono_s(), committed_step=committed_step, step=step)
            if reason is not None:
                logger.warning("%s", reason)
                self._stop_reason = reason if self._stop else ""
            return self._stop_reason
