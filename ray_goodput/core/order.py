"""The order of training samples, version 1: a pure function of (shard rows, seed, lanes, window).

This is a *format*. A cursor saved today must mean the same sample in ten years, so nothing here may change the sequence
(golden vectors: `tests/contract/test_order_golden.py`). Definition, for shards s with rows[s], N = sum of rows:

1. Shards are permuted, key (SHARDS, seed). Their rows, concatenated in that order, are cut into L contiguous lanes; the
   first N mod L lanes are one row longer. What a lane cuts out of a shard is a *part*; no part is empty.
2. In epoch e, the parts of lane l are permuted, key (PARTS, seed, e, l), and taken W at a time: a *window*.
3. The rows of window w are permuted, key (ROWS, seed, e, l, w). The lane's sequence is its windows in turn.
4. Stream index t of an epoch is offset t div L of lane t mod L. Global index T = e * N + t runs over endless epochs.

A permutation of n is the stable argsort of the first n raw 64-bit outputs of Philox-4x64-10, keyed by
`SeedSequence(words).generate_state(2)`. NumPy promises raw bit-generator streams and SeedSequence for good, but not
the methods of `Generator` (`permutation`, `shuffle` changed before), so those are not used. Each use has a domain tag,
and every integer is written as two 32-bit words, so that no two uses can share a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ray_goodput.errors import ConfigError, EmptyDatasetError

ORDER_VERSION = 1
MAX_SEED = 2**64 - 1

TAG_SHARDS = 1
TAG_PARTS = 2
TAG_ROWS = 3
TAG_TRANSFORM = 4
TAG_LOADER = 5
TAG_FILES = 6
TAG_MIXTURE = 7

_RADIX_SORT_FROM = 4096
# Places of a window's permutation that are looked up without sorting it, the first time it is needed, and rows from
# which on that is much sooner done: a third of the time at a million.
_MAX_PEEK, _PEEK_FROM = 8, 1 << 18

Int64Array = NDArray[np.int64]


class Sample(NamedTuple):
    """One row of one data shard."""

    data_shard: int
    row: int


@dataclass(frozen=True, slots=True)
class LaneEpoch:
    """The parts of one lane in the order of one epoch; part i holds rows [low[i], low[i] + size[i]) of shards[i].

    starts: offset in the lane at which part i begins, with the lane's length at the end (num_parts + 1).
    window_starts: the same per window (num_windows + 1).
    """

    shards: Int64Array
    low: Int64Array
    starts: Int64Array
    window_starts: Int64Array


def philox(tag: int, *numbers: int) -> np.random.Philox:
    """The raw bit stream of one use of randomness; `numbers` are in [0, 2**64)."""
    words = [tag]
    for number in numbers:
        words += [number & 0xFFFFFFFF, number >> 32]
    return np.random.Philox(key=np.random.SeedSequence(words).generate_state(2, np.uint64))


def permutation(n: int, tag: int, *numbers: int) -> NDArray[np.intp]:
    """A permutation of range(n), for ever the same for the same arguments. See the module's text for the definition."""
    return _stable_argsort(philox(tag, *numbers).random_raw(n))


def permuted_at(places: NDArray[np.intp], n: int, tag: int, *numbers: int) -> NDArray[np.intp]:
    """`permutation(n, ...)[places]` for a few places (sorted), without sorting the rest.

    The low bits of the keys give way to the index, so that selecting among them says whose key it is. Right unless two
    keys agree in all the bits that are left (odds 2e-5 at 80,000 rows, 3 % at a million), which shows.
    """
    keys = philox(tag, *numbers).random_raw(n)
    if n >= _RADIX_SORT_FROM:
        bits = np.uint64((n - 1).bit_length())
        mask = (np.uint64(1) << bits) - np.uint64(1)
        packed = (keys & ~mask) | np.arange(n, dtype=np.uint64)
        chosen = np.partition(packed, np.unique(places))[places]
        packed >>= bits
        if all(np.count_nonzero(packed == high) == 1 for high in np.unique(chosen >> bits)):
            return (chosen & mask).astype(np.intp)
    return _stable_argsort(keys)[places]


