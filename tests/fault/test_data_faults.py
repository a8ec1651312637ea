"""The data plane against a real S3 server that refuses, stalls, cuts off, changes objects, and a disk that is full.

Either every sample comes, once and with its own bytes, or there is one error that names the object and what to do.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ray_goodput as rg
from ray_goodput.config import StoreSpec
from ray_goodput.core.request_rate import RequestLimits
from ray_goodput.data.loader import BatchLoader
from ray_goodput.data.manifest import Manifest
from ray_goodput.errors import CacheFullError, ObjectChangedError, ShardReadError
from ray_goodput.storage import open_store
from ray_goodput.storage.cloud import CloudStore
from ray_goodput.storage.governor import RequestGovernor
from servers import JuiceFSGateway, MotoServer
from store_proxy import Faults, Request, StoreProxy, Strike

LENGTH, ROWS, SHARDS = 64, 100, 12


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JuiceFSGateway]:
    with JuiceFSGateway(tmp_path_factory.mktemp("juicefs-etags"), keep_etag=True) as server:
        yield server


@pytest.fixture
def prefix(gateway: JuiceFSGateway, request: pytest.FixtureRequest) -> str:
    """A data set of its own: row i of all holds i."""
    name = f"faults/{request.node.name.replace('[', '-').replace(']', '')[:60]}"
    store = open_store(StoreSpec(uri=f"s3://vol/{name}", options=gateway.storage_options))
    for shard in range(SHARDS):
        put_shard(store, shard, shard * ROWS)
    return name


def put_shard(store: Any, shard: int, first: int) -> None:
    import io

    out = io.BytesIO()
    values = np.arange(first, first + ROWS, dtype=np.int32)
    np.save(out, np.repeat(values, LENGTH).reshape(ROWS, LENGTH))
    store.put(f"{shard:03d}.npy", out.getvalue())


def proxy_of(gateway: JuiceFSGateway, faults: Faults | None = None) -> StoreProxy:
    return StoreProxy(gateway.port, faults=faults)


def dataset(prefix: str, options: dict[str, Any], bucket: str = "vol", **arguments: Any) -> rg.ShardedDataset:
    return rg.ShardedDataset(
        f"s3://{bucket}/{prefix}/*.npy",
        global_batch_size=50,
        lanes=2,
        window=2,
        format=rg.TokenFormat(length=LENGTH),
        storage_options=options,
        **arguments,
    )


def read_all(loader: BatchLoader) -> None:
    """Every sample once, with its own bytes."""
    ids: list[int] = []
    with loader:
        for batch in loader:
            assert (batch["tokens"].numpy() == batch.sample_ids.numpy()[:, None]).all()
            ids += batch.sample_ids.tolist()
    assert sorted(ids) == list(range(SHARDS * ROWS))


def gets(proxy: StoreProxy) -> list[Request]:
    return [request for request in proxy.requests if request.method == "GET" and ".npy" in request.path]


def begun(gateway: JuiceFSGateway, prefix: str) -> Manifest:
    """The run's manifest, made before anything goes wrong."""
    return dataset(prefix, gateway.storage_options).manifest()


class ServiceRounds:
    """Makes of a proxy's server one that has a fixed service time, and turns to its next requests only when it has all
    that the client sends at once: then its rate follows from the concurrency alone, however loaded this machine is.

    counts: requests of each round, before, during and after the `burst`, whose rounds are all refused.
    """

    SERVICE_S = 0.02

    def __init__(self, governor: RequestGovernor, *, burst: range) -> None:
        self.counts: list[int] = []
        self.ends_mono_s: list[float] = []
        self._governor = governor
        self._burst = burst
        self._waiting = 0
        self._changed = threading.Condition()

    def __call__(self, request: Request) -> Strike | None:
        with self._changed:
            mine, deadline_mono_s = len(self.counts), time.monotonic() + 5
            self._waiting += 1
            self._changed.notify_all()
            while len(self.counts) == mine:
                if self._waiting >= self._governor.concurrency or time.monotonic() > deadline_mono_s:
                    self._serve()
                else:
                    self._changed.wait(0.1)
            return Strike(status=503) if mine in self._burst else None

    def _serve(self) -> None:
        time.sleep(self.SERVICE_S)
        self.counts.append(self._waiting)
        self.ends_mono_s.append(time.monotonic())
        self._waiting = 0
        self._changed.notify_all()

    def rate(self, rounds: slice) -> float:
        """Requests a second by the server's own clock, which stands still between rounds."""
        return float(np.mean(self.counts[rounds])) / self.SERVICE_S

    def told(self, rounds: slice) -> str:
        first, *_, last = self.ends_mono_s[rounds]
        on_the_wall = sum(self.counts[rounds][1:]) / (last - first)
        return f"{self.rate(rounds):.0f} requests a second by its own clock, {on_the_wall:.0f} by the one on the wall"


