"""Which part holds training up: a pure rule; and the counts it rests on, from the loader to the run's storage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_goodput as rg
from ray_goodput.actors.data_totals import DataTotals
from ray_goodput.core.data_flow import DataCounts, bottleneck, figures
from ray_goodput.errors import StorageError
from ray_goodput.goodput.data_log import data_from_bytes, data_to_bytes


def counts(**changes: Any) -> DataCounts:
    base: dict[str, Any] = {"batches": 100, "waited_s": 40.0, "elapsed_s": 100.0}
    return DataCounts(**(base | changes))


@pytest.mark.parametrize(
    ("changes", "part", "words"),
    [
        ({"waited_s": 5.0, "network_s": 90.0}, "accelerator", "waited 5.0% of the time"),
        ({"network_s": 30.0, "disk_s": 5.0, "decode_s": 5.0}, "network", "mostly for fetching (75%"),
        ({"network_s": 1.0, "disk_s": 8.0, "decode_s": 1.0}, "disk", "put the cache on NVMe"),
        ({"network_s": 1.0, "disk_s": 1.0, "decode_s": 8.0}, "decode", "give transform= more workers"),
    ],
)
def test_the_part_that_took_longest_is_named_with_the_figures_and_the_way_out(
    changes: dict[str, float], part: str, words: str
) -> None:
    found = bottleneck(counts(**changes))
    assert found is not None
    assert found.part == part
    assert words in found.reason
    assert found.reason.endswith(".") and "\n" not in found.reason


def test_before_the_first_batch_nothing_is_said() -> None:
    assert bottleneck(DataCounts()) is None
    assert figures(DataCounts())["hit_ratio"] == 1.0


def test_counts_of_ranks_add_up_and_an_earlier_attempts_are_left_out() -> None:
    totals = DataTotals()
    assert totals.total() is None
    totals.take(1, 0, counts(hits=5))
    totals.take(2, 0, counts(hits=1, misses=1))
    totals.take(2, 1, counts(hits=1, misses=1))
    totals.take(2, 1, counts(hits=2, misses=1))  # a later heartbeat says everything again
    totals.take(1, 1, counts(hits=99))
    totals.take(2, 3, None)
    total = totals.total()
    assert total is not None and totals.attempt == 2
    assert (total.hits, total.misses, total.batches) == (3, 2, 200)
    assert total.stall_share == 0.4


def test_they_survive_storage_and_readers_older_and_newer() -> None:
    stored = data_to_bytes(2, counts(hits=3))
    assert data_from_bytes(stored) == counts(hits=3)
    body = json.loads(stored)
    body["counts"]["from a later release"] = 1
    del body["counts"]["misses"]
    assert data_from_bytes(json.dumps(body).encode()) == counts(hits=3)
    for damaged in (b"", b"[]", b'{"version": 1, "counts": {"hits": "x"}}'):
        with pytest.raises(StorageError, match=r"data\.json is damaged"):
            data_from_bytes(damaged)
    with pytest.raises(StorageError, match="version 2; this release reads version 1"):
        data_from_bytes(b'{"version": 2, "counts": {}}')


def add_one(sample: dict[str, int], rng: object) -> dict[str, int]:
    return {"x": sample["x"] + 1}


def test_a_loader_counts_what_it_gave_what_it_opened_and_where_its_time_went(tmp_path: Path) -> None:
    for i in range(4):
        pq.write_table(pa.table({"x": np.arange(100) + i}), tmp_path / f"{i}.parquet")
    data = rg.ShardedDataset(str(tmp_path), global_batch_size=50, transform=add_one)
    with data.loader(cache_dir=tmp_path / "cache", epochs=2) as batches:
        assert batches.counts().batches == 0
        waited = sum(batch.fetch_seconds for batch in batches)
    seen = batches.counts()
    assert seen.batches == 16
    assert seen.waited_s == pytest.approx(waited)
    assert seen.elapsed_s >= seen.waited_s
    assert seen.decode_s > 0 and seen.disk_s > 0
    assert seen.hits + seen.misses >= 4 and seen.disk_bytes > 0
    assert seen.store_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.parquet"))
    assert seen == batches.counts(), "it stands still once it is closed"
    assert seen.depth == 0 and seen.ready == 0
