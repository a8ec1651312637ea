"""What a person or a tool may ask about a living run. Plain values, cheap to send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ray_goodput.core.commit import CheckpointId
from ray_goodput.core.hang import HangVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One training process of the current attempt."""

    world_rank: int
    pid: int
    node_id: str
    node_ip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    """What the coordinator tells a rank once a second.

    next_record: the journal record it wants next.
    drain: save and leave the loop, the run ends.
    draining: nodes of the cluster that are about to go, with the seconds left (None: unknown).
    save_number: grows each time somebody wants a save soon.
    replaced: a later attempt has taken the place of the rank's. taken_over: why the run is no longer this driver's, ""
        while it is.
    stop_reason: why the run is to stop without waiting for the storage, "" for not at all.
    """

    next_record: int
    drain: bool = False
    draining: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    save_number: int = 0
    replaced: bool = False
    taken_over: str = ""
    stop_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """What an attempt was told to go on from: `near`, a save that lies on the nodes and was not committed then, else
    (None) a commit or from scratch. Rank 0 says it with every heartbeat: who told it may have died without a note."""

    near: CheckpointId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where an attempt began: after `step` (0: from scratch), read from `tier` ("local", "peer",
    "storage" or "none")."""

    attempt: int
    step: int
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`step`: newest optimizer step finished by rank 0, as of its last heartbeat. -1 means none yet.

    hang: what the watchdog found in the current attempt.
    """

    run: str
    attempt: int
    step: int
    committed_step: int
    workers: tuple[WorkerInfo, ...]
    resumes: tuple[Resume, ...]
    saves_skipped: int = 0
    hang: HangVerdict | None = None


def processes_of(workers: Iterable[WorkerInfo]) -> list[tuple[str, int]]:
    """(node, pid) of each, sorted: the same for the same group of processes, whatever their ranks."""
    return sorted((w.node_id, w.pid) for w in workers)
