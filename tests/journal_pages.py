"""Journal pages without a file: what a rank's journal would hold, from a script of what it did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ray_goodput.core.buckets import Bucket
from ray_goodput.goodput.journal import RECORD, RECORD_BYTES, STEP_DONE, JournalHeader, JournalPage, OpenRecord

Stretch = tuple[Bucket, float, int, bool]
"""Bucket, seconds, step, and whether the step was done with it."""

ORIGIN_NS = 77_000_000_123  # a node's clock has nothing to do with the coordinator's


def page(
    attempt: int,
    world_rank: int,
    script: Sequence[Stretch],
    *,
    first: int = 0,
    last: int | None = None,
    open_for: tuple[Bucket, float, int] | None = None,
    closed: bool = False,
    oldest: int = 0,
    own_us: Sequence[int] | None = None,
) -> JournalPage:
    """Records first .. last of the journal that `script` makes; `open_for` is what the rank does after it."""
    rows = np.zeros(len(script), dtype=RECORD)
    at = ORIGIN_NS
    for i, (bucket, seconds, step, done) in enumerate(script):
        end = at + round(seconds * 1e9)
        rows[i] = (at, end, bucket, STEP_DONE if done else 0, b"", own_us[i] if own_us else 0, step)
        at = end
    last = len(script) if last is None else last
    whole = last == len(script)
    heartbeat = at + (round(open_for[1] * 1e9) if open_for else 0)
    return JournalPage(
        header=JournalHeader(
            run="r", attempt=attempt, world_rank=world_rank, node="n", wall_anchor_ns=0, mono_anchor_ns=ORIGIN_NS
        ),
        first_record=first,
        data=rows.tobytes()[first * RECORD_BYTES : last * RECORD_BYTES],
        oldest_record=oldest,
        heartbeat_ns=heartbeat,
        open_record=OpenRecord(at, open_for[0], open_for[2]) if open_for and whole else None,
        closed=closed and whole,
    )


def steps(first: int, last: int, seconds: float) -> list[Stretch]:
    """Steps first .. last, done."""
    return [(Bucket.STEP, seconds, step, True) for step in range(first, last + 1)]
