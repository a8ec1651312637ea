"""What one rank wants all ranks to do after a step, and how they leave when nothing became durable for too long."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ray_goodput.core.commit import CommitRecord
from ray_goodput.core.durable_age import AgeWatch
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import DurableAgeError
from ray_goodput.train.orders import RankOrders
from ray_goodput.train.world import Decisions

logger = logging.getLogger(__name__)

_SAY_AFTER_S = 60.0


def decide(orders: RankOrders, due: SaveTier, stop: bool) -> Decisions:
    """`due`: how far a save should go; `stop`: the user's own wish."""
    if orders.stop_reason:  # the storage is away: what waits for it would wait for long
        return Decisions(stop=True, near=SaveTier.PEER)
    return Decisions(
        save=orders.end_run or orders.take_save() or due is SaveTier.STORAGE,
        stop=orders.end_run or stop,
        leave=orders.must_leave,
        near=due if due < SaveTier.STORAGE else SaveTier.NONE,
    )


def raise_if_too_old(reasons: list[str], step: int, save: Callable[[], bool]) -> None:
    """Raises DurableAgeError if some rank was told why (`reasons`, "" for not). `save`: to the nodes."""
    reason = next(filter(None, reasons), "")
    if not reason:
        return
    where = f"The state after step {step} lies on the nodes' disks" if save() else "Not all of it lies on the disks"
    raise DurableAgeError(
        f'{reason} on_durable_age="stop": the run stopped after step {step}. {where}; mend the storage and start the '
        "same script under the same run name: it goes on from the newest state that is left."
    )


class EndWait:
    """The end of a run waits for its last save: said once, if it takes long."""

    def __init__(self, step: int, now_mono_s: float) -> None:
        self._step = step
        self._since_mono_s = now_mono_s
        self._told = False

    def look(self, now_mono_s: float) -> None:
        if not self._told and now_mono_s - self._since_mono_s > _SAY_AFTER_S:
            self._told = True
            logger.warning(
                "The run's end waits for the upload of its last save, of step %d, since %.0f s. To end without it when "
                'the storage is away, set CheckpointConfig(max_durable_age=..., on_durable_age="stop").',
                self._step,
                now_mono_s - self._since_mono_s,
            )


class OwnAge:
    """The age of the newest commit, watched by a run that has no coordinator. For one thread."""

    def __init__(self, limit_s: float | None, *, stop: bool) -> None:
        self._watch = AgeWatch(limit_s)
        self._stop = stop
        self._newest: CommitRecord | None = None
        self.stop_reason = ""

    def look(self, now_mono_s: float, newest: CommitRecord | None, step: int, *, ended: bool = False) -> None:
        """If the limit is passed it is said, and `stop_reason` set if the run is to stop then. `ended`: the run is over
        and waits for the save of its last step, `step`."""
        self._watch.begin(now_mono_s)
        if newest is not None and newest != self._newest:
            self._newest = newest
            self._watch.committed(now_mono_s)
        committed_step = newest.checkpoint.step if newest is not None else -1
        reason = self._watch.passed(now_mono_s, committed_step=committed_step, step=step)
        if reason is not None:
            logger.warning("%s", reason)
        if reason is not None and self._stop:
            stopped = f"the last save, of step {step}, was not waited for" if ended else f"stopped at step {step + 1}"
            self.stop_reason = (
                f'{reason} on_durable_age="stop": {stopped}. What was staged stays on the nodes: mend the storage and '
                "start the same script again; it finishes those uploads and goes on from there."
            )
