"""SIGTERM to the driver: save, commit, leave."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

EXIT_CODE_DRAINED = 128 + signal.SIGTERM


class DrainOnSigterm:
    """Context manager: the first SIGTERM asks the run to save and end, a second one does what SIGTERM did before.

    Only the main thread can take signals; elsewhere (as when Ray Tune runs the trainer) nothing is changed.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._before: Any = None
        self._installed = False
        self.requested = False

    def __enter__(self) -> DrainOnSigterm:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._installed = True
        return self

    def __exit__(self, *exc: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._before)
            self._installed = False

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        self.__exit__()
        logger.warning(
            "SIGTERM: all ranks save at their next step, then the run ends. A second SIGTERM ends it at once."
        )
        self._coordinator.request_drain.remote()