def _stable_argsort(keys: NDArray[np.uint64]) -> NDArray[np.intp]:
    """`np.argsort(keys, kind="stable")`, in a third of the time at 100,000: numpy sorts 16 bits by counting, so the
    upper half is sorted as two such digits, and the few keys that agree in it (116 pairs at a million) by the whole."""
    if len(keys) < _RADIX_SORT_FROM:
        return np.argsort(keys, kind="stable")
    upper = (keys >> np.uint64(32)).astype(np.uint32)
    order = np.argsort(upper.astype(np.uint16), kind="stable")
    order = order[np.argsort((upper >> np.uint32(16)).astype(np.uint16)[order], kind="stable")]
    upper = upper[order]
    alike = np.flatnonzero(upper[1:] == upper[:-1])  # places that the next one agrees with
    gaps = np.diff(alike) > 1
    firsts, lasts = alike[np.append(True, gaps)[: len(alike)]], alike[np.append(gaps, True)[: len(alike)]]
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        run = order[first : last + 2]
        order[first : last + 2] = run[np.argsort(keys[run], kind="stable")]
    return order


class StreamOrder(Protocol):
    """What batches are drawn from: one dataset's `SampleOrder`, or a `core.mixture.MixtureOrder` of several."""

    seed: int
    lanes: int
    window: int
    num_shards: int
    num_samples: int

    @property
    def digest(self) -> str: ...

    def locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]: ...

    def sample_ids(self, data_shards: Int64Array, rows: Int64Array) -> Int64Array: ...

    def lane_of(self, indices: Int64Array) -> Int64Array: ...

    def passes(self, indices: Int64Array) -> Int64Array: ...


