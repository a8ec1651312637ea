"""A train worker's way to its data shards: straight from the node's cache folder, the cache actor only on a miss."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ray_goodput.actors.shard_cache import UnknownDatasetError, cache_root
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.feed import FeedSpec
from ray_goodput.data.mixture_feed import AnyFetchSpec
from ray_goodput.data.shard_fetcher import lost_again

logger = logging.getLogger(__name__)

_ADVANCE_EVERY_S = 0.2
_COUNTS_EVERY_S = 5.0
_OPEN_ATTEMPTS = 4
_PAUSE_S = 0.2


class ActorShardSource:
    """A `ShardSource` over a node's `ShardCache` actor. Thread-safe; `open()` first, `close()` last.

    A hit costs no actor call. A dead actor is waited for up to `answer_timeout_s`; then the worker fetches by itself,
    and asks the actor again after as long.

    feed: of all ranks of this node, so that each of them says the same to the actor.
    """

    def __init__(
        self,
        actor: Any,
        name: str,
        spec: AnyFetchSpec,
        feed: FeedSpec,
        *,
        attempt: int,
        root: Path | None = None,
        answer_timeout_s: float = 60.0,
    ) -> None:
        self._actor = actor
        self._name = name
        self._feed = feed
        self._attempt = attempt
        self._answer_timeout_s = answer_timeout_s
        cache = NodeCache(cache_root() if root is None else root, limit_bytes=spec.cache_limit_bytes)
        self._fetcher = spec.fetcher(cache)
        self._spec: Any = spec
        self._consumed = feed.start
        self._told_mono_s = float("-inf")
        self._begun: Any = None
        self._advanced: Any = None
        self._alone_until_mono_s = float("-inf")
        self._telling = threading.Lock()
        self._of_node = DataCounts()
        self._asked: Any = None
        self._asked_mono_s = float("-inf")
        self._closed = False

    def open(self) -> ActorShardSource:
        """The actor has been told what is needed; it may still be starting. Returns itself."""
        self._spec = ray.put(self._spec)
        self._begin()
        return self

    def table(self, data_shard: int) -> pa.Table:
        """The data shard, memory-mapped; waits until it is cached.

        Raises:
            ShardReadError, ObjectChangedError, CacheFullError: it cannot be had.
        """
        for _ in range(_OPEN_ATTEMPTS):
            table = self._fetcher.opened(data_shard)
            if table is not None:
                return table
            if not self._ensured_by_actor(data_shard):
                self._fetcher.ensure(data_shard, awaited=True)
        raise lost_again(self._fetcher.manifest, data_shard, self._fetcher.cache)

    def describe(self, data_shard: int) -> str:
        """The data shard by number and object, for messages."""
        return self._fetcher.title(data_shard)

    def counts(self) -> DataCounts:
        """Of this rank; what it fetched by itself, while the actor was away, too."""
        stats = self._fetcher.cache.stats
        return DataCounts(
            hits=stats.hits, misses=stats.misses, disk_bytes=stats.opened_bytes, store_bytes=stats.fetched_bytes
        )

    @property
    def node_counts(self) -> DataCounts:
        """What the node's actor, in this life of it, and its pool have fetched for the run; some seconds old."""
        return self._of_node

    def advance(self, samples_consumed: int) -> None:
        """The consumer is at that stream position. Costs microseconds; the actor is told a few times a second."""
        self._consumed = max(self._consumed, samples_consumed)
        if time.monotonic() - self._told_mono_s >= _ADVANCE_EVERY_S:
            self._tell()

    def close(self, timeout_s: float = 5.0) -> None:
        """The actor's feed ends, unless another has taken its place. Waits at most `timeout_s` for its id."""
        self._closed = True
        begun, self._begun = self._begun, None
        if begun is None:
            return
        try:
            feed_id = ray.get(begun, timeout=timeout_s)
            if feed_id is not None:
                self._actor.stop_feed.remote(self._name, feed_id)
        except RayError as error:  # the actor is gone, and its feed with it
            logger.debug("dataset %r: the cache actor did not answer at close: %s", self._name, error)

    def _begin(self) -> None:
        self._begun = self._actor.begin.remote(
            self._name, self._spec, self._feed, self._attempt, max(self._consumed, self._feed.start)
        )

    def _tell(self) -> None:
        if self._closed or not self._telling.acquire(blocking=False):
            return  # or another thread is at it
        try:
            self._tell_alone()
        finally:
            self._telling.release()

    def _tell_alone(self) -> None:
        if self._advanced is not None:
            done, _ = ray.wait([self._advanced], timeout=0)
            if not done:
                return
            try:
                known = ray.get(self._advanced)
            except RayError:  # it died meanwhile; its next life knows nothing
                known = False
            if not known and self._has_begun():
                logger.debug("dataset %r: the cache actor has no feed for it; telling it", self._name)
                self._begin()
        self._ask_for_counts()
        self._told_mono_s = time.monotonic()
        self._advanced = self._actor.advance.remote(self._name, self._consumed, self._attempt)

    def _ask_for_counts(self) -> None:
        """Every few seconds, and never waiting: the answer is taken when it is there."""
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            try:
                of_node: Any = ray.get(self._asked)
                self._of_node = of_node
            except RayError as error:  # it died; its next life will be asked
                logger.debug("dataset %r: no counts from the cache actor: %s", self._name, error)
            self._asked = None
        if self._asked is None and time.monotonic() - self._asked_mono_s >= _COUNTS_EVERY_S:
            self._asked_mono_s = time.monotonic()
            self._asked = self._actor.counts.remote()

    def _has_begun(self) -> bool:
        """False while the actor has not even answered the last `begin`."""
        begun = self._begun
        return begun is None or bool(ray.wait([begun], timeout=0)[0])

    def _ensured_by_actor(self, data_shard: int) -> bool:
        """True once the actor says that the shard is cached; False if it does not answer in time.

        Errors of the fetch itself come out as themselves.
        """
        deadline = time.monotonic() + self._answer_timeout_s
        if time.monotonic() < self._alone_until_mono_s:
            return False
        self._tell()
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                begun = self._begun
                if begun is not None:
                    ray.get(begun, timeout=left_s)
                ray.get(self._actor.ensure.remote(self._name, data_shard), timeout=left_s)
                return True
            except RayTaskError as error:
                if not isinstance(error.cause, UnknownDatasetError):
                    raise error.cause from error
                self._begin()
            except GetTimeoutError:
                break
            except RayError as error:
                logger.debug("dataset %r: the cache actor is away: %s", self._name, error)
                time.sleep(min(_PAUSE_S, left_s))
                self._begin()
        logger.warning(
            "dataset %r: the cache actor did not answer for %.0f s; fetching data shard %d in the worker",
            self._name,
            self._answer_timeout_s,
            data_shard,
        )
        self._alone_until_mono_s = time.monotonic() + self._answer_timeout_s
        return False
