"""The manifest: which objects a run trains on, in a fixed order, with what is needed to notice that one changed.

Built once a run and kept with it. Version 1 on disk: 8 bytes of magic, an Arrow IPC stream (one row a data shard;
the URI, the format and the data's columns in the schema's metadata), then 16 bytes xxh3_128 of all before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ray_goodput.data.formats import GroupingFormat, ShardFormat, identity_of
from ray_goodput.data.inspection import Inspected, common_schema, inspect_here
from ray_goodput.data.listing import Listing, list_matching
from ray_goodput.errors import DataError, EmptyDatasetError
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

logger = logging.getLogger(__name__)

MANIFEST_VERSION = 1
_MAGIC = b"RGMANIF1"
_CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class DataShard:
    """One object: `key` is relative to the store's root. Or a group of small ones, see `data.groups`."""

    index: int
    key: str
    rows: int
    size_bytes: int
    etag: str | None


class ShardTotals:
    """What follows from the rows and sizes of data shards, in the order of a manifest."""

    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @property
    def num_shards(self) -> int:
        return len(self.rows)

    @property
    def num_samples(self) -> int:
        return int(self.rows.sum())

    @property
    def size_bytes(self) -> int:
        return int(self.sizes.sum())


class Manifest(ShardTotals):
    """All data shards of a dataset, columnar: 1e6 of them are a few arrays, not a million objects. Immutable."""

    def __init__(
        self,
        uri: str,
        format_name: str,
        *,
        keys: Sequence[str] | pa.Array,
        rows: Sequence[int] | NDArray[np.int64],
        sizes: Sequence[int] | NDArray[np.int64],
        etags: Sequence[str | None] | pa.Array,
        schema: pa.Schema | None = None,
    ) -> None:
        """uri: the dataset's URI with its pattern. schema: the columns of the data, if known."""
        self.uri = uri
        self.format_name = format_name
        self.schema = schema
        self._keys: pa.Array = keys if isinstance(keys, pa.Array) else pa.array(keys, pa.large_string())
        self._etags: pa.Array = etags if isinstance(etags, pa.Array) else pa.array(etags, pa.large_string())
        self.rows = np.array(rows, dtype=np.int64)
        self.sizes = np.array(sizes, dtype=np.int64)
        self.rows.flags.writeable = self.sizes.flags.writeable = False
        assert len(self._keys) == len(self._etags) == len(self.rows) == len(self.sizes)
        self.digest = self._digest()

    def shard(self, index: int) -> DataShard:
        """Data shard `index` (0 to num_shards - 1)."""
        if not 0 <= index < self.num_shards:
            raise IndexError(f"data shard {index} of {self.num_shards}")
        return DataShard(
            index,
            self._keys[index].as_py(),
            int(self.rows[index]),
            int(self.sizes[index]),
            self._etags[index].as_py(),
        )

    def to_bytes(self) -> bytes:
        """The persisted form, checksummed."""
        metadata = {
            b"version": str(MANIFEST_VERSION).encode(),
            b"uri": self.uri.encode(),
            b"format": self.format_name.encode(),
        }
        if self.schema is not None:
            metadata[b"schema"] = self.schema.serialize().to_pybytes()
        columns = {"key": self._keys, "rows": self.rows, "size_bytes": self.sizes, "etag": self._etags}
        table = pa.table(columns).replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        stream = memoryview(sink.getvalue())
        checksum = xxhash.xxh3_128(_MAGIC)
        checksum.update(stream)
        return b"".join([_MAGIC, stream, checksum.digest()])

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Manifest:
        """Inverse of `to_bytes`. Raises DataError if a byte is missing or different, or the version is unknown."""
        view = memoryview(data)  # the columns stay where they are: slices of bytes would be copies
        body, checksum = view[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if body[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_128_digest(body) != checksum:
            raise DataError(
                f"The stored data manifest ({len(data)} bytes) is damaged or of another version of ray_goodput. "
                "Restore the file, or start a new run name."
            )
        table = pa.ipc.open_stream(pa.py_buffer(body[len(_MAGIC) :])).read_all().combine_chunks()
        metadata = table.schema.metadata or {}
        version = int(metadata[b"version"])
        if version != MANIFEST_VERSION:
            raise DataError(
                f"The stored data manifest has version {version}, this ray_goodput reads version {MANIFEST_VERSION}: "
                "resume with the version that wrote it."
            )
        schema = metadata.get(b"schema")
        return cls(
            metadata[b"uri"].decode(),
            metadata[b"format"].decode(),
            keys=_whole(table["key"]),
            rows=table["rows"].to_numpy(),
            sizes=table["size_bytes"].to_numpy(),
            etags=_whole(table["etag"]),
            schema=None if schema is None else pa.ipc.read_schema(pa.py_buffer(schema)),
        )

    def _digest(self) -> str:
        """Hex xxh3_128 over version, keys, rows, sizes and etags; not the URI: moved data is the same data."""
        state = xxhash.xxh3_128(f"ray_goodput.manifest {MANIFEST_VERSION} {self.num_shards}\n".encode())
        state.update(self.rows.astype("<i8").tobytes())
        state.update(self.sizes.astype("<i8").tobytes())
        for column in (self._keys, self._etags):
            _, offsets, texts = column.buffers()  # of large strings, as they lie in memory: no million Python strings
            ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
            lengths = np.where(column.is_null().to_numpy(zero_copy_only=False), -1, np.diff(ends))
            state.update(lengths.astype("<i8").tobytes())
            if texts is not None:
                state.update(memoryview(texts)[int(ends[0]) : int(ends[-1])])
        return state.hexdigest()

    def __repr__(self) -> str:
        return f"Manifest({self.uri!r}, {self.num_shards} data shards, {self.num_samples} rows, {self.digest[:12]})"


def build_manifest(
    store: ObjectStore,
    pattern: str,
    fmt: ShardFormat,
    *,
    max_workers: int = 16,
    uri: str | None = None,
    inspect: Callable[[Listing, ShardFormat], Inspected | None] | None = None,
) -> Manifest:
    """The manifest of the objects of `store` that match `pattern`, by key.

    One listing, then what the format has to read of each object (parquet: its end; raw files: nothing; text: all).

    uri: what the manifest calls itself; default: the store's root and the pattern.
    inspect: reads the objects instead of `max_workers` threads of this process, if it takes them.

    Raises:
        EmptyDatasetError: nothing there, nothing matches, or no rows.
        ShardReadError: an object is damaged, or has other columns than the rest.
        StorageError: the store cannot be listed or read.
    """
    uri = uri or f"{store.uri.rstrip('/')}/{pattern}"
    matching, num_seen = list_matching(store, pattern, uri)
    if isinstance(fmt, GroupingFormat):
        return _grouped(uri, fmt, matching)
    inspected = None if inspect is None else inspect(matching, fmt)
    if inspected is None:
        inspected = inspect_here(store, matching, fmt, max_workers)
    if not inspected.rows.any():
        raise EmptyDatasetError(
            f"The {len(matching)} of {num_seen} objects that match {uri} have no rows: there is nothing to train on."
        )
    manifest = Manifest(
        uri,
        identity_of(fmt),
        keys=matching.keys,
        rows=inspected.rows,
        sizes=matching.sizes,
        etags=matching.etags,
        schema=common_schema(store, matching, inspected, fmt),
    )
    logger.info("%s: %d data shards, %d rows", uri, manifest.num_shards, manifest.num_samples)
    return manifest


def _grouped(uri: str, fmt: ShardFormat, infos: Sequence[ObjectInfo]) -> Manifest:
    assert isinstance(fmt, GroupingFormat)
    schema: pa.Schema | None = None
    keys, rows, sizes = list[str](), list[int](), list[int]()
    for group in fmt.groups(infos):
        schema = fmt.schema_of([group]) if schema is None else schema
        keys.append(group.to_key())
        rows.append(len(group.files))
        sizes.append(group.size_bytes)
    etags = [None] * len(keys)  # of each file, in the key
    manifest = Manifest(uri, identity_of(fmt), keys=keys, rows=rows, sizes=sizes, etags=etags, schema=schema)
    logger.info("%s: %d files in %d data shards", uri, manifest.num_samples, manifest.num_shards)
    return manifest


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
