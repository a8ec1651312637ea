"""Laws of the node's cache in one process; what crosses processes is in tests/fault/test_cache_faults.py."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_goodput.data import cache as cache_module
from ray_goodput.data import cache_room
from ray_goodput.data.cache import NodeCache, content_name
from ray_goodput.data.cache_file import TRAILER, file_bytes
from ray_goodput.errors import CacheFullError

NAMES = [content_name(uri="s3://b", key=f"k{i}", etag=None, size_bytes=i) for i in range(10)]


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(tmp_path / "cache", min_free_bytes=0).open()


def table_of(rows: int, fill: int = 0) -> pa.Table:
    return pa.table({"x": np.full(rows, fill, np.int64)})


def age(cache: NodeCache, name: str, used_at_s: float) -> None:
    os.utime(cache.path(name), (used_at_s, cache.path(name).stat().st_mtime))


@pytest.mark.parametrize(
    "table",
    [
        table_of(1000, 7),
        table_of(0),
        pa.table({}),
        pa.table({"s": ["a", None, "ü" * 500], "l": [[1], [], [2, 3]], "b": [b"", b"x", None]}),
        pa.table({"d": pa.array(["u", "v", "u"]).dictionary_encode()}),
        pa.table({"x": pa.chunked_array([[1, 2], [3], []])}),
        pa.table({"f": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))}),
    ],
    ids=["numbers", "no_rows", "no_columns", "ragged", "dictionary", "chunked", "fixed_lists"],
)
def test_a_table_comes_back_equal_and_its_size_is_known_beforehand(cache: NodeCache, table: pa.Table) -> None:
    assert cache.open_table(NAMES[0]) is None
    expected = file_bytes(table)
    assert cache.write(NAMES[0], table) == expected == cache.path(NAMES[0]).stat().st_size == cache.usage_bytes()
    shard = cache.open_table(NAMES[0])
    assert shard is not None
    assert shard.table.equals(table)
    assert shard.table.schema.equals(table.schema, check_metadata=True)
    assert (cache.stats.hits, cache.stats.misses) == (1, 1)


def test_content_names_differ_in_every_part_and_never_by_where_parts_are_cut() -> None:
    base: dict[str, Any] = {"uri": "s3://b", "key": "a/b", "etag": "e", "size_bytes": 1}
    variants: list[dict[str, Any]] = [
        base,
        base | {"key": "a/be", "etag": ""},
        base | {"key": "a/c"},
        base | {"etag": None},
        base | {"etag": "f"},
        base | {"size_bytes": 2},
        base | {"transform": "v2"},
        base | {"columns": []},
        base | {"columns": ["x"]},
        base | {"columns": ["x", "y"]},
        base | {"columns": ["xy"]},
    ]
    assert len({content_name(**v) for v in variants}) == len(variants)
    assert content_name(uri="s3://b/a/", key="b", etag="e", size_bytes=1) == content_name(**base)
    assert content_name(**base) == "bba5e73b88c3db978c574822803926ea"  # a format: other nodes and releases must agree


@pytest.mark.parametrize(
    "damage", ["flip_first", "flip_middle", "flip_trailer", "truncate", "empty", "append", "garbage"]
)
def test_a_damaged_file_reads_as_missing_is_removed_and_said_once(
    cache: NodeCache, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache.write(NAMES[0], table_of(1000, 3))
    path = cache.path(NAMES[0])
    raw = bytearray(path.read_bytes())
    if damage.startswith("flip"):
        position = {"flip_first": 0, "flip_middle": len(raw) // 2, "flip_trailer": len(raw) - 1}[damage]
        raw[position] ^= 1
    elif damage == "truncate":
        raw = raw[:-100]
    elif damage == "append":
        raw += b"\0"
    else:
        raw = bytearray() if damage == "empty" else bytearray(b"\xff" * len(raw))
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        assert cache.open_table(NAMES[0]) is None
        assert cache.open_table(NAMES[0]) is None
    assert not path.exists()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert cache.stats.corrupt == 1
    cache.write(NAMES[0], table_of(1000, 3))
    assert cache.open_table(NAMES[0]) is not None


def test_a_valid_trailer_round_something_else_than_arrow_is_corrupt(cache: NodeCache) -> None:
    import xxhash

    path = cache.path(NAMES[0])
    path.parent.mkdir()
    path.write_bytes(b"not arrow" + TRAILER.pack(b"RGCACHE1", 9, xxhash.xxh3_128(b"not arrow").digest()))
    assert cache.contains(NAMES[0])
    assert cache.open_table(NAMES[0]) is None
    assert not cache.contains(NAMES[0])


def test_a_replaced_file_is_verified_again(cache: NodeCache) -> None:
    cache.write(NAMES[0], table_of(100, 1))
    assert cache.open_table(NAMES[0]) is not None
    raw = bytearray(cache.path(NAMES[0]).read_bytes())
    raw[len(raw) // 2] ^= 1
    replacement = cache.root / "other"
    replacement.write_bytes(raw)
    replacement.replace(cache.path(NAMES[0]))
    assert cache.open_table(NAMES[0]) is None


def test_an_open_table_and_each_of_its_views_keep_the_file_from_eviction(cache: NodeCache) -> None:
    cache.write(NAMES[0], table_of(1000, 5))
    shard = cache.open_table(NAMES[0])
    assert shard is not None
    assert cache.evict(1) == 0
    view = shard.table["x"].chunk(0).to_numpy(zero_copy_only=True)
    shard.close()
    with pytest.raises(ValueError, match="was closed"):
        _ = shard.table
    gc.collect()
    assert cache.evict(1) == 0
    assert cache.purge() == (0, 1)
    assert view.sum() == 5000
    del view
    gc.collect()
    assert cache.evict(1) > 0
    assert cache.ls() == []


def test_without_a_ranking_the_least_recently_opened_goes_first(tmp_path: Path) -> None:
    size = file_bytes(table_of(1000))
    cache = NodeCache(tmp_path, limit_bytes=3 * size, min_free_bytes=0).open()
    for i in range(3):
        cache.write(NAMES[i], table_of(1000))
        age(cache, NAMES[i], 1000 + i)
    shard = cache.open_table(NAMES[0])  # now the most recent
    assert shard is not None
    shard.close()
    cache.write(NAMES[3], table_of(1000))
    assert {file.name for file in cache.ls()} == {NAMES[0], NAMES[2], NAMES[3]}
    assert cache.stats.evictions == 1
    assert cache.usage_bytes() <= 3 * size


def test_with_a_ranking_the_farthest_next_use_goes_first_and_nothing_needed_sooner(tmp_path: Path) -> None:
    size = file_bytes(table_of(1000))
    cache = NodeCache(tmp_path, limit_bytes=3 * size, min_free_bytes=0).open()
    next_use = dict(zip(NAMES, [5.0, 1.0, 9.0, 4.0, 8.0], strict=False))
    cache.rank_by(lambda: next_use)
    for i in range(3):
        cache.write(NAMES[i], table_of(1000))
        age(cache, NAMES[i], 1000 - i)
    cache.write(NAMES[3], table_of(1000))  # needed at 4: the one needed at 9 goes
    assert {file.name for file in cache.ls()} == {NAMES[0], NAMES[1], NAMES[3]}
    with pytest.raises(CacheFullError, match="open or needed sooner"):
        cache.write(NAMES[4], table_of(1000))  # needed at 8, after all the others
    assert {file.name for file in cache.ls()} == {NAMES[0], NAMES[1], NAMES[3]}
    with pytest.raises(CacheFullError, match="open or needed sooner"):
        cache.write(NAMES[9], table_of(1000))  # unknown to the ranking
    cache.write(NAMES[9], table_of(1000), awaited=True)
    assert {file.name for file in cache.ls()} == {NAMES[1], NAMES[3], NAMES[9]}
    cache.write(NAMES[0], table_of(1000))  # what the ranking does not know goes first
    assert {file.name for file in cache.ls()} == {NAMES[0], NAMES[1], NAMES[3]}


def test_for_a_batch_that_waits_even_what_is_needed_sooner_makes_room_but_nothing_open(tmp_path: Path) -> None:
    size = file_bytes(table_of(1000))
    cache = NodeCache(tmp_path, limit_bytes=2 * size, min_free_bytes=0).open()
    cache.rank_by(lambda: dict(zip(NAMES, [1.0, 2.0, 3.0], strict=False)))
    cache.write(NAMES[0], table_of(1000))
    cache.write(NAMES[1], table_of(1000))
    with pytest.raises(CacheFullError, match="open or needed sooner"):
        cache.write(NAMES[2], table_of(1000))
    cache.write(NAMES[2], table_of(1000), awaited=True)
    assert {file.name for file in cache.ls()} == {NAMES[0], NAMES[2]}
    held = [cache.open_table(NAMES[0]), cache.open_table(NAMES[2])]
    with pytest.raises(CacheFullError, match="all in use"):
        cache.write(NAMES[1], table_of(1000), awaited=True)
    assert len(held) == len(cache.ls()) == 2


def test_prefetching_what_is_needed_now_leaves_what_else_is_and_what_is_not_enough_is_left(tmp_path: Path) -> None:
    size = file_bytes(table_of(1000))
    cache = NodeCache(tmp_path, limit_bytes=3 * size, min_free_bytes=0).open()
    cache.rank_by(lambda: dict(zip(NAMES, [0.0, 0.0, 0.0, 0.0, 7.0], strict=False)))
    for i in (0, 1, 4):
        cache.write(NAMES[i], table_of(1000))
    with pytest.raises(CacheFullError, match="needed sooner"), cache.reserve(2 * size, NAMES[2]):
        pass
    assert {file.name for file in cache.ls()} == {NAMES[0], NAMES[1], NAMES[4]}
    cache.write(NAMES[2], table_of(1000))
    with pytest.raises(CacheFullError, match="needed sooner"):
        cache.write(NAMES[3], table_of(1000))
    assert {file.name for file in cache.ls()} == set(NAMES[:3])


def test_a_batch_that_waits_for_reservations_leaves_what_others_need_now_and_a_shard_too_large_waits_for_nothing(
    tmp_path: Path,
) -> None:
    size = file_bytes(table_of(1000))
    cache = NodeCache(tmp_path, limit_bytes=3 * size, min_free_bytes=0).open()
    cache.rank_by(lambda: {NAMES[0]: 0.0})
    cache.write(NAMES[0], table_of(1000), awaited=True)  # another rank's batch is about to open it
    begun, seen = threading.Event(), []

    def prefetch() -> None:
        with cache.reserve(2 * size, NAMES[1]):
            begun.set()
            time.sleep(0.5)
            seen.append(cache.contains(NAMES[0]))

    other = threading.Thread(target=prefetch)
    other.start()
    assert begun.wait(10)
    began = time.monotonic()
    with pytest.raises(CacheFullError, match="larger than the whole cache"), cache.reserve(4 * size, None):
        pass
    assert time.monotonic() - began < 0.4
    with cache.reserve(size, None):
        assert cache.contains(NAMES[0])
    other.join(10)
    assert seen == [True]


def test_a_batch_waits_for_the_reservations_of_others_instead_of_failing(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, limit_bytes=10_000, min_free_bytes=0).open()
    begun = threading.Event()

    def prefetch() -> None:
        with cache.reserve(9000, NAMES[0]):
            begun.set()
            time.sleep(0.3)

    other = threading.Thread(target=prefetch)
    other.start()
    assert begun.wait(10)
    with pytest.raises(CacheFullError), cache.reserve(5000, NAMES[1]):
        pass  # a prefetch that would have to wait is given up instead
    began = time.monotonic()
    with cache.reserve(5000, None):
        assert cache.usage_bytes() == 5000
    assert time.monotonic() - began < 10
    other.join(10)
    assert cache.usage_bytes() == 0


def test_the_limit_counts_reservations_that_are_still_empty(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, limit_bytes=10_000, min_free_bytes=0).open()
    with cache.reserve(6000, NAMES[0]) as folder:
        assert list(folder.iterdir()) == [folder / "lock"]
        assert cache.usage_bytes() == 6000
        with pytest.raises(CacheFullError, match=r"6000 reserved.*limit of 10000"), cache.reserve(5000, NAMES[1]):
            pass
        with cache.reserve(4000, NAMES[1]):
            assert cache.usage_bytes() == 10_000
    assert cache.usage_bytes() == 0
    assert list((cache.root / "tmp").iterdir()) == []


def test_a_shard_above_the_limit_is_refused_without_evicting_anything(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, limit_bytes=20_000, min_free_bytes=0).open()
    cache.write(NAMES[0], table_of(1000))
    with pytest.raises(CacheFullError, match="cache_limit_bytes"):
        cache.write(NAMES[1], table_of(10_000))
    assert cache.contains(NAMES[0])


def test_a_disk_short_of_room_evicts_then_refuses_with_the_numbers(
    cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write(NAMES[0], table_of(1000))
    disk = 30_000
    monkeypatch.setattr(cache_room, "free_bytes", lambda path: disk - sum(file.size_bytes for file in cache.ls()))
    cache.write(NAMES[1], table_of(1000))
    cache.write(NAMES[2], table_of(1000))
    cache.write(NAMES[3], table_of(1000))
    assert 0 < cache.stats.evictions <= 2
    assert cache.usage_bytes() <= disk
    with pytest.raises(CacheFullError, match=r"disk has \d+ bytes free"):
        cache.write(NAMES[4], table_of(10_000))


def test_enospc_in_mid_write_evicts_and_tries_again_then_gives_up_leaving_nothing(
    cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cache_module._write_file
    failures = [1]

    def flaky(path: Path, table: pa.Table) -> int:
        if failures[0]:
            failures[0] -= 1
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, table)

    monkeypatch.setattr(cache_module, "_write_file", flaky)
    cache.write(NAMES[0], table_of(10))
    assert cache.contains(NAMES[0])
    failures[0] = 99
    with pytest.raises(CacheFullError, match="filled up 3 times"):
        cache.write(NAMES[1], table_of(10))
    assert not cache.contains(NAMES[1])
    assert list((cache.root / "tmp").iterdir()) == []


def test_other_disk_errors_leave_as_they_are(cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, table: pa.Table) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(cache_module, "_write_file", broken)
    with pytest.raises(OSError, match="Input/output"):
        cache.write(NAMES[0], table_of(10))
    assert cache.usage_bytes() == 0


def test_lock_files_do_not_pile_up(cache: NodeCache) -> None:
    with cache.fetching(NAMES[0]):
        assert cache.path(NAMES[0]).with_suffix(".lock").exists()
    assert not cache.path(NAMES[0]).with_suffix(".lock").exists()


def test_a_fetch_held_too_long_by_another_is_done_twice_rather_than_never(
    cache: NodeCache, caplog: pytest.LogCaptureFixture
) -> None:
    with cache.fetching(NAMES[0]), cache.fetching(NAMES[0], timeout_s=0.02):
        assert "fetching it too" in caplog.text
    assert not cache.path(NAMES[0]).with_suffix(".lock").exists()


def test_purge_empties_the_folder_and_foreign_files_stay(cache: NodeCache) -> None:
    cache.write(NAMES[0], table_of(10))
    foreign = cache.root / "README"
    foreign.write_text("mine")
    freed, kept = cache.purge()
    assert freed > 0
    assert kept == 0
    assert cache.ls() == []
    assert foreign.exists()
