"""Laws of the vault: what a rank staged is in storage and known to the coordinator, whoever dies in between."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ray_goodput.actors.commits import CHECKPOINTS, CommitLog
from ray_goodput.actors.names import attempt_dir, journal_path
from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.checkpoint.sidecar import sidecar_path, write_sidecar
from ray_goodput.clock import ManualClock, SystemClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.commit import CheckpointId, Extent, LandedSlice, StagedSlice
from ray_goodput.errors import FencedError, RunError, StorageAccessError, StorageError
from ray_goodput.goodput.journal import JournalPage, JournalWriter
from ray_goodput.goodput.recorder import Recorder
from ray_goodput.storage import open_store
from ray_goodput.storage.faults import FaultyStore


class Coordinator:
    """A commit log that also keeps the journals it is given."""

    def __init__(self, store) -> None:
        self.log = CommitLog(run="r", store=store, clock=ManualClock())
        self.log.open()
        self.tails: list[tuple[int, int, JournalPage]] = []

    def identity(self) -> str:
        return "r"

    def landed(self, landed: LandedSlice) -> None:
        self.log.landed(landed)

    def journal_tail(self, attempt: int, world_rank: int, page: JournalPage) -> None:
        self.tails.append((attempt, world_rank, page))


class Node:
    """One node's folders, a storage and a vault."""

    def __init__(self, tmp_path: Path, **vault_arguments) -> None:
        self.store = open_store(StoreSpec(uri=str(tmp_path / "storage")))
        self.coordinator = Coordinator(self.store)
        self.slots, self.local, self.journals = tmp_path / "slots", tmp_path / "local", tmp_path / "journals"
        arguments = {"store": self.store, "sleep": lambda s: None, **vault_arguments}
        self.vault = CheckpointVault(
            node_id="n",
            coordinator=self.coordinator,
            local_checkpoints=self.local,
            slots=[self.slots],
            journals=self.journals,
            **arguments,
        )

    def stage(self, step: int, *, attempt: int = 1, data: bytes = b"weights", world_rank: int = 0) -> StagedSlice:
        folder = attempt_dir(self.slots, attempt)
        folder.mkdir(parents=True, exist_ok=True)
        slot = folder / f"rank-{world_rank:05d}-{step}.slot"
        slot.write_bytes(data + b"meta")
        staged = StagedSlice(
            checkpoint=CheckpointId(step, attempt),
            world_rank=world_rank,
            world_size=1,
            slot_path=str(slot),
            extents=(
                Extent(name="__0_0.distcp", offset=0, size_bytes=len(data)),
                Extent(name=".metadata", offset=len(data), size_bytes=4),
            ),
            structure_digest="d",
            cursors={},
            metadata=b"meta",
        )
        write_sidecar(staged)
        return staged


def test_a_persisted_slice_is_in_storage_committed_and_copied_locally(tmp_path: Path) -> None:
    node = Node(tmp_path)
    staged = node.stage(10, data=b"x" * (20 << 20))
    node.vault.persist(staged)
    newest = node.coordinator.log.newest()
    assert newest is not None and newest.checkpoint == CheckpointId(10, 1)
    folder = CheckpointId(10, 1).folder
    assert node.store.get(f"{CHECKPOINTS}/{folder}/__0_0.distcp") == b"x" * (20 << 20)
    assert node.store.get(f"{CHECKPOINTS}/{folder}/.metadata") == b"meta"
    assert (node.local / folder / "__0_0.distcp").stat().st_size == 20 << 20
    assert not sidecar_path(staged.slot_path).exists()


