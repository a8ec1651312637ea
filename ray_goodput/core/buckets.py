"""The buckets of time: every rank-second of a run is in exactly one."""

from __future__ import annotations

from enum import IntEnum


class Bucket(IntEnum):
    """Where a rank-second went. The numbers are part of the journal's format: never reuse one.

    `LOST` is a view, not recorded by ranks: step time whose step was rolled back later.
    """

    OTHER = 0
    STEP = 1
    DATA_WAIT = 2
    CKPT_BLOCK = 3
    CKPT_LOAD = 4
    STARTUP = 5
    RESTART = 6
    DETECT = 7
    HANG = 8
    IDLE_NODES = 9
    EVAL = 10
    DRAIN = 11
    SHUTDOWN = 12
    LOST = 13

    @property
    def label(self) -> str:
        return self.name.lower()
