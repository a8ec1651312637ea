"""Values of a save as it travels from a rank's slot to a commit, and the commit record itself.

Pure values: no I/O here. The record's format is version 1; `tests/contract` holds a golden file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import CorruptCheckpointError, StorageError

COMMIT_NAME = "COMMIT.json"
METADATA_NAME = ".metadata"
_FOLDER = re.compile(r"step-(\d{10,})-(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Which checkpoint: ordered by step, then by attempt (a later attempt's copy of a step is newer)."""

    step: int
    attempt: int

    @property
    def made(self) -> tuple[int, int]:
        """Sorts saves by when they were made: after a rollback an older attempt's higher steps are the older ones."""
        return self.attempt, self.step

    @property
    def folder(self) -> str:
        return f"step-{self.step:010d}-{self.attempt}"

    @classmethod
    def parse(cls, folder: str) -> CheckpointId | None:
        """The id a folder name stands for, or None for any other name."""
        match = _FOLDER.fullmatch(folder)
        return cls(int(match[1]), int(match[2])) if match else None


def rank_state_name(world_rank: int) -> str:
    """Object that holds one rank's own state (random number streams), as JSON."""
    return f"rank-{world_rank:05d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One future object inside a slot file: bytes [offset, offset + size_bytes)."""

    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSlice:
    """One rank's share of a save, lying complete in a slot file; what a rank tells its node's vault.

    `metadata` is set by rank 0 only: the bytes of DCP's `.metadata` for the whole world.
    `cursors` and `structure_digest` are equal on all ranks; they, and rank 0's `extra`, end up in the commit record.
    `tier`: how far the save is to be brought; below STORAGE it is never committed.
    """

    checkpoint: CheckpointId
    world_rank: int
    world_size: int
    slot_path: str
    extents: tuple[Extent, ...]
    structure_digest: str
    cursors: Mapping[str, Mapping[str, Any]]
    metadata: bytes | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tier: SaveTier = SaveTier.STORAGE

    @property
    def life(self) -> str:
        """Random, one for all ranks of an attempt's life: attempt numbers that could not be noted may come twice."""
        return str(self.extra.get("life", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRecord:
    """One object of a checkpoint: name inside its folder, exact size, checksum (hex, algorithm of the record)."""

    name: str
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedSlice:
    """A rank's share whose objects are in storage, or lie on a node; what a vault tells the coordinator.

    objects: without `.metadata`, which the coordinator writes when all slices are there.
    """

    slice: StagedSlice
    objects: tuple[ObjectRecord, ...]
    node_id: str
    upload_s: float

    def all_objects(self, checksum: Callable[[bytes], str]) -> tuple[ObjectRecord, ...]:
        """Its objects, and rank 0's `.metadata`."""
        data = self.slice.metadata
        if data is None:
            return self.objects
        return (*self.objects, ObjectRecord(name=METADATA_NAME, size_bytes=len(data), xxh3_128=checksum(data)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """The content of `COMMIT.json`: a folder without a valid one is no checkpoint.

    cursors: dataset name -> `DataCursor.to_dict()`.
    objects: every object of the folder but the record itself, sorted by name.
    extra: more that is equal on all ranks: `rng_seed`; `run_id` and `life`, whose slices they are; `lane_places` of
        datasets whose lanes are not in ascending sequence.
    """

    VERSION: ClassVar[int] = 1

    run: str
    checkpoint: CheckpointId
    world_size: int
    structure_digest: str
    cursors: Mapping[str, Mapping[str, Any]]
    objects: tuple[ObjectRecord, ...]
    committed_at_s: float
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def size_bytes(self) -> int:
        return sum(o.size_bytes for o in self.objects)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": "ray_goodput.commit",
            "version": self.VERSION,
            "run": self.run,
            "step": self.checkpoint.step,
            "attempt": self.checkpoint.attempt,
            "world_size": self.world_size,
            "structure_digest": self.structure_digest,
            "cursors": {name: dict(cursor) for name, cursor in sorted(self.cursors.items())},
            "checksum_algorithm": "xxh3_128",
            "objects": [
                {"name": o.name, "size_bytes": o.size_bytes, "xxh3_128": o.xxh3_128}
                for o in sorted(self.objects, key=lambda o: o.name)
            ],
            "committed_at_s": self.committed_at_s,
            "extra": dict(self.extra),
        }

    def to_json(self, checksum: Callable[[bytes], str]) -> bytes:
        """The record's bytes, with a checksum over themselves as the last field; `checksum` gives hex."""
        body = self.to_dict()
        body["record_xxh3_128"] = checksum(_canonical(body))
        return json.dumps(body, indent=1, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes, checksum: Callable[[bytes], str]) -> CommitRecord:
        """Read a record back.

        Raises:
            CorruptCheckpointError: not JSON, another format, a newer version, or the checksum does not match.
        """
        try:
            body = json.loads(data)
            if body["format"] != "ray_goodput.commit":
                raise CorruptCheckpointError(f"{COMMIT_NAME} is not a commit record but {body['format']!r}.")
            if body["version"] != cls.VERSION:
                raise CorruptCheckpointError(
                    f"{COMMIT_NAME} has format version {body['version']}, this release reads {cls.VERSION}: "
                    "use the release that wrote it."
                )
            expected = body.pop("record_xxh3_128")
            if checksum(_canonical(body)) != expected:
                raise CorruptCheckpointError(f"{COMMIT_NAME} does not match its own checksum.")
            return cls(
                run=body["run"],
                checkpoint=CheckpointId(int(body["step"]), int(body["attempt"])),
                world_size=int(body["world_size"]),
                structure_digest=body["structure_digest"],
                cursors=body["cursors"],
                objects=tuple(ObjectRecord(**o) for o in body["objects"]),
                committed_at_s=float(body["committed_at_s"]),
                extra=body["extra"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{COMMIT_NAME} cannot be read ({error!r}).") from error


def assemble_record(
    run: str, landed: Mapping[int, LandedSlice], checksum: Callable[[bytes], str], *, committed_at_s: float = 0.0
) -> dict[str, Any]:
    """Fields of the `CommitRecord` of a save, from the slices of all its ranks.

    Raises:
        StorageError: they do not make one save: no rank sent metadata, or the structures differ.
    """
    slices = [landed[rank].slice for rank in sorted(landed)]
    first = slices[0]
    if all(s.metadata is None for s in slices):
        raise StorageError(f"No rank sent DCP metadata for {first.checkpoint.folder}; it cannot be committed.")
    digests = {s.structure_digest for s in slices}
    if len(digests) > 1:
        raise StorageError(f"Ranks disagree on the structure of {first.checkpoint.folder} ({len(digests)} digests).")
    if len({s.life for s in slices}) > 1:
        raise StorageError(f"The slices of {first.checkpoint.folder} are of different saves; it cannot be committed.")
    objects = [o for part in landed.values() for o in part.all_objects(checksum)]
    return {
        "run": run,
        "checkpoint": first.checkpoint,
        "world_size": first.world_size,
        "structure_digest": first.structure_digest,
        "cursors": first.cursors,
        "objects": tuple(sorted(objects, key=lambda o: o.name)),
        "committed_at_s": committed_at_s,
        "extra": first.extra,
    }


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
