"""The only module that touches Ray Train's internals (2.60). When Ray changes, this is the file to mend.

What it offers to the rest of `train`: the base classes our policies and callbacks derive from, and functions that turn
Ray's objects into our own values.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import ray.train
from ray._private.state import state as _cluster_state
from ray.core.generated import gcs_pb2
from ray.exceptions import RayActorError, RayError
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback, RayDatasetShardProvider
from ray.train.v2._internal.constants import DEFAULT_HEALTH_CHECK_INTERVAL_S, HEALTH_CHECK_INTERVAL_S_ENV_VAR
from ray.train.v2._internal.exceptions import (
    RayTrainError,
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import (
    DefaultFailurePolicy,
    FailureDecision,
    FailurePolicy,
)
from ray.train.v2._internal.execution.failure_handling.default import _is_preemption_failure
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from ray_goodput.core.budget import FailureKind
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.errors import DrainedError, GoodputError, RunError, ShardReadError, StorageError

__all__ = [
    "ControllerCallback",
    "DefaultFailurePolicy",
    "ElasticScalingPolicy",
    "FailureDecision",
    "FailurePolicy",
    "NoopDecision",
    "ResizeDecision",
    "ScalingDecision",
    "StorageContext",
    "TrainingFailedError",
    "WorkerCallback",
    "WorkerGroupCallback",
    "available_resources",
    "classify_failure",
    "draining_nodes",
    "fresh_reserved_resources",
    "goodput_error_in",
    "in_train_worker",
    "node_ip",
    "order_nodes",
    "polling_often",
    "train_run_id",
    "user_error_in",
    "without_dataset_manager",
    "worker_infos",
]

logger = logging.getLogger(__name__)

_PlacementGroup: Any = vars(gcs_pb2)["PlacementGroupTableData"]  # made at import: no type checker sees it
_CALL_TIMEOUT_S = 5.0
_LEAST_POLL_S = 0.5
_MOST_POLLS_PER_S = 500.0  # one small call a worker and poll, all by the controller's one thread
# What gloo and NCCL say on the ranks that are left when a peer is gone.
_LOST_PEER = re.compile(
    r"Connection (reset|closed) by peer|gloo/transport|NCCL.*(remote process|abort)|ncclRemoteError"
)
_MAY_PASS = (StorageError, ShardReadError, RunError)  # a storage or an actor that was away for longer than our tries


class _NoDatasetShards(RayDatasetShardProvider):
    """Whatever dataset a train loop asks for, it hears from Ray that the trainer was given none of that name."""

    def __init__(self) -> None:  # not Ray's, which starts the actor
        self._dataset_names = set()

    def shutdown_data_executors(self) -> None:
        return


class _NoDatasets(DatasetsCallback):
    """Ray's callback, which also carries Ray Data's context to the workers, but for the actor."""

    def before_init_train_context(self, workers: Sequence[Any]) -> dict[str, list[Any]]:
        return {"dataset_shard_provider": [_NoDatasetShards()] * len(workers)}


def without_dataset_manager(callbacks: Sequence[Any], train_run_context: Any) -> list[Any]:
    """Ray's default callbacks for a trainer without Ray datasets.

    In each attempt Ray would start an actor that manages them, and have it import Ray Data while the workers start:
    1.5 s of a core of the driver's node, for nothing.
    """
    none = _NoDatasets(train_run_context=train_run_context, datasets={})
    return [none if type(callback) is DatasetsCallback else callback for callback in callbacks]


@contextlib.contextmanager
def polling_often(num_workers: int) -> Iterator[None]:
    """A controller made in the block asks its workers every half second how they are, and less often if they are many.

    Ray asks every 2 s, so that a death is noticed, a report taken, and the end seen after another second on average.
    The controller hears of it by the environment only, and the driver's is passed on; what a user has set there counts.
    """
    if HEALTH_CHECK_INTERVAL_S_ENV_VAR in os.environ:
        yield
        return
    interval_s = min(DEFAULT_HEALTH_CHECK_INTERVAL_S, max(_LEAST_POLL_S, num_workers / _MOST_POLLS_PER_S))
    os.environ[HEALTH_CHECK_INTERVAL_S_ENV_VAR] = str(interval_s)
    try:
        yield
    finally:
        os.environ.pop(HEALTH_CHECK_INTERVAL_S_ENV_VAR, None)


_rays_sequence = WorkerGroup._sort_workers_by_gpu_id_grouped_by_node


def order_nodes(sequence: Callable[[Sequence[str]], Sequence[str]]) -> None:
    """Worker groups of this process, which is a controller's own, give the nodes their ranks in that sequence of ids.

    In Ray's they come as their bundles were placed, which may be another way in each attempt. If `sequence` fails, or
    loses a node, it is Ray's.
    """

    def in_sequence(workers: list[Any], _first_id: str | None = None) -> list[Any]:
        by_node = _rays_sequence(workers, _first_id)
        try:
            places = {
                node: place
                for place, node in enumerate(sequence(list(dict.fromkeys(w.metadata.node_id for w in by_node))))
            }
            return sorted(by_node, key=lambda worker: places[worker.metadata.node_id])
        except Exception:  # a run goes on whatever its ranks are called
            logger.exception("ray_goodput: nodes get their ranks in Ray's sequence.")
            return by_node

    WorkerGroup._sort_workers_by_gpu_id_grouped_by_node = staticmethod(in_sequence)


def in_train_worker() -> bool:
    """Whether this process runs a Ray Train worker's train function."""
    try:
        ray.train.get_context().get_world_rank()
    except Exception:  # Ray raises RuntimeError, AttributeError or its own types here, depending on the process
        return False
    return True


