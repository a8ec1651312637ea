"""The ways to save that are compared: ours, a bare upload, and those of PyTorch. Ray's own is in `ckpt_ray`.

An arm's `save` returns when training may go on; `done` is asked after each step until it is true on all ranks.
"""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckpt_state import Training
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.rank_stager import RankStager
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import CheckpointId
from ray_goodput.train.world import World

_TIDY_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an arm works: S3, a folder on disk, one in shared memory; `inbox` and `answers` of the node's process,
    `removals` of who empties the S3 folder."""

    world_rank: int
    world_size: int
    store: StoreSpec
    disk: Path
    memory: Path
    inbox: Any = None
    answers: Any = None
    removals: Any = None


class Arm:
    """A synchronous way to save; the others override what they do differently."""

    asynchronous = False

    def __init__(self, site: Site, training: Training) -> None:
        self.site = site
        self.training = training
        self.durable_at = 0.0

    def prepare(self) -> None:
        """Called once the optimizer has stepped, some steps before the first save."""

    def save(self, step: int) -> None:
        self.write(step)
        self.durable_at = time.perf_counter()

    def write(self, step: int) -> None:
        """Not called by arms that have a `save` of their own."""
        raise NotImplementedError

    def done(self) -> bool:
        return True

    def tidy(self, step: int) -> None:
        """What the save of `step` wrote is removed, at rank 0, outside of what is timed."""
        shutil.rmtree(self.folder(step), ignore_errors=True)

    def close(self) -> None:
        pass

    def folder(self, step: int) -> Path:
        return self.site.disk / f"step-{step}"


class _InNodeProcess(Arm):
    """The node's process does the work and says when it was done."""

    asynchronous = True

    def done(self) -> bool:
        if not self.durable_at:
            try:
                self.durable_at = self.site.answers.get_nowait()
            except queue.Empty:
                return False
        return True

    def tidy(self, step: int) -> None:
        """By the benchmark's own process, whose memory nobody counts; waited for, as the other arms' removals are."""
        self.site.removals.put(step)
        assert self.site.answers.get(timeout=_TIDY_TIMEOUT_S) == step


class Ours(_InNodeProcess):
    """What a session does in `run.save()`: collect, plan, stage, one message."""

    def __init__(self, site: Site, training: Training) -> None:
        super().__init__(site, training)
        self._world = World.join(site.world_rank, site.world_size)
        self._attempt = 0
        self._staged = ""
        self._renew()

    def _renew(self) -> None:
        self._attempt += 1
        self._stager = RankStager(self._world, lambda _: self.site.memory / f"attempt-{self._attempt:04d}")

    def prepare(self) -> None:
        self._stager.prepare(self._tree())

    def save(self, step: int) -> None:
        if self._staged:
            self._stager.release(self._staged)
        self.durable_at = 0.0
        self.site.inbox.put(self._stage(step))

    def stage_as_new(self, steps: Callable[[], Any]) -> float:
        """Seconds of an attempt's first save: its slots are made behind `steps`. Nothing is uploaded. Collective."""
        self.close()
        self._renew()
        self.prepare()
        steps()
        dist.barrier()
        started = time.perf_counter()
        self._stage(0)
        return time.perf_counter() - started

    def slice_bytes(self) -> int:
        return self._stager.plan_for(self._tree()).image_bytes

    def close(self) -> None:
        if self._staged:
            self._stager.release(self._staged)
            self._staged = ""
        self._stager.close()

    def _stage(self, step: int) -> Any:
        tree = self._tree()
        self._stager.plan_for(tree)
        extra = {"rng_seed": torch.initial_seed()}
        pending = self._stager.begin(tree, CheckpointId(step, 1), rank_state=capture_rng(), extra=extra)
        assert pending is not None, "no free slot, or no room for one"
        staged = pending.finish()
        self._staged = staged.slot_path
        return staged

    def _tree(self) -> Any:
        return collect_state(model=self.training.model, optimizer=self.training.optimizer)


