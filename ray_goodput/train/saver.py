"""The training side of a save: plan, stage, one message to the vault. Everything else happens elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.exceptions import RayError, RayTaskError

from ray_goodput.actors.names import attempt_dir, slots_dirs
from ray_goodput.actors.spec import RunSpec
from ray_goodput.checkpoint.plan import Planner, SavePlan
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.core.cadence import CadenceState, SaveCadence
from ray_goodput.core.commit import CheckpointId, StagedSlice
from ray_goodput.errors import FencedError, StagingFullError
from ray_goodput.storage.disk import free_bytes
from ray_goodput.train.worker import WorkerContext

logger = logging.getLogger(__name__)

_NUM_SLOTS = 2
_FINAL_WAIT_S = 1800.0
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
        self._planner = Planner(
            world_rank=self._world.world_rank, world_size=self._world.world_size, gather=self._world.gather
        )
        self._stager: Stager | None = None
        self._in_flight: list[_InFlight] = []
        self._cadence = SaveCadence.parse(spec.checkpoint.every, world=self._world.world_size)
        self._stop_requested = threading.Event()
        self.last_step = 0
        self.skipped = 0
        self._last_save_mono_s = self._clock.mono_s()
        self._stall_s: float | None = None
        self._latency_s: float | None = None
        self._failures, self._exposure_s = 0, 0.0

    def begin(self, step: int) -> None:
        """The attempt goes on after `step`, which is saved already (or is the start)."""
        self.last_step = step
        self._last_save_mono_s = self._clock.mono_s()
        if self._world.world_rank == 0:
            self._failures, self._exposure_s = self._worker.coordinator.failure_history()

    def request_stop(self) -> None:
        self._stop_requested.set()

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested.is_set()

    def due(self, step: int) -> bool:
        """Whether a save should begin at `step`; rank 0 decides for all."""
        if self._world.world_rank != 0:
            return False
        self._collect_finished()
        elapsed_s = self._clock.mono_s() - self._last_save_mono_s
        decision = self._cadence.decide(
            CadenceState(
                step=step,
                now_mono_s=self._clock.mono_s(),
                last_save_step=self.last_step,
                last_save_mono_s=self._last_save_mono_s,
                saves_in_flight=len(self._in_flight),
                stall_s=self._stall_s,
                latency_s=self._latency_s,
                failures=self._failures,
                exposure_s=self._exposure_s + elapsed_s * self._world.world_size,
            )
        )
        return decision.save

    def save(
        self,
        *,
        step: int,
        model: Any,
        optimizer: Any,
        stateful: Mapping[str, Any],
        cursors: Mapping[str, Mapping[str, Any]],
        must: bool,
    ) -> bool:
        """Stage the state after `step` and hand it to the vault; False if it was skipped. Collective.

        must: wait for a slot, whatever the configuration says.

        Raises:
            FencedError: this attempt has been replaced.
        """
        started = self._clock.mono_s()
        self._collect_finished()
        tree = collect_state(model=model, optimizer=optimizer, stateful=stateful)
        plan = self._planner.plan_for(tree)
        ready = self._prepare_slots(plan, wait=must or self._spec.checkpoint.when_full == "wait")
        if not self._world.all_true(ready):
            self._note_skipped(step)
            return False
        assert self._stager is not None
        staged = self._stager.stage(
            tree,
            CheckpointId(step, self._worker.attempt),
            rank_state=capture_rng(),
            cursors=cursors,
            extra={"rng_seed": torch.initial_seed()},
        )
        assert staged is not None  # a slot was free and only this thread takes one
        self._in_flight.append(_InFlight(staged, self._worker.vault.persist.remote(staged), self._clock.mono_s()))
        self.last_step = step
        self._last_save_mono_s = self._clock.mono_s()
        self._stall_s = self._last_save_mono_s - started
        return True

    def finish(self) -> None:
        """Every save of this rank has reached storage, and the newest one is committed. Collective."""
        while self._in_flight:
            self._wait_for_one()
        if self.last_step > 0 and not self._committed() and self._world.world_rank == 0:
            logger.error(
                "The save of step %d is in storage but was not committed: the run's newest checkpoint is older.",
                self.last_step,
            )
        if self._stager is not None:
            self._stager.close()

    def _committed(self) -> bool:
        """Whether the newest save gets committed, reminding a coordinator that died with its notes. Collective."""
        for _ in range(_COMMIT_TRIES):
            self._world.all_true(True)  # every rank's slice has landed
            done = None
            if self._world.world_rank == 0:
                done = self._worker.coordinator.wait_committed(CheckpointId(self.last_step, 0), _COMMIT_WAIT_S)
            if self._world.broadcast(done):
                return True
            ray.wait([self._worker.vault.land_again.remote(self.last_step)], timeout=_COMMIT_WAIT_S)
        return False

    def _prepare_slots(self, plan: SavePlan, *, wait: bool) -> bool:
        """Whether a slot of the right size is free; with `wait`, after waiting for the vault."""
        try:
            if self._stager is None:
                self._stager = Stager(plan, self._choose_slots(plan), num_slots=_NUM_SLOTS)
                self._stager.open()
            elif self._stager.plan is not plan:
                self._stager.use(plan)
                self._stager.open()
        except StagingFullError as error:
            logger.error("%s", error)
            return False
        while wait and self._stager.num_free == 0 and self._in_flight:
            self._wait_for_one()
        return self._stager.num_free > 0

    def _choose_slots(self, plan: SavePlan) -> Path:
        """The first of the possible folders with room for this node's slots, else the last one."""
        local_ranks = ray.train.get_context().get_local_world_size()
        need = plan.image_bytes * _NUM_SLOTS * local_ranks
        folders = slots_dirs(self._worker.local_dir, self._spec.key, self._spec.checkpoint.staging_dir)
        chosen = next((f for f in folders if free_bytes(f) > need), folders[-1])
        if chosen != folders[0]:
            logger.warning("%s has no room for %d bytes of staging slots: they go to %s.", folders[0], need, chosen)
        return attempt_dir(chosen, self._worker.attempt)

    def _wait_for_one(self) -> None:
        ray.wait([self._in_flight[0].ref], timeout=_FINAL_WAIT_S)
        self._collect_finished()

    def _collect_finished(self) -> None:
        """Free the slots the vault is done with.

        Raises:
            FencedError: the coordinator has given this attempt's place to a later one.
        """
        if not self._in_flight:
            return
        ready, _ = ray.wait([f.ref for f in self._in_flight], num_returns=len(self._in_flight), timeout=0)
        for flight in [f for f in self._in_flight if f.ref in ready]:
            self._in_flight.remove(flight)
            assert self._stager is not None
            self._stager.release(flight.staged.slot_path)
            step = flight.staged.checkpoint.step
            try:
                ray.get(flight.ref)
                self._latency_s = self._clock.mono_s() - flight.sent_mono_s
            except RayTaskError as error:
                if isinstance(error.cause, FencedError):
                    raise error.cause from error
                logger.error("The save of step %d failed; training goes on from the one before: %s", step, error.cause)
            except RayError as error:
                logger.error("The save of step %d was lost with this node's vault: %s", step, error)

    def _note_skipped(self, step: int) -> None:
        self.skipped += 1
        if self._world.world_rank == 0:
            logger.warning(
                "The save at step %d was skipped: earlier ones still hold the staging slots (%d skipped so far).",
                step,
                self.skipped,
            )
            self._worker.coordinator.handle.save_skipped.remote(self._worker.attempt)
