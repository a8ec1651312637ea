"""Step times: exact at every settled bound, whatever comes late, and bounded."""

from __future__ import annotations

import pytest

from journal_pages import page
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput import step_times
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.step_times import StepTimes


def filled(num: int) -> StepTimes:
    times = StepTimes()
    for step in range(1, num + 1):
        times.add(step, step)
    return times


def test_sums_are_exact_before_and_after_settling() -> None:
    times = filled(100)
    expected = [n * (n + 1) // 2 for n in range(101)]
    assert [times.up_to(n) for n in range(101)] == expected
    times.settle(40)
    times.settle(70)
    assert [times.up_to(n) for n in (0, 40, 70, 71, 99, 100, 500)] == [0, 820, 2485, 2556, 4950, 5050, 5050]
    assert times.total() == 5050 and times.num_kept() == 2 + 30


def test_between_bounds_sums_are_pro_rata() -> None:
    times = StepTimes()
    for step in range(11, 21):
        times.add(step, 7)
    times.settle(20)
    assert [times.up_to(n) for n in (5, 10, 11, 15, 20)] == [0, 0, 7, 35, 70]


def test_late_time_goes_into_its_segment() -> None:
    times = filled(20)
    times.settle(10)
    times.settle(20)
    times.add(3, 1000)
    assert times.up_to(10) == 55 + 1000 and times.up_to(20) == 210 + 1000


def test_settling_backwards_or_with_nothing_new_changes_nothing() -> None:
    times = filled(20)
    times.settle(10)
    before = times.up_to(10)
    times.settle(10)
    times.settle(4)
    assert times.up_to(10) == before and times.total() == 210


def test_changes_replay_into_the_same_sums() -> None:
    times, copy = StepTimes(), StepTimes()

    def tell() -> None:
        for first, ns in times.take_changes():
            for step, value in enumerate(ns, first):
                copy.add(step, value)

    for step in range(1, 61):
        times.add(step, step * 3)
        if step % 7 == 0:
            tell()
        if step % 10 == 0:
            times.settle(step - 4)
            copy.settle(step - 4)  # told before the steps it settles
    tell()
    assert [copy.up_to(n) for n in range(61)] == [times.up_to(n) for n in range(61)]
    assert times.take_changes() == []


def test_many_segments_are_halved_where_they_are_oldest(monkeypatch) -> None:
    monkeypatch.setattr(step_times, "MAX_SEGMENTS", 16)
    times = StepTimes()
    for step in range(1, 1001):
        times.add(step, 5)
        times.settle(step)
    assert times.num_kept() <= 16
    assert times.total() == 5000 and times.up_to(999) == 4995
    assert abs(times.up_to(500) - 2500) <= 5


@pytest.mark.parametrize("replayed", [False, True])
def test_commits_of_later_attempts_do_not_wear_an_earlier_one_away(monkeypatch, replayed: bool) -> None:
    monkeypatch.setattr(step_times, "MAX_SEGMENTS", 16)
    ledger = Ledger(1)
    ledger.run_started(0)
    lines: list[bytes] = []

    def commit(attempt: int, step: int) -> None:
        ledger.commit(step, attempt, 2.0 * step)
        for segment in ledger.to_segments():
            lines.extend(segment.data.splitlines())
            ledger.saved(segment.number)

    for attempt, first, last in ((1, 1, 10), (2, 9, 400)):  # step 9 and 10 are done twice
        ledger.attempt_started(attempt, 1, 2.0 * first)
        ledger.resumed(attempt, first - 1)
        done = [(Bucket.STEP, 1, step, True) for step in range(first, last + 1)]
        for i in range(0, len(done), 2):
            ledger.page(page(attempt, 0, done[: i + 2]))
            if attempt == 2 or i < 8:
                commit(attempt, first + i + 1)
        ledger.attempt_ended(attempt, 2.0 * last + 1, "killed")
    ledger = Ledger.from_lines(lines) if replayed else ledger
    assert ledger.report().lost_s == pytest.approx(2.0)
