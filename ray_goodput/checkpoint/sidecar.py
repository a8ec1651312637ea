"""Sidecars (`<slot>.json`): what lies in a slot, and that it lies there complete. For vaults too, so without torch."""

from __future__ import annotations

import base64
import json
import logging
import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_goodput.core.commit import METADATA_NAME, CheckpointId, Extent, LandedSlice, ObjectRecord, StagedSlice
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import CorruptCheckpointError

logger = logging.getLogger(__name__)

_SUFFIX = ".slot"
_SIDECAR_VERSION = 1


def new_slot_path(folder: Path, world_rank: int) -> Path:
    """A path that no other slot has."""
    return folder / f"rank-{world_rank:05d}-{uuid.uuid4().hex[:12]}{_SUFFIX}"


def remove_slot(path: str | os.PathLike[str]) -> None:
    """The slot and its sidecar do not exist afterwards; the sidecar goes first, since it vouches for the slot."""
    for gone in (sidecar_path(path), Path(path)):
        gone.unlink(missing_ok=True)


def sidecar_path(slot_path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(slot_path)}.json")


def slice_to_dict(staged: StagedSlice) -> dict[str, Any]:
    """JSON-able form of a staged slice. The metadata bytes are not in it: they lie in the slot, as an extent."""
    body = {
        "format": "ray_goodput.slot",
        "version": _SIDECAR_VERSION,
        "step": staged.checkpoint.step,
        "attempt": staged.checkpoint.attempt,
        "world_rank": staged.world_rank,
        "world_size": staged.world_size,
        "slot_path": staged.slot_path,
        "extents": [{"name": e.name, "offset": e.offset, "size_bytes": e.size_bytes} for e in staged.extents],
        "structure_digest": staged.structure_digest,
        "cursors": {name: dict(cursor) for name, cursor in staged.cursors.items()},
        "extra": dict(staged.extra),
    }
    if staged.tier is not SaveTier.STORAGE:  # absent in files of releases that knew only this one
        body["tier"] = staged.tier.label
    return body


def slice_from_dict(body: dict[str, Any]) -> StagedSlice:
    """The slice `slice_to_dict` described, without metadata bytes.

    Raises:
        CorruptCheckpointError: not such a description, or of another version.
    """
    try:
        if body["format"] != "ray_goodput.slot" or body["version"] != _SIDECAR_VERSION:
            raise ValueError(f"format {body['format']!r}, version {body['version']!r}")
        return StagedSlice(
            checkpoint=CheckpointId(int(body["step"]), int(body["attempt"])),
            world_rank=int(body["world_rank"]),
            world_size=int(body["world_size"]),
            slot_path=body["slot_path"],
            extents=tuple(Extent(**extent) for extent in body["extents"]),
            structure_digest=body["structure_digest"],
            cursors=body["cursors"],
            extra=body["extra"],
            tier=SaveTier.parse(body.get("tier", SaveTier.STORAGE.label)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"The description of a staging slot cannot be read ({error!r}).") from error


def landed_to_dict(landed: LandedSlice) -> dict[str, Any]:
    """JSON-able form of a slice that has landed somewhere, with its metadata."""
    metadata = landed.slice.metadata
    return {
        "slice": slice_to_dict(landed.slice),
        "metadata": None if metadata is None else base64.b64encode(metadata).decode(),
        "objects": [{"name": o.name, "size_bytes": o.size_bytes, "xxh3_128": o.xxh3_128} for o in landed.objects],
        "node_id": landed.node_id,
        "upload_s": landed.upload_s,
    }


def landed_from_dict(body: dict[str, Any]) -> LandedSlice:
    """The slice `landed_to_dict` described.

    Raises:
        CorruptCheckpointError: not such a description.
    """
    try:
        metadata = None if body["metadata"] is None else base64.b64decode(body["metadata"], validate=True)
        return LandedSlice(
            slice=replace(slice_from_dict(body["slice"]), metadata=metadata),
            objects=tuple(ObjectRecord(**entry) for entry in body["objects"]),
            node_id=body["node_id"],
            upload_s=float(body["upload_s"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"A note about a landed slice cannot be read ({error!r}).") from error


def write_sidecar(staged: StagedSlice) -> None:
    """From now on anybody who finds the slot knows what lies in it."""
    path = sidecar_path(staged.slot_path)
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(slice_to_dict(staged)))
    tmp.replace(path)


def read_sidecar(path: str | os.PathLike[str]) -> StagedSlice:
    """The slice a sidecar describes, with the metadata bytes read from the slot.

    Raises:
        CorruptCheckpointError: the sidecar cannot be read, or the slot is missing or shorter than it says.
    """
    try:
        staged = slice_from_dict(json.loads(Path(path).read_bytes()))
        end = max((e.offset + e.size_bytes for e in staged.extents), default=0)
        with open(staged.slot_path, "rb") as slot:
            if os.fstat(slot.fileno()).st_size < end:
                raise CorruptCheckpointError(f"The staging slot {staged.slot_path} is shorter than {end} bytes.")
            for extent in staged.extents:
                if extent.name == METADATA_NAME:
                    slot.seek(extent.offset)
                    staged = replace(staged, metadata=slot.read(extent.size_bytes))
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(f"The staging slot described by {path} cannot be read ({error}).") from error
    return staged


def staged_in(folder: str | os.PathLike[str]) -> Iterator[StagedSlice]:
    """Every complete slice in a folder, newest last; what cannot be read is logged and left out."""
    found = []
    for path in sorted(Path(folder).glob(f"*{_SUFFIX}")):
        sidecar = sidecar_path(path)
        try:
            if sidecar.exists():
                found.append(read_sidecar(sidecar))
        except CorruptCheckpointError as error:
            logger.warning("%s It is left out.", error)
    yield from sorted(found, key=lambda staged: (staged.checkpoint, staged.world_rank))
