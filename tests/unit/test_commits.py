"""Laws of the commit protocol: a checkpoint exists when its last slice has landed, and never for a fenced attempt."""

import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from ray_goodput.actors.commits import CHECKPOINTS, CommitLog
from ray_goodput.clock import ManualClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import CheckpointId, LandedSlice, ObjectRecord, StagedSlice
from ray_goodput.errors import CorruptCheckpointError, FencedError, StorageError
from ray_goodput.storage import open_store
from ray_goodput.storage.checksum import xxh3_128_hex
from ray_goodput.storage.faults import FaultyStore


def open_log(store, **kwargs) -> CommitLog:
    log = CommitLog(run="run", store=store, clock=ManualClock(), **kwargs)
    log.open()
    return log


def landed(step: int, world_rank: int, *, attempt: int = 1, world_size: int = 2, digest: str = "d") -> LandedSlice:
    data = f"{step}-{world_rank}".encode()
    return LandedSlice(
        slice=StagedSlice(
            checkpoint=CheckpointId(step, attempt),
            world_rank=world_rank,
            world_size=world_size,
            slot_path="",
            extents=(),
            structure_digest=digest,
            cursors={"train": {"samples_consumed": step}},
            metadata=b"metadata" if world_rank == 0 else None,
        ),
        objects=(ObjectRecord(name=f"__{world_rank}_0.distcp", size_bytes=len(data), xxh3_128=xxh3_128_hex(data)),),
        node_id="n",
        upload_s=0.1,
    )


@pytest.fixture
def store(tmp_path: Path):
    return open_store(StoreSpec(uri=str(tmp_path)))


def test_nothing_is_committed_before_the_last_slice_in_whatever_order_they_land(store) -> None:
    log = open_log(store)
    assert log.landed(landed(10, 1)) is None and log.newest() is None
    assert log.landed(landed(10, 1)) is None and log.newest() is None  # the same slice again is no second one
    record = log.landed(landed(10, 0))
    assert record is not None and record.checkpoint == CheckpointId(10, 1)
    assert [o.name for o in record.objects] == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_a_new_coordinator_reads_what_the_old_one_committed_and_ignores_the_rest(store) -> None:
    log = open_log(store)
    for rank in (0, 1):
        log.landed(landed(10, rank))
    log.landed(landed(20, 0))
    store.put(f"{CHECKPOINTS}/{CheckpointId(30, 1).folder}/COMMIT.json", b"{not a record")
    again = open_log(store)
    assert [r.checkpoint.step for r in again.records()] == [10]
    assert again.newest() == log.newest()


def test_a_fenced_attempt_cannot_commit_even_if_only_its_last_slice_is_late(store) -> None:
    log = open_log(store)
    log.landed(landed(10, 0))
    assert log.fence_and_choose(2) is None
    with pytest.raises(FencedError, match="attempt 1"):
        log.landed(landed(10, 1))
    assert open_log(store).newest() is None


def test_an_attempt_that_was_itself_replaced_gets_no_resume_point(store) -> None:
    log = open_log(store)
    log.fence_and_choose(3)
    with pytest.raises(FencedError, match="replaced by attempt 3"):
        log.fence_and_choose(2)


def test_a_commit_under_way_is_part_of_the_resume_point(store, tmp_path: Path) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def pause(op: str, key: str, n: int) -> None:
        if op == "put" and key.endswith("COMMIT.json"):
            writing.set()
            assert go_on.wait(10)

    log = open_log(FaultyStore(store, before=pause))
    log.landed(landed(10, 0))
    committer = threading.Thread(target=log.landed, args=(landed(10, 1),))
    committer.start()
    assert writing.wait(10)
    chosen: list = []
    chooser = threading.Thread(target=lambda: chosen.append(log.fence_and_choose(2)))
    chooser.start()
    go_on.set()
    committer.join(10)
    chooser.join(10)
    assert chosen[0].checkpoint.step == 10


def test_a_commit_that_could_not_be_written_is_written_by_the_next_try(store) -> None:
    broken = [True]

    def refuse(op: str, key: str, n: int) -> None:
        if broken[0] and key.endswith("COMMIT.json") and op == "put":
            raise StorageError("no")

    log = open_log(FaultyStore(store, before=refuse))
    log.landed(landed(10, 0))
    with pytest.raises(StorageError):
        log.landed(landed(10, 1))
    assert log.newest() is None
    broken[0] = False
    assert log.landed(landed(10, 1)) is not None


def test_ranks_that_disagree_on_the_structure_do_not_commit(store) -> None:
    log = open_log(store)
    log.landed(landed(10, 0))
    with pytest.raises(StorageError, match="disagree"):
        log.landed(landed(10, 1, digest="other"))


