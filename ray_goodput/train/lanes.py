"""Lanes go to the nodes whose caches hold their data shards: agreed by all ranks when a feed is opened."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from ray_goodput.core.lane_places import place_lanes
from ray_goodput.core.order import Int64Array
from ray_goodput.train.data_ranks import DataRanks
from ray_goodput.train.worker import WorkerContext

logger = logging.getLogger(__name__)


def places_of_lanes(
    worker: WorkerContext, name: str, ranks: DataRanks, lanes: int, held: Callable[[], Int64Array]
) -> tuple[int, ...] | None:
    """`FeedSpec.lane_places` with which the nodes have the least to fetch of dataset `name`. Collective, unless there
    is one node, where it is None.

    held: `data.held.held_bytes` of this node; asked on one rank of each. What a node cannot tell counts as nothing.
    """
    if len(set(worker.node_of_rank)) == 1:
        return None
    mine: Int64Array | None = None
    if worker.is_first_of_node:
        mine = np.zeros(lanes, dtype=np.int64)
        try:
            mine = held()
        except Exception as error:  # whatever it is: the other ranks wait for this one, and only bytes depend on it
            logger.warning("What this node's cache holds of dataset %r is not known: %s", name, error)
    told = [held for held in worker.world.gather(mine) if held is not None]  # by node, as nodes are numbered by rank
    places = place_lanes(told, ranks.nodes)
    if places is not None and worker.world.world_rank == 0:
        moved = int(np.count_nonzero(np.array(places) != np.arange(lanes)))
        logger.info("dataset %r: %d of %d lanes are read where their data shards are cached", name, moved, lanes)
    return places
