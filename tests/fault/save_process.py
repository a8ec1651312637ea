"""A process that resumes, trains one step and saves, and can be told to die at any storage call of the save.

`resume_and_save` is the whole life of such a process. It writes one JSON object to `out`: what it resumed from (step,
digest of the weights), what it saved, and the storage calls of the save.
"""

import faulthandler
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ray_goodput.actors.commits import CHECKPOINTS, CommitLog
from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.reader import load_checkpoint
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.sources import StoreSource
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.clock import SystemClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import CheckpointId, LandedSlice
from ray_goodput.errors import FencedError
from ray_goodput.storage import open_store
from ray_goodput.storage.faults import FaultyStore
from ray_goodput.storage.protocol import ObjectStore


class Coordinator:
    """The commit log alone."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log

    def landed(self, landed: LandedSlice) -> None:
        self._log.landed(landed)

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None:
        return None


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for _, t in sorted(model.state_dict().items()))).hexdigest()


def resume(log: CommitLog, store: ObjectStore, attempt: int, scratch: Path, model: Any, optimizer: Any) -> int:
    """The newest commit is loaded, and the attempts before `attempt` are fenced; the step, 0 for none."""
    record = log.fence_and_choose(attempt)
    if record is None:
        return 0
    folder = record.checkpoint.folder
    source = StoreSource(record, store, f"{CHECKPOINTS}/{folder}", scratch / "cache" / folder)
    load_checkpoint(source, model=model, optimizer=optimizer)
    return record.checkpoint.step


def resume_and_save(spec: StoreSpec, scratch: Path, die_before: int, out: Path) -> None:
    """die_before: number of the storage call of the save before which to die by SIGKILL, -1 for none."""
    faulthandler.dump_traceback_later(20)
    torch.set_num_threads(1)
    model, optimizer = build()
    inner = open_store(spec)
    log = CommitLog(run="run", store=inner, clock=SystemClock(), keep_last=2)
    log.open()
    attempt = log.highest_attempt + 1
    resumed = resume(log, inner, attempt, scratch, model, optimizer)
    start_digest = digest(model)

    model(torch.full((4, 64), float(resumed + 1))).mean().backward()
    optimizer.step()

    def die(op: str, key: str, n: int) -> None:
        if n == die_before:
            os.kill(os.getpid(), signal.SIGKILL)

    store = FaultyStore(inner, before=die)
    log = CommitLog(run="run", store=store, clock=SystemClock(), keep_last=2)
    log.open()
    log.fence_and_choose(attempt)
    vault = CheckpointVault(
        node_id="node",
        store=store,
        coordinator=Coordinator(log),
        local_checkpoints=scratch / "local",
        slots=[scratch / "slots"],
        journals=scratch / "journals",
    )
    tree = collect_state(model=model, optimizer=optimizer)
    plan = Planner(world_rank=0, world_size=1).plan_for(tree)
    staged = Stager(plan, scratch / "slots").stage(tree, CheckpointId(resumed + 1, attempt), rank_state=capture_rng())
    assert staged is not None
    vault.persist(staged)
    log.prune()
    told = {"resumed": resumed, "start": start_digest, "saved": resumed + 1, "end": digest(model), "calls": store.calls}
    out.write_text(json.dumps(told))


class FarCoordinator:
    """The coordinator in another process: calls go through a pipe, and raise here what they raised there."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def landed(self, landed: LandedSlice) -> None:
        self._pipe.send(landed)
        error = self._pipe.recv()
        if error is not None:
            raise error

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None:
        return None


def save_and_stop(spec: StoreSpec, scratch: Path, checkpoint: CheckpointId, pipe: Any) -> None:
    """Stage and upload, but stop (SIGSTOP) in the middle of the upload; then tell the coordinator. Sends at last what
    the vault raised, or None."""
    faulthandler.dump_traceback_later(40)
    torch.set_num_threads(1)

    def stop(op: str, key: str, n: int) -> None:
        if op == "upload_file" and n == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    vault = CheckpointVault(
        node_id="node",
        store=FaultyStore(open_store(spec), before=stop),
        coordinator=FarCoordinator(pipe),
        local_checkpoints=scratch / "local",
        slots=[scratch / "slots"],
        journals=scratch / "journals",
    )
    model, _ = build()
    tree = collect_state(model=model)
    plan = Planner(world_rank=0, world_size=1).plan_for(tree)
    staged = Stager(plan, scratch / "slots").stage(tree, checkpoint, rank_state=capture_rng())
    assert staged is not None
    try:
        vault.persist(staged)
        pipe.send(None)
    except FencedError as error:
        pipe.send(error)
