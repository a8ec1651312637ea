"""Where each lane is read: on a node that already holds its data shards, as far as batches can be shared out so. Pure.

The order says which samples a batch has, and nothing about who reads them. Ranks take runs of a batch's slots, sorted
by the places of their lanes (`core.batches`), so a permutation of the lanes puts any lane on any rank. The best one is
an assignment problem (lanes to places, bytes held as the gain), which `scipy.optimize.linear_sum_assignment` solves
exactly (0.1 ms for 64 lanes, 25 ms for 1024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from ray_goodput.core.order import Int64Array

_MAX_LANES = 1024  # of so many it costs 25 ms and as many MB; with more, lanes stay in ascending sequence


def may_move(lanes: int, global_batch_size: int) -> bool:
    """Whether `best_places` has a choice. Lanes that do not divide the batch are shared out anew by each batch."""
    return global_batch_size % lanes == 0 and lanes <= _MAX_LANES


def readers_of_places(lanes: int, global_batch_size: int, dp_world: int) -> list[range]:
    """The data-parallel ranks that read the lane at each place; several where ranks share one. `lanes` divide the
    batch."""
    bounds = np.arange(dp_world + 1) * global_batch_size // dp_world
    starts = np.arange(lanes) * (global_batch_size // lanes)
    first = np.searchsorted(bounds, starts, side="right") - 1
    last = np.searchsorted(bounds, starts + global_batch_size // lanes - 1, side="right") - 1
    return [range(low, high + 1) for low, high in zip(first.tolist(), last.tolist(), strict=True)]


def best_places(
    held: Sequence[Int64Array], global_batch_size: int, nodes_of_ranks: Sequence[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """The place of each lane with which most bytes are cached where they are read; None if ascending is as good.

    held: of each node, the bytes of each lane that its cache holds.
    nodes_of_ranks: of each data-parallel rank, the nodes on which it is read; several if tensor or pipeline parallel
        ranks share its batches.

    Among equals, as many lanes as possible keep their place. The lanes `may_move`.
    """
    lanes = len(held[0])
    readers = readers_of_places(lanes, global_batch_size, len(nodes_of_ranks))
    nodes_of_places = [frozenset(node for rank in ranks for node in nodes_of_ranks[rank]) for ranks in readers]
    groups = {nodes: number for number, nodes in enumerate(dict.fromkeys(nodes_of_places))}
    gains = np.array([np.sum([held[node] for node in nodes], axis=0) for nodes in groups], dtype=np.int64)
    group_of_place = np.array([groups[nodes] for nodes in nodes_of_places])
    ascending = np.arange(lanes)
    as_it_is = int(gains[group_of_place, ascending].sum())
    if as_it_is == int(gains.max(axis=0).sum()):
        return None
    worth = gains[group_of_place].astype(np.float64) * (lanes + 1)  # by place and lane; ties weigh less than a byte
    worth[ascending, ascending] += 1
    _, lane_at = _solver()(worth, maximize=True)
    if int(gains[group_of_place, lane_at].sum()) == as_it_is:
        return None
    return tuple(np.argsort(lane_at).tolist())


def _solver() -> Callable[..., tuple[Int64Array, Int64Array]]:
    """Imported when it is needed: that takes half a second. It has no types."""
    from scipy.optimize import linear_sum_assignment  # pyright: ignore

    return cast("Callable[..., tuple[Int64Array, Int64Array]]", linear_sum_assignment)