def node_ip() -> str:
    """The address of this process's node."""
    return ray.util.get_node_ip_address()


def train_run_id(train_run_context: Any) -> str:
    """The id with which Ray Train labels its own metrics of this run."""
    return str(train_run_context.run_id)


def worker_infos(workers: Sequence[Any]) -> tuple[WorkerInfo, ...]:
    """Processes of a worker group, ordered by world rank."""
    infos = [
        WorkerInfo(
            world_rank=w.distributed_context.world_rank,
            pid=w.metadata.pid,
            node_id=w.metadata.node_id,
            node_ip=w.metadata.node_ip,
        )
        for w in workers
    ]
    return tuple(sorted(infos, key=lambda i: i.world_rank))


def goodput_error_in(error: BaseException) -> GoodputError | None:
    """Our own error a worker raised, if the failure holds one; of several, one that is certain to come again."""
    if isinstance(error, WorkerGroupError):
        ours = [cause for cause in map(_cause, error.worker_failures.values()) if isinstance(cause, GoodputError)]
        return min(ours, key=lambda c: (isinstance(c, _MAY_PASS), not isinstance(c, DrainedError)), default=None)
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, GoodputError):
        return error.controller_failure
    return None


def classify_failure(error: TrainingFailedError) -> tuple[FailureKind, str, tuple[int, ...]]:
    """Kind, one-line message and ranks of a failure.

    What a storage or an actor failed to do may work next time, within the failure budget; every other error of our own
    means that the input is wrong.
    """
    ours = goodput_error_in(error)
    if isinstance(ours, DrainedError):
        return FailureKind.DRAIN, str(ours), ours.ranks
    if ours is not None and not isinstance(ours, _MAY_PASS):
        ranks = tuple(sorted(error.worker_failures)) if isinstance(error, WorkerGroupError) else ()
        return FailureKind.USER_ERROR, str(ours), ranks
    if _is_preemption_failure(error):
        gone = _first_causes(error.worker_failures) if isinstance(error, WorkerGroupError) else {}
        return FailureKind.PREEMPTION, _last_line(error), tuple(sorted(gone))
    if isinstance(error, WorkerGroupError):
        causes = _first_causes(error.worker_failures)
        ranks = tuple(sorted(causes))
        return FailureKind.WORKER, _last_line(causes[ranks[0]] if ranks else error), ranks
    if isinstance(error, ControllerError):
        cause = error.controller_failure
        if isinstance(cause, WorkerGroupStartupTimeoutError):
            return FailureKind.STARTUP, _last_line(cause), ()
        if isinstance(cause, WorkerGroupStartupFailedError):
            return FailureKind.WORKER, _last_line(cause), ()
        return FailureKind.CONTROLLER, _last_line(cause), ()
    return FailureKind.WORKER, _last_line(error), ()


