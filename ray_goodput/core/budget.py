"""Whether a failed attempt is tried again. A pure rule that also says why, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ray_goodput.core.commit import CheckpointId


class FailureKind(Enum):
    """What ended an attempt."""

    WORKER = "worker"  # a process died or the user's code raised
    PREEMPTION = "preemption"  # a node was taken away with notice
    STARTUP = "startup"  # the worker group could not be started (no room yet, a node died meanwhile)
    USER_ERROR = "user_error"  # raising it again next time is certain: bad input, another model, another data set
    CONTROLLER = "controller"  # Ray Train's own logic failed


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvent:
    """One failure as the driver saw it. `committed` is the commit made last, as far as known then."""

    kind: FailureKind
    committed: CheckpointId | None
    message: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """Failures since the last commit, by the rule's own count."""

    failures_without_progress: int = 0
    committed: CheckpointId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDecision:
    retry: bool
    reason: str
    state: BudgetState


def decide_retry(state: BudgetState, event: FailureEvent, *, max_failures_without_progress: int) -> RetryDecision:
    """Count failures without progress; a commit made after the one seen at the last failure starts the count anew.

    A later attempt's commit is progress also at a lower step: it may have had to go on from an older checkpoint.
    Preemptions and starts that found no room are not the job's fault and are not counted. An error that is certain to
    come again is never retried.
    """
    progressed = _in_order_made(event.committed) > _in_order_made(state.committed)
    count = 0 if progressed else state.failures_without_progress
    state = replace(state, committed=event.committed if progressed else state.committed)
    where = f"newest commit: step {state.committed.step}" if state.committed is not None else "no commit yet"
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


def _in_order_made(committed: CheckpointId | None) -> tuple[int, int]:
    return (committed.attempt, committed.step) if committed is not None else (-1, -1)
