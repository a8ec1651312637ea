"""Standard output for our own words only, whatever libraries and child processes print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def only_ours() -> Iterator[TextIO]:
    """Inside, everything written to standard output by anyone, children too, goes to standard error; the stream
    given is the real standard output. Not for use in several threads at once.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        with os.fdopen(os.dup(saved), "w", buffering=1) as ours:
            os.dup2(2, 1)
            yield ours
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
