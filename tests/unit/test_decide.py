"""Laws of what a rank wants after a step, and of a run that ends because its storage is away for too long."""

from __future__ import annotations

import pytest

from ray_goodput.core.run_state import HeartbeatAnswer
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import DurableAgeError
from ray_goodput.train.decide import decide, raise_if_too_old
from ray_goodput.train.orders import RankOrders
from ray_goodput.train.world import Decisions


def told(**answer) -> RankOrders:
    orders = RankOrders(0, ())
    orders.hear(HeartbeatAnswer(next_record=0, drain=False, save_number=0))
    orders.hear(HeartbeatAnswer(**{"next_record": 0, "drain": False, "save_number": 0, **answer}))
    return orders


@pytest.mark.parametrize(
    ("answer", "due", "stop", "wanted"),
    [
        ({}, SaveTier.NONE, False, Decisions()),
        ({}, SaveTier.LOCAL, False, Decisions(near=SaveTier.LOCAL)),
        ({}, SaveTier.STORAGE, False, Decisions(save=True)),
        ({}, SaveTier.NONE, True, Decisions(stop=True)),
        ({"drain": True}, SaveTier.PEER, False, Decisions(save=True, stop=True, near=SaveTier.PEER)),
        ({"save_number": 1}, SaveTier.NONE, False, Decisions(save=True)),
        ({"stop_reason": "too old"}, SaveTier.STORAGE, False, Decisions(stop=True, near=SaveTier.PEER)),
        ({"stop_reason": "too old", "drain": True}, SaveTier.NONE, True, Decisions(stop=True, near=SaveTier.PEER)),
    ],
)
def test_a_rank_wants_what_it_was_told_and_nothing_that_waits_for_a_storage_that_is_away(
    answer: dict, due: SaveTier, stop: bool, wanted: Decisions
) -> None:
    assert decide(told(**answer), due, stop) == wanted


def test_a_reason_once_heard_stays() -> None:
    orders = told(stop_reason="too old")
    orders.hear(HeartbeatAnswer(next_record=0, drain=False))
    assert orders.stop_reason == "too old"


@pytest.mark.parametrize(("saved", "where"), [(True, "lies on the nodes' disks"), (False, "Not all of it")])
def test_all_ranks_leave_with_the_reason_that_one_of_them_heard(saved: bool, where: str) -> None:
    with pytest.raises(DurableAgeError, match="No checkpoint became durable for 61 s") as raised:
        raise_if_too_old(["", "No checkpoint became durable for 61 s."], 40, lambda: saved)
    assert where in str(raised.value) and "step 40" in str(raised.value) and "same run name" in str(raised.value)


def test_without_a_reason_nothing_is_saved_or_raised() -> None:
    saves: list[int] = []
    raise_if_too_old(["", ""], 40, lambda: bool(saves.append(40)))
    assert not saves
