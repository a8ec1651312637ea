"""Laws of `run.evaluate_batches`: every sample once, as many batches on every rank, and training is left as it is."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_goodput.actors.spec import RunSpec
from ray_goodput.config import CheckpointConfig, StoreSpec
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.cursor import DataCursor
from ray_goodput.core.data_flow import DataCounts
from ray_goodput.core.order import SampleOrder
from ray_goodput.data.dataset import ShardedDataset
from ray_goodput.data.loader import BatchLoader
from ray_goodput.errors import ConfigError
from ray_goodput.train import session as session_module
from ray_goodput.train.data_tally import DataTally
from ray_goodput.train.feed import DataFeed
from ray_goodput.train.restorer import Restored
from ray_goodput.train.session import Session
from ray_goodput.train.spec import TrainSpec
from ray_goodput.train.world import World

ROWS = [4, 0, 7, 2]


class Source:
    def __init__(self) -> None:
        self.num_closed = 0
        self.positions: list[int] = []
        self.lanes: Any = None  # what the feed was opened with

    def counts(self) -> DataCounts:
        return DataCounts()

    def describe(self, data_shard: int) -> str:
        return f"Data shard {data_shard}"

    def table(self, data_shard: int) -> pa.Table:
        return pa.table({"x": np.arange(ROWS[data_shard], dtype=np.float64)})

    def advance(self, samples_consumed: int) -> None:
        self.positions.append(samples_consumed)

    def close(self, timeout_s: float = 5.0) -> None:
        self.num_closed += 1


class Spans:
    """A recorder that knows which buckets are open, and which have been."""

    def __init__(self) -> None:
        self.open: list[Bucket] = []
        self.seen: list[Bucket] = []
        self.base: list[Bucket] = []

    def switch(self, bucket: Bucket) -> None:
        self.base.append(bucket)

    @contextmanager
    def span(self, bucket: Bucket):
        self.open.append(bucket)
        self.seen.append(bucket)
        try:
            yield
        finally:
            self.open.remove(bucket)


def make_session(
    monkeypatch: pytest.MonkeyPatch, rank: int, world: int, *, batch: int = 6, reproducible: bool = False
) -> tuple[Any, list[Source]]:
    """A session of one rank whose feeds read from memory, and the sources it opened."""
    sources: list[Source] = []

    def open_feed(spec: Any, worker: Any, name: str, dataset: ShardedDataset, cursor: Any, **options: Any) -> DataFeed:
        sources.append(Source())
        sources[-1].lanes = options.get("lanes")
        start = cursor or DataCursor(0, "m", "o")
        loader = BatchLoader(
            order=SampleOrder(ROWS, seed=dataset.seed, lanes=2, window=2),
            global_batch_size=dataset.global_batch_size,
            source=sources[-1],
            start=start.samples_consumed,
            epochs=options["epochs"],
            dp_rank=rank,
            dp_world=world,
            drop_last=dataset.drop_last,
        )
        return DataFeed(loader=loader, source=sources[-1], cursor=start)

    monkeypatch.setattr(session_module, "open_feed", open_feed)
    clock = SimpleNamespace(mono_s=lambda: 0.0)
    worker: Any = SimpleNamespace(
        world=World(rank, world, None),
        recorder=Spans(),
        metrics=None,
        data=DataTally(speaks_for_node=True),
        clock=clock,
        attempt=1,
        coordinator=None,
    )
    run = RunSpec(run="r", store=StoreSpec(uri="/nowhere"), checkpoint=CheckpointConfig(), target_world=world)
    # A training option: an evaluation leaves nothing out.
    val = ShardedDataset("/data/*.parquet", global_batch_size=batch, drop_last=True)
    monkeypatch.setattr(session_module.reproducible, "use_deterministic_kernels", lambda: None)
    return Session(TrainSpec(run=run, datasets={"val": val}, reproducible=reproducible), worker), sources


@pytest.mark.parametrize("world", [1, 2, 3, 5, 6])
def test_every_sample_comes_exactly_once_in_as_many_batches_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    ranks = [list(make_session(monkeypatch, r, world)[0].evaluate_batches("val")) for r in range(world)]
    assert {len(batches) for batches in ranks} == {3}
    assert sorted(i for batches in ranks for b in batches for i in b.sample_ids.tolist()) == list(range(13))
    assert all((b.weight == 0) == (b.num_samples == 0) for batches in ranks for b in batches)
    total = sum(float(b["x"].mean()) * b.num_samples for batches in ranks for b in batches)
    assert total == pytest.approx(sum(n * (n - 1) / 2 for n in ROWS))


def test_an_evaluation_counts_as_eval_and_moves_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    run, sources = make_session(monkeypatch, 0, 1)
    recorder = run._recorder
    batches = run.evaluate_batches("val")
    assert recorder.open == []
    assert sources == []
    next(batches)
    assert recorder.open == [Bucket.EVAL]
    assert len(list(batches)) == 2
    assert (recorder.open, recorder.seen) == ([], [Bucket.EVAL])
    assert run._cursors == {}
    assert run._pending == {}
    assert [b.index for b in run.evaluate_batches("val")] == [0, 1, 2]
    assert [s.num_closed for s in sources] == [1, 1]
    assert set(sources[0].positions) == {6, 12, 13}


def test_an_evaluation_that_is_left_early_closes_its_source_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run, sources = make_session(monkeypatch, 0, 1)
    for _ in run.evaluate_batches("val"):
        break
    assert run._recorder.open == []
    assert [s.num_closed for s in sources] == [1]
    assert run._feeds == []


def test_an_unknown_dataset_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_session(monkeypatch, 0, 1)
    with pytest.raises(ConfigError, match=r"no dataset 'test'; GoodputTrainer\(datasets=\) has \['val'\]"):
        run.evaluate_batches("test")


@pytest.mark.parametrize("reproducible", [False, True])
def test_ranks_read_as_the_checkpoint_says_and_the_next_one_says_so_too_unless_the_run_is_reproducible(
    monkeypatch: pytest.MonkeyPatch, reproducible: bool
) -> None:
    """Also a save before the first batch. Evaluations are in ascending sequence."""
    saved = {"val": [1, 0]}
    run, sources = make_session(monkeypatch, 0, 2, reproducible=reproducible)
    restored = Restored(step=0, tier="storage", cursors={}, world_size=2, lane_places=saved)
    monkeypatch.setattr(session_module, "restore_newest", lambda *_, **__: restored)
    saves: list[Any] = []
    saver = SimpleNamespace(begin=lambda *_, **__: None, save=lambda **options: saves.append(options["lane_places"]))
    monkeypatch.setattr(run, "_saver", saver)
    run._recorder.resumed = lambda step: None
    run.restore()
    run.save()
    next(run.batches("val"))
    next(run.evaluate_batches("val"))
    run.save()
    assert saves == [None if reproducible else saved] * 2
    of_batches, of_evaluation = (source.lanes for source in sources)
    assert of_evaluation is None
    assert of_batches is None if reproducible else of_batches.record() == saved


def test_between_the_batches_of_two_epochs_no_step_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = make_session(monkeypatch, 0, 1)
    run._restored = object()
    recorder = run._recorder
    batches = run.batches("val")
    next(batches)
    assert recorder.base == [Bucket.STEP]
    list(batches)
    assert recorder.base == [Bucket.STEP, Bucket.OTHER]
    for _ in run.batches("val", epochs=2):
        break
    assert recorder.base == [Bucket.STEP, Bucket.OTHER] * 2
