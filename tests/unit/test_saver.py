"""Laws of the training side of a save that need no Ray."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ray_goodput.clock import ManualClock
from ray_goodput.config import CheckpointConfig
from ray_goodput.errors import RunError, StorageError
from ray_goodput.train import saver as saver_module
from ray_goodput.train.orders import RankOrders
from ray_goodput.train.saver import Saver
from ray_goodput.train.world import World


def test_a_coordinator_that_cannot_tell_the_failures_so_far_ends_no_attempt(caplog: pytest.LogCaptureFixture) -> None:
    def no_answer() -> None:
        raise RunError("The actor coordinator:x did not answer.")

    coordinator = SimpleNamespace(failure_history=no_answer)
    worker: Any = SimpleNamespace(world=World(0, 1, None), clock=ManualClock(), coordinator=coordinator, attempt=2)
    spec: Any = SimpleNamespace(checkpoint=CheckpointConfig(every=10))
    saver = Saver(spec, worker)
    with caplog.at_level(logging.WARNING):
        saver.begin(7)
    assert "did not answer" in caplog.text
    assert saver.last_step == 7 and not saver.due(9) and saver.due(10)


def test_a_storage_that_never_came_back_is_one_sentence_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reminded: list[int] = []
    vault = SimpleNamespace(land_again=SimpleNamespace(remote=reminded.append))
    coordinator = SimpleNamespace(wait_committed=lambda checkpoint, timeout_s: False)
    worker: Any = SimpleNamespace(
        world=World(0, 1, None),
        clock=ManualClock(),
        coordinator=coordinator,
        attempt=2,
        vault=vault,
        orders=RankOrders(0, ()),
    )
    monkeypatch.setattr(saver_module.ray, "wait", lambda refs, timeout: (refs, []))
    spec: Any = SimpleNamespace(checkpoint=CheckpointConfig(every=10))
    saver = Saver(spec, worker)
    saver.last_step = 70
    with pytest.raises(StorageError) as raised:
        saver.finish()
    message = str(raised.value)
    assert "\n" not in message
    assert all(part in message for part in ("step 70", "not committed", "is older", "go on from there"))
    assert set(reminded) == {70}, "a coordinator that was restarted would not know of it"
