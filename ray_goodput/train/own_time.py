"""How long a rank computes by itself in a step, without its waits for peers: what tells a slow rank from its victims.

In a synchronous step all ranks take equally long, since each waits for the slowest. So the clock stops before the wait:
from the batch to the moment at which the backward pass reaches the model's first parameter. Data-parallel collectives
run beside the backward pass and are waited for after it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import nn

_MAX_PENDING = 8
_WARM_UP = 5
"""Steps of an attempt that say nothing about a rank's pace: they compile, and fill caches."""


class OwnTime:
    """Not thread-safe: used by the training thread. Costs two clock reads and one hook a batch.

    With a model whose parameters get no gradient of their own (FSDP shards) nothing is measured.
    """

    def __init__(self) -> None:
        self._began: Any = None
        self._own_s = 0.0
        self._skip = _WARM_UP
        self._on_device = False
        self._pending: deque[list[tuple[Any, Any]]] = deque(maxlen=_MAX_PENDING)  # event pairs, a list for each step
        self._spans: list[tuple[Any, Any]] = []

    def attach(self, model: nn.Module) -> None:
        """Watch the first parameter that is trained; with none, nothing is measured."""
        first = next((p for p in model.parameters() if p.requires_grad), None)
        if first is not None:
            self._on_device = first.device.type == "cuda"
            first.register_hook(self._reached)

    def begin(self) -> None:
        """The rank begins to compute: it has a batch."""
        self._began = self._now()

    def take(self) -> float:
        """Seconds of the step that just ended, or, on a device, of the newest one that the device has finished; 0 if
        that is unknown."""
        own_s = self._take()
        if own_s > 0 and self._skip > 0:
            self._skip -= 1
            return 0.0
        return own_s

    def _take(self) -> float:
        self._began = None
        if not self._on_device:
            own_s, self._own_s = self._own_s, 0.0
            return own_s
        if self._spans:
            self._pending.append(self._spans)
            self._spans = []
        own_s = 0.0
        while self._pending and self._pending[0][-1][1].query():
            own_s = sum(start.elapsed_time(end) for start, end in self._pending.popleft()) / 1e3
        return own_s

    def _reached(self, gradient: torch.Tensor) -> None:
        began, self._began = self._began, None
        if began is None:  # a second backward pass of one batch
            return
        if self._on_device:
            self._spans.append((began, self._now()))
        else:
            self._own_s += self._now() - began

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
