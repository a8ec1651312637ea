"""Copies that still run on a device while training goes on: waited for at the last moment, then handed over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from ray_goodput.checkpoint.stage import PendingStage
from ray_goodput.core.commit import StagedSlice
from ray_goodput.errors import CheckpointError

logger = logging.getLogger(__name__)


class DeferredCopies:
    """Hands over each staged slice: at once when its copies are done, else just before an optimizer changes what is
    being copied. Not thread-safe: used by the training thread.

    hand_over: called once for each slice that lies complete in its slot.
    """

    def __init__(self, hand_over: Callable[[StagedSlice], None]) -> None:
        self._hand_over = hand_over
        self._pending: PendingStage | None = None
        self._hooked: dict[int, Any] = {}

    def take(self, pending: PendingStage, optimizer: Optimizer | Sequence[Optimizer] | None) -> None:
        """Own `pending`; it is settled by the next `step` of an optimizer, or by `settle`."""
        self._pending = pending
        optimizers = _listed(optimizer)
        if not pending.on_device or not optimizers or not all(map(_calls_hooks, optimizers)):
            self.settle()
            return
        for one in optimizers:
            if id(one) not in self._hooked:
                self._hooked[id(one)] = one.register_step_pre_hook(lambda *_: self.settle())

    def settle(self) -> None:
        """The copies under way are done and handed over; nothing happens if there are none. A slice that could not be
        finished is said in the log: training goes on from the save before."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            staged = pending.finish()
        except CheckpointError as error:
            logger.error("%s", error)
            return
        self._hand_over(staged)

    def close(self) -> None:
        """Settled, and the optimizers are left as they were."""
        self.settle()
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()


def _listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]


def _calls_hooks(optimizer: Any) -> bool:
    """False for one whose step may be replayed from a CUDA graph, without Python and its hooks."""
    return hasattr(optimizer, "register_step_pre_hook") and not any(g.get("capturable") for g in optimizer.param_groups)
