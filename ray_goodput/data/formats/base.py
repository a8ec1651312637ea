"""What the data plane asks of a file format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import pyarrow as pa

from ray_goodput.data.groups import FileGroup
from ray_goodput.errors import ShardReadError
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
        """Short and fixed: what `format=` calls it."""
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


@runtime_checkable
class GuessingFormat(Protocol):
    """Text: a file's types are read off its values, so that the files of a dataset have to agree on them first."""

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Columns that both files can be read as. Raises `pa.ArrowInvalid` if there are none, or ValueError."""
        ...

    def read_as(self, path: Path, schema: pa.Schema) -> pa.Table:
        """All rows of a local copy, with these columns. Raises ShardReadError."""
        ...


@runtime_checkable
class GroupingFormat(Protocol):
    """Files too small to be a data shard each: one data shard is a group of them."""

    def groups(self, infos: Sequence[ObjectInfo]) -> Iterable[FileGroup]:
        """Every object in exactly one group; the same objects, by key, always give the same groups."""
        ...

    def schema_of(self, groups: Sequence[FileGroup]) -> pa.Schema:
        """Columns of `read_group`, judged by the first group alone."""
        ...

    def read_group(self, group: FileGroup, paths: Sequence[Path]) -> pa.Table:
        """One row a file, from local copies in the group's order. Raises ShardReadError."""
        ...


def identity_of(fmt: ShardFormat) -> str:
    """What the manifest and the cache's content names call the format: its name, or its `identity` if it has one.

    A format with parameters that change what is read from a file needs one, which says them.
    """
    return getattr(fmt, "identity", fmt.name)


def title_of(store: ObjectStore, info: ObjectInfo) -> str:
    """The object's whole URI, for messages."""
    return f"{store.uri.rstrip('/')}/{info.key}"


def damaged(title: str, kind: str, reason: object) -> ShardReadError:
    """The error for a file that cannot be what its name or the user says."""
    text = str(reason).rstrip(".") or type(reason).__name__
    return ShardReadError(
        f"{title} is no readable {kind}: {text}. Replace it, or leave it out of the dataset's pattern."
    )
