"""Laws of the training side of saves to several tiers, with a real vault and coordinator, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import RayTaskError

from near_nodes import NearNodes
from ray_goodput.actors.names import attempt_dir
from ray_goodput.clock import ManualClock, SystemClock
from ray_goodput.config import CheckpointConfig
from ray_goodput.core.commit import CheckpointId
from ray_goodput.core.durable_age import judge_age
from ray_goodput.core.run_state import HeartbeatAnswer
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import DurableAgeError, StorageError
from ray_goodput.train import saver as saver_module
from ray_goodput.train.decide import decide, raise_if_too_old
from ray_goodput.train.orders import RankOrders
from ray_goodput.train.saver import Saver
from ray_goodput.train.world import ControlWord, World


class Refs:
    """Stands for Ray in the saver: a call is done when it is made, unless it is `stuck`, or `slow`: once waited for."""

    def __init__(self) -> None:
        self.stuck: set[int] = set()
        self.while_waiting: Callable[[], None] = lambda: None
        self.slow: set[int] = set()

    def wait(self, refs: list[Any], **how: Any) -> tuple[list[Any], list[Any]]:
        if how.get("timeout"):
            self.while_waiting()
            self.slow -= {ref["number"] for ref in refs}
        open_yet = self.stuck | self.slow
        return [r for r in refs if r["number"] not in open_yet], [r for r in refs if r["number"] in open_yet]

    def get(self, ref: Any) -> None:
        if ref["error"] is not None:
            raise ref["error"]


class OneRank:
    """A saver of one rank whose vault and coordinator are the real ones, called directly."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.nodes = NearNodes(tmp_path, ("a",))
        self.refs = Refs()
        self.refs_made = 0
        monkeypatch.setattr(saver_module, "ray", self.refs)
        slots = attempt_dir(tmp_path / "a" / "slots", 1)
        monkeypatch.setattr(Saver, "_choose_slots", lambda self, plan: slots)
        coordinator = self.nodes.coordinator
        quiet = SimpleNamespace(remote=lambda *_: None)
        vault = SimpleNamespace(persist=SimpleNamespace(remote=self.persist))
        worker: Any = SimpleNamespace(
            world=World(0, 1, None),
            clock=SystemClock(),
            attempt=1,
            orders=RankOrders(0, ()),
            vault=vault,
            coordinator=SimpleNamespace(
                failure_history=lambda: (0, 0.0),
                restores_by_tier=coordinator.restores_by_tier,
                identity=coordinator.identity,
                wait_committed=coordinator.wait_committed,
                handle=SimpleNamespace(save_stalled=quiet, save_skipped=quiet),
            ),
        )
        spec: Any = SimpleNamespace(checkpoint=CheckpointConfig(**config), key="k")
        self.orders = worker.orders
        self.saver = Saver(spec, worker)
        self.saver.begin(0)
        self.model = torch.nn.Linear(3, 3)
        self.stateful = {"position": Position()}

    def persist(self, staged: Any) -> dict[str, Any]:
        self.refs_made += 1
        if self.refs_made - 1 in self.refs.stuck:
            return {"number": self.refs_made - 1, "error": None}
        error = None
        try:
            self.nodes.vaults["a"].persist(staged)
        except StorageError as cause:
            error = RayTaskError("persist", "", cause)
        return {"number": self.refs_made - 1, "error": error}

    def save(self, step: int, *, must: bool = False, tier: SaveTier = SaveTier.STORAGE) -> bool:
        self.stateful["position"].step = step
        state: dict[str, Any] = {"model": self.model, "optimizer": None, "stateful": self.stateful, "cursors": {}}
        return self.saver.save(step=step, must=must, tier=tier, **state)

    def close(self) -> None:
        self.saver._stager.close()
        self.nodes.coordinator.stop()


class Position:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OneRank]]:
    made: list[OneRank] = []

    def make(**config: Any) -> OneRank:
        made.append(OneRank(tmp_path, monkeypatch, **config))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_run_saves_each_step_as_far_as_its_tiers_say_and_a_restart_finds_the_newest(one_rank: Any) -> None:
    rank = one_rank(every=6, every_local=2)
    tiers = {}
    for step in range(1, 12):
        tier = rank.saver.due(step)
        if tier is not SaveTier.NONE:
            assert rank.save(step, tier=tier)
            tiers[step] = tier.label
    assert tiers == {2: "local", 4: "local", 6: "storage", 8: "local", 10: "local"}
    assert rank.nodes.coordinator.committed_step() == 6 and rank.saver.last_step == 6
    rank.nodes.hold(2)
    record = rank.nodes.coordinator.resume_point(2)
    assert record.checkpoint == CheckpointId(10, 1)


def test_while_the_storage_is_away_saves_go_to_the_nodes_instead(one_rank: Any) -> None:
    rank = one_rank(every=2, every_local=1)
    rank.refs.stuck = {0, 1}  # the first two uploads never come back: one slot is left, for near saves
    assert rank.save(2) and rank.save(4)
    assert not rank.save(6) and rank.saver.skipped == 1
    rank.nodes.hold(2)
    assert rank.nodes.coordinator.resume_point(2).checkpoint == CheckpointId(6, 1)


def test_a_save_to_storage_is_not_skipped_for_a_near_save_that_is_about_to_arrive(one_rank: Any) -> None:
    rank = one_rank(every="auto")
    rank.refs.slow = {0}
    assert rank.save(1, tier=SaveTier.LOCAL)
    assert rank.save(2) and rank.saver.skipped == 0
    assert rank.nodes.coordinator.committed_step() == 2


