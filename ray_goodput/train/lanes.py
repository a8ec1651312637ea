"""After a change of the world's size, lanes go to the nodes whose caches hold their data shards.

At the same size they stay: an undisturbed run would end with other bits if a rank read other samples (promise F1), and
the nodes keep their ranks (`core.node_sequence`), so that what they read is cached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ray_goodput.core.lane_places import PlacedLanes, best_places
from ray_goodput.core.order import Int64Array
from ray_goodput.train.data_ranks import DataRanks
from ray_goodput.train.worker import WorkerContext

T = TypeVar("T")

logger = logging.getLogger(__name__)


class LaneAgreement:
    """The places of the lanes of each dataset, agreed once an attempt; the coordinator hands them on to the next.

    resumed_world: size of the world that saved what this attempt goes on from, None for a fresh run.
    """

    def __init__(self, worker: WorkerContext, resumed_world: int | None) -> None:
        self._worker = worker
        self._resumed_world = resumed_world
        self._agreed: dict[str, tuple[int, ...] | None] = {}

    def places(
        self, name: str, ranks: DataRanks, lanes: int, global_batch_size: int, held: Callable[[], Int64Array]
    ) -> tuple[int, ...] | None:
        """`FeedSpec.lane_places` of dataset `name`, the same on all ranks. Collective the first time in an attempt.

        held: `data.held.held_bytes` of this node; asked on one rank of each. What a node cannot tell counts as nothing.
        """
        if name not in self._agreed:
            self._agreed[name] = (
                None if self._worker.world.world_size == 1 else self._agree(name, ranks, lanes, global_batch_size, held)
            )
        return self._agreed[name]

    def _agree(
        self, name: str, ranks: DataRanks, lanes: int, global_batch_size: int, held: Callable[[], Int64Array]
    ) -> tuple[int, ...] | None:
        """Rank 0 finds out and works out for all: two ranks that disagreed would repeat some samples and skip
        others."""
        world = self._worker.world
        is_rank_0 = world.world_rank == 0
        before = world.broadcast(self._before(name) if is_rank_0 else None)
        places: tuple[int, ...] | None = None
        if before is None or before.world_size == world.world_size:
            if before is not None and before.places is not None and len(before.places) == lanes:
                places = before.places
        elif len(set(self._worker.node_of_rank)) > 1:
            nothing = np.zeros(lanes, dtype=np.int64)
            is_first = self._worker.is_first_of_node
            mine = _or_else(nothing, held, f"what this node's cache holds of dataset {name!r}") if is_first else None
            of_nodes = [told for told in world.gather(mine) if told is not None]  # nodes are numbered by rank
            if is_rank_0:
                places = _or_else(
                    None,
                    lambda: best_places(of_nodes, global_batch_size, ranks.nodes),
                    f"where the lanes of dataset {name!r} are best read",
                )
            places = world.broadcast(places)
        if is_rank_0:
            self._hand_on(name, PlacedLanes(world_size=world.world_size, places=places))
        return places

    def _before(self, name: str) -> PlacedLanes | None:
        """How the attempt before read the dataset: as the coordinator knows, or by the size of its world alone."""
        saved = self._resumed_world
        known = _or_else(
            None, lambda: self._worker.coordinator.placed_lanes(name), f"how dataset {name!r} was read before"
        )
        return known or (None if saved is None else PlacedLanes(world_size=saved, places=None))

    def _hand_on(self, name: str, placed: PlacedLanes) -> None:
        if placed.places is not None:
            moved = sum(place != lane for lane, place in enumerate(placed.places))
            logger.info(
                "dataset %r: %d of %d lanes are read by other ranks, whose nodes hold them",
                name,
                moved,
                len(placed.places),
            )
        _or_else(
            None,
            lambda: self._worker.coordinator.handle.lanes_placed.remote(name, placed),
            "whether the coordinator heard of it",
        )


def _or_else(otherwise: T, asked: Callable[[], T], what: str) -> T:
    """The answer, or `otherwise` when there is none: other ranks wait for this one, and only bytes depend on it."""
    try:
        return asked()
    except Exception as error:
        logger.warning("It is not known %s: %s", what, error)
        return otherwise
