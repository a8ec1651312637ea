"""The coordinator's background work: one thread for one errand, done when somebody asks and now and then."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ray_goodput.errors import GoodputError

logger = logging.getLogger(__name__)


class Errand:
    """`work()` in a thread of its own: soon after each `soon()`, and every `every_s` if that is given.

    What fails is told, and done again next time.
    """

    def __init__(self, name: str, work: Callable[[], object], *, every_s: float | None = None) -> None:
        self._name = name
        self._work = work
        self._every_s = every_s
        self._due = threading.Event()
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._loop, name=f"goodput-{self._name}", daemon=True).start()

    def soon(self) -> None:
        """The work is done in a moment."""
        self._due.set()

    def stop(self) -> None:
        """No new round begins; one under way goes on."""
        self._stop.set()
        self._due.set()

    def _loop(self) -> None:
        while True:
            self._due.wait(self._every_s)
            self._due.clear()
            if self._stop.is_set():
                return
            try:
                self._work()
            except GoodputError as error:
                logger.warning("The coordinator's errand %r failed, it is done again later: %s", self._name, error)
            except Exception:  # a mistake of ours: with this thread, all later rounds of a month's run would be lost
                logger.exception("The coordinator's errand %r failed, it is done again later.", self._name)
