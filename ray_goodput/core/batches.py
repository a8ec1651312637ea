"""Which stream indices make up a global batch, and which of them a rank takes. Pure arithmetic.

A batch is a set of stream indices that depends on the position it starts at and on nothing else: not on the world
size, and not on how often the run was restarted. Ranks take nearly equal runs of its slots, sorted by the places of
their lanes (`LanePlaces`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_goodput.core.order import Int64Array, StreamOrder
from ray_goodput.errors import ConfigError

LanePlaces = Sequence[int] | Int64Array
"""A permutation, equal on all ranks: `places[lane]` is the lane's place. A batch's slots are sorted by it, and rank 0
takes the first run: so it says which rank reads which lane (`core.lane_places`). None: each lane has its own number as
its place."""


@dataclass(frozen=True, slots=True)
class BatchRange:
    """Global batch `index`: stream indices [start, stop). `samples_end` is the cursor once it is trained on.

    `samples_end` is `stop`, except with `drop_last` at the end of an epoch, where it steps over the dropped samples.
    """

    index: int
    start: int
    stop: int
    samples_end: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The sequence of global batches of G = `global_batch_size` samples over epochs of N = `num_samples`.

    drop_last False: batches run across the end of an epoch, so batch k is [kG, (k+1)G) and nothing is dropped, padded
    or repeated; with a number of `epochs`, the very last batch of all holds what is left (1 to G samples).
    drop_last True: an epoch has floor(N / G) batches, and its last N mod G samples are not trained on.
    epochs None: no end.
    """

    num_samples: int
    global_batch_size: int
    epochs: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ConfigError(f"global_batch_size={self.global_batch_size}: a batch holds at least 1 sample.")
        if self.epochs is not None and self.epochs < 0:
            raise ConfigError(f"epochs={self.epochs}: give 0 or more, or None for no end.")
        if self.drop_last and self.global_batch_size > self.num_samples:
            raise ConfigError(
                f"drop_last=True with a global batch of {self.global_batch_size} and {self.num_samples} samples leaves "
                "no batch at all: make the batch smaller or set drop_last=False."
            )

    @property
    def end(self) -> int | None:
        """Stream position after the last epoch, None if there is none."""
        return None if self.epochs is None else self.epochs * self.num_samples

    def at(self, position: int) -> BatchRange | None:
        """The batch that begins at stream position `position` (samples consumed), None when the epochs are over.

        A position that is no multiple of G (the batch size was changed between runs) is legal: the batch holds the next
        G samples from there, and `index` counts on from position // G.
        """
        n, g = self.num_samples, self.global_batch_size
        if self.drop_last and position % n + g > n:
            position = (position // n + 1) * n
        if self.end is not None and position >= self.end:
            return None
        if self.drop_last:
            epoch, within = divmod(position, n)
            stop = position + g
            samples_end = stop if stop % n and stop % n + g <= n else -(-stop // n) * n
            return BatchRange(epoch * (n // g) + within // g, position, stop, samples_end)
        stop = position + g if self.end is None else min(position + g, self.end)
        return BatchRange(position // g, position, stop, stop)

    def batch(self, index: int) -> BatchRange | None:
        """Global batch `index` of a run that started at position 0, in O(1)."""
        if not self.drop_last:
            return self.at(index * self.global_batch_size)
        epoch, k = divmod(index, self.num_samples // self.global_batch_size)
        return self.at(epoch * self.num_samples + k * self.global_batch_size)

    def num_batches(self) -> int | None:
        """Batches from position 0 to the end, None without an end."""
        if self.epochs is None:
            return None
        if self.drop_last:
            return self.epochs * (self.num_samples // self.global_batch_size)
        return -(-self.epochs * self.num_samples // self.global_batch_size)


def batch_slots(order: StreamOrder, start: int, stop: int, lane_places: LanePlaces | None = None) -> Int64Array:
    """Stream indices [start, stop) of a batch, sorted by (lane's place, index): neighbours share data shards."""
    indices = np.arange(start, stop, dtype=np.int64)
    lanes = order.lane_of(indices)
    places = lanes if lane_places is None else np.asarray(lane_places, dtype=np.int64)[lanes]
    return indices[np.argsort(places, kind="stable")]


def slot_bounds(size: int, dp_rank: int, dp_world: int) -> tuple[int, int]:
    """Which of the `size` sorted slots rank `dp_rank` of `dp_world` takes: [lo, hi). Sizes differ by at most one."""
    if not 0 <= dp_rank < dp_world:
        raise ConfigError(f"dp_rank={dp_rank} is not in a world of {dp_world}.")
    return dp_rank * size // dp_world, (dp_rank + 1) * size // dp_world


def local_slots(
    order: StreamOrder, start: int, stop: int, *, dp_rank: int, dp_world: int, lane_places: LanePlaces | None = None
) -> Int64Array:
    """The stream indices of batch [start, stop) that a rank trains on; may be empty in a short batch."""
    low, high = slot_bounds(stop - start, dp_rank, dp_world)
    return batch_slots(order, start, stop, lane_places)[low:high]


def batch_weight(num_local: int, size: int, dp_world: int) -> float:
    """Factor on a rank's mean gradient that makes the average over ranks the mean over the batch: n_r * world / m."""
    return num_local * dp_world / size
