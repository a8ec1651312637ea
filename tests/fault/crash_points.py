"""C1 with real processes: the vault, the coordinator or the worker of a save dies (SIGKILL) before one of its storage
calls; what is left then must be a resume point, and the run must be able to go on.

The victim is a process that makes its own storage calls and ends itself before call number `n`. A vault and a commit
log are the plain classes that the actors wrap; the test's own process stands for Ray: it starts the victim again and
repeats the calls that got no answer, as `max_restarts=-1, max_task_retries=-1` does.

Beside it: `crash_points_worker.py` kills a worker that saves by itself, `crash_points_near.py` a vault that keeps
copies on its node too, `crash_points_dcp.py` a plain `dcp.save` through `rg.StorageWriter`.

`python tests/fault/crash_points.py` (`make crash-points`) tries every point on both kinds of storage.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fault.save_process import Coordinator, build, digest, resume
from ray_goodput.actors.commits import CommitLog
from ray_goodput.actors.names import attempt_dir
from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.clock import SystemClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import CheckpointId, LandedSlice, StagedSlice
from ray_goodput.errors import GoodputError, RunError
from ray_goodput.storage import open_store
from ray_goodput.storage.faults import FaultyStore
from servers import JuiceFSGateway
from thread_ranks import ThreadRanks, in_ranks

RANKS = 2
ATTEMPT = 1
COMMITTED, SAVING = 2, 3  # the newest step that is committed, and the one whose save is struck
NEVER = 10**9
# A server that has imported torch once and nothing else: a process for each crash point costs milliseconds, not
# seconds. Only modules that are found without the tests' `sys.path`, which Python 3.11's server drops: it leaves out
# silently what it cannot import, and then each process takes seconds to import torch, and `torch._dynamo` for its
# first optimizer.
SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(["torch._dynamo", "ray_goodput.checkpoint.reader", "ray_goodput.train.checkpointer"])


@dataclass(frozen=True, slots=True)
class Scene:
    """A run with commits of steps 1 and 2, and step 3 staged by two ranks on the node whose folder is `node`.

    weights: step -> digest of the model after it.
    """

    spec: StoreSpec
    node: Path
    slices: tuple[StagedSlice, ...]
    weights: Mapping[int, str]


def train(model: Any, optimizer: Any, step: int) -> None:
    model(torch.full((4, 64), float(step))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stage(model: Any, optimizer: Any, checkpoint: CheckpointId, node: Path, ranks: int) -> tuple[StagedSlice, ...]:
    def one(rank: ThreadRanks) -> StagedSlice:
        tree = collect_state(model=model, optimizer=optimizer)
        plan = Planner(world_rank=rank.world_rank, world_size=ranks, gather=rank.gather).plan_for(tree)
        stager = Stager(plan, attempt_dir(node / "slots", checkpoint.attempt), num_slots=1)
        staged = stager.stage(tree, checkpoint, rank_state=capture_rng())
        assert staged is not None
        stager.close()  # a slot that holds a save stays
        return staged

    slices = in_ranks(ranks, one)
    for staged in slices:
        if isinstance(staged, Exception):
            raise staged
    return tuple(slices)


def make_vault(store: Any, node: Path, coordinator: Any, **more: Any) -> CheckpointVault:
    folders: dict[str, Any] = {"local_checkpoints": node / "local", "slots": [node / "slots"], "journals": node / "j"}
    return CheckpointVault(node_id="node", store=store, coordinator=coordinator, **folders, **more)


def open_log(store: Any) -> CommitLog:
    log = CommitLog(run="run", store=store, clock=SystemClock(), keep_last=2)
    log.open()
    return log


def make_scene(spec: StoreSpec, node: Path) -> Scene:
    model, optimizer = build()
    store = open_store(spec)
    log = open_log(store)
    log.fence_and_choose(ATTEMPT)
    vault = make_vault(store, node, Coordinator(log))
    weights, slices = {}, ()
    for step in range(1, SAVING + 1):
        train(model, optimizer, step)
        weights[step] = digest(model)
        slices = stage(model, optimizer, CheckpointId(step, ATTEMPT), node, RANKS)
        for staged in slices if step <= COMMITTED else ():
            vault.persist(staged)
    return Scene(spec, node, slices, weights)


# what the restart finds


def resume_point(spec: StoreSpec) -> tuple[int, str]:
    """(step, digest of the weights) of what a start would resume from now, read from storage alone."""
    model, optimizer = build()
    store = open_store(spec)
    with tempfile.TemporaryDirectory() as scratch:
        log = open_log(store)
        return resume(log, store, log.highest_attempt + 1, Path(scratch), model, optimizer), digest(model)


def start_and_save(spec: StoreSpec, node: Path) -> int:
    """A next attempt on `node`: it finishes what lies there, resumes, trains a step and saves it; the step it resumed
    from. What it saved must be what is resumed from afterwards."""
    model, optimizer = build()
    store = open_store(spec)
    log = open_log(store)
    attempt = log.highest_attempt + 1
    vault = make_vault(store, node, Coordinator(log))
    vault.adopt(attempt)
    resumed = resume(log, store, attempt, node, model, optimizer)
    train(model, optimizer, resumed + 1)
    (staged,) = stage(model, optimizer, CheckpointId(resumed + 1, attempt), node, 1)
    vault.persist(staged)
    log.prune()
    assert resume_point(spec) == (resumed + 1, digest(model)), "the save after the crash is not what is resumed from"
    return resumed


# the victims


class Struck:
    """What was looked at when the victim had died, and what had been told by then."""

    def __init__(self, scene: Scene, where: str, *, gone: Path | None) -> None:
        """`gone`: where to try, with a copy of a local storage, what happens if all others die with the victim."""
        self.scene = scene
        self.where = where
        self.died = False
        self.told = COMMITTED
        self._gone = gone

    def look(self) -> None:
        """The victim has just died, nothing was started again: check the resume point."""
        self.died = True
        try:
            step, weights = resume_point(self.scene.spec)
        except GoodputError as error:  # not to be taken for an error of the call that was struck, which is tried again
            raise AssertionError(f"{self.where}: what is left cannot be loaded: {error}") from error
        assert step in (COMMITTED, SAVING), f"{self.where}: step {step} would be resumed from"
        assert step >= self.told, f"{self.where}: step {self.told} was told to be committed, {step} is resumed from"
        assert weights == self.scene.weights[step], f"{self.where}: the weights are not those of step {step}"
        if self._gone is not None:
            storage = shutil.copytree(self.scene.spec.uri, self._gone / "storage")
            resumed = start_and_save(StoreSpec(uri=str(storage)), self._gone / "node")
            assert resumed == step, f"{self.where}: {resumed} instead of {step} on another node"


def start_process(target: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()  # so that its death is an end of file here
    return process, ours


def dying(spec: StoreSpec, call: int) -> FaultyStore:
    def die(op: str, key: str, n: int) -> None:
        if n == call:
            os.kill(os.getpid(), signal.SIGKILL)

    return FaultyStore(open_store(spec), before=die)


class _FarCoordinator:
    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def landed(self, landed: LandedSlice) -> None:
        self._pipe.send(landed)
        self._pipe.recv()

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None:
        return None


def vault_life(spec: StoreSpec, node: Path, slices: Sequence[StagedSlice], call: int, pipe: Any) -> None:
    faulthandler.dump_traceback_later(40)
    torch.set_num_threads(1)
    vault = make_vault(dying(spec, call), node, _FarCoordinator(pipe))
    for number, staged in enumerate(slices):
        vault.persist(staged)
        pipe.send(number + 1)
    pipe.send("end")


def strike_vault(scene: Scene, call: int, struck: Struck) -> None:
    """The vault dies before its call; the next one gets the calls of `persist` that were not answered."""
    store = open_store(scene.spec)
    log = open_log(store)
    log.fence_and_choose(ATTEMPT)
    process, pipe = start_process(vault_life, scene.spec, scene.node, scene.slices, call)
    persisted = 0
    try:
        while (message := pipe.recv()) != "end":
            if isinstance(message, LandedSlice):
                if log.landed(message) is not None:
                    struck.told = SAVING
                pipe.send(None)
            else:
                persisted = message
    except EOFError:
        struck.look()
    process.join(20)
    assert process.exitcode == (-signal.SIGKILL if struck.died else 0), f"{struck.where}: {process.exitcode}"
    vault = make_vault(store, scene.node, Coordinator(log))
    for staged in scene.slices[persisted:]:
        vault.persist(staged)
    log.prune()


def coordinator_life(spec: StoreSpec, call: int, pipe: Any) -> None:
    faulthandler.dump_traceback_later(40)
    torch.set_num_threads(1)
    log = open_log(dying(spec, call))
    log.fence_and_choose(ATTEMPT)
    while (message := pipe.recv()) is not None:
        pipe.send(_answer(log, message))


def _answer(log: CommitLog, message: Any) -> Any:
    return log.landed(message) if isinstance(message, LandedSlice) else log.prune()


@dataclass(slots=True)
class _Restarted:
    """The coordinator in a process, until that dies; then a new one here, built from storage alone. The call that it
    did not answer fails as an actor's does, and the vault tries it again."""

    scene: Scene
    struck: Struck
    pipe: Any
    log: CommitLog | None = None

    def landed(self, landed: LandedSlice) -> None:
        if self._ask(landed) is not None:
            self.struck.told = SAVING

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None:
        return None

    def prune(self) -> None:
        try:
            self._ask("prune")
        except RunError:
            self._ask("prune")

    def _ask(self, message: Any) -> Any:
        if self.log is not None:
            return _answer(self.log, message)
        try:
            self.pipe.send(message)
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            self.struck.look()
            self.log = open_log(open_store(self.scene.spec))
            self.log.restore_fence(ATTEMPT)
            raise RunError("The coordinator is away.") from error


