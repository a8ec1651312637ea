"""`rg.StorageWriter`: plain `dcp.save` and `dcp.async_save` into a folder that is complete or no checkpoint at all.

Each rank's file is written to local disk, checksummed, and uploaded; the coordinator writes `.metadata` and then, last,
`COMMIT.json` with the checksum of every object. Stock `dcp.load` reads the folder too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ray_goodput.checkpoint.objects import load_object
from ray_goodput.config import StoreSpec, environment
from ray_goodput.core.commit import COMMIT_NAME, METADATA_NAME, CheckpointId, CommitRecord, ObjectRecord
from ray_goodput.errors import CheckpointError, ConfigError, CorruptCheckpointError, StorageError
from ray_goodput.storage import ObjectStore, open_store
from ray_goodput.storage.checksum import checksum_file, xxh3_128_hex
from ray_goodput.storage.disk import free_bytes
from ray_goodput.storage.scratch import Scratch

logger = logging.getLogger(__name__)

_OBJECTS = MetadataIndex("ray_goodput.objects")  # the entry that carries a rank's object records to the coordinator
_TORCH_CANNOT_WRITE = ("file write failed", "unexpected pos", "PytorchStreamWriter")
_STEP = re.compile(r"step[-_=]?(\d+)", re.IGNORECASE)


class StorageWriter(dcp_storage.StorageWriter):
    """Writes one checkpoint into the folder `uri`: `dcp.save(state, storage_writer=rg.StorageWriter(uri))`.

    uri: `s3://bucket/prefix`, any other URL fsspec knows, or a path; `checkpoint_id` of `dcp.save` replaces it.
    storage_options: in the spelling of s3fs (`key`, `secret`, `endpoint_url`, ...).
    overwrite: whether a folder that holds a complete checkpoint may be written to. It holds none meanwhile.
    weights_only: refuse to save objects that could not be loaded without running code from the checkpoint.
    local_dir: folder on local disk with room for a rank's share, gone after the save (what a killed process left: with
        the next save). Default: `RAY_GOODPUT_LOCAL_DIR`.

    Picklable, so that `async_save` may run in a process; nothing is kept open between saves.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        weights_only: bool = True,
        local_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._spec = StoreSpec(uri=os.fspath(uri), options=dict(storage_options or {}))
        self._overwrite = overwrite
        self._weights_only = weights_only
        self._local_dir = Path(local_dir) if local_dir is not None else environment().local_dir / "dcp"
        self._save_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        return self._spec.uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._spec = replace(self._spec, uri=os.fspath(checkpoint_id))
        self._save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ConfigError("StorageWriter needs dcp.save(use_collectives=True): a checkpoint has one commit record.")

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._spec.uri, save_id=self._save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """At the coordinator, before any rank writes: what an interrupted save left in the folder is removed.

        Raises:
            CheckpointError: the folder holds a complete checkpoint and `overwrite` is False.
        """
        store = open_store(self._spec)
        names = [info.key for info in store.list() if "/" not in info.key]
        if COMMIT_NAME in names and not self._overwrite:
            raise CheckpointError(
                f"{store.uri} holds a complete checkpoint, and would hold none while it is written again: give each "
                "checkpoint a folder of its own, or pass StorageWriter(..., overwrite=True)."
            )
        store.delete([COMMIT_NAME] if COMMIT_NAME in names else [])
        store.delete([name for name in names if name == METADATA_NAME or name.endswith(".distcp")])
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's items are objects in storage.

        Raises:
            CheckpointError: an object leaf could not be loaded again with `weights_only=True`.
            StorageError: the storage refuses or keeps failing.
        """
        if self._weights_only:
            _check_objects(plan, planner)
        with self._scratch() as scratch:
            results = self._write_local(plan, planner, scratch.path)
            records = self._upload(scratch.path, plan.storage_data)
        for result in results:
            result.storage_data.relative_path = self._object_name(plan.storage_data, result.storage_data.relative_path)
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(index=_OBJECTS, size_in_bytes=0, storage_data=records)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """At the coordinator, when every rank has written: the folder becomes a checkpoint.

        Raises:
            CheckpointError: another process saved into the same folder meanwhile.
        """
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {r.index: r.storage_data for part in results for r in part if r.index != _OBJECTS}
        objects = [record for part in results for r in part if r.index == _OBJECTS for record in r.storage_data]
        data = pickle.dumps(metadata, protocol=4)
        ours = {entry.name for entry in objects}
        objects.append(ObjectRecord(name=METADATA_NAME, size_bytes=len(data), xxh3_128=xxh3_128_hex(data)))
        folder = self._spec.uri.rstrip("/").rpartition("/")[2]
        record = CommitRecord(
            run="",
            checkpoint=CheckpointId.parse(folder) or CheckpointId(_step_in(folder), 0),
            world_size=len(results),
            structure_digest=_digest(metadata),
            cursors={},
            objects=tuple(sorted(objects, key=lambda o: o.name)),
            committed_at_s=time.time(),
            extra={"written_by": "StorageWriter"},
        )
        store, commit = open_store(self._spec), record.to_json(xxh3_128_hex)
        alone = _is_alone(store, ours)
        if not (alone and store.create(METADATA_NAME, data) and store.create(COMMIT_NAME, commit)):
            store.delete(ours)
            raise CheckpointError(
                f"Another process saved into {store.uri} at the same time: what this one wrote is no checkpoint. Give "
                "each save a folder of its own, and look whether an older start of the job is still running."
            )

    def _scratch(self) -> Scratch:
        try:
            return Scratch.fresh(self._local_dir, "save-")
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: Exception) -> StorageError:
        return StorageError(
            f"This rank's share of the checkpoint cannot be written to {self._local_dir} ({error}), where "
            f"{free_bytes(self._local_dir) / 2**20:,.0f} MiB are free: make room there, or give "
            "StorageWriter(local_dir=...) or RAY_GOODPUT_LOCAL_DIR a folder on a disk that has it."
        )

    def _write_local(self, plan: SavePlan, planner: SavePlanner, folder: Path) -> list[WriteResult]:
        inner = FileSystemWriter(folder, sync_files=False)  # a torn local file does not outlive the save
        inner.set_up_storage_writer(False)
        (placed,) = inner.prepare_global_plan([replace(plan, storage_data=None)])
        try:
            written: Any = inner.write_data(placed, planner)
            return written.wait()
        except OSError as error:
            raise self._no_room(error) from error
        except RuntimeError as error:  # torch's file writer tells no errno
            if not any(words in str(error) for words in _TORCH_CANNOT_WRITE):
                raise
            raise self._no_room(error) from error

    def _upload(self, folder: Path, world_rank: int) -> list[ObjectRecord]:
        store, records = open_store(self._spec), []
        for path in sorted(folder.iterdir()):
            name = self._object_name(world_rank, path.name)
            store.upload_file(name, path)
            records.append(ObjectRecord(name=name, size_bytes=path.stat().st_size, xxh3_128=checksum_file(path)))
        return records

    def _object_name(self, world_rank: int, local_name: str) -> str:
        """`__0_<n>.distcp` as the local writer named it, for this rank, and for this save: another process that saves
        into the same folder must not change what we wrote."""
        number = local_name.removeprefix("__0_").removesuffix(".distcp")
        return f"__{world_rank}_{number}-{self._save_id[:8]}.distcp"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))


def _is_alone(store: ObjectStore, ours: set[str]) -> bool:
    """Nobody has committed in this folder, or removed what we wrote, since we began."""
    found = {info.key for info in store.list()}
    return ours <= found and not found & {METADATA_NAME, COMMIT_NAME}


def _check_objects(plan: SavePlan, planner: SavePlanner) -> None:
    for item in plan.items:
        if item.type is not WriteItemType.BYTE_IO:
            continue
        data: Any = planner.resolve_data(item)
        try:
            load_object(item.index.fqn, data.getvalue())
        except CorruptCheckpointError as error:
            raise CheckpointError(
                f"{item.index.fqn} could not be loaded again without running code from the checkpoint: save numbers, "
                "strings, lists, dictionaries and tensors, or pass weights_only=False to StorageWriter and "
                "StorageReader."
            ) from error


def _step_in(folder: str) -> int:
    """The number after "step" in a folder's name, 0 without one; for people who list checkpoints."""
    match = _STEP.search(folder)
    return int(match[1]) if match else 0


def _digest(metadata: Metadata) -> str:
    """Over names, shapes and dtypes, not over the world that wrote them."""
    lines = [
        (name, tuple(e.size), str(e.properties.dtype)) if isinstance(e, TensorStorageMetadata) else (name,)
        for name, e in sorted(metadata.state_dict_metadata.items())
    ]
    return hashlib.blake2b(repr(lines).encode(), digest_size=16).hexdigest()
