"""A node's vault and the run's commit log in a process of their own, as a run has them in actors.

The classes are those of the actors, at the actors' low priority; Ray is left out, so that no other part of it is timed.
Old checkpoints are removed as those of the other arms are, outside of what is timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from ray_goodput.actors.commits import CommitLog
from ray_goodput.actors.heap import give_back_large_blocks
from ray_goodput.actors.vault import CheckpointVault
from ray_goodput.clock import SystemClock
from ray_goodput.config import StoreSpec
from ray_goodput.core.commit import LandedSlice, StagedSlice
from ray_goodput.storage import open_store

_NICENESS = 10  # that of the vault's actor
_PART_BYTES = 8 << 20  # that of our store, and its number of requests at once
_PIECE_BYTES = 1 << 20
_REQUESTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """Where a node's vault works. `store`: the run's folder. `local`: on a disk."""

    store: StoreSpec
    local: Path


class _Coordinator:
    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self.landed_at: dict[int, float] = {}  # world rank -> when its newest slice was noted; the last one commits

    def identity(self) -> str:
        return "run"

    def landed(self, landed: LandedSlice) -> None:
        self._log.landed(landed)
        self.landed_at[landed.slice.world_rank] = time.perf_counter()

    def journal_tail(self, attempt: int, world_rank: int, page: Any) -> None:
        return None


def vault_main(spec: NodeSpec, inbox: Any, answers: list[Any]) -> None:
    """Persist each `StagedSlice` of `inbox`, and tell its rank when; None ends it."""
    os.nice(_NICENESS)
    give_back_large_blocks()
    store = open_store(spec.store)
    log = CommitLog(run="bench", store=store, clock=SystemClock(), keep_last=1)
    log.open()
    log.fence_and_choose(1)
    coordinator = _Coordinator(log)
    vault = CheckpointVault(
        node_id="bench",
        store=store,
        coordinator=coordinator,
        local_checkpoints=spec.local / "checkpoints",
        slots=[],
        journals=spec.local / "journals",
    )

    def persist(staged: StagedSlice) -> None:
        vault.persist(staged)  # returns when the slot is free again, later than the save is durable
        answers[staged.world_rank].put(coordinator.landed_at[staged.world_rank])

    _serve(inbox, persist)


def bare_main(spec: NodeSpec, inbox: Any, answers: list[Any]) -> None:
    """Upload each (rank, file, step) of `inbox` with nothing but the client's own multipart upload.

    At the vault's priority: what is compared is what the vault does beside it.
    """
    os.nice(_NICENESS)
    bucket, _, prefix = spec.store.uri.removeprefix("s3://").partition("/")
    options = spec.store.options
    client = S3Store(
        bucket,
        endpoint=options["endpoint_url"],
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        region="us-east-1",
        client_options={"allow_http": True},
    )

    def upload(task: tuple[int, str, int]) -> None:
        rank, path, step = task
        with open(path, "rb", buffering=0) as file:
            pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
            key = f"{prefix}/{step}-{rank}"
            obstore.put(client, key, pieces, chunk_size=_PART_BYTES, max_concurrency=_REQUESTS)
        answers[rank].put(time.perf_counter())

    _serve(inbox, upload)


def _serve(inbox: Any, work: Callable[[Any], None]) -> None:
    with ThreadPoolExecutor(8) as pool:
        while (task := inbox.get()) is not None:
            # `result` of each is asked for nowhere: a failure leaves its rank waiting, and the run ends by its timeout.
            pool.submit(work, task).add_done_callback(_tell)


def _tell(future: Any) -> None:
    if (error := future.exception()) is not None:
        print(f"upload failed: {error!r}", flush=True)
