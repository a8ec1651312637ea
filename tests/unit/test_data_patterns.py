from __future__ import annotations

import pytest

from ray_goodput.data.patterns import compile_glob, split_glob


@pytest.mark.parametrize(
    ("uri", "root", "pattern"),
    [
        ("s3://b/train/*.parquet", "s3://b/train", "*.parquet"),
        ("s3://b/a/x-*/y/*.pq", "s3://b/a", "x-*/y/*.pq"),
        ("s3://b/**/*.parquet", "s3://b", "**/*.parquet"),
        ("s3://b/a/part-?.parquet", "s3://b/a", "part-?.parquet"),
        ("s3://b/{a,b}/x.parquet", "s3://b", "{a,b}/x.parquet"),
        ("s3://b/train", "s3://b/train", ""),
        ("/data/*.parquet", "/data", "*.parquet"),
        ("/*.parquet", "/", "*.parquet"),
        ("file:///d/*.parquet", "file:///d", "*.parquet"),
    ],
)
def test_a_uri_is_split_before_its_first_wildcard(uri: str, root: str, pattern: str) -> None:
    assert split_glob(uri) == (root, pattern)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*.parquet", ["a.parquet"], ["x/a.parquet", "a.parquet.crc", ".a.parquet", "aXparquet"]),
        ("**/*.parquet", ["a.parquet", "x/a.parquet", "x/y/a.parquet"], [".tmp/a.parquet", "x/.a.parquet", "a.csv"]),
        ("x/**", ["x/a", "x/y/b"], ["x", "y/a", "x/.git/a"]),
        ("part-?.pq", ["part-1.pq"], ["part-10.pq", "part-.pq", "part-/.pq"]),
        ("p[0-3].pq", ["p0.pq", "p3.pq"], ["p4.pq"]),
        ("p[!0].pq", ["p1.pq"], ["p0.pq", "p/.pq"]),
        ("{a,b}/{c,d*}.pq", ["a/c.pq", "b/d9.pq"], ["a/e.pq", "c/c.pq"]),
        ("a+(1).pq", ["a+(1).pq"], ["aa1.pq"]),
        ("a\n*.pq", ["a\nb.pq"], ["ab.pq"]),
    ],
)
def test_a_pattern_matches_as_a_shell_does(pattern: str, matching: list[str], others: list[str]) -> None:
    matcher = compile_glob(pattern)
    assert [key for key in matching + others if matcher.fullmatch(key)] == matching
