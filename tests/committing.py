"""A vault and a coordinator in a few lines, for tests of checkpoints: slots become a committed folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ray_goodput.core.commit import COMMIT_NAME, METADATA_NAME, CommitRecord, ObjectRecord, StagedSlice
from ray_goodput.storage.checksum import xxh3_128_hex


def put_slice(folder: Path, staged: StagedSlice) -> list[ObjectRecord]:
    """The objects of one slot are files of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    slot = Path(staged.slot_path).read_bytes()
    records = []
    for extent in staged.extents:
        data = slot[extent.offset : extent.offset + extent.size_bytes]
        assert len(data) == extent.size_bytes
        assert extent.name != METADATA_NAME or data == staged.metadata
        (folder / extent.name).write_bytes(data)
        records.append(ObjectRecord(name=extent.name, size_bytes=len(data), xxh3_128=xxh3_128_hex(data)))
    return records


def commit(folder: Path, slices: Sequence[StagedSlice], objects: Sequence[ObjectRecord]) -> CommitRecord:
    """The folder holds a valid commit of these slices."""
    assert len({(s.structure_digest, s.checkpoint, s.world_size) for s in slices}) == 1
    record = CommitRecord(
        run="test",
        checkpoint=slices[0].checkpoint,
        world_size=slices[0].world_size,
        structure_digest=slices[0].structure_digest,
        cursors=slices[0].cursors,
        extra=slices[0].extra,
        objects=tuple(objects),
        committed_at_s=0.0,
    )
    (folder / COMMIT_NAME).write_bytes(record.to_json(xxh3_128_hex))
    return CommitRecord.from_json((folder / COMMIT_NAME).read_bytes(), xxh3_128_hex)
