"""The ledger: the pinned example to all digits, and what happens to time nobody saw."""

from __future__ import annotations

import json
import logging

import pytest

from journal_pages import Stretch, page, steps
from ray_goodput.core.buckets import Bucket
from ray_goodput.errors import StorageError
from ray_goodput.goodput.journal import JournalPage
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.report import GoodputReport
from ray_goodput.goodput.run_timeline import place_timelines

B = Bucket
FIRST: list[Stretch] = [
    (B.STARTUP, 100, -1, False),
    (B.DATA_WAIT, 40, 1, False),
    *steps(1, 84, 10),
    (B.CKPT_BLOCK, 20, 85, False),
]
SECOND: list[Stretch] = [
    (B.STARTUP, 60, -1, False),
    (B.CKPT_LOAD, 30, 81, False),
    (B.DATA_WAIT, 70, 81, False),
    *steps(81, 230, 12),
    (B.CKPT_BLOCK, 40, 231, False),
]


def pinned(ledger: Ledger) -> Ledger:
    ledger.run_started(1000)
    ledger.attempt_started(0, 8, 1000)
    for rank in range(8):
        ledger.rank_hello(0, rank, 1000)
        ledger.page(page(0, rank, FIRST))
    ledger.commit(80, 0, 1950)
    ledger.attempt_ended(0, 2000, "failed", ranks=[3], reason="rank 3 was killed")
    ledger.attempt_started(1, 7, 2120)
    for rank in range(7):
        ledger.rank_hello(1, rank, 2120)
    ledger.resumed(1, 80)
    for rank in range(7):
        ledger.page(page(1, rank, SECOND, closed=True))
    ledger.attempt_ended(1, 4120, "finished")
    ledger.run_ended(4120)
    return ledger


def hung(ledger: Ledger) -> Ledger:
    """Rank 1 stops in step 11 and says nothing for 70 s; rank 0 waits for it, unwinds when it is killed, and closes."""
    ledger.run_started(1000)
    ledger.attempt_started(1, 2, 1000)
    for rank in range(2):
        ledger.rank_hello(1, rank, 1000)
        ledger.page(page(1, rank, steps(1, 10, 1), open_for=(B.STEP, 2, 11)))
    ledger.commit(5, 1, 1006)
    ledger.hung(1)
    ledger.page(page(1, 0, [*steps(1, 10, 1), (B.STEP, 71, 11, False)], closed=True))
    ledger.attempt_ended(1, 1082, "hang", ranks=[1], reason="Hung: rank 1 is stopped")
    return ledger


def test_time_in_a_hang_is_no_step_and_none_that_was_lost() -> None:
    first = hung(Ledger(2))
    lines = [line for segment in first.to_segments() for line in segment.data.splitlines()]
    for ledger in (first, Ledger.from_lines(lines)):
        report = ledger.report(1082)
        assert report.buckets_s["hang"] == pytest.approx(2 * 72)  # rank 0: 71 and 1 after its journal; rank 1: 2 and 70
        assert report.buckets_s["step"] == pytest.approx(20) and report.buckets_s["detect"] == 0
        assert report.imbalance_s == pytest.approx(0)
        [incident] = report.incidents
        assert (incident.kind, incident.ranks, incident.step_reached) == ("hang", (1,), 10)
    timeline = place_timelines(first)
    assert timeline.columns(1, 1)[0][B.HANG] == pytest.approx(72)
    assert timeline.columns(0, 1)[0][B.HANG] == pytest.approx(72)


def test_a_hang_is_written_where_older_readers_do_not_look() -> None:
    lines = [json.loads(line) for segment in hung(Ledger(2)).to_segments() for line in segment.data.splitlines()]
    ranks = [line for line in lines if line.get("event") == "rank"]
    assert {line["hung_from_ns"] for line in ranks} == {10 * 10**9}
    undisturbed = [json.loads(x) for s in pinned(Ledger(8)).to_segments() for x in s.data.splitlines()]
    assert not any("hung_from_ns" in line for line in undisturbed)


def check_pin(report: GoodputReport) -> None:
    assert {k: v for k, v in report.buckets_s.items() if v} == {
        "step": 19000,
        "lost": 320,
        "startup": 1220,
        "ckpt_block": 440,
        "data_wait": 810,
        "ckpt_load": 210,
        "restart": 840,
        "idle_nodes": 2120,
    }
    assert sum(report.buckets_s.values()) == 24960 == report.target_world * report.wall_s
    assert round(report.overall, 6) == 0.761218
    assert round(report.runtime, 6) == 0.831874
    assert round(report.availability, 6) == 0.915064
    assert report.overall == pytest.approx(report.availability * report.runtime, rel=1e-15)
    assert (report.uncertainty_s, report.imbalance_s) == (0, 0)
    # Durable up to step 80: the second attempt's steps are still at risk.
    assert (report.committed_s, report.at_risk_s, report.lost_s) == (80 * 10 * 8, 150 * 12 * 7, 320)


