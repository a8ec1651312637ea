from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ray_goodput.core import order as order_module
from ray_goodput.core.batches import BatchPlan, slot_bounds
from ray_goodput.core.order import TAG_ROWS, SampleOrder, _stable_argsort, permutation, permuted_at, philox
from ray_goodput.errors import ConfigError, EmptyDatasetError


def test_more_lanes_than_samples_is_legal() -> None:
    order = SampleOrder([2, 0, 1], seed=0, lanes=50, window=3)
    assert sorted(order.sample_ids(*order.locate(np.arange(3))).tolist()) == [0, 1, 2]


def test_seed_epoch_lanes_and_window_each_change_the_order() -> None:
    def ids(epoch: int = 0, **changed: int) -> list[int]:
        order = SampleOrder([30] * 10, **{"seed": 0, "lanes": 4, "window": 2, **changed})
        return order.sample_ids(*order.locate(np.arange(300) + epoch * 300)).tolist()

    variants = [ids(), ids(seed=1), ids(seed=2**32), ids(lanes=5), ids(window=3), ids(epoch=1), ids(epoch=2**32)]
    assert len({tuple(v) for v in variants}) == len(variants)


def test_integers_above_32_bits_get_streams_of_their_own() -> None:
    streams = [philox(TAG_ROWS, *numbers).random_raw(2).tolist() for numbers in [(2**32, 0), (0, 1), (1, 0), (0, 0, 1)]]
    assert len({tuple(s) for s in streams}) == 4


def test_an_order_of_no_rows_is_refused() -> None:
    with pytest.raises(EmptyDatasetError, match="3 data shards have no rows"):
        SampleOrder([0, 0, 0], seed=0, lanes=1, window=1)
    with pytest.raises(EmptyDatasetError):
        SampleOrder([], seed=0, lanes=1, window=1)


@pytest.mark.parametrize("bad", [{"seed": -1}, {"seed": 2**64}, {"lanes": 0}, {"window": 0}])
def test_senseless_parameters_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SampleOrder([1], **{"seed": 0, "lanes": 1, "window": 1, **bad})
    with pytest.raises(ConfigError, match="negative number of rows"):
        SampleOrder([3, -1], seed=0, lanes=1, window=1)


def test_no_sample_stands_before_the_first() -> None:
    with pytest.raises(ValueError, match="negative"):
        SampleOrder([3], seed=0, lanes=1, window=1).at(-1)


def test_locating_nothing_gives_nothing() -> None:
    shards, rows = SampleOrder([3], seed=0, lanes=1, window=1).locate(np.empty(0, np.int64))
    assert len(shards) == len(rows) == 0


@pytest.mark.parametrize("n", [4095, 4096, 4097, 70_000])
def test_the_fast_sort_is_the_stable_argsort(n: int) -> None:
    keys = philox(TAG_ROWS, n).random_raw(n)
    assert (_stable_argsort(keys) == np.argsort(keys, kind="stable")).all()


def test_the_fast_sort_orders_keys_that_tie() -> None:
    keys = philox(TAG_ROWS, 0).random_raw(5000)
    keys[100:200] = keys[4000]  # equal keys: the index decides
    keys[300] = keys[4500] ^ np.uint64(1)  # equal in the half that is sorted first
    keys[[0, 4999]] = np.uint64(7), np.uint64(3)  # the smallest of all, in falling order
    keys[[1, 4998]] = np.uint64(2**64 - 1), np.uint64(2**64 - 3)
    assert (_stable_argsort(keys) == np.argsort(keys, kind="stable")).all()


@pytest.mark.parametrize("n", [1, 4095, 4096, 70_000])
def test_a_few_places_of_a_permutation_are_had_without_sorting_it(n: int) -> None:
    whole = permutation(n, TAG_ROWS, 1, 2)
    places = np.unique(np.array([0, n // 3, n // 2, n - 1], dtype=np.intp))
    assert permuted_at(places, n, TAG_ROWS, 1, 2).tolist() == whole[places].tolist()


def test_places_whose_keys_tie_are_those_of_the_stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tying:
        def random_raw(self, n: int) -> np.ndarray:
            keys = np.random.Philox(key=5).random_raw(n) >> np.uint64(50)  # many equal ones
            return keys << np.uint64(50)

    monkeypatch.setattr(order_module, "philox", lambda *_: Tying())
    whole = permutation(5000, TAG_ROWS)
    places = np.arange(0, 5000, 977)
    assert permuted_at(places, 5000, TAG_ROWS).tolist() == whole[places].tolist()


@pytest.mark.parametrize("lanes", [1, 64])
def test_a_seek_in_four_billion_rows_touches_one_lanes_parts_and_one_windows_rows(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_shards, rows_each, window = 100_000, 40_000, 8
    drawn: list[int] = []
    sorted_keys: list[int] = []
    real_philox, real_argsort = order_module.philox, order_module._stable_argsort

    class Counted:
        def __init__(self, *key: int) -> None:
            self._stream = real_philox(*key)

        def random_raw(self, n: int) -> np.ndarray:
            drawn.append(n)
            return self._stream.random_raw(n)

    def counted_argsort(keys: np.ndarray) -> np.ndarray:
        sorted_keys.append(len(keys))
        return real_argsort(keys)

    tracemalloc.start()
    order = SampleOrder(np.full(num_shards, rows_each), seed=3, lanes=lanes, window=window)
    monkeypatch.setattr(order_module, "philox", Counted)
    monkeypatch.setattr(order_module, "_stable_argsort", counted_argsort)
    found = order.at(987_654_321_987)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    parts = num_shards // lanes + 2
    assert len(drawn) == 2 and drawn[0] <= parts and drawn[1] <= window * rows_each
    assert sum(sorted_keys) <= parts  # the window's rows are not sorted for one of them
    assert peak_bytes < 50e6
    monkeypatch.undo()
    again = SampleOrder(np.full(num_shards, rows_each), seed=3, lanes=lanes, window=window)
    whole_window = np.arange(987_654_321_987 - 20 * lanes, 987_654_321_987 + lanes, lanes)
    shards, rows = again.locate(whole_window)
    assert found == (shards[-1], rows[-1])


def test_permutations_look_uniform() -> None:
    counts = np.zeros((6, 6))
    for trial in range(3000):
        counts[np.arange(6), permutation(6, TAG_ROWS, trial)] += 1
    assert abs(counts - 500).max() < 110  # 5 sigma


def test_neighbouring_samples_of_a_lane_come_from_window_shards_only() -> None:
    order = SampleOrder([100] * 20, seed=3, lanes=1, window=4)
    shards, _ = order.locate(np.arange(400))
    assert len(set(shards.tolist())) == 4


def test_a_position_off_the_grid_starts_a_batch_of_its_own() -> None:
    batch = BatchPlan(num_samples=100, global_batch_size=8).at(13)
    assert batch is not None
    assert (batch.start, batch.stop, batch.index) == (13, 21, 1)


def test_batches_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(ConfigError, match="no batch at all"):
        BatchPlan(num_samples=5, global_batch_size=6, drop_last=True)
    with pytest.raises(ConfigError, match="global_batch_size=0"):
        BatchPlan(num_samples=5, global_batch_size=0)
    with pytest.raises(ConfigError, match="dp_rank=2"):
        slot_bounds(4, 2, 2)
