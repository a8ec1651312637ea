"""What lies in a node's cache folder, file by file, for people: whose data it is, how old, how often opened.

Whose: the object's name is kept in the file, in the metadata of its Arrow schema (`SOURCE`), which no reader of data
looks at; files of earlier versions have none. How often: an extended attribute that each open adds to, where the file
system has them; two processes that open at the same moment may count once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ray_goodput.data.cache_file import CorruptFileError, read_trailer
from ray_goodput.data.cache_lock import try_lock
from ray_goodput.data.cache_room import CachedFile, remove_unless_open

SOURCE = b"ray_goodput.source"
_OPENS = "user.ray_goodput.opens"
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedEntry:
    """One cached data shard. dataset, key: root and name of its object, "" if unknown; opens: None if not counted.

    written_at_s, used_at_s: wall clock; used: last opened. in_use: some process has it open now.
    """

    name: str
    dataset: str
    key: str
    size_bytes: int
    written_at_s: float
    used_at_s: float
    opens: int | None
    in_use: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge did; kept: names of files that were to go and are in use."""

    files: int
    freed_bytes: int
    kept: tuple[str, ...]


def with_source(table: pa.Table, *, dataset: str, key: str) -> pa.Table:
    """The same table, with the name of its object kept in the schema's metadata."""
    metadata = {**(table.schema.metadata or {}), SOURCE: json.dumps({"dataset": dataset, "key": key}).encode()}
    return table.replace_schema_metadata(metadata)


def count_open(fd: int) -> None:
    """One more open of a cached file. Never fails: a file of another user, or a file system without attributes."""
    with suppress(OSError):
        os.setxattr(fd, _OPENS, _COUNT.pack((_opens(fd) or 0) + 1))


def entry_of(file: CachedFile) -> CachedEntry | None:
    """What is known about a cached file; None if it is gone."""
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        source = _source(fd, file.path)
        return CachedEntry(
            name=file.name,
            dataset=str(source.get("dataset", "")),
            key=str(source.get("key", "")),
            size_bytes=file.size_bytes,
            written_at_s=os.fstat(fd).st_mtime,
            used_at_s=file.used_at_s,
            opens=_opens(fd),
            in_use=not try_lock(fd),  # given back at once, with `fd`; an opener of this very moment asks again
        )
    finally:
        os.close(fd)


def purge(files: Iterable[CachedFile], chosen: Callable[[CachedEntry], bool]) -> Purged:
    """The files that are `chosen` are gone, but for those that somebody has open."""
    count = freed = 0
    kept: list[str] = []
    for file in files:
        entry = entry_of(file)
        if entry is None or not chosen(entry):
            continue
        if remove_unless_open(file.path):
            count += 1
            freed += file.size_bytes
        elif file.path.exists():
            kept.append(entry.name)
    return Purged(count, freed, tuple(kept))


def _source(fd: int, path: Path) -> dict[str, Any]:
    try:
        ipc_bytes, _ = read_trailer(fd)
        with pa.memory_map(str(path)) as mapped:
            metadata = pa.ipc.open_file(mapped.read_buffer(ipc_bytes)).schema.metadata or {}
        found = json.loads(metadata.get(SOURCE, b"{}"))
    except (CorruptFileError, pa.ArrowException, OSError, ValueError):
        return {}  # whose it was cannot be told any more; who opens it finds that it is damaged
    return found if isinstance(found, dict) else {}


def _opens(fd: int) -> int | None:
    try:
        return _COUNT.unpack(os.getxattr(fd, _OPENS))[0]
    except (OSError, struct.error):
        return None