def test_the_pinned_example_to_all_digits() -> None:
    report = pinned(Ledger(8)).report()
    check_pin(report)
    assert report.finished
    first, second = report.attempts
    assert sum(first.buckets_s.values()) == 8 * 1000
    assert sum(second.buckets_s.values()) == 8 * 2120
    assert (first.outcome, first.resumed_step, first.last_step) == ("failed", 0, 84)
    assert (second.outcome, second.resumed_step, second.last_step) == ("finished", 80, 230)
    (incident,) = report.incidents
    assert (incident.attempt, incident.kind, incident.ranks) == (0, "failed", (3,))
    assert (incident.step_reached, incident.step_resumed, incident.steps_lost, incident.lost_s) == (84, 80, 4, 320)
    assert incident.down_s == 120 + 60 + 30 + 70 + 12


def test_a_later_commit_makes_the_step_time_committed() -> None:
    ledger = pinned(Ledger(8))
    ledger.commit(230, 1, 4120)
    report = ledger.report()
    assert (report.committed_s, report.at_risk_s) == (19000, 0)


def replayed(ledger: Ledger) -> Ledger:
    return Ledger.from_lines(b"".join(s.data for s in ledger.to_segments()).splitlines())


def test_segments_replay_to_the_same_report() -> None:
    ledger = pinned(Ledger(8))
    again = replayed(ledger)
    check_pin(again.report())
    assert again.report() == ledger.report()


def test_sealing_after_every_event_replays_to_the_same_report() -> None:
    class Sealing(Ledger):
        def __getattribute__(self, name: str) -> object:
            if name in ("attempt_started", "page", "commit", "resumed", "attempt_ended", "run_ended"):
                Ledger.to_segments(self)
            return super().__getattribute__(name)

    segments = pinned(Sealing(8)).to_segments()
    assert [s.number for s in segments] == list(range(len(segments))) and len(segments) > 15
    assert segments[0].name == "ledger-00000000.jsonl"
    lines = [line for s in segments for line in (*s.data.splitlines(), *s.data.splitlines())]  # each told twice
    check_pin(Ledger.from_lines(lines).report())


def test_a_coordinator_that_died_in_the_middle_goes_on_from_its_segments() -> None:
    ledger = Ledger(8)
    ledger.run_started(1000)
    ledger.attempt_started(0, 8, 1000)
    for rank in range(8):
        ledger.rank_hello(0, rank, 1000)
        ledger.page(page(0, rank, FIRST, last=20))
    saved = ledger.to_segments()
    for rank in range(8):
        ledger.page(page(0, rank, FIRST, first=20, last=50))  # told, but not saved
    again = Ledger.from_lines(b"".join(s.data for s in saved).splitlines())
    for rank in range(8):
        assert again.page(page(0, rank, FIRST, first=50)) == 20  # please again from there
        assert again.page(page(0, rank, FIRST, first=20, closed=True)) == len(FIRST)
    again.commit(80, 0, 1950)
    again.attempt_ended(0, 2000, "failed")
    assert [s.number for s in again.to_segments()] == [1]
    report = again.report()
    assert report.buckets_s["step"] == 8 * 840
    assert report.buckets_s["detect"] == 0
    assert replayed_from([*saved, *again.to_segments()]) == report


def replayed_from(segments: list) -> GoodputReport:
    return Ledger.from_lines([line for s in segments for line in s.data.splitlines()]).report()


def test_saved_segments_are_let_go() -> None:
    ledger = pinned(Ledger(8))
    (segment,) = ledger.to_segments()
    assert ledger.to_segments() == (segment,)  # until it is told to be saved
    ledger.saved(segment.number)
    assert ledger.to_segments() == ()


def test_facts_told_twice_count_once() -> None:
    ledger = pinned(pinned(Ledger(8)))
    check_pin(ledger.report())


def test_pages_may_overlap_and_repeat() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 0)
    ledger.rank_hello(0, 0, 0)
    num = len(FIRST)
    for first, last in [(0, 10), (0, 10), (5, 30), (20, 25), (30, 60), (0, num), (num, num)]:
        ledger.page(page(0, 0, FIRST, first=first, last=last))
    ledger.attempt_ended(0, 1000, "finished")
    report = ledger.report()
    assert (report.buckets_s["step"], report.imbalance_s) == (840, 0)


