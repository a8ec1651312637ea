"""Nodes with vaults round one coordinator, without Ray: for tests of copies on nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_goodput.actors.coordinator import RunCoordinator
from ray_goodput.actors.names import attempt_dir
from ray_goodput.actors.peer_copy import PeerCopier
from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.checkpoint.sidecar import write_sidecar
from ray_goodput.clock import ManualClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import CheckpointId, Extent, StagedSlice
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import RunError, StorageError
from ray_goodput.storage import open_store
from ray_goodput.storage.faults import FaultyStore


class NearNodes:
    """`nodes` names, one rank each, rank 0 on the first. `silent`: nodes that are gone; `storage_up`: uploads work."""

    def __init__(
        self, root: Path, nodes: Sequence[str] = ("a", "b"), *, peer_copies: int = 0, domains: Mapping[str, str] = {}
    ) -> None:
        self.root = root
        self.names = list(nodes)
        self.peer_copies = peer_copies
        self.silent: set[str] = set()
        self.storage_up = True
        self.domains = {name: domains.get(name, "") for name in nodes}
        self.store = FaultyStore(open_store(StoreSpec(uri=str(root / "storage"))), before=self._strike)
        self.before_receive: Callable[[str, int], None] = lambda node, offset: None
        self.coordinator = self._new_coordinator(restarted=False)
        self.vaults = {name: self.vault(name) for name in nodes}

    def restart_coordinator(self, *, new_driver: bool = False) -> None:
        """A new life of the coordinator, with what storage tells it."""
        self.coordinator.stop()
        self.coordinator = self._new_coordinator(restarted=not new_driver)

    def _new_coordinator(self, *, restarted: bool) -> RunCoordinator:
        def answering(nodes: Collection[str]) -> set[str]:
            return set(nodes) - self.silent

        made = RunCoordinator(
            run="run",
            store=self.store,
            clock=ManualClock(),
            target_world=len(self.names),
            answering=answering,
            domains=lambda: {name: d for name, d in self.domains.items() if name not in self.silent},
            restarted=restarted,
        )
        made.open()
        return made

    def vault(self, name: str) -> CheckpointVault:
        """The vault of a node: its first life, or the next one."""
        copier = PeerCopier(node_id=name, copies=self.peer_copies, peers=self._to_coordinator(), connect=self.connect)
        return CheckpointVault(
            node_id=name,
            store=self.store,
            coordinator=self._to_coordinator(),
            near=self._to_coordinator(),
            peers=copier if self.peer_copies else None,
            local_checkpoints=self.local(name),
            slots=[self.root / name / "slots"],
            journals=self.root / name / "journals",
            sleep=lambda s: None,
            give_up_after_s=0.0,
        )

    def local(self, name: str) -> Path:
        return self.root / name / "checkpoints"

    def connect(self, name: str) -> Any:
        nodes = self

        class Peer:
            def __getattr__(self, method: str) -> Any:
                def call(*args: Any) -> Any:
                    if method == "receive":
                        nodes.before_receive(name, args[3])
                    if name in nodes.silent:
                        raise RunError(f"The actor vault:{name} did not answer.")
                    return getattr(nodes.vaults[name], method)(*args)

                return call

        return Peer()

    def stage(
        self, step: int, *, attempt: int = 1, tier: SaveTier = SaveTier.STORAGE, life: str = "1", size: int = 100
    ) -> list[StagedSlice]:
        """Every rank's slice of a save lies in its slot; nobody was told."""
        return [self._stage_rank(rank, step, attempt, tier, life, size) for rank in range(len(self.names))]

    def _stage_rank(self, rank: int, step: int, attempt: int, tier: SaveTier, life: str, size: int) -> StagedSlice:
        folder = attempt_dir(self.root / self.names[rank] / "slots", attempt)
        folder.mkdir(parents=True, exist_ok=True)
        slot = folder / f"rank-{rank:05d}-{step}-{life}.slot"
        data = content(step, rank, life, size)
        metadata = b"meta" if rank == 0 else None
        slot.write_bytes(data + (metadata or b""))
        extents = [Extent(name=f"__{rank}_0.distcp", offset=0, size_bytes=size)]
        if metadata:
            extents.append(Extent(name=".metadata", offset=size, size_bytes=len(metadata)))
        staged = StagedSlice(
            checkpoint=CheckpointId(step, attempt),
            world_rank=rank,
            world_size=len(self.names),
            slot_path=str(slot),
            extents=tuple(extents),
            structure_digest="d",
            cursors={},
            metadata=metadata,
            extra={"run_id": self.coordinator.identity(), "life": life},
            tier=tier,
        )
        write_sidecar(staged)
        return staged

    def persist(self, slices: Sequence[StagedSlice]) -> None:
        for staged in slices:
            self.vaults[self.names[staged.world_rank]].persist(staged)

    def hold(self, attempt: int, nodes: Sequence[str] | None = None) -> None:
        for name in nodes or self.names:
            if name not in self.silent:
                self.vaults[name].hold(attempt)

    def _to_coordinator(self) -> Any:
        nodes = self

        class Port:
            def __getattr__(self, method: str) -> Any:
                return getattr(nodes.coordinator, method)

        return Port()

    def _strike(self, op: str, key: str, n: int) -> None:
        if not self.storage_up:
            raise StorageError("503")


def content(step: int, rank: int, life: str = "1", size: int = 100) -> bytes:
    """What a rank's object holds at a step."""
    word = f"{step} {rank} {life} ".encode()
    return (word * (size // len(word) + 1))[:size]
