"""What accounting costs: the recorder on the training thread, a page at the coordinator, a report of many ranks."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from results_file import Budget, parser, report, spread

from ray_goodput.clock import SystemClock
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import JournalPage, JournalWriter, read_journal
from ray_goodput.goodput.ledger import Ledger
from ray_goodput.goodput.recorder import Recorder

STEPS = 20_000
ROUNDS = 7
PAGES = 500
RANKS = 1024
STEP_S = 0.01


def recorder_s(folder: Path, *, rounds: int = ROUNDS) -> list[float]:
    """Seconds a step of what a session does in one: a span for the batch, one for a save, and the step's end."""
    times = []
    for i in range(rounds):
        recorder = Recorder(
            JournalWriter(folder / f"{i}.journal", run="b", attempt=1, world_rank=0, node="n"), SystemClock()
        )
        recorder.start(Bucket.STEP)
        started = time.perf_counter()
        for step in range(1, STEPS + 1):
            with recorder.span(Bucket.DATA_WAIT):
                pass
            with recorder.span(Bucket.CKPT_BLOCK):
                pass
            recorder.step_done(step)
        times.append((time.perf_counter() - started) / STEPS)
        recorder.close()
    return times


def one_page(folder: Path) -> JournalPage:
    """A second's worth of records: 60 steps with a span each."""
    path = folder / "page.journal"
    recorder = Recorder(JournalWriter(path, run="b", attempt=1, world_rank=0, node="n"), SystemClock())
    recorder.start(Bucket.STEP, threads=False)
    for step in range(1, 61):
        with recorder.span(Bucket.DATA_WAIT):
            pass
        recorder.step_done(step)
    return read_journal(path)


def page_s(page: JournalPage) -> list[float]:
    """Seconds for the ledger to take in a rank's page."""
    times = []
    for _ in range(PAGES):
        ledger = Ledger(1)
        ledger.run_started(0.0)
        ledger.attempt_started(1, 1, 1.0)
        started = time.perf_counter()
        ledger.page(page, 2.0)
        times.append(time.perf_counter() - started)
    return times


def report_s() -> list[float]:
    """Seconds for the report of one attempt of many ranks."""
    ledger = Ledger(RANKS)
    ledger.run_started(0.0)
    ledger.attempt_started(1, RANKS, 1.0)
    for world_rank in range(RANKS):
        ledger.rank_hello(1, world_rank, 2.0)
    times = []
    for i in range(ROUNDS):
        started = time.perf_counter()
        ledger.report(10.0 + i)
        times.append(time.perf_counter() - started)
    return times


def whole_s(page: JournalPage) -> list[float]:
    """Seconds for the ledger of many ranks to seal a whole segment, which it does once in a hundred segments."""
    ledger = Ledger(RANKS)
    ledger.run_started(0.0)
    ledger.attempt_started(1, RANKS, 1.0)
    for world_rank in range(RANKS):
        ledger.rank_hello(1, world_rank, 2.0)
        ledger.page(replace(page, header=replace(page.header, world_rank=world_rank)), 62.0)
    times = []
    for i in range(ROUNDS):
        started = time.perf_counter()
        ledger.seal_whole(70.0 + i)
        times.append(time.perf_counter() - started)
    return times


def main() -> None:
    arguments = parser("goodput").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorder = spread(recorder_s(Path(folder)))
        told = one_page(Path(folder))
    arms = {
        "recorder, training thread": {"step_s": recorder},
        "ledger, page of 60 steps": {"page_s": spread(page_s(told))},
        f"report of {RANKS} ranks": {"report_s": spread(report_s())},
        f"whole segment of {RANKS} ranks": {"whole_s": spread(whole_s(told))},
    }
    budgets = [
        Budget(name="recorder: share of a 10 ms step", limit=0.001, value=recorder["median"] / STEP_S),
    ]
    report("goodput", arms, budgets, as_json=arguments.json)


if __name__ == "__main__":
    main()
