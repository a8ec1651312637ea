"""Which lanes and data shards a node's ranks need, and when: the exact future, for prefetching and cache sizing.

Works on windows and parts, never on rows: a window's shards count as needed when its first sample is. Only the one
batch across each epoch's end, where lanes shift between ranks, is looked at slot by slot. `lane_places` everywhere: as
the ranks' batches have it (`core.batches`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from ray_goodput.core.batches import LanePlaces, batch_slots, local_slots, slot_bounds
from ray_goodput.core.mixture import MixtureOrder
from ray_goodput.core.order import Int64Array, LaneEpoch, SampleOrder

AnyOrder = SampleOrder | MixtureOrder


class ShardVisit(NamedTuple):
    """Data shard `data_shard` is needed from stream index `position` on, for one window of one lane. In a mixture,
    `epoch` is that of the shard's own dataset."""

    position: int
    epoch: int
    data_shard: int


def rank_lanes(
    order: AnyOrder,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lane_places: LanePlaces | None = None,
) -> Int64Array:
    """Lanes, ascending, that `dp_ranks` read in batches within an epoch; of a mixture, in all but a short last one.

    Exact when the lanes divide the batch (as by default); else the lanes of any batch, whichever lane it begins at.
    """
    lanes, size = order.lanes, global_batch_size
    if size >= order.num_samples and isinstance(order, SampleOrder):
        return np.arange(lanes, dtype=np.int64)
    bounds = [slot_bounds(size, rank, dp_world) for rank in dp_ranks]
    in_sequence = np.arange(lanes) if lane_places is None else np.argsort(np.asarray(lane_places))
    needed = np.zeros(lanes, dtype=np.bool_)  # by place
    per_lane, longer = divmod(size, lanes)
    for first in range(lanes if longer else 1):
        counts = np.full(lanes, per_lane, dtype=np.int64)
        counts[(first + np.arange(longer)) % lanes] += 1
        counts = counts[in_sequence]
        ends = np.cumsum(counts)
        for low, high in bounds:
            needed |= (ends > low) & (ends - counts < high) & (counts > 0) & (high > low)
        if needed.all():
            break
    return np.sort(in_sequence[needed]).astype(np.int64)


def live_set(
    order: AnyOrder,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lane_places: LanePlaces | None = None,
) -> int:
    """Upper bound of the data shards that `dp_ranks` read from at one position, of all members of a mixture together.

    A cache that holds fewer fetches shards again and again.
    """
    return sum(live_sets(order, global_batch_size, dp_ranks, dp_world, lane_places))


def live_sets(
    order: AnyOrder,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lane_places: LanePlaces | None = None,
) -> list[int]:
    """As `live_set`, of each member of a mixture: lanes x window, at most all its shards."""
    lanes = len(rank_lanes(order, global_batch_size, dp_ranks, dp_world, lane_places))
    return [min(member.num_shards, lanes * member.window) for member in members_of(order)]


def live_set_bytes(
    order: AnyOrder,
    shard_bytes: Int64Array,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lane_places: LanePlaces | None = None,
    *,
    more_windows: int = 0,
) -> int:
    """Upper bound of the bytes of `live_set`, and of so many windows more: as many of the largest data shards, of each
    member of a mixture."""
    live = live_sets(order, global_batch_size, dp_ranks, dp_world, lane_places)
    first, total = 0, 0
    for member, num_live in zip(members_of(order), live, strict=True):
        num = min(member.num_shards, num_live + more_windows * member.window)
        total += int(np.sort(shard_bytes[first : first + member.num_shards])[::-1][:num].sum())
        first += member.num_shards
    return total


def members_of(order: AnyOrder) -> tuple[SampleOrder, ...]:
    """The orders of a mixture's datasets, or the only one."""
    return order.members if isinstance(order, MixtureOrder) else (order,)


def shard_sequence(
    order: AnyOrder,
    start: int,
    stop: int | None,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lane_places: LanePlaces | None = None,
) -> Iterator[int]:
    """Data shards in the order in which `dp_ranks` first need them from stream position `start` to `stop`.

    Each shard once an epoch; endless if `stop` is None. Lazy: an epoch of 1e5 shards is never built as a whole.
    """
    last_epoch: dict[int, int] = {}
    for visit in shard_visits(order, start, stop, global_batch_size, dp_ranks, dp_world, lane_places):
        if last_epoch.get(visit.data_shard) != visit.epoch:
            last_epoch[visit.data_shard] = visit.epoch
            yield visit.data_shard


def shard_visits(
    order: AnyOrder,
    start: int,
    stop: int | None,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lane_places: LanePlaces | None = None,
) -> Iterator[ShardVisit]:
    """Every window's need of every shard, by position; a shard cut by a lane's end is visited by both lanes.

    `start` is the position of a batch (samples consumed), and batches follow it every `global_batch_size`. `stop` is
    the end of the last epoch, where the last batch is cut short. With `drop_last` the sequence also holds what the
    dropped samples would need.
    """
    if isinstance(order, MixtureOrder):
        yield from _mixture_visits(order, start, stop, global_batch_size, dp_ranks, dp_world, lane_places)
        return
    num_samples, num_lanes = order.num_samples, order.lanes
    lanes = rank_lanes(order, global_batch_size, dp_ranks, dp_world, lane_places)
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
            odd = _odd_visits(order, epoch, start, stop, global_batch_size, dp_ranks, dp_world, lane_places, lanes)
            streams.append(iter(odd))
        yield from heapq.merge(*streams, key=lambda visit: visit.position)


