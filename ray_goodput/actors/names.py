"""Names and folders that let the parts of one run find each other. Pure functions of the run and the node."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ray_goodput.config import StoreSpec

NAMESPACE = "ray_goodput"
SHARED_MEMORY = Path("/dev/shm")


def run_key(run: str, store: StoreSpec) -> str:
    """Short, stable name of a run: two runs of one name in two storages do not meet."""
    digest = hashlib.sha256(f"{store.uri}\0{run}".encode()).hexdigest()[:12]
    readable = "".join(c if c.isalnum() or c in "-_." else "_" for c in run)[:60]
    return f"{readable}-{digest}"


def coordinator_name(key: str) -> str:
    return f"coordinator:{key}"


def vault_name(key: str, node_id: str) -> str:
    return f"vault:{key}:{node_id}"


def shard_cache_name(key: str, node_id: str) -> str:
    return f"shard_cache:{key}:{node_id}"


def node_run_dir(local_dir: Path, key: str) -> Path:
    """A run's folder on a node's NVMe: local checkpoint copies and journals."""
    return local_dir / "runs" / key


def local_checkpoints_dir(local_dir: Path, key: str) -> Path:
    return node_run_dir(local_dir, key) / "checkpoints"


def journals_dir(local_dir: Path, key: str) -> Path:
    return node_run_dir(local_dir, key) / "journals"


def slots_dirs(local_dir: Path, key: str, staging_dir: str | None = None) -> list[Path]:
    """Folders that may hold a run's staging slots on this node, in order of preference: the one the user named, or
    shared memory and then the node's NVMe.

    A node is known by its local directory, which is its own also when several Ray nodes share a machine and stays the
    same when Ray is started again: what a dead driver left is found and cleaned by the next one.
    """
    node = hashlib.sha256(str(local_dir.resolve()).encode()).hexdigest()[:12]
    if staging_dir is not None:
        return [Path(staging_dir) / node / key]
    shared = [SHARED_MEMORY / "ray_goodput" / node / key] if SHARED_MEMORY.is_dir() else []
    return [*shared, node_run_dir(local_dir, key) / "slots"]


def attempt_dir(slots: Path, attempt: int) -> Path:
    return slots / f"attempt-{attempt:04d}"


def parse_attempt_dir(name: str) -> int | None:
    prefix, _, number = name.partition("-")
    return int(number) if prefix == "attempt" and number.isdigit() else None


def journal_path(journals: Path, attempt: int, world_rank: int) -> Path:
    """One rank's journal in a run's folder of journals on a node (`journals_dir`)."""
    return attempt_dir(journals, attempt) / f"rank-{world_rank:05d}.journal"


def stacks_path(journals: Path, attempt: int, world_rank: int) -> Path:
    """Where one rank writes its stacks when it is asked for them, beside its journal."""
    return journal_path(journals, attempt, world_rank).with_suffix(".stacks")
