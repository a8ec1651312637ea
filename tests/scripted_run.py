"""A run's folder as a real one would leave it, from a script: 12 ranks, one killed, a smaller attempt, a third."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

from journal_pages import Stretch, page, steps
from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.ledger import Ledger, LedgerSegment
from ray_goodput.goodput.metrics_log import MetricsLog, object_name

START_S = 1_760_000_000.0
STEP_S = 6.0
HOSTILE = "rank 3 </title><script>alert(1)</script> [red]was[/red] | killed"


def scripted_ledger(*, world: int = 12, ended: bool = True) -> Ledger:
    """Attempt 1: 600 steps, saves each 50, rank 3 dies; attempt 2: two ranks fewer, stopped; attempt 3: all ranks.

    Sealed into six segments: two an attempt.
    """
    ledger = Ledger(world)
    ledger.run_started(START_S)
    at = _attempt(ledger, 1, world, START_S + 40, 0, 600, every=50)
    ledger.attempt_ended(1, at, "worker", ranks=[3], reason=HOSTILE)
    ledger.to_segments()
    at = _attempt(ledger, 2, world - 2, at + 150, 550, 900, every=50)
    ledger.attempt_ended(2, at, "resized")
    ledger.to_segments()
    at = _attempt(ledger, 3, world, at + 90, 900, 1500, every=50, closed=ended)
    if ended:
        ledger.attempt_ended(3, at, "finished")
        ledger.run_ended(at + 10)
    return ledger


def write_run(folder: Path, *, world: int = 12, ended: bool = True) -> Path:
    """The folder of that run, with its six segments and three curves."""
    (folder / "ledger").mkdir(parents=True)
    for segment in _segments(world, ended):
        (folder / "ledger" / segment.name).write_bytes(segment.data)
    for attempt, (first, last) in enumerate([(1, 605), (551, 900), (901, 1500)], 1):
        log = MetricsLog(attempt)
        for step in range(first, last + 1):
            log.add(step, {"lr": 1e-3 * (1 - step / 1500), "loss": 4 * math.exp(-step / 400) + 0.3}, START_S + step)
        path = folder / object_name(attempt)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(log.to_bytes())
    return folder


@cache
def _segments(world: int, ended: bool) -> tuple[LedgerSegment, ...]:
    return scripted_ledger(world=world, ended=ended).to_segments()


def _attempt(
    ledger: Ledger, attempt: int, world: int, at: float, resumed: int, last: int, *, every: int, closed: bool = False
) -> float:
    """Tell of one attempt; returns when it was over."""
    ledger.attempt_started(attempt, world, at)
    script: list[Stretch] = [(Bucket.STARTUP, 25, -1, False), (Bucket.CKPT_LOAD, 5, -1, False)]
    for first in range(resumed + 1, last + 1, every):
        script += [(Bucket.DATA_WAIT, 20 if first % 200 == 1 else 4, first, False)]
        script += steps(first, first + every - 1, STEP_S)
        script += [(Bucket.CKPT_BLOCK, 9, first + every, False)]
    life = sum(seconds for _, seconds, _, _ in script)
    for rank in range(world):
        ledger.rank_hello(attempt, rank, at + 8)
    ledger.to_segments()
    for rank in range(world):
        ledger.page(
            page(attempt, rank, script, open_for=None if closed else (Bucket.STEP, 30.0, last + 1), closed=closed)
        )
    ledger.resumed(attempt, resumed)
    done = at + 8 + 30
    for first in range(resumed + 1, last + 1, every):
        done += (20 if first % 200 == 1 else 4) + every * STEP_S + 9
        if first + every <= last or closed:
            ledger.commit(first + every - 1, attempt, done + 12)
    return at + 8 + life + (2 if closed else 45)
