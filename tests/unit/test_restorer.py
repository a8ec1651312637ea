"""All ranks restore the same checkpoint or all leave with an error: nobody waits for one that is gone."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from committing import commit, put_slice
from ray_goodput.actors.names import local_checkpoints_dir
from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.core.commit import CheckpointId, CommitRecord
from ray_goodput.core.near_copies import NearRecord
from ray_goodput.core.run_state import AttemptStart
from ray_goodput.errors import CorruptCheckpointError, NoCopyLeftError, RunError, StorageError
from ray_goodput.storage.faults import FaultyStore
from ray_goodput.storage.local import LocalStore
from ray_goodput.storage.protocol import ObjectStore
from ray_goodput.train import restorer
from ray_goodput.train.restorer import Restored, restore_newest
from thread_ranks import ThreadRanks, in_ranks

WORLD = 2


@pytest.fixture(autouse=True)
def nothing_is_left_on_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restorer, "hold_leftovers", lambda worker: None)


class OddError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class Counter:
    def __init__(self, error: Exception | None = None) -> None:
        self.value = 0
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self.value = state["value"]


class Coordinator:
    """Gives out `records`, newest first, and notes what it is told."""

    def __init__(self, records: list[CommitRecord]) -> None:
        self._records = records
        self.bad: list[str] = []
        self.workers: dict[int, Any] = {}
        self.failures: list[Exception] = []
        self.restored: dict[int, Restored] = {}  # by rank; noted by `restore` below
        self.at: int | None = None

    def resume_point(self, attempt: int) -> CommitRecord | None:
        return self._records[0] if self._records else None

    def mark_bad(self, checkpoint: CheckpointId, reason: str) -> None:
        self._records.pop(0)
        self.bad.append(checkpoint.folder)

    def pass_over(self, checkpoint: CheckpointId, reason: str) -> bool:
        if len(self._records) == 1:
            return False
        self.mark_bad(checkpoint, reason)
        return True

    def holders(self, checkpoint: CheckpointId) -> dict[str, tuple[str, ...]]:
        return {}

    def resumed(self, attempt: int, step: int, tier: str, near: CheckpointId | None = None) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.at = step


class Worker:
    attempt = 2

    def __init__(self, ranks: ThreadRanks, root: Path, coordinator: Coordinator) -> None:
        self.world = ranks
        self.coordinator = coordinator
        self.local_dir = root / f"local-{ranks.world_rank}"
        self.store = LocalStore(root / "run")
        self.orders = SimpleNamespace(start=None)
        self.vault = SimpleNamespace(keep=SimpleNamespace(remote=lambda checkpoint: None))


class Spec:
    class run:
        key = "key"


def save(root: Path, step: int, extra: Mapping[str, Any] | None = None) -> CommitRecord:
    counter = Counter()
    counter.value = step
    tree = collect_state(model=nn.Linear(3, 4), stateful={"counter": counter})
    plan = Planner(world_rank=0, world_size=1).plan_for(tree)
    staged = Stager(plan, root / "slots").stage(tree, CheckpointId(step, 1), rank_state=capture_rng(), extra=extra)
    assert staged is not None
    folder = root / "run" / "checkpoints" / staged.checkpoint.folder
    return commit(folder, [staged], put_slice(folder, staged))


def on_the_nodes(root: Path, step: int) -> NearRecord:
    """A save that lies whole on each rank's node, and is not committed."""
    record = save(root, step)
    folder = record.checkpoint.folder
    for rank in range(WORLD):
        shutil.copytree(root / "run" / "checkpoints" / folder, copies(root, rank) / folder)
    shutil.rmtree(root / "run" / "checkpoints" / folder)
    return NearRecord(**{f.name: getattr(record, f.name) for f in fields(record)})


def copies(root: Path, rank: int) -> Path:
    return local_checkpoints_dir(root / f"local-{rank}", "key")


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def away(op: str, key: str, n: int) -> None:
    raise StorageError("503")


def restore(
    root: Path,
    records: list[CommitRecord],
    errors: dict[int, Exception],
    failures: list[Exception] | None = None,
    *,
    storage: ObjectStore | None = None,
) -> tuple[list[Any], Coordinator]:
    """(counter, step) of each rank, or what it raised. `failures`: of the coordinator, when it is told."""
    coordinator = Coordinator(records)
    coordinator.failures = failures or []

    def rank(ranks: ThreadRanks) -> Any:
        counter = Counter(errors.get(ranks.world_rank))
        worker: Any = Worker(ranks, root, coordinator)
        coordinator.workers[ranks.world_rank] = worker
        worker.store = storage or worker.store
        spec: Any = Spec
        restored = restore_newest(
            spec, worker, model=nn.Linear(3, 4), optimizer=None, stateful={"counter": counter}, strict=True
        )
        coordinator.restored[ranks.world_rank] = restored
        return counter.value, restored.step

    return in_ranks(WORLD, rank), coordinator


