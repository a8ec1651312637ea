"""Laws of `max_durable_age`: said once with the numbers, stopped only if asked, and nothing while commits come."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

from journal_pages import page
from ray_goodput.actors.commit_age import CommitAge
from ray_goodput.actors.coordinator import RunCoordinator
from ray_goodput.clock import ManualClock
from ray_goodput.config import CheckpointConfig
from ray_goodput.core.durable_age import AgeWatch, judge_age
from ray_goodput.core.run_state import AttemptStart
from ray_goodput.errors import ConfigError, DurableAgeError, StorageError
from ray_goodput.storage.faults import FaultyStore
from ray_goodput.storage.local import LocalStore
from ray_goodput.train import checkpointer, uploads
from ray_goodput.train.checkpointer import Checkpointer
from ray_goodput.train.world import World


def test_the_sentence_has_the_numbers_and_the_way_out() -> None:
    decision = judge_age(age_s=1861.0, limit_s=1800.0, committed_step=1200, step=1890)
    assert decision.too_old
    for part in ("1861 s", "of step 1200", "at step 1890", "max_durable_age=1800 s", "690 steps", "uploads go on"):
        assert part in decision.reason
    assert "none so far" in judge_age(age_s=9.0, limit_s=5.0, committed_step=-1, step=4).reason
    assert not judge_age(age_s=5.0, limit_s=5.0, committed_step=-1, step=4).too_old


def test_it_is_said_once_each_time_the_limit_is_passed_and_not_before_training_begins() -> None:
    watch = AgeWatch(10.0)
    assert watch.passed(99.0, committed_step=-1, step=0) is None
    watch.begin(100.0)
    said = [watch.passed(at, committed_step=-1, step=3) is not None for at in (105.0, 110.5, 120.0)]
    watch.committed(121.0)
    said += [watch.passed(at, committed_step=3, step=9) is not None for at in (130.0, 132.0, 140.0)]
    assert said == [False, True, False, False, True, False]


def test_without_a_limit_nothing_is_ever_too_old() -> None:
    watch = AgeWatch(None)
    watch.begin(0.0)
    assert watch.passed(1e9, committed_step=-1, step=1) is None


@pytest.mark.parametrize(("stop", "answer"), [(False, ""), (True, "max_durable_age=60 s")])
def test_the_coordinator_warns_and_stops_the_ranks_only_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stop: bool, answer: str
) -> None:
    clock = ManualClock()
    coordinator = RunCoordinator(
        run="run",
        store=LocalStore(tmp_path),
        clock=clock,
        target_world=1,
        age=CommitAge(clock, 60.0, stop=stop),
    )
    coordinator.open()
    coordinator.group_allocated(())
    clock.advance(1000.0)  # waiting for nodes is not training
    coordinator.resumed(1, 0, "none")
    with caplog.at_level(logging.WARNING):
        assert coordinator.heartbeat(1, 0, page(1, 0, []), ()).stop_reason == ""
        clock.advance(61.0)
        told = [coordinator.heartbeat(1, 0, page(1, 0, []), ()).stop_reason for _ in range(2)]
    coordinator.stop()
    assert all((answer in text) if answer else (text == "") for text in told)
    assert sum("max_durable_age" in r.getMessage() for r in caplog.records) == 1


def test_a_coordinator_that_was_restarted_counts_from_the_present_attempts_word_on(tmp_path: Path) -> None:
    clock = ManualClock()
    age = CommitAge(clock, 60.0, stop=True)
    again = RunCoordinator(run="run", store=LocalStore(tmp_path), clock=clock, target_world=1, age=age, restarted=True)
    again.open()
    start: AttemptStart | None = None
    for start, said in ((None, ""), (AttemptStart(near=None), "max_durable_age=60 s")):
        again.heartbeat(1, 0, page(1, 0, []), (), None, start)
        clock.advance(61.0)
        assert said in again.heartbeat(1, 0, page(1, 0, []), (), None, start).stop_reason
    again.stop()


def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: CheckpointConfig
) -> tuple[Checkpointer, ManualClock, list[bool]]:
    """A checkpointer, its clock, and whether its storage answers: `[False]` for no."""
    monkeypatch.setattr("ray_goodput.actors.names.SHARED_MEMORY", tmp_path / "shm")
    up = [True]

    def strike(op: str, key: str, n: int) -> None:
        if not up[0]:
            raise StorageError("503 Slow down")

    store = FaultyStore(LocalStore(tmp_path / "run"), before=strike)
    monkeypatch.setattr(checkpointer, "open_store", lambda spec: store)
    saves = Checkpointer(tmp_path / "run", config=config, local_dir=tmp_path / "node")
    saves._clock = clock = ManualClock()  # type: ignore[assignment] (annotated as the real one)
    return saves, clock, up


@pytest.mark.parametrize("stop", [False, True])
def test_a_checkpointer_whose_storage_is_away_trains_on_and_stops_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stop: bool
) -> None:
    config = CheckpointConfig(every=2, max_durable_age="1s", on_durable_age="stop" if stop else "warn")
    saves, clock, up = made(tmp_path, monkeypatch, config)
    model = torch.nn.Linear(4, 4)
    saves.restore(model=model)
    saves.save(1)
    assert saves.wait(30.0)
    saves.step(2)
    up[0] = False
    done = 2
    try:
        for step in range(3, 20):
            clock.advance(0.2)
            saves.step(step)
            done = step
    except DurableAgeError as error:
        assert stop and f"stopped at step {done + 1}" in str(error) and "max_durable_age=1 s" in str(error)
        assert f"The newest of it is of step {done + 1}." in str(error), "staged though both slots were taken"
    finally:
        up[0] = True
        saves.__exit__(RuntimeError, None)
    assert (done < 12) if stop else (done == 19)
    assert sum("max_durable_age" in r.getMessage() for r in caplog.records) == 1


def test_a_checkpointer_that_waits_for_a_slot_stops_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CheckpointConfig(every=1, when_full="wait", max_durable_age="1min", on_durable_age="stop")
    saves, clock, up = made(tmp_path, monkeypatch, config)

    def waited(futures: list, timeout: float | None = None) -> None:
        clock.advance(timeout or 0.0)

    monkeypatch.setattr(uploads, "wait", waited)
    saves.restore(model=torch.nn.Linear(4, 4))
    up[0] = False
    step = 0
    try:
        with pytest.raises(DurableAgeError, match="max_durable_age=60 s"):
            for step in range(1, 20):
                saves.step(step)
    finally:
        up[0] = True
        saves.__exit__(RuntimeError, None)
    assert 60 < clock.mono_s() - ManualClock().mono_s() < 70 and saves.skipped == 1 and step <= 6


def test_the_end_of_a_run_waits_no_longer_than_it_may_and_the_next_start_finishes_its_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CheckpointConfig(every=100, max_durable_age="1min", on_durable_age="stop")
    saves, clock, up = made(tmp_path, monkeypatch, config)

    def waited(futures: list, timeout: float | None = None) -> None:
        clock.advance(10.0)

    monkeypatch.setattr(uploads, "wait", waited)
    saves.restore(model=torch.nn.Linear(4, 4))
    saves.step(1)
    up[0] = False
    assert saves.save(2)
    with pytest.raises(DurableAgeError, match="the last save, of step 2, was not waited for") as raised:
        saves.close()
    assert "max_durable_age=60 s" in str(raised.value) and "finishes those uploads" in str(raised.value)
    up[0] = True
    monkeypatch.undo()
    monkeypatch.setattr("ray_goodput.actors.names.SHARED_MEMORY", tmp_path / "shm")
    with Checkpointer(tmp_path / "run", config=config, local_dir=tmp_path / "node") as again:
        assert again.restore(model=torch.nn.Linear(4, 4)) == 2


def test_a_close_that_an_error_ends_leaves_no_thread_that_waits_for_a_storage_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    saves, _, up = made(tmp_path, monkeypatch, CheckpointConfig(every=100))
    saves.restore(model=torch.nn.Linear(4, 4))
    up[0] = False
    assert saves.save(1)

    def gone(self: World, word: bool) -> bool:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(World, "all_true", gone)
    with pytest.raises(RuntimeError, match="closed by peer"):
        saves.close()  # the test's timeout bounds it: an upload alone is tried for 15 minutes
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in left if name.startswith(("checkpoint-upload", "committer"))]
    assert len(list(tmp_path.rglob("*.slot.json"))) == 1, "what it staged is left to the next start"


@pytest.mark.parametrize("bad", [{"max_durable_age": "soon"}, {"max_durable_age": "0s"}, {"on_durable_age": "panic"}])
def test_settings_that_make_no_sense_are_refused(bad: dict) -> None:
    with pytest.raises(ConfigError):
        CheckpointConfig(**bad)
