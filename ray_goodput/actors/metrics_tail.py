"""The newest training metrics, numbered, for whoever asks again and again what is new. Thread-safe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MAX_ROWS = 50_000

MetricsPage = Sequence[tuple[int, dict[str, float]]]
"""(step, rank 0's metrics) of some steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """Metrics of rank 0 for one step; `at_s`: when they arrived, wall clock."""

    attempt: int
    step: int
    at_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsNews:
    """Rows that came after the ones asked about. `life` and `upto` are to be given back next time."""

    life: float
    upto: int
    rows: tuple[MetricsRow, ...]


class MetricsTail:
    """The last 50,000 rows in order of arrival.

    life: differs between lives of the process, so that a reader notices that counting began anew.
    """

    def __init__(self, life: float, *, max_rows: int = _MAX_ROWS) -> None:
        self._life = life
        self._lock = threading.Lock()
        self._rows: deque[MetricsRow] = deque(maxlen=max_rows)
        self._upto = 0

    def add(self, attempt: int, at_s: float, metrics: MetricsPage) -> None:
        with self._lock:
            self._rows.extend(MetricsRow(attempt=attempt, step=s, at_s=at_s, values=v) for s, v in metrics)
            self._upto += len(metrics)

    def since(self, life: float, upto: int, *, max_rows: int = 5_000) -> MetricsNews:
        """The oldest rows after number `upto` that are still here; all of them if `life` was another one."""
        with self._lock:
            new = min(len(self._rows), self._upto - upto if life == self._life else self._upto)
            first = len(self._rows) - new
            rows = tuple(self._rows[i] for i in range(first, min(len(self._rows), first + max_rows)))
            return MetricsNews(life=self._life, upto=self._upto - new + len(rows), rows=rows)
