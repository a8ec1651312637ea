"""`ray-goodput checkpoints verify`: every byte of every committed checkpoint is read and compared with its record."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ray_goodput.checkpoint.folders import CHECKPOINTS, FolderState, problems_of, read_record, still_committed
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import CheckpointId, CommitRecord
from ray_goodput.errors import CorruptCheckpointError, ObjectNotFoundError
from ray_goodput.storage import ObjectStore, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One folder. `problems` has one sentence for each object that is not what was committed."""

    folder: str
    step: int | None
    size_bytes: int
    state: FolderState
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found, newest first. An incomplete folder is no damage: its save has not ended, or never will."""

    checkpoints: tuple[Verified, ...]

    @property
    def corrupt(self) -> int:
        return sum(one.state == "corrupt" for one in self.checkpoints)

    def to_dict(self) -> dict[str, Any]:
        found = [asdict(one) for one in self.checkpoints]
        return {"checkpoints": found, "corrupt": self.corrupt, "bytes": sum(one.size_bytes for one in self.checkpoints)}


def verify_checkpoints(
    spec: StoreSpec,
    *,
    step: int | None = None,
    on_total: Callable[[int], None] = lambda size: None,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> Verification:
    """Read and check the checkpoints of a run, or the one whose folder `spec` is.

    on_total, on_bytes: told how many bytes there are to read, and of each piece read, from several threads.

    Raises:
        ObjectNotFoundError: there is no checkpoint, or none of that step.
        StorageError: the storage cannot be read.
    """
    store = open_store(spec)
    found = [(folder, record) for folder, record in _folders(store) if step is None or _step(folder, record) == step]
    if not found:
        which = "" if step is None else f" of step {step}"
        raise ObjectNotFoundError(
            f"There is no checkpoint{which} at {store.uri}: give the folder of a run, STORAGE_PATH/RUN, or of a "
            "checkpoint."
        )
    on_total(sum(record.size_bytes for _, record in found if isinstance(record, CommitRecord)))
    return Verification(
        checkpoints=tuple(_verify(store, folder, record, on_bytes) for folder, record in found),
    )


def render(result: Verification) -> str:
    """A line for each checkpoint, and one for each problem."""
    from rich.console import Console
    from rich.table import Table

    from ray_goodput.cli.checkpoints import human_bytes

    table = Table("step", "folder", "size", "state", box=None, pad_edge=False)
    for one in result.checkpoints:
        table.add_row("-" if one.step is None else str(one.step), one.folder, human_bytes(one.size_bytes), one.state)
    out = io.StringIO()
    Console(file=out, width=120, markup=False).print(table)
    problems = [f"{one.folder}: {problem}" for one in result.checkpoints for problem in one.problems]
    return "\n".join([out.getvalue().rstrip(), *problems])


def _folders(store: ObjectStore) -> list[tuple[str, CommitRecord | str | None]]:
    """(folder, record), newest first; instead of a record, why it cannot be read, or None if there is none."""
    own = _record(store, "")
    if own is not None:
        return [("", own)]
    for prefix in (CHECKPOINTS, ""):
        found = [(f"{prefix}/{name}".lstrip("/"), name) for name in store.list_folders(prefix)]
        records = [(folder, name, _record(store, folder)) for folder, name in found]
        ours = [(f, n, r) for f, n, r in records if r is not None or CheckpointId.parse(n) is not None]
        if ours:
            ours.sort(key=lambda one: (_step(one[0], one[2]) or 0, one[1]), reverse=True)
            return [(folder, record) for folder, _, record in ours]
    return []


def _record(store: ObjectStore, folder: str) -> CommitRecord | str | None:
    try:
        return read_record(store, folder)
    except ObjectNotFoundError:
        return None
    except CorruptCheckpointError as error:
        return str(error)


def _step(folder: str, record: CommitRecord | str | None) -> int | None:
    if isinstance(record, CommitRecord):
        return record.checkpoint.step
    checkpoint = CheckpointId.parse(folder.rpartition("/")[2])
    return checkpoint.step if checkpoint is not None else None


def _verify(
    store: ObjectStore, folder: str, record: CommitRecord | str | None, on_bytes: Callable[[int], None]
) -> Verified:
    problems: tuple[str, ...] = ()
    state: FolderState = "complete"
    if record is None:
        state = "incomplete"
    elif isinstance(record, str):
        state, problems = "corrupt", (record,)
    else:
        problems = tuple(problems_of(store, folder, record, read=True, on_bytes=on_bytes))
        if problems and still_committed(store, folder):
            state = "corrupt"
        elif problems:  # it was pruned while it was read
            state, problems = "incomplete", ()
    size = record.size_bytes if isinstance(record, CommitRecord) else 0
    return Verified(folder=folder or ".", step=_step(folder, record), size_bytes=size, state=state, problems=problems)
