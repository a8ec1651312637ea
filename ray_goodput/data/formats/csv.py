"""CSV with a header line, plain or compressed; the columns' types are read off the values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc

from ray_goodput.data.formats.base import ShardFacts, damaged, title_of
from ray_goodput.data.formats.ranged import RangedFile, open_decoded
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

_READ = pc.ReadOptions(block_size=16 << 20)  # no line may be longer than that
_EMPTY = pa.schema([])


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """Comma-separated values as of RFC 4180: quoted fields may hold the delimiter and line ends.

    All files have the same columns. For another delimiter register one under another name:
    `register_format(CsvFormat(name="psv", extensions=(".psv",), delimiter="|"))`.
    A manifest reads each file once, since neither rows nor types can be known otherwise.
    """

    name: str = "csv"
    extensions: tuple[str, ...] = (".csv", ".csv.gz", ".csv.zst")
    delimiter: str = ","

    @property
    def identity(self) -> str:
        return self.name if self.delimiter == "," else f"{self.name}-{self.delimiter}"

    def inspect(self, store: ObjectStore, info: ObjectInfo) -> ShardFacts:
        file = RangedFile(store, info)
        try:
            if not open_decoded(file).read(1):
                return ShardFacts(0, _EMPTY)
            try:
                reader = pc.open_csv(open_decoded(file), _READ, self._parse())
                rows = sum(batch.num_rows for batch in reader)
                return ShardFacts(rows, _unique(reader.schema))
            except pa.ArrowInvalid:
                # What the first block holds does not go for all; this one looks at everything, in memory.
                table = pc.read_csv(open_decoded(file), _READ, self._parse())
                return ShardFacts(table.num_rows, _unique(table.schema))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(title_of(store, info), self._kind, error) from error

    def read_table(self, path: Path) -> pa.Table:
        return self._read(path, None)

    def read_as(self, path: Path, schema: pa.Schema) -> pa.Table:
        convert = pc.ConvertOptions(
            column_types={field.name: field.type for field in schema}, include_columns=schema.names
        )
        return self._read(path, convert)

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """The same names in both; integers and floats become floats, anything and text becomes text."""
        if set(left.names) != set(right.names):
            raise ValueError("the columns have different names")
        fields = []
        for field in left:
            kinds = {field.type, right.field(field.name).type}
            if pa.string() in kinds:  # as text, any field of a CSV file can be read
                fields.append(field.with_type(pa.string()))
            else:
                one = [pa.schema([field]), pa.schema([right.field(field.name)])]
                fields += pa.unify_schemas(one, promote_options="permissive")
        return pa.schema(fields)

    @property
    def _kind(self) -> str:
        return f"{self.name.upper()} file"

    def _parse(self) -> pc.ParseOptions:
        return pc.ParseOptions(delimiter=self.delimiter, newlines_in_values=True)

    def _read(self, path: Path, convert: Any) -> pa.Table:
        try:
            if not open_decoded(path).read(1):
                return _EMPTY.empty_table()
            table = pc.read_csv(open_decoded(path), _READ, self._parse(), convert)
            _unique(table.schema)
            return table
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(str(path), self._kind, error) from error


def _unique(schema: pa.Schema) -> pa.Schema:
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ValueError(f"two columns are called {twice[0]!r}")
    return schema
