"""The shuffle report: what it measures, when it warns, and that its prediction is what batches really do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ray_goodput as rg
from ray_goodput.config import StoreSpec
from ray_goodput.core.order import SampleOrder
from ray_goodput.core.shuffle import judge, sortedness_of
from ray_goodput.storage import open_store
from ray_goodput.train.datasets import check_dataset

rng = np.random.default_rng(0)


def test_sortedness_is_the_share_of_variance_between_shards() -> None:
    assert sortedness_of([rng.normal(size=2000) for _ in range(12)]) < 0.01
    shifted = [rng.normal(size=2000) + center for center in rng.normal(size=400)]
    assert sortedness_of(shifted) == pytest.approx(0.5, abs=0.1)  # as much between as within
    assert sortedness_of([np.full(50, k) for k in range(8)]) == 1
    assert sortedness_of([np.full(50 + k, f"class {k}") for k in range(8)]) == 1
    assert sortedness_of([rng.integers(0, 10, 3000) for _ in range(8)]) < 0.01  # labels, mixed
    halves = [np.where(rng.random(4000) < (0.9 if k % 2 else 0.1), "a", "b") for k in range(60)]
    assert sortedness_of(halves) == pytest.approx(0.64, abs=0.03)  # 0.4**2 of 0.25


@pytest.mark.parametrize(
    "values", [[], [[1, 2]], [[1, 2], []], [[3, 3], [3, 3]], [["x"], ["y"]], [[1.0], [2.0], [3.0]]]
)
def test_where_there_is_nothing_to_tell_data_count_as_mixed(values: list[list[Any]]) -> None:
    assert sortedness_of([np.array(part) for part in values]) == 0


def test_the_bias_is_what_windows_of_sorted_data_show() -> None:
    num_shards, rows, lanes, window, batch = 400, 64, 8, 4, 256
    order = SampleOrder([rows] * num_shards, seed=1, lanes=lanes, window=window)
    label = rng.normal(size=num_shards)  # one value a shard: sorted altogether
    per_window = rows * window * lanes
    shards, _ = order.locate(np.arange(order.num_samples // per_window * per_window))
    windows = label[shards].reshape(-1, per_window).mean(axis=1)
    predicted = judge(num_shards=num_shards, lanes=lanes, window=window, batch=batch, sortedness=1).bias
    measured = windows.std() / (label.std() / np.sqrt(batch))
    assert measured == pytest.approx(predicted, rel=0.35)  # 12 windows: their spread is known to a fifth


def test_a_window_too_small_is_told_with_one_that_is_large_enough() -> None:
    order = {"num_shards": 10_000, "lanes": 64, "window": 8, "batch": 4096}
    verdict = judge(**order, sortedness=0.9, column="label")
    assert verdict.too_small
    assert "drawn from 512 of 10000 data shards" in verdict.why
    assert "90% of the variance of 'label' lies between shards" in verdict.why
    assert "use window=43" in verdict.why
    assert not judge(**{**order, "window": 43}, sortedness=0.9, column="label").too_small
    assert judge(**{**order, "window": 42}, sortedness=0.9, column="label").too_small
    assert not judge(**order, sortedness=0.01, column="label").too_small
    whole = judge(num_shards=500, lanes=64, window=8, batch=4096, sortedness=1)
    assert (whole.bias, whole.too_small) == (0, False)
    assert "which is all of them" in whole.why


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_dataset_sorted_by_label_is_warned_of_and_a_mixed_one_is_not(
    tmp_path: Path, is_sorted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    for i in range(40):
        labels = np.full(200, i // 4) if is_sorted else rng.integers(0, 10, 200)
        tokens = [[0] * (1 + k % 7) for k in range(200)]
        table = pa.table({"label": labels, "tokens": tokens, "text": [f"{k}" * 3 for k in range(200)]})
        pq.write_table(table, tmp_path / "data" / f"{i:02d}.parquet")
    (tmp_path / "data" / "empty").mkdir()
    dataset = rg.ShardedDataset(str(tmp_path / "data"), global_batch_size=64, lanes=2, window=2)
    with caplog.at_level(logging.INFO):
        report = dataset.shuffle_report(num_shards=10)
    assert set(report.sortedness) == {"label", "tokens", "text"}
    assert report.verdict.too_small == is_sorted
    assert (report.sortedness["label"] > 0.95) == is_sorted
    assert report.sortedness["tokens"] == 0
    record = next(record for record in caplog.records if "Shuffling" in record.message)
    assert record.levelno == (logging.WARNING if is_sorted else logging.INFO)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        check_dataset(open_store(StoreSpec(uri=str(tmp_path / "run"))), "train", dataset, None)
    assert sum("should the data be sorted by shard" in record.message for record in caplog.records) == 1