def strike_coordinator(scene: Scene, call: int, struck: Struck) -> None:
    """The coordinator dies before its call and is built anew; the vault tells it again what it has uploaded."""
    process, pipe = start_process(coordinator_life, scene.spec, call)
    coordinator = _Restarted(scene, struck, pipe)
    vault = make_vault(open_store(scene.spec), scene.node, coordinator, sleep=lambda _: None)
    for staged in scene.slices:
        vault.persist(staged)
    vault.land_again(SAVING)  # as at the end of a run
    coordinator.prune()
    if not struck.died:
        pipe.send(None)
    process.join(20)
    assert process.exitcode == (-signal.SIGKILL if struck.died else 0), f"{struck.where}: {process.exitcode}"


VICTIMS: dict[str, Callable[[Scene, int, Struck], None]] = {"vault": strike_vault, "coordinator": strike_coordinator}


def strike(victim: str, call: int, spec: StoreSpec, root: Path) -> bool:
    """One crash point: False if the victim makes no such call. Raises AssertionError if anything is wrong."""
    scene = make_scene(spec, root / "node")
    local = root / "gone" if "://" not in spec.uri else None
    struck = Struck(scene, f"{victim}, call {call}", gone=local)
    VICTIMS[victim](scene, call, struck)
    assert resume_point(spec) == (SAVING, scene.weights[SAVING]), f"{struck.where}: the save was not finished"
    assert start_and_save(spec, root / "next") == SAVING
    return struck.died


