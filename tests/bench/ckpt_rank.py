"""One rank of a timed world: steps, saves between them, and steps while a save is still under way."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from ckpt_arms import ARMS, Arm, BareUpload, Ours, Site
from ckpt_state import Case, build

OVER, BEFORE_ANY_SAVE, SAVING = 0, 1, 2  # phases of a rank's life; save number n is in SAVING + n

_DEVICE_S = 0.03
_QUIET_STEPS = 20
_BETWEEN_STEPS = 50  # of a new attempt before its first save, far fewer than a real one's
_SETTLE_S = 0.4  # for the watch of memory to look several times


@dataclass(slots=True)
class Measured:
    """What one rank saw; seconds. `first`: saves of a fresh attempt. `memcpy`: all ranks copy their slices at once."""

    slice_bytes: int = 0
    stall: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    uploading: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)


class Steps:
    """A step as on an accelerator: some work of the host, a wait for the device, an all-reduce with the other ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._left = torch.rand(384, 384)
        self._flag = torch.zeros(1)

    def run(self, done: bool) -> tuple[float, bool]:
        """Seconds it took, and whether every rank was `done` when it began."""
        started = time.perf_counter()
        for _ in range(3):
            self._left = torch.tanh(self._left @ self._left)
        time.sleep(_DEVICE_S)
        self._flag.fill_(float(done))
        dist.all_reduce(self._flag)
        return time.perf_counter() - started, self._flag.item() == self._world_size

    def quiet(self, number: int) -> list[float]:
        return [self.run(True)[0] for _ in range(number)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a rank's process is told. `phase`: rank 0's word to who watches the memory."""

    case: Case
    arm: str
    state_mb: float
    repeats: int
    rendezvous: str
    site: Site
    phase: Any


def rank_main(setup: Setup, results: Any) -> None:
    """A whole rank, in a process of its own; its `Measured` goes to `results`."""
    quiet_torch(setup.case.world_size)
    site = setup.site
    dist.init_process_group(
        "gloo", init_method=f"file://{setup.rendezvous}", rank=site.world_rank, world_size=site.world_size
    )
    training = build(setup.case, setup.state_mb)
    arm = ARMS[setup.arm](site, training)

    def mark(phase: int) -> None:
        dist.barrier()
        if site.world_rank == 0:
            setup.phase.value = phase

    measured = measure(arm, setup.repeats, mark)
    results.put((site.world_rank, measured))
    dist.barrier()
    dist.destroy_process_group()


def quiet_torch(world_size: int) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # for the process of async_save, which asks for the host's name else
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))


def measure(arm: Arm, repeats: int, mark: Callable[[int], None]) -> Measured:
    """Collective. One save more than `repeats`: the first one counts as first."""
    measured = Measured()
    steps = Steps(arm.site.world_size)
    steps.quiet(5)
    copy = Memcpy(arm.slice_bytes()) if isinstance(arm, Ours) else None
    gc.collect()
    mark(BEFORE_ANY_SAVE)
    time.sleep(_SETTLE_S)
    mark(SAVING)
    arm.prepare()
    for repeat in range(repeats + 1):
        measured.quiet += steps.quiet(_QUIET_STEPS)
        if copy is not None:
            measured.memcpy.append(copy.run())
        mark(SAVING + repeat)
        dist.barrier()
        started = time.perf_counter()
        arm.save(repeat)
        (measured.stall if repeat else measured.first).append(time.perf_counter() - started)
        while True:
            took, all_done = steps.run(arm.done())
            if all_done:
                break
            measured.uploading.append(took)
        if repeat:
            measured.durable.append(arm.durable_at - started)
        dist.barrier()
        if arm.site.world_rank == 0:
            arm.tidy(repeat)
        dist.barrier()
    mark(OVER)
    if isinstance(arm, Ours):
        measured.slice_bytes = arm.slice_bytes()
        measured.first += [arm.stage_as_new(lambda: steps.quiet(_BETWEEN_STEPS)) for _ in range(repeats - 1)]
    if isinstance(arm, BareUpload):
        measured.first.clear()
    arm.close()
    return measured


class Memcpy:
    """Copies of one slice between two warm buffers, by all ranks at once."""

    def __init__(self, slice_bytes: int) -> None:
        self._source = torch.ones(slice_bytes, dtype=torch.uint8)
        self._target = torch.ones(slice_bytes, dtype=torch.uint8)

    def run(self) -> float:
        dist.barrier()
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started
