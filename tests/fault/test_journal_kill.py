"""A SIGKILL of the writer loses nothing that was written before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import read_journal

WRITER = """
import sys
from ray_goodput.clock import SystemClock
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import JournalWriter
from ray_goodput.goodput.recorder import Recorder

writer = JournalWriter(sys.argv[1], run="r", attempt=0, world_rank=0, node="n", chunk_records=128, max_records=1 << 20)
rec = Recorder(writer, SystemClock(), heartbeat_s=0.001)
rec.start()
rec.resumed(0)
rec.switch(Bucket.STEP)
step = 0
while True:
    step += 1
    with rec.span(Bucket.DATA_WAIT):
        pass
    rec.step_done(step)
    if step % 100 == 0:
        print(step, flush=True)
"""


@pytest.mark.parametrize("say", [1, 7, 23])
def test_a_killed_writer_leaves_every_step_it_had_finished(tmp_path: Path, say: int) -> None:
    path = tmp_path / "j"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for _ in range(say):
            said = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        said = max([said, *(int(line) for line in process.stdout.read().split() if len(line) >= 3)])
    finally:
        process.kill()
        process.wait(10)
    page = read_journal(path)
    done = page.array["step"][page.array["flags"] == 1]
    assert done.tolist() == list(range(1, len(done) + 1))
    assert len(done) >= said
    assert page.open_record is not None and page.open_record.bucket in (Bucket.STEP, Bucket.DATA_WAIT)
    assert page.heartbeat_ns >= page.header.mono_anchor_ns and not page.closed
