"""Data shards for one process without Ray: threads that fetch ahead of the consumer into the node's cache."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from ray_goodput.config import environment
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.placement import AnyOrder
from ray_goodput.data import governors
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.feed import MAX_FETCHES, FeedSpec, next_uses
from ray_goodput.data.lookahead import LookAhead
from ray_goodput.data.shard_fetcher import ShardFetcher
from ray_goodput.errors import GoodputError

if TYPE_CHECKING:
    from ray_goodput.data.loader import ShardSource
    from ray_goodput.data.local_loader import StreamedDataset
    from ray_goodput.data.mixture_feed import MixtureFetcher
    from ray_goodput.data.mixture_manifest import AnyManifest

__all__ = ["LocalShardSource", "ShardFetcher", "open_local_source"]

logger = logging.getLogger(__name__)

_WAIT_S = 3600.0  # how long one wait for the consumer may last before it is begun again
_FIRST_BATCH_S = 1.0


class LocalShardSource:
    """A `ShardSource` whose prefetching runs in threads of this process; `start()` begins it, `close()` ends it.

    Once what the first batch needs is there or on its way, the rest waits until the batch is done, for a second at
    most: unpacking further data shards would take the processors, and the interpreter's lock, from the samples that
    everybody waits for.
    """

    def __init__(
        self, fetcher: ShardFetcher | MixtureFetcher, ahead: LookAhead, *, num_threads: int = MAX_FETCHES
    ) -> None:
        self._fetcher = fetcher
        self._ahead = ahead
        self._mutex = threading.Lock()
        self._requests_before = governors.request_counts()
        self._next = 0
        self._beyond_first = ahead.head
        self._first_batch = threading.Event()
        self._first_shards = {found[1].data_shard for n in range(ahead.head) if (found := ahead.at(n)) is not None}
        self._threads = [
            threading.Thread(target=self._prefetch, name=f"ray-goodput-prefetch-{i}", daemon=True)
            for i in range(num_threads)
        ]

    def start(self) -> LocalShardSource:
        """Prefetching runs. Returns itself."""
        for thread in self._threads:
            thread.start()
        return self

    def table(self, data_shard: int) -> pa.Table:
        """The data shard, memory-mapped; fetched now if the prefetching has not got there.

        Raises:
            ShardReadError, ObjectChangedError, CacheFullError: it cannot be had.
        """
        if data_shard not in self._first_shards:
            self._first_batch.set()  # what is built now needs more than the first batch
        return self._fetcher.table(data_shard)

    def describe(self, data_shard: int) -> str:
        """The data shard by number and object, for messages."""
        return self._fetcher.title(data_shard)

    def counts(self) -> DataCounts:
        """Of this process, whose threads fetch, too: requests of all its readers of data since this one began."""
        stats, requests = self._fetcher.cache.stats, governors.request_counts() - self._requests_before
        return DataCounts(
            hits=stats.hits,
            misses=stats.misses,
            disk_bytes=stats.opened_bytes,
            store_bytes=stats.fetched_bytes,
            requests=requests.requests,
            refused=requests.refused,
            lost=requests.lost,
        )

    def advance(self, samples_consumed: int) -> None:
        """The consumer is at that stream position; prefetching follows."""
        self._first_batch.set()
        self._ahead.advance(samples_consumed)

    def close(self, timeout_s: float = 5.0) -> None:
        """Prefetching ends; a fetch on the way gets `timeout_s` to finish."""
        self._ahead.close()
        self._first_batch.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _prefetch(self) -> None:
        while not self._ahead.closed:
            with self._mutex:  # one thread waits for the consumer, the others for it: shards are taken in order
                found = self._ahead.at(self._next)
                if found is None:
                    return
                number, need = found
                if number >= self._beyond_first:
                    self._first_batch.wait(_FIRST_BATCH_S)
                    self._first_batch.set()  # waited for once, not by each thread
                if not self._ahead.admitted(number, _WAIT_S):
                    continue
                self._next = number + 1
            try:
                self._fetcher.ensure(need.data_shard)
            except (GoodputError, OSError) as error:
                # Not an error yet: the consumer fetches it itself when it gets there, and raises if that fails too.
                logger.warning("cannot prefetch data shard %d: %s", need.data_shard, error)


def open_local_source(
    dataset: StreamedDataset,
    manifest: AnyManifest,
    order: AnyOrder,
    *,
    start: int,
    epochs: int | None,
    dp_rank: int,
    dp_world: int,
    cache_dir: str | Path | None = None,
) -> ShardSource:
    """A source for one rank from stream position `start` on, prefetching already.

    cache_dir: folder of the node's cache; default: `cache` in the node's local directory (`RAY_GOODPUT_LOCAL_DIR`).

    Raises:
        CacheFullError: the shards needed at once do not fit `dataset.cache_limit_bytes`.
    """
    spec = dataset.fetch_spec(manifest)
    root = Path(cache_dir) if cache_dir is not None else environment().local_dir / "cache"
    cache = NodeCache(root, limit_bytes=spec.cache_limit_bytes).open()
    fetcher = spec.fetcher(cache, manifest)
    feed = FeedSpec(start=start, dp_ranks=(dp_rank,), dp_world=dp_world, epochs=epochs)
    ahead = spec.look_ahead(order, manifest, feed)
    cache.rank_by(lambda: next_uses([(fetcher, ahead)]))
    return LocalShardSource(fetcher, ahead).start()
