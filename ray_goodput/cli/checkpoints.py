"""`ray-goodput checkpoints ls`: what a run has in storage, judged by the commit records and a listing.

Object bytes are not read: sizes are compared, checksums are not.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ray_goodput.checkpoint.folders import CHECKPOINTS, FolderState, problems_of, read_record, still_committed
from ray_goodput.clock import Clock, SystemClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId, CommitRecord
from ray_goodput.errors import CorruptCheckpointError, ObjectNotFoundError
from ray_goodput.storage import ObjectStore, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One checkpoint folder. `world_size` and `age_s` are None without a readable record; `reason` says why it is not
    complete and is empty when it is. `size_bytes` is what its objects take, without the commit record.
    """

    step: int
    attempt: int
    world_size: int | None
    size_bytes: int
    age_s: float | None
    state: FolderState
    reason: str
    folder: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def list_checkpoints(spec: StoreSpec, *, clock: Clock | None = None) -> list[CheckpointRow]:
    """The checkpoints of the run whose folder is `spec` (or of that run's `checkpoints` folder), newest first. Where no
    folder is named as a run names them (`rg.StorageWriter`): all with a commit record, the last one committed first.

    Raises:
        ObjectNotFoundError: there is no checkpoint folder at all.
        StorageError: the storage cannot be read.
    """
    clock = clock or SystemClock()
    store = open_store(spec)
    for prefix in (CHECKPOINTS, ""):
        names = store.list_folders(prefix)
        ids = [i for i in map(CheckpointId.parse, names) if i is not None]
        if ids:
            return [_row(store, f"{prefix}/{i.folder}".lstrip("/"), i, clock) for i in sorted(ids, reverse=True)]
        roots = [f"{prefix}/{name}".lstrip("/") for name in names]
        rows = [_row(store, root, None, clock) for root in roots if still_committed(store, root)]
        if rows:
            return sorted(rows, key=lambda row: math.inf if row.age_s is None else row.age_s)
    raise ObjectNotFoundError(
        f"There are no checkpoints at {store.uri}: give the folder of a run, STORAGE_PATH/RUN, which has a folder "
        "named checkpoints once the first save has begun."
    )


def _row(store: ObjectStore, root: str, checkpoint: CheckpointId | None, clock: Clock) -> CheckpointRow:
    """`checkpoint`: what the folder's name says; without it the record tells."""
    record: CommitRecord | None = None
    state: FolderState = "complete"
    reason = ""
    try:
        record = read_record(store, root)
    except ObjectNotFoundError:
        state, reason = "incomplete", f"no {COMMIT_NAME}: the save has not finished or never will"
    except CorruptCheckpointError as error:
        state, reason = "corrupt", str(error)
    if record is not None and (problems := problems_of(store, root, record, read=False)):
        if still_committed(store, root):
            state, reason = "corrupt", problems[0]
        else:
            state, reason = "incomplete", "it is being removed"
    checkpoint = checkpoint or (record.checkpoint if record is not None else CheckpointId(0, 0))
    return CheckpointRow(
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        world_size=record.world_size if record else None,
        size_bytes=sum(info.size_bytes for info in store.list(root) if info.key != f"{root}/{COMMIT_NAME}"),
        age_s=max(0.0, clock.at_s() - record.committed_at_s) if record else None,
        state=state,
        reason=reason,
        folder=root,
    )


def render(rows: Sequence[CheckpointRow]) -> str:
    """A terminal table of `rows`."""
    from rich.console import Console
    from rich.table import Table

    names = [row.folder.rpartition("/")[2] for row in rows]
    own_names = any(CheckpointId.parse(name) is None for name in names)
    first = ["folder"] if own_names else []
    table = Table(*first, "step", "attempt", "world", "size", "age", "state", box=None, pad_edge=False)
    for name, row in zip(names, rows, strict=True):
        table.add_row(
            *([name] if own_names else []),
            str(row.step),
            str(row.attempt),
            "-" if row.world_size is None else str(row.world_size),
            human_bytes(row.size_bytes),
            "-" if row.age_s is None else human_age(row.age_s),
            row.state if not row.reason else f"{row.state}: {row.reason}",
        )
    out = io.StringIO()
    Console(file=out, width=120, markup=False).print(table)
    return out.getvalue().rstrip()


def human_bytes(size: float) -> str:
    """`1536 -> "1.5 KiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_age(seconds: float) -> str:
    """`125 -> "2 min"`; rounded down to the largest whole unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"
