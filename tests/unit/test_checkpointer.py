"""`rg.Checkpointer` in one process: the whole life of a save without Ray."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ray_goodput as rg
from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.checkpoint.sidecar import staged_in
from ray_goodput.errors import ConfigError, FencedError, SessionError, StagingFullError, StorageError


@pytest.fixture(autouse=True)
def local_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_GOODPUT_LOCAL_DIR", str(tmp_path / "node"))
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr("ray_goodput.actors.names.SHARED_MEMORY", tmp_path / "shm")  # tests leave slots behind
    return tmp_path / "node"


class Job:
    """A model, its optimizer and a scheduler; `train` goes on after the step of the restore."""

    def __init__(self, uri: Any, **config: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.saves = rg.Checkpointer(uri, config=rg.CheckpointConfig(**{"every": 2, "when_full": "wait", **config}))
        self.start = self.saves.restore(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, steps: int) -> list[int]:
        """Up to step number `steps`; the steps that were saved."""
        saved = []
        for step in range(self.start + 1, steps + 1):
            self.model(torch.full((4, 6), float(step))).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            if self.saves.step(step, cursors={"train": {"samples": 4 * step}}):
                saved.append(step)
        return saved

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_run_that_is_stopped_and_started_again_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole")
    assert whole.train(10) == [2, 4, 6, 8, 10]
    first = Job(tmp_path / "parts", every=3)
    assert first.train(7) == [3, 6]
    first.saves.close()
    second = Job(tmp_path / "parts")
    assert (second.start, second.saves.attempt) == (6, 2)
    assert second.saves.cursors == {"train": {"samples": 24}}
    second.train(10)
    assert equal(second.weights(), whole.weights())
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    whole.saves.close()
    second.saves.close()
    found = rg.latest_complete(tmp_path / "parts", verify=True)
    assert found is not None and found.endswith("checkpoints/step-0000000010-2")


def test_only_what_the_configuration_keeps_stays_in_storage_and_no_slot_is_left(
    tmp_path: Path, local_dir: Path
) -> None:
    job = Job(tmp_path / "run", every=1, keep_last=2, when_full="wait", staging_dir=str(tmp_path / "slots"))
    job.train(6)
    job.saves.close()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if any(path.iterdir()))
    assert names == ["step-0000000005-1", "step-0000000006-1"]
    assert list((tmp_path / "slots").rglob("*.slot")) == []
    assert [p for p in (tmp_path / "run" / "landing").rglob("*") if p.is_file()] == []


def test_what_a_killed_process_staged_is_committed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointVault, "persist", lambda self, staged: None)  # killed before the upload
        killed = Job(tmp_path / "run", staging_dir=str(tmp_path / "slots"))
        killed.train(2)
        killed.saves._uploads.close()
    (folder,) = (tmp_path / "slots").rglob("attempt-0001")
    assert [staged.checkpoint.step for staged in staged_in(folder)] == [2]
    after = Job(tmp_path / "run", staging_dir=str(tmp_path / "slots"))
    assert after.start == 2 and equal(after.weights(), killed.weights())
    assert not folder.exists()
    after.saves.close()


def test_what_a_deleted_run_in_the_same_place_staged_is_never_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointVault, "persist", lambda self, staged: None)  # killed before the upload
        deleted = Job(tmp_path / "run")
        deleted.train(4)
        deleted.saves._uploads.close()
        assert deleted.saves._committer is not None
        deleted.saves._committer.close(5.0)
    shutil.rmtree(tmp_path / "run")
    killed = Job(tmp_path / "run")
    killed.train(2)
    assert (killed.saves.attempt, killed.saves.wait()) == (1, True)
    assert Job(tmp_path / "run").start == 2, "step 4 is the deleted run's"
    assert rg.latest_complete(tmp_path / "run", verify=True) is not None, "nor is it written over what is committed"


def test_an_earlier_start_that_is_still_alive_can_commit_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Job(tmp_path / "run")
    old.train(2)
    assert old.saves.wait()
    monkeypatch.setenv("RAY_GOODPUT_LOCAL_DIR", str(tmp_path / "another node"))
    new = Job(tmp_path / "run")
    assert new.start == 2
    assert old.saves.save(3)
    assert not old.saves.wait(timeout_s=2.0)
    with pytest.raises(FencedError, match="Attempt 2 of this run has begun"):
        old.saves.save(4)
    new.saves.save(3)
    new.saves.close()
    found = rg.latest_complete(tmp_path / "run")
    assert found is not None and found.endswith("step-0000000003-2")


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path / "run")
    job.train(4)
    job.saves.close()
    for copy in tmp_path.rglob("step-0000000004-1/__0_0.distcp"):
        copy.write_bytes(copy.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, logger="ray_goodput"):
        assert Job(tmp_path / "run").start == 2
    assert "step-0000000004-1 is damaged" in caplog.text


def test_a_failing_storage_costs_saves_but_not_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any, staged: Any) -> None:
        raise StorageError("the bucket is gone")

    monkeypatch.setattr(CheckpointVault, "persist", refuse)
    job = Job(tmp_path / "run", every=1)
    job.train(6)
    assert not job.saves.wait(timeout_s=0.0)
    assert "the bucket is gone" in caplog.text
    job.saves._release_threads(away=False)


def test_a_disk_without_room_for_slots_costs_saves_but_not_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, size: int) -> None:
        raise StagingFullError("Staging needs 4 MiB more.")

    monkeypatch.setattr("ray_goodput.checkpoint.slots.Slot._reserve", full)
    job = Job(tmp_path / "run", every=1)
    assert job.train(3) == [] and job.saves.skipped == 2
    assert job.saves.save(3) is False
    job.saves.close()


def test_while_both_slots_are_taken_each_save_is_skipped_once_not_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persist, storage_is_back = CheckpointVault.persist, threading.Event()

    def slow(self: CheckpointVault, staged: Any) -> None:
        assert storage_is_back.wait(30)
        persist(self, staged)

    monkeypatch.setattr(CheckpointVault, "persist", slow)
    job = Job(tmp_path / "run", every=3, when_full="skip")
    assert job.train(14) == [3, 6]
    assert job.saves.skipped == 2, "those of steps 9 and 12"
    storage_is_back.set()
    assert job.saves.save(14) and job.saves.wait()
    job.saves.close()


def test_an_earlier_start_on_the_same_node_loses_its_slots_and_skips_its_saves(tmp_path: Path) -> None:
    old = Job(tmp_path / "run")
    old.train(2)
    assert old.saves.wait()
    new = Job(tmp_path / "run")
    assert old.saves.save(3) is False
    new.saves.close()
    assert Job(tmp_path / "run").start == 2


def test_an_error_in_the_training_loop_leaves_at_once_and_keeps_what_was_saved(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), job.saves:
        job.train(4)
        _ = 1 / 0
    assert Job(tmp_path / "run").start == 4


def test_a_storage_that_refuses_at_the_start_is_the_error_that_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> None:
        raise StorageError("the bucket is gone")

    monkeypatch.setattr("ray_goodput.actors.commits.CommitLog.open", refuse)
    with pytest.raises(StorageError, match="the bucket is gone"), rg.Checkpointer(tmp_path / "run") as saves:
        saves.restore(model=nn.Linear(1, 1))


@pytest.mark.parametrize("near", [{"every_local": 2}, {"peer_copies": 1}])
def test_saves_to_the_nodes_are_refused_in_one_sentence_that_says_who_has_them(tmp_path: Path, near: dict) -> None:
    with pytest.raises(ConfigError, match=r"(?s)^(?!.*\n).*leave every_local and peer_copies out.*GoodputTrainer"):
        rg.Checkpointer(tmp_path / "run", config=rg.CheckpointConfig(**near))


def test_methods_out_of_order_say_what_to_do(tmp_path: Path) -> None:
    saves = rg.Checkpointer(tmp_path / "run")
    with pytest.raises(SessionError, match="restore first"):
        saves.save(1)
    with pytest.raises(ConfigError, match="has no state_dict"):
        saves.restore(model=nn.Linear(1, 1), table=object())
    saves.restore(model=nn.Linear(1, 1))
    with pytest.raises(SessionError, match="twice"):
        saves.restore(model=nn.Linear(1, 1))
    saves.close()
    saves.close()
    assert saves.wait()
    for late in (saves.step, saves.save):
        with pytest.raises(SessionError, match="after close"):
            late(1)


def test_a_storage_that_refuses_deletions_costs_no_commit_and_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(self: Any) -> None:
        raise StorageError("deletions are forbidden")

    monkeypatch.setattr("ray_goodput.actors.commits.CommitLog.prune", refuse)
    job = Job(tmp_path / "run")
    job.train(2)
    assert job.saves.wait()
    committer = job.saves._committer
    assert committer is not None
    with committer._changed:
        committer._changed.wait_for(lambda: not committer._waiting, timeout=5)
        assert not committer._waiting, "it would look for its notes for ever"
    job.saves.close()