def draining_nodes() -> dict[str, float | None]:
    """Living nodes that are being drained: node id -> seconds until they go, None if Ray was not told. One GCS call."""
    deadlines_ms = _cluster_state.get_draining_nodes()
    now = time.time()
    return {node: max(0.0, ms / 1000.0 - now) if ms else None for node, ms in deadlines_ms.items()}


def available_resources() -> Mapping[str, Mapping[str, float]]:
    """What is free on each living node: node id -> resources. One GCS call."""
    return _cluster_state.available_resources_per_node()


def own_placed_resources() -> Mapping[str, Mapping[str, float]]:
    """What placement groups of the calling actor hold on the nodes: node id -> resources. One GCS call.

    Ray Train's controller creates its worker group's, and removes it only when it starts the next one.
    """
    own = bytes.fromhex(ray.get_runtime_context().get_actor_id() or "")
    held: dict[str, dict[str, float]] = {}
    for raw in _cluster_state._connect_and_get_accessor().get_placement_group_table():
        group = _PlacementGroup.FromString(raw)
        if group.creator_actor_id != own or group.state == _PlacementGroup.REMOVED:
            continue
        for bundle in group.bundles:
            if bundle.node_id:  # else it has no place, or lost it with its node
                on_node = held.setdefault(bundle.node_id.hex(), {})
                for name, amount in bundle.unit_resources.items():
                    on_node[name] = on_node.get(name, 0.0) + amount
    return held


def fresh_reserved_resources(policy: ElasticScalingPolicy) -> Mapping[str, Mapping[str, float]] | None:
    """Resources reserved for the run, node id -> resources, after Ray has looked at the cluster anew.

    Ray's own policy reads a view up to 20 s old and, after the loss of a node, decides for the old size and waits for
    the start timeout. None if the coordinator of Ray did not answer.
    """
    try:
        return ray.get(
            policy._autoscaling_coordinator.get_reserved_resources.remote(policy._requester_id, recompute=True),
            timeout=_CALL_TIMEOUT_S,
        )
    except (RayError, TimeoutError):
        return None


def user_error_in(error: TrainingFailedError, ranks: Sequence[int]) -> Exception | None:
    """What the user's own code raised on the first of `ranks`, if that is what failed there."""
    if not isinstance(error, WorkerGroupError) or not ranks:
        return None
    failure = error.worker_failures.get(ranks[0])
    if failure is None:  # a rank that left after notice: its peers told of it before its own end was seen
        return None
    cause = _cause(failure)
    return cause if isinstance(cause, Exception) and _is_users(cause) and not _LOST_PEER.search(str(cause)) else None


def _cause(failure: Exception) -> BaseException:
    """What happened, without the wrapping that Ray may put round it."""
    if isinstance(failure, UserExceptionWithTraceback):
        return failure._base_exc
    return failure.health_check_failure if isinstance(failure, WorkerHealthCheckFailedError) else failure


def _is_users(cause: BaseException) -> bool:
    return not isinstance(cause, RayError | RayTrainError | GoodputError | TrainingFailedError)


def _first_causes(failures: Mapping[int, Exception]) -> Mapping[int, BaseException]:
    """The failures from which the others follow: processes that died, else errors that no lost peer explains."""
    causes = {rank: _cause(f) for rank, f in failures.items()}
    died = {rank: c for rank, c in causes.items() if isinstance(c, RayActorError)}
    own = {rank: c for rank, c in causes.items() if not _LOST_PEER.search(str(c))}
    return died or own or causes


def _last_line(error: BaseException) -> str:
    """One line: the exception's type, if it is a user's, and the last line of its message."""
    cause = _cause(error) if isinstance(error, Exception) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    name = type(cause).__name__
    if not lines:
        return name
    return f"{name}: {lines[-1]}"[:500] if _is_users(cause) else lines[-1][:500]
