"""The failure policy for Ray Train's controller: the pure rule of `core.budget`, wired to Ray's types.

It runs inside the controller's loop: no call here waits longer than a few seconds, and none raises.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.exceptions import RayError

from ray_goodput.actors.names import NAMESPACE, coordinator_name
from ray_goodput.config import FailureBudget
from ray_goodput.core.budget import BudgetState, FailureEvent, RetryDecision, decide_retry
from ray_goodput.core.commit import CheckpointId
from ray_goodput.core.hang import HangVerdict
from ray_goodput.train.failures import because_of, failure_event
from ray_goodput.train.ray_compat import (
    FailureDecision,
    FailurePolicy,
    TrainingFailedError,
)

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 5.0


class ProgressFailurePolicy(FailurePolicy):
    """Retries as long as the run makes progress: only failures without a new commit in between count."""

    def __init__(self, failure_config: Any, *, budget: FailureBudget, run_key: str) -> None:
        super().__init__(failure_config)
        self._budget = budget
        self._run_key = run_key
        self._state = BudgetState()

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        committed, node_of_rank, hang = self._progress()
        event = failure_event(training_failed_error, committed=committed, node_of_rank=node_of_rank)
        if hang is not None:
            event = because_of(hang, event, node_of_rank)
        decision = decide_retry(
            self._state,
            event,
            max_failures_without_progress=self._budget.max_failures_without_progress,
            stop_on_repeated_error=self._budget.stop_on_repeated_error,
        )
        self._state = decision.state
        logger.log(logging.INFO if decision.retry else logging.ERROR, "%s", decision.reason)
        self._tell(decision, event)
        return FailureDecision.RETRY if decision.retry else FailureDecision.RAISE

    def _progress(self) -> tuple[CheckpointId | None, dict[int, str], HangVerdict | None]:
        """The commit made last, the address of each rank's node, and whether the attempt hung; what was known before if
        the coordinator does not answer (no progress assumed)."""
        try:
            coordinator = ray.get_actor(coordinator_name(self._run_key), namespace=NAMESPACE)
            asked = [coordinator.last_committed.remote(), coordinator.status.remote()]
            committed, status = ray.get(asked, timeout=_ASK_TIMEOUT_S)
            return committed, {worker.world_rank: worker.node_ip for worker in status.workers}, status.hang
        except (ValueError, RayError, TimeoutError) as error:
            logger.warning("The run's coordinator did not say how far it is (%s).", error)
            return self._state.committed, {}, None

    def _tell(self, decision: RetryDecision, event: FailureEvent) -> None:
        try:
            coordinator = ray.get_actor(coordinator_name(self._run_key), namespace=NAMESPACE)
            coordinator.failure_seen.remote(
                kind=event.kind.value,
                message=event.message,
                ranks=event.ranks,
                reason=decision.reason,
                retry=decision.retry,
            )
        except (ValueError, RayError) as error:
            logger.warning("The failure could not be noted in the ledger (%s).", error)
