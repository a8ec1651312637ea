"""Slots: files in shared memory that hold one rank's share of a save until it is safe elsewhere.

A slot outlives the process that filled it. A *sidecar* (`sidecar.py`) says what lies in it and exists exactly while
the content is complete, so a vault can finish the work of a dead worker. A slot without one is being filled, or was
when its owner died: give each attempt its own folder, and everything in the folders of dead attempts can go.

    FREE --claim--> STAGING --staged--> STAGED --flushed--> FLUSHED --uploaded--> UPLOADED --committed--> COMMITTED
    STAGING --abort--> FREE;  STAGED may go to UPLOADED directly;  release brings STAGED and all later ones to FREE
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_goodput.checkpoint.image import ImageLayout
from ray_goodput.checkpoint.sidecar import remove_slot
from ray_goodput.errors import CheckpointError, StagingFullError

logger = logging.getLogger(__name__)


class SlotState(Enum):
    """What a slot's bytes are."""

    FREE = auto()
    STAGING = auto()
    STAGED = auto()
    FLUSHED = auto()
    UPLOADED = auto()
    COMMITTED = auto()


class SlotEvent(Enum):
    """What happened to a slot."""

    CLAIM = auto()
    ABORT = auto()
    STAGED = auto()
    FLUSHED = auto()
    UPLOADED = auto()
    COMMITTED = auto()
    RELEASE = auto()


_TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.CLAIM): SlotState.STAGING,
    (SlotState.STAGING, SlotEvent.ABORT): SlotState.FREE,
    (SlotState.STAGING, SlotEvent.STAGED): SlotState.STAGED,
    (SlotState.STAGED, SlotEvent.FLUSHED): SlotState.FLUSHED,
    (SlotState.STAGED, SlotEvent.UPLOADED): SlotState.UPLOADED,
    (SlotState.FLUSHED, SlotEvent.UPLOADED): SlotState.UPLOADED,
    (SlotState.UPLOADED, SlotEvent.COMMITTED): SlotState.COMMITTED,
    (SlotState.STAGED, SlotEvent.RELEASE): SlotState.FREE,
    (SlotState.FLUSHED, SlotEvent.RELEASE): SlotState.FREE,
    (SlotState.UPLOADED, SlotEvent.RELEASE): SlotState.FREE,
    (SlotState.COMMITTED, SlotEvent.RELEASE): SlotState.FREE,
}


def transition(state: SlotState, event: SlotEvent) -> SlotState:
    """The state after `event`. Pure.

    Raises:
        CheckpointError: the event cannot happen in this state.
    """
    after = _TRANSITIONS.get((state, event))
    if after is None:
        raise CheckpointError(f"A staging slot that is {state.name} cannot be {event.name.lower()}.")
    return after


class Slot:
    """One mapped file. `open` does the work: room is reserved and every page touched, so that a save meets neither a
    full file system (which would kill the process) nor a page fault.

    Not thread-safe; a `Stager` guards it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = SlotState.FREE
        self.views: list[torch.Tensor] = []
        self.layout: ImageLayout | None = None
        self._fd = -1
        self._size = 0
        self._map: mmap.mmap | None = None
        self._pinned: int | None = None

    def open(self, layout: ImageLayout, tail_bytes: int) -> None:
        """The slot has room for the image and `tail_bytes` more, and holds the image's envelopes.

        Raises:
            StagingFullError: the file system has no room.
        """
        self._reserve(max(layout.size_bytes + tail_bytes, mmap.PAGESIZE))
        if self.layout is layout:
            return
        self._forget_image()
        self._map = mmap.mmap(self._fd, max(layout.size_bytes, mmap.PAGESIZE))
        np.frombuffer(self._map, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
        layout.write_envelopes(self._map)
        self.views = layout.views(self._map)
        self.layout = layout
        self._pin(layout.size_bytes)

    def write_tail(self, offset: int, data: bytes) -> None:
        """Bytes behind the image; the file grows when they need more room.

        Raises:
            StagingFullError: the file system has no room.
        """
        if offset + len(data) > self._size:
            self._reserve(offset + len(data))
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], offset + written)

    def close(self, *, remove: bool) -> None:
        """The mapping is gone; with `remove`, the file and its sidecar too."""
        self._forget_image()
        if remove:
            remove_slot(self.path)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserve(self, size: int) -> None:
        if self._fd < 0:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if size <= self._size:
            return
        try:
            os.posix_fallocate(self._fd, self._size, size - self._size)
        except OSError as error:
            os.ftruncate(self._fd, self._size)  # what little was reserved is given back
            free = shutil.disk_usage(self.path.parent).free
            raise StagingFullError(
                f"Staging needs {_mib(size - self._size)} more in {self.path.parent}, which has {_mib(free)} free "
                f"({error.strerror}). Training goes on from the last commit. Give the container a larger /dev/shm, or "
                "set CheckpointConfig(staging_dir=...) to a folder on NVMe."
            ) from error
        self._size = size

    def _pin(self, size: int) -> None:
        if self._map is None or not size or not (torch.cuda.is_available() and torch.cuda.is_initialized()):
            return
        address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data
        code = int(_cudart().cudaHostRegister(address, size, 0))
        if code:
            logger.warning("Staging slot %s could not be pinned (CUDA error %d): saves stall longer.", self.path, code)
        else:
            self._pinned = address

    def _forget_image(self) -> None:
        if self._pinned is not None:
            _cudart().cudaHostUnregister(self._pinned)
            self._pinned = None
        self.views, self.layout, self._map = [], None, None  # unmapped when the last view is gone


def _cudart() -> Any:
    return torch.cuda.cudart()


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size:,} bytes"
