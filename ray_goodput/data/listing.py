"""What is in a folder or bucket: a listing kept as columns, since a million objects of Python are half a gigabyte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from ray_goodput.data.patterns import compile_glob
from ray_goodput.errors import EmptyDatasetError
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

_AT_ONCE = 1 << 16
_compute: Any = pyarrow.compute  # functions made at run time


class Listing(Sequence[ObjectInfo]):
    """Objects by key; each is made when it is looked at. Without the times of change."""

    def __init__(self, keys: pa.Array, sizes: NDArray[np.int64], etags: pa.Array) -> None:
        self.keys = keys
        self.sizes = sizes
        self.etags = etags

    @classmethod
    def of(cls, infos: Sequence[ObjectInfo]) -> Listing:
        """The same objects as columns."""
        if isinstance(infos, Listing):
            return infos
        table = _columns(infos)
        return cls(table["key"].chunk(0), table["size"].to_numpy(), table["etag"].chunk(0))

    def take(self, indices: NDArray[np.int64]) -> Listing:
        """The objects at `indices`, in that order."""
        return Listing(self.keys.take(indices), self.sizes[indices], self.etags.take(indices))

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> ObjectInfo: ...

    @overload
    def __getitem__(self, index: slice) -> Listing: ...

    def __getitem__(self, index: int | slice) -> ObjectInfo | Listing:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1
            size = max(0, stop - start)
            return Listing(self.keys.slice(start, size), self.sizes[start:stop], self.etags.slice(start, size))
        return ObjectInfo(
            key=self.keys[index].as_py(), size_bytes=int(self.sizes[index]), etag=self.etags[index].as_py()
        )

    def each_key(self) -> Iterator[str]:
        """The keys, without the rest of each object."""
        for start in range(0, len(self), _AT_ONCE):
            yield from self.keys.slice(start, _AT_ONCE).to_pylist()

    def __iter__(self) -> Iterator[ObjectInfo]:
        for start in range(0, len(self), _AT_ONCE):
            part = self[start : start + _AT_ONCE]
            for key, size, etag in zip(part.keys.to_pylist(), part.sizes.tolist(), part.etags.to_pylist(), strict=True):
                yield ObjectInfo(key=key, size_bytes=size, etag=etag)


def list_matching(store: ObjectStore, pattern: str, uri: str) -> tuple[Listing, int]:
    """The objects of `store` that match `pattern`, by key, and how many there are altogether.

    Raises:
        EmptyDatasetError: none matches; `uri` is what the message calls the dataset.
    """
    matcher = compile_glob(pattern)
    num_seen, chunks, waiting = 0, list[pa.Table](), list[ObjectInfo]()
    for info in store.list():
        num_seen += 1
        if matcher.fullmatch(info.key):
            waiting.append(info)
            if len(waiting) == _AT_ONCE:
                chunks.append(_columns(waiting))
                waiting.clear()
    if not chunks and not waiting:
        found = f"There are {num_seen} objects under {store.uri} and none matches {pattern!r}"
        raise EmptyDatasetError(
            f"{found if num_seen else f'There is nothing at {store.uri}'}: correct the dataset's URI {uri}."
        )
    table = pa.concat_tables([*chunks, _columns(waiting)]).combine_chunks()
    keys = table["key"].chunk(0)
    if not _compute.all(_compute.less_equal(keys[:-1], keys[1:])).as_py():  # an empty comparison is null
        order = _compute.sort_indices(table, [("key", "ascending")])
        table = table.take(order).combine_chunks()
    return Listing(table["key"].chunk(0), table["size"].to_numpy(), table["etag"].chunk(0)), num_seen


def _columns(infos: Sequence[ObjectInfo]) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([info.key for info in infos], pa.large_string()),
            "size": pa.array([info.size_bytes for info in infos], pa.int64()),
            "etag": pa.array([info.etag for info in infos], pa.large_string()),
        }
    )
