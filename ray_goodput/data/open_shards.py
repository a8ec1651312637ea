"""The data shards that a loader holds open."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from ray_goodput.core.order import Int64Array
from ray_goodput.data.columns import ShardColumns


class OpenShards:
    """Of each dataset of a mixture, the data shards used last. For one thread.

    max_open: for each dataset, what is held after a batch: its live set and a window, so that each of its data shards
        is opened once a pass (one that a lane's end cuts, once for each of both lanes). One limit for all would close
        those of a dataset that is read seldom.
    first_shards: the first data shard of each dataset.
    """

    def __init__(self, max_open: Sequence[int], first_shards: Sequence[int] = (0,)) -> None:
        self._max_open = max_open
        self._first_shards = first_shards
        self._open: list[OrderedDict[int, ShardColumns]] = [OrderedDict() for _ in max_open]
        self._only = self._open[0] if len(self._open) == 1 else None  # asked for each data shard of each batch

    def get(self, data_shard: int) -> ShardColumns | None:
        """The data shard, which is the one used last now; None if it is not held."""
        held = self._only if self._only is not None else self._open[self._dataset(data_shard)]
        columns = held.get(data_shard)
        if columns is not None:
            held.move_to_end(data_shard)
        return columns

    def add(self, data_shard: int, columns: ShardColumns) -> None:
        """It is held, and the one used last."""
        self._open[self._dataset(data_shard)][data_shard] = columns

    def make_way(self, data_shards: Int64Array) -> bool:
        """Before a batch opens its data shards: others are closed, the longest unused first, until they all find room.
        Those that it reads stay, also if they are more: it may read from windows that end and from their next.
        Returns whether there are any to open."""
        needed: list[set[int]] = [set() for _ in self._open]
        if self._only is not None:
            needed[0].update(data_shards.tolist())
        else:
            for data_shard in set(data_shards.tolist()):
                needed[self._dataset(data_shard)].add(data_shard)
        opens = False
        for held, max_open, wanted in zip(self._open, self._max_open, needed, strict=True):
            num_new = len(wanted - held.keys())
            opens = opens or num_new > 0
            too_many = len(held) + num_new - max_open
            if too_many > 0:
                for data_shard in [shard for shard in held if shard not in wanted][:too_many]:
                    del held[data_shard]
        return opens

    def close_some(self) -> None:
        """After a batch: those used last stay."""
        for held, max_open in zip(self._open, self._max_open, strict=True):
            while len(held) > max_open:
                held.popitem(last=False)

    def _dataset(self, data_shard: int) -> int:
        return bisect_right(self._first_shards, data_shard) - 1
