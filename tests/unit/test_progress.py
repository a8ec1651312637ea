"""What the coordinator makes of heartbeats: who is silent, who stands still, and how long steps take."""

from __future__ import annotations

import pytest

from journal_pages import Stretch, page, steps
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.goodput.progress import ProgressBoard

B = Bucket
START: list[Stretch] = [(B.STARTUP, 5, -1, False), (B.CKPT_LOAD, 2, 1, False)]


def board(world: int = 2) -> ProgressBoard:
    made = ProgressBoard()
    made.begin(1, [WorkerInfo(world_rank=r, pid=10 + r, node_id="n", node_ip="10.0.0.1") for r in range(world)], 100.0)
    return made


def test_a_rank_never_heard_of_has_been_silent_since_its_attempt_began() -> None:
    [first, second] = board().sights(107.0)
    assert first.silent_s == second.silent_s == 7.0
    assert first.bucket is None and not first.stepped and first.pid == 10


def test_heartbeats_end_silence_and_only_new_records_are_progress() -> None:
    seen = board()
    script = [*START, *steps(1, 3, 0.5)]
    seen.take(page(1, 0, script, open_for=(B.STEP, 0.25, 4)), 110.0)
    sight = seen.sights(110.5)[0]
    assert (sight.bucket, sight.step, sight.stepped, sight.silent_s) == (B.STEP, 3, True, 0.5)
    assert sight.still_s == pytest.approx(0.75)
    seen.take(page(1, 0, script, open_for=(B.STEP, 50.25, 4)), 160.0)
    sight = seen.sights(161.0)[0]
    assert sight.silent_s == 1.0 and sight.still_s == pytest.approx(51.25)
    seen.take(page(1, 0, [*script, *steps(4, 4, 51)], open_for=(B.DATA_WAIT, 0.5, 5)), 162.0)
    sight = seen.sights(162.0)[0]
    assert (sight.bucket, sight.step) == (B.DATA_WAIT, 4) and sight.still_s == pytest.approx(0.5)
    assert seen.reached == 4


def test_pages_of_another_attempt_or_rank_and_old_pages_change_nothing() -> None:
    seen = board()
    script = [*START, *steps(1, 3, 0.5)]
    seen.take(page(1, 0, script, open_for=(B.STEP, 0.25, 4)), 110.0)
    seen.take(page(2, 0, script), 120.0)
    seen.take(page(1, 5, script), 120.0)
    seen.take(page(1, 0, script, last=2), 120.0)
    assert seen.sights(120.0)[0].silent_s == 10.0


def test_step_times_need_enough_steps_and_outlive_their_attempt() -> None:
    seen = board()
    seen.take(page(1, 0, [*START, *steps(1, 10, 0.5)], open_for=(B.STEP, 0.1, 11)), 110.0)
    assert seen.p99_step_s() is None
    slow = [*START, *steps(1, 50, 0.5), (B.DATA_WAIT, 3.5, 51, False), *steps(51, 51, 0.5)]
    seen.take(page(1, 1, slow, open_for=(B.STEP, 0.1, 52)), 130.0)
    p99 = seen.p99_step_s()
    assert p99 is not None and 0.5 <= p99 <= 4.0, "a step's wait for data is part of it"
    seen.begin(2, [], 140.0)
    assert seen.p99_step_s() == p99


def test_records_delivered_twice_count_once() -> None:
    seen = board()
    script = [*START, *steps(1, 30, 1.0)]
    for _ in range(3):
        seen.take(page(1, 0, script, open_for=(B.STEP, 0.1, 31)), 150.0)
    assert len(seen._steps_s) == 29


def test_a_closed_journal_and_one_that_is_left_out_are_not_judged_any_more() -> None:
    seen = board()
    seen.take(page(1, 0, START, closed=True), 110.0)
    seen.leave_out(1)
    assert [s.closed for s in seen.sights(200.0)] == [True, True]


def test_pages_of_a_journal_that_stands_still_since_it_cannot_be_written_bring_nobody_back() -> None:
    seen = board()
    seen.leave_out(1)
    seen.take(page(1, 1, START, open_for=(B.STEP, 500, 1)), 700.0)
    assert seen.sights(700.0)[1].closed, "its record seems to last for ever: it would be killed as hung"
