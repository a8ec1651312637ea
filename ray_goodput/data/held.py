"""What a node's cache already holds of each lane."""

from __future__ import annotations

import numpy as np

from ray_goodput.core.order import Int64Array
from ray_goodput.core.placement import AnyOrder, lane_parts
from ray_goodput.data.mixture_feed import AnyFetcher
from ray_goodput.data.mixture_manifest import AnyManifest

_MAX_NAMES = 8192  # of data shards, whose hashes take 0.1 s


def held_bytes(
    order: AnyOrder, manifest: AnyManifest, fetcher: AnyFetcher, start: int, epochs: int | None
) -> Int64Array:
    """Of each lane, the bytes (of objects) of what it reads within an epoch from stream position `start` on, and before
    the end of `epochs`, that the cache of `fetcher` holds. Of a data shard that lanes share, each has its rows.

    Of many data shards only every n-th of each lane is looked for, and counted n times.
    """
    cached = fetcher.cache.names()
    held = np.zeros(order.lanes, dtype=np.int64)
    if not cached:
        return held
    stop = start + order.num_samples
    if epochs is not None:
        stop = min(stop, epochs * order.num_samples)
    every = -(-manifest.num_shards // _MAX_NAMES)
    for lane in range(order.lanes):
        shards, rows = lane_parts(order, lane, start, stop)
        for shard, num_rows in zip(shards[::every].tolist(), rows[::every].tolist(), strict=True):
            if fetcher.name(shard) in cached:
                held[lane] += every * int(manifest.sizes[shard]) * num_rows // int(manifest.rows[shard])
    return held
