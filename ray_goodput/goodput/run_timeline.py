"""What every rank did when: the ledger's coarse timelines placed on the coordinator's clock, by the rules of the sums.

What the journals do not cover (before and after them, between attempts, ranks that were missing) is filled in as in
`accounts.py`, so that a rank's spans have no holes and all of them add up to target world x wall. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.accounts import AttemptSpan, attempt_spans, journal_began
from ray_goodput.goodput.books import NUM_BUCKETS, RankBook
from ray_goodput.goodput.incidents import counted_s
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one rank's time, by the coordinator's clock, and the share of each bucket in it (length 14)."""

    start_s: float
    end_s: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """One rank in one attempt, the gap before it included; `attempt` is None where it had no attempt.

    spans: in order, without holes. steps: (when, how many done since the one before), of a rank that was in the
    attempt.
    """

    attempt: int | None
    world_rank: int
    spans: tuple[Span, ...]
    steps: tuple[tuple[float, int], ...] = ()

    def when(self, steps: Sequence[int], began: int) -> list[float] | None:
        """When the rank had done each of `steps`, having gone on after step `began`; None if that is not known."""
        if not self.steps:
            return None
        times, counts = zip(*self.steps, strict=True)
        reached = began + np.cumsum(counts)
        return np.interp(steps, [began, *reached.tolist()], [times[0], *times]).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """Ranks of a run. sessions: (start, end) of each driver's life; time between them counts as none."""

    sessions: tuple[tuple[float, float], ...]
    ranks: tuple[RankTimeline, ...]

    @property
    def wall_s(self) -> float:
        return self.counted_s(math.inf)

    def counted_s(self, at: float) -> float:
        """Seconds of the run's own time up to `at`: time without a driver is left out."""
        return counted_s(self.sessions, at)

    def columns(self, world_rank: int, num: int) -> npt.NDArray[np.float64]:
        """The rank's life as `num` equal parts of the run's time: seconds by bucket, shape (num, 14)."""
        spans = [span for rank in self.ranks if rank.world_rank == world_rank for span in rank.spans]
        edges = np.linspace(0.0, self.wall_s, num + 1)
        out = np.zeros((num, NUM_BUCKETS))
        if not spans:
            return out
        starts = np.array([self.counted_s(span.start_s) for span in spans])
        ends = np.array([self.counted_s(span.end_s) for span in spans])
        shares = np.array([span.shares for span in spans])
        # Seconds of a bucket up to a moment, at every corner; between two corners it grows evenly.
        at = np.stack([starts, ends], axis=1).ravel()
        grown = np.cumsum(shares * (ends - starts)[:, None], axis=0)
        before = np.concatenate([np.zeros((1, NUM_BUCKETS)), grown[:-1]])
        sums = np.stack([before, grown], axis=1).reshape(-1, NUM_BUCKETS)
        for bucket in np.flatnonzero(grown[-1]).tolist():
            out[:, bucket] = np.diff(np.interp(edges, at, sums[:, bucket]))
        return out

    def throughput(self, num: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Steps a second of rank 0 in `num` equal parts of the run: (middle of each in counted s, steps / s).

        A step counts evenly from the end of the one before; steps done twice count twice. Empty when unknown.
        """
        edges = np.linspace(0.0, self.wall_s, num + 1)
        steps = np.zeros(num)
        for rank in self.ranks:
            if rank.world_rank != 0 or not rank.steps:
                continue
            at = np.array([self.counted_s(when) for when, _ in rank.steps])
            reached = np.cumsum([n for _, n in rank.steps])
            pace = (at[-1] - at[0]) / max(1, reached[-1] - reached[0])
            began = max(self.counted_s(rank.spans[0].start_s), at[0] - pace * reached[0])
            steps += np.diff(np.interp(edges, [began, *at], [0.0, *reached]))
        if not steps.any() or self.wall_s <= 0:
            return np.zeros(0), np.zeros(0)
        return (edges[:-1] + edges[1:]) / 2, steps / (self.wall_s / num)


def place_timelines(ledger: Ledger, of: Collection[int] | None = None) -> RunTimeline:
    """The timelines of all ranks, or of those named, as of the ledger's last event.

    Step time that was rolled back shows as `lost`.
    """
    wanted = range(ledger.target_world) if of is None else sorted(of)
    lives: list[tuple[float, float]] = []
    spans: list[AttemptSpan] = []
    ranks: list[RankTimeline] = []
    for session in ledger.sessions:
        end = session.ended_at if session.ended_at is not None else ledger.last_at
        end = max(end, session.started_at)
        lives.append((session.started_at, end))
        spans += attempt_spans(session, end)
        if not session.attempts:
            waiting = (_pure(session.started_at, end, Bucket.STARTUP),)
            ranks += [RankTimeline(attempt=None, world_rank=r, spans=waiting) for r in wanted]
    for i, span in enumerate(spans):
        cutoff = min((s.book.began for s in spans[i + 1 :] if s.book.began is not None), default=None)
        ranks += [_rank(span, world_rank, cutoff) for world_rank in wanted if world_rank < span.book.world]
        idle = (_pure(span.gap_start, span.tail_end, Bucket.IDLE_NODES),)
        ranks += [RankTimeline(attempt=None, world_rank=r, spans=idle) for r in wanted if r >= span.book.world]
    return RunTimeline(sessions=tuple(lives), ranks=tuple(r for r in ranks if r.spans[0].start_s < r.spans[-1].end_s))


def _rank(span: AttemptSpan, world_rank: int, cutoff: int | None) -> RankTimeline:
    book = span.book
    rank = book.ranks.get(world_rank)
    parts: list[Span] = [_pure(span.gap_start, span.start, span.gap_bucket)]
    steps: list[tuple[float, int]] = []
    began = journal_began(rank, span)
    if rank is None or began is None:
        unheard = Bucket.OTHER if book.last_done is not None else Bucket.STARTUP
        parts.append(_pure(span.start, span.end, unheard))
    else:
        parts.append(_pure(span.start, began, Bucket.STARTUP))
        timeline = book.timelines.get(world_rank)
        cells = _cells(timeline, rank, began) if timeline else [_whole(rank, began)]
        if timeline:
            steps = [(c.end_s, int(done)) for c, done in zip(cells, timeline.steps, strict=False) if done]
        if cutoff is not None:
            cells = _lost(cells, timeline, rank, (book.began or 0), cutoff)
        parts += cells
        life = began + rank.life_ns / 1e9
        if rank.doing is not None:
            at_step = book.step_of(rank, rank.open_step)
            gone = rank.doing == Bucket.STEP and cutoff is not None and at_step > cutoff
            parts.append(_pure(began + rank.end_ns / 1e9, life, Bucket.LOST if gone else Bucket(rank.doing)))
        silent = rank.next_record == 0 and rank.open_bucket is None and book.last_done is not None
        rest = Bucket(rank.doing) if rank.doing is not None else Bucket.OTHER
        parts.append(_pure(life, span.end, span.end_bucket if span.ended and not silent else rest))
    parts.append(_pure(span.end, span.tail_end, span.tail_bucket))
    return RankTimeline(
        attempt=book.attempt, world_rank=world_rank, spans=tuple(_joined(parts, span)), steps=tuple(steps)
    )


def _cells(timeline: Timeline, rank: RankBook, began: float) -> list[Span]:
    sums = timeline.seconds.astype(float)
    total = sums.sum(axis=1, keepdims=True)
    shares = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)
    shares[total[:, 0] <= 0, Bucket.OTHER] = 1.0  # a part of the ledger that was never written
    end = began + rank.end_ns / 1e9
    return [
        Span(began + i * timeline.cell_s, min(end, began + (i + 1) * timeline.cell_s), tuple(row))
        for i, row in enumerate(shares.tolist())
        if i * timeline.cell_s < rank.end_ns / 1e9
    ]


def _whole(rank: RankBook, began: float) -> Span:
    """Of a ledger that has no timelines: everything at once, as the sums have it."""
    total = sum(rank.ns) or 1
    return Span(began, began + rank.end_ns / 1e9, tuple(ns / total for ns in rank.ns))


def _lost(cells: list[Span], timeline: Timeline | None, rank: RankBook, began: int, cutoff: int) -> list[Span]:
    """Step time of the steps after `cutoff` becomes `lost`."""
    if timeline is None:
        num = max(1, (rank.last_done or 0) - began)
        gone = [min(1.0, max(0.0, ((rank.last_done or 0) - max(cutoff, began)) / num))] * len(cells)
    else:
        done = began + np.cumsum(timeline.steps)
        before = done - timeline.steps
        # In a cell in which the border lies, in parts; in one without a step done, by the step in progress.
        part = np.clip(np.divide(done - cutoff, timeline.steps, where=timeline.steps > 0, out=np.ones_like(done)), 0, 1)
        gone = np.where(timeline.steps > 0, part, (before >= cutoff).astype(float)).tolist()
    marked: list[Span] = []
    for cell, share in zip(cells, gone, strict=False):
        shares = list(cell.shares)
        shares[Bucket.LOST] += shares[Bucket.STEP] * share
        shares[Bucket.STEP] *= 1.0 - share
        marked.append(Span(cell.start_s, cell.end_s, tuple(shares)))
    return marked


def _joined(parts: list[Span], span: AttemptSpan) -> Iterator[Span]:
    """Without empty ones, cut to the attempt (a rank's clock may run ahead), equal neighbours as one."""
    held: Span | None = None
    cursor = span.gap_start
    for part in parts:
        start, end = max(part.start_s, cursor), min(part.end_s, span.tail_end)
        if end <= start:
            continue
        cursor = end
        if held is not None and held.shares == part.shares:
            held = Span(held.start_s, end, held.shares)
            continue
        if held is not None:
            yield held
        held = Span(start, end, part.shares)
    yield held or _pure(span.gap_start, span.tail_end, span.gap_bucket)


def _pure(start: float, end: float, bucket: Bucket) -> Span:
    return Span(start, max(start, end), _PURE[bucket])


_PURE = [tuple(1.0 if i == bucket else 0.0 for i in range(NUM_BUCKETS)) for bucket in range(NUM_BUCKETS)]
