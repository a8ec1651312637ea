"""A DCP storage reader over verified local files: mapped, not read, and no pickle of the checkpoint is executed."""

from __future__ import annotations

import io
import mmap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ray_goodput.checkpoint.image import envelope_of, view_of
from ray_goodput.checkpoint.metadata_file import read_metadata
from ray_goodput.checkpoint.objects import load_object
from ray_goodput.core.commit import METADATA_NAME
from ray_goodput.errors import CorruptCheckpointError


class VerifiedReader(StorageReader):
    """Reads through `open_object(name) -> Path`, which must give a local file whose checksum was verified.

    Works with `dcp.load(state, storage_reader=VerifiedReader(source.path))` and any load planner: object leaves are
    checked with `weights_only=True` before the planner sees them, unless told not to.
    """

    def __init__(self, open_object: Callable[[str], Path], *, weights_only: bool = True) -> None:
        super().__init__()
        self._weights_only = weights_only
        self._open_object = open_object
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._files: dict[str, memoryview] = {}
        self.bytes_read = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        self._files.clear()
        self._metadata = None
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata, read once.

        Raises:
            CorruptCheckpointError: it cannot be read.
        """
        if self._metadata is None:
            self._metadata = read_metadata(self._open_object(METADATA_NAME).read_bytes())
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self._load_id
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every item of the plan is in its place.

        Raises:
            CorruptCheckpointError: a record is not what the metadata says.
        """
        with torch.no_grad():
            for item in sorted(plan.items, key=self._place):
                if item.type == LoadItemType.BYTE_IO:
                    data = bytes(self.record_bytes(item.storage_index))
                    if self._weights_only:
                        load_object(item.storage_index.fqn, data)
                    planner.load_bytes(item, io.BytesIO(data))
                else:
                    self._read_tensor(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def record_bytes(self, index: MetadataIndex) -> memoryview:
        """The mapped bytes of one record."""
        info = self._info(index)
        data = self._file(info.relative_path)[info.offset : info.offset + info.length]
        if len(data) != info.length or info.offset < 0:
            raise CorruptCheckpointError(
                f"{index.fqn} should be bytes {info.offset} to {info.offset + info.length} of {info.relative_path}, "
                f"which ends before."
            )
        return data

    def _read_tensor(self, item: ReadItem, planner: LoadPlanner) -> None:
        stored = narrow_tensor_by_index(self._stored(item.storage_index), item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        if target.shape != stored.shape:
            raise CorruptCheckpointError(
                f"{item.storage_index.fqn}: {tuple(stored.shape)} was stored where {tuple(target.shape)} is needed."
            )
        target.copy_(stored)
        planner.commit_tensor(item, target)
        self.bytes_read += stored.nbytes

    def _stored(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor of a record, a view of the mapped file when the record is as this torch would write it."""
        data = self.record_bytes(index)
        expected = self._expected(index)
        if expected is not None:
            shape, dtype = expected
            envelope = envelope_of(shape, dtype)
            head = len(envelope.head)
            if (
                envelope.size_bytes
                and len(data) == envelope.length
                and data[:head] == envelope.head
                and data[head + envelope.size_bytes :] == envelope.tail
            ):
                return view_of(data, head, shape, dtype)
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # damaged records raise nearly anything
            raise CorruptCheckpointError(f"The record of {index.fqn} cannot be read ({error}).") from error
        if not isinstance(tensor, torch.Tensor):
            raise CorruptCheckpointError(f"The record of {index.fqn} holds a {type(tensor).__name__}, not a tensor.")
        return tensor

    def _expected(self, index: MetadataIndex) -> tuple[tuple[int, ...], torch.dtype] | None:
        entry = self.read_metadata().state_dict_metadata.get(index.fqn)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        hint = index.index
        if hint is not None and hint < len(entry.chunks) and entry.chunks[hint].offsets == index.offset:
            return tuple(entry.chunks[hint].sizes), entry.properties.dtype
        return next(((tuple(c.sizes), entry.properties.dtype) for c in entry.chunks if c.offsets == index.offset), None)

    def _place(self, item: ReadItem) -> tuple[str, int]:
        info = self._info(item.storage_index)
        return info.relative_path, info.offset

    def _info(self, index: MetadataIndex) -> Any:
        try:
            info = (self.read_metadata().storage_data or {})[index]
        except KeyError as error:
            raise CorruptCheckpointError(
                f"The .metadata does not say where {index.fqn} {index.offset} lies."
            ) from error
        if getattr(info, "transform_descriptors", None):
            raise CorruptCheckpointError(f"{index.fqn} was stored through {info.transform_descriptors}: not supported.")
        return info

    def _file(self, name: str) -> memoryview:
        view = self._files.get(name)
        if view is None:
            with self._open_object(name).open("rb") as file:
                # A private writable mapping: torch wants writable memory, nothing is ever written to it.
                size = file.seek(0, io.SEEK_END)
                data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) if size else bytearray()
            view = self._files[name] = memoryview(data)
        return view

    @property
    def checkpoint_id(self) -> str:
        return ""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
