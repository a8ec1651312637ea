"""Copies of slices on one node's NVMe: made from its own slots, taken from peers, told to the coordinator, dropped.

A copy is `<folder of the checkpoint>/<object name>`, whichever node's rank wrote it. A *note* beside the objects of a
slice (`.held-<5 digits>.json`, version 1) says that they are complete, and is written last.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ray_goodput.actors.slot_file import MappedSlot, copy_extent, record_extent
from ray_goodput.checkpoint.sidecar import landed_from_dict, landed_to_dict
from ray_goodput.checkpoint.sources import verify_file
from ray_goodput.core.commit import METADATA_NAME, CheckpointId, LandedSlice, ObjectRecord, StagedSlice
from ray_goodput.errors import CorruptCheckpointError, FencedError, GoodputError, ObjectNotFoundError
from ray_goodput.storage.disk import TMP_PREFIX, tmp_path

logger = logging.getLogger(__name__)

_NOTE_FORMAT, _NOTE_VERSION = "ray_goodput.held", 1
_MAX_COPIES = 5  # of saves that were never complete anywhere, as far as this node knows


@dataclass(frozen=True, slots=True)
class Part:
    """An object of a slice: `record.size_bytes` bytes of the file `path` from `offset` on."""

    record: ObjectRecord
    path: Path
    offset: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """A slice with checksums. `held`: it lies on NVMe with all it needs, else parts of it are in the slot only."""

    landed: LandedSlice
    parts: tuple[Part, ...]
    held: bool


class NearPort(Protocol):
    """What a node asks of the run's coordinator about copies on nodes."""

    def held(self, landed: LandedSlice, node_id: str) -> CheckpointId | None: ...


