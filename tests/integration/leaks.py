"""What a run leaves on the machine: processes, shared memory, open files, disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ray_goodput.actors.names import node_run_dir, slots_dirs
from ray_goodput.storage.disk import is_tmp
from ray_goodput.storage.protocol import ObjectStore
from ray_goodput.testing.find import LiveRun

OURS = (
    "_VaultProcess",
    "_CoordinatorProcess",
    "_ShardCacheProcess",
    "PrefetchActor",
    "RayTrainWorker",
    "TrainController",
)
_SPARE_FILES = 48  # connections to peers that came later, and what a library opens at first use
_KEEP_LOCAL = 2 + 1  # the newest, and the one that the node's ranks resumed from last
_KEEP_LAST = 3
_SETTLE_S = 30.0


def processes_of(local_dirs: Iterable[Path]) -> Iterator[psutil.Process]:
    """Every process that was started on one of these nodes, wherever it hangs in the tree of processes now."""
    roots = {str(path) for path in local_dirs}
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_GOODPUT_LOCAL_DIR") in roots:
                yield process
        except psutil.Error:
            continue


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Open files of what lives through the whole run, by role."""

    open_files: dict[str, int]

    @classmethod
    def take(cls, local_dirs: Sequence[Path], run: LiveRun) -> Snapshot:
        found: dict[str, int] = {}
        for process in processes_of(local_dirs):
            try:
                title = " ".join(process.cmdline())
                role = next((o for o in OURS if o in title), process.name() if "ray::" not in title else "")
                if role and role != "RayTrainWorker":
                    found[role] = max(found.get(role, 0), process.num_fds())
            except psutil.Error:
                continue
        return cls(found)


def assert_no_more_files_open(before: Snapshot, after: Snapshot) -> None:
    for role in (*OURS, "raylet", "gcs_server"):
        if role in before.open_files and role in after.open_files:
            grown = after.open_files[role] - before.open_files[role]
            assert grown <= _SPARE_FILES, f"{role} has {grown} more files open than in the beginning"


def assert_nothing_is_left(local_dirs: Sequence[Path], run: LiveRun, store: ObjectStore) -> None:
    """The run is over: no process, slot, journal or torn file of it is there, and storage has what retention keeps."""
    _until(lambda: _living(local_dirs), "processes")
    _until(lambda: [str(p) for d in local_dirs for p in _slots(d, run.key)], "slots in shared memory")
    for local_dir in local_dirs:
        _until(lambda d=local_dir: [str(p) for p in (node_run_dir(d, run.key) / "journals").rglob("*")], "journals")
        copies = [p.name for p in (node_run_dir(local_dir, run.key) / "checkpoints").glob("*")]
        assert len(copies) <= _KEEP_LOCAL, f"{local_dir} keeps {len(copies)} local checkpoints: {copies}"
        torn = [str(p) for p in local_dir.rglob("*") if is_tmp(p.name)]
        assert not torn, f"unfinished files are left: {torn}"
    folders = store.list_folders("checkpoints")
    committed = {info.key.split("/")[1] for info in store.list("checkpoints") if info.key.endswith("COMMIT.json")}
    assert len(committed) <= _KEEP_LAST, f"{len(committed)} checkpoints in storage"
    assert set(folders) <= committed, f"unfinished checkpoints in storage: {sorted(set(folders) - committed)}"


def _living(local_dirs: Sequence[Path]) -> list[str]:
    found = []
    for process in processes_of(local_dirs):
        try:
            title = " ".join(process.cmdline())[:80]
            stopped = process.status() == psutil.STATUS_STOPPED
            orphan = process.ppid() == 1 and title.startswith("ray::")
            if stopped or orphan or any(name in title for name in OURS):
                found.append(f"{process.pid} {title} ({process.status()})")
        except psutil.Error:
            continue
    return found


def _slots(local_dir: Path, key: str) -> list[Path]:
    return [path for folder in slots_dirs(local_dir, key) for path in folder.rglob("*") if path.is_file()]


def _until(left: Callable[[], list[str]], what: str) -> None:
    """Nothing is left in the end: Ray takes a few seconds to end what a driver had."""
    deadline = time.monotonic() + _SETTLE_S
    while found := left():
        assert time.monotonic() < deadline, f"{what} are left: {found[:10]}"
        time.sleep(0.2)
