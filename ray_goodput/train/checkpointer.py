"""`rg.Checkpointer`: the checkpoint engine without Ray Train, under `torchrun` or in a single process.

The same plan, slots, format and commit as a `GoodputTrainer` run; what its actors do is done by threads: each rank
uploads its own slices, rank 0 commits. What a killed process staged is uploaded by the next start on the same node.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ray_goodput.actors.commits import CHECKPOINTS, CommitLog
from ray_goodput.actors.identity import run_identity
from ray_goodput.actors.names import attempt_dir, journals_dir, local_checkpoints_dir, run_key, slots_dirs
from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.checkpoint.agreed_restore import load_newest
from ray_goodput.checkpoint.deferred import DeferredCopies
from ray_goodput.checkpoint.plan import SavePlan
from ray_goodput.checkpoint.rank_stager import RankStager
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.sources import CheckpointSource, LocalFirstSource, StoreSource
from ray_goodput.checkpoint.stage import choose_folder
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.clock import SystemClock
from ray_goodput.config import CheckpointConfig, StoreSpec, environment
from ray_goodput.core.cadence import SaveCadence
from ray_goodput.core.commit import CheckpointId, CommitRecord
from ray_goodput.core.tier_cadence import TierCadence
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import ConfigError, DurableAgeError, SessionError
from ray_goodput.storage import open_store
from ray_goodput.train.decide import EndWait, OwnAge
from ray_goodput.train.landing import BoardForVault, Committer, LandingBoard
from ray_goodput.train.tier_times import TierTimes
from ray_goodput.train.uploads import Uploads
from ray_goodput.train.world import ControlWord, Decisions, World

logger = logging.getLogger(__name__)

_NUM_SLOTS = 2
_COMMIT_WAIT_S = 60.0
_FINAL_WAIT_S = 1800.0
_LOOK_S = 1.0  # how often what waits for a slot, or for the last commit, looks whether the run is to stop


class Checkpointer:
    """Saves and restores the state of one run in the folder `uri`.

        with rg.Checkpointer("s3://bucket/runs/llm-1", config=rg.CheckpointConfig(every=100)) as saves:
            start = saves.restore(model=model, optimizer=optimizer, scheduler=scheduler)
            for step in range(start + 1, steps + 1):
                ...
                saves.step(step)

    All ranks of `torch.distributed`, if it is initialised, call the same methods in the same order, on the training
    thread; the methods are collective. `close` waits for the last save.

    uri: the run's folder: `s3://...`, any other URL fsspec knows, or a path that all nodes share.
    config: when to save, how much to keep, where to stage; without `every_local` and `peer_copies`.
    storage_options: in the spelling of s3fs.
    local_dir: node-local folder for copies that make a restart quick. Default: `RAY_GOODPUT_LOCAL_DIR`.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        config: CheckpointConfig | None = None,
        storage_options: Mapping[str, Any] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._spec = StoreSpec(uri=os.fspath(uri), options=dict(storage_options or {}))
        self._name = self._spec.uri.rstrip("/").rpartition("/")[2]
        self._config = config or CheckpointConfig()
        if self._config.peer_copies or self._config.every_local is not None:
            raise ConfigError(
                "A Checkpointer saves to the run's folder only: leave every_local and peer_copies out, or train with "
                "GoodputTrainer, whose nodes have a process that keeps and serves copies."
            )
        self._local_dir = Path(local_dir) if local_dir is not None else environment().local_dir
        self._key = run_key(self._name, self._spec)
        self._clock = SystemClock()
        self._state: dict[str, Any] | None = None
        self._cursors: Mapping[str, Mapping[str, Any]] = {}
        self._committer: Committer | None = None
        self._opened = self._prepared = self._closed = False
        self._done: bool | None = None  # once closed: whether the last save was committed
        self._age = OwnAge(self._config.max_durable_age_s, stop=self._config.on_durable_age == "stop")
        self.last_step = 0
        self.skipped = 0

    @property
    def cursors(self) -> Mapping[str, Mapping[str, Any]]:
        """What `save(cursors=)` was given for the checkpoint that was restored; empty on a fresh run."""
        return self._cursors

    @property
    def attempt(self) -> int:
        """Which start of the run this is; the first is 1."""
        self._need_restore("attempt")
        return self._attempt

    def restore(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        strict: bool = True,
        **stateful: Any,
    ) -> int:
        """The newest verified checkpoint is loaded, with random streams; nothing changes on a fresh run.

        Other keyword arguments are objects with `state_dict` and `load_state_dict`, saved under their names. Returns
        the step to go on after, 0 for a fresh run. Call it once, before the first save.

        Raises:
            StructureMismatchError: the checkpoint is of another model or optimizer.
            CorruptCheckpointError: there are checkpoints, and all are damaged.
            StorageError: the storage cannot be reached.
        """
        if self._state is not None:
            raise SessionError("Checkpointer.restore() was called twice: call it once, before the first save.")
        for name, value in stateful.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigError(f"restore({name}=): {type(value).__name__} has no state_dict and load_state_dict.")
        self._state = {"model": model, "optimizer": optimizer, "stateful": stateful}
        self._open()
        loaded = load_newest(
            self._world,
            choose=lambda: self._log.fence_and_choose(self._attempt),
            mark_bad=lambda checkpoint, reason: self._log.mark_bad(checkpoint, reason),
            open_source=self._source,
            strict=strict,
            **self._state,
        )
        if loaded is not None:
            self.last_step, self._cursors = loaded.record.checkpoint.step, loaded.record.cursors
            self._prepare()
        self._times.begin(self.last_step, failures=self._attempt - 1)
        if self._world.world_rank == 0:
            self._committer = Committer(
                self._log, self._board, attempt=self._attempt, world_size=self._world.world_size
            )
            self._committer.start()
        return self.last_step

    def step(self, step: int, *, cursors: Mapping[str, Mapping[str, Any]] | None = None) -> bool:
        """Optimizer step number `step` is done: a save begins if one is due. True if it did.

        cursors: JSON-able positions in the data, by name, equal on all ranks; `Checkpointer.cursors` after a restore.

        Raises:
            FencedError: a later start of this run goes on without this one.
            DurableAgeError: no checkpoint became durable for `max_durable_age`, and you asked to stop then.
        """
        self._need_open("step")
        self._copies.settle()
        agreed = self._control.read()
        if not self._prepared:
            self._prepare()
        if agreed.stop:
            reason = self._world.broadcast(self._age.stop_reason)
            newest = self.last_step if not self._keep_last(step, cursors) else step
            raise DurableAgeError(f"{reason} The newest of it is of step {newest}.")
        saved = agreed.save and self._save(step, cursors, must=False)
        self._control.post(Decisions(save=self._due(step + 1), stop=bool(self._age.stop_reason)))
        return saved

    def save(self, step: int, *, cursors: Mapping[str, Mapping[str, Any]] | None = None) -> bool:
        """The state after `step` is staged, whatever the interval; its upload goes on behind. Waits for a slot.

        False if it was skipped because some rank has no room for its slots (the log says how much is missing), or
        because the run is to stop (`max_durable_age`), as the next `step` says.

        Raises:
            CheckpointError: the state cannot be saved; on all ranks.
            FencedError: a later start of this run goes on without this one.
        """
        self._need_open("save")
        return self._save(step, cursors, must=True)

    def wait(self, timeout_s: float = 1800.0) -> bool:
        """Every save of this rank is in storage, the newest one of all ranks committed; False after `timeout_s`. Once
        closed: whether they were then, False if an error closed it."""
        self._need_restore("wait")
        if self._done is not None:
            return self._done
        self._copies.settle()
        deadline = self._clock.mono_s() + timeout_s
        self._uploads.wait(timeout_s)
        self._uploads.collect(keep_failed=self._closed)
        landed = self._world.all_true(not self._uploads)

        def committed() -> bool:
            left_s = max(0.0, deadline - self._clock.mono_s())
            limit_s = min(left_s, _COMMIT_WAIT_S) if landed else 0.0
            newest = self._log.newest()
            done = newest is not None and newest.checkpoint.step >= self.last_step
            return done or self._log.wait_committed(CheckpointId(self.last_step, 0), limit_s)

        return self.last_step == 0 or self._world.on_rank_0(committed)

    def close(self) -> None:
        """The last save is committed, as far as the storage allows, and the slots are gone. Nothing happens twice.

        What could not be uploaded stays in its slot, for the next start on this node.

        Raises:
            DurableAgeError: no checkpoint became durable for `max_durable_age`, and you asked to stop then.
        """
        if self._closed or not self._opened:
            return
        self._closed = True
        stop_reason, committed = "", False
        try:
            if not (committed := self._committed_at_the_end()):
                logger.error("The save of step %d was not committed: the newest checkpoint is older.", self.last_step)
                stop_reason = self._world.broadcast(self._age.stop_reason)
        finally:  # also when another rank is gone: this process must be able to end
            self._done = committed
            self._release_threads(away=not committed)
        self._leave()
        if stop_reason:
            raise DurableAgeError(stop_reason)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        elif self._opened and not self._closed:  # other ranks may be gone: nothing collective
            self._closed, self._done = True, False
            # The next start finishes what a storage that is away does not take now. All ranks know of that, and leave.
            away = issubclass(error, DurableAgeError)
            self._release_threads(away=away)
            if away:
                self._leave()

    def _keep_last(self, step: int, cursors: Mapping[str, Mapping[str, Any]] | None) -> bool:
        """The state after `step` is staged, on all ranks, if need be over a save whose upload has not begun."""
        if self.last_step == step:
            return True
        slot = None if self._stager.num_free else self._uploads.take_back()
        if not self._world.all_true(slot is not None or self._stager.num_free > 0):
            return False
        if slot is not None:
            self._stager.release(slot)
        saved = self._save(step, cursors, must=False)
        self._copies.settle()
        return saved

    def _committed_at_the_end(self) -> bool:
        """Whether the last save is committed before there is no use in waiting any longer. Collective."""
        now = self._clock.mono_s()
        told, deadline, landed_by = EndWait(self.last_step, now), now + _FINAL_WAIT_S, now
        while not self.wait(_LOOK_S):
            now = self._clock.mono_s()
            if not self._world.all_true(not self._uploads):
                landed_by = now
            if self._world.world_rank == 0:
                told.look(now)
                self._age.look(now, self._log.newest(), self.last_step, ended=True)
            late = now > deadline or now > landed_by + _COMMIT_WAIT_S
            if self._world.broadcast(late or bool(self._age.stop_reason)):
                return False
        return True

    def _open(self) -> None:
        """Join the ranks, number this attempt, finish what earlier ones left on this node, fence them. Collective."""
        together = dist.is_available() and dist.is_initialized()
        self._world = World.join(dist.get_rank() if together else 0, dist.get_world_size() if together else 1)
        self._control = ControlWord(self._world)
        self._store = open_store(self._spec)
        self._board = LandingBoard(self._store)
        self._log = CommitLog(
            run=self._name,
            store=self._store,
            clock=self._clock,
            keep_last=self._config.keep_last,
            keep_every=self._config.keep_every,
        )

        def begin() -> tuple[int, str]:
            self._log.open()
            return self._board.begin_attempt(self._log.highest_attempt + 1), run_identity(self._store)

        self._attempt, self._run_id = self._world.on_rank_0(begin)
        nodes = self._world.gather((socket.gethostname(), str(self._local_dir.absolute())))
        self._ranks_of_node = [rank for rank, node in enumerate(nodes) if node == nodes[self._world.world_rank]]
        self._local_checkpoints = local_checkpoints_dir(self._local_dir, self._key)
        slots = slots_dirs(self._local_dir, self._key, self._config.staging_dir)
        vault = CheckpointVault(
            node_id=nodes[self._world.world_rank][0],
            store=self._store,
            coordinator=BoardForVault(self._board, self._run_id),
            local_checkpoints=self._local_checkpoints,
            slots=slots,
            journals=journals_dir(self._local_dir, self._key),
        )
        if self._ranks_of_node[0] == self._world.world_rank:
            vault.adopt(self._attempt)
        self._world.all_true(True)  # every node has finished what lay there
        self._world.on_rank_0(self._commit_leftovers)
        self._stager = RankStager(self._world, self._choose_slots, num_slots=_NUM_SLOTS)
        rule = SaveCadence.parse(self._config.every, world=self._world.world_size)
        self._times = TierTimes(TierCadence({SaveTier.STORAGE: rule}), self._clock, self._world.world_size)
        self._uploads = Uploads(vault, self._clock, release=self._stager.release, arrived=self._times.arrived)
        self._copies = DeferredCopies(self._uploads.begin)
        self._opened = True

    def _commit_leftovers(self) -> None:
        committer = Committer(self._log, self._board, attempt=self._attempt, world_size=self._world.world_size)
        for checkpoint in self._board.waiting():
            if checkpoint.attempt < self._attempt:
                if committer.commit_if_whole(checkpoint):
                    logger.info("Committed step %d, which an earlier start had staged.", checkpoint.step)
                self._board.clear(checkpoint)

    def _source(self, record: CommitRecord) -> CheckpointSource:
        folder = record.checkpoint.folder
        local = self._local_checkpoints / folder
        return LocalFirstSource(record, [local], StoreSource(record, self._store, f"{CHECKPOINTS}/{folder}", local))

    def _prepare(self) -> None:
        assert self._state is not None
        self._prepared = True
        self._stager.prepare(collect_state(**self._state))

    def _due(self, step: int) -> bool:
        if self._world.world_rank != 0:
            return False
        now = self._clock.mono_s()
        self._age.look(now, self._log.newest(), step - 1)
        return self._times.decide(step, self._uploads.under_way()).tier is SaveTier.STORAGE

    def _save(self, step: int, cursors: Mapping[str, Mapping[str, Any]] | None, *, must: bool) -> bool:
        assert self._state is not None
        started = self._clock.mono_s()
        self._copies.settle()
        self._uploads.collect()
        if self._committer is not None and self._committer.fenced is not None:
            raise self._committer.fenced
        tree = collect_state(**self._state)
        self._stager.plan_for(tree)
        if must or self._config.when_full == "wait":
            self._wait_for_slots(step)
        checkpoint = CheckpointId(step, self._attempt)
        extra = {"rng_seed": torch.initial_seed(), "run_id": self._run_id}
        pending = self._stager.begin(tree, checkpoint, rank_state=capture_rng(), cursors=cursors, extra=extra)
        if pending is None:
            self.skipped += 1
            if self._world.world_rank == 0:
                logger.warning("The save at step %d was skipped: a rank had no free staging slot.", step)
            self._times.begun(SaveTier.STORAGE, step, None)  # the next one is tried when it is due, not at each step
            return False
        if self._committer is not None:
            self._committer.expect(checkpoint)
        self._copies.take(pending, self._state["optimizer"])
        self.last_step = step
        self._times.begun(SaveTier.STORAGE, step, self._clock.mono_s() - started)
        return True

    def _wait_for_slots(self, step: int) -> None:
        """Every rank has a free slot, or waits for nothing more: also because the run is to stop, which the next step
        tells. Collective."""
        while True:
            if self._stager.num_free == 0 and self._uploads:
                self._uploads.wait(_LOOK_S, first_only=True)
                self._uploads.collect()
            if self._world.all_true(self._stager.num_free > 0 or not self._uploads):
                return
            if self._world.world_rank == 0:
                self._age.look(self._clock.mono_s(), self._log.newest(), step)
            if self._world.broadcast(bool(self._age.stop_reason)):
                return

    def _choose_slots(self, plan: SavePlan) -> Path:
        chosen = choose_folder(
            plan,
            slots_dirs(self._local_dir, self._key, self._config.staging_dir),
            num_slots=_NUM_SLOTS,
            ranks_of_node=len(self._ranks_of_node),
            first_of_node=self._ranks_of_node[0] == self._world.world_rank,
        )
        return attempt_dir(chosen, self._attempt)

    def _release_threads(self, *, away: bool) -> None:
        self._uploads.give_up(away=away)
        self._copies.close()
        self._uploads.close()
        if self._committer is not None:
            self._committer.close(_COMMIT_WAIT_S)
        self._stager.close()

    def _leave(self) -> None:
        self._control.close()
        self._world.leave()

    def _need_open(self, what: str) -> None:
        if self._closed:
            raise SessionError(f"Checkpointer.{what} was used after close(): close it after the last step.")
        self._need_restore(what)

    def _need_restore(self, what: str) -> None:
        if self._state is None:
            raise SessionError(
                f"Checkpointer.{what} was used before restore(model=..., optimizer=...): restore first, also on a "
                "fresh run, so that a restart goes on where this run stops."
            )
