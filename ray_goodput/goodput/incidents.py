"""Interruptions of a run: what each was, what it cost, and which part of the way back took how long. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.books import AttemptBook
from ray_goodput.goodput.report import DRIVER, Incident

DRIVER_DIED = (
    "The driver ended without a word (SIGKILL, out of memory, or its node was lost): the next one took the run up."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """An attempt as its incident sees it. outcome: "" while it goes on. load_s: of loading a checkpoint, a rank."""

    book: AttemptBook
    outcome: str
    start: float
    end: float
    lost_s: float
    load_s: float


def incidents_of(
    attempts: Sequence[Interrupted], lives: Sequence[tuple[float, float]], *, target_world: int, at: float
) -> tuple[Incident, ...]:
    """The incidents among all attempts of a run, oldest first. lives: of its drivers; at: the end of the books."""
    incidents: list[Incident] = []
    reached: int | None = None
    for i, attempt in enumerate(attempts):
        if attempt.book.last_done is not None:
            reached = attempt.book.last_done
        if attempt.outcome not in ("", "finished", "stopped"):
            incidents.append(_incident(attempt, attempts[i + 1 :], reached, lives, target_world, at))
    return tuple(incidents)


def counted_s(lives: Sequence[tuple[float, float]], at: float) -> float:
    """Seconds of a run's own time up to `at`: its drivers lived from `start` to `end`, between them none passed."""
    return sum(max(0.0, min(at, end) - start) for start, end in lives)


def _incident(
    attempt: Interrupted,
    later: Sequence[Interrupted],
    reached: int | None,
    lives: Sequence[tuple[float, float]],
    target_world: int,
    at: float,
) -> Incident:
    book = attempt.book
    resumed = later[0].book.began if later else None
    # Attempts that never took a step are part of the same outage, each an incident of its own.
    back, stepped = next(((t, a) for a in later if (t := _first_step_at(a.book)) is not None), (at, None))
    down = book.down_at if book.down_at is not None else attempt.end
    marks = [_last_sign(attempt), attempt.end, down, later[0].start if later else at, back]
    for i in range(1, len(marks)):  # in order, whatever was told late
        marks[i] = max(marks[i], marks[i - 1])
    counted = [counted_s(lives, mark) for mark in marks]
    detect, teardown, wait, rest = (b - a for a, b in pairwise(counted))
    load = min(rest, stepped.load_s) if stepped else 0.0
    down_s = max(0.0, counted[-1] - counted[0])
    return Incident(
        attempt=book.attempt,
        kind=attempt.outcome,
        reason=book.reason or (DRIVER_DIED if attempt.outcome == DRIVER else ""),
        ranks=book.lost_ranks,
        nodes=_nodes(book),
        step_reached=reached,
        step_resumed=resumed,
        steps_lost=max(0, (reached or 0) - resumed) if resumed is not None else 0,
        lost_s=attempt.lost_s,
        down_s=down_s,
        detect_s=detect,
        teardown_s=teardown,
        wait_s=wait,
        start_s=rest - load,
        load_s=load,
        replay_s=attempt.lost_s / book.world,
        gpu_s=attempt.lost_s + down_s * target_world,
    )


def load_s(book: AttemptBook) -> float:
    """Seconds of loading a checkpoint, mean over the ranks that were heard of."""
    loads = [rank.ns[Bucket.CKPT_LOAD] / 1e9 for rank in book.ranks.values() if rank.next_record]
    return sum(loads) / len(loads) if loads else 0.0


def _nodes(book: AttemptBook) -> tuple[str, ...]:
    """Where the lost ranks ran."""
    ranks = (book.ranks.get(rank) for rank in book.lost_ranks)
    return tuple(sorted({rank.node for rank in ranks if rank is not None and rank.node}))


def _last_sign(attempt: Interrupted) -> float:
    """When the first rank fell silent, by the coordinator's clock."""
    book = attempt.book
    ranks = [book.ranks.get(r) for r in book.lost_ranks] or list(book.ranks.values())
    signs = [r.started_at + r.life_ns / 1e9 for r in ranks if r is not None and r.started_at is not None]
    return min([*signs, attempt.end])


def _first_step_at(book: AttemptBook) -> float | None:
    """When every rank that stepped had done its first step."""
    ranks = book.ranks.values()
    return max(
        (
            r.started_at + r.first_done_ns / 1e9
            for r in ranks
            if r.started_at is not None and r.first_done_ns is not None
        ),
        default=None,
    )
