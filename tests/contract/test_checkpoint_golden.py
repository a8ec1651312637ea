"""Formats that outlive a release: a vault may finish what a worker of the release before left behind."""

from __future__ import annotations

import json
import random

from ray_goodput.checkpoint.rng import capture_rng, restore_rng
from ray_goodput.checkpoint.sidecar import slice_from_dict, slice_to_dict
from ray_goodput.core.commit import CheckpointId, Extent, StagedSlice

SIDECAR_V1 = """{"format": "ray_goodput.slot", "version": 1, "step": 12, "attempt": 3, "world_rank": 1, "world_size": 2,
"slot_path": "/dev/shm/x.slot", "extents": [{"name": "__1_0.distcp", "offset": 0, "size_bytes": 640},
{"name": "rank-00001.json", "offset": 640, "size_bytes": 2}], "structure_digest": "d1",
"cursors": {"train": {"samples_consumed": 5}}, "extra": {"k": 1}}"""

SLICE = StagedSlice(
    checkpoint=CheckpointId(12, 3),
    world_rank=1,
    world_size=2,
    slot_path="/dev/shm/x.slot",
    extents=(
        Extent(name="__1_0.distcp", offset=0, size_bytes=640),
        Extent(name="rank-00001.json", offset=640, size_bytes=2),
    ),
    structure_digest="d1",
    cursors={"train": {"samples_consumed": 5}},
    extra={"k": 1},
)


def test_version_1_of_a_slots_description_reads_and_writes_the_same() -> None:
    assert slice_from_dict(json.loads(SIDECAR_V1)) == SLICE
    assert slice_to_dict(SLICE) == json.loads(SIDECAR_V1)


def test_version_1_of_random_streams_has_these_fields_and_can_be_edited_as_json() -> None:
    before = capture_rng()
    body = json.loads(before)
    assert sorted(body) == ["cuda", "format", "numpy", "python", "torch", "version"]
    assert (body["format"], body["version"], body["numpy"]["kind"]) == ("ray_goodput.rng", 1, "MT19937")
    body["python"] = list(random.Random(4).getstate())
    restore_rng(json.dumps(body).encode())
    drawn = random.random()
    restore_rng(before)
    assert drawn == random.Random(4).random()
