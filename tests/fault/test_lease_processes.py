"""Two drivers that share nothing but a storage, as processes: stopped, continued and killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ray_goodput.actors.commits import CommitLog
from ray_goodput.clock import SystemClock
from ray_goodput.core.commit import CheckpointId
from ray_goodput.storage.local import LocalStore

SCRIPT = Path(__file__).with_name("lease_process.py")
TTL_S = 2.0


class Driver:
    def __init__(self, storage: Path, name: str) -> None:
        command = [sys.executable, str(SCRIPT), str(storage), name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def commit(self, step: int, attempt: int) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"commit {step} {attempt}\n")
        self.process.stdin.flush()
        return self.says()


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(started: ExitStack, storage: Path, name: str) -> Driver:
    driver = Driver(storage, name)

    def end() -> None:
        driver.process.kill()
        driver.process.communicate()

    started.callback(end)
    return driver


def test_a_stopped_driver_loses_its_run_and_is_fenced_when_it_goes_on(tmp_path: Path, started: ExitStack) -> None:
    first = start(started, tmp_path, "first")
    assert first.says() == "taken" and first.commit(1, 1) == "committed"

    refused = start(started, tmp_path, "second")
    answer = refused.says()
    assert answer.startswith("RunInUseError") and f"process {first.process.pid}" in answer

    first.process.send_signal(signal.SIGSTOP)
    begun_mono_s = time.monotonic()
    third = start(started, tmp_path, "third")
    assert third.says() == "taken"
    assert time.monotonic() - begun_mono_s >= TTL_S
    assert third.commit(5, 2) == "committed"

    first.process.send_signal(signal.SIGCONT)
    answer = first.commit(9, 1)
    assert answer.startswith("FencedError") and f"process {third.process.pid}" in answer

    third.process.kill()
    third.process.wait(10)
    fourth = start(started, tmp_path, "fourth")  # of the same machine: it can see that the third one is gone
    assert fourth.says() == "taken" and fourth.commit(7, 3) == "committed"

    log = CommitLog(run="run", store=LocalStore(tmp_path), clock=SystemClock())
    log.open()
    assert [r.checkpoint for r in log.records()] == [CheckpointId(7, 3), CheckpointId(5, 2), CheckpointId(1, 1)]