class BareUpload(_InNodeProcess):
    """As many bytes as ours, uploaded by the same client from a file in memory, and nothing else."""

    def prepare(self) -> None:
        site = self.site
        world = World.join(site.world_rank, site.world_size)
        planner = Planner(world_rank=site.world_rank, world_size=site.world_size, gather=world.gather)
        tree = collect_state(model=self.training.model, optimizer=self.training.optimizer)
        site.memory.mkdir(parents=True, exist_ok=True)
        self._path = site.memory / f"bare-{site.world_rank}"
        left = planner.plan_for(tree).image_bytes
        with self._path.open("wb") as file:
            while left:
                left -= file.write(b"\1" * min(left, 1 << 24))

    def save(self, step: int) -> None:
        self.durable_at = 0.0
        self.site.inbox.put((self.site.world_rank, str(self._path), step))

    def close(self) -> None:
        self._path.unlink()


class TorchSave(Arm):
    """Rank 0 writes everything into one file; the others wait."""

    def write(self, step: int) -> None:
        state = self.training.whole_state()
        if self.site.world_rank == 0:
            self.folder(step).mkdir(parents=True, exist_ok=True)
            torch.save(state, self.folder(step) / "state.pt")
        dist.barrier()


class DcpSave(Arm):
    """DCP to a folder on disk."""

    def write(self, step: int) -> None:
        dcp_save(self.training.stock_state(), checkpoint_id=self.folder(step))


class _OneByOne(FileSystem):
    """Deletes by the request for one object: the gateway refuses the one for many as botocore writes it."""

    def rename(self, path: Any, new_path: Any) -> None:
        fs: Any = self.fs
        fs.cp_file(path, new_path)
        fs.rm_file(path)


class DcpSaveS3(Arm):
    """DCP straight to S3."""

    def writer(self, step: int) -> FsspecWriter:
        path = f"{self.site.store.uri}/step-{step}"
        writer = FsspecWriter(path, **self.site.store.options)
        writer.fs = _OneByOne()
        writer.fs.init_path(path, **self.site.store.options)
        return writer

    def write(self, step: int) -> None:
        dcp_save(self.training.stock_state(), storage_writer=self.writer(step))

    def tidy(self, step: int) -> None:
        fs: Any = self.writer(step).fs.fs
        fs.invalidate_cache()
        for key in fs.find(f"{self.site.store.uri}/step-{step}"):
            fs.rm_file(key)


class AsyncThread(DcpSaveS3):
    """`async_save` to S3 as it comes: a fresh copy on every rank, then a thread. Its group is its own, else it could
    deadlock with the trainer's."""

    asynchronous = True
    kind = AsyncCheckpointerType.THREAD

    def __init__(self, site: Site, training: Training) -> None:
        super().__init__(site, training)
        self._group: Any = dist.new_group(backend="gloo")
        self._stager = self.stager()

    def stager(self) -> DefaultStager | None:
        return None

    def save(self, step: int) -> None:
        self.durable_at = 0.0
        answer: Any = async_save(
            self.training.stock_state(),
            storage_writer=self.writer(step),
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        if not isinstance(answer, Future):
            answer.staging_completion.result()
            answer = answer.upload_completion
        self._future: Future[Any] = answer
        answer.add_done_callback(self._note)

    def _note(self, future: Future[Any]) -> None:
        self.durable_at = time.perf_counter()

    def done(self) -> bool:
        if self._future.done():
            self._future.result()
        return self.durable_at > 0

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class AsyncProcess(AsyncThread):
    """The same with a process that writes."""

    kind = AsyncCheckpointerType.PROCESS


class AsyncProcessKept(AsyncProcess):
    """The best that PyTorch offers on a CPU: the copy goes to shared memory that is kept from save to save."""

    def stager(self) -> DefaultStager:
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )


ARMS: dict[str, type[Arm]] = {
    "ours": Ours,
    "bare upload": BareUpload,
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.save, FsspecWriter": DcpSaveS3,
    "async_save, thread": AsyncThread,
    "async_save, process": AsyncProcess,
    "async_save, process, kept": AsyncProcessKept,
}
