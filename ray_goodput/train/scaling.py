"""The scaling policy for Ray Train's controller: a fresh view of the cluster, judged by the rules of `core.scaling`.

It runs inside the controller's loop: no call here waits longer than a few seconds. It raises only to end a run whose
workers cannot be had, which is how a scaling policy of Ray's says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ray_goodput.actors.names import NAMESPACE, coordinator_name, vault_name
from ray_goodput.config import FailureBudget
from ray_goodput.core.scaling import (
    FIRST_RESIZE_S,
    DownState,
    Grow,
    RunningState,
    SeenDurations,
    Start,
    decide_growth,
    decide_start,
    workers_that_fit,
)
from ray_goodput.errors import WorkersUnavailableError
from ray_goodput.train.ray_compat import (
    ElasticScalingPolicy,
    NoopDecision,
    available_resources,
    draining_nodes,
    fresh_reserved_resources,
    own_placed_resources,
)

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 5.0
_PING_TIMEOUT_S = 3.0
_LOOK_EVERY_S = 1.0
_SAY_EVERY_S = 60.0

Resources = Mapping[str, Mapping[str, float]]


@dataclass(slots=True)
class _Down:
    """The worker group is down since `since_mono_s`."""

    since_mono_s: float
    starts: int = 0
    said: str = ""
    said_mono_s: float = 0.0


class GoodputScalingPolicy(ElasticScalingPolicy):
    """Ray's elastic policy, for fixed numbers of workers too, without nodes that are silent or about to go.

    A node that died is listed by Ray as alive until its health checks have failed; its vault stops answering at once.
    """

    def __init__(self, scaling_config: Any, *, run_key: str, budget: FailureBudget, may_give_up: bool = True) -> None:
        super().__init__(scaling_config)
        self._run_key = run_key
        self._budget = budget
        self._max_wait_s = budget.max_wait_for_workers_s if may_give_up else None
        self._down: _Down | None = _Down(time.monotonic())
        self._ran_before = False
        self._resizes = SeenDurations()
        self._replacements = SeenDurations()
        self._short_since_mono_s: float | None = None  # when the run went on with fewer workers than it could use
        self._asked_mono_s: float | None = None
        self._looked_mono_s = float("-inf")

    # down

    def make_decision_for_non_running_worker_group(self) -> Any:
        if self._down is None:
            self._down = _Down(time.monotonic())
        self._pace()
        try:
            return self._start()
        except WorkersUnavailableError:
            raise
        except Exception as error:  # Ray's GCS may be away; raised here, it would end the run
            waited_s = time.monotonic() - self._down.since_mono_s
            if self._max_wait_s is not None and waited_s > self._max_wait_s:
                raise WorkersUnavailableError(
                    f"For {waited_s:.0f} s it could not be seen what workers can be had ({error!r})."
                ) from error
            logger.debug("The cluster cannot be looked at.", exc_info=True)
            self._say(f"What workers can be had cannot be seen now, tried again: {error!r}", logging.WARNING)
            return NoopDecision()

    def _start(self) -> Any:
        assert self._down is not None
        self._maybe_send_resource_request()
        fresh = fresh_reserved_resources(self)
        if fresh is None:
            return NoopDecision()  # Ray's own coordinator is being started again
        usable, left_out = self._usable(fresh, down=True)
        decision = decide_start(self._state(self._count_possible_workers(usable), left_out))
        # A run that waits is seen to wait: a controller's log has no handler of its own, and then shows warnings only.
        self._say(decision.reason, logging.INFO if decision.action is Start.GO else logging.WARNING)
        if decision.action is Start.GIVE_UP:
            raise WorkersUnavailableError(
                f"The run's workers cannot be had. {decision.reason} Each needs {dict(self._worker_resources)}. "
                "Add nodes, lower ScalingConfig(num_workers=...), or wait longer with "
                "FailureBudget(max_wait_for_workers_s=...). Run again, it goes on from its newest commit."
            )
        if decision.action is Start.WAIT:
            return NoopDecision()
        self._down.starts += 1
        if decision.num_workers < self.scaling_config.max_workers and self._short_since_mono_s is None:
            self._short_since_mono_s = self._down.since_mono_s
        return self._get_resize_decision(decision.num_workers)

    def _state(self, possible: int, left_out: int) -> DownState:
        assert self._down is not None
        known_s = self._budget.replacement_wait_s
        return DownState(
            possible=possible,
            min_workers=self.scaling_config.min_workers,
            max_workers=self.scaling_config.max_workers,
            waited_s=time.monotonic() - self._down.since_mono_s,
            max_wait_s=self._max_wait_s,
            left_out=left_out,
            failed_starts=self._down.starts,
            ran_before=self._ran_before,
            replacement_s=known_s if known_s is not None else self._replacements.estimate_s(),
            resize_s=self._resizes.estimate_s() or FIRST_RESIZE_S,
        )

    def _pace(self) -> None:
        """The controller asks again at once as long as it is told to wait; nothing else runs in its loop meanwhile."""
        time.sleep(max(0.0, self._looked_mono_s + _LOOK_EVERY_S - time.monotonic()))
        self._looked_mono_s = time.monotonic()

    def _say(self, sentence: str, level: int = logging.INFO) -> None:
        """Once, and now and then while nothing changes."""
        assert self._down is not None
        now = time.monotonic()
        if sentence != self._down.said or now - self._down.said_mono_s > _SAY_EVERY_S:
            logger.log(level, "%s", sentence)
            self._down.said, self._down.said_mono_s = sentence, now

    # running

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        try:
            return self._resize(worker_group_state)
        except Exception as error:  # as above: whether the group can grow is looked at another time
            logger.warning("Whether more workers can be had cannot be seen now, tried again: %r", error)
            return NoopDecision()

    def _resize(self, worker_group_state: Any) -> Any:
        self._maybe_send_resource_request()
        num_workers = int(worker_group_state.num_workers)
        self._note_running(num_workers)
        if num_workers >= self.scaling_config.max_workers:
            return NoopDecision()  # full, or of a fixed size
        since_mono_s = max(worker_group_state.start_time, self._latest_monitor_time)
        pending = self._asked_mono_s is not None  # a save was asked for: look whether it has come
        if not pending and time.monotonic() - since_mono_s < self.scaling_config.elastic_resize_monitor_interval_s:
            return NoopDecision()
        self._latest_monitor_time = time.monotonic()
        reserved = fresh_reserved_resources(self)  # Ray looks by itself only every 20 s
        if reserved is None:
            return NoopDecision()
        usable, _ = self._usable(reserved, down=False)
        return self._grow(num_workers, self._count_possible_workers(usable))

    def _grow(self, num_workers: int, possible: int) -> Any:
        now = time.monotonic()
        asked_s_ago = None if self._asked_mono_s is None else now - self._asked_mono_s
        age_s = self._commit_age_s() if possible > num_workers else None
        decision = decide_growth(
            RunningState(num_workers=num_workers, possible=possible, commit_age_s=age_s, asked_s_ago=asked_s_ago)
        )
        if possible <= num_workers:
            self._asked_mono_s = None
            return NoopDecision()
        if decision.action is Grow.NOW:
            logger.info("%s", decision.reason)
            self._asked_mono_s = None
            return self._get_resize_decision(possible)
        if decision.action is Grow.SAVE_FIRST:
            logger.info("%s", decision.reason)
            self._asked_mono_s = now
            self._tell_to_save()
        return NoopDecision()

    def _note_running(self, num_workers: int) -> None:
        """What this run has seen of resizes and replacements: the group runs with so many workers."""
        now = time.monotonic()
        if self._down is not None:
            if self._ran_before:
                self._resizes = self._resizes.noted(now - self._down.since_mono_s)
            self._down, self._ran_before, self._asked_mono_s = None, True, None
        if self._short_since_mono_s is not None and num_workers >= self.scaling_config.max_workers:
            self._replacements = self._replacements.noted(now - self._short_since_mono_s)
            self._short_since_mono_s = None

    # what there is

    @property
    def _worker_resources(self) -> Mapping[str, float]:
        resources: Any = (
            self.scaling_config._resources_per_worker_not_none
        )  # numbers, which its annotation does not say
        return resources

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        if self.scaling_config.use_tpu:  # whole slices only, which Ray knows how to count
            return super()._count_possible_workers(reserved_resources)
        return workers_that_fit(
            reserved_resources.values(), self._worker_resources, at_most=self.scaling_config.max_workers
        )

    def _usable(self, reserved: Resources, *, down: bool) -> tuple[Resources, int]:
        """What the run may use of the cluster, its workers' places too, and how many nodes are left out."""
        left_out = self._left_out(reserved)
        usable = {node: dict(resources) for node, resources in reserved.items() if node not in left_out}
        if (down or left_out) and self.scaling_config.label_selector is None:
            # What Ray reserved for this run may lack room that is there: it keeps places for a driver that was killed
            # for minutes, and may have reserved those of this run on a node that is left out. The places of the worker
            # group that failed are not free yet: Ray lets them go when it starts the next one.
            everywhere = _sum(available_resources(), own_placed_resources())
            left_out |= self._left_out({node: free for node, free in everywhere.items() if node not in reserved})
            for node, free in everywhere.items():
                if node not in left_out:
                    kept = usable.setdefault(node, {})
                    kept.update({name: amount for name, amount in free.items() if amount > kept.get(name, 0.0)})
        return usable, len(left_out)

    def _left_out(self, nodes: Resources) -> set[str]:
        silent = self._silent_nodes(nodes)
        try:
            going = set(draining_nodes()) & set(nodes)
        except (RayError, RuntimeError) as error:  # Ray's GCS does not answer: the next look may have more luck
            logger.warning("Whether nodes are being drained is not known for now (%r).", error)
            going = set()
        return silent | going

    def _silent_nodes(self, nodes: Resources) -> set[str]:
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

    # the run's coordinator

    def _commit_age_s(self) -> float | None:
        """Seconds since the newest commit of the living attempt; None if there is none, or it is not known."""
        try:
            age_s: float | None = ray.get(self._coordinator().commit_age_s.remote(), timeout=_ASK_TIMEOUT_S)
            return age_s
        except (ValueError, RayError, TimeoutError) as error:
            logger.warning("The run's coordinator did not say how old the newest commit is (%s).", error)
            return None

    def _tell_to_save(self) -> None:
        try:
            self._coordinator().request_save.remote()
        except (ValueError, RayError) as error:
            logger.warning("The run's coordinator could not be asked for a save (%s).", error)

    def _coordinator(self) -> Any:
        return ray.get_actor(coordinator_name(self._run_key), namespace=NAMESPACE)


def _sum(free: Resources, held: Resources) -> Resources:
    """Both together, of the nodes that have something free or would have: those that live."""
    return {
        node: {
            name: amounts.get(name, 0.0) + held.get(node, {}).get(name, 0.0) for name in {*amounts, *held.get(node, {})}
        }
        for node, amounts in free.items()
    }


def _answered(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=0)
    except (RayError, TimeoutError):
        return False
    return True
