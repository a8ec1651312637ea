"""Which lanes and data shards a node's ranks need, and when: the exact future, for prefetching and cache sizing.

Works on windows and parts, never on rows: a window's shards count as needed when its first sample is. Only the one
batch across each epoch's end, where lanes shift between ranks, is looked at slot by slot.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from ray_goodput.core.batches import batch_slots, slot_bounds
from ray_goodput.core.order import Int64Array, SampleOrder


class ShardVisit(NamedTuple):
    """Data shard `data_shard` is needed from stream index `position` on, for one window of one lane."""

    position: int
    epoch: int
    data_shard: int


def rank_lanes(order: SampleOrder, global_batch_size: int, dp_ranks: Sequence[int], dp_world: int) -> Int64Array:
    """Lanes, ascending, that `dp_ranks` read in batches that lie within an epoch.

    Exact when the lanes divide the batch (as by default); else the lanes of any batch, whichever lane it begins at.
    """
    lanes, size = order.lanes, global_batch_size
    if size >= order.num_samples:
        return np.arange(lanes, dtype=np.int64)
    bounds = [slot_bounds(size, rank, dp_world) for rank in dp_ranks]
    needed = np.zeros(lanes, dtype=np.bool_)
    per_lane, longer = divmod(size, lanes)
    for first in range(lanes if longer else 1):
        counts = np.full(lanes, per_lane, dtype=np.int64)
        counts[(first + np.arange(longer)) % lanes] += 1
        ends = np.cumsum(counts)
        for low, high in bounds:
            needed |= (ends > low) & (ends - counts < high) & (counts > 0) & (high > low)
        if needed.all():
            break
    return np.flatnonzero(needed).astype(np.int64)


def live_set(order: SampleOrder, global_batch_size: int, dp_ranks: Sequence[int], dp_world: int) -> int:
    """Upper bound of the data shards that `dp_ranks` read from at one position: lanes x window, at most all shards.

    A cache that holds fewer fetches shards again and again.
    """
    lanes = len(rank_lanes(order, global_batch_size, dp_ranks, dp_world))
    return min(order.num_shards, lanes * order.window)


def live_set_bytes(
    order: SampleOrder, shard_bytes: Int64Array, global_batch_size: int, dp_ranks: Sequence[int], dp_world: int
) -> int:
    """Upper bound of the bytes of `live_set`: that many of the largest data shards."""
    num = live_set(order, global_batch_size, dp_ranks, dp_world)
    return int(np.sort(shard_bytes)[::-1][:num].sum())


def shard_sequence(
    order: SampleOrder,
    start: int,
    stop: int | None,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
) -> Iterator[int]:
    """Data shards in the order in which `dp_ranks` first need them from stream position `start` to `stop`.

    Each shard once an epoch; endless if `stop` is None. Lazy: an epoch of 1e5 shards is never built as a whole.
    """
    epoch = -1
    seen: set[int] = set()
    for visit in shard_visits(order, start, stop, global_batch_size, dp_ranks, dp_world):
        if visit.epoch != epoch:
            epoch = visit.epoch
            seen.clear()
        if visit.data_shard not in seen:
            seen.add(visit.data_shard)
            yield visit.data_shard


def shard_visits(
    order: SampleOrder,
    start: int,
    stop: int | None,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
) -> Iterator[ShardVisit]:
    """Every window's need of every shard, by position; a shard cut by a lane's end is visited by both lanes.

    `start` is the position of a batch (samples consumed), and batches follow it every `global_batch_size`. `stop` is
    the end of the last epoch, where the last batch is cut short. With `drop_last` the sequence also holds what the
    dropped samples would need.
    """
    num_samples, num_lanes = order.num_samples, order.lanes
    lanes = rank_lanes(order, global_batch_size, dp_ranks, dp_world)
    if stop is None and not len(lanes):
        return  # more ranks than samples in a batch, and these never get one: an endless search would find nothing
    for epoch in count(start // num_samples):
        begin = epoch * num_samples
        if stop is not None and begin >= stop:
            return
        # Stream indices [first, last) of this epoch are still to come; lane offsets follow from them.
        first = max(start - begin, 0)
        last = num_samples if stop is None else min(stop - begin, num_samples)
        streams = [
            _lane_visits(order, epoch, lane, -(-(first - lane) // num_lanes), -(-(last - lane) // num_lanes))
            for lane in lanes.tolist()
        ]
        if len(lanes) < num_lanes:
            streams.append(iter(_odd_visits(order, epoch, start, stop, global_batch_size, dp_ranks, dp_world, lanes)))
        yield from heapq.merge(*streams, key=lambda visit: visit.position)


def _lane_visits(order: SampleOrder, epoch: int, lane: int, low: int, high: int) -> Iterator[ShardVisit]:
    """Visits of the windows of a lane that hold any of its offsets [low, high)."""
    low, high = max(low, 0), min(high, order.lane_length(lane))
    if low >= high:
        return
    view = order.lane_epoch(epoch, lane)
    first = int(np.searchsorted(view.window_starts, low, side="right")) - 1
    last = int(np.searchsorted(view.window_starts, high, side="left"))
    for window in range(first, last):
        position = epoch * order.num_samples + int(view.window_starts[window]) * order.lanes + lane
        for shard in view.shards[window * order.window : (window + 1) * order.window].tolist():
            yield ShardVisit(position, epoch, shard)


def _odd_visits(
    order: SampleOrder,
    epoch: int,
    start: int,
    stop: int | None,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lanes: Int64Array,
) -> list[ShardVisit]:
    """Visits to lanes outside `lanes` in `epoch` by odd batches: those across its ends, and the last, cut by `stop`."""
    num_samples = order.num_samples
    visits: set[ShardVisit] = set()
    for edge in (epoch * num_samples, (epoch + 1) * num_samples, stop):
        if edge is None or edge <= start:
            continue
        batch_start = start + (edge - start) // global_batch_size * global_batch_size
        batch_stop = batch_start + global_batch_size
        if stop is not None:
            batch_stop = min(batch_stop, stop)
        if batch_start >= min(edge, batch_stop):
            continue
        slots = batch_slots(order, batch_start, batch_stop)
        for rank in dp_ranks:
            low, high = slot_bounds(batch_stop - batch_start, rank, dp_world)
            mine = slots[low:high]
            mine = mine[mine // num_samples == epoch] % num_samples
            for lane in np.setdiff1d(mine % order.lanes, lanes).tolist():
                offsets = mine[mine % order.lanes == lane] // order.lanes
                visits.update(_lane_visits(order, epoch, lane, int(offsets.min()), int(offsets.max()) + 1))
    return sorted(visits)
