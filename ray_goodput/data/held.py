"""What a node's cache already holds of each lane."""

from __future__ import annotations

import numpy as np

from ray_goodput.core.lane_places import lane_shards
from ray_goodput.core.order import Int64Array
from ray_goodput.core.placement import AnyOrder
from ray_goodput.data.mixture_feed import AnyFetcher
from ray_goodput.data.mixture_manifest import AnyManifest

_MAX_LOOKS = 8192  # at files, some 0.1 s


def held_bytes(order: AnyOrder, manifest: AnyManifest, fetcher: AnyFetcher) -> Int64Array:
    """Of each lane, the bytes (of objects) of its data shards that the cache of `fetcher` holds.

    Of many shards only every n-th of each lane is looked at: a sample, as they come permuted.
    """
    every = -(-manifest.num_shards // _MAX_LOOKS)
    held = np.zeros(order.lanes, dtype=np.int64)
    for lane in range(order.lanes):
        looked_at = lane_shards(order, lane)[::every].tolist()
        cached = [shard for shard in looked_at if fetcher.cache.contains(fetcher.name(shard))]
        held[lane] = manifest.sizes[cached].sum()
    return held
