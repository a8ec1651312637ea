"""What the run wants of its ranks, told to them by the answers to their heartbeats. No Ray here.

Kept in memory only: whoever asked asks again after the coordinator's restart (the controller's watch, the scaling
policy), but for a driver's wish to end, which is asked once and whose second SIGTERM ends the run anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ray_goodput.clock import Clock
from ray_goodput.core.run_state import HeartbeatAnswer


class RunOrders:
    """Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._end_run = False
        self._save_number = 0
        self._taken_over = ""
        self._draining: dict[str, float | None] = {}  # node id -> when it goes, by our monotonic clock; None: unknown

    def end_run(self) -> None:
        """All ranks save at one of their next steps and leave their loops."""
        with self._lock:
            self._end_run = True

    def taken_over(self, reason: str) -> None:
        """Another driver has taken the run: the ranks end."""
        with self._lock:
            self._taken_over = reason

    def save_soon(self) -> None:
        """A save begins at one of the next steps, whatever the cadence says."""
        with self._lock:
            self._save_number += 1

    def nodes_draining(self, left_s: Mapping[str, float | None]) -> None:
        """The nodes that are being drained now, with the seconds until they go; replaces what was said before."""
        now = self._clock.mono_s()
        with self._lock:
            self._draining = {node: None if left is None else now + left for node, left in left_s.items()}

    def answer(self, next_record: int, *, replaced: bool = False, stop_reason: str = "") -> HeartbeatAnswer:
        """What a rank is told."""
        with self._lock:
            now = self._clock.mono_s()
            return HeartbeatAnswer(
                next_record=next_record,
                drain=self._end_run,
                draining={node: None if at is None else max(0.0, at - now) for node, at in self._draining.items()},
                save_number=self._save_number,
                replaced=replaced,
                taken_over=self._taken_over,
                stop_reason=stop_reason,
            )

    @property
    def ending(self) -> bool:
        """Whether the run was asked to end."""
        return self._end_run
