"""Lanes stay with their ranks while the world keeps its size, and are placed anew when it changes: all ranks alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ray_goodput.core.lane_places import PlacedLanes
from ray_goodput.core.order import Int64Array
from ray_goodput.errors import RunError
from ray_goodput.train import lanes as lanes_module
from ray_goodput.train.data_ranks import agreed
from ray_goodput.train.lanes import LaneAgreement
from ray_goodput.train.worker import WorkerContext
from tests.thread_ranks import ThreadRanks, in_ranks

LANES = 4
CHANGED = [[0, 0, 7, 7], [9, 9, 0, 0]]  # each node holds what the other would read


class Coordinator:
    """Remembers as the real one does; `away`: answers nothing."""

    def __init__(self, known: PlacedLanes | None = None, away: bool = False) -> None:
        self.known = known
        self.away = away
        self.handle: Any = SimpleNamespace(lanes_placed=SimpleNamespace(remote=self._placed))

    def placed_lanes(self, dataset: str) -> PlacedLanes | None:
        if self.away:
            raise RunError("The actor did not answer.")
        return self.known

    def _placed(self, dataset: str, placed: PlacedLanes) -> None:
        assert dataset == "train"
        self.known = placed


def agree(
    coordinator: Coordinator,
    resumed_world: int | None,
    *,
    node_of_rank: tuple[int, ...] = (0, 0, 1, 1),
    unreadable: tuple[int, ...] = (),
) -> list[Any]:
    """What each of the ranks agrees to, of which each node's first tells what its node holds."""
    asked: list[int] = []

    def one(world: ThreadRanks) -> tuple[int, ...] | None:
        node = node_of_rank[world.world_rank]
        worker: Any = SimpleNamespace(
            world=world,
            coordinator=coordinator,
            node_of_rank=node_of_rank,
            is_first_of_node=node_of_rank.index(node) == world.world_rank,
        )
        assert worker.is_first_of_node == WorkerContext.is_first_of_node.fget(worker)  # pyright: ignore

        def held() -> Int64Array:
            asked.append(world.world_rank)
            if node in unreadable:
                raise PermissionError("the cache's folder")
            return np.array(CHANGED[node])

        ranks = agreed([(rank, world.world_size) for rank in range(world.world_size)], node_of_rank, world.world_rank)
        agreement = LaneAgreement(worker, resumed_world)
        first = agreement.places("train", ranks, LANES, LANES, held)
        world.gather = lambda value: pytest.fail("agreed twice in an attempt")
        assert agreement.places("train", ranks, LANES, LANES, held) == first
        return first

    told = in_ranks(len(node_of_rank), one)
    assert len(asked) == len(set(asked)) <= len(set(node_of_rank))
    return told


def one_for_all(told: list[Any]) -> Any:
    for answer in told:
        if isinstance(answer, BaseException):
            raise answer
    assert told == told[:1] * len(told)
    return told[0]


def test_a_fresh_run_and_one_that_goes_on_at_the_same_size_read_in_ascending_sequence() -> None:
    """Whatever is cached where: an undisturbed run would end with other bits (F1)."""
    assert one_for_all(agree(Coordinator(), None)) is None
    assert one_for_all(agree(Coordinator(), 4)) is None
    assert one_for_all(agree(Coordinator(PlacedLanes(world_size=4, places=None)), 4)) is None


@pytest.mark.parametrize("known", [None, PlacedLanes(world_size=6, places=None)])
@pytest.mark.parametrize("unreadable", [(), (0,), (1,)])
def test_after_a_change_of_size_lanes_go_where_they_are_cached_and_a_node_that_cannot_tell_holds_nothing(
    known: PlacedLanes | None, unreadable: tuple[int, ...]
) -> None:
    """What the coordinator knows of the last attempt counts more than who saved the checkpoint."""
    coordinator = Coordinator(known)
    places = one_for_all(agree(coordinator, 6 if known is None else 4, unreadable=unreadable))
    assert {*places[:2]} == {2, 3}
    assert coordinator.known == PlacedLanes(world_size=4, places=places)


def test_an_attempt_of_the_same_size_after_that_reads_as_the_one_before_it() -> None:
    before = PlacedLanes(world_size=4, places=(1, 0, 3, 2))
    assert one_for_all(agree(Coordinator(before), 6)) == (1, 0, 3, 2)
    assert one_for_all(agree(Coordinator(before), 6, node_of_rank=(0, 0, 0, 0))) == (1, 0, 3, 2)
    of_other_lanes = PlacedLanes(world_size=4, places=(1, 0))
    assert one_for_all(agree(Coordinator(of_other_lanes), 6)) is None


def test_a_coordinator_that_is_away_costs_bytes_and_nothing_else() -> None:
    assert one_for_all(agree(Coordinator(away=True), 4)) is None
    assert {*one_for_all(agree(Coordinator(away=True), 6))[:2]} == {2, 3}


def test_on_one_node_nobody_looks_into_the_cache() -> None:
    assert one_for_all(agree(Coordinator(), 2, node_of_rank=(0, 0, 0), unreadable=(0,))) is None


def test_ranks_that_would_work_out_different_places_take_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with different versions of scipy on the nodes: a batch would have some samples twice, and others not."""
    numbers = iter(range(100))

    def another_each_time(*_: Any) -> tuple[int, ...]:
        first = next(numbers) % LANES
        return (*range(first, LANES), *range(first))

    monkeypatch.setattr(lanes_module, "best_places", another_each_time)
    assert sorted(one_for_all(agree(Coordinator(), 6))) == list(range(LANES))


def test_if_nobody_can_work_out_the_places_lanes_are_read_in_ascending_sequence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> tuple[int, ...]:
        raise ImportError("no scipy")

    monkeypatch.setattr(lanes_module, "best_places", fails)
    assert one_for_all(agree(Coordinator(), 6)) is None
    assert "where the lanes of dataset 'train' are best read: no scipy" in caplog.text
