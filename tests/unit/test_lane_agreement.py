"""Lanes stay with their ranks while the world keeps its size, and are placed anew when it changes: all ranks alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ray_goodput.core.order import Int64Array
from ray_goodput.errors import SessionError
from ray_goodput.train import lanes as lanes_module
from ray_goodput.train.data_ranks import agreed
from ray_goodput.train.lanes import LaneAgreement
from ray_goodput.train.worker import WorkerContext
from tests.thread_ranks import ThreadRanks, in_ranks

LANES = 4
CHANGED = [[0, 0, 7, 7], [9, 9, 0, 0]]  # each node holds what the other would read


def agree(
    saved_world: int | None,
    saved_places: Mapping[str, Sequence[int]] = MappingProxyType({}),
    *,
    node_of_rank: tuple[int, ...] = (0, 0, 1, 1),
    unreadable: tuple[int, ...] = (),
    lanes: int = LANES,
) -> tuple[Any, set[int]]:
    """What all ranks agree to, and which of them were asked what their node holds."""
    asked: list[int] = []

    def one(world: ThreadRanks) -> tuple[int, ...] | None:
        node = node_of_rank[world.world_rank]
        first = node_of_rank.index(node) == world.world_rank
        worker: Any = SimpleNamespace(world=world, node_of_rank=node_of_rank, is_first_of_node=first)
        assert first == WorkerContext.is_first_of_node.fget(worker)  # pyright: ignore[reportOptionalCall]

        def held() -> Int64Array:
            asked.append(world.world_rank)
            if node in unreadable:
                raise PermissionError("the cache's folder")
            return np.array(CHANGED[node])

        ranks = agreed([(rank, world.world_size) for rank in range(world.world_size)], node_of_rank, world.world_rank)
        agreement = LaneAgreement(worker, saved_world, saved_places)
        places = agreement.places("train", ranks, lanes, LANES, held)
        world.gather = lambda value: pytest.fail("agreed twice in an attempt")
        assert agreement.places("train", ranks, lanes, LANES, held) == places
        if places is not None:
            assert agreement.record()["train"] == list(places)
            # The next attempt of this size goes on with them, and asks nobody.
            again = LaneAgreement(worker, world.world_size, json.loads(json.dumps(agreement.record())))
            assert again.places("train", ranks, lanes, LANES, lambda: pytest.fail("asked")) == places
        else:
            assert "train" not in agreement.record()
        return places

    told = in_ranks(len(node_of_rank), one)
    for answer in told:
        if isinstance(answer, BaseException):
            raise answer
    assert told == told[:1] * len(told)
    assert len(asked) == len(set(asked))
    return told[0], set(asked)


@pytest.mark.parametrize("saved_world", [None, 4])
def test_a_fresh_run_and_one_that_goes_on_at_the_same_size_read_in_ascending_sequence(saved_world: int | None) -> None:
    """Whatever is cached where: an undisturbed run would end with other bits (F1)."""
    assert agree(saved_world) == (None, set())


@pytest.mark.parametrize("unreadable", [(), (0,), (1,)])
def test_after_a_change_of_size_lanes_go_where_they_are_cached_and_a_node_that_cannot_tell_holds_nothing(
    unreadable: tuple[int, ...],
) -> None:
    places, asked = agree(6, unreadable=unreadable)
    assert {*places[:2]} == {2, 3}
    assert asked == {0, 2}


def test_what_goes_on_at_the_size_it_was_saved_at_reads_as_it_did_then() -> None:
    """Also if all ranks are on one node now, and however an attempt of another size read that saved nothing."""
    before = {"train": [1, 0, 3, 2], "of the others": [0, 1]}
    assert agree(4, before) == ((1, 0, 3, 2), set())
    assert agree(4, before, node_of_rank=(0, 0, 0, 0)) == ((1, 0, 3, 2), set())
    assert agree(6, before)[0] != (1, 0, 3, 2)


def test_where_there_is_nothing_to_choose_nobody_looks_into_the_cache() -> None:
    assert agree(2, node_of_rank=(0, 0, 0)) == (None, set())
    assert agree(6, lanes=3) == (None, set()), "three lanes in a batch of four"


def test_a_dataset_that_is_not_read_in_an_attempt_keeps_its_places_for_the_next_one() -> None:
    worker: Any = SimpleNamespace(world=SimpleNamespace(world_size=2))
    assert LaneAgreement(worker, 2, {"later": [1, 0]}).record() == {"later": [1, 0]}
    assert LaneAgreement(worker, 3, {"later": [1, 0]}).record() == {}


def test_ranks_that_would_work_out_different_places_take_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with different versions of scipy on the nodes: a batch would have some samples twice, and others not."""
    numbers = iter(range(100))

    def another_each_time(*_: Any) -> tuple[int, ...]:
        first = next(numbers) % LANES
        return (*range(first, LANES), *range(first))

    monkeypatch.setattr(lanes_module, "best_places", another_each_time)
    assert sorted(agree(6)[0]) == list(range(LANES))


def test_if_nobody_can_work_out_the_places_lanes_are_read_in_ascending_sequence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> tuple[int, ...]:
        raise ImportError("no scipy")

    monkeypatch.setattr(lanes_module, "best_places", fails)
    assert agree(6)[0] is None
    assert "where the lanes of dataset 'train' are best read: no scipy" in caplog.text


def test_ranks_that_open_datasets_in_different_orders_are_told_so_on_all_of_them() -> None:
    """They would hold different places of one dataset: samples repeated and skipped."""

    def one(world: ThreadRanks) -> Any:
        worker: Any = SimpleNamespace(world=world, node_of_rank=(0, 1), is_first_of_node=True)
        ranks = agreed([(0, 2), (1, 2)], (0, 1), world.world_rank)
        name = ("web", "code")[world.world_rank]
        return LaneAgreement(worker, 3, {}).places(name, ranks, LANES, LANES, lambda: np.zeros(LANES, np.int64))

    for error in in_ranks(2, one):
        assert isinstance(error, SessionError)
        assert "the ranks ask for ['code', 'web']" in str(error)