def run_of_one(
    end: float, outcome: str, *pages: JournalPage, hello: float | None = 5.0, world: int = 1
) -> GoodputReport:
    ledger = Ledger(world)
    ledger.run_started(0)
    ledger.attempt_started(0, world, 0)
    if hello is not None:
        ledger.rank_hello(0, 0, hello)
    for p in pages:
        ledger.page(p, at=None)
    ledger.attempt_ended(0, end, outcome)
    ledger.run_ended(end)
    return ledger.report()


def test_time_before_the_journal_is_startup_and_after_it_detect_or_shutdown() -> None:
    script = steps(1, 3, 10)
    failed = run_of_one(100, "failed", page(0, 0, script))
    assert failed.buckets_s["startup"] == 5 and failed.buckets_s["detect"] == 65 and failed.buckets_s["step"] == 30
    assert failed.uncertainty_s == 1  # within one heartbeat after its last record it may have gone on
    finished = run_of_one(100, "finished", page(0, 0, script, closed=True))
    assert finished.buckets_s["shutdown"] == 65 and finished.uncertainty_s == 0


def test_the_open_record_counts_until_the_last_heartbeat() -> None:
    report = run_of_one(100, "failed", page(0, 0, steps(1, 3, 10), open_for=(B.STEP, 40, 4)))
    assert report.buckets_s["step"] == 70 and report.buckets_s["detect"] == 25


def test_an_open_record_that_went_on_is_not_counted_twice() -> None:
    script = steps(1, 3, 10)
    report = run_of_one(
        100,
        "failed",
        page(0, 0, script, open_for=(B.STEP, 40, 4)),
        page(0, 0, script, open_for=(B.STEP, 30, 4)),  # overtaken on its way
        page(0, 0, [*script, (B.STEP, 50, 4, True)]),
    )
    assert report.buckets_s["step"] == 80


def test_the_step_in_progress_at_a_failure_is_lost_once_a_later_attempt_went_on_before_it() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 0)
    ledger.rank_hello(0, 0, 0)
    ledger.page(page(0, 0, steps(1, 3, 10), open_for=(B.STEP, 7, 4)))
    ledger.commit(3, 0, 35)
    ledger.attempt_ended(0, 40, "failed")
    assert ledger.report().at_risk_s == 7 and ledger.report().lost_s == 0
    ledger.attempt_started(1, 1, 50)
    ledger.resumed(1, 3)
    report = ledger.report()
    assert (report.committed_s, report.at_risk_s, report.lost_s) == (30, 0, 7)
    assert report.incidents[0].steps_lost == 0


def test_a_hello_may_come_late_when_it_says_how_late() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 0)
    ledger.rank_hello(0, 0, 9, journal_s=4)
    ledger.page(page(0, 0, steps(1, 3, 10)))
    ledger.attempt_ended(0, 40, "failed")
    assert ledger.report().buckets_s["startup"] == 5


def test_without_a_hello_the_arrival_of_a_page_places_the_journal() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 0)
    ledger.page(page(0, 0, steps(1, 3, 10), open_for=(B.STEP, 2, 4)), at=36)
    ledger.attempt_ended(0, 40, "failed")
    report = ledger.report()
    assert (report.buckets_s["startup"], report.buckets_s["step"], report.buckets_s["detect"]) == (4, 32, 4)


def test_more_time_than_there_was_shortens_startup_and_is_uncertain() -> None:
    report = run_of_one(33, "failed", page(0, 0, steps(1, 3, 10), closed=True))
    assert report.buckets_s["startup"] == 3 and report.uncertainty_s == 2 and report.imbalance_s == 0
    report = run_of_one(28, "failed", page(0, 0, steps(1, 3, 10), closed=True))
    assert report.imbalance_s == 2 and report.uncertainty_s == 7


def test_ranks_that_never_spoke_were_starting_unless_others_stepped() -> None:
    report = run_of_one(100, "failed", hello=None, world=2)
    assert report.buckets_s["startup"] == 200 and report.uncertainty_s == 0
    report = run_of_one(100, "failed", page(0, 0, steps(1, 3, 10), closed=True), world=2)
    assert report.buckets_s["other"] == 100 and report.uncertainty_s == 100
    assert sum(report.buckets_s.values()) == 200


