"""The order of a mixture, version 1: which dataset each position of the stream is drawn from, and which sample of it.

A *format*, as `core.order` is. All members have L lanes, and lane l of the mixture draws from lane l of each of them:

1. Position t is offset t div L of lane t mod L. A lane's offsets are cut into blocks of `BLOCK`; every block holds
   exactly counts[m] draws of member m.
2. In block b of lane l, item j of member m (0 <= j < counts[m]) gets the key ((j << 32) + v) div counts[m], with
   v = (u + l * 0x9E3779B9) mod 2**32 and u the upper half of the item's raw 64-bit output of Philox, key
   (MIXTURE, seed, b), items numbered member after member. The block's offsets are the items by stable argsort of the
   keys: each member's items are spread evenly over the block, each at a random place in its own n-th of it, and at
   places in different lanes that are spread evenly too (the multiplier is the golden ratio's).
3. Item j of member m in block b is the lane's draw k = b * counts[m] + j of that member: sample k mod n of the lane's
   n samples in the lane's pass k div n, in the member's own order of that lane and epoch (`core.order`).

So batches hold the members in proportion, with half the spread of drawing at random (70 % of 512: 358, give or take 5),
and a seek costs one sort of a block a lane. A lane's samples of a member all come once before one comes again. Lanes
differ in length by one sample, so their passes drift apart: lanes of n and n + 1 samples are gone through in the ratio
n + 1 : n.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ray_goodput.core.order import MAX_SEED, TAG_MIXTURE, Int64Array, Sample, SampleOrder, philox
from ray_goodput.errors import ConfigError

MIXTURE_VERSION = 1
BLOCK = 1000

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_GOLDEN = np.uint64(0x9E3779B9)
_LOW = np.uint64(0xFFFFFFFF)


class _Block(NamedTuple):
    """members, items: of each offset. places: the offset of each item, member after member."""

    number: int
    members: NDArray[np.int64]
    items: NDArray[np.int64]
    places: NDArray[np.int64]


def block_counts(weights: Mapping[str, float]) -> tuple[int, ...]:
    """How many of a block's draws each member gets: shares of the weights' sum, by largest remainder.

    Raises:
        ConfigError: a weight is no positive number, or so small that it rounds to nothing.
    """
    if not weights:
        raise ConfigError("Mixture: give at least one dataset.")
    for name, weight in weights.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"Mixture: a dataset's name is made of letters, digits, '_', '-' and '.'; got {name!r}.")
        if isinstance(weight, bool) or not 0 < weight < float("inf"):
            raise ConfigError(f"Mixture(weights=): {name!r} has weight {weight!r}: give a positive number.")
    shares = np.array([float(weight) for weight in weights.values()])
    shares = shares / shares.sum() * BLOCK
    counts = np.floor(shares).astype(np.int64)
    missing = BLOCK - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:missing]] += 1
    for name, count in zip(weights, counts.tolist(), strict=True):
        if count == 0:
            raise ConfigError(
                f"Mixture(weights=): {name!r} gets no sample in {BLOCK} (weight {weights[name]} of "
                f"{sum(weights.values())}): give it more, or leave it out."
            )
    return tuple(counts.tolist())


class MixtureOrder:
    """The sample at every position of a mixture's endless stream; data shards and sample ids of the members follow each
    other. Immutable but for caches that never change a result.

    num_samples: samples of all members together: a mixture's epoch is that long. By its end, a member with more than
        its share of weight has begun again, and one with less is not through.
    first_shards, first_ids: where each member's data shards and sample ids begin, with the total at the end.
    """

    def __init__(self, members: Mapping[str, SampleOrder], counts: Sequence[int], *, seed: int) -> None:
        """counts: as `block_counts` gives them. Raises ConfigError."""
        if len(counts) != len(members) or sum(counts) != BLOCK or min(counts) < 1:
            raise ConfigError(f"MixtureOrder: {list(counts)} are not {len(members)} counts of a block of {BLOCK}.")
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"seed={seed}: the seed of a mixture must be an integer from 0 to 2**64 - 1.")
        lanes = {order.lanes for order in members.values()}
        if len(lanes) != 1:
            raise ConfigError(f"The datasets of a mixture have {sorted(lanes)} lanes: give them the same number.")
        self.lanes = lanes.pop()
        for name, order in members.items():
            if order.num_samples < self.lanes:
                raise ConfigError(
                    f"Dataset {name!r} of the mixture has {order.num_samples} samples, fewer than its {self.lanes} "
                    f"lanes: set lanes={order.num_samples} or less in all datasets of the mixture."
                )
        self.names = tuple(members)
        self.members = tuple(members.values())
        self.counts = tuple(int(count) for count in counts)
        self.seed = int(seed)
        self.window = max(order.window for order in self.members)
        self.num_shards = sum(order.num_shards for order in self.members)
        self.num_samples = sum(order.num_samples for order in self.members)
        self.first_shards = np.concatenate([[0], np.cumsum([order.num_shards for order in self.members])])
        self.first_ids = np.concatenate([[0], np.cumsum([order.num_samples for order in self.members])])
        self._first_items = np.concatenate([[0], np.cumsum(self.counts)])
        self._counts = np.array(self.counts, dtype=np.int64)
        # The lane's block used last, as lanes move forward; racing threads may make one twice, and then agree.
        self._blocks: dict[int, _Block] = {}

    @property
    def digest(self) -> str:
        """What fixes the sequence besides the shards, as one readable line."""
        fields = [f"mixture={MIXTURE_VERSION} seed={self.seed} lanes={self.lanes}"]
        for name, order, num in zip(self.names, self.members, self.counts, strict=True):
            fields.append(f"{name}.count={num} {name}.seed={order.seed} {name}.window={order.window}")
        return " ".join(fields)

    def split(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Member, and position in its own order, of each stream index."""
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and int(indices.min()) < 0:
            raise ValueError(f"A stream index cannot be negative, got {int(indices.min())}.")
        offsets, lanes = np.divmod(indices, self.lanes)
        blocks, places = np.divmod(offsets, BLOCK)
        members, positions = np.empty_like(indices), np.empty_like(indices)
        by_block = np.lexsort((blocks, lanes))
        cuts = np.flatnonzero((np.diff(lanes[by_block]) != 0) | (np.diff(blocks[by_block]) != 0)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(indices)] if len(indices) else [0]):
            chosen = by_block[start:stop]
            lane = int(lanes[chosen[0]])
            block = self._block(lane, int(blocks[chosen[0]]))
            members[chosen] = block.members[places[chosen]]
            draws = block.number * self._counts[members[chosen]] + block.items[places[chosen]]
            for member, order in enumerate(self.members):
                mine = members[chosen] == member
                epochs, within = np.divmod(draws[mine], order.lane_length(lane))
                positions[chosen[mine]] = epochs * order.num_samples + within * self.lanes + lane
        return members, positions

    def draws_before(self, lane: int, offset: int, member: int) -> int:
        """How many of a lane's offsets before `offset` draw from `member`."""
        number, place = divmod(offset, BLOCK)
        before = np.count_nonzero(self._block(lane, number).members[:place] == member) if place else 0
        return number * self.counts[member] + int(before)

    def index_of_draw(self, lane: int, member: int, draw: int) -> int:
        """The stream index of a lane's draw number `draw` (from 0) of a member."""
        number, item = divmod(draw, self.counts[member])
        place = self._block(lane, number).places[self._first_items[member] + item]
        return (number * BLOCK + int(place)) * self.lanes + lane

    def member_of(self, data_shards: Int64Array) -> Int64Array:
        """The member that each data shard belongs to."""
        return np.searchsorted(self.first_shards, data_shards, side="right").astype(np.int64) - 1

    def at(self, index: int) -> Sample:
        """The sample at global stream index `index` (>= 0)."""
        shards, rows = self.locate(np.array([index], dtype=np.int64))
        return Sample(int(shards[0]), int(rows[0]))

    def locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Data shard (of all members' together) and row in it of each stream index; any order, duplicates allowed."""
        members, positions = self.split(indices)
        data_shards, rows = np.empty_like(positions), np.empty_like(positions)
        for member, order in enumerate(self.members):
            mine = np.flatnonzero(members == member)
            shards, rows[mine] = order.locate(positions[mine])
            data_shards[mine] = shards + self.first_shards[member]
        return data_shards, rows

    def sample_ids(self, data_shards: Int64Array, rows: Int64Array) -> Int64Array:
        """Position of each row in the concatenation of all members' data shards: `first_ids[m]` plus the member's."""
        ids = np.empty_like(data_shards)
        members = self.member_of(data_shards)
        for member, order in enumerate(self.members):
            mine = np.flatnonzero(members == member)
            own = order.sample_ids(data_shards[mine] - self.first_shards[member], rows[mine])
            ids[mine] = own + self.first_ids[member]
        return ids

    def lane_of(self, indices: Int64Array) -> Int64Array:
        """The lane each global stream index is read from."""
        return indices % self.lanes

    def passes(self, indices: Int64Array) -> Int64Array:
        """Each sample's epoch in its own dataset."""
        members, positions = self.split(indices)
        lengths = np.array([order.num_samples for order in self.members], dtype=np.int64)
        return positions // lengths[members]

    def _block(self, lane: int, number: int) -> _Block:
        known = self._blocks.get(lane)
        if known is not None and known.number == number:
            return known
        counts = np.repeat(self._counts, self.counts).astype(np.uint64)
        items = np.arange(BLOCK) - np.repeat(self._first_items[:-1], self.counts)
        raw = philox(TAG_MIXTURE, self.seed, number).random_raw(BLOCK) >> np.uint64(32)
        within = (raw + np.uint64(lane) * _GOLDEN) & _LOW
        by_place = np.argsort(((items.astype(np.uint64) << np.uint64(32)) + within) // counts, kind="stable")
        places = np.empty(BLOCK, dtype=np.int64)
        places[by_place] = np.arange(BLOCK)
        members = np.repeat(np.arange(len(self.counts)), self.counts)
        block = self._blocks[lane] = _Block(number, members[by_place], items[by_place], places)
        return block
