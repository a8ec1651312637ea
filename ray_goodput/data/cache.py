"""The node's cache of data shards: a folder on NVMe, shared by all processes, runs and jobs of the node.

Format, version 1 (of file names and files; a change of either gets another magic, so old files read as corrupt and go):

    <root>/<2 hex>/<32 hex>.arrow   one data shard: Arrow IPC file bytes, then a trailer of 32 bytes, little endian:
                                    magic "RGCACHE1", length of the IPC bytes (uint64), their xxh3-128 (16 bytes)
    <root>/<2 hex>/<32 hex>.lock    held exclusively by whoever is fetching that shard
    <root>/admission.lock           held for the moment of a decision about room
    <root>/tmp/<16 hex>-<bytes>/    room reserved by a living process: `lock`, held by it, and the files it writes

The 32 hex digits are the content name: xxh3-128 of URI, etag, size and what is kept of the object, so a changed
object has another name and nothing is ever invalidated. File and checksum appear in one rename. Processes agree by
the kernel alone (flock and rename): any of them may be killed at any point and nothing needs cleaning up by hand. An
open table holds its file's shared lock, and a file that is locked is not evicted. The checksum is compared once per
process and file; a file that fails is removed, said once, and reads as missing. The access time is the time of the
last open (set explicitly, so mount options do not matter).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from ray_goodput.data.cache_file import CorruptFileError, content_name, file_bytes, map_table, read_trailer, verify
from ray_goodput.data.cache_file import write_file as _write_file
from ray_goodput.data.cache_inspect import count_open, purge
from ray_goodput.data.cache_lock import is_linked, lock_file, lock_within
from ray_goodput.data.cache_room import SUFFIX, CachedFile, CacheRoom, Ranking
from ray_goodput.errors import CacheFullError

__all__ = ["CacheStats", "CachedFile", "CachedShard", "NodeCache", "Ranking", "content_name"]

logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 10.0
_WRITE_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of this process since it made its `NodeCache`. fetched_bytes: that crossed the network;
    opened_bytes: of cached files that were opened."""

    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    fetched_shards: int = 0
    evictions: int = 0
    corrupt: int = 0
    opened_bytes: int = 0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


