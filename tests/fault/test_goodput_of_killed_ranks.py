"""Real processes, real clocks, one SIGKILL: the books still close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ray_goodput.actors.names import journal_path
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import read_journal
from ray_goodput.goodput.ledger import Ledger

RANK = """
import sys, time
from ray_goodput.clock import SystemClock
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import JournalWriter
from ray_goodput.goodput.recorder import Recorder

path, attempt, rank, resumed, num = sys.argv[1], *map(int, sys.argv[2:6])
writer = JournalWriter(path, run="r", attempt=attempt, world_rank=rank, node="n")
rec = Recorder(writer, SystemClock(), heartbeat_s=0.02)
rec.start()
print(time.time(), rec.elapsed_s(), flush=True)
rec.resumed(resumed)
rec.switch(Bucket.STEP)
for step in range(resumed + 1, resumed + num + 1):
    with rec.span(Bucket.DATA_WAIT):
        time.sleep(0.002)
    time.sleep(0.004)
    rec.step_done(step)
    print(step, flush=True)
rec.switch(Bucket.SHUTDOWN)
rec.close()
"""


def start(tmp_path: Path, ledger: Ledger, attempt: int, resumed: int, num: int) -> list[subprocess.Popen[str]]:
    ledger.attempt_started(attempt, 2, time.time())
    args = [[str(journal_path(tmp_path, attempt, r)), attempt, r, resumed, num] for r in range(2)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, *map(str, a)], stdout=subprocess.PIPE, text=True) for a in args
    ]
    for number, process in enumerate(ranks):
        assert process.stdout is not None
        at, journal_s = map(float, process.stdout.readline().split())
        ledger.rank_hello(attempt, number, at, journal_s)
    return ranks


def collect(tmp_path: Path, ledger: Ledger, attempt: int) -> None:
    for rank in range(2):
        ledger.page(read_journal(journal_path(tmp_path, attempt, rank)))


def test_a_killed_rank_costs_at_most_one_heartbeat_of_certainty(tmp_path: Path) -> None:
    ledger = Ledger(2, heartbeat_s=0.02)
    started_at = time.time()
    ledger.run_started(started_at)
    ranks = start(tmp_path, ledger, 0, 0, 10_000)
    try:
        for process in ranks:  # they do not wait for each other, so see that both got that far
            assert process.stdout is not None
            while int(process.stdout.readline()) < 30:
                pass
        ledger.commit(20, 0, time.time())
        os.kill(ranks[1].pid, signal.SIGKILL)
        ranks[1].wait(10)
        os.kill(ranks[0].pid, signal.SIGKILL)  # what Ray does with the rest of the group
        ranks[0].wait(10)
        ledger.attempt_ended(0, time.time(), "failed", ranks=[1])
        collect(tmp_path, ledger, 0)
        ranks += start(tmp_path, ledger, 1, 20, 25)
        ledger.resumed(1, 20)
        for process in ranks[2:]:
            assert process.wait(30) == 0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    ledger.attempt_ended(1, time.time(), "finished")
    collect(tmp_path, ledger, 1)
    ended_at = time.time()
    ledger.run_ended(ended_at)

    report = ledger.report()
    total = 2 * (ended_at - started_at)
    assert abs(sum(report.buckets_s.values()) - total) <= 1e-3 * total + report.uncertainty_s
    # A process that starts on a busy machine may delay a heartbeat, never the kernel's memory of what was written.
    assert report.uncertainty_s <= 4 * 0.02 + 0.01
    assert report.incidents[0].step_resumed == 20 and report.incidents[0].steps_lost >= 9
    assert report.incidents[0].down_s < ended_at - started_at
    assert report.lost_s >= 2 * 9 * 0.004 and report.committed_s >= 2 * 20 * 0.004
    assert report.buckets_s[Bucket.DATA_WAIT.label] >= 2 * 50 * 0.002
    assert (
        Ledger.from_lines(b"".join(s.data for s in ledger.to_segments()).splitlines()).report().overall
        == report.overall
    )
