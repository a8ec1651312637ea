"""How long a save took, from what ranks and vaults tell at different times."""

from __future__ import annotations

from ray_goodput.actors.save_times import SaveTime, SaveTimes
from ray_goodput.core.commit import CheckpointId, LandedSlice, StagedSlice


def landed(step: int, world_rank: int, upload_s: float) -> LandedSlice:
    part = StagedSlice(
        checkpoint=CheckpointId(step, 1),
        world_rank=world_rank,
        world_size=2,
        slot_path="",
        extents=(),
        structure_digest="d",
        cursors={},
        metadata=None,
    )
    return LandedSlice(slice=part, objects=(), node_id="n", upload_s=upload_s)


def test_latency_is_that_of_the_slowest_rank_and_includes_waiting_for_the_commit() -> None:
    times, save = SaveTimes(), CheckpointId(10, 1)
    times.stalled(save, 0.4)
    times.landed(landed(10, 0, 3.0), 100.0)
    times.landed(landed(10, 1, 5.0), 102.0)
    times.landed(landed(10, 0, 3.0), 109.0)  # told again
    assert times.committed(save, 110.0) == SaveTime(stall_s=0.4, latency_s=13.0, upload_s=5.0)
    assert times.committed(save, 120.0) == SaveTime(), "told once"


def test_saves_that_overlap_are_kept_apart_and_those_that_never_commit_are_forgotten() -> None:
    times = SaveTimes()
    for step in range(1000):
        times.stalled(CheckpointId(step, 1), float(step))
        times.landed(landed(step, 0, 1.0), float(step))
    assert len(times._open) < 100
    assert times.committed(CheckpointId(998, 1), 1000.0) == SaveTime(stall_s=998.0, latency_s=3.0, upload_s=1.0)
    assert times.committed(CheckpointId(999, 1), 1000.0) == SaveTime(stall_s=999.0, latency_s=2.0, upload_s=1.0)
    assert times.committed(CheckpointId(1, 1), 1000.0) == SaveTime()