class CachedShard:
    """An open file of the cache. It stays locked, hence on disk, as long as any view of `table` lives."""

    def __init__(self, name: str, table: pa.Table, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._table: pa.Table | None = table

    @property
    def table(self) -> pa.Table:
        """The data shard, memory-mapped. Raises ValueError once closed."""
        if self._table is None:
            raise ValueError(f"the cached data shard {self.name} was closed")
        return self._table

    def close(self) -> None:
        """Lets go of the table; the file is free for eviction when its last view is gone too."""
        self._table = None


class NodeCache:
    """The cache folder `root`; see the module. Thread-safe; picklable state none: make one in each process.

    limit_bytes: for the whole folder, enforced by whoever writes; None: as much as the disk has.
    min_free_bytes: of the disk, that the cache leaves alone.
    """

    def __init__(self, root: Path, *, limit_bytes: int | None = None, min_free_bytes: int = 256 << 20) -> None:
        self.root = Path(root)
        self._room = CacheRoom(self.root, limit_bytes=limit_bytes, min_free_bytes=min_free_bytes)
        self._room.on_evicted = lambda count: self._count(evictions=count)
        self._mutex = threading.Lock()
        self._stats = CacheStats()
        self._verified: dict[str, tuple[int, int, int]] = {}

    @property
    def limit_bytes(self) -> int | None:
        return self._room.limit_bytes

    @property
    def stats(self) -> CacheStats:
        """The counts so far."""
        with self._mutex:
            return self._stats

    def open(self) -> NodeCache:
        """The folder exists, and what dead writers left in it is gone. Returns itself."""
        self.root.mkdir(parents=True, exist_ok=True)
        removed = self._room.clean()
        if removed:
            logger.info("removed %d leftovers of processes that died from the cache %s", removed, self.root)
        return self

    def rank_by(self, ranking: Ranking | None) -> None:
        """Eviction takes first what `ranking()` (asked once per eviction) does not name, then what is needed last, and
        nothing needed before the shard that room is made for, unless a batch waits for that (`reserve`). None: least
        recently opened first."""
        self._room.ranking = ranking

    def path(self, name: str) -> Path:
        """Where the data shard of that content name lies, if it is cached."""
        return self.root / name[:2] / f"{name}{SUFFIX}"

    def contains(self, name: str) -> bool:
        """True if the file is there and whole by its trailer. Its checksum is left to `open_table`."""
        try:
            fd = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            read_trailer(fd)
        except (CorruptFileError, OSError):
            return False
        finally:
            os.close(fd)
        return True

    def names(self) -> set[str]:
        """Content names of all that is cached, as its folders tell; no file is looked at."""
        names: set[str] = set()
        for folder in os.listdir(self.root) if self.root.is_dir() else ():
            if len(folder) == 2:
                files = os.listdir(self.root / folder)
                names.update(file.removesuffix(SUFFIX) for file in files if file.endswith(SUFFIX))
        return names

    def open_table(self, name: str) -> CachedShard | None:
        """The data shard, memory-mapped and locked against eviction; None if it is not (or no longer) cached.

        A file that turns out truncated or corrupt is removed and None returned: the caller fetches it again.
        """
        path = self.path(name)
        for _ in range(2):  # the second time only if it was replaced between open and lock
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                break
            try:
                if not lock_within(fd, _OPEN_TIMEOUT_S, shared=True) or not is_linked(fd, path):
                    continue
                shard = self._open_locked(fd, name)
                self._count(hits=1, opened_bytes=shard.size_bytes)
                return shard
            except (CorruptFileError, OSError) as error:
                if is_linked(fd, path):
                    path.unlink(missing_ok=True)
                self._count(corrupt=1)
                logger.warning("removed %s from the cache, it will be fetched again: %s", path, error)
                break
            finally:
                os.close(fd)
        self._count(misses=1)
        return None

    def write(self, name: str, table: pa.Table, *, awaited: bool = False) -> int:
        """`table` is cached under `name`, whole and durable; returns the size of its file.

        awaited: a batch waits for it; see `reserve`.

        Raises:
            CacheFullError: no room even after eviction; nothing is left behind.
            OSError: the disk failed in another way.
        """
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        size_bytes = file_bytes(table)
        what = None if awaited else name
        for left in reversed(range(_WRITE_ATTEMPTS)):
            with self.reserve(size_bytes, what) as folder:
                try:
                    _write_file(folder / "table", table)
                    self._room.publish(folder, folder / "table", path)
                    return size_bytes
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    if not left:
                        raise CacheFullError(
                            f"The disk of the cache {self.root} filled up {_WRITE_ATTEMPTS} times while a data shard "
                            f"of {size_bytes} bytes was written, although room was made for it: something else writes "
                            f"there. Free disk space, or put the cache on a disk of its own (RAY_GOODPUT_LOCAL_DIR)."
                        ) from error
            self._room.evict(size_bytes, what)
        raise AssertionError("unreachable")

    def reserve(self, size_bytes: int, what: str | None) -> AbstractContextManager[Path]:
        """A context with an empty folder on the cache's disk in which `size_bytes` may be written; gone at its end.

        what: content name it is for; nothing that the ranking says is needed sooner makes room for it. None: a batch
        waits for it; what others are just writing is waited for, 10 s at most, and at last all that is not open may go.

        Raises:
            CacheFullError: no room even after eviction.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        return self._room.reserve(size_bytes, what)

    @contextmanager
    def fetching(self, name: str, timeout_s: float = 300.0) -> Iterator[None]:
        """In this block no other thread or process is fetching `name`: look again whether it is cached, then fetch.

        If another holds on for `timeout_s`, goes on without: a shard fetched twice is better than a run that hangs.
        """
        path = self.path(name).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(path, timeout_s, remove=True) as held:
            if not held:
                logger.warning("another process has been fetching %s for %.0f s; fetching it too", name, timeout_s)
            yield

    def evict(self, need_bytes: int) -> int:
        """Bytes freed by removing files, in eviction order, until it is at least `need_bytes` or none may go."""
        return self._room.evict(need_bytes)[0]

    def ls(self) -> list[CachedFile]:
        """Every cached file, least recently opened first."""
        return sorted(self._room.files(), key=lambda file: file.used_at_s)

    def usage_bytes(self) -> int:
        """Bytes of all cached files and of what living processes have reserved."""
        return self._room.used_bytes()

    def purge(self) -> tuple[int, int]:
        """Removes every file that nobody has open; returns (bytes freed, files still in use)."""
        done = purge(self.ls(), lambda _: True)
        self._room.clean()
        return done.freed_bytes, len(done.kept)

    def count_fetched(self, size_bytes: int) -> None:
        """One more data shard of `size_bytes` crossed the network."""
        self._count(fetched_bytes=size_bytes, fetched_shards=1)

    def _open_locked(self, fd: int, name: str) -> CachedShard:
        stat = os.fstat(fd)
        seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if self._verified.get(name) != seen:
            verify(fd)
            self._verified[name] = seen
        table = map_table(fd)
        try:
            os.utime(fd, ns=(time.time_ns(), stat.st_mtime_ns))
        except OSError:  # another user's file: eviction then only knows when it was written
            logger.debug("cannot set the access time of %s", name)
        count_open(fd)
        return CachedShard(name, table, stat.st_size)

    def _count(self, **more: int) -> None:
        with self._mutex:
            self._stats = replace(
                self._stats, **{key: getattr(self._stats, key) + value for key, value in more.items()}
            )
