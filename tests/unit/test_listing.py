"""Listings and manifests of many objects are columns: what that must not change, and what it must not cost."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_goodput.data import listing as listing_module
from ray_goodput.data.formats import ParquetFormat, ShardFacts
from ray_goodput.data.formats.raw_files import _folder_name
from ray_goodput.data.inspection import SchemaTable, inspect_here
from ray_goodput.data.listing import Listing, list_matching
from ray_goodput.data.manifest import Manifest
from ray_goodput.storage.protocol import ObjectInfo


class MadeUp:
    uri = "s3://bucket/data"

    def __init__(self, keys: list[str]) -> None:
        self._keys = keys

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for i, key in enumerate(self._keys):
            yield ObjectInfo(key=key, size_bytes=100 + i, etag=None if i % 3 else f"e{i}")


class Footers(ParquetFormat):
    """Says what it was asked about, without reading."""

    def inspect(self, store: Any, info: ObjectInfo) -> ShardFacts:
        names = ["a", "b"] if info.size_bytes % 2 else ["b", "a"]
        schema = pa.schema([(name, pa.int64()) for name in names], metadata={"of": info.key})
        return ShardFacts(info.size_bytes, schema)


def store_of(keys: list[str]) -> Any:
    return MadeUp(keys)


def test_a_listing_is_by_key_whatever_the_stores_order_and_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_module, "_AT_ONCE", 3)
    keys = ["é.x", "b.x", "a.x", "skipped.y", "z/1.x", "Z.x", "a.x.x", "10.x"]
    listing, num_seen = list_matching(store_of(keys), "**/*.x", "uri")
    expected = sorted((i for i in MadeUp(keys).list() if i.key.endswith(".x")), key=lambda info: info.key)
    assert num_seen == len(keys)
    assert list(listing) == [listing[i] for i in range(len(listing))] == expected
    assert list(listing[2:5]) == expected[2:5]
    assert list(listing[2:5][1:]) == expected[3:5]
    assert list(listing.take(np.array([4, 0, 4]))) == [expected[4], expected[0], expected[4]]
    assert list(Listing.of(expected)) == expected
    assert Listing.of(listing) is listing


def test_columns_that_are_the_same_are_kept_once() -> None:
    listing, _ = list_matching(store_of([f"{i:04d}" for i in range(500)]), "*", "uri")
    store: Any = None
    found = inspect_here(store, listing, Footers(), 4)
    assert found.rows.tolist() == list(range(100, 600))
    assert [schema.names for schema in found.schemas] == [["b", "a"], ["a", "b"]]
    assert found.kinds.tolist() == [0, 1] * 250
    table = SchemaTable()
    assert [table.number(schema) for schema in (*found.schemas, *found.schemas)] == [0, 1, 0, 1]


def test_a_digest_does_not_depend_on_how_the_columns_lie_in_memory() -> None:
    keys, etags = ["aé", "b", "c", "d"], [None, "e1", None, "e3"]
    whole = Manifest("u", "parquet", keys=keys[1:], rows=[1, 2, 3], sizes=[4, 5, 6], etags=etags[1:])
    key_column, etag_column = pa.array(keys, pa.large_string()), pa.array(etags, pa.large_string())
    cut = Manifest("u", "parquet", keys=key_column[1:], rows=[1, 2, 3], sizes=[4, 5, 6], etags=etag_column[1:])
    assert cut.digest == whole.digest
    assert Manifest.from_bytes(cut.to_bytes()).digest == whole.digest
    none = Manifest("u", "parquet", keys=["a"], rows=[1], sizes=[1], etags=[None])
    empty = Manifest("u", "parquet", keys=["a"], rows=[1], sizes=[1], etags=[""])
    assert none.digest != empty.digest


def test_a_process_that_opens_a_manifest_of_a_hundred_thousand_shards_makes_no_objects_of_them() -> None:
    num = 100_000
    keys = [f"{i // 1000:04d}/{i:09d}.parquet" for i in range(num)]
    numbers = np.arange(num)
    data = Manifest("u", "parquet", keys=keys, rows=numbers, sizes=numbers, etags=keys).to_bytes()
    del keys
    tracemalloc.start()
    manifest = Manifest.from_bytes(data)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert manifest.num_shards == num
    assert manifest.shard(77_777).key == "0077/000077777.parquet"
    assert peak_bytes < 6e6, "the numbers, twice; the texts as strings would be another 15 MB"


@pytest.mark.parametrize(
    "key",
    [
        "a/b/c.jpg",
        "c.jpg",
        "a//b.jpg",
        "./b.jpg",
        "a/./b.jpg",
        "a/../b.jpg",
        "/b.jpg",
        "a/b//c",
        "a/",
        "a/b/",
        "a/b/.",
        "",
    ],
)
def test_the_folder_of_a_file_is_what_paths_call_it(key: str) -> None:
    assert _folder_name(key) == PurePosixPath(key).parent.name
