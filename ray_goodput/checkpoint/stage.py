"""Stage: copy this rank's share of the live state into a slot; the part of a save that training waits for.

One `copy_` per tensor into warm, mapped memory. A slot belongs to one save at a time: it is claimed, filled, described
by its sidecar, and comes back with `release` when the vault has no more use for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ray_goodput.checkpoint.objects import ObjectSerializer
from ray_goodput.checkpoint.plan import OBJECTS_NAME, SavePlan, image_name
from ray_goodput.checkpoint.sidecar import new_slot_path, sidecar_path, write_sidecar
from ray_goodput.checkpoint.slots import Slot, SlotEvent, SlotState, transition
from ray_goodput.checkpoint.state import StateTree
from ray_goodput.core.commit import METADATA_NAME, CheckpointId, Extent, StagedSlice, rank_state_name
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import CheckpointError, StagingFullError
from ray_goodput.gates import gate
from ray_goodput.storage.disk import free_bytes

logger = logging.getLogger(__name__)

TAIL_BYTES = 1 << 20  # reserved behind the image for objects, rank state and metadata; grows when they need more


def choose_folder(
    plan: SavePlan, folders: Sequence[Path], *, num_slots: int, ranks_of_node: int, first_of_node: bool
) -> Path:
    """The first of `folders` with room for the slots of all ranks of this node, else the last one. The first rank of a
    node says in the log that it is not the first folder."""
    need = (plan.image_bytes + TAIL_BYTES) * num_slots * ranks_of_node
    chosen = next((folder for folder in folders if free_bytes(folder) >= need), folders[-1])
    if chosen != folders[0] and first_of_node:
        logger.warning(
            "Staging slots need %.0f MiB on this node and %s has %.0f MiB free: they go to %s. Saves stall longer so; "
            "give the container a larger /dev/shm.",
            need / 2**20,
            folders[0],
            free_bytes(folders[0]) / 2**20,
            chosen,
        )
    return chosen


class PendingStage:
    """A save whose copies may still run on the device. `finish` waits for them."""

    def __init__(self, stager: Stager, staged: StagedSlice, events: list[Any], keep: list[Any]) -> None:
        self._stager = stager
        self._staged = staged
        self._events = events
        self._keep = keep  # the sources must not be freed while they are being read
        self._finished = False

    @property
    def on_device(self) -> bool:
        """Whether copies may still run."""
        return bool(self._events) and not self._finished

    def abandon(self) -> None:
        """The save is given up: the slot is free again, finished or not. Not after the slice was handed over."""
        if self._finished:
            self._stager.release(self._staged.slot_path)
            return
        self._finished = True
        try:
            for event in self._events:
                event.synchronize()
        finally:
            self._stager.forget(self)
            self._keep = []
            self._stager.mark(self._staged.slot_path, SlotEvent.ABORT)

    def finish(self) -> StagedSlice:
        """The copies are done, the slot is STAGED and its sidecar written; the vault may be told. Idempotent.

        Call it before the next `optimizer.step()`: until then the live tensors must keep their values.

        Raises:
            StagingFullError: no room for the sidecar; the slot is free again.
        """
        if not self._finished:
            self._finished = True
            try:
                for event in self._events:
                    event.synchronize()
                write_sidecar(self._staged)
            except OSError as error:
                self._stager.mark(self._staged.slot_path, SlotEvent.ABORT)
                raise StagingFullError(
                    f"The save of step {self._staged.checkpoint.step} cannot be noted beside its slot "
                    f"{self._staged.slot_path} ({error.strerror}): it is skipped; training goes on."
                ) from error
            except BaseException:  # whatever it was, the slot must not be lost; nothing describes its content
                self._stager.mark(self._staged.slot_path, SlotEvent.ABORT)
                raise
            finally:
                self._stager.forget(self)
                self._keep = []
            self._stager.mark(self._staged.slot_path, SlotEvent.STAGED)
        return self._staged


class Stager:
    """The slots of one rank. `stage` is for the training thread; `release` and `mark` may come from any thread."""

    def __init__(self, plan: SavePlan, slots_dir: str | Path, *, num_slots: int = 2) -> None:
        """`slots_dir`: folder of this node, run and attempt, shared with the node's other ranks."""
        self._plan = plan
        self._slots = [Slot(new_slot_path(Path(slots_dir), plan.world_rank)) for _ in range(num_slots)]
        self._lock = threading.Lock()
        self._serializer = ObjectSerializer()
        self._tail_bytes = TAIL_BYTES
        self._pending: PendingStage | None = None

    @property
    def plan(self) -> SavePlan:
        return self._plan

    @property
    def num_free(self) -> int:
        """Slots that a save could use now."""
        with self._lock:
            return sum(slot.state is SlotState.FREE for slot in self._slots)

    def open(self) -> None:
        """Every slot is allocated and its pages touched: no save waits for the kernel. Call it while restoring.

        Raises:
            StagingFullError: no room; slots that were opened stay.
        """
        for slot in self._slots:
            if slot.state is SlotState.FREE:
                slot.open(self._plan.layout, self._tail_bytes)

    def use(self, plan: SavePlan) -> None:
        """Further saves follow `plan` (the structure changed); slots in use keep what they hold."""
        self._plan = plan

    def stage(
        self,
        tree: StateTree,
        checkpoint_id: CheckpointId,
        *,
        rank_state: bytes,
        cursors: Mapping[str, Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> StagedSlice | None:
        """`begin` and `finish`: this rank's share lies complete in a slot. None if no slot is free."""
        pending = self.begin(tree, checkpoint_id, rank_state=rank_state, cursors=cursors, extra=extra)
        return None if pending is None else pending.finish()

    def begin(
        self,
        tree: StateTree,
        checkpoint_id: CheckpointId,
        *,
        rank_state: bytes,
        cursors: Mapping[str, Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        tier: SaveTier = SaveTier.STORAGE,
    ) -> PendingStage | None:
        """Start copying into a free slot; None if there is none. On a CPU the copies are done when this returns.

        tree: the live state the plan was made for.
        rank_state: JSON of this rank's own state (`capture_rng`).
        tier: how far the vault is to bring it.

        Raises:
            StagingFullError: objects grew and there is no room for them; the slot is free again.
            CheckpointError: an object leaf cannot be saved; the slot is free again.
        """
        self.wait()
        slot = self._claim()
        if slot is None:
            return None
        try:
            sidecar_path(slot.path).unlink(missing_ok=True)
            slot.open(self._plan.layout, self._tail_bytes)
            with torch.no_grad():
                ordered = [name in tree.rank0 for name in self._plan.names]
                events, keep = _copy(slot.views, self._plan.sources(tree), ordered)
            gate("stage", rank=self._plan.world_rank, step=checkpoint_id.step)
            extents, metadata = self._write_tail(slot, tree, rank_state)
        except BaseException:  # whatever it was, the slot must not be lost; nothing describes its content
            self.mark(slot.path, SlotEvent.ABORT)
            raise
        staged = StagedSlice(
            checkpoint=checkpoint_id,
            world_rank=self._plan.world_rank,
            world_size=self._plan.world_size,
            slot_path=str(slot.path),
            extents=extents,
            structure_digest=self._plan.digest,
            cursors=dict(cursors or {}),
            metadata=metadata,
            extra=dict(extra or {}),
            tier=tier,
        )
        self._pending = PendingStage(self, staged, events, keep)
        return self._pending

    def wait(self) -> StagedSlice | None:
        """The last save's copies are done (its slice is returned once); call it before `optimizer.step()`."""
        return None if self._pending is None else self._pending.finish()

    def forget(self, pending: PendingStage) -> None:
        """`pending` is over: `wait` has nothing to wait for."""
        if self._pending is pending:
            self._pending = None

    def release(self, slot_path: str | Path) -> None:
        """The vault is done with a slot: it can be used again. One that is free already stays free."""
        with self._lock:
            slot = self._slot(slot_path)
            if slot.state is not SlotState.FREE:
                after = transition(slot.state, SlotEvent.RELEASE)
                sidecar_path(slot.path).unlink(missing_ok=True)
                slot.state = after

    def mark(self, slot_path: str | Path, event: SlotEvent) -> None:
        """Note how far a slot has come."""
        with self._lock:
            slot = self._slot(slot_path)
            slot.state = transition(slot.state, event)

    def close(self) -> None:
        """Free slots are removed; those that still hold a save are left to the vault."""
        self.wait()
        for slot in self._slots:
            slot.close(remove=slot.state is SlotState.FREE)

    def _claim(self) -> Slot | None:
        with self._lock:
            for slot in self._slots:
                if slot.state is SlotState.FREE:
                    slot.state = transition(slot.state, SlotEvent.CLAIM)
                    return slot
        return None

    def _slot(self, slot_path: str | Path) -> Slot:
        for slot in self._slots:
            if slot.path == Path(slot_path):
                return slot
        raise CheckpointError(f"{slot_path} is not a staging slot of rank {self._plan.world_rank}.")

    def _write_tail(self, slot: Slot, tree: StateTree, rank_state: bytes) -> tuple[tuple[Extent, ...], bytes | None]:
        """Objects, rank state and metadata behind the image; what the slot holds, and the metadata at rank 0."""
        plan, extents, parts, metadata = self._plan, [], [], None
        if plan.image_bytes:
            extents.append(Extent(name=image_name(plan.world_rank), offset=0, size_bytes=plan.image_bytes))
        if plan.world_rank == 0:
            objects = [self._serializer.dump(name, tree.objects[name]) for name in plan.object_names]
            metadata = plan.metadata_bytes([len(data) for data in objects])
            if objects:
                parts.append((OBJECTS_NAME, b"".join(objects)))
            parts.append((METADATA_NAME, metadata))
        parts.append((rank_state_name(plan.world_rank), rank_state))
        end = plan.image_bytes
        for name, data in parts:
            slot.write_tail(end, data)
            extents.append(Extent(name=name, offset=end, size_bytes=len(data)))
            end += len(data)
        self._tail_bytes = max(self._tail_bytes, end - plan.image_bytes)
        return tuple(extents), metadata


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], ordered: list[bool]) -> tuple[list[Any], list[Any]]:
    """Start all copies; returns the events to wait for and what must stay alive until then (none of both on a CPU).

    ordered: sources that change before the next optimizer step (buffers, in the forward pass): their copies are put in
        the device's own order of work, the others run beside it.
    """
    by_device: dict[torch.device, list[int]] = {}
    for number, source in enumerate(sources):
        if source.numel():
            by_device.setdefault(source.device, []).append(number)
    events: list[Any] = []
    for device, numbers in by_device.items():
        if device.type != "cuda":
            to, of = [targets[n] for n in numbers], [sources[n] for n in numbers]
            torch._foreach_copy_(to, of)  # pyright: ignore[reportPrivateImportUsage] (as torch.optim does)
            continue
        current, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        beside.wait_stream(current)  # the last optimizer step first
        for stream, own in ((current, True), (beside, False)):
            with torch.cuda.stream(stream):
                for number in numbers:
                    if ordered[number] is own:
                        targets[number].copy_(sources[number], non_blocking=True)
                events.append(stream.record_event())
    return events, [sources] if events else []
