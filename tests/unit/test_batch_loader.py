from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.order import SampleOrder
from ray_goodput.data.loader import Batch, BatchLoader
from ray_goodput.errors import ConfigError, DataError, ShardReadError

ROWS = [7, 0, 5, 1, 12, 3, 9]
NUM_SAMPLES = sum(ROWS)


class MemorySource:
    """Data shards in memory, and a record of what the loader did."""

    def __init__(self, make: Callable[[int], pa.Table] | None = None) -> None:
        self._make = make or numbered
        self.asked: list[int] = []
        self.positions: list[int] = []
        self.num_closed = 0

    def counts(self) -> DataCounts:
        return DataCounts()

    def describe(self, data_shard: int) -> str:
        return f"Data shard {data_shard}"

    def table(self, data_shard: int) -> pa.Table:
        self.asked.append(data_shard)
        return self._make(data_shard)

    def advance(self, samples_consumed: int) -> None:
        self.positions.append(samples_consumed)

    def close(self, timeout_s: float = 5.0) -> None:
        self.num_closed += 1


def numbered(data_shard: int) -> pa.Table:
    start, n = sum(ROWS[:data_shard]), ROWS[data_shard]
    ids = np.arange(start, start + n)
    return pa.table(
        {
            "id": ids,
            "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 2).astype(np.float32)), 2),
            "name": [f"sample {i}" for i in ids],
            "ragged": pa.array([[int(i)] * int(i % 4) for i in ids], pa.list_(pa.int64())),
        }
    )


def make_order(lanes: int = 4) -> SampleOrder:
    return SampleOrder(ROWS, seed=3, lanes=lanes, window=2)


def make_loader(source: MemorySource | None = None, **changed: Any) -> BatchLoader:
    values = {"order": make_order(), "global_batch_size": 8, "source": source or MemorySource(), **changed}
    return BatchLoader(**values)


def plain(batch: Batch) -> tuple[Any, ...]:
    columns = {
        name: value.tolist()
        if isinstance(value, torch.Tensor)
        else [v.tolist() if isinstance(v, torch.Tensor) else v for v in value]
        for name, value in batch.items()
    }
    return batch.index, batch.samples_end, batch.weight, batch.sample_ids.tolist(), columns


