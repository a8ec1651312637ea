"""Fixed-length token sequences: `.npy` arrays and raw `.bin` files, one row a sequence."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy

from ray_goodput.data.formats.base import ShardFacts, damaged, title_of
from ray_goodput.errors import ConfigError
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

_HEADER_BYTES = 4096
_NPY_MAGIC = b"\x93NUMPY"
_MAX_DIMENSIONS = 8


class _Layout(NamedTuple):
    """An array of `dtype` and shape (rows, *row_shape) from byte `offset` on; what is left at the end is no row."""

    dtype: np.dtype
    offset: int
    rows: int
    row_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenFormat:
    """One column `tokens` of sequences, in the files' own integer or float type.

    length: tokens of a row. Needed for `.bin` and one-dimensional `.npy` files, which are cut into rows of it; the rest
        at the end of a file is left out. For a language model give the context plus 1. Arrays of more dimensions are
        taken as they are, one row each.
    dtype: of `.bin` files, which are nothing but the numbers, little-endian; `.npy` files say it themselves.
    """

    length: int | None = None
    dtype: str | None = None
    name: str = "tokens"
    extensions: tuple[str, ...] = (".npy", ".bin")

    def __post_init__(self) -> None:
        if self.length is not None and (isinstance(self.length, bool) or self.length < 1):
            raise ConfigError(f"TokenFormat(length={self.length!r}): give the tokens of a row, at least 1.")
        if self.dtype is not None:
            try:
                usable = np.dtype(self.dtype).kind in "iuf"
            except TypeError:
                usable = False
            if not usable:
                raise ConfigError(f'TokenFormat(dtype={self.dtype!r}): give a number type, for example "uint16".')

    @property
    def identity(self) -> str:
        return f"{self.name}-{self.length or 'rows'}-{self.dtype or 'npy'}"

    def inspect(self, store: ObjectStore, info: ObjectInfo) -> ShardFacts:
        title = title_of(store, info)
        head = store.get_range(info.key, 0, min(_HEADER_BYTES, info.size_bytes)) if info.size_bytes else b""
        layout = self._layout(title, head, info.size_bytes)
        return ShardFacts(layout.rows, pa.schema([("tokens", _type(layout))]))

    def read_table(self, path: Path) -> pa.Table:
        size = os.path.getsize(path)
        with path.open("rb") as file:
            layout = self._layout(str(path), file.read(_HEADER_BYTES), size)
        width = int(np.prod(layout.row_shape))
        count = layout.rows * width
        values = np.fromfile(path, layout.dtype, count, offset=layout.offset)
        array: pa.Array = pa.array(values.astype(layout.dtype.newbyteorder("="), copy=False))
        for size in reversed(layout.row_shape):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return pa.table({"tokens": array})

    def _layout(self, title: str, head: bytes, size_bytes: int) -> _Layout:
        if head.startswith(_NPY_MAGIC):
            dtype, offset, shape = _npy_header(title, head, size_bytes)
        elif title.lower().endswith(".npy"):
            raise damaged(title, "token file", f"it has no .npy header in its {size_bytes} bytes")
        elif self.dtype is None or self.length is None:
            raise ConfigError(
                f"{title} does not say what it holds: give format=TokenFormat(length=..., dtype=...), for example "
                '1025 and "uint16".'
            )
        else:
            dtype, offset = np.dtype(self.dtype).newbyteorder("<"), 0
            count, rest = divmod(size_bytes, dtype.itemsize)
            if rest:
                raise damaged(title, "token file", f"{size_bytes} bytes are no whole number of {self.dtype}")
            shape = (count,)
        if len(shape) != 1:
            if self.length is not None and shape[1:] != (self.length,):
                raise damaged(title, "token file", f"its shape is {shape} and not (rows, {self.length})")
            return _Layout(dtype, offset, shape[0], shape[1:])
        if self.length is None:
            raise ConfigError(
                f"{title} is one row of {shape[0]} tokens: give format=TokenFormat(length=...) to cut it."
            )
        return _Layout(dtype, offset, shape[0] // self.length, (self.length,))


def _npy_header(title: str, head: bytes, size_bytes: int) -> tuple[np.dtype, int, tuple[int, ...]]:
    file = io.BytesIO(head)
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, columns_first, dtype = read(file)
    except ValueError as error:
        raise damaged(title, "token file", error) from error
    if dtype.kind not in "iuf" or not 1 <= len(shape) <= _MAX_DIMENSIONS or (columns_first and len(shape) > 1):
        order = "Fortran" if columns_first else "C"
        raise damaged(title, "token file", f"it is a {len(shape)}-dimensional array of {dtype} in {order} order")
    need = file.tell() + int(np.prod(shape)) * dtype.itemsize
    if need != size_bytes:
        raise damaged(title, "token file", f"an array of shape {shape} needs {need} bytes and it has {size_bytes}")
    if 0 in shape[1:]:
        raise damaged(title, "token file", f"rows of shape {shape[1:]} hold nothing")
    return dtype, file.tell(), shape


def _type(layout: _Layout) -> pa.DataType:
    kind = pa.from_numpy_dtype(layout.dtype.newbyteorder("="))
    for size in reversed(layout.row_shape):
        kind = pa.list_(kind, size)
    return kind
