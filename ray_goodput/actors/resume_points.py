"""Where an attempt goes on: the newest complete save over all tiers. Plain; its owner says which nodes answer.

A save is *near* when every rank's slice lies, verified, on some node of the run. Nothing is promised about it: the
message "committed" is never sent for it, and a node that does not answer takes its copies out of the choice. But an
attempt that goes on from one makes it part of the run's history, so its upload may still commit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from ray_goodput.actors.commits import CommitLog
from ray_goodput.core.commit import CheckpointId, CommitRecord, LandedSlice
from ray_goodput.core.near_copies import NearCopies, NearRecord
from ray_goodput.errors import FencedError
from ray_goodput.storage.checksum import xxh3_128_hex

logger = logging.getLogger(__name__)


class ResumePoints:
    """Thread-safe. `answering(nodes)`: those of the nodes whose vaults answer now; it may take seconds."""

    def __init__(
        self, run: str, run_id: str, commits: CommitLog, answering: Callable[[Collection[str]], Collection[str]]
    ) -> None:
        self._run_id = run_id
        self._commits = commits
        self._answering = answering
        self._near = NearCopies(run, xxh3_128_hex)
        self._chosen_near: CheckpointId | None = None
        self._answered: frozenset[str] = (
            frozenset()
        )  # when it was asked last: a silent node costs a reader half a minute
        self._lock = threading.Lock()

    def held(self, landed: LandedSlice, node_id: str) -> CheckpointId | None:
        """`node_id` holds this slice; returns the newest save that is complete on nodes: older copies can go.

        Raises:
            FencedError: the slice belongs to an attempt that was replaced, or to another run of the same name.
        """
        checkpoint = landed.slice.checkpoint
        self.check_owner(landed)
        with self._lock:  # the fence is raised under it, too: nothing fenced is noted afterwards
            if not self._commits.may_still_commit(checkpoint):
                raise FencedError(f"The copies of step {checkpoint.step}, attempt {checkpoint.attempt}, are of no use.")
            self._near.note(landed, node_id)
            return self._near.newest_complete()

    def check_owner(self, landed: LandedSlice) -> None:
        """Raises FencedError if the slice belongs to another run, deleted since, of the same name."""
        if landed.slice.extra.get("run_id", self._run_id) != self._run_id:
            checkpoint = landed.slice.checkpoint
            raise FencedError(
                f"The slice of step {checkpoint.step}, attempt {checkpoint.attempt}, belongs to a deleted run of the "
                "same name; it is of no use."
            )

    def choose(self, attempt: int) -> CommitRecord | None:
        """The resume point of `attempt`, and nothing of earlier attempts that leads elsewhere counts from now on.

        Raises: as `CommitLog.fence_and_choose`.
        """
        with self._lock:
            nodes = self._near.nodes()
        answering = self._answering(nodes) if nodes else ()
        with self._lock:
            self._answered = frozenset(answering)
            record = self._commits.fence_and_choose(attempt, tuple(self._near.records(answering)))
            self._near.keep_only(self._commits.may_still_commit)
            self._chosen_near = record.checkpoint if isinstance(record, NearRecord) else None
        if isinstance(record, NearRecord):
            logger.info(
                "Attempt %d goes on from step %d, which is complete on the nodes%s.",
                attempt,
                record.checkpoint.step,
                "" if len(answering) == len(nodes) else f" ({len(nodes) - len(answering)} of {len(nodes)} are silent)",
            )
        return record

    def goes_on(self, attempt: int, near: CheckpointId | None, *, wait: bool) -> None:
        """`attempt`, the present one, was told to go on from a commit, or from `near` if that is not None; a life of
        the coordinator before this one may have told it. Without `wait` it may have to be said again."""
        if self._commits.knows_start(attempt, near) or not self._lock.acquire(blocking=wait):
            return
        try:
            if self._commits.knows_start(attempt, near):  # it was told anew meanwhile
                return
            if self._commits.goes_on(attempt, near, wait=wait):
                self._near.keep_only(self._commits.may_still_commit)
                self._chosen_near = near
        finally:
            self._lock.release()

    def mark_bad(self, checkpoint: CheckpointId, reason: str) -> None:
        """Not offered again. Copies on nodes are just forgotten: unlike a commit, nobody was promised that they
        last."""
        with self._lock:
            near = checkpoint in self._near
            self._near.keep_only(lambda c: c != checkpoint)
            copies_only, self._chosen_near = self._chosen_near == checkpoint, None
        if self._commits.is_committed(checkpoint) and not copies_only:  # else it may have been committed since: look
            self._commits.mark_bad(checkpoint, reason)
        elif near:
            logger.warning("The copies of step %d on the nodes cannot be used: %s", checkpoint.step, reason)

    def pass_over(self, checkpoint: CheckpointId, reason: str) -> bool:
        """The copies of `checkpoint` on the nodes are damaged, and the storage, where it may be whole, does not answer:
        it is not offered again if what is chosen next lies on nodes that answered. Else nothing changes."""
        newest = self._commits.newest()
        with self._lock:
            older = [r.checkpoint for r in self._near.records(self._answered) if r.checkpoint < checkpoint]
        if not older or (newest is not None and older[0] < newest.checkpoint):
            return False
        self.mark_bad(checkpoint, reason)
        return True

    def holders(self, checkpoint: CheckpointId) -> dict[str, tuple[str, ...]]:
        """Object name -> nodes that hold a copy, and answered when a resume point was chosen last."""
        with self._lock:
            holders = self._near.holders(checkpoint)
            return {name: tuple(n for n in nodes if n in self._answered) for name, nodes in holders.items()}

    def newest_complete(self) -> CheckpointId | None:
        """The newest save that is complete on nodes, whether or not they answer."""
        with self._lock:
            return self._near.newest_complete()
