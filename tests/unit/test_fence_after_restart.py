"""C6 over a restart of the coordinator: what an earlier life told an attempt and could not note down fences as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from journal_pages import page
from near_nodes import NearNodes
from ray_goodput.actors import coordinator as coordinator_module
from ray_goodput.core.commit import CheckpointId, StagedSlice
from ray_goodput.core.near_copies import NearRecord
from ray_goodput.core.run_state import AttemptStart, WorkerInfo
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import FencedError

FROM_A_COMMIT = AttemptStart(near=None)
Persist = Callable[[Sequence[StagedSlice]], list["Future[None]"]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[NearNodes]:
    """A run whose attempt 1 has committed step 10, and whose attempt 2 has begun."""
    made = NearNodes(tmp_path)
    for attempt in (1, 2):
        made.coordinator.group_allocated(workers(attempt))
        if attempt == 1:
            made.coordinator.resumed(1, 0, "none")
            made.persist(made.stage(10))
    yield made
    made.coordinator.stop()


@pytest.fixture
def persist(nodes: NearNodes) -> Iterator[Persist]:
    """Vaults at work beside the test; what still waits at its end is let go."""
    with ThreadPoolExecutor(8) as pool:
        yield lambda slices: [pool.submit(nodes.persist, [staged]) for staged in slices]
        nodes.coordinator.resume_point(99)


def workers(pid: int) -> list[WorkerInfo]:
    return [WorkerInfo(world_rank=rank, pid=pid, node_id=n, node_ip="10.0.0.1") for rank, n in enumerate(("a", "b"))]


def beat(nodes: NearNodes, attempt: int, start: AttemptStart | None) -> None:
    nodes.coordinator.heartbeat(attempt, 0, page(attempt, 0, []), [], None, start)


def told(nodes: NearNodes, attempt: int = 2) -> CheckpointId:
    record = nodes.coordinator.resume_point(attempt)
    assert record is not None
    return record.checkpoint


def test_a_late_slice_waits_for_the_living_attempts_word_and_then_is_fenced(nodes: NearNodes, persist: Persist) -> None:
    late = nodes.stage(20)
    assert told(nodes) == CheckpointId(10, 1)
    nodes.restart_coordinator()  # before it heard that the ranks of attempt 2 have loaded, or could write it down
    calls = persist(late)
    assert len(wait(calls, timeout=0.5).done) < len(calls), "committed on no word but a dead attempt's"
    beat(nodes, 2, None)  # a word, but not about that
    assert len(wait(calls, timeout=0.2).done) < len(calls)
    beat(nodes, 2, FROM_A_COMMIT)
    assert FencedError in {type(call.exception(10)) for call in calls}
    assert nodes.coordinator.committed_step() == 10
    assert told(nodes, 3) == CheckpointId(10, 1), "its copies on the nodes, told again meanwhile, are no choice either"


def test_the_save_that_the_living_attempt_went_on_from_is_committed_at_its_word(
    nodes: NearNodes, persist: Persist
) -> None:
    trunk, later = nodes.stage(20), nodes.stage(30)
    nodes.hold(2, ["a"])
    nodes.vaults["b"].persist(trunk[1])  # of step 30 node b has nothing
    assert told(nodes) == CheckpointId(20, 1)
    nodes.restart_coordinator()
    calls = persist([*trunk, *later])
    beat(nodes, 2, AttemptStart(near=CheckpointId(20, 1)))
    wait(calls, timeout=10)
    assert [call.exception(0) for call in calls[:2]] == [None, None]
    assert FencedError in {type(call.exception(0)) for call in calls[2:]}
    assert nodes.coordinator.committed_step() == 20


def test_the_living_attempts_own_saves_are_committed_at_its_word(nodes: NearNodes, persist: Persist) -> None:
    told(nodes)
    nodes.restart_coordinator()
    calls = persist(nodes.stage(15, attempt=2))
    beat(nodes, 2, FROM_A_COMMIT)
    assert [call.exception(10) for call in calls] == [None, None]
    assert nodes.coordinator.committed_step() == 15


def test_an_attempt_that_asks_the_new_life_needs_no_word(nodes: NearNodes, persist: Persist) -> None:
    late = nodes.stage(20, tier=SaveTier.STORAGE)
    nodes.restart_coordinator()
    nodes.persist(late[:1])
    assert told(nodes) == CheckpointId(10, 1)
    with pytest.raises(FencedError):
        nodes.persist(late[1:])
    nodes.persist(nodes.stage(15, attempt=2))
    assert nodes.coordinator.committed_step() == 15


def test_what_a_dead_attempt_left_is_committed_when_nobody_says_a_word(
    nodes: NearNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "_WORD_WAIT_S", 0.0)
    nodes.restart_coordinator()
    beat(nodes, 2, None)  # it starts, and has not asked
    nodes.persist(nodes.stage(20))
    assert nodes.coordinator.committed_step() == 20


def test_a_word_of_an_attempt_that_was_replaced_lets_nothing_go(nodes: NearNodes, persist: Persist) -> None:
    late = nodes.stage(20)
    told(nodes)
    nodes.restart_coordinator()
    beat(nodes, 1, FROM_A_COMMIT)
    calls = persist(late)
    assert len(wait(calls, timeout=0.5).done) < len(calls)
    beat(nodes, 2, FROM_A_COMMIT)
    assert FencedError in {type(call.exception(10)) for call in calls}


def test_copies_that_lead_elsewhere_are_no_choice_though_told_again_before_the_word(nodes: NearNodes) -> None:
    nodes.persist(nodes.stage(20, tier=SaveTier.LOCAL))
    nodes.silent = {"b"}
    assert told(nodes) == CheckpointId(10, 1)
    nodes.silent = set()
    nodes.restart_coordinator()
    for vault in nodes.vaults.values():
        vault.land_again()
    beat(nodes, 2, FROM_A_COMMIT)
    assert told(nodes, 3) == CheckpointId(10, 1)


def test_the_last_word_about_a_start_counts(nodes: NearNodes) -> None:
    staged = nodes.stage(20)
    nodes.hold(2)
    record = nodes.coordinator.resume_point(2)
    assert isinstance(record, NearRecord)
    nodes.restart_coordinator()
    beat(nodes, 2, AttemptStart(near=record.checkpoint))
    nodes.coordinator.resumed(2, 10, "local")  # its copies turned out to be damaged
    with pytest.raises(FencedError):
        nodes.persist(staged)
    assert nodes.coordinator.committed_step() == 10


def test_a_word_that_was_under_way_while_the_attempt_was_told_anew_undoes_nothing(nodes: NearNodes) -> None:
    late = nodes.stage(20)
    nodes.hold(2)
    assert told(nodes) == CheckpointId(20, 1)
    nodes.coordinator.mark_bad(CheckpointId(20, 1), "one copy is damaged")
    assert told(nodes) == CheckpointId(10, 1)
    beat(nodes, 2, AttemptStart(near=CheckpointId(20, 1)))  # sent before the second answer came
    with pytest.raises(FencedError):
        nodes.persist(late)
    assert nodes.coordinator.committed_step() == 10


def test_damaged_copies_told_of_by_an_earlier_life_take_no_commit_made_meanwhile_out_of_the_choice(
    nodes: NearNodes,
) -> None:
    staged = nodes.stage(20)
    nodes.hold(2)
    assert told(nodes) == CheckpointId(20, 1)
    nodes.restart_coordinator()
    beat(nodes, 2, AttemptStart(near=CheckpointId(20, 1)))
    nodes.persist(staged)  # whole in storage by now
    nodes.coordinator.mark_bad(CheckpointId(20, 1), "the copies on the nodes, which attempt 2 was told to read")
    assert told(nodes) == CheckpointId(20, 1)
    nodes.coordinator.mark_bad(CheckpointId(20, 1), "the commit itself")
    assert told(nodes) == CheckpointId(10, 1)
