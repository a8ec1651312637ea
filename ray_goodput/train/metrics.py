"""Training metrics on their way from the loop to the coordinator, read off the training thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

MetricsPage = list[tuple[int, dict[str, float]]]

_MAX_WAITING = 10_000


class MetricsBuffer:
    """Rank 0's metrics since the last heartbeat. Tensors are kept as they are and turned into numbers in `take`,
    which the heartbeat thread calls: the training thread never waits for a device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        # Of what has no graph `detach` would only make another name, at tens of microseconds with cold caches.
        kept = {k: v.detach() if isinstance(v, torch.Tensor) and v.requires_grad else v for k, v in metrics.items()}
        with self._lock:
            self._waiting.append((step, kept))
            if len(self._waiting) > _MAX_WAITING:
                del self._waiting[:-_MAX_WAITING]

    def take(self) -> MetricsPage:
        """Everything noted since the last call, as numbers; what is not a number is left out."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return [(step, _numbers(metrics)) for step, metrics in waiting]

    def put_back(self, page: MetricsPage) -> None:
        """What could not be delivered is offered again."""
        with self._lock:
            self._waiting[:0] = page
            del self._waiting[:-_MAX_WAITING]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                continue
            value = value.item()
        if isinstance(value, int | float):
            numbers[str(name)] = float(value)
    return numbers
