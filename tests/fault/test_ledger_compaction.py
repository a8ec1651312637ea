"""Compaction of the ledger: whatever storage call the coordinator dies at, whenever somebody reads or copies the
folder, the accounts are those of before or of after; and journals found late count once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from journal_pages import Stretch, page, steps
from ray_goodput.actors.ledger_store import LedgerStore
from ray_goodput.clock import ManualClock
from ray_goodput.core.buckets import Bucket
from ray_goodput.errors import GoodputError, StorageError
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.report import GoodputReport
from ray_goodput.goodput.run_files import RunReader
from ray_goodput.storage.faults import FaultyStore
from ray_goodput.storage.local import LocalStore
from ray_goodput.storage.protocol import ObjectStore

STARTED_AT = 1_760_000_000.0
SCRIPT: list[Stretch] = [(Bucket.STARTUP, 3, -1, False), *steps(1, 40, 2.0)]
NUM_ROUNDS = 10


class Died(Exception):
    """Stands for SIGKILL: nothing of ours catches it."""


class Compacting(LedgerStore):
    max_segments = 3
    grace_s = 0.0


def opened(store: ObjectStore, clock: ManualClock, kind: type[LedgerStore] = Compacting) -> LedgerStore:
    books = kind(store=store, clock=clock, target_world=2)
    books.open(STARTED_AT)
    return books


def one_round(books: LedgerStore, clock: ManualClock, number: int) -> None:
    """Ten seconds of two ranks, a commit, a flush. Told again, it changes nothing."""
    clock.advance(10.0)
    for rank in range(2):
        last = min(len(SCRIPT), 1 + 4 * (number + 1))
        books.add_page(page(1, rank, SCRIPT, last=last))
    books.commit(4 * (number + 1), 1, stall_s=0.5, latency_s=3.0, upload_s=2.5)
    books.flush()


def begin(books: LedgerStore) -> None:
    books.attempt_started(1, 2)
    for rank in range(2):
        books.rank_hello(1, rank, 0.0)
    books.resumed(1, 0)


def tell_all(books: LedgerStore, clock: ManualClock, first: int = 0) -> None:
    for number in range(first, NUM_ROUNDS):
        one_round(books, clock, number)
    books.attempt_ended(1, "finished")
    books.finish()


def the_report(store: ObjectStore) -> GoodputReport:
    return Ledger.from_lines(RunReader(store).read().lines).report()


def undisturbed(folder: Path) -> tuple[GoodputReport, int]:
    """The report of a run in which nothing happened, and how many storage calls it made."""
    store, clock = FaultyStore(LocalStore(folder)), ManualClock(at_s=STARTED_AT)
    books = opened(store, clock)
    begin(books)
    tell_all(books, clock)
    return the_report(store.inner), store.count()


def progress(report: GoodputReport) -> tuple[float, int]:
    return report.buckets_s["step"], report.durable_step or 0


def test_a_long_run_leaves_few_segments(tmp_path: Path) -> None:
    report, _ = undisturbed(tmp_path)
    names = sorted(path.name for path in (tmp_path / "ledger").iterdir())
    assert len(names) <= Compacting.max_segments + 2 and names[0] > "ledger-00000005.jsonl"
    assert report.buckets_s["step"] == 2 * 40 * 2.0 and report.committed_s == 160.0 and report.finished


def test_the_coordinator_may_die_before_or_after_any_storage_call(tmp_path: Path) -> None:
    expected, num_calls = undisturbed(tmp_path / "undisturbed")
    assert num_calls > 20
    for n in range(num_calls):
        for moment in ("before", "after"):
            folder = tmp_path / f"{n}-{moment}"
            _die_and_go_on(LocalStore(folder), n, moment, expected)
            shutil.rmtree(folder)


def _die_and_go_on(inner: ObjectStore, n: int, moment: str, expected: GoodputReport) -> None:
    def strike(op: str, key: str, number: int) -> None:
        if number == n:
            raise Died

    dying = FaultyStore(inner, before=strike) if moment == "before" else FaultyStore(inner, after=strike)
    clock = ManualClock(at_s=STARTED_AT)
    told, number = (0.0, 0), -1
    try:
        books = opened(dying, clock)
        begin(books)
        for number in range(NUM_ROUNDS):
            one_round(books, clock, number)
            told = progress(books.report())  # it was flushed: it must still be there
        books.attempt_ended(1, "finished")
        books.finish()
    except Died:
        pass
    if list(inner.list("ledger")):
        seen = progress(the_report(inner))
        assert told <= seen <= (16.0 * (number + 1), 4 * (number + 1)), (n, moment)
    again = opened(inner, clock)
    begin(again)
    tell_all(again, clock)
    report = the_report(inner)
    assert report.buckets_s["step"] == expected.buckets_s["step"], (n, moment)
    assert (report.committed_s, report.durable_step) == (expected.committed_s, expected.durable_step)
    assert report.imbalance_s == pytest.approx(0.0, abs=1e-6)


def test_a_reader_at_any_moment_sees_what_was_flushed_exactly_once(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    seen: list[tuple[float, int]] = []

    def look(op: str, key: str, number: int) -> None:
        if list(inner.list("ledger")):
            seen.append(progress(the_report(inner)))

    store, clock = FaultyStore(inner, look, look), ManualClock(at_s=STARTED_AT)
    books = opened(store, clock)
    begin(books)
    tell_all(books, clock)
    assert seen == sorted(seen) and len(seen) > 40 and seen[-1] == (160.0, 40)
    rounds = {(8.0 * 2 * i, 4 * i) for i in range(NUM_ROUNDS + 1)}
    assert set(seen) <= rounds, "neither more nor less than whole rounds"


def test_a_reader_whose_listed_segments_are_replaced_while_it_reads_begins_again(tmp_path: Path) -> None:
    inner, clock = LocalStore(tmp_path), ManualClock(at_s=STARTED_AT)
    books = opened(inner, clock)
    begin(books)
    one_round(books, clock, 0)
    left = list(range(1, NUM_ROUNDS))

    def meanwhile(op: str, key: str, number: int) -> None:
        if op == "get" and "ledger-" in key:
            for number_of_round in left:
                one_round(books, clock, number_of_round)
            left.clear()

    report = the_report(FaultyStore(inner, before=meanwhile))
    assert not left and progress(report) == (160.0, 40)


def test_a_reader_that_never_sees_a_whole_ledger_says_so_in_one_sentence(tmp_path: Path) -> None:
    inner, clock = LocalStore(tmp_path), ManualClock(at_s=STARTED_AT)
    begin(opened(inner, clock))
    [listed] = list(inner.list("ledger"))

    class Shifting(FaultyStore):
        def list(self, prefix: str = ""):
            return iter([listed] if prefix else [])

    def gone(op: str, key: str, number: int) -> None:
        if op == "get":
            inner.delete([key])

    with pytest.raises(StorageError, match=r"changed under each of 5 attempts.*try again"):
        RunReader(Shifting(inner, before=gone)).read()


class Patient(Compacting):
    """Deletes what was superseded only after a while, as in life."""

    grace_s = 25.0


@pytest.mark.parametrize("copied_before", range(9))
def test_a_copy_made_during_a_compaction_has_the_accounts_of_before_or_after(
    tmp_path: Path, copied_before: int
) -> None:
    """The listing, and some of the files, from before; the other files, if they are still there, from after."""
    inner, clock = LocalStore(tmp_path / "run"), ManualClock(at_s=STARTED_AT)
    books = opened(inner, clock, Patient)
    begin(books)
    for number in range(5):
        one_round(books, clock, number)
    before = progress(the_report(inner))
    listed = sorted((tmp_path / "run" / "ledger").iterdir())
    copy = tmp_path / "copy" / "ledger"
    copy.mkdir(parents=True)
    for path in listed[:copied_before]:
        shutil.copy(path, copy)
    for number in (5, 6):  # a whole segment is written, and older ones are deleted
        one_round(books, clock, number)
    after = progress(the_report(inner))
    for path in listed[copied_before:]:
        shutil.copy(path, copy)
    assert progress(the_report(LocalStore(tmp_path / "copy"))) in (before, after)


def test_while_the_storage_is_away_what_waits_for_it_is_bounded_and_nothing_is_lost(tmp_path: Path) -> None:
    away = [True]

    def strike(op: str, key: str, number: int) -> None:
        if away[0] and op == "put" and number > 3:
            raise StorageError("503 Slow down")

    inner, clock = LocalStore(tmp_path), ManualClock(at_s=STARTED_AT)
    books = opened(FaultyStore(inner, strike), clock)
    begin(books)
    for number in range(NUM_ROUNDS):
        one_round(books, clock, number)
        assert len(books._ledger._segments) <= Compacting.max_segments + 2
    away[0] = False
    books.flush()
    assert progress(the_report(inner)) == (160.0, 40)


def test_superseded_segments_that_cannot_be_deleted_now_are_deleted_later(tmp_path: Path) -> None:
    left = [2]

    def strike(op: str, key: str, number: int) -> None:
        if op == "delete" and left[0]:
            left[0] -= 1
            raise StorageError("503 Slow down")

    inner, clock = LocalStore(tmp_path), ManualClock(at_s=STARTED_AT)
    books = opened(FaultyStore(inner, strike), clock)
    begin(books)
    tell_all(books, clock)
    assert left == [0] and len(list(inner.list("ledger"))) <= Compacting.max_segments + 2
    assert progress(the_report(inner)) == (160.0, 40)


JOURNALS = {  # the records of each page, in the order in which they are told
    "twice": [(0, 41), (0, 41)],
    "overlapping": [(0, 30), (10, 41), (0, 5), (3, 41)],
    "with a piece that must be asked for again": [(40, 41), (0, 41), (40, 41)],
}


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("how", JOURNALS)
def test_a_journal_found_late_counts_once_also_after_the_books_were_closed(
    tmp_path: Path, how: str, compacted: bool
) -> None:
    inner, clock = LocalStore(tmp_path), ManualClock(at_s=STARTED_AT)
    kind = Compacting if compacted else LedgerStore
    books = opened(inner, clock, kind)
    begin(books)
    clock.advance(90.0)
    books.add_page(page(1, 0, SCRIPT, closed=True))
    books.add_page(page(1, 1, SCRIPT, last=9))
    books.attempt_ended(1, "finished")
    closed = books.finish()
    assert closed.buckets_s["step"] == 80.0 + 16.0
    later = opened(inner, clock, kind)  # the next driver's coordinator, whose vault finds the journal
    later.finish()
    for _ in range(3):
        for first, last in JOURNALS[how]:
            later.add_tail(page(1, 1, SCRIPT, first=first, last=last))
        later.flush()
    report = the_report(inner)
    assert report.buckets_s["step"] == 160.0
    assert sum(report.buckets_s.values()) == pytest.approx(2 * report.wall_s)
    assert report.wall_s == closed.wall_s == 90.0, "books that were closed keep their length"
    assert report == the_report(inner) and later.report() == report


def test_a_damaged_whole_segment_is_told_and_never_read_as_half(tmp_path: Path) -> None:
    undisturbed(tmp_path)
    oldest = sorted((tmp_path / "ledger").iterdir())[0]
    oldest.write_bytes(oldest.read_bytes()[:-40])
    with pytest.raises(GoodputError, match="cut off"):
        the_report(LocalStore(tmp_path))
    oldest.unlink()
    with pytest.raises(GoodputError, match="is missing"):
        the_report(LocalStore(tmp_path))
