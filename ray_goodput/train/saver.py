"""The training side of a save: plan, stage, one message to the vault. Everything else happens elsewhere."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.exceptions import RayError, RayTaskError

from ray_goodput.actors.names import attempt_dir, slots_dirs
from ray_goodput.actors.spec import RunSpec
from ray_goodput.checkpoint.deferred import DeferredCopies
from ray_goodput.checkpoint.plan import SavePlan
from ray_goodput.checkpoint.rank_stager import RankStager
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.stage import choose_folder
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.core.commit import CheckpointId, StagedSlice
from ray_goodput.core.tier_cadence import TierCadence
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import FencedError, StorageError
from ray_goodput.train.decide import EndWait
from ray_goodput.train.lanes import LANE_PLACES
from ray_goodput.train.tier_times import TierTimes
from ray_goodput.train.worker import WorkerContext

logger = logging.getLogger(__name__)

_NUM_SLOTS = 2
_NEAR_WAIT_S = 60.0
_SLOT_WAIT_S = 5.0
_LOOK_S = 1.0  # how often what waits for a slot, or for the last upload, looks whether the run is to stop
_COMMIT_WAIT_S = 20.0
_COMMIT_TRIES = 3


@dataclass(slots=True)
class _InFlight:
    """A slice at the vault: `ref` is ready when its slot may be used again."""

    staged: StagedSlice
    ref: Any
    sent_mono_s: float


class Saver:
    """Saves of one rank and attempt. Not thread-safe: used by the training thread only."""

    def __init__(self, spec: RunSpec, worker: WorkerContext) -> None:
        self._spec = spec
        self._worker = worker
        self._world = worker.world
        self._clock = worker.clock
        self._cadence = TierCadence.parse(
            every=spec.checkpoint.every,
            every_local=spec.checkpoint.every_local,
            peers=spec.checkpoint.peer_copies > 0,
            world=self._world.world_size,
        )
        # One stays free for near saves; under "auto" at most one save to storage is under way.
        self._num_slots = _NUM_SLOTS + (self._cadence.near and spec.checkpoint.every != "auto")
        self._stager = RankStager(self._world, self._choose_slots, num_slots=self._num_slots)
        self._copies = DeferredCopies(self._hand_over)
        self._in_flight: list[_InFlight] = []
        self._times = TierTimes(self._cadence, self._clock, self._world.world_size)
        self._identity: dict[str, str] = {}
        self._stop_requested = threading.Event()
        self.last_step = 0  # newest step staged for storage, or resumed from a commit
        self._staged = (-1, SaveTier.NONE)  # newest step staged in this attempt, and how far it goes
        self._failed_step = -1  # newest step of which this rank's slice could not be kept
        self.skipped = 0

    def begin(self, step: int, *, durable: bool = True) -> None:
        """The attempt goes on after `step`, which is committed (or is the start) unless not `durable`. Collective."""
        self.last_step = step if durable else 0
        failures, exposure_s, restores, run_id = 0, 0.0, {}, ""
        if self._world.world_rank == 0:
            coordinator = self._worker.coordinator
            try:
                failures, exposure_s = coordinator.failure_history()
                restores, run_id = coordinator.restores_by_tier(), coordinator.identity()
            except Exception as error:  # whatever it is, only the interval between saves depends on it
                logger.warning("The run's failures so far are unknown, saves are timed without them: %s", error)
        self._times.begin(step, failures, exposure_s, restores)
        run_id, life = self._world.broadcast((run_id, uuid.uuid4().hex))
        self._identity = {"life": life, **({"run_id": run_id} if run_id else {})}

    def request_stop(self) -> None:
        self._stop_requested.set()

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested.is_set()

    def due(self, step: int) -> SaveTier:
        """How far a save that should begin at `step` goes; rank 0 decides for all."""
        if self._world.world_rank != 0:
            return SaveTier.NONE
        self._collect_finished()
        return self._times.decide(step, [flight.staged.tier for flight in self._in_flight]).tier

    def save(
        self,
        *,
        step: int,
        model: Any,
        optimizer: Any,
        stateful: Mapping[str, Any],
        cursors: Mapping[str, Mapping[str, Any]],
        lane_places: Mapping[str, Sequence[int]] | None = None,
        must: bool,
        tier: SaveTier = SaveTier.STORAGE,
    ) -> bool:
        """Stage the state after `step`, for the vault, to be brought as far as `tier`; False if it was skipped.
        Collective.

        On a CPU the vault has it when this returns, on a device once `settle` or the next optimizer step was called.

        lane_places: `LaneAgreement.record()`.
        must: wait for a slot, whatever the configuration says; but not beyond `max_durable_age`, if the run is to stop
            then: what holds the slots waits for the storage.

        Raises:
            CheckpointError: the state cannot be saved; on all ranks.
            FencedError: this attempt has been replaced.
        """
        if step == self._staged[0] and tier <= self._staged[1]:
            return True  # the same state under the same name: writing it again would touch what may be committed
        started = self._clock.mono_s()
        self.settle()
        self._collect_finished()
        tree = collect_state(model=model, optimizer=optimizer, stateful=stateful)
        self._stager.plan_for(tree)
        min_free = 2 if self._cadence.near and tier is SaveTier.STORAGE and not must else 1
        if self._stager.num_free < min_free:
            self._let_near_saves_arrive()
        if must or self._spec.checkpoint.when_full == "wait":
            while self._stager.num_free < min_free and self._in_flight and not self._worker.orders.stop_reason:
                self._wait_for_one()
        pending = self._stager.begin(
            tree,
            CheckpointId(step, self._worker.attempt),
            rank_state=capture_rng(),
            cursors=cursors,
            extra={
                "rng_seed": torch.initial_seed(),
                **self._identity,
                **({LANE_PLACES: lane_places} if lane_places else {}),
            },
            tier=tier,
            min_free=min_free,
        )
        if pending is None:
            self._note_skipped(step, tier)
            self._times.begun(tier, step, None)
            if tier is SaveTier.STORAGE and self._cadence.near:  # it is slow or away: the nodes at least
                nearer = {"must": False, "tier": SaveTier.PEER, "cursors": cursors, "lane_places": lane_places}
                self.save(step=step, model=model, optimizer=optimizer, stateful=stateful, **nearer)
            return False
        self._copies.take(pending, optimizer)
        self._staged = (step, tier)
        stall_s = self._clock.mono_s() - started
        self._times.begun(tier, step, stall_s)
        if tier is not SaveTier.STORAGE:
            return True
        self.last_step = step
        if self._world.world_rank == 0:
            checkpoint = CheckpointId(step, self._worker.attempt)
            self._worker.coordinator.handle.save_stalled.remote(checkpoint, stall_s)
        return True

    def prepare(self, *, model: Any, optimizer: Any, stateful: Mapping[str, Any]) -> None:
        """The staging slots are being made in the background, so that the first save costs what later ones do.

        Collective. Call it once the optimizer has its state: after the first step, or after a restore.
        """
        self._stager.prepare(collect_state(model=model, optimizer=optimizer, stateful=stateful))

    def settle(self) -> None:
        """Copies of the last save that still ran on a device are done, and the vault has the slice."""
        self._copies.settle()

    def _hand_over(self, staged: StagedSlice) -> None:
        self._in_flight.append(_InFlight(staged, self._worker.vault.persist.remote(staged), self._clock.mono_s()))

    def leave(self) -> bool:
        """Near saves have arrived, on all ranks; those to storage are left to the vaults, and nothing waits for them.
        Collective."""
        self._copies.close()
        near = [flight.ref for flight in self._in_flight if flight.staged.tier is not SaveTier.STORAGE]
        if near:
            ray.wait(near, num_returns=len(near), timeout=_NEAR_WAIT_S)
        self._collect_finished(keep_failed=True)
        arrived = all(flight.staged.tier is SaveTier.STORAGE for flight in self._in_flight)
        arrived = arrived and self._failed_step != self._staged[0]
        self._stager.close()
        return self._world.all_true(arrived)

    def finish(self) -> bool:
        """Every save of this rank has reached storage, and the newest one is committed. Collective.

        False, on all ranks: the run is to stop (`max_durable_age`), and nothing waits for the storage any longer; the
        vaults go on, and the slots keep what they need.

        Raises:
            StorageError: it is not committed; on all ranks. The slots keep what could not be uploaded, for the next
                attempt.
            FencedError: another driver has taken the run.
        """
        self._copies.close()
        told = EndWait(self.last_step, self._clock.mono_s())
        while self._in_flight and not self._worker.orders.stop_reason:
            self._wait_for_one(keep_failed=True)
            told.look(self._clock.mono_s())
        committed = self.last_step <= 0 or self._committed()
        if not committed and self._to_stop():
            return False
        self._stager.close()
        if not committed:
            raise StorageError(
                f"The state after the last save, step {self.last_step}, is not committed: its upload failed (see the "
                "log above). The run's newest checkpoint is older; the run can go on from there once the storage works."
            )
        return True

    def wait_committed(self, timeout_s: float) -> bool:
        """Whether the newest save is committed within `timeout_s`. Collective.

        The vaults are not waited for: they go on copying slices to NVMe after the commit, and who asks here is leaving.
        """
        self.settle()
        deadline = self._clock.mono_s() + timeout_s

        def committed() -> bool:
            checkpoint, done = CheckpointId(self.last_step, self._worker.attempt), False
            while not done and (left_s := deadline - self._clock.mono_s()) > 0:
                done = self._worker.coordinator.wait_committed(checkpoint, min(left_s, _COMMIT_WAIT_S))
            return done

        done = self._world.on_rank_0(committed)
        self._collect_finished(keep_failed=True)
        return done

    def _committed(self) -> bool:
        """Whether the newest save gets committed, reminding a coordinator that died with its notes. Collective."""
        newest, wait_committed = CheckpointId(self.last_step, 0), self._worker.coordinator.wait_committed
        for _ in range(_COMMIT_TRIES):
            stop = self._to_stop()  # if not, every rank's slice has landed
            limit_s = 0.0 if stop else _COMMIT_WAIT_S
            if self._world.on_rank_0(lambda limit_s=limit_s: wait_committed(newest, limit_s)):
                return True
            if stop:
                return False
            ray.wait([self._worker.vault.land_again.remote(self.last_step)], timeout=_COMMIT_WAIT_S)
        return False

    def _to_stop(self) -> bool:
        """Whether any rank was told that the run is to stop. Collective."""
        return not self._world.all_true(not self._worker.orders.stop_reason)

    def _choose_slots(self, plan: SavePlan) -> Path:
        context = ray.train.get_context()
        chosen = choose_folder(
            plan,
            slots_dirs(self._worker.local_dir, self._spec.key, self._spec.checkpoint.staging_dir),
            num_slots=self._num_slots,
            ranks_of_node=context.get_local_world_size(),
            first_of_node=context.get_local_rank() == 0,
        )
        return attempt_dir(chosen, self._worker.attempt)

    def _let_near_saves_arrive(self) -> None:
        """Those need no storage and hold their slots for moments: a save is not skipped for their sake."""
        near = [flight.ref for flight in self._in_flight if flight.staged.tier is not SaveTier.STORAGE]
        if near:
            ray.wait(near, num_returns=len(near), timeout=_SLOT_WAIT_S)
            self._collect_finished()

    def _wait_for_one(self, *, keep_failed: bool = False) -> None:
        ray.wait([self._in_flight[0].ref], timeout=_LOOK_S)
        self._collect_finished(keep_failed=keep_failed)

    def _collect_finished(self, *, keep_failed: bool = False) -> None:
        """Free the slots the vault is done with; with `keep_failed`, not those it could not save.

        Raises:
            FencedError: the coordinator has given this attempt's place to a later one.
        """
        if not self._in_flight:
            return
        ready, _ = ray.wait([f.ref for f in self._in_flight], num_returns=len(self._in_flight), timeout=0)
        for flight in [f for f in self._in_flight if f.ref in ready]:
            self._in_flight.remove(flight)
            step, saved = flight.staged.checkpoint.step, False
            try:
                ray.get(flight.ref)
                self._times.arrived(flight.staged.tier, self._clock.mono_s() - flight.sent_mono_s)
                saved = True
            except RayTaskError as error:
                if isinstance(error.cause, FencedError):
                    raise error.cause from error
                logger.error("The save of step %d failed; training goes on from the one before: %s", step, error.cause)
            except RayError as error:
                logger.error("The save of step %d was lost with this node's vault: %s", step, error)
            finally:
                if not saved:
                    self._failed_step = max(self._failed_step, step)
                if saved or not keep_failed:
                    self._stager.release(flight.staged.slot_path)

    def _note_skipped(self, step: int, tier: SaveTier) -> None:
        if tier is not SaveTier.STORAGE:
            logger.debug("The save of step %d to tier %s was skipped.", step, tier.label)
            return
        self.skipped += 1
        if self._world.world_rank == 0:
            logger.warning(
                "The save at step %d was skipped: a rank had no free staging slot (%d skipped so far). Earlier saves "
                "hold the slots while they are uploaded, or there is no room for them.",
                step,
                self.skipped,
            )
            self._worker.coordinator.handle.save_skipped.remote(self._worker.attempt)
