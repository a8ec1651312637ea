"""What it takes for a resumed run to end with the bit-identical weights of an undisturbed one.

DDP sorts its gradient buckets anew after the first backward pass, by the order in which gradients arrived. From three
ranks on, that changes the order of summation, so the first step after a restart would differ from the same step of an
unbroken run. With `find_unused_parameters=True` DDP keeps its first buckets. FSDP2 needs nothing.
"""

from __future__ import annotations

import os
from typing import Any

import ray.train.torch
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_goodput.errors import ConfigError

_RANKS_WHOSE_SUM_IS_COMMUTATIVE = 2


def use_deterministic_kernels() -> None:
    """Deterministic algorithms for the rest of this process; an operation that has none raises and names itself."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def prepare_model(model: nn.Module, *, reproducible: bool, **kwargs: Any) -> nn.Module:
    """`ray.train.torch.prepare_model`, keeping DDP's first buckets if `reproducible`."""
    if reproducible and kwargs.get("parallel_strategy", "ddp") == "ddp":
        strategy = {"find_unused_parameters": True, **(kwargs.get("parallel_strategy_kwargs") or {})}
        kwargs["parallel_strategy_kwargs"] = strategy
    return ray.train.torch.prepare_model(model, **kwargs)


def check_model(model: nn.Module, world_size: int) -> None:
    """Refuse a DDP model that cannot be resumed bit-identically.

    Raises:
        ConfigError: DDP over more than two ranks that would re-sort its buckets.
    """
    resorts = isinstance(model, DistributedDataParallel) and not model.find_unused_parameters
    if resorts and world_size > _RANKS_WHOSE_SUM_IS_COMMUTATIVE:
        raise ConfigError(
            f"GoodputTrainer(reproducible=True) with DDP on {world_size} ranks needs a model whose gradient buckets "
            "are not re-sorted: use run.prepare_model(model), or pass find_unused_parameters=True to DDP."
        )
