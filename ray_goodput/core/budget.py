"""Whether a failed attempt is tried again. A pure rule that also says why, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class FailureKind(Enum):
    """What ended an attempt."""

    WORKER = "worker"  # a process died or the user's code raised
    PREEMPTION = "preemption"  # a node was taken away with notice
    STARTUP = "startup"  # the worker group could not be started (no room yet, a node died meanwhile)
    USER_ERROR = "user_error"  # raising it again next time is certain: bad input, another model, another data set
    CONTROLLER = "controller"  # Ray Train's own logic failed


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvent:
    """One failure as the driver saw it. `committed_step` is the newest commit known then, -1 for none."""

    kind: FailureKind
    committed_step: int
    message: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """Failures since the last commit, by the rule's own count."""

    failures_without_progress: int = 0
    committed_step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDecision:
    retry: bool
    reason: str
    state: BudgetState


def decide_retry(state: BudgetState, event: FailureEvent, *, max_failures_without_progress: int) -> RetryDecision:
    """Count failures without progress; a commit newer than the one seen at the last failure starts the count anew.

    Preemptions and starts that found no room are not the job's fault and are not counted. An error that is certain to
    come again is never retried.
    """
    progressed = event.committed_step > state.committed_step
    count = 0 if progressed else state.failures_without_progress
    state = replace(state, committed_step=max(state.committed_step, event.committed_step))
    where = f"newest commit: step {state.committed_step}" if state.committed_step >= 0 else "no commit yet"
    ranks = f" on ranks {list(event.ranks)}" if event.ranks else ""

    if event.kind in (FailureKind.USER_ERROR, FailureKind.CONTROLLER):
        reason = f"Not retried, the same error would come again{ranks}: {event.message}"
        return RetryDecision(retry=False, reason=reason, state=replace(state, failures_without_progress=count))
    if event.kind in (FailureKind.PREEMPTION, FailureKind.STARTUP):
        return RetryDecision(
            retry=True,
            reason=f"Retrying after a {event.kind.value} failure, which does not count against the budget ({where}).",
            state=replace(state, failures_without_progress=count),
        )
    count += 1
    state = replace(state, failures_without_progress=count)
    if count > max_failures_without_progress:
        return RetryDecision(
            retry=False,
            reason=(
                f"Crash loop: {count} failures in a row without a new commit, "
                f"{max_failures_without_progress} are allowed ({where}). Last error{ranks}: {event.message}"
            ),
            state=state,
        )
    return RetryDecision(
        retry=True,
        reason=(
            f"Retrying: failure {count} of {max_failures_without_progress} allowed without progress ({where}){ranks}."
        ),
        state=state,
    )
