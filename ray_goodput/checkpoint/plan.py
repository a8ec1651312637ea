"""The plan of a save: which bytes this rank writes, where they lie in its file, and DCP's metadata for all of them.

Collective, once per structure: each rank tells what it holds, and then finds the same assignment by itself
(`balance.assign`). Rank 0 also works out the other ranks' files, so that `.metadata` needs no further exchange.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from ray_goodput.checkpoint.balance import Box, Piece, assign
from ray_goodput.checkpoint.image import ImageLayout
from ray_goodput.checkpoint.state import StateTree, structure_digest
from ray_goodput.errors import CheckpointError, StructureMismatchError

Gather = Callable[[Any], list[Any]]
OBJECTS_NAME = "__0_1.distcp"  # the object leaves, in a file of their own: their sizes change, those of tensors do not


def image_name(world_rank: int) -> str:
    """Object that holds one rank's tensors."""
    return f"__{world_rank}_0.distcp"


def alone(value: Any) -> list[Any]:
    """The `gather` of a world of one."""
    return [value]


@dataclass(slots=True)
class SavePlan:
    """One rank's part of every save while the structure holds.

    names, boxes, layout.records: one entry for each chunk this rank writes, in the order of the file.
    object_names: the object leaves, at rank 0; empty elsewhere.
    """

    world_rank: int
    world_size: int
    digest: str
    names: tuple[str, ...]
    boxes: tuple[Box, ...]
    layout: ImageLayout
    object_names: tuple[str, ...]
    _metadata: Metadata | None = None
    _cuts: list[tuple[int, int, int, int]] | None = field(default=None, repr=False)
    _pickled: tuple[tuple[int, ...], bytes] | None = field(default=None, repr=False)

    @property
    def image_bytes(self) -> int:
        """Size of this rank's `.distcp` file."""
        return self.layout.size_bytes

    def sources(self, tree: StateTree) -> list[torch.Tensor]:
        """The live (local) tensors or views that go into the records, in their order."""
        whole = [tree.tensors[name] for name in self.names]
        # Not `to_local`, which makes another view for autograd: at thousands of tensors it is felt in every save.
        sources = [t._local_tensor if isinstance(t, DTensor) else t for t in whole]
        if self._cuts is None:
            self._cuts = [
                (number, dim, start, size)
                for number, (box, local) in enumerate(zip(self.boxes, sources, strict=True))
                for dim, (start, size) in enumerate(zip(box.local, box.sizes, strict=True))
                if size != local.shape[dim]
            ]
        for number, dim, start, size in self._cuts:
            sources[number] = sources[number].narrow(dim, start, size)
        return sources

    def metadata_bytes(self, object_sizes: Sequence[int]) -> bytes:
        """DCP's `.metadata` for the whole world; `object_sizes` are the lengths of the object leaves, in order.

        Rank 0 only. Pickled again only when a length changes.
        """
        if self._metadata is None:
            raise CheckpointError(f"Only rank 0 holds the metadata of a save, this is rank {self.world_rank}.")
        sizes = tuple(object_sizes)
        if self._pickled is None or self._pickled[0] != sizes:
            offset = 0
            for name, size in zip(self.object_names, sizes, strict=True):
                self._metadata.storage_data[MetadataIndex(name)] = _StorageInfo(OBJECTS_NAME, offset, size)
                offset += size
            self._pickled = sizes, pickle.dumps(self._metadata, protocol=4)
        return self._pickled[1]


class Planner:
    """Keeps the plan while the structure of the state stays the same; `gather` is called only when it changes.

    gather: every rank's value, in rank order (`all_gather_object` over a CPU group); it is a collective, so all ranks
        must save at the same steps. Not thread-safe: used by the training thread.
    """

    def __init__(self, *, world_rank: int, world_size: int, gather: Gather = alone) -> None:
        self._world_rank = world_rank
        self._world_size = world_size
        self._gather = gather
        self._signature: tuple[Any, ...] | None = None
        self._plan: SavePlan | None = None

    def plan_for(self, tree: StateTree) -> SavePlan:
        """The plan for `tree`: the same object as before while its structure is the same."""
        signature = tree.signature()
        if self._plan is None or signature != self._signature:
            self._plan = make_plan(tree, world_rank=self._world_rank, world_size=self._world_size, gather=self._gather)
            self._signature = signature
        return self._plan


