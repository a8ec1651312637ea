"""One data shard's columns, ready for taking any rows with whole-batch operations. No torch here.

A column is *dense* if its rows all have one shape: numbers, booleans, and lists of equal length of them. A dense column
is a numpy array (rows, ...), zero-copy over the memory-mapped shard but for booleans (bits there, bytes here). All
other columns are *loose*: their rows become a Python list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_goodput.errors import ShardReadError

Rows = NDArray[np.int64]


class ShardColumns:
    """Columns of a data shard, made once and used for many batches. Keeps the table, and so its file, open."""

    def __init__(self, table: pa.Table, columns: Sequence[str] | None, *, title: str) -> None:
        """`title` names the data shard in errors. Raises ShardReadError if a column or numbers in one are missing."""
        names = table.column_names if columns is None else list(columns)
        self.dense: dict[str, NDArray[Any]] = {}
        self.loose: dict[str, LooseColumn] = {}
        for name in names:
            if name not in table.column_names:
                raise ShardReadError(f"{title} has no column {name!r}; it has {', '.join(table.column_names)}.")
            array = whole(table[name])
            try:
                values = dense_values(array)
            except MissingNumbersError as error:
                raise ShardReadError(
                    f"Column {name!r} of {title[:1].lower()}{title[1:]} {error}: fill them in, or leave the column out "
                    "with columns=."
                ) from None
            if values is not None:
                self.dense[name] = values
            else:
                self.loose[name] = LooseColumn(array)
        self.names = names
        self.num_rows = table.num_rows

    def take_list(self, name: str, rows: Rows) -> list[Any]:
        """Rows of a column as a list: arrays for rows of a list of numbers, else Python objects."""
        if name in self.dense:
            return list(self.dense[name][rows])
        return self.loose[name].take(rows)


class LooseColumn:
    """Strings, bytes, dates, structs, and lists of different lengths."""

    def __init__(self, array: pa.Array) -> None:
        self._array = array
        self._values: NDArray[Any] | None = None
        if _is_list(array.type) and array.null_count == 0:
            # Lists of numbers are sliced from one buffer instead of becoming Python objects number by number.
            self._values = dense_values(array.values)
            self._offsets = array.offsets.to_numpy()

    def take(self, rows: Rows) -> list[Any]:
        if self._values is None:
            return self._array.take(pa.array(rows)).to_pylist()
        starts, stops = self._offsets[rows].tolist(), self._offsets[rows + 1].tolist()
        return [self._values[start:stop].copy() for start, stop in zip(starts, stops, strict=True)]


class MissingNumbersError(ValueError):
    """Nulls where a tensor has no way to say so."""


def dense_values(array: pa.Array) -> NDArray[Any] | None:
    """The array as numpy (len, ...), None if it is loose. Missing floats are NaN; other missing numbers an error."""
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        if array.null_count:
            raise MissingNumbersError(f"has {array.null_count} rows without a tensor")
        return array.to_numpy_ndarray() if len(array) else np.empty((0, *kind.shape), kind.value_type.to_pandas_dtype())
    if pa.types.is_floating(kind):
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        if array.null_count:
            raise MissingNumbersError(f"has {array.null_count} rows without a value")
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
        if _is_loose(kind.value_type):
            return None
        if array.null_count:
            raise MissingNumbersError(f"has {array.null_count} rows without a list")
        return _as_rows(array.flatten(), len(array), width)
    if _is_list(kind) and not _is_loose(kind.value_type) and len(array) and array.null_count == 0:
        widths = np.diff(array.offsets.to_numpy())
        if (widths == widths[0]).all():
            return _as_rows(array.flatten(), len(array), int(widths[0]))
    return None


def whole(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array; no copy if it is one already, as in the cache."""
    if column.num_chunks == 1:
        return column.chunk(0)
    if column.num_chunks == 0:
        return pa.array([], column.type)
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _as_rows(values: pa.Array, num_rows: int, width: int) -> NDArray[Any] | None:
    inner = dense_values(values)
    return None if inner is None else inner.reshape(num_rows, width, *inner.shape[1:])


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_loose(kind: pa.DataType) -> bool:
    """Whether no array of this type can be dense, without looking at it."""
    if _is_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_loose(kind.value_type)
    tensor = isinstance(kind, pa.FixedShapeTensorType)
    return not (tensor or pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))
