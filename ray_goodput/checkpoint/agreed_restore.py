"""All ranks load the same checkpoint: the newest that verifies everywhere. Nobody goes on alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray_goodput.checkpoint.ranks import Ranks
from ray_goodput.checkpoint.reader import LoadReport, load_checkpoint
from ray_goodput.checkpoint.rng import derive_rng, restore_rng
from ray_goodput.checkpoint.sources import CheckpointSource, farthest
from ray_goodput.core.commit import CheckpointId, CommitRecord
from ray_goodput.core.near_copies import NearRecord
from ray_goodput.errors import CorruptCheckpointError, GoodputError, NoCopyLeftError, ObjectNotFoundError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The commit that is now the live state; `tier` is where the farthest rank had to read, `passed_over` newer saves
    with what was wrong with them."""

    record: CommitRecord
    tier: str
    passed_over: tuple[str, ...] = ()


def load_newest(
    ranks: Ranks,
    *,
    choose: Callable[[], CommitRecord | None],
    mark_bad: Callable[[CheckpointId, str], None],
    open_source: Callable[[CommitRecord], CheckpointSource],
    pass_over: Callable[[CheckpointId, str], bool] = lambda checkpoint, reason: False,
    **state: Any,
) -> Loaded | None:
    """Load the newest commit that all ranks can read and verify, with its random streams; None if there is no commit.

    choose: rank 0's; the newest commit that is not marked bad.
    mark_bad: rank 0's; takes a damaged one out of the choice.
    pass_over: rank 0's; asked about a save whose copies on the nodes are damaged while the storage, which may have it
        whole, does not answer. True: it is out of the choice, and what is chosen next lies on the nodes.
    state: for `load_checkpoint`.

    Raises:
        StructureMismatchError: the checkpoint is of another model; on every rank.
        CorruptCheckpointError: there are checkpoints, and all are damaged: going on would mean starting from scratch,
            which only a person may decide.
        StorageError: the storage does not answer.
        Exception: what a user's own `load_state_dict` raised; on other ranks a RuntimeError that tells of it.
    """
    damaged: list[str] = []
    passed_over: list[str] = []
    while True:
        record: CommitRecord | None = ranks.broadcast(choose() if ranks.world_rank == 0 else None)
        if record is None:
            break
        report, problem, raised = _load(ranks, record, open_source, state)
        problems = [p for p in ranks.gather(problem) if p is not None]
        if raised is not None:
            raise raised
        for other in problems:
            if not isinstance(other, CorruptCheckpointError | ObjectNotFoundError | NoCopyLeftError):
                raise other
        if not problems:
            assert report is not None
            tier = farthest(ranks.gather(report.tier))
            loaded = Loaded(record=record, tier=tier, passed_over=tuple(passed_over))
            _restore_streams(ranks, loaded, report)
            return loaded
        reason = str(problems[0])
        near = isinstance(record, NearRecord)
        away = next((p for p in problems if isinstance(p, NoCopyLeftError)), None)
        if away is not None:  # it may be whole in storage: a commit is waited for, of mere copies an older save may do
            left_out = near and ranks.world_rank == 0 and pass_over(record.checkpoint, reason)
            if not ranks.broadcast(left_out):
                raise away
        elif ranks.world_rank == 0:
            mark_bad(record.checkpoint, reason)
        passed_over.append(f"{record.checkpoint.folder} ({reason})")
        if not near:  # of copies on nodes nobody was promised that they last
            damaged.append(passed_over[-1])
    if damaged:
        raise CorruptCheckpointError(
            f"All {len(damaged)} checkpoint(s) of this run are damaged: {'; '.join(damaged)}. Training does not start "
            "from scratch by itself: mend the storage, or choose a new name for the run to begin anew."
        )
    return None


def _load(
    ranks: Ranks, record: CommitRecord, open_source: Callable[[CommitRecord], CheckpointSource], state: dict[str, Any]
) -> tuple[LoadReport | None, Exception | None, Exception | None]:
    """This rank's attempt to load `record`: a report, or what was wrong as other ranks may hear it, and the exception
    itself if it is none of ours."""
    try:
        report = load_checkpoint(open_source(record), **state, world_rank=ranks.world_rank, world_size=ranks.world_size)
        return report, None, None
    except GoodputError as error:
        return None, error, None
    except Exception as error:  # a user's load_state_dict may raise anything, which need not survive pickling
        # No GoodputError: those are never retried, and this may be a device without memory for a moment.
        folder = record.checkpoint.folder
        told = RuntimeError(f"Rank {ranks.world_rank} could not load {folder}: {type(error).__name__}: {error}")
        return None, told, error


def _restore_streams(ranks: Ranks, loaded: Loaded, report: LoadReport) -> None:
    record = loaded.record
    same_world = record.world_size == ranks.world_size and report.rank_state is not None
    step = record.checkpoint.step
    if same_world:
        assert report.rank_state is not None
        restore_rng(report.rank_state)
    else:
        derive_rng(int(record.extra.get("rng_seed", 0)), step, ranks.world_rank)
    if ranks.world_rank == 0:
        logger.info(
            "Resumed after step %d of attempt %d from %s on %d ranks (saved on %d); random streams %s.%s",
            step,
            record.checkpoint.attempt,
            loaded.tier,
            ranks.world_size,
            record.world_size,
            "restored" if same_world else "derived from (seed, step, rank), since the number of ranks changed",
            f" Passed over: {'; '.join(loaded.passed_over)}." if loaded.passed_over else "",
        )
