"""Fetching for a mixture: each data shard by the fetcher of its own dataset, all into one cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ray_goodput.core.mixture import MixtureOrder
from ray_goodput.core.placement import AnyOrder
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.feed import FeedSpec, FetchSpec, look_ahead
from ray_goodput.data.lookahead import LookAhead
from ray_goodput.data.mixture_manifest import MixtureManifest
from ray_goodput.data.shard_fetcher import Fetched, ShardFetcher

if TYPE_CHECKING:
    from ray_goodput.data.mixture_manifest import AnyManifest


class MixtureFetcher:
    """A `ShardFetcher` whose data shards are those of several, one after another. Thread-safe."""

    def __init__(self, manifest: MixtureManifest, fetchers: tuple[ShardFetcher, ...], cache: NodeCache) -> None:
        self.manifest = manifest
        self.cache = cache
        self._fetchers = fetchers
        self._first_shards = np.concatenate([[0], np.cumsum([fetcher.manifest.num_shards for fetcher in fetchers])])

    def name(self, data_shard: int) -> str:
        """Content name of a data shard in the cache."""
        fetcher, own = self._own(data_shard)
        return fetcher.name(own)

    def title(self, data_shard: int) -> str:
        """The data shard by its number in its own dataset and its object, for messages."""
        fetcher, own = self._own(data_shard)
        return fetcher.title(own)

    def ensure(self, data_shard: int, *, awaited: bool = False) -> Fetched:
        """The data shard is cached. Raises as `ShardFetcher.ensure` does; errors say the number in its own dataset."""
        fetcher, own = self._own(data_shard)
        return fetcher.ensure(own, awaited=awaited)

    def opened(self, data_shard: int) -> pa.Table | None:
        """As `ShardFetcher.opened`."""
        fetcher, own = self._own(data_shard)
        return fetcher.opened(own)

    def transforms(self, data_shard: int) -> bool:
        """As `ShardFetcher.transforms`."""
        fetcher, own = self._own(data_shard)
        return fetcher.transforms(own)

    def load(self, data_shard: int) -> pa.Table:
        """As `ShardFetcher.load`."""
        fetcher, own = self._own(data_shard)
        return fetcher.load(own)

    def put(self, data_shard: int, table: pa.Table) -> Fetched:
        """As `ShardFetcher.put`."""
        fetcher, own = self._own(data_shard)
        return fetcher.put(own, table)

    def table(self, data_shard: int) -> pa.Table:
        """The data shard, memory-mapped from the cache, fetched first if need be. Raises as `ensure` does."""
        fetcher, own = self._own(data_shard)
        return fetcher.table(own)

    def _own(self, data_shard: int) -> tuple[ShardFetcher, int]:
        member = int(np.searchsorted(self._first_shards, data_shard, side="right")) - 1
        return self._fetchers[member], data_shard - int(self._first_shards[member])


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFetchSpec:
    """As `FetchSpec`, for a mixture. Picklable."""

    names: tuple[str, ...]
    members: tuple[FetchSpec, ...]
    counts: tuple[int, ...]
    seed: int
    global_batch_size: int
    prefetch_shards: int
    cache_limit_bytes: int | None

    @property
    def transforms(self) -> bool:
        """Whether any of the datasets has a `transform_shard`."""
        return any(spec.transforms for spec in self.members)

    def open_manifest(self) -> MixtureManifest:
        """The manifests, decoded."""
        return MixtureManifest(
            {name: spec.open_manifest() for name, spec in zip(self.names, self.members, strict=True)}
        )

    def fetcher(self, cache: NodeCache, manifest: AnyManifest | None = None) -> MixtureFetcher:
        """A fetcher with stores of its own, opened here."""
        manifest = manifest if isinstance(manifest, MixtureManifest) else self.open_manifest()
        fetchers = tuple(
            spec.fetcher(cache, part) for spec, part in zip(self.members, manifest.members.values(), strict=True)
        )
        return MixtureFetcher(manifest, fetchers, cache)

    def order(self, manifest: AnyManifest) -> MixtureOrder:
        """The order of samples; the same as the mixture's."""
        assert isinstance(manifest, MixtureManifest)
        parts = zip(self.names, self.members, manifest.members.values(), strict=True)
        return MixtureOrder({name: spec.order(part) for name, spec, part in parts}, self.counts, seed=self.seed)

    def look_ahead(
        self, order: AnyOrder, manifest: AnyManifest, feed: FeedSpec, *, consumed: int | None = None
    ) -> LookAhead:
        """As `FetchSpec.look_ahead`. Raises CacheFullError."""
        return look_ahead(self, order, manifest, feed, consumed=consumed)


AnyFetchSpec = FetchSpec | MixtureFetchSpec
AnyFetcher = ShardFetcher | MixtureFetcher
