"""Batches of one dataset for one rank: the run's manifest, the node's shard cache, and a loader at the cursor."""

from __future__ import annotations

from dataclasses import dataclass

import ray.train.torch

from ray_goodput.actors.shard_source import ActorShardSource
from ray_goodput.actors.spec import RunSpec
from ray_goodput.core.cursor import DataCursor, check
from ray_goodput.data.feed import FeedSpec
from ray_goodput.data.loader import BatchLoader, ShardSource
from ray_goodput.data.mixture import AnyDataset
from ray_goodput.train.datasets import load_manifest
from ray_goodput.train.worker import WorkerContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFeed:
    """An open source and the loader over it; `close` ends both."""

    loader: BatchLoader
    source: ShardSource
    cursor: DataCursor

    def close(self) -> None:
        self.loader.close()


def open_feed(
    spec: RunSpec,
    worker: WorkerContext,
    name: str,
    dataset: AnyDataset,
    cursor: DataCursor | None,
    *,
    epochs: int | None,
    purpose: str = "",
) -> DataFeed:
    """A feed that goes on at `cursor`, or starts at the first sample without one.

    purpose: tells apart feeds of one dataset that are open at the same time.

    Raises:
        DatasetMismatchError: the cursor belongs to other data or another order.
        CacheFullError: the data shards needed at once do not fit the cache.
    """
    manifest = load_manifest(worker.store, name)
    start = dataset.cursor(manifest)
    if cursor is not None:
        check(cursor, start)
        start = cursor
    world = worker.world
    source = ActorShardSource(
        worker.shard_cache,
        f"{name} ({purpose})" if purpose else name,
        dataset.fetch_spec(manifest),
        FeedSpec(start=start.samples_consumed, dp_ranks=worker.ranks_of_node, dp_world=world.world_size, epochs=epochs),
        attempt=worker.attempt,
    ).open()
    loader = dataset.batch_loader(
        dataset.order(manifest),
        source,
        start=start.samples_consumed,
        epochs=epochs,
        dp_rank=world.world_rank,
        dp_world=world.world_size,
        device=ray.train.torch.get_device(),
    )
    return DataFeed(loader=loader, source=source, cursor=start)
