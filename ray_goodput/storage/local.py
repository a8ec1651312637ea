"""Objects as files below a local (or mounted) folder; a writer that dies leaves the old object or none."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ray_goodput.errors import StorageError, UploadError
from ray_goodput.storage.base import BaseStore
from ray_goodput.storage.disk import free_bytes, fsync_folder, is_tmp, publish, tmp_path
from ray_goodput.storage.keys import check_key, folder_of
from ray_goodput.storage.protocol import ObjectInfo
from ray_goodput.storage.retry import Fault, Retrier, RetryPolicy

_COPY_BYTES = 8 << 20
# A concurrent `delete` may remove the still empty folder between `mkdir` and `open`.
_MKDIR_TRIES = 50


class LocalStore(BaseStore):
    """Objects below the folder `root`, made at the first write. Durable: file and folder are fsynced.

    An object's etag is its modification time (ns) and size, so that a replaced file is noticed.
    """

    def __init__(self, root: str | os.PathLike[str], *, retry: RetryPolicy | None = None) -> None:
        self._root = Path(root).absolute()
        super().__init__(str(self._root), Retrier(retry or RetryPolicy(total_s=5.0)))

    def get(self, key: str) -> bytes:
        path = self._path(key)

        def read() -> bytes:
            with _open_object(path) as file:
                return file.read()

        return self._call("get", key, read)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)

        def read() -> bytes:
            with _open_object(path) as file:
                file.seek(start)
                data = file.read(length)
            if len(data) != length:
                raise self._short(key, start, length, len(data))
            return data

        return self._call("get_range", key, read)

    def put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        self._call("put", key, lambda: self._write(path, [data], replace=True))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        path = self._path(key)
        return self._call("create", key, lambda: self._write(path, [data], replace=False))

    def upload_file(self, key: str, path: Path, *, offset: int = 0, size_bytes: int | None = None) -> None:
        target = self._path(key)
        self._call("upload", key, lambda: self._write(target, file_pieces(path, offset, size_bytes), replace=True))

    def download_file(self, key: str, path: Path, *, etag: str | None = None) -> ObjectInfo:
        source = self._path(key)

        def copy() -> ObjectInfo:
            with _open_object(source) as file:
                info = _info(key, os.fstat(file.fileno()))
                if etag is not None and info.etag != etag:
                    raise self._changed(key, etag, info)
                try:
                    with Path(path).open("wb") as out:
                        shutil.copyfileobj(file, out, _COPY_BYTES)
                        copied = out.tell()
                except OSError as error:
                    raise local_error("write", path, error) from error
                after = _info(key, os.fstat(file.fileno()))
            if copied != info.size_bytes or after.etag != info.etag:
                raise self._changed(key, info.etag or "", after)
            return info

        return self._call("download", key, copy)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)

        def stat() -> ObjectInfo:
            with _open_object(path) as file:
                return _info(key, os.fstat(file.fileno()))

        return self._call("head", key, stat)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = folder_of(prefix)
        infos = self._call("list", folder, lambda: list(_walk(self._root / folder, folder, frozenset())))
        return iter(sorted(infos, key=lambda info: info.key))

    def list_folders(self, prefix: str = "") -> list[str]:
        folder = folder_of(prefix)

        def scan() -> list[str]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / folder) as entries:
                return sorted(entry.name for entry in entries if _leads_somewhere(entry) and entry.is_dir())
            return []

        return self._call("list_folders", folder, scan)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            self._call("delete", key, lambda path=path: self._remove(path))

    def abort_uploads(self, prefix: str = "") -> int:
        folder = folder_of(prefix)

        def sweep() -> int:
            removed = 0
            for parent, _, names in os.walk(self._root / folder):
                for name in filter(is_tmp, names):
                    self._remove(Path(parent, name))
                    removed += 1
            return removed

        return self._call("abort_uploads", folder, sweep)

    def _path(self, key: str) -> Path:
        path = self._root / check_key(key)
        if is_tmp(path.name):
            raise StorageError(f"{key!r} has the name of a temporary file of an upload: choose another key.")
        return path

    def _write(self, path: Path, pieces: Iterable[bytes | memoryview], *, replace: bool) -> bool:
        """The file `path` holds `pieces`; False, unchanged, if it exists and `replace` is false."""
        tmp = tmp_path(path)
        written = 0
        try:
            with _open_new(tmp) as file:
                for piece in pieces:
                    written += file.write(piece)
            found = tmp.stat().st_size
            if found != written:
                raise UploadError(f"{path} has {found} bytes after {written} bytes were written.")
            if replace:
                publish(tmp, path)
                return True
            return _publish_new(tmp, path)
        finally:
            tmp.unlink(missing_ok=True)

    def _remove(self, path: Path) -> None:
        """The file is gone, and so are folders that it leaves empty, up to the root."""
        # A folder is no object, and below a file there is none: both count as absent already.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()
        parent = path.parent
        # ENOTEMPTY ends the climb; anything else (another deleter, a mount point) may end it too: tidying only.
        with contextlib.suppress(OSError):
            while parent != self._root and self._root in parent.parents:
                parent.rmdir()
                parent = parent.parent

    def _advice(self, fault: Fault, error: Exception) -> str:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT):
            return f"{free_bytes(self._root) / 2**20:.0f} MiB are free there: delete files or choose another folder."
        if number in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
            return "A file stands where a folder is needed, or the reverse: remove it or choose another path."
        if fault is Fault.ACCESS:
            return f"Make {self._root} writable for this user (uid {os.getuid()}) or choose another folder."
        return ""


def file_pieces(path: Path, offset: int, size_bytes: int | None, piece_bytes: int = _COPY_BYTES) -> Iterator[bytes]:
    """Bytes [offset, offset + size_bytes) of a local file in pieces; to its end without `size_bytes`.

    Raises:
        StorageError: the file cannot be read, or is shorter.
    """
    try:
        with Path(path).open("rb", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size if size_bytes is None else offset + size_bytes
            while offset < end:
                piece = os.pread(file.fileno(), min(piece_bytes, end - offset), offset)
                if not piece:
                    raise StorageError(f"{path} ends after {offset} bytes, {end} were to be uploaded.")
                offset += len(piece)
                yield piece
    except OSError as error:
        raise local_error("read", path, error) from error


def local_error(verb: str, path: str | os.PathLike[str], error: OSError) -> StorageError:
    """An error of the local side of a transfer, kept apart from errors of the store."""
    room = f" {free_bytes(path) / 2**20:.0f} MiB are free there." if error.errno == errno.ENOSPC else ""
    return StorageError(f"Cannot {verb} the local file {path}: {error.strerror or error}.{room}")


def _open_object(path: Path) -> BinaryIO:
    """`path` for reading; a folder, or a name below a file, is no object: FileNotFoundError."""
    try:
        return path.open("rb")
    except (IsADirectoryError, NotADirectoryError) as error:
        raise FileNotFoundError(errno.ENOENT, "no such object", str(path)) from error


def _open_new(tmp: Path) -> BinaryIO:
    for _ in range(_MKDIR_TRIES):
        tmp.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return tmp.open("xb")
    return tmp.open("xb")


def _publish_new(tmp: Path, path: Path) -> bool:
    with tmp.open("rb") as file:
        os.fsync(file.fileno())
    try:
        os.link(tmp, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # File systems without hard links (some FUSE mounts): whole or absent still, but two creators may both win.
        if path.exists():
            return False
        tmp.replace(path)
    fsync_folder(path.parent)
    return True


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size_bytes=stat.st_size,
        etag=f"mtime-{stat.st_mtime_ns}-{stat.st_size}",
        modified_at_s=stat.st_mtime_ns / 1e9,
    )


def _leads_somewhere(entry: os.DirEntry[str]) -> bool:
    """False for a link in a circle; one to what is not there is neither file nor folder anyway."""
    try:
        entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
    return True


def _walk(folder: Path, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[ObjectInfo]:
    """Objects below `folder`, in any order; links to folders are followed unless they lead back up."""
    try:
        stat = folder.stat()
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    here = above | {(stat.st_dev, stat.st_ino)}
    for entry in entries:
        # An entry may vanish meanwhile: then it is no object any more.
        with contextlib.suppress(FileNotFoundError):
            if not _leads_somewhere(entry):
                continue
            if entry.is_dir():
                inner = entry.stat()
                if (inner.st_dev, inner.st_ino) not in here:
                    yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", here)
            elif entry.is_file() and not is_tmp(entry.name):
                yield _info(prefix + entry.name, entry.stat())
