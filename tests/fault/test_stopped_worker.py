"""C6: a worker that was stopped in mid-save and wakes up when its attempt was replaced commits nothing."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from pathlib import Path
from typing import Any

from fault.save_process import Coordinator, save_and_stop
from ray_goodput.actors.commits import CommitLog
from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.clock import SystemClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId, LandedSlice
from ray_goodput.errors import FencedError
from ray_goodput.storage import open_store

SERVER = mp.get_context("forkserver")


def wait_until_stopped(pid: int) -> None:
    """The kernel says that the process is stopped; its death would end the wait too."""
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
        assert state not in "ZX", "the worker died before it stopped"
        os.sched_yield()


def save(log: CommitLog, store: Any, scratch: Path, checkpoint: CheckpointId) -> None:
    from torch import nn

    tree = collect_state(model=nn.Linear(4, 4))
    plan = Planner(world_rank=0, world_size=1).plan_for(tree)
    staged = Stager(plan, scratch / "slots").stage(tree, checkpoint, rank_state=capture_rng())
    assert staged is not None
    vault = CheckpointVault(
        node_id="other",
        store=store,
        coordinator=Coordinator(log),
        local_checkpoints=scratch / "local",
        slots=[scratch / "slots"],
        journals=scratch / "journals",
    )
    vault.persist(staged)


def test_a_worker_that_wakes_up_after_its_attempt_was_replaced_cannot_commit(tmp_path: Path) -> None:
    spec = StoreSpec(uri=str(tmp_path / "run"))
    store = open_store(spec)
    log = CommitLog(run="run", store=store, clock=SystemClock())
    log.open()
    assert log.fence_and_choose(1) is None
    save(log, store, tmp_path / "first", CheckpointId(1, 1))
    ours, theirs = SERVER.Pipe()
    worker = SERVER.Process(
        target=save_and_stop, args=(spec, tmp_path / "stopped", CheckpointId(2, 1), theirs), daemon=True
    )
    worker.start()
    assert worker.pid is not None
    try:
        wait_until_stopped(worker.pid)
        resume = log.fence_and_choose(2)
        assert resume is not None and resume.checkpoint == CheckpointId(1, 1)
        save(log, store, tmp_path / "second", CheckpointId(2, 2))
    finally:
        os.kill(worker.pid, signal.SIGCONT)

    landed = ours.recv()
    assert isinstance(landed, LandedSlice) and landed.slice.checkpoint == CheckpointId(2, 1)
    try:
        log.landed(landed)
        ours.send(None)
    except FencedError as error:
        ours.send(error)
    told = ours.recv()
    worker.join(30)
    assert isinstance(told, FencedError) and "attempt 1, which attempt 2 has replaced" in str(told)
    stale = tmp_path / "run" / "checkpoints" / CheckpointId(2, 1).folder
    assert any(stale.iterdir()) and not (stale / COMMIT_NAME).exists()
    again = CommitLog(run="run", store=store, clock=SystemClock())
    again.open()
    newest = again.newest()
    assert newest is not None and newest.checkpoint == CheckpointId(2, 2)
    assert CheckpointId(2, 1) in log.prune()
