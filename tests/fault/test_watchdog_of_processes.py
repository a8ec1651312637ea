"""The watchdog over two real ranks on gloo, without Ray: one stands still in its own way, the other waits for it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_goodput.actors.names import journal_path
from ray_goodput.actors.process_look import kill_ranks, look_at_ranks
from ray_goodput.actors.progress_watch import ProgressWatch
from ray_goodput.actors.watchdog import Watchdog
from ray_goodput.clock import SystemClock
from ray_goodput.config import WatchdogConfig
from ray_goodput.core.hang import HangVerdict
from ray_goodput.core.run_state import WorkerInfo
from ray_goodput.errors import StorageError
from ray_goodput.goodput.journal import read_journal
from ray_goodput.storage.local import LocalStore

RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from ray_goodput.actors.names import journal_path, stacks_path
from ray_goodput.clock import SystemClock
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import JournalWriter
from ray_goodput.goodput.recorder import Recorder
from ray_goodput.train.stacks import StackFile

journals, rank, port, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
StackFile(stacks_path(journals, 1, rank)).open()
writer = JournalWriter(journal_path(journals, 1, rank), run="r", attempt=1, world_rank=rank, node="n")
recorder = Recorder(writer, SystemClock(), heartbeat_s=0.1)
recorder.start()
recorder.switch(Bucket.STEP)

def run_in_session():
    for step in range(1, 1000):
        if rank == 1 and step == 30:
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "holds the lock":
                libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
                libc.pthread_mutex_lock(mutex)
                libc.pthread_mutex_lock(mutex)
            else:
                time.sleep(600)
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
        recorder.step_done(step)

run_in_session()
"""


class Node:
    """The part of a vault that looks and kills."""

    def __init__(self, journals: Path) -> None:
        self._journals = journals

    def look(self, attempt, ranks):
        return look_at_ranks(self._journals, attempt, ranks)

    def kill(self, ranks):
        return kill_ranks(ranks)


@contextlib.contextmanager
def two_ranks(journals: Path, how: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", RANK, str(journals)]
    ranks = [subprocess.Popen([*command, str(r), str(port), how, "RayTrainWorker"]) for r in range(2)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)


def verdict_on(journals: Path, store: LocalStore, pids: list[int]) -> HangVerdict:
    """What the watchdog finds, fed with the heartbeats that a living rank would send."""
    watch = ProgressWatch(SystemClock(), WatchdogConfig(hang_after_s=3, times_p99_step=2))
    watch.begin(1, [WorkerInfo(world_rank=r, pid=pid, node_id="n", node_ip="here") for r, pid in enumerate(pids)])
    node = Node(journals)
    dog = Watchdog(watch, vault=lambda _: node, store=store, clock=SystemClock(), found=lambda attempt: None)
    beats = [0, 0]
    while True:
        for rank in range(2):
            with contextlib.suppress(FileNotFoundError, StorageError):  # not begun yet
                page = read_journal(journal_path(journals, 1, rank))
                if page.heartbeat_ns != beats[rank]:
                    beats[rank] = page.heartbeat_ns
                    watch.take(page)
        verdict = dog.check()
        if verdict is not None:
            return verdict
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("stopped", "is stopped (SIGSTOP)"),
        ("holds the lock", "native code holds Python's lock"),
        ("sleeps", "the stacks of the others show them waiting for it"),
    ],
)
def test_the_rank_that_stands_still_is_the_one_that_is_killed(tmp_path: Path, how: str, told: str) -> None:
    store = LocalStore(tmp_path / "store")
    with two_ranks(tmp_path / "journals", how) as ranks:
        verdict = verdict_on(tmp_path / "journals", store, [r.pid for r in ranks])
        assert verdict.culprits == (1,), verdict.reason
        assert told in verdict.reason
        assert ranks[1].wait(10) == -9
