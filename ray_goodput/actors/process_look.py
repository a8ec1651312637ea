"""Looks at training processes of this node, and ends those that hang. Linux: by signals, journals and /proc.

A stack comes from the process itself: it has `faulthandler` write all its threads' frames to a file when a signal
comes, in C, so that also a process whose Python is blocked answers. A stopped one cannot; the kernel says that it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_goodput.actors.names import journal_path, stacks_path
from ray_goodput.core.buckets import Bucket
from ray_goodput.errors import StorageError
from ray_goodput.goodput.journal import STEP_DONE, read_journal_end

logger = logging.getLogger(__name__)

STACK_SIGNAL = signal.SIGRTMIN + 7
"""Asks a training process for its stacks. No signal that a user's code or a cluster's manager is likely to use."""

_GONE = frozenset({"", "Z", "X", "x"})
_STACK_WAIT_S = 3.0
_LAST_RECORDS = 64
_SETTLED_S = 0.1
_MAX_STACK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """One training process, seen from its own node.

    state: the kernel's letter for it, "" if it is gone. silent_s, still_s: since its journal's last sign of life, and
    since its last record began, by this node's clock; None without a journal. text: for people, with its stacks.
    stepped: it has done a step in this attempt (of which the last heartbeat that arrived may know nothing).
    """

    world_rank: int
    state: str
    silent_s: float | None
    still_s: float | None
    bucket: Bucket | None
    step: int
    text: str
    stepped: bool = False

    @property
    def gone(self) -> bool:
        return self.state in _GONE


def look_at_ranks(journals: Path, attempt: int, ranks: Sequence[tuple[int, int]]) -> list[RankLook]:
    """What the processes of `ranks` (world rank, pid) do now; takes at most some seconds. Never raises."""
    stacks = _stacks({rank: (pid, stacks_path(journals, attempt, rank)) for rank, pid in ranks})
    # After the stacks, which take a moment: if all of this node was paused, its ranks have given a sign of life by now.
    states = {rank: process_state(pid) for rank, pid in ranks}
    journal = {rank: _journal_of(journal_path(journals, attempt, rank)) for rank, _ in ranks}
    return [
        RankLook(
            world_rank=rank,
            state=states[rank],
            silent_s=journal[rank].silent_s,
            still_s=journal[rank].still_s,
            bucket=journal[rank].bucket,
            step=journal[rank].step,
            stepped=journal[rank].stepped,
            text=_text(rank, pid, states[rank], journal[rank], stacks[rank]),
        )
        for rank, pid in ranks
    ]


def kill_ranks(ranks: Sequence[tuple[int, int]]) -> list[int]:
    """SIGKILL to those of `ranks` (world rank, pid) that are Ray Train workers; which also ends a stopped process.

    Returns the ranks that were killed. A number that now belongs to another program is left alone.
    """
    killed = []
    for rank, pid in ranks:
        if "RayTrainWorker" not in _read(f"/proc/{pid}/cmdline"):
            logger.warning("Process %d is no training process any more; rank %d is not killed.", pid, rank)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(rank)
    return killed


def process_state(pid: int) -> str:
    """The kernel's letter for a process (R, S, D, T, ...), "" if there is none."""
    stat = _read(f"/proc/{pid}/stat")
    return stat.rpartition(")")[2].split()[0] if stat else ""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a rank's journal says; nothing, if it cannot be read."""

    silent_s: float | None = None
    still_s: float | None = None
    bucket: Bucket | None = None
    step: int = -1
    stepped: bool = False


def _journal_of(path: Path) -> _Seen:
    try:
        page = read_journal_end(path, _LAST_RECORDS)
    except (OSError, StorageError):
        return _Seen()
    now_ns = time.monotonic_ns()
    silent_s = max(0.0, (now_ns - page.heartbeat_ns) / 1e9)
    done = page.array[(page.array["flags"] & STEP_DONE) != 0]
    step = int(done["step"].max()) if len(done) else -1
    now = page.open_record
    if now is None:
        return _Seen(silent_s, None, None, step, bool(len(done)))
    still_s = max(0.0, (now_ns - now.start_ns) / 1e9)
    bucket = Bucket(now.bucket) if now.bucket < len(Bucket) else Bucket.OTHER
    return _Seen(silent_s, still_s, bucket, max(step, now.step - 1), bool(len(done)))


def _stacks(processes: dict[int, tuple[int, Path]]) -> dict[int, str]:
    """What each process writes about its stacks within some seconds; "" where it cannot."""
    sizes: dict[int, int] = {}
    for rank, (pid, path) in processes.items():
        if process_state(pid) in (*_GONE, "T", "t") or not _catches(pid, STACK_SIGNAL) or not path.exists():
            continue
        size = _size(path)
        with contextlib.suppress(OSError):
            os.kill(pid, STACK_SIGNAL)
            sizes[rank] = size
    texts = dict.fromkeys(processes, "")
    deadline = time.monotonic() + _STACK_WAIT_S
    waiting, grown = set(sizes), dict(sizes)
    while waiting and time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        for rank in list(waiting):
            size = _size(processes[rank][1])
            if size > sizes[rank] and size == grown[rank]:  # written, and no longer growing
                waiting.discard(rank)
            grown[rank] = size
    for rank, before in sizes.items():
        with contextlib.suppress(OSError), open(processes[rank][1], "rb") as file:
            file.seek(before)
            texts[rank] = file.read(_MAX_STACK_BYTES).decode(errors="replace")
    return texts


def _text(rank: int, pid: int, state: str, seen: _Seen, stacks: str) -> str:
    doing, heard = "unknown", "unknown"
    if seen.bucket is not None:
        doing = f"{seen.bucket.label} for {seen.still_s:.1f} s after step {seen.step}"
    if seen.silent_s is not None:
        heard = f"{seen.silent_s:.1f} s ago"
    lines = [
        f"rank {rank}, process {pid}, state {state or 'gone'}, waits in the kernel at: {_kernel_wait(pid)}",
        f"doing: {doing}; last sign of life: {heard}",
        "",
    ]
    if stacks:
        return "\n".join(lines) + stacks
    why = "it did not answer within some seconds, or had set nothing up."
    if state == "T":
        why = "a stopped process (SIGSTOP) answers no signal but SIGCONT and SIGKILL."
    return "\n".join([*lines, f"No stacks: {why}", ""])


def _kernel_wait(pid: int) -> str:
    """Where in the kernel each thread waits, with how many there; "unknown" where the kernel does not tell."""
    places: dict[str, int] = {}
    for task in _threads(pid):
        place = _read(f"/proc/{pid}/task/{task}/wchan") or "unknown"
        places[place if place != "0" else "running or not told"] = places.get(place, 0) + 1
    return ", ".join(f"{place} ({count} threads)" for place, count in sorted(places.items())) or "unknown"


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _catches(pid: int, number: int) -> bool:
    """Whether the process handles the signal; one that does not would die of it."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
