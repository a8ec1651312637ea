"""Restore: a committed checkpoint becomes the live state, on any world size.

No collective: every rank reads what it needs by the global metadata, so a rank that fails does not leave the others
hanging; the session agrees about success. Files are verified before the first tensor is touched.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.optim import Optimizer

from ray_goodput.checkpoint.apply import apply_objects, apply_optimizer, nested, target_tensor
from ray_goodput.checkpoint.compare import Differences, checkpoint_paths, compare
from ray_goodput.checkpoint.objects import load_object
from ray_goodput.checkpoint.sources import CheckpointSource, LocalFirstSource, StoreSource, Tier
from ray_goodput.checkpoint.state import (
    Path,
    collect_state,
    names_in_groups,
    optimizers_by_path,
    parameter_names,
)
from ray_goodput.checkpoint.verified import VerifiedReader
from ray_goodput.core.commit import rank_state_name

_FILES_AT_ONCE = 4

__all__ = ["CheckpointSource", "LoadReport", "LocalFirstSource", "StoreSource", "VerifiedReader", "load_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What was loaded.

    world_size: ranks of the world that saved.
    tier: the farthest place that had to be asked: this node's own copies, other nodes ("peer"), or storage.
    rank_state: this rank's own state as it was staged; None on another world size.
    bytes: of tensors read by this rank.
    """

    step: int
    world_size: int
    tier: Tier
    rank_state: bytes | None
    seconds: float
    bytes: int


@torch.no_grad()
def load_checkpoint(
    source: CheckpointSource,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    stateful: Mapping[str, Any] | None = None,
    strict: bool = True,
    world_rank: int | None = None,
    world_size: int | None = None,
) -> LoadReport:
    """The live state is that of the checkpoint, bit for bit.

    strict: the checkpoint must hold exactly the live state; otherwise what both have in common is loaded.
    world_rank, world_size: by default those of `torch.distributed`, or one process.

    Raises:
        StructureMismatchError: keys, shapes or dtypes differ; nothing was loaded.
        CorruptCheckpointError, ObjectNotFoundError: the checkpoint is damaged; another must be loaded over it.
    """
    started = time.monotonic()
    stateful = stateful or {}
    reader = VerifiedReader(source.path)
    metadata = reader.read_metadata()
    folder = source.record.checkpoint.folder
    live = collect_state(model=model, optimizer=optimizer, stateful=stateful)
    optimizers = optimizers_by_path(optimizer)
    parameters = parameter_names(model)
    in_groups = {path: names_in_groups(one, parameters) for path, one in optimizers}

    differences = compare(metadata, live, {path: {n for g in groups for n in g} for path, groups in in_groups.items()})
    if strict:
        differences.raise_if_any(folder)
    wanted = {name: path for name, path in checkpoint_paths(metadata).items() if name not in differences.unfit}
    values = _read_objects(reader, metadata, wanted)
    if strict:
        _compare_groups(values, in_groups).raise_if_any(folder)
    owners = {
        (path, name): (param, _placement_flags(values, path, index))
        for path, one in optimizers
        for index, (group, names) in enumerate(zip(one.param_groups, in_groups[path], strict=True))
        for param, name in zip(group["params"], names, strict=True)
    }
    targets: dict[str, torch.Tensor] = {}
    for name, path in wanted.items():
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            targets[name] = values[path] = target_tensor(path, name, entry, live, owners)
    rank_state = _rank_state(source, world_rank, world_size)
    _read_tensors(source, reader, metadata, targets)

    saved = nested({path: values[path] for path in wanted.values()})
    for path, one in optimizers:
        apply_optimizer(one, _part_of(saved, path), parameters)
    apply_objects(saved, stateful, model, live)
    return LoadReport(
        step=source.record.checkpoint.step,
        world_size=source.record.world_size,
        tier=source.tier,
        rank_state=rank_state,
        seconds=time.monotonic() - started,
        bytes=reader.bytes_read,
    )


def _part_of(saved: Any, path: Path) -> dict[str, Any]:
    for key in path:
        if isinstance(saved, list):
            saved = dict(enumerate(saved))
        saved = saved.get(key) or {}
    return saved


def _placement_flags(values: Mapping[Path, Any], prefix: Path, index: int) -> dict[str, Any]:
    """The saved hyperparameters of a group that decide on which device its `step` lies."""
    keys = ("capturable", "fused")
    return {key: values.get((*prefix, "param_groups", index, key)) for key in keys}


def _read_objects(reader: VerifiedReader, metadata: Metadata, wanted: Mapping[str, Path]) -> dict[Path, Any]:
    return {
        path: load_object(name, reader.record_bytes(MetadataIndex(name)))
        for name, path in wanted.items()
        if not isinstance(metadata.state_dict_metadata[name], TensorStorageMetadata)
    }


def _compare_groups(values: Mapping[Path, Any], in_groups: Mapping[Path, list[list[str]]]) -> Differences:
    """Each group must hold the parameters it held: state is found by name, hyperparameters by the group's place."""
    differences = Differences()
    for prefix, groups in in_groups.items():
        for index, names in enumerate(groups):
            saved = values.get((*prefix, "param_groups", index, "params"))
            if isinstance(saved, list) and saved != names:
                label = ".".join(map(str, (*prefix, "param_groups", index)))
                differences.missing += [f"{n} in {label}" for n in names if n not in saved]
                differences.unexpected += [f"{n} in {label}" for n in saved if n not in names]
    return differences


def _read_tensors(
    source: CheckpointSource, reader: VerifiedReader, metadata: Metadata, targets: dict[str, torch.Tensor]
) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    files = sorted({metadata.storage_data[item.storage_index].relative_path for item in plan.items})
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="restore") as pool:
        list(pool.map(source.path, files))  # every file is verified before the first tensor changes
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _rank_state(source: CheckpointSource, world_rank: int | None, world_size: int | None) -> bytes | None:
    together = dist.is_available() and dist.is_initialized()
    world_rank = (dist.get_rank() if together else 0) if world_rank is None else world_rank
    world_size = (dist.get_world_size() if together else 1) if world_size is None else world_size
    name = rank_state_name(world_rank)
    if world_size != source.record.world_size or all(o.name != name for o in source.record.objects):
        return None
    return source.path(name).read_bytes()
