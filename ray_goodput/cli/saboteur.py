"""Watches a run from outside and kills a part of it once, in mid-run. Needs no Ray: both are given to it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ray_goodput.core.run_state import RunStatus, WorkerInfo

logger = logging.getLogger(__name__)

STEPS_AFTER_COMMIT = 5
_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What was killed and when. `committed_step` is the newest commit seen before."""

    step: int
    committed_step: int
    victim: WorkerInfo


def choose_victim(status: RunStatus, *, last_step: int) -> WorkerInfo | None:
    """Whom to kill now, if the moment is right: a checkpoint is committed, the run is some steps past it (so that there
    is something to lose) and not about to end. The highest rank: rank 0 is the run's voice in the logs.
    """
    past_commit = status.step - status.committed_step
    if status.committed_step < 0 or past_commit < STEPS_AFTER_COMMIT or not status.workers:
        return None
    if status.step > last_step - STEPS_AFTER_COMMIT:
        return None
    return max(status.workers, key=lambda worker: worker.world_rank)


class Saboteur:
    """A thread of its own: polls `observe` until `close`, calls `kill` at most once; without `kill` it only watches.

    observe: the run's status, or None while it cannot be had (not started, or just restarting).
    kill: makes the worker, or its whole node, go away at once.
    """

    def __init__(
        self,
        observe: Callable[[], RunStatus | None],
        kill: Callable[[WorkerInfo], None] | None,
        *,
        last_step: int,
        say: Callable[[str], None],
    ) -> None:
        self._observe = observe
        self._kill = kill
        self._last_step = last_step
        self._say = say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="demo-saboteur", daemon=True)
        self.strike: Strike | None = None
        self.last: RunStatus | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """The thread has ended, if it could within `timeout_s`."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                status = self._observe()
                if status is not None:
                    self._take(status)
            except Exception as error:  # whatever the run or Ray is going through (the victim just gone), watch on
                logger.debug("The run cannot be observed now: %r", error)

    def _take(self, status: RunStatus) -> None:
        before, self.last = self.last, status
        num_known = len(before.resumes) if before else 0
        for resume in status.resumes[num_known:]:
            where = "begin" if resume.tier == "none" else f"go on after step {resume.step}, from {resume.tier}"
            self._say(f"attempt {resume.attempt}: {len(status.workers)} workers {where}")
        if status.committed_step > (before.committed_step if before else -1):
            self._say(f"step {status.step}: the checkpoint of step {status.committed_step} is committed")
        if self._kill is None or self.strike is not None:
            return
        victim = choose_victim(status, last_step=self._last_step)
        if victim is not None:
            self._say(f"step {status.step}: SIGKILL to rank {victim.world_rank}, process {victim.pid}")
            self._kill(victim)
            self.strike = Strike(step=status.step, committed_step=status.committed_step, victim=victim)
