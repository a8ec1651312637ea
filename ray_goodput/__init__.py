"""Raise and prove the goodput of PyTorch jobs on Ray.

    import ray_goodput as rg

Importing starts nothing and is fast: a name's module (and torch and ray behind it) is imported when the name is first
used.
The map of the package is in README.md beside this file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_goodput.checkpoint.folders import latest_complete as latest_complete
    from ray_goodput.checkpoint.storage_reader import StorageReader as StorageReader
    from ray_goodput.checkpoint.writer import StorageWriter as StorageWriter
    from ray_goodput.config import CheckpointConfig as CheckpointConfig
    from ray_goodput.config import FailureBudget as FailureBudget
    from ray_goodput.config import MlflowConfig as MlflowConfig
    from ray_goodput.config import WatchdogConfig as WatchdogConfig
    from ray_goodput.data.dataset import ShardedDataset as ShardedDataset
    from ray_goodput.data.file_dataset import DataFile as DataFile
    from ray_goodput.data.file_dataset import FileDataset as FileDataset
    from ray_goodput.data.formats import RawFilesFormat as RawFilesFormat
    from ray_goodput.data.formats import TokenFormat as TokenFormat
    from ray_goodput.data.loader import Batch as Batch
    from ray_goodput.data.mixture import Mixture as Mixture
    from ray_goodput.data.torch_loader import DataLoader as DataLoader
    from ray_goodput.errors import GoodputError as GoodputError
    from ray_goodput.train.checkpointer import Checkpointer as Checkpointer
    from ray_goodput.train.entry import session as session
    from ray_goodput.train.trainer import GoodputTrainer as GoodputTrainer

__version__ = "0.1.0"

_HOME = {
    "Checkpointer": "ray_goodput.train.checkpointer",
    "Batch": "ray_goodput.data.loader",
    "CheckpointConfig": "ray_goodput.config",
    "DataFile": "ray_goodput.data.file_dataset",
    "DataLoader": "ray_goodput.data.torch_loader",
    "FailureBudget": "ray_goodput.config",
    "FileDataset": "ray_goodput.data.file_dataset",
    "GoodputError": "ray_goodput.errors",
    "GoodputTrainer": "ray_goodput.train.trainer",
    "Mixture": "ray_goodput.data.mixture",
    "MlflowConfig": "ray_goodput.config",
    "RawFilesFormat": "ray_goodput.data.formats",
    "ShardedDataset": "ray_goodput.data.dataset",
    "StorageReader": "ray_goodput.checkpoint.storage_reader",
    "StorageWriter": "ray_goodput.checkpoint.writer",
    "TokenFormat": "ray_goodput.data.formats",
    "WatchdogConfig": "ray_goodput.config",
    "latest_complete": "ray_goodput.checkpoint.folders",
    "session": "ray_goodput.train.entry",
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll] (names are resolved on first use)


def __getattr__(name: str) -> Any:
    """The public object `name`, imported on first use (PEP 562) and kept."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ray_goodput' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
