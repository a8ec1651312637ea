"""Whether a failed attempt is tried again. A pure rule that also says why, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ray_goodput.core.commit import CheckpointId

_MAX_NAMED = 8  # of ranks or nodes in a sentence


class FailureKind(Enum):
    """What ended an attempt."""

    WORKER = "worker"  # a process died or the user's code raised
    HANG = "hang"  # it stood still and was killed for it; Ray sees a process that died
    DRAIN = "drain"  # it saved and left by itself, after notice
    PREEMPTION = "preemption"  # a node was taken away before its attempt had left
    STARTUP = "startup"  # the worker group could not be started (no room yet, a node died meanwhile)
    USER_ERROR = "user_error"  # raising it again next time is certain: bad input, another model, another data set
    CONTROLLER = "controller"  # Ray Train's own logic failed


NOT_COUNTED = (FailureKind.DRAIN, FailureKind.PREEMPTION, FailureKind.STARTUP)
"""Not the job's fault: tried again whatever the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvent:
    """One failure as the controller saw it. `committed` is the commit made last, as far as known then.

    step: the step the failing rank had done last; None if it could not say (its process is gone).
    error: the user's exception, as type and message, if the same could come again for the same reason. Empty for lost
        processes, storages and connections: those come and go, and look alike each time.
    """

    kind: FailureKind
    committed: CheckpointId | None
    message: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    step: int | None = None
    error: str = ""

    def repeats(self, before: FailureEvent | None) -> bool:
        """Whether the user's code raised the same error at the same step on the same ranks as last time."""
        return before is not None and bool(self.error) and self._where_and_what() == before._where_and_what()

    def _where_and_what(self) -> tuple[str, int | None, tuple[int, ...]]:
        return self.error, self.step, self.ranks

    def place(self) -> str:
        """ " on ranks [1] of node 10.0.0.7 at step 9": as much of it as is known."""
        ranks = f" on ranks {_some(self.ranks)}" if self.ranks else ""
        nodes = (
            f" ({'node' if len(self.nodes) == 1 else 'nodes'} {', '.join(_first(self.nodes))})" if self.nodes else ""
        )
        return ranks + nodes + (f" after step {self.step}" if self.step is not None and self.step >= 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """Failures since the last commit, by the rule's own count, and the newest of them that counted."""

    failures_without_progress: int = 0
    committed: CheckpointId | None = None
    last: FailureEvent | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDecision:
    retry: bool
    reason: str
    state: BudgetState


def decide_retry(
    state: BudgetState,
    event: FailureEvent,
    *,
    max_failures_without_progress: int,
    stop_on_repeated_error: bool = True,
) -> RetryDecision:
    """Count failures without progress; a commit made after the one seen at the last failure starts the count anew.

    A later attempt's commit is progress also at a lower step: it may have had to go on from an older checkpoint.
    Drains, preemptions and starts that found no room are not the job's fault and are not counted. An error that is
    certain to come again is never retried; one that did come again, at the same step of the same ranks and with no
    commit in between, is not retried a second time unless the caller insists on the whole budget.
    """
    progressed = _in_order_made(event.committed) > _in_order_made(state.committed)
    if progressed:
        state = BudgetState(committed=event.committed)
    where = f"newest commit: step {state.committed.step}" if state.committed is not None else "no commit yet"

    if event.kind in (FailureKind.USER_ERROR, FailureKind.CONTROLLER):
        reason = f"Not retried, the same error would come again{event.place()}: {event.message}"
        return RetryDecision(retry=False, reason=reason, state=state)
    if event.kind in NOT_COUNTED:
        reason = f"Retrying after a {event.kind.name.lower()}, which does not count against the budget ({where})."
        return RetryDecision(retry=True, reason=reason, state=state)

    before, count = state.last, state.failures_without_progress + 1
    state = replace(state, failures_without_progress=count, last=event)
    last_error = f"Last error{event.place()}: {event.message}"
    if count > max_failures_without_progress:
        reason = (
            f"Crash loop: {count} failures in a row without a new commit, "
            f"{max_failures_without_progress} are allowed ({where}). {last_error}"
        )
        return RetryDecision(retry=False, reason=reason, state=state)
    if stop_on_repeated_error and event.repeats(before):
        reason = (
            f"Crash loop: the same error came twice at the same place without a commit in between ({where}), so the "
            f"{max_failures_without_progress - count + 1} further tries that the budget allows would bring it again; "
            f"FailureBudget(stop_on_repeated_error=False) makes them all the same. {last_error}"
        )
        return RetryDecision(retry=False, reason=reason, state=state)
    reason = f"Retrying: failure {count} of {max_failures_without_progress} allowed without progress ({where})"
    reason += f"{event.place()}."
    return RetryDecision(retry=True, reason=reason, state=state)


def _in_order_made(committed: CheckpointId | None) -> tuple[int, int]:
    return (committed.attempt, committed.step) if committed is not None else (-1, -1)


def _first(names: Sequence[str]) -> list[str]:
    return [*names[:_MAX_NAMED], *([f"and {len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else [])]


def _some(ranks: Sequence[int]) -> str:
    return f"[{', '.join(_first([str(rank) for rank in ranks]))}]"
