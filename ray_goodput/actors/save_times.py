"""How long each save took and how many there were, from what ranks and vaults tell. Clocks of two machines are never
subtracted."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ray_goodput.core.commit import CheckpointId, LandedSlice

_MAX_OPEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTime:
    """Of one committed save; None where nobody told.

    stall_s: training stood still on rank 0, and saves are collective. latency_s: from then until it was durable, of the
    slowest rank: its vault's time for the slice, and what passed from its word of it to the commit. upload_s: of the
    slowest vault, its copy to local disk included.
    """

    stall_s: float | None = None
    latency_s: float | None = None
    upload_s: float | None = None


@dataclass(slots=True)
class _Open:
    stall_s: float | None = None
    landed: dict[int, tuple[float, float]] = field(default_factory=dict)  # world rank -> (when told, upload_s)


class SaveTimes:
    """Thread-safe. A save that never commits is forgotten after some others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[CheckpointId, _Open] = {}
        self.num_committed = 0
        self.num_skipped = 0

    def skipped(self) -> None:
        with self._lock:
            self.num_skipped += 1

    def stalled(self, checkpoint: CheckpointId, stall_s: float) -> None:
        with self._lock:
            self._of(checkpoint).stall_s = stall_s

    def landed(self, landed: LandedSlice, now_mono_s: float) -> None:
        """A vault told of a slice; what it tells again later does not count."""
        with self._lock:
            told = self._of(landed.slice.checkpoint).landed
            told.setdefault(landed.slice.world_rank, (now_mono_s, landed.upload_s))

    def committed(self, checkpoint: CheckpointId, now_mono_s: float) -> SaveTime:
        """The times of a save that has just become durable."""
        with self._lock:
            self.num_committed += 1
            save = self._open.pop(checkpoint, None)
        if save is None or not save.landed:
            return SaveTime(stall_s=save.stall_s if save else None)
        return SaveTime(
            stall_s=save.stall_s,
            latency_s=max(now_mono_s - told + upload_s for told, upload_s in save.landed.values()),
            upload_s=max(upload_s for _, upload_s in save.landed.values()),
        )

    def _of(self, checkpoint: CheckpointId) -> _Open:
        if checkpoint not in self._open and len(self._open) >= _MAX_OPEN:
            self._open.pop(next(iter(self._open)))
        return self._open.setdefault(checkpoint, _Open())
