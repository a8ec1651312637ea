"""Data-parallel groups that are not the world: who reads what, and what is refused on every rank alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_goodput as rg
from ray_goodput.errors import ConfigError
from ray_goodput.train.data_ranks import DataRanks, agreed
from ray_goodput.train.feed import _data_ranks
from tests.thread_ranks import ThreadRanks, in_ranks

TENSOR_PARALLEL = 2


def test_tensor_parallel_peers_read_the_same_and_one_of_them_speaks_for_both() -> None:
    told = [(rank // TENSOR_PARALLEL, 3) for rank in range(6)]
    places = [agreed(told, (0, 0, 0, 0, 1, 1), rank) for rank in range(6)]
    assert [place.dp_rank for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.is_first for place in places] == [True, False] * 3
    assert {place.of_node for place in places[:4]} == {(0, 1)}
    assert {place.of_node for place in places[4:]} == {(2,)}
    assert {place.nodes for place in places} == {((0,), (0,), (1,))}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([(0, 2), (1, 3)], "rank 0 gave 2 and rank 1 gave 3"),
        ([(0, 2), (2, 2)], r"dp_rank=2, dp_world=2\): rank 1 is not in that group"),
        ([(0, 2), (0, 2)], "no rank gave dp_rank=1, so its samples would be skipped: the 2 ranks"),
    ],
)
def test_ranks_that_make_no_group_are_refused_on_every_rank(told: list[tuple[int, int]], message: str) -> None:
    for rank in range(2):
        with pytest.raises(ConfigError, match=message):
            agreed(told, (0, 0), rank)


def test_ranks_agree_by_asking_each_other_only_if_they_were_given_a_group() -> None:
    def ask(world: ThreadRanks) -> DataRanks:
        worker: Any = SimpleNamespace(world=world, node_of_rank=(0, 0, 1, 1))
        return _data_ranks(worker, world.world_rank % 2, 2)

    places = in_ranks(4, ask)
    assert [place.dp_rank for place in places] == [0, 1, 0, 1]
    assert {place.nodes for place in places} == {((0, 1), (0, 1))}
    alone: Any = SimpleNamespace(world=SimpleNamespace(world_rank=3, world_size=4), node_of_rank=(0, 1, 0, 1))
    expected = DataRanks(dp_rank=3, dp_world=4, of_node=(1, 3), nodes=((0,), (1,), (0,), (1,)))
    assert _data_ranks(alone, None, None) == expected
    with pytest.raises(ConfigError, match="give both, on every rank, or neither"):
        _data_ranks(alone, 0, None)


@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_of_a_group_of_three_read_each_batch_between_them_and_their_peers_the_same(
    tmp_path: Path, mixed: bool
) -> None:
    """Six ranks over batches of four samples: the group has to fit a batch, not the world."""
    (tmp_path / "data").mkdir()
    for i, n in enumerate([17, 0, 1, 23]):
        pq.write_table(pa.table({"x": np.arange(n) + 100 * i}), tmp_path / "data" / f"{i}.parquet")
    dataset: Any = rg.ShardedDataset(str(tmp_path / "data"), global_batch_size=4, lanes=4)
    if mixed:
        dataset = rg.Mixture({"a": dataset, "b": dataset}, weights={"a": 2, "b": 1})
    manifest = dataset.manifest()

    def read(dp_rank: int, dp_world: int) -> list[tuple[float, list[int]]]:
        with dataset.loader(
            dp_rank=dp_rank, dp_world=dp_world, epochs=2, manifest=manifest, cache_dir=tmp_path / "cache"
        ) as loader:
            return [(batch.weight, batch.sample_ids.tolist()) for batch in loader]

    alone = read(0, 1)
    told = [(rank // TENSOR_PARALLEL, 3) for rank in range(6)]
    ranks = [read(agreed(told, (0,) * 6, rank).dp_rank, 3) for rank in range(6)]
    for first, peer in zip(ranks[::2], ranks[1::2], strict=True):
        assert first == peer
    for whole, *parts in zip(alone, *ranks[::2], strict=True):
        assert sorted(i for _, ids in parts for i in ids) == sorted(whole[1])
        assert sum(weight for weight, _ in parts) == pytest.approx(3)
    with pytest.raises(ConfigError, match="cannot be shared by 9 data-parallel ranks"):
        read(0, 9)
