"""Lanes are read where their data shards lie: the fewest bytes to fetch, and nothing moves without need."""

from __future__ import annotations

import time
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_goodput as rg
from ray_goodput.core.batches import local_slots
from ray_goodput.core.lane_places import best_places, may_move
from ray_goodput.core.mixture import MixtureOrder
from ray_goodput.core.order import Int64Array, SampleOrder
from ray_goodput.core.placement import lane_parts
from ray_goodput.data import held as held_module
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.held import held_bytes

LANES = 12
Places = tuple[int, ...] | None


def read_by(world: int, places: Places = None, *, lanes: int = LANES, batch: int = LANES) -> list[set[int]]:
    """The lanes of each rank in a batch."""
    order = SampleOrder([100 * batch], seed=0, lanes=lanes, window=1)
    slots = [local_slots(order, 0, batch, dp_rank=r, dp_world=world, lane_places=places) for r in range(world)]
    return [set(order.lane_of(mine).tolist()) for mine in slots]


def holding(lanes_of_nodes: list[set[int]], lanes: int = LANES) -> list[Int64Array]:
    return [np.array([100 * (lane in mine) for lane in range(lanes)]) for mine in lanes_of_nodes]


def placed(lanes_of_nodes: list[set[int]], lanes: int = LANES, batch: int = LANES) -> list[set[int]]:
    """What each of these nodes reads, of one rank each, if they hold that."""
    world = len(lanes_of_nodes)
    places = best_places(holding(lanes_of_nodes, lanes), batch, [(rank,) for rank in range(world)])
    return read_by(world, places, lanes=lanes, batch=batch)


@pytest.mark.parametrize("nodes", [[set()] * 3, read_by(3), [set(range(LANES))] * 3])
def test_lanes_stay_where_nothing_is_cached_or_all_that_is_needed(nodes: list[set[int]]) -> None:
    assert best_places(holding(nodes), LANES, [(0,), (1,), (2,)]) is None


def test_nodes_in_any_sequence_read_what_they_hold() -> None:
    for nodes in permutations(read_by(3)):
        assert placed(list(nodes)) == list(nodes)


@pytest.mark.parametrize("batch", [64, 512])
@pytest.mark.parametrize("before", [3, 8])
def test_after_the_loss_of_a_node_only_its_lanes_are_fetched_and_those_that_two_nodes_share_now(
    before: int, batch: int
) -> None:
    """With a batch of as many samples as lanes, no lane is shared."""
    of_nodes = read_by(before, lanes=64, batch=batch)
    for lost in range(before):
        left = [lanes for node, lanes in enumerate(of_nodes) if node != lost]
        after = placed(left, lanes=64, batch=batch)
        fetched = sum(len(now - held) for held, now in zip(left, after, strict=True))
        gone = 64 - len(set.union(*left))
        shared = sum(map(len, after)) - 64
        assert fetched <= gone + shared
        assert shared == 0 or batch > 64


@pytest.mark.parametrize("before", [2, 7])
def test_a_node_that_comes_takes_lanes_and_the_others_fetch_nothing(before: int) -> None:
    for place in range(before + 1):
        nodes = read_by(before, lanes=64, batch=64)
        nodes.insert(place, set())
        after = placed(nodes, lanes=64, batch=64)
        assert all(now <= held for held, now in zip(nodes, after, strict=True) if held)


def test_ranks_of_a_node_share_what_it_holds() -> None:
    """Four ranks on two nodes that have changed places: lanes go to the node, and to whichever of its ranks."""
    of_rank = read_by(4)
    nodes = [of_rank[2] | of_rank[3], of_rank[0] | of_rank[1]]
    after = read_by(4, best_places(holding(nodes), LANES, [(0,), (0,), (1,), (1,)]))
    assert [after[0] | after[1], after[2] | after[3]] == nodes


def test_what_two_nodes_hold_goes_to_the_one_that_leaves_room_for_the_rest() -> None:
    """Lane 0 lies on both nodes, lane 1 on the first alone: lane 0 has to give way."""
    assert best_places([np.array([100, 100]), np.array([100, 0])], 2, [(0,), (1,)]) == (1, 0)


