"""The cache across processes: killed writers and readers, races, locks. Children are told what to do over pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_goodput as rg
from ray_goodput.data.cache import NodeCache, content_name
from ray_goodput.data.cache_file import file_bytes

NAME = content_name(uri="s3://b", key="k", etag=None, size_bytes=1)
OTHER = content_name(uri="s3://b", key="other", etag=None, size_bytes=1)
TABLE = pa.table({"x": np.arange(100_000)})

PREAMBLE = """
import sys
from pathlib import Path
import numpy as np
import pyarrow as pa
from ray_goodput.data import cache_file
from ray_goodput.data.cache import NodeCache
root, name = Path(sys.argv[1]), sys.argv[2]
cache = NodeCache(root, min_free_bytes=0)
table = pa.table({"x": np.arange(100_000)})
def tell(word): print(word, flush=True)
def wait(): sys.stdin.readline()
"""

JOB = """
import sys
from pathlib import Path
import ray_goodput as rg
from ray_goodput.data import cache_file, cache_room, shard_fetcher
root, files, point = Path(sys.argv[1]), sys.argv[3], sys.argv[4]
def there():  # several threads may come here: one write each
    sys.stdout.write("there\\n")
    sys.stdout.flush()
    sys.stdin.readline()
def stop_before(owner, name):
    real = getattr(owner, name)
    def stopped(*arguments, **named):
        there()
        return real(*arguments, **named)
    setattr(owner, name, stopped)
def half_a_download(self, key, etag, size_bytes, path):
    path.write_bytes(b"half")
    there()
if point == "download":
    shard_fetcher.ShardFetcher._download_object = half_a_download
elif point == "checksum":
    stop_before(cache_file._HashingSink, "trailer")
elif point == "rename":
    stop_before(cache_room.CacheRoom, "publish")
elif point == "after rename":
    stop_before(cache_room, "fsync_folder")
else:
    stop_before(cache_room.Path, "unlink")
data = rg.ShardedDataset(files, global_batch_size=50, lanes=1, window=1, cache_limit_bytes=int(sys.argv[5]))
with data.loader(cache_dir=root, epochs=2) as batches:
    for batch in batches:
        pass
