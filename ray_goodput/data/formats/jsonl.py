"""JSON lines, plain or compressed: one object a line, whose types are read off the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pj

from ray_goodput.data.formats.base import ShardFacts, damaged, title_of
from ray_goodput.data.formats.ranged import RangedFile, open_decoded
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

_READ = pj.ReadOptions(block_size=16 << 20)  # no line may be longer than that
_KIND = "JSON lines file"
_EMPTY = pa.schema([])


@dataclass(frozen=True, slots=True)
class JsonlFormat:
    """`.jsonl` and `.ndjson`, also gzip and zstd. Files may lack keys that others have, and mix integers and floats.

    A manifest reads each file once, since neither lines nor types can be known otherwise.
    """

    name: str = "jsonl"
    extensions: tuple[str, ...] = tuple(
        f"{end}{compression}"
        for end in (".jsonl", ".ndjson", ".json")
        for compression in ("", ".gz", ".zst")
        if end != ".json" or compression  # a plain .json file is usually one document
    )

    def inspect(self, store: ObjectStore, info: ObjectInfo) -> ShardFacts:
        file = RangedFile(store, info)
        try:
            return _facts(lambda: open_decoded(file))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(title_of(store, info), _KIND, error) from error

    def read_table(self, path: Path) -> pa.Table:
        return self._read(path, None)

    def read_as(self, path: Path, schema: pa.Schema) -> pa.Table:
        return self._read(path, schema)

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Keys of either; integers and floats become floats, texts and dates texts."""
        try:
            return pa.unify_schemas([left, right], promote_options="permissive")
        except pa.ArrowException:
            return pa.unify_schemas([_dates_as_text(left), _dates_as_text(right)], promote_options="permissive")

    def _read(self, path: Path, schema: pa.Schema | None) -> pa.Table:
        try:
            if _is_empty(open_decoded(path)):
                return (_EMPTY if schema is None else schema).empty_table()
            if schema is None:
                return pj.read_json(open_decoded(path), _READ)
            parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
            return pj.read_json(open_decoded(path), _READ, parse).select(schema.names)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(str(path), _KIND, error) from error


def _facts(source: Callable[[], pa.NativeFile]) -> ShardFacts:
    if _is_empty(source()):
        return ShardFacts(0, _EMPTY)
    try:
        reader = pj.open_json(source(), _READ)
        return ShardFacts(sum(batch.num_rows for batch in reader), reader.schema)
    except pa.ArrowInvalid:
        # What the first block holds does not go for all; this one looks at everything, in memory.
        table = pj.read_json(source(), _READ)
        return ShardFacts(table.num_rows, table.schema)


def _is_empty(file: pa.NativeFile) -> bool:
    return not file.read(1)


def _dates_as_text(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f.with_type(pa.string()) if pa.types.is_temporal(f.type) else f for f in schema])
