from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_goodput.data.formats import ParquetFormat, format_by_extension, get_format
from ray_goodput.data.manifest import Manifest, build_manifest
from ray_goodput.errors import ConfigError, DataError, EmptyDatasetError, ShardReadError
from ray_goodput.storage.local import LocalStore


def write(path: Path, rows: int, **kwargs: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": np.arange(rows), **kwargs}), path)


def small(**changed: Any) -> Manifest:
    values: dict[str, Any] = {"keys": ["a", "b"], "rows": [3, 4], "sizes": [30, 40], "etags": ["e1", None], **changed}
    return Manifest("s3://b/*", "parquet", **values)


def test_a_manifest_lists_matching_objects_by_key_with_their_rows(tmp_path: Path) -> None:
    for name, rows in [("b.parquet", 5), ("a.parquet", 0), ("sub/c.parquet", 7), ("note.txt", 1)]:
        write(tmp_path / name, rows)
    manifest = build_manifest(LocalStore(tmp_path), "**/*.parquet", ParquetFormat())
    shards = [manifest.shard(i) for i in range(manifest.num_shards)]
    assert [(s.key, s.rows) for s in shards] == [("a.parquet", 0), ("b.parquet", 5), ("sub/c.parquet", 7)]
    assert [s.size_bytes for s in shards] == [(tmp_path / s.key).stat().st_size for s in shards]
    assert all(s.etag for s in shards)
    assert manifest.num_samples == 12
    assert manifest.schema is not None
    assert manifest.schema.names == ["x"]
    with pytest.raises(IndexError):
        manifest.shard(3)


def test_a_manifest_survives_its_persisted_form_and_pickle(tmp_path: Path) -> None:
    write(tmp_path / "ä.parquet", 3)
    manifest = build_manifest(LocalStore(tmp_path), "*", ParquetFormat())
    for back in (Manifest.from_bytes(manifest.to_bytes()), pickle.loads(pickle.dumps(manifest))):
        assert (back.uri, back.format_name, back.digest) == (manifest.uri, manifest.format_name, manifest.digest)
        assert back.shard(0) == manifest.shard(0)
        assert back.schema == manifest.schema


def test_any_changed_or_missing_byte_of_a_stored_manifest_is_found() -> None:
    data = small().to_bytes()
    assert Manifest.from_bytes(data).shard(1) == small().shard(1)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        with pytest.raises(DataError, match="damaged"):
            Manifest.from_bytes(bytes(damaged))
    for length in (0, 5, 16, len(data) - 1):
        with pytest.raises(DataError, match="damaged"):
            Manifest.from_bytes(data[:length])


def test_the_digest_is_of_the_data_and_not_of_its_place() -> None:
    same = Manifest("gs://elsewhere/*", "parquet", keys=["a", "b"], rows=[3, 4], sizes=[30, 40], etags=["e1", None])
    changed = [
        small(keys=["a", "c"]),
        small(keys=["ab", ""]),
        small(rows=[4, 3]),
        small(sizes=[30, 41]),
        small(etags=["e1", ""]),
        small(etags=[None, "e1"]),
    ]
    assert same.digest == small().digest
    assert len({m.digest for m in [small(), *changed]}) == 1 + len(changed)


def test_an_empty_dataset_says_where_and_how_many_objects_were_seen(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(EmptyDatasetError, match=r"There is nothing at .*: correct the dataset's URI .*\*\.parquet"):
        build_manifest(store, "*.parquet", ParquetFormat())
    write(tmp_path / "a.parquet", 0)
    write(tmp_path / "b.parquet", 0)
    with pytest.raises(EmptyDatasetError, match=r"2 objects under .* none matches '\*\.pq'"):
        build_manifest(store, "*.pq", ParquetFormat())
    with pytest.raises(EmptyDatasetError, match=r"The 2 of 2 objects that match .* have no rows"):
        build_manifest(store, "*.parquet", ParquetFormat())


@pytest.mark.parametrize("damage", ["empty", "short", "text", "cut", "footer", "length"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "good.parquet", 10)
    data = (tmp_path / "good.parquet").read_bytes()
    bad = {
        "empty": b"",
        "short": b"PAR1PAR1",
        "text": b"hello world, this is no parquet",
        "cut": data[:-20],
        "footer": data[:-40] + b"\xff" * 32 + data[-8:],
        "length": data[:-8] + b"\xff\xff\xff\x7fPAR1",
    }[damage]
    (tmp_path / "bad.parquet").write_bytes(bad)
    with pytest.raises(ShardReadError, match=r"bad\.parquet is no readable parquet file"):
        build_manifest(LocalStore(tmp_path), "*.parquet", ParquetFormat())


def test_files_with_different_columns_are_named_with_the_difference(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 2, y=[1.0, 2.0])
    write(tmp_path / "b.parquet", 2, y=["1", "2"], z=[0, 0])
    with pytest.raises(
        ShardReadError, match=r"a\.parquet and .*b\.parquet .*: y \(double / string\), z \(absent / int64\)"
    ):
        build_manifest(LocalStore(tmp_path), "*", ParquetFormat())


def test_column_order_and_files_without_rows_do_not_count_as_different(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [1], "x": [2]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": pa.array([], pa.null())}), tmp_path / "c.parquet")
    assert build_manifest(LocalStore(tmp_path), "*", ParquetFormat()).num_samples == 2


class CountingStore(LocalStore):
    bytes_read = 0

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.bytes_read += length
        return super().get_range(key, start, length)


@pytest.mark.parametrize("columns", [1, 3000])
def test_rows_are_counted_from_the_footer_alone(tmp_path: Path, columns: int) -> None:
    table = pa.table({f"column_{i:05d}": np.random.default_rng(i).random(100) for i in range(columns)})
    pq.write_table(table, tmp_path / "a.parquet", compression="none")
    store = CountingStore(tmp_path)
    size = (tmp_path / "a.parquet").stat().st_size
    footer = int.from_bytes((tmp_path / "a.parquet").read_bytes()[-8:-4], "little")
    assert build_manifest(store, "*", ParquetFormat()).num_samples == 100
    assert store.bytes_read <= min(size, 65536) + (footer + 8 if columns > 1 else 0)


def test_reading_a_table_takes_no_columns_from_folder_names(tmp_path: Path) -> None:
    write(tmp_path / "year=2024" / "a.parquet", 3)
    assert ParquetFormat().read_table(tmp_path / "year=2024" / "a.parquet").column_names == ["x"]
    (tmp_path / "bad").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(ShardReadError, match="bad is no readable parquet"):
        ParquetFormat().read_table(tmp_path / "bad")


def test_formats_are_found_by_name_and_extension() -> None:
    assert get_format("parquet").name == "parquet"
    found = format_by_extension("s3://b/**/*.PARQUET")
    assert found is not None
    assert found.name == "parquet"
    assert format_by_extension("s3://b/x.xyz") is None
    with pytest.raises(ConfigError, match=r"no data format 'tar'.*parquet"):
        get_format("tar")