print("through", flush=True)
"""

Spawn = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    children: list[subprocess.Popen[str]] = []

    def start(body: str) -> subprocess.Popen[str]:
        code = PREAMBLE + textwrap.dedent(body)
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), NAME],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def go_on(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def kill(child: subprocess.Popen[str]) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.wait()


@pytest.mark.parametrize("after_writes", [0, 1, 3])
def test_a_writer_killed_in_mid_write_leaves_nothing_that_is_read_and_its_room_is_given_back(
    tmp_path: Path, spawn: Spawn, after_writes: int
) -> None:
    child = spawn(
        f"""
        left = {after_writes}
        real = cache_file._HashingSink.write
        def write(self, data):
            global left
            if not left:
                self._file.flush()
                tell("writing")
                wait()
            left -= 1
            return real(self, data)
        cache_file._HashingSink.write = write
        with cache.fetching(name):
            cache.write(name, table)
        """
    )
    assert heard(child) == "writing"
    cache = NodeCache(tmp_path, min_free_bytes=0)
    assert cache.usage_bytes() == file_bytes(TABLE)  # reserved, not yet there
    assert cache.open_table(NAME) is None
    cache.open()
    assert cache.usage_bytes() == file_bytes(TABLE)  # a living writer's room is left alone
    kill(child)
    with cache.fetching(NAME, timeout_s=0.1):  # its lock went with it
        assert not cache.contains(NAME)
        cache.write(NAME, TABLE)
    cached = cache.open_table(NAME)
    assert cached is not None
    assert cached.table.equals(TABLE)
    cache.open()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {cache.path(NAME), tmp_path / "admission.lock"}


def test_a_file_open_in_another_process_is_not_evicted_until_that_process_dies(tmp_path: Path, spawn: Spawn) -> None:
    cache = NodeCache(tmp_path, limit_bytes=file_bytes(TABLE), min_free_bytes=0).open()
    cache.write(NAME, TABLE)
    child = spawn(
        """
        cached = cache.open_table(name)
        tell("open")
        wait()
        tell(str(cached.table["x"].to_numpy().sum()))
        wait()
        """
    )
    assert heard(child) == "open"
    assert cache.evict(1) == 0
    assert cache.contains(NAME)
    go_on(child)
    assert heard(child) == str(TABLE["x"].to_numpy().sum())
    kill(child)
    assert cache.evict(1) > 0
    assert not cache.contains(NAME)


def test_processes_that_race_for_one_shard_fetch_it_once(tmp_path: Path, spawn: Spawn) -> None:
    body = """
        cache.open()
        tell("ready")
        wait()
        with cache.fetching(name):
            if cache.contains(name):
                tell("hit")
            else:
                cache.write(name, table)
                tell("fetched")
    """
    children = [spawn(body) for _ in range(3)]
    assert [heard(child) for child in children] == ["ready"] * 3
    for child in children:
        go_on(child)
    assert sorted(heard(child) for child in children) == ["fetched", "hit", "hit"]


def test_a_fetcher_killed_while_holding_the_shard_lets_the_waiting_one_fetch(tmp_path: Path, spawn: Spawn) -> None:
    holder = spawn('with cache.fetching(name):\n    tell("holding")\n    wait()')
    assert heard(holder) == "holding"
    waiter = spawn('tell("waiting")\nwith cache.fetching(name):\n    cache.write(name, table)\n    tell("fetched")')
    assert heard(waiter) == "waiting"
    kill(holder)
    assert heard(waiter) == "fetched"


def test_writers_of_many_processes_never_pass_the_limit_together(tmp_path: Path, spawn: Spawn) -> None:
    limit = 3 * file_bytes(TABLE)
    body = f"""
        from ray_goodput.data.cache import content_name
        cache = NodeCache(root, limit_bytes={limit}, min_free_bytes=0).open()
        tell("ready")
        wait()
        worst = 0
        for i in range(15):
            cache.write(content_name(uri="u", key=str(i), etag=sys.argv[0], size_bytes=i), table)
            worst = max(worst, cache.usage_bytes())
        tell(str(worst))
    """
    children = [spawn(body) for _ in range(2)]
    assert [heard(child) for child in children] == ["ready"] * 2
    for child in children:
        go_on(child)
    assert max(int(heard(child)) for child in children) <= limit
    assert 0 < NodeCache(tmp_path).usage_bytes() <= limit


@pytest.mark.parametrize("point", ["download", "checksum", "rename", "after rename", "eviction"])
def test_a_job_killed_anywhere_leaves_a_second_one_on_the_same_folder_nothing_to_clean_up(
    tmp_path: Path, point: str
) -> None:
    """The second job is running when the first one dies, and waits for it where it must; then it goes on."""
    root, files = tmp_path / "cache", tmp_path / "data"
    files.mkdir()
    for i in range(6):
        pq.write_table(pa.table({"x": np.arange(i * 1000, (i + 1) * 1000)}), files / f"{i}.parquet")
    limit = 40_000  # of 6 cached files of 8,000 bytes and more, with room for what is on its way
    child = subprocess.Popen(
        [sys.executable, "-c", JOB, str(root), NAME, str(files), point, str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    data = rg.ShardedDataset(str(files), global_batch_size=50, lanes=1, window=1, cache_limit_bytes=limit)
    seen: list[int] = []

    def second_job() -> None:
        with data.loader(cache_dir=root, epochs=2) as batches:
            for batch in batches:
                seen.extend(batch["x"].tolist())

    try:
        assert heard(child) == "there"
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(second_job)
            kill(child)
            job.result(timeout=50)
    finally:
        child.kill()
        child.communicate()
    assert sorted(seen) == sorted([*range(6000), *range(6000)])
    cache = NodeCache(root).open()
    assert 0 < cache.usage_bytes() <= limit
    left = {path for path in root.rglob("*") if path.is_file()}
    assert left == {file.path for file in cache.ls()} | {root / "admission.lock"}
