"""Laws of the lease: one driver at a time trains a run, whatever the clocks of their machines say, and the old one is
fenced when it wakes up."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_goodput.actors import lease as lease_module
from ray_goodput.actors.commits import CHECKPOINTS, CommitLog
from ray_goodput.actors.coordinator import RunCoordinator
from ray_goodput.actors.lease import RunLease, is_gone, this_process
from ray_goodput.actors.ledger_store import FOLDER as LEDGER
from ray_goodput.clock import ManualClock
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId, LandedSlice, StagedSlice
from ray_goodput.core.lease import LEASE_NAME, Holder, LeaseRecord, Take, decide_take
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.errors import FencedError, RunInUseError, StorageError
from ray_goodput.storage.faults import FaultyStore
from ray_goodput.storage.local import LocalStore

TTL_S = 60.0


def holder(name: str, **known: Any) -> Holder:
    values = {"cluster": f"cluster of {name}", "key": "run-1", "host": f"host-of-{name}", "machine": name, "pid": 1}
    return Holder(id=name, **{**values, "pid_started": 0, **known})


class Driver:
    """One driver's lease, with a clock of its own; `sleep` lets `meanwhile` happen."""

    def __init__(self, store: Any, name: str, *, at_s: float = 1.7e9, gone: bool = False, **known: Any) -> None:
        self.clock = ManualClock(mono_s=hash(name) % 1000, at_s=at_s)
        self.meanwhile: Any = lambda: None
        self.lost: list[str] = []
        self.lease = RunLease(
            run="run",
            store=store,
            me=holder(name, **known),
            clock=self.clock,
            ttl_s=TTL_S,
            sleep=self._sleep,
            gone=lambda _: gone,
        )

    def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.meanwhile()

    def take(self) -> None:
        self.lease.take(self.lost.append)

    def waited_s(self, before: float) -> float:
        return self.clock.mono_s() - before


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def read(store: Any) -> LeaseRecord:
    return LeaseRecord.from_json(store.get(LEASE_NAME))


@pytest.mark.parametrize("skew_s", [-1e7, 0.0, 1e7])
def test_a_dead_drivers_lease_runs_out_by_the_observers_own_clock_alone(store: LocalStore, skew_s: float) -> None:
    Driver(store, "a").take()
    second = Driver(store, "b", at_s=1.7e9 + skew_s)
    before = second.clock.mono_s()
    second.take()
    assert TTL_S <= second.waited_s(before) <= TTL_S * 1.1
    assert read(store).holder.id == "b"


def test_a_living_drivers_run_is_refused_with_the_name_of_its_machine(store: LocalStore) -> None:
    first, second = Driver(store, "a"), Driver(store, "b")
    first.take()
    second.meanwhile = first.lease.renew
    with pytest.raises(RunInUseError, match=r"host-of-a.*RunConfig"):
        second.take()
    assert read(store).holder.id == "a" and not first.lost


def test_a_run_that_ended_in_order_is_free_at_once(store: LocalStore) -> None:
    first, second = Driver(store, "a"), Driver(store, "b")
    first.take()
    first.lease.release()
    before = second.clock.mono_s()
    second.take()
    assert second.waited_s(before) == 0.0


@pytest.mark.parametrize("known", [{"gone": True}, {"cluster": "cluster of a"}])
def test_who_is_known_to_be_gone_is_not_waited_for(store: LocalStore, known: dict[str, Any]) -> None:
    Driver(store, "a").take()
    second = Driver(store, "b", **known)
    before = second.clock.mono_s()
    second.take()
    assert second.waited_s(before) == 0.0


def test_the_same_cluster_under_another_spelling_of_the_storage_is_no_proof_of_death(store: LocalStore) -> None:
    first = Driver(store, "a")
    first.take()
    second = Driver(store, "b", cluster="cluster of a", key="run-2")
    second.meanwhile = first.lease.renew
    with pytest.raises(RunInUseError):
        second.take()


def test_unknown_clusters_are_not_the_same_cluster() -> None:
    record = LeaseRecord(run="run", holder=holder("a", cluster=""), ttl_s=TTL_S)
    me = holder("b", cluster="")
    assert decide_take(record, me, unchanged_s=0, changed=False, holder_is_gone=False).action is Take.WAIT


def test_an_outage_of_the_storage_is_no_silence_of_the_holder(store: LocalStore) -> None:
    first = Driver(store, "a")
    first.take()
    reads = [0]

    def outage(op: str, key: str, n: int) -> None:
        reads[0] += 1
        if 3 < reads[0] < 40:
            raise StorageError("503")

    second = Driver(FaultyStore(store, before=outage), "b")
    before = second.clock.mono_s()
    second.take()
    assert second.waited_s(before) >= 36 * TTL_S / 12 + TTL_S


def test_two_that_wait_do_not_both_go_on(store: LocalStore) -> None:
    Driver(store, "a").take()
    second, third = Driver(store, "b"), Driver(store, "c")
    third_took = [False]

    def third_is_quicker() -> None:
        if third_took[0]:
            third.lease.renew()
        else:
            third_took[0] = True
            third.take()

    second.meanwhile = third_is_quicker
    with pytest.raises(RunInUseError, match="host-of-c"):
        second.take()