def test_prune_leaves_the_newest_and_removes_what_fenced_attempts_left(store) -> None:
    log = open_log(store, keep_last=1)
    for step in (10, 20):
        for rank in (0, 1):
            store.put(f"{CHECKPOINTS}/{CheckpointId(step, 1).folder}/__{rank}_0.distcp", b"x")
            log.landed(landed(step, rank))
    store.put(f"{CHECKPOINTS}/{CheckpointId(25, 1).folder}/__0_0.distcp", b"half")
    assert [c.step for c in log.prune()] == [10]  # attempt 1 still lives: its unfinished folder stays
    log.fence_and_choose(2)
    assert [c.step for c in log.prune()] == [25]
    assert store.list_folders(CHECKPOINTS) == [CheckpointId(20, 1).folder]
    newest = open_log(store).newest()
    assert newest is not None and newest.checkpoint.step == 20


def test_waiting_for_a_commit_ends_with_it_or_with_the_timeout(store) -> None:
    log = open_log(store)
    assert not log.wait_committed(CheckpointId(10, 0), 0.01)
    for rank in (0, 1):
        log.landed(landed(10, rank))
    assert log.wait_committed(CheckpointId(10, 0), 0.01)


def test_unreadable_records_are_kept_and_never_taken_for_a_fresh_run(store) -> None:
    log = open_log(store)
    for step in (10, 20):
        for rank in (0, 1):
            log.landed(landed(step, rank))
        key = f"{CHECKPOINTS}/{CheckpointId(step, 1).folder}/COMMIT.json"
        store.put(key, store.get(key).replace(b'"version": 1', b'"version": 2'))
    again = open_log(store)
    with pytest.raises(CorruptCheckpointError, match="All 2 checkpoint"):
        again.fence_and_choose(2)
    assert again.prune() == []
    assert len(store.list_folders(CHECKPOINTS)) == 2


def test_one_unreadable_record_leaves_the_older_commit_and_stays_for_a_person(store) -> None:
    log = open_log(store)
    for step in (10, 20):
        for rank in (0, 1):
            log.landed(landed(step, rank))
    store.put(f"{CHECKPOINTS}/{CheckpointId(20, 1).folder}/COMMIT.json", b"{}")
    again = open_log(store)
    record = again.fence_and_choose(2)
    assert record is not None and record.checkpoint.step == 10
    assert again.prune() == []


def test_when_all_that_is_left_is_damaged_no_attempt_starts_from_scratch(store) -> None:
    log = open_log(store)
    for rank in (0, 1):
        log.landed(landed(10, rank))
    log.mark_bad(CheckpointId(10, 1), "flipped")
    for attempt in (2, 3):
        with pytest.raises(CorruptCheckpointError, match="flipped"):
            log.fence_and_choose(attempt)


def test_a_store_that_cannot_list_uploads_does_not_stop_pruning(store) -> None:
    def refuse(op: str, key: str, n: int) -> None:
        if op == "abort_uploads":
            raise StorageError("not allowed")

    log = open_log(FaultyStore(store, before=refuse), keep_last=1)
    for step in (10, 20, 30):
        for rank in (0, 1):
            log.landed(landed(step, rank))
    assert [c.step for c in log.prune()] == [10, 20]
    assert store.list_folders(CHECKPOINTS) == [CheckpointId(30, 1).folder]


def test_whoever_waits_is_told_at_once_that_the_run_is_anothers_and_nothing_is_written(store) -> None:
    writes = FaultyStore(store)
    log = open_log(writes)
    log.hold_commits(60.0)
    log.landed(landed(10, 0))
    with ThreadPoolExecutor(2) as pool:
        calls: list[Future[Any]] = [
            pool.submit(log.landed, landed(10, 1)),
            pool.submit(log.wait_committed, CheckpointId(10, 0), 60.0),
        ]
        assert not wait(calls, timeout=0.2, return_when=FIRST_COMPLETED).done
        log.fence_all("Another driver has taken the run.")
        for call in calls:
            with pytest.raises(FencedError, match="Another driver"):
                call.result(10.0)
    assert writes.count("put") == 0


def test_a_commit_made_before_the_run_was_taken_is_still_told(store) -> None:
    log = open_log(store)
    for rank in (0, 1):
        log.landed(landed(10, rank))
    log.fence_all("Another driver has taken the run.")
    assert log.wait_committed(CheckpointId(10, 0), 0.0)
    with pytest.raises(FencedError):
        log.wait_committed(CheckpointId(20, 0), 60.0)
