"""The rule of the watchdog: who hangs, who merely waits, and what is never taken for a hang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_goodput.core.buckets import Bucket
from ray_goodput.core.hang import HangLimits, RankSight, hang_limits, judge, worth_a_look

LIMITS = HangLimits(stopped_s=60, step_s=100, first_step_s=1800)


def sight(rank: int, **seen: Any) -> RankSight:
    """A rank that computes step 8, and was heard of just now."""
    alive = RankSight(
        world_rank=rank,
        node_ip=f"10.0.0.{rank}",
        pid=1000 + rank,
        silent_s=0.5,
        still_s=1.0,
        bucket=Bucket.STEP,
        step=7,
        stepped=True,
    )
    return replace(alive, **seen)


def stuck(rank: int, **seen: Any) -> RankSight:
    return sight(rank, **{"still_s": 130.0, **seen})


def test_ranks_that_make_steps_do_not_hang() -> None:
    assert judge([sight(0), sight(1)], LIMITS) is None
    assert not worth_a_look([sight(0), sight(1)], LIMITS)
    assert judge([], LIMITS) is None


def test_a_stopped_rank_is_the_culprit_and_those_that_wait_for_it_are_not() -> None:
    verdict = judge([stuck(0), sight(1, silent_s=61, state="T"), stuck(2)], LIMITS)
    assert verdict is not None and verdict.culprits == (1,)
    told = "Hung: rank 1 (process 1001 on 10.0.0.1) is stopped (SIGSTOP): it gave no sign of life for 61 s"
    assert verdict.reason == told


def test_a_silent_rank_is_given_its_time_even_when_the_others_have_waited_longer() -> None:
    waiting = [stuck(0, still_s=150.0), sight(1, silent_s=90, state="S")]
    assert judge(waiting, LIMITS) is None
    assert worth_a_look(waiting, LIMITS), "only a look says whether it is stopped"


def test_native_code_that_keeps_pythons_lock_is_found_by_its_silence() -> None:
    verdict = judge([stuck(0), sight(1, silent_s=101, state="R")], LIMITS)
    assert verdict is not None and verdict.culprits == (1,)
    assert "native code holds Python's lock" in verdict.reason


def test_a_rank_whose_node_does_not_answer_is_judged_by_its_heartbeats() -> None:
    verdict = judge([stuck(0), sight(1, silent_s=101)], LIMITS)
    assert verdict is not None and "nobody on its node could say why" in verdict.reason


def test_of_ranks_in_one_step_the_one_whose_stack_shows_no_wait_is_the_culprit() -> None:
    verdict = judge([stuck(0, waiting=True), stuck(1, waiting=False), stuck(2, waiting=None)], LIMITS)
    assert verdict is not None and verdict.culprits == (1,)
    assert "is alive, but has not finished step 8 for 130 s" in verdict.reason
    assert "the stacks of the others show them waiting for it" in verdict.reason


def test_without_a_stack_that_stands_out_all_that_are_furthest_behind_must_go() -> None:
    verdict = judge([stuck(0, step=8), stuck(1, waiting=True), stuck(2, waiting=True)], LIMITS)
    assert verdict is not None and verdict.culprits == (1, 2)
    assert "no stack stands out" in verdict.reason


def test_a_rank_ahead_of_the_others_is_never_the_culprit() -> None:
    verdict = judge([stuck(0, step=8, bucket=Bucket.CKPT_BLOCK), stuck(1)], LIMITS)
    assert verdict is not None and verdict.culprits == (1,)


@pytest.mark.parametrize("bucket", [b for b in Bucket if b is not Bucket.STEP])
def test_whatever_is_not_a_step_may_take_any_time_on_a_living_rank(bucket: Bucket) -> None:
    hours = 7 * 3600.0
    assert judge([stuck(0), stuck(1, bucket=bucket, still_s=hours)], LIMITS) is None
    assert judge([sight(0, bucket=bucket, still_s=hours), sight(1, bucket=bucket, still_s=hours)], LIMITS) is None


def test_a_first_step_that_compiles_gets_longer_than_the_others() -> None:
    compiling = [sight(0, stepped=False, still_s=1700), sight(1, stepped=False, still_s=1700)]
    assert judge(compiling, LIMITS) is None
    assert judge([replace(s, still_s=1801) for s in compiling], LIMITS) is not None


@pytest.mark.parametrize("bucket", [Bucket.STARTUP, Bucket.CKPT_LOAD, None])
def test_silence_while_starting_or_restoring_gets_longer_unless_the_process_is_stopped(bucket: Bucket | None) -> None:
    loading = sight(1, bucket=bucket, stepped=False, silent_s=1700.0, state="R")
    assert judge([sight(0), loading], LIMITS) is None
    assert judge([sight(0), replace(loading, state="T")], LIMITS) is not None


def test_after_the_loop_has_ended_on_one_rank_no_step_is_owed() -> None:
    assert judge([sight(0, closed=True), stuck(1, still_s=900.0)], LIMITS) is None
    assert judge([sight(0, bucket=Bucket.SHUTDOWN), stuck(1, still_s=900.0)], LIMITS) is None


def test_progress_of_one_of_those_behind_is_progress() -> None:
    assert judge([stuck(0), stuck(1), sight(2, still_s=99)], LIMITS) is None


def test_the_limits_grow_with_the_step_times_and_double_with_each_hang_in_a_row() -> None:
    def limits(p99: float | None, hangs: int) -> HangLimits:
        return hang_limits(
            hang_after_s=60, times_p99_step=10, first_step_after_s=1800, p99_step_s=p99, hangs_in_a_row=hangs
        )

    assert limits(None, 0) == HangLimits(stopped_s=60, step_s=60, first_step_s=1800)
    assert limits(2.0, 0).step_s == 60
    assert limits(30.0, 0) == HangLimits(stopped_s=60, step_s=300, first_step_s=1800)
    assert limits(2.0, 2) == HangLimits(stopped_s=240, step_s=240, first_step_s=7200)


def test_of_many_culprits_the_sentence_names_some() -> None:
    verdict = judge([sight(r, silent_s=70, state="T") for r in range(9)], LIMITS)
    assert verdict is not None and verdict.culprits == tuple(range(9))
    assert verdict.reason.count("SIGSTOP") == 4 and verdict.reason.endswith("and 5 more")
