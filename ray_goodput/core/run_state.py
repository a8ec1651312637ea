"""What a person or a tool may ask about a living run. Plain values, cheap to send."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One training process of the current attempt."""

    world_rank: int
    pid: int
    node_id: str
    node_ip: str


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """What the coordinator tells a rank once a second: the journal record it wants next, whether to save and leave,
    and whether a later attempt has taken its place."""

    next_record: int
    drain: bool
    replaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where an attempt began: after `step` (0: from scratch), read from `tier` ("local", "peer",
    "storage" or "none")."""

    attempt: int
    step: int
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`step`: newest optimizer step finished by rank 0, as of its last heartbeat. -1 means none yet."""

    run: str
    attempt: int
    step: int
    committed_step: int
    workers: tuple[WorkerInfo, ...]
    resumes: tuple[Resume, ...]
    saves_skipped: int = 0
