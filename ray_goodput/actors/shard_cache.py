"""The cache actor of a node: knows which shards the node's ranks will need, keeps them coming, fetches on demand.

The class is plain; `shard_cache_actor` makes an actor of it. Nothing it knows is precious: the cached files speak for
themselves, and who uses it says again what it has forgotten (`UnknownDatasetError`, or False from `advance`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_goodput.actors.names import NAMESPACE, shard_cache_name
from ray_goodput.actors.shard_feed import Admission, Delivery, FeedStats, ShardFeed
from ray_goodput.config import environment
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.placement import AnyOrder
from ray_goodput.core.request_rate import RequestRecord
from ray_goodput.data import governors
from ray_goodput.data.cache import CacheStats, NodeCache
from ray_goodput.data.feed import FeedSpec, next_uses
from ray_goodput.data.mixture_feed import AnyFetchSpec, MixtureFetcher
from ray_goodput.data.shard_fetcher import ShardFetcher
from ray_goodput.errors import DataError
from ray_goodput.storage.governor import RequestCounts

if TYPE_CHECKING:
    from ray_goodput.data.mixture_manifest import AnyManifest

logger = logging.getLogger(__name__)

_MAX_CONCURRENCY = 32
_POOL_FORGOTTEN_S = 30.0


class UnknownDatasetError(DataError):
    """The cache actor does not know the dataset (any more): call `begin` and ask again. Users never see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCacheStats:
    """The node's cache as its actor sees it. All counts are those of this actor's life, with its pools'."""

    counts: CacheStats
    usage_bytes: int
    requests: RequestCounts = field(default_factory=RequestCounts)
    feeds: Mapping[str, FeedStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Dataset:
    spec: AnyFetchSpec
    manifest: AnyManifest
    order: AnyOrder
    fetcher: ShardFetcher | MixtureFetcher


class ShardCache:
    """One a node and run; the folder `root` is shared with other runs. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._mutex = threading.RLock()
        self._datasets: dict[str, _Dataset] = {}
        self._feeds: dict[str, ShardFeed] = {}
        self._num_feeds = 0
        self._past = CacheStats()
        self._pools_asked_mono_s: dict[str, float] = {}
        self._pool_requests = RequestCounts()
        NodeCache(self.root).open()

    def run_pool(self, name: str, feed_id: int, numbers: range) -> Iterator[Delivery]:
        """Fetches those numbers of the feed, in this thread. The actor has a pool of processes instead."""
        for number in numbers:
            admission, data_shard = Admission.WAIT, -1
            while admission is Admission.WAIT:
                admission, data_shard = self.admit(name, number, feed_id)
            if admission is Admission.FETCH:
                self._dataset(name).fetcher.ensure(data_shard)
            yield Delivery(number=number, data_shard=data_shard)

    def begin(
        self, name: str, spec: AnyFetchSpec, feed: FeedSpec, attempt: int, consumed: int | None = None
    ) -> int | None:
        """`open_dataset` and `start_feed` in one call, as calls to a threaded actor have no order."""
        self.open_dataset(name, spec)
        return self.start_feed(name, feed, attempt=attempt, consumed=consumed)

    def open_dataset(self, name: str, spec: AnyFetchSpec) -> None:
        """The dataset can be fetched. Idempotent; another spec under the same name replaces it and ends its feed."""
        with self._mutex:
            known = self._datasets.get(name)
            if known is not None and known.spec == spec:
                return
            self._end_feed(name)
            manifest = spec.open_manifest()
            cache = NodeCache(self.root, limit_bytes=spec.cache_limit_bytes)
            cache.rank_by(self.next_uses)
            if known is not None:
                self._past += known.fetcher.cache.stats
            self._datasets[name] = _Dataset(spec, manifest, spec.order(manifest), spec.fetcher(cache, manifest))

    def start_feed(self, name: str, spec: FeedSpec, *, attempt: int, consumed: int | None = None) -> int | None:
        """Prefetching runs for the ranks of this node from `spec.start` on; returns the feed's id.

        Every rank of the node calls it: the same call again in the same attempt changes nothing. Anything else replaces
        the feed, except a call of an earlier attempt, which is ignored (None).
        consumed: where the consumer is, if it has gone on since `spec.start` (said again after this actor's restart).

        Raises:
            UnknownDatasetError: `open_dataset` was not called in this life of the actor.
            CacheFullError: what the ranks need at once does not fit the cache.
        """
        with self._mutex:
            dataset = self._dataset(name)
            running = self._feeds.get(name)
            if running is not None:
                if attempt < running.attempt:
                    logger.info("attempt %d asked for dataset %r, attempt %d reads it", attempt, name, running.attempt)
                    return None
                if (attempt, spec) == (running.attempt, running.spec):
                    return running.feed_id
            ahead = dataset.spec.look_ahead(dataset.order, dataset.manifest, spec, consumed=consumed)
            self._end_feed(name)
            self._num_feeds += 1
            feed = self._feeds[name] = ShardFeed(
                feed_id=self._num_feeds,
                name=name,
                spec=spec,
                attempt=attempt,
                ahead=ahead,
                fetcher=dataset.fetcher,
                pool=lambda feed_id, numbers: self.run_pool(name, feed_id, numbers),
            )
        feed.start()
        return feed.feed_id

    def stop_feed(self, name: str, feed_id: int) -> None:
        """That feed has ended; a later one of the same dataset goes on."""
        with self._mutex:
            feed = self._feeds.get(name)
            if feed is not None and feed.feed_id == feed_id:
                self._end_feed(name)

    def ensure(self, name: str, data_shard: int) -> None:
        """The data shard is in the node's cache. Fetched here and now, unless it is already on its way.

        Raises:
            UnknownDatasetError: see `start_feed`.
            ShardReadError, ObjectChangedError, CacheFullError: it cannot be had.
        """
        self._dataset(name).fetcher.ensure(data_shard, awaited=True)

    def advance(self, name: str, samples_consumed: int, attempt: int | None = None) -> bool:
        """The consumer is at that stream position. False if no feed runs for it: the caller should `begin` again."""
        feed = self._feeds.get(name)
        if feed is None or (attempt is not None and attempt > feed.attempt):
            return False
        if attempt is None or attempt == feed.attempt:
            feed.ahead.advance(samples_consumed)
        return True

    def admit(self, name: str, number: int, feed_id: int) -> tuple[Admission, int]:
        """For a pool actor: whether to fetch that number of the feed, and its data shard. Waits a few seconds at most,
        while the number is too far ahead of the consumer."""
        feed = self._feeds.get(name)
        if feed is None or feed.feed_id != feed_id:
            return Admission.STOP, -1
        return feed.admit(number)

    def request_shares(self, pool_actor: str, records: Mapping[str, list[RequestRecord]]) -> dict[str, int]:
        """For a pool actor: how many requests it may have under way, by server; `records` are of those that are over.

        The node's rates are kept here. Its pool actors share them evenly; those that have not asked for a while count
        no more. Fetches of this process itself come on top: somebody waits for them.
        """
        governors.note_records(records)
        now = time.monotonic()
        with self._mutex:
            for of_server in records.values():
                self._pool_requests += RequestCounts.of(of_server)
            self._pools_asked_mono_s[pool_actor] = now
            gone = [key for key, at in self._pools_asked_mono_s.items() if now - at > _POOL_FORGOTTEN_S]
            for key in gone:
                del self._pools_asked_mono_s[key]
            sharers = len(self._pools_asked_mono_s)
        return {server: max(1, allowed // sharers) for server, allowed in governors.concurrencies().items()}

    def fetch_spec(self, name: str) -> AnyFetchSpec:
        """For a pool actor: how to fetch the dataset."""
        return self._dataset(name).spec

    def next_uses(self) -> dict[str, float]:
        """Content names needed soon, over all datasets, and how far ahead each is; for eviction elsewhere."""
        return next_uses([(feed.fetcher, feed.ahead) for feed in list(self._feeds.values())])

    def ping(self) -> str:
        """The folder it fills, as a sign of life."""
        return str(self.root)

    def counts(self) -> DataCounts:
        """What was fetched for the node in this actor's life, with its pools."""
        stats = self._fetched()
        with self._mutex:
            requests = self._pool_requests + governors.request_counts()
        return DataCounts(
            store_bytes=stats.fetched_bytes,
            requests=requests.requests,
            refused=requests.refused,
            lost=requests.lost,
        )

    def stats(self) -> ShardCacheStats:
        """The cache now."""
        counts = self._fetched()
        with self._mutex:
            feeds = {name: feed.stats() for name, feed in self._feeds.items()}
            requests = self._pool_requests + governors.request_counts()
        usage_bytes = NodeCache(self.root).usage_bytes()
        return ShardCacheStats(counts=counts, usage_bytes=usage_bytes, requests=requests, feeds=feeds)

    def close(self, timeout_s: float = 5.0) -> bool:
        """All feeds have ended; False if one needed longer than `timeout_s`."""
        with self._mutex:
            feeds = list(self._feeds.values())
            for name in list(self._feeds):
                self._end_feed(name)
        return all([feed.join(timeout_s) for feed in feeds])

    def _fetched(self) -> CacheStats:
        with self._mutex:
            counts = self._past
            for dataset in self._datasets.values():
                counts += dataset.fetcher.cache.stats
            for feed in self._feeds.values():
                counts += feed.counts
            return counts

    def _dataset(self, name: str) -> _Dataset:
        dataset = self._datasets.get(name)
        if dataset is None:
            raise UnknownDatasetError(f"The cache actor does not know the dataset {name!r}: it was restarted.")
        return dataset

    def _end_feed(self, name: str) -> None:
        feed = self._feeds.pop(name, None)
        if feed is not None:
            feed.close()
            self._past += feed.counts


class _ShardCacheProcess(ShardCache):
    """The cache with a pool of Ray Data actors, on the node it runs on."""

    def __init__(self, root: str | None, pool_size: int) -> None:
        super().__init__(Path(root) if root is not None else cache_root())
        self._pool_size = pool_size

    def run_pool(self, name: str, feed_id: int, numbers: range) -> Iterator[Delivery]:
        import ray

        from ray_goodput.actors.prefetch import run_pool

        context = ray.get_runtime_context()
        return run_pool(
            cache_actor=context.current_actor,
            dataset=name,
            root=str(self.root),
            node_id=context.get_node_id(),
            pool_size=self._pool_size,
            feed=feed_id,
            numbers=numbers,
            transforms=self._dataset(name).spec.transforms,
        )


def cache_root() -> Path:
    """The folder of this node's cache, the same for all runs: `cache` in the node's local directory."""
    return environment().local_dir / "cache"


def shard_cache_actor(key: str, node_id: str, *, root: str | None = None, pool_size: int = 2) -> Any:
    """The `ShardCache` actor of a run (`names.run_key`) on a node, started if there is none; returns at once.

    Owned by the calling process: it goes when that one does. root: default `cache_root()` as the node sees it.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from ray_goodput.actors.remote import with_control_threads

    return (
        with_control_threads(_ShardCacheProcess)
        .options(
            name=shard_cache_name(key, node_id),
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_MAX_CONCURRENCY,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(root, pool_size)
    )
