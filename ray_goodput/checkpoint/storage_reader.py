"""`rg.StorageReader`: plain `dcp.load` from a committed folder, each file verified before a tensor is touched."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from ray_goodput.checkpoint.folders import read_record
from ray_goodput.checkpoint.sources import CheckpointSource, LocalFirstSource, StoreSource
from ray_goodput.checkpoint.verified import VerifiedReader
from ray_goodput.config import StoreSpec, environment
from ray_goodput.errors import StorageError
from ray_goodput.storage import open_store
from ray_goodput.storage.local import LocalStore
from ray_goodput.storage.scratch import Scratch, sweep

logger = logging.getLogger(__name__)

_FILES_AT_ONCE = 4
_PREFIX = "load-"


class StorageReader(VerifiedReader):
    """Reads the complete checkpoint in the folder `uri`: `dcp.load(state, storage_reader=rg.StorageReader(uri))`.

    uri: as for `StorageWriter`; `checkpoint_id` of `dcp.load` replaces it. Checkpoints of a `GoodputTrainer` or a
        `Checkpointer` are read as well.
    storage_options: in the spelling of s3fs.
    weights_only: refuse objects that could run code when they are loaded.
    local_dir: folder on local disk with room for what this node reads. Default: `RAY_GOODPUT_LOCAL_DIR`. Processes of a
        node share it: each object is downloaded once, and removed when the last of them has read (of killed ones: by
        the next that reads).

    `dcp.load` raises what this reader found wrong inside a `CheckpointException`: ObjectNotFoundError (no complete
    checkpoint, or an object is gone) or CorruptCheckpointError (bytes were changed), before any tensor changes.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        weights_only: bool = True,
        local_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(self._path, weights_only=weights_only)
        self._spec = StoreSpec(uri=os.fspath(uri), options=dict(storage_options or {}))
        self._local_dir = Path(local_dir) if local_dir is not None else environment().local_dir / "dcp"
        self._source: CheckpointSource | None = None
        self._cache: Scratch | None = None

    @property
    def checkpoint_id(self) -> str:
        return self._spec.uri

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset()
        self._close()
        if checkpoint_id:
            self._spec = replace(self._spec, uri=os.fspath(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata.

        Raises:
            ObjectNotFoundError: the folder holds no complete checkpoint.
            CorruptCheckpointError: the commit record or the metadata was changed.
        """
        if self._source is None:
            self._source = self._open()
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every item of the plan is in its place; all files it needs were verified before the first tensor changed."""
        try:
            files = sorted({self._info(item.storage_index).relative_path for item in plan.items})
            with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="dcp-load") as pool:
                list(pool.map(self._path, files))
            return super().read_data(plan, planner)
        finally:
            self.reset()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def _path(self, name: str) -> Path:
        assert self._source is not None  # read_metadata comes first
        return self._source.path(name)

    def _open(self) -> CheckpointSource:
        store = open_store(self._spec)
        record = read_record(store)
        if isinstance(store, LocalStore):
            return LocalFirstSource(record, [Path(store.uri)])
        # A folder that was written again is another checkpoint, with files of the same names.
        key = hashlib.blake2b(repr((store.uri, record)).encode(), digest_size=8).hexdigest()
        sweep(self._local_dir, _PREFIX)
        try:
            self._cache = Scratch(self._local_dir / f"{_PREFIX}{key}")
        except OSError as error:
            raise StorageError(
                f"{self._local_dir} cannot hold what is read from {store.uri} ({error}): give "
                "StorageReader(local_dir=...) or RAY_GOODPUT_LOCAL_DIR a folder with room for it."
            ) from error
        return StoreSource(record, store, "", self._cache.path)

    def _close(self) -> None:
        self._source = None
        if self._cache is not None:
            self._cache.close()
            self._cache = None
