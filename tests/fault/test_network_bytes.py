"""D2, counted at the server: a data shard crosses the network once a node and epoch at most, and not while cached."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_goodput as rg
from ray_goodput.config import StoreSpec
from ray_goodput.storage import open_store
from servers import JuiceFSGateway
from store_proxy import StoreProxy

SHARDS, ROWS = 12, 2000


@pytest.fixture(scope="module")
def sizes(juicefs_gateway: JuiceFSGateway) -> dict[str, int]:
    """Bytes of each object of the data set; row i of all holds i."""
    store = open_store(StoreSpec(uri="s3://vol/network-bytes", options=juicefs_gateway.storage_options))
    found = {}
    for shard in range(SHARDS):
        out = pa.BufferOutputStream()
        pq.write_table(pa.table({"x": np.arange(shard * ROWS, (shard + 1) * ROWS)}), out)
        store.put(f"{shard:02d}.parquet", out.getvalue().to_pybytes())
        found[f"{shard:02d}.parquet"] = out.getvalue().size
    return found


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_every_node_fetches_its_shards_once_and_nothing_while_they_are_cached(
    juicefs_gateway: JuiceFSGateway, sizes: dict[str, int], proxy: StoreProxy, tmp_path: Path, nodes: int
) -> None:
    data = dataset(juicefs_gateway, proxy)
    manifest = data.manifest()
    ranks_of_a_node = 2
    for life in ("cold", "again, in new processes' caches"):
        before, bytes_before = len(proxy.requests), proxy.fetched_bytes

        def read(rank: int) -> list[int]:
            with data.loader(
                dp_rank=rank,
                dp_world=nodes * ranks_of_a_node,
                epochs=2,
                manifest=manifest,
                cache_dir=tmp_path / f"node-{rank // ranks_of_a_node}",
            ) as batches:
                return [i for batch in batches for i in batch["x"].tolist()]

        with ThreadPoolExecutor(nodes * ranks_of_a_node) as pool:
            rows = [i for part in pool.map(read, range(nodes * ranks_of_a_node)) for i in part]
        assert sorted(rows) == sorted([*range(SHARDS * ROWS)] * 2)
        asked, over_the_wire = proxy.times_fetched(".parquet", before), proxy.fetched_bytes - bytes_before
        if life == "cold":
            assert set(asked) == set(sizes)
            assert max(asked.values()) <= nodes, "a node fetched a data shard twice"
            assert over_the_wire <= 1.05 * nodes * sum(sizes.values())
        else:
            assert not asked
            assert over_the_wire == 0


def test_with_a_cache_smaller_than_the_data_a_shard_comes_at_most_once_an_epoch(
    juicefs_gateway: JuiceFSGateway, sizes: dict[str, int], proxy: StoreProxy, tmp_path: Path
) -> None:
    limit = 7 * 18_000  # of 12 cached files of 16,000 bytes and a little more
    data = dataset(juicefs_gateway, proxy, cache_limit_bytes=limit, prefetch_shards=2)
    manifest = data.manifest()
    epochs = 3
    before = len(proxy.requests)
    with data.loader(epochs=epochs, manifest=manifest, cache_dir=tmp_path) as batches:
        assert sum(batch.num_samples for batch in batches) == epochs * SHARDS * ROWS
    asked = proxy.times_fetched(".parquet", before)
    assert max(asked.values()) <= epochs
    assert sum(asked.values()) < epochs * SHARDS, "nothing was kept from one epoch to the next"


def dataset(gateway: JuiceFSGateway, proxy: StoreProxy, **arguments: Any) -> rg.ShardedDataset:
    options = proxy.options(gateway)
    arguments = {"lanes": 2, "window": 1, **arguments}
    return rg.ShardedDataset(
        "s3://vol/network-bytes/*.parquet", global_batch_size=96, storage_options=options, **arguments
    )
