"""`transform_shard=`: a function from Arrow table to Arrow table, as part of the format that reads the shards.

A format that transforms has the transform's version in its identity, and so have the manifest and the cache's content
names: what is cached is the result, and another version is other data. Everything else goes on as with any format.
"""

from __future__ import annotations

import hashlib
import inspect
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

import pyarrow as pa

from ray_goodput.data.formats import GroupingFormat, GuessingFormat, ShardFacts, ShardFormat, identity_of
from ray_goodput.data.groups import FileGroup
from ray_goodput.errors import ConfigError, ShardTransformError
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

TransformShard = Callable[[pa.Table], pa.Table]
TransformRows = Literal["same", "count"]


def source_version(transform: TransformShard) -> str:
    """A version for a plain function: a hash of its source text and its default arguments.

    What the function calls or reads outside itself is not covered: then the version has to be given.

    Raises:
        ConfigError: no plain function, or it holds values of a surrounding one: its text does not say what it does.
    """
    name = getattr(transform, "__qualname__", type(transform).__name__)
    give = 'give transform_version="tokens-1", say: no other transform of these files may have it, nor another result'
    if not inspect.isfunction(transform):
        raise ConfigError(f"transform_shard={name} is no plain function, so it has no version of its own: {give}.")
    if transform.__closure__:
        outer = ", ".join(transform.__code__.co_freevars)
        raise ConfigError(f"transform_shard={name} uses {outer} of the function around it: {give}.")
    try:
        text = textwrap.dedent(inspect.getsource(transform))
    except (OSError, TypeError):
        raise ConfigError(f"transform_shard={name} has no source text to be had: {give}.") from None
    defaults = repr((transform.__defaults__, transform.__kwdefaults__))
    return "source-" + hashlib.sha256(f"{text}\n{defaults}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class TransformedFormat:
    """`inner` with a transform after it. Two of them are equal if their versions are: a function that travelled by
    value is not the same object again.

    rows: "same": the result has as many rows as the file; "count": the manifest's job transforms each file to count.
    """

    inner: Any
    version: str
    rows: TransformRows
    transform: TransformShard = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def extensions(self) -> tuple[str, ...]:
        return self.inner.extensions

    @property
    def identity(self) -> str:
        return f"{identity_of(self.inner)} transform={self.version} rows={self.rows}"

    def inspect(self, store: ObjectStore, info: ObjectInfo) -> ShardFacts:
        facts = self.inner.inspect(store, info)
        if self.rows == "same" or not facts.rows:
            return facts
        with tempfile.TemporaryDirectory(prefix="ray-goodput-") as folder:
            path = Path(folder) / (PurePosixPath(info.key).name[-200:] or "object")
            store.download_file(info.key, path, etag=info.etag)
            return ShardFacts(self.apply(self.inner.read_table(path), info.key).num_rows, facts.schema)

    def read_table(self, path: Path) -> pa.Table:
        return self.apply(self.inner.read_table(path), path.name)

    def apply(self, table: pa.Table, what: str) -> pa.Table:
        """The transform's result. Raises ShardTransformError."""
        try:
            result = self.transform(table)
        except Exception as error:  # the user's own: said with the file that shows it
            raise ShardTransformError(
                f"transform_shard= failed for {what}: {type(error).__name__}: {error}."
            ) from error
        if not isinstance(result, pa.Table):
            raise ShardTransformError(
                f"transform_shard= returned a {type(result).__name__} for {what}: return a pyarrow.Table."
            )
        if self.rows == "same" and result.num_rows != table.num_rows:
            raise ShardTransformError(
                f"transform_shard= made {result.num_rows} rows of the {table.num_rows} of {what}, and the order of "
                'samples counts on the files\' rows: set transform_rows="count", which transforms every file once when '
                "the manifest is made."
            )
        return result


class TransformedTextFormat(TransformedFormat):
    """Of a format that guesses types: the files agree on theirs before the transform."""

    __slots__ = ()

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return self.inner.merge(left, right)

    def read_as(self, path: Path, schema: pa.Schema) -> pa.Table:
        return self.apply(self.inner.read_as(path, schema), path.name)


class TransformedGroupFormat(TransformedFormat):
    """Of small files in groups: the transform gets a group."""

    __slots__ = ()

    def groups(self, infos: Sequence[ObjectInfo]) -> Iterable[FileGroup]:
        return self.inner.groups(infos)

    def schema_of(self, groups: Sequence[FileGroup]) -> pa.Schema:
        return self.inner.schema_of(groups)

    def read_group(self, group: FileGroup, paths: Sequence[Path]) -> pa.Table:
        return self.apply(self.inner.read_group(group, paths), group.title)


def transformed(fmt: ShardFormat, transform: TransformShard, version: str, rows: TransformRows) -> ShardFormat:
    """`fmt` with a transform after it.

    Raises:
        ConfigError: rows of groups of files cannot be counted before they are read.
    """
    kind = TransformedFormat
    if isinstance(fmt, GroupingFormat):
        if rows == "count":
            raise ConfigError(
                f'transform_rows="count" does not go with format={fmt.name!r}, where a row is a file: keep the number '
                'of rows, or use transform= with on_error="skip" to leave samples out.'
            )
        kind = TransformedGroupFormat
    elif isinstance(fmt, GuessingFormat):
        kind = TransformedTextFormat
    return cast(ShardFormat, kind(fmt, version, rows, transform))
