"""Objects through any fsspec file system: `gs://`, `az://`, `memory://`, `sftp://`, or one that the user hands over."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from ray_goodput.errors import ConfigError, UploadError
from ray_goodput.storage.base import BaseStore
from ray_goodput.storage.disk import is_tmp, tmp_path
from ray_goodput.storage.governor import RequestGovernor
from ray_goodput.storage.keys import check_key, folder_of, join
from ray_goodput.storage.local import file_pieces, local_error
from ray_goodput.storage.protocol import ObjectInfo
from ray_goodput.storage.retry import Fault, Retrier, RetryPolicy

# Here an object appears when its upload completes, so that a write under the final name is whole or absent.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "cos", "obs", "r2", "memory"}
_PIECE_BYTES = 8 << 20
_ETAGS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "generation")
_MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


class FsspecStore(BaseStore):
    """Objects below `uri` of an fsspec file system; `filesystem` may also be a `pyarrow.fs.FileSystem`.

    On object stores a write goes to the final name at once; on all others to a `.tmp-` file that is then moved.
    """

    def __init__(
        self,
        uri: str,
        *,
        options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        retry: RetryPolicy | None = None,
        governor: RequestGovernor | None = None,
    ) -> None:
        self._fs = _as_fsspec(filesystem) if filesystem is not None else _open_filesystem(uri, dict(options or {}))
        self._root = str(self._fs._strip_protocol(uri)).rstrip("/")
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple | list) else (self._fs.protocol,)
        # Without it pyarrow's wrapper reads a range that starts at 0 from a stream that cannot seek.
        self._read_options = {"seekable": True} if "arrow" in type(self._fs).__module__ else {}
        self._direct = not _OBJECT_STORES.isdisjoint(protocols)
        super().__init__(uri, Retrier(retry or RetryPolicy()), governor)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        return self._call("get", key, lambda: self._asked(lambda _: self._read(path, None, None)))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)

        def read() -> bytes:
            # Past the end clients differ (nothing, an error, the whole object), so the size is asked first.
            size_bytes = self._info(key, path).size_bytes
            if start + length > size_bytes:
                raise self._short(key, start, length, max(0, size_bytes - start))
            data = self._read(path, start, start + length) if length else b""
            if len(data) != length:
                raise self._short(key, start, length, len(data))
            return data

        return self._call("get_range", key, lambda: self._asked(lambda _: read()))

    def put(self, key: str, data: bytes | memoryview) -> None:
        path, content = self._path(key), bytes(data)
        self._call("put", key, lambda: self._write(key, path, content))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        path, content = self._path(key), bytes(data)

        def create() -> bool:
            if self._fs.exists(path):
                return False
            if not self._direct:
                self._write(key, path, content)
                return True
            try:
                self._fs.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            self._verify(key, path, len(content))
            return True

        return self._call("create", key, create)

    def upload_file(self, key: str, path: Path, *, offset: int = 0, size_bytes: int | None = None) -> None:
        target = self._path(key)

        def upload() -> None:
            with self._target(target) as name:
                sent = self._send(name, file_pieces(path, offset, size_bytes, _PIECE_BYTES))
            self._verify(key, target, sent)

        self._call("upload", key, upload)

    def download_file(self, key: str, path: Path, *, etag: str | None = None) -> ObjectInfo:
        source = self._path(key)

        def download() -> ObjectInfo:
            info = self._info(key, source)
            if etag is not None and info.etag != etag:
                raise self._changed(key, etag, info)
            done = 0
            with self._fs.open(source, "rb") as file, _local_target(path) as out:
                while piece := file.read(_PIECE_BYTES):
                    out.write(piece)
                    done += len(piece)
            after = self._info(key, source)
            if after.etag != info.etag:
                raise self._changed(key, info.etag or "", after)
            if done != info.size_bytes:
                raise self._short(key, 0, info.size_bytes, done)
            return info

        return self._call("download", key, lambda: self._asked(lambda _: download()))

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        return self._call("head", key, lambda: self._info(key, path))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = folder_of(prefix)

        def find() -> list[ObjectInfo]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(join(self._root, folder).rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
            keys = {self._key(path): info for path, info in found.items() if info.get("type") != "directory"}
            return [
                _object_info(key, keys[key])
                for key in sorted(keys)
                if key.startswith(folder) and not self._is_leftover(key)
            ]

        return iter(self._call("list", folder, find))

    def list_folders(self, prefix: str = "") -> list[str]:
        folder = folder_of(prefix)
        if not self._direct:
            # Real folders stay when their last object goes, and cannot be removed safely while others write.
            below = (info.key[len(folder) :] for info in self.list(prefix))
            return sorted({name.partition("/")[0] for name in below if "/" in name})

        def scan() -> list[str]:
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(join(self._root, folder).rstrip("/"), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted({PurePosixPath(e["name"]).name for e in entries if e.get("type") == "directory"})

        return self._call("list_folders", folder, scan)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            self._call("delete", key, lambda path=path: self._remove(path))

    def abort_uploads(self, prefix: str = "") -> int:
        """Temporary files are removed; multipart uploads of object stores cannot be seen through fsspec."""
        folder = folder_of(prefix)

        def sweep() -> int:
            if self._direct:
                return 0
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(join(self._root, folder).rstrip("/"))
            except FileNotFoundError:
                return 0
            leftovers = [path for path in found if is_tmp(PurePosixPath(path).name)]
            for path in leftovers:
                self._remove(path)
            return len(leftovers)

        return self._call("abort_uploads", folder, sweep)

    def _path(self, key: str) -> str:
        return join(self._root, check_key(key))

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    def _is_leftover(self, key: str) -> bool:
        return not self._direct and is_tmp(key.rpartition("/")[2])

    def _read(self, path: str, start: int | None, end: int | None) -> bytes:
        with self._reading(path):
            return self._fs.cat_file(path, start=start, end=end, **self._read_options)

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """A folder, or a name below an object, is no object: FileNotFoundError, whatever the file system says."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if isinstance(error, NotADirectoryError) or self._fs.isdir(path):
                raise FileNotFoundError(path) from error
            raise

    def _send(self, name: str, pieces: Iterator[bytes]) -> int:
        """`name` holds `pieces`; returns their size. If one cannot be read nothing is left under `name`."""
        from fsspec.spec import AbstractBufferedFile

        first, second = next(pieces, b""), next(pieces, b"")
        if not second:
            self._fs.pipe_file(name, first)
            return len(first)
        sent = 0
        file = self._fs.open(name, "wb")
        try:
            for piece in itertools.chain((first, second), pieces):
                file.write(piece)
                sent += len(piece)
        except BaseException:
            # Closing would publish what was written so far.
            with contextlib.suppress(Exception):  # the first error is the one to report
                if isinstance(file, AbstractBufferedFile):
                    file.discard()
                    file.closed = True
                else:
                    file.close()
                    self._fs.rm_file(name)
            raise
        file.close()
        return sent

    def _write(self, key: str, path: str, content: bytes) -> None:
        with self._target(path) as name:
            self._fs.pipe_file(name, content)
        self._verify(key, path, len(content))

    @contextlib.contextmanager
    def _target(self, path: str) -> Iterator[str]:
        """The name to write to, so that `path` appears whole when the block ends and not at all if it raises."""
        if self._direct:
            yield path
            return
        folder, _, name = path.rpartition("/")
        self._fs.makedirs(folder or "/", exist_ok=True)
        tmp = f"{folder}/{tmp_path(Path(name)).name}"
        try:
            yield tmp
            self._fs.mv(tmp, path)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._fs.rm_file(tmp)
            raise

    def _verify(self, key: str, path: str, size_bytes: int) -> None:
        self._fs.invalidate_cache()
        try:
            found = self._info(key, path).size_bytes
        except FileNotFoundError:
            raise UploadError(f"{self.uri}/{key} was written without an error but is not there.") from None
        if found != size_bytes:
            raise UploadError(f"{self.uri}/{key} has {found} bytes after an upload of {size_bytes} bytes.")

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _info(self, key: str, path: str) -> ObjectInfo:
        self._fs.invalidate_cache()
        with self._reading(path):
            info = self._fs.info(path)
        if info.get("type") == "directory":
            raise FileNotFoundError(path)
        return _object_info(key, info)

    def _advice(self, fault: Fault, error: Exception) -> str:
        return "Check the credentials and permissions given in storage_options." if fault is Fault.ACCESS else ""


