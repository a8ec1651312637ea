"""After a change of the world's size, lanes go to the nodes whose caches hold their data shards.

At the same size they stay as they were when the state was saved: a run would end with other bits than an undisturbed
one if a rank read other samples (promise F1). What a node holds is its own again, since nodes keep their ranks
(`core.node_sequence`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ray_goodput.core.lane_places import best_places, may_move
from ray_goodput.core.order import Int64Array
from ray_goodput.errors import SessionError
from ray_goodput.train.data_ranks import DataRanks
from ray_goodput.train.worker import WorkerContext

LANE_PLACES = "lane_places"
"""The key of `LaneAgreement.record()` in the `extra` of a commit record."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class LaneAgreement:
    """The places of each dataset's lanes in an attempt, the same on all ranks.

    saved_world: size of the world that saved what the attempt goes on from, None for a fresh run.
    saved_places: `record()` of then.
    """

    def __init__(
        self, worker: WorkerContext, saved_world: int | None, saved_places: Mapping[str, Sequence[int]]
    ) -> None:
        self._worker = worker
        self._same_size = saved_world in (None, worker.world.world_size)
        self._places: dict[str, tuple[int, ...] | None] = {}
        if self._same_size:
            self._places.update({name: tuple(places) for name, places in saved_places.items()})

    def record(self) -> dict[str, list[int]]:
        """The places by dataset, for the checkpoint; of a dataset in ascending sequence there are none."""
        return {name: list(places) for name, places in self._places.items() if places is not None}

    def places(
        self, name: str, ranks: DataRanks, lanes: int, global_batch_size: int, held: Callable[[], Int64Array]
    ) -> tuple[int, ...] | None:
        """`FeedSpec.lane_places` of dataset `name`. Collective the first time in an attempt of another size.

        held: `data.held.held_bytes` of this node; asked on one rank of each. What a node cannot tell counts as nothing.

        Raises:
            SessionError: the ranks ask for different datasets; on all of them.
        """
        if name not in self._places:
            worked_out = not self._same_size and len(set(self._worker.node_of_rank)) > 1
            worked_out = worked_out and may_move(lanes, global_batch_size)
            self._places[name] = self._work_out(name, ranks, lanes, global_batch_size, held) if worked_out else None
        return self._places[name]

    def _work_out(
        self, name: str, ranks: DataRanks, lanes: int, global_batch_size: int, held: Callable[[], Int64Array]
    ) -> tuple[int, ...] | None:
        """By rank 0 for all: two ranks that disagreed would repeat some samples and skip others."""
        world = self._worker.world
        nothing = np.zeros(lanes, dtype=np.int64)
        is_first = self._worker.is_first_of_node
        mine = _or_else(nothing, held, f"what this node's cache holds of dataset {name!r}") if is_first else None
        told = world.gather((name, mine))
        names = {asked_for for asked_for, _ in told}
        if len(names) > 1:  # whose places would go to whose lanes
            raise SessionError(
                f"run.batches: at the same moment the ranks ask for {sorted(names)}: open the datasets in the same "
                "order on every rank (not in that of a set)."
            )
        of_nodes = [held for _, held in told if held is not None]  # nodes are numbered by their lowest rank
        places: tuple[int, ...] | None = None
        if world.world_rank == 0:
            what = f"where the lanes of dataset {name!r} are best read"
            places = _or_else(None, lambda: best_places(of_nodes, global_batch_size, ranks.nodes), what)
            if places is not None:
                logger.info("dataset %r: its lanes go to the nodes that hold them: places %s", name, list(places))
        return world.broadcast(places)


def _or_else(otherwise: T, asked: Callable[[], T], what: str) -> T:
    """The answer, or `otherwise` when there is none: other ranks wait for this one, and only bytes depend on it."""
    try:
        return asked()
    except Exception as error:
        logger.warning("It is not known %s: %s", what, error)
        return otherwise
