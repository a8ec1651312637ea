"""Apache Parquet: rows and columns come from the footer, so that a manifest never reads the data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ray_goodput.data.formats.base import ShardFacts, damaged, title_of
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

_MAGIC = b"PAR1"
_SUFFIX_BYTES = 8  # length of the footer (4 bytes, little endian), then the magic
_FIRST_READ_BYTES = 64 << 10  # holds most footers, so that one request an object is enough


@dataclass(frozen=True, slots=True)
class ParquetFormat:
    """Files written by Spark, pandas, Arrow, Ray Data and others, with any compression Arrow knows."""

    name: str = "parquet"
    extensions: tuple[str, ...] = (".parquet", ".pq")

    def inspect(self, store: ObjectStore, info: ObjectInfo) -> ShardFacts:
        title = title_of(store, info)
        size = info.size_bytes
        if size < len(_MAGIC) + _SUFFIX_BYTES:
            raise damaged(title, "parquet file", f"it has only {size} bytes")
        tail = store.get_range(info.key, max(0, size - _FIRST_READ_BYTES), min(size, _FIRST_READ_BYTES))
        if not tail.endswith(_MAGIC):
            raise damaged(title, "parquet file", f"its last bytes are {tail[-4:]!r} instead of {_MAGIC!r}")
        footer_bytes = int.from_bytes(tail[-_SUFFIX_BYTES:-4], "little") + _SUFFIX_BYTES
        if footer_bytes > size:
            raise damaged(title, "parquet file", f"its footer should have {footer_bytes} bytes and the file has {size}")
        if footer_bytes > len(tail):
            tail = store.get_range(info.key, size - footer_bytes, footer_bytes)
        try:
            # Arrow reads metadata from the end of what it is given, so the footer alone will do.
            metadata = pq.read_metadata(pa.BufferReader(tail[-footer_bytes:]))
            return ShardFacts(metadata.num_rows, metadata.schema.to_arrow_schema())
        except (pa.ArrowException, OSError) as error:
            raise damaged(title, "parquet file", error) from error

    def read_table(self, path: Path) -> pa.Table:
        try:
            # Not pq.read_table: that would take folder names like `year=2024` for columns.
            with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:  # where it has any
                return file.read()
        except (pa.ArrowException, OSError) as error:
            raise damaged(str(path), "parquet file", error) from error
