"""One dataset's prefetching on one node for one attempt: a plain thread that drives a pool along the look-ahead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ray_goodput.data.cache import CacheStats
from ray_goodput.data.feed import FeedSpec
from ray_goodput.data.lookahead import LookAhead
from ray_goodput.data.mixture_feed import MixtureFetcher
from ray_goodput.data.shard_fetcher import ShardFetcher

logger = logging.getLogger(__name__)

CHUNK = 256  # numbers of a pool run: long enough to forget its start-up, short enough for endless epochs
_WAIT_S = 3600.0
_ADMIT_WAIT_S = 5.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class Admission(Enum):
    """Answer to a pool actor that asks for one number of a feed."""

    FETCH = "fetch"
    SKIP = "skip"  # cached already, or no longer needed
    WAIT = "wait"  # too far ahead: ask again
    STOP = "stop"  # the feed was closed or replaced, or has no such number


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What became of one number of a feed. `error` is empty unless the fetch failed; `data_shard` -1: not asked for."""

    number: int
    data_shard: int
    fetched_bytes: int = 0
    fetched_shards: int = 0
    evictions: int = 0
    corrupt: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStats:
    """A feed at one moment. `delivered`: numbers its pools have dealt with; `pool_runs`: how many were started."""

    attempt: int
    consumed: int
    head: int
    delivered: int
    errors: int
    pool_runs: int
    running: bool


RunPool = Callable[[int, range], Iterator[Delivery]]
"""(feed id, numbers) -> what became of each, in order; a generator, closed to end the pool."""


class ShardFeed:
    """Keeps a look-ahead's shards coming until it is closed. `start()` runs the thread.

    No pool is started while everything that may be fetched is cached.
    """

    def __init__(
        self,
        *,
        feed_id: int,
        name: str,
        spec: FeedSpec,
        attempt: int,
        ahead: LookAhead,
        fetcher: ShardFetcher | MixtureFetcher,
        pool: RunPool,
    ) -> None:
        self.feed_id = feed_id
        self.name = name
        self.spec = spec
        self.attempt = attempt
        self.ahead = ahead
        self.fetcher = fetcher
        self.counts = CacheStats()
        self._pool = pool
        self._delivered = 0
        self._errors = 0
        self._pool_runs = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ray-goodput-feed-{name}", daemon=True)

    def start(self) -> None:
        """The feed runs."""
        self._thread.start()

    def close(self) -> None:
        """The feed ends soon: its pool is told to stop, and nothing more is admitted. Does not wait."""
        self._stopped.set()
        self.ahead.close()

    def join(self, timeout_s: float) -> bool:
        """True if the thread has ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def admit(self, number: int) -> tuple[Admission, int]:
        """Whether a pool actor should fetch that number now, and its data shard. Waits a few seconds at most."""
        found = self.ahead.at(number)
        if self.ahead.closed or found is None:
            return Admission.STOP, -1
        kept, need = found
        if kept != number:
            return Admission.SKIP, -1
        if not self.ahead.admitted(number, _ADMIT_WAIT_S):
            return (Admission.STOP if self.ahead.closed else Admission.WAIT), need.data_shard
        return (Admission.SKIP if self._is_cached(need.data_shard) else Admission.FETCH), need.data_shard

    def stats(self) -> FeedStats:
        """The feed now."""
        return FeedStats(
            attempt=self.attempt,
            consumed=self.ahead.consumed,
            head=self.ahead.head,
            delivered=self._delivered,
            errors=self._errors,
            pool_runs=self._pool_runs,
            running=self._thread.is_alive(),
        )

    def _is_cached(self, data_shard: int) -> bool:
        return self.fetcher.cache.contains(self.fetcher.name(data_shard))

    def _run(self) -> None:
        number = 0
        pause_s = _FIRST_PAUSE_S
        while not self.ahead.closed:
            found = self.ahead.at(number)
            if found is None:
                return
            number, need = found
            if not self.ahead.admitted(number, _WAIT_S):
                continue
            if self._is_cached(need.data_shard):
                number += 1
                continue
            chunk = range(number, self.ahead.end(number + CHUNK))
            try:
                for done in self._run_chunk(chunk):
                    number = done + 1
                    pause_s = _FIRST_PAUSE_S
            except Exception as error:  # whatever Ray Data raises: prefetching is a help, its loss must cost only time
                if self._stopped.is_set():
                    return
                logger.warning(
                    "the prefetch pool of dataset %r failed at %d, starting it again in %.0f s: %s",
                    self.name,
                    number,
                    pause_s,
                    error,
                )
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run_chunk(self, chunk: range) -> Iterator[int]:
        """Runs the pool over `chunk`; yields each number that is dealt with."""
        self._pool_runs += 1
        with closing(_generator(self._pool(self.feed_id, chunk))) as deliveries:
            for delivery in deliveries:
                if self.ahead.closed:
                    return
                self._delivered += 1
                self.counts += CacheStats(
                    fetched_bytes=delivery.fetched_bytes,
                    fetched_shards=delivery.fetched_shards,
                    evictions=delivery.evictions,
                    corrupt=delivery.corrupt,
                )
                if delivery.error:
                    self._errors += 1
                    logger.warning(
                        "cannot prefetch data shard %d of dataset %r; it is fetched again when needed: %s",
                        delivery.data_shard,
                        self.name,
                        delivery.error,
                    )
                yield delivery.number


def _generator(deliveries: Iterator[Delivery]) -> Any:
    """Anything iterable, as something that can be closed."""
    if hasattr(deliveries, "close"):
        return deliveries
    return (delivery for delivery in deliveries)
