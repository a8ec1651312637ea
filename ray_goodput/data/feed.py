"""What a process needs to fetch a dataset's shards in the order in which some ranks will need them: plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ray_goodput.config import StoreSpec
from ray_goodput.core.order import SampleOrder
from ray_goodput.core.placement import AnyOrder, live_set, live_set_bytes, live_sets, shard_visits
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.governors import governor_for
from ray_goodput.data.lookahead import LookAhead, first_needs
from ray_goodput.data.manifest import Manifest
from ray_goodput.data.shard_fetcher import ShardFetcher, TableFormat
from ray_goodput.data.shard_transforms import TransformedFormat
from ray_goodput.errors import CacheFullError

if TYPE_CHECKING:
    from ray_goodput.data.dataset import ShardedDataset
    from ray_goodput.data.mixture_manifest import AnyManifest


# What comes ahead must not make room for itself: beside it the next batch's data shards come, and while one is fetched
# it is there as an object, too.
_SHARE_AHEAD = 4
MAX_FETCHES = 4  # at a time, by `LocalShardSource`; the actor's pool has fewer
_RANKS_APART = 3  # batches: the loaders of a node's ranks build two ahead, each when it has room


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSpec:
    """Which ranks read, from where: `start` is samples consumed; `epochs` counts from position 0, None has no end.

    lane_places: equal on all ranks; see `core.batches`.
    """

    start: int
    dp_ranks: tuple[int, ...]
    dp_world: int
    epochs: int | None
    lane_places: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSpec:
    """A dataset without its user's code (`transform`, `collate`): what any process needs to fetch and to look ahead.

    Picklable. `manifest` is `Manifest.to_bytes()`.
    """

    manifest_digest: str
    manifest: bytes = field(repr=False)
    store: StoreSpec
    format: TableFormat
    columns: tuple[str, ...] | None
    seed: int
    lanes: int
    window: int
    global_batch_size: int
    prefetch_shards: int
    cache_limit_bytes: int | None
    pin: bool
    hedge_after_s: float | None = None

    @classmethod
    def of(cls, dataset: ShardedDataset, manifest: AnyManifest) -> FetchSpec:
        """The part of `dataset` that fetching needs."""
        order = dataset.order(manifest)
        return cls(
            manifest_digest=manifest.digest,
            manifest=manifest.to_bytes(),
            store=dataset.store_spec,
            format=dataset.shard_format(),
            columns=None if dataset.columns is None else tuple(dataset.columns),
            seed=order.seed,
            lanes=order.lanes,
            window=order.window,
            global_batch_size=dataset.global_batch_size,
            prefetch_shards=dataset.prefetch_shards,
            cache_limit_bytes=dataset.cache_limit_bytes,
            pin=dataset.on_change == "fail",
            hedge_after_s=dataset.hedge_after_s,
        )

    @property
    def transforms(self) -> bool:
        """Whether there is a `transform_shard`."""
        return isinstance(self.format, TransformedFormat)

    def open_manifest(self) -> Manifest:
        """The manifest, decoded."""
        return Manifest.from_bytes(self.manifest)

    def fetcher(self, cache: NodeCache, manifest: AnyManifest | None = None) -> ShardFetcher:
        """A fetcher with a store of its own, opened here: stores survive neither a fork nor a pickle.

        Its requests count against this process's rate for that store (`governor_for`).
        """
        from ray_goodput.storage import open_store

        manifest = manifest if isinstance(manifest, Manifest) else self.open_manifest()
        store = open_store(self.store, governor_for(self.store, hedge_after_s=self.hedge_after_s))
        return ShardFetcher(manifest, store, self.format, cache, self.columns, pin=self.pin)

    def order(self, manifest: AnyManifest) -> SampleOrder:
        """The order of samples; the same as the dataset's."""
        return SampleOrder(manifest.rows, seed=self.seed, lanes=self.lanes, window=self.window)

    def look_ahead(
        self, order: AnyOrder, manifest: AnyManifest, feed: FeedSpec, *, consumed: int | None = None
    ) -> LookAhead:
        """The shards that the ranks of `feed` will need, from `feed.start` on, with the consumer at `consumed`.

        It reaches `prefetch_shards` beyond the next batch, and at most a quarter of the bytes that the cache's limit
        leaves beside what the ranks hold open.

        Raises:
            CacheFullError: what the ranks need at once does not fit the cache.
        """
        return look_ahead(self, order, manifest, feed, consumed=consumed)


