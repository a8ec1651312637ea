"""From the object store into the node's cache: one data shard at a time, by whoever needs it first."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from ray_goodput.data.cache import NodeCache, content_name
from ray_goodput.data.cache_inspect import with_source
from ray_goodput.data.formats.base import GroupingFormat, GuessingFormat
from ray_goodput.data.groups import FileGroup
from ray_goodput.data.shard_transforms import TransformedFormat
from ray_goodput.errors import (
    CacheFullError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShardReadError,
    ShardTransformError,
    StorageAccessError,
    StorageError,
)
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

if TYPE_CHECKING:
    from ray_goodput.data.manifest import DataShard, Manifest
    from ray_goodput.data.mixture_manifest import AnyManifest

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_FIRST_PAUSE_S = 0.1
_OPEN_ATTEMPTS = 4
_GROUP_THREADS = 8  # for the files of one group
_LONGEST_TITLE = 200


class TableFormat(Protocol):
    """What the fetcher needs of a `data.formats.ShardFormat`."""

    @property
    def name(self) -> str: ...

    def read_table(self, path: Path) -> pa.Table: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """Outcome of `ShardFetcher.ensure`: bytes that crossed the network for it, 0 if the shard was cached."""

    fetched_bytes: int = 0


class ShardFetcher:
    """Brings data shards of one dataset into the node's cache. Thread-safe; not picklable (it holds an open store).

    columns: what of each shard is kept; None: everything.
    pin: False: take objects as they are now (`on_change="accept"`), not as the manifest saw them.
    """

    def __init__(
        self,
        manifest: Manifest,
        store: ObjectStore,
        fmt: TableFormat,
        cache: NodeCache,
        columns: Sequence[str] | None = None,
        *,
        pin: bool = True,
    ) -> None:
        self.manifest = manifest
        self.cache = cache
        self._store = store
        self._format = fmt
        self._columns = None if columns is None else list(columns)
        self._pin = pin
        self._mutex = threading.Lock()
        self._names: dict[int, str] = {}
        self._in_flight: dict[str, threading.Event] = {}

    def name(self, data_shard: int) -> str:
        """Content name of a data shard in the cache."""
        known = self._names.get(data_shard)
        if known is not None:
            return known
        shard = self.manifest.shard(data_shard)
        name = self._names[data_shard] = content_name(
            uri=self._store.uri,
            key=shard.key,
            etag=shard.etag,
            size_bytes=shard.size_bytes,
            transform=self._format_id(),
            columns=self._columns,
        )
        return name

    def title(self, data_shard: int) -> str:
        """The data shard by number and object, for messages."""
        return self._title(self.manifest.shard(data_shard))

    def ensure(self, data_shard: int, *, awaited: bool = False) -> Fetched:
        """The data shard is cached. Fetched at most once at a time by all threads and processes of the node.

        awaited: a batch waits for it; what others need sooner, by the cache's ranking, may then make room for it.

        Raises:
            ObjectChangedError: the object is not the one the manifest saw.
            ShardReadError: it cannot be fetched, decoded, or has other rows or columns than it should.
            CacheFullError: the cache has no room for it.
        """
        name = self.name(data_shard)
        if self.cache.contains(name):
            return Fetched()
        with self._alone(name), self.cache.fetching(name):
            if self.cache.contains(name):
                return Fetched()
            shard = self.manifest.shard(data_shard)
            table = self._load(shard, None if awaited else name)
            return self._write(shard, name, table, awaited=awaited)

    def transforms(self, data_shard: int) -> bool:
        """Whether the data shard goes through a `transform_shard`."""
        return isinstance(self._format, TransformedFormat)

    def load(self, data_shard: int) -> pa.Table:
        """The data shard from the store, past the cache: for `put` on another node. Raises as `ensure` does."""
        return self._load(self.manifest.shard(data_shard), self.name(data_shard))

    def put(self, data_shard: int, table: pa.Table) -> Fetched:
        """What `load` gave, maybe elsewhere, is cached here. Raises CacheFullError."""
        name = self.name(data_shard)
        with self._alone(name), self.cache.fetching(name):
            if self.cache.contains(name):
                return Fetched()
            return self._write(self.manifest.shard(data_shard), name, table)

    def table(self, data_shard: int) -> pa.Table:
        """The data shard, memory-mapped from the cache, fetched first if need be. Raises as `ensure` does."""
        for _ in range(_OPEN_ATTEMPTS):
            table = self.opened(data_shard)
            if table is not None:
                return table
            self.ensure(data_shard, awaited=True)
        raise lost_again(self.manifest, data_shard, self.cache)

    def opened(self, data_shard: int) -> pa.Table | None:
        """The data shard, memory-mapped from the cache; None if it is not there.

        Raises:
            ShardReadError: what is cached under its name has other rows: whoever put it there made something else.
        """
        cached = self.cache.open_table(self.name(data_shard))
        if cached is None:
            return None
        rows = self.manifest.shard(data_shard).rows
        if cached.table.num_rows != rows:
            raise ShardReadError(
                f"{self.title(data_shard)} lies in the cache {self.cache.root} with {cached.table.num_rows} rows, the "
                f"manifest says {rows}: it was made there by another transform_shard= or format of the same version. "
                "Give another transform_version, or clear the cache: ray-goodput cache purge."
            )
        return cached.table

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Threads of one process wait here for each other: sooner awake than by the kernel's lock."""
        while True:
            with self._mutex:
                running = self._in_flight.get(name)
                if running is None:
                    mine = self._in_flight[name] = threading.Event()
                    break
            running.wait()
        try:
            yield
        finally:
            with self._mutex:
                del self._in_flight[name]
            mine.set()

    def _format_id(self) -> str:
        """Everything besides the object's bytes that decides what is kept of it."""
        identity: str = getattr(self._format, "identity", self._format.name)
        if isinstance(self._format, GuessingFormat) and self.manifest.schema is not None:
            identity += f" {[(field.name, str(field.type)) for field in self.manifest.schema]}"
        # What is taken as it is may be something else than the name says: nobody who pins may find it.
        return identity if self._pin else f"{identity} unpinned"

    def _write(self, shard: DataShard, name: str, table: pa.Table, *, awaited: bool = False) -> Fetched:
        table = with_source(table, dataset=self._store.uri, key=self._object(shard))
        self.cache.write(name, table, awaited=awaited)
        self.cache.count_fetched(shard.size_bytes)
        return Fetched(shard.size_bytes)

    def _load(self, shard: DataShard, what: str | None) -> pa.Table:
        """what: for `NodeCache.reserve`."""
        pause_s = _FIRST_PAUSE_S
        for left in reversed(range(_ATTEMPTS)):
            try:
                table = self._download(shard, what)
                break
            except (ObjectChangedError, CacheFullError):
                raise
            except ShardTransformError as error:
                raise ShardTransformError(f"{self._title(shard)}: {error}") from error
            except (ObjectNotFoundError, StorageAccessError) as error:
                raise ShardReadError(f"{self._title(shard)} cannot be fetched: {error}") from error
            except (StorageError, ShardReadError, pa.ArrowException, OSError, ValueError) as error:
                if not left:
                    raise ShardReadError(
                        f"{self._title(shard)} could not be fetched and decoded in {_ATTEMPTS} attempts, the last one "
                        f"failed with {type(error).__name__}: {error} If the object is damaged, replace it and start "
                        f"the run anew, or leave it out of the dataset's pattern."
                    ) from error
                logger.info("%s: attempt failed, %d left: %s", self._title(shard), left, error)
                time.sleep(pause_s * (0.5 + random.random()))
                pause_s *= 2
        return self._checked(shard, table)

    def _download(self, shard: DataShard, what: str | None) -> pa.Table:
        with self.cache.reserve(shard.size_bytes, what) as folder:
            if isinstance(self._format, GroupingFormat):
                return self._download_group(self._format, FileGroup.from_key(shard.key), folder)
            raw = folder / (PurePosixPath(shard.key).name[-200:] or "object")
            self._download_object(shard.key, shard.etag, shard.size_bytes, raw)
            if isinstance(self._format, GuessingFormat) and self.manifest.schema is not None:
                return self._format.read_as(raw, self.manifest.schema)
            return self._format.read_table(raw)

    def _download_group(self, fmt: GroupingFormat, group: FileGroup, folder: Path) -> pa.Table:
        paths = [folder / f"{i:06d}" for i in range(len(group.files))]
        with ThreadPoolExecutor(min(_GROUP_THREADS, len(paths)), "ray-goodput-group") as pool:
            jobs = [
                pool.submit(self._download_object, file.key, file.etag, file.size_bytes, path)
                for file, path in zip(group.files, paths, strict=True)
            ]
            try:
                for job in jobs:
                    job.result()
            finally:
                pool.shutdown(cancel_futures=True)
        return fmt.read_group(group, paths)

    def _download_object(self, key: str, etag: str | None, size_bytes: int, path: Path) -> None:
        info: ObjectInfo = self._store.download_file(key, path, etag=etag if self._pin else None)
        if self._pin and info.size_bytes != size_bytes:
            raise ObjectChangedError(
                f"{self._store.uri.rstrip('/')}/{key} has {info.size_bytes} bytes, it had {size_bytes} when the run's "
                f'manifest was made. Restore the object, or start a new run; on_change="accept" takes it as it is.'
            )
        landed = path.stat().st_size
        if landed != info.size_bytes:
            raise StorageError(f"{key}: {landed} of {info.size_bytes} bytes arrived.")

    def _checked(self, shard: DataShard, table: pa.Table) -> pa.Table:
        if table.num_rows != shard.rows:
            raise ShardReadError(
                f"{self._title(shard)} has {table.num_rows} rows, the manifest says {shard.rows}: start a new run to "
                f"have the manifest made anew."
            )
        if self._columns is not None:
            missing = [column for column in self._columns if column not in table.column_names]
            if missing:
                raise ShardReadError(
                    f"{self._title(shard)} has no column {missing}, only {table.column_names}: correct columns=."
                )
            table = table.select(self._columns)
        return table.unify_dictionaries().combine_chunks()

    def _title(self, shard: DataShard) -> str:
        return f"Data shard {shard.index} ({self._store.uri.rstrip('/')}/{self._object(shard)})"

    def _object(self, shard: DataShard) -> str:
        grouped = isinstance(self._format, GroupingFormat)
        return FileGroup.from_key(shard.key).title if grouped else shard.key


def lost_again(manifest: AnyManifest, data_shard: int, cache: NodeCache) -> ShardReadError:
    """The error for a shard that was fetched and was not there when it was opened, again and again."""
    key = manifest.shard(data_shard).key[:_LONGEST_TITLE]
    return ShardReadError(
        f"Data shard {data_shard} ({key}) was fetched {_OPEN_ATTEMPTS} times into the "
        f"cache {cache.root} and each time was evicted or damaged before it could be opened. Raise cache_limit_bytes, "
        f"or check the disk."
    )
