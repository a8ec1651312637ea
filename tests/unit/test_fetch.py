"""Laws of fetching: at most once, whole, the right object, or an error that names it; and of the in-process source."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_goodput.core.order import SampleOrder
from ray_goodput.core.placement import live_set, shard_visits
from ray_goodput.data import fetch, shard_fetcher
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.dataset import ShardedDataset
from ray_goodput.data.feed import next_uses
from ray_goodput.data.fetch import LocalShardSource, ShardFetcher, open_local_source
from ray_goodput.data.lookahead import LookAhead, first_needs
from ray_goodput.errors import CacheFullError, ObjectChangedError, ObjectNotFoundError, ShardReadError, StorageError
from ray_goodput.storage.protocol import ObjectInfo

ROWS = 20


@dataclass(frozen=True)
class Shard:
    index: int
    key: str
    rows: int
    size_bytes: int
    etag: str | None = None


@dataclass
class Fixture:
    """A manifest and a store in one, over a folder of parquet files."""

    folder: Path
    uri: str = "s3://bucket"
    downloads: Counter = field(default_factory=Counter)
    gate: threading.Event | None = None
    fail: dict[str, list[Exception]] = field(default_factory=dict)
    cut: int = 0

    def shard(self, i: int) -> Any:
        key = f"part-{i}.parquet"
        return Shard(
            i, key, ROWS, (self.folder / key).stat().st_size if (self.folder / key).exists() else 1, f"etag{i}"
        )

    def download_file(self, key: str, path: Path, *, etag: str | None = None) -> ObjectInfo:
        self.downloads[key] += 1
        if self.gate is not None:
            assert self.gate.wait(20)
        if self.fail.get(key):
            raise self.fail[key].pop(0)
        raw = (self.folder / key).read_bytes()
        path.write_bytes(raw[: len(raw) - self.cut])
        return ObjectInfo(key=key, size_bytes=len(raw), etag=etag)


class Parquet:
    name = "parquet"

    def read_table(self, path: Path) -> pa.Table:
        return pq.read_table(path)


def content(i: int) -> pa.Table:
    return pa.table({"x": np.arange(ROWS) + i * ROWS, "name": [f"{i}/{row}" for row in range(ROWS)]})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    monkeypatch.setattr(shard_fetcher, "_FIRST_PAUSE_S", 0.0)
    folder = tmp_path / "bucket"
    folder.mkdir()
    for i in range(8):
        pq.write_table(content(i), folder / f"part-{i}.parquet")
    return Fixture(folder)


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "cache", min_free_bytes=0).open()


def fetcher_of(store: Any, cache: NodeCache, **options: Any) -> ShardFetcher:
    return ShardFetcher(store, store, Parquet(), cache, **options)


def test_a_shard_crosses_the_network_once_whoever_asks(store: Fixture, cache: NodeCache) -> None:
    fetcher, second = fetcher_of(store, cache), fetcher_of(store, NodeCache(cache.root, min_free_bytes=0))
    assert fetcher.ensure(3).fetched_bytes == store.shard(3).size_bytes
    assert fetcher.ensure(3).fetched_bytes == 0
    assert second.ensure(3).fetched_bytes == 0
    assert fetcher.table(3).equals(content(3))
    assert store.downloads == {"part-3.parquet": 1}
    assert (cache.stats.fetched_bytes, cache.stats.fetched_shards) == (store.shard(3).size_bytes, 1)


def test_threads_that_ask_at_once_fetch_once(store: Fixture, cache: NodeCache) -> None:
    store.gate = threading.Event()
    fetchers = [fetcher_of(store, cache), fetcher_of(store, NodeCache(cache.root, min_free_bytes=0))]
    tables: list[pa.Table] = []
    threads = [threading.Thread(target=lambda f=fetchers[i % 2]: tables.append(f.table(0))) for i in range(6)]
    for thread in threads:
        thread.start()
    store.gate.set()
    for thread in threads:
        thread.join(20)
    assert len(tables) == 6
    assert all(table.equals(content(0)) for table in tables)
    assert store.downloads == {"part-0.parquet": 1}


def test_columns_are_chosen_once_and_cached_under_another_name(store: Fixture, cache: NodeCache) -> None:
    assert fetcher_of(store, cache, columns=["x"]).table(0).column_names == ["x"]
    assert fetcher_of(store, cache).table(0).column_names == ["x", "name"]
    with pytest.raises(ShardReadError, match=r"part-0.parquet\) has no column \['y'\]"):
        fetcher_of(store, cache, columns=["y"]).table(0)


def test_a_transient_failure_is_tried_again_and_a_lasting_one_names_object_cause_and_way_out(
    store: Fixture, cache: NodeCache
) -> None:
    store.fail["part-0.parquet"] = [StorageError("reset"), OSError("torn")]
    assert fetcher_of(store, cache).table(0).equals(content(0))
    assert store.downloads == {"part-0.parquet": 3}
    store.fail["part-1.parquet"] = [StorageError("connection reset")] * 3
    with pytest.raises(ShardReadError, match=r"bucket/part-1.parquet.* 3 attempts.*connection reset.*replace it"):
        fetcher_of(store, cache).table(1)
    assert fetcher_of(store, cache).table(1).equals(content(1))  # a failure does not stick


def test_a_missing_object_is_not_asked_for_again(store: Fixture, cache: NodeCache) -> None:
    store.fail["part-0.parquet"] = [ObjectNotFoundError("no such key")]
    with pytest.raises(ShardReadError, match="no such key"):
        fetcher_of(store, cache).ensure(0)
    assert store.downloads == {"part-0.parquet": 1}


def test_a_changed_object_is_an_error_that_names_it_unless_accepted(store: Fixture, cache: NodeCache) -> None:
    store.fail["part-0.parquet"] = [ObjectChangedError("etag of part-0.parquet")]
    with pytest.raises(ObjectChangedError, match="part-0"):
        fetcher_of(store, cache).ensure(0)

    class Grown(Fixture):
        def shard(self, i: int) -> Any:
            return Shard(i, f"part-{i}.parquet", ROWS, 1, None)

    grown = Grown(store.folder)
    with pytest.raises(ObjectChangedError, match="on_change"):
        fetcher_of(grown, cache).ensure(0)
    assert fetcher_of(grown, cache, pin=False).table(0).equals(content(0))


def test_a_short_download_or_undecodable_object_is_never_cached(store: Fixture, cache: NodeCache) -> None:
    store.cut = 10
    with pytest.raises(ShardReadError, match="bytes arrived"):
        fetcher_of(store, cache).ensure(0)
    store.cut = 0
    (store.folder / "part-1.parquet").write_bytes(b"PAR1 this is not parquet PAR1")
    with pytest.raises(ShardReadError, match="ArrowInvalid"):
        fetcher_of(store, cache).ensure(1)
    pq.write_table(content(2).slice(1), store.folder / "part-2.parquet")
    with pytest.raises(ShardReadError, match="has 19 rows, the manifest says 20"):
        fetcher_of(store, cache).ensure(2)
    assert cache.ls() == []
    assert cache.usage_bytes() == 0


def test_a_corrupt_cached_file_is_fetched_again(store: Fixture, cache: NodeCache) -> None:
    fetcher = fetcher_of(store, cache)
    fetcher.ensure(0)
    path = cache.path(fetcher.name(0))
    raw = bytearray(path.read_bytes())
    raw[100] ^= 255
    path.write_bytes(raw)
    assert fetcher.table(0).equals(content(0))
    assert store.downloads == {"part-0.parquet": 2}


def test_a_cache_too_small_for_one_shard_is_a_clear_error(store: Fixture, tmp_path: Path) -> None:
    small = NodeCache(tmp_path / "small", limit_bytes=100, min_free_bytes=0)
    with pytest.raises(CacheFullError, match="limit of 100 bytes"):
        fetcher_of(store, small).table(0)
    assert small.usage_bytes() == 0


def local_source(store: Any, cache: NodeCache, *, epochs: int = 1, max_shards: int = 2) -> tuple[Any, SampleOrder]:
    order = SampleOrder([ROWS] * 8, seed=3, lanes=2, window=1)
    visits = shard_visits(order, 0, epochs * 8 * ROWS, 4, (0,), 1)
    ahead = LookAhead(
        first_needs(visits),
        shard_bytes=lambda i: store.shard(i).size_bytes,
        consumed=0,
        batch_samples=4,
        max_shards=max_shards,
        live_shards=[live_set(order, 4, (0,), 1)],
    )
    fetcher = fetcher_of(store, cache)
    cache.rank_by(lambda: next_uses([(fetcher, ahead)]))
    return LocalShardSource(fetcher, ahead).start(), order


def read_all(source: Any, order: SampleOrder, epochs: int = 1) -> list[int]:
    seen: list[int] = []
    for start in range(0, epochs * order.num_samples, 4):
        shards, rows = order.locate(np.arange(start, start + 4))
        seen += [
            source.table(shard)["x"][row].as_py() for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)
        ]
        source.advance(start + 4)
    return seen


def test_the_source_delivers_every_sample_and_fetches_each_shard_once(store: Fixture, cache: NodeCache) -> None:
    source, order = local_source(store, cache, epochs=3)
    seen = read_all(source, order, epochs=3)
    source.close()
    assert Counter(seen) == dict.fromkeys(range(8 * ROWS), 3)
    assert set(store.downloads.values()) == {1}


def wait_for_files(cache: NodeCache, num: int) -> None:
    while len(cache.ls()) < num:  # the test's timeout bounds it
        threading.Event().wait(0.01)


def test_prefetching_stops_at_the_look_ahead_and_follows_the_consumer(store: Fixture, cache: NodeCache) -> None:
    source, order = local_source(store, cache, max_shards=2)
    coming = [need.data_shard for need in first_needs(shard_visits(order, 0, 8 * ROWS, 4, (0,), 1))]
    wait_for_files(cache, 4)  # the two shards of the first batch, and two beyond
    assert set(store.downloads) == {f"part-{i}.parquet" for i in coming[:4]}
    source.advance(ROWS * 2)
    wait_for_files(cache, 6)
    assert set(store.downloads) == {f"part-{i}.parquet" for i in coming[:6]}
    source.close()
    assert not any(thread.is_alive() for thread in source._threads)


def test_the_shards_of_the_first_batch_come_alone_until_it_is_there_or_a_second_is_over(
    store: Fixture, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_FIRST_BATCH_S", 30.0)
    source, _ = local_source(store, cache, max_shards=2)
    wait_for_files(cache, 2)
    threading.Event().wait(0.2)
    assert len(cache.ls()) == 2
    source.advance(4)
    wait_for_files(cache, 4)
    source.close()
    waiting, _ = local_source(store, NodeCache(cache.root.with_name("other"), min_free_bytes=0).open())
    wait_for_files(waiting._fetcher.cache, 2)
    began = time.monotonic()
    waiting.close()
    assert time.monotonic() - began < 4
    assert not any(thread.is_alive() for thread in waiting._threads)


def test_a_source_whose_prefetching_fails_still_delivers_and_close_never_hangs(
    store: Fixture, cache: NodeCache, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(8):
        store.fail[f"part-{i}.parquet"] = [StorageError("down")] * 3
    source, order = local_source(store, cache, max_shards=8)
    for thread in source._threads:
        thread.join(20)  # all tried, all failed
    assert "cannot prefetch data shard" in caplog.text
    assert Counter(read_all(source, order)) == dict.fromkeys(range(8 * ROWS), 1)
    source.close(0)


def test_a_cache_smaller_than_the_dataset_stays_within_its_limit_and_delivers_everything(
    store: Fixture, tmp_path: Path
) -> None:
    one = fetcher_of(store, NodeCache(tmp_path / "probe", min_free_bytes=0))
    one.ensure(0)
    limit = 5 * one.cache.usage_bytes()
    cache = NodeCache(tmp_path / "tight", limit_bytes=limit, min_free_bytes=0).open()
    source, order = local_source(store, cache, epochs=2)
    assert Counter(read_all(source, order, epochs=2)) == dict.fromkeys(range(8 * ROWS), 2)
    source.close()
    assert cache.usage_bytes() <= limit
    assert cache.stats.evictions > 0


def test_a_shard_that_a_batch_waits_for_evicts_what_is_needed_sooner(store: Fixture, tmp_path: Path) -> None:
    """Whatever the ranking says of it: it may be a moment old, and names the next epoch's need of a shard let go."""
    one = fetcher_of(store, NodeCache(tmp_path / "probe", min_free_bytes=0))
    one.ensure(0)
    limit = 2 * one.cache.usage_bytes()
    cache = NodeCache(tmp_path / "tight", limit_bytes=limit, min_free_bytes=0).open()
    fetcher = fetcher_of(store, cache)
    cache.rank_by(lambda: {fetcher.name(i): float(i) for i in range(8)})
    fetcher.ensure(1)
    fetcher.ensure(2)
    with pytest.raises(CacheFullError, match="needed sooner"):
        fetcher.ensure(7)
    assert fetcher.table(7).num_rows == ROWS
    assert {file.name for file in cache.ls()} == {fetcher.name(1), fetcher.name(7)}


def test_open_local_source_reads_a_real_dataset_from_any_position(store: Fixture, tmp_path: Path) -> None:
    dataset = ShardedDataset(f"{store.folder}/*.parquet", global_batch_size=4, lanes=2, window=2, columns=["x"])
    manifest = dataset.manifest()
    order = dataset.order(manifest)
    start = 8 * ROWS - 4
    source = open_local_source(
        dataset, manifest, order, start=start, epochs=2, dp_rank=0, dp_world=1, cache_dir=tmp_path / "node"
    )
    shards, rows = order.locate(np.arange(start, start + 8))
    for data_shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
        table = source.table(data_shard)
        assert table.column_names == ["x"]
        assert table["x"][row].as_py() == data_shard * ROWS + row
    source.close(5)
    tight = replace(dataset, cache_limit_bytes=1000)
    with pytest.raises(CacheFullError, match="up to 4 data shards at once"):
        open_local_source(tight, manifest, order, start=0, epochs=1, dp_rank=0, dp_world=1, cache_dir=tmp_path / "x")
