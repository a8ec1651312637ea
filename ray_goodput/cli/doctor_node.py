"""A node's surroundings: gathered where the node is (also in a Ray task), judged anywhere by pure rules."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ray_goodput.cli.checkpoints import human_bytes
from ray_goodput.config import environment
from ray_goodput.goodput.doctor import Finding

_GIB = 1024**3
_SMALL_SHM = _GIB
_SMALL_DISK = 20 * _GIB
_FEW_FILES = 4096
_SLOW_HEALTH_S = 120.0
_SHORT_STOP_S = 30.0
_SKEW_S = 2.0
_MEMORY_FS = frozenset({"tmpfs", "ramfs"})
_NETWORK_FS = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "beegfs", "glusterfs", "9p", "fuse"})
_VARIABLES = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REQUEST_CHECKSUM_CALCULATION",
    "RAY_JOB_STOP_WAIT_TIME_S",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What was found on a node. Sizes in bytes; `rotational` is None where the kernel does not say; `env`: only the
    variables that matter here. clock_ahead_s: of this node against the asking one, None for that one itself.
    """

    node: str
    shm_total: int | None
    local_dir: str
    local_dir_chosen: bool
    local_dir_fs: str
    rotational: bool | None
    local_free: int
    open_files: int
    python: str
    env: Mapping[str, str] = field(default_factory=dict)
    clock_ahead_s: float | None = None


def gather(env: Mapping[str, str] | None = None) -> NodeFacts:
    """The facts of the node this runs on."""
    env = os.environ if env is None else env
    local_dir = environment(env).local_dir
    existing = next(p for p in (local_dir, *local_dir.parents) if p.exists())
    fs, device = _mount_of(existing)
    shm = Path("/dev/shm")
    return NodeFacts(
        node=platform.node(),
        shm_total=psutil.disk_usage(str(shm)).total if shm.is_dir() else None,
        local_dir=str(local_dir),
        local_dir_chosen=bool(env.get("RAY_GOODPUT_LOCAL_DIR")),
        local_dir_fs=fs,
        rotational=_rotational(device),
        local_free=psutil.disk_usage(str(existing)).free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        python=platform.python_version(),
        env={name: env[name] for name in _VARIABLES if name in env},
    )


def gather_with_time() -> tuple[NodeFacts, float]:
    """For a Ray task: the facts, and this node's wall clock."""
    return gather(), time.time()


def judge(facts: NodeFacts, *, staging_bytes: int | None = None) -> list[Finding]:
    """All checks on one node. staging_bytes: shared memory that a run needs there, if known."""
    found = [_shm(facts, staging_bytes), *_local_dir(facts), *_environment(facts), _files(facts), _clock(facts)]
    return [f for f in found if f is not None]


def _shm(facts: NodeFacts, staging_bytes: int | None) -> Finding:
    need = staging_bytes if staging_bytes is not None else _SMALL_SHM
    have = facts.shm_total
    text = "There is no /dev/shm" if have is None else f"/dev/shm has {human_bytes(have)}"
    wants = "" if staging_bytes is None else f"; this run stages up to {human_bytes(staging_bytes)} a node"
    if have is not None and have >= need:
        return Finding(check="shared memory", level="ok", found=f"{text}{wants}.", where=facts.node)
    return Finding(
        check="shared memory",
        level="problem",
        found=f"{text}{wants}.",
        costs="Saves are staged to disk instead of memory: training stands still longer for each of them, and "
        "torch's DataLoader workers may die with a bus error.",
        mend="Kubernetes: an emptyDir with medium: Memory at /dev/shm. Docker: --shm-size=50%. Else "
        "CheckpointConfig(staging_dir=...) on NVMe.",
        where=facts.node,
    )


