"""Timelines: the same time as the sums, in bounded room, and placed so that nothing is missing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from journal_pages import Stretch, page, steps
from ray_goodput.core.buckets import Bucket
from ray_goodput.errors import StorageError
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.run_measures import measure_run
from ray_goodput.goodput.run_timeline import RunTimeline, place_timelines
from ray_goodput.goodput.timeline import MAX_CELLS, MAX_RANKS, Timeline, cell_length_s

B = Bucket
HEAD = '{"format":"ray_goodput.ledger","version":2,"segment":0,"target_world":1}'


def two_attempts(num_steps: int = 84, step_s: float = 10.0) -> Ledger:
    """Eight ranks, the last four steps lost; then seven ranks, still running."""
    first: list[Stretch] = [
        (B.STARTUP, 10 * step_s, -1, False),
        (B.DATA_WAIT, 4 * step_s, 1, False),
        *steps(1, num_steps, step_s),
    ]
    second: list[Stretch] = [
        (B.CKPT_LOAD, 3 * step_s, num_steps - 3, False),
        *steps(num_steps - 3, num_steps + 40, step_s),
    ]
    ledger = Ledger(8)
    ledger.run_started(1000)
    ledger.attempt_started(0, 8, 1000 + step_s)
    for rank in range(8):
        ledger.rank_hello(0, rank, 1000 + 2 * step_s)
        ledger.page(page(0, rank, first, open_for=(B.STEP, step_s / 2, num_steps + 1)))
    ledger.commit(num_steps - 4, 0, 1000 + (num_steps + 10) * step_s)
    end = 1000 + (num_steps + 20) * step_s
    ledger.attempt_ended(0, end, "worker_lost", ranks=[3])
    ledger.attempt_started(1, 7, end + 5 * step_s)
    for rank in range(7):
        ledger.rank_hello(1, rank, end + 6 * step_s)
    ledger.resumed(1, num_steps - 4)
    for rank in range(7):
        ledger.page(page(1, rank, second, open_for=(B.CKPT_BLOCK, step_s, num_steps + 41)), at=end + 54 * step_s)
    return ledger


def by_bucket(timeline: RunTimeline) -> np.ndarray:
    spans = [span for rank in timeline.ranks for span in rank.spans]
    return sum((np.array(s.shares) * (s.end_s - s.start_s) for s in spans), np.zeros(len(spans[0].shares)))


def replayed(ledger: Ledger) -> Ledger:
    return Ledger.from_lines(b"".join(s.data for s in ledger.to_segments()).splitlines())


def as_version_1(ledger: Ledger) -> Ledger:
    lines = [json.loads(line) for s in ledger.to_segments() for line in s.data.splitlines()]
    assert any(line.get("event") == "timeline" for line in lines)
    kept = [line | ({"version": 1} if "version" in line else {}) for line in lines if line.get("event") != "timeline"]
    return Ledger.from_lines(json.dumps(line) for line in kept)


@pytest.mark.parametrize("step_s", [0.004, 0.5, 10.0, 3600.0])
def test_the_spans_of_all_ranks_add_up_to_the_report_bucket_by_bucket(step_s: float) -> None:
    ledger = two_attempts(step_s=step_s)
    report = ledger.report()
    timeline = place_timelines(ledger)
    sums = by_bucket(timeline)
    total = report.target_world * report.wall_s
    assert sums.sum() == pytest.approx(total, rel=1e-6)
    assert timeline.wall_s == pytest.approx(report.wall_s)
    cell_s = cell_length_s(report.wall_s)
    for bucket in Bucket:
        # Of a cell that is cut off by an attempt's end, and at the border of what was lost, only shares are known.
        assert sums[bucket] == pytest.approx(report.buckets_s[bucket.label], abs=max(3e-3 * total, 16 * cell_s)), bucket
    assert sums[B.LOST] > 3.5 * 8 * step_s - 16 * cell_s


def test_spans_of_a_rank_have_no_holes_and_reach_from_the_gap_to_the_end() -> None:
    timeline = place_timelines(two_attempts())
    assert [(r.attempt, r.world_rank) for r in timeline.ranks] == [
        *((0, r) for r in range(8)),
        *((1, r) for r in range(7)),
        (None, 7),
    ]
    for rank in timeline.ranks:
        for a, b in zip(rank.spans, rank.spans[1:], strict=False):
            assert a.end_s == b.start_s
        assert all(sum(s.shares) == pytest.approx(1) for s in rank.spans)
    assert {(r.spans[0].start_s, r.spans[-1].end_s) for r in timeline.ranks} == {(1000, 2040), (2040, 2580)}
    assert sum(n for _, n in timeline.ranks[0].steps) == 84
    assert sum(n for _, n in timeline.ranks[8].steps) == 44


def test_a_replay_draws_the_same_timeline() -> None:
    ledger = two_attempts()
    live, again = place_timelines(ledger), place_timelines(replayed(ledger))
    assert again.sessions == live.sessions
    np.testing.assert_allclose(by_bucket(again), by_bucket(live), atol=0.5)
    assert [r.steps for r in again.ranks] == [r.steps for r in live.ranks]


def test_a_replay_of_many_segments_with_a_growing_cell_draws_the_same_timeline() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    ledger.attempt_started(0, 1, 0)
    ledger.rank_hello(0, 0, 0)
    script = [part for s in range(1, 400) for part in ((B.DATA_WAIT, 0.3, s, False), (B.STEP, 1.0, s, True))]
    for last in range(0, len(script) + 1, 38):
        ledger.page(page(0, 0, script[:last], first=max(0, last - 57), last=last), at=1.3 * last / 2)  # pages overlap
        ledger.to_segments()
    (live,), (again,) = place_timelines(ledger).ranks, place_timelines(replayed(ledger)).ranks
    assert ledger.sessions[0].attempts[0].timelines[0].cell_s == 2.0
    assert again.steps == live.steps and sum(n for _, n in live.steps) == 399
    np.testing.assert_allclose([s.shares for s in again.spans], [s.shares for s in live.spans], atol=2e-3)


def test_a_ledger_of_version_1_shows_each_rank_as_one_stretch_with_the_right_sums() -> None:
    ledger = two_attempts()
    report = as_version_1(ledger).report()
    assert report == ledger.report()
    sums = by_bucket(place_timelines(as_version_1(two_attempts())))
    for bucket in Bucket:
        assert sums[bucket] == pytest.approx(report.buckets_s[bucket.label], rel=0.01, abs=1), bucket


def test_however_long_a_run_a_rank_needs_a_bounded_number_of_cells() -> None:
    timeline = Timeline()
    told = 0
    chunk = 100_000
    for i in range(0, 3_000_000, chunk):  # a step of a second: a month
        start = np.arange(i, i + chunk, dtype=np.int64) * 10**9
        timeline.add(start, start + 10**9, np.full(chunk, B.STEP), np.ones(chunk, bool))
        changes = timeline.take_changes()
        assert changes is not None
        told += len(changes[1])
    assert len(timeline.seconds) <= MAX_CELLS and told < 4 * MAX_CELLS
    assert timeline.steps.sum() == 3_000_000
    assert timeline.seconds[:, B.STEP].sum() == pytest.approx(3_000_000, rel=1e-5)


def test_many_attempts_share_the_bound_of_the_run() -> None:
    ledger = Ledger(1)
    ledger.run_started(0)
    for attempt in range(50):
        ledger.attempt_started(attempt, 1, attempt * 1000)
        ledger.rank_hello(attempt, 0, attempt * 1000)
        ledger.page(page(attempt, 0, steps(1, 99, 10.0)), at=attempt * 1000 + 990)
    books = ledger.sessions[0].attempts
    assert sum(len(b.timelines[0].seconds) for b in books) <= MAX_CELLS + 2 * len(books)


def test_ranks_beyond_the_bound_have_sums_only() -> None:
    ledger = Ledger(MAX_RANKS + 1)
    ledger.attempt_started(0, MAX_RANKS + 1, 0)
    for rank in (0, MAX_RANKS):
        ledger.rank_hello(0, rank, 0)
        ledger.page(page(0, rank, steps(1, 10, 1.0)), at=10)
    assert list(ledger.sessions[0].attempts[0].timelines) == [0]
    last = place_timelines(ledger).ranks[-1]
    assert last.world_rank == MAX_RANKS and last.spans[0].shares[B.STEP] == 1.0


def test_records_that_were_overwritten_show_as_other() -> None:
    ledger = Ledger(1)
    ledger.attempt_started(0, 1, 0)
    ledger.rank_hello(0, 0, 0)
    ledger.page(page(0, 0, steps(1, 100, 1.0), first=60, oldest=60), at=100)
    sums = by_bucket(place_timelines(ledger))
    assert (sums[B.OTHER], sums[B.STEP]) == (pytest.approx(60, abs=0.3), pytest.approx(40, abs=0.3))


@pytest.mark.parametrize(
    "event",
    [
        {"cell_s": 0.25, "first": 10**12, "cells": [[0]]},
        {"cell_s": 0.0, "first": 0, "cells": [[0, 1, 250]]},
        {"cell_s": 0.25, "first": 0, "cells": [[0, 1]]},
        {"cell_s": 0.25, "first": 0, "cells": [[]]},
    ],
)
def test_a_damaged_timeline_names_its_line(event: dict[str, object]) -> None:
    start = '{"event":"attempt_started","attempt":0,"world":1,"at":0}'
    line = json.dumps({"event": "timeline", "attempt": 0, "world_rank": 0} | event)
    with pytest.raises(StorageError, match="Line 3"):
        Ledger.from_lines([HEAD, start, line])


def test_a_run_without_an_attempt_waits_on_all_ranks() -> None:
    ledger = Ledger(2)
    ledger.run_started(5)
    assert place_timelines(ledger).ranks == ()
    ledger.run_ended(9)
    ranks = place_timelines(ledger).ranks
    assert [(r.attempt, len(r.spans), r.spans[0].shares[B.STARTUP]) for r in ranks] == [(None, 1, 1.0)] * 2


def test_the_time_until_a_save_is_durable_is_known_to_a_cell() -> None:
    ledger = Ledger(1)
    ledger.run_started(1000)
    ledger.attempt_started(0, 1, 1000)
    ledger.rank_hello(0, 0, 1000)
    script = [part for s in range(1, 101) for part in ((B.STEP, 0.8, s, True), (B.DATA_WAIT, s % 7 / 20, s + 1, False))]
    ledger.page(page(0, 0, script), at=1100)
    at = 1000.0
    for bucket, seconds, step, _ in script:
        at += seconds
        if bucket == B.STEP and step % 10 == 0:
            ledger.commit(step, 0, at + 3.0)
    ledger.run_ended(1110)
    lines = [line for s in ledger.to_segments() for line in s.data.splitlines()]
    assert measure_run(ledger.report().to_dict(), lines).latency_s == pytest.approx(3.0, abs=0.3)
