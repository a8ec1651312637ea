"""Raw files (images, sounds, texts), one sample each, grouped into data shards; labels from folders or a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ray_goodput.data.formats.base import ShardFacts, damaged, title_of
from ray_goodput.data.groups import FileGroup, GroupedFile
from ray_goodput.data.listing import Listing
from ray_goodput.errors import ConfigError
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

LabelRule = Literal["folder"] | Callable[[str], int | float | str] | None


@dataclass(frozen=True, slots=True)
class RawFilesFormat:
    """Columns `bytes` and `path` (relative to the dataset's root), and by `label`:

    "folder": `label` is the position of the file's folder name among all of them, sorted, and `class_name` that name.
        So train and validation data agree if both have all the folders.
    a function of the path: `label` is what it returns; for texts, as with folders. It runs once, in the driver: a run
        keeps its labels in its manifest, whatever becomes of the function.
    None: no label.

    group_files, group_bytes: a data shard ends before it exceeds either. Files are dealt to groups by a hash of their
    paths, so that each is a mix of all folders: the shuffling window then need not be large.
    """

    label: LabelRule = "folder"
    group_files: int = 1024
    group_bytes: int = 16 << 20
    name: str = "files"
    extensions: tuple[str, ...] = (
        *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
        *(".wav", ".flac", ".mp3", ".ogg", ".mp4", ".txt"),
    )

    def __post_init__(self) -> None:
        if self.label is not None and self.label != "folder" and not callable(self.label):
            raise ConfigError(f'RawFilesFormat(label={self.label!r}): give "folder", a function of the path, or None.')
        if self.group_files < 1 or self.group_bytes < 1:
            raise ConfigError(
                f"RawFilesFormat(group_files={self.group_files}, group_bytes={self.group_bytes}): give at least 1."
            )

    def __getstate__(self) -> tuple[object, ...]:
        # The function stays with who makes the manifest: processes that fetch find labels in it, and need not have it.
        label = None if callable(self.label) else self.label
        return (label, self.group_files, self.group_bytes, self.name, self.extensions)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            object.__setattr__(self, name, value)

    @property
    def identity(self) -> str:
        rule = "function" if callable(self.label) else self.label
        return f"{self.name}-{rule}-{self.group_files}-{self.group_bytes}"

    def inspect(self, store: ObjectStore, info: ObjectInfo) -> ShardFacts:
        raise damaged(title_of(store, info), "data shard", "raw files are data shards in groups only")

    def read_table(self, path: Path) -> pa.Table:
        raise damaged(str(path), "data shard", "raw files are data shards in groups only")

    def groups(self, infos: Sequence[ObjectInfo]) -> Iterator[FileGroup]:
        """Raises ConfigError if the label function raises, or returns different kinds of labels."""
        listing = Listing.of(infos)
        labels = self._labels(listing)
        order = np.argsort(_hashes(listing), kind="stable")  # by (hash, key), as a listing is by key
        run: list[GroupedFile] = []
        size = 0
        for info, at in zip(listing.take(order), order.tolist(), strict=True):
            if run and (len(run) == self.group_files or size + info.size_bytes > self.group_bytes):
                yield FileGroup(tuple(run))
                run, size = [], 0
            run.append(GroupedFile(info.key, info.size_bytes, info.etag, *labels[at]))
            size += info.size_bytes
        if run:
            yield FileGroup(tuple(run))

    def schema_of(self, groups: Sequence[FileGroup]) -> pa.Schema:
        return _schema(groups[0])

    def read_group(self, group: FileGroup, paths: Sequence[Path]) -> pa.Table:
        columns = {
            "bytes": [path.read_bytes() for path in paths],
            "path": [file.key for file in group.files],
            "label": [file.label for file in group.files],
            "class_name": [file.class_name for file in group.files],
        }
        schema = _schema(group)
        return pa.table({name: columns[name] for name in schema.names}, schema=schema)

    def _labels(self, listing: Listing) -> Sequence[tuple[Any, str | None]]:
        """(label, class name) of each file."""
        if self.label is None:
            return [(None, None)] * len(listing)
        if self.label == "folder":
            found: list[Any] = [sys.intern(_folder_name(key)) for key in listing.each_key()]
        else:
            rule = self.label
            found = [self._called(rule, key) for key in listing.each_key()]
        if all(isinstance(label, str) for label in found):
            number = {name: (i, name) for i, name in enumerate(sorted(set(found)))}
            return [number[name] for name in found]
        if all(isinstance(label, int) for label in found):
            return [(int(label), None) for label in found]
        if all(isinstance(label, int | float) for label in found):
            return [(float(label), None) for label in found]
        kinds = sorted({type(label).__name__ for label in found})
        raise ConfigError(f"RawFilesFormat(label=) returned {', '.join(kinds)}: return one kind of int, float or str.")

    def _called(self, rule: Callable[[str], Any], key: str) -> Any:
        try:
            return rule(key)
        except Exception as error:  # the user's own: told with the path that shows it
            raise ConfigError(f"RawFilesFormat(label=) raised {error!r} for {key!r}.") from error


def _folder_name(key: str) -> str:
    """`PurePosixPath(key).parent.name`, ten times as fast; for odd keys (`a//b`, `./b`, `a/`, `a/.`) that."""
    above, _, own = key.rpartition("/")
    name = above.rpartition("/")[2]
    return PurePosixPath(key).parent.name if name in ("", ".") or own in ("", ".") else name


def _hashes(listing: Listing) -> NDArray[np.uint64]:
    hashes = (xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")) for key in listing.each_key())
    return np.fromiter(hashes, np.uint64, len(listing))


def _schema(group: FileGroup) -> pa.Schema:
    first = group.files[0]
    fields: list[tuple[str, pa.DataType]] = [("bytes", pa.large_binary()), ("path", pa.string())]
    if first.label is not None:
        fields.append(("label", pa.float64() if isinstance(first.label, float) else pa.int64()))
    if first.class_name is not None:
        fields.append(("class_name", pa.string()))
    return pa.schema(fields)
