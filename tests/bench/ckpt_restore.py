"""How long a restore takes: our files and stock ones, our reader and `dcp.load`, the same world and another one.

All files were written a moment ago and lie in the page cache, for every arm alike; the slowest rank counts.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckpt_arms import DcpSaveS3, Site
from ckpt_rank import quiet_torch
from ckpt_state import CASES, Training, build
from ckpt_world import RANKS, Place, run_ranks
from results_file import spread
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from committing import commit, put_slice
from ray_goodput.checkpoint.plan import Planner
from ray_goodput.checkpoint.reader import CheckpointSource, LocalFirstSource, StoreSource, load_checkpoint
from ray_goodput.checkpoint.rng import capture_rng
from ray_goodput.checkpoint.stage import Stager
from ray_goodput.checkpoint.state import collect_state
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId, CommitRecord
from ray_goodput.storage import open_store
from ray_goodput.storage.checksum import xxh3_128_hex
from ray_goodput.storage.faults import FaultyStore

WORLD, LOADING = 4, 2
_SIZE = 0.5  # of --state-mb
_LOCAL_LOADS = 3  # for each repeat: those from the page cache are quick, and differ more from one to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSetup:
    site: Site
    state_mb: float
    repeats: int
    rendezvous: str


class Files:
    """Every checkpoint that is loaded, written by ranks `0..world-1` of the four."""

    def __init__(self, site: Site, training: Training, groups: Mapping[int, Any]) -> None:
        self.site = site
        self.training = training
        self.groups = groups

    def ours(self, world: int) -> Path:
        return self.site.disk / f"ours-{world}"

    def stock(self, world: int) -> Path:
        return self.site.disk / f"stock-{world}"

    @property
    def whole(self) -> Path:
        return self.site.disk / "whole.pt"

    def write(self) -> None:
        for world, group in self.groups.items():
            if self.site.world_rank < world:
                self._write_ours(world, group)
                dcp_save(self.training.stock_state(), checkpoint_id=self.stock(world), process_group=group)
        if self.site.world_rank < LOADING:
            writer = DcpSaveS3(self.site, self.training).writer(0)
            dcp_save(self.training.stock_state(), storage_writer=writer, process_group=self.groups[LOADING])
        if self.site.world_rank == 0:
            torch.save(self.training.stock_state(), self.whole)
            store = open_store(self.site.store)
            for path in self.ours(LOADING).iterdir():
                store.upload_file(f"ours/{path.name}", path)
        dist.barrier()

    def _write_ours(self, world: int, group: Any) -> None:
        def gather(value: Any) -> list[Any]:
            answers: list[Any] = [None] * world
            dist.all_gather_object(answers, value, group=group)
            return answers

        rank = self.site.world_rank
        tree = collect_state(model=self.training.model, optimizer=self.training.optimizer)
        stager = Stager(
            Planner(world_rank=rank, world_size=world, gather=gather).plan_for(tree), self.site.memory, num_slots=1
        )
        staged = stager.stage(tree, CheckpointId(1, 1), rank_state=capture_rng())
        assert staged is not None
        parts = gather((staged, put_slice(self.ours(world), staged)))
        if rank == 0:
            commit(self.ours(world), [s for s, _ in parts], [record for _, records in parts for record in records])
        stager.release(staged.slot_path)
        stager.close()
        gather(None)


class Loads:
    """The ways to restore; each loads into the live state of ranks 0 and 1."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._training = files.training
        self.remote_bytes = 0

    def arms(self) -> dict[str, Callable[[], None]]:
        arms: dict[str, Callable[[], None]] = {}
        for world in self._files.groups:
            name = f"{world} to {LOADING} ranks"
            arms[f"our files, our reader, {name}"] = lambda world=world: self._ours_local(world)
            arms[f"our files, dcp.load, {name}"] = lambda world=world: self._stock_reader(self._files.ours(world))
            arms[f"stock files, dcp.load, {name}"] = lambda world=world: self._stock_reader(self._files.stock(world))
        arms["our files from S3, our reader"] = self._ours_remote
        arms["stock files from S3, dcp.load"] = self._stock_remote
        arms["one file, torch.load"] = self._torch_load
        return arms

    def _record(self, world: int) -> CommitRecord:
        return CommitRecord.from_json((self._files.ours(world) / COMMIT_NAME).read_bytes(), xxh3_128_hex)

    def _ours(self, source: CheckpointSource) -> None:
        rank = self._files.site.world_rank
        load_checkpoint(
            source,
            model=self._training.model,
            optimizer=self._training.optimizer,
            world_rank=rank,
            world_size=LOADING,
        )

    def _ours_local(self, world: int) -> None:
        self._ours(LocalFirstSource(self._record(world), [self._files.ours(world)]))

    def _ours_remote(self) -> None:
        site, record = self._files.site, self._record(LOADING)
        store = FaultyStore(open_store(site.store))
        self._ours(StoreSource(record, store, "ours", site.disk / "cache"))
        sizes = {o.name: o.size_bytes for o in record.objects}
        self.remote_bytes += sum(sizes[key.rpartition("/")[2]] for op, key in store.calls if op == "download_file")

    def _stock_reader(self, folder: Path) -> None:
        dcp_load(self._training.stock_state(), checkpoint_id=folder, process_group=self._files.groups[LOADING])

    def _stock_remote(self) -> None:
        site = self._files.site
        reader = FsspecReader(f"{site.store.uri}/step-0", **site.store.options)
        dcp_load(self._training.stock_state(), storage_reader=reader, process_group=self._files.groups[LOADING])

    def _torch_load(self) -> None:
        saved = torch.load(self._files.whole, mmap=True, weights_only=True)
        live = self._training.stock_state()
        self._training.model.load_state_dict(saved["model"])
        for name, state in saved["optimizer"]["state"].items():
            for key, value in state.items():
                live["optimizer"]["state"][name][key].copy_(value)


