"""Laws of the failure budget: only failures without a commit in between count."""

import pytest

from ray_goodput.core.budget import BudgetState, FailureEvent, FailureKind, RetryDecision, decide_retry
from ray_goodput.core.commit import CheckpointId


def fail(
    state: BudgetState, step: int, kind: FailureKind = FailureKind.WORKER, allowed: int = 2, attempt: int = 1
) -> RetryDecision:
    """A failure after the commit of `step` (-1: of none)."""
    committed = CheckpointId(step, attempt) if step >= 0 else None
    event = FailureEvent(kind=kind, committed=committed, message="boom", ranks=(1,))
    return decide_retry(state, event, max_failures_without_progress=allowed)


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


@pytest.mark.parametrize("kind", [FailureKind.PREEMPTION, FailureKind.STARTUP])
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
