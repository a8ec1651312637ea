"""The checkpoint vault of a node: takes over full slots and gets their bytes into storage. No Ray in the class.

It outlives the training processes of its node: a worker that died after staging leaves a slot and a note beside it,
and the next attempt's `adopt` finishes the upload.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ray_goodput.actors.commits import CHECKPOINTS
from ray_goodput.actors.names import parse_attempt_dir
from ray_goodput.actors.process_look import RankLook, kill_ranks, look_at_ranks
from ray_goodput.actors.slot_file import MappedSlot, checksum_extent, copy_extent
from ray_goodput.checkpoint.sidecar import sidecar_path, staged_in
from ray_goodput.core.commit import METADATA_NAME, CheckpointId, LandedSlice, ObjectRecord, StagedSlice
from ray_goodput.errors import FencedError, GoodputError, RunError, StorageAccessError, StorageError
from ray_goodput.goodput.journal import read_journal
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

_AFTER_ALL_ATTEMPTS = sys.maxsize


class CoordinatorPort(Protocol):
    """What a vault asks of the run's coordinator."""

    def landed(self, landed: LandedSlice) -> None: ...

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None: ...


class CheckpointVault:
    """Flush to NVMe, upload, report; local copies stay for a quick restore.

    Thread-safe; each call of `persist` does its work in the caller's thread.

    give_up_after_s: how long an upload is tried again while the store fails. The slot stays taken meanwhile, so at
        most two saves a rank wait, whatever the store does.
    """

    def __init__(
        self,
        *,
        node_id: str,
        store: ObjectStore,
        coordinator: CoordinatorPort,
        local_checkpoints: Path,
        slots: Sequence[Path],
        journals: Path,
        keep_local: int = 2,
        give_up_after_s: float = 900.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._coordinator = coordinator
        self._local = local_checkpoints
        self._slots = slots
        self._journals = journals
        self._keep_local = keep_local
        self._give_up_after_s = give_up_after_s
        self._sleep = sleep
        self._adopting = threading.Lock()
        self._lock = threading.Lock()
        self._landed: dict[int, LandedSlice] = {}  # world rank -> its newest slice in storage
        self._turns: dict[str, threading.Lock] = {}  # slot path -> who works on it
        self._writing: Counter[CheckpointId] = Counter()
        self._kept: CheckpointId | None = None

    def ping(self) -> str:
        """The node's id, as a sign of life."""
        return self._node_id

    def look(self, attempt: int, ranks: Sequence[tuple[int, int]]) -> list[RankLook]:
        """What these processes of this node (world rank, pid) do, with their stacks."""
        return look_at_ranks(self._journals, attempt, ranks)

    def kill(self, ranks: Sequence[tuple[int, int]]) -> list[int]:
        """SIGKILL to these training processes of this node; returns the ranks that got it."""
        return kill_ranks(ranks)

    def persist(self, staged: StagedSlice) -> None:
        """Every extent of the slot is an object in storage afterwards, and the coordinator knows. Idempotent.

        Calls for one slot take turns: the next attempt's `adopt` may meet the call of a worker that is gone.

        Raises:
            FencedError: the slice's attempt was replaced.
            StorageError: the store kept failing for `give_up_after_s`, or can never work (keys, permissions).
        """
        with self._lock:
            turn = self._turns.setdefault(staged.slot_path, threading.Lock())
        with turn:
            landed = self._landed_slice(staged)
            if landed is None:
                with self._in_use(staged.checkpoint):
                    landed = self._put_into_storage(staged)
            self._until_it_works(
                lambda: self._coordinator.landed(landed), what=f"{_title(staged)}: telling the coordinator"
            )
            sidecar_path(staged.slot_path).unlink(missing_ok=True)  # nothing is left for `adopt` to finish
        self._drop_old_copies()

    def _put_into_storage(self, staged: StagedSlice) -> LandedSlice:
        started = time.monotonic()
        folder = staged.checkpoint.folder
        parts = self._flush(staged)

        def upload() -> None:
            for part in parts:
                self._store.upload_file(
                    f"{CHECKPOINTS}/{folder}/{part.record.name}",
                    part.path,
                    offset=part.offset,
                    size_bytes=part.record.size_bytes,
                )

        self._until_it_works(upload, what=f"{_title(staged)}: upload")
        landed = LandedSlice(
            slice=staged,
            objects=tuple(part.record for part in parts),
            node_id=self._node_id,
            upload_s=time.monotonic() - started,
        )
        with self._lock:
            self._landed[staged.world_rank] = landed
        return landed

    def _flush(self, staged: StagedSlice) -> list[_Part]:
        """Copy the slot to NVMe and take checksums; what finds no room there is uploaded from the slot itself."""
        local = self._local / staged.checkpoint.folder
        parts = []
        with MappedSlot(staged.slot_path) as slot:
            for extent in staged.extents:
                path = local / extent.name
                try:
                    local.mkdir(parents=True, exist_ok=True)
                    part = _Part(copy_extent(slot, extent, path), path, 0)
                except OSError as error:
                    logger.warning("No local copy of %s of %s: %s", extent.name, staged.checkpoint.folder, error)
                    record = ObjectRecord(
                        name=extent.name, size_bytes=extent.size_bytes, xxh3_128=checksum_extent(slot, extent)
                    )
                    part = _Part(record, Path(staged.slot_path), extent.offset)
                if extent.name != METADATA_NAME:  # the coordinator writes that one, when all ranks have landed
                    parts.append(part)
        return parts

    def _landed_slice(self, staged: StagedSlice) -> LandedSlice | None:
        with self._lock:
            landed = self._landed.get(staged.world_rank)
        return landed if landed is not None and landed.slice.checkpoint == staged.checkpoint else None

    def keep(self, checkpoint: CheckpointId) -> None:
        """A rank of this node is about to read this checkpoint: its local copy stays until another one is named."""
        with self._lock:
            self._kept = checkpoint

    @contextlib.contextmanager
    def _in_use(self, checkpoint: CheckpointId) -> Iterator[None]:
        with self._lock:
            self._writing[checkpoint] += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing[checkpoint] -= 1

    def land_again(self, step: int | None = None) -> None:
        """Tell the coordinator once more what of `step`, or of every rank's newest save, is in storage: it may have
        died with its notes."""
        with self._lock:
            landed = [part for part in self._landed.values() if step in (None, part.slice.checkpoint.step)]
        for part in landed:
            with contextlib.suppress(FencedError):  # a dead attempt's
                self._coordinator.landed(part)

    def adopt(self, attempt: int) -> None:
        """Finish what workers of attempts before `attempt` left on this node, then clean up after them.

        Staged slices are persisted if their attempt may still commit; journals are handed to the coordinator.
        """
        with self._adopting:
            for folder in sorted(f for root in self._slots for f in root.glob("attempt-*")):
                old = parse_attempt_dir(folder.name)
                if old is None or old >= attempt:
                    continue
                for staged in staged_in(folder):
                    self._adopt_slice(staged)
                shutil.rmtree(folder, ignore_errors=True)
            for path in sorted(self._journals.glob("attempt-*/rank-*.journal")):
                old = parse_attempt_dir(path.parent.name)
                if old is not None and old < attempt:
                    self._adopt_journal(path, old)

    def end_run(self) -> None:
        """The run is over: finish what is still staged, and leave nothing of it on this node but the local copies of
        checkpoints, which make a later restart quick."""
        self.adopt(_AFTER_ALL_ATTEMPTS)
        for folder in (*self._journals.glob("attempt-*"), self._journals):
            _remove_if_empty(folder)
        for root in self._slots:
            _remove_if_empty(root)
            _remove_if_empty(root.parent)

    def _adopt_slice(self, staged: StagedSlice) -> None:
        step, world_rank = staged.checkpoint.step, staged.world_rank
        try:
            self.persist(staged)
            logger.info("Finished the upload of step %d, rank %d, for a worker that is gone.", step, world_rank)
        except FencedError:
            logger.info("The slice of step %d, rank %d belongs to an attempt that was replaced.", step, world_rank)
        except (GoodputError, OSError, ValueError) as error:
            logger.warning("The slice of step %d, rank %d could not be saved: %s", step, world_rank, error)

    def _adopt_journal(self, path: Path, attempt: int) -> None:
        world_rank = int(path.stem.partition("-")[2])
        try:
            self._coordinator.journal_tail(attempt, world_rank, read_journal(path))
        except (GoodputError, OSError, ValueError) as error:
            logger.warning("The journal %s cannot be read; its last second stays unknown: %s", path, error)
        path.unlink(missing_ok=True)
        path.with_suffix(".stacks").unlink(missing_ok=True)  # see `names.stacks_path`

    def _until_it_works(self, action: Callable[[], None], *, what: str) -> None:
        deadline = time.monotonic() + self._give_up_after_s
        pause_s, told = 1.0, False
        while True:
            try:
                return action()
            except StorageAccessError:
                raise
            except (StorageError, RunError) as error:  # the store, or the coordinator, is away
                if time.monotonic() + pause_s > deadline:
                    raise
                if not told:
                    logger.warning("%s failed, trying again for %.0f s: %s", what, self._give_up_after_s, error)
                    told = True
            self._sleep(pause_s)
            pause_s = min(pause_s * 2, 30.0)

    def _drop_old_copies(self) -> None:
        """Keep the local copies that a restore is likely to want: the latest, by attempt and step (after a rollback, an
        older attempt's higher steps are the older ones), and those being written or read."""
        copies = [c for c in map(CheckpointId.parse, _names(self._local)) if c is not None]
        copies.sort(key=lambda c: (c.attempt, c.step))
        with self._lock:
            busy = {c for c, users in self._writing.items() if users > 0} | {self._kept}
            for checkpoint in copies[: -self._keep_local]:
                if checkpoint not in busy:
                    shutil.rmtree(self._local / checkpoint.folder, ignore_errors=True)
            self._writing = Counter({c: users for c, users in self._writing.items() if users > 0})


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not empty, or not there
        folder.rmdir()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class _Part:
    """An object to upload: `record.size_bytes` bytes of the file `path` from `offset` on."""

    record: ObjectRecord
    path: Path
    offset: int


def _title(staged: StagedSlice) -> str:
    return f"Step {staged.checkpoint.step}, rank {staged.world_rank}"
