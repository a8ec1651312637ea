"""SIGTERM to a worker: the attempt saves and ends. A second one, or one that no train loop would hear, ends it at once.

The train function does not run in the main thread, where alone Python takes signals, so the handler is installed by a
`WorkerCallback`. Ray's main thread runs its next bit of Python, and with it the handler, when the controller polls the
worker: within about two seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_received = threading.Event()
_listening = threading.Event()
_before: Any = None


def install() -> None:
    """From now on SIGTERM is for us, until the second one. Only in the main thread; elsewhere nothing is changed."""
    global _before
    if threading.current_thread() is not threading.main_thread():
        logger.warning("SIGTERM cannot be handled in this worker: its callbacks do not run in the main thread.")
        return
    _received.clear()
    _before = signal.signal(signal.SIGTERM, _on_sigterm)


def listen(on: bool) -> None:
    """Whether a train loop looks at `received` at each of its steps."""
    (_listening.set if on else _listening.clear)()


def received() -> bool:
    """Whether this process was asked to end."""
    return _received.is_set()


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, _before if _before is not None else signal.SIG_DFL)
    if not _listening.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        return
    _received.set()
    logger.warning("SIGTERM: all ranks save at their next step, then this attempt ends. A second one ends it at once.")
