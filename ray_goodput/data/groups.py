"""Groups of small files: one data shard that is many objects. Pure.

A manifest has one key a data shard. That of a group is a JSON array with an entry `[key, size, etag, label, class]` for
each file, so that the manifest's digest, the pinning of objects and the cache's content names cover all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupedFile:
    """One file of a group; `key` is relative to the dataset's root."""

    key: str
    size_bytes: int
    etag: str | None
    label: int | float | None = None
    class_name: str | None = None


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files that are fetched and cached together, one row each."""

    files: tuple[GroupedFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def title(self) -> str:
        """For messages, where the key would fill a screen."""
        return f"a group of {len(self.files)} files, the first of them {self.files[0].key}"

    def to_key(self) -> str:
        """The group as a manifest's key."""
        entries = [[file.key, file.size_bytes, file.etag, file.label, file.class_name] for file in self.files]
        return json.dumps(entries, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_key(cls, key: str) -> FileGroup:
        """Inverse of `to_key`."""
        return cls(tuple(GroupedFile(*entry) for entry in json.loads(key)))