def lane_parts(order: AnyOrder, lane: int, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
    """Data shards that a lane reads from stream position `start` to `stop`, by whole windows, each once, and how many
    rows of each are the lane's. The cost does not grow with the distance beyond a pass over the lane."""
    if isinstance(order, MixtureOrder):
        offsets = [-(-(edge - lane) // order.lanes) for edge in (start, stop)]
        found = [
            _parts_between(own, lane, *(order.draws_before(lane, offset, member) for offset in offsets))
            for member, own in enumerate(order.members)
        ]
        firsts = order.first_shards[:-1].tolist()
        shards = [shards + first for (shards, _), first in zip(found, firsts, strict=True)]
        return np.concatenate(shards), np.concatenate([rows for _, rows in found])
    draws = [
        edge // order.num_samples * order.lane_length(lane) + -(-(edge % order.num_samples - lane) // order.lanes)
        for edge in (start, stop)
    ]
    return _parts_between(order, lane, *draws)


def _parts_between(order: SampleOrder, lane: int, begin: int, end: int) -> tuple[Int64Array, Int64Array]:
    """`lane_parts` by the lane's own offsets, counted through all epochs."""
    length = order.lane_length(lane)
    shards, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    if end - begin > length:
        begin, end = 0, length  # everything, whichever epoch it is
    for epoch in range(begin // length, -(-end // length)) if end > begin else ():
        view = order.lane_epoch(epoch, lane)
        windows = _windows(view, max(begin - epoch * length, 0), end - epoch * length)
        parts = slice(windows.start * order.window, windows.stop * order.window)
        shards.append(view.shards[parts])
        rows.append(np.diff(view.starts)[parts])
    each, at = np.unique(np.concatenate(shards), return_index=True)
    return each, np.concatenate(rows)[at]


def _mixture_visits(
    order: MixtureOrder,
    start: int,
    stop: int | None,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lane_places: LanePlaces | None,
) -> Iterator[ShardVisit]:
    lanes = rank_lanes(order, global_batch_size, dp_ranks, dp_world, lane_places)
    if stop is None and not len(lanes):
        return
    streams = [
        _member_visits(order, member, lane, -(-(start - lane) // order.lanes), stop)
        for member in range(len(order.members))
        for lane in lanes.tolist()
    ]
    if stop is not None and start < stop and (stop - start) % global_batch_size:
        streams.append(iter(_last_visits(order, start, stop, global_batch_size, dp_ranks, dp_world, lane_places)))
    yield from heapq.merge(*streams, key=lambda visit: visit.position)


def _member_visits(
    order: MixtureOrder, member: int, lane: int, first_offset: int, stop: int | None
) -> Iterator[ShardVisit]:
    """A lane's visits of a member's data shards, from that offset of the mixture's lane on to stream index `stop`."""
    own, first_shard = order.members[member], int(order.first_shards[member])
    length = own.lane_length(lane)
    begin = order.draws_before(lane, first_offset, member)
    end = None if stop is None else order.draws_before(lane, -(-(stop - lane) // order.lanes), member)
    for epoch in count(begin // length):
        origin = epoch * length
        if end is not None and origin >= end:
            return
        last = length if end is None else end - origin
        for visit in _lane_visits(own, epoch, lane, begin - origin, last):
            draw = origin + (visit.position - epoch * own.num_samples) // own.lanes
            # The window's first sample may lie before the start; then it is needed at once.
            yield ShardVisit(order.index_of_draw(lane, member, max(draw, begin)), epoch, first_shard + visit.data_shard)


def _last_visits(
    order: MixtureOrder,
    start: int,
    stop: int,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lane_places: LanePlaces | None,
) -> list[ShardVisit]:
    """What the last, short batch needs: ranks share it out at other lanes."""
    batch_start = start + (stop - start) // global_batch_size * global_batch_size
    visits: set[ShardVisit] = set()
    for rank in dp_ranks:
        mine = local_slots(order, batch_start, stop, dp_rank=rank, dp_world=dp_world, lane_places=lane_places)
        shards, _ = order.locate(mine)
        visits.update(map(ShardVisit, mine.tolist(), order.passes(mine).tolist(), shards.tolist()))
    return sorted(visits)


def _lane_visits(order: SampleOrder, epoch: int, lane: int, low: int, high: int) -> Iterator[ShardVisit]:
    """Visits of the windows of a lane that hold any of its offsets [low, high)."""
    low, high = max(low, 0), min(high, order.lane_length(lane))
    if low >= high:
        return
    view = order.lane_epoch(epoch, lane)
    for window in _windows(view, low, high):
        position = epoch * order.num_samples + int(view.window_starts[window]) * order.lanes + lane
        for shard in view.shards[window * order.window : (window + 1) * order.window].tolist():
            yield ShardVisit(position, epoch, shard)


def _windows(view: LaneEpoch, low: int, high: int) -> range:
    """The windows that hold any of a lane's offsets [low, high)."""
    first = int(np.searchsorted(view.window_starts, low, side="right")) - 1
    return range(first, int(np.searchsorted(view.window_starts, high, side="left")))


def _odd_visits(
    order: SampleOrder,
    epoch: int,
    start: int,
    stop: int | None,
    global_batch_size: int,
    dp_ranks: Sequence[int],
    dp_world: int,
    lane_places: LanePlaces | None,
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
        slots = batch_slots(order, batch_start, batch_stop, lane_places)
        for rank in dp_ranks:
            low, high = slot_bounds(batch_stop - batch_start, rank, dp_world)
            mine = slots[low:high]
            mine = mine[mine // num_samples == epoch] % num_samples
            for lane in np.setdiff1d(mine % order.lanes, lanes).tolist():
                offsets = mine[mine % order.lanes == lane] // order.lanes
                visits.update(_lane_visits(order, epoch, lane, int(offsets.min()), int(offsets.max()) + 1))
    return sorted(visits)
