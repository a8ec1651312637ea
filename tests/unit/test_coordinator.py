"""Laws of the coordinator's own restart: a passing failure of the storage loses no history and reuses no number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest

from journal_pages import page
from ray_goodput.actors import ledger_store
from ray_goodput.actors.coordinator import RunCoordinator
from ray_goodput.clock import ManualClock
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.commit import CheckpointId, LandedSlice, StagedSlice
from ray_goodput.core.hang import HangVerdict
from ray_goodput.core.run_state import Resume, WorkerInfo
from ray_goodput.errors import StorageError
from ray_goodput.storage.faults import FaultyStore
from ray_goodput.storage.local import LocalStore
from ray_goodput.storage.protocol import ObjectStore


@pytest.fixture
def lives() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def coordinator(store: ObjectStore, lives: ExitStack) -> RunCoordinator:
    made = RunCoordinator(run="run", store=store, clock=ManualClock(), target_world=1, run_started_at=1.7e9)
    lives.callback(made.stop)
    return made


def workers(pid: int) -> tuple[WorkerInfo, ...]:
    return (WorkerInfo(world_rank=0, pid=pid, node_id="n", node_ip="10.0.0.1"),)


def landed(step: int, attempt: int, *, world_size: int = 1) -> LandedSlice:
    part = StagedSlice(
        checkpoint=CheckpointId(step, attempt),
        world_rank=0,
        world_size=world_size,
        slot_path="",
        extents=(),
        structure_digest="d",
        cursors={},
        metadata=b"metadata",
    )
    return LandedSlice(slice=part, objects=(), node_id="n", upload_s=0.1)


def failing(store: ObjectStore, op: str, prefix: str) -> FaultyStore:
    """`store`, in which the first `op` of a key under `prefix` fails."""
    left = [1]

    def strike(called: str, key: str, n: int) -> None:
        if called == op and key.startswith(prefix) and left[0]:
            left[0] -= 1
            raise StorageError("503 Slow down")

    return FaultyStore(store, strike)


@pytest.mark.parametrize("op", ["list", "get"])
def test_a_ledger_that_cannot_be_read_now_is_not_a_damaged_one(tmp_path: Path, lives: ExitStack, op: str) -> None:
    store = LocalStore(tmp_path)
    first = coordinator(store, lives)
    first.open()
    assert [first.group_allocated(workers(pid)) for pid in (1, 2)] == [1, 2]
    second = coordinator(failing(store, op, "ledger"), lives)
    with pytest.raises(StorageError, match="503"):
        second.open()
    assert not (tmp_path / "ledger-damaged").exists()
    second.open()
    assert second.group_allocated(workers(3)) == 3


def test_a_damaged_ledger_is_moved_away_whole_or_the_start_fails(tmp_path: Path, lives: ExitStack) -> None:
    store = LocalStore(tmp_path)
    store.put("ledger/ledger-00000000.jsonl", b"{not a line\n")
    with pytest.raises(StorageError, match="503"):
        coordinator(failing(store, "put", "ledger-damaged"), lives).open()
    assert (tmp_path / "ledger" / "ledger-00000000.jsonl").read_bytes() == b"{not a line\n"
    coordinator(store, lives).open()
    assert (tmp_path / "ledger-damaged" / "ledger-00000000.jsonl").read_bytes() == b"{not a line\n"


@pytest.mark.parametrize("told_by", ["resume_point", "landed", "heartbeat"])
def test_an_attempt_whose_number_could_not_be_noted_keeps_it(tmp_path: Path, lives: ExitStack, told_by: str) -> None:
    coordinator_again = coordinator(LocalStore(tmp_path), lives)
    coordinator_again.open()
    if told_by == "resume_point":
        coordinator_again.resume_point(4)
    elif told_by == "landed":
        coordinator_again.landed(landed(10, 4, world_size=2))
    else:
        coordinator_again.heartbeat(4, 0, page(4, 0, []), [])
    assert coordinator_again.group_allocated(workers(9)) == 5


def test_the_commit_made_last_is_the_latest_attempts_also_below_an_older_ones_step(
    tmp_path: Path, lives: ExitStack
) -> None:
    one = coordinator(LocalStore(tmp_path), lives)
    one.open()
    assert one.last_committed() is None
    for step, attempt in ((90, 1), (100, 1), (60, 2)):
        one.landed(landed(step, attempt))
    again = coordinator(LocalStore(tmp_path), lives)
    again.open()
    for life in (one, again):
        assert life.committed_step() == 100
        assert life.last_committed() == CheckpointId(60, 2)


def test_a_start_told_twice_is_noted_once(tmp_path: Path, lives: ExitStack) -> None:
    one = coordinator(LocalStore(tmp_path), lives)
    one.open()
    for _ in range(2):
        one.resumed(1, 0, "none")
    assert one.status().resumes == (Resume(attempt=1, step=0, tier="none"),)


def test_a_rank_of_an_attempt_that_was_replaced_is_told_so(tmp_path: Path, lives: ExitStack) -> None:
    one = coordinator(LocalStore(tmp_path), lives)
    one.open()
    one.group_allocated(workers(1))
    assert not one.heartbeat(1, 0, page(1, 0, []), []).replaced
    one.group_allocated(workers(2))
    assert one.heartbeat(1, 0, page(1, 0, []), []).replaced
    assert not one.heartbeat(2, 0, page(2, 0, []), []).replaced


def test_a_coordinator_that_was_restarted_learns_the_living_processes_without_a_new_attempt(
    tmp_path: Path, lives: ExitStack
) -> None:
    store = LocalStore(tmp_path)
    first = coordinator(store, lives)
    first.open()
    assert first.group_allocated(workers(1)) == 1
    second = coordinator(store, lives)
    second.open()
    assert second.status().workers == ()
    for _ in range(2):
        second.group_lives(workers(1))
    assert (second.status().attempt, second.status().workers) == (1, workers(1))
    assert [w.pid for w in second.watch.workers()] == [1], "its hangs would never be found"
    assert second.group_allocated(workers(2)) == 2


def test_an_attempt_begins_though_its_number_cannot_be_written_now(
    tmp_path: Path, lives: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_store, "_NOTE_WAIT_S", 0.05)
    away = Event()
    lives.callback(away.set)

    def strike(called: str, key: str, n: int) -> None:
        if called == "put" and key.startswith("ledger"):
            away.wait(30)

    one = coordinator(FaultyStore(LocalStore(tmp_path), strike), lives)
    one.open()
    begun = Thread(target=one.group_allocated, args=(workers(1),), daemon=True)
    begun.start()
    begun.join(10)
    assert not begun.is_alive(), "sent again to its next life, the call would replace the attempt it had begun"
    assert one.status().attempt == 1


def test_a_restarted_coordinator_whose_books_lack_the_attempt_watches_it_by_its_own_number(
    tmp_path: Path, lives: ExitStack
) -> None:
    second = coordinator(LocalStore(tmp_path), lives)
    second.open()
    second.group_allocated(workers(0))
    third = coordinator(LocalStore(tmp_path), lives)  # attempt 2 began meanwhile, and could not be written down
    third.open()
    third.group_lives(workers(1))
    third.heartbeat(2, 0, page(2, 0, [], open_for=(Bucket.STARTUP, 5, -1)), [])
    observed = third.watch.observed()
    assert observed is not None
    attempt, [sight], _ = observed
    assert (attempt, sight.bucket) == (2, Bucket.STARTUP), "its heartbeats would count for nothing: it would be killed"


def test_a_rank_without_a_journal_is_told_the_runs_orders_and_judged_by_no_life_of_the_coordinator(
    tmp_path: Path, lives: ExitStack
) -> None:
    store = LocalStore(tmp_path)
    first = coordinator(store, lives)
    first.open()
    first.group_allocated(workers(1))
    second = coordinator(store, lives)
    second.open()
    second.group_lives(workers(1))
    for one in (first, second):
        one.request_drain()
        assert one.heartbeat(1, 0, None, [(3, {"loss": 0.5})]).drain
        observed = one.watch.observed()
        assert observed is not None and observed[1][0].closed
        assert one.status().step == 3


def test_a_hang_is_told_with_the_runs_status_until_its_failure_was_noted(tmp_path: Path, lives: ExitStack) -> None:
    one = coordinator(LocalStore(tmp_path), lives)
    one.open()
    one.group_allocated(workers(1))
    assert one.status().hang is None
    verdict = HangVerdict(culprits=(0,), reason="Hung: rank 0 is stopped")
    one.watch.found(1, verdict)
    one.hang_found(1)
    assert one.status().hang == verdict and one.stuck_ranks() == (0,)
    one.failure_seen(kind="hang", message=verdict.reason, ranks=(0,), reason="Retrying", retry=True)
    [incident] = one.goodput().incidents
    assert (incident.kind, incident.reason, incident.ranks) == ("hang", "Hung: rank 0 is stopped", (0,))
    assert one.stuck_ranks() == (), "it is over"
    assert one.status().hang is None, "a start that fails next is no hang, and does not count"
    one.group_allocated(workers(2))
    assert one.status().hang is None