def test_every_rank_loads_the_newest_commit(tmp_path: Path) -> None:
    told, coordinator = restore(tmp_path, [save(tmp_path, 2), save(tmp_path, 1)], {})
    assert told == [(2, 2), (2, 2)] and coordinator.at == 2


def test_rank_0_can_say_from_now_on_what_the_attempt_was_told_to_go_on_from(tmp_path: Path) -> None:
    near = on_the_nodes(tmp_path, 2)
    record = save(tmp_path, 1)
    for told, start in ((record, AttemptStart(near=None)), (near, AttemptStart(near=CheckpointId(2, 1)))):
        _, coordinator = restore(tmp_path, [told], {})
        assert {rank: worker.orders.start for rank, worker in coordinator.workers.items()} == {0: start, 1: None}


@pytest.mark.parametrize(("failures", "noted"), [(1, 1), (9, None)])
def test_a_coordinator_that_cannot_be_told_of_the_start_ends_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, noted: int | None
) -> None:
    monkeypatch.setattr(restorer, "_TELL_PAUSE_S", 0.0)
    told, coordinator = restore(tmp_path, [save(tmp_path, 1)], {}, [RunError("no answer") for _ in range(failures)])
    assert told == [(1, 1), (1, 1)] and coordinator.at == noted


def test_a_damaged_checkpoint_is_passed_over_by_every_rank(tmp_path: Path) -> None:
    records = [save(tmp_path, 2), save(tmp_path, 1)]
    damaged = tmp_path / "run" / "checkpoints" / records[0].checkpoint.folder / "__0_0.distcp"
    flip_last_byte(damaged)
    told, coordinator = restore(tmp_path, records, {})
    assert told == [(1, 1), (1, 1)] and len(coordinator.bad) == 1


def test_with_the_storage_away_a_damaged_copy_sends_all_ranks_to_the_next_older_save_on_the_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = on_the_nodes(tmp_path, 1), on_the_nodes(tmp_path, 2)
    flip_last_byte(copies(tmp_path, 1) / newer.checkpoint.folder / "__0_0.distcp")
    with caplog.at_level(logging.INFO):
        told, coordinator = restore(tmp_path, [newer, older], {}, storage=FaultyStore(LocalStore(tmp_path), away))
    assert told == [(1, 1), (1, 1)] and coordinator.at == 1
    [said] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Resumed after step 1 ")]
    assert "Passed over: step-0000000002-1 (No node has a whole copy of __0_0.distcp" in said and "503" in said


@pytest.mark.parametrize("kind", ["near", "commit"])
def test_with_nothing_older_on_the_nodes_the_storage_that_is_away_is_the_error(tmp_path: Path, kind: str) -> None:
    near = on_the_nodes(tmp_path, 1)
    record = near if kind == "near" else CommitRecord(**{f.name: getattr(near, f.name) for f in fields(near)})
    flip_last_byte(copies(tmp_path, 0) / near.checkpoint.folder / "__0_0.distcp")
    told, coordinator = restore(tmp_path, [record], {}, storage=FaultyStore(LocalStore(tmp_path), away))
    assert [type(error) for error in told] == [NoCopyLeftError] * WORLD
    assert coordinator.bad == [], "the next attempt may have more luck"


def test_a_users_own_error_on_one_rank_ends_the_restore_on_every_rank(tmp_path: Path) -> None:
    error = OddError("no such vocabulary")
    told, _ = restore(tmp_path, [save(tmp_path, 1)], {1: error})
    assert told[1] is error
    assert type(told[0]) is RuntimeError
    assert str(told[0]) == "Rank 1 could not load step-0000000001-1: OddError: no such vocabulary"


def test_checkpoints_that_are_all_damaged_end_the_run_on_every_rank(tmp_path: Path) -> None:
    record = save(tmp_path, 1)
    (tmp_path / "run" / "checkpoints" / record.checkpoint.folder / "__0_0.distcp").unlink()
    told, _ = restore(tmp_path, [record], {})
    assert [type(error) for error in told] == [CorruptCheckpointError] * WORLD
    with pytest.raises(CorruptCheckpointError, match="All 1 checkpoint"):
        raise told[0]


@pytest.mark.parametrize(
    ("extra", "world", "places"),
    [({"lane_places": {"train": [1, 0]}}, 1, {"train": [1, 0]}), ({}, 1, {}), (None, None, {})],
)
def test_a_restore_says_in_what_world_and_with_which_places_of_lanes_the_state_was_saved(
    tmp_path: Path, extra: Mapping[str, Any] | None, world: int | None, places: Mapping[str, Any]
) -> None:
    _, coordinator = restore(tmp_path, [] if extra is None else [save(tmp_path, 5, extra)], {})
    found = [(restored.world_size, restored.lane_places) for restored in coordinator.restored.values()]
    assert found == [(world, places)] * WORLD
