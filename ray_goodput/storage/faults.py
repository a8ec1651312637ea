"""A store that counts its calls and lets a test, or a drill, strike at any of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ray_goodput.gates import gate
from ray_goodput.storage.protocol import ObjectInfo, ObjectStore

T = TypeVar("T")
Hook = Callable[[str, str, int], None]


class FaultyStore:
    """`inner`, with a hook round every elementary call.

    Calls are numbered n = 0, 1, 2, ... in the order in which they begin, over all threads. `before(op, key, n)` runs
    first and may raise or end the process: the call then does not happen. `after(op, key, n)` runs once it succeeded.
    `op` is the method's name; `delete` of many keys is one call a key. `calls` holds (op, key) of every call begun,
    unless `keep_calls` is false: for stores that live long.
    """

    def __init__(
        self, inner: ObjectStore, before: Hook | None = None, after: Hook | None = None, *, keep_calls: bool = True
    ) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        self._num_calls = 0
        self._keep_calls = keep_calls
        self._before = before
        self._after = after
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return self.inner.uri

    def count(self, *ops: str) -> int:
        """How many calls of these methods (of all, without arguments) have begun."""
        with self._lock:
            return sum(not ops or op in ops for op, _ in self.calls)

    def get(self, key: str) -> bytes:
        return self._strike("get", key, lambda: self.inner.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._strike("get_range", key, lambda: self.inner.get_range(key, start, length))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._strike("put", key, lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._strike("create", key, lambda: self.inner.create(key, data))

    def upload_file(self, key: str, path: Path, *, offset: int = 0, size_bytes: int | None = None) -> None:
        upload = self.inner.upload_file
        self._strike("upload_file", key, lambda: upload(key, path, offset=offset, size_bytes=size_bytes))

    def download_file(self, key: str, path: Path, *, etag: str | None = None) -> ObjectInfo:
        return self._strike("download_file", key, lambda: self.inner.download_file(key, path, etag=etag))

    def head(self, key: str) -> ObjectInfo:
        return self._strike("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._strike("list", prefix, lambda: iter(tuple(self.inner.list(prefix))))

    def list_folders(self, prefix: str = "") -> list[str]:
        return self._strike("list_folders", prefix, lambda: self.inner.list_folders(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._strike("delete", key, lambda key=key: self.inner.delete([key]))

    def abort_uploads(self, prefix: str = "") -> int:
        return self._strike("abort_uploads", prefix, lambda: self.inner.abort_uploads(prefix))

    def _strike(self, op: str, key: str, call: Callable[[], T]) -> T:
        with self._lock:
            n = self._num_calls
            self._num_calls += 1
            if self._keep_calls:
                self.calls.append((op, key))
        if self._before is not None:
            self._before(op, key, n)
        result = call()
        if self._after is not None:
            self._after(op, key, n)
        return result


def behind_gates(store: ObjectStore) -> ObjectStore:
    """`store`, each call of which passes the gate "store" with the facts `op` and `key`."""
    return FaultyStore(store, before=lambda op, key, _: gate("store", op=op, key=key), keep_calls=False)