def test_a_burst_of_503_costs_time_only_and_the_full_rate_comes_back(gateway: JuiceFSGateway, prefix: str) -> None:
    governor = RequestGovernor(RequestLimits(first=16, largest=16))
    burst, recovery, after = range(10, 16), range(16, 36), range(36, 46)
    rounds = ServiceRounds(governor, burst=burst)

    def get(number: int) -> int:
        return len(store.get(f"{number % SHARDS:03d}.npy")) if len(rounds.counts) < after.stop else 0

    with proxy_of(gateway, rounds) as proxy:
        store = CloudStore(f"s3://vol/{prefix}", proxy.options(gateway), governor=governor)
        with ThreadPoolExecutor(64) as pool:  # more than are refused, which sleep for a while
            sizes = set(pool.map(get, range(16 * after.stop)))
    before = rounds.rate(slice(burst.start))
    for name, part in (("before", range(burst.start)), ("burst", burst), ("recovery", recovery), ("after", after)):
        print(f"{name}: {rounds.told(slice(part.start, part.stop))}")
    assert len(sizes - {0}) == 1
    refused = sum(rounds.counts[burst.start : burst.stop])
    assert governor.counts.refused == refused < 4 * 16, "the refusals were not listened to"
    assert rounds.rate(slice(burst.stop - 1, burst.stop)) <= before / 8
    needed = sum(rounds.counts[recovery.start : recovery.stop])
    assert needed <= 16 * 17, "one more a round: the way back takes about half the square of the rate"
    assert rounds.rate(slice(after.start, after.stop)) >= 0.9 * before


def test_an_epoch_goes_on_through_503_and_429_and_answers_that_are_cut_off(
    gateway: JuiceFSGateway, prefix: str, tmp_path: Path
) -> None:
    manifest = begun(gateway, prefix)
    strikes = [Strike(status=503), None, Strike(cut_after=2000), Strike(status=429), None, Strike(cut_after=100), None]
    with proxy_of(gateway, lambda request: strikes[request.number % len(strikes)]) as proxy:
        data = dataset(prefix, proxy.options(gateway))
        read_all(data.loader(manifest=manifest, cache_dir=tmp_path))
        assert len(gets(proxy)) > SHARDS


def test_an_answer_that_begins_after_five_seconds_is_waited_for(
    gateway: JuiceFSGateway, prefix: str, tmp_path: Path
) -> None:
    manifest = begun(gateway, prefix)
    with proxy_of(gateway, lambda request: Strike(delay_s=5.0) if request.number == 3 else None) as proxy:
        data = dataset(prefix, proxy.options(gateway))
        read_all(data.loader(manifest=manifest, cache_dir=tmp_path))
        assert len(gets(proxy)) == SHARDS


def test_with_hedging_an_answer_that_does_not_begin_is_asked_for_again(
    gateway: JuiceFSGateway, prefix: str, tmp_path: Path
) -> None:
    manifest = begun(gateway, prefix)
    done = threading.Event()

    def faults(request: Request) -> Strike | None:
        if request.number == 3:
            done.wait(40)  # the answer comes when nobody needs it any more
        return None

    with proxy_of(gateway, faults) as proxy:
        data = dataset(prefix, proxy.options(gateway), hedge_after_s=0.2)
        read_all(data.loader(manifest=manifest, cache_dir=tmp_path))
        assert len(gets(proxy)) > SHARDS
        done.set()


def test_an_object_that_changes_in_mid_run_ends_it_by_name_or_is_taken_where_that_is_wanted(
    gateway: JuiceFSGateway, prefix: str, tmp_path: Path
) -> None:
    with MotoServer() as moto:
        for server in (gateway, moto):
            store = open_store(StoreSpec(uri=f"{server.uri}/{prefix}", options=server.storage_options))
            for shard in range(SHARDS):
                put_shard(store, shard, shard * ROWS)
            data = dataset(prefix, server.storage_options, bucket=server.bucket)
            manifest = data.manifest()
            put_shard(store, 7, 7 * ROWS + 1)
            with pytest.raises(ObjectChangedError, match=rf"{prefix}/007\.npy"):
                read_all(data.loader(manifest=manifest, cache_dir=tmp_path / server.bucket))
            accepting = dataset(prefix, server.storage_options, bucket=server.bucket, on_change="accept")
            with accepting.loader(manifest=manifest, cache_dir=tmp_path / server.bucket) as batches:
                off = sum(int((batch["tokens"][:, 0] != batch.sample_ids).sum()) for batch in batches)
            assert off == ROWS


def test_keys_that_expire_in_mid_run_end_it_at_once_with_the_object_and_what_to_check(
    gateway: JuiceFSGateway, prefix: str, tmp_path: Path
) -> None:
    manifest = begun(gateway, prefix)

    def expired(request: Request) -> Strike | None:
        return Strike(status=400, code="ExpiredToken") if request.number >= 4 else None

    with proxy_of(gateway, expired) as proxy:
        data = dataset(prefix, proxy.options(gateway))
        with pytest.raises(ShardReadError, match=rf"{prefix}/\d+\.npy.*ExpiredToken.*check `key` and `secret`"):
            read_all(data.loader(manifest=manifest, cache_dir=tmp_path))
        assert len(gets(proxy)) <= 3 * SHARDS, "keys that are refused were tried again and again"


def test_a_server_that_refuses_for_good_is_one_error_that_names_the_object_and_the_endpoint(
    gateway: JuiceFSGateway, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray_goodput.storage import cloud
    from ray_goodput.storage.retry import RetryPolicy

    monkeypatch.setattr(cloud, "RetryPolicy", lambda: RetryPolicy(total_s=0.5))
    manifest = begun(gateway, prefix)
    with proxy_of(gateway, lambda _: Strike(status=503)) as proxy:
        data = dataset(prefix, proxy.options(gateway))
        with pytest.raises(ShardReadError, match=rf"{prefix}/\d+\.npy.*HTTP 503 SlowDown.*{proxy.endpoint_url}"):
            read_all(data.loader(manifest=manifest, cache_dir=tmp_path))


def test_a_cached_file_that_is_damaged_is_fetched_again_by_the_next_process(
    gateway: JuiceFSGateway, prefix: str, tmp_path: Path
) -> None:
    manifest = begun(gateway, prefix)
    read_all(dataset(prefix, gateway.storage_options).loader(manifest=manifest, cache_dir=tmp_path))
    files = sorted(tmp_path.rglob("*.arrow"))
    assert len(files) == SHARDS
    for path, at in zip(files[:3], (200, -1, None), strict=True):  # in the data, in the trailer, cut short
        raw = bytearray(path.read_bytes())
        if at is None:
            path.write_bytes(raw[: len(raw) // 2])
        else:
            raw[at] ^= 1
            path.write_bytes(raw)
    with proxy_of(gateway) as proxy:
        data = dataset(prefix, proxy.options(gateway))
        read_all(data.loader(manifest=manifest, cache_dir=tmp_path))
        assert len(gets(proxy)) == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_smaller_than_the_data_costs_fetching_again_only(
    gateway: JuiceFSGateway, prefix: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_nothing_free(monkeypatch)
    data = dataset(prefix, gateway.storage_options, prefetch_shards=2)
    read_all(data.loader(cache_dir=small_disk / "cache"))


def test_a_disk_too_small_for_one_data_shard_is_an_error_with_the_numbers(
    gateway: JuiceFSGateway, prefix: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_nothing_free(monkeypatch)
    (small_disk / "of another").write_bytes(b"x" * 380_000)
    with pytest.raises(CacheFullError, match=r"no room for \d+ bytes: \d+ are missing.*free disk space"):
        read_all(dataset(prefix, gateway.storage_options).loader(cache_dir=small_disk / "cache"))


def leave_nothing_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache may use the whole small disk."""
    from ray_goodput.data import fetch
    from ray_goodput.data.cache import NodeCache

    def cache(root: Path, **arguments: Any) -> NodeCache:
        return NodeCache(root, min_free_bytes=0, **arguments)

    monkeypatch.setattr(fetch, "NodeCache", cache)
