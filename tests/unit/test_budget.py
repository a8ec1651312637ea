"""Laws of the failure budget: only failures without a commit in between count."""

from typing import Any

import pytest

from ray_goodput.core.budget import BudgetState, FailureEvent, FailureKind, RetryDecision, decide_retry
from ray_goodput.core.commit import CheckpointId


def fail(
    state: BudgetState,
    commit: int,
    kind: FailureKind = FailureKind.WORKER,
    allowed: int = 2,
    attempt: int = 1,
    insist: bool = False,
    **event: Any,
) -> RetryDecision:
    """A failure after the commit of step `commit` (-1: of none)."""
    committed = CheckpointId(commit, attempt) if commit >= 0 else None
    event = {"message": "boom", "ranks": (1,), **event}
    return decide_retry(
        state,
        FailureEvent(kind=kind, committed=committed, **event),
        max_failures_without_progress=allowed,
        stop_on_repeated_error=not insist,
    )


def test_failures_at_one_commit_use_the_budget_up_and_the_reason_names_step_ranks_and_error() -> None:
    state = BudgetState()
    for _ in range(2):
        decision = fail(state, 7)
        assert decision.retry
        state = decision.state
    last = fail(state, 7)
    assert not last.retry
    assert "step 7" in last.reason and "[1]" in last.reason and "boom" in last.reason


def test_a_failure_after_each_commit_never_ends_the_run() -> None:
    state = BudgetState()
    for step in range(0, 500, 50):
        decision = fail(state, step, allowed=1)
        assert decision.retry
        state = decision.state


@pytest.mark.parametrize("kind", [FailureKind.DRAIN, FailureKind.PREEMPTION, FailureKind.STARTUP])
def test_what_is_not_the_jobs_fault_is_retried_without_counting(kind: FailureKind) -> None:
    decision = fail(BudgetState(), -1, kind, allowed=0)
    assert decision.retry and decision.state.failures_without_progress == 0


@pytest.mark.parametrize("kind", [FailureKind.USER_ERROR, FailureKind.CONTROLLER])
def test_an_error_that_would_come_again_is_not_retried(kind: FailureKind) -> None:
    assert not fail(BudgetState(), 100, kind, allowed=10).retry


def test_a_budget_of_zero_stops_at_the_first_failure() -> None:
    assert not fail(BudgetState(), -1, allowed=0).retry


def test_a_coordinator_that_forgets_commits_does_not_turn_the_count_back() -> None:
    state = fail(BudgetState(), 10).state
    state = fail(state, -1).state
    assert state.committed == CheckpointId(10, 1) and state.failures_without_progress == 2


def test_commits_after_a_fall_back_to_an_older_checkpoint_are_progress() -> None:
    state = fail(BudgetState(), 100, allowed=1).state  # the commit of step 100 turns out to be damaged
    for attempt, step in enumerate((60, 70, 80), start=2):
        decision = fail(state, step, allowed=1, attempt=attempt)
        assert decision.retry
        state = decision.state
    last = fail(state, 80, allowed=1, attempt=4)
    assert not last.retry and "step 80" in last.reason


def test_falling_back_alone_is_no_progress() -> None:
    state = fail(BudgetState(), 100, attempt=2, allowed=1).state
    assert not fail(state, 50, attempt=1, allowed=1).retry


KEY_ERROR: dict[str, Any] = {"error": "KeyError: 'z'", "message": "KeyError: 'z'"}


def test_the_same_error_at_the_same_place_ends_the_run_before_the_budget_does_and_says_where() -> None:
    first = fail(BudgetState(), 5, allowed=10, step=7, nodes=("10.0.0.7",), **KEY_ERROR)
    assert first.retry
    second = fail(first.state, 5, allowed=10, step=7, nodes=("10.0.0.8",), **KEY_ERROR)
    assert not second.retry
    for part in (
        "twice",
        "step 5",
        "step 7",
        "[1]",
        "10.0.0.8",
        "KeyError: 'z'",
        "9 further",
        "stop_on_repeated_error",
    ):
        assert part in second.reason


@pytest.mark.parametrize(
    "changed", [{"step": 8}, {"ranks": (0,)}, {"error": "KeyError: 'y'"}, {"error": ""}], ids=lambda c: str(c)
)
def test_another_error_step_or_rank_uses_the_budget(changed: dict[str, Any]) -> None:
    state = fail(BudgetState(), 5, allowed=10, step=7, **KEY_ERROR).state
    assert fail(state, 5, allowed=10, **{"step": 7, **KEY_ERROR, **changed}).retry


def test_who_insists_gets_the_whole_budget() -> None:
    state = BudgetState()
    for failure in range(4):
        decision = fail(state, 5, allowed=3, insist=True, step=7, **KEY_ERROR)
        assert decision.retry == (failure < 3)
        state = decision.state
    assert "4 failures in a row" in decision.reason


def test_lost_processes_that_look_alike_are_not_taken_for_the_same_error() -> None:
    state = fail(BudgetState(), 5, allowed=10, error="").state
    assert fail(state, 5, allowed=10, error="").retry


def test_a_commit_in_between_makes_the_same_error_a_new_one() -> None:
    """An exception every 50 steps, with commits in between, never ends a run: here, always the same one on one rank."""
    state = BudgetState()
    for life in range(100):
        decision = fail(state, life * 50, allowed=1, attempt=life + 1, step=30, **KEY_ERROR)
        assert decision.retry, decision.reason
        state = decision.state


def test_a_drain_between_two_same_errors_does_not_make_them_different() -> None:
    state = fail(BudgetState(), 5, allowed=10, step=7, **KEY_ERROR).state
    state = fail(state, 5, FailureKind.DRAIN, allowed=10).state
    assert not fail(state, 5, allowed=10, step=7, **KEY_ERROR).retry


def test_many_ranks_and_nodes_are_counted_and_not_listed() -> None:
    reason = fail(BudgetState(), 5, allowed=0, ranks=tuple(range(1000)), nodes=("a",) * 100).reason
    assert "and 992 more" in reason and "and 92 more" in reason and len(reason) < 400
