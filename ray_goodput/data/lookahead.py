"""Which data shards come next, how far ahead of the consumer they may be fetched, and which are needed last."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from ray_goodput.core.order import Int64Array
from ray_goodput.core.placement import ShardVisit


class Need(NamedTuple):
    """Data shard `data_shard` is first needed, in its epoch, by the sample at stream index `position`."""

    position: int
    data_shard: int


def first_needs(visits: Iterable[ShardVisit]) -> Iterator[Need]:
    """Each data shard once an epoch, at its first visit. Lazy."""
    last_epoch: dict[int, int] = {}  # not one epoch of all: the datasets of a mixture are not at the same one
    for visit in visits:
        if last_epoch.get(visit.data_shard) != visit.epoch:
            last_epoch[visit.data_shard] = visit.epoch
            yield Need(visit.position, visit.data_shard)


class LookAhead:
    """A sequence of needs, numbered from 0, and the consumer's place in it. Thread-safe.

    The *head* is the first need that the consumer's next global batch does not have yet. Need i is admitted, that is
    may be fetched, if i < head + max_shards and the bytes from the head to it are at most `max_bytes`; the head itself
    always is. Endless sequences are fine: only what is asked for is generated.

    needs: by position, from the consumer's start on.
    shard_bytes: size of a data shard, for `max_bytes`.
    consumed: samples consumed when it starts.
    batch_samples: samples of a global batch.
    live_shards: of each dataset of a mixture, or of the only one, how many needs may be read from at one position
        (`core.placement.live_sets`).
    member_of: the number of the dataset of each data shard; None: there is one.
    behind: samples by which the consumer that is told of may be ahead of others that this is for.
    lanes: of the order. A window that begins within as many samples from the next batch's start has taken the place of
        its lane's window before.
    """

    def __init__(
        self,
        needs: Iterator[Need],
        *,
        shard_bytes: Callable[[int], int],
        consumed: int,
        batch_samples: int,
        max_shards: int,
        max_bytes: int | None = None,
        live_shards: Sequence[int] = (0,),
        member_of: Callable[[Int64Array], Int64Array] | None = None,
        lanes: int = 0,
        behind: int = 0,
    ) -> None:
        self._needs = needs
        self._shard_bytes = shard_bytes
        self._consumed = consumed
        self._batch_samples = batch_samples
        self._max_shards = max(1, max_shards)
        self._max_bytes = max_bytes
        self._live_shards = live_shards
        self._member_of = member_of
        self._lanes = lanes
        self._behind = behind
        self._changed = threading.Condition()
        self._known: deque[Need] = deque()  # needs base .. base + len - 1
        # Those before them that may be read from still: a dataset's that is read seldom stay so while many begin.
        self._past = [deque[int](maxlen=num) for num in live_shards]
        self._base = 0
        self._exhausted = False
        self._closed = False
        self._head = 0
        self._begun = 0  # number of the first need after those that the last consumer's next batch begins with
        with self._changed:
            self._move_head()

    @property
    def consumed(self) -> int:
        """Samples consumed, as far as was told."""
        return self._consumed

    @property
    def head(self) -> int:
        """Number of the first need after the consumer's next batch."""
        return self._head

    def at(self, number: int) -> tuple[int, Need] | None:
        """Need `number` with its number, or the first later one that is not done; None if there is none."""
        with self._changed:
            number = max(number, self._base)
            self._generate_to(number + 1)
            return (number, self._known[number - self._base]) if number < self._base + len(self._known) else None

    def end(self, limit: int) -> int:
        """Number after the last need, or `limit` if there are more."""
        with self._changed:
            self._generate_to(limit)
            return min(limit, self._base + len(self._known))

    def advance(self, samples_consumed: int) -> None:
        """The consumer has consumed that many samples; going back is ignored (a late message)."""
        with self._changed:
            if samples_consumed > self._consumed:
                self._consumed = samples_consumed
                self._move_head()
                self._changed.notify_all()

    def admitted(self, number: int, timeout_s: float) -> bool:
        """True once need `number` may be fetched; False after `timeout_s`, or at once when closed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                if self._may_fetch(number):
                    return True
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return not self._closed and self._may_fetch(number)
        return False

    def next_uses(self, limit: int = 4096) -> dict[int, float]:
        """How many needs ahead of the consumer each shard is, 0 if its next batch may use it; at most `limit` that are
        not done."""
        with self._changed:
            self._generate_to(self._base + limit)
            begun = [need.data_shard for need in islice(self._known, max(0, self._begun - self._base))]
            uses: dict[int, float] = dict.fromkeys(self._in_use(begun), 0.0)
            for number, need in enumerate(islice(self._known, len(begun), limit), self._base + len(begun)):
                uses.setdefault(need.data_shard, float(max(0, number - self._head + 1)))
            return uses

    def _in_use(self, begun: list[int]) -> Iterator[int]:
        """Of each dataset, as many as may be read from, the last ones of the past and of `begun`."""
        members = self._members(begun)
        for number, (past, num) in enumerate(zip(self._past, self._live_shards, strict=True)):
            own = [*past, *(shard for shard, member in zip(begun, members, strict=True) if member == number)]
            yield from own[max(0, len(own) - num) :]

    def _members(self, data_shards: list[int]) -> list[int]:
        return [0] * len(data_shards) if self._member_of is None else self._member_of(np.array(data_shards)).tolist()

    def close(self) -> None:
        """Whoever waits is told to stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def _may_fetch(self, number: int) -> bool:
        if number <= self._head:
            return True
        if number >= self._head + self._max_shards:
            return False
        if self._max_bytes is None:
            return True
        self._generate_to(number + 1)
        coming = islice(self._known, self._head - self._base, number + 1 - self._base)
        return sum(self._shard_bytes(need.data_shard) for need in coming) <= self._max_bytes

    def _generate_to(self, stop: int) -> None:
        while not self._exhausted and self._base + len(self._known) < stop:
            need = next(self._needs, None)
            if need is None:
                self._exhausted = True
                return
            self._known.append(need)

    def _move_head(self) -> None:
        last = self._consumed - self._behind
        self._begun = self._first_from(last + min(self._lanes, self._batch_samples), self._begun)
        self._head = self._first_from(self._consumed + self._batch_samples, self._head)
        # Forget what is done. Not all before the head: a batch across an epoch's end reads from both epochs' shards.
        too_many = self._begun - self._base - sum(self._live_shards)
        done = [self._known.popleft().data_shard for _ in range(too_many)]
        self._base += len(done)
        for data_shard, member in zip(done, self._members(done), strict=True):
            self._past[member].append(data_shard)

    def _first_from(self, position: int, number: int) -> int:
        """The first need, of `number` and those after it, that begins at `position` or later."""
        while True:
            self._generate_to(number + 1)
            if number >= self._base + len(self._known) or self._known[number - self._base].position >= position:
                return number
            number += 1
