"""Manifest version 1 is a format: runs that stored one must be able to resume."""

from __future__ import annotations

from pathlib import Path

from ray_goodput.data.manifest import DataShard, Manifest

GOLDEN = Path(__file__).parent / "golden" / "manifest_v1.bin"


def test_manifest_version_1_is_read_for_ever() -> None:
    manifest = Manifest.from_bytes(GOLDEN.read_bytes())
    assert (manifest.uri, manifest.format_name) == ("s3://bucket/train/*.parquet", "parquet")
    assert [manifest.shard(i) for i in range(manifest.num_shards)] == [
        DataShard(0, "a/ä.parquet", 10, 1000, '"e1"'),
        DataShard(1, "b.parquet", 0, 200, None),
        DataShard(2, "c.parquet", 7, 700, "e3"),
    ]
    assert manifest.schema is not None
    assert manifest.schema.to_string() == "x: float\ny: fixed_size_list<item: int64>[2]\n  child 0, item: int64"


def test_the_manifest_digest_never_changes() -> None:
    assert Manifest.from_bytes(GOLDEN.read_bytes()).digest == "4ec52a5efbea1f687eb31d989231ab8e"
