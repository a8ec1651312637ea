"""Training metrics of one attempt as a bounded curve: a fixed number of points, each the mean of some steps.

When the points run out, two become one. So the file of an attempt stays below a megabyte however long it trains, and
can be written whole each time. Pure; README.md of this folder has the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_goodput.errors import StorageError

FOLDER = "metrics"
FORMAT = "ray_goodput.metrics"
VERSION = 1
MAX_POINTS = 2000
MAX_NAMES = 32
"""Metrics with a curve: the first ones an attempt reports."""


def object_name(attempt: int) -> str:
    """Key of an attempt's curve within the run's folder."""
    return f"{FOLDER}/attempt-{attempt:04d}.jsonl"


@dataclass(frozen=True, slots=True)
class MetricsPoint:
    """Means over `num` steps, the last being `step`; `at_s`: when the coordinator heard of it (its wall clock).

    A mean is NaN when one of its values was not finite.
    """

    step: int
    at_s: float
    num: int
    values: Mapping[str, float]


class MetricsLog:
    """The curve of one attempt. Not thread-safe."""

    def __init__(self, attempt: int, *, max_points: int = MAX_POINTS) -> None:
        self.attempt = attempt
        self._max = max_points
        self._stride = 1
        self._points: list[MetricsPoint] = []
        self._names: dict[str, None] = {}

    @property
    def points(self) -> tuple[MetricsPoint, ...]:
        return tuple(self._points)

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics it has curves of, in the order they came."""
        return tuple(self._names)

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        """Metrics of a step; a step that was told already, or is older than the newest one, is left out."""
        for name in values:
            if len(self._names) < MAX_NAMES:
                self._names.setdefault(name)
        values = {n: v if math.isfinite(v) else math.nan for n, v in values.items() if n in self._names}
        self.append(MetricsPoint(step, at_s, 1, values))

    def append(self, point: MetricsPoint) -> None:
        """A point of another curve of the same attempt, as `add` would have it."""
        if self._points and point.step <= self._points[-1].step:
            return
        if self._points and self._points[-1].num < self._stride:
            self._points[-1] = _merged(self._points[-1], point)
        else:
            self._points.append(point)
        if len(self._points) > self._max:
            pairs = zip(self._points[0::2], [*self._points[1::2], None], strict=False)
            self._points = [_merged(a, b) if b else a for a, b in pairs]
            self._stride *= 2

    def to_bytes(self) -> bytes:
        """The whole curve as JSON lines (UTF-8)."""
        head = {"format": FORMAT, "version": VERSION, "attempt": self.attempt, "stride": self._stride}
        lines = [head, *({"step": p.step, "at": p.at_s, "num": p.num, "values": _to_json(p)} for p in self._points)]
        return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, max_points: int = MAX_POINTS) -> MetricsLog:
        """The curve that `to_bytes` wrote.

        Raises:
            StorageError: it cannot be read, or a newer release wrote it.
        """
        lines = data.splitlines()
        try:
            head: dict[str, Any] = json.loads(lines[0])
            if (head["format"], head["version"]) != (FORMAT, VERSION):
                raise StorageError(
                    f"The metrics have format {head['format']!r} version {head['version']}, this release reads "
                    f"{FORMAT!r} version {VERSION}: use the release that wrote them."
                )
            log = cls(int(head["attempt"]), max_points=max_points)
            log._stride = int(head["stride"])
            log._points = [_from_json(json.loads(line)) for line in lines[1:]]
            log._names = dict.fromkeys(name for p in log._points for name in p.values)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise StorageError(
                f"A curve of metrics cannot be read ({error!r}): delete it to go without; goodput and checkpoints are "
                "not affected."
            ) from error
        return log


def main_metric(logs: Iterable[MetricsLog]) -> str | None:
    """The metric to show: "loss", else the first with "loss" in its name, else the first."""
    names = list(dict.fromkeys(name for log in logs for name in log.names))
    return next((n for n in names if n == "loss"), next((n for n in names if "loss" in n), names[0] if names else None))


def _merged(a: MetricsPoint, b: MetricsPoint) -> MetricsPoint:
    num = a.num + b.num
    values: dict[str, float] = {}
    for name in {**a.values, **b.values}:
        if name in a.values and name in b.values:
            values[name] = (a.values[name] * a.num + b.values[name] * b.num) / num
        else:
            values[name] = a.values[name] if name in a.values else b.values[name]
    return MetricsPoint(b.step, b.at_s, num, values)


def _to_json(point: MetricsPoint) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in point.values.items()}


def _from_json(line: dict[str, Any]) -> MetricsPoint:
    values = {str(n): math.nan if v is None else float(v) for n, v in line["values"].items()}
    return MetricsPoint(int(line["step"]), float(line["at"]), int(line["num"]), values)
