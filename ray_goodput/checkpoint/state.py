"""The live training state as a flat tree of names, laid out as `torch.distributed.checkpoint` users know it.

`{"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), NAME: stateful.state_dict()}`
flattened as DCP flattens it, so stock `dcp.load` finds every key. `get_state_dict` itself is not used: it runs an
optimizer step with zero gradients to invent state, and it costs too much for every save.

Two deliberate differences, both only in what a user's own object returns: a mapping whose keys are not strings and that
holds no tensors stays one object (DCP turns its keys into strings, which breaks `MultiStepLR`), and an empty mapping is
kept (DCP drops it).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ray_goodput.errors import CheckpointError

Path = tuple[str | int, ...]
MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(slots=True)
class StateTree:
    """Flat view of the live state; the tensors are the live ones, nothing is copied.

    tensors: name -> tensor or DTensor, detached.
    objects: name -> any other value; rank 0's is the one that is saved.
    paths: name -> keys that lead to the value in the nested dictionary (DCP's `planner_data`).
    rank0: tensors whose value at rank 0 is the one that counts, because ranks may differ: buffers (DDP broadcasts
        rank 0's before the next forward pass) and the tensors of users' own objects.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    rank0: set[str] = field(default_factory=set)
    _signature: tuple[Any, ...] | None = field(default=None, repr=False, compare=False)

    def add(self, path: Path, value: Any, *, rank0: bool = False) -> None:
        """Flatten `value` under `path`.

        Raises:
            CheckpointError: two values get the same name, or a tensor is of a kind that cannot be saved.
        """
        if isinstance(value, torch.Tensor):
            name = self._claim(path)
            self.tensors[name] = _checked(name, value)
            if rank0:
                self.rank0.add(name)
        elif isinstance(value, Mapping) and not _is_object(value):
            for key, item in value.items():
                self.add((*path, str(key)), item, rank0=rank0)
        elif isinstance(value, list) and not _is_plain_list(value):
            for index, item in enumerate(value):
                self.add((*path, index), item, rank0=rank0)
        else:
            self.objects[self._claim(path)] = value

    def _claim(self, path: Path) -> str:
        name = _name(path)
        self._signature = None
        if name in self.paths:
            raise CheckpointError(f"Two values of the state are both called {name!r}: rename one of them.")
        self.paths[name] = path
        return name

    def signature(self) -> tuple[Any, ...]:
        """What the plan depends on, cheap enough for every save: equal signatures, equal structure."""
        if self._signature is None:
            tensors = tuple(
                (name, t.shape, t.dtype, (t.placements, t.device_mesh.shape) if isinstance(t, DTensor) else None)
                for name, t in self.tensors.items()
            )
            self._signature = tensors, tuple(self.objects), tuple(sorted(self.rank0))
        return self._signature


@lru_cache(maxsize=1 << 17)  # the names are the same at every save
def _name(path: Path) -> str:
    return ".".join(map(str, path))


def collect_state(
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    stateful: Mapping[str, Any] | None = None,
) -> StateTree:
    """The flat view of everything that must survive; called at each save, on the training thread.

    Names: `model.NAME` (wrappers' prefixes stripped), `optimizer.state.NAME.KEY`, `optimizer.param_groups.I.KEY`; with
    several optimizers `optimizer.0.state...`; `stateful` objects (with `state_dict()`) under their own name.

    Raises:
        CheckpointError: FSDP1, a tensor that cannot be saved, or names that collide.
    """
    tree = StateTree()
    names = _names_of(model) if model is not None else None
    if model is not None and names is not None:
        _add_model(tree, model, names)
    parameters = parameter_names(model) if optimizer is not None else {}
    for prefix, one in optimizers_by_path(optimizer):
        _add_optimizer(tree, prefix, one, parameters)
    for name, obj in (stateful or {}).items():
        if name in (MODEL, OPTIMIZER):
            raise CheckpointError(f"The name {name!r} is taken by the {name} itself: register the object as another.")
        tree.add((name,), obj.state_dict(), rank0=True)
    return tree


def structure_digest(tree: StateTree, world_size: int) -> str:
    """Hex digest over names, shapes, dtypes, placements, object names and the world size; equal on all ranks."""
    return hashlib.blake2b(repr((tree.signature(), world_size)).encode(), digest_size=16).hexdigest()


def optimizers_by_path(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[tuple[Path, Optimizer]]:
    """(path, optimizer) of each: `("optimizer",)` for one, `("optimizer", i)` for a sequence."""
    if optimizer is None:
        return []
    if isinstance(optimizer, Sequence):
        return [((OPTIMIZER, i), one) for i, one in enumerate(optimizer)]
    return [((OPTIMIZER,), optimizer)]


def parameter_names(model: nn.Module | None) -> dict[torch.Tensor, str]:
    """Live parameter -> its name, the first one where weights are tied (as `get_optimizer_state_dict` does)."""
    if model is None:
        return {}
    names = _names_of(model)
    return {param: names.fqn(model, name) for name, param in model.named_parameters()}


def model_key_names(model: nn.Module) -> dict[str, str]:
    """Key in `model.state_dict()` -> the name it is saved under."""
    names = _names_of(model)
    return {key: names.fqn(model, key) for key in model.state_dict()}


def names_in_groups(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> list[list[str]]:
    """Names of the parameters of each group; one that the model does not own is named by its place."""
    return [
        [names.get(param) or f"group{g}.param{p}" for p, param in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


class _Names:
    """Names in a model's `state_dict`, mapped once to names without the prefixes of wrappers."""

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise CheckpointError(
                "FullyShardedDataParallel (FSDP1) gathers whole tensors to save them: use fully_shard (FSDP2)."
            )
        self._fqns: dict[str, str] = {}
        self._buffers: tuple[int, frozenset[str]] = (-1, frozenset())

    def fqn(self, model: nn.Module, name: str) -> str:
        fqn = self._fqns.get(name)
        if fqn is None:
            try:
                (fqn,) = _get_fqns(model, name)
            except (AttributeError, AssertionError):  # a state_dict hook renamed the key: no module to walk along
                fqn = name
            self._fqns[name] = fqn
        return fqn

    def buffers(self, model: nn.Module, num_keys: int) -> frozenset[str]:
        if self._buffers[0] != num_keys:
            self._buffers = num_keys, frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))
        return self._buffers[1]


_NAMES: weakref.WeakKeyDictionary[nn.Module, _Names] = weakref.WeakKeyDictionary()


def _names_of(model: nn.Module) -> _Names:
    names = _NAMES.get(model)
    if names is None:
        names = _NAMES[model] = _Names(model)
    return names


def _add_model(tree: StateTree, model: nn.Module, names: _Names) -> None:
    state = model.state_dict()
    buffers = names.buffers(model, len(state))
    for name, value in state.items():
        tree.add((MODEL, names.fqn(model, name)), value, rank0=name in buffers)


def _add_optimizer(tree: StateTree, prefix: Path, optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    in_groups = names_in_groups(optimizer, names)
    for group, group_names in zip(optimizer.param_groups, in_groups, strict=True):
        for param, name in zip(group["params"], group_names, strict=True):  # ranks may differ in the order of .state
            for key, value in (optimizer.state.get(param) or {}).items():
                tree.add((*prefix, "state", name, str(key)), value)
    for index, (group, group_names) in enumerate(zip(optimizer.param_groups, in_groups, strict=True)):
        for key, value in group.items():
            tree.add((*prefix, "param_groups", index, key), group_names if key == "params" else value)


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized:
        return tensor.detach() if tensor.requires_grad else tensor
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(f"{name} is a DTensor with partial sums: reduce it before saving.")
    elif type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise CheckpointError(f"{name} is a {type(tensor).__name__}: only plain tensors and DTensors can be saved.")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CheckpointError(
            f"{name} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}: only dense tensors with memory "
            "can be saved."
        )
    return tensor.detach() if tensor.requires_grad else tensor  # detaching a DTensor is slow


def _is_plain_list(value: list[Any]) -> bool:
    """DCP's rule: a list is one leaf unless it holds tensors or mappings, at any depth of lists."""
    return not any(
        isinstance(item, torch.Tensor | Mapping) or (isinstance(item, list) and not _is_plain_list(item))
        for item in value
    )


def _is_object(value: Mapping[Any, Any]) -> bool:
    return not value or (any(not isinstance(key, str) for key in value) and not _has_tensor(value))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)
