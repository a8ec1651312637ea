"""The checkpoint vault of a node: takes over full slots and gets their bytes into storage. No Ray in the class.

It outlives the training processes of its node: a worker that died after staging leaves a slot and a note beside it,
and the next attempt's `adopt` finishes the upload.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ray_goodput.actors.commits import CHECKPOINTS
from ray_goodput.actors.names import parse_attempt_dir
from ray_goodput.actors.node_copies import Flushed, NearPort, NodeCopies
from ray_goodput.actors.peer_copy import PeerCopier
from ray_goodput.actors.process_look import RankLook, kill_ranks, look_at_ranks
from ray_goodput.checkpoint.sidecar import sidecar_path, staged_in
from ray_goodput.core.commit import METADATA_NAME, CheckpointId, LandedSlice, StagedSlice
from ray_goodput.core.tiers import SaveTier
from ray_goodput.errors import FencedError, GoodputError, RunError, StorageAccessError, StorageError
from ray_goodput.goodput.journal import read_journal
from ray_goodput.storage.protocol import ObjectStore

logger = logging.getLogger(__name__)

_AFTER_ALL_ATTEMPTS = sys.maxsize
_HURRIED_PAUSE_S = 0.5


class CoordinatorPort(Protocol):
    """What a vault asks of the run's coordinator."""

    def identity(self) -> str: ...

    def landed(self, landed: LandedSlice) -> None: ...

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None: ...


