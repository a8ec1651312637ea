"""What MLflow has not taken yet: bounded in memory, and as bytes for the run's storage when a driver has to leave.

Not thread-safe. The bytes are JSON lines, version 1: a head, then one line for each `Points`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ray_goodput.errors import StorageError
from ray_goodput.goodput.mlflow_values import Points

FORMAT = "ray_goodput.mlflow_spool"
VERSION = 1
FOLDER = "mlflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolHead:
    """All that is needed to send a spool later: which MLflow run, and how the driver's life ended.

    tracking_uri: without credentials. status: "FINISHED", "FAILED" or "KILLED", None if the driver did not say.
    """

    tracking_uri: str
    experiment: str
    run_key: str
    run_name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    status: str | None = None
    ended_at_ms: int | None = None


class Spool:
    """Points in order of time. When there are more than `max_values` numbers, the older half is thinned: a curve with
    every second point is better than one that begins in the middle.
    """

    def __init__(self, max_values: int = 200_000) -> None:
        self._max_values = max_values
        self._points: deque[Points] = deque()
        self.num_values = 0
        self.num_dropped = 0
        """Points (not values) that were thinned out."""

    def __len__(self) -> int:
        return len(self._points)

    def add(self, points: Iterable[Points]) -> None:
        for p in points:
            self._points.append(p)
            self.num_values += len(p.values)
        while self.num_values > self._max_values and len(self._points) > 1:
            self._thin()

    def take(self, max_values: int) -> list[Points]:
        """The oldest points, with at most `max_values` numbers in sum (but at least one point), removed."""
        taken: list[Points] = []
        left = max_values
        while self._points and (not taken or len(self._points[0].values) <= left):
            taken.append(self._points.popleft())
            left -= len(taken[-1].values)
        self.num_values -= max_values - left
        return taken

    def put_back(self, taken: Iterable[Points]) -> None:
        """What could not be sent is the oldest again."""
        taken = list(taken)
        self._points.extendleft(reversed(taken))
        self.num_values += sum(len(p.values) for p in taken)

    def _thin(self) -> None:
        half = (len(self._points) + 1) // 2
        older = [self._points.popleft() for _ in range(half)]
        seen = {True: 0, False: 0}
        kept: list[Points] = []
        for p in older:
            seen[p.goodput] += 1
            if seen[p.goodput] % 2 == 0:
                kept.append(p)
        self._points.extendleft(reversed(kept))
        self.num_dropped += len(older) - len(kept)
        self.num_values = sum(len(p.values) for p in self._points)


def to_bytes(head: SpoolHead, points: Iterable[Points]) -> bytes:
    """The spool as an object of the run's storage."""
    lines = [json.dumps({"format": FORMAT, "version": VERSION, **asdict(head)})]
    lines += [json.dumps([p.at_ms, p.step, p.attempt, p.goodput, dict(p.values)]) for p in points]
    return ("\n".join(lines) + "\n").encode()


def from_bytes(data: bytes) -> tuple[SpoolHead, list[Points]]:
    """What `to_bytes` wrote.

    Raises:
        StorageError: damaged, or written by a newer release.
    """
    try:
        first, *rest = data.splitlines()
        body: dict[str, Any] = json.loads(first)
        kind = (body.pop("format", None), body.pop("version", None))
        if kind != (FORMAT, VERSION):
            raise StorageError(f"The MLflow spool has format {kind}; this release reads {(FORMAT, VERSION)}.")
        points = [
            Points(at_ms=at_ms, step=step, attempt=attempt, goodput=goodput, values=values)
            for at_ms, step, attempt, goodput, values in map(json.loads, rest)
        ]
        return SpoolHead(**body), points
    except (ValueError, TypeError, AttributeError) as error:
        raise StorageError(f"The MLflow spool cannot be read ({error!r}): delete it, nothing else needs it.") from error
