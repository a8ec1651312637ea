"""The manifest: which objects a run trains on, in a fixed order, with what is needed to notice that one changed.

Built once a run and kept with it. Version 1 on disk: 8 bytes of magic, an Arrow IPC stream (one row a data shard;
the URI, the format and the data's columns in the schema's metadata), then 16 bytes xxh3_128 of all before.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ray_goodput.data.formats import GroupingFormat, GuessingFormat, ShardFacts, ShardFormat, identity_of
from ray_goodput.data.patterns import compile_glob
from ray_goodput.errors import DataError, EmptyDatasetError, ShardReadError
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


class Manifest:
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
        self.rows: NDArray[np.int64] = np.array(rows, dtype=np.int64)
        self.sizes: NDArray[np.int64] = np.array(sizes, dtype=np.int64)
        self.rows.flags.writeable = self.sizes.flags.writeable = False
        assert len(self._keys) == len(self._etags) == len(self.rows) == len(self.sizes)
        self.digest = self._digest()

    @property
    def num_shards(self) -> int:
        return len(self.rows)

    @property
    def num_samples(self) -> int:
        return int(self.rows.sum())

    @property
    def size_bytes(self) -> int:
        return int(self.sizes.sum())

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
        body = _MAGIC + sink.getvalue().to_pybytes()
        return body + xxhash.xxh3_128_digest(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Inverse of `to_bytes`. Raises DataError if a byte is missing or different, or the version is unknown."""
        body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if not body.startswith(_MAGIC) or xxhash.xxh3_128_digest(body) != checksum:
            raise DataError(
                f"The stored data manifest ({len(data)} bytes) is damaged or of another version of ray_goodput. "
                "Restore the file, or start a new run name."
            )
        table = pa.ipc.open_stream(body[len(_MAGIC) :]).read_all().combine_chunks()
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
            texts = [None if text is None else text.encode() for text in column.to_pylist()]
            state.update(np.array([-1 if t is None else len(t) for t in texts], dtype="<i8").tobytes())
            state.update(b"".join(t or b"" for t in texts))
        return state.hexdigest()

    def __repr__(self) -> str:
        return f"Manifest({self.uri!r}, {self.num_shards} data shards, {self.num_samples} rows, {self.digest[:12]})"


def build_manifest(
    store: ObjectStore, pattern: str, fmt: ShardFormat, *, max_workers: int = 16, uri: str | None = None
) -> Manifest:
    """The manifest of the objects of `store` that match `pattern`, by key.

    One listing, then what the format has to read of each object (parquet: its end; raw files: nothing; text: all).

    uri: what the manifest calls itself; default: the store's root and the pattern.

    Raises:
        EmptyDatasetError: nothing there, nothing matches, or no rows.
        ShardReadError: an object is damaged, or has other columns than the rest.
        StorageError: the store cannot be listed or read.
    """
    uri = uri or f"{store.uri.rstrip('/')}/{pattern}"
    matching, num_seen = list_matching(store, pattern, uri)
    if isinstance(fmt, GroupingFormat):
        return _grouped(uri, fmt, matching)
    facts = _inspect_all(store, matching, fmt, max_workers)
    rows = [fact.rows for fact in facts]
    if not any(rows):
        raise EmptyDatasetError(
            f"The {len(matching)} of {num_seen} objects that match {uri} have no rows: there is nothing to train on."
        )
    manifest = Manifest(
        uri,
        identity_of(fmt),
        keys=[info.key for info in matching],
        rows=rows,
        sizes=[info.size_bytes for info in matching],
        etags=[info.etag for info in matching],
        schema=_common_schema(store, matching, facts, fmt),
    )
    logger.info("%s: %d data shards, %d rows", uri, manifest.num_shards, manifest.num_samples)
    return manifest


def list_matching(store: ObjectStore, pattern: str, uri: str) -> tuple[list[ObjectInfo], int]:
    """The objects of `store` that match `pattern`, by key, and how many there are altogether.

    Raises:
        EmptyDatasetError: none matches; `uri` is what the message calls the dataset.
    """
    matcher = compile_glob(pattern)
    num_seen, matching = 0, list[ObjectInfo]()
    for info in store.list():
        num_seen += 1
        if matcher.fullmatch(info.key):
            matching.append(info)
    if not matching:
        found = f"There are {num_seen} objects under {store.uri} and none matches {pattern!r}"
        raise EmptyDatasetError(
            f"{found if num_seen else f'There is nothing at {store.uri}'}: correct the dataset's URI {uri}."
        )
    matching.sort(key=lambda info: info.key)
    return matching, num_seen


def _grouped(uri: str, fmt: ShardFormat, infos: Sequence[ObjectInfo]) -> Manifest:
    assert isinstance(fmt, GroupingFormat)
    groups = fmt.groups(infos)
    manifest = Manifest(
        uri,
        identity_of(fmt),
        keys=[group.to_key() for group in groups],
        rows=[len(group.files) for group in groups],
        sizes=[group.size_bytes for group in groups],
        etags=[None] * len(groups),  # of each file, in the key
        schema=fmt.schema_of(groups),
    )
    logger.info("%s: %d files in %d data shards", uri, manifest.num_samples, manifest.num_shards)
    return manifest


def _inspect_all(
    store: ObjectStore, infos: Sequence[ObjectInfo], fmt: ShardFormat, max_workers: int
) -> list[ShardFacts]:
    pool = ThreadPoolExecutor(max_workers, thread_name_prefix="ray-goodput-manifest")
    try:
        # By turns, so that the first bad object ends it without a hundred thousand requests already queued.
        facts: list[ShardFacts] = []
        for turn in _turns(infos, 16 * max_workers):
            facts += pool.map(lambda info: fmt.inspect(store, info), turn)
        return facts
    finally:
        pool.shutdown(cancel_futures=True)


def _turns(infos: Sequence[ObjectInfo], size: int) -> Iterable[Sequence[ObjectInfo]]:
    for start in range(0, len(infos), size):
        yield infos[start : start + size]


def _common_schema(
    store: ObjectStore, infos: Sequence[ObjectInfo], facts: Sequence[ShardFacts], fmt: ShardFormat
) -> pa.Schema:
    """The columns all objects with rows have; order, nullability and metadata may differ. Guessed types are merged."""
    with_rows = [(info, fact) for info, fact in zip(infos, facts, strict=True) if fact.rows]
    first_info, first = with_rows[0]
    schema = first.schema.remove_metadata()
    expected = {field.name: field.type for field in schema}
    for info, fact in itertools.islice(with_rows, 1, None):
        columns = {field.name: field.type for field in fact.schema}
        if columns != expected:
            if isinstance(fmt, GuessingFormat):
                try:
                    schema = fmt.merge(schema, fact.schema.remove_metadata())
                    expected = {field.name: field.type for field in schema}
                    continue
                except (pa.ArrowException, ValueError):
                    logger.debug("%s cannot be read with the columns of the files before it", info.key)
            names = sorted(n for n in {*columns, *expected} if columns.get(n) != expected.get(n))
            differ = ", ".join(f"{n} ({_type(expected, n)} / {_type(columns, n)})" for n in names)
            root = store.uri.rstrip("/")
            raise ShardReadError(
                f"{root}/{first_info.key} and {root}/{info.key} have different columns: {differ}. Write them alike, or "
                "give a pattern that matches only one kind."
            )
    return schema


def _type(columns: dict[str, pa.DataType], name: str) -> str:
    return str(columns[name]) if name in columns else "absent"


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
