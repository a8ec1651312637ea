"""A thread of the controller that looks once a second which nodes are being drained, and tells the coordinator.

Notice comes from `ray drain-node`, KubeRay, an autoscaler or `cluster/spot_watch.py`. Ray's own watcher looks every 5 s
and tells the workers by a flag whose public reader is a barrier a call; with 30 s of notice both are too dear.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_REPEAT_EVERY_S = 5.0  # a coordinator that was restarted knows nothing


class DrainWatch:
    """`look()` gives the nodes that are being drained; `tell` hands them on. Neither may end the thread."""

    def __init__(
        self, look: Callable[[], Mapping[str, float | None]], tell: Callable[[Mapping[str, float | None]], None]
    ) -> None:
        self._look = look
        self._tell = tell
        self._stop = threading.Event()
        self._told: set[str] = set()
        self._told_mono_s = 0.0
        self._failed = False
        self._thread = threading.Thread(target=self._loop, name="goodput-drain-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def beat(self) -> None:
        """One look; what is new is told at once, what goes on now and then."""
        try:
            found = self._look()
            now = time.monotonic()
            if set(found) != self._told or (found and now - self._told_mono_s >= _REPEAT_EVERY_S):
                for node in sorted(set(found) - self._told):
                    left_s = found[node]
                    when = "soon" if left_s is None else f"in {left_s:.0f} s"
                    logger.warning("Node %s is being drained and goes %s.", node, when)
                self._tell(found)
                self._told, self._told_mono_s = set(found), now
            self._failed = False
        except Exception as error:  # Ray's GCS or our coordinator may be away for a while: look again
            if not self._failed:
                logger.warning("Whether nodes are being drained is not known for now (%r).", error)
            self._failed = True

    def _loop(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            self.beat()
