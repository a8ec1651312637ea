"""Laws of the transform's workers: results do not depend on them, and none outlives who started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import transforming
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.order import SampleOrder
from ray_goodput.data.loader import BatchLoader
from ray_goodput.data.transforms import SampleTransforms
from ray_goodput.errors import ConfigError, DataError, ShardReadError

ROWS = [9, 4, 17, 1, 6]
WORKERS = [("thread", 0), ("thread", 3), ("process", 2)]


class Source:
    def __init__(self, broken: int = -1) -> None:
        self._broken = broken

    def counts(self) -> DataCounts:
        return DataCounts()

    def describe(self, data_shard: int) -> str:
        return f"Data shard {data_shard}"

    def table(self, data_shard: int) -> pa.Table:
        if data_shard == self._broken:
            raise ShardReadError(f"Data shard {data_shard} is broken.")
        start = sum(ROWS[:data_shard])
        return pa.table({"id": np.arange(start, start + ROWS[data_shard])})

    def advance(self, samples_consumed: int) -> None: ...

    def close(self, timeout_s: float = 5.0) -> None: ...


def loader(transform: Any, kind: Any, workers: int, **changed: Any) -> BatchLoader:
    order = SampleOrder(ROWS, seed=3, lanes=2, window=2)
    options: dict[str, Any] = {"global_batch_size": 5, "source": Source(), "epochs": 2, **changed}
    return BatchLoader(order=order, transform=transform, workers=workers, worker_kind=kind, **options)


def results(transform: Any, kind: Any, workers: int, **changed: Any) -> list[Any]:
    return [
        (b.index, b.samples_end, b.weight, b.sample_ids.tolist(), b["id"].tolist(), b["noise"].tolist())
        for b in loader(transform, kind, workers, **changed)
    ]


@pytest.mark.parametrize(("kind", "workers"), WORKERS[1:])
def test_batches_do_not_depend_on_the_workers(kind: str, workers: int) -> None:
    expected = results(transforming.augment, "thread", 0)
    assert results(transforming.augment, kind, workers) == expected
    start = expected[3][1]
    assert results(transforming.augment, kind, workers, start=start, depth=5) == expected[4:]


def test_the_work_is_done_where_it_was_asked_for() -> None:
    def places(kind: str, workers: int) -> tuple[set[int], int]:
        batches = list(loader(transforming.which_process, kind, workers, global_batch_size=37))
        pids = {pid for b in batches for pid in b["pid"].tolist()}
        return pids, len({thread for b in batches for thread in b["thread"].tolist()})

    assert places("thread", 0) == ({os.getpid()}, 1)
    assert places("thread", 3)[0] == {os.getpid()}
    pids, _ = places("process", 2)
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2


@pytest.mark.parametrize(("kind", "workers"), WORKERS)
def test_an_error_is_the_users_own_names_the_sample_and_comes_after_the_batches_before_it(
    kind: str, workers: int
) -> None:
    order = SampleOrder(ROWS, seed=3, lanes=2, window=2)
    at = next(t for t in range(37) if order.sample_ids(*order.locate(np.array([t])))[0] == 5)
    seen = []
    with pytest.raises(KeyError, match="label") as caught:
        for batch in loader(transforming.fail_at_five, kind, workers):
            seen.append(batch.index)
    assert "sample_id 5 in epoch 0" in caught.value.__notes__[0]
    assert seen == list(range(at // 5))


def test_batches_before_a_broken_shard_are_delivered_though_it_is_read_ahead() -> None:
    order = SampleOrder(ROWS, seed=3, lanes=2, window=2)
    broken = order.at(36).data_shard
    first_use = min(t for t in range(37) if order.at(t).data_shard == broken)
    seen = []
    with pytest.raises(ShardReadError, match="is broken"):
        for batch in loader(transforming.augment, "thread", 2, source=Source(broken), global_batch_size=2, depth=4):
            seen.append(batch.index)
    assert seen == list(range(first_use // 2))


@pytest.mark.parametrize(("kind", "workers"), WORKERS)
@pytest.mark.parametrize("world", [1, 3])
def test_a_sample_that_cannot_be_made_is_left_out_and_counted_and_the_others_keep_their_weight(
    kind: str, workers: int, world: int
) -> None:
    per_rank = [
        list(loader(transforming.fail_at_five, kind, workers, dp_rank=r, dp_world=world, on_error="skip", epochs=1))
        for r in range(world)
    ]
    ids = [i for batches in per_rank for b in batches for i in b.sample_ids.tolist()]
    assert sorted(ids) == [i for i in range(37) if i != 5]
    assert sum(b.num_skipped for batches in per_rank for b in batches) == 1
    for step, parts in enumerate(zip(*per_rank, strict=True)):
        size = min(5, 37 - 5 * step)
        assert sum(b.num_samples + b.num_skipped for b in parts) == size
        for b in parts:
            assert b["id"].tolist() == b.sample_ids.tolist() or b.num_samples == 0
            assert b.weight == b.num_samples * world / size
            assert len(b["id"]) == max(1, b.num_samples)


def test_a_batch_of_which_nothing_is_left_is_padding(caplog: pytest.LogCaptureFixture) -> None:
    order = SampleOrder(ROWS, seed=3, lanes=2, window=2)
    at = next(t for t in range(37) if order.sample_ids(*order.locate(np.array([t])))[0] == 5)
    batches = loader(transforming.fail_at_five, "thread", 0, global_batch_size=1, on_error="skip", epochs=1)
    alone = list(batches)
    assert at > 0
    assert (alone[at].num_samples, alone[at].weight, alone[at].num_skipped) == (0, 0.0, 1)
    assert alone[at]["id"].tolist() == alone[at - 1]["id"].tolist()
    assert [b.samples_end for b in alone] == list(range(1, 38))
    assert batches.num_skipped == 1
    assert "sample 5 is left out (1 so far): KeyError: 'label'" in caplog.text
    with pytest.raises(DataError, match="failed for each of the first 1 samples, the last time with KeyError"):
        list(loader(transforming.fail_at_five, "thread", 0, global_batch_size=1, on_error="skip", start=at))


def test_a_process_that_dies_is_told_and_nobody_hangs() -> None:
    with pytest.raises(DataError, match=r"worker process of transform= died .*worker_kind"):
        list(loader(transforming.die_at_five, "process", 2))


def test_what_cannot_be_sent_is_told_when_the_loader_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"cannot be sent to worker processes .*define it at the top of a module"):
        SampleTransforms(lambda sample, rng: sample, 0, workers=1, kind="process")


def test_a_loader_left_early_ends_with_its_workers() -> None:
    batches = loader(transforming.augment, "thread", 2, epochs=None)
    next(iter(batches))
    batches.close()
    assert not batches._thread.is_alive()
    assert list(batches) == []


def test_processes_do_not_outlive_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, str(Path(transforming.__file__)), "50"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the tracker of what a process leaves has something to say of the one killed here
        text=True,
        cwd=Path(transforming.__file__).parent,
    )
    try:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert workers
        assert all(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        parent.kill()
        parent.wait(10)
    deadline = time.monotonic() + 30
    while any(_is_running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