class LookAheadSettings(Protocol):
    """What looking ahead needs of a `FetchSpec`, be it for one dataset or for a mixture."""

    @property
    def global_batch_size(self) -> int: ...

    @property
    def prefetch_shards(self) -> int: ...

    @property
    def cache_limit_bytes(self) -> int | None: ...


def look_ahead(
    spec: LookAheadSettings, order: AnyOrder, manifest: AnyManifest, feed: FeedSpec, *, consumed: int | None
) -> LookAhead:
    """See `FetchSpec.look_ahead`."""
    readers = spec.global_batch_size, feed.dp_ranks, feed.dp_world, feed.lane_places
    limit = spec.cache_limit_bytes
    max_bytes = None
    if limit is not None:
        # What the loaders of these ranks hold open: the live set and a window each, of each dataset of a mixture.
        open_bytes = live_set_bytes(order, manifest.sizes, *readers, more_windows=len(feed.dp_ranks))
        _check_live_set(
            manifest,
            limit,
            open_bytes=open_bytes,
            live=live_set(order, *readers),
            live_bytes=live_set_bytes(order, manifest.sizes, *readers),
        )
        max_bytes = max(0, limit - open_bytes) // _SHARE_AHEAD
    stop = None if feed.epochs is None else feed.epochs * order.num_samples
    visits = shard_visits(order, feed.start, stop, *readers)
    return LookAhead(
        first_needs(visits),
        shard_bytes=lambda data_shard: int(manifest.sizes[data_shard]),
        consumed=feed.start if consumed is None else max(feed.start, consumed),
        batch_samples=spec.global_batch_size,
        max_shards=spec.prefetch_shards,
        max_bytes=max_bytes,
        live_shards=live_sets(order, *readers),
        member_of=None if isinstance(order, SampleOrder) else order.member_of,
        lanes=order.lanes,
        behind=0 if len(feed.dp_ranks) == 1 else _RANKS_APART * spec.global_batch_size,
    )


class NamedShards(Protocol):
    """What a ranking needs of a fetcher."""

    def name(self, data_shard: int) -> str: ...


def next_uses(feeds: Iterable[tuple[NamedShards, LookAhead]]) -> dict[str, float]:
    """Content names that any of `feeds` needs soon, and how far ahead each is: a ranking for `NodeCache.rank_by`."""
    uses: dict[str, float] = {}
    for fetcher, ahead in feeds:
        for data_shard, use in ahead.next_uses().items():
            name = fetcher.name(data_shard)
            uses[name] = min(use, uses.get(name, use))
    return uses


def _check_live_set(manifest: AnyManifest, limit_bytes: int, *, open_bytes: int, live: int, live_bytes: int) -> None:
    """In bytes of objects: what they hold is often larger, so a cache that passes may still be too small."""
    if live_bytes > limit_bytes:
        enough = 2 * open_bytes + 2 * MAX_FETCHES * int(manifest.sizes.max())  # in flight as objects, and as files
        raise CacheFullError(
            f"The ranks of this node read from up to {live} data shards at once, {live_bytes} bytes, and the cache's "
            f"limit is {limit_bytes} bytes: set cache_limit_bytes to at least {enough} (more if the objects are "
            "compressed: the cache holds what is in them), or use fewer lanes, a smaller window or smaller data shards."
        )
