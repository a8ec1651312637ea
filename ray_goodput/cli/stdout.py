"""Standard output for our own words only, whatever libraries and child processes print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def only_ours(log: Path | None = None) -> Iterator[TextIO]:
    """Inside, the stream given is the real standard output; what anyone else writes there, children too, goes to
    standard error, or, with `log`, to that file together with standard error. Not for use in several threads at once.
    """
    _flush()
    saved = [os.dup(1), os.dup(2)]
    try:
        with os.fdopen(os.dup(1), "w", buffering=1) as ours:
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("ab") as file:
                    os.dup2(file.fileno(), 2)
            os.dup2(2, 1)
            yield ours
    finally:
        _flush()
        for number, original in enumerate(saved, start=1):
            os.dup2(original, number)
            os.close(original)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
