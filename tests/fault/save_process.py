"""What tests of dying processes share: a small model, a commit log that stands for the coordinator, and a process that
stops in the middle of its save."""

import faulthandler
import hashlib
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

    def identity(self) -> str:
        return "run"

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


class FarCoordinator:
    """The coordinator in another process: calls go through a pipe, and raise here what they raised there."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def identity(self) -> str:
        return "run"

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