def test_records_overwritten_before_delivery_are_unknown_time() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 0)
    ledger.rank_hello(0, 0, 0)
    script = steps(1, 20, 1)
    ledger.page(page(0, 0, script, last=5))
    assert ledger.page(page(0, 0, script, first=9)) == 5  # they can still be had
    assert ledger.page(page(0, 0, script, first=9, oldest=9, closed=True)) == 20
    ledger.attempt_ended(0, 20, "finished")
    report = ledger.report()
    assert (report.buckets_s["step"], report.buckets_s["other"], report.uncertainty_s) == (16, 4, 4)


def test_a_running_attempt_is_booked_to_what_it_was_last_seen_doing() -> None:
    ledger = Ledger(2)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 10)
    ledger.rank_hello(0, 0, 12)
    ledger.page(page(0, 0, steps(1, 3, 10), open_for=(B.DATA_WAIT, 1, 4)))
    report = ledger.report(at=50)
    assert not report.finished and report.attempts[0].outcome == "running"
    assert report.buckets_s["data_wait"] == 8 and report.uncertainty_s == 7
    assert report.buckets_s["startup"] == 12 and report.buckets_s["idle_nodes"] == 50
    assert report.imbalance_s == 0 and not report.incidents


def test_a_run_without_an_attempt_was_starting() -> None:
    ledger = Ledger(4)
    assert ledger.report().overall == 0 and ledger.report().wall_s == 0
    ledger.run_started(10)
    assert ledger.report(at=40).buckets_s["startup"] == 120


def test_the_end_of_the_last_attempt_decides_what_comes_after_it() -> None:
    for outcome, bucket in [("finished", "shutdown"), ("failed", "restart")]:
        ledger = Ledger(3)
        ledger.run_started(0)
        ledger.attempt_started(0, 2, 0)
        ledger.rank_hello(0, 0, 0)
        ledger.rank_hello(0, 1, 0)
        for rank in (0, 1):
            ledger.page(page(0, rank, steps(1, 3, 10), closed=True))
        ledger.attempt_ended(0, 30, outcome)
        ledger.run_ended(37)
        report = ledger.report()
        assert report.buckets_s[bucket] == 14 and report.buckets_s["idle_nodes"] == 37


def test_time_between_two_drivers_is_not_the_runs() -> None:
    ledger = Ledger(1)
    for start, attempt in [(0, 0), (10_000, 1)]:
        ledger.run_started(start)
        ledger.attempt_started(attempt, 1, start + 5)
        ledger.rank_hello(attempt, 0, start + 5)
        ledger.page(page(attempt, 0, steps(3 * attempt + 1, 3 * attempt + 3, 10), closed=True))
        if attempt:
            ledger.attempt_ended(attempt, start + 35, "finished")
            ledger.run_ended(start + 35)
        else:
            ledger.commit(3, 0, start + 35)  # the driver's last words
    report = ledger.report()
    assert report.wall_s == 70 and report.imbalance_s == 0
    assert report.buckets_s["step"] == 60 and report.buckets_s["startup"] == 10
    assert replayed(ledger).report() == report


def test_a_fallback_to_an_older_commit_loses_what_was_committed() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 0)
    ledger.rank_hello(0, 0, 0)
    ledger.page(page(0, 0, steps(1, 30, 1), closed=True))
    for step in (10, 20, 30):
        ledger.commit(step, 0, step)
    ledger.attempt_ended(0, 30, "failed")
    ledger.attempt_started(1, 1, 30)
    ledger.resumed(1, 10)  # the commits of steps 30 and 20 could not be read
    report = ledger.report()
    assert (report.committed_s, report.at_risk_s, report.lost_s) == (10, 0, 20)
    assert report.durable_step == 10 and report.incidents[0].steps_lost == 20


def test_a_resume_beyond_the_newest_commit_stays_an_exact_border_when_later_ones_pass_it() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 0)
    ledger.rank_hello(0, 0, 0)
    ledger.page(page(0, 0, [*steps(1, 15, 1), *steps(16, 20, 3)], closed=True))
    ledger.commit(10, 0, 10)
    ledger.attempt_ended(0, 30, "failed")
    ledger.attempt_started(1, 1, 30)
    ledger.rank_hello(1, 0, 30)
    ledger.resumed(1, 15)  # from memory, newer than what is in storage
    ledger.page(page(1, 0, steps(16, 40, 1), closed=True))
    ledger.commit(40, 1, 55)
    report = ledger.report()
    assert (report.lost_s, report.committed_s, report.at_risk_s) == (15, 40, 0)
    assert replayed(ledger).report() == report


