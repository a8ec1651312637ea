"""Lets the node's vault ask this training process for its stacks; see `actors/process_look.py`."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
from pathlib import Path
from typing import IO

from ray_goodput.actors.process_look import STACK_SIGNAL

logger = logging.getLogger(__name__)


class StackFile:
    """While open, `STACK_SIGNAL` appends the stacks of all threads to the file `path`, whoever holds Python's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def open(self) -> None:
        """Never raises: without it a hang is found all the same, only without stacks."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb", buffering=0)
            faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=True, chain=False)
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("Stacks of this process cannot be had if it should hang (%s).", error)

    def close(self) -> None:
        """The file's name is gone, so that nobody asks any more. The handler and its descriptor stay until the process
        ends: without them a signal that comes late would end the process, or write into another file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a disk that became read-only must not turn success into a failure
                self._path.unlink(missing_ok=True)
