"""Where the objects of one committed checkpoint can be read: local files, each verified against the commit record."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from ray_goodput.core.commit import CommitRecord, ObjectRecord
from ray_goodput.errors import CorruptCheckpointError, ObjectNotFoundError, StorageError
from ray_goodput.storage.checksum import checksum_file
from ray_goodput.storage.disk import tmp_path
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

Tier = Literal["local", "peer", "storage"]
_FAR_TO_NEAR: tuple[Tier, ...] = ("storage", "peer", "local")


def farthest(tiers: Iterable[Tier]) -> Tier:
    """The farthest of the places that had to be asked; "local" if none was."""
    asked = set(tiers)
    for tier in _FAR_TO_NEAR:
        if tier in asked:
            return tier
    return "local"


class CheckpointSource(Protocol):
    """One committed checkpoint. Thread-safe."""

    @property
    def record(self) -> CommitRecord: ...

    @property
    def tier(self) -> Tier:
        """The farthest place that had to be asked so far."""
        ...

    def path(self, name: str) -> Path:
        """A local file with exactly the bytes the record promises for object `name`.

        Raises:
            CorruptCheckpointError: size or checksum differ from the record.
            ObjectNotFoundError: the record has no such object, or it is gone.
        """
        ...


def record_of(record: CommitRecord, name: str) -> ObjectRecord:
    """The record's entry for an object.

    Raises:
        ObjectNotFoundError: it has none.
    """
    for entry in record.objects:
        if entry.name == name:
            return entry
    raise ObjectNotFoundError(
        f"The commit of {record.checkpoint.folder} has no object {name!r} ({len(record.objects)} others)."
    )


def verify_file(path: Path, entry: ObjectRecord) -> None:
    """The file's bytes are those of the record.

    Raises:
        CorruptCheckpointError: another size or checksum, or the file cannot be read.
    """
    try:
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise CorruptCheckpointError(f"{path} has {size} bytes, the commit says {entry.size_bytes}.")
        found = checksum_file(path)
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read ({error}).") from error
    if found != entry.xxh3_128:
        raise CorruptCheckpointError(
            f"{path} has checksum {found}, the commit says {entry.xxh3_128}: bytes were changed."
        )


class FetchedSource(ABC):
    """Objects fetched to this node, each once: its ranks share `cache_dir` and wait for each other.

    Every process verifies what it reads, once. A file in the folder that does not verify is fetched again, once.
    """

    tier: Tier

    def __init__(self, record: CommitRecord, tier: Tier, cache_dir: str | Path) -> None:
        self.record = record
        self.tier = tier
        self._cache_dir = Path(cache_dir)
        self._verified = _OncePerName()

    @abstractmethod
    def _download(self, entry: ObjectRecord, tmp: Path) -> None:
        """The object's verified bytes are in `tmp`."""

    def path(self, name: str) -> Path:
        entry = record_of(self.record, name)
        return self._verified.get(name, lambda: self._fetched(entry))

    def _fetched(self, entry: ObjectRecord) -> Path:
        try:
            return self._fetch(entry)
        except OSError as error:  # a rank must not leave by an error that callers cannot tell from a user's
            raise StorageError(
                f"{entry.name} ({entry.size_bytes:,} bytes) cannot be kept in {self._cache_dir} ({error}): give the "
                "node's local directory (RAY_GOODPUT_LOCAL_DIR) room for a checkpoint."
            ) from error

    def _fetch(self, entry: ObjectRecord) -> Path:
        path = self._cache_dir / entry.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".lock-{path.name}")):
            if path.exists():
                try:
                    verify_file(path, entry)
                    return path
                except CorruptCheckpointError as error:
                    logger.warning("%s It is fetched again.", error)
                    path.unlink(missing_ok=True)
            tmp = tmp_path(path)
            try:
                self._download(entry, tmp)
                tmp.replace(path)
            finally:
                tmp.unlink(missing_ok=True)
        return path


class StoreSource(FetchedSource):
    """Objects from a store, each downloaded once a node."""

    def __init__(self, record: CommitRecord, store: ObjectStore, folder: str, cache_dir: str | Path) -> None:
        """`folder`: the checkpoint's folder inside `store`. `cache_dir`: node-local, for this checkpoint alone."""
        super().__init__(record, "storage", cache_dir)
        self._store = store
        self._folder = folder.rstrip("/")

    def _download(self, entry: ObjectRecord, tmp: Path) -> None:
        key = f"{self._folder}/{entry.name}" if self._folder else entry.name
        self._store.download_file(key, tmp)
        try:
            verify_file(tmp, entry)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{self._store.uri}/{key} is damaged: {error}") from error


class LocalFirstSource:
    """A node's own copies where they verify, else `fallback`; without one, a missing copy is an error.

    local_dirs: folders that hold objects of this checkpoint under their own names (a vault's copies).
    """

    def __init__(
        self, record: CommitRecord, local_dirs: Sequence[str | Path], fallback: CheckpointSource | None = None
    ) -> None:
        self.record = record
        self.tier: Tier = "local"
        self._local_dirs = [Path(folder) for folder in local_dirs]
        self._fallback = fallback
        self._verified = _OncePerName()

    def path(self, name: str) -> Path:
        entry = record_of(self.record, name)
        return self._verified.get(name, lambda: self._find(entry))

    def _find(self, entry: ObjectRecord) -> Path:
        damage: CorruptCheckpointError | None = None
        for folder in self._local_dirs:
            path = folder / entry.name
            if not path.is_file():
                continue
            try:
                verify_file(path, entry)
                return path
            except CorruptCheckpointError as error:
                logger.warning("A local copy of a checkpoint is damaged and not used: %s", error)
                damage = error
        if self._fallback is not None:
            path = self._fallback.path(entry.name)
            self.tier = farthest([self.tier, self._fallback.tier])
            return path
        if damage is not None:
            raise damage
        raise ObjectNotFoundError(
            f"No local copy of {entry.name!r} of {self.record.checkpoint.folder} in {list(map(str, self._local_dirs))}."
        )


class _OncePerName:
    """Paths that were found already; different names are looked for at the same time, each only by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._paths: dict[str, Path] = {}

    def get(self, name: str, find: Callable[[], Path]) -> Path:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._paths:
                self._paths[name] = find()
            return self._paths[name]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process of the node at a time; the kernel lets go of the lock when its holder dies."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