def make_plan(tree: StateTree, *, world_rank: int, world_size: int, gather: Gather = alone) -> SavePlan:
    """Agree with the other ranks on who writes what. Collective.

    Raises:
        StructureMismatchError: ranks hold different names, shapes, dtypes or placements; on all ranks.
        CheckpointError: the ranks together do not hold all of a sharded tensor.
    """
    digest = structure_digest(tree, world_size)
    held, problem = {}, ""
    try:
        held = {i: _local_chunk(t) for i, t in enumerate(tree.tensors.values()) if isinstance(t, DTensor)}
    except CheckpointError as error:  # told to all: a rank that left now would leave the others waiting
        problem = str(error)
    answers = gather((digest, held, problem))
    if len(answers) != world_size:
        raise CheckpointError(f"The plan of a save needs all {world_size} ranks, {len(answers)} answered.")
    if any(other != digest for other, _, _ in answers):
        _raise_difference(gather(_readable(tree)))
    for rank, (_, _, problem) in enumerate(answers):
        if problem:
            raise CheckpointError(f"Rank {rank} cannot save: {problem}")
    pieces = _pieces(tree, [chunks for _, chunks, _ in answers])
    boxes = assign(pieces, world_size)
    names = tuple(tree.tensors)
    dtypes = [t.dtype for t in tree.tensors.values()]
    needed = range(world_size) if world_rank == 0 else (world_rank,)
    layouts = {r: ImageLayout.build((box.sizes, dtypes[box.tensor]) for box in boxes[r]) for r in needed}
    mine = boxes[world_rank]
    return SavePlan(
        world_rank=world_rank,
        world_size=world_size,
        digest=digest,
        names=tuple(names[box.tensor] for box in mine),
        boxes=tuple(mine),
        layout=layouts[world_rank],
        object_names=tuple(tree.objects) if world_rank == 0 else (),
        _metadata=_metadata(tree, boxes, layouts) if world_rank == 0 else None,
    )


def _local_chunk(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offsets, sizes) of what this rank holds of a DTensor, None if nothing."""
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    local = tuple(tensor.to_local().shape)
    if math.prod(local) != math.prod(chunk.sizes):
        raise CheckpointError(f"A DTensor of shape {tuple(tensor.shape)} has a local part of {local}: padded by hand?")
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _pieces(tree: StateTree, held: Sequence[Mapping[int, Any]]) -> list[Piece]:
    everyone = tuple(range(len(held)))
    pieces: list[Piece] = []
    for index, (name, tensor) in enumerate(tree.tensors.items()):
        shape, itemsize = tuple(tensor.shape), tensor.dtype.itemsize
        rank0 = name in tree.rank0
        if not isinstance(tensor, DTensor):
            pieces.append(Piece(index, (0,) * len(shape), shape, itemsize, everyone, rank0))
            continue
        holders: dict[Any, list[int]] = {}
        for rank, chunks in enumerate(held):
            if chunks[index] is not None and (math.prod(chunks[index][1]) or not tensor.numel()):
                holders.setdefault(chunks[index], []).append(rank)
        if not tensor.numel():
            holders = dict(list(holders.items())[:1])
        covered = sum(math.prod(sizes) for _, sizes in holders)
        if covered != tensor.numel():
            raise CheckpointError(
                f"{name} has {tensor.numel()} elements, the {len(held)} ranks together hold {covered}: all ranks of "
                "its device mesh must take part in the save."
            )
        pieces += [Piece(index, o, s, itemsize, tuple(ranks), rank0) for (o, s), ranks in holders.items()]
    return pieces


def _metadata(tree: StateTree, boxes: Sequence[Sequence[Box]], layouts: Mapping[int, ImageLayout]) -> Metadata:
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(TensorProperties(dtype=t.dtype), torch.Size(t.shape), [])
        for name, t in tree.tensors.items()
    }
    storage: dict[MetadataIndex, _StorageInfo] = {}
    names = tuple(tree.tensors)
    for rank, rank_boxes in enumerate(boxes):
        for box, record in zip(rank_boxes, layouts[rank].records, strict=True):
            name = names[box.tensor]
            chunks = entries[name].chunks
            index = MetadataIndex(name, box.offsets, len(chunks))
            chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
            storage[index] = _StorageInfo(image_name(rank), record.offset, record.length)
    for name in tree.objects:
        entries[name] = BytesStorageMetadata()
    return Metadata(
        state_dict_metadata=entries,
        planner_data=dict(tree.paths),
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _readable(tree: StateTree) -> list[str]:
    tensors, objects, rank0 = tree.signature()
    lines = [f"{name} {tuple(shape)} {dtype} {placement or ''}".rstrip() for name, shape, dtype, placement in tensors]
    return lines + [f"{name} (object)" for name in objects] + [f"{name} (of rank 0)" for name in rank0]


def _raise_difference(structures: Sequence[Sequence[str]]) -> None:
    for rank, lines in enumerate(structures):
        for ours, theirs in zip_longest(structures[0], lines, fillvalue="nothing"):
            if ours != theirs:
                raise StructureMismatchError(
                    f"The state differs between ranks: where rank 0 has {ours}, rank {rank} has {theirs}. All ranks "
                    "must save the same model, optimizer and registered objects, in the same order."
                )
    raise StructureMismatchError("The state differs between ranks: they were started with different world sizes.")
