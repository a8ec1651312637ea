"""Objects in S3 and servers that speak its protocol, through obstore."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ray_goodput.core.request_rate import RequestFate
from ray_goodput.errors import ConfigError, ObjectChangedError, StorageError, UploadError
from ray_goodput.storage import cloud_errors
from ray_goodput.storage.base import BaseStore
from ray_goodput.storage.cloud_options import S3Options
from ray_goodput.storage.cloud_transfer import MIB, RANGE_BYTES, download, memory_pieces, part_bytes_of
from ray_goodput.storage.governor import RequestGovernor
from ray_goodput.storage.keys import check_key, folder_of, join
from ray_goodput.storage.local import file_pieces, local_error
from ray_goodput.storage.protocol import ObjectInfo
from ray_goodput.storage.retry import Fault, Retrier, RetryPolicy

_log = logging.getLogger(__name__)
_FIRST_BYTES = 4 * RANGE_BYTES  # up to here one request downloads an object
_DELETE_BATCH = 1000
# Parts of an upload under way, each held in memory: few, since a node's ranks upload at once; more for what takes long.
_PARTS_AT_ONCE, _PARTS_AT_ONCE_OF_LARGE = 4, 6
_LARGE_BYTES = 1 << 30
_PIECE_BYTES = MIB  # read at a time into the part that is being filled
_DOWNLOAD_TRIES = 3
_STAND_IN = "mtime-"


class CloudStore(BaseStore):
    """Objects below `s3://bucket/prefix`.

    A request that fails is repeated by the client (so that a part, not the object, is sent again), and the whole call
    by us, within `retry.total_s` or half as much again. After each write the object is looked up and its size compared.
    Where the server gives no etag (JuiceFS does not by default) `mtime-<seconds>-<size>` stands in for it.
    """

    def __init__(
        self,
        uri: str,
        options: Mapping[str, Any] | None = None,
        *,
        retry: RetryPolicy | None = None,
        part_bytes: int = 8 * MIB,
        max_concurrency: int = 8,
        request_timeout_s: float = 60.0,
        governor: RequestGovernor | None = None,
    ) -> None:
        self._bucket, self._root = _split(uri)
        policy = retry or RetryPolicy()
        super().__init__(uri, Retrier(policy), governor)
        self._options = S3Options.parse(options or {})
        self._part_bytes = part_bytes
        self._max_concurrency = max_concurrency
        self._bucket_seen = False
        self._lister: Any = None
        self._lister_lock = threading.Lock()

        def client(attempts: int) -> Any:
            return self._options.client(
                self._bucket, retries=attempts - 1, total_s=policy.total_s / 2, request_timeout_s=request_timeout_s
            )

        self._client = client(policy.attempts)
        # For create-only writes: a repetition hidden in the client would meet the object of its own first try.
        self._client_once = client(1)
        # Under a governor no repetition may be hidden either: it has to see every refusal, and each waits for its turn.
        self._reader = self._client if governor is None else self._client_once

    def get(self, key: str) -> bytes:
        path = self._path(key)

        def read(answered: Callable[[], None]) -> bytes:
            result = self._reader.get(path)
            answered()
            return bytes(result.bytes())

        return self._call("get", key, lambda: self._asked(read))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        if length == 0:
            self.head(key)
            return b""

        def read() -> bytes:
            try:
                data = self._asked(lambda _: bytes(self._reader.get_range(path, start=start, length=length)))
            except Exception as error:
                if cloud_errors.status(error) == 416:
                    raise self._short(key, start, length, 0) from error
                raise
            if len(data) != length:
                raise self._short(key, start, length, len(data))
            return data

        return self._call("get_range", key, read)

    def put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")

        def put() -> None:
            if len(view) <= 2 * self._part_bytes:
                self._send(key, path, len(view), view, use_multipart=False)
            else:
                part_bytes = part_bytes_of(len(view), self._part_bytes)
                self._send(key, path, len(view), memory_pieces(view, part_bytes), chunk_size=part_bytes)

        self._call("put", key, put)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Like `put` but False, changing nothing, if `key` exists.

        Atomic on servers that honour `If-None-Match: *`. AWS does; JuiceFS's gateway ignores it, and two creators at
        the same instant may both win there.
        """
        path, content = self._path(key), bytes(data)
        tries = 0

        def lost() -> bool:
            # At a repetition the object may be our own, of a first try whose answer was lost.
            return tries > 1 and bytes(self._client.get(path).bytes()) == content

        def create() -> bool:
            nonlocal tries
            tries += 1
            with contextlib.suppress(FileNotFoundError):
                self._client.head(path)
                return lost()
            try:
                result = self._client_once.put(path, content, mode="create", use_multipart=False)
            except Exception as error:
                if not cloud_errors.already_exists(error):
                    raise
                return lost()
            self._verify(key, path, len(content), result)
            return True

        return self._call("create", key, create)

    def upload_file(self, key: str, path: Path, *, offset: int = 0, size_bytes: int | None = None) -> None:
        target = self._path(key)
        if size_bytes is None:
            try:
                size_bytes = max(0, Path(path).stat().st_size - offset)
            except OSError as error:
                raise local_error("read", path, error) from error
        size = size_bytes

        def upload() -> None:
            if size <= self._part_bytes:
                data = b"".join(file_pieces(path, offset, size))
                self._send(key, target, size, data, use_multipart=False)
            else:
                part_bytes = part_bytes_of(size, self._part_bytes)
                pieces = file_pieces(path, offset, size, _PIECE_BYTES)
                self._send(key, target, size, pieces, chunk_size=part_bytes)

        self._call("upload", key, upload)

    def download_file(self, key: str, path: Path, *, etag: str | None = None) -> ObjectInfo:
        source = self._path(key)
        for tries in range(1, _DOWNLOAD_TRIES + 1):
            try:
                return self._download(key, source, Path(path), etag)
            except ObjectChangedError:
                # Replaced while it was read: without a pin the newer object is as good, so start again with that one.
                if etag is not None or tries == _DOWNLOAD_TRIES:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        return self._call("head", key, lambda: _info(key, self._client.head(path)))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = folder_of(prefix)
        base = join(self._root, folder).rstrip("/")

        def find() -> list[ObjectInfo]:
            metas = [meta for batch in self._client.list(base or None) for meta in batch]
            return [_info(self._key(meta["path"]), meta) for meta in metas]

        # Not every server lists in byte order, and none promises it for all keys of a volume.
        infos = sorted(self._call("list", folder, find), key=lambda info: info.key)
        return iter(_without_folder_marks(infos))

    def list_folders(self, prefix: str = "") -> list[str]:
        folder = folder_of(prefix)
        base = join(self._root, folder).rstrip("/")

        def scan() -> list[str]:
            found = self._client.list_with_delimiter(base or None)["common_prefixes"]
            return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

        return self._call("list_folders", folder, scan)

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        for start in range(0, len(paths), _DELETE_BATCH):
            batch = paths[start : start + _DELETE_BATCH]
            name = self._key(batch[0]) + (f" and {len(batch) - 1} more" if len(batch) > 1 else "")
            self._call("delete", name, lambda batch=batch: self._delete(batch))

    def abort_uploads(self, prefix: str = "") -> int:
        """Multipart uploads under the folder `prefix` that were never completed are aborted; returns how many.

        Through botocore, since obstore cannot list uploads. A server that lists only uploads of an exact key shows
        fewer than there are.
        """
        folder = folder_of(prefix)
        base = join(self._root, folder)

        def sweep() -> int:
            client = self._upload_lister()
            uploads = [
                upload
                for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=base)
                for upload in page.get("Uploads", ())
                if upload["Key"].startswith(base)
            ]
            for upload in uploads:
                with contextlib.suppress(client.exceptions.NoSuchUpload):
                    client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])
            return len(uploads)

        return self._call("abort_uploads", folder, sweep)

    def _upload_lister(self) -> Any:
        """One botocore client for the life of the store: each takes 70 ms to make and about 12 MiB."""
        with self._lister_lock:
            if self._lister is None:
                self._lister = self._options.botocore_client()
            return self._lister

    def _path(self, key: str) -> str:
        return join(self._root, check_key(key))

    def _key(self, path: str) -> str:
        return path[len(self._root) + 1 :] if self._root else path

    def _send(self, key: str, path: str, size: int, data: Any, **options: Any) -> None:
        """One upload, looked up afterwards. If a piece cannot be read or a part not sent, the client aborts it."""
        try:
            at_once = _PARTS_AT_ONCE if size < _LARGE_BYTES else _PARTS_AT_ONCE_OF_LARGE
            result = self._client.put(path, data, max_concurrency=min(at_once, self._max_concurrency), **options)
        except FileNotFoundError as error:
            if not self._bucket_exists():
                raise
            # JuiceFS's gateway answers so when writers of one key, or a deleter of its folder, get in each other's way.
            raise UploadError(f"{self.uri}/{key} was refused by the server: {self._reason(error)}.") from error
        self._verify(key, path, size, result)

    def _verify(self, key: str, path: str, size: int, put: Mapping[str, Any]) -> None:
        """Some servers and clients report success for objects that never arrived: look."""
        where = f"{self.uri}/{key}"
        try:
            found = self._client.head(path)
        except FileNotFoundError:
            raise UploadError(f"{where} was uploaded without an error but is not there.") from None
        if found["size"] != size:
            if not found.get("e_tag") or found["e_tag"] == put.get("e_tag"):
                self._client.delete(path)  # ours, and broken; else another writer's
            raise UploadError(f"{where} has {found['size']} bytes after an upload of {size} bytes.")

    def _delete(self, paths: list[str]) -> None:
        try:
            self._client.delete(paths)
        except FileNotFoundError as error:
            if cloud_errors.code(error) == "NoSuchBucket":
                raise
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._client.delete(path)

    def _download(self, key: str, source: str, path: Path, etag: str | None) -> ObjectInfo:
        pinned = etag

        def check(info: ObjectInfo) -> None:
            if pinned is not None and info.etag != pinned:
                raise self._changed(key, pinned, info)

        def fetch(start: int, end: int) -> tuple[memoryview, ObjectInfo]:
            return self._call("download", key, lambda: self._fetch(key, source, start, end, pinned))

        first, info = fetch(0, _FIRST_BYTES)
        check(info)
        pinned = info.etag
        download(path, info, first, fetch, check, self._max_concurrency)
        return info

    def _fetch(self, key: str, path: str, start: int, end: int, etag: str | None) -> tuple[memoryview, ObjectInfo]:
        options: dict[str, Any] = {"range": (start, end)}
        if etag is not None and not etag.startswith(_STAND_IN):
            options["if_match"] = etag

        def read(answered: Callable[[], None]) -> tuple[Mapping[str, Any], memoryview]:
            result = self._reader.get(path, options=options)
            answered()
            return result.meta, memoryview(result.bytes())

        try:
            meta, data = self._asked(read)
        except Exception as error:
            number = cloud_errors.status(error)
            if number not in (412, 416):
                raise
            info = _info(key, self._client.head(path))
            if number == 416 and start == 0 and info.size_bytes == 0:
                return memoryview(b""), info
            raise self._changed(key, etag or f"of an object of more than {start} bytes", info) from error
        info = _info(key, meta)
        wanted = min(end, info.size_bytes) - start
        if len(data) != wanted:
            raise StorageError(f"{self.uri}/{key}: {wanted} bytes from offset {start} asked for, {len(data)} came.")
        return data, info

    def _fate(self, error: Exception) -> RequestFate:
        if cloud_errors.fault_of(error) is not Fault.TRANSIENT:
            return RequestFate.ANSWERED
        return RequestFate.LOST if cloud_errors.status(error) is None else RequestFate.REFUSED

    def _classify(self, error: Exception) -> Fault:
        fault = cloud_errors.fault_of(error)
        if fault is Fault.MISSING and not self._bucket_exists():
            return Fault.ACCESS
        return fault

    def _bucket_exists(self) -> bool:
        """False if the server says that there is no such bucket; HEAD alone cannot tell it from a missing key."""
        if not self._bucket_seen:
            try:
                self._client.list_with_delimiter("ray_goodput-no-such-folder")
            except Exception as error:  # only one verdict counts; without permission to list there is none
                if cloud_errors.code(error) == "NoSuchBucket":
                    return False
            self._bucket_seen = True
        return True

    def _reason(self, error: Exception) -> str:
        return cloud_errors.reason(error)

    def _advice(self, fault: Fault, error: Exception) -> str:
        endpoint = self._options.endpoint or f"AWS, region {self._options.region or 'us-east-1'}"
        return f"Endpoint {endpoint}, bucket {self._bucket}: {cloud_errors.advice(error, fault)}."


def _split(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.partition("://")[2].partition("/")
    if "@" in bucket:
        raise ConfigError("Credentials do not belong into a storage URI: give `key` and `secret` in storage_options.")
    if not bucket or ":" in bucket:
        raise ConfigError(f"{uri!r} names no bucket: write s3://bucket/prefix (and endpoint_url in storage_options).")
    return bucket, folder_of(prefix).rstrip("/")


def _info(key: str, meta: Mapping[str, Any]) -> ObjectInfo:
    modified_at_s = meta["last_modified"].timestamp()
    # Whole seconds: a listing has milliseconds where HEAD has none.
    etag = meta.get("e_tag") or f"{_STAND_IN}{int(modified_at_s)}-{meta['size']}"
    return ObjectInfo(key=key, size_bytes=meta["size"], etag=etag, modified_at_s=modified_at_s)


def _without_folder_marks(infos: list[ObjectInfo]) -> list[ObjectInfo]:
    """Drop the empty objects that consoles put at `folder/`: listed here as `folder`, which holds other objects."""
    folders = {key[:end] for key in (info.key for info in infos) for end, c in enumerate(key) if c == "/"}
    return [info for info in infos if info.size_bytes or info.key not in folders]
