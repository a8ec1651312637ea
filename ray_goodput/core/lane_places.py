"""Where each lane is read: on a node that already holds its data shards, as far as batches can be shared out so. Pure.

The order says which samples a batch has, and nothing about who reads them. Ranks take runs of a batch's slots, sorted
by the places of their lanes (`core.batches`), so a permutation of the lanes puts any lane on any rank. The best one is
an assignment problem (lanes to places, bytes held as the gain), which `scipy.optimize.linear_sum_assignment` solves
exactly (0.1 ms for 64 lanes, 0.4 s for 4096).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ray_goodput.core.mixture import MixtureOrder
from ray_goodput.core.order import Int64Array
from ray_goodput.core.placement import AnyOrder


def lane_shards(order: AnyOrder, lane: int) -> Int64Array:
    """The data shards that a lane reads, each once: the same in every epoch, in no meaningful sequence."""
    if isinstance(order, MixtureOrder):
        firsts: list[int] = order.first_shards.tolist()
        members = zip(order.members, firsts, strict=False)
        return np.concatenate([member.lane_epoch(0, lane).shards + first for member, first in members])
    return order.lane_epoch(0, lane).shards


def readers_of_places(lanes: int, dp_world: int) -> list[range]:
    """The data-parallel ranks that read the lane at each place; several where ranks share one. Exact when the lanes
    divide the batch, as by default."""
    return [range(place * dp_world // lanes, -(-(place + 1) * dp_world // lanes)) for place in range(lanes)]


def place_lanes(held: Sequence[Int64Array], nodes_of_ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The place of each lane with which most bytes are cached where they are read; None if ascending is as good.

    held: of each node, the bytes of each lane that its cache holds.
    nodes_of_ranks: of each data-parallel rank, the nodes on which it is read; several if tensor or pipeline parallel
        ranks share its batches.

    Among equals, lanes keep their own place, and else their own nodes.
    """
    lanes = len(held[0])
    readers = readers_of_places(lanes, len(nodes_of_ranks))
    nodes_of_places = [frozenset(node for rank in ranks for node in nodes_of_ranks[rank]) for ranks in readers]
    groups = {nodes: number for number, nodes in enumerate(dict.fromkeys(nodes_of_places))}
    gains = np.array([np.sum([held[node] for node in nodes], axis=0) for nodes in groups], dtype=np.int64)
    group_of_place = np.array([groups[nodes] for nodes in nodes_of_places])
    ascending = np.arange(lanes)
    as_it_is = int(gains[group_of_place, ascending].sum())
    if as_it_is == int(gains.max(axis=0).sum()):
        return None
    worth = gains[group_of_place].astype(np.float64) * (3 * lanes + 1)  # by place and lane; a byte outweighs all ties
    worth[group_of_place[:, None] == group_of_place] += 1
    worth[ascending, ascending] += 2
    optimize: Any = importlib.import_module("scipy.optimize")  # half a second, and rarely needed; it has no types
    lane_at: Int64Array = optimize.linear_sum_assignment(worth, maximize=True)[1]
    if int(gains[group_of_place, lane_at].sum()) == as_it_is:
        return None
    return tuple(np.argsort(lane_at).tolist())
