"""The way from a dataset to its batches: the same for one dataset and for a mixture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_goodput.core.cursor import DataCursor, check

if TYPE_CHECKING:
    import torch

    from ray_goodput.core.batches import LanePlaces
    from ray_goodput.core.placement import AnyOrder
    from ray_goodput.data.loader import BatchLoader, ShardSource
    from ray_goodput.data.mixture_feed import AnyFetchSpec
    from ray_goodput.data.mixture_manifest import AnyManifest
    from ray_goodput.data.transforms import OnError, Transform, WorkerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What there is one of for a batch, as `ShardedDataset` describes it."""

    global_batch_size: int
    drop_last: bool
    columns: Sequence[str] | None
    transform: Transform | None
    collate: Callable[[list[Any]], Mapping[str, Any]] | None
    workers: int
    worker_kind: WorkerKind
    on_error: OnError


class StreamedDataset(ABC):
    """What can be streamed in one order: `ShardedDataset` and `Mixture` say of what, and this how to get batches."""

    __slots__ = ()

    @abstractmethod
    def manifest(self) -> AnyManifest:
        """List the files and count their rows."""

    @abstractmethod
    def order(self, manifest: AnyManifest) -> AnyOrder:
        """The order of the samples of `manifest`."""

    @abstractmethod
    def fetch_spec(self, manifest: AnyManifest) -> AnyFetchSpec:
        """What any process needs to fetch the data shards."""

    @abstractmethod
    def batch_settings(self) -> BatchSettings:
        """How batches are made of the rows."""

    @abstractmethod
    def check_world(self, dp_world: int) -> None:
        """Raises ConfigError if `dp_world` data-parallel ranks cannot share a batch."""

    @abstractmethod
    def check_columns(self, manifest: AnyManifest) -> None:
        """Raises ConfigError if the data do not have the columns that batches are to hold, as far as can be known."""

    def cursor(self, manifest: AnyManifest) -> DataCursor:
        """The cursor before the first sample."""
        return DataCursor(0, manifest.digest, self.order(manifest).digest)

    def loader(
        self,
        *,
        dp_rank: int = 0,
        dp_world: int = 1,
        epochs: int | None = 1,
        cursor: DataCursor | None = None,
        cache_dir: str | Path | None = None,
        manifest: AnyManifest | None = None,
        device: torch.device | str | None = None,
    ) -> BatchLoader:
        """Batches of one rank without Ray: the cache and the prefetching run in this process.

        epochs: counted from the very first sample, also after a restart; None: no end.
        cursor: where to go on: `dataset.cursor(manifest).moved_to(batch.samples_end)` of the last batch trained on.
        cache_dir: node-local folder; default: below `RAY_GOODPUT_LOCAL_DIR`.
        manifest: as an earlier run made it; default: made now.

        Raises:
            DatasetMismatchError: `cursor` belongs to other data or another order.
            ConfigError, EmptyDatasetError, ShardReadError, CacheFullError, StorageError.
        """
        from ray_goodput.data.fetch import open_local_source

        manifest = self.manifest() if manifest is None else manifest
        self.check_world(dp_world)
        self.check_columns(manifest)
        order = self.order(manifest)
        if cursor is not None:
            check(cursor, DataCursor(0, manifest.digest, order.digest))
        start = 0 if cursor is None else cursor.samples_consumed
        source = open_local_source(
            self, manifest, order, start=start, epochs=epochs, dp_rank=dp_rank, dp_world=dp_world, cache_dir=cache_dir
        )
        return self.batch_loader(
            order, source, start=start, epochs=epochs, dp_rank=dp_rank, dp_world=dp_world, device=device
        )

    def batch_loader(
        self,
        order: AnyOrder,
        source: ShardSource,
        *,
        start: int,
        epochs: int | None,
        dp_rank: int,
        dp_world: int,
        lane_places: LanePlaces | None = None,
        device: torch.device | str | None = None,
    ) -> BatchLoader:
        """Batches of one rank over any source of data shards; the loader closes the source."""
        from ray_goodput.data.loader import BatchLoader

        made = self.batch_settings()
        return BatchLoader(
            order=order,
            source=source,
            start=start,
            epochs=epochs,
            dp_rank=dp_rank,
            dp_world=dp_world,
            lane_places=lane_places,
            device=device,
            global_batch_size=made.global_batch_size,
            drop_last=made.drop_last,
            columns=made.columns,
            transform=made.transform,
            collate=made.collate,
            workers=made.workers,
            worker_kind=made.worker_kind,
            on_error=made.on_error,
        )
