"""Lanes are read where their data shards lie: the fewest bytes to fetch, and nothing moves without need."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_goodput as rg
from ray_goodput.core.lane_places import lane_shards, place_lanes, readers_of_places
from ray_goodput.core.order import Int64Array, SampleOrder
from ray_goodput.core.placement import rank_lanes
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.held import held_bytes
from ray_goodput.train.data_ranks import agreed
from ray_goodput.train.lanes import places_of_lanes
from tests.thread_ranks import ThreadRanks, in_ranks

LANES = 12


def owned(world: int, places: tuple[int, ...] | None = None, lanes: int = LANES) -> list[set[int]]:
    """The lanes of each rank, by the rule that batches and prefetching go by."""
    order = SampleOrder([lanes * 1000], seed=0, lanes=lanes, window=1)
    return [set(rank_lanes(order, lanes * world, [rank], world, places).tolist()) for rank in range(world)]


def holding(lanes_of_nodes: list[set[int]], lanes: int = LANES) -> list[Int64Array]:
    return [np.array([100 * (lane in mine) for lane in range(lanes)]) for mine in lanes_of_nodes]


def one_each(world: int) -> list[tuple[int, ...]]:
    return [(rank,) for rank in range(world)]


@pytest.mark.parametrize("held", [holding([set()] * 3), holding(owned(3)), holding([set(range(LANES))] * 3)])
def test_lanes_stay_where_nothing_is_cached_or_all_that_is_needed(held: list[Int64Array]) -> None:
    assert place_lanes(held, one_each(3)) is None


def test_nodes_that_come_back_in_another_sequence_fetch_nothing() -> None:
    for sequence in permutations(range(3)):
        before = owned(3)
        nodes = [before[node] for node in sequence]
        assert owned(3, place_lanes(holding(nodes), one_each(3))) == nodes


def test_after_the_loss_of_a_node_only_its_lanes_are_fetched() -> None:
    before = owned(3)
    for lost in range(3):
        left = [lanes for node, lanes in enumerate(before) if node != lost]
        after = owned(2, place_lanes(holding(left), one_each(2)))
        assert set.union(*after) == set(range(LANES))
        assert all(kept <= now for kept, now in zip(left, after, strict=True))


def test_a_node_that_comes_takes_lanes_and_the_others_fetch_nothing() -> None:
    for place in range(3):
        nodes = owned(2)
        nodes.insert(place, set())
        after = owned(3, place_lanes(holding(nodes), one_each(3)))
        assert all(now <= held for held, now in zip(nodes, after, strict=True) if held)


def test_ranks_of_a_node_share_what_it_holds() -> None:
    """Four ranks on two nodes that have changed places: lanes go to the node, and to whichever of its ranks."""
    of_rank = owned(4)
    nodes = [of_rank[2] | of_rank[3], of_rank[0] | of_rank[1]]
    after = owned(4, place_lanes(holding(nodes), [(0,), (0,), (1,), (1,)]))
    assert [after[0] | after[1], after[2] | after[3]] == nodes


def test_what_two_nodes_hold_goes_to_the_one_that_leaves_room_for_the_rest() -> None:
    """Lane 0 lies on both nodes, lane 1 on the first alone: lane 0 has to give way."""
    assert place_lanes([np.array([100, 100]), np.array([100, 0])], one_each(2)) == (1, 0)


def test_ranks_that_share_batches_across_nodes_are_placed_by_what_all_of_them_hold() -> None:
    """Data-parallel rank 0 is read on nodes 0 and 1, rank 1 on node 2, which holds what rank 0 would read."""
    held = holding([set(), set(range(6, 12)), set(range(6))])
    after = owned(2, place_lanes(held, [(0, 1), (2,)]))
    assert after == [set(range(6, 12)), set(range(6))]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_the_readers_of_places_are_the_ranks_that_batches_give_them_to(lanes: int, world: int) -> None:
    of_rank = owned(world, lanes=lanes)
    expected = [[rank for rank in range(world) if lane in of_rank[rank]] for lane in range(lanes)]
    assert [list(ranks) for ranks in readers_of_places(lanes, world)] == expected


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.data())
def test_no_other_sequence_of_lanes_would_fetch_less(lanes: int, world: int, data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, world))
    node_of_rank = [data.draw(st.integers(0, num_nodes - 1)) for _ in range(world)]
    nodes_of_ranks = [(node,) for node in node_of_rank]
    bytes_ = st.lists(st.integers(0, 3), min_size=lanes, max_size=lanes)
    held = [np.array(data.draw(bytes_)) for _ in range(num_nodes)]

    def saved(places: tuple[int, ...]) -> int:
        nodes = [{node_of_rank[rank] for rank in readers} for readers in readers_of_places(lanes, world)]
        return sum(int(held[node][lane]) for lane, place in enumerate(places) for node in nodes[place])

    ascending = tuple(range(lanes))
    best = max(map(saved, permutations(range(lanes))))
    places = place_lanes(held, nodes_of_ranks)
    assert saved(places or ascending) == best
    assert (places is None) == (saved(ascending) == best)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_cache_tells_what_it_holds_of_each_lane(tmp_path: Path, mixed: bool) -> None:
    (tmp_path / "data").mkdir()
    for i in range(8):
        pq.write_table(pa.table({"x": np.arange(10 + i)}), tmp_path / "data" / f"{i}.parquet")
    one = rg.ShardedDataset(str(tmp_path / "data"), global_batch_size=4, lanes=4)
    dataset: Any = rg.Mixture({"a": one, "b": one}, weights={"a": 1, "b": 1}) if mixed else one
    manifest = dataset.manifest()
    order, spec = dataset.order(manifest), dataset.fetch_spec(manifest)
    fetcher = spec.fetcher(NodeCache(tmp_path / "cache").open(), manifest)
    assert held_bytes(order, manifest, fetcher).tolist() == [0] * 4
    for shard in lane_shards(order, 2).tolist():
        fetcher.ensure(shard)
    held = held_bytes(order, manifest, fetcher)
    assert held[2] == manifest.sizes[lane_shards(order, 2)].sum() > held[3]
    positions = np.arange(3 * order.num_samples)
    of_lane = order.locate(positions[order.lane_of(positions) == 2])[0]
    assert sorted(lane_shards(order, 2).tolist()) == sorted(set(of_lane.tolist()))


def test_all_ranks_agree_on_the_places_and_a_node_that_cannot_tell_holds_nothing() -> None:
    """Two nodes of two ranks, the second of which holds what the first would read."""

    def places(first_node_fails: bool, world: ThreadRanks) -> tuple[int, ...] | None:
        worker: Any = SimpleNamespace(
            world=world, node_of_rank=(0, 0, 1, 1), is_first_of_node=world.world_rank in (0, 2)
        )
        ranks = agreed([(rank, 4) for rank in range(4)], worker.node_of_rank, world.world_rank)

        def held() -> Int64Array:
            if world.world_rank == 0 and first_node_fails:
                raise PermissionError("the cache's folder")
            return np.array([[0, 0, 7, 7], [9, 9, 0, 0]])[world.world_rank // 2]

        return places_of_lanes(worker, "train", ranks, 4, held)

    for fails in (False, True):
        told = in_ranks(4, lambda world, fails=fails: places(fails, world))
        assert told == told[:1] * 4
        assert {*told[0][:2]} == {2, 3}


def test_ranks_of_one_node_ask_nobody() -> None:
    worker: Any = SimpleNamespace(world=SimpleNamespace(world_rank=0, world_size=2), node_of_rank=(0, 0))
    ranks = agreed([(0, 2), (1, 2)], (0, 0), 0)
    assert places_of_lanes(worker, "train", ranks, 4, lambda: pytest.fail("asked")) is None
