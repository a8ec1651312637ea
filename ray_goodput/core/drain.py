"""Notice that a node or a process is about to go: whom it concerns, and how long its attempt waits for a last commit.

Pure: durations come in as seconds that are left, so no two machines' clocks are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_goodput.core.run_state import WorkerInfo

UNKNOWN_LEFT_S = 120.0
"""How long a last commit is waited for when nobody said when the node goes."""
MIN_WAIT_S = 10.0
"""Waited at least: nodes often stay a little longer than announced, and what is not committed when the attempt leaves
is lost. A node that goes meanwhile ends the wait by itself: its peers' next agreement fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveNotice:
    """`ranks` are about to go in `left_s` seconds (None: nobody knows), for `reason`."""

    reason: str
    ranks: tuple[int, ...]
    left_s: float | None = None


def notice_of_nodes(draining: Mapping[str, float | None], workers: Iterable[WorkerInfo]) -> LeaveNotice | None:
    """What draining nodes (node id -> seconds left) mean to these workers; None if none of them runs there."""
    leaving = [worker for worker in workers if worker.node_id in draining]
    if not leaving:
        return None
    nodes = sorted({worker.node_ip for worker in leaving})
    return LeaveNotice(
        reason=f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(nodes)} being drained",
        ranks=tuple(sorted(worker.world_rank for worker in leaving)),
        left_s=_earliest([draining[worker.node_id] for worker in leaving]),
    )


def merged(notices: Iterable[LeaveNotice | None]) -> LeaveNotice | None:
    """One notice out of what each rank knows: all who go, and the earliest time."""
    known = [notice for notice in notices if notice is not None]
    if not known:
        return None
    return LeaveNotice(
        reason="; ".join(dict.fromkeys(notice.reason for notice in known)),
        ranks=tuple(sorted({rank for notice in known for rank in notice.ranks})),
        left_s=_earliest([notice.left_s for notice in known]),
    )


def commit_wait_s(notice: LeaveNotice) -> float:
    """How long the attempt waits for its last commit before it leaves."""
    return UNKNOWN_LEFT_S if notice.left_s is None else max(notice.left_s, MIN_WAIT_S)


def farewell(notice: LeaveNotice, *, step: int, committed: bool) -> str:
    """Why the attempt ended, and from where the run goes on."""
    kept = f"step {step} is committed" if committed else f"step {step} could not be committed in time"
    who = f"rank{'s' if len(notice.ranks) != 1 else ''} {', '.join(map(str, notice.ranks))}"
    return f"The attempt left after notice ({notice.reason}; {who}): {kept}, the run goes on from the newest commit."


def _earliest(left_s: Sequence[float | None]) -> float | None:
    return min((seconds for seconds in left_s if seconds is not None), default=None)
