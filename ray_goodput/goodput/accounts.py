"""From the books to the report: places every rank-second of the wall clock in one bucket (law G1).

Of a rank in an attempt the coordinator knows when the attempt began and ended and when the rank's journal began; the
journal says how long was spent on what. So the time before the journal is startup, the time after it is detect or
shutdown, and clocks of two machines are never subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ray_goodput.core.buckets import Bucket
from ray_goodput.core.straggler import Pace, find_stragglers
from ray_goodput.goodput.books import NUM_BUCKETS, AttemptBook, RankBook, Session
from ray_goodput.goodput.incidents import Interrupted, counted_s, incidents_of, load_s
from ray_goodput.goodput.report import DRIVER, AttemptReport, GoodputReport

CLEAN_OUTCOMES = frozenset({"finished", "stopped", "resized", "drain"})
"""Outcomes after which a rank's remaining time is shutdown; after any other it is detect."""


@dataclass(slots=True)
class _Sums:
    """Rank-seconds by bucket."""

    s: list[float] = field(default_factory=lambda: [0.0] * NUM_BUCKETS)
    uncertain: float = 0.0

    def named(self) -> dict[str, float]:
        return {bucket.label: self.s[bucket] for bucket in Bucket}


@dataclass(slots=True)
class _Placed:
    """An attempt on the wall clock, with its gaps."""

    book: AttemptBook
    start: float
    end: float
    outcome: str  # "" while it goes on
    sums: _Sums

    def interrupted(self) -> Interrupted:
        return Interrupted(
            book=self.book,
            outcome=self.outcome,
            start=self.start,
            end=self.end,
            lost_s=self.sums.s[Bucket.LOST],
            load_s=load_s(self.book),
        )


def close_books(
    sessions: Sequence[Session], *, target_world: int, durable_step: int | None, at: float, heartbeat_s: float
) -> GoodputReport:
    """The report as of `at` (coordinator's clock); what has an end already is not touched by `at`."""
    placed: list[_Placed] = []
    rest = _Sums()  # of sessions without an attempt
    lives: list[tuple[float, float]] = []
    for session in sessions:
        end = session.ended_at if session.ended_at is not None else at
        end = max(end, session.started_at)
        lives.append((session.started_at, end))
        here = _place(session, end, target_world, heartbeat_s)
        placed += here
        if not here:
            rest.s[Bucket.STARTUP] += target_world * (end - session.started_at)
    wall = counted_s(lives, math.inf)
    began = [p.book.began for p in placed]
    committed = lost = 0.0
    for i, p in enumerate(placed):
        # A step survives if no later attempt began at or before it, that is, went on after an earlier one.
        cutoff = min((b for b in began[i + 1 :] if b is not None), default=None)
        gone = _after(p.book, cutoff) if cutoff is not None else 0.0
        kept = min(x for x in (cutoff, durable_step or 0) if x is not None)
        p.sums.s[Bucket.LOST] += gone
        p.sums.s[Bucket.STEP] = max(0.0, p.sums.s[Bucket.STEP] - gone)  # never below by a rounding
        lost += gone
        committed += p.book.steps.up_to(kept) / 1e9
    parts = [rest, *(p.sums for p in placed)]
    sums = [sum(part.s[i] for part in parts) for i in range(NUM_BUCKETS)]
    total = sum(sums)
    step, idle = sums[Bucket.STEP], sums[Bucket.IDLE_NODES]
    return GoodputReport(
        overall=step / total if total > 0 else 0.0,
        availability=(total - idle) / total if total > 0 else 0.0,
        runtime=step / (total - idle) if total > idle else 0.0,
        wall_s=wall,
        target_world=target_world,
        buckets_s={bucket.label: sums[bucket] for bucket in Bucket},
        committed_s=committed,
        at_risk_s=max(0.0, step - committed),
        lost_s=lost,
        uncertainty_s=sum(part.uncertain for part in parts),
        imbalance_s=total - target_world * wall,
        durable_step=durable_step,
        finished=bool(sessions) and sessions[-1].ended_at is not None,
        attempts=tuple(_attempt_report(p) for p in placed),
        incidents=incidents_of([p.interrupted() for p in placed], lives, target_world=target_world, at=at),
        stragglers=find_stragglers(_paces(placed[-1].book)) if placed else (),
    )


def _paces(book: AttemptBook) -> dict[int, Pace]:
    return {
        world_rank: Pace(own_s=rank.own_ns / 1e9, steps=rank.own_steps)
        for world_rank, rank in book.ranks.items()
        if rank.own_steps
    }


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """An attempt on the wall clock: idle from `gap_start` to `start`, and, if it is the last, from `end` to `tail_end`.

    first: of its session. ended: nothing more is to come from it. silent: it is the last one of a driver that died
    without a word.
    """

    book: AttemptBook
    first: bool
    gap_start: float
    start: float
    end: float
    tail_end: float
    ended: bool
    silent: bool

    @property
    def outcome(self) -> str:
        """What became of it; "" while it goes on, "driver" where that died with it, "unknown" where nobody said."""
        if self.book.outcome or not self.ended:
            return self.book.outcome
        return DRIVER if self.silent else "unknown"

    @property
    def gap_bucket(self) -> Bucket:
        return Bucket.STARTUP if self.first else Bucket.RESTART

    @property
    def end_bucket(self) -> Bucket:
        """Where the rest of a rank's time goes that was not closed by its journal."""
        if self.book.outcome == "hang":
            return Bucket.HANG
        return Bucket.SHUTDOWN if self.book.outcome in CLEAN_OUTCOMES else Bucket.DETECT

    @property
    def tail_bucket(self) -> Bucket:
        return Bucket.SHUTDOWN if self.book.outcome in CLEAN_OUTCOMES else Bucket.RESTART


