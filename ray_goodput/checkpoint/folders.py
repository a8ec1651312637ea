"""Checkpoint folders in storage, judged from outside: which are complete, newest, damaged. Needs no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import quote

from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import COMMIT_NAME, CheckpointId, CommitRecord, ObjectRecord
from ray_goodput.errors import CorruptCheckpointError, ObjectNotFoundError, StorageAccessError, StorageError
from ray_goodput.storage import ObjectStore, open_store
from ray_goodput.storage.checksum import Checksum, xxh3_128_hex

logger = logging.getLogger(__name__)

FolderState = Literal["complete", "incomplete", "corrupt"]  # incomplete: without a commit record
CHECKPOINTS = "checkpoints"  # the folder of a run that holds its checkpoints
_RANGE_BYTES = 16 << 20
_OBJECTS_AT_ONCE = 4


def latest_complete(
    root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, verify: bool = False
) -> str | None:
    """URI of the newest complete checkpoint in a folder of checkpoints, or of a run; None if there is none.

    Complete: its commit record is whole and each of its objects is there with its size. Newest: by step and attempt
    where all folders are named as a run names them (`step-<10 digits>-<attempt>`), else the last one committed.

    verify: also read every object and compare checksums; a damaged checkpoint is said in the log and passed over.

    Raises:
        StorageError: the storage cannot be read, or no checkpoint is whole and some could not be read: that may pass,
            and None would mean starting from scratch.
    """
    uri = os.fspath(root).rstrip("/")
    store = open_store(StoreSpec(uri=uri, options=dict(storage_options or {})))
    seen: set[str] = set()
    unread: list[str] = []
    while found := [(folder, record) for folder, record in newest_first(store) if folder not in seen]:
        for folder, record in found:
            problems = problems_of(store, folder, record, read=verify)
            if not problems:
                return f"{uri}/{quote(folder) if uri.startswith('file://') else folder}"
            logger.warning("Checkpoint %s/%s is passed over: %s", uri, folder, problems[0])
            seen.add(folder)  # a run that goes on may have pruned these, and committed newer ones: look again
            unread += [problem for problem in problems if isinstance(problem, _Unreadable)]
    if unread:
        raise StorageError(
            f"{uri} has no whole checkpoint, and {len(unread)} object(s) that cannot be read: {unread[0]}"
        )
    return None


class _Unreadable(str):
    """A problem that the storage may have, rather than the object."""


def still_committed(store: ObjectStore, folder: str) -> bool:
    """Whether the folder has a commit record now: a run that goes on, or `gc`, removes it before the objects."""
    try:
        store.head(f"{folder}/{COMMIT_NAME}".lstrip("/"))
    except ObjectNotFoundError:
        return False
    return True


def newest_first(store: ObjectStore) -> list[tuple[str, CommitRecord]]:
    """(folder, record) of every folder with a readable commit record, in the order in which to resume from them."""
    for prefix in (CHECKPOINTS, ""):
        names = store.list_folders(prefix)
        folders = [f"{prefix}/{name}".lstrip("/") for name in names]
        with ThreadPoolExecutor(8) as pool:
            records = list(pool.map(lambda folder: _record_or_none(store, folder), folders))
        found = [(f, r) for f, r in zip(folders, records, strict=True) if r is not None]
        if found:
            ids = [CheckpointId.parse(folder.rpartition("/")[2]) for folder, _ in found]
            named = all(ids)
            return sorted(found, key=lambda fr: fr[1].checkpoint if named else fr[1].committed_at_s, reverse=True)
    return []


def read_record(store: ObjectStore, folder: str = "") -> CommitRecord:
    """The commit record of a checkpoint folder inside `store`.

    Raises:
        ObjectNotFoundError: the folder has none: it is no complete checkpoint of ours.
        CorruptCheckpointError: it cannot be read.
    """
    try:
        return CommitRecord.from_json(store.get(f"{folder}/{COMMIT_NAME}".lstrip("/")), xxh3_128_hex)
    except ObjectNotFoundError:
        raise ObjectNotFoundError(
            f"{store.uri}{'/' if folder else ''}{folder} has no {COMMIT_NAME}: it is no complete checkpoint. "
            "rg.latest_complete(ROOT) finds the newest one; what other writers saved is read with torch's own reader."
        ) from None


def problems_of(
    store: ObjectStore,
    folder: str,
    record: CommitRecord,
    *,
    read: bool,
    on_bytes: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """What is wrong with the objects of a commit, one sentence for each; empty if nothing is.

    read: read all bytes and compare checksums; otherwise names and sizes only.
    on_bytes: called with the size of each piece read, from several threads.

    Raises:
        StorageError: the storage refuses, or does not answer: nothing is known about the objects.
    """
    prefix = f"{folder}/" if folder else ""
    sizes = {info.key.removeprefix(prefix): info.size_bytes for info in store.list(folder)}

    def check(entry: ObjectRecord) -> str | None:
        found = sizes.get(entry.name)
        if found is None:
            return f"{entry.name} is missing."
        if found != entry.size_bytes:
            return f"{entry.name} has {found} bytes, {entry.size_bytes} were committed."
        if not read:
            return None
        try:
            checksum = _checksum(store, f"{prefix}{entry.name}", entry.size_bytes, on_bytes)
        except StorageAccessError:
            raise
        except StorageError as error:
            return _why_unreadable(store, f"{prefix}{entry.name}", entry, error)
        if checksum != entry.xxh3_128:
            return f"{entry.name} has checksum {checksum}, {entry.xxh3_128} was committed: bytes were changed."
        return None

    with ThreadPoolExecutor(_OBJECTS_AT_ONCE if read else 1) as pool:
        return [problem for problem in pool.map(check, record.objects) if problem is not None]


def _why_unreadable(store: ObjectStore, key: str, entry: ObjectRecord, error: StorageError) -> str | None:
    """What is wrong with an object that could not be read, None if it was only the storage for a moment.

    Raises:
        StorageError: the storage refuses, or does not answer even when only asked for the object's size.
    """
    gone = f"{entry.name} is gone."
    if isinstance(error, ObjectNotFoundError):
        return gone
    try:
        if store.head(key).size_bytes != entry.size_bytes:
            return f"{entry.name} was changed while it was read."
    except ObjectNotFoundError:  # pruned meanwhile
        return gone
    try:
        whole = _checksum(store, key, entry.size_bytes, lambda done: None) == entry.xxh3_128
    except ObjectNotFoundError:
        return gone
    except StorageAccessError:
        raise
    except StorageError as again:
        return _Unreadable(f"{entry.name} cannot be read: {again}")
    return None if whole else f"{entry.name} has another checksum than was committed: bytes were changed."


def _record_or_none(store: ObjectStore, folder: str) -> CommitRecord | None:
    try:
        return read_record(store, folder)
    except ObjectNotFoundError:
        return None
    except CorruptCheckpointError as error:
        logger.warning("Checkpoint %s/%s is passed over: %s", store.uri, folder, error)
        return None


def _checksum(store: ObjectStore, key: str, size_bytes: int, on_bytes: Callable[[int], None]) -> str:
    checksum = Checksum()
    for start in range(0, size_bytes, _RANGE_BYTES):
        data = store.get_range(key, start, min(_RANGE_BYTES, size_bytes - start))
        checksum.update(data)
        on_bytes(len(data))
    return checksum.hexdigest()
