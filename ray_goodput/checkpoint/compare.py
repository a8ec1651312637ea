"""Does a checkpoint fit the live state: keys, shapes and dtypes, compared before the first byte is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ray_goodput.checkpoint.state import MODEL, OPTIMIZER, Path, StateTree
from ray_goodput.errors import CorruptCheckpointError, StructureMismatchError

_SHOWN = 10
_ADDED_BY_SCHEDULERS = "initial_lr"


@dataclass(slots=True)
class Differences:
    """What keeps a checkpoint from fitting, by kind, in words; `unfit` are the names that cannot be loaded."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    unfit: set[str] = field(default_factory=set)

    def raise_if_any(self, folder: str) -> None:
        """Raises StructureMismatchError, naming up to 10 of each kind."""
        kinds = [
            ("not in the checkpoint", self.missing),
            ("only in the checkpoint", self.unexpected),
            ("other shape", self.shapes),
            ("other type", self.dtypes),
        ]
        told = [f"{what} ({len(names)}): {_some(names)}" for what, names in kinds if names]
        if told:
            raise StructureMismatchError(
                f"The checkpoint {folder} is of another model or optimizer; {'; '.join(told)}. Make the state as it "
                "was saved, or pass strict=False to load what fits."
            )


def checkpoint_paths(metadata: Metadata) -> dict[str, Path]:
    """Name -> path of everything in a checkpoint.

    Raises:
        CorruptCheckpointError: the metadata does not tell.
    """
    paths = metadata.planner_data
    if not isinstance(paths, Mapping) or set(paths) != set(metadata.state_dict_metadata):
        raise CorruptCheckpointError("The .metadata of the checkpoint has no path for some of its names.")
    return {name: tuple(path) for name, path in paths.items()}


def compare(metadata: Metadata, live: StateTree, parameters: Mapping[Path, set[str]]) -> Differences:
    """What keeps the checkpoint from fitting the live state.

    parameters: path of each live optimizer -> names of its parameters. Optimizer state need not exist yet: it is made
        from the checkpoint. Of a user's own object only the name is compared, the rest is for its `load_state_dict`.
    """
    differences = Differences()
    saved = checkpoint_paths(metadata)
    live_names = {path[0] for path in live.paths.values()}
    for name, path in saved.items():
        section = path[0]
        if section == OPTIMIZER:
            fits = _fits_optimizer(path, parameters, live)
        else:
            fits = section in live_names and (section != MODEL or name in live.paths)
        if not fits:
            differences.unexpected.append(name)
        elif section == MODEL:
            fits = _compare_entry(differences, name, metadata.state_dict_metadata[name], live.tensors.get(name))
        if not fits:
            differences.unfit.add(name)
    saved_names = {path[0] for path in saved.values()}
    for name, path in live.paths.items():
        if name in saved:
            continue
        own_object = path[0] not in (MODEL, OPTIMIZER) and path[0] in saved_names
        made_by_step = path[0] == OPTIMIZER and ("state" in path[1:3] or path[-1] == _ADDED_BY_SCHEDULERS)
        if not own_object and not made_by_step:
            differences.missing.append(name)
    return differences


def split_optimizer_path(path: Path) -> tuple[Path, Path]:
    """(path of the optimizer, rest) of a path under `optimizer`; several optimizers are numbered."""
    count = 2 if len(path) > 1 and isinstance(path[1], int) else 1
    return path[:count], path[count:]


def _fits_optimizer(path: Path, parameters: Mapping[Path, set[str]], live: StateTree) -> bool:
    prefix, rest = split_optimizer_path(path)
    if prefix not in parameters or len(rest) < 2:
        return False
    if rest[0] == "state":
        return rest[1] in parameters[prefix]
    group = ".".join(map(str, (*prefix, "param_groups", rest[1], "params")))
    return rest[0] == "param_groups" and group in live.objects  # further hyperparameters of a known group are welcome


def _compare_entry(differences: Differences, name: str, entry: Any, tensor: torch.Tensor | None) -> bool:
    saved_tensor = isinstance(entry, TensorStorageMetadata)
    if saved_tensor != (tensor is not None):
        differences.dtypes.append(f"{name} (a tensor only {'in the checkpoint' if saved_tensor else 'now'})")
    elif not saved_tensor or tensor is None:
        return True
    elif entry.size != tensor.shape:
        differences.shapes.append(f"{name} (saved {tuple(entry.size)}, now {tuple(tensor.shape)})")
    elif entry.properties.dtype != tensor.dtype:
        differences.dtypes.append(f"{name} (saved {entry.properties.dtype}, now {tensor.dtype})")
    else:
        return True
    return False


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
