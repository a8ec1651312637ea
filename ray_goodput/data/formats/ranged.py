"""An object as a file: read in ranges when asked for, decompressed by what its first bytes say."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa

from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

_CHUNK_BYTES = 4 << 20
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class _Chunk:
    """What was read last."""

    start = 0
    data = b""


class RangedFile(io.RawIOBase):
    """A read-only, seekable file over `ObjectStore.get_range`; what is skipped by more than a chunk is not fetched."""

    def __init__(self, store: ObjectStore, info: ObjectInfo, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        super().__init__()
        self._store = store
        self._info = info
        self._chunk_bytes = chunk_bytes
        self._position = 0
        self._last = _Chunk()

    def reopened(self) -> RangedFile:
        """The same object from its beginning, whatever becomes of this file; the last chunk is not fetched again."""
        again = RangedFile(self._store, self._info, chunk_bytes=self._chunk_bytes)
        again._last = self._last
        return again

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._info.size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Raises StorageError."""
        view = memoryview(buffer).cast("B")
        last = self._last
        if not last.start <= self._position < last.start + len(last.data):
            length = min(max(self._chunk_bytes, len(view)), self._info.size_bytes - self._position)
            if length <= 0 or not len(view):
                return 0
            last.data = self._store.get_range(self._info.key, self._position, length)
            last.start = self._position
        begin = self._position - last.start
        piece = last.data[begin : begin + len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def open_decoded(source: RangedFile | Path) -> pa.NativeFile:
    """`source` from its beginning, decompressed if it is gzip or zstd (also several streams one after another).

    Reading raises OSError if a compressed stream is damaged or cut short.
    """
    # Reopened, since Arrow closes what it is given when it is done.
    file = pa.OSFile(str(source)) if isinstance(source, Path) else pa.PythonFile(source.reopened(), mode="r")
    codec = codec_of(file.read(4))
    file.seek(0)
    return file if codec is None else pa.CompressedInputStream(file, codec)


def codec_of(head: bytes) -> str | None:
    """The compression that a file's first bytes show, None for none that is known."""
    return next((codec for magic, codec in _MAGIC.items() if head.startswith(magic)), None)