def test_the_last_state_is_committed_though_a_near_save_has_it_already(one_rank: Any) -> None:
    rank = one_rank(every=100, every_local=1)
    assert rank.save(3, tier=SaveTier.LOCAL) and rank.saver.last_step == 0
    assert rank.save(3, must=True)
    rank.saver.finish()
    assert rank.nodes.coordinator.committed_step() == 3


def test_leaving_without_the_storage_waits_for_near_saves_only(one_rank: Any) -> None:
    rank = one_rank(every=1)
    rank.refs.stuck = {0}
    assert rank.save(1)
    assert rank.save(2, tier=SaveTier.PEER) and rank.saver.leave()
    rank.nodes.hold(2)
    assert rank.nodes.coordinator.resume_point(2).checkpoint == CheckpointId(2, 1)


def too_old(rank: OneRank) -> str:
    """The rank hears from the coordinator that the run is to stop."""
    reason = judge_age(age_s=61.0, limit_s=60.0, committed_step=-1, step=2).reason
    rank.orders.hear(HeartbeatAnswer(next_record=0, stop_reason=reason))
    return reason


def last_step(rank: OneRank, step: int) -> None:
    """What `session.step` and, after the loop, `session.close` do once the run is to stop."""
    word = ControlWord(World(0, 1, None))
    word.post(decide(rank.orders, rank.saver.due(step), stop=False))
    agreed = word.read()
    assert agreed.stop and not agreed.save, "nothing begins that would wait for the storage"
    rank.save(step, tier=agreed.near)
    raise_if_too_old([rank.orders.stop_reason], step, lambda: rank.save(step, tier=agreed.near) and rank.saver.leave())


@pytest.mark.parametrize("saves", [1, 2])
def test_a_run_under_auto_stops_for_a_storage_that_is_away_with_its_last_state_on_the_nodes(
    one_rank: Any, saves: int
) -> None:
    rank = one_rank(every="auto", max_durable_age="60s", on_durable_age="stop")
    rank.refs.stuck = {0}  # its upload never ends; what comes next goes to the nodes
    for step in range(1, saves + 1):
        rank.save(step)
    assert rank.nodes.coordinator.committed_step() == -1
    reason = too_old(rank)
    with pytest.raises(DurableAgeError) as raised:
        last_step(rank, 3)
    for part in (reason, "max_durable_age=60 s", 'on_durable_age="stop"', "after step 3 lies on the nodes' disks"):
        assert part in str(raised.value)
    rank.nodes.hold(2)
    assert rank.nodes.coordinator.resume_point(2).checkpoint == CheckpointId(3, 1)


def test_a_last_state_that_found_no_room_on_the_disk_is_not_said_to_lie_there(one_rank: Any) -> None:
    rank = one_rank(every="auto", max_durable_age="60s", on_durable_age="stop")
    folder = rank.nodes.local("a")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_bytes(b"")  # nothing can be kept under it
    too_old(rank)
    with pytest.raises(DurableAgeError, match="Not all of it lies on the disks"):
        last_step(rank, 3)


def test_a_save_that_waits_for_a_slot_waits_no_longer_than_the_run_may(one_rank: Any) -> None:
    rank = one_rank(every=1, when_full="wait", max_durable_age="60s", on_durable_age="stop")
    rank.refs.stuck = {0, 1}
    assert rank.save(1) and rank.save(2)
    rank.refs.while_waiting = lambda: bool(too_old(rank))
    assert not rank.save(3), "skipped, for the run is to stop: its slots stay with uploads that cannot end"


def test_the_end_of_a_run_waits_for_its_last_upload_no_longer_than_the_run_may(one_rank: Any) -> None:
    rank = one_rank(every=1, max_durable_age="60s", on_durable_age="stop")
    rank.refs.stuck = {0}
    assert rank.save(3, must=True)
    rank.refs.while_waiting = lambda: bool(too_old(rank))
    assert not rank.saver.finish(), "its upload never ends"
    with pytest.raises(DurableAgeError, match="after step 3 lies on the nodes' disks"):
        raise_if_too_old([rank.orders.stop_reason], 3, lambda: rank.save(3, tier=SaveTier.PEER) and rank.saver.leave())
    rank.nodes.hold(2)
    assert rank.nodes.coordinator.resume_point(2).checkpoint == CheckpointId(3, 1)


def test_a_run_that_was_told_to_stop_when_its_last_save_was_committed_already_ends_well(one_rank: Any) -> None:
    rank = one_rank(every=1, max_durable_age="60s", on_durable_age="stop")
    assert rank.save(3, must=True) and rank.nodes.coordinator.committed_step() == 3
    too_old(rank)
    assert rank.saver.finish()


def test_that_the_end_of_a_run_waits_long_is_said_once(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    rank = one_rank(every=1)
    rank.saver._clock = clock = ManualClock()
    assert rank.save(3, must=True)
    rank.refs.stuck = {0}  # it is done, but Ray has not said so yet
    waits = []

    def wait_on() -> None:
        clock.advance(20.0)
        waits.append(1)
        if len(waits) == 9:
            rank.refs.stuck = set()

    rank.refs.while_waiting = wait_on
    assert rank.saver.finish()
    said = [record.getMessage() for record in caplog.records if "last save, of step 3" in record.getMessage()]
    assert len(said) == 1 and "max_durable_age" in said[0]


def test_who_leaves_after_notice_waits_for_the_commit_and_for_no_copy_that_the_vault_still_makes(one_rank: Any) -> None:
    rank = one_rank(every=1)
    assert rank.save(3, must=True) and rank.nodes.coordinator.committed_step() == 3
    rank.refs.stuck = {0}  # the vault copies the slot to NVMe
    waits: list[int] = []
    rank.refs.while_waiting = lambda: waits.append(1)
    assert rank.saver.wait_committed(45.0) and not waits
