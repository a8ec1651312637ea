"""A slot has one owner at a time, is described exactly while it is complete, and never takes the process down."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ray_goodput.checkpoint import slots
from ray_goodput.checkpoint.plan import OBJECTS_NAME, Planner
from ray_goodput.checkpoint.sidecar import read_sidecar, sidecar_path, slice_from_dict, slice_to_dict, staged_in
from ray_goodput.checkpoint.slots import SlotEvent, SlotState, transition
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import StateTree, collect_state
from ray_goodput.core.commit import METADATA_NAME, CheckpointId
from ray_goodput.errors import CheckpointError, CorruptCheckpointError, StagingFullError

F, S, D, L, U, C = SlotState
LEGAL = {
    (F, SlotEvent.CLAIM): S,
    (S, SlotEvent.ABORT): F,
    (S, SlotEvent.STAGED): D,
    (D, SlotEvent.FLUSHED): L,
    (D, SlotEvent.UPLOADED): U,
    (L, SlotEvent.UPLOADED): U,
    (U, SlotEvent.COMMITTED): C,
    (D, SlotEvent.RELEASE): F,
    (L, SlotEvent.RELEASE): F,
    (U, SlotEvent.RELEASE): F,
    (C, SlotEvent.RELEASE): F,
}


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("event", SlotEvent)
def test_a_slot_moves_only_along_the_table(state: SlotState, event: SlotEvent) -> None:
    if (state, event) in LEGAL:
        assert transition(state, event) is LEGAL[state, event]
    else:
        with pytest.raises(CheckpointError, match=state.name):
            transition(state, event)


class Counter:
    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def tree(counter: Counter) -> StateTree:
    return collect_state(model=nn.Linear(3, 4), stateful={"counter": counter})


def make_stager(tree: StateTree, folder: Path, num_slots: int = 2) -> Stager:
    return Stager(Planner(world_rank=0, world_size=1).plan_for(tree), folder, num_slots=num_slots)


def test_no_slot_is_used_twice_before_it_is_released(tree: StateTree, tmp_path: Path) -> None:
    stager = make_stager(tree, tmp_path)
    first = stager.stage(tree, CheckpointId(1, 0), rank_state=b"{}")
    second = stager.stage(tree, CheckpointId(2, 0), rank_state=b"{}")
    assert first is not None and second is not None
    assert first.slot_path != second.slot_path
    assert stager.stage(tree, CheckpointId(3, 0), rank_state=b"{}") is None
    assert [s.checkpoint.step for s in staged_in(tmp_path)] == [1, 2]
    stager.release(first.slot_path)
    stager.release(first.slot_path)
    assert stager.num_free == 1
    third = stager.stage(tree, CheckpointId(3, 0), rank_state=b"{}")
    assert third is not None and third.slot_path == first.slot_path
    assert [s.checkpoint.step for s in staged_in(tmp_path)] == [2, 3]


def test_a_slot_is_described_exactly_while_it_is_complete(tree: StateTree, tmp_path: Path) -> None:
    stager = make_stager(tree, tmp_path, num_slots=1)
    staged = stager.stage(tree, CheckpointId(1, 0), rank_state=b'{"a": 1}', cursors={"t": {"n": 1}}, extra={"k": 2})
    assert staged is not None
    assert read_sidecar(sidecar_path(staged.slot_path)) == staged
    assert slice_from_dict(json.loads(json.dumps(slice_to_dict(staged)))).extents == staged.extents
    stager.release(staged.slot_path)
    assert not list(staged_in(tmp_path))
    pending = stager.begin(tree, CheckpointId(2, 0), rank_state=b"{}")
    assert pending is not None
    assert not list(staged_in(tmp_path))
    assert stager.wait() == pending.finish()
    assert stager.wait() is None
    assert [s.checkpoint.step for s in staged_in(tmp_path)] == [2]


def test_objects_and_rank_state_may_outgrow_what_was_reserved(
    tree: StateTree, counter: Counter, tmp_path: Path
) -> None:
    stager = make_stager(tree, tmp_path, num_slots=1)
    for size in (1, 3 << 20, 5):
        counter.value = "x" * size
        again = collect_state(model=nn.Linear(3, 4), stateful={"counter": counter})
        staged = stager.stage(again, CheckpointId(size, 0), rank_state=b"r" * size)
        assert staged is not None and staged.metadata is not None
        slot = Path(staged.slot_path).read_bytes()
        parts = {e.name: slot[e.offset : e.offset + e.size_bytes] for e in staged.extents}
        assert list(parts) == ["__0_0.distcp", OBJECTS_NAME, METADATA_NAME, "rank-00000.json"]
        assert parts["rank-00000.json"] == b"r" * size
        assert parts[METADATA_NAME] == staged.metadata
        stager.release(staged.slot_path)


def test_a_rank_with_nothing_to_write_still_has_a_slice(tmp_path: Path) -> None:
    empty = StateTree()
    stager = make_stager(empty, tmp_path)
    staged = stager.stage(empty, CheckpointId(0, 0), rank_state=b"")
    assert staged is not None
    assert [(e.name, e.size_bytes > 0) for e in staged.extents] == [(METADATA_NAME, True), ("rank-00000.json", False)]


def test_a_structure_that_changes_gets_a_new_image_in_the_same_slots(tree: StateTree, tmp_path: Path) -> None:
    stager = make_stager(tree, tmp_path)
    stager.open()
    larger = collect_state(model=nn.Linear(300, 400))
    stager.use(Planner(world_rank=0, world_size=1).plan_for(larger))
    staged = stager.stage(larger, CheckpointId(1, 0), rank_state=b"{}")
    assert staged is not None and staged.extents[0].size_bytes > 300 * 400 * 4
    slot = Path(staged.slot_path).read_bytes()
    assert larger.tensors["model.weight"].numpy().tobytes() in slot
    assert len(list(tmp_path.glob("*.slot"))) == 2


def _no_room(fd: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_room_is_an_error_with_numbers_that_leaves_nothing_behind(
    tree: StateTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stager = make_stager(tree, tmp_path)
    with monkeypatch.context() as context:
        context.setattr(slots.os, "posix_fallocate", _no_room)
        with pytest.raises(StagingFullError, match=r"needs 1 MiB more in .* has [\d,]+ MiB free .*staging_dir="):
            stager.stage(tree, CheckpointId(1, 0), rank_state=b"{}")
    assert stager.num_free == 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0
    assert stager.stage(tree, CheckpointId(2, 0), rank_state=b"{}") is not None


def test_a_leaf_that_cannot_be_saved_gives_the_slot_back(tree: StateTree, counter: Counter, tmp_path: Path) -> None:
    stager = make_stager(tree, tmp_path)
    tree.objects["counter.value"] = object()
    with pytest.raises(CheckpointError, match=r"counter\.value"):
        stager.stage(tree, CheckpointId(1, 0), rank_state=b"{}")
    assert stager.num_free == 2
    assert not list(staged_in(tmp_path))


def test_closing_keeps_what_a_vault_still_needs(tree: StateTree, tmp_path: Path) -> None:
    stager = make_stager(tree, tmp_path)
    stager.open()
    staged = stager.stage(tree, CheckpointId(1, 0), rank_state=b"{}")
    stager.close()
    assert staged is not None
    assert [s.slot_path for s in staged_in(tmp_path)] == [staged.slot_path]
    assert list(tmp_path.glob("*.slot")) == [Path(staged.slot_path)]


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut": lambda slot: os.truncate(slot, 100),
    "gone": lambda slot: slot.unlink(),
    "garbage": lambda slot: sidecar_path(slot).write_text("{"),
    "version": lambda slot: sidecar_path(slot).write_text('{"format": "ray_goodput.slot", "version": 2}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_slot_is_left_out(damage: str, tree: StateTree, tmp_path: Path) -> None:
    staged = make_stager(tree, tmp_path).stage(tree, CheckpointId(1, 0), rank_state=b"{}")
    assert staged is not None
    DAMAGE[damage](Path(staged.slot_path))
    with pytest.raises(CorruptCheckpointError):
        read_sidecar(sidecar_path(staged.slot_path))
    assert list(staged_in(tmp_path)) == []


def test_a_worker_killed_while_staging_leaves_only_complete_slices(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from ray_goodput.checkpoint.plan import Planner
        from ray_goodput.checkpoint.stage import Stager
        from ray_goodput.checkpoint.state import StateTree
        from ray_goodput.core.commit import CheckpointId
        tree = StateTree()
        tree.add(("value",), torch.zeros(1 << 20))
        stager = Stager(Planner(world_rank=0, world_size=1).plan_for(tree), sys.argv[1])
        step = 0
        while True:
            step += 1
            tree.tensors["value"].fill_(step)
            staged = stager.stage(tree, CheckpointId(step, 0), rank_state=b"{}")
            print(step, flush=True)
            if step > 1:
                stager.release(previous)
            previous = staged.slot_path
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = 0
    for line in process.stdout:
        last = int(line)
        if last == 20:
            process.send_signal(signal.SIGKILL)
            break
    rest = [int(line) for line in process.stdout if line.strip().isdigit()]
    process.wait()
    found = list(staged_in(tmp_path))
    newest = max(rest, default=last)
    assert found and found[-1].checkpoint.step >= newest - 1
    for staged in found:
        data = Path(staged.slot_path).read_bytes()
        image = staged.extents[0]
        layout_start = data[image.offset : image.offset + image.size_bytes].index(
            torch.full((4,), float(staged.checkpoint.step)).numpy().tobytes()
        )
        values = torch.frombuffer(bytearray(data[layout_start : layout_start + (4 << 20)]), dtype=torch.float32)
        assert torch.all(values == staged.checkpoint.step)
