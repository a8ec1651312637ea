"""Monotonic and wall clock behind one protocol, so that rules take time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. `mono_s` never goes back; `at_s` is seconds since the epoch and may jump."""

    def mono_s(self) -> float: ...

    def at_s(self) -> float: ...


class SystemClock:
    """The clocks of this machine."""

    def mono_s(self) -> float:
        return time.monotonic()

    def at_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told; for tests and simulations."""

    def __init__(self, *, mono_s: float = 0.0, at_s: float = 1.7e9) -> None:
        self._mono_s = mono_s
        self._at_s = at_s

    def mono_s(self) -> float:
        return self._mono_s

    def at_s(self) -> float:
        return self._at_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back ({seconds} s)")
        self._mono_s += seconds
        self._at_s += seconds
