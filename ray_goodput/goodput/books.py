"""The ledger's state: what is known of a run, its attempts and their ranks. Plain values and how they take in facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import STEP_DONE, JournalPage
from ray_goodput.goodput.step_times import StepTimes
from ray_goodput.goodput.timeline import CELL_S, MAX_RANKS, Timeline

NUM_BUCKETS = len(Bucket)


@dataclass(slots=True)
class RankBook:
    """One rank's journal, summed up. Nanoseconds are of the rank's own clock, and only ever differences of it.

    started_at: the coordinator's time at the journal's first record. life_ns: from there to the last sign of life.
    open_bucket, open_ns, open_step: what it was doing then, and for how long (already part of life, not of `ns`).
    gap_ns: overwritten before they were delivered. node: where it ran, as its journal says.
    hung_from_ns: step time from here on went into a hang; None if there was none.
    own_ns, own_steps: its own computing, without waits for other ranks, in how many steps.
    """

    started_at: float | None = None
    next_record: int = 0
    ns: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)
    end_ns: int = 0
    life_ns: int = 0
    open_bucket: int | None = None
    open_ns: int = 0
    open_step: int = -1
    gap_ns: int = 0
    first_done_ns: int | None = None
    last_done: int | None = None
    closed: bool = False
    node: str = ""
    hung_from_ns: int | None = None
    own_ns: int = 0
    own_steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        body = {name: getattr(self, name) for name in self.__slots__ if name != "ns"}
        if body["hung_from_ns"] is None:
            del body["hung_from_ns"]
        if not self.own_steps:
            del body["own_ns"], body["own_steps"]
        return body | {"ns": {Bucket(i).label: ns for i, ns in enumerate(self.ns) if ns}}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> RankBook:
        ns = [0] * NUM_BUCKETS
        for label, value in body["ns"].items():
            ns[Bucket[label.upper()]] = value
        # Before version 3 the node was not told; a hang and the own time are told where there is something to tell.
        known = {"node": "", "hung_from_ns": None, "own_ns": 0, "own_steps": 0} | body
        return cls(ns=ns, **{name: known[name] for name in cls.__slots__ if name != "ns"})

    @property
    def doing(self) -> int | None:
        """The open record's bucket; a step in which the rank hung is none."""
        hung = self.hung_from_ns is not None and self.end_ns >= self.hung_from_ns
        return Bucket.HANG if hung and self.open_bucket == Bucket.STEP else self.open_bucket


