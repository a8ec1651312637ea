"""C2: whatever byte of a committed checkpoint is changed, or object cut short or lost, the restore finds it, says so,
and goes on from the commit before."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from committing import commit, put_slice
from ray_goodput.actors.commits import CHECKPOINTS, CommitLog
from ray_goodput.checkpoint.agreed_restore import load_newest
from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.sources import StoreSource
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.clock import SystemClock
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId
from ray_goodput.storage.local import LocalStore
from thread_ranks import ThreadRanks, in_ranks

NUM_FLIPS = 200
SEED = 20260

Objects = dict[str, bytes]


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 9)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with commits of steps 1 and 2."""
    root = tmp_path_factory.mktemp("flips")
    for step in (1, 2):
        model, optimizer = build(step)
        tree = collect_state(model=model, optimizer=optimizer)
        plan = Planner(world_rank=0, world_size=1).plan_for(tree)
        staged = Stager(plan, root / "slots").stage(tree, CheckpointId(step, 1), rank_state=capture_rng())
        assert staged is not None
        folder = root / "run" / CHECKPOINTS / staged.checkpoint.folder
        commit(folder, [staged], put_slice(folder, staged))
    return root / "run"


@pytest.fixture(scope="module")
def objects(run: Path) -> Objects:
    folder = run / CHECKPOINTS / CheckpointId(2, 1).folder
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    assert set(found) == {".metadata", COMMIT_NAME, "__0_0.distcp", "__0_1.distcp", "rank-00000.json"}
    return found


@cache
def expected_weights(step: int) -> list[torch.Tensor]:
    return list(build(step)[0].state_dict().values())


@cache
def live() -> tuple[nn.Module, torch.optim.Optimizer]:
    return build(3)


def resumed_step(run: Path, scratch: Path) -> int:
    """What a start resumes after; its weights must be exactly those of that step."""
    store = LocalStore(run)
    log = CommitLog(run="run", store=store, clock=SystemClock())
    log.open()
    model, optimizer = live()
    for value in model.state_dict().values():
        value.add_(1)

    def restore(ranks: ThreadRanks) -> int:
        loaded = load_newest(
            ranks,
            choose=lambda: log.fence_and_choose(2),
            mark_bad=log.mark_bad,
            open_source=lambda record: StoreSource(
                record, store, f"{CHECKPOINTS}/{record.checkpoint.folder}", scratch / record.checkpoint.folder
            ),
            model=model,
            optimizer=optimizer,
            stateful={},
        )
        return loaded.record.checkpoint.step if loaded is not None else 0

    (step,) = in_ranks(1, restore)
    assert isinstance(step, int), step
    found = model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(found, expected_weights(step), strict=True))
    return step


def damage_is_found(
    run: Path,
    objects: Objects,
    scratch: Path,
    name: str,
    change: Callable[[Path], object],
    log: pytest.LogCaptureFixture,
) -> bool:
    path = run / CHECKPOINTS / CheckpointId(2, 1).folder / name
    log.clear()
    try:
        change(path)
        no_checkpoint = name == COMMIT_NAME and not path.exists()  # a folder without a record: nothing to speak of
        step = resumed_step(run, scratch)
    finally:
        path.write_bytes(objects[name])
        shutil.rmtree(scratch, ignore_errors=True)
    said = CheckpointId(2, 1).folder in log.text
    return step == 1 and (said or no_checkpoint)


def test_the_undamaged_run_resumes_from_its_newest_commit(run: Path, tmp_path: Path) -> None:
    assert resumed_step(run, tmp_path / "cache") == 2


def test_each_of_200_flipped_bits_is_found_before_training_goes_on(
    run: Path, objects: Objects, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(SEED)
    flips = [
        (name, dice.randrange(len(objects[name])), 1 << dice.randrange(8))
        for name in dice.choices(sorted(objects), k=NUM_FLIPS)
    ]
    assert {name for name, _, _ in flips} == set(objects)
    missed = []
    with caplog.at_level(logging.WARNING, logger="ray_goodput"):
        for name, place, bit in flips:
            changed = bytearray(objects[name])
            changed[place] ^= bit
            if not damage_is_found(
                run, objects, tmp_path / "cache", name, lambda path, data=bytes(changed): path.write_bytes(data), caplog
            ):
                missed.append((name, place, bit))
    assert missed == [], f"seed {SEED}"
    assert resumed_step(run, tmp_path / "cache") == 2


@pytest.mark.parametrize("damage", ["short", "empty", "missing", "long"])
def test_an_object_that_is_cut_short_or_gone_is_found(
    run: Path, objects: Objects, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    changes: dict[str, Callable[[Path], object]] = {
        "short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "empty": lambda path: path.write_bytes(b""),
        "missing": lambda path: path.unlink(),
        "long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    }
    with caplog.at_level(logging.WARNING, logger="ray_goodput"):
        found = {
            name: damage_is_found(run, objects, tmp_path / "cache", name, changes[damage], caplog) for name in objects
        }
    assert all(found.values()), found