def test_ranks_that_share_batches_across_nodes_are_placed_by_what_all_of_them_hold() -> None:
    """Data-parallel rank 0 is read on nodes 0 and 1, rank 1 on node 2, which holds what rank 0 would read."""
    held = holding([set(), set(range(6, 12)), set(range(6))])
    after = read_by(2, best_places(held, LANES, [(0, 1), (2,)]))
    assert after == [set(range(6, 12)), set(range(6))]


def test_lanes_that_nobody_holds_keep_their_places() -> None:
    """Lanes 0 and 5 have changed nodes; all others, which nobody holds, stay where they were."""
    nodes = [{5}, {0}]
    places = best_places(holding(nodes, 6), 6, [(0,), (1,)])
    assert places == (5, 1, 2, 3, 4, 0)


def test_lanes_that_do_not_divide_the_batch_or_are_very_many_stay() -> None:
    assert may_move(64, 512) and may_move(1024, 1024) and may_move(1, 7)
    assert not may_move(5, 512) and not may_move(2048, 2048)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 7), st.data())
def test_no_other_sequence_of_lanes_finds_more_cached(
    lanes: int, per_lane: int, world: int, data: st.DataObject
) -> None:
    batch = lanes * per_lane
    world = min(world, batch)
    num_nodes = data.draw(st.integers(1, world))
    node_of_rank = [data.draw(st.integers(0, num_nodes - 1)) for _ in range(world)]
    bytes_ = st.lists(st.integers(0, 3), min_size=lanes, max_size=lanes)
    held = [np.array(data.draw(bytes_)) for _ in range(num_nodes)]

    def found(places: tuple[int, ...]) -> int:
        """Counted by what batches are."""
        read = [set() for _ in range(num_nodes)]
        for rank, mine in enumerate(read_by(world, places, lanes=lanes, batch=batch)):
            read[node_of_rank[rank]] |= mine
        return sum(int(held[node][lane]) for node in range(num_nodes) for lane in read[node])

    ascending = tuple(range(lanes))
    most = max(map(found, permutations(range(lanes))))
    places = best_places(held, batch, [(node,) for node in node_of_rank])
    assert found(places or ascending) == most
    assert (places is None) == (found(ascending) == most)


