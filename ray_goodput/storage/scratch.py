"""Folders on local disk that do not outlive who uses them, also if that is killed."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import Self

_LOCK = ".lock-"


class Scratch:
    """The folder `path`, shared by all processes that give it the same name; the last one to close it removes it.

    Who is killed closes nothing, but the kernel frees its lock on the file beside the folder (`.lock-<name>`): `sweep`
    removes what such processes left. Where the file system knows no locks there is none, and nothing is swept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = path.with_name(f"{_LOCK}{path.name}")
        self._fd = _hold(self._lock)
        path.mkdir(exist_ok=True)

    @classmethod
    def fresh(cls, parent: Path, prefix: str) -> Self:
        """A folder of one's own, after what killed processes left under such names is gone."""
        sweep(parent, prefix)
        return cls(parent / f"{prefix}{secrets.token_hex(8)}")

    def close(self) -> None:
        if self._fd is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # others still use it
        finally:
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(parent: Path, prefix: str) -> None:
    """Folders `<prefix>...` in `parent` that no living process uses are gone."""
    for lock in parent.glob(f"{_LOCK}{prefix}*"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # its last user has just removed it, or it is not ours
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(lock, fd):
                shutil.rmtree(lock.with_name(lock.name.removeprefix(_LOCK)), ignore_errors=True)
                lock.unlink(missing_ok=True)
        except OSError:  # in use
            pass
        finally:
            os.close(fd)


def _hold(lock: Path) -> int | None:
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        except OSError:  # a file system without locks
            os.close(fd)
            lock.unlink(missing_ok=True)
            return None
        if _is_still(lock, fd):  # else the last user removed it just now
            return fd
        os.close(fd)


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
