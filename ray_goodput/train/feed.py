"""Batches of one dataset for one rank: the run's manifest, the node's shard cache, and a loader at the cursor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ray.train.torch

from ray_goodput.actors.shard_cache import cache_root
from ray_goodput.actors.shard_source import ActorShardSource
from ray_goodput.actors.spec import RunSpec
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.cursor import DataCursor, check
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.order import Int64Array
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.dataset import ShardedDataset
from ray_goodput.data.feed import FeedSpec
from ray_goodput.data.held import held_bytes
from ray_goodput.data.loader import Batch, BatchLoader, ShardSource
from ray_goodput.data.mixture import AnyDataset
from ray_goodput.errors import ConfigError
from ray_goodput.goodput.recorder import Recorder
from ray_goodput.train.data_ranks import DataRanks, agreed
from ray_goodput.train.datasets import load_manifest
from ray_goodput.train.lanes import LaneAgreement
from ray_goodput.train.worker import WorkerContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFeed:
    """An open source and the loader over it; `close` ends both. `is_first`: of the ranks that read the same batches.

    node_counts: what has been fetched for the whole node, as far as this rank knows.
    """

    loader: BatchLoader
    source: ShardSource
    cursor: DataCursor
    is_first: bool = True
    node_counts: Callable[[], DataCounts] = DataCounts

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
    dp_rank: int | None = None,
    dp_world: int | None = None,
    lanes: LaneAgreement | None = None,
) -> DataFeed:
    """A feed that goes on at `cursor`, or starts at the first sample without one.

    purpose: tells apart feeds of one dataset that are open at the same time.

    dp_rank, dp_world: of a data-parallel group other than the world; collective then, given by all ranks.

    lanes: says which rank reads which; collective the first time for a dataset in an attempt of another size. None:
        they are in ascending sequence.

    Raises:
        ConfigError: the ranks do not make one data-parallel group, or it is larger than a batch.
        DatasetMismatchError: the cursor belongs to other data or another order.
        CacheFullError: the data shards needed at once do not fit the cache.
    """
    ranks = _data_ranks(worker, dp_rank, dp_world)
    dataset.check_world(ranks.dp_world)
    manifest = load_manifest(worker.store, name)
    start = dataset.cursor(manifest)
    if cursor is not None:
        check(cursor, start)
        start = cursor
    order, fetch_spec = dataset.order(manifest), dataset.fetch_spec(manifest)

    def held() -> Int64Array:
        fetcher = fetch_spec.fetcher(NodeCache(cache_root()), manifest)
        own_order = dataset.order(manifest)  # that of the loader shall not keep what it needs of other ranks' lanes
        return held_bytes(own_order, manifest, fetcher, start.samples_consumed, epochs)

    lane_places = None
    if lanes is not None:
        batch_size = fetch_spec.global_batch_size
        lane_places = lanes.places(name, ranks, order.lanes, batch_size, held)
    source = ActorShardSource(
        worker.shard_cache,
        f"{name} ({purpose})" if purpose else name,
        fetch_spec,
        FeedSpec(
            start=start.samples_consumed,
            dp_ranks=ranks.of_node,
            dp_world=ranks.dp_world,
            epochs=epochs,
            lane_places=lane_places,
        ),
        attempt=worker.attempt,
    ).open()
    loader = dataset.batch_loader(
        order,
        source,
        start=start.samples_consumed,
        epochs=epochs,
        dp_rank=ranks.dp_rank,
        dp_world=ranks.dp_world,
        lane_places=lane_places,
        device=ray.train.torch.get_device(),
    )
    return DataFeed(
        loader=loader,
        source=source,
        cursor=start,
        is_first=ranks.is_first,
        node_counts=lambda: source.node_counts,
    )


def whole_pass(name: str, dataset: AnyDataset) -> ShardedDataset:
    """The dataset with nothing dropped at its end. Raises ConfigError for a mixture."""
    if not isinstance(dataset, ShardedDataset):
        raise ConfigError(
            f"evaluate_batches({name!r}): no pass over a mixture holds every sample exactly once: give its datasets to "
            "GoodputTrainer(datasets=) under names of their own, and evaluate on each."
        )
    return dataclasses.replace(dataset, drop_last=False)


def evaluated(open_one: Callable[[], DataFeed], recorder: Recorder, feeds: list[DataFeed]) -> Iterator[Batch]:
    """All batches of a feed, as time of `eval`; it is among `feeds` while it is open.

    All of it when the first batch is asked for: a generator that is never begun must leave nothing open.
    """
    with recorder.span(Bucket.EVAL):
        feed = open_one()
        feeds.append(feed)
        try:
            for batch in feed.loader:
                yield batch
                feed.source.advance(batch.samples_end)
        finally:
            feeds.remove(feed)
            feed.close()


def _data_ranks(worker: WorkerContext, dp_rank: int | None, dp_world: int | None) -> DataRanks:
    world = worker.world
    if dp_rank is None and dp_world is None:
        told = [(rank, world.world_size) for rank in range(world.world_size)]
    elif dp_rank is None or dp_world is None:
        raise ConfigError(f"batches(dp_rank={dp_rank}, dp_world={dp_world}): give both, on every rank, or neither.")
    else:
        told = world.gather((dp_rank, dp_world))
    return agreed(told, worker.node_of_rank, world.world_rank)