def test_an_attempt_that_never_resumed_rolls_nothing_back() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    for attempt in (0, 1, 2):
        ledger.attempt_started(attempt, 1, attempt * 50)
        ledger.rank_hello(attempt, 0, attempt * 50)
        if attempt == 0:
            ledger.page(page(0, 0, steps(1, 4, 10), closed=True))
        ledger.attempt_ended(attempt, attempt * 50 + 40, "failed")
    report = ledger.report()
    assert report.lost_s == 0 and report.at_risk_s == 40
    assert [i.step_resumed for i in report.incidents] == [None, None, None]


def test_steps_behind_a_commit_are_kept_as_one_sum() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 0)
    script = steps(1, 5000, 0.01)
    for first in range(0, 5000, 100):
        ledger.page(page(0, 0, script, first=first, last=first + 100))
        ledger.commit(first + 90, 0, first / 100)
        kept = ledger._attempts[0].steps.num_kept()
        assert kept <= first // 100 + 1 + 10


def test_facts_about_strangers_are_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(2)
    ledger.run_started(0)
    ledger.attempt_started(0, 2, 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert ledger.page(page(7, 0, steps(1, 2, 1), first=1)) == 1
            ledger.rank_hello(0, 2, 5)
            ledger.resumed(9, 4)
            ledger.attempt_ended(9, 4, "failed")
    assert len(caplog.records) == 4
    assert ledger.report(at=5).buckets_s["startup"] == 10


def test_buckets_of_a_newer_release_count_as_other() -> None:
    report = run_of_one(15, "failed", page(0, 0, [(200, 4, 1, False), (B.LOST, 6, 1, True)]))  # type: ignore[list-item] (a view)
    assert report.buckets_s["other"] == 10


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"format":"ray_goodput.ledger","version":4,"segment":0,"target_world":1}'], "version 4"),
        (['{"format":"else","version":1,"segment":0,"target_world":1}'], "else"),
        (['{"format":"ray_goodput.ledger","version":1,"segment":1,"target_world":1}'], "Segment 0"),
        (['{"format":"ray_goodput.ledger","version":1,"segment":0,"target_world":1}', '{"event":"tick"}'], "Line 2"),
        (['{"format":"ray_goodput.ledger","version":1,"segment":0,"target_world":1}', '{"event":"com'], "Line 2"),
        (['{"format":"ray_goodput.ledger","version":1,"segment":0,"target_world":1}', '["x"]'], "Line 2"),
        (
            ['{"format":"ray_goodput.ledger","version":1,"segment":0,"target_world":1}', '{"event":"commit"}'],
            "Line 2",
        ),
    ],
)
def test_a_ledger_that_cannot_be_read_says_where(lines: list[str], message: str) -> None:
    with pytest.raises(StorageError, match=message):
        Ledger.from_lines(lines)


def test_the_segment_format_is_version_3_as_documented() -> None:
    ledger = Ledger(1)
    ledger.run_started(5)
    ledger.attempt_started(0, 1, 6)
    ledger.rank_hello(0, 0, 7)
    ledger.page(page(0, 0, [(B.STARTUP, 1, -1, False), *steps(1, 2, 2)], open_for=(B.STEP, 0.5, 3)), at=20)
    ledger.commit(2, 0, 21)
    (segment,) = ledger.to_segments()
    assert [json.loads(line) for line in segment.data.splitlines()] == [
        {"format": "ray_goodput.ledger", "version": 3, "segment": 0, "target_world": 1},
        {"event": "run_started", "at": 5},
        {"event": "attempt_started", "at": 6, "attempt": 0, "world": 1},
        {"event": "commit", "step": 2, "attempt": 0, "at": 21},
        {
            "event": "rank",
            "attempt": 0,
            "world_rank": 0,
            "started_at": 7,
            "next_record": 3,
            "ns": {"startup": 1_000_000_000, "step": 4_000_000_000},
            "end_ns": 5_000_000_000,
            "life_ns": 5_500_000_000,
            "open_bucket": 1,
            "open_ns": 500_000_000,
            "open_step": 3,
            "gap_ns": 0,
            "first_done_ns": 3_000_000_000,
            "last_done": 2,
            "closed": False,
            "node": "n",
        },
        {
            "event": "timeline",
            "attempt": 0,
            "world_rank": 0,
            "cell_s": 0.25,
            "first": 0,
            "cells": [[0, 5, 250]] * 4 + [[0, 1, 250]] * 7 + [[1, 1, 250]] + [[0, 1, 250]] * 7 + [[1, 1, 250]],
        },
        {"event": "steps", "attempt": 0, "lowest_step": 1, "ns": [[2, [4_000_000_000]]]},
        {"event": "seen", "at": 21},
    ]
