"""How large objects travel: in parts upwards, in parallel ranges downwards, never whole in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from ray_goodput.storage.local import local_error
from ray_goodput.storage.protocol import ObjectInfo

MIB = 1 << 20
MAX_PARTS = 10_000  # of one multipart upload, a limit of S3
RANGE_BYTES = 8 * MIB


class Fetch(Protocol):
    """Bytes [start, end) of one object, and what the answer says about the object. Retries inside."""

    def __call__(self, start: int, end: int) -> tuple[bytes | memoryview, ObjectInfo]: ...


def part_bytes_of(size_bytes: int, smallest: int) -> int:
    """Size of a part so that `size_bytes` need at most 10,000 parts: `smallest`, or whole MiB above it."""
    needed = -(-size_bytes // MAX_PARTS)
    return smallest if needed <= smallest else -(-needed // MIB) * MIB


def memory_pieces(view: memoryview, piece_bytes: int) -> Iterator[memoryview]:
    """`view` in pieces, without copying."""
    for start in range(0, len(view), piece_bytes):
        yield view[start : start + piece_bytes]


def download(
    path: Path,
    info: ObjectInfo,
    first: bytes | memoryview,
    fetch: Fetch,
    check: Callable[[ObjectInfo], None],
    threads: int,
) -> None:
    """The file `path` holds the object `info`, of which `first` are the first bytes; the rest comes in ranges.

    `check` is called with what each answer says about the object, and raises if it is another one. On an error the
    ranges not yet begun are given up, and the file is left unfinished.
    """
    fd = _open_preallocated(path, info.size_bytes)
    try:
        _pwrite(fd, first, 0, path)
        starts = range(len(first), info.size_bytes, RANGE_BYTES)

        def transfer(start: int) -> None:
            data, seen = fetch(start, min(start + RANGE_BYTES, info.size_bytes))
            check(seen)
            _pwrite(fd, data, start, path)

        if len(starts) <= 1:
            for start in starts:
                transfer(start)
            return
        pool = ThreadPoolExecutor(min(threads, len(starts)), thread_name_prefix="download")
        try:
            for _ in pool.map(transfer, starts):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
    finally:
        os.close(fd)


def _open_preallocated(path: Path, size_bytes: int) -> int:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise local_error("write", path, error) from error
    try:
        if size_bytes:
            # A full disk shows now, not after most of the download.
            os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        os.close(fd)
        raise local_error(f"reserve {size_bytes / MIB:.0f} MiB for", path, error) from error
    return fd


def _pwrite(fd: int, data: bytes | memoryview, offset: int, path: Path) -> None:
    view = memoryview(data)
    try:
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
    except OSError as error:
        raise local_error("write", path, error) from error
