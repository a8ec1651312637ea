"""Laws of the node's cache actor, in one process: the plain class with a pool that runs in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_goodput.actors import shard_feed
from ray_goodput.actors.shard_cache import ShardCache, UnknownDatasetError
from ray_goodput.actors.shard_feed import Admission, Delivery
from ray_goodput.config import StoreSpec
from ray_goodput.core.order import SampleOrder
from ray_goodput.core.placement import shard_visits
from ray_goodput.core.request_rate import RequestFate, RequestRecord
from ray_goodput.data.feed import FeedSpec, FetchSpec
from ray_goodput.data.lookahead import first_needs
from ray_goodput.data.shard_fetcher import Fetched
from ray_goodput.errors import CacheFullError, ShardReadError

ROWS = 10
SHARDS = 20
FEED = FeedSpec(start=0, dp_ranks=(0,), dp_world=1, epochs=2)


class FakeShard:
    size_bytes = 1000
    rows = ROWS


class FakeManifest:
    rows = (ROWS,) * SHARDS
    sizes = np.full(SHARDS, 1000)
    num_shards = SHARDS
    digest = "m"

    def shard(self, i: int) -> Any:
        return FakeShard()


class FakeFetcher:
    """Fetches by writing a small table; counts."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.fetched: list[int] = []
        self.broken: set[int] = set()

    def name(self, data_shard: int) -> str:
        return f"{data_shard:032x}"

    def ensure(self, data_shard: int, *, awaited: bool = False) -> Fetched:
        if data_shard in self.broken:
            raise ShardReadError(f"shard {data_shard} is broken")
        if self.cache.contains(self.name(data_shard)):
            return Fetched()
        self.fetched.append(data_shard)
        self.cache.write(self.name(data_shard), pa.table({"x": [data_shard]}), awaited=awaited)
        self.cache.count_fetched(1000)
        return Fetched(1000)


class FakeSpec(FetchSpec):
    """A spec whose parts are the fakes."""

    def open_manifest(self) -> Any:
        return FakeManifest()

    def fetcher(self, cache: Any, manifest: Any = None) -> Any:
        return FakeFetcher(cache)


def spec_of(**changes: Any) -> FetchSpec:
    options: dict[str, Any] = {
        "manifest_digest": "m", "manifest": b"", "store": StoreSpec(uri="/nowhere"), "format": None, "columns": None,
        "seed": 1, "lanes": 1, "window": 1, "global_batch_size": 5, "prefetch_shards": 3, "cache_limit_bytes": None,
        "pin": True,
    }  # fmt: skip
    return FakeSpec(**(options | changes))


def coming(epochs: int = 2, start: int = 0) -> list[int]:
    order = SampleOrder(FakeManifest.rows, seed=1, lanes=1, window=1)
    visits = shard_visits(order, start, epochs * SHARDS * ROWS, 5, (0,), 1)
    return [need.data_shard for need in first_needs(visits)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardCache]:
    monkeypatch.setattr(shard_feed, "_ADMIT_WAIT_S", 0.05)
    cache = ShardCache(tmp_path)
    yield cache
    assert cache.close(timeout_s=20)


def fetched(cache: ShardCache) -> list[int]:
    return cache._datasets["train"].fetcher.fetched  # type: ignore[attr-defined] (a stand-in's)


def until(condition: Any) -> None:
    while not condition():  # the test's timeout bounds it
        threading.Event().wait(0.005)


def consume(cache: ShardCache, epochs: int = 2) -> None:
    """The consumer reads everything, as fast as it is there, and the feed comes to its end."""
    for i, data_shard in enumerate(coming(epochs)):
        until(lambda name=f"{data_shard:032x}": cache._datasets["train"].fetcher.cache.contains(name))
        cache.advance("train", (i + 1) * ROWS)
    until(lambda: not cache.stats().feeds["train"].running)


def test_shards_are_fetched_in_the_order_of_need_and_no_farther_than_the_look_ahead(cache: ShardCache) -> None:
    cache.begin("train", spec_of(), FEED, attempt=1)
    until(lambda: len(fetched(cache)) == 4)  # one of the next batch, three beyond
    assert fetched(cache) == coming()[:4]
    assert cache.admit("train", 4, 1)[0] is Admission.WAIT
    assert cache.advance("train", 35, attempt=1)
    until(lambda: len(fetched(cache)) == 7)
    consume(cache)
    assert fetched(cache) == coming()[:SHARDS]  # and none again in the second epoch: all are cached
    assert cache.stats().counts.fetched_shards == SHARDS


def test_nothing_starts_a_pool_when_everything_is_cached(cache: ShardCache) -> None:
    cache.open_dataset("train", spec_of())
    for data_shard in range(SHARDS):
        cache.ensure("train", data_shard)
    cache.begin("train", spec_of(), FEED, attempt=1)
    consume(cache)
    assert cache.stats().feeds["train"].pool_runs == 0


def test_long_sequences_are_fed_to_the_pool_in_chunks(cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_feed, "CHUNK", 8)
    cache.begin("train", spec_of(), FEED, attempt=1)
    consume(cache)
    assert cache.stats().feeds["train"].pool_runs == 3
    assert fetched(cache) == coming()[:SHARDS]


def test_an_endless_feed_goes_on_over_epochs(cache: ShardCache) -> None:
    hundred_epochs_on = FeedSpec(start=100 * SHARDS * ROWS, dp_ranks=(0,), dp_world=1, epochs=None)
    cache.begin("train", spec_of(), hundred_epochs_on, attempt=1)
    until(lambda: len(fetched(cache)) == 4)  # only what is needed there: one of the next batch, three beyond
    assert cache.stats().feeds["train"].running