def test_each_row_arrives_whole_under_its_sample_id() -> None:
    seen = []
    for batch in make_loader():
        ids = batch.sample_ids.tolist()
        assert batch["id"].tolist() == ids
        assert batch["pair"].tolist() == [[i, i] for i in ids]
        assert batch["pair"].dtype == torch.float32
        assert batch["name"] == [f"sample {i}" for i in ids]
        assert [value.tolist() for value in batch["ragged"]] == [[i] * (i % 4) for i in ids]
        assert (len(batch), batch.num_samples, list(batch)) == (4, len(ids), ["id", "pair", "name", "ragged"])
        seen += ids
    assert sorted(seen) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_a_restart_at_every_batch_gives_the_tail_of_the_unbroken_run(world: int, drop_last: bool) -> None:
    for rank in range(world):
        args = {"epochs": 3, "dp_rank": rank, "dp_world": world, "drop_last": drop_last}
        whole = [plain(batch) for batch in make_loader(**args)]
        assert len(whole) == (3 * (NUM_SAMPLES // 8) if drop_last else -(-3 * NUM_SAMPLES // 8))
        for done, batch in enumerate(whole, 1):
            assert [plain(b) for b in make_loader(**args, start=batch[1])] == whole[done:]


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_step_k_holds_the_same_samples_at_every_world_size(world: int) -> None:
    alone = list(make_loader(epochs=2))
    shared = [list(make_loader(epochs=2, dp_rank=r, dp_world=world)) for r in range(world)]
    for whole, parts in zip(alone, zip(*shared, strict=True), strict=True):
        ids = [i for part in parts for i in part.sample_ids.tolist()]
        assert ids == whole.sample_ids.tolist()
        assert {(p.index, p.samples_end) for p in parts} == {(whole.index, whole.samples_end)}
        weighted = sum(float(p["id"].double().mean()) * p.weight for p in parts if p.num_samples) / world
        np.testing.assert_allclose(weighted, float(whole["id"].double().mean()))


@pytest.mark.parametrize(
    "user_code", [{}, {"transform": lambda sample, rng: sample}, {"collate": lambda s: {"n": [r["id"] for r in s]}}]
)
def test_a_rank_without_samples_gets_a_padding_sample_that_counts_nothing(user_code: dict[str, Any]) -> None:
    order = SampleOrder(ROWS, seed=3, lanes=1, window=2)
    left = NUM_SAMPLES % 4
    assert left == 1
    ranks = [list(make_loader(order=order, global_batch_size=4, dp_rank=r, dp_world=4, **user_code)) for r in range(4)]
    last = [batches[-1] for batches in ranks]
    assert sorted(batch.num_samples for batch in last) == [0, 0, 0, 1]
    assert sorted(batch.weight for batch in last) == [0, 0, 0, 4]
    assert all(len(batch.sample_ids) == batch.num_samples for batch in last)
    for name, value in last[0].items():
        assert all(len(batch[name]) == 1 for batch in last)
        assert {type(batch[name]) for batch in last} == {type(value)}
        if isinstance(value, torch.Tensor):
            assert {(batch[name].shape[1:], batch[name].dtype) for batch in last} == {(value.shape[1:], value.dtype)}
    assert {batch.samples_end for batch in last} == {NUM_SAMPLES}


def test_a_start_off_the_grid_skips_and_repeats_nothing() -> None:
    ids = [i for batch in make_loader(epochs=2) for i in sorted(batch.sample_ids.tolist())]
    head = [
        i for batch in make_loader(epochs=2, global_batch_size=13, order=make_order()) for i in batch["id"].tolist()
    ]
    tail = [i for batch in make_loader(epochs=2, start=13) for i in batch["id"].tolist()]
    assert sorted(head[:13] + tail) == sorted(ids)


def test_nothing_is_left_after_the_last_epoch() -> None:
    source = MemorySource()
    assert list(make_loader(source, start=NUM_SAMPLES)) == []
    assert list(make_loader(epochs=0)) == []
    assert source.num_closed == 1


def test_no_epochs_means_no_end() -> None:
    with make_loader(epochs=None) as loader:
        ends = [batch.samples_end for batch, _ in zip(loader, range(30), strict=False)]
    assert ends == [8 * k for k in range(1, 31)]


def test_only_the_columns_asked_for_are_taken() -> None:
    assert list(next(iter(make_loader(columns=["name", "id"])))) == ["name", "id"]
    with pytest.raises(ShardReadError, match="no column 'y'"):
        next(make_loader(columns=["y"]))


def test_the_source_is_told_what_is_consumed_and_is_closed_once_at_the_end() -> None:
    source = MemorySource()
    loader = make_loader(source)
    ends = [batch.samples_end for batch in loader]
    loader.close()
    assert source.positions == ends
    assert source.num_closed == 1
    assert sorted(source.asked) == [0, 2, 3, 4, 5, 6]


# User code


def augment(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": sample["id"], "noise": rng.random(3), "text": sample["name"].upper(), "flag": bool(sample["id"] > 3)}


def test_a_samples_random_numbers_depend_on_seed_epoch_and_sample_only() -> None:
    def noise(**changed: Any) -> set[tuple[int, tuple[float, ...]]]:
        found = []
        for batch in make_loader(transform=augment, epochs=2, **changed):
            if not batch.num_samples:  # padding
                continue
            assert batch["flag"].dtype == torch.bool
            assert batch["text"] == [f"SAMPLE {i}" for i in batch.sample_ids.tolist()]
            found += zip(batch["id"].tolist(), map(tuple, batch["noise"].tolist()), strict=True)
        return set(found)

    whole = noise()
    assert len(whole) == len({values for _, values in whole}) == 2 * NUM_SAMPLES
    assert set.union(*(noise(dp_rank=r, dp_world=3, global_batch_size=6) for r in range(3))) == whole
    assert noise(order=SampleOrder(ROWS, seed=4, lanes=4, window=2)).isdisjoint(whole)


def test_collate_gets_the_samples_and_its_columns_are_the_batch() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"sum": torch.tensor([s["id"] for s in samples]).sum(), "names": [s["name"] for s in samples]}

    for batch in make_loader(collate=collate):
        assert int(batch["sum"]) == int(batch.sample_ids.sum())
        assert len(batch["names"]) == batch.num_samples


@pytest.mark.parametrize(
    ("user_code", "message"),
    [
        ({"transform": lambda sample, rng: 3}, "transform= returned a int"),
        ({"transform": lambda sample, rng: {f"c{sample['id']}": 1}}, "return the same for all"),
        ({"collate": lambda samples: samples}, "collate= returned a list"),
    ],
)
def test_user_code_that_returns_nonsense_is_told_so(user_code: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(make_loader(**user_code))


def test_an_error_in_transform_is_the_users_own_and_names_the_sample() -> None:
    def broken(sample: Mapping[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        if sample["id"] == 5:
            raise KeyError("label")
        return sample

    with pytest.raises(KeyError, match="label") as caught:
        list(make_loader(transform=broken))
    assert "sample_id 5 in epoch 0" in caught.value.__notes__[0]


# Errors and closing


def test_batches_before_a_broken_shard_are_delivered_then_its_error_is_raised_once() -> None:
    order = make_order()
    last = order.at(NUM_SAMPLES - 1).data_shard
    first_use = min(t for t in range(NUM_SAMPLES) if order.at(t).data_shard == last)

    def make(data_shard: int) -> pa.Table:
        if data_shard == last:
            raise ShardReadError(f"Data shard {last} is broken.")
        return numbered(data_shard)

    source = MemorySource(make)
    loader = make_loader(source, global_batch_size=1, order=order)
    got = []
    with pytest.raises(ShardReadError, match="is broken"):
        for batch in loader:
            got.append(batch.index)
    assert got == list(range(first_use))
    assert list(loader) == []
    assert source.num_closed == 1


def test_closing_a_loader_whose_queue_is_full_ends_its_thread() -> None:
    source = MemorySource()
    loader = make_loader(source, depth=1, epochs=None)
    next(iter(loader))
    loader.close()
    assert not loader._thread.is_alive()
    assert list(loader) == []
    assert source.num_closed == 1


def test_closing_releases_a_consumer_and_a_producer_that_wait_for_a_shard() -> None:
    entered, released = threading.Event(), threading.Event()

    class BlockedSource(MemorySource):
        def counts(self) -> DataCounts:
            return DataCounts()

        def describe(self, data_shard: int) -> str:
            return f"Data shard {data_shard}"

        def table(self, data_shard: int) -> pa.Table:
            entered.set()
            released.wait()
            raise ShardReadError("The source was closed.")

        def close(self, timeout_s: float = 5.0) -> None:
            released.set()

    loader = make_loader(BlockedSource())
    ended: list[list[Batch]] = []
    consumer = threading.Thread(target=lambda: ended.append(list(loader)))
    consumer.start()
    assert entered.wait(30)
    loader.close()
    consumer.join(30)
    assert ended == [[]]
    assert not loader._thread.is_alive()


def test_closing_does_not_wait_longer_than_it_may_for_a_shard_that_never_comes() -> None:
    entered, released = threading.Event(), threading.Event()

    class DeafSource(MemorySource):
        def counts(self) -> DataCounts:
            return DataCounts()

        def describe(self, data_shard: int) -> str:
            return f"Data shard {data_shard}"

        def table(self, data_shard: int) -> pa.Table:
            entered.set()
            released.wait()
            return numbered(data_shard)

    loader = make_loader(DeafSource())
    iter(loader)
    assert entered.wait(30)
    loader.close(timeout_s=0.05)
    assert loader._thread.is_alive()
    released.set()
    loader._thread.join(30)
    assert not loader._thread.is_alive()


def test_a_loader_that_was_never_started_can_be_closed() -> None:
    source = MemorySource()
    loader = make_loader(source)
    loader.close()
    assert source.num_closed == 1
    assert source.asked == []
    assert list(loader) == []


def test_waiting_for_a_batch_is_measured() -> None:
    gate = threading.Event()

    def make(data_shard: int) -> pa.Table:
        gate.wait()
        return numbered(data_shard)

    loader = iter(make_loader(MemorySource(make)))
    threading.Timer(0.1, gate.set).start()
    assert 0.02 < next(loader).fetch_seconds < 30


def test_few_open_shards_only_cost_time() -> None:
    loader = make_loader(epochs=2)
    loader._builder._open._max_open = [1]
    assert [plain(b) for b in loader] == [plain(b) for b in make_loader(epochs=2)]


@pytest.mark.parametrize(("lanes", "window"), [(2, 1), (2, 3), (4, 1), (1, 2)])
def test_a_data_shard_is_opened_once_an_epoch(lanes: int, window: int) -> None:
    """Also where the windows of all lanes end within one batch, which so reads from twice as many."""
    source = MemorySource(lambda shard: pa.table({"id": np.arange(50 * shard, 50 * shard + 50)}))
    order = SampleOrder([50] * 12, seed=0, lanes=lanes, window=window)
    for _ in make_loader(source, order=order, global_batch_size=12, epochs=3):
        pass
    assert max(Counter(source.asked).values()) <= 3


@pytest.mark.parametrize(("lanes", "window"), [(8, 1), (1, 1), (2, 2)])
def test_before_a_batch_opens_the_next_windows_those_that_ended_are_closed(lanes: int, window: int) -> None:
    """Their files stay locked in the cache as long as they are open: it need not hold two windows of each lane."""
    num_opened = most = 0
    closed: list[int] = []

    def opened(shard: int) -> pa.Table:
        nonlocal num_opened, most
        values = np.arange(48 * shard, 48 * shard + 48)
        weakref.finalize(values, closed.append, shard)
        num_opened += 1
        most = max(most, num_opened - len(closed))
        return pa.table({"id": values})

    order = SampleOrder([48] * 32, seed=0, lanes=lanes, window=window)
    loader = make_loader(MemorySource(opened), order=order, global_batch_size=48, epochs=2)
    for _ in loader:
        pass
    assert num_opened <= 2 * 32
    assert most <= (lanes + 1) * window


def test_a_list_column_of_equal_lengths_in_some_shards_only_is_ragged_as_a_whole() -> None:
    order = SampleOrder([2, 2], seed=0, lanes=1, window=2)
    tables = [pa.table({"x": [[1, 2], [3, 4]]}), pa.table({"x": [[5, 6, 7], [8, 9, 10]]})]
    (batch,) = make_loader(MemorySource(tables.__getitem__), order=order, global_batch_size=4)
    expected = [[1, 2], [3, 4], [5, 6, 7], [8, 9, 10]]
    assert [value.tolist() for value in batch["x"]] == [expected[i] for i in batch.sample_ids.tolist()]


def test_tensors_move_and_what_is_not_a_tensor_stays() -> None:
    batch = next(iter(make_loader(device="meta")))
    assert batch["id"].device.type == "meta"
    assert isinstance(batch["name"], list)
    assert batch.sample_ids.device.type == "cpu"
    moved = next(iter(make_loader())).to("meta", non_blocking=True)
    assert (moved["pair"].device.type, moved.index, moved.samples_end) == ("meta", 0, 8)


def test_batches_own_their_memory() -> None:
    tables = {i: numbered(i) for i in range(len(ROWS))}
    for batch in make_loader(MemorySource(tables.__getitem__)):
        batch["id"].zero_()
    assert all(tables[i].equals(numbered(i)) for i in tables)


@pytest.mark.parametrize("bad", [{"depth": 0}, {"dp_rank": 2, "dp_world": 2}, {"global_batch_size": 0}, {"epochs": -1}])
def test_senseless_arguments_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_loader(**bad)
