"""The data shards that a loader holds open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from ray_goodput.core.order import Int64Array
from ray_goodput.data.columns import ShardColumns


class OpenShards:
    """Of each dataset of a mixture, the data shards used last. For one thread.

    max_open: for each dataset, what is held after a batch: its live set and a window, so that each of its data shards
        is opened once a pass (one that a lane's end cuts, once for each of both lanes). One limit for all would close
        those of a dataset that is read seldom.
    member_of: the number of the dataset of each data shard; None: there is one.
    """

    def __init__(self, max_open: Sequence[int], member_of: Callable[[Int64Array], Int64Array] | None = None) -> None:
        self._max_open = max_open
        self._member_of = member_of
        self._open: list[OrderedDict[int, ShardColumns]] = [OrderedDict() for _ in max_open]

    def get(self, data_shard: int, opened: Callable[[], ShardColumns]) -> ShardColumns:
        """The data shard, which is the one used last now; `opened()` if it is not held."""
        held = self._open[self._number(data_shard)]
        columns = held.get(data_shard)
        if columns is None:
            columns = opened()
        held[data_shard] = columns
        held.move_to_end(data_shard)
        return columns

    def make_way(self, data_shards: Int64Array) -> None:
        """Before a batch opens its data shards: others are closed, the longest unused first, until they all find room.
        Those that it reads stay, also if they are more: it may read from windows that end and from their next."""
        each = set(data_shards.tolist())
        for number, (held, max_open) in enumerate(zip(self._open, self._max_open, strict=True)):
            needed = each if self._member_of is None else {s for s in each if self._number(s) == number}
            too_many = len(held) + len(needed - held.keys()) - max_open
            for data_shard in [shard for shard in held if shard not in needed][: max(0, too_many)]:
                del held[data_shard]

    def close_some(self) -> None:
        """After a batch: those used last stay."""
        for held, max_open in zip(self._open, self._max_open, strict=True):
            while len(held) > max_open:
                held.popitem(last=False)

    def _number(self, data_shard: int) -> int:
        return 0 if self._member_of is None else int(self._member_of(np.array([data_shard]))[0])
