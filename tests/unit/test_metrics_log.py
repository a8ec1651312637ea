"""Curves of training metrics: bounded, the same after a restart of their keeper, and never in training's way."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from ray_goodput.actors.metrics_store import MetricsStore
from ray_goodput.actors.run_metrics import RunMetrics
from ray_goodput.config import StoreSpec
from ray_goodput.errors import ObjectNotFoundError, StorageError
from ray_goodput.goodput.metrics_log import MAX_NAMES, MetricsLog, main_metric, object_name
from ray_goodput.storage import ObjectStore, open_store


class ManualClock:
    now = 100.0

    def mono_s(self) -> float:
        return self.now

    def at_s(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSpec(uri=str(tmp_path)))


def curve(log: MetricsLog, name: str = "loss") -> list[tuple[int, float]]:
    return [(p.step, p.values[name]) for p in log.points]


def test_every_step_is_a_point_while_there_is_room() -> None:
    log = MetricsLog(1, max_points=4)
    for step in range(1, 5):
        log.add(step, {"loss": step / 2}, 10.0 + step)
    assert curve(log) == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]


@pytest.mark.parametrize("num_steps", [5, 8, 9, 100, 1023, 1024, 1025])
def test_a_longer_curve_keeps_the_mean_in_as_many_points(num_steps: int) -> None:
    log = MetricsLog(1, max_points=8)
    for step in range(1, num_steps + 1):
        log.add(step, {"loss": float(step)}, float(step))
    assert 4 <= len(log.points) <= 8
    assert sum(p.num for p in log.points) == num_steps
    assert sum(p.num * p.values["loss"] for p in log.points) == pytest.approx(num_steps * (num_steps + 1) / 2)
    assert log.points[-1].step == num_steps and log.points[-1].at_s == num_steps
    assert MetricsLog.from_bytes(log.to_bytes(), max_points=8).points == log.points


def test_a_restored_curve_goes_on_as_if_nothing_had_been() -> None:
    whole, parted = MetricsLog(1, max_points=8), MetricsLog(1, max_points=8)
    for step in range(1, 200):
        whole.add(step, {"loss": float(step)}, float(step))
        parted.add(step, {"loss": float(step)}, float(step))
        parted = MetricsLog.from_bytes(parted.to_bytes(), max_points=8)
    assert parted.points == whole.points


def test_steps_told_twice_count_once() -> None:
    log = MetricsLog(1)
    for step in (1, 2, 2, 1, 3):
        log.add(step, {"loss": 1.0}, 0.0)
    assert [p.step for p in log.points] == [1, 2, 3]


def test_what_is_not_finite_is_kept_as_not_a_number() -> None:
    log = MetricsLog(1)
    log.add(1, {"loss": math.inf, "lr": 0.1}, 0.0)
    log.add(2, {"loss": 1.0, "lr": 0.1}, 0.0)
    again = MetricsLog.from_bytes(log.to_bytes())
    assert b"Infinity" not in log.to_bytes() and b"NaN" not in log.to_bytes()
    assert math.isnan(again.points[0].values["loss"]) and again.points[0].values["lr"] == 0.1
    assert again.points[1].values["loss"] == 1.0


def test_the_number_of_names_is_bounded() -> None:
    log = MetricsLog(1)
    log.add(1, {f"m{i}": 0.0 for i in range(1000)}, 0.0)
    log.add(2, {f"n{i}": 0.0 for i in range(1000)}, 0.0)
    assert len(log.points[0].values) == MAX_NAMES and not log.points[1].values


def test_the_main_metric_is_the_loss_if_there_is_one() -> None:
    def of(*names: str) -> MetricsLog:
        log = MetricsLog(1)
        log.add(1, dict.fromkeys(names, 0.0), 0.0)
        return log

    assert main_metric([of("acc", "train_loss"), of("loss")]) == "loss"
    assert main_metric([of("acc", "train_loss")]) == "train_loss"
    assert main_metric([of("acc")]) == "acc"
    assert main_metric([]) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"[1]\n", "cannot be read"),
        (MetricsLog(1).to_bytes().replace(b'"version":1', b'"version":2'), "version 2"),
        (MetricsLog(1).to_bytes() + b'{"step": 3, "at"', "cannot be read"),
        (MetricsLog(1).to_bytes() + b'{"step": 3}\n', "cannot be read"),
    ],
)
def test_damaged_metrics_are_one_clear_error(data: bytes, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        MetricsLog.from_bytes(data)


def test_a_store_writes_only_when_it_is_time_and_a_later_life_goes_on(store: ObjectStore) -> None:
    clock = ManualClock()
    first = MetricsStore(store=store, clock=clock)
    first.add(1, [(1, {"loss": 4.0})])
    first.flush()
    with pytest.raises(ObjectNotFoundError):
        store.get(object_name(1))
    clock.now += first.flush_interval_s
    first.flush()
    second = MetricsStore(store=store, clock=clock)
    second.add(1, [(1, {"loss": 4.0}), (2, {"loss": 3.0})])
    second.add(2, [(2, {"loss": 3.5})])
    second.flush(now=True)
    assert curve(MetricsLog.from_bytes(store.get(object_name(1)))) == [(1, 4.0), (2, 3.0)]
    assert curve(MetricsLog.from_bytes(store.get(object_name(2)))) == [(2, 3.5)]
    second.add(2, [(3, {"loss": 3.0})])
    second.flush(now=True)
    assert curve(MetricsLog.from_bytes(store.get(object_name(2)))) == [(2, 3.5), (3, 3.0)]


def test_damaged_metrics_of_an_earlier_life_are_replaced(store: ObjectStore, caplog: pytest.LogCaptureFixture) -> None:
    store.put(object_name(1), b"nonsense")
    metrics = MetricsStore(store=store, clock=ManualClock())
    metrics.add(1, [(7, {"loss": 1.0})])
    with caplog.at_level(logging.WARNING):
        metrics.flush(now=True)
    assert "attempt 1" in caplog.text
    assert curve(MetricsLog.from_bytes(store.get(object_name(1)))) == [(7, 1.0)]


def test_a_failing_storage_is_a_warning_and_written_later(
    store: ObjectStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsStore(store=store, clock=ManualClock())
    metrics.add(1, [(1, {"loss": 1.0})])
    metrics.add(2, [(1, {"loss": 2.0})])

    def full(key: str, data: bytes) -> None:
        raise StorageError("No room.")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(store, "put", full)
        metrics.flush(now=True)
    assert "tried again" in caplog.text
    metrics.flush(now=True)
    assert curve(MetricsLog.from_bytes(store.get(object_name(1)))) == [(1, 1.0)]
    assert curve(MetricsLog.from_bytes(store.get(object_name(2)))) == [(1, 2.0)]


def test_what_a_replaced_rank_brings_late_spoils_neither_its_curve_nor_the_history(store: ObjectStore) -> None:
    metrics = RunMetrics(store=store, clock=ManualClock())
    metrics.add(1, [(1, {"loss": 4.0}), (2, {"loss": 3.0})], 0, None)
    metrics.flush(now=True)
    metrics.add(2, [(2, {"loss": 3.5}), (3, {"loss": 2.5})], 0, None)
    for _ in range(2):  # the second one forgets the first attempt
        metrics.flush(now=True)
        metrics.add(2, [(4, {"loss": 2.0})], 0, None)
    metrics.add(1, [(3, {"loss": 9.0})], 0, None)  # it was stopped, and goes on
    metrics.flush(now=True)
    assert curve(MetricsLog.from_bytes(store.get(object_name(1)))) == [(1, 4.0), (2, 3.0), (3, 9.0)]
    assert [(step, values["loss"]) for step, values in metrics.history()] == [(1, 4.0), (2, 3.5), (3, 2.5), (4, 2.0)]


def test_a_curve_that_cannot_be_read_now_is_not_written_over(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MetricsStore(store=store, clock=ManualClock())
    first.add(1, [(1, {"loss": 4.0})])
    first.flush(now=True)
    second = MetricsStore(store=store, clock=ManualClock())
    second.add(1, [(2, {"loss": 3.0})])

    def away(key: str) -> bytes:
        raise StorageError("503")

    with monkeypatch.context() as patch:
        patch.setattr(store, "get", away)
        second.flush(now=True)
    second.flush(now=True)
    assert curve(MetricsLog.from_bytes(store.get(object_name(1)))) == [(1, 4.0), (2, 3.0)]
