"""Laws of the number of workers: what is left at once, unless waiting loses less; growth only right after a commit."""

from __future__ import annotations

from typing import Any

import pytest

from ray_goodput.core.scaling import (
    DownState,
    Grow,
    RunningState,
    SeenDurations,
    Start,
    decide_growth,
    decide_start,
    workers_that_fit,
)


def down(possible: int, **state: Any) -> DownState:
    known: dict[str, Any] = {"min_workers": 2, "max_workers": 8, "waited_s": 0.0, "max_wait_s": 600.0}
    return DownState(possible=possible, **{**known, **state})


@pytest.mark.parametrize("possible", [2, 5, 8])
def test_without_an_estimate_the_run_takes_what_is_left_at_once(possible: int) -> None:
    decision = decide_start(down(possible))
    assert (decision.action, decision.num_workers) == (Start.GO, possible)


def test_below_the_minimum_it_waits_and_in_the_end_gives_up_with_the_numbers() -> None:
    waiting = decide_start(down(1, waited_s=600.0, left_out=1))
    assert waiting.action is Start.WAIT and "2 worker(s) are needed" in waiting.reason
    over = decide_start(down(1, waited_s=601.0, left_out=1))
    assert over.action is Start.GIVE_UP
    assert all(part in over.reason for part in ("601 s", "2 worker(s)", "room for 1", "1 node(s) left out"))
    assert decide_start(down(1, waited_s=1e9, max_wait_s=None)).action is Start.WAIT


def test_starts_that_keep_failing_end_too_and_a_first_start_is_always_tried() -> None:
    assert decide_start(down(8, waited_s=601.0)).action is Start.GO
    over = decide_start(down(8, waited_s=601.0, failed_starts=4))
    assert over.action is Start.GIVE_UP and "4 start(s) failed" in over.reason


def lost_rank_seconds(*, shrink: bool, world: int, lost: int, wait_s: float, resize_s: float) -> float:
    """By counting: all ranks idle while waiting, or the lost ones idle and two resizes of all."""
    return lost * wait_s + 2 * world * resize_s if shrink else world * wait_s


@pytest.mark.parametrize("lost", [1, 8, 40])
@pytest.mark.parametrize("wait_s", [1.0, 60.0, 200.0, 274.0, 275.0, 900.0])
def test_it_waits_exactly_when_that_loses_fewer_rank_seconds(lost: int, wait_s: float) -> None:
    known = {"world": 64, "lost": lost, "wait_s": wait_s, "resize_s": 120.0}
    shrinking, waiting = lost_rank_seconds(shrink=True, **known), lost_rank_seconds(shrink=False, **known)
    decision = decide_start(down(64 - lost, max_workers=64, replacement_s=wait_s, resize_s=120.0))
    assert (decision.action is Start.GO) == (shrinking < waiting), decision.reason


def test_the_pinned_value_of_the_notes() -> None:
    state: dict[str, Any] = {"max_workers": 64, "resize_s": 120.0}
    assert decide_start(down(56, replacement_s=274.2, **state)).action is Start.WAIT
    assert decide_start(down(56, replacement_s=274.4, **state)).action is Start.GO


def test_a_replacement_that_is_overdue_is_no_longer_waited_for() -> None:
    assert decide_start(down(7, replacement_s=40.0, waited_s=39.0)).action is Start.WAIT
    assert decide_start(down(7, replacement_s=40.0, waited_s=40.0)).action is Start.GO


def test_a_run_that_begins_pays_for_one_resize_only() -> None:
    assert decide_start(down(7, replacement_s=50.0)).action is Start.WAIT  # 2 x 8 x 30 / 7 = 68.6 s
    assert decide_start(down(7, replacement_s=50.0, ran_before=False)).action is Start.GO


def running(possible: int, commit_age_s: float | None, asked_s_ago: float | None = None) -> Grow:
    state = RunningState(num_workers=4, possible=possible, commit_age_s=commit_age_s, asked_s_ago=asked_s_ago)
    decision = decide_growth(state)
    assert decision.reason.endswith(".")
    return decision.action


def test_growth_waits_for_a_young_commit_and_asks_for_it_once() -> None:
    assert running(8, 9.9) is Grow.NOW
    assert running(8, 10.1) is Grow.SAVE_FIRST
    assert running(8, None) is Grow.SAVE_FIRST
    assert running(8, 30.0, asked_s_ago=20.0) is Grow.WAIT
    assert running(8, 1.0, asked_s_ago=20.0) is Grow.NOW
    assert running(8, 300.0, asked_s_ago=60.0) is Grow.SAVE_FIRST, "the first one was skipped"


def test_nothing_grows_without_room() -> None:
    assert running(4, 1.0) is Grow.WAIT
    assert running(3, None) is Grow.WAIT


def test_workers_that_fit_counts_whole_workers_on_each_node() -> None:
    nodes = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.5}, {"CPU": 8.0, "GPU": 3.0}]
    assert workers_that_fit(nodes, {"CPU": 1}, at_most=99) == 13
    assert workers_that_fit(nodes, {"CPU": 2, "GPU": 1}, at_most=99) == 4
    assert workers_that_fit(nodes, {"CPU": 1}, at_most=3) == 3
    assert workers_that_fit([{"CPU": 0.3}], {"CPU": 0.1}, at_most=99) == 3, "0.3 / 0.1 is a little less than 3"
    assert workers_that_fit([], {"CPU": 0}, at_most=5) == 5
    assert workers_that_fit([], {"CPU": 1}, at_most=5) == 0


def test_an_estimate_is_the_median_of_the_newest_five() -> None:
    seen = SeenDurations()
    assert seen.estimate_s() is None
    for duration_s in (1000.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        seen = seen.noted(duration_s)
    assert seen.estimate_s() == 3.0
