"""What each rank of the current attempt was last seen doing, and how long steps take. From journal pages; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_goodput.core.buckets import Bucket
from ray_goodput.core.hang import RankSight
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.goodput.journal import STEP_DONE, JournalPage

_MAX_STEPS = 4096
_MIN_STEPS = 20
"""Fewer steps than this say nothing about the slowest one in a hundred."""


@dataclass(slots=True)
class _Rank:
    info: WorkerInfo
    heard_s: float  # when it was last heard of
    began_s: float  # when the open record began
    next_record: int = 0
    bucket: Bucket | None = None
    step: int = -1
    stepped: bool = False
    done_ns: int | None = None
    closed: bool = False
    left_out: bool = False


class ProgressBoard:
    """The ranks of one attempt at a time. Not thread-safe. All times are seconds of one monotonic clock of the owner's.

    Step times are kept across attempts: the whole time between the ends of two steps, waits and saves included.
    """

    def __init__(self) -> None:
        self._attempt = 0
        self._ranks: dict[int, _Rank] = {}
        self._steps_s: deque[float] = deque(maxlen=_MAX_STEPS)
        self._reached = -1

    @property
    def attempt(self) -> int:
        return self._attempt

    @property
    def reached(self) -> int:
        """The newest step ever done on any rank, -1 for none."""
        return self._reached

    def begin(self, attempt: int, workers: Sequence[WorkerInfo], now_s: float) -> None:
        """These processes are `attempt`; none has been heard of yet."""
        self._attempt = attempt
        self._ranks = {w.world_rank: _Rank(w, now_s, now_s) for w in workers}

    def take(self, page: JournalPage, now_s: float) -> None:
        """A heartbeat arrived. Pages of other attempts are left out, records seen before count once."""
        rank = self._ranks.get(page.header.world_rank)
        if rank is None or page.header.attempt != self._attempt or page.next_record < rank.next_record:
            return
        rank.heard_s = now_s
        moved = page.next_record > rank.next_record or rank.bucket is None
        if moved:
            self._take_records(rank, page)
        rank.next_record, rank.closed = page.next_record, page.closed
        now = page.open_record
        if now is not None:
            rank.bucket = Bucket(now.bucket) if now.bucket < len(Bucket) else Bucket.OTHER
            rank.step = max(rank.step, now.step - 1)
        if moved:
            rank.began_s = now_s - (max(0, page.heartbeat_ns - now.start_ns) / 1e9 if now is not None else 0.0)

    def leave_out(self, world_rank: int) -> None:
        """Nothing more is to be had from this rank's journal; its heartbeats go on, with the same page each time."""
        if world_rank in self._ranks:
            self._ranks[world_rank].left_out = True

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(rank.info for rank in self._ranks.values())

    def sights(self, now_s: float) -> tuple[RankSight, ...]:
        """Every rank as seen from here."""
        return tuple(
            RankSight(
                world_rank=world_rank,
                node_ip=rank.info.node_ip,
                pid=rank.info.pid,
                silent_s=now_s - rank.heard_s,
                still_s=now_s - rank.began_s,
                bucket=rank.bucket,
                step=rank.step,
                stepped=rank.stepped,
                closed=rank.closed or rank.left_out,
            )
            for world_rank, rank in sorted(self._ranks.items())
        )

    def p99_step_s(self) -> float | None:
        """99th percentile of the newest step times; None while there are too few."""
        if len(self._steps_s) < _MIN_STEPS:
            return None
        return float(np.percentile(np.fromiter(self._steps_s, float), 99))

    def _take_records(self, rank: _Rank, page: JournalPage) -> None:
        records = page.array[max(0, rank.next_record - page.first_record) :]
        done = records[(records["flags"] & STEP_DONE) != 0]
        if not len(done):
            return
        ends = done["end_ns"].astype(np.int64)
        if rank.done_ns is not None:
            ends = np.concatenate([[rank.done_ns], ends])
        self._steps_s.extend((np.diff(ends) / 1e9).tolist())
        rank.done_ns, rank.stepped = int(ends[-1]), True
        rank.step = max(rank.step, int(done["step"].max()))
        self._reached = max(self._reached, rank.step)
