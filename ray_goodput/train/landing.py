"""How ranks without a coordinator commit together: each notes in storage what it has uploaded, rank 0 reads the notes.

No collective runs in a background thread, and no connection has to live as long as an upload. Formats, version 1:
`landing/<checkpoint folder>/rank-<5 digits>.json` holds a landed slice, and goes when its checkpoint is committed;
`attempts/attempt-<4 digits>.json` says that an attempt has begun, and that those before it may not commit.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from ray_goodput.actors.commits import CommitLog
from ray_goodput.actors.names import parse_attempt_dir
from ray_goodput.checkpoint.sidecar import landed_from_dict, landed_to_dict
from ray_goodput.core.commit import CheckpointId, LandedSlice
from ray_goodput.errors import CorruptCheckpointError, FencedError, StorageError
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

LANDING, ATTEMPTS = "landing", "attempts"
_POLL_S = 0.3


class LandingBoard:
    """The notes of one run. Thread-safe; every method is some storage calls."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def begin_attempt(self, at_least: int) -> int:
        """A number above that of every attempt so far, noted: attempts before it can commit no more."""
        attempt = max([at_least, *(number + 1 for number in self._attempts())])
        while not self._store.create(f"{ATTEMPTS}/attempt-{attempt:04d}.json", b"{}"):
            attempt += 1
        return attempt

    def newest_attempt(self) -> int:
        return max(self._attempts(), default=0)

    def post(self, landed: LandedSlice) -> None:
        """Rank 0 can read that this slice's objects are in storage."""
        staged = landed.slice
        key = f"{LANDING}/{staged.checkpoint.folder}/rank-{staged.world_rank:05d}.json"
        self._store.put(key, json.dumps(landed_to_dict(landed)).encode())

    def read(self, checkpoint: CheckpointId) -> list[LandedSlice]:
        """What has landed of a checkpoint so far.

        Raises:
            CorruptCheckpointError: a note cannot be read.
        """
        keys = [info.key for info in self._store.list(f"{LANDING}/{checkpoint.folder}")]
        return [_landed_from_json(self._store.get(key)) for key in keys]

    def waiting(self) -> list[CheckpointId]:
        """Checkpoints of which something has landed, oldest first."""
        ids = map(CheckpointId.parse, self._store.list_folders(LANDING))
        return sorted(checkpoint for checkpoint in ids if checkpoint is not None)

    def clear(self, checkpoint: CheckpointId) -> None:
        self._store.delete([info.key for info in self._store.list(f"{LANDING}/{checkpoint.folder}")])

    def _attempts(self) -> list[int]:
        names = [info.key.rpartition("/")[2].removesuffix(".json") for info in self._store.list(ATTEMPTS)]
        return [number for number in map(parse_attempt_dir, names) if number is not None]


class BoardForVault:
    """What a vault tells the run's coordinator where there is none: noted on the board, for rank 0."""

    def __init__(self, board: LandingBoard, run_id: str) -> None:
        self._board = board
        self._run_id = run_id

    def identity(self) -> str:
        return self._run_id

    def landed(self, landed: LandedSlice) -> None:
        self._board.post(landed)

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None:
        return None


class Committer:
    """Rank 0's thread that turns landed slices into commits, and prunes. `expect` each save; `close` at the end."""

    def __init__(self, log: CommitLog, board: LandingBoard, *, attempt: int, world_size: int) -> None:
        self._log = log
        self._board = board
        self._attempt = attempt
        self._world_size = world_size
        self._waiting: set[CheckpointId] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self.fenced: FencedError | None = None

    def start(self) -> None:
        self._thread.start()

    def expect(self, checkpoint: CheckpointId) -> None:
        """A save of all ranks has begun."""
        with self._changed:
            self._waiting.add(checkpoint)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """The thread has ended; what has not landed by now stays uncommitted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def commit_if_whole(self, checkpoint: CheckpointId, world_size: int | None = None) -> bool:
        """Commit `checkpoint` if all its slices have landed; True if nothing is left to do for it.

        Raises:
            FencedError: a later attempt of the run has begun.
        """
        landed = self._board.read(checkpoint)
        if not landed or len(landed) < (world_size or landed[0].slice.world_size):
            return False
        newest = self._board.newest_attempt()
        if newest > self._attempt:
            raise FencedError(
                f"Attempt {newest} of this run has begun: attempt {self._attempt} can commit no more. Stop this job."
            )
        for part in landed:
            self._log.landed(part)
        self._board.clear(checkpoint)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if self._closed:
                    return
                waiting = sorted(self._waiting)
            committed = [checkpoint for checkpoint in waiting if self._try(checkpoint)]
            with self._changed:
                # A rank uploads its saves in order: what an older one lacks will never come.
                self._waiting = {c for c in self._waiting if not committed or c > max(committed)}
                if self._waiting and not self._closed:
                    self._changed.wait(_POLL_S)

    def _try(self, checkpoint: CheckpointId) -> bool:
        try:
            if not self.commit_if_whole(checkpoint, self._world_size):
                return False
        except FencedError as error:
            self.fenced = error
            return True
        except (StorageError, CorruptCheckpointError) as error:  # the next round tries again
            logger.warning("The commit of step %d is tried again: %s", checkpoint.step, error)
            return self._log.is_committed(checkpoint)  # else its notes are gone and it would be waited for in vain
        try:
            self._log.prune()
        except StorageError as error:
            logger.warning("Old checkpoints stay until the next commit: %s", error)
        return True


def _landed_from_json(data: bytes) -> LandedSlice:
    try:
        return landed_from_dict(json.loads(data))
    except ValueError as error:
        raise CorruptCheckpointError(f"A note about a landed slice cannot be read ({error!r}).") from error
