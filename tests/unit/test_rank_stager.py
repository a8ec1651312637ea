from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ray_goodput.checkpoint import stage as stage_module
from ray_goodput.checkpoint.rank_stager import RankStager
from ray_goodput.checkpoint.sidecar import staged_in
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import StateTree, collect_state
from ray_goodput.core.commit import CheckpointId
from ray_goodput.errors import CheckpointError, StagingFullError
from thread_ranks import ThreadRanks, in_ranks

WORLD = 2


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


def make_tree(value: Any = 1) -> StateTree:
    return collect_state(model=nn.Linear(8, 4), stateful={"held": Holder(value)})


def stage_twice(folder: Path, tree: Callable[[int], StateTree], before_second: Callable[[], Any]) -> list[Any]:
    """Each rank's (first save staged, second save staged, slots free at the end), or what it raised."""

    def rank(ranks: ThreadRanks) -> Any:
        stager = RankStager(ranks, lambda plan: folder)
        told = []
        for step in (1, 2):
            if step == 2 and ranks.world_rank == 0:
                before_second()
            ranks.all_true(True)
            pending = stager.begin(tree(ranks.world_rank), CheckpointId(step, 0), rank_state=b"{}")
            told.append(pending is not None)
            if pending is not None:
                stager.release(pending.finish().slot_path)
        return (*told, stager.num_free)

    return in_ranks(WORLD, rank)


def fail_on_rank_1(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    begin = Stager.begin

    def broken(self: Stager, *args: Any, **kwargs: Any) -> Any:
        if self.plan.world_rank == 1:
            raise error
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(Stager, "begin", broken)


def test_a_rank_without_room_makes_all_ranks_skip_the_save_and_leaves_every_slot_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = StagingFullError("Staging needs 4 MiB more.")
    told = stage_twice(tmp_path, lambda rank: make_tree(), lambda: fail_on_rank_1(monkeypatch, full))
    assert told == [(True, False, 2), (True, False, 2)]
    assert list(staged_in(tmp_path)) == []


def test_a_sidecar_without_room_makes_all_ranks_skip_the_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write = stage_module.write_sidecar

    def full(staged: Any) -> None:
        if staged.world_rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(staged)

    told = stage_twice(
        tmp_path, lambda rank: make_tree(), lambda: monkeypatch.setattr(stage_module, "write_sidecar", full)
    )
    assert told == [(True, False, 2), (True, False, 2)]
    assert list(staged_in(tmp_path)) == []


def test_a_state_that_one_rank_cannot_save_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    unsavable = object()
    told = stage_twice(tmp_path, lambda rank: make_tree(unsavable if rank == 0 else 1), lambda: None)
    assert [type(error) for error in told] == [CheckpointError, CheckpointError]
    assert "held.value" in str(told[0]) and str(told[1]).startswith("Rank 0 cannot save: held.value")


def test_any_other_failure_of_one_rank_is_its_own_and_told_to_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Odd(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    told = stage_twice(tmp_path, lambda rank: make_tree(), lambda: fail_on_rank_1(monkeypatch, Odd("device lost")))
    assert type(told[1]) is Odd and type(told[0]) is RuntimeError
    assert str(told[0]) == "Rank 1 cannot save: Odd: device lost"


def test_slots_are_made_before_the_first_save_and_used_by_it(tmp_path: Path) -> None:
    def rank(ranks: ThreadRanks) -> tuple[list[str], str]:
        stager = RankStager(ranks, lambda plan: tmp_path / str(ranks.world_rank))
        tree = make_tree()
        stager.prepare(tree)
        stager.prepare(tree)
        stager._join()
        slots = [str(path) for path in (tmp_path / str(ranks.world_rank)).glob("*.slot") if path.stat().st_size]
        pending = stager.begin(tree, CheckpointId(1, 0), rank_state=b"{}")
        assert pending is not None
        return slots, pending.finish().slot_path

    for slots, used in in_ranks(WORLD, rank):
        assert len(slots) == 2 and used in slots


def test_slots_without_room_cost_saves_but_not_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = Stager.open

    def full(self: Stager) -> None:
        raise StagingFullError("Staging needs 4 MiB more.")

    def rank(ranks: ThreadRanks) -> list[bool]:
        stager = RankStager(ranks, lambda plan: tmp_path)
        stager.prepare(make_tree())
        told = [stager.begin(make_tree(), CheckpointId(1, 0), rank_state=b"{}") is not None]
        ranks.all_true(True)
        monkeypatch.setattr(Stager, "open", opened)
        ranks.all_true(True)
        told.append(stager.begin(make_tree(), CheckpointId(2, 0), rank_state=b"{}") is not None)
        return told

    monkeypatch.setattr(Stager, "open", full)
    assert in_ranks(WORLD, rank) == [[False, True], [False, True]]


def test_a_new_structure_gets_new_slots(tmp_path: Path) -> None:
    def rank(ranks: ThreadRanks) -> list[int]:
        stager = RankStager(ranks, lambda plan: tmp_path)
        sizes = []
        for step, width in enumerate((4, 4096), start=1):
            tree = collect_state(model=nn.Linear(8, width))
            stager.prepare(tree)
            pending = stager.begin(tree, CheckpointId(step, 0), rank_state=b"{}")
            assert pending is not None
            staged = pending.finish()
            sizes.append(staged.extents[0].size_bytes)
            stager.release(staged.slot_path)
        stager.close()
        return sizes

    small, large = map(sum, zip(*in_ranks(WORLD, rank), strict=True))
    assert large > small
    assert list(tmp_path.iterdir()) == []