class SampleOrder:
    """The sample at every position of the endless stream. Immutable but for caches that never change a result.

    Memory: one permutation of the current window per lane that is read, 4 bytes a row. Seeking costs the keys of one
    window and a sort of them, which waits in a large one until it is read on.
    """

    def __init__(self, shard_rows: Sequence[int] | Int64Array, *, seed: int, lanes: int, window: int) -> None:
        """shard_rows: rows of each data shard, in the manifest's order. Raises ConfigError, EmptyDatasetError."""
        rows = np.array(shard_rows, dtype=np.int64).reshape(-1)
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"seed={seed}: the seed of the sample order must be an integer from 0 to 2**64 - 1.")
        if lanes < 1 or window < 1:
            raise ConfigError(f"lanes={lanes}, window={window}: both must be at least 1.")
        if (rows < 0).any():
            raise ConfigError(f"Data shard {int(np.argmin(rows))} has a negative number of rows ({int(rows.min())}).")
        self.seed = int(seed)
        self.lanes = int(lanes)
        self.window = int(window)
        self.num_shards = len(rows)
        self.num_samples = int(rows.sum())
        if self.num_samples == 0:
            raise EmptyDatasetError(f"The {len(rows)} data shards have no rows: there is nothing to order.")
        self._shard_starts = np.concatenate([[0], np.cumsum(rows)])
        order = permutation(len(rows), TAG_SHARDS, self.seed)
        order = order[rows[order] > 0]
        self._permuted = order.astype(np.int64)
        self._ends = np.cumsum(rows[order])
        self._begins = self._ends - rows[order]
        self._base, self._longer = divmod(self.num_samples, self.lanes)
        # One entry a lane: in a stream each lane moves forward, so the last one used is the one needed next. Racing
        # threads may compute an entry twice; they then agree.
        self._lane_epochs: dict[int, tuple[int, LaneEpoch]] = {}
        self._row_orders: dict[int, tuple[tuple[int, int], NDArray[np.integer]]] = {}
        self._peeked: dict[int, tuple[int, int]] = {}

    def digest_inputs(self) -> dict[str, int]:
        """What fixes the sequence besides the shards; equal inputs and equal manifests give equal orders."""
        return {"version": ORDER_VERSION, "seed": self.seed, "lanes": self.lanes, "window": self.window}

    @property
    def digest(self) -> str:
        """`digest_inputs` as one line; kept readable so that a mismatch can say which of them differs."""
        return " ".join(f"{name}={value}" for name, value in self.digest_inputs().items())

    def lane_length(self, lane: int) -> int:
        """Samples of an epoch that lane `lane` holds."""
        return self._base + (1 if lane < self._longer else 0)

    def sample_ids(self, data_shards: Int64Array, rows: Int64Array) -> Int64Array:
        """Position of each row in the unpermuted concatenation of all shards; the same at every seed."""
        return self._shard_starts[data_shards] + rows

    def lane_of(self, indices: Int64Array) -> Int64Array:
        """The lane each global stream index is read from."""
        return indices % self.num_samples % self.lanes

    def passes(self, indices: Int64Array) -> Int64Array:
        """The epoch of each global stream index."""
        return indices // self.num_samples

    def at(self, index: int) -> Sample:
        """The sample at global stream index `index` (>= 0)."""
        shards, rows = self.locate(np.array([index], dtype=np.int64))
        return Sample(int(shards[0]), int(rows[0]))

    def locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Data shard and row in it of each global stream index; any order, duplicates allowed.

        Fastest on many indices at once (the cost is per lane and window touched, plus a little per index).
        """
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and int(indices.min()) < 0:
            raise ValueError(f"A stream index cannot be negative, got {int(indices.min())}.")
        epochs, within = np.divmod(indices, self.num_samples)
        offsets, lanes = np.divmod(within, self.lanes)
        data_shards = np.empty_like(indices)
        rows = np.empty_like(indices)
        by_group = np.lexsort((offsets, epochs, lanes)) if len(indices) > 1 else np.zeros(len(indices), np.intp)
        lanes, epochs, offsets = lanes[by_group], epochs[by_group], offsets[by_group]
        cuts = np.flatnonzero((np.diff(lanes) != 0) | (np.diff(epochs) != 0)) + 1
        bounds = [0, *cuts.tolist(), len(indices)] if len(indices) else [0]
        for start, stop in pairwise(bounds):
            lane, epoch = int(lanes[start]), int(epochs[start])
            shards_, rows_ = self._locate_in_lane(epoch, lane, offsets[start:stop])
            data_shards[by_group[start:stop]] = shards_
            rows[by_group[start:stop]] = rows_
        return data_shards, rows

    def lane_epoch(self, epoch: int, lane: int) -> LaneEpoch:
        """The parts of a lane in the order of an epoch. Does not touch rows."""
        cached = self._lane_epochs.get(lane)
        if cached and cached[0] == epoch:
            return cached[1]
        begin = lane * self._base + min(lane, self._longer)
        end = begin + self.lane_length(lane)
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left")) + 1 if end > begin else first
        order = permutation(last - first, TAG_PARTS, self.seed, epoch, lane)
        sizes = self._ends[first:last] - self._begins[first:last]
        low = np.zeros(last - first, np.int64)
        if last > first:  # the lane cuts the first of its shards and the last one, and has the others whole
            cut = begin - int(self._begins[first])
            sizes[0] -= cut
            sizes[-1] -= int(self._ends[last - 1]) - end
            low[order == 0] = cut
        starts = np.zeros(last - first + 1, np.int64)
        np.cumsum(sizes[order], out=starts[1:])
        window_starts = starts[:-1][:: self.window]
        view = LaneEpoch(
            shards=self._permuted[first:last][order],
            low=low,
            starts=starts,
            window_starts=np.append(window_starts, starts[-1]),
        )
        self._lane_epochs[lane] = (epoch, view)
        return view

    def _locate_in_lane(self, epoch: int, lane: int, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Shards and rows at sorted `offsets` of a lane."""
        view = self.lane_epoch(epoch, lane)
        windows = np.searchsorted(view.window_starts, offsets, side="right") - 1
        cuts = np.flatnonzero(np.diff(windows)) + 1
        shuffled = np.empty_like(offsets)
        bounds = [0, *cuts.tolist(), len(offsets)]
        for start, stop in pairwise(bounds):
            window = int(windows[start])
            begin = int(view.window_starts[window])
            num_rows = int(view.window_starts[window + 1]) - begin
            shuffled[start:stop] = self._rows_at(epoch, lane, window, num_rows, offsets[start:stop] - begin) + begin
        parts = np.searchsorted(view.starts, shuffled, side="right") - 1
        return view.shards[parts], view.low[parts] + shuffled - view.starts[parts]

    def _rows_at(self, epoch: int, lane: int, window: int, num_rows: int, places: Int64Array) -> Int64Array:
        """The rows at sorted `places` of a window's permutation; the whole of it is made when it is asked for again."""
        cached = self._row_orders.get(lane)
        if cached and cached[0] == (epoch, window):
            return cached[1][places].astype(np.int64)
        if len(places) <= _MAX_PEEK and num_rows >= _PEEK_FROM and self._peeked.get(lane) != (epoch, window):
            self._peeked[lane] = (epoch, window)
            return permuted_at(places, num_rows, TAG_ROWS, self.seed, epoch, lane, window).astype(np.int64)
        order = permutation(num_rows, TAG_ROWS, self.seed, epoch, lane, window)
        compact = order.astype(np.int32) if num_rows < 2**31 else order
        self._row_orders[lane] = ((epoch, window), compact)
        return compact[places].astype(np.int64)
