"""Laws of the shard sequence: prefetching along it never makes a batch wait for a shard that is not listed yet."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_goodput.core.batches import BatchPlan, local_slots
from ray_goodput.core.order import SampleOrder
from ray_goodput.core.placement import live_set, live_set_bytes, rank_lanes, shard_sequence, shard_visits

ORDERS = st.builds(
    SampleOrder,
    st.lists(st.integers(0, 12), min_size=1, max_size=14).filter(any),
    seed=st.integers(0, 99),
    lanes=st.integers(1, 8),
    window=st.integers(1, 3),
)


@settings(max_examples=100, deadline=None)
@given(ORDERS, st.integers(1, 40), st.integers(1, 6), st.booleans(), st.booleans(), st.data())
def test_each_shard_is_listed_no_later_than_the_first_batch_that_needs_it(
    order: SampleOrder, g: int, world: int, drop_last: bool, endless: bool, data: st.DataObject
) -> None:
    n, epochs = order.num_samples, 3
    if drop_last:
        g = min(g, n)
    ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
    start = data.draw(st.integers(0, n + n // 2))
    places = data.draw(st.none() | st.permutations(range(order.lanes)))
    # Without an end there is no short last batch, which ranks share out at other lanes.
    plan = BatchPlan(num_samples=n, global_batch_size=g, epochs=None if endless else epochs, drop_last=drop_last)
    stop = None if endless else epochs * n
    visits = list(islice(shard_visits(order, start, stop, g, ranks, world, places), 1000))
    first_listed: dict[tuple[int, int], int] = {}
    for visit in visits:
        first_listed.setdefault((visit.epoch, visit.data_shard), visit.position)
    position = start
    while position < epochs * n and (batch := plan.at(position)) is not None:
        for rank in ranks:
            mine = local_slots(order, batch.start, batch.stop, dp_rank=rank, dp_world=world, lane_places=places)
            shards, _ = order.locate(mine)
            for index, shard in zip(mine.tolist(), shards.tolist(), strict=True):
                assert first_listed[index // n, shard] <= index
        position = batch.samples_end
    positions = [visit.position for visit in visits]
    assert positions == sorted(positions)


@settings(max_examples=60, deadline=None)
@given(ORDERS, st.integers(1, 40), st.integers(1, 5), st.integers(0, 60))
def test_the_sequence_lists_each_shard_once_an_epoch(order: SampleOrder, g: int, world: int, start: int) -> None:
    n = order.num_samples
    stop = (start // n + 2) * n
    visits = shard_visits(order, start, stop, g, range(world), world)
    by_epoch: dict[int, set[int]] = {}
    for visit in visits:
        by_epoch.setdefault(visit.epoch, set()).add(visit.data_shard)
    listed = list(shard_sequence(order, start, stop, g, range(world), world))
    assert len(listed) == sum(map(len, by_epoch.values()))
    full = order.sample_ids(*order.locate(np.arange(n)))
    assert len(full) == n
    assert len(by_epoch[start // n + 1]) == len(set(order.locate(np.arange(n))[0].tolist()))


@settings(max_examples=60, deadline=None)
@given(ORDERS, st.integers(1, 40), st.integers(1, 5), st.data())
def test_one_position_needs_no_more_than_the_live_set(
    order: SampleOrder, g: int, world: int, data: st.DataObject
) -> None:
    ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True))
    bound = live_set(order, g, ranks, world)
    lanes = rank_lanes(order, g, ranks, world)
    for offset in range(order.lane_length(0)):
        needed: set[int] = set()
        for lane in lanes.tolist():
            view = order.lane_epoch(0, lane)
            if offset < order.lane_length(lane):
                window = int(np.searchsorted(view.window_starts, offset, side="right")) - 1
                needed.update(view.shards[window * order.window : (window + 1) * order.window].tolist())
        assert len(needed) <= bound


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8))
def test_worlds_that_divide_the_lanes_share_no_lane(per_rank: int, world: int, batches: int) -> None:
    lanes = per_rank * world
    g = lanes * batches
    order = SampleOrder([g * 3] * 2, seed=1, lanes=lanes, window=2)
    of_ranks = [rank_lanes(order, g, [r], world) for r in range(world)]
    assert np.concatenate(of_ranks).tolist() == list(range(lanes))
    places = list(reversed(range(lanes)))
    reversed_ranks = [rank_lanes(order, g, [r], world, places).tolist() for r in range(world)]
    assert reversed_ranks == [lanes.tolist() for lanes in reversed(of_ranks)]


def test_a_rank_that_never_gets_a_sample_needs_no_shard() -> None:
    order = SampleOrder([50], seed=0, lanes=1, window=2)
    assert list(shard_sequence(order, 0, None, 2, [0], 3)) == []
    assert list(islice(shard_sequence(order, 0, None, 2, [1], 3), 2)) == [0, 0]


def test_an_order_of_many_shards_is_listed_without_building_an_epoch() -> None:
    order = SampleOrder(np.full(100_000, 10_000), seed=0, lanes=64, window=8)
    listed = list(islice(shard_sequence(order, 12345 * 512, None, 512, [3], 16), 20))
    assert len(set(listed)) == 20
    assert len(order._lane_epochs) == 4


def test_the_bytes_of_the_live_set_are_those_of_the_largest_shards() -> None:
    order = SampleOrder([5] * 10, seed=0, lanes=2, window=2)
    assert live_set(order, 4, [0], 2) == 2
    assert live_set_bytes(order, np.arange(10) * 100, 4, [0], 2) == 1700


@pytest.mark.parametrize("num_samples", range(120, 129))
@pytest.mark.parametrize("start", [0, 3])
def test_lanes_that_change_hands_at_an_epochs_end_are_listed_too(num_samples: int, start: int) -> None:
    """One row a shard, so that no other lane's visit can hide a missing one."""
    order = SampleOrder([1] * num_samples, seed=0, lanes=8, window=3)
    g, world, epochs = 16, 4, 4
    plan = BatchPlan(num_samples=num_samples, global_batch_size=g, epochs=epochs)
    for rank in range(world):
        visits = shard_visits(order, start, epochs * num_samples, g, [rank], world)
        listed = {(visit.epoch, visit.data_shard): visit.position for visit in visits}
        position, needed = start, 0
        while (batch := plan.at(position)) is not None:
            mine = local_slots(order, batch.start, batch.stop, dp_rank=rank, dp_world=world)
            shards, _ = order.locate(mine)
            for index, shard in zip(mine.tolist(), shards.tolist(), strict=True):
                assert listed[index // num_samples, shard] <= index
            needed += len(mine)
            position = batch.samples_end
        assert len(listed) <= needed + order.window * order.lanes * epochs
