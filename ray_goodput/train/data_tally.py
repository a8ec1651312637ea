"""What this rank's feeds have done together: open ones as they are, closed ones as they were."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ray_goodput.core.data_flow import DataCounts

if TYPE_CHECKING:
    from ray_goodput.train.feed import DataFeed


class DataTally:
    """Counts over the training feeds of this rank. Thread-safe: the heartbeat asks, the loop opens and closes.

    speaks_for_node: also adds what the node's cache actor has fetched; for one rank of each node.
    """

    def __init__(self, *, speaks_for_node: bool) -> None:
        self._speaks_for_node = speaks_for_node
        self._lock = threading.Lock()
        self._open: list[DataFeed] = []
        self._past: DataCounts | None = None
        self._node = DataCounts()

    def opened(self, feed: DataFeed) -> None:
        """The feed counts from now on."""
        with self._lock:
            self._open.append(feed)

    def closed(self, feed: DataFeed) -> None:
        """What the feed has counted stays; it may be called before or after the feed is closed itself."""
        with self._lock:
            self._open.remove(feed)
            self._note_node(feed)
            self._past = (self._past or DataCounts()) + feed.loader.counts().without_queue()

    def counts(self) -> DataCounts | None:
        """Everything so far; None if this rank has read nothing."""
        with self._lock:
            if self._past is None and not self._open:
                return None
            total = self._past or DataCounts()
            for feed in self._open:
                self._note_node(feed)
                total += feed.loader.counts()
            return total + self._node if self._speaks_for_node else total

    def _note_node(self, feed: DataFeed) -> None:
        """All feeds of a node have one actor: the newest answer counts."""
        node = feed.node_counts()
        if node != DataCounts():  # else no answer yet: a new feed has not asked
            self._node = node
