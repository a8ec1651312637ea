"""The plan and the slots of one rank, with the agreements that make all ranks stage a save or none of them.

Slots are made in the background: allocating and touching them takes several times as long as filling them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ray_goodput.checkpoint.plan import Planner, SavePlan
from ray_goodput.checkpoint.ranks import Ranks
from ray_goodput.checkpoint.stage import PendingStage, Stager
from ray_goodput.checkpoint.state import StateTree
from ray_goodput.core.commit import CheckpointId
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import CheckpointError, GoodputError, StagingFullError

logger = logging.getLogger(__name__)


class RankStager:
    """`prepare`, then for each save `plan_for` and `begin`. For the training thread; `release` may come from any."""

    def __init__(self, ranks: Ranks, folder: Callable[[SavePlan], Path], *, num_slots: int = 2) -> None:
        """`folder(plan)`: where the slots go; it must be this attempt's alone."""
        self._ranks = ranks
        self._folder = folder
        self._num_slots = num_slots
        self._planner = Planner(world_rank=ranks.world_rank, world_size=ranks.world_size, gather=ranks.gather)
        self._stager: Stager | None = None
        self._opened = False
        self._opening: threading.Thread | None = None

    @property
    def num_free(self) -> int:
        return 0 if self._stager is None else self._stager.num_free

    def prepare(self, tree: StateTree) -> None:
        """The slots that saves of `tree` need are being made, behind the caller's back. Collective."""
        self.plan_for(tree)
        if self._opened or self._opening is not None:
            return
        device = torch.cuda.current_device() if _uses_cuda() else None
        self._opening = threading.Thread(target=self._open, args=(device,), name="staging-slots", daemon=True)
        self._opening.start()

    def plan_for(self, tree: StateTree) -> SavePlan:
        """The plan of a save of `tree`. Collective when the structure is new.

        Raises:
            StructureMismatchError, CheckpointError: on all ranks alike.
        """
        plan = self._planner.plan_for(tree)
        if self._stager is None:
            self._stager = Stager(plan, self._folder(plan), num_slots=self._num_slots)
            # No rank takes its room before all of the node have looked how much there is for all of them.
            self._ranks.all_true(True)
        elif self._stager.plan is not plan:
            self._join()
            self._stager.use(plan)
            self._opened = False
        return plan

    def begin(
        self,
        tree: StateTree,
        checkpoint_id: CheckpointId,
        *,
        rank_state: bytes,
        cursors: Mapping[str, Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        tier: SaveTier = SaveTier.STORAGE,
        min_free: int = 1,
    ) -> PendingStage | None:
        """`Stager.begin` on every rank, or None on every rank if one has no slot or no room. Collective.

        min_free: slots that must be free before, so that some stay for other saves.

        Without device copies it is finished when this returns.

        Raises:
            CheckpointError: the state of some rank cannot be saved; on every rank.
            Exception: what else failed on a rank (a device, a disk); on other ranks a RuntimeError that tells of it.
        """
        self.plan_for(tree)
        assert self._stager is not None
        self._join()
        if not self._opened:
            self._open(None)
        if not self._ranks.all_true(self._opened and self._stager.num_free >= min_free):
            return None
        pending: PendingStage | None = None
        problem: Exception | None = None
        try:
            pending = self._stager.begin(
                tree, checkpoint_id, rank_state=rank_state, cursors=cursors, extra=extra, tier=tier
            )
            if pending is not None and not pending.on_device:
                pending.finish()
        except Exception as error:  # whatever it was, the other ranks must hear of it before this one leaves
            problem = error
        if self._ranks.all_true(problem is None and pending is not None):
            return pending
        if pending is not None and problem is None:
            pending.abandon()
        self._raise_or_log(problem)
        return None

    def release(self, slot_path: str) -> None:
        """The slot can be used again."""
        if self._stager is not None:
            self._stager.release(slot_path)

    def close(self) -> None:
        """Free slots are removed; those that still hold a save are left to who uploads them."""
        self._join()
        if self._stager is not None:
            self._stager.close()

    def _raise_or_log(self, problem: Exception | None) -> None:
        ours = problem if problem is None or isinstance(problem, GoodputError) else _summary(problem)
        for rank, error in enumerate(self._ranks.gather(ours)):
            if error is None:
                continue
            if isinstance(error, StagingFullError):
                if rank == self._ranks.world_rank:
                    logger.error("%s", error)
            elif rank == self._ranks.world_rank and problem is not None:
                raise problem
            else:
                # As `error` is none of ours, so is what is raised for it: ours would mean that trying again is useless.
                kind = CheckpointError if isinstance(error, GoodputError) else RuntimeError
                raise kind(f"Rank {rank} cannot save: {error}") from None

    def _open(self, device: int | None) -> None:
        assert self._stager is not None
        try:
            if device is not None:  # else pinning would make a context on the first device, whatever this rank's is
                torch.cuda.set_device(device)
            self._stager.open()
            self._opened = True
        except StagingFullError as error:
            logger.error("%s", error)

    def _join(self) -> None:
        if self._opening is not None:
            self._opening.join()
            self._opening = None


def _summary(error: Exception) -> RuntimeError:
    """What can be sent to other processes, whatever the exception holds."""
    return RuntimeError(f"{type(error).__name__}: {error}")


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
