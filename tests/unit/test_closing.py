"""Laws of the end of a train loop whose last state cannot be staged."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import DurableAgeError, StagingFullError
from ray_goodput.train.session import Session
from ray_goodput.train.world import World


class Closing(Session):
    """A session after step 7 whose slots stay full; `stop_reason` comes while its last save waits for one."""

    def __init__(self, stop_reason: str) -> None:
        self._orders = SimpleNamespace(stop_reason="")
        self._coming = stop_reason
        self.left = 0
        worker: Any = SimpleNamespace(world=World(0, 1, None), orders=self._orders)
        self._worker = worker
        self._recorder: Any = SimpleNamespace(span=lambda bucket: nullcontext())
        self._feeds: Any = {}
        self._restored: Any = object()
        self._model: Any = object()
        self._step = 7
        self._saver: Any = SimpleNamespace(last_step=5, leave=self._leave_with_near_saves)

    def _save(self, *, must: bool, tier: SaveTier = SaveTier.STORAGE) -> bool:
        self._orders.stop_reason = self._orders.stop_reason or self._coming
        return tier is not SaveTier.STORAGE

    def _leave_with_near_saves(self) -> bool:
        self.left += 1
        return True


def test_a_run_that_is_to_stop_while_its_last_save_waits_for_a_slot_says_so_and_leaves_its_state_on_the_nodes() -> None:
    session = Closing("No checkpoint became durable for 61 s.")
    with pytest.raises(DurableAgeError, match=r"61 s.* after step 7 lies on the nodes' disks"):
        session.close()
    assert session.left == 1


def test_a_run_that_is_to_stop_while_its_last_upload_is_waited_for_says_so_too() -> None:
    session = Closing("")

    def finish() -> bool:
        session._orders.stop_reason = "No checkpoint became durable for 61 s."
        return False

    session._saver.last_step, session._saver.finish = 7, finish
    with pytest.raises(DurableAgeError, match=r"61 s.* after step 7 lies on the nodes' disks"):
        session.close()
    assert session.left == 1


def test_a_last_state_without_room_is_said_to_have_none() -> None:
    session = Closing("")
    with pytest.raises(StagingFullError, match="step 7, could not be staged"):
        session.close()
    assert session.left == 0
