"""The checkpoint vault of a node: takes over full slots and gets their bytes into storage. No Ray in the class.

It outlives the training processes of its node: a worker that died after staging leaves a slot and a note beside it,
and the next attempt's `adopt` finishes the upload.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ray_goodput.actors.commits import CHECKPOINTS
from ray_goodput.actors.names import attempt_dir, parse_attempt_dir
from ray_goodput.checkpoint.slots import sidecar_path, staged_in
from ray_goodput.core.commit import METADATA_NAME, CheckpointId, Extent, LandedSlice, ObjectRecord, StagedSlice
from ray_goodput.errors import FencedError, GoodputError, StorageAccessError, StorageError
from ray_goodput.goodput.journal import read_journal
from ray_goodput.storage.checksum import Checksum
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20
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

    def ping(self) -> str:
        """The node's id, as a sign of life."""
        return self._node_id

    def persist(self, staged: StagedSlice) -> None:
        """Every extent of the slot is an object in storage afterwards, and the coordinator knows. Idempotent.

        Raises:
            FencedError: the slice's attempt was replaced.
            StorageError: the store kept failing for `give_up_after_s`, or can never work (keys, permissions).
        """
        started = time.monotonic()
        folder = staged.checkpoint.folder
        local = self._local / folder
        local.mkdir(parents=True, exist_ok=True)
        objects = []
        with _mapped(staged.slot_path) as slot:
            for extent in staged.extents:
                record = _flush(slot, extent, local / extent.name)
                if extent.name != METADATA_NAME:  # the coordinator writes that one, when all ranks have landed
                    objects.append(record)

        def upload() -> None:
            for record in objects:
                self._store.upload_file(f"{CHECKPOINTS}/{folder}/{record.name}", local / record.name)
            landed = LandedSlice(
                slice=staged, objects=tuple(objects), node_id=self._node_id, upload_s=time.monotonic() - started
            )
            self._coordinator.landed(landed)
            with self._lock:
                self._landed[staged.world_rank] = landed

        self._until_it_works(upload, what=f"Step {staged.checkpoint.step}, rank {staged.world_rank}")
        sidecar_path(staged.slot_path).unlink(missing_ok=True)  # nothing is left for `adopt` to finish
        self._drop_old_copies()

    def land_again(self, step: int) -> None:
        """Tell the coordinator once more what of `step` is in storage: it may have died with its notes."""
        with self._lock:
            landed = [part for part in self._landed.values() if part.slice.checkpoint.step == step]
        for part in landed:
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

    def _until_it_works(self, action: Callable[[], None], *, what: str) -> None:
        deadline = time.monotonic() + self._give_up_after_s
        pause_s, told = 1.0, False
        while True:
            try:
                return action()
            except StorageAccessError:
                raise
            except StorageError as error:
                if time.monotonic() + pause_s > deadline:
                    raise
                if not told:
                    logger.warning("%s: upload failed, trying again for %.0f s: %s", what, self._give_up_after_s, error)
                    told = True
            self._sleep(pause_s)
            pause_s = min(pause_s * 2, 30.0)

    def _drop_old_copies(self) -> None:
        folders = sorted(c for c in map(CheckpointId.parse, _names(self._local)) if c is not None)
        for checkpoint in folders[: -self._keep_local]:
            shutil.rmtree(self._local / checkpoint.folder, ignore_errors=True)


def journal_path(journals: Path, attempt: int, world_rank: int) -> Path:
    return attempt_dir(journals, attempt) / f"rank-{world_rank:05d}.journal"


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not empty, or not there
        folder.rmdir()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


class _mapped:
    """A file as a read-only memoryview; an empty file is an empty view."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")

    def __enter__(self) -> memoryview:
        with open(self._path, "rb") as file:
            if os.fstat(file.fileno()).st_size:
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                self._view = memoryview(self._map)
        return self._view

    def __exit__(self, *exc: object) -> None:
        self._view.release()
        if self._map is not None:
            self._map.close()


def _flush(slot: memoryview, extent: Extent, path: Path) -> ObjectRecord:
    """Copy one extent to `path` and take its checksum on the way. Not fsynced: a torn copy fails its checksum."""
    checksum = Checksum()
    part = path.with_name(f".tmp-{path.name}")
    end = extent.offset + extent.size_bytes
    with open(part, "wb") as file:
        for start in range(extent.offset, end, _CHUNK_BYTES):
            chunk = slot[start : min(start + _CHUNK_BYTES, end)]
            checksum.update(chunk)
            file.write(chunk)
            chunk.release()
    os.replace(part, path)
    return ObjectRecord(name=extent.name, size_bytes=extent.size_bytes, xxh3_128=checksum.hexdigest())
