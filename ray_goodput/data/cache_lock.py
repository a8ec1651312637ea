"""Locks the kernel keeps: they cross processes and go when their holder does, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.02


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """True if the open file `fd` is locked now; False at once if somebody else's lock is in the way."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(fd: int, timeout_s: float, *, shared: bool = False) -> bool:
    """True once the open file `fd` is locked, False if that took longer than `timeout_s`.

    Asks again after 2 ms, then ever more rarely up to every 20 ms: the kernel has no wait with a deadline, and a wait
    without one would hang behind a stopped process.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while not try_lock(fd, shared=shared):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def is_linked(fd: int, path: Path) -> bool:
    """True if `path` still names the open file `fd`: it was neither removed nor replaced since it was opened."""
    try:
        named = os.stat(path)
    except OSError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


@contextmanager
def lock_file(path: Path, timeout_s: float, *, remove: bool = False) -> Iterator[bool]:
    """Holds `path` (made if missing) exclusively; yields False if `timeout_s` passed without getting it.

    With `remove` the file is gone afterwards, so that lock files do not pile up; a waiter notices and opens the next.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            held = lock_within(fd, deadline - time.monotonic())
            if held and not is_linked(fd, path):
                continue
            try:
                yield held
            finally:
                if held and remove:
                    path.unlink(missing_ok=True)
            return
        finally:
            os.close(fd)
