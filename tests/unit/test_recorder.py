"""The recorder: one timeline without holes, delivered completely, and never an error into training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ray_goodput.clock import ManualClock, SystemClock
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import STEP_DONE, JournalPage, JournalWriter, read_journal
from ray_goodput.goodput.recorder import Recorder, SendPage


class Rank:
    """A recorder on a clock that moves when told."""

    def __init__(self, path: Path, send: SendPage | None = None, page_records: int = 4096) -> None:
        self.path = path
        self.clock = ManualClock(mono_s=50.0)
        writer = JournalWriter(path, run="r", attempt=0, world_rank=0, node="n")
        self.recorder = Recorder(writer, self.clock, send=send, page_records=page_records)
        self.recorder.start(threads=False)

    def timeline(self) -> list[tuple[str, float, int]]:
        array = read_journal(self.path).array
        return [
            (Bucket(b).label, round((e - s) / 1e9, 6), step)
            for s, e, b, step in zip(
                array["start_ns"].tolist(),
                array["end_ns"].tolist(),
                array["bucket"].tolist(),
                array["step"].tolist(),
                strict=True,
            )
        ]


def test_the_innermost_span_counts_and_the_base_comes_back(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "j")
    rec, tick = rank.recorder, rank.clock.advance
    tick(1)
    rec.resumed(10)
    rec.switch(Bucket.STEP)
    tick(2)
    with rec.span(Bucket.EVAL):
        tick(3)
        with rec.span(Bucket.DATA_WAIT):
            tick(4)
        tick(5)
        rec.switch(Bucket.DRAIN)  # the base changes below the span
        tick(6)
    tick(7)
    rec.close()
    assert rank.timeline() == [
        ("startup", 1, 11),
        ("step", 2, 11),
        ("eval", 3, 11),
        ("data_wait", 4, 11),
        ("eval", 11, 11),
        ("drain", 7, 11),
    ]


def test_step_done_splits_the_time_between_steps(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "j")
    rec, tick = rank.recorder, rank.clock.advance
    rec.resumed(0)
    rec.switch(Bucket.STEP)
    for step in (1, 2):
        tick(1)
        with rec.span(Bucket.CKPT_BLOCK):
            tick(0.5)
        tick(2)
        rec.step_done(step)
    tick(9)
    page = read_journal(rank.path)
    assert page.array["flags"].tolist()[1:] == [0, 0, STEP_DONE, 0, 0, STEP_DONE]
    assert rank.timeline()[1:] == [
        ("step", 1, 1),
        ("ckpt_block", 0.5, 1),
        ("step", 2, 1),
        ("step", 1, 2),
        ("ckpt_block", 0.5, 2),
        ("step", 2, 2),
    ]
    assert page.open_record is not None and page.open_record.step == 3
    assert rec.step == 2


def test_spans_may_end_out_of_order(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "j")
    outer, inner = rank.recorder.span(Bucket.EVAL), rank.recorder.span(Bucket.DATA_WAIT)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert rank.recorder.bucket is Bucket.DATA_WAIT
    inner.__exit__(None, None, None)
    assert rank.recorder.bucket is Bucket.STARTUP


def test_a_span_ends_when_its_body_raises(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "j")
    with pytest.raises(KeyError), rank.recorder.span(Bucket.EVAL):
        raise KeyError
    assert rank.recorder.bucket is Bucket.STARTUP


def test_the_heartbeat_stamps_the_open_record(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "j")
    rank.clock.advance(3)
    rank.recorder.beat()
    page = read_journal(rank.path)
    assert page.open_record is not None
    assert page.heartbeat_ns - page.open_record.start_ns == 3_000_000_000
    assert rank.recorder.elapsed_s() == 3


def steps(rank: Rank, num: int) -> None:
    for _ in range(num):
        rank.clock.advance(0.01)
        rank.recorder.step_done(rank.recorder.step + 1)


def test_pages_deliver_every_record_once_when_the_receiver_keeps_up(tmp_path: Path) -> None:
    pages: list[JournalPage] = []
    rank = Rank(tmp_path / "j", send=pages.append, page_records=7)
    rank.recorder.resumed(0)
    steps(rank, 20)
    assert rank.recorder.deliver()
    steps(rank, 3)
    rank.recorder.close()
    assert b"".join(p.data for p in pages) == read_journal(rank.path).data
    assert [p.first_record for p in pages] == [0, 7, 14, 20]
    assert pages[-1].closed


def test_a_receiver_that_fails_gets_the_same_records_again(tmp_path: Path) -> None:
    got: list[JournalPage] = []
    fail = [True]

    def send(page: JournalPage) -> None:
        got.append(page)
        if fail[0]:
            raise ConnectionError("gone")

    rank = Rank(tmp_path / "j", send=send)
    rank.recorder.resumed(0)
    steps(rank, 5)
    assert not rank.recorder.deliver()
    fail[0] = False
    assert rank.recorder.deliver()
    assert got[0].first_record == got[1].first_record == 0 and got[1].next_record == 5


def test_a_receiver_that_lost_records_gets_them_again(tmp_path: Path) -> None:
    state = {"next": 0}

    def send(page: JournalPage) -> int:
        if page.first_record <= state["next"]:
            state["next"] = page.next_record
        return state["next"]

    rank = Rank(tmp_path / "j", send=send)
    rank.recorder.resumed(0)
    steps(rank, 50)
    rank.recorder.deliver()
    state["next"] = 12  # the receiver was replaced by one that knows less
    steps(rank, 5)
    rank.recorder.deliver()
    assert state["next"] == 55


def test_a_receiver_that_always_asks_for_old_records_does_not_keep_the_sender(tmp_path: Path) -> None:
    calls: list[int] = []

    def send(page: JournalPage) -> int:
        calls.append(page.first_record)
        return 0

    rank = Rank(tmp_path / "j", send=send)
    steps(rank, 3)
    assert rank.recorder.deliver()
    assert len(calls) <= 4


def broken(path: Path) -> Recorder:
    path.write_text("a file where a folder must be")
    return Recorder(JournalWriter(path / "j", run="r", attempt=0, world_rank=0, node="n"), SystemClock())


def test_a_disk_that_fails_at_the_start_never_reaches_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rec = broken(tmp_path / "file")
    rec.start()
    rec.resumed(3)
    rec.switch(Bucket.STEP)
    with rec.span(Bucket.EVAL):
        rec.step_done(4)
    rec.beat()
    rec.close()
    rec.close()
    assert rec.step == 4
    assert [r.levelname for r in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("opened", [False, True])
def test_a_rank_without_a_journal_still_says_that_it_is_there_at_each_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    pages: list[JournalPage] = []
    there: list[int] = []
    if not opened:
        (tmp_path / "file").write_text("a file where a folder must be")
    writer = JournalWriter(tmp_path / "file" / "j", run="r", attempt=0, world_rank=0, node="n")
    rec = Recorder(writer, ManualClock(), send=pages.append, on_give_up=lambda: there.append(1))
    rec.start(threads=False)
    monkeypatch.setattr(JournalWriter, "roll", failing)
    rec.step_done(1)
    assert not there, "never on the training thread: it may wait for the receiver"
    assert all(rec.deliver() for _ in range(3))
    assert len(there) == 3 and not pages
    rec.close()


def failing(*_: object, **__: object) -> None:
    raise OSError("the disk went away")


@pytest.mark.parametrize(
    "act",
    [
        lambda rec: rec.step_done(1),
        lambda rec: rec.switch(Bucket.STEP),
        lambda rec: rec.span(Bucket.EVAL).__enter__(),
    ],
)
def test_a_disk_that_fails_later_never_reaches_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Recorder], None]
) -> None:
    rank = Rank(tmp_path / "j")
    monkeypatch.setattr(JournalWriter, "roll", failing)
    act(rank.recorder)
    act(rank.recorder)
    rank.recorder.close()
    assert read_journal(rank.path).next_record == 0


def test_threads_beat_and_send_and_end_with_close(tmp_path: Path) -> None:
    sent = threading.Event()
    rec = Recorder(
        JournalWriter(tmp_path / "j", run="r", attempt=0, world_rank=0, node="n"),
        SystemClock(),
        send=lambda page: sent.set(),
        heartbeat_s=0.005,
    )
    before = threading.active_count()
    rec.start()
    first = read_journal(tmp_path / "j").heartbeat_ns
    assert sent.wait(10)
    rec.close()
    page = read_journal(tmp_path / "j")
    assert page.closed and page.heartbeat_ns > first
    assert threading.active_count() == before


def test_a_receiver_that_hangs_neither_stops_the_heartbeat_nor_holds_up_the_end(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def send(page: JournalPage) -> None:
        entered.set()
        release.wait(30)

    rec = Recorder(
        JournalWriter(tmp_path / "j", run="r", attempt=0, world_rank=0, node="n"),
        SystemClock(),
        send=send,
        heartbeat_s=0.005,
    )
    rec.start()
    try:
        assert entered.wait(10)
        seen = {read_journal(tmp_path / "j").heartbeat_ns}
        deadline = threading.Event()
        for _ in range(2000):
            seen.add(read_journal(tmp_path / "j").heartbeat_ns)
            if len(seen) > 2 or deadline.wait(0.005):
                break
        assert len(seen) > 2
        rec.close(timeout_s=0.2)
        assert read_journal(tmp_path / "j").closed
    finally:
        release.set()


def test_threads_that_switch_at_once_leave_a_timeline_without_holes(tmp_path: Path) -> None:
    rec = Recorder(JournalWriter(tmp_path / "j", run="r", attempt=0, world_rank=0, node="n"), SystemClock())
    rec.start()
    rec.resumed(0)

    def work(bucket: Bucket) -> None:
        for _ in range(300):
            with rec.span(bucket):
                rec.switch(Bucket.STEP)

    threads = [threading.Thread(target=work, args=(b,)) for b in (Bucket.EVAL, Bucket.DATA_WAIT, Bucket.CKPT_BLOCK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rec.close()
    page = read_journal(tmp_path / "j")
    start, end = page.array["start_ns"], page.array["end_ns"]
    assert page.closed and np.array_equal(start[1:], end[:-1])
