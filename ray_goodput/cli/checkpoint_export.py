"""`ray-goodput checkpoints export`: one complete checkpoint in a form that other programs read.

Every object is verified against the commit record before it is used, and no pickle of the checkpoint is executed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray_goodput.checkpoint.folders import newest_first, problems_of, read_record
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import COMMIT_NAME, METADATA_NAME, CommitRecord
from ray_goodput.errors import CheckpointError, ConfigError, ObjectNotFoundError, StorageError
from ray_goodput.storage import ObjectStore, open_store
from ray_goodput.storage.disk import free_bytes
from ray_goodput.storage.local import local_error
from ray_goodput.storage.open import local_path
from ray_goodput.storage.scratch import Scratch

_MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. `size_bytes` is that of the tensors."""

    step: int
    folder: str
    destination: str
    to: str
    tensors: int
    size_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_checkpoint(
    spec: StoreSpec,
    destination: str,
    *,
    to: str,
    step: int | None = None,
    on_total: Callable[[int], None] = lambda size: None,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> Exported:
    """Write the newest complete checkpoint (or that of `step`, or the one whose folder `spec` is) to a local path.

    to: "safetensors" (tensors of the model, or all tensors where nothing is called `model`), "torch" (the whole nested
        state, for `torch.load(weights_only=True)`), "dcp" (a folder for stock `dcp.load`). Needs room for the
        checkpoint in the temporary folder, and memory for what is exported.

    What a killed export left beside the destination goes with the next export to the same folder.

    Raises:
        ConfigError: the destination exists, or is no local path.
        StorageError: it cannot be written: no room, or no permission.
        ObjectNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: its bytes were changed; nothing was written.
        CheckpointError: a tensor's type has no name in the target format.
    """
    if "://" in destination and not destination.startswith("file://"):
        raise ConfigError(f"Exports are written to local paths, not to {destination}: write one, then copy it.")
    target = local_path(destination)
    if os.path.lexists(target):
        raise _exists(target)
    store = open_store(spec)
    folder, record = _choose(store, step)
    on_total(record.size_bytes)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{target.parent} cannot be made a folder ({error.strerror}): give another path.") from error
    try:
        with Scratch.fresh(target.parent, ".export-") as scratch:
            objects = scratch.path / "objects"
            _download(store, folder, record, objects, on_bytes)
            tensors = _write(objects, to, target, scratch.path / "export")
    except FileExistsError as error:
        raise _exists(target) from error
    except OSError as error:
        raise local_error("write", target, error) from error
    return Exported(
        step=record.checkpoint.step,
        folder=folder or ".",
        destination=str(target),
        to=to,
        tensors=len(tensors),
        size_bytes=sum(tensors.values()),
    )


def _write(objects: Path, to: str, target: Path, written: Path) -> dict[str, int]:
    """`target` is there, whole; name -> bytes of the tensors in it. Nothing that came there meanwhile is replaced."""
    if to == "dcp":
        for name in (path.name for path in objects.iterdir() if path.name.startswith("rank-")):
            (objects / name).unlink()
        if os.path.lexists(target):
            raise FileExistsError(target)
        objects.rename(target)
        return _tensors(target)
    tensors = _write_torch(objects, written) if to == "torch" else _write_safetensors(objects, written)
    try:
        os.link(written, target)  # unlike a rename it replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        written.rename(target)
    return tensors


def _exists(target: Path) -> ConfigError:
    return ConfigError(f"{target} exists already: remove it, or give another path.")


def _choose(store: ObjectStore, step: int | None) -> tuple[str, CommitRecord]:
    try:
        record = read_record(store)
        if step in (None, record.checkpoint.step):
            return "", record
    except ObjectNotFoundError:
        pass
    for folder, record in newest_first(store):
        if (step is None or record.checkpoint.step == step) and not problems_of(store, folder, record, read=False):
            return folder, record
    which = "" if step is None else f" of step {step}"
    raise ObjectNotFoundError(f"There is no complete checkpoint{which} at {store.uri}: `checkpoints ls` shows why.")


def _download(store: ObjectStore, folder: str, record: CommitRecord, to: Path, on_bytes: Callable[[int], None]) -> None:
    from ray_goodput.checkpoint.sources import StoreSource

    source = StoreSource(record, store, folder, to)
    for entry in record.objects:
        source.path(entry.name)
        on_bytes(entry.size_bytes)
    for lock in to.glob(".lock-*"):
        lock.unlink()
    (to / COMMIT_NAME).unlink(missing_ok=True)


def _tensors(objects: Path) -> dict[str, int]:
    """Name -> bytes of every tensor."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from ray_goodput.checkpoint.metadata_file import read_metadata

    entries = read_metadata((objects / METADATA_NAME).read_bytes()).state_dict_metadata
    return {
        name: entry.size.numel() * entry.properties.dtype.itemsize
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _write_torch(objects: Path, path: Path) -> dict[str, int]:
    import torch
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from ray_goodput.checkpoint.verified import VerifiedReader

    state: dict[str, Any] = {}
    reader = VerifiedReader(lambda name: objects / name)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    try:
        torch.save(state, path)
    except RuntimeError as error:  # its file writer tells no errno
        free = free_bytes(path) / 2**20
        raise StorageError(f"{path.parent} has no room for the export, {free:,.0f} MiB are free ({error}).") from error
    return _tensors(objects)


def _write_safetensors(objects: Path, path: Path) -> dict[str, int]:
    """The format: length of the header (8 bytes, little endian), JSON header, the tensors' bytes back to back."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from ray_goodput.checkpoint.metadata_file import read_metadata
    from ray_goodput.checkpoint.verified import VerifiedReader

    metadata = read_metadata((objects / METADATA_NAME).read_bytes())
    sizes = _tensors(objects)
    ours = [name for name in sizes if name.startswith(f"{_MODEL}.")] or list(sizes)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors: dict[str, torch.Tensor] = {}
    end = 0
    for name in sorted(ours):
        entry: Any = metadata.state_dict_metadata[name]
        kind = _safetensors_names(torch).get(entry.properties.dtype)
        if kind is None:
            raise CheckpointError(f"{name} is {entry.properties.dtype}, which safetensors has no name for: use torch.")
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        offsets = [end, end + sizes[name]]
        header[name.removeprefix(f"{_MODEL}.")] = {"dtype": kind, "shape": list(entry.size), "data_offsets": offsets}
        end += sizes[name]
    _load_state_dict(tensors, storage_reader=VerifiedReader(lambda name: objects / name), no_dist=True)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return {name: sizes[name] for name in tensors}


def _safetensors_names(torch: Any) -> Mapping[Any, str]:
    return {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
        torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
        torch.bool: "BOOL", torch.complex64: "C64",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    }  # fmt: skip