class NodeCopies:
    """Thread-safe. `near` is None where nobody chooses among copies on nodes: then no notes are kept."""

    def __init__(self, *, node_id: str, folder: Path, keep: int = 2, near: NearPort | None = None) -> None:
        self._node_id = node_id
        self._folder = folder
        self._keep = keep
        self._near = near
        self._lock = threading.Lock()
        self._turns: dict[tuple[CheckpointId, int], threading.Lock] = {}
        self._writing: Counter[CheckpointId] = Counter()
        self._wanted: CheckpointId | None = None
        self._complete: CheckpointId | None = None

    def describe(self, staged: StagedSlice) -> LandedSlice:
        """The slice with the checksums of its objects, read in the slot."""
        with MappedSlot(staged.slot_path) as slot:
            records = [
                record_extent(slot, e)
                for e in staged.extents
                if e.name != METADATA_NAME  # the coordinator writes that one, when all ranks have landed
            ]
        return self._landed(staged, records)

    def flush(self, staged: StagedSlice) -> Flushed:
        """The slot's bytes are on NVMe with checksums, as far as there is room, and the coordinator knows. Idempotent.

        Raises:
            FencedError: the slice's attempt was replaced.
            OSError: the slot cannot be read.
        """
        with self._lock:
            turn = self._turns.setdefault((staged.checkpoint, staged.world_rank), threading.Lock())
        with turn, self.in_use(staged.checkpoint):
            flushed = self._flushed_before(staged)
            if flushed is None:
                flushed = self._copy_slot(staged)
                if flushed.held and self._near is not None:
                    self._write_note(flushed.landed)
        if flushed.held:
            self._tell(flushed.landed)
        return flushed

    def keep(self, checkpoint: CheckpointId) -> None:
        """A rank of this node is about to read this checkpoint: its copy stays until another one is named."""
        with self._lock:
            self._wanted = checkpoint

    @contextlib.contextmanager
    def in_use(self, checkpoint: CheckpointId) -> Iterator[None]:
        """The copy is being written or read: it is not dropped meanwhile."""
        with self._lock:
            self._writing[checkpoint] += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing[checkpoint] -= 1

    def tell_all(self) -> None:
        """The coordinator knows of every slice held here, and what is of no use to it is gone."""
        for landed in self._notes():
            with contextlib.suppress(FencedError):
                self._tell(landed)

    def receive(self, checkpoint: CheckpointId, name: str, sender: str, offset: int, data: bytes) -> None:
        """A piece of an object of a peer; `received` makes the pieces a copy."""
        path = self._incoming(checkpoint, name, sender)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if offset == 0 else 0), 0o600)
        try:
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    def received(self, landed: LandedSlice, sender: str) -> None:
        """All pieces of a peer's slice were sent: verified, they are a copy that the coordinator knows.

        Raises:
            CorruptCheckpointError: bytes are missing or changed.
            FencedError: the slice's attempt was replaced.
        """
        checkpoint = landed.slice.checkpoint
        with self.in_use(checkpoint):
            folder = self._folder / checkpoint.folder
            folder.mkdir(parents=True, exist_ok=True)
            if landed.slice.metadata is not None:
                self.receive(checkpoint, METADATA_NAME, sender, 0, landed.slice.metadata)
            names = [entry.name for entry in landed.objects]
            for entry in landed.objects:
                incoming = self._incoming(checkpoint, entry.name, sender)
                if entry.size_bytes == 0:
                    incoming.touch()
                verify_file(incoming, entry)
            for name in [*names, *([METADATA_NAME] if landed.slice.metadata is not None else [])]:
                self._incoming(checkpoint, name, sender).replace(folder / name)
            self._write_note(landed)
        self._tell(landed)
        self.drop_old()

    def read(self, checkpoint: CheckpointId, name: str, offset: int, size_bytes: int) -> bytes:
        """A piece of a copy, for a peer; shorter at the end of the object.

        Raises:
            ObjectNotFoundError: there is no such copy.
        """
        path = self._folder / checkpoint.folder / name
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(size_bytes)
        except OSError as error:
            raise ObjectNotFoundError(
                f"Node {self._node_id} has no copy of {name} of {checkpoint.folder} ({error.strerror})."
            ) from error

    def drop_old(self) -> None:
        """Keep the copies that a restore is likely to want: the latest, by attempt and step (after a rollback, an
        older attempt's higher steps are the older ones), those since the newest save that is complete on nodes, and
        those being written or read."""
        copies = [c for c in map(CheckpointId.parse, _names(self._folder)) if c is not None]
        copies.sort(key=lambda c: c.made, reverse=True)
        with self._lock:
            busy = {c for c, users in self._writing.items() if users > 0} | {self._wanted}
            since = self._complete
            for number, checkpoint in enumerate(copies):
                old = self._near is None or (since is not None and checkpoint.made < since.made)
                if checkpoint not in busy and number >= (self._keep if old else _MAX_COPIES):
                    self._remove(checkpoint)
            self._writing = Counter({c: users for c, users in self._writing.items() if users > 0})
            self._turns = {key: turn for key, turn in self._turns.items() if key[0] in copies}

    def _copy_slot(self, staged: StagedSlice) -> Flushed:
        """What finds no room on NVMe is left in the slot."""
        local = self._folder / staged.checkpoint.folder
        parts, held = [], True
        with MappedSlot(staged.slot_path) as slot:
            for extent in staged.extents:
                path = local / extent.name
                try:
                    local.mkdir(parents=True, exist_ok=True)
                    part = Part(copy_extent(slot, extent, path), path, 0)
                except OSError as error:
                    held = False
                    logger.warning("No local copy of %s of %s: %s", extent.name, staged.checkpoint.folder, error)
                    part = Part(record_extent(slot, extent), Path(staged.slot_path), extent.offset)
                if extent.name != METADATA_NAME:  # the coordinator writes that one, when all ranks have landed
                    parts.append(part)
        return Flushed(self._landed(staged, [part.record for part in parts]), tuple(parts), held)

    def _landed(self, staged: StagedSlice, records: Sequence[ObjectRecord]) -> LandedSlice:
        return LandedSlice(slice=staged, objects=tuple(records), node_id=self._node_id, upload_s=0.0)

    def _flushed_before(self, staged: StagedSlice) -> Flushed | None:
        landed = self._read_note(self._note_path(staged.checkpoint, staged.world_rank))
        if landed is None or landed.slice.slot_path != staged.slot_path:
            return None  # a slot's name is never given twice: that is another save, whatever its number says
        folder = self._folder / staged.checkpoint.folder
        parts = tuple(Part(entry, folder / entry.name, 0) for entry in landed.objects)
        return Flushed(replace(landed, slice=staged), parts, True) if all(p.path.is_file() for p in parts) else None

    def _tell(self, landed: LandedSlice) -> None:
        if self._near is None:
            return
        try:
            complete = self._near.held(landed, self._node_id)
        except FencedError:
            with self._lock:
                self._remove(landed.slice.checkpoint)
            raise
        except (GoodputError, ValueError) as error:  # it is told again before the next restore
            logger.warning("The coordinator was not told of a copy of step %d: %s", landed.slice.checkpoint.step, error)
            return
        if complete is not None:
            with self._lock:
                self._complete = complete

    def _write_note(self, landed: LandedSlice) -> None:
        path = self._note_path(landed.slice.checkpoint, landed.slice.world_rank)
        body = {"format": _NOTE_FORMAT, "version": _NOTE_VERSION, **landed_to_dict(landed)}
        tmp = tmp_path(path)
        tmp.write_text(json.dumps(body))
        tmp.replace(path)

    def _notes(self) -> list[LandedSlice]:
        found = [self._read_note(path) for path in sorted(self._folder.glob("step-*/.held-*.json"))]
        return [landed for landed in found if landed is not None]

    def _read_note(self, path: Path) -> LandedSlice | None:
        try:
            body = json.loads(path.read_bytes())
            if body["format"] == _NOTE_FORMAT and body["version"] == _NOTE_VERSION:
                return landed_from_dict(body)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, CorruptCheckpointError) as error:
            logger.warning("The note %s cannot be read, the copy is not used: %s", path, error)
        return None

    def _note_path(self, checkpoint: CheckpointId, world_rank: int) -> Path:
        return self._folder / checkpoint.folder / f".held-{world_rank:05d}.json"

    def _incoming(self, checkpoint: CheckpointId, name: str, sender: str) -> Path:
        return self._folder / checkpoint.folder / f"{TMP_PREFIX}{name}-from-{sender}"

    def _remove(self, checkpoint: CheckpointId) -> None:
        folder = self._folder / checkpoint.folder
        for note in folder.glob(".held-*.json"):  # first: they vouch for the rest
            note.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
