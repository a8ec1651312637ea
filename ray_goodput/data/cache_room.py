"""Room in the cache folder: reserved before a byte is written, made by eviction, never by breaking an open file.

A reservation is a folder `<root>/tmp/<random>-<bytes>` with a file `lock` in it, locked by its owner for as long as
it lives. Its bytes count as used from the start; a folder whose lock is free belonged to a process that died, and
whoever looks next removes it. Decisions are taken under `<root>/admission.lock`, held for one look at the folder.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ray_goodput.data.cache_lock import is_linked, lock_file, try_lock
from ray_goodput.errors import CacheFullError
from ray_goodput.gates import gate
from ray_goodput.storage.disk import free_bytes, fsync_folder

logger = logging.getLogger(__name__)

SUFFIX = ".arrow"
_NAME = re.compile(r"[0-9a-f]{32}")
_RESERVATION = re.compile(r"[0-9a-f]{16}-(\d+)")
_ADMISSION_TIMEOUT_S = 30.0
_AWAITED_TIMEOUT_S = 10.0  # twice for a data shard; together well below a worker's wait for its node's actor
_AWAITED_POLL_S, _AWAITED_DECIDE_S = 0.02, 1.0
_NEVER = float("inf")

Ranking = Callable[[], Mapping[str, float]]
"""Content names that are needed soon, and how far ahead each is: 0 is now, the unit is free."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One file of the cache as a look at the folder shows it."""

    name: str
    path: Path
    size_bytes: int
    used_at_s: float


