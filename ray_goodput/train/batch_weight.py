"""Makes the average of the ranks' gradients that of the global batch when the ranks' batches differ in size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class BatchWeight:
    """Scales the gradient at the model's output by `weight` (n_r * world / global batch), before it is averaged.

    Nothing is touched while the weight is 1, the usual case, so that results stay bit-identical to a loop without it.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._weight = 1.0
        self._model: nn.Module | None = None
        self._hooked = False

    def attach(self, model: nn.Module) -> None:
        self._model = model

    def set(self, weight: float) -> None:
        """The weight of the batch that comes next."""
        self._weight = weight
        if weight != 1.0 and self._enabled and not self._hooked and self._model is not None:
            self._model.register_full_backward_pre_hook(self._scale)
            self._hooked = True

    def _scale(self, module: nn.Module, grad_output: Any) -> Any:
        if self._weight == 1.0:
            return None
        return tuple(g * self._weight if isinstance(g, torch.Tensor) else g for g in grad_output)
