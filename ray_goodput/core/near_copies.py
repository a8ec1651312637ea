"""Which saves lie complete on the nodes of a run, committed or not. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from ray_goodput.core.commit import CheckpointId, CommitRecord, LandedSlice, assemble_record

_KEEP_COMPLETE = 2  # the newest, and one to fall back to when a copy turns out to be damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class NearRecord(CommitRecord):
    """What the commit record of a save would say that lies complete on the nodes only: no reader outside the run may
    rely on it, and with its nodes it is gone."""


@dataclass(slots=True)
class _Slice:
    landed: LandedSlice
    nodes: set[str]


@dataclass(slots=True)
class NearCopies:
    """Copies of slices, by save and rank, and the nodes they lie on. Not thread-safe: its owner locks."""

    run: str
    checksum: Callable[[bytes], str]
    _saves: dict[CheckpointId, dict[int, _Slice]] = field(default_factory=dict[CheckpointId, dict[int, _Slice]])

    def note(self, landed: LandedSlice, node_id: str) -> None:
        """`node_id` holds verified files of this slice. Idempotent."""
        slices = self._saves.setdefault(landed.slice.checkpoint, {})
        part = slices.get(landed.slice.world_rank)
        if part is None or part.landed.objects != landed.objects:
            part = slices[landed.slice.world_rank] = _Slice(landed, set())
        part.nodes.add(node_id)
        for checkpoint in self._complete(None)[_KEEP_COMPLETE : _KEEP_COMPLETE + 1]:
            self._saves = {c: slices for c, slices in self._saves.items() if c > checkpoint}

    def newest_complete(self) -> CheckpointId | None:
        """The newest save of which every slice lies on some node."""
        return next(iter(self._complete(None)), None)

    def records(self, reachable: Collection[str]) -> Iterator[NearRecord]:
        """Saves of which every slice lies on a node of `reachable`, newest first."""
        for checkpoint in self._complete(reachable):
            landed = {rank: part.landed for rank, part in self._saves[checkpoint].items()}
            yield NearRecord(**assemble_record(self.run, landed, self.checksum))

    def nodes(self) -> set[str]:
        """Every node that holds something."""
        return {node for slices in self._saves.values() for part in slices.values() for node in part.nodes}

    def holders(self, checkpoint: CheckpointId) -> dict[str, tuple[str, ...]]:
        """Object name -> the nodes that hold a copy of it."""
        return {
            entry.name: tuple(sorted(part.nodes))
            for part in self._saves.get(checkpoint, {}).values()
            for entry in part.landed.all_objects(self.checksum)
        }

    def keep_only(self, keep: Callable[[CheckpointId], bool]) -> None:
        self._saves = {checkpoint: slices for checkpoint, slices in self._saves.items() if keep(checkpoint)}

    def __contains__(self, checkpoint: CheckpointId) -> bool:
        return checkpoint in self._saves

    def _complete(self, reachable: Collection[str] | None) -> list[CheckpointId]:
        return [
            checkpoint
            for checkpoint in sorted(self._saves, reverse=True)
            if _is_complete(self._saves[checkpoint], reachable)
        ]


def _is_complete(slices: dict[int, _Slice], reachable: Collection[str] | None) -> bool:
    parts = slices.values()
    world_size = next(iter(parts)).landed.slice.world_size
    there = [p for p in parts if reachable is None or not p.nodes.isdisjoint(reachable)]
    return (
        len(there) == world_size
        and any(p.landed.slice.metadata is not None for p in there)
        and len({(p.landed.slice.structure_digest, p.landed.slice.life) for p in there}) == 1
    )
