"""Lanes go to the nodes whose caches hold their data shards: agreed by all ranks when a feed is opened."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ray_goodput.core.lane_places import place_lanes
from ray_goodput.core.order import Int64Array
from ray_goodput.train.data_ranks import DataRanks
from ray_goodput.train.worker import WorkerContext

T = TypeVar("T")

logger = logging.getLogger(__name__)


def places_of_lanes(
    worker: WorkerContext, name: str, ranks: DataRanks, lanes: int, held: Callable[[], Int64Array]
) -> tuple[int, ...] | None:
    """`FeedSpec.lane_places` with which the nodes have the least to fetch of dataset `name`, the same on all ranks.
    Collective, unless there is one node, where it is None.

    held: `data.held.held_bytes` of this node; asked on one rank of each. What a node cannot tell counts as nothing.
    """
    if len(set(worker.node_of_rank)) == 1:
        return None
    world = worker.world
    nothing = np.zeros(lanes, dtype=np.int64)
    mine = _or_else(nothing, held, "what this node's cache holds", name) if worker.is_first_of_node else None
    told = [held for held in world.gather(mine) if held is not None]  # by node, as nodes are numbered by rank
    places = None
    if world.world_rank == 0:  # for all: two ranks that disagreed would repeat some samples and skip others
        places = _or_else(None, lambda: place_lanes(told, ranks.nodes), "where its lanes are best read", name)
        if places is not None:
            moved = sum(place != lane for lane, place in enumerate(places))
            logger.info("dataset %r: %d of %d lanes are read where their data shards are cached", name, moved, lanes)
    return world.broadcast(places)


def _or_else(otherwise: T, asked: Callable[[], T], what: str, name: str) -> T:
    """The answer, or `otherwise` when there is none: other ranks wait for this one, and only bytes depend on it."""
    try:
        return asked()
    except Exception as error:
        logger.warning("Dataset %r: %s is not known: %s", name, what, error)
        return otherwise
