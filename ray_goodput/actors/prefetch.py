"""The pool of prefetch actors: Ray Data moves data shards to this node, in the exact order in which they are needed.

A pool run is one small Ray Data execution over consecutive numbers of a feed, one number a block. Each pool actor asks
the node's `ShardCache` whether its number may be fetched (it waits while that is too far ahead), then brings the shard
into the cache folder itself. The pool needs no CPU resource, so it runs while train workers hold them all, and it dies
with the `ShardCache` actor that owns it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from ray_goodput.actors.shard_feed import Admission, Delivery
from ray_goodput.actors.transform_task import from_stream, load_admitted
from ray_goodput.data import governors
from ray_goodput.data.cache import NodeCache
from ray_goodput.errors import GoodputError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from ray_goodput.data.mixture_feed import AnyFetcher

logger = logging.getLogger(__name__)

_NODE_ID_LABEL = "ray.io/node-id"  # a hard affinity; Ray Data deprecates `scheduling_strategy`
_RANKING_AGE_S = 2.0
_TASKS_PER_ACTOR = 2  # that transform, for each actor that writes: they take longer
_quiet = threading.Lock()


class PrefetchActor:
    """One actor of the pool: `map_batches` calls it with one number of the feed at a time."""

    def __init__(self, cache_actor: ActorHandle, dataset: str, root: str) -> None:
        self._actor = cache_actor
        self._dataset = dataset
        self._root = Path(root)
        self._id = secrets.token_hex(8)
        self._fetcher: AnyFetcher | None = None
        self._ranking: Mapping[str, float] = {}
        self._ranking_mono_s = float("-inf")

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        if "wanted" in batch:  # a `load_admitted` stands before this actor
            names = ("number", "data_shard", "wanted", "table", "error")
            deliveries = [self._take(*row) for row in zip(*(batch[name].tolist() for name in names), strict=True)]
        else:
            pairs = zip(batch["feed"], batch["number"], strict=True)
            deliveries = [self._deliver(int(feed), int(number)) for feed, number in pairs]
        return {name: [getattr(delivery, name) for delivery in deliveries] for name in Delivery.__slots__}

    def _deliver(self, feed: int, number: int) -> Delivery:
        admission, data_shard = Admission.WAIT, -1
        while admission is Admission.WAIT:  # asked again, so that neither side waits for a dead one
            admission, data_shard = ray.get(self._actor.admit.remote(self._dataset, number, feed))
        if admission is not Admission.FETCH:
            return Delivery(number=number, data_shard=data_shard)
        return self._fetched(number, data_shard, lambda fetcher: fetcher.ensure(data_shard))

    def _take(self, number: int, data_shard: int, wanted: bool, table: bytes | None, error: str) -> Delivery:
        """A number that a task has dealt with but for the cache on this node."""
        if not wanted or error:
            return Delivery(number=number, data_shard=data_shard, error=error)
        if table is None:
            return self._fetched(number, data_shard, lambda fetcher: fetcher.ensure(data_shard))
        return self._fetched(number, data_shard, lambda fetcher: fetcher.put(data_shard, from_stream(table)))

    def _fetched(self, number: int, data_shard: int, bring: Callable[[AnyFetcher], object]) -> Delivery:
        fetcher = self._open()
        self._refresh_ranking()
        self._take_shares()
        before = fetcher.cache.stats
        error = ""
        try:
            bring(fetcher)
        except (GoodputError, OSError) as problem:
            # Not an error yet: whoever needs the shard fetches it then, and raises if that fails too.
            error = f"{type(problem).__name__}: {problem}"
        after = fetcher.cache.stats
        return Delivery(
            number=number,
            data_shard=data_shard,
            fetched_bytes=after.fetched_bytes - before.fetched_bytes,
            fetched_shards=after.fetched_shards - before.fetched_shards,
            evictions=after.evictions - before.evictions,
            corrupt=after.corrupt - before.corrupt,
            error=error,
        )

    def _open(self) -> AnyFetcher:
        if self._fetcher is None:  # here, not where the pool was made: no store crosses a process
            spec: Any = ray.get(self._actor.fetch_spec.remote(self._dataset))
            cache = NodeCache(self._root, limit_bytes=spec.cache_limit_bytes)
            cache.rank_by(lambda: self._ranking)
            self._fetcher = fetcher = spec.fetcher(cache)
            return fetcher
        return self._fetcher

    def _take_shares(self) -> None:
        """The node's actor keeps the rate of its requests; a refusal here slows this process at once, all others with
        their next shard."""
        shares: Any = ray.get(self._actor.request_shares.remote(self._id, governors.take_records()))
        governors.set_shares(shares)

    def _refresh_ranking(self) -> None:
        """Asked beforehand, not when room is short: the cache's lock is held then, and the actor may want it too."""
        if time.monotonic() - self._ranking_mono_s > _RANKING_AGE_S:
            ranking: Any = ray.get(self._actor.next_uses.remote())
            self._ranking = ranking
            self._ranking_mono_s = time.monotonic()


def run_pool(
    *,
    cache_actor: ActorHandle,
    dataset: str,
    root: str,
    node_id: str,
    pool_size: int,
    feed: int,
    numbers: range,
    transforms: bool = False,
) -> Iterator[Delivery]:
    """Runs the numbers of one feed through a pool of `pool_size` actors on the node, and yields what became of each,
    in order. Closing the iterator ends the pool. Ray Data restarts an actor that dies, and sends its numbers again.

    transforms: data shards are fetched and transformed in tasks anywhere in the cluster, before the pool.

    Raises:
        ray.exceptions.RayError: the pool failed as a whole.
    """
    import ray.data

    _silence_ray_data()
    items = [{"feed": feed, "number": number} for number in numbers]
    source = ray.data.from_items(items, override_num_blocks=len(items))
    if transforms:
        source = source.map_batches(
            partial(load_admitted, cache_actor=cache_actor, dataset=dataset, root=root, node_id=node_id),
            compute=ray.data.TaskPoolStrategy(size=_TASKS_PER_ACTOR * pool_size),
            batch_size=1,
            num_cpus=0,
        )
    pool = source.map_batches(
        PrefetchActor,
        fn_constructor_args=(cache_actor, dataset, root),
        compute=ray.data.ActorPoolStrategy(size=pool_size, max_tasks_in_flight_per_actor=2),
        batch_size=1,
        num_cpus=0,
        label_selector={_NODE_ID_LABEL: node_id},
    )
    rows = iter(pool.iter_rows())
    for row in rows:
        yield Delivery(**row)


def _silence_ray_data() -> None:
    """Ray Data in this process says nothing but errors, and waits for the trainer as long as it takes."""
    from ray.data import DataContext

    with _quiet:
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.enable_operator_progress_bars = False
        context.print_on_execution_start = False
        context.execution_options.preserve_order = True
        context.execution_no_progress_timeout_s = -1  # a trainer may take an hour over what is already cached
        logging.getLogger("ray.data").setLevel(logging.ERROR)