@dataclass(slots=True)
class AttemptBook:
    """One attempt: its life by the coordinator's clock, its ranks, its step time."""

    attempt: int
    world: int
    started_at: float
    ended_at: float | None = None
    down_at: float | None = None
    outcome: str = ""
    reason: str = ""
    lost_ranks: tuple[int, ...] = ()
    resumed: int | None = None
    near: int | None = None
    ranks: dict[int, RankBook] = field(default_factory=dict)
    steps: StepTimes = field(default_factory=StepTimes)
    timelines: dict[int, Timeline] = field(default_factory=dict)
    cell_s: float = CELL_S

    @property
    def began(self) -> int | None:
        """It went on after this step: as told, else as its first step says; None when it never got there."""
        if self.resumed is not None or self.steps.first is None:
            return self.resumed
        return self.steps.first - 1

    @property
    def last_done(self) -> int | None:
        return max((r.last_done for r in self.ranks.values() if r.last_done is not None), default=None)

    def take(self, page: JournalPage, at: float | None) -> bool:
        """Book what is new in a page; False when records before it are missing and can still be had."""
        rank = self.ranks.setdefault(page.header.world_rank, RankBook())
        if page.next_record < rank.next_record:
            return True  # an old page
        if page.first_record > rank.next_record and page.oldest_record < page.first_record:
            return False
        origin = page.header.mono_anchor_ns
        rank.node = page.header.node
        array = page.array[max(0, rank.next_record - page.first_record) :]
        if len(array) and rank.hung_from_ns is not None:
            array = array.copy()
            hung = (array["start_ns"] - origin >= rank.hung_from_ns) & (array["bucket"] == Bucket.STEP)
            array["bucket"][hung & ((array["flags"] & STEP_DONE) == 0)] = Bucket.HANG
        if len(array):
            self._draw(page.header.world_rank, rank, array, origin)
            self._book(rank, array, origin)
        rank.next_record = page.next_record
        rank.life_ns = max(rank.life_ns, rank.end_ns, page.heartbeat_ns - origin)
        rank.closed = rank.closed or page.closed
        now = page.open_record
        if not len(array) and now and page.heartbeat_ns - now.start_ns < rank.open_ns:
            return True  # overtaken by a newer page of the same record
        rank.open_bucket = _known(now.bucket) if now else None
        rank.open_step = now.step if now else -1
        rank.open_ns = max(0, page.heartbeat_ns - now.start_ns) if now else 0
        if rank.started_at is None and at is not None:
            rank.started_at = at - rank.life_ns / 1e9
        return True

    def step_of(self, rank: RankBook, step: int) -> int:
        """The step that step time belongs to; a rank that was not told where it resumed does not know."""
        if step >= 0:
            return step
        done = rank.last_done if rank.last_done is not None else self.resumed
        return (done or 0) + 1

    def coarsen(self, cell_s: float) -> None:
        """Keep timelines in cells of at least `cell_s`."""
        self.cell_s = cell_s
        for timeline in self.timelines.values():
            timeline.coarsen(cell_s)

    def timeline(self, world_rank: int) -> Timeline:
        """The rank's timeline, begun if it has none."""
        return self.timelines.setdefault(world_rank, Timeline(self.cell_s))

    def _draw(self, world_rank: int, rank: RankBook, array: np.ndarray, origin: int) -> None:
        if world_rank >= MAX_RANKS:
            return
        start, end = array["start_ns"] - origin, array["end_ns"] - origin
        buckets = array["bucket"].astype(np.int64)
        buckets[buckets >= Bucket.LOST] = Bucket.OTHER
        done = (array["flags"] & STEP_DONE) != 0
        if start[0] > rank.end_ns:  # overwritten by newer records before anybody read them
            start, end = np.insert(start, 0, rank.end_ns), np.insert(end, 0, start[0])
            buckets, done = np.insert(buckets, 0, Bucket.OTHER), np.insert(done, 0, False)
        self.timeline(world_rank).add(start, end, buckets, done)

    def _book(self, rank: RankBook, array: np.ndarray, origin: int) -> None:
        gap = int(array["start_ns"][0]) - origin - rank.end_ns
        if gap > 0:  # overwritten by newer records before anybody read them
            rank.gap_ns += gap
            rank.ns[Bucket.OTHER] += gap
        ns = array["end_ns"] - array["start_ns"]
        buckets = array["bucket"].astype(np.int64)
        sums = np.bincount(buckets, weights=ns, minlength=NUM_BUCKETS)  # exact: a double holds 104 days of ns
        for bucket in np.flatnonzero(sums).tolist():
            rank.ns[_known(bucket)] += int(sums[bucket])
        stepping = buckets == Bucket.STEP
        steps, index = np.unique(array["step"][stepping], return_inverse=True)
        for step, total in zip(
            steps.tolist(), np.bincount(index, weights=ns[stepping], minlength=len(steps)).tolist(), strict=True
        ):
            self.steps.add(self.step_of(rank, step), int(total))
        done = array[(array["flags"] & STEP_DONE) != 0]
        own_us = done["own_us"][done["own_us"] > 0].astype(np.int64)
        if len(own_us):  # a pause of the whole process is no pace: one step counts three usual ones at most
            usual_us = rank.own_ns / 1000 / rank.own_steps if rank.own_steps else float(np.median(own_us))
            rank.own_ns += 1000 * int(np.minimum(own_us, 3 * usual_us).sum())
            rank.own_steps += len(own_us)
        if len(done):
            rank.last_done = max(rank.last_done or 0, int(done["step"].max()))
            if rank.first_done_ns is None:
                rank.first_done_ns = int(done["end_ns"][0]) - origin
        rank.end_ns = int(array["end_ns"][-1]) - origin


@dataclass(slots=True)
class Session:
    """One driver's life. A run that is taken up again by a new driver has several; time between them is not counted."""

    started_at: float
    ended_at: float | None = None
    silent: bool = False  # the driver died without a word: `ended_at` is when something was last heard of it
    attempts: list[AttemptBook] = field(default_factory=list)


def _known(bucket: int) -> int:
    # A bucket of a newer release, or the view `lost`, which no rank can record.
    return bucket if 0 <= bucket < Bucket.LOST else Bucket.OTHER


def hear_late(sessions: Sequence[Session], book: AttemptBook, world_rank: int) -> None:
    """A journal found after its driver died without a word shows that the driver lived at least as long."""
    index = next(i for i, session in enumerate(sessions) if book in session.attempts)
    session, rank = sessions[index], book.ranks[world_rank]
    if not session.silent or session.ended_at is None:
        return
    began = book.started_at if rank.started_at is None else rank.started_at
    lived_until = began + rank.life_ns / 1e9
    if index + 1 < len(sessions):
        lived_until = min(lived_until, sessions[index + 1].started_at)
    session.ended_at = max(session.ended_at, lived_until)
