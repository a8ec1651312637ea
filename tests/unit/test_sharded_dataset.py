from __future__ import annotations

import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_goodput.data.dataset import ShardedDataset
from ray_goodput.data.shard_fetcher import ShardFetcher
from ray_goodput.errors import CacheFullError, ConfigError, DatasetMismatchError


def dataset(**changed: Any) -> ShardedDataset:
    return ShardedDataset(**{"uri_glob": "s3://b/t/*.parquet", "global_batch_size": 8, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"global_batch_size": True}, "global_batch_size=True"),
        ({"global_batch_size": 8.0}, "global_batch_size=8.0"),
        ({"lanes": 16}, "a global batch of 8 cannot be smaller than the 16 lanes"),
        ({"lanes": 0}, "lanes=0"),
        ({"window": 0}, "window=0"),
        ({"workers": -1}, "workers=-1"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"workers": True}, "workers=True"),
        ({"worker_kind": "fork"}, "worker_kind='fork'"),
        ({"prefetch_shards": 0}, "prefetch_shards=0"),
        ({"cache_limit_bytes": 0}, "cache_limit_bytes=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"seed": 1.5}, "seed=1.5"),
        ({"columns": "x"}, "columns='x'"),
        ({"columns": []}, "columns="),
        ({"transform": 3}, "transform=3"),
        ({"collate": "f"}, "collate='f'"),
        ({"on_change": "ignore"}, "on_change='ignore'"),
        ({"format": "tar"}, "no data format 'tar'"),
        ({"uri_glob": ""}, "give the files' URI"),
        ({"uri_glob": "s3://b/[z-a].parquet"}, "the pattern cannot be read: bad character range"),
    ],
)
def test_senseless_arguments_are_refused_when_the_dataset_is_made(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataset(**changed)


@pytest.mark.parametrize(("batch", "lanes"), [(1, 1), (8, 8), (512, 64), (96, 48), (127, 1), (130, 26), (100_000, 50)])
def test_default_lanes_are_the_largest_divisor_of_the_batch_up_to_64(batch: int, lanes: int) -> None:
    assert dataset(global_batch_size=batch).num_lanes == lanes


def test_a_world_larger_than_the_batch_is_refused_with_the_numbers() -> None:
    dataset().check_world(8)
    with pytest.raises(ConfigError, match="batch of 8 samples cannot be shared by 9 data-parallel ranks"):
        dataset().check_world(9)


@pytest.mark.parametrize(
    ("uri", "root", "pattern"),
    [
        ("s3://b/t/*.parquet", "s3://b/t", "*.parquet"),
        ("s3://b/t", "s3://b/t", "**/*{.parquet,.pq}"),
        ("s3://b/t/", "s3://b/t", "**/*{.parquet,.pq}"),
        ("s3://b", "s3://b", "**/*{.parquet,.pq}"),
        ("s3://b/t/a.parquet", "s3://b/t", "a.parquet"),
        ("s3://b.parquet", "s3://b.parquet", "**/*{.parquet,.pq}"),
        ("/d/a.parquet", "/d", "a.parquet"),
        ("/a.parquet", "/", "a.parquet"),
    ],
)
def test_a_uri_may_be_a_pattern_a_folder_or_one_file(uri: str, root: str, pattern: str) -> None:
    made = dataset(uri_glob=uri)
    assert (made.store_spec.uri, made.pattern) == (root, pattern)


def test_a_relative_path_means_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = dataset(uri_glob="data/*.parquet")
    monkeypatch.chdir("/")
    assert made.store_spec.uri == str(tmp_path / "data")


def test_a_dataset_survives_pickle_and_hides_credentials() -> None:
    made = dataset(storage_options={"secret": "hunter2"}, columns=["x"])
    back = pickle.loads(pickle.dumps(made))
    assert back == made
    assert back.store_spec.options == {"secret": "hunter2"}
    assert "hunter2" not in repr(made) + repr(made.store_spec)


def write_files(folder: Path, rows: list[int]) -> None:
    start = 0
    for i, n in enumerate(rows):
        pq.write_table(pa.table({"id": np.arange(start, start + n)}), folder / f"{i:02d}.parquet")
        start += n


def test_a_missing_column_is_named_before_anything_is_fetched(tmp_path: Path) -> None:
    write_files(tmp_path, [3])
    with pytest.raises(ConfigError, match=r"no column 'y'; it has 'id'"):
        dataset(uri_glob=str(tmp_path), columns=["id", "y"]).manifest()


def test_the_loader_streams_a_folder_and_goes_on_at_a_cursor(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_files(data, [5, 0, 13, 1, 8])
    made = dataset(uri_glob=str(data))
    manifest = made.manifest()
    with made.loader(epochs=2, cache_dir=tmp_path / "cache", manifest=manifest) as loader:
        whole = [(b.index, b.sample_ids.tolist(), b["id"].tolist(), b.samples_end) for b in loader]
    assert sorted(i for b in whole for i in b[1]) == sorted([*range(27)] * 2)
    assert all(ids == values for _, ids, values, _ in whole)
    cursor = made.cursor(manifest).moved_to(whole[2][3])
    with made.loader(epochs=2, cache_dir=tmp_path / "cache", cursor=cursor) as loader:
        assert [(b.index, b.sample_ids.tolist(), b["id"].tolist(), b.samples_end) for b in loader] == whole[3:]
    with pytest.raises(DatasetMismatchError, match="seed was 0 and is 1"):
        dataset(uri_glob=str(data), seed=1).loader(cursor=cursor, cache_dir=tmp_path / "cache")
    write_files(data, [5, 0, 13, 1, 9])
    with pytest.raises(DatasetMismatchError, match="other data"):
        made.loader(cursor=cursor, cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match="9 data-parallel ranks"):
        made.loader(dp_world=9)


@pytest.mark.parametrize("batch", [4, 64])
def test_in_a_cache_as_small_as_the_error_advises_each_data_shard_is_fetched_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """D2, for 40 data shards of which it holds 26: prefetching must not make room for itself."""
    (tmp_path / "data").mkdir()
    for i in range(40):
        table = pa.table({"x": np.arange(256.0) + 256 * i})
        pq.write_table(table, tmp_path / "data" / f"{i:02d}.parquet", compression="none", use_dictionary=False)

    def limited(limit: int) -> ShardedDataset:
        return ShardedDataset(
            str(tmp_path / "data"), global_batch_size=batch, lanes=2, window=3, cache_limit_bytes=limit
        )

    with pytest.raises(CacheFullError) as refused:
        limited(1).loader(cache_dir=tmp_path / "cache")
    advised = re.search(r"cache_limit_bytes to at least (\d+)", str(refused.value))
    assert advised is not None
    objects = sorted(file.stat().st_size for file in (tmp_path / "data").iterdir())
    assert int(advised[1]) == 2 * sum(objects[-9:]) + 8 * objects[-1], "six that are live, a window, and four fetches"
    loads: Counter[str] = Counter()
    load = ShardFetcher._load

    def counted(self: ShardFetcher, shard: Any, what: str | None) -> pa.Table:
        loads[shard.key] += 1
        return load(self, shard, what)

    monkeypatch.setattr(ShardFetcher, "_load", counted)
    with limited(int(advised[1])).loader(cache_dir=tmp_path / "cache", epochs=3) as batches:
        assert sum(len(b.sample_ids) for b in batches) == 3 * 40 * 256
    assert max(loads.values()) <= 3
    assert sum(loads.values()) > 40, "the cache was no smaller than the data"
