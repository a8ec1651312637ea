"""Local disk, done so that a crash leaves the old content or the new one: tmp, fsync, rename, fsync of the folder."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

TMP_PREFIX = ".tmp-"
_TMP_NAME = re.compile(r"\.tmp-.*-\d+-[0-9a-f]{8}", re.DOTALL)


def tmp_path(path: Path) -> Path:
    """A name beside `path` that no other writer uses: `.tmp-<name>-<pid>-<random>`.

    Long names are cut, so that the temporary name stays within the 255 bytes of a file name.
    """
    stem = path.name.encode()[:200].decode(errors="ignore")
    return path.with_name(f"{TMP_PREFIX}{stem}-{os.getpid()}-{secrets.token_hex(4)}")


def is_tmp(name: str) -> bool:
    """True for names that `tmp_path` makes; other dot files (`.metadata`) are real objects."""
    return _TMP_NAME.fullmatch(name) is not None


def fsync_folder(path: Path) -> None:
    """The entries of the folder `path` (names, renames, deletions) survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(tmp: Path, path: Path) -> None:
    """The complete file `tmp` becomes `path`, atomically and durably; `tmp` is gone."""
    with tmp.open("rb") as file:
        os.fsync(file.fileno())
    tmp.replace(path)
    fsync_folder(path.parent)


def write_atomic(path: str | os.PathLike[str], data: bytes | bytearray | memoryview) -> None:
    """The file `path` holds exactly `data`, durably; a crash on the way leaves what was there before.

    Missing parent folders are made. On an error the temporary file is removed.

    Raises:
        OSError: the disk is full, the folder is not writable, ...
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = tmp_path(path)
    try:
        with tmp.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes an ordinary user may still write on the file system of `path`, or of its nearest existing parent."""
    path = Path(path).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize
