"""The cache actor and its pool on a real local Ray: order, look-ahead, kills, and bytes that cross the network once."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray import cloudpickle

from ray_goodput.actors import manifest_job
from ray_goodput.actors.shard_cache import shard_cache_actor
from ray_goodput.actors.shard_source import ActorShardSource
from ray_goodput.config import StoreSpec
from ray_goodput.core.order import SampleOrder
from ray_goodput.core.placement import shard_visits
from ray_goodput.data.cache import NodeCache
from ray_goodput.data.dataset import ShardedDataset
from ray_goodput.data.feed import FeedSpec, FetchSpec
from ray_goodput.data.formats import ShardFormat
from ray_goodput.data.listing import Listing
from ray_goodput.data.lookahead import first_needs
from ray_goodput.data.manifest import Manifest
from ray_goodput.data.shard_fetcher import ShardFetcher
from ray_goodput.data.shard_transforms import transformed
from ray_goodput.errors import ShardReadError
from ray_goodput.storage import open_store
from ray_goodput.storage.protocol import ObjectInfo

pytestmark = pytest.mark.timeout(240)

ROWS = 16
SHARDS = 24
BATCH = 8
PREFETCH = 4


class LoggingStore:
    """A local store that writes down each download, by whom, and waits at a gate if there is one."""

    def __init__(self, uri: str, log: Path) -> None:
        self._inner = open_store(StoreSpec(uri=uri))
        self._log = log
        self.uri = uri

    def download_file(self, key: str, path: Path, *, etag: str | None = None) -> ObjectInfo:
        with self._log.open("a") as log:
            log.write(f"{key} {os.getpid()}\n")
        while self._log.with_name("gate").exists():
            time.sleep(0.01)
        return self._inner.download_file(key, path, etag=etag)


class LoggedSpec(FetchSpec):
    """A spec whose store is a `LoggingStore` with the log beside the bucket."""

    def fetcher(self, cache: NodeCache, manifest: Manifest | None = None) -> ShardFetcher:
        store: Any = LoggingStore(self.store.uri, Path(self.store.uri).with_name("log"))
        return ShardFetcher(manifest or self.open_manifest(), store, self.format, cache, self.columns)


@dataclass
class Setup:
    """One dataset, its store and log, and the position of a reader that goes no faster than the prefetching."""

    spec: FetchSpec
    feed: FeedSpec
    root: Path
    log: Path
    order: SampleOrder
    actor: Any
    position: int = 0

    @property
    def coming(self) -> list[int]:
        stop = (self.feed.epochs or 1) * self.order.num_samples
        return [need.data_shard for need in first_needs(shard_visits(self.order, 0, stop, BATCH, (0,), 1))]

    def downloads(self) -> list[tuple[int, int]]:
        """(data shard, pid) of each download so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(int(line.split()[0].split("-")[1].split(".")[0]), int(line.split()[1])) for line in lines]

    def actor_pid(self) -> int:
        return ray.get(self.actor.__ray_call__.remote(lambda self: os.getpid()))

    def num_fetched(self) -> int:
        stats: Any = ray.get(self.actor.stats.remote())
        return stats.counts.fetched_shards

    def source(self, attempt: int = 1) -> ActorShardSource:
        return ActorShardSource(self.actor, "train", self.spec, self.feed, attempt=attempt, root=self.root).open()

    def read(self, source: ActorShardSource, stop: int, *, wait: bool = True) -> list[int]:
        """The samples up to stream position `stop`; with `wait`, only once the pool has cached what they need."""
        seen = []
        for start in range(self.position, stop, BATCH):
            shards, rows = self.order.locate(np.arange(start, start + BATCH))
            for data_shard in np.unique(shards).tolist():
                while wait and not source._fetcher.cache.contains(source._fetcher.name(data_shard)):
                    source.advance(start)
                    time.sleep(0.02)
            seen += [source.table(s)["x"][r].as_py() for s, r in zip(shards.tolist(), rows.tolist(), strict=True)]
            source.advance(start + BATCH)
        self.position = stop
        return seen


def until(condition: Any) -> None:
    while not condition():  # the test's timeout bounds it
        time.sleep(0.02)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test module
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def setup(tmp_path: Path, local_ray: None) -> Iterator[Setup]:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    for i in range(SHARDS):
        pq.write_table(pa.table({"x": np.arange(ROWS) + i * ROWS}), bucket / f"part-{i:02d}.parquet")
    dataset = ShardedDataset(
        f"{bucket}/*.parquet", global_batch_size=BATCH, seed=5, lanes=2, window=1, prefetch_shards=PREFETCH
    )
    manifest = dataset.manifest()
    plain = FetchSpec.of(dataset, manifest)
    spec = LoggedSpec(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    order = spec.order(manifest)
    log = bucket.with_name("log")
    root = tmp_path / "cache"
    actor = shard_cache_actor(tmp_path.name, ray.get_runtime_context().get_node_id(), root=str(root))
    yield Setup(spec, FeedSpec(start=0, dp_ranks=(0,), dp_world=1, epochs=2), root, log, order, actor)
    ray.kill(actor)


def test_everything_is_prefetched_in_order_whoever_is_killed_and_crosses_the_network_once(setup: Setup) -> None:
    # A train worker holds every CPU: the pool must not need one.
    hog: Any = ray.remote(num_cpus=1)(_Hog).remote()
    ray.get(hog.ping.remote())
    source = setup.source()
    until(lambda: len(setup.downloads()) == 2 + PREFETCH)  # the first batch's two shards, and so many beyond
    assert {shard for shard, _ in setup.downloads()} == set(setup.coming[: 2 + PREFETCH])
    assert _displacement(setup) <= 1  # two pool actors, each on its own way
    seen = setup.read(source, 6 * ROWS)
    pools = {pid for _, pid in setup.downloads()}
    assert setup.actor_pid() not in pools

    victim = setup.downloads()[-1][1]
    os.kill(victim, signal.SIGKILL)
    seen += setup.read(source, 14 * ROWS)
    assert {pid for _, pid in setup.downloads()[-4:]} != {victim}

    killed = setup.actor_pid()
    os.kill(killed, signal.SIGKILL)
    seen += setup.read(source, SHARDS * ROWS)
    later = {pid for _, pid in setup.downloads()[-2:]}
    assert later.isdisjoint(pools | {killed, setup.actor_pid()})  # a new pool of a new actor
    before = len(setup.downloads())
    assert before == SHARDS
    seen += setup.read(source, 2 * SHARDS * ROWS)  # the second epoch: not one request
    assert Counter(seen) == dict.fromkeys(range(SHARDS * ROWS), 2)
    assert Counter(shard for shard, _ in setup.downloads()) == dict.fromkeys(range(SHARDS), 1)
    assert _displacement(setup) <= PREFETCH + 2  # what a killed one held comes last
    source.close()
    until(lambda: not any(psutil.pid_exists(pid) and _alive(pid) for pid in later))
    ray.kill(hog)


def test_a_pool_actor_killed_in_mid_fetch_costs_one_more_fetch_of_that_shard_at_most(setup: Setup) -> None:
    gate = setup.log.with_name("gate")
    gate.touch()
    source = setup.source()
    until(lambda: len(setup.downloads()) == 2)
    shard, pid = setup.downloads()[0]
    os.kill(pid, signal.SIGKILL)
    gate.unlink()
    seen = setup.read(source, SHARDS * ROWS)
    source.close()
    assert Counter(seen) == dict.fromkeys(range(SHARDS * ROWS), 1)
    counts = Counter(key for key, _ in setup.downloads())
    assert counts.pop(shard) <= 2
    assert set(counts.values()) == {1}


def test_a_shard_asked_for_before_the_pool_is_there_is_fetched_by_the_actor_at_once(setup: Setup) -> None:
    source = setup.source()
    first = setup.coming[0]
    assert source.table(first).num_rows == ROWS
    assert setup.downloads()[0] == (first, setup.actor_pid())
    seen = setup.read(source, SHARDS * ROWS, wait=False)
    assert Counter(seen) == dict.fromkeys(range(SHARDS * ROWS), 1)
    assert Counter(shard for shard, _ in setup.downloads()) == dict.fromkeys(range(SHARDS), 1)
    # A new attempt from an earlier position: everything is there, so no pool starts, and no request is made.
    setup.position = 0
    again = setup.source(attempt=2)
    assert len(setup.read(again, SHARDS * ROWS)) == SHARDS * ROWS
    stats: Any = ray.get(setup.actor.stats.remote())
    assert stats.feeds["train"].attempt == 2
    assert stats.feeds["train"].pool_runs == 0
    assert len(setup.downloads()) == SHARDS
    source.close()  # the old attempt's goodbye does not end the new feed
    assert ray.get(setup.actor.advance.remote("train", 0, 2))
    again.close()


def test_shards_are_transformed_once_each_in_tasks_and_written_by_the_nodes_own_actors(setup: Setup) -> None:
    hog: Any = ray.remote(num_cpus=1)(_Hog).remote()  # a train worker holds every CPU
    ray.get(hog.ping.remote())
    log = setup.log.with_name("transforms")

    def negated(table: pa.Table) -> pa.Table:
        with log.open("a") as file:
            file.write(f"{table['x'][0].as_py() // ROWS} {os.getpid()}\n")
        return pa.table({"x": pa.array(-table["x"].to_numpy())})

    fmt: Any = transformed(cast(ShardFormat, setup.spec.format), negated, "1", "same")
    setup.spec = replace(setup.spec, format=fmt)
    source = setup.source()
    seen = setup.read(source, 2 * SHARDS * ROWS)

    def all_told() -> bool:
        source.advance(setup.position)  # as a training loop goes on doing: the last report waits for the next one
        return setup.num_fetched() == SHARDS

    until(all_told)
    source.close()
    assert Counter(seen) == {-x: 2 for x in range(SHARDS * ROWS)}
    lines = [line.split() for line in log.read_text().splitlines()]
    assert Counter(int(shard) for shard, _ in lines) == dict.fromkeys(range(SHARDS), 1)
    assert {int(pid) for _, pid in lines} == {pid for _, pid in setup.downloads()}
    assert setup.actor_pid() not in {pid for _, pid in setup.downloads()}
    ray.kill(hog)


def test_a_ray_data_job_makes_the_same_manifest_as_threads_and_names_a_bad_file(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manifest_job, "WORTH_IT", SHARDS)
    monkeypatch.setattr(manifest_job, "_OBJECTS_PER_TASK", 7)
    dataset = ShardedDataset(f"{setup.spec.store.uri}/*.parquet", global_batch_size=BATCH)
    assert manifest_job.inspect_in_cluster(dataset.store_spec, Listing.of([]), dataset.shard_format()) is None
    made = dataset.manifest(inspect=manifest_job.inspect_in_cluster)
    assert made.to_bytes() == dataset.manifest().to_bytes()
    assert "threads do it" not in caplog.text
    (Path(setup.spec.store.uri) / "part-09.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ShardReadError, match=r"part-09\.parquet is no readable parquet"):
        dataset.manifest(inspect=manifest_job.inspect_in_cluster)


def test_a_worker_whose_actor_is_gone_for_good_fetches_by_itself_and_errors_come_out_as_themselves(
    setup: Setup,
) -> None:
    source = setup.source()
    (Path(setup.spec.store.uri) / f"part-{setup.coming[-1]:02d}.parquet").unlink()
    with pytest.raises(ShardReadError, match=f"part-{setup.coming[-1]:02d}.parquet"):
        source.table(setup.coming[-1])
    ray.kill(setup.actor)
    source._answer_timeout_s = 1.0
    assert source.table(setup.coming[-2]).num_rows == ROWS
    assert setup.downloads()[-1] == (setup.coming[-2], os.getpid())
    source.advance(BATCH)
    source.close()


def _displacement(setup: Setup) -> int:
    """How far a download was from its place in the order of need."""
    places = [setup.coming.index(shard) for shard, _ in setup.downloads()]
    return max(abs(place - i) for i, place in enumerate(places))


class _Hog:
    def ping(self) -> bool:
        return True


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