def test_the_same_call_again_changes_nothing_a_new_attempt_replaces_and_an_old_one_is_ignored(
    cache: ShardCache,
) -> None:
    spec = spec_of()
    first = cache.begin("train", spec, FEED, attempt=1)
    assert cache.begin("train", spec, FEED, attempt=1) == first
    second = cache.begin("train", spec, FeedSpec(start=50, dp_ranks=(0,), dp_world=1, epochs=2), attempt=2)
    assert second != first
    assert cache.begin("train", spec, FEED, attempt=1) is None
    assert cache.stats().feeds["train"].attempt == 2
    assert cache.admit("train", 0, first or 0)[0] is Admission.STOP
    assert cache.advance("train", 300, attempt=1)  # of the dead attempt: no error, no effect
    assert cache.stats().feeds["train"].consumed == 50
    cache.stop_feed("train", first or 0)
    assert cache.stats().feeds["train"].attempt == 2
    cache.stop_feed("train", second or 0)
    assert not cache.advance("train", 60, attempt=2)


def test_what_a_restarted_actor_has_forgotten_is_said_clearly_and_told_again(cache: ShardCache) -> None:
    with pytest.raises(UnknownDatasetError, match="restarted"):
        cache.ensure("train", 0)
    with pytest.raises(UnknownDatasetError):
        cache.start_feed("train", FeedSpec(start=0, dp_ranks=(0,), dp_world=1, epochs=1), attempt=1)
    assert not cache.advance("train", 5)
    cache.begin("train", spec_of(), FEED, attempt=1, consumed=115)
    until(lambda: len(fetched(cache)) >= 4)
    done = coming()[: 115 // ROWS]
    assert set(fetched(cache)) & set(done[:-1]) == set()  # goes on where the consumer is, not where it began


def test_a_shard_that_cannot_be_prefetched_costs_a_warning_and_stops_nothing(
    cache: ShardCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pool(self: ShardCache, name: str, feed_id: int, numbers: range) -> Iterator[Delivery]:
        for number in numbers:
            admission, data_shard = self.admit(name, number, feed_id)
            error = ""
            try:
                if admission is Admission.FETCH:
                    self.ensure(name, data_shard)
            except ShardReadError as problem:
                error = str(problem)
            yield Delivery(number=number, data_shard=data_shard, error=error)

    monkeypatch.setattr(ShardCache, "run_pool", pool)
    cache.open_dataset("train", spec_of())
    bad = coming()[2]
    cache._datasets["train"].fetcher.broken.add(bad)  # type: ignore[attr-defined] (a stand-in's)
    cache.begin("train", spec_of(), FeedSpec(start=0, dp_ranks=(0,), dp_world=1, epochs=1), attempt=1)
    for i in range(SHARDS):
        cache.advance("train", i * ROWS)
        until(lambda number=i: cache.stats().feeds["train"].delivered > number)
    until(lambda: not cache.stats().feeds["train"].running)
    assert fetched(cache) == [shard for shard in coming(1) if shard != bad]
    assert f"cannot prefetch data shard {bad}" in caplog.text
    assert cache.stats().feeds["train"].errors == 1
    with pytest.raises(ShardReadError, match="is broken"):
        cache.ensure("train", bad)


def test_a_pool_that_fails_as_a_whole_is_started_again_where_it_was(
    cache: ShardCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_feed, "_FIRST_PAUSE_S", 0.01)
    whole = ShardCache.run_pool
    fail_after = [3, 0, 10**6]

    def pool(self: ShardCache, name: str, feed_id: int, numbers: range) -> Iterator[Delivery]:
        left = fail_after.pop(0)
        for delivery in whole(self, name, feed_id, numbers):
            if not left:
                raise RuntimeError("the pool broke")
            left -= 1
            yield delivery

    monkeypatch.setattr(ShardCache, "run_pool", pool)
    cache.begin("train", spec_of(), FEED, attempt=1)
    consume(cache)
    assert caplog.text.count("the pool broke") == 2
    assert fetched(cache) == coming()[:SHARDS]


def test_a_cache_too_small_for_what_is_needed_at_once_is_refused_with_the_number(cache: ShardCache) -> None:
    with pytest.raises(CacheFullError, match=r"up to 8 data shards at once, 8000 bytes.*at least 32000"):
        cache.begin("train", spec_of(cache_limit_bytes=7999, lanes=2, window=4), FEED, attempt=1)


def test_next_uses_name_what_is_needed_soon_over_all_datasets(cache: ShardCache) -> None:
    cache.begin("train", spec_of(), FEED, attempt=1)
    uses = cache.next_uses()
    assert [f"{shard:032x}" for shard in coming()[:SHARDS]] == sorted(uses, key=lambda name: uses[name])
    cache.begin("eval", spec_of(), FeedSpec(start=200, dp_ranks=(0,), dp_world=1, epochs=None), attempt=1)
    assert min(cache.next_uses().values()) == 0


def test_pool_actors_share_the_nodes_request_rate_and_a_refusal_to_one_slows_all(cache: ShardCache) -> None:
    server = "s3://a-bucket-of-this-test at "
    before = cache.stats().requests.refused
    alone = cache.request_shares("a", {server: []})[server]
    both = cache.request_shares("b", {})[server]
    assert both == alone // 2
    refused = RequestRecord(fate=RequestFate.REFUSED, began_mono_s=1.0, ended_mono_s=2.0)
    assert cache.request_shares("a", {server: [refused]})[server] == both // 2
    assert cache.request_shares("b", {})[server] == both // 2
    assert cache.stats().requests.refused == before + 1
