"""What the data plane asks of a file format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from ray_goodput.storage.protocol import ObjectInfo, ObjectStore


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What a manifest keeps of one file: its rows, and its columns to compare with the other files'."""

    rows: int
    schema: pa.Schema


class ShardFormat(Protocol):
    """One file format. Stateless, thread-safe and picklable: it travels to prefetch actors."""

    @property
    def name(self) -> str:
        """Short and fixed: part of the manifest and of the cache's content names."""
        ...

    @property
    def extensions(self) -> tuple[str, ...]:
        """Endings of file names, with the dot, lower case."""
        ...

    def inspect(self, store: ObjectStore, info: ObjectInfo) -> ShardFacts:
        """Rows and columns of an object, reading as little of it as possible.

        Raises:
            ShardReadError: the object is not of this format or is damaged; the message names it.
        """
        ...

    def read_table(self, path: Path) -> pa.Table:
        """All rows of a local copy, in the file's own order. Raises ShardReadError."""
        ...
