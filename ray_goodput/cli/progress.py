"""A progress bar of bytes on a terminal's standard error; nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ByteProgress:
    """`total` once the number of bytes is known, `advance` for each piece; from any thread."""

    _bar: Any
    _task: Any

    def total(self, size_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, total=size_bytes)

    def advance(self, size_bytes: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, size_bytes)


@contextmanager
def byte_progress(what: str, *, shown: bool) -> Iterator[ByteProgress]:
    """A bar labelled `what` while inside, if `shown` and standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield ByteProgress(None, None)
        return
    columns = [TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        yield ByteProgress(bar, bar.add_task(what, total=None))