@pytest.fixture(params=["one dataset", "mixture"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for i in range(16):
            pq.write_table(pa.table({"x": np.arange(10 + i)}), tmp_path / folder / f"{i}.parquet")
    a, b = (rg.ShardedDataset(str(tmp_path / f), global_batch_size=4, lanes=4, window=2) for f in ("a", "b"))
    return rg.Mixture({"a": a, "b": b}, weights={"a": 3, "b": 1}) if request.param == "mixture" else a


def test_the_parts_of_a_lane_are_what_its_samples_come_from(dataset: Any) -> None:
    manifest = dataset.manifest()
    order = dataset.order(manifest)
    n = order.num_samples
    for start, stop in ((0, n), (n // 3, n), (n // 2, n + n // 2), (n - 5, n), (7, 7), (n, 2 * n), (3 * n + 9, 4 * n)):
        positions = np.arange(start, stop)
        for lane in range(order.lanes):
            read = set(order.locate(positions[order.lane_of(positions) == lane])[0].tolist())
            shards, rows = lane_parts(order, lane, start, stop)
            assert len(shards) == len(set(shards.tolist())) and (rows > 0).all()
            assert read <= set(shards.tolist())  # a window counts as a whole
            assert len(shards) <= len(read) + 2 * 2 * order.window
    if isinstance(order, SampleOrder):
        parts = [lane_parts(order, lane, 0, n) for lane in range(order.lanes)]
        of_lanes = np.zeros(order.num_shards, dtype=np.int64)
        for shards, rows in parts:
            of_lanes[shards] += rows
        assert of_lanes.tolist() == manifest.rows.tolist(), "each row is one lane's"


def test_what_a_lane_reads_in_any_number_of_epochs_costs_no_more_than_a_pass() -> None:
    small, large = (SampleOrder([rows] * 8, seed=0, lanes=4, window=2) for rows in (10, 1_000_000_000))
    order = MixtureOrder({"small": small, "large": large}, [500, 500], seed=0)
    began = time.process_time()
    shards, _ = lane_parts(order, 1, 12345, 12345 + order.num_samples)
    assert len(shards) == len(small.lane_epoch(0, 1).shards) + len(large.lane_epoch(0, 1).shards)
    assert time.process_time() - began < 1.0, "it walked through the passes of the small one, 200 million"


def test_a_cache_tells_what_it_holds_of_what_each_lane_still_reads(dataset: Any, tmp_path: Path) -> None:
    manifest = dataset.manifest()
    order, spec = dataset.order(manifest), dataset.fetch_spec(manifest)
    fetcher = spec.fetcher(NodeCache(tmp_path / "cache").open(), manifest)
    n = order.num_samples

    def held(start: int, epochs: int | None) -> list[int]:
        return held_bytes(order, manifest, fetcher, start, epochs).tolist()

    def own_bytes(start: int, stop: int, of: set[int]) -> int:
        parts = zip(*lane_parts(order, 2, start, stop), strict=True)
        return sum(int(manifest.sizes[s] * num // manifest.rows[s]) for s, num in parts if s in of)

    assert held(0, None) == [0] * 4
    first_half = set(lane_parts(order, 2, 0, n // 2)[0].tolist())
    for shard in first_half:
        fetcher.ensure(shard)
    assert held(0, None)[2] == own_bytes(0, n, first_half) > held(0, None)[0]
    assert held(3 * n // 4, 1)[2] == own_bytes(3 * n // 4, n, first_half)
    assert held(3 * n // 4, None)[2] > held(3 * n // 4, 1)[2], "the next epoch reads them again"
    assert held(n, 1) == [0] * 4


def test_a_data_shard_wider_than_a_lane_counts_by_the_rows_of_each(tmp_path: Path) -> None:
    """Of two that a node holds, which takes which half of the lanes is decided by bytes that need not come again."""
    wide, narrow = 90, 30
    for name, rows in (("wide", wide), ("narrow", narrow)):
        pq.write_table(pa.table({"x": np.arange(rows)}), tmp_path / f"{name}.parquet")
    dataset = rg.ShardedDataset(str(tmp_path / "*.parquet"), global_batch_size=4, lanes=4)
    manifest = dataset.manifest()
    order = dataset.order(manifest)
    fetcher = dataset.fetch_spec(manifest).fetcher(NodeCache(tmp_path / "cache").open(), manifest)
    for shard in range(2):
        fetcher.ensure(shard)
    held = held_bytes(order, manifest, fetcher, 0, None)
    assert held.sum() == pytest.approx(manifest.sizes.sum(), abs=4)
    by_rows = [int(manifest.sizes[lane_parts(order, lane, 0, 120)[0][0]]) * 30 for lane in range(4)]
    assert held.tolist() == [size // (90 if size == manifest.sizes[1] * 30 else 30) for size in by_rows]


def test_of_many_data_shards_a_sample_is_looked_for(
    dataset: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = dataset.manifest()
    order, spec = dataset.order(manifest), dataset.fetch_spec(manifest)
    fetcher = spec.fetcher(NodeCache(tmp_path / "cache").open(), manifest)
    for shard in range(manifest.num_shards):
        fetcher.ensure(shard)
    whole = held_bytes(order, manifest, fetcher, 0, None)
    asked: list[int] = []
    name = fetcher.name
    monkeypatch.setattr(fetcher, "name", lambda shard: (asked.append(shard), name(shard))[1])
    monkeypatch.setattr(held_module, "_MAX_NAMES", manifest.num_shards // 2)
    sampled = held_bytes(order, manifest, fetcher, 0, None)
    num_parts = sum(len(lane_parts(order, lane, 0, order.num_samples)[0]) for lane in range(4))
    assert len(asked) <= num_parts // 2 + 4
    assert (sampled > whole * 0.5).all() and (sampled < whole * 1.6).all()
