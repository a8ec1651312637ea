"""Looking at real processes: stopped, blocked with Python's lock held, sleeping, gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_goodput.actors.names import journal_path, stacks_path
from ray_goodput.actors.process_look import kill_ranks, look_at_ranks, process_state
from ray_goodput.core.buckets import Bucket
from ray_goodput.core.stacks import training_frames

SCRIPT = """
import ctypes, os, signal, sys, time
from pathlib import Path
from ray_goodput.actors.names import journal_path, stacks_path
from ray_goodput.clock import SystemClock
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import JournalWriter
from ray_goodput.goodput.recorder import Recorder
from ray_goodput.train.stacks import StackFile

journals, rank, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
recorder = Recorder(
    JournalWriter(journal_path(journals, 1, rank), run="r", attempt=1, world_rank=rank, node="n"), SystemClock()
)
stacks = StackFile(stacks_path(journals, 1, rank))
stacks.open()
recorder.start()
recorder.resumed(4)
recorder.switch(Bucket.STEP)
recorder.step_done(5)

def run_in_session():
    print("ready", flush=True)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "holds the lock":
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # unlike CDLL, PyDLL keeps Python's lock
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # for ever, and unlike sleep() no signal ends it
    else:
        time.sleep(600)

run_in_session()
"""


@pytest.fixture
def journals(tmp_path: Path) -> Path:
    return tmp_path / "journals"


class Processes:
    def __init__(self, journals: Path) -> None:
        self._journals = journals
        self.all: list[subprocess.Popen[str]] = []

    def start(self, how: str) -> tuple[int, int]:
        """(rank, pid) of a process that has set everything up and now does `how`."""
        rank = len(self.all)
        command = [sys.executable, "-c", SCRIPT, str(self._journals), str(rank), how, "RayTrainWorker"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.all.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if how == "stopped":
            while process_state(process.pid) != "T":
                assert process.poll() is None
        return rank, process.pid


@pytest.fixture
def processes(journals: Path) -> Iterator[Processes]:
    made = Processes(journals)
    yield made
    for process in made.all:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_a_stopped_process_a_blocked_one_and_a_sleeping_one_are_told_apart(
    journals: Path, processes: Processes
) -> None:
    ranks = [processes.start(how) for how in ("stopped", "holds the lock", "sleeps")]
    stopped, blocked, sleeping = look_at_ranks(journals, 1, ranks)
    assert stopped.state == "T" and "No stacks: a stopped process (SIGSTOP)" in stopped.text
    assert f"process {ranks[0][1]}, state T" in stopped.text
    assert training_frames(stopped.text) == ()
    for look in (blocked, sleeping):
        assert look.state in "SR" and training_frames(look.text), look.text
        assert "run_in_session" in training_frames(look.text)[0]
    for look in (stopped, blocked, sleeping):
        assert (look.bucket, look.step, look.stepped) == (Bucket.STEP, 5, True)
        assert look.silent_s is not None and look.still_s is not None


def test_the_stacks_of_a_second_look_are_those_of_then(journals: Path, processes: Processes) -> None:
    rank = processes.start("sleeps")
    texts = [look_at_ranks(journals, 1, [rank])[0].text for _ in range(2)]
    assert [text.count("Current thread") for text in texts] == [1, 1]


def test_kill_ends_a_stopped_process_and_leaves_other_programs_alone(journals: Path, processes: Processes) -> None:
    rank, pid = processes.start("stopped")
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert kill_ranks([(rank, pid), (7, other.pid), (8, 2**22 - 1)]) == [rank]
        assert processes.all[rank].wait(10) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(10)
    [look] = look_at_ranks(journals, 1, [(rank, pid)])
    assert look.gone and "state gone" in look.text
    assert look.step == 5, "its journal outlives it"


def test_a_process_that_set_nothing_up_is_not_signalled(journals: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        stacks_path(journals, 1, 0).parent.mkdir(parents=True)
        stacks_path(journals, 1, 0).touch()
        [look] = look_at_ranks(journals, 1, [(0, other.pid)])
        assert other.poll() is None, "the signal's default action ends a process"
        assert look.silent_s is None and "had set nothing up" in look.text
        assert not journal_path(journals, 1, 0).exists()
    finally:
        other.kill()
        other.wait(10)
