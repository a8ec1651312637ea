"""The commit protocol of one run: which slices have landed, what is committed, who is fenced. No Ray here.

One lock guards the tables; a second one, `_decision`, makes "write a commit record" and "raise the fence" exclude
each other, so that a resume point once given out is never overtaken by a dead attempt's late commit (C6).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ray_goodput.checkpoint.folders import CHECKPOINTS
from ray_goodput.clock import Clock
from ray_goodput.core.catalog import Catalog, abandoned_folders
from ray_goodput.core.commit import (
    COMMIT_NAME,
    METADATA_NAME,
    CheckpointId,
    CommitRecord,
    LandedSlice,
    assemble_record,
)
from ray_goodput.core.near_copies import NearRecord
from ray_goodput.errors import CorruptCheckpointError, FencedError, ObjectNotFoundError, StorageError
from ray_goodput.storage.checksum import xxh3_128_hex
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A save whose slices are still arriving."""

    world_size: int
    landed: dict[int, LandedSlice] = field(default_factory=dict)
    committing: bool = False


class CommitLog:
    """Collects landed slices and writes commit records; loads what earlier lives of the run committed.

    Thread-safe. `open()` reads the storage; nothing else must be called before it.

    check_owner: raises FencedError if another driver has taken the run; asked just before and just after a commit
        record is written.
    """

    def __init__(
        self,
        *,
        run: str,
        store: ObjectStore,
        clock: Clock,
        keep_last: int = 3,
        keep_every: int | None = None,
        check_owner: Callable[[], None] | None = None,
    ) -> None:
        self._run = run
        self._store = store
        self._clock = clock
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._catalog = Catalog()
        self._pending: dict[CheckpointId, _Pending] = {}
        self._check_owner = check_owner or (lambda: None)
        self._fenced_out = ""
        self._fence = 0
        self._trunk: CheckpointId | None = None  # what the newest attempt resumed from, if that is not committed
        self._told = 0  # the newest attempt that was told in this life: what it says of its start can only be older
        self._highest_attempt = 0
        self._sweep_failed = False
        self._held_until_mono_s: float | None = None
        self._changed = threading.Condition()
        self._decision = threading.Lock()

    def open(self) -> None:
        """Read every commit record of the run. A folder without a valid one is no checkpoint."""
        folders = self._folders()
        with ThreadPoolExecutor(max_workers=8) as pool:
            records = list(pool.map(self._read_record, folders))
        with self._changed:
            for folder, record in zip(folders, records, strict=True):
                if isinstance(record, CommitRecord):
                    self._catalog.add(record)
                elif record is not None:
                    self._catalog.mark_bad(folder, str(record))
            self._highest_attempt = max((f.attempt for f in folders), default=0)

    @property
    def highest_attempt(self) -> int:
        """The largest attempt number that ever wrote anything, 0 for none."""
        return self._highest_attempt

    def restore_fence(self, attempt: int, trunk: CheckpointId | None = None) -> None:
        """After the coordinator's own restart: attempts before `attempt` stay fenced (C6), but for `trunk`, the save
        that it went on from if that was not committed."""
        with self._decision, self._changed:
            if attempt > self._fence:
                self._fence, self._trunk = attempt, trunk

    def hold_commits(self, for_s: float) -> None:
        """No commit record is written for so long, unless `goes_on` or `fence_and_choose` tells earlier which attempt
        is the present one. After a restart: what a life before told it, and could not note down, fences as well."""
        with self._changed:
            self._held_until_mono_s = self._clock.mono_s() + for_s

    def knows_start(self, attempt: int, trunk: CheckpointId | None) -> bool:
        """Whether `goes_on` would change nothing. Never waits."""
        with self._changed:
            known = attempt == self._fence and trunk == self._trunk and self._held_until_mono_s is None
            return known or attempt < self._fence or attempt == self._told

    def goes_on(self, attempt: int, trunk: CheckpointId | None, *, wait: bool) -> bool:
        """`attempt`, the present one, was told to go on from a commit, or from `trunk` if that was not one: fenced is
        what that fences, and commits are written again. False: a record is being written and `wait` is not set."""
        if not self._decision.acquire(blocking=wait):
            return False
        try:
            with self._changed:
                if attempt >= self._fence and attempt != self._told:
                    self._raise_fence(attempt, trunk)
        finally:
            self._decision.release()
        return True

    def fence_all(self, reason: str) -> None:
        """From now on no attempt of this driver can commit, restore or prune; whoever waits is told so at once."""
        with self._changed:
            self._fenced_out = reason
            self._changed.notify_all()

    def newest(self) -> CommitRecord | None:
        with self._changed:
            return self._catalog.newest()

    def records(self) -> list[CommitRecord]:
        """Good commits, newest first."""
        with self._changed:
            return list(self._catalog.newest_first())

    def fence_and_choose(self, attempt: int, near: Sequence[NearRecord] = ()) -> CommitRecord | None:
        """The resume point of `attempt`; from now on no earlier attempt can commit.

        near: saves that lie complete on nodes that answer, newest first. One that is newer than the newest commit is
            chosen, and is then part of the run's history: it, and what its attempt saved before it, may still commit.

        Raises:
            FencedError: a later attempt has already asked.
            CorruptCheckpointError: there are checkpoints, and all are damaged: going on would mean starting from
                scratch, which only a person may decide.
        """
        with self._decision, self._changed:
            if self._fenced_out:
                raise FencedError(self._fenced_out)
            if attempt < self._fence:
                raise FencedError(
                    f"Attempt {attempt} was replaced by attempt {self._fence}; it may not restore or save."
                )
            newest, bad = self._catalog.newest(), self._catalog.bad
            chosen = next((r for r in near if newest is None or r.checkpoint > newest.checkpoint), newest)
            self._told = attempt
            self._raise_fence(attempt, chosen.checkpoint if isinstance(chosen, NearRecord) else None)
        if chosen is None and bad:
            reasons = "; ".join(f"{checkpoint.folder} ({reason})" for checkpoint, reason in sorted(bad.items()))
            raise CorruptCheckpointError(
                f"All {len(bad)} checkpoint(s) of this run are damaged: {reasons}. Training does not start from "
                "scratch by itself: mend the storage, or choose a new RunConfig(name=...) to begin anew."
            )
        return chosen

    def may_still_commit(self, checkpoint: CheckpointId) -> bool:
        """Whether it is committed, or of an attempt that nobody has replaced, or what the newest attempt goes on
        from."""
        with self._changed:
            return self._catalog.get(checkpoint) is not None or not self._is_fenced(checkpoint)

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        with self._changed:
            return self._catalog.get(checkpoint) is not None

    def mark_bad(self, checkpoint: CheckpointId, reason: str) -> None:
        """Take a damaged checkpoint out of the choice; said once, by the first rank that finds it."""
        with self._changed:
            known = checkpoint in self._catalog.bad
            self._catalog.mark_bad(checkpoint, reason)
        if not known:
            logger.warning("Checkpoint %s is damaged and will not be used: %s", checkpoint.folder, reason)

    def landed(self, landed: LandedSlice) -> CommitRecord | None:
        """Note a slice whose objects are in storage; writes the commit if it was the last one. Idempotent.

        Returns the record if this call committed.

        Raises:
            FencedError: the slice belongs to an attempt that was replaced.
            StorageError: the commit could not be written; calling again tries again.
        """
        checkpoint = landed.slice.checkpoint
        with self._changed:
            if self._catalog.get(checkpoint) is not None:
                return None
            self._check_fence(checkpoint)
            pending = self._pending.setdefault(checkpoint, _Pending(landed.slice.world_size))
            pending.landed[landed.slice.world_rank] = landed
            if len(pending.landed) < pending.world_size or pending.committing:
                return None
            pending.committing = True
        try:
            self._wait_while_held(checkpoint)
            return self._commit(checkpoint, pending.landed)
        finally:
            with self._changed:
                pending.committing = False

    def wait_committed(self, checkpoint: CheckpointId, timeout_s: float) -> bool:
        """Whether `checkpoint`, or one of a later step, is committed within `timeout_s`.

        Raises:
            FencedError: it is not, and never will be: another driver has taken the run.
        """

        def reached() -> bool:
            newest = self._catalog.newest()
            return newest is not None and newest.checkpoint >= checkpoint

        with self._changed:
            self._changed.wait_for(lambda: reached() or bool(self._fenced_out), timeout_s)
            if self._fenced_out and not reached():
                raise FencedError(self._fenced_out)
            return reached()

    def prune(self) -> list[CheckpointId]:
        """Delete what retention lets go and what fenced attempts left unfinished; returns what went.

        The commit record goes first: a folder half deleted is no checkpoint.
        """
        with self._changed:
            if self._fenced_out:
                return []
            old = self._catalog.prunable(keep_last=self._keep_last, keep_every=self._keep_every)
            committed = [r.checkpoint for r in self._catalog.newest_first()]
            committed += list(self._catalog.bad)
            fence = self._fence
        abandoned = [
            folder
            for folder in abandoned_folders(self._folders(), committed=committed + old, fenced_below_attempt=fence)
            if not self.may_still_commit(folder)
        ]
        gone = []
        for checkpoint in [*old, *abandoned]:
            folder = f"{CHECKPOINTS}/{checkpoint.folder}"
            self._store.delete([f"{folder}/{COMMIT_NAME}"])
            self._store.delete([info.key for info in self._store.list(folder)])
            with self._changed:
                self._catalog.forget(checkpoint)
            gone.append(checkpoint)
            self._sweep_uploads(folder)
        return gone

    def _sweep_uploads(self, folder: str) -> None:
        """Remove leftovers of interrupted uploads, if the store lets us: they cost money, not correctness."""
        try:
            self._store.abort_uploads(folder)
        except StorageError as error:
            if not self._sweep_failed:
                logger.warning("Leftovers of interrupted uploads cannot be removed (said once): %s", error)
            self._sweep_failed = True

    def _commit(self, checkpoint: CheckpointId, landed: Mapping[int, LandedSlice]) -> CommitRecord:
        fields = assemble_record(self._run, landed, xxh3_128_hex, committed_at_s=self._clock.at_s())
        record = CommitRecord(**fields)
        metadata = next(part.slice.metadata for part in landed.values() if part.slice.metadata is not None)
        folder = f"{CHECKPOINTS}/{checkpoint.folder}"
        self._store.put(f"{folder}/{METADATA_NAME}", metadata)
        with self._decision:
            self._check_owner()
            with self._changed:
                self._check_fence(checkpoint)
            self._store.put(f"{folder}/{COMMIT_NAME}", record.to_json(xxh3_128_hex))
            self._take_back_if_fenced(f"{folder}/{COMMIT_NAME}")
            with self._changed:
                self._catalog.add(record)
                self._pending.pop(checkpoint, None)
                self._changed.notify_all()
        return record

    def _raise_fence(self, attempt: int, trunk: CheckpointId | None) -> None:
        """With both locks held."""
        self._fence, self._trunk, self._held_until_mono_s = attempt, trunk, None
        for checkpoint in [c for c in self._pending if self._is_fenced(c)]:
            del self._pending[checkpoint]
        self._changed.notify_all()

    def _wait_while_held(self, checkpoint: CheckpointId) -> None:
        """Commits may be written again, and that of `checkpoint` too: FencedError, if not."""
        with self._changed:
            while self._held_until_mono_s is not None and not self._fenced_out:
                left_s = self._held_until_mono_s - self._clock.mono_s()
                if left_s <= 0.0:  # nobody has said a word: no attempt lives that went on from anywhere
                    self._held_until_mono_s = None
                else:
                    self._changed.wait(left_s)
            self._check_fence(checkpoint)  # before anything is written under its name

    def _is_fenced(self, checkpoint: CheckpointId) -> bool:
        trunk = self._trunk
        of_trunk = trunk is not None and checkpoint.attempt == trunk.attempt and checkpoint.step <= trunk.step
        return checkpoint.attempt < self._fence and not of_trunk

    def _take_back_if_fenced(self, key: str) -> None:
        """A process that was stopped between its look and its write may have written for a run that is another's."""
        try:
            self._check_owner()
        except FencedError:
            self._store.delete([key])
            raise
        except StorageError as error:  # it was ours a moment ago
            logger.debug("Whether the run is still ours cannot be told now: %s", error)

    def _check_fence(self, checkpoint: CheckpointId) -> None:
        if self._fenced_out:
            raise FencedError(self._fenced_out)
        if self._is_fenced(checkpoint):
            raise FencedError(
                f"The save of step {checkpoint.step} belongs to attempt {checkpoint.attempt}, "
                f"which attempt {self._fence} has replaced; it was not committed."
            )

    def _folders(self) -> list[CheckpointId]:
        names = self._store.list_folders(CHECKPOINTS)
        return [c for c in map(CheckpointId.parse, names) if c is not None]

    def _read_record(self, checkpoint: CheckpointId) -> CommitRecord | CorruptCheckpointError | None:
        """The commit record of a folder, what is wrong with it, or None if it has none."""
        try:
            data = self._store.get(f"{CHECKPOINTS}/{checkpoint.folder}/{COMMIT_NAME}")
            return CommitRecord.from_json(data, xxh3_128_hex)
        except ObjectNotFoundError:
            return None
        except CorruptCheckpointError as error:
            logger.warning("Checkpoint %s is not used, and left for you to look at: %s", checkpoint.folder, error)
            return error
