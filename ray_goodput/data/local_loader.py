"""The way from a dataset to its loader: the same for one dataset and for a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ray_goodput.core.cursor import DataCursor, check

if TYPE_CHECKING:
    import torch

    from ray_goodput.core.placement import AnyOrder
    from ray_goodput.data.dataset import ShardedDataset
    from ray_goodput.data.loader import BatchLoader, ShardSource
    from ray_goodput.data.mixture import AnyDataset
    from ray_goodput.data.mixture_manifest import AnyManifest
    from ray_goodput.data.transforms import Transform


def open_loader(
    dataset: AnyDataset,
    manifest: AnyManifest,
    *,
    dp_rank: int,
    dp_world: int,
    epochs: int | None,
    cursor: DataCursor | None,
    cache_dir: str | Path | None,
    device: torch.device | str | None,
) -> BatchLoader:
    """Batches of one rank, with the cache and the prefetching in this process.

    Raises:
        DatasetMismatchError: `cursor` belongs to other data or another order.
        ConfigError, CacheFullError.
    """
    from ray_goodput.data.fetch import open_local_source

    dataset.check_world(dp_world)
    dataset.check_columns(manifest)
    order = dataset.order(manifest)
    if cursor is not None:
        check(cursor, DataCursor(0, manifest.digest, order.digest))
    start = 0 if cursor is None else cursor.samples_consumed
    source = open_local_source(
        dataset, manifest, order, start=start, epochs=epochs, dp_rank=dp_rank, dp_world=dp_world, cache_dir=cache_dir
    )
    return dataset.batch_loader(
        order, source, start=start, epochs=epochs, dp_rank=dp_rank, dp_world=dp_world, device=device
    )


def make_loader(
    dataset: AnyDataset,
    order: AnyOrder,
    source: ShardSource,
    *,
    columns: Sequence[str] | None,
    transform: Transform | None,
    shared: ShardedDataset,
    start: int,
    epochs: int | None,
    dp_rank: int,
    dp_world: int,
    device: torch.device | str | None,
) -> BatchLoader:
    """A `BatchLoader`; `shared` has the settings that there is one of for a batch."""
    from ray_goodput.data.loader import BatchLoader

    return BatchLoader(
        order=order,
        columns=columns,
        global_batch_size=dataset.global_batch_size,
        source=source,
        start=start,
        epochs=epochs,
        dp_rank=dp_rank,
        dp_world=dp_world,
        drop_last=dataset.drop_last,
        transform=transform,
        collate=shared.collate,
        workers=shared.workers,
        worker_kind=shared.worker_kind,
        on_error=shared.on_error,
        device=device,
    )
