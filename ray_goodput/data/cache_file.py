"""One data shard as one file: an Arrow IPC file, then a trailer of 32 bytes; the format is drawn in `data/cache.py`."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

MAGIC = b"RGCACHE1"
TRAILER = struct.Struct("<8sQ16s")
_READ_BYTES = 4 << 20


class CorruptFileError(ValueError):
    """The file is not what its trailer says. Stays inside the cache, which removes the file."""


def content_name(
    *, uri: str, key: str, etag: str | None, size_bytes: int, transform: str = "", columns: Sequence[str] | None = None
) -> str:
    """32 hex digits that change whenever the bytes or what is kept of them change; the same on every node and run.

    uri and key name the object together, so that it does not matter where a dataset's pattern divides them.
    """
    parts = [
        f"{uri.rstrip('/')}/{key}",
        etag or "",
        str(size_bytes),
        transform,
        *(["*"] if columns is None else ["=", *columns]),
    ]
    digest = xxhash.xxh3_128()
    for part in parts:
        raw = part.encode("utf-8", "surrogateescape")
        digest.update(len(raw).to_bytes(8, "little"))  # lengths, so that ("ab", "c") and ("a", "bc") differ
        digest.update(raw)
    return digest.hexdigest()


class _HashingSink:
    """What pyarrow writes to: hashes the bytes meant to be written, not those read back."""

    closed = False

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._hash.update(view)
        self._file.write(view)
        self.size_bytes += view.nbytes
        return view.nbytes

    def trailer(self) -> bytes:
        return TRAILER.pack(MAGIC, self.size_bytes, self._hash.digest())

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def file_bytes(table: pa.Table) -> int:
    """Exact size of the file that `write_file` makes of `table`. Nothing is copied."""
    sink = pa.MockOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.size() + TRAILER.size


def write_file(path: Path, table: pa.Table) -> int:
    """`path` (must not exist) holds `table` and its trailer, fsynced; returns its size.

    Raises:
        OSError: the disk is full, ... The file may be there, incomplete.
    """
    with path.open("xb") as file:
        sink = _HashingSink(file)
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), table.schema) as writer:
            writer.write_table(table)
        file.write(sink.trailer())
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def read_trailer(fd: int) -> tuple[int, bytes]:
    """(bytes of Arrow IPC, their xxh3-128) of an open file.

    Raises:
        CorruptFileError: truncated, or not a file of this format.
    """
    size = os.fstat(fd).st_size
    raw = os.pread(fd, TRAILER.size, max(0, size - TRAILER.size))
    if len(raw) != TRAILER.size:
        raise CorruptFileError(f"{size} bytes are too few for a trailer")
    magic, ipc_bytes, digest = TRAILER.unpack(raw)
    if magic != MAGIC or ipc_bytes != size - TRAILER.size:
        raise CorruptFileError(f"{size} bytes without a valid trailer at the end: cut short or overwritten")
    return ipc_bytes, digest


def verify(fd: int) -> None:
    """The bytes of an open file are those that were written.

    Reads instead of mapping: a bad sector is then an `OSError`, not a SIGBUS.

    Raises:
        CorruptFileError: they are not.
        OSError: they cannot be read.
    """
    ipc_bytes, expected = read_trailer(fd)
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_READ_BYTES, max(1, ipc_bytes))))
    done = 0
    while done < ipc_bytes:
        got = os.preadv(fd, [buffer[: min(len(buffer), ipc_bytes - done)]], done)
        if not got:
            raise CorruptFileError(f"ends after {done} of {ipc_bytes} bytes")
        digest.update(buffer[:got])
        done += got
    if digest.digest() != expected:
        raise CorruptFileError(f"the checksum of its {ipc_bytes} bytes differs from the one kept in it")


def map_table(fd: int) -> pa.Table:
    """The table in an open file, memory-mapped, without a copy.

    `mmap` keeps a duplicate of `fd`, hence of its flock: the lock lives exactly as long as any array, slice or numpy
    view of the table, whatever becomes of `fd`.

    Raises:
        CorruptFileError: no Arrow table in it.
    """
    ipc_bytes, _ = read_trailer(fd)
    mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    with suppress(OSError):  # only a hint
        mapped.madvise(mmap.MADV_WILLNEED)
    try:
        return pa.ipc.open_file(pa.py_buffer(mapped).slice(0, ipc_bytes)).read_all()
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"no Arrow table in it: {error}") from error
