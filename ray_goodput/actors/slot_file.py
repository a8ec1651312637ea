"""Reads a slot file in pieces: never a whole slice in the vault's own memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from ray_goodput.core.commit import Extent, ObjectRecord
from ray_goodput.gates import gate
from ray_goodput.storage.checksum import Checksum
from ray_goodput.storage.disk import tmp_path

_CHUNK_BYTES = 8 << 20


class MappedSlot:
    """A file as a read-only memoryview; an empty file is an empty view."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")

    def __enter__(self) -> memoryview:
        with open(self._path, "rb") as file:
            if os.fstat(file.fileno()).st_size:
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                self._view = memoryview(self._map)
        return self._view

    def __exit__(self, *exc: object) -> None:
        self._view.release()
        if self._map is not None:
            self._map.close()


def _chunks(slot: memoryview, extent: Extent) -> Iterator[memoryview]:
    end = extent.offset + extent.size_bytes
    for start in range(extent.offset, end, _CHUNK_BYTES):
        with slot[start : min(start + _CHUNK_BYTES, end)] as chunk:
            yield chunk


def record_extent(slot: memoryview, extent: Extent) -> ObjectRecord:
    """One extent as an object, with its checksum."""
    checksum = Checksum()
    for chunk in _chunks(slot, extent):
        checksum.update(chunk)
    return ObjectRecord(name=extent.name, size_bytes=extent.size_bytes, xxh3_128=checksum.hexdigest())


def copy_extent(slot: memoryview, extent: Extent, path: Path) -> ObjectRecord:
    """Copy one extent to `path` and take its checksum on the way. Not fsynced: a torn copy fails its checksum."""
    gate("disk", path=path)
    checksum = Checksum()
    tmp = tmp_path(path)
    try:
        with open(tmp, "wb") as file:
            for chunk in _chunks(slot, extent):
                checksum.update(chunk)
                file.write(chunk)
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)
    return ObjectRecord(name=extent.name, size_bytes=extent.size_bytes, xxh3_128=checksum.hexdigest())
