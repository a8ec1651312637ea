"""Whether the ranks of an attempt hang, which of them hold up the others, and the sentence why. A pure rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray_goodput.core.buckets import Bucket

QUIET_S = 10.0
"""A rank without a heartbeat (one a second) for this long, or a third of the limit, is not merely late."""

_WAY_OUT = 'long work between two steps belongs in `with run.measure("other")`'

_BEFORE_STEPPING = frozenset({Bucket.STARTUP, Bucket.CKPT_LOAD})
_AFTER_STEPPING = frozenset({Bucket.SHUTDOWN, Bucket.DRAIN})


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Seconds without progress that are too many: of a stopped process, within a step, before an attempt's first
    step."""

    stopped_s: float
    step_s: float
    first_step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSight:
    """What is seen of one rank.

    silent_s: since its last sign of life. still_s: since it last began something (a record of its journal).
    bucket: what it is doing, None if nothing is known yet. step: the last one done. stepped: it has done one in this
    attempt. state: the kernel's letter for the process ("T": stopped), "" if nobody has looked.
    waiting: whether its stack shows it waiting for its peers; None if there is no stack.
    """

    world_rank: int
    node_ip: str
    pid: int
    silent_s: float
    still_s: float
    bucket: Bucket | None = None
    step: int = -1
    stepped: bool = False
    closed: bool = False
    state: str = ""
    waiting: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """Ranks that must go, and why, in one line."""

    culprits: tuple[int, ...]
    reason: str


def hang_limits(
    *,
    hang_after_s: float,
    times_p99_step: float,
    first_step_after_s: float,
    p99_step_s: float | None,
    hangs_in_a_row: int,
) -> HangLimits:
    """`WatchdogConfig` for a run whose steps take `p99_step_s` and that hung `hangs_in_a_row` times without a new step
    in between: what looks like a hang again and again at one place may be honest work, and gets twice the time."""
    base_s = hang_after_s * 2**hangs_in_a_row
    step_s = max(base_s, times_p99_step * (p99_step_s or 0.0))
    return HangLimits(stopped_s=base_s, step_s=step_s, first_step_s=max(step_s, first_step_after_s * 2**hangs_in_a_row))


def worth_a_look(sights: Sequence[RankSight], limits: HangLimits) -> bool:
    """Whether the processes themselves should be looked at: by heartbeats alone a stopped one is only silent."""
    return any(s.silent_s > limits.stopped_s and not s.closed for s in sights) or judge(sights, limits) is not None


def judge(sights: Sequence[RankSight], limits: HangLimits) -> HangVerdict | None:
    """None unless something hangs.

    Silent ranks first: others stand still because of them. Then, if all are alive, those that are furthest behind: the
    others wait for them. While one of those does what may take any time (waits for data, saves, evaluates), nobody
    hangs. Among several in the same step, those whose stacks do not show them waiting for a peer.
    """
    living = [s for s in sights if not s.closed]
    silent = [s for s in living if s.silent_s > min(QUIET_S, limits.stopped_s / 3)]
    if silent:
        culprits = [s for s in silent if s.silent_s > _silence_limit_s(s, limits)]
        return _verdict([(s, _why_silent(s)) for s in culprits]) if culprits else None
    if not living or len(living) < len(sights) or any(s.bucket in _AFTER_STEPPING for s in living):
        return None  # the loop has ended somewhere: no step is owed any more
    behind = [s for s in living if s.step == min(s.step for s in living)]
    if any(s.bucket is not Bucket.STEP for s in behind):
        return None
    if any(s.still_s <= (limits.step_s if s.stepped else limits.first_step_s) for s in behind):
        return None
    busy = [s for s in behind if s.waiting is False]
    return _verdict([(s, _why_still(s, len(behind), bool(busy))) for s in busy or behind])


def _silence_limit_s(sight: RankSight, limits: HangLimits) -> float:
    if sight.state == "T":
        return limits.stopped_s
    slow = sight.bucket is None or sight.bucket in _BEFORE_STEPPING or not sight.stepped
    return limits.first_step_s if slow else limits.step_s


def _why_silent(sight: RankSight) -> str:
    since = f"gave no sign of life for {sight.silent_s:.0f} s"
    if sight.state == "T":
        return f"is stopped (SIGSTOP): it {since}"
    if sight.state == "D":
        return f"is stuck in the kernel (state D: a disk or network file system does not answer): it {since}"
    if sight.state:
        return f"{since}, and its process is not stopped (state {sight.state}): native code holds Python's lock"
    return f"{since}, and nobody on its node could say why"


def _why_still(sight: RankSight, num_behind: int, stands_out: bool) -> str:
    text = f"is alive, but has not finished step {sight.step + 1} for {sight.still_s:.0f} s ({_WAY_OUT})"
    if num_behind > 1 and stands_out:
        return f"{text}; the stacks of the others show them waiting for it"
    if num_behind > 1:
        return f"{text}, like {num_behind - 1} other(s), and no stack stands out"
    return text


def _verdict(culprits: Sequence[tuple[RankSight, str]]) -> HangVerdict:
    parts = [f"rank {s.world_rank} (process {s.pid} on {s.node_ip}) {why}" for s, why in culprits[:4]]
    if len(culprits) > 4:
        parts.append(f"and {len(culprits) - 4} more")
    return HangVerdict(culprits=tuple(sorted(s.world_rank for s, _ in culprits)), reason="Hung: " + "; ".join(parts))
