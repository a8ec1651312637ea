"""How well a dataset's order shuffles it, measured on some of its data shards."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from ray_goodput.core.shuffle import ShuffleVerdict, judge, sortedness_of
from ray_goodput.data.cache import NodeCache

if TYPE_CHECKING:
    from ray_goodput.data.dataset import ShardedDataset
    from ray_goodput.data.mixture_manifest import AnyManifest

logger = logging.getLogger(__name__)

_ROWS = 2000  # of each shard that is looked at
_compute: Any = pyarrow.compute  # functions made at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleReport:
    """sortedness: of each column that could be measured, the share of its variance that lies between data shards.
    verdict: of the most sorted one; its `why` is the sentence to read."""

    sortedness: Mapping[str, float]
    verdict: ShuffleVerdict


def supposed(dataset: ShardedDataset, num_shards: int) -> ShuffleVerdict:
    """The verdict from the order alone, for data that are sorted by shard altogether: the worst case."""
    return judge(
        num_shards=num_shards,
        lanes=dataset.num_lanes,
        window=dataset.window,
        batch=dataset.global_batch_size,
        sortedness=1.0,
    )


def measure(dataset: ShardedDataset, manifest: AnyManifest, *, num_shards: int) -> ShuffleReport:
    """A report from `num_shards` data shards, spread evenly over the manifest, each fetched whole.

    Raises:
        ShardReadError, ObjectChangedError: one of them cannot be read.
    """
    with_rows = np.flatnonzero(manifest.rows)
    chosen = with_rows[np.unique(np.linspace(0, len(with_rows) - 1, num_shards).astype(np.int64))]
    columns: dict[str, list[NDArray[Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="ray-goodput-") as folder:
        fetcher = dataset.fetch_spec(manifest).fetcher(NodeCache(Path(folder)).open())
        for data_shard in chosen.tolist():
            table = fetcher.load(data_shard)
            table = table.take(np.unique(np.linspace(0, table.num_rows - 1, _ROWS).astype(np.int64)))
            for name in table.column_names:
                values = _comparable(table[name])
                if values is not None:
                    columns.setdefault(name, []).append(values)
    sortedness = {name: sortedness_of(values) for name, values in columns.items() if _alike(values)}
    worst = max(sortedness, key=lambda name: sortedness[name], default=None)
    verdict = judge(
        num_shards=len(with_rows),
        lanes=dataset.num_lanes,
        window=dataset.window,
        batch=dataset.global_batch_size,
        sortedness=sortedness[worst] if worst is not None else 0.0,
        column=worst or "no column",
    )
    logger.log(logging.WARNING if verdict.too_small else logging.INFO, "%s: %s", dataset.title, verdict.why)
    return ShuffleReport(sortedness=sortedness, verdict=verdict)


def _comparable(column: pa.ChunkedArray) -> NDArray[Any] | None:
    """Numbers and short texts as they are; of long texts, bytes and lists, the length. None: of no use."""
    kind = column.type
    column = column.drop_null()
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column.to_numpy()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        values = column.to_numpy().astype(np.str_)
        if len(np.unique(values)) <= len(values) // 4:
            return values
        return _compute.utf8_length(column).to_numpy()
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return _compute.binary_length(column).to_numpy()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _compute.list_value_length(column).to_numpy()
    return None


def _alike(values: list[NDArray[Any]]) -> bool:
    """Not texts in one shard and their lengths in another."""
    return len({part.dtype.kind == "U" for part in values}) == 1
