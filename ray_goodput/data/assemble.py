"""From stream indices to a batch: locate, group by data shard, take rows, put them back in slot order, collate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ray_goodput.core.batches import BatchPlan, BatchRange, LanePlaces, batch_weight, local_slots
from ray_goodput.core.mixture import MixtureOrder
from ray_goodput.core.order import Int64Array, StreamOrder
from ray_goodput.data.batch import Batch
from ray_goodput.data.columns import ShardColumns
from ray_goodput.data.open_shards import OpenShards
from ray_goodput.data.transforms import SampleTransforms, Skipped
from ray_goodput.errors import DataError

logger = logging.getLogger(__name__)

# Locating costs per lane touched, so it is done for many batches at once; this many slots take about 10 ms.
_LOCATE_SLOTS = 16_384

# Samples left out are told one by one at first, then now and then.
_SAID, _SAID_EVERY = 10, 1000

Collate = Callable[[list[Any]], Mapping[str, Any]]


class LocatedBatch(NamedTuple):
    """A rank's share of a global batch: its stream indices (slots), and the data shard and row of each."""

    range: BatchRange
    slots: Int64Array
    data_shards: Int64Array
    rows: Int64Array


def located_batches(
    order: StreamOrder,
    plan: BatchPlan,
    start: int,
    *,
    dp_rank: int,
    dp_world: int,
    lane_places: LanePlaces | None = None,
) -> Iterator[LocatedBatch]:
    """A rank's shares of the global batches from stream position `start` to the plan's end."""
    position, at_once = start, 1
    places = None if lane_places is None else np.asarray(lane_places, dtype=np.int64)
    while True:
        ranges: list[BatchRange] = []
        while len(ranges) < at_once and (batch := plan.at(position)) is not None:
            ranges.append(batch)
            position = batch.samples_end
        if not ranges:
            return
        slots = [
            local_slots(order, r.start, r.stop, dp_rank=dp_rank, dp_world=dp_world, lane_places=places) for r in ranges
        ]
        data_shards, rows = order.locate(np.concatenate(slots))
        cuts = np.cumsum([len(part) for part in slots])[:-1]
        yield from map(LocatedBatch, ranges, slots, np.split(data_shards, cuts), np.split(rows, cuts))
        at_once = max(1, _LOCATE_SLOTS // max(1, *map(len, slots)))  # the first batch comes alone, hence sooner


@dataclass(slots=True)
class _Segment:
    """Rows `rows` of one data shard; they are entries [start, stop) of the batch in data shard order."""

    columns: ShardColumns
    rows: Int64Array
    start: int
    stop: int


class BatchBuilder:
    """Builds batches from the tables of data shards; keeps the most recently used ones open. For one thread.

    max_open: of each dataset of a mixture, or of the only one; see `OpenShards`.
    """

    def __init__(
        self,
        order: StreamOrder,
        table: Callable[[int], pa.Table],
        *,
        columns: Sequence[str] | None,
        transforms: SampleTransforms | None,
        collate: Collate | None,
        dp_world: int,
        max_open: Sequence[int],
        describe: Callable[[int], str] = "Data shard {}".format,
        misses: Callable[[], int] = int,
    ) -> None:
        self._order = order
        self._misses = misses
        self._describe = describe
        self._table = table
        self._columns = columns
        self._transforms = transforms
        self._collate = collate
        self._dp_world = dp_world
        self._mixture = order if isinstance(order, MixtureOrder) else None
        firsts = (0,) if self._mixture is None else self._mixture.first_shards[:-1].tolist()
        self._open = OpenShards(max_open, firsts)
        self._in_stream = True
        self._last_good: Any = None  # a result of `transform`, to pad with
        self.num_skipped = 0
        self.network_s = self.disk_s = self.decode_s = 0.0

    def build(self, located: LocatedBatch) -> Batch:
        """The batch of this rank. A rank without samples gets a padding sample: weight 0, and no sample id.

        Raises: ShardReadError, ObjectChangedError, or whatever `transform` and `collate` raise.
        """
        return self.begin(located)()

    def begin(self, located: LocatedBatch) -> Callable[[], Batch]:
        """The batch's rows are read and on their way through `transform`; calling what is returned gives the batch.

        Both may raise, as `build` does.
        """
        began, waited_s = time.perf_counter(), self.network_s
        finish = self._begin(located)
        self.disk_s += time.perf_counter() - began - (self.network_s - waited_s)

        def finished() -> Batch:
            began = time.perf_counter()
            batch = finish()
            self.decode_s += time.perf_counter() - began
            return batch

        return finished

    def _begin(self, located: LocatedBatch) -> Callable[[], Batch]:
        batch, slots, data_shards, rows = located
        if not len(slots):
            # The batch's first sample, once more, counting nothing. Not an empty batch: the mean over no samples is
            # NaN, and NaN times weight 0 would spoil everybody's gradient.
            slots = np.array([batch.start], dtype=np.int64)
            data_shards, rows = self._order.locate(slots)
        ids = self._order.sample_ids(data_shards, rows)
        # Which is used last decides which is closed. One dataset's lanes change their windows in one batch, and before
        # it any order does; those of a mixture do not.
        self._in_stream = self._open.make_way(data_shards) or self._mixture is not None
        if self._transforms is None and self._collate is None:
            gathered = self._gather(slots, data_shards, rows)
            self._open.close_some()
            return lambda: self._batch(located, {n: _as_column(v) for n, v in gathered.items()}, ids)
        samples = self._samples(slots, data_shards, rows)
        self._open.close_some()
        if self._transforms is None:
            return lambda: self._batch(located, self._columns_of(samples), ids)
        if self._mixture is not None:
            samples = list(zip(self._mixture.member_of(data_shards).tolist(), samples, strict=True))
        epochs = self._order.passes(slots)
        results = self._transforms.begin(list(zip(epochs.tolist(), ids.tolist(), strict=True)), samples)
        return lambda: self._transformed(located, results(), ids)

    def _transformed(self, located: LocatedBatch, results: list[Any], ids: Int64Array) -> Batch:
        """The batch of what `transform` made, without the samples that it could not make."""
        kept = [i for i, result in enumerate(results) if not isinstance(result, Skipped)]
        if len(kept) == len(results):
            self._last_good = results[-1]
            return self._batch(located, self._columns_of(results), ids)
        num_skipped = len(results) - len(kept) if len(located.slots) else 0  # padding is no sample
        for i, result in enumerate(results):
            if num_skipped and isinstance(result, Skipped):
                self._count_skipped(int(ids[i]), result)
        if not kept:
            if self._last_good is None:
                raise DataError(
                    f"transform= failed for each of the first {len(results)} samples, the last time with "
                    f'{results[-1].reason}. With on_error="fail" the error says where.'
                )
            return self._batch(located, self._columns_of([self._last_good]), ids[:0], num_skipped)
        self._last_good = results[kept[-1]]
        return self._batch(located, self._columns_of([results[i] for i in kept]), ids[kept], num_skipped)

    def _batch(self, located: LocatedBatch, columns: dict[str, Any], ids: Int64Array, num_skipped: int = 0) -> Batch:
        batch = located.range
        if not len(located.slots):
            ids = ids[:0]
        return Batch(
            columns,
            sample_ids=torch.from_numpy(ids),
            weight=batch_weight(len(ids), batch.size, self._dp_world),
            index=batch.index,
            samples_end=batch.samples_end,
            num_skipped=num_skipped,
            members=self._members(ids),
        )

    def _members(self, ids: Int64Array) -> torch.Tensor | None:
        if self._mixture is None:
            return None
        return torch.from_numpy(np.searchsorted(self._mixture.first_ids, ids, side="right") - 1)

    def _count_skipped(self, sample_id: int, skipped: Skipped) -> None:
        self.num_skipped += 1
        if self.num_skipped <= _SAID or self.num_skipped % _SAID_EVERY == 0:
            logger.warning("sample %d is left out (%d so far): %s", sample_id, self.num_skipped, skipped.reason)

    def _open_shard(self, data_shard: int) -> ShardColumns:
        columns = ShardColumns(self._opened(data_shard), self._columns, title=self._describe(data_shard))
        self._open.add(data_shard, columns)
        return columns

    def _samples(self, slots: Int64Array, data_shards: Int64Array, rows: Int64Array) -> list[Any]:
        """Each slot's row as a dict; datasets of a mixture may have columns of their own."""
        members = np.zeros(len(rows), np.int64) if self._mixture is None else self._mixture.member_of(data_shards)
        samples: list[Any] = [None] * len(rows)
        for member in np.unique(members).tolist():
            mine = np.flatnonzero(members == member)
            gathered = self._gather(slots[mine], data_shards[mine], rows[mine])
            for i, slot in enumerate(mine.tolist()):
                samples[slot] = {name: values[i] for name, values in gathered.items()}
        return samples

    def _opened(self, data_shard: int) -> pa.Table:
        began, misses = time.perf_counter(), self._misses()
        table = self._table(data_shard)
        if self._misses() > misses:
            self.network_s += time.perf_counter() - began
        return table

    def _gather(
        self, slots: Int64Array, data_shards: Int64Array, rows: Int64Array
    ) -> dict[str, NDArray[Any] | list[Any]]:
        """Each column's values in slot order."""
        by_shard = np.argsort(data_shards, kind="stable")
        shards, sorted_rows = data_shards[by_shard], rows[by_shard]
        bounds = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
        uses: Sequence[int] = range(len(bounds) - 1)
        if self._in_stream:  # what comes last in the stream is used last
            uses = np.argsort(np.maximum.reduceat(slots[by_shard], bounds[:-1])).tolist()
        firsts, get = shards[bounds[:-1]].tolist(), self._open.get
        columns = {shard: get(shard) or self._open_shard(shard) for shard in map(firsts.__getitem__, uses)}
        segments = [
            _Segment(columns[shard], sorted_rows[a:b], a, b)
            for shard, (a, b) in zip(firsts, pairwise(bounds), strict=True)
        ]
        back = np.empty_like(by_shard)
        back[by_shard] = np.arange(len(by_shard))
        return {name: _take(name, segments, back) for name in segments[0].columns.names}

    def _columns_of(self, samples: list[Any]) -> dict[str, Any]:
        columns = stack_samples(samples) if self._collate is None else self._collate(samples)
        if not isinstance(columns, Mapping):
            raise DataError(
                f"collate= returned a {type(columns).__name__}: return a mapping from column name to values."
            )
        return dict(columns)


def stack_samples(samples: Sequence[Any]) -> dict[str, Any]:
    """Samples (mappings with the same keys) as columns: numbers and equal shapes are stacked, all else is a list."""
    first = samples[0]
    if not isinstance(first, Mapping):
        raise DataError(f"transform= returned a {type(first).__name__}: return a dict from column name to value.")
    columns: dict[str, Any] = {}
    for sample in samples:
        if sample.keys() != first.keys():
            raise DataError(
                f"transform= returned the columns {sorted(first)} for one sample and {sorted(sample)} for another: "
                "return the same for all."
            )
    for name in first:
        columns[name] = _stack([sample[name] for sample in samples])
    return columns


def _stack(values: list[Any]) -> torch.Tensor | list[Any]:
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.stack(values) if len({value.shape for value in values}) == 1 else values
    if all(isinstance(value, np.ndarray | np.generic | bool | int | float) for value in values):
        arrays = [np.asarray(value) for value in values]
        if arrays[0].dtype.kind in "biufc" and len({array.shape for array in arrays}) == 1:
            return torch.from_numpy(np.stack(arrays))
    return _as_column(values)


def _take(name: str, segments: list[_Segment], back: NDArray[np.intp]) -> NDArray[Any] | list[Any]:
    first = segments[0].columns.dense.get(name)
    if first is not None and all(_alike(first, segment.columns.dense.get(name)) for segment in segments):
        taken = np.empty((len(back), *first.shape[1:]), first.dtype)
        for segment in segments:
            # "clip" lets numpy write straight into `out`; rows are in range by construction.
            values = segment.columns.dense[name]
            np.take(values, segment.rows, axis=0, out=taken[segment.start : segment.stop], mode="clip")
        return taken[back]
    # One list column may be of equal lengths in some data shards only: then it is ragged as a whole.
    values = [value for segment in segments for value in segment.columns.take_list(name, segment.rows)]
    return [values[i] for i in back.tolist()]


def _alike(first: NDArray[Any], other: NDArray[Any] | None) -> bool:
    return other is not None and other.shape[1:] == first.shape[1:] and other.dtype == first.dtype


def _as_column(values: NDArray[Any] | list[Any]) -> torch.Tensor | list[Any]:
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values)
    return [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in values]