def _open_filesystem(uri: str, options: dict[str, Any]) -> Any:
    import fsspec

    protocol = uri.partition("://")[0]
    try:
        return fsspec.filesystem(protocol, **options)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{uri} cannot be opened: {error}. Install the fsspec package for {protocol}://, or give s3:// or a path."
        ) from error
    except TypeError as error:
        raise ConfigError(f"{uri} cannot be opened with the options {sorted(options)}: {error}.") from error


def _as_fsspec(filesystem: Any) -> Any:
    if hasattr(filesystem, "pipe_file"):
        return filesystem
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow import fs

    if isinstance(filesystem, fs.PyFileSystem) and isinstance(filesystem.handler, fs.FSSpecHandler):
        return filesystem.handler.fs
    if isinstance(filesystem, fs.FileSystem):
        return ArrowFSWrapper(filesystem)
    raise ConfigError(f"filesystem={type(filesystem).__name__}: give an fsspec or pyarrow.fs file system object.")


@contextlib.contextmanager
def _local_target(path: Path) -> Iterator[Any]:
    try:
        out = Path(path).open("wb")  # noqa: SIM115 - closed below; only opening is a local error for certain
    except OSError as error:
        raise local_error("write", path, error) from error
    with out:
        yield out


def _object_info(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    size_bytes = int(info.get("size") or 0)
    modified = next((info[name] for name in _MODIFIED if info.get(name) is not None), None)
    modified_at_s = _seconds(modified)
    etag = next((str(info[name]) for name in _ETAGS if info.get(name)), None)
    if etag is None and modified_at_s is not None:
        # S3 says whole seconds in one place and milliseconds in another; and CloudStore must find what was pinned here.
        seconds = f"{int(modified_at_s)}" if "LastModified" in info else f"{modified_at_s:.6f}"
        etag = f"mtime-{seconds}-{size_bytes}"
    return ObjectInfo(key=key, size_bytes=size_bytes, etag=etag, modified_at_s=modified_at_s)


def _seconds(value: Any) -> float | None:
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, int | float):
        return float(value)
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except ValueError:
        return None
