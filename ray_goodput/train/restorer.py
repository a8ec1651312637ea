"""All ranks load the same checkpoint: the newest that verifies everywhere. Nobody goes on alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ray_goodput.actors.commits import CHECKPOINTS
from ray_goodput.actors.names import local_checkpoints_dir
from ray_goodput.checkpoint.reader import LoadReport, load_checkpoint
from ray_goodput.checkpoint.rng import derive_rng, restore_rng
from ray_goodput.checkpoint.sources import LocalFirstSource, StoreSource
from ray_goodput.core.commit import CommitRecord
from ray_goodput.core.cursor import DataCursor
from ray_goodput.errors import CorruptCheckpointError, GoodputError, ObjectNotFoundError
from ray_goodput.train.spec import TrainSpec
from ray_goodput.train.worker import WorkerContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Where the run goes on: after `step`, with `cursors` by dataset name; `tier` is "none" for a fresh run."""

    step: int
    tier: str
    cursors: Mapping[str, DataCursor]


def restore_newest(
    spec: TrainSpec,
    worker: WorkerContext,
    *,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    stateful: Mapping[str, Any],
    strict: bool,
) -> Restored:
    """Load the newest commit that all ranks can read and verify. Collective.

    Raises:
        StructureMismatchError: the checkpoint is of another model; on every rank.
        CorruptCheckpointError: there are checkpoints, and all are damaged: going on would mean starting from scratch,
        which
            only a person may decide.
        StorageError: the storage does not answer; the attempt may be tried again.
    """
    world = worker.world
    damaged: list[str] = []
    while True:
        record = world.broadcast(worker.coordinator.resume_point(worker.attempt) if world.world_rank == 0 else None)
        if record is None:
            break
        report, problem, raised = _load(
            spec, worker, record, model=model, optimizer=optimizer, stateful=stateful, strict=strict
        )
        problems = [p for p in world.gather(problem) if p is not None]
        if raised is not None:
            raise raised
        for other in problems:
            if not isinstance(other, CorruptCheckpointError | ObjectNotFoundError):
                raise other
        if not problems:
            assert report is not None
            return _resume(worker, record, report)
        reason = str(problems[0])
        damaged.append(f"{record.checkpoint.folder} ({reason})")
        if world.world_rank == 0:
            worker.coordinator.mark_bad(record.checkpoint, reason)
    if damaged:
        raise CorruptCheckpointError(
            f"All {len(damaged)} checkpoint(s) of this run are damaged: {'; '.join(damaged)}. Training does not start "
            "from scratch by itself: mend the storage, or choose a new RunConfig(name=...) to begin anew."
        )
    if world.world_rank == 0:
        worker.coordinator.resumed(worker.attempt, 0, "none")
    return Restored(step=0, tier="none", cursors={})


def _load(
    spec: TrainSpec, worker: WorkerContext, record: CommitRecord, **state: Any
) -> tuple[LoadReport | None, Exception | None, Exception | None]:
    """This rank's attempt to load `record`: a report, or what was wrong as other ranks may hear it, and the exception
    itself if it is none of ours."""
    folder = record.checkpoint.folder
    local = local_checkpoints_dir(worker.local_dir, spec.run.key) / folder
    storage = StoreSource(record, worker.store, f"{CHECKPOINTS}/{folder}", local)
    try:
        return load_checkpoint(LocalFirstSource(record, [local], storage), **state), None, None
    except GoodputError as error:
        return None, error, None
    except Exception as error:  # a user's load_state_dict may raise anything, which need not survive pickling
        # No GoodputError: those are never retried, and this may be a device without memory for a moment.
        told = RuntimeError(f"Rank {worker.world.world_rank} could not load {folder}: {type(error).__name__}: {error}")
        return None, told, error


def _resume(worker: WorkerContext, record: CommitRecord, report: LoadReport) -> Restored:
    world, step = worker.world, record.checkpoint.step
    tier = "local" if world.all_true(report.tier == "local") else "storage"
    same_world = record.world_size == world.world_size and report.rank_state is not None
    if same_world:
        assert report.rank_state is not None
        restore_rng(report.rank_state)
    else:
        derive_rng(int(record.extra.get("rng_seed", 0)), step, world.world_rank)
    if world.world_rank == 0:
        worker.coordinator.resumed(worker.attempt, step, tier)
        logger.info(
            "Resumed after step %d of attempt %d from %s on %d ranks (saved on %d); random streams %s.",
            step,
            record.checkpoint.attempt,
            tier,
            world.world_size,
            record.world_size,
            "restored" if same_world else "derived from (seed, step, rank), since the number of ranks changed",
        )
    cursors = {name: DataCursor.from_dict(cursor) for name, cursor in record.cursors.items()}
    return Restored(step=step, tier=tier, cursors=cursors)
