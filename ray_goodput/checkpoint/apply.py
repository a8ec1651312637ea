"""Push what was read from a checkpoint into the live objects: optimizers, users' own objects, a model's extra state.

Tensors that exist are read in place. Optimizer state of a fresh optimizer does not exist yet: it is allocated as the
checkpoint says and as torch would have done it. `Optimizer.load_state_dict` is not used: it casts state to the
parameter's dtype, and its stock companion invents state for parameters that never had a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from ray_goodput.checkpoint.compare import split_optimizer_path
from ray_goodput.checkpoint.state import MODEL, OPTIMIZER, Path, StateTree, model_key_names, names_in_groups


def nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    """The nested dictionary whose leaf at each path is the value."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        set_element(root, path, value)
    return root


def target_tensor(
    path: Path,
    name: str,
    entry: TensorStorageMetadata,
    live: StateTree,
    parameters: Mapping[tuple[Path, str], tuple[torch.Tensor, Mapping[str, Any]]],
) -> torch.Tensor:
    """Where a tensor of the checkpoint is read to: the live one if it fits, else a new one.

    parameters: (optimizer path, parameter name) -> (parameter, hyperparameters of its group as saved).
    """
    tensor = live.tensors.get(name)
    if tensor is not None and tensor.shape == entry.size and tensor.dtype == entry.properties.dtype:
        return tensor
    dtype = entry.properties.dtype
    owner = parameters.get(_state_owner(path))
    if owner is None:
        return torch.zeros(entry.size, dtype=dtype, device=tensor.device if tensor is not None else "cpu")
    param, group = owner
    if path[-1] == "step" and not entry.size:
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
    if entry.size == param.shape:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=dtype, device=param.device)


def apply_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[torch.Tensor, str]) -> None:
    """The optimizer has the saved hyperparameters and, for exactly the parameters that had state, the saved state."""
    groups = saved.get("param_groups", [])
    states = saved.get("state", {})
    for group, group_names, values in zip(
        optimizer.param_groups, names_in_groups(optimizer, names), groups, strict=False
    ):
        for param, name in zip(group["params"], group_names, strict=True):
            if name in states:
                optimizer.state[param] = states[name]
            else:
                optimizer.state.pop(param, None)
        for key, value in values.items():  # in place: schedulers hold on to these dictionaries
            if key == "params":
                continue
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, int | float):
                group[key].fill_(value)
            else:
                group[key] = value


def apply_objects(
    saved: Mapping[str, Any], stateful: Mapping[str, Any], model: nn.Module | None, live: StateTree
) -> None:
    """Users' objects and modules with extra state get their values through their own methods."""
    for name, obj in stateful.items():
        if name in saved:
            obj.load_state_dict(_with_key_types(saved[name], obj.state_dict()))
    if model is None:
        return
    extra = {
        str(path[1])
        for name, path in live.paths.items()
        if len(path) > 1 and path[0] == MODEL and (len(path) > 2 or name in live.objects)
    }
    values = saved.get(MODEL, {})
    if extra:
        keys = model_key_names(model)
        model.load_state_dict(
            {k: values[fqn] for k, fqn in keys.items() if fqn in extra and fqn in values}, strict=False
        )


def _state_owner(path: Path) -> tuple[Path, str]:
    """(optimizer path, parameter name) of a path to optimizer state; a pair that no parameter has for any other."""
    if path[0] == OPTIMIZER:
        prefix, rest = split_optimizer_path(path)
        if len(rest) > 2 and rest[0] == "state":
            return prefix, str(rest[1])
    return (), ""


def _with_key_types(value: Any, live: Any) -> Any:
    """Keys of mappings became strings on the way; where the live object has a key of that spelling, take its type."""
    if type(value) is dict and isinstance(live, Mapping):  # a Counter or the like was saved as one object
        keys = {str(key): key for key in live}
        return {keys.get(k, k): _with_key_types(v, live.get(keys.get(k, k))) for k, v in value.items()}
    if isinstance(value, list) and isinstance(live, list) and len(live) == len(value):
        return [_with_key_types(v, item) for v, item in zip(value, live, strict=True)]
    return value