def test_a_slice_of_no_bytes_is_persisted_too(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.vault.persist(node.stage(10, data=b""))
    newest = node.coordinator.log.newest()
    assert newest is not None and {o.name: o.size_bytes for o in newest.objects} == {"__0_0.distcp": 0, ".metadata": 4}


def test_a_store_that_fails_for_a_while_delays_a_save_and_loses_nothing(tmp_path: Path) -> None:
    calls = []

    def fail_thrice(op: str, key: str, n: int) -> None:
        calls.append(op)
        if len(calls) <= 3:
            raise StorageError("503")

    store = open_store(StoreSpec(uri=str(tmp_path / "storage")))
    node = Node(tmp_path, store=FaultyStore(store, before=fail_thrice))
    node.vault.persist(node.stage(10))
    assert node.coordinator.log.newest() is not None and len(calls) == 4


def test_a_short_upload_is_durable_before_the_slot_is_copied(tmp_path: Path) -> None:
    node = Node(tmp_path)
    staged = node.stage(10)
    local = node.local / staged.checkpoint.folder
    landed, copied = node.coordinator.landed, []

    def look(part: LandedSlice) -> None:
        copied.append(local.exists())
        landed(part)

    node.coordinator.landed = look  # type: ignore[method-assign] (struck on purpose)
    node.vault.persist(staged)
    assert copied == [False] and (local / "__0_0.distcp").is_file()


def test_a_copy_that_fails_after_the_upload_costs_the_copy_only(tmp_path: Path) -> None:
    node = Node(tmp_path)
    staged = node.stage(10)
    tell = node.coordinator.landed

    def lose_the_slot(part: LandedSlice) -> None:
        tell(part)
        Path(staged.slot_path).unlink()

    node.coordinator.landed = lose_the_slot  # type: ignore[method-assign] (struck on purpose)
    node.vault.persist(staged)
    assert node.coordinator.log.is_committed(staged.checkpoint)
    assert not (node.local / staged.checkpoint.folder / "__0_0.distcp").exists()
    assert not sidecar_path(staged.slot_path).exists(), "nothing is left to finish"


def test_a_slot_that_cannot_be_read_is_an_error_and_no_commit(tmp_path: Path) -> None:
    node = Node(tmp_path)
    staged = node.stage(10)
    Path(staged.slot_path).unlink()
    with pytest.raises(OSError, match="No such file"):
        node.vault.persist(staged)
    assert node.coordinator.log.newest() is None


def test_beside_a_long_upload_the_slot_is_copied_to_nvme(tmp_path: Path) -> None:
    copy = tmp_path / "local" / CheckpointId(10, 1).folder / "__0_0.distcp"

    def until_copied(op: str, key: str, n: int) -> None:
        while op == "upload_file" and not copy.is_file():  # the test's timeout bounds it
            threading.Event().wait(0.01)

    store = open_store(StoreSpec(uri=str(tmp_path / "storage")))
    node = Node(tmp_path, store=FaultyStore(store, before=until_copied), copy_after_s=0.05)
    node.vault.persist(node.stage(10))
    newest = node.coordinator.log.newest()
    assert newest is not None and newest.checkpoint == CheckpointId(10, 1)


def test_wrong_keys_are_not_tried_again(tmp_path: Path) -> None:
    calls = []

    def refuse(op: str, key: str, n: int) -> None:
        calls.append(op)
        raise StorageAccessError("wrong keys")

    store = open_store(StoreSpec(uri=str(tmp_path / "storage")))
    node = Node(tmp_path, store=FaultyStore(store, before=refuse))
    with pytest.raises(StorageAccessError):
        node.vault.persist(node.stage(10))
    assert len(calls) == 1


def test_adopt_finishes_what_a_dead_worker_staged_and_cleans_up(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.stage(10)
    node.vault.adopt(2)
    newest = node.coordinator.log.newest()
    assert newest is not None and newest.checkpoint == CheckpointId(10, 1)
    assert not attempt_dir(node.slots, 1).exists()


def test_adopt_leaves_the_living_attempt_alone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    staged = node.stage(10, attempt=2)
    node.vault.adopt(2)
    assert Path(staged.slot_path).exists() and node.coordinator.log.newest() is None


def test_adopt_drops_what_was_fenced_meanwhile(tmp_path: Path) -> None:
    node = Node(tmp_path)
    staged = node.stage(10)
    node.coordinator.log.fence_and_choose(2)
    node.vault.adopt(2)
    assert node.coordinator.log.newest() is None and not Path(staged.slot_path).exists()
    with pytest.raises(FencedError):
        node.vault.persist(node.stage(11))


def test_a_slot_without_a_sidecar_was_never_complete_and_is_removed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    staged = node.stage(10)
    sidecar_path(staged.slot_path).unlink()
    node.vault.adopt(2)
    assert node.coordinator.log.newest() is None and not Path(staged.slot_path).exists()


def test_adopt_hands_over_the_journals_of_dead_ranks(tmp_path: Path) -> None:
    node = Node(tmp_path)
    path = journal_path(node.journals, 1, 3)
    path.parent.mkdir(parents=True)
    recorder = Recorder(JournalWriter(path, run="r", attempt=1, world_rank=3, node="n"), SystemClock())
    recorder.start(threads=False)
    recorder.switch(Bucket.STEP)
    recorder.step_done(1)
    node.vault.adopt(2)
    assert [(a, r) for a, r, _ in node.coordinator.tails] == [(1, 3)] and not path.exists()


def test_only_the_newest_local_copies_are_kept(tmp_path: Path) -> None:
    node = Node(tmp_path, keep_local=2)
    for step in (10, 20, 30):
        node.vault.persist(node.stage(step))
    assert sorted(p.name for p in node.local.iterdir()) == [CheckpointId(s, 1).folder for s in (20, 30)]


def test_a_coordinator_that_died_with_its_notes_is_told_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.coordinator.landed = lambda landed: None  # type: ignore[method-assign] (struck on purpose)
    node.vault.persist(node.stage(10))
    del node.coordinator.landed
    assert node.coordinator.log.newest() is None
    node.vault.land_again(10)
    assert node.coordinator.log.newest() is not None


def test_a_save_whose_slices_landed_in_two_lives_of_the_coordinator_is_committed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    first, second = (replace(node.stage(10, world_rank=r), world_size=2) for r in range(2))
    node.vault.persist(first)
    node.vault.persist(replace(node.stage(8, world_rank=2, attempt=1), world_size=3))  # of no interest to anybody
    log = CommitLog(run="r", store=node.store, clock=ManualClock())
    log.open()
    log.restore_fence(1)
    node.coordinator.log = log
    node.vault.land_again()
    assert log.newest() is None
    node.vault.persist(second)
    newest = log.newest()
    assert newest is not None and newest.checkpoint == CheckpointId(10, 1)


def test_a_dead_attempts_slice_does_not_keep_the_others_from_being_told_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.vault.persist(replace(node.stage(8), world_size=2))
    node.vault.persist(replace(node.stage(10, attempt=2, world_rank=1), world_size=2))
    log = CommitLog(run="r", store=node.store, clock=ManualClock())
    log.open()
    log.restore_fence(2)
    node.coordinator.log = log
    node.vault.land_again()
    node.vault.persist(replace(node.stage(10, attempt=2), world_size=2))
    assert log.newest() is not None


def test_the_end_of_a_run_commits_what_was_staged_and_leaves_only_local_copies(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.stage(10, attempt=3)
    node.vault.end_run()
    newest = node.coordinator.log.newest()
    assert newest is not None and newest.checkpoint == CheckpointId(10, 3)
    assert not node.slots.exists() and not node.journals.exists()
    assert (node.local / CheckpointId(10, 3).folder / "__0_0.distcp").exists()


def test_a_full_local_disk_costs_the_local_copy_and_not_the_save(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.local.write_text("a file where the folder should be: no copy can be made")
    node.vault.persist(node.stage(10))
    newest = node.coordinator.log.newest()
    assert newest is not None
    assert node.store.get(f"{CHECKPOINTS}/{CheckpointId(10, 1).folder}/__0_0.distcp") == b"weights"


def test_copies_of_an_older_attempts_higher_steps_go_first_and_what_is_read_stays(tmp_path: Path) -> None:
    node = Node(tmp_path, keep_local=2)
    for step in (100, 110, 120):
        node.vault.persist(node.stage(step, attempt=1))
    node.vault.keep(CheckpointId(110, 1))
    for step in (105, 106):
        node.vault.persist(node.stage(step, attempt=2))
    kept = {CheckpointId.parse(p.name) for p in node.local.iterdir()}
    assert kept == {CheckpointId(110, 1), CheckpointId(105, 2), CheckpointId(106, 2)}


def test_two_calls_for_one_slot_upload_it_once(tmp_path: Path) -> None:
    uploads: list[str] = []
    started, go_on = threading.Event(), threading.Event()

    def watch(op: str, key: str, n: int) -> None:
        if op == "upload_file":
            uploads.append(key)
            started.set()
            assert go_on.wait(10)

    store = open_store(StoreSpec(uri=str(tmp_path / "storage")))
    node = Node(tmp_path, store=FaultyStore(store, before=watch))
    staged = node.stage(10)
    first = threading.Thread(target=node.vault.persist, args=(staged,))
    first.start()
    assert started.wait(10)
    second = threading.Thread(target=node.vault.persist, args=(staged,))
    second.start()
    go_on.set()
    first.join(10)
    second.join(10)
    assert len(uploads) == 1 and node.coordinator.log.newest() is not None


def test_a_coordinator_that_does_not_answer_delays_the_commit_without_a_second_upload(tmp_path: Path) -> None:
    uploads: list[str] = []
    store = open_store(StoreSpec(uri=str(tmp_path / "storage")))
    count = FaultyStore(store, before=lambda op, key, n: uploads.append(op))
    node = Node(tmp_path, store=count)
    answers = iter([RunError("no answer"), RunError("no answer"), None])
    landed = node.coordinator.landed

    def away(part: LandedSlice) -> None:
        problem = next(answers)
        if problem is not None:
            raise problem
        landed(part)

    node.coordinator.landed = away  # type: ignore[method-assign] (struck on purpose)
    node.vault.persist(node.stage(10))
    assert node.coordinator.log.newest() is not None and uploads == ["upload_file"]


def test_an_older_slice_that_is_finished_late_does_not_hide_the_newest_one(tmp_path: Path) -> None:
    node = Node(tmp_path)
    older, newer = node.stage(50), node.stage(20, attempt=2)  # attempt 2 went on from before step 20
    node.coordinator.landed = lambda landed: None  # type: ignore[method-assign] (struck on purpose)
    node.vault.persist(newer)
    node.vault.persist(older)
    del node.coordinator.landed
    node.vault.land_again(20)
    newest = node.coordinator.log.newest()
    assert newest is not None and newest.checkpoint == CheckpointId(20, 2)
