"""Checksums of object bytes: xxh3-128, as hex, the algorithm named in the commit record.

Not cryptographic: it finds what hardware, networks and clients do to bytes, not what an attacker does.
"""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from ray_goodput.errors import StorageError

_READ_BYTES = 4 << 20


class Checksum:
    """xxh3-128 of bytes that arrive in pieces: the digest depends on their concatenation only."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`: any contiguous buffer, taken as its raw bytes."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """32 lower-case hex digits of everything given so far; more may follow."""
        return self._hash.hexdigest()


def xxh3_128_hex(data: bytes | bytearray | memoryview) -> str:
    """32 lower-case hex digits of the xxh3-128 of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_file(path: str | os.PathLike[str], offset: int = 0, size: int | None = None) -> str:
    """32 lower-case hex digits of bytes [offset, offset + size) of a local file; to its end without `size`.

    Reads in pieces of 4 MiB.

    Raises:
        StorageError: the file ends before `offset + size`.
        OSError: it cannot be read.
    """
    checksum = Checksum()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    done = 0
    with Path(path).open("rb", buffering=0) as file:
        file.seek(offset)
        while size is None or done < size:
            want = _READ_BYTES if size is None else min(_READ_BYTES, size - done)
            got = file.readinto(view[:want])
            if not got:
                break
            checksum.update(view[:got])
            done += got
    if size is not None and done < size:
        raise StorageError(
            f"{path} ends after {offset + done} bytes, {offset + size} were expected: the file was cut short."
        )
    return checksum.hexdigest()
