"""How many workers the run goes on with: whether to start with what is there or to wait, and when to grow.

Pure: from an observed state to a decision and the sentence why. Time comes in as durations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ray_goodput.core.reliability import shrink_pays_after_s

FIRST_RESIZE_S = 30.0
"""What a resize is taken to cost before this run has measured one."""
GROW_COMMIT_AGE_S = 10.0
"""The group grows only while its newest commit is younger: what came after it is done again."""
ASK_AGAIN_S = 60.0
"""A save that was asked for and did not come (skipped, or the storage is away) is asked for again after this time."""


def workers_that_fit(nodes: Iterable[Mapping[str, float]], worker: Mapping[str, float], *, at_most: int) -> int:
    """How many workers of these resources the nodes have room for. A worker does not span nodes."""
    needs = {name: amount for name, amount in worker.items() if amount > 0}
    if not needs:
        return at_most
    # 0.3 / 0.1 is a little less than 3.
    room = sum(min(math.floor(node.get(name, 0.0) / need + 1e-6) for name, need in needs.items()) for node in nodes)
    return min(room, at_most)


class Start(Enum):
    """What to do about a worker group that is down."""

    GO = "start"
    WAIT = "wait"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownState:
    """A worker group that is down, or was never up.

    possible: workers that the usable nodes have room for; left_out: nodes not counted, since they are silent or going.
    waited_s: how long it has been down. failed_starts: starts in that time that came to nothing.
    replacement_s: how long a replacement node usually takes, None if nobody knows. resize_s: what a resize costs.
    """

    possible: int
    min_workers: int
    max_workers: int
    waited_s: float
    max_wait_s: float | None
    left_out: int = 0
    failed_starts: int = 0
    ran_before: bool = True
    replacement_s: float | None = None
    resize_s: float = FIRST_RESIZE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDecision:
    action: Start
    reason: str
    num_workers: int = 0


def decide_start(state: DownState) -> StartDecision:
    """Start with what is there, down to the minimum, unless waiting for a replacement loses less; give up in the end.

    Shrinking to N - k of N pays when (N - k) W > 2 N R, with W until the replacement comes and R a resize, down and up
    (only up for a run that begins). Without an estimate of W the run never waits for what may not come.
    """
    overdue = state.max_wait_s is not None and state.waited_s > state.max_wait_s
    if state.possible < state.min_workers:
        need = f"{state.min_workers} worker(s) are needed and the usable nodes have room for {state.possible}"
        if overdue:
            return StartDecision(action=Start.GIVE_UP, reason=f"For {state.waited_s:.0f} s, {need}{_left_out(state)}.")
        return StartDecision(action=Start.WAIT, reason=f"Waiting for nodes: {need}{_left_out(state)}.")
    if overdue and state.failed_starts > 0:
        reason = (
            f"For {state.waited_s:.0f} s the nodes seemed to have room for {state.possible} worker(s), and "
            f"{state.failed_starts} start(s) failed all the same"
        )
        return StartDecision(action=Start.GIVE_UP, reason=reason + ".")
    if state.possible >= state.max_workers:
        return _go(state, f"all {state.max_workers} workers can be had")
    wait = _pays_to_wait(state)
    if wait:
        return StartDecision(action=Start.WAIT, reason=wait)
    return _go(state, f"{state.possible} of {state.max_workers} workers can be had now{_left_out(state)}")


def _pays_to_wait(state: DownState) -> str:
    """Why waiting for the missing workers loses less than starting without them; "" if it does not."""
    replacement_s = state.replacement_s
    if replacement_s is None or state.waited_s >= replacement_s:
        return ""
    resize_s = state.resize_s if state.ran_before else state.resize_s / 2.0
    lost = state.max_workers - state.possible
    threshold_s = shrink_pays_after_s(state.max_workers, lost, resize_s)
    if replacement_s > threshold_s:
        return ""
    return (
        f"Waiting for {lost} of {state.max_workers} workers: a replacement takes about {replacement_s:.0f} s, and "
        f"starting without it pays only from {threshold_s:.0f} s on (a resize costs {state.resize_s:.0f} s)."
    )


def _go(state: DownState, why: str) -> StartDecision:
    return StartDecision(action=Start.GO, num_workers=state.possible, reason=f"Starting {state.possible}: {why}.")


def _left_out(state: DownState) -> str:
    return f" ({state.left_out} node(s) left out: silent or about to go)" if state.left_out else ""


class Grow(Enum):
    """What to do about a running group that could be larger."""

    NOW = "grow"
    SAVE_FIRST = "ask for a save"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningState:
    """A worker group that runs.

    commit_age_s: of the newest commit; None: there is none. asked_s_ago: since a save was asked for, None if it was
    not.
    """

    num_workers: int
    possible: int
    commit_age_s: float | None
    asked_s_ago: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowDecision:
    action: Grow
    reason: str


def decide_growth(state: RunningState, *, max_commit_age_s: float = GROW_COMMIT_AGE_S) -> GrowDecision:
    """Grow right after a commit, since a resize throws away what came after it; ask for that commit first."""
    if state.possible <= state.num_workers:
        return GrowDecision(action=Grow.WAIT, reason=f"No room for more than {state.num_workers} workers.")
    what = f"from {state.num_workers} to {state.possible} workers"
    if state.commit_age_s is not None and state.commit_age_s <= max_commit_age_s:
        return GrowDecision(
            action=Grow.NOW, reason=f"Growing {what}: the newest commit is {state.commit_age_s:.0f} s old."
        )
    age = (
        "there is no commit yet"
        if state.commit_age_s is None
        else f"the newest commit is {state.commit_age_s:.0f} s old"
    )
    if state.asked_s_ago is None or state.asked_s_ago >= ASK_AGAIN_S:
        return GrowDecision(action=Grow.SAVE_FIRST, reason=f"Asking for a save before growing {what}: {age}.")
    return GrowDecision(action=Grow.WAIT, reason=f"Growing {what} waits for the save that was asked for: {age}.")


@dataclass(frozen=True, slots=True)
class SeenDurations:
    """The newest few durations of one kind that this run has seen; their median is the estimate."""

    seen_s: tuple[float, ...] = ()

    def noted(self, duration_s: float) -> SeenDurations:
        return SeenDurations((*self.seen_s[-4:], duration_s))

    def estimate_s(self) -> float | None:
        return statistics.median(self.seen_s) if self.seen_s else None
