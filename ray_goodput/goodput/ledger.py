"""The ledger of a run: takes in events and journal pages in any sensible order, says where every rank-second went.

Pure: no clock, no I/O. It lives in the coordinator, and what it knows is written as numbered immutable segments of JSON
lines (`segments.py`), from which a coordinator that was restarted, or a new driver, goes on. README.md of this folder
has the format.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_goodput.core.commit import CheckpointId
from ray_goodput.errors import StorageError
from ray_goodput.goodput.accounts import close_books
from ray_goodput.goodput.books import AttemptBook, RankBook, Session, hear_late
from ray_goodput.goodput.journal import JournalPage
from ray_goodput.goodput.report import GoodputReport
from ray_goodput.goodput.segments import (
    LedgerSegment,
    WholeSegment,
    check_head,
    current_lines,
    everything,
    seal,
    take_news,
)
from ray_goodput.goodput.timeline import MAX_RANKS, cell_length_s

logger = logging.getLogger(__name__)

_COMMIT_FIELDS = ("step", "attempt", "at", "stall_s", "latency_s", "upload_s")


class Ledger:
    """Accounts of one run. Not thread-safe.

    All `at` are seconds of the coordinator's clock: one that goes on when the coordinator is restarted elsewhere, so
    the wall clock. Steps count from 1: step N is done when N optimizer steps are, a commit of step N holds what N steps
    made, and an attempt that resumed from it has N + 1 as its first. Facts may be told twice; what contradicts the
    books (an unknown attempt, a rank outside the world) is logged and left out, never raised.
    """

    def __init__(self, target_world: int, *, heartbeat_s: float = 1.0) -> None:
        self.target_world = target_world
        self._heartbeat_s = heartbeat_s
        self._sessions: list[Session] = []
        self._attempts: dict[int, AttemptBook] = {}
        self._durable: int | None = None
        self._last_at: float | None = None
        self._lines: list[dict[str, Any]] = []  # not in a segment yet
        self._history: list[dict[str, Any]] = []  # all such lines, for a whole segment
        self._touched: dict[tuple[int, int], None] = {}  # (attempt, world_rank) with news not in a segment yet
        self._segments: dict[int, LedgerSegment] = {}  # sealed, not yet told to be saved
        self._next_segment = 0
        self._whole: WholeSegment | None = None
        self._refused: set[tuple[str, int, int]] = set()
        self._cell_s = cell_length_s(0.0)

    # What the coordinator tells.

    def run_started(self, at: float) -> None:
        """A driver took the run up; not to be repeated by a coordinator that was restarted under the same driver."""
        if self._sessions and self._sessions[-1].ended_at is None:
            if at == self._sessions[-1].started_at:
                return
            # The driver before died without a word: its books end with what was last heard.
            self._sessions[-1].ended_at = max(self._sessions[-1].started_at, self._last_at or at)
            self._sessions[-1].silent = True
        elif self._sessions and at == self._sessions[-1].started_at:
            return
        self._sessions.append(Session(at))
        self._note(at, "run_started")

    def attempt_started(self, attempt: int, world: int, at: float) -> None:
        """`world` workers are allocated; attempt numbers grow over the whole run."""
        if attempt in self._attempts:
            return
        if not self._sessions or self._sessions[-1].ended_at is not None:
            self.run_started(at)
        before = self._sessions[-1].attempts
        if before and before[-1].outcome == "finished":
            before[-1].outcome = "resized"  # it ended in good order, and yet there is another one
        book = AttemptBook(attempt, world, at, cell_s=self._cell_s)
        self._attempts[attempt] = book
        self._sessions[-1].attempts.append(book)
        self.target_world = max(self.target_world, world)
        self._note(at, "attempt_started", attempt=attempt, world=world)

    def rank_hello(self, attempt: int, world_rank: int, at: float, journal_s: float = 0.0) -> None:
        """A rank said hello; its journal had been running for `journal_s` (`Recorder.elapsed_s`) by then."""
        book = self._book(attempt, world_rank, "rank_hello")
        if book is None:
            return
        rank = book.ranks.setdefault(world_rank, RankBook())
        if rank.started_at is None or at - journal_s < rank.started_at:
            rank.started_at = at - journal_s
            self._touched[attempt, world_rank] = None
        self._seen(at)

    def page(self, page: JournalPage, at: float | None = None) -> int:
        """Take in a rank's page, and give the number of the record wanted next (see `Recorder`'s `send`).

        Idempotent by (attempt, world_rank, first_record); pages may overlap. `at`: when it arrived, if known.
        """
        attempt, world_rank = page.header.attempt, page.header.world_rank
        book = self._book(attempt, world_rank, "page")
        if book is None:
            return page.first_record  # kept by the sender, in case the attempt is told of later
        if book.take(page, at):
            hear_late(self._sessions, book, world_rank)
            self._touched[attempt, world_rank] = None
        if at is not None:
            self._seen(at)
        return book.ranks[world_rank].next_record

    def commit(
        self,
        step: int,
        attempt: int,
        at: float,
        *,
        stall_s: float | None = None,
        latency_s: float | None = None,
        upload_s: float | None = None,
    ) -> None:
        """The checkpoint of `step` is durable.

        Where known: for how long training stood still for it, how long after that it was durable, and how long the
        slowest upload of it took. For the planner; the accounts do not use them.
        """
        if self._durable is None or step > self._durable:
            self._durable = step
            # Where an attempt went on is the border of what earlier ones lost: keep it as a border of sums.
            resumed = {book.resumed for book in self._attempts.values()}
            newest = max(self._attempts, default=None)
            # Of an attempt that is over and settled, no border is to come: later ones would only wear its own away.
            books = [book for a, book in self._attempts.items() if a == newest or book.steps.has_open]
            for border in sorted({r for r in resumed if r is not None and r < step} | {step}):
                for book in books:
                    book.steps.settle(border)
            told = {"stall_s": stall_s, "latency_s": latency_s, "upload_s": upload_s}
            known = {name: round(s, 6) for name, s in told.items() if s is not None}
            self._note(at, "commit", step=step, attempt=attempt, **known)

    def resumed(self, attempt: int, step: int, near: int | None = None) -> None:
        """The attempt goes on after `step`; 0 when there was nothing to restore.

        near: the attempt that saved that step, if the save was not committed but lay on the nodes.
        """
        book = self._book(attempt, 0, "resumed")
        if book is None or book.resumed is not None:
            return
        book.resumed, book.near = step, near
        if self._durable is not None and step < self._durable:
            self._durable = step or None  # the commits after it turned out to be bad
        self._note(None, "resumed", attempt=attempt, step=step, **({} if near is None else {"near": near}))

    def last_start(self) -> tuple[int, CheckpointId | None]:
        """The newest attempt that said where it went on (0: none), and the save it went on from if that was not
        committed then."""
        attempt = max((a for a, book in self._attempts.items() if book.resumed is not None), default=0)
        book = self._attempts.get(attempt)
        if book is None or book.resumed is None or book.near is None:
            return attempt, None
        return attempt, CheckpointId(book.resumed, book.near)

    def hung(self, attempt: int) -> None:
        """The attempt hangs: step time of its ranks after the records they have delivered is no step."""
        book = self._book(attempt, 0, "hang")
        if book is None:
            return
        for world_rank, rank in book.ranks.items():
            if rank.hung_from_ns is None:
                rank.hung_from_ns = rank.end_ns
                self._touched[attempt, world_rank] = None

    def attempt_ended(
        self, attempt: int, at: float, outcome: str, *, ranks: Sequence[int] = (), reason: str = ""
    ) -> None:
        """The attempt is over for the controller: "finished", "stopped" or "resized", else an incident of that kind.

        ranks: those known to be lost. reason: one line for people.
        """
        book = self._book(attempt, 0, "attempt_ended")
        if book is None or book.ended_at is not None:
            return
        book.ended_at, book.outcome, book.reason, book.lost_ranks = at, outcome, reason, tuple(ranks)
        self._note(at, "attempt_ended", attempt=attempt, outcome=outcome, ranks=list(ranks), reason=reason)

    def group_down(self, attempt: int, at: float) -> None:
        """The attempt's processes are gone: what follows is waiting for others."""
        book = self._book(attempt, 0, "group_down")
        if book is None or book.down_at is not None:
            return
        book.down_at = at
        self._note(at, "group_down", attempt=attempt)

    def run_ended(self, at: float) -> None:
        """The driver is done with the run."""
        if self._sessions and self._sessions[-1].ended_at is None:
            self._sessions[-1].ended_at = at
            self._note(at, "run_ended")

    # What comes out.

    @property
    def durable_step(self) -> int | None:
        """The newest commit that is not known to be bad."""
        return self._durable

    @property
    def sessions(self) -> Sequence[Session]:
        """The books themselves, oldest first: to look at, not to change."""
        return self._sessions

    @property
    def last_at(self) -> float:
        """When the last event was, by the coordinator's clock; 0 before the first."""
        return self._last_at if self._last_at is not None else 0.0

    def report(self, at: float | None = None) -> GoodputReport:
        """The accounts as of `at`, or of the last event."""
        at = self.last_at if at is None else at
        return close_books(
            self._sessions,
            target_world=self.target_world,
            durable_step=self._durable,
            at=at,
            heartbeat_s=self._heartbeat_s,
        )

    def to_segments(self) -> tuple[LedgerSegment, ...]:
        """Seal what is new into a segment, and give all segments not yet told to be `saved`, oldest first.

        How often is free: what a dead coordinator had not saved yet, the ranks deliver again.
        """
        lines = [*self._lines, *self._news()]
        if lines:
            self._seal(lines)
        return tuple(self._segments.values())

    def seal_whole(self, at: float) -> None:
        """Seal everything told so far into one segment, which supersedes those before it once it is saved."""
        self._news()  # what is new is part of everything
        lines = everything(self._history, self._attempts, self._sessions, self._last_at)
        self._segments.clear()  # however long the storage was away, what waits for it is bounded
        self._whole = WholeSegment(self._next_segment, at)
        self._seal(lines, whole_at=at)

    @property
    def whole(self) -> WholeSegment | None:
        """The newest whole segment, saved or not."""
        return self._whole

    @property
    def segments_since_whole(self) -> int:
        """How many segments a reader has to read, at least."""
        return self._next_segment - (self._whole.number if self._whole else 0)

    def saved(self, number: int) -> None:
        """Segment `number` is durable; forget its bytes."""
        self._segments.pop(number, None)

    @classmethod
    def from_lines(cls, lines: Iterable[str | bytes], target_world: int = 0, *, heartbeat_s: float = 1.0) -> Ledger:
        """The ledger that the lines of all its segments, oldest first, describe. A repeated segment counts once, one
        that a whole segment supersedes not at all.

        Raises:
            StorageError: a line cannot be read, a segment is missing, or a newer release wrote it.
        """
        ledger = cls(target_world, heartbeat_s=heartbeat_s)
        skip = True
        for number, line in enumerate(current_lines(lines), 1):
            if not line.strip():
                continue
            try:
                body = json.loads(line)
                if "format" in body:
                    skip = ledger._enter_segment(body)
                elif not skip:
                    ledger._replay(body)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise StorageError(
                    f"Line {number} of the ledger cannot be read ({error!r}): the goodput of this run is unknown, its "
                    "checkpoints are not affected. Delete the run's ledger to start a new one."
                ) from error
        ledger._lines, ledger._touched = [], {}
        for book in ledger._attempts.values():
            book.steps.take_changes()
        return ledger

    def _enter_segment(self, head: dict[str, Any]) -> bool:
        check_head(head)
        if head.get("whole") and head["segment"] >= self._next_segment:
            self._next_segment = head["segment"]
            self._whole = WholeSegment(head["segment"], head["at"])
        if head["segment"] > self._next_segment:
            raise StorageError(
                f"Segment {self._next_segment} of the ledger is missing, {head['segment']} is there: if this is a copy "
                "of the run's folder, copy all of it."
            )
        if head["segment"] < self._next_segment:
            return True
        self._next_segment += 1
        self.target_world = max(self.target_world, head["target_world"])
        return False

    def _replay(self, line: dict[str, Any]) -> None:
        match line.pop("event"):
            case "run_started":
                self.run_started(line["at"])
            case "attempt_started":
                self.attempt_started(**line)
            case "commit":
                self.commit(**{name: line[name] for name in _COMMIT_FIELDS if name in line})
            case "resumed":
                self.resumed(**line)
            case "attempt_ended":
                self.attempt_ended(**line)
            case "group_down":
                self.group_down(line["attempt"], line["at"])
            case "run_ended":
                self.run_ended(line["at"])
            case "rank":
                self._attempts[line["attempt"]].ranks[line["world_rank"]] = RankBook.from_dict(line)
                hear_late(self._sessions, self._attempts[line["attempt"]], line["world_rank"])
            case "steps":
                steps = self._attempts[line["attempt"]].steps
                if "settled" in line:
                    steps.load(line["settled"])
                for first, times in line["ns"]:
                    for step, ns in enumerate(times, first):
                        steps.add(step, ns)
                steps.first = line["lowest_step"]  # settled time is told by the end of its segment
            case "timeline":
                if 0 <= line["world_rank"] < MAX_RANKS:
                    timeline = self._attempts[line["attempt"]].timeline(line["world_rank"])
                    timeline.put(line["cell_s"], line["first"], line["cells"])
            case "sessions":
                for session, (ended_at, silent) in zip(self._sessions, line["ends"], strict=True):
                    session.ended_at, session.silent = ended_at, silent
            case "seen":
                self._seen(line["at"])
            case other:
                raise ValueError(f"unknown event {other!r}")

    def _news(self) -> list[dict[str, Any]]:
        """What pages and hellos brought since the last segment: ranks as they stand, step time as what was added."""
        touched, self._touched = self._touched, {}
        return take_news(touched, self._attempts, self._last_at)

    def _book(self, attempt: int, world_rank: int, what: str) -> AttemptBook | None:
        book = self._attempts.get(attempt)
        if book is None or not 0 <= world_rank < book.world:
            if (what, attempt, world_rank) not in self._refused:
                logger.warning(
                    "The ledger leaves out a %s: it knows no rank %d in attempt %d.", what, world_rank, attempt
                )
            self._refused.add((what, attempt, world_rank))
            return None
        return book

    def _seen(self, at: float) -> None:
        self._last_at = at if self._last_at is None else max(at, self._last_at)
        if not self._sessions:
            return
        cell_s = cell_length_s(self._last_at - self._sessions[0].started_at)
        if cell_s > self._cell_s:
            self._cell_s = cell_s
            for book in self._attempts.values():
                book.coarsen(cell_s)

    def _note(self, at: float | None, event: str, **fields: Any) -> None:
        if at is not None:
            self._seen(at)
            fields["at"] = at
        line = {"event": event, **fields}
        self._lines.append(line)
        self._history.append(line)

    def _seal(self, lines: Sequence[Mapping[str, Any]], whole_at: float | None = None) -> None:
        segment = seal(self._next_segment, self.target_world, lines, whole_at=whole_at)
        self._segments[segment.number] = segment
        self._next_segment += 1
        self._lines = []
