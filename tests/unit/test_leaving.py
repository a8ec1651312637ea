"""Laws of the moment in which an attempt leaves: save, wait for the commit as long as the node stays, end."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from ray_goodput.clock import ManualClock
from ray_goodput.config import CheckpointConfig
from ray_goodput.core.commit import CheckpointId
from ray_goodput.core.drain import LeaveNotice
from ray_goodput.errors import DrainedError
from ray_goodput.train.saver import Saver
from ray_goodput.train.session import Session
from ray_goodput.train.world import World


class Leaving(Session):
    """A session at step 7 with a saver that tells what it was asked."""

    def __init__(self, notice: LeaveNotice | None, *, room: bool = True, commits: bool = True) -> None:
        self.hurried: list[bool] = []
        self.waited_s: list[float] = []
        hurry = SimpleNamespace(remote=lambda: self.hurried.append(True))
        worker: Any = SimpleNamespace(
            world=World(0, 1, None),
            orders=SimpleNamespace(notice=lambda: notice),
            vault=SimpleNamespace(hurry=hurry),
        )
        self._worker = worker
        self._recorder: Any = SimpleNamespace(span=lambda bucket: nullcontext())
        self._step = 7
        self._room = room
        self._commits = commits
        self._saver: Any = SimpleNamespace(wait_committed=self._wait)

    def _save(self, *, must: bool) -> bool:
        assert must and self.hurried, "the vaults are told before the save"
        return self._room

    def _wait(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return self._commits


NOTICE = LeaveNotice(reason="SIGTERM", ranks=(3,), left_s=25.0)


def test_the_attempt_ends_once_its_last_step_is_committed_and_names_who_goes() -> None:
    session = Leaving(NOTICE)
    with pytest.raises(DrainedError, match="step 7 is committed") as raised:
        session._leave()
    assert raised.value.ranks == (3,) and session.waited_s == [25.0]


@pytest.mark.parametrize("failing", [{"room": False}, {"commits": False}])
def test_it_leaves_in_any_case_and_says_what_was_not_saved(failing: dict[str, bool]) -> None:
    with pytest.raises(DrainedError, match="step 7 could not be committed in time"):
        Leaving(NOTICE, **failing)._leave()


def test_a_notice_that_was_taken_back_changes_nothing() -> None:
    session = Leaving(None)
    session._leave()
    assert not session.hurried


class Coordinator:
    """Commits once `after_s` of its clock have gone by."""

    def __init__(self, clock: ManualClock, after_s: float) -> None:
        self._clock = clock
        self._at_s = clock.mono_s() + after_s

    def wait_committed(self, checkpoint: CheckpointId, timeout_s: float) -> bool:
        assert checkpoint == CheckpointId(7, 2) and 0 < timeout_s <= 20.0
        self._clock.advance(min(timeout_s, max(0.0, self._at_s - self._clock.mono_s())))
        return self._clock.mono_s() >= self._at_s


@pytest.mark.parametrize(("after_s", "committed"), [(0.0, True), (44.0, True), (46.0, False)])
def test_a_commit_is_waited_for_as_long_as_was_said_also_without_anything_under_way(
    after_s: float, committed: bool
) -> None:
    clock = ManualClock()
    coordinator = Coordinator(clock, after_s)
    worker: Any = SimpleNamespace(world=World(0, 1, None), clock=clock, coordinator=coordinator, attempt=2)
    spec: Any = SimpleNamespace(checkpoint=CheckpointConfig(every=10))
    saver = Saver(spec, worker)
    saver.last_step = 7
    before_s = clock.mono_s()
    assert saver.wait_committed(45.0) is committed
    assert clock.mono_s() - before_s == min(after_s, 45.0)
