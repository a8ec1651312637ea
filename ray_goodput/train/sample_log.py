"""Which samples each step trained on, written to the run's storage, and the audit that nothing was repeated or skipped.

Objects: `samples/attempt-<4 digits>/rank-<5 digits>/<first step>-<last step>.jsonl`, one line a step, written before
the save that covers them is staged: the log of every committed step is complete, unless the storage failed for that
long; what it refused is written before the next save. `samples/attempt-<4 digits>/resume.json` says after which step
the attempt began.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ray_goodput.actors.commits import CommitLog
from ray_goodput.clock import SystemClock
from ray_goodput.errors import ConfigError, StorageError
from ray_goodput.storage.protocol import ObjectStore
from ray_goodput.train.datasets import load_order

logger = logging.getLogger(__name__)

_KEY = re.compile(r"samples/attempt-(\d+)/(?:resume\.json|rank-(\d+)/\d+-\d+\.jsonl)")


class SampleLog:
    """One rank's log of one attempt; `flush` is called on the training thread before each save.

    A storage that fails delays the log, and ends no attempt: a rank that left alone would take all others with it.
    """

    def __init__(self, store: ObjectStore, *, attempt: int, world_rank: int) -> None:
        self._store = store
        self._folder = f"samples/attempt-{attempt:04d}"
        self._world_rank = world_rank
        self._lines: list[tuple[int, str]] = []
        self._unwritten: list[tuple[str, bytes]] = []  # objects by key, oldest first
        self._warned = False

    def begin(self, resumed_step: int) -> None:
        """Note where the attempt starts; rank 0 only."""
        if self._world_rank == 0:
            self._unwritten.append((f"{self._folder}/resume.json", json.dumps({"step": resumed_step}).encode()))
            self._write()

    def note(self, step: int, dataset: str, sample_ids: Iterable[int]) -> None:
        line = json.dumps({"step": step, "dataset": dataset, "sample_ids": list(map(int, sample_ids))})
        self._lines.append((step, line))

    def flush(self) -> None:
        """What is noted is in the storage, or kept for the next time."""
        if self._lines:
            first, last = self._lines[0][0], self._lines[-1][0]
            key = f"{self._folder}/rank-{self._world_rank:05d}/{first:010d}-{last:010d}.jsonl"
            self._unwritten.append((key, "".join(line + "\n" for _, line in self._lines).encode()))
            self._lines.clear()
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            key, data = self._unwritten[0]
            try:
                self._store.put(key, data)
            except StorageError as error:
                if not self._warned:
                    logger.warning("The sample log cannot be written now; it is kept until the next save: %s", error)
                self._warned = True
                return
            self._unwritten.pop(0)
        self._warned = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAudit:
    """What the surviving steps trained on, against what the order says.

    steps: step -> sorted sample ids (all ranks), surviving steps only, up to the newest commit.
    repeated, skipped: samples trained on more, or less, often than the order says for the committed cursor.
    """

    samples: int
    repeated: int
    skipped: int
    steps: Mapping[int, tuple[int, ...]] = field(repr=False)


def audit(store: ObjectStore, dataset: str = "train") -> SampleAudit:
    """Compare the sample log of a run with its order, from storage alone.

    Raises:
        ConfigError: the run has no commit, or was not made with `GoodputTrainer(sample_log=True)`.
    """
    commits = CommitLog(run="", store=store, clock=SystemClock())
    commits.open()
    newest = commits.newest()
    if newest is None or dataset not in newest.cursors:
        raise ConfigError(f"No commit with a cursor of {dataset!r} in {store.uri}: there is nothing to audit.")
    steps = surviving_steps(store, dataset, last_step=newest.checkpoint.step)
    if not steps:
        raise ConfigError(f"No sample log in {store.uri}: train with GoodputTrainer(sample_log=True) to audit a run.")
    consumed = int(newest.cursors[dataset]["samples_consumed"])
    order = load_order(store, dataset)
    data_shards, rows = order.locate(np.arange(consumed, dtype=np.int64))
    expected = Counter(order.sample_ids(data_shards, rows).tolist())
    seen = Counter(sample for ids in steps.values() for sample in ids)
    return SampleAudit(
        samples=sum(seen.values()),
        repeated=sum((seen - expected).values()),
        skipped=sum((expected - seen).values()),
        steps=steps,
    )


def surviving_steps(store: ObjectStore, dataset: str, *, last_step: int) -> dict[int, tuple[int, ...]]:
    """Step -> sorted sample ids of the attempt whose pass through that step survived.

    A step of attempt a survives if no later attempt began at or before it.
    """
    resumed: dict[int, int] = {}
    lines: dict[int, dict[int, list[int]]] = {}
    for info in store.list("samples"):
        match = _KEY.fullmatch(info.key)
        if not match:
            continue
        attempt = int(match[1])
        data = store.get(info.key)
        if match[2] is None:
            resumed[attempt] = int(json.loads(data)["step"])
            continue
        for line in data.splitlines():
            entry = json.loads(line)
            if entry["dataset"] == dataset:
                lines.setdefault(attempt, {}).setdefault(entry["step"], []).extend(entry["sample_ids"])
    survived: dict[int, tuple[int, ...]] = {}
    for attempt, steps in sorted(lines.items()):
        end = min((step for later, step in resumed.items() if later > attempt), default=last_step)
        for step, ids in steps.items():
            if step <= min(end, last_step):
                survived[step] = tuple(sorted(ids))
    return survived