class CacheRoom:
    """Reserves and evicts in one cache folder. Thread-safe; processes agree by flock alone.

    limit_bytes: for everything in the folder, of all runs; None: only the free disk counts.
    min_free_bytes: of the disk, left for others.
    """

    def __init__(self, root: Path, *, limit_bytes: int | None, min_free_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.min_free_bytes = min_free_bytes
        self.ranking: Ranking | None = None
        self._scratch = root / "tmp"

    def files(self) -> Iterator[CachedFile]:
        """Every committed file, in no order. A file that goes meanwhile is left out."""
        for entry in self._own_files(SUFFIX):
            try:
                stat = entry.stat()
            except OSError:
                continue
            yield CachedFile(entry.name[: -len(SUFFIX)], Path(entry.path), stat.st_size, stat.st_atime)

    def _own_files(self, suffix: str) -> Iterator[os.DirEntry[str]]:
        """Files of the cache's own names: whoever takes another folder for a cache shall lose nothing there."""
        for folder in _scandir(self.root):
            if len(folder.name) != 2 or not folder.is_dir():
                continue
            for entry in _scandir(folder.path):
                name = entry.name.removesuffix(suffix)
                if name != entry.name and name[:2] == folder.name and _NAME.fullmatch(name):
                    yield entry

    def _reservations(self) -> Iterator[tuple[os.DirEntry[str], int]]:
        """Folders of reservations, and the bytes of each."""
        for entry in _scandir(self._scratch):
            if match := _RESERVATION.fullmatch(entry.name):
                yield entry, int(match[1])

    @contextmanager
    def reserve(self, size_bytes: int, what: str | None) -> Iterator[Path]:
        """An empty folder in which the caller may write `size_bytes`; removed at the end, with what is left in it.

        what: content name of the data shard it is for; with a ranking, nothing needed sooner is evicted for it. None:
        a batch waits for it. Then the reservations of others, which soon become files, are waited for, and at last all
        that is not open may go.

        Raises:
            CacheFullError: not even eviction makes that much room.
        """
        deadline = time.monotonic() + _AWAITED_TIMEOUT_S
        while True:
            with self._admission():
                # Nobody waits here with a reservation of its own, so those of others come to an end.
                others = self._reservation_names()
                hopeless = self.limit_bytes is not None and size_bytes > self.limit_bytes
                patient = what is None and bool(others) and not hopeless and time.monotonic() < deadline
                try:
                    folder, lock = self._reserved(size_bytes, what, spare_now=what is not None or patient)
                    break
                except CacheFullError:
                    if not patient:
                        raise
            # Other processes tell nobody. The folder of reservations is small; a whole look is taken when it changes,
            # or now and then, since its owners may die.
            decide_at = time.monotonic() + _AWAITED_DECIDE_S
            while self._reservation_names() == others and time.monotonic() < decide_at:
                time.sleep(_AWAITED_POLL_S)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def _reservation_names(self) -> set[str]:
        return {entry.name for entry, _ in self._reservations()}

    def _reserved(self, size_bytes: int, what: str | None, *, spare_now: bool) -> tuple[Path, int]:
        """The folder of a new reservation, and its lock, held. Under the admission lock."""
        self._make_room(size_bytes, what, spare_now=spare_now)
        folder = self._scratch / f"{secrets.token_hex(8)}-{size_bytes}"
        folder.mkdir(parents=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try_lock(lock)
        return folder, lock

    def publish(self, folder: Path, written: Path, path: Path) -> None:
        """The file `written` in the reservation `folder` becomes `path`, and the reservation ends in the same moment:
        nobody who decides about room sees its bytes twice, or not at all."""
        gate("disk", path=path)
        with self._admission():
            written.replace(path)
            shutil.rmtree(folder, ignore_errors=True)
        fsync_folder(path.parent)

    def evict(self, need_bytes: int, what: str | None = None, *, spare_now: bool = False) -> tuple[int, int]:
        """Removes files until `need_bytes` are freed or none is left that may go; returns (bytes, files) removed.

        First what the ranking does not know, least recently opened first; then by the ranking, farthest first, down to
        `what`; without it, all. With `spare_now` nothing that is needed now, and nothing at all if that is not enough.
        """
        ranks = self.ranking() if self.ranking is not None else {}
        own = ranks.get(what, _NEVER) if what is not None else 0.0 if spare_now else -1.0
        candidates = [(ranks.get(file.name, _NEVER), file) for file in self.files()]
        candidates = [(use, file) for use, file in candidates if use > own or use == _NEVER]
        if spare_now and sum(file.size_bytes for _, file in candidates) < need_bytes:
            return 0, 0  # it would not be enough, and others would take it
        candidates.sort(key=lambda pair: (-pair[0], pair[1].used_at_s))
        freed = count = 0
        for _, file in candidates:
            if freed >= need_bytes:
                break
            if file.name != what and remove_unless_open(file.path):
                freed += file.size_bytes
                count += 1
        if count:
            logger.debug("evicted %d files, %d bytes, from the cache %s", count, freed, self.root)
            self.on_evicted(count)
        return freed, count

    def on_evicted(self, count: int) -> None:
        """Called after each eviction; the cache counts there."""

    def clean(self) -> int:
        """Removes what dead processes left: reservations and lock files whose lock is free; returns how many."""
        with self._admission():
            count = sum(1 for _ in self._dead_reservations())
        return count + sum(remove_unless_open(Path(entry.path)) for entry in self._own_files(".lock"))

    def used_bytes(self) -> int:
        """Bytes of all files and reservations, at a moment when none is on its way from one to the other."""
        if not self.root.is_dir():
            return 0
        with self._admission():
            return sum(file.size_bytes for file in self.files()) + self.reserved()[0]

    def reserved(self) -> tuple[int, int]:
        """(bytes reserved by living processes, how many of them are not written yet)."""
        total = unwritten = 0
        for entry, size in self._reservations():
            written = sum(file.stat().st_blocks * 512 for file in _scandir(entry.path) if _exists(file))
            total += size
            unwritten += max(0, size - written)
        return total, unwritten

    def _make_room(self, size_bytes: int, what: str | None, *, spare_now: bool) -> None:
        for _ in self._dead_reservations():
            pass
        short = self._short_bytes(size_bytes)
        if short <= 0:
            return
        if self.limit_bytes is None or size_bytes <= self.limit_bytes:
            self.evict(short, what, spare_now=spare_now)
            short = self._short_bytes(size_bytes)
        if short > 0:
            raise CacheFullError(self._explain(size_bytes, short, awaited=what is None))

    def _short_bytes(self, size_bytes: int) -> int:
        """How many bytes must go before `size_bytes` fit; 0 or less: they do."""
        total, unwritten = self.reserved()
        short = size_bytes + unwritten + self.min_free_bytes - free_bytes(self.root)
        if self.limit_bytes is not None:  # a look at every file, only where somebody set a limit
            used = sum(file.size_bytes for file in self.files())
            short = max(short, used + total + size_bytes - self.limit_bytes)
        return short

    def _explain(self, size_bytes: int, short: int, *, awaited: bool) -> str:
        used = sum(file.size_bytes for file in self.files())
        held = "all in use" if awaited else "open or needed sooner"
        if self.limit_bytes is not None and size_bytes > self.limit_bytes:
            held = "but what is to be written is larger than the whole cache"
        limit = "no limit" if self.limit_bytes is None else f"a limit of {self.limit_bytes} bytes"
        return (
            f"The cache {self.root} has no room for {size_bytes} bytes: {short} are missing. It holds {used} bytes and "
            f"{self.reserved()[0]} reserved ones, {held}, with {limit}, and the disk has "
            f"{free_bytes(self.root)} bytes free, of which {self.min_free_bytes} are left alone. Raise "
            f"cache_limit_bytes, free disk space, or use smaller data shards, a smaller window or fewer lanes."
        )

    def _dead_reservations(self) -> Iterator[str]:
        """Removes reservations whose owner is gone. Under the admission lock, so no new one is without its lock."""
        for entry, _ in self._reservations():
            try:
                fd = os.open(os.path.join(entry.path, "lock"), os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # its owner died before it had a lock, or is just removing it
                shutil.rmtree(entry.path, ignore_errors=True)
                yield entry.name
                continue
            try:
                if try_lock(fd):
                    shutil.rmtree(entry.path, ignore_errors=True)
                    yield entry.name
            finally:
                os.close(fd)

    @contextmanager
    def _admission(self) -> Iterator[None]:
        self._scratch.mkdir(parents=True, exist_ok=True)
        with lock_file(self.root / "admission.lock", _ADMISSION_TIMEOUT_S) as held:
            if not held:
                logger.warning(
                    "%s/admission.lock has been held for %.0f s; going on without it, so the cache may pass its limit",
                    self.root,
                    _ADMISSION_TIMEOUT_S,
                )
            yield


def remove_unless_open(path: Path) -> bool:
    """True if `path` was removed; False if somebody holds it locked, or it is gone already."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not try_lock(fd) or not is_linked(fd, path):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def _exists(entry: os.DirEntry[str]) -> bool:
    try:
        entry.stat()
    except OSError:
        return False
    return True


def _scandir(path: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