def _local_dir(facts: NodeFacts) -> list[Finding]:
    where, fs = facts.node, facts.local_dir_fs
    text = f"The local directory {facts.local_dir} is on {fs}, with {human_bytes(facts.local_free)} free"
    mend = "Set RAY_GOODPUT_LOCAL_DIR, where each node's raylet starts, to a folder on its own NVMe."
    found: list[Finding] = []
    if fs in _MEMORY_FS:
        costs = "The data cache and local checkpoints take memory away from training, and are gone after a reboot."
        found.append(
            Finding(check="local disk", level="problem", found=f"{text}.", costs=costs, mend=mend, where=where)
        )
    elif fs in _NETWORK_FS or fs.startswith("fuse."):
        costs = "The cache crosses the network at each read, and nodes may disturb each other in one folder."
        found.append(
            Finding(check="local disk", level="problem", found=f"{text}.", costs=costs, mend=mend, where=where)
        )
    elif not facts.local_dir_chosen or facts.rotational:
        why = "a rotating disk" if facts.rotational else "the default, which is rarely the fast disk"
        costs = "A slow disk shows as waiting for data from the second epoch on."
        found.append(
            Finding(check="local disk", level="note", found=f"{text}: {why}.", costs=costs, mend=mend, where=where)
        )
    else:
        found.append(Finding(check="local disk", level="ok", found=f"{text}.", where=where))
    if facts.local_free < _SMALL_DISK:
        found.append(
            Finding(
                check="local disk space",
                level="problem",
                found=f"Only {human_bytes(facts.local_free)} are free in {facts.local_dir}.",
                costs="Data shards are fetched again in each epoch, and no checkpoint is kept on the node.",
                mend="Choose a larger disk with RAY_GOODPUT_LOCAL_DIR, or make room there.",
                where=where,
            )
        )
    return found


def _environment(facts: NodeFacts) -> list[Finding]:
    found: list[Finding] = []
    health = _number(facts.env.get("RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"), 600.0)
    if health > _SLOW_HEALTH_S:
        found.append(
            Finding(
                check="health timeout",
                level="note",
                found=f"Ray Train waits {health:.0f} s before it believes that a hanging worker hangs.",
                costs=f"{health / 60:.0f} minutes of every accelerator of the job at each hang.",
                mend="RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S=60 in the driver's environment.",
                where=facts.node,
            )
        )
    stop = _number(facts.env.get("RAY_JOB_STOP_WAIT_TIME_S"), 3.0)
    if stop < _SHORT_STOP_S:
        found.append(
            Finding(
                check="job stop",
                level="note",
                found=f"`ray job stop` sends SIGTERM and, {stop:.0f} s later, SIGKILL.",
                costs="The steps since the newest commit, and the run's last words (its status, its ledger's end).",
                mend="RAY_JOB_STOP_WAIT_TIME_S=60 in the environment of the head node.",
                where=facts.node,
            )
        )
    endpoint = facts.env.get("AWS_ENDPOINT_URL_S3") or facts.env.get("AWS_ENDPOINT_URL")
    if endpoint and facts.env.get("AWS_REQUEST_CHECKSUM_CALCULATION", "").lower() != "when_required":
        found.append(
            Finding(
                check="upload checksums",
                level="note",
                found=f"S3 is at {endpoint}, and pyarrow's client sends checksums that some servers do not understand.",
                costs="Files that Ray itself writes to storage_path may not exist, with no error told.",
                mend="AWS_REQUEST_CHECKSUM_CALCULATION=when_required for the driver and all nodes; --run tries it.",
                where=facts.node,
            )
        )
    return found


def _files(facts: NodeFacts) -> Finding | None:
    if facts.open_files < 0 or facts.open_files >= _FEW_FILES:
        return None
    return Finding(
        check="open files",
        level="note",
        found=f"A process may open {facts.open_files} files.",
        costs="Ray and a data set of many shards run out of them: `Too many open files` in mid-run.",
        mend="ulimit -n 65536 before `ray start`.",
        where=facts.node,
    )


def _clock(facts: NodeFacts) -> Finding | None:
    if facts.clock_ahead_s is None or abs(facts.clock_ahead_s) < _SKEW_S:
        return None
    return Finding(
        check="clock",
        level="note",
        found=f"The clock is {facts.clock_ahead_s:+.1f} s off this machine's.",
        costs="Logs are hard to read, and S3 refuses from 15 min on; the ledger never compares clocks.",
        mend="Run chrony or another time service on every node.",
        where=facts.node,
    )


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text is not None else default
    except ValueError:
        return default


def _mount_of(path: Path) -> tuple[str, str]:
    """File system type and device of the mount that holds `path`."""
    best = ("unknown", "", "")
    for part in psutil.disk_partitions(all=True):
        inside = path.resolve().is_relative_to(part.mountpoint)
        if inside and len(part.mountpoint) >= len(best[2]):
            best = (part.fstype, part.device, part.mountpoint)
    return best[0], best[1]


def _rotational(device: str) -> bool | None:
    name = Path(device).name
    if name.startswith(("vd", "xvd")):
        return None  # virtual disks say that they rotate, whatever is behind them
    for candidate in (name, name.rstrip("0123456789").removesuffix("p"), name.rstrip("0123456789")):
        flag = Path("/sys/block") / candidate / "queue" / "rotational"
        if candidate and flag.is_file():
            return flag.read_text().strip() == "1"
    return None