def attempt_spans(session: Session, session_end: float) -> list[AttemptSpan]:
    """The attempts of a session, without holes and without overlaps."""
    spans: list[AttemptSpan] = []
    cursor = session.started_at
    books = session.attempts
    for i, book in enumerate(books):
        last = i + 1 == len(books)
        start = min(max(book.started_at, cursor), session_end)
        limit = session_end if last else max(start, min(books[i + 1].started_at, session_end))
        ended = book.ended_at is not None or not last or session.ended_at is not None
        end = limit if book.ended_at is None else max(start, min(book.ended_at, limit))
        tail_end = session_end if last else end
        spans.append(AttemptSpan(book, i == 0, cursor, start, end, tail_end, ended, session.silent and last))
        cursor = end
    return spans


def _place(session: Session, session_end: float, target: int, heartbeat_s: float) -> list[_Placed]:
    placed: list[_Placed] = []
    for span in attempt_spans(session, session_end):
        book = span.book
        sums = _Sums()
        sums.s[span.gap_bucket] += book.world * (span.start - span.gap_start)
        for world_rank in range(book.world):
            _rank(sums, span, book.ranks.get(world_rank), heartbeat_s)
        sums.s[span.tail_bucket] += book.world * (span.tail_end - span.end)
        sums.s[Bucket.IDLE_NODES] += (target - book.world) * (span.tail_end - span.gap_start)
        placed.append(_Placed(book, span.start, span.end, span.outcome, sums))
    return placed


def journal_began(rank: RankBook | None, span: AttemptSpan) -> float | None:
    """When a rank's journal began, on the coordinator's clock; None if nothing is known of it.

    A rank whose hello was lost with a coordinator, but whose journal was found, is taken to have lived to the end.
    Where the journal knows of more time than the coordinator has for it (a hello that took long to arrive, an end that
    was noted early), it began earlier than told, at the expense of startup.
    """
    if rank is None or (rank.started_at is None and rank.next_record == 0 and rank.open_bucket is None):
        return None
    told = span.end - rank.life_ns / 1e9 if rank.started_at is None else rank.started_at
    return max(span.start, min(told, span.end - _known_s(rank)))


def _known_s(rank: RankBook) -> float:
    return (sum(rank.ns) + rank.open_ns) / 1e9


def _rank(sums: _Sums, span: AttemptSpan, rank: RankBook | None, heartbeat_s: float) -> None:
    duration = span.end - span.start
    stepped = span.book.last_done is not None
    began = journal_began(rank, span)
    if rank is None or began is None:
        # Never heard of. If others took steps, so did this one, and its journal is what is missing.
        sums.s[Bucket.OTHER if stepped else Bucket.STARTUP] += duration
        sums.uncertain += duration if stepped else 0.0
        return
    before = began - span.start
    if rank.started_at is None:
        sums.uncertain += before
    else:
        sums.uncertain += max(0.0, min(rank.started_at, span.end) - began)
    for bucket, ns in enumerate(rank.ns):
        sums.s[bucket] += ns / 1e9
    if rank.doing is not None:
        sums.s[rank.doing] += rank.open_ns / 1e9
    sums.uncertain += rank.gap_ns / 1e9
    left = duration - before - _known_s(rank)
    if left < 0:  # more time than the whole attempt: what is too much shows as imbalance
        sums.uncertain -= left
        left = 0.0
    sums.s[Bucket.STARTUP] += before
    silent = rank.next_record == 0 and rank.open_bucket is None
    if silent and stepped:
        sums.s[Bucket.OTHER] += left
        sums.uncertain += left
    elif not span.ended:
        sums.s[Bucket.OTHER if rank.doing is None else rank.doing] += left
        sums.uncertain += left
    else:
        sums.s[span.end_bucket] += left
        sums.uncertain += 0.0 if rank.closed else min(left, heartbeat_s)


def _after(book: AttemptBook, cutoff: int) -> float:
    """Rank-seconds of steps after `cutoff`, those in progress included."""
    ns = book.steps.total() - book.steps.up_to(cutoff)
    for world_rank, rank in book.ranks.items():
        if rank.doing == Bucket.STEP and world_rank < book.world and book.step_of(rank, rank.open_step) > cutoff:
            ns += rank.open_ns
    return ns / 1e9


def _attempt_report(placed: _Placed) -> AttemptReport:
    book = placed.book
    return AttemptReport(
        attempt=book.attempt,
        world=book.world,
        outcome=placed.outcome or "running",
        started_at_s=book.started_at,
        duration_s=max(0.0, placed.end - book.started_at),
        resumed_step=book.began,
        last_step=book.last_done,
        buckets_s=placed.sums.named(),
    )
