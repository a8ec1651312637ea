"""What the rest of the package may ask of a place that keeps objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object as a listing or a look-up shows it. `key` is relative to the store's root."""

    key: str
    size_bytes: int
    etag: str | None = None
    modified_at_s: float | None = None


class ObjectStore(Protocol):
    """Objects under one root URI, whole or absent. Keys are relative, `/`-separated, never start with `/`.

    All methods are thread-safe and blocking. Transient failures (timeouts, 429, 5xx, refused connections)
    are retried inside with backoff and jitter up to the store's retry budget; what leaves is
    `ObjectNotFoundError`, `StorageAccessError` (will not get better), `UploadError` or `StorageError`. A store
    object does not survive a fork and is not picklable: send a `StoreSpec` and open it where it is used.
    """

    @property
    def uri(self) -> str:
        """Root, for messages: no credentials in it."""
        ...

    def get(self, key: str) -> bytes: ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`; a short object is a `StorageError`."""
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """`key` holds exactly `data` afterwards, looked up and size-compared; replaced atomically if it existed."""
        ...

    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Like `put` but False, changing nothing, if `key` exists.

        Atomic only where the store can do it: local disks and AWS can, JuiceFS's gateway cannot. Nothing may depend on
        it.
        """
        ...

    def upload_file(self, key: str, path: Path, *, offset: int = 0, size_bytes: int | None = None) -> None:
        """Part of a local file becomes one object: multipart when large, aborted on failure, looked up afterwards."""
        ...

    def download_file(self, key: str, path: Path, *, etag: str | None = None) -> ObjectInfo:
        """The object becomes the local file `path` (overwritten, not fsynced, not renamed: the caller's `.tmp`).

        Ranged and parallel when large. With `etag`, an object that changed is an `ObjectChangedError`.
        """
        ...

    def head(self, key: str) -> ObjectInfo: ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with the folder `prefix` (recursive), in key order."""
        ...

    def list_folders(self, prefix: str = "") -> list[str]:
        """Names (not paths) of the direct sub-folders of the folder `prefix` that hold objects, sorted."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """None of `keys` exists afterwards; a missing one is no error."""
        ...

    def abort_uploads(self, prefix: str = "") -> int:
        """Leftovers of interrupted uploads under the folder `prefix` are removed (temporary files, multipart
        uploads); returns how many. Only call for folders that no living writer uses."""
        ...
