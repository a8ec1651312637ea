"""Failure and scaling policies for Ray Train's controller: pure rules from `core`, wired to Ray's types.

They run inside the controller's loop: no call here waits longer than a few seconds, and none raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from ray_goodput.actors.names import NAMESPACE, coordinator_name, vault_name
from ray_goodput.config import FailureBudget
from ray_goodput.core.budget import BudgetState, FailureEvent, RetryDecision, decide_retry
from ray_goodput.core.commit import CheckpointId
from ray_goodput.train.failures import failure_event
from ray_goodput.train.ray_compat import (
    ElasticScalingPolicy,
    FailureDecision,
    FailurePolicy,
    TrainingFailedError,
    fresh_reserved_resources,
)

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 5.0
_PING_TIMEOUT_S = 3.0


class ProgressFailurePolicy(FailurePolicy):
    """Retries as long as the run makes progress: only failures without a new commit in between count."""

    def __init__(self, failure_config: Any, *, budget: FailureBudget, run_key: str) -> None:
        super().__init__(failure_config)
        self._budget = budget
        self._run_key = run_key
        self._state = BudgetState()

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        committed, node_of_rank = self._progress()
        event = failure_event(training_failed_error, committed=committed, node_of_rank=node_of_rank)
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

    def _progress(self) -> tuple[CheckpointId | None, dict[int, str]]:
        """The commit made last, and the address of each rank's node; what was known before if the coordinator does not
        answer (no progress assumed)."""
        try:
            coordinator = ray.get_actor(coordinator_name(self._run_key), namespace=NAMESPACE)
            asked = [coordinator.last_committed.remote(), coordinator.status.remote()]
            committed, status = ray.get(asked, timeout=_ASK_TIMEOUT_S)
            return committed, {worker.world_rank: worker.node_ip for worker in status.workers}
        except (ValueError, RayError, TimeoutError) as error:
            logger.warning("The run's coordinator did not say how far it is (%s).", error)
            return self._state.committed, {}

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


class FreshElasticScalingPolicy(ElasticScalingPolicy):
    """Ray's elastic policy on a fresh view of the cluster, without nodes whose vault is known but does not answer.

    A node that died is listed by Ray as alive until its health checks have failed; its vault stops answering at once.
    """

    def __init__(self, scaling_config: Any, *, run_key: str) -> None:
        super().__init__(scaling_config)
        self._run_key = run_key

    def make_decision_for_non_running_worker_group(self) -> Any:
        fresh = fresh_reserved_resources(self)
        if fresh is not None:
            silent = self._silent_nodes(fresh)
            if silent:
                logger.info("Leaving out %d node(s) whose vault does not answer: %s", len(silent), sorted(silent))
            view: Any = {node: r for node, r in fresh.items() if node not in silent}
            self._latest_reserved_resources = view
            self._latest_reserved_resources_query_time = float("inf")  # the base class uses the view just set
        try:
            return super().make_decision_for_non_running_worker_group()
        finally:
            self._latest_reserved_resources_query_time = float("-inf")

    def _silent_nodes(self, nodes: Iterable[str]) -> set[str]:
        pings = {}
        for node in nodes:
            try:
                vault = ray.get_actor(vault_name(self._run_key, node), namespace=NAMESPACE)
            except (ValueError, RayError):
                continue  # no vault there yet: nothing is known against the node
            pings[vault.ping.remote()] = node
        if not pings:
            return set()
        ready, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_PING_TIMEOUT_S)
        return {node for ref, node in pings.items() if ref not in ready or not _answered(ref)}


def _answered(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=0)
    except (RayError, TimeoutError):
        return False
    return True