def restore_main(setup: RestoreSetup, results: Any) -> None:
    """One of four ranks that write; the first two load. Rank 0 gives {arm: [seconds of the slowest rank]}."""
    site = setup.site
    quiet_torch(LOADING)
    dist.init_process_group("gloo", init_method=f"file://{setup.rendezvous}", rank=site.world_rank, world_size=WORLD)
    groups = {world: dist.new_group(list(range(world)), backend="gloo") for world in (LOADING, WORLD)}
    case = replace(CASES[0], world_size=1, size=_SIZE)
    files = Files(site, build(case, setup.state_mb), groups)
    files.write()
    found: dict[str, list[float]] = {}
    if site.world_rank < LOADING:
        loads = Loads(files)
        total = sum(path.stat().st_size for path in files.ours(LOADING).iterdir() if path.name != COMMIT_NAME)
        share: list[float] = []
        for repeat in range(setup.repeats + 1):
            arms = [arm for arm in loads.arms().items() for _ in range(1 if "S3" in arm[0] else _LOCAL_LOADS)]
            random.Random(repeat).shuffle(arms)  # none always after the same one; the same order on both ranks
            for name, load in arms:
                slowest = _timed(load, groups[LOADING])
                if repeat:  # the first round warms the page cache for all
                    found.setdefault(name, []).append(slowest)
            share.append(_sum(loads.remote_bytes, groups[LOADING]) / total)
            loads.remote_bytes = 0
            if site.world_rank == 0:
                shutil.rmtree(site.disk / "cache")
        found["share of the bytes downloaded"] = share
    dist.barrier()
    results.put((site.world_rank, found))
    dist.barrier()
    dist.destroy_process_group()


def _timed(load: Callable[[], None], group: Any) -> float:
    dist.barrier(group)
    started = time.perf_counter()
    load()
    took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
    return took.item()


def _sum(value: float, group: Any) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.item()


def run_restore(place: Place, *, state_mb: float, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Arms and their figures, in the form of `results_file`."""
    scratch, memory = Path(tempfile.mkdtemp(dir=place.disk)), Path(tempfile.mkdtemp(dir=place.memory))
    store = place.store.child(scratch.name)
    results = RANKS.Queue()
    setups = [
        RestoreSetup(
            site=Site(world_rank=rank, world_size=WORLD, store=store, disk=scratch, memory=memory),
            state_mb=state_mb,
            repeats=repeats,
            rendezvous=str(scratch / "rendezvous"),
        )
        for rank in range(WORLD)
    ]
    try:
        found = run_ranks([(restore_main, setup) for setup in setups], results, scratch)[0]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    share = found.pop("share of the bytes downloaded")
    arms = {name: {"restore_s": spread(values)} for name, values in found.items()}
    arms["our files from S3, our reader"]["downloads_to_size"] = spread(share)
    return arms
