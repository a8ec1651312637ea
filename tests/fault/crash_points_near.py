"""The vault of a run with near tiers dies (SIGKILL) before one of its storage calls, or before one of its messages to
the coordinator (a copy lies on the node, a slice has landed): what was staged is never lost, and storage alone holds a
resume point, as in `crash_points.py`."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fault.crash_points import (
    ATTEMPT,
    COMMITTED,
    SAVING,
    Scene,
    make_scene,
    make_vault,
    open_log,
    resume_point,
    start_and_save,
    start_process,
)
from fault.save_process import build, digest
from ray_goodput.actors.commits import CommitLog
from ray_goodput.actors.resume_points import ResumePoints
from ray_goodput.checkpoint.reader import load_checkpoint
from ray_goodput.checkpoint.sources import LocalFirstSource
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import CheckpointId, LandedSlice, StagedSlice
from ray_goodput.core.near_copies import NearRecord
from ray_goodput.errors import FencedError
from ray_goodput.storage import open_store
from ray_goodput.storage.faults import FaultyStore


class NearCoordinator:
    """The commit log and the choice among copies on nodes."""

    def __init__(self, log: CommitLog) -> None:
        self.log = log
        self.points = ResumePoints("run", "run", log, answering=lambda nodes: nodes)

    def identity(self) -> str:
        return "run"

    def held(self, landed: LandedSlice, node_id: str) -> CheckpointId | None:
        return self.points.held(landed, node_id)

    def landed(self, landed: LandedSlice) -> None:
        self.log.landed(landed)

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None:
        return None


class _FarAndDying:
    """The coordinator in another process; every message to it is a point like a storage call."""

    def __init__(self, pipe: Any, point: Callable[[], None]) -> None:
        self._pipe = pipe
        self._point = point
        self._lock = threading.Lock()

    def identity(self) -> str:
        return "run"

    def held(self, landed: LandedSlice, node_id: str) -> CheckpointId | None:
        return self._ask(("held", landed, node_id))

    def landed(self, landed: LandedSlice) -> None:
        self._ask(("landed", landed))

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None:
        return None

    def _ask(self, message: tuple[Any, ...]) -> Any:
        self._point()
        with self._lock:
            self._pipe.send(message)
            return self._pipe.recv()


def near_vault_life(spec: StoreSpec, node: Path, slices: Sequence[StagedSlice], at: int, pipe: Any) -> None:
    faulthandler.dump_traceback_later(40)
    torch.set_num_threads(1)
    numbers = itertools.count()

    def point() -> None:
        if next(numbers) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    far = _FarAndDying(pipe, point)
    store = FaultyStore(open_store(spec), before=lambda op, key, n: point())
    vault = make_vault(store, node, far, near=far)
    for staged in slices:
        vault.persist(staged)
    pipe.send(("end",))


def strike_near_vault(scene: Scene, at: int) -> bool:
    """False if the vault has no such point. Raises AssertionError if anything is wrong."""
    where = f"vault with copies, point {at}"
    store = open_store(scene.spec)
    coordinator = NearCoordinator(open_log(store))
    coordinator.log.fence_and_choose(ATTEMPT)
    process, pipe = start_process(near_vault_life, scene.spec, scene.node, scene.slices, at)
    died = False
    try:
        while (message := pipe.recv()) != ("end",):
            call, *arguments = message
            pipe.send(getattr(coordinator, call)(*arguments))
    except EOFError:
        died = True
    process.join(20)
    assert process.exitcode == (-signal.SIGKILL if died else 0), f"{where}: {process.exitcode}"
    step, weights = resume_point(scene.spec)
    assert step in (COMMITTED, SAVING) and weights == scene.weights[step], f"{where}: {step} from storage alone"
    go_on_from_the_node(scene, coordinator, where)
    return died


def go_on_from_the_node(scene: Scene, coordinator: NearCoordinator, where: str) -> None:
    """All workers died too: the next attempt gets what was staged, from a new life of the vault, and its upload is then
    finished as a part of the run's history."""
    store = open_store(scene.spec)
    vault = make_vault(store, scene.node, coordinator, near=coordinator)
    vault.hold(ATTEMPT + 1)
    record = coordinator.points.choose(ATTEMPT + 1)
    assert record is not None and record.checkpoint == CheckpointId(SAVING, ATTEMPT), f"{where}: {record}"
    committed = coordinator.log.is_committed(record.checkpoint)
    assert committed or isinstance(record, NearRecord), f"{where}: offered as a commit, and is none"
    model, optimizer = build()
    folder = scene.node / "local" / record.checkpoint.folder
    load_checkpoint(LocalFirstSource(record, [folder]), model=model, optimizer=optimizer)
    assert digest(model) == scene.weights[SAVING], f"{where}: the copies are not of step {SAVING}"
    vault.adopt(ATTEMPT + 1)
    coordinator.log.prune()
    assert resume_point(scene.spec) == (SAVING, scene.weights[SAVING]), f"{where}: the save was not finished"
    try:
        coordinator.landed(_slice_of_a_dead_attempt(scene))
    except FencedError:
        return
    raise AssertionError(f"{where}: a later save of the attempt that was replaced is taken")


def _slice_of_a_dead_attempt(scene: Scene) -> LandedSlice:
    from dataclasses import replace

    late = replace(scene.slices[0], checkpoint=CheckpointId(SAVING + 1, ATTEMPT))
    return LandedSlice(slice=late, objects=(), node_id="node", upload_s=0.0)


def near_points(specs: Callable[[str], StoreSpec], root: Path) -> Iterator[int]:
    """Every point of the vault, one after the other, until it has no more."""
    for at in itertools.count():
        name = f"near-{at}"
        scene = make_scene(specs(name), root / name)
        if not strike_near_vault(scene, at):
            return
        assert start_and_save(scene.spec, root / f"{name}-next") == SAVING
        yield at
