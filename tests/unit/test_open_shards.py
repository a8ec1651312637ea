"""Which data shards stay open: of each dataset those used last, and all that a batch reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from ray_goodput.data.open_shards import OpenShards


def use(held: OpenShards, *shards: int) -> list[int]:
    """A batch that reads them, in this sequence; returns those it had to open."""
    opened: list[int] = []
    opens = held.make_way(np.array(shards))
    for shard in shards:
        if held.get(shard) is None:
            opened.append(shard)
            columns: Any = object()
            held.add(shard, columns)
    held.close_some()
    assert opens == bool(opened)
    return opened


def test_those_used_last_stay_open() -> None:
    held = OpenShards([2])
    assert use(held, 1, 2) == [1, 2]
    assert use(held, 1) == []
    assert use(held, 3) == [3]
    assert use(held, 1, 3) == []
    assert use(held, 2) == [2]


def test_a_batch_has_all_that_it_reads_open_at_once_and_the_last_stay() -> None:
    held = OpenShards([2])
    assert use(held, 1, 2, 3, 4) == [1, 2, 3, 4]
    assert use(held, 4, 3) == []
    assert use(held, 1) == [1]


def test_one_dataset_does_not_close_what_another_reads_seldom() -> None:
    held = OpenShards([1, 1], [0, 100])
    assert use(held, 1, 100) == [1, 100]
    for shard in range(2, 30):
        assert use(held, shard) == [shard]
    assert use(held, 100) == []
    assert use(held, 101) == [101]
    assert use(held, 29) == []
