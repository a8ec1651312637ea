"""Which checkpoints of a run exist, which one to resume from, which may go. Pure: the caller does the I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ray_goodput.core.commit import CheckpointId, CommitRecord


@dataclass(slots=True)
class Catalog:
    """The committed checkpoints of one run, and those found damaged when read.

    Not thread-safe: its owner locks.
    """

    _records: dict[CheckpointId, CommitRecord] = field(default_factory=dict[CheckpointId, CommitRecord])
    _bad: dict[CheckpointId, str] = field(default_factory=dict[CheckpointId, str])

    def add(self, record: CommitRecord) -> None:
        self._records[record.checkpoint] = record

    def mark_bad(self, checkpoint: CheckpointId, reason: str) -> None:
        """Never offer this checkpoint again; it stays in storage for a person to look at."""
        self._bad[checkpoint] = reason

    def forget(self, checkpoint: CheckpointId) -> None:
        self._records.pop(checkpoint, None)

    def get(self, checkpoint: CheckpointId) -> CommitRecord | None:
        return self._records.get(checkpoint)

    @property
    def bad(self) -> dict[CheckpointId, str]:
        return dict(self._bad)

    def newest_first(self) -> Iterator[CommitRecord]:
        """Commits that are not known to be damaged. Newest = largest step, then latest attempt."""
        for checkpoint in sorted(self._records, reverse=True):
            if checkpoint not in self._bad:
                yield self._records[checkpoint]

    def newest(self) -> CommitRecord | None:
        return next(self.newest_first(), None)

    def prunable(self, *, keep_last: int, keep_every: int | None) -> list[CheckpointId]:
        """Commits the retention policy lets go, oldest first.

        Kept: the newest `keep_last` good ones, steps that are multiples of `keep_every`, and damaged ones newer than
        the oldest kept (evidence). The newest good commit is therefore never in the list.
        """
        good = [record.checkpoint for record in self.newest_first()]
        kept = set(good[:keep_last])
        oldest_kept = min(kept, default=None)
        if keep_every is not None:
            kept |= {c for c in good if c.step % keep_every == 0}
        return [
            c
            for c in sorted(self._records)
            if c not in kept and not (c in self._bad and oldest_kept is not None and c > oldest_kept)
        ]


def abandoned_folders(
    folders: Iterable[CheckpointId], *, committed: Iterable[CheckpointId], fenced_below_attempt: int
) -> list[CheckpointId]:
    """Folders without a commit whose attempt is fenced: no living writer can complete them any more."""
    done = set(committed)
    return sorted(f for f in folders if f not in done and f.attempt < fenced_below_attempt)