class CheckpointVault:
    """Upload, report, copy to NVMe, in the order that makes a save durable soonest; copies stay for a quick restore.

    Thread-safe; each call of `persist` does its work in the caller's thread.

    near: who chooses among copies on nodes; peers: who copies slices to other nodes. Without them only storage counts.
    give_up_after_s: how long an upload is tried again while the store fails. The slot stays taken meanwhile, so at
        most two saves a rank wait, whatever the store does.
    copy_after_s: how long an upload goes on before the slot is copied to NVMe beside it; never waited for with peers.
    """

    def __init__(
        self,
        *,
        node_id: str,
        store: ObjectStore,
        coordinator: CoordinatorPort,
        local_checkpoints: Path,
        slots: Sequence[Path],
        journals: Path,
        keep_local: int = 2,
        give_up_after_s: float = 900.0,
        copy_after_s: float = 5.0,
        sleep: Callable[[float], None] | None = None,
        near: NearPort | None = None,
        peers: PeerCopier | None = None,
    ) -> None:
        self._node_id = node_id
        self._store = store
        self._coordinator = coordinator
        self._copies = NodeCopies(node_id=node_id, folder=local_checkpoints, keep=keep_local, near=near)
        self._peers = peers
        self._slots = slots
        self._journals = journals
        self._give_up_after_s = give_up_after_s
        self._copy_after_s = copy_after_s
        self._sleep = sleep or self._wait
        self._hurry = threading.Event()
        self._once_more_only = False
        self._adopting = threading.Lock()
        self._copying = threading.Lock()
        self._lock = threading.Lock()
        self._landed: dict[int, LandedSlice] = {}  # world rank -> its newest slice in storage
        self._turns: dict[str, threading.Lock] = {}  # slot path -> who works on it

    def ping(self) -> str:
        """The node's id, as a sign of life."""
        return self._node_id

    def look(self, attempt: int, ranks: Sequence[tuple[int, int]]) -> list[RankLook]:
        """What these processes of this node (world rank, pid) do, with their stacks."""
        return look_at_ranks(self._journals, attempt, ranks)

    def kill(self, ranks: Sequence[tuple[int, int]]) -> list[int]:
        """SIGKILL to these training processes of this node; returns the ranks that got it."""
        return kill_ranks(ranks)

    def hurry(self) -> None:
        """This node or one of its peers is about to go: from now on tries follow one another quickly."""
        self._hurry.set()

    def give_up(self) -> None:
        """Nobody waits any longer for a storage that fails: what is under way is tried once more, and stays in its slot
        if that fails too."""
        self._once_more_only = True
        self._hurry.set()

    def persist(self, staged: StagedSlice) -> None:
        """The slice is as far as its tier says, and the coordinator knows. Idempotent.

        Calls for one slot take turns: the next attempt's `adopt` may meet the call of a worker that is gone.

        Raises:
            FencedError: the slice's attempt was replaced.
            StorageError: the store kept failing for `give_up_after_s`, or can never work (keys, permissions); or a
                slice that goes no farther found no room on NVMe.
        """
        with self._lock:
            turn = self._turns.setdefault(staged.slot_path, threading.Lock())
        with turn:
            landed = self._landed_slice(staged)
            if landed is not None:
                self._tell_landed(landed)
            elif staged.tier is SaveTier.STORAGE:
                with self._copies.in_use(staged.checkpoint):
                    self._bring_to_storage(staged)
            else:
                self._bring_near(staged)
            sidecar_path(staged.slot_path).unlink(missing_ok=True)  # nothing is left for `adopt` to finish
        self._copies.drop_old()

    def _bring_near(self, staged: StagedSlice) -> None:
        """The slice is on NVMe, and at peers if its tier says so."""
        with self._copies.in_use(staged.checkpoint):
            flushed = self._copies.flush(staged)
            with self._copying_to_peers(flushed):
                if not flushed.held:
                    raise StorageError(f"{_title(staged)}: there is no room for a copy on this node's disk.")

    def _bring_to_storage(self, staged: StagedSlice) -> None:
        """The slice is in storage, which the coordinator knows, on NVMe and at peers.

        An upload that is over soon has disk and processors to itself, so that the save is durable sooner: until then
        the slot is this node's copy. Beside a long one, or one that fails, the slot is copied to NVMe.
        """
        started = time.monotonic()
        slot = Path(staged.slot_path)
        from_slot = [_Upload(e.name, slot, e.offset, e.size_bytes) for e in staged.extents]
        with ThreadPoolExecutor(1, thread_name_prefix="upload") as pool:
            upload = pool.submit(self._upload, staged.checkpoint, from_slot)
            landed = self._landed_alone(staged, upload) if self._peers is None else None
            alone = landed is not None
            if landed is None:
                flushed = self._copies.flush(staged)
                with self._copying_to_peers(flushed):
                    self._upload_until_it_works(staged, upload, flushed)
                landed = flushed.landed
        self._note_landed(replace(landed, upload_s=time.monotonic() - started))
        if alone:
            self._copy_to_nvme(staged)

    def _landed_alone(self, staged: StagedSlice, upload: Future[None]) -> LandedSlice | None:
        """What has landed, if the upload is over soon; None if it is not, or failed."""
        landed = self._copies.describe(staged)
        return landed if _worked(upload, within_s=self._copy_after_s) else None

    def _upload_until_it_works(self, staged: StagedSlice, first: Future[None], flushed: Flushed) -> None:
        """What the first try did not bring, the next ones take from the copies."""
        copies = [_Upload(p.record.name, p.path, p.offset, p.record.size_bytes) for p in flushed.parts]
        tries = itertools.count()
        self._until_it_works(
            lambda: self._upload(staged.checkpoint, copies) if next(tries) else first.result(),
            what=f"{_title(staged)}: upload",
        )

    def _copy_to_nvme(self, staged: StagedSlice) -> None:
        """Of a slice that is in storage: what goes wrong costs the copy only. One at a time: it disturbs training."""
        try:
            with self._copying:
                self._copies.flush(staged)
        except (FencedError, OSError) as error:
            logger.info("%s has no copy on this node: %s", _title(staged), error)

    def _note_landed(self, landed: LandedSlice) -> None:
        with self._lock:
            newest = self._landed.get(landed.slice.world_rank)
            # Not over a newer one: `adopt` brings older slices.
            if newest is None or landed.slice.checkpoint.made > newest.slice.checkpoint.made:
                self._landed[landed.slice.world_rank] = landed
        self._tell_landed(landed)

    def _upload(self, checkpoint: CheckpointId, objects: Sequence[_Upload]) -> None:
        for one in objects:
            if one.name != METADATA_NAME:  # the coordinator writes that one, when all ranks have landed
                key = f"{CHECKPOINTS}/{checkpoint.folder}/{one.name}"
                self._store.upload_file(key, one.path, offset=one.offset, size_bytes=one.size_bytes)

    @contextlib.contextmanager
    def _copying_to_peers(self, flushed: Flushed) -> Iterator[None]:
        """Beside what is done inside, the slice is copied; both are over afterwards."""
        if self._peers is None or flushed.landed.slice.tier < SaveTier.PEER:
            yield
            return
        with ThreadPoolExecutor(1, thread_name_prefix="peer-copy") as pool:
            pool.submit(self._peers.copy, flushed)
            yield

    def _tell_landed(self, landed: LandedSlice) -> None:
        what = f"{_title(landed.slice)}: telling the coordinator"
        self._until_it_works(lambda: self._coordinator.landed(landed), what=what)

    def hold(self, attempt: int) -> None:
        """What workers of attempts before `attempt` staged is on NVMe, and the coordinator knows all that is held here:
        it is about to choose where `attempt` goes on. Uploads are not waited for."""
        for folder in self._old_slots(attempt):
            for staged in self._left_in(folder):
                try:
                    self._copies.flush(staged)
                except FencedError as error:
                    logger.info("%s", error)
                except (GoodputError, OSError) as error:
                    logger.warning("%s, left by a worker that is gone, cannot be used: %s", _title(staged), error)
        self._copies.tell_all()

    def receive(self, checkpoint: CheckpointId, name: str, sender: str, offset: int, data: bytes) -> None:
        """See `NodeCopies.receive`."""
        self._copies.receive(checkpoint, name, sender, offset, data)

    def received(self, landed: LandedSlice, sender: str) -> None:
        """See `NodeCopies.received`."""
        self._copies.received(landed, sender)

    def read(self, checkpoint: CheckpointId, name: str, offset: int, size_bytes: int) -> bytes:
        """See `NodeCopies.read`."""
        return self._copies.read(checkpoint, name, offset, size_bytes)

    def _landed_slice(self, staged: StagedSlice) -> LandedSlice | None:
        with self._lock:
            landed = self._landed.get(staged.world_rank)
        return landed if landed is not None and landed.slice.checkpoint == staged.checkpoint else None

    def keep(self, checkpoint: CheckpointId) -> None:
        """A rank of this node is about to read this checkpoint: its local copy stays until another one is named."""
        self._copies.keep(checkpoint)

    def land_again(self, step: int | None = None) -> None:
        """Tell the coordinator once more what of `step`, or of every rank's newest save, is in storage: it may have
        died with its notes."""
        with self._lock:
            landed = [part for part in self._landed.values() if step in (None, part.slice.checkpoint.step)]
        for part in landed:
            with contextlib.suppress(FencedError):  # a dead attempt's
                self._coordinator.landed(part)
        if step is None:
            self._copies.tell_all()

    def adopt(self, attempt: int) -> None:
        """Finish what workers of attempts before `attempt` left on this node, then clean up after them.

        Staged slices are persisted if their attempt may still commit; journals are handed to the coordinator.
        """
        self._hurry.clear()  # who was about to go has gone
        with self._adopting:
            for folder in self._old_slots(attempt):
                for staged in self._left_in(folder):
                    self._adopt_slice(staged)
                shutil.rmtree(folder, ignore_errors=True)
            for path in sorted(self._journals.glob("attempt-*/rank-*.journal")):
                old = parse_attempt_dir(path.parent.name)
                if old is not None and old < attempt:
                    self._adopt_journal(path, old)

    def end_run(self) -> None:
        """The run is over: finish what is still staged, and leave nothing of it on this node but the local copies of
        checkpoints, which make a later restart quick."""
        self.adopt(_AFTER_ALL_ATTEMPTS)
        for folder in (*self._journals.glob("attempt-*"), self._journals):
            _remove_if_empty(folder)
        for root in self._slots:
            _remove_if_empty(root)
            _remove_if_empty(root.parent)

    def _old_slots(self, attempt: int) -> list[Path]:
        folders = sorted(f for root in self._slots for f in root.glob("attempt-*"))
        numbered = [(parse_attempt_dir(folder.name), folder) for folder in folders]
        return [folder for number, folder in numbered if number is not None and number < attempt]

    def _left_in(self, folder: Path) -> Iterator[StagedSlice]:
        """What workers of this run staged there. A deleted run of the same name may have left slices under the numbers
        of this one's: they would be written over what is committed now."""
        for staged in staged_in(folder):
            owner = staged.extra.get("run_id")
            if owner is None or owner == self._run_id(owner):
                yield staged
            else:
                logger.info("%s was left by a deleted run of the same name; it is of no use.", _title(staged))

    def _run_id(self, otherwise: str) -> str:
        try:
            return self._coordinator.identity()
        except (GoodputError, ValueError) as error:  # it is asked again before anything of another run could count
            logger.warning("The run's identity cannot be asked for: %s", error)
            return otherwise

    def _adopt_slice(self, staged: StagedSlice) -> None:
        step, world_rank = staged.checkpoint.step, staged.world_rank
        try:
            self.persist(staged)
            logger.info("Finished the upload of step %d, rank %d, for a worker that is gone.", step, world_rank)
        except FencedError:
            logger.info("The slice of step %d, rank %d belongs to an attempt that was replaced.", step, world_rank)
        except (GoodputError, OSError, ValueError) as error:
            logger.warning("The slice of step %d, rank %d could not be saved: %s", step, world_rank, error)

    def _adopt_journal(self, path: Path, attempt: int) -> None:
        world_rank = int(path.stem.partition("-")[2])
        try:
            self._coordinator.journal_tail(attempt, world_rank, read_journal(path))
        except (GoodputError, OSError, ValueError) as error:
            logger.warning("The journal %s cannot be read; its last second stays unknown: %s", path, error)
        path.unlink(missing_ok=True)
        path.with_suffix(".stacks").unlink(missing_ok=True)  # see `names.stacks_path`

    def _until_it_works(self, action: Callable[[], None], *, what: str) -> None:
        deadline = time.monotonic() + self._give_up_after_s
        pause_s, told = 1.0, False
        while True:
            try:
                return action()
            except StorageAccessError:
                raise
            except (StorageError, RunError) as error:  # the store, or the coordinator, is away
                if self._once_more_only or time.monotonic() + pause_s > deadline:
                    raise
                if not told:
                    logger.warning("%s failed, trying again for %.0f s: %s", what, self._give_up_after_s, error)
                    told = True
            self._sleep(min(pause_s, _HURRIED_PAUSE_S) if self._hurry.is_set() else pause_s)
            pause_s = min(pause_s * 2, 30.0)

    def _wait(self, pause_s: float) -> None:
        """Sleep, but wake up when it gets urgent."""
        if self._hurry.is_set():
            time.sleep(pause_s)
        else:
            self._hurry.wait(pause_s)


@dataclass(frozen=True, slots=True)
class _Upload:
    """An object: `size_bytes` bytes of the file `path` from `offset` on."""

    name: str
    path: Path
    offset: int
    size_bytes: int


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not empty, or not there
        folder.rmdir()


def _worked(work: Future[None], *, within_s: float) -> bool:
    wait([work], timeout=within_s)
    return work.done() and work.exception() is None


def _title(staged: StagedSlice) -> str:
    return f"Step {staged.checkpoint.step}, rank {staged.world_rank}"