def test_a_renewal_that_comes_after_the_release_does_not_take_the_run_again(store: LocalStore) -> None:
    one, two = Driver(store, "one"), Driver(store, "two")
    one.take()
    one.lease.release()
    one.lease.renew()  # of the thread that had begun it before
    assert read(store).released
    two.meanwhile = lambda: pytest.fail("waited for a run that has ended")
    two.take()
    assert read(store).holder.id == "two"


def test_a_driver_that_wakes_up_after_its_run_was_taken_is_told_once_and_takes_nothing_back(store: LocalStore) -> None:
    first, second = Driver(store, "a"), Driver(store, "b")
    first.take()
    second.take()
    for call in (first.lease.renew, first.lease.check):
        with pytest.raises(FencedError, match="host-of-b"):
            call()
    first.lease.release()
    assert len(first.lost) == 1 and not first.lease.holds()
    assert read(store).holder.id == "b" and not read(store).released


def test_a_restarted_coordinator_goes_on_with_its_lease_unless_it_was_taken(store: LocalStore) -> None:
    me = holder("a")
    RunLease(run="run", store=store, me=me, clock=ManualClock()).take()
    again = RunLease(run="run", store=store, me=replace(me, pid=2), clock=ManualClock(), first_life=False)
    again.take()
    assert read(store).holder.pid == 2
    Driver(store, "b", gone=True).take()
    third = RunLease(run="run", store=store, me=replace(me, pid=3), clock=ManualClock(), first_life=False)
    third.take()
    assert not third.holds() and read(store).holder.id == "b"


def landed(step: int, attempt: int) -> LandedSlice:
    part = StagedSlice(
        checkpoint=CheckpointId(step, attempt),
        world_rank=0,
        world_size=1,
        slot_path="",
        extents=(),
        structure_digest="d",
        cursors={},
        metadata=b"metadata",
    )
    return LandedSlice(slice=part, objects=(), node_id="n", upload_s=0.1)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_driver_stopped_right_beside_its_commit_leaves_none_behind(store: LocalStore, moment: str) -> None:
    """The old driver is stopped just before, or just after, it writes the record; meanwhile the run is taken."""
    second = Driver(store, "b", gone=True)

    def stopped(op: str, key: str, n: int) -> None:
        if op == "put" and key.endswith(COMMIT_NAME):
            second.take()

    first = Driver(store, "a")
    first.take()
    log = CommitLog(
        run="run",
        store=FaultyStore(store, before=stopped) if moment == "before" else FaultyStore(store, after=stopped),
        clock=ManualClock(),
        check_owner=first.lease.check,
    )
    log.open()
    with pytest.raises(FencedError, match="host-of-b"):
        log.landed(landed(10, 1))
    assert not [info.key for info in store.list(CHECKPOINTS) if info.key.endswith(COMMIT_NAME)]


def test_a_coordinator_whose_run_was_taken_commits_and_writes_nothing_and_tells_its_ranks(store: LocalStore) -> None:
    first = Driver(store, "a")
    coordinator = RunCoordinator(run="run", store=store, clock=first.clock, target_world=1, lease=first.lease)
    workers = (WorkerInfo(world_rank=0, pid=1, node_id="n", node_ip="10.0.0.1"),)
    coordinator.open()
    try:
        coordinator.group_allocated(workers)
        Driver(store, "b", gone=True).take()
        segments = [info.key for info in store.list(LEDGER)]
        first.clock.advance(TTL_S)  # SIGSTOP
        coordinator.group_down()
        coordinator.group_allocated(workers)
        coordinator.hello(1, 0, 1.0)
        coordinator._ledger.flush()
        with pytest.raises(FencedError, match="host-of-b"):
            coordinator.resume_point(2)
        with pytest.raises(FencedError):
            coordinator.landed(landed(10, 2))
        assert "host-of-b" in coordinator._orders.answer(0).taken_over
        coordinator.finish()
        assert [info.key for info in store.list(LEDGER)] == segments
        assert read(store).holder.id == "b"
    finally:
        coordinator.stop()


def test_a_process_of_this_machine_is_known_to_live_or_to_be_gone() -> None:
    me = this_process("a", cluster="c", key="k")
    assert not is_gone(me)
    assert is_gone(replace(me, pid_started=me.pid_started - 1)), "its number was given out again"
    assert not is_gone(replace(me, machine="another", pid=1)), "of another machine nothing is known"
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(30)
    assert is_gone(replace(me, pid=done.pid))


def test_a_process_that_cannot_be_seen_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other_users = this_process("other user's", cluster="", key="")
    # /proc is often mounted so that users see their own processes only.
    monkeypatch.setattr(lease_module, "_PROCESSES", tmp_path)
    assert not is_gone(other_users)
    assert is_gone(replace(other_users, pid=2**22 + 1)), "there is no such number"


def test_the_format_is_version_1_and_a_later_one_is_refused_in_one_sentence() -> None:
    record = LeaseRecord(run="run", holder=holder("a"), ttl_s=TTL_S, beat=7, released=True)
    assert LeaseRecord.from_json(record.to_json()) == record
    golden = (Path(__file__).parents[1] / "contract" / "golden" / "lease_v1.json").read_bytes()
    assert record.to_json() + b"\n" == golden
    for bad, words in ((golden.replace(b'"version": 1', b'"version": 2'), "version 2"), (b"{}", "cannot be read")):
        with pytest.raises(StorageError, match=words):
            LeaseRecord.from_json(bad)