def all_points(victim: str, specs: Callable[[str], StoreSpec], root: Path) -> Iterator[int]:
    """Every call of a victim, one after the other, until it makes no more."""
    call = 0
    while strike(victim, call, specs(f"{victim}-{call}"), root / f"{victim}-{call}"):
        yield call
        call += 1


def main() -> None:
    """Every crash point of every victim, on local disk and on S3."""
    from fault.crash_points_dcp import dcp_points
    from fault.crash_points_near import near_points
    from fault.crash_points_worker import all_worker_points

    logging.getLogger("ray_goodput").setLevel(logging.ERROR)  # that a coordinator is away is no news here
    tried = 0
    with tempfile.TemporaryDirectory() as folder, JuiceFSGateway() as gateway:
        root = Path(folder)
        storages: dict[str, Callable[[str], StoreSpec]] = {
            "local": lambda name: StoreSpec(uri=str(root / "storage" / name)),
            "s3": lambda name: StoreSpec(uri=f"{gateway.uri}/{name}", options=gateway.storage_options),
        }
        for storage, specs in storages.items():
            others = {"worker": all_worker_points, "vault with copies": near_points, "dcp.save": dcp_points}
            for victim in (*VICTIMS, *others):
                points = others.get(victim, partial(all_points, victim))
                found = sum(1 for _ in points(specs, root / storage))
                print(f"{storage}: {victim}: killed at each of its {found} points", flush=True)
                tried += found
    print(f"crash points tried: {tried}; each resumed from the newest commit, and the next save worked")


if __name__ == "__main__":
    main()
