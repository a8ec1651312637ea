"""`ray-goodput checkpoints gc`: what saves left unfinished, and checkpoints that a retention rule lets go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ray_goodput.checkpoint.folders import CHECKPOINTS, problems_of, read_record
from ray_goodput.clock import Clock, SystemClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.catalog import Catalog
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId
from ray_goodput.errors import CorruptCheckpointError, ObjectNotFoundError
from ray_goodput.storage import ObjectStore, open_store
from ray_goodput.storage.protocol import ObjectInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """A folder that goes, and why."""

    folder: str
    reason: str
    size_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def collect_garbage(
    spec: StoreSpec,
    *,
    dry_run: bool,
    keep_last: int | None = None,
    keep_every: int | None = None,
    older_than_s: float = 3600.0,
    clock: Clock | None = None,
) -> list[Garbage]:
    """Remove (with `dry_run`: only find) unfinished saves and what retention lets go; oldest first.

    An unfinished save goes when nothing was written to it for `older_than_s`, and a complete checkpoint of a later step
    or attempt exists. A save that may still be under way, folders of other names, and damaged checkpoints stay: the
    first may become complete, the last are evidence.

    Raises:
        ObjectNotFoundError: there is no checkpoint folder at all.
        StorageError: the storage refuses.
    """
    store, clock = open_store(spec), clock or SystemClock()
    prefix, ids = _checkpoint_folders(store)
    objects = {c: list(store.list(f"{prefix}{c.folder}")) for c in ids}
    catalog, unfinished = Catalog(), []
    for checkpoint in ids:
        try:
            record = read_record(store, f"{prefix}{checkpoint.folder}")
        except ObjectNotFoundError:
            unfinished.append(checkpoint)
            continue
        except CorruptCheckpointError:
            continue
        catalog.add(record)
        problems = problems_of(store, f"{prefix}{checkpoint.folder}", record, read=False)
        if problems:
            catalog.mark_bad(checkpoint, problems[0])
    newest = catalog.newest()
    going: dict[CheckpointId, str] = {}
    for checkpoint in unfinished:
        idle_s = _idle_s(objects[checkpoint], clock.at_s())
        if newest is not None and newest.checkpoint > checkpoint and idle_s is not None and idle_s >= older_than_s:
            going[checkpoint] = f"unfinished, nothing written for {idle_s / 3600:.1f} h"
    if keep_last is not None:
        for checkpoint in catalog.prunable(keep_last=keep_last, keep_every=keep_every):
            if checkpoint not in catalog.bad:
                going[checkpoint] = f"not among the newest {keep_last}"
    removed = []
    for checkpoint, reason in sorted(going.items()):
        folder = f"{prefix}{checkpoint.folder}"
        removed.append(Garbage(folder=folder, reason=reason, size_bytes=sum(o.size_bytes for o in objects[checkpoint])))
        if not dry_run:
            _remove(store, folder)
    return removed


def render(removed: Sequence[Garbage], *, dry_run: bool) -> str:
    """A line for each folder, and the sum."""
    from ray_goodput.cli.checkpoints import human_bytes

    lines = [f"{one.folder}  {human_bytes(one.size_bytes)}  {one.reason}" for one in removed]
    freed = human_bytes(sum(one.size_bytes for one in removed))
    verb = "would be removed" if dry_run else "removed"
    return "\n".join([*lines, f"{len(removed)} folder(s), {freed} {verb}"])


def _checkpoint_folders(store: ObjectStore) -> tuple[str, list[CheckpointId]]:
    for prefix in (f"{CHECKPOINTS}/", ""):
        ids = [c for c in map(CheckpointId.parse, store.list_folders(prefix.rstrip("/"))) if c is not None]
        if ids:
            return prefix, sorted(ids)
    raise ObjectNotFoundError(
        f"There are no checkpoints of a run at {store.uri}: give its folder, STORAGE_PATH/RUN. Folders of other names "
        "than step-<10 digits>-<attempt> are not removed here."
    )


def _idle_s(objects: Sequence[ObjectInfo], now_at_s: float) -> float | None:
    """Seconds since the last write; None if the storage does not tell times, infinite for an empty folder."""
    times = [info.modified_at_s for info in objects]
    if any(at is None for at in times):
        return None
    return now_at_s - max((at for at in times if at is not None), default=0.0)


def _remove(store: ObjectStore, folder: str) -> None:
    store.delete([f"{folder}/{COMMIT_NAME}"])  # first: a folder half removed is no checkpoint
    store.abort_uploads(folder)
    store.delete([info.key for info in store.list(folder)])
