"""The restore of a run under Ray Train: what the coordinator chooses, read from the nearest place that has it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ray_goodput.actors.commits import CHECKPOINTS
from ray_goodput.actors.names import local_checkpoints_dir
from ray_goodput.checkpoint.agreed_restore import load_newest
from ray_goodput.checkpoint.peer_source import PeerSource
from ray_goodput.checkpoint.sources import CheckpointSource, LocalFirstSource, StoreSource
from ray_goodput.core.commit import CheckpointId, CommitRecord
from ray_goodput.core.cursor import DataCursor
from ray_goodput.core.near_copies import NearRecord
from ray_goodput.core.run_state import AttemptStart
from ray_goodput.gates import gate
from ray_goodput.train.lanes import LANE_PLACES
from ray_goodput.train.peers import RemotePeers, hold_leftovers
from ray_goodput.train.spec import TrainSpec
from ray_goodput.train.worker import WorkerContext

logger = logging.getLogger(__name__)

_TELL_TRIES = 3
_TELL_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Where the run goes on: after `step`, with `cursors` by dataset name; `tier` is "none" for a fresh run.

    near: the save that holds the state, if it lies on the nodes and is not committed.
    world_size: of the ranks that saved it, None for a fresh run.
    lane_places: by dataset, the `LaneAgreement.record()` of then.
    """

    step: int
    tier: str
    cursors: Mapping[str, DataCursor]
    near: CheckpointId | None = None
    world_size: int | None = None
    lane_places: Mapping[str, Sequence[int]] = field(default_factory=dict)


def restore_newest(
    spec: TrainSpec,
    worker: WorkerContext,
    *,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    stateful: Mapping[str, Any],
    strict: bool,
) -> Restored:
    """Load the newest save over all tiers that all ranks can read and verify. Collective.

    Raises:
        StructureMismatchError: the checkpoint is of another model; on every rank.
        CorruptCheckpointError: there are checkpoints, and all are damaged: going on would mean starting from scratch,
            which only a person may decide.
        StorageError: the storage does not answer; the attempt may be tried again.
    """

    def open_source(record: CommitRecord) -> CheckpointSource:
        folder = record.checkpoint.folder
        gate("restore", rank=worker.world.world_rank, step=record.checkpoint.step, attempt=worker.attempt)
        worker.vault.keep.remote(record.checkpoint)
        local = local_checkpoints_dir(worker.local_dir, spec.run.key) / folder
        storage = StoreSource(record, worker.store, f"{CHECKPOINTS}/{folder}", local)
        peers = RemotePeers(spec.run.key, worker.coordinator, record.checkpoint)
        return LocalFirstSource(record, [local], PeerSource(record, peers, local, storage))

    hold_leftovers(worker)
    loaded = load_newest(
        worker.world,
        choose=lambda: _choose(worker),
        mark_bad=lambda checkpoint, reason: worker.coordinator.mark_bad(checkpoint, reason),
        open_source=open_source,
        pass_over=lambda checkpoint, reason: worker.coordinator.pass_over(checkpoint, reason),
        model=model,
        optimizer=optimizer,
        stateful=stateful,
        strict=strict,
    )
    if loaded is None:
        restored = Restored(step=0, tier="none", cursors={})
    else:
        cursors = {name: DataCursor.from_dict(cursor) for name, cursor in loaded.record.cursors.items()}
        restored = Restored(
            step=loaded.record.checkpoint.step,
            tier=loaded.tier,
            cursors=cursors,
            near=loaded.record.checkpoint if isinstance(loaded.record, NearRecord) else None,
            world_size=loaded.record.world_size,
            lane_places=loaded.record.extra.get(LANE_PLACES, {}),
        )
    if worker.world.world_rank == 0:
        _tell(worker, restored)
    return restored


def _choose(worker: WorkerContext) -> CommitRecord | None:
    """What the coordinator chooses; from now on rank 0's heartbeats say it."""
    record = worker.coordinator.resume_point(worker.attempt)
    worker.orders.start = AttemptStart(near=record.checkpoint if isinstance(record, NearRecord) else None)
    return record


def _tell(worker: WorkerContext, restored: Restored) -> None:
    """The coordinator knows where the attempt began, if it can be told: the ledger's loss, not training's."""
    for left in reversed(range(_TELL_TRIES)):
        try:
            worker.coordinator.resumed(worker.attempt, restored.step, restored.tier, restored.near)
            return
        except Exception as error:  # the books never end an attempt, whatever goes wrong with them
            logger.warning("Attempt %d's start could not be noted, %d tries left: %s", worker.attempt, left, error)
        if left:
            time.sleep(_TELL_PAUSE_S)
