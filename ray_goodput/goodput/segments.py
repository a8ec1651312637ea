"""The ledger's objects: numbered JSON lines that never change, and which of them count once some were compacted. Pure.

A *whole* segment holds everything that was known when it was sealed, so those with lower numbers are not needed any
more, and whether they are still there makes no difference. README.md of this folder has the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ray_goodput.errors import StorageError
from ray_goodput.goodput.books import AttemptBook, Session

FORMAT = "ray_goodput.ledger"
VERSION = 3
_Line = TypeVar("_Line", bound=str | bytes)
READABLE_VERSIONS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class LedgerSegment:
    """One immutable part of the ledger: its number, object name and bytes (UTF-8, one JSON object a line)."""

    number: int
    data: bytes

    @property
    def name(self) -> str:
        return f"ledger-{self.number:08d}.jsonl"


@dataclass(frozen=True, slots=True)
class WholeSegment:
    """The newest whole segment: segments below `number` are superseded since `at` (the coordinator's wall clock)."""

    number: int
    at: float


def seal(
    number: int, target_world: int, events: Sequence[Mapping[str, Any]], *, whole_at: float | None = None
) -> LedgerSegment:
    """The segment of these events; with `whole_at` they are everything, as of that moment."""
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION, "segment": number, "target_world": target_world}
    if whole_at is not None:
        head |= {"whole": True, "at": whole_at}
    lines = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [head, *events])
    return LedgerSegment(number, lines.encode())


def take_news(
    touched: Iterable[tuple[int, int]], attempts: Mapping[int, AttemptBook], last_at: float | None
) -> list[dict[str, Any]]:
    """The events of what pages and hellos of these ranks (attempt, world_rank) brought since the last call: ranks as
    they stand, step time and timelines as what was added."""
    touched = list(touched)
    news: list[dict[str, Any]] = []
    for attempt, world_rank in touched:
        rank = attempts[attempt].ranks[world_rank]
        whose = {"attempt": attempt, "world_rank": world_rank}
        news.append({"event": "rank", **whose, **rank.to_dict()})
        timeline = attempts[attempt].timelines.get(world_rank)
        if timeline and (changes := timeline.take_changes()):
            first, cells = changes
            news.append({"event": "timeline", **whose, "cell_s": timeline.cell_s, "first": first, "cells": cells})
    for attempt in dict.fromkeys(attempt for attempt, _ in touched):
        steps = attempts[attempt].steps
        if runs := steps.take_changes():
            news.append({"event": "steps", "attempt": attempt, "lowest_step": steps.first, "ns": runs})
    if news and last_at is not None:
        news.append({"event": "seen", "at": last_at})
    return news


def everything(
    history: Sequence[Mapping[str, Any]],
    attempts: Mapping[int, AttemptBook],
    sessions: Sequence[Session],
    last_at: float | None,
) -> list[Mapping[str, Any]]:
    """The events of a whole segment: those of the past (`history`), and the books as they stand."""
    lines = list(history)
    for attempt, book in attempts.items():
        for world_rank, rank in book.ranks.items():
            whose = {"attempt": attempt, "world_rank": world_rank}
            lines.append({"event": "rank", **whose, **rank.to_dict()})
            if timeline := book.timelines.get(world_rank):
                cells = timeline.all_cells()
                lines.append({"event": "timeline", **whose, "cell_s": timeline.cell_s, "first": 0, "cells": cells})
        if book.steps.first is not None:
            settled, runs = book.steps.dump()
            steps = {"attempt": attempt, "lowest_step": book.steps.first, "settled": settled, "ns": runs}
            lines.append({"event": "steps", **steps})
    # When a driver that died without a word was last heard of does not follow from the other lines.
    lines.append({"event": "sessions", "ends": [[s.ended_at, s.silent] for s in sessions]})
    if last_at is not None:
        lines.append({"event": "seen", "at": last_at})
    return lines


def current_lines(lines: Iterable[_Line]) -> list[_Line]:
    """The lines that count, of all segments oldest first: from the newest whole segment on."""
    all_lines = list(lines)
    for i in range(len(all_lines) - 1, 0, -1):
        if _is_whole(all_lines[i]):
            return all_lines[i:]
    return all_lines


def check_head(head: Mapping[str, Any]) -> None:
    """Raises:
    StorageError: a release that knows more than this one wrote the segment, or something else altogether.
    """
    if head["format"] != FORMAT or head["version"] not in READABLE_VERSIONS:
        raise StorageError(
            f"The ledger has format {head['format']!r} version {head['version']}, this release reads {FORMAT!r} "
            f"up to version {VERSION}: use the release that wrote it."
        )


def _is_whole(line: str | bytes) -> bool:
    text = line if isinstance(line, bytes) else line.encode()
    if not text.startswith(b'{"format"') or b'"whole"' not in text:
        return False
    try:
        return json.loads(text).get("whole") is True
    except ValueError:  # a damaged line is told of where it is read
        return False
