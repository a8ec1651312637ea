"""What a rank has been told from outside: by the coordinator's answers, or by a signal. Read at the end of each step.

Whatever a rank knows, it does nothing alone: it posts what it wants in the control word, and all ranks act at one step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ray_goodput.core.drain import LeaveNotice, merged, notice_of_nodes
from ray_goodput.core.run_state import AttemptStart, HeartbeatAnswer, WorkerInfo
from ray_goodput.train import sigterm


class RankOrders:
    """Thread-safe: heard by the heartbeat's thread, asked by the training thread."""

    def __init__(self, world_rank: int, workers: Sequence[WorkerInfo]) -> None:
        self._world_rank = world_rank
        self._workers = tuple(workers)
        self._lock = threading.Lock()
        self._end_run = False
        self._notice: LeaveNotice | None = None
        self._heard_mono_s = 0.0
        self._save_number: int | None = None
        self._save = False
        self.start: AttemptStart | None = None  # where the attempt goes on; rank 0 knows
        self.taken_over = ""  # why the run is no longer ours
        self.stop_reason = ""  # why it stops without waiting for the storage

    def hear(self, answer: HeartbeatAnswer) -> None:
        """Take in what the coordinator said."""
        with self._lock:
            self._end_run = self._end_run or answer.drain
            self._notice = notice_of_nodes(answer.draining, self._workers) if answer.draining else None
            self._heard_mono_s = time.monotonic()
            # The first answer only tells where the counting stands; a restarted coordinator counts from 0 again.
            wanted = self._save_number is not None and answer.save_number > self._save_number
            # Rank 0 alone: ranks hear of it at different steps, and each would have all ranks save once more.
            self._save = self._save or (wanted and self._world_rank == 0)
            self._save_number = answer.save_number
            self.taken_over = answer.taken_over
            self.stop_reason = self.stop_reason or answer.stop_reason

    @property
    def end_run(self) -> bool:
        """Whether the run is to end: save, and leave the loop."""
        return self._end_run

    @property
    def must_leave(self) -> bool:
        """Whether this attempt is to end, since some of it is about to go. Cheap: asked at every step."""
        return self._notice is not None or sigterm.received()

    def take_save(self) -> bool:
        """Whether a save was asked for since the last call; only rank 0 says so."""
        if not self._save:
            return False
        with self._lock:
            self._save = False
        return True

    def notice(self) -> LeaveNotice | None:
        """Who is about to go, and when, as far as this rank knows."""
        with self._lock:
            notice, heard_mono_s = self._notice, self._heard_mono_s
        if notice is not None and notice.left_s is not None:
            left_s = max(0.0, notice.left_s - (time.monotonic() - heard_mono_s))
            notice = LeaveNotice(reason=notice.reason, ranks=notice.ranks, left_s=left_s)
        own = LeaveNotice(reason="SIGTERM", ranks=(self._world_rank,)) if sigterm.received() else None
        return merged([notice, own])
